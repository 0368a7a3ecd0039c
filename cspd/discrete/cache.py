"""Keys and values of running sequences, and who looks at which."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cspd.vq.gpt import CacheView
from cspd.vq.steps import steps

MOST_NODES = 80  # inputs of one forward beyond what is committed: the root, and what is drafted
WIDTH_STEP = 8  # columns are looked at in multiples of this, so that shapes repeat


def rows_of(slot: Tensor, first: int | None, copies: int) -> Tensor | slice:
    """Cache rows [B * copies] of sequences, a sequence's copies side by side.

    Args:
        slot: int64 [B], ascending; first: of slots that are one after the other, on the host, else None.
        copies: 2 with the null class, else 1.
    """
    if first is not None:  # neighbouring slots: a slice, which is looked at in place where an index would copy
        last = first + len(slot) - 1
        return slice(2 * first, 2 * last + 2) if copies == 2 else slice(2 * first, 2 * last + 1, 2)
    rows = 2 * slot.unsqueeze(1) + steps(copies, slot.device)
    return rows.flatten()


def most_columns(config: Any) -> int:
    """Columns that a target's sequence takes at most: its condition's, the codes', and what is drafted beyond them."""
    columns = config.prefix_length - 1 + config.block_size + MOST_NODES
    if config.row_end is not None:  # of these, and of what is beside the first path, see `cspd.discrete.row_ends`
        columns += config.grid + MOST_NODES // config.grid + 2 * MOST_NODES + 2
    return stepped(columns)


def stepped(width: int) -> int:
    """The least multiple of WIDTH_STEP that is not below a width."""
    return -(-width // WIDTH_STEP) * WIDTH_STEP


class Cache:
    """Keys and values, [2, layers, 2 * slots, heads, columns, head_dim], allocated once.

    Rows 2s and 2s + 1 are slot s under its condition and the null condition. Its inputs are in the first columns; the
    input at position p is p columns after the last of them, and what is drafted beyond it, on any path, after that.
    """

    def __init__(
        self, config: Any, columns: int, layers: int, num_slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (2, layers, 2 * num_slots, config.key_heads, columns, config.head_dim)
        self.tensor = torch.zeros(shape, device=device, dtype=dtype)
        self._keys, self._values = (of_layers.unbind() for of_layers in self.tensor)
        heads = torch.arange(self.tensor.shape[:-2].numel(), device=device)
        self._before = columns * heads.view(2 * layers, 2 * num_slots, -1)  # vectors before those of a row's head

    def clear(self, slots: Tensor) -> None:
        """Zeroes slots, int64 [n]: what is masked counts nothing, but NaN times nothing is NaN."""
        self.tensor.unflatten(2, (-1, 2)).index_fill_(2, slots, 0)

    def look(
        self,
        rows: Tensor | slice,
        start: Tensor,
        most: int,
        together: bool,
        count: int,
        seen: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> tuple[CacheView, Tensor | None]:
        """Where keys and values of a forward go, and which columns each input looks at.

        Args:
            rows: int64 [R] or a slice. start: int64 [R]; most: what it is at most, on the host; together: whether all
                are just that. count: N, inputs of a row.
            seen: bool [N, M + 2] or [R, N, M + 2]; columns: as in `cspd.discrete.host.VQHost.features`.

        Returns:
            The view, and a mask, bool [R or 1, 1, N, width]; None where all inputs look at all columns.
        """
        own = steps(count, start.device) if columns is None else columns
        width = most + (count if seen is None else seen.shape[-1] - 2)
        if not together:
            width = min(stepped(width), self.tensor.shape[4])

        # where keys and values go
        if together and columns is None:
            places = slice(most, most + count)
        else:
            places = start.unsqueeze(1) + own
        view = self.view(rows, places, width)

        # which columns each input looks at; where all are together, the mask of one is that of all
        first = start[:1] if together else start
        if seen is not None:
            mask = mask_of(first if seen.dim() == 2 else start, seen, width)
        elif together and count == 1:
            return view, None
        else:
            last = (first.unsqueeze(1) + own).unsqueeze(-1)
            mask = steps(width, start.device) <= last
        return view, mask.unsqueeze(1)

    def view(self, rows: Tensor | slice, columns: Tensor | slice, width: int) -> CacheView:
        """What a forward of these rows sees and writes; arguments as of `CacheView`."""
        return CacheView(self._keys, self._values, rows, columns, width)

    def move(self, rows: Tensor | slice, source: Tensor, target: Tensor) -> None:
        """Copies columns `source` [R, n] of R rows onto columns `target`."""
        before = self._before[:, rows].unsqueeze(-1)
        source, target = ((before + each.unsqueeze(1)).flatten() for each in (source, target))
        vectors = self.tensor.flatten(end_dim=-2)
        vectors.index_copy_(0, target, vectors.index_select(0, source))


def seen_of(sees: Tensor) -> Tensor:
    """bool [..., N, M + 2]: what sees [..., N, M] says of M columns, after all before them, and before all others."""
    before, beyond = sees.new_ones(*sees.shape[:-1], 1), sees.new_zeros(*sees.shape[:-1], 1)
    return torch.cat([before, sees, beyond], -1)


def mask_of(start: Tensor, seen: Tensor, width: int) -> Tensor:
    """bool [R, N, width]: all columns before start [R], and what `seen_of`, [N, M + 2] or [R, N, M + 2], says of those
    from it on.
    """
    place = steps(width + 1, start.device)[1:] - start.unsqueeze(1)
    index = place.clamp(0, seen.shape[-1] - 1).unsqueeze(1)
    seen = seen.expand(len(start), -1, -1)
    return seen.gather(2, index.expand(-1, seen.shape[1], -1))
