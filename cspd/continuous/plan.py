"""At which steps of a chain the head is called, and what lies between two calls.

A chain of T steps keeps its own noise, but the head is called at N of its steps only, S = {T - 1 = s_1 > .. > s_N = 0}.
At a step k between, a fitted linear prediction from the call before, at step a, stands in for it:

    eps~_k = c0 x_k + c1 eps_a + c2 x_a,    v~_k = v_a + drift.

So all that lies between two calls is linear in x_a, eps_a and the noise: a window of steps is one sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd.continuous.calibration import LARGEST, check_arrays, frozen, least_squares
from cspd.continuous.gaussian import divergence
from mar.diffusion import schedule

MOST_LAGS = 128  # steps from one call to the next, at most
MOST_COST = torch.finfo(torch.float32).max  # where float32 ends: taken only if there is no other way


@dataclass(frozen=True)
class Predictor:
    """What the head would say, predicted from its last call, and what a prediction costs.

    Attributes:
        coefficients: float32 [T, lags, 3], (c0, c1, c2) by step and lag, lags from 1.
        drift: float32 [T, lags], mean change of the variance channel.
        skip_cost: float32 [T, lags], nats: mean KL(p || q) of a step's Gaussians, p by the head and q by the
            prediction, of chains that the fit did not see.
    """

    coefficients: np.ndarray
    drift: np.ndarray
    skip_cost: np.ndarray

    def check(self, num_steps: int) -> None:
        """Raises ValueError, saying what is wrong, where it is none for T = `num_steps` denoising steps."""
        lags = min(MOST_LAGS, num_steps)
        wanted = {
            "coefficients": (np.float32, (num_steps, lags, 3), -LARGEST, LARGEST),
            "drift": (np.float32, (num_steps, lags), -LARGEST, LARGEST),
            "skip_cost": (np.float32, (num_steps, lags), 0, np.inf),
        }
        check_arrays("a predictor", vars(self), wanted)


def fit_predictor(seen: tuple[Tensor, ...], held_out: tuple[Tensor, ...], temperature: float) -> Predictor:
    """Fits the prediction of every step from every earlier one, and measures on other chains what it costs.

    Args:
        seen, held_out: (x, eps, v) [T, N, d] each, inputs, guided noise predictions and variance channels of ancestral
            chains; on the CPU, finite.
        temperature: tau the chains ran with. At 0 there are no densities: those of 1 are compared.
    """
    num_steps = len(seen[0])
    s = schedule(num_steps)
    coefficients, drift = (torch.from_numpy(values) for values in frozen(num_steps, MOST_LAGS))
    lags = coefficients.shape[1]
    skip_cost = torch.zeros(num_steps, lags)
    for k in range(1, num_steps - 1):
        anchors = slice(k + 1, k + 1 + lags)  # by lag; there are fewer near T
        num_lags = len(seen[0][anchors])
        slope = s.log_sigma_slope[k]
        # what is no good costs much, so that no plan takes it
        fitted = least_squares(*seen, k, anchors, slope).nan_to_num(0)
        coefficients[k, :num_lags] = fitted.clamp(-LARGEST, LARGEST)
        drift[k, :num_lags] = (seen[2][k] - seen[2][anchors]).mean((1, 2)).clamp(-LARGEST, LARGEST)

        x, eps, v = held_out
        c0, c1, c2 = coefficients[k, :num_lags, :, None, None].unbind(1)
        eps_predicted = c0 * x[k] + c1 * eps[anchors] + c2 * x[anchors]
        v_predicted = v[anchors] + drift[k, :num_lags, None, None]
        base = np.log(temperature or 1.0) + s.log_sigma_base[k]
        p = s.mean_eps[k] * eps[k], base + slope * v[k]  # both means share A x_k
        q = s.mean_eps[k] * eps_predicted, base + slope * v_predicted
        skip_cost[k, :num_lags] = divergence(p, q).mean(1)
    return Predictor(coefficients.numpy(), drift.numpy(), skip_cost.nan_to_num(MOST_COST).numpy())


class Plan(NamedTuple):
    """Where the head is called: S from T - 1 down to 0; the sum of the skipped steps' costs, nats per token."""

    steps: tuple[int, ...]
    cost: float


def plans(skip_cost: np.ndarray) -> Iterator[Plan]:
    """The cheapest plan of 2 calls, of 3, and so on to T, by dynamic programming; a cost is infinite where none is.

    By the chain rule a path's KL divergence is the sum of its steps', here with the calls on the exact path. The idea
    of choosing steps by such a bound is from Align Your Steps (arXiv 2404.14507).

    Args:
        skip_cost: [T, lags], by step and lag, see `Predictor`.
    """
    between = _costs_between(skip_cost)
    best = np.full(len(skip_cost), np.inf)  # the least cost down to each step, with a call there
    best[-1] = 0
    came_from: list[np.ndarray] = []
    for _ in range(2, len(skip_cost) + 1):
        totals = best[:, None] + between
        came_from.append(totals.argmin(0))
        best = totals.min(0)
        steps = [0]
        for sources in reversed(came_from):
            steps.append(int(sources[steps[-1]]))
        yield Plan(tuple(reversed(steps)), float(best[0]))


def _costs_between(skip_cost: np.ndarray) -> np.ndarray:
    """The cost [T, T] of skipping all steps between a call at a, the row, and the next one at b < a."""
    num_steps, lags = skip_cost.shape
    costs = np.full((num_steps, num_steps), np.inf)
    for a in range(1, num_steps):
        skipped = np.arange(a - 1, max(0, a - 1 - lags), -1)
        own = skip_cost[skipped, a - 1 - skipped].astype(np.float64)
        next_call = np.append(a - 1, skipped - 1)
        costs[a, next_call] = np.append(0, np.cumsum(own))
    return costs


def plan_of(skip_cost: np.ndarray, head_calls: int | None, most: float | None = None) -> Plan:
    """The cheapest plan of so many `head_calls`, or the shortest one that costs at `most` so many nats per token.

    Raises:
        ValueError: there is no plan of so few calls.
    """
    least = 2
    for plan in plans(skip_cost):
        if plan.cost == np.inf:
            least = len(plan.steps) + 1
        elif len(plan.steps) == head_calls or (most is not None and plan.cost <= most):
            return plan
    num_steps = len(skip_cost)
    raise ValueError(f"head_calls={head_calls} does not fit {num_steps} denoising steps: give {least}..{num_steps}")


class Window(NamedTuple):
    """From a call at x_a to the next one at x_b, over the steps k = a .. b + 1.

    Attributes:
        first: a. steps: int64 [n], the k.
        base, slope: float32 [n, 1, 1], log sigma_k = base_k + slope_k v_a, without temperature.
        mix: float32 [n + 1, 2 + n], the states that the steps begin with, and x_b: their weights on x_a, eps_a and the
            noise sigma_k eps_k of each step. Step 0 adds no noise.
        is_full: whether the call evaluates the null class too.
    """

    first: int
    steps: Tensor
    base: Tensor
    slope: Tensor
    mix: Tensor
    is_full: bool


def windows(
    steps: tuple[int, ...], predictor: Predictor, corrections: np.ndarray, null_every: int, device: torch.device
) -> list[Window]:
    """What follows each of a plan's calls.

    Args:
        steps: S. corrections: [N, 2], what is added to the weights of x_b on x_a and eps_a.
        null_every: the null class is evaluated at the first two calls, the last, and every so-manieth.
    """
    made = []
    for i, (a, b) in enumerate(zip(steps, (*steps[1:], -1))):
        k = np.arange(a, b, -1)
        mix, base, slope = _window(k, predictor)
        mix[-1, :2] += corrections[i]
        tables = (torch.as_tensor(values, dtype=torch.float32, device=device) for values in (base, slope, mix))
        base, slope, mix = tables
        is_full = i < 2 or i == len(steps) - 1 or i % null_every == 0
        column = (len(k), 1, 1)
        made.append(Window(a, torch.as_tensor(k, device=device), base.view(column), slope.view(column), mix, is_full))
    return made


def _window(k: np.ndarray, predictor: Predictor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mix, base, slope) of the steps k = a .. b + 1, see `Window`; float64."""
    s = schedule(len(predictor.coefficients))
    lags = np.arange(len(k)) - 1  # of a step from the call, less one
    base, slope = s.log_sigma_base[k], s.log_sigma_slope[k]
    base[1:] += slope[1:] * predictor.drift[k[1:], lags[1:]]
    mix = np.zeros((len(k) + 1, 2 + len(k)))
    mix[0, 0] = 1
    for i, step in enumerate(k):
        c0, c1, c2 = (0.0, 1.0, 0.0) if i == 0 else predictor.coefficients[step, lags[i]].astype(np.float64)
        mix[i + 1] = (s.mean_x[step] + s.mean_eps[step] * c0) * mix[i]
        mix[i + 1, 0] += s.mean_eps[step] * c2
        mix[i + 1, 1] += s.mean_eps[step] * c1
        mix[i + 1, 2 + i] = step > 0
    return mix, base, slope
