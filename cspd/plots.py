"""Pictures: grids of images with captions, heat maps, and curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from matplotlib import color_sequences, colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

MARGIN = 4
PLACES = [
    (7, 7),
    (7, -7),
    (-7, 7),
    (-7, -7),
    (0, 12),
    (0, -12),
    (7, 17),
    (7, -17),
    (-7, 17),
    (-7, -17),
    (7, 0),
]  # of labels


def to_uint8(image: Tensor) -> Tensor:
    """uint8 [3, H, W] of float [3, H, W] in 0..1; uint8 stays as it is."""
    return image if image.dtype == torch.uint8 else (image * 255).round().to(torch.uint8)


def to_pil(image: Tensor) -> Image.Image:
    """A PIL image of [3, H, W], rounded as by `to_uint8`."""
    return Image.fromarray(to_uint8(image).permute(1, 2, 0).numpy())


def grid(images: Sequence[Image.Image], captions: Sequence[str], columns: int, min_side: int = 64) -> Image.Image:
    """Images in rows of `columns`, each over its caption; small ones are enlarged, by a whole factor."""
    factor = max(1, -(-min_side // images[0].width))
    side_x, side_y = images[0].width * factor, images[0].height * factor
    font = ImageFont.load_default(size=max(11, side_y // 6))
    line = math.ceil(font.getbbox("Ag")[3]) + MARGIN
    rows = -(-len(images) // columns)
    canvas = Image.new("RGB", (columns * (side_x + MARGIN) + MARGIN, rows * (side_y + line + MARGIN) + MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    for i, (image, caption) in enumerate(zip(images, captions)):
        x = MARGIN + i % columns * (side_x + MARGIN)
        y = MARGIN + i // columns * (side_y + line + MARGIN)
        canvas.paste(image.resize((side_x, side_y), Image.Resampling.NEAREST), (x, y))
        draw.text((x + side_x // 2, y + side_y), caption, fill="black", font=font, anchor="ma")
    return canvas


def seed_grid(
    rows: Sequence[tuple[str, Sequence[Image.Image]]], heads: Sequence[str], min_side: int = 64
) -> Image.Image:
    """A row of images for each (name, images), names at the left, heads above the columns; small ones are enlarged."""
    factor = max(1, -(-min_side // rows[0][1][0].width))
    side_x, side_y = rows[0][1][0].width * factor, rows[0][1][0].height * factor
    font = ImageFont.load_default(size=max(12, side_y // 10))
    line = math.ceil(font.getbbox("Ag")[3]) + 2
    names = [name.replace(":", "\n").split("\n") for name, _ in rows]
    left = math.ceil(max(font.getlength(part) for parts in names for part in parts)) + 3 * MARGIN
    top = line * max(head.count("\n") + 1 for head in heads) + 2 * MARGIN
    heights = [max(side_y, line * len(parts)) + MARGIN for parts in names]
    canvas = Image.new("RGB", (left + len(heads) * (side_x + MARGIN), top + sum(heights)), "white")
    draw = ImageDraw.Draw(canvas)
    for i, head in enumerate(heads):
        middle = left + i * (side_x + MARGIN) + side_x // 2
        draw.multiline_text((middle, MARGIN), head, fill="#555", font=font, anchor="ma", align="center", spacing=2)
    y = top
    for parts, (_, images), height in zip(names, rows, heights):
        middle = y + (height - MARGIN) // 2
        draw.multiline_text((MARGIN, middle), "\n".join(parts), fill="black", font=font, anchor="lm", spacing=2)
        for i, image in enumerate(images):
            place = (left + i * (side_x + MARGIN), y + (height - MARGIN - side_y) // 2)
            canvas.paste(image.resize((side_x, side_y), Image.Resampling.NEAREST), place)
        y += height
    return canvas


class Point(NamedTuple):
    """A measured point: what it is called, the line it is on, and how sure it is: a range and half an interval."""

    label: str
    speed: float
    quality: float
    line: str
    speed_range: tuple[float, float] | None = None
    quality_half: float | None = None


def speed_quality(panels: Sequence[tuple[str, str, Sequence[Point]]], path: Path | IO[bytes], **options: Any) -> None:
    """Writes scatters of quality against speed, a colour for every line, to an image file.

    Args:
        panels: of each what speed is called, what quality is called, and the points. A speed of 1 is plain sampling's.
            Of a quality that is a FID less is better: its axis is turned.
        options: of `Figure.savefig`, such as the format of what is written to a stream.
    """
    across = min(2, len(panels))
    figure = Figure(figsize=(7 * across, 4.5 * -(-len(panels) // across)), layout="constrained")
    FigureCanvasAgg(figure)  # knows how wide a text is
    names = list(dict.fromkeys(point.line for _, _, points in panels for point in points))
    palette = (*color_sequences["tab10"], *color_sequences["Dark2"])  # none too pale to read
    colours = {name: palette[i % len(palette)] for i, name in enumerate(names)}
    grid_of_axes = figure.subplots(-(-len(panels) // across), across, squeeze=False).flat
    for axes, (speed, quality, points) in zip(grid_of_axes, panels):
        for name in names:
            line = sorted((p.speed, p.quality) for p in points if p.line == name)
            if line:
                axes.plot(*zip(*line), "o-", label=name, color=colours[name], alpha=0.8)
        for p in points:
            low, high = p.speed_range or (p.speed, p.speed)
            across_bar = [[max(0, p.speed - low)], [max(0, high - p.speed)]]
            style: dict[str, Any] = {"color": colours[p.line], "alpha": 0.35, "lw": 1.2, "zorder": 1}
            axes.errorbar(p.speed, p.quality, xerr=across_bar, yerr=p.quality_half, **style)
        axes.axvline(1, color="lightgrey", zorder=0)
        axes.set(xlabel=speed, ylabel=quality)
        axes.margins(0.15)
        if quality.startswith("FID"):
            axes.invert_yaxis()
        elif max(p.quality for p in points) <= 1:  # a share
            axes.set_ylim(top=min(1.03, axes.get_ylim()[1]))
        axes.spines[["top", "right"]].set_visible(False)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_legend_handles_labels()[0]}
    named = {point.line for _, _, points in panels for point in points if point.label != point.line}
    if named:  # points that do not say themselves what they are of
        figure.axes[0].legend(handles=[lines[name] for name in names if name in named], fontsize=8)
    figure.canvas.draw()
    for axes, (_, _, points) in zip(figure.axes, panels):
        places = [axes.transData.transform((p.speed, p.quality)) for p in points]
        taken: list[Bbox] = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in places]
        for p in points:
            for dx, dy in PLACES:
                side = "left" if dx > 0 else "right" if dx < 0 else "center"
                style = {"textcoords": "offset points", "fontsize": 7, "ha": side, "va": "center"}
                text = axes.annotate(p.label, (p.speed, p.quality), xytext=(dx, dy), color=colours[p.line], **style)
                box = text.get_window_extent()
                if (dx, dy) == PLACES[-1] or not any(box.overlaps(other) for other in taken):
                    taken.append(box)
                    break
                text.remove()
    figure.savefig(path, dpi=120, **options)


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
        cost = np.full(1, np.nan) if values is None else np.array(values, dtype=float)
        side = math.isqrt(len(cost))
        scaled = (cost.reshape(side, side) - low) / max(high - low, 1e-9)
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
