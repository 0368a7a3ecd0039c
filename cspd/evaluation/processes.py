"""The processes of a run, as torchrun starts them, and what they exchange.

A failure in what they do together ends all of them, with one message. A process that fails in its own share of the
images ends alone, with its own message, and torchrun stops the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # for the slowest process to finish its share; one that died is noticed at once


class Processes:
    """This process among those that share the work, a context manager; the only one if torchrun did not start it.

    Attributes:
        rank: 0 .. size - 1. size: the number of processes. local: the rank among those of this machine.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.local = int(os.environ.get("LOCAL_RANK", 0))

    def __enter__(self) -> Processes:
        if self.size > 1:
            dist.init_process_group("gloo", timeout=PATIENCE)  # they tell each other only a few words
        return self

    def __exit__(self, *_: object) -> None:
        if self.size > 1:
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
                dist.all_gather_object(values, value)
            except RuntimeError as gone:
                raise OSError("another process of this run is gone; the same command goes on from here") from gone
        return values
