"""`cspd bench`: how fast this machine samples."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from cspd.bench import bench, format_report
from cspd.commands.options import add_model_options, add_request_options, load_engine, request_of
from cspd.evaluation.classifier import accuracy as classifier_accuracy
from cspd.evaluation.classifier import load_classifier
from cspd.loading import checkpoint_files, embedded
from cspd.lookup import method_names
from cspd.methods import METHODS
from cspd.parsing import number_list
from cspd.plots import Point, speed_quality
from cspd.records import publishing, write_json


def add(commands: argparse._SubParsersAction) -> None:
    """Declares the command."""
    text = "Times sampling end to end on this machine, in one process, as speed-ups over plain sampling (ar)."
    timing = commands.add_parser("bench", help="time sampling on this machine", description=text, allow_abbrev=False)
    timing.set_defaults(run=run)
    add_model_options(timing)
    add_request_options(timing, several=("num_iter", "cfg", "gamma", "verify"))
    group = timing.add_argument_group("what to time")
    group.add_argument(
        "--methods",
        help="against ar: any of `cspd methods`, options after colons (cool-sd:delta=1.5:gamma=4), and published, the"
        " authors' sampler (default: speculative,published; of VQ models all methods)",
    )
    group.add_argument("--vq", action="store_true", help="the embedded VQ models: short for --checkpoint digits32_vq")
    group.add_argument("--batch", type=number_list, default="1,8", help="batch sizes (default: 1,8)")
    group.add_argument("--runs", type=int, default=5, help="timed runs of each (default: %(default)s)")
    group.add_argument(
        "--queued", type=int, help="also report the peak memory of this many requests at each batch size"
    )
    group.add_argument("--json", type=Path, help="also write the numbers here")
    group.add_argument("--plot", type=Path, metavar="PNG", help="also draw class accuracy against speed-up here")


def run(args: argparse.Namespace) -> None:
    if args.vq:
        args.checkpoint = "digits32_vq"
    target = load_engine(args, 1)
    family = target.host.family
    proved = [m.name for m in METHODS if m.family == family and m.guarantee != "heuristic" and m.name != "ar"]
    names = args.methods.split(",") if args.methods else [*proved, "published"]
    if "cspd" not in method_names([family]) and (args.gamma or args.verify):
        raise ValueError("--gamma, --verify: here of cspd; options of others follow their name, --methods sd:gamma=4")
    settings = itertools.product(args.num_iter or [None], args.cfg or [None])
    requests = [request_of(args, num_iter=k, cfg=s, gamma=None, verify=None) for k, s in settings]
    accuracy = None
    if checkpoint_files(args.checkpoint)["target"].parent.resolve() in map(Path.resolve, embedded().values()):
        classifier = load_classifier()
        accuracy = lambda images, labels: classifier_accuracy(classifier, images, labels)  # noqa: E731
    report = bench(
        target.with_slots,
        requests,
        args.batch,
        names,
        gammas=args.gamma or [8, 16],
        verify=args.verify or ["parallel"],
        runs=args.runs,
        queued=args.queued,
        accuracy=accuracy,
    )
    print(format_report(report))
    if args.json:
        write_json(args.json, report)
        print(f"wrote {args.json}")
    if args.plot:
        rows = [row for row in report["rows"] if "accuracy" in row]
        several = len({(row["batch"], row["cfg"]) for row in rows}) > 1
        points = []
        for row in rows:
            method, _, options = row["name"].partition(":")
            case = f", batch {row['batch']}, cfg {row['cfg']:g}" if several else ""
            speed = row["speed_up"]
            limits = speed["min"], speed["max"]
            points.append(Point(options, speed["median"], row["accuracy"], method + case, limits))
        panels = [("speed-up over plain sampling", "share recognised by the classifier", points)]
        with publishing(args.plot) as temporary:
            speed_quality(panels, temporary, args.plot.suffix.removeprefix(".") or "png")
        print(f"wrote {args.plot}")
