"""Runs of several configurations, chunk by chunk in turn, into a folder; one that was cut off goes on."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from cspd.comparison.study import Configuration
from cspd.items import read_item, tell_damaged, write_item
from cspd.machine import peak_bytes, reset_peak
from cspd.plots import to_pil
from cspd.records import MAYBE, NUMBER, misfit, parse_json
from cspd.sequence import Output, Request
from cspd.store import DECIDED, Store, kept_choices
from cspd.summary import MEASURED, MEASURES

SCHEMA = "cspd.rounds/3"
RECORD = "run.json"
CHUNKS = "chunks"
WRITTEN = ("report.html", "speed_quality.png", "comparison.png", "comparison.md", "comparison.csv", "comparison.json")
COSTS = ("head_calls_per_token", "head_calls", "backbone_calls", "draft_backbone_calls", "step_compression", "bound")
REST = {  # of a chunk, as JSON
    "seconds": NUMBER,
    "peak_bytes": int,
    "costs": [dict.fromkeys(COSTS, NUMBER) | MEASURES | {"step_compression": MAYBE, "judged": int, "accepted": int}],
}


class Chunk(NamedTuple):
    """What a configuration made in a turn: images uint8 [n, H, W, 3], seconds, and what each image cost."""

    images: np.ndarray
    seconds: float
    peak_bytes: int
    costs: list[dict]


def run_turns(
    rows: Sequence[Configuration],
    labels: Sequence[int],
    num: int,
    seed: int,
    store: Store,
    *,
    overwrite: bool = False,
    progress: bool = True,
) -> tuple[list[Request], list[list[Chunk]]]:
    """The settings that each configuration ran by, and its chunks, in order.

    Image i has the labels' i-th in turn, and seed + i, or the configuration's own seed + i. In turn r every one makes
    its images r B to r B + B - 1, B being its engine's slots, one after the other; who begins changes every turn.

    Raises:
        ValueError: a bad request, an engine without autoencoder, or as `Store.claim`.
    """
    if num < 1:
        raise ValueError(f"{num} images compare nothing: give 1 or more")
    for row in rows:  # all, before anything is made
        for label in sorted(set(labels)):
            row.engine.check(dataclasses.replace(row.request, label=label, seed=row.first_seed(seed)))
        row.engine.check(dataclasses.replace(row.request, seed=row.first_seed(seed) + num - 1))
    _check_seeds({row.first_seed(seed): row.name for row in rows}, num)
    size = rows[0].engine.num_slots
    settings = {"machine": rows[0].engine.describe(), "max_batch": size, "labels": list(labels), "seed": seed}
    asked = {
        row.name: {"request": settings_of(row.request), "files": row.files, "seed": row.first_seed(seed)}
        for row in rows
    }
    settings |= {"order": [row.name for row in rows], "configurations": asked}
    record = {"schema": SCHEMA, "settings": settings, "windows": {}}
    files = [_file(r, i) for r in range(len(rows)) for i in range(-(-num // size))]
    earlier = store.claim(record, [*files, *WRITTEN], overwrite)
    earlier_windows = earlier["windows"] if earlier else {}
    plans = []
    for row in rows:
        choices = kept_choices(row.request.settings, earlier_windows.get(row.name))
        plans.append(row.engine.resolve(row.request.but(**choices)))
    for row, plan in zip(rows, plans):
        record["windows"][row.name] = {name: getattr(plan, name) for name in DECIDED}
    store.begin(record)
    requests = [
        [dataclasses.replace(plan, label=labels[i % len(labels)], seed=row.first_seed(seed) + i) for i in range(num)]
        for row, plan in zip(rows, plans)
    ]
    parts = [[of_row[i : i + size] for i in range(0, num, size)] for of_row in requests]
    return plans, _run(rows, parts, store.folder, settings, progress)


def store_of(out: Path) -> Store:
    """The folder of a comparison."""
    shape = {"settings": dict, "windows": {str: {str: (int, NoneType)}}}
    names = rf"{CHUNKS}/\d+-\d+\.npz|{'|'.join(map(re.escape, WRITTEN))}"
    return Store(out, RECORD, SCHEMA, shape, names, compared=("settings",))


def _file(row: int, turn: int) -> str:
    return f"{CHUNKS}/{row:02d}-{turn:05d}.npz"


def _check_seeds(names: dict[int, str], num: int) -> None:
    """Raises ValueError where some, but not all images of two rows have the same seeds."""
    seeds = sorted(names)
    for low, high in itertools.pairwise(seeds):
        if high - low < num:
            raise ValueError(
                f"{names[high]!r}: its seeds {high}..{high + num - 1} overlap those of {names[low]!r},"
                f" {low}..{low + num - 1}: begin with {low + num} or more, or with the same"
            )


def settings_of(request: Request) -> dict:
    """A request's settings, without label and seed, that are not None."""
    return {key: value for key, value in _given(request).items() if key not in ("label", "seed")}


def _given(request: Request) -> dict:
    return {key: value for key, value in request.to_dict().items() if value is not None}


def _run(
    rows: Sequence[Configuration],
    parts: Sequence[Sequence[list[Request]]],
    out: Path,
    settings: dict,
    progress: bool,
) -> list[list[Chunk]]:
    """The chunks of each row's requests, in order; those of an earlier run are read."""
    places = [(r, i) for i in range(len(parts[0])) for r in ((i + k) % len(rows) for k in range(len(rows)))]
    made_of = {}
    for r, i in places:
        requests = [_given(request) for request in parts[r][i]]
        made_of[r, i] = {"settings": settings, "configuration": rows[r].name, "requests": requests}
    sides = [row.engine.hosts[of_row[0][0].family].image_size for row, of_row in zip(rows, parts)]
    made = {(r, i): _read(out / _file(r, i), made_of[r, i], sides[r]) for r, i in places}
    todo = [place for place in places if made[place] is None]
    tell_damaged([_file(r, i) for r, i in todo if (out / _file(r, i)).exists()])
    warm: set[int] = set()
    with tqdm(total=sum(len(parts[r][i]) for r, i in todo), unit="image", disable=not progress) as bar:
        for r, i in todo:
            bar.set_postfix_str(rows[r].name)
            if r not in warm:
                rows[r].engine.generate(parts[r][i])  # all: kernels are chosen for their shapes
                warm.add(r)
            made[r, i] = _timed(rows[r], parts[r][i])
            _write(out / _file(r, i), made[r, i], made_of[r, i])
            bar.update(len(parts[r][i]))
    return [[made[r, i] for i in range(len(parts[r]))] for r in range(len(rows))]


def _timed(row: Configuration, requests: list[Request]) -> Chunk:
    reset_peak(row.engine.device)
    start = time.perf_counter()
    outputs = row.engine.generate(requests)
    seconds, peak = time.perf_counter() - start, peak_bytes(row.engine.device)
    if outputs[0].image is None:
        raise ValueError(f"{row.name}: an engine without autoencoder makes no images to compare")
    images = np.stack([np.asarray(to_pil(output.image)) for output in outputs])
    return Chunk(images, seconds, peak, [_cost(output) for output in outputs])


def _cost(output: Output) -> dict:
    judged, accepted = map(sum, output.stats.by_lag)
    costs = {name: getattr(output.stats, name) for name in (*COSTS, *MEASURED)}
    return costs | {"judged": judged, "accepted": accepted}


def _write(path: Path, chunk: Chunk, made_of: dict) -> None:
    """`arr_0` are the images, as ADM's evaluator reads them; `chunk` is the JSON of the rest."""
    rest = json.dumps(chunk._asdict() | {"images": None})
    write_item(path, {"arr_0": chunk.images, "chunk": np.frombuffer(rest.encode(), np.uint8)}, made_of)


def _read(path: Path, made_of: dict, side: int) -> Chunk | None:
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
