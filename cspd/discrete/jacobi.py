"""Jacobi decoding: the target drafts a window of tokens for itself."""

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
from cspd.discrete.trees import Shape, SiblingVerdicts, follow, verify_siblings
from cspd.method import Method
from cspd.noise import MAX_INDEX, Purpose, check_indices
from cspd.option import Option, check_integer
from cspd.request import Request, Sequence, Stopwatch

# Jacobi windows: their shape (a comb), their contents, the outcome of verifying them, and a round's random numbers.


@dataclass(frozen=True)
class Comb:
    """The nodes of a window: the root, the first path, then the siblings.

    Attributes:
        path: F, tokens on the first path. depth: D, how many of them have siblings.
        siblings: int64 [D, K - 1], their nodes.
        shape: the comb as a tree.
        streams: the purpose, distance ahead and index of a round's uniform draws, int64 [n] each, in the order of
            `Draws`. counts: the number of draws of each kind.
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
    # up to F + 1 tokens are committed, and the window behind them has F more
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
    positions = torch.cat([position for _, position, _ in kinds])
    index = torch.cat([index for _, _, index in kinds])
    return (purpose, positions, index), counts


class Window(NamedTuple):
    """A drafted window.

    Attributes:
        tokens: int64 [B, F], the first path. Q: [B, F, V], the distributions that these follow.
        siblings: int64 [B, D, K - 1], -1 for a missing one.
    """

    tokens: Tensor
    Q: Tensor
    siblings: Tensor


class Verdict(NamedTuple):
    """The outcome of verifying a window.

    Attributes:
        prefix: int64 [B], the number of accepted tokens of the first path. sibling: int64 [B], the sibling accepted
            after them, or -1. accepted: int64 [B], the number of both.
        node: int64 [B], the last accepted one. rest: [B, V], the distribution of the token after it.
        tried: bool [B, F], whether the rule verified a position. bound: [B], the sum of its local bounds.
    """

    prefix: Tensor
    sibling: Tensor
    accepted: Tensor
    node: Tensor
    rest: Tensor
    tried: Tensor
    bound: Tensor


def cached_windows(runner: VQRunner, path: int) -> tuple[Tensor, Tensor]:
    """Tokens int64 [slots, F] and Q [slots, F, V] of the windows, which last from round to round.

    They are views of tensors for the largest window, allocated once on first use: graphs read them at fixed addresses.
    """
    if runner.windows is None:
        size = runner.num_slots, MOST_NODES - 1
        tokens = torch.zeros(size, dtype=torch.int64, device=runner.device)
        runner.windows = tokens, torch.zeros(*size, runner.config.vocab_size, device=runner.device)
    tokens, Q = runner.windows
    return tokens[:, :path], Q[:, :path]


class Draws(NamedTuple):
    """A round's random numbers, uniform draws except `fill`.

    Attributes:
        tokens: [B, 2F + 1], to sample or resample the tokens at 0, 1, ... positions after the committed ones.
        fill: int64 [B, 2F + 1], a random token for each of these positions.
        siblings: [B, D, K - 1], to sample siblings.
        path, beside: [B, F] and [B, D, K - 1], to accept tokens of the path, and siblings.
    """

    tokens: Tensor
    fill: Tensor
    siblings: Tensor
    path: Tensor
    beside: Tensor


def draw(runner: VQRunner, batch: Batch, comb: Comb) -> Draws:
    """The random numbers of a round, by one call of the generator."""
    draws = runner.uniform(batch, *comb.streams)
    tokens, fill, siblings, path, beside = draws.split(comb.counts, 1)
    fill = (fill * runner.config.vocab_size).long()
    siblings, beside = (u.unflatten(1, comb.siblings.shape) for u in (siblings, beside))
    return Draws(tokens, fill, siblings, path, beside)


def slide(runner: VQRunner, batch: Batch, tokens: Tensor, P: Tensor, accepted: Tensor, draws: Draws) -> None:
    """Moves every window behind its committed tokens: `tokens` [B, F] and their P move up, random tokens follow."""
    path, vocabulary = tokens.shape[1], P.shape[-1]
    cached_tokens, cached_Q = cached_windows(runner, path)
    first = accepted.unsqueeze(1) + 1
    position = first + steps(path, runner.device)  # in the old window
    following = torch.cat([tokens, draws.fill[:, path:]], 1)
    cached_tokens[batch.slot] = following.gather(1, position)

    source = position.clamp(max=path - 1).unsqueeze(-1)
    Q = P.gather(1, source.expand(-1, -1, vocabulary))
    inside = (position < path).unsqueeze(-1)
    cached_Q[batch.slot] = torch.where(inside, Q, 1 / vocabulary)


# Jacobi decoding with the request's own draws: each token is a function of those before it, and the window iterates
# towards its fixed point, which is the image of `ar`.
#
# Sources:
#     Song et al., "Accelerating Feedforward Computation via Parallel Nonlinear Equation Solving", arXiv 2002.03629.
#     Wiggers and Hoogeboom, "Predictive Sampling with Forecasting Autoregressive Models", arXiv 2002.09928.
#
# A round:
#
# 1. Draft. The window's tokens come from the round before, and so do K - 1 siblings beside each of the first D.
# 2. Verify. One forward pass of the target over all of them, and one sample after each node by its position's own draw.
# 3. Commit the tokens that equal the samples after their predecessors, and the sample after the last of these.
# 4. Redraw. The samples along the first path are the next window: tokens that had converged stay as they are.


def cached_nodes(runner: VQRunner) -> Tensor:
    """The drafted nodes of the windows, int64 [slots, N], which last from round to round. Allocated on first use."""
    if runner.nodes is None:
        runner.nodes = torch.zeros(runner.num_slots, MOST_NODES, dtype=torch.int64, device=runner.device)
    return runner.nodes


def run_same_image(runner: VQRunner, batch: Batch) -> Tensor:
    """The round but for what the CPU counts: its `outcome`."""
    request = batch.request
    comb = comb_of(request.window, request.pd_k or 1, request.pd_d or 0, runner.device)
    tokens = _draft_same_image(runner, batch, comb)
    features = runner.features(batch, tokens, depth=comb.shape.depth, seen=comb.shape.seen)
    P = runner.distributions(batch, features)
    drawn = sample(P, runner.drawn(batch, comb.shape.depth))
    verified = follow(comb.shape, tokens, drawn, runner.seq_len - batch.num_committed)
    commit(runner, batch, Drafted(comb.shape, tokens, None), verified)
    _redraw(runner, batch, comb, P, drawn, verified.count)
    accepted = steps(comb.shape.height, runner.device) < verified.count.unsqueeze(1)
    return outcome(runner, verified.count, verified.bound, verified.tried, accepted)


def _draft_same_image(runner: VQRunner, batch: Batch, comb: Comb) -> Tensor:
    """Tokens int64 [B, N] of the root and of the nodes from the round before, or guesses for a new request."""
    nodes = cached_nodes(runner)[batch.slot, : comb.shape.num_nodes - 1]
    guesses = _guesses(runner, batch, steps(comb.path, runner.device))
    guesses = functional.pad(guesses, (0, comb.siblings.numel()), value=-1)  # no two siblings are alike
    drafted = torch.where((batch.iteration == 0).unsqueeze(1), guesses, nodes)
    return torch.cat([runner.last(batch, 1)[0], drafted], 1)


def _guesses(runner: VQRunner, batch: Batch, ahead: Tensor) -> Tensor:
    """Tokens that the request's own draws, for the positions `ahead`, would sample from a uniform distribution."""
    return (runner.drawn(batch, ahead) * runner.config.vocab_size).long()


def _redraw(runner: VQRunner, batch: Batch, comb: Comb, P: Tensor, drawn: Tensor, count: Tensor) -> None:
    """Stores the nodes of the next round.

    The first path is the target's samples behind the committed tokens. Siblings are the tokens that the target's
    distributions P [B, N, V] at the same positions make likely.
    """
    path = comb.path
    # positions in the old window; P has one more, after its last token
    position = count.unsqueeze(1) + 1 + steps(path, runner.device)
    inside = position <= path
    position_inside = position.clamp(max=path)
    tokens = torch.where(inside, drawn.gather(1, position_inside), _guesses(runner, batch, position))
    nodes = tokens
    if comb.depth:
        each = steps(len(tokens), runner.device).unsqueeze(1)
        Q = P[each, position_inside[:, : comb.depth]]
        u = runner.drawn(batch, position[:, : comb.depth])
        left = without(nearby(Q, u), tokens[:, : comb.depth])
        siblings = _likeliest_siblings(left, comb)
        nodes = torch.cat([tokens, siblings.flatten(1)], 1)
    cached_nodes(runner)[batch.slot, : nodes.shape[1]] = nodes


def _likeliest_siblings(left: Tensor, comb: Comb) -> Tensor:
    """The likeliest siblings int64 [B, D, K - 1] by what the path's own tokens leave, [B, D, V]; -1 if it is 0."""
    siblings = likeliest(left, comb.siblings.shape[1])
    possible = left.gather(-1, siblings.clamp(min=0)) > 0  # otherwise it may be the path's own token
    return torch.where(possible, siblings, -1)


# Speculative Jacobi decoding: the target drafts for itself, a window of tokens at a time.
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
# 1. Draft. The window's tokens, and the distributions Q that they follow, come from the round before. Proactive
#    drafting (section 4.1) adds K - 1 siblings to each of the first D tokens.
# 2. Verify. One forward pass of the target over all of them gives P.
# 3. Decide. The longest accepted prefix of the window is committed (section 3.3). If a token is rejected, its siblings
#    are verified against what is left of P (appendix A.3).
# 4. Commit the accepted tokens and one more, sampled from P or from what the rejections left of it.
# 5. Redraw the tokens behind them. SJD draws all of them from P (section 3.3). Adaptive continuation (section 4.2),
#    which MC-SJD calls maximal coupling, retains those that the exact rule accepts, and draws the others from what a
#    rejection leaves of P. Either way they follow P, which is the next round's Q.
# 6. Slide the window behind the committed tokens. New positions get random tokens.
#
# This is the round of `coupling="maximal"`; that of same-image coupling is above.
#
# The window is a comb: siblings are children of the first path and have none of their own, since the paper's full
# K-ary tree (84 nodes at K = 4, D = 3) does not fit into a window of 64. Guarantee: that of the rule, see
# docs/bounds.md.


def run_jacobi_round(runner: VQRunner, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Runs one round: verifies every window, commits its accepted prefix and one more token, and redraws the rest.

    Returns the finished sequences.
    """
    request = sequences[0].request
    if request.coupling == "same-image":
        return run(runner, sequences, watch, run_same_image, state=(cached_nodes(runner),))
    comb = comb_of(request.window, request.pd_k, request.pd_d, runner.device)
    return run(runner, sequences, watch, _verify_and_redraw, state=cached_windows(runner, comb.path))


def _verify_and_redraw(runner: VQRunner, batch: Batch) -> Tensor:
    """The round but for what the CPU counts: its `outcome`."""
    request = batch.request
    rule = rule_of(request)
    near = near_codes(runner.models["tokenizer"], rule.metric, rule.num_near) if rule.pools else None
    comb = comb_of(request.window, request.pd_k, request.pd_d, runner.device)
    draws = draw(runner, batch, comb)

    window = _draft(runner, batch, comb, rule, draws)
    P = _verify(runner, batch, comb, rule, window)
    on_path = _verify_path(rule, window, P, draws, near)
    room = runner.seq_len - batch.num_committed
    verdict = _verdict(rule, comb, window, P, on_path, draws, room, near)
    _commit(runner, batch, comb, window, verdict, draws)
    tokens = _redraw_path(rule, window, P, on_path, draws, request.continuation)
    slide(runner, batch, tokens, P, verdict.accepted, draws)

    accepted = steps(comb.path, runner.device) < verdict.accepted.unsqueeze(1)
    return outcome(runner, verdict.accepted, verdict.bound, verdict.tried, accepted)


def _draft(runner: VQRunner, batch: Batch, comb: Comb, rule: Rule, draws: Draws) -> Window:
    """The window that the round before left, and siblings beside it; a new request's is filled with random tokens."""
    vocabulary = runner.config.vocab_size
    tokens, Q = (cached[batch.slot] for cached in cached_windows(runner, comb.path))
    is_new = (batch.iteration == 0).unsqueeze(1)
    tokens = torch.where(is_new, draws.fill[:, : comb.path], tokens)
    Q = torch.where(is_new.unsqueeze(-1), 1 / vocabulary, Q)

    # proactive drafting (section 4.1): K candidates without replacement, of which the path's token is the first
    if not comb.depth:
        return Window(tokens, Q, tokens.new_empty(len(tokens), 0, 0))
    shallow = slice(comb.depth)
    left = without(Q[:, shallow], tokens[:, shallow])
    if not rule.greedy:
        return Window(tokens, Q, draw_siblings(left, draws.siblings))
    return Window(tokens, Q, _likeliest_siblings(left, comb))


def _verify(runner: VQRunner, batch: Batch, comb: Comb, rule: Rule, window: Window) -> Tensor:
    """P [B, N, V], the target's distribution after each node: one forward pass (line 2)."""
    root = runner.last(batch, 1)[0]
    nodes = torch.cat([root, window.tokens, window.siblings.flatten(1)], 1)
    features = runner.features(batch, nodes, depth=comb.shape.depth, seen=comb.shape.seen)
    return runner.distributions(batch, features, soft=rule.greedy)


def _verify_path(rule: Rule, window: Window, P: Tensor, draws: Draws, near: Tensor | None = None) -> SiblingVerdicts:
    """Verifies every token of the first path on its own, with p_i = P after the old tokens before it (lines 5 to 8)."""
    path = window.tokens.shape[1]
    depth = steps(path + 1, P.device)[1:]
    tokens, uniforms = window.tokens.unsqueeze(-1), draws.path.unsqueeze(-1)
    return verify_siblings(rule, P[:, :path], window.Q, tokens, uniforms, depth, near)


def _verdict(
    rule: Rule,
    comb: Comb,
    window: Window,
    P: Tensor,
    on_path: SiblingVerdicts,
    draws: Draws,
    room: Tensor,
    near: Tensor | None,
) -> Verdict:
    """The longest accepted prefix of the first path, and what becomes of the siblings behind it.

    `room`: int64 [B], tokens that are still to come: no more are verified.
    """
    # the longest accepted prefix (section 3.3)
    levels = steps(comb.path, P.device)
    accepted = (on_path.index == 0) & (levels < room.unsqueeze(1))
    prefix = accepted.int().cumprod(1).sum(1)
    rejected = prefix < room.clamp(max=comb.path)
    tried = levels < (prefix + rejected).unsqueeze(1)
    bound = on_path.bound(tried).sum(1)

    # beside the rejected token
    residual = P[:, : comb.path] if rule.greedy else on_path.residual
    sibling, node, beside = _verify_beside(rule, comb, window, residual, prefix, rejected, draws, near)
    found = sibling >= 0

    # the token after the accepted ones
    each = steps(len(P), P.device)
    node = torch.where(found, node, prefix)
    all_rejected = (rejected & ~found).unsqueeze(1)
    rest = torch.where(all_rejected, beside.residual, rule.target(P[each, node]))
    bound = bound + beside.bound(rejected)
    return Verdict(prefix, sibling, prefix + found, node, rest, tried, bound)


def _verify_beside(
    rule: Rule,
    comb: Comb,
    window: Window,
    residual: Tensor,
    prefix: Tensor,
    rejected: Tensor,
    draws: Draws,
    near: Tensor | None,
) -> tuple[Tensor, Tensor, SiblingVerdicts]:
    """Verifies the siblings of rejected tokens. Returns the accepted sibling's token, or -1, and node, int64 [B].

    `residual`: [B, F, V], what the rejection of a token leaves of P (appendix A.3, eq. 8 with k = 1).
    """
    each = steps(len(prefix), prefix.device)
    level = prefix.clamp(max=comb.path - 1)
    residual = residual[each, level]
    if not comb.depth:
        none = torch.full_like(prefix, -1)
        return none, none, SiblingVerdicts(none, rule.target(residual), none.unsqueeze(1) >= 0, bounds=None)

    row = prefix.clamp(max=comb.depth - 1)
    has_siblings = rejected & (prefix < comb.depth)
    siblings = window.siblings[each, row]
    candidates = torch.where(has_siblings.unsqueeze(1), siblings, -1)
    left = without(window.Q[each, level], window.tokens[each, level])  # eq. 7 with k = 2
    tried = verify_siblings(rule, residual, left, candidates, draws.beside[each, row], level + 1, near)

    chosen = tried.index.clamp(min=0)
    token = torch.where(tried.index >= 0, candidates[each, chosen], -1)
    return token, comb.siblings[row, chosen], tried


def _commit(runner: VQRunner, batch: Batch, comb: Comb, window: Window, verdict: Verdict, draws: Draws) -> None:
    """Commits the accepted prefix, the sibling after it if one was accepted, and one token more."""
    prefix, sibling, accepted, node, rest, _, _ = (part.unsqueeze(1) for part in verdict)
    last = sample(rest, draws.tokens.gather(1, accepted))

    level = steps(comb.path + 1, runner.device)
    tokens = functional.pad(window.tokens, (0, 1))
    tokens = torch.where((sibling >= 0) & (level == prefix), sibling, tokens)
    tokens = torch.where(level == accepted, last, tokens)
    runner.commit(batch, tokens, token_cost=(level < accepted).float())

    if comb.depth:  # a sibling's keys and values go where those of the rejected token are
        nodes = level[: comb.depth + 1]
        moved = (sibling >= 0) & (nodes == prefix + 1)
        runner.compact(batch, torch.where(moved, node, nodes))


def _redraw_path(
    rule: Rule, window: Window, P: Tensor, on_path: SiblingVerdicts, draws: Draws, continuation: bool
) -> Tensor:
    """Tokens int64 [B, F] that follow P, for the next round's window.

    SJD draws them all (section 3.3). Adaptive continuation keeps those that are accepted, and draws the others from
    what the rejection leaves of P (section 4.2, lines 8 to 11).
    """
    path = window.tokens.shape[1]
    u = draws.tokens[:, :path]
    # always by the exact rule: tokens that a relaxed one keeps do not follow P, which the next round takes for their Q
    exact = Rule(greedy=rule.greedy)
    if not continuation:
        return sample(exact.target(P[:, :path]), u)
    if rule.name != "exact":
        on_path = _verify_path(exact, window, P, draws)
    return torch.where(on_path.index == 0, window.tokens, sample(on_path.residual, u))


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
