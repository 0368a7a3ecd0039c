"""What is drafted for the target to judge: a chain by a smaller model, or a tree by EAGLE's drafter.

Codes are drawn from the draft's own guided and filtered distribution, siblings without replacement; EAGLE-2's, and all
at temperature 0, are chosen, and judged as point masses.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cspd.discrete import tree
from cspd.discrete.draft import Drafted, draft
from cspd.discrete.host import Batch, VQHost
from cspd.discrete.rules import draw_siblings
from cspd.noise import Purpose

# EAGLE-1's tree of 25 codes: the path of ranks (rank, rank, ...) has so many children
EAGLE_TREE = {(): 4, (0,): 3, (1,): 2, (2,): 2, (3,): 1, (0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1}
EAGLE_TREE |= {(0, 0, 0): 3, (0, 0, 0, 0): 2}
BRANCHES, NODES = 10, 60  # EAGLE-2: expanded a level, and children tried of each; codes kept of all
LEAST_LOG = -1e4


@functools.lru_cache(maxsize=64)
def _chain_shape(length: int, device: torch.device) -> tree.Shape:
    return tree.chain(length, device)


def _pick(features: Tensor, index: Tensor) -> Tensor:
    """features[:, b, index[b, n]] [copies, B, n, dim] of features [copies, B, N, dim]."""
    return features[:, torch.arange(len(index), device=index.device).unsqueeze(1), index]


@draft("chain", needs="draft")
def chain(host: VQHost, batch: Batch) -> Drafted:
    """gamma codes, one after the other, by the draft model."""
    gamma, device = batch.sequences[0].request.gamma, host.device
    # the last two inputs: of a round that accepted everything, the draft has not seen the last but one
    recent, start = host.last(batch, 2)
    features = host.features(batch, recent, start, "draft")
    features = _pick(features, (batch.known_t - start).unsqueeze(1))
    u = host.drawn(batch, torch.arange(gamma, device=device))
    codes, Q = [host.last(batch, 1)[0]], []
    for i in range(gamma):
        if i:
            features = host.features(batch, codes[-1], i, "draft")
        Q.append(host.distributions(batch, features, "draft"))
        codes.append(draw_siblings(Q[-1][:, 0], u[:, i : i + 1]))
    Q.append(torch.zeros_like(Q[0]))  # after the last code nothing is drafted
    return Drafted(_chain_shape(gamma, device), torch.cat(codes, 1), torch.cat(Q, 1))


def _eagle_root(host: VQHost, batch: Batch, height: int) -> Tensor:
    """EAGLE's feature at the root [copies, B, 1, dim]; what was committed since its last round is taken in anew."""
    recent, start = host.last(batch, height + 1)
    steps = torch.arange(height + 1, device=host.device)
    past = host.past_features(batch, start.unsqueeze(1) + steps)
    features = host.features(batch, recent, start, "eagle", past=past)
    return _pick(features, (batch.known_t - start).unsqueeze(1))


@functools.lru_cache(maxsize=64)
def _static_shape(height: int, device: torch.device) -> tuple[tree.Shape, list[Tensor]]:
    """EAGLE-1's tree down to a height, and the nodes of each depth that have children."""
    paths = [(), *((*parent, i) for parent, count in EAGLE_TREE.items() for i in range(count) if len(parent) < height)]
    paths = sorted(paths, key=lambda path: (len(path), path))
    place = {path: i for i, path in enumerate(paths)}
    parent = torch.tensor([-1, *(place[path[:-1]] for path in paths[1:])])
    tallest = len(paths[-1])
    parents = set(parent.tolist())
    widths = [max(EAGLE_TREE.get(p, 0) for p in paths if len(p) == depth) for depth in range(tallest)]
    shape = tree.shape_of(parent.to(device), widths)
    levels = [[place[p] for p in paths if len(p) == depth and place[p] in parents] for depth in range(tallest)]
    return shape, [torch.tensor(level, device=device) for level in levels]


@draft("eagle-static", needs="eagle", highest=1 + max(map(len, EAGLE_TREE)))
def eagle_static(host: VQHost, batch: Batch) -> Drafted:
    """EAGLE-1: always the same tree, siblings drawn without replacement; gamma is its height, at most 5."""
    greedy = batch.sequences[0].request.temperature == 0
    shape, levels = _static_shape(batch.sequences[0].request.gamma, host.device)
    num, size = shape.num_nodes, len(batch)
    codes = torch.full((size, num), -1, dtype=torch.int64, device=host.device)
    codes[:, :1] = host.last(batch, 1)[0]
    u = host.uniform(
        batch, Purpose.CODE, (shape.depth - 1).clamp(min=0), torch.arange(num, device=host.device), fresh=False
    )
    Q = torch.zeros(size, num, host.config.vocab_size, device=host.device)
    features = _eagle_root(host, batch, shape.height)
    known = features.new_zeros(*features.shape[:2], num, features.shape[3])
    for depth, nodes in enumerate(levels):
        if depth:
            past = known[:, :, shape.parent[nodes]]
            sees, at = shape.sees[nodes], shape.depth[nodes]
            features = host.features(
                batch, codes[:, nodes], model="eagle", depth=at, sees=sees, columns=nodes, past=past
            )
        known[:, :, nodes] = features
        Q[:, nodes] = host.distributions(batch, features, "eagle", soft=greedy)
        children = shape.children[nodes, : shape.widths[depth]]  # [n, K]
        if greedy:
            drawn = Q[:, nodes].topk(min(children.shape[1], Q.shape[-1])).indices
            drawn = torch.nn.functional.pad(drawn, (0, children.shape[1] - drawn.shape[-1]), value=-1)
        else:
            drawn = draw_siblings(Q[:, nodes], u[:, children.clamp(min=0)])
        # where there is no child, the root's own code is written to the root
        codes[:, children.clamp(min=0).flatten()] = torch.where(children >= 0, drawn, codes[:, :1, None]).flatten(1)
    return Drafted(shape, codes, None if greedy else Q)


@draft("eagle-dynamic", needs="eagle", highest=8)
def eagle_dynamic(host: VQHost, batch: Batch) -> Drafted:
    """EAGLE-2: the likeliest nodes of every depth are expanded, the likeliest of all are kept; gamma is the height."""
    height, size, device = batch.sequences[0].request.gamma, len(batch), host.device
    branches = min(BRANCHES, host.config.vocab_size)
    rows = torch.arange(size, device=device).unsqueeze(1)
    width = 1 + (height - 1) * branches  # cache columns from the root: it, and what is expanded
    sees = torch.zeros(size, 1, width, dtype=torch.bool, device=device)
    sees[..., 0] = True
    features = _eagle_root(host, batch, height)
    value = torch.zeros(size, 1, dtype=torch.float64, device=device)
    number = torch.zeros(size, 1, dtype=torch.int64, device=device)  # of what is expanded: 0 the root, then candidates
    found: list[tuple[Tensor, Tensor, Tensor]] = []  # codes, log confidence and parents of the candidates, a depth each
    total = 1
    for depth in range(1, height + 1):
        q, codes = host.distributions(batch, features, "eagle", soft=True).topk(branches)  # [B, n, branches]
        value = (value.unsqueeze(-1) + q.double().log().clamp(min=LEAST_LOG)).flatten(1)
        parent = number.unsqueeze(-1).expand_as(codes).flatten(1)
        found.append((codes.flatten(1), value, parent))
        if depth == height:
            break
        value, best = value.topk(branches)
        number, above = total + best, best // branches
        total += codes[0].numel()
        columns = 1 + (depth - 1) * branches + torch.arange(branches, device=device)
        sees = sees[rows, above] | (torch.arange(width, device=device) == columns.unsqueeze(1))
        at = torch.full((branches,), depth, device=device)
        past, codes = _pick(features, above), codes.flatten(1).gather(1, best)
        features = host.features(batch, codes, model="eagle", depth=at, sees=sees, columns=columns, past=past)
    codes, value, parent = (torch.cat(parts, 1) for parts in zip(*found))
    # a child is never likelier than its parent; equals are told apart so that a parent is kept first
    depths = torch.cat([torch.full_like(part[2][0], depth) for depth, part in enumerate(found)])
    kept = (value - 1e-9 * depths).topk(min(NODES, value.shape[1])).indices.sort().values
    parent = torch.searchsorted(kept + 1, parent.gather(1, kept)) + (parent.gather(1, kept) > 0)
    parent = torch.cat([parent.new_full((size, 1), -1), parent], 1)
    codes = torch.cat([host.last(batch, 1)[0], codes.gather(1, kept)], 1)
    return Drafted(tree.shape_of(parent, [branches] * height), codes, None)
