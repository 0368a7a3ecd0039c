"""What is left of a chain when it has ended: its token, and a record of how it came about."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Finished:
    """Chains that ended in a round, N of them.

    Attributes:
        owners: who they are, and row: int64 [N], what they are for, as given to `start`. tokens: [N, d].
        record: int8 [N, T]: at the step a round began at, how many steps it decided, negative if the last of them was
            resampled; 0 elsewhere. Each is one head call; the first, ancestral one at T - 1 counts as 1 step.
        tries: of each, residual candidates looked at; fallbacks: how often none of them was kept.
        log_sigma: [N], if traced, log sigma_p summed over channels and steps T - 1 .. 1. log_sigma_last: [N, d], at 0.
    """

    owners: list[Hashable]
    row: Tensor
    tokens: Tensor
    record: Tensor
    tries: list[int]
    fallbacks: list[int]
    log_sigma: Tensor
    log_sigma_last: Tensor


def acceptance(record: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """How many drafted states were judged, and how many accepted: int64 [2, window] by lag, from 1, and [2, T] by step.

    Args:
        record: int8 [N, T] of finished chains, see `Finished`.
    """
    num_steps = record.shape[1]
    _, begin = record.nonzero()
    signed = record[record != 0].astype(np.int64)[:, None]  # a row for each head call
    lag = np.arange(1, window + 1)
    step = begin[:, None] - lag + 1
    drafted = (begin < num_steps - 1)[:, None] & (step > 0)  # the first step is ancestral, and step 0 is never judged
    judged = drafted & (lag <= np.abs(signed))
    accepted = judged & (lag != -signed)
    by_lag = np.stack([judged.sum(0), accepted.sum(0)])
    by_step = np.stack([np.bincount(step[which], minlength=num_steps) for which in (judged, accepted)])
    return by_lag, by_step
