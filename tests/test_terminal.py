"""Parsing what is typed, and the progress of slow work."""

from __future__ import annotations

import argparse
import io
import re
import shlex
import subprocess
import sys
import threading
import time

import launching
import numpy as np
import pytest
from stores import small_checkpoint

from cspd import terminal
from cspd.cli import main
from cspd.continuous.tuning import choose_window
from cspd.terminal import (
    MOST_LISTED,
    box,
    count_list,
    float_list,
    fraction,
    host_names,
    label_list,
    label_of,
    name_list,
    number_list,
    seed,
    tolerance,
    value_of,
    whole,
)
from cspd.tuner import PLAIN, Times


@pytest.mark.parametrize(
    "parse, text, value",
    [
        (number_list, "3", [3]),
        (number_list, "1,5,7-9", [1, 5, 7, 8, 9]),
        (label_list, "0-2,golden retriever,none", [0, 1, 2, "golden retriever", None]),
        (label_of, " 3 ", 3),
        (label_of, "none", None),
        (label_of, " golden retriever", "golden retriever"),
        (float_list, "1,3.5", [1.0, 3.5]),
        (name_list, "ar, mar-draft:gamma=8", ["ar", "mar-draft:gamma=8"]),
        (fraction, "0.5", 0.5),
        (box, "8,8,16,16", (8, 8, 16, 16)),
        (tolerance, "fid=2%, accuracy=0.5%", {"fid": 0.02, "accuracy": 0.005}),
        (host_names, "demo.example.org,::1", ["demo.example.org", "::1"]),
        (value_of, "1.5", 1.5),
        (value_of, "cosine", "cosine"),
        (value_of, "[1]", "[1]"),
        (seed, f"{2**63 - 1}", 2**63 - 1),
    ],
)
def test_what_is_parsed(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    "parse, texts",
    [
        (number_list, ["", "a", "1-", "3-1", "1,,2", "0-99999999", "0-99999,1"]),
        (count_list, ["0", "3-1"]),
        (label_list, ["1-", "3-1,none", "seven,1-", "0-99999,two", "a," * MOST_LISTED]),
        (label_of, ["1,2", "0-99999", "3-", ""]),
        (float_list, ["", "a"]),
        (name_list, ["", "ar,", "ar,ar"]),
        (fraction, ["0", "1", "nan", "x"]),
        (box, ["1,2,3", "1,2,3,-4"]),
        (tolerance, ["fid", "fid=2", "ssim=2%", "fid=1%,fid=2%"]),
        (host_names, ["http://gpu1"]),
        (whole(1, 9), ["0", "10", "-1", "1.0", "\u0663"]),
    ],
)
def test_what_is_rejected(parse, texts):
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match="expected ") as error:
            parse(text)
        assert len(str(error.value)) < 200


def test_only_slow_work_is_mentioned(monkeypatch, capsys):
    with terminal.telling("counting sheep"):
        pass
    monkeypatch.setattr(terminal, "PATIENCE", 0.01)
    with terminal.telling("counting sheep"):
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()
    assert capsys.readouterr().err == "cspd: counting sheep ...\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream, has_bar", [(io.StringIO, False), (Terminal, True)])
def test_counted_work_is_estimated_once(stream, has_bar, monkeypatch):
    """On a terminal a bar follows."""
    monkeypatch.setattr(sys, "stderr", err := stream())
    monkeypatch.setattr(terminal, "PATIENCE", 0.05)
    with terminal.counting("counting sheep", 40) as advance:
        for _ in range(5):
            time.sleep(0.1)
            advance(1)
    first, *rest = err.getvalue().split("\n")
    estimate = re.fullmatch(r"cspd: counting sheep: about (\d+) s", first)
    assert estimate and 4 <= int(estimate[1]) < 40
    assert "".join(rest).count("%|") > 2 if has_bar else rest == [""]


def test_a_bar_without_a_terminal_is_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "SELDOM", 0.2)
    with terminal.progress_bar(total=50) as bar:
        for _ in range(50):
            time.sleep(0.01)
            bar.update()
            bar.set_postfix_str("each asks for a line")
    lines = capsys.readouterr().err.split("\n")
    assert lines[0].startswith("0%|") and lines[-2].startswith("100%|") and lines[-1] == ""
    assert 3 <= len(lines) <= 6 and "\r" not in "".join(lines)


def test_a_bar_on_a_terminal_is_replaced(monkeypatch):
    monkeypatch.setattr(sys, "stderr", err := Terminal())
    with terminal.progress_bar(total=2, mininterval=0) as bar:
        bar.update(2)
    assert err.getvalue().count("\r") > 1 and err.getvalue().count("\n") == 1


@pytest.mark.parametrize("streams", [["stdout"], ["stderr"], ["stdin", "stdout", "stderr"]])
def test_a_closed_stream_ends_no_command(streams, monkeypatch):
    with monkeypatch.context() as patch:
        for name in streams:
            patch.setattr(sys, name, None)  # as Python leaves it after `>&-`
        assert main(["methods"]) == 0
        for name in streams:
            getattr(sys, name).close()


OPENED = """
import sys
from cspd.terminal import open_streams
open_streams()
sys.exit(open(sys.executable).fileno() < 3)
"""


def test_no_file_gets_the_number_of_a_closed_stream():
    """C libraries would print into it."""
    command = shlex.join([sys.executable, "-c", OPENED])
    assert subprocess.run(f"{command} <&- >&- 2>&-", shell=True, env=launching.environment()).returncode == 0


@pytest.mark.parametrize("rows, calibrates", [(1, True), (64, False), (10**8, False)])
def test_no_calibration_if_no_window_can_pay(rows, calibrates):
    """A round costs in proportion to its inputs beyond eight; for very many rows there is no memory."""
    sizes = [1, 2, 4, 8, 16, 32, 64, 128]
    inputs = [8 * size for size in sizes]

    def seconds(of):
        return [1e-3 * max(1, size / 8) for size in of]

    curves = {"ancestral": [sizes, seconds(sizes)], "start": [sizes, [1e-5] * 8], "round": [inputs, seconds(inputs)]}
    times = Times({work: np.array(curve) for work, curve in curves.items()})
    calls = []

    def calibrate():
        calls.append(1)
        raise InterruptedError

    if calibrates:
        with pytest.raises(InterruptedError):
            choose_window(times, 10**9, 100, rows, calibrate)
    else:
        assert choose_window(times, 10**9, 100, rows, calibrate).config == PLAIN
    assert bool(calls) == calibrates


def test_a_window_of_0_is_explained(tmp_path, capsys):
    quick = ["--checkpoint", small_checkpoint(), "--device", "cpu", "--num-iter", "2", "--labels", "3"]
    command = ["sample", *quick, "--num-sampling-steps", "2", "--out", str(tmp_path)]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "window 0: nothing was drafted: temperature=1.0, num_sampling_steps=2" in shown.out
    assert "/1 images [" in shown.err
    assert main(command) == 0  # nothing is left to do: no progress bar
    assert "[" not in capsys.readouterr().err
