"""The thread of `cspd serve` that runs the rounds of all clients' requests, and what it reports about an image."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

from cspd.engine import Engine
from cspd.files import link_of
from cspd.request import Output, Request, png_of

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
    "divergence": ("divergence, nats per token", ".3f"),
    "audit": ("audited, nats per token", ".3f"),
}


def shown(output: Output, share: float) -> dict:
    """The state of an image for the page, finished or not.

    Args:
        share: the committed fraction of its tokens, 0..1.

    Returns:
        "share"; "image", a data link; "token_cost", a list with None for NaN; "guarantee"; "seconds" of its rounds, and
        "images_per_second" from them; "numbers", a list of [name, text]; "ran" and "request", the request with
        all defaults as text and as its settings; "class_name".
    """
    seconds = sum(output.stats.seconds.values())
    return {
        "share": share,
        "image": None if output.image is None else link_of(png_of(output.pil(), output)),
        "token_cost": [round(cost, 2) if math.isfinite(cost) else None for cost in output.token_cost.tolist()],
        "guarantee": output.stats.guarantee,
        "seconds": seconds,
        "images_per_second": share / seconds if seconds else 0.0,
        "numbers": numbers(output, share),
        "ran": repr(output.request),
        "request": {name: value for name, value in output.request.to_dict().items() if value is not None},
        "class_name": output.class_name,
    }


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
    window = output.request.window
    if window is not None:
        found.append(("window", str(window) if window else "0, nothing is drafted"))
    return found


# The thread. The engines are used by it alone, so that no client waits for a lock in the middle of another's round.

PERIOD = 0.1  # minimum seconds between two reports of progress
SHARE = 0.2  # maximum fraction of the time that these reports take, since previews need the decoder
MINUTE = 60.0  # seconds over which images per second are counted


class Full(Exception):
    """A client, or all clients together, have too many unfinished requests."""


@dataclass(eq=False)
class Job:
    """A client's request to a model. The thread of `EngineLoop` calls `tell` with its events, see `shown`.

    The last event has "finished" or "error".
    """

    model: str
    request: Request
    client: str
    tell: Callable[[dict], None]
    ticket: int = -1


class EngineLoop:
    """Runs engines for many clients in one thread, a round of each engine in turn.

    Public methods are for other threads. They queue calls, which the thread makes between rounds. Private methods
    belong to the thread.

    Args:
        engines: by model name. No other thread may use them.
        most, most_each: maximum number of unfinished requests, of all clients and of each client.

    Attributes:
        jobs: the unfinished jobs. made: number of finished images.
    """

    def __init__(self, engines: Mapping[str, Engine], most: int, most_each: int) -> None:
        self.engines = engines
        self.most = most
        self.most_each = most_each
        self.jobs: set[Job] = set()
        self.made = 0
        self._started: dict[str, dict[int, Job]] = {name: {} for name in engines}  # jobs by ticket, of each model
        self._finish_times: deque[float] = deque(maxlen=10_000)
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._is_open = True
        self._next_report = 0.0
        self._thread = threading.Thread(target=self._run, name="rounds", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the current round of each model; unfinished jobs get an error.

        A signal handler may call it.
        """
        self._calls.put(self._close)

    def join(self) -> None:
        """Waits for the thread to end."""
        self._thread.join()

    def add(
        self, client: str, model: str, requests: Sequence[Request], tells: Sequence[Callable[[dict], None]]
    ) -> tuple[list[Job], Future]:
        """Adds requests to the engine of a model: all of them, or none if one is bad.

        Returns:
            The jobs, and a future of the advice on each resolved request, see `cspd.method.Method`.

        Raises:
            Full: too many requests are unfinished.
        """
        # the other thread may remove jobs meanwhile, so that a copy is counted
        num_own = sum(job.client == client for job in list(self.jobs))
        if num_own + len(requests) > self.most_each:
            raise Full(
                f"{num_own} of your images are unfinished, and the limit is {self.most_each}: wait for one, or stop one"
            )
        if len(self.jobs) + len(requests) > self.most:
            raise Full(f"{len(self.jobs)} images are unfinished, and the limit is {self.most}: try again in a moment")
        jobs = [Job(model, request, client, tell) for request, tell in zip(requests, tells)]
        self.jobs.update(jobs)
        advice: Future = Future()
        self._calls.put(lambda: self._start(jobs, advice))
        return jobs, advice

    def leave(self, jobs: Collection[Job]) -> None:
        """Cancels those of the jobs that are unfinished."""
        self._calls.put(lambda: self._cancel(jobs))

    def status(self) -> dict[str, float]:
        """Numbers of running and waiting requests and of finished images, and images per second in the last minute."""
        schedulers = [engine.scheduler for engine in self.engines.values()]
        num_running = sum(len(scheduler) - len(scheduler.waiting) for scheduler in schedulers)
        since = time.monotonic() - MINUTE
        num_lately = sum(moment > since for moment in list(self._finish_times))
        return {
            "running": num_running,
            "waiting": max(0, len(self.jobs) - num_running),
            "made": self.made,
            "images_per_second": num_lately / MINUTE,
        }

    def _run(self) -> None:
        while self._is_open:
            is_idle = not any(self._started.values())
            if is_idle or not self._calls.empty():
                call = self._calls.get()  # waits if nothing runs
                call()
                continue
            # one round of each engine in turn: a slow model does not hold up the others
            for model, jobs in self._started.items():
                if jobs:
                    self._round(model)
            self._report()

    def _start(self, jobs: Sequence[Job], advice: Future) -> None:
        if not advice.set_running_or_notify_cancel():  # the client has left
            self._cancel(jobs)
            return
        # all are prepared before the first one is queued; preparing may take long, since it may fit a calibration
        try:
            prepared = [self.engines[job.model].prepare(job.request) for job in jobs]
            for job, each in zip(jobs, prepared):
                job.ticket = self.engines[job.model].add_request(each)
                self._started[job.model][job.ticket] = job
        except Exception as error:
            self._cancel(jobs)
            advice.set_exception(error)
            return
        advice.set_result([each.method.advice(each.request) for each in prepared])

    def _cancel(self, jobs: Collection[Job]) -> None:
        for job in self.jobs.intersection(jobs):
            self.engines[job.model].cancel(job.ticket)
            self._end(job)

    def _end(self, job: Job, event: dict | None = None) -> None:
        """Forgets a job, after a last event."""
        self._started[job.model].pop(job.ticket, None)
        self.jobs.discard(job)
        if event is not None:
            job.tell(event)

    def _round(self, model: str) -> None:
        """Runs a round of a model's engine, and ends the jobs that it finished."""
        jobs = self._started[model]
        try:
            for ticket, output in self.engines[model].step().items():
                if ticket not in jobs:
                    continue  # the client left while the image was being decoded
                if output.error:
                    self._end(jobs[ticket], {"error": output.error})
                    continue
                event = shown(output, 1.0) | {"finished": True}
                self.made += 1
                self._finish_times.append(time.monotonic())
                self._end(jobs[ticket], event)
        except Exception as error:
            self._fail(model, error)

    def _report(self) -> None:
        """Reports the progress of running images, at most every `PERIOD` seconds."""
        began = time.monotonic()
        if began < self._next_report:
            return
        for model, jobs in self._started.items():
            engine = self.engines[model]
            for position, sequence in enumerate(engine.scheduler.waiting, start=1):
                if sequence.ticket in jobs:
                    jobs[sequence.ticket].tell({"position": position})
            running = [sequence for sequence in engine.scheduler.in_flight() if sequence.ticket in jobs]
            try:
                outputs = engine.so_far(running)
            except Exception as error:  # for example, out of memory for previews
                self._fail(model, error)
                continue
            for sequence, output in zip(running, outputs):
                jobs[sequence.ticket].tell(shown(output, sequence.fraction_done))
        now = time.monotonic()
        # a slow decoder reports less often, so that it does not slow down the rounds
        self._next_report = now + max(PERIOD, (now - began) / SHARE)

    def _fail(self, model: str, error: Exception) -> None:
        """Drops the jobs of a model that failed. The other models go on."""
        print(f"cspd: {model} failed: {error!r}", file=sys.stderr)
        self._drop(model, f"the model failed: {error}: try again; if memory is short, serve with a smaller --max-batch")

    def _drop(self, model: str, why: str) -> None:
        for job in list(self._started[model].values()):
            self.engines[model].cancel(job.ticket)
            self._end(job, {"error": why})

    def _close(self) -> None:
        self._is_open = False
        for model in self.engines:
            self._drop(model, "the server is shutting down")
