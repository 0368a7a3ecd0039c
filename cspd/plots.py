"""Pictures: grids of images with captions, heat maps, and curves."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from matplotlib import color_sequences, colormaps, rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox
from matplotlib.typing import ColorType
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

MARKS = {"exact": "o", "measured": "D", "bounded": "s", "heuristic": "^"}  # a point's, by its guarantee
MARGIN = 4
LINE = 18  # height of a heat map's legend, in pixels
# where a point's label may be, in points from it; the first that is free is taken
PLACES = [(7, 7), (7, -7), (-7, 7), (-7, -7), (0, 12), (0, -12), (7, 17), (7, -17), (-7, 17), (-7, -17), (7, 0)]


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


def _enlarged(image: Image.Image, min_side: int) -> tuple[int, int]:
    """An image's size, or the smallest whole multiple of it that is `min_side` wide."""
    factor = max(1, math.ceil(min_side / image.width))
    return image.width * factor, image.height * factor


def grid(images: Sequence[Image.Image], captions: Sequence[str], columns: int, min_side: int = 64) -> Image.Image:
    """Images in rows of `columns`, each over its caption; small ones are enlarged, by a whole factor."""
    width, height = size = _enlarged(images[0], min_side)
    font = ImageFont.load_default(size=max(11, height // 6))
    caption_height = math.ceil(font.getbbox("Ag")[3]) + MARGIN
    column_width = width + MARGIN
    row_height = height + caption_height + MARGIN
    rows = math.ceil(len(images) / columns)
    canvas = Image.new("RGB", (columns * column_width + MARGIN, rows * row_height + MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    for i, (image, caption) in enumerate(zip(images, captions)):
        row, column = divmod(i, columns)
        x = MARGIN + column * column_width
        y = MARGIN + row * row_height
        canvas.paste(image.resize(size, Image.Resampling.NEAREST), (x, y))
        draw.text((x + width // 2, y + height), caption, fill="black", font=font, anchor="ma")
    return canvas


def seed_grid(
    rows: Sequence[tuple[str, Sequence[Image.Image]]], heads: Sequence[str], min_side: int = 64
) -> Image.Image:
    """A row of images for each (name, images), names at the left, heads above the columns; small ones are enlarged."""
    width, height = size = _enlarged(rows[0][1][0], min_side)
    font = ImageFont.load_default(size=max(12, height // 10))
    line = math.ceil(font.getbbox("Ag")[3]) + 2
    names = [name.replace(":", "\n") for name, _ in rows]
    name_width = max(font.getlength(part) for name in names for part in name.split("\n"))
    left = math.ceil(name_width) + 3 * MARGIN
    top = line * max(_lines(head) for head in heads) + 2 * MARGIN
    row_heights = [max(height, line * _lines(name)) + MARGIN for name in names]
    column_starts = [left + i * (width + MARGIN) for i in range(len(heads))]

    canvas = Image.new("RGB", (left + len(heads) * (width + MARGIN), top + sum(row_heights)), "white")
    draw = ImageDraw.Draw(canvas)
    for x, head in zip(column_starts, heads):
        place = (x + width // 2, MARGIN)
        draw.multiline_text(place, head, fill="#555", font=font, anchor="ma", align="center", spacing=2)
    y = top
    for name, (_, images), row_height in zip(names, rows, row_heights):
        middle = y + (row_height - MARGIN) // 2
        draw.multiline_text((MARGIN, middle), name, fill="black", font=font, anchor="lm", spacing=2)
        image_y = y + (row_height - MARGIN - height) // 2
        for x, image in zip(column_starts, images):
            canvas.paste(image.resize(size, Image.Resampling.NEAREST), (x, image_y))
        y += row_height
    return canvas


def _lines(text: str) -> int:
    return text.count("\n") + 1


class Point(NamedTuple):
    """A measured point: what it is called, the line it is on, how sure it is, and its guarantee, a key of `MARKS`.

    How sure: a range of the speed, and half an interval of the quality. Those `on_front` are joined by a dotted line.
    """

    label: str
    speed: float
    quality: float
    line: str
    speed_range: tuple[float, float] | None = None
    quality_half: float | None = None
    guarantee: str = "exact"
    on_front: bool = False


@contextlib.contextmanager
def _any_text() -> Iterator[None]:
    """Names are drawn as they are: a dollar begins no formula, and a letter that the font lacks is a box."""
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


@_any_text()
def speed_quality(
    panels: Sequence[tuple[str, str, Sequence[Point]]], file: Path | IO[bytes], image_format: str = "png"
) -> None:
    """Writes scatters of quality against speed, a colour for every line and a mark for every guarantee.

    Args:
        panels: the name of the speed, the name of the quality, and the points. A speed of 1 is plain sampling's. The
            axis of a FID is turned round: lower is better.
        image_format: one that matplotlib writes: "png", "svg", "pdf".
    """
    across = min(2, len(panels))
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(7 * across, 4.5 * down), layout="constrained")
    FigureCanvasAgg(figure)  # knows how wide a text is
    all_points = [point for _, _, points in panels for point in points]
    names = list(dict.fromkeys(point.line for point in all_points))
    palette = (*color_sequences["tab10"], *color_sequences["Dark2"])  # none too pale to read
    colours = {name: palette[i % len(palette)] for i, name in enumerate(names)}

    handles: dict[str, Artist] = {}
    for axes, (speed, quality, points) in zip(figure.subplots(down, across, squeeze=False).flat, panels):
        handles |= _draw_points(axes, points, colours)
        axes.set(xlabel=speed, ylabel=quality)
        axes.margins(0.15)
        if quality.startswith("FID"):
            axes.invert_yaxis()
        elif max(point.quality for point in points) <= 1:  # a share
            axes.set_ylim(top=min(1.03, axes.get_ylim()[1]))
        axes.spines[["top", "right"]].set_visible(False)

    unnamed = {point.line for point in all_points if point.label != point.line}
    entries = [(handles[name], name) for name in names if name in unnamed]  # that no point's label names
    given = {point.guarantee for point in all_points}
    if len(given) > 1:
        marks = {
            name: Line2D([], [], marker=mark, color="grey", ls="") for name, mark in MARKS.items() if name in given
        }
        entries += [(mark, name) for name, mark in marks.items()]
    if entries:
        figure.axes[0].legend(*zip(*entries), fontsize=8)
    figure.canvas.draw()
    for axes, (_, _, points) in zip(figure.axes, panels):
        _label_points(axes, points, colours)
    figure.savefig(file, dpi=120, format=image_format)


def _draw_points(axes: Axes, points: Sequence[Point], colours: Mapping[str, ColorType]) -> dict[str, Artist]:
    """Each line through its points, faint bars for how sure they are, and a mark at plain sampling's speed.

    Returns the lines by name.
    """
    drawn: dict[str, Artist] = {}
    for name, colour in colours.items():
        line = sorted((point.speed, point.quality) for point in points if point.line == name)
        if line:
            (drawn[name],) = axes.plot(*zip(*line), "-", label=name, color=colour, alpha=0.8)
    for point in points:
        low, high = point.speed_range or (point.speed, point.speed)
        speed_bar = [[max(0, point.speed - low)], [max(0, high - point.speed)]]
        style: dict[str, Any] = {"color": colours[point.line], "alpha": 0.35, "lw": 1.2, "zorder": 1}
        axes.errorbar(point.speed, point.quality, xerr=speed_bar, yerr=point.quality_half, **style)
        axes.plot(point.speed, point.quality, MARKS[point.guarantee], color=colours[point.line], alpha=0.8)
    front = sorted((point.speed, point.quality) for point in points if point.on_front)
    axes.plot([speed for speed, _ in front], [quality for _, quality in front], ":", color="grey", zorder=0)
    axes.axvline(1, color="lightgrey", zorder=0)
    return drawn


def _label_points(axes: Axes, points: Sequence[Point], colours: Mapping[str, ColorType]) -> None:
    """Writes each point's label at the first place where it covers no point and no other label."""
    places = [axes.transData.transform((point.speed, point.quality)) for point in points]
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in places]
    for point in points:
        for across, up in PLACES:
            side = "left" if across > 0 else "right" if across < 0 else "center"
            text = axes.annotate(
                point.label,
                (point.speed, point.quality),
                xytext=(across, up),
                textcoords="offset points",
                color=colours[point.line],
                fontsize=7,
                ha=side,
                va="center",
            )
            box = text.get_window_extent()
            if (across, up) == PLACES[-1] or not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


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
    low, high = 0.0, 1.0
    if not accepted and np.isfinite(known).any():
        low, high = np.nanmin(known), np.nanmax(known)
    colours = colormaps["RdYlGn" if accepted else "viridis"].with_extremes(bad="lightgrey")

    def coloured(shares: np.ndarray) -> np.ndarray:
        """uint8 [..., 3] of shares of the way from low to high; NaN is grey."""
        return colours(np.ma.masked_invalid(shares), bytes=True)[..., :3]

    def picture(values: Sequence[float] | None) -> Image.Image:
        costs = np.array([np.nan] if values is None else values, dtype=float)
        side = math.isqrt(len(costs))
        shares = (costs.reshape(side, side) - low) / max(high - low, 1e-9)
        return Image.fromarray(coloured(shares)).resize(size, Image.Resampling.NEAREST)

    pictures = grid([picture(values) for values in heat], captions, columns)
    if accepted:
        legend = [(0.0, "drawn by the target"), (1.0, "accepted"), (np.nan, "target alone")]
    else:
        legend = [(share, f"{low + share * (high - low):.0f}") for share in np.linspace(0, 1, 5)]
        legend[-1] = (1.0, f"{high:.0f} head calls")
    entries = [(tuple(coloured(np.array([share]))[0].tolist()), text) for share, text in legend]
    return _with_legend(pictures, entries)


def _with_legend(picture: Image.Image, entries: Sequence[tuple[tuple[int, int, int], str]]) -> Image.Image:
    """A picture above a line of coloured squares, each with its text."""
    font = ImageFont.load_default(size=12)
    widths = [LINE + 3 * MARGIN + math.ceil(font.getlength(text)) for _, text in entries]
    size = (max(picture.width, sum(widths)), picture.height + LINE + 2 * MARGIN)
    canvas = Image.new("RGB", size, "white")
    canvas.paste(picture)
    draw = ImageDraw.Draw(canvas)
    x, y = MARGIN, picture.height
    for (colour, text), width in zip(entries, widths):
        draw.rectangle((x, y, x + LINE, y + LINE), fill=colour)
        draw.text((x + LINE + MARGIN, y + 2), text, fill="black", font=font)
        x += width
    return canvas
