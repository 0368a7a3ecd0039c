"""Speculative sampling of VQ codes: a round drafts codes, has the target verify them, and commits some.

1. Draft: a chain of codes by a smaller model, or a tree by EAGLE's drafter (`cspd.discrete.drafts`).
2. Verify: one forward of the target gives P after every drafted code; the rule judges them from the root.
3. Commit: the accepted path is kept, and one code more is sampled after it.

With same-image coupling the target draws after every node, by the request's own draws, and the path of codes that it
draws itself is kept: the images are those of `ar`.

Guarantee: that of the rule (`cspd.discrete.rules`), whatever the draft, see docs/bounds.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cspd.discrete.batch import Batch
from cspd.discrete.cache import MOST_NODES
from cspd.discrete.draft import DRAFTS, Drafted
from cspd.discrete.host import VQHost
from cspd.discrete.neighbours import near_codes
from cspd.discrete.options import MIXED, coupling_option, rule_options
from cspd.discrete.probabilities import sample
from cspd.discrete.rounds import outcome, run
from cspd.discrete.rules import rule_of
from cspd.discrete.tree import Verified, follow, walk
from cspd.discrete.tree_draws import draw_tree
from cspd.method import Method
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
    features = host.features(batch, drafted.codes, depth=drafted.shape.depth, seen=drafted.shape.seen)
    verified = _verify(host, batch, drafted, features)
    commit(host, batch, drafted, verified)
    if draft.needs == "eagle":
        each = steps(len(batch), host.device).unsqueeze(1)
        host.past.keep(batch, features[:, each, verified.path])
    accepted = steps(drafted.shape.height, host.device) < verified.count.unsqueeze(1)
    return outcome(host, verified.count, verified.bound, verified.judged, accepted)


def _verify(host: VQHost, batch: Batch, drafted: Drafted, features: Tensor) -> Verified:
    """What becomes of the tree, by the target's features [copies, B, N, dim] after its codes."""
    shape, codes, Q, draws = drafted
    room = host.seq_len - batch.known_t
    if batch.same_image:
        drawn = sample(host.distributions(batch, features), host.drawn(batch, shape.depth))
        return follow(shape, codes, drawn, room)
    rule = rule_of(batch.request)
    near = near_codes(host.models["tokenizer"], rule.metric, rule.num_near) if rule.pools else None
    P = host.distributions(batch, features, soft=rule.pools)
    return walk(rule, shape, codes, P, Q, draws or draw_tree(host, batch, shape), room, near)


def commit(host: VQHost, batch: Batch, drafted: Drafted, verified: Verified) -> None:
    """Commits the accepted codes and the last."""
    shape, codes = drafted.shape, drafted.codes
    level = steps(shape.height + 1, host.device)
    place = verified.count.unsqueeze(1)
    after = codes.gather(1, verified.path.roll(-1, 1))
    committed = torch.where(level == place, verified.last.unsqueeze(1), after)
    host.commit(batch, committed, heat=(level < place).float())
    if not shape.chain:
        host.compact(batch, torch.where(level <= place, verified.path, level))


DRAFT = Option("draft", DRAFTS, "what drafts the tokens")
GAMMA = Option("gamma", int, "number of tokens drafted in a chain, or the height of a tree", low=1, high=MOST_NODES - 1)
_WITH_ARTICLE = {"draft": "a draft model", "eagle": "an EAGLE drafter"}
_FLAGS = {"draft": "--draft-checkpoint", "eagle": "--eagle"}
NEEDS = {None: "-", "draft": "draft model", "eagle": "EAGLE drafter"}


def check(request: Request, host: VQHost) -> None:
    """Raises ValueError where the draft cannot draft so far, or a model that is needed is not there."""
    highest = DRAFTS[request.draft].highest
    check_integer("gamma", request.gamma, 1, highest, f"it is how far {request.draft!r} drafts ahead")
    check_model(request.draft, host)
    check_rule(request, host)


def check_model(name: str, host: VQHost) -> None:
    """Raises ValueError where the model that a draft needs is not there."""
    needs = DRAFTS[name].needs
    if needs and host.models[needs] is None:
        raise ValueError(
            f"draft={name!r} needs {_WITH_ARTICLE[needs]} and this engine has none: give it to load(..., {needs}=file),"
            f" with {_FLAGS[needs]} on the command line, or put its file beside the target's"
        )


def check_rule(request: Request, host: VQHost) -> None:
    """Raises ValueError on a bad rule; finds the neighbours it looks at now, and not while others wait in a round."""
    rule = rule_of(request)
    if rule.pools:
        if host.models["tokenizer"] is None:
            raise ValueError(f"rule={request.rule!r} needs the tokenizer's codes and this engine has none: give it one")
        near_codes(host.models["tokenizer"], rule.metric, rule.num_near)


def drafting(
    name: str,
    summary: str,
    papers: dict[str, str],
    draft: str,
    gamma: int,
    rule: str = "exact",
    coupling: str = "maximal",
    **parameters: object,
) -> Method:
    """A method that drafts and verifies: a published pair of a draft and a rule, any other of which can be asked for.

    Args:
        draft, gamma: of `DRAFTS`, and how far it drafts by default. rule, parameters: see `rule_options`.
        coupling: what it accepts by default, by the exact rule.
    """
    return Method(
        name=name,
        family="VQ",
        guarantee="exact" if rule == "exact" else "bounded",
        summary=summary,
        papers=papers,
        run_round=run_round,
        needs=NEEDS[DRAFTS[draft].needs],
        options=(
            DRAFT.but(default=draft),
            GAMMA.but(default=gamma),
            *rule_options(rule, **parameters),
            coupling_option(coupling),
        ),
        mixed=lambda request: MIXED,
        check=check,
        of_request=lambda request: rule_of(request).guarantee,
        uses=lambda request: {DRAFTS[request.draft].needs} - {None},
    )
