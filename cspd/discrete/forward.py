"""What a forward of a `VQHost` is made of: the inputs of codes, and a model's layers over inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cspd.discrete.batch import Batch
from cspd.vq.gpt import CacheView


def inputs_of(host: Any, batch: Batch, codes: Tensor, position: Tensor, model: str) -> Tensor:
    """Inputs [R, N, dim], R = B * copies, of codes [B, N] at positions [R, N]: the condition's last where that is 0."""
    owner = "target" if model == "eagle" else model
    of_codes = host.models[owner].tok_embeddings(codes.clamp(min=0).repeat_interleave(batch.copies, 0))
    if batch.kind.least >= codes.shape[1]:  # no input is before the last so many
        return of_codes
    of_condition = host.conditions.last[owner][batch.rows].unsqueeze(1)
    return torch.where(position.unsqueeze(-1) == 0, of_condition, of_codes)


def through_layers(
    host: Any,
    model: str,
    inputs: Tensor,
    position: Tensor,
    mask: Tensor | None,
    view: CacheView,
    past: Tensor | None = None,
) -> Tensor:
    """Features [R, N, dim] after inputs [R, N, dim] at positions [R, N].

    Args:
        mask, view: as `Cache.look` gives them. past: [R, N, dim], to "eagle": the features before the inputs.
    """
    module = host.models[model]
    with host.precision.fast():
        if model == "eagle":
            return module(past, inputs, host.target.table(position), mask, view)
        return module.features(inputs, position, mask, view)
