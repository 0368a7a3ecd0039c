"""The KL autoencoder between images and latents (Rombach et al. 2022), as MAR uses it; official state-dict names."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class KLConfig:
    """Sizes of an autoencoder.

    Attributes:
        embed_dim: channels of the latent. ch: base width. ch_mult: width factor of each resolution level.
        num_res_blocks: residual blocks per level; the decoder has one more.
        attention: whether the encoder attends at its lowest resolution.
        scale: latents times this have unit variance (0.2325 for KL-16).
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


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


class ResnetBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = _norm(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = _norm(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        if in_channels != out_channels:
            self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class AttnBlock(nn.Module):
    """Single-head self-attention over all cells."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        # one head over all cells: [B, H * W, channels]
        q, k, v = (layer(h).flatten(2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x + self.proj_out(h)


class Downsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class _Level(nn.Module):
    """The blocks of one resolution, then a change of resolution where there is one."""

    def __init__(self, in_channels: int, out_channels: int, num_blocks: int, attention: bool = False) -> None:
        super().__init__()
        widths = [in_channels] + [out_channels] * num_blocks
        self.block = nn.ModuleList(ResnetBlock(a, b) for a, b in pairwise(widths))
        self.attn = nn.ModuleList(AttnBlock(out_channels) for _ in range(num_blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.block):
            x = block(x)
            if self.attn:
                x = self.attn[i](x)
        for name in ("downsample", "upsample"):
            if hasattr(self, name):
                x = getattr(self, name)(x)
        return x


class _Middle(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = ResnetBlock(channels, channels)
        self.attn_1 = AttnBlock(channels)
        self.block_2 = ResnetBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    def __init__(self, config: KLConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in config.ch_mult]
        self.conv_in = nn.Conv2d(3, config.ch, 3, padding=1)
        self.down = nn.ModuleList()
        for i, (a, b) in enumerate(zip([config.ch, *widths], widths)):
            last = i == len(widths) - 1
            level = _Level(a, b, config.num_res_blocks, attention=last and config.attention)
            if not last:
                level.downsample = Downsample(b)
            self.down.append(level)
        self.mid = _Middle(widths[-1])
        self.norm_out = _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 2 * config.embed_dim, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    def __init__(self, config: KLConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in config.ch_mult]
        self.conv_in = nn.Conv2d(config.embed_dim, widths[-1], 3, padding=1)
        self.mid = _Middle(widths[-1])
        self.up = nn.ModuleList()  # index 0 is the full resolution, which runs last
        for i, (a, b) in enumerate(zip(widths[1:] + widths[-1:], widths)):
            level = _Level(a, b, config.num_res_blocks + 1)
            if i > 0:
                level.upsample = Upsample(b)
            self.up.append(level)
        self.norm_out = _norm(widths[0])
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
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quant_conv = nn.Conv2d(2 * config.embed_dim, 2 * config.embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.embed_dim, config.embed_dim, 1)

    def encode(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance (clamped to -30..20) of the latent's posterior, unscaled."""
        mean, logvar = self.quant_conv(self.encoder(image)).chunk(2, dim=1)
        return mean, logvar.clamp(-30.0, 20.0)

    def decode(self, latent: Tensor) -> Tensor:
        """Image, about -1..1, of an unscaled latent."""
        return self.decoder(self.post_quant_conv(latent))
