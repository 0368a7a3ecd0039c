"""The calibrated sampler: N head calls per token, and predictions between them. Guarantee: measured.

It keeps the chain's T steps and its noise. Where `speculative` drafts with a fitted prediction of the head and judges
it, this takes the prediction as it is: a token is nearly the one that `ar` makes of the same noise. How nearly is
measured when the prediction is fitted, on other tokens, and if asked for on the tokens of the run itself (`audit`).
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import torch
from torch import Tensor

from cspd.continuous import ancestral
from cspd.continuous.buckets import by_row
from cspd.continuous.denoiser import ContinuousHost, Denoised, Measured, denoiser
from cspd.continuous.plan import Predictor
from cspd.continuous.rows import Rows
from cspd.continuous.shortcut import Shortcut
from cspd.continuous.windows import Audit, drawing
from cspd.option import Option, check_integer
from cspd.sequence import Request
from mar.diffusion import TRAIN_STEPS

HEAD_CALLS = 10
LEAST_AUDIT = 1e-4  # with less, most images have no step to look at, and seem to be without error
REMEDY = "give num_sampling_steps=100, which takes no more head calls"  # where the chain itself is short
OPTIONS = (
    Option(
        "head_calls",
        int,
        f"head calls per token; fewer are faster and less exact; {HEAD_CALLS} where nothing else is asked for",
        low=2,
        high=TRAIN_STEPS,
        metavar="N",
    ),
    Option(
        "divergence",
        float,
        "in place of head_calls: as few as are predicted to diverge by at most D nats per token",
        above=0,
        metavar="D",
    ),
    Option(
        "null_every",
        int,
        "the null class is evaluated at every N-th head call only; between, its last difference is taken again",
        default=2,
        low=1,
        high=TRAIN_STEPS,
        metavar="N",
    ),
    Option(
        "audit",
        float,
        "share of the skipped steps at which the head is evaluated all the same, to measure this run's divergence",
        default=0.0,
        implied=True,
        high=1,
        metavar="SHARE",
    ),
)


def check(request: Request, host: ContinuousHost) -> None:
    """Raises ValueError where the calls do not fit the steps, or what is asked for needs noise."""
    if request.head_calls is not None:
        most = request.num_sampling_steps
        check_integer("head_calls", request.head_calls, 2, most, f"a chain has {most} steps")
    if 0 < (request.audit or 0) < LEAST_AUDIT:
        raise ValueError(f"audit={request.audit} looks at too few steps to tell anything: give 0, or {LEAST_AUDIT}..1")
    for name in ("divergence", "audit"):
        if getattr(request, name) and request.temperature == 0:
            raise ValueError(f"{name}={getattr(request, name)} needs temperature > 0: without noise nothing diverges")


def resolve(request: Request, host: ContinuousHost) -> Request:
    """The request with its number of head calls.

    Raises ValueError where there is no plan of so few, it is predicted to diverge by more than `divergence`, or chains
    are not finite.
    """
    calls, most = request.head_calls, request.divergence
    if calls is None and most is None:
        calls = min(HEAD_CALLS, request.num_sampling_steps)
    calibrations = host.tuning.calibrations["target"]
    with calibrations.fitting(request.but(head_calls=calls), Predictor, Shortcut):
        plan = calibrations.plan(request, calls, most if calls is None else None)
        if most is not None and plan.cost > most:
            predicted = f"head_calls={calls} is predicted to diverge by {plan.cost:.3g} nats per token"
            raise ValueError(f"{predicted}, more than divergence={most}: give one of the two")
        request = request.but(head_calls=len(plan.steps))
        calibrations.shortcut(request)  # so that no round has to wait for the fit
    if request.chains:  # of CSpD, those of both models
        host.tuning.calibrations["draft"].shortcut(request)
    return request


def at_hand(request: Request, host: ContinuousHost) -> tuple[Request, float] | None:
    """A checked request with the usual number of head calls, and its `Shortcut.difference`; None if it needs a fit."""
    calibrations = host.tuning.calibrations["target"]
    usual = request.but(head_calls=min(HEAD_CALLS, request.num_sampling_steps))
    shortcut = calibrations.find(usual, Shortcut) if calibrations.find(usual, Predictor) else None
    return None if shortcut is None else (usual, shortcut.difference.item())


class _Running:
    """What the sequences of one kind share while they run: a model's windows, and what is known of their tokens."""

    def __init__(self, host: ContinuousHost, model: str, request: Request) -> None:
        calibrations = host.tuning.calibrations[model]
        shortcut = calibrations.shortcut(request)
        self.plan = calibrations.windows(request)
        self.difference = shortcut.difference.item()
        divergence = shortcut.divergence.item()
        self.divergence = divergence if math.isfinite(divergence) else None  # as it is without noise
        self.num_full = sum(window.is_full for window in self.plan)


@denoiser(
    "calibrated",
    "measured",
    options=OPTIONS,
    needs="calibration",
    check=check,
    resolve=resolve,
    advice=functools.partial(ancestral.advice, remedy=REMEDY),
)
def denoise(
    host: ContinuousHost, model: str, rows: Rows, z: Tensor, *, index: int = 0, densities: bool = False
) -> Denoised:
    """Every token by N head calls; arguments as in `cspd.continuous.denoiser`. An audit's calls are not counted."""
    request = rows.sequences[0].request
    kind = rows.sequences[0].key
    kept = host.kept[kind]
    if ("calibrated", model) not in kept:
        kept["calibrated", model] = _Running(host, model, request)
    running: _Running = kept["calibrated", model]
    head, plan = host.models[model].head, running.plan
    num_steps = request.num_sampling_steps
    log_sigmas: list[Tensor] = []

    def keep_sigma(i: int, sources: Tensor, v: Tensor) -> None:
        log_sigma = torch.addcmul(plan[i].base, plan[i].slope, v) + rows.temperature.log()
        log_sigmas.append(log_sigma if i == len(plan) - 1 else log_sigma.sum((0, 2)))

    audit = None
    if request.audit:
        coins = host.noise.step_coins(rows.seed, rows.position, num_steps)
        chosen = coins < request.audit
        audit = Audit(head, z, rows.scale, rows.temperature, plan, host.precision, chosen, request.audit)
    visit = keep_sigma if densities else audit
    draw = drawing(head, host.noise, plan, num_steps, host.precision, index=index, visit=visit)
    tokens = by_row(host, None if visit else ("calibrated", model, kind, index), draw, rows, z)
    calls = np.full(len(tokens), len(plan))
    evaluations = calls + running.num_full * (len(z) - 1)
    measured = Measured(running.difference, running.divergence, audit and audit.total)
    made = Denoised(tokens, calls, len(plan), evaluations, measured=measured)
    if not densities:
        return made
    *path, last = log_sigmas
    return dataclasses.replace(made, log_sigma=torch.stack(path).sum(0), log_sigma_last=last.squeeze(0))
