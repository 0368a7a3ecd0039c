"""Trees of drafted codes: shapes, and the path of accepted codes from the root. Pure functions on tensors.

Node 0, the root, is the last committed code (or the class); every other node is a drafted code after its parent. A
parent comes before its children. Shapes are [N] where all sequences of a batch share them, or [B, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cspd.discrete.judging import judge_siblings
from cspd.discrete.rules import Rule
from cspd.vq.steps import steps


@dataclass(frozen=True)
class Shape:
    """The shape of a tree of N nodes.

    Attributes:
        parent: int64 [..., N], -1 of the root. depth: int64 [..., N], 0 at the root.
        inner: int64 [M], or a slice, the nodes that may have children, ascending.
        children: int64 [..., M, K], theirs, -1 where there is none, in the order judged.
        sees: bool [..., N, N], the ancestors of each node, itself included.
        widths: the most children that a node has, at each depth but the largest.
        chain: whether node i is at depth i, so that nothing moves when it is committed.
    """

    parent: Tensor
    depth: Tensor
    inner: Tensor | slice
    children: Tensor
    sees: Tensor
    widths: Sequence[int]
    chain: bool

    @property
    def num_nodes(self) -> int:
        return self.depth.shape[-1]

    @property
    def height(self) -> int:
        """The largest depth."""
        return len(self.widths)


def shape_of(parent: Tensor, widths: Sequence[int], inner: Tensor | slice = slice(None), chain: bool = False) -> Shape:
    """The shape with these parents, int64 [..., N]: parent[..., 0] = -1, and a node's children in ascending order."""
    height, most_children = len(widths), max(widths)
    num = parent.shape[-1]
    index = steps(num, parent.device)
    is_child = parent >= 0

    # every node sees itself and its parent, then what those see, and so on: the generations double
    ancestor = parent.clamp(min=0)
    sees = (index == index.unsqueeze(1)) | (index == ancestor.unsqueeze(-1))
    for _ in range((height - 1).bit_length()):
        sees = sees | sees.gather(-2, ancestor.unsqueeze(-1).expand_as(sees))
        ancestor = ancestor.gather(-1, ancestor)
    depth = sees.sum(-1) - 1

    # a node's rank among its siblings is how many of them come before it
    siblings = parent.unsqueeze(-1) == parent.unsqueeze(-2)
    rank = (siblings & (index < index.unsqueeze(1))).sum(-1)
    # written flat; a spare column takes the root, which is no child
    columns = most_children + 1
    flat = torch.where(is_child, parent.clamp(min=0) * columns + rank, most_children)
    children = parent.new_full((*parent.shape, columns), -1).flatten(-2)
    children = children.scatter(-1, flat, torch.where(is_child, index, -1)).unflatten(-1, (num, -1))
    children = children[..., inner, :most_children]
    return Shape(parent, depth, inner, children, sees, widths, chain)


def chain(length: int, device: torch.device) -> Shape:
    """`length` codes one after the other."""
    return shape_of(torch.arange(-1, length, device=device), [1] * length, slice(length), chain=True)


class Verified(NamedTuple):
    """What became of a tree, for B sequences.

    Attributes:
        count: int64 [B], drafted codes accepted. path: int64 [B, 1 + height], the root and their nodes, 0 beyond.
        rest: [B, V], the distribution of the code after them.
        rejected: bool [B], whether candidates were judged for that place, and all rejected.
        judged: bool [B, height], whether candidates of a depth were. bound: [B], the sum of the rule's local bounds.
    """

    count: Tensor
    path: Tensor
    rest: Tensor
    rejected: Tensor
    judged: Tensor
    bound: Tensor


def walk(
    rule: Rule,
    shape: Shape,
    codes: Tensor,
    P: Tensor,
    Q: Tensor | None,
    uniforms: Tensor,
    room: Tensor,
    near: Tensor | None = None,
) -> Verified:
    """The longest path of accepted codes from the root. The children of all nodes are judged at once, also of nodes
    that turn out not to be on it: that takes a few large kernels where a walk from depth to depth takes many small.

    Args:
        codes: int64 [B, N]; the root's is not read. P: [B, N, V], the target's distribution after each node.
        Q: [B, M, V], from which the inner nodes' children were drawn without replacement; None where they were chosen.
        uniforms: uniform draws [B, N], of each node. room: int64 [B], codes still to come: no more are judged.
        near: int64 [V, k], for rules that pool.
    """
    size, room = len(codes), room.unsqueeze(1)
    node = steps(shape.num_nodes, codes.device)
    level = steps(shape.height, codes.device)

    # which child of each inner node is accepted
    children = shape.children.expand(size, -1, -1)  # [B, M, K]
    is_child = children >= 0
    column = children.clamp(min=0).flatten(1)
    of_children = codes.gather(1, column).view_as(children)
    candidates = torch.where(is_child, of_children, -1)
    uniforms = uniforms.gather(1, column).view_as(children)
    depth = shape.depth[..., shape.inner]
    P_inner = P[:, shape.inner]
    outcome = judge_siblings(rule, P_inner, Q, candidates, uniforms, depth + 1, near)

    # a node is on the path where it is accepted and all its ancestors are; the root always
    chosen = children.gather(2, outcome.index.clamp(min=0).unsqueeze(2)).squeeze(2)
    chosen = torch.where(outcome.index >= 0, chosen, 0)
    accepted = (shape.depth == 0).expand(size, -1).scatter(1, chosen, True)
    accepted = accepted & (shape.depth <= room)
    on_path = (accepted.unsqueeze(1) | ~shape.sees).all(2)
    place = on_path * shape.depth
    path = place.new_zeros(size, 1 + shape.height).scatter(1, place, on_path * node)
    count, last = place.amax(1), path.amax(1)  # a child comes after its parent

    # what was judged on the way
    judged = on_path[:, shape.inner] & (depth < room) & is_child.any(2)
    by_depth = (judged.unsqueeze(2) & (depth.unsqueeze(-1) == level)).any(1)
    bound = torch.where(judged, outcome.bound, 0).sum(1)

    # what comes after: the target's own distribution, or what the rejections left of it
    each = steps(size, codes.device)
    all_rejected = judged & (outcome.index < 0)  # of one node at most, the last
    rejected = all_rejected.any(1)
    residual = outcome.residual[each, all_rejected.int().argmax(1)]
    rest = torch.where(rejected.unsqueeze(1), residual, rule.target(P[each, last]))
    return Verified(count, path, rest, rejected, by_depth, bound)
