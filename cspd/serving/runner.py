"""The one thread that runs the rounds of all visitors' requests, and tells each visitor how hers are getting on."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

from cspd.engine import Engine
from cspd.flight import so_far
from cspd.lookup import method_of
from cspd.sequence import Output, Request
from cspd.serving.shown import shown

PERIOD = 0.1  # seconds between two looks at what is under way, at least
SHARE = 0.2  # of the time that these looks take, at most
MINUTE = 60.0  # seconds that images per second are counted over
Tell = Callable[[dict], None]


class Full(Exception):
    """More requests are under way than are allowed."""


@dataclass(eq=False)
class Job:
    """A request of a visitor to a model. `tell` is called with what becomes of it, by the runner's thread."""

    model: str
    request: Request
    visitor: str
    tell: Tell
    ticket: int = -1


class Runner:
    """Runs engines for many visitors, in one thread, in turn. Nobody else uses the engines meanwhile.

    What visitors want is done when each engine that has work has had its round. Public methods are for their threads,
    others are the runner's own.

    Args:
        engines: by the name of the model that each has. most, most_each: requests under way, in all and of a visitor.

    Attributes:
        jobs: those that are not finished. made: images that are.
    """

    def __init__(self, engines: Mapping[str, Engine], most: int, most_each: int) -> None:
        self.engines, self.most, self.most_each = engines, most, most_each
        self.jobs: set[Job] = set()
        self.made = 0
        self._finished: deque[float] = deque(maxlen=10_000)  # when the last images were
        self._under_way: dict[str, dict[int, Job]] = {name: {} for name in engines}  # those that it has, by ticket
        self._wishes: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._is_open = True
        self._next_look = 0.0
        self._thread = threading.Thread(target=self._run, name="rounds", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the rounds that run, one of each model. Visitors whose images are under way are told.

        A signal may ask.
        """
        self._wishes.put(self._close)

    def join(self) -> None:
        """Waits for the thread to end."""
        self._thread.join()

    def add(
        self, visitor: str, model: str, requests: Sequence[Request], tells: Sequence[Tell]
    ) -> tuple[list[Job], Future]:
        """Gives requests to the engine of a model, all of them or, where one is bad, none.

        Returns:
            The jobs, and a future of the advice on each resolved request, see `cspd.method.Method`; or of an error.

        Raises:
            Full: more are under way than are allowed.
        """
        own = sum(job.visitor == visitor for job in list(self.jobs))
        if own + len(requests) > self.most_each:
            raise Full(f"{own} of your images are under way and {self.most_each} may be: wait for one, or stop it")
        if len(self.jobs) + len(requests) > self.most:
            raise Full(f"{len(self.jobs)} images are under way and {self.most} may be: try again in a moment")
        jobs = [Job(model, request, visitor, tell) for request, tell in zip(requests, tells)]
        self.jobs.update(jobs)
        started: Future = Future()
        self._wishes.put(lambda: self._start(jobs, started))
        return jobs, started

    def leave(self, jobs: Collection[Job]) -> None:
        """Takes out those that are not finished: nobody waits for them any more."""
        self._wishes.put(lambda: self._cancel(jobs))

    def status(self) -> dict[str, float]:
        """How many requests run and wait, how many images were made, and how many a second in the last minute."""
        schedulers = [engine.scheduler for engine in self.engines.values()]
        running = sum(len(scheduler) - len(scheduler.waiting) for scheduler in schedulers)
        lately = sum(moment > time.monotonic() - MINUTE for moment in list(self._finished))
        return {
            "running": running,
            "waiting": max(0, len(self.jobs) - running),
            "made": self.made,
            "images_per_second": lately / MINUTE,
        }

    def _run(self) -> None:
        while self._is_open:
            if not any(self._under_way.values()) or not self._wishes.empty():
                self._wishes.get()()  # waits for one where there is nothing to run
                continue
            for model, jobs in self._under_way.items():
                if jobs:
                    self._round(model)
            self._look()

    def _start(self, jobs: Sequence[Job], started: Future) -> None:
        if not started.set_running_or_notify_cancel():  # she has left already
            self.jobs.difference_update(jobs)
            return
        try:
            resolved = [self.engines[job.model].resolve(job.request) for job in jobs]
            for job, request in zip(jobs, resolved):
                job.ticket = self.engines[job.model].add_request(request)
                self._under_way[job.model][job.ticket] = job
        except Exception as error:
            self._cancel([job for job in jobs if job.ticket in self._under_way[job.model]])
            self.jobs.difference_update(jobs)
            started.set_exception(error)
            return
        started.set_result([method_of(request).advice(request) for request in resolved])

    def _cancel(self, jobs: Collection[Job]) -> None:
        for job in self.jobs.intersection(jobs):
            self.engines[job.model].cancel(job.ticket)
            self._end(job)

    def _round(self, model: str) -> None:
        jobs = self._under_way[model]
        try:
            for ticket, output in self.engines[model].step().items():
                if ticket in jobs:  # its visitor may have left while the image was on its way
                    self._finish(jobs[ticket], output)
        except Exception as error:
            self._fail(model, error)

    def _finish(self, job: Job, output: Output) -> None:
        if output.error:
            self._end(job, {"error": output.error})
            return
        event = shown(output, 1.0) | {"finished": True}
        self.made += 1
        self._finished.append(time.monotonic())
        self._end(job, event)

    def _look(self) -> None:
        """Tells what is known of the images that run, unless that was done a moment ago."""
        began = time.monotonic()
        if began < self._next_look:
            return
        for model, jobs in self._under_way.items():
            engine = self.engines[model]
            own = [sequence for sequence in engine.scheduler.in_flight() if sequence.ticket in jobs]
            try:
                outputs = so_far(engine.host, own) if own else []
            except Exception as error:  # as where there is no memory left for pictures
                self._fail(model, error)
                continue
            for sequence, output in zip(own, outputs):
                jobs[sequence.ticket].tell(shown(output, sequence.share_made(engine.host.seq_len)))
        now = time.monotonic()
        self._next_look = now + max(PERIOD, (now - began) / SHARE)

    def _end(self, job: Job, event: dict | None = None) -> None:
        del self._under_way[job.model][job.ticket]
        self.jobs.discard(job)
        if event is not None:
            job.tell(event)

    def _fail(self, model: str, error: Exception) -> None:
        """Gives up what one model has under way; the thread goes on, and so do the others."""
        print(f"cspd: {model} failed: {error!r}", file=sys.stderr)
        self._drop(model, f"the model failed: {error}: try again; if memory is short, serve with a smaller --max-batch")

    def _drop(self, model: str, why: str) -> None:
        for job in list(self._under_way[model].values()):
            self.engines[model].cancel(job.ticket)
            self._end(job, {"error": why})

    def _close(self) -> None:
        self._is_open = False
        for model in self.engines:
            self._drop(model, "the server is ending")
