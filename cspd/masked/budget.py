"""The method `budget`: measures prices and times of MAR's approximations, makes plans of them, and audits runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd import noise
from cspd.continuous.rows import Rows, full_conditions
from cspd.continuous.tuning import TRACE_SEED, head_seconds, traced
from cspd.device import seconds_of, send_integers
from cspd.files import remember
from cspd.graphs import Graphs
from cspd.heads.calibrated import Predictor, follow, make_segments, plan_of
from cspd.heads.calibration import WINDOWS, Price, Trace, joined, price_of
from cspd.heads.chain import Chain, Inputs, Schedule, is_full_call
from cspd.heads.prices import of_calls, of_conditions
from cspd.masked.backbones import conditions
from cspd.masked.orders import timetable
from cspd.masked.plan import EXACT, JOINED, LAZY, Plan, Prices, best_plan, chain_seconds, factors
from cspd.masked.runner import MARRunner
from cspd.option import BUDGET, MAR_OPTIONS
from cspd.request import Request, Sequence
from cspd.terminal import Advance, counting, no_advance
from cspd.tuner import Times, in_turns, unsteadiness

# Exact images are sampled once, with their chains. Whatever their later tokens are, the state of an image at iteration
# k is its first tokens in generation order. So each backbone can be evaluated at every iteration of the same images,
# and its conditions z are compared with the exact ones (`cspd.heads.prices`).
#
# A cached backbone errs more, the longer ago the whole transformer was evaluated. Its price is measured for each
# iteration k after a refresh at iteration j, for some j ("anchors"). The tokens of several iterations can also be drawn
# together, by the conditions z of the first: these do not know the tokens between, and their price is measured alike.

TOKENS, MOST_IMAGES = 1024, 8  # of the exact images
EVERY = 5  # of the denoising steps, one is evaluated for each token
HEAD_CALLS = (5, 6, 7, 8, 10, 12, 16, 20, 25, 32, 50)
NULL_EVERY = (1, 2, 4)
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

    def ahead(self, iteration: int, stop: int) -> Tensor:
        """z [G, R, D] of the iterations after an iteration, up to `stop`, by its state: iteration by iteration."""
        begin = self.rows(iteration)
        masked = timetable(self.batch[0].request, self.runner.seq_len).masked
        num_ahead = self.runner.seq_len - int(masked[stop - 1]) - begin.committed[0]
        rows = self.runner.rows(self.batch, begin.committed, [num_ahead] * len(self.batch))
        z = self.runner.conditions(self.batch, rows)
        later = np.flatnonzero(rows.iteration > iteration)
        by_iteration = later[np.argsort(rows.iteration[later], kind="stable")]
        return z[:, send_integers(by_iteration, self.runner.device)]

    def conditions(self, first: int = 0, **settings: object) -> Iterator[tuple[Rows, Tensor]]:
        """The rows of the rounds from `first` on, and their z [G, R, D], by the cached backbone with these settings."""
        for sequence in self.batch:
            sequence.request = sequence.request.but(**settings)
        evaluate = full_conditions if self.batch[0].request.backbone == "full" else conditions
        for number in range(first, self.num_iter):
            rows = self.rows(number)
            yield rows, evaluate(self.runner, self.batch, rows)


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
    num_iter = replay.num_iter
    by_iteration = replay.chains(range(num_iter), commit=True, advance=lambda share: advance(0.3 * share))
    anchors = anchors_of(num_iter)
    calls, prices_of_calls = _price_calls(replay.runner, joined(by_iteration), predictor, s, advance)
    lazy_anchor, lazy_lag = _price_lazy(replay, by_iteration, anchors, s, advance)
    joined_anchor, joined_lag = _price_joined(replay, by_iteration, anchors, s, advance)
    head_calls, null_every = np.array(calls, np.int16).T
    return Prices(
        head_calls=head_calls,
        null_every=null_every,
        of_calls=prices_of_calls,
        anchors=np.array(anchors, np.int16),
        lazy_anchor=lazy_anchor,
        lazy_lag=lazy_lag,
        joined_anchor=joined_anchor,
        joined_lag=joined_lag,
    )


def _price_calls(
    runner: MARRunner, chains: Trace, predictor: Predictor, s: Schedule, advance: Advance
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Pairs (head calls, null_every) [H], and their prices and standard errors [H, 2], on half of the exact chains."""
    some = chains.to(runner.device).some(len(chains.image) // 2)
    numbers = [number for number in HEAD_CALLS if number < len(s)] or [len(s)]
    pairs = list(itertools.product(numbers, NULL_EVERY if len(chains.z) == 2 else (1,)))
    predicted = predictor.coefficients, predictor.drift
    prices = []
    for number, null_every in pairs:
        calls = calls_of(plan_of(predictor.skip_cost, number).steps, null_every)
        nats = of_calls(runner.target.head, some, some.z, s, *predicted, calls, runner.precision)
        prices.append(price_of(nats, some.image))
        advance(0.25 / len(pairs))
    return pairs, np.array(prices, np.float32)


def _price_lazy(
    replay: Replay, by_iteration: Several[Trace], anchors: Several[int], s: Schedule, advance: Advance = no_advance
) -> tuple[np.ndarray, np.ndarray]:
    """`lazy_anchor` and `lazy_lag` of `Prices`."""
    prices = np.zeros((len(LAZY), len(anchors), len(by_iteration)))
    for (row, settings), (column, anchor) in itertools.product(enumerate(LAZY), enumerate(anchors)):
        later = by_iteration[anchor + 1 :]
        if later:
            _, *stale = (z for _, z in replay.conditions(anchor, refreshes=str(anchor), **settings))
            prices[row, column, 1 : 1 + len(later)] = _price_conditions(
                replay.runner, later, torch.cat(stale, dim=1), s
            )
        advance(0.4 / (len(LAZY) * len(anchors)))
    of_anchor, of_lag = zip(*(_factors(each, anchors, len(by_iteration)) for each in prices))
    return np.stack(of_anchor), np.stack(of_lag)


def _price_joined(
    replay: Replay, by_iteration: Several[Trace], anchors: Several[int], s: Schedule, advance: Advance = no_advance
) -> tuple[np.ndarray, np.ndarray]:
    """`joined_anchor` and `joined_lag` of `Prices`."""
    prices = np.zeros((len(anchors), 1 + JOINED))
    for column, anchor in enumerate(anchors):
        later = by_iteration[anchor + 1 : anchor + 1 + JOINED]
        if later:
            z = replay.ahead(anchor, anchor + 1 + len(later))
            prices[column, 1 : 1 + len(later)] = _price_conditions(replay.runner, later, z, s)
        advance(0.05 / len(anchors))
    return _factors(prices, anchors, len(by_iteration))


def _price_conditions(runner: MARRunner, later: Several[Trace], z: Tensor, s: Schedule) -> list[float]:
    """The price of other conditions z [G, R, D] at each of several iterations."""
    chains = joined(later).to(runner.device)
    nats = of_conditions(runner.target.head, chains, z, s, runner.precision, EVERY)
    return [part.mean().item() for part in nats.split([len(part.image) for part in later])]


def _factors(by_lag: np.ndarray, anchors: Several[int], num_iter: int) -> tuple[np.ndarray, np.ndarray]:
    """The factors of prices [A, lags] after anchors, as `Prices` has them."""
    is_measured = (np.array(anchors)[:, None] + np.arange(by_lag.shape[1]) < num_iter) & np.isfinite(by_lag)
    of_anchor, of_lag = factors(by_lag, is_measured)
    return of_anchor.astype(np.float32), of_lag.astype(np.float32)


def calls_of(steps: Several[int], null_every: int) -> dict[int, bool]:
    """The head calls of a plan, see `of_calls`."""
    return {step: is_full_call(i, len(steps), null_every) for i, step in enumerate(steps)}


def exact_requests(request: Request, seq_len: int, num_classes: int) -> list[Request]:
    """Requests of `ar` for the exact images, of other seeds and classes than those that fits are made from."""
    num_images = min(MOST_IMAGES, max(2, TOKENS // seq_len))
    common = {name: getattr(request, name) for name in ("num_iter", "cfg", "cfg_schedule", "temperature")}
    common |= {"num_sampling_steps": request.num_sampling_steps, "reuse_null": True}
    spread = max(1, num_classes // num_images)
    labels = [(1 + i * spread) % num_classes for i in range(num_images)]
    return [Request(label, TRACE_SEED * 2 + i, "ar", **common) for i, label in enumerate(labels)]


# The times of rounds on this device.

TIMED = 6  # iterations of which the backbone is timed
TURNS = 4
CALLS = 10  # head calls of the chains that are timed
TIMES_SCHEMA, PRICES_SCHEMA, PLAN_SCHEMA = "cspd.round-times/1", "cspd.prices/5", "cspd.plan_price/4"


@torch.inference_mode()
def time_rounds(replay: Replay, predictor: Predictor) -> Times:
    """Times the backbone and head calls of a batch that fills a replay's slots, whatever its tokens are."""
    runner, num_iter = replay.runner, replay.num_iter
    request = replay.batch[0].request
    iterations = np.unique(np.linspace(min(1, num_iter - 1), num_iter - 1, TIMED).round().astype(int)).tolist()
    counts = tokens_by_iteration(request, runner.seq_len)
    several = counts.max() * np.array([1, 4, 1 + JOINED])
    sizes = np.unique([counts.min(), *several.clip(max=counts.sum())]) * len(replay.batch)

    works: dict[tuple[str, int], Callable[[], float]] = {}
    for iteration in iterations:
        works["full", iteration] = functools.partial(_time_full, replay, iteration)
        for i, settings in enumerate(LAZY):
            works[f"lazy {i}", iteration] = functools.partial(_time_lazy, replay, iteration, settings)
    num_calls = min(CALLS, len(runner.target.head.schedule(request.num_sampling_steps)))
    for size in map(int, sizes):
        for name, null_every in (("complete", 1), ("mixed", num_calls)):
            chains = _calls(runner, predictor, request, size, null_every)
            works[name, size] = functools.partial(seconds_of, chains, runner.device)
    measured = in_turns(works, TURNS)

    seconds = {work: statistics.median(own) for work, own in measured.items()}
    num_branches = 2 if request.guided else 1
    of_calls = [
        seconds_of_calls(seconds["complete", size], seconds["mixed", size], num_calls, num_branches) for size in sizes
    ]
    times = Times({name: np.array([sizes, own]) for name, own in zip(("both", "one"), zip(*of_calls))})
    for name in ("full", *(f"lazy {i}" for i in range(len(LAZY)))):
        own = [seconds[name, iteration] for iteration in iterations]
        times[name] = np.array([1 + np.array(iterations), own])
    times.unsteadiness = unsteadiness(measured.values())
    return times


def _time_full(replay: Replay, iteration: int) -> float:
    rows = replay.rows(iteration)
    return seconds_of(lambda: full_conditions(replay.runner, replay.batch, rows), replay.runner.device)


def _time_lazy(replay: Replay, iteration: int, settings: dict) -> float:
    """Seconds of the cached backbone one iteration after a refresh; for iteration 0, of the whole one."""
    if iteration == 0:
        return _time_full(replay, iteration)
    next(replay.conditions(iteration - 1, refreshes=str(iteration - 1), **settings))
    rows = replay.rows(iteration)
    return seconds_of(lambda: conditions(replay.runner, replay.batch, rows), replay.runner.device)


def _calls(runner: MARRunner, predictor: Predictor, request: Request, size: int, null_every: int) -> Callable[[], Any]:
    """Work of chains of a few head calls on `size` tokens."""
    head, device = runner.target.head, runner.device
    s = head.schedule(request.num_sampling_steps)
    num_calls = min(CALLS, len(s))
    steps = plan_of(predictor.skip_cost, num_calls).steps
    num_branches = 2 if request.guided else 1
    z = torch.randn(num_branches, size, head.cond_dim, generator=torch.Generator().manual_seed(0)).to(device)
    ones, index = torch.ones(size, 1, device=device), torch.arange(size, device=device)
    segments = make_segments(steps, s, predictor, np.zeros((num_calls, 2)), null_every, device)
    draw = functools.partial(_draw, runner, s, segments)
    return functools.partial(runner.graphs.run, ("timed", null_every, size), draw, z, ones, ones, index, index)


def seconds_of_calls(complete: float, mixed: float, num_calls: int, num_branches: int) -> tuple[float, float]:
    """Seconds of a head call with both branches, and with the conditional one only.

    Args:
        complete, mixed: seconds of two chains of `num_calls`. In the first one all calls are complete, in the second
            one those of `is_full_call`.
    """
    num_full = sum(is_full_call(i, num_calls, num_calls) for i in range(num_calls))
    both = complete / num_calls
    if num_branches == 1 or num_full == num_calls:
        return both, both
    one = (mixed - num_full * both) / (num_calls - num_full)
    return both, min(max(one, 0.0), both)


def _draw(runner: MARRunner, s: Schedule, segments: list, *inputs: Tensor) -> Tensor:
    """Tokens by calibrated chains."""
    with runner.precision.fast():
        return follow(Chain(runner.target.head, s, Inputs(*inputs), noise, runner.precision), segments)


# The plans of requests (`cspd.masked.plan`), from prices and times that are measured on first use.

SHOWN = (
    "rounds",
    "backbone",
    "refreshes",
    "retain",
    "select",
    "denoiser",
    "head_calls",
    "null_every",
    "window",
)  # of a plan
KEPT = (BUDGET.name, *(option.name for option in MAR_OPTIONS))  # settings that a plan depends on


TRIES = 5  # plans whose price as a whole is measured; each time the parts may cost less


class ExactImages(NamedTuple):
    """Requests of `ar`, their tokens [B, L, d], and the chains of these in the order of iterations."""

    requests: list[Request]
    tokens: Tensor
    chains: Trace


class Planner:
    """The prices of a target, the times of its rounds on this device, and the plans that follow from them.

    Args:
        tuning: the `cspd.continuous.tuning.Tuning` of the target.
    """

    def __init__(self, tuning: Any) -> None:
        self.tuning = tuning
        self.target, self.device, self.precision = tuning.target, tuning.device, tuning.precision
        self.calibrations = tuning.calibrations["target"]
        self._planned: dict[Any, Plan] = {}
        self._others: tuple[dict, ExactImages] | None = None

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

    def round_times(self, request: Request, num_slots: int) -> Times:
        """The times of rounds of `num_slots` images on this device; measured on first use and cached."""
        config = self.target.config
        settings = {
            "schema": TIMES_SCHEMA,
            "model": dataclasses.asdict(config),
            "guided": request.guided,
            "settings": [request.num_iter, request.num_generated(config.seq_len), num_slots],
        }
        measure = functools.partial(self._time, request, num_slots)
        return self.tuning.times(settings, measure, "timing rounds of this device, once")

    def _time(self, request: Request, num_slots: int) -> Times:
        graphs = Graphs(self.device, self.tuning.graphs)
        runner = MARRunner(
            self.target, num_slots, self.device, self.precision, graphs=graphs, compiled=self.tuning.compiled
        )
        requests = [request.but(seed=slot, method="ar", reuse_null=True) for slot in range(num_slots)]
        return time_rounds(Replay(runner, requests), self.calibrations.predictor(request))

    def plan(self, request: Request, num_slots: int) -> Plan:
        """The fastest plan within a checked request's budget, for `num_slots` images at once."""
        kind = self._kind(request, num_slots)
        if kind not in self._planned:
            remember(self._planned, kind, self._make_plan(request, num_slots))
        return self._planned[kind]

    def made(self, request: Request) -> Plan | None:
        """The plan that chose a resolved request's settings, if it was made here, for any number of images at once."""
        own = self._kind(request, 0)[:-1]
        for kind, plan in self._planned.items():
            if kind[:-1] == own and all(request.settings.get(name) == value for name, value in plan.settings.items()):
                return plan
        return None

    def _kind(self, request: Request, num_slots: int) -> tuple:
        """Everything that a plan depends on."""
        own = {name: getattr(request, name) for name in KEPT}
        return tuple(own.items()), request.num_generated(self.target.config.seq_len), num_slots

    def _make_plan(self, request: Request, num_slots: int) -> Plan:
        if request.budget == 0:
            return Plan(EXACT, Price(0.0, 0.0), None)
        counts = tokens_by_iteration(request, self.target.config.seq_len)
        times = self.round_times(request, num_slots)
        exact = self._exact_head(request, times, counts, num_slots)
        limit = request.budget
        for _ in range(TRIES):
            plan = best_plan(request.but(budget=limit), self.prices(request), times, counts, num_slots, exact)
            if plan.settings == EXACT:
                return plan
            plan = self.priced(request, plan)
            likely = sum(plan.price)  # with its error: plans are tried on the same images, and a low estimate is chosen
            if likely <= request.budget:
                return plan
            limit *= 0.95 * request.budget / likely
        return Plan(EXACT, Price(0.0, 0.0), None)

    def priced(self, request: Request, plan: Plan) -> Plan:
        """A plan with its price as a whole, on other exact images; measured on first use and cached."""
        own = {"schema": PLAN_SCHEMA, "num_iter": request.num_iter, "plan": plan.settings}
        price = self.calibrations.cached(request, Price, own, lambda: self._measure_plan(request, plan))
        return plan._replace(price=price)

    @torch.inference_mode()
    def _measure_plan(self, request: Request, plan: Plan) -> Price:
        images = self._other_images(request)
        requests = [own.but(**{**plan.settings, "denoiser": None}) for own in images.requests]
        runner = MARRunner(self.target, len(requests), self.device, self.precision)
        z = conditions_of(Replay(runner, requests, images.tokens), range(request.num_iter))
        nats = divergence_of(self.calibrations, request.but(**plan.settings), images.chains, z)
        return price_of(nats, images.chains.image)

    def _other_images(self, request: Request) -> ExactImages:
        """Exact images that no price was measured on; the last ones are remembered."""
        config, settings = self.target.config, {name: getattr(request, name) for name in KEPT if name != BUDGET.name}
        if self._others is None or self._others[0] != settings:
            requests = exact_requests(request, config.seq_len, config.class_num)
            requests = [own.but(seed=own.seed + len(requests)) for own in requests]
            exact = Replay(MARRunner(self.target, len(requests), self.device, self.precision), requests)
            with counting("sampling exact images to price a plan on", 1) as advance:
                chains = joined(exact.chains(range(request.num_iter), commit=True, advance=advance))
            self._others = settings, ExactImages(requests, exact.runner.tokens, chains.to(self.device))
        return self._others[1]

    def _exact_head(self, request: Request, times: Times, counts: np.ndarray, num_slots: int) -> float:
        """Seconds of the head in all iterations by the fastest exact way; counts: tokens of an image in each [K]."""
        num_steps, rows = request.num_sampling_steps, counts * num_slots
        own = request.but(budget=None, draft="calibrated")
        window = self.tuning.choice(own, num_slots).config["window"]
        if window == 0:
            return chain_seconds(times, rows, num_steps, 0).sum()
        calls = self.calibrations.get(own).calls[WINDOWS.index(window)]
        of_head = self.tuning.head_times(request.guided)
        return sum(head_seconds(of_head, num_steps, each, window, calls) for each in rows)


def is_exact(request: Request) -> bool:
    """Whether a resolved request has the settings of an exact plan."""
    return request.rounds is None and all(getattr(request, name) == value for name, value in EXACT.items())


def explain(request: Request, runner: MARRunner) -> str:
    """What a resolved request does, and what is predicted of it, in words."""
    parts = [f"{name}={request.settings[name]}" for name in SHOWN if request.settings.get(name) is not None]
    plan = planned(request, runner)
    predicted = f"price {plan.price.divergence:.3g} +- {plan.price.error:.2g} nats per token"
    faster = "" if plan.speedup is None else f", rounds {plan.speedup:.3g} times as fast as ar's"
    return f"budget {request.budget:g}: {', '.join(parts)}; {predicted}{faster}"


def planned(request: Request, runner: MARRunner) -> Plan:
    """The plan of a resolved request. If its axes were given, these are the plan, and are priced on first use."""
    planner = runner.tuning.planner
    plan = planner.made(request)
    if plan is not None:
        return plan
    if is_exact(request):
        return Plan(EXACT, Price(0.0, 0.0), None)
    given = {name: value for name, value in request.settings.items() if name not in KEPT and value is not None}
    return planner.priced(request, Plan(given, Price(0.0, 0.0), None))


def resolve(request: Request, runner: MARRunner) -> Request:
    """A checked request with the axes and their options that the plan chooses, unless it has them."""
    if request.denoiser is not None and request.backbone is not None:
        return request
    return request.but(**runner.tuning.planner.plan(request, runner.at_once).settings)


def check(request: Request, runner: MARRunner) -> None:
    """Raises ValueError if prices have no meaning for the request's settings, or these contradict its budget."""
    if request.budget and request.temperature == 0:
        raise ValueError(
            f"budget={request.budget} needs temperature > 0, since without noise nothing diverges: give a temperature,"
            " or budget=0"
        )
    if getattr(request, "audit", None):
        raise ValueError("audit measures the head alone: leave it out, runs of budget audit the backbone too")
    if (request.backbone is None) != (request.denoiser is None):
        raise ValueError("budget chooses both backbone and denoiser: give neither, or both")
    if request.backbone is None and request.rounds is not None:
        raise ValueError(
            f"budget chooses rounds too: leave rounds={request.rounds!r} out, or give backbone and denoiser"
        )
    if request.budget == 0 and request.backbone is not None and not is_exact(request):
        raise ValueError(
            "budget=0 is exact, and these backbone, denoiser and rounds are not: leave them out, or budget"
        )


# The audit of a run: a share of its own images is replayed, exactly and by the run's plan.


class Found(NamedTuple):
    """What an audit found of N tokens.

    Attributes:
        nats: [N], divergences, each times its token's weight. image: int64 [N], the images' seeds.
        squares: [N], the mean over a token's channels of its square difference from an exact one of the same noise,
            times the same weight.
    """

    nats: Tensor
    image: Tensor
    squares: Tensor


def tokens_by_iteration(request: Request, seq_len: int) -> np.ndarray:
    """How many tokens of an image each iteration of a resolved request generates, [K]; joined rounds are apart."""
    return -np.diff(timetable(request.but(rounds=None), seq_len).masked, prepend=request.num_generated(seq_len))


def drawn_iterations(counts: np.ndarray, share: float, seed: int) -> tuple[list[int], np.ndarray]:
    """The iterations of a systematic sample of tokens, and the weight of each of their tokens in a mean over them.

    Args:
        counts: tokens of each iteration [K]. share: of the tokens, 0..1; at least one is drawn.
    """
    num_drawn = max(1, round(share * counts.sum()))
    places = (np.arange(num_drawn) + np.random.default_rng(seed).random()) / num_drawn * counts.sum()
    iterations, times = np.unique(np.searchsorted(counts.cumsum(), places, side="right"), return_counts=True)
    return iterations.tolist(), times / counts[iterations] * counts[iterations].sum() / num_drawn


def audit(
    exact: Replay,
    own: Replay,
    of_run: Callable[[Trace, Tensor], Tensor],
    iterations: Several[int],
    weights: np.ndarray,
) -> Found:
    """The divergences of what a run did, at the tokens of some iterations of finished images.

    Args:
        exact, own: replays of the images, without joined rounds and with the run's settings. of_run: maps (exact
            chains, the run's conditions) to nats [N]. weights: of the tokens of each iteration.
    """
    runner = exact.runner
    parts = exact.chains(iterations)
    weight = torch.tensor(np.repeat(weights, [len(part.image) for part in parts]), device=runner.device)
    chains = joined(parts).to(runner.device)
    tokens = torch.cat([runner.tokens[rows.slot, rows.position] for rows in map(exact.rows, iterations)])
    z = conditions_of(own, iterations)
    squares = (tokens - chains.tokens).square().mean(1)
    return Found(weight * of_run(chains, z), chains.image, weight * squares)


def conditions_of(own: Replay, iterations: Several[int]) -> Tensor:
    """z [G, R, D] that a replay's rounds have for the tokens of some iterations, iteration by iteration."""
    parts = []
    for rows, z in own.conditions():
        for iteration in np.intersect1d(rows.iteration, iterations):
            which = np.flatnonzero(rows.iteration == iteration)
            parts.append(z[:, send_integers(which, own.runner.device)])
    return torch.cat(parts, dim=1)


def divergence_of(calibrations: Any, request: Request, chains: Trace, z: Tensor) -> Tensor:
    """The divergence [N], nats, of a resolved request's way to draw tokens, from exact chains.

    Args:
        calibrations: of the model, see `cspd.continuous.tuning`. chains: exact, on the device. z: the run's conditions.
    """
    head, precision = calibrations.model.head, calibrations.precision
    s = head.schedule(request.num_sampling_steps)
    if request.denoiser != "calibrated":
        return of_conditions(head, chains, z, s, precision)
    steps, corrections = calibrations.plan(request, request.head_calls).steps, None
    if request.corrected is not False:
        corrections = calibrations.shortcut(request).corrections
    predictor, calls = calibrations.predictor(request), calls_of(steps, request.null_every)
    predicted = predictor.coefficients, predictor.drift
    return of_calls(head, chains, z, s, *predicted, calls, precision, corrections)


@torch.inference_mode()
def audit_images(runner: MARRunner, requests: Several[Request], tokens: Tensor, share: float) -> dict[str, float]:
    """Measures the price, KL(p || q), and the difference of finished images of one plan, on their own tokens.

    Tokens are drawn by systematic sampling, 1 / share apart in the order of generation. A drawn token stands for its
    iteration, whose tokens are all evaluated; so the mean over draws is that over all tokens, whatever the share.

    Args:
        requests: resolved. tokens: [B, L, d]. share: of the tokens of each image, 0..1; at least one is drawn.

    Returns:
        "audit", "audit_error" and "audit_difference", see `measured_lines`; nothing if the requests are exact.
    """
    request = requests[0]
    if is_exact(request):
        return {}
    iterations, weights = drawn_iterations(tokens_by_iteration(request, runner.seq_len), share, request.seed)
    of_run = functools.partial(divergence_of, runner.tuning.calibrations["target"], request)

    def replay(of: Several[Request], first: int) -> Replay:
        model_runner = MARRunner(runner.target, len(of), runner.device, runner.precision)
        return Replay(model_runner, of, tokens[first : first + len(of)])

    parts = []
    for first in range(0, len(requests), runner.num_slots):  # all images of a long run do not fit into memory
        some = requests[first : first + runner.num_slots]
        exact = replay([each.but(rounds=None) for each in some], first)
        parts.append(audit(exact, replay(some, first), of_run, iterations, weights))
    found = Found(*map(torch.cat, zip(*parts)))
    divergence, error = price_of(found.nats, found.image)
    measured = {"audit": divergence}
    if math.isfinite(error):  # not of a single token
        measured["audit_error"] = error
    if request.denoiser == "calibrated":  # other chains use their noise in another way
        variance = tokens.flatten(0, 1).var(0).mean().item()
        measured["audit_difference"] = (found.squares.mean().item() / variance) ** 0.5
    return measured
