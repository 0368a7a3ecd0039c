"""Keys and values of running sequences, the mask of a forward pass, and the memory that rounds take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cspd.device import Precision
from cspd.transformer import CacheView, steps

MOST_NODES = 80  # the maximum number of inputs of one forward pass: the root and the drafted tokens
WIDTH_STEP = 8  # widths are multiples of this, so that shapes repeat


def rows_of(slot: Tensor, first: int | None, num_branches: int) -> Tensor | slice:
    """Cache rows [B * branches] of sequences, with a sequence's branches side by side.

    Args:
        slot: int64 [B], ascending. first: the first slot if slots are consecutive, otherwise None.
        num_branches: 2 with guidance, otherwise 1.
    """
    if first is None:
        rows = 2 * slot.unsqueeze(1) + steps(num_branches, slot.device)
        return rows.flatten()
    # a slice is a view; an index would copy
    begin = 2 * first
    last = begin + 2 * (len(slot) - 1)
    return slice(begin, last + 2) if num_branches == 2 else slice(begin, last + 1, 2)


def most_columns(config: Any) -> int:
    """The maximum number of columns per sequence: its condition, its tokens, and tokens drafted beyond the end."""
    columns = config.prefix_length - 1 + config.block_size + MOST_NODES
    if config.row_end is not None:  # see `cspd.discrete.row_ends`
        row_ends = config.grid + MOST_NODES // config.grid
        siblings = 2 * MOST_NODES
        columns += row_ends + siblings + 2
    return stepped(columns)


def stepped(width: int) -> int:
    """A width rounded up to a multiple of WIDTH_STEP."""
    return -(-width // WIDTH_STEP) * WIDTH_STEP


class KVCache:
    """Keys and values, [2, layers, 2 * slots, heads, columns, head_dim], allocated once.

    Rows 2s and 2s + 1 hold the conditional and the unconditional branch of slot s. The condition's inputs are in the
    first columns. The input at position p is p columns after the last of these; drafted tokens follow it.
    """

    def __init__(
        self, config: Any, columns: int, layers: int, num_slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (2, layers, 2 * num_slots, config.key_heads, columns, config.head_dim)
        self.tensor = torch.zeros(shape, device=device, dtype=dtype)
        keys, values = self.tensor
        self._keys = keys.unbind()
        self._values = values.unbind()
        # for each row and head, the number of vectors that come before its own in memory
        heads = torch.arange(self.tensor.shape[:-2].numel(), device=device)
        self._before = columns * heads.view(2 * layers, 2 * num_slots, -1)

    def clear(self, slots: Tensor) -> None:
        """Zeroes slots, int64 [n]. Masked values have weight 0, but NaN times 0 would be NaN."""
        self.tensor.unflatten(2, (-1, 2)).index_fill_(2, slots, 0)

    def view_and_mask(
        self,
        rows: Tensor | slice,
        start: Tensor,
        most: int,
        together: bool,
        count: int,
        seen: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> tuple[CacheView, Tensor | None]:
        """The columns that a forward pass writes to, and the columns that each input looks at.

        Args:
            rows: int64 [R] or a slice. start: int64 [R], the column of the first input. most: an upper bound of
                `start`, a Python integer. together: whether all of `start` equal it. count: N, inputs per row.
            seen, columns: as in `cspd.discrete.runner.VQRunner.features`.

        Returns:
            The view, and a mask, bool [R or 1, 1, N, width], or None if all inputs look at all columns.
        """
        own = steps(count, start.device) if columns is None else columns
        num_seen = count if seen is None else seen.shape[-1] - 2
        width = most + num_seen
        if not together:  # then a mask is needed anyway, and a wider one makes fewer different shapes
            width = min(stepped(width), self.tensor.shape[4])

        # where keys and values go
        targets: Tensor | slice
        if together and columns is None:
            targets = slice(most, most + count)
        else:
            targets = start.unsqueeze(1) + own
        view = self.view(rows, targets, width)

        # which columns each input looks at; if all are together, one mask serves all
        if together and seen is None and count == 1:
            return view, None
        first = start[:1] if together else start
        if seen is None:
            last = first.unsqueeze(1) + own
            mask = steps(width, start.device) <= last.unsqueeze(-1)
        else:
            mask = mask_of(first if seen.dim() == 2 else start, seen, width)
        return view, mask.unsqueeze(1)

    def view(self, rows: Tensor | slice, columns: Tensor | slice, width: int) -> CacheView:
        """The part of the cache that a forward pass reads and writes; arguments as of `CacheView`."""
        return CacheView(self._keys, self._values, rows, columns, width)

    def move(self, rows: Tensor | slice, source: Tensor, target: Tensor) -> None:
        """Copies columns `source` [R, n] of R rows onto columns `target` [R, n]."""
        before = self._before[:, rows].unsqueeze(-1)
        source = (before + source.unsqueeze(1)).flatten()
        target = (before + target.unsqueeze(1)).flatten()
        vectors = self.tensor.flatten(end_dim=-2)
        vectors.index_copy_(0, target, vectors.index_select(0, source))


def seen_of(sees: Tensor) -> Tensor:
    """bool [..., N, M + 2]: `sees` [..., N, M] between a column of True (all before) and one of False (all after)."""
    column = (*sees.shape[:-1], 1)
    before = sees.new_ones(column)
    beyond = sees.new_zeros(column)
    return torch.cat([before, sees, beyond], -1)


def mask_of(start: Tensor, seen: Tensor, width: int) -> Tensor:
    """bool [R, N, width]: True before column start [R]; from it on, the columns of a `seen_of` mask."""
    # by a gather, since `start` is on the device and differs from row to row
    num_inputs, num_seen = seen.shape[-2:]
    column = steps(width + 1, start.device)[1:]
    index = column - start.unsqueeze(1)  # in `seen`, whose column 0 stands for all before start
    index = index.clamp(0, num_seen - 1).unsqueeze(1)
    seen = seen.expand(len(start), -1, -1)
    return seen.gather(2, index.expand(-1, num_inputs, -1))


# Estimates of memory, made before anything is allocated.

WORKING = 10  # tensors [nodes, vocab_size] that a round holds at once, at most


def bytes_per_slot(target: Any, others: Iterable[Any], precision: Precision) -> int:
    """Estimated peak bytes that a slot adds: key-value caches, and the distributions of a round.

    `target` is a GPT; `others`: the models that draft; None stands for a model that was not loaded.
    """
    total = working_bytes(target.config)
    for model in (target, *others):
        if model is not None:
            total += cache_bytes(target.config, model.config, len(model.layers), precision.type_of(model))
    return total


def cache_bytes(target: Any, config: Any, layers: int, dtype: torch.dtype) -> int:
    """Bytes of one slot's key-value cache for a model.

    Args:
        target: the configuration of the target, which decides the number of columns. config: that of the model.
    """
    tensors = 4  # keys and values, for each of the two guidance branches
    return tensors * dtype.itemsize * layers * most_columns(target) * config.key_heads * config.head_dim


def working_bytes(config: Any) -> int:
    """The most bytes that one slot's float32 distributions take during a round."""
    return torch.float32.itemsize * MOST_NODES * config.vocab_size * WORKING
