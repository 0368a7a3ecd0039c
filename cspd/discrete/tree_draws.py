"""The random numbers of a round that judges a tree."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cspd.discrete.batch import Batch
from cspd.discrete.host import VQHost
from cspd.discrete.tree import Draws, Shape
from cspd.noise import MAX_INDEX, Purpose, check_indices
from cspd.vq.steps import steps


def draw_tree(host: VQHost, batch: Batch, shape: Shape) -> Draws:
    """The uniform draws of a tree, by one pass of the generator."""
    num, num_places = shape.num_nodes, 1 + shape.height
    purpose, index, fresh = _streams(num, num_places, host.device)
    place = steps(num_places, host.device)
    of_nodes = (shape.depth - 1).clamp(min=0)
    of_places = place.expand(*shape.depth.shape[:-1], -1)
    ahead = torch.cat([of_nodes, of_nodes, of_places], -1)
    codes, nodes, rejected = host.uniform(batch, purpose, ahead, index, fresh).split((num, num, num_places), 1)
    return Draws(codes, nodes, host.drawn(batch, place), rejected)


@functools.lru_cache(maxsize=64)
def _streams(num_nodes: int, num_places: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Purpose and index of each draw of `draw_tree`, and whether it is the round's alone.

    A drafted code is committed in the round that drafts it, or dropped: its draw may be used again.
    """
    purpose = [Purpose.CODE] * num_nodes + [Purpose.CODE_COIN] * num_nodes + [Purpose.CODE_RESIDUAL] * num_places
    index = [*range(num_nodes), *range(num_nodes), *[0] * num_places]
    fresh = [0] * num_nodes + [1] * (num_nodes + num_places)
    check_indices(max(index), MAX_INDEX)
    return tuple(torch.tensor(numbers, device=device) for numbers in (purpose, index, fresh))
