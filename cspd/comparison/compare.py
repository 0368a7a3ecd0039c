"""Compares configurations on the same seeds, and searches for the fastest within limits."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cspd.comparison.report import NAMES, WORSE, half_interval, value_of
from cspd.comparison.study import (
    TIMED,
    TUNE,
    WRITTEN,
    Chunk,
    Comparison,
    Configuration,
    InterleavedRuns,
    baselines,
    own_batch,
    settings_of,
    speed_baseline,
    summed,
    taking_turns,
)
from cspd.device import spread
from cspd.engine import Engine
from cspd.evaluation import metrics
from cspd.evaluation.images import ImageList, Subject, are_texts, cycle_of, in_turn
from cspd.evaluation.metrics import NO_MODEL, Clip, Evaluation, Extracted, mean_and_error
from cspd.evaluation.scores import (
    LEAST_INTERVAL,
    LEAST_PAIRS,
    Score,
    around,
    change,
    energy_test,
    holm,
    standard_error,
    statistics_of,
)
from cspd.method import guarantee_of, method_of
from cspd.origin import models_of, what_ran
from cspd.request import Request
from cspd.runs import Store
from cspd.summary import LAZY, measured
from cspd.terminal import MOST, progress_bar

NO_EVALUATION = Evaluation()


# The CLIP scores of a text-to-image comparison: each row's, and its difference from baseline sampling of the same
# prompts and seeds.


def add_clip_scores(
    report: dict,
    images: Sequence[np.ndarray],
    paired: Sequence[int | None],
    folder: Path | None,
    device: torch.device,
    progress: bool,
) -> None:
    """Adds each row's CLIP score, and its mean difference from baseline sampling, to a report; with 95 % intervals.

    Args:
        images: of each row, uint8 [N, H, W, 3].
        paired: for each row, the baseline row of the same seeds, or None.
        folder: of the CLIP model; None: no scores.
    """
    if not are_texts(report["labels"]):
        return
    if folder is None:
        report["missing"]["clip_score"] = NO_MODEL
        return
    model = Clip(folder, device)
    report["clip"] = model.about
    prompts: list[Any] = in_turn(report["labels"], report["images"])
    scores: list[Tensor] = []
    for row_images in progress_bar(images, desc="by CLIP", unit=" row", disable=not progress):
        scores.append(model.scores(_image_list(row_images), prompts))
    for entry, own, base in zip(report["rows"], scores, paired):
        entry |= _mean_with_interval("clip_score", own)
        if base is not None:
            # both images of a pair share the difficulty of their prompt: the difference has a smaller interval
            difference = own - scores[base]
            entry |= _mean_with_interval("clip_difference", difference)


def _image_list(images: np.ndarray) -> ImageList:
    """A data set of images uint8 [N, H, W, 3]."""
    return ImageList(torch.from_numpy(images).permute(0, 3, 1, 2))


def _mean_with_interval(name: str, values: Tensor) -> dict:
    """The mean of images' values, and its 95 % interval: None for one image."""
    mean, error = mean_and_error(values)
    interval = None if error is None else around(name, mean, error)
    return {name: mean, f"{name}_ci95": interval}


# Configurations side by side, with the same seeds and interleaved, as rows of speed, cost, quality and p-values.

SCHEMA = "cspd.compare/8"
TESTS = (("p_value", "paired_baseline"), ("p_unpaired", "unpaired_baseline"))  # against the same seeds, and others
QUALITIES = ("fid", "inception_score", "accuracy")
CLIP_SCORES = ("clip_score", "clip_difference")
INTERVALS = [f"{name}_ci95" for name in (*QUALITIES, *CLIP_SCORES)]
SURE = 0.05  # a corrected p-value below it shows a difference
OF_QUALITIES = [f"{name}_{what}" for name in QUALITIES for what in ("resolution", "change", "change_holm")]
HOLM = [f"{p_value}_holm" for p_value, _ in TESTS]
MEASURED_LATER = [  # None until they are known
    *QUALITIES,
    *CLIP_SCORES,
    *INTERVALS,
    *OF_QUALITIES,
    *itertools.chain(*TESTS),
    *HOLM,
    "verdict",
]


def compare(
    rows: Sequence[Configuration],
    subjects: Sequence[Subject],
    num: int,
    store: Store,
    evaluation: Evaluation = NO_EVALUATION,
    *,
    seed: int = 0,
    repeats: int = 1,
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
        subjects: class indices or prompts, cycled: image i has subjects[i % len(subjects)].
        store: the folder, see `cspd.comparison.study.comparison_store`; it stays claimed until the store's `with` block
            ends.
        evaluation: how the images are evaluated, on the device of the first row's engine. Without a space there are
            neither quality nor p-values.
        seed: of the first image, unless a row has its own; the next image has the next seed.
        repeats: generates so many times `num` images, with other seeds each time. The report is on all of them, and has
            the means and standard deviations over the repeats.
        overwrite: replace another run in the folder.
        command: the command line, which the report names.

    Returns:
        A JSON-able report, see docs/compare.md, and the images of each row, uint8 [num * repeats, H, W, 3].

    Raises:
        ValueError: a request is invalid, an engine lacks an autoencoder, or as `Store.claim`.
    """
    ends = [num * (i + 1) for i in range(repeats)]
    comparison = Comparison(rows, subjects, seed)
    with taking_turns(comparison, ends, store, overwrite=overwrite, timed=TIMED, progress=progress) as runs:
        chunks = runs.make(num * repeats)
    report, images, _ = report_of(comparison, runs.plans, chunks, evaluation, progress, repeats)
    report["ran"] = ran_by(rows, command)
    return report, images


def ran_by(rows: Sequence[Configuration], command: str | None) -> dict:
    """As `what_ran`; each model has the names of the "configurations" that use it."""
    models: dict[tuple, dict] = {}
    for row in rows:
        family: Any = row.engine.check(row.request).family
        runner = row.engine.runners[family]
        for model in models_of(row.files, runner):
            key = model["role"], model["sha256"]
            if key not in models:
                models[key] = model | {"configurations": []}
            models[key]["configurations"].append(row.name)
    machine = rows[0].engine.describe()
    return what_ran(machine, list(models.values()), command)


def report_of(
    comparison: Comparison,
    plans: Sequence[Request],
    chunks: Sequence[list[Chunk]],
    evaluation: Evaluation,
    progress: bool = True,
    repeats: int = 1,
) -> tuple[dict, list[np.ndarray], list[dict[str, Score]]]:
    """The report on the chunks of rows, the images of each row, and the scores of each, by name."""
    rows, subjects, seed = comparison
    images = []
    for made in chunks:
        images.append(np.concatenate([chunk.images for chunk in made]))
    reference = evaluation.reference
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "images": len(images[0]),
        "first_seed": seed,
        "labels": list(subjects),
        "max_batch": rows[0].engine.num_slots,
        "turns": len(chunks[0]),
        "repeats": repeats,
        "baseline": rows[0].name,
        "space": evaluation.space,
        "reference": reference and {"name": reference.name, "fingerprint": reference.fingerprint},
        "clip": None,
        "missing": {},
        "rows": [],
    }
    against = [baselines(row, rows, seed) for row in rows]
    paired = []
    for same_seeds, _ in against:
        paired.append(None if same_seeds is None else rows.index(same_seeds))
    for row, plan, made, own, base in zip(rows, plans, chunks, images, paired):
        speed_base = rows.index(speed_baseline(row, rows))
        entry = speed_of(row, plan, made, chunks[speed_base], rows[speed_base])
        entry |= dict.fromkeys(MEASURED_LATER)
        entry["paper"] = dict(row.paper) or None
        entry["repeats"] = None
        if repeats > 1:
            entry["repeats"] = {"alpha": _over_repeats(_alphas(made, repeats))}
        entry["settings"] = settings_of(plan) | own_batch(row, rows)
        if row.seed is not None:
            entry["settings"]["seed"] = row.seed
        entry["pixel_difference"] = entry["worst_images"] = None
        if base is not None:
            family: Any = plan.family
            differences = _differences(own, images[base], row.engine.runners[family].seq_len)
            entry["pixel_difference"] = float(np.square(differences).mean() ** 0.5)
            if entry["guarantee"] != "exact":
                entry["worst_images"] = _worst(differences)
                entry["paired_baseline"] = rows[base].name
        report["rows"].append(entry)
    _add_length_tests(report["rows"], rows, chunks, seed)
    scores = _add_quality(report, rows, images, against, evaluation, progress)
    add_clip_scores(report, images, paired, evaluation.clip, rows[0].engine.device, progress)
    return report, images, scores


def _add_length_tests(
    entries: Sequence[dict], rows: Sequence[Configuration], chunks: Sequence[list[Chunk]], seed: int
) -> None:
    """Adds to each entry the paired t-tests of its tokens per forward pass against those of the other rows.

    Images of the same seed and class or prompt are a pair (COOL-SD, appendix C.4). {} for MAR, and for one image.
    """
    lengths = []
    for made in chunks:
        values = _lengths([cost for chunk in made for cost in chunk.costs])
        lengths.append(None if len(values) < 2 else Score(float(np.mean(values)), values))
    for entry, row, own in zip(entries, rows, lengths):
        tests = {}
        for other, base in zip(rows, lengths):
            is_paired = other is not row and other.first_seed(seed) == row.first_seed(seed)
            if is_paired and own is not None and base is not None:
                test = change(own, base, same_seeds=True)
                tests[other.name] = {"difference": test.difference, "t": test.t, "p_value": test.p_value}
        entry["step_compression_tests"] = tests


def _lengths(costs: Sequence[dict]) -> np.ndarray:
    """The VQ tokens per forward pass of each image, float64; empty for MAR."""
    values = [cost["step_compression"] for cost in costs]
    return np.array([value for value in values if value is not None])


WORST = 8  # images of a row's worst, at most


def _differences(images: np.ndarray, others: np.ndarray, seq_len: int) -> np.ndarray:
    """Root mean square differences, in 0..255, of the pixels of each token: [N, S, S], S x S the grid of the tokens.

    Args:
        images, others: uint8 [N, H, W, 3].
    """
    side = math.isqrt(seq_len)
    if side * side != seq_len or images.shape[1] % side or images.shape[2] % side:
        side = 1  # tokens are not patches of these images
    differences = []
    for image, other in zip(images, others):  # one at a time: all in float32 may be too much memory
        squares = np.square(image.astype(np.float32) - other).mean(-1)
        height, width = squares.shape
        patches = squares.reshape(side, height // side, side, width // side)
        differences.append(patches.mean((1, 3)) ** 0.5)
    return np.stack(differences)


def _worst(differences: np.ndarray) -> list[dict]:
    """The images that differ most from baseline sampling of the same noise, the worst first, each with its worst token.

    `differences`: see `_differences`.
    """
    of_image = np.square(differences).mean((1, 2)) ** 0.5
    found = []
    for i in np.argsort(-of_image, kind="stable")[:WORST]:
        row, column = np.unravel_index(differences[i].argmax(), differences[i].shape)
        found.append(
            {
                "image": int(i),
                "pixel_difference": float(of_image[i]),
                "token": [int(row), int(column)],
                "token_difference": float(differences[i, row, column]),
            }
        )
    return found


def _alphas(chunks: Sequence[Chunk], repeats: int) -> list[float | None]:
    """The acceptance rate of each repeat's images."""
    costs = [cost for chunk in chunks for cost in chunk.costs]
    num = len(costs) // repeats
    return [_alpha(costs[begin : begin + num]) for begin in range(0, num * repeats, num)]


def _alpha(costs: Sequence[dict]) -> float | None:
    """Accepted over verified drafts of images."""
    verified = sum(cost["judged"] for cost in costs)
    return sum(cost["accepted"] for cost in costs) / verified if verified else None


def _over_repeats(values: Sequence[float | None]) -> dict | None:
    """The values of repeats, their mean, and their standard deviation; None unless all repeats have a value."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return {"values": known, "mean": statistics.fmean(known), "sd": statistics.stdev(known)}


def _full_turns(row: Configuration, chunks: list[Chunk]) -> dict[int, Chunk]:
    """The turns of the usual size, by number."""
    # shorter turns, and those that a wider engine ran, say nothing of the speed with this batch size
    size = min(row.engine.num_slots, max(len(chunk.images) for chunk in chunks))
    return {i: chunk for i, chunk in enumerate(chunks) if len(chunk.images) == size}


def speed_of(
    row: Configuration,
    plan: Request,
    chunks: list[Chunk],
    base_chunks: list[Chunk],
    base: Configuration | None = None,
) -> dict:
    """The speed of a row, with its spread over turns of the usual size, and its costs.

    `base`: the row that its speed is measured against, and whose chunks are `base_chunks`; by default the row itself.
    """
    base = base or row
    base_turns = _full_turns(base, base_chunks)
    turns = [(own, base_turns[i]) for i, own in _full_turns(row, chunks).items() if i in base_turns]
    guarantee = guarantee_of(plan)
    costs = []
    for chunk in chunks:
        costs += chunk.costs
    seconds = [own.seconds for own, _ in turns]
    lengths = _lengths(costs)
    bound = {"bound": None, "bound_ci95": None}
    if guarantee == "bounded":
        bound = _mean_bound(costs)
    near: dict[str, Any] = measured(costs)
    measured_intervals = {}
    for name in ("difference", "audit"):
        error = near.pop(f"{name}_error")
        measured_intervals[f"{name}_ci95"] = None if error is None else around(name, near[name], error)

    def mean(name: str) -> float:
        return sum(cost.get(name, 0) for cost in costs) / len(costs)

    return {
        "name": row.name,
        "method": plan.method,
        "guarantee": guarantee,
        "seconds": seconds,
        "latency": statistics.fmean(seconds),
        "latency_sd": _deviation(seconds),
        "speed_baseline": base.name,
        "images_per_second": spread([len(own.images) / own.seconds for own, _ in turns]),
        "speed_up": spread([_images_per_second(own) / _images_per_second(other) for own, other in turns]),
        "first_timestep": plan.first_timestep,
        "window": plan.window,
        "head_calls_per_token": mean("head_calls_per_token") or None,
        "backbone_calls": mean("backbone_calls"),
        LAZY: mean(LAZY) or None,
        "draft_backbone_calls": mean("draft_backbone_calls") or None,
        "alpha": _alpha(costs),
        **_expected(plan, row.engine, _alpha(costs), turns),
        "step_compression": float(lengths.mean()) if len(lengths) else None,
        "step_compression_sd": _deviation(lengths),
        **bound,
        **near,
        **measured_intervals,
        **_acceptance(chunks),
        "peak_bytes": max(own.peak_bytes for own, _ in turns),
    }


def _deviation(values: Sequence[float] | np.ndarray) -> float | None:
    """The standard deviation of a sample; None if it has fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def _images_per_second(chunk: Chunk) -> float:
    return len(chunk.images) / chunk.seconds


def _acceptance(chunks: Sequence[Chunk]) -> dict:
    """Where drafts were accepted, see `RoundStats`, and the candidates per rejected draft; None if there is no such."""
    counts = [chunk.counts for chunk in chunks]
    if None in counts:  # of an older version
        return dict.fromkeys(("by_rank", "committed", "resample_tries"))
    total = summed(counts)  # type: ignore[arg-type]
    costs = [cost for chunk in chunks for cost in chunk.costs]
    rejected = sum(cost["judged"] - cost["accepted"] for cost in costs)
    tries = total["resample_tries"]
    return {
        "by_rank": total["by_rank"] if any(total["by_rank"]) else None,
        "committed": total["committed"] or None,
        "resample_tries": tries / rejected if tries else None,
    }


# The expected speed-up by a draft model: Leviathan et al. (arXiv 2211.17192), Theorem 3.8, which is CSpD's eq. 35.


def expected_speed_up(alpha: float, gamma: int, cost_ratio: float) -> float:
    """The expected speed-up over the target alone, which makes a token per run.

    A round drafts gamma tokens, each accepted with probability alpha independently of the others, and commits those
    before the first rejection and one more. It takes gamma runs of the draft model and one of the target, whatever the
    number of tokens that the target verifies.

    Args:
        cost_ratio: c, the time of a run of the draft model over that of a run of the target.
    """
    expected_tokens = sum(alpha**i for i in range(gamma + 1))  # (1 - alpha^(gamma + 1)) / (1 - alpha)
    return expected_tokens / (gamma * cost_ratio + 1)


def _expected(
    plan: Request, engine: Engine, alpha: float | None, turns: Sequence[tuple[Chunk, Chunk]]
) -> dict[str, float | None]:
    """The speed-up that eq. 35 expects of a draft model, and its cost ratio c, as these turns measured it.

    None without a draft model, and if the baseline makes several tokens per run, which is another comparison.
    """
    nothing = dict.fromkeys(("cost_ratio", "expected_speed_up"))
    if alpha is None or method_of(plan).needs != "draft model":
        return nothing
    costs, base_costs = [], []
    for own, base in turns:
        costs += own.costs
        base_costs += base.costs

    def total(of: Sequence[dict], name: str) -> float:
        return sum(cost.get(name, 0) for cost in of)

    draft_runs, base_runs = total(costs, "draft_backbone_calls"), total(base_costs, "backbone_calls")
    family: Any = plan.family
    is_token_by_token = base_runs == engine.runners[family].seq_len * len(base_costs)
    seconds = total(costs, "draft_seconds"), total(base_costs, "target_seconds")
    if not (is_token_by_token and all(seconds)):  # older files lack the seconds
        return nothing
    cost_ratio = (seconds[0] / draft_runs) / (seconds[1] / base_runs)
    gamma: Any = plan.gamma
    return {"cost_ratio": cost_ratio, "expected_speed_up": expected_speed_up(alpha, gamma, cost_ratio)}


def _mean_bound(costs: list[dict]) -> dict:
    """The mean of the images' bounds, at most 1, and its 95 % interval: None for one image, or a mean of 1."""
    bounds = torch.tensor([cost["bound"] for cost in costs], dtype=torch.float64)
    found = _mean_with_interval("bound", bounds)
    if found["bound"] >= 1:  # no two distributions differ by more
        return {"bound": 1.0, "bound_ci95": None}
    return found


def _add_quality(
    report: dict,
    rows: Sequence[Configuration],
    images: Sequence[np.ndarray],
    against: Sequence[tuple[Configuration | None, Configuration | None]],
    evaluation: Evaluation,
    progress: bool,
) -> list[dict[str, Score]]:
    """Adds quality, p-values and verdicts to the report's rows, and the reasons for missing ones to `missing`.

    `against`: the baselines that each row is tested against, of the same seeds and of others. Returns the scores of
    each row, by name.
    """
    missing = report["missing"]
    if evaluation.space is None:
        reason = "these models have no classifier of their own: give Inception's file, --weights"
        for name in (*QUALITIES, "p_value_holm"):
            missing[name] = reason
        return [{} for _ in rows]

    how = _with_statistics(evaluation._replace(clip=None, device=rows[0].engine.device))
    subjects = report["labels"]
    of_images: list[Any] = in_turn(subjects, report["images"])
    labels = None if are_texts(subjects) else of_images
    # features are extracted once, and serve all scores, intervals and tests
    features, scores = [], []
    pairs = list(zip(report["rows"], images))
    for entry, row_images in progress_bar(pairs, desc="evaluating", unit=" row", disable=not progress):
        data = _image_list(row_images)
        extracted = how.extract(data)
        own, reasons = metrics.scores_of(data, how, labels=labels, cycle=cycle_of(of_images), extracted=extracted)
        values = metrics.told(own, len(row_images))
        for name in QUALITIES:
            entry |= {key: values[key] for key in (name, f"{name}_ci95", f"{name}_resolution")}
            if name in reasons:
                missing[name] = reasons[name]
        scores.append(own)
        features.append(extracted.features)
        if report["repeats"] > 1:
            entry["repeats"] |= _scores_over_repeats(report["repeats"], extracted, row_images, labels, how)

    bases = [[None if base is None else rows.index(base) for base in each] for each in against]
    if report["images"] < LEAST_PAIRS:
        missing["p_value_holm"] = f"a test needs {LEAST_PAIRS} images or more"
    else:
        for entry, own_bases, own_features in zip(report["rows"], bases, features):
            for (p_value, base_name), base in zip(TESTS, own_bases):
                if base is not None:
                    entry[p_value] = energy_test(features[base], own_features)
                    entry[base_name] = rows[base].name
    _add_verdicts(report["rows"], scores, bases)
    return scores


def _scores_over_repeats(
    repeats: int,
    extracted: Extracted,
    images: np.ndarray,
    labels: Sequence[Any] | None,
    how: Evaluation,
) -> dict:
    """`QUALITIES` of each repeat's images, with their mean and standard deviation; None if they have none."""
    values: dict[str, list[float | None]] = {name: [] for name in QUALITIES}
    num = len(images) // repeats
    for begin in range(0, len(images), num):
        own = slice(begin, begin + num)
        scores, _ = metrics.scores_of(
            _image_list(images[own]),
            how,
            labels=None if labels is None else labels[own],
            extracted=extracted.of(own),
        )
        for name, found in values.items():
            found.append(scores[name].value if name in scores else None)
    return {name: _over_repeats(found) for name, found in values.items()}


def _add_verdicts(
    rows: Sequence[dict], scores: Sequence[Mapping[str, Score]], bases: Sequence[Sequence[int | None]]
) -> None:
    """Adds to each row its changes from baseline sampling, p-values corrected for the number of rows, and a verdict.

    The changes are from the baseline of the same seeds, or else of others. The verdict names what differs.
    """
    titles = {"p_value": "features", "p_unpaired": "features"}
    for name in QUALITIES:
        p_values: list[float | None] = []
        for row, own, (same_seeds, other_seeds) in zip(rows, scores, bases):
            base = other_seeds if same_seeds is None else same_seeds
            p_values.append(None)
            if base is None or name not in own or name not in scores[base]:
                continue
            changed = change(own[name], scores[base][name], same_seeds is not None)
            row[f"{name}_change"] = changed.difference
            p_values[-1] = changed.p_value
        for row, corrected in zip(rows, holm(p_values)):
            row[f"{name}_change_holm"] = corrected
        titles[f"{name}_change"] = NAMES[name]
    for p_value, _ in TESTS:
        for row, corrected in zip(rows, holm([row[p_value] for row in rows])):
            row[f"{p_value}_holm"] = corrected
    for row in rows:
        known = {test: row[f"{test}_holm"] for test in titles if row[f"{test}_holm"] is not None}
        if known:
            found = dict.fromkeys(titles[test] for test, p in known.items() if p < SURE)
            row["verdict"] = f"differs: {', '.join(found)}" if found else "no difference shown"


def _with_statistics(how: Evaluation) -> Evaluation:
    """With the statistics of the reference alone, computed once for all rows: no column needs its images."""
    reference = how.reference
    if reference is None:
        return how
    statistics = reference.statistics
    images: Any = reference.images
    if statistics is None and len(images) >= metrics.LEAST["fid"]:
        statistics = statistics_of(how.extract(images).features)
    if statistics is None:
        return how
    return how._replace(reference=replace(reference, statistics=statistics, images=None))


# The configurations that are worth more images: Pareto fronts, and successive halving by them.
#
# Successive halving: Jamieson & Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization,
# arXiv 1502.07943. All are tried on few images, the better part of them on more, and so on.

FEWEST = LEAST_INTERVAL  # images of the first rung
GROWTH = 3  # each rung has three times the images of the one before, and a third of its candidates
LEAST_KEPT = 2
WORTH = 1.05  # times as fast as baseline sampling: a smaller difference may be the machine's
REACH = 2.0  # standard errors by which a value may be better than measured


@dataclass(frozen=True)
class Trial:
    """The measurements of a candidate.

    Attributes:
        speed: images per second.
        excess: how much worse the candidate is than the limit; 0 or less is good enough, if it is sure.
        error: standard error of the excess. reach: from the excess to the upper end of its 95 % interval.
    """

    speed: float
    excess: float
    error: float = 0.0
    reach: float = 0.0


def rungs(num: int) -> list[int]:
    """The images of each rung, rising to `num`: 20, 60, 180. A run with more images has the same first rungs."""
    numbers = []
    rung = FEWEST
    while 2 * rung <= num:
        numbers.append(rung)
        rung *= GROWTH
    return [*numbers, num]


def kept(number: int) -> int:
    """The number of candidates that a rung of `number` passes to the next."""
    third = math.ceil(number / GROWTH)
    return min(number, max(LEAST_KEPT, third))


def planned(number: int, rung_images: Sequence[int], always: int, before: int = 0) -> int:
    """The images that these rungs generate, with `number` candidates and `always` configurations that stay.

    `before`: the images that each has already.
    """
    images = 0
    for rung in rung_images:
        images += (number + always) * (rung - before)
        number = kept(number)
        before = rung
    return images


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether `one` is nowhere larger than the other, and somewhere smaller."""
    pairs = list(zip(one, other))
    is_nowhere_larger = all(a <= b for a, b in pairs)
    is_somewhere_smaller = any(a < b for a, b in pairs)
    return is_nowhere_larger and is_somewhere_smaller


def layers(points: Sequence[Sequence[float]]) -> list[int]:
    """The Pareto front of each point: 0 the first, 1 the front of the remaining points, and so on; less is better."""
    # fronts are peeled off one after the other
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
    excess comes first, then the next front; within a front, the faster.
    """
    # one standard error less than measured: chance at few images shall end no candidate early
    points = [(-trial.speed, trial.excess - trial.error) for trial in trials]
    fronts = layers(points)

    def rank(i: int) -> tuple:
        trial = trials[i]
        is_too_bad = trial.excess - REACH * trial.error > 0
        return is_too_bad, fronts[i], -trial.speed

    ranked = sorted(range(len(trials)), key=rank)
    return sorted(ranked[:number])


def fastest(trials: Sequence[Trial], is_sure: bool = True) -> int | None:
    """The fastest candidate that is good enough, with its interval if `is_sure`, and faster than the first, or None."""
    good = [i for i in _faster(trials) if trials[i].excess + is_sure * trials[i].reach <= 0]
    return max(good, key=lambda i: trials[i].speed, default=None)


def nearest(trials: Sequence[Trial]) -> int | None:
    """The candidate with the smallest excess, among those that are faster than the first if there are any."""
    among = _faster(trials) or range(1, len(trials))
    return min(among, key=lambda i: trials[i].excess, default=None)


def _faster(trials: Sequence[Trial]) -> list[int]:
    least = WORTH * trials[0].speed
    return [i for i, trial in enumerate(trials) if trial.speed > least]


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
    evaluation: Evaluation = NO_EVALUATION,
    *,
    seed: int = 0,
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
        store, evaluation, seed, overwrite, command: as in `compare`.

    Returns:
        The report of a comparison of the last rung's rows. Each has "losses", how much worse than baseline sampling it
        is with the standard error and its degrees of freedom, by the names of limits, and whether it is on the Pareto
        "front" of speed, FID and difference. "tune" has the limits, the measurements of each rung, failed rows, and the
        name of the "chosen" row: None if no row is both faster than baseline sampling and within the limits with its
        95 % interval. "unresolved" is the name of a faster row that is within the limits as measured, but may exceed
        them by chance. "nearest" is the name of the row, faster if there is one, that exceeds the limits least.

    Raises:
        ValueError: baseline sampling gives no images, or as `compare`.
    """
    other = seed + OTHER_SEEDS
    rows = [plain, replace(plain, name=f"{plain.name}:seed={other}", seed=other), *candidates]
    folder: dict = {"overwrite": overwrite, "written": [*WRITTEN, TUNE], "may_fail": True, "progress": progress}
    comparison = Comparison(rows, labels, seed)
    with taking_turns(comparison, rungs(num), store, **folder) as runs:
        history, report, images = _search(runs, comparison, rungs(num), limits, evaluation)
        failed = {rows[r].name: reason for r, reason in runs.failed.items()}

    last = {row["name"] for row in report["rows"]}
    report["ran"] = ran_by([row for row in rows if row.name in last], command)
    report["tune"] = {"limits": dict(limits), "rungs": history, "failed": failed, **_choice(report, limits)}
    return report, images


def _choice(report: dict, limits: Mapping[str, float]) -> dict:
    """The names of the "chosen", "unresolved" and "nearest" rows, see `tune`. Adds "front" to each row."""
    baseline, other_seeds, *rest = report["rows"]
    own = [baseline, *rest]
    other_seeds["front"] = False  # it competes with nothing
    fronts = layers([_point(row) for row in own])
    for row, front in zip(own, fronts):
        row["front"] = front == 0
    trials = [_trial(row, limits) for row in own]
    # the first trial is baseline sampling, which the others must beat
    best = fastest(trials)
    likely = fastest(trials, is_sure=False)
    near = nearest(trials)
    return {
        "chosen": None if best is None else own[best]["name"],
        "unresolved": None if likely in (None, best) else own[likely]["name"],
        "nearest": None if near is None else own[near]["name"],
    }


def _search(
    runs: InterleavedRuns,
    comparison: Comparison,
    numbers: Sequence[int],
    limits: Mapping[str, float],
    evaluation: Evaluation,
) -> tuple[list[dict], dict, list[np.ndarray]]:
    """The measurements of every rung, and the report of the last one with the images of its rows."""
    # a window of 0 is baseline sampling
    going = [r for r in range(ALWAYS, len(runs.rows)) if runs.plans[r].window != 0]
    history: list[dict] = []
    before = 0
    for i, number in enumerate(numbers):
        runs.bar.total = runs.bar.n + planned(len(going), numbers[i:], ALWAYS, before)
        report, images = _rung(runs, comparison, [*range(ALWAYS), *going], number, evaluation)
        going = [r for r in going if r not in runs.failed]
        if number != numbers[-1]:
            trials = [_trial(row, limits) for row in report["rows"][ALWAYS:]]
            best = survivors(trials, kept(len(trials)))
            going = [going[candidate] for candidate in best]
        names = [runs.rows[r].name for r in going]
        recorded = [{key: row.get(key) for key in RECORDED} for row in report["rows"]]
        history.append({"images": number, "rows": recorded, "kept": names})
        before = number
    return history, report, images


def _rung(
    runs: InterleavedRuns,
    comparison: Comparison,
    chosen: Sequence[int],
    number: int,
    evaluation: Evaluation,
) -> tuple[dict, list[np.ndarray]]:
    """The report on `number` images of each chosen row that does not fail, with their losses."""
    # nothing can be compared without baseline sampling
    chunks = runs.make(number, chosen)
    for r in range(ALWAYS):
        if r in runs.failed:
            raise ValueError(f"{runs.rows[r].name}: {runs.failed[r]}")
    runs.bar.set_postfix_str(f"evaluating {number} images of each")
    alive = [r for r in chosen if r not in runs.failed]
    compared = comparison._replace(rows=[runs.rows[r] for r in alive])
    plans = [runs.plans[r] for r in alive]
    report, images, scores = report_of(compared, plans, chunks, evaluation, progress=False)
    _add_losses(report["rows"], scores)
    return report, images


def _add_losses(rows: list[dict], scores: Sequence[Mapping[str, Score]]) -> None:
    """Adds "losses" to each row, see `tune`; None for unknown ones. `scores`: of each row, by name."""
    _, other_seeds = rows[:ALWAYS]
    for row, own in zip(rows, scores):
        losses = {}
        for name in WORSE:
            losses[name] = _loss(name, own, scores[0])
        divergence = 0.0 if row["guarantee"] == "exact" else row.get("divergence")
        losses["divergence"] = None if divergence is None else {"loss": divergence, "error": 0.0, "degrees": 1}
        row["losses"] = losses
    # without a standard error, the loss of baseline sampling with other seeds shows the size of chance
    for row in rows:
        for name, loss in row["losses"].items():
            if loss is not None and loss["error"] is None:
                by_chance = other_seeds["losses"][name]
                loss["error"] = abs(by_chance["loss"]) if by_chance else 0.0


def _loss(name: str, scores: Mapping[str, Score], plain: Mapping[str, Score]) -> dict | None:
    """How much worse a row's score is than baseline sampling's, as a ratio less 1, and its standard error."""
    if name not in scores or name not in plain or not plain[name].value:
        return None
    own, base = scores[name], plain[name]
    if own is base:
        return {"loss": 0.0, "error": 0.0, "degrees": 1}
    ratio = own.value / base.value
    error, degrees = None, 1
    if own.parts is not None and base.parts is not None:
        # to first order; images of one seed have much in common, which is no error of the ratio
        error = standard_error(own.parts - ratio * base.parts) / base.value
        degrees = len(own.parts) - 1
    return {"loss": WORSE[name] * (ratio - 1), "error": error, "degrees": degrees}


def _trial(row: dict, limits: Mapping[str, float]) -> Trial:
    """The trial of a row, by the limit that it exceeds most."""
    speed = value_of(row, "images_per_second")
    beyond, worst = [], []
    for name, limit in limits.items():
        loss = row["losses"][name]
        if loss is None:  # beyond any limit
            return Trial(speed, math.inf)
        beyond.append((loss["loss"] - limit, loss["error"]))
        worst.append(loss["loss"] - limit + half_interval(loss))
    excess, error = max(beyond)
    return Trial(speed, excess, error, max(worst) - excess)


def _point(row: dict) -> tuple[float, float, float]:
    """The coordinates of a row for the Pareto front: minus speed, FID and difference. Less is better."""
    difference = 0.0 if row["guarantee"] == "exact" else row.get("difference")
    return (
        -value_of(row, "images_per_second"),
        math.inf if row["fid"] is None else row["fid"],
        math.inf if difference is None else difference,
    )
