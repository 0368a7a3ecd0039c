"""The tuner: it times works on a device, once, and chooses by their seconds how requests draft."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cspd.device import Precision
from cspd.files import FileCache, of_device, remember, user_cache
from cspd.request import Request
from cspd.terminal import telling

# Timing works in turns.

FEWEST_TURNS = 2
ENOUGH = 3.0  # seconds of all turns, after which `FEWEST_TURNS` suffice: noise matters for short times most
STEADY = 0.2  # the largest unsteadiness of times that are written to files
LARGEST = 1e18  # seconds, sizes
Name = TypeVar("Name")


def in_turns(
    works: Mapping[Name, Callable[[], float]], turns: int, clock: Callable[[], float] = time.perf_counter
) -> dict[Name, list[float]]:
    """Times several works, one after the other in each turn, so that a machine that slows down slows all of them.

    Args:
        works: by name; each runs once and returns its seconds, without those of its preparation.
        turns: the most that count. One more comes before them and warms up.

    Returns:
        The seconds of each work in the turns that count: `FEWEST_TURNS` of them if the turns take long.
    """
    times: dict[Name, list[float]] = {name: [] for name in works}
    begun = clock()
    for turn in range(1 + turns):
        if turn > FEWEST_TURNS and clock() - begun > ENOUGH:
            break
        for name, work in works.items():
            seconds = work()
            if turn:
                times[name].append(seconds)
    return times


def unsteadiness(times: Iterable[Sequence[float]]) -> float:
    """How far the typical time of a work is above its shortest, as a fraction: the largest of several works.

    Other processes only ever add time. On an idle machine nearly all times of a work are as short as the shortest.
    """
    return max(statistics.median(own) / min(own) - 1 for own in times)


class Times(dict[str, np.ndarray]):
    """Typical seconds of works by their size, such as tokens at once: {work: [sizes, seconds]}, float64 [2, N] each.

    Attributes:
        unsteadiness: of the times that were measured, see `unsteadiness`; 0 if they come from a file.
    """

    unsteadiness = 0.0

    def check(self, *_: int) -> None:
        """Raises ValueError unless each work has increasing sizes, and seconds that are finite and not negative."""
        for work, curve in self.items():
            values = np.asarray(curve, float)
            if values.ndim != 2 or len(values) != 2 or not values.size:
                raise ValueError(f"the times of {work} are not a row of sizes and a row of seconds")
            if not ((values >= 0) & (values < LARGEST)).all() or (np.diff(values[0]) <= 0).any():
                raise ValueError(f"the times of {work} are not in 0..{LARGEST:g}, at sizes that increase")

    def seconds(self, work: str, size: Any) -> Any:
        """Seconds at some sizes, of any shape: linear between those that were timed, constant below the smallest and
        proportional above the largest."""
        sizes, seconds = self[work]
        return np.interp(size, sizes, seconds) * np.maximum(1.0, np.divide(size, sizes[-1]))


# The drafting configuration of a request: the one with the lowest predicted time, if it gains enough.

# Draft only if the predicted time is below this fraction of baseline sampling's. The margin covers costs that the
# predictions omit: in MAR, joins and uneven iterations took up to a quarter more time when measured.
GAIN = 0.7

DraftConfig = Mapping[str, Any]  # settings of a request: how it drafts
PLAIN: DraftConfig = {"window": 0}


class Choice(NamedTuple):
    """A drafting configuration (`PLAIN`: no drafting) and the reason for it."""

    config: DraftConfig
    why: str


def is_enough(gain: float) -> bool:
    """Whether a predicted speed-up over baseline sampling is enough to draft."""
    return gain * GAIN > 1


def choose_by_gain(config: DraftConfig, gain: float, name: str, at_best: bool = False) -> Choice:
    """The configuration if its speed-up over baseline sampling is enough, otherwise `PLAIN`.

    Args:
        name: of the configuration, for the reason. at_best: `gain` is an upper bound.
    """
    limit = "at best " if at_best else ""
    predicted = f"{name} is predicted to be {limit}{gain:.2f} times as fast"
    if is_enough(gain):
        return Choice(config, predicted)
    return Choice(PLAIN, f"{predicted}, under the {1 / GAIN:.2f} that is required")


class Tuner:
    """Knows what is fast on a device. A family's tuner also says which works it times, and how it chooses.

    Args:
        precision, compiled, graphs: how models run.

    Attributes:
        cache: of the user, with all times, and with other measurements that do not belong to a checkpoint.
    """

    def __init__(self, precision: Precision, compiled: bool = False, graphs: bool = False) -> None:
        self.device, self.precision, self.compiled, self.graphs = precision.device, precision, compiled, graphs
        self.cache = FileCache([user_cache()])
        self._choices: dict[Hashable, Choice] = {}

    def times(self, settings: Mapping, measure: Callable[[], Times], what: str, again: bool = False) -> Times:
        """The times with these settings on this device: from the cache, or measured.

        Times of a busy machine are remembered by this process, but in no file: they would slow down later runs on an
        idle one, or the other way round.

        Args:
            settings: all that the times depend on, besides how models run. what: the work, in words, printed if it
                takes long. again: measure even if there is an entry.
        """
        key = {
            **settings,
            **of_device(self.device),
            "precision": self.precision.policy,
            "compiled": self.compiled,
            "graphs": self.graphs,
        }
        found = None if again else self.cache.find(Times, key)
        if found is None:
            with telling(what):
                found = measure()
            self.cache.put(found, key, in_file=found.unsteadiness <= STEADY)
        return found

    def choice(self, request: Request, num_slots: int) -> Choice:
        """How a checked request drafts. It does not depend on other requests in flight."""
        # A choice may time this device, so one is made for all requests that differ in class or seed only.
        kind = self._kind(request, num_slots)
        if kind not in self._choices:
            remember(self._choices, kind, self._choose(request, num_slots))
        return self._choices[kind]

    def why(self, asked: Request, num_slots: int) -> str:
        """The reason for the window of a checked request, for reports."""
        if asked.window is not None:
            return "as asked for"
        choice = self._choices.get(self._kind(asked, num_slots))
        if choice is None:
            return "as in the resumed run"
        return f"nothing was drafted: {choice.why}" if choice.config == PLAIN else choice.why

    def _kind(self, request: Request, num_slots: int) -> tuple:
        """Everything that a choice depends on."""
        return request.settings_alone(), num_slots

    def _choose(self, request: Request, num_slots: int) -> Choice:
        """The choice for the first request of a kind."""
        raise NotImplementedError
