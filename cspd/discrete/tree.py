"""Trees of drafted codes: shapes, and the walk from the root along what a rule accepts. Pure functions on tensors.

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
    up = parent.clamp(min=0)
    sees = (index == index.unsqueeze(1)).expand(*parent.shape, num).clone()
    depth, ancestor = torch.zeros_like(parent), parent
    for _ in range(height):
        sees |= index == ancestor.unsqueeze(-1)
        depth += ancestor >= 0
        ancestor = torch.where(ancestor >= 0, parent.gather(-1, ancestor.clamp(min=0)), -1)
    same = (parent.unsqueeze(-1) == parent.unsqueeze(-2)) & (index < index.unsqueeze(1))
    rank = same.sum(-1)
    children = parent.new_full((*parent.shape, most_children + 1), -1)  # the last column takes what the root has not
    flat = torch.where(parent >= 0, up * (most_children + 1) + rank, most_children)
    children = children.flatten(-2).scatter(-1, flat, torch.where(parent >= 0, index, -1))
    children = children.unflatten(-1, (num, -1))[..., :most_children]
    return Shape(parent, depth, children, sees, widths, chain)


def chain(length: int, device: torch.device) -> Shape:
    """`length` codes one after the other."""
    return shape_of(torch.arange(-1, length, device=device), [1] * length, chain=True)


class Verified(NamedTuple):
    """What became of a tree, for B sequences.

    Attributes:
        count: int64 [B], drafted codes accepted. path: int64 [B, height], their nodes, 0 beyond count.
        rest: [B, V], the distribution of the code after them. refused: bool [B], whether candidates were judged for it.
        judged: bool [B, height], whether candidates of a depth were. bound: [B], the sum of the rule's local bounds.
    """

    count: Tensor
    path: Tensor
    rest: Tensor
    refused: Tensor
    judged: Tensor
    bound: Tensor


def verify(
    rule: Rule,
    shape: Shape,
    tokens: Tensor,
    P: Tensor,
    Q: Tensor | None,
    coins: Tensor,
    room: Tensor,
    near: Tensor | None = None,
) -> Verified:
    """Walks from the root along accepted codes; every depth is one judgement of siblings, for the whole batch.

    Args:
        tokens: int64 [B, N]; the root's is not read. P: [B, N, V], the target's distribution after each node.
        Q: [B, N, V], from which a node's children were drawn without replacement; None where they were chosen.
        coins: uniform [B, N], of each node. room: int64 [B], codes that are still to come: no more are judged.
        near: int64 [V, k], for rules that pool.
    """
    batch = torch.arange(len(tokens), device=tokens.device)
    node, alive = torch.zeros_like(batch), torch.ones_like(batch, dtype=torch.bool)
    children = shape.children.expand(len(tokens), -1, -1)
    count, bound = torch.zeros_like(batch), torch.zeros_like(P[:, 0, 0])
    here = P[:, 0]
    refused, rest, path, judged = ~alive, rule.target(here), [], []
    for depth, width in enumerate(shape.widths, 1):
        alive = alive & (depth <= room)
        nodes = children[batch, node, :width]
        present = nodes >= 0
        siblings = torch.where(present, tokens.gather(1, nodes.clamp(min=0)), -1)
        q = None if Q is None else Q[batch, node]
        outcome = judge_siblings(rule, here, q, siblings, coins.gather(1, nodes.clamp(min=0)), depth, near)
        taken = alive & (outcome.index >= 0)
        looked = alive & present.any(-1)
        bound = bound + torch.where(alive, outcome.bound, 0)
        chosen = nodes.gather(1, outcome.index.clamp(min=0).unsqueeze(1)).squeeze(1)
        node = torch.where(taken, chosen, node)
        here = P[batch, node]
        rest = torch.where(alive.unsqueeze(-1), outcome.residual, rest)
        rest = torch.where(taken.unsqueeze(-1), rule.target(here), rest)
        refused = torch.where(alive, looked & ~taken, refused)
        path.append(torch.where(taken, chosen, 0))
        judged.append(looked)
        count, alive = count + taken, taken
    return Verified(count, torch.stack(path, 1), rest, refused, torch.stack(judged, 1), bound)
