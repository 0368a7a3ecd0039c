"""The commands that evaluate images: `cspd evaluate`, `cspd compare` and `cspd tune`."""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cspd.checkpoints import checkpoint_files, family_of, load, run_settings
from cspd.cli.flags import parser_of
from cspd.cli.options import (
    asked_prompts,
    check_classes,
    check_method,
    class_numbers,
    load_engine,
    on_ray,
    prompt_groups,
    request_of,
)
from cspd.cli.papers import run_paper
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
from cspd.evaluation.images import (
    GRID,
    Images,
    Subject,
    Watched,
    are_texts,
    asking_for,
    check_npz,
    cycle_of,
    export_npz,
    images_in,
    in_turn,
    prompts_of,
)
from cspd.evaluation.metrics import (
    INCEPTION,
    NO_MODEL,
    PANEL,
    Clip,
    Evaluation,
    check,
    check_clip,
    mean_and_error,
    measure,
    reference_for,
    space_of,
    space_of_files,
    titled,
    unmeasured,
)
from cspd.evaluation.run import (
    EXPLODED,
    MANIFEST,
    RECORD,
    Shards,
    Task,
    finish,
    finish_part,
    own_device,
    part_of,
    sample_shards,
    shards_store,
    write_grid,
)
from cspd.evaluation.scores import num_splits
from cspd.files import Place, checked_json, place_of, write_json
from cspd.method import METHODS
from cspd.option import BUNDLED, DEFAULTS, check_integer, option_names
from cspd.origin import file_fingerprint, model_line, models_of, what_ran
from cspd.request import Request
from cspd.runs import Store, differences, files_told
from cspd.summary import SUMMARY, measured_lines
from cspd.terminal import MOST, if_stopped, progress_bar

# The report of `cspd evaluate` as text.

Line = tuple[str, str, str]  # a title, a value, a note


def format_evaluation(report: dict) -> str:
    """The report as text, with a number on each line."""
    num = f"{report['num']:,}"
    lines = [("images", num, _space_note(report))]
    if report["inception_score_ci95"] and not report["subjects_known"]:
        lines.append(
            ("", "", "of unknown classes or prompts: intervals take these as drawn at random, and can be wider")
        )
    if report["space"]:
        lines += _quality_lines(report)
    lines += _clip_line(report)
    if report["largest_token"] is not None:
        exploded = f"{report['exploded']} of {num} images exploded (a token beyond {EXPLODED:g})"
        lines.append(("largest token", f"{report['largest_token']:.2f}", exploded))
    if "sampling" in report:
        lines += _sampling_lines(report["sampling"], report["settings"]["request"])
    ran = report["ran"]
    for model in ran["models"]:
        lines.append((model["role"], "", model_line(model)))
    machine = ran["machine"]
    lines.append(("machine", "", f"{machine['device']}, threads: {machine['threads']}"))
    width = max(len(title) for title, _, _ in lines)
    texts = [f"{title:<{width}} {value:>10}  {note}".rstrip() for title, value, note in lines]
    return "\n".join(texts)


def _space_note(report: dict) -> str:
    """The feature space and the reference, or the reason why there is no space."""
    if not report["space"]:
        return report["missing"]["fid"]
    note = f"{report['space']} space"
    if report["reference"]:
        note += f" against {_named(report['reference'])}"
    return note


def _named(file: dict) -> str:
    """The name of a file, and the beginning of its fingerprint."""
    return f"{file['name']} ({file['fingerprint'][:12]})"


def _quality_lines(report: dict) -> list[Line]:
    """The metrics of features, and the classifier's accuracy."""
    notes = dict(report["missing"])
    for name in PANEL:
        if report[f"{name}_ci95"] is not None:
            notes[name] = _sureness(report, name)
    if (parts := num_splits(report["num"])) > 1 and "inception_score" in notes:
        notes["inception_score"] += f"; the mean of {parts} parts in random order"
    if report["cmmd"] is not None and report["space"] != INCEPTION and not report["cmmd_by"]:
        notes["cmmd"] = f"{notes.get('cmmd', '')}; by the {report['space']} classifier in place of CLIP".lstrip("; ")
    lines = []
    for name in PANEL:
        value = report[name]
        text = "-" if value is None else format(value, FORMS.get(name, ".3f"))
        title = TITLES.get(name, name)
        lines.append((titled(title, report["space"]) if name in OF_SPACE else title, text, notes.get(name, "")))
    return lines


TITLES = {  # of scores whose names are not words
    "fid": "FID",
    "sfid": "sFID",
    "fd_dinov2": "FD-DINOv2",
    "inception_score": "inception score",
    "kid": "KID",
    "cmmd": "CMMD",
}
OF_SPACE = ("fid", "inception_score", "kid", "precision", "recall", "density", "coverage")  # by the space's network
FORMS = {"kid": ".5f", "accuracy": ".1%"}


def _sureness(report: dict, name: str) -> str:
    """The 95 % interval of a score, and the difference that so many images can show."""
    form = FORMS.get(name, ".3f")
    low, high = (format(end, form) for end in report[f"{name}_ci95"])
    note = f"{low} to {high} at 95 %"
    if name == "accuracy":
        note = f"recognised as their class, {note}"
    resolution = report[f"{name}_resolution"]
    if not resolution:  # too few images, or all of them alike: an accuracy of 100 %
        return note
    note += f"; differences under {format(resolution, form)} cannot be told with {report['num']:,} images"
    needed = report[f"{name}_needed"]
    return note if needed is None else f"{note} (5 %: {needed:,})"


def _sampling_lines(sampling: dict, request: dict) -> list[Line]:
    """The method, its costs and the speed."""
    guarantee = sampling["guarantee"]
    if request.get("first_timestep") is not None:
        guarantee += f", chains from timestep {request['first_timestep']}"
    lines = [("method", request["method"], guarantee)]
    if sampling.get("plan"):
        lines.append(("plan", "", sampling["plan"]))
    # the cost of VQ models is their forward passes, of MAR its head calls
    if "step_compression" in sampling:
        lines.append(("tokens per forward pass", f"{sampling['step_compression']:.2f}", ""))
    else:
        calls = f"{sampling['head_calls_per_image']:.0f} per image"
        lines.append(("head calls per token", f"{sampling['head_calls_per_token']:.1f}", calls))
    if sampling["bound_per_image"] > 0:
        bound = f"{min(sampling['bound_per_image'], 1):.3f}"
        lines.append(("TV bound", bound, "of an image's tokens, from the target's distribution (docs/exactness.md)"))
    lines += measured_lines(sampling)
    if not sampling["images_made"]:
        return [*lines, ("images/s", "-", "all images existed already")]
    generated = f"{sampling['images_made']} images in {sampling['seconds']:.1f} s"
    if sampling["processes"] > 1:
        generated += f" by {sampling['processes']} processes"
    return [*lines, ("images/s", f"{sampling['images_per_second']:.2f}", generated)]


def _clip_line(report: dict) -> list[Line]:
    """The CLIP score of images generated from prompts."""
    if report["clip_score"] is None:
        missing = report["missing"].get("clip_score")
        return [("CLIP score", "-", missing)] if missing else []
    note = f"by {_named(report['clip'])}"
    if report["clip_score_error"] is not None:
        note = f"+- {report['clip_score_error']:.2f} (standard error), {note}"
    lines = [("CLIP score", f"{report['clip_score']:.2f}", note)]
    for name, groups in report["clip_score_by"].items():
        for group, found in groups.items():
            error = found["clip_score_error"]
            of = f"{name}, {found['images']:,} images"
            note = of if error is None else f"+- {error:.2f}, {of}"
            lines.append((f"  {group}", f"{found['clip_score']:.2f}", note))
    return lines


# `cspd compare`: configurations side by side.

FILES = ("vae", "draft_checkpoint", "eagle", "text_encoder")  # the files among a configuration's models
RUN_DEFAULTS = dict.fromkeys(RUN) | {"num": 20, "seed": 0, "max_batch": 4}


def run_compare(args: argparse.Namespace) -> None:
    settings, common, entries = _study(args)
    prompts = asked_prompts(settings["prompts"] and Path(settings["prompts"]), args.caption_seed)
    if args.clip:
        check_clip(args.clip, args.device, of_texts=prompts is not None)
    blank = Request(negative_prompt=settings["negative_prompt"])
    asked_for = asking_for(blank, prompts[0] if prompts else 0)

    def with_models(models: Mapping[str, object]) -> argparse.Namespace:
        own: dict[str, Any] = {**dict.fromkeys(("arch", *FILES)), **models}
        for key in FILES:
            if own[key] is not None:
                own[key] = Path(own[key])
        return argparse.Namespace(**vars(args) | own)

    def load(models: Mapping[str, object]) -> Engine:
        return load_engine(with_models(models), settings["max_batch"])

    rows = []
    for row in configurations(entries, common, load, asked_for):
        files = run_settings(with_models(row.models), row.engine.check(row.request))
        rows.append(replace(row, files=files))
    evaluation = how_to_evaluate(args, rows)._replace(clip=args.clip)
    subjects = prompts or class_numbers(settings["labels"], rows[0].engine)
    num = settings["num"]
    check_integer("--num times --repeats", num * args.repeats, 1, MOST, "each repeat has its own images")

    def progress() -> str:
        chunks_per_row = -(-num * args.repeats // settings["max_batch"])
        total = len(rows) * chunks_per_row
        return files_told(args.out, f"{CHUNKS}/*.npz", total, "chunks of images")

    with if_stopped(progress), comparison_store(args.out) as store:
        report, images = compare(
            rows,
            subjects,
            num,
            store,
            evaluation,
            seed=settings["seed"],
            repeats=args.repeats,
            overwrite=args.overwrite,
            command=args.line,
        )
        print(text_table(report))
        written = ", ".join(write(report, images, args.out))
        print(f"wrote {written} to {args.out}/")


def _study(args: argparse.Namespace) -> tuple[dict, dict, list[dict]]:
    """The settings of the run, the settings of all configurations, and the configurations' own entries.

    They come from a study file; flags override it.
    """
    if args.config and args.methods:
        raise ValueError("--methods and --config exclude each other: give only one of them")
    common, entries = read_study(args.config) if args.config else ({}, None)
    asked = {name: getattr(args, name) for name in (*RUN, *MODELS)}
    asked |= settings_of(request_of(args))
    given = {key: value for key, value in asked.items() if value is not None}
    if any(key in given for key in SUBJECTS):  # prompts replace a file's classes too
        common = {key: value for key, value in common.items() if key not in SUBJECTS}
    common = common | given
    settings = dict(RUN_DEFAULTS)
    for key in RUN:
        if key in common:
            settings[key] = common.pop(key)
    # without a study: baseline sampling and the default method of the checkpoint's family
    if entries is None:
        common = {"checkpoint": BUNDLED["MAR"]} | common
        default = DEFAULTS[family_of(common["checkpoint"])]
        entries = named_entries(args.methods or ["ar", default])
    return settings, common, entries


def how_to_evaluate(args: argparse.Namespace, rows: Sequence[Configuration]) -> Evaluation:
    """How the images of these rows are evaluated, checked before there are images."""
    targets: list[Any] = [checkpoint_files(row.models["checkpoint"])["target"] for row in rows]
    spaces = set(map(space_of, targets))
    # values of different spaces cannot be compared
    space = spaces.pop() if len(spaces) == 1 else None
    if args.weights:
        space = INCEPTION
    if space is None:
        if args.ref:
            raise ValueError(f"--ref {args.ref} needs the features of Inception-v3 for these models: give --weights")
        return Evaluation()
    how = Evaluation(space, args.weights, reference_for(space, args.ref), device=args.device)
    for side in {row.engine.runner.image_size for row in rows}:
        check(how, side)
    return how


# `cspd evaluate`: the quality of many images, and the speed of sampling them.

EVALUATION_SCHEMA = "cspd.evaluation/3"
MEASURES_ONLY = (
    *("images", "prompts", "caption_seed", "out", "npz"),
    *("ref", "space", "weights", "clip", "dinov2", "device"),
)
MEASURING = {"command", "line", "default_of", *MEASURES_ONLY}  # arguments that measuring existing images needs
USUAL_NUM = 500  # images of a class-conditional model


def run_evaluate(args: argparse.Namespace) -> None:
    if args.like:
        run_paper(args, lambda words: parser_of(words, METHODS).parse_args(words), _check_family, run_evaluate)
        return
    args.out = place_of(str(args.out))
    part = part_of(args.shard)
    if args.images:
        # there is nothing to share: other processes of torchrun end at once
        if part.index == 0:
            _measure_folder(args)
        return
    prompts = asked_prompts(args.prompts, args.caption_seed)
    groups = prompt_groups(args.prompts)  # now: the file may be another one after hours of sampling
    # by default an image of each prompt
    args.num = args.num or (len(prompts) if prompts else USUAL_NUM)

    def progress() -> str:
        written = Shards(args.out, args.num).num_written()
        return f"{written} of {args.num} images are in {args.out}/"

    with if_stopped(progress), shards_store(args.out) as store:
        args.device = own_device(args.device)
        task, how = _prepare(args, prompts)
        summary: Any
        held: Store | None
        if args.ray:
            shards, summary = on_ray(args, functools.partial(_task, prompts=prompts), args.num)
            held = finish(shards)
        else:
            shards, summary = sample_shards(task, args.num, store, part, overwrite=args.overwrite)
            store.release()
            held = finish_part(shards, part) if summary else None
            if held is None:
                print(f"{progress()}; the part that writes the last of them measures them all")
                return
        with held:
            about = _about_sampling(args, task.engine, shards.manifest, summary) | shards.largest_tokens()
            _report(args, shards, shards.subjects(), how, about, groups)


SMALL = {"MAR": "emoji64", "VQ": "digits32_vq", "causal": "emoji64_sphere"}  # they take the settings of official models


def _check_family(args: argparse.Namespace, family: str) -> None:
    """Raises ValueError for settings that models of this family refuse, without their weights."""
    load(SMALL[family], device="cpu", max_batch=1).check(request_of(args, 0, args.seed))


def _measure_folder(args: argparse.Namespace) -> None:
    """Reports on existing images."""
    _check_measuring(args)
    images = images_in(args.images)
    subjects: list | None = images.labels or prompts_of(images)
    prompts = asked_prompts(args.prompts, args.caption_seed, images.files)
    if prompts:
        if len(images) % len(prompts):
            raise ValueError(
                f"{args.images} has {len(images)} images, and {args.prompts} has {len(prompts)} prompts: give --prompts"
                " a file with a prompt for each image, in the order of their names"
            )
        subjects = in_turn(prompts, len(images))
    _check_extras(args, are_texts(subjects))
    how = _how_to_measure(args, images.shape[1:], args.device, are_texts(subjects), space_of_files(images))
    with Store(args.out, RECORD, EVALUATION_SCHEMA, {}, compared=()) as store:
        store.claim({}, [GRID])
        ran = what_ran(describe(pick_device(args.device)), command=args.line)
        about = {"folder": str(args.images), "ran": ran, **store.lists()}
        _report(args, images, subjects, how, about, prompt_groups(args.prompts))


def _check_measuring(args: argparse.Namespace) -> None:
    """Raises ValueError if --images comes with options that it would ignore, or with the folder of a run."""
    given = []
    for name, value in vars(args).items():
        if name not in MEASURING and value != args.default_of(name):
            given.append(_flag(name))
    if given:
        options = ", ".join(given)
        raise ValueError(f"--images measures existing images and does not sample: leave out {options}, or --images")
    if (args.out / MANIFEST).exists():
        raise ValueError(f"{args.out} holds the report of a run that sampled: give another --out")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _about_sampling(args: argparse.Namespace, engine: Engine, manifest: Mapping, summary: dict) -> dict:
    """The part of the report about sampling: settings, speed, and what ran."""
    summary.setdefault("machine", engine.describe())  # Ray's workers are on other machines
    ran = what_ran(summary["machine"], models_of(manifest, engine.runner), args.line)
    settings = dict(manifest)
    if not summary["images_made"]:  # an earlier run sampled, and its report has the speed
        summary = _earlier_sampling(args.out / RECORD, settings) or summary
    return {"settings": settings, "sampling": summary, "ran": ran}


def _earlier_sampling(path: Place, settings: dict) -> dict | None:
    """The summary of sampling in an earlier report of the same run, or None."""
    try:
        report = checked_json(path, {"sampling": {**SUMMARY, "processes": int}, "settings": dict}, "")
    except ValueError:
        return None
    if differences(report["settings"], settings):
        return None
    return report["sampling"]


def _prepare(args: argparse.Namespace, prompts: list[str] | None) -> tuple[Task, Evaluation]:
    """Everything that can fail before the first image: what is sampled, and how to measure it."""
    check_method(args)
    _check_extras(args, prompts is not None)
    task = _task(args, prompts)
    device, side = task.engine.device, task.engine.runner.image_size
    if device.index is not None:
        torch.cuda.set_device(device)
    target: Any = checkpoint_files(args.checkpoint)["target"]
    return task, _how_to_measure(args, (side, side), device, are_texts(task.subjects), space_of(target))


def _task(args: argparse.Namespace, prompts: list[str] | None) -> Task:
    engine = load_engine(args, args.max_batch)
    subjects: list[Any] = prompts or class_numbers(args.labels, engine)
    blank = request_of(args, None, args.seed, negative_prompt=args.negative_prompt)
    request = asking_for(blank, subjects[0])  # text-to-image models refuse a class
    return Task(engine, request, subjects, run_settings(args, engine.check(request)))


def _check_extras(args: argparse.Namespace, of_texts: bool) -> None:
    """Raises now the errors that CLIP's folder or the .npz would raise after sampling."""
    if args.clip and of_texts:
        check_clip(args.clip, args.device, of_texts)
    if args.npz:
        check_npz(args.npz)


def _how_to_measure(
    args: argparse.Namespace, size: tuple[int, int], device: torch.device | str, of_texts: bool, own: str | None
) -> Evaluation:
    """How to measure images, tried on a blank one: a wrong file must fail before hours of sampling.

    `own`: the space of the images' model, if that is bundled.
    """
    space = args.space or _usual_space(args, of_texts, own)
    how = Evaluation(space, args.weights, None, args.clip, args.dinov2, device)
    if space:
        how = how._replace(reference=reference_for(space, args.ref))
        check(how, *size)
    return how


def _usual_space(args: argparse.Namespace, of_texts: bool, own: str | None) -> str | None:
    """Inception's if its weights are given, or the bundled models' own. Of other images the size says nothing.

    None for other images of prompts, without --ref.
    """
    if own and not args.weights:
        return own
    return INCEPTION if args.weights or args.ref or not of_texts else None


def _measured(images: Images, subjects: Any, how: Evaluation, groups: Mapping) -> dict:
    """All measurements of images.

    Args:
        subjects: their classes or prompts, or None if they are not known. groups: of prompts, see `prompt_groups`.
    """
    of_texts, clip = are_texts(subjects), how.clip
    if how.space is None:
        values = unmeasured(len(images), "no feature space: give --ref, or --weights with Inception's file")
    else:
        with progress_bar(total=len(images), desc="measuring", unit=" image") as bar:
            labels = None if of_texts else subjects
            values = measure(Watched(images, bar), how, labels=labels, cycle=cycle_of(subjects))
    values |= {"clip_score": None, "clip_score_error": None, "clip": None, "cmmd_by": clip and clip.name}
    values["clip_score_by"] = {}
    if of_texts and clip is None:
        values["missing"]["clip_score"] = NO_MODEL
    elif clip is not None and of_texts:
        model = Clip(clip, how.device)
        with progress_bar(total=len(images), desc="by CLIP", unit=" image") as bar:
            scores = model.scores(Watched(images, bar), subjects)
        mean, error = mean_and_error(scores)
        values |= {"clip_score": mean, "clip_score_error": error, "clip": model.about}
        values["clip_score_by"] = {name: _by_group(scores, subjects, of) for name, of in groups.items()}
    return values


def _by_group(scores: Tensor, subjects: Sequence[str], group_of: Mapping[str, str]) -> dict[str, dict]:
    """The mean CLIP score of each group of prompts, with its standard error and its number of images."""
    found = {}
    for group in sorted(set(group_of.values())):
        inside = torch.tensor([group_of.get(prompt) == group for prompt in subjects])
        if not inside.any():
            continue
        mean, error = mean_and_error(scores[inside])
        found[group] = {"images": int(inside.sum()), "clip_score": mean, "clip_score_error": error}
    return found


def _report(
    args: argparse.Namespace,
    images: Images,
    subjects: list[Subject] | None,
    how: Evaluation,
    about: dict,
    groups: Mapping,
) -> None:
    """Measures the images, writes the report, and prints it. The arguments are those of `_measured`."""
    report = {
        "schema": EVALUATION_SCHEMA,
        "subjects_known": subjects is not None,
        "space": how.space,
        "weights": None,
        "reference": None,
        **_measured(images, subjects, how, groups),
        "largest_token": None,
        "exploded": None,
        "files": [GRID],
        **about,
    }
    reference, weights = how.reference, how.weights
    if weights:  # None: torch-fidelity's download, or the bundled classifier
        report["weights"] = {"name": weights.name, "fingerprint": file_fingerprint(weights)}
    if reference:
        report["reference"] = {"name": reference.name, "fingerprint": reference.fingerprint}
    write_json(args.out / RECORD, report)

    write_grid(args.out, images, subjects)
    print(format_evaluation(report))
    wrote = [f"{args.out / RECORD} (all numbers and settings)"]
    wrote.append(f"{args.out / GRID} (the first images)")
    if args.npz:
        export_npz(images, args.npz, subjects)
        wrote.append(f"{args.npz} (for ADM's evaluator)")
    print(f"wrote {', '.join(wrote)}")


# `cspd tune`: the fastest configuration on this machine, within limits.

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
    if divergence is not None:
        limits = {"divergence": divergence}
    else:
        limits = args.tolerance or {"fid": 0.02}
    engine = load_engine(args, args.max_batch)
    check_classes(engine, "cspd tune", "cspd compare --prompts FILE")
    models = {name: getattr(args, name) for name in MODEL}
    models = {name: value for name, value in models.items() if value is not None}
    request = request_of(args, family=family_of(args.checkpoint)).but(method="ar")
    baseline = Configuration("ar", request, engine, models)
    engine.check(request)
    labels = class_numbers(args.labels, engine)
    # the record of the run must name the files that each candidate's images depend on
    found, left_out = candidates(baseline, divergence)
    rows = []
    for row in (baseline, *found):
        files = run_settings(args, engine.check(row.request))
        rows.append(replace(row, files=files))
    baseline, *found = rows
    evaluation = how_to_evaluate(args, [baseline])
    _check_limits(limits, evaluation)

    def progress() -> str:
        written = len(list((args.out / CHUNKS).glob("*.npz")))
        return f"{written} chunks of images are in {args.out}/"

    print(f"{len(found)} candidates; looking for the fastest with {wanted(limits)}")
    with if_stopped(progress), comparison_store(args.out) as store:
        report, images = tune(
            baseline,
            found,
            labels,
            args.num,
            limits,
            store,
            evaluation,
            seed=args.seed,
            overwrite=args.overwrite,
            command=args.line,
        )
        tuned = report["tune"]
        chosen = next((row for row in found if row.name == tuned["chosen"]), None)
        tuned["left_out"] = left_out
        tuned["command"] = command(args, chosen) if chosen else None
        tuned["told"] = choice_told(report) if chosen else shortfall(report)
        written = write(report, images, args.out)
        write_json(args.out / TUNE, {"schema": TUNE_SCHEMA, **tuned})
    print(f"\nPareto front of {len(found)} candidates and ar, {report['images']} images of each:\n")
    print(front_table(report))
    names = ", ".join([*written, TUNE])
    print(f"\nwrote {names} to {args.out}/")
    # the files above say how near the candidates came
    if not chosen:
        raise ValueError(tuned["told"])
    print(f"\n{tuned['told']}\n\n  {tuned['command']}")


def _check_limits(limits: Mapping[str, float], evaluation: Evaluation) -> None:
    """Raises ValueError if images of these models have no value for a limit."""
    # a divergence is measured when a method is fitted, and needs no images
    if "divergence" in limits:
        return
    if evaluation.space is None:
        raise ValueError("--tolerance needs the features of Inception-v3 for these models: give --weights")
    if "fid" in limits and evaluation.reference is None:
        raise ValueError("--tolerance fid needs a reference: give --ref")
    if "accuracy" in limits and evaluation.space == INCEPTION:
        raise ValueError("--tolerance accuracy needs a classifier, which only bundled models have: leave it out")


def command(args: argparse.Namespace, row: Configuration) -> str:
    """The `cspd sample` command of a configuration."""
    words = ["cspd", "sample", "--method", str(row.request.method)]
    usual = {"checkpoint": "digits32", "device": "auto", "precision": "fp32"}
    settings = settings_of(row.request)
    options = {name: settings[name] for name in settings if name in option_names()}
    for file in args.plugin or ():
        words += ["--plugin", str(file)]
    models = {name: getattr(args, name) for name in MODEL}
    given = models | options | {"max_batch": args.max_batch}
    # flags at their defaults are left out; True and False become --name and --no-name
    for name, value in given.items():
        if value is None or value == usual.get(name):
            continue
        if value is True:
            words.append(_flag(name))
        elif value is not False:
            words += [_flag(name), str(value)]
        elif name in options or name == "graphs":  # True by default
            words.append(_flag(f"no_{name}"))
    return shlex.join(words)
