"""95 % intervals of what few images measure; none goes beyond what its quantity can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

NORMAL = NormalDist().inv_cdf(0.975)  # standard errors in half of a 95 % interval
RANGES = {
    "fid": (0.0, math.inf),
    "inception_score": (1.0, math.inf),
    "clip_score": (0.0, 100.0),
    "clip_difference": (-100.0, 100.0),
    "bound": (0.0, 1.0),
    "audit": (0.0, math.inf),
}


def around(name: str, value: float, error: float) -> list[float]:
    """[least, most] of a value of a name in `RANGES`, by its standard error."""
    low, high = RANGES[name]
    return [min(max(end, low), high) for end in (value - NORMAL * error, value + NORMAL * error)]


def wilson(share: float, num: int) -> list[float]:
    """[least, most] of the probability that a share of `num` trials estimates.

    Wilson, Probable Inference, the Law of Succession, and Statistical Inference (1927): all probabilities from which
    the share is at most `NORMAL` of their own standard errors away. 8 of 8 is no certainty by it.
    """
    weight = NORMAL**2 / num
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(share * (1 - share) * weight + (weight / 2) ** 2) / (1 + weight)
    return [min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))]  # in spite of rounding


def half_of(interval: Sequence[float]) -> float:
    """Half of an interval's length."""
    low, high = interval
    return (high - low) / 2
