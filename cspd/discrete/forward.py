"""A forward of a `VQHost`: the inputs of codes, and a model's layers over inputs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from cspd.discrete.batch import Batch
from cspd.telling import telling
from cspd.vq.gpt import CacheView
from cspd.vq.steps import steps

PROGRAMS = 64  # at most: a model's layers for one input or several, with a mask or without, for the null class or not


def forward(
    host: Any,
    batch: Batch,
    model: str,
    codes: Tensor,
    start: Tensor,
    most: int,
    together: bool,
    depth: Tensor,
    seen: Tensor | None,
    columns: Tensor | None,
    past: Tensor | None,
) -> Tensor:
    """Features [R, N, dim] after codes [B, N], R = B * copies, as `VQHost.features`.

    Args:
        start: int64 [R]; most: what it is at most, on the host; together: whether all are just that. depth: int64 [N]
            or [R, N]. seen: bool [N, M + 2] or [R, N, M + 2]. past: [R, N, dim].
    """
    first, most = host.conditions.columns(batch, start), most + host.config.prefix_length - 1
    position = (start.unsqueeze(1) + depth).clamp(max=host.config.block_size)
    view, mask = host.cache(model).look(batch.rows, first, most, together, codes.shape[1], seen, columns)
    inputs = inputs_of(host, batch, codes, position, model)
    places = host.conditions.places(batch, host.models[model].config, position)
    return through_layers(host, model, inputs, places, mask, view, past)


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
    layers = compiled_layers() if host.compiled else _layers
    with host.precision.fast():
        return layers(module, inputs, module.table(position), mask, view, past)


def _layers(
    module: Any, inputs: Tensor, table: Tensor, mask: Tensor | None, view: CacheView, past: Tensor | None
) -> Tensor:
    if past is not None:
        return module(past, inputs, table, mask, view)
    return module.through(inputs, table, mask, view)


@functools.cache
def compiled_layers() -> Callable[..., Tensor]:
    """`_layers` by torch.compile, for any number of rows and inputs: half a minute on first use, then fewer kernels."""
    compiled, calls = torch.compile(_layers, dynamic=True), itertools.count()

    def told(module: Any, inputs: Tensor, table: Tensor, mask: Tensor | None, view: CacheView, *more: Any) -> Tensor:
        message = "compiling the models' layers, about half a minute"
        with torch._dynamo.config.patch(recompile_limit=PROGRAMS):
            with telling(message) if next(calls) == 0 else nullcontext():
                return compiled(module, inputs, table, mask, _plain(view), *more)

    return told


def _plain(view: CacheView) -> CacheView:
    """The same view without slices, for which there would be a program each."""
    keys, values, rows, columns = view.keys, view.values, view.rows, view.columns
    if isinstance(rows, slice):
        keys, values = ([of_layer[rows] for of_layer in kept] for kept in (keys, values))
        rows = slice(None)
    if isinstance(columns, slice):
        columns = steps(columns.stop, keys[0].device)[columns]
    return dataclasses.replace(view, keys=keys, values=values, rows=rows, columns=columns)
