"""Jacobi decoding: the target drafts a window of tokens for itself."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cspd.discrete.batch import Batch
from cspd.discrete.distributions import draw_siblings, likeliest, nearby, sample, without
from cspd.discrete.drafts import Drafted, by_budget, check_rule, commit, explain, outcome, price, run
from cspd.discrete.kv_cache import MOST_NODES
from cspd.discrete.prices import Verification
from cspd.discrete.rules import MIXED, Exact, Greedy, Rule, coupling_option, rule_of, rule_options
from cspd.discrete.runner import VQRunner
from cspd.discrete.trees import Shape, SiblingVerdicts, verify_same_image, verify_siblings
from cspd.method import Method
from cspd.noise import MAX_INDEX, Purpose, check_indices
from cspd.option import Option, check_integer
from cspd.request import Request, Sequence, Stopwatch
from cspd.transformer import steps

# Jacobi windows: their shape (a comb), their contents, the outcome of verifying them, and a round's random numbers.


@dataclass(frozen=True)
class Comb:
    """The nodes of a window: the root, the first path, then the siblings.

    Attributes:
        path: F, the number of tokens on the first path. depth: D, how many of them have siblings.
        siblings: int64 [D, K - 1], the siblings' nodes.
        shape: the comb as a tree.
        streams: the purpose, distance ahead and index of a round's uniform draws, int64 [n] each, in the order of
            `WindowDraws`. counts: the number of draws of each kind.
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
    num_beside = pd_k - 1 if pd_d else 0
    depth = pd_d if num_beside else 0
    path = window - num_beside * depth
    index = torch.arange(depth * num_beside, device=device)
    siblings = path + 1 + index.view(depth, num_beside)

    # the root, the first path one after the other, and siblings, which share their parent with the path
    parents = [-1, *range(path)]
    for level in range(depth):
        parents += [level] * num_beside
    sizes = [path] + [depth] * num_beside
    shape = Shape(torch.tensor(parents, device=device), path, sizes)
    return Comb(path, depth, siblings, shape, *_streams(path, siblings))


def _streams(path: int, siblings: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], list[int]]:
    """`streams` and `counts` of a comb."""
    depth, num_beside = siblings.shape
    device = siblings.device
    check_indices(path + depth * num_beside, MAX_INDEX)  # of the last node
    # up to F + 1 tokens are committed, and the window behind them has F more
    ahead = torch.arange(2 * path + 1, device=device)
    zero = torch.zeros_like(ahead)
    of_path = torch.arange(path, device=device)
    level = torch.arange(depth, device=device).repeat_interleave(num_beside)
    of_siblings = siblings.flatten()
    kinds = [
        (Purpose.CODE, ahead, zero),
        (Purpose.CODE_RESIDUAL, ahead, zero),
        (Purpose.CODE, level, of_siblings),
        (Purpose.TOKEN_ACCEPT, of_path, of_path + 1),
        (Purpose.TOKEN_ACCEPT, level, of_siblings),
    ]
    purposes, positions, indices = zip(*kinds)
    counts = [len(index) for index in indices]
    purpose = torch.tensor(purposes, device=device).repeat_interleave(torch.tensor(counts, device=device))
    return (purpose, torch.cat(positions), torch.cat(indices)), counts


class Window(NamedTuple):
    """A drafted window.

    Attributes:
        tokens: int64 [B, F], the first path. Q: [B, F, V], the distributions that they follow.
        siblings: int64 [B, D, K - 1], -1 for a missing one.
    """

    tokens: Tensor
    Q: Tensor
    siblings: Tensor


class Verdict(NamedTuple):
    """The outcome of verifying a window.

    Attributes:
        prefix: int64 [B], the number of accepted tokens of the first path.
        sibling: int64 [B], the token of the sibling accepted after them, or -1.
        accepted: int64 [B], the number of both. node: int64 [B], the last accepted node.
        rest: [B, V], the distribution of the token after it.
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
    """Tokens int64 [slots, F] and Q [slots, F, V] of the windows, which last from round to round."""
    tokens, Q = runner.windows
    return tokens[:, :path], Q[:, :path]


class WindowDraws(NamedTuple):
    """A round's random numbers, uniform draws except `fill`.

    Attributes:
        tokens: [B, 2F + 1], to sample or resample the tokens 0, 1, ... positions after the committed ones.
        fill: int64 [B, 2F + 1], a random token for each of these positions.
        siblings: [B, D, K - 1], to sample siblings.
        path, beside: [B, F] and [B, D, K - 1], to accept tokens of the path, and siblings.
    """

    tokens: Tensor
    fill: Tensor
    siblings: Tensor
    path: Tensor
    beside: Tensor


def draw(runner: VQRunner, batch: Batch, comb: Comb) -> WindowDraws:
    """The random numbers of a round, by one call of the generator."""
    draws = runner.uniform(batch, *comb.streams)
    tokens, fill, siblings, path, beside = draws.split(comb.counts, 1)
    size = comb.siblings.shape
    fill = (fill * runner.config.vocab_size).long()
    return WindowDraws(tokens, fill, siblings.unflatten(1, size), path, beside.unflatten(1, size))


def slide(
    runner: VQRunner,
    batch: Batch,
    tokens: Tensor,
    P: Tensor,
    accepted: Tensor,
    draws: WindowDraws,
) -> None:
    """Moves every window behind its committed tokens: `tokens` [B, F] and their P move up, random tokens follow."""
    path = tokens.shape[1]
    vocabulary = P.shape[-1]
    cached_tokens, cached_Q = cached_windows(runner, path)
    first = accepted.unsqueeze(1) + 1
    position = first + steps(path, runner.device)  # in the old window
    new = draws.fill[:, path:]
    following = torch.cat([tokens, new], 1)
    cached_tokens[batch.slot] = following.gather(1, position)

    source = position.clamp(max=path - 1).unsqueeze(-1)
    Q = P.gather(1, source.expand(-1, -1, vocabulary))
    inside = (position < path).unsqueeze(-1)
    cached_Q[batch.slot] = torch.where(inside, Q, 1 / vocabulary)


# Jacobi decoding with the request's own draws: each token is a function of the tokens before it, and the window
# iterates towards its fixed point, which is the image of `ar`.
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
# 4. Redraw. The samples along the first path are the next window: tokens that have converged stay as they are.


def run_same_image(runner: VQRunner, batch: Batch) -> Tensor:
    """The round on the device; returns its `outcome`."""
    request = batch.request
    comb = comb_of(request.window, request.pd_k or 1, request.pd_d or 0, runner.device)
    shape = comb.shape
    tokens = _draft_same_image(runner, batch, comb)
    features = runner.features(batch, tokens, depth=shape.depth, seen=shape.seen)
    P = runner.distributions(batch, features)
    drawn = sample(P, runner.drawn(batch, shape.depth))
    room = runner.seq_len - batch.num_committed
    verified = verify_same_image(shape, tokens, drawn, room)
    commit(runner, batch, Drafted(shape, tokens, None), verified)
    _redraw(runner, batch, comb, P, drawn, verified.count)
    accepted = steps(shape.height, runner.device) < verified.count.unsqueeze(1)
    return outcome(runner, verified.count, verified.bound, price(runner, batch, None), verified.tried, accepted)


def _draft_same_image(runner: VQRunner, batch: Batch, comb: Comb) -> Tensor:
    """Tokens int64 [B, N] of the root and of the nodes from the round before, or guesses for a new request."""
    nodes = runner.nodes[batch.slot, : comb.shape.num_nodes - 1]
    guesses = _guesses(runner, batch, steps(comb.path, runner.device))
    guesses = functional.pad(guesses, (0, comb.siblings.numel()), value=-1)  # no siblings
    is_new = (batch.iteration == 0).unsqueeze(1)
    drafted = torch.where(is_new, guesses, nodes)
    root, _ = runner.last(batch, 1)
    return torch.cat([root, drafted], 1)


def _guesses(runner: VQRunner, batch: Batch, ahead: Tensor) -> Tensor:
    """The tokens that the request's own draws for the positions `ahead` sample from a uniform distribution."""
    return (runner.drawn(batch, ahead) * runner.config.vocab_size).long()


def _redraw(
    runner: VQRunner,
    batch: Batch,
    comb: Comb,
    P: Tensor,
    drawn: Tensor,
    count: Tensor,
) -> None:
    """Stores the nodes of the next round.

    The first path is the target's samples behind the `count` accepted tokens and one more. Siblings are the likeliest
    tokens by the target's distributions P [B, N, V] at the same positions.
    """
    path = comb.path
    # positions in the old window; P has one more, after its last token
    position = count.unsqueeze(1) + 1 + steps(path, runner.device)
    inside = position <= path
    position_inside = position.clamp(max=path)
    samples = drawn.gather(1, position_inside)
    tokens = torch.where(inside, samples, _guesses(runner, batch, position))
    nodes = tokens
    if comb.depth:
        shallow = slice(comb.depth)
        each = steps(len(tokens), runner.device).unsqueeze(1)
        Q = P[each, position_inside[:, shallow]]
        u = runner.drawn(batch, position[:, shallow])
        left = without(nearby(Q, u), tokens[:, shallow])
        siblings = _likeliest_siblings(left, comb)
        nodes = torch.cat([tokens, siblings.flatten(1)], 1)
    runner.nodes[batch.slot, : nodes.shape[1]] = nodes


def slide_by_one(runner: VQRunner, batch: Batch) -> None:
    """Moves the windows, which have no siblings, behind the one token that a round of baseline sampling commits."""
    path = batch.request.window
    nodes = runner.nodes
    guesses = _guesses(runner, batch, 1 + steps(path, runner.device))
    is_new = (batch.iteration == 0).unsqueeze(1)
    nodes[batch.slot, : path - 1] = torch.where(is_new, guesses[:, :-1], nodes[batch.slot, 1:path])
    nodes[batch.slot, path - 1] = guesses[:, -1]


def _likeliest_siblings(left: Tensor, comb: Comb) -> Tensor:
    """The likeliest siblings int64 [B, D, K - 1], by Q without the path's own tokens, [B, D, V]; -1 if it is 0."""
    siblings = likeliest(left, comb.siblings.shape[1])
    mass = left.gather(-1, siblings.clamp(min=0))
    return torch.where(mass > 0, siblings, -1)  # of mass 0 may be the path's own token


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
#    which MC-SJD calls maximal coupling, retains the tokens that the exact rule accepts, and draws the others from what
#    a rejection leaves of P. Either way they follow P, which is the next round's Q.
# 6. Slide the window behind the committed tokens. New positions get random tokens, and the uniform distribution as Q.
#
# This is the round of `coupling="maximal"`; that of same-image coupling is above.
#
# The window is a comb: siblings are children of the first path and have none of their own, since the paper's full
# K-ary tree (84 nodes at K = 4, D = 3) does not fit into a window of 64. Guarantee: that of the rule, see
# `cspd.discrete.rules`.


def run_jacobi_round(runner: VQRunner, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Runs one round: verifies every window, commits its accepted prefix and one more token, and redraws the rest.

    Returns the finished sequences.
    """
    request = sequences[0].request
    if request.coupling == "same-image":
        return run(runner, sequences, watch, run_same_image, state=[runner.nodes])
    comb = comb_of(request.window, request.pd_k, request.pd_d, runner.device)
    return run(runner, sequences, watch, _verify_and_redraw, state=cached_windows(runner, comb.path))


def _verify_and_redraw(runner: VQRunner, batch: Batch) -> Tensor:
    """The round on the device; returns its `outcome`."""
    request = batch.request
    rule = rule_of(request, runner.models["tokenizer"])
    comb = comb_of(request.window, request.pd_k, request.pd_d, runner.device)
    draws = draw(runner, batch, comb)

    window = _draft(runner, batch, comb, rule, draws)
    P = _verify(runner, batch, comb, rule, window)
    on_path = _verify_path(rule, window, P, draws)
    room = runner.seq_len - batch.num_committed
    verdict = _verdict(rule, comb, window, P, on_path, draws, room)
    _commit(runner, batch, comb, window, verdict, draws)
    tokens = _redraw_path(rule, window, P, on_path, draws, request.continuation)
    slide(runner, batch, tokens, P, verdict.accepted, draws)

    level = steps(comb.path, runner.device)
    beside = functional.pad(window.siblings, (0, 0, 0, comb.path - comb.depth), value=-1)
    candidates = torch.cat([window.tokens.unsqueeze(-1), beside], -1)
    depth = (level + 1).expand_as(window.tokens)
    audit = price(runner, batch, Verification(P[:, : comb.path], window.Q, candidates, depth, verdict.tried))
    accepted = level < verdict.accepted.unsqueeze(1)
    return outcome(runner, verdict.accepted, verdict.bound, audit, verdict.tried, accepted)


def _draft(runner: VQRunner, batch: Batch, comb: Comb, rule: Rule, draws: WindowDraws) -> Window:
    """The window that the last round left, with siblings; random tokens for a new request."""
    cached_tokens, cached_Q = cached_windows(runner, comb.path)
    is_new = (batch.iteration == 0).unsqueeze(1)
    fill = draws.fill[:, : comb.path]
    uniform = 1 / runner.config.vocab_size
    tokens = torch.where(is_new, fill, cached_tokens[batch.slot])
    Q = torch.where(is_new.unsqueeze(-1), uniform, cached_Q[batch.slot])

    # proactive drafting (section 4.1): K candidates without replacement, of which the path's token is the first
    if not comb.depth:
        return Window(tokens, Q, tokens.new_empty(len(tokens), 0, 0))
    shallow = slice(comb.depth)
    left = without(Q[:, shallow], tokens[:, shallow])
    siblings = _likeliest_siblings(left, comb) if rule.greedy else draw_siblings(left, draws.siblings)
    return Window(tokens, Q, siblings)


def _verify(runner: VQRunner, batch: Batch, comb: Comb, rule: Rule, window: Window) -> Tensor:
    """P [B, N, V], the target's distribution after each node: one forward pass (line 2)."""
    shape = comb.shape
    root, _ = runner.last(batch, 1)
    siblings = window.siblings.flatten(1)
    nodes = torch.cat([root, window.tokens, siblings], 1)
    features = runner.features(batch, nodes, depth=shape.depth, seen=shape.seen)
    return runner.distributions(batch, features, soft=rule.greedy)


def _verify_path(rule: Rule, window: Window, P: Tensor, draws: WindowDraws) -> SiblingVerdicts:
    """Verifies every token of the first path alone, with P after the old tokens before it (lines 5 to 8)."""
    path = window.tokens.shape[1]
    depth = steps(path + 1, P.device)[1:]
    candidates = window.tokens.unsqueeze(-1)  # one at each position
    uniforms = draws.path.unsqueeze(-1)
    return verify_siblings(rule, P[:, :path], window.Q, candidates, uniforms, depth)


def _verdict(
    rule: Rule,
    comb: Comb,
    window: Window,
    P: Tensor,
    on_path: SiblingVerdicts,
    draws: WindowDraws,
    room: Tensor,
) -> Verdict:
    """The longest accepted prefix of the first path, and the verdict on the siblings of the rejected token after it.

    `room`: int64 [B], the tokens still to come: no more are verified.
    """
    # the longest accepted prefix (section 3.3)
    levels = steps(comb.path, P.device)
    has_room = levels < room.unsqueeze(1)
    accepted = (on_path.index == 0) & has_room
    prefix = accepted.int().cumprod(1).sum(1)
    rejected = prefix < room.clamp(max=comb.path)
    num_tried = prefix + rejected
    tried = levels < num_tried.unsqueeze(1)
    bound = on_path.bound(tried).sum(1)

    # the siblings of the rejected token
    residual = P[:, : comb.path] if rule.greedy else on_path.residual
    sibling, node, beside = _verify_beside(rule, comb, window, residual, prefix, rejected, draws)
    found = sibling >= 0
    bound = bound + beside.bound(rejected)

    # the distribution of the token after the accepted ones: P, or what the rejections left of it
    each = steps(len(P), P.device)
    node = torch.where(found, node, prefix)
    all_rejected = (rejected & ~found).unsqueeze(1)
    rest = torch.where(all_rejected, beside.residual, rule.target(P[each, node]))
    return Verdict(prefix, sibling, prefix + found, node, rest, tried, bound)


def _verify_beside(
    rule: Rule,
    comb: Comb,
    window: Window,
    residual: Tensor,
    prefix: Tensor,
    rejected: Tensor,
    draws: WindowDraws,
) -> tuple[Tensor, Tensor, SiblingVerdicts]:
    """Verifies the siblings of rejected tokens. Returns the token, or -1, and the node of the accepted one, int64 [B].

    `residual`: [B, F, V], what the rejection of a token leaves of P (appendix A.3, eq. 8 with k = 1).
    """
    each = steps(len(prefix), prefix.device)
    level = prefix.clamp(max=comb.path - 1)
    residual = residual[each, level]
    if not comb.depth:
        none = torch.full_like(prefix, -1)
        no_candidate = none.unsqueeze(1) >= 0
        return none, none, SiblingVerdicts(none, rule.target(residual), no_candidate, bounds=None)

    row = prefix.clamp(max=comb.depth - 1)
    has_siblings = rejected & (prefix < comb.depth)
    siblings = window.siblings[each, row]
    candidates = torch.where(has_siblings.unsqueeze(1), siblings, -1)
    left = without(window.Q[each, level], window.tokens[each, level])  # eq. 7 with k = 2
    tried = verify_siblings(rule, residual, left, candidates, draws.beside[each, row], level + 1)

    chosen = tried.index.clamp(min=0)
    token = torch.where(tried.index >= 0, candidates[each, chosen], -1)
    return token, comb.siblings[row, chosen], tried


def _commit(
    runner: VQRunner,
    batch: Batch,
    comb: Comb,
    window: Window,
    verdict: Verdict,
    draws: WindowDraws,
) -> None:
    """Commits the accepted prefix, the sibling after it if one was accepted, and one token more."""
    prefix = verdict.prefix.unsqueeze(1)
    sibling = verdict.sibling.unsqueeze(1)
    accepted = verdict.accepted.unsqueeze(1)
    u = draws.tokens.gather(1, accepted)
    last = sample(verdict.rest.unsqueeze(1), u)

    level = steps(comb.path + 1, runner.device)
    found = sibling >= 0
    tokens = functional.pad(window.tokens, (0, 1))
    tokens = torch.where(found & (level == prefix), sibling, tokens)
    tokens = torch.where(level == accepted, last, tokens)
    runner.commit(batch, tokens, token_cost=(level < accepted).float())

    if comb.depth:  # an accepted sibling's keys and values replace those of the rejected token
        nodes = level[: comb.depth + 1]
        is_replaced = found & (nodes == prefix + 1)
        path = torch.where(is_replaced, verdict.node.unsqueeze(1), nodes)
        runner.compact(batch, path)


def _redraw_path(
    rule: Rule, window: Window, P: Tensor, on_path: SiblingVerdicts, draws: WindowDraws, continuation: bool
) -> Tensor:
    """Tokens int64 [B, F] that follow P, for the next round's window.

    SJD draws all of them (section 3.3). Adaptive continuation retains the accepted ones, and draws the others from what
    the rejection leaves of P (section 4.2, lines 8 to 11).
    """
    path = window.tokens.shape[1]
    u = draws.tokens[:, :path]
    if not continuation:
        return sample(rule.target(P[:, :path]), u)
    # Always by the exact rule. Tokens that a relaxed rule accepts do not follow P, which is their Q in the next round.
    if rule.guarantee != "exact":
        exact = Greedy(Exact()) if rule.greedy else Exact()
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


def prepare(request: Request, runner: VQRunner) -> Request:
    """As `by_budget`; raises ValueError also if the window has no room for the comb, or the rule is invalid."""
    comb = f"pd_k={request.pd_k} candidates at pd_d={request.pd_d} levels and a token below them"
    least = request.pd_k * request.pd_d + 1
    most = MOST_NODES - 1
    if least > most:
        raise ValueError(f"{comb} need a window of {least}, and the maximum is {most}: lower pd_k or pd_d")
    check_integer("window", request.window, least, most, f"it has room for {comb}")
    check_rule(request, runner)
    return by_budget(request, runner)


def jacobi(
    name: str,
    summary: str,
    papers: dict[str, str],
    rule: str = "exact",
    coupling: str = "maximal",
    **defaults: object,
) -> Method:
    """A method that drafts by Jacobi iteration. The arguments are defaults: requests may name any rule.

    `defaults`: of `OPTIONS` and of the rule's parameters.
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
        prepare=prepare,
        explain=explain,
        of_request=lambda request: rule_of(request).guarantee,
    )
