"""The autoencoders between images and latents: SphereAR's S-VAE and BitDance's signs; official state-dict names."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cspd.causal.head import HEAD_DIM
from cspd.causal.models import NORM_EPS, CausalBlock, rotary_angles
from cspd.transformer import RMSNorm
from mar.head import fill
from mar.vae import group_norm

# S-VAE (arXiv 2509.24335): convolutions, then a transformer over the cells; cells lie on a sphere.

NUM_REGISTERS = 4  # learned inputs before the cells


@dataclass(frozen=True)
class SphereVAEConfig:
    """Sizes of an S-VAE.

    Attributes:
        latent_dim: channels of a cell. z_channels: width of the transformers.
        cnn_chs: widths of the convolutions; each halves the image's side.
        encoder_layers, decoder_layers: depth of the transformers. side: cells along a side.
    """

    latent_dim: int = 16
    z_channels: int = 512
    cnn_chs: tuple[int, ...] = (64, 64, 128, 256, 512)
    encoder_layers: int = 6
    decoder_layers: int = 12
    side: int = 16

    @property
    def stride(self) -> int:
        """Pixels per cell, along a side."""
        return 2 ** (len(self.cnn_chs) - 1)


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(32, channels // 4), channels, eps=NORM_EPS)


def _conv(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)


class _Down(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        before = [_norm(in_channels), nn.SiLU(), _conv(in_channels, out_channels, stride=2)]
        after = [_norm(out_channels), nn.SiLU(), _conv(out_channels, out_channels)]
        self.block = nn.Sequential(*before, *after)
        self.shortcut = nn.Conv2d(in_channels, out_channels, 2, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.block(x)


class _Up(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        larger = nn.ConvTranspose2d(in_channels, out_channels, 4, stride=2, padding=1, bias=False)

        def kept() -> list[nn.Module]:
            return [_norm(out_channels), nn.SiLU(), _conv(out_channels, out_channels)]

        self.block = nn.Sequential(_norm(in_channels), nn.SiLU(), larger, *kept())
        self.shortcut = nn.ConvTranspose2d(in_channels, out_channels, 2, stride=2, bias=False)
        self.block2 = nn.Sequential(*kept(), *kept())

    def forward(self, x: Tensor) -> Tensor:
        x = self.shortcut(x) + self.block(x)
        return x + self.block2(x)


class _Levels(nn.Module):
    def __init__(self, kind: type[nn.Module], widths: tuple[int, ...]) -> None:
        super().__init__()
        self.net = nn.Sequential(*(kind(*pair) for pair in itertools.pairwise(widths)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class _ToCells(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


class _ToGrid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        side = round(x.shape[1] ** 0.5)
        return x.transpose(1, 2).unflatten(2, (side, side))


class _Transformer(nn.Module):
    """Layers over a few learned inputs and the cells; the angles are in official files."""

    freqs_cis: Tensor

    def __init__(self, config: SphereVAEConfig, num_layers: int) -> None:
        super().__init__()
        width = config.z_channels
        self.register_token = nn.Embedding(NUM_REGISTERS, width)
        self.layers = nn.ModuleList(CausalBlock(width, width // HEAD_DIM) for _ in range(num_layers))
        self.register_buffer("freqs_cis", rotary_angles(config.side, HEAD_DIM, NUM_REGISTERS))

    def through_layers(self, cells: Tensor) -> Tensor:
        """Cells [B, side * side, width] after the layers."""
        x = torch.cat([self.register_token.weight.expand(len(cells), -1, -1), cells], dim=1)
        for layer in self.layers:
            x = layer(x, self.freqs_cis.unsqueeze(0))
        return x[:, NUM_REGISTERS:]


class _SphereEncoder(_Transformer):
    def __init__(self, config: SphereVAEConfig) -> None:
        super().__init__(config, config.encoder_layers)
        self.conv_in = _conv(3, config.cnn_chs[0])
        self.patchify = nn.Sequential(_Levels(_Down, config.cnn_chs), _ToCells())
        self.norm = RMSNorm(config.z_channels, NORM_EPS)
        self.output = nn.Linear(config.z_channels, config.z_channels, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        cells = self.patchify(self.conv_in(image))
        return self.output(self.norm(self.through_layers(cells)))


class _SphereDecoder(_Transformer):
    def __init__(self, config: SphereVAEConfig) -> None:
        super().__init__(config, config.decoder_layers)
        width, last = config.z_channels, config.cnn_chs[0]
        self.conv_in = nn.Sequential(_ToGrid(), _conv(width, width), _ToCells())
        self.unpatchify = nn.Sequential(_ToGrid(), _Levels(_Up, config.cnn_chs[::-1]))
        self.conv_out = nn.Sequential(nn.GroupNorm(16, last, eps=NORM_EPS), nn.SiLU(), _conv(last, 3))

    def forward(self, cells: Tensor) -> Tensor:
        x = self.through_layers(self.conv_in(cells))
        return self.conv_out(self.unpatchify(x))


class SphereVAE(nn.Module):
    """Images [B, 3, H, W] in -1..1 to latents [B, latent_dim, h, w] with cells of length sqrt(latent_dim), and back."""

    def __init__(self, config: SphereVAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = _SphereEncoder(config)
        self.decoder = _SphereDecoder(config)
        self.quant_proj = nn.Linear(config.z_channels, config.latent_dim + 1)
        self.post_quant_proj = nn.Linear(config.latent_dim, config.z_channels, bias=False)

    def moments(self, image: Tensor) -> Tensor:
        """[B, h * w, latent_dim + 1]: the direction of each cell, not normalised, and its concentration's logit."""
        return self.quant_proj(self.encoder(image))

    def encode(self, image: Tensor) -> Tensor:
        """The mean directions of images as latents."""
        mean = self.moments(image)[..., :-1]
        cells = F.normalize(mean, dim=-1, eps=1e-7) * self.config.latent_dim**0.5
        return cells.transpose(1, 2).unflatten(2, (self.config.side, self.config.side))

    def decode(self, latents: Tensor) -> Tensor:
        """Images, about -1..1, of latents."""
        cells = latents.flatten(2).transpose(1, 2)
        return self.decoder(self.post_quant_proj(cells))


# BitDance's autoencoder (arXiv 2602.14041): convolutions only; cells are signs.


@dataclass(frozen=True)
class BitAutoencoderConfig:
    """Sizes of an autoencoder.

    Attributes:
        latent_dim: bits of a cell. ch: base width. ch_mult: width factor of each resolution level.
        num_res_blocks: residual blocks per level, and in the middle.
    """

    latent_dim: int = 32
    ch: int = 256
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 4

    @property
    def stride(self) -> int:
        """Pixels per cell, along a side."""
        return 2 ** (len(self.ch_mult) - 1)


class _BitBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = group_norm(in_channels), _conv(in_channels, out_channels)
        self.norm2, self.conv2 = group_norm(out_channels), _conv(out_channels, out_channels)
        if in_channels != out_channels:
            self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        if hasattr(self, "nin_shortcut"):
            x = self.nin_shortcut(x)
        return h + x


def _blocks(in_channels: int, out_channels: int, count: int) -> nn.ModuleList:
    widths = [in_channels] + [out_channels] * count
    return nn.ModuleList(_BitBlock(*pair) for pair in itertools.pairwise(widths))


def _through(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


class _BitEncoder(nn.Module):
    def __init__(self, config: BitAutoencoderConfig) -> None:
        super().__init__()
        widths = [config.ch] + [config.ch * factor for factor in config.ch_mult]
        self.conv_in = _conv(3, config.ch)
        self.down: Any = nn.ModuleList()
        for i, (before, width) in enumerate(itertools.pairwise(widths)):
            level = nn.Module()
            level.block = _blocks(before, width, config.num_res_blocks)
            if i < len(config.ch_mult) - 1:
                level.downsample = nn.Conv2d(width, width, 3, stride=2, padding=1)
            self.down.append(level)
        self.mid_block = _blocks(widths[-1], widths[-1], config.num_res_blocks)
        self.norm_out = group_norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], config.latent_dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = _through(level.block, x)
            if hasattr(level, "downsample"):
                x = level.downsample(x)
        x = _through(self.mid_block, x)
        return self.conv_out(F.silu(self.norm_out(x)))


class _Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 4 * channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        # the four pixels come before the channels, unlike in `pixel_shuffle`
        x = self.conv1(x).unflatten(1, (4, -1)).transpose(1, 2).flatten(1, 2)
        return F.pixel_shuffle(x, 2)


class _AdaptiveNorm(nn.Module):
    """Group norm whose scale and shift come from the statistics of the latent."""

    def __init__(self, latent_dim: int, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Linear(latent_dim, channels)
        self.beta = nn.Linear(latent_dim, channels)

    def forward(self, x: Tensor, latents: Tensor) -> Tensor:
        cells = latents.flatten(2)
        deviation = (cells.var(-1) + NORM_EPS).sqrt()
        # padded, so that an image is rounded alike in every batch
        scale = self.gamma(fill(deviation))[: len(x)]
        shift = self.beta(fill(cells.mean(-1)))[: len(x)]
        normed = F.group_norm(x, 32, eps=NORM_EPS)
        return scale[..., None, None] * normed + shift[..., None, None]


class _BitDecoder(nn.Module):
    def __init__(self, config: BitAutoencoderConfig) -> None:
        super().__init__()
        widths = [config.ch * factor for factor in config.ch_mult]
        above = [*widths[1:], widths[-1]]  # the width of the level before, from the lowest resolution up
        self.conv_in = nn.Conv2d(config.latent_dim, widths[-1], 3, padding=1)
        self.mid_block = _blocks(widths[-1], widths[-1], config.num_res_blocks)
        self.up: Any = nn.ModuleList()
        self.adaptive = nn.ModuleList()
        for i, (before, width) in enumerate(zip(above, widths)):
            level = nn.Module()
            level.block = _blocks(before, width, config.num_res_blocks)
            if i > 0:
                level.upsample = _Upsample(width)
            self.up.append(level)
            self.adaptive.append(_AdaptiveNorm(config.latent_dim, before))
        self.norm_out = group_norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        x = _through(self.mid_block, self.conv_in(latents))
        for level, adaptive in zip(reversed(self.up), reversed(self.adaptive)):
            x = _through(level.block, adaptive(x, latents))
            if hasattr(level, "upsample"):
                x = level.upsample(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class BitAutoencoder(nn.Module):
    """Images [B, 3, H, W] in -1..1 to latents of signs [B, latent_dim, H / stride, W / stride], and back."""

    def __init__(self, config: BitAutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = _BitEncoder(config)
        self.decoder = _BitDecoder(config)

    def encode(self, image: Tensor) -> Tensor:
        """The signs of images; that of 0 is -1."""
        return torch.where(self.encoder(image) > 0, 1.0, -1.0)

    def decode(self, latents: Tensor) -> Tensor:
        """Images, about -1..1, of latents."""
        return self.decoder(latents)
