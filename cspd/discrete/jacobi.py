"""Jacobi decoding: the target drafts a window of codes for itself."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cspd.discrete.batch import MOST_NODES, Batch
from cspd.discrete.drafts import Drafted, check_rule, commit, outcome, run
from cspd.discrete.gpt import steps
from cspd.discrete.rules import (
    MIXED,
    Rule,
    coupling_option,
    draw_siblings,
    likeliest,
    near_codes,
    nearby,
    rule_of,
    rule_options,
    sample,
    without,
)
from cspd.discrete.runner import VQRunner
from cspd.discrete.trees import Judged, Shape, follow, judge_siblings
from cspd.method import Method
from cspd.noise import MAX_INDEX, Purpose, check_indices
from cspd.option import Option, check_integer
from cspd.request import Request, Sequence, Stopwatch

# Jacobi windows: their shape, a comb; what is in them, and what becomes of it; the random numbers of a round.


@dataclass(frozen=True)
class Comb:
    """The nodes of a window: the root, the first path, then the siblings.

    Attributes:
        path: F, codes on the first path. depth: D, how many of them have siblings.
        siblings: int64 [D, K - 1], their nodes.
        shape: as a tree.
        streams: purpose, places ahead and index of a round's uniform draws, int64 [n] each, in the order of `Draws`;
            counts: how many are of each kind.
    """

    path: int
    depth: int
    siblings: Tensor
    shape: Shape
    streams: tuple[Tensor, Tensor, Tensor]
    counts: list[int]


@functools.lru_cache(maxsize=32)
def comb_of(window: int, pd_k: int, pd_d: int, device: torch.device) -> Comb:
    """The comb of `window` drafted nodes, K = pd_k of them at each of the first D = pd_d levels."""
    beside = pd_k - 1
    depth = pd_d if beside else 0
    path = window - beside * depth
    index = torch.arange(depth * beside, device=device)
    siblings = path + 1 + index.view(depth, beside)

    # the root, the first path one after the other, and siblings, which share their parent with the path
    parents = [-1, *range(path)]
    for level in range(depth):
        parents += [level] * beside
    shape = Shape(torch.tensor(parents, device=device), path, [path] + [depth] * (beside if depth else 0))
    return Comb(path, depth, siblings, shape, *_streams(path, siblings))


def _streams(path: int, siblings: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], list[int]]:
    """`streams` and `counts` of a comb."""
    depth, beside = siblings.shape
    device = siblings.device
    check_indices(path + depth * beside, MAX_INDEX)  # of the last node
    # up to F + 1 codes are committed, and the window behind them has F more
    ahead = torch.arange(2 * path + 1, device=device)
    first = torch.zeros_like(ahead)
    level = torch.arange(depth, device=device).repeat_interleave(beside)
    of_path = torch.arange(path, device=device)
    of_siblings = siblings.flatten()
    kinds = [
        (Purpose.CODE, ahead, first),
        (Purpose.CODE_RESIDUAL, ahead, first),
        (Purpose.CODE, level, of_siblings),
        (Purpose.TOKEN_ACCEPT, of_path, of_path + 1),
        (Purpose.TOKEN_ACCEPT, level, of_siblings),
    ]
    counts = [len(index) for _, _, index in kinds]
    purpose = torch.tensor([kind for kind, _, _ in kinds], device=device)
    purpose = purpose.repeat_interleave(torch.tensor(counts, device=device))
    places = torch.cat([place for _, place, _ in kinds])
    index = torch.cat([index for _, _, index in kinds])
    return (purpose, places, index), counts


class Window(NamedTuple):
    """What is drafted: codes int64 [B, F] of the first path, their distributions Q [B, F, V], and siblings int64
    [B, D, K - 1], -1 where there is none.
    """

    codes: Tensor
    Q: Tensor
    siblings: Tensor


class Verdict(NamedTuple):
    """What became of a window.

    Attributes:
        prefix: int64 [B], codes of the first path that are accepted. sibling: int64 [B], the code accepted after them
            from beside the path, -1: none. accepted: int64 [B], how many that makes.
        node: int64 [B], the last accepted one. rest: [B, V], the distribution of the code after it.
        judged: bool [B, F], whether the rule judged a place. bound: [B], the sum of its local bounds.
    """

    prefix: Tensor
    sibling: Tensor
    accepted: Tensor
    node: Tensor
    rest: Tensor
    judged: Tensor
    bound: Tensor


def kept_windows(runner: VQRunner, path: int) -> tuple[Tensor, Tensor]:
    """Codes int64 [slots, F] and Q [slots, F, V] that windows keep from round to round.

    They are parts of the largest window's, made on first use, which stay: graphs read them where they are.
    """
    if runner.windows is None:
        size = runner.num_slots, MOST_NODES - 1
        codes = torch.zeros(size, dtype=torch.int64, device=runner.device)
        runner.windows = codes, torch.zeros(*size, runner.config.vocab_size, device=runner.device)
    codes, Q = runner.windows
    return codes[:, :path], Q[:, :path]


class Draws(NamedTuple):
    """A round's random numbers: uniform draws, if nothing else is said.

    Attributes:
        codes: [B, 2F + 1], of the code so many places ahead of the committed ones, drawn or drawn again.
        fill: int64 [B, 2F + 1], a code at random for each of these places.
        siblings: [B, D, K - 1], of their codes.
        path, beside: [B, F] and [B, D, K - 1], by which codes of the path, and siblings, are accepted.
    """

    codes: Tensor
    fill: Tensor
    siblings: Tensor
    path: Tensor
    beside: Tensor


def draw(runner: VQRunner, batch: Batch, comb: Comb) -> Draws:
    """The random numbers of a round, by one pass of the generator."""
    draws = runner.uniform(batch, *comb.streams)
    codes, fill, siblings, path, beside = draws.split(comb.counts, 1)
    fill = (fill * runner.config.vocab_size).long()
    siblings, beside = (u.unflatten(1, comb.siblings.shape) for u in (siblings, beside))
    return Draws(codes, fill, siblings, path, beside)


def slide(runner: VQRunner, batch: Batch, codes: Tensor, P: Tensor, accepted: Tensor, draws: Draws) -> None:
    """Moves every window behind its committed codes: `codes` [B, F] and their P move up, random codes follow."""
    path, vocabulary = codes.shape[1], P.shape[-1]
    kept_codes, kept_Q = kept_windows(runner, path)
    first = accepted.unsqueeze(1) + 1
    place = first + steps(path, runner.device)  # in the old window
    following = torch.cat([codes, draws.fill[:, path:]], 1)
    kept_codes[batch.slot] = following.gather(1, place)

    source = place.clamp(max=path - 1).unsqueeze(-1)
    Q = P.gather(1, source.expand(-1, -1, vocabulary))
    inside = (place < path).unsqueeze(-1)
    kept_Q[batch.slot] = torch.where(inside, Q, 1 / vocabulary)


# Jacobi decoding with the request's own draws: each code is a function of those before it, and the window iterates
# towards its fixed point, which is the image of `ar`.
#
# Sources:
#     Song et al., "Accelerating Feedforward Computation via Parallel Nonlinear Equation Solving", arXiv 2002.03629.
#     Wiggers and Hoogeboom, "Predictive Sampling with Forecasting Autoregressive Models", arXiv 2002.09928.
#
# A round:
#
# 1. Draft. The window's codes come from the round before, and so do K - 1 siblings beside each of the first D.
# 2. Verify. One forward of the target over all of them, and one draw after each node, at its position's own number.
# 3. Commit the codes that are what is drawn after those before them, and the code that is drawn after the last.
# 4. Redraw. What was drawn along the first path is the next window: codes that had settled stay as they are.


def kept_nodes(runner: VQRunner) -> Tensor:
    """int64 [slots, N], the drafted nodes that windows keep from round to round, made on first use."""
    if runner.nodes is None:
        runner.nodes = torch.zeros(runner.num_slots, MOST_NODES, dtype=torch.int64, device=runner.device)
    return runner.nodes


def judge_and_redraw(runner: VQRunner, batch: Batch) -> Tensor:
    """The round but for what the CPU counts: its `outcome`."""
    request = batch.request
    comb = comb_of(request.window, request.pd_k or 1, request.pd_d or 0, runner.device)
    codes = _draft_same_image(runner, batch, comb)
    features = runner.features(batch, codes, depth=comb.shape.depth, seen=comb.shape.seen)
    P = runner.distributions(batch, features)
    drawn = sample(P, runner.drawn(batch, comb.shape.depth))
    verified = follow(comb.shape, codes, drawn, runner.seq_len - batch.num_committed)
    commit(runner, batch, Drafted(comb.shape, codes, None), verified)
    _redraw(runner, batch, comb, P, drawn, verified.count)
    accepted = steps(comb.shape.height, runner.device) < verified.count.unsqueeze(1)
    return outcome(runner, verified.count, verified.bound, verified.judged, accepted)


def _draft_same_image(runner: VQRunner, batch: Batch, comb: Comb) -> Tensor:
    """Codes int64 [B, N] of the root and of the nodes that the round before left; a new request's are guesses."""
    kept = kept_nodes(runner)[batch.slot, : comb.shape.num_nodes - 1]
    guesses = _guesses(runner, batch, steps(comb.path, runner.device))
    guesses = functional.pad(guesses, (0, comb.siblings.numel()), value=-1)  # no two siblings are alike
    drafted = torch.where((batch.iteration == 0).unsqueeze(1), guesses, kept)
    return torch.cat([runner.last(batch, 1)[0], drafted], 1)


def _guesses(runner: VQRunner, batch: Batch, ahead: Tensor) -> Tensor:
    """Codes as a uniform distribution would give them at the draws of places so far ahead."""
    return (runner.drawn(batch, ahead) * runner.config.vocab_size).long()


def _redraw(runner: VQRunner, batch: Batch, comb: Comb, P: Tensor, drawn: Tensor, count: Tensor) -> None:
    """Keeps the nodes of the next round: codes along the first path, moved up behind what is committed, and beside
    them those that the target's distributions there, P [B, N, V], make likely.
    """
    path = comb.path
    place = (
        count.unsqueeze(1) + 1 + steps(path, runner.device)
    )  # in the old window, where the last is that of P after it
    inside = place <= path
    place_inside = place.clamp(max=path)
    codes = torch.where(inside, drawn.gather(1, place_inside), _guesses(runner, batch, place))
    nodes = codes
    if comb.depth:
        each = steps(len(codes), runner.device).unsqueeze(1)
        Q = P[each, place_inside[:, : comb.depth]]
        u = runner.drawn(batch, place[:, : comb.depth])
        left = without(nearby(Q, u), codes[:, : comb.depth])
        siblings = likeliest(left, comb.siblings.shape[1])
        possible = left.gather(-1, siblings.clamp(min=0)) > 0  # or else it may be the path's own code
        siblings = torch.where(possible, siblings, -1)
        nodes = torch.cat([codes, siblings.flatten(1)], 1)
    kept_nodes(runner)[batch.slot, : nodes.shape[1]] = nodes


# Speculative Jacobi decoding: the target drafts for itself, a window of codes at a time.
#
# Sources:
#     SJD: Teng et al., "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative Jacobi
#         Decoding", arXiv 2410.01699.
#     MC-SJD: So et al., "MC-SJD: Maximal Coupling Speculative Jacobi Decoding for Autoregressive Visual Generation
#         Acceleration", arXiv 2510.24211; its later name is Speculative Coupled Decoding.
#     SJD-PAC: Kang et al., "SJD-PAC: Accelerating Speculative Jacobi Decoding via Proactive Drafting and Adaptive
#         Continuation", arXiv 2603.18599. Sections, equations and lines of its Algorithm 1 are cited below.
#
# A round:
#
# 1. Draft. The window's codes, and the distributions Q that they follow, come from the round before. Proactive
#    drafting
#    (section 4.1) puts K - 1 siblings beside each of the first D codes.
# 2. Verify. One forward of the target over all of them gives P.
# 3. Judge. The longest accepted prefix of the window is kept (section 3.3). Where a code is rejected, its siblings are
#    judged against what is left of P (appendix A.3).
# 4. Commit the accepted codes and one more, sampled from P or from what the rejections left of it.
# 5. Redraw the codes behind them. SJD draws all of them from P (section 3.3). Adaptive continuation (section 4.2),
#    which
#    MC-SJD calls maximal coupling, keeps those that the exact rule accepts, and draws the others from what a rejection
#    leaves of P. Either way they follow P, which is the next round's Q.
# 6. Slide the window behind the committed codes. New places get codes at random.
#
# This is the round of `coupling="maximal"`; `cspd.discrete.jacobi` has that of same-image coupling.
#
# The window is a comb: siblings are children of the first path and have none of their own, since the paper's full
# K-ary tree (84 nodes at K = 4, D = 3) does not fit into a window of 64. Guarantee: that of the rule, see
# docs/bounds.md.


def run_jacobi_round(runner: VQRunner, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Judges every window by one forward of the target, commits the accepted prefix and one code more (two after a
    sibling), drafts the rest anew, and returns the sequences that are finished.
    """
    request = sequences[0].request
    if request.coupling == "same-image":
        return run(runner, sequences, watch, judge_and_redraw, state=(kept_nodes(runner),))
    comb = comb_of(request.window, request.pd_k, request.pd_d, runner.device)
    return run(runner, sequences, watch, _judge_and_redraw, state=kept_windows(runner, comb.path))


def _judge_and_redraw(runner: VQRunner, batch: Batch) -> Tensor:
    """The round but for what the CPU counts: its `outcome`."""
    request = batch.request
    rule = rule_of(request)
    near = near_codes(runner.models["tokenizer"], rule.metric, rule.num_near) if rule.pools else None
    comb = comb_of(request.window, request.pd_k, request.pd_d, runner.device)
    draws = draw(runner, batch, comb)

    window = _draft(runner, batch, comb, rule, draws)
    P = _verify(runner, batch, comb, rule, window)
    on_path = _judge_path(rule, window, P, draws, near)
    room = runner.seq_len - batch.num_committed
    verdict = _judge(rule, comb, window, P, on_path, draws, room, near)
    _commit(runner, batch, comb, window, verdict, draws)
    codes = _redraw_path(rule, window, P, on_path, draws, request.continuation)
    slide(runner, batch, codes, P, verdict.accepted, draws)

    accepted = steps(comb.path, runner.device) < verdict.accepted.unsqueeze(1)
    return outcome(runner, verdict.accepted, verdict.bound, verdict.judged, accepted)


def _draft(runner: VQRunner, batch: Batch, comb: Comb, rule: Rule, draws: Draws) -> Window:
    """The window that the round before left, and siblings beside it; a new request's is filled with random codes."""
    vocabulary = runner.config.vocab_size
    codes, Q = (kept[batch.slot] for kept in kept_windows(runner, comb.path))
    is_new = (batch.iteration == 0).unsqueeze(1)
    codes = torch.where(is_new, draws.fill[:, : comb.path], codes)
    Q = torch.where(is_new.unsqueeze(-1), 1 / vocabulary, Q)

    # proactive drafting (section 4.1): K candidates without replacement, of which the path's code is the first
    if not comb.depth:
        return Window(codes, Q, codes.new_empty(len(codes), 0, 0))
    shallow = slice(comb.depth)
    left = without(Q[:, shallow], codes[:, shallow])
    if not rule.greedy:
        return Window(codes, Q, draw_siblings(left, draws.siblings))
    siblings = likeliest(left, comb.siblings.shape[1])
    possible = left.gather(-1, siblings.clamp(min=0)) > 0
    return Window(codes, Q, torch.where(possible, siblings, -1))


def _verify(runner: VQRunner, batch: Batch, comb: Comb, rule: Rule, window: Window) -> Tensor:
    """P [B, N, V], the target's distribution after each node: one forward (line 2)."""
    root = runner.last(batch, 1)[0]
    nodes = torch.cat([root, window.codes, window.siblings.flatten(1)], 1)
    features = runner.features(batch, nodes, depth=comb.shape.depth, seen=comb.shape.seen)
    return runner.distributions(batch, features, soft=rule.greedy)


def _judge_path(rule: Rule, window: Window, P: Tensor, draws: Draws, near: Tensor | None = None) -> Judged:
    """Judges every code of the first path on its own, with p_i = P after the old codes before it (lines 5 to 8)."""
    path = window.codes.shape[1]
    depth = steps(path + 1, P.device)[1:]
    codes, uniforms = window.codes.unsqueeze(-1), draws.path.unsqueeze(-1)
    return judge_siblings(rule, P[:, :path], window.Q, codes, uniforms, depth, near)


def _judge(
    rule: Rule,
    comb: Comb,
    window: Window,
    P: Tensor,
    on_path: Judged,
    draws: Draws,
    room: Tensor,
    near: Tensor | None,
) -> Verdict:
    """The longest accepted prefix of the first path, and what becomes of the siblings behind it.

    `room`: int64 [B], codes that are still to come: no more are judged.
    """
    # the longest accepted prefix (section 3.3)
    levels = steps(comb.path, P.device)
    accepted = (on_path.index == 0) & (levels < room.unsqueeze(1))
    prefix = accepted.int().cumprod(1).sum(1)
    rejected = prefix < room.clamp(max=comb.path)
    judged = levels < (prefix + rejected).unsqueeze(1)
    bound = on_path.bound(judged).sum(1)

    # beside the rejected code
    residual = P[:, : comb.path] if rule.greedy else on_path.residual
    sibling, node, beside = _judge_beside(rule, comb, window, residual, prefix, rejected, draws, near)
    found = sibling >= 0

    # the code after the accepted ones
    each = steps(len(P), P.device)
    node = torch.where(found, node, prefix)
    all_rejected = (rejected & ~found).unsqueeze(1)
    rest = torch.where(all_rejected, beside.residual, rule.target(P[each, node]))
    bound = bound + beside.bound(rejected)
    return Verdict(prefix, sibling, prefix + found, node, rest, judged, bound)


def _judge_beside(
    rule: Rule,
    comb: Comb,
    window: Window,
    residual: Tensor,
    prefix: Tensor,
    rejected: Tensor,
    draws: Draws,
    near: Tensor | None,
) -> tuple[Tensor, Tensor, Judged]:
    """Judges the siblings of rejected codes: the accepted one's code, -1 for none, and node, int64 [B].

    `residual`: [B, F, V], what the rejection of a code leaves of P (appendix A.3, eq. 8 with k = 1).
    """
    each = steps(len(prefix), prefix.device)
    level = prefix.clamp(max=comb.path - 1)
    residual = residual[each, level]
    if not comb.depth:
        none = torch.full_like(prefix, -1)
        return none, none, Judged(none, rule.target(residual), none.unsqueeze(1) >= 0, bounds=None)

    row = prefix.clamp(max=comb.depth - 1)
    has_siblings = rejected & (prefix < comb.depth)
    siblings = window.siblings[each, row]
    candidates = torch.where(has_siblings.unsqueeze(1), siblings, -1)
    left = without(window.Q[each, level], window.codes[each, level])  # eq. 7 with k = 2
    judged = judge_siblings(rule, residual, left, candidates, draws.beside[each, row], level + 1, near)

    chosen = judged.index.clamp(min=0)
    code = torch.where(judged.index >= 0, candidates[each, chosen], -1)
    return code, comb.siblings[row, chosen], judged


def _commit(runner: VQRunner, batch: Batch, comb: Comb, window: Window, verdict: Verdict, draws: Draws) -> None:
    """Commits the accepted prefix, the sibling after it if one was accepted, and one code more."""
    prefix, sibling, accepted, node, rest, _, _ = (part.unsqueeze(1) for part in verdict)
    last = sample(rest, draws.codes.gather(1, accepted))

    level = steps(comb.path + 1, runner.device)
    codes = functional.pad(window.codes, (0, 1))
    codes = torch.where((sibling >= 0) & (level == prefix), sibling, codes)
    codes = torch.where(level == accepted, last, codes)
    runner.commit(batch, codes, token_cost=(level < accepted).float())

    if comb.depth:  # a sibling's keys and values go where those of the rejected code are
        nodes = level[: comb.depth + 1]
        moved = (sibling >= 0) & (nodes == prefix + 1)
        runner.compact(batch, torch.where(moved, node, nodes))


def _redraw_path(rule: Rule, window: Window, P: Tensor, on_path: Judged, draws: Draws, continuation: bool) -> Tensor:
    """Codes int64 [B, F] that follow P, for the next round's window.

    SJD draws them all (section 3.3). Adaptive continuation keeps those that are accepted, and draws the others from
    what the rejection leaves of P (section 4.2, lines 8 to 11).
    """
    path = window.codes.shape[1]
    u = draws.codes[:, :path]
    # always by the exact rule: codes that a relaxed one keeps do not follow P, which the next round takes for their Q
    exact = Rule(greedy=rule.greedy)
    if not continuation:
        return sample(exact.target(P[:, :path]), u)
    if rule.name != "exact":
        on_path = _judge_path(exact, window, P, draws)
    return torch.where(on_path.index == 0, window.codes, sample(on_path.residual, u))


OPTIONS = (
    Option("window", int, "tokens verified at once", default=64, low=1, high=MOST_NODES - 1, metavar="W"),
    Option(
        "pd_k",
        int,
        "candidates at each of the first positions, siblings included; 1: no siblings",
        default=1,
        low=1,
        high=16,
    ),
    Option("pd_d", int, "how many of the first positions have siblings; 0: none", default=0, high=16),
    Option(
        "continuation",
        bool,
        "keep drafted tokens after a rejection if possible, as same-image coupling always does",
        default=False,
    ),
)


def check(request: Request, runner: VQRunner) -> None:
    """Raises ValueError where the window has no room for the comb, or on a bad rule."""
    comb = f"pd_k={request.pd_k} candidates at pd_d={request.pd_d} levels and a code below them"
    least, most = request.pd_k * request.pd_d + 1, MOST_NODES - 1
    if least > most:
        raise ValueError(f"{comb} need a window of {least}, and {most} is the largest: give fewer of them")
    check_integer("window", request.window, least, most, f"it has room for {comb}")
    check_rule(request, runner)


def jacobi(
    name: str,
    summary: str,
    papers: dict[str, str],
    rule: str = "exact",
    coupling: str = "maximal",
    **defaults: object,
) -> Method:
    """A method that drafts by Jacobi iteration, with these defaults of `OPTIONS` and of the rule's parameters; any
    other rule can be asked for.
    """
    options = [option.but(default=defaults.get(option.name, option.default)) for option in OPTIONS]
    return Method(
        name=name,
        family="VQ",
        guarantee="exact" if rule == "exact" else "bounded",
        summary=summary,
        papers=papers,
        run_round=run_jacobi_round,
        options=(*options, *rule_options(rule, **defaults), coupling_option(coupling)),
        mixed=lambda request: MIXED,
        check=check,
        of_request=lambda request: rule_of(request).guarantee,
    )
