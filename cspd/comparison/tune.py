"""The search of `cspd tune`: successive halving over what a comparison keeps in its folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from cspd.comparison.compare import ran_by, report_of
from cspd.comparison.halving import Trial, fastest, kept, layers, nearest, planned, rungs, survivors
from cspd.comparison.jackknife import standard_error
from cspd.comparison.runs import TUNE, WRITTEN, Turns, taking_turns
from cspd.comparison.study import Configuration
from cspd.comparison.tables import value_of
from cspd.evaluation.intervals import NORMAL, half_of
from cspd.evaluation.reference import Reference
from cspd.parsing import MOST
from cspd.store import Store

WORSE = {"fid": 1, "inception_score": -1, "accuracy": -1}  # which way each gets worse
OTHER_SEEDS = MOST  # from the first row's seeds to the second's: no run has so many images
ALWAYS = 2  # rows that are in every rung: plain sampling, and the same by other seeds
RECORDED = ("name", "guarantee", "images_per_second", "speed_up", *WORSE, "difference", "divergence", "losses")


def tune(
    plain: Configuration,
    candidates: Sequence[Configuration],
    labels: Sequence[int],
    num: int,
    limits: Mapping[str, float],
    store: Store,
    *,
    seed: int = 0,
    space: str | None = None,
    weights: Path | None = None,
    reference: Reference | None = None,
    overwrite: bool = False,
    progress: bool = True,
    command: str | None = None,
) -> tuple[dict, list[np.ndarray]]:
    """Looks for the fastest candidate within `limits`, by successive halving; the report and the images of its rows.

    All make few images, the better part of them more, and so on to `num`. Nothing is made twice: the images of a rung
    are among those of the next, and a search that was cut off goes on. Plain sampling is in every rung, and once more
    by other seeds, to show what chance alone does.

    Args:
        plain: plain sampling by the user's own settings: what the limits are relative to.
        limits: how much worse than plain sampling a candidate may be. "fid", "inception_score", "accuracy": by this
            share of its value. "divergence": nats per token of the path from plain sampling's, 0 of an exact one.
        store, seed, space, weights, reference, overwrite, command: as in `cspd.comparison.compare.compare`.

    Returns:
        The report of a comparison on the rows of the last rung. Each has "losses", how much worse than plain sampling
        it is and the standard error of that, by the names of limits, and whether it is on the Pareto "front" of speed,
        FID and difference. "tune" has the limits, what each rung measured, who failed, and the name of the row that is
        "chosen": None where none is both faster than plain sampling and within the limits. Then "nearest" is the name
        of the one, faster if there is such, that is least beyond them.

    Raises:
        ValueError: plain sampling gives no images, or as `compare`.
    """
    other = seed + OTHER_SEEDS
    rows = [plain, replace(plain, name=f"{plain.name}:seed={other}", seed=other), *candidates]
    judge = {"space": space, "weights": weights, "reference": reference}
    folder = {"overwrite": overwrite, "written": [*WRITTEN, TUNE], "may_fail": True, "progress": progress}
    with taking_turns(rows, labels, rungs(num), seed, store, **folder) as turns:
        history, report, images = _search(turns, labels, rungs(num), seed, limits, judge)
        failed = {rows[r].name: reason for r, reason in turns.failed.items()}

    last = {row["name"] for row in report["rows"]}
    report["ran"] = ran_by([row for row in rows if row.name in last], command)
    own = [row for row in report["rows"] if row is not report["rows"][1]]  # by the same seeds
    for row in report["rows"]:
        row["front"] = False
    for row, layer in zip(own, layers([_point(row) for row in own])):
        row["front"] = layer == 0
    trials = [_trial(row, limits) for row in own]
    best, near = fastest(trials), nearest(trials)
    report["tune"] = {
        "limits": dict(limits),
        "rungs": history,
        "failed": failed,
        "chosen": None if best is None else own[best]["name"],
        "nearest": None if near is None else own[near]["name"],
    }
    return report, images


def _search(
    turns: Turns, labels: Sequence[int], numbers: Sequence[int], seed: int, limits: Mapping[str, float], judge: dict
) -> tuple[list[dict], dict, list[np.ndarray]]:
    """What every rung measured, and the report of the last one with the images of its rows."""
    going = [r for r in range(ALWAYS, len(turns.rows)) if turns.plans[r].window != 0]  # 0: it is plain sampling
    history: list[dict] = []
    before = 0
    for number in numbers:
        rest = [each for each in numbers if each >= number]
        turns.bar.total = turns.bar.n + planned(len(going), rest, ALWAYS, before)
        report, images = _rung(turns, [*range(ALWAYS), *going], number, labels, seed, judge)
        going = [r for r in going if r not in turns.failed]
        trials = [_trial(row, limits) for row in report["rows"][ALWAYS:]]
        if number != numbers[-1]:
            going = [going[i] for i in survivors(trials, kept(len(trials)))]
        measured = [{key: row.get(key) for key in RECORDED} for row in report["rows"]]
        history.append({"images": number, "rows": measured, "kept": [turns.rows[r].name for r in going]})
        before = number
    return history, report, images


def _rung(
    turns: Turns, chosen: Sequence[int], number: int, labels: Sequence[int], seed: int, judge: dict
) -> tuple[dict, list[np.ndarray]]:
    """The report on `number` images by each of the chosen rows that does not fail, with their losses."""
    chunks = turns.make(number, chosen)
    for r in range(ALWAYS):
        if r in turns.failed:
            raise ValueError(f"{turns.rows[r].name}: {turns.failed[r]}")
    turns.bar.set_postfix_str(f"judging {number} images of each")
    alive = [r for r in chosen if r not in turns.failed]
    rows, plans = [turns.rows[r] for r in alive], [turns.plans[r] for r in alive]
    report, images, left_out = report_of(rows, plans, chunks, labels, seed, **judge, progress=False)
    _add_losses(report["rows"], left_out)
    return report, images


def _add_losses(rows: list[dict], left_out: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Adds "losses" to each row, see `tune`; None of what cannot be had.

    Standard errors are the jackknife's of the ratio to plain sampling: the same parts are left out of both, whose
    images have the same seeds. Where there is none, it is how far off plain sampling by other seeds is.
    """
    for row, own in zip(rows, left_out):
        row["losses"] = {name: _loss(name, row, rows[0], own, left_out[0]) for name in WORSE}
        exact = 0.0 if row["guarantee"] == "exact" else row.get("divergence")
        row["losses"]["divergence"] = None if exact is None else {"loss": exact, "error": 0.0}
    for row in rows:
        for name, loss in row["losses"].items():
            if loss is not None and loss["error"] is None:
                by_chance = rows[1]["losses"][name]
                loss["error"] = abs(by_chance["loss"]) if by_chance else 0.0


def _loss(name: str, row: dict, plain: dict, own: Mapping, of_plain: Mapping) -> dict | None:
    if row[name] is None or not plain[name]:
        return None
    if row is plain:
        return {"loss": 0.0, "error": 0.0}
    loss = WORSE[name] * (row[name] / plain[name] - 1)
    known = [each[f"{name}_ci95"] for each in (row, plain)]
    error = None
    if name in own and name in of_plain:
        error = standard_error(own[name] / of_plain[name])
    elif None not in known:
        error = math.hypot(*map(half_of, known)) / NORMAL / plain[name]
    return {"loss": loss, "error": error}


def _trial(row: dict, limits: Mapping[str, float]) -> Trial:
    """A row as the search sees it: by the limit that it is furthest beyond."""
    beyond = []
    for name, limit in limits.items():
        loss = row["losses"][name]
        beyond.append((math.inf, 0.0) if loss is None else (loss["loss"] - limit, loss["error"]))
    return Trial(value_of(row, "images_per_second"), *max(beyond))


def _point(row: dict) -> tuple[float, float, float]:
    """What the front is of; less is better."""
    difference = 0.0 if row["guarantee"] == "exact" else row.get("difference")
    return (
        -value_of(row, "images_per_second"),
        math.inf if row["fid"] is None else row["fid"],
        math.inf if difference is None else difference,
    )
