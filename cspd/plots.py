"""Pictures: grids of images with captions, heat maps, and curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
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


def speed_quality(points: Sequence[tuple[str, float, float, str]], quality: str, path: Path) -> None:
    """Writes a scatter of quality against speed-up, a colour and a line for every method, to an image file.

    Args:
        points: (label, speed-up over plain sampling, quality, method). quality: what it is called.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for method in dict.fromkeys(point[3] for point in points):
        of_method = sorted((x, y, label) for label, x, y, name in points if name == method)
        axes.plot([x for x, _, _ in of_method], [y for _, y, _ in of_method], "o-", label=method)
        for x, y, label in of_method:
            axes.annotate(label, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.axvline(1, color="lightgrey", zorder=0)
    axes.set(xlabel="speed-up over plain sampling", ylabel=quality)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def heat_grid(
    heat: Sequence[Sequence[float] | None],
    size: tuple[int, int],
    captions: Sequence[str],
    columns: int,
    accepted: bool,
) -> Image.Image:
    """A grid like `grid`'s where each token's cell is coloured by what it cost, with a legend below.

    Args:
        heat: [L] of each image, raster order, see `Output.heat`; None, for an image or for NaN, is left blank.
        size: of an image, in pixels. accepted: 1 means accepted, 0 resampled; else heat counts head calls.
    """
    known = np.array([value for cells in heat if cells for value in cells], dtype=float)  # None becomes NaN
    low, high = (0.0, 1.0) if accepted or not np.isfinite(known).any() else (np.nanmin(known), np.nanmax(known))
    colours = colormaps["RdYlGn" if accepted else "viridis"].with_extremes(bad="lightgrey")

    def cells(values: Sequence[float] | None) -> Image.Image:
        side = 1 if values is None else math.isqrt(len(values))
        values = np.full(1, np.nan) if values is None else np.array(values, dtype=float)
        scaled = (values.reshape(side, side) - low) / max(high - low, 1e-9)
        picture = colours(np.ma.masked_invalid(scaled), bytes=True)[..., :3]
        return Image.fromarray(picture).resize(size, Image.Resampling.NEAREST)

    picture = grid([cells(values) for values in heat], captions, columns)
    if accepted:
        legend = [(0.0, "drawn by the target"), (1.0, "accepted"), (np.nan, "target alone")]
    else:
        legend = [(value, f"{low + value * (high - low):.0f}") for value in np.linspace(0, 1, 5)]
        legend[-1] = (1.0, f"{high:.0f} head calls")
    line, font = 18, ImageFont.load_default(size=12)
    widths = [line + 3 * MARGIN + math.ceil(font.getlength(text)) for _, text in legend]
    canvas = Image.new("RGB", (max(picture.width, sum(widths)), picture.height + line + 2 * MARGIN), "white")
    canvas.paste(picture)
    draw, x = ImageDraw.Draw(canvas), MARGIN
    for (value, text), width in zip(legend, widths):
        colour = tuple(colours(np.ma.masked_invalid([value]), bytes=True)[0, :3].tolist())
        draw.rectangle((x, picture.height, x + line, picture.height + line), fill=colour)
        draw.text((x + line + MARGIN, picture.height + 2), text, fill="black", font=font)
        x += width
    return canvas
