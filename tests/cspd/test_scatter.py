"""Plots of speed against quality: names as they are, labels apart, a mark for each guarantee, a legend of the rest."""

from __future__ import annotations

import io

import pytest
from matplotlib.figure import Figure
from PIL import Image

from cspd.plots import MARKS, RESOLUTION, SIZE, Panel, Point, speed_quality


@pytest.fixture
def plotted(monkeypatch):
    """Plots panels; the axes that were drawn."""
    drawn = []
    savefig = Figure.savefig

    def watched(figure, *args, **options):
        drawn.append(figure)
        savefig(figure, *args, **options)

    def plot(*panels):
        pictures = speed_quality([Panel(*panel) for panel in panels])
        assert {Image.open(io.BytesIO(png)).size for png in pictures} == {tuple(RESOLUTION * side for side in SIZE)}
        return [figure.axes[0] for figure in drawn[-len(panels) :]]

    monkeypatch.setattr(Figure, "savefig", watched)
    return plot


def test_names_are_drawn_as_they_are(plotted):
    """Neither as mathematics, which may not parse, nor as Matplotlib's names of what has no legend."""
    points = [Point(f"{i}", 1 + i, 0.5, line) for line in (r"$\nope$", "_a", "b") for i in range(2)]
    (axes,) = plotted(("speed", "quality", points))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [r"$\nope$", "_a", "b"]
    assert len(axes.texts) == 6


def test_labels_of_points_do_not_cover_each_other(plotted):
    points = [Point(f"a longer label {i}", 1 + 0.001 * i, 0.5, "same", (0.9, 1.1), (0.4, 0.55)) for i in range(6)]
    (axes,) = plotted(("speed", "quality", points))
    assert [text.get_text() for text in axes.texts] == [point.label for point in points]
    boxes = [text.get_window_extent() for text in axes.texts]
    places = axes.transData.transform([(point.speed, point.quality) for point in points])
    assert all(box.width > 20 and box.height > 4 for box in boxes)
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i]) and not any(box.contains(*at) for at in places)


def test_labels_stay_between_the_axes(plotted):
    points = [Point("left", 1.0, 0.5, "left"), Point("a label that is long", 2.0, 0.25, "a label that is long")]
    (axes,) = plotted(("speed", "quality", points))
    frame, boxes = axes.get_window_extent(), [text.get_window_extent() for text in axes.texts]
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in boxes) and len(boxes) == 2
    assert frame.width > 0.8 * axes.figure.get_window_extent().width


def test_the_mark_of_a_point_is_its_guarantee(plotted):
    points = [Point(name, 1.0 + i, 0.5, name, guarantee=name) for i, name in enumerate(MARKS)]
    (axes,) = plotted(("speed-up", "share", points))
    marked = {line.get_xdata()[0]: line.get_marker() for line in axes.lines if line.get_marker() in MARKS.values()}
    assert marked == {point.speed: MARKS[point.guarantee] for point in points} and len(set(marked.values())) == 4
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["exact", "measured", "bounded", "heuristic"]


def test_a_method_without_a_point_in_a_panel_leaves_it_as_it_is(plotted):
    here, there = Point("here", 2.0, 0.5, "ar"), Point("there", 4.0, 0.75, "cool-sd")
    left, right = plotted(("speed-up", "share", [here]), ("codes per forward", "share", [there]))
    for axes, point in ((left, here), (right, there)):
        assert [text.get_text() for text in axes.get_legend().get_texts()] == [point.line]
        (line,) = [line for line in axes.lines if not line.get_label().startswith("_")]
        assert (line.get_label(), *line.get_xydata().tolist()) == (point.line, [point.speed, point.quality])
        low, high = axes.get_ylim()
        assert low > 0 and high < 1 and axes.get_xlim()[0] > 0


def test_a_legend_names_what_labels_do_not(plotted):
    said, swept = Point("ar", 1.0, 0.5, "ar"), Point("delta=2", 2.0, 0.5, "cool-sd")
    (axes,) = plotted(("speed-up", "share", [said]))
    assert axes.get_legend() is None
    (axes,) = plotted(("speed-up", "share", [said, swept]))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["cool-sd"]
