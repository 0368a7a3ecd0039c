"""`cspd gpu-check`: whether all is right on this GPU, and how fast it is."""

from __future__ import annotations

import argparse

from cspd.gpu_check.parts import PARTS
from cspd.gpu_check.run import failures, read_report
from cspd.gpu_check.run import run as check
from cspd.gpu_check.tables import format_report
from cspd.machine import pick_device
from cspd.records import check_file
from cspd.stopping import if_stopped

MOST_MINUTES = 24 * 60


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
        report = check(args.out, device, PARTS, tiny=args.tiny, minutes=args.minutes, overwrite=args.overwrite)
    print(format_report(report))
    print(f"wrote {args.out}")
    return int(bool(failures(report)))
