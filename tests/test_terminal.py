"""What takes long says so within a second, and names classes and windows as it ends."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
import time

import pytest
from stores import small_checkpoint

from cspd import terminal
from cspd.cli import main
from cspd.heads.calibration import WINDOWS
from cspd.heads.tuning import Costs
from cspd.method import PLAIN


def test_what_takes_long_is_told_and_nothing_else(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "PATIENCE", 0.01)
    with terminal.telling("counting sheep"):
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()
    assert capsys.readouterr().err == "cspd: counting sheep ...\n"
    monkeypatch.setattr(terminal, "PATIENCE", 1000.0)
    with terminal.telling("counting sheep"):
        pass
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream, has_bar", [(io.StringIO, False), (Terminal, True)])
def test_work_that_is_counted_says_once_how_long_it_takes(stream, has_bar, monkeypatch):
    """From what the first part of it took; a bar follows on a terminal, and nothing is said of what is done at once."""
    monkeypatch.setattr(sys, "stderr", err := stream())
    with terminal.counting("counting sheep", 40) as advance:
        advance(40)
    assert err.getvalue() == ""
    monkeypatch.setattr(terminal, "PATIENCE", 0.05)
    with terminal.counting("counting sheep", 40) as advance:
        for _ in range(8):
            time.sleep(0.1)
            advance(1)
    first, *rest = err.getvalue().split("\n")
    told = re.fullmatch(r"cspd: counting sheep: about (\d+) s", first)
    assert told and 4 <= int(told[1]) < 40
    assert "".join(rest).count("%|") > 3 if has_bar else rest == [""]


@pytest.mark.parametrize("rows, may", [(1, True), (64, False), (10**8, False)])
def test_nothing_is_calibrated_where_no_window_could_be_taken(rows, may):
    """A round costs as its inputs do beyond eight of them; of very many rows there is no memory for it."""
    sizes = [1, 2, 4, 8, 16, 32, 64, 128]
    seconds = [1e-3 * max(1, size / 8) for size in sizes]
    inputs = [8 * size for size in sizes]
    costs = Costs(sizes, seconds, [1e-5] * 8, inputs, [1e-3 * max(1, size / 8) for size in inputs], 10**9)
    with pytest.raises(ZeroDivisionError) if may else contextlib.nullcontext():
        assert costs.choose(100, rows, lambda: 1 / 0).config == PLAIN
    assert WINDOWS[-1] < 100


def test_a_window_of_0_is_explained(tmp_path, capsys):
    quick = ["--checkpoint", small_checkpoint(), "--device", "cpu", "--num-iter", "2", "--labels", "3"]
    why = [*quick, "--num-sampling-steps", "2", "--out", str(tmp_path)]
    assert main(["sample", *why]) == 0
    shown = capsys.readouterr()
    assert (
        "window 0: nothing was drafted: temperature=1.0, num_sampling_steps=2: there is nothing to draft" in shown.out
    )
    assert "2 tokens" not in shown.err and "/64 tokens [" in shown.err
    assert main(["sample", *why]) == 0  # all is there: no bar of nothing
    assert "[" not in capsys.readouterr().err
