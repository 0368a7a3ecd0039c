"""The processes of a run, as torchrun starts them: what they tell each other.

A failure in what they do together ends all, with one message. One that fails in its own share of the images ends alone,
with its message, and torchrun stops the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # of processes whose share was done first; one that died is noticed at once


class Processes:
    """This process among those that share the work; alone where torchrun did not start it. A context manager.

    Attributes:
        rank: 0 .. size - 1. local: the same among those of this machine.
    """

    def __init__(self) -> None:
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
        self.rank, self.size, self.local = (int(os.environ.get(name, alone)) for name, alone in names.items())

    def __enter__(self) -> Processes:
        if self.size > 1:
            dist.init_process_group("gloo", timeout=PATIENCE)  # they tell each other only a few words
        return self

    def __exit__(self, *_: object) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def device(self, wanted: str) -> str:
        """A GPU of its own for each process, where the user leaves it open which."""
        if self.size > 1 and torch.cuda.is_available() and wanted in ("auto", "cuda"):
            return f"cuda:{self.local}"
        return wanted

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns in this process, once all have done it.

        Raises:
            ValueError, OSError, OutOfMemoryError: as `work` here, in the first process where it failed.
            SystemExit: it failed in another, which says so. OSError: another process is gone.
        """
        result, error = None, None
        try:
            result = work()
        except (ValueError, OSError, torch.OutOfMemoryError) as failure:
            error = failure
        failed = [rank for rank, bad in enumerate(self._exchange(error is not None)) if bad]
        if failed and failed[0] == self.rank:
            raise error
        if failed:
            raise SystemExit(2)
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
