"""Plans: the fastest combination of approximations whose prices add up to a budget."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cspd.heads.calibration import Price, check_arrays
from cspd.heads.chain import is_full_call
from cspd.request import Request

# Each approximation has a price, and each part of a round takes some seconds. A plan chooses the rounds, those that
# refresh the cached backbone, and the head calls: a knapsack over iterations, solved by shortest paths at many exchange
# rates of nats and seconds.

LAZY: tuple[dict[str, object], ...] = (  # settings of the cached backbone's lazy evaluations
    {"retain": 1.0, "select": "change", "kept": "half"},
    {"retain": 0.5, "select": "change", "kept": "half"},
    {"retain": 0.0, "select": "change", "kept": "half"},
    {"retain": 0.5, "select": "attention", "kept": "half"},
    {"retain": 0.0, "select": "attention", "kept": "half"},
)
JOINED = 16  # iterations that may be drawn together with the one before them

EXACT_BACKBONE: dict[str, object] = {"backbone": "full"}
EXACT_HEAD: dict[str, object] = {"denoiser": "speculative"}
EXACT = EXACT_BACKBONE | EXACT_HEAD

WEIGHTS = np.concatenate([[0.0], np.logspace(-3, 4, 29)])  # a nat per token is worth so many times `ar`'s seconds
WORTH = 0.95  # of the time of the fastest exact way: an approximation must take less
LARGEST = 1e6  # seconds


@dataclass(frozen=True)
class Prices:
    """Prices in nats per token.

    Attributes:
        head_calls, null_every: int16 [H], the settings of `calibrated` that were measured.
        of_calls: float32 [H, 2], their prices and standard errors.
        anchors: int16 [A], iterations with a full evaluation.
        lazy: float32 [S, A, K], for each of `LAZY`, of the tokens of the l-th iteration after a refresh at an anchor;
            0 beyond the last iteration.
        joined: float32 [A, J], of the tokens of the l-th iteration after an anchor by its conditions, l up to `JOINED`.
        lazy_error, joined_error: float32 [S, A] and [A], standard errors of the means over the tokens after an anchor.
    """

    head_calls: np.ndarray
    null_every: np.ndarray
    of_calls: np.ndarray
    anchors: np.ndarray
    lazy: np.ndarray
    lazy_error: np.ndarray
    joined: np.ndarray
    joined_error: np.ndarray

    def check(self, num_steps: int) -> None:
        """Raises ValueError unless shapes, types and ranges are right for T = `num_steps` denoising steps."""
        num_heads, num_anchors, num_iter = self.head_calls.size, self.anchors.size, self.lazy.shape[-1]
        wanted = {
            "head_calls": (np.int16, (num_heads,), 2, num_steps),
            "null_every": (np.int16, (num_heads,), 1, np.inf),
            "of_calls": (np.float32, (num_heads, 2), 0, np.inf),
            "anchors": (np.int16, (num_anchors,), 0, num_iter),
            "lazy": (np.float32, (len(LAZY), num_anchors, num_iter), 0, np.inf),
            "lazy_error": (np.float32, (len(LAZY), num_anchors), 0, np.inf),
            "joined": (np.float32, (num_anchors, 1 + JOINED), 0, np.inf),
            "joined_error": (np.float32, (num_anchors,), 0, np.inf),
        }
        check_arrays("prices", vars(self), wanted)

    def between(self, by_lag: np.ndarray) -> np.ndarray:
        """cost[j, k], nats per token of iteration k after iteration j < k, [K, K].

        Between two anchors it is interpolated at the same distance k - j.

        Args:
            by_lag: [A, lags], of the tokens of the l-th iteration after an anchor. Longer distances cost infinitely.
        """
        num_iter, num_lags = self.lazy.shape[-1], by_lag.shape[1]
        cost = np.triu(np.full((num_iter, num_iter), np.inf), 1)
        for lag in range(1, min(num_lags, num_iter)):
            known = np.flatnonzero(self.anchors + lag < num_iter)
            starts = np.arange(num_iter - lag)
            cost[starts, starts + lag] = np.interp(starts, self.anchors[known].astype(int), by_lag[known, lag])
        return cost


def relative_error(errors: np.ndarray, by_lag: np.ndarray) -> float:
    """The usual standard error of prices [A], relative to their means over `by_lag` [A, lags]."""
    means = by_lag.sum(1) / np.maximum((by_lag > 0).sum(1), 1)
    is_known = means > 0
    return float(np.median(errors[is_known] / means[is_known])) if is_known.any() else 0.0


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the parts of a round of one batch.

    Attributes:
        iterations: those that were timed. full: seconds of the whole backbone there. lazy: of the cached one, for each
            of `LAZY`.
        rows: numbers of tokens at once. both, one: seconds of a head call, with and without the unconditional branch.
    """

    iterations: list[int]
    full: list[float]
    lazy: list[list[float]]
    rows: list[int]
    both: list[float]
    one: list[float]

    def check(self, *_: int) -> None:
        """Raises ValueError unless the lists are as `time_rounds` returns them."""
        by_iteration = np.array([self.iterations, self.full, *self.lazy], float)
        by_rows = np.array([self.rows, self.both, self.one], float)
        for values in (by_iteration, by_rows):
            if not values.size or not ((values >= 0) & (values < LARGEST)).all() or (np.diff(values[0]) <= 0).any():
                raise ValueError("these are no costs of rounds")

    def backbone(self, seconds: list[float], num_iter: int) -> np.ndarray:
        """Seconds of each iteration [K], interpolated between the timed ones."""
        return np.interp(np.arange(num_iter), self.iterations, seconds)

    def head(self, rows: np.ndarray, num_both: int, num_one: int) -> np.ndarray:
        """Seconds of chains of `rows` tokens at once, of any shape.

        Args:
            num_both, num_one: head calls with both branches, and with the conditional one only.
        """
        both, one = (np.interp(rows, self.rows, seconds) for seconds in (self.both, self.one))
        return num_both * both + num_one * one


class Plan(NamedTuple):
    """How images are made: settings of a request, and what is predicted of them.

    Attributes:
        settings: of the axes and their options. price: of the whole on other images, or before that the sum of the
            prices of its parts; 0 if it is exact.
        speedup: of its rounds over those of `ar`; None if nothing was timed.
    """

    settings: dict[str, object]
    price: Price
    speedup: float | None


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


class RoundPlan(NamedTuple):
    """Iterations that begin a round; nats per token of those that are drawn with them; seconds of the head."""

    starts: tuple[int, ...]
    nats: float
    head_seconds: float


def plan_rounds(
    cost: np.ndarray, counts: np.ndarray, backbone: np.ndarray, head: np.ndarray, weight: float
) -> RoundPlan:
    """The best rounds if a nat per token is worth `weight` seconds.

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
    return RoundPlan(starts, float(nats[steps].sum()), float(head[steps].sum()))


class RefreshPlan(NamedTuple):
    """Rounds that evaluate the whole transformer; nats per token of the others; seconds of the backbone."""

    refreshes: tuple[int, ...]
    nats: float
    seconds: float


def plan_refreshes(
    cost: np.ndarray, counts: np.ndarray, full: np.ndarray, lazy: np.ndarray, weight: float
) -> RefreshPlan:
    """The best rounds for full evaluations if a nat per token is worth `weight` seconds; all others are lazy.

    Args:
        cost: [R, R], nats per token of round k after a refresh at round j. counts: tokens of each round [R].
        full, lazy: seconds of both kinds of evaluation in each round [R].
    """
    nats = between(cost * counts / counts.sum())
    seconds = full[:, None] + between(np.broadcast_to(lazy, (len(lazy), len(lazy))))
    refreshes = shortest(seconds + weight * nats)
    steps = steps_of(refreshes, len(counts))
    return RefreshPlan(refreshes, float(nats[steps].sum()), float(seconds[steps].sum()))


class Sampler(NamedTuple):
    """How tokens are drawn: settings, price, and seconds [K, K + 1] for the tokens of iterations i .. j - 1 at once."""

    settings: dict[str, object]
    price: Price
    seconds: np.ndarray


def samplers(prices: Prices, costs: RoundCosts, rows: np.ndarray, num_steps: int) -> list[Sampler]:
    """The full chain, and the head calls that are not both dearer and slower than others.

    Args:
        rows: [K, K + 1], tokens of iterations i .. j - 1 of all images.
    """
    found = [Sampler(EXACT_HEAD, Price(0.0, 0.0), costs.head(rows, num_steps, 0))]
    for number, null_every, (nats, error) in zip(prices.head_calls, prices.null_every, prices.of_calls.tolist()):
        num_full = sum(is_full_call(i, number, null_every) for i in range(number))
        settings = {
            "denoiser": "calibrated",
            "head_calls": int(number),
            "null_every": int(null_every),
            "corrected": False,
        }
        found.append(Sampler(settings, Price(nats, error), costs.head(rows, num_full, number - num_full)))
    return [
        own
        for own in found
        if not any(other.price < own.price and (other.seconds <= own.seconds).all() for other in found)
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
        sampler: of the tokens. starts: iterations that begin a round. refreshes: numbers of the rounds that evaluate
            the whole transformer. lazy: settings of the others. price: sum of the prices of these parts.
        seconds: of all rounds.
    """

    sampler: Sampler
    starts: tuple[int, ...]
    refreshes: tuple[int, ...]
    lazy: dict[str, object]
    price: Price
    seconds: float

    def settings(self, num_iter: int) -> dict[str, object]:
        """As a request of K = `num_iter` iterations has them."""
        chosen: dict[str, object] = dict(EXACT_BACKBONE)
        if len(self.refreshes) < len(self.starts):
            chosen = {"backbone": "cached", "refreshes": listed(self.refreshes), **self.lazy}
        if len(self.starts) < num_iter:
            chosen["rounds"] = listed(self.starts)
        return chosen | self.sampler.settings


def combinations(
    request: Request, prices: Prices, costs: RoundCosts, counts: np.ndarray, num_slots: int, plain: float
) -> Iterator[Combination]:
    """The best rounds, refreshes and head calls at each exchange rate of nats and seconds; arguments as in `best_plan`.

    The rounds are chosen first, then which of them refresh the cache. What exceeds the budget already is left out.

    Args:
        plain: seconds of `ar`, which set the exchange rates.
    """
    num_iter = len(counts)
    full = costs.backbone(costs.full, num_iter)
    lazy = [np.minimum(costs.backbone(seconds, num_iter), full) for seconds in costs.lazy]
    rows = num_slots * (counts[:, None] + between(np.broadcast_to(counts, (num_iter, num_iter))))
    joining, after = prices.between(prices.joined), [prices.between(each) for each in prices.lazy]
    joining_error = relative_error(prices.joined_error, prices.joined)
    lazy_error = [relative_error(*pair) for pair in zip(prices.lazy_error, prices.lazy)]

    @functools.cache  # samplers may share their rounds
    def refresh_plan(starts: tuple[int, ...], which: int, weight: float) -> RefreshPlan:
        chosen = np.array(starts)
        tokens = np.add.reduceat(counts, chosen)
        return plan_refreshes(after[which][np.ix_(chosen, chosen)], tokens, full[chosen], lazy[which][chosen], weight)

    for sampler in samplers(prices, costs, rows, request.num_sampling_steps):
        for weight in WEIGHTS * plain:
            starts, joined_nats, of_head = plan_rounds(joining, counts, np.min(lazy, axis=0), sampler.seconds, weight)
            price = sampler.price + Price(joined_nats, joined_nats * joining_error)
            if price.divergence > request.budget:
                continue
            for which, settings in enumerate(LAZY):
                refreshes, nats, seconds = refresh_plan(starts, which, weight)
                total = price + Price(nats, nats * lazy_error[which])
                yield Combination(sampler, starts, refreshes, settings, total, seconds + of_head)


def best_plan(
    request: Request, prices: Prices, costs: RoundCosts, counts: np.ndarray, num_slots: int, exact_head: float
) -> Plan:
    """The fastest combination of rounds, refreshes and head calls whose prices add up to at most `request.budget`.

    Args:
        request: checked. counts: tokens of an image in each iteration [K]. num_slots: images at once.
        exact_head: seconds of the head by the fastest exact way.
    """
    full = costs.backbone(costs.full, len(counts)).sum()
    plain = full + costs.head(counts * num_slots, request.num_sampling_steps, 0).sum()
    exact = full + exact_head
    fastest, least = None, WORTH * exact
    for each in combinations(request, prices, costs, counts, num_slots, plain):
        if each.price.divergence <= request.budget and each.seconds < least:
            fastest, least = each, each.seconds
    if fastest is None:
        return Plan(EXACT, Price(0.0, 0.0), plain / exact)
    return Plan(fastest.settings(len(counts)), fastest.price, plain / least)
