"""Trees of drafted codes, and how siblings are judged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cspd.discrete.batch import seen_of
from cspd.discrete.gpt import steps
from cspd.discrete.rules import TINY, Rule, point, sample, where_rows, without

# Judging drafted codes by a rule: candidates for one place in their order, for any number of places at once.
#
# Siblings as in SJD-PAC (arXiv 2603.18599), eq. 7 for Q and eq. 8 for P, by any rule: each candidate is judged against
# what the rejection of those before it leaves of P.


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


# Trees of drafted codes: shapes, and the path of accepted codes from the root. Pure functions on tensors.
#
# Node 0, the root, is the last committed code (or the class); every other node is a drafted code after its parent. A
# parent comes before its children. Shapes are [N] where all sequences of a batch share them, or [B, N].


@dataclass(frozen=True)
class Shape:
    """The shape of a tree of N nodes.

    Attributes:
        parent: int64 [..., N], -1 of the root. height: the largest depth.
        sizes: how many nodes may have one child, two, ..., as far as there may be any.
        chain: whether node i is at depth i, so that nothing moves when it is committed.
    """

    parent: Tensor
    height: int
    sizes: Sequence[int]
    chain: bool = False

    @property
    def num_nodes(self) -> int:
        return self.parent.shape[-1]

    @functools.cached_property
    def above(self) -> Tensor:
        """int64 [..., N], each node's parent; the root's is the root."""
        return self.parent.clamp(min=0)

    @functools.cached_property
    def sees(self) -> Tensor:
        """bool [..., N, N], the ancestors of each node, itself included."""
        index = steps(self.num_nodes, self.parent.device)
        ancestor = self.above
        # every node sees itself and its parent, then what those see, and so on: the generations double
        sees = (index == index.unsqueeze(1)) | (index == ancestor.unsqueeze(-1))
        for _ in range((self.height - 1).bit_length()):
            sees = sees | sees.gather(-2, ancestor.unsqueeze(-1).expand_as(sees))
            ancestor = ancestor.gather(-1, ancestor)
        return sees

    @functools.cached_property
    def seen(self) -> Tensor:
        """bool [..., N, N + 2], `sees` as a forward takes it."""
        return seen_of(self.sees)

    @functools.cached_property
    def depth(self) -> Tensor:
        """int64 [..., N], 0 at the root."""
        return self.sees.sum(-1) - 1

    @functools.cached_property
    def has_children(self) -> Tensor:
        """bool [..., N]."""
        return self.sees.sum(-2) > 1

    @functools.cached_property
    def inner(self) -> Tensor | slice:
        """int64 [..., M], or a slice, the nodes that may have children, those with most of them first."""
        if self.chain:
            return slice(self.height)
        index = steps(self.num_nodes, self.parent.device)
        count = (self.parent.unsqueeze(-2) == index.unsqueeze(-1)).sum(-1)
        return count.argsort(dim=-1, descending=True, stable=True)[..., : self.sizes[0]]

    def of_inner(self, of_nodes: Tensor) -> Tensor:
        """[B, M, ...] of [B, N, ...]: what is said of the inner nodes."""
        if isinstance(self.inner, slice) or self.inner.dim() == 1:
            return of_nodes[:, self.inner]
        return of_nodes[steps(len(of_nodes), of_nodes.device).unsqueeze(1), self.inner]

    @functools.cached_property
    def children(self) -> Tensor:
        """int64 [..., M, K], those of the inner nodes in the order they are judged, which is theirs; -1: none."""
        parent, num, most = self.parent, self.num_nodes, len(self.sizes)
        index = steps(num, parent.device)
        is_child = parent >= 0
        # a node's rank among its siblings is how many of them come before it
        siblings = parent.unsqueeze(-1) == parent.unsqueeze(-2)
        rank = (siblings & (index < index.unsqueeze(1))).sum(-1)
        # written flat; a spare column takes the root, which is no child
        columns = most + 1
        flat = torch.where(is_child, self.above * columns + rank, most)
        children = parent.new_full((*parent.shape, columns), -1).flatten(-2)
        children = children.scatter(-1, flat, torch.where(is_child, index, -1)).unflatten(-1, (num, -1))
        children = self.of_inner(children) if parent.dim() == 2 else children[self.inner]
        return children[..., :most]


def chain_shape(length: int, device: torch.device) -> Shape:
    """`length` codes one after the other."""
    return Shape(torch.arange(-1, length, device=device), length, [length], chain=True)


def grown(parent: Tensor, height: int, most_inner: int, most_children: int) -> Shape:
    """A shape with parents int64 [B, N], so many of which may have so many children each, at most."""
    num_drafted = parent.shape[1] - 1
    most = range(1, min(most_children, num_drafted) + 1)
    return Shape(parent, height, [min(most_inner, num_drafted // each) for each in most])


class Verified(NamedTuple):
    """What became of a tree, for B sequences.

    Attributes:
        count: int64 [B], drafted codes accepted. path: int64 [B, 1 + height], the root and their nodes, 0 beyond.
        last: int64 [B], the code after them. judged: bool [B, height], whether candidates of a depth were.
        bound: [B], the sum of the rule's local bounds.
    """

    count: Tensor
    path: Tensor
    last: Tensor
    judged: Tensor
    bound: Tensor


def _path(shape: Shape, accepted: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """The longest path of accepted nodes, bool [B, N], from the root: `Verified.path`, and bool [B, N], those on it.

    Of siblings one at most is accepted. `room`: int64 [B, 1], codes still to come: the path is no longer.
    """
    node = steps(shape.num_nodes, accepted.device)
    accepted = (accepted & (shape.depth <= room)) | (node == 0)
    on_path = (accepted.unsqueeze(1) | ~shape.sees).all(2)
    place = on_path * shape.depth
    path = place.new_zeros(len(accepted), 1 + shape.height)
    return path.scatter_(1, place, on_path * node), on_path


def _judged(shape: Shape, path: Tensor, count: Tensor, room: Tensor) -> Tensor:
    """`Verified.judged`, of paths on which so many codes were accepted; room: int64 [B, 1]."""
    level = steps(shape.height, path.device)
    has_children = shape.has_children.expand(len(path), -1).gather(1, path[:, :-1])
    return has_children & (level <= count.unsqueeze(1)) & (level < room)


def follow(shape: Shape, codes: Tensor, drawn: Tensor, room: Tensor) -> Verified:
    """The longest path from the root of codes that the target draws itself: that is what is committed, so that the
    drafts decide how many forwards an image takes, and nothing else (docs/bounds.md).

    Args:
        codes: int64 [B, N], of siblings no two alike; the root's is not read. drawn: int64 [B, N], what the target
            draws after each node. room: as in `walk`.
    """
    size, room = len(codes), room.unsqueeze(1)
    above = shape.above.expand(size, -1)
    path, on_path = _path(shape, codes == drawn.gather(1, above), room)
    count = on_path.sum(1) - 1
    last = drawn.gather(1, path.amax(1, keepdim=True)).squeeze(1)  # a child comes after its parent
    return Verified(count, path, last, _judged(shape, path, count, room), torch.zeros_like(count, dtype=torch.float32))


class Draws(NamedTuple):
    """Uniform draws of a tree: `codes` and `nodes` [B, N], by which siblings are drawn, and by which each is accepted;
    and [B, 1 + height], by the depth of the code after the path: `own`, the request's, and `rejected`, where all
    candidates were.
    """

    codes: Tensor
    nodes: Tensor
    own: Tensor
    rejected: Tensor


def walk(
    rule: Rule,
    shape: Shape,
    codes: Tensor,
    P: Tensor,
    Q: Tensor | None,
    draws: Draws,
    room: Tensor,
    near: Tensor | None = None,
) -> Verified:
    """The longest path of accepted codes from the root. The children of all nodes are judged at once, also of nodes
    that turn out not to be on it: that takes a few large kernels where a walk from depth to depth takes many small.

    Args:
        codes: int64 [B, N]; the root's is not read. P: [B, N, V], the target's distribution after each node.
        Q: [B, M, V], from which the inner nodes' children were drawn without replacement; None where they were chosen.
        room: int64 [B], codes still to come: no more are judged. near: int64 [V, k], for rules that pool.
    """
    size, room = len(codes), room.unsqueeze(1)
    each = steps(size, codes.device)

    # which child of each inner node is accepted
    children = shape.children.expand(size, -1, -1)  # [B, M, K]
    column = children.clamp(min=0).flatten(1)
    candidates = codes.gather(1, column).view_as(children).masked_fill(children < 0, -1)
    uniforms = draws.nodes.gather(1, column).view_as(children)
    depth = shape.of_inner(shape.depth.expand(size, -1))
    outcome = judge_siblings(rule, shape.of_inner(P), Q, candidates, uniforms, depth + 1, near, shape.sizes)

    # a node is on the path where it is accepted and all its ancestors are
    is_accepted = outcome.index >= 0
    chosen = children.gather(2, outcome.index.clamp(min=0).unsqueeze(2)).squeeze(2) * is_accepted
    accepted = torch.zeros_like(codes, dtype=torch.bool).scatter_(1, chosen, True)
    path, on_path = _path(shape, accepted, room)
    count = on_path.sum(1) - 1

    # what the rule judged on the way
    judged = shape.of_inner(on_path & shape.has_children) & (depth < room)
    bound = outcome.bound(judged).sum(1)

    # the code after them: the target's own, or if all candidates were rejected what that left of its distribution
    all_rejected = judged & ~is_accepted  # of one node at most, the last
    rejected = all_rejected.any(1, keepdim=True)
    residual = outcome.residual[each, all_rejected.int().argmax(1)]
    own = rule.target(P[each, path.amax(1)])  # a child comes after its parent
    place = count.unsqueeze(1)
    u = torch.where(rejected, draws.rejected.gather(1, place), draws.own.gather(1, place))
    last = sample(torch.where(rejected, residual, own), u.squeeze(1))
    return Verified(count, path, last, _judged(shape, path, count, room), bound)
