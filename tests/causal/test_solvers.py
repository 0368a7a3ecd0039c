"""Euler and Heun solve the head's equation to first and second order."""

from __future__ import annotations

import pytest
import torch
from cspd.causal.solvers import grid, solve
from heads import CHANNELS, FP32
from velocity import VelocityHead

X = torch.linspace(-1.5, 1.5, 5).view(5, 1).repeat(1, CHANNELS)
SPREAD, CENTRE = 0.4, 0.7


def solved(order: int, head_calls: int, binary: bool, guided: bool) -> torch.Tensor:
    head = VelocityHead(torch.full((1, CHANNELS), CENTRE), (SPREAD,), binary=binary)
    z = torch.zeros(2 if guided else 1, 5, CHANNELS)
    return solve(head, z, torch.full((5, 1), 3.0), X, grid(head_calls, order), FP32)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("guided", [False, True])
def test_order_of_convergence(binary, guided):
    """Of a Gaussian the flow maps noise to centre + spread noise."""
    exact = CENTRE + SPREAD * X
    sizes = (8, 16) if binary else (40, 80)  # near t = 1 BitDance's velocity is cut off
    for order, least in ((1, 1.7), (2, 3.0)):
        errors = [(solved(order, order * n, binary, guided) - exact).abs().max() for n in sizes]
        assert errors[0] / errors[1] > least


def test_head_calls():
    assert grid(1, 1) == grid(1, 2) == [(0.0, 1.0, False)]
    assert grid(5, 2) == grid(6, 2)
    assert [len(grid(n, 2)) for n in (1, 2, 3, 9)] == [1, 1, 3, 9]
    t, dt, corrects = zip(*grid(5, 2))
    assert t == pytest.approx([0, 1 / 3, 1 / 3, 2 / 3, 2 / 3]) and set(dt) == {1 / 3}
    assert corrects == (False, True, False, True, False)
