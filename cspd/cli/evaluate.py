"""The commands that judge images: `cspd evaluate`, `cspd compare` and `cspd tune`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from cspd.checkpoints import checkpoint_files, family_of
from cspd.cli.options import (
    check_classes,
    check_method,
    class_numbers,
    load_engine,
    read_prompts,
    request_of,
    run_settings,
)
from cspd.comparison.compare import compare, tune
from cspd.comparison.report import choice_told, front_table, shortfall, text_table, wanted, write
from cspd.comparison.study import (
    CHUNKS,
    MODELS,
    RUN,
    SUBJECTS,
    TUNE,
    Configuration,
    candidates,
    comparison_store,
    configurations,
    named_entries,
    read_study,
    settings_of,
)
from cspd.device import describe, pick_device
from cspd.engine import Engine
from cspd.evaluation import metrics
from cspd.evaluation.images import (
    GRID,
    ImageFolder,
    Subject,
    Watched,
    are_texts,
    asking_for,
    check_npz,
    export_npz,
    in_turn,
    prompts_of,
)
from cspd.evaluation.metrics import (
    INCEPTION,
    NO_MODEL,
    SPACES,
    Clip,
    check,
    check_clip,
    mean_and_error,
    measure,
    reference_for,
    space_of,
    unmeasured,
)
from cspd.evaluation.run import EXPLODED, MANIFEST, RECORD, Processes, Shards, sample_shards, shards_store
from cspd.files import misfit, read_json, write_json
from cspd.option import BUNDLED, DEFAULTS, option_names
from cspd.plots import grid
from cspd.request import Request, to_pil
from cspd.runs import (
    Store,
    differences,
    file_fingerprint,
    files_told,
    measured_lines,
    model_line,
    models_of,
    what_ran,
    without_folders,
    write_png,
)
from cspd.terminal import if_stopped

# What `cspd evaluate` prints: its report as text, a line a number.

Line = tuple[str, str, str]  # a title, a value, a note


def format_evaluation(report: dict) -> str:
    """The report as text, a line a number."""
    reference, sampling = report["reference"], report.get("sampling")
    against = f"against {reference['name']} ({reference['fingerprint'][:12]})" if reference else ""
    judged = f"{report['space']} space {against}" if report["space"] else report["missing"]["fid"]
    lines = [("images", f"{report['num']:,}", judged)]
    if report["space"]:
        lines += _quality_lines(report)
    lines += _clip_line(report)
    if report["largest_token"] is not None:
        exploded = f"{report['exploded']} of {report['num']:,} images exploded (a token beyond {EXPLODED:g})"
        lines.append(("largest token", f"{report['largest_token']:.2f}", exploded))
    if sampling:
        lines += _sampling_lines(sampling, report["settings"]["request"])
    lines += [(model["role"], "", model_line(model)) for model in report["ran"]["models"]]
    machine = report["ran"]["machine"]
    lines.append(("machine", "", f"{machine['device']}, threads: {machine['threads']}"))
    return "\n".join(f"{title:<18} {value:>10}  {note}".rstrip() for title, value, note in lines)


def _quality_lines(report: dict) -> list[Line]:
    """What the images' features and the classifier say."""
    spread = "" if report["inception_score_std"] is None else f"+- {report['inception_score_std']:.3f} over ten parts"
    recognised = "recognised as their class"
    if report["accuracy_ci95"] is not None:
        low, high = report["accuracy_ci95"]
        recognised += f", 95 % interval {low:.1%} to {high:.1%}"
    forms = (
        ("fid", ".3f", ""),
        ("inception_score", ".3f", spread),
        ("kid", ".5f", ""),
        ("precision", ".3f", ""),
        ("recall", ".3f", ""),
        ("accuracy", ".1%", recognised),
    )
    lines = []
    for name, form, note in forms:
        value = report[name]
        title = name.upper() if len(name) == 3 else name.replace("_", " ")
        lines.append((title, "-" if value is None else format(value, form), report["missing"].get(name, note)))
    return lines


def _sampling_lines(sampling: dict, request: dict) -> list[Line]:
    """How the images were made, and what they took."""
    start = request.get("first_timestep")
    chains = f", chains from timestep {start}" if start is not None else ""
    lines = [("method", request["method"], sampling["guarantee"] + chains)]
    if "step_compression" in sampling:
        lines.append(("codes per forward", f"{sampling['step_compression']:.2f}", ""))
    else:
        calls = f"{sampling['head_calls_per_image']:.0f} per image"
        lines.append(("head calls per token", f"{sampling['head_calls_per_token']:.1f}", calls))
    if sampling["bound_per_image"] > 0:
        bound = f"{min(sampling['bound_per_image'], 1):.3f}"
        lines.append(("TV bound", bound, "of an image's codes, from the target's (docs/bounds.md)"))
    lines += measured_lines(sampling)
    if sampling["images_made"]:
        made = f"{sampling['images_made']} images in {sampling['seconds']:.1f} s"
        made += f" by {sampling['processes']} processes" if sampling["processes"] > 1 else ""
        lines.append(("images/s", f"{sampling['images_per_second']:.2f}", made))
    else:
        lines.append(("images/s", "-", "all were there already"))
    return lines


def _clip_line(report: dict) -> list[Line]:
    """The CLIP score of images of texts."""
    missing = report["missing"].get("clip_score")
    if report["clip_score"] is None:
        return [("CLIP score", "-", missing)] if missing else []
    error, model = report["clip_score_error"], report["clip"]
    spread = "" if error is None else f"+- {error:.2f} (standard error), "
    return [("CLIP score", f"{report['clip_score']:.2f}", f"{spread}by {model['name']} ({model['fingerprint'][:12]})")]


# `cspd compare`: configurations side by side.

FILES = ("vae", "draft_checkpoint", "eagle", "text_encoder")  # among a row's models
RUN_DEFAULTS = dict.fromkeys(RUN) | {"num": 20, "labels": list(range(10)), "seed": 0, "max_batch": 4}


def run_compare(args: argparse.Namespace) -> None:
    settings, common, entries = _asked(args)
    prompts = read_prompts(Path(settings["prompts"])) if settings["prompts"] else None
    if args.clip:
        check_clip(args.clip, args.device, of_texts=prompts is not None)
    blank = Request(negative_prompt=settings["negative_prompt"])
    asked_for = asking_for(blank, prompts[0] if prompts else 0)

    def of(models: Mapping[str, object]) -> argparse.Namespace:
        files = {key: Path(models[key]) if key in models else None for key in FILES}
        return argparse.Namespace(**vars(args) | {"arch": None} | models | files)

    rows = configurations(entries, common, lambda models: load_engine(of(models), settings["max_batch"]), asked_for)
    rows = [replace(row, files=run_settings(of(row.models), row.engine.check(row.request))) for row in rows]
    judge = judge_of(args, rows) | {"clip": args.clip}
    subjects = prompts or class_numbers(settings["labels"], rows[0].engine)
    run_of = {"subjects": subjects, "seed": settings["seed"]}
    num = settings["num"]

    def made() -> str:
        total = len(rows) * -(-num // settings["max_batch"])
        return files_told(args.out, f"{CHUNKS}/*.npz", total, "chunks of images")

    with if_stopped(made), comparison_store(args.out) as store:
        how = {"overwrite": args.overwrite, "command": args.line}
        report, images = compare(rows, num=num, store=store, **how, **run_of, **judge)
        print(text_table(report))
        print(f"wrote {', '.join(write(report, images, args.out))} to {args.out}/")


def _asked(args: argparse.Namespace) -> tuple[dict, dict, list[dict]]:
    """Settings of the run, and of all rows, and the rows' entries: a file's, with what flags put in its place."""
    if args.config and args.methods:
        raise ValueError("--methods and --config: give one of them")
    common, entries = read_study(args.config) if args.config else ({}, None)
    asked = {name: getattr(args, name) for name in (*RUN, *MODELS)} | settings_of(request_of(args))
    given = {key: value for key, value in asked.items() if value is not None}
    replaced = SUBJECTS if any(key in given for key in SUBJECTS) else ()  # texts replace a file's classes too
    common = {key: value for key, value in common.items() if key not in replaced} | given
    settings = RUN_DEFAULTS | {key: common.pop(key) for key in RUN if key in common}
    if entries is None:
        common = {"checkpoint": BUNDLED["MAR"]} | common
        entries = named_entries(args.methods or ["ar", DEFAULTS[family_of(common["checkpoint"])]])
    return settings, common, entries


def judge_of(args: argparse.Namespace, rows: Sequence[Configuration]) -> dict:
    """What images are judged by, checked before there are any."""
    spaces = {space_of(checkpoint_files(row.models["checkpoint"])["target"]) for row in rows}
    own = spaces.pop() if len(spaces) == 1 else None
    space = INCEPTION if args.weights else own
    if space is None:
        if args.ref:
            raise ValueError(f"--ref {args.ref}: features of these models' images are Inception's: give --weights too")
        return {}
    reference = reference_for(space, args.ref)
    for side in {row.engine.runner.image_size for row in rows}:
        metrics.check(side, space=space, weights=args.weights, reference=reference, device=args.device)
    return {"space": space, "weights": args.weights, "reference": reference}


# `cspd evaluate`: how good many images are, and how fast they were made.

EVALUATION_SCHEMA = "cspd.evaluation/2"
SHOWN, COLUMNS = 100, 10  # images in the grid
MEASURES_ONLY = ("images", "out", "ref", "space", "weights", "clip", "prompts", "npz", "device")
MEASURING = {"command", "line", "default_of", *MEASURES_ONLY}  # not of sampling
USUAL_NUM = 500  # images of classes


def run_evaluate(args: argparse.Namespace) -> None:
    processes = Processes()
    if args.images:
        if processes.rank == 0:
            _measure_folder(args)
        return
    prompts = read_prompts(args.prompts) if args.prompts else None
    args.num = args.num or (len(prompts) if prompts else USUAL_NUM)

    def made() -> str:
        return f"{Shards(args.out, args.num).num_written()} of {args.num} images are in {args.out}/"

    with if_stopped(made), shards_store(args.out) as store:
        with processes:
            args.device = processes.device(args.device)
            engine, request, subjects, settings, how = processes.together(
                lambda: _prepare(args, prompts, processes.rank)
            )
            shards, manifest, summary = sample_shards(
                engine, request, subjects, args.num, store, settings, processes, overwrite=args.overwrite
            )
        if processes.rank == 0:
            about = _how_made(args, engine, manifest, summary) | shards.largest_tokens()
            _report(args, shards, shards.subjects(), how, about)


def _measure_folder(args: argparse.Namespace) -> None:
    """Reports on images that are there already."""
    _check_measuring(args)
    images = ImageFolder(args.images)
    prompts = read_prompts(args.prompts, images.files) if args.prompts else None
    if prompts and len(images) % len(prompts):
        counts = f"{args.images} has {len(images)} images and {args.prompts} {len(prompts)} texts"
        raise ValueError(f"{counts}: give --prompts a file with a text of each image, in the order of their names")
    subjects: list | None = in_turn(prompts, len(images)) if prompts else images.labels or prompts_of(images)
    _check_extras(args, are_texts(subjects))
    how = _how_to_measure(args, images.shape[1:], args.device, are_texts(subjects))
    with Store(args.out, RECORD, EVALUATION_SCHEMA, {}, compared=()) as store:
        store.claim({}, [GRID])
        ran = what_ran(describe(pick_device(args.device)), command=args.line)
        _report(args, images, subjects, how, {"folder": str(args.images), "ran": ran, **store.lists()})


def _check_measuring(args: argparse.Namespace) -> None:
    """Raises ValueError where --images comes with what it would ignore, or with the folder of a run."""
    given = [name for name, value in vars(args).items() if name not in MEASURING and value != args.default_of(name)]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--images samples none: leave out {options}, or --images")
    if (args.out / MANIFEST).exists():
        raise ValueError(f"{args.out} holds the report of a run that sampled: give another --out")


def _how_made(args: argparse.Namespace, engine: Engine, manifest: dict, summary: dict) -> dict:
    """What the report says of sampling: settings, speed, and what ran."""
    summary["machine"] = engine.describe()
    ran = what_ran(summary["machine"], models_of(manifest, engine.runner), args.line)
    about = {"settings": without_folders(manifest), "sampling": summary, "ran": ran}
    return about if summary["images_made"] else about | _earlier_sampling(args.out / RECORD, manifest)


def _earlier_sampling(path: Path, manifest: dict) -> dict:
    """How fast the images were made, as an earlier report of the same run has it."""
    try:
        report = read_json(path)
    except (OSError, ValueError):  # it was cut off before it was measured
        return {}
    if misfit(report, {"sampling": dict, "settings": dict}):
        return {}
    others = differences(without_folders(report["settings"]), without_folders(manifest))
    return {} if others else {"sampling": report["sampling"]}


def _prepare(
    args: argparse.Namespace, prompts: list[str] | None, rank: int
) -> tuple[Engine, Request, list[Subject], dict, dict]:
    """All that can fail before the first image."""
    check_method(args)
    if rank == 0:
        _check_extras(args, prompts is not None)
    engine = load_engine(args, args.max_batch)
    if engine.device.index is not None:
        torch.cuda.set_device(engine.device)
    runner = engine.runner
    subjects = prompts or class_numbers(args.labels or range(runner.num_classes) or [0], engine)
    blank = request_of(args, None, args.seed, negative_prompt=args.negative_prompt)
    request = asking_for(blank, subjects[0])  # models of texts say that they have no class
    settings, how = run_settings(args, engine.check(request)), {}
    if rank == 0:
        how = _how_to_measure(args, (runner.image_size, runner.image_size), engine.device, are_texts(subjects))
    return engine, request, subjects, settings, how


def _check_extras(args: argparse.Namespace, of_texts: bool) -> None:
    """Raises where CLIP's folder or the .npz would fail once the images are there."""
    if args.clip:
        check_clip(args.clip, args.device, of_texts)
    if args.npz:
        check_npz(args.npz)


def _how_to_measure(
    args: argparse.Namespace, size: tuple[int, int], device: torch.device | str, of_texts: bool
) -> dict:
    """What `_measured` is told, tried out on nothing: hours of sampling are not to end in a wrong file."""
    how: dict = {"space": None, "reference": None, "weights": args.weights, "device": device}
    space = args.space or _usual_space(args, size, of_texts)
    if space:
        how |= {"space": space, "reference": reference_for(space, args.ref)}
        check(*size, **how)
    return how


def _usual_space(args: argparse.Namespace, size: tuple[int, int], of_texts: bool) -> str | None:
    """Inception's with its weights, or else the bundled models' own; of other images the first for their size.

    None: others' images of texts, and no --ref.
    """
    own = None if args.images else space_of(checkpoint_files(args.checkpoint)["target"])
    if args.weights or own:
        return INCEPTION if args.weights else own
    if of_texts:
        return INCEPTION if args.ref else None
    fitting = [name for name, space in SPACES.items() if size == (space.sizes.size, space.sizes.size)]
    return next(iter(fitting), INCEPTION)


def _measured(images: Dataset, subjects: list[Subject] | None, how: dict, clip: Path | None) -> dict:
    """All that is measured of images, of which the `subjects` may be known."""
    of_texts = are_texts(subjects)
    if how["space"] is None:
        values = unmeasured(len(images), "no features are taken: give --ref, or Inception's file, --weights")
    else:
        with tqdm(total=len(images), desc="measuring", unit=" image") as bar:
            values = measure(Watched(images, bar), labels=None if of_texts else subjects, **how)
    values |= {"clip_score": None, "clip_score_error": None, "clip": None}
    if of_texts and clip is None:
        values["missing"]["clip_score"] = NO_MODEL
    elif of_texts:
        model = Clip(clip, how["device"])
        with tqdm(total=len(images), desc="by CLIP", unit=" image") as bar:
            mean, error = mean_and_error(model.scores(Watched(images, bar), subjects))
        values |= {"clip_score": mean, "clip_score_error": error, "clip": model.about}
    return values


def _report(args: argparse.Namespace, images: Dataset, subjects: list[Subject] | None, how: dict, about: dict) -> None:
    """Measures the images, writes what is known of them, and prints it."""
    values = _measured(images, subjects, how, args.clip)
    reference, weights = how["reference"], how["weights"]
    report = {"schema": EVALUATION_SCHEMA, "space": how["space"], "weights": None, "reference": None, **values}
    report |= {"largest_token": None, "exploded": None, "files": [GRID], **about}
    if weights:  # None: torch-fidelity's download, or the bundled classifier
        report["weights"] = {"name": weights.name, "fingerprint": file_fingerprint(weights)}
    if reference:
        report["reference"] = {"name": reference.name, "fingerprint": reference.fingerprint}
    write_json(args.out / RECORD, report)
    shown = [to_pil(images[i]) for i in range(min(SHOWN, len(images)))]
    captions = [str(subject) for subject in (subjects or [""] * len(shown))[:SHOWN]]
    write_png(args.out / GRID, grid(shown, captions, min(COLUMNS, len(shown))))
    print(format_evaluation(report))
    wrote = [f"{args.out / RECORD} (all numbers and settings)", f"{args.out / GRID} (the first images)"]
    if args.npz:
        export_npz(images, args.npz)
        wrote.append(f"{args.npz} (for ADM's evaluator)")
    print(f"wrote {', '.join(wrote)}")


# `cspd tune`: the fastest way to sample on this machine, within limits.

TUNE_SCHEMA = "cspd.tune/1"
MODEL = (
    "checkpoint",
    "arch",
    "vae",
    "draft_checkpoint",
    "eagle",
    "device",
    "precision",
    "compile",
    "graphs",
    "threads",
)


def run_tune(args: argparse.Namespace) -> None:
    divergence = 0.0 if args.exact else args.divergence
    limits = args.tolerance or {"fid": 0.02}
    if divergence is not None:
        limits = {"divergence": divergence}
    engine = load_engine(args, args.max_batch)
    check_classes(engine, "cspd tune", "cspd compare --prompts FILE")
    models = {name: getattr(args, name) for name in MODEL if getattr(args, name) is not None}
    plain = Configuration("ar", request_of(args, family=family_of(args.checkpoint)).but(method="ar"), engine, models)
    engine.check(plain.request)
    labels = class_numbers(args.labels, engine)
    found, left_out = candidates(plain, divergence)
    plain, *found = (replace(row, files=run_settings(args, engine.check(row.request))) for row in [plain, *found])
    judge = judge_of(args, [plain])
    _check_limits(limits, judge)

    def made() -> str:
        return f"{len(list((args.out / CHUNKS).glob('*.npz')))} chunks of images are in {args.out}/"

    print(f"{len(found)} candidates, looking for the fastest with {wanted(limits)}")
    with if_stopped(made), comparison_store(args.out) as store:
        run_of = {"seed": args.seed, "overwrite": args.overwrite, "command": args.line}
        report, images = tune(plain, found, labels, args.num, limits, store, **run_of, **judge)
        tuned = report["tune"]
        chosen = [row for row in found if row.name == tuned["chosen"]]
        tuned |= {
            "left_out": left_out,
            "command": command(args, *chosen) if chosen else None,
            "told": choice_told(report) if chosen else shortfall(report),
        }
        written = write(report, images, args.out)
        write_json(args.out / TUNE, {"schema": TUNE_SCHEMA, **tuned})
    print(f"\nPareto front of {len(found)} candidates, and ar; {report['images']} images of each:\n")
    print(front_table(report))
    print(f"\nwrote {', '.join([*written, TUNE])} to {args.out}/")
    if not chosen:
        raise ValueError(tuned["told"])
    print(f"\n{tuned['told']}\n\n  {tuned['command']}")


def _check_limits(limits: Mapping[str, float], judge: Mapping[str, object]) -> None:
    """Raises ValueError where images of these models cannot be judged by a limit."""
    if "divergence" in limits:
        return
    if not judge:
        raise ValueError("--tolerance: these models have no judge of their own: give Inception's file, --weights")
    if "fid" in limits and judge["reference"] is None:
        raise ValueError("--tolerance fid: there is no reference: give --ref")
    if "accuracy" in limits and judge["space"] == INCEPTION:
        raise ValueError("--tolerance accuracy: only the bundled models' images have a classifier: leave it out")


def command(args: argparse.Namespace, row: Configuration) -> str:
    """The `cspd sample` that samples as a row does."""
    words = ["cspd", "sample", "--method", str(row.request.method)]
    usual = {"checkpoint": "digits32", "device": "auto", "precision": "fp32"}
    settings = {name: value for name, value in settings_of(row.request).items() if name in option_names()}
    for file in args.plugin or ():
        words += ["--plugin", str(file)]
    given = {name: getattr(args, name) for name in MODEL} | settings | {"max_batch": args.max_batch}
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is False and (name in settings or name == "graphs"):
            words.append(f"--no-{name.replace('_', '-')}")
        elif value is not None and value is not False and value != usual.get(name):
            words += [flag, str(value)]
    return shlex.join(words)
