"""MAR's sampler as it is published, step by step: what `ar` is measured against and must agree with.

Written to be held against the paper (arXiv 2406.11838, sections 3.2-3.4): the encoder starts from scratch each
iteration, guidance concatenates its halves each step, and a denoising step looks its coefficients up in float64 tables.
It calls our modules, so it is a baseline for the sampler, not for the layers. Use `cspd` to sample; use this to check
and to compare.
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


def _extract(values: np.ndarray, t: Tensor, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[t].float().unsqueeze(-1).expand(like.shape)


def _denoise_step(s: Schedule, out: Tensor, x: Tensor, t: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """x_{t-1} [N, d] from the head's output [N, 2d] at x_t."""
    eps, v = out.chunk(2, dim=-1)
    fraction = (v + 1) / 2
    log_beta = _extract(np.log(s.betas), t, x)
    log_variance = fraction * log_beta + (1 - fraction) * _extract(s.posterior_log_variance_clipped, t, x)
    x0 = _extract(s.sqrt_recip_alphas_cumprod, t, x) * x - _extract(s.sqrt_recipm1_alphas_cumprod, t, x) * eps
    mean = _extract(s.posterior_mean_coef1, t, x) * x0 + _extract(s.posterior_mean_coef2, t, x) * x
    nonzero = (t != 0).float().unsqueeze(-1)
    return mean + nonzero * torch.exp(0.5 * log_variance) * noise * temperature


def _denoise(
    model: MAR, z: Tensor, scale: float, guided: bool, temperature: float, num_steps: int, draws: Callable
) -> Tensor:
    """Tokens [N, d] under conditions z [N, D], or [2N, D] with the null class second."""
    s = schedule(num_steps)
    x = draws(num_steps)
    for i in reversed(range(num_steps)):
        t = torch.tensor([i] * len(x), device=x.device)
        timesteps = torch.tensor(s.timestep_map, device=x.device)[t]
        if guided:
            out = guide(model.head(torch.cat([x, x]), torch.cat([timesteps, timesteps]), z), scale)
        else:
            out = model.head(x, timesteps, z)
        x = _denoise_step(s, out, x, t, draws(i), temperature)
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
) -> Tensor:
    """Samples one batch, all sequences in lockstep.

    Args:
        labels: int64 [B].
        num_iter, cfg, cfg_schedule, temperature, num_sampling_steps: as in `cspd.Request`.
        order: int64 [B, L], first generated first; random by default.
        noise: maps (mask of the predicted tokens [B, L], t) to their draws [N, d], row by row; t = T asks for x_T.
            torch's global generator by default.

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
        left = math.floor(length * math.cos(math.pi / 2 * (k + 1) / num_iter))
        left = max(1, min(int(mask[0].sum()) - 1, left))
        next_mask = rank >= length - left
        predicted = mask if k == num_iter - 1 else mask & ~next_mask

        embedding, state, known = model.class_emb(labels), tokens, mask.sum(1).tolist()
        orders = mask.int().argsort(dim=1, stable=True)
        if guided:
            embedding = torch.cat([embedding, model.fake_latent.repeat(batch, 1)])
            state, orders, known = torch.cat([state, state]), torch.cat([orders, orders]), known * 2
        z = model(state, orders, [length - count for count in known], embedding)
        z = z[torch.cat([predicted, predicted]) if guided else predicted]
        scale = 1 + (cfg - 1) * (length - left) / length if cfg_schedule == "linear" else cfg

        def draws(t: int, predicted: Tensor = predicted) -> Tensor:
            return noise(predicted, t) if noise else torch.randn(int(predicted.sum()), dim, device=device)

        tokens[predicted] = _denoise(model, z, scale, guided, temperature, num_sampling_steps, draws)
        mask = next_mask
    return tokens
