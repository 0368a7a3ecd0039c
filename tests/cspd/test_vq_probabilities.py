"""Draws from distributions of codes: one, and siblings without replacement."""

import torch

from cspd.discrete import rules
from cspd.discrete.rules import draw_siblings, likeliest, point, sample, without


def test_samples_follow_the_weights_and_never_have_probability_zero():
    weights = torch.tensor([0.0, 3, 0, 5, 7, 1, 0, 0])
    codes = sample((weights / 16).expand(16, -1), (torch.arange(16) + 0.5) / 16)
    assert torch.equal(torch.bincount(codes, minlength=8).float(), weights) and (codes.diff() >= 0).all()
    P = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).mul(8).softmax(-1)
    P = P.masked_fill(P < P.quantile(0.9, dim=-1, keepdim=True), 0)
    for u in (0.0, 2.0**-24, 0.5, 1 - 2.0**-24, 1 - 2.0**-53, 1.0):
        codes = sample(P, torch.full((64,), u, dtype=torch.float64))
        assert (P.gather(-1, codes[:, None]) > 0).all()
    last = (P > 0).int().cumsum(-1).argmax(-1)
    assert torch.equal(sample(P, torch.ones(64)), last)


def test_a_parallel_sum_that_rounds_upwards_gives_no_token_of_probability_zero(monkeypatch):
    exactly = torch.Tensor.cumsum
    monkeypatch.setattr(rules, "_adds_in_parallel", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda t, dim: exactly(t, dim) + 1e-15 * torch.arange(t.shape[dim]))
    assert sample(torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]] * 2), torch.tensor([2.0**-24, 1.0])).tolist() == [1, 3]
    assert sample(torch.tensor([0.5, 0.0, 0.0, 0.5]), torch.tensor(0.5)) == 3


def test_siblings_drawn_without_replacement():
    """Counts over a grid of uniforms are those of drawing one after the other; what is used up gives -1."""
    Q, grid = torch.tensor([0.5, 0.0, 0.25, 0.25]).double(), (torch.arange(12) + 0.5) / 12
    u = torch.cartesian_prod(grid, grid, grid[:1], grid[:1])
    drawn = draw_siblings(Q.expand(len(u), -1), u)
    assert (drawn[:, 3] == -1).all() and (drawn[:, :3] >= 0).all() and not (drawn == 1).any()
    pairs_drawn = drawn[:, 0] * 4 + drawn[:, 1]
    counts = {(a, b): int((pairs_drawn == a * 4 + b).sum()) for a in range(4) for b in range(4)}
    seen = {(0, 2): 36, (0, 3): 36, (2, 0): 24, (2, 3): 12, (3, 0): 24, (3, 2): 12}
    assert {pair: n for pair, n in counts.items() if n} == seen


def test_without_and_point():
    Q = torch.tensor([[0.5, 0.1, 0.4], [0.0, 0.0, 1.0], [0.5, 0.1, 0.4]]).double()
    left = without(Q, torch.tensor([0, 2, 1]))
    assert torch.allclose(left, torch.tensor([[0.0, 0.2, 0.8], [0, 0, 0], [5 / 9, 0.0, 4 / 9]]).double())
    assert point(torch.tensor([2, 0, 1]), Q).tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]


def test_the_likeliest_codes():
    Q = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]])
    assert likeliest(Q, 2).tolist() == [[1, 2], [0, 2]]
    assert likeliest(Q, 5).tolist() == [[1, 2, 0, -1, -1], [0, 2, 1, -1, -1]]
