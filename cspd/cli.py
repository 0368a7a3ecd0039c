"""The command line: `cspd sample | bench | methods`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import cspd
from cspd.bench import bench, format_report
from cspd.loading import checkpoint_files, load
from cspd.methods import METHODS, format_table
from cspd.precision import POLICIES
from cspd.sampling import RECORD, sample_to_folder, write_json
from cspd.sequence import Request
from cspd.validation import GUIDANCE_SCHEDULES
from mar.registry import MARS

EPILOG = """\
examples:
  cspd sample --labels 0-9 --num 40 --out samples/
      40 images of the embedded digits model: PNGs, grid.png and samples.json
  cspd sample --checkpoint pretrained/mar_large --vae pretrained/kl16.ckpt --labels 207,360 --num 8 --out dogs/
      an official MAR checkpoint (checkpoints/README.md says where to get one)
  cspd bench --batch 1,8
      how fast this machine is, against MAR's sampler as published
  cspd methods
      what can be run, and what each method guarantees
"""


def number_list(text: str) -> list[int]:
    """ "0-3,7" to [0, 1, 2, 3, 7]."""
    numbers = []
    try:
        for part in text.split(","):
            low, dash, high = part.partition("-")
            numbers.extend(range(int(low), int(high if dash else low) + 1))
    except ValueError:
        numbers = []
    if not numbers:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers: write it like 0-9 or 1,5,7-9")
    return numbers


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--checkpoint",
        default="digits32",
        help="an embedded name (digits32), a folder with official files, or a target's file (default: %(default)s)",
    )
    group.add_argument("--arch", choices=MARS, help="the target's size (default: found out from the file)")
    group.add_argument("--vae", type=Path, help="the autoencoder's file, where it is not beside the target")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    policies = "; ".join(f"{name}: {text}" for name, text in POLICIES.items())
    group.add_argument("--precision", default="fp32", choices=POLICIES, help=f"(default: %(default)s) {policies}")
    group.add_argument("--threads", type=positive, help="CPU threads (default: torch's)")


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("decoding (default: what the model's authors published)")
    group.add_argument("--method", default="ar", choices=METHODS, help="see `cspd methods` (default: %(default)s)")
    group.add_argument("--num-iter", type=int, metavar="K", help="autoregressive iterations, 1 .. number of tokens")
    group.add_argument("--cfg", type=float, metavar="S", help="guidance scale; 1 is no guidance")
    group.add_argument("--cfg-schedule", choices=GUIDANCE_SCHEDULES, help="how guidance runs over the iterations")
    group.add_argument("--temperature", type=float, metavar="TAU", help="multiplies the noise of the denoising steps")
    group.add_argument("--num-sampling-steps", type=int, metavar="T", help="denoising steps a token")


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="cspd",
        description="Fast autoregressive image generation that does not change what is generated.",
        epilog=EPILOG,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"cspd {cspd.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    text = "Generates images of classes into a folder; a run that was cut off goes on where it was."
    sample = commands.add_parser("sample", help="generate images into a folder", description=text)
    sample.set_defaults(run=_sample)
    _add_model_options(sample)
    _add_request_options(sample)
    group = sample.add_argument_group("what to make")
    group.add_argument("--labels", type=number_list, default="0-9", help="classes, like 0-9 or 1,5,7-9 (default: 0-9)")
    group.add_argument("--num", type=int, help="images in all; the labels take turns (default: one a label)")
    group.add_argument("--seed", type=int, default=0, help="of the first image; the next has the next (default: 0)")
    group.add_argument("--max-batch", type=int, default=8, help="images in flight at once (default: %(default)s)")
    group.add_argument("--out", type=Path, default=Path("samples"), help="folder (default: %(default)s/)")
    group.add_argument("--overwrite", action="store_true", help="replace another run that is in --out")

    text = "Times sampling end to end on this machine, in one process, against MAR's sampler as published."
    timing = commands.add_parser("bench", help="time sampling on this machine", description=text)
    timing.set_defaults(run=_bench)
    _add_model_options(timing)
    _add_request_options(timing)
    group = timing.add_argument_group("what to time")
    group.add_argument("--batch", type=number_list, default="1,8", help="batch sizes (default: 1,8)")
    group.add_argument("--runs", type=int, default=5, help="timed runs of each (default: %(default)s)")
    group.add_argument(
        "--queued", type=int, help="also report the peak memory of this many requests at each batch size"
    )
    group.add_argument("--no-reference", action="store_true", help="leave the published sampler out")
    group.add_argument("--json", type=Path, help="also write the numbers here")

    table = commands.add_parser("methods", help="list the methods and their guarantees")
    table.set_defaults(run=lambda args: print(format_table()))
    return parser


def _request(args: argparse.Namespace, label: int, seed: int) -> Request:
    names = ("method", "num_iter", "cfg", "cfg_schedule", "temperature", "num_sampling_steps")
    return Request(label=label, seed=seed, **{name: getattr(args, name) for name in names})


def _load(args: argparse.Namespace, max_batch: int) -> cspd.Engine:
    if args.threads:
        torch.set_num_threads(args.threads)
    return load(
        args.checkpoint,
        arch=args.arch,
        vae=args.vae,
        max_batch=max_batch,
        device=args.device,
        precision=args.precision,
    )


def _sample(args: argparse.Namespace) -> None:
    num = len(args.labels) if args.num is None else args.num
    if num < 1:
        raise ValueError(f"--num {num} makes no image: give 1 or more")
    engine = _load(args, min(args.max_batch, num))
    labels = (args.labels[i % len(args.labels)] for i in range(num))
    requests = [_request(args, label, args.seed + i) for i, label in enumerate(labels)]
    files = checkpoint_files(args.checkpoint)
    settings = {"version": cspd.__version__, "precision": args.precision}
    for name, file in (("target", files["target"]), ("vae", args.vae or files["vae"])):
        file = file.resolve()
        settings[name] = {"file": str(file), "bytes": file.stat().st_size, "modified": file.stat().st_mtime_ns}
    record = sample_to_folder(engine, requests, args.out, settings, overwrite=args.overwrite)
    summary = record["summary"]
    seconds = summary["seconds_by_phase"]
    phases = ", ".join(f"{name} {spent / sum(seconds.values()):.0%}" for name, spent in seconds.items())
    if summary["images_made"]:
        speed = f"{summary['seconds']:.1f} s: {summary['images_per_second']:.2f} images/s"
        print(f"{summary['images_made']} images in {speed}")
    else:
        print(f"all {num} images were there already")
    print(
        f"per image: {summary['iterations_per_image']:.0f} iterations,"
        f" {summary['backbone_calls_per_image']:.0f} backbone calls,"
        f" {summary['head_calls_per_image']:.0f} sequential head calls; time: {phases}"
    )
    print(f"wrote {args.out / 'grid.png'} (all images), {args.out / RECORD} (settings, statistics), {num} PNGs")


def _bench(args: argparse.Namespace) -> None:
    engine = _load(args, max(args.batch))
    report = bench(
        engine, _request(args, 0, 0), args.batch, runs=args.runs, reference=not args.no_reference, queued=args.queued
    )
    print(format_report(report))
    if args.json:
        write_json(args.json, report)
        print(f"wrote {args.json}")


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, or 2 after an error of the user's, which is printed in one line."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        print(f"cspd: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        more = "; the same command goes on from here" if args.command == "sample" else ""
        print(f"cspd: stopped{more}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
