"""Cases of a GPU check that crash or hang, for its child processes.

Each adds a line to a file when it begins, so that a test sees how often it did.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path

import torch

from cspd.gpu_check import run
from cspd.gpu_check.run import Question, findings, run_question
from cspd.gpu_check.sizes import TINY, Setup

ERROR = RuntimeError("CUDA error: an illegal memory access was encountered")
BROKEN: list[bool] = []  # in a process
STOPPED = 130  # the exit code of a process that Ctrl-C ended


def check(out, asked, **options):
    return run_question(asked, out, Setup(torch.device("cpu"), TINY), **options)


def begun(out: Path, name: str | None = None) -> list[str]:
    log = out.with_suffix(".log")
    if name:
        with log.open("a") as file:
            file.write(f"{name}\n")
    return log.read_text().split() if log.exists() else []


def fine(out):
    begun(out, "fine")
    if BROKEN:
        raise ERROR
    return {"passed": True, "value": float("nan")}


def unusable(out):
    """After it nothing works in its process, as after an invalid access of a GPU's memory."""
    begun(out, "unusable")
    BROKEN.append(True)
    raise ERROR


def killed(out):
    begun(out, "killed")
    os.kill(os.getpid(), signal.SIGKILL)


def hang(out):
    begun(out, "hang")
    time.sleep(600)


def stopped(out):
    """A whole check, which is stopped by Ctrl-C while a case hangs; for a process of its own."""
    run.GRACE_SECONDS = 0.2
    try:
        check(out, question(out, "fine", "hang"))
    except KeyboardInterrupt:
        sys.exit(STOPPED)


def made_by(out, names, settings):
    return {name: functools.partial(globals()[name.split()[0]], out) for name in names}


def question(out, *names):
    return Question("right", functools.partial(made_by, out, names), findings)
