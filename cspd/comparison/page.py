"""What `cspd compare` writes: tables, pictures, and one HTML file that holds all of it and needs no other."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from cspd.comparison.tables import Column, cell, columns, csv_table, markdown, notes, own_seeds, value_of
from cspd.plots import Point, seed_grid, speed_quality
from cspd.records import publishing, write_json

GRID_WIDTH = 1400  # pixels of images in a row, about
LEAST_COLUMNS = 8
PLOT_TITLE = (
    "Speed and quality: up and to the right is better (bars: middle half of the rounds, 95 % interval of a quality)"
)

GUARANTEES = {
    "exact": "The images have the law of plain sampling by the same settings, to floating point: proved, and tested.",
    "bounded": "The law differs from plain sampling's by a total variation that is at most what was measured.",
    "heuristic": "No proof: only the images say how good it is.",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2330; background: #f5f6f8; margin: 0; }
main { max-width: 1360px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 10px; }
p.sub { color: #5a6475; margin: 0 0 18px; }
.card { background: #fff; border: 1px solid #e0e4ea; border-radius: 10px; padding: 16px; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 7px; text-align: right; border-bottom: 1px solid #edf0f4; }
th { color: #5a6475; font-weight: 600; font-size: 12.5px; vertical-align: bottom; }
td { white-space: nowrap; font-size: 14px; }
th:first-child, td:first-child { text-align: left; font-weight: 600; } td small { color: #7b8494; }
tr:last-child td { border-bottom: 0; } tbody tr:hover { background: #f8fafc; }
.tag { border-radius: 9px; padding: 1px 9px; font-size: 12.5px; font-weight: 600; }
.exact { background: #dff3e4; color: #17663a; } .bounded { background: #fdf0d3; color: #7a5200; }
.heuristic { background: #fbe1de; color: #96281b; } .small-p { color: #96281b; font-weight: 700; }
img { max-width: 100%; height: auto; display: block; margin: 0 auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 0; }
dt { font-weight: 600; } dd { margin: 0; color: #3c4656; } li { margin: 3px 0; }
code { font-size: 13px; background: #eef1f5; border-radius: 4px; padding: 1px 5px; }
"""


def write(report: dict, images: Sequence[np.ndarray], out: Path) -> list[str]:
    """Writes all forms of the report into `out`; the files' names. `images`: of each row, uint8 [N, H, W, 3]."""
    pictures = {"comparison.png": _png(_grid(report, images).save)}
    panels = _panels(report)
    if panels:
        pictures = {"speed_quality.png": _png(partial(speed_quality, panels))} | pictures
    else:
        (out / "speed_quality.png").unlink(missing_ok=True)  # of another reference
    same = "The same classes" + ("" if own_seeds(report) else " and seeds") + " by each configuration"
    titles = {"speed_quality.png": PLOT_TITLE, "comparison.png": same}
    page = html_page(report, [(titles[name], png) for name, png in pictures.items()])
    texts = {"comparison.md": markdown(report), "comparison.csv": csv_table(report)}
    files = {"report.html": page.encode(), **pictures, **{name: text.encode() for name, text in texts.items()}}
    for name, content in files.items():
        with publishing(out / name) as temporary:
            temporary.write_bytes(content)
    write_json(out / "comparison.json", report)
    return [*files, "comparison.json"]


def _png(save: Callable[..., None]) -> bytes:
    buffer = io.BytesIO()
    save(buffer, format="png")
    return buffer.getvalue()


def _grid(report: dict, images: Sequence[np.ndarray]) -> Image.Image:
    width = max(64, images[0].shape[2])
    columns = min(report["images"], max(LEAST_COLUMNS, GRID_WIDTH // width))
    labels, first = report["labels"], report["first_seed"]
    seeds = [f"{i + 1}." if own_seeds(report) else f"seed {first + i}" for i in range(columns)]
    heads = [f"class {labels[i % len(labels)]}\n{seed}" for i, seed in enumerate(seeds)]
    rows = [
        (row["name"], [Image.fromarray(image) for image in made[:columns]]) for row, made in zip(report["rows"], images)
    ]
    return seed_grid(rows, heads)


def _panels(report: dict) -> list[tuple[str, str, list[Point]]]:
    """Quality against speed on this machine and, of VQ models, against codes a forward, which is no machine's."""
    titles = {"accuracy": "share of images recognised by the classifier", "fid": f"FID-{report['images']}"}
    titles |= {"speed_up": f"speed-up over {report['baseline']}", "step_compression": "codes a forward of the target"}
    panels, base = [], report["rows"][0]["seconds"]
    for quality in ("accuracy", "fid"):
        for speed in ("speed_up", "step_compression"):
            points = []
            for row in report["rows"]:
                if row[quality] is None or row[speed] is None:
                    continue
                label, line = _label(row)
                ratios = [other / own for other, own in zip(base, row["seconds"])]
                limits = tuple(np.percentile(ratios, [25, 75]).tolist()) if speed == "speed_up" else None
                points.append(Point(label, value_of(row, speed), row[quality], line, limits, row[f"{quality}_ci95"]))
            if points:
                panels.append((titles[speed], titles[quality], points))
    return panels


def _label(row: dict) -> tuple[str, str]:
    """A point's label, and its line: of "lantern++:optimal=true:k=10" the last setting, and the rest; else the name."""
    line, colon, last = row["name"].rpartition(":")
    swept = colon and line.split(":")[0] == row["method"] and not last.startswith("seed=")
    return (last, line) if swept else (row["name"], row["name"])


def html_page(report: dict, pictures: Sequence[tuple[str, bytes]]) -> str:
    """One file that needs no other: table, pictures (titles and PNGs), settings, machine, and how to read it."""
    shown = columns(report)
    head = "".join(f"<th title={_quoted(c.meaning)}>{html.escape(c.title)}</th>" for c in shown)
    body = "\n".join("<tr>" + "".join(_html_cell(row, c) for c in shown) + "</tr>" for row in report["rows"])
    guarantees = {row["guarantee"] for row in report["rows"]}
    machine = " · ".join(f"{name} {value}" for name, value in report["machine"].items())
    versions = " · ".join(f"{name} {value}" for name, value in report["versions"].items())
    reference = report["reference"]
    judged = "nothing" if reference is None else f"{reference['name']} (sha256 {reference['fingerprint'][:16]}...)"
    facts = {
        "images": f"{report['images']} each, seeds from {report['first_seed']} (where a configuration has no own),"
        f" {report['max_batch']} at once, in {report['rounds']} rounds; the configurations take turns",
        "classes": ", ".join(map(str, report["labels"])),
        "machine": machine,
        "versions": versions,
        "features": f"{report['space'] or 'none'}; reference: {judged}",
    }
    settings = {
        row["name"]: " ".join(f"{key}={json.dumps(value)}" for key, value in row["settings"].items())
        for row in report["rows"]
    }
    sections = [
        f'<div class="card"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>',
        "<ul>" + "".join(f"<li>{html.escape(note)}</li>" for note in notes(report)) + "</ul>",
        *(
            f'<h2>{html.escape(title)}</h2>\n<div class="card"><img alt={_quoted(title)}'
            f' src="data:image/png;base64,{base64.b64encode(png).decode()}"></div>'
            for title, png in pictures
        ),
        "<h2>How to read it</h2>" + _definitions({c.title: html.escape(c.meaning) for c in shown[1:]}),
        "<h2>Guarantees</h2>" + _definitions({k: html.escape(v) for k, v in GUARANTEES.items() if k in guarantees}),
        "<h2>Settings</h2>" + _definitions({k: f"<code>{html.escape(v)}</code>" for k, v in settings.items()}),
        "<h2>Run</h2>" + _definitions({k: html.escape(v) for k, v in facts.items()}),
    ]
    count = len(report["rows"])
    title = f"{count} configuration{'s' * (count != 1)}, {report['images']} images each"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>cspd compare</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body><main>'
        f'<h1>cspd compare</h1><p class="sub">{title}</p>\n' + "\n".join(sections) + "\n</main></body></html>\n"
    )


def _quoted(text: str) -> str:
    return f'"{html.escape(text)}"'


def _definitions(terms: dict[str, str]) -> str:
    return (
        '<div class="card"><dl>'
        + "".join(f"<dt>{html.escape(k)}</dt><dd>{v}</dd>" for k, v in terms.items())
        + "</dl></div>"
    )


def _html_cell(row: dict, column: Column) -> str:
    text = html.escape(cell(row, column))
    if column.key == "guarantee":
        text = f'<span class="tag {text}">{text}</span>'
    elif column.key == "p_value" and text and row["p_value"] < 0.01:
        text = f'<span class="small-p">{text}</span>'
    elif " (" in text and column.key != "name":  # the spread, smaller
        middle, _, rest = text.partition(" (")
        text = f"{middle} <small>({rest}</small>"
    return f"<td>{text}</td>"
