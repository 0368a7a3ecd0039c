"""What a speculative chain draws is the same streams, however it is asked for: in one pass, alone, or in blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from cspd.noise import DRAFT_OFFSET, Purpose, candidates, chain, initial, normal, steps, uniform

SEEDS = torch.tensor([0, 7, 2**31, 2**40 + 7, 2**63 - 1])
POSITIONS = torch.tensor([0, 3, 255, 2**16, 11])


@pytest.mark.parametrize("channels", [1, 3, 4, 6, 16])
@pytest.mark.parametrize("num_steps", [2, 3, 7, 100])
def test_a_chains_draws_are_the_streams(num_steps, channels):
    x, eps, uniforms = chain(SEEDS, POSITIONS, num_steps, channels)
    assert torch.equal(x, initial(SEEDS, POSITIONS, channels))
    assert torch.equal(eps.transpose(0, 1), steps(SEEDS, POSITIONS, torch.arange(num_steps), channels))
    assert torch.equal(uniforms, uniform(SEEDS, Purpose.ACCEPT, POSITIONS, num=num_steps))
    assert eps.shape == (5, num_steps, channels) and uniforms.shape == (5, num_steps)
    for i in range(len(SEEDS)):
        alone = chain(SEEDS[i : i + 1], POSITIONS[i : i + 1], num_steps, channels)
        assert all(torch.equal(one[0], many[i]) for one, many in zip(alone, (x, eps, uniforms)))


def test_indices_change_what_they_say():
    """`index` is of x_T and eps_t, `accept_index` of uniform draws; the counters kept from other calls do no harm."""
    plain = chain(SEEDS, POSITIONS, 7, 3)
    other, drafting = chain(SEEDS, POSITIONS, 7, 3, 1), chain(SEEDS, POSITIONS, 7, 3, 0, 1)
    assert torch.equal(other[0], initial(SEEDS, POSITIONS, 3, 1))
    assert torch.equal(other[1].transpose(0, 1), steps(SEEDS, POSITIONS, torch.arange(7), 3, 1))
    assert torch.equal(drafting[2], uniform(SEEDS, Purpose.ACCEPT, POSITIONS, index=1, num=7))
    assert [torch.equal(a, b) for a, b in zip(plain, other)] == [False, False, True]
    assert [torch.equal(a, b) for a, b in zip(plain, drafting)] == [True, True, False]
    assert all(torch.equal(a, b) for a, b in zip(plain, chain(SEEDS, POSITIONS, 7, 3)))


def test_candidates_depend_on_their_index_alone():
    step = torch.tensor([98, 3, 1, 50, 0])
    normals, uniforms = candidates(SEEDS, POSITIONS, step, 0, 700, 3)
    assert normals.shape == (5, 700, 3) and uniforms.shape == (5, 700)
    for first, num in ((0, 1), (0, 32), (32, 128), (160, 512), (699, 1), (5, 3)):
        block = candidates(SEEDS, POSITIONS, step, first, num, 3)
        assert torch.equal(block[0], normals[:, first : first + num])
        assert torch.equal(block[1], uniforms[:, first : first + num])
    which = torch.tensor([3, 1])
    some = candidates(SEEDS[which], POSITIONS[which], step[which], 10, 20, 3)
    assert torch.equal(some[0], normals[which, 10:30]) and torch.equal(some[1], uniforms[which, 10:30])
    at = (SEEDS[1], Purpose.CANDIDATE, POSITIONS[1], step[1], 123)
    assert torch.equal(normals[1, 123], normal(*at, num=3))
    assert len(normals.flatten(0, 1).unique(dim=0)) == len(uniforms.flatten().unique()) == 3500
    apart = candidates(SEEDS, POSITIONS, step, 0, 700, 3, offset=DRAFT_OFFSET)
    assert len(torch.cat([normals, apart[0]]).flatten(0, 1).unique(dim=0)) == 7000


def test_uniform_draws_are_uniform():
    uniforms = chain(torch.arange(64).repeat_interleave(64), torch.arange(64).repeat(64), 100, 2)[2]
    assert 0 < uniforms.min() and uniforms.max() < 1
    assert stats.kstest(uniforms.double().flatten().numpy(), "uniform").pvalue > 0.001
    assert stats.chisquare(torch.histc(uniforms, 256, 0, 1).numpy()).pvalue > 0.001
    correlation = np.corrcoef(uniforms.T)[np.triu_indices(100, 1)] * 64  # of two steps, in standard errors
    assert abs(correlation).max() < 5 and abs(correlation.std() - 1) < 0.1
    drawn = candidates(
        torch.arange(64), torch.zeros(64, dtype=torch.int64), torch.ones(64, dtype=torch.int64), 0, 500, 2
    )
    assert stats.kstest(drawn[1].double().flatten().numpy(), "uniform").pvalue > 0.001
    assert stats.kstest(drawn[0].double().flatten().numpy(), "norm").pvalue > 0.001


def test_purposes_are_independent():
    """A chain's draws at a step, and its candidates and uniform draws: no two are correlated, nor their squares."""
    seeds, positions, k = torch.arange(256).repeat_interleave(64), torch.arange(64).repeat(256), 5
    x, eps, uniforms = chain(seeds, positions, 8, 2)
    normals, candidate_uniforms = candidates(seeds, positions, torch.full_like(seeds, k), 0, 2, 2)
    columns = [*x.T, *eps[:, k].T, *eps[:, k - 1].T, uniforms[:, k], uniforms[:, k - 1], *normals.flatten(1).T]
    drawn = torch.stack([*columns, *candidate_uniforms.T]).double()
    drawn = torch.cat([drawn, (drawn - drawn.mean(1, keepdim=True)).square()])
    correlation = np.corrcoef(drawn)[np.triu_indices(len(drawn), 1)] * len(seeds) ** 0.5
    assert abs(correlation).max() < 5
