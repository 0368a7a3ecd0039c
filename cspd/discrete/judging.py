"""Judging drafted codes by a rule: candidates for one place in their order, for any number of places at once.

Siblings as in SJD-PAC (arXiv 2603.18599), eq. 7 for Q and eq. 8 for P, by any rule: each candidate is judged against
what the rejection of those before it leaves of P.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cspd.discrete.probabilities import TINY, point, where_rows, without
from cspd.discrete.rules import Rule
from cspd.vq.steps import steps


class Judged(NamedTuple):
    """What became of K siblings at each of M places.

    Attributes:
        index: int64 [..., M], of the one accepted, or -1. residual: [..., M, V], to sample from if none was.
        present: bool [..., M, K], which there were. bounds: makes local bounds, summed over siblings [..., M], of
            those that are wanted, bool [..., M, K]; None where all are 0.
    """

    index: Tensor
    residual: Tensor
    present: Tensor
    bounds: Callable[[Tensor], Tensor] | None

    def bound(self, where: Tensor) -> Tensor:
        """The rule's local bounds at the places `where`, bool [..., M], summed over the candidates that were judged."""
        if self.bounds is None:
            return torch.zeros_like(where, dtype=self.residual.dtype)
        # those after the accepted one were not judged
        most = self.present.shape[-1]
        last = self.index % (most + 1)  # of -1 that is `most`: all were
        judged = self.present & (steps(most, last.device) <= last.unsqueeze(-1))
        return self.bounds(judged & where.unsqueeze(-1))


class _Judgement(NamedTuple):
    """Of K siblings, each as if all before it had been rejected: f [..., M, K], the last residual, and `bounds`."""

    f: Tensor
    residual: Tensor
    bounds: Callable[[Tensor], Tensor]


def judge_siblings(
    rule: Rule,
    P: Tensor,
    Q: Tensor | None,
    candidates: Tensor,
    uniforms: Tensor,
    depth: Tensor | int = 1,
    near: Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> Judged:
    """Judges candidates for M places, those of each in their order.

    Args:
        P: [..., M, V]. Q: [..., M, V], which they were drawn from without replacement, in this order; None: point
            masses.
        candidates: int64 [..., M, K], -1 where there are no more; K = 1 for the positions of a chain or a Jacobi
            window.
        uniforms: uniform draws [..., M, K]: a candidate is accepted where its draw is below f.
        depth, near: as in `Rule.accept`.
        sizes: how many places, the first ones, may have a first candidate, a second, ...; by default all.
    """
    sizes = sizes or [P.shape[-2]] * candidates.shape[-1]
    if rule.greedy:
        f, residual, bounds = _greedily(rule, P, candidates, near)
    elif Q is None and rule.pools:
        f, residual, bounds = _pools(rule, P, candidates, near, sizes)
    elif Q is None and not rule.groups:
        f, residual, bounds = _points(rule, P, candidates, depth)
    else:
        f, residual, bounds = _drawn(rule, P, Q, candidates, depth, near, sizes)

    # the first that is accepted
    present = candidates >= 0
    accepted = present & (uniforms < f)
    first = accepted.int().argmax(-1)
    index = torch.where(accepted.any(-1), first, -1)
    return Judged(index, residual, present, bounds if rule.guarantee == "bounded" else None)


def _known(bounds: Tensor) -> Callable[[Tensor], Tensor]:
    """`Judged.bounds` of local bounds [..., M, K]."""
    return lambda wanted: torch.where(wanted, bounds, 0).sum(-1)


def _whole(rows: Tensor, others: list[Tensor]) -> Tensor:
    """Rows [..., M, n] of all places, of which there were fewer and fewer: those that are left, and the others."""
    return torch.cat([rows, *reversed(others)], -2) if others else rows


def _by_place(ranks: list[Tensor], sizes: Sequence[int]) -> Tensor:
    """Numbers [..., m] of the candidates of each rank, m as `sizes` has it: [..., M, K], any where there are none."""
    if sizes[-1] == sizes[0]:
        return torch.stack(ranks, -1)
    return torch.cat(ranks, -1)[..., _where(tuple(sizes), ranks[0].device)]


@functools.lru_cache(maxsize=64)
def _where(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [M, K], where a place's candidate is in a list of all of one rank after the other; 0 if none."""
    place, size = torch.arange(sizes[0]).unsqueeze(1), torch.tensor(sizes)
    first = size.cumsum(0) - size
    return torch.where(place < size, first + place, 0).to(device)


class _Sibling(NamedTuple):
    """What judging the candidates of one rank follows from, at the m places that may have one.

    Attributes:
        P, Q: [..., m, V]. f: [..., m, V], or None where it was not computed at all codes. depth: int64 [..., m] or int.
    """

    P: Tensor
    Q: Tensor
    f: Tensor | None
    depth: Tensor | int


def _drawn(
    rule: Rule,
    P: Tensor,
    Q: Tensor | None,
    candidates: Tensor,
    depth: Tensor | int,
    near: Tensor | None,
    sizes: Sequence[int],
) -> _Judgement:
    """Of candidates that were drawn from Q, or chosen by a rule that is not quicker on those."""
    # on a GPU launches count, and f at all codes is part of the bound; a CPU computes that where it is wanted
    everywhere = rule.follows_f or P.device.type == "cuda"
    codes, present = candidates.clamp(min=0), candidates >= 0
    chosen, accepts, siblings, others = Q is None, [], [], []
    for rank, size in enumerate(sizes):
        if size < P.shape[-2]:  # the other places have no more candidates
            others.append(P[..., size:, :])
            P = P[..., :size, :]
        x = codes[..., :size, rank : rank + 1]
        if chosen:
            Q = point(x.squeeze(-1), P)
        elif rank > 0:
            Q = without(Q[..., :size, :], candidates[..., :size, rank - 1])
        at = depth[..., :size] if isinstance(depth, Tensor) else depth
        f = rule.accept(P, Q, at, near) if everywhere else None
        accepts.append(rule.accept_code(P, Q, x, at, near) if f is None else f.gather(-1, x))
        siblings.append(_Sibling(P, Q, f, at))

        # what its rejection leaves for the next
        left = rule.resample(P, Q, f, x.squeeze(-1), near)
        P = where_rows(present[..., :size, rank : rank + 1], left, P)

    def bounds(wanted: Tensor) -> Tensor:
        of_ranks = zip(siblings, sizes, wanted.unbind(-1))
        local = [_local_bounds(rule, sibling, near, of_rank[..., :size]) for sibling, size, of_rank in of_ranks]
        return _known(_by_place(local, sizes))(wanted)

    f = _by_place([f.squeeze(-1) for f in accepts], sizes)
    return _Judgement(f, _whole(P, others), bounds)


def _local_bounds(rule: Rule, sibling: _Sibling, near: Tensor | None, wanted: Tensor) -> Tensor:
    """The rule's bounds [..., m] of the candidates of one rank, of those at least that are wanted, bool [..., m]."""
    P, Q, f, depth = sibling
    if wanted.device.type == "cuda":
        return rule.bound(P, Q, f)
    P, Q = P[wanted], Q[wanted]
    if f is not None:
        f = f[wanted]
    else:
        f = rule.accept(P, Q, depth.expand_as(wanted)[wanted] if isinstance(depth, Tensor) else depth, near)
    return P.new_zeros(wanted.shape).masked_scatter_(wanted, rule.bound(P, Q, f))


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
    return _Judgement(f, residual, _known(bounds))


def _pools(rule: Rule, P: Tensor, candidates: Tensor, near: Tensor | None, sizes: Sequence[int]) -> _Judgement:
    """Of candidates that were chosen, by a rule that pools: what each takes over depends on what those before left."""
    codes = torch.cat([candidates[..., :size, rank] for rank, size in enumerate(sizes)], -1)
    reached = rule.reach(codes.clamp(min=0), near)
    # two spare columns: one is for candidates that are not there, the other keeps the sum above 0
    reached = torch.where((codes >= 0).unsqueeze(-1), reached, P.shape[-1])
    weights = functional.pad(P, (0, 2), value=TINY)  # but for its scale
    nothing = 2 * TINY  # what there is where nothing is left of P, at most
    total = weights.sum(-1, keepdim=True)
    owns, absorbed, others = [], [], []
    for reach, size in zip(reached.split(list(sizes), -2), sizes):
        if size < total.shape[-2]:  # the other places have no more candidates
            others.append(total[..., size:, :])
            total = total[..., :size, :]
        still = weights[..., :size, :]
        before = still.gather(-1, reach)
        mass = before / total
        mass_absorbed, taken = rule.pool(mass)
        owns.append(mass[..., 0])
        absorbed.append(mass_absorbed.squeeze(-1))

        # what its rejection leaves for the next
        total = still.scatter_(-1, reach, before.masked_fill(taken, 0)).sum(-1, keepdim=True)
        if rule.published:  # where nothing is left, every code is equally likely
            total = still[..., :-2].masked_fill_(total <= nothing, 1).sum(-1, keepdim=True)
    total = _whole(total, others)
    own = _by_place(owns, sizes)
    f = (own + _by_place(absorbed, sizes)).clamp(max=1)
    residual = where_rows(total > nothing, weights[..., :-2] / total, P)
    return _Judgement(f, residual, _known((f - own).clamp(min=0)))


def _greedily(rule: Rule, P: Tensor, candidates: Tensor, near: Tensor | None) -> _Judgement:
    """At temperature 0: a rejection leaves P as it is."""
    codes = candidates.clamp(min=0)
    target = rule.target(P)
    own = target.gather(-1, codes)
    if not rule.pools:
        return _Judgement(own, target, _known(torch.zeros_like(own)))
    accepts = []
    for x in codes.unbind(-1):
        f = rule.accept(P, P, near=near, x=x)
        accepts.append(f.gather(-1, x.unsqueeze(-1)))
    f = torch.cat(accepts, -1)
    return _Judgement(f, target, _known((f - own).clamp(min=0)))
