"""Trees of drafted codes: shapes, and the path of accepted codes from the root. Pure functions on tensors.

Node 0, the root, is the last committed code (or the class); every other node is a drafted code after its parent. A
parent comes before its children. Shapes are [N] where all sequences of a batch share them, or [B, N].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cspd.discrete.cache import seen_of
from cspd.discrete.judging import judge_siblings
from cspd.discrete.probabilities import sample
from cspd.discrete.rules import Rule
from cspd.vq.steps import steps


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


def chain(length: int, device: torch.device) -> Shape:
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
