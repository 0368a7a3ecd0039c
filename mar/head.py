"""MAR's diffusion head, and the schedule of its chain."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

# The diffusion process of MAR's head: a cosine schedule of 1000 steps, respaced to T.
#
# Sources: Nichol & Dhariwal 2021 (cosine schedule, learned variance), MAR (arXiv 2406.11838). All tables are float64:
# the first denoising step multiplies errors by 316 at T = 100, so they are rounded only where they are used.

TRAIN_STEPS = 1000
MAX_BETA = 0.999


@dataclass(frozen=True, eq=False)
class DiffusionSchedule:
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

    @property
    def held_x(self) -> np.ndarray:
        """The weight of x in the quantity that a frozen draft holds, which is eps."""
        return np.zeros(len(self))

    @property
    def held_eps(self) -> np.ndarray:
        """The weight of eps in it."""
        return np.ones(len(self))

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


@functools.cache  # forever: constants on devices are cached for each one, by identity
def schedule(num_steps: int, first_timestep: int = TRAIN_STEPS - 1) -> DiffusionSchedule:
    """The cosine schedule respaced to `num_steps` evenly strided steps.

    Args:
        num_steps: T, from 2 to 1000; T = 1000 is the process the head is trained on.
        first_timestep: the noisiest of the 1000 timesteps that the chain visits, T - 1 .. 999. The chain begins there
            with pure noise, although below 999 the training process still has a part of the token. Short chains should
            begin at about 950: from 999 the first step multiplies errors by 316 at T = 100, and by 4,485 at T = 8.

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


def respaced(timestep_map: np.ndarray) -> DiffusionSchedule:
    """The cosine schedule of a chain that visits the given timesteps of the 1000, int64 [T], increasing."""
    edges = _alpha_bar(np.arange(TRAIN_STEPS + 1) / TRAIN_STEPS)
    train_alphas_cumprod = np.cumprod(1 - np.minimum(1 - edges[1:] / edges[:-1], MAX_BETA))
    alphas_cumprod = train_alphas_cumprod[timestep_map]
    previous = np.append(1.0, alphas_cumprod[:-1])
    betas = 1 - alphas_cumprod / previous
    posterior_variance = betas * (1 - previous) / (1 - alphas_cumprod)
    return DiffusionSchedule(
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


# The diffusion head: a residual MLP whose layers are modulated by timestep and condition (adaLN).
#
# Source: MAR (arXiv 2406.11838), section 3.2 and appendix; the state-dict names are the official ones.

LAYER_NORM_EPS = 1e-6
TILE = 4  # rows that a CPU's matrix product computes together; it sums the remaining rows in another order


def filled(rows: int) -> int:
    """The number of rows rounded up to whole tiles, so that a row is rounded alike in small and large batches."""
    return -(-rows // TILE) * TILE


def fill(values: Tensor) -> Tensor:
    """Rows [..., R, n], padded with rows of zeros to whole tiles."""
    rows = values.shape[-2]
    return values if rows % TILE == 0 else F.pad(values, (0, 0, 0, filled(rows) - rows))


class TimestepEmbedder(nn.Module):
    """Sinusoidal features of a timestep, then a two-layer MLP."""

    def __init__(self, width: int, frequencies: int = 256) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))
        self.frequencies = frequencies

    def forward(self, t: Tensor) -> Tensor:
        """Timesteps t [N] (0..999) to embeddings [N, width]."""
        half = self.frequencies // 2
        index = torch.arange(half, dtype=torch.float32, device=t.device)
        rates = torch.exp(-math.log(10000.0) * index / half)
        angles = t.float().unsqueeze(-1) * rates
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1))


class ResBlock(nn.Module):
    """Weights of a residual block, see `ReadyHead.through_blocks`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))


class FinalLayer(nn.Module):
    """Modulated LayerNorm without affine parameters, then a linear map to the outputs."""

    def __init__(self, width: int, out_channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        normed = F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPS)
        return self.linear(torch.addcmul(shift, normed, scale))


Modulations = Sequence[
    tuple[Tensor, ...]
]  # (shift, 1 + scale, gate) of every block, (shift, 1 + scale) of the last layer


class Head(nn.Module):
    """Maps a noisy token, a timestep and a condition to (eps, v).

    `modulations` has everything that does not depend on the noisy token. A sampler knows all its timesteps in advance,
    so it computes the modulations of a whole chain in a few large matrix products instead of many small ones.

    Args:
        channels: d, the token's dimension.
        width, depth: of the residual MLP.
        cond_dim: D, the dimension of the condition z.

    Attributes:
        fused: a function that `denoise` calls instead of its layers, or None; set if the device has kernels for it.
    """

    FLOAT32 = ("time_embed", "cond_embed")  # under every precision, since all steps of a chain depend on them
    schedule = staticmethod(schedule)  # of its chains

    def __init__(self, channels: int, width: int, depth: int, cond_dim: int) -> None:
        super().__init__()
        self.channels, self.width, self.cond_dim = channels, width, cond_dim
        self.time_embed = TimestepEmbedder(width)
        self.cond_embed = nn.Linear(cond_dim, width)
        self.input_proj = nn.Linear(channels, width)
        self.res_blocks = nn.ModuleList(ResBlock(width) for _ in range(depth))
        self.final_layer = FinalLayer(width, 2 * channels)
        self.fused: Callable[..., Tensor] | None = None
        self._init_weights()

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for layer in (self.time_embed.mlp[0], self.time_embed.mlp[2]):
            nn.init.normal_(layer.get_parameter("weight"), std=0.02)
        # every block starts as the identity and the head at zero
        for layer in [*self.res_blocks, self.final_layer]:
            nn.init.zeros_(layer.adaLN_modulation[1].weight)
        nn.init.zeros_(self.final_layer.linear.weight)

    def modulations(self, t_embed: Tensor, c_embed: Tensor, with_blocks: bool = True) -> list[Tensor]:
        """(shift, 1 + scale, gate) of every block and (shift, 1 + scale) of the last layer, each one [..., 3|2 width].

        Args:
            t_embed: `time_embed(t)`; c_embed: `cond_embed(z)`; broadcast against each other, [..., width].
            with_blocks: False computes only those of the last layer.
        """
        y = F.silu(t_embed + c_embed).to(self.final_layer.linear.weight.dtype)  # once for all layers
        modulations = []
        for layer in [*(self.res_blocks if with_blocks else []), self.final_layer]:
            modulation = layer.adaLN_modulation[1](y)
            modulation[..., self.width : 2 * self.width] += 1
            modulations.append(modulation)
        return modulations

    def split(self, modulations: Sequence[Tensor]) -> Modulations:
        """Splits the tensors of `modulations` into the tuples that `denoise` takes; views."""
        return [modulation.view(*modulation.shape[:-1], -1, self.width).unbind(-2) for modulation in modulations]

    def denoise(self, x: Tensor, modulations: Modulations) -> Tensor:
        """(eps, v) [..., 2d] of noisy tokens x [..., d] under split modulations."""
        return self.ready().denoise(x, modulations)

    def ready(self) -> ReadyHead:
        """The head for many calls in a row."""
        return ReadyHead(self)

    def forward(self, x: Tensor, t: Tensor, c: Tensor) -> Tensor:
        """(eps, v) [N, 2d] of noisy tokens x [N, d] at timesteps t [N] (0..999) under conditions c [N, D]."""
        modulations = self.modulations(self.time_embed(t), self.cond_embed(c))
        return self.ready().through_layers(x, self.split(modulations))


class ReadyHead:
    """A head whose weights were looked up: in a module this takes as long as the products of a few rows do.

    It is for one chain, since it does not follow a head that is moved or loaded again.
    """

    def __init__(self, head: Head) -> None:
        self.head = head
        self._enter = _weights(head.input_proj)
        self._blocks = []
        for module in head.res_blocks:
            block = cast("ResBlock", module)
            first, second = cast("nn.Linear", block.mlp[0]), cast("nn.Linear", block.mlp[2])
            self._blocks.append((*_weights(block.in_ln), *_weights(first), *_weights(second)))
        self.leave = head.final_layer

    def denoise(self, x: Tensor, modulations: Modulations) -> Tensor:
        """As `Head.denoise`."""
        fused = self.head.fused
        if fused is not None and not torch.compiler.is_compiling():  # a compiler fuses by itself
            return fused(self.head, x, modulations)
        return self.through_layers(x, modulations)

    def through_layers(self, x: Tensor, modulations: Modulations) -> Tensor:
        """`denoise` by PyTorch's operations."""
        end = self.through_blocks(self.enter(x), modulations)
        return self.leave(end, *modulations[-1])

    def enter(self, x: Tensor) -> Tensor:
        """The first block's input [..., width]."""
        weight, bias = self._enter
        return F.linear(x.to(weight.dtype), weight, bias)

    def through_blocks(self, x: Tensor, modulations: Modulations) -> Tensor:
        """The last block's output [..., width] of the first's input x: each adds gate * MLP(LN(x) scale + shift)."""
        # norms have float32 weights; a CPU normalises bfloat16 by them as it is, CUDA wants one type
        own_type, type_of_norms = x.dtype, x.dtype if x.device.type == "cpu" else torch.float32
        for block, (shift, scale, gate) in zip(self._blocks, modulations):
            norm_weight, norm_bias, first, first_bias, second, second_bias = block
            normed = F.layer_norm(x.to(type_of_norms), x.shape[-1:], norm_weight, norm_bias, LAYER_NORM_EPS)
            modulated = torch.addcmul(shift, normed, scale).to(own_type)
            hidden = F.silu(F.linear(modulated, first, first_bias), inplace=True)
            x = torch.addcmul(x, gate, F.linear(hidden, second, second_bias))
        return x


def _weights(layer: nn.Linear | nn.LayerNorm) -> tuple[Tensor, Tensor]:
    return layer.weight, layer.bias


def guide(out: Tensor, scale: Tensor | float) -> Tensor:
    """Classifier-free guidance of head outputs.

    Args:
        out: (eps, v) [2N, 2d]; the first N rows conditional, the others unconditional.
        scale: s, a number or [N, 1].

    Returns:
        [N, 2d]: eps_u + s (eps_c - eps_u), and the conditional variance channel.
    """
    conditional, unconditional = out.chunk(2)
    eps_c, v_c = conditional.chunk(2, dim=-1)
    eps_u, _ = unconditional.chunk(2, dim=-1)
    eps = eps_u + scale * (eps_c - eps_u)
    return torch.cat([eps, v_c], dim=-1)


class DiffLoss(nn.Module):
    """Gives the head its name in official checkpoints, `diffloss.net`."""

    def __init__(self, channels: int, width: int, depth: int, cond_dim: int) -> None:
        super().__init__()
        self.net = Head(channels, width, depth, cond_dim)
