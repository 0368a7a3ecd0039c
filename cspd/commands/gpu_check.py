"""`cspd gpu-check`: whether all is right on this GPU, and how fast it is."""

from __future__ import annotations

import argparse
from pathlib import Path

from cspd.gpu_check.run import failures, read_report
from cspd.gpu_check.run import run as check
from cspd.gpu_check.tables import format_report
from cspd.machine import pick_device
from cspd.parsing import place, whole
from cspd.records import check_file
from cspd.stopping import if_stopped

MOST_MINUTES = 24 * 60


def add(commands: argparse._SubParsersAction) -> None:
    """Declares the command."""
    text = (
        "Checks that a GPU computes what a CPU does, that no round waits for the host, and times all sizes with random"
        " weights; no files are needed. Every result is in --out as soon as it is there. The same command goes on where"
        " it was cut off. It exits with 1 where something failed."
    )
    checking = commands.add_parser("gpu-check", help="check and time everything on this GPU", description=text)
    checking.set_defaults(run=run)
    checking.add_argument("--out", type=place, default=Path("gpu.json"), help="the report (default: %(default)s)")
    checking.add_argument(
        "--minutes",
        type=whole(1, MOST_MINUTES),
        default=9,
        help="for all of it; what does not fit is left out, and said (default: %(default)s)",
    )
    checking.add_argument("--tiny", action="store_true", help="small models, in seconds, on a CPU too: try the command")
    checking.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    checking.add_argument("--overwrite", action="store_true", help="begin anew where --out is there")
    checking.add_argument("--show", type=place, metavar="FILE", help="print the tables of this report, and do nothing")


def run(args: argparse.Namespace) -> int:
    if args.show:
        report = read_report(args.show)
        print(format_report(report))
        return int(bool(failures(report)))
    device = pick_device(args.device)
    if device.type == "cpu" and not args.tiny:
        raise ValueError("there is no GPU, and official sizes take hours on a CPU: give --tiny to try the command")
    check_file(args.out, "--out")
    with if_stopped(lambda: f"what was found is in {args.out}"):
        report = check(args.out, device, tiny=args.tiny, minutes=args.minutes, overwrite=args.overwrite)
    print(format_report(report))
    print(f"wrote {args.out}")
    return int(bool(failures(report)))
