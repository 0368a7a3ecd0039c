"""Chains of tokens that are a mixture of Gaussians, drafts of them, right and wrong, and noise that is changed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from heads import Case, MixtureHead

from cspd import noise
from cspd.heads.calibration import Calibration
from mar.head import schedule

CHANNELS = 3
CENTRES = torch.tensor([[0.9, -0.6, 0.2], [-0.4, 0.7, 1.0], [0.1, -0.2, -1.1]])
MIXTURE = MixtureHead(CENTRES, (0.05, 0.1, 0.2), (0.5, 0.3, 0.2), wobble=0.3)
NULL_CLASS = torch.tensor([[[0.0, 0.0, 0.0]], [[0.3, -0.2, 0.1]]])
UNGUIDED = NULL_CLASS[:1]
TWELVE = Case(MIXTURE, UNGUIDED, 12)
CASE = Case(MIXTURE, UNGUIDED, 60)


@pytest.fixture(scope="module", name="mixture")
def fitted_mixture() -> Calibration:
    return CASE.calibration()


def biased(case: Case, of_mean: float, of_log_sigma: float) -> Calibration:
    """A draft that is off by so many standard deviations a unit of the state, and in log sigma, at every step."""
    s, draft = schedule(case.num_steps), case.calibration()
    coefficients, drift = draft.coefficients.copy(), draft.drift + (of_log_sigma / s.log_sigma_slope)[:, None]
    coefficients[..., 0] += (of_mean * np.exp(s.log_sigma_base) / np.abs(s.mean_eps))[:, None]
    return dataclasses.replace(draft, coefficients=coefficients, drift=drift.astype(np.float32))


class ChangedUniforms:
    """Noise whose uniform draws, which accept drafts, are changed."""

    candidates = staticmethod(noise.candidates)

    def __init__(self, change):
        self.change = change

    def chain(self, *args):
        x, eps, uniform = noise.chain(*args)
        return x, eps, self.change(uniform)
