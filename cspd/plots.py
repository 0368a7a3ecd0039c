"""Grids of images, heat maps, scatter plots of speed and quality, and curves."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import color_sequences, rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox
from matplotlib.typing import ColorType
from PIL import Image, ImageDraw, ImageFont

# Grids of images with captions, and heat maps. All lengths are in pixels.

MARGIN = 4
WIDE = 1000  # about the width of a grid of enlarged images
LARGEST_CELL = 256  # the largest side of an enlarged image
LONGEST = 4096  # the longer side of a grid, at most
LINE = 22  # the height of a heat map's legend
CAPTION = 3  # lines of a caption, at most
ELLIPSIS = "..."
LARGEST_FONT = 20
LEAST_FONT = 8  # the smallest readable size
UNKNOWN = (128, 128, 128)  # between viridis' darkest and lightest, also for the colour-blind
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def _scaled(image: Image.Image, columns: int, rows: int) -> tuple[int, int]:
    """The size of an image in a grid: its own, enlarged or reduced by a whole factor."""
    width, height = image.size
    grid_width = columns * width
    grid_height = rows * height
    # whole factors keep all pixels of an image equally large
    factor = min(WIDE // grid_width, LARGEST_CELL // max(width, height))
    if factor > 1:
        return width * factor, height * factor
    divisor = math.ceil(max(grid_width, grid_height) / LONGEST)
    return max(1, width // divisor), max(1, height // divisor)


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """An image at another size: enlarged without smoothing, or reduced by means of its pixels."""
    new_width, _ = size
    is_enlarged = new_width >= image.width
    method = Image.Resampling.NEAREST if is_enlarged else Image.Resampling.BOX
    return image.resize(size, method)


def _wrapped(text: str, font: Font, width: int) -> str:
    """A text in at most `CAPTION` lines within a width; an ellipsis ends a text that is too long."""
    # textwrap counts letters, whose widths differ: the largest number is taken whose lines are narrow enough
    fewest = len(ELLIPSIS) + 1
    most = int(width / font.getlength("i"))  # no letter is narrower
    lines: list[str] = []
    for letters in range(max(fewest, most), len(ELLIPSIS), -1):
        lines = textwrap.wrap(text, letters, max_lines=CAPTION, placeholder=ELLIPSIS)
        widths = map(font.getlength, lines)
        if max(widths, default=0) <= width:
            break
    return "\n".join(lines)


def _captioned(captions: Sequence[str], size: int, width: int) -> tuple[Font, list[str]]:
    """The largest font, from this size down, in which all captions fit a width uncut, and the wrapped captions."""
    font: Font = ImageFont.load_default(size=size)
    wrapped: list[str] = []
    for smaller in range(size, LEAST_FONT - 1, -2):
        font = ImageFont.load_default(size=smaller)
        wrapped = [_wrapped(caption, font, width) for caption in captions]
        is_cut = any(text.endswith(ELLIPSIS) for text in wrapped)
        if not is_cut:
            break
    return font, wrapped


def _lines(text: str) -> int:
    return text.count("\n") + 1


def _line_height(font: Font) -> int:
    _, _, _, bottom = font.getbbox("Ag")
    return math.ceil(bottom)


def _layout(
    num: int, columns: int, cell: tuple[int, int], margin: int = MARGIN
) -> tuple[Image.Image, list[tuple[int, int]]]:
    """A canvas for `num` cells of one size in rows of `columns`, and the upper left corner of each."""
    width, height = cell
    column_width = width + margin
    row_height = height + margin
    corners = []
    for i in range(num):
        row, column = divmod(i, columns)
        x = margin + column * column_width
        y = margin + row * row_height
        corners.append((x, y))
    rows = math.ceil(num / columns)
    size = (margin + columns * column_width, margin + rows * row_height)
    return Image.new("RGB", size, "white"), corners


def usual_columns(num: int) -> int:
    """The usual number of columns for `num` images: full rows of 10 or 8 if possible."""
    return next((columns for columns in (10, 8) if num % columns == 0), min(10, num))


def grid(images: Sequence[Image.Image], captions: Sequence[str], columns: int | None = None) -> Image.Image:
    """Images in rows of `columns`, each over its caption, enlarged or reduced by a whole factor to a useful size."""
    columns = columns or usual_columns(len(images))
    rows = math.ceil(len(images) / columns)
    size = _scaled(images[0], columns, rows)
    width, height = size
    font_size = min(LARGEST_FONT, max(12, height // 6))
    font, captions = _captioned(captions, font_size, width)
    # all rows are as high as the longest caption asks for
    lines = max(map(_lines, captions), default=1)
    caption_height = lines * _line_height(font) + MARGIN
    canvas, corners = _layout(len(images), columns, (width, height + caption_height))
    draw = ImageDraw.Draw(canvas)
    for image, caption, corner in zip(images, captions, corners):
        canvas.paste(_resized(image, size), corner)
        x, y = corner
        below = (x + width // 2, y + height)
        draw.text(below, caption, fill="black", font=font, anchor="ma", align="center", spacing=0)
    return canvas


def beside(pngs: Sequence[bytes], columns: int = 2) -> Image.Image:
    """Images of one size, from their PNGs, in rows of `columns`."""
    images = [Image.open(io.BytesIO(png)) for png in pngs]
    columns = min(columns, len(images))
    canvas, corners = _layout(len(images), columns, images[0].size, margin=0)
    for image, corner in zip(images, corners):
        canvas.paste(image, corner)
    return canvas


def stacked(images: Sequence[Image.Image]) -> Image.Image:
    """Images below each other."""
    canvas = Image.new("RGB", (max(each.width for each in images), sum(each.height for each in images)), "white")
    top = 0
    for image in images:
        canvas.paste(image, (0, top))
        top += image.height
    return canvas


def seed_grid(rows: Sequence[tuple[str, Sequence[Image.Image]]], heads: Sequence[str]) -> Image.Image:
    """A row of images for each (name, images), names at the left, heads above the columns; sizes are as in `grid`.

    The lines of a head are wrapped, as captions are.
    """
    _, first_images = rows[0]
    size = _scaled(first_images[0], len(heads), len(rows))
    width, height = size
    font_size = min(LARGEST_FONT, max(14, height // 6))
    font = ImageFont.load_default(size=font_size)
    line_height = _line_height(font) + 2
    names = [name.replace(":", "\n") for name, _ in rows]
    wrapped = []
    for head in heads:
        lines = [_wrapped(line, font, width) for line in head.split("\n")]
        wrapped.append("\n".join(lines))

    # the size of the picture: names at the left, heads at the top, then a cell for each image
    name_lines = "\n".join(names).split("\n")
    longest = max(map(font.getlength, name_lines))
    left = math.ceil(longest) + 3 * MARGIN
    head_lines = max(map(_lines, wrapped))
    top = line_height * head_lines + 2 * MARGIN
    column_starts = [left + i * (width + MARGIN) for i in range(len(heads))]
    row_heights = [max(height, line_height * _lines(name)) for name in names]
    right = column_starts[-1] + width + MARGIN
    bottom = top + sum(row_heights) + MARGIN * len(rows)
    canvas = Image.new("RGB", (right, bottom), "white")
    draw = ImageDraw.Draw(canvas)
    for x, head in zip(column_starts, wrapped):
        above = (x + width // 2, MARGIN)
        draw.multiline_text(above, head, fill="#555", font=font, anchor="ma", align="center", spacing=2)
    y = top
    for name, (_, images), row_height in zip(names, rows, row_heights):
        middle = y + row_height // 2
        draw.multiline_text((MARGIN, middle), name, fill="black", font=font, anchor="lm", spacing=2)
        image_top = middle - height // 2
        for x, image in zip(column_starts, images):
            canvas.paste(_resized(image, size), (x, image_top))
        y += row_height + MARGIN
    return canvas


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
    costs = []
    for of_image in token_cost:
        values = [np.nan] if of_image is None else of_image
        costs.append(np.array(values, dtype=float))
    # all images share one scale
    known = np.concatenate(costs)
    known = known[np.isfinite(known)]
    low, high = 0.0, 1.0
    if not accepted and len(known):
        low = known.min()
        high = known.max()
    span = max(high - low, 1e-9)

    pairs = []
    for image, cost in zip(images, costs):
        side = math.isqrt(len(cost))
        fractions = (cost.reshape(side, side) - low) / span
        squares = coloured(fractions).resize(image.size, Image.Resampling.NEAREST)
        pair = Image.new("RGB", (2 * image.width, image.height))
        pair.paste(image)
        pair.paste(squares, (image.width, 0))
        pairs.append(pair)

    meanings = {0.0: "rejected", 1.0: "accepted", np.nan: "not drafted"}
    if not accepted:
        meanings = {}
        for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
            meanings[fraction] = f"{low + fraction * span:.0f}"
        meanings[1.0] += " head calls per token"
    return _with_legend(grid(pairs, captions, columns), meanings)


def coloured(fractions: np.ndarray) -> Image.Image:
    """An image of values [H, W] in 0..1, in colours that the colour-blind can distinguish; NaN is grey."""
    from matplotlib import colormaps  # half a second, and only heat maps need it

    # the lightness of viridis rises with the value, so that it can be read without hues
    colours = colormaps["viridis"](fractions, bytes=True)[..., :3]
    colours[np.isnan(fractions)] = UNKNOWN
    return Image.fromarray(colours)


def _with_legend(image: Image.Image, meanings: Mapping[float, str]) -> Image.Image:
    """An image above a line of squares in the colours of values, each followed by its meaning."""
    font = ImageFont.load_default(size=LINE - 2 * MARGIN)
    widths = []
    for text in meanings.values():
        text_width = math.ceil(font.getlength(text))
        widths.append(LINE + text_width + 4 * MARGIN)
    canvas_width = max(image.width, MARGIN + sum(widths))
    canvas_height = image.height + LINE + 2 * MARGIN
    canvas = Image.new("RGB", (canvas_width, canvas_height), "white")
    canvas.paste(image)
    draw = ImageDraw.Draw(canvas)
    x = MARGIN
    y = image.height + MARGIN
    for (value, text), width in zip(meanings.items(), widths):
        square = coloured(np.array([[value]])).resize((LINE, LINE))
        canvas.paste(square, (x, y))
        right_of_it = (x + LINE + MARGIN, y + LINE // 2)
        draw.text(right_of_it, text, fill="black", font=font, anchor="lm")
        x += width
    return canvas


# Plots of quality against speed.

MARKS = {"exact": "o", "approximate": "D", "bounded": "s", "heuristic": "^"}  # a point's, by its guarantee
SIZE = (5.2, 4.0)  # inches: readable on a phone, which shows it at half the size
RESOLUTION = 200  # dots per inch
SMALL = 8.5  # points of the smallest letters
MANY = 12  # points that fit this size: with more it grows
LETTERS = 28  # in a line of a label, about
NEAR = 8  # points around a point that no label covers
STEP = 3  # points between two places that a label may have
APART = 12  # points from which on a line joins a label with its point
COLUMNS = 5  # of a legend, at most


class PlotPoint(NamedTuple):
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


class Panel(NamedTuple):
    """A plot: the names of its axes, with their units, and its points. Baseline sampling has a speed-up of 1."""

    speed: str
    quality: str
    points: Sequence[PlotPoint]


@rc_context({"text.parse_math": False})  # a dollar in a name begins no formula
def speed_quality(panels: Sequence[Panel], image_format: str = "png") -> list[bytes]:
    """Scatter plots of quality against speed, a colour for every line of all panels and a mark for every guarantee.

    The axis of a FID is inverted, so that up is better everywhere.

    Args:
        image_format: one that matplotlib writes: "png", "svg", "pdf".

    Returns:
        The content of a file for each panel.
    """
    colours = _colours(point.line for panel in panels for point in panel.points)
    most = max((len(panel.points) for panel in panels), default=0)
    scale = max(1, math.sqrt(most / MANY))
    width, height = SIZE
    size = scale * width, scale * height
    return [_plotted(panel, colours, size, image_format) for panel in panels]


def _colours(names: Iterable[str]) -> dict[str, ColorType]:
    """A colour for each line, the same in all panels."""
    palette = (*color_sequences["tab10"], *color_sequences["Dark2"])  # dark enough to read
    return {name: palette[i % len(palette)] for i, name in enumerate(dict.fromkeys(names))}


def _plotted(panel: Panel, colours: Mapping[str, ColorType], size: tuple[float, float], image_format: str) -> bytes:
    figure = Figure(figsize=size, dpi=RESOLUTION, layout="constrained")
    FigureCanvasAgg(figure)  # measures texts
    axes = figure.subplots()
    lines = _draw_lines(axes, panel.points, colours)
    for point in panel.points:
        _draw_point(axes, point, colours[point.line])
    axes.axvline(1, color="lightgrey", zorder=0)  # baseline sampling's speed
    axes.set(xlabel=panel.speed, ylabel=textwrap.fill(panel.quality, LETTERS))
    axes.margins(0.15)
    if panel.quality.startswith("FID"):
        axes.invert_yaxis()
    elif max(point.quality for point in panel.points) <= 1:  # a fraction: nothing is above 1
        _, top = axes.get_ylim()
        axes.set_ylim(top=min(1.03, top))
    axes.spines[["top", "right"]].set_visible(False)
    _add_legend(figure, _legend(panel.points, lines))
    figure.canvas.draw()  # decides where the points are, which labels must not cover
    _label_points(axes, panel.points, colours)
    content = io.BytesIO()
    figure.savefig(content, format=image_format)
    return content.getvalue()


def _draw_lines(axes: Axes, points: Sequence[PlotPoint], colours: Mapping[str, ColorType]) -> dict[str, Artist]:
    """Draws the lines through the points, and the Pareto front. Returns the lines by name."""
    # a line goes from the slowest to the fastest of its points
    by_line: dict[str, list[tuple[float, float]]] = {}
    front = []
    for point in points:
        coordinates = point.speed, point.quality
        by_line.setdefault(point.line, []).append(coordinates)
        if point.on_front:
            front.append(coordinates)
    drawn: dict[str, Artist] = {}
    for name, line in by_line.items():
        speeds, qualities = zip(*sorted(line))
        (drawn[name],) = axes.plot(speeds, qualities, "-", label=name, color=colours[name], alpha=0.8)
    if front:
        speeds, qualities = zip(*sorted(front))
        axes.plot(speeds, qualities, ":", color="grey", zorder=0)
    return drawn


def _draw_point(axes: Axes, point: PlotPoint, colour: ColorType) -> None:
    """Draws a point, with faint bars for its intervals."""
    # an interval need not have its value in the middle: lengths below and above are given apart
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


def _bar(value: float, interval: Sequence[float] | None) -> list[list[float]]:
    """The lengths of an error bar below and above a value."""
    low, high = interval or (value, value)
    below = max(0, value - low)
    above = max(0, high - value)
    return [[below], [above]]


def _is_alone(point: PlotPoint, points: Sequence[PlotPoint]) -> bool:
    """Whether no other point is on its line, so that its label names the line."""
    return all(other.line != point.line for other in points if other is not point)


def _name(point: PlotPoint, points: Sequence[PlotPoint]) -> str:
    """What a point's label says: with the name of its line if it is alone on it."""
    if not _is_alone(point, points) or point.label == point.line:
        return point.label
    return ":".join(filter(None, [point.line, point.label]))


def _legend(points: Sequence[PlotPoint], lines: Mapping[str, Artist]) -> dict[str, Artist]:
    """The lines that no point's label names, and the marks if there are several."""
    entries: dict[str, Artist] = {}
    for point in points:
        if not _is_alone(point, points):
            entries[point.line] = lines[point.line]
    guarantees = {point.guarantee for point in points}
    if len(guarantees) == 1:
        return entries
    for name, mark in MARKS.items():
        if name in guarantees:
            entries[name] = Line2D([], [], marker=mark, color="grey", ls="")
    return entries


def _add_legend(figure: Figure, entries: Mapping[str, Artist]) -> None:
    """Adds a legend below the axes, where it hides no point, in as many columns as fit."""
    for columns in range(min(COLUMNS, len(entries)), 0, -1):
        legend = figure.legend(
            entries.values(), entries.keys(), loc="outside lower center", ncols=columns, fontsize=SMALL, frameon=False
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def _label_points(axes: Axes, points: Sequence[PlotPoint], colours: Mapping[str, ColorType]) -> None:
    """Writes each point's label between the axes at the nearest place where it covers no point and no other label."""
    pixels = RESOLUTION / 72  # in a point
    centres = [axes.transData.transform((point.speed, point.quality)) for point in points]
    taken = [Bbox.from_bounds(x, y, 0, 0).padded(NEAR * pixels) for x, y in centres]
    labels = [_label(axes, point, _name(point, points), colours[point.line]) for point in points]
    # the largest are placed first, since they have the fewest places
    boxes = [Text.get_window_extent(label).padded(pixels) for label in labels]  # without the lines to their points
    for i in sorted(range(len(points)), key=lambda i: -boxes[i].width * boxes[i].height):
        box, distance = _nearest_place(axes.get_window_extent(), boxes[i], centres[i], taken, STEP * pixels)
        taken.append(box)
        labels[i].xyann = tuple((box.p0 - centres[i]) / pixels + 1)
        joins = labels[i].arrow_patch
        if joins is not None:
            joins.set_visible(distance > APART * pixels and labels[i].get_text() != "")


def _nearest_place(
    frame: Bbox, box: Bbox, centre: np.ndarray, taken: Sequence[Bbox], step: float
) -> tuple[Bbox, float]:
    """The place in a frame for a box that covers least of the boxes that are taken, and then is nearest to a centre.

    Lengths are in pixels. Returns the moved box, and its distance from the centre.
    """
    lefts = np.arange(frame.x0, max(frame.x1 - box.width, frame.x0 + 1), step)
    bottoms = np.arange(frame.y0, max(frame.y1 - box.height, frame.y0 + 1), step)
    left, bottom = (places.ravel() for places in np.meshgrid(lefts, bottoms))
    right, top = left + box.width, bottom + box.height
    covered = np.zeros_like(left)
    for other in taken:
        width = np.minimum(right, other.x1) - np.maximum(left, other.x0)
        height = np.minimum(top, other.y1) - np.maximum(bottom, other.y0)
        covered += np.maximum(width, 0) * np.maximum(height, 0)
    x, y = centre
    distance = np.hypot(np.maximum(0, np.maximum(left - x, x - right)), np.maximum(0, np.maximum(bottom - y, y - top)))
    # of places at one distance, a label best begins at its point
    to_begin = np.hypot(left - x, (bottom + top) / 2 - y)
    best = np.lexsort((distance + to_begin / 10, covered))[0]
    return Bbox.from_bounds(left[best], bottom[best], box.width, box.height), float(distance[best])


def _label(axes: Axes, point: PlotPoint, name: str, colour: ColorType) -> Annotation:
    """Writes a point's label, in several lines if it is long, with its lower left corner at the point."""
    lines = [""]
    for part in re.split("(?<=:)", name):
        if lines[-1] and len(lines[-1]) + len(part) > LETTERS:
            lines.append("")
        lines[-1] += part
    label = axes.annotate(
        "\n".join(textwrap.fill(line, LETTERS) for line in lines),
        (point.speed, point.quality),
        xytext=(0, 0),
        textcoords="offset points",
        color=colour,
        fontsize=SMALL,
        linespacing=1,
        ha="left",
        va="bottom",
        arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.6, "lw": 0.6},
        # readable over lines and bars
        path_effects=[withStroke(linewidth=2, foreground="white")],
    )
    label.set_in_layout(False)  # the frame keeps its size
    return label


class Curves(NamedTuple):
    """A plot of curves: the names of its axes, with their units, and the x and y of each curve by its name."""

    x: str
    y: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]


@rc_context({"text.parse_math": False})
def curves(panels: Sequence[Curves]) -> list[bytes]:
    """Plots of curves from y = 0 on, a colour for every name of all panels: the content of a PNG for each panel."""
    colours = _colours(name for panel in panels for name in panel.lines)
    contents = []
    for panel in panels:
        figure = Figure(figsize=SIZE, dpi=RESOLUTION, layout="constrained")
        axes = figure.subplots()
        for name, (x, y) in panel.lines.items():
            axes.plot(x, y, "o-", label=name, color=colours[name], alpha=0.8, markersize=4)
        axes.set(xlabel=panel.x, ylabel=panel.y)
        highest = max(max(y) for _, y in panel.lines.values())
        axes.set_ylim(0, 1.1 * highest or 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=SMALL)
        content = io.BytesIO()
        figure.savefig(content, format="png")
        contents.append(content.getvalue())
    return contents
