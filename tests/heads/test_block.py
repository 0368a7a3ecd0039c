"""Block verification: weights, chances and draws against their definitions. test_velocity.py has the distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from cspd.heads import block

GRID = [(c, gap) for c in (1.0, 0.999, 0.6, 0.05) for gap in (0.05, 0.4, 1.5, 5.0)]


def excess(z: np.ndarray, c: float, gap: float) -> np.ndarray:
    return np.maximum(0, c * stats.norm.pdf(z, gap) - stats.norm.pdf(z))


def numbers(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


@pytest.mark.parametrize("c, gap", GRID)
def test_the_mass_is_the_integral(c, gap):
    mass = block.excess_mass(*numbers(math.log(c), gap)).item()
    crossing = gap / 2 - math.log(c) / gap
    expected, _ = integrate.quad(lambda z: excess(z, c, gap), crossing, crossing + 12, epsabs=1e-13)
    assert mass == pytest.approx(expected, rel=1e-6, abs=1e-11)


@pytest.mark.parametrize("c, gap", GRID)
def test_draws_invert_the_mass_beyond_them(c, gap):
    log_c, distance = numbers(math.log(c), gap)
    mass = block.excess_mass(log_c, distance).item()
    if mass < 1e-9:
        return  # such a prefix is never accepted
    uniform = torch.linspace(0.002, 0.998, 101, dtype=torch.float64)
    z = block.draw_excess(log_c.expand(101), distance.expand(101), uniform).numpy()
    beyond = c * stats.norm.sf(z, gap) - stats.norm.sf(z)
    assert beyond / mass == pytest.approx(uniform.numpy(), abs=1e-6)


def test_equal_gaussians_are_finite_and_accepted():
    zeros = torch.zeros(4, 3)
    num_accepted, log_c = block.accept_prefix(zeros, zeros, torch.full((4, 3), -1e-7), torch.tensor([0, 1, 2, 3]))
    assert num_accepted.tolist() == [0, 1, 2, 3] and not log_c.any()
    assert block.draw_excess(zeros, zeros, torch.full((4, 3), 0.5)).isfinite().all()


def by_hand(log_ratio: list, gap: list, uniform: list, num_noisy: int) -> tuple[int, list]:
    """Algorithm 2 of arXiv 2403.10444: the accepted length, and c before each state."""
    c, before, accepted = 1.0, [], 0
    for i in range(num_noisy):
        before.append(c)
        c = min(1.0, c * math.exp(log_ratio[i]))
        chance = c
        if i + 1 < num_noisy:
            mass = block.excess_mass(*numbers(math.log(c), gap[i + 1])).item()
            chance = mass / (mass + 1 - c) if c < 1 else 1.0
        if uniform[i] < chance:
            accepted = i + 1
    return accepted, before


def test_accepted_prefixes_are_those_of_the_algorithm():
    rng, window = np.random.default_rng(0), 6
    log_ratio, uniform = 0.7 * rng.normal(size=(400, window)), rng.random(size=(400, window))
    gap, num_noisy = rng.gamma(1.0, 0.7, size=(400, window)), rng.integers(0, window + 1, 400)
    given = [torch.from_numpy(values) for values in (log_ratio, gap, np.log(uniform), num_noisy)]
    num_accepted, log_c = block.accept_prefix(*given)
    for row in range(400):
        expected, before = by_hand(log_ratio[row], gap[row], uniform[row], num_noisy[row])
        assert num_accepted[row] == expected
        assert log_c[row, : num_noisy[row]].exp().tolist() == pytest.approx(before)
    assert set(num_accepted.tolist()) == set(range(window + 1))
