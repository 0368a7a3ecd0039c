"""Near codes: the order of a plain sort, whatever is done at once."""

import pytest
import torch

from cspd.discrete import neighbours as module
from cspd.discrete.neighbours import neighbours
from cspd.discrete.rules import METRICS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("metric", METRICS)
def test_neighbours(metric, dtype, monkeypatch):
    codebook = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    codebook[7], codebook[30] = codebook[21], codebook[21]
    rows = codebook / codebook.norm(dim=-1, keepdim=True) if metric == "cosine" else codebook
    distance = (rows[:, None] - rows).square().sum(-1).tolist()
    expected = [sorted((d, j) for j, d in enumerate(row) if j != i) for i, row in enumerate(distance)]
    for at_once, k in ((2**22, 5), (100, 5), (41, 39), (1, 100)):
        monkeypatch.setattr(module, "MOST_AT_ONCE", at_once)
        assert neighbours(codebook, k, metric).tolist() == [[j for _, j in row[:k]] for row in expected]
    assert neighbours(codebook, 2, metric)[[7, 21, 30]].tolist() == [[21, 30], [7, 30], [7, 21]]
    with pytest.raises(ValueError, match="l2, cosine"):
        neighbours(codebook, 5, "l1")
    with pytest.raises(ValueError, match="k=0"):
        neighbours(codebook, 0)


@pytest.mark.parametrize("k", [1, 5, 6, 7, 26])
def test_where_many_are_equally_far_the_lower_index_comes_first(k):
    """On a grid, where more codes tie for the last places than there are places."""
    grid = torch.cartesian_prod(*[torch.arange(3.0)] * 3)
    squares = (grid[:, None] - grid).square().sum(-1).int().tolist()
    expected = [sorted((d, j) for j, d in enumerate(row) if j != i)[:k] for i, row in enumerate(squares)]
    assert neighbours(grid, k).tolist() == [[j for _, j in row] for row in expected]
