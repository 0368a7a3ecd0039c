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
