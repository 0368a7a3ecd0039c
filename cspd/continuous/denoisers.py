"""The head's samplers as choices of requests: what is checked and decided for each. See `cspd.heads.samplers`."""

from __future__ import annotations

import functools
from typing import Any

from cspd.continuous import joined
from cspd.continuous.rows import ContinuousRunner, Denoiser
from cspd.heads import calibrated, samplers, speculative  # noqa: F401 - they register their samplers
from cspd.heads.calibrated import HEAD_CALLS, Predictor, Shortcut
from cspd.heads.samplers import SAMPLERS, SHORT, SHORT_FIRST, Sampler, for_users_samplers
from cspd.method import Prepare
from cspd.option import Option, check_integer
from cspd.request import Request
from mar.head import TRAIN_STEPS

# Chains: their first timestep, and their length.

ANCESTRAL_MIXED = ("num_iter", "cfg", "cfg_schedule", "temperature")  # may differ between the rows of a chain


def begins(steps: str) -> Prepare:
    """Checks that a chain of as many steps as the setting `steps` has them up to its `first_timestep`."""

    def prepare(request: Request, runner: ContinuousRunner) -> Request:
        num_steps = getattr(request, steps)
        if request.first_timestep is not None:
            why = f"it begins a chain of {num_steps} steps"
            check_integer("first_timestep", request.first_timestep, num_steps - 1, TRAIN_STEPS - 1, why)
        return request

    return prepare


def ancestral_advice(request: Request, remedy: str = f"give first_timestep={SHORT_FIRST}") -> str | None:
    """Advice for short chains, whose first step from timestep 999 multiplies errors by thousands; None for others."""
    num_steps = request.num_sampling_steps
    if num_steps >= SHORT or request.first_timestep is not None:
        return None
    return f"a chain of {num_steps} denoising steps overshoots in its first one: {remedy}"


def prepare_solver(request: Request, runner: ContinuousRunner) -> Request:
    """The unchanged request, after its grid was planned.

    Raises ValueError if there are more head calls than timesteps, or than steps to plan them at, or no such plan.
    """
    begins("head_calls")(request, runner)
    if request.grid == "planned":
        most = request.num_sampling_steps
        check_integer("head_calls", request.head_calls, 2, most, f"a chain has {most} steps, at which they are planned")
        runner.tuning.calibrations["target"].plan(request, request.head_calls)
    return request


# `speculative`: its window.


def prepare_window(request: Request, runner: ContinuousRunner) -> Request:
    """The request with the fastest window for it on this device, if it does not have a window."""
    if request.window is None:
        request = request.but(**runner.tuning.choice(request, runner.at_once).config)
    if request.window and request.draft != "frozen":  # so that no round has to wait for the fit
        for model in ("target", "draft") if request.chains else ("target",):  # CSpD's, of both models
            runner.tuning.calibrations[model].get(request)
    return request


# `calibrated`: its plan, and its audit.

AUDIT = Option(
    "audit",
    float,
    "share of the skipped steps at which the head is evaluated after all, to measure this run's divergence",
    default=0.0,
    implied=True,
    low=1e-4,  # with less, most images have no audited step and would seem to have no error
    high=1,
    needs_noise=True,
    off=0,
    metavar="FRACTION",
)


def prepare_plan(request: Request, runner: ContinuousRunner) -> Request:
    """The request with its number of head calls.

    Raises ValueError if there is no such plan, its predicted divergence is above `divergence`, or the chains that it
    is fitted to are not finite.
    """
    calls, most = request.head_calls, request.divergence
    if calls is None and most is None:
        calls = min(HEAD_CALLS, request.num_sampling_steps)
    calibrations = runner.tuning.calibrations["target"]
    is_corrected = request.corrected is not False
    kinds = (Predictor, Shortcut) if is_corrected else (Predictor,)
    with calibrations.fitting(request.but(head_calls=calls), *kinds):
        plan = calibrations.plan(request, calls, most if calls is None else None)
        if most is not None and plan.cost > most:
            predicted = f"head_calls={calls} has a predicted divergence of {plan.cost:.3g} nats per token"
            raise ValueError(f"{predicted}, above divergence={most}: give only one of head_calls and divergence")
        request = request.but(head_calls=len(plan.steps))
        if is_corrected:
            calibrations.shortcut(request)  # so that no round has to wait for the fit
    if request.chains and is_corrected:  # CSpD's, of both models
        runner.tuning.calibrations["draft"].shortcut(request)
    return request


# The table.

# for short chains, which with a fit always begin at timestep 999
SPECULATIVE_REMEDY = f"give num_sampling_steps=100, or ar's chains with first_timestep={SHORT_FIRST}"
CALIBRATED_REMEDY = "give num_sampling_steps=100, which takes no more head calls"
OWN: dict[str, dict[str, Any]] = {
    "ancestral": {"mixed": ANCESTRAL_MIXED, "prepare": begins("num_sampling_steps"), "advice": ancestral_advice},
    "annealed": {"mixed": ANCESTRAL_MIXED, "prepare": begins("upper")},
    "cached": {"mixed": ANCESTRAL_MIXED, "prepare": begins("num_sampling_steps"), "advice": ancestral_advice},
    "frequency-weighted": {"mixed": (*ANCESTRAL_MIXED, "num_sampling_steps"), "prepare": begins("upper")},
    "ddim": {"prepare": prepare_solver},
    "dpm-solver++": {"prepare": prepare_solver},
    "euler": {"mixed": ANCESTRAL_MIXED[1:]},
    "heun": {"mixed": ANCESTRAL_MIXED[1:]},
    "calibrated": {"prepare": prepare_plan, "advice": functools.partial(ancestral_advice, remedy=CALIBRATED_REMEDY)},
    "speculative": {
        "prepare": prepare_window,
        "advice": functools.partial(ancestral_advice, remedy=SPECULATIVE_REMEDY),
        "run_round": joined.run_round,
    },
}
DENOISERS: dict[str, Denoiser] = {}  # by name, of all samplers


def add(sampler: Sampler) -> None:
    """Makes a sampler a choice of requests."""
    options = sampler.options
    if sampler.name == "calibrated":
        options += (AUDIT,)
    DENOISERS[sampler.name] = Denoiser(sampler, options=options, **OWN.get(sampler.name, {}))


def of_kind(kind: str) -> dict[str, Denoiser]:
    """The choices for a kind of heads, `DIFFUSION` or `FLOW`."""
    return {name: DENOISERS[name] for name in sorted(DENOISERS) if DENOISERS[name].sampler.of in (None, kind)}


for _sampler in SAMPLERS.values():
    add(_sampler)
for_users_samplers(add)
