"""Ending early: on a signal, with what was done, and when the launcher is gone.

It imports nothing that takes time, so that a command can be stopped from its first moment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

# Ctrl-C; the machine or a scheduler; the terminal was closed (Windows knows no SIGHUP)
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
POLL = 1.0  # seconds between looks at the launcher
GRACE = 5.0  # seconds that a process without its launcher has to end by itself


class Stopped(KeyboardInterrupt):
    """A signal ends the command. `number` is the signal's; `done` says what was done, "" if nothing is known."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.strsignal(number))
        self.number = number
        self.done = ""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Within it, the first of `SIGNALS` raises `Stopped`; the next one ends the process at once.

    What is ignored, as SIGHUP under nohup, stays ignored. Python handles signals in its main thread only, so that in
    another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heeded = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}

    def stop(number: int, frame: FrameType | None) -> None:
        for each in heeded:
            signal.signal(each, signal.SIG_DFL)
        raise Stopped(number)

    for number in heeded:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def if_stopped(say: Callable[[], str]) -> Iterator[None]:
    """If the command is stopped within it, `say` tells what was done."""
    try:
        yield
    except Stopped as stop:
        stop.done = say()
        raise


def follow_launcher() -> None:
    """Ends this process soon after torchrun, if that started it, is gone: killed, it cannot stop its processes."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a shell that started this process may well end before it
        threading.Thread(target=_follow, args=[os.getppid()], daemon=True).start()


def _follow(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(POLL)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(128 + signal.SIGTERM)  # the main thread is waiting for the other processes, outside Python
