"""How a round runs: numbers go to the device in one copy, the work is one graph where there are graphs, and what the
host must count comes back in one copy. On CUDA that is read a round late, so that the host waits for nothing.

How many codes are committed is known on the device first (`VQHost.known`); the host needs a bound of it only. A
sequence that is finished may take part in one round more, in which it has no room for codes.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from cspd.discrete.batch import Batch, by_slot, packed, unpacked
from cspd.discrete.host import VQHost
from cspd.precision import Stopwatch
from cspd.sequence import RoundStats, Sequence
from cspd.transfer import Report, send_integers
from cspd.vq.steps import steps

Work = Callable[[VQHost, Batch], Tensor]  # from a batch to its `outcome`; it reads no tensor on the host


class Unread(NamedTuple):
    """A round that the host has not counted yet: its sequences, its `outcome`, and what it commits at most."""

    sequences: list[Sequence]
    outcome: Report
    most: int


def outcome(host: VQHost, count: Tensor, bound: Tensor, judged: Tensor, accepted: Tensor) -> Tensor:
    """What the host is told of a round [B, 3 + 2 height], also of the draft model's forwards, which a graph repeats.

    Args:
        count: int64 [B], drafted codes accepted; one more is committed. bound: [B], the rule's local bounds.
        judged, accepted: bool [B, height], by how far ahead a code was drafted.
    """
    draft_calls = steps(host.draft_calls + 1, host.device)[-1].expand_as(count)
    one = [column.unsqueeze(1) for column in (count, draft_calls, bound)]
    return torch.cat([*one, judged, accepted], 1)


def run(
    host: VQHost, sequences: list[Sequence], watch: Stopwatch, work: Work, state: Several[Tensor] = ()
) -> list[Sequence]:
    """One round of a method that drafts; returns the sequences that are known to be finished.

    Args:
        watch: times the forwards. state: tensors that would not be the same after a second run of the work.
    """
    key = sequences[0].key
    before: Unread | None = host.unread.pop(key, None)
    numbers = launch(host, sequences, watch, work, state, before)
    most = numbers.shape[1] // 2  # a code for each one drafted ahead, and one more
    now: Unread | None = Unread(by_slot(sequences), Report(numbers), most)
    if host.late:
        host.unread[key], now = now, before
    if now is not None:
        _count(host, now)
    return [sequence for sequence in sequences if sequence.num_committed == host.seq_len]


def launch(
    host: VQHost,
    sequences: list[Sequence],
    watch: Stopwatch,
    work: Work,
    state: Several[Tensor] = (),
    before: Unread | None = None,
) -> Tensor:
    """What the work of a round makes, which moves the sequences on, on the device.

    Args:
        before: the round that is not counted yet; the others as in `run`.
    """
    sequences = by_slot(sequences)
    request = sequences[0].request
    ahead = set(before.sequences) if before else set()
    kind, numbers = packed(sequences, host.config, ahead, before.most if before else 0)
    if host.graphs.enabled:
        kind = kind.bucketed()
        watch.start("backbone")  # of what is replayed, phases are not told apart

    def whole(numbers: Tensor) -> Tensor:
        host.begin(None if host.graphs.enabled else watch)
        batch = unpacked(request, kind, numbers, host.known)
        made = work(host, batch)
        committed = made[:, 0].long() + 1
        host.known[batch.slot] = (batch.known_t + committed).clamp(max=host.seq_len)
        return made

    key, sent = (sequences[0].key, kind), send_integers(numbers.numpy(), host.device)
    made = host.graphs.run(key, whole, sent, state=(host.known, *state))
    watch.start("other")
    return made


def _count(host: VQHost, unread: Unread) -> None:
    """Counts a round of each sequence that was not finished before."""
    for sequence, (num_accepted, draft_calls, bound, *ahead) in zip(unread.sequences, unread.outcome.tolist()):
        room = host.seq_len - sequence.num_committed
        if room:
            count_round(sequence, min(int(num_accepted) + 1, room))
            _count_drafted(sequence.stats, int(draft_calls), bound, ahead)


def count_round(sequence: Sequence, committed: int) -> None:
    """Moves a sequence on by a round of one target forward that committed so many codes."""
    sequence.iteration += 1
    sequence.num_committed += committed
    stats = sequence.stats
    stats.iterations += 1
    stats.backbone_calls += 1
    stats.committed[committed] = stats.committed.get(committed, 0) + 1


def _count_drafted(stats: RoundStats, draft_calls: int, bound: float, ahead: list[float]) -> None:
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
