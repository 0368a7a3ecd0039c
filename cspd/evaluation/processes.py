"""The processes of a run, as torchrun starts them, and what they exchange.

A failure in what they do together ends all of them, with one message. A process that fails in its own share of the
images ends alone, with its own message, and torchrun stops the others.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from cspd.parsing import shortened

T = TypeVar("T")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # that torchrun sets
REMEDY = f"torchrun sets {', '.join(VARIABLES)}; for one process unset them"
PATIENCE = timedelta(days=7)  # for the slowest process to finish its share; one that died is noticed at once
POLL = 0.05  # seconds between looks whether all are there


class Processes:
    """This process among those that share the work, a context manager; the only one if torchrun did not start it.

    Attributes:
        rank: 0 .. size - 1. size: the number of processes. local: the rank among those of this machine.
    """

    def __init__(self) -> None:
        """Raises ValueError where the launcher's variables are not whole numbers that fit, or some are missing."""
        self.size = _number("WORLD_SIZE", 1, low=1)
        self.rank = _number("RANK", 0, high=self.size - 1)
        self.local = _number("LOCAL_RANK", 0)
        missing = [name for name in VARIABLES if name not in os.environ]
        if self.size > 1 and missing:
            raise ValueError(f"WORLD_SIZE={self.size} without {', '.join(missing)}: {REMEDY}")
        if self.size > 1:
            _number("MASTER_PORT", 0, high=65535)

    def __enter__(self) -> Processes:
        if self.size > 1:
            try:
                dist.init_process_group("gloo")  # they tell each other only a few words
                self._waiting = dist.new_group(timeout=PATIENCE)
            except RuntimeError as error:
                place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                raise OSError(f"not all of the {self.size} processes of this run have met at {place}") from error
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if self.size > 1 and failure is None:  # after a failure it would wait for the other processes
            dist.destroy_process_group()

    def device(self, wanted: str) -> str:
        """A GPU of its own for each process, unless the user names one."""
        if self.size > 1 and torch.cuda.is_available() and wanted in ("auto", "cuda"):
            return f"cuda:{self.local}"
        return wanted

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns in this process, once all have done it.

        Raises:
            ValueError, OSError, OutOfMemoryError: as `work` here, in the first process where it failed.
            SystemExit: it failed in another process, which reports it. OSError: another process is gone.
        """
        result, error = None, None
        try:
            result = work()
        except (ValueError, OSError, torch.OutOfMemoryError) as failure:
            error = failure
        failures = self._exchange(error is not None)
        if any(failures):
            first = failures.index(True)
            raise error if first == self.rank else SystemExit(2)
        return result

    def from_first(self, work: Callable[[], T]) -> T:
        """What `work` returns in the first process, which alone does it; errors as in `together`."""
        return self._exchange(self.together(lambda: work() if self.rank == 0 else None))[0]

    def _exchange(self, value: object) -> list:
        """The values of all processes, by rank."""
        values = [value] * self.size
        if self.size > 1:
            try:
                self._wait()
                dist.all_gather_object(values, value)
            except RuntimeError as gone:
                raise OSError("another process of this run is gone; the same command goes on from here") from gone
        return values

    def _wait(self) -> None:
        """Until all processes are here. Python handles signals between the looks, and none within a collective."""
        barrier = dist.barrier(self._waiting, async_op=True)
        while not barrier.is_completed():
            time.sleep(POLL)
        barrier.wait()  # raises its errors


def _number(name: str, default: int, low: int = 0, high: float = math.inf) -> int:
    """The launcher's variable of this name."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not low <= int(text) <= high:
        to = "on" if high == math.inf else f"to {high}"
        why = " (WORLD_SIZE - 1)" if name == "RANK" else ""
        raise ValueError(f"{name}={shortened(text)} is not a whole number from {low} {to}{why}: {REMEDY}")
    return int(text)
