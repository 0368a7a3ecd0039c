"""`cspd bench`: how fast this machine samples."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backend_bases import FigureCanvasBase

from cspd.bench import PUBLISHED, bench, format_report
from cspd.commands.options import load_engine, request_of, run_settings
from cspd.commands.subjects import check_classes
from cspd.engine import Engine
from cspd.evaluation.classifier import accuracy, load_classifier, space_of
from cspd.finding import checkpoint_files, family_of
from cspd.lookup import method_names, parse_method, with_method
from cspd.methods import METHODS
from cspd.ran import models_of, what_ran
from cspd.records import check_file, write_bytes, write_json
from cspd.scatter import Panel, Point, speed_quality
from cspd.sequence import Request


def _check_files(args: argparse.Namespace) -> None:
    """Raises ValueError or OSError where what is asked for cannot be written, before minutes of timing."""
    if args.json:
        check_file(args.json, "--json")
    if args.plot:
        check_file(args.plot, "--plot")
        formats = FigureCanvasBase.get_supported_filetypes()
        if _image_format(args.plot) not in formats:
            raise ValueError(f"--plot {args.plot}: give a name that ends in one of .{', .'.join(formats)}")
        if space_of(checkpoint_files(args.checkpoint)["target"]) is None:
            raise ValueError(f"--plot {args.plot}: only the embedded models' images have a classifier: leave it out")


def _image_format(path: Path) -> str:
    """What a picture's name says; PNG where it says nothing."""
    return path.suffix.removeprefix(".").lower() or "png"


def run(args: argparse.Namespace) -> None:
    _check_files(args)
    family = family_of(args.checkpoint)
    known = [m.name for m in METHODS if m.family == family and m.guarantee != "heuristic" and m.name != "ar"]
    names = args.methods or [*known, PUBLISHED]
    if "cspd" not in method_names([family]) and (args.gamma or args.verify):
        raise ValueError("--gamma, --verify: here of cspd; options of others follow their name, --methods sd:gamma=4")
    for name in names:
        parse_method(name, more=[PUBLISHED])  # a misspelt one is told before models are loaded
    target = load_engine(args, 1)
    check_classes(target, "cspd bench", "cspd compare --prompts FILE")
    settings = itertools.product(args.num_iter or [None], args.cfg or [None])
    requests = [request_of(args, num_iter=k, cfg=s, gamma=None, verify=None) for k, s in settings]
    settings = _files(args, target, requests[0], names)
    space = space_of(checkpoint_files(args.checkpoint)["target"])
    judge = None if space is None else functools.partial(accuracy, load_classifier(space))
    report = bench(
        target.with_slots,
        requests,
        args.batch,
        names,
        gammas=args.gamma or [8, 16],
        verify=args.verify or ["parallel"],
        runs=args.runs,
        queued=args.queued,
        accuracy=judge,
    )
    print(format_report(report))
    if args.json:
        ran = what_ran(report["machine"], models_of(settings, target.host), args.line)
        write_json(args.json, report | {"ran": ran})
        print(f"wrote {args.json}")
    if args.plot:
        write_bytes(args.plot, *speed_quality([_panel(report)], _image_format(args.plot)))
        print(f"wrote {args.plot}")


def _files(args: argparse.Namespace, target: Engine, request: Request, names: Sequence[str]) -> dict:
    """As `run_settings`, of all methods that are timed."""
    settings: dict = {}
    for name in ("ar", *names):
        method, options = parse_method(name, more=[PUBLISHED])
        if method != PUBLISHED:
            settings |= run_settings(args, target.check(with_method(request, method).but(**options)))
    return settings


def _panel(report: dict) -> Panel:
    """What `--plot` shows of a report: a line a method, in each case that was timed."""
    rows = [row for row in report["rows"] if "accuracy" in row]
    several = len({(row["batch"], row["cfg"]) for row in rows}) > 1
    points = []
    for row in rows:
        method, _, options = row["name"].partition(":")
        case = f", batch {row['batch']}, cfg {row['cfg']:g}" if several else ""
        speed = row["speed_up"]
        limits = speed["min"], speed["max"]
        guarantee = row.get("guarantee", "exact")  # the published sampler is
        points.append(Point(options, speed["median"], row["accuracy"], method + case, limits, guarantee=guarantee))
    return Panel("speed-up over plain sampling", "share recognised by the classifier", points)
