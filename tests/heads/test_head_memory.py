"""The head's modulations are the largest tensors of a chain: those of the calls behind are gone when more are made."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from heads import FP32
from torch.multiprocessing.reductions import StorageWeakRef

from cspd import noise
from cspd.heads import chain as heads_chain
from cspd.heads.calibrated import Predictor, make_segments, sample
from cspd.heads.calibration import frozen
from cspd.heads.solvers import solve
from mar.head import Head, schedule

ROWS, CHANNELS, STEPS = 5, 4, 6
SEED, POSITION = torch.arange(ROWS), torch.arange(ROWS)


def eps(t):
    return noise.steps(SEED, POSITION, t, CHANNELS)


def by_windows(head, z, scale, temperature, x):
    coefficients, drift = frozen(STEPS)
    predictor = Predictor(coefficients, drift, np.zeros_like(drift))
    plan = make_segments((5, 3, 2, 1, 0), predictor, np.zeros((5, 2)), 2, z.device)
    sample(head, z, scale, temperature, x, eps, plan, STEPS, FP32)


CHAINS = {
    "ancestral": lambda head, z, scale, temperature, x: heads_chain.ancestral(
        head, z, scale, temperature, x, eps, STEPS, FP32
    ),
    "calibrated": by_windows,
    "solver": lambda head, z, scale, temperature, x: solve(head, z, scale, x, schedule(STEPS), 1, FP32),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_of_one_part_at_a_time(chain, monkeypatch):
    head, made, most = Head(CHANNELS, 8, 1, 6), [], 0
    monkeypatch.setattr("cspd.heads.chain.MODULATION_BYTES", 1)  # a call at a time

    def count(module, args, output):
        nonlocal most
        most = max(most, sum(not ref.expired() for ref in made))
        made.append(StorageWeakRef(output.untyped_storage()))

    head.final_layer.adaLN_modulation[1].register_forward_hook(count)
    ones, x = torch.ones(ROWS, 1), noise.initial(SEED, POSITION, CHANNELS)
    with torch.inference_mode():
        CHAINS[chain](head, torch.randn(2, ROWS, 6), ones, ones, x)
    assert len(made) > 4 and most == 0


def test_noise_of_many_steps_is_that_of_each(monkeypatch):
    monkeypatch.setattr(noise, "MOST_AT_ONCE", 3 * ROWS * CHANNELS)  # three steps at a time
    t = torch.tensor([9, 0, 5, 3, 7, 1, 2])
    assert torch.equal(eps(t), torch.cat([eps(step) for step in t.split(1)]))
