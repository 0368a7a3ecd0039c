"""Rounds of sequences that are anywhere in their images, and how long they take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cspd.engine import Engine
from cspd.gpu_check.settings import Settings
from cspd.sequence import Request, Sequence
from cspd.speed import batch_at

SHARES = (0.0, 0.25, 0.5, 0.75)  # of an image's tokens that are known where rounds are timed


def seconds_a_round(settings: Settings, engine: Engine, request: Request) -> tuple[dict[int, float], float]:
    """Seconds of a round of all slots by tokens known at its start, and how many tokens a sequence's round commits.

    Where sequences are at different iterations, as those of `speculative`, a round is an iteration of one of them. Of
    several the median is taken: in some a graph may be captured.
    """
    seconds, committed = {}, []
    for share in SHARES:
        batch = batch_at(engine, request, int(share * engine.host.seq_len))
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
