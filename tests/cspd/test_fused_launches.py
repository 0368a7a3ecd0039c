"""How many kernels the head's work launches, by PyTorch and by our own: counted on tensors without data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import gpu_costs
import pytest
import torch
from torch import Tensor

from cspd import kernels, noise
from cspd.device import Precision
from cspd.heads import calibrated, chain
from cspd.heads.calibrated import Window
from cspd.heads.speculative import ROUNDS, Chains
from mar.head import Head

pytest.importorskip("triton", reason="there is no Triton here")

from launches import noted

META = torch.device("meta")
DRAFTED = 12
CHAIN = torch.empty(4, dtype=torch.int64, device=META)  # whatever there is of four
ROW = torch.empty(4, 1, device=META)
Z = torch.empty(2, 4, 8, device=META)


@pytest.fixture(params=[pytest.param(False, marks=pytest.mark.slow), True], ids=["by PyTorch", "by kernels"])
def fused(request, monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda device: request.param)
    monkeypatch.setattr(chain, "table_bytes", lambda device: 2**40)
    monkeypatch.setattr(Precision, "_products", lambda self, tf32: contextlib.nullcontext())
    return request.param


def launched(work: Callable[..., Tensor | None], *inputs: Any) -> int:
    """Kernels of some work, but for what it makes once."""
    for _ in range(2):
        with noted() as (launches, operations):
            work(*inputs)
    return len(launches) + len(operations)


def of_steps(head: Head, num_steps: int) -> int:
    return launched(chain.drawing(head, noise, num_steps, Precision("fp32", META)), Z, ROW, ROW, CHAIN, CHAIN)


def of_windows(head: Head, num_calls: int) -> int:
    """Windows of a step, which evaluate the null class in turn."""
    with META:
        columns = torch.empty(1), torch.empty(1, 1, 1), torch.empty(1, 1, 1), torch.empty(2, 3)
    plan = [Window(num_calls - 1 - i, *columns, i % 2 == 0) for i in range(num_calls)]
    draw = calibrated.drawing(head, noise, plan, num_calls, Precision("fp32", META))
    return launched(draw, Z, ROW, ROW, CHAIN, CHAIN)


def rounds_of(head: Head) -> Chains:
    """Chains with slots, to be joined and moved on."""
    with noted():
        chains = Chains(head, torch.empty(100, DRAFTED, 8 + DRAFTED, device=META), Precision("fp32", META), noise)
        chains._reserve(len(CHAIN), num_branches=2)
    chains.rounds = ROUNDS
    return chains


@pytest.mark.parametrize("depth", [1, 3])
def test_launches(depth, fused):
    """As the predictions have them."""
    with META:
        head = Head(16, 8, depth, 8).requires_grad_(False)
    kernels.fuse(head, META)
    steps, calls = ([work(head, num) for num in (4, 8)] for work in (of_steps, of_windows))
    step, window = ((more - few) / 4 for few, more in (steps, calls))
    chains, names = rounds_of(head), torch.empty(4, 3, dtype=torch.int64, device=META)
    found = {
        "step": step,
        "window": window,
        "start": steps[0] - 4 * step,
        "join": launched(chains._join, CHAIN, names, Z, ROW, ROW, 0),
        "round": launched(chains._run_rounds, CHAIN) / ROUNDS,  # with the table of modulations that was joined
    }
    known = gpu_costs.KERNELS if fused else gpu_costs.PYTORCH
    assert found == pytest.approx({part: gpu_costs.count(getattr(known, part), depth) for part in found}, abs=1)


def test_budgets():
    """Of MAR-B, whose head has 6 blocks."""
    assert gpu_costs.count(gpu_costs.KERNELS.step, 6) <= 25
    assert gpu_costs.count(gpu_costs.KERNELS.round, 6) <= 40
