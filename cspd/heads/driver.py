"""Faster ways to run chains: Triton kernels, and programs of torch.compile. Here it is decided where they run.

PyTorch's operations, which stand in the samplers and in `cspd.heads.verify`, are the reference: these compute the same
up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cspd import kernels
from cspd.device import on_device
from cspd.graphs import compiled
from cspd.heads.net import Prediction, guided
from mar.head import Head, ReadyHead, filled

if TYPE_CHECKING:
    from cspd.heads.chain import Chain

# Kernels in place of a chain's operations; None where there is no kernel.


def step(x: Tensor, out: Prediction, noise: Tensor, mean_x: float, mean_eps: float, slope: float) -> Tensor | None:
    """`Chain.move` in one launch, with the head's last layer if the head was not evaluated yet.

    Args:
        x: [R, d]. noise: tau sigma_t eps_t [R, d]. mean_x, mean_eps, slope: of the step.
    """
    if not kernels.available(x.device):
        return None
    from cspd.kernels.head import ancestral_step, ancestral_step_kernel

    if out.pending is not None and isinstance(out.pending[0], ReadyHead):
        ready, x, modulations = out.pending
        return ancestral_step(ready.head, x, modulations, noise, out.scale, mean_x, mean_eps, slope)
    if len(out.raw) > 2:  # guidance of two branches
        return None
    return ancestral_step_kernel(x, out.raw, noise, out.scale, mean_x, mean_eps, slope)


def segment(
    x: Tensor, out: Prediction, noise: Tensor, temperature: Tensor, difference: Tensor | None, *columns: Tensor
) -> tuple[Tensor, Tensor | None] | None:
    """`calibrated.skip` in one launch; columns: the segment's base, slope and last row of mix."""
    if not kernels.available(x.device) or len(out.raw) > 2:
        return None
    from cspd.kernels.head import segment_step

    return segment_step(x, out.raw, noise, out.scale, temperature, difference, *columns)


def passes(move: Callable[..., Any], head: Head, device: torch.device, is_compiled: bool) -> Callable[..., Any]:
    """The version of `verify.move` for a head on a device; only MAR's has kernels."""
    if is_compiled:
        return compiled(move, "speculative passes")
    return move_by_kernels if isinstance(head, Head) and kernels.available(device) else move


def move_by_kernels(
    head: Head,
    lookup: Any,
    draws: Tensor,
    modulations: Any,
    end_indices: Tensor,
    row_starts: Tensor,
    scale: Tensor,
    state: Tensor,
    left: Tensor,
    phase: Tensor,
    trace_sigma: bool = False,
) -> Any:
    """`verify.move` with one launch before the head call and one after it; log sigma_p is always summed."""
    from cspd.heads.verify import Moved
    from cspd.kernels.head import denoise
    from cspd.kernels.speculative import after_head, before_head

    left, phase = left.contiguous(), phase.contiguous()  # in the first pass they are columns of the slots' progress
    given = lookup.draft, draws, end_indices, state, left, phase
    inputs, last, at = before_head(*given, filled(end_indices.numel()))
    layers, at = modulations.in_place(head, at)
    out = denoise(head, inputs, head.split(layers), at)
    return Moved(*after_head(*given, inputs, last, out, scale))


# The full chain by torch.compile.

# Each call of a compiled function takes the time of a step or so: a function of one step would be slower than eager
# PyTorch. Compiling takes longer the more steps it has.
COMPILED_STEPS = 5


def compiled_ancestral(chain: Chain, first_timestep: int | None = None) -> Tensor:
    """`ancestral` with `COMPILED_STEPS` steps at a time by torch.compile; the first step and the last few are eager."""
    if first_timestep is not None:
        chain = chain.respaced(chain.head.schedule(len(chain), first_timestep))
    head, precision, (z, scale, temperature, *_) = chain.head, chain.precision, chain.inputs
    constants, x = chain.constants, chain.start()
    added = chain.eps * (constants.sigma * temperature)
    with precision.full():
        c_embed = head.cond_embed(z)
        t_embed = head.time_embed(on_device(constants.timesteps, z.device))[:, None, None]
        x = several_steps(head, x, head.modulations(t_embed[:1], c_embed), added[:1], scale, constants.numbers[:1])
    own_head, run = precision.prepare(head), compiled(several_steps, "denoising steps")
    for first in range(1, len(added), COMPILED_STEPS):
        own = slice(first, first + COMPILED_STEPS)
        if own.stop > len(added):  # another number of steps would be another program
            run = several_steps
        layers = own_head.modulations(t_embed[own], c_embed)
        x = run(own_head, x, layers, added[own], scale, constants.numbers[own])
    chain.tally.calls += len(chain)
    chain.tally.evaluations += len(chain) * len(z)
    return x


def several_steps(
    head: Head, x: Tensor, layers: Sequence[Tensor], added: Tensor, scale: Tensor, numbers: Tensor
) -> Tensor:
    """The state [R, d] after n steps from x [R, d].

    Args:
        layers: the head's modulations at these steps [n, G, R, ..]. added: tau sigma_t eps_t [n, R, d].
        numbers: [n, 3], see `cspd.heads.chain.Steps`.
    """
    ready = head.ready()
    split = head.split(layers)
    for step in range(len(numbers)):
        mean_x, mean_eps, slope = numbers[step].unbind()
        out = ready.denoise(x, [tuple(part[step] for part in layer) for layer in split])
        eps, v = guided(out, scale)
        x = torch.addcmul(x * mean_x + eps * mean_eps, torch.exp(v * slope), added[step])
    return x
