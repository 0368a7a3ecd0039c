"""From tokens to pixels: what the hosts of both families do with their decoders, and images of 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from PIL import Image
from torch import Tensor

DECODE_BATCH = 8  # images through a decoder at once, which bounds its memory


def decoded(decode: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Images [B, 3, H, W] in about -1..1 by a decoder of tokens [B, ...], a few at a time."""
    return torch.cat([decode(part) for part in tokens.split(DECODE_BATCH)])


def to_unit(images: Tensor) -> Tensor:
    """Images in 0..1 of those in about -1..1. Infinite pixels become NaN: clamped they would pass for white."""
    images = images.add(1).div(2)
    return images.clamp(0, 1).add(images - images)  # 0 where they are finite, or else NaN: few kernels


def to_uint8(image: Tensor) -> Tensor:
    """uint8 of floats in 0..1, of any shape such as [3, H, W]; uint8 stays as it is.

    Raises:
        ValueError: other values, or NaN: as 8 bits they would wrap around.
    """
    if image.dtype == torch.uint8:
        return image
    if not image.is_floating_point() or not ((image >= 0) & (image <= 1)).all():
        dtype, low, high = image.dtype, image.min().item(), image.max().item()
        raise ValueError(f"an image of {dtype} from {low:g} to {high:g}: give uint8, or floats in 0..1")
    return (image * 255).round().to(torch.uint8)


def to_pil(image: Tensor) -> Image.Image:
    """A PIL image of [3, H, W], rounded as by `to_uint8`."""
    return Image.fromarray(to_uint8(image).permute(1, 2, 0).numpy())
