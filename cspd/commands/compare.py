"""`cspd compare`: configurations side by side."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cspd.commands.options import (
    load_engine,
    request_of,
    run_settings,
)
from cspd.commands.subjects import class_numbers, read_prompts
from cspd.comparison.compare import compare
from cspd.comparison.page import write
from cspd.comparison.runs import CHUNKS, settings_of, store_of
from cspd.comparison.study import Configuration, configurations
from cspd.comparison.study_file import MODELS, RUN, SUBJECTS, named_entries, read_study
from cspd.comparison.tables import text_table
from cspd.evaluation import metrics
from cspd.evaluation.classifier import space_of
from cspd.evaluation.clip import check_clip
from cspd.evaluation.extractor import INCEPTION
from cspd.evaluation.reference import reference_for
from cspd.evaluation.subjects import asking_for
from cspd.families import DEFAULTS, EMBEDDED
from cspd.finding import checkpoint_files, family_of
from cspd.sequence import Request
from cspd.stopping import if_stopped

FILES = ("vae", "draft_checkpoint", "eagle", "text_encoder")  # among a row's models
RUN_DEFAULTS = dict.fromkeys(RUN) | {"num": 20, "labels": list(range(10)), "seed": 0, "max_batch": 4}


def run(args: argparse.Namespace) -> None:
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
        there = list((args.out / CHUNKS).glob("*.npz"))
        total = len(rows) * -(-num // settings["max_batch"])
        return f"{len(there)} of {total} chunks of images are in {args.out}/"

    with if_stopped(made), store_of(args.out) as store:
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
        common = {"checkpoint": EMBEDDED["MAR"]} | common
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
    for side in {row.engine.host.image_size for row in rows}:
        metrics.check(side, space=space, weights=args.weights, reference=reference, device=args.device)
    return {"space": space, "weights": args.weights, "reference": reference}
