"""Saying what takes its time."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

PATIENCE = 0.7  # seconds
Advance = Callable[[float], None]  # is told how much more is done
BAR = "{l_bar}{bar}| [{elapsed}<{remaining}]"


def no_advance(amount: float) -> None:
    """For work that nobody waits for."""


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """Says on the error stream what is being done, if it is not done in a moment."""
    timer = threading.Timer(PATIENCE, lambda: print(f"cspd: {what} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def counting(what: str, total: float) -> Iterator[Advance]:
    """Says on the error stream what is being done, and about how long it takes, if it is not done in a moment.

    On a terminal a bar follows.

    Yields:
        A function that is told how much more of `total` is done.
    """
    start = time.perf_counter()
    done = 0.0
    bar = None

    def advance(amount: float) -> None:
        nonlocal done, bar
        done += amount
        spent = time.perf_counter() - start
        if bar is None and spent > PATIENCE:
            print(f"cspd: {what}: about {spent * total / done:.0f} s", file=sys.stderr, flush=True)
            bar = tqdm(total=total, initial=done, leave=False, bar_format=BAR, disable=None)
        elif bar is not None:
            bar.update(amount)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.close()
