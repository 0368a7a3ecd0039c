"""`cspd sample`: images into a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from cspd.commands.options import (
    check_method,
    load_engine,
    request_of,
    run_settings,
)
from cspd.commands.sample_folder import RECORD, images_there, sample_to_folder
from cspd.commands.subjects import read_prompts
from cspd.engine import Engine
from cspd.lookup import method_of
from cspd.method import as_it_is
from cspd.sequence import Request
from cspd.stopping import if_stopped
from cspd.summary import LAZY, measured_lines, speed_line


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
