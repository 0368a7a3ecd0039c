"""Pictures: grids of images with captions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

MARGIN = 4


def to_pil(image: Tensor) -> Image.Image:
    """A PIL image of float [3, H, W] in 0..1."""
    return Image.fromarray((image.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))


def grid(images: Sequence[Image.Image], captions: Sequence[str], columns: int, min_side: int = 64) -> Image.Image:
    """Images in rows of `columns`, each over its caption; small ones are enlarged, by a whole factor."""
    factor = max(1, -(-min_side // images[0].width))
    side_x, side_y = images[0].width * factor, images[0].height * factor
    font = ImageFont.load_default(size=max(11, side_y // 6))
    line = font.getbbox("Ag")[3] + MARGIN
    rows = -(-len(images) // columns)
    canvas = Image.new("RGB", (columns * (side_x + MARGIN) + MARGIN, rows * (side_y + line + MARGIN) + MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    for i, (image, caption) in enumerate(zip(images, captions)):
        x = MARGIN + i % columns * (side_x + MARGIN)
        y = MARGIN + i // columns * (side_y + line + MARGIN)
        canvas.paste(image.resize((side_x, side_y), Image.Resampling.NEAREST), (x, y))
        draw.text((x + side_x // 2, y + side_y), caption, fill="black", font=font, anchor="ma")
    return canvas
