"""`cspd tune`: the fastest way to sample on this machine, within limits."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import replace

from cspd.commands.compare import judge_of
from cspd.commands.options import (
    load_engine,
    request_of,
    run_settings,
)
from cspd.commands.subjects import check_classes, class_numbers
from cspd.comparison.candidates import candidates
from cspd.comparison.page import write
from cspd.comparison.runs import CHUNKS, TUNE, settings_of, store_of
from cspd.comparison.study import Configuration
from cspd.comparison.tune import tune
from cspd.comparison.verdict import choice_told, front_table, shortfall, wanted
from cspd.evaluation.extractor import INCEPTION
from cspd.finding import family_of
from cspd.option import option_names
from cspd.records import write_json
from cspd.stopping import if_stopped

SCHEMA = "cspd.tune/1"
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


def run(args: argparse.Namespace) -> None:
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
    with if_stopped(made), store_of(args.out) as store:
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
        write_json(args.out / TUNE, {"schema": SCHEMA, **tuned})
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
        raise ValueError("--tolerance accuracy: only the embedded models' images have a classifier: leave it out")


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
