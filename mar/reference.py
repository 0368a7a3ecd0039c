"""MAR's sampler as published, step by step: `ar` is measured against it and must agree with it.

Written to be held against the paper (arXiv 2406.11838, sections 3.2-3.4): the encoder starts from scratch each
iteration, guidance concatenates its halves each step, and a denoising step looks its coefficients up in float64 tables.
It calls our modules, so it is a baseline for the sampler, not for the layers. Use `cspd` to sample, and this to check
and compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mar.diffusion import Schedule, schedule
from mar.head import guide
from mar.model import MAR


def _denoise_step(tables: Schedule, out: Tensor, x: Tensor, t: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """x_{t-1} [N, d] from the head's output [N, 2d] at x_t."""

    def at_t(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(x.device)[t].float().unsqueeze(-1).expand(x.shape)

    eps, v = out.chunk(2, dim=-1)
    x0 = at_t(tables.sqrt_recip_alphas_cumprod) * x - at_t(tables.sqrt_recipm1_alphas_cumprod) * eps
    mean = at_t(tables.posterior_mean_coef1) * x0 + at_t(tables.posterior_mean_coef2) * x

    # the log-variance is interpolated between that of beta and the posterior's
    fraction = (v + 1) / 2
    log_beta = at_t(np.log(tables.betas))
    log_variance = fraction * log_beta + (1 - fraction) * at_t(tables.posterior_log_variance_clipped)
    nonzero = (t != 0).float().unsqueeze(-1)  # the last step adds no noise
    return mean + nonzero * torch.exp(0.5 * log_variance) * noise * temperature


def _denoise(
    model: MAR, z: Tensor, scale: float, guided: bool, temperature: float, num_steps: int, draws: Callable
) -> Tensor:
    """Tokens [N, d] under conditions z [N, D], or [2N, D] with the null class second."""
    tables = schedule(num_steps)
    x = draws(num_steps)
    for i in reversed(range(num_steps)):
        t = torch.tensor([i] * len(x), device=x.device)
        timesteps = torch.tensor(tables.timestep_map, device=x.device)[t]
        if guided:
            out = guide(model.head(torch.cat([x, x]), torch.cat([timesteps, timesteps]), z), scale)
        else:
            out = model.head(x, timesteps, z)
        x = _denoise_step(tables, out, x, t, draws(i), temperature)
    return x


@torch.inference_mode()
def sample(
    model: MAR,
    labels: Tensor,
    *,
    num_iter: int = 64,
    cfg: float = 1.0,
    cfg_schedule: str = "linear",
    temperature: float = 1.0,
    num_sampling_steps: int = 100,
    order: Tensor | None = None,
    noise: Callable[[Tensor, int], Tensor] | None = None,
    iterations: range | None = None,
) -> Tensor:
    """Samples one batch, all sequences in lockstep.

    Args:
        labels: int64 [B].
        num_iter, cfg, cfg_schedule, temperature, num_sampling_steps: as in `cspd.Request`.
        order: int64 [B, L], first generated first; random by default.
        noise: maps (mask of the predicted tokens [B, L], t) to their draws [N, d], row by row; t = T asks for x_T.
            torch's global generator by default.
        iterations: those of the `num_iter` that are run, by default all; tokens of the others are 0. To time some.

    Returns:
        Tokens [B, L, d].
    """
    batch, length, dim = len(labels), model.config.seq_len, model.config.token_dim
    device = labels.device
    guided = cfg != 1
    if order is None:
        order = torch.stack([torch.randperm(length, device=device) for _ in range(batch)])
    rank = order.argsort(dim=1)
    tokens = torch.zeros(batch, length, dim, device=device)
    mask = torch.ones(batch, length, dtype=torch.bool, device=device)
    for k in range(num_iter):
        # the cosine schedule: how many tokens stay masked, at least one fewer than before
        left = math.floor(length * math.cos(math.pi / 2 * (k + 1) / num_iter))
        left = max(1, min(int(mask[0].sum()) - 1, left))
        next_mask = rank >= length - left
        predicted = mask if k == num_iter - 1 else mask & ~next_mask
        if iterations is not None and k not in iterations:
            mask = next_mask
            continue

        # z of every position; with guidance the second half of the batch has the null class
        embedding = model.class_emb(labels)
        known_first = mask.int().argsort(dim=1, stable=True)
        num_known = (~mask).sum(1).tolist()
        if guided:
            embedding = torch.cat([embedding, model.fake_latent.repeat(batch, 1)])
            z = model(torch.cat([tokens, tokens]), torch.cat([known_first, known_first]), num_known * 2, embedding)
            z = z[torch.cat([predicted, predicted])]
        else:
            z = model(tokens, known_first, num_known, embedding)[predicted]
        scale = cfg
        if cfg_schedule == "linear":
            scale = 1 + (cfg - 1) * (length - left) / length

        def draws(t: int, predicted: Tensor = predicted) -> Tensor:
            return noise(predicted, t) if noise else torch.randn(int(predicted.sum()), dim, device=device)

        tokens[predicted] = _denoise(model, z, scale, guided, temperature, num_sampling_steps, draws)
        mask = next_mask
    return tokens
