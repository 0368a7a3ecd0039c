"""The engine: requests in, images out. It runs rounds of sequences in slots, and knows no family of models."""

from __future__ import annotations

import asyncio
import contextlib
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
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from cspd import noise as philox_noise
from cspd.device import Precision, describe, pick_device, precision_of
from cspd.graphs import Graphs
from cspd.method import Method, ModelRunner, choose, families_for, method_of
from cspd.models import Models, placed, save_models
from cspd.option import LARGEST_INTEGER, check_integer, plain
from cspd.request import Label, Output, Request, RoundStats, Sequence, Stopwatch, requests_of
from cspd.terminal import shortened

# From finished sequences to outputs: images are decoded beside the next rounds where the device can do both.

AT_ONCE = 3  # images that a CPU decodes between two looks at the bar: a large one takes seconds
AHEAD = 4  # batches of images that may be under way, before a round waits for the oldest


class _Made(NamedTuple):
    """What `ModelRunner.results` has of sequences, and images [B, 3, H, W], on the CPU."""

    tokens: Tensor
    token_cost: Tensor
    finite: Tensor
    images: Tensor | None


class _Work(NamedTuple):
    """A round that sequences took part in, or what was made of finished ones: there once `watch` is past."""

    sequences: list[Sequence]
    watch: Stopwatch
    made: _Made | None = None


class Finisher:
    """Outputs of finished sequences, in the order in which they finished.

    On a GPU images are decoded on a stream of their own, so that rounds, which wait for their small kernels more than
    they compute, go on meanwhile. On a CPU, all of whose cores a round uses, they are decoded at once. What the device
    has yet to do is kept here in its order, so that the seconds of rounds, and images, are read without waiting.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._work: deque[_Work] = deque()

    def __len__(self) -> int:
        """Images under way."""
        return len(self.sequences())

    def add_round(self, sequences: list[Sequence], watch: Stopwatch) -> None:
        """Sequences are charged the seconds of a round, when it is past."""
        self._work.append(_Work(sequences, watch))

    def add(self, runner: ModelRunner, sequences: list[Sequence], on_decoded: Callable[[int], object]) -> None:
        """Begins to decode sequences, whose slots are free afterwards.

        On a CPU `on_decoded` is called with a number of images that are there.
        """
        results = runner.results(sequences)
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            for tensor in results:
                tensor.record_stream(self._stream)  # whose memory is no one else's until that stream has read it
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            watch = Stopwatch(self.device)
            watch.start("decode")
            images = runner.decode(results[0]) if self._stream else _decoded(runner, results[0], on_decoded)
            made = _Made(*(None if each is None else each.to("cpu", non_blocking=True) for each in (*results, images)))  # type: ignore[arg-type]
            watch.stop()
        self._work.append(_Work(sequences, watch, made))

    def sequences(self) -> list[Sequence]:
        """Those that images are under way of."""
        return [sequence for work in self._work if work.made for sequence in work.sequences]

    def ready(self, wait: bool) -> list[tuple[Sequence, Output]]:
        """The outputs that are there; all that there will be, if told to `wait`."""
        outputs: list[tuple[Sequence, Output]] = []
        while self._work and (wait or self._work[0].watch.is_past() or self._num_batches() > AHEAD):
            work = self._work.popleft()
            for phase, spent in work.watch.seconds().items():
                for sequence in work.sequences:
                    sequence.stats.seconds[phase] += spent
            if work.made:
                outputs += _outputs(work.sequences, work.made)
        return outputs

    def clear(self) -> None:
        """Forgets what is being decoded."""
        self._work.clear()

    def _num_batches(self) -> int:
        return sum(1 for work in self._work if work.made)


def _decoded(runner: ModelRunner, tokens: Tensor, on_decoded: Callable[[int], object]) -> Tensor | None:
    """Images of tokens [B, ...], some at a time; never one of several alone, which takes as long as two."""
    parts = []
    for part in tokens.tensor_split(math.ceil(len(tokens) / AT_ONCE)):
        images = runner.decode(part)
        if images is None:
            return None
        parts.append(images)
        on_decoded(len(part))
    return torch.cat(parts)


def _outputs(sequences: list[Sequence], made: _Made) -> list[tuple[Sequence, Output]]:
    images = [None] * len(sequences) if made.images is None else made.images
    outputs = []
    with torch.inference_mode(False):  # copies that are ordinary tensors and do not hold the batch
        for sequence, own_finite, image, *of_one in zip(sequences, made.finite, images, made.tokens, made.token_cost):
            sequence.complete_stats()
            own_tokens, own_token_cost = (each.clone() for each in of_one)
            error = _error(sequence, own_finite, image)
            image = None if image is None or error else image.clone()
            what = sequence.request, own_tokens, image, own_token_cost, sequence.stats, error, sequence.class_name
            outputs.append((sequence, Output(*what)))
    return outputs


def _error(sequence: Sequence, finite: Tensor, image: Tensor | None) -> str | None:
    """What is wrong where an image or a token is not finite; `finite`: of each token, in generation order."""
    if not finite.all():
        rank = int(finite.int().argmin())
        where = f"token {rank + 1} of {len(finite)} in generation order, in iteration {sequence.iteration_of(rank)}"
        error = f"{sequence.request!r} left the numbers of float32 at {where}: look at cfg, temperature and the weights"
        advice = method_of(sequence.request).advice(sequence.request)
        return f"{error}; {advice}" if advice else error
    if image is not None and not image.isfinite().all():
        return f"{sequence.request!r}: the tokens are finite but not the image: look at the autoencoder's weights"
    return None


# Who runs next: waiting -> running -> finished, over slots that are allocated once.


class Scheduler:
    """First come, first served into `num_slots` slots; the kinds of round in flight take turns.

    Sequences with equal `Sequence.key` share a round. Where several kinds are in flight, each gets a round in
    turn, so none waits longer than the number of kinds.
    """

    def __init__(self, num_slots: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Hashable, list[Sequence]] = {}  # by round key, in the order of their turns
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))

    def __len__(self) -> int:
        """Sequences not finished. Any thread may ask."""
        return len(self.waiting) + sum(map(len, list(self.running.values())))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self.waiting or sequence in self.running.get(sequence.key, ())

    def in_flight(self) -> list[Sequence]:
        """The running sequences."""
        return [sequence for batch in self.running.values() for sequence in batch]

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Moves waiting sequences into free slots and returns them."""
        admitted = []
        while self.waiting and self._free:
            sequence = self.waiting.popleft()
            sequence.slot = self._free.pop()
            self.running.setdefault(sequence.key, []).append(sequence)
            admitted.append(sequence)
        return admitted

    def next(self) -> list[Sequence]:
        """The sequences of the kind whose turn it is; empty when nothing runs."""
        if not self.running:
            return []
        key = next(iter(self.running))
        batch = self.running.pop(key)
        self.running[key] = batch
        return list(batch)

    def release(self, finished: list[Sequence]) -> None:
        """Frees the slots of finished sequences."""
        for sequence in finished:
            key = sequence.key
            self.running[key].remove(sequence)
            if not self.running[key]:
                del self.running[key]
            self._free.append(sequence.slot)

    def cancel(self, sequence: Sequence) -> None:
        """Takes a sequence out, waiting or running."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.release([sequence])

    def clear(self) -> None:
        """Drops everything, finished or not."""
        self.waiting.clear()
        for batch in list(self.running.values()):
            self.release(list(batch))


# A lock whose waiters get it in the order in which they came.


class Turns:
    """Threads that take turns at something. Whoever has the turn may ask for it again.

    Python's own locks are not fair: a thread that runs round after round would hardly ever let another one in.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: deque[object] = deque()  # the first has the turn
        self._thread: int | None = None

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Waits for the turn, and has it within."""
        if self._thread == threading.get_ident():
            yield
            return
        own = object()
        self._waiting.append(own)
        try:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting[0] is own)
            self._thread = threading.get_ident()
            yield
        finally:  # also where a signal ends the waiting
            if self._waiting[0] is own:
                self._thread = None
            with self._condition:
                self._waiting.remove(own)
                self._condition.notify_all()


# What is in flight: requests of any number of threads, which take turns to run its rounds.
#
# What becomes of a request goes to the inbox of who gave it, whoever runs the round: (sequence, its Output), or what
# failed, or None where it was cancelled.


class Flight:
    """Requests in flight over the model runners of an engine. All that changes anything is for who has the turn.

    Attributes:
        turns: of the threads. runners: by family. scheduler, finisher: of the sequences that run, and of their images.
    """

    def __init__(self, runners: Mapping[str, ModelRunner], num_slots: int, device: torch.device) -> None:
        self.runners, self.device = runners, device
        self._lengths = {
            family: runner.seq_len for family, runner in runners.items()
        }  # told after the engine is closed too
        self.turns = Turns()
        self.scheduler = Scheduler(num_slots)
        self.finisher = Finisher(device)
        self._tickets = itertools.count()
        self._cancelled: set[Sequence] = set()  # their slots are not free yet

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence and gives it its ticket."""
        sequence.ticket = next(self._tickets)
        self.scheduler.add(sequence)

    @torch.inference_mode()
    def run_round(self, on_decoded: Callable[[int], object] = lambda count: None) -> None:
        """Runs one round of one kind of request; what is finished goes to inboxes. `on_decoded`: as of `Finisher.add`.

        An error or interruption drops everything in flight.
        """
        watch = Stopwatch(self.device)
        try:
            self._free_cancelled()
            admitted = self.scheduler.admit()
            for family, runner in self.runners.items():
                runner.admit([sequence for sequence in admitted if sequence.request.family == family])
            batch = self.scheduler.next()
            if batch:
                self._run(batch, watch, on_decoded)
            for sequence, output in self.finisher.ready(wait=not len(self.scheduler)):
                sequence.inbox.append((sequence, output))
        except BaseException as error:  # cut off in the middle of a round, its state is no one's any more
            self.drop(error)
            raise

    def _run(self, batch: list[Sequence], watch: Stopwatch, on_decoded: Callable[[int], object]) -> None:
        method, key = method_of(batch[0].request), batch[0].key
        runner = self.runners[method.family]
        finished = method.run_round(runner, batch, watch)
        watch.stop()
        self.finisher.add_round(batch, watch)
        for sequence in batch:
            if len(sequence.reached) < sequence.iteration:
                sequence.reached.append(sequence.num_started)
        self.scheduler.release(finished)
        if len(finished) == len(batch):
            runner.forget(key)
        # one whose chains were under way as it was cancelled can end its last iteration nevertheless
        if wanted := [sequence for sequence in finished if sequence not in self._cancelled]:
            self.finisher.add(runner, wanted, on_decoded)

    def cancel(self, sequences: Collection[Sequence]) -> None:
        """Takes sequences out that are not finished. Slots that work under way will write to are free a round later."""
        going = [sequence for sequence in sequences if sequence in self.scheduler and sequence not in self._cancelled]
        self._cancelled.update(going)
        for sequence in going:
            sequence.inbox.append((sequence, None))
        self._free_cancelled()

    def _free_cancelled(self) -> None:
        for key, batch in list(self.scheduler.running.items()) if self._cancelled else ():
            if self._cancelled.issuperset(batch):  # what is under way is theirs alone
                self.runners[str(batch[0].request.family)].forget(key)
                self.scheduler.release(list(batch))
        for sequence in list(self._cancelled):
            if sequence in self.scheduler and not sequence.num_under_way:
                self.scheduler.cancel(sequence)
            if sequence not in self.scheduler:
                self._cancelled.remove(sequence)

    def drop(self, why: BaseException) -> None:
        """Drops everything in flight."""
        dropped = [*self.unfinished(), *self.finisher.sequences()]
        self.scheduler.clear()
        self.finisher.clear()
        self._cancelled.clear()
        for runner in self.runners.values():
            runner.clear()
        for sequence in dropped:
            sequence.inbox.append((sequence, why))

    def unfinished(self) -> list[Sequence]:
        """The sequences that wait or run."""
        return [*self.scheduler.waiting, *self.scheduler.in_flight()]

    def seq_len(self, sequence: Sequence) -> int:
        """How many tokens a sequence will have."""
        return self._lengths[str(sequence.request.family)]

    def share(self, sequence: Sequence) -> float:
        """The share of those that it makes that is committed, in 0..1."""
        return sequence.share_made(self.seq_len(sequence))

    def preview(self, sequence: Sequence) -> Image.Image | None:
        """A picture of a running sequence's committed tokens; None if it does not run, or has no image."""
        with self.turns.take():
            if sequence not in self.scheduler.in_flight():
                return None
            (output,) = so_far(self.runners[str(sequence.request.family)], [sequence])
        return None if output.image is None else output.pil()


@torch.inference_mode()
def so_far(runner: ModelRunner, sequences: list[Sequence]) -> list[Output]:
    """What is committed by now of running sequences of a model runner, as outputs; for who has the turn.

    Heat is NaN where a token is yet to be made. On a GPU some statistics are a few rounds late.
    """
    tokens, token_cost = (torch.cat(each) for each in zip(*map(runner.so_far, sequences)))
    images = runner.decode(tokens)
    shown = [None] * len(sequences) if images is None else images.nan_to_num().cpu()
    outputs = []
    for sequence, *own in zip(sequences, tokens.cpu(), shown, token_cost.cpu()):
        outputs.append(Output(sequence.request, *own, sequence.stats, class_name=sequence.class_name))  # type: ignore[call-arg, misc]
    return outputs


# A stream of outputs: requests are read as slots become free, and outputs handed out as they finish.

DECODING = 0.1  # of an image, in the bar: its tokens are the rest
NAMED = 3  # requests of one fault that are named one by one
Item = tuple[int, Output]  # the index of a request, and what became of it
# told of a request of one's own, the share of its tokens that are known, and how to see them
OnProgress = Callable[[Request, float, Callable[[], "Image.Image | None"]], object]


def stream(
    flight: Flight,
    queue: Callable[[Request, deque], Sequence],
    requests: Iterable[Request],
    progress: bool = False,
    on_progress: OnProgress | None = None,
    every: int = 1,
    stop: threading.Event | None = None,
) -> Iterator[Item]:
    """See `Engine.stream`. It ends soon after `stop` is set, by any thread.

    Args:
        queue: checks a request and puts its sequence, of an inbox, in flight; raises ValueError on a bad one.

    Raises ValueError at once if `every` is not an integer above 0.
    """
    every = plain(every)
    check_integer("every", every, 1, LARGEST_INTEGER, "rounds from one call of on_progress to the next")
    return _stream(flight, queue, requests, progress, on_progress, every, stop)


def _stream(
    flight: Flight,
    queue: Callable[[Request, deque], Sequence],
    requests: Iterable[Request],
    progress: bool,
    on_progress: OnProgress | None,
    every: int,
    stop: threading.Event | None,
) -> Iterator[Item]:
    source, bar = _Source(requests), _Bar(progress, len(requests) if isinstance(requests, Sized) else None)
    own: dict[Sequence, int] = {}
    inbox: deque = deque()
    lost: dict[int, str] = {}
    finished = rounds = 0
    try:
        while own or not source.is_over:
            # one more than there are slots: a round that ends all of them then does not wait for their images
            fresh = source.read(1 + flight.scheduler.num_slots - len(flight.scheduler))
            with flight.turns.take():
                try:
                    for index, request in fresh:
                        own[queue(request, inbox)] = index
                except ValueError as bad:
                    source.end(bad)
                if not rounds:
                    bar.show(0, own, flight)
                if not inbox:
                    flight.run_round(bar.add_decoded)
            rounds += 1
            decoded = {sequence for sequence, _ in inbox}
            bar.show(finished + len(decoded), own.keys() - decoded, flight)
            while inbox:
                sequence, output = checked(*inbox.popleft())
                index = own.pop(sequence)
                if output is None:
                    continue
                finished += 1
                if output.error:
                    lost[index] = output.error
                    continue
                if on_progress:
                    on_progress(sequence.asked, 1.0, output.pil)  # type: ignore[arg-type]
                yield index, output
            if stop is not None and stop.is_set():
                return
            for sequence in list(own) if on_progress and rounds % every == 0 else ():
                on_progress(sequence.asked, flight.share(sequence), functools.partial(flight.preview, sequence))  # type: ignore[arg-type, misc]
    finally:
        bar.close()
        with flight.turns.take():
            flight.cancel(own)
    if source.error:
        raise source.error
    _raise_lost(lost)


def _raise_lost(lost: dict[int, str]) -> None:
    """Raises FloatingPointError where requests, by index, gave no image, for the reasons there."""
    if lost:
        first = f"{named([min(lost)])}: " if len(lost) > 1 else ""
        raise FloatingPointError(f"{named(sorted(lost))} gave no image: {first}{lost[min(lost)]}")


def forget_failures(inbox: deque) -> None:
    """Leaves in an inbox what is no failure."""
    kept = [message for message in inbox if not isinstance(message[1], BaseException)]
    inbox.clear()
    inbox.extend(kept)


def checked(sequence: Sequence, result: Output | BaseException | None) -> tuple[Sequence, Output | None]:
    """A message of an inbox. Raises RuntimeError where a round failed that another thread ran."""
    if isinstance(result, BaseException):
        raise RuntimeError(f"everything in flight was dropped: {result!r}") from result
    return sequence, result


class _Source:
    """Requests that are read one after the other, and what ended them."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests: Iterator[tuple[int, Request]] = enumerate(requests)
        self.is_over = False
        self.error: ValueError | None = None

    def read(self, most: int) -> list[tuple[int, Request]]:
        """Up to so many of the next requests, with their indices."""
        read: list[tuple[int, Request]] = []
        while not self.is_over and len(read) < most:
            try:
                read.append(next(self._requests))
            except StopIteration:
                self.end()
            except ValueError as bad:
                self.end(bad)
        return read

    def end(self, error: ValueError | None = None) -> None:
        """No more are read."""
        self.is_over, self.error = True, error


class _Bar:
    """Counts images, or the tokens of a single one; of none there is no bar."""

    def __init__(self, shown: bool, total: int | None) -> None:
        self._shown, self._total = shown and total != 0, total
        self._bar: tqdm | None = None

    def show(self, finished: int, own: Collection[Sequence], flight: Flight) -> None:
        """So many images are finished, and some are under way."""
        if not self._shown or not (own or self._bar is not None):
            return
        done = finished + sum(map(flight.share, own)) * (1 if self._total == 1 else 1 - DECODING)
        if self._total == 1:
            length = next(map(flight.seq_len, own)) if self._bar is None else self._bar.total
            self._count(done * length, length, "token", "{n:.0f}/{total}")
        else:
            self._count(done, self._total, "image", "{n:.1f}/{total}" if self._total else "{n:.1f}")

    def _count(self, done: float, total: int | None, unit: str, counted: str) -> None:
        if self._bar is None:
            bar, left = ("{l_bar}{bar}| ", "<{remaining}") if total else ("", "")
            form = f"{bar}{counted} {unit}s [{{elapsed}}{left}, {{rate_fmt}}]"
            self._bar = tqdm(total=total, unit=f" {unit}", bar_format=form)
        self._bar.n = done
        self._bar.update(0)

    def add_decoded(self, count: int) -> None:
        """So many images more are decoded, in the middle of a round."""
        if self._bar is not None and self._total != 1:
            self._bar.update(DECODING * count)

    def close(self) -> None:
        """The last that was shown stays."""
        if self._bar is not None:
            self._bar.close()


async def from_threads(make: Callable[..., Iterator[Item]], *args: Any) -> AsyncIterator[Item]:
    """What `make(*args, stop=...)` yields, which another thread waits for; if it is left early, that one stops soon."""
    stop = threading.Event()
    items = make(*args, stop=stop)
    pending: asyncio.Future | None = None
    try:
        while True:
            pending = asyncio.ensure_future(asyncio.to_thread(next, items, None))
            item = await asyncio.shield(pending)
            if item is None:
                return
            yield item
    finally:
        stop.set()
        if pending is not None:
            await asyncio.wait([pending])
        await asyncio.to_thread(items.close)  # type: ignore[attr-defined]


def check_all(check: Callable[[Request], object], requests: Iterable[Request]) -> None:
    """Raises ValueError where some requests are bad, naming each fault once."""
    bad: dict[str, list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        try:
            check(request)
        except ValueError as error:
            bad[str(error)].append(index)
    if bad:
        raise ValueError("; ".join(f"{named(alike)}: {error}" for error, alike in bad.items()))


def named(indices: list[int]) -> str:
    """Requests by their indices, of many the first and how many there are."""
    if len(indices) == 1:
        return f"request {indices[0]}"
    numbers = ", ".join(map(str, indices[:NAMED]))
    return f"requests {numbers}" + (f" ... ({len(indices)} of them)" if len(indices) > NAMED else "")


# The engine: takes requests, runs rounds over everything in flight, hands out finished images.

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
        precision: "fp32", "tf32" or "bf16", see `cspd.device.POLICIES`; or another engine's on the same device.
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
        self.runners: dict[str, ModelRunner] = {}
        for each in self._models:
            self.runners[each.family] = each.runner(max_batch, self.device, self.precision, **how, graphs=self.graphs)
        self.num_slots, self._closed = max_batch, False
        self._classes = {each.family: each.classes for each in self._models}
        self._flight = Flight(self.runners, max_batch, self.device)
        self.scheduler = self._flight.scheduler
        self._inbox: deque = deque()  # of the requests of `add_request`

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{family} {runner.image_size}x{runner.image_size}" for family, runner in self.runners.items()
        )
        how = f"{sizes} pixels; {self.num_slots} slots, {self.device}, {self.precision.policy}"
        return f"<Engine, {'closed' if self._closed else how}>"

    @property
    def runner(self) -> ModelRunner:
        """The first family's."""
        self._check_open()
        return next(iter(self.runners.values()))

    def with_slots(self, max_batch: int) -> Engine:
        """Another engine over the same models."""
        self._check_open()
        settings = {"device": self.device, "precision": self.precision, **self._settings}  # and its copies of weights
        engine = Engine(*self._models, max_batch=max_batch, **settings)
        for family, runner in self.runners.items():
            engine.runners[family].adopt(runner)
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
            request = self.runners[method.family].resolve(request, method)
        if advice := method.advice(request):
            warnings.warn(advice, stacklevel=1)  # always from here, so that Python says it once
        return request

    def _checked(self, request: Request) -> tuple[Request, Method]:
        if not isinstance(request, Request):
            raise ValueError(f"{shortened(request)} is no request: give cspd.Request(label, ...)")
        self._check_open()
        request, method = choose(request, families_for(request, self.runners))
        if isinstance(request.label, str) and self.runners[method.family].num_classes:
            request = request.but(label=self._classes[method.family].number_of(request.label))
        if request.label is None and request.prompt is None and request.cfg is None:  # nothing to guide towards
            request = request.but(cfg=1.0)
        return self.runners[method.family].check(request, method), method

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
        save_models(self._models[0], folder)

    def close(self) -> None:
        """Drops what is in flight and lets the models go, as `with` does at its end. Nothing can be run then."""
        with self._flight.turns.take():
            self._flight.drop(RuntimeError(CLOSED))
            self._closed = True
            self.runners, self._models, self._flight.runners = {}, [], {}
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
