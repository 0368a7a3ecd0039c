"""Grids of images, heat maps, and scatter plots of speed and quality."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

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

# Grids of images with captions, and heat maps.

MARGIN = 4
WIDE = 1000  # pixels: the width of a grid of enlarged images, about
LARGEST_CELL = 256  # pixels: the largest side of an enlarged image
LONGEST = 4096  # pixels: the longer side of a grid, at most
LINE = 22  # pixels: the height of a heat map's legend
BAR = 240  # pixels: the width of its colours
CAPTION = 3  # lines of a caption, at most
ELLIPSIS = "..."
LEAST_FONT = 8  # the smallest readable size
UNKNOWN = (128, 128, 128)  # between viridis' darkest and lightest, also for the colour-blind
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def _scaled(image: Image.Image, columns: int, rows: int) -> tuple[int, int]:
    """The size of an image in a grid: its own, enlarged or reduced by a whole factor."""
    width, height = image.size
    enlarged = min(WIDE // (columns * width), LARGEST_CELL // max(width, height))
    if enlarged > 1:
        return width * enlarged, height * enlarged
    reduced = math.ceil(max(columns * width, rows * height) / LONGEST)
    return max(1, width // reduced), max(1, height // reduced)


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """An image at another size: enlarged without smoothing, or reduced by means of its pixels."""
    larger = size[0] >= image.width
    return image.resize(size, Image.Resampling.NEAREST if larger else Image.Resampling.BOX)


def _captioned(captions: Sequence[str], size: int, width: int) -> tuple[Font, list[str]]:
    """A font and the captions within a width in pixels: on one line each, or else on at most `CAPTION` lines.

    The font has this size, or a smaller one that fits and can be read. An ellipsis ends a caption that is still too
    long.
    """
    font = ImageFont.load_default(size=size)
    widest = max((font.getlength(caption) for caption in captions), default=0)
    if widest > width:
        font = ImageFont.load_default(size=max(LEAST_FONT, int(size * width / widest)))
    if all(font.getlength(caption) <= width for caption in captions):
        return font, list(captions)
    for smaller in range(size, LEAST_FONT - 1, -1):
        font = ImageFont.load_default(size=smaller)
        if all(len(_wrapped(caption, font, width)) <= CAPTION for caption in captions):
            break
    return font, [_fitted(caption, font, width) for caption in captions]


def _fitted(text: str, font: Font, width: int) -> str:
    """A text in at most `CAPTION` lines within a width; an ellipsis ends a text that is too long."""
    lines = _wrapped(text[: CAPTION * width], font, width)  # every letter is at least a pixel wide
    if len(lines) > CAPTION:
        lines = lines[:CAPTION]
        lines[-1] += ELLIPSIS
    return "\n".join(_cut(line, font, width) for line in lines)


def _cut(line: str, font: Font, width: int) -> str:
    """The beginning of a line within a width."""
    while font.getlength(line) > width and len(line) > len(ELLIPSIS):
        line = line.removesuffix(ELLIPSIS)[:-1].rstrip() + ELLIPSIS
    return line


def _wrapped(text: str, font: Font, width: int) -> list[str]:
    """A text in lines within a width, unless a single word is wider."""
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
        position = (x + width // 2, y + height)
        draw.text(position, caption, fill="black", font=font, anchor="ma", align="center", spacing=0)
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
    parts = "\n".join(names).split("\n")
    left = math.ceil(max(map(font.getlength, parts))) + 3 * MARGIN
    top = line * max(map(_lines, heads)) + 2 * MARGIN
    row_heights = [max(height, line * _lines(name)) + MARGIN for name in names]
    column_starts = [left + i * (width + MARGIN) for i in range(len(heads))]

    canvas = Image.new("RGB", (left + len(heads) * (width + MARGIN), top + sum(row_heights)), "white")
    draw = ImageDraw.Draw(canvas)
    for x, head in zip(column_starts, heads):
        position = (x + width // 2, MARGIN)
        draw.multiline_text(position, head, fill="#555", font=font, anchor="ma", align="center", spacing=2)
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
    """Images of one size, from their PNGs, in rows of `columns`."""
    images = [Image.open(io.BytesIO(png)).convert("RGB") for png in pngs]
    width, height = images[0].size
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    canvas = Image.new("RGB", (columns * width, rows * height), "white")
    for i, image in enumerate(images):
        row, column = divmod(i, columns)
        canvas.paste(image, (column * width, row * height))
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
    """A grid of images, each next to the costs of its tokens as colours, with a legend below.

    Args:
        token_cost: of each image, [L] in raster order, see `Output`; None, for an image or a token, is grey.
        accepted: the costs are 1 for accepted and 0 for resampled tokens; otherwise they count head calls.
    """
    costs = [np.array([np.nan] if values is None else values, dtype=float) for values in token_cost]
    everything = np.concatenate(costs)
    low, high = 0.0, 1.0
    if not accepted and np.isfinite(everything).any():
        low, high = np.nanmin(everything), np.nanmax(everything)

    pairs = []
    for image, values in zip(images, costs):
        side = math.isqrt(len(values))
        fractions = (values.reshape(side, side) - low) / max(high - low, 1e-9)
        pair = Image.new("RGB", (2 * image.width, image.height))
        pair.paste(image)
        pair.paste(coloured(fractions).resize(image.size, Image.Resampling.NEAREST), (image.width, 0))
        pairs.append(pair)

    if accepted:
        legend = _squares([(0.0, "rejected"), (1.0, "accepted"), (np.nan, "not drafted")])
    else:
        legend = _colour_bar(low, high, "head calls per token")
    return _above(grid(pairs, captions, columns), legend)


def coloured(fractions: np.ndarray) -> Image.Image:
    """An image of values [H, W] in 0..1, in colours that the colour-blind can distinguish; NaN is grey."""
    from matplotlib import colormaps  # half a second, and only heat maps need it

    colours = colormaps["viridis"](fractions, bytes=True)[..., :3]
    colours[np.isnan(fractions)] = UNKNOWN
    return Image.fromarray(colours)


def _above(image: Image.Image, legend: Image.Image) -> Image.Image:
    """An image above its legend."""
    canvas = Image.new("RGB", (max(image.width, legend.width), image.height + legend.height), "white")
    canvas.paste(image)
    canvas.paste(legend, (0, image.height))
    return canvas


def _legend_font() -> Font:
    return ImageFont.load_default(size=LINE - 2 * MARGIN)


def _squares(entries: Sequence[tuple[float, str]]) -> Image.Image:
    """A line of squares in the colours of values, each followed by its meaning."""
    font = _legend_font()
    widths = [LINE + 4 * MARGIN + math.ceil(font.getlength(text)) for _, text in entries]
    canvas = Image.new("RGB", (MARGIN + sum(widths), LINE + 2 * MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    x = MARGIN
    for (value, text), width in zip(entries, widths):
        square = coloured(np.array([[value]])).resize((LINE, LINE))
        canvas.paste(square, (x, MARGIN))
        draw.text((x + LINE + MARGIN, MARGIN + LINE // 2), text, fill="black", font=font, anchor="lm")
        x += width
    return canvas


def _colour_bar(low: float, high: float, unit: str) -> Image.Image:
    """All colours from the lowest to the highest value, between these numbers."""
    font = _legend_font()
    low_text, high_text = f"{low:.0f}", f"{high:.0f} {unit}"
    left = 2 * MARGIN + math.ceil(font.getlength(low_text))
    right = 2 * MARGIN + math.ceil(font.getlength(high_text))
    canvas = Image.new("RGB", (left + BAR + right, LINE + 2 * MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    colours = coloured(np.linspace(0, 1, BAR)[None]).resize((BAR, LINE))
    canvas.paste(colours, (left, MARGIN))
    middle = MARGIN + LINE // 2
    draw.text((left - MARGIN, middle), low_text, fill="black", font=font, anchor="rm")
    draw.text((left + BAR + MARGIN, middle), high_text, fill="black", font=font, anchor="lm")
    return canvas


# Plots of quality against speed.

MARKS = {"exact": "o", "measured": "D", "bounded": "s", "heuristic": "^"}  # a point's, by its guarantee
SIZE = (5.2, 4.0)  # inches: readable on a phone, which shows it at half the size
RESOLUTION = 200  # dots per inch
SMALL = 8.5  # points of the smallest letters
# positions of a point's label, in points from it; the first free one is taken
PLACES = [(across, up) for up in (7, -7, 19, -19, 31, -31) for across in (7, -7)] + [(7, 0)]


class Point(NamedTuple):
    """A measured point: its label, the line it is on, its intervals, and its guarantee, a key of `MARKS`.

    A dotted line joins points that are `on_front`.
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
    """Draws names unchanged: a dollar begins no formula, and a letter that the font lacks is a box."""
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


class Panel(NamedTuple):
    """A plot: the names of its axes, with their units, and its points. Baseline sampling has a speed-up of 1."""

    speed: str
    quality: str
    points: Sequence[Point]


@_any_text()
def speed_quality(panels: Sequence[Panel], image_format: str = "png") -> list[bytes]:
    """Scatters of quality against speed, a colour for every line of all panels and a mark for every guarantee.

    The axis of a FID is inverted, so that up is better everywhere.

    Args:
        image_format: one that matplotlib writes: "png", "svg", "pdf".

    Returns:
        The content of a file for each panel.
    """
    names: dict[str, None] = {}
    for panel in panels:
        names |= dict.fromkeys(point.line for point in panel.points)
    palette = (*color_sequences["tab10"], *color_sequences["Dark2"])  # dark enough to read
    colours = {name: palette[i % len(palette)] for i, name in enumerate(names)}
    return [_plotted(panel, colours, image_format) for panel in panels]


def _plotted(panel: Panel, colours: Mapping[str, ColorType], image_format: str) -> bytes:
    figure = Figure(figsize=SIZE, dpi=RESOLUTION, layout="constrained")
    FigureCanvasAgg(figure)  # measures texts
    axes = figure.subplots()
    lines = _draw_points(axes, panel.points, colours)
    axes.set(xlabel=panel.speed, ylabel=panel.quality)
    axes.margins(0.15)
    if panel.quality.startswith("FID"):
        axes.invert_yaxis()
    elif max(point.quality for point in panel.points) <= 1:  # a fraction
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
    """The lines that no point's label names, and the marks if there are several."""
    unnamed = {point.line for point in points if point.label != point.line}
    entries = [(line, name) for name, line in lines.items() if name in unnamed]
    given = {point.guarantee for point in points}
    if len(given) > 1:
        for name, mark in MARKS.items():
            if name in given:
                entries.append((Line2D([], [], marker=mark, color="grey", ls=""), name))
    return entries


def _draw_points(axes: Axes, points: Sequence[Point], colours: Mapping[str, ColorType]) -> dict[str, Artist]:
    """Draws the points with faint bars for their intervals, lines through them, and one at baseline sampling's speed.

    Returns the lines by name.
    """
    drawn: dict[str, Artist] = {}
    for name, colour in colours.items():
        line = sorted((point.speed, point.quality) for point in points if point.line == name)
        if line:
            (drawn[name],) = axes.plot(*zip(*line), "-", label=name, color=colour, alpha=0.8)
    for point in points:
        colour = colours[point.line]
        axes.errorbar(
            point.speed,
            point.quality,
            xerr=_bar(point.speed, point.speed_range),
            yerr=_bar(point.quality, point.quality_range),
            color=colour,
            alpha=0.35,
            lw=1.2,
            zorder=1,
        )
        axes.plot(point.speed, point.quality, MARKS[point.guarantee], color=colour, alpha=0.8)
    front = sorted((point.speed, point.quality) for point in points if point.on_front)
    axes.plot([speed for speed, _ in front], [quality for _, quality in front], ":", color="grey", zorder=0)
    axes.axvline(1, color="lightgrey", zorder=0)
    return drawn


def _bar(value: float, interval: Sequence[float] | None) -> list[list[float]]:
    """The lengths of an error bar below and above a value."""
    low, high = interval or (value, value)
    return [[max(0, value - low)], [max(0, high - value)]]


def _label_points(axes: Axes, points: Sequence[Point], colours: Mapping[str, ColorType]) -> None:
    """Writes each point's label at the first position between the axes where it covers nothing."""
    frame = axes.get_window_extent()
    taken = []
    for point in points:
        x, y = axes.transData.transform((point.speed, point.quality))
        taken.append(Bbox.from_bounds(x - 8, y - 8, 16, 16))
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
            text.set_in_layout(False)  # the frame keeps its size
            box = text.get_window_extent()
            is_inside = frame.x0 <= box.x0 and box.x1 <= frame.x1
            is_free = is_inside and not any(box.overlaps(other) for other in taken)
            if is_free or (across, up) == PLACES[-1]:
                taken.append(box)
                break
            text.remove()
