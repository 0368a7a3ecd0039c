"""The sequences of one round, and what is known of them before it: on the host, and on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cspd.discrete.cache import rows_of
from cspd.discrete.options import MIXED
from cspd.discrete.probabilities import LEAST_TEMPERATURE, Filter, filter_numbers
from cspd.sequence import Request, Sequence
from cspd.transfer import send_integers
from cspd.vq.gpt import GPTConfig

LEAST_BUCKET = 64  # codes committed, in a graph of fixed shape
BUCKETS = 4  # from one power of two to the next
MOST_INPUTS = 4096  # of all sequences, that they begin with and a forward takes in at once, which bounds its memory


class Kind(NamedTuple):
    """What shapes a round beside the settings that its requests share; plain numbers, equal for equal shapes.

    Attributes:
        size: B, sequences. first_slot: of slots that are one after the other, else None.
        copies: 2 where the batch is guided: everything is evaluated under the class and under the null class.
        greedy: whether their temperature is 0, of all or of none.
        least, most: bounds of the codes that are committed.
        most_kept: the most codes that a sequence's top-k and top-p keep; 0 where all keep all.
    """

    size: int
    first_slot: int | None
    copies: int
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
        known_t: int64 [B], codes committed. known_rows: int64 [B * copies], the same of each copy.
        slot, seed: int64 [B]. iteration: int64 [B], rounds that the request has taken part in.
        scale, temperature: float32 [B], the latter 1 where it is 0 (`greedy`).
        filter: which codes are kept, None where all are.
        rows: cache rows [B * copies], see `cspd.discrete.cache.rows_of`.
    """

    request: Request
    kind: Kind
    known_t: Tensor
    known_rows: Tensor
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
    def copies(self) -> int:
        return self.kind.copies

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
        (their kind, int64 [7, B] on the host: whole numbers, and the bits of float64).
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
        copies=2 if sequences[0].request.guided else 1,
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
    return tensor.repeat_interleave(batch.copies, 0) if batch.copies > 1 else tensor


def unpacked(request: Request, kind: Kind, numbers: Tensor, known: Tensor) -> Batch:
    """The batch from what `packed` made of its sequences, on the device; known: int64 [slots], codes committed."""
    slot, seed, iteration, count = numbers[:4]
    scale, temperature, mass = numbers[4:].view(torch.float64).float()
    known_t = known[slot]
    return Batch(
        request,
        kind,
        known_t,
        known_t.repeat_interleave(kind.copies) if kind.copies > 1 else known_t,
        slot,
        seed,
        iteration,
        scale,
        temperature,
        filter=Filter(count, mass, kind.most_kept) if kind.most_kept else None,
        rows=rows_of(slot, kind.first_slot, kind.copies),
    )


def batch_of(host: Any, sequences: list[Sequence]) -> Batch:
    """The batch of sequences in the slots of a `VQHost`, between rounds."""
    kind, numbers = packed(sequences, host.config, set(), 0)
    return unpacked(sequences[0].request, kind, send_integers(numbers.numpy(), host.device), host.known)
