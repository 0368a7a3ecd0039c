"""What follows a head call in a chain, one launch each: the ancestral step, and a window of the calibrated sampler."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cspd.kernels.arithmetic import ancestral_state, guided
from cspd.kernels.launching import check_dense, launch

BLOCK = 128


@triton.jit(do_not_specialize=["num", "channels"])
def _ancestral_kernel(
    x, out, noise, scale, after, mean_x, mean_eps, slope, num, channels, CLASSES: tl.constexpr, BLOCK: tl.constexpr
):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < num
    row = lane // channels
    place = lane + row * channels  # of eps in out, whose rows have v after it
    eps = tl.load(out + place, inside, 0).to(tl.float32)
    v = tl.load(out + place + channels, inside, 0).to(tl.float32)
    if CLASSES == 2:
        unconditional = tl.load(out + 2 * num + place, inside, 0).to(tl.float32)
        eps = guided(eps, unconditional, tl.load(scale + row, inside, 0))
    state = tl.load(x + lane, inside, 0)
    own_noise = tl.load(noise + lane, inside, 0)
    tl.store(after + lane, ancestral_state(state, eps, v, own_noise, mean_x, mean_eps, slope), inside)


def ancestral_step(
    x: Tensor, out: Tensor, noise: Tensor, scale: Tensor, mean_x: float, mean_eps: float, slope: float
) -> Tensor:
    """The state [R, d] after a step: mean_x x + mean_eps eps + exp(slope v) noise, eps with guidance.

    Args:
        x: [R, d] float32. out: the head's (eps, v) [G, R, 2d], of any precision; G = 2 with the null class second.
        noise: sigma_t eps_t [R, d] but for the part of v. scale: s of each row [R, 1].
    """
    x, out, noise, scale = (tensor.contiguous() for tensor in (x, out, noise, scale))
    after = x.new_empty(x.shape)
    arguments = (x, out, noise, scale, after, float(mean_x), float(mean_eps), float(slope), x.numel(), x.shape[1])
    launch(_ancestral_kernel, triton.cdiv(x.numel(), BLOCK), *arguments, CLASSES=len(out), BLOCK=BLOCK)
    return after


@triton.jit(do_not_specialize=["num", "channels", "num_steps"])
def _window_kernel(
    x,
    out,
    noise,
    scale,
    temperature,
    difference,
    base,
    slope,
    mix,
    after,
    num,
    channels,
    num_steps,
    CLASSES: tl.constexpr,
    HAS_DIFFERENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < num
    row = lane // channels
    place = lane + row * channels
    eps = tl.load(out + place, inside, 0).to(tl.float32)
    v = tl.load(out + place + channels, inside, 0).to(tl.float32)

    # guidance: what it adds is kept for the calls that leave out the null class
    if CLASSES == 2:
        unconditional = tl.load(out + 2 * num + place, inside, 0).to(tl.float32)
        added = (tl.load(scale + row, inside, 0) - 1) * (eps - unconditional)
        tl.store(difference + lane, added, inside)
        eps += added
    elif HAS_DIFFERENCE:
        eps += tl.load(difference + lane, inside, 0)

    # the state: a weighted sum of x_a, eps_a and the noise of each step
    state = tl.load(mix) * tl.load(x + lane, inside, 0) + tl.load(mix + 1) * eps
    tau = tl.load(temperature + row, inside, 0)
    for k in range(0, num_steps):
        sigma = tl.exp(tl.load(base + k) + tl.load(slope + k) * v) * tau
        state += tl.load(mix + 2 + k) * (sigma * tl.load(noise + k * num + lane, inside, 0))
    tl.store(after + lane, state, inside)


def window_step(
    x: Tensor,
    out: Tensor,
    noise: Tensor,
    scale: Tensor,
    temperature: Tensor,
    difference: Tensor | None,
    base: Tensor,
    slope: Tensor,
    mix: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """The state [R, d] after a window of n steps of the calibrated sampler, and what guidance adds from now on [R, d].

    Args:
        x: [R, d] float32. out: the head's (eps, v) [G, R, 2d]; G = 2 with the null class second. noise: [n, R, d].
        scale, temperature: of each row [R, 1]. difference: what guidance added last, [R, d]; None without guidance.
        base, slope: of the window's steps, [n, 1, 1]. mix: the state's weights [2 + n] on x, eps and the noise.
    """
    x, out, noise, scale, temperature = (tensor.contiguous() for tensor in (x, out, noise, scale, temperature))
    check_dense(base=base, slope=slope, mix=mix)
    if len(out) == 2:
        difference = x.new_empty(x.shape)
    after = x.new_empty(x.shape)
    launch(
        _window_kernel,
        triton.cdiv(x.numel(), BLOCK),
        x,
        out,
        noise,
        scale,
        temperature,
        difference,
        base,
        slope,
        mix,
        after,
        x.numel(),
        x.shape[1],
        len(noise),
        CLASSES=len(out),
        HAS_DIFFERENCE=difference is not None,
        BLOCK=BLOCK,
    )
    return after, difference
