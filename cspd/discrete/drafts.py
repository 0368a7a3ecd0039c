"""Rounds of VQ codes: plain, or draft and verify; and all drafts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from cspd.device import Report, send_integers
from cspd.discrete.batch import MOST_NODES, Batch, by_slot, packed, unpacked
from cspd.discrete.gpt import steps
from cspd.discrete.rules import (
    MIXED,
    coupling_option,
    draw_siblings,
    likeliest,
    near_codes,
    nearby,
    rule_of,
    rule_options,
    sample,
)
from cspd.discrete.runner import VQRunner
from cspd.discrete.trees import Draws, Shape, Verified, chain_shape, follow, grown, walk
from cspd.method import Method
from cspd.noise import MAX_INDEX, Purpose, check_indices
from cspd.option import Option, check_integer
from cspd.request import Request, RoundStats, Sequence, Stopwatch

# What a draft of VQ codes is: a function that proposes a tree of codes for the target to judge.
#
# A draft is a function `(runner, batch) -> Drafted`. Its siblings are either drawn without replacement from a
# distribution Q that it gives, or chosen (Q is None), and then judged as point masses. Any rule can judge any draft.


class Drafted(NamedTuple):
    """Codes to judge: the tree's shape, codes int64 [B, N] with the root first (-1: none), Q as in `tree.walk`, and the
    tree's draws where the draft has taken them already.
    """

    shape: Shape
    codes: Tensor
    Q: Tensor | None
    draws: Draws | None = None


@dataclass(frozen=True)
class Draft:
    """A way to draft.

    Attributes:
        propose: drafts for a batch. needs: the model it needs beside the target, a key of `VQRunner.models`, or None.
        highest: codes one after the other that it can draft, the largest `gamma`.
    """

    propose: Callable[[VQRunner, Batch], Drafted]
    needs: str | None = None
    highest: int = MOST_NODES - 1


DRAFTS: dict[str, Draft] = {}  # by name


def draft(name: str, *, needs: str | None = None, highest: int = MOST_NODES - 1) -> Callable[[Callable], Callable]:
    """Names a function as a draft that a request can ask for; attributes as in `Draft`."""

    def named(propose: Callable[[VQRunner, Batch], Drafted]) -> Callable[[VQRunner, Batch], Drafted]:
        DRAFTS[name] = Draft(propose, needs, highest)
        return propose

    return named


# How a round runs: numbers go to the device in one copy, the work is one graph where there are graphs, and what the
# CPU must count comes back in one copy. On CUDA that is read a round late, so that the CPU waits for nothing.
#
# The device knows first how many tokens are committed (`VQRunner.num_committed`); the CPU needs an upper bound only. A
# finished sequence may take part in one more round, in which it has no room for tokens.

Work = Callable[[VQRunner, Batch], Tensor]  # from a batch to its `outcome`; it reads no tensor on the CPU


class Unread(NamedTuple):
    """A round that the CPU has not counted yet: its sequences, its `outcome`, and what it commits at most."""

    sequences: list[Sequence]
    outcome: Report
    most: int


def outcome(runner: VQRunner, count: Tensor, bound: Tensor, judged: Tensor, accepted: Tensor) -> Tensor:
    """What the CPU is told of a round [B, 3 + 2 height], also of the draft model's forwards, which a graph repeats.

    Args:
        count: int64 [B], drafted codes accepted; one more is committed. bound: [B], the rule's local bounds.
        judged, accepted: bool [B, height], by how far ahead a code was drafted.
    """
    draft_calls = steps(runner.draft_calls + 1, runner.device)[-1].expand_as(count)
    one = [column.unsqueeze(1) for column in (count, draft_calls, bound)]
    return torch.cat([*one, judged, accepted], 1)


def run(
    runner: VQRunner, sequences: list[Sequence], watch: Stopwatch, work: Work, state: Several[Tensor] = ()
) -> list[Sequence]:
    """One round of a method that drafts; returns the sequences that are known to be finished.

    Args:
        watch: times the forwards. state: tensors that would not be the same after a second run of the work.
    """
    key = sequences[0].key
    before: Unread | None = runner.unread.pop(key, None)
    numbers = launch(runner, sequences, watch, work, state, before)
    most = numbers.shape[1] // 2  # a code for each one drafted ahead, and one more
    now: Unread | None = Unread(by_slot(sequences), Report(numbers), most)
    if runner.late:
        runner.unread[key], now = now, before
    if now is not None:
        _count(runner, now)
    return [sequence for sequence in sequences if sequence.num_committed == runner.seq_len]


def launch(
    runner: VQRunner,
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
    kind, numbers = packed(sequences, runner.config, ahead, before.most if before else 0)
    if runner.graphs.enabled:
        kind = kind.bucketed()
        watch.start("backbone")  # of what is replayed, phases are not told apart

    def whole(numbers: Tensor) -> Tensor:
        runner.begin(None if runner.graphs.enabled else watch)
        batch = unpacked(request, kind, numbers, runner.num_committed)
        made = work(runner, batch)
        committed = made[:, 0].long() + 1
        runner.num_committed[batch.slot] = (batch.num_committed + committed).clamp(max=runner.seq_len)
        return made

    key, sent = (sequences[0].key, kind), send_integers(numbers.numpy(), runner.device)
    made = runner.graphs.run(key, whole, sent, state=(runner.num_committed, *state))
    watch.start("other")
    return made


def _count(runner: VQRunner, unread: Unread) -> None:
    """Counts a round of each sequence that was not finished before."""
    for sequence, (num_accepted, draft_calls, bound, *ahead) in zip(unread.sequences, unread.outcome.tolist()):
        room = runner.seq_len - sequence.num_committed
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


# Plain sampling of VQ codes: one target forward, one code a round. Guarantee: exact.


def run_plain_round(runner: VQRunner, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Draws the next code of every sequence and returns those that are finished; nothing is copied to the CPU."""
    launch(runner, sequences, watch, _sample)
    for sequence in sequences:
        count_round(sequence, committed=1)
    return [sequence for sequence in sequences if sequence.num_committed == runner.seq_len]


def _sample(runner: VQRunner, batch: Batch) -> Tensor:
    """Draws and commits the next codes: one target forward. No draft was accepted: [B, 1]."""
    here = steps(1, runner.device)
    features = runner.features(batch, runner.last(batch, 1)[0])
    P = runner.distributions(batch, features)
    codes = sample(P, runner.drawn(batch, here))
    no_draft = torch.zeros_like(codes, dtype=torch.float32)
    runner.commit(batch, codes, no_draft)
    return no_draft


# The random numbers of a round that judges a tree.


def draw_tree(runner: VQRunner, batch: Batch, shape: Shape) -> Draws:
    """The uniform draws of a tree, by one pass of the generator."""
    num, num_places = shape.num_nodes, 1 + shape.height
    purpose, index, fresh = _streams(num, num_places, runner.device)
    place = steps(num_places, runner.device)
    of_nodes = (shape.depth - 1).clamp(min=0)
    of_places = place.expand(*shape.depth.shape[:-1], -1)
    ahead = torch.cat([of_nodes, of_nodes, of_places], -1)
    codes, nodes, rejected = runner.uniform(batch, purpose, ahead, index, fresh).split((num, num, num_places), 1)
    return Draws(codes, nodes, runner.drawn(batch, place), rejected)


@functools.lru_cache(maxsize=64)
def _streams(num_nodes: int, num_places: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Purpose and index of each draw of `draw_tree`, and whether it is the round's alone.

    A drafted code is committed in the round that drafts it, or dropped: its draw may be used again.
    """
    purpose = [Purpose.CODE] * num_nodes + [Purpose.TOKEN_ACCEPT] * num_nodes + [Purpose.CODE_RESIDUAL] * num_places
    index = [*range(num_nodes), *range(num_nodes), *[0] * num_places]
    fresh = [0] * num_nodes + [1] * (num_nodes + num_places)
    check_indices(max(index), MAX_INDEX)
    return tuple(torch.tensor(numbers, device=device) for numbers in (purpose, index, fresh))


# Speculative sampling of VQ codes: a round drafts codes, has the target verify them, and commits some.
#
# 1. Draft: a chain of codes by a smaller model, or a tree by EAGLE's drafter (`cspd.discrete.drafts`).
# 2. Verify: one forward of the target gives P after every drafted code; the rule judges them from the root.
# 3. Commit: the accepted path is kept, and one code more is sampled after it.
#
# With same-image coupling the target draws after every node, by the request's own draws, and the path of codes that it
# draws itself is kept: the images are those of `ar`.
#
# Guarantee: that of the rule (`cspd.discrete.rules`), whatever the draft, see docs/bounds.md.


def run_drafted_round(runner: VQRunner, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Drafts codes for every sequence, has the target judge them all in one forward, commits what is accepted and one
    code more, and returns the sequences that are finished.
    """
    return run(runner, sequences, watch, _draft_and_verify)


def _draft_and_verify(runner: VQRunner, batch: Batch) -> Tensor:
    """The round but for what the CPU counts: its `outcome`."""
    draft = DRAFTS[batch.request.draft]
    drafted = draft.propose(runner, batch)
    features = runner.features(batch, drafted.codes, depth=drafted.shape.depth, seen=drafted.shape.seen)
    verified = _verify(runner, batch, drafted, features)
    commit(runner, batch, drafted, verified)
    if draft.needs == "eagle":
        each = steps(len(batch), runner.device).unsqueeze(1)
        runner.past.keep(batch, features[:, each, verified.path])
    accepted = steps(drafted.shape.height, runner.device) < verified.count.unsqueeze(1)
    return outcome(runner, verified.count, verified.bound, verified.judged, accepted)


def _verify(runner: VQRunner, batch: Batch, drafted: Drafted, features: Tensor) -> Verified:
    """What becomes of the tree, by the target's features [copies, B, N, dim] after its codes."""
    shape, codes, Q, draws = drafted
    room = runner.seq_len - batch.num_committed
    if batch.same_image:
        drawn = sample(runner.distributions(batch, features), runner.drawn(batch, shape.depth))
        return follow(shape, codes, drawn, room)
    rule = rule_of(batch.request)
    near = near_codes(runner.models["tokenizer"], rule.metric, rule.num_near) if rule.pools else None
    P = runner.distributions(batch, features, soft=rule.pools)
    return walk(rule, shape, codes, P, Q, draws or draw_tree(runner, batch, shape), room, near)


def commit(runner: VQRunner, batch: Batch, drafted: Drafted, verified: Verified) -> None:
    """Commits the accepted codes and the last."""
    shape, codes = drafted.shape, drafted.codes
    level = steps(shape.height + 1, runner.device)
    place = verified.count.unsqueeze(1)
    after = codes.gather(1, verified.path.roll(-1, 1))
    committed = torch.where(level == place, verified.last.unsqueeze(1), after)
    runner.commit(batch, committed, token_cost=(level < place).float())
    if not shape.chain:
        runner.compact(batch, torch.where(level <= place, verified.path, level))


DRAFT = Option("draft", DRAFTS, "what drafts the tokens")
GAMMA = Option("gamma", int, "number of tokens drafted in a chain, or the height of a tree", low=1, high=MOST_NODES - 1)
_WITH_ARTICLE = {"draft": "a draft model", "eagle": "an EAGLE drafter"}
_FLAGS = {"draft": "--draft-checkpoint", "eagle": "--eagle"}
NEEDS = {None: "-", "draft": "draft model", "eagle": "EAGLE drafter"}


def check(request: Request, runner: VQRunner) -> None:
    """Raises ValueError where the draft cannot draft so far, or a model that is needed is not there."""
    highest = DRAFTS[request.draft].highest
    check_integer("gamma", request.gamma, 1, highest, f"it is how far {request.draft!r} drafts ahead")
    check_model(request.draft, runner)
    check_rule(request, runner)


def check_model(name: str, runner: VQRunner) -> None:
    """Raises ValueError where the model that a draft needs is not there."""
    needs = DRAFTS[name].needs
    if needs and runner.models[needs] is None:
        raise ValueError(
            f"draft={name!r} needs {_WITH_ARTICLE[needs]} and this engine has none: give it to load(..., {needs}=file),"
            f" with {_FLAGS[needs]} on the command line, or put its file beside the target's"
        )


def check_rule(request: Request, runner: VQRunner) -> None:
    """Raises ValueError on a bad rule; finds the neighbours it looks at now, and not while others wait in a round."""
    rule = rule_of(request)
    if rule.pools:
        if runner.models["tokenizer"] is None:
            raise ValueError(f"rule={request.rule!r} needs the tokenizer's codes and this engine has none: give it one")
        near_codes(runner.models["tokenizer"], rule.metric, rule.num_near)


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
        run_round=run_drafted_round,
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


# What is drafted for the target to judge: a chain by a smaller model, or a tree by EAGLE's drafter.
#
# Codes are drawn from the draft's own guided and filtered distribution, siblings without replacement; EAGLE-2's, and
# all at temperature 0, are chosen, and judged as point masses.
#
# Sources:
#     chain: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192.
#     eagle-static: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", arXiv 2401.15077.
#     eagle-dynamic: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", arXiv
#                    2406.16858.

# EAGLE-1's tree of 25 codes: the path of ranks (rank, rank, ...) has so many children
EAGLE_TREE = {
    (): 4,
    (0,): 3,
    (1,): 2,
    (2,): 2,
    (3,): 1,
    (0, 0): 3,
    (0, 1): 2,
    (0, 2): 2,
    (1, 0): 1,
    (0, 0, 0): 3,
    (0, 0, 0, 0): 2,
}
BRANCHES = 10  # EAGLE-2: nodes expanded at a depth, and children tried of each
NODES = 60  # EAGLE-2: codes kept of all, unless a request has a window of its own
LEAST_LOG = -1e4


@functools.lru_cache(maxsize=64)
def _chain_shape(length: int, device: torch.device) -> Shape:
    return chain_shape(length, device)


def _pick(features: Tensor, index: Tensor) -> Tensor:
    """features[:, b, index[b, n]] [copies, B, n, dim] of features [copies, B, N, dim]."""
    each = steps(len(index), index.device).unsqueeze(1)
    return features[:, each, index]


def _expected(batch: Batch, q: Tensor, u: Tensor) -> Tensor:
    """How likely the target is to commit each code [B, N, V], by the draft's distributions q [B, N, V] and the draw
    u [B, 1] by which same-image coupling will.
    """
    return nearby(q, u) if batch.same_image and not batch.greedy else q


@draft("chain", needs="draft")
def chain(runner: VQRunner, batch: Batch) -> Drafted:
    """gamma codes, one after the other, by the draft model."""
    gamma = batch.request.gamma
    # the last two inputs: of a round that accepted everything, the draft has not seen the last but one
    recent, start = runner.last(batch, 2)
    features = runner.features(batch, recent, start, "draft")
    features = _pick(features, (batch.num_committed - start).unsqueeze(1))
    u = runner.drawn(batch, steps(gamma, runner.device)).split(1, 1)
    codes, Q = [runner.last(batch, 1)[0]], []
    for i in range(gamma):
        if i > 0:
            features = runner.features(batch, codes[-1], i, "draft")
        q = runner.distributions(batch, features, "draft")
        Q.append(q)
        if batch.same_image:
            codes.append(likeliest(_expected(batch, q, u[i]), 1).squeeze(-1))
        else:
            codes.append(sample(q, u[i]))
    return Drafted(_chain_shape(gamma, runner.device), torch.cat(codes, 1), torch.cat(Q, 1))


def _eagle_root(runner: VQRunner, batch: Batch, height: int) -> Tensor:
    """EAGLE's feature at the root [copies, B, 1, dim]; what was committed since its last round is taken in anew."""
    recent, start = runner.last(batch, height + 1)
    past = runner.past.before(batch, start.unsqueeze(1) + steps(height + 1, runner.device))
    features = runner.features(batch, recent, start, "eagle", past=past)
    return _pick(features, (batch.num_committed - start).unsqueeze(1))


class Level(NamedTuple):
    """The n nodes of a static tree that have children, at one depth; of their children, [n, K] with gaps, the place is
    where they are when that is written flat.

    Attributes:
        nodes, depth: int64 [n]. seen: bool [n, N + 2], see `tree.Shape.seen`.
        children: int64 [n, K], their nodes, 0 in a gap. present: int64 [m], the places of all children.
        inner: int64 [n'], of those that have children too. parents: int64 [n'], which of the n is the parent of those.
    """

    nodes: Tensor
    depth: Tensor
    seen: Tensor
    children: Tensor
    present: Tensor
    inner: Tensor
    parents: Tensor


@functools.lru_cache(maxsize=64)
def _static_tree(height: int, device: torch.device) -> tuple[Shape, list[Level], Tensor]:
    """EAGLE-1's tree down to a height, its levels, and where its inner nodes are in these, int64 [M]."""
    paths = [()]
    for parent, count in EAGLE_TREE.items():
        if len(parent) < height:
            paths += [(*parent, rank) for rank in range(count)]
    paths.sort(key=lambda path: (len(path), path))
    node = {path: i for i, path in enumerate(paths)}
    parents = [-1]  # the root's
    for path in paths[1:]:
        parents.append(node[path[:-1]])

    inner = [path for path in paths if node[path] in parents]
    counts = [EAGLE_TREE[path] for path in inner]
    sizes = [sum(count > rank for count in counts) for rank in range(max(counts))]
    shape = Shape(torch.tensor(parents, device=device), len(paths[-1]), sizes)
    levels = []
    for depth in range(shape.height):
        level = [path for path in inner if len(path) == depth]
        nodes = torch.tensor([node[path] for path in level], device=device)
        levels.append(_level(shape, nodes, max(EAGLE_TREE[path] for path in level)))
    of_levels = torch.cat([level.nodes for level in levels])
    return shape, levels, torch.searchsorted(of_levels, shape.inner)


def _level(shape: Shape, nodes: Tensor, width: int) -> Level:
    """The level of these nodes, which have `width` children at most."""
    rows = (shape.inner == nodes.unsqueeze(1)).int().argmax(1)
    children = shape.children[rows, :width]
    place = children.flatten()
    present = place >= 0
    inner = torch.where(present & torch.isin(place, shape.inner))[0]
    return Level(
        nodes,
        shape.depth[nodes],
        shape.seen[nodes],
        children.clamp(min=0),
        torch.where(present)[0],
        inner,
        inner // width,
    )


@draft("eagle-static", needs="eagle", highest=1 + max(map(len, EAGLE_TREE)))
def eagle_static(runner: VQRunner, batch: Batch) -> Drafted:
    """EAGLE-1: always the same tree, siblings drawn without replacement; gamma is its height, at most 5."""
    shape, levels, inner = _static_tree(batch.request.gamma, runner.device)
    chosen = batch.greedy or batch.same_image
    draws = None if chosen else draw_tree(runner, batch, shape)
    u = runner.drawn(batch, steps(shape.height, runner.device)).split(1, 1)
    features = _eagle_root(runner, batch, shape.height)
    codes, Q = [runner.last(batch, 1)[0]], []
    for depth, level in enumerate(levels):
        q = runner.distributions(batch, features, "eagle", soft=batch.greedy)
        Q.append(q)
        if chosen:
            drafted = likeliest(_expected(batch, q, u[depth]), level.children.shape[1])
        else:
            drafted = draw_siblings(q, draws.codes[:, level.children])
        drafted = drafted.flatten(1)
        codes.append(drafted[:, level.present])
        if depth + 1 == len(levels):
            break

        # those that have children themselves, each seeing its ancestors and itself
        below = levels[depth + 1]
        features = runner.features(
            batch,
            drafted[:, level.inner],
            model="eagle",
            depth=below.depth,
            seen=below.seen,
            columns=below.nodes,
            past=features[:, :, level.parents],
        )
    return Drafted(shape, torch.cat(codes, 1), None if chosen else torch.cat(Q, 1)[:, inner], draws)


class Candidates(NamedTuple):
    """Nodes of EAGLE-2's tree before it is pruned. They are numbered from 1, depth after depth; 0 is the root.

    Attributes:
        codes: int64 [B, n]. parent: int64 [B, n], its number. depth: int64 [n].
        confidence: float64 [B, n], log of the product of the draft's probabilities along the path to a node.
    """

    codes: Tensor
    parent: Tensor
    depth: Tensor
    confidence: Tensor


@draft("eagle-dynamic", needs="eagle", highest=8)
def eagle_dynamic(runner: VQRunner, batch: Batch) -> Drafted:
    """EAGLE-2: the likeliest nodes of every depth are expanded, the likeliest of all are kept; gamma is the height."""
    height = batch.request.gamma
    nodes = batch.request.window or NODES
    branches = min(BRANCHES, nodes, runner.config.vocab_size)
    candidates = _expand(runner, batch, height, branches)
    parent, codes = _rerank(candidates, nodes)
    shape = grown(parent, height, 1 + branches * (height - 1), branches)
    root = runner.last(batch, 1)[0]
    return Drafted(shape, torch.cat([root, codes], 1), None)


def _expand(runner: VQRunner, batch: Batch, height: int, branches: int) -> Candidates:
    """EAGLE-2's expansion phase: at every depth the most confident nodes get `branches` children each."""
    size, device = len(batch), runner.device
    each = steps(size, device).unsqueeze(1)
    width = 1 + (height - 1) * branches  # cache columns from the root on: its own, and of what is expanded
    column = steps(width + 2, device)  # the first stands for all before the root, see `seen_of`; the second is its own
    seen = (column <= 1).expand(size, 1, width + 2)
    number = torch.zeros(size, 1, dtype=torch.int64, device=device)  # of the nodes expanded at this depth
    confidence = torch.zeros(size, 1, dtype=torch.float64, device=device)
    features = _eagle_root(runner, batch, height)
    u = runner.drawn(batch, steps(height, device)).split(1, 1)
    levels, first = [], 1  # the number of the first node at this depth
    for depth in range(1, height + 1):
        # children, each as confident as its path: the product of the draft's probabilities
        q = _expected(batch, runner.distributions(batch, features, "eagle", soft=True), u[depth - 1])
        q, codes = q.topk(branches)  # [B, n, branches]
        log_q = q.double().log().clamp(min=LEAST_LOG).nan_to_num(nan=LEAST_LOG)  # NaN would come before its parent
        confidence = (confidence.unsqueeze(-1) + log_q).flatten(1)
        parent = number.unsqueeze(-1).expand_as(codes).flatten(1)
        codes = codes.flatten(1)
        levels.append((codes, parent, confidence))
        if depth == height:
            break

        # the most confident ones are expanded next, each seeing its ancestors and itself
        confidence, best = confidence.topk(branches)
        number = first + best
        first += codes.shape[1]
        above = best // branches  # among the nodes expanded last
        start = 1 + (depth - 1) * branches
        seen = seen[each, above] | (column == column[1 + start : 1 + start + branches].unsqueeze(1))
        features = runner.features(
            batch,
            codes.gather(1, best),
            model="eagle",
            depth=_depths(depth, branches, device)[-branches:],
            seen=seen,
            columns=column[start : start + branches],
            past=_pick(features, above),
        )
    codes, parent, confidence = (torch.cat(parts, -1) for parts in zip(*levels))
    return Candidates(codes, parent, _depths(height, branches, device), confidence)


@functools.lru_cache(maxsize=64)
def _depths(height: int, branches: int, device: torch.device) -> Tensor:
    """Of the candidates of so many depths: `branches` at the first, so many for each node expanded at the others."""
    counts = torch.tensor([branches] + [branches * branches] * (height - 1), device=device)
    return torch.arange(1, height + 1, device=device).repeat_interleave(counts)


def _rerank(candidates: Candidates, most: int) -> tuple[Tensor, Tensor]:
    """EAGLE-2's reranking phase: parents int64 [B, 1 + n] and codes [B, n] of the `most` most confident nodes."""
    codes, parent, depth, confidence = candidates
    # a child is never more confident than its parent; equals are told apart so that a parent is kept first
    score = confidence - 1e-9 * depth
    best = score.topk(min(most, codes.shape[1])).indices
    kept = best.sort().values

    # kept nodes move up to close the gaps: a parent's new place is where its number stands among the kept ones'
    root = kept.new_zeros(len(kept), 1)
    numbers = torch.cat([root, kept + 1], 1)
    parent = torch.searchsorted(numbers, parent.gather(1, kept))
    return torch.cat([root - 1, parent], 1), codes.gather(1, kept)
