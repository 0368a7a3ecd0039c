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
from cspd.calibration import WINDOWS, user_cache
from cspd.compare import compare, format_comparison
from cspd.evaluation.classifier import accuracy as classifier_accuracy
from cspd.evaluation.classifier import load_classifier
from cspd.loading import checkpoint_files, embedded, load
from cspd.methods import DEFAULTS, METHODS, format_table
from cspd.options import add_model_options, add_request_options, number_list
from cspd.plots import speed_quality
from cspd.sampling import RECORD, sample_to_folder, write_json
from cspd.sequence import Request

EPILOG = """\
examples:
  cspd sample --labels 0-9 --num 40 --out samples/
      40 images of the embedded digits model: PNGs, grid.png and samples.json
  cspd sample --checkpoint pretrained/mar_large --vae pretrained/kl16.ckpt --labels 207,360 --num 8 --out dogs/
      an official MAR checkpoint (checkpoints/README.md says where to get one)
  cspd sample --checkpoint digits32_vq --draft eagle-static --rule cool-sd --delta 1.1
      VQ codes: any draft with any acceptance rule; `--method cool-sd` is such a pair by its published name
  cspd compare --methods ar,speculative --num 20 --out comparison/
      the same seeds by two methods: speed, head calls, whether the laws differ, a picture
  cspd bench --num-iter 64,16 --cfg 1,3 --batch 1,8
      how fast this machine is, against plain MAR and MAR's sampler as published; `cspd bench --vq`: VQ methods
  cspd calibrate --checkpoint pretrained/mar_large --vae pretrained/kl16.ckpt
      what `speculative` does on first use, ahead of time
  cspd methods
      what can be run, and what each method guarantees
"""


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
    add_model_options(sample)
    group = sample.add_argument_group("method")
    group.add_argument("--method", choices=METHODS, help="see `cspd methods` (default: speculative, of VQ sjd-pac)")
    add_request_options(sample)
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
    add_model_options(comparison)
    group = comparison.add_argument_group("what to compare")
    group.add_argument("--methods", help="(default: ar,speculative; of VQ models ar,sjd-pac)")
    group.add_argument("--labels", type=number_list, default="0-9", help="classes, like 0-9 or 1,5,7-9 (default: 0-9)")
    group.add_argument("--num", type=int, default=20, help="images of each; the labels take turns (default: 20)")
    group.add_argument("--seed", type=int, default=0, help="of the first image; the next has the next (default: 0)")
    group.add_argument("--max-batch", type=int, default=4, help="images in flight at once (default: %(default)s)")
    group.add_argument("--out", type=Path, default=Path("comparison"), help="folder (default: %(default)s/)")
    add_request_options(comparison)

    text = "Times sampling end to end on this machine, in one process, as speed-ups over plain sampling (ar)."
    timing = commands.add_parser("bench", help="time sampling on this machine", description=text, allow_abbrev=False)
    timing.set_defaults(run=_bench)
    add_model_options(timing)
    add_request_options(timing, several=True)
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

    text = "Fits the drafts of `speculative` for these settings, measures this device, and shows what both give."
    calibrate = commands.add_parser(
        "calibrate", help="prepare `speculative` ahead of time", description=text, allow_abbrev=False
    )
    calibrate.set_defaults(run=_calibrate)
    add_model_options(calibrate)
    add_request_options(calibrate)
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
    decoder = "tokenizer" if "tokenizer" in files else "vae"
    used = {"target": files["target"], decoder: args.vae or files[decoder]}
    resolved = engine.check(requests[0])
    if resolved.method == "cspd" or resolved.draft == "chain":
        used["draft"] = args.draft_checkpoint or files["draft"]
    if resolved.draft in ("eagle-static", "eagle-dynamic"):
        used["eagle"] = files["eagle"]
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
    if "step_compression" in summary:
        print(
            f"per image: {summary['backbone_calls_per_image']:.1f} target forwards,"
            f" {summary['step_compression']:.2f} codes each; time: {phases}"
        )
        if summary["bound_per_image"] > 0:
            bound, error = min(summary["bound_per_image"], 1), summary["bound_standard_error"]
            spread = "" if error is None else f" +- {error:.3f}"
            print(f"total variation from the target, of an image's codes: at most {bound:.3f}{spread} (docs/bounds.md)")
    else:
        print(
            f"per image: {summary['iterations_per_image']:.0f} iterations,"
            f" {summary['backbone_calls_per_image']:.0f} backbone calls,"
            f" {summary['head_calls_per_image']:.0f} sequential head calls"
            f" ({summary['head_calls_per_token']:.1f} a token); time: {phases}"
        )
    if summary["window"] and engine.host.family == "MAR":
        print(f"window {summary['window']}: --window {summary['window']} gives these images on any machine")
    if summary["alpha"] is not None:
        print(f"{summary['alpha']:.1%} of the drafts were accepted")
    if args.heatmap:
        print(f"wrote {args.out / 'heatmap.png'} (what each token cost)")
    print(f"wrote {args.out / 'grid.png'} (all images), {args.out / RECORD} (settings, statistics), {num} PNGs")


def _compare(args: argparse.Namespace) -> None:
    engine = _load(args, args.max_batch)
    requests = [_request(args, args.labels[i % len(args.labels)], args.seed + i) for i in range(args.num)]
    methods = args.methods.split(",") if args.methods else ["ar", DEFAULTS[engine.host.family]]
    report = compare(engine, requests, methods, args.out)
    print(format_comparison(report))
    print(f"wrote {args.out / 'comparison.png'} (a row a method), {args.out / 'comparison.json'}")


def _bench(args: argparse.Namespace) -> None:
    if args.vq:
        args.checkpoint = "digits32_vq"
    target = _load(args, 1)
    family = target.host.family
    if family == "VQ" and (args.gamma or args.verify):
        raise ValueError("--gamma, --verify: of VQ models options follow a method's name, --methods sd:gamma=4")
    of_family = [name for name, method in METHODS.items() if family in method.rounds and name != "ar"]
    names = args.methods.split(",") if args.methods else [*of_family[: None if family == "VQ" else 1], "published"]

    def engine(slots: int) -> cspd.Engine:
        return target.with_slots(slots)

    settings = itertools.product(args.num_iter or [None], args.cfg or [None])
    requests = [_request(args, num_iter=k, cfg=s, gamma=None, verify=None) for k, s in settings]
    accuracy = None
    if checkpoint_files(args.checkpoint)["target"].parent.resolve() in map(Path.resolve, embedded().values()):
        classifier = load_classifier()
        accuracy = lambda images, labels: classifier_accuracy(classifier, images, labels)  # noqa: E731
    report = bench(
        engine,
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
            points.append((options, row["speed_up"]["median"], row["accuracy"], method + case))
        speed_quality(points, "share recognised by the classifier", args.plot)
        print(f"wrote {args.plot}")


def _calibrate(args: argparse.Namespace) -> None:
    engine = _load(args, 1)
    if engine.host.family != "MAR":
        raise ValueError(f"{args.checkpoint}: VQ models need no calibration; it is of MAR's `speculative`")
    request = engine.resolve(_request(args, window=0))
    if request.temperature == 0 or request.num_sampling_steps < 3:
        raise ValueError(
            f"temperature={request.temperature}, num_sampling_steps={request.num_sampling_steps}: there is nothing to"
            " speculate on without noise or below 3 steps; give others"
        )
    tuning = engine.host.tuning
    calibrations = tuning.calibrations["target"]
    costs, calibration = tuning.costs(request.guided, args.force), calibrations.get(request)
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
