"""Deterministic solvers of the head's chain, N head calls per token: DDIM and DPM-Solver++. Guarantee: heuristic.

They solve the diffusion's ordinary differential equation, so nothing is random but the noise that they begin with, and
the temperature does nothing. Their users begin at timestep 950 or so of the 1000: from 999 the first of few steps
overshoots.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from torch import Tensor

from cspd.continuous import ancestral
from cspd.continuous.ancestral import FIRST_TIMESTEP, SHORT_FIRST, Trace, check_first, evaluate
from cspd.continuous.buckets import by_row
from cspd.continuous.denoiser import ContinuousHost, Denoised, denoiser
from cspd.continuous.modulations import modulated
from cspd.continuous.rows import Rows
from cspd.option import Option, check_integer
from cspd.precision import Precision
from cspd.sequence import Request
from mar.diffusion import TRAIN_STEPS, Schedule, respaced, schedule
from mar.head import Head

OPTIONS = (
    Option(
        "head_calls",
        int,
        "head calls per token; the temperature has no effect",
        default=10,
        low=2,
        high=TRAIN_STEPS,
        metavar="N",
    ),
    FIRST_TIMESTEP.but(default=SHORT_FIRST),
    Option(
        "grid",
        ("uniform", "planned"),
        "timesteps of the head calls: evenly spaced, or those that `calibrated` would choose",
        default="uniform",
    ),
)


class Step(NamedTuple):
    """What a solver does after a head call, which predicts x_0 = (x - sigma eps) / alpha: x becomes shrink x + grow D.

    D = x_0 + further (x_0 - x_0'), x_0' being the prediction before.
    """

    alpha: float
    sigma: float
    further: float
    shrink: float
    grow: float


def solver_steps(s: Schedule, order: int) -> list[Step]:
    """The steps of DPM-Solver++ (arXiv 2211.01095) of order 1, which is DDIM, or 2 (2M), from the noisiest on.

    x_t = (sigma_t / sigma_s) x_s - alpha_t (e^-h - 1) D, h = lambda_t - lambda_s, lambda = log(alpha / sigma). At order
    2, D = (1 + 1/(2r)) x_0 - 1/(2r) x_0' with r = h'/h, h' being the h before. The first step has no x_0'. The last
    two, to timestep 0 and to sigma = 0, are of order 1 (the authors' code says so of its last step, to timestep 0,
    where there are few): h is large there.
    """
    alpha = np.sqrt(s.alphas_cumprod[::-1])
    sigma = np.sqrt(1 - s.alphas_cumprod[::-1])
    h = np.diff(np.log(alpha / sigma))
    further = np.zeros(len(s))
    if order == 2:
        further[1:-2] = h[1:-1] / (2 * h[:-2])
    alpha_next, sigma_next = np.append(alpha[1:], 1.0), np.append(sigma[1:], 0.0)
    shrink = sigma_next / sigma
    grow = alpha_next - alpha * shrink  # -alpha_t (e^-h - 1), which holds for an h without end too
    return [Step(*values) for values in np.stack([alpha, sigma, further, shrink, grow], axis=1).tolist()]


def solve(
    head: Head,
    z: Tensor,
    scale: Tensor,
    x: Tensor,
    s: Schedule,
    order: int,
    precision: Precision,
    trace: Trace | None = None,
) -> Tensor:
    """Tokens [R, d] by a solver of an order, 1 or 2, over a schedule's timesteps.

    Args:
        head, z, scale, precision, trace: as in `cspd.continuous.ancestral`. x: pure noise [R, d].
    """
    steps = solver_steps(s, order)
    last = len(s) - 1
    before = x
    for calls, own_head, by_call in modulated(head, z, s.timestep_map[::-1], precision):
        with precision.full() if calls[0] == 0 else precision.fast():
            for call, modulations in zip(calls, by_call):
                step = steps[call]
                eps, v = evaluate(own_head, x, modulations, scale)
                if trace:
                    trace(last - call, x, eps, v)
                x_0 = (x - step.sigma * eps) / step.alpha
                data = x_0 + step.further * (x_0 - before) if step.further else x_0
                x = step.shrink * x + step.grow * data
                before = x_0
        del by_call, modulations  # which are large
    return x


def grid_of(request: Request, host: ContinuousHost) -> Schedule:
    """The schedule over the timesteps that a request's chains visit, of both models: CSpD compares chains of one grid.

    Raises:
        ValueError: there is no plan of so few head calls.
    """
    if request.grid == "uniform":
        return schedule(request.head_calls, request.first_timestep)
    plan = host.tuning.calibrations["target"].plan(request, request.head_calls)
    planned = schedule(request.num_sampling_steps).timestep_map[list(plan.steps)]
    highest = request.first_timestep - np.arange(len(planned))  # clipped, they still fall
    return respaced(np.minimum(planned, highest)[::-1])


def check(request: Request, host: ContinuousHost) -> None:
    """Raises ValueError where there are more head calls than timesteps to visit, or steps to plan them at."""
    check_first(request, request.head_calls)
    if request.grid == "planned":
        most = request.num_sampling_steps
        check_integer("head_calls", request.head_calls, 2, most, f"a chain has {most} steps, at which they are planned")


def resolve(request: Request, host: ContinuousHost) -> Request:
    """The request as it is, its grid planned; raises ValueError where that cannot be."""
    grid_of(request, host)
    return request


def _denoise(
    order: int,
    host: ContinuousHost,
    model: str,
    rows: Rows,
    z: Tensor,
    *,
    index: int = 0,
    densities: bool = False,
) -> Denoised:
    """Every token by a solver of an order; other arguments as in `cspd.continuous.denoiser`.

    It has no densities of its own. Where they are asked for, it gives those that the ancestral chain over the same
    timesteps has at the states that were visited.
    """
    request = rows.sequences[0].request
    kind = rows.sequences[0].key
    kept = host.kept[kind]
    if "grid" not in kept:
        kept["grid"] = grid_of(request, host)
    s: Schedule = kept["grid"]
    log_sigmas: list[Tensor] = []
    trace = ancestral.sigma_trace(s, rows.temperature, log_sigmas) if densities else None
    head = host.models[model].head

    def draw(z: Tensor, scale: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
        x = host.noise.initial(seed, position, head.channels, index)
        return solve(head, z, scale, x, s, order, host.precision, trace)

    tokens = by_row(host, None if trace else ("solver", order, model, kind, index), draw, rows, z)
    calls = np.full(len(tokens), len(s))
    made = Denoised(tokens, calls, len(s), evaluations=calls * len(z))
    return ancestral.with_densities(made, log_sigmas) if densities else made


ddim = denoiser("ddim", options=OPTIONS, check=check, resolve=resolve)(functools.partial(_denoise, 1))
dpm_solver = denoiser("dpm-solver++", options=OPTIONS, check=check, resolve=resolve)(functools.partial(_denoise, 2))
