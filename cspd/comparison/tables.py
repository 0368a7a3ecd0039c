"""The report of `cspd compare` as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Iterator
from typing import NamedTuple


class Column(NamedTuple):
    """A column: where in a row, its title, how a number is written, and what it says."""

    key: str
    title: str
    form: str
    meaning: str


COLUMNS = [
    Column(
        "name", "configuration", "", "What ran: a study's name for it, or method and settings as --methods has them."
    ),
    Column("guarantee", "guarantee", "", "What is known of the law of its images, see below."),
    Column("images_per_second", "images/s", ".2f", "Median over the rounds (least..most), decoding included."),
    Column("speed_up", "speed-up", ".2f", "Against {baseline}, round by round: median (least..most)."),
    Column("head_calls_per_token", "head calls/token", ".1f", "Sequential calls of the diffusion head for one token."),
    Column("window", "W", "d", "Denoising steps drafted ahead (0: plain sampling); of Jacobi, codes judged at once."),
    Column("backbone_calls", "backbone calls", ".1f", "Forwards of the target's transformer for one image."),
    Column("draft_backbone_calls", "draft calls", ".1f", "Forwards of the draft model for one image."),
    Column("step_compression", "codes a forward", ".2f", "VQ codes committed in one forward of the target."),
    Column("alpha", "alpha", ".3f", "Share of what was drafted that was accepted."),
    Column(
        "accuracy",
        "class acc.",
        ".3f",
        "Share of the images (± half a 95 % interval) that the classifier takes for their class.",
    ),
    Column(
        "fid",
        "FID-{images}",
        ".2f",
        "Frechet distance of features from the reference (± half a 95 % interval); less is better.",
    ),
    Column(
        "inception_score",
        "IS",
        ".2f",
        "Inception score, of the same features' classifier (± half a 95 % interval); larger is better.",
    ),
    Column(
        "bound",
        "TV bound",
        ".3f",
        "Total variation from the target's law, at most (± half a 95 % interval); 1 promises nothing.",
    ),
    Column(
        "peak_bytes",
        "peak MiB",
        ".0f",
        "Peak memory while it ran: of the GPU, or of this process. All models are there.",
    ),
    Column(
        "p_value", "p", ".3f", "Two-sample test of the images' features against plain sampling by the same settings."
    ),
]


INTERVALS = ("accuracy", "fid", "inception_score", "bound")  # columns that have one, as {key}_ci95


def value_of(row: dict, key: str) -> float | str | None:
    """A row's value; of what has a spread, the median."""
    value = row[key]
    return value["median"] if isinstance(value, dict) else value


def columns(report: dict) -> list[Column]:
    """The columns of which some row has something, titles and meanings filled in."""
    given = [column for column in COLUMNS if any(row[column.key] is not None for row in report["rows"])]
    return [c._replace(title=c.title.format(**report), meaning=c.meaning.format(**report)) for c in given]


def cell(row: dict, column: Column, short: bool = False) -> str:
    """A row's value as it is written; empty where there is none. `short`: no spread but that of the speed-up."""
    value = row[column.key]
    if value is None:
        return ""
    if column.key == "peak_bytes":
        value = value / 2**20
    if isinstance(value, dict):
        low, middle, high = (format(value[name], column.form) for name in ("min", "median", "max"))
        alone = value["min"] == value["max"] or (short and column.key == "images_per_second")
        return middle if alone else f"{middle} ({low}..{high})"
    text = format(value, column.form)
    half = row.get(f"{column.key}_ci95")
    if half is not None and not short:
        text += f" ±{half:{column.form}}"
    return text


def notes(report: dict, short: bool = False) -> list[str]:
    """What a reader must know to read the table, a sentence or two each; `short` as in `cell`."""
    rows, images = report["rows"], report["images"]
    rounds = len(rows[0]["seconds"])
    each = f"{min(images, report['max_batch'])} image{'s' * (min(images, report['max_batch']) > 1)}"
    told = [f"speed-up: against {report['baseline']!r}, median of {rounds} round{'s' * (rounds > 1)} of {each}"]
    if any(row["p_value"] is not None for row in rows):
        pairs = "number" if own_seeds(report) else "seed"
        told.append(
            "p: two-sample test of the images' features against plain sampling (ar) by the same settings, paired by"
            f" class and {pairs}: a small one (0.01) says that the laws differ, a large one that {images} images show"
            " no difference; by chance an exact method's is below 0.01 once in a hundred times"
        )
    if not short and any(row[f"{key}_ci95"] is not None for row in rows for key in INTERVALS):
        told.append("±: half of a 95 % interval, of FID and IS by the jackknife (of FID by Inception there is none)")
    if any(row["fid"] is not None for row in rows):
        told.append(
            f"FID-{images}: of {images} images, not of the customary 50,000; few images raise it, so that it compares"
            " the rows of this table and nothing else"
        )
    names = {c.key: c.title.format(**report) for c in COLUMNS}
    by_reason: dict[str, list[str]] = {}
    for key, reason in report["missing"].items():
        if key in names:
            by_reason.setdefault(reason, []).append(names[key])
    return told + [f"no {', '.join(titles)}: {reason}" for reason, titles in by_reason.items()]


def own_seeds(report: dict) -> bool:
    """Whether some row has other seeds than the rest."""
    return any("seed" in row["settings"] for row in report["rows"])


def text_table(report: dict) -> str:
    """The table and its notes for a terminal; titles are in two lines."""
    shown = columns(report)
    titles = [c.title.rpartition(" ") for c in shown]
    lines = [[above for above, _, _ in titles], [below for _, _, below in titles]]
    lines += [[cell(row, c, short=True) for c in shown] for row in report["rows"]]
    widths = [max(map(len, each)) for each in zip(*lines)]
    table = [
        "  ".join(text.ljust(w) if i < 2 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths))).rstrip()
        for line in lines
    ]
    return "\n".join(
        [*table, *(textwrap.fill(f"* {note}", 120, subsequent_indent="  ") for note in notes(report, short=True))]
    )


def markdown(report: dict) -> str:
    """The table and its notes in Markdown."""
    shown = columns(report)
    lines = [[c.title for c in shown], ["---", "---", *["---:"] * (len(shown) - 2)]]
    lines += [[cell(row, c).replace("|", "\\|") for c in shown] for row in report["rows"]]
    table = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([*table, "", *(f"* {note}" for note in notes(report))]) + "\n"


def csv_table(report: dict) -> str:
    """All columns with all digits; what has a spread has three. Empty: not measured."""
    buffer = io.StringIO()
    lines = [dict(_flat(row)) for row in report["rows"]]
    writer = csv.DictWriter(buffer, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


def _flat(row: dict) -> Iterator[tuple[str, object]]:
    for key, value in row.items():
        if isinstance(value, dict) and value.keys() == {"median", "min", "max"}:
            yield from ((key, value["median"]), (f"{key}_least", value["min"]), (f"{key}_most", value["max"]))
        elif isinstance(value, (dict, list)):
            yield key, json.dumps(value)
        else:
            yield key, value
