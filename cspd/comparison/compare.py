"""Compares configurations on the same seeds, and searches for the fastest within limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_fidelity.metric_fid import fid_features_to_statistics
from tqdm import tqdm

from cspd.comparison.report import WORSE, value_of
from cspd.comparison.study import (
    TIMED,
    TUNE,
    WRITTEN,
    Chunk,
    Configuration,
    InterleavedRuns,
    baselines,
    settings_of,
    taking_turns,
)
from cspd.device import spread
from cspd.evaluation import metrics
from cspd.evaluation.images import ImageList, Subject, are_texts, in_turn
from cspd.evaluation.metrics import (
    LEAST_PAIRS,
    NO_MODEL,
    NORMAL,
    Clip,
    Reference,
    around,
    energy_test,
    half_of,
    mean_and_error,
)
from cspd.method import guarantee_of
from cspd.request import Request
from cspd.runs import LAZY, Store, measured, models_of, what_ran
from cspd.terminal import MOST

# The CLIP scores of a text-to-image comparison: each row's, and its difference from baseline sampling of the same
# prompts and seeds.

VALUES = ("clip_score", "clip_difference")


def add_clip_scores(
    report: dict,
    images: Sequence[np.ndarray],
    paired: Sequence[int | None],
    folder: Path | None,
    device: torch.device,
    progress: bool,
) -> None:
    """Adds each row's CLIP score, and its mean difference from baseline sampling, to a report; with 95 % intervals.

    The difference has the smaller interval: both images of a pair share the difficulty of their prompt.

    Args:
        images: of each row, uint8 [N, H, W, 3]. paired: for each row, the baseline row of the same seeds, or None.
        folder: of the CLIP model; None: no scores.
    """
    for entry in report["rows"]:
        for name in VALUES:
            entry[name] = entry[f"{name}_ci95"] = None
    if not are_texts(report["labels"]):
        return
    if folder is None:
        report["missing"]["clip_score"] = NO_MODEL
        return
    model = Clip(folder, device)
    report["clip"] = model.about
    texts = in_turn(report["labels"], report["images"])
    scores: list[Tensor] = []
    for row_images in tqdm(images, desc="by CLIP", unit=" row", disable=not progress):
        scores.append(model.scores(_image_list(row_images), texts))
    for entry, own, base in zip(report["rows"], scores, paired):
        entry |= _with_interval("clip_score", own)
        if base is not None:
            entry |= _with_interval("clip_difference", own - scores[base])


def _image_list(images: np.ndarray) -> ImageList:
    """A data set of images uint8 [N, H, W, 3]."""
    return ImageList(torch.from_numpy(images).permute(0, 3, 1, 2))


def _with_interval(name: str, values: Tensor) -> dict:
    """The mean of images' values, under a name in `VALUES`, and its interval; None for one image."""
    mean, error = mean_and_error(values)
    return {name: mean, f"{name}_ci95": None if error is None else around(name, mean, error)}


# The uncertainty of FID and Inception score of few images: the jackknife.

PARTS = 25  # parts of a row's images, at most
LEAST_INTERVAL = 20  # images, at least
LEAST_CYCLES = 4  # cycles through the classes, for class-balanced parts
QUICK_FEATURES = 256  # a FID of Inception's 2,048 features takes many seconds: it gets no interval


def jackknife(
    features: Tensor, logits: Tensor, names: list[str], reference: Reference | None, num_classes: int
) -> dict[str, np.ndarray]:
    """The scores in `names` (FID, Inception score) with each part of the images left out, or {} for too few images.

    The jackknife splits the images into at most 25 class-balanced parts and leaves out one at a time. We do not use
    the bootstrap: it samples classes unevenly, and repeats images. Either alone worsens both scores.
    """
    num = len(features)
    if num < LEAST_INTERVAL:
        return {}
    if "fid" in names and (reference.statistics is None or features.shape[1] > QUICK_FEATURES):
        names = [name for name in names if name != "fid"]

    # image i has class i modulo num_classes: a part of whole cycles is balanced
    block = num_classes if num >= LEAST_CYCLES * num_classes else 1
    part = torch.arange(num) // block % PARTS
    values = []
    for left_out in range(int(part.max()) + 1):
        rest = part != left_out
        values.append(metrics.of_features(features[rest], logits[rest], names, reference))
    return {name: np.array([value[name] for value in values]) for name in names}


def standard_error(left_out: np.ndarray) -> float:
    """The jackknife's standard error of a value, measured with each part left out."""
    return float(((len(left_out) - 1) * np.var(left_out)) ** 0.5)


def intervals(measured: Mapping, left_out: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    """95 % intervals of measured values, from the result of `jackknife`."""
    return {f"{name}_ci95": around(name, measured[name], standard_error(values)) for name, values in left_out.items()}


# Configurations side by side, with the same seeds and interleaved, as rows of speed, cost, quality and p-values.

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
    """Generates `num` images with each configuration and evaluates them; returns the report and the images.

    The configurations are interleaved, so that a machine that slows down slows all. Existing images are not generated
    again (`cspd.comparison.study`): an interrupted run resumes, and a finished one can be extended by more images or
    another reference.

    Args:
        rows: see `cspd.comparison.study.configurations`; speed is measured against the first.
        subjects: classes by number, or prompts; image i has the i-th, over and over.
        store: the folder, see `cspd.comparison.study.comparison_store`; it stays claimed until the store's `with` block
            ends.
        seed: of the first image, unless a row has its own; the next image has the next seed.
        space, weights, reference: how images are evaluated, see `cspd.evaluation.metrics`; space None: without quality
            and p-values. clip: the folder of a CLIP model, for images generated from prompts.
        overwrite: replace another run in the folder. command: the command line, which the report names.

    Returns:
        A JSON-able report, see docs/compare.md, and the images of each row, uint8 [num, H, W, 3].

    Raises:
        ValueError: a bad request, an engine without autoencoder, or as `Store.claim`.
    """
    how = {"overwrite": overwrite, "timed": TIMED, "progress": progress}
    with taking_turns(rows, subjects, [num], seed, store, **how) as runs:
        chunks = runs.make(num)
    judge = {"space": space, "weights": weights, "reference": reference, "clip": clip}
    report, images, _ = report_of(rows, runs.plans, chunks, subjects, seed, **judge, progress=progress)
    return report | {"ran": ran_by(rows, command)}, images


def ran_by(rows: Sequence[Configuration], command: str | None) -> dict:
    """As `what_ran`; each model has the names of the "configurations" that use it."""
    models: dict[tuple, dict] = {}
    for row in rows:
        family = row.engine.check(row.request).family
        for model in models_of(row.files, row.engine.runners[family]):
            shared = models.setdefault((model["role"], model["sha256"]), model | {"configurations": []})
            shared["configurations"].append(row.name)
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
    """The report on the chunks of rows, the images of each row, and the result of `jackknife` for each."""
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
        entry = speed_of(row, plan, made, chunks[0])
        entry["settings"] = settings_of(plan)
        if row.seed is not None:
            entry["settings"]["seed"] = row.seed
        report["rows"].append(entry)
    against = [baselines(row, rows, seed) for row in rows]
    paired = [None if same is None else rows.index(same) for same, _ in against]
    for entry, own, base in zip(report["rows"], images, paired):
        entry["pixel_difference"] = None if base is None else _pixel_difference(own, images[base])
    left_out = _add_quality(report, rows, images, against, space, weights, reference, progress)
    add_clip_scores(report, images, paired, clip, rows[0].engine.device, progress)
    return report, images, left_out


def _pixel_difference(images: np.ndarray, others: np.ndarray) -> float:
    """Root mean square difference, in 0..255, of images uint8 [N, H, W, 3]."""
    squares = [np.square(image.astype(np.float32) - other).mean() for image, other in zip(images, others)]
    return float(np.mean(squares) ** 0.5)


def speed_of(row: Configuration, plan: Request, chunks: list[Chunk], base_chunks: list[Chunk]) -> dict:
    """The speed of a row, with its spread over turns of the usual size, and its costs."""
    size = min(row.engine.num_slots, max(len(chunk.images) for chunk in chunks))
    turns = [(own, base) for own, base in zip(chunks, base_chunks) if len(own.images) == size]
    guarantee = guarantee_of(plan)
    costs = [cost for chunk in chunks for cost in chunk.costs]
    is_vq = costs[0]["step_compression"] is not None
    verified = sum(cost["judged"] for cost in costs)
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
        "alpha": accepted / verified if verified else None,
        "step_compression": mean("step_compression") if is_vq else None,
        "bound": bound,
        "bound_ci95": bound_interval,
        **near,
        "audit_ci95": None if audit_error is None else around("audit", near["audit"], audit_error),
        "peak_bytes": max(own.peak_bytes for own, _ in turns),
    }


def _mean_bound(costs: list[dict]) -> tuple[float, list[float] | None]:
    """The mean of the images' bounds, at most 1, and its 95 % interval: None for one image, or a mean of 1."""
    bounds = torch.tensor([cost["bound"] for cost in costs], dtype=torch.float64)
    mean = bounds.mean().item()
    if mean >= 1:
        return 1.0, None
    if len(bounds) == 1:
        return mean, None
    return mean, around("bound", mean, float(bounds.std() / len(bounds) ** 0.5))


def _add_quality(
    report: dict,
    rows: Sequence[Configuration],
    images: Sequence[np.ndarray],
    against: Sequence[tuple[Configuration | None, Configuration | None]],
    space: str | None,
    weights: Path | None,
    reference: Reference | None,
    progress: bool,
) -> list[dict]:
    """Adds quality and p-values to the report's rows, and the reasons for missing ones to `missing`.

    `against`: the baselines that each row is tested against, of the same seeds and of others. Returns the result of
    `jackknife` for each row.
    """
    missing = report["missing"]
    for entry in report["rows"]:
        for name in QUALITIES:
            entry[name] = entry[f"{name}_ci95"] = None
        for p_value, base_name in TESTS:
            entry[p_value] = entry[base_name] = None
    if space is None:
        reason = "these models have no judge of their own: give Inception's file, --weights"
        missing |= dict.fromkeys([*QUALITIES, "p_value"], reason)
        return [{} for _ in rows]
    how = {"space": space, "weights": weights, "device": rows[0].engine.device}
    if reference is not None:
        reference = _with_statistics(reference, how)
    subjects = report["labels"]
    labels = None if are_texts(subjects) else in_turn(subjects, report["images"])

    features, left_out = [], []
    pairs = list(zip(report["rows"], images))
    for entry, row_images in tqdm(pairs, desc="judging", unit=" row", disable=not progress):
        data = _image_list(row_images)
        extracted = metrics.extract(data, **how)
        features.append(extracted[0])
        quality = metrics.measure(data, reference=reference, labels=labels, extracted=extracted, **how)
        missing |= {name: reason for name, reason in quality["missing"].items() if name in QUALITIES}
        for name in (*QUALITIES, "accuracy_ci95"):
            entry[name] = quality[name]
        names = [name for name in ("fid", "inception_score") if entry[name] is not None]
        left_out.append(jackknife(*extracted, names, reference, len(subjects)))
        entry |= intervals(entry, left_out[-1])

    if report["images"] < LEAST_PAIRS:
        missing["p_value"] = f"a test wants {LEAST_PAIRS} images or more"
        return left_out
    for entry, bases, own in zip(report["rows"], against, features):
        for (p_value, base_name), base in zip(TESTS, bases):
            if base is not None:
                entry[p_value] = energy_test(features[rows.index(base)], own)
                entry[base_name] = base.name
    return left_out


def _with_statistics(reference: Reference, how: dict) -> Reference:
    """The reference with statistics only, computed once for all rows: no column needs its images."""
    statistics = reference.statistics
    if statistics is None and len(reference.images) >= metrics.LEAST["fid"]:
        computed = fid_features_to_statistics(metrics.features(reference.images, **how))
        statistics = {name: value.astype(np.float64) for name, value in computed.items()}
    if statistics is None:
        return reference
    return replace(reference, statistics=statistics, images=None)


# The configurations that are worth more images: Pareto fronts, and successive halving by them.
#
# Successive halving: Jamieson & Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization,
# arXiv 1502.07943. All are tried on few images, the better part of them on more, and so on.

FEWEST = LEAST_INTERVAL  # images of the first rung
GROWTH = 3  # each rung has three times the images of the one before, and a third of its candidates
LEAST_KEPT = 4
WORTH = 1.05  # times as fast as baseline sampling: a smaller difference may be the machine's
REACH = 2.0  # standard errors by which a value may be better than measured


@dataclass(frozen=True)
class Trial:
    """The measurements of a candidate.

    Attributes:
        speed: images per second. excess: how much worse it is than the limit; 0 or less is good enough.
        error: standard error of the excess.
    """

    speed: float
    excess: float
    error: float = 0.0


def rungs(num: int) -> list[int]:
    """The images of each rung, rising to `num`: 20, 60, 180. A run with more images has the same first rungs."""
    numbers, rung = [], FEWEST
    while 2 * rung <= num:
        numbers.append(rung)
        rung *= GROWTH
    return [*numbers, num]


def kept(number: int) -> int:
    """The number of candidates that a rung of `number` passes to the next."""
    return min(number, max(LEAST_KEPT, -(-number // GROWTH)))


def planned(number: int, rung_images: Sequence[int], always: int, before: int = 0) -> int:
    """The images that these rungs generate, with `number` candidates and `always` configurations that stay.

    `before`: the images that each has already.
    """
    images = 0
    for rung in rung_images:
        images += (number + always) * (rung - before)
        number, before = kept(number), rung
    return images


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether one is nowhere larger than the other, and somewhere smaller."""
    return all(a <= b for a, b in zip(one, other)) and any(a < b for a, b in zip(one, other))


def layers(points: Sequence[Sequence[float]]) -> list[int]:
    """The Pareto front of each point: 0 the first, 1 the front of the remaining points, and so on; less is better."""
    layer = [-1] * len(points)
    level = 0
    while -1 in layer:
        left = [i for i in range(len(points)) if layer[i] == -1]
        for i in left:
            if not any(dominates(points[other], points[i]) for other in left):
                layer[i] = level
        level += 1
    return layer


def survivors(trials: Sequence[Trial], number: int) -> list[int]:
    """The `number` candidates that deserve more images, in their order.

    Candidates that may be good enough, within `REACH` standard errors, come first. Among equals, the front of speed and
    excess comes first, then the next front; within a front, the faster. The fronts use an excess one standard error
    less than measured, so that chance at few images ends no candidate early.
    """
    fronts = layers([(-trial.speed, trial.excess - trial.error) for trial in trials])

    def rank(i: int) -> tuple:
        trial = trials[i]
        is_too_bad = trial.excess - REACH * trial.error > 0
        return is_too_bad, fronts[i], -trial.speed

    best = sorted(range(len(trials)), key=rank)[:number]
    return sorted(best)


def fastest(trials: Sequence[Trial]) -> int | None:
    """The fastest candidate that is good enough and faster than the first, or None."""
    good = [i for i in _faster(trials) if trials[i].excess <= 0]
    return max(good, key=lambda i: trials[i].speed, default=None)


def nearest(trials: Sequence[Trial]) -> int | None:
    """The candidate with the smallest excess, among those that are faster than the first if there are any."""
    return min(_faster(trials) or range(1, len(trials)), key=lambda i: trials[i].excess, default=None)


def _faster(trials: Sequence[Trial]) -> list[int]:
    return [i for i, trial in enumerate(trials) if trial.speed > WORTH * trials[0].speed]


# The search of `cspd tune`: successive halving over a comparison's folder.

OTHER_SEEDS = MOST  # from the first row's seeds to the second's: no run has more images
ALWAYS = 2  # rows in every rung: baseline sampling, and the same with other seeds
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
    """Searches the fastest candidate within `limits`, by successive halving; returns the report and its rows' images.

    All generate few images, the better part of them more, and so on to `num`. No image is generated twice: a rung
    includes the images of the one before, and an interrupted search resumes. Every rung has baseline sampling, and
    once more with other seeds, which shows the effect of chance alone.

    Args:
        plain: baseline sampling with the user's own settings, which the limits refer to.
        limits: how much worse than baseline sampling a candidate may be. "fid", "inception_score", "accuracy": a
            fraction of its value. "divergence": nats per token between the chains, 0 for an exact method.
        store, seed, space, weights, reference, overwrite, command: as in `compare`.

    Returns:
        The report of a comparison of the last rung's rows. Each has "losses", how much worse than baseline sampling it
        is with the standard error, by the names of limits, and whether it is on the Pareto "front" of speed, FID and
        difference. "tune" has the limits, the measurements of each rung, failed rows, and the name of the "chosen" row:
        None if no row is both faster than baseline sampling and within the limits. "nearest" is the name of the row,
        faster if there is one, that exceeds the limits least.

    Raises:
        ValueError: baseline sampling gives no images, or as `compare`.
    """
    other = seed + OTHER_SEEDS
    rows = [plain, replace(plain, name=f"{plain.name}:seed={other}", seed=other), *candidates]
    how = {"space": space, "weights": weights, "reference": reference}
    folder = {"overwrite": overwrite, "written": [*WRITTEN, TUNE], "may_fail": True, "progress": progress}
    with taking_turns(rows, labels, rungs(num), seed, store, **folder) as runs:
        history, report, images = _search(runs, labels, rungs(num), seed, limits, how)
        failed = {rows[r].name: reason for r, reason in runs.failed.items()}

    last = {row["name"] for row in report["rows"]}
    report["ran"] = ran_by([row for row in rows if row.name in last], command)
    own = [row for row in report["rows"] if row is not report["rows"][1]]  # rows of the same seeds
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
    runs: InterleavedRuns,
    labels: Sequence[int],
    numbers: Sequence[int],
    seed: int,
    limits: Mapping[str, float],
    how: dict,
) -> tuple[list[dict], dict, list[np.ndarray]]:
    """The measurements of every rung, and the report of the last one with the images of its rows."""
    # a window of 0 is baseline sampling
    going = [r for r in range(ALWAYS, len(runs.rows)) if runs.plans[r].window != 0]
    history: list[dict] = []
    before = 0
    for number in numbers:
        rest = [each for each in numbers if each >= number]
        runs.bar.total = runs.bar.n + planned(len(going), rest, ALWAYS, before)
        report, images = _rung(runs, [*range(ALWAYS), *going], number, labels, seed, how)
        going = [r for r in going if r not in runs.failed]
        trials = [_trial(row, limits) for row in report["rows"][ALWAYS:]]
        if number != numbers[-1]:
            going = [going[i] for i in survivors(trials, kept(len(trials)))]
        recorded = [{key: row.get(key) for key in RECORDED} for row in report["rows"]]
        history.append({"images": number, "rows": recorded, "kept": [runs.rows[r].name for r in going]})
        before = number
    return history, report, images


def _rung(
    runs: InterleavedRuns, chosen: Sequence[int], number: int, labels: Sequence[int], seed: int, how: dict
) -> tuple[dict, list[np.ndarray]]:
    """The report on `number` images of each chosen row that does not fail, with their losses."""
    chunks = runs.make(number, chosen)
    for r in range(ALWAYS):
        if r in runs.failed:
            raise ValueError(f"{runs.rows[r].name}: {runs.failed[r]}")
    runs.bar.set_postfix_str(f"judging {number} images of each")
    alive = [r for r in chosen if r not in runs.failed]
    rows, plans = [runs.rows[r] for r in alive], [runs.plans[r] for r in alive]
    report, images, left_out = report_of(rows, plans, chunks, labels, seed, **how, progress=False)
    _add_losses(report["rows"], left_out)
    return report, images


def _add_losses(rows: list[dict], left_out: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Adds "losses" to each row, see `tune`; None for unknown ones.

    Their standard errors are the jackknife's of the ratio to baseline sampling: the same parts are left out of both,
    whose images have the same seeds. Without a jackknife, the error is the loss of baseline sampling with other seeds.
    """
    for row, own in zip(rows, left_out):
        row["losses"] = {name: _loss(name, row, rows[0], own, left_out[0]) for name in WORSE}
        divergence = 0.0 if row["guarantee"] == "exact" else row.get("divergence")
        row["losses"]["divergence"] = None if divergence is None else {"loss": divergence, "error": 0.0}
    by_chance = rows[1]["losses"]
    for row in rows:
        for name, loss in row["losses"].items():
            if loss is not None and loss["error"] is None:
                loss["error"] = abs(by_chance[name]["loss"]) if by_chance[name] else 0.0


def _loss(name: str, row: dict, plain: dict, own: Mapping, of_plain: Mapping) -> dict | None:
    if row[name] is None or not plain[name]:
        return None
    if row is plain:
        return {"loss": 0.0, "error": 0.0}
    loss = WORSE[name] * (row[name] / plain[name] - 1)
    both = [row[f"{name}_ci95"], plain[f"{name}_ci95"]]
    error = None
    if name in own and name in of_plain:
        error = standard_error(own[name] / of_plain[name])
    elif None not in both:
        error = math.hypot(*map(half_of, both)) / NORMAL / plain[name]
    return {"loss": loss, "error": error}


def _trial(row: dict, limits: Mapping[str, float]) -> Trial:
    """The trial of a row, by the limit that it exceeds most."""
    beyond = []
    for name, limit in limits.items():
        loss = row["losses"][name]
        beyond.append((math.inf, 0.0) if loss is None else (loss["loss"] - limit, loss["error"]))
    return Trial(value_of(row, "images_per_second"), *max(beyond))


def _point(row: dict) -> tuple[float, float, float]:
    """The coordinates of a row for the Pareto front; less is better."""
    difference = 0.0 if row["guarantee"] == "exact" else row.get("difference")
    return (
        -value_of(row, "images_per_second"),
        math.inf if row["fid"] is None else row["fid"],
        math.inf if difference is None else difference,
    )
