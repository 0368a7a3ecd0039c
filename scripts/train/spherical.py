"""The power spherical distribution (De Cao and Aziz 2020, arXiv 2006.04437), the posterior of an S-VAE's cells.

A point x of the unit sphere in d dimensions has the density N (1 + mean . x)^concentration. So mean . x is 2 u - 1 with
u from Beta(concentration + (d - 1) / 2, (d - 1) / 2), and the direction across the mean is uniform.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Beta
from torch.nn import functional as F

from cspd.causal.autoencoders import SphereVAE

LEAST = 1e-6  # of the squared distance from the mean's axis, whose root has no derivative at 0


def posterior(vae: SphereVAE, images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean directions [B, h * w, d], unit vectors, and concentrations [B, h * w] of the cells of images, float32."""
    moments = vae.moments(images).float()
    return F.normalize(moments[..., :-1], dim=-1), F.softplus(moments[..., -1]) + 1


def latents(directions: Tensor) -> Tensor:
    """Latents [B, d, h, w] with cells of length sqrt(d) from unit vectors [B, h * w, d]."""
    side = math.isqrt(directions.shape[1])
    return (directions * directions.shape[-1] ** 0.5).transpose(1, 2).unflatten(2, (side, side))


def draw(mean: Tensor, concentration: Tensor, seed: int) -> Tensor:
    """Unit vectors [..., d] around unit vectors mean [..., d] with concentrations [...]; differentiable in both."""
    rest = mean.shape[-1] - 1
    with torch.random.fork_rng(devices=[]):  # `Beta` takes no generator
        torch.manual_seed(seed)
        along = 2 * Beta(concentration.cpu() + rest / 2, rest / 2).rsample() - 1
        across = F.normalize(torch.randn(*mean.shape[:-1], rest), dim=-1)
    along = along.unsqueeze(-1)
    around_first = torch.cat([along, (1 - along.square()).clamp_min(LEAST).sqrt() * across], dim=-1).to(mean.device)
    # the reflection that takes the first axis to the mean
    first = torch.zeros_like(mean)
    first[..., 0] = 1
    axis = F.normalize(first - mean, dim=-1)
    return around_first - 2 * (around_first * axis).sum(-1, keepdim=True) * axis


def nats(concentration: Tensor, dim: int) -> Tensor:
    """The KL divergence [...] from the uniform distribution on the sphere in `dim` dimensions; float32."""
    beta = torch.full_like(concentration, (dim - 1) / 2)
    alpha = concentration + beta
    log_area = math.log(2) + dim / 2 * math.log(math.pi) - math.lgamma(dim / 2)
    log_normaliser = alpha.add(beta).lgamma() - alpha.lgamma() - (alpha + beta) * math.log(2) - beta * math.log(math.pi)
    mean_log = math.log(2) + alpha.digamma() - (alpha + beta).digamma()  # of 1 + mean . x
    return log_normaliser + concentration * mean_log + log_area
