"""Sampling on the machines of a Ray cluster: Ray decides who makes which shard, and replaces workers that die."""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from cspd.checkpoints import load, run_settings
from cspd.evaluation.images import subject_of
from cspd.evaluation.run import SIZE, Shards, Task, finish, generate, plan, shards_store
from cspd.files import Place, place_of
from cspd.request import Request
from cspd.runs import locked
from cspd.summary import summary_of
from cspd.terminal import install, progress_bar

try:
    import ray
    from ray.data import ActorPoolStrategy, DataContext, Dataset
except ModuleNotFoundError as missing:
    message = f"{missing.name} is not installed: {install('ray')}"
    raise ModuleNotFoundError(message, name=missing.name) from None

BATCHES = 4  # full batches of an engine in one call: its slots run empty at the end of each
BAR = "{l_bar}{bar}| {n}/{total} images [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
MODELS = {"vae": None, "draft": None, "eagle": None, "text_encoder": None, "arch": None}
COMPUTING = {"device": "auto", "precision": "fp32", "compiled": False, "graphs": None}


class Workers(NamedTuple):
    """The engines on a cluster: how many, with how many slots, and what Ray reserves for each; as in `sample`."""

    num_gpus: float = 1
    num_cpus: float = 1
    number: int | None = None
    max_batch: int = 8


def sample(
    requests: Sequence[Request],
    checkpoint: str | Path = "digits32",
    *,
    out: str | Path | None = None,
    num_gpus: float = 1,
    num_cpus: float = 1,
    workers: int | None = None,
    max_batch: int = 8,
    overwrite: bool = False,
    progress: bool = True,
    **models: Any,
) -> Dataset | Shards:
    """Generates images on a Ray cluster: the one of `ray.init`, or else a new one on this machine.

    Args:
        requests: all with the same settings, each with its own seed and class or prompt.
        checkpoint, max_batch, models: as in `cspd.load`; all machines have these files.
        out: a folder that all machines share, or its URL in an object store. Images that it has are not made again.
        num_gpus, num_cpus: of one engine; `num_gpus=0` samples on CPUs.
        workers: the number of engines; by default as many as the cluster has room for.
        overwrite: replace a run with other settings in `out`.

    Returns:
        With `out`, the images as `cspd.evaluation.run.Shards`, a data set, once all are made. Without, a lazy Ray
        `Dataset` with a row for each image, in any order: "index" of the request, "image" uint8 [H, W, 3], "label" (-1:
        unconditional) or "prompt", and "seed". If a worker dies, Ray makes its unfinished images again.

    Raises:
        ValueError: requests that differ in other settings, an invalid one, or as `cspd.runs.Store.claim`.
        OSError: `out` cannot be written. Other errors of a worker that are not its death end the run, too.
    """
    unknown = models.keys() - MODELS.keys() - COMPUTING.keys()
    if unknown:
        raise TypeError(f"sample() got an unexpected keyword argument {sorted(unknown)[0]!r}")
    if not requests:
        raise ValueError("there are no requests: give at least one")
    first = requests[0]
    for request in requests:
        own = {"label": first.label, "prompt": first.prompt, "seed": first.seed}
        if request.but(**own) != first:
            raise ValueError(f"{request} has other settings than {first}: sample them in several calls")
    given = MODELS | COMPUTING | models
    prepare = partial(_prepared, tuple(requests), str(checkpoint), given, max_batch)
    seeds = [request.seed for request in requests]
    asked = Workers(num_gpus, num_cpus, workers, max_batch)
    if out is None:
        return dataset(prepare, len(requests), None, asked, seeds)[0]
    shards, _ = make(prepare, len(requests), place_of(str(out)), asked, seeds, overwrite=overwrite, progress=progress)
    with finish(shards):
        return shards


def _prepared(requests: Sequence[Request], checkpoint: str, models: dict, max_batch: int) -> Task:
    engine = load(checkpoint, max_batch=min(max_batch, len(requests)), **models)
    first = engine.check(requests[0])
    subjects = [subject_of(engine.check(request)) for request in requests]
    asked = Namespace(
        checkpoint=checkpoint,
        vae=models["vae"],
        draft_checkpoint=models["draft"],
        eagle=models["eagle"],
        text_encoder=models["text_encoder"],
        precision=models["precision"],
        compile=models["compiled"],
        graphs=models["graphs"],
    )
    return Task(engine, requests[0], subjects, run_settings(asked, first))


def make(
    prepare: Callable[[], Task],
    num: int,
    out: Place,
    workers: Workers,
    seeds: Sequence[int] | None = None,
    *,
    overwrite: bool = False,
    progress: bool = True,
) -> tuple[Shards, dict]:
    """Makes the images that a folder lacks; returns them and a summary, see `cspd.evaluation.run.sample_shards`.

    `prepare` runs in each worker. Errors as in `sample`.
    """
    start = perf_counter()
    if isinstance(out, Path):
        out = out.resolve()  # workers have other current folders
    rows, shards = dataset(prepare, num, out, workers, seeds, overwrite)
    made = 0
    restarted = set()
    with (
        locked(out),
        _errors(),
        progress_bar(total=num, smoothing=0, disable=not progress, unit=" image", bar_format=BAR) as bar,
    ):
        for row in rows.iter_rows():
            made += row["made"]
            if row["restarted"]:
                restarted.add(row["worker"])
                bar.set_postfix_str(f"{len(restarted)} workers died and were replaced")
            bar.update(row["images"])
    summary = summary_of(list(shards.stats()), made, perf_counter() - start)
    about = {"processes": row["workers"], "restarted": len(restarted), "machine": json.loads(row["machine"])}
    return shards, summary | about


def dataset(
    prepare: Callable[[], Task],
    num: int,
    out: Place | None,
    workers: Workers,
    seeds: Sequence[int] | None = None,
    overwrite: bool = False,
) -> tuple[Dataset, Shards]:
    """A lazy data set, whose rows are images, or shards once they are in the folder `out`; and those shards."""
    connect()
    number = workers.number or room_for(workers.num_gpus, workers.num_cpus)
    resources: dict[str, Any] = {"num_gpus": workers.num_gpus, "num_cpus": workers.num_cpus}
    # one worker decides what a method leaves open, such as the window, for all
    planning = ray.remote(_planned).options(max_retries=-1, **resources)
    with _errors():
        shards = ray.get(planning.remote(prepare, num, out, seeds, overwrite))
    # there is one bar, of images
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    DataContext.get_current().enable_progress_bars = False
    at_once = min(-(-BATCHES * workers.max_batch // SIZE), -(-shards.count // number))
    calls = -(-shards.count // at_once)
    items = [{"shard": shard} for shard in range(shards.count)]
    rows: ray.data.Dataset = ray.data.from_items(items, override_num_blocks=calls)
    rows = rows.map_batches(
        _Worker,
        batch_size=None,
        compute=ActorPoolStrategy(size=number),
        fn_constructor_kwargs={"prepare": prepare, "shards": shards, "workers": number, "to_files": out is not None},
        **resources,
    )
    return rows, shards


def connect(address: str | None = None) -> None:
    """Connects to a Ray cluster unless this process is connected to one.

    `address`: as in `ray.init`; "local" or None starts a cluster on this machine. Raises OSError if it is not there.
    """
    if ray.is_initialized():
        return
    try:
        if address in (None, "local"):
            ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise OSError(f"no Ray cluster at {address} ({error}): start one with `ray start --head`") from None


def room_for(num_gpus: float, num_cpus: float) -> int:
    """The number of engines that the cluster has room for. Raises ValueError if there is none."""
    have = ray.cluster_resources()
    needed = {"GPU": num_gpus, "CPU": num_cpus}
    fits = [int(have.get(name, 0) / amount) for name, amount in needed.items() if amount]
    if not fits or min(fits) < 1:
        raise ValueError(
            f"the Ray cluster has {have.get('GPU', 0):g} GPUs and {have.get('CPU', 0):g} CPUs, and an engine needs"
            f" {num_gpus:g} and {num_cpus:g}: give num_gpus=0 (--device cpu), or add machines"
        )
    return min(fits)


def gpus_of_an_engine() -> int:
    """1, or 0 if the cluster has only CPUs."""
    return int(ray.cluster_resources().get("GPU", 0) > 0)


def _planned(
    prepare: Callable[[], Task], num: int, out: Place | None, seeds: Sequence[int] | None, overwrite: bool
) -> Shards:
    task = prepare()
    with contextlib.ExitStack() as held:
        store = held.enter_context(shards_store(out)) if out else None
        return plan(task, num, store, seeds=seeds, overwrite=overwrite, shared=not overwrite)


class _Worker:
    """An engine on a machine of the cluster. Ray calls it with the numbers of shards."""

    def __init__(self, prepare: Callable[[], Task], shards: Shards, workers: int, to_files: bool) -> None:
        self.engine = prepare().engine
        self.shards = shards
        self.to_files = to_files
        self.about = {
            "worker": uuid.uuid4().hex,
            "workers": workers,
            "machine": json.dumps(self.engine.describe()),
            "restarted": ray.get_runtime_context().was_current_actor_reconstructed,
        }

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list]:
        todo = batch["shard"].tolist()
        if not self.to_files:
            return self._images(todo)
        # a worker that died may have written some of them
        missing = self.shards.missing(self.engine.runner.image_size, todo)
        generate(self.engine, self.shards, missing, self.shards.write)
        images = [len(self.shards.indices(shard)) for shard in todo]
        made = [num if shard in missing else 0 for shard, num in zip(todo, images)]
        about = {name: [value] * len(todo) for name, value in self.about.items()}
        return {"shard": todo, "images": images, "made": made, **about}

    def _images(self, todo: list[int]) -> dict[str, list]:
        found: dict[int, dict] = {}
        generate(self.engine, self.shards, todo, found.__setitem__)
        rows: dict[str, list] = {"index": [], "image": [], "seed": []}
        labels: list = []
        for shard in todo:
            rows["index"] += self.shards.indices(shard)
            rows["image"] += list(found[shard]["images"])
            rows["seed"] += found[shard]["seeds"].tolist()
            labels += found[shard]["labels"].tolist()
        return rows | {"prompt" if isinstance(labels[0], str) else "label": labels}


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raises a worker's own error in place of Ray's, which repeats the worker's traceback."""
    try:
        yield
    except (ray.exceptions.RayTaskError, ray.exceptions.UserCodeException) as error:
        cause: BaseException = error
        while isinstance(cause, ray.exceptions.RayError) and (
            inner := getattr(cause, "cause", None) or cause.__cause__
        ):
            cause = inner
        raise cause from None
