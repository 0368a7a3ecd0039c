"""One round of speculative denoising, as functions on tensors: draft, verify, accept, resample.

Source: De Bortoli et al. 2025 (arXiv 2501.05370), with calibrated linear drafts. A token's denoising chain is a Markov
chain of diagonal Gaussians, and for those speculative sampling is exact. The *anchor* is the last state x' at which the
head was evaluated, always at step t + 1, with the head's outputs (eps', v') there. A round of a chain at state x_t:

1. Draft: predict the head's outputs at the next W steps from the anchor. Each prediction gives a Gaussian q_w. Draw a
   state y_w from each with the chain's own noise.
2. Verify: evaluate the head at x_t, y_1 .. y_{W-1} in one batched call. This gives the target's Gaussians p_w.
3. Accept: y_w is accepted if a uniform draw is below p_w(y_w) / q_w(y_w). The longest accepted prefix is kept.
4. Resample: replace the first rejected state by one that makes it a draw of p_w, whatever q_w was.
5. Go on from there: the input that led to this state is the new anchor.

A window is cut off at step 0. That step adds no noise and is never judged: the token is p's mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd.continuous.ancestral import guided
from cspd.continuous.gaussian import Gaussian, resample
from cspd.continuous.slots import Embeddings, Table
from mar.diffusion import schedule
from mar.head import Head, fill


class Columns(NamedTuple):
    """The columns of a draft table, [..., 3 + W] and five of [..., 1].

    Attributes:
        mix: y_w is their product with (x_t, eps', x', sigma_1 eps_1 .. sigma_W eps_W).
        base_q, slope: log sigma_q = base_q + slope v'.
        mean_x, mean_eps: p's mean = mean_x x + mean_eps eps, at an input x with the head's eps.
        base_p: log sigma_p = base_p + slope v, with the head's v.
    """

    mix: Tensor
    base_q: Tensor
    slope: Tensor
    mean_x: Tensor
    mean_eps: Tensor
    base_p: Tensor


NUM_SCALARS = len(Columns._fields) - 1  # columns of a draft table after the 3 + W of `mix`


class Lookup(NamedTuple):
    """What a round looks up by the steps that are left to a chain, from 0 to T.

    Attributes:
        draft: float32 [T + 1, W, 3 + W + 5], see `draft_table`; zeros where no step is left.
        decides: int64 [T + 1, 2], how many steps a round decides at most, and the last of them by its place from 0.
        lags: int64 [W], 1 .. W.
    """

    draft: Tensor
    decides: Tensor
    lags: Tensor


def lookup(table: Tensor) -> Lookup:
    """What rounds look up, for a `draft_table`."""
    num_steps, window = table.shape[:2]
    most = torch.arange(num_steps + 1, device=table.device).clamp(max=window)
    return Lookup(
        draft=torch.cat([torch.zeros_like(table[:1]), table]),
        decides=torch.stack([most, (most - 1).clamp(min=0)], dim=1),
        lags=torch.arange(1, window + 1, device=table.device),
    )


class Moved(NamedTuple):
    """What a round does to R chains.

    Attributes:
        state: [R, 8, d]: the state x_t; the anchor's eps', x' and v'; and of the last step decided, means and log
            sigmas of the Gaussians p and q. Where no step is left, p's mean is the token.
        left: int64 [R], the steps left.
        waiting: int64 [R], 0; or T or more, where `gaussian.residual` must draw the state before the chain can go on.
        place: int64 [R], the step that the round began at, in the flat list of all slots' steps.
        record: int64 [R], what `chains.Finished.record` has there; 0 for a chain that stood still.
        log_sigma: [R], if traced, log sigma_p summed over channels and the decided steps but step 0.
    """

    state: Tensor
    left: Tensor
    waiting: Tensor
    place: Tensor
    record: Tensor
    log_sigma: Tensor | None


def draft_table(
    coefficients: np.ndarray, drift: np.ndarray, num_steps: int, window: int, temperature: float
) -> np.ndarray:
    """The `Columns` of every window, float32 [T, W, 3 + W + 5]: row t is for a round that begins at x_t.

    The drafted noise prediction is linear, eps~ = c0 y + c1 eps' + c2 x'. So every drafted state is a linear
    combination of (x_t, eps', x') and the noise. Places beyond step 0 are zeros.

    Args:
        coefficients: (c0, c1, c2) [T, lags, 3] by step and lag, lags from 1; drift: mean change of v [T, lags].
        num_steps: T. window: W <= lags. temperature: tau > 0.
    """
    s = schedule(num_steps)
    base_p = s.log_sigma_base + np.log(temperature)
    table = np.zeros((num_steps, window, 3 + window + NUM_SCALARS))
    # y, built up step by step: its weights on (x_t, eps', x', noise); before the first step it is x_t
    y = np.zeros((num_steps, 3 + window))
    y[:, 0] = 1
    for w in range(window):
        start = np.arange(w, num_steps)  # windows that are at or above step 0 after w steps
        step = start - w
        c0, c1, c2 = coefficients[step, w].astype(np.float64).T
        mean_x, mean_eps = s.mean_x[step], s.mean_eps[step]
        slope = s.log_sigma_slope[step]
        y[start] *= (mean_x + mean_eps * c0)[:, None]
        y[start, 1] += mean_eps * c1
        y[start, 2] += mean_eps * c2
        y[start, 3 + w] = 1
        base_q = base_p[step] + slope * drift[step, w]
        scalars = np.stack([base_q, slope, mean_x, mean_eps, base_p[step]], axis=1)
        table[start, w] = np.concatenate([y[start], scalars], axis=1)
    return table.astype(np.float32)


def draft(columns: Columns, state: Tensor, eps_t: Tensor) -> tuple[Tensor, Gaussian]:
    """Step 1: the drafted states y [R, W, d], and the Gaussians q that they are draws of.

    Args:
        state: see `Moved`. eps_t: [R, W, d], the noise of each step.
    """
    log_sigma = torch.addcmul(columns.base_q, columns.slope, state[:, 3:4])
    noise = log_sigma.exp() * eps_t
    sources = torch.cat([state[:, :3], noise], dim=1)
    # no matrix product: in low precision its rounding would make y a draw of something else than q
    y = (columns.mix.unsqueeze(-1) * sources.unsqueeze(1)).sum(2)
    return y, (y - noise, log_sigma)


def evaluate_filled(
    head: Head, x: Tensor, modulations: Sequence[tuple[Tensor, ...]], scale: Tensor
) -> tuple[Tensor, Tensor]:
    """`ancestral.evaluate`, rounded alike in every batch: modulations [G, N, width] of the flat rows of x, filled up.

    Rounding can flip a decision, and the first step multiplies it by 316 at T = 100 and by 4,500 at T = 8.
    """
    rows = x.shape[:-1]
    out = head.denoise(fill(x.flatten(0, -2)), modulations)
    return guided(out[:, : rows.numel()].unflatten(1, rows), scale)


def first_step(
    head: Head,
    x: Tensor,
    eps_t: Tensor,
    layers: Sequence[Tensor],
    scale: Tensor,
    temperature: Tensor,
    num_steps: int,
) -> tuple[Tensor, Tensor]:
    """Step T - 1, ancestral: the state after it with its anchor [N, 4, d], and log sigma [N, d].

    Args:
        x, eps_t: x_T and the step's noise [N, d]. layers: the head's modulations, of rows filled up.
        scale, temperature: [N, 1].
    """
    s, last = schedule(num_steps), num_steps - 1
    eps, v = evaluate_filled(head, x, head.split(layers), scale)
    mean = x * s.mean_x[last] + eps * s.mean_eps[last]
    log_sigma = s.log_sigma_base[last] + temperature.log() + s.log_sigma_slope[last] * v
    after = torch.addcmul(mean, log_sigma.exp(), eps_t)
    return torch.stack([after, eps, x, v], dim=1), log_sigma


def verify(
    head: Head, columns: Columns, inputs: Tensor, layers: Sequence[Tensor], scale: Tensor
) -> tuple[Tensor, Tensor, Gaussian]:
    """Step 2: the head's (eps, v) at the inputs [R, W, d], and the target's Gaussians p of the states after them."""
    eps, v = evaluate_filled(head, inputs, head.split(layers), scale)
    mean = torch.addcmul(columns.mean_x * inputs, columns.mean_eps, eps)
    log_sigma = torch.addcmul(columns.base_p, columns.slope, v)
    return eps, v, (mean, log_sigma)


def accept(y: Tensor, p: Gaussian, q: Gaussian, eps_t: Tensor, log_uniform: Tensor) -> Tensor:
    """Step 3: the length of the longest accepted prefix, int64 [R].

    Args:
        eps_t: y standardised under q. log_uniform: of the uniform draws, [R, W, 1]; -inf at step 0, which is accepted.
    """
    (mean_p, log_sigma_p), (_, log_sigma_q) = p, q
    z_p = (y - mean_p) * torch.exp(-log_sigma_p)
    z_q = eps_t
    log_ratio = torch.addcmul(log_sigma_q - log_sigma_p, z_q - z_p, z_q + z_p, value=0.5)
    accepted = log_uniform.squeeze(-1) < log_ratio.sum(-1)
    return accepted.cumprod(1).sum(1)


def take_step(values: list[Tensor], at: Tensor) -> Tensor:
    """One step of every window: [R, n] of values [R, W, ..] side by side; `at` int64 [R] in the flat list of all steps.

    The values are packed so that one gather serves all of them: nine gathers are seven more kernel launches, and in
    small batches a round's time is its launches.
    """
    return torch.cat(values, dim=-1).flatten(0, 1).index_select(0, at)


def move(
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
    """A round of R chains, steps 1 to 5, with one head call. A chain that has ended or waits stands still.

    Args:
        draws: [C, T, d + 1], eps_t and the log of a uniform draw for the steps of C slots.
        modulations: the head's, computed before or not.
        windows: int64 [R, W], where the windows of a chain with no step left would be in that list.
        begin: int64 [R], where each chain's window begins in the flat list of the windows' steps.
        scale: guidance [R, 1, 1]. state, left, waiting: as in `Moved`. trace_sigma: whether to sum log sigma_p.
    """
    num_steps, window = len(lookup.draft) - 1, len(lookup.lags)
    num_chains, _, channels = state.shape
    moving = left > waiting

    # look up what belongs to the windows' steps; what is beyond step 0 is another slot's, is computed and not used
    steps_left = left * moving
    widths = [3 + window] + [1] * NUM_SCALARS
    columns = Columns(*lookup.draft.index_select(0, steps_left).split_with_sizes(widths, dim=-1))
    most, last_place = lookup.decides.index_select(0, steps_left).unbind(1)
    at = windows + left.unsqueeze(1)
    own_draws = draws.view(-1, channels + 1).index_select(0, at.view(-1)).view(num_chains, window, -1)
    eps_t, log_uniform = own_draws.split_with_sizes([channels, 1], dim=-1)
    layers = modulations.layers_at(head, fill(at.view(-1, 1)).view(-1))

    # 1. draft
    y, q = draft(columns, state, eps_t)

    # 2. verify: y_w is judged by the head's output at the state before it
    x_t = state[:, :1]
    inputs = torch.cat([x_t, y[:, :-1]], dim=1)
    eps, v, p = verify(head, columns, inputs, layers, scale)

    # 3. accept: decided are the accepted prefix and a rejected step after it; places in a window count from 0
    num_accepted = accept(y, p, q, eps_t, log_uniform)
    rejected = num_accepted < most
    last = torch.minimum(num_accepted, last_place)
    decided = last + moving

    # 4. resample: the last state decided, if it was rejected
    taken = take_step([eps, inputs, v, *p, *q, y, log_uniform], begin + last).split([7 * channels, channels, 1], dim=1)
    anchor_p_q, y_last, log_uniform_last = taken
    anchor_p_q = anchor_p_q.unflatten(1, (7, channels))
    mean_p, log_sigma_p, mean_q, log_sigma_q = anchor_p_q[:, 3:].unbind(1)
    p_last, q_last = (mean_p, log_sigma_p), (mean_q, log_sigma_q)
    resampled, lost = resample(y_last, log_uniform_last.squeeze(-1), p_last, q_last)
    unresolved = rejected & lost

    # 5. go on from there; where step 0 was decided, p's mean is the token
    x = torch.where(rejected.unsqueeze(-1), resampled, y_last)
    moved = torch.cat([x.unsqueeze(1), anchor_p_q], dim=1)
    log_sigma = None
    if trace_sigma:
        traced = lookup.lags <= torch.minimum(decided, left - 1).unsqueeze(1)
        log_sigma = torch.where(traced, p[1].sum(-1), 0).sum(1)
    return Moved(
        state=torch.where(moving.view(-1, 1, 1), moved, state),
        left=left - decided,
        waiting=torch.add(waiting, unresolved, alpha=num_steps),
        place=at[:, 0],
        record=torch.addcmul(decided, decided, rejected, value=-2),
        log_sigma=log_sigma,
    )
