"""Whether two samplers differ: a permutation test that needs no assumption on what they draw."""

from __future__ import annotations

import torch
from torch import Tensor


def energy_test(x: Tensor, y: Tensor, permutations: int = 999, seed: int = 0) -> float:
    """p-value of the hypothesis that paired samples x, y [N, D] have one law (energy distance, Szekely & Rizzo 2013).

    Row i of x and y come from the same seed, so labels are permuted within pairs; p is uniform if swapping the two of
    a pair changes nothing. A small p says that the laws differ; a large one of few samples says little.

    Raises:
        ValueError: fewer than 8 pairs, of which there are too few ways to permute.
    """
    num = len(x)
    if num != len(y) or num < 8:
        raise ValueError(f"{num} and {len(y)} samples: give two equally many, 8 or more")
    pooled = torch.cat([x.flatten(1), y.flatten(1)]).double()
    distances = torch.cdist(pooled, pooled)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (permutations + 1, num), generator=generator) * 2.0 - 1
    signs[0] = 1
    labels = torch.cat([signs, -signs], dim=1).double()  # +1 for x: the energy distance is a quadratic form in them
    statistic = -((labels @ distances) * labels).sum(1)
    return ((statistic >= statistic[0] - 1e-9).sum() / (permutations + 1)).item()
