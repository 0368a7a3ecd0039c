"""Help and errors of the command line appear at once: nothing that takes seconds is imported for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cspd.cli import flags, main
from cspd.cli.flags import COMMANDS, parser_of
from cspd.comparison.compare import FEWEST
from cspd.device import POLICIES
from cspd.method import METHODS
from cspd.option import MAR_OPTIONS
from mar.head import TRAIN_STEPS

SLOW = ("torch", "torch._dynamo", "timm", "torchvision", "transformers", "matplotlib", "scipy")
LINES = {"sample": 48}  # of the usual help, 80 columns wide
MOST_LINES = 66  # of other commands


def imported(code: str) -> str:
    """Which of `SLOW` are imported by some code, in a process of its own."""
    program = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint([m for m in {SLOW} if m in sys.modules])"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS), ["sampel"]])
def test_help_and_errors_import_nothing_slow(arguments):
    assert imported(f"from cspd.cli import main; main({arguments})").splitlines()[-1] == "[]"


def test_the_package_imports_no_slow_library_but_torch():
    """timm, torchvision and transformers are needed for ImageNet's names, Inception and text encoders only."""
    code = "import cspd; cspd.load('digits32', device='cpu').sample(3, num_iter=1, num_sampling_steps=2, window=0)"
    assert imported(code) == "['torch']\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_usual_help_fits_on_a_screen_and_all_of_it_has_every_flag(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    usual = capsys.readouterr().out
    assert usual.count("\n") <= LINES.get(command, MOST_LINES)
    parser = parser_of([command], METHODS)
    commands = next(action for action in parser._actions if action.dest == "command")
    known = {flag for action in commands.choices[command]._actions for flag in action.option_strings}
    with pytest.raises(SystemExit):
        main([command, "--help-all"])
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in known)


@pytest.mark.parametrize("method", sorted({method.name for method in METHODS}))
def test_help_of_a_method_has_its_flags_and_no_others(method, capsys):
    with pytest.raises(SystemExit):
        main(["sample", "--help", method])
    shown = capsys.readouterr().out
    own = [option.flag for each in METHODS if each.name == method for option in each.options]
    assert all(flag in shown for flag in own) and "--checkpoint" not in shown


@pytest.mark.parametrize("words", [["--help", "gtrr"], ["--help=gtrr"]])
def test_help_of_an_unknown_method_is_an_error(words, capsys):
    assert main(["sample", *words]) == 2
    assert "gtr" in capsys.readouterr().err


def test_constants_of_modules_that_are_not_imported():
    (steps,) = (option for option in MAR_OPTIONS if option.name == "num_sampling_steps")
    assert steps.high == TRAIN_STEPS
    assert flags.PRECISIONS == tuple(POLICIES)
    assert flags.FIRST_RUNG == FEWEST


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-"])
def test_a_closed_output_is_no_error(closed):
    line = f"exec {sys.executable} -m cspd methods {closed}"
    ended = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
