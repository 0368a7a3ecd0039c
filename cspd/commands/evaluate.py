"""`cspd evaluate`: how good many images are, and how fast they were made."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from cspd.commands.options import (
    CLASSES_HELP,
    add_method_option,
    add_model_options,
    add_request_options,
    check_method,
    class_numbers,
    load_engine,
    request_of,
    run_settings,
)
from cspd.engine import Engine
from cspd.evaluation.classifier import SPACES, space_of
from cspd.evaluation.extractor import INCEPTION
from cspd.evaluation.images import GRID, ImageFolder, Watched, check_npz, export_npz
from cspd.evaluation.metrics import check, measure
from cspd.evaluation.processes import Processes
from cspd.evaluation.reference import reference_for
from cspd.evaluation.run import sample_shards
from cspd.evaluation.shards import EXPLODED, MANIFEST, RECORD, Shards, store_of
from cspd.machine import describe, pick_device
from cspd.parsing import count, label_list, place, seed
from cspd.pixels import to_pil
from cspd.plots import grid
from cspd.ran import file_fingerprint, model_line, models_of, what_ran, without_folders
from cspd.records import NUMBER, misfit, read_json, write_json, write_png
from cspd.sequence import Request
from cspd.stopping import if_stopped
from cspd.store import Store
from cspd.summary import MEASURES, measured_lines

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
MEASURING = {"command", "line", "run", "images", "out", "ref", "space", "weights", "npz", "device"}  # not of sampling
DESCRIPTION = (
    "Samples images, or takes a folder of them, and measures them: FID, Inception score, KID, precision, recall and"
    " class accuracy. The labels take turns, and image i has seed SEED + i. The same command goes on where a run was"
    " cut off, with any number of processes (torchrun --nproc_per_node=8 -m cspd.cli evaluate ..., docs/evaluate.md)."
)


def add(commands: argparse._SubParsersAction) -> None:
    """Declares the command."""
    evaluate = commands.add_parser(
        "evaluate",
        help="FID, IS, KID, precision and recall of many images",
        description=DESCRIPTION,
    )
    evaluate.set_defaults(run=functools.partial(run, default=evaluate.get_default))
    group = evaluate.add_argument_group("images")
    group.add_argument(
        "--num",
        "--num-images",  # torchrun takes --num for a short form of its own --numa-binding
        type=count,
        default=500,
        help="how many (default: %(default)s; in papers 50000); under torchrun write --num-images",
    )
    group.add_argument("--labels", type=label_list, help=f"{CLASSES_HELP} (default: all of the model)")
    group.add_argument("--seed", type=seed, default=0, help="of the first image; the next has the next (default: 0)")
    group.add_argument("--max-batch", type=count, default=8, help="in flight at once (default: %(default)s)")
    group.add_argument(
        "--out", type=place, default=Path("evaluation"), help="folder for images and numbers (default: %(default)s/)"
    )
    group.add_argument("--overwrite", action="store_true", help="start anew, without the images that are in --out")
    group.add_argument(
        "--images",
        type=place,
        metavar="FOLDER",
        help="measure these PNGs and sample none; their classes are known if `cspd sample` named them",
    )
    group = evaluate.add_argument_group("measures")
    group.add_argument(
        "--ref",
        type=place,
        help="what to compare with: an .npz with mu and sigma (for FID) or with images in arr_0 (for KID, precision and"
        " recall too), as ADM's, or a folder of images (default: the embedded models' training data, or none)",
    )
    group.add_argument(
        "--space",
        choices=[*SPACES, INCEPTION],
        help="of features: an embedded classifier's, or Inception-v3's (default: the embedded models' own, of other"
        " images the one for their size, such as digits for 32x32, else inception)",
    )
    group.add_argument(
        "--weights", type=place, help="Inception-v3 as torch-fidelity publishes it (default: its own download)"
    )
    group.add_argument("--npz", type=place, metavar="FILE", help="also write the images as ADM's evaluator reads them")
    add_model_options(evaluate)
    add_method_option(evaluate)
    add_request_options(evaluate)


def run(args: argparse.Namespace, default: Callable[[str], object]) -> None:
    processes = Processes()
    if args.images:
        if processes.rank == 0:
            _check_measuring(args, default)
            images = ImageFolder(args.images)
            how = _how_to_measure(args, images.shape[1:], args.device)
            with Store(args.out, RECORD, SCHEMA, {}, re.escape(GRID), compared=()) as store:
                store.claim({}, [GRID])
                ran = what_ran(describe(pick_device(args.device)), command=args.line)
                _report(args, images, images.labels, how, {"folder": str(args.images), "ran": ran})
        return

    def made() -> str:
        return f"{Shards(args.out, args.num).images_there()} of {args.num} images are in {args.out}/"

    with if_stopped(made), store_of(args.out) as store:
        with processes:
            args.device = processes.device(args.device)
            engine, request, labels, settings, how = processes.together(lambda: _prepare(args, processes.rank))
            shards, manifest, summary = sample_shards(
                engine, request, labels, args.num, store, settings, processes, overwrite=args.overwrite
            )
        if processes.rank == 0:
            summary["machine"] = engine.describe()
            ran = what_ran(summary["machine"], models_of(manifest, engine.host), args.line)
            about = {"settings": without_folders(manifest), "sampling": summary, "ran": ran}
            if not summary["images_made"]:
                about |= _earlier_sampling(args.out / RECORD, manifest)
            about |= shards.largest_tokens()
            _report(args, shards, shards.labels(), how, about)


def _check_measuring(args: argparse.Namespace, default: Callable[[str], object]) -> None:
    """Raises ValueError where --images comes with what it would ignore, or with the folder of a run."""
    given = [name for name, value in vars(args).items() if name not in MEASURING and value != default(name)]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--images samples none: leave out {options}, or --images")
    if (args.out / MANIFEST).exists():
        raise ValueError(f"{args.out} holds the report of a run that sampled: give another --out")


def _earlier_sampling(path: Path, manifest: dict) -> dict:
    """How fast the images were made, as an earlier report of the same run has it."""
    try:
        report = read_json(path)
    except (OSError, ValueError):  # it was cut off before it was measured
        return {}
    if misfit(report, {"sampling": SAMPLING, "settings": dict}):
        return {}
    is_same = without_folders(report["settings"]) == without_folders(manifest)
    return {"sampling": report["sampling"]} if is_same else {}


def _prepare(args: argparse.Namespace, rank: int) -> tuple[Engine, Request, list[int], dict, dict]:
    """All that can fail before the first image."""
    check_method(args)
    engine = load_engine(args, args.max_batch)
    if engine.device.index is not None:
        torch.cuda.set_device(engine.device)
    host = engine.host
    labels = class_numbers(
        args.labels or range(host.num_classes) or [0], engine
    )  # models of texts say that they have no class
    request = request_of(args, labels[0], args.seed)
    settings, how = run_settings(args, engine.check(request)), {}
    if rank == 0:
        how = _how_to_measure(args, (host.image_size, host.image_size), engine.device)
    return engine, request, labels, settings, how


def _how_to_measure(args: argparse.Namespace, size: tuple[int, int], device: torch.device | str) -> dict:
    """What `measure` is told, tried out on nothing: hours of sampling are not to end in a wrong file."""
    space = args.space or _usual_space(args, size)
    reference = reference_for(space, args.ref)
    how = {"space": space, "weights": args.weights, "reference": reference, "device": device}
    check(*size, **how)
    if args.npz:
        check_npz(args.npz)
    return how


def _usual_space(args: argparse.Namespace, size: tuple[int, int]) -> str:
    """The embedded models' own space; of other images the first for their size, or Inception's where there is none."""
    own = None if args.images else space_of(args.checkpoint)
    fitting = [name for name, space in SPACES.items() if size == (space.sizes.size, space.sizes.size)]
    return own or next(iter(fitting), INCEPTION)


def _report(args: argparse.Namespace, images: Dataset, labels: list[int] | None, how: dict, about: dict) -> None:
    """Measures the images, writes what is known of them, and prints it."""
    with tqdm(total=len(images), desc="measuring", unit=" image") as bar:
        values = measure(Watched(images, bar), labels=labels, **how)
    reference, weights = how["reference"], how["weights"]
    report = {"schema": SCHEMA, "space": how["space"], "weights": None, "reference": None, **values}
    report |= {"largest_token": None, "exploded": None, "files": [GRID], **about}
    if weights:  # None: torch-fidelity's download, or the embedded classifier
        report["weights"] = {"name": weights.name, "fingerprint": file_fingerprint(weights)}
    if reference:
        report["reference"] = {"name": reference.name, "fingerprint": reference.fingerprint}
    write_json(args.out / RECORD, report)
    shown = [to_pil(images[i]) for i in range(min(SHOWN, len(images)))]
    captions = [str(label) for label in (labels or [""] * len(shown))[:SHOWN]]
    write_png(args.out / GRID, grid(shown, captions, min(COLUMNS, len(shown))))
    print(format_evaluation(report))
    wrote = [f"{args.out / RECORD} (all numbers and settings)", f"{args.out / GRID} (the first images)"]
    if args.npz:
        export_npz(images, args.npz)
        wrote.append(f"{args.npz} (for ADM's evaluator)")
    print(f"wrote {', '.join(wrote)}")


def format_evaluation(report: dict) -> str:
    """The report as text, a line a number."""
    reference, sampling = report["reference"], report.get("sampling")
    against = f"against {reference['name']} ({reference['fingerprint'][:12]})" if reference else ""
    lines = [("images", f"{report['num']:,}", f"{report['space']} space {against}")]
    spread = "" if report["inception_score_std"] is None else f"+- {report['inception_score_std']:.3f} over ten parts"
    recognised = "recognised as their class"
    if report["accuracy_ci95"] is not None:
        low, high = report["accuracy_ci95"]
        recognised += f", 95 % interval {low:.1%} to {high:.1%}"
    for name, form, note in (
        ("fid", ".3f", ""),
        ("inception_score", ".3f", spread),
        ("kid", ".5f", ""),
        ("precision", ".3f", ""),
        ("recall", ".3f", ""),
        ("accuracy", ".1%", recognised),
    ):
        value = report[name]
        title = name.upper() if len(name) == 3 else name.replace("_", " ")
        lines.append((title, "-" if value is None else format(value, form), report["missing"].get(name, note)))
    if report["largest_token"] is not None:
        exploded = f"{report['exploded']} of {report['num']:,} images exploded (a token beyond {EXPLODED:g})"
        lines.append(("largest token", f"{report['largest_token']:.2f}", exploded))
    if sampling:
        request = report["settings"]["request"]
        start = request.get("first_timestep")
        chains = f", chains from timestep {start}" if start is not None else ""
        lines.append(("method", request["method"], sampling["guarantee"] + chains))
        if "step_compression" in sampling:
            lines.append(("codes a forward", f"{sampling['step_compression']:.2f}", ""))
        else:
            calls = f"{sampling['head_calls_per_image']:.0f} an image"
            lines.append(("head calls a token", f"{sampling['head_calls_per_token']:.1f}", calls))
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
    lines += [(model["role"], "", model_line(model)) for model in report["ran"]["models"]]
    machine = report["ran"]["machine"]
    lines.append(("machine", "", f"{machine['device']}, threads: {machine['threads']}"))
    return "\n".join(f"{title:<18} {value:>10}  {note}".rstrip() for title, value, note in lines)
