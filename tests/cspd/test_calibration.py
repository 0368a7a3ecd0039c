"""The fitted draft is the best linear one and its calls are foretold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from heads import Case, MixtureHead
from mixtures import CASE, fitted_mixture  # noqa: F401 - a fixture

from cspd.heads.calibration import WINDOWS, fit
from cspd.heads.verify import move
from mar.head import schedule


@pytest.mark.parametrize("num_steps", [10, 100])
def test_a_linear_head_is_drafted_without_error(num_steps):
    """But from x_T, where eps' and x' are nearly the same and the ridge rules: a call more at most."""
    case = Case(MixtureHead(torch.zeros(1, 3), (0.5,)), torch.tensor([[[1.0, -0.5, 2.0]]]), num_steps, temperature=0.9)
    draft = case.calibration()
    for window, calls in zip(WINDOWS, draft.calls):
        least = 1 + -(-(num_steps - 1) // min(window, num_steps))
        assert calls.min() == least and calls.max() <= least + 1
    for window in (4, 10):
        record = case.speculative(draft, window, 50, seed=1).record
        assert (record[:, : num_steps - 2] >= 0).all()


@pytest.mark.parametrize("window", [2, 4, 12, 32])
@pytest.mark.parametrize("frozen", [False, True])
def test_calls_are_foretold(window, frozen, mixture):
    """A frozen draft's errors last, so that its hits come together: a little less exactly."""
    draft = CASE.calibration(frozen=True) if frozen else mixture
    measured = (CASE.speculative(draft, window, 400, seed=1).record != 0).sum(1).double()
    foretold = draft.calls[WINDOWS.index(window)]
    assert foretold.mean() == pytest.approx(measured.mean().item(), rel=0.1 if frozen else 0.04)
    assert foretold.std() == pytest.approx(measured.std().item(), rel=0.3)


def test_the_fit_pays(mixture):
    twelve = WINDOWS.index(12)
    assert mixture.calls[twelve].mean() < 0.6 * CASE.calibration(frozen=True).calls[twelve].mean()


def test_the_fit_is_weighted_least_squares(mixture):
    """Against numpy's, at a few steps and lags: as small a residual; lags beyond T - 1 stay frozen."""
    (x, eps, v), s = CASE.traces(256, 2**40).double().numpy(), schedule(60)
    for k, lag in [(1, 1), (1, 2), (1, 32), (5, 3), (30, 12), (30, 28), (50, 1)]:
        root_weight = np.exp(-s.log_sigma_slope[k] * v[k]).ravel()
        features = np.stack([x[k].ravel(), eps[k + lag].ravel(), x[k + lag].ravel()], axis=1)
        best = np.linalg.lstsq(features * root_weight[:, None], eps[k].ravel() * root_weight, rcond=None)[0]
        errors = [(features @ c - eps[k].ravel()) * root_weight for c in (mixture.coefficients[k, lag - 1], best)]
        fitted, least = (np.square(error).mean() ** 0.5 for error in errors)
        assert fitted == pytest.approx(least, rel=1e-4)
        assert mixture.drift[k, lag - 1] == pytest.approx((v[k] - v[k + lag]).mean(), abs=1e-5)
    assert mixture.coefficients[30, 29:].tolist() == [[0, 1, 0]] * 3 and not mixture.drift[30, 29:].any()


def test_frozen_is_frozen():
    draft = CASE.calibration(frozen=True)
    assert (draft.coefficients == [0, 1, 0]).all() and not draft.drift.any()
    assert draft.coefficients.shape == (60, 32, 3) and draft.calls.shape == (len(WINDOWS), 256)
    assert draft.calls.dtype == np.int16


def test_few_steps_have_few_lags():
    x = torch.randn(3, 5, 8, 4, generator=torch.Generator().manual_seed(0))
    draft = fit(*x, temperature=1.0)
    assert draft.coefficients.shape == (5, 5, 3) and np.isfinite(draft.coefficients).all()
    assert (draft.calls >= 2).all() and (draft.calls <= 5).all()


def test_what_is_wrong_with_a_calibration_is_said(mixture):
    mixture.check(60)
    with pytest.raises(ValueError, match="float32"):
        mixture.check(50)
    drift = mixture.drift.copy()
    drift[3, 3] = np.nan
    with pytest.raises(ValueError):
        dataclasses.replace(mixture, drift=drift).check(60)


def test_chains_that_are_not_finite_leave_the_fit_to_the_others():
    traces = CASE.traces(256, 2**40)
    expected = fit(*traces, CASE.temperature)
    beside = torch.cat([traces, torch.full_like(traces[:, :, :2], torch.nan)], dim=2)
    draft = fit(*beside, CASE.temperature)
    assert np.array_equal(draft.coefficients, expected.coefficients) and np.array_equal(draft.drift, expected.drift)
    assert (draft.calls[:, -2:] == 60).all()  # those are never accepted
    draft.check(60)


@pytest.mark.parametrize("value", [torch.nan, 1e30])
def test_no_fit_is_frozen(value):
    draft = fit(*torch.full((3, 6, 8, 4), value), 1.0)
    assert (draft.coefficients == [0, 1, 0]).all() and not draft.drift.any()
    draft.check(6)


def test_a_round_that_decides_no_step_is_an_error(mixture):
    """And not a loop without end."""
    chains = CASE.chains(mixture, 4)
    CASE.start(chains, 3, seed=1)
    chains._move = lambda *args: move(*args)._replace(left=CASE.num_steps - 1 - torch.tensor([1, 0, 2]))
    with pytest.raises(RuntimeError):
        chains.advance()
