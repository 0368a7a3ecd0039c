"""The VQ models of `transformers` in the place of LlamaGen's tokenizer, between images and codes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cspd.vq.hosted.config import Image
from mar.tensors import CheckpointError, read_tensors
from mar.vae import Decoder, KLConfig


@dataclass(frozen=True)
class PixelsConfig:
    """codebook_size: V codes. stride: pixels per code, along a side."""

    codebook_size: int
    stride: int


class Pixels(nn.Module):
    """Images [B, 3, H, W] in -1..1 to codes [B, L] in raster order, and back. It computes in float32.

    Args:
        vqmodel: of `transformers`, which becomes float32. image: what the codes are of.
    """

    def __init__(self, vqmodel: Any, image: Image) -> None:
        super().__init__()
        self.config = PixelsConfig(image.num_codes, image.stride)
        self.image = image
        self.vqmodel = vqmodel.float()

    @property
    def quantize(self) -> nn.Module:
        """What has the codebook as it is stored, `embedding`."""
        return self.vqmodel.quantize

    @property
    def codebook(self) -> Tensor:
        """The vectors that the decoder receives [V, c]."""
        return self.quantize.embedding.weight

    def _normed(self, image: Tensor) -> Tensor:
        """Pixels as the VQ model knows them."""
        mean, std = (image.new_tensor(numbers).view(3, 1, 1) for numbers in (self.image.mean, self.image.std))
        return ((image + 1) / 2 - mean) / std

    def _in_range(self, image: Tensor) -> Tensor:
        """Pixels about -1..1 of those of the VQ model."""
        mean, std = (image.new_tensor(numbers).view(3, 1, 1) for numbers in (self.image.mean, self.image.std))
        return (image * std + mean) * 2 - 1


class JanusPixels(Pixels):
    @property
    def codebook(self) -> Tensor:
        return functional.normalize(super().codebook, dim=-1)

    def encode(self, image: Tensor) -> Tensor:
        return self.vqmodel.encode(self._normed(image)).image_tokens.view(len(image), -1)

    def decode(self, codes: Tensor) -> Tensor:
        return self._in_range(self.vqmodel.decode(codes))


class ChameleonPixels(Pixels):
    """`transformers` has an encoder alone; the decoder is that of Chameleon's own file, which has LDM's layers.

    Args:
        decoder: the file, `vqgan.ckpt`, as it lies beside Chameleon's and Anole's weights.

    Attributes:
        from_file: the names of the VQ model's tensors that the file has too, which are taken from it: Lumina-mGPT is
            trained without them.

    Raises CheckpointError where it is another file, or cannot be read.
    """

    def __init__(self, vqmodel: Any, image: Image, decoder: Path) -> None:
        super().__init__(vqmodel, image)
        own = vqmodel.config
        sizes = {
            "ch": own.base_channels,
            "ch_mult": tuple(own.channel_multiplier),
            "num_res_blocks": own.num_res_blocks,
        }
        self.decoder = Decoder(KLConfig(embed_dim=own.latent_channels, **sizes))
        self.post_quant_conv = nn.Conv2d(own.embed_dim, own.latent_channels, 1)
        tensors = read_tensors(decoder)
        for name in ("decoder", "post_quant_conv"):
            part = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
            try:
                getattr(self, name).load_state_dict(part)
            except RuntimeError as error:
                raise CheckpointError(f"{decoder}: not the image decoder of this model ({error})") from error
        encoder = vqmodel.state_dict()
        found = {name: value for name, value in tensors.items() if name in encoder}
        fitting = {name: value for name, value in found.items() if value.shape == encoder[name].shape}
        vqmodel.load_state_dict(fitting, strict=False)
        self.from_file = fitting.keys()

    def encode(self, image: Tensor) -> Tensor:
        return self.vqmodel.encode(self._normed(image)).image_tokens.view(len(image), -1)

    def decode(self, codes: Tensor) -> Tensor:
        side = self.image.side
        vectors = self.codebook[codes].transpose(1, 2).unflatten(2, (side, side))
        return self._in_range(self.decoder(self.post_quant_conv(vectors)))


class Emu3Pixels(Pixels):
    def encode(self, image: Tensor) -> Tensor:
        sizes = torch.tensor([image.shape[-2:]] * len(image))
        return torch.stack(self.vqmodel.encode(self._normed(image), sizes).image_tokens).flatten(1)

    def decode(self, codes: Tensor) -> Tensor:
        side = self.image.side
        return self._in_range(self.vqmodel.decode(codes.unflatten(1, (side, side))))
