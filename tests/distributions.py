"""Are these samples of that distribution? Answers are p-values, corrected for their number (Bonferroni)."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats
from torch import Tensor

PROJECTIONS = 40


def directions(channels: int) -> Tensor:
    """Fixed random unit vectors, the axes first: float64 [channels, PROJECTIONS]."""
    random = torch.randn(channels, PROJECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    random[:, :channels] = torch.eye(channels)[:, :PROJECTIONS]
    return random / random.norm(dim=0)


def moments(x: Tensor) -> Tensor:
    """x_i and x_i x_j, each once: [N, d + d (d + 1) / 2]."""
    i, j = torch.triu_indices(x.shape[1], x.shape[1])
    return torch.cat([x, x[:, i] * x[:, j]], dim=1)


def normal_pvalue(x: Tensor) -> float:
    """Whether x [N, d] is standard normal: projections, radii, first and second moments."""
    x = x.double()
    (n, d), along = x.shape, (x @ directions(x.shape[1])).T.numpy()
    pvalues = [stats.kstest(column, "norm", method="asymp").pvalue for column in along]
    pvalues.append(stats.kstest(x.square().sum(1).numpy(), "chi2", args=(d,), method="asymp").pvalue)
    expected = moments(torch.zeros(1, d))[0] + torch.cat(
        [torch.zeros(d), torch.eye(d)[tuple(torch.triu_indices(d, d))]]
    )
    z = (moments(x).mean(0) - expected) * n**0.5 / (1 + expected).sqrt()
    return _corrected([*pvalues, *(2 * stats.norm.sf(z.abs().numpy()))])


def same_law_pvalue(a: Tensor, b: Tensor) -> float:
    """Whether a [N, d] and b [M, d] are of one distribution: projections, radii, first and second moments."""
    both = torch.cat([a, b]).double()
    a, b = ((both - both.mean(0)) / both.std(0)).split([len(a), len(b)])
    pairs = [*zip((a @ directions(a.shape[1])).T, (b @ directions(b.shape[1])).T), (a.norm(dim=1), b.norm(dim=1))]
    pvalues = [stats.ks_2samp(left.numpy(), right.numpy(), method="asymp").pvalue for left, right in pairs]
    a, b = moments(a), moments(b)
    z = (a.mean(0) - b.mean(0)) / (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
    return _corrected([*pvalues, *(2 * stats.norm.sf(z.abs().numpy()))])


def _corrected(pvalues: list[float]) -> float:
    return float(min(1.0, np.min(pvalues) * len(pvalues)))
