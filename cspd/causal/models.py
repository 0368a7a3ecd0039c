"""SphereAR and BitDance: a causal transformer over continuous tokens, and the authors' own sampler.

Sources: SphereAR (arXiv 2509.24335), BitDance (arXiv 2602.14041). State-dict names are the official ones, so that
official files load as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cspd.causal.head import DiffHead, times
from cspd.heads.chain import LEAST_TO_GO
from cspd.transformer import CacheView, RMSNorm, SwiGLU, rotate

NORM_EPS = 1e-6
MULTIPLE_OF = 256  # the feed-forward width is rounded up to a multiple of this
ROPE_BASE = 10000.0


@dataclass(frozen=True)
class CausalConfig:
    """Sizes of a model.

    Attributes:
        dim, n_layer, n_head: width, depth and attention heads of the transformer.
        diff_dim, diff_layers, diff_adanln_layers: width and depth of the head, and how many modulations its blocks
            share.
        latent_dim: channels of a cell of the latent.
        binary: BitDance: cells are signs, and the head predicts the clean cell. Otherwise SphereAR: cells lie on a
            sphere, and the head predicts the velocity.
        parallel_num: P, the cells of a token: a square patch that is generated at once.
        side: cells along a side of the latent. stride: pixels per cell, along a side.
        cls_token_num: inputs of a class. num_classes: classes; index `num_classes` is no class.
    """

    dim: int = 768
    n_layer: int = 24
    n_head: int = 12
    diff_dim: int = 768
    diff_layers: int = 6
    diff_adanln_layers: int = 2
    latent_dim: int = 16
    binary: bool = False
    parallel_num: int = 1
    side: int = 16
    stride: int = 16
    cls_token_num: int = 16
    num_classes: int = 1000

    @property
    def patch(self) -> int:
        """Cells along a side of a token's patch."""
        return math.isqrt(self.parallel_num)

    @property
    def num_cells(self) -> int:
        return self.side * self.side

    @property
    def seq_len(self) -> int:
        """L, tokens per image."""
        return self.num_cells // self.parallel_num

    @property
    def token_dim(self) -> int:
        """d, numbers of a token: those of its cells, one cell after the other."""
        return self.parallel_num * self.latent_dim

    @property
    def class_num(self) -> int:
        """As `mar.model.MARConfig` calls the number of classes."""
        return self.num_classes

    @property
    def img_size(self) -> int:
        """Pixels along a side of the image."""
        return self.side * self.stride

    @property
    def num_columns(self) -> int:
        """Inputs of an image: of the class, a patch's queries, and all cells but those of the last token."""
        return self.cls_token_num - 1 + self.num_cells


# The transformer


def rotary_angles(side: int, head_dim: int, num_before: int) -> Tensor:
    """cos and sin of rotary angles, float32 [num_before + side * side, head_dim / 2, 2].

    The first quarter of the channels encodes the column of a cell, the second its row, both counted from the middle of
    the first cell as 1.5. The inputs before the cells are at position (0, 0).
    """
    half = head_dim // 2
    exponent = torch.arange(0, half, 2)[: half // 2].float() / half
    rates = 1.0 / ROPE_BASE**exponent
    centre = torch.arange(side, dtype=torch.float32) + 1.5
    across = torch.outer(centre, rates)
    x = across.unsqueeze(0).expand(side, -1, -1)
    y = across.unsqueeze(1).expand(-1, side, -1)
    of_cells = torch.cat([x, y], dim=-1).flatten(0, 1)
    angles = F.pad(of_cells, (0, 0, num_before, 0))
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


class CausalAttention(nn.Module):
    def __init__(self, dim: int, n_head: int, layer: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.layer = layer
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None, cache: CacheView | None) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.n_head, -1)).unbind(-3)
        q = rotate(q, table).transpose(1, 2)
        k = rotate(k, table).transpose(1, 2)
        v = v.transpose(1, 2)
        if cache is not None:
            keys, values = cache.update(self.layer, k, v)
            k = keys.type_as(q)
            v = values.type_as(q)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(out.transpose(1, 2).flatten(2))


class CausalBlock(nn.Module):
    """A transformer layer; without a mask and a cache all inputs look at each other."""

    def __init__(self, dim: int, n_head: int, layer: int = 0) -> None:
        super().__init__()
        hidden_dim = math.ceil(int(8 * dim / 3) / MULTIPLE_OF) * MULTIPLE_OF
        self.attention = CausalAttention(dim, n_head, layer)
        self.feed_forward = SwiGLU(dim, hidden_dim, dim)
        self.attention_norm = RMSNorm(dim, NORM_EPS)
        self.ffn_norm = RMSNorm(dim, NORM_EPS)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None = None, cache: CacheView | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class Causal(nn.Module):
    """Predicts the condition z of each token from a class and the tokens before it in raster order.

    Inputs are embeddings, one for each cell. Column c of their sequence has, from 0 on: the inputs of the class; if a
    token is a patch, P - 1 learned queries; the cells of the tokens, patch by patch. The last input of the class, with
    the queries, predicts token 0; the P cells of token i predict token i + 1, and look at each other.
    """

    def __init__(self, config: CausalConfig) -> None:
        super().__init__()
        self.config = config
        dim, num_cells = config.dim, config.parallel_num
        self.cls_embedding = nn.Embedding(config.num_classes + 1, dim * config.cls_token_num)
        if num_cells > 1:
            self.query_token = nn.Parameter(0.02 * torch.randn(1, num_cells - 1, dim))
        if config.binary:
            self.proj_in: nn.Module = SwiGLU(config.latent_dim, int(1.5 * dim), dim, bias=True)
        else:
            self.proj_in = nn.Linear(config.latent_dim, dim)
        self.emb_norm = RMSNorm(dim, NORM_EPS)
        self.layers = nn.ModuleList(CausalBlock(dim, config.n_head, i) for i in range(config.n_layer))
        self.norm = RMSNorm(dim, NORM_EPS)
        self.pos_for_diff = nn.Embedding(config.num_cells, dim)
        self.head = DiffHead(
            config.latent_dim,
            config.diff_dim,
            config.diff_layers,
            config.dim,
            config.diff_adanln_layers,
            config.parallel_num,
            config.binary,
        )

    def table(self, column: Tensor) -> Tensor:
        """cos and sin of columns [...], float32 [..., head_dim / 2, 2]."""
        return _rotary_table(self.config, column.device)[column]

    def class_inputs(self, labels: Tensor) -> Tensor:
        """The inputs before token 0 [B, cls_token_num + P - 1, dim] of classes [B]; `num_classes` is no class."""
        inputs = self.cls_embedding(labels).unflatten(-1, (self.config.cls_token_num, -1))
        if self.config.parallel_num > 1:
            inputs = torch.cat([inputs, self.query_token.expand(len(labels), -1, -1)], dim=1)
        return inputs

    def token_inputs(self, tokens: Tensor) -> Tensor:
        """The inputs [..., P, dim] of tokens [..., d]."""
        return self.proj_in(tokens.unflatten(-1, (self.config.parallel_num, -1)))

    def mask(self, column: Tensor, width: int) -> Tensor:
        """Which of the first `width` columns the inputs in columns [..., N] look at: bool [..., N, width].

        An input of the class looks at itself and those before it. From the last one on, inputs are in blocks of P that
        predict one token, and look at their whole block too.
        """
        first, num_cells = self.config.cls_token_num - 1, self.config.parallel_num
        end_of_block = first + ((column - first) // num_cells + 1) * num_cells - 1
        last = torch.where(column < first, column, end_of_block)
        return torch.arange(width, device=column.device) <= last.unsqueeze(-1)

    def features(self, inputs: Tensor, column: Tensor, mask: Tensor, cache: CacheView | None = None) -> Tensor:
        """Features [B, N, dim] of inputs [B, N, dim] in columns [B or 1, N].

        Args:
            mask: bool [N, width] or [B, 1, N, width], see `mask`. cache: keys and values of earlier inputs; by default
                the inputs look at each other only.
        """
        table = self.table(column)
        x = self.emb_norm(inputs)
        for layer in self.layers:
            x = layer(x, table, mask, cache)
        return self.norm(x)

    def condition(self, features: Tensor, token: Tensor) -> Tensor:
        """z [B, P dim] of tokens [B], their index in raster order, from features [B, P, dim]."""
        num_cells = self.config.parallel_num
        cell = token.unsqueeze(-1) * num_cells + torch.arange(num_cells, device=token.device)
        return (features + self.pos_for_diff(cell)).flatten(1)

    def forward(self, labels: Tensor, tokens: Tensor) -> Tensor:
        """z [B, N + 1, P dim] of the tokens after each prefix of tokens [B, N, d], N < L, given classes [B]."""
        count, num_cells = tokens.shape[1] + 1, self.config.parallel_num
        inputs = torch.cat([self.class_inputs(labels), self.token_inputs(tokens).flatten(1, 2)], dim=1)
        column = torch.arange(inputs.shape[1], device=labels.device)
        features = self.features(inputs, column.unsqueeze(0), self.mask(column, len(column)))
        blocks = features[:, -count * num_cells :].unflatten(1, (count, num_cells))
        token = torch.arange(count, device=labels.device).repeat(len(labels))
        return self.condition(blocks.flatten(0, 1), token).unflatten(0, (len(labels), count))

    def finish(self, x: Tensor) -> Tensor:
        """Tokens [..., d] from the ends x [..., d] of their chains: on the sphere of radius sqrt(d), or signs."""
        if self.config.binary:
            return x.sign()
        return F.normalize(x, dim=-1, eps=1e-7) * self.config.latent_dim**0.5

    def unpatchify(self, tokens: Tensor) -> Tensor:
        """Latents [B, latent_dim, side, side] of tokens [B, L, d]."""
        patch, across = self.config.patch, self.config.side // self.config.patch
        cells = tokens.reshape(len(tokens), across, across, patch, patch, self.config.latent_dim)
        return cells.permute(0, 5, 1, 3, 2, 4).reshape(len(tokens), -1, self.config.side, self.config.side)

    def patchify(self, latents: Tensor) -> Tensor:
        """Tokens [B, L, d] of latents [B, latent_dim, side, side]."""
        patch = self.config.patch
        cells = latents.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))
        return cells.permute(0, 2, 4, 3, 5, 1).reshape(len(latents), self.config.seq_len, -1)


@functools.cache
@torch.inference_mode(False)  # an ordinary tensor, which training can use too
def _rotary_table(config: CausalConfig, device: torch.device) -> Tensor:
    num_before = config.cls_token_num + config.parallel_num - 1
    table = rotary_angles(config.side, config.dim // config.n_head, num_before)
    before, of_cells = table.split([num_before, config.num_cells])
    patch, across = config.patch, config.side // config.patch
    by_patch = of_cells.unflatten(0, (across, patch, across, patch)).transpose(1, 2).flatten(0, 3)
    return torch.cat([before, by_patch]).to(device)


# The authors' own sampler: `ar` must agree with it, and its speed is compared with it.
#
# All sequences advance in lockstep with one key-value cache, and one forward pass has both guidance branches. At token
# 0 the linear guidance scale is 1, so the authors draw the first token of either branch apart, unguided; from then on
# the unconditional branch is given the conditional one's tokens, but keeps its own first.

# (index of the token in raster order, [T + 1, rows, d]) -> x_0, and the noise of each step
Normals = Callable[[int, tuple[int, ...]], Tensor]


def guidance_scale(cfg: float, cfg_schedule: str, token: int | np.ndarray, seq_len: int) -> Any:
    """s of tokens, their index in raster order: linear from 1 to almost cfg, or constant."""
    return 1 + (cfg - 1) * token / seq_len if cfg_schedule == "linear" else cfg + 0 * token


def draw_published(
    head: DiffHead, z: Tensor, scale: float, num_steps: int, temperature: float, normals: Tensor
) -> Tensor:
    """Ends of chains [R, d] of conditions z [G, R, cond_dim], by the formulas of the stochastic differential equation.

    Args:
        normals: [num_steps + 1, R, d], x_0 and the noise of each step.
    """
    x = normals[0]
    t, dt = times(num_steps, head.binary)
    for step in range(num_steps + 1):
        now = torch.full((len(z) * len(x),), float(t[step]), device=z.device)
        out = head(x.repeat(len(z), 1), now, z.flatten(0, 1)).float().unflatten(0, (len(z), -1))
        velocity = (out - x) / max(1 - float(t[step]), LEAST_TO_GO) if head.binary else out
        v = velocity[0] if len(z) == 1 else velocity[1] + scale * (velocity[0] - velocity[1])
        if step == num_steps:
            return x + v * float(dt[step])
        score = (t[step] * v - x) / (1 - t[step])
        drift = v + (1 - t[step]) * score
        sigma = math.sqrt(2 * (1 - t[step]) * dt[step])
        x = x + drift * float(dt[step]) + temperature * sigma * normals[step + 1]
    raise AssertionError("unreachable")


@torch.inference_mode()
def sample_published(
    model: Causal,
    labels: Tensor,
    *,
    cfg: float = 1.0,
    cfg_schedule: str = "linear",
    temperature: float = 1.0,
    num_sampling_steps: int = 100,
    normals: Normals | None = None,
    draw: Callable[..., Tensor] = draw_published,
) -> Tensor:
    """Samples one batch, all sequences in lockstep.

    Args:
        labels: int64 [B]. Others as in `cspd.Request`.
        normals: by default torch's global generator. draw: with the arguments and the result of `draw_published`.

    Returns:
        Tokens, float32 [B, L, d].
    """
    config, device, count = model.config, labels.device, len(labels)
    normals = normals or (lambda token, shape: torch.randn(shape, device=device))
    guided = cfg != 1
    classes = torch.cat([labels, torch.full_like(labels, config.num_classes)]) if guided else labels
    shape = config.n_layer, len(classes), config.n_head, config.num_columns, config.dim // config.n_head
    keys, values = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    tokens: list[Tensor] = []
    inputs, num_cells, first = model.class_inputs(classes), config.parallel_num, 0
    for token in range(config.seq_len):
        end = first + inputs.shape[1]
        column = torch.arange(first, end, device=device)
        cache = CacheView(keys.unbind(), values.unbind(), slice(0, len(classes)), slice(first, end), end)
        features = model.features(inputs, column.unsqueeze(0), model.mask(column, end), cache)[:, -num_cells:]
        z = model.condition(features, torch.full_like(classes, token))
        scale = guidance_scale(cfg, cfg_schedule, token, config.seq_len)
        branches = 2 if guided and scale != 1 else 1
        z = z.unflatten(0, (branches, -1))
        noise = normals(token, (num_sampling_steps + 1, z.shape[1], config.token_dim))
        drawn = model.finish(draw(model.head, z, scale, num_sampling_steps, temperature, noise))
        if branches == 2:
            drawn = drawn.repeat(2, 1)
        tokens.append(drawn[:count])
        inputs, first = model.token_inputs(drawn), end
    return torch.stack(tokens, dim=1)
