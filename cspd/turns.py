"""A lock whose waiters get it in the order in which they came."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator


class Turns:
    """Threads that take turns at something. Whoever has the turn may ask for it again.

    Python's own locks are not fair: a thread that runs round after round would hardly ever let another one in.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: deque[object] = deque()  # the first has the turn
        self._thread: int | None = None

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Waits for the turn, and has it within."""
        if self._thread == threading.get_ident():
            yield
            return
        own = object()
        self._waiting.append(own)
        try:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting[0] is own)
            self._thread = threading.get_ident()
            yield
        finally:  # also where a signal ends the waiting
            if self._waiting[0] is own:
                self._thread = None
            with self._condition:
                self._waiting.remove(own)
                self._condition.notify_all()
