"""Euler and Heun solve the head's equation to first and second order."""

from __future__ import annotations

import pytest
import torch
from heads import CHANNELS, FP32, Given
from velocity import VelocityHead

from cspd.heads.chain import Chain, Inputs
from cspd.heads.samplers import euler, heun

X = torch.linspace(-1.5, 1.5, 5).view(5, 1).repeat(1, CHANNELS)
SPREAD, CENTRE = 0.4, 0.7


SAMPLERS = {1: euler, 2: heun}


def chain_of(binary: bool, guided: bool) -> Chain:
    head = VelocityHead(torch.full((1, CHANNELS), CENTRE), (SPREAD,), binary=binary)
    z, names = torch.zeros(2 if guided else 1, 5, CHANNELS), torch.arange(5)
    inputs = Inputs(z, torch.full((5, 1), 3.0), torch.ones(5, 1), names, names)
    return Chain(head, head.schedule(8), inputs, Given(X), FP32)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("guided", [False, True])
def test_order_of_convergence(binary, guided):
    """Of a Gaussian the flow maps noise to centre + spread noise."""
    exact = CENTRE + SPREAD * X
    sizes = (8, 16) if binary else (40, 80)  # near t = 1 BitDance's velocity is cut off
    for order, least in ((1, 1.7), (2, 3.0)):
        solved = [SAMPLERS[order](chain_of(binary, guided), head_calls=order * n) for n in sizes]
        errors = [(tokens - exact).abs().max() for tokens in solved]
        assert errors[0] / errors[1] > least


def calls(order: int, head_calls: int) -> list[float]:
    """The times of the head's calls, which the chain has counted."""
    chain, seen = chain_of(binary=False, guided=True), []
    times = chain.head.time_embed
    chain.head.time_embed = lambda names: seen.append(times(names)) or seen[-1]
    SAMPLERS[order](chain, head_calls=head_calls)
    (embedded,) = seen
    assert chain.tally.of_rows(5).tolist() == [[len(embedded)] * 5, [2 * len(embedded)] * 5]
    return embedded.flatten().tolist()


def test_head_calls():
    """Heun takes two calls a step, and one at the last: of an even number it leaves out one."""
    assert calls(1, 1) == calls(2, 1) == [0.0]
    assert calls(1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert calls(2, 5) == calls(2, 6) == pytest.approx([0, 1 / 3, 1 / 3, 2 / 3, 2 / 3])
    assert [len(calls(2, n)) for n in (1, 2, 3, 9)] == [1, 1, 3, 9]
