"""Help and errors of the command line appear at once: nothing that takes seconds is imported for them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from cspd.cli import flags, main
from cspd.cli.flags import COMMANDS, SHOWN_OF_METHODS, parser_of
from cspd.cli.listing import uses
from cspd.comparison.compare import FEWEST
from cspd.device import POLICIES
from cspd.method import METHODS
from cspd.option import MAR_OPTIONS
from mar.head import TRAIN_STEPS

SLOW = (
    "torch",
    "torch._dynamo",
    "timm",
    "torchvision",
    "transformers",
    "matplotlib",
    "scipy",
    "fastapi",
    "ray",
    "prometheus_client",
)
LINES = {"sample": 59, "compare": 82}  # of the short help, 80 columns wide
MOST_LINES = 74  # of other commands


def imported(code: str) -> str:
    """What some code prints in a process of its own, in which it may call `slow()`: the modules of `SLOW` so far."""
    program = f"import sys\ndef slow():\n    return [m for m in {SLOW} if m in sys.modules]\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def shown(*arguments, capsys):
    with pytest.raises(SystemExit):
        main([*arguments])
    return capsys.readouterr().out


def test_help_and_errors_import_nothing_slow():
    lines = [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS), ["sampel"]]
    code = f"""
from cspd.cli import main
for line in {lines}:
    try:
        main(line)
    except SystemExit:
        pass
print(slow())
"""
    assert imported(code).splitlines()[-1] == "[]"


def test_the_package_imports_no_slow_library_but_torch():
    """timm, torchvision and transformers are needed for ImageNet's names, Inception and text encoders only.

    A request has its settings before anything else is imported. Commands that can run on Ray import it only if they do.
    """
    code = """
from cspd import Request
print(Request(3, cfg=2.0, window=4).cfg)
import cspd
cspd.load("digits32", device="cpu").sample(3, num_iter=1, num_sampling_steps=2, window=0)
print(slow())
import cspd.cli.sample, cspd.cli.evaluate
print("ray" in slow())
"""
    assert imported(code).splitlines() == ["2.0", "['torch']", "False"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_short_help_fits_on_a_screen_and_the_long_one_has_every_flag(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    short = shown(command, "--help", capsys=capsys)
    assert short.count("\n") <= LINES.get(command, MOST_LINES)
    parser = parser_of([command], METHODS)
    commands = next(action for action in parser._actions if action.dest == "command")
    known = {flag for action in commands.choices[command]._actions for flag in action.option_strings}
    long = shown(command, "--help-all", capsys=capsys)
    assert all(flag in long for flag in known)


def test_flags_of_methods_in_the_help(capsys):
    """The short help knows two, whose texts it cannot import; the long one has each meaning of a flag once."""
    for flag, (metavar, text) in SHOWN_OF_METHODS.items():
        method = re.search(r"--method ([a-z]+)", text)[1]
        assert f"{flag} {metavar} " in shown("sample", "--help", capsys=capsys)
        own = next(use for use in uses(METHODS) if use.option.flag == flag and use.section([]).startswith(method))
        default = re.search(r"\(default: .*\)", text)[0]
        assert own.option.metavar == metavar and default in f"{own.option.help} (default: {own.default()})"
    long = shown("sample", "--help-all", capsys=capsys)
    assert long.count("  --head-calls N") == 2 and "with --chains" not in long.partition("calibrated (")[2]


@pytest.mark.parametrize("method", sorted({method.name for method in METHODS}))
def test_help_of_a_method_has_its_flags_and_no_others(method, capsys):
    text = shown("sample", "--help", method, capsys=capsys)
    own = [option.flag for each in METHODS if each.name == method for option in each.options]
    assert all(flag in text for flag in own) and "--checkpoint" not in text


def test_help_by_an_earlier_name(capsys):
    assert shown("sample", "--help", "cspd", capsys=capsys) == shown("sample", "--help", "mar-draft", capsys=capsys)


@pytest.mark.parametrize("words", [["--help", "gtrr"], ["--help=gtrr"]])
def test_help_of_an_unknown_method_is_an_error(words, capsys):
    assert main(["sample", *words]) == 2
    assert "did you mean gtr?" in capsys.readouterr().err


def test_constants_of_modules_that_are_not_imported():
    (steps,) = (option for option in MAR_OPTIONS if option.name == "num_sampling_steps")
    assert steps.high == TRAIN_STEPS
    assert flags.PRECISIONS == tuple(POLICIES)
    assert flags.FIRST_RUNG == FEWEST
