"""What computes a round of chains: `draft_verify.move` as it is, compiled, or Triton kernels that do the same."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from cspd import kernels
from cspd.continuous.draft_verify import Lookup, Moved, move
from cspd.continuous.slots import Embeddings, Table
from cspd.telling import telling
from mar.head import Head, filled


def move_on(device: torch.device, compiled: bool) -> Callable[..., Moved]:
    """What has the arguments and results of `move`, for a device."""
    if compiled:
        return compiled_move()
    return move_by_kernels if kernels.available(device) else move


@functools.cache
def compiled_move() -> Callable[..., Moved]:
    """`move` by torch.compile, for any number of chains: half a minute on first use, then fewer and larger kernels."""
    compiled, calls = torch.compile(move, dynamic=True), itertools.count()

    def told(*args: object, **more: object) -> Moved:
        with telling("compiling speculative rounds, about half a minute") if next(calls) == 0 else nullcontext():
            return compiled(*args, **more)

    return told


def move_by_kernels(
    head: Head,
    lookup: Lookup,
    draws: Tensor,
    modulations: Table | Embeddings,
    windows: Tensor,
    begin: Tensor,
    scale: Tensor,
    state: Tensor,
    left: Tensor,
    waiting: Tensor,
    trace_sigma: bool = False,
) -> Moved:
    """`move` with a launch before the head call and one after it; log sigma_p is summed always.

    A table of modulations is read where it is, not gathered.
    """
    from cspd.kernels.drafting import before_head
    from cspd.kernels.head import denoise
    from cspd.kernels.judging import after_head

    left, waiting = left.contiguous(), waiting.contiguous()  # columns of the slots' progress at first
    given = lookup.draft, draws, windows, state, left, waiting
    inputs, last, at = before_head(*given, filled(windows.numel()))
    if isinstance(modulations, Table):
        layers = [layer.flatten(1, 2) for layer in modulations.layers()]
        out = denoise(head, inputs, head.split(layers), at)
    else:
        out = denoise(head, inputs, head.split(modulations.layers_at(head, at)))
    return Moved(*after_head(*given, inputs, last, out, scale))
