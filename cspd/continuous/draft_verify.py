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

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd.continuous.ancestral import guided
from cspd.continuous.gaussian import Gaussian, resample
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
    """What a round looks up by the step t that it begins at.

    Attributes:
        draft: float32 [T, W, 3 + W + 5], see `draft_table`.
        steps: int64 [T, W], the steps t, t - 1, .. of a window; 0 where it goes beyond the end.
    """

    draft: Tensor
    steps: Tensor


class Moved(NamedTuple):
    """What a round does to R chains.

    Attributes:
        left: int64 [R], the steps they are at now, below 0 where they ended.
        decided: int64 [R], how many steps were decided. rejected: bool [R], whether the last of them was rejected.
        unresolved: bool [R], where `gaussian.residual` must still draw the state.
        state: [R, 4, d], the state, and eps', x', v' of the new anchor.
        p, q: Gaussians of the last step decided, [R, d] each.
        log_sigma: [R], if traced, log sigma_p summed over channels and the decided steps but step 0.
    """

    left: Tensor
    decided: Tensor
    rejected: Tensor
    unresolved: Tensor
    state: Tensor
    p: Gaussian
    q: Gaussian
    log_sigma: Tensor | None

    @property
    def record(self) -> Tensor:
        """The round as `chains.Finished.record` has it: the steps decided, negative if the last was resampled."""
        return torch.where(self.rejected, -self.decided, self.decided)


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
        state: [R, 4, d], x_t and the anchor's eps', x', v'. eps_t: [R, W, d], the noise of each step.
    """
    log_sigma = torch.addcmul(columns.base_q, columns.slope, state[:, 3:])
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


def verify(
    head: Head, columns: Columns, inputs: Tensor, layers: list[Tensor], scale: Tensor
) -> tuple[Tensor, Tensor, Gaussian]:
    """Step 2: the head's (eps, v) at the inputs [R, W, d], and the target's Gaussians p of the states after them."""
    eps, v = evaluate_filled(head, inputs, head.split(layers), scale)
    mean = torch.addcmul(columns.mean_x * inputs, columns.mean_eps, eps)
    log_sigma = torch.addcmul(columns.base_p, columns.slope, v)
    return eps, v, (mean, log_sigma)


def accept(y: Tensor, p: Gaussian, q: Gaussian, eps_t: Tensor, log_uniform: Tensor, steps: Tensor) -> Tensor:
    """Step 3: the length of the longest accepted prefix, int64 [R].

    Args:
        eps_t: y standardised under q. log_uniform: of the uniform draws, [R, W, 1]. steps: int64 [R, W].
    """
    (mean_p, log_sigma_p), (_, log_sigma_q) = p, q
    z_p = (y - mean_p) * torch.exp(-log_sigma_p)
    z_q = eps_t
    log_ratio = torch.addcmul(log_sigma_q - log_sigma_p, z_q - z_p, z_q + z_p, value=0.5)
    accepted = log_uniform.squeeze(-1) < log_ratio.sum(-1)
    accepted = accepted | (steps == 0)  # step 0 is never judged
    return accepted.cumprod(1).sum(1)


def take_step(values: list[Tensor], at: Tensor) -> tuple[Tensor, ...]:
    """One step of every window: [R, n] each of values [R, W, n], `at` int64 [R] in the flat list of all steps.

    The values are packed so that one gather serves all of them: nine gathers are seven more kernel launches, and in
    small batches a round's time is its launches.
    """
    packed = torch.cat(values, dim=-1).flatten(0, 1)
    widths = [value.shape[-1] for value in values]
    return packed.index_select(0, at).split_with_sizes(widths, dim=-1)


def _layers_at(head: Head, modulations: list[Tensor] | tuple, num_steps: int, at: Tensor) -> list[Tensor]:
    """The head's modulations by layer, [G, N, ..], at places [N] of flat tables: looked up or computed, see `move`."""
    if isinstance(modulations, tuple):
        t_embed, c_embed = modulations
        return head.modulations(t_embed[at % num_steps], c_embed[:, at // num_steps])
    return [layer.flatten(1, 2).index_select(1, at) for layer in modulations]


def move(
    head: Head,
    lookup: Lookup,
    draws: Tensor,
    modulations: list[Tensor] | tuple[Tensor, Tensor],
    state: Tensor,
    t: Tensor,
    entry: Tensor,
    scale: Tensor,
    begin: Tensor,
    trace_sigma: bool = False,
) -> Moved:
    """A round of R chains, steps 1 to 5, with one head call.

    Args:
        draws: [E, T, d + 1], eps_t and the log of a uniform draw for each of E chains' steps.
        modulations: the head's by layer, [G, E, T, ..]; or (t_embed [T, width], c_embed [G, E, width]) to compute them.
        state: [R, 4, d], x_t and the anchor's eps', x', v'. t: int64 [R].
        entry: int64 [R], where a chain is in draws and modulations.
        scale: guidance [R, 1, 1]. begin: int64 [R], where each chain's window begins in the flat list of all steps.
        trace_sigma: whether to sum log sigma_p.
    """
    num_steps, window = lookup.steps.shape
    num_chains, _, channels = state.shape

    # look up what belongs to the windows' steps; what is beyond step 0 is computed and not used
    steps = lookup.steps.index_select(0, t)
    widths = [3 + window] + [1] * NUM_SCALARS
    columns = Columns(*lookup.draft.index_select(0, t).split_with_sizes(widths, dim=-1))
    at = (steps + (entry * num_steps).unsqueeze(1)).view(-1, 1)
    own_draws = draws.view(-1, channels + 1).index_select(0, at.flatten())
    own_draws = own_draws.view(num_chains, window, channels + 1)
    eps_t, log_uniform = own_draws.split_with_sizes([channels, 1], dim=-1)
    layers = _layers_at(head, modulations, num_steps, fill(at).flatten())

    # 1. draft
    y, q = draft(columns, state, eps_t)

    # 2. verify: y_w is judged by the head's output at the state before it
    x_t = state[:, :1]
    inputs = torch.cat([x_t, y[:, :-1]], dim=1)
    eps, v, p = verify(head, columns, inputs, layers, scale)

    # 3. accept: decided are the accepted prefix and a rejected step after it; places in a window count from 0
    num_accepted = accept(y, p, q, eps_t, log_uniform, steps)
    end = t.clamp(max=window - 1)
    rejected = num_accepted <= end
    last = torch.minimum(num_accepted, end)
    decided = last + 1
    left = t - decided

    # 4. resample: the last state decided, if it was rejected
    taken = take_step([inputs, eps, v, y, *p, *q, log_uniform], begin + last)
    anchor, anchor_eps, anchor_v, y_last, mean_p, log_sigma_p, mean_q, log_sigma_q, log_uniform_last = taken
    p_last, q_last = (mean_p, log_sigma_p), (mean_q, log_sigma_q)
    resampled, resolved = resample(y_last, log_uniform_last.squeeze(-1), p_last, q_last)
    x = torch.where(rejected.unsqueeze(-1), resampled, y_last)

    # 5. go on from there; where step 0 was decided, p's mean is the token
    ended = left < 0
    x = torch.where(ended.unsqueeze(-1), mean_p, x)
    log_sigma = None
    if trace_sigma:
        place = torch.arange(window, device=t.device)
        traced = (place < decided.unsqueeze(1)) & (steps > 0)
        log_sigma = (p[1].sum(-1) * traced).sum(1)
    return Moved(
        left=left,
        decided=decided,
        rejected=rejected,
        unresolved=rejected & ~resolved,
        state=torch.stack([x, anchor_eps, anchor, anchor_v], dim=1),
        p=p_last,
        q=q_last,
        log_sigma=log_sigma,
    )


@functools.cache
def compiled_move() -> Callable[..., Moved]:
    """`move` by torch.compile, for any number of chains: half a minute on first use, then fewer and larger kernels."""
    return torch.compile(move, dynamic=True)
