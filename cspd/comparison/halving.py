"""Which of several configurations are worth more images: Pareto fronts, and successive halving by them.

Successive halving: Jamieson & Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization, arXiv
1502.07943. All are tried on few images, the better part of them on more, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cspd.comparison.jackknife import LEAST_INTERVAL

FEWEST = LEAST_INTERVAL  # images of the first rung
GROWTH = 3  # a rung has so many times the images of the one before, and one in so many of its candidates
LEAST_KEPT = 4
WORTH = 1.05  # times as fast as plain sampling: below that, it may be the machine
REACH = 2.0  # standard errors that a value may be better than it was measured


@dataclass(frozen=True)
class Trial:
    """A candidate as it was measured.

    Attributes:
        speed: images per second. excess: how much worse it is than it may be; 0 or less is good enough.
        error: standard error of that.
    """

    speed: float
    excess: float
    error: float = 0.0


def rungs(num: int) -> list[int]:
    """How many images each rung has, rising to `num`: 20, 60, 180. More images later go on from the same rungs."""
    numbers, rung = [], FEWEST
    while 2 * rung <= num:
        numbers.append(rung)
        rung *= GROWTH
    return [*numbers, num]


def kept(number: int) -> int:
    """How many candidates of a rung go on to the next."""
    return min(number, max(LEAST_KEPT, -(-number // GROWTH)))


def planned(number: int, rung_images: Sequence[int], always: int, before: int = 0) -> int:
    """Images that these rungs make, of so many candidates and of `always` configurations that stay to the end.

    `before`: those that each of them has already.
    """
    images = 0
    for rung in rung_images:
        images += (number + always) * (rung - before)
        number, before = kept(number), rung
    return images


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether one is nowhere worse than the other, and somewhere better; less is better."""
    pairs = list(zip(one, other))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def layers(points: Sequence[Sequence[float]]) -> list[int]:
    """The Pareto front that each point is on: 0 the first, 1 the front of what remains without that, and so on."""
    layer = [-1] * len(points)
    level = 0
    while -1 in layer:
        left = [i for i in range(len(points)) if layer[i] == -1]
        for i in left:
            if not any(dominates(points[other], points[i]) for other in left):
                layer[i] = level
        level += 1
    return layer


def survivors(trials: Sequence[Trial], number: int) -> list[int]:
    """The `number` candidates that deserve more images, in their order.

    Before all others come those that may be good enough, by `REACH` standard errors. Among equals in that, the front
    of speed and excess comes first, then the next front; within a front, the faster. An excess counts as a standard
    error less than it was measured, so that chance at few images ends no candidate early.
    """
    fronts = layers([(-trial.speed, trial.excess - trial.error) for trial in trials])

    def rank(i: int) -> tuple:
        trial = trials[i]
        return trial.excess - REACH * trial.error > 0, fronts[i], -trial.speed

    return sorted(sorted(range(len(trials)), key=rank)[:number])


def fastest(trials: Sequence[Trial]) -> int | None:
    """The fastest that is good enough as measured, and worth it against the first; None where there is none."""
    good = [i for i in _faster(trials) if trials[i].excess <= 0]
    return max(good, key=lambda i: trials[i].speed, default=None)


def nearest(trials: Sequence[Trial]) -> int | None:
    """The one that is least short of good enough, of those that are worth it against the first if there are any."""
    return min(_faster(trials) or range(1, len(trials)), key=lambda i: trials[i].excess, default=None)


def _faster(trials: Sequence[Trial]) -> list[int]:
    return [i for i, trial in enumerate(trials) if trial.speed > WORTH * trials[0].speed]
