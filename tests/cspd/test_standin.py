"""Every method on a stand-in for CUDA: no mix of devices, the CPU's tokens, and what its rounds cost."""

from __future__ import annotations

import copy
from collections.abc import Set
from typing import NamedTuple

import numpy as np
import pytest
import standin
import torch
from toys import toy_mar, toy_models

from cspd import Engine, MARModels, Request, VQModels

MAR = {"cfg": 2.0, "num_iter": 3, "num_sampling_steps": 5}
LATE = MAR | {"first_timestep": 950}
VQ = {"cfg": 2.0, "temperature": 1.0, "top_k": 3, "top_p": 1.0}
FINISH = {"cspd/discrete/host.py finish"}
RESIDUAL = {"cspd/continuous/gaussian.py first_kept"}
CHAINS = {"cspd/continuous/chains.py advance", "cspd/continuous/chains.py _draw_residual"}
CHAINS |= {"cspd/continuous/speculative.py run_round"}
COMPARE = {"cspd/continuous/cspd_method.py _speculate"}
LENGTHS = {"cspd/continuous/frequency_weighted.py denoise"}


class Case(NamedTuple):
    """A request's settings, and what its rounds cost at most.

    Attributes:
        kernels: of a round, on the average. reads: where the host waits for the device, before the last round.
    """

    settings: dict
    kernels: int
    reads: Set[str] = frozenset()


CASES = {  # by family and method
    "MAR ar": Case(LATE, 600),
    "MAR speculative": Case(MAR | {"window": 3, "draft": "frozen"}, 880, CHAINS | RESIDUAL),
    "MAR calibrated": Case(MAR | {"head_calls": 3}, 570),
    "MAR disa": Case(LATE | {"upper": 6, "lower": 3}, 600),
    "MAR ddim": Case(LATE, 520),
    "MAR dpm-solver++": Case(LATE, 540),
    "MAR lazymar": Case(LATE | {"warmup": 1, "refresh": 2}, 620),
    "MAR gtr": Case(LATE, 1620, LENGTHS),
    "MAR cspd": Case(LATE | {"gamma": 3}, 2320, COMPARE | RESIDUAL),
    "VQ ar": Case(VQ, 116),
    "VQ sd": Case(VQ | {"gamma": 3}, 690, FINISH),
    "VQ sjd-pac": Case(VQ | {"window": 6, "pd_k": 2, "pd_d": 2}, 415, FINISH),
    "VQ eagle": Case(VQ | {"gamma": 2}, 945, FINISH),
    "VQ eagle2": Case(VQ | {"gamma": 2}, 1150, FINISH),
    "VQ cool-sd": Case(VQ | {"gamma": 2}, 970, FINISH),
    "VQ lantern": Case(VQ | {"gamma": 2, "k": 3}, 1630, FINISH),
}
STILL_BLOCKING = {  # where rounds wait for a copy to the device
    "cspd/continuous/ancestral.py ancestral",
    "cspd/continuous/ancestral.py by_length",
    "cspd/continuous/ancestral.py modulated",
    "cspd/continuous/cached_backbone.py _inputs",
    "cspd/continuous/cached_backbone.py _refreshed",
    "cspd/continuous/cached_head.py _last_layers",
    "cspd/continuous/chains.py __init__",
    "cspd/continuous/chains.py _draw_residual",
    "cspd/continuous/chains.py _keep_rows",
    "cspd/continuous/chains.py _leave",
    "cspd/continuous/chains.py start",
    "cspd/continuous/plan.py windows",
    "cspd/continuous/speculative.py advance",
    "cspd/continuous/speculative.py make_chains",
    "cspd/discrete/batch.py batch_of",
    "cspd/discrete/host.py admit",
    "cspd/discrete/host.py results",
    "cspd/discrete/probabilities.py _least_kept",
    "cspd/noise.py bits",
    "mar/cached.py lazy",
    "mar/cached.py refresh",
    "mar/model.py arrange",
    "mar/model.py encode",
}
QUICK = ["MAR ar", "VQ ar"]


def models(family: str) -> MARModels | VQModels:
    return VQModels(**toy_models(codes=11, length=9)) if family == "VQ" else MARModels(toy_mar(), toy_mar(2))


def requests_of(case: str) -> list[Request]:
    """Three requests: in two slots, the last one starts late."""
    family, method = case.split()
    return [Request(seed, seed, method, family=family, **CASES[case].settings) for seed in range(3)]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_rounds(case):
    """The CPU's tokens by no more kernels, reads and blocking copies than are known of."""
    own, requests = models(case.split()[0]), requests_of(case)
    expected = Engine(copy.deepcopy(own), max_batch=2, device="cpu").generate(requests)
    with standin.cuda() as gpu:
        engine = Engine(own, max_batch=2, device="cuda:0")
        engine.generate(requests[:1])  # makes what is kept
        gpu.reset()
        for request in requests:
            engine.add_request(request)
        outputs, rounds = {}, 0
        while len(engine.scheduler):
            reads = {place.function for place in gpu.reads}  # at the end the host waits for the images
            outputs |= engine.step()
            rounds += 1
    for output, on_cpu in zip(map(outputs.get, sorted(outputs)), expected, strict=True):
        assert torch.equal(output.tokens, on_cpu.tokens)
    assert gpu.kernels.total() / rounds <= CASES[case].kernels, gpu.by_function
    assert reads <= CASES[case].reads
    assert {place.function for place in gpu.blocking} <= STILL_BLOCKING


def between_head_calls(request: Request) -> int:
    """Kernels from a head call to the next, as a rule, in a model as deep as MAR-B."""
    target = toy_mar(depth=12, head_depth=6)
    counts = []
    with standin.cuda() as gpu:
        engine = Engine(MARModels(target), max_batch=1, device="cuda:0")
        target.head.final_layer.register_forward_hook(lambda *_: counts.append(gpu.kernels.total()))
        engine.generate(request)
    return int(np.median(np.diff(counts)))


@pytest.mark.slow
def test_kernels_of_a_denoising_step():
    assert between_head_calls(Request(1, 1, "ar", **LATE)) <= 46


@pytest.mark.slow
def test_kernels_of_a_speculative_round():
    request = Request(1, 1, "speculative", **MAR | {"num_sampling_steps": 20}, window=3, draft="frozen")
    assert between_head_calls(request) <= 130
