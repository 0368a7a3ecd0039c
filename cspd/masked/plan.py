"""Plans: the fastest combination of approximations whose prices add up to a budget."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cspd.heads.calibration import Price, check_arrays
from cspd.heads.chain import is_full_call
from cspd.request import Request
from cspd.tuner import Times

# Each approximation has a price, and each part of a round takes some seconds. A plan chooses the rounds, those that
# refresh the cached backbone, and the head calls: a knapsack over iterations, solved by shortest paths at many exchange
# rates of nats and seconds.

LAZY: tuple[dict[str, object], ...] = (  # settings of the cached backbone's lazy evaluations: most and least work
    {"retain": 1.0, "select": "change", "kept": "half"},
    {"retain": 0.0, "select": "change", "kept": "half"},
)
JOINED = 16  # iterations that may be drawn together with the one before them

EXACT_BACKBONE: dict[str, object] = {"backbone": "full"}
EXACT_HEAD: dict[str, object] = {"denoiser": "speculative"}
EXACT = EXACT_BACKBONE | EXACT_HEAD

WEIGHTS = np.concatenate([[0.0], np.logspace(-3, 4, 29)])  # a nat per token is worth so many times `ar`'s seconds
WORTH = 0.95  # of the time of the fastest exact way: an approximation must take less


@dataclass(frozen=True)
class Prices:
    """Prices in nats per token.

    The price of a token of iteration k by what was evaluated at iteration j < k is a factor of j times a factor of its
    lag, k - j (see `factors`).

    Attributes:
        head_calls, null_every: int16 [H], the settings of `calibrated` that were measured.
        of_calls: float32 [H, 2], their prices and standard errors.
        anchors: int16 [A], the iterations j that were measured.
        lazy_anchor, lazy_lag: float32 [S, A] and [S, K], the factors for each of `LAZY`, if the whole transformer was
            evaluated at j.
        joined_anchor, joined_lag: float32 [A] and [1 + J], the factors if a token is drawn by the conditions of
            iteration j, for lags up to J = `JOINED`.
    """

    head_calls: np.ndarray
    null_every: np.ndarray
    of_calls: np.ndarray
    anchors: np.ndarray
    lazy_anchor: np.ndarray
    lazy_lag: np.ndarray
    joined_anchor: np.ndarray
    joined_lag: np.ndarray

    def check(self, num_steps: int) -> None:
        """Raises ValueError unless shapes, types and ranges are right for T = `num_steps` denoising steps."""
        num_heads, num_anchors, num_iter = self.head_calls.size, self.anchors.size, self.lazy_lag.shape[-1]
        wanted = {
            "head_calls": (np.int16, (num_heads,), 2, num_steps),
            "null_every": (np.int16, (num_heads,), 1, np.inf),
            "of_calls": (np.float32, (num_heads, 2), 0, np.inf),
            "anchors": (np.int16, (num_anchors,), 0, num_iter),
            "lazy_anchor": (np.float32, (len(LAZY), num_anchors), 0, np.inf),
            "lazy_lag": (np.float32, (len(LAZY), num_iter), 0, np.inf),
            "joined_anchor": (np.float32, (num_anchors,), 0, np.inf),
            "joined_lag": (np.float32, (1 + JOINED,), 0, np.inf),
        }
        check_arrays("prices", vars(self), wanted)

    def between(self, of_anchor: np.ndarray, of_lag: np.ndarray) -> np.ndarray:
        """cost[j, k], nats per token of iteration k after iteration j < k, [K, K]; infinite for lags without a price.

        Args:
            of_anchor: [A], interpolated for the iterations between. of_lag: [lags].
        """
        iterations = np.arange(self.lazy_lag.shape[-1])
        lag = iterations - iterations[:, None]
        cost = np.interp(iterations, self.anchors, of_anchor)[:, None] * of_lag[lag.clip(0, len(of_lag) - 1)]
        return np.triu(np.where(lag < len(of_lag), cost, np.inf), 1)


FITS = 20  # of the factors; later ones change less than 1e-6 of them
TINY = 1e-12


def factors(by_lag: np.ndarray, is_measured: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The factors of anchors [A] and of lags [lags] of measured prices; those of lags rise, since staleness does.

    A measured price is the mean over the few tokens of an iteration, most of them small and some large. A plan of such
    means would choose those that came out small by chance. So each factor is fitted to many of them, by iterative
    proportional fitting (Deming and Stephan, 1940): the products have the row sums of the prices, and the column sums
    too, unless isotonic regression pools the prices of several lags.

    Args:
        by_lag: [A, lags], nats per token. is_measured: bool [A, lags]; the other prices are not read.
    """
    from scipy.optimize import isotonic_regression  # a fifth of a second, and only this needs it

    by_lag = np.where(is_measured, by_lag, 0.0)
    of_anchor = np.ones(len(by_lag))
    for _ in range(FITS):
        weights = of_anchor @ is_measured + TINY
        of_lag = isotonic_regression(by_lag.sum(0) / weights, weights=weights).x
        of_anchor = by_lag.sum(1) / (is_measured @ of_lag + TINY)
    return of_anchor, of_lag


# The times of a round's parts, see `cspd.masked.round_times`. By the iteration, from 1: "full", the whole backbone, and
# "lazy 0", "lazy 1", the cached one by each of `LAZY`. By the number of tokens at once: "both" and "one", a head call
# with and without the unconditional branch.


def backbone_seconds(times: Times, work: str, num_iter: int) -> np.ndarray:
    """Seconds of the backbone in each iteration [K]."""
    return times.seconds(work, 1 + np.arange(num_iter))


def chain_seconds(times: Times, rows: np.ndarray, num_both: int, num_one: int) -> np.ndarray:
    """Seconds of chains of `rows` tokens at once, of any shape.

    Args:
        num_both, num_one: head calls with both branches, and with the conditional one only.
    """
    return num_both * times.seconds("both", rows) + num_one * times.seconds("one", rows)


class BudgetPlan(NamedTuple):
    """How images are made: settings of a request, and what is predicted of them.

    Attributes:
        settings: of the axes and their options. price: of the whole on other images; before that the sum of the prices
            of its parts, with an infinite error; 0 if it is exact.
        speedup: of its rounds over those of `ar`; None if nothing was timed.
    """

    settings: dict[str, object]
    price: Price
    speedup: float | None


def is_exact(request: Request) -> bool:
    """Whether a resolved request has the settings of an exact plan."""
    return request.rounds is None and all(getattr(request, name) == value for name, value in EXACT.items())


def shortest(costs: np.ndarray) -> tuple[int, ...]:
    """The stops of the cheapest path from 0 to N; costs[i, j] of a step from i to j > i: [N, N + 1]."""
    num_stops = len(costs)
    best = np.zeros(num_stops + 1)
    came_from = np.zeros(num_stops + 1, int)
    for j in range(1, num_stops + 1):
        totals = best[:j] + costs[:j, j]
        came_from[j] = totals.argmin()
        best[j] = totals[came_from[j]]
    path = [int(came_from[num_stops])]
    while path[-1] != 0:
        path.append(int(came_from[path[-1]]))
    return tuple(reversed(path))


def between(values: np.ndarray) -> np.ndarray:
    """sums[i, j] of values[i, k] over i < k < j: [N, N + 1], from [N, N]."""
    return np.concatenate([np.zeros((len(values), 1)), np.cumsum(np.triu(values, 1), axis=1)], axis=1)


def steps_of(stops: Several[int], end: int) -> tuple[np.ndarray, np.ndarray]:
    """The steps of a path as indices (i, j)."""
    return np.array(stops), np.array([*stops[1:], end])


class Stops(NamedTuple):
    """Iterations, or rounds, that something is evaluated at; nats per token of the others; seconds."""

    at: tuple[int, ...]
    nats: float
    seconds: float


def plan_rounds(cost: np.ndarray, counts: np.ndarray, backbone: np.ndarray, head: np.ndarray, weight: float) -> Stops:
    """The best iterations to begin a round at if a nat per token is worth `weight` seconds, and seconds of the head.

    Args:
        cost: [K, K], nats per token of iteration k by the conditions of iteration j. counts: tokens of each iteration
            [K]. backbone: seconds of an evaluation at each iteration [K]. head: [K, K + 1], seconds of the head for the
            tokens of iterations i .. j - 1 at once.
    """
    nats = between(cost * counts / counts.sum())
    with np.errstate(invalid="ignore"):
        worth = np.where(np.isinf(nats), np.inf, weight * nats)
    starts = shortest(backbone[:, None] + head + worth)
    steps = steps_of(starts, len(counts))
    return Stops(starts, float(nats[steps].sum()), float(head[steps].sum()))


def plan_refreshes(cost: np.ndarray, counts: np.ndarray, full: np.ndarray, lazy: np.ndarray, weight: float) -> Stops:
    """The best rounds for full evaluations if a nat per token is worth `weight` seconds, and seconds of the backbone.

    Args:
        cost: [R, R], nats per token of round k after a refresh at round j. counts: tokens of each round [R].
        full, lazy: seconds of both kinds of evaluation in each round [R].
    """
    nats = between(cost * counts / counts.sum())
    seconds = full[:, None] + between(np.broadcast_to(lazy, (len(lazy), len(lazy))))
    refreshes = shortest(seconds + weight * nats)
    steps = steps_of(refreshes, len(counts))
    return Stops(refreshes, float(nats[steps].sum()), float(seconds[steps].sum()))


class Drawing(NamedTuple):
    """How tokens are drawn.

    Attributes:
        settings: of a request. nats: price per token. seconds: [K, K + 1], for the tokens of iterations i .. j - 1.
    """

    settings: dict[str, object]
    nats: float
    seconds: np.ndarray


def drawings(prices: Prices, times: Times, rows: np.ndarray, num_steps: int) -> list[Drawing]:
    """The full chain, and the head calls that are not both dearer and slower than others.

    Args:
        rows: [K, K + 1], tokens of iterations i .. j - 1 of all images.
    """
    found = [Drawing(EXACT_HEAD, 0.0, chain_seconds(times, rows, num_steps, 0))]
    for number, null_every, (nats, _) in zip(prices.head_calls, prices.null_every, prices.of_calls.tolist()):
        num_full = sum(is_full_call(i, number, null_every) for i in range(number))
        settings = {
            "denoiser": "calibrated",
            "head_calls": int(number),
            "null_every": int(null_every),
            "corrected": False,
        }
        found.append(Drawing(settings, nats, chain_seconds(times, rows, num_full, number - num_full)))
    return [
        own
        for own in found
        if not any(other.nats < own.nats and (other.seconds <= own.seconds).all() for other in found)
    ]


def listed(iterations: Several[int]) -> str:
    """Iterations as the option `refreshes` has them: "0-4,9"."""
    spans: list[list[int]] = []
    for iteration in sorted(set(iterations)):
        if spans and spans[-1][-1] == iteration - 1:
            spans[-1][1:] = [iteration]
        else:
            spans.append([iteration])
    return ",".join("-".join(map(str, span)) for span in spans)


class Combination(NamedTuple):
    """One way to make images.

    Attributes:
        drawing: of the tokens. starts: iterations that begin a round. refreshes: numbers of the rounds that evaluate
            the whole transformer. lazy: settings of the others. nats: sum of the prices of these parts, per token.
        seconds: of all rounds.
    """

    drawing: Drawing
    starts: tuple[int, ...]
    refreshes: tuple[int, ...]
    lazy: dict[str, object]
    nats: float
    seconds: float

    def settings(self, num_iter: int) -> dict[str, object]:
        """As a request of K = `num_iter` iterations has them."""
        chosen: dict[str, object] = dict(EXACT_BACKBONE)
        if len(self.refreshes) < len(self.starts):
            chosen = {"backbone": "cached", "refreshes": listed(self.refreshes), **self.lazy}
        if len(self.starts) < num_iter:
            chosen["rounds"] = listed(self.starts)
        return chosen | self.drawing.settings


def combinations(
    request: Request, prices: Prices, times: Times, counts: np.ndarray, num_slots: int, plain: float
) -> Iterator[Combination]:
    """The best rounds, refreshes and head calls at each exchange rate of nats and seconds; arguments as in `best_plan`.

    The rounds are chosen first, then which of them refresh the cache. What exceeds the budget already is left out.

    Args:
        plain: seconds of `ar`, which set the exchange rates.
    """
    num_iter = len(counts)
    full = backbone_seconds(times, "full", num_iter)
    lazy = [np.minimum(backbone_seconds(times, f"lazy {i}", num_iter), full) for i in range(len(LAZY))]
    rows = num_slots * (counts[:, None] + between(np.broadcast_to(counts, (num_iter, num_iter))))
    joining = prices.between(prices.joined_anchor, prices.joined_lag)
    after = [prices.between(*pair) for pair in zip(prices.lazy_anchor, prices.lazy_lag)]

    @functools.cache  # drawings may share their rounds
    def refresh_plan(starts: tuple[int, ...], which: int, weight: float) -> Stops:
        chosen = np.array(starts)
        tokens = np.add.reduceat(counts, chosen)
        return plan_refreshes(after[which][np.ix_(chosen, chosen)], tokens, full[chosen], lazy[which][chosen], weight)

    for drawing in drawings(prices, times, rows, request.num_sampling_steps):
        for weight in WEIGHTS * plain:
            starts, joined_nats, of_head = plan_rounds(joining, counts, np.min(lazy, axis=0), drawing.seconds, weight)
            if drawing.nats + joined_nats > request.budget:
                continue
            for which, settings in enumerate(LAZY):
                refreshes, lazy_nats, seconds = refresh_plan(starts, which, weight)
                total = drawing.nats + joined_nats + lazy_nats
                yield Combination(drawing, starts, refreshes, settings, total, seconds + of_head)


def best_plan(
    request: Request, prices: Prices, times: Times, counts: np.ndarray, num_slots: int, exact_head: float
) -> BudgetPlan:
    """The fastest combination of rounds, refreshes and head calls whose prices add up to at most `request.budget`.

    Args:
        request: checked. counts: tokens of an image in each iteration [K]. num_slots: images at once.
        exact_head: seconds of the head by the fastest exact way.
    """
    full = backbone_seconds(times, "full", len(counts)).sum()
    plain = full + chain_seconds(times, counts * num_slots, request.num_sampling_steps, 0).sum()
    exact = full + exact_head
    fastest, least = None, WORTH * exact
    for each in combinations(request, prices, times, counts, num_slots, plain):
        if each.nats <= request.budget and each.seconds < least:
            fastest, least = each, each.seconds
    if fastest is None:
        return BudgetPlan(EXACT, Price(0.0, 0.0), plain / exact)
    return BudgetPlan(fastest.settings(len(counts)), Price(fastest.nats, math.inf), plain / least)
