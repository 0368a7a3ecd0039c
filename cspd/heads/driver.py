"""Faster ways to run chains: Triton kernels, and programs of torch.compile. Here it is decided where they run.

PyTorch's operations, which stand in the samplers and in `cspd.heads.verify`, are the reference: these compute the same
up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cspd import kernels
from cspd.graphs import compiled
from cspd.heads.net import Prediction, guided
from mar.head import Head, ReadyHead

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
    if len(out.raw) > 2:  # three branches have no kernel
        return None
    return ancestral_step_kernel(x, out.raw, noise, out.scale, mean_x, mean_eps, slope)


def segment(
    x: Tensor, out: Prediction, noise: Tensor, temperature: Tensor, difference: Tensor | None, *columns: Tensor
) -> tuple[Tensor, Tensor | None] | None:
    """`calibrated.skip` in one launch.

    Args:
        x: [R, d]. noise: [n, R, d], of the segment's n steps. temperature: [R, 1]. difference: [R, d], see there.
        columns: the segment's base and slope [n, 1, 1], and the last row [2 + n] of its mix.
    """
    if not kernels.available(x.device) or len(out.raw) > 2:
        return None
    from cspd.kernels.head import segment_step

    return segment_step(x, out.raw, noise, out.scale, temperature, difference, *columns)


Pass = Callable[..., Any]


def passes(plain: Pass, by_kernels: Pass, head: Head, device: torch.device, is_compiled: bool) -> Pass:
    """The version of `verify.move` for a head on a device: compiled, by kernels (of MAR's head only), or plain."""
    if is_compiled:
        return compiled(plain, "speculative passes")
    return by_kernels if isinstance(head, Head) and kernels.available(device) else plain


# Several steps of the full chain in one program.

# Each call of a compiled function takes the time of a step or so: a function of one step would be slower than eager
# PyTorch. Compiling takes longer the more steps it has.
COMPILED_STEPS = 5


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
    for i in range(len(numbers)):
        mean_x, mean_eps, slope = numbers[i].unbind()
        out = ready.denoise(x, [tuple(part[i] for part in layer) for layer in split])
        eps, v = guided(out, scale)
        x = torch.addcmul(x * mean_x + eps * mean_eps, torch.exp(v * slope), added[i])
    return x


def compiled_steps() -> Callable[..., Tensor]:
    """`several_steps` by torch.compile."""
    return compiled(several_steps, "denoising steps")
