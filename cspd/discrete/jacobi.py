"""Speculative Jacobi decoding: the target drafts for itself, a window of codes at a time.

Sources:
    SJD: Teng et al., "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative Jacobi
        Decoding", arXiv 2410.01699.
    MC-SJD: So et al., "MC-SJD: Maximal Coupling Speculative Jacobi Decoding for Autoregressive Visual Generation
        Acceleration", arXiv 2510.24211; its later name is Speculative Coupled Decoding.
    SJD-PAC: Kang et al., "SJD-PAC: Accelerating Speculative Jacobi Decoding via Proactive Drafting and Adaptive
        Continuation", arXiv 2603.18599. Sections, equations and lines of its Algorithm 1 are cited below.

A round:

1. Draft. The window's codes, and the distributions Q that they follow, come from the round before. Proactive drafting
   (section 4.1) puts K - 1 siblings beside each of the first D codes.
2. Verify. One forward of the target over all of them gives P.
3. Judge. The longest accepted prefix of the window is kept (section 3.3). Where a code is rejected, its siblings are
   judged against what is left of P (appendix A.3).
4. Commit the accepted codes and one more, sampled from P or from what the rejections left of it.
5. Redraw the codes behind them. SJD draws all of them from P (section 3.3). Adaptive continuation (section 4.2), which
   MC-SJD calls maximal coupling, keeps those that the exact rule accepts, and draws the others from what a rejection
   leaves of P. Either way they follow P, which is the next round's Q.
6. Slide the window behind the committed codes. New places get codes at random.

This is the round of `coupling="maximal"`; `cspd.discrete.jacobi_same_image` has that of same-image coupling.

The window is a comb: siblings are children of the first path and have none of their own, since the paper's full K-ary
tree (84 nodes at K = 4, D = 3) does not fit into a window of 64. Guarantee: that of the rule, see docs/bounds.md.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cspd.discrete import jacobi_same_image
from cspd.discrete.batch import Batch
from cspd.discrete.cache import MOST_NODES
from cspd.discrete.draft_verify import check_rule
from cspd.discrete.host import VQHost
from cspd.discrete.jacobi_same_image import kept_nodes
from cspd.discrete.judging import Judged, judge_siblings
from cspd.discrete.neighbours import near_codes
from cspd.discrete.options import MIXED, coupling_option, rule_options
from cspd.discrete.probabilities import draw_siblings, likeliest, sample, without
from cspd.discrete.rounds import outcome, run
from cspd.discrete.rules import Rule, rule_of
from cspd.discrete.window import Comb, Draws, Verdict, Window, comb_of, draw, kept_windows, slide
from cspd.method import Method
from cspd.option import Option, check_integer
from cspd.precision import Stopwatch
from cspd.sequence import Request, Sequence
from cspd.vq.steps import steps


def run_round(host: VQHost, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Judges every window by one forward of the target, commits the accepted prefix and one code more (two after a
    sibling), drafts the rest anew, and returns the sequences that are finished.
    """
    request = sequences[0].request
    if request.coupling == "same-image":
        return run(host, sequences, watch, jacobi_same_image.judge_and_redraw, state=(kept_nodes(host),))
    comb = comb_of(request.window, request.pd_k, request.pd_d, host.device)
    return run(host, sequences, watch, _judge_and_redraw, state=kept_windows(host, comb.path))


def _judge_and_redraw(host: VQHost, batch: Batch) -> Tensor:
    """The round but for what the host counts: its `outcome`."""
    request = batch.request
    rule = rule_of(request)
    near = near_codes(host.models["tokenizer"], rule.metric, rule.num_near) if rule.pools else None
    comb = comb_of(request.window, request.pd_k, request.pd_d, host.device)
    draws = draw(host, batch, comb)

    window = _draft(host, batch, comb, rule, draws)
    P = _verify(host, batch, comb, rule, window)
    on_path = _judge_path(rule, window, P, draws, near)
    room = host.seq_len - batch.known_t
    verdict = _judge(rule, comb, window, P, on_path, draws, room, near)
    _commit(host, batch, comb, window, verdict, draws)
    codes = _redraw_path(rule, window, P, on_path, draws, request.continuation)
    slide(host, batch, codes, P, verdict.accepted, draws)

    accepted = steps(comb.path, host.device) < verdict.accepted.unsqueeze(1)
    return outcome(host, verdict.accepted, verdict.bound, verdict.judged, accepted)


def _draft(host: VQHost, batch: Batch, comb: Comb, rule: Rule, draws: Draws) -> Window:
    """The window that the round before left, and siblings beside it; a new request's is filled with random codes."""
    vocabulary = host.config.vocab_size
    codes, Q = (kept[batch.slot] for kept in kept_windows(host, comb.path))
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


def _verify(host: VQHost, batch: Batch, comb: Comb, rule: Rule, window: Window) -> Tensor:
    """P [B, N, V], the target's distribution after each node: one forward (line 2)."""
    root = host.last(batch, 1)[0]
    nodes = torch.cat([root, window.codes, window.siblings.flatten(1)], 1)
    features = host.features(batch, nodes, depth=comb.shape.depth, seen=comb.shape.seen)
    return host.distributions(batch, features, soft=rule.greedy)


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


def _commit(host: VQHost, batch: Batch, comb: Comb, window: Window, verdict: Verdict, draws: Draws) -> None:
    """Commits the accepted prefix, the sibling after it if one was accepted, and one code more."""
    prefix, sibling, accepted, node, rest, _, _ = (part.unsqueeze(1) for part in verdict)
    last = sample(rest, draws.codes.gather(1, accepted))

    level = steps(comb.path + 1, host.device)
    codes = functional.pad(window.codes, (0, 1))
    codes = torch.where((sibling >= 0) & (level == prefix), sibling, codes)
    codes = torch.where(level == accepted, last, codes)
    host.commit(batch, codes, heat=(level < accepted).float())

    if comb.depth:  # a sibling's keys and values go where those of the rejected code are
        nodes = level[: comb.depth + 1]
        moved = (sibling >= 0) & (nodes == prefix + 1)
        host.compact(batch, torch.where(moved, node, nodes))


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


def check(request: Request, host: VQHost) -> None:
    """Raises ValueError where the window has no room for the comb, or on a bad rule."""
    comb = f"pd_k={request.pd_k} candidates at pd_d={request.pd_d} levels and a code below them"
    least, most = request.pd_k * request.pd_d + 1, MOST_NODES - 1
    if least > most:
        raise ValueError(f"{comb} need a window of {least}, and {most} is the largest: give fewer of them")
    check_integer("window", request.window, least, most, f"it has room for {comb}")
    check_rule(request, host)


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
        run_round=run_round,
        options=(*options, *rule_options(rule, **defaults), coupling_option(coupling)),
        mixed=lambda request: MIXED,
        check=check,
        of_request=lambda request: rule_of(request).guarantee,
    )
