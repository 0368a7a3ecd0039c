"""Keys and values of running sequences, and who looks at which."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cspd.vq.gpt import CacheView, GPTConfig

MOST_NODES = 80  # inputs of one forward beyond what is committed: the class or last code, and what is drafted
WIDTH_STEP = 8  # columns are looked at in multiples of this, so that shapes repeat


class Cache:
    """Keys and values, [2, layers, 2 * slots, columns, heads, head_dim], allocated once.

    Rows 2s and 2s + 1 are slot s under its class and the null class; an input at position p goes to column p, and what
    is drafted beyond it, on any path, to columns after that.
    """

    def __init__(
        self, config: GPTConfig, length: int, layers: int, num_slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        columns = -(-(length + MOST_NODES) // WIDTH_STEP) * WIDTH_STEP
        shape = (2, layers, 2 * num_slots, columns, config.n_head, config.head_dim)
        self.tensor = torch.zeros(shape, device=device, dtype=dtype)

    def width(self, least: int) -> int:
        """How many columns to look at, at least so many."""
        return min(-(-least // WIDTH_STEP) * WIDTH_STEP, self.tensor.shape[3])

    def view(self, rows: Tensor | slice, columns: Tensor, width: int) -> CacheView:
        return CacheView(*self.tensor, rows, columns, width)

    def move(self, rows: Tensor | slice, source: Tensor, target: Tensor) -> None:
        """Copies columns `source` [R, n] of R rows onto columns `target`."""
        if isinstance(rows, slice):
            rows = torch.arange(self.tensor.shape[2], device=self.tensor.device)[rows]
        rows = rows.unsqueeze(1)
        self.tensor[:, :, rows, target] = self.tensor[:, :, rows, source]


def mask_of(start: Tensor, sees: Tensor, width: int) -> Tensor:
    """bool [B, N, width]: all columns before start [B], and what sees [N, M] or [B, N, M] says of those from it on."""
    offset = torch.arange(width, device=start.device) - start.unsqueeze(1)
    count = sees.shape[-1]
    index = torch.where((offset < 0) | (offset >= count), count, offset).unsqueeze(1)
    padded = functional.pad(sees, (0, 1)).expand(len(start), -1, -1)
    own = padded.gather(2, index.expand(-1, padded.shape[1], -1))
    return (offset < 0).unsqueeze(1) | own
