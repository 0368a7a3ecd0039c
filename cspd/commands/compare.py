"""`cspd compare`: methods side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from cspd.compare import compare, format_comparison
from cspd.methods import DEFAULTS
from cspd.options import add_model_options, add_request_options, load_engine, number_list, request_of


def add(commands: argparse._SubParsersAction) -> None:
    """Declares the command."""
    text = "Generates the same seeds by several methods, the first being the baseline of speed and law."
    comparison = commands.add_parser(
        "compare", help="methods side by side, on the same seeds", description=text, allow_abbrev=False
    )
    comparison.set_defaults(run=run)
    add_model_options(comparison)
    group = comparison.add_argument_group("what to compare")
    group.add_argument("--methods", help="(default: ar,speculative; of VQ models ar,sjd-pac)")
    group.add_argument("--labels", type=number_list, default="0-9", help="classes, like 0-9 or 1,5,7-9 (default: 0-9)")
    group.add_argument("--num", type=int, default=20, help="images of each; the labels take turns (default: 20)")
    group.add_argument("--seed", type=int, default=0, help="of the first image; the next has the next (default: 0)")
    group.add_argument("--max-batch", type=int, default=4, help="images in flight at once (default: %(default)s)")
    group.add_argument("--out", type=Path, default=Path("comparison"), help="folder (default: %(default)s/)")
    add_request_options(comparison)


def run(args: argparse.Namespace) -> None:
    engine = load_engine(args, args.max_batch)
    requests = [request_of(args, args.labels[i % len(args.labels)], args.seed + i) for i in range(args.num)]
    methods = args.methods.split(",") if args.methods else ["ar", DEFAULTS[engine.host.family]]
    report = compare(engine, requests, methods, args.out)
    print(format_comparison(report))
    print(f"wrote {args.out / 'comparison.png'} (a row a method), {args.out / 'comparison.json'}")
