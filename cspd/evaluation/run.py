"""Generates many images in shards, by any number of processes, and resumes where it was interrupted."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd.engine import Engine
from cspd.evaluation.images import GRID, LIST, Images, Subject, asking_for, subject_of
from cspd.files import (
    Place,
    Remote,
    checked_json,
    misfit,
    open_arrays,
    parse_json,
    publishing,
    read_item,
    write_item,
)
from cspd.method import method_of
from cspd.option import without_removed
from cspd.pixels import to_pil, to_uint8
from cspd.plots import grid
from cspd.request import Output, Request
from cspd.runs import InUse, Store, earlier_choices, missing_files, write_png
from cspd.summary import STATS, summary_of
from cspd.terminal import MOST, progress_bar, shortened

# The part of a run that a process makes. Parts know nothing of each other but the files in the folder.

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # that torchrun sets
REMEDY = f"torchrun sets {', '.join(VARIABLES)}; unset them to use one process"


@dataclass(frozen=True)
class Part:
    """The shards that a process makes: number `index`, and every `count`-th after it."""

    index: int = 0
    count: int = 1


WHOLE = Part()


def part_of(shard: tuple[int, int] | None = None) -> Part:
    """The part that --shard names, or else torchrun's rank, or else the whole run.

    Raises ValueError if torchrun's variables are missing or not integers in their range, or --shard is given too.
    """
    size = _number("WORLD_SIZE", 1, low=1)
    rank = _number("RANK", 0, high=size - 1)
    _number("LOCAL_RANK", 0)
    missing = [name for name in VARIABLES if name not in os.environ]
    if size > 1 and missing:
        names = ", ".join(missing)
        raise ValueError(f"WORLD_SIZE={size} without {names}: {REMEDY}")
    if size > 1 and shard:
        raise ValueError("--shard and torchrun both divide the work: leave out one of them")
    return Part(*shard) if shard else Part(rank, size)


def own_device(wanted: str) -> str:
    """The device of this process: under torchrun a GPU of its own, unless the user names one."""
    is_launched = _number("WORLD_SIZE", 1, low=1) > 1
    if is_launched and torch.cuda.is_available() and wanted in ("auto", "cuda"):
        return f"cuda:{_number('LOCAL_RANK', 0)}"
    return wanted


def _number(name: str, default: int, low: int = 0, high: float = math.inf) -> int:
    """The launcher's variable of this name."""
    text = os.environ.get(name, str(default))
    is_number = re.fullmatch(r"\d{1,9}", text, re.ASCII)
    if not is_number or not low <= int(text) <= high:
        raise ValueError(f"{name}={shortened(text)} is not an integer from {low} to {high}: {REMEDY}")
    return int(text)


# The images of a run in numbered files (shards), and a manifest of everything that they depend on.
#
# The number of a shard determines its images. So any number of processes can generate them and resume.

SCHEMA = "cspd.shards/1"
MANIFEST = "manifest.json"
RECORD = "evaluation.json"  # the report
SIZE = 16  # images in a shard: a killed process loses at most this many, and the images in flight
SHOWN, COLUMNS = 100, 10  # images in the grid
LONG = ("by_lag", "by_step", "by_rank")  # statistics that are not written
EXPLODED = 30.0  # MAR's tokens have unit variance, and strong guidance takes them to about 20
OWN = ("label", "prompt", "seed", "image", "mask", "known")  # of each image, not settings that all share
UNCONDITIONAL = -1  # in a shard, in place of a class
SHAPE = {  # of the manifest; "seeds" if they do not follow the first one
    "images": int,
    "seed": int,
    "seeds?": [int],
    "labels": [(int, str, type(None))],
    "request": dict,
}


class Shards(Images):
    """The folder of a run of `num` images; as a data set, its images, uint8 [3, H, W].

    A shard is an .npz of `images` uint8 [n, H, W, 3], `labels` [n], int64 or prompts, `seeds` int64 [n], and as JSON
    `stats` and, except in older versions, `models`, see `Output`. The number of a shard determines its images, so any
    process can make it.

    Attributes:
        manifest: everything that the images depend on, needed to write or check shards.

    Raises:
        OSError: the shard of an image no longer belongs to this `manifest` when the image is read.
    """

    def __init__(self, folder: Place, num: int, manifest: Mapping | None = None) -> None:
        self.folder, self.num, self.manifest = folder, num, manifest or {}
        self.count = -(-num // SIZE)
        self._last: tuple[int, dict[str, np.ndarray]] | None = None

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.num:
            raise IndexError(index)
        images = self._arrays(index // SIZE)["images"]
        return torch.from_numpy(images[index % SIZE]).permute(2, 0, 1)

    def models(self, index: int) -> dict | None:
        """The `Output.models` of an image; None if its shard is of an older version."""
        shard = index // SIZE
        models = self._arrays(shard).get("models")
        return None if models is None else self._json(shard, models, dict)

    def name(self, shard: int) -> str:
        return f"{shard:05d}.npz"

    def indices(self, shard: int) -> range:
        """The indices of a shard's images."""
        start = shard * SIZE
        return range(start, min(start + SIZE, self.num))

    def files(self) -> list[str]:
        """The names of all files of the run."""
        return [*map(self.name, range(self.count)), RECORD, GRID, LIST]

    def num_written(self) -> int:
        """The number of images in existing shards."""
        existing = {path.name for path in self.folder.glob("*.npz")}
        num = 0
        for shard in range(self.count):
            if self.name(shard) in existing:
                num += len(self.indices(shard))
        return num

    def read(self, shard: int, name: str) -> np.ndarray:
        """One array of a shard. Raises OSError if the shard is missing or damaged."""
        try:
            with open_arrays(self.folder / self.name(shard)) as file:
                return file[name]
        except Exception as error:  # the readers of a damaged archive raise almost any error
            raise self._damaged(shard) from error

    def _damaged(self, shard: int) -> OSError:
        path = self.folder / self.name(shard)
        return OSError(f"{path} is missing, damaged or of another run: repeat the command that makes it")

    def _arrays(self, shard: int) -> dict[str, np.ndarray]:
        """The arrays of a shard; without a manifest, only its images."""
        # images are read in order: the last shard is enough of a cache; several threads may read
        last = self._last
        if last is None or last[0] != shard:
            last = self._last = shard, self._read_again(shard)
        return last[1]

    def _read_again(self, shard: int) -> dict[str, np.ndarray]:
        """As `_arrays`. A process of an earlier run may have outlived that run and replaced them."""
        if not self.manifest:
            return {"images": self.read(shard, "images")}
        arrays = self._item(shard)
        if arrays is None:
            raise self._damaged(shard)
        return arrays

    def stats(self) -> Iterator[dict]:
        """The statistics of each image, see `RoundStats.to_dict`, and its `largest_token`."""
        for shard in range(self.count):
            yield from self._json(shard, self.read(shard, "stats"), [STATS])

    def _json(self, shard: int, array: np.ndarray, shape: object) -> Any:
        """The value of a shape in a shard's array of JSON. Raises OSError if it is damaged."""
        try:
            found = parse_json(str(array))
        except ValueError:
            found = None
        if misfit(found, shape):
            raise self._damaged(shard)
        return found

    def subjects(self) -> list[Subject]:
        """The class or prompt of each image."""
        subjects = []
        for shard in range(self.count):
            subjects += self.read(shard, "labels").tolist()
        return [None if subject == UNCONDITIONAL else subject for subject in subjects]

    def requests(self, indices: Iterable[int]) -> list[Request]:
        """The requests of some images."""
        common = _request_of(self.manifest)
        subjects = self.manifest["labels"]
        requests = []
        for index in indices:
            own = asking_for(common, subjects[index % len(subjects)])
            requests.append(own.but(seed=self._seed(index)))
        return requests

    def _seed(self, index: int) -> int:
        seeds = self.manifest.get("seeds")
        return seeds[index] if seeds else self.manifest["seed"] + index

    def largest_tokens(self) -> dict:
        """The largest magnitude of MAR's tokens, and how many images reach `EXPLODED`.

        Both are None for VQ models, and if a shard of an older version lacks them.
        """
        sizes: list[Any] = [stats.get("largest_token") for stats in self.stats()]
        if None in sizes:
            return {"largest_token": None, "exploded": None}
        exploded = [size for size in sizes if size >= EXPLODED]
        return {"largest_token": max(sizes), "exploded": len(exploded)}

    def write(self, shard: int, arrays: dict[str, np.ndarray]) -> None:
        """Writes a shard from the `arrays_of` all its images, in order. Raises OSError as `publishing`."""
        path = self.folder / self.name(shard)
        write_item(path, arrays, self._made_of(shard))

    def missing(self, side: int | None, among: Iterable[int] | None = None) -> list[int]:
        """The shards still to be generated, of all or `among` some. Damaged shards, and of other images, are removed.

        `side`: of an image, in pixels; None: any.
        """
        shards = {self.name(shard): shard for shard in (range(self.count) if among is None else among)}

        def is_whole(name: str) -> bool:
            return self.is_whole(shards[name], side)

        missing = missing_files(self.folder, shards, is_whole)
        for name in missing:
            (self.folder / name).unlink(missing_ok=True)
        return [shards[name] for name in missing]

    def _made_of(self, shard: int) -> dict:
        """Everything that the images of a shard depend on."""
        indices = self.indices(shard)
        subjects = self.manifest["labels"]
        labels = [subjects[i % len(subjects)] for i in indices]
        labels = [UNCONDITIONAL if label is None else label for label in labels]
        seeds = [self._seed(i) for i in indices]
        return {"manifest": self.manifest, "labels": labels, "seeds": seeds}

    def is_whole(self, shard: int, side: int | None = None) -> bool:
        """Whether a shard has this run's images, undamaged. `side`: of an image, in pixels; None: any."""
        arrays = self._item(shard)
        return arrays is not None and (side is None or arrays["images"].shape[1:3] == (side, side))

    def _item(self, shard: int) -> dict[str, np.ndarray] | None:
        """The arrays of a shard of this run; None if it is absent or damaged."""
        num = len(self.indices(shard))
        made_of = self._made_of(shard)
        like = {"stats": (np.str_, ()), "labels": (np.generic, (num,)), "seeds": (np.integer, (num,))}
        arrays = read_item(self.folder / self.name(shard), made_of, like)
        if arrays is None:
            return None
        images = arrays.get("images", np.empty(0))
        are_images = images.dtype == np.uint8 and images.ndim == 4 and (len(images), images.shape[3]) == (num, 3)
        # labels and seeds are compared here, since shards of older versions have no digest
        are_these = all(arrays[name].tolist() == made_of[name] for name in ("labels", "seeds"))
        return arrays if are_images and are_these else None


def shards_store(folder: Place) -> Store:
    """The folder of a run that samples."""
    return Store(folder, MANIFEST, SCHEMA, SHAPE)


def run_in(folder: Place) -> Shards:
    """The images of a run, finished or not. Raises ValueError if there is none in the folder."""
    remedy = "give a folder of `cspd sample --shard`, `cspd sample --ray` or `cspd evaluate`"
    manifest = checked_json(folder / MANIFEST, {"schema": str, **SHAPE}, remedy)
    if manifest["schema"] != SCHEMA:
        raise ValueError(f"{folder / MANIFEST} is not of this version of cspd: {remedy}")
    num = manifest["images"]
    is_possible = 1 <= num <= MOST and manifest["labels"] and len(manifest.get("seeds", range(num))) == num
    try:
        _request_of(manifest)
    except TypeError as error:
        raise ValueError(f"{folder / MANIFEST}: {error}: load the --plugin of the run, or {remedy}") from None
    if not is_possible:
        raise ValueError(f"{folder / MANIFEST} is damaged: {remedy}")
    for listed in ("files", "temporary"):
        manifest.pop(listed, None)
    return Shards(folder, num, manifest)


def _request_of(manifest: Mapping) -> Request:
    """The settings that all images share. Raises TypeError for unknown ones."""
    return Request(**{name: value for name, value in without_removed(manifest["request"]).items() if name not in OWN})


def arrays_of(outputs: Sequence[Output]) -> dict[str, np.ndarray]:
    """The arrays of a shard of these images."""
    made: list[Any] = [output.image for output in outputs]
    images = [to_uint8(image).permute(1, 2, 0).numpy() for image in made]
    stats = [_stats_of(output) for output in outputs]
    subjects = [subject_of(output.request) for output in outputs]
    return {
        "images": np.stack(images),
        "labels": np.array([UNCONDITIONAL if subject is None else subject for subject in subjects]),
        "seeds": np.array([output.request.seed for output in outputs]),
        "stats": np.array(json.dumps(stats)),
        "models": np.array(json.dumps(dict(outputs[0].models))),
    }


def _stats_of(output: Output) -> dict:
    stats = output.stats.to_dict()
    for name in LONG:
        del stats[name]
    if output.tokens.is_floating_point():
        tokens = output.tokens.nan_to_num(nan=torch.finfo(torch.float32).max)  # JSON has neither NaN nor infinity
        stats["largest_token"] = tokens.abs().max().item()
    return stats


# Sampling many images, by any number of processes, into shards. An interrupted run resumes.

WRITING = 2  # shards that may wait for the disk before sampling waits too
BAR = "{l_bar}{bar}| {n:.1f}/{total} images [{elapsed}<{remaining}, {rate_fmt}]"
AUDITED = 100  # images for each one whose tokens are audited, if the method has an audit
RARELY = 30  # seconds between looks at an object store; a folder is looked at every second


class Task(NamedTuple):
    """What a run samples.

    Attributes:
        request: the settings of all images.
        subjects: classes or prompts, cycled: image i has subjects[i % len(subjects)].
        settings: everything else that the images depend on, as plain values.
    """

    engine: Engine
    request: Request
    subjects: Sequence[Subject]
    settings: dict


def sample_shards(
    task: Task, num: int, store: Store, part: Part = WHOLE, *, overwrite: bool = False
) -> tuple[Shards, dict | None]:
    """Samples the images of a part of a run that its folder lacks; returns all shards and a summary.

    Image i of `num` has the seed task.request.seed + i, whatever the number of parts.

    Args:
        store: the folder, see `shards_store`. A whole run holds it until the store's `with` block ends.
        overwrite: remove another run from the folder, once all settings are checked; of a whole run only.

    Returns:
        shards, and the means of the images' statistics with the speed of all parts meanwhile; None if shards of other
        parts are missing still, or if another part is finishing the complete run.

    Raises:
        ValueError: a bad setting, or as `Store.claim`. OSError: the folder cannot be written.
    """
    if overwrite and part.count > 1:
        raise ValueError("--overwrite would remove images of other parts: remove the folder, or give another --out")
    shared = part.count > 1
    try:
        shards = plan(task, num, store, overwrite=overwrite, shared=shared)
    except InUse:
        shards = Shards(store.folder, num)
        if not shared or shards.num_written() < num:
            raise
        return shards, None
    missing = shards.missing(task.engine.runner.image_size, range(part.index, shards.count, part.count))
    if shared:
        # no other part writes these
        store.remove_temporary({shards.name(shard) for shard in missing})
    existing = shards.num_written()
    start = time.perf_counter()
    with _Progress(shards, len(missing) > 0) as bar:
        audited = generate(task.engine, shards, missing, shards.write, bar)
    seconds = time.perf_counter() - start
    written = shards.num_written()
    if written < num:
        return shards, None
    summary = summary_of(list(shards.stats()), written - existing, seconds)
    num_made = sum(len(shards.indices(shard)) for shard in missing)
    return shards, summary | audit(task.engine, audited, num_made) | {"processes": part.count}


def plan(
    task: Task,
    num: int,
    store: Store | None,
    *,
    seeds: Sequence[int] | None = None,
    overwrite: bool = False,
    shared: bool = False,
) -> Shards:
    """Claims the folder and writes the manifest, or takes the one of an earlier run or, if `shared`, another process.

    Without a store the shards have a manifest, and no folder. `seeds`: of the images, if they are not consecutive.
    Other arguments and errors as in `sample_shards`.
    """
    engine, request, subjects, settings = task
    for subject in dict.fromkeys(subjects):
        engine.check(asking_for(request, subject))
    largest = max(seeds) if seeds else request.seed + num - 1
    engine.check(request.but(seed=largest))
    checked = engine.check(request)
    manifest = {
        "schema": SCHEMA,
        "images": num,
        "seed": request.seed,
        "labels": list(subjects),
        "images_a_shard": SIZE,
        "request": _common(checked),
        **settings,
    }
    following = range(request.seed, request.seed + num)
    if seeds and list(seeds) != list(following):
        manifest["seeds"] = list(seeds)
    if store is None:
        manifest["request"] = _common(engine.resolve(checked, num))
        return Shards(Path(), num, manifest)
    shards = Shards(store.folder, num, manifest)
    earlier = store.claim(manifest, shards.files(), overwrite, shared)
    while True:
        # settings that a method chooses, such as the window, are those of the run that is resumed
        choices = earlier_choices(checked.settings, earlier and earlier["request"])
        manifest["request"] = _common(engine.resolve(checked.but(**choices), num))
        if earlier and shared:
            break
        try:
            store.begin(manifest)
            break
        except FileExistsError:  # another process began meanwhile
            earlier = store.claim(manifest, shards.files(), shared=shared)
    if shared:
        store.release()
    return shards


def finish(shards: Shards) -> Store:
    """Writes the list of a complete run's images and the grid; returns the folder, held until its `with` block ends.

    Raises:
        ValueError: images are missing, or another process holds the folder. OSError: the folder cannot be written.
    """
    lacking = shards.num - shards.num_written()
    if lacking:
        raise ValueError(
            f"{shards.folder} lacks {lacking} of {shards.num} images: run the command that makes them again first"
        )
    store = shards_store(shards.folder)
    store.claim(shards.manifest, shards.files())
    store.begin(shards.manifest)
    write_list(shards.folder, entries(shards))
    write_grid(shards.folder, shards, shards.subjects())
    return store


def finish_part(shards: Shards, part: Part) -> Store | None:
    """As `finish`; None if another part holds the folder: several may find the run complete, and one finishes it."""
    try:
        return finish(shards)
    except InUse:
        if part.count == 1:
            raise
        return None


def entries(shards: Shards) -> Iterator[dict]:
    """Index, file, digest and request of each image."""
    for index, request in enumerate(shards.requests(range(shards.num))):
        settings = {name: value for name, value in request.to_dict().items() if value is not None}
        yield {
            "index": index,
            "file": shards.name(index // SIZE),
            "sha256": digest_of_pixels(shards[index]),
            "request": settings,
        }


def digest_of_pixels(image: Tensor) -> str:
    """SHA-256, in hexadecimal, of uint8 [3, H, W] in the order of rows, columns and colours, whatever the file."""
    return hashlib.sha256(image.permute(1, 2, 0).numpy().tobytes()).hexdigest()


def write_list(folder: Place, images: Iterable[dict]) -> None:
    """Writes the list of a folder's images, as JSON lines. Raises OSError as `publishing`."""
    with publishing(folder / LIST) as temporary, temporary.open("w") as file:
        for entry in images:
            file.write(json.dumps(entry) + "\n")


def write_grid(folder: Place, images: Images, subjects: Sequence[Subject] | None) -> None:
    """Writes the first images with their classes or prompts. Raises OSError as `publishing`."""
    count = min(SHOWN, len(images))
    shown = [to_pil(images[i]) for i in range(count)]
    captions = list(map(str, subjects[:SHOWN])) if subjects else [""] * count
    write_png(folder / GRID, grid(shown, captions, min(COLUMNS, count)))


def _common(request: Request) -> dict:
    """The settings that the requests of all images share."""
    settings = request.but(prompt=None).to_dict()
    for own in ("label", "seed"):
        settings.pop(own, None)
    return settings


def generate(
    engine: Engine,
    shards: Shards,
    todo: Sequence[int],
    write: Callable[[int, dict], object],
    bar: _Progress | None = None,
) -> list[Output]:
    """Generates the shards `todo`, in one stream so that the engine's slots stay full. Another thread writes them.

    `write` takes the number of a shard and its `arrays_of`. Returns one image in `AUDITED`.

    The other thread uses no tensor. Once a second thread uses torch, OpenMP has more workers than cores and lets them
    sleep between products, and rounds on a CPU take longer.
    """
    order = [index for shard in todo for index in shards.indices(shard)]
    finished: dict[int, dict[int, Output]] = defaultdict(dict)  # of each shard, by the index of the image
    writing: deque = deque()
    audited = []
    with ThreadPoolExecutor(1) as writer:
        stream = engine.stream(shards.requests(order), on_progress=bar.watch if bar else None)
        for number, (position, output) in enumerate(stream):
            if number % AUDITED == 0:
                audited.append(output)
            index = order[position]
            shard = index // SIZE
            finished[shard][index] = output
            indices = shards.indices(shard)
            if len(finished[shard]) == len(indices):
                outputs = finished.pop(shard)
                arrays = arrays_of([outputs[i] for i in indices])
                writing.append(writer.submit(write, shard, arrays))
            if len(writing) > WRITING:
                writing.popleft().result()  # raises its errors
            if bar:
                bar.unwritten = sum(map(len, finished.values()))
        for each in writing:
            each.result()
    return audited


def audit(engine: Engine, finished: Sequence[Output], num: int) -> dict:
    """What the method says of its choices and, measured on some of `num` new images, of its divergence.

    An image in `AUDITED` is audited whole; of a shorter run, as small a part of one image.
    """
    if not finished:
        return {}
    request = finished[0].request
    method, runner = method_of(request), engine.runners[str(request.family)]
    plan = {"plan": method.explain(request, runner)}
    tokens = torch.stack([output.tokens for output in finished])
    return plan | method.audit(runner, [output.request for output in finished], tokens, min(1.0, num / AUDITED))


class _Progress:
    """A progress bar over the images of all parts: those in shards, and this process's unwritten ones."""

    def __init__(self, shards: Shards, shown: bool) -> None:
        self.unwritten = 0
        self._fractions: dict[Request, float] = {}
        self._shards = shards
        self._last_shown = time.monotonic()
        self._bar = progress_bar(total=shards.num, smoothing=0, disable=not shown, unit=" image", bar_format=BAR)
        if shown:
            self._bar.initial = self._bar.n = shards.num_written()

    def watch(self, request: Request, fraction: float, preview: object) -> None:
        """Notes the finished fraction of a request of this process."""
        self._fractions[request] = fraction
        if fraction == 1:
            del self._fractions[request]
        # counting the shards lists a folder
        pause = RARELY if isinstance(self._shards.folder, Remote) else 1
        if time.monotonic() > self._last_shown + pause:
            self._show()

    def _show(self) -> None:
        if self._bar.disable:
            return
        done = self._shards.num_written() + self.unwritten + sum(self._fractions.values())
        self._bar.n = min(done, self._shards.num)
        self._bar.refresh()
        self._last_shown = time.monotonic()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._show()
        self._bar.close()
