"""Compares configurations on the same seeds, and searches for the fastest within limits."""

from __future__ import annotations

import dataclasses
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

# What CLIP says of a comparison's images of texts: how well each row's show them, and how that differs from plain
# sampling's of the same texts and seeds.

VALUES = ("clip_score", "clip_difference")


def judge_by_clip(
    report: dict,
    images: Sequence[np.ndarray],
    paired: Sequence[int | None],
    folder: Path | None,
    device: torch.device,
    progress: bool,
) -> None:
    """Adds each row's CLIP score, and its mean difference from plain sampling, to a report; with 95 % intervals.

    The difference has the smaller interval: what a text makes hard or easy is in both of a pair.

    Args:
        images: of each row, uint8 [N, H, W, 3]. paired: of each row, that of plain sampling by the same seeds, if any.
        folder: of the model; None leaves its values out.
    """
    for entry in report["rows"]:
        entry |= dict.fromkeys([*VALUES, *(f"{name}_ci95" for name in VALUES)])
    if not are_texts(report["labels"]):
        return
    if folder is None:
        report["missing"]["clip_score"] = NO_MODEL
        return
    model = Clip(folder, device)
    report["clip"] = model.about
    texts = in_turn(report["labels"], report["images"])
    scores: list[Tensor] = []
    rows = list(zip(report["rows"], images))
    for entry, made in tqdm(rows, desc="by CLIP", unit=" row", disable=not progress):
        pictures = torch.from_numpy(made).permute(0, 3, 1, 2)
        scores.append(model.scores(ImageList(pictures), texts))
        entry |= _with_interval("clip_score", scores[-1])
    for entry, own, base in zip(report["rows"], scores, paired):
        if base is not None:
            entry |= _with_interval("clip_difference", own - scores[base])


def _with_interval(name: str, values: Tensor) -> dict:
    """The mean of images' values, under a name in `VALUES`, and its interval; None of one image."""
    mean, error = mean_and_error(values)
    return {name: mean, f"{name}_ci95": None if error is None else around(name, mean, error)}


# How sure the qualities of few images are: the jackknife of FID and Inception score.

PARTS = 25  # that the jackknife splits a row's images into, at most
LEAST_INTERVAL = 20  # images that the jackknife needs
LEAST_CYCLES = 4  # cycles through the classes that make class-balanced parts possible
QUICK_FEATURES = 256  # a FID of Inception's 2,048 features takes many seconds: it gets no interval


def jackknife(
    features: Tensor, logits: Tensor, names: list[str], reference: Reference | None, num_classes: int
) -> dict[str, np.ndarray]:
    """FID and Inception score, those in `names`, with each part of the images left out; none where that is no use.

    The jackknife splits the images into at most 25 class-balanced parts and leaves out one at a time. We do not use
    the bootstrap: it draws classes unevenly, and an image that is drawn twice stands for fewer images. Both worsen the
    numbers by themselves.
    """
    num = len(features)
    if num < LEAST_INTERVAL:
        return {}
    if "fid" in names and (reference.statistics is None or features.shape[1] > QUICK_FEATURES):
        names = [name for name in names if name != "fid"]

    # image i has class i modulo num_classes: whole cycles keep a part balanced
    block = num_classes if num >= LEAST_CYCLES * num_classes else 1
    part = torch.arange(num) // block % PARTS
    values = []
    for left_out in range(int(part.max()) + 1):
        kept = part != left_out
        values.append(metrics.of_features(features[kept], logits[kept], names, reference))
    return {name: np.array([value[name] for value in values]) for name in names}


def standard_error(left_out: np.ndarray) -> float:
    """The jackknife's, of a value that was measured with each part left out."""
    return float(((len(left_out) - 1) * np.var(left_out)) ** 0.5)


def intervals(measured: Mapping, left_out: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    """95 % intervals of what was measured, by what `jackknife` gave of it."""
    return {f"{name}_ci95": around(name, measured[name], standard_error(values)) for name, values in left_out.items()}


# Configurations side by side: the same seeds, taking turns, as rows of speed, cost, quality and p-values.

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
    made again (`cspd.comparison.study`): a run that was cut off goes on, and a finished one can be given more images
    or another reference.

    Args:
        rows: see `cspd.comparison.study.configurations`; speed is measured against the first.
        subjects: classes by number, or texts; image i has the i-th, over and over.
        store: of the folder, see `cspd.comparison.study.comparison_store`; it stays claimed until the store's `with`
            ends.
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
        for model in models_of(row.files, row.engine.runners[family]):
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


# Which of several configurations are worth more images: Pareto fronts, and successive halving by them.
#
# Successive halving: Jamieson & Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization,
# arXiv 1502.07943. All are tried on few images, the better part of them on more, and so on.

FEWEST = LEAST_INTERVAL  # images of the first rung
GROWTH = 3  # a rung has so many times the images of the one before, and one in so many of its candidates
LEAST_KEPT = 4
WORTH = 1.05  # times as fast as plain sampling: below that, it may be the machine
REACH = 2.0  # standard errors that a value may be better than it was measured


@dataclass(frozen=True)
class Trial:
    """A candidate as it was measured.

    Attributes:
        speed: images per second. excess: how much worse it is than it may be; 0 or less is good enough.
        error: standard error of that.
    """

    speed: float
    excess: float
    error: float = 0.0


def rungs(num: int) -> list[int]:
    """How many images each rung has, rising to `num`: 20, 60, 180. More images later go on from the same rungs."""
    numbers, rung = [], FEWEST
    while 2 * rung <= num:
        numbers.append(rung)
        rung *= GROWTH
    return [*numbers, num]


def kept(number: int) -> int:
    """How many candidates of a rung go on to the next."""
    return min(number, max(LEAST_KEPT, -(-number // GROWTH)))


def planned(number: int, rung_images: Sequence[int], always: int, before: int = 0) -> int:
    """Images that these rungs make, of so many candidates and of `always` configurations that stay to the end.

    `before`: those that each of them has already.
    """
    images = 0
    for rung in rung_images:
        images += (number + always) * (rung - before)
        number, before = kept(number), rung
    return images


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether one is nowhere worse than the other, and somewhere better; less is better."""
    pairs = list(zip(one, other))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def layers(points: Sequence[Sequence[float]]) -> list[int]:
    """The Pareto front that each point is on: 0 the first, 1 the front of what remains without that, and so on."""
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

    Before all others come those that may be good enough, by `REACH` standard errors. Among equals in that, the front
    of speed and excess comes first, then the next front; within a front, the faster. An excess counts as a standard
    error less than it was measured, so that chance at few images ends no candidate early.
    """
    fronts = layers([(-trial.speed, trial.excess - trial.error) for trial in trials])

    def rank(i: int) -> tuple:
        trial = trials[i]
        return trial.excess - REACH * trial.error > 0, fronts[i], -trial.speed

    return sorted(sorted(range(len(trials)), key=rank)[:number])


def fastest(trials: Sequence[Trial]) -> int | None:
    """The fastest that is good enough as measured, and worth it against the first; None where there is none."""
    good = [i for i in _faster(trials) if trials[i].excess <= 0]
    return max(good, key=lambda i: trials[i].speed, default=None)


def nearest(trials: Sequence[Trial]) -> int | None:
    """The one that is least short of good enough, of those that are worth it against the first if there are any."""
    return min(_faster(trials) or range(1, len(trials)), key=lambda i: trials[i].excess, default=None)


def _faster(trials: Sequence[Trial]) -> list[int]:
    return [i for i, trial in enumerate(trials) if trial.speed > WORTH * trials[0].speed]


# The search of `cspd tune`: successive halving over what a comparison keeps in its folder.

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
        store, seed, space, weights, reference, overwrite, command: as in `compare`.

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
    turns: InterleavedRuns,
    labels: Sequence[int],
    numbers: Sequence[int],
    seed: int,
    limits: Mapping[str, float],
    judge: dict,
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
    turns: InterleavedRuns, chosen: Sequence[int], number: int, labels: Sequence[int], seed: int, judge: dict
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
