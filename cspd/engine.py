"""The engine: requests in, images out. It runs rounds of sequences in slots, and knows no family of models."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import threading
import types
import warnings
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, NoReturn

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from cspd import noise as philox_noise
from cspd.device import Precision, describe, pick_device, precision_of
from cspd.graphs import Graphs, own_stream
from cspd.method import ModelRunner, Prepared, choose, models_for
from cspd.models import Models, placed, save_models
from cspd.option import LARGEST_INTEGER, check_integer, plain
from cspd.request import Label, Output, Request, RoundStats, Sequence, Stopwatch, is_several, requests_of
from cspd.terminal import progress_bar, say, shortened
from mar.checkpoint import lookup

# From finished sequences to outputs: a GPU decodes images while the next rounds run.

AT_ONCE = 3  # images that a CPU decodes between two updates of the bar: a large image takes seconds
AHEAD = 4  # batches of images that may be decoding at once; the next one waits for the oldest


class _Made(NamedTuple):
    """Tokens, costs and validity of a batch of sequences, see `ModelRunner.results`, and its images, on the CPU."""

    tokens: Tensor
    token_cost: Tensor
    finite: Tensor
    images: Tensor | None


class _Work(NamedTuple):
    """Work of the device: a round, or the results of finished sequences (`made`).

    Its seconds and results can be read once the device has passed the end of `watch`.
    """

    sequences: list[Sequence]
    watch: Stopwatch
    made: _Made | None = None


class Finisher:
    """Turns finished sequences into outputs, in the order in which they finished.

    On a GPU images are decoded on their own stream while rounds go on: rounds launch small kernels and leave the GPU
    idle between them. On a CPU a round uses all cores, so images are decoded at once. The work that the device has yet
    to do is queued here in its order, so that seconds and images are read without waiting.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # of its own: work on a stream that graphs were captured on would share their cuBLAS workspace
        self._stream = own_stream(device) if device.type == "cuda" else None
        self._work: deque[_Work] = deque()

    def add_round(self, sequences: list[Sequence], watch: Stopwatch) -> None:
        """Charges the seconds of a round to its sequences, once the device has finished it."""
        self._work.append(_Work(sequences, watch))

    def add(self, runner: ModelRunner, sequences: list[Sequence], on_decoded: Callable[[int], object]) -> None:
        """Begins to decode sequences. Their slots are free afterwards.

        On a CPU `on_decoded` is called with the number of images after each part that was decoded.
        """
        results = runner.results(sequences)
        tokens = results[0]
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            for tensor in results:
                tensor.record_stream(self._stream)  # keeps its memory until that stream has read it
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            watch = Stopwatch(self.device)
            watch.start("decode")
            if self._stream:
                images = runner.decode(tokens)
            else:
                images = _decoded(runner, tokens, on_decoded)
            tokens, token_cost, finite = map(_to_cpu, results)
            made = _Made(tokens, token_cost, finite, None if images is None else _to_cpu(images))
            watch.stop()
        self._work.append(_Work(sequences, watch, made))

    def ready(self, wait: bool) -> list[tuple[Sequence, Output]]:
        """The outputs that can be read now; with `wait`, all of them."""
        outputs: list[tuple[Sequence, Output]] = []
        while self._work:
            # Reading an entry that the device has not finished waits for it. That is wanted at the end, and if many
            # batches are decoding: each of them occupies memory.
            if not (wait or self._work[0].watch.is_past() or self._num_batches() > AHEAD):
                break
            work = self._work.popleft()
            for phase, spent in work.watch.seconds().items():
                for sequence in work.sequences:
                    sequence.stats.seconds[phase] += spent
            if work.made:
                for sequence in work.sequences:
                    sequence.complete_stats()
                outputs += zip(work.sequences, _outputs(work.sequences, work.made))
        return outputs

    def drop(self, models: Collection[str]) -> None:
        """Drops the images of these models that are being decoded."""
        self._work = deque(work for work in self._work if work.sequences[0].model not in models)

    def _num_batches(self) -> int:
        return sum(1 for work in self._work if work.made)


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", non_blocking=True)


def _decoded(runner: ModelRunner, tokens: Tensor, on_decoded: Callable[[int], object]) -> Tensor | None:
    """Images of tokens [B, ...], about `AT_ONCE` at a time, or None without a decoder."""
    parts = []
    # Parts of nearly equal size: a single image at the end would take as long as two.
    for part in tokens.tensor_split(math.ceil(len(tokens) / AT_ONCE)):
        images = runner.decode(part)
        if images is None:
            return None
        parts.append(images)
        on_decoded(len(part))
    return torch.cat(parts)


def _outputs(sequences: list[Sequence], made: _Made) -> list[Output]:
    outputs = []
    with torch.inference_mode(False):  # a clone is an ordinary tensor, and does not keep the batch in memory
        for i, sequence in enumerate(sequences):
            image = None if made.images is None else made.images[i]
            error = _error(sequence, made.finite[i], image)
            output = Output(
                request=sequence.request,
                tokens=made.tokens[i].clone(),
                image=None if image is None or error else image.clone(),
                token_cost=made.token_cost[i].clone(),
                stats=sequence.stats,
                error=error,
                class_name=sequence.class_name,
                models=sequence.models,
            )
            outputs.append(output)
    return outputs


def _error(sequence: Sequence, finite: Tensor, image: Tensor | None) -> str | None:
    """The error of an output with a token or an image that is not finite, or None.

    Args:
        finite: bool [L], for each token in generation order.
    """
    if not finite.all():
        rank = int(finite.int().argmin())  # the first one
        iteration = sequence.iteration_of(rank)
        where = f"token {rank + 1} of {len(finite)} in generation order, in iteration {iteration}"
        error = f"{sequence.request!r}: non-finite value at {where}: check cfg, temperature and the weights"
        advice = sequence.method.advice(sequence.request)
        return f"{error}; {advice}" if advice else error
    if image is not None and not image.isfinite().all():
        return f"{sequence.request!r}: the tokens are finite but the image is not: check the autoencoder's weights"
    return None


# Which sequences run next: waiting -> running -> finished, in slots that are allocated once.


class Scheduler:
    """Admits sequences into `num_slots` slots, first come, first served, and picks the batch of the next round.

    Sequences with equal `Sequence.key` share a round. Several kinds in flight have rounds in turn, so that none waits
    for more rounds than there are kinds.
    """

    def __init__(self, num_slots: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Hashable, list[Sequence]] = {}  # by round key, in the order of their turns
        self._free = list(reversed(range(num_slots)))  # the next one to take is the last

    def __len__(self) -> int:
        """The number of unfinished sequences. Thread-safe."""
        running = sum(len(batch) for batch in list(self.running.values()))
        return len(self.waiting) + running

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self.waiting or sequence in self.running.get(sequence.key, ())

    def in_flight(self) -> list[Sequence]:
        """The running sequences."""
        return [sequence for batch in self.running.values() for sequence in batch]

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Moves waiting sequences into free slots. Returns these sequences."""
        admitted = []
        while self.waiting and self._free:
            sequence = self.waiting.popleft()
            sequence.slot = self._free.pop()
            batch = self.running.setdefault(sequence.key, [])
            if batch:
                sequence.shared = batch[0].shared
            batch.append(sequence)
            admitted.append(sequence)
        return admitted

    def next(self) -> list[Sequence]:
        """The sequences of the kind whose turn it is; empty if nothing runs."""
        if not self.running:
            return []
        key = next(iter(self.running))
        batch = self.running.pop(key)
        self.running[key] = batch  # at the end: its turn comes again after the other kinds
        return list(batch)

    def release(self, sequences: list[Sequence]) -> None:
        """Takes running sequences out and frees their slots. What methods keep of a key goes with its last sequence."""
        for sequence in sequences:
            key = sequence.key
            self.running[key].remove(sequence)
            if not self.running[key]:
                del self.running[key]
                sequence.shared.clear()  # at once: finished sequences are referenced until they are decoded
            self._free.append(sequence.slot)

    def drop(self, models: Collection[str]) -> None:
        """Takes all sequences of these models out, waiting and running ones."""
        for sequence in [each for each in self.waiting if each.model in models]:
            self.waiting.remove(sequence)
        self.release([each for each in self.in_flight() if each.model in models])


# Threads share an engine, and processes do not.

_processes: set[int] = set()  # those that made an engine


def check_not_forked() -> None:
    """Raises RuntimeError if this process was forked from one with an engine: torch's threads would never answer."""
    if _processes and os.getpid() not in _processes:
        raise RuntimeError(
            "this process was forked from one with an engine, and torch does not survive that: start it with"
            " multiprocessing.get_context('spawn'), and call cspd.load in it"
        )


# Requests are read as slots become free; a bar shows how far they are.

DECODING = 0.02  # of an image, in the bar; its tokens are the rest
NAMED = 3  # requests with the same error that are named one by one
Item = tuple[int, Output]  # the index of a request, and its output
# (request, fraction of its work that is done, a function that makes a preview)
OnProgress = Callable[[Request, float, Callable[[], "Image.Image | None"]], object]
Result = Output | BaseException | None  # of a request; what ended it, or None if it was cancelled
Results = SimpleQueue["tuple[Sequence, Result]"]


class _Bar:
    """A progress bar of images."""

    def __init__(self, is_shown: bool, total: int | None) -> None:
        self._is_shown = is_shown
        self._total = total
        self._bar: tqdm | None = None

    def show(self, finished: int, running: Collection[Sequence]) -> None:
        """Shows `finished` images and the done fraction of the running ones."""
        if not self._is_shown:
            return
        if self._bar is None:
            if not running:
                return
            form = "{n:.1f} images [{elapsed}, {rate_fmt}]"
            if self._total:
                form = "{l_bar}{bar}| {n:.1f}/{total} images [{elapsed}<{remaining}, {rate_fmt}]"
            # The remaining time follows from the mean rate: images that begin or end together make the latest rate a
            # bad estimate. tqdm's own `miniters` would skip updates without smoothing.
            self._bar = progress_bar(total=self._total, unit=" image", bar_format=form, smoothing=0, miniters=0)
        self._bar.n = finished + sum(sequence.fraction_done for sequence in running) * (1 - DECODING)
        self._bar.update(0)

    def add_decoded(self, count: int) -> None:
        """Counts images that were decoded in the middle of a round."""
        if self._bar is not None:
            self._bar.update(DECODING * count)

    def close(self) -> None:
        """Leaves the bar as it was shown last."""
        if self._bar is not None:
            self._bar.close()


# The engine: takes requests, runs rounds over everything in flight, returns finished images.

CLOSED = "this engine is closed: make a new one, for example with cspd.load"


class Engine:
    """Generates images with target models, many requests at a time.

    `max_batch` sequences are in flight at once, of all models together; a finished one is replaced at the next round.
    An image depends only on its own request, never on the rest of the batch, except by rounding (docs/exactness.md has
    the rates). Threads may share an engine: whichever waits for an output runs the rounds, one thread at a time.

    Args:
        models: without `names`, at most one set for each family. A request that names no family is for the first one
            that takes its label or prompt and has its method. The models are moved to the device, put in eval mode and
            frozen, in place. Weights that are loaded into them later do not reach calibrations and copies in another
            precision.
        names: of the models, for `prepare`; by default, their families.
        max_batch: number of slots. Memory grows with the slots, not with the number of requests.
        device: "auto", "cpu", "cuda" or "cuda:N".
        precision: "fp32", "tf32" or "bf16", see `cspd.device.POLICIES`; or another engine's on the same device.
        compiled: run through torch.compile MAR's backbone (unless it is cached), `ar`'s denoising steps (unless Triton
            kernels take them), speculative rounds and VQ models' layers: a minute or two on first use, then faster.
        graphs: replay fixed-shape work as CUDA graphs, see `cspd.graphs`; by default on CUDA only.
        cache: folder of calibrations, searched before the user's cache directory.
        noise: the source of random numbers, see `cspd.noise`; tests inject other ones.

    Attributes:
        runners: the model runners, by name of their models. graphs: the CUDA graphs of the first of them.
        origins: by name, the checkpoint and files that `cspd.load` took the models from; empty for models in memory.
        loaded: `cspd.load` with the arguments that gave these models, which pickles and copies call again; None for
            models in memory.

    Raises:
        RuntimeError: this process was forked from one that has an engine.
        ValueError: the models are incompatible, the device or the precision does not exist, graphs without CUDA, or
            too little memory.
    """

    def __init__(
        self,
        *models: Models,
        names: Iterable[str] | None = None,
        max_batch: int = 8,
        device: str | torch.device = "auto",
        precision: str | Precision = "fp32",
        compiled: bool = False,
        graphs: bool | None = None,
        cache: Path | None = None,
        noise: types.ModuleType = philox_noise,
    ) -> None:
        check_not_forked()
        _processes.add(os.getpid())
        max_batch = plain(max_batch)
        names = [getattr(each, "family", "") for each in models] if names is None else [*names]
        if not models or "" in names or len({*names}) != len(models):
            raise ValueError(
                "give an engine MARModels(...), VQModels(...), CausalModels(...), or one of each; several of one family"
                " need names=[...], each another one"
            )
        for each in models:
            each.check()
        self.device = pick_device(device)
        self.precision = precision_of(precision, self.device)
        self.compiled = compiled
        self._models: list[Models] = [placed(each, self.device) for each in models]
        how: dict[str, Any] = {"noise": noise, "compiled": compiled, "cache": cache}
        self._settings = {**how, "names": names, "graphs": graphs}  # for `with_slots`
        self.runners: dict[str, ModelRunner] = {}
        for name, each in zip(names, self._models):
            own = Graphs(self.device, graphs)  # one key may mean other functions in other models
            self.runners[name] = each.runner(max_batch, self.precision, **how, graphs=own)
        self.graphs = self.runners[names[0]].graphs
        self._classes = {name: each.classes for name, each in zip(names, self._models)}
        self.origins: Mapping[str, Mapping[str, str]] = {}
        self.loaded: Callable[..., Engine] | None = None
        self.num_slots = max_batch
        self._closed = False

        self.scheduler = Scheduler(max_batch)
        self._finisher = Finisher(self.device)
        self._line: deque[SimpleQueue[bool]] = deque()  # of the threads that want a turn; the first one has it
        self._tickets = itertools.count()
        self._unfinished: dict[int, Sequence] = {}  # those without a result, by ticket
        self._cancelled: set[Sequence] = set()  # those whose slots are not free yet
        self._results: Results = SimpleQueue()  # of requests that came by `add_request`
        self._outputs: dict[int, Output] = {}  # of these, by ticket, until a step returns them

    def __repr__(self) -> str:
        if self._closed:
            return "<Engine, closed>"
        sizes = [f"{name} {runner.image_size}x{runner.image_size} pixels" for name, runner in self.runners.items()]
        return f"<Engine, {', '.join(sizes)}; {self.num_slots} slots, {self.device}, {self.precision.policy}>"

    @property
    def runner(self) -> ModelRunner:
        """The model runner of the first models."""
        self._check_open()
        return next(iter(self.runners.values()))

    @property
    def classes(self) -> list[str]:
        """The names of the classes of the first models, as `classes_of` returns them."""
        self._check_open()
        return self.classes_of(next(iter(self.runners)))

    def classes_of(self, model: str) -> list[str]:
        """The names of the classes of the models of this name, by number; empty for a text-to-image model.

        A class without a name is named by its number.
        """
        names = self._classes[model]
        return [names.name_of(label) for label in range(self.runners[model].num_classes)]

    def with_slots(self, max_batch: int) -> Engine:
        """Another engine with the same models."""
        self._check_open()
        precision = self.precision  # the object, not its name: it has the copies of weights
        engine = Engine(*self._models, max_batch=max_batch, device=self.device, precision=precision, **self._settings)
        for name, runner in self.runners.items():
            engine.runners[name].tuning = runner.tuning
        engine.origins, engine.loaded = self.origins, self.loaded
        return engine

    def moved_to(self, device: str | torch.device) -> Engine:
        """This engine if it is on that device; otherwise another one with its models, and this one is closed.

        Raises ValueError if the device does not exist.
        """
        self._check_open()
        if pick_device(device) == self.device:
            return self
        policy = self.precision.policy
        engine = Engine(*self._models, max_batch=self.num_slots, device=device, precision=policy, **self._settings)
        engine.origins, engine.loaded = self.origins, self.loaded
        self.close()
        return engine

    def __reduce__(self) -> tuple:
        """Pickles and copies load the models again. Raises TypeError for models in memory."""
        self._check_open()
        if self.loaded is None:
            raise TypeError(
                "an engine with models in memory cannot be pickled or copied: write them with save_pretrained, and call"
                " cspd.load where they are needed"
            )
        how = {"precision": self.precision.policy, "compiled": self.compiled, "graphs": self._settings["graphs"]}
        return functools.partial(self.loaded, max_batch=self.num_slots, device=str(self.device), **how), ()

    def describe(self) -> dict:
        """The machine and the settings of this engine, for records."""
        graphs = self.graphs.enabled or None  # None as in older records
        how = {"precision": self.precision.policy, "compiled": self.compiled, "graphs": graphs}
        return describe(self.device) | how | self.precision.flags()

    # A request is checked once: `checked` fills its defaults in, `prepare` also decides what may take a calibration.

    def checked(self, request: Request | Prepared, model: str | None = None) -> Prepared:
        """A request with its method and every default, except those that may take a calibration (a window).

        A request that this engine checked before is returned as it is; one of another engine is checked again.

        Args:
            model: the name of the models that it is for; by default the first that take it, see `Engine`.

        Raises:
            ValueError: a setting is bad, or the engine lacks a model that the method needs.
        """
        self._check_open()
        if isinstance(request, Prepared):
            if request.runner is self.runners.get(request.model):
                return request
            request = request.asked
        if not isinstance(request, Request):
            raise ValueError(f"{shortened(request)} is not a request: give cspd.Request(label, ...)")
        asked = request
        runners = self.runners if model is None else {model: lookup(self.runners, model, "model")}
        names = models_for(request, runners)
        request, method = choose(request, list(dict.fromkeys(runners[name].family for name in names)))
        model = next(name for name in names if runners[name].family == method.family)
        runner = runners[model]
        if isinstance(request.label, str) and runner.num_classes:
            request = request.but(label=self._classes[model].number_of(request.label))
        if request.label is None and request.prompt is None and request.cfg is None:
            request = request.but(cfg=1.0)  # unconditional: there is no class that guidance could steer towards
        request = runner.complete(request, method)
        return Prepared(asked, request, method, model, runner)

    def prepare(self, request: Request | Prepared, at_once: int | None = None, model: str | None = None) -> Prepared:
        """A request that is ready to run, and that is not checked again.

        The window of `speculative` is chosen here, which calibrates its draft or times this device on first use. Warns
        about settings that are valid but probably not intended.

        Args:
            at_once: images that the caller wants together, for which a window is chosen; by default, and at most, one
                in every slot. Requests of others that are in flight do not count: an image depends on its window.
            model: as in `checked`.

        Raises:
            ValueError: as `checked`, or too little memory.
        """
        self._check_open()
        prepared = self.checked(request, model)
        if prepared.is_decided:
            return prepared
        with self._turn():  # it may run models
            at_once = self.num_slots if at_once is None else at_once
            prepared.runner.at_once = max(1, min(self.num_slots, at_once))
            decided = prepared.runner.prepare(prepared.request, prepared.method)
        advice = prepared.method.advice(decided)
        if advice:
            warnings.warn(advice, stacklevel=1)  # from the same line each time, so that Python shows it once
        return dataclasses.replace(prepared, request=decided, is_decided=True)

    def prepare_all(self, requests: Iterable[Request | Prepared]) -> list[Prepared]:
        """Prepares the requests of one call. Raises ValueError if some are bad, naming each fault once."""
        requests = list(requests)
        prepared = []
        bad: dict[str, list[int]] = defaultdict(list)  # the indices of requests by their error
        for index, request in enumerate(requests):
            try:
                prepared.append(self.prepare(request, len(requests)))
            except ValueError as error:
                bad[str(error)].append(index)
        if bad:
            faults = [f"{named(indices)}: {error}" for error, indices in bad.items()]
            raise ValueError("; ".join(faults))
        return prepared

    def check(self, request: Request) -> Request:
        """The request as `checked` returns it."""
        return self.checked(request).request

    def resolve(self, request: Request, at_once: int | None = None) -> Request:
        """The request as `prepare` returns it, every default filled in."""
        return self.prepare(request, at_once).request

    def name_of(self, prepared: Prepared) -> str:
        """The prompt of a checked request, or the name of its class, or its number if classes have no names."""
        request = prepared.request
        if request.prompt is not None:
            return request.prompt
        return self._classes[prepared.model].name_of(request.label)

    # Whichever thread waits for an output runs rounds, one thread at a time; others may add and cancel sequences
    # meanwhile. Each sequence gets one result, in the queue of whoever asked for it. There is no thread of the engine's
    # own: torch's number of threads, profilers and modes hold for the thread that sets them, which is the caller's.

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Waits for this thread's turn to use the models, and keeps them inside the block. It is not reentrant.

        Threads stand in line: a plain lock would hardly ever let one in beside a thread that runs round after round.
        Raises RuntimeError in a forked process.
        """
        check_not_forked()
        own: SimpleQueue[bool] = SimpleQueue()  # an Event, but faster
        try:
            self._line.append(own)
            self._line[0].put(True)  # to this thread, if no other one is in line
            own.get()
            yield
        finally:  # also if a signal interrupts the waiting
            self._line.remove(own)
            waiting = list(self._line)
            if waiting:
                waiting[0].put(True)

    def add_request(self, request: Request | Prepared) -> int:
        """Queues a request and returns its ticket. Raises ValueError on a bad request, which affects no other."""
        return self.add(request, self._results).ticket

    def add(self, request: Request | Prepared, results: Results, at_once: int | None = None) -> Sequence:
        """Queues a request. `run_round` puts its sequence and its result into `results`. `at_once`: as in `prepare`."""
        check_not_forked()
        prepared = self.prepare(request, at_once)
        request, method = prepared.request, prepared.method
        sequence = Sequence(
            request,
            method=method,
            model=prepared.model,
            ticket=next(self._tickets),
            key=(prepared.model, method.round_key(request)),
            uses=method.uses(request),
            seq_len=prepared.runner.seq_len,
            stats=RoundStats(guarantee=method.guarantee_of(request)),
            class_name=self.name_of(prepared),
            models=self._models_of(prepared.model),
            asked=prepared.asked,
            results=results,
        )
        self._unfinished[sequence.ticket] = sequence
        self.scheduler.add(sequence)
        return sequence

    def _models_of(self, name: str) -> dict[str, object]:
        """The arguments of `cspd.load` that the models of this name came from, if they came from there."""
        if name not in self.origins:
            return {}
        return {**self.origins[name], "precision": self.precision.policy, "compiled": self.compiled}

    def step(self) -> dict[int, Output]:
        """Runs one round of one kind of request. Returns the finished outputs of `add_request`, by ticket.

        On a GPU an image may be returned a few rounds late; the last round returns all that remain. An output that is
        not finite has an `error` and no image. An error drops all requests to the models that it comes from, and an
        interruption everything in flight.

        Raises:
            RuntimeError: a round of another thread failed. The next call returns the outputs finished before it.
        """
        self._check_open()
        failure = None
        errors: list[Exception] = []
        with self._turn():
            try:
                _, errors = self._run_round()
            finally:  # outputs that were finished before an error stay for the next call
                for sequence, result in drained(self._results):
                    if isinstance(result, Output):
                        self._outputs[sequence.ticket] = result
                    elif result is not None:
                        failure = result
            if failure:
                _raise_dropped(failure, errors)
            outputs, self._outputs = self._outputs, {}
            return outputs

    def run_round(self) -> str | None:
        """Runs one round of one kind of request. Returns the name of the models that ran; None if nothing was left.

        The results are in the queues that `add` was given. An error is the result of all requests to the models that it
        comes from.
        """
        self._check_open()
        with self._turn():
            model, _ = self._run_round()
            return model

    def _deliver(self, sequence: Sequence, result: Result) -> bool:
        """Puts the result of a sequence into its queue, unless it has one. Thread-safe. Returns whether it did."""
        if self._unfinished.pop(sequence.ticket, None) is None:
            return False
        sequence.results.put((sequence, result))
        return True

    @torch.inference_mode()
    def _run_round(
        self, on_decoded: Callable[[int], object] = lambda count: None
    ) -> tuple[str | None, list[Exception]]:
        """Runs one round of one kind of request, in a turn. `on_decoded` as in `Finisher.add`.

        Returns the name of the models that ran, if any, and the errors that ended requests.
        """
        ran = None
        errors: list[Exception] = []
        watch = Stopwatch(self.device)
        with self._dropping(self.runners, errors):
            self._free_cancelled()
            admitted = self.scheduler.admit()
            for model, runner in self.runners.items():
                with self._dropping([model], errors):
                    runner.admit([sequence for sequence in admitted if sequence.model == model])
            batch = self.scheduler.next()
            if batch:
                ran = batch[0].model
                with self._dropping([ran], errors):
                    finished = self._advance(batch, watch)
                    self.scheduler.release(finished)
                    self._decode(finished, on_decoded)
            # With nothing left to run there is no round to hide the decoding behind: wait for all images.
            for sequence, output in self._finisher.ready(wait=not len(self.scheduler)):
                self._deliver(sequence, output)
        return ran, errors

    @contextlib.contextmanager
    def _dropping(self, models: Collection[str], errors: list[Exception]) -> Iterator[None]:
        """An error inside the block drops all requests to these models, whose state is undefined then.

        It is added to `errors`, and said aloud if all these requests were cancelled. An interruption drops everything,
        and is raised.
        """
        try:
            yield
        except Exception as error:
            if not self._drop(error, models):
                say(f"a round of {' and '.join(models)} failed after its requests were cancelled: {error!r}")
            errors.append(error)
        except BaseException as error:
            self._drop(error, self.runners)
            raise

    def _advance(self, batch: list[Sequence], watch: Stopwatch) -> list[Sequence]:
        """Drafts, verifies and commits tokens of sequences that share a key. Returns the finished sequences."""
        method = batch[0].method
        finished = method.run_round(self.runners[batch[0].model], batch, watch)
        watch.stop()  # on a GPU the round may still run: its seconds are read later
        self._finisher.add_round(batch, watch)
        # Not every round begins an iteration of every sequence.
        for sequence in batch:
            if len(sequence.reached) < sequence.iteration:
                sequence.reached.append(sequence.num_started)
        return finished

    def _decode(self, finished: list[Sequence], on_decoded: Callable[[int], object]) -> None:
        """Begins to decode finished sequences, which share a runner."""
        # A sequence that was cancelled in the middle of its chains may still end its last iteration.
        wanted = [sequence for sequence in finished if sequence.ticket in self._unfinished]
        if wanted:
            self._finisher.add(self.runners[wanted[0].model], wanted, on_decoded)

    def cancel(self, request: Request | int) -> bool:
        """Cancels a request without a result, given as the `Request` object itself or as its ticket.

        Any thread may call it, at any time; it waits for no round. The request gives no output, and its slot is freed
        now or after the next round. Returns whether such a request was found; requests that a stream has not read yet
        do not count.
        """
        meant = []
        for sequence in list(self._unfinished.values()):
            if request is sequence.asked or request == sequence.ticket:
                meant.append(sequence)
        return self._cancel(meant) > 0

    def _cancel(self, sequences: Iterable[Sequence]) -> int:
        """Cancels those of these sequences that have no result, and returns their number."""
        cancelled = [sequence for sequence in sequences if self._deliver(sequence, None)]
        self._cancelled.update(cancelled)
        # In the middle of a round the next one frees the slots. Waiting here for a turn could be forever: the round may
        # be this thread's, if the garbage collector closes a stream, or a signal handler cancels.
        if cancelled and not self._line:
            with self._turn():
                self._free_cancelled()
        return len(cancelled)

    def _free_cancelled(self) -> None:
        """Takes cancelled sequences out, except those whose slots unfinished chains will still write to."""
        for batch in list(self.scheduler.running.values()):
            if self._cancelled.issuperset(batch):  # all unfinished chains of this kind are theirs
                self.scheduler.release(list(batch))
            else:
                self.scheduler.release([each for each in batch if each in self._cancelled and not each.num_under_way])
        for sequence in list(self._cancelled):
            if sequence in self.scheduler.waiting:
                self.scheduler.waiting.remove(sequence)
            if sequence not in self.scheduler:
                self._cancelled.remove(sequence)

    def _drop(self, why: BaseException, models: Collection[str]) -> bool:
        """Drops all requests to these models and reports the reason to everybody who waits for them.

        Returns whether anybody does.
        """
        self.scheduler.drop(models)
        self._finisher.drop(models)
        for sequence in list(self._cancelled):
            if sequence.model in models:
                self._cancelled.discard(sequence)
        told = [self._deliver(each, why) for each in list(self._unfinished.values()) if each.model in models]
        return any(told)

    @torch.inference_mode()
    def so_far(self, sequences: Iterable[Sequence]) -> dict[Sequence, Output]:
        """The committed tokens of those of these sequences, of the same models, that are running.

        `token_cost` is NaN for tokens that are not committed. On a GPU some statistics are a few rounds late.
        """
        with self._turn():
            in_flight = self.scheduler.in_flight()
            running = [sequence for sequence in sequences if sequence in in_flight]
            if not running:
                return {}
            runner = self.runners[running[0].model]
            tokens, token_cost = map(torch.cat, zip(*map(runner.so_far, running)))
            images = runner.decode(tokens)
            if images is not None:
                images = images.nan_to_num().cpu()
            all_finite = torch.ones(len(running), runner.seq_len, dtype=torch.bool)  # errors are found at the end
            made = _Made(tokens.cpu(), token_cost.cpu(), all_finite, images)
        return dict(zip(running, _outputs(running, made)))

    def _preview(self, sequence: Sequence) -> Image.Image | None:
        """An image of a running sequence's committed tokens; None if it is not running or there is no decoder."""
        output = self.so_far([sequence]).get(sequence)
        return None if output is None or output.image is None else output.pil()

    # Streams of outputs: whoever reads a stream runs rounds until an output of its own is there.

    def stream(
        self,
        requests: Iterable[Request | Prepared],
        progress: bool = False,
        on_progress: OnProgress | None = None,
        every: int = 1,
    ) -> Iterator[Item]:
        """Yields (index of the request, output) as requests finish.

        `requests` may be endless: requests are read as slots become free, one ahead, so that no queue grows. A stream
        that is left early cancels its requests. Several streams, also in several threads, share the slots.

        Args:
            progress: show a bar of images.
            on_progress: called as (request, fraction of its work that is done, preview) for each running request, every
                `every` rounds. `preview()` returns a PIL image of the committed tokens, and costs nothing unless it is
                called.

        Raises:
            ValueError: `every` is not an integer above 0; or a request is bad, when it is read: the requests before it
                are finished first.
            FloatingPointError: after all others were yielded, if tokens or images were not finite.
            RuntimeError: a round of another thread failed.
        """
        self._check_open()
        return self._stream(requests, progress, on_progress, _rounds_between(every), threading.Event())

    def _stream(
        self,
        requests: Iterable[Request | Prepared],
        progress: bool,
        on_progress: OnProgress | None,
        every: int,
        stop: threading.Event,
    ) -> Iterator[Item]:
        """As `stream`; it ends soon after any thread sets `stop`."""
        indexed = enumerate(requests)
        num = len(requests) if isinstance(requests, Sized) else None
        bar = _Bar(progress, num)
        results: Results = SimpleQueue()
        own: dict[Sequence, int] = {}  # unfinished, with the indices of their requests
        lost: dict[int, str] = {}  # errors of outputs that are not finite, by index
        errors: list[Exception] = []  # of this thread's last round
        bad: ValueError | None = None
        is_over = False  # no request is left to read
        finished = rounds = 0
        try:
            while own or not is_over:
                if not is_over:
                    try:
                        is_over = not self._read(indexed, own, results, num)
                    except ValueError as error:
                        bad, is_over = error, True
                if not rounds:
                    bar.show(0, own)
                with self._turn():
                    if results.empty():  # another thread's round may have finished an output of this stream
                        _, errors = self._run_round(bar.add_decoded)
                rounds += 1
                # Other threads may run rounds now: a slow reader of this stream does not keep them waiting.
                ended = dict(drained(results))
                bar.show(finished + len(ended), own.keys() - ended.keys())
                for sequence, result in ended.items():
                    index = own.pop(sequence)
                    if result is None:  # cancelled
                        continue
                    if isinstance(result, BaseException):
                        _raise_dropped(result, errors)
                    finished += 1
                    if result.error:
                        lost[index] = result.error
                        continue
                    if on_progress:
                        on_progress(sequence.asked, 1.0, result.pil)  # type: ignore[arg-type]
                    yield index, result
                if stop.is_set():
                    return
                if on_progress and rounds % every == 0:
                    for sequence in list(own):  # the callback may cancel requests
                        preview = functools.partial(self._preview, sequence)
                        on_progress(sequence.asked, sequence.fraction_done, preview)  # type: ignore[arg-type]
        finally:
            bar.close()
            self._cancel(own)
        if bad:
            raise bad
        _raise_lost(lost)

    def _read(
        self,
        requests: Iterator[tuple[int, Request | Prepared]],
        own: dict[Sequence, int],
        results: Results,
        at_once: int | None,
    ) -> bool:
        """Queues the next requests of a stream, and adds them to `own`. Returns whether more may be left to read.

        Raises ValueError if a request is bad.
        """
        # One request more than there are slots: if a round ends all sequences, the next round can begin without
        # waiting for their images.
        room = max(0, 1 + self.num_slots - len(self.scheduler))
        num_read = 0
        for index, request in itertools.islice(requests, room):
            own[self.add(request, results, at_once)] = index
            num_read += 1
        return num_read == room

    async def stream_async(
        self,
        requests: Iterable[Request | Prepared],
        on_progress: OnProgress | None = None,
        every: int = 1,
    ) -> AsyncIterator[Item]:
        """As `stream`, for `async for`: other threads run the rounds and call `on_progress`."""
        self._check_open()
        stop = threading.Event()
        items = self._stream(requests, False, on_progress, _rounds_between(every), stop)
        pending: asyncio.Future | None = None
        try:
            while True:
                pending = asyncio.ensure_future(asyncio.to_thread(next, items, None))
                item = await asyncio.shield(pending)
                if item is None:
                    return
                yield item
        finally:  # also if the caller leaves early: the thread ends its round, then the stream
            stop.set()
            if pending is not None:
                await asyncio.wait([pending])
            await asyncio.to_thread(items.close)  # type: ignore[attr-defined]

    def generate(
        self,
        requests: Iterable[Request | Prepared] | Request | Prepared,
        progress: bool = False,
        on_progress: OnProgress | None = None,
        every: int = 1,
    ) -> list[Output]:
        """The outputs of all requests, or of a single one, in their order, without cancelled ones; see `stream`.

        Raises:
            ValueError: before any work, naming every bad request. Requests without a length are checked as they are
                read, as in `stream`.
            FloatingPointError: as in `stream`, which also yields the other outputs.
        """
        if not isinstance(requests, Iterable):  # `prepare_all` reports it if it is not a request
            requests = [requests]
        if isinstance(requests, Sized):
            requests = self.prepare_all(requests)
        outputs = dict(self.stream(requests, progress, on_progress, every))
        return [outputs[index] for index in sorted(outputs)]

    def sample(
        self,
        labels: Label | Iterable[Label] = None,
        seed: int | Iterable[int] = 0,
        method: str | None = None,
        *,
        prompts: str | Iterable[str] | None = None,
        num: int | None = None,
        progress: bool = False,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> Any:
        """An image for each label, or prompt, in their order: `engine.sample([207, "otter"], seed=3, cfg=4)`.

        Args:
            labels: classes by number or name, or None for an unconditional image; one or many.
            prompts: prompts in place of labels, one or many.
            seed: of the first image, and each next image has the next seed; or a list with the seed of each image.
            num: number of images, through which the labels or prompts are cycled; by default one for each of them, or
                one for each seed.
            settings: as in `Request`. The other arguments and the errors are those of `generate`.

        Returns:
            A list of outputs without the cancelled ones. For one label or prompt with one seed and without `num`: the
            output itself, or None if it was cancelled.
        """
        requests = requests_of(labels, prompts, seed, num, method, settings)
        outputs = self.generate(requests, progress, on_progress)
        if num is not None or is_several(seed) or is_several(labels if prompts is None else prompts):
            return outputs
        return outputs[0] if outputs else None

    @torch.inference_mode()
    def decode(self, tokens: Any) -> Tensor:
        """The images of tokens, such as `Output.tokens`: float32 [B, 3, H, W] in 0..1 on the CPU.

        Args:
            tokens: MAR floats [B, L, d], VQ integers [B, L]; a list of tokens [L, d] or [L] counts as a batch. For
                tokens without B, the result has no B either.

        Raises:
            ValueError: no model of this engine has such tokens, or there is no autoencoder or tokenizer.
        """
        self._check_open()
        tokens = torch.stack([*tokens]) if isinstance(tokens, (list, tuple)) else torch.as_tensor(tokens)
        for runner in self.runners.values():
            own = runner.tokens
            shape = (runner.seq_len, *own.shape[2:])
            is_single = tokens.dim() == len(shape)
            batch = tokens.unsqueeze(0) if is_single else tokens
            if batch.shape[1:] != shape or batch.is_floating_point() != own.is_floating_point():
                continue
            with self._turn():
                images = runner.decode(batch.to(own))
            if images is None:
                raise ValueError("there is no autoencoder or tokenizer: load one (vae) to decode tokens")
            return images[0].cpu() if is_single else images.cpu()
        raise ValueError(
            f"tokens {tokens.dtype} {list(tokens.shape)} are not of this engine's models: give Output.tokens"
        )

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Writes the models to a new folder, which `cspd.load` reads. Raises ValueError, OSError."""
        self._check_open()
        if len(self._models) > 1:
            raise ValueError("a folder holds models of one family: save each family from an engine of its own")
        save_models(self._models[0], folder)

    def close(self) -> None:
        """Drops everything in flight and releases the models, as the end of a `with` block does."""
        with self._turn():
            self._drop(RuntimeError(CLOSED), self.runners)
            self._closed = True
            self.runners, self._models = {}, []
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


def _rounds_between(every: int) -> int:
    """Raises ValueError unless `every` is an integer above 0."""
    every = plain(every)
    check_integer("every", every, 1, LARGEST_INTEGER, "rounds from one call of on_progress to the next")
    return every


def drained(results: Results) -> Iterator[tuple[Sequence, Result]]:
    """Takes everything out of a queue that no other thread reads."""
    while not results.empty():
        yield results.get()


def _raise_dropped(why: BaseException, errors: list[Exception]) -> NoReturn:
    """Raises what ended a request: an error of this thread's own round as it is, otherwise a RuntimeError of it."""
    if why in errors:
        raise why
    raise RuntimeError(f"all requests in flight were dropped because of {why!r}") from why


def _raise_lost(lost: Mapping[int, str]) -> None:
    """Raises FloatingPointError if requests, by index, gave no image, with their errors."""
    if not lost:
        return
    first = min(lost)
    whose = f"{named([first])}: " if len(lost) > 1 else ""
    raise FloatingPointError(f"{named(sorted(lost))} gave no image: {whose}{lost[first]}")


def named(indices: list[int]) -> str:
    """Requests by their indices; if there are many, the first ones and their number."""
    if len(indices) == 1:
        return f"request {indices[0]}"
    numbers = ", ".join(map(str, indices[:NAMED]))
    more = f" ... ({len(indices)} of them)" if len(indices) > NAMED else ""
    return f"requests {numbers}{more}"
