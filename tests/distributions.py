"""Tests whether samples follow a distribution. All return a p-value, corrected for the number of tests (Bonferroni)."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats
from torch import Tensor

PROJECTIONS = 40


def directions(channels: int) -> Tensor:
    """Fixed random unit vectors, the axes first: float64 [channels, PROJECTIONS]."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(channels, PROJECTIONS, generator=generator, dtype=torch.float64)
    random[:, :channels] = torch.eye(channels)[:, :PROJECTIONS]
    return random / random.norm(dim=0)


def moments(x: Tensor) -> Tensor:
    """x_i and x_i x_j, each once: [N, d + d (d + 1) / 2]."""
    i, j = torch.triu_indices(x.shape[1], x.shape[1])
    return torch.cat([x, x[:, i] * x[:, j]], dim=1)


def normal_pvalue(x: Tensor) -> float:
    """Whether x [N, d] is standard normal, by projections, radii, and first and second moments."""
    x = x.double()
    num, channels = x.shape
    projections = (x @ directions(channels)).T.numpy()
    pvalues = [stats.kstest(column, "norm", method="asymp").pvalue for column in projections]
    radii = x.square().sum(1).numpy()
    pvalues.append(stats.kstest(radii, "chi2", args=(channels,), method="asymp").pvalue)

    # of x_i the mean is 0, of x_i x_j it is 1 if i = j; the variances are 1, and 2 if i = j
    i, j = torch.triu_indices(channels, channels)
    expected = torch.cat([torch.zeros(channels), (i == j).float()])
    z = (moments(x).mean(0) - expected) * num**0.5 / (1 + expected).sqrt()
    return _corrected([*pvalues, *(2 * stats.norm.sf(z.abs().numpy()))])


def same_law_pvalue(a: Tensor, b: Tensor) -> float:
    """Whether a [N, d] and b [M, d] follow one distribution, by projections, radii, and first and second moments."""
    both = torch.cat([a, b]).double()
    standardised = (both - both.mean(0)) / both.std(0)
    a, b = standardised.split([len(a), len(b)])
    along = directions(a.shape[1])
    pairs = [*zip((a @ along).T, (b @ along).T), (a.norm(dim=1), b.norm(dim=1))]
    pvalues = [stats.ks_2samp(left.numpy(), right.numpy(), method="asymp").pvalue for left, right in pairs]

    a, b = moments(a), moments(b)
    error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
    z = (a.mean(0) - b.mean(0)) / error
    return _corrected([*pvalues, *(2 * stats.norm.sf(z.abs().numpy()))])


def _corrected(pvalues: list[float]) -> float:
    return float(min(1.0, np.min(pvalues) * len(pvalues)))
