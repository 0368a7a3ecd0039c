"""Deterministic solvers of a causal model's head, N head calls per token: Euler and Heun. Guarantee: heuristic.

They solve the probability-flow equation dx / dt = v from t = 0 to 1 on a uniform grid. So only the noise that they
begin with is random, and the temperature has no effect.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from cspd.causal.models import LEAST_TO_GO, TIME_FACTOR, DiffHead
from cspd.device import Precision
from cspd.heads.chain import ContinuousRunner, Denoised, Denoiser, Rows, by_row, evaluate, modulated
from cspd.option import Option

HEAD_CALLS = Option(
    "head_calls",
    int,
    "head calls per token; the temperature has no effect",
    default=25,
    low=1,
    high=1000,
    metavar="N",
)


def grid(head_calls: int, order: int) -> list[tuple[float, float, bool]]:
    """(t, dt, whether it corrects the step before) of each head call.

    Order 1 takes a step at every call. Order 2 takes two calls a step, at its beginning and, to correct it, at its end,
    but one for the last, as the head is not trained at t = 1: so of an even number of calls it leaves out one.
    """
    num_steps = head_calls if order == 1 else (head_calls + 1) // 2
    dt = 1 / num_steps
    calls = []
    for step in range(num_steps):
        calls.append((step * dt, dt, False))
        if order == 2 and step < num_steps - 1:
            calls.append(((step + 1) * dt, dt, True))
    return calls


def solve(
    head: DiffHead, z: Tensor, scale: Tensor, x: Tensor, calls: list[tuple[float, float, bool]], precision: Precision
) -> Tensor:
    """Ends of chains [R, d] from pure noise x [R, d]; calls: see `grid`, the others as in `cspd.heads.chain`."""
    before = at_start = x
    names = [TIME_FACTOR * t for t, _, _ in calls]
    for some, own_head, by_call in modulated(head, z, names, precision):  # type: ignore[arg-type]
        with precision.full() if some[0] == 0 else precision.fast():
            for call, modulations in zip(some, by_call):
                t, dt, corrects = calls[call]
                out, _ = evaluate(own_head, x, modulations, scale)
                velocity = (out - x) / max(1 - t, LEAST_TO_GO) if head.binary else out
                if corrects:  # Heun: from the step's start, by the mean of its two velocities
                    x = before + dt * torch.lerp(at_start, velocity, 0.5)
                else:
                    before, at_start = x, velocity
                    x = x + dt * velocity
        del by_call, modulations  # they are large
    return x


def denoise(
    order: int,
    runner: ContinuousRunner,
    model: str,
    rows: Rows,
    z: Tensor,
    *,
    index: int = 0,
    densities: bool = False,
) -> Denoised:
    """Draws every token by a solver of order 1 or 2; other arguments as in `cspd.heads.chain`. It has no densities."""
    head = runner.models[model].head
    calls = grid(rows.sequences[0].request.head_calls, order)

    def draw(z: Tensor, scale: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
        x = runner.noise.initial(seed, position, head.channels, index)
        return solve(head, z, scale, x, calls, runner.precision)

    tokens = by_row(runner, ("euler", order, model, len(calls), index), draw, rows, z)
    by_token = np.full(len(tokens), len(calls))
    return Denoised(tokens, by_token, len(calls), evaluations=by_token * len(z))


MIXED = ("cfg", "cfg_schedule", "temperature")
EULER = Denoiser(functools.partial(denoise, 1), "heuristic", options=(HEAD_CALLS,), mixed=MIXED)
HEUN = Denoiser(functools.partial(denoise, 2), "heuristic", options=(HEAD_CALLS,), mixed=MIXED)
