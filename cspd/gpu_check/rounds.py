"""Rounds of sequences that are anywhere in their images, and how long they take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cspd.continuous.schedule import timetable
from cspd.engine import Engine
from cspd.gpu_check.settings import Settings
from cspd.lookup import method_of
from cspd.precision import Stopwatch
from cspd.sequence import Request, RoundStats, Sequence

SHARES = (0.0, 0.25, 0.5, 0.75)  # of an image's tokens that are known where rounds are timed


@dataclass
class Batch:
    """Sequences that fill an engine's slots.

    Attributes:
        sequences: those that are not finished.
    """

    engine: Engine
    sequences: list[Sequence]

    @torch.inference_mode()
    def round(self) -> None:
        """A round, of which nothing is decoded; none where all are finished."""
        if not self.sequences:
            return
        host, request = self.engine.host, self.sequences[0].request
        finished = method_of(request).run_round(host, self.sequences, Stopwatch(self.engine.device))
        self.sequences = [sequence for sequence in self.sequences if sequence not in finished]


def starts(request: Request, seq_len: int, num: float | None = None) -> np.ndarray:
    """Tokens known before each round of an image: by the request's timetable, or `num` more each time."""
    if num is not None:
        return np.arange(0, seq_len, num)
    masked = timetable(request, seq_len).masked
    return seq_len - np.concatenate([[seq_len], masked[:-1]])


def iteration_at(before: np.ndarray, known: float) -> int:
    """The first iteration, from 0, at whose start so many tokens are known, or the last."""
    return min(int(np.searchsorted(before, known)), len(before) - 1)


@torch.inference_mode()
def batch_at(engine: Engine, request: Request, share: float) -> Batch:
    """Every slot of the engine with a sequence that knows this share of its tokens, whatever these are."""
    host = engine.host
    method, iteration = method_of(request), 0
    known = int(share * host.seq_len)
    if host.family == "MAR":
        before = starts(request, host.seq_len)
        iteration = iteration_at(before, known)
        known = int(before[iteration])
    host.clear()
    sequences = []
    for slot in range(engine.num_slots):
        own = request.but(label=slot % host.num_classes, seed=slot)
        sequences.append(
            Sequence(
                own,
                ticket=slot,
                slot=slot,
                key=method.round_key(own),
                iteration=iteration,
                num_committed=known,
                stats=RoundStats(guarantee=method.guarantee_of(own)),
            )
        )
    host.admit(sequences)
    if host.family == "VQ":
        host.known.fill_(known)
    return Batch(engine, sequences)


def seconds_a_round(settings: Settings, engine: Engine, request: Request) -> tuple[dict[int, float], float]:
    """Seconds of a round of all slots by tokens known at its start, and how many tokens a sequence's round commits.

    Where sequences are at different iterations, as those of `speculative`, a round is an iteration of one of them. Of
    several the median is taken: in some a graph may be captured.
    """
    seconds, committed = {}, []
    for share in SHARES:
        batch = batch_at(engine, request, share)
        everyone = list(batch.sequences)
        known = everyone[0].num_committed
        for _ in range(settings.scale.warm_ups):
            batch.round()
        each = []
        for _ in range(settings.scale.rounds):
            before = _progress(everyone)
            spent = timed(settings, batch.round)
            rounds, tokens = _progress(everyone) - before
            if rounds:  # none is left of an image that is almost done
                each.append(spent * len(everyone) / rounds)
                committed.append(tokens / rounds)
        if each:
            seconds[known] = statistics.median(each)
    engine.host.clear()
    return seconds, statistics.mean(committed)


def _progress(sequences: list[Sequence]) -> np.ndarray:
    """Iterations and tokens that all sequences have begun, int64 [2]."""
    return np.array([[s.iteration, s.num_started] for s in sequences]).sum(0)


def timed(settings: Settings, work: Callable[[], object]) -> float:
    """Seconds until the device has done some work."""
    settings.synchronize()
    start = time.perf_counter()
    work()
    settings.synchronize()
    return time.perf_counter() - start


def times(seconds: dict[int, float], known: np.ndarray, batch: int) -> dict[str, Any]:
    """Milliseconds of an image as `image_ms`, and of the rounds that were timed, by tokens known."""
    by_known = {str(tokens): 1000 * spent for tokens, spent in seconds.items()}
    return {"ms": image_ms(seconds, known, batch), "round_ms": by_known}


def image_ms(seconds: dict[int, float], known: np.ndarray, batch: int) -> float:
    """Milliseconds of an image in a batch: its rounds, which begin at `known` tokens, as those that were timed."""
    each = np.interp(known, list(seconds), list(seconds.values()))
    return 1000 * float(each.sum()) / batch
