"""The engine: takes requests, runs rounds over everything in flight, hands out finished images."""

from __future__ import annotations

import os
import types
import warnings
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sized
from pathlib import Path
from typing import Any

import torch

from cspd import noise as philox_noise
from cspd import saving
from cspd.flight import Flight
from cspd.graphs import Graphs
from cspd.lookup import choose, families_for, method_of
from cspd.machine import describe, pick_device
from cspd.method import Host, Method, Models, placed
from cspd.option import plain
from cspd.parsing import shortened
from cspd.precision import Precision, precision_of
from cspd.sequence import Label, Output, Request, RoundStats, Sequence, requests_of
from cspd.streaming import Item, OnProgress, check_all, checked, forget_failures, from_threads, stream

CLOSED = "this engine is closed: make another one, as by cspd.load"


class Engine:
    """Generates images with target models, many requests at a time.

    `max_batch` sequences are in flight at once; a finished one is replaced at the next step. An image depends only on
    its own request, never on the rest of the batch, but for rounding (docs/precision.md has the rates).

    Args:
        models: of each family at most one set; a request that names none is of the first that takes its label or prompt
            and has its method. They are moved to the device, put in eval mode and frozen, in place. What was made of
            weights, as calibrations and copies in another precision, does not see others that are loaded later.
        max_batch: slots; memory grows with them, not with the number of requests.
        device: "auto", "cpu", "cuda" or "cuda:N".
        precision: "fp32", "tf32" or "bf16", see `cspd.precision.POLICIES`; or another engine's on the same device.
        compiled: run MAR's speculative rounds and VQ models' layers through torch.compile: half a minute on first use,
            then faster.
        graphs: replay the work of fixed shape as CUDA graphs, see `cspd.graphs`; by default on CUDA, and nowhere else.
        cache: where calibrations are kept, before the user's cache directory.
        noise: the source of randomness, see `cspd.noise`; replaced in tests that inject noise.

    Raises:
        ValueError: models that do not fit each other, no such device, unknown precision, graphs without CUDA, or too
            little memory.
    """

    def __init__(
        self,
        *models: Models,
        max_batch: int = 8,
        device: str | torch.device = "auto",
        precision: str | Precision = "fp32",
        compiled: bool = False,
        graphs: bool | None = None,
        cache: Path | None = None,
        noise: types.ModuleType = philox_noise,
    ) -> None:
        max_batch = plain(max_batch)
        families = [getattr(each, "family", None) for each in models]
        if not families or None in families or len(set(families)) < len(families):
            raise ValueError("an engine has MARModels(...), VQModels(...) or one of each")
        for each in models:
            each.check()
        self.device = pick_device(device)
        self.precision = precision_of(precision, self.device)
        self.compiled, self.graphs = compiled, Graphs(self.device, graphs)
        self._models: list[Models] = [placed(each, self.device) for each in models]
        how: dict[str, Any] = {"noise": noise, "compiled": compiled, "cache": cache}
        self._settings = how | {"graphs": graphs}
        self.hosts: dict[str, Host] = {}
        for each in self._models:
            self.hosts[each.family] = each.host(max_batch, self.device, self.precision, **how, graphs=self.graphs)
        self.num_slots, self._closed = max_batch, False
        self._classes = {each.family: each.classes for each in self._models}
        self._flight = Flight(self.hosts, max_batch, self.device)
        self.scheduler = self._flight.scheduler
        self._inbox: deque = deque()  # of the requests of `add_request`

    def __repr__(self) -> str:
        sizes = ", ".join(f"{family} {host.image_size}x{host.image_size}" for family, host in self.hosts.items())
        how = f"{sizes} pixels; {self.num_slots} slots, {self.device}, {self.precision.policy}"
        return f"<Engine, {'closed' if self._closed else how}>"

    @property
    def host(self) -> Host:
        """The first family's."""
        self._check_open()
        return next(iter(self.hosts.values()))

    def with_slots(self, max_batch: int) -> Engine:
        """Another engine over the same models."""
        self._check_open()
        settings = {"device": self.device, "precision": self.precision, **self._settings}  # and its copies of weights
        engine = Engine(*self._models, max_batch=max_batch, **settings)
        for family, host in self.hosts.items():
            engine.hosts[family].adopt(host)
        return engine

    def describe(self) -> dict:
        """The machine that it runs on, and how, in a few words."""
        how = {"precision": self.precision.policy, "compiled": self.compiled}
        return describe(self.device) | how | {"graphs": self.graphs.enabled or None}  # None as in older records

    def check(self, request: Request) -> Request:
        """The request with every default filled in but what may take a calibration: the window of `speculative`.

        Raises:
            ValueError: a setting is bad, or a model that the method needs is not there.
        """
        return self._checked(request)[0]

    def name_of(self, request: Request) -> str:
        """The prompt of a checked request, or the name of its class; its number where classes have no names."""
        if request.prompt is not None:
            return request.prompt
        return self._classes[str(request.family)].name_of(request.label)

    def resolve(self, request: Request) -> Request:
        """The request with every default filled in, checked. Raises ValueError on a bad one.

        The window of `speculative` is chosen here, which calibrates the draft where that was not done before. Warns of
        settings that are seldom meant.
        """
        request, method = self._checked(request)
        with self._flight.turns.take():
            request = self.hosts[method.family].resolve(request, method)
        if advice := method.advice(request):
            warnings.warn(advice, stacklevel=1)  # always from here, so that Python says it once
        return request

    def _checked(self, request: Request) -> tuple[Request, Method]:
        if not isinstance(request, Request):
            raise ValueError(f"{shortened(request)} is no request: give cspd.Request(label, ...)")
        self._check_open()
        request, method = choose(request, families_for(request, self.hosts))
        if isinstance(request.label, str) and self.hosts[method.family].num_classes:
            request = request.but(label=self._classes[method.family].number_of(request.label))
        if request.label is None and request.prompt is None and request.cfg is None:  # nothing to guide towards
            request = request.but(cfg=1.0)
        return self.hosts[method.family].check(request, method), method

    def add_request(self, request: Request) -> int:
        """Queues a request and returns its ticket. Raises ValueError on a bad one, which harms no other."""
        with self._flight.turns.take():
            return self._queue(request, self._inbox).ticket

    def _queue(self, request: Request, inbox: deque) -> Sequence:
        resolved = self.resolve(request)
        method = method_of(resolved)
        sequence = Sequence(
            resolved,
            key=method.round_key(resolved),
            uses=method.uses(resolved),
            stats=RoundStats(guarantee=method.guarantee_of(resolved)),
            class_name=self.name_of(resolved),
            asked=request,
            inbox=inbox,
        )
        self._flight.add(sequence)
        return sequence

    def step(self) -> dict[int, Output]:
        """Runs one round of one kind of request and returns the outputs of `add_request` that are there, by ticket.

        On a GPU an image may be returned a few rounds late; the last round returns all that remain. An error or
        interruption drops everything in flight. An output that is not finite has an `error` and no image.

        Raises RuntimeError where a round of another thread failed. The next call returns what was finished before it.
        """
        self._check_open()
        with self._flight.turns.take():
            try:
                self._flight.run_round()
                ended = [checked(*message) for message in self._inbox]
            except BaseException:
                forget_failures(self._inbox)
                raise
            self._inbox.clear()
        return {sequence.ticket: output for sequence, output in ended if output is not None}

    def cancel(self, request: Request | int) -> bool:
        """Takes a request out that is not finished, this very object or that of a ticket; any thread may.

        It gives no output. Its slot is free at once, or a round later. Returns whether there was such a request: one
        that its stream has not read yet is none.
        """
        with self._flight.turns.take():
            meant = [each for each in self._flight.unfinished() if request is each.asked or request == each.ticket]
            self._flight.cancel(meant)
        return bool(meant)

    def stream(
        self,
        requests: Iterable[Request],
        progress: bool = False,
        on_progress: OnProgress | None = None,
        every: int = 1,
    ) -> Iterator[Item]:
        """Yields (index of the request, output) as requests finish.

        `requests` may be endless: it is read as slots become free, one ahead, so that no queue grows. A stream that
        is left early takes its requests out of the engine. Several streams, of several threads too, share its slots.

        Args:
            progress: show a bar of images, or of the tokens of a single one.
            on_progress: called as (request, fraction, preview) for each request under way, every so many rounds:
                `preview()` is Pillow's image of what is known by then, and costs nothing where it is not called.

        Raises:
            ValueError: `every` is not an integer above 0; or at a bad request, when it is read: those read before are
                finished first.
            FloatingPointError: after all others were yielded, where tokens or images were not finite.
            RuntimeError: a round failed that another thread ran.
        """
        self._check_open()
        return stream(self._flight, self._queue, requests, progress, on_progress, every)

    def stream_async(
        self, requests: Iterable[Request], on_progress: OnProgress | None = None, every: int = 1
    ) -> AsyncIterator[Item]:
        """As `stream`, for `async for`: other threads run the rounds, and call `on_progress`."""
        self._check_open()
        return from_threads(stream, self._flight, self._queue, requests, False, on_progress, every)

    def generate(
        self,
        requests: Iterable[Request] | Request,
        progress: bool = False,
        on_progress: OnProgress | None = None,
        every: int = 1,
    ) -> list[Output]:
        """The outputs of all requests that are not cancelled, or of a single one, in their order; see `stream`.

        Raises:
            ValueError: before any work, naming every bad request; of what has no length, as `stream`, which reads it
                as slots become free.
            FloatingPointError: as in `stream`, which gives the other outputs too.
        """
        if isinstance(requests, Request) or not isinstance(requests, Iterable):  # which `check_all` says is no request
            requests = [requests]
        if isinstance(requests, Sized):
            check_all(self.resolve, requests)
        outputs = dict(self.stream(requests, progress, on_progress, every))
        return [outputs[index] for index in sorted(outputs)]

    def sample(
        self,
        labels: Label | Iterable[Label] = None,
        seed: int = 0,
        method: str | None = None,
        *,
        prompts: str | Iterable[str] | None = None,
        progress: bool = False,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> list[Output]:
        """An image of each label, or prompt, in their order: `engine.sample([207, "otter"], seed=3, cfg=4)`.

        Args:
            labels: classes by number or name, or None, the model's images of no class; one or many.
            prompts: texts in place of labels, one or many.
            seed: of the first image; the next has the next. settings: as of `Request`. Others as of `generate`.
        """
        return self.generate(requests_of(labels, prompts, seed, method, settings), progress, on_progress)

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Writes the models to a new folder, which `cspd.load` reads. Raises ValueError, OSError."""
        self._check_open()
        if len(self._models) > 1:
            raise ValueError("a folder has models of one family: save them from an engine of its own each")
        saving.save(self._models[0], folder)

    def close(self) -> None:
        """Drops what is in flight and lets the models go, as `with` does at its end. Nothing can be run then."""
        with self._flight.turns.take():
            self._flight.drop(RuntimeError(CLOSED))
            self._closed = True
            self.hosts, self._models, self._flight.hosts = {}, [], {}
            self.graphs = Graphs(self.device, enabled=False)
            self.precision = Precision(self.precision.policy, self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(CLOSED)

    def __enter__(self) -> Engine:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
