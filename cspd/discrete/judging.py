"""Judging drafted codes by a rule: candidates for one place in their order, for any number of places at once.

Siblings as in SJD-PAC (arXiv 2603.18599), eq. 7 for Q and eq. 8 for P, by any rule: each candidate is judged against
what the rejection of those before it leaves of P.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cspd.discrete.probabilities import TINY, point, without
from cspd.discrete.rules import Rule
from cspd.vq.steps import steps


class Judged(NamedTuple):
    """What became of K siblings.

    Attributes:
        index: int64 [...], of the one accepted, or -1. residual: [..., V], to sample from if none was.
        bound: [...], the rule's local bounds, summed over those that were judged.
    """

    index: Tensor
    residual: Tensor
    bound: Tensor


class _Judgement(NamedTuple):
    """Of K siblings, each as if all before it had been rejected: f and local bounds [..., K]; the last residual."""

    f: Tensor
    bounds: Tensor
    residual: Tensor


def judge_siblings(
    rule: Rule,
    P: Tensor,
    Q: Tensor | None,
    candidates: Tensor,
    uniforms: Tensor,
    depth: Tensor | int = 1,
    near: Tensor | None = None,
) -> Judged:
    """Judges candidates for one place in their order.

    Args:
        P: [..., V]. Q: [..., V], which they were drawn from without replacement, in this order; None: point masses.
        candidates: int64 [..., K], -1 where there is none; K = 1 for the positions of a chain or a Jacobi window.
        uniforms: uniform draws [..., K]: a candidate is accepted where its draw is below f.
        depth, near: as in `Rule.accept`.
    """
    if rule.greedy:
        f, bounds, residual = _greedily(rule, P, candidates, near)
    elif Q is None and rule.pools:
        f, bounds, residual = _pools(rule, P, candidates, near)
    elif Q is None and not rule.groups:
        f, bounds, residual = _points(rule, P, candidates, depth)
    else:
        f, bounds, residual = _drawn(rule, P, Q, candidates, depth, near)

    # the first that is accepted
    present = candidates >= 0
    accepted = present & (uniforms < f)
    first = accepted.int().argmax(-1)
    index = torch.where(accepted.any(-1), first, -1)
    if rule.guarantee != "bounded":
        return Judged(index, residual, torch.zeros_like(P[..., 0]))

    # those after it were not judged
    last = torch.where(index < 0, candidates.shape[-1], index)
    judged = present & (steps(candidates.shape[-1], P.device) <= last.unsqueeze(-1))
    return Judged(index, residual, torch.where(judged, bounds, 0).sum(-1))


def _drawn(
    rule: Rule, P: Tensor, Q: Tensor | None, candidates: Tensor, depth: Tensor | int, near: Tensor | None
) -> _Judgement:
    """Of candidates that were drawn from Q, or chosen by a rule that is not quicker on those."""
    accepts, bounds = [], []
    codes, present = candidates.clamp(min=0), candidates >= 0
    chosen = Q is None
    for i, code in enumerate(codes.split(1, -1)):
        if chosen:
            Q = point(code.squeeze(-1), P)
        elif i > 0:
            Q = without(Q, candidates[..., i - 1])
        f = rule.accept(P, Q, depth, near)
        accepts.append(f.gather(-1, code))
        if rule.guarantee == "bounded":
            bounds.append(rule.bound(P, Q, f))

        # what its rejection leaves for the next
        left = rule.resample(P, Q, f, code.squeeze(-1), near)
        P = torch.where(present[..., i : i + 1], left, P)
    f = torch.cat(accepts, -1)
    return _Judgement(f, torch.stack(bounds, -1) if bounds else torch.zeros_like(f), P)


def _points(rule: Rule, P: Tensor, candidates: Tensor, depth: Tensor | int) -> _Judgement:
    """Of candidates that were chosen, each a point mass, by a rule that looks at nothing else.

    A rejection then leaves a share of the candidate's own probability and scales P, so that nothing is judged one by
    one. Sums are of what is there, not differences: they are 0 only where nothing is left.
    """
    again = (candidates.unsqueeze(-1) == candidates.unsqueeze(-2)).tril(-1).any(-1)
    # a spare column is for candidates that are not there, and for those that are there twice
    places = candidates.masked_fill(again | (candidates < 0), P.shape[-1])
    weights = functional.pad(P, (0, 1))
    own = weights.gather(-1, places)
    rest = weights.scatter_(-1, places, 0).sum(-1, keepdim=True)

    # what there is when a candidate is judged: all others, it and those after it, and what those before it left
    omega, share = rule.omega(depth), rule.share(depth)
    still = own.flip(-1).cumsum(-1).flip(-1)
    left = share * own
    total = rest + still + (left.cumsum(-1) - left)
    p = own / total.clamp(min=TINY)
    f = (omega * p).clamp(max=1)

    # where nothing is left, the last rejection leaves P as it was
    nothing = rest + left.sum(-1, keepdim=True) <= 0
    left = torch.where(nothing & (still == own), own, left)
    residual = weights.scatter_(-1, places, left)[..., :-1] / (rest + left.sum(-1, keepdim=True))
    biased = not rule.optimal  # and P is what is sampled from where p = 1
    bounds = torch.where(p < 1, (f - p).abs(), 0) if biased else (f - p).clamp(min=0)
    return _Judgement(f, bounds, residual)


def _pools(rule: Rule, P: Tensor, candidates: Tensor, near: Tensor | None) -> _Judgement:
    """Of candidates that were chosen, by a rule that pools: what each takes over depends on what those before left."""
    places = rule.reach(candidates.clamp(min=0), near)
    # a spare column, which is empty, is for candidates that are not there
    places = torch.where((candidates >= 0).unsqueeze(-1), places, P.shape[-1])
    weights = functional.pad(P, (0, 1))  # but for its scale
    total = weights.sum(-1, keepdim=True)
    owns, absorbed = [], []
    for reach in places.unbind(-2):
        before = weights.gather(-1, reach)
        mass = before / total.clamp(min=TINY)  # 0 where nothing is left
        mass_absorbed, taken = rule.pool(mass)
        owns.append(mass[..., :1])
        absorbed.append(mass_absorbed)

        # what its rejection leaves for the next
        total = weights.scatter_(-1, reach, before.masked_fill(taken, 0)).sum(-1, keepdim=True)
        if rule.published:  # where nothing is left, every code is equally likely
            total = weights[..., :-1].masked_fill_(total <= 0, 1).sum(-1, keepdim=True)
    own = torch.cat(owns, -1)
    f = (own + torch.cat(absorbed, -1)).clamp(max=1)
    return _Judgement(f, (f - own).clamp(min=0), torch.where(total > 0, weights[..., :-1] / total, P))


def _greedily(rule: Rule, P: Tensor, candidates: Tensor, near: Tensor | None) -> _Judgement:
    """At temperature 0: a rejection leaves P as it is."""
    codes = candidates.clamp(min=0)
    target = rule.target(P)
    own = target.gather(-1, codes)
    if not rule.pools:
        return _Judgement(own, torch.zeros_like(own), target)
    accepts = []
    for x in codes.unbind(-1):
        f = rule.accept(P, P, near=near, x=x)
        accepts.append(f.gather(-1, x.unsqueeze(-1)))
    f = torch.cat(accepts, -1)
    return _Judgement(f, (f - own).clamp(min=0), target)
