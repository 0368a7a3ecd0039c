"""Trees of drafted codes: shapes, and the walk from the root along accepted codes. Pure functions on tensors.

Node 0, the root, is the last committed code (or the class); every other node is a drafted code after its parent. A
parent comes before its children. Shapes are [N] where all sequences of a batch share them, or [B, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cspd.discrete.rules import Rule, judge_siblings


@dataclass(frozen=True)
class Shape:
    """The shape of a tree of N nodes.

    Attributes:
        parent: int64 [..., N], -1 of the root. depth: int64 [..., N], 0 at the root.
        children: int64 [..., N, K], -1 where there is none, in the order judged.
        sees: bool [..., N, N], the ancestors of each node, itself included.
        widths: the most children that a node has, at each depth but the largest.
        chain: whether node i is at depth i, so that nothing moves when it is committed.
    """

    parent: Tensor
    depth: Tensor
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


def shape_of(parent: Tensor, widths: Sequence[int], chain: bool = False) -> Shape:
    """The shape with these parents, int64 [..., N]: parent[..., 0] = -1, and a node's children in ascending order."""
    height, most_children = len(widths), max(widths)
    num = parent.shape[-1]
    index = torch.arange(num, device=parent.device)
    is_child = parent >= 0

    # up from every node at once, a generation a turn
    sees = (index == index.unsqueeze(1)).expand(*parent.shape, num).clone()
    depth, ancestor = torch.zeros_like(parent), parent
    for _ in range(height):
        sees |= index == ancestor.unsqueeze(-1)
        depth += ancestor >= 0
        above = parent.gather(-1, ancestor.clamp(min=0))
        ancestor = torch.where(ancestor >= 0, above, -1)

    # a node's rank among its siblings is how many of them come before it
    siblings = parent.unsqueeze(-1) == parent.unsqueeze(-2)
    rank = (siblings & (index < index.unsqueeze(1))).sum(-1)
    # written flat; a spare column takes the root, which is no child
    columns = most_children + 1
    flat = torch.where(is_child, parent.clamp(min=0) * columns + rank, most_children)
    children = parent.new_full((*parent.shape, columns), -1).flatten(-2)
    children = children.scatter(-1, flat, torch.where(is_child, index, -1)).unflatten(-1, (num, -1))
    return Shape(parent, depth, children[..., :most_children], sees, widths, chain)


def chain(length: int, device: torch.device) -> Shape:
    """`length` codes one after the other."""
    return shape_of(torch.arange(-1, length, device=device), [1] * length, chain=True)


class Verified(NamedTuple):
    """What became of a tree, for B sequences.

    Attributes:
        count: int64 [B], drafted codes accepted. path: int64 [B, height], their nodes, 0 beyond count.
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
    """Walks from the root along accepted codes; every depth is one judgement of siblings, for the whole batch.

    Args:
        codes: int64 [B, N]; the root's is not read. P: [B, N, V], the target's distribution after each node.
        Q: [B, N, V], from which a node's children were drawn without replacement; None where they were chosen.
        uniforms: uniform draws [B, N], of each node. room: int64 [B], codes still to come: no more are judged.
        near: int64 [V, k], for rules that pool.
    """
    each = torch.arange(len(codes), device=codes.device)
    children = shape.children.expand(len(codes), -1, -1)
    node = torch.zeros_like(each)
    P_here = P[:, 0]
    alive = torch.ones_like(each, dtype=torch.bool)  # every depth so far was accepted
    count, bound = torch.zeros_like(each), torch.zeros_like(P[:, 0, 0])
    rest, rejected = rule.target(P_here), ~alive
    path, judged = [], []
    for depth, width in enumerate(shape.widths, 1):
        alive = alive & (depth <= room)

        # the candidates: this node's children
        siblings = children[each, node, :width]
        present = siblings >= 0
        column = siblings.clamp(min=0)
        candidates = torch.where(present, codes.gather(1, column), -1)
        Q_here = None if Q is None else Q[each, node]
        outcome = judge_siblings(rule, P_here, Q_here, candidates, uniforms.gather(1, column), depth, near)
        looked = alive & present.any(-1)
        accepted = alive & (outcome.index >= 0)

        # go on at the accepted one
        chosen = siblings.gather(1, outcome.index.clamp(min=0).unsqueeze(1)).squeeze(1)
        node = torch.where(accepted, chosen, node)
        P_here = P[each, node]

        # what comes after: the target's own distribution, or what the rejections left of it
        rest = torch.where(alive.unsqueeze(-1), outcome.residual, rest)
        rest = torch.where(accepted.unsqueeze(-1), rule.target(P_here), rest)
        rejected = torch.where(alive, looked & ~accepted, rejected)

        bound = bound + torch.where(alive, outcome.bound, 0)
        count = count + accepted
        path.append(torch.where(accepted, chosen, 0))
        judged.append(looked)
        alive = accepted
    return Verified(count, torch.stack(path, 1), rest, rejected, torch.stack(judged, 1), bound)
