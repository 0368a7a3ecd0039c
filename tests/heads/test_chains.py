"""Chains that speculate have the ancestral chain's distribution, whatever the draft.

The distribution is tested where it is known (Gaussian tokens), and against ancestral chains (mixtures, whose sigma_p
depends on the state). Planted bugs must fail the same test, which shows that it has power.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from distributions import normal_pvalue, same_law_pvalue
from heads import Case, MixtureHead
from mixtures import CENTRES, CHANNELS, MIXTURE, NULL_CLASS, TWELVE, UNGUIDED, ChangedUniforms, biased

from cspd import noise as cspd_noise
from cspd.heads import speculative, verify
from cspd.heads.calibration import Calibration
from mar.head import schedule

ROWS = 6000
RIGHT, WRONG = 1e-3, 1e-9  # p-values: of right code above, of wrong code below


def scattered(case: Case, spread: float) -> Calibration:
    """A draft with random errors in everything."""
    draft, rng = case.calibration(), np.random.default_rng(0)
    changes = {name: getattr(draft, name) + spread * rng.normal(size=getattr(draft, name).shape) for name in DRAFT}
    return dataclasses.replace(draft, **{name: values.astype(np.float32) for name, values in changes.items()})


DRAFT = ("coefficients", "drift")


@functools.cache
def reference(case: Case, rows: int) -> torch.Tensor:
    return case.path(rows, seed=2)


def distribution_pvalue(case: Case, draft: Calibration, window: int, rows: int = ROWS, noise=cspd_noise) -> float:
    """Whether tokens, and log sigma along the way, are those of ancestral chains with other seeds."""
    ended = case.speculative(draft, window, rows, seed=1, noise=noise)
    paths = torch.cat([ended.tokens, ended.log_sigma.unsqueeze(1)], dim=1)
    return same_law_pvalue(reference(case, 3 * rows), paths)


def gaussian_distribution(case: Case) -> tuple[np.ndarray, float]:
    """Mean [d] and standard deviation of the tokens of a head with one component, in float64."""
    s, head, mean, variance = schedule(case.num_steps), case.head, np.zeros(CHANNELS), 1.0
    centre = (case.z[-1] + case.scale * (case.z[0] - case.z[-1]) if len(case.z) > 1 else case.z[0])[0].double().numpy()
    for t in reversed(range(case.num_steps)):
        abar, v = s.alphas_cumprod[t], head.v(s.timestep_map[t])
        gain = np.sqrt(1 - abar) / (abar * head.scales.item() ** 2 + 1 - abar)  # eps = gain (x - sqrt(abar) centre)
        mean = s.mean_x[t] * mean + s.mean_eps[t] * gain * (mean - np.sqrt(abar) * centre)
        variance *= (s.mean_x[t] + s.mean_eps[t] * gain) ** 2
        if t:
            variance += case.temperature**2 * np.exp(2 * (s.log_sigma_base[t] + s.log_sigma_slope[t] * v))
    return mean, variance**0.5


@pytest.mark.parametrize(
    "num_steps, window, frozen, guidance, tau, scale",
    [
        (25, 4, False, 2.5, 1.0, 0.5),
        (25, 12, True, None, 0.7, 0.01),
        (50, 1, True, 2.5, 1.0, 0.01),
        (100, 12, False, None, 1.0, 0.01),
        pytest.param(100, 4, True, None, 1.0, 0.5, marks=pytest.mark.slow),
        (250, 12, False, 2.5, 0.7, 0.01),
    ],
)
def test_gaussian_tokens_have_their_known_distribution(num_steps, window, frozen, guidance, tau, scale):
    z = torch.linspace(0.5, 1.5, CHANNELS) * torch.tensor([1.0, -0.5]).view(2, 1, 1)
    head = MixtureHead(torch.zeros(1, CHANNELS), (scale,))
    case = Case(head, z if guidance else z[:1], num_steps, guidance or 1.0, tau)
    tokens = case.speculative(case.calibration(frozen), window, ROWS, seed=1).tokens
    mean, deviation = gaussian_distribution(case)
    assert normal_pvalue((tokens.double() - torch.from_numpy(mean)) / deviation) > RIGHT


@pytest.mark.parametrize(
    "num_steps, window, frozen, guidance, tau",
    [
        (25, 1, True, None, 1.0),
        (25, 12, False, 2.0, 0.8),
        (50, 4, False, None, 1.0),
        (50, 12, True, None, 1.0),
        (100, 12, False, None, 1.0),
        pytest.param(100, 4, True, 2.0, 1.0, marks=pytest.mark.slow),
        pytest.param(250, 12, False, None, 1.0, marks=pytest.mark.slow),
    ],
)
def test_mixtures_have_the_ancestral_distribution(num_steps, window, frozen, guidance, tau):
    case = Case(MIXTURE, NULL_CLASS if guidance else UNGUIDED, num_steps, guidance or 1.0, tau)
    assert distribution_pvalue(case, case.calibration(frozen), window) > RIGHT


@pytest.mark.slow
def test_a_mixture_comes_out_as_the_mixture():
    """At T = 250 the ancestral chain itself is nearly exact."""
    case = Case(MIXTURE, UNGUIDED, 250)
    tokens = case.speculative(case.calibration(), 24, ROWS, seed=3).tokens
    nearest = torch.cdist(tokens, CENTRES).argmin(1)
    for j, (weight, scale) in enumerate(zip(MIXTURE.weights, MIXTURE.scales)):
        own = tokens[nearest == j]
        assert abs(len(own) / ROWS - weight) < 4 * (weight * (1 - weight) / ROWS) ** 0.5
        assert (own.mean(0) - CENTRES[j]).abs().max() < 5 * scale / len(own) ** 0.5
        assert own.std(0).mean() == pytest.approx(scale.item(), rel=0.06)


DRAFTS = {
    "close": lambda case: scattered(case, 0.02),
    "poor": lambda case: scattered(case, 0.3),
    "hopeless": lambda case: scattered(case, 3.0),
    "biased and narrow": lambda case: biased(case, 0.5, -0.25),
    "biased and wide": lambda case: biased(case, 1.0, 0.3),
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_any_draft_is_exact(draft):
    assert distribution_pvalue(TWELVE, DRAFTS[draft](TWELVE), 3) > RIGHT


def plain_draw(x, log_uniform, p, q):
    return p[0] + p[1].exp() * torch.randn(x.shape, generator=torch.Generator().manual_seed(x.shape[0]))


def always(y):
    return y, torch.zeros(y.shape[:-1], dtype=torch.bool)


def residual_keeping(keep):
    """`residual` with another probability of keeping a candidate."""

    def residual(p, q, draws, first, max_tries):
        p, q = ([t[:, None] for t in gauss] for gauss in (p, q))
        return verify.first_accepted(p, lambda y: keep(y, p, q), draws, max_tries, first)

    return residual


resample, residual = verify.resample, verify.residual
BUGS = {
    "rejected drafts are kept": {"resample": lambda x, log_uniform, p, q: always(x)},
    "a rejected draft becomes a plain draw of p": {"resample": lambda *args: always(plain_draw(*args))},
    "the mirror image is not judged": {"resample": lambda *args: always(resample(*args)[0])},
    "the rejected draft's noise is used again": {
        "resample": lambda x, log_uniform, p, q: always(p[0] + (x - q[0]) * (p[1] - q[1]).exp())
    },
    "q's sigma for p": {"resample": lambda x, log_uniform, p, q: resample(x, log_uniform, (p[0], q[1]), q)},
    "p's sigma for q": {"resample": lambda x, log_uniform, p, q: resample(x, log_uniform, p, (q[0], p[1]))},
    "what is left is drawn from p": {"residual": residual_keeping(lambda y, p, q: torch.ones(y.shape[:-1]))},
    "the mirrored term is left out": {
        "residual": residual_keeping(lambda y, p, q: -torch.expm1(verify.log_ratio(y, q, p).clamp(max=0)))
    },
    "what is left has p and q exchanged": {"residual": lambda p, q, *draws: residual(q, p, *draws)},
    "one uniform draw for all steps": {
        "noise": ChangedUniforms(lambda uniform: uniform[:, :1].expand_as(uniform).clone())
    },
    "uniform draws that favour drafts": {"noise": ChangedUniforms(torch.square)},
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug, monkeypatch):
    changes = dict(BUGS[bug])
    source = changes.pop("noise", cspd_noise)
    for module in (verify, speculative):
        monkeypatch.setattr(module, "MAX_TRIES", 1024)  # some would look for what is not there
    for name, function in changes.items():
        monkeypatch.setattr(verify, name, function)
    drafts = [DRAFTS[name](TWELVE) for name in ("biased and wide", "biased and narrow")]
    assert any(distribution_pvalue(TWELVE, draft, 3, 2 * ROWS, source) < WRONG for draft in drafts)


def test_one_candidate_is_looked_at_for_every_step_judged():
    """On average: `residual` is needed with some probability, and then keeps a candidate with that probability."""
    for name in ("biased and wide", "biased and narrow"):
        ended = TWELVE.speculative(DRAFTS[name](TWELVE), 3, 2 * ROWS, seed=1)
        assert sum(ended.tries) / (2 * ROWS) == pytest.approx(10, rel=0.05)
