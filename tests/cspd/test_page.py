"""The page of a comparison stands alone; its pictures are in the right order, its points where they were measured."""

from __future__ import annotations

import base64
import csv
import io

import numpy as np
from PIL import Image
from reports import Page, full_report  # noqa: F401 - a fixture

from cspd.comparison import report
from cspd.plots import MARGIN

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
    text = report.html_page(made[0], [])
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
    html = report.html_page(content, [])
    assert '<span class="tag measured">measured</span>' in html and ".measured {" in html
    assert "how near is measured" in html  # what the guarantee means
    titles, *lines = Page(html).rows
    cells = [dict(zip(titles, line)) for line in lines]
    shown = {"difference": "0.046", "divergence": "0.537", "audit": "0.520 [0.420, 0.620]", "pixel difference": "3.2"}
    assert {title: cells[1][title] for title in shown} == shown
    assert all(cells[0][title] == cells[2][title] == "" for title in shown)
    assert [line["first timestep"] for line in cells] == ["", "", "", "950"]
    (_, measured, *_) = csv.DictReader(io.StringIO(report.csv_table(content)))
    assert (measured["difference"], measured["audit_ci95_most"]) == ("0.0461", "0.62")


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
