"""Saying what takes its time."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

PATIENCE = 0.7  # seconds


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
