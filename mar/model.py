"""MAR's transformer, and the sampler of its authors' code."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mar.head import LAYER_NORM_EPS, DiffLoss, DiffusionSchedule, Head, guide, schedule

# MAR: a masked autoregressive encoder-decoder over continuous tokens (arXiv 2406.11838).
#
# The encoder sees the buffer (copies of the class embedding) and the committed tokens. The decoder sees the buffer and
# every position, with the mask token at positions that are not committed. Its output at a position is z, the condition
# of the diffusion head there.
#
# A generation order and a count define the known tokens: the first `num_known[b]` positions of `order[b]`. Sequences of
# a batch may have different counts; the shorter ones are padded and masked. A sequence that is alone is padded too, so
# that attention sums its keys in the same order as in a batch.

PAD_TO = 16  # sequences are padded to a multiple of the number of keys that attention sums at a time


@dataclass(frozen=True)
class MARConfig:
    """Sizes of a MAR model.

    Attributes:
        img_size: pixels per side of an image.
        vae_stride: pixels per side of a latent cell.
        patch_size: latent cells per side of a token.
        vae_embed_dim: channels of the latent.
        embed_dim, depth, num_heads: sizes of the encoder, which are also the decoder's.
        class_num: number of classes.
        buffer_size: copies of the class embedding.
        diffloss_w, diffloss_d: width and depth of the head.
    """

    img_size: int = 256
    vae_stride: int = 16
    patch_size: int = 1
    vae_embed_dim: int = 16
    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 12
    class_num: int = 1000
    buffer_size: int = 64
    diffloss_w: int = 1024
    diffloss_d: int = 6

    @property
    def grid_size(self) -> int:
        """Tokens per side."""
        return self.img_size // self.vae_stride // self.patch_size

    @property
    def seq_len(self) -> int:
        """L, tokens per image."""
        return self.grid_size**2

    @property
    def token_dim(self) -> int:
        """d, channels per token."""
        return self.vae_embed_dim * self.patch_size**2


class Attention(nn.Module):
    """Self-attention over all heads at once."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, N, D]; `mask` [B, 1, 1, N] is added to the attention scores."""
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.num_heads)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(rearrange(h, "b h n d -> b n (h d)"))


class Norm(nn.LayerNorm):
    """A LayerNorm in a residual stream, at which an update joins the stream.

    Attributes:
        fused: a function that `joined` calls instead, or None; set if the device has a kernel for it.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=LAYER_NORM_EPS)
        self.fused: Callable[..., tuple[Tensor, Tensor]] | None = None

    def joined(self, x: Tensor, update: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(the stream x + update [.., D], the same, normalised, in a type); without an update, x itself."""
        if self.fused is not None and not torch.compiler.is_compiling():  # a compiler fuses by itself
            return self.fused(self, x, update, dtype)
        x = x if update is None else x + update
        return x, self(x).to(dtype)


class Block(nn.Module):
    """A pre-norm transformer block; its weights have the names of timm's ViT block, as in official files.

    MAR leaves timm's options at their defaults. This class has none, and importing timm would take seconds.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = Norm(dim)
        self.attn = Attention(dim, num_heads)
        self.norm2 = Norm(dim)
        layers = OrderedDict(fc1=nn.Linear(dim, 4 * dim), act=nn.GELU(), fc2=nn.Linear(4 * dim, dim))
        self.mlp = nn.Sequential(layers)

    def forward(self, x: Tensor, update: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The stream x [B, N, D] and the update that is to join it, after this block; `mask` as in `Attention`."""
        x, normed = self.normalised(x, update)
        return self.after_attention(x, self.attn(normed, mask))

    def normalised(self, x: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """The stream with the update of the block before, and the input of this block's attention."""
        return self.norm1.joined(x, update, self.attn.qkv.weight.dtype)

    def after_attention(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The stream with the update of the attention, and the update of the MLP."""
        first = cast("nn.Linear", self.mlp[0])
        x, normed = self.norm2.joined(x, attended, first.weight.dtype)
        return x, self.mlp(normed)


def through(blocks: Iterable[nn.Module], x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The stream x [B, N, D] after blocks, and the last one's update, which is to join it."""
    update = None
    for block in blocks:
        x, update = block(x, update, mask)
    return x, update


class MAR(nn.Module):
    """The backbone and its head; state-dict names and shapes are the official ones."""

    encoder_blocks: Sequence[Block]
    decoder_blocks: Sequence[Block]

    def __init__(self, config: MARConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.embed_dim
        length = config.buffer_size + config.seq_len

        def blocks() -> Any:
            return nn.ModuleList(Block(dim, config.num_heads) for _ in range(config.depth))

        self.class_emb = nn.Embedding(config.class_num, dim)
        self.fake_latent = nn.Parameter(torch.zeros(1, dim))
        self.z_proj = nn.Linear(config.token_dim, dim)
        self.z_proj_ln = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.encoder_pos_embed_learned = nn.Parameter(torch.zeros(1, length, dim))
        self.encoder_blocks = blocks()
        self.encoder_norm = Norm(dim)
        self.decoder_embed = nn.Linear(dim, dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.decoder_pos_embed_learned = nn.Parameter(torch.zeros(1, length, dim))
        self.decoder_blocks = blocks()
        self.decoder_norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.diffusion_pos_embed_learned = nn.Parameter(torch.zeros(1, config.seq_len, dim))
        self._init_weights()
        self.diffloss = DiffLoss(config.token_dim, config.diffloss_w, config.diffloss_d, dim)

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.02)
        nn.init.normal_(self.class_emb.weight, std=0.02)

    @property
    def head(self) -> Head:
        return self.diffloss.net

    def padded(self, num_known: int) -> int:
        """The number of tokens that the encoder sees, if the longest sequence has `num_known` known tokens."""
        buffer = self.config.buffer_size
        length = math.ceil((buffer + num_known) / PAD_TO) * PAD_TO
        return min(length - buffer, self.config.seq_len)

    def known(
        self, order: Tensor, num_known: Sequence[int] | Tensor, padded: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Positions that the encoder sees, int64 [B, N], and whether they are known, bool [B, N]; see `forward`."""
        if padded is None:
            padded = self.padded(max(num_known))
        counts = torch.as_tensor(num_known, device=order.device)
        is_known = torch.arange(padded, device=order.device) < counts.unsqueeze(-1)
        return order[:, :padded], is_known

    def encode(self, tokens: Tensor, known: Tensor, is_known: Tensor, class_embedding: Tensor) -> Tensor:
        """Encoder output [B, buffer + N, D]: buffer, then the tokens at positions `known` [B, N] and padding."""
        x = self.embed(tokens, known, is_known, class_embedding)
        mask = self.attention_mask(F.pad(is_known, (self.config.buffer_size, 0), value=True))
        return self.encoded(*through(self.encoder_blocks, x, mask))

    def encoded(self, x: Tensor, update: Tensor | None) -> Tensor:
        """The encoder's output [B, N, D] from the stream and the update of its last block."""
        _, normed = self.encoder_norm.joined(x, update, self.decoder_embed.weight.dtype)
        return normed

    def attention_mask(self, is_there: Tensor) -> Tensor:
        """The mask [B, 1, 1, N] to add to attention scores, 0 or -inf; is_there: bool [B, N]."""
        first: Block = self.encoder_blocks[0]  # type: ignore[assignment]
        dtype = first.attn.qkv.weight.dtype  # the queries'; another one would be cast in every layer
        mask = torch.zeros(is_there.shape, dtype=dtype, device=is_there.device).where(is_there, -math.inf)
        return mask[:, None, None]

    def embed(self, tokens: Tensor, positions: Tensor, is_known: Tensor, class_embedding: Tensor) -> Tensor:
        """The encoder's input [B, buffer + N, D]: buffer, then tokens at positions [B, N]; unknown tokens are 0."""
        buffer, position = self.config.buffer_size, self.encoder_pos_embed_learned
        # padding is masked, but NaN in it would spread: attention multiplies masked values by 0
        known = tokens.gather(1, _expand(positions, tokens.shape[-1])).where(is_known.unsqueeze(-1), 0)
        x = self.z_proj(known) + position[0, buffer:][positions]
        start = class_embedding.unsqueeze(1) + position[:, :buffer]
        return self.z_proj_ln(torch.cat([start, x], dim=1))

    def decode(self, encoded: Tensor, known: Tensor, is_known: Tensor, positions: Tensor | None = None) -> Tensor:
        """z [B, L, D] at every position in raster order, or [B, M, D] at `positions`, from the encoder's output."""
        buffer = self.config.buffer_size
        x = self.arrange(encoded, known, is_known)
        *blocks, last = cast("list[Block]", list(self.decoder_blocks))
        x, update = through(blocks, x)
        if positions is None:
            x, update = last(x, update)
            return self.decoder_norm(x + update)[:, buffer:] + self.diffusion_pos_embed_learned
        return self.condition(block_at(last, x, update, positions + buffer), positions)

    def arrange(self, encoded: Tensor, known: Tensor, is_known: Tensor) -> Tensor:
        """The decoder's input [B, buffer + L, D]: buffer, then all positions in raster order."""
        buffer = self.config.buffer_size
        mask_token = self.mask_token
        x = self.decoder_embed(encoded).to(mask_token.dtype)

        # the mask token everywhere, then the known tokens at their positions; padding writes the mask token again
        own = torch.where(is_known.unsqueeze(-1), x[:, buffer:], mask_token)
        full = mask_token.repeat(x.shape[0], self.config.seq_len, 1)
        full = full.scatter(1, _expand(known, x.shape[-1]), own)
        return torch.cat([x[:, :buffer], full], dim=1) + self.decoder_pos_embed_learned

    def condition(self, x: Tensor, positions: Tensor) -> Tensor:
        """z [B, M, D] at positions [B, M], from the last block's output there."""
        return self.decoder_norm(x) + self.diffusion_pos_embed_learned[0, positions]

    def forward(
        self,
        tokens: Tensor,
        order: Tensor,
        num_known: Sequence[int] | Tensor,
        class_embedding: Tensor,
        positions: Tensor | None = None,
        padded: int | None = None,
    ) -> Tensor:
        """Computes z, the head's condition, at every position; sequences of a batch do not affect each other.

        Args:
            tokens: [B, L, d], raster order; values at unknown positions are ignored.
            order: int64 [B, L], a permutation of the positions for each sequence; the first num_known[b] are known.
            num_known: B integers in 0..L on the CPU, whose maximum decides shapes; or int64 [B], with `padded`.
            class_embedding: [B, D], rows of `class_emb`, or `fake_latent` for the unconditional branch.
            positions: int64 [B, M] at which to compute z; by default all. The last block is computed only there.
            padded: the number of tokens that the encoder sees, see `MAR.padded`; at least the maximum of `num_known`.
                With it all shapes are known in advance, and no tensor is read.

        Returns:
            z [B, L, D], or [B, M, D] at `positions`.
        """
        known, is_known = self.known(order, num_known, padded)
        encoded = self.encode(tokens, known, is_known, class_embedding)
        return self.decode(encoded, known, is_known, positions)

    def patchify(self, latents: Tensor) -> Tensor:
        """Latents [B, c, h, w] to tokens [B, L, d]."""
        patch = self.config.patch_size
        return rearrange(latents, "b c (h p) (w q) -> b (h w) (c p q)", p=patch, q=patch)

    def unpatchify(self, tokens: Tensor) -> Tensor:
        """Tokens [B, L, d] to latents [B, c, h, w]."""
        rows, patch = self.config.grid_size, self.config.patch_size
        return rearrange(tokens, "b (h w) (c p q) -> b c (h p) (w q)", h=rows, p=patch, q=patch)


def following(order: Tensor, start: Tensor, most: int) -> Tensor:
    """Positions [B, most] of each order [B, L] from index start[b] on; past its end, the last one is repeated."""
    ranks = start.unsqueeze(-1) + torch.arange(most, device=order.device)
    return order.gather(1, ranks.clamp(max=order.shape[1] - 1))


def block_at(block: Block, x: Tensor, update: Tensor | None, positions: Tensor) -> Tensor:
    """A block's output [B, M, D] at positions [B, M] of its inputs [B, N, D]: their queries, all keys."""
    x, normed = block.normalised(x, update)
    index = _expand(positions, x.shape[-1])
    x, update = attend(block, x.gather(1, index), normed.gather(1, index), keys_values(block, normed))
    return x + update


def keys_values(block: Block, normed: Tensor) -> Tensor:
    """Keys and values [B, N, 2D] from a block's normalised input [B, N, D]."""
    qkv, dim = block.attn.qkv, normed.shape[-1]
    return F.linear(normed, qkv.weight[dim:], qkv.bias[dim:])


def attend(
    block: Block, x: Tensor, normed: Tensor, keys_values: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A block's stream and update [B, M, D] for some of its inputs, given all keys and values.

    Args:
        x: the inputs [B, M, D]. normed: the same, normalised. keys_values: [B, N, 2D].
    """
    attn, dim = block.attn, x.shape[-1]
    q = F.linear(normed, attn.qkv.weight[:dim], attn.qkv.bias[:dim])
    k, v = keys_values.chunk(2, dim=-1)
    q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=attn.num_heads) for t in (q, k, v))
    h = rearrange(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), "b h n d -> b n (h d)")
    return block.after_attention(x, attn.proj(h))


def _expand(index: Tensor, channels: int) -> Tensor:
    return index.unsqueeze(-1).expand(-1, -1, channels)


# The sampler of MAR's released code, step by step: `ar` must agree with it, and is timed against it.
#
# It can be read beside the paper (arXiv 2406.11838, sections 3.2-3.4): the encoder starts from scratch in each
# iteration, guidance concatenates both branches in each step, and a denoising step looks its coefficients up in float64
# tables. It calls our modules, so it is a baseline for the sampler, not for the layers. To sample images, use `cspd`.


def _denoise_step(
    tables: DiffusionSchedule, out: Tensor, x: Tensor, t: Tensor, noise: Tensor, temperature: float
) -> Tensor:
    """x_{t-1} [N, d] from the head's output [N, 2d] at x_t."""

    def at_t(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(x.device)[t].float().unsqueeze(-1).expand(x.shape)

    eps, v = out.chunk(2, dim=-1)
    x0 = at_t(tables.sqrt_recip_alphas_cumprod) * x - at_t(tables.sqrt_recipm1_alphas_cumprod) * eps
    mean = at_t(tables.posterior_mean_coef1) * x0 + at_t(tables.posterior_mean_coef2) * x

    # the log-variance is interpolated between that of beta and the posterior's
    fraction = (v + 1) / 2
    log_beta = at_t(np.log(tables.betas))
    log_variance = fraction * log_beta + (1 - fraction) * at_t(tables.posterior_log_variance_clipped)
    nonzero = (t != 0).float().unsqueeze(-1)  # the last step adds no noise
    return mean + nonzero * torch.exp(0.5 * log_variance) * noise * temperature


def _denoise(
    model: MAR, z: Tensor, scale: float, guided: bool, temperature: float, num_steps: int, draws: Callable
) -> Tensor:
    """Tokens [N, d] under conditions z [N, D], or [2N, D] with the unconditional branch second."""
    tables = schedule(num_steps)
    x = draws(num_steps)
    for i in reversed(range(num_steps)):
        t = torch.tensor([i] * len(x), device=x.device)
        timesteps = torch.tensor(tables.timestep_map, device=x.device)[t]
        if guided:
            out = guide(model.head(torch.cat([x, x]), torch.cat([timesteps, timesteps]), z), scale)
        else:
            out = model.head(x, timesteps, z)
        x = _denoise_step(tables, out, x, t, draws(i), temperature)
    return x


@torch.inference_mode()
def sample_published(
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
    """Samples a batch of sequences in lockstep.

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
        # the cosine schedule: the number of tokens that stay masked, at least one fewer than before
        left = math.floor(length * math.cos(math.pi / 2 * (k + 1) / num_iter))
        left = max(1, min(int(mask[0].sum()) - 1, left))
        next_mask = rank >= length - left
        predicted = mask if k == num_iter - 1 else mask & ~next_mask

        # z at every position; with guidance the second half of the batch is the unconditional branch
        embedding = model.class_emb(labels)
        known_first = mask.int().argsort(dim=1, stable=True)
        num_known = (~mask).sum(1).tolist()
        if guided:
            embedding = torch.cat([embedding, model.fake_latent.repeat(batch, 1)])
            z = model(torch.cat([tokens, tokens]), torch.cat([known_first, known_first]), num_known * 2, embedding)
            z = z[torch.cat([predicted, predicted])]
        else:
            z = model(tokens, known_first, num_known, embedding)[predicted]
        scale = cfg
        if cfg_schedule == "linear":
            scale = 1 + (cfg - 1) * (length - left) / length

        def draws(t: int, predicted: Tensor = predicted) -> Tensor:
            return noise(predicted, t) if noise else torch.randn(int(predicted.sum()), dim, device=device)

        tokens[predicted] = _denoise(model, z, scale, guided, temperature, num_sampling_steps, draws)
        mask = next_mask
    return tokens
