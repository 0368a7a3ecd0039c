"""`cspd sample`: images into a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from cspd.commands.options import (
    add_method_option,
    add_model_options,
    add_request_options,
    check_method,
    load_engine,
    request_of,
    run_settings,
)
from cspd.commands.sample_folder import RECORD, images_there, sample_to_folder
from cspd.commands.subjects import CLASSES_HELP, add_subject_options, read_prompts
from cspd.engine import Engine
from cspd.lookup import method_of
from cspd.method import as_it_is
from cspd.parsing import count, place, seed, word
from cspd.sequence import Request
from cspd.stopping import if_stopped
from cspd.summary import LAZY, measured_lines, speed_line


def add(commands: argparse._SubParsersAction) -> None:
    """Declares the command."""
    text = "Generates images of classes or texts into a folder; a run that was cut off goes on where it was."
    sample = commands.add_parser("sample", help="generate images into a folder", description=text)
    sample.set_defaults(run=run)
    add_model_options(sample)
    add_method_option(sample)
    add_request_options(sample)
    group = sample.add_argument_group("what to make")
    one_of = add_subject_options(group, f"{CLASSES_HELP}; none: of no class (default: 0-9)", labels="0-9")
    one_of.add_argument("--prompt", type=word, metavar="TEXT", help="one text")
    group.add_argument("--num", type=count, help="images in all; labels or texts take turns (default: one of each)")
    group.add_argument("--seed", type=seed, default=0, help="of the first image; the next has the next (default: 0)")
    group.add_argument("--max-batch", type=count, default=8, help="images in flight at once (default: %(default)s)")
    group.add_argument("--out", type=place, default=Path("samples"), help="folder (default: %(default)s/)")
    group.add_argument("--overwrite", action="store_true", help="replace another run that is in --out")
    group.add_argument("--heatmap", action="store_true", help="also write heatmap.png: what each token cost")


def run(args: argparse.Namespace) -> None:
    asked = _asked(args)
    num = args.num or len(asked)
    check_method(args)
    engine = load_engine(args, min(args.max_batch, num))  # the window is chosen for as many as really run at once
    requests = [request_of(args, seed=args.seed + i, **asked[i % len(asked)]) for i in range(num)]
    settings = run_settings(args, engine.check(requests[0]))
    with if_stopped(lambda: images_there(args.out, num)):
        how = {"overwrite": args.overwrite, "heatmap": args.heatmap, "speed": True}
        record = sample_to_folder(engine, requests, args.out, settings, **how)
    tell(engine, requests[0], record, args.out, args.heatmap)


def _asked(args: argparse.Namespace) -> list[dict]:
    """What requests are to be of: labels or texts, which take turns. Raises ValueError, OSError."""
    negative = {"negative_prompt": args.negative_prompt}
    if args.prompt is None and args.prompts is None:
        return [{"label": label, **negative} for label in args.labels]
    texts = [args.prompt] if args.prompts is None else read_prompts(args.prompts)
    return [{"label": None, "prompt": text, **negative} for text in texts]


def tell(engine: Engine, request: Request, record: dict, out: Path, heatmap: bool) -> None:
    """Says what the images in a folder cost, made by requests like this one, and what is there."""
    summary, num = record["summary"], record["requests"]
    if summary["images_made"]:
        speed = f"{summary['seconds']:.1f} s: {summary['images_per_second']:.2f} images/s"
        print(f"{summary['images_made']} image{'s' if summary['images_made'] > 1 else ''} in {speed}")
    else:
        print(f"all {num} images were there already")
    _tell_cost(summary)
    asked = engine.check(request)
    if summary["window"] is not None and method_of(asked).resolve is not as_it_is:
        why = engine.hosts[str(asked.family)].tuning.why(asked, engine.num_slots)
        print(f"window {summary['window']}: {why}")
    print(f"guarantee: {summary['guarantee']}")
    if summary["alpha"] is not None:
        print(f"{summary['alpha']:.1%} of the drafts were accepted")
    for title, value, meaning in measured_lines(summary):
        print(f"{title} {value} {meaning}")
    if heatmap:
        print(f"wrote {out / 'heatmap.png'} (what each token cost)")
    pngs = f"{num} PNG{'s' if num > 1 else ''}"
    print(f"wrote {out / 'grid.png'} (all images), {out / RECORD} (settings, statistics), {pngs}")
    if told := speed_line(summary, engine.num_slots):
        print(told)


def _tell_cost(summary: dict) -> None:
    """Says what an image took, and of VQ models by how much its codes may differ from the target's."""
    seconds = summary["seconds_by_phase"]
    total = sum(seconds.values()) or 1
    time = "time: " + ", ".join(f"{name} {spent / total:.0%}" for name, spent in seconds.items())
    backbone_calls = summary["backbone_calls_per_image"]
    if "step_compression" not in summary:
        lazy = f" ({summary[f'{LAZY}_per_image']:.0f} lazy)" if summary[f"{LAZY}_per_image"] else ""
        iterations = f"{summary['iterations_per_image']:.0f} iterations, {backbone_calls:.0f} backbone calls{lazy}"
        head_calls = f"{summary['head_calls_per_image']:.0f} sequential head calls"
        print(f"per image: {iterations}, {head_calls} ({summary['head_calls_per_token']:.1f} per token); {time}")
        return
    print(f"per image: {backbone_calls:.1f} target forwards, {summary['step_compression']:.2f} codes each; {time}")
    if summary["bound_per_image"] > 0:
        bound, error = min(summary["bound_per_image"], 1), summary["bound_standard_error"]
        spread = "" if error is None else f" +- {error:.3f}"
        print(f"total variation from the target, of an image's codes: at most {bound:.3f}{spread} (docs/bounds.md)")
