"""The diffusion head: a residual MLP whose layers are modulated by timestep and condition (adaLN).

Source: MAR (arXiv 2406.11838), section 3.2 and appendix; the state-dict names are the official ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYER_NORM_EPS = 1e-6
TILE = 4  # rows that a matrix product of the CPU computes together; what is left over is summed in another order


def filled(rows: int) -> int:
    """The number of rows in whole tiles: a row is then rounded alike in a small batch and in a large one."""
    return -(-rows // TILE) * TILE


def fill(values: Tensor) -> Tensor:
    """Rows [..., R, n] with rows of zeros after them, up to whole tiles."""
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
    """x + gate * MLP(LN(x) modulated by shift and scale)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        # weights stay in float32; a CPU normalises bfloat16 by them as it is, CUDA wants one type
        normed = self.in_ln(x if x.device.type == "cpu" else x.to(self.in_ln.weight.dtype))
        h = self.mlp(torch.addcmul(shift, normed, scale))
        return torch.addcmul(x, gate, h)


class FinalLayer(nn.Module):
    """Modulated LayerNorm without affine parameters, then a linear map to the outputs."""

    def __init__(self, width: int, out_channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        x = F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPS)
        return self.linear(torch.addcmul(shift, x, scale))


class Head(nn.Module):
    """Maps a noisy token, a timestep and a condition to (eps, v).

    What does not depend on the noisy token is in `modulations`: a sampler knows all its timesteps in advance, and
    computes a whole chain's modulations in a few large matrix products instead of many small ones.

    Args:
        channels: d, the token's dimension.
        width, depth: of the residual MLP.
        cond_dim: D, the dimension of the condition z.

    Attributes:
        fused: what `denoise` calls in place of its layers, with the same arguments, where a device has kernels for it.
    """

    FLOAT32 = ("time_embed", "cond_embed")  # under every precision: all of a chain's steps rest on them

    def __init__(self, channels: int, width: int, depth: int, cond_dim: int) -> None:
        super().__init__()
        self.channels, self.width = channels, width
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
            nn.init.normal_(layer.weight, std=0.02)
        # every block starts as the identity and the head at zero
        for layer in [*self.res_blocks, self.final_layer]:
            nn.init.zeros_(layer.adaLN_modulation[1].weight)
        nn.init.zeros_(self.final_layer.linear.weight)

    def modulations(self, t_embed: Tensor, c_embed: Tensor, with_blocks: bool = True) -> list[Tensor]:
        """(shift, 1 + scale, gate) of every block and (shift, 1 + scale) of the last layer, each one [..., 3|2 width].

        Args:
            t_embed: `time_embed(t)`; c_embed: `cond_embed(z)`; broadcast against each other, [..., width].
            with_blocks: otherwise of the last layer alone.
        """
        y = F.silu(t_embed + c_embed).to(self.final_layer.linear.weight.dtype)  # once for all layers
        modulations = []
        for layer in [*(self.res_blocks if with_blocks else []), self.final_layer]:
            modulation = layer.adaLN_modulation[1](y)
            modulation[..., self.width : 2 * self.width] += 1
            modulations.append(modulation)
        return modulations

    def split(self, modulations: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """What `modulations` returned, as the tuples that `denoise` takes; views."""
        return [modulation.view(*modulation.shape[:-1], -1, self.width).unbind(-2) for modulation in modulations]

    def denoise(self, x: Tensor, modulations: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """(eps, v) [..., 2d] of noisy tokens x [..., d] under split modulations."""
        if self.fused is not None and not torch.compiler.is_compiling():  # a compiler fuses by itself
            return self.fused(self, x, modulations)
        return self._through_layers(x, modulations)

    def _through_layers(self, x: Tensor, modulations: Sequence[tuple[Tensor, ...]]) -> Tensor:
        return self.final_layer(self.through_blocks(self.input_proj(x), modulations), *modulations[-1])

    def through_blocks(self, x: Tensor, modulations: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """The last block's output [..., width] of the first's input x [..., width]."""
        for block, modulation in zip(self.res_blocks, modulations):
            x = block(x, *modulation)
        return x

    def forward(self, x: Tensor, t: Tensor, c: Tensor) -> Tensor:
        """(eps, v) [N, 2d] of noisy tokens x [N, d] at timesteps t [N] (0..999) under conditions c [N, D]."""
        modulations = self.modulations(self.time_embed(t), self.cond_embed(c))
        return self._through_layers(x, self.split(modulations))


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
    """Holds the head under the official checkpoint's name, `diffloss.net`."""

    def __init__(self, channels: int, width: int, depth: int, cond_dim: int) -> None:
        super().__init__()
        self.net = Head(channels, width, depth, cond_dim)
