"""A report of a comparison that uses every column, and a parser of its page."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pytest

from cspd.comparison import report
from cspd.origin import what_ran


def spread(*values):
    return dict(zip(("min", "median", "max"), values))


def row(name, **values):
    intervals = [f"{key}_ci95" for key in report.INTERVALS]
    empty = dict.fromkeys([*(column.key for column in report.COLUMNS), *intervals, "fid_resolution", "resample_tries"])
    speeds = {"images_per_second": spread(1.5, 2.0, 3.0), "speed_up": spread(1.0, 1.0, 1.0)}
    own = {"name": name, "method": name.split(":")[0], "guarantee": "exact", "seconds": [1.0, 2.0, 3.0]}
    return (
        empty
        | own
        | speeds
        | {"settings": {"cfg": 3.0}, "step_compression_tests": {}, "peak_bytes": 3 * 2**20, "backbone_calls": 8.0}
        | values
    )


@pytest.fixture(name="made")
def full_report():
    """A report that uses every column, and images: image i of row r has the colour (20 r, 10 i, 99)."""
    bounded = {"bound": 0.25, "bound_ci95": [0.24, 0.26], "accuracy": 1.0, "fid": 9.0, "p_value_holm": 0.5}
    faster = {"speed_up": spread(1.5, 2.25, 2.5), "seconds": [0.5, 0.5, 1.0], "alpha": 0.75}
    rows = [
        row("ar", accuracy=0.5, fid=9.5, fid_ci95=[9.375, 9.75]),
        row("speculative", p_value_holm=0.004, verdict="differs: features", accuracy=0.75, fid=9.25, **faster),
        row("cool-sd:delta=2", guarantee="bounded", **bounded),
        row("a|b <i>&", method="mar-draft", guarantee="heuristic", fid=8.0, accuracy=0.25),
    ]
    for each in rows:
        each["speed_baseline"] = "ar"
    model = {"role": "target", "file": "t.safetensors", "sha256": "e" * 64, "bytes": 1, "parameters": 1_250_000}
    models = [model | {"configurations": [each["name"] for each in rows]}]
    models.append(model | {"role": "draft", "file": "d.safetensors", "configurations": ["a|b <i>&"]})
    about = {"schema": "x", "images": 12, "first_seed": 5, "labels": [3, 4], "max_batch": 4, "turns": 3, "repeats": 1}
    reference = {"name": "r.npz", "fingerprint": "f" * 64}
    content = about | {
        "rows": rows,
        "ran": what_ran({"device": "a <cpu>", "threads": 3}, models, "cspd compare --out 'a b'"),
        "baseline": "ar",
        "space": "digits",
        "clip": None,
        "reference": reference,
        "missing": {"inception_score": "12 images: 20 are needed", "inception_score_std": "also"},
    }
    images = [np.zeros((12, 32, 32, 3), np.uint8) for _ in rows]
    for r, of_row in enumerate(images):
        for i in range(12):
            of_row[i] = (20 * r, 10 * i, 99)
    return content, images


class Page(HTMLParser):
    """The cells of a page's tables, row by row, all links, tags and text."""

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
