"""Chains of a stochastic differential equation: every sampler of the head takes them, and exact ones stay exact.

The heads know their score. With one Gaussian the distribution of a chain is known; with signs it is integrated on a
grid; with mixtures, speculation is compared with chains of other seeds. `tests/planted_bugs.py` shows the power.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from distributions import normal_pvalue, same_law_pvalue
from heads import CENTRES, CHANNELS, FP32, GUIDED, UNGUIDED, Case
from scipy import stats
from velocity import VelocityHead

from cspd.causal.head import TIME_FACTOR
from cspd.heads.calibrated import fit_shortcut, follow, plan_of
from cspd.heads.chain import LEAST_TO_GO

ROWS = 6000
RIGHT = 1e-3  # p-values of correct code are above it


def gaussian(binary: bool, guidance: float | None, num_steps: int, tau: float) -> Case:
    head = VelocityHead(torch.zeros(1, CHANNELS), (0.3,), binary=binary)
    return Case(head, GUIDED if guidance else UNGUIDED, num_steps, guidance or 1.0, tau)


def moments(case: Case) -> tuple[torch.Tensor, float]:
    """Mean [d] and variance of tokens of a head with one Gaussian, by the equation's own formulas in float64."""
    z, spread, tau = case.z[:, 0].double(), case.head.scales.item(), case.temperature
    centre = z[0] if len(z) == 1 else z[1] + case.scale * (z[0] - z[1])
    last = 0.05 if case.head.binary else 0.04
    dt = (1 - last) / case.num_steps
    mean, variance = torch.zeros_like(centre), 1.0
    for step in range(case.num_steps + 1):
        is_last = step == case.num_steps
        t, size = (1 - last, last) if is_last else (step * dt, dt)
        pull = t * spread**2 / ((t * spread) ** 2 + (1 - t) ** 2)  # x_1 = centre + pull (x - t centre)
        to_go = max(1 - t, LEAST_TO_GO if case.head.binary else 0)
        of_x, of_centre = (pull - 1) / to_go, (1 - pull * t) / to_go  # v
        drift = 1.0 if is_last else 1 + t
        of_x, of_centre = drift * of_x - (not is_last), drift * of_centre
        mean = mean + size * (of_x * mean + of_centre * centre)
        variance = (1 + size * of_x) ** 2 * variance + (not is_last) * 2 * (1 - t) * size * tau**2
    return mean, variance


@pytest.mark.parametrize(
    "num_steps, window, frozen, guidance, tau, binary",
    [
        (25, 1, True, None, 1.0, False),
        (25, 4, True, 2.5, 1.0, True),
        (25, 12, False, 2.5, 0.7, False),
        pytest.param(50, 32, True, None, 1.0, True, marks=pytest.mark.slow),
        (50, 8, False, 2.5, 1.0, True),
        pytest.param(100, 16, True, 2.5, 1.0, False, marks=pytest.mark.slow),
    ],
)
def test_gaussian_tokens_have_their_known_distribution(num_steps, window, frozen, guidance, tau, binary):
    case = gaussian(binary, guidance, num_steps, tau)
    ended = case.speculative(case.calibration(frozen), window, ROWS, seed=1)
    mean, variance = moments(case)
    assert normal_pvalue((ended.tokens.double() - mean) / variance**0.5) > RIGHT
    # the variances of p and q are equal, so the mirror image of a rejected draft is always a draw of p
    assert not any(ended.tries) and not any(ended.fallbacks)


@functools.cache
def mixture(binary: bool, guidance: float | None) -> Case:
    head = VelocityHead(CENTRES, (0.05, 0.1, 0.2), (0.5, 0.3, 0.2), binary)
    return Case(head, GUIDED if guidance else UNGUIDED, 40, guidance or 1.0)


@functools.cache
def reference(case: Case) -> torch.Tensor:
    return case.ancestral(3 * ROWS, seed=2)


@pytest.mark.parametrize(
    "binary, guidance, window, frozen",
    [
        (False, None, 5, True),
        pytest.param(True, 2.0, 1, False, marks=pytest.mark.slow),
        (True, 2.0, 24, False),
    ],
)
def test_mixtures_have_the_ancestral_distribution(binary, guidance, window, frozen):
    case = mixture(binary, guidance)
    ended = case.speculative(case.calibration(frozen), window, ROWS, seed=1)
    assert same_law_pvalue(reference(case), ended.tokens) > RIGHT


@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_any_draft_is_exact(spread):
    case, rng = mixture(False, None), np.random.default_rng(0)
    draft = case.calibration()
    wrong = (draft.coefficients + spread * rng.normal(size=draft.coefficients.shape)).astype(np.float32)
    ended = case.speculative(dataclasses.replace(draft, coefficients=wrong), 6, ROWS, seed=1)
    assert same_law_pvalue(reference(case), ended.tokens) > RIGHT


@functools.cache
def sign_probability(positive: float, num_steps: int) -> float:
    """P(the chain ends above 0) in one dimension, for tokens that are +1 with probability `positive`, else -1.

    The density of the state is carried from step to step on a grid.
    """
    grid = np.linspace(-7, 7, 701)
    weight = stats.norm.pdf(grid)
    weight /= weight.sum()
    dt = 0.95 / num_steps
    for step in range(num_steps + 1):
        t = min(step * dt, 0.95)
        clean = np.tanh(t * grid / (1 - t) ** 2 + 0.5 * math.log(positive / (1 - positive)))
        velocity = (clean - grid) / max(1 - t, 0.05)
        if step == num_steps:
            return weight[grid + 0.05 * velocity > 0].sum()
        mean = grid + ((1 + t) * velocity - grid) * dt
        kernel = stats.norm.pdf(grid[:, None], mean, math.sqrt(2 * (1 - t) * dt))
        weight = kernel @ weight
        weight /= weight.sum()
    raise AssertionError


@pytest.mark.parametrize("window, frozen", [pytest.param(4, True, marks=pytest.mark.slow), (12, False)])
def test_signs_are_counted(window, frozen):
    """Two independent bits; a draft of both is accepted or rejected as one."""
    chances, num_steps = (0.5, 0.8), 20
    corners = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])
    weights = [math.prod(p if bit > 0 else 1 - p for p, bit in zip(chances, corner)) for corner in corners.tolist()]
    head = VelocityHead(corners, (1e-3,) * 4, weights, binary=True)
    case = Case(head, torch.zeros(1, 1, 2), num_steps)
    tokens = case.speculative(case.calibration(frozen), window, 20_000, seed=1).tokens.sign()
    ends = [sign_probability(p, num_steps) for p in chances]
    expected = [math.prod(p if bit > 0 else 1 - p for p, bit in zip(ends, corner)) for corner in corners.tolist()]
    counts = [(tokens == corner).all(1).sum().item() for corner in corners]
    assert stats.chisquare(counts, 20_000 * np.array(expected) / sum(expected)).pvalue > RIGHT


def test_a_right_draft_needs_no_call_for_the_last_step():
    """A linear head is predicted without an error; the last step is one more row of the last window."""
    case = gaussian(False, None, 24, 1.0)
    for window in (1, 6, 8):
        ended = case.speculative(case.calibration(), window, 200, seed=3)
        calls = (ended.record != 0).sum(1)
        assert calls.float().mean() == pytest.approx(1 + 24 / window, abs=0.5)
        assert (ended.tokens - case.ancestral(200, seed=3)).abs().median() < 1e-3


def test_a_frozen_draft_holds_the_clean_token():
    for binary in (False, True):
        case = mixture(binary, None)
        coefficients, s = case.calibration(frozen=True).coefficients, case.schedule
        t = s.timestep_map / TIME_FACTOR
        x, anchor_x, clean = np.random.default_rng(0).normal(size=(3, CHANNELS))
        for step, lag in ((30, 1), (12, 7), (2, 20)):
            before = t[step + lag]
            output = clean if binary else (clean - anchor_x) / (1 - before)
            predicted = coefficients[step, lag - 1] @ np.stack([x, output, anchor_x])
            expected = clean if binary else (clean - x) / (1 - t[step])
            assert predicted == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_the_calibrated_sampler_is_near_the_chain_of_the_same_noise():
    case = mixture(False, 2.0)
    predictor, exact = case.predictor(), case.ancestral(1000, seed=5)
    errors = []
    for head_calls in (6, 12, 41):
        steps = plan_of(predictor.skip_cost, head_calls).steps
        traces = case.trace(256, 2**40), case.trace(256, 2**41), case.trace(256, 2**42)
        fitted = fit_shortcut(case.head, traces, case.schedule, predictor, steps, 1, FP32)
        segments = fitted.segments(case.schedule, predictor, 1, torch.device("cpu"))
        tokens = follow(case.chain(1000, seed=5), segments)
        errors.append((tokens - exact).square().mean().sqrt().item())
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-4
