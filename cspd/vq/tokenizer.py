"""LlamaGen's VQ tokenizer between images and codes (Sun et al. 2024, after Esser et al. 2021); official names."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from mar.vae import AttnBlock, Downsample, ResnetBlock, Upsample


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
