"""LlamaGen's modules: the GPT, EAGLE's drafter, the tokenizer, and the authors' own sampler."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cspd.transformer import CacheView, RMSNorm, rotate
from mar import vae

# LlamaGen's GPT over the VQ tokens of an image, given a class or a prompt (Sun et al. 2024, arXiv 2406.06525).
#
# State-dict names are the official ones, so that official files load as they are.


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
        dim, n_layer, n_head: width, depth, attention heads.
        vocab_size: entries of the VQ codebook.
        num_classes: classes; index `num_classes` is the unconditional branch. 0: a text-to-image model.
        block_size: L, tokens per image, a square number in raster order.
        multiple_of: the feed-forward width is rounded up to a multiple of this.
        norm_eps: of RMSNorm. rope_base: of the rotary angles.
        prefix_length: the most inputs before the image's tokens: 1 for a class, or the tokens of a prompt.
        caption_dim: channels of a prompt's features; 0: a class-conditional model.
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

    # How `HFConfig` may differ: its prompts count as positions, and a token may end each row of the image.
    text_places: ClassVar[bool] = False
    row_end: ClassVar[int | None] = None

    @property
    def key_heads(self) -> int:
        """The number of attention heads of keys and values."""
        return self.n_head

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_head

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward layers: two thirds of 4 dim, since SwiGLU has three matrices, not two."""
        width = 8 * self.dim // 3
        return math.ceil(width / self.multiple_of) * self.multiple_of

    @property
    def grid(self) -> int:
        """Tokens along a side of the image."""
        return round(self.block_size**0.5)


@functools.cache
@torch.inference_mode(False)  # an ordinary tensor, which training can use too
def rotary_table(config: GPTConfig, device: torch.device) -> Tensor:
    """cos and sin of each position's rotary angles, float32 [1 + L, head_dim / 2, 2]; position 0 is the class.

    The angles encode row and column of the grid. Those of the class are (0, 0) as in the authors' code, not (1, 0):
    its queries and keys become zero, so that every token gives it the attention logit 0. The table is not a buffer of
    the model, since official files do not have one.
    """
    # RoPE's rates, base^(-2i / n), with n = half of the channels
    half = config.head_dim // 2
    exponent = torch.arange(0, half, 2)[: half // 2].float() / half
    rates = config.rope_base**-exponent
    index = torch.arange(config.grid).float()
    angle = torch.outer(index, rates)  # [grid, half / 2]

    # the first half of the channels encodes the row, the second the column
    down = angle.unsqueeze(1).expand(-1, config.grid, -1)
    across = angle.unsqueeze(0).expand(config.grid, -1, -1)
    angles = torch.cat([down, across], dim=-1).flatten(0, 1)
    table = torch.view_as_real(torch.polar(torch.ones_like(angles), angles))
    of_class = torch.zeros_like(table[:1])
    return torch.cat([of_class, table]).to(device)


class GPTAttention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.layer = layer
        self.wqkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None, cache: CacheView | None) -> Tensor:
        qkv = self.wqkv(x).unflatten(-1, (3 * self.n_head, -1))
        qk, v = qkv.split((2 * self.n_head, self.n_head), dim=-2)
        q, k = rotate(qk, table).chunk(2, dim=-2)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        if cache is not None:
            keys, values = cache.update(self.layer, k, v)
            k = keys.type_as(q)
            v = values.type_as(q)
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


class GPTBlock(nn.Module):
    """A transformer layer; EAGLE's drafter is one such layer."""

    def __init__(self, config: GPTConfig, layer: int = 0) -> None:
        super().__init__()
        self.attention = GPTAttention(config, layer)
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
    """`uncond_embedding` replaces a prompt's features in the unconditional branch."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.cap_proj = _Projection(config)
        self.register_buffer("uncond_embedding", torch.zeros(config.prefix_length, config.caption_dim))

    def forward(self, features: Tensor) -> Tensor:
        return self.cap_proj(features)


class GPT(nn.Module):
    """Predicts each VQ token from a class or prompt and the tokens before it in raster order.

    Inputs are embeddings. Token i of the image is at position i + 1; the class, or every token of a prompt, is at
    position 0. The output at position i predicts token i. With a prompt, the output of its last token predicts token 0.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.cls_embedding = _CaptionEmbedder(config) if config.caption_dim else _LabelEmbedder(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(GPTBlock(config, i) for i in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def table(self, position: Tensor) -> Tensor:
        """cos and sin of positions [...], float32 [..., head_dim / 2, 2]."""
        return rotary_table(self.config, position.device)[position]

    def embed(self, condition: Tensor, tokens: Tensor) -> Tensor:
        """Inputs [B, n + N, dim] from a condition and tokens [B, N].

        The condition is classes [B] (n = 1; `num_classes` is the unconditional branch), or features of prompts
        [B, n, caption_dim].
        """
        prefix = self.cls_embedding(condition)
        image = self.tok_embeddings(tokens)
        return torch.cat([prefix, image], dim=1)

    def features(
        self, x: Tensor, position: Tensor, mask: Tensor | None = None, cache: CacheView | None = None
    ) -> Tensor:
        """Features [B, N, dim], which the output layer reads, from inputs x [B, N, dim].

        Args:
            position: int64 [B or 1, N], of the inputs.
            mask: bool [B or 1, 1, N, width], True where an input attends. By default it attends to the whole view of
                the cache, or without a cache to itself and the inputs before it.
            cache: keys and values of earlier inputs, to which those of these inputs are added.
        """
        return self.through(x, self.table(position), mask, cache)

    def through(self, x: Tensor, table: Tensor, mask: Tensor | None = None, cache: CacheView | None = None) -> Tensor:
        """As `features`, with the rotary angles of the positions in place of the positions."""
        for layer in self.layers:
            x = layer(x, table, mask, cache)
        return self.norm(x)

    def forward(self, condition: Tensor, tokens: Tensor, present: Tensor | None = None) -> Tensor:
        """Teacher-forced logits [B, 1 + N, V] of the token after each prefix of tokens [B, N]; condition: see `embed`.

        Args:
            present: bool [B, n], False at the padding on the left of prompts; by default there is no padding.
        """
        inputs = self.embed(condition, tokens)
        last = inputs.shape[1] - tokens.shape[1] - 1  # index of the condition's last input
        position = (torch.arange(inputs.shape[1], device=tokens.device) - last).clamp(min=0)
        mask = None
        if present is not None:
            all_present = F.pad(present, (0, tokens.shape[1]), value=True)
            mask = seen(all_present).unsqueeze(1)
        features = self.features(inputs, position.unsqueeze(0), mask)
        return self.output(features[:, last:])


def seen(present: Tensor) -> Tensor:
    """The attention mask, bool [B, N, N], of inputs that attend to `present` ones (bool [B, N]) before them.

    Every input, so padding too, attends to itself: no softmax is over an empty set.
    """
    own = torch.eye(present.shape[1], dtype=torch.bool, device=present.device)
    before = torch.ones_like(own).tril()
    attended = before & present.unsqueeze(1)
    return attended | own


# EAGLE's drafter: a transformer layer that runs ahead of a GPT in its features (Li et al. 2024, arXiv 2401.15077).


class Eagle(nn.Module):
    """Predicts the target's next feature from its last one and the token that was sampled from that.

    Embeddings and the output layer are the target's own. The input at position i joins the target's feature at
    position i - 1 with the embedding at position i; the output predicts the target's feature at position i. Positions
    are LlamaGen's for every target: 0 for all inputs of the condition, i + 1 for token i.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.dim, config.dim)
        self.layers = nn.ModuleList([GPTBlock(config)])

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
        # unlike the target, the drafter has no final norm: its output is a feature
        for layer in self.layers:
            x = layer(x, table, mask, cache)
        return x


# LlamaGen's own sampler: `ar` must agree with it, and its speed is compared with it.
#
# All sequences advance in lockstep with one key-value cache, and one forward pass has both guidance branches. It calls
# the modules above, so it is a baseline for the sampler, not for the layers.


def distribution(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Token probabilities [B, V] from logits [B, V]: temperature, then top-k, then nucleus sampling (top-p)."""
    logits = logits / max(temperature, 1e-5)  # the authors' lower limit
    if top_k > 0:
        top_k = min(top_k, logits.shape[-1])
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        ordered, index = logits.sort(descending=True, stable=True)
        mass = ordered.softmax(-1).cumsum(-1)
        # a token is dropped if the likelier ones reach p without it; the likeliest always stays
        mass_before = F.pad(mass[:, :-1], (1, 0))
        dropped = mass_before > top_p
        dropped = dropped.scatter(1, index, dropped)
        logits = logits.masked_fill(dropped, -torch.inf)
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
        draw: (token probabilities [B, V], the index of the token) -> tokens [B]; by default torch's global generator.

    Returns:
        Tokens, int64 [B, L].
    """
    config = model.config
    device = labels.device
    guided = cfg != 1
    classes = labels
    if guided:  # the second half of the batch is the unconditional branch
        null_class = torch.full_like(labels, config.num_classes)
        classes = torch.cat([labels, null_class])
    rows = slice(0, len(classes))
    shape = (config.n_layer, len(classes), config.n_head, config.block_size, config.head_dim)
    keys = torch.zeros(shape, device=device)
    values = torch.zeros(shape, device=device)
    codes = torch.empty(len(labels), config.block_size, dtype=torch.int64, device=device)

    embedding = model.cls_embedding.get_submodule("embedding_table")
    inputs = embedding(classes).unsqueeze(1)
    for i in range(config.block_size):
        position = torch.full((len(classes), 1), i, device=device)
        cache = CacheView(keys.unbind(), values.unbind(), rows, position, i + 1)
        everything = torch.ones(1, 1, 1, i + 1, dtype=torch.bool, device=device)
        features = model.features(inputs, position, everything, cache)
        logits = model.output(features)[:, 0].float()
        # classifier-free guidance on the logits
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
        ch: base width. ch_mult: width factor of each resolution level. z_channels: channels of the encoder's output.
        codebook_size, codebook_dim: V codes of c channels, compared and decoded on the unit sphere.
        num_res_blocks: residual blocks per level; the decoder has one more.
        attention: whether the blocks of the lowest resolution attend.
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


class _Level(vae.Level):
    blocks_name = "res"


class _Middle(nn.Sequential):
    def __init__(self, channels: int) -> None:
        super().__init__(
            vae.ResnetBlock(channels, channels), vae.AttnBlock(channels), vae.ResnetBlock(channels, channels)
        )


class VQEncoder(vae.Encoder):
    levels_name = "conv_blocks"
    level = _Level
    middle = _Middle


class VQDecoder(nn.Module):
    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in reversed(config.ch_mult)]  # the lowest resolution first
        self.conv_in = nn.Conv2d(config.z_channels, widths[0], 3, padding=1)
        self.mid = _Middle(widths[0])
        self.conv_blocks = nn.ModuleList()
        for i, (in_channels, out_channels) in enumerate(pairwise([widths[0], *widths])):
            attention = config.attention and i == 0
            level = _Level(in_channels, out_channels, config.num_res_blocks + 1, attention)
            if i < len(widths) - 1:
                level.upsample = vae.Upsample(out_channels)
            self.conv_blocks.append(level)
        self.norm_out = vae.group_norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.conv_in(x))
        for level in self.conv_blocks:
            x = level(x)
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
        self.encoder = VQEncoder(config, config.z_channels)
        self.decoder = VQDecoder(config)
        self.quantize = _Quantizer(config)
        self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.codebook_dim, config.z_channels, 1)

    @property
    def codebook(self) -> Tensor:
        """The vectors [V, c], of unit length, that the decoder receives."""
        return F.normalize(self.quantize.embedding.weight, dim=-1)

    def project(self, image: Tensor) -> Tensor:
        """The encoder's vectors [B, c, h, w], of unit length, before they are quantised."""
        vectors = self.quant_conv(self.encoder(image))
        return F.normalize(vectors, dim=1)

    def nearest(self, vectors: Tensor) -> Tensor:
        """Codes [B, h * w] nearest to unit vectors [B, c, h, w]."""
        # between unit vectors the largest product is the smallest distance
        vectors = vectors.flatten(2).transpose(1, 2)
        similarity = vectors @ self.codebook.T
        return similarity.argmax(dim=-1)

    def encode(self, image: Tensor) -> Tensor:
        """Codes, int64 [B, h * w], of images."""
        return self.nearest(self.project(image))

    def lookup(self, codes: Tensor) -> Tensor:
        """Unit vectors [B, c, h, w] of codes [B, h * w] of a square image."""
        side = round(codes.shape[1] ** 0.5)
        vectors = self.codebook[codes].transpose(1, 2)
        return vectors.unflatten(2, (side, side))

    def render(self, vectors: Tensor) -> Tensor:
        """Images, about -1..1, of quantised vectors [B, c, h, w]."""
        return self.decoder(self.post_quant_conv(vectors))

    def decode(self, codes: Tensor) -> Tensor:
        """Images, about -1..1, of codes [B, h * w]."""
        return self.render(self.lookup(codes))
