"""Speculative Jacobi decoding (arXiv 2410.01699) and SJD-PAC: the target drafts for itself, a window at a time.

The window is a chain, the first path, with `pd_k` - 1 siblings of it at each of the first `pd_d` levels (a comb). The
draft's distributions Q are the target's own of the round before. Nodes: the root, the first path, then the siblings.
Guarantee: that of the rule, see docs/bounds.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from cspd.discrete.cache import MOST_NODES
from cspd.discrete.draft_verify import account, check_rule
from cspd.discrete.host import MIXED, VQHost
from cspd.discrete.rules import Rule, draw_siblings, judge_siblings, rule_of, rule_options, sample, without
from cspd.discrete.tree import Shape, shape_of
from cspd.method import Method
from cspd.noise import Purpose
from cspd.option import Option
from cspd.precision import Stopwatch
from cspd.sequence import Request, Sequence


@dataclass(frozen=True)
class Comb:
    """The shape of a window.

    Attributes:
        path: levels of the first path. depth: D, how many of them have siblings.
        siblings: int64 [D, K - 1], their nodes; where there are none, [1, 1] and never looked at.
        draws: purpose, places ahead and index of all draws of a round, int64 [n] each; sizes: how many there are of the
            codes drawn or drawn again, of those filled in, of the nodes' coins, of the siblings.
    """

    path: int
    depth: int
    siblings: Tensor
    shape: Shape
    draws: tuple[Tensor, Tensor, Tensor]
    sizes: list[int]


@functools.lru_cache(maxsize=32)
def comb(window: int, pd_k: int, pd_d: int, device: torch.device) -> Comb:
    """The comb of `window` drafted nodes, K = pd_k of them at each of the first D = pd_d levels."""
    pd_d = pd_d if pd_k > 1 else 0
    path = window - (pd_k - 1) * pd_d
    parents = [*range(-1, path), *(level for level in range(pd_d) for _ in range(pd_k - 1))]
    siblings = torch.zeros(1, 1, dtype=torch.int64, device=device)
    if pd_d:
        siblings = path + 1 + torch.arange(pd_d * (pd_k - 1), device=device).view(pd_d, -1)
    shape = shape_of(torch.tensor(parents, device=device), [pd_k] * pd_d + [1] * (path - pd_d))
    codes, zeros = (
        torch.arange(2 * path + 1, device=device),
        torch.zeros(2 * path + 1, dtype=torch.int64, device=device),
    )
    beside = torch.arange(len(siblings), device=device).repeat_interleave(siblings.shape[1])
    nodes = torch.arange(shape.num_nodes, device=device)
    parts = [
        (Purpose.CODE, codes, zeros),
        (Purpose.CODE_RESIDUAL, codes, zeros),
        (Purpose.CODE_COIN, (shape.depth - 1).clamp(min=0), nodes),
        (Purpose.CODE, beside, siblings.flatten()),
    ]
    purpose = torch.cat([torch.full_like(ahead, purpose) for purpose, ahead, _ in parts])
    draws = purpose, *(torch.cat(part) for part in list(zip(*parts))[1:])
    return Comb(path, pd_d, siblings, shape, draws, [len(ahead) for _, ahead, _ in parts])


@dataclass
class Windows:
    """What is drafted for every slot: codes int64 [slots, F] of the first path, and Q [slots, F, V]."""

    codes: Tensor
    Q: Tensor


def _windows(host: VQHost, path: int) -> Windows:
    key = ("window", path)
    if key not in host.running:
        codes = torch.zeros(host.num_slots, path, dtype=torch.int64, device=host.device)
        Q = torch.zeros(host.num_slots, path, host.config.vocab_size, device=host.device)
        host.running[key] = Windows(codes, Q)
    return host.running[key]


def run_round(host: VQHost, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Judges every window by one forward of the target, commits the accepted prefix and one code more (two after a
    sibling), drafts the rest anew, and returns the sequences that are finished.
    """
    batch, request = host.begin(sequences, watch), sequences[0].request
    rule = rule_of(request)
    c = comb(request.window, request.pd_k, request.pd_d, host.device)
    windows, F, D = _windows(host, c.path), c.path, c.depth
    levels = torch.arange(F, device=host.device)
    # u[:, j] is for the code j places after the committed ones, drawn or drawn again, fill[:, j] for one filled in
    u, fill, coins, u_siblings = host.uniform(batch, *c.draws).split(c.sizes, 1)
    fresh = (batch.round == 0).unsqueeze(1)
    vocabulary = host.config.vocab_size
    anything = (fill * vocabulary).long()
    codes = torch.where(fresh, anything[:, :F], windows.codes[batch.slot])
    Q = torch.where(fresh.unsqueeze(-1), 1 / vocabulary, windows.Q[batch.slot])
    others = _siblings(c, rule, codes, Q, u_siblings)

    nodes = torch.cat([host.last(batch, 1)[0], codes, others.flatten(1)], 1)[:, : c.shape.num_nodes]
    features = host.features(batch, nodes, depth=c.shape.depth, sees=c.shape.sees)
    everywhere = host.distributions(batch, features, soft=rule.greedy)
    P = everywhere[:, :F]  # of level j, after its parent on the first path

    room = (host.config.block_size - batch.known_t).unsqueeze(1)
    near = host.near(rule.metric, rule.k) if rule.pools else None
    first = judge_siblings(rule, P, Q, codes.unsqueeze(-1), coins[:, 1 : F + 1, None], levels + 1, near)
    kept = ((first.index == 0) & (levels < room)).int().cumprod(1)
    count = kept.sum(1, keepdim=True)  # codes of the first path that are accepted
    rows, at = torch.arange(len(batch), device=host.device), count.squeeze(1)
    refused = at < torch.minimum(room.squeeze(1), torch.full_like(at, F))
    level = at.clamp(max=F - 1)
    # the refused level's siblings, against what their first leaves
    beside = (refused & (at < D)).unsqueeze(1)
    tooth = level.clamp(max=max(D - 1, 0))
    tokens = torch.where(beside, others[rows, tooth], -1)
    left = without(Q[rows, level], codes[rows, level])
    side = c.siblings[tooth]
    remaining = (P if rule.greedy else first.residual)[rows, level]
    second = judge_siblings(rule, remaining, left, tokens, coins.gather(1, side), level + 1, near)
    found = second.index >= 0
    chosen = second.index.clamp(min=0).unsqueeze(1)
    node, sibling = side.gather(1, chosen).squeeze(1), tokens.gather(1, chosen)
    end = torch.where(found, node, at)  # the last accepted node
    rest = torch.where((refused & ~found).unsqueeze(1), second.residual, rule.target(everywhere[rows, end]))
    accepted = at + found
    last = sample(rest, u[rows, accepted])

    steps = torch.arange(F + 2, device=host.device)
    new = torch.nn.functional.pad(codes, (0, 2))
    new = torch.where(found.unsqueeze(1) & (steps == count), sibling, new)
    new = torch.where(steps == accepted.unsqueeze(1), last.unsqueeze(1), new)
    host.commit(batch, new, (steps < accepted.unsqueeze(1)).float())
    if D:
        path = torch.where(found.unsqueeze(1) & (steps[: D + 1] == count + 1), end.unsqueeze(1), steps[: D + 1])
        host.compact(batch, path)

    # the tail: kept or drawn again, by the exact rule whatever the request's, so that its law is P's
    exact = Rule(greedy=rule.greedy)
    if request.continuation:
        again = first
        if rule.name != "exact":
            again = judge_siblings(exact, P, Q, codes.unsqueeze(-1), coins[:, 1 : F + 1, None], levels + 1)
        tail = torch.where(again.index == 0, codes, sample(again.residual, u[:, :F]))
    else:
        tail = sample(exact.target(P), u[:, :F])
    source = levels + accepted.unsqueeze(1) + 1
    inside = source < F
    source = source.clamp(max=F - 1)
    filled = anything.gather(1, levels + accepted.unsqueeze(1) + 1)
    windows.codes[batch.slot] = torch.where(inside, tail.gather(1, source), filled)
    shifted = P.gather(1, source.unsqueeze(-1).expand(-1, -1, vocabulary))
    windows.Q[batch.slot] = torch.where(inside.unsqueeze(-1), shifted, 1 / vocabulary)

    judged = levels < torch.minimum(count + refused.unsqueeze(1), room)
    bound = (first.bound * judged).sum(1) + second.bound
    return account(host, batch, accepted, bound, judged, levels < accepted.unsqueeze(1))


def _siblings(c: Comb, rule: Rule, codes: Tensor, Q: Tensor, u: Tensor) -> Tensor:
    """Candidates beside the first path's [B, D, K - 1], drawn from what it leaves of Q without replacement."""
    depth, beside = c.siblings.shape
    if not c.depth:
        return codes.new_full((len(codes), 1, 1), -1)
    left = without(Q[:, :depth], codes[:, :depth])
    if rule.greedy:
        best = left.topk(min(beside, left.shape[-1]))
        found = torch.where(best.values > 0, best.indices, -1)
        return torch.nn.functional.pad(found, (0, beside - found.shape[-1]), value=-1)
    return draw_siblings(left, u.unflatten(1, c.siblings.shape))


OPTIONS = (
    Option("window", int, "codes judged at once", default=64, low=1, high=MOST_NODES - 1, metavar="W"),
    Option("pd_k", int, "candidates at a level of the comb; 1 drafts no siblings", default=1, low=1, high=16),
    Option("pd_d", int, "levels of the comb; 0 drafts no siblings", default=0, high=16),
    Option("continuation", bool, "keep codes after a rejection where they can be", default=False),
)


def check(request: Request, host: VQHost) -> None:
    """Raises ValueError where the window has no room for the comb, or on a bad rule."""
    if (request.pd_k - 1) * request.pd_d >= request.window - request.pd_d:
        raise ValueError(
            f"window={request.window} has no room for pd_k={request.pd_k} candidates at pd_d={request.pd_d} levels"
            " and a code below them: give a larger window"
        )
    check_rule(request, host)


def jacobi(name: str, summary: str, papers: dict[str, str], **defaults: object) -> Method:
    """A method that drafts by Jacobi iteration, with these defaults of `OPTIONS`; any rule can be asked for."""
    options = [option.but(default=defaults.get(option.name, option.default)) for option in OPTIONS]
    return Method(
        name=name,
        family="VQ",
        guarantee="exact",
        summary=summary,
        papers=papers,
        run_round=run_round,
        options=(*options, *rule_options()),
        mixed=MIXED,
        check=check,
        of_request=lambda request: rule_of(request).guarantee,
    )


SJD = jacobi(
    "sjd",
    "Jacobi: the target drafts a window for itself",
    {
        "2410.01699": "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative Jacobi"
        " Decoding"
    },
)
SJD_PAC = jacobi(
    "sjd-pac",
    "Jacobi with proactive drafting and adaptive continuation",
    {
        "2603.18599": "SJD-PAC: Accelerating Speculative Jacobi Decoding via Proactive Drafting and Adaptive"
        " Continuation"
    },
    pd_k=4,
    pd_d=3,
    continuation=True,
)
