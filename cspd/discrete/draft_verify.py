"""Speculative sampling of VQ codes: a round drafts codes, has the target verify them, and commits some.

1. Draft: a chain of codes by a smaller model, or a tree by EAGLE's drafter (`cspd.discrete.drafts`).
2. Verify: one forward of the target gives P after every drafted code; the rule judges them from the root.
3. Commit: the accepted path is kept, and one code more is sampled after it.

Guarantee: that of the rule (`cspd.discrete.rules`), whatever the draft, see docs/bounds.md.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cspd.discrete.batch import Batch
from cspd.discrete.cache import MOST_NODES
from cspd.discrete.draft import DRAFTS, Drafted
from cspd.discrete.host import VQHost
from cspd.discrete.neighbours import near_codes
from cspd.discrete.options import MIXED
from cspd.discrete.probabilities import sample
from cspd.discrete.rounds import outcome, run
from cspd.discrete.rules import rule_of, rule_options
from cspd.discrete.tree import Shape, Verified, walk
from cspd.method import Method
from cspd.noise import MAX_INDEX, Purpose, check_indices
from cspd.option import Option, check_integer
from cspd.precision import Stopwatch
from cspd.sequence import Request, Sequence
from cspd.vq.steps import steps


def run_round(host: VQHost, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Drafts codes for every sequence, has the target judge them all in one forward, commits what is accepted and one
    code more, and returns the sequences that are finished.
    """
    return run(host, sequences, watch, _draft_and_verify)


def _draft_and_verify(host: VQHost, batch: Batch) -> Tensor:
    """The round but for what the host counts: its `outcome`."""
    draft = DRAFTS[batch.request.draft]
    drafted = draft.propose(host, batch)
    verified, last, features = _verify(host, batch, drafted)
    _commit(host, batch, drafted, verified, last)
    if draft.needs == "eagle":
        each = steps(len(batch), host.device).unsqueeze(1)
        host.keep_features(batch, features[:, each, verified.path])
    accepted = steps(drafted.shape.height, host.device) < verified.count.unsqueeze(1)
    return outcome(host, verified.count, verified.bound, verified.judged, accepted)


def _verify(host: VQHost, batch: Batch, drafted: Drafted) -> tuple[Verified, Tensor, Tensor]:
    """What the rule accepts, the code after it int64 [B], and the target's features [copies, B, N, dim]."""
    shape, codes, Q = drafted
    rule = rule_of(batch.request)
    near = near_codes(host.models["tokenizer"], rule.metric, rule.k) if rule.pools else None
    uniforms, after_rejection = _draws(host, batch, shape)

    features = host.features(batch, codes, depth=shape.depth, sees=shape.sees)
    P = host.distributions(batch, features, soft=rule.pools)
    room = host.seq_len - batch.known_t
    verified = walk(rule, shape, codes, P, Q, uniforms, room, near)

    # a rejected code's successor is drawn anew; any other is what the target itself would draw there
    place = verified.count.unsqueeze(1)
    u = torch.where(verified.rejected.unsqueeze(1), after_rejection.gather(1, place), host.drawn(batch, place))
    return verified, sample(verified.rest, u.squeeze(1)), features


def _commit(host: VQHost, batch: Batch, drafted: Drafted, verified: Verified, last: Tensor) -> None:
    """Commits the accepted codes and the last."""
    shape, codes, _ = drafted
    level = steps(shape.height + 1, host.device)
    place = verified.count.unsqueeze(1)
    after = codes.gather(1, verified.path.roll(-1, 1))
    committed = torch.where(level == place, last.unsqueeze(1), after)
    host.commit(batch, committed, heat=(level < place).float())
    if not shape.chain:
        host.compact(batch, torch.where(level <= place, verified.path, level))


def _draws(host: VQHost, batch: Batch, shape: Shape) -> tuple[Tensor, Tensor]:
    """Uniform draws: of every node [B, N], and for what takes a rejected code's place, by its depth [B, 1 + height]."""
    num_places = 1 + shape.height
    purpose, index = _streams(shape.num_nodes, num_places, host.device)
    place = steps(num_places, host.device)
    of_nodes = (shape.depth - 1).clamp(min=0)
    of_places = place.expand(*shape.depth.shape[:-1], -1)
    ahead = torch.cat([of_nodes, of_places], -1)
    return host.uniform(batch, purpose, ahead, index).split((shape.num_nodes, num_places), 1)


@functools.lru_cache(maxsize=64)
def _streams(num_nodes: int, num_places: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Purpose and index of each draw of `_draws`."""
    purpose = [Purpose.CODE_COIN] * num_nodes + [Purpose.CODE_RESIDUAL] * num_places
    index = [*range(num_nodes), *[0] * num_places]
    check_indices(max(index), MAX_INDEX)
    return torch.tensor(purpose, device=device), torch.tensor(index, device=device)


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
        near_codes(host.models["tokenizer"], rule.metric, rule.k)


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
        mixed=lambda request: MIXED,
        check=check,
        of_request=lambda request: rule_of(request).guarantee,
        uses=lambda request: {DRAFTS[request.draft].needs} - {None},
    )
