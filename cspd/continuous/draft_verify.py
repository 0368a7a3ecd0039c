"""A round of speculative denoising, as functions on tensors: draft a window, judge it, resample what was refused.

Source: De Bortoli et al. 2025 (arXiv 2501.05370), with calibrated linear drafts. A chain is a Markov chain of diagonal
Gaussians. From a state x_t, a draft q guesses the next W states at once; one batched head call gives the target's own
p at all of them; the prefix is kept on which coins say so, and the first state that is refused is drawn again such that
it follows p whatever q was. The *anchor* is the last state x' at which the head was evaluated, always at step t + 1,
with its (eps', v').
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd.continuous.ancestral import evaluate
from cspd.continuous.gaussian import Gaussian, resample
from mar.diffusion import schedule
from mar.head import Head

EXTRA = ("draft_base", "slope", "mean_x", "mean_eps", "base")  # columns of a draft table after the states' 3 + W


def draft_table(
    coefficients: np.ndarray, drift: np.ndarray, num_steps: int, window: int, temperature: float
) -> np.ndarray:
    """Everything a round looks up, float32 [T, W, 3 + W + 5]: row t for a round that starts at x_t.

    The drafted noise prediction is linear, eps~ = c0 y + c1 eps' + c2 x', so each drafted state is too: y_w is the sum
    over the first 3 + W columns times (x_t, eps', x', sigma_1 eps_1 .. sigma_W eps_W). Then follow log sigma_q = base +
    slope v', the target's mean = mean_x y + mean_eps eps, and log sigma_p = base + slope v. Windows end at step 0.

    Args:
        coefficients: (c0, c1, c2) [T, lags, 3] by step and lag, lags from 1; drift: mean change of v [T, lags].
        num_steps: T. window: W <= lags. temperature: tau > 0.
    """
    s = schedule(num_steps)
    base = s.log_sigma_base + np.log(temperature)
    table = np.zeros((num_steps, window, 3 + window + len(EXTRA)))
    state = np.zeros((num_steps, 3 + window))
    state[:, 0] = 1
    for w in range(window):
        start = np.arange(w, num_steps)
        k = start - w
        c = coefficients[k, w].astype(np.float64)
        state[start] *= (s.mean_x[k] + s.mean_eps[k] * c[:, 0])[:, None]
        state[start, 1:3] += s.mean_eps[k, None] * c[:, 1:]
        state[start, 3 + w] = 1
        extra = (
            base[k] + s.log_sigma_slope[k] * drift[k, w],
            s.log_sigma_slope[k],
            s.mean_x[k],
            s.mean_eps[k],
            base[k],
        )
        table[start, w] = np.concatenate([state[start], np.stack(extra, axis=1)], axis=1)
    return table.astype(np.float32)


class Moved(NamedTuple):
    """What a round does to R chains.

    Attributes:
        left: int64 [R], the steps they are at, below 0 where they end. signed: int64 [R], how many steps were decided,
            negative if the last was resampled. unresolved: bool [R], where `residual` must draw the state.
        state: [R, 4, d], state, and eps', x', v' of the new anchor. p, q: of the last step decided.
        log_sigma: [R], if traced, log sigma_p summed over channels and the steps decided, but step 0.
    """

    left: Tensor
    signed: Tensor
    unresolved: Tensor
    state: Tensor
    p: Gaussian
    q: Gaussian
    log_sigma: Tensor | None


def move(
    head: Head,
    table: tuple[Tensor, Tensor],
    draws: Tensor,
    modulations: list[Tensor] | tuple[Tensor, Tensor],
    state: Tensor,
    t: Tensor,
    row: Tensor,
    scale: Tensor,
    first: Tensor,
    trace_sigma: bool = False,
) -> Moved:
    """A round: drafts a window for every chain, judges it with one head call, and resamples what was refused.

    Args:
        table: of the draft, see `draft_table`, and the steps k of every window, int64 [T, W], not below 0.
        draws: [rows, T, d + 1], eps_t and log coin by chain and step.
        modulations: the head's by layer, [G, rows, T, ..]; or (t_embed [T, width], c_embed [G, rows, width]).
        state: [R, 4, d], x_t and the anchor's eps', x', v'. t: int64 [R]. row: int64 [R], into draws and modulations.
        scale: guidance [R, 1, 1]. first: int64 [R], position of each chain's window in a flat list, less 1.
    """
    table, steps = table
    (num_steps, window), (rows, _, d) = steps.shape, state.shape
    # a window ends at step 0: what is beyond is computed and not used
    k = steps.index_select(0, t)
    at = (k + (row * num_steps).unsqueeze(1)).flatten()
    columns = table.index_select(0, t).split_with_sizes([3 + window, *[1] * len(EXTRA)], dim=-1)
    mix, draft_base, slope, mean_x, mean_eps, base = columns
    chosen = draws.view(-1, d + 1).index_select(0, at).view(rows, window, d + 1)
    eps_t, log_coin = chosen.split_with_sizes([d, 1], dim=-1)
    if isinstance(modulations, tuple):
        t_embed, c_embed = modulations
        layers = head.modulations(t_embed[k], c_embed[:, row].unsqueeze(2))
    else:
        layers = [layer.flatten(1, 2).index_select(1, at).view(len(layer), rows, window, -1) for layer in modulations]

    # draft
    log_q = torch.addcmul(draft_base, slope, state[:, 3:])
    noise_q = log_q.exp() * eps_t
    sources = torch.cat([state[:, :3], noise_q], dim=1)
    y = (mix.unsqueeze(-1) * sources.unsqueeze(1)).sum(2)  # no matrix product: a coarse one would change q unseen
    inputs = torch.cat([state[:, :1], y[:, :-1]], dim=1)

    # verify
    eps, v = evaluate(head, inputs, head.split(layers), scale)
    mean_p = torch.addcmul(mean_x * inputs, mean_eps, eps)
    log_p = torch.addcmul(base, slope, v)
    z_p = (y - mean_p) * torch.exp(-log_p)
    log_ratio = torch.addcmul(log_q - log_p, eps_t - z_p, eps_t + z_p, value=0.5).sum(-1)
    accepted = ((log_coin.squeeze(-1) < log_ratio) | (k == 0)).cumprod(1).sum(1)  # the last step is never judged
    steps_left = (t + 1).clamp(max=window)
    rejected = accepted < steps_left
    signed = torch.where(rejected, ~accepted, steps_left)
    progress = signed.abs()
    left = t - progress

    # resample the first refused state; the input that led to it is the new anchor
    packed = torch.cat([inputs, eps, v, y, noise_q, mean_p, log_p, log_q, log_coin], dim=-1).flatten(0, 1)
    packed = packed.index_select(0, first + progress).split_with_sizes([d] * 8 + [1], dim=-1)
    anchor, eps, v, y, noise_q, mean_p, log_p_last, log_q, log_coin = packed
    p, q = (mean_p, log_p_last), (y - noise_q, log_q)
    resampled, kept = resample(y, log_coin.squeeze(-1), p, q)
    x = torch.where(rejected.unsqueeze(-1), resampled, y)
    x = torch.where((left < 0).unsqueeze(-1), mean_p, x)
    path = None
    if trace_sigma:
        decided = (torch.arange(window, device=t.device) < progress.unsqueeze(1)) & (k > 0)
        path = (log_p.sum(-1) * decided).sum(1)
    return Moved(left, signed, rejected & ~kept, torch.stack([x, eps, anchor, v], dim=1), p, q, path)


@functools.cache
def compiled_move() -> Callable[..., Moved]:
    """`move` by torch.compile, for any number of chains: half a minute on first use, then fewer and larger kernels."""
    return torch.compile(move, dynamic=True)
