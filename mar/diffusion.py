"""The diffusion process of MAR's head: a cosine schedule of 1000 steps, respaced to T.

Sources: Nichol & Dhariwal 2021 (cosine schedule, learned variance), MAR (arXiv 2406.11838). All tables are float64:
the first denoising step multiplies errors by 316 at T = 100, so they are rounded only where they are used.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TRAIN_STEPS = 1000
MAX_BETA = 0.999


@dataclass(frozen=True)
class Schedule:
    """Tables of a chain of T steps, each a float64 array [T] indexed by the step t (t = T-1 is the noisiest).

    The head is not given t but `timestep_map[t]`, the step of the 1000-step process that it was trained on.
    """

    timestep_map: np.ndarray
    betas: np.ndarray
    alphas_cumprod: np.ndarray
    posterior_log_variance_clipped: np.ndarray
    posterior_mean_coef1: np.ndarray
    posterior_mean_coef2: np.ndarray
    sqrt_recip_alphas_cumprod: np.ndarray
    sqrt_recipm1_alphas_cumprod: np.ndarray

    def __len__(self) -> int:
        return len(self.betas)

    @functools.cached_property
    def mean_x(self) -> np.ndarray:
        """A in mu = A x_t + B eps, the posterior mean with the predicted x_0 written out."""
        return self.posterior_mean_coef1 * self.sqrt_recip_alphas_cumprod + self.posterior_mean_coef2

    @functools.cached_property
    def mean_eps(self) -> np.ndarray:
        """B in mu = A x_t + B eps."""
        return -self.posterior_mean_coef1 * self.sqrt_recipm1_alphas_cumprod

    @functools.cached_property
    def log_sigma_base(self) -> np.ndarray:
        """a in log sigma = a + b v, v being the head's variance channel."""
        return 0.25 * (np.log(self.betas) + self.posterior_log_variance_clipped)

    @functools.cached_property
    def log_sigma_slope(self) -> np.ndarray:
        """b in log sigma = a + b v."""
        return 0.25 * (np.log(self.betas) - self.posterior_log_variance_clipped)


def _alpha_bar(t: np.ndarray) -> np.ndarray:
    """Nichol & Dhariwal 2021, eq. 17, before it is divided by its value at 0."""
    return np.cos((t + 0.008) / 1.008 * np.pi / 2) ** 2


@functools.lru_cache(maxsize=64)
def schedule(num_steps: int, first_timestep: int = TRAIN_STEPS - 1) -> Schedule:
    """The cosine schedule respaced to `num_steps` evenly strided steps.

    Args:
        num_steps: T, from 2 to 1000; T = 1000 is the process the head is trained on.
        first_timestep: of the 1000, the noisiest that the chain visits, T - 1 .. 999. It begins there with pure noise,
            although below 999 the training process still has some of the token left. Users of short chains begin at
            about 950: from 999 the first step multiplies errors by 316 at T = 100, and by 4,485 at T = 8.

    Raises:
        ValueError: T or the first timestep is out of range.
    """
    if not 2 <= num_steps <= TRAIN_STEPS:
        raise ValueError(f"num_sampling_steps={num_steps} is outside 2..{TRAIN_STEPS}: MAR's default is 100")
    if not num_steps - 1 <= first_timestep < TRAIN_STEPS:
        raise ValueError(
            f"first_timestep={first_timestep} is outside {num_steps - 1}..{TRAIN_STEPS - 1}, of {num_steps} steps"
        )
    stride = first_timestep / (num_steps - 1)
    return respaced(np.round(np.arange(num_steps) * stride).astype(np.int64))


def respaced(timestep_map: np.ndarray) -> Schedule:
    """The cosine schedule of a chain that visits these of the 1000 timesteps, int64 [T], rising."""
    edges = _alpha_bar(np.arange(TRAIN_STEPS + 1) / TRAIN_STEPS)
    train_alphas_cumprod = np.cumprod(1 - np.minimum(1 - edges[1:] / edges[:-1], MAX_BETA))
    alphas_cumprod = train_alphas_cumprod[timestep_map]
    previous = np.append(1.0, alphas_cumprod[:-1])
    betas = 1 - alphas_cumprod / previous
    posterior_variance = betas * (1 - previous) / (1 - alphas_cumprod)
    return Schedule(
        timestep_map=timestep_map,
        betas=betas,
        alphas_cumprod=alphas_cumprod,
        # the posterior variance is 0 at t = 0: its log is replaced by the next one's
        posterior_log_variance_clipped=np.log(np.append(posterior_variance[1], posterior_variance[1:])),
        posterior_mean_coef1=betas * np.sqrt(previous) / (1 - alphas_cumprod),
        posterior_mean_coef2=(1 - previous) * np.sqrt(1 - betas) / (1 - alphas_cumprod),
        sqrt_recip_alphas_cumprod=np.sqrt(1 / alphas_cumprod),
        sqrt_recipm1_alphas_cumprod=np.sqrt(1 / alphas_cumprod - 1),
    )


def table(values: np.ndarray, t: Tensor) -> Tensor:
    """Rows `t` [N] of a schedule table as float32 [N, 1], ready to scale [N, d]."""
    return torch.as_tensor(values, dtype=torch.float32, device=t.device)[t].unsqueeze(-1)


def training_loss(head: torch.nn.Module, x0: Tensor, c: Tensor, t: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Noise-prediction error and variational term of each row (Nichol & Dhariwal 2021, eq. 14-16).

    Args:
        head: maps (x_t [N, d], t [N], c [N, D]) to [N, 2d], noise prediction and variance channel.
        x0: clean tokens [N, d].
        c: conditioning vectors [N, D].
        t: training timesteps [N], 0..999.
        noise: standard normal [N, d].

    Returns:
        (mse [N], vb [N]); vb moves the variance channel only and is in bits per dimension. At t = 0 too it is a KL
        divergence, with the clipped posterior variance: tokens are continuous, so there is nothing to discretise.
    """
    tables = schedule(TRAIN_STEPS)
    signal = table(np.sqrt(tables.alphas_cumprod), t)
    sigma = table(np.sqrt(1 - tables.alphas_cumprod), t)
    x_t = signal * x0 + sigma * noise
    eps, v = head(x_t, t, c).float().chunk(2, dim=-1)
    mse = (eps - noise).square().mean(-1)  # eq. 14

    # KL divergence of the head's Gaussian from the posterior; both means share A x_t
    log_sigma = table(tables.log_sigma_base, t) + table(tables.log_sigma_slope, t) * v  # eq. 15
    true_log_sigma = 0.5 * table(tables.posterior_log_variance_clipped, t)
    mean_gap = table(tables.mean_eps, t) * (eps.detach() - noise)
    variance_ratio = (2 * (true_log_sigma - log_sigma)).exp()
    distance = mean_gap.square() * (-2 * log_sigma).exp()
    kl = log_sigma - true_log_sigma + 0.5 * (variance_ratio + distance - 1)
    return mse, kl.mean(-1) / np.log(2.0)
