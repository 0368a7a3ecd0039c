"""What `cspd compare` and `cspd tune` write: tables, pictures, and one HTML file that holds all of it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np
from PIL import Image

from cspd.comparison.tables import cell, columns, csv_table, markdown, notes, own_seeds, value_of
from cspd.comparison.verdict import front_table
from cspd.method import GUARANTEES
from cspd.plots import Point, seed_grid, speed_quality
from cspd.records import png_of, write_bytes, write_json

GRID_WIDTH = 1400  # pixels of images in a row, about
LEAST_COLUMNS = 8


class Picture(NamedTuple):
    """A picture of the page: its title, a line below that, and the PNG file's content."""

    title: str
    caption: str
    png: bytes

    @property
    def content(self) -> str:
        """The PNG as a data link has it."""
        return base64.b64encode(self.png).decode()


def write(report: dict, images: Sequence[np.ndarray], out: Path) -> list[str]:
    """Writes all forms of the report into `out`; the files' names. `images`: of each row, uint8 [N, H, W, 3].

    The folder is claimed: what it holds under these names is of an earlier report.
    """
    pictures = {}
    panels = _panels(report)
    if panels:
        caption = (
            "Up and to the right is better. Bars: middle half of the turns, 95 % interval of a quality. A point's shape"
            " is its guarantee."
        )
        plot = io.BytesIO()
        speed_quality(panels, plot)
        pictures["speed_quality.png"] = Picture("Speed and quality", caption, plot.getvalue())
    else:
        (out / "speed_quality.png").unlink(missing_ok=True)  # of another reference
    same = "The same classes" if own_seeds(report) else "The same classes and seeds"
    grid = png_of(_grid(report, images))
    pictures["comparison.png"] = Picture("Images", f"{same} by each configuration.", grid)

    files = {
        "report.html": _encoded(html_page(report, list(pictures.values()))),
        **{name: picture.png for name, picture in pictures.items()},
        "comparison.md": _encoded(markdown(report)),
        "comparison.csv": _encoded(csv_table(report)),
    }
    for name, content in files.items():
        write_bytes(out / name, content)
    write_json(out / "comparison.json", report)
    return [*files, "comparison.json"]


def _encoded(text: str) -> bytes:
    """As UTF-8. The names of files may be none."""
    return text.encode(errors="backslashreplace")


def _grid(report: dict, images: Sequence[np.ndarray]) -> Image.Image:
    """The first images of each row, one column per seed."""
    width = max(64, images[0].shape[2])
    num_columns = min(report["images"], max(LEAST_COLUMNS, GRID_WIDTH // width))
    labels = report["labels"]
    heads = []
    for i in range(num_columns):
        seed = f"{i + 1}." if own_seeds(report) else f"seed {report['first_seed'] + i}"
        heads.append(f"class {labels[i % len(labels)]}\n{seed}")
    rows = []
    for row, made in zip(report["rows"], images):
        rows.append((row["name"], [Image.fromarray(image) for image in made[:num_columns]]))
    return seed_grid(rows, heads)


def _panels(report: dict) -> list[tuple[str, str, list[Point]]]:
    """Quality against speed-up and, for VQ models, against codes per forward, which no machine changes."""
    qualities = {"accuracy": "share of images recognised by the classifier", "fid": f"FID-{report['images']}"}
    speeds = {"speed_up": f"speed-up over {report['baseline']}", "step_compression": "codes per forward of the target"}
    base_seconds = report["rows"][0]["seconds"]
    panels = []
    for quality, quality_title in qualities.items():
        for speed, speed_title in speeds.items():
            measured = [row for row in report["rows"] if row[quality] is not None and row[speed] is not None]
            points = [_point(row, speed, quality, base_seconds) for row in measured]
            if points:
                panels.append((speed_title, quality_title, points))
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


def html_page(report: dict, pictures: Sequence[Picture]) -> str:
    """One file that needs no other: table, pictures, settings, machine, and how to read it (report.html.j2)."""
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
        pictures=pictures,
        columns=columns(report),
        cell=cell,
        notes=notes(report),
        guarantees={name: meaning for name, meaning in GUARANTEES.items() if name in given},
    )
