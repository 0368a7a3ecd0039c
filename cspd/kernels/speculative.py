"""Triton kernels before and after the head call in a pass of speculative denoising."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cspd.kernels.head import check_dense, guided, launch

# Before the head call, in one launch: look-up and draft, as in `cspd.heads.verify`.

STATE_ROWS = tl.constexpr(8)  # x_t, eps', x', v', and of the last step decided means and log sigmas of p and q
SCALARS = tl.constexpr(5)  # columns of a draft table after those of `mix`: base_q, slope, mean_x, mean_eps, base_p
MOVING = tl.constexpr(0)  # phases of a chain, as in `cspd.heads.verify`
UNRESOLVED = tl.constexpr(2**20)


@triton.jit
def begin_of(chain, given, WINDOW: tl.constexpr):
    """(the step t of a chain, -1 if it stands still; the index of its step 0 in the flat list of all slots' steps).

    Args:
        given: (table, draws, end_indices, state, left, phase), see `before_head`.
    """
    _, _, end_indices, _, left, phase = given
    steps = tl.load(left + chain)
    moving = tl.load(phase + chain) == MOVING
    return tl.where(moving, steps, 0) - 1, tl.load(end_indices + chain * WINDOW) + 1


@triton.jit(do_not_specialize=["num_rows"])
def _before_kernel(
    inputs,
    last,
    at,
    given,
    num_rows,
    WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
):
    table, draws, _, state, _, _ = given
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNEL_BLOCK)
    is_channel = channel < CHANNELS
    if row >= num_rows:  # padding
        tl.store(inputs + row * CHANNELS + channel, tl.zeros([CHANNEL_BLOCK], tl.float32), is_channel)
        tl.store(at + row, 0)
    else:
        chain, index = row // WINDOW, row % WINDOW
        begin, step_0 = begin_of(chain, given, WINDOW)
        tl.store(at + row, step_0 + tl.maximum(begin - index, 0))

        # the noise of each step of the window, sigma_q eps_t
        j = tl.arange(0, WINDOW_BLOCK)
        is_step = j < WINDOW
        scalars = table + ((begin + 1) * WINDOW + j) * (WINDOW + 3 + SCALARS) + WINDOW + 3
        base_q = tl.load(scalars, is_step, 0)
        slope = tl.load(scalars + 1, is_step, 0)
        own = state + chain * STATE_ROWS * CHANNELS + channel
        v = tl.load(own + 3 * CHANNELS, is_channel, 0)
        draw = (step_0 + tl.maximum(begin - j, 0)) * (CHANNELS + 1)
        both = is_step[:, None] & is_channel[None, :]
        eps_t = tl.load(draws + draw[:, None] + channel[None, :], both, 0)
        noise = tl.exp(base_q[:, None] + slope[:, None] * v[None, :]) * eps_t

        # 1. draft: y is a weighted sum of x_t, eps', x' and the noise
        mix = table + ((begin + 1) * WINDOW + index) * (WINDOW + 3 + SCALARS)
        x = tl.load(own, is_channel, 0)
        y = tl.load(mix) * x
        y += tl.load(mix + 1) * tl.load(own + CHANNELS, is_channel, 0)
        y += tl.load(mix + 2) * tl.load(own + 2 * CHANNELS, is_channel, 0)
        y += tl.sum(tl.load(mix + 3 + j, is_step, 0)[:, None] * noise, axis=0)
        if index == 0:
            tl.store(inputs + row * CHANNELS + channel, x, is_channel)
        if index == WINDOW - 1:
            tl.store(last + chain * CHANNELS + channel, y, is_channel)
        else:
            tl.store(inputs + (row + 1) * CHANNELS + channel, y, is_channel)


def before_head(
    table: Tensor, draws: Tensor, end_indices: Tensor, state: Tensor, left: Tensor, phase: Tensor, filled: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Look-up and draft of R chains: the inputs of the head call.

    Args:
        table: `Lookup.draft`, float32 [T + 1, W, 3 + W + 5], by the steps left.
        draws: [C, T, d + 1], eps_t and the log of a uniform draw for the steps of C slots.
        end_indices: int64 [R, W], indices of a window in the flat list of these steps if no step were left.
        state: [R, 8, d], x_t and the anchor's eps', x' and v' first. left, phase: int64 [R], as in
            `cspd.heads.verify.Moved`.
        filled: rows of the head call, R W or more; the rows after R W are zeros.

    Returns:
        (inputs [filled, d]: x_t, y_1 .. y_{W-1} of every chain; y_W [R, d]; int64 [filled], the index of each input's
        step in that list, which is its row in tables of modulations).
    """
    check_dense(table=table, draws=draws, end_indices=end_indices, state=state, left=left, phase=phase)
    (_, window, _), (num_chains, _, channels) = table.shape, state.shape
    inputs = state.new_empty(filled, channels)
    last = state.new_empty(num_chains, channels)
    at = left.new_empty(filled)
    launch(
        _before_kernel,
        filled,
        inputs,
        last,
        at,
        (table, draws, end_indices, state, left, phase),
        num_chains * window,
        WINDOW=window,
        CHANNELS=channels,
        WINDOW_BLOCK=triton.next_power_of_2(window),
        CHANNEL_BLOCK=triton.next_power_of_2(channels),
        num_warps=1 if channels <= 16 else 4,
    )
    return inputs, last, at


# After the head call, in one launch: verify, accept, resample. Formulas and names are those of `cspd.heads.verify`.

TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _verified(
    given,
    chain,
    begin,
    step_0,
    num_inputs,
    index,
    channel,
    inside,
    WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr,
    BRANCHES: tl.constexpr,
):
    """The states drafted at indices [n, 1] of a chain's window, and both Gaussians there, for channels [1, m].

    Returns:
        (x before the step, eps, v, y, mean_p, log sigma_p, mean_q, log sigma_q, eps_t, log u).
    """
    table, draws, state, out, inputs, last, scale = given
    row = chain * WINDOW + index
    x = tl.load(inputs + row * CHANNELS + channel, inside, 0)
    is_last = index == WINDOW - 1
    y = tl.load(inputs + (row + 1) * CHANNELS + channel, inside & ~is_last, 0)
    y_last = tl.load(last + chain * CHANNELS + channel, inside & is_last, 0)
    y = tl.where(is_last, y_last, y)

    # the head's outputs, with guidance
    output = row * (2 * CHANNELS) + channel
    eps = tl.load(out + output, inside, 0).to(tl.float32)
    v = tl.load(out + output + CHANNELS, inside, 0).to(tl.float32)
    if BRANCHES == 2:
        unconditional = tl.load(out + num_inputs * (2 * CHANNELS) + output, inside, 0).to(tl.float32)
        eps = guided(eps, unconditional, tl.load(scale + chain))

    # the Gaussians
    is_index = index < WINDOW
    scalars = table + ((begin + 1) * WINDOW + index) * (WINDOW + 3 + SCALARS) + WINDOW + 3
    base_q = tl.load(scalars, is_index, 0)
    slope = tl.load(scalars + 1, is_index, 0)
    mean_x = tl.load(scalars + 2, is_index, 0)
    mean_eps = tl.load(scalars + 3, is_index, 0)
    base_p = tl.load(scalars + 4, is_index, 0)
    mean_p = mean_x * x + mean_eps * eps
    log_sigma_p = base_p + slope * v
    anchor_v = tl.load(state + (chain * STATE_ROWS + 3) * CHANNELS + channel, channel < CHANNELS, 0)
    log_sigma_q = base_q + slope * anchor_v
    draw = (step_0 + tl.maximum(begin - index, 0)) * (CHANNELS + 1)
    eps_t = tl.load(draws + draw + channel, inside, 0)
    mean_q = y - tl.exp(log_sigma_q) * eps_t
    log_uniform = tl.load(draws + draw + CHANNELS, is_index, 0)
    return x, eps, v, y, mean_p, log_sigma_p, mean_q, log_sigma_q, eps_t, log_uniform


@triton.jit
def _log_ratio(z_p, z_q, log_sigma_p, log_sigma_q, inside):
    """log p(y) / q(y) of states y [n, m], standardised to z_p and z_q; summed over channels: [n, 1]."""
    log_ratio = log_sigma_q - log_sigma_p + 0.5 * ((z_q - z_p) * (z_q + z_p))
    return tl.sum(tl.where(inside, log_ratio, 0.0), axis=1)[:, None]


@triton.jit
def _resampled(y, log_uniform, mean_p, log_sigma_p, mean_q, log_sigma_q, is_channel):
    """(the state that replaces a rejected y [1, m], whether it is lost), as `cspd.heads.verify.resample`."""
    inverse_sigma_q = tl.exp(-log_sigma_q)
    xi = (y - mean_q) * inverse_sigma_q
    axis = (mean_p - mean_q) * tl.exp(-0.5 * (log_sigma_p + log_sigma_q))
    axis = tl.where(is_channel, axis, 0.0)
    square = tl.sum(axis * axis, axis=1)[:, None]
    along = tl.sum(xi * axis, axis=1)[:, None] / tl.maximum(square, TINY)
    mirrored = xi - 2 * (along * axis)
    resampled = mean_p + mirrored * tl.exp(log_sigma_p)
    log_ratio = _log_ratio((resampled - mean_q) * inverse_sigma_q, mirrored, log_sigma_q, log_sigma_p, is_channel)
    is_lost = tl.max(tl.max((log_uniform <= log_ratio).to(tl.int32), axis=1), axis=0) > 0
    return resampled, is_lost


@triton.jit(do_not_specialize=["num_inputs"])
def _after_kernel(
    inputs,
    last,
    out,
    scale,
    given,
    made,
    num_inputs,
    WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr,
    BRANCHES: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
):
    table, draws, _, state, left, phase = given
    state_after, left_after, phase_after, step_index, record, log_sigma = made
    chain = tl.program_id(0).to(tl.int64)
    begin, step_0 = begin_of(chain, given, WINDOW)
    index = tl.arange(0, WINDOW_BLOCK)[:, None]
    channel = tl.arange(0, CHANNEL_BLOCK)[None, :]
    inside = (index < WINDOW) & (channel < CHANNELS)
    sources = (table, draws, state, out, inputs, last, scale)

    # 2. verify, 3. accept: the first index that is not accepted; at step 0 log u is -inf
    _, _, _, y, mean_p, log_sigma_p, _, log_sigma_q, eps_t, log_uniform = _verified(
        sources, chain, begin, step_0, num_inputs, index, channel, inside, WINDOW, CHANNELS, BRANCHES
    )
    log_ratio = _log_ratio((y - mean_p) * tl.exp(-log_sigma_p), eps_t, log_sigma_p, log_sigma_q, inside)
    is_accepted = (log_uniform < log_ratio) | (index >= WINDOW)
    num_accepted = tl.min(tl.min(tl.where(is_accepted, WINDOW, index), axis=1), axis=0).to(tl.int64)
    end = tl.minimum(begin, WINDOW - 1)  # -1 if the chain stands still: then nothing is rejected
    is_rejected = num_accepted <= end
    at = tl.maximum(tl.minimum(num_accepted, end), 0)
    is_traced = inside & (index <= at) & (index < begin)
    traced = tl.sum(tl.sum(tl.where(is_traced, log_sigma_p, 0.0), axis=1), axis=0)

    # 4. resample: the last state decided, if it was rejected
    one = tl.zeros([1, 1], tl.int64) + at
    is_channel = channel < CHANNELS
    anchor, eps, v, y, mean_p, log_sigma_p, mean_q, log_sigma_q, _, log_uniform = _verified(
        sources, chain, begin, step_0, num_inputs, one, channel, is_channel, WINDOW, CHANNELS, BRANCHES
    )
    resampled, is_lost = _resampled(y, log_uniform, mean_p, log_sigma_p, mean_q, log_sigma_q, is_channel)

    # 5. go on from there; after step 0, p's mean is the token
    moving = begin >= 0
    decided = tl.where(moving, at + 1, 0)
    before = tl.load(left + chain)
    tl.store(left_after + chain, before - decided)
    tl.store(phase_after + chain, tl.where(is_rejected & is_lost, UNRESOLVED, tl.load(phase + chain)))
    tl.store(step_index + chain, step_0 - 1 + before)
    tl.store(record + chain, tl.where(is_rejected, -decided, decided))
    tl.store(log_sigma + chain, traced)
    old = state + chain * STATE_ROWS * CHANNELS + channel
    new = state_after + chain * STATE_ROWS * CHANNELS + channel
    x = tl.where(is_rejected, resampled, y)
    _store_row(new, old, 0, x, moving, is_channel, CHANNELS)
    _store_row(new, old, 1, eps, moving, is_channel, CHANNELS)
    _store_row(new, old, 2, anchor, moving, is_channel, CHANNELS)
    _store_row(new, old, 3, v, moving, is_channel, CHANNELS)
    _store_row(new, old, 4, mean_p, moving, is_channel, CHANNELS)
    _store_row(new, old, 5, log_sigma_p, moving, is_channel, CHANNELS)
    _store_row(new, old, 6, mean_q, moving, is_channel, CHANNELS)
    _store_row(new, old, 7, log_sigma_q, moving, is_channel, CHANNELS)


@triton.jit
def _store_row(new, old, number, value, moving, is_channel, CHANNELS: tl.constexpr):
    """Stores a row of the state, unchanged if the chain stands still."""
    unchanged = tl.load(old + number * CHANNELS, is_channel, 0)
    tl.store(new + number * CHANNELS, tl.where(moving, value, unchanged), is_channel)


def after_head(
    table: Tensor,
    draws: Tensor,
    end_indices: Tensor,
    state: Tensor,
    left: Tensor,
    phase: Tensor,
    inputs: Tensor,
    last: Tensor,
    out: Tensor,
    scale: Tensor,
) -> tuple[Tensor, ...]:
    """Steps 2 to 5 of a pass of R chains, from the head's outputs. A chain that stands still does not change.

    Args:
        table .. phase: as given to `before_head`. inputs, last: as it returned them.
        out: the head's (eps, v) [G, filled, 2d]; G = 2 with the unconditional branch second. scale: guidance [R] or
            [R, 1, 1].

    Returns:
        (state, left, phase, step_index, record, log sigma), the fields of `cspd.heads.verify.Moved`.
    """
    check_dense(table=table, draws=draws, end_indices=end_indices, state=state, left=left, phase=phase)
    check_dense(inputs=inputs, last=last, out=out, scale=scale)
    (_, window, _), (num_chains, _, channels) = table.shape, state.shape
    integers = (torch.empty_like(left) for _ in range(4))
    made = (torch.empty_like(state), *integers, state.new_empty(num_chains))
    launch(
        _after_kernel,
        num_chains,
        inputs,
        last,
        out,
        scale,
        (table, draws, end_indices, state, left, phase),
        made,
        len(inputs),
        WINDOW=window,
        CHANNELS=channels,
        BRANCHES=len(out),
        WINDOW_BLOCK=triton.next_power_of_2(window),
        CHANNEL_BLOCK=triton.next_power_of_2(channels),
    )
    return made
