"""Plots of quality against speed."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib import color_sequences, rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox
from matplotlib.typing import ColorType

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
