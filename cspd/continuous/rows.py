"""The tokens that an iteration predicts, flat over the sequences of a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from cspd.sequence import Sequence
from cspd.transfer import send_integers

PER_ROW = ("sequence", "offset", "slot", "position", "seed", "scale", "temperature")  # fields of `Rows` on the device
PER_ROW_ON_HOST = ("owner", "iteration", "num_iter")


@dataclass(frozen=True)
class Rows:
    """The tokens that a batch of sequences predicts in one iteration, flat: R rows, a sequence's own in one stretch.

    Attributes:
        sequences: the batch. known, counts: tokens known to, and rows of, each of them, on the host.
        contexts: int64 [2, B], their slots and `known`; the last one again where a graph takes more.
        sequence, offset: int64 [R], index into the batch, and which of that sequence's rows. slot, position, seed:
            int64 [R].
        scale, temperature: float32 [R, 1].
        owner, iteration, num_iter: int64 [R], on the host: `sequence`; the iteration that the timetable predicts the
            row in, from 0; and how many there are.
    """

    sequences: list[Sequence]
    known: list[int]
    counts: list[int]
    contexts: Tensor
    sequence: Tensor
    offset: Tensor
    slot: Tensor
    position: Tensor
    seed: Tensor
    scale: Tensor
    temperature: Tensor
    owner: np.ndarray
    iteration: np.ndarray
    num_iter: np.ndarray

    def at(self, which: np.ndarray) -> Rows:
        """Some of the rows, int64 [n] on the host."""
        index = send_integers(which, self.slot.device)
        on_device = {name: getattr(self, name)[index] for name in PER_ROW}
        on_host = {name: getattr(self, name)[which] for name in PER_ROW_ON_HOST}
        return replace(self, **on_device, **on_host)

    def stretch(self, first: int, count: int) -> Rows:
        """`count` of the rows, one after the other."""
        return replace(self, **{name: getattr(self, name)[first : first + count] for name in PER_ROW + PER_ROW_ON_HOST})
