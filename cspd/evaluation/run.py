"""Generates many images in shards, by any number of processes, and resumes where it was interrupted."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from cspd.engine import Engine
from cspd.evaluation.images import GRID, Subject, asking_for, in_turn, subject_of
from cspd.files import read_item, write_item
from cspd.request import Output, Request, to_uint8
from cspd.runs import Store, earlier_choices, missing_files, summary_of
from cspd.terminal import shortened

# The processes of a run, started by torchrun, and their messages to each other.
#
# A failure in common work ends all processes, with one message. A process that fails in its own images ends alone, with
# its own message, and torchrun stops the others.

T = TypeVar("T")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # that torchrun sets
REMEDY = f"torchrun sets {', '.join(VARIABLES)}; unset them to use one process"
PATIENCE = timedelta(days=7)  # for the slowest process to finish; a process that dies is noticed at once
POLL = 0.05  # seconds


class Processes:
    """This process and the others that share the work, as a context manager. Without torchrun there is only this one.

    Attributes:
        rank: 0 .. size - 1. size: the number of processes. local: the rank among the processes of this machine.
    """

    def __init__(self) -> None:
        """Raises ValueError if the launcher's variables are missing or not integers in their range."""
        self.size = _number("WORLD_SIZE", 1, low=1)
        self.rank = _number("RANK", 0, high=self.size - 1)
        self.local = _number("LOCAL_RANK", 0)
        missing = [name for name in VARIABLES if name not in os.environ]
        if self.size > 1 and missing:
            names = ", ".join(missing)
            raise ValueError(f"WORLD_SIZE={self.size} without {names}: {REMEDY}")
        if self.size > 1:
            _number("MASTER_PORT", 0, high=65535)

    def __enter__(self) -> Processes:
        if self.size > 1:
            try:
                dist.init_process_group("gloo")  # messages are short
                self._waiting = dist.new_group(timeout=PATIENCE)
            except RuntimeError as error:
                address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                raise OSError(
                    f"not all of the {self.size} processes reached {address}: start them again with torchrun"
                ) from error
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if self.size > 1 and failure is None:  # after a failure, this would wait for the other processes
            dist.destroy_process_group()

    def device(self, wanted: str) -> str:
        """The device of this process: a GPU of its own, unless the user names one."""
        if self.size > 1 and torch.cuda.is_available() and wanted in ("auto", "cuda"):
            return f"cuda:{self.local}"
        return wanted

    def together(self, work: Callable[[], T]) -> T:
        """Runs `work` in all processes, waits for them, and returns the result of this one.

        Raises:
            ValueError, OSError, OutOfMemoryError: from `work`, in the first process in which it failed.
            SystemExit: it failed in another process, which reports it. OSError: another process is gone.
        """
        result = error = None
        try:
            result = work()
        except (ValueError, OSError, torch.OutOfMemoryError) as failure:
            error = failure
        # every process learns who failed, so that none waits for a process that has ended
        failures = self._exchange(error is not None)
        if any(failures):
            first = failures.index(True)
            raise error if first == self.rank else SystemExit(2)
        return result

    def from_first(self, work: Callable[[], T]) -> T:
        """Runs `work` in the first process only, and returns its result in all; errors as in `together`."""
        result = self.together(lambda: work() if self.rank == 0 else None)
        return self._exchange(result)[0]

    def _exchange(self, value: object) -> list:
        """The values of all processes, by rank."""
        values = [value] * self.size
        if self.size > 1:
            try:
                self._wait()
                dist.all_gather_object(values, value)
            except RuntimeError as gone:
                raise OSError("another process of this run is gone: repeat the command, it resumes here") from gone
        return values

    def _wait(self) -> None:
        """Waits for all processes. It polls because Python handles no signal inside a collective."""
        barrier = dist.barrier(self._waiting, async_op=True)
        while not barrier.is_completed():
            time.sleep(POLL)
        barrier.wait()  # raises its errors


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
LONG = ("by_lag", "by_step", "by_rank")  # statistics that are not written
EXPLODED = 30.0  # MAR's tokens have unit variance, and strong guidance takes them to about 20
LARGEST = torch.finfo(torch.float32).max
SHAPE = {"images": int, "seed": int, "labels": [(int, str)], "request": dict}  # of the manifest


class Shards(Dataset):
    """The folder of a run of `num` images; as a data set, its images, uint8 [3, H, W].

    A shard is an .npz of `images` uint8 [n, H, W, 3], `labels` [n], int64 or prompts, `seeds` int64 [n], and `stats`,
    as JSON.

    Attributes:
        manifest: everything that the images depend on, needed to write or check shards.

    Raises:
        OSError: the shard of an image no longer belongs to this `manifest` when the image is read.
    """

    def __init__(self, folder: Path, num: int, manifest: Mapping | None = None) -> None:
        self.folder, self.num, self.manifest = folder, num, manifest or {}
        self.count = -(-num // SIZE)
        self._last: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.num:
            raise IndexError(index)
        shard = index // SIZE
        # images are read in order: the last shard is enough of a cache
        if self._last is None or self._last[0] != shard:
            self._last = shard, self._images(shard)
        _, images = self._last
        return torch.from_numpy(images[index % SIZE]).permute(2, 0, 1)

    def name(self, shard: int) -> str:
        return f"{shard:05d}.npz"

    def indices(self, shard: int) -> range:
        """The indices of a shard's images."""
        start = shard * SIZE
        return range(start, min(start + SIZE, self.num))

    def num_written(self) -> int:
        """The number of images in existing shards."""
        existing = {path.name for path in self.folder.glob("*.npz")}
        num = 0
        for shard in range(self.count):
            if self.name(shard) in existing:
                num += len(self.indices(shard))
        return num

    def read(self, shard: int, name: str) -> np.ndarray:
        """One array of a shard."""
        with np.load(self.folder / self.name(shard)) as file:
            return file[name]

    def _images(self, shard: int) -> np.ndarray:
        """The images of a shard. A process of an earlier run may have outlived that run and replaced them."""
        if not self.manifest:
            return self.read(shard, "images")
        path = self.folder / self.name(shard)
        arrays = read_item(path, self._made_of(shard), {})
        if arrays is None:
            raise OSError(f"another process changed {path} meanwhile: end it and repeat the command")
        return arrays["images"]

    def stats(self) -> Iterator[dict]:
        """The statistics of each image, see `RoundStats.to_dict`, and its `largest_token`."""
        for shard in range(self.count):
            yield from json.loads(str(self.read(shard, "stats")))

    def subjects(self) -> list[Subject]:
        """The class or prompt of each image."""
        subjects = []
        for shard in range(self.count):
            subjects += self.read(shard, "labels").tolist()
        return subjects

    def largest_tokens(self) -> dict:
        """The largest magnitude of MAR's tokens, and how many images reach `EXPLODED`.

        Both are None for VQ models, and if a shard of an older version lacks them.
        """
        sizes = [stats.get("largest_token") for stats in self.stats()]
        if None in sizes:
            return {"largest_token": None, "exploded": None}
        exploded = [size for size in sizes if size >= EXPLODED]
        return {"largest_token": max(sizes), "exploded": len(exploded)}

    def write(self, shard: int, arrays: dict[str, np.ndarray]) -> None:
        """Writes a shard from the `arrays_of` all its images, in order. Raises OSError as `publishing`."""
        path = self.folder / self.name(shard)
        write_item(path, arrays, self._made_of(shard))

    def missing(self, side: int) -> list[int]:
        """The shards still to be generated. Damaged shards, and shards of other images, are removed.

        `side`: of an image, in pixels.
        """
        shards = {self.name(shard): shard for shard in range(self.count)}

        def is_whole(name: str) -> bool:
            return self._is_whole(shards[name], side)

        missing = missing_files(self.folder, shards, is_whole)
        for name in missing:
            (self.folder / name).unlink(missing_ok=True)
        return [shards[name] for name in missing]

    def _made_of(self, shard: int) -> dict:
        """Everything that the images of a shard depend on."""
        indices = self.indices(shard)
        subjects = self.manifest["labels"]
        labels = [subjects[i % len(subjects)] for i in indices]
        seeds = [self.manifest["seed"] + i for i in indices]
        return {"manifest": self.manifest, "labels": labels, "seeds": seeds}

    def _is_whole(self, shard: int, side: int) -> bool:
        num = len(self.indices(shard))
        made_of = self._made_of(shard)
        like = {
            "images": (np.uint8, (num, side, side, 3)),
            "stats": (np.str_, ()),
            "labels": (np.generic, (num,)),
            "seeds": (np.integer, (num,)),
        }
        arrays = read_item(self.folder / self.name(shard), made_of, like)
        if arrays is None:
            return False
        # labels and seeds are compared here, since shards of older versions have no digest
        return all(arrays[name].tolist() == made_of[name] for name in ("labels", "seeds"))


def shards_store(folder: Path) -> Store:
    """The folder of a run that samples."""
    return Store(folder, MANIFEST, SCHEMA, SHAPE)


def arrays_of(outputs: Sequence[Output]) -> dict[str, np.ndarray]:
    """The arrays of a shard of these images."""
    images = [to_uint8(output.image).permute(1, 2, 0).numpy() for output in outputs]
    stats = [_stats_of(output) for output in outputs]
    return {
        "images": np.stack(images),
        "labels": np.array([subject_of(output.request) for output in outputs]),
        "seeds": np.array([output.request.seed for output in outputs]),
        "stats": np.array(json.dumps(stats)),
    }


def _stats_of(output: Output) -> dict:
    stats = output.stats.to_dict()
    for name in LONG:
        del stats[name]
    if output.tokens.is_floating_point():
        tokens = output.tokens.nan_to_num(nan=LARGEST)  # JSON has neither NaN nor infinity
        stats["largest_token"] = tokens.abs().max().item()
    return stats


# Sampling for an evaluation: many images, by any number of processes, into shards. An interrupted run resumes.

WRITING = 2  # shards that may wait for the disk before sampling waits too
BAR = "{l_bar}{bar}| {n:.1f}/{total} images [{elapsed}<{remaining}, {rate_fmt}]"
LAG = 60  # seconds until a shared file system shows another machine's file, at most


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
    """Samples the images of a run that its folder lacks; returns the shards, the manifest and a summary.

    Image i has the class or prompt subjects[i % len(subjects)] and the seed request.seed + i, whatever the number of
    processes.

    Args:
        request: the settings of all images. settings: everything else that the images depend on, as plain values.
        store: the folder, see `shards_store`. It stays claimed until the store's `with` block ends.
        overwrite: remove another run from the folder, once all settings are checked.

    Returns:
        shards, manifest, and the means of the images' statistics with this run's speed; only the first process needs
        the last two.

    Raises:
        ValueError: a bad setting, or as `Store.claim`. OSError: the folder cannot be written.
        Others as in `Processes.together`.
    """
    # the first process claims the folder before the others write there
    plan = functools.partial(_plan, engine, request, subjects, num, store, settings, overwrite)
    manifest, missing = processes.from_first(plan)
    shards = Shards(store.folder, num, manifest)
    common = Request(**manifest["request"])
    requests = []
    for i, subject in enumerate(in_turn(subjects, num)):
        requests.append(asking_for(common, subject).but(seed=request.seed + i))
    generated = sum(len(shards.indices(shard)) for shard in missing)
    start = time.perf_counter()
    with _Progress(shards, progress and processes.rank == 0 and generated > 0) as bar:
        _sample(engine, requests, shards, missing[processes.rank :: processes.size], bar)
        processes.together(lambda: None)  # waits for all
    seconds = time.perf_counter() - start
    if processes.rank > 0:
        return shards, manifest, {}
    _wait_for_files(shards)
    summary = summary_of(list(shards.stats()), generated, seconds)
    return shards, manifest, summary | {"images_made": generated, "processes": processes.size}


def _plan(
    engine: Engine,
    request: Request,
    subjects: Sequence[Subject],
    num: int,
    store: Store,
    settings: dict,
    overwrite: bool,
) -> tuple[dict, list[int]]:
    """Claims the folder and writes the manifest; returns the manifest, and the shards to be generated."""
    for subject in dict.fromkeys(subjects):
        engine.check(asking_for(request, subject))
    engine.check(request.but(seed=request.seed + num - 1))  # the largest seed
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
    shards = Shards(store.folder, num, manifest)
    names = [shards.name(shard) for shard in range(shards.count)]
    earlier = store.claim(manifest, [*names, RECORD, GRID], overwrite)
    # settings that a method chooses, such as the window, are those of the run that is resumed
    choices = earlier_choices(checked.settings, earlier and earlier["request"])
    manifest["request"] = _common(engine.resolve(checked.but(**choices)))
    store.begin(manifest)
    return manifest, shards.missing(engine.runner.image_size)


def _common(request: Request) -> dict:
    """The settings that the requests of all images share."""
    settings = request.but(prompt=None).to_dict()
    for own in ("label", "seed"):
        settings.pop(own, None)
    return settings


def _sample(engine: Engine, requests: Sequence[Request], shards: Shards, todo: Sequence[int], bar: _Progress) -> None:
    """Generates the shards `todo`, in one stream so that the engine's slots stay full. Another thread writes them.

    The other thread uses no tensor. Once a second thread uses torch, OpenMP has more workers than cores and lets them
    sleep between products, and rounds on a CPU take longer.
    """
    order = [index for shard in todo for index in shards.indices(shard)]
    finished: dict[int, dict[int, Output]] = defaultdict(dict)  # of each shard, by the index of the image
    writing: deque = deque()
    with ThreadPoolExecutor(1) as writer:
        stream = engine.stream([requests[index] for index in order], on_progress=bar.watch)
        for position, output in stream:
            index = order[position]
            shard = index // SIZE
            finished[shard][index] = output
            indices = shards.indices(shard)
            if len(finished[shard]) == len(indices):
                outputs = finished.pop(shard)
                arrays = arrays_of([outputs[i] for i in indices])
                writing.append(writer.submit(shards.write, shard, arrays))
            if len(writing) > WRITING:
                writing.popleft().result()  # raises its errors
            bar.unwritten = sum(map(len, finished.values()))
        for each in writing:
            each.result()


def _wait_for_files(shards: Shards) -> None:
    """Waits until this machine sees the shards of others."""
    end = time.monotonic() + LAG
    while shards.num_written() < shards.num:
        if time.monotonic() > end:
            raise OSError(f"{shards.folder} lacks images of other processes: give a folder that all machines share")
        time.sleep(1)


class _Progress:
    """A progress bar over the images of all processes: those in shards, and this process's unwritten ones."""

    def __init__(self, shards: Shards, shown: bool) -> None:
        self.unwritten = 0
        self._fractions: dict[Request, float] = {}
        self._shards = shards
        self._last_shown = time.monotonic()
        self._bar = tqdm(total=shards.num, smoothing=0, disable=not shown, unit=" image", bar_format=BAR)
        if shown:
            self._bar.initial = self._bar.n = shards.num_written()

    def watch(self, request: Request, fraction: float, preview: object) -> None:
        """Notes the finished fraction of a request of this process."""
        self._fractions[request] = fraction
        if fraction == 1:
            del self._fractions[request]
        # counting the shards lists a folder: once a second is enough
        if time.monotonic() > self._last_shown + 1:
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
