"""Jacobi windows: their shape, a comb; what is in them, and what becomes of it; the random numbers of a round."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cspd.discrete.batch import Batch
from cspd.discrete.cache import MOST_NODES
from cspd.discrete.host import VQHost
from cspd.discrete.tree import Shape
from cspd.noise import MAX_INDEX, Purpose, check_indices
from cspd.vq.steps import steps


@dataclass(frozen=True)
class Comb:
    """The nodes of a window: the root, the first path, then the siblings.

    Attributes:
        path: F, codes on the first path. depth: D, how many of them have siblings.
        siblings: int64 [D, K - 1], their nodes.
        shape: as a tree.
        streams: purpose, places ahead and index of a round's uniform draws, int64 [n] each, in the order of `Draws`;
            counts: how many are of each kind.
    """

    path: int
    depth: int
    siblings: Tensor
    shape: Shape
    streams: tuple[Tensor, Tensor, Tensor]
    counts: list[int]


@functools.lru_cache(maxsize=32)
def comb_of(window: int, pd_k: int, pd_d: int, device: torch.device) -> Comb:
    """The comb of `window` drafted nodes, K = pd_k of them at each of the first D = pd_d levels."""
    beside = pd_k - 1
    depth = pd_d if beside else 0
    path = window - beside * depth
    index = torch.arange(depth * beside, device=device)
    siblings = path + 1 + index.view(depth, beside)

    # the root, the first path one after the other, and siblings, which share their parent with the path
    parents = [-1, *range(path)]
    for level in range(depth):
        parents += [level] * beside
    shape = Shape(torch.tensor(parents, device=device), path, [path] + [depth] * (beside if depth else 0))
    return Comb(path, depth, siblings, shape, *_streams(path, siblings))


def _streams(path: int, siblings: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], list[int]]:
    """`streams` and `counts` of a comb."""
    depth, beside = siblings.shape
    device = siblings.device
    check_indices(path + depth * beside, MAX_INDEX)  # of the last node
    # up to F + 1 codes are committed, and the window behind them has F more
    ahead = torch.arange(2 * path + 1, device=device)
    first = torch.zeros_like(ahead)
    level = torch.arange(depth, device=device).repeat_interleave(beside)
    of_path = torch.arange(path, device=device)
    of_siblings = siblings.flatten()
    kinds = [
        (Purpose.CODE, ahead, first),
        (Purpose.CODE_RESIDUAL, ahead, first),
        (Purpose.CODE, level, of_siblings),
        (Purpose.CODE_COIN, of_path, of_path + 1),
        (Purpose.CODE_COIN, level, of_siblings),
    ]
    counts = [len(index) for _, _, index in kinds]
    purpose = torch.tensor([kind for kind, _, _ in kinds], device=device)
    purpose = purpose.repeat_interleave(torch.tensor(counts, device=device))
    places = torch.cat([place for _, place, _ in kinds])
    index = torch.cat([index for _, _, index in kinds])
    return (purpose, places, index), counts


class Window(NamedTuple):
    """What is drafted: codes int64 [B, F] of the first path, their distributions Q [B, F, V], and siblings int64
    [B, D, K - 1], -1 where there is none.
    """

    codes: Tensor
    Q: Tensor
    siblings: Tensor


class Verdict(NamedTuple):
    """What became of a window.

    Attributes:
        prefix: int64 [B], codes of the first path that are accepted. sibling: int64 [B], the code accepted after them
            from beside the path, -1: none. accepted: int64 [B], how many that makes.
        node: int64 [B], the last accepted one. rest: [B, V], the distribution of the code after it.
        judged: bool [B, F], whether the rule judged a place. bound: [B], the sum of its local bounds.
    """

    prefix: Tensor
    sibling: Tensor
    accepted: Tensor
    node: Tensor
    rest: Tensor
    judged: Tensor
    bound: Tensor


def kept_windows(host: VQHost, path: int) -> tuple[Tensor, Tensor]:
    """Codes int64 [slots, F] and Q [slots, F, V] that windows keep from round to round.

    They are parts of the largest window's, made on first use, which stay: graphs read them where they are.
    """
    if host.windows is None:
        size = host.num_slots, MOST_NODES - 1
        codes = torch.zeros(size, dtype=torch.int64, device=host.device)
        host.windows = codes, torch.zeros(*size, host.config.vocab_size, device=host.device)
    codes, Q = host.windows
    return codes[:, :path], Q[:, :path]


class Draws(NamedTuple):
    """A round's random numbers: uniform draws, if nothing else is said.

    Attributes:
        codes: [B, 2F + 1], of the code so many places ahead of the committed ones, drawn or drawn again.
        fill: int64 [B, 2F + 1], a code at random for each of these places.
        siblings: [B, D, K - 1], of their codes.
        path, beside: [B, F] and [B, D, K - 1], by which codes of the path, and siblings, are accepted.
    """

    codes: Tensor
    fill: Tensor
    siblings: Tensor
    path: Tensor
    beside: Tensor


def draw(host: VQHost, batch: Batch, comb: Comb) -> Draws:
    """The random numbers of a round, by one pass of the generator."""
    draws = host.uniform(batch, *comb.streams)
    codes, fill, siblings, path, beside = draws.split(comb.counts, 1)
    fill = (fill * host.config.vocab_size).long()
    siblings, beside = (u.unflatten(1, comb.siblings.shape) for u in (siblings, beside))
    return Draws(codes, fill, siblings, path, beside)


def slide(host: VQHost, batch: Batch, codes: Tensor, P: Tensor, accepted: Tensor, draws: Draws) -> None:
    """Moves every window behind its committed codes: `codes` [B, F] and their P move up, random codes follow."""
    path, vocabulary = codes.shape[1], P.shape[-1]
    kept_codes, kept_Q = kept_windows(host, path)
    first = accepted.unsqueeze(1) + 1
    place = first + steps(path, host.device)  # in the old window
    following = torch.cat([codes, draws.fill[:, path:]], 1)
    kept_codes[batch.slot] = following.gather(1, place)

    source = place.clamp(max=path - 1).unsqueeze(-1)
    Q = P.gather(1, source.expand(-1, -1, vocabulary))
    inside = (place < path).unsqueeze(-1)
    kept_Q[batch.slot] = torch.where(inside, Q, 1 / vocabulary)
