"""CSpD's ratio and residual are those of its paper (arXiv 2411.11925), on the bundled pair and on Gaussians."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cspd_by_hand import CHANNELS, TOKEN, denoise, generate, known_target, log_ratio, plain, request  # noqa: F401 - a fixture
from scipy import stats as scipy_stats
from torch import Tensor

import cspd
from cspd import Request, noise
from cspd.masked import cspd as masked_cspd
from cspd.masked.cspd import Paths
from cspd.request import Sequence

# ---- the ratio


@pytest.mark.parametrize("ratio_temperature, sigma", [(42.0, "paper"), (1.0, None), (42.0, "published")])
def test_the_ratio_is_that_of_equation_4(ratio_temperature, sigma):
    """On the bundled pair with 100 steps: 99 terms of log sigma and the last step's tempered Gaussians."""
    engine, known, count = cspd.load("digits32", max_batch=1, device="cpu"), 20, 6
    resolved = engine.resolve(Request(3, 5, method="cspd", cfg=3.0, temperature=0.9, num_sampling_steps=100))
    runner, sequence = engine.runner, Sequence(resolved, 0, slot=0)
    with torch.inference_mode():
        runner.admit([sequence])
        runner.tokens.normal_(generator=torch.Generator().manual_seed(0))
        rows, made, chains = runner.rows([sequence], [known], [count]), [], []
        x = noise.initial(rows.seed, rows.position, CHANNELS).double()
        eps_t = noise.steps(rows.seed, rows.position, torch.arange(100), CHANNELS)
        for name, model in runner.models.items():
            z = runner.conditions([sequence], rows, name)
            made.append(masked_cspd._denoise(runner, name, resolved, rows, z)[0])
            chains.append(denoise(model.head, z, rows.scale, resolved, x, eps_t))
            assert (made[-1].tokens - chains[-1].mean).abs().max() < TOKEN
            assert made[-1].log_sigma.tolist() == pytest.approx(chains[-1].path.tolist(), abs=1e-2)
            assert made[-1].log_sigma_last.flatten().tolist() == pytest.approx(chains[-1].last.flatten().tolist())
    assert ((chains[1].path - chains[0].path).abs() > 0.1).all(), "Sigma does not show"
    (p, q), (p64, q64) = made, chains
    for x in (q.tokens, p.tokens, 2 * p.tokens - q.tokens):
        actual = masked_cspd.log_ratio(x[:, None], p, q, ratio_temperature, sigma).squeeze(1)
        # the tokens themselves are compared above: at ratio temperature 1 their rounding is many sigmas
        p64, q64 = p64._replace(mean=p.tokens.double()), q64._replace(mean=q.tokens.double())
        expected = log_ratio(x.double(), p64, q64, ratio_temperature, sigma)
        assert expected.abs().max() > 1
        assert actual.tolist() == pytest.approx(expected.tolist(), rel=1e-4, abs=2e-2)


# ---- the residual


def denoised(mean: list[float], sigma: list[float], log_sigma: float, rows: int) -> Paths:
    mean, last = (torch.tensor(values).expand(rows, -1) for values in (mean, np.log(sigma).tolist()))
    return Paths(mean, torch.full((rows,), log_sigma), last)


def resample(p: Paths, q: Paths, ratio_temperature: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    index = torch.arange(len(p.tokens))
    rows = SimpleNamespace(seed=seed + index, position=index % 7)
    asked = request(ratio_temperature=ratio_temperature)
    return masked_cspd._resample(SimpleNamespace(noise=noise), asked, rows, index, p, q)


@pytest.mark.parametrize(
    "log_big_sigma, ratio_temperature", [(0.0, 1.0), (-0.4, 1.0), (0.5, 2.0)], ids=["p - q", "Sigma", "tempered"]
)
def test_rejected_tokens_are_drawn_from_the_residual(log_big_sigma, ratio_temperature):
    """They are draws of norm(p max(0, 1 - 1 / ratio)), which is norm(max(0, p - q)) at Sigma = 1 and no tempering."""
    mean_p, sigma_p, mean_q, sigma_q = [0.5, 0.2], [0.8, 1.0], [-0.6, 0.0], [1.0, 0.7]
    axis = np.linspace(-6, 6, 1201)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1)
    p, q = (scipy_stats.norm.pdf(grid, mean, sigma).prod(-1) for mean, sigma in ((mean_p, sigma_p), (mean_q, sigma_q)))
    z_p, z_q = ((grid - np.array(m)) / s / ratio_temperature for m, s in ((mean_p, sigma_p), (mean_q, sigma_q)))
    ratio = np.exp(log_big_sigma + 0.5 * (z_q**2 - z_p**2).sum(-1)) * np.prod(sigma_q) / np.prod(sigma_p)
    wanted = p * np.maximum(0, 1 - 1 / ratio)
    if (log_big_sigma, ratio_temperature) == (0, 1):
        assert np.allclose(wanted, np.maximum(0, p - q), atol=1e-12)
    kept = wanted.sum() * (axis[1] - axis[0]) ** 2
    assert kept > 0.2
    cumulative = [wanted.sum(1 - i).cumsum() / wanted.sum() for i in (0, 1)]

    both = denoised(mean_p, sigma_p, 0.0, 2000), denoised(mean_q, sigma_q, log_big_sigma, 2000)
    drawn = [resample(*both, ratio_temperature, seed) for seed in range(0, 100_000, 2000)]
    y, tries = (torch.cat(values).double().numpy() for values in zip(*drawn))
    for i in (0, 1):
        cdf = functools.partial(np.interp, xp=axis + 0.005, fp=cumulative[i])
        assert scipy_stats.kstest(y[:, i], cdf).pvalue > 1e-3
    product = (grid.prod(-1) * wanted).sum() / wanted.sum()  # the channels are not independent
    assert abs(y.prod(1).mean() - product) < 4 * y.prod(1).std() / len(y) ** 0.5
    assert tries.mean() == pytest.approx(1 / kept, rel=0.03)


def test_where_no_candidate_is_kept_the_targets_own_token_is_taken():
    p = denoised([0.5, 0.2], [0.8, 1.0], 0.0, 50)
    y, tries = resample(p, p, 42.0)
    assert torch.equal(y, p.tokens)
    assert (tries == masked_cspd.MAX_TRIES + 1).all() and masked_cspd.MAX_TRIES == 100


def test_fallbacks_are_counted(target):
    """Uniform draws above 1 reject even a perfect draft. Its residual is empty: the target's own tokens are taken."""

    def above_one(seed: Tensor, position: Tensor) -> Tensor:
        return torch.full(seed.shape, 2.0)

    asked = request(verify="sequential", gamma=2, prefill=0.75)
    (output,), (expected,) = (
        generate(target, target, asked, token_accept_uniforms=above_one),
        generate(target, None, plain()),
    )
    assert (output.tokens - expected.tokens).abs().max() < TOKEN
    assert output.stats.alpha == 0
    assert (output.stats.fallbacks, output.stats.resample_tries) == (16, 1600)
