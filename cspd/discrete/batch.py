"""The inputs of a VQ round: the batch, and past features of the target."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cspd.discrete.distributions import MIN_TEMPERATURE, Filter, filter_numbers
from cspd.discrete.gpt import GPTConfig
from cspd.discrete.kv_cache import rows_of
from cspd.discrete.rules import MIXED
from cspd.request import Request, Sequence
from cspd.transformer import steps

# The sequences of one round, described on the CPU (`RoundKind`) and on the device (`Batch`).

LEAST_BUCKET = 64  # the smallest bound on committed tokens of a graph of fixed shape
BUCKETS = 4  # from one power of two to the next
MAX_PREFILLED = 4096  # inputs of one forward pass that prefills, over all its sequences, which bounds its memory


class RoundKind(NamedTuple):
    """The shape of a round, apart from the settings that its requests share.

    Attributes:
        size: B, the number of sequences. first_slot: the first slot if slots are consecutive, otherwise None.
        num_branches: 2 with guidance, which adds the unconditional branch; otherwise 1.
        greedy: whether the temperature of all sequences is 0; otherwise it is above 0 for all.
        least, most: bounds on the numbers of committed tokens.
        most_kept: the largest k of top-k; 0 if no sequence filters.
    """

    size: int
    first_slot: int | None
    num_branches: int
    greedy: bool
    least: int
    most: int
    most_kept: int

    # a round of such sequences is faster: slices in place of indices, one mask for all, or none
    @property
    def together(self) -> bool:
        """Whether all sequences have equally many committed tokens."""
        return self.least == self.most

    def bucketed(self) -> RoundKind:
        """The kind that a graph is made for: there are few, so that one graph serves many numbers of tokens."""
        first = 0 if self.first_slot == 0 else None  # 0 if all slots are taken, or requests come one at a time
        return self._replace(first_slot=first, least=0, most=bucket(self.most))


def bucket(most: int) -> int:
    """`most` rounded up to a multiple of LEAST_BUCKET, then to one of BUCKETS steps between powers of two."""
    power_of_two = 2 ** (most.bit_length() - 1) if most else 0
    step = max(LEAST_BUCKET, power_of_two // BUCKETS)
    return max(step, -(-most // step) * step)


@dataclass(frozen=True)
class Batch:
    """The B sequences of one round, in the order of their slots.

    Attributes:
        request: a request with the settings that all sequences share. kind: the shape of the round.
        num_committed: int64 [B], committed tokens. committed_rows: int64 [B * branches], the same for each branch.
        slot, seed: int64 [B]. iteration: int64 [B], rounds that the request has taken part in.
        scale: float32 [B], of guidance. temperature: float32 [B]; 1 if the batch is greedy.
        filter: top-k and top-p, or None if no sequence filters.
        rows: cache rows [B * branches], see `rows_of`.
    """

    request: Request
    kind: RoundKind
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
        """Whether drafts are accepted only if they equal the target's sample by the request's own draws."""
        return self.request.coupling == "same-image"


def by_slot(sequences: list[Sequence]) -> list[Sequence]:
    """Sequences in the order of their slots, which is that of a batch."""
    return sorted(sequences, key=lambda sequence: sequence.slot)


def packed(
    sequences: list[Sequence], config: GPTConfig, ahead: Set[Sequence], most_ahead: int
) -> tuple[RoundKind, Tensor]:
    """Packs the numbers of a round into one tensor, for one copy to the device, where `unpacked` reads them.

    Args:
        sequences: in the order of their slots.
        ahead: sequences that have taken part in a round that is not counted yet, each committing up to `most_ahead`.

    Returns:
        (their kind, int64 [7, B] on the CPU: four rows of integers, and three with the bits of float64).
    """
    committed = [sequence.num_committed for sequence in sequences]
    slots = [sequence.slot for sequence in sequences]
    seeds = [sequence.request.seed for sequence in sequences]
    iterations = [sequence.iteration + (sequence in ahead) for sequence in sequences]
    settings: list[Mapping[str, Any]] = [sequence.request.settings for sequence in sequences]
    cfg, temperature, top_k, top_p = ([own[name] for own in settings] for name in MIXED)
    counts, masses, most_kept = filter_numbers(top_k, top_p, config.vocab_size)
    divisors = [1.0 if tau == 0 else max(tau, MIN_TEMPERATURE) for tau in temperature]

    # float64 keeps its bits as int64, so that one tensor holds both
    whole = torch.tensor([slots, seeds, iterations, counts])
    real = torch.tensor([cfg, divisors, masses], dtype=torch.float64)
    is_consecutive = slots[-1] - slots[0] < len(slots)
    kind = RoundKind(
        size=len(sequences),
        first_slot=slots[0] if is_consecutive else None,
        num_branches=2 if sequences[0].request.guided else 1,
        greedy=temperature[0] == 0,
        least=min(committed),
        most=min(max(committed) + most_ahead, config.block_size),
        most_kept=most_kept,
    )
    return kind, torch.cat([whole, real.view(torch.int64)])


def alike(sequences: list[Sequence], inputs_of: Callable[[Sequence], int]) -> Iterator[list[Sequence]]:
    """Groups of sequences that begin with equally many inputs and have equally many guidance branches.

    A group is in the order of slots, and small enough for one forward pass. Sequences that begin with 0 inputs are left
    out.
    """
    groups: dict[tuple[int, bool], list[Sequence]] = defaultdict(list)
    for sequence in by_slot(sequences):
        count = inputs_of(sequence)
        if count:
            groups[count, sequence.request.guided].append(sequence)
    for (count, _), group in groups.items():
        at_once = max(1, MAX_PREFILLED // count)
        for first in range(0, len(group), at_once):
            yield group[first : first + at_once]


def per_branch(tensor: Tensor, num_branches: int) -> Tensor:
    """Repeats the rows of a tensor [B, ...] for each branch, side by side: [B * branches, ...]."""
    return tensor.repeat_interleave(num_branches, 0) if num_branches > 1 else tensor


def unpacked(request: Request, kind: RoundKind, numbers: Tensor, all_committed: Tensor) -> Batch:
    """The batch on the device, from the result of `packed`. all_committed: int64 [slots], committed tokens."""
    slot, seed, iteration, count = numbers[:4]
    scale, temperature, mass = numbers[4:].view(torch.float64).float()
    num_committed = all_committed[slot]
    return Batch(
        request,
        kind,
        num_committed,
        per_branch(num_committed, kind.num_branches),
        slot,
        seed,
        iteration,
        scale,
        temperature,
        filter=Filter(count, mass, kind.most_kept) if kind.most_kept else None,
        rows=rows_of(slot, kind.first_slot, kind.num_branches),
    )


# The target's features before the tokens of running sequences, which EAGLE's drafter takes in.


class PastFeatures:
    """Features [2, slots, 1 + columns, dim] of the conditional and unconditional branches, allocated on first use.

    The feature at position p is in column p + 1. Column 0, before the last input of the condition, is 0 for a class.
    """

    def __init__(self, num_slots: int, columns: int, dim: int, device: torch.device) -> None:
        self._shape = (2, num_slots, 1 + columns, dim)
        self._device = device
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
        """The features before positions [B, N]: [branches, B, N, dim]."""
        return self._features()[: batch.num_branches, batch.slot.unsqueeze(1), position]

    def keep(self, batch: Batch, features: Tensor, ahead: int = 0) -> None:
        """Stores features [branches, B, n, dim] from the input `ahead` of the last committed one on."""
        first = batch.num_committed.unsqueeze(1) + 1 + ahead
        column = first + steps(features.shape[2], self._device)
        stored = self._features()[: batch.num_branches]
        stored[:, batch.slot.unsqueeze(1), column] = features.float()
