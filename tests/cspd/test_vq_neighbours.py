"""Near codes: the order of a plain sort, whatever is done at once."""

import copy

import pytest
import torch
from toys import request_of, toy_models

from cspd.discrete import rules
from cspd.discrete.rules import METRICS, near_codes, neighbours, rule_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("metric", METRICS)
def test_neighbours(metric, dtype, monkeypatch):
    codebook = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    codebook[7], codebook[30] = codebook[21], codebook[21]
    rows = codebook / codebook.norm(dim=-1, keepdim=True) if metric == "cosine" else codebook
    distance = (rows[:, None] - rows).square().sum(-1).tolist()
    expected = [sorted((d, j) for j, d in enumerate(row) if j != i) for i, row in enumerate(distance)]
    for at_once, k in ((2**22, 5), (100, 5), (41, 39), (1, 100)):
        monkeypatch.setattr(rules, "MOST_COMPARED_AT_ONCE", at_once)
        assert neighbours(codebook, k, metric).tolist() == [[j for _, j in row[:k]] for row in expected]
    assert neighbours(codebook, 2, metric)[[7, 21, 30]].tolist() == [[21, 30], [7, 30], [7, 21]]
    with pytest.raises(ValueError, match="l2"):
        neighbours(codebook, 5, "l1")
    with pytest.raises(ValueError, match="k"):
        neighbours(codebook, 0)


@pytest.mark.parametrize("k", [1, 5, 6, 7, 26])
def test_where_many_are_equally_far_the_lower_index_comes_first(k):
    """On a grid, where more codes tie for the last places than there are places."""
    grid = torch.cartesian_prod(*[torch.arange(3.0)] * 3)
    squares = (grid[:, None] - grid).square().sum(-1).int().tolist()
    expected = [sorted((d, j) for j, d in enumerate(row) if j != i)[:k] for i, row in enumerate(squares)]
    assert neighbours(grid, k).tolist() == [[j for _, j in row] for row in expected]


def test_raw_neighbours_are_those_of_the_codebook_as_it_is_stored():
    """The released code of LANTERN takes them; a request can ask for others."""
    tokenizer = copy.deepcopy(toy_models(codes=11)["tokenizer"])
    stored = tokenizer.quantize.embedding.weight
    stored *= torch.arange(1.0, 12).unsqueeze(1)  # as long as they are not in training
    raw, near = (near_codes(tokenizer, metric, 3) for metric in ("raw", "l2"))
    assert torch.equal(raw, neighbours(stored, 3)) and not torch.equal(raw, near)
    assert torch.equal(near, neighbours(tokenizer.codebook, 3))
    metrics = [rule_of(request_of("lantern", published=True, metric=metric)).metric for metric in (None, "cosine")]
    assert metrics == ["raw", "cosine"] and rule_of(request_of("lantern")).metric == "l2"
