"""Runs of several configurations, chunk by chunk in turn, into a folder; one that was cut off goes on."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType

import numpy as np
import torch
from tqdm import tqdm

from cspd.comparison.chunks import Chunk, cost_of, read_chunk, write_chunk
from cspd.comparison.study import Configuration
from cspd.engine import Engine
from cspd.evaluation.subjects import Subject, asking_for, in_turn
from cspd.items import tell_damaged
from cspd.machine import peak_bytes, reset_peak
from cspd.pixels import to_pil
from cspd.sequence import Request
from cspd.store import DECIDED, Store, kept_choices
from cspd.streaming import OnProgress

SCHEMA = "cspd.rounds/3"
RECORD = "run.json"
CHUNKS = "chunks"
TUNE = "tune.json"  # of a search
WARM_UP = 3  # rounds, before a row is timed on a CPU
TIMED = 5  # turns of a comparison that speed is told by, as many as `cspd bench` has runs
MANY = 16  # images at once in later turns, which are for quality
BAR = "{l_bar}{bar}| {n:.1f}/{total} images [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
WRITTEN = ("report.html", "speed_quality.png", "comparison.png", "comparison.md", "comparison.csv", "comparison.json")


@dataclass
class Turns:
    """Configurations that make their images in turn, into a folder that is claimed.

    Attributes:
        rows: the configurations. plans: the settings that each runs by. parts: the requests of each, turn by turn.
        folder: of the images. settings: what they belong to.
        bar: counts images, those that were there from its beginning on.
        failed: why rows gave no images, by their numbers; None: none may fail.
        made: the chunks that are there, by row and turn. warm: the rows that have run before.
        wide: engines for turns of more images than an engine's slots, by that engine.
    """

    rows: Sequence[Configuration]
    plans: list[Request]
    parts: list[list[list[Request]]]
    folder: Path
    settings: dict
    bar: tqdm
    failed: dict[int, str] | None = None
    made: dict[tuple[int, int], Chunk] = field(default_factory=dict)
    warm: set[int] = field(default_factory=set)
    wide: dict[Engine, Engine] = field(default_factory=dict)

    def make(self, num: int, chosen: Sequence[int] | None = None) -> list[list[Chunk]]:
        """The chunks of all rows, or the `chosen`, in order, up to `num` images, where a rung ends.

        Those that are there are read. Rows that have failed are left out.

        Raises:
            FloatingPointError, torch.OutOfMemoryError: a row gave no image, and none may fail.
        """
        chosen = range(len(self.rows)) if chosen is None else chosen
        ends = itertools.accumulate(map(len, self.parts[0]))
        turns = [i for i, end in enumerate(ends) if end <= num]
        places = [(chosen[(i + k) % len(chosen)], i) for i in turns for k in range(len(chosen))]
        todo = [place for place in places if place not in self.made and not self._find(*place)]
        tell_damaged([_file(r, i) for r, i in todo if (self.folder / _file(r, i)).exists()])
        for r, i in todo:
            if r not in (self.failed or ()):
                self.bar.set_postfix_str(self.rows[r].name)
                with _failing(r, self.failed):
                    self._make(r, i)
        return [[self.made[r, i] for i in turns] for r in chosen if r not in (self.failed or ())]

    def _find(self, r: int, i: int) -> bool:
        """Whether an earlier run has made a row's chunk of a turn."""
        side = self.rows[r].engine.hosts[self.plans[r].family].image_size
        chunk = read_chunk(self.folder / _file(r, i), self._made_of(r, i), side)
        if chunk is None:
            return False
        self.made[r, i] = chunk
        self.bar.initial = self.bar.n = self.bar.n + len(chunk.images)
        return True

    def _made_of(self, r: int, i: int) -> dict:
        requests = [_given(request) for request in self.parts[r][i]]
        return {"settings": self.settings, "configuration": self.rows[r].name, "requests": requests}

    def _make(self, r: int, i: int) -> None:
        row, requests = self.rows[r], self.parts[r][i]
        if r not in self.warm and len(requests) <= row.engine.num_slots:  # as turns that speed is told by
            self.bar.set_postfix_str(f"{row.name}: warming up")
            self._warm_up(row.engine, requests)
            self.warm.add(r)
        for request in requests:
            row.engine.resolve(request)  # a text is encoded once, whichever row comes first
        self.made[r, i] = self._chunk(row, requests)
        write_chunk(self.folder / _file(r, i), self.made[r, i], self._made_of(r, i))

    def _warm_up(self, engine: Engine, requests: list[Request]) -> None:
        """Runs requests for the first time, which takes longer: all, if kernels are chosen or compiled for shapes."""
        if engine.device.type == "cuda" or engine.compiled:
            engine.generate(requests)
            return
        tickets = [engine.add_request(request) for request in requests]
        for _ in range(WARM_UP):
            engine.step()
        for ticket in tickets:
            engine.cancel(ticket)

    def _chunk(self, row: Configuration, requests: list[Request]) -> Chunk:
        """A row's chunk; one of more images than its engine has slots is made by an engine with more, if that fits."""
        showing, own = self._showing(row.name), row.engine
        if len(requests) <= own.num_slots:
            return _timed(row, requests, showing)
        try:
            if own not in self.wide:
                self.wide[own] = own.with_slots(len(requests))
            return _timed(replace(row, engine=self.wide[own]), requests, showing)
        except (ValueError, torch.OutOfMemoryError):  # too little memory
            self.wide[own] = own
            return _timed(row, requests, showing)

    def _showing(self, name: str) -> OnProgress:
        """Moves the bar with the images of a turn."""
        before, shares = self.bar.n, {}

        def show(request: Request, share: float, preview: object) -> None:
            shares[request] = share
            done = sum(shares.values())
            self.bar.set_postfix_str(name, refresh=False)
            self.bar.n = before + done
            self.bar.update(0)

        return show


@contextlib.contextmanager
def taking_turns(
    rows: Sequence[Configuration],
    subjects: Sequence[Subject],
    rungs: Sequence[int],
    seed: int,
    store: Store,
    *,
    overwrite: bool = False,
    written: Sequence[str] = WRITTEN,
    may_fail: bool = False,
    timed: int | None = None,
    progress: bool = True,
) -> Iterator[Turns]:
    """Claims a folder for what several configurations make, after all their requests are checked, and shows a bar.

    Image i has the i-th of the subjects, classes or texts, in turn, and as its seed the i-th from `seed` on, or from
    the configuration's own. In a turn every one makes its next B images, B being its engine's slots, one after the
    other; who begins changes every turn. After `timed` turns, if that is given, turns have `MANY` images: they are for
    quality, and what is told of speed is by the turns of B.

    Args:
        rungs: numbers of images, rising; turns begin anew after each, so that one may be the last for some rows.
        written: what else will be in the folder. may_fail: a row that gives no images is no error.

    Raises:
        ValueError: a bad request, an engine without autoencoder, or as `Store.claim`.
    """
    num = rungs[-1]
    if num < 1:
        raise ValueError(f"{num} images compare nothing: give 1 or more")
    for row in rows:  # all, before anything is made
        for subject in sorted(set(subjects)):
            row.engine.check(asking_for(row.request, subject).but(seed=row.first_seed(seed)))
        row.engine.check(row.request.but(seed=row.first_seed(seed) + num - 1))
    _check_seeds({row.first_seed(seed): row.name for row in rows}, num)
    size = rows[0].engine.num_slots
    settings = {"machine": rows[0].engine.describe(), "max_batch": size, "labels": list(subjects), "seed": seed}
    asked = {
        row.name: {"request": settings_of(row.request), "files": row.files, "seed": row.first_seed(seed)}
        for row in rows
    }
    settings |= {"order": [row.name for row in rows], "configurations": asked}
    record = {"schema": SCHEMA, "settings": settings, "windows": {}}
    turns = _turns(rungs, size, timed)
    files = [_file(r, i) for r in range(len(rows)) for i in range(len(turns))]
    earlier = store.claim(record, [*files, *written], overwrite)
    earlier_windows = earlier["windows"] if earlier else {}
    with tqdm(total=num * len(rows), unit=" image", bar_format=BAR, disable=not progress) as bar:
        failed: dict[int, str] | None = {} if may_fail else None
        plans = _plans(rows, earlier_windows, bar, failed)
        for row, plan in zip(rows, plans):
            record["windows"][row.name] = {name: getattr(plan, name) for name in DECIDED}
        store.begin(record)
        parts = []
        for row, plan in zip(rows, plans):
            seeds = itertools.count(row.first_seed(seed))
            requests = [asking_for(plan, subject).but(seed=next(seeds)) for subject in in_turn(subjects, num)]
            parts.append([requests[turn] for turn in turns])
        yield Turns(rows, plans, parts, store.folder, settings, bar, failed)
        bar.set_postfix_str("")  # no row is under way any more


def _plans(
    rows: Sequence[Configuration], earlier_windows: dict, bar: tqdm, failed: dict[int, str] | None
) -> list[Request]:
    """The resolved requests of rows, by what an earlier run has decided; which rows failed is written down."""
    plans = []
    for r, row in enumerate(rows):
        bar.set_postfix_str(f"{row.name}: preparing")
        choices = kept_choices(row.request.settings, earlier_windows.get(row.name))
        plans.append(row.engine.check(row.request.but(**choices)))
        with _failing(r, failed):
            plans[r] = row.engine.resolve(plans[r])
    return plans


@contextlib.contextmanager
def _failing(r: int, failed: dict[int, str] | None) -> Iterator[None]:
    """What a row raises for its own settings is written down, if rows may fail."""
    try:
        yield
    except (ValueError, FloatingPointError, torch.OutOfMemoryError) as error:
        if failed is None:
            raise
        failed[r] = " ".join(str(error).split())


def _turns(rungs: Sequence[int], size: int, timed: int | None) -> list[slice]:
    """Which images are made in each turn, see `taking_turns`."""
    turns: list[slice] = []
    for first, end in itertools.pairwise([0, *rungs]):
        while first < end:
            is_timed = timed is None or len(turns) < timed
            turns.append(slice(first, min(end, first + (size if is_timed else max(size, MANY)))))
            first = turns[-1].stop
    return turns


def store_of(out: Path) -> Store:
    """The folder of a comparison."""
    decided = {f"{name}?": (kind, NoneType) for name, kind in DECIDED.items()}
    shape = {"settings": dict, "windows": {str: decided}}
    names = rf"{CHUNKS}/\d+-\d+\.npz|{'|'.join(map(re.escape, (*WRITTEN, TUNE)))}"
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
    """A request's settings that are not None, without its seed and what it is of."""
    return {key: value for key, value in _given(request).items() if key not in ("label", "prompt", "seed")}


def _given(request: Request) -> dict:
    return {key: value for key, value in request.to_dict().items() if value is not None}


def _timed(row: Configuration, requests: list[Request], on_progress: OnProgress) -> Chunk:
    reset_peak(row.engine.device)
    start = time.perf_counter()
    outputs = row.engine.generate(requests, on_progress=on_progress)
    seconds, peak = time.perf_counter() - start, peak_bytes(row.engine.device)
    if outputs[0].image is None:
        raise ValueError(f"{row.name}: an engine without autoencoder makes no images to compare")
    images = np.stack([np.asarray(to_pil(output.image)) for output in outputs])
    return Chunk(images, seconds, peak, [cost_of(output) for output in outputs])
