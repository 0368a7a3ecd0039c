"""Prices of approximations of the head and of its conditions, against closed forms of Gaussian chains."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from heads import CHANNELS, FP32, LINEAR, MIXTURE, Case
from torch.distributions import Normal, kl_divergence

from cspd.heads.calibrated import Predictor
from cspd.heads.calibration import frozen, price_of
from cspd.heads.prices import of_calls, of_conditions

STEPS = 12
Z = torch.tensor([[[1.0, -0.5, 2.0]], [[0.4, 0.3, -0.2]]])  # the unconditional branch second
CASE = Case(LINEAR, Z, STEPS, scale=2.5, temperature=0.8)
NUM = 4000
FROZEN = Predictor(*frozen(CASE.schedule), skip_cost=np.zeros(0))
EVERY = dict.fromkeys(range(STEPS - 1, -1, -1), True)


def gain(t: int) -> float:
    """eps = gain (x - sqrt(abar) centre) for a head with one component."""
    abar = CASE.schedule.alphas_cumprod[t]
    return np.sqrt(1 - abar) / (abar * LINEAR.scales.item() ** 2 + 1 - abar)


def of_centre(t: int) -> float:
    """Change of the step's mean per unit of the token's centre."""
    s = CASE.schedule
    return -s.mean_eps[t] * gain(t) * np.sqrt(s.alphas_cumprod[t])


def sigma(t: int) -> float:
    s = CASE.schedule
    return CASE.temperature * np.exp(s.log_sigma_base[t] + s.log_sigma_slope[t] * LINEAR.v(s.timestep_map[t]))


def guided_centre(z: torch.Tensor) -> np.ndarray:
    return (z[1] + CASE.scale * (z[0] - z[1])).squeeze(0).double().numpy()


def conditions_of(z: torch.Tensor, num: int) -> torch.Tensor:
    return z.expand(-1, num, -1)


def test_the_price_of_another_condition():
    """Its steps have other means, by the same amount at every state, so the divergence is a sum of squares."""
    other = Z + torch.tensor([[[0.02, 0.0, -0.01]], [[0.0, 0.03, 0.0]]])
    shift = np.square(guided_centre(other) - guided_centre(Z)).sum()
    exact = sum(shift * (of_centre(t) / sigma(t)) ** 2 / 2 for t in range(STEPS))
    found = of_conditions(LINEAR, CASE.trace(50, 1), conditions_of(other, 50), CASE.schedule, FP32)
    assert found.numpy() == pytest.approx(np.full(50, exact), rel=1e-3)


def test_a_part_of_the_steps_has_the_same_mean():
    chains, other = CASE.trace(60, 1), conditions_of(Z + 0.02, 60)
    whole = of_conditions(LINEAR, chains, other, CASE.schedule, FP32)
    part = of_conditions(LINEAR, chains, other, CASE.schedule, FP32, every=5)
    assert part.mean().item() == pytest.approx(whole.mean().item(), rel=1e-3)  # here all tokens are alike
    assert part.std() > 10 * whole.std()


def moments_of_change(a: int, k: int) -> tuple[np.ndarray, float]:
    """Mean [d] and variance of eps_a - eps_k on exact chains, a > k, in float64."""
    s, centre = CASE.schedule, guided_centre(Z)
    mean, variance = np.zeros(CHANNELS), 1.0
    for t in range(STEPS - 1, k, -1):
        if t == a:
            from_a = 1.0  # weight of x_a on the state
            mean_a, variance_a = mean, variance
        slope = s.mean_x[t] + s.mean_eps[t] * gain(t)
        mean = slope * mean + of_centre(t) * centre
        variance = slope**2 * variance + sigma(t) ** 2
        if t <= a:
            from_a *= slope
    offset = {t: gain(t) * np.sqrt(s.alphas_cumprod[t]) * centre for t in (a, k)}
    difference = gain(a) * mean_a - offset[a] - gain(k) * mean + offset[k]
    covariance = from_a * variance_a
    return difference, gain(a) ** 2 * variance_a + gain(k) ** 2 * variance - 2 * gain(a) * gain(k) * covariance


def test_the_price_of_fewer_calls():
    """Frozen predictions: the expected square of eps_a - eps_k is known, and that of the variance's drift."""
    s, steps = CASE.schedule, (11, 8, 4, 3, 1, 0)
    exact = 0.0
    for a, b in zip(steps, (*steps[1:], -1)):
        for k in range(a - 1, b, -1):
            mean, variance = moments_of_change(a, k)
            log_ratio = s.log_sigma_slope[k] * (LINEAR.v(s.timestep_map[k]) - LINEAR.v(s.timestep_map[a]))
            sigma_q = sigma(k) * np.exp(-log_ratio)
            square = (mean**2 + variance).sum() * (s.mean_eps[k] / sigma_q) ** 2
            exact += 0.5 * square + CHANNELS * (0.5 * np.expm1(2 * log_ratio) - log_ratio)
    chains = CASE.trace(NUM, 1)
    found = of_calls(LINEAR, chains, chains.z, s, FROZEN, dict.fromkeys(steps, True), FP32)
    error = found.std().item() / NUM**0.5
    assert abs(found.mean().item() - exact) < 4 * error and error < 0.02 * exact


def test_predictions_are_linear_in_both_states():
    """Any coefficients and drift, step by step: q has the mean A x + B (c0 x + c1 eps_a + c2 x_a)."""
    s, steps = CASE.schedule, (11, 10, 6, 0)
    rng = np.random.default_rng(0)
    coefficients, drift = (rng.normal(size=values.shape) for values in (FROZEN.coefficients, FROZEN.drift))
    predictor = Predictor(coefficients, drift, skip_cost=np.zeros(0))
    chains = CASE.trace(20, 1)
    exact = torch.zeros(20)
    for a, b in zip(steps, (*steps[1:], -1)):
        for k in range(a - 1, b, -1):
            c0, c1, c2 = coefficients[k, a - k - 1]
            error = s.mean_eps[k] * (c0 * chains.x[k] + c1 * chains.eps[a] + c2 * chains.x[a] - chains.eps[k])
            v = chains.v[a] + drift[k, a - k - 1]
            log_p, log_q = (s.log_sigma_base[k] + s.log_sigma_slope[k] * each for each in (chains.v[k], v))
            p, q = Normal(error * 0, CASE.temperature * log_p.exp()), Normal(error, CASE.temperature * log_q.exp())
            exact += kl_divergence(p, q).sum(1)
    found = of_calls(LINEAR, chains, chains.z, s, predictor, dict.fromkeys(steps, True), FP32)
    assert torch.allclose(found, exact.float(), rtol=1e-3)


def test_the_price_of_a_reused_difference():
    """Every call is made, but every second one reuses the branches' difference of the call before."""
    s = CASE.schedule
    calls = {k: i < 2 or i % 2 == 0 or k == 0 for i, k in enumerate(EVERY)}
    apart = np.square((Z[0] - Z[1]).double().numpy()).sum() * (CASE.scale - 1) ** 2
    exact = 0.0
    for k, is_full in calls.items():
        if not is_full:
            per_unit = [gain(t) * np.sqrt(s.alphas_cumprod[t]) for t in (k, k + 1)]
            exact += apart * ((per_unit[0] - per_unit[1]) * s.mean_eps[k] / sigma(k)) ** 2 / 2
    chains = CASE.trace(50, 1)
    found = of_calls(LINEAR, chains, chains.z, s, FROZEN, calls, FP32)
    assert found.numpy() == pytest.approx(np.full(50, exact), rel=1e-3)


def test_a_correction_moves_the_last_step_of_a_segment():
    s = CASE.schedule
    corrections = np.zeros((STEPS, 2), np.float32)
    corrections[5] = 0.01, -0.02  # of the call at step 6
    chains = CASE.trace(50, 1)
    k = 6
    moved = 0.01 * chains.x[k] - 0.02 * chains.eps[k]
    found = of_calls(LINEAR, chains, chains.z, s, FROZEN, EVERY, FP32, corrections)
    assert torch.allclose(found, (moved / sigma(k)).square().sum(1) / 2, rtol=1e-2)


def test_calls_at_all_steps_under_another_condition_cost_as_much_as_that_condition():
    case = dataclasses.replace(CASE, head=MIXTURE)
    chains, other = case.trace(100, 1), conditions_of(Z + 0.1, 100)
    alone = of_conditions(MIXTURE, chains, other, case.schedule, FP32)
    by_calls = of_calls(MIXTURE, chains, other, case.schedule, FROZEN, EVERY, FP32)
    assert torch.allclose(alone, by_calls, rtol=1e-3)
    exact = of_conditions(MIXTURE, chains, chains.z, case.schedule, FP32)
    assert exact.max() < 1e-4 * alone.mean()


def test_the_error_of_a_price_is_of_images():
    """Tokens of an image are alike: many of them tell no more than one."""
    nats = torch.tensor([1.0, 2.0, 3.0, 6.0]).repeat_interleave(100)
    image = torch.arange(4).repeat_interleave(100)
    price = price_of(nats, image)
    assert price.divergence == 3.0
    assert price.error == pytest.approx(nats[::100].std().item() / 2)
    both = price + price
    assert both.divergence == 6.0 and both.error == pytest.approx(2**0.5 * price.error)


def test_the_price_of_the_tokens_of_one_image():
    """Has the spread of these tokens as its error; images of unlike sizes count by their tokens."""
    nats = torch.tensor([1.0, 2.0, 3.0, 6.0])
    alone = torch.zeros(4, dtype=torch.int64)
    assert price_of(nats, alone) == pytest.approx((3.0, nats.std().item() / 2))
    assert price_of(nats[:1], alone[:1]) == (1.0, np.inf)
    assert price_of(nats, torch.tensor([0, 0, 0, 1])).divergence == 3.0
