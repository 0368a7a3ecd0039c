"""Methods side by side: the same seeds, in turn on one engine, as a table, a picture and a test of their laws."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from cspd.engine import Engine
from cspd.evaluation.two_sample import energy_test
from cspd.methods import METHODS, with_method
from cspd.plots import grid, to_pil
from cspd.sampling import write_json
from cspd.sequence import Output, Request

SCHEMA = "cspd.compare/2"
COLUMNS = 10  # of the picture, at most


def compare(
    engine: Engine, requests: Sequence[Request], methods: Sequence[str], out: Path, *, progress: bool = True
) -> dict:
    """Generates the same requests by each method, chunks taking turns, and writes comparison.png and .json to `out`.

    Args:
        engine: with as many slots as images are to be in flight at once.
        requests: their `method` does not matter. methods: the first is the baseline of speed and law.

    Returns:
        A JSON-able report, see `format_comparison`.

    Raises:
        ValueError: a bad request, or no method.
    """
    if not set(methods) <= METHODS.keys() or not requests:
        raise ValueError(
            f"methods {','.join(methods)}, {len(requests)} images: give some of {', '.join(METHODS)}, and one"
        )
    plans = {name: [engine.resolve(with_method(r, name)) for r in requests] for name in methods}
    outputs, seconds = {name: [] for name in plans}, dict.fromkeys(plans, 0.0)
    size = engine.num_slots
    for plan in plans.values():  # warm up
        engine.generate(plan[:1])
    with tqdm(total=len(requests) * len(plans), unit="image", disable=not progress) as bar:
        for i in range(0, len(requests), size):
            for name, plan in plans.items():
                start = time.perf_counter()
                outputs[name] += engine.generate(plan[i : i + size])
                seconds[name] += time.perf_counter() - start
                bar.update(len(plan[i : i + size]))
    rows = []
    for name, made in outputs.items():
        calls = [_calls(output) for output in made]
        row = {
            "method": name,
            "guarantee": made[0].stats.guarantee,
            "window": made[0].request.window,
            "images_per_second": len(made) / seconds[name],
            "speed_up": seconds[methods[0]] / seconds[name],
            "calls_per_token": sum(calls) / len(calls),
            "p_value": None,
        }
        if name != methods[0] and len(made) >= 8:
            row["p_value"] = energy_test(*(torch.stack([_value(o) for o in outputs[n]]) for n in (methods[0], name)))
        rows.append(row)
    out.mkdir(parents=True, exist_ok=True)
    report = {"schema": SCHEMA, "request": dataclasses.asdict(requests[0]), "images": len(requests), "rows": rows}
    write_json(out / "comparison.json", report)
    if outputs[methods[0]][0].image is not None:
        pictures, captions = [], []
        for i in range(0, len(requests), COLUMNS):
            for made in outputs.values():
                part = made[i : i + COLUMNS]
                pictures += [to_pil(o.image) for o in part]
                captions += [f"{o.request.method}" for o in part]
        grid(pictures, captions, min(COLUMNS, len(requests))).save(out / "comparison.png")
    return report


def _calls(output: Output) -> float:
    """Sequential model calls of a token: of MAR's head, or of a VQ target."""
    if output.request.family == "MAR":
        return output.stats.head_calls_per_token
    return output.stats.backbone_calls / len(output.tokens)


def _value(output: Output) -> Tensor:
    """What laws are compared by: MAR's tokens, or the image of VQ codes, whose numbers mean nothing."""
    return output.tokens if output.request.family == "MAR" or output.image is None else output.image


def format_comparison(report: dict) -> str:
    """The report as text."""
    lines = [
        f"{'method':<12} {'guarantee':<10} {'window':>6} {'images/s':>9} {'speed-up':>9} {'calls/token':>12}"
        f" {'same law? p':>12}"
    ]
    for row in report["rows"]:
        p = "" if row["p_value"] is None else f"{row['p_value']:.3f}"
        window = "" if row["window"] is None else row["window"]
        lines.append(
            f"{row['method']:<12} {row['guarantee']:<10} {window:>6} {row['images_per_second']:>9.2f}"
            f" {row['speed_up']:>8.2f}x {row['calls_per_token']:>12.2f} {p:>12}"
        )
    base = report["rows"][0]["method"]
    lines.append(
        f"calls: sequential ones, of MAR's head or a VQ target. p: permutation test of {report['images']} images"
        f" against {base}'s, same seeds; a small one (0.01) would show that the laws differ, and the more images, the"
        " smaller the differences it sees"
    )
    return "\n".join(lines)
