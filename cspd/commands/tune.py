"""`cspd tune`: the fastest way to sample on this machine, within limits."""

from __future__ import annotations

import argparse
import re
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cspd.commands.compare import add_judge_options, judge_of
from cspd.commands.options import (
    add_model_options,
    add_request_options,
    load_engine,
    request_of,
    run_settings,
)
from cspd.commands.subjects import CLASSES_HELP, check_classes, class_numbers
from cspd.comparison.candidates import candidates
from cspd.comparison.halving import FEWEST
from cspd.comparison.page import write
from cspd.comparison.runs import CHUNKS, TUNE, settings_of, store_of
from cspd.comparison.study import Configuration
from cspd.comparison.tune import tune
from cspd.comparison.verdict import choice_told, front_table, shortfall, wanted
from cspd.evaluation.extractor import INCEPTION
from cspd.finding import family_of
from cspd.option import option_names
from cspd.parsing import MOST, choice, count, label_list, place, seed, shortened, whole
from cspd.records import write_json
from cspd.stopping import if_stopped

SCHEMA = "cspd.tune/1"
METRICS = {"fid": "fid", "is": "inception_score", "accuracy": "accuracy"}
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
EPILOG = """\
examples:
  cspd tune --max-batch 64 --tolerance fid=2%,accuracy=1%
      for sampling many images: FID at most 2 % above plain sampling's, and at most 1 % fewer recognised
  cspd tune --max-batch 1 --num-iter 64 --exact --num 60
      for one image soon, of exactly plain sampling's distribution

All candidates make 20 images, the better third of them 60, and so on up to --num. Plain sampling (ar) by your settings
is what the limits are relative to; it is there once more by other seeds, to show what chance alone does.
"""


def add(commands: argparse._SubParsersAction) -> None:
    """Declares the command."""
    text = (
        "Searches methods, their settings and numbers of iterations for the fastest way to sample on this machine that"
        " keeps the limits. It prints the Pareto front of speed and quality and the command to run, and writes a report"
        " (report.html). A search that was cut off goes on where it was."
    )
    tuning = commands.add_parser(
        "tune",
        help="find the fastest settings for this machine within limits",
        description=textwrap.fill(text, 100),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tuning.set_defaults(run=run, method=None)
    group = tuning.add_argument_group("limits (one of them)").add_mutually_exclusive_group()
    group.add_argument(
        "--tolerance",
        type=tolerance,
        metavar="fid=2%",
        help="how much worse than plain sampling's: fid, is (Inception score), accuracy (share recognised), or several"
        " with commas (default: fid=2%%)",
    )
    group.add_argument(
        "--divergence",
        type=nats,
        metavar="D",
        help="only methods that are exact, or measured to be at most D nats per token from plain sampling's chains",
    )
    group.add_argument("--exact", action="store_true", help="only methods that keep plain sampling's distribution")
    add_model_options(tuning)
    group = tuning.add_argument_group("the search")
    group.add_argument("--labels", type=label_list, default="0-9", help=f"{CLASSES_HELP} (default: 0-9)")
    group.add_argument(
        "--num",
        type=whole(FEWEST, MOST),
        default=120,
        help="images of each configuration in the last rung (default: %(default)s)",
    )
    group.add_argument("--seed", type=seed, default=0, help="of the first image; the next has the next (default: 0)")
    group.add_argument("--max-batch", type=count, default=8, help="images in flight at once (default: %(default)s)")
    group.add_argument("--out", type=place, default=Path("tuning"), help="folder (default: %(default)s/)")
    group.add_argument("--overwrite", action="store_true", help="replace another run that is in --out")
    add_judge_options(tuning)
    add_request_options(tuning, only_common=True)


def tolerance(text: str) -> dict[str, float]:
    """ "fid=2%,accuracy=1%" to {"fid": 0.02, "accuracy": 0.01}."""
    limits = {}
    for part in text.split(","):
        name, _, amount = part.strip().partition("=")
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"{shortened(part)} limits nothing: {choice(name, METRICS)}, like fid=2%")
        if not re.fullmatch(r"\d{1,3}(\.\d{1,6})?%", amount, re.ASCII):
            raise argparse.ArgumentTypeError(f"{shortened(part)} is no percentage: write it like fid=2%")
        if METRICS[name] in limits:
            raise argparse.ArgumentTypeError(f"{shortened(text)} has {name} twice: give it once")
        limits[METRICS[name]] = float(amount[:-1]) / 100
    return limits


def nats(text: str) -> float:
    """A divergence."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:  # a NaN neither
        raise argparse.ArgumentTypeError(f"{shortened(text)} is no divergence: give nats per token above 0, like 0.5")
    return value


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
