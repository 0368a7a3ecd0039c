"""The head of SphereAR and BitDance, and its chain; with several cells in a token it is a transformer over them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cspd.heads.chain import EulerMaruyama, euler_maruyama
from cspd.transformer import SwiGLU
from mar.head import LAYER_NORM_EPS, Modulations, TimestepEmbedder

# The head's chain: an Euler-Maruyama scheme (`cspd.heads.chain`). SphereAR's head gives the velocity; BitDance's gives
# the clean token.

LAST_STEP = {False: 0.04, True: 0.05}  # h, by `CausalConfig.binary`
TIME_FACTOR = 1000  # of t in the head's embedding


def times(num_steps: int, binary: bool) -> tuple[np.ndarray, np.ndarray]:
    """(t, dt) of each step, float32 [num_steps + 1]; t is summed up as in the authors' code, which rounds it."""
    last = np.float32(LAST_STEP[binary])
    if binary:
        dt = torch.linspace(0, 1 - LAST_STEP[binary], num_steps + 1).diff().numpy()
    else:
        dt = np.full(num_steps, (1 - LAST_STEP[binary]) / num_steps, np.float32)
    before = np.cumsum(dt, dtype=np.float32)[:-1]
    t = np.concatenate([np.zeros(1, np.float32), before, 1 - last[None]])
    return t, np.append(dt, last)


@functools.cache  # forever, as `mar.head.schedule`
def head_chain(num_steps: int, binary: bool) -> EulerMaruyama:
    """The chain of `num_steps` noisy steps and the last one, which adds no noise; binary: as in `CausalConfig`."""
    return euler_maruyama(*times(num_steps, binary), clean=binary, time_factor=TIME_FACTOR)


# The head: a residual MLP, or with patches a transformer over a patch's cells, modulated by time and condition.

HEAD_DIM = 64  # of the attention inside a head


class _ByCell(nn.Linear):
    """A linear map of each cell's part of [..., P in_features] to [..., P out_features]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(-1, (-1, self.in_features))).flatten(-2)


class _CellAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wqkv = nn.Linear(width, 3 * width)
        self.wo = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(-1, (3, -1, HEAD_DIM)).transpose(-4, -2).unbind(-3)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.wo(out.transpose(-3, -2).flatten(-2))


class FlowResBlock(SwiGLU):
    """A block of SphereAR's and BitDance's head with one cell in a token: modulations (1 + scale, shift, gate)."""

    num_modulations = 3

    def __init__(self, width: int) -> None:
        super().__init__(width, int(1.5 * width), width, bias=True)
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return x + gate * super().forward(_modulated(self.norm, x, scale, shift))


class TransBlock(SwiGLU):
    """A block of BitDance's head with several cells in a token: they attend to each other first."""

    num_modulations = 6

    def __init__(self, width: int) -> None:
        super().__init__(width, int(1.5 * width), width, bias=True)
        self.norm1 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.attn = _CellAttention(width)
        self.norm2 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor, *modulations: Tensor) -> Tensor:  # type: ignore[override]
        scale, shift, gate, scale_2, shift_2, gate_2 = modulations
        x = x + gate * self.attn(_modulated(self.norm1, x, scale, shift))
        return x + gate_2 * super().forward(_modulated(self.norm2, x, scale_2, shift_2))


def _modulated(norm: nn.LayerNorm, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Norms have float32 weights; on a GPU they want such an input too."""
    normed = norm(x.to(norm.weight.dtype))
    return (normed * scale + shift).to(x.dtype)


class _FinalLayer(nn.Module):
    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.ada_ln_modulation = nn.Linear(width, 2 * width)
        self.linear = nn.Linear(width, channels)


class _Net(nn.Module):
    """The head's layers under their official names."""

    FLOAT32 = ("time_embed", "cond_embed")  # under every precision, since all steps of a chain depend on them

    def __init__(self, channels: int, width: int, depth: int, cond_dim: int, num_modulations: int, block: Any) -> None:
        super().__init__()
        self.time_embed = TimestepEmbedder(width)
        self.cond_embed = _ByCell(cond_dim, width)
        self.input_proj = nn.Linear(channels, width)
        self.res_blocks = nn.ModuleList(block(width) for _ in range(depth))
        size = block.num_modulations * width
        self.ada_ln_blocks = nn.ModuleList(nn.Linear(width, size) for _ in range(num_modulations))
        self.final_layer = _FinalLayer(width, channels)


class DiffHead(nn.Module):
    """The head with the interface of `mar.head.Head`; its variance channel is 0, since the chain's sigma is fixed.

    Args:
        channels, cond_dim: numbers of a cell and of its condition. width, depth: of the layers.
        num_modulations: how many modulations the blocks share. num_cells: P. binary: as in `CausalConfig`.

    Attributes:
        channels: d. width: of the condition's embedding, P times the width of the layers. cond_dim: numbers of z.
        fused: None: there are no kernels for it.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        depth: int,
        cond_dim: int,
        num_modulations: int,
        num_cells: int = 1,
        binary: bool = False,
    ) -> None:
        super().__init__()
        block = FlowResBlock if num_cells == 1 else TransBlock
        self.net = _Net(channels, width, depth, cond_dim, num_modulations, block)
        self.binary, self.num_cells = binary, num_cells
        self.channels, self.width, self.cond_dim = num_cells * channels, num_cells * width, num_cells * cond_dim
        self.fused = None

    @property
    def res_blocks(self) -> nn.ModuleList:
        return self.net.res_blocks  # type: ignore[return-value]

    def time_embed(self, t: Tensor) -> Tensor:
        """Embeddings [N, width / P] of 1000 t [N]."""
        return self.net.time_embed(t)

    def cond_embed(self, z: Tensor) -> Tensor:
        """Embeddings [..., width] of conditions z [..., cond_dim]."""
        return self.net.cond_embed(z)

    def schedule(self, num_steps: int, first_timestep: int | None = None) -> EulerMaruyama:
        """The chain of `num_steps` noisy steps and the last one; it begins at t = 0, whatever `first_timestep` is."""
        return head_chain(num_steps, self.binary)

    def modulations(self, t_embed: Tensor, c_embed: Tensor) -> list[Tensor]:
        """(1 + scale, shift, gate) of the blocks, which share them, and (1 + scale, shift) of the last layer.

        Args:
            t_embed: `time_embed(t)`; c_embed: `cond_embed(z)`; their leading dimensions broadcast.
        """
        y = t_embed.unsqueeze(-2) + c_embed.unflatten(-1, (self.num_cells, -1))
        y = F.silu(y).to(self.net.final_layer.linear.weight.dtype)
        modulations = []
        for layer in [*self.net.ada_ln_blocks, self.net.final_layer.ada_ln_modulation]:
            modulation = layer(y).unflatten(-1, (-1, y.shape[-1]))
            modulation[..., ::3, :] += 1  # the scales
            modulations.append(modulation.flatten(-3))
        return modulations

    def split(self, modulations: Sequence[Tensor]) -> Modulations:
        """Splits the tensors of `modulations` into the tuples that `denoise` takes; views [..., P, width / P]."""
        shape = self.num_cells, -1, self.width // self.num_cells
        return [modulation.unflatten(-1, shape).unbind(-2) for modulation in modulations]

    def denoise(self, x: Tensor, modulations: Modulations) -> Tensor:
        """The output and a variance channel of 0, [..., 2d], of noisy tokens x [..., d] under split modulations."""
        net, (*shared, (scale, shift)) = self.net, modulations
        x = x.unflatten(-1, (self.num_cells, -1)).to(net.input_proj.weight.dtype)
        x = net.input_proj(x)
        blocks_of_each = len(net.res_blocks) // len(shared)
        for i, block in enumerate(net.res_blocks):
            x = block(x, *shared[i // blocks_of_each])
        normed = F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPS)
        out = net.final_layer.linear(normed * scale + shift).flatten(-2)
        return torch.cat([out, torch.zeros_like(out)], dim=-1)

    def ready(self) -> DiffHead:
        """As `mar.head.Head.ready`."""
        return self

    def forward(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        """The output [N, d] at noisy tokens x [N, d], times t [N] in 0..1 and conditions z [N, cond_dim]."""
        modulations = self.modulations(self.time_embed(TIME_FACTOR * t), self.cond_embed(z))
        return self.denoise(x, self.split(modulations))[..., : self.channels]
