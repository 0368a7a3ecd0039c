"""Sampling for an evaluation: many images by any number of processes, into shards; cut off anywhere, it goes on."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tqdm import tqdm

from cspd.engine import Engine
from cspd.evaluation.images import GRID
from cspd.evaluation.processes import Processes
from cspd.evaluation.shards import RECORD, SCHEMA, SIZE, Shards, arrays_of
from cspd.evaluation.subjects import Subject, asking_for, in_turn
from cspd.sequence import Output, Request
from cspd.store import Store, kept_choices
from cspd.summary import summary_of

WRITING = 2  # shards that may wait for the disk, before sampling does
BAR = "{l_bar}{bar}| {n:.1f}/{total} images [{elapsed}<{remaining}, {rate_fmt}]"
LAG = 60  # seconds until a file of another machine is seen, at most


def sample_shards(
    engine: Engine,
    request: Request,
    subjects: Sequence[Subject],
    num: int,
    store: Store,
    settings: dict,
    processes: Processes,
    *,
    overwrite: bool = False,
    progress: bool = True,
) -> tuple[Shards, dict, dict]:
    """Samples `num` images into a folder, as far as they are not there; returns them, the manifest and a summary.

    Image i is of subjects[i % len(subjects)], a class or a text, and has seed request.seed + i, whatever the number of
    processes.

    Args:
        request: what all images have in common. settings: what they depend on beside it, as plain values.
        store: of the folder, see `store_of`; it stays claimed until the store's `with` ends.
        overwrite: remove another run that is there, once all settings are known to be good.

    Returns:
        shards, manifest, and the means of the images' statistics with this run's speed; the last two are of use to the
        first process only.

    Raises:
        ValueError: a bad setting, or as `Store.claim`. OSError: the folder cannot be written.
        Others as in `Processes.together`.
    """
    plan = functools.partial(_plan, engine, request, subjects, num, store, settings, overwrite)
    manifest, missing = processes.from_first(plan)  # which alone claims the folder, before any other writes there
    shards = Shards(store.folder, num, manifest)
    common = Request(**manifest["request"])
    of_each = enumerate(in_turn(subjects, num))
    requests = [asking_for(common, subject).but(seed=request.seed + i) for i, subject in of_each]
    made = sum(len(shards.indices(shard)) for shard in missing)
    start = time.perf_counter()
    with _Progress(shards, progress and processes.rank == 0 and made > 0) as bar:
        _sample(engine, requests, shards, missing[processes.rank :: processes.size], bar)
        processes.together(lambda: None)  # all are done
    seconds = time.perf_counter() - start
    if processes.rank > 0:
        return shards, manifest, {}
    _wait_for_files(shards)
    speed = {"images_made": made, "processes": processes.size}
    return shards, manifest, summary_of(list(shards.stats()), made, seconds) | speed


def _plan(
    engine: Engine,
    request: Request,
    subjects: Sequence[Subject],
    num: int,
    store: Store,
    settings: dict,
    overwrite: bool,
) -> tuple[dict, list[int]]:
    """The manifest, which is in the folder then, and the shards to be made."""
    for subject in dict.fromkeys(subjects):
        engine.check(asking_for(request, subject))
    engine.check(request.but(seed=request.seed + num - 1))
    checked = engine.check(request)
    manifest = {"schema": SCHEMA, "images": num, "seed": request.seed, "labels": list(subjects)}
    manifest |= {"images_a_shard": SIZE, "request": _common(checked), **settings}
    shards = Shards(store.folder, num, manifest)
    earlier = store.claim(manifest, [*map(shards.name, range(shards.count)), RECORD, GRID], overwrite)
    choices = kept_choices(checked.settings, earlier and earlier["request"])
    manifest["request"] = _common(engine.resolve(checked.but(**choices)))
    store.begin(manifest)
    return manifest, shards.missing(engine.host.image_size)


def _common(request: Request) -> dict:
    """What all images' requests have in common."""
    settings = request.but(prompt=None).to_dict()
    return {name: value for name, value in settings.items() if name not in ("label", "seed")}


def _sample(engine: Engine, requests: Sequence[Request], shards: Shards, todo: Sequence[int], bar: _Progress) -> None:
    """Makes the shards `todo`, in one stream so that the engine's slots stay full; another thread writes them.

    That thread sees no tensor: once a second thread uses torch, OpenMP lets the first one's workers sleep between
    products, since there are more of them than cores, and rounds on a CPU take longer.
    """
    order = [index for shard in todo for index in shards.indices(shard)]
    made: dict[int, dict[int, Output]] = defaultdict(dict)
    writing: deque = deque()
    with ThreadPoolExecutor(1) as writer:
        for k, output in engine.stream([requests[index] for index in order], on_progress=bar.watch):
            shard = order[k] // SIZE
            made[shard][order[k]] = output
            if len(made[shard]) == len(shards.indices(shard)):
                outputs = made.pop(shard)
                arrays = arrays_of([outputs[i] for i in shards.indices(shard)])
                writing.append(writer.submit(shards.write, shard, arrays))
            if len(writing) > WRITING:
                writing.popleft().result()  # raises its errors
            bar.unwritten = sum(map(len, made.values()))
        for each in writing:
            each.result()


def _wait_for_files(shards: Shards) -> None:
    """Until this machine sees what others wrote."""
    end = time.monotonic() + LAG
    while shards.images_there() < shards.num:
        if time.monotonic() > end:
            raise OSError(f"{shards.folder} lacks images of other processes: is it shared by all of the machines?")
        time.sleep(1)


class _Progress:
    """A bar of the images of all processes: those in files, and `unwritten` ones of this process."""

    def __init__(self, shards: Shards, shown: bool) -> None:
        self.unwritten = 0
        self._shares: dict[Request, float] = {}
        self._shards, self._stop = shards, threading.Event()
        there = shards.images_there() if shown else 0
        form = {"unit": " image", "bar_format": BAR}
        self._bar = tqdm(total=shards.num, initial=there, smoothing=0, disable=not shown, **form)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def watch(self, request: Request, share: float, preview: object) -> None:
        """A request of this process is so far."""
        self._shares[request] = share
        if share == 1:
            del self._shares[request]

    def _show(self) -> None:
        done = self._shards.images_there() + self.unwritten + sum(list(self._shares.values()))
        self._bar.n = min(done, self._shards.num)
        self._bar.refresh()

    def _run(self) -> None:
        while not self._stop.wait(1):
            self._show()

    def __enter__(self) -> _Progress:
        if not self._bar.disable:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._bar.disable:
            self._stop.set()
            self._thread.join()
            self._show()
        self._bar.close()
