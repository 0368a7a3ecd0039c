"""What several kernels compute: guidance, Gaussians, rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def guided(conditional, unconditional, scale):
    """As torch.lerp rounds it: from the side that is nearer."""
    difference = conditional - unconditional
    return tl.where(tl.abs(scale) < 0.5, unconditional + scale * difference, conditional - difference * (1 - scale))


@triton.jit
def ancestral_state(x, eps, v, noise, mean_x, mean_eps, slope):
    """The state after a step of the ancestral chain: `noise` is sigma eps_t without what v adds to log sigma."""
    return x * mean_x + eps * mean_eps + tl.exp(v * slope) * noise
