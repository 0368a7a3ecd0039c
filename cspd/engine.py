"""The engine: takes requests, runs rounds over everything in flight, hands out finished images."""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cspd import noise as philox_noise
from cspd.finishing import Finisher
from cspd.graphs import Graphs
from cspd.lookup import choose, method_of
from cspd.machine import describe, pick_device
from cspd.method import Host, Method, Models
from cspd.option import plain
from cspd.precision import Precision, Stopwatch, precision_of
from cspd.scheduler import Scheduler
from cspd.sequence import Output, Request, RoundStats, Sequence

NAMED = 3  # requests of one fault that are named one by one
BAR_FORMAT = "{l_bar}{bar}| {n:.1f}/{total} images [{elapsed}<{remaining}, {rate_fmt}]"


class Engine:
    """Generates images with target models, many requests at a time.

    `max_batch` sequences are in flight at once; a finished one is replaced at the next step. An image depends only on
    its own request, never on the rest of the batch, but for rounding (docs/precision.md has the rates).

    Args:
        models: of each family at most one set; a request that does not say otherwise is of the first that has its
            method. All models are moved to the device, put in eval mode and frozen, in place. Weights that are loaded
            later are not seen by what was made of them: calibrations, and copies in another precision.
        max_batch: slots; memory grows with them, not with the number of requests.
        device: "auto", "cpu", "cuda" or "cuda:N".
        precision: "fp32", "tf32" or "bf16", see `cspd.precision.POLICIES`; or another engine's on
            the same device.
        compiled: run speculative rounds through torch.compile: half a minute on first use, then faster.
        graphs: replay the work of fixed shape as CUDA graphs, see `cspd.graphs`; by default on CUDA, and nowhere else.
        cache: where calibrations are kept, before the user's cache directory.
        noise: the source of randomness, see `cspd.noise`; replaced in tests that inject noise.

    Attributes:
        hosts: by family, "MAR" or "VQ".

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
        self._models: list[Models] = [_placed(each, self.device) for each in models]
        self._settings: dict[str, Any] = {"compiled": compiled, "graphs": graphs, "cache": cache, "noise": noise}
        self.hosts: dict[str, Host] = {}
        for each in self._models:
            self.hosts[each.family] = each.host(
                max_batch, self.device, self.precision, noise, compiled=compiled, graphs=self.graphs, cache=cache
            )
        self.num_slots = max_batch
        self.scheduler = Scheduler(max_batch)
        self._finisher = Finisher(self.device)
        self._tickets, self._streaming = 0, False

    @property
    def host(self) -> Host:
        """The first family's."""
        return next(iter(self.hosts.values()))

    def with_slots(self, max_batch: int) -> Engine:
        """Another engine over the same models."""
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

    def resolve(self, request: Request) -> Request:
        """The request with every default filled in, checked. Raises ValueError on a bad one.

        The window of `speculative` is chosen here, which calibrates the draft where that was not done before. Warns of
        settings that are seldom meant.
        """
        request, method = self._checked(request)
        request = self.hosts[method.family].resolve(request, method)
        advice = method.advice(request)
        if advice is not None:
            warnings.warn(advice, stacklevel=1)  # always from here, so that Python says it once
        return request

    def _checked(self, request: Request) -> tuple[Request, Method]:
        if not isinstance(request, Request):
            raise ValueError(f"{request!r} is no request: give cspd.Request(label, ...)")
        request, method = choose(request, list(self.hosts))
        return self.hosts[method.family].check(request, method), method

    def add_request(self, request: Request) -> int:
        """Queues a request and returns its ticket.

        Raises:
            ValueError: a bad request; it harms no other. RuntimeError: a stream has the engine to itself.
        """
        self._refuse_beside_a_stream()
        return self._queue(request)

    def _refuse_beside_a_stream(self) -> None:
        if self._streaming:
            raise RuntimeError("a stream has the engine to itself: finish it first, or give it the requests")

    def _queue(self, request: Request) -> int:
        request = self.resolve(request)
        method = method_of(request)
        ticket = self._tickets
        self._tickets += 1
        stats = RoundStats(guarantee=method.guarantee_of(request))
        self.scheduler.add(Sequence(request, ticket, key=method.round_key(request), stats=stats))
        return ticket

    def step(self) -> dict[int, Output]:
        """Runs one round of one kind of request and returns the outputs that are there, by ticket.

        On a GPU decoding overlaps later rounds, so an image may be returned a few rounds late; the last round returns
        all that remain. An error or interruption drops all requests in flight, and images that are being decoded. An
        output that is not finite harms no other: it has an `error` and no image.

        Raises:
            RuntimeError: a stream has the engine to itself.
        """
        self._refuse_beside_a_stream()
        return self._step()

    @torch.inference_mode()
    def _step(self) -> dict[int, Output]:
        watch = Stopwatch(self.device)
        try:
            admitted = self.scheduler.admit()
            for family, host in self.hosts.items():
                host.admit([sequence for sequence in admitted if sequence.request.family == family])
            batch = self.scheduler.next()
            if not batch:
                return {}  # and nothing is being decoded: the last round waited for it
            method, key = method_of(batch[0].request), batch[0].key
            host = self.hosts[method.family]
            finished = method.run_round(host, batch, watch)
            watch.stop()
            self._finisher.add_round(batch, watch)
            for sequence in batch:
                if len(sequence.reached) < sequence.iteration:
                    sequence.reached.append(sequence.num_known)
            self.scheduler.release(finished)
            if len(finished) == len(batch):
                host.forget(key)
            if finished:
                self._finisher.add(host, finished)
            return self._finisher.ready(wait=not len(self.scheduler))
        except BaseException:  # cut off in the middle of a round, its state is no one's any more
            self._clear()
            raise

    def stream(self, requests: Iterable[Request], progress: bool = False) -> Iterator[tuple[int, Output]]:
        """Yields (index of the request, output) as requests finish; `progress` shows a bar that counts images.

        `requests` may be endless: it is read as slots become free, one ahead, so that no queue grows. A stream that
        is left early takes its requests out of the engine.

        Raises:
            ValueError: at a bad request, when it is read; those read before are finished first.
            FloatingPointError: after all others were yielded, where tokens or images were not finite.
            RuntimeError: other requests are in flight.
        """
        if self._streaming or len(self.scheduler):
            raise RuntimeError(f"{len(self.scheduler)} requests are in flight: finish them, or the other stream, first")
        source: Iterator[tuple[int, Request]] | None = enumerate(requests)
        self._streaming = True
        index_of: dict[int, int] = {}
        error: ValueError | None = None
        lost: dict[int, str] = {}
        finished = 0
        total = len(requests) if isinstance(requests, Sized) else None
        bar = tqdm(total=total, unit="image", bar_format=BAR_FORMAT if total else None, disable=not progress)
        try:
            while True:
                # one more than there are slots: a round that ends all of them then does not wait for their images
                while source and len(self.scheduler) <= self.num_slots:
                    try:
                        index, request = next(source)
                        index_of[self._queue(request)] = index
                    except StopIteration:
                        source = None
                    except ValueError as bad:
                        error, source = bad, None
                if not index_of:
                    break
                outputs = self._step()
                finished += len(outputs)
                bar.n = finished + self._under_way()
                bar.update(0)
                for ticket, output in outputs.items():
                    index = index_of.pop(ticket)
                    if output.error:
                        lost[index] = output.error
                    else:
                        yield index, output
        finally:
            bar.close()
            self._clear()
            self._streaming = False
        if error:
            raise error
        if lost:
            first = f"{_named([min(lost)])}: " if len(lost) > 1 else ""
            raise FloatingPointError(f"{_named(sorted(lost))} gave no image: {first}{lost[min(lost)]}")

    def generate(self, requests: Iterable[Request] | Request, progress: bool = False) -> list[Output]:
        """The outputs of all requests, or of a single one, in their order; `progress` shows a bar.

        Raises:
            ValueError: before any work, naming every bad request.
            FloatingPointError: as in `stream`, which gives the other outputs too.
        """
        requests = [requests] if isinstance(requests, Request) else list(requests)
        bad: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            try:
                self.resolve(request)
            except ValueError as error:
                bad[str(error)].append(index)
        if bad:
            raise ValueError("; ".join(f"{_named(alike)}: {error}" for error, alike in bad.items()))
        outputs = dict(self.stream(requests, progress))
        return [outputs[index] for index in range(len(requests))]

    def _under_way(self) -> float:
        """How many images' worth is done of what is in flight: those being decoded, and shares of the others."""
        done = float(len(self._finisher))
        for family, host in self.hosts.items():
            known = [s.num_known for s in self.scheduler.in_flight() if s.request.family == family]
            done += sum(known) / host.seq_len
        return done

    def _clear(self) -> None:
        """Drops everything in flight."""
        self.scheduler.clear()
        self._finisher.clear()
        for host in self.hosts.values():
            host.clear()


def _named(indices: list[int]) -> str:
    """Requests by their indices, of many the first and how many there are."""
    if len(indices) == 1:
        return f"request {indices[0]}"
    numbers = ", ".join(map(str, indices[:NAMED]))
    return f"requests {numbers}" + (f" ... ({len(indices)} of them)" if len(indices) > NAMED else "")


def _placed(models: Any, device: torch.device) -> Any:
    """The models on a device, in eval mode and frozen."""
    modules = {f.name: getattr(models, f.name) for f in dataclasses.fields(models)}
    placed = {name: m.to(device).eval().requires_grad_(False) for name, m in modules.items() if m is not None}
    return dataclasses.replace(models, **placed)
