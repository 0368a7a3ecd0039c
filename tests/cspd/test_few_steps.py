"""Few-step denoisers: annealed chains are plain chains of the right lengths, solvers solve, and both fit in anywhere."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from conftest import relative_error
from heads import FP32, MixtureHead

from cspd import Engine, MARModels, Request, noise
from cspd.continuous import ancestral
from cspd.continuous.annealed import chain_lengths
from cspd.continuous.denoiser import DENOISERS
from cspd.continuous.solvers import solve
from cspd.engine import Engine as EngineType
from mar.diffusion import respaced, schedule

CENTRE, Z, SCALE = np.array([0.5, -1.0, 0.3, 0.0]), 0.2, 2.0
SOLVERS = {"ddim": 1, "dpm-solver++": 2}
ABAR = schedule(1000).alphas_cumprod


# Annealed chains


def lengths_of_the_code(num_iter, upper, lower, anneal):
    """Chain lengths of iterations 0 .. K - 1, transcribed from DiSA's formulas one by one."""
    found = []
    for k in range(num_iter):
        share = {
            "linear": (num_iter - 1 - k) / (num_iter - 1),
            "cosine": (math.cos(math.pi * k / (num_iter - 1)) + 1) / 2,
            "two-stage": 1 if k < (num_iter - 1) / 2 else 0,
        }[anneal]
        found.append(lower + int(share * (upper - lower)))
    return found


@pytest.mark.parametrize("anneal", ["linear", "cosine", "two-stage"])
def test_chain_lengths_are_the_formulas(anneal):
    for num_iter in (2, 3, 16, 64):
        iterations, of = np.arange(num_iter), np.full(num_iter, num_iter)
        found = chain_lengths(iterations, of, 50, 5, anneal).tolist()
        assert found == lengths_of_the_code(num_iter, 50, 5, anneal)
        assert found[0] == 50 and found[-1] == 5
    assert chain_lengths(np.array([0]), np.array([1]), 50, 5, anneal) == 50


ANNEALED = {"upper": 12, "lower": 4, "cfg": 2.0}


@pytest.fixture
def annealing(small_mar):
    """An engine, and the rows of three sequences at different iterations, each two iterations long."""
    engine = Engine(MARModels(small_mar), max_batch=3, device="cpu")
    batch = []
    for i, (num_iter, iteration) in enumerate([(4, 1), (9, 0), (6, 4)]):
        request = engine.resolve(Request(i, seed=i, method="disa", num_iter=num_iter, **ANNEALED))
        ticket = EngineType._queue(engine, request)
        batch.append((ticket, iteration))
    sequences = engine.scheduler.admit()
    host = engine.host
    host.admit(sequences)
    return host, sequences
