"""From tokens to pixels, and pictures of 8 bits with their settings."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from cspd.terminal import __version__

PNG_TEXT = "cspd"  # the key of the settings among the texts of a PNG
DECODE_BATCH = 8  # images that a decoder takes at once: its activations are many times larger than its images


def decoded(decode: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Decodes tokens [B, ...] to images [B, 3, H, W], `DECODE_BATCH` at a time."""
    return torch.cat([decode(part) for part in tokens.split(DECODE_BATCH)])


def to_unit(images: Tensor) -> Tensor:
    """Images in 0..1 from images in about -1..1. Infinite pixels become NaN; clamped, they would look white."""
    images = images.add(1).div(2)
    zero_or_nan = images - images  # NaN for an infinite pixel; one kernel, whereas `torch.where` takes several
    return images.clamp(0, 1).add(zero_or_nan)


def is_in_unit_range(values: Tensor) -> bool:
    """Whether all values are in 0..1; NaN is not."""
    return bool(((values >= 0) & (values <= 1)).all())


def to_uint8(image: Tensor) -> Tensor:
    """Floats in 0..1 as uint8, in any shape; uint8 is returned as it is.

    Raises:
        ValueError: a value is NaN or outside 0..1.
    """
    if image.dtype == torch.uint8:
        return image
    # Values outside 0..1 would wrap around, and NaN would become an arbitrary number.
    if not image.is_floating_point() or not is_in_unit_range(image):
        low, high = image.min().item(), image.max().item()
        raise ValueError(f"an image of {image.dtype} from {low:g} to {high:g}: give uint8, or floats in 0..1")
    return (image * 255).round().to(torch.uint8)


def to_pil(image: Tensor) -> Image.Image:
    """A PIL image from [3, H, W], rounded as in `to_uint8`."""
    pixels = to_uint8(image).permute(1, 2, 0)
    return Image.fromarray(pixels.numpy())


def png_of(image: Image.Image, text: PngInfo | None = None) -> bytes:
    """The bytes of a PNG file, which carries a text such as `png_text`."""
    buffer = io.BytesIO()
    image.save(buffer, format="png", pnginfo=text)
    return buffer.getvalue()


def png_text(request: Mapping[str, object], models: Mapping[str, object]) -> PngInfo:
    """The text of a PNG with the settings of its image, as JSON: "version", "models" and "request".

    Args:
        request: from `Request.to_dict`. models: as in `Output`.
    """
    given = {name: value for name, value in request.items() if value is not None}
    settings = {"version": __version__, "models": dict(models), "request": given}
    text = PngInfo()
    text.add_text(PNG_TEXT, json.dumps(settings, sort_keys=True))
    return text
