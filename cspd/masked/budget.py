"""Prices of what makes MAR faster, in nats per token, and the method `budget`: the fastest within a limit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd import noise
from cspd.device import seconds_of
from cspd.files import measured_once, of_device, remember, user_cache
from cspd.graphs import Graphs
from cspd.heads.calibrated import Predictor, drawing, is_full_call, make_segments, plan_of
from cspd.heads.calibration import TRACE_SEED, WINDOWS, Trace, check_arrays, joined, traced
from cspd.heads.chain import Rows, Schedule, full_conditions
from cspd.heads.prices import Price, of_calls, of_conditions, price_of
from cspd.masked.backbones import conditions
from cspd.masked.orders import timetable
from cspd.masked.runner import MARRunner
from cspd.option import BUDGET, MAR_OPTIONS
from cspd.request import Request, Sequence
from cspd.terminal import Advance, counting, no_advance

# Exact images are sampled once, with their chains. Whatever their later tokens are, the state of an image at iteration
# k is its first tokens in generation order. So each backbone can be evaluated at every iteration of the same images,
# and its conditions z are compared with the exact ones (`cspd.heads.prices`).
#
# A cached backbone errs more, the longer ago the whole transformer was evaluated. Its price is measured for each
# iteration k after a refresh at iteration j, for some j ("anchors").

TOKENS, MOST_IMAGES = 512, 8  # of the exact images
EVERY = 5  # of the denoising steps, one is evaluated for each token
HEAD_CALLS = (5, 6, 7, 8, 10, 12, 16, 20, 25, 32, 50)
NULL_EVERY = (1, 2, 4)
LAZY: tuple[dict[str, object], ...] = (  # settings of the cached backbone's lazy evaluations
    {"retain": 1.0, "select": "change"},
    {"retain": 0.5, "select": "change"},
    {"retain": 0.0, "select": "change"},
    {"retain": 0.5, "select": "attention"},
    {"retain": 0.0, "select": "attention"},
)
ANCHORS = 9


class Replay:
    """Images in slots of a model runner, at any of their iterations.

    Attributes:
        runner: as many slots as images. batch: one sequence for each image.
    """

    def __init__(self, runner: MARRunner, requests: Several[Request], tokens: Tensor | None = None) -> None:
        """`requests`: resolved, of one method. `tokens`: [B, L, d], of finished images."""
        self.runner = runner
        self.batch = [Sequence(request, i, slot=i, key="replay") for i, request in enumerate(requests)]
        runner.admit(self.batch)
        if tokens is not None:
            runner.tokens[: len(tokens)] = tokens.to(runner.tokens)

    @property
    def num_iter(self) -> int:
        return len(self.runner.num_masked(self.batch[0].request))

    def rows(self, iteration: int) -> Rows:
        """The rows of an iteration, from 0."""
        for sequence in self.batch:
            masked = timetable(sequence.request, self.runner.seq_len).masked
            num_masked = masked[iteration - 1] if iteration else sequence.request.num_generated(self.runner.seq_len)
            sequence.iteration = iteration
            sequence.num_committed = self.runner.seq_len - int(num_masked)
        return self.runner.next_rows(self.batch)

    def chains(self, iterations: Several[int], commit: bool = False, advance: Advance = no_advance) -> list[Trace]:
        """Exact chains of the tokens of some iterations, one trace for each. `commit`: the images take these tokens."""
        parts: list[Trace] = []
        for iteration in iterations:
            rows = self.rows(iteration)
            z = full_conditions(self.runner, self.batch, rows)
            made = traced(parts, lambda: None, self.runner, "target", rows, z)
            if commit:
                self.runner.commit(rows, made.tokens)
            advance(1 / len(iterations))
        return parts

    def conditions(self, first: int = 0, **settings: object) -> Iterator[Tensor]:
        """z [G, R, D] of the iterations from `first` on, by the cached backbone with these settings."""
        for sequence in self.batch:
            sequence.request = sequence.request.but(**settings)
        for iteration in range(first, self.num_iter):
            rows = self.rows(iteration)
            yield conditions(self.runner, self.batch, rows)


@dataclass(frozen=True)
class Prices:
    """Prices in nats per token.

    Attributes:
        head_calls, null_every: int16 [H], the settings of `calibrated` that were measured.
        of_calls: float32 [H, 2], their prices and standard errors.
        anchors: int16 [A], iterations with a full evaluation.
        lazy: float32 [S, A, K], for each of `LAZY`, of the tokens of iteration k after a refresh at an anchor; 0 before
            it. lazy_error: float32 [S, A], standard error of the mean over the tokens after an anchor.
    """

    head_calls: np.ndarray
    null_every: np.ndarray
    of_calls: np.ndarray
    anchors: np.ndarray
    lazy: np.ndarray
    lazy_error: np.ndarray

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
        }
        check_arrays("prices", vars(self), wanted)

    def after(self, which: int) -> np.ndarray:
        """cost[j, k], nats per token of iteration k after a refresh at iteration j < k, [K, K], for `LAZY[which]`.

        Between two anchors it is interpolated at the same distance k - j.
        """
        num_iter = self.lazy.shape[-1]
        cost = np.zeros((num_iter, num_iter))
        for lag in range(1, num_iter):
            known = np.flatnonzero(self.anchors + lag < num_iter)
            anchors = self.anchors[known].astype(int)
            refreshes = np.arange(num_iter - lag)
            cost[refreshes, refreshes + lag] = np.interp(refreshes, anchors, self.lazy[which, known, anchors + lag])
        return cost

    def relative_error(self, which: int) -> float:
        """The usual standard error of `lazy`, relative to it, for `LAZY[which]`."""
        num_iter = self.lazy.shape[-1]
        later = num_iter - 1 - self.anchors
        means = self.lazy[which].sum(1) / np.maximum(later, 1)
        is_known = means > 0
        return float(np.median(self.lazy_error[which][is_known] / means[is_known])) if is_known.any() else 0.0


def anchors_of(num_iter: int) -> list[int]:
    """The iterations after which staleness is measured: more of them at the beginning, where z changes faster."""
    spread = np.linspace(0, 1, ANCHORS) ** 1.5
    return np.unique(np.round(spread * max(0, num_iter - 2)).astype(int)).tolist()


def measure(replay: Replay, predictor: Predictor, s: Schedule, advance: Advance = no_advance) -> Prices:
    """Samples the exact images of a replay, and prices on them.

    Args:
        replay: of requests of `ar` with the settings of the cached backbone. predictor: of the same chains.
        s: their schedule. advance: called with each share of the work, 1 in all.
    """
    runner, num_iter = replay.runner, replay.num_iter
    head, precision = runner.target.head, runner.precision
    by_iteration = replay.chains(range(num_iter), commit=True, advance=lambda share: advance(share / 2))
    counts = [len(part.seed) for part in by_iteration]
    chains = joined(by_iteration).to(runner.device)

    calls = [number for number in HEAD_CALLS if number < len(s)] or [len(s)]
    pairs = [(number, null) for number in calls for null in (NULL_EVERY if len(chains.z) == 2 else (1,))]
    some = chains.some(len(chains.seed) // 2)
    by_calls = []
    predicted = predictor.coefficients, predictor.drift
    for number, null_every in pairs:
        steps = plan_of(predictor.skip_cost, number).steps
        nats = of_calls(head, some, some.z, s, *predicted, calls_of(steps, null_every), precision)
        by_calls.append(price_of(nats, some.seed))
        advance(0.2 / len(pairs))

    anchors = anchors_of(num_iter)
    lazy = np.zeros((len(LAZY), len(anchors), num_iter), np.float32)
    lazy_error = np.zeros(lazy.shape[:2], np.float32)
    for row, settings in enumerate(LAZY):
        for column, anchor in enumerate(anchors):
            _, *stale = replay.conditions(anchor, refreshes=str(anchor), **settings)
            if not stale:  # the anchor is the last iteration
                continue
            own = joined(by_iteration[anchor + 1 :]).to(runner.device)
            nats = of_conditions(head, own, torch.cat(stale, dim=1), s, precision, EVERY)
            means = [part.mean().item() for part in nats.split(counts[anchor + 1 :])]
            lazy[row, column, anchor + 1 :] = means
            lazy_error[row, column] = price_of(nats, own.seed).error
            advance(0.3 / (len(LAZY) * len(anchors)))
    return Prices(
        head_calls=np.array([number for number, _ in pairs], np.int16),
        null_every=np.array([null for _, null in pairs], np.int16),
        of_calls=np.array(by_calls, np.float32),
        anchors=np.array(anchors, np.int16),
        lazy=lazy,
        lazy_error=lazy_error,
    )


def calls_of(steps: Several[int], null_every: int) -> dict[int, bool]:
    """The head calls of a plan, see `of_calls`."""
    return {step: is_full_call(i, len(steps), null_every) for i, step in enumerate(steps)}


def listed(iterations: Several[int]) -> str:
    """Iterations as the option `refreshes` has them: "0-4,9"."""
    spans: list[list[int]] = []
    for iteration in sorted(set(iterations)):
        if spans and spans[-1][-1] == iteration - 1:
            spans[-1][1:] = [iteration]
        else:
            spans.append([iteration])
    return ",".join("-".join(map(str, span)) for span in spans)


def exact_requests(request: Request, seq_len: int, num_classes: int) -> list[Request]:
    """Requests of `ar` for the exact images, of other seeds and classes than those that fits are made from."""
    num_images = min(MOST_IMAGES, max(2, TOKENS // seq_len))
    common = {name: getattr(request, name) for name in ("num_iter", "cfg", "cfg_schedule", "temperature")}
    common |= {"num_sampling_steps": request.num_sampling_steps, "reuse_null": True}
    spread = max(1, num_classes // num_images)
    labels = [(1 + i * spread) % num_classes for i in range(num_images)]
    return [Request(label, TRACE_SEED * 2 + i, "ar", **common) for i, label in enumerate(labels)]


# The costs of rounds on this device.

TIMED = 6  # iterations of which the backbone is timed
REPEATS = 4
CALLS = 10  # head calls of the chains that are timed
LARGEST = 1e6  # seconds
COSTS_SCHEMA, PRICES_SCHEMA = "cspd.round_costs/1", "cspd.prices/1"


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

    def head(self, counts: np.ndarray, num_both: int, num_one: int) -> float:
        """Seconds of the chains of all iterations.

        Args:
            counts: tokens at once in each iteration [K]. num_both, num_one: head calls with both branches, and with the
                conditional one only.
        """
        both, one = (np.interp(counts, self.rows, seconds).sum() for seconds in (self.both, self.one))
        return num_both * both + num_one * one


def _timed(work: Any, device: torch.device) -> float:
    return min(seconds_of(work, device) for _ in range(REPEATS))


@torch.inference_mode()
def time_rounds(replay: Replay, predictor: Predictor) -> RoundCosts:
    """Times the backbone and head calls of a batch that fills a replay's slots, whatever its tokens are."""
    runner, num_iter = replay.runner, replay.num_iter
    request = replay.batch[0].request
    iterations = np.unique(np.linspace(min(1, num_iter - 1), num_iter - 1, TIMED).round().astype(int)).tolist()
    full = [_time_full(replay, iteration) for iteration in iterations]
    lazy = [[_time_lazy(replay, iteration, settings) for iteration in iterations] for settings in LAZY]

    counts = -np.diff(runner.num_masked(request), prepend=request.num_generated(runner.seq_len))
    sizes = np.unique([counts.min(), int(np.median(counts)), counts.max()]) * len(replay.batch)
    times = [_time_calls(runner, predictor, request, int(size)) for size in sizes]
    both, one = zip(*times)
    return RoundCosts(iterations, full, lazy, sizes.tolist(), list(both), list(one))


def _time_full(replay: Replay, iteration: int) -> float:
    rows = replay.rows(iteration)
    return _timed(lambda: full_conditions(replay.runner, replay.batch, rows), replay.runner.device)


def _time_lazy(replay: Replay, iteration: int, settings: dict) -> float:
    """Seconds of the cached backbone one iteration after a refresh; for iteration 0, of the whole one."""
    if iteration == 0:
        return _time_full(replay, iteration)
    next(replay.conditions(iteration - 1, refreshes=str(iteration - 1), **settings))
    (cached,) = (state["caches"] for state in replay.runner.round_state.values() if "caches" in state)
    committed = cached.committed.copy()
    rows = replay.rows(iteration)

    def evaluate() -> Tensor:
        cached.committed[:] = committed  # or a second evaluation would find no new tokens
        return conditions(replay.runner, replay.batch, rows)

    return _timed(evaluate, replay.runner.device)


def _time_calls(runner: MARRunner, predictor: Predictor, request: Request, size: int) -> tuple[float, float]:
    """Seconds of a head call on `size` tokens, with both branches, and with the conditional one only."""
    head, device = runner.target.head, runner.device
    s = head.schedule(request.num_sampling_steps)
    num_calls = min(CALLS, len(s))
    steps = plan_of(predictor.skip_cost, num_calls).steps
    num_branches = 2 if request.guided else 1
    z = torch.randn(num_branches, size, head.cond_dim, generator=torch.Generator().manual_seed(0)).to(device)
    ones, index = torch.ones(size, 1, device=device), torch.arange(size, device=device)
    seconds = []
    for null_every in (1, num_calls):
        segments = make_segments(steps, s, predictor, np.zeros((num_calls, 2)), null_every, device)
        draw = drawing(head, noise, segments, s, runner.precision)
        run = functools.partial(runner.graphs.run, ("timed", null_every, size), draw, z, ones, ones, index, index)
        seconds.append(_timed(run, device))
    num_full = sum(segment.is_full for segment in segments)
    if num_branches == 1 or num_full == num_calls:
        return seconds[0] / num_calls, seconds[0] / num_calls
    # all calls are complete in the first chain, `num_full` of them in the second
    both = seconds[0] / num_calls
    one = (seconds[1] - num_full * both) / (num_calls - num_full)
    return both, min(max(one, 0.0), both)


# The plan: a knapsack over iterations and head calls.

EXACT_BACKBONE: dict[str, object] = {"backbone": "full"}
EXACT_HEAD: dict[str, object] = {"denoiser": "speculative"}
EXACT = EXACT_BACKBONE | EXACT_HEAD
SHOWN = ("backbone", "refreshes", "retain", "select", "denoiser", "head_calls", "null_every", "window")  # of a plan
KEPT = (BUDGET.name, *(option.name for option in MAR_OPTIONS))  # settings that a plan depends on

WEIGHTS = np.concatenate([[0.0], np.logspace(-4, 4, 49)])  # seconds of a round's mean that a nat is worth
WORTH = 0.95  # of the time of the fastest exact way: an approximation must take less


class Plan(NamedTuple):
    """How images are made: settings of a request, and what is predicted of them.

    Attributes:
        settings: of the axes and their options. price: the sum of the prices of its parts; 0 if it is exact.
        speedup: of its rounds over those of `ar`; None if nothing was timed.
    """

    settings: dict[str, object]
    price: Price
    speedup: float | None


def refresh_plans(
    cost: np.ndarray, counts: np.ndarray, full: np.ndarray, lazy: np.ndarray
) -> Iterator[tuple[float, float, tuple[int, ...]]]:
    """The best iterations for full evaluations at each exchange rate between nats and seconds.

    A shortest path: from a full evaluation at i to the next one at j, all iterations between are lazy.

    Args:
        cost: [K, K], nats per token of iteration k after a refresh at j. counts: tokens of each iteration [K].
        full, lazy: seconds of both kinds of evaluation in each iteration [K].

    Yields:
        (nats per token, seconds, the iterations with a full evaluation), without duplicates.
    """
    num_iter = len(counts)
    nats = cost * counts / counts.sum()
    # between[i, j]: of the iterations i + 1 .. j - 1, after a refresh at i; the end counts as a refresh
    nats_between = np.concatenate([np.zeros((num_iter, 1)), np.cumsum(np.triu(nats, 1), axis=1)], axis=1)
    lazy_before = np.concatenate([[0.0], np.cumsum(lazy)])
    seconds_between = lazy_before[None, :] - lazy_before[1:, None]
    full_at = np.append(full, 0.0)
    scale = full.mean()
    seen = set()
    for weight in WEIGHTS:
        best = np.full(num_iter + 1, np.inf)
        best[0] = full_at[0]
        came_from = np.zeros(num_iter + 1, int)
        for j in range(1, num_iter + 1):
            totals = best[:j] + seconds_between[:j, j] + weight * scale * num_iter * nats_between[:j, j] + full_at[j]
            came_from[j] = totals.argmin()
            best[j] = totals[came_from[j]]
        path = [num_iter]
        while path[-1] != 0:
            path.append(int(came_from[path[-1]]))
        stops = path[::-1]
        refreshes = tuple(stops[:-1])
        if refreshes not in seen:
            seen.add(refreshes)
            pairs = list(itertools.pairwise(stops))
            total = sum(nats_between[i, j] for i, j in pairs)
            seconds = sum(seconds_between[i, j] + full_at[i] for i, j in pairs)
            yield float(total), float(seconds), refreshes


class Planner:
    """The prices of a target, the costs of its rounds on this device, and the plans that follow from them.

    Args:
        tuning: the `cspd.heads.tuning.Tuning` of the target.
    """

    def __init__(self, tuning: Any) -> None:
        self.tuning = tuning
        self.target, self.device, self.precision = tuning.target, tuning.device, tuning.precision
        self.calibrations = tuning.calibrations["target"]
        self._planned: dict[Any, Plan] = {}

    def prices(self, request: Request) -> Prices:
        """The prices for a request's guidance, temperature, T and K; measured on first use and cached."""
        own = {"schema": PRICES_SCHEMA, "num_iter": request.num_iter}
        return self.calibrations.cached(request, Prices, own, lambda: self._measure(request))

    @torch.inference_mode()
    def _measure(self, request: Request) -> Prices:
        model = self.target
        requests = exact_requests(request, model.config.seq_len, model.config.class_num)
        predictor = self.calibrations.predictor(request)
        replay = Replay(MARRunner(model, len(requests), self.device, self.precision), requests)
        s = model.head.schedule(request.num_sampling_steps)
        what = f"pricing fewer head calls and cached backbones at num_iter={request.num_iter}, for the first time"
        with counting(what, 1) as advance:
            return measure(replay, predictor, s, advance)

    def round_costs(self, request: Request, num_slots: int) -> RoundCosts:
        """The costs of rounds of `num_slots` images on this device; measured on first use and cached."""
        model = self.target
        key = {
            "schema": COSTS_SCHEMA,
            **of_device(self.device),
            "precision": self.precision.policy,
            "model": dataclasses.asdict(model.config),
            "guided": request.guided,
            "settings": [request.num_iter, request.num_generated(model.config.seq_len), num_slots],
            "compiled": self.tuning.compiled,
            "graphs": self.tuning.graphs,
        }
        return measured_once(
            RoundCosts, key, lambda: self._time(request, num_slots), "timing rounds of this device, once", user_cache()
        )

    def _time(self, request: Request, num_slots: int) -> RoundCosts:
        graphs = Graphs(self.device, self.tuning.graphs)
        runner = MARRunner(
            self.target, num_slots, self.device, self.precision, graphs=graphs, compiled=self.tuning.compiled
        )
        requests = [request.but(seed=slot, method="ar", reuse_null=True) for slot in range(num_slots)]
        return time_rounds(Replay(runner, requests), self.calibrations.predictor(request))

    def plan(self, request: Request, num_slots: int) -> Plan:
        """The fastest plan within a checked request's budget, for `num_slots` images at once."""
        kind = request.but(label=None, seed=0, known=None), request.num_generated(self.target.config.seq_len), num_slots
        if kind not in self._planned:
            remember(self._planned, kind, self._make_plan(request, num_slots))
        return self._planned[kind]

    def _make_plan(self, request: Request, num_slots: int) -> Plan:
        if request.budget == 0:
            return Plan(EXACT, Price(0.0, 0.0), None)
        masked = timetable(request, self.target.config.seq_len).masked
        counts = -np.diff(masked, prepend=request.num_generated(self.target.config.seq_len))
        costs = self.round_costs(request, num_slots)
        exact = self._exact_head(request, costs, counts, num_slots)
        return best_plan(request, self.prices(request), costs, counts, num_slots, exact)

    def _exact_head(self, request: Request, costs: RoundCosts, counts: np.ndarray, num_slots: int) -> float:
        """Seconds of the head in all iterations by the fastest exact way; counts: tokens of an image in each [K]."""
        num_steps, rows = request.num_sampling_steps, counts * num_slots
        own = request.but(budget=None, draft="calibrated")
        window = self.tuning.choice(own, num_slots).config["window"]
        if window == 0:
            return costs.head(rows, num_steps, 0)
        calls = self.calibrations.get(own).calls[WINDOWS.index(window)]
        measured = self.tuning.costs(request.guided)
        return sum(measured.head_seconds(num_steps, each, window, calls) for each in rows)


def best_plan(
    request: Request, prices: Prices, costs: RoundCosts, counts: np.ndarray, num_slots: int, exact_head: float
) -> Plan:
    """The fastest combination of head calls and a backbone whose prices add up to at most `request.budget`.

    Args:
        request: checked. counts: tokens of an image in each iteration [K]. num_slots: images at once.
        exact_head: seconds of the head by the fastest exact way.
    """
    full = costs.backbone(costs.full, len(counts))
    rows = counts * num_slots
    heads = [(Price(0.0, 0.0), exact_head, EXACT_HEAD)]
    for number, null_every, (nats, error) in zip(prices.head_calls, prices.null_every, prices.of_calls.tolist()):
        num_full = sum(is_full_call(i, number, null_every) for i in range(number))
        seconds = costs.head(rows, num_full, number - num_full)
        settings = {"denoiser": "calibrated", "head_calls": int(number), "null_every": int(null_every)}
        heads.append((Price(nats, error), seconds, settings))
    backbones = [(Price(0.0, 0.0), full.sum(), EXACT_BACKBONE)]
    for which, own in enumerate(LAZY):
        lazy = costs.backbone(costs.lazy[which], len(counts))
        relative_error = prices.relative_error(which)
        for nats, seconds, refreshes in refresh_plans(prices.after(which), counts, full, lazy):
            settings = {"backbone": "cached", "refreshes": listed(refreshes), **own}
            backbones.append((Price(nats, nats * relative_error), seconds, settings))

    best, least = None, WORTH * (full.sum() + exact_head)
    for head_price, head_seconds, head in heads:
        for backbone_price, backbone_seconds, backbone in backbones:
            price = head_price + backbone_price
            if price.divergence <= request.budget and head_seconds + backbone_seconds < least:
                least = head_seconds + backbone_seconds
                best = price, {**backbone, **head}
    plain = full.sum() + costs.head(rows, request.num_sampling_steps, 0)
    if best is None:
        return Plan(EXACT, Price(0.0, 0.0), plain / (full.sum() + exact_head))
    price, settings = best
    return Plan(settings, price, plain / least)


def explain(request: Request, runner: MARRunner) -> str:
    """What a resolved request does, and what is predicted of it, in words."""
    parts = [f"{name}={request.settings[name]}" for name in SHOWN if request.settings.get(name) is not None]
    plan = planned(request, runner)
    if plan is None:
        return f"as asked for: {', '.join(parts)}"
    predicted = f"predicted {plan.price.divergence:.3g} +- {plan.price.error:.2g} nats per token"
    faster = "" if plan.speedup is None else f", rounds {plan.speedup:.3g} times as fast as ar's"
    return f"budget {request.budget:g}: {', '.join(parts)}; {predicted}{faster}"


def planned(request: Request, runner: MARRunner) -> Plan | None:
    """The plan of a resolved request, or None if its settings are not a plan's."""
    open_settings = dict.fromkeys(name for name in request.settings if name not in KEPT)
    plan = runner.tuning.planner.plan(request.but(**open_settings), runner.num_slots)
    same = all(request.settings.get(name) == value for name, value in plan.settings.items())
    return plan if same else None


def resolve(request: Request, runner: MARRunner) -> Request:
    """A checked request with the axes and their options that the plan chooses, unless it has them."""
    if request.denoiser is not None and request.backbone is not None:
        return request
    return request.but(**runner.tuning.planner.plan(request, runner.num_slots).settings)


def check(request: Request, runner: MARRunner) -> None:
    """Raises ValueError if prices have no meaning for the request's settings, or only one axis is given."""
    if request.budget and request.temperature == 0:
        raise ValueError(f"budget={request.budget} needs temperature > 0: without noise nothing diverges")
    if (request.backbone is None) != (request.denoiser is None):
        raise ValueError("budget chooses both backbone and denoiser: give neither, or both")


# The audit of a run: a share of its own images is replayed, exactly and by the run's plan.


class Found(NamedTuple):
    """What an audit found. difference: r.m.s. of the tokens from exact ones of the same noise, in standard deviations
    of a token's channels."""

    price: Price
    difference: float


def audit(replay: Replay, of_run: Callable[[Trace, Tensor], Tensor], iterations: Several[int]) -> Found:
    """The price of what a run did, at the tokens of some iterations of finished images.

    Args:
        replay: of finished images, with the run's settings. of_run: maps (exact chains, the run's conditions) to nats
            [N].
    """
    runner = replay.runner
    chains = joined(replay.chains(iterations)).to(runner.device)
    tokens = torch.cat([runner.tokens[rows.slot, rows.position] for rows in map(replay.rows, iterations)])
    error, variance = (tokens - chains.tokens).square().mean(), runner.tokens.flatten(0, 1).var(0).mean()
    z = chains.z
    if replay.batch[0].request.backbone == "cached":
        wanted = set(iterations)
        z = torch.cat([own for k, own in enumerate(replay.conditions()) if k in wanted], dim=1)
    return Found(price_of(of_run(chains, z), chains.seed), (error / variance).sqrt().item())


@torch.inference_mode()
def audit_images(runner: MARRunner, requests: Several[Request], tokens: Tensor, share: float) -> dict[str, float]:
    """Measures the price, KL(p || q), and the difference of finished images of one plan, on their own tokens.

    Args:
        requests: resolved. tokens: [B, L, d]. share: of the iterations, 0..1; at least one is audited.

    Returns:
        "audit", "audit_error" and "audit_difference", see `measured_lines`; nothing if the requests are exact.
    """
    request = requests[0]
    if (request.backbone, request.denoiser) == (EXACT["backbone"], EXACT["denoiser"]):
        return {}
    own = MARRunner(runner.target, len(requests), runner.device, runner.precision)
    replay = Replay(own, requests, tokens)
    chosen = np.random.default_rng(request.seed).permutation(replay.num_iter)
    iterations = sorted(chosen[: max(1, round(share * replay.num_iter))].tolist())
    head, calibrations = runner.target.head, runner.tuning.calibrations["target"]
    s = head.schedule(request.num_sampling_steps)

    def of_run(chains: Trace, z: Tensor) -> Tensor:
        if request.denoiser != "calibrated":
            return of_conditions(head, chains, z, s, runner.precision)
        shortcut = calibrations.shortcut(request)
        predictor, calls = calibrations.predictor(request), calls_of(shortcut.steps.tolist(), request.null_every)
        predicted = predictor.coefficients, predictor.drift
        return of_calls(head, chains, z, s, *predicted, calls, runner.precision, shortcut.corrections)

    found = audit(replay, of_run, iterations)
    divergence, error = found.price
    measured = {"audit": divergence, "audit_error": error}
    if request.denoiser == "calibrated":  # other chains use their noise in another way
        measured["audit_difference"] = found.difference
    return measured
