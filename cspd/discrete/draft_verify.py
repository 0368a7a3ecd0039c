"""One round of draft, verification and commitment for VQ codes.

Guarantee: that of the rule (`cspd.discrete.rules`), whatever the draft, see docs/bounds.md.
"""

from __future__ import annotations

import functools
from itertools import zip_longest

import torch
from torch import Tensor

from cspd.discrete.cache import MOST_NODES
from cspd.discrete.draft import DRAFTS
from cspd.discrete.host import MIXED, Batch, VQHost
from cspd.discrete.rules import rule_of, rule_options, sample
from cspd.discrete.tree import Shape, verify
from cspd.method import Method
from cspd.noise import Purpose
from cspd.option import Option, check_integer
from cspd.precision import Stopwatch
from cspd.sequence import Request, Sequence


def run_round(host: VQHost, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Drafts codes for every sequence, has the target judge them all in one forward, commits what is accepted and one
    code more, and returns the sequences that are finished.
    """
    batch, request = host.begin(sequences, watch), sequences[0].request
    rule = rule_of(request)
    draft = DRAFTS[request.draft]
    shape, codes, Q = draft.propose(host, batch)
    features = host.features(batch, codes, depth=shape.depth, sees=shape.sees)
    P = host.distributions(batch, features, soft=rule.pools)
    length, height, device = host.config.block_size, shape.height, host.device
    coins, anew = _draws(host, batch, shape)
    near = host.near(rule.metric, rule.k) if rule.pools else None
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
    if draft.needs == "eagle":
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


DRAFT = Option("draft", DRAFTS, "what drafts the codes")
GAMMA = Option("gamma", int, "codes drafted one after the other, or a tree's height", low=1, high=MOST_NODES - 1)
_WITH_ARTICLE = {"draft": "a draft model", "eagle": "an EAGLE drafter"}
NEEDS = {None: "-", "draft": "draft model", "eagle": "EAGLE drafter"}


def check(request: Request, host: VQHost) -> None:
    """Raises ValueError where the draft cannot draft so far, or a model that is needed is not there."""
    draft = DRAFTS[request.draft]
    check_integer("gamma", request.gamma, 1, draft.highest, f"it is how far {request.draft!r} drafts ahead")
    if draft.needs and host.models[draft.needs] is None:
        raise ValueError(
            f"draft={request.draft!r} needs {_WITH_ARTICLE[draft.needs]} and this engine has none: give it to the"
            " engine's models, or put its file beside the target's"
        )
    check_rule(request, host)


def check_rule(request: Request, host: VQHost) -> None:
    """Raises ValueError on a bad rule; finds the neighbours it looks at now, and not while others wait in a round."""
    rule = rule_of(request)
    if rule.pools:
        if host.models["tokenizer"] is None:
            raise ValueError(f"rule={request.rule!r} needs the tokenizer's codes and this engine has none: give it one")
        host.near(rule.metric, rule.k)


def drafting(
    name: str, summary: str, papers: dict[str, str], draft: str, gamma: int, rule: str = "exact", **parameters: object
) -> Method:
    """A method that drafts and verifies: a published pair of a draft and a rule, any other of which can be asked for.

    Args:
        draft, gamma: of `DRAFTS`, and how far it drafts by default. rule, parameters: see `rule_options`.
    """
    return Method(
        name=name,
        family="VQ",
        guarantee="exact" if rule == "exact" else "bounded",
        summary=summary,
        papers=papers,
        run_round=run_round,
        needs=NEEDS[DRAFTS[draft].needs],
        options=(DRAFT.but(default=draft), GAMMA.but(default=gamma), *rule_options(rule, **parameters)),
        mixed=MIXED,
        check=check,
        of_request=lambda request: rule_of(request).guarantee,
        uses=lambda request: {DRAFTS[request.draft].needs} - {None},
    )
