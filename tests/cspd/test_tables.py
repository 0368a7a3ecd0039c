"""What a comparison writes: tables that agree, whatever the names, and what is told where a column is missing."""

from __future__ import annotations

import csv
import io
import json
import re

from reports import Page, full_report, row  # noqa: F401 - a fixture

from cspd.comparison import report


def test_all_forms_say_the_same(made, tmp_path):
    content, images = made
    written = report.write(content, images, tmp_path)
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


def test_nothing_to_judge_leaves_columns_and_plot_out(made, tmp_path):
    content, images = made
    for each in content["rows"]:
        each |= dict.fromkeys(("accuracy", "fid", "p_value"))
    content |= {"space": None, "reference": None}
    content["missing"] = dict.fromkeys(("fid", "accuracy", "p_value"), "no judge")
    written = report.write(content, images, tmp_path)
    assert "speed_quality.png" not in written
    text = report.text_table(content)
    header = text.splitlines()[1]
    assert "FID" not in header and "acc." not in header and "images/s" in header
    assert "no FID-12" in text


def test_what_an_ar_of_another_chain_is_compared_with_is_told(made):
    content, _ = made
    told = "p of an ar with other denoising steps"
    assert told not in report.markdown(content)
    content["rows"][0] |= {"p_value": 0.5}
    assert told in report.markdown(content)


def test_other_seeds_are_said_and_are_no_sweep(made, tmp_path):
    content, images = made
    report.write(content, images, tmp_path)
    assert "The same classes and seeds by" in (tmp_path / "report.html").read_text()
    assert "p unpaired" not in (tmp_path / "comparison.md").read_text()
    content["rows"][0] |= {"name": "ar:seed=1000", "settings": {"seed": 1000}, "p_unpaired": 0.25}
    report.write(content, images, tmp_path)
    assert "The same classes by" in (tmp_path / "report.html").read_text()
    assert "p unpaired: the same test against plain sampling of other seeds." in (
        (tmp_path / "comparison.md").read_text()
    )
    point = report._panels(content)[0][2][0]
    assert point.label == point.line == "ar:seed=1000"
