"""The speed of a run relative to baseline sampling, of which a few rounds are timed between those of the run.

Machines are noisy, and busy at some times: what was timed before a run or after it would not do. The rounds have as
many sequences at once as the run has at that moment, use the same models, and are spread over the run. Decoding and
everything else outside the rounds is assumed to take as long as it does in the run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np
import torch

from cspd.device import seconds_of
from cspd.engine import Engine
from cspd.heads.calibrated import HEAD_CALLS
from cspd.masked.orders import timetable
from cspd.method import guarantee_of, method_of, plain_of
from cspd.request import Request, RoundStats, Sequence, Stopwatch
from cspd.terminal import shortened

FEWEST, USUAL, MANY = 4, 8, 30  # rounds that are timed
SHARE, MOST = 0.1, 5.0  # of the run's seconds, and seconds: what timing takes at most,
LEAST = 0.5  # but in any case these seconds for `USUAL` rounds,
SLACK = 0.25, 10.0  # and this share and these seconds for the `FEWEST`
REACH = 2.5  # standard errors on each side of a speed-up: about 95 % of the time the true one is between
NOISY = 0.25  # of a speed-up: with a larger distance to the ends of its range it says nothing


@dataclass
class RunningBatch:
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
def batch_at(engine: Engine, request: Request, known: int, num: int | None = None) -> RunningBatch:
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
    sequences = []
    shared: dict = {}
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
            shared=shared,
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
    return RunningBatch(engine, sequences)


class PlainRounds:
    """Rounds of baseline sampling that are timed between the rounds of a run.

    The rounds have slots of their own, so that no image of the run can depend on them.

    Args:
        request: of the run, resolved; its images differ in seed and class or prompt. num: images of the run.
        clock: returns seconds.

    Attributes:
        seconds: spent here, which do not belong to the run.
    """

    def __init__(
        self, engine: Engine, request: Request, num: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds = 0.0
        self._engine, self._num, self._clock = engine, num, clock
        self._request = engine.check(plain_of(request))
        runner = engine.runners[str(request.family)]
        self._before = starts(self._request, runner.seq_len, None if runner.family == "MAR" else 1)
        self._weights = round_weights(self._before, runner.seq_len)
        self._other: Engine | None = None  # with the slots of these rounds
        self._times: list[tuple[float, float]] = []  # seconds of a round for each of its sequences, and its weight
        self._fractions: dict[int, float] = {}  # of the work of each running image that is done
        self._done = 0.0  # images, with these fractions
        self._next = 0.5 / USUAL  # fraction of the run's work after which another round is timed
        self._unknown: str | None = None
        self._begun = clock()

    def __call__(self, request: Request, fraction: float, preview: object) -> None:
        """Times a round if it is time for one; for `on_progress` of `Engine.stream`."""
        # a finished image is reported again while it is decoded
        self._done += fraction - self._fractions.get(id(request), 0.0)
        self._fractions[id(request)] = fraction
        done = self._done / self._num
        if self._unknown is not None or done < self._next:
            return
        running = self._engine.scheduler.in_flight()
        if not running:
            return
        elapsed = self._clock() - self._begun - self.seconds
        predicted = elapsed / done
        # none is tried if it must take too long, even at a quarter of the seconds of one of the run
        least = predicted * len(running) / (len(self._before) * self._num) / 4
        num = num_affordable(predicted, least)
        if num >= FEWEST:
            spent = self._time(statistics.fmean(sequence.num_committed for sequence in running), len(running))
            num = num_affordable(predicted, spent)
        self._next = done + 1 / max(num, FEWEST)
        if num < FEWEST and len(self._times) < FEWEST:
            self._unknown = self._unknown or f"timing a few rounds of it takes too long for a run of {predicted:.1f} s"

    def _time(self, known: float, size: int) -> float:
        """Times a round of `size` sequences with about `known` committed tokens, and returns its seconds."""
        start = self._clock()
        iteration = iteration_at(self._before, known)
        # the first round takes longer, and on a GPU the first of each kind, which is captured
        repeats = 2 if not self._times or self._engine.device.type == "cuda" else 1
        try:
            if self._other is None:
                self._other = self._engine.with_slots(min(self._engine.num_slots, self._num))
            for _ in range(repeats):
                batch = batch_at(self._other, self._request, int(self._before[iteration]), size)
                spent = seconds_of(batch.round, self._engine.device, self._clock)
            self._times.append((spent / size, self._weights[iteration]))
        except (RuntimeError, ValueError, FloatingPointError) as error:  # the run goes on
            self._unknown = f"timing it failed ({shortened(str(error))})"
            return math.inf
        finally:
            self.seconds += self._clock() - start
        return spent

    def compared(self, seconds: float, rounds: float) -> dict:
        """The speed of the run; arguments and result as in `against_plain`."""
        if self._unknown is None and len(self._times) < FEWEST:
            self._unknown = "the run was too short to time a few rounds of it"
        if self._unknown is not None:
            return _unknown(self._unknown)
        num_rounds = self._num * len(self._before)
        return compared(self._times, num_rounds, seconds, rounds)


def num_affordable(seconds: float, cost: float) -> int:
    """The number of rounds to time in a run of `seconds`, if each costs `cost`."""
    share, most = SLACK
    usual = min(MOST, SHARE * seconds) / cost
    short = min(USUAL, LEAST / cost)
    long = min(FEWEST, min(most, share * seconds) / cost)
    return int(min(MANY, max(usual, short, long)))


def compared(times: Several[tuple[float, float]], num_rounds: int, seconds: float, rounds: float) -> dict:
    """The speed of a run relative to baseline sampling, as `against_plain` returns it.

    Args:
        times: of rounds in the order of the run, seconds for each of its sequences, and weights.
        num_rounds: of all images together. seconds, rounds: as in `against_plain`.
    """
    each, weights = np.array(times).T
    totals = num_rounds * each * weights / weights.mean()
    # everything but the rounds would have taken the same time
    plain = seconds - rounds + totals.mean()
    # neighbours differ by noise; rounds far apart also by the tokens that they commit
    deviation = (np.diff(totals) ** 2).mean() ** 0.5 / 2**0.5
    speedup = float(plain / seconds)
    reach = REACH * float(deviation / len(totals) ** 0.5 / seconds)
    if reach > NOISY * speedup:
        return _unknown("its rounds took too different times: this machine is too busy to say")
    return {"speedup": speedup, "speedup_range": [speedup - reach, speedup + reach]}


def round_weights(before: np.ndarray, seq_len: int) -> np.ndarray:
    """The weight of each round of an image, if rounds are timed at equal distances of `Sequence.fraction_done`."""
    tokens = np.diff(before, append=seq_len) / (seq_len - before[0])
    fraction = (1 / len(before) + tokens) / 2
    return 1 / (len(before) * fraction)


def _unknown(why: str) -> dict:
    return {"speedup": None, "speedup_unknown": why}


def is_plain(request: Request) -> bool:
    """Whether the rounds of a resolved request are those of baseline sampling."""
    is_off = request.method == "speculative" and request.window == 0
    return request.method == "ar" or (is_off and guarantee_of(request) == "exact")


def against_plain(request: Request, num: int, seconds: float, rounds: float, plain: PlainRounds | None) -> dict:
    """The speed of a run relative to baseline sampling of as many images with the same settings.

    Args:
        request: of the run, resolved. num: images that the run generated.
        seconds: that the run took. rounds: the part of them that its rounds took.
        plain: the rounds of baseline sampling that were timed during the run, unless the run `is_plain`.

    Returns:
        Plain values: "speedup" and "speedup_range", its ends; or "speedup": None and the reason in "speedup_unknown".
        "plain_seconds_per_image". "alternative": a method that may be faster, or None. For a run of `ar` itself {}.
    """
    if request.method == "ar":
        return {}
    if plain is None:
        found: dict = {"speedup": 1.0, "speedup_range": [1.0, 1.0]}
    else:
        found = plain.compared(seconds, rounds)
    speedup = found["speedup"]
    found["plain_seconds_per_image"] = None if speedup is None else speedup * seconds / num
    # its chains must be shorter
    may_help = request.family == "MAR" and request.num_sampling_steps > HEAD_CALLS
    found["alternative"] = "calibrated" if may_help and request.method != "calibrated" else None
    return found
