"""What a configuration made in a turn: images, seconds and costs, and the file that keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cspd.items import read_item, write_item
from cspd.records import MAYBE, NUMBER, misfit, parse_json
from cspd.sequence import Output
from cspd.summary import ADDED, LAZY, MEASURED

COSTS = ("head_calls_per_token", "head_calls", "backbone_calls", "draft_backbone_calls", "step_compression", "bound")
REST = {  # of a chunk, as JSON
    "seconds": NUMBER,
    "peak_bytes": int,
    "costs": [dict.fromkeys(COSTS, NUMBER) | ADDED | {"step_compression": MAYBE, "judged": int, "accepted": int}],
}


class Chunk(NamedTuple):
    """What a configuration made in a turn: images uint8 [n, H, W, 3], seconds, and what each image cost."""

    images: np.ndarray
    seconds: float
    peak_bytes: int
    costs: list[dict]


def cost_of(output: Output) -> dict:
    """What a chunk keeps of an output's statistics."""
    judged, accepted = map(sum, output.stats.by_lag)
    costs = {name: getattr(output.stats, name) for name in (*COSTS, LAZY, *MEASURED)}
    return costs | {"judged": judged, "accepted": accepted}


def write_chunk(path: Path, chunk: Chunk, made_of: dict) -> None:
    """`arr_0` are the images, as ADM's evaluator reads them; `chunk` is the JSON of the rest."""
    rest = json.dumps(chunk._asdict() | {"images": None})
    write_item(path, {"arr_0": chunk.images, "chunk": np.frombuffer(rest.encode(), np.uint8)}, made_of)


def read_chunk(path: Path, made_of: dict, side: int) -> Chunk | None:
    """A chunk of these requests' images; None where there is none, or another."""
    num = len(made_of["requests"])
    arrays = read_item(path, made_of, {"arr_0": (np.uint8, (num, side, side, 3))})
    try:
        rest = parse_json(arrays["chunk"].tobytes().decode()) if arrays else None
    except (KeyError, ValueError):  # not a chunk's JSON
        return None
    if misfit(rest, REST) or len(rest["costs"]) != num:
        return None
    return Chunk(arrays["arr_0"], rest["seconds"], rest["peak_bytes"], rest["costs"])
