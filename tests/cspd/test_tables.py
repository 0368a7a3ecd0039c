"""What a comparison writes: tables that agree, a page that stands alone, pictures in the right order."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from cspd.comparison import page, tables
from cspd.plots import MARGIN
from cspd.ran import what_ran
from cspd.scatter import MARKS, RESOLUTION, SIZE, Panel, Point, speed_quality

SIDE = 96  # of a picture in the grid, in pixels


def spread(*values):
    return dict(zip(("min", "median", "max"), values))


def row(name, **values):
    intervals = [f"{key}_ci95" for key in tables.INTERVALS]
    empty = dict.fromkeys([*(column.key for column in tables.COLUMNS), *intervals])
    speeds = {"images_per_second": spread(1.5, 2.0, 3.0), "speed_up": spread(1.0, 1.0, 1.0)}
    own = {"name": name, "method": name.split(":")[0], "guarantee": "exact", "seconds": [1.0, 2.0, 3.0]}
    return empty | own | speeds | {"settings": {"cfg": 3.0}, "peak_bytes": 3 * 2**20, "backbone_calls": 8.0} | values


@pytest.fixture
def made():
    """A report with everything that can be in one, and images: row r's i-th is of one colour, (20 r, 10 i, 99)."""
    rows = [
        row("ar", accuracy=0.5, fid=9.5, fid_ci95=[9.375, 9.75]),
        row(
            "speculative",
            speed_up=spread(1.5, 2.25, 2.5),
            seconds=[0.5, 0.5, 1.0],
            p_value=0.004,
            alpha=0.75,
            accuracy=0.75,
            fid=9.25,
        ),
        row(
            "cool-sd:delta=2",
            guarantee="bounded",
            bound=0.25,
            bound_ci95=[0.24, 0.26],
            accuracy=1.0,
            fid=9.0,
            p_value=0.5,
        ),
        row("a|b <i>&", method="cspd", guarantee="heuristic", fid=8.0, accuracy=0.25),
    ]
    content = {
        "schema": "x",
        "images": 12,
        "first_seed": 5,
        "labels": [3, 4],
        "max_batch": 4,
        "turns": 3,
        "rows": rows,
    }
    model = {"role": "target", "file": "t.safetensors", "sha256": "e" * 64, "bytes": 1, "parameters": 1_250_000}
    models = [model | {"configurations": [each["name"] for each in rows]}]
    models.append(model | {"role": "draft", "file": "d.safetensors", "configurations": ["a|b <i>&"]})
    content["ran"] = what_ran({"device": "a <cpu>", "threads": 3}, models, "cspd compare --out 'a b'")
    content |= {"baseline": "ar", "space": "digits"}
    content |= {"clip": None, "reference": {"name": "r.npz", "fingerprint": "f" * 64}}
    content["missing"] = {"inception_score": "12 images: 20 are needed", "inception_score_std": "also"}
    images = [np.zeros((12, 32, 32, 3), np.uint8) for _ in rows]
    for r, of_row in enumerate(images):
        for i in range(12):
            of_row[i] = (20 * r, 10 * i, 99)
    return content, images


class Page(HTMLParser):
    """Cells of the first table, row by row, and everything that a tag refers to."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.links, self.tags, self._open, self.text, self.words = [], [], [], None, "", []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "data")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._open = ""

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.rows[-1].append(self._open)
            self._open = None

    def handle_data(self, data):
        self.text += data
        self.words.append(data)
        if self._open is not None:
            self._open += data


def test_all_forms_say_the_same(made, tmp_path):
    content, images = made
    written = page.write(content, images, tmp_path)
    assert all((tmp_path / name).stat().st_size > 100 for name in written) and len(written) == 6

    plain = json.loads((tmp_path / "comparison.json").read_text())
    assert plain == content
    lines = list(csv.DictReader(io.StringIO((tmp_path / "comparison.csv").read_text())))
    assert [line["name"] for line in lines] == [each["name"] for each in content["rows"]]
    for line, each in zip(lines, content["rows"]):
        for key in ("accuracy", "fid", "p_value", "alpha", "bound", "peak_bytes"):
            assert line[key] == ("" if each[key] is None else str(each[key]))
        for key in ("fid_ci95", "bound_ci95"):
            ends = [line[f"{key}_least"], line[f"{key}_most"]]
            assert ends == ["" if each[key] is None else str(end) for end in each[key] or ("", "")]
        assert [float(line[f"speed_up{end}"]) for end in ("_least", "", "_most")] == list(each["speed_up"].values())
        assert json.loads(line["seconds"]) == each["seconds"]

    table = [line for line in (tmp_path / "comparison.md").read_text().splitlines() if line.startswith("|")]
    cells = [[text.strip() for text in line.replace("\\|", "\0").strip("|").split("|")] for line in table]
    cells = [
        [re.sub(r"\\(.)", r"\1", text.replace("\0", "|")) for text in line] for line in cells if "---" not in line[0]
    ]
    html = Page((tmp_path / "report.html").read_text())
    assert html.rows == cells and len(cells) == 5 and {len(line) for line in cells} == {len(cells[0])}

    by_title = [dict(zip(cells[0], line)) for line in cells[1:]]
    assert [line["configuration"] for line in by_title] == ["ar", "speculative", "cool-sd:delta=2", "a|b <i>&"]
    assert by_title[1]["speed-up"] == "2.25 (1.50..2.50)" and by_title[0]["speed-up"] == "1.00"
    assert by_title[0]["images/s"] == "2.00 (1.50..3.00)" and by_title[0]["peak MiB"] == "3"
    assert [line["p"] for line in by_title] == ["", "0.004", "0.500", ""]
    assert by_title[2]["TV bound"] == "0.250 [0.240, 0.260]" and by_title[1]["TV bound"] == ""
    assert [line["FID-12"] for line in by_title] == ["9.50 [9.38, 9.75]", "9.25", "9.00", "8.00"]
    assert "IS" not in cells[0] and "head calls/token" not in cells[0]


NAMES = [
    "$x$",
    r"$\frac{",
    "_a_ *b* `c`",
    r"\|a|b\\",
    "<b>&amp;",
    "=1+1",
    '@a,"b"',
    "\U0001f600",
    "a:b:",
    "[x](y)",
    "~~a~~",
]


def test_any_name_is_shown_as_it_is(made, tmp_path, recwarn):
    content, images = made
    content["rows"] = [row(name, method="ar", accuracy=0.5, fid=9.0) for name in NAMES]
    content["rows"] += [row(f"{name}:window=2", method=name.split(":")[0], accuracy=0.25, fid=8.0) for name in NAMES]
    content["baseline"] = NAMES[0]
    page.write(content, images[:1] * len(content["rows"]), tmp_path)
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]

    names = [each["name"] for each in content["rows"]]
    assert [line[0] for line in Page((tmp_path / "report.html").read_text()).rows[1:]] == names
    lines = [line for line in (tmp_path / "comparison.md").read_text().splitlines() if line.startswith("|")]
    shown = [re.split(r"(?<!\\)(?:\\\\)*\|", line)[1].strip() for line in lines[2:]]
    assert [re.sub(r"\\(.)", r"\1", text) for text in shown] == names
    assert not any(re.search(r"[`*_\[\]<>$~&]", re.sub(r"\\.", "", text)) for text in shown)
    cells = [line["name"] for line in csv.DictReader(io.StringIO((tmp_path / "comparison.csv").read_text()))]
    assert [text.removeprefix("'") for text in cells] == names
    assert not any(text.startswith(("=", "+", "-", "@")) for text in cells)


def test_the_page_needs_no_other(made, tmp_path):
    content, images = made
    page.write(content, images, tmp_path)
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
    for told in ("a <cpu>", "r.npz", "no IS: 12 images: 20 are needed", "FID-12: of 12 images", "cfg=3.0", "a b"):
        assert told in html.text
    for told in (
        "t.safetensors, 1.2 million parameters, sha256 eeeeeeeeeeee\n",
        "eeeeeeeeeeee (of a|b <i>&)",
        "threads: 3",
    ):
        assert told in html.text
    assert {"exact", "bounded", "heuristic"} <= set(html.words) and "Against ar, turn by turn" in html.text


def test_a_small_p_stands_out(made):
    made[0]["rows"][2]["p_unpaired"] = 0.001
    text = page.html_page(made[0], [])
    assert text.count('class="small-p"') == 2
    assert all(f'<span class="small-p">{p}</span>' in text for p in ("0.004", "0.001"))


def test_what_was_measured_stands_beside_the_guarantee(made):
    content, _ = made
    content["rows"][1] |= {
        "guarantee": "measured",
        "difference": 0.0461,
        "divergence": 0.5375,
        "pixel_difference": 3.25,
    }
    content["rows"][1] |= {"audit": 0.52, "audit_ci95": [0.42, 0.62]}
    content["rows"][3]["first_timestep"] = 950
    html = page.html_page(content, [])
    assert '<span class="tag measured">measured</span>' in html and ".measured {" in html
    assert "how near is measured" in html  # what the guarantee means
    titles, *lines = Page(html).rows
    cells = [dict(zip(titles, line)) for line in lines]
    shown = {"difference": "0.046", "divergence": "0.537", "audit": "0.520 [0.420, 0.620]", "pixel difference": "3.2"}
    assert {title: cells[1][title] for title in shown} == shown
    assert all(cells[0][title] == cells[2][title] == "" for title in shown)
    assert [line["first timestep"] for line in cells] == ["", "", "", "950"]
    (_, measured, *_) = csv.DictReader(io.StringIO(tables.csv_table(content)))
    assert (measured["difference"], measured["audit_ci95_most"]) == ("0.0461", "0.62")


def test_the_grid_has_a_row_a_configuration_and_a_column_a_seed(made, tmp_path):
    content, images = made
    page.write(content, images, tmp_path)
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


def test_large_images_are_shown_few_and_as_they_are(made, tmp_path):
    content, _ = made
    images = [np.full((12, 256, 256, 3), 7 * (r + 1), np.uint8) for r in range(4)]
    page.write(content, images, tmp_path)
    picture = np.asarray(Image.open(tmp_path / "comparison.png"))
    assert (picture[-256 - MARGIN : -MARGIN, -10 * (256 + MARGIN) :] == 28).all(-1).sum() == 10 * 256 * 256
    assert picture.shape[1] < 11 * (256 + MARGIN)


def test_points_are_where_they_were_measured(made):
    panels = page._panels(made[0])
    assert [(speed, quality) for speed, quality, _ in panels] == [
        ("speed-up over ar", "share recognised by the classifier"),
        ("speed-up over ar", "FID-12, lower is better"),
    ]
    assert panels[0][2] == [
        ("ar", 1.0, 0.5, "ar", (1.0, 1.0), None, "exact", False),
        ("speculative", 2.25, 0.75, "speculative", (2.5, 3.5), None, "exact", False),  # quartiles of 2, 4, 3
        ("delta=2", 1.0, 1.0, "cool-sd", (1.0, 1.0), None, "bounded", False),
        ("a|b <i>&", 1.0, 0.25, "a|b <i>&", (1.0, 1.0), None, "heuristic", False),
    ]
    assert [point.quality for point in panels[1][2]] == [9.5, 9.25, 9.0, 8.0] and panels[1][2][0].quality_range == [
        9.375,
        9.75,
    ]
    for each, codes in zip(made[0]["rows"], (1.0, 3.0, 4.0, 2.0)):
        each["step_compression"] = codes
    panels = page._panels(made[0])
    assert len(panels) == 4 and [point.speed for point in panels[3][2]] == [1.0, 3.0, 4.0, 2.0]


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


def test_nothing_to_judge_leaves_columns_and_plot_out(made, tmp_path):
    content, images = made
    for each in content["rows"]:
        each |= dict.fromkeys(("accuracy", "fid", "p_value"))
    content |= {"space": None, "reference": None}
    content["missing"] = dict.fromkeys(("fid", "accuracy", "p_value"), "no judge")
    written = page.write(content, images, tmp_path)
    assert "speed_quality.png" not in written
    text = tables.text_table(content)
    header = text.splitlines()[1]
    assert "FID" not in header and "acc." not in header and "images/s" in header
    assert "no FID-12, class acc., p: no judge" in text


def test_what_an_ar_of_another_chain_is_compared_with_is_told(made):
    content, _ = made
    told = "p of an ar with other denoising steps"
    assert told not in tables.markdown(content)
    content["rows"][0] |= {"p_value": 0.5}
    assert told in tables.markdown(content)


def test_the_table_fits_a_terminal(made):
    content, _ = made
    for i, each in enumerate(content["rows"]):
        each["name"] = f"cspd:gamma=16:prefill=0.0{i}"
        each |= {
            "head_calls_per_token": 100.0,
            "draft_backbone_calls": 60.0,
            "inception_score": 8.5,
            "alpha": 0.5,
            "bound": None,
        }
    lines = tables.text_table(content).splitlines()
    assert max(map(len, lines)) <= 120 and len({line.index("exact") for line in lines[2:4]}) == 1
    assert lines[1].split()[:4] == ["configuration", "guarantee", "images/s", "speed-up"]
    assert lines[3].split()[:4] == ["cspd:gamma=16:prefill=0.01", "exact", "2.00", "2.25"]
    below = lines.index("") + 1  # what does not fit
    assert lines[below + 1].split()[0] == "configuration" and lines[below + 1].endswith(" p")
    assert lines[below + 3].split()[0] == "cspd:gamma=16:prefill=0.01" and lines[below + 3].endswith(" 0.004")


def test_a_reference_whose_name_is_no_utf8_is_reported(made, tmp_path):
    content, images = made
    content["reference"] = {"name": "r\udce9f.npz", "fingerprint": "0" * 64}
    page.write(content, images, tmp_path)
    assert "r\\udce9f.npz" in (tmp_path / "report.html").read_text()


def test_a_legend_names_what_labels_do_not(plotted):
    said, swept = Point("ar", 1.0, 0.5, "ar"), Point("delta=2", 2.0, 0.5, "cool-sd")
    (axes,) = plotted(("speed-up", "share", [said]))
    assert axes.get_legend() is None
    (axes,) = plotted(("speed-up", "share", [said, swept]))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["cool-sd"]


def test_other_seeds_are_said_and_are_no_sweep(made, tmp_path):
    content, images = made
    page.write(content, images, tmp_path)
    assert "The same classes and seeds by" in (tmp_path / "report.html").read_text()
    assert "p unpaired" not in (tmp_path / "comparison.md").read_text()
    content["rows"][0] |= {"name": "ar:seed=1000", "settings": {"seed": 1000}, "p_unpaired": 0.25}
    page.write(content, images, tmp_path)
    assert "The same classes by" in (tmp_path / "report.html").read_text()
    assert "p unpaired: the same test against plain sampling of other seeds." in (
        (tmp_path / "comparison.md").read_text()
    )
    point = page._panels(content)[0][2][0]
    assert point.label == point.line == "ar:seed=1000"
