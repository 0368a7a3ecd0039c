"""The sequences of one round: what is known of them before it, and their counts after it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from cspd.discrete.cache import rows_of
from cspd.sequence import RoundStats, Sequence


@dataclass(frozen=True)
class Batch:
    """The sequences of one round, B of them, in the order of their slots.

    Attributes:
        known: codes committed, on the host; known_t: the same, int64 [B] on the device.
        slot, seed, label: int64 [B]. iteration: int64 [B], rounds that the request has taken part in.
        scale, temperature: float32 [B]. top_k, top_p: on the host.
        copies: 2 where the batch is guided: everything is evaluated under the class and under the null class.
        greedy: whether their temperature is 0, of all or of none.
        rows: cache rows [B * copies], see `cspd.discrete.cache.rows_of`.
    """

    sequences: list[Sequence]
    known: list[int]
    known_t: Tensor
    slot: Tensor
    seed: Tensor
    label: Tensor
    iteration: Tensor
    scale: Tensor
    temperature: Tensor
    top_k: list[int]
    top_p: list[float]
    copies: int
    greedy: bool
    rows: Tensor | slice

    def __len__(self) -> int:
        return len(self.sequences)


def batch_of(sequences: list[Sequence], device: torch.device) -> Batch:
    """The batch of sequences that share a round, in any order."""
    sequences = sorted(sequences, key=lambda sequence: sequence.slot)
    requests = [sequence.request for sequence in sequences]
    known = [sequence.num_known for sequence in sequences]
    slots = [sequence.slot for sequence in sequences]
    copies = 2 if requests[0].guided else 1

    # two copies to the device, whatever the number of fields
    whole = [
        known,
        slots,
        [request.seed for request in requests],
        [request.label for request in requests],
        [sequence.iteration for sequence in sequences],
    ]
    real = [
        [request.cfg for request in requests],
        [request.temperature for request in requests],
    ]
    whole = torch.tensor(whole).to(device, non_blocking=True)
    real = torch.tensor(real, dtype=torch.float32).to(device, non_blocking=True)
    known_t, slot, seed, label, iteration = whole
    scale, temperature = real
    return Batch(
        sequences,
        known,
        known_t,
        slot,
        seed,
        label,
        iteration,
        scale,
        temperature,
        top_k=[request.top_k for request in requests],
        top_p=[request.top_p for request in requests],
        copies=copies,
        greedy=requests[0].temperature == 0,
        rows=rows_of(slots, slot, copies),
    )


def count_round(sequence: Sequence, committed: int) -> None:
    """Moves a sequence on by a round of one target forward that committed so many codes."""
    sequence.iteration += 1
    sequence.num_known += committed
    stats = sequence.stats
    stats.iterations += 1
    stats.backbone_calls += 1
    stats.committed[committed] = stats.committed.get(committed, 0) + 1


def count_drafted(stats: RoundStats, draft_calls: int, bound: float, ahead: list[float]) -> None:
    """Adds a round's draft: the draft model's forwards, the rule's local bounds, and the codes judged.

    `ahead`: whether a code was judged, at each distance ahead, and then whether it was accepted: 0 or 1.
    """
    stats.draft_backbone_calls += draft_calls
    stats.bound += bound
    height = len(ahead) // 2
    judged, accepted = stats.by_lag
    stats.by_lag = [_added(judged, ahead[:height]), _added(accepted, ahead[height:])]


def _added(before: list[int], now: list[float]) -> list[int]:
    return [total + int(one) for total, one in zip_longest(before, now, fillvalue=0)]
