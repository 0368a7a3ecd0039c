"""The target's features before the codes of running sequences, which EAGLE's drafter takes in."""

from __future__ import annotations

import torch
from torch import Tensor

from cspd.discrete.batch import Batch
from cspd.vq.steps import steps


class PastFeatures:
    """Features [2, slots, 1 + columns, dim], of a condition and the null condition, allocated on first use.

    The feature at position p is in column p + 1; there is none before a class, so that the first is 0.
    """

    def __init__(self, num_slots: int, columns: int, dim: int, device: torch.device) -> None:
        self._shape, self._device = (2, num_slots, 1 + columns, dim), device
        self._tensor: Tensor | None = None

    def _features(self) -> Tensor:
        if self._tensor is None:
            self._tensor = torch.zeros(self._shape, device=self._device)
        return self._tensor

    def clear(self, slots: Tensor) -> None:
        """Zeroes slots, int64 [n]."""
        if self._tensor is not None:
            self._tensor.index_fill_(1, slots, 0)

    def before(self, batch: Batch, position: Tensor) -> Tensor:
        """The features before positions [B, N]: [copies, B, N, dim]."""
        return self._features()[: batch.copies, batch.slot.unsqueeze(1), position]

    def keep(self, batch: Batch, features: Tensor, ahead: int = 0) -> None:
        """Keeps features [copies, B, n, dim] at the input `ahead` of the last committed one and those after it."""
        place = batch.known_t.unsqueeze(1) + 1 + ahead + steps(features.shape[2], self._device)
        kept = self._features()[: batch.copies]
        kept[:, batch.slot.unsqueeze(1), place] = features.float()
