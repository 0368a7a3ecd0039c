"""A draw of q becomes a draw of p, exactly: log-ratios, the mirror, the coupling, and rejection sampling by index."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from distributions import normal_pvalue
from scipy import stats
from torch.distributions import Independent, Normal

from cspd.heads import verify
from cspd.heads.verify import first_accepted, log_ratio, reflect, resample, residual

BATCH, CHANNELS = 4000, 3


def pair(mean_gap, log_sigma_gap, dtype=torch.float64):
    """(p, q) [1, d]: means and log sigmas that differ by about these gaps, by another amount in each channel."""
    g = torch.Generator().manual_seed(0)
    mean, log_sigma, a, b = torch.randn(4, 1, CHANNELS, generator=g, dtype=dtype)
    q = (mean - mean_gap * (1 + 0.3 * a), 0.3 * log_sigma - log_sigma_gap * (1 + 0.3 * b))
    return (mean, 0.3 * log_sigma), q


PAIRS = {
    "other means": pair(0.7, 0.0),
    "wider q": pair(0.0, -0.4),
    "narrower q": pair(0.0, 0.4),
    "all differs": pair(0.5, 0.3),
    "all differs, wider q": pair(-0.6, -0.3),
    "far apart": pair(1.6, 0.5),
}


def distribution(parameters):
    return Independent(Normal(parameters[0], parameters[1].exp()), 1)


def standardise(x, parameters):
    return (x - parameters[0]) / parameters[1].exp()


def draws_from(generator, rows, channels=CHANNELS):
    """Candidates that come one after the other, as `draws` of `first_accepted`."""

    def draws(first, num):
        normals = torch.randn(rows, num, channels, generator=generator, dtype=torch.float64)
        return normals, torch.rand(rows, num, generator=generator, dtype=torch.float64).log()

    return draws


def coupled(p, q, num):
    """(draws of p made from draws of q [num, d], how they were made [num]: 0 accepted, 1 mirrored, 2 residual)."""
    g, made, how = torch.Generator().manual_seed(1), [], []
    for _ in range(num // BATCH):  # if one needs many candidates, every waiting row draws as many
        wide_p, wide_q = (tuple(t.expand(BATCH, -1) for t in parameters) for parameters in (p, q))
        x = q[0] + q[1].exp() * torch.randn(BATCH, p[0].shape[1], generator=g, dtype=torch.float64)
        log_uniform = torch.rand(BATCH, generator=g, dtype=torch.float64).log()
        # Accept x, or try its mirror image, or draw from the rest of the residual.
        accepted = log_uniform < log_ratio(x, p, q)
        mirrored, lost = resample(x, log_uniform, wide_p, wide_q)
        y = torch.where(accepted.unsqueeze(-1), x, mirrored)
        left = ~accepted & lost
        if left.any():
            at = lambda parameters: tuple(t[left] for t in parameters)  # noqa: B023, E731
            y[left], _ = residual(at(wide_p), at(wide_q), draws_from(g, int(left.sum()), x.shape[1]))
        made.append(y)
        how.append(torch.where(accepted, 0, torch.where(left, 2, 1)))
    return torch.cat(made), torch.cat(how)


@pytest.mark.parametrize("name", PAIRS)
def test_the_log_ratio_is_that_of_the_densities(name):
    p, q = PAIRS[name]
    x = 3 * torch.randn(50, 4, CHANNELS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.allclose(log_ratio(x, p, q), distribution(p).log_prob(x) - distribution(q).log_prob(x), atol=1e-10)


@pytest.mark.parametrize("name", PAIRS)
def test_the_mirror_image_has_the_density_of_its_original(name):
    """q(x) dx = p(y) dy for x to y; swapping p and q gives the inverse; the mirror is along the means."""
    p, q = PAIRS[name]
    x = q[0] + q[1].exp() * torch.randn(200, CHANNELS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y = reflect(x, p, q)
    assert torch.allclose(reflect(y, q, p), x)
    jacobian = torch.func.jacrev(lambda x: reflect(x, p, q)[0])(x[:1])[:, 0]
    log_volume = torch.linalg.slogdet(jacobian).logabsdet
    assert torch.allclose(distribution(q).log_prob(x), distribution(p).log_prob(y) + log_volume)
    before, after = standardise(x, q), standardise(y, p)
    axis = (p[0] - q[0]) * torch.exp(-(p[1] + q[1]) / 2)
    if axis.norm() > 0:
        axis = axis / axis.norm()
        assert torch.allclose((after * axis).sum(-1), -(before * axis).sum(-1))
    along = lambda xi: (xi * axis).sum(-1, keepdim=True) * axis  # noqa: E731
    assert torch.allclose(after - along(after), before - along(before))


def test_equal_means_are_not_mirrored_and_equal_gaussians_change_nothing():
    for dtype in (torch.float32, torch.float64):
        p, q = pair(0.0, 0.4, dtype)
        x = torch.randn(20, CHANNELS, generator=torch.Generator().manual_seed(0), dtype=dtype)
        assert torch.allclose(standardise(reflect(x, p, q), p), standardise(x, q), atol=1e-6)
        assert torch.allclose(reflect(x, p, p), x, atol=1e-6)
        assert torch.equal(log_ratio(x, p, p), torch.zeros(20, dtype=dtype))


@pytest.mark.parametrize("name", PAIRS)
def test_the_coupling_draws_p(name):
    p, q = PAIRS[name]
    y, how = coupled(p, q, 60_000)
    assert normal_pvalue(standardise(y, p)) > 1e-3
    assert normal_pvalue(standardise(y[:20_000], q)) < 1e-12  # the test would notice
    counts = torch.bincount(how, minlength=3) / len(how)
    assert counts[0] < 0.99 and counts[1] > 0.01  # some were accepted and some were not
    if name == "other means":
        assert counts[2] < 1e-4  # equal sigmas: the mirror image is always accepted
    else:
        assert counts[2] > 0.003


@pytest.mark.parametrize("gap, ratio", [(0.8, 1.0), (0.5, 1.5), (-1.0, 0.6), (0.0, 2.0)])
def test_acceptance_is_the_overlap(gap, ratio):
    """In one channel, by integration: a draft is accepted with probability 1 - TV; and the draws follow p."""
    p = torch.tensor([[0.3]]).double(), torch.tensor([[0.9]]).double().log()
    q = p[0] - gap, p[1] - math.log(ratio)
    grid = np.linspace(-12, 12, 200_001)
    densities = [stats.norm.pdf(grid, loc.item(), math.exp(scale.item())) for loc, scale in (p, q)]
    overlap = np.minimum(*densities).sum() * (grid[1] - grid[0])
    y, how = coupled(p, q, 60_000)
    accepted = (how == 0).double().mean().item()
    assert accepted == pytest.approx(overlap, abs=4 * (overlap * (1 - overlap) / len(how)) ** 0.5)
    assert normal_pvalue(standardise(y, p)) > 1e-3


def bump(y):
    """An acceptance probability by which the accepted draws of N(0, 1) are N(0, 1/2)."""
    return torch.exp(-0.5 * y.square().sum(-1))


def test_the_first_accepted_candidate_has_the_tilted_distribution():
    zeros = torch.zeros(50_000, 1, CHANNELS, dtype=torch.float64)
    draws = draws_from(torch.Generator().manual_seed(5), len(zeros))
    y, tries = first_accepted((zeros, zeros), bump, draws, 1000)
    assert normal_pvalue(y * 2**0.5) > 1e-3
    rate = 0.5 ** (CHANNELS / 2)  # tries are geometric
    expected = stats.geom.pmf(np.arange(1, 12), rate) * len(tries)
    observed = torch.bincount(tries, minlength=12)[1:12].numpy()
    rest = len(tries) - observed.sum(), len(tries) - expected.sum()
    assert stats.chisquare([*observed, rest[0]], [*expected, rest[1]]).pvalue > 1e-3


@pytest.mark.parametrize("max_tries", [5, 40, 300])
def test_the_first_accepted_candidate_is_by_index_whatever_the_blocks(max_tries, monkeypatch):
    """Against a plain loop over the candidates; if all are rejected: the last candidate, and one more try counted."""
    rows, g = 100, torch.Generator().manual_seed(6)
    normals = torch.randn(rows, max_tries, 1, generator=g, dtype=torch.float64)
    log_uniforms = torch.rand(rows, max_tries, generator=g, dtype=torch.float64).log()
    p = torch.full((rows, 1, 1), 2.0).double(), torch.full((rows, 1, 1), 0.1).double()
    asked = []

    def draws(first, num):
        asked.append((first, num))
        return normals[:, first : first + num], log_uniforms[:, first : first + num]

    candidates = 2 + math.exp(0.1) * normals
    accepted = (log_uniforms < bump(candidates).log()).tolist()
    expected = [1 + (row.index(True) if True in row else max_tries) for row in accepted]
    taken = torch.tensor(expected).clamp(max=max_tries) - 1
    for block in (1, 7, 32, 1000):
        monkeypatch.setattr(verify, "FIRST_BLOCK", block)
        asked.clear()
        y, tries = first_accepted(p, bump, draws, max_tries)
        assert tries.tolist() == expected
        assert torch.allclose(y, candidates[torch.arange(rows), taken], atol=1e-6)  # math.exp and torch.exp
        assert asked[0] == (0, min(block, max_tries)) and sum(num for _, num in asked) <= max_tries
        assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(asked))  # every candidate once
    assert (tries == max_tries + 1).any() == (max_tries == 5) and (tries <= max_tries).any()
