"""What `cspd compare` and `cspd tune` write: tables, pictures, and one HTML file that holds all of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np
from PIL import Image

from cspd.comparison.tables import cell, columns, csv_table, markdown, notes, own_seeds, value_of
from cspd.comparison.verdict import front_table
from cspd.evaluation.subjects import are_texts, in_turn
from cspd.method import GUARANTEES
from cspd.plots import beside, seed_grid
from cspd.ran import model_line
from cspd.records import link_of, png_of, write_bytes, write_json
from cspd.scatter import Panel, Point, speed_quality

COLUMNS = 10  # images of a row that are shown, at most
MOST_WIDTH = 112  # of an image on the page, in pixels of a browser


class Picture(NamedTuple):
    """A picture of the page: what it shows, and the PNG file's content."""

    title: str
    png: bytes

    @property
    def link(self) -> str:
        """The PNG as a data link."""
        return link_of(self.png)


class Strip(NamedTuple):
    """A configuration's images on the page."""

    name: str
    pictures: Sequence[Picture]


def write(report: dict, images: Sequence[np.ndarray], out: Path) -> list[str]:
    """Writes all forms of the report into `out`; the files' names. `images`: of each row, uint8 [N, H, W, 3].

    The folder is claimed: what it holds under these names is of an earlier report.
    """
    panels = _panels(report)
    plots = [
        Picture(f"{panel.quality} against {panel.speed}", png) for panel, png in zip(panels, speed_quality(panels))
    ]
    heads, rows = _shown(report, images)
    is_small = rows[0][1][0].width < MOST_WIDTH
    strips = []
    for name, pictures in rows:
        titles = [", ".join([name, *head]) for head in heads]
        strips.append(Strip(name, [Picture(title, png_of(picture)) for title, picture in zip(titles, pictures)]))

    files = {"report.html": _encoded(html_page(report, plots, strips, is_small))}
    if plots:
        files["speed_quality.png"] = png_of(beside([plot.png for plot in plots]))
    else:
        (out / "speed_quality.png").unlink(missing_ok=True)  # of another reference
    named = [(_with_speed(row), pictures) for row, (_, pictures) in zip(report["rows"], rows)]
    files |= {
        "comparison.png": png_of(seed_grid(named, ["\n".join(head) for head in heads])),
        "comparison.md": _encoded(markdown(report)),
        "comparison.csv": _encoded(csv_table(report)),
    }
    for name, content in files.items():
        write_bytes(out / name, content)
    write_json(out / "comparison.json", report)
    return [*files, "comparison.json"]


def _with_speed(row: dict) -> str:
    """A row's name, and below it how many times as fast as baseline sampling it was."""
    speed = value_of(row, "speed_up")
    return row["name"] if speed is None else f"{row['name']}\n{speed:.1f}x"


def _encoded(text: str) -> bytes:
    """As UTF-8. The names of files may be none."""
    return text.encode(errors="backslashreplace")


def _shown(report: dict, images: Sequence[np.ndarray]) -> tuple[list[list[str]], list[tuple[str, list[Image.Image]]]]:
    """What the first images are of, in parts, one column per seed, and those of each row with its name."""
    subjects = report["labels"]
    of = "" if are_texts(subjects) else "class "
    heads = []
    for i, subject in enumerate(in_turn(subjects, min(report["images"], COLUMNS))):
        seed = [] if own_seeds(report) else [f"seed {report['first_seed'] + i}"]
        heads.append([f"{of}{subject}", *seed])
    rows = []
    for row, made in zip(report["rows"], images):
        rows.append((row["name"], [Image.fromarray(image) for image in made[: len(heads)]]))
    return heads, rows


def _panels(report: dict) -> list[Panel]:
    """Quality against speed-up and, for VQ models, against codes per forward, which no machine changes."""
    qualities = {"accuracy": "share recognised by the classifier", "fid": f"FID-{report['images']}, lower is better"}
    qualities["clip_score"] = "CLIP score"
    speeds = {"speed_up": f"speed-up over {report['baseline']}", "step_compression": "codes per forward of the target"}
    base_seconds = report["rows"][0]["seconds"]
    panels = []
    for quality, quality_title in qualities.items():
        for speed, speed_title in speeds.items():
            measured = [row for row in report["rows"] if row[quality] is not None and row[speed] is not None]
            points = [_point(row, speed, quality, base_seconds) for row in measured]
            if points:
                panels.append(Panel(speed_title, quality_title, points))
    return panels


def _point(row: dict, speed: str, quality: str, base_seconds: list[float]) -> Point:
    label, line = _label(row)
    speed_range = None
    if speed == "speed_up":
        ratios = [base / own for base, own in zip(base_seconds, row["seconds"])]
        speed_range = tuple(np.percentile(ratios, [25, 75]).tolist())
    interval = row[f"{quality}_ci95"]
    on_front = quality == "fid" and row.get("front", False)
    place = value_of(row, speed), row[quality], line, speed_range
    return Point(label, *place, interval, row["guarantee"], on_front)


def _label(row: dict) -> tuple[str, str]:
    """A point's label, and its line: of "lantern++:optimal=true:k=10" the last setting, and the rest; else the name."""
    line, colon, last = row["name"].rpartition(":")
    swept = colon and line.split(":")[0] == row["method"] and not last.startswith("seed=")
    return (last, line) if swept else (row["name"], row["name"])


def html_page(report: dict, plots: Sequence[Picture] = (), strips: Sequence[Strip] = (), is_small: bool = False) -> str:
    """One file that needs no other: table, pictures, settings, what ran, and how to read it (report.html.j2).

    `is_small`: images are enlarged, and their pixels are to be seen.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["json"] = json.dumps
    given = {row["guarantee"] for row in report["rows"]}
    search = report.get("tune")
    return environment.get_template("report.html.j2").render(
        report=report,
        command="cspd tune" if search else "cspd compare",
        search=search,
        front=front_table(report) if search else None,
        plots=plots,
        strips=strips,
        small=is_small,
        most_width=MOST_WIDTH,
        columns=columns(report),
        of_texts=are_texts(report["labels"]),
        cell=cell,
        notes=notes(report),
        model_line=model_line,
        own_seeds=own_seeds(report),
        guarantees={name: meaning for name, meaning in GUARANTEES.items() if name in given},
    )
