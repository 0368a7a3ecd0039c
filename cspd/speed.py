"""The speed of a run relative to baseline sampling, of which a few rounds are timed in the same process.

Machines are noisy: an older measurement of baseline sampling would not do. The rounds have as many sequences at once as
the run had, use the same models, and are spread over an image. Decoding and everything else outside the rounds is
assumed to take as long as it did in the run.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cspd.continuous.denoisers import at_hand
from cspd.device import seconds_of
from cspd.engine import Engine
from cspd.heads.calibrated import HEAD_CALLS
from cspd.masked.orders import timetable
from cspd.method import guarantee_of, method_of, plain_of
from cspd.request import Request, RoundStats, Sequence, Stopwatch
from cspd.runs import WORTH
from cspd.terminal import shortened, telling

SHARE = 0.1  # of the run's seconds, which timing should take
MOST = 5.0  # seconds that timing should take at most
SLACK = 1.5  # times these seconds are allowed,
LEAST = 0.5  # and so many seconds in any case
ROUNDS = 5  # rounds of an image that are timed, at most
FEWEST = 2  # and at least
PASSES = 20  # times that each of them is timed, at most


@dataclass
class Batch:
    """Sequences in the slots of an engine.

    Attributes:
        sequences: the unfinished ones.
    """

    engine: Engine
    sequences: list[Sequence]

    @torch.inference_mode()
    def round(self) -> None:
        """Runs a round without decoding any image; does nothing if all sequences are finished."""
        if not self.sequences:
            return
        request = self.sequences[0].request
        runner = self.engine.runners[str(request.family)]
        finished = method_of(request).run_round(runner, self.sequences, Stopwatch(self.engine.device))
        self.sequences = [sequence for sequence in self.sequences if sequence not in finished]


def starts(request: Request, seq_len: int, num: float | None = None) -> np.ndarray:
    """The number of committed tokens before each round of an image.

    It follows the request's timetable, or grows by `num` in each round.
    """
    given = seq_len - request.num_generated(seq_len)  # 0, unless a part of the image is fixed
    if num is not None:
        return np.arange(given, seq_len, num)
    masked = timetable(request, seq_len).masked
    return np.concatenate([[given], seq_len - masked[:-1]])


def iteration_at(before: np.ndarray, committed: float) -> int:
    """The first iteration, from 0, that begins with at least so many committed tokens; else the last."""
    iteration = int(np.searchsorted(before, committed))
    return min(iteration, len(before) - 1)


@torch.inference_mode()
def batch_at(engine: Engine, request: Request, known: int, num: int | None = None) -> Batch:
    """Sequences with `known` committed tokens, whatever their values, or at the iteration that begins next.

    Args:
        request: resolved.
        num: of sequences; by default one in every slot.
    """
    runner = engine.runners[str(request.family)]
    method = method_of(request)
    iteration = 0
    if runner.family == "MAR":
        before = starts(request, runner.seq_len)
        iteration = iteration_at(before, known)
        known = int(before[iteration])
    # the time of a round does not depend on the values of tokens: whatever the slots hold will do
    runner.clear()
    sequences = []
    for slot in range(engine.num_slots if num is None else num):
        own = request.but(seed=slot)
        if runner.num_classes and request.label is not None:
            own = own.but(label=slot % runner.num_classes)
        sequence = Sequence(
            own,
            ticket=slot,
            slot=slot,
            key=method.round_key(own),
            uses=method.uses(own),
            stats=RoundStats(guarantee=method.guarantee_of(own)),
        )
        sequences.append(sequence)
    runner.admit(sequences)
    # admission sets both to the beginning of an image
    for sequence in sequences:
        sequence.iteration = iteration
        sequence.num_committed = known
    committed = getattr(runner, "num_committed", None)  # of VQ models
    if committed is not None:
        committed.fill_(known)
    return Batch(engine, sequences)


def against_plain(engine: Engine, request: Request, num: int, seconds: float, rounds: float) -> dict:
    """The speed of a run relative to baseline sampling of as many images with the same settings.

    If the run was no faster, and `calibrated` needs no fit for these settings, a few of its rounds are timed too.

    Args:
        request: of the run, resolved. num: images that the run generated.
        seconds: that the run took. rounds: the part of them that its rounds took.

    Returns:
        Plain values: "speedup", or None and the reason in "speedup_unknown"; "plain_seconds_per_image"; and
        "alternative", None unless the run was less than `WORTH` times as fast. It has "method", "speedup" (None if
        unknown) and "difference" (None if the method needs a fit). For a run of baseline sampling itself {}.
    """
    if request.method == "ar":
        return {}
    found = None
    why = f"timing a few rounds of it would take too long for a run of {seconds:.1f} s"
    with telling("timing a few rounds of baseline sampling"):
        try:
            found = _compared(engine, request, num, seconds, rounds)
        except (RuntimeError, ValueError, FloatingPointError) as error:  # the images are there: they are not lost
            why = f"timing it failed ({shortened(str(error))})"
    if found is None:
        return {"speedup": None, "plain_seconds_per_image": None, "alternative": None, "speedup_unknown": why}
    return found


def _compared(engine: Engine, request: Request, num: int, seconds: float, rounds: float) -> dict | None:
    """The result of `against_plain`, or None if timing takes too long."""
    # exact speculation with a window of 0 is baseline sampling: its own rounds are the measurement
    was_plain = request.method == "speculative" and request.window == 0 and guarantee_of(request) == "exact"
    plain_rounds: float | None = rounds
    if not was_plain:
        plain = engine.check(plain_of(request))
        plain_rounds = _rounds(engine, plain, num, seconds, rounds)
    if plain_rounds is None:
        return None
    # everything but the rounds would have taken the same time
    plain_seconds = seconds - rounds + plain_rounds
    speedup = plain_seconds / seconds
    alternative = None
    if speedup < WORTH and request.family == "MAR" and request.method != "calibrated":
        alternative = _alternative(engine, request, num, seconds, rounds, plain_seconds)
    return {"speedup": speedup, "plain_seconds_per_image": plain_seconds / num, "alternative": alternative}


def _alternative(
    engine: Engine, request: Request, num: int, seconds: float, rounds: float, plain_seconds: float
) -> dict | None:
    """The speed of `calibrated` relative to baseline sampling, or None if its chains would be no shorter."""
    # fitting would take minutes, so only a cached calibration is timed
    asked = engine.check(plain_of(request).but(method="calibrated"))
    if asked.num_sampling_steps <= HEAD_CALLS:
        return None
    found: dict = {"method": "calibrated", "speedup": None, "difference": None}
    runner: Any = engine.runners["MAR"]
    usual = at_hand(asked, runner)
    if usual is None:
        return found
    resolved, found["difference"] = usual
    own_rounds = _rounds(engine, resolved, num, seconds / 2, rounds)  # baseline sampling was timed before
    if own_rounds is not None:
        found["speedup"] = plain_seconds / (seconds - rounds + own_rounds)
    return found


def _rounds(engine: Engine, request: Request, num: int, seconds: float, rounds: float) -> float | None:
    """Seconds of all rounds of `num` images, an iteration or a token each; None if timing them takes too long.

    `seconds` and `rounds` are of a run with another method: they bound how long timing may take.
    """
    full, rest = divmod(num, engine.num_slots)
    batches = {}  # the number of batches by their size
    if full:
        batches[engine.num_slots] = full
    if rest:
        batches[rest] = 1
    runner = engine.runners[str(request.family)]
    tokens_per_round = None if request.family == "MAR" else 1
    before = starts(request, runner.seq_len, tokens_per_round)
    budget = min(MOST, SHARE * seconds)
    most = max(LEAST, SLACK * budget)
    # even one round would take too long, if it takes as long as one of the run
    num_rounds = len(before) * sum(batches.values())
    if rounds / num_rounds > most:
        return None
    end = time.perf_counter() + most
    _round(engine, request, int(before[0]), 1)  # the first one takes longer, and is not counted
    total = 0.0
    try:
        for size, count in batches.items():
            left = end - time.perf_counter()
            own = _batch_rounds(engine, request, before, size, budget / len(batches), left)
            if own is None:
                return None
            total += count * own
    finally:
        runner.clear()
    return total


def _batch_rounds(
    engine: Engine, request: Request, before: np.ndarray, size: int, budget: float, most: float
) -> float | None:
    """Seconds of all rounds of a batch of `size` images, some of which are timed; None if that takes too long.

    Args:
        before: committed tokens before each round.
        budget, most: seconds that timing should take, and may take.
    """
    seq_len = engine.runners[str(request.family)].seq_len
    # the first round tells how many may be timed
    begun = time.perf_counter()
    chosen = _chosen_rounds(before, seq_len, min(FEWEST, len(before)))
    first = next(iter(chosen))
    needed = _round(engine, request, first, size)
    if len(chosen) * needed > most:
        return None
    left = begun + budget - time.perf_counter()
    affordable = int(left / needed)
    if affordable > len(chosen):
        chosen = _chosen_rounds(before, seq_len, min(affordable, ROUNDS, len(before)))

    times: dict[int, list[float]] = {known: [] for known in chosen}
    if engine.device.type == "cpu":
        if first in times:
            times[first].append(needed)
    else:
        # on a GPU the first run of each may capture graphs or choose kernels: it is not counted
        for known in chosen:
            needed = _round(engine, request, known, size)
            if time.perf_counter() - begun + len(chosen) * needed > most:
                return None
    # each pass times every chosen round once more, while there is time for it
    for repeat in range(1, 1 + PASSES):
        start = time.perf_counter()
        for known, own in times.items():
            if len(own) < repeat:
                own.append(_round(engine, request, known, size))
        now = time.perf_counter()
        next_end = now + (now - start)
        if next_end > begun + budget:
            break
    total = 0.0
    for known, own in times.items():
        total += chosen[known] * statistics.median(own)
    return total


def _chosen_rounds(before: np.ndarray, seq_len: int, num: int) -> dict[int, int]:
    """The `num` rounds that are timed, by their committed tokens, and how many rounds each represents.

    Rounds differ in the tokens that are committed before them, and in the tokens that they commit. So the rounds of an
    image are split into `num` parts. Each part is represented by the round that commits nearly the mean number of
    tokens and, among equals, is nearest to the middle.
    """
    committed = np.diff(before, append=seq_len)
    chosen = {}
    rounds = np.arange(len(before))
    for part in np.array_split(rounds, num):
        own = committed[part]
        from_mean = np.abs(own - own.mean())
        from_middle = np.abs(part - part.mean())
        ranked = np.lexsort((from_middle, from_mean))  # the last key is the first criterion
        best = part[ranked[0]]
        chosen[int(before[best])] = len(part)
    return chosen


def _round(engine: Engine, request: Request, known: int, size: int) -> float:
    """Seconds of a round of `size` sequences with `known` committed tokens."""
    batch = batch_at(engine, request, known, size)
    return seconds_of(batch.round, engine.device)
