"""Configurations side by side: the same seeds, chunks taking turns, as rows of speed, cost, quality and law."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_fidelity.metric_fid import fid_features_to_statistics
from tqdm import tqdm

from cspd.comparison.runs import Chunk, run_rounds, settings_of
from cspd.comparison.study import Configuration, baseline
from cspd.evaluation import metrics
from cspd.evaluation.reference import Reference
from cspd.evaluation.two_sample import energy_test
from cspd.machine import spread
from cspd.methods import guarantee_of
from cspd.sequence import Request
from cspd.version import __version__

SCHEMA = "cspd.compare/4"
LEAST_PAIRS = 8  # images that the two-sample test wants
PARTS = 25  # of a row's images, for the intervals, at most
LEAST_INTERVAL, LEAST_TURNS = 20, 4  # images that an interval wants, and turns of the classes to keep them together
QUICK_FEATURES = 256  # a FID of Inception's 2,048 takes many seconds: no interval of it
NORMAL = 1.96  # standard errors in half of a 95 % interval
LIBRARIES = ("torch", "torch-fidelity", "numpy")


def compare(
    rows: Sequence[Configuration],
    labels: Sequence[int],
    num: int,
    out: Path,
    *,
    seed: int = 0,
    space: str | None = None,
    weights: Path | None = None,
    reference: Reference | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> tuple[dict, list[np.ndarray]]:
    """Generates `num` images by each configuration and judges them; the report and the images.

    They take turns, so that a machine that slows down slows all. What is made is kept in `out` and not
    made again: a run that was cut off goes on, and one that is finished can be given more images, or other references.

    Args:
        rows: see `cspd.comparison.study.configurations`; speed is measured against the first.
        labels: classes, which take turns. seed: of the first image, where a row has none of its own; the next has the
            next.
        space, weights, reference: what images are judged in, see `cspd.evaluation.metrics`; space None leaves quality
            and law out.
        overwrite: replace another run that is in `out`.

    Returns:
        A JSON-able report, see `cspd.comparison.tables`, and the images of each row, uint8 [num, H, W, 3].

    Raises:
        ValueError: a bad request, an engine without autoencoder, or `out` holds another run and `overwrite` is off.
    """
    plans, chunks = run_rounds(rows, labels, num, seed, out, overwrite=overwrite, progress=progress)
    images = [np.concatenate([chunk.images for chunk in made]) for made in chunks]
    report = {"schema": SCHEMA, "images": num, "first_seed": seed, "labels": list(labels)}
    report |= {"max_batch": rows[0].engine.num_slots, "rounds": len(chunks[0]), "machine": rows[0].engine.describe()}
    report |= {"versions": _versions(), "baseline": rows[0].name, "space": space}
    report |= {"reference": reference and {"name": reference.name, "fingerprint": reference.fingerprint}}
    report["rows"] = [speed_of(row, plan, made, chunks[0]) for row, plan, made in zip(rows, plans, chunks)]
    for of_row, row, plan in zip(report["rows"], rows, plans):
        of_row["settings"] = settings_of(plan) | ({} if row.seed is None else {"seed": row.seed})
    _judge(report, rows, images, labels, space, weights, reference, progress)
    return report, images


def speed_of(row: Configuration, plan: Request, chunks: list[Chunk], base: list[Chunk]) -> dict:
    """Speed, round by round and with its spread, and cost; rounds of fewer images than the first do not count."""
    full = [(chunk, other) for chunk, other in zip(chunks, base) if len(chunk.images) == len(chunks[0].images)]
    costs = [cost for chunk in chunks for cost in chunk.costs]

    def mean(name: str) -> float:
        return sum(cost[name] for cost in costs) / len(costs)

    judged = sum(cost["judged"] for cost in costs)
    bounds = torch.tensor([cost["bound"] for cost in costs], dtype=torch.float64)
    bounded = guarantee_of(plan) == "bounded"
    bound = min(1.0, bounds.mean().item()) if bounded else None
    return {
        "name": row.name,
        "method": plan.method,
        "guarantee": guarantee_of(plan),
        "seconds": [chunk.seconds for chunk, _ in full],
        "images_per_second": spread([len(chunk.images) / chunk.seconds for chunk, _ in full]),
        "speed_up": spread([other.seconds / chunk.seconds for chunk, other in full]),
        "window": plan.window,
        "head_calls_per_token": mean("head_calls_per_token") or None,
        "backbone_calls": mean("backbone_calls"),
        "draft_backbone_calls": mean("draft_backbone_calls") or None,
        "alpha": sum(cost["accepted"] for cost in costs) / judged if judged else None,
        "step_compression": mean("step_compression") if costs[0]["step_compression"] is not None else None,
        "bound": bound,
        "bound_ci95": _half(bounds.std() / len(bounds) ** 0.5) if bounded and bound < 1 < len(bounds) else None,
        "peak_bytes": max(chunk.peak_bytes for chunk in chunks),
    }


def _judge(
    report: dict,
    rows: Sequence[Configuration],
    images: Sequence[np.ndarray],
    classes: Sequence[int],
    space: str | None,
    weights: Path | None,
    reference: Reference | None,
    progress: bool,
) -> None:
    """Adds quality and law to the report's rows, and to `missing` why some of it is not there."""
    missing = report["missing"] = {}
    names = ("fid", "inception_score", "accuracy")
    for row in report["rows"]:
        row |= dict.fromkeys((*names, *(f"{name}_ci95" for name in names), "p_value", "law_baseline"))
    if space is None:
        reason = "these models have no judge of their own: give Inception's file, --weights"
        missing |= dict.fromkeys((*names, "p_value"), reason)
        return
    judge = {"space": space, "weights": weights, "device": rows[0].engine.device}
    reference = reference and _with_statistics(reference, judge)
    turn, labels = len(classes), [classes[i % len(classes)] for i in range(report["images"])]
    features = []
    pairs = list(zip(report["rows"], images))
    for row, made in tqdm(pairs, desc="judging", unit="row", disable=not progress):
        made = metrics.ImageList(torch.from_numpy(made).permute(0, 3, 1, 2))
        given = metrics.extract(made, **judge)
        features.append(given[0])
        measured = metrics.measure(made, reference=reference, labels=labels, extracted=given, **judge)
        row |= {name: measured[name] for name in names}
        missing |= {name: reason for name, reason in measured["missing"].items() if name in names}
        if row["accuracy"] is not None:
            share = (row["accuracy"] * len(labels) + 1) / (len(labels) + 2)  # 8 of 8 is no certainty
            row["accuracy_ci95"] = _half((share * (1 - share) / len(labels)) ** 0.5)
        row |= _intervals(*given, [name for name in names[:2] if row[name] is not None], reference, turn)
    if report["images"] < LEAST_PAIRS:
        missing["p_value"] = f"a test wants {LEAST_PAIRS} images or more"
        return
    for i, row in enumerate(rows):
        base = rows.index(baseline(row, rows))
        if base != i:
            p_value = energy_test(features[base], features[i])
            report["rows"][i] |= {"p_value": p_value, "law_baseline": rows[base].name}


def _with_statistics(reference: Reference, judge: dict) -> Reference:
    """The reference by statistics alone, taken once for all rows: what else needs its images is no column."""
    taken = reference.statistics
    if taken is None and len(reference.images) >= metrics.LEAST["fid"]:
        taken = fid_features_to_statistics(metrics.features(reference.images, **judge))
        taken = {name: value.astype(np.float64) for name, value in taken.items()}
    return dataclasses.replace(reference, statistics=taken, images=None) if taken else reference


def _intervals(features: Tensor, logits: Tensor, names: list[str], reference: Reference, turn: int) -> dict[str, float]:
    """Halves of 95 % intervals of FID and Inception score by the jackknife: how they vary when a part is left out.

    Parts are of whole turns of `turn` classes: that those are balanced takes much of the variation away. The bootstrap
    would not do: it draws classes unevenly, and images that come twice stand for fewer, which worsens both by itself.
    """
    if len(features) < LEAST_INTERVAL:
        return {}
    if "fid" in names and (reference.statistics is None or features.shape[1] > QUICK_FEATURES):
        names = [name for name in names if name != "fid"]
    turn = turn if len(features) >= LEAST_TURNS * turn else 1
    part = torch.arange(len(features)) // turn % PARTS
    num = int(part.max()) + 1
    without = [metrics.of_features(features[part != i], logits[part != i], names, reference) for i in range(num)]
    return {f"{name}_ci95": _half(((num - 1) * np.var([each[name] for each in without])) ** 0.5) for name in names}


def _half(error: float | Tensor) -> float:
    return NORMAL * float(error)


def _versions() -> dict:
    versions = {"cspd": __version__}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # in a source tree
            continue
    return versions
