"""The two-sample test: p-values are uniform where distributions are equal, and small where they differ."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from cspd.evaluation.metrics import energy_test


def pairs(num, seed, channels=6, shared=1.0):
    """x, y [num, channels] of one distribution, with a common part as two methods' images of one seed have."""
    generator = torch.Generator().manual_seed(seed)
    common, x, y = torch.randn(3, num, channels, generator=generator)
    return shared * common + x, shared * common + y


@pytest.mark.parametrize("shared", [0.0, 3.0])
def test_p_values_are_uniform_where_the_distributions_are_equal(shared):
    p = np.array([energy_test(*pairs(12, seed, shared=shared), permutations=99) for seed in range(400)])
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert (p <= 0.05).mean() < 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y + 0.4,
        lambda y: y * 1.5,
        lambda y: y + 1.5 * y[:, :1].roll(1, 0),  # channels move together
        lambda y: y.sign() * (y.abs() + 0.7),  # the same mean, another shape
    ],
    ids=["mean", "variance", "correlation", "shape"],
)
def test_p_values_are_small_where_they_differ(change):
    p = [energy_test(x, change(y)) for x, y in (pairs(100, seed) for seed in range(5))]
    assert max(p) <= 0.01


def test_pairs_are_kept_together():
    """A shift far below the spread of the images shows, since both images of a seed have the same spread."""
    x, y = pairs(100, 0, shared=20.0)
    assert energy_test(x, y + 1) <= 0.01
    assert energy_test(x, (y + 1)[torch.randperm(100, generator=torch.Generator().manual_seed(1))]) > 0.01


def test_agrees_with_all_permutations_of_a_small_sample():
    """With 8 pairs the p-value is the share of the 2^8 swaps whose energy distance is as large."""

    def energy(x, y):
        between, within_x, within_y = ((a[:, None] - b).norm(dim=-1).mean() for a, b in ((x, y), (x, x), (y, y)))
        return 2 * between - within_x - within_y

    for seed, shift in ((0, 0.0), (1, 0.8), (2, 0.3)):
        x, y = (part.double() for part in pairs(8, seed, channels=3))
        y = y + shift
        swaps = torch.tensor(list(itertools.product([False, True], repeat=8)))[:, :, None]
        distances = torch.stack([energy(torch.where(s, y, x), torch.where(s, x, y)) for s in swaps])
        exact = (distances >= energy(x, y) - 1e-12).double().mean().item()
        assert energy_test(x, y, permutations=9999) == pytest.approx(exact, abs=0.02)


def test_is_reproducible_symmetric_and_takes_tokens():
    x, y = pairs(20, 3)
    p = energy_test(x, y)
    torch.manual_seed(7)
    assert p == energy_test(x, y) == energy_test(y, x) == energy_test(x.view(20, 2, 3), y.view(20, 2, 3))
    assert p != energy_test(x, y, seed=1)
    assert energy_test(x, x) == 1
    assert energy_test(x, y + 100) == pytest.approx(1 / 1000)  # never 0: the sample itself counts


@pytest.mark.parametrize("num, other", [(7, 7), (0, 0), (8, 9)])
def test_too_few_or_unpaired_samples_are_rejected(num, other):
    with pytest.raises(ValueError):
        energy_test(torch.randn(num, 2), torch.randn(other, 2))
    assert 0 < energy_test(*pairs(8, 0)) <= 1


@pytest.mark.parametrize("unit", [1e-15, 1.0, 1e6])
def test_the_unit_does_not_matter(unit):
    x, y = pairs(100, 0)
    assert energy_test(unit * x, unit * x) == 1
    assert energy_test(unit * x, unit * (y + 0.4)) == energy_test(x, y + 0.4) <= 0.01


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_no_numbers_have_no_p_value(value):
    x, y = pairs(8, 0)
    y[3, 1] = value
    with pytest.raises(ValueError, match="NaN"):
        energy_test(x, y)
