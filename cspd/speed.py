"""How fast a run was, against baseline sampling: a few of baseline sampling's rounds, timed in the same process.

Machines are noisy, so no older measurement will do. The rounds are of as many sequences at once as the run had, over
the same models, at a few places of an image; decoding and all else are taken to last as long as they did in the run.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from cspd.device import seconds_of
from cspd.engine import Engine
from cspd.heads import calibrated
from cspd.heads.calibrated import HEAD_CALLS
from cspd.masked.orders import timetable
from cspd.method import guarantee_of, method_of, plain_of
from cspd.request import Request, RoundStats, Sequence, Stopwatch
from cspd.runs import WORTH
from cspd.terminal import shortened, telling

SHARE, MOST = 0.1, 5.0  # of a run's seconds, that timing may take, and so many at most
LEAST, SLACK = 0.5, 1.5  # seconds that the fewest rounds may take in any case; or this many times the above
PLACES, FEWEST = 5, 2  # of an image where rounds are timed
PASSES = 20  # of all places, at most


@dataclass
class Batch:
    """Sequences in the slots of an engine.

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
        request = self.sequences[0].request
        runner = self.engine.runners[str(request.family)]
        finished = method_of(request).run_round(runner, self.sequences, Stopwatch(self.engine.device))
        self.sequences = [sequence for sequence in self.sequences if sequence not in finished]


def starts(request: Request, seq_len: int, num: float | None = None) -> np.ndarray:
    """Tokens known before each round of an image: by the request's timetable, or `num` more each time."""
    known = seq_len - request.num_generated(seq_len)
    if num is not None:
        return np.arange(known, seq_len, num)
    masked = timetable(request, seq_len).masked
    return np.concatenate([[known], seq_len - masked[:-1]])


def iteration_at(before: np.ndarray, known: float) -> int:
    """The first iteration, from 0, at whose start so many tokens are known, or the last."""
    return min(int(np.searchsorted(before, known)), len(before) - 1)


@torch.inference_mode()
def batch_at(engine: Engine, request: Request, known: int, num: int | None = None) -> Batch:
    """Sequences that know so many tokens, whatever these are, or those of the iteration that begins next.

    Args:
        request: resolved. num: of sequences; by default one in every slot.
    """
    runner, method, iteration = engine.runners[str(request.family)], method_of(request), 0
    if runner.family == "MAR":
        before = starts(request, runner.seq_len)
        iteration = iteration_at(before, known)
        known = int(before[iteration])
    runner.clear()
    sequences = []
    for slot in range(engine.num_slots if num is None else num):
        own = request.but(seed=slot)
        if runner.num_classes and request.label is not None:
            own = own.but(label=slot % runner.num_classes)
        sequences.append(
            Sequence(
                own,
                ticket=slot,
                slot=slot,
                key=method.round_key(own),
                uses=method.uses(own),
                stats=RoundStats(guarantee=method.guarantee_of(own)),
            )
        )
    runner.admit(sequences)
    for sequence in sequences:
        sequence.iteration, sequence.num_committed = iteration, known
    if runner.family == "VQ":
        runner.num_committed.fill_(known)
    return Batch(engine, sequences)


def against_plain(engine: Engine, request: Request, num: int, seconds: float, rounds: float) -> dict:
    """How many times as fast a run was as baseline sampling of as many images by the same settings.

    If it was no faster, and `calibrated` needs no fit for these settings, how fast that would be is timed too.

    Args:
        request: of the run, resolved. num: images that it made. seconds: that it took, and of these its `rounds`.

    Returns:
        Plain values: "speedup", None if it is not known, and then "speedup_unknown" says why;
        "plain_seconds_per_image"; "alternative", of a run that was no faster than `summary.WORTH`: "method", "speedup"
        (None if it is not known) and "difference" (None: it needs a fit), or None. Of baseline sampling itself nothing.
    """
    if request.method == "ar":
        return {}
    unknown = {"speedup": None, "plain_seconds_per_image": None, "alternative": None}
    with telling("timing a few rounds of baseline sampling"):
        try:
            return _compared(engine, request, num, seconds, rounds) or unknown | {
                "speedup_unknown": f"a few rounds of it take too long beside a run of {seconds:.1f} s"
            }
        except (RuntimeError, ValueError, FloatingPointError) as error:  # the images are there: they are not lost
            return unknown | {"speedup_unknown": f"timing it failed ({shortened(str(error))})"}


def _compared(engine: Engine, request: Request, num: int, seconds: float, rounds: float) -> dict | None:
    """What `against_plain` returns; None if timing takes too long."""
    was_plain = request.window == 0 and request.method == "speculative" and guarantee_of(request) == "exact"
    plain = rounds if was_plain else _rounds(engine, engine.check(plain_of(request)), num, seconds, rounds)
    if plain is None:
        return None
    total = seconds - rounds + plain
    found = {"speedup": total / seconds, "plain_seconds_per_image": total / num, "alternative": None}
    if found["speedup"] < WORTH and request.family == "MAR" and request.method != "calibrated":
        found["alternative"] = _alternative(engine, request, num, seconds, rounds, total)
    return found


def _alternative(
    engine: Engine, request: Request, num: int, seconds: float, rounds: float, plain: float
) -> dict | None:
    """What `calibrated` would give where a run gained nothing; `plain`: seconds that baseline sampling takes."""
    asked = engine.check(plain_of(request).but(method="calibrated"))
    if asked.num_sampling_steps <= HEAD_CALLS:
        return None
    found: dict = {"method": "calibrated", "speedup": None, "difference": None}
    at_hand = calibrated.at_hand(asked, engine.runners["MAR"])
    if at_hand is None:
        return found
    resolved, found["difference"] = at_hand
    own = _rounds(engine, resolved, num, seconds / 2, rounds)
    if own is not None:
        found["speedup"] = plain / (seconds - rounds + own)
    return found


def _rounds(engine: Engine, request: Request, num: int, seconds: float, rounds: float) -> float | None:
    """Seconds of all rounds of `num` images, an iteration or a code each; None if timing them takes too long.

    Args:
        seconds, rounds: of a run by another method, which bound how long timing may take.
    """
    full, rest = divmod(num, engine.num_slots)
    counts = {size: count for size, count in ((engine.num_slots, full), (rest, 1)) if size and count}
    runner = engine.runners[str(request.family)]
    before = starts(request, runner.seq_len, None if request.family == "MAR" else 1)
    budget = min(MOST, SHARE * seconds)
    most = max(LEAST, SLACK * budget)
    if rounds / (len(before) * sum(counts.values())) > most:  # a round, if baseline sampling's are as long as the run's
        return None
    start = time.perf_counter()
    _round(engine, request, int(before[0]), 1)  # the first one takes longer
    total = 0.0
    try:
        for size, count in counts.items():
            left = start + most - time.perf_counter()
            own = _batch_rounds(engine, request, before, size, budget / len(counts), left)
            if own is None:
                return None
            total += count * own
    finally:
        runner.clear()
    return total


def _batch_rounds(
    engine: Engine, request: Request, before: np.ndarray, size: int, budget: float, most: float
) -> float | None:
    """Seconds of all rounds of a batch of `size` images, of which some are timed; None if that takes too long.

    Args:
        before: tokens known before each round. budget, most: seconds that timing should take, and may take.
    """
    seq_len = engine.runners[str(request.family)].seq_len
    start = time.perf_counter()
    places = _places(before, seq_len, min(FEWEST, len(before)))
    first = next(iter(places))
    needed = _round(engine, request, first, size)
    if len(places) * needed > most:
        return None
    affordable = int((start + budget - time.perf_counter()) / needed)
    if affordable > len(places):
        places = _places(before, seq_len, min(affordable, PLACES, len(before)))
    times: dict[int, list[float]] = {known: [] for known in places}
    if engine.device.type == "cpu":
        times.get(first, []).append(needed)
    else:  # where each place may have graphs to capture, or kernels to choose
        for known in places:
            needed = _round(engine, request, known, size)
            if time.perf_counter() - start + len(places) * needed > most:
                return None
    for repeat in range(1, 1 + PASSES):
        begun = time.perf_counter()
        for known, own in times.items():
            if len(own) < repeat:
                own.append(_round(engine, request, known, size))
        now = time.perf_counter()
        if now + (now - begun) > start + budget:  # another pass would take too long
            break
    return sum(places[known] * statistics.median(own) for known, own in times.items())


def _places(before: np.ndarray, seq_len: int, num: int) -> dict[int, int]:
    """Where rounds are timed, by tokens known, and how many rounds each stands for.

    Rounds differ in how many tokens are known, and in how many they make. So the rounds of an image are split into
    parts, and each part is stood for by the one that makes nearly as many as the mean, and is nearest to the middle.
    """
    made = np.diff(before, append=seq_len)
    places = {}
    for part in np.array_split(np.arange(len(before)), num):
        from_mean, from_middle = (np.abs(each - each.mean()) for each in (made[part], part))
        best = part[np.lexsort((from_middle, from_mean))[0]]
        places[int(before[best])] = len(part)
    return places


def _round(engine: Engine, request: Request, known: int, size: int) -> float:
    """Seconds of a round of a batch that knows so many tokens."""
    return seconds_of(batch_at(engine, request, known, size).round, engine.device)
