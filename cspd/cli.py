"""The command line: `cspd sample | compare | bench | calibrate | methods`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path

import torch

import cspd
from cspd.bench import bench, format_report
from cspd.calibration import DRAFTS, WINDOWS, user_cache
from cspd.compare import compare, format_comparison
from cspd.continuous import cspd as cspd_method
from cspd.evaluation.classifier import accuracy as classifier_accuracy
from cspd.evaluation.classifier import load_classifier
from cspd.loading import checkpoint_files, load
from cspd.methods import DEFAULT, METHODS, format_table
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
  cspd compare --methods ar,speculative --num 20 --out comparison/
      the same seeds by two methods: speed, head calls, whether the laws differ, a picture
  cspd bench --num-iter 64,16 --cfg 1,3 --batch 1,8
      how fast this machine is, against plain MAR and MAR's sampler as published
  cspd calibrate --checkpoint pretrained/mar_large --vae pretrained/kl16.ckpt
      what `speculative` does on first use, ahead of time
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


def float_list(text: str) -> list[float]:
    """ "1,3" to [1.0, 3.0]."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers: write it like 1,3") from None


def verify_list(text: str) -> list[str]:
    """ "parallel,sequential" to its parts."""
    if not set(text.split(",")) <= set(cspd_method.VERIFY):
        raise argparse.ArgumentTypeError(f"{text!r}: give some of {','.join(cspd_method.VERIFY)}")
    return text.split(",")


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
    group.add_argument(
        "--draft-checkpoint",
        type=Path,
        metavar="FILE",
        help="a smaller MAR, for cspd, where it is not beside the target",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    policies = "; ".join(f"{name}: {text}" for name, text in POLICIES.items())
    group.add_argument("--precision", default="fp32", choices=POLICIES, help=f"(default: %(default)s) {policies}")
    group.add_argument(
        "--compile", action="store_true", help="compile speculative rounds: half a minute on first use, then faster"
    )
    group.add_argument("--threads", type=positive, help="CPU threads (default: torch's)")


def _add_request_options(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Options of a request; `several` values of K, guidance, gamma and verify where settings are swept."""
    one = {"type": int}, {"type": float}, {"type": int}, {"choices": cspd_method.VERIFY}
    lists = (
        {"type": number_list},
        {"type": float_list},
        {"type": number_list, "default": [8, 16]},
        {"type": verify_list},
    )
    num_iter, cfg, gamma, verify = lists if several else one
    group = parser.add_argument_group("decoding (default: what the model's authors published)")
    group.add_argument(
        "--num-iter",
        metavar="K",
        help="autoregressive iterations, 1 .. number of tokens (of cspd: its guidance and prefill)",
        **num_iter,
    )
    group.add_argument("--cfg", metavar="S", help="guidance scale; 1 is no guidance", **cfg)
    group.add_argument("--cfg-schedule", choices=GUIDANCE_SCHEDULES, help="how guidance runs over the iterations")
    group.add_argument("--temperature", type=float, metavar="TAU", help="multiplies the noise of the denoising steps")
    group.add_argument("--num-sampling-steps", type=int, metavar="T", help="denoising steps a token")
    group = parser.add_argument_group("speculative (the image depends on these, its law does not)")
    group.add_argument(
        "--window",
        type=int,
        metavar="W",
        help="denoising steps drafted ahead (default: this device's fastest; 0: none)",
    )
    drafts = "; ".join(f"{name}: {text}" for name, text in DRAFTS.items())
    group.add_argument(
        "--draft", choices=DRAFTS, help=f"how the head's output is guessed (default: calibrated) {drafts}"
    )
    group = parser.add_argument_group("cspd")
    group.add_argument("--gamma", help=f"tokens drafted a round (default: {'8,16' if several else '8'})", **gamma)
    group.add_argument(
        "--verify",
        help="parallel: from the verified prefix; sequential: after each other (default: parallel)",
        **verify,
    )
    group.add_argument(
        "--ratio-temperature",
        type=float,
        metavar="X",
        help="tempers the last step's ratio (default: 42; 1: the paper's)",
    )
    group.add_argument("--no-align", action="store_true", help="draft and target denoise with noise of their own")
    group.add_argument(
        "--prefill", type=float, metavar="P", help="share of tokens the target makes first (default: 0.05)"
    )
    group.add_argument("--chains", choices=cspd_method.CHAINS, help="how both models denoise (default: ancestral)")


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
    sample = commands.add_parser("sample", help="generate images into a folder", description=text, allow_abbrev=False)
    sample.set_defaults(run=_sample)
    _add_model_options(sample)
    group = sample.add_argument_group("method")
    group.add_argument("--method", default=DEFAULT, choices=METHODS, help="see `cspd methods` (default: %(default)s)")
    _add_request_options(sample)
    group = sample.add_argument_group("what to make")
    group.add_argument("--labels", type=number_list, default="0-9", help="classes, like 0-9 or 1,5,7-9 (default: 0-9)")
    group.add_argument("--num", type=int, help="images in all; the labels take turns (default: one a label)")
    group.add_argument("--seed", type=int, default=0, help="of the first image; the next has the next (default: 0)")
    group.add_argument("--max-batch", type=int, default=8, help="images in flight at once (default: %(default)s)")
    group.add_argument("--out", type=Path, default=Path("samples"), help="folder (default: %(default)s/)")
    group.add_argument("--overwrite", action="store_true", help="replace another run that is in --out")
    group.add_argument("--heatmap", action="store_true", help="also write heatmap.png: what each token cost")

    text = "Generates the same seeds by several methods, the first being the baseline of speed and law."
    comparison = commands.add_parser(
        "compare", help="methods side by side, on the same seeds", description=text, allow_abbrev=False
    )
    comparison.set_defaults(run=_compare)
    _add_model_options(comparison)
    group = comparison.add_argument_group("what to compare")
    group.add_argument("--methods", default="ar,speculative", help="(default: %(default)s)")
    group.add_argument("--labels", type=number_list, default="0-9", help="classes, like 0-9 or 1,5,7-9 (default: 0-9)")
    group.add_argument("--num", type=int, default=20, help="images of each; the labels take turns (default: 20)")
    group.add_argument("--seed", type=int, default=0, help="of the first image; the next has the next (default: 0)")
    group.add_argument("--max-batch", type=int, default=4, help="images in flight at once (default: %(default)s)")
    group.add_argument("--out", type=Path, default=Path("comparison"), help="folder (default: %(default)s/)")
    _add_request_options(comparison)

    text = (
        "Times sampling end to end on this machine, in one process, as speed-ups over plain MAR at the same settings."
    )
    timing = commands.add_parser("bench", help="time sampling on this machine", description=text, allow_abbrev=False)
    timing.set_defaults(run=_bench)
    _add_model_options(timing)
    _add_request_options(timing, several=True)
    group = timing.add_argument_group("what to time")
    group.add_argument(
        "--methods",
        default="speculative,published",
        help="against ar: any of `cspd methods`, and published, MAR's sampler as published (default: %(default)s)",
    )
    group.add_argument("--batch", type=number_list, default="1,8", help="batch sizes (default: 1,8)")
    group.add_argument("--runs", type=int, default=5, help="timed runs of each (default: %(default)s)")
    group.add_argument(
        "--queued", type=int, help="also report the peak memory of this many requests at each batch size"
    )
    group.add_argument("--json", type=Path, help="also write the numbers here")

    text = "Fits the drafts of `speculative` for these settings, measures this device, and shows what both give."
    calibrate = commands.add_parser(
        "calibrate", help="prepare `speculative` ahead of time", description=text, allow_abbrev=False
    )
    calibrate.set_defaults(run=_calibrate)
    _add_model_options(calibrate)
    _add_request_options(calibrate)
    calibrate.add_argument("--force", action="store_true", help="measure this device again")

    table = commands.add_parser("methods", help="list the methods and their guarantees")
    table.set_defaults(run=lambda args: print(format_table()))
    return parser


def _request(args: argparse.Namespace, label: int = 0, seed: int = 0, **changes: object) -> Request:
    names = [f.name for f in dataclasses.fields(Request) if hasattr(args, f.name)]
    settings = {name: getattr(args, name) for name in names if name not in ("label", "seed")} | changes
    return Request(label=label, seed=seed, align=False if args.no_align else None, **settings)


def _load(args: argparse.Namespace, max_batch: int) -> cspd.Engine:
    if args.threads:
        torch.set_num_threads(args.threads)
    return load(
        args.checkpoint,
        arch=args.arch,
        vae=args.vae,
        draft=args.draft_checkpoint,
        max_batch=max_batch,
        device=args.device,
        precision=args.precision,
        compiled=args.compile,
    )


def _sample(args: argparse.Namespace) -> None:
    num = len(args.labels) if args.num is None else args.num
    if num < 1:
        raise ValueError(f"--num {num} makes no image: give 1 or more")
    engine = _load(args, args.max_batch)
    labels = (args.labels[i % len(args.labels)] for i in range(num))
    requests = [_request(args, label, args.seed + i) for i, label in enumerate(labels)]
    files = checkpoint_files(args.checkpoint)
    settings = {"version": cspd.__version__, "precision": args.precision}
    used = {"target": files["target"], "vae": args.vae or files["vae"]}
    if args.method == "cspd":
        used["draft"] = args.draft_checkpoint or files["draft"]
    for name, file in used.items():
        if file is None:
            continue
        file = file.resolve()
        settings[name] = {"file": str(file), "bytes": file.stat().st_size, "modified": file.stat().st_mtime_ns}
    record = sample_to_folder(engine, requests, args.out, settings, overwrite=args.overwrite, heatmap=args.heatmap)
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
        f" {summary['head_calls_per_image']:.0f} sequential head calls"
        f" ({summary['head_calls_per_token']:.1f} a token); time: {phases}"
    )
    if summary["window"]:
        print(f"window {summary['window']}: --window {summary['window']} gives these images on any machine")
    if summary["alpha"] is not None:
        print(f"{summary['alpha']:.1%} of the drafts were accepted")
    if args.heatmap:
        print(f"wrote {args.out / 'heatmap.png'} (what each token cost)")
    print(f"wrote {args.out / 'grid.png'} (all images), {args.out / RECORD} (settings, statistics), {num} PNGs")


def _compare(args: argparse.Namespace) -> None:
    engine = _load(args, args.max_batch)
    requests = [_request(args, args.labels[i % len(args.labels)], args.seed + i) for i in range(args.num)]
    report = compare(engine, requests, args.methods.split(","), args.out)
    print(format_comparison(report))
    print(f"wrote {args.out / 'comparison.png'} (a row a method), {args.out / 'comparison.json'}")


def _bench(args: argparse.Namespace) -> None:
    target = _load(args, 1)

    def engine(slots: int) -> cspd.Engine:
        return target.with_slots(slots)

    settings = itertools.product(args.num_iter or [None], args.cfg or [None])
    requests = [_request(args, num_iter=k, cfg=s, gamma=None, verify=None) for k, s in settings]
    accuracy = None
    if checkpoint_files(args.checkpoint)["target"].resolve() == checkpoint_files("digits32")["target"].resolve():
        classifier = load_classifier()
        accuracy = lambda images, labels: classifier_accuracy(classifier, images, labels)  # noqa: E731
    report = bench(
        engine,
        requests,
        args.batch,
        args.methods.split(","),
        gammas=args.gamma,
        verify=args.verify or ["parallel"],
        runs=args.runs,
        queued=args.queued,
        accuracy=accuracy,
    )
    print(format_report(report))
    if args.json:
        write_json(args.json, report)
        print(f"wrote {args.json}")


def _calibrate(args: argparse.Namespace) -> None:
    engine = _load(args, 1)
    request = engine.resolve(_request(args, window=0))
    if request.temperature == 0 or request.num_sampling_steps < 3:
        raise ValueError(
            f"temperature={request.temperature}, num_sampling_steps={request.num_sampling_steps}: there is nothing to"
            " speculate on without noise or below 3 steps; give others"
        )
    calibrations = engine.calibrations["target"]
    costs, calibration = engine.costs(request.guided, args.force), calibrations.get(request)
    print(f"head calls a token, simulated on the fit's own chains (ancestral: {request.num_sampling_steps}):")
    for window, calls in zip(WINDOWS, calibration.calls):
        if window > request.num_sampling_steps:
            break
        print(f"  window {window:>2}: {calls.mean():5.1f}")
    print("seconds of the head for a token, predicted for this device, and the window taken, by tokens at once:")
    for rows in (1, 4, 16, 64, 256):
        window = costs.window(request.num_sampling_steps, rows, calibration)
        calls = calibration.calls[WINDOWS.index(window)] if window else None
        seconds = [
            costs.head_seconds(request.num_sampling_steps, rows, w, c) / rows for w, c in ((0, None), (window, calls))
        ]
        print(f"  {rows:>3}: ancestral {seconds[0]:.5f}, speculative {seconds[1]:.5f}, window {window}")
    print(f"kept in {calibrations.folder_of(request)} and {user_cache()}")


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
