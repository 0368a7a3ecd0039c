"""Trees of drafted tokens, and how siblings are verified."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cspd.discrete.distributions import TINY, point, sample, without
from cspd.discrete.kv_cache import seen_of
from cspd.discrete.prices import Verification
from cspd.discrete.rules import Greedy, Pooling, Ratio, Rule
from cspd.transformer import steps

# Siblings are candidates for one position. A rule verifies them in order, for any number of positions at once: each
# candidate against the distribution that the rejection of its predecessors leaves of P. This is SJD-PAC (arXiv
# 2603.18599), eq. 7 for Q and eq. 8 for P, with any rule.
#
# Positions may have different numbers of candidates. They are sorted by that number, largest first: the first
# `sizes[k]` positions may have a candidate of rank k, from 0.

Bounds = Callable[[Tensor], Tensor]  # from a mask of siblings, bool [..., M, K], to the sums of their bounds, [..., M]


class SiblingVerdicts(NamedTuple):
    """The outcome of verifying K siblings at each of M positions.

    Attributes:
        index: int64 [..., M], the accepted sibling, or -1.
        residual: [..., M, V], the distribution to sample from if all were rejected.
        present: bool [..., M, K], which siblings exist.
        bounds: computes the rule's local bounds; None if all are 0.
    """

    index: Tensor  # type: ignore[assignment]  # a tuple has a method of this name
    residual: Tensor
    present: Tensor
    bounds: Bounds | None

    def bound(self, where: Tensor) -> Tensor:
        """The local bounds at the positions `where`, bool [..., M], summed over the verified candidates: [..., M]."""
        if self.bounds is None:
            return torch.zeros_like(where, dtype=self.residual.dtype)
        # candidates after the accepted one were not verified; -1 % (K + 1) is K: all were
        most = self.present.shape[-1]
        last = self.index % (most + 1)
        tried = self.present & (steps(most, last.device) <= last.unsqueeze(-1))
        return self.bounds(tried & where.unsqueeze(-1))


class _Verification(NamedTuple):
    """K siblings at each of M positions, each verified as if all siblings before it had been rejected.

    Attributes:
        f: [..., M, K], the probability that each is accepted.
        residual: [..., M, V], the distribution that is left if all are rejected.
        bounds: see `SiblingVerdicts`.
    """

    f: Tensor
    residual: Tensor
    bounds: Bounds


def verify_siblings(
    rule: Rule,
    P: Tensor,
    Q: Tensor | None,
    candidates: Tensor,
    uniforms: Tensor,
    depth: Tensor | int = 1,
    sizes: Sequence[int] | None = None,
) -> SiblingVerdicts:
    """Verifies the candidates of M positions, those of each position in order.

    Args:
        P: [..., M, V]. Q: [..., M, V], the distribution from which the candidates were sampled without replacement, in
            this order; None if they were chosen, and are verified as point masses.
        candidates: int64 [..., M, K], -1 for missing ones; K = 1 for the positions of a chain or a Jacobi window.
        uniforms: uniform draws [..., M, K]. A candidate is accepted if its draw is below f.
        depth: as in `Rule.accept`.
        sizes: how many positions, the first ones, may have a first candidate, a second, ...; by default all.
    """
    if sizes is None:
        sizes = [P.shape[-2]] * candidates.shape[-1]
    if isinstance(rule, Greedy):
        verified = _verify_greedily(rule, P, candidates)
    elif Q is None and isinstance(rule, Ratio):
        verified = _verify_points(rule, P, candidates, depth)
    elif Q is None and isinstance(rule, Pooling):
        verified = _verify_pools(rule, P, candidates, sizes)
    else:
        verified = _verify_in_turn(rule, P, Q, candidates, depth, sizes)

    # the first that is accepted
    present = candidates >= 0
    accepted = present & (uniforms < verified.f)
    first = accepted.int().argmax(-1)
    index = torch.where(accepted.any(-1), first, -1)
    bounds = verified.bounds if rule.guarantee == "bounded" else None
    return SiblingVerdicts(index, verified.residual, present, bounds)


def _sum_of(bounds: Tensor, wanted: Tensor) -> Tensor:
    """The sum [..., M] of the local bounds [..., M, K] of the siblings in a mask."""
    return torch.where(wanted, bounds, 0).sum(-1)


def _whole(rows: Tensor, others: list[Tensor]) -> Tensor:
    """Rows [..., M, n] of all positions: those with the most candidates, then `others`, set aside earlier."""
    return torch.cat([rows, *reversed(others)], -2) if others else rows


def _by_position(ranks: list[Tensor], sizes: Sequence[int]) -> Tensor:
    """Stacks a number [..., size] for each candidate of each rank to [..., M, K]; arbitrary if one is missing."""
    if sizes[-1] == sizes[0]:
        return torch.stack(ranks, -1)
    numbers = torch.cat(ranks, -1)
    return numbers[..., _rank_by_rank(tuple(sizes), numbers.device)]


@functools.lru_cache(maxsize=64)
def _rank_by_rank(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [M, K], each candidate's index in the list of all, rank by rank; 0 for missing candidates."""
    position = torch.arange(sizes[0]).unsqueeze(1)
    size = torch.tensor(sizes)
    first = size.cumsum(0) - size
    return torch.where(position < size, first + position, 0).to(device)


class _Rank(NamedTuple):
    """The distributions by which the candidates of one rank are verified, at the m positions that may have one.

    Attributes:
        P, Q: [..., m, V]. f: [..., m, V], or None if it was computed at the candidates only.
    """

    P: Tensor
    Q: Tensor
    f: Tensor | None


def _verify_in_turn(
    rule: Rule,
    P: Tensor,
    Q: Tensor | None,
    candidates: Tensor,
    depth: Tensor | int,
    sizes: Sequence[int],
) -> _Verification:
    """Verifies candidates that were sampled from Q, or chosen for a rule that has no faster way to verify those."""
    # a GPU computes f at all tokens at once, which saves launches
    has_whole_f = rule.has_whole_f or P.device.type == "cuda"
    tokens = candidates.clamp(min=0)
    present = candidates >= 0
    is_chosen = Q is None
    accepts: list[Tensor] = []
    ranks: list[_Rank] = []
    others: list[Tensor] = []
    for rank, size in enumerate(sizes):
        if size < P.shape[-2]:  # the other positions have no more candidates
            others.append(P[..., size:, :])
            P = P[..., :size, :]
        x = tokens[..., :size, rank]

        # the candidate's distribution, given that all before it were rejected (eq. 7)
        if is_chosen:
            Q = point(x, P)
        elif rank > 0:
            assert Q is not None
            Q = without(Q[..., :size, :], candidates[..., :size, rank - 1])
        assert Q is not None

        # f, at the candidates or everywhere
        at_x = x.unsqueeze(-1)
        f = None
        if has_whole_f:
            own_depth = depth[..., :size] if isinstance(depth, Tensor) else depth
            f = rule.accept(P, Q, own_depth)
            f_of_x = f.gather(-1, at_x)
        else:
            f_of_x = rule.accept_token(P, Q, at_x)
        accepts.append(f_of_x.squeeze(-1))
        ranks.append(_Rank(P, Q, f))

        # what its rejection leaves of P for the next (eq. 8)
        left = rule.resample(P, Q, f, x)
        is_present = present[..., :size, rank].unsqueeze(-1)
        P = torch.where(is_present, left, P)

    def bounds(wanted: Tensor) -> Tensor:
        local = []
        for rank, size, wanted_of_rank in zip(ranks, sizes, wanted.unbind(-1)):
            local.append(_local_bounds(rule, rank, wanted_of_rank[..., :size]))
        return _sum_of(_by_position(local, sizes), wanted)

    return _Verification(_by_position(accepts, sizes), _whole(P, others), bounds)


def _local_bounds(rule: Rule, rank: _Rank, wanted: Tensor) -> Tensor:
    """The rule's bounds [..., m] of the candidates of one rank, at least of those in `wanted`, bool [..., m]."""
    if rank.f is not None:
        return rule.local_bound(rank.P, rank.Q, rank.f)
    # f at all tokens is expensive here: only for those that are wanted
    P = rank.P[wanted]
    Q = rank.Q[wanted]
    f = rule.accept(P, Q)
    bounds = P.new_zeros(wanted.shape)
    return bounds.masked_scatter_(wanted, rule.local_bound(P, Q, f))


def _verify_points(rule: Ratio, P: Tensor, candidates: Tensor, depth: Tensor | int) -> _Verification:
    """Verifies chosen candidates, each a point mass, by a rule whose f depends on the candidate's probability alone.

    With Q = 1 at x, f = min(1, omega P(x)). A rejection leaves norm([P - f 1_x]+) (eq. 8): x keeps a `share` of its
    mass, the other tokens keep theirs, and all masses are rescaled. So all candidates are verified at once, from sums
    of masses before rescaling. They are sums, not differences, so that they are 0 only if nothing is left.
    """
    # a spare column, of mass 0, takes missing candidates and repeated ones
    is_same = candidates.unsqueeze(-1) == candidates.unsqueeze(-2)
    is_repeated = is_same.tril(-1).any(-1)
    columns = candidates.masked_fill(is_repeated | (candidates < 0), P.shape[-1])
    masses = functional.pad(P, (0, 1))
    own = masses.gather(-1, columns)
    rest = masses.scatter_(-1, columns, 0).sum(-1, keepdim=True)  # of all other tokens

    # When a candidate is verified, there are left: all other tokens, this candidate and its successors, and the shares
    # of its rejected predecessors.
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
    total_left = rest + left.sum(-1, keepdim=True)
    residual = masses.scatter_(-1, columns, left)[..., :-1] / total_left

    # the papers' own residual is biased wherever f differs from p; but if p = 1, it falls back to P itself
    if rule.optimal:
        bounds = (f - p).clamp(min=0)
    else:
        bounds = torch.where(p < 1, (f - p).abs(), 0)
    return _Verification(f, residual, functools.partial(_sum_of, bounds))


def _verify_pools(rule: Pooling, P: Tensor, candidates: Tensor, sizes: Sequence[int]) -> _Verification:
    """Verifies chosen candidates by a rule that pools. The mass that each absorbs depends on those rejected before."""
    # the tokens that each candidate looks at, rank by rank. Of two spare columns, V takes missing candidates, and V + 1
    # has a tiny mass that is never removed, so that the sum stays above 0
    of_ranks = [candidates[..., :size, rank] for rank, size in enumerate(sizes)]
    tokens = torch.cat(of_ranks, -1)
    is_present = (tokens >= 0).unsqueeze(-1)
    reached = rule.reach(tokens.clamp(min=0))
    reached = torch.where(is_present, reached, P.shape[-1])
    masses = functional.pad(P, (0, 2), value=TINY)  # P up to a factor, written to
    nothing = 2 * TINY  # the largest total that means that nothing is left of P
    total = masses.sum(-1, keepdim=True)
    owns: list[Tensor] = []
    absorbed: list[Tensor] = []
    others: list[Tensor] = []
    for reach, size in zip(reached.split(list(sizes), -2), sizes):
        if size < total.shape[-2]:  # the other positions have no more candidates
            others.append(total[..., size:, :])
            total = total[..., :size, :]
        still = masses[..., :size, :]
        before = still.gather(-1, reach)
        p = before / total
        mass_absorbed, taken = rule.pool(p)
        owns.append(p[..., 0])
        absorbed.append(mass_absorbed.squeeze(-1))

        # its rejection empties these tokens for the next candidate
        still.scatter_(-1, reach, before.masked_fill(taken, 0))
        total = still.sum(-1, keepdim=True)
        if rule.published:  # LANTERN's released code: if nothing is left, every token is equally likely
            of_tokens = still[..., :-2]
            of_tokens.masked_fill_(total <= nothing, 1)
            total = of_tokens.sum(-1, keepdim=True)

    total = _whole(total, others)
    own = _by_position(owns, sizes)
    f = (own + _by_position(absorbed, sizes)).clamp(max=1)
    rescaled = masses[..., :-2] / total
    residual = torch.where(total > nothing, rescaled, P)
    bounds = (f - own).clamp(min=0)
    return _Verification(f, residual, functools.partial(_sum_of, bounds))


def _verify_greedily(rule: Greedy, P: Tensor, candidates: Tensor) -> _Verification:
    """Verifies at temperature 0: a rejection leaves P as it is."""
    tokens = candidates.clamp(min=0)
    target = rule.target(P)
    f = own = target.gather(-1, tokens)
    if rule.pools:  # each candidate takes over other probabilities
        f = torch.cat([rule.accept_token(P, P, x) for x in tokens.split(1, -1)], -1)
    bounds = (f - own).clamp(min=0)
    return _Verification(f, target, functools.partial(_sum_of, bounds))


# Trees of drafted tokens: shapes, and the path of accepted tokens from the root. Pure functions on tensors.
#
# Node 0, the root, is the last committed token (or the condition); every other node is a drafted token after its
# parent. A parent comes before its children. Shapes are [N] if all sequences of a batch share them, or [B, N].


@dataclass(frozen=True)
class Shape:
    """The shape of a tree of N nodes.

    Attributes:
        parent: int64 [..., N], -1 of the root. height: the largest depth.
        sizes: how many nodes may have at least one child, at least two, ...
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
        # every node sees itself and its parent, then the nodes that its parent sees: the generations double
        sees = (index == index.unsqueeze(1)) | (index == ancestor.unsqueeze(-1))
        for _ in range((self.height - 1).bit_length()):
            sees = sees | sees.gather(-2, ancestor.unsqueeze(-1).expand_as(sees))
            ancestor = ancestor.gather(-1, ancestor)
        return sees

    @functools.cached_property
    def seen(self) -> Tensor:
        """bool [..., N, N + 2], `sees` as `VQRunner.features` expects it."""
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
    def inner(self) -> Any:
        """int64 [..., M], or a slice: the nodes that may have children, those with most children first."""
        if self.chain:
            return slice(self.height)
        index = steps(self.num_nodes, self.parent.device)
        is_child = self.parent.unsqueeze(-2) == index.unsqueeze(-1)
        num_children = is_child.sum(-1)
        by_children = num_children.argsort(dim=-1, descending=True, stable=True)
        return by_children[..., : self.sizes[0]]

    def of_inner(self, of_nodes: Tensor) -> Tensor:
        """Selects the values [B, M, ...] of the inner nodes from those of all nodes [B, N, ...]."""
        if isinstance(self.inner, slice) or self.inner.dim() == 1:
            return of_nodes[:, self.inner]
        each = steps(len(of_nodes), of_nodes.device).unsqueeze(1)
        return of_nodes[each, self.inner]

    @functools.cached_property
    def children(self) -> Tensor:
        """int64 [..., M, K], the children of each inner node, ascending, as they are verified; -1 for missing ones."""
        parent = self.parent
        most = len(self.sizes)
        index = steps(self.num_nodes, parent.device)
        is_child = parent >= 0

        # a node's rank among its siblings is how many of them come before it
        is_sibling = parent.unsqueeze(-1) == parent.unsqueeze(-2)
        comes_before = index < index.unsqueeze(1)
        rank = (is_sibling & comes_before).sum(-1)

        # written flat; a spare column takes the root, which has no parent
        columns = most + 1
        flat = torch.where(is_child, self.above * columns + rank, most)
        children = parent.new_full((*parent.shape, columns), -1).flatten(-2)
        children = children.scatter(-1, flat, torch.where(is_child, index, -1))
        children = children.unflatten(-1, (self.num_nodes, -1))
        of_inner = self.of_inner(children) if parent.dim() == 2 else children[self.inner]
        return of_inner[..., :most]


@functools.lru_cache(maxsize=64)
def chain_shape(length: int, device: torch.device) -> Shape:
    """The shape of a chain of `length` drafted tokens."""
    return Shape(torch.arange(-1, length, device=device), length, [length], chain=True)


def grown(parent: Tensor, height: int, most_inner: int, most_children: int) -> Shape:
    """The shape with parents int64 [B, N]. At most `most_inner` nodes have children, at most `most_children` each."""
    num_drafted = parent.shape[1] - 1
    sizes = []
    for num_children in range(1, min(most_children, num_drafted) + 1):
        sizes.append(min(most_inner, num_drafted // num_children))
    return Shape(parent, height, sizes)


class Verified(NamedTuple):
    """The outcome of verifying a tree, for B sequences.

    Attributes:
        count: int64 [B], the number of accepted tokens.
        path: int64 [B, 1 + height], the root and the nodes of accepted tokens, 0 beyond.
        last: int64 [B], the token after them.
        tried: bool [B, height], whether candidates of a depth were verified.
        bound: [B], the sum of the rule's local bounds.
        verification: what a rule did; None if tokens are compared with the target's own.
    """

    count: Tensor  # type: ignore[assignment]  # a tuple has a method of this name
    path: Tensor
    last: Tensor
    tried: Tensor
    bound: Tensor
    verification: Verification | None = None


def _path(shape: Shape, accepted: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """The longest path of accepted nodes, bool [B, N], from the root: `Verified.path`, and its nodes, bool [B, N].

    At most one sibling of each position is accepted. `room`: int64 [B, 1], the tokens still to come, which limits the
    path's length.
    """
    node = steps(shape.num_nodes, accepted.device)
    has_room = shape.depth <= room
    accepted = (accepted & has_room) | (node == 0)
    # on the path are the nodes all of whose ancestors are accepted
    on_path = (accepted.unsqueeze(1) | ~shape.sees).all(2)
    position = on_path * shape.depth
    path = position.new_zeros(len(accepted), 1 + shape.height)
    path.scatter_(1, position, on_path * node)
    return path, on_path


def _tried(shape: Shape, path: Tensor, count: Tensor, room: Tensor) -> Tensor:
    """`Verified.tried` of paths on which `count` tokens, int64 [B], were accepted. room: int64 [B, 1]."""
    level = steps(shape.height, path.device)
    parents = path[:, :-1]
    has_children = shape.has_children.expand(len(path), -1).gather(1, parents)
    is_reached = level <= count.unsqueeze(1)
    return has_children & is_reached & (level < room)


def verify_same_image(shape: Shape, tokens: Tensor, drawn: Tensor, room: Tensor) -> Verified:
    """The longest path from the root of tokens that equal the target's own samples (same-image coupling).

    Only these are committed, so that drafts decide how many forward passes an image takes and nothing else.

    Args:
        tokens: int64 [B, N], siblings distinct; the root's is not read.
        drawn: int64 [B, N], the target's sample after each node. room: as in `walk`.
    """
    room = room.unsqueeze(1)
    above = shape.above.expand(len(tokens), -1)
    accepted = tokens == drawn.gather(1, above)
    path, on_path = _path(shape, accepted, room)
    count = on_path.sum(1) - 1
    last_node = path.amax(1, keepdim=True)  # a child comes after its parent
    last = drawn.gather(1, last_node).squeeze(1)
    no_bound = torch.zeros_like(count, dtype=torch.float32)
    return Verified(count, path, last, _tried(shape, path, count, room), no_bound)


class TreeDraws(NamedTuple):
    """The uniform draws for a tree.

    Attributes:
        tokens, nodes: [B, N], to sample each node's token, and to accept it.
        own, rejected: [B, 1 + height], to sample the token after a path of each length: the request's own draw, and
            the draw used if all candidates were rejected.
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
    draws: TreeDraws,
    room: Tensor,
) -> Verified:
    """The longest path of accepted tokens from the root, by a rule.

    The children of all nodes are verified at once, even those of nodes off the path: a few large kernels are faster
    than the many small ones of a walk from depth to depth.

    Args:
        tokens: int64 [B, N]; the root's is not read. P: [B, N, V], the target's distribution after each node.
        Q: [B, M, V], from which the inner nodes' children were sampled without replacement; None if they were chosen.
        room: int64 [B], tokens still to come: no more are verified.
    """
    size = len(tokens)
    room = room.unsqueeze(1)
    each = steps(size, tokens.device)

    # which child of each inner node is accepted
    children = shape.children.expand(size, -1, -1)  # [B, M, K]
    column = children.clamp(min=0).flatten(1)
    candidates = tokens.gather(1, column).view_as(children)
    candidates = candidates.masked_fill(children < 0, -1)
    uniforms = draws.nodes.gather(1, column).view_as(children)
    depth = shape.of_inner(shape.depth.expand(size, -1))
    P_inner = shape.of_inner(P)
    outcome = verify_siblings(rule, P_inner, Q, candidates, uniforms, depth + 1, shape.sizes)

    # a node is on the path if it and all its ancestors are accepted
    is_accepted = outcome.index >= 0
    child = outcome.index.clamp(min=0).unsqueeze(2)
    chosen = children.gather(2, child).squeeze(2) * is_accepted
    accepted = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, chosen, True)
    path, on_path = _path(shape, accepted, room)
    count = on_path.sum(1) - 1

    # the local bounds of what the rule verified on the path
    tried = shape.of_inner(on_path & shape.has_children) & (depth < room)
    bound = outcome.bound(tried).sum(1)

    # the token after the path: from the target's distribution, or from the residual if all candidates were rejected
    all_rejected = tried & ~is_accepted  # of one node at most, the last
    rejected = all_rejected.any(1, keepdim=True)
    residual = outcome.residual[each, all_rejected.int().argmax(1)]
    last_node = path.amax(1)  # a child comes after its parent
    own = rule.target(P[each, last_node])
    position = count.unsqueeze(1)
    u_rejected = draws.rejected.gather(1, position)
    u_own = draws.own.gather(1, position)
    u = torch.where(rejected, u_rejected, u_own)
    last = sample(torch.where(rejected, residual, own), u.squeeze(1))
    verification = Verification(P_inner, Q, candidates, depth + 1, tried)
    return Verified(count, path, last, _tried(shape, path, count, room), bound, verification)
