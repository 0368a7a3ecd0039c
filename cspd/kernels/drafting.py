"""What a speculative round does before its head call, in one launch: look-up and draft, as in `draft_verify`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cspd.kernels.launching import check_dense, launch

STATE_ROWS = tl.constexpr(8)  # x_t, eps', x', v', and of the last step decided means and log sigmas of p and q
SCALARS = tl.constexpr(5)  # columns of a draft table after those of `mix`: base_q, slope, mean_x, mean_eps, base_p


@triton.jit
def begin_of(chain, given, WINDOW: tl.constexpr):
    """(the step t that a chain is at, below 0 where it stands still, where its step 0 is in the list of all slots').

    Args:
        given: (table, draws, windows, state, left, waiting), see `before_head`.
    """
    _, _, windows, _, left, waiting = given
    steps = tl.load(left + chain)
    moving = steps > tl.load(waiting + chain)
    return tl.where(moving, steps, 0) - 1, tl.load(windows + chain * WINDOW) + 1


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
    if row >= num_rows:  # filled up with zeros
        tl.store(inputs + row * CHANNELS + channel, tl.zeros([CHANNEL_BLOCK], tl.float32), is_channel)
        tl.store(at + row, 0)
    else:
        chain, place = row // WINDOW, row % WINDOW
        begin, first_place = begin_of(chain, given, WINDOW)
        tl.store(at + row, first_place + tl.maximum(begin - place, 0))

        # the noise of each step of the window, sigma_q eps_t
        j = tl.arange(0, WINDOW_BLOCK)
        is_step = j < WINDOW
        scalars = table + ((begin + 1) * WINDOW + j) * (WINDOW + 3 + SCALARS) + WINDOW + 3
        base_q = tl.load(scalars, is_step, 0)
        slope = tl.load(scalars + 1, is_step, 0)
        own = state + chain * STATE_ROWS * CHANNELS + channel
        v = tl.load(own + 3 * CHANNELS, is_channel, 0)
        draw = (first_place + tl.maximum(begin - j, 0)) * (CHANNELS + 1)
        both = is_step[:, None] & is_channel[None, :]
        eps_t = tl.load(draws + draw[:, None] + channel[None, :], both, 0)
        noise = tl.exp(base_q[:, None] + slope[:, None] * v[None, :]) * eps_t

        # 1. draft: y is mixed of x_t, eps', x' and the noise
        mix = table + ((begin + 1) * WINDOW + place) * (WINDOW + 3 + SCALARS)
        x = tl.load(own, is_channel, 0)
        y = tl.load(mix) * x
        y += tl.load(mix + 1) * tl.load(own + CHANNELS, is_channel, 0)
        y += tl.load(mix + 2) * tl.load(own + 2 * CHANNELS, is_channel, 0)
        y += tl.sum(tl.load(mix + 3 + j, is_step, 0)[:, None] * noise, axis=0)
        if place == 0:
            tl.store(inputs + row * CHANNELS + channel, x, is_channel)
        if place == WINDOW - 1:
            tl.store(last + chain * CHANNELS + channel, y, is_channel)
        else:
            tl.store(inputs + (row + 1) * CHANNELS + channel, y, is_channel)


def before_head(
    table: Tensor, draws: Tensor, windows: Tensor, state: Tensor, left: Tensor, waiting: Tensor, filled: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Look-up and draft of R chains: what the head is called with.

    Args:
        table: the draft's, float32 [T + 1, W, 3 + W + 5], by the steps left; zeros where there are none.
        draws: [C, T, d + 1], eps_t and the log of a uniform draw for the steps of C slots.
        windows: int64 [R, W], where the windows of a chain with no step left would be in the flat list of these steps.
        state: [R, 8, d], x_t and the anchor's eps', x' and v' first. left: int64 [R], the steps left.
        waiting: int64 [R], above 0, and then not below `left`, for a chain that stands still.
        filled: rows of the head call, R W or more; those that are more are zeros.

    Returns:
        (inputs [filled, d]: x_t, y_1 .. y_{W-1} of every chain; y_W [R, d]; int64 [filled], where each input's step is
        in that list, and its row in tables of modulations).
    """
    check_dense(table=table, draws=draws, windows=windows, state=state, left=left, waiting=waiting)
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
        (table, draws, windows, state, left, waiting),
        num_chains * window,
        WINDOW=window,
        CHANNELS=channels,
        WINDOW_BLOCK=triton.next_power_of_2(window),
        CHANNEL_BLOCK=triton.next_power_of_2(channels),
        num_warps=1 if channels <= 16 else 4,
    )
    return inputs, last, at
