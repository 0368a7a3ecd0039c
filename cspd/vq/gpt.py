"""LlamaGen's GPT over VQ tokens of a class or a text (Sun et al. 2024, arXiv 2406.06525); official state-dict names."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cspd.vq.steps import steps


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
        dim, n_layer, n_head: width, depth, attention heads.
        vocab_size: codes. num_classes: classes, the null class comes after them; 0 of a model of texts.
        block_size: L, tokens per image, a square number in raster order.
        multiple_of: the feed-forward width is rounded up to a multiple of it.
        norm_eps: of RMSNorm. rope_base: of the rotary angles.
        prefix_length: inputs before the codes at most, a class or a text's tokens. caption_dim: channels of the latter.
    """

    dim: int = 768
    n_layer: int = 12
    n_head: int = 12
    vocab_size: int = 16384
    block_size: int = 256
    num_classes: int = 1000
    multiple_of: int = 256
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    prefix_length: int = 1
    caption_dim: int = 0

    text_places: ClassVar[bool] = False  # whether inputs of texts are turned by their positions, and codes after them
    row_end: ClassVar[int | None] = None  # a token after each row of codes

    @property
    def key_heads(self) -> int:
        """Attention heads that keys and values have."""
        return self.n_head

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_head

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward layers: two thirds of 4 dim, rounded up."""
        width = 8 * self.dim // 3
        return math.ceil(width / self.multiple_of) * self.multiple_of

    @property
    def grid(self) -> int:
        """Tokens along a side of the image."""
        return round(self.block_size**0.5)


@dataclass(frozen=True)
class CacheView:
    """Where a forward finds the past and leaves its own keys and values.

    Attributes:
        keys, values: of each layer, [rows, heads, columns, head_dim], shared by all sequences, written in place.
        rows: the row of each of B sequences, int64 [B] or a slice, which saves copies.
        columns: where their N inputs go, int64 [B, N], or int64 [N] or a slice if all go to the same columns.
        width: how many columns are looked at, from the first.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    rows: Tensor | slice
    columns: Tensor | slice
    width: int

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values [B, heads, N, head_dim]; returns those that are looked at, [B, heads, width, ...]."""
        return self._update(self.keys[layer], key), self._update(self.values[layer], value)

    def _update(self, cache: Tensor, new: Tensor) -> Tensor:
        new = new.to(cache.dtype)
        if isinstance(self.columns, slice) or (self.columns.dim() == 1 and isinstance(self.rows, slice)):
            cache[self.rows, :, self.columns] = new
        elif isinstance(self.rows, slice):
            cache[self.rows][steps(len(new), new.device).unsqueeze(1), :, self.columns] = new.transpose(1, 2)
        else:
            cache[self.rows.unsqueeze(1), :, self.columns] = new.transpose(1, 2)
        return cache[self.rows, :, : self.width]


@functools.cache
@torch.inference_mode(False)  # an ordinary tensor, which training can use too
def rotary_table(config: GPTConfig, device: torch.device) -> Tensor:
    """cos and sin, float32 [1 + L, head_dim / 2, 2], by position: row and column of the grid; 0 at the class position.

    The zeros are the authors': queries and keys of the class token are zero, so that every token gives it logit 0. It
    is no buffer of a model, since the official files have none.
    """
    half = config.head_dim // 2
    exponent = torch.arange(0, half, 2)[: half // 2].float() / half
    rates = config.rope_base**-exponent
    angle = torch.outer(torch.arange(config.grid).float(), rates)  # [grid, half / 2]

    # the first half of the channels turns with the row, the second with the column
    down = angle.unsqueeze(1).expand(-1, config.grid, -1)
    across = angle.unsqueeze(0).expand(config.grid, -1, -1)
    angles = torch.cat([down, across], dim=-1).flatten(0, 1)
    table = torch.view_as_real(torch.polar(torch.ones_like(angles), angles))
    return torch.cat([torch.zeros_like(table[:1]), table]).to(device)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turns pairs of channels of x [B, N, heads, head_dim] by the angles of table [B or 1, N, head_dim / 2, 2]."""
    pairs, table = x.float().unflatten(-1, (-1, 2)), table.unsqueeze(2)
    if torch.compiler.is_compiling():  # which makes one kernel of real products, and none of complex ones
        (a, b), (cos, sin) = pairs.unbind(-1), table.unbind(-1)
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table))
    return turned.flatten(-2).type_as(x)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).type_as(x)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.n_head, self.layer = config.n_head, layer
        self.wqkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None, cache: CacheView | None) -> Tensor:
        qkv = self.wqkv(x).unflatten(-1, (3 * self.n_head, -1))
        qk, v = qkv.split((2 * self.n_head, self.n_head), dim=-2)
        q, k = rotate(qk, table).chunk(2, dim=-2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if cache is not None:
            k, v = (t.type_as(q) for t in cache.update(self.layer, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and cache is None)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A transformer layer; EAGLE's drafter is one of these too."""

    def __init__(self, config: GPTConfig, layer: int = 0) -> None:
        super().__init__()
        self.attention = Attention(config, layer)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None = None, cache: CacheView | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class _LabelEmbedder(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(config.num_classes + 1, config.dim)

    def forward(self, labels: Tensor) -> Tensor:
        return self.embedding_table(labels).unsqueeze(1)


class _Projection(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.caption_dim, config.dim, bias=False)
        self.fc2 = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class _CaptionEmbedder(nn.Module):
    """`uncond_embedding` is the null caption, in the place of a text's features."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.cap_proj = _Projection(config)
        self.register_buffer("uncond_embedding", torch.zeros(config.prefix_length, config.caption_dim))

    def forward(self, features: Tensor) -> Tensor:
        return self.cap_proj(features)


class GPT(nn.Module):
    """Predicts each VQ token from its class or text and the tokens before it in raster order.

    Inputs are embeddings: of the class, or of every token of a text, at position 0, of code i at position i + 1. The
    output at position i predicts code i; of a text that of its last token does at 0.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.cls_embedding = _CaptionEmbedder(config) if config.caption_dim else _LabelEmbedder(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def table(self, position: Tensor) -> Tensor:
        """cos and sin of positions [...], float32 [..., head_dim / 2, 2]."""
        return rotary_table(self.config, position.device)[position]

    def embed(self, condition: Tensor, tokens: Tensor) -> Tensor:
        """Inputs [B, n + N, dim] of a condition and tokens [B, N].

        The condition is of classes [B] (num_classes is the null class; n = 1), or texts' features [B, n, caption_dim].
        """
        return torch.cat([self.cls_embedding(condition), self.tok_embeddings(tokens)], dim=1)

    def features(
        self, x: Tensor, position: Tensor, mask: Tensor | None = None, cache: CacheView | None = None
    ) -> Tensor:
        """What the output layer reads [B, N, dim] of inputs x [B, N, dim].

        Args:
            position: int64 [B or 1, N], of the inputs.
            mask: bool [B or 1, 1, N, width], True where an input looks; by default at all that the cache's view has, or
                without a cache at itself and those before it.
            cache: the past, and where the inputs' own keys and values go; by default there is no past.
        """
        return self.through(x, self.table(position), mask, cache)

    def through(self, x: Tensor, table: Tensor, mask: Tensor | None = None, cache: CacheView | None = None) -> Tensor:
        """As `features`, of inputs whose positions have the rotary angles of `table`."""
        for layer in self.layers:
            x = layer(x, table, mask, cache)
        return self.norm(x)

    def forward(self, condition: Tensor, tokens: Tensor, present: Tensor | None = None) -> Tensor:
        """Logits [B, 1 + N, V] of the tokens after each prefix of tokens [B, N], teacher-forced; see `embed`.

        Args:
            present: bool [B, n], False where texts are padded, at their left; by default none is.
        """
        inputs = self.embed(condition, tokens)
        last = inputs.shape[1] - tokens.shape[1] - 1  # of the condition
        position = (torch.arange(inputs.shape[1], device=tokens.device) - last).clamp(min=0)
        mask = None if present is None else seen(F.pad(present, (0, tokens.shape[1]), value=True)).unsqueeze(1)
        features = self.features(inputs, position.unsqueeze(0), mask)
        return self.output(features[:, last:])


def seen(present: Tensor) -> Tensor:
    """bool [B, N, N]: inputs look at those before them that are `present`, bool [B, N], and at themselves."""
    own = torch.eye(present.shape[1], dtype=torch.bool, device=present.device)
    before = torch.ones_like(own).tril()
    return before & present.unsqueeze(1) | own
