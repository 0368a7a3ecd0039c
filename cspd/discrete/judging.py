"""Judging drafted codes by a rule: candidates for one place in their order, for any number of places at once.

Siblings as in SJD-PAC (arXiv 2603.18599), eq. 7 for Q and eq. 8 for P, by any rule: each candidate is judged against
what the rejection of those before it leaves of P.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cspd.discrete.probabilities import without
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
    elif Q is None:
        f, bounds, residual = _points(rule, P, candidates, depth, near)
    else:
        f, bounds, residual = _drawn(rule, P, Q, candidates, depth, near)

    # the first that is accepted
    present = candidates >= 0
    accepted = present & (uniforms < f)
    first = accepted.int().argmax(-1)
    index = torch.where(accepted.any(-1), first, -1)
    if rule.guarantee == "exact":
        return Judged(index, residual, torch.zeros_like(P[..., 0]))

    # those after it were not judged
    last = torch.where(index < 0, candidates.shape[-1], index)
    judged = present & (steps(candidates.shape[-1], P.device) <= last.unsqueeze(-1))
    return Judged(index, residual, torch.where(judged, bounds, 0).sum(-1))


def _drawn(
    rule: Rule, P: Tensor, Q: Tensor, candidates: Tensor, depth: Tensor | int, near: Tensor | None
) -> _Judgement:
    """Of candidates that were drawn from Q."""
    accepts, bounds = [], []
    for i, x in enumerate(candidates.unbind(-1)):
        if i > 0:
            Q = without(Q, candidates[..., i - 1])
        code = x.clamp(min=0)
        f = rule.accept(P, Q, depth, near)
        accepts.append(f.gather(-1, code.unsqueeze(-1)))
        bounds.append(rule.bound(P, Q, f))

        # what its rejection leaves for the next
        left = rule.resample(P, Q, f, code, near)
        P = torch.where((x >= 0).unsqueeze(-1), left, P)
    return _Judgement(torch.cat(accepts, -1), torch.stack(bounds, -1), P)


def _points(rule: Rule, P: Tensor, candidates: Tensor, depth: Tensor | int, near: Tensor | None) -> _Judgement:
    """Of candidates that were chosen: a rejection changes P at few codes, and scales it.

    So all but a sum is computed at these codes alone.
    """
    weights = P.clone()  # P but for its scale
    total = weights.sum(-1, keepdim=True)
    owns, accepts = [], []
    for x in candidates.split(1, -1):
        places = rule.reach(x.clamp(min=0), near)
        before = weights.gather(-1, places)
        mass = before / total
        f, share = rule.judge_point(mass, depth)
        owns.append(mass[..., :1])
        accepts.append(f)

        # what its rejection leaves for the next; P where that is nothing
        after = torch.where(x >= 0, before * share, before)
        left = weights.scatter_(-1, places, after).sum(-1, keepdim=True)
        nothing = left <= 0
        weights.scatter_(-1, places, torch.where(nothing, before, after))
        total = torch.where(nothing, total, left)
    f = torch.cat(accepts, -1)
    return _Judgement(f, rule.point_bound(torch.cat(owns, -1), f), weights / total)


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
