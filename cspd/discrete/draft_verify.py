"""One round of draft, verification and commitment for VQ codes.

Guarantee: that of the rule (`cspd.discrete.rules`), whatever the draft, see docs/bounds.md.
"""

from __future__ import annotations

import functools
from itertools import zip_longest

import torch
from torch import Tensor

from cspd.discrete.drafts import DRAFTS
from cspd.discrete.host import Batch, VQHost
from cspd.discrete.rules import WINDOW_CAP, Rule, sample
from cspd.discrete.tree import Shape, verify
from cspd.noise import Purpose
from cspd.precision import Stopwatch
from cspd.sequence import Request, Sequence


@functools.lru_cache(maxsize=256)
def _rule(name: str, greedy: bool, **parameters: object) -> Rule:
    return Rule(name, greedy=greedy, **{key: value for key, value in parameters.items() if value is not None})


def rule_of(request: Request) -> Rule:
    """The rule a request asks for, its schedule over as many depths as are drafted, of a window at most WINDOW_CAP.

    Raises:
        ValueError: a parameter is missing or out of range.
    """
    names = ("delta", "schedule", "nu", "lam", "k", "optimal")
    parameters = {name: getattr(request, name) for name in names}
    length = request.gamma
    if request.pd_k is not None:  # of a window: the first path, as far as a schedule goes
        path = request.window - (request.pd_k - 1) * request.pd_d
        length = min(path, WINDOW_CAP - 1 if request.schedule == "linear" else WINDOW_CAP)
    return _rule(request.rule, request.temperature == 0, length=length, **parameters)


def run_round(host: VQHost, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Drafts codes for every sequence, has the target judge them all in one forward, commits what is accepted and one
    code more, and returns the sequences that are finished.
    """
    batch, request = host.begin(sequences, watch), sequences[0].request
    rule = rule_of(request)
    shape, codes, Q = DRAFTS[request.draft](host, batch)
    features = host.features(batch, codes, depth=shape.depth, sees=shape.sees)
    P = host.distributions(batch, features, soft=rule.pools)
    length, height, device = host.config.block_size, shape.height, host.device
    coins, anew = _draws(host, batch, shape)
    near = host.near(request.metric, rule.k) if rule.pools else None
    verified = verify(rule, shape, codes, P, Q, coins, length - batch.known_t, near)
    # a refused code's successor is drawn anew; any other is what the target itself would draw there
    place = verified.count.unsqueeze(1)
    u = torch.where(verified.refused.unsqueeze(1), anew.gather(1, place), host.drawn(batch, place))
    last = sample(verified.rest, u.squeeze(1))

    path = torch.cat([torch.zeros_like(place), verified.path], 1)  # nodes, the root's first
    steps = torch.arange(height + 1, device=device)
    accepted = steps < place
    after = codes.gather(1, path.roll(-1, 1))
    host.commit(batch, torch.where(steps == place, last.unsqueeze(1), after), accepted.float())
    if not shape.chain:
        host.compact(batch, torch.where(steps <= place, path, steps))
    if request.draft in ("eagle-static", "eagle-dynamic"):
        rows = torch.arange(len(batch), device=device).unsqueeze(1)
        host.keep_features(batch, features[:, rows, path])
    return account(host, batch, verified.count, verified.bound, verified.judged, steps[1:] <= place)


def _draws(host: VQHost, batch: Batch, shape: Shape) -> tuple[Tensor, Tensor]:
    """Every node's coin [B, N], and draws [B, 1 + height] for what takes a refused code's place, by its depth."""
    num, place = shape.num_nodes, torch.arange(1 + shape.height, device=host.device)
    purpose, index = _streams(num, 1 + shape.height, host.device)
    ahead = torch.cat([(shape.depth - 1).clamp(min=0), place.expand(*shape.depth.shape[:-1], -1)], -1)
    return host.uniform(batch, purpose, ahead, index).split((num, 1 + shape.height), 1)


@functools.lru_cache(maxsize=64)
def _streams(num_nodes: int, num_places: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Purpose and index of each draw of `_draws`."""
    purpose = [Purpose.CODE_COIN] * num_nodes + [Purpose.CODE_RESIDUAL] * num_places
    return torch.tensor(purpose, device=device), torch.tensor([*range(num_nodes), *[0] * num_places], device=device)


def account(
    host: VQHost, batch: Batch, count: Tensor, bound: Tensor, judged: Tensor, accepted: Tensor
) -> list[Sequence]:
    """Moves the sequences on, counts, and returns those that are finished; the one copy to the host in a round.

    Args:
        count: int64 [B], drafted codes accepted; one more is committed. bound: [B], the rule's local bounds, summed.
        judged, accepted: bool [B, height], by how far ahead a code was drafted.
    """
    height, length = judged.shape[1], host.config.block_size
    numbers = torch.cat([torch.stack([count, bound], 1).double(), judged.double(), accepted.double()], 1).tolist()
    for sequence, (count, bound, *by_depth) in zip(batch.sequences, numbers):
        committed = min(int(count) + 1, length - sequence.num_known)
        sequence.iteration += 1
        sequence.num_known += committed
        stats = sequence.stats
        stats.iterations += 1
        stats.backbone_calls += 1
        stats.draft_backbone_calls += host.draft_calls
        stats.bound += bound
        stats.committed[committed] = stats.committed.get(committed, 0) + 1
        parts = by_depth[:height], by_depth[height:]
        stats.by_lag = [
            [int(n) + m for n, m in zip_longest(part, before, fillvalue=0)] for part, before in zip(parts, stats.by_lag)
        ]
    return [s for s in batch.sequences if s.num_known == length]
