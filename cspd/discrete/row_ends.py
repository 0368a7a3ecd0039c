"""Rows of codes that end in a token which is no code: it is always there, so that it needs no forward of its own.

The input at position p is the code before p. Where p begins a row these are two inputs, that code and then the row's
end, after which code p is predicted. Both are in one forward: the row's end in the place of the input, and the code as
one input more, behind all others. So methods know of codes alone, as EAGLE's drafter does.

Columns of the cache are in the order of codes and row ends: an input that has as many ancestors in its forward as there
are inputs before it goes where it is to stay, the others (siblings) beyond, two columns for each. What is no second
input writes to the last column, which nobody looks at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cspd.discrete.batch import Batch, of_copies
from cspd.discrete.cache import MOST_NODES, stepped
from cspd.discrete.forward import inputs_of, through_layers
from cspd.vq.steps import steps


def _reserved(side: int) -> int:
    """Columns that a forward's inputs may stay in; those beyond are for the others."""
    return MOST_NODES + MOST_NODES // side + 1


def _columns(host: Any, batch: Batch, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of inputs at positions [R, N]: the column, int64, which is also their place in the sequence that the layers
    know; whether each is a row's end, bool; and the first column of siblings, int64 [R, 1], if the first is the root.
    """
    side = host.config.grid
    own = host.conditions.before[batch.rows].unsqueeze(1) + position + position // side
    is_end = (position % side == 0) & (position > 0)
    return own, is_end, own[:, :1] + _reserved(side)


def features(
    host: Any,
    batch: Batch,
    model: str,
    codes: Tensor,
    start: Tensor,
    most: int,
    depth: Tensor,
    seen: Tensor | None,
) -> Tensor:
    """Features [R, N, dim] after codes [B, N], R = B * copies, as `VQHost.features`.

    Args:
        start: int64 [R]; most: what it is at most, on the host. depth: int64 [N] or [R, N]. seen: `seen_of`
            bool [N, N] or [R, N, N]; None where each input looks at those before it.
    """
    side, count, rows = host.config.grid, codes.shape[1], len(start)
    node = steps(count, start.device)
    position = start.unsqueeze(1) + depth
    own, is_end, beyond = _columns(host, batch, position)
    last_column = host.cache(model).tensor.shape[4] - 1

    # of each input its column, and that of the code before it where it is a row's end
    stays = depth == node
    sibling = beyond + 2 * node
    column = torch.where(stays, own, sibling)
    second = torch.where(is_end, torch.where(stays, own - 1, sibling + 1), last_column)

    # which inputs are two: of a chain as many at most as there are beginnings of rows
    most_ends = count if seen is not None else 1 + (count - 1) // side
    of = is_end.int().topk(most_ends, dim=1).indices
    column = torch.cat([column, second.gather(1, of)], 1)
    place = torch.cat([own, own.gather(1, of) - 1], 1)

    # inputs
    of_codes = inputs_of(host, batch, codes, position, model)
    end = host.models[model].cls_embedding.weight[host.config.row_end].to(of_codes.dtype)
    inputs = torch.where(is_end.unsqueeze(-1), end, of_codes)
    doubled = of_codes.gather(1, of.unsqueeze(-1).expand(-1, -1, of_codes.shape[-1]))
    inputs = torch.cat([inputs, doubled], 1)

    # who looks at whom, and all at everything before the root
    sees = (node <= node.unsqueeze(1)) if seen is None else seen[..., 1:-1]
    sees = sees.expand(rows, -1, -1)
    sees = torch.cat([sees, sees.gather(1, of.unsqueeze(-1).expand(-1, -1, count))], 1)  # as the input it belongs to
    is_two = is_end.gather(1, of)
    at_seconds = sees.gather(2, of.unsqueeze(1).expand(-1, count + most_ends, -1)) & is_two.unsqueeze(1)
    not_itself = (node != of.unsqueeze(-1)) | ~is_two.unsqueeze(-1)  # the row's end comes after its code
    at_inputs = torch.cat([sees[:, :count], sees[:, count:] & not_itself], 1)
    before = steps(last_column + 1, start.device) < own[:, :1] - is_end[:, :1].long()
    mask = before.unsqueeze(1).repeat(1, count + most_ends, 1)
    mask.scatter_(2, column.unsqueeze(1).expand(-1, count + most_ends, -1), torch.cat([at_inputs, at_seconds], 2))

    # columns that are looked at
    width = host.config.prefix_length + most + most // side + count + count // side + 1
    if seen is not None:
        width += _reserved(side) + 2 * count
    width = min(stepped(width), last_column + 1)
    view = host.cache(model).view(batch.rows, column, width)
    made = through_layers(host, model, inputs, place, mask[..., :width].unsqueeze(1), view)
    return made[:, :count]


def compact(host: Any, batch: Batch, path: Tensor) -> None:
    """As `VQHost.compact`: the inputs of nodes path[:, i] go where the i-th after the root is to stay."""
    level = steps(path.shape[1], path.device)
    node = of_copies(batch, path)
    own, is_end, beyond = _columns(host, batch, batch.known_rows.unsqueeze(1) + level)
    stays, sibling = node == level, beyond + 2 * node
    cache = host.cache("target")
    source = [torch.where(stays, own, sibling), torch.where(stays, own - 1, sibling + 1)]
    target = [own, torch.where(is_end, own - 1, cache.tensor.shape[4] - 1)]
    cache.move(batch.rows, torch.cat(source, 1), torch.cat(target, 1))
