"""What is drafted for the target to judge: a chain by a smaller model, or a tree by EAGLE's drafter.

Codes are drawn from the draft's own guided and filtered distribution, siblings without replacement; EAGLE-2's, and all
at temperature 0, are chosen, and judged as point masses.

Sources:
    chain: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192.
    eagle-static: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", arXiv 2401.15077.
    eagle-dynamic: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", arXiv 2406.16858.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from cspd.discrete import tree
from cspd.discrete.batch import Batch
from cspd.discrete.draft import Drafted, draft
from cspd.discrete.host import VQHost
from cspd.discrete.probabilities import draw_siblings, likeliest, nearby, sample
from cspd.discrete.tree_draws import draw_tree
from cspd.vq.steps import steps

# EAGLE-1's tree of 25 codes: the path of ranks (rank, rank, ...) has so many children
EAGLE_TREE = {
    (): 4,
    (0,): 3,
    (1,): 2,
    (2,): 2,
    (3,): 1,
    (0, 0): 3,
    (0, 1): 2,
    (0, 2): 2,
    (1, 0): 1,
    (0, 0, 0): 3,
    (0, 0, 0, 0): 2,
}
BRANCHES = 10  # EAGLE-2: nodes expanded at a depth, and children tried of each
NODES = 60  # EAGLE-2: codes kept of all, unless a request has a window of its own
LEAST_LOG = -1e4


@functools.lru_cache(maxsize=64)
def _chain_shape(length: int, device: torch.device) -> tree.Shape:
    return tree.chain(length, device)


def _pick(features: Tensor, index: Tensor) -> Tensor:
    """features[:, b, index[b, n]] [copies, B, n, dim] of features [copies, B, N, dim]."""
    each = steps(len(index), index.device).unsqueeze(1)
    return features[:, each, index]


def _expected(batch: Batch, q: Tensor, u: Tensor) -> Tensor:
    """How likely the target is to commit each code [B, N, V], by the draft's distributions q [B, N, V] and the draw
    u [B, 1] by which same-image coupling will.
    """
    return nearby(q, u) if batch.same_image and not batch.greedy else q


@draft("chain", needs="draft")
def chain(host: VQHost, batch: Batch) -> Drafted:
    """gamma codes, one after the other, by the draft model."""
    gamma = batch.request.gamma
    # the last two inputs: of a round that accepted everything, the draft has not seen the last but one
    recent, start = host.last(batch, 2)
    features = host.features(batch, recent, start, "draft")
    features = _pick(features, (batch.known_t - start).unsqueeze(1))
    u = host.drawn(batch, steps(gamma, host.device)).split(1, 1)
    codes, Q = [host.last(batch, 1)[0]], []
    for i in range(gamma):
        if i > 0:
            features = host.features(batch, codes[-1], i, "draft")
        q = host.distributions(batch, features, "draft")
        Q.append(q)
        if batch.same_image:
            codes.append(likeliest(_expected(batch, q, u[i]), 1).squeeze(-1))
        else:
            codes.append(sample(q, u[i]))
    return Drafted(_chain_shape(gamma, host.device), torch.cat(codes, 1), torch.cat(Q, 1))


def _eagle_root(host: VQHost, batch: Batch, height: int) -> Tensor:
    """EAGLE's feature at the root [copies, B, 1, dim]; what was committed since its last round is taken in anew."""
    recent, start = host.last(batch, height + 1)
    past = host.past.before(batch, start.unsqueeze(1) + steps(height + 1, host.device))
    features = host.features(batch, recent, start, "eagle", past=past)
    return _pick(features, (batch.known_t - start).unsqueeze(1))


class Level(NamedTuple):
    """The n nodes of a static tree that have children, at one depth; of their children, [n, K] with gaps, the place is
    where they are when that is written flat.

    Attributes:
        nodes, depth: int64 [n]. seen: bool [n, N + 2], see `tree.Shape.seen`.
        children: int64 [n, K], their nodes, 0 in a gap. present: int64 [m], the places of all children.
        inner: int64 [n'], of those that have children too. parents: int64 [n'], which of the n is the parent of those.
    """

    nodes: Tensor
    depth: Tensor
    seen: Tensor
    children: Tensor
    present: Tensor
    inner: Tensor
    parents: Tensor


@functools.lru_cache(maxsize=64)
def _static_tree(height: int, device: torch.device) -> tuple[tree.Shape, list[Level], Tensor]:
    """EAGLE-1's tree down to a height, its levels, and where its inner nodes are in these, int64 [M]."""
    paths = [()]
    for parent, count in EAGLE_TREE.items():
        if len(parent) < height:
            paths += [(*parent, rank) for rank in range(count)]
    paths.sort(key=lambda path: (len(path), path))
    node = {path: i for i, path in enumerate(paths)}
    parents = [-1]  # the root's
    for path in paths[1:]:
        parents.append(node[path[:-1]])

    inner = [path for path in paths if node[path] in parents]
    counts = [EAGLE_TREE[path] for path in inner]
    sizes = [sum(count > rank for count in counts) for rank in range(max(counts))]
    shape = tree.Shape(torch.tensor(parents, device=device), len(paths[-1]), sizes)
    levels = []
    for depth in range(shape.height):
        level = [path for path in inner if len(path) == depth]
        nodes = torch.tensor([node[path] for path in level], device=device)
        levels.append(_level(shape, nodes, max(EAGLE_TREE[path] for path in level)))
    of_levels = torch.cat([level.nodes for level in levels])
    return shape, levels, torch.searchsorted(of_levels, shape.inner)


def _level(shape: tree.Shape, nodes: Tensor, width: int) -> Level:
    """The level of these nodes, which have `width` children at most."""
    rows = (shape.inner == nodes.unsqueeze(1)).int().argmax(1)
    children = shape.children[rows, :width]
    place = children.flatten()
    present = place >= 0
    inner = torch.where(present & torch.isin(place, shape.inner))[0]
    return Level(
        nodes,
        shape.depth[nodes],
        shape.seen[nodes],
        children.clamp(min=0),
        torch.where(present)[0],
        inner,
        inner // width,
    )


@draft("eagle-static", needs="eagle", highest=1 + max(map(len, EAGLE_TREE)))
def eagle_static(host: VQHost, batch: Batch) -> Drafted:
    """EAGLE-1: always the same tree, siblings drawn without replacement; gamma is its height, at most 5."""
    shape, levels, inner = _static_tree(batch.request.gamma, host.device)
    chosen = batch.greedy or batch.same_image
    draws = None if chosen else draw_tree(host, batch, shape)
    u = host.drawn(batch, steps(shape.height, host.device)).split(1, 1)
    features = _eagle_root(host, batch, shape.height)
    codes, Q = [host.last(batch, 1)[0]], []
    for depth, level in enumerate(levels):
        q = host.distributions(batch, features, "eagle", soft=batch.greedy)
        Q.append(q)
        if chosen:
            drafted = likeliest(_expected(batch, q, u[depth]), level.children.shape[1])
        else:
            drafted = draw_siblings(q, draws.codes[:, level.children])
        drafted = drafted.flatten(1)
        codes.append(drafted[:, level.present])
        if depth + 1 == len(levels):
            break

        # those that have children themselves, each seeing its ancestors and itself
        below = levels[depth + 1]
        features = host.features(
            batch,
            drafted[:, level.inner],
            model="eagle",
            depth=below.depth,
            seen=below.seen,
            columns=below.nodes,
            past=features[:, :, level.parents],
        )
    return Drafted(shape, torch.cat(codes, 1), None if chosen else torch.cat(Q, 1)[:, inner], draws)


class Candidates(NamedTuple):
    """Nodes of EAGLE-2's tree before it is pruned. They are numbered from 1, depth after depth; 0 is the root.

    Attributes:
        codes: int64 [B, n]. parent: int64 [B, n], its number. depth: int64 [n].
        confidence: float64 [B, n], log of the product of the draft's probabilities along the path to a node.
    """

    codes: Tensor
    parent: Tensor
    depth: Tensor
    confidence: Tensor


@draft("eagle-dynamic", needs="eagle", highest=8)
def eagle_dynamic(host: VQHost, batch: Batch) -> Drafted:
    """EAGLE-2: the likeliest nodes of every depth are expanded, the likeliest of all are kept; gamma is the height."""
    height = batch.request.gamma
    nodes = batch.request.window or NODES
    branches = min(BRANCHES, nodes, host.config.vocab_size)
    candidates = _expand(host, batch, height, branches)
    parent, codes = _rerank(candidates, nodes)
    shape = tree.grown(parent, height, 1 + branches * (height - 1), branches)
    root = host.last(batch, 1)[0]
    return Drafted(shape, torch.cat([root, codes], 1), None)


def _expand(host: VQHost, batch: Batch, height: int, branches: int) -> Candidates:
    """EAGLE-2's expansion phase: at every depth the most confident nodes get `branches` children each."""
    size, device = len(batch), host.device
    each = steps(size, device).unsqueeze(1)
    width = 1 + (height - 1) * branches  # cache columns from the root on: its own, and of what is expanded
    column = steps(width + 2, device)  # the first stands for all before the root, see `seen_of`; the second is its own
    seen = (column <= 1).expand(size, 1, width + 2)
    number = torch.zeros(size, 1, dtype=torch.int64, device=device)  # of the nodes expanded at this depth
    confidence = torch.zeros(size, 1, dtype=torch.float64, device=device)
    features = _eagle_root(host, batch, height)
    u = host.drawn(batch, steps(height, device)).split(1, 1)
    levels, first = [], 1  # the number of the first node at this depth
    for depth in range(1, height + 1):
        # children, each as confident as its path: the product of the draft's probabilities
        q = _expected(batch, host.distributions(batch, features, "eagle", soft=True), u[depth - 1])
        q, codes = q.topk(branches)  # [B, n, branches]
        log_q = q.double().log().clamp(min=LEAST_LOG).nan_to_num(nan=LEAST_LOG)  # NaN would come before its parent
        confidence = (confidence.unsqueeze(-1) + log_q).flatten(1)
        parent = number.unsqueeze(-1).expand_as(codes).flatten(1)
        codes = codes.flatten(1)
        levels.append((codes, parent, confidence))
        if depth == height:
            break

        # the most confident ones are expanded next, each seeing its ancestors and itself
        confidence, best = confidence.topk(branches)
        number = first + best
        first += codes.shape[1]
        above = best // branches  # among the nodes expanded last
        start = 1 + (depth - 1) * branches
        seen = seen[each, above] | (column == column[1 + start : 1 + start + branches].unsqueeze(1))
        features = host.features(
            batch,
            codes.gather(1, best),
            model="eagle",
            depth=_depths(depth, branches, device)[-branches:],
            seen=seen,
            columns=column[start : start + branches],
            past=_pick(features, above),
        )
    codes, parent, confidence = (torch.cat(parts, -1) for parts in zip(*levels))
    return Candidates(codes, parent, _depths(height, branches, device), confidence)


@functools.lru_cache(maxsize=64)
def _depths(height: int, branches: int, device: torch.device) -> Tensor:
    """Of the candidates of so many depths: `branches` at the first, so many for each node expanded at the others."""
    counts = torch.tensor([branches] + [branches * branches] * (height - 1), device=device)
    return torch.arange(1, height + 1, device=device).repeat_interleave(counts)


def _rerank(candidates: Candidates, most: int) -> tuple[Tensor, Tensor]:
    """EAGLE-2's reranking phase: parents int64 [B, 1 + n] and codes [B, n] of the `most` most confident nodes."""
    codes, parent, depth, confidence = candidates
    # a child is never more confident than its parent; equals are told apart so that a parent is kept first
    score = confidence - 1e-9 * depth
    best = score.topk(min(most, codes.shape[1])).indices
    kept = best.sort().values

    # kept nodes move up to close the gaps: a parent's new place is where its number stands among the kept ones'
    root = kept.new_zeros(len(kept), 1)
    numbers = torch.cat([root, kept + 1], 1)
    parent = torch.searchsorted(numbers, parent.gather(1, kept))
    return torch.cat([root - 1, parent], 1), codes.gather(1, kept)
