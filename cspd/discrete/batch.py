"""What a round of VQ codes works on: the batch, the key-value cache, and features of the past."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cspd.discrete.gpt import CacheView, GPTConfig, steps
from cspd.discrete.rules import LEAST_TEMPERATURE, MIXED, Filter, filter_numbers
from cspd.request import Request, Sequence

# Keys and values of running sequences, and who looks at which.

MOST_NODES = 80  # inputs of one forward beyond what is committed: the root, and what is drafted
WIDTH_STEP = 8  # columns are looked at in multiples of this, so that shapes repeat


def rows_of(slot: Tensor, first: int | None, num_branches: int) -> Tensor | slice:
    """Cache rows [B * copies] of sequences, a sequence's copies side by side.

    Args:
        slot: int64 [B], ascending; first: of slots that are one after the other, on the CPU, else None.
        num_branches: 2 with the null class, else 1.
    """
    if first is not None:  # neighbouring slots: a slice, which is looked at in place where an index would copy
        last = first + len(slot) - 1
        return slice(2 * first, 2 * last + 2) if num_branches == 2 else slice(2 * first, 2 * last + 1, 2)
    rows = 2 * slot.unsqueeze(1) + steps(num_branches, slot.device)
    return rows.flatten()


def most_columns(config: Any) -> int:
    """Columns that a target's sequence takes at most: its condition's, the codes', and what is drafted beyond them."""
    columns = config.prefix_length - 1 + config.block_size + MOST_NODES
    if config.row_end is not None:  # of these, and of what is beside the first path, see `cspd.discrete.runner`
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
            rows: int64 [R] or a slice. start: int64 [R]; most: what it is at most, on the CPU; together: whether all
                are just that. count: N, inputs of a row.
            seen: bool [N, M + 2] or [R, N, M + 2]; columns: as in `cspd.discrete.runner.VQRunner.features`.

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


# The sequences of one round, and what is known of them before it: on the CPU, and on the device.

LEAST_BUCKET = 64  # codes committed, in a graph of fixed shape
BUCKETS = 4  # from one power of two to the next
MOST_INPUTS = 4096  # of all sequences, that they begin with and a forward takes in at once, which bounds its memory


class Kind(NamedTuple):
    """What shapes a round beside the settings that its requests share; plain numbers, equal for equal shapes.

    Attributes:
        size: B, sequences. first_slot: of slots that are one after the other, else None.
        num_branches: 2 where the batch is guided: everything is evaluated under the class and under the null class.
        greedy: whether their temperature is 0, of all or of none.
        least, most: bounds of the codes that are committed.
        most_kept: the most codes that a sequence's top-k and top-p keep; 0 where all keep all.
    """

    size: int
    first_slot: int | None
    num_branches: int
    greedy: bool
    least: int
    most: int
    most_kept: int

    @property
    def together(self) -> bool:
        """Whether all have as many codes committed."""
        return self.least == self.most

    def bucketed(self) -> Kind:
        """For a graph: as few different ones as will do, in which nothing follows from how many are committed."""
        first = 0 if self.first_slot == 0 else None  # as where all slots are taken, or one request comes at a time
        return self._replace(first_slot=first, least=0, most=bucket(self.most))


def bucket(most: int) -> int:
    """A width for up to so many codes: multiples of LEAST_BUCKET, then BUCKETS from a power of two to the next."""
    step = max(LEAST_BUCKET, 2 ** (most.bit_length() - 1) // BUCKETS if most else 0)
    return max(step, -(-most // step) * step)


@dataclass(frozen=True)
class Batch:
    """The sequences of one round, B of them, in the order of their slots.

    Attributes:
        request: with the settings that all of them share. kind: see there.
        num_committed: int64 [B], codes committed. committed_rows: int64 [B * copies], the same of each copy.
        slot, seed: int64 [B]. iteration: int64 [B], rounds that the request has taken part in.
        scale, temperature: float32 [B], the latter 1 where it is 0 (`greedy`).
        filter: which codes are kept, None where all are.
        rows: cache rows [B * copies], see `rows_of`.
    """

    request: Request
    kind: Kind
    num_committed: Tensor
    committed_rows: Tensor
    slot: Tensor
    seed: Tensor
    iteration: Tensor
    scale: Tensor
    temperature: Tensor
    filter: Filter | None
    rows: Tensor | slice

    def __len__(self) -> int:
        return self.kind.size

    @property
    def num_branches(self) -> int:
        return self.kind.num_branches

    @property
    def greedy(self) -> bool:
        return self.kind.greedy

    @property
    def same_image(self) -> bool:
        """Whether drafts are accepted where they are what the target draws with the request's own draws."""
        return self.request.coupling == "same-image"


def by_slot(sequences: list[Sequence]) -> list[Sequence]:
    """In the order of their slots, which is that of a batch."""
    return sorted(sequences, key=lambda sequence: sequence.slot)


def packed(sequences: list[Sequence], config: GPTConfig, ahead: Set[Sequence], most_ahead: int) -> tuple[Kind, Tensor]:
    """What a round needs to know of sequences in the order of their slots, for one copy to the device: `unpacked`.

    Args:
        ahead: sequences that have taken part in a round that is not counted yet, each committing up to `most_ahead`.

    Returns:
        (their kind, int64 [7, B] on the CPU: whole numbers, and the bits of float64).
    """
    known = [sequence.num_committed for sequence in sequences]
    slots = [sequence.slot for sequence in sequences]
    settings = [sequence.request.settings for sequence in sequences]
    cfg, temperature, top_k, top_p = ([own[name] for own in settings] for name in MIXED)
    counts, masses, most_kept = filter_numbers(top_k, top_p, config.vocab_size)
    whole = [
        slots,
        [sequence.request.seed for sequence in sequences],
        [sequence.iteration + (sequence in ahead) for sequence in sequences],
        counts,
    ]
    divisors = [1.0 if tau == 0 else max(tau, LEAST_TEMPERATURE) for tau in temperature]
    real = [cfg, divisors, masses]
    bits = torch.tensor(real, dtype=torch.float64).view(torch.int64)
    kind = Kind(
        size=len(sequences),
        first_slot=slots[0] if slots[-1] - slots[0] < len(slots) else None,
        num_branches=2 if sequences[0].request.guided else 1,
        greedy=temperature[0] == 0,
        least=min(known),
        most=min(max(known) + most_ahead, config.block_size),
        most_kept=most_kept,
    )
    return kind, torch.cat([torch.tensor(whole), bits])


def alike(sequences: list[Sequence], inputs_of: Callable[[Sequence], int]) -> Iterator[list[Sequence]]:
    """Sequences that begin with as many inputs and are guided alike, by their slots, few enough for one forward.

    Those that begin with none are left out.
    """
    groups: dict[tuple[int, bool], list[Sequence]] = defaultdict(list)
    for sequence in by_slot(sequences):
        count = inputs_of(sequence)
        if count:
            groups[count, sequence.request.guided].append(sequence)
    for (count, _), own in groups.items():
        at_once = max(1, MOST_INPUTS // count)
        for first in range(0, len(own), at_once):
            yield own[first : first + at_once]


def of_copies(batch: Batch, tensor: Tensor) -> Tensor:
    """Rows of a tensor [B, ...] for each copy of a sequence, side by side: [B * copies, ...]."""
    return tensor.repeat_interleave(batch.num_branches, 0) if batch.num_branches > 1 else tensor


def unpacked(request: Request, kind: Kind, numbers: Tensor, known: Tensor) -> Batch:
    """The batch from what `packed` made of its sequences, on the device; known: int64 [slots], codes committed."""
    slot, seed, iteration, count = numbers[:4]
    scale, temperature, mass = numbers[4:].view(torch.float64).float()
    num_committed = known[slot]
    return Batch(
        request,
        kind,
        num_committed,
        num_committed.repeat_interleave(kind.num_branches) if kind.num_branches > 1 else num_committed,
        slot,
        seed,
        iteration,
        scale,
        temperature,
        filter=Filter(count, mass, kind.most_kept) if kind.most_kept else None,
        rows=rows_of(slot, kind.first_slot, kind.num_branches),
    )


# The target's features before the codes of running sequences, which EAGLE's drafter takes in.


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
        return self._features()[: batch.num_branches, batch.slot.unsqueeze(1), position]

    def keep(self, batch: Batch, features: Tensor, ahead: int = 0) -> None:
        """Keeps features [copies, B, n, dim] at the input `ahead` of the last committed one and those after it."""
        place = batch.num_committed.unsqueeze(1) + 1 + ahead + steps(features.shape[2], self._device)
        kept = self._features()[: batch.num_branches]
        kept[:, batch.slot.unsqueeze(1), place] = features.float()
