"""The KL autoencoder between images and latents (Rombach et al. 2022) that MAR uses; official state-dict names."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class KLConfig:
    """Sizes of an autoencoder.

    Attributes:
        embed_dim: channels of the latent. ch: base width. ch_mult: width factor of each resolution level.
        num_res_blocks: residual blocks per level; the decoder has one more.
        attention: whether the encoder attends at its lowest resolution.
        scale: latents times `scale` have unit variance; MAR models these.
    """

    embed_dim: int = 16
    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    attention: bool = True
    scale: float = 0.2325

    @property
    def stride(self) -> int:
        """Pixels per latent cell, along a side."""
        return 2 ** (len(self.ch_mult) - 1)


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


class ResnetBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = group_norm(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = group_norm(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        if in_channels != out_channels:
            # the residual connection needs the same number of channels at both ends
            self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        if hasattr(self, "nin_shortcut"):
            x = self.nin_shortcut(x)
        return h + x


class AttnBlock(nn.Module):
    """Single-head self-attention over all cells."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = group_norm(channels)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q = self.q(h).flatten(2).transpose(1, 2)  # [B, H * W, channels]
        k = self.k(h).flatten(2).transpose(1, 2)
        v = self.v(h).flatten(2).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x + self.proj_out(h)


class Downsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        # the authors pad at the right and at the bottom only, which halves an even side exactly
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """The residual blocks of one resolution, then `downsample` or `upsample` if the owner set one."""

    blocks_name = "block"  # in state dicts; LlamaGen's files have another one

    def __init__(self, in_channels: int, out_channels: int, num_blocks: int, attention: bool = False) -> None:
        super().__init__()
        blocks = nn.ModuleList([ResnetBlock(in_channels, out_channels)])
        blocks.extend(ResnetBlock(out_channels, out_channels) for _ in range(num_blocks - 1))
        self.add_module(self.blocks_name, blocks)
        self.attn = nn.ModuleList(AttnBlock(out_channels) for _ in range(num_blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(getattr(self, self.blocks_name)):
            x = block(x)
            if self.attn:
                x = self.attn[i](x)
        for name in ("downsample", "upsample"):
            if hasattr(self, name):
                x = self.get_submodule(name)(x)
        return x


class Middle(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = ResnetBlock(channels, channels)
        self.attn_1 = AttnBlock(channels)
        self.block_2 = ResnetBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    """From images [B, 3, H, W] to [B, out_channels, H / stride, W / stride]."""

    # The names in state dicts; LlamaGen's files have other ones for the same layers.
    levels_name = "down"
    level: type[Level] = Level
    middle: type[nn.Module] = Middle

    def __init__(self, config: Any, out_channels: int) -> None:
        super().__init__()
        widths = [config.ch * m for m in config.ch_mult]
        self.conv_in = nn.Conv2d(3, config.ch, 3, padding=1)
        levels = nn.ModuleList()
        for i, (in_width, width) in enumerate(pairwise([config.ch, *widths])):
            # as in the authors' models, only the lowest resolution attends
            last = i == len(widths) - 1
            level = self.level(in_width, width, config.num_res_blocks, attention=last and config.attention)
            if not last:
                level.downsample = Downsample(width)
            levels.append(level)
        self.add_module(self.levels_name, levels)
        self.mid = self.middle(widths[-1])
        self.norm_out = group_norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], out_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in getattr(self, self.levels_name):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    def __init__(self, config: KLConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in config.ch_mult]
        self.conv_in = nn.Conv2d(config.embed_dim, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1])
        # index 0 is the full resolution, which runs last, and the only one without an `upsample`
        self.up = nn.ModuleList()
        for i, (out_channels, in_channels) in enumerate(pairwise([*widths, widths[-1]])):
            level = Level(in_channels, out_channels, config.num_res_blocks + 1)
            if i > 0:
                level.upsample = Upsample(out_channels)
            self.up.append(level)
        self.norm_out = group_norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.conv_in(x))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class AutoencoderKL(nn.Module):
    """Images [B, 3, H, W] in -1..1 to latents [B, c, H / stride, W / stride] and back."""

    def __init__(self, config: KLConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config, 2 * config.embed_dim)
        self.decoder = Decoder(config)
        self.quant_conv = nn.Conv2d(2 * config.embed_dim, 2 * config.embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.embed_dim, config.embed_dim, 1)

    def encode(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance (clamped to -30..20) of the unscaled latent's posterior."""
        # half of the channels are the mean, half the log-variance
        mean, logvar = self.quant_conv(self.encoder(image)).chunk(2, dim=1)
        return mean, logvar.clamp(-30.0, 20.0)

    def decode(self, latent: Tensor) -> Tensor:
        """Images, about -1..1, from unscaled latents."""
        return self.decoder(self.post_quant_conv(latent))
