"""Runs of several configurations, chunk by chunk in turn, into a folder; one that was cut off goes on."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from cspd.comparison.study import Configuration
from cspd.machine import peak_bytes, reset_peak
from cspd.plots import to_pil
from cspd.sequence import Output, Request
from cspd.store import Store, kept_window

SCHEMA = "cspd.rounds/3"
RECORD = "run.json"
CHUNKS = "chunks"
WRITTEN = ("report.html", "speed_quality.png", "comparison.png", "comparison.md", "comparison.csv", "comparison.json")
COSTS = ("head_calls_per_token", "head_calls", "backbone_calls", "draft_backbone_calls", "step_compression", "bound")


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
    out: Path,
    *,
    overwrite: bool = False,
    progress: bool = True,
) -> tuple[list[Request], list[list[Chunk]]]:
    """The settings that each configuration ran by, and its chunks, in order.

    Image i has the labels' i-th in turn, and seed + i, or the configuration's own seed + i. In turn r every one makes
    its images r B to r B + B - 1, B being its engine's slots, one after the other; who begins changes every turn.

    Raises:
        ValueError: a bad request, an engine without autoencoder, or `out` holds another run and `overwrite` is off.
    """
    if num < 1:
        raise ValueError(f"{num} images compare nothing: give 1 or more")
    for row in rows:  # all, before anything is made
        for label in sorted(set(labels)):
            row.engine.check(dataclasses.replace(row.request, label=label, seed=_first(row, seed)))
        row.engine.check(dataclasses.replace(row.request, seed=_first(row, seed) + num - 1))
    _check_seeds({_first(row, seed): row.name for row in rows}, num)
    size = rows[0].engine.num_slots
    settings = {"machine": rows[0].engine.describe(), "max_batch": size, "labels": list(labels), "seed": seed}
    asked = {
        row.name: {"request": settings_of(row.request), "files": row.files, "seed": _first(row, seed)} for row in rows
    }
    settings |= {"order": [row.name for row in rows], "configurations": asked}
    record = {"schema": SCHEMA, "settings": settings, "windows": {}}
    store = _store(out)
    earlier = None if overwrite else store.earlier(record)
    earlier_windows = earlier["windows"] if earlier else {}
    plans = []
    for row in rows:
        window = kept_window(row.request.window, earlier_windows.get(row.name))
        plans.append(row.engine.resolve(row.request.but(window=window)))
    record["windows"] = {row.name: {"window": plan.window} for row, plan in zip(rows, plans)}
    if overwrite:
        store.clear()
    windows = store.claim(record)["windows"]  # of another run with these settings, if it was quicker
    plans = [plan.but(**windows[row.name]) for row, plan in zip(rows, plans)]
    requests = [
        [dataclasses.replace(plan, label=labels[i % len(labels)], seed=_first(row, seed) + i) for i in range(num)]
        for row, plan in zip(rows, plans)
    ]
    parts = [[of_row[i : i + size] for i in range(0, num, size)] for of_row in requests]
    return plans, _run(rows, parts, store, progress)


def _store(out: Path) -> Store:
    parts = {"settings": dict, "windows": dict}
    items = f"{CHUNKS}/[0-9]*.npz"
    return Store(out, RECORD, SCHEMA, parts, items=items, reports=WRITTEN, progress=("windows",))


def _first(row: Configuration, seed: int) -> int:
    """The seed of a row's first image."""
    return seed if row.seed is None else row.seed


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
    asked = request.to_dict()
    return {key: value for key, value in asked.items() if value is not None and key not in ("label", "seed")}


def _run(
    rows: Sequence[Configuration], parts: Sequence[Sequence[list[Request]]], store: Store, progress: bool
) -> list[list[Chunk]]:
    """The chunks of each row's requests, in order; those of an earlier run are read."""
    places = [(r, i) for i in range(len(parts[0])) for r in ((i + k) % len(rows) for k in range(len(rows)))]
    files = {(r, i): f"{CHUNKS}/{r:02d}-{i:05d}.npz" for r, i in places}
    made = {(r, i): _read(store, files[r, i], len(parts[r][i])) for r, i in places}
    todo = [place for place in places if made[place] is None]
    warm: set[int] = set()
    with tqdm(total=sum(len(parts[r][i]) for r, i in todo), unit="image", disable=not progress) as bar:
        for r, i in todo:
            bar.set_postfix_str(rows[r].name)
            if r not in warm:
                rows[r].engine.generate(parts[r][i])  # all: kernels are chosen for their shapes
                warm.add(r)
            made[r, i] = _timed(rows[r], parts[r][i])
            _write(store, files[r, i], made[r, i])
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
    return {name: getattr(output.stats, name) for name in COSTS} | {"judged": judged, "accepted": accepted}


def _write(store: Store, item: str, chunk: Chunk) -> None:
    """`arr_0` are the images, as ADM's evaluator reads them; `chunk` is the JSON of the rest."""
    rest = json.dumps(chunk._asdict() | {"images": None})
    store.write(item, {"arr_0": chunk.images, "chunk": np.frombuffer(rest.encode(), np.uint8)})


def _read(store: Store, item: str, num: int) -> Chunk | None:
    """A chunk of `num` images; None where there is none, or another."""
    arrays = store.read(item, num, counted=("arr_0",))
    if arrays is None or "chunk" not in arrays:
        return None
    try:
        chunk = Chunk(**json.loads(arrays["chunk"].tobytes()) | {"images": arrays["arr_0"]})
    except (TypeError, ValueError):  # not a chunk's JSON
        return None
    return chunk if len(chunk.costs) == num else None
