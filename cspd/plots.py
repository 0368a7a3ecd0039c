"""Pictures of pictures: grids, heat maps, and scatter plots of speed and quality."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import color_sequences, rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox
from matplotlib.typing import ColorType
from PIL import Image, ImageDraw, ImageFont

# Pictures: grids of images with captions, and heat maps.

MARGIN = 4
WIDE = 1000  # pixels that a grid of small images is enlarged to, about
LARGEST_CELL = 256  # side that none of them is enlarged beyond
LONGEST = 4096  # pixels of a grid's longer side: larger images are reduced
LINE = 22  # height of a heat map's legend, in pixels
BAR = 240  # width of its colours, from the least to the most
CAPTION = 3  # lines of one that is too long for one, at most
ELLIPSIS = "..."
LEAST_FONT = 8  # which can still be read
UNKNOWN = (128, 128, 128)  # between viridis' darkest and lightest, for those who see no colours


def _scaled(image: Image.Image, columns: int, rows: int) -> tuple[int, int]:
    """The size that an image is shown at in a grid: its own, enlarged or reduced by a whole factor."""
    width, height = image.size
    enlarged = min(WIDE // (columns * width), LARGEST_CELL // max(width, height))
    if enlarged > 1:
        return width * enlarged, height * enlarged
    reduced = math.ceil(max(columns * width, rows * height) / LONGEST)
    return max(1, width // reduced), max(1, height // reduced)


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """An image at another size: larger ones show its pixels as they are, smaller ones their means."""
    larger = size[0] >= image.width
    return image.resize(size, Image.Resampling.NEAREST if larger else Image.Resampling.BOX)


def _font(size: int, texts: Sequence[str], width: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """A font of this size, or of a smaller one in which all texts are so narrow, if they can still be read."""
    font = ImageFont.load_default(size=size)
    widest = max((font.getlength(text) for text in texts), default=0)
    return font if widest <= width else ImageFont.load_default(size=max(LEAST_FONT, int(size * width / widest)))


def _captioned(
    captions: Sequence[str], size: int, width: int
) -> tuple[ImageFont.FreeTypeFont | ImageFont.ImageFont, list[str]]:
    """A font of this size, or of a smaller one, and captions in it so wide at most: a line of each, or if they are too
    long for that, as many as `CAPTION`; an ellipsis is in the place of what is too much.
    """
    font = _font(size, captions, width)
    if all(font.getlength(caption) <= width for caption in captions):
        return font, list(captions)
    for smaller in range(size, LEAST_FONT - 1, -1):
        font = ImageFont.load_default(size=smaller)
        wrapped = [_wrapped(caption, font, width) for caption in captions]
        if all(len(lines) <= CAPTION for lines in wrapped):
            break
    return font, [_fitted(caption, font, width) for caption in captions]


def _fitted(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """A text in at most `CAPTION` lines that are so wide at most; an ellipsis ends what is cut."""
    lines = _wrapped(text[: CAPTION * width], font, width)  # no letter is narrower than a pixel
    kept = lines[:CAPTION]
    if len(lines) > CAPTION:
        kept[-1] += ELLIPSIS
    return "\n".join(_cut(line, font, width) for line in kept)


def _cut(line: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """As much of a line as is so wide at most."""
    while font.getlength(line) > width and len(line) > len(ELLIPSIS):
        line = line.removesuffix(ELLIPSIS)[:-1].rstrip() + ELLIPSIS
    return line


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """A text in lines that are so wide at most, if its words are."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def grid(images: Sequence[Image.Image], captions: Sequence[str], columns: int) -> Image.Image:
    """Images in rows of `columns`, each over its caption, enlarged or reduced by a whole factor to a useful size."""
    rows = math.ceil(len(images) / columns)
    width, height = size = _scaled(images[0], columns, rows)
    font, captions = _captioned(captions, min(20, max(12, height // 6)), width)
    caption_height = math.ceil(font.getbbox("Ag")[3]) * max(map(_lines, captions), default=1) + MARGIN
    column_width = width + MARGIN
    row_height = height + caption_height + MARGIN
    canvas = Image.new("RGB", (columns * column_width + MARGIN, rows * row_height + MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    for i, (image, caption) in enumerate(zip(images, captions)):
        row, column = divmod(i, columns)
        x = MARGIN + column * column_width
        y = MARGIN + row * row_height
        canvas.paste(_resized(image, size), (x, y))
        place = (x + width // 2, y + height)
        draw.text(place, caption, fill="black", font=font, anchor="ma", align="center", spacing=0)
    return canvas


def seed_grid(rows: Sequence[tuple[str, Sequence[Image.Image]]], heads: Sequence[str]) -> Image.Image:
    """A row of images for each (name, images), names at the left, heads above the columns; sizes are as in `grid`.

    A line of a head that is too long is wrapped, as captions are.
    """
    width, height = size = _scaled(rows[0][1][0], len(heads), len(rows))
    font = ImageFont.load_default(size=min(20, max(14, height // 6)))
    line = math.ceil(font.getbbox("Ag")[3]) + 2
    heads = ["\n".join(_fitted(part, font, width) for part in head.split("\n")) for head in heads]
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
            canvas.paste(_resized(image, size), (x, image_y))
        y += row_height
    return canvas


def beside(pngs: Sequence[bytes], columns: int = 2) -> Image.Image:
    """Pictures of one size, from their PNGs, in rows of `columns`."""
    pictures = [Image.open(io.BytesIO(png)).convert("RGB") for png in pngs]
    width, height = pictures[0].size
    across = min(columns, len(pictures))
    canvas = Image.new("RGB", (across * width, math.ceil(len(pictures) / across) * height), "white")
    for i, picture in enumerate(pictures):
        row, column = divmod(i, across)
        canvas.paste(picture, (column * width, row * height))
    return canvas


def _lines(text: str) -> int:
    return text.count("\n") + 1


def token_cost_grid(
    images: Sequence[Image.Image],
    token_cost: Sequence[Sequence[float] | None],
    captions: Sequence[str],
    columns: int,
    accepted: bool,
) -> Image.Image:
    """A grid of images, each beside the costs of its tokens as colours, with a legend below.

    Args:
        token_cost: [L] of each image, raster order, see `Output`; None, for an image or for NaN, is left grey.
        accepted: 1 means accepted, 0 resampled; else heat counts head calls.
    """
    known = np.array([value for cells in token_cost if cells for value in cells], dtype=float)  # None becomes NaN
    low, high = 0.0, 1.0
    if not accepted and np.isfinite(known).any():
        low, high = np.nanmin(known), np.nanmax(known)

    def pair(image: Image.Image, values: Sequence[float] | None) -> Image.Image:
        costs = np.array([np.nan] if values is None else values, dtype=float)
        side = math.isqrt(len(costs))
        shares = (costs.reshape(side, side) - low) / max(high - low, 1e-9)
        both = Image.new("RGB", (2 * image.width, image.height))
        both.paste(image)
        both.paste(coloured(shares).resize(image.size, Image.Resampling.NEAREST), (image.width, 0))
        return both

    pictures = grid([pair(image, values) for image, values in zip(images, token_cost)], captions, columns)
    if accepted:
        return _above(pictures, _squares([(0.0, "rejected"), (1.0, "accepted"), (np.nan, "not drafted")]))
    return _above(pictures, _colour_bar(low, high, "head calls per token"))


def coloured(shares: np.ndarray) -> Image.Image:
    """A picture of shares [H, W] of the way from the least to the most, in colours that all eyes tell apart."""
    from matplotlib import colormaps  # half a second, and only heat maps need it

    colours = colormaps["viridis"](shares, bytes=True)[..., :3]
    colours[np.isnan(shares)] = UNKNOWN
    return Image.fromarray(colours)


def _above(picture: Image.Image, legend: Image.Image) -> Image.Image:
    """A picture above its legend."""
    canvas = Image.new("RGB", (max(picture.width, legend.width), picture.height + legend.height), "white")
    canvas.paste(picture)
    canvas.paste(legend, (0, picture.height))
    return canvas


def _legend_font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=LINE - 2 * MARGIN)


def _squares(entries: Sequence[tuple[float, str]]) -> Image.Image:
    """A line of squares in the colours of shares, each with what it means."""
    font = _legend_font()
    widths = [LINE + 4 * MARGIN + math.ceil(font.getlength(text)) for _, text in entries]
    canvas = Image.new("RGB", (MARGIN + sum(widths), LINE + 2 * MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    x = MARGIN
    for (share, text), width in zip(entries, widths):
        canvas.paste(coloured(np.array([[share]])).resize((LINE, LINE)), (x, MARGIN))
        draw.text((x + LINE + MARGIN, MARGIN + LINE // 2), text, fill="black", font=font, anchor="lm")
        x += width
    return canvas


def _colour_bar(low: float, high: float, unit: str) -> Image.Image:
    """All colours between the least and the most, and what is counted."""
    font = _legend_font()
    ends = f"{low:.0f}", f"{high:.0f} {unit}"
    left = 2 * MARGIN + math.ceil(font.getlength(ends[0]))
    right = 2 * MARGIN + math.ceil(font.getlength(ends[1]))
    canvas = Image.new("RGB", (left + BAR + right, LINE + 2 * MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    canvas.paste(coloured(np.linspace(0, 1, BAR)[None]).resize((BAR, LINE)), (left, MARGIN))
    middle = MARGIN + LINE // 2
    draw.text((left - MARGIN, middle), ends[0], fill="black", font=font, anchor="rm")
    draw.text((left + BAR + MARGIN, middle), ends[1], fill="black", font=font, anchor="lm")
    return canvas


# Plots of quality against speed.

MARKS = {"exact": "o", "measured": "D", "bounded": "s", "heuristic": "^"}  # a point's, by its guarantee
SIZE = (5.2, 4.0)  # inches: on a phone, which is as wide as half of that, letters are half as large and still legible
RESOLUTION = 200  # dots per inch
SMALL = 8.5  # points of the smallest letters
# where a point's label may be, in points from it; the first that is free is taken
PLACES = [(across, up) for up in (7, -7, 19, -19, 31, -31) for across in (7, -7)] + [(7, 0)]


class Point(NamedTuple):
    """A measured point: what it is called, the line it is on, how sure it is, and its guarantee, a key of `MARKS`.

    How sure: a range of the speed, and an interval of the quality. Those `on_front` are joined by a dotted line.
    """

    label: str
    speed: float
    quality: float
    line: str
    speed_range: tuple[float, float] | None = None
    quality_range: Sequence[float] | None = None
    guarantee: str = "exact"
    on_front: bool = False


@contextlib.contextmanager
def _any_text() -> Iterator[None]:
    """Names are drawn as they are: a dollar begins no formula, and a letter that the font lacks is a box."""
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


class Panel(NamedTuple):
    """A plot: what is across and up, with their units, and the points. A speed-up of 1 is plain sampling's."""

    speed: str
    quality: str
    points: Sequence[Point]


@_any_text()
def speed_quality(panels: Sequence[Panel], image_format: str = "png") -> list[bytes]:
    """Scatters of quality against speed, a colour for every line of all panels and a mark for every guarantee.

    The axis of a FID is turned round, so that up is better everywhere.

    Args:
        image_format: one that matplotlib writes: "png", "svg", "pdf".

    Returns:
        The content of a file for each panel.
    """
    names = dict.fromkeys(point.line for panel in panels for point in panel.points)
    palette = (*color_sequences["tab10"], *color_sequences["Dark2"])  # none too pale to read
    colours = {name: palette[i % len(palette)] for i, name in enumerate(names)}
    return [_plotted(panel, colours, image_format) for panel in panels]


def _plotted(panel: Panel, colours: Mapping[str, ColorType], image_format: str) -> bytes:
    figure = Figure(figsize=SIZE, dpi=RESOLUTION, layout="constrained")
    FigureCanvasAgg(figure)  # knows how wide a text is
    axes = figure.subplots()
    lines = _draw_points(axes, panel.points, colours)
    axes.set(xlabel=panel.speed, ylabel=panel.quality)
    axes.margins(0.15)
    if panel.quality.startswith("FID"):
        axes.invert_yaxis()
    elif max(point.quality for point in panel.points) <= 1:  # a share
        axes.set_ylim(top=min(1.03, axes.get_ylim()[1]))
    axes.spines[["top", "right"]].set_visible(False)
    entries = _legend(panel.points, lines)
    if entries:
        axes.legend(*zip(*entries), fontsize=SMALL)
    figure.canvas.draw()
    _label_points(axes, panel.points, colours)
    content = io.BytesIO()
    figure.savefig(content, format=image_format)
    return content.getvalue()


def _legend(points: Sequence[Point], lines: Mapping[str, Artist]) -> list[tuple[Artist, str]]:
    """The lines that no point's label names, and the marks where there are several."""
    unnamed = {point.line for point in points if point.label != point.line}
    entries = [(line, name) for name, line in lines.items() if name in unnamed]
    given = {point.guarantee for point in points}
    if len(given) > 1:
        marks = [(name, mark) for name, mark in MARKS.items() if name in given]
        entries += [(Line2D([], [], marker=mark, color="grey", ls=""), name) for name, mark in marks]
    return entries


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
        least, most = point.quality_range or (point.quality, point.quality)
        quality_bar = [[max(0, point.quality - least)], [max(0, most - point.quality)]]
        style: dict[str, Any] = {"color": colours[point.line], "alpha": 0.35, "lw": 1.2, "zorder": 1}
        axes.errorbar(point.speed, point.quality, xerr=speed_bar, yerr=quality_bar, **style)
        axes.plot(point.speed, point.quality, MARKS[point.guarantee], color=colours[point.line], alpha=0.8)
    front = sorted((point.speed, point.quality) for point in points if point.on_front)
    axes.plot([speed for speed, _ in front], [quality for _, quality in front], ":", color="grey", zorder=0)
    axes.axvline(1, color="lightgrey", zorder=0)
    return drawn


def _label_points(axes: Axes, points: Sequence[Point], colours: Mapping[str, ColorType]) -> None:
    """Writes each point's label at the first place between the axes where it covers nothing."""
    frame = axes.get_window_extent()
    places = [axes.transData.transform((point.speed, point.quality)) for point in points]
    taken = [Bbox.from_bounds(x - 8, y - 8, 16, 16) for x, y in places]
    legend = axes.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent())
    for point in points:
        for across, up in PLACES:
            text = axes.annotate(
                point.label,
                (point.speed, point.quality),
                xytext=(across, up),
                textcoords="offset points",
                color=colours[point.line],
                fontsize=SMALL,
                ha="left" if across > 0 else "right",
                va="center",
                path_effects=[withStroke(linewidth=2, foreground="white")],
            )
            text.set_in_layout(False)  # the frame stays as it is
            box = text.get_window_extent()
            is_inside = frame.x0 <= box.x0 and box.x1 <= frame.x1
            is_free = is_inside and not any(box.overlaps(other) for other in taken)
            if is_free or (across, up) == PLACES[-1]:
                taken.append(box)
                break
            text.remove()
