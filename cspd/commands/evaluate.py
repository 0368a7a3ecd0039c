"""`cspd evaluate`: how good many images are, and how fast they were made."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from cspd.commands.options import (
    check_method,
    load_engine,
    request_of,
    run_settings,
)
from cspd.commands.sample_folder import prompts_of
from cspd.commands.subjects import class_numbers, read_prompts
from cspd.engine import Engine
from cspd.evaluation.classifier import SPACES, space_of
from cspd.evaluation.clip import NO_MODEL, Clip, check_clip, mean_and_error
from cspd.evaluation.extractor import INCEPTION
from cspd.evaluation.images import GRID, ImageFolder, Watched, check_npz, export_npz
from cspd.evaluation.metrics import check, measure, unmeasured
from cspd.evaluation.processes import Processes
from cspd.evaluation.reference import reference_for
from cspd.evaluation.report import format_evaluation
from cspd.evaluation.run import sample_shards
from cspd.evaluation.shards import MANIFEST, RECORD, Shards, store_of
from cspd.evaluation.subjects import Subject, are_texts, asking_for, in_turn
from cspd.finding import checkpoint_files
from cspd.machine import describe, pick_device
from cspd.pixels import to_pil
from cspd.plots import grid
from cspd.ran import file_fingerprint, models_of, what_ran, without_folders
from cspd.records import NUMBER, misfit, read_json, write_json, write_png
from cspd.sequence import Request
from cspd.stopping import if_stopped
from cspd.store import Store, differences
from cspd.summary import MEASURES

SCHEMA = "cspd.evaluation/2"
SPEEDS = ("images_made", "processes", "seconds", "images_per_second")
COSTS = ("bound_per_image", "head_calls_per_image", "head_calls_per_token")
SAMPLING = {  # what is shown
    "guarantee": str,
    **dict.fromkeys((*SPEEDS, *COSTS), NUMBER),
    "step_compression?": NUMBER,
    **MEASURES,
}
SHOWN, COLUMNS = 100, 10  # images in the grid
MEASURES_ONLY = ("images", "out", "ref", "space", "weights", "clip", "prompts", "npz", "device")
MEASURING = {"command", "line", "default_of", *MEASURES_ONLY}  # not of sampling
USUAL_NUM = 500  # images of classes


def run(args: argparse.Namespace) -> None:
    processes = Processes()
    if args.images:
        if processes.rank == 0:
            _measure_folder(args)
        return
    prompts = read_prompts(args.prompts) if args.prompts else None
    args.num = args.num or (len(prompts) if prompts else USUAL_NUM)

    def made() -> str:
        return f"{Shards(args.out, args.num).images_there()} of {args.num} images are in {args.out}/"

    with if_stopped(made), store_of(args.out) as store:
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
    with Store(args.out, RECORD, SCHEMA, {}, re.escape(GRID), compared=()) as store:
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
    ran = what_ran(summary["machine"], models_of(manifest, engine.host), args.line)
    about = {"settings": without_folders(manifest), "sampling": summary, "ran": ran}
    return about if summary["images_made"] else about | _earlier_sampling(args.out / RECORD, manifest)


def _earlier_sampling(path: Path, manifest: dict) -> dict:
    """How fast the images were made, as an earlier report of the same run has it."""
    try:
        report = read_json(path)
    except (OSError, ValueError):  # it was cut off before it was measured
        return {}
    if misfit(report, {"sampling": SAMPLING, "settings": dict}):
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
    host = engine.host
    subjects = prompts or class_numbers(args.labels or range(host.num_classes) or [0], engine)
    blank = request_of(args, None, args.seed, negative_prompt=args.negative_prompt)
    request = asking_for(blank, subjects[0])  # models of texts say that they have no class
    settings, how = run_settings(args, engine.check(request)), {}
    if rank == 0:
        how = _how_to_measure(args, (host.image_size, host.image_size), engine.device, are_texts(subjects))
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
    """Inception's with its weights, or else the embedded models' own; of other images the first for their size.

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
    report = {"schema": SCHEMA, "space": how["space"], "weights": None, "reference": None, **values}
    report |= {"largest_token": None, "exploded": None, "files": [GRID], **about}
    if weights:  # None: torch-fidelity's download, or the embedded classifier
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
