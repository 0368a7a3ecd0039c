"""From tokens to pixels: what the hosts of both families do with their decoders."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

DECODE_BATCH = 8  # images through a decoder at once, which bounds its memory


def decoded(decode: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Images [B, 3, H, W] in about -1..1 by a decoder of tokens [B, ...], a few at a time."""
    return torch.cat([decode(part) for part in tokens.split(DECODE_BATCH)])


def to_unit(images: Tensor) -> Tensor:
    """Images in 0..1 of those in about -1..1. Infinite pixels become NaN: clamped they would pass for white."""
    images = images.add(1).div(2)
    return images.clamp(0, 1).where(images.isfinite(), torch.nan)
