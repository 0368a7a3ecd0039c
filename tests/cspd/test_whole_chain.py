"""Whole chains as functions of tensors: no host read, no shape from data, so that graphs can have them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from graphs import replayed

from cspd import noise
from cspd.device import Precision
from cspd.heads import calibrated
from cspd.heads import chain as heads_chain
from cspd.heads.calibrated import Predictor
from cspd.heads.calibrated import windows as plan_windows
from cspd.heads.calibration import frozen
from mar.head import Head

CPU = torch.device("cpu")
STEPS, CHANNELS, ROWS = 5, 4, 3
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)


def by_windows(head, precision):
    coefficients, drift = frozen(STEPS)
    predictor = Predictor(coefficients, drift, np.zeros_like(drift))
    plan = plan_windows((4, 3, 2, 0), predictor, np.zeros((4, 2)), 3, CPU)  # the third leaves out the null class
    return calibrated.drawing(head, noise, plan, STEPS, precision)


CHAINS = {
    "ancestral": lambda head, precision: heads_chain.drawing(head, noise, STEPS, precision),
    "calibrated": by_windows,
}


@pytest.fixture(scope="module")
def head():
    torch.manual_seed(0)
    head = Head(CHANNELS, 8, 1, 6).requires_grad_(False)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def inputs(seed):
    """z, scale, temperature, seed and position."""
    g = torch.Generator().manual_seed(seed)
    z, scale = torch.randn(2, ROWS, 6, generator=g), 1 + torch.rand(ROWS, 1, generator=g)
    return z, scale, torch.ones(ROWS, 1), torch.arange(ROWS) + 2**40 + seed, torch.arange(ROWS)


@pytest.mark.skipif(OLD, reason="torch 2.6 does not trace the weak dictionary of Precision, 2.9 does")
@pytest.mark.parametrize("policy", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_it_is_traced_in_one_piece(chain, policy, head):
    draw = CHAINS[chain](head, Precision(policy, CPU))
    expected = draw(*inputs(1))
    traced = torch.compile(draw, fullgraph=True, backend="eager")
    assert torch.equal(traced(*inputs(1)), expected)


@pytest.mark.parametrize("chain", CHAINS)
def test_it_is_replayed_on_other_inputs(chain, head):
    draw, graphs = CHAINS[chain](head, Precision("bf16", CPU)), replayed()
    for seed in (1, 2, 1):
        assert torch.equal(graphs.run("chain", draw, *inputs(seed)), draw(*inputs(seed)))
