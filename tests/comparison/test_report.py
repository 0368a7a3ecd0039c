"""The report of a comparison: tables, page and plots."""

from __future__ import annotations

import base64
import csv
import io
import itertools
import json
import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from reports import Page, full_report  # noqa: F401 - fixtures

from cspd import plots
from cspd.comparison import report
from cspd.plots import (
    CAPTION,
    ELLIPSIS,
    MARGIN,
    MARKS,
    RESOLUTION,
    SIZE,
    UNKNOWN,
    Panel,
    PlotPoint,
    coloured,
    grid,
    speed_quality,
)


def test_all_forms_say_the_same(made, tmp_path):
    content, images = made
    written = report.write(content, images, tmp_path)
    assert all((tmp_path / name).stat().st_size > 100 for name in written) and len(written) == 6

    assert json.loads((tmp_path / "comparison.json").read_text()) == content
    lines = list(csv.DictReader(io.StringIO((tmp_path / "comparison.csv").read_text())))
    for line, row in zip(lines, content["rows"], strict=True):
        for key in ("name", "accuracy", "fid", "p_value_holm", "bound", "peak_bytes"):
            assert line[key] == ("" if row[key] is None else str(row[key]))
        ends = [line["fid_ci95_least"], line["fid_ci95_most"]]
        assert ends == (["", ""] if row["fid_ci95"] is None else [str(end) for end in row["fid_ci95"]])
        assert [float(line[f"speed_up{end}"]) for end in ("_least", "", "_most")] == list(row["speed_up"].values())
        assert json.loads(line["seconds"]) == row["seconds"]

    table = [line for line in (tmp_path / "comparison.md").read_text().splitlines() if line.startswith("|")]
    cells = []
    for line in [table[0], *table[2:]]:
        texts = line.replace("\\|", "\0").strip("|").split("|")
        cells.append([re.sub(r"\\(.)", r"\1", text.replace("\0", "|")).strip() for text in texts])
    html = Page((tmp_path / "report.html").read_text())
    assert html.rows == cells and len(cells) == 5 and {len(line) for line in cells} == {len(cells[0])}

    by_title = [dict(zip(cells[0], line)) for line in cells[1:]]
    assert [line["configuration"] for line in by_title] == ["ar", "speculative", "cool-sd:delta=2", "a|b <i>&"]
    assert by_title[1]["speed-up"] == "2.25 (1.50..2.50)" and by_title[0]["speed-up"] == "1.00"
    assert by_title[0]["images/s"] == "2.00 (1.50..3.00)" and by_title[0]["peak MiB"] == "3"
    assert [line["p coupled"] for line in by_title] == ["", "0.004", "0.500", ""]
    assert by_title[2]["TV bound"] == "0.250 [0.240, 0.260]" and by_title[1]["TV bound"] == ""
    assert [line["FID-12 (digits)"] for line in by_title] == ["9.50 [9.38, 9.75]", "9.25", "9.00", "8.00"]
    assert "IS" not in cells[0] and "head calls/token" not in cells[0]


def test_without_quality_its_columns_and_plots_are_missing(made, tmp_path):
    content, images = made
    for each in content["rows"]:
        each |= dict.fromkeys(("accuracy", "fid", "p_value_holm"))
    content |= {"space": None, "reference": None}
    content["missing"] = dict.fromkeys(("fid", "accuracy", "p_value_holm"), "no reason")
    assert "speed_quality.png" not in report.write(content, images, tmp_path)
    text = report.text_table(content)
    header = text.splitlines()[1]
    assert "FID" not in header and "acc." not in header and "images/s" in header
    assert "no class acc., FID-12, p coupled: no reason" in text


def test_a_wide_table_continues_below(made):
    content, _ = made
    content["rows"][1] |= {
        key: 0.25 for key in ("difference", "audit", "p_value_holm", "p_unpaired_holm", "inception_score")
    }
    tables = report.text_table(content).split("\n* ")[0].split("\n\n")
    assert len(tables) == 2 and all(len(line) <= report.WIDTH for table in tables for line in table.splitlines())
    assert all("configuration" in table for table in tables)


def test_a_row_with_its_own_seeds_is_not_part_of_a_sweep(made, tmp_path):
    content, images = made
    report.write(content, images, tmp_path)
    assert "the same classes and seeds" in (tmp_path / "report.html").read_text()
    for each in content["rows"]:
        each["speed_baseline"] = "ar:seed=1000"
    content["rows"][0] |= {"name": "ar:seed=1000", "settings": {"seed": 1000}, "p_unpaired_holm": 0.25}
    report.write(content, images, tmp_path)
    assert "the same classes and seeds" not in (tmp_path / "report.html").read_text()
    assert "p unpaired: " in (tmp_path / "comparison.md").read_text()
    point = report._panels(content)[0].points[0]
    assert point.label == point.line == "ar:seed=1000"


# ---- The page of a comparison is one file, and its images are in the right order


SIDE = 96  # of a picture in the grid, in pixels


def test_the_page_needs_no_other(made, tmp_path):
    content, images = made
    report.write(content, images, tmp_path)
    text = (tmp_path / "report.html").read_text()
    html = Page(text)
    assert not {"script", "link", "iframe", "object", "i"} & set(html.tags) and html.tags.count("img") == 2 + 4 * 10
    assert "url(" not in text and "@import" not in text and "http" not in text
    assert all(link.startswith("data:image/png;base64,") for link in html.links) and len(html.links) == 42
    inlined = [np.asarray(Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2])))) for link in html.links]
    plots, shown = inlined[:2], inlined[2:]
    both = np.asarray(Image.open(tmp_path / "speed_quality.png").convert("RGB"))
    assert (np.concatenate([plot[..., :3] for plot in plots], axis=1) == both).all()
    assert all((picture == images[i // 10][i % 10]).all() for i, picture in enumerate(shown))
    for told in (
        "a <cpu>",
        "r.npz",
        "no IS (digits): 12 images: 20 are needed",
        "FID-12: of 12",
        "cfg=3.0",
        "threads: 3",
    ):
        assert told in html.text
    assert "t.safetensors, 1.2 million parameters, sha256 eeeeeeeeeeee\n" in html.text
    assert "eeeeeeeeeeee (of a|b <i>&)" in html.text
    assert {"exact", "bounded", "heuristic"} <= set(html.words) and "Relative to ar, turn by turn" in html.text


def test_curves_of_acceptance(made, tmp_path):
    """By a swept setting, along the generation order, and by round, from counts that can be added by hand."""
    content, images = made
    ranks = [[2] * 32 + [0] * 32, [1] * 16 + [2] * 16 + [0] * 32]
    names = ["ar", "mar-draft:gamma=8", "mar-draft:gamma=4", "sjd"]
    for each, name, alpha in zip(content["rows"], names, (None, 0.25, 0.5, None)):
        each |= {"name": name, "method": name.split(":")[0], "speed_baseline": "ar", "alpha": alpha}
    content["rows"][1] |= {"resample_tries": 6.0, "by_rank": ranks}
    content["rows"][2] |= {"resample_tries": 3.0}
    content["rows"][3] |= {"committed": {"3": 1, "1": 6, "2": 3}}
    content["rows"][0] |= {"committed": {"1": 64}}
    swept, tries, along, rounds, saved = report.acceptance_curves(content)
    assert (swept.x, swept.y, swept.lines) == ("gamma", "acceptance rate", {"mar-draft": ([4, 8], [0.5, 0.25])})
    assert tries.lines == {"mar-draft": ([4, 8], [3, 6])}
    x, y = along.lines["mar-draft:gamma=8"]
    assert x == [2 * i + 0.5 for i in range(16)] and y == [0.5] * 8 + [1.0] * 8
    assert rounds.lines == {"sjd": ([1, 2, 3], [0.6, 0.3, 0.1])}
    assert saved.lines == {"sjd": ([1, 2, 3], pytest.approx([0, 0.6, 0.4]))}
    assert "acceptance.png" in report.write(content, images, tmp_path)
    assert Image.open(tmp_path / "acceptance.png").width == 2 * SIZE[0] * RESOLUTION
    for each in content["rows"]:
        each |= {"alpha": None, "resample_tries": None, "by_rank": None, "committed": None}
    assert "acceptance.png" not in report.write(content, images, tmp_path)
    assert not (tmp_path / "acceptance.png").exists()


def test_measured_values_are_shown_for_their_row_only(made):
    content, _ = made
    measured = {"difference": 0.0461, "difference_worst_percent": 0.1375, "pixel_difference": 3.25}
    content["rows"][1] |= measured | {"guarantee": "approximate", "audit": 0.52, "audit_ci95": [0.42, 0.62]}
    html = report.html_page(content, [])
    assert '<span class="tag approximate">approximate</span>' in html and ".approximate {" in html
    titles, *lines = Page(html).rows
    cells = [dict(zip(titles, line)) for line in lines]
    shown = {"difference": "0.046", "worst 1 %": "0.138", "audit": "0.520 [0.420, 0.620]", "pixel difference": "3.2"}
    assert {title: cells[1][title] for title in shown} == shown
    assert all(cells[0][title] == cells[2][title] == "" for title in shown)
    _, line, *_ = csv.DictReader(io.StringIO(report.csv_table(content)))
    assert (line["difference"], line["audit_ci95_most"]) == ("0.0461", "0.62")


def test_the_grid_has_a_row_a_configuration_and_a_column_a_seed(made, tmp_path):
    content, images = made
    report.write(content, images, tmp_path)
    picture = np.asarray(Image.open(tmp_path / "comparison.png"))
    left, top = picture.shape[1] - 10 * (SIDE + MARGIN), picture.shape[0] - 4 * (SIDE + MARGIN)
    assert left > 40 and top > 20
    for r in range(4):
        for i in range(10):
            y, x = top + r * (SIDE + MARGIN), left + i * (SIDE + MARGIN)
            part = picture[y : y + SIDE, x : x + SIDE]
            assert (part == (20 * r, 10 * i, 99)).all()
            name = picture[y : y + SIDE, :left]
            assert (name < 128).any()  # something is written there


# ---- Plots of speed against quality: a mark for each guarantee, and a legend of lines that no label names


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
        most = max(len(points) for _, _, points in panels)
        size = [int(RESOLUTION * side * max(1, most / 12) ** 0.5) for side in SIZE]
        assert {Image.open(io.BytesIO(png)).size for png in pictures} == {tuple(size)}
        return [figure.axes[0] for figure in drawn[-len(panels) :]]

    monkeypatch.setattr(Figure, "savefig", watched)
    return plot


def test_the_mark_of_a_point_is_its_guarantee(plotted):
    points = [PlotPoint(name, 1.0 + i, 0.5, name, guarantee=name) for i, name in enumerate(MARKS)]
    (axes,) = plotted(("speed-up", "share", points))
    marked = {line.get_xdata()[0]: line.get_marker() for line in axes.lines if line.get_marker() in MARKS.values()}
    assert marked == {point.speed: MARKS[point.guarantee] for point in points} and len(set(marked.values())) == 4
    (legend,) = axes.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["exact", "approximate", "bounded", "heuristic"]


def test_a_method_without_a_point_in_a_panel_leaves_it_as_it_is(plotted):
    here, there = PlotPoint("here", 2.0, 0.5, "ar"), PlotPoint("there", 4.0, 0.75, "cool-sd")
    left, right = plotted(("speed-up", "share", [here]), ("tokens per forward pass", "share", [there]))
    for axes, point in ((left, here), (right, there)):
        assert not axes.figure.legends
        assert [text.get_text() for text in axes.texts] == [f"{point.line}:{point.label}"]
        (line,) = [line for line in axes.lines if not line.get_label().startswith("_")]
        assert (line.get_label(), *line.get_xydata().tolist()) == (point.line, [point.speed, point.quality])
        low, high = axes.get_ylim()
        assert low > 0 and high < 1 and axes.get_xlim()[0] > 0


def test_the_legend_has_the_lines_of_several_points(plotted):
    sweep = [PlotPoint(f"gamma={gamma}", 1.0 + gamma, 0.5, "cspd") for gamma in (1, 2)]
    (axes,) = plotted(("speed-up", "share", [*sweep, PlotPoint("k=10", 1.0, 0.5, "lantern")]))
    (legend,) = axes.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["cspd"]
    assert [text.get_text() for text in axes.texts] == ["gamma=1", "gamma=2", "lantern:k=10"]


LINES = ["ar", "calibrated:head_calls=25", "speculative:window=16:draft=calibrated", "dpm-solver++:grid=planned", "gtr"]


def scattered(num: int) -> list[PlotPoint]:
    """Points with long names, in the corners and between them; the first two are nearly equal."""
    random = np.random.default_rng(0)
    places = [(2.4, 0.931), (2.41, 0.93), (0.9, 0.6), (7.0, 1.0), *random.uniform((0.9, 0.6), (7.0, 1.0), (num - 4, 2))]
    points = []
    for i, (speed, quality) in enumerate(places):
        line = LINES[i % len(LINES)]
        if i % 2:  # alone on a line of its own
            line += f":cfg={i}"
        bars = (0.9 * speed, 1.1 * speed), (quality - 0.02, quality + 0.02)
        points.append(PlotPoint(f"num_iter={i}", speed, quality, line, *bars, list(MARKS)[i % len(MARKS)]))
    return points


@pytest.mark.parametrize("num", [4, 12, 25])
def test_labels_and_legend_hide_nothing(num, plotted):
    """Every text is in the picture; no label covers another one or a point; the legend covers nothing."""
    points = scattered(num)
    (axes,) = plotted(("speed-up over ar", "FID of 50000 images (digits), lower is better", points))
    (legend,) = axes.figure.legends
    labels = [Text.get_window_extent(label) for label in axes.texts]
    texts = [*labels, legend.get_window_extent(), axes.xaxis.label.get_window_extent()]
    for box in [*texts, axes.yaxis.label.get_window_extent()]:
        corners = [*box.p0, *box.p1]
        assert all(np.greater_equal(corners, 0)) and all(np.less_equal(corners[2:], axes.figure.bbox.size))
    assert len(labels) == num and not any(a.overlaps(b) for a, b in itertools.combinations(texts, 2))
    centres = axes.transData.transform([(point.speed, point.quality) for point in points])
    assert not any(box.contains(*centre) for box in texts for centre in centres)


# ---- Grids: the size of images and captions in them, and colours that everybody can distinguish


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("num, columns, side, factor", [(4, 4, 32, 7), (40, 10, 32, 3), (1, 1, 32, 8), (3, 3, 256, 1)])
def test_small_images_are_enlarged_by_whole_factors(num, columns, side, factor):
    images = [noise(side, side, seed) for seed in range(num)]
    made = np.asarray(grid(images, ["0"] * num, columns))
    assert made.shape[1] == columns * (factor * side + MARGIN) + MARGIN
    below = (made.shape[0] - MARGIN) // -(-num // columns)  # from row to row
    for i in (0, num - 1):
        row, column = divmod(i, columns)
        y, x = MARGIN + row * below, MARGIN + column * (factor * side + MARGIN)
        cell = made[y : y + factor * side, x : x + factor * side]
        assert (cell == np.asarray(images[i]).repeat(factor, 0).repeat(factor, 1)).all()


@pytest.mark.parametrize("caption", ["a fox", "a very green and quiet harbour " * 9, "x" * 300])
def test_a_caption_has_few_lines_within_its_width(caption):
    font, (text,) = plots._captioned([caption], 20, 100)
    lines = text.split("\n")
    assert len(lines) <= CAPTION and all(font.getlength(line) <= 100 for line in lines)
    assert text == caption or text.endswith(ELLIPSIS)


def test_colours_of_costs_differ_in_lightness():
    """For those who see no hues: all values are in order, and unknown ones are between the ends."""
    fractions = np.array([[0.0, 0.25, 0.5, 0.75, 1.0, np.nan]])
    picture = coloured(fractions)
    *values, unknown = np.asarray(picture.convert("L"))[0].astype(int)
    assert np.diff(values).min() > 20 and values[0] + 60 < unknown < values[-1] - 60
    assert tuple(np.asarray(picture)[0, -1]) == UNKNOWN
