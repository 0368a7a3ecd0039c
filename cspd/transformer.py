"""What transformers over an image's tokens share: RMSNorm, rotary angles, and the part of a cache that a pass reads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Constants are created once, which saves a round their launches.


def steps(count: int, device: torch.device) -> Tensor:
    """int64 [count]: 0, 1, ..., count - 1. The tensor is shared: do not write to it."""
    if torch.compiler.is_compiling():  # the compiler fuses it, and cannot trace through the cache
        return torch.arange(count, device=device)
    return _made_once(count, device)


@functools.lru_cache(maxsize=1024)
def _made_once(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # an ordinary tensor, which training can use too
        return torch.arange(count, device=device)


@dataclass(frozen=True)
class CacheView:
    """The part of a key-value cache that one forward pass reads and writes.

    Attributes:
        keys, values: of each layer, [rows, heads, columns, head_dim], shared by all sequences, written in place.
        rows: the cache row of each of B sequences, int64 [B], or a slice, which saves copies.
        columns: the columns that their N inputs are written to: int64 [B, N], or if they are the same for all
            sequences int64 [N] or a slice.
        width: the number of columns that are read, from the first.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    rows: Tensor | slice
    columns: Tensor | slice
    width: int

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values [B, heads, N, head_dim]; returns those of all columns [B, heads, width, head_dim]."""
        keys = self._update(self.keys[layer], key)
        values = self._update(self.values[layer], value)
        return keys, values

    def _update(self, cache: Tensor, new: Tensor) -> Tensor:
        new = new.to(cache.dtype)
        if isinstance(self.columns, slice) or (self.columns.dim() == 1 and isinstance(self.rows, slice)):
            cache[self.rows, :, self.columns] = new
            return cache[self.rows, :, : self.width]

        # indexed by [B, 1] and [B, N] around a slice, the cache has the shape [B, N, heads, head_dim]
        new = new.transpose(1, 2)
        if isinstance(self.rows, slice):
            row = steps(len(new), new.device).unsqueeze(1)
            cache[self.rows][row, :, self.columns] = new
        else:
            row = self.rows.unsqueeze(1)
            cache[row, :, self.columns] = new
        return cache[self.rows, :, : self.width]


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turns pairs of channels of x [B, N, heads, head_dim] by the angles of table [B or 1, N, head_dim / 2, 2]."""
    pairs = x.float().unflatten(-1, (-1, 2))
    table = table.unsqueeze(2)
    if torch.compiler.is_compiling():  # the compiler fuses real products into one kernel, but not complex ones
        a, b = pairs.unbind(-1)
        cos, sin = table.unbind(-1)
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table))
    return turned.flatten(-2).type_as(x)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).type_as(x)


class SwiGLU(nn.Module):
    """SwiGLU; `w1` has both of its inputs."""

    def __init__(self, in_dim: int, hidden_dim: int, dim: int, bias: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Linear(in_dim, 2 * hidden_dim, bias=bias)
        self.w2 = nn.Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w1(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * value)
