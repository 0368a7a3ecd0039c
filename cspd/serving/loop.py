"""The jobs of `cspd serve`, the thread that runs their rounds, what it reports about an image, and its metrics."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cspd.engine import Engine, Results, drained
from cspd.files import link_of
from cspd.pixels import png_of, png_text
from cspd.request import Output, Request
from cspd.request import Sequence as RunningSequence
from cspd.terminal import say, watching

NUMBERS = {  # statistics to show: their titles and formats
    "iterations": ("iterations", ".0f"),
    "backbone_calls": ("backbone calls", ".0f"),
    "lazy_backbone_calls": ("lazy backbone calls", ".0f"),
    "head_calls": ("head calls", ".0f"),
    "head_calls_per_token": ("head calls per token", ".1f"),
    "draft_backbone_calls": ("draft backbone calls", ".0f"),
    "draft_head_calls": ("draft head calls", ".0f"),
    "step_compression": ("tokens per forward pass", ".2f"),
    "alpha": ("drafts accepted", ".1%"),
    "bound": ("bound on total variation", ".3g"),
    "difference": ("difference from the full chain", ".3f"),
    "divergence": ("predicted, nats per token", ".3g"),
    "audit": ("audited, nats per token", ".3f"),
}


# Clients do not see where files of this machine are, nor addresses in its memory.

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
FOLDERS = re.compile(r"(?<![\w./])(?:[A-Za-z]:\\(?:[^\s\\'\"]+\\)*|/(?:[^\s/'\"]+/)+)")  # of absolute paths


def public(message: str) -> str:
    """A message without addresses, and with only the last part of absolute paths."""
    return FOLDERS.sub("", ADDRESS.sub("", message))


def public_names(checkpoints: Sequence[str]) -> dict[str, str]:
    """The checkpoints by the names that clients see: of an absolute path, as few of its last parts as are unique."""
    for depth in range(1, 1 + max(len(Path(each).parts) for each in checkpoints)):
        names = {}
        for each in checkpoints:
            path = Path(each)
            names["/".join(path.parts[-depth:]) if path.is_absolute() else each] = each
        if len(names) == len(checkpoints):
            break
    return names


def shown(output: Output, share: float) -> dict:
    """The state of an image for the page, finished or not.

    Args:
        share: the fraction of its work that is done, 0..1.

    Returns:
        "share"; "image", a data link; "token_cost", a list with None for NaN; "guarantee"; "seconds" of its rounds, and
        "images_per_second" from them; "numbers", a list of [name, text]; "counts", head calls and drafts so far;
        "num_tokens", generated ones of the whole image; "seed"; "ran" and "settings", the request with all defaults as
        text and as a dictionary, its integers as text; "class_name".
    """
    seconds = sum(output.stats.seconds.values())
    verified, accepted = map(sum, output.stats.by_lag)
    models = {name: public(each) if isinstance(each, str) else each for name, each in output.models.items()}
    text = png_text(output.request.to_dict(), models)
    return {
        "share": share,
        "image": None if output.image is None else link_of(png_of(output.pil(), text)),
        "token_cost": [round(cost, 2) if math.isfinite(cost) else None for cost in output.token_cost.tolist()],
        "guarantee": output.stats.guarantee,
        "seconds": seconds,
        "images_per_second": share / seconds if seconds else 0.0,
        "numbers": numbers(output, share),
        "counts": {"head_calls": output.stats.head_calls, "verified": verified, "accepted": accepted},
        "num_tokens": output.request.num_generated(len(output.token_cost)),
        "seed": output.request.seed,
        "ran": repr(output.request),
        "settings": {name: exact(value) for name, value in output.request.to_dict().items() if value is not None},
        "class_name": output.class_name,
    }


def exact(value: object) -> object:
    """Integers as text: a browser rounds those above 2**53, such as a seed, to others."""
    return str(value) if type(value) is int else value


def numbers(output: Output, share: float) -> list[tuple[str, str]]:
    """The statistics that apply to an image, as (title, text)."""
    found = []
    for name, (title, form) in NUMBERS.items():
        value = getattr(output.stats, name)
        # 0 or None: the statistic does not apply, except that no draft may have been accepted
        if name == "head_calls_per_token" and share < 1:
            continue  # a mean over all tokens
        if value or (name == "alpha" and value is not None):
            found.append((title, format(value, form)))
    budget = output.request.budget
    if budget is not None:
        found.append(("budget, nats per token", format(budget, "g")))
    window = output.request.window
    if window is not None:
        found.append(("window", str(window) if window else "0, nothing is drafted"))
    return found


# Jobs: the unfinished images of all clients, however they are generated.

MINUTE = 60.0  # seconds over which images per second are counted
LONGEST = 60  # seconds that a client is asked to wait; OpenAI's client does not wait longer
GUESS = 10.0  # seconds of an image, before any is finished
CLOSING = "the server is shutting down: try again in a moment"


class Full(Exception):
    """A client, or all clients together, have too many unfinished requests.

    Attributes:
        seconds: after which there is probably room.
    """

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


class Closing(Exception):
    """The server is shutting down and takes no new requests."""

    def __init__(self) -> None:
        super().__init__(CLOSING)


class Left(Exception):
    """The client left before its request was accepted."""


@dataclass(eq=False)
class Job:
    """A client's request to a model, with all settings decided once it is accepted.

    `tell` is called with its events, see `shown`, in any thread. The last event has "finished" or "error"; without
    `wants_previews` there is no other. `sequence`: of its request in the engine, once it is queued. `has_left`: the
    client does not wait for it any more.
    """

    model: str
    request: Request
    client: str
    tell: Callable[[dict], None]
    wants_previews: bool = True
    sequence: RunningSequence | None = None
    has_left: bool = False
    began: float = field(default_factory=time.monotonic)


class Jobs:
    """The unfinished jobs, their limits and their metrics. A subclass generates the images.

    Args:
        most, most_each: maximum number of unfinished requests, of all clients and of each client.

    Attributes:
        about: the description of the models for the page, once the jobs are started.
        jobs: the unfinished jobs. made: number of finished images.
        is_closing: no new requests are taken.
    """

    def __init__(self, most: int, most_each: int) -> None:
        self.about: dict = {}
        self.most = most
        self.most_each = most_each
        self.jobs: set[Job] = set()
        self.made = 0
        self.is_closing = False
        self.metrics = Metrics(self)
        self._finish_times: deque[float] = deque(maxlen=10_000)
        self._took = deque([GUESS], maxlen=10)  # seconds of the last finished images, from the request to the end

    def start(self) -> None:
        """Makes everything ready. It may block."""

    def close(self) -> None:
        """Ends soon: unfinished jobs get an error. A signal handler may call it."""
        self.is_closing = True

    def join(self) -> None:
        """Waits for the end."""

    def is_alive(self) -> bool:
        """Whether jobs can be finished."""
        return True

    def add(
        self,
        client: str,
        model: str,
        requests: Sequence[Request],
        tells: Sequence[Callable[[dict], None]],
        wants_previews: bool = True,
    ) -> tuple[list[Job], Future]:
        """Adds requests to a model: all of them, or none if one is bad.

        Returns:
            The jobs, and a future of the advice on each resolved request, see `cspd.method.Method`.

        Raises:
            Full: too many requests are unfinished. Closing: the server is shutting down. ValueError: these requests
                alone are too many.
        """
        if self.is_closing:
            raise Closing
        limit = min(self.most, self.most_each)
        if len(requests) > limit:
            raise ValueError(f"{len(requests)} images are more than the limit, {limit} of one client: ask for fewer")
        unfinished = list(self.jobs)  # another thread may remove jobs meanwhile
        own = [job for job in unfinished if job.client == client]
        num_over = len(own) + len(requests) - self.most_each
        if num_over > 0:
            said = f"{len(own)} of your images are unfinished, and the limit is {self.most_each}"
            raise Full(f"{said}: wait for one, or stop one", self._seconds_until(num_over, own))
        num_over = len(unfinished) + len(requests) - self.most
        if num_over > 0:
            said = f"{len(unfinished)} images are unfinished, and the limit is {self.most}"
            raise Full(f"{said}: try again in a moment", self._seconds_until(num_over, unfinished))
        jobs = [Job(model, request, client, tell, wants_previews) for request, tell in zip(requests, tells)]
        self.jobs.update(jobs)
        return jobs, self._begin(jobs)

    def _seconds_until(self, num: int, jobs: Collection[Job]) -> int:
        """Whole seconds, 1 to `LONGEST`, until the first `num` of these jobs are probably finished."""
        age = time.monotonic() - sorted(job.began for job in jobs)[num - 1]
        # an image takes as long as the slowest of the last ones, or as long again as it has taken so far
        return max(1, min(LONGEST, math.ceil(max(max(self._took) - age, age))))

    def _begin(self, jobs: list[Job]) -> Future:
        """Begins to generate the images of new jobs. Returns a future of the advice."""
        raise NotImplementedError

    def leave(self, jobs: Collection[Job]) -> None:
        """Cancels those of the jobs that are unfinished."""
        raise NotImplementedError

    def num_running(self) -> int:
        """The number of requests that are in slots."""
        return len(self.jobs)

    def status(self) -> dict[str, float]:
        """Numbers of running and waiting requests and of finished images, and images per second in the last minute."""
        num_running = self.num_running()
        since = time.monotonic() - MINUTE
        num_lately = sum(moment > since for moment in list(self._finish_times))
        return {
            "running": num_running,
            "waiting": max(0, len(self.jobs) - num_running),
            "made": self.made,
            "images_per_second": num_lately / MINUTE,
        }

    def _end(self, job: Job, event: dict | None = None) -> None:
        """Forgets a job, after a last event."""
        self.jobs.discard(job)
        if event is None:
            return
        if "error" in event:
            event["error"] = public(event["error"])
        if "finished" in event:
            self.made += 1
            self._finish_times.append(time.monotonic())
            self._took.append(time.monotonic() - job.began)
        self.metrics.count(job, event)
        job.tell(event)


SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)  # bounds of the buckets of the histograms


class Metrics:
    """What Prometheus reads.

    Attributes:
        registry: of all metrics.
        rounds: seconds of each round, by model. answers: number of HTTP answers, by status.
    """

    def __init__(self, jobs: Jobs) -> None:
        self.registry = CollectorRegistry()
        self.rounds = self._histogram("cspd_round_seconds", "Seconds of a round.")
        self._images = self._histogram("cspd_image_seconds", "Seconds from the request of an image to its end.")
        self._failed = self._counter("cspd_images_failed", "Images that ended in an error.")
        self._counts = {
            "head_calls": self._counter("cspd_head_calls", "Sequential head calls of finished images."),
            "verified": self._counter("cspd_drafts_verified", "Drafts of finished images that were verified."),
            "accepted": self._counter("cspd_drafts_accepted", "Drafts of finished images that were accepted."),
        }
        self.answers = self._counter("cspd_answers", "HTTP answers.", "status")
        for name, text in (("running", "Images in slots."), ("waiting", "Images in the queue.")):
            self._gauge(f"cspd_images_{name}", text, jobs, name)
        self._gauge("cspd_images_per_second", "Finished images per second, in the last minute.", jobs)

    def count(self, job: Job, event: Mapping) -> None:
        """Counts a job by its last event."""
        if "finished" not in event:
            self._failed.labels(job.model).inc()
            return
        self._images.labels(job.model).observe(time.monotonic() - job.began)
        for name, counter in self._counts.items():
            counter.labels(job.model).inc(event["counts"][name])

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, ["model"], buckets=SECONDS, registry=self.registry)

    def _counter(self, name: str, text: str, label: str = "model") -> Counter:
        return Counter(name, text, [label], registry=self.registry)

    def _gauge(self, name: str, text: str, jobs: Jobs, key: str = "images_per_second") -> None:
        Gauge(name, text, registry=self.registry).set_function(lambda: jobs.status()[key])


# The thread. The engine is used by it alone, so that no client waits for a lock in the middle of another's round.

PERIOD = 0.1  # minimum seconds between two reports of progress
SHARE = 0.2  # maximum fraction of the time that these reports take, since previews need the decoder


class EngineLoop(Jobs):
    """Runs an engine for many clients in one thread.

    Public methods are for other threads. They queue calls, which the thread makes between rounds. Private methods
    belong to the thread.

    Args:
        engine: no other thread may use it.
        most, most_each: as in `Jobs`.
        calibrated_only: refuse requests whose settings need a new calibration.
    """

    def __init__(self, engine: Engine, most: int, most_each: int, calibrated_only: bool = False) -> None:
        super().__init__(most, most_each)
        self.engine = engine
        self.calibrated_only = calibrated_only
        self._started: dict[RunningSequence, Job] = {}
        self._results: Results = SimpleQueue()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._is_open = True
        self._has_ended = False  # the thread makes no more calls
        self._next_report = 0.0
        self._thread = threading.Thread(target=self._run, name="rounds", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread after the current round; unfinished jobs get an error. A signal handler may call it."""
        super().close()
        self._is_open = False
        self._calls.put(lambda: None)  # wakes the thread

    def drain(self) -> None:
        """Ends the thread once all jobs are finished. New ones are refused. A signal handler may call it."""
        self.is_closing = True
        self._calls.put(lambda: None)  # wakes the thread

    def join(self) -> None:
        """Waits for the thread to end."""
        with contextlib.suppress(RuntimeError):  # it was never started
            self._thread.join()

    def _begin(self, jobs: list[Job]) -> Future:
        advice: Future = Future()
        self._calls.put(lambda: self._start(jobs, advice))
        if self._has_ended:
            self._make_calls()
        return advice

    def leave(self, jobs: Collection[Job]) -> None:
        """Cancels those of the jobs that are unfinished."""
        for job in jobs:
            job.has_left = True  # at once: the thread may be busy with a calibration for them
        self._calls.put(lambda: self._cancel(jobs))

    def num_running(self) -> int:
        """The number of requests that are in slots."""
        scheduler = self.engine.scheduler
        return len(scheduler) - len(scheduler.waiting)

    def _run(self) -> None:
        try:
            while self._is_open and not (self.is_closing and not self.jobs):
                if not self._started or not self._calls.empty():
                    call = self._calls.get()  # waits if nothing runs
                    call()
                    continue
                self._round()
                self._report()
        finally:  # also after a bug of ours: nobody waits in vain
            self._is_open, self.is_closing = False, True
            self._cancel(self._started.values(), CLOSING)
            self._has_ended = True
            self._make_calls()

    def _make_calls(self) -> None:
        """Makes the calls that are left when the thread has ended, which refuse requests. Any thread may be here."""
        with contextlib.suppress(Empty):
            while True:
                self._calls.get_nowait()()

    def _start(self, jobs: Sequence[Job], advice: Future) -> None:
        if not advice.set_running_or_notify_cancel():  # the client has left
            self._cancel(jobs)
            return
        # all are prepared before the first one is queued; preparing may take long, since it may fit a calibration
        try:
            self._watch(jobs, begins=False)
            with watching(functools.partial(self._watch, jobs)):
                prepared = [self.engine.prepare(job.request, model=job.model) for job in jobs]
            for job, each in zip(jobs, prepared):
                job.request = each.request
                job.sequence = self.engine.add(each, self._results)
                self._started[job.sequence] = job
        except Exception as error:
            self._cancel(jobs)
            advice.set_exception(error)
            return
        advice.set_result([each.method.advice(each.request) for each in prepared])

    def _watch(self, jobs: Sequence[Job], begins: bool) -> None:
        """Raises an error if a calibration for jobs may not begin, or if the jobs need not go on."""
        if not self._is_open:
            raise Closing
        if begins and self.calibrated_only:
            raise ValueError(
                "these settings are not calibrated, and this server makes no calibrations: take method=ar, or run"
                " `cspd calibrate` or `cspd sample` with them on its machine"
            )
        if all(job.has_left for job in jobs):
            raise Left

    def _cancel(self, jobs: Iterable[Job], why: str | None = None) -> None:
        """Ends those of the jobs that are unfinished, with an error if there is a reason."""
        for job in self.jobs.intersection(jobs):
            if job.sequence is not None:
                self.engine.cancel(job.sequence.ticket)
            self._end(job, None if why is None else {"error": why})

    def _end(self, job: Job, event: dict | None = None) -> None:
        """Forgets a job, after a last event."""
        if job.sequence is not None:
            self._started.pop(job.sequence, None)
        super()._end(job, event)

    def _round(self) -> None:
        """Runs a round, and ends the jobs that it finished."""
        began = time.monotonic()
        model = self.engine.run_round()
        if model is not None:
            self.metrics.rounds.labels(model).observe(time.monotonic() - began)
        for sequence, result in drained(self._results):
            job = self._started.get(sequence)
            if job is None:  # cancelled, or ended with its model
                continue
            if not isinstance(result, Output):
                self._fail(job.model, result)
            elif result.error:
                self._end(job, {"error": result.error})
            else:
                self._end(job, self._last_event(job, result))

    def _last_event(self, job: Job, output: Output) -> dict:
        """The last event of a job with an image. If it cannot be shown, the other jobs go on."""
        try:
            return shown(output, 1.0) | {"finished": True}
        except Exception as error:  # for example, out of memory
            say(f"an image of {job.model} cannot be shown: {error!r}")
            return {"error": f"the image cannot be shown: {error}"}

    def _report(self) -> None:
        """Reports the progress of running images, at most every `PERIOD` seconds."""
        began = time.monotonic()
        if began < self._next_report:
            return
        watched = {sequence: job for sequence, job in self._started.items() if job.wants_previews}
        for position, sequence in enumerate(self.engine.scheduler.waiting, start=1):
            if sequence in watched:
                watched[sequence].tell({"position": position})
        for model in self.engine.runners:
            try:
                outputs = self.engine.so_far([each for each in watched if each.model == model])
                events = {each: shown(output, each.fraction_done) for each, output in outputs.items()}
            except Exception as error:  # for example, out of memory for previews
                self._fail(model, error)
                continue
            for sequence, event in events.items():
                watched[sequence].tell(event)
        now = time.monotonic()
        # a slow decoder reports less often, so that it does not slow down the rounds
        self._next_report = now + max(PERIOD, (now - began) / SHARE)

    def _fail(self, model: str, error: BaseException | None) -> None:
        """Drops the jobs of a model that failed. The other models go on."""
        say(f"{model} failed: {error!r}")
        jobs = [job for job in self._started.values() if job.model == model]
        why = f"the model failed: {error}: try again; if memory is short, serve with a smaller --max-batch"
        self._cancel(jobs, why)
