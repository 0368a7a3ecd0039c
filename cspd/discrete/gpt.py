"""LlamaGen's modules: the GPT, EAGLE's drafter, the tokenizer, and the sampler as its authors published it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mar.vae import AttnBlock, Downsample, ResnetBlock, Upsample

# Constants that are made once: a round makes no tensor that the round before had too.


def steps(count: int, device: torch.device) -> Tensor:
    """int64 [count]: 0, 1, ..., count - 1. It is everyone's: do not write to it."""
    return torch.arange(count, device=device) if torch.compiler.is_compiling() else _made_once(count, device)


@functools.lru_cache(maxsize=1024)
def _made_once(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(count, device=device)


# LlamaGen's GPT over VQ tokens of a class or a text (Sun et al. 2024, arXiv 2406.06525); official state-dict names.


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


# EAGLE's drafter: a transformer layer that runs ahead of a GPT in its features (Li et al. 2024, arXiv 2401.15077).


class Eagle(nn.Module):
    """Predicts the target's next feature from its last one and the token drawn from that.

    Embeddings and the output layer are the target's own. The input at position i joins the target's feature at
    position i - 1 with the embedding of position i, and stands for the target's feature at position i. Positions are
    LlamaGen's, whatever the target's are: 0 of all a condition's inputs, then those of codes.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.dim, config.dim)
        self.layers = nn.ModuleList([Block(config)])

    def table(self, position: Tensor) -> Tensor:
        """As `GPT.table`."""
        return rotary_table(self.config, position.device)[position]

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        table: Tensor,
        mask: Tensor | None = None,
        cache: CacheView | None = None,
    ) -> Tensor:
        """Predicted features [B, N, dim]; table: rotary angles of the positions; mask, cache as in `GPT.features`."""
        x = self.fc(torch.cat([embeddings, features], dim=-1).to(self.fc.weight.dtype))
        for layer in self.layers:
            x = layer(x, table, mask, cache)
        return x


# LlamaGen's sampler as published, token by token: `ar` is measured against it and must agree with it.
#
# A batch in lockstep with one key-value cache, both halves of guidance in one forward. It calls our modules, so it is
# a baseline for the sampler, not for the layers. Use `cspd` to sample, and this to check and compare.


def distribution(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Token probabilities [B, V] of logits [B, V]: temperature, then the k likeliest, then the least set of mass p."""
    logits = logits / max(temperature, 1e-5)
    if top_k > 0:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        ordered, index = logits.sort(descending=True, stable=True)
        mass = ordered.softmax(-1).cumsum(-1)
        mass_before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=-1)
        dropped = mass_before > top_p
        logits = logits.masked_fill(dropped.scatter(1, index, dropped), -torch.inf)
    return logits.softmax(-1)


def _multinomial(probabilities: Tensor, position: int) -> Tensor:
    return torch.multinomial(probabilities, 1).squeeze(1)


@torch.inference_mode()
def sample_published(
    model: GPT,
    labels: Tensor,
    *,
    cfg: float = 1.0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    draw: Callable[[Tensor, int], Tensor] = _multinomial,
) -> Tensor:
    """Samples one batch, all sequences in lockstep.

    Args:
        labels: int64 [B].
        cfg, temperature, top_k, top_p: as in `cspd.Request`; temperature 0 takes the likeliest token.
        draw: maps token probabilities [B, V] and the position to tokens [B]; torch's global generator by default.

    Returns:
        Codes, int64 [B, L].
    """
    config, device = model.config, labels.device
    guided = cfg != 1
    classes = labels
    if guided:  # the second half of the batch has the null class
        null_class = torch.full_like(labels, config.num_classes)
        classes = torch.cat([labels, null_class])
    rows = slice(0, len(classes))
    shape = (config.n_layer, len(classes), config.n_head, config.block_size, config.head_dim)
    keys = torch.zeros(shape, device=device)
    values = torch.zeros(shape, device=device)
    codes = torch.empty(len(labels), config.block_size, dtype=torch.int64, device=device)

    inputs = model.cls_embedding.embedding_table(classes).unsqueeze(1)
    for i in range(config.block_size):
        position = torch.full((len(classes), 1), i, device=device)
        cache = CacheView(keys, values, rows, position, i + 1)
        everything = torch.ones(1, 1, 1, i + 1, dtype=torch.bool, device=device)
        features = model.features(inputs, position, everything, cache)
        logits = model.output(features)[:, 0].float()
        if guided:
            conditional, null = logits.chunk(2)
            logits = null + cfg * (conditional - null)
        if temperature == 0:
            codes[:, i] = logits.argmax(-1)
        else:
            codes[:, i] = draw(distribution(logits, temperature, top_k, top_p), i)
        tokens = codes[:, i]
        if guided:
            tokens = torch.cat([tokens, tokens])
        inputs = model.tok_embeddings(tokens).unsqueeze(1)
    return codes


# LlamaGen's VQ tokenizer between images and codes (Sun et al. 2024, after Esser et al. 2021); official names.


@dataclass(frozen=True)
class VQConfig:
    """Sizes of a tokenizer.

    Attributes:
        ch: base width. ch_mult: width factor of each resolution level. z_channels: width at the lowest resolution.
        codebook_size, codebook_dim: V codes of c channels, compared and decoded on the unit sphere.
        attention: whether the lowest resolution's blocks attend.
    """

    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    z_channels: int = 256
    codebook_size: int = 16384
    codebook_dim: int = 8
    num_res_blocks: int = 2
    attention: bool = True

    @property
    def stride(self) -> int:
        """Pixels per code, along a side."""
        return 2 ** (len(self.ch_mult) - 1)


class _Level(nn.Module):
    """The blocks of one resolution."""

    def __init__(self, in_channels: int, out_channels: int, num_blocks: int, attention: bool) -> None:
        super().__init__()
        widths = [in_channels] + [out_channels] * num_blocks
        self.res = nn.ModuleList(ResnetBlock(a, b) for a, b in pairwise(widths))
        self.attn = nn.ModuleList(AttnBlock(out_channels) for _ in range(num_blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x)
            if self.attn:
                x = self.attn[i](x)
        return x


def _middle(channels: int) -> nn.ModuleList:
    return nn.ModuleList([ResnetBlock(channels, channels), AttnBlock(channels), ResnetBlock(channels, channels)])


class Encoder(nn.Module):
    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in config.ch_mult]
        self.conv_in = nn.Conv2d(3, config.ch, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        for i, (a, b) in enumerate(zip([config.ch, *widths], widths)):
            last = i == len(widths) - 1
            level = _Level(a, b, config.num_res_blocks, attention=last and config.attention)
            if not last:
                level.downsample = Downsample(b)
            self.conv_blocks.append(level)
        self.mid = _middle(widths[-1])
        self.norm_out = nn.GroupNorm(32, widths[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[-1], config.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.conv_blocks:
            x = level(x)
            if hasattr(level, "downsample"):
                x = level.downsample(x)
        for block in self.mid:
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Decoder(nn.Module):
    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in reversed(config.ch_mult)]  # the lowest resolution first
        self.conv_in = nn.Conv2d(config.z_channels, widths[0], 3, padding=1)
        self.mid = _middle(widths[0])
        self.conv_blocks = nn.ModuleList()
        for i, (a, b) in enumerate(zip([widths[0], *widths], widths)):
            level = _Level(a, b, config.num_res_blocks + 1, attention=i == 0 and config.attention)
            if i < len(widths) - 1:
                level.upsample = Upsample(b)
            self.conv_blocks.append(level)
        self.norm_out = nn.GroupNorm(32, widths[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in self.mid:
            x = block(x)
        for level in self.conv_blocks:
            x = level(x)
            if hasattr(level, "upsample"):
                x = level.upsample(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class _Quantizer(nn.Module):
    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.codebook_size, config.codebook_dim)


class VQModel(nn.Module):
    """Images [B, 3, H, W] in -1..1 to codes [B, H / stride * W / stride] in raster order, and back."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quantize = _Quantizer(config)
        self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.codebook_dim, config.z_channels, 1)

    @property
    def codebook(self) -> Tensor:
        """The vectors that the decoder receives [V, c], of unit length."""
        return F.normalize(self.quantize.embedding.weight, dim=-1)

    def project(self, image: Tensor) -> Tensor:
        """The encoder's vectors before they are quantised [B, c, h, w], of unit length."""
        return F.normalize(self.quant_conv(self.encoder(image)), dim=1)

    def nearest(self, vectors: Tensor) -> Tensor:
        """Codes [B, h * w] nearest to unit vectors [B, c, h, w]."""
        similarity = vectors.flatten(2).transpose(1, 2) @ self.codebook.T
        return similarity.argmax(dim=-1)

    def encode(self, image: Tensor) -> Tensor:
        """Codes, int64 [B, h * w], of images."""
        return self.nearest(self.project(image))

    def lookup(self, codes: Tensor) -> Tensor:
        """Unit vectors [B, c, h, w] of codes [B, h * w] of a square image."""
        side = round(codes.shape[1] ** 0.5)
        return self.codebook[codes].transpose(1, 2).unflatten(2, (side, side))

    def render(self, vectors: Tensor) -> Tensor:
        """Images, about -1..1, of quantised vectors [B, c, h, w]."""
        return self.decoder(self.post_quant_conv(vectors))

    def decode(self, codes: Tensor) -> Tensor:
        """Images, about -1..1, of codes [B, h * w]."""
        return self.render(self.lookup(codes))
