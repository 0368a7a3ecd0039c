"""What a speculative round does after its head call, in one launch: verify, accept, resample.

The formulas, and the names, are those of `cspd.continuous.draft_verify` and of `gaussian.resample`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cspd.kernels.arithmetic import guided
from cspd.kernels.drafting import SCALARS
from cspd.kernels.launching import check_dense, launch

TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


class After(NamedTuple):
    """What `after_head` returns of R chains.

    Attributes:
        left, decided: int64 [R]. rejected, unresolved: bool [R]. state: [R, 4, d]. All as in `draft_verify.Moved`.
        gaussians: [4, R, d], mean and log sigma of p, then of q, of the last step decided.
        log_sigma: [R], log sigma_p summed over channels and the decided steps but step 0.
    """

    left: Tensor
    decided: Tensor
    rejected: Tensor
    unresolved: Tensor
    state: Tensor
    gaussians: Tensor
    log_sigma: Tensor


@triton.jit
def _judged(
    table,
    draws,
    state,
    out,
    inputs,
    last,
    scale,
    chain,
    begin,
    first_draw,
    num_inputs,
    place,
    channel,
    inside,
    WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """The states that a chain drafted at some places of its window, and both Gaussians there; place [n, 1], or [1, 1],
    and channel [1, m].

    Returns:
        (x before the step, eps, v, y, mean_p, log sigma_p, mean_q, log sigma_q, eps_t, log u).
    """
    row = chain * WINDOW + place
    x = tl.load(inputs + row * CHANNELS + channel, inside, 0)
    is_last = place == WINDOW - 1
    y = tl.load(inputs + (row + 1) * CHANNELS + channel, inside & ~is_last, 0)
    y_last = tl.load(last + chain * CHANNELS + channel, inside & is_last, 0)
    y = tl.where(is_last, y_last, y)

    # the head's outputs, with guidance
    output = row * (2 * CHANNELS) + channel
    eps = tl.load(out + output, inside, 0).to(tl.float32)
    v = tl.load(out + output + CHANNELS, inside, 0).to(tl.float32)
    if CLASSES == 2:
        unconditional = tl.load(out + num_inputs * (2 * CHANNELS) + output, inside, 0).to(tl.float32)
        eps = guided(eps, unconditional, tl.load(scale + chain))

    # the Gaussians
    is_place = place < WINDOW
    scalars = table + (begin * WINDOW + place) * (WINDOW + 3 + SCALARS) + WINDOW + 3
    base_q = tl.load(scalars, is_place, 0)
    slope = tl.load(scalars + 1, is_place, 0)
    mean_x = tl.load(scalars + 2, is_place, 0)
    mean_eps = tl.load(scalars + 3, is_place, 0)
    base_p = tl.load(scalars + 4, is_place, 0)
    mean_p = mean_x * x + mean_eps * eps
    log_sigma_p = base_p + slope * v
    anchor_v = tl.load(state + (chain * 4 + 3) * CHANNELS + channel, channel < CHANNELS, 0)
    log_sigma_q = base_q + slope * anchor_v
    draw = (first_draw + tl.maximum(begin - place, 0)) * (CHANNELS + 1)
    eps_t = tl.load(draws + draw + channel, inside, 0)
    mean_q = y - tl.exp(log_sigma_q) * eps_t
    log_uniform = tl.load(draws + draw + CHANNELS, is_place, 0)
    return x, eps, v, y, mean_p, log_sigma_p, mean_q, log_sigma_q, eps_t, log_uniform


@triton.jit(do_not_specialize=["num_inputs"])
def _after_kernel(
    table,
    draws,
    state,
    t,
    entry,
    inputs,
    last,
    out,
    scale,
    left,
    decided,
    rejected,
    unresolved,
    after,
    gaussians,
    log_sigma,
    num_inputs,
    NUM_STEPS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr,
    CLASSES: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
):
    chain = tl.program_id(0).to(tl.int64)
    num_chains = tl.num_programs(0)
    begin = tl.load(t + chain)
    first_draw = tl.load(entry + chain) * NUM_STEPS
    place = tl.arange(0, WINDOW_BLOCK)[:, None]
    channel = tl.arange(0, CHANNEL_BLOCK)[None, :]
    inside = (place < WINDOW) & (channel < CHANNELS)

    # 2. verify, 3. accept: the first place that is not accepted; step 0 is never judged
    _, _, _, y, mean_p, log_sigma_p, _, log_sigma_q, z_q, log_uniform = _judged(
        table,
        draws,
        state,
        out,
        inputs,
        last,
        scale,
        chain,
        begin,
        first_draw,
        num_inputs,
        place,
        channel,
        inside,
        WINDOW,
        CHANNELS,
        CLASSES,
    )
    z_p = (y - mean_p) * tl.exp(-log_sigma_p)
    log_ratio = log_sigma_q - log_sigma_p + 0.5 * ((z_q - z_p) * (z_q + z_p))
    log_ratio = tl.sum(tl.where(inside, log_ratio, 0.0), axis=1)[:, None]
    accepted = (log_uniform < log_ratio) | (place >= begin)
    num_accepted = tl.min(tl.min(tl.where(accepted | (place >= WINDOW), WINDOW, place), axis=1), axis=0).to(tl.int64)
    end = tl.minimum(begin, WINDOW - 1)
    is_rejected = num_accepted <= end
    at = tl.minimum(num_accepted, end)
    is_traced = inside & (place <= at) & (place < begin)
    traced = tl.sum(tl.sum(tl.where(is_traced, log_sigma_p, 0.0), axis=1), axis=0)

    # 4. resample: the last state decided, if it was rejected
    one = tl.zeros([1, 1], tl.int64) + at
    is_channel = channel < CHANNELS
    anchor, eps, v, y, mean_p, log_sigma_p, mean_q, log_sigma_q, _, log_uniform = _judged(
        table,
        draws,
        state,
        out,
        inputs,
        last,
        scale,
        chain,
        begin,
        first_draw,
        num_inputs,
        one,
        channel,
        is_channel,
        WINDOW,
        CHANNELS,
        CLASSES,
    )
    inverse_sigma_q = tl.exp(-log_sigma_q)
    xi = (y - mean_q) * inverse_sigma_q
    axis = (mean_p - mean_q) * tl.exp(-0.5 * (log_sigma_p + log_sigma_q))
    axis = tl.where(is_channel, axis, 0.0)
    square = tl.sum(axis * axis, axis=1)[:, None]
    along = tl.sum(xi * axis, axis=1)[:, None] / tl.maximum(square, TINY)
    mirrored = xi - 2 * (along * axis)
    resampled = mean_p + mirrored * tl.exp(log_sigma_p)
    z_q = (resampled - mean_q) * inverse_sigma_q
    log_ratio = log_sigma_p - log_sigma_q - 0.5 * ((z_q - mirrored) * (z_q + mirrored))
    log_ratio = tl.sum(tl.where(is_channel, log_ratio, 0.0), axis=1)[:, None]
    is_left_open = tl.max(tl.max((log_uniform <= log_ratio).to(tl.int32), axis=1), axis=0) > 0

    # 5. go on from there; where step 0 was decided, p's mean is the token
    left_over = begin - at - 1
    x = tl.where(is_rejected, resampled, y)
    x = tl.where(left_over < 0, mean_p, x)
    tl.store(left + chain, left_over)
    tl.store(decided + chain, at + 1)
    tl.store(rejected + chain, is_rejected)
    tl.store(unresolved + chain, is_rejected & is_left_open)
    tl.store(log_sigma + chain, traced)
    to = after + chain * 4 * CHANNELS + channel
    tl.store(to, x, is_channel)
    tl.store(to + CHANNELS, eps, is_channel)
    tl.store(to + 2 * CHANNELS, anchor, is_channel)
    tl.store(to + 3 * CHANNELS, v, is_channel)
    to = gaussians + chain * CHANNELS + channel
    tl.store(to, mean_p, is_channel)
    tl.store(to + num_chains * CHANNELS, log_sigma_p, is_channel)
    tl.store(to + 2 * num_chains * CHANNELS, mean_q, is_channel)
    tl.store(to + 3 * num_chains * CHANNELS, log_sigma_q, is_channel)


def after_head(
    table: Tensor,
    draws: Tensor,
    state: Tensor,
    t: Tensor,
    entry: Tensor,
    inputs: Tensor,
    last: Tensor,
    out: Tensor,
    scale: Tensor,
) -> After:
    """Steps 2 to 5 of a round of R chains, of the head's outputs.

    Args:
        table, draws, state, t, entry: as given to `before_head`. inputs, last: as it returned them.
        out: the head's (eps, v) [G, filled, 2d]; G = 2 with the null class second. scale: guidance [R], [R, 1, 1].
    """
    check_dense(table=table, draws=draws, state=state, t=t, entry=entry, inputs=inputs, last=last, out=out, scale=scale)
    (num_steps, window, _), (num_chains, _, channels) = table.shape, state.shape
    made = After(
        left=torch.empty_like(t),
        decided=torch.empty_like(t),
        rejected=torch.empty_like(t, dtype=torch.bool),
        unresolved=torch.empty_like(t, dtype=torch.bool),
        state=torch.empty_like(state),
        gaussians=torch.empty_like(state).view(4, num_chains, channels),
        log_sigma=state.new_empty(num_chains),
    )
    launch(
        _after_kernel,
        num_chains,
        table,
        draws,
        state,
        t,
        entry,
        inputs,
        last,
        out,
        scale,
        *made,
        len(inputs),
        NUM_STEPS=num_steps,
        WINDOW=window,
        CHANNELS=channels,
        CLASSES=len(out),
        WINDOW_BLOCK=triton.next_power_of_2(window),
        CHANNEL_BLOCK=triton.next_power_of_2(channels),
    )
    return made
