"""Configurations side by side: the same seeds, taking turns, as rows of speed, cost, quality and p-values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_fidelity.metric_fid import fid_features_to_statistics
from tqdm import tqdm

from cspd.comparison.by_clip import judge_by_clip
from cspd.comparison.chunks import Chunk
from cspd.comparison.jackknife import intervals, jackknife
from cspd.comparison.runs import TIMED, settings_of, taking_turns
from cspd.comparison.study import Configuration, baselines
from cspd.evaluation import metrics
from cspd.evaluation.intervals import around
from cspd.evaluation.reference import Reference
from cspd.evaluation.subjects import Subject, are_texts, in_turn
from cspd.evaluation.two_sample import LEAST_PAIRS, energy_test
from cspd.lookup import guarantee_of
from cspd.machine import spread
from cspd.ran import models_of, what_ran
from cspd.sequence import Request
from cspd.store import Store
from cspd.summary import LAZY, measured

SCHEMA = "cspd.compare/6"
TESTS = (("p_value", "paired_baseline"), ("p_unpaired", "unpaired_baseline"))  # against the same seeds, and others
QUALITIES = ("fid", "inception_score", "accuracy")


def compare(
    rows: Sequence[Configuration],
    subjects: Sequence[Subject],
    num: int,
    store: Store,
    *,
    seed: int = 0,
    space: str | None = None,
    weights: Path | None = None,
    reference: Reference | None = None,
    clip: Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    command: str | None = None,
) -> tuple[dict, list[np.ndarray]]:
    """Generates `num` images by each configuration and judges them; the report and the images.

    The configurations take turns, so that a machine that slows down slows all. The images are kept in files and not
    made again (`cspd.comparison.runs`): a run that was cut off goes on, and a finished one can be given more images
    or another reference.

    Args:
        rows: see `cspd.comparison.study.configurations`; speed is measured against the first.
        subjects: classes by number, or texts; image i has the i-th, over and over.
        store: of the folder, see `cspd.comparison.runs.store_of`; it stays claimed until the store's `with` ends.
        seed: of the first image, where a row has none of its own; the next has the next.
        space, weights, reference: what images are judged in, see `cspd.evaluation.metrics`; space None leaves quality
            and p-values out. clip: the folder of a model that judges images of texts.
        overwrite: replace another run that is in the folder. command: the command line, which the report names.

    Returns:
        A JSON-able report, see docs/compare.md, and the images of each row, uint8 [num, H, W, 3].

    Raises:
        ValueError: a bad request, an engine without autoencoder, or as `Store.claim`.
    """
    how = {"overwrite": overwrite, "timed": TIMED, "progress": progress}
    with taking_turns(rows, subjects, [num], seed, store, **how) as turns:
        chunks = turns.make(num)
    judge = {"space": space, "weights": weights, "reference": reference, "clip": clip}
    report, images, _ = report_of(rows, turns.plans, chunks, subjects, seed, **judge, progress=progress)
    return report | {"ran": ran_by(rows, command)}, images


def ran_by(rows: Sequence[Configuration], command: str | None) -> dict:
    """As `what_ran`, of a comparison: each of its models has the names of the "configurations" that use it."""
    models: dict[tuple, dict] = {}
    for row in rows:
        family = row.engine.check(row.request).family
        for model in models_of(row.files, row.engine.hosts[family]):
            known = models.setdefault((model["role"], model["sha256"]), model | {"configurations": []})
            known["configurations"].append(row.name)
    return what_ran(rows[0].engine.describe(), list(models.values()), command)


def report_of(
    rows: Sequence[Configuration],
    plans: Sequence[Request],
    chunks: Sequence[list[Chunk]],
    subjects: Sequence[Subject],
    seed: int,
    *,
    space: str | None = None,
    weights: Path | None = None,
    reference: Reference | None = None,
    clip: Path | None = None,
    progress: bool = True,
) -> tuple[dict, list[np.ndarray], list[dict]]:
    """The report on chunks that rows have made by their plans, the images of each row, and what `jackknife` gave."""
    images = [np.concatenate([chunk.images for chunk in made]) for made in chunks]
    report = {
        "schema": SCHEMA,
        "images": len(images[0]),
        "first_seed": seed,
        "labels": list(subjects),
        "max_batch": rows[0].engine.num_slots,
        "turns": len(chunks[0]),
        "baseline": rows[0].name,
        "space": space,
        "reference": reference and {"name": reference.name, "fingerprint": reference.fingerprint},
        "clip": None,
        "missing": {},
        "rows": [],
    }
    for row, plan, made in zip(rows, plans, chunks):
        seeds = {} if row.seed is None else {"seed": row.seed}
        entry = speed_of(row, plan, made, chunks[0])
        report["rows"].append(entry | {"settings": settings_of(plan) | seeds})
    against = [baselines(row, rows, seed) for row in rows]
    for entry, (same, _), made in zip(report["rows"], against, images):
        other = None if same is None else images[rows.index(same)]
        entry["pixel_difference"] = None if other is None else _pixel_difference(made, other)
    left_out = _judge(report, rows, images, against, space, weights, reference, progress)
    paired = [None if same is None else rows.index(same) for same, _ in against]
    judge_by_clip(report, images, paired, clip, rows[0].engine.device, progress)
    return report, images, left_out


def _pixel_difference(images: np.ndarray, others: np.ndarray) -> float:
    """Root mean square, in 0..255, of images uint8 [N, H, W, 3]."""
    squares = [np.square(image.astype(np.float32) - other).mean() for image, other in zip(images, others)]
    return float(np.mean(squares) ** 0.5)


def speed_of(row: Configuration, plan: Request, chunks: list[Chunk], base_chunks: list[Chunk]) -> dict:
    """Speed, turn by turn with its spread, and cost; turns of fewer or more images than most do not count for speed."""
    size = min(row.engine.num_slots, max(len(chunk.images) for chunk in chunks))
    turns = [(own, base) for own, base in zip(chunks, base_chunks) if len(own.images) == size]
    guarantee = guarantee_of(plan)
    costs = [cost for chunk in chunks for cost in chunk.costs]
    has_codes = costs[0]["step_compression"] is not None
    judged = sum(cost["judged"] for cost in costs)
    accepted = sum(cost["accepted"] for cost in costs)
    bound, bound_interval = _mean_bound(costs) if guarantee == "bounded" else (None, None)
    near = measured(costs)
    audit_error = near.pop("audit_error")

    def mean(name: str) -> float:
        return sum(cost.get(name, 0) for cost in costs) / len(costs)

    return {
        "name": row.name,
        "method": plan.method,
        "guarantee": guarantee,
        "seconds": [own.seconds for own, _ in turns],
        "images_per_second": spread([size / own.seconds for own, _ in turns]),
        "speed_up": spread([base.seconds / own.seconds for own, base in turns]),
        "first_timestep": plan.first_timestep,
        "window": plan.window,
        "head_calls_per_token": mean("head_calls_per_token") or None,
        "backbone_calls": mean("backbone_calls"),
        LAZY: mean(LAZY) or None,
        "draft_backbone_calls": mean("draft_backbone_calls") or None,
        "alpha": accepted / judged if judged else None,
        "step_compression": mean("step_compression") if has_codes else None,
        "bound": bound,
        "bound_ci95": bound_interval,
        **near,
        "audit_ci95": None if audit_error is None else around("audit", near["audit"], audit_error),
        "peak_bytes": max(own.peak_bytes for own, _ in turns),
    }


def _mean_bound(costs: list[dict]) -> tuple[float, list[float] | None]:
    """Mean of the images' bounds and its 95 % interval; None of one image, or where the mean is cut to 1."""
    bounds = torch.tensor([cost["bound"] for cost in costs], dtype=torch.float64)
    mean = bounds.mean().item()
    if mean >= 1:
        return 1.0, None
    if len(bounds) == 1:
        return mean, None
    return mean, around("bound", mean, float(bounds.std() / len(bounds) ** 0.5))


def _judge(
    report: dict,
    rows: Sequence[Configuration],
    images: Sequence[np.ndarray],
    against: Sequence[tuple[Configuration | None, Configuration | None]],
    space: str | None,
    weights: Path | None,
    reference: Reference | None,
    progress: bool,
) -> list[dict]:
    """Adds quality and p-values to the report's rows, and to `missing` the reason for each that is not there.

    `against`: what each row is tested against, of the same seeds and of others. Returns what `jackknife` gave of each.
    """
    missing = report["missing"]
    known = [f"{name}_ci95" for name in QUALITIES]
    for entry in report["rows"]:
        entry |= dict.fromkeys([*QUALITIES, *known, *(key for test in TESTS for key in test)])
    if space is None:
        reason = "these models have no judge of their own: give Inception's file, --weights"
        missing |= dict.fromkeys([*QUALITIES, "p_value"], reason)
        return [{} for _ in rows]
    judge = {"space": space, "weights": weights, "device": rows[0].engine.device}
    if reference is not None:
        reference = _with_statistics(reference, judge)

    features, left_out = [], []
    pairs = list(zip(report["rows"], images))
    for entry, made in tqdm(pairs, desc="judging", unit=" row", disable=not progress):
        pictures = metrics.ImageList(torch.from_numpy(made).permute(0, 3, 1, 2))
        extracted = metrics.extract(pictures, **judge)
        features.append(extracted[0])
        entry |= _quality(pictures, extracted, report["labels"], reference, judge, missing)
        names = [name for name in ("fid", "inception_score") if entry[name] is not None]
        left_out.append(jackknife(*extracted, names, reference, len(report["labels"])))
        entry |= intervals(entry, left_out[-1])

    if report["images"] < LEAST_PAIRS:
        missing["p_value"] = f"a test wants {LEAST_PAIRS} images or more"
        return left_out
    for entry, bases, found in zip(report["rows"], against, features):
        for (p_value, base_name), base in zip(TESTS, bases):
            if base is not None:
                entry |= {p_value: energy_test(features[rows.index(base)], found), base_name: base.name}
    return left_out


def _quality(
    pictures: metrics.ImageList,
    extracted: tuple[Tensor, Tensor],
    subjects: list[Subject],
    reference: Reference | None,
    judge: dict,
    missing: dict[str, str],
) -> dict[str, float | list[float] | None]:
    """A row's qualities, with the interval of its accuracy; adds to `missing` the reason for each that is not there."""
    labels = None if are_texts(subjects) else in_turn(subjects, len(pictures))
    measured = metrics.measure(pictures, reference=reference, labels=labels, extracted=extracted, **judge)
    missing |= {name: reason for name, reason in measured["missing"].items() if name in QUALITIES}
    return {name: measured[name] for name in (*QUALITIES, "accuracy_ci95")}


def _with_statistics(reference: Reference, judge: dict) -> Reference:
    """The reference by statistics alone, taken once for all rows: what else needs its images has no column."""
    statistics = reference.statistics
    if statistics is None and len(reference.images) >= metrics.LEAST["fid"]:
        taken = fid_features_to_statistics(metrics.features(reference.images, **judge))
        statistics = {name: value.astype(np.float64) for name, value in taken.items()}
    if statistics is None:
        return reference
    return dataclasses.replace(reference, statistics=statistics, images=None)
