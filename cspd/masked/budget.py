"""The method `budget`: plans of MAR's approximations within a budget of nats per token, for this device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd.continuous.tuning import HeadTuner, head_seconds
from cspd.files import remember
from cspd.graphs import Graphs
from cspd.heads.calibration import WINDOWS, Price, Trace, joined, price_of
from cspd.masked.plan import EXACT, BudgetPlan, Prices, best_plan, chain_seconds, is_exact
from cspd.masked.prices import conditions_of, divergence_of, measure_prices
from cspd.masked.replay import Replay, exact_requests, tokens_by_iteration
from cspd.masked.round_times import time_rounds
from cspd.masked.runner import MARRunner
from cspd.option import BUDGET, MAR_OPTIONS
from cspd.request import Request
from cspd.terminal import counting
from cspd.tuner import Times

PRICES_SCHEMA, TIMES_SCHEMA, PLAN_SCHEMA = "cspd.prices/5", "cspd.round-times/1", "cspd.plan_price/4"
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


class Planner(HeadTuner):
    """The tuner of MAR: it also has the prices of the target, and the plans that follow from prices and times."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._planned: dict[Any, BudgetPlan] = {}
        self._others: tuple[dict, ExactImages] | None = None

    def prices(self, request: Request) -> Prices:
        """The prices for a request's guidance, temperature, T and K; measured on first use and cached."""
        own = {"schema": PRICES_SCHEMA, "num_iter": request.num_iter}
        return self.calibrations["target"].cached(request, Prices, own, lambda: self._measure(request))

    @torch.inference_mode()
    def _measure(self, request: Request) -> Prices:
        model = self.target
        requests = exact_requests(request, model.config.seq_len, model.config.class_num)
        predictor = self.calibrations["target"].predictor(request)
        replay = Replay(MARRunner(model, len(requests), self.precision), requests)
        s = model.head.schedule(request.num_sampling_steps)
        what = f"pricing fewer head calls and cached backbones at num_iter={request.num_iter}, for the first time"
        with counting(what, 1) as advance:
            return measure_prices(replay, predictor, s, advance)

    def round_times(self, request: Request, num_slots: int) -> Times:
        """The times of rounds of `num_slots` images on this device; measured on first use and cached."""
        config = self.target.config
        settings = {
            "schema": TIMES_SCHEMA,
            "model": dataclasses.asdict(config),
            "guided": request.guided,
            "settings": [request.num_iter, request.num_generated(config.seq_len), num_slots],
        }
        measure = functools.partial(self._time_rounds, request, num_slots)
        return self.times(settings, measure, "timing rounds of this device, once")

    def _time_rounds(self, request: Request, num_slots: int) -> Times:
        graphs = Graphs(self.device, self.graphs)
        runner = MARRunner(self.target, num_slots, self.precision, graphs=graphs, compiled=self.compiled)
        requests = [request.but(seed=slot, method="ar", reuse_null=True) for slot in range(num_slots)]
        return time_rounds(Replay(runner, requests), self.calibrations["target"].predictor(request))

    def plan(self, request: Request, num_slots: int) -> BudgetPlan:
        """The fastest plan within a checked request's budget, for `num_slots` images at once."""
        kind = self._plan_kind(request, num_slots)
        if kind not in self._planned:
            remember(self._planned, kind, self._make_plan(request, num_slots))
        return self._planned[kind]

    def made(self, request: Request) -> BudgetPlan | None:
        """The plan that chose a resolved request's settings, if it was made here, for any number of images at once."""
        own = self._plan_kind(request, 0)[:-1]
        for kind, plan in self._planned.items():
            if kind[:-1] == own and all(request.settings.get(name) == value for name, value in plan.settings.items()):
                return plan
        return None

    def _plan_kind(self, request: Request, num_slots: int) -> tuple:
        """Everything that a plan depends on."""
        own = {name: getattr(request, name) for name in KEPT}
        return tuple(own.items()), request.num_generated(self.target.config.seq_len), num_slots

    def _make_plan(self, request: Request, num_slots: int) -> BudgetPlan:
        if request.budget == 0:
            return BudgetPlan(EXACT, Price(0.0, 0.0), None)
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
        return BudgetPlan(EXACT, Price(0.0, 0.0), None)

    def priced(self, request: Request, plan: BudgetPlan) -> BudgetPlan:
        """A plan with its price as a whole, on other exact images; measured on first use and cached."""
        own = {"schema": PLAN_SCHEMA, "num_iter": request.num_iter, "plan": plan.settings}
        price = self.calibrations["target"].cached(request, Price, own, lambda: self._measure_plan(request, plan))
        return plan._replace(price=price)

    @torch.inference_mode()
    def _measure_plan(self, request: Request, plan: BudgetPlan) -> Price:
        images = self._other_images(request)
        requests = [own.but(**{**plan.settings, "denoiser": None}) for own in images.requests]
        runner = MARRunner(self.target, len(requests), self.precision)
        z = conditions_of(Replay(runner, requests, images.tokens), range(request.num_iter))
        nats = divergence_of(self.calibrations["target"], request.but(**plan.settings), images.chains, z)
        return price_of(nats, images.chains.image)

    def _other_images(self, request: Request) -> ExactImages:
        """Exact images that no price was measured on; the last ones are remembered."""
        config, settings = self.target.config, {name: getattr(request, name) for name in KEPT if name != BUDGET.name}
        if self._others is None or self._others[0] != settings:
            requests = exact_requests(request, config.seq_len, config.class_num)
            requests = [own.but(seed=own.seed + len(requests)) for own in requests]
            exact = Replay(MARRunner(self.target, len(requests), self.precision), requests)
            with counting("sampling exact images to price a plan on", 1) as advance:
                chains = joined(exact.chains(range(request.num_iter), commit=True, advance=advance))
            self._others = settings, ExactImages(requests, exact.runner.tokens, chains.to(self.device))
        return self._others[1]

    def _exact_head(self, request: Request, times: Times, counts: np.ndarray, num_slots: int) -> float:
        """Seconds of the head in all iterations by the fastest exact way; counts: tokens of an image in each [K]."""
        num_steps, rows = request.num_sampling_steps, counts * num_slots
        own = request.but(budget=None, draft="calibrated")
        window = self.choice(own, num_slots).config["window"]
        if window == 0:
            return chain_seconds(times, rows, num_steps, 0).sum()
        calls = self.calibrations["target"].get(own).calls[WINDOWS.index(window)]
        of_head = self.head_times(request.guided)
        return sum(head_seconds(of_head, num_steps, each, window, calls) for each in rows)


def explain(request: Request, runner: MARRunner) -> str:
    """What a resolved request does, and what is predicted of it, in words."""
    parts = [f"{name}={request.settings[name]}" for name in SHOWN if request.settings.get(name) is not None]
    plan = planned(request, runner)
    predicted = f"price {plan.price.divergence:.3g} +- {plan.price.error:.2g} nats per token"
    faster = "" if plan.speedup is None else f", rounds {plan.speedup:.3g} times as fast as ar's"
    return f"budget {request.budget:g}: {', '.join(parts)}; {predicted}{faster}"


def planned(request: Request, runner: MARRunner) -> BudgetPlan:
    """The plan of a resolved request. If its axes were given, these are the plan, and are priced on first use."""
    planner = runner.tuning
    plan = planner.made(request)
    if plan is not None:
        return plan
    if is_exact(request):
        return BudgetPlan(EXACT, Price(0.0, 0.0), None)
    given = {name: value for name, value in request.settings.items() if name not in KEPT and value is not None}
    return planner.priced(request, BudgetPlan(given, Price(0.0, 0.0), None))


def check(request: Request) -> None:
    """Raises ValueError if prices have no meaning for the request's settings, or these contradict its budget."""
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
