"""What `cspd tune` tells: the Pareto front as a table, the choice, and what is short of the limits where none is."""

from __future__ import annotations

from collections.abc import Mapping

from tabulate import tabulate

from cspd.comparison.tables import cell, columns, value_of
from cspd.comparison.tune import WORSE
from cspd.evaluation.intervals import NORMAL

NAMES = {"fid": "FID", "inception_score": "IS", "accuracy": "recognised", "divergence": "divergence"}
SHOWN = ("name", "images_per_second", "speed_up", "fid", "inception_score", "accuracy", "difference", "guarantee")
AGAINST = "FID against ar"


def wanted(limits: Mapping[str, float]) -> str:
    """The limits in words: "FID at most 2 % worse"."""
    return ", ".join(_limit(name, limit) for name, limit in limits.items())


def _limit(name: str, limit: float) -> str:
    if name == "divergence":
        return f"a divergence of at most {limit:g} nats per token" if limit else "exact"
    return f"{NAMES[name]} at most {100 * limit:.3g} % worse"


def against_plain(row: dict, name: str) -> str:
    """How a row's value differs from plain sampling's, with half of a 95 % interval; empty where that is not known."""
    loss = row["losses"][name]
    if loss is None:
        return ""
    if name == "divergence":
        return f"{loss['loss']:.3g}"
    return f"{100 * WORSE[name] * loss['loss']:+.1f} % ±{100 * NORMAL * loss['error']:.1f}"


def front_table(report: dict) -> str:
    """The front for a terminal, the fastest last, between plain sampling and the same by other seeds."""
    rows = report["rows"]
    front = [row for row in rows[2:] if row["front"]]
    shown = [rows[0], *sorted(front, key=lambda row: value_of(row, "images_per_second")), rows[1]]
    known = {column.key: column for column in columns(report | {"rows": shown})}
    keys = [key for key in SHOWN if key in known]
    titles = [known[key].title for key in keys]
    lines = [[cell(row, known[key], short=True) for key in keys] for row in shown]
    if "fid" in keys:
        place = keys.index("fid") + 1
        titles.insert(place, AGAINST)
        for row, line in zip(shown, lines):
            line.insert(place, "" if row is rows[0] else against_plain(row, "fid"))
    aligned = ["left"] + ["right"] * (len(titles) - 1)
    return tabulate(lines, titles, tablefmt="plain", colalign=aligned, disable_numparse=True)


def choice_told(report: dict) -> str:
    """The chosen row in a sentence, and how sure it is that it keeps the limits."""
    tuned = report["tune"]
    row = next(row for row in report["rows"] if row["name"] == tuned["chosen"])
    told = f"{_fast(row)} as ar, the fastest with {wanted(tuned['limits'])}"
    unsure = [name for name, limit in tuned["limits"].items() if _reaches(row, name) > limit]
    if unsure:
        named = ", ".join(f"{NAMES[name]} {against_plain(row, name)}" for name in unsure)
        more = f"more images than {report['images']} would tell (--num, and it goes on)"
        return f"{told}; by chance it may be beyond that ({named}): {more}"
    return told


def _reaches(row: dict, name: str) -> float:
    """The worse end of a loss's 95 % interval."""
    return row["losses"][name]["loss"] + NORMAL * row["losses"][name]["error"]


def shortfall(report: dict) -> str:
    """Why no row is chosen: the nearest one, and how far it is from the limits."""
    tuned = report["tune"]
    told = f"nothing that is faster than ar is within the limits ({wanted(tuned['limits'])})"
    row = next((row for row in report["rows"] if row["name"] == tuned["nearest"]), None)
    if row is None:
        return f"{told}: no candidate was left; take ar"
    far = ", ".join(f"{NAMES[name]} {against_plain(row, name) or 'unknown'}" for name in tuned["limits"])
    return f"{told}: the nearest is {_fast(row)}, {far}: allow more, or take ar"


def _fast(row: dict) -> str:
    return f"{row['name']}, {value_of(row, 'speed_up'):.2f} times as fast"
