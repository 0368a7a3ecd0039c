"""Trees of drafted tokens, and how siblings are verified."""

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

# Siblings are candidates for one position. A rule verifies them in order, for any number of positions at once: each
# candidate against the distribution that the rejection of its predecessors leaves of P. This is SJD-PAC (arXiv
# 2603.18599), eq. 7 for Q and eq. 8 for P, with any rule.


class SiblingVerdicts(NamedTuple):
    """The outcome of verifying K siblings at each of M positions.

    Attributes:
        index: int64 [..., M], the accepted sibling, or -1. residual: [..., M, V], to sample from if all were rejected.
        present: bool [..., M, K], which siblings exist.
        bounds: computes the local bounds of the siblings in a mask, bool [..., M, K], summed over siblings: [..., M].
            None if all are 0.
    """

    index: Tensor
    residual: Tensor
    present: Tensor
    bounds: Callable[[Tensor], Tensor] | None

    def bound(self, where: Tensor) -> Tensor:
        """The rule's local bounds at the positions `where`, bool [..., M], summed over the verified candidates."""
        if self.bounds is None:
            return torch.zeros_like(where, dtype=self.residual.dtype)
        # candidates after the accepted one were not verified; -1 % (K + 1) is K: all were
        most = self.present.shape[-1]
        last = self.index % (most + 1)
        tried = self.present & (steps(most, last.device) <= last.unsqueeze(-1))
        return self.bounds(tried & where.unsqueeze(-1))


class _Judgement(NamedTuple):
    """f [..., M, K] of K siblings, each as if all before it had been rejected; the last residual; and `bounds`."""

    f: Tensor
    residual: Tensor
    bounds: Callable[[Tensor], Tensor]


def verify_siblings(
    rule: Rule,
    P: Tensor,
    Q: Tensor | None,
    candidates: Tensor,
    uniforms: Tensor,
    depth: Tensor | int = 1,
    near: Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> SiblingVerdicts:
    """Verifies candidates for M positions, those of each in their order.

    Args:
        P: [..., M, V]. Q: [..., M, V], which they were drawn from without replacement, in this order; None: point
            masses.
        candidates: int64 [..., M, K], -1 where there are no more; K = 1 for the positions of a chain or a Jacobi
            window.
        uniforms: uniform draws [..., M, K]: a candidate is accepted where its draw is below f.
        depth, near: as in `Rule.accept`.
        sizes: how many positions, the first ones, may have a first candidate, a second, ...; by default all.
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
    return SiblingVerdicts(index, residual, present, bounds if rule.guarantee == "bounded" else None)


def _known(bounds: Tensor) -> Callable[[Tensor], Tensor]:
    """`Judged.bounds` of local bounds [..., M, K]."""
    return lambda wanted: torch.where(wanted, bounds, 0).sum(-1)


def _whole(rows: Tensor, others: list[Tensor]) -> Tensor:
    """Rows [..., M, n] of all positions: those with the most candidates, then `others`, set aside earlier."""
    return torch.cat([rows, *reversed(others)], -2) if others else rows


def _by_position(ranks: list[Tensor], sizes: Sequence[int]) -> Tensor:
    """Numbers [..., m] of each rank's candidates, m as in `sizes`, as [..., M, K]; any number if one is missing."""
    if sizes[-1] == sizes[0]:
        return torch.stack(ranks, -1)
    return torch.cat(ranks, -1)[..., _where(tuple(sizes), ranks[0].device)]


@functools.lru_cache(maxsize=64)
def _where(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [M, K], each candidate's index in the list of all, rank by rank; 0 for missing candidates."""
    position, size = torch.arange(sizes[0]).unsqueeze(1), torch.tensor(sizes)
    first = size.cumsum(0) - size
    return torch.where(position < size, first + position, 0).to(device)


class _Sibling(NamedTuple):
    """The distributions by which the candidates of one rank are verified, at the m positions that may have one.

    Attributes:
        P, Q: [..., m, V]. f: [..., m, V], or None if it was not computed at all tokens. depth: int64 [..., m] or int.
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
    """Verifies candidates that were sampled from Q, or chosen for a rule without a faster way to verify those."""
    # a GPU computes f at all tokens at once, to save launches; a CPU only for the bounds that are asked for
    everywhere = rule.follows_f or P.device.type == "cuda"
    tokens, present = candidates.clamp(min=0), candidates >= 0
    chosen, accepts, siblings, others = Q is None, [], [], []
    for rank, size in enumerate(sizes):
        if size < P.shape[-2]:  # the other positions have no more candidates
            others.append(P[..., size:, :])
            P = P[..., :size, :]
        x = tokens[..., :size, rank : rank + 1]
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
        return _known(_by_position(local, sizes))(wanted)

    f = _by_position([f.squeeze(-1) for f in accepts], sizes)
    return _Judgement(f, _whole(P, others), bounds)


def _local_bounds(rule: Rule, sibling: _Sibling, near: Tensor | None, wanted: Tensor) -> Tensor:
    """The rule's bounds [..., m] of the candidates of one rank, at least of those in `wanted`, bool [..., m]."""
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
    """Verifies chosen candidates, each a point mass, by a rule whose f depends on the candidate's probability alone.

    A rejection then leaves a share of the candidate's own probability and rescales P, so that all candidates are
    verified at once. Masses are computed as sums, not as differences: they are 0 only if nothing is left.
    """
    # a spare column takes missing candidates and repeated ones
    is_repeated = (candidates.unsqueeze(-1) == candidates.unsqueeze(-2)).tril(-1).any(-1)
    columns = candidates.masked_fill(is_repeated | (candidates < 0), P.shape[-1])
    weights = functional.pad(P, (0, 1))
    own = weights.gather(-1, columns)
    rest = weights.scatter_(-1, columns, 0).sum(-1, keepdim=True)

    # The mass when a candidate is verified: that of all other tokens (rest), of this candidate and its successors, and
    # the shares that its rejected predecessors left.
    omega, share = rule.omega(depth), rule.share(depth)
    from_here_on = own.flip(-1).cumsum(-1).flip(-1)
    left = share * own
    left_before = left.cumsum(-1) - left
    total = rest + from_here_on + left_before
    p = own / total.clamp(min=TINY)
    f = (omega * p).clamp(max=1)

    # if nothing would be left, the last rejection leaves P as it was
    nothing = rest + left.sum(-1, keepdim=True) <= 0
    is_last = from_here_on == own
    left = torch.where(nothing & is_last, own, left)
    residual = weights.scatter_(-1, columns, left)[..., :-1] / (rest + left.sum(-1, keepdim=True))

    # the papers' own residual is biased wherever f differs from p, but if p = 1 it falls back to P itself
    if rule.optimal:
        bounds = (f - p).clamp(min=0)
    else:
        bounds = torch.where(p < 1, (f - p).abs(), 0)
    return _Judgement(f, residual, _known(bounds))


def _pools(rule: Rule, P: Tensor, candidates: Tensor, near: Tensor | None, sizes: Sequence[int]) -> _Judgement:
    """Verifies chosen candidates by a rule that pools: the mass each absorbs depends on what those before it left."""
    tokens = torch.cat([candidates[..., :size, rank] for rank, size in enumerate(sizes)], -1)
    reached = rule.reach(tokens.clamp(min=0), near)
    # two spare columns: one takes missing candidates, the other keeps the sum above 0
    reached = torch.where((tokens >= 0).unsqueeze(-1), reached, P.shape[-1])
    weights = functional.pad(P, (0, 2), value=TINY)  # P up to a factor
    nothing = 2 * TINY  # the largest total that means that nothing is left of P
    total = weights.sum(-1, keepdim=True)
    owns, absorbed, others = [], [], []
    for reach, size in zip(reached.split(list(sizes), -2), sizes):
        if size < total.shape[-2]:  # the other positions have no more candidates
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
        if rule.published:  # LANTERN's released code: if nothing is left, every token is equally likely
            total = still[..., :-2].masked_fill_(total <= nothing, 1).sum(-1, keepdim=True)
    total = _whole(total, others)
    own = _by_position(owns, sizes)
    f = (own + _by_position(absorbed, sizes)).clamp(max=1)
    residual = where_rows(total > nothing, weights[..., :-2] / total, P)
    return _Judgement(f, residual, _known((f - own).clamp(min=0)))


def _greedily(rule: Rule, P: Tensor, candidates: Tensor, near: Tensor | None) -> _Judgement:
    """Verifies at temperature 0: a rejection leaves P as it is."""
    tokens = candidates.clamp(min=0)
    target = rule.target(P)
    own = target.gather(-1, tokens)
    if not rule.pools:
        return _Judgement(own, target, _known(torch.zeros_like(own)))
    accepts = []
    for x in tokens.unbind(-1):
        f = rule.accept(P, P, near=near, x=x)
        accepts.append(f.gather(-1, x.unsqueeze(-1)))
    f = torch.cat(accepts, -1)
    return _Judgement(f, target, _known((f - own).clamp(min=0)))


# Trees of drafted tokens: shapes, and the path of accepted tokens from the root. Pure functions on tensors.
#
# Node 0, the root, is the last committed token (or the class); every other node is a drafted token after its parent. A
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
        """The values [B, M, ...] of inner nodes, of those of all nodes [B, N, ...]."""
        if isinstance(self.inner, slice) or self.inner.dim() == 1:
            return of_nodes[:, self.inner]
        return of_nodes[steps(len(of_nodes), of_nodes.device).unsqueeze(1), self.inner]

    @functools.cached_property
    def children(self) -> Tensor:
        """int64 [..., M, K], the children of each inner node, ascending, as they are verified; -1 if it has fewer."""
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
    """`length` tokens one after the other."""
    return Shape(torch.arange(-1, length, device=device), length, [length], chain=True)


def grown(parent: Tensor, height: int, most_inner: int, most_children: int) -> Shape:
    """A shape with parents int64 [B, N]: at most `most_inner` of them have children, at most `most_children` each."""
    num_drafted = parent.shape[1] - 1
    most = range(1, min(most_children, num_drafted) + 1)
    return Shape(parent, height, [min(most_inner, num_drafted // each) for each in most])


class Verified(NamedTuple):
    """The outcome of verifying a tree, for B sequences.

    Attributes:
        count: int64 [B], drafted tokens accepted. path: int64 [B, 1 + height], the root and their nodes, 0 beyond.
        last: int64 [B], the token after them. tried: bool [B, height], whether candidates of a depth were.
        bound: [B], the sum of the rule's local bounds.
    """

    count: Tensor
    path: Tensor
    last: Tensor
    tried: Tensor
    bound: Tensor


def _path(shape: Shape, accepted: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """The longest path of accepted nodes, bool [B, N], from the root: `Verified.path`, and bool [B, N], those on it.

    Of siblings one at most is accepted. `room`: int64 [B, 1], tokens still to come: the path is no longer.
    """
    node = steps(shape.num_nodes, accepted.device)
    accepted = (accepted & (shape.depth <= room)) | (node == 0)
    on_path = (accepted.unsqueeze(1) | ~shape.sees).all(2)
    position = on_path * shape.depth
    path = position.new_zeros(len(accepted), 1 + shape.height)
    return path.scatter_(1, position, on_path * node), on_path


def _tried(shape: Shape, path: Tensor, count: Tensor, room: Tensor) -> Tensor:
    """`Verified.tried` of paths on which `count` tokens, int64 [B], were accepted. room: int64 [B, 1]."""
    level = steps(shape.height, path.device)
    has_children = shape.has_children.expand(len(path), -1).gather(1, path[:, :-1])
    return has_children & (level <= count.unsqueeze(1)) & (level < room)


def follow(shape: Shape, tokens: Tensor, drawn: Tensor, room: Tensor) -> Verified:
    """The longest path from the root of tokens that equal the target's own samples.

    Only those are committed, so that drafts decide how many forward passes an image takes and nothing else
    (docs/bounds.md).

    Args:
        tokens: int64 [B, N], of siblings no two alike; the root's is not read. drawn: int64 [B, N], what the target
            draws after each node. room: as in `walk`.
    """
    size, room = len(tokens), room.unsqueeze(1)
    above = shape.above.expand(size, -1)
    path, on_path = _path(shape, tokens == drawn.gather(1, above), room)
    count = on_path.sum(1) - 1
    last = drawn.gather(1, path.amax(1, keepdim=True)).squeeze(1)  # a child comes after its parent
    return Verified(count, path, last, _tried(shape, path, count, room), torch.zeros_like(count, dtype=torch.float32))


class Draws(NamedTuple):
    """Uniform draws of a tree.

    Attributes:
        tokens, nodes: [B, N], to sample each node's token, and to accept it.
        own, rejected: [B, 1 + height], to sample the token after a path of each length: the request's own draw, and
            the one used if all candidates were rejected.
    """

    tokens: Tensor
    nodes: Tensor
    own: Tensor
    rejected: Tensor


def walk(
    rule: Rule,
    shape: Shape,
    tokens: Tensor,
    P: Tensor,
    Q: Tensor | None,
    draws: Draws,
    room: Tensor,
    near: Tensor | None = None,
) -> Verified:
    """The longest path of accepted tokens from the root, by a rule.

    The children of all nodes are verified at once, even those of nodes off the path: a few large kernels are faster
    than the many small ones of a walk from depth to depth.

    Args:
        tokens: int64 [B, N]; the root's is not read. P: [B, N, V], the target's distribution after each node.
        Q: [B, M, V], from which the inner nodes' children were drawn without replacement; None where they were chosen.
        room: int64 [B], tokens still to come: no more are verified. near: int64 [V, k], for rules that pool.
    """
    size, room = len(tokens), room.unsqueeze(1)
    each = steps(size, tokens.device)

    # which child of each inner node is accepted
    children = shape.children.expand(size, -1, -1)  # [B, M, K]
    column = children.clamp(min=0).flatten(1)
    candidates = tokens.gather(1, column).view_as(children).masked_fill(children < 0, -1)
    uniforms = draws.nodes.gather(1, column).view_as(children)
    depth = shape.of_inner(shape.depth.expand(size, -1))
    outcome = verify_siblings(rule, shape.of_inner(P), Q, candidates, uniforms, depth + 1, near, shape.sizes)

    # a node is on the path if it and all its ancestors are accepted
    is_accepted = outcome.index >= 0
    chosen = children.gather(2, outcome.index.clamp(min=0).unsqueeze(2)).squeeze(2) * is_accepted
    accepted = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, chosen, True)
    path, on_path = _path(shape, accepted, room)
    count = on_path.sum(1) - 1

    # what the rule verified on the way
    tried = shape.of_inner(on_path & shape.has_children) & (depth < room)
    bound = outcome.bound(tried).sum(1)

    # the token after the path: from the target's distribution, or from the residual if all candidates were rejected
    all_rejected = tried & ~is_accepted  # of one node at most, the last
    rejected = all_rejected.any(1, keepdim=True)
    residual = outcome.residual[each, all_rejected.int().argmax(1)]
    own = rule.target(P[each, path.amax(1)])  # a child comes after its parent
    position = count.unsqueeze(1)
    u = torch.where(rejected, draws.rejected.gather(1, position), draws.own.gather(1, position))
    last = sample(torch.where(rejected, residual, own), u.squeeze(1))
    return Verified(count, path, last, _tried(shape, path, count, room), bound)
