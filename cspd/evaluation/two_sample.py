"""Whether two samplers differ: a permutation test that needs no assumption on what they draw."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_PAIRS = 8  # fewer can be swapped in too few ways


def energy_test(x: Tensor, y: Tensor, permutations: int = 999, seed: int = 0) -> float:
    """p-value of the hypothesis that paired samples x, y [N, D] have one distribution.

    A permutation test on the energy distance (Szekely & Rizzo 2013). Row i of x and y come from the same seed, so the
    two of a pair are swapped or not; p is uniform if swapping them changes nothing. A small p says that the
    distributions differ; a large one of few samples says little.

    Raises:
        ValueError: the samples' numbers or sizes differ, there are fewer than 8 pairs, or a value is not finite.
    """
    num = len(x)
    if x.shape != y.shape or num < LEAST_PAIRS:
        shapes = f"{list(x.shape)} and {list(y.shape)}"
        raise ValueError(f"samples of {shapes}: give two equally many of one size, {LEAST_PAIRS} or more")
    pooled = torch.cat([x.flatten(1), y.flatten(1)]).double()
    if not pooled.isfinite().all():
        raise ValueError("samples with NaN or infinite values have no distance")
    distances = torch.cdist(pooled, pooled)

    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (permutations + 1, num), generator=generator) * 2.0 - 1
    signs[0] = 1  # the samples as they are
    labels = torch.cat([signs, -signs], dim=1).double()  # +1 for x, -1 for y

    # the energy distance is a quadratic form in the labels
    statistic = -((labels @ distances) * labels).sum(1)
    rounding = 1e-12 * distances.sum()  # samples that are the same have p = 1 in any unit
    as_large = (statistic >= statistic[0] - rounding).sum()
    return (as_large / (permutations + 1)).item()
