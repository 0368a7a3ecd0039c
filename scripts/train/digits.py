"""Coloured digits, the data set of the bundled digit models: 32x32 RGB in 10 classes, drawn on the fly from a seed.

They are the 1,797 handwritten digits of scikit-learn (8x8, grey), upsampled and smoothed, with a small random rotation,
scale and shift, in a random bright colour on a random dark gradient of two colours.
"""

from __future__ import annotations

import colorsys
import functools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

SIZE = 32
HELD_OUT_EVERY = 8  # every eighth digit is held out from training
BRIGHT = [colorsys.hsv_to_rgb(h / 8, 0.65, 1.0) for h in range(8)]
DARK = [colorsys.hsv_to_rgb(h / 6, 0.75, 0.35) for h in range(6)]
DIRECTIONS = 8


@functools.cache
def _strokes(split: str) -> tuple[Tensor, Tensor]:
    """Smooth stroke maps [N, 1, 32, 32] in 0..1 and labels [N] of one split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install '.[train]'") from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    held_out = torch.arange(len(labels)) % HELD_OUT_EVERY == 0
    keep = held_out if split == "held-out" else ~held_out
    return F.interpolate(images[keep], size=(SIZE, SIZE), mode="bicubic").clamp(0, 1), labels[keep]


def coloured_digits(num: int, seed: int, split: str = "train", labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draws `num` images; the same arguments give the same images.

    Args:
        seed: of this batch. split: "train" or "held-out" (other handwriting).
        labels: int64 [num]; random by default.

    Returns:
        images [num, 3, 32, 32] in -1..1, and labels [num].

    Raises:
        ValueError: unknown split. ImportError: scikit-learn is missing.
    """
    if split not in ("train", "held-out"):
        raise ValueError(f"split={split!r}: choose 'train' or 'held-out'")
    generator = torch.Generator().manual_seed(seed)
    strokes, classes = _strokes(split)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(num, generator=generator)

    def colours(palette: list[tuple[float, float, float]]) -> Tensor:
        index = torch.randint(len(palette), (num,), generator=generator)
        return torch.tensor(palette)[index].reshape(num, 3, 1, 1)

    # which handwritten digits
    if labels is None:
        index = torch.randint(len(classes), (num,), generator=generator)
    else:
        wanted = (classes == labels.unsqueeze(1)).float()
        index = torch.multinomial(wanted, 1, generator=generator).squeeze(1)

    # turned, scaled and shifted
    angle = uniform(-8, 8) * math.pi / 180
    scale = uniform(0.95, 1.15)
    cos = angle.cos() / scale
    sin = angle.sin() / scale
    shift_x = uniform(-0.06, 0.06)
    shift_y = uniform(-0.06, 0.06)
    theta = torch.stack([cos, -sin, shift_x, sin, cos, shift_y], dim=1).view(num, 2, 3)
    grid = F.affine_grid(theta, (num, 1, SIZE, SIZE), align_corners=False)
    stroke = F.grid_sample(strokes[index], grid, align_corners=False)

    # crisp inside, smooth at the rim
    stroke = ((stroke - 0.2) / 0.5).clamp(0, 1)
    stroke = stroke * stroke * (3 - 2 * stroke)

    # on a gradient between two dark colours
    direction = torch.randint(DIRECTIONS, (num, 1, 1), generator=generator) * (2 * math.pi / DIRECTIONS)
    axis = torch.linspace(-0.5, 0.5, SIZE)
    along = axis * direction.cos() + axis.unsqueeze(1) * direction.sin()
    ramp = (0.5 + along * 0.8).unsqueeze(1)
    background = torch.lerp(colours(DARK), colours(DARK), ramp)
    images = torch.lerp(background, colours(BRIGHT), stroke) * 2 - 1
    return images, classes[index]
