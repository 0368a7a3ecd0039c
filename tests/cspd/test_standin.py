"""Every method on a stand-in for CUDA: no mix of devices, the CPU's tokens, and what its rounds cost."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
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
LATE_READ = {"cspd/device.py array": 1}  # of what a round before left
CHAINS = {"cspd/device.py array": 6}  # of an iteration: one of each launch, late
LENGTHS = {"cspd/heads/solvers.py denoise": 1}  # of chains, which make the shapes of what follows
COMPARE = {"cspd/masked/cspd.py _speculate": 2, "cspd/heads/verify.py first_kept": 1}


class Case(NamedTuple):
    """A request's settings, and what its rounds cost at most, on the average.

    Attributes:
        kernels, graphed: launches of a round as single kernels, and with graphs, each of which is one.
        reads: how often a round waits for the device, by where; the last round is left out.
    """

    settings: dict
    kernels: int
    graphed: int
    reads: Mapping[str, float] = {}


CASES = {  # by family and method
    "MAR ar": Case(LATE, 485, 52),
    "MAR speculative": Case(MAR | {"window": 3, "draft": "frozen"}, 1010, 250, CHAINS),
    "MAR calibrated": Case(MAR | {"head_calls": 3}, 455, 52),
    "MAR disa": Case(LATE | {"upper": 6, "lower": 3}, 485, 65),
    "MAR ddim": Case(LATE, 510, 52),
    "MAR dpm-solver++": Case(LATE, 530, 52),
    "MAR lazymar": Case(LATE | {"warmup": 1, "refresh": 2}, 510, 55),
    "MAR gtr": Case(LATE, 1500, 75, LENGTHS),
    "MAR cspd": Case(LATE | {"gamma": 3}, 1940, 1590, COMPARE),
    "VQ ar": Case(VQ, 110, 25),
    "VQ sd": Case(VQ | {"gamma": 3}, 535, 32, LATE_READ),
    "VQ sjd-pac": Case(VQ | {"window": 6, "pd_k": 2, "pd_d": 2}, 380, 27, LATE_READ),
    "VQ mc-sjd": Case(VQ | {"window": 6}, 310, 33, LATE_READ),
    "VQ gsd": Case(VQ | {"window": 6, "group": 3}, 355, 38, LATE_READ),
    "VQ eagle": Case(VQ | {"gamma": 2}, 580, 32, LATE_READ),
    "VQ eagle2": Case(VQ | {"gamma": 2}, 380, 55, LATE_READ),
    "VQ cool-sd": Case(VQ | {"gamma": 2}, 625, 32, LATE_READ),
    "VQ lantern": Case(VQ | {"gamma": 2, "k": 3}, 655, 55, LATE_READ),
}
QUICK = [("MAR ar", False), ("MAR ar", True), ("VQ ar", False)]
QUICK_IN_BFLOAT16 = ["MAR ar", "MAR lazymar", "VQ ar"]


def models(family: str) -> MARModels | VQModels:
    return VQModels(**toy_models(codes=11, length=9)) if family == "VQ" else MARModels(toy_mar(), toy_mar(2))


def requests_of(case: str) -> list[Request]:
    """Three requests: in two slots, the last one starts late."""
    family, method = case.split()
    return [Request(seed, seed, method, family=family, **CASES[case].settings) for seed in range(3)]


@pytest.mark.parametrize(
    ("case", "graphs"),
    [
        pytest.param(case, graphs, marks=() if (case, graphs) in QUICK else pytest.mark.slow)
        for case in CASES
        for graphs in (False, True)
    ],
)
def test_rounds(case, graphs):
    """The CPU's tokens by no more launches and reads than are known of, and no blocking copy."""
    own, requests = models(case.split()[0]), requests_of(case)
    expected = Engine(copy.deepcopy(own), max_batch=2, device="cpu").generate(requests)
    with standin.cuda() as gpu:
        engine = Engine(own, max_batch=2, device="cuda:0", graphs=graphs)
        for _ in range(2 if graphs else 1):  # makes what is kept; the slots of chains grow, then graphs are captured
            engine.generate(requests)
        gpu.reset()
        for request in requests:
            engine.add_request(request)
        outputs, rounds, reads = {}, 0, Counter()
        while len(engine.scheduler):
            reads = Counter(gpu.reads)  # at the end the CPU waits for the images
            outputs |= engine.step()
            rounds += 1
    for output, on_cpu in zip(map(outputs.get, sorted(outputs)), expected, strict=True):
        assert torch.equal(output.tokens, on_cpu.tokens)
    known = CASES[case]
    assert gpu.kernels.total() / rounds <= (known.graphed if graphs else known.kernels), gpu.by_function
    by_function = Counter[str]()
    for read, times in reads.items():
        by_function[read.function] += times
    assert all(times / rounds <= known.reads.get(function, 0) for function, times in by_function.items()), reads
    assert not gpu.blocking


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK_IN_BFLOAT16 else pytest.mark.slow) for case in CASES]
)
def test_rounds_in_bfloat16(case):
    """CUDA takes the types of all that meets, where no kernels of ours run."""
    requests = requests_of(case)
    with standin.cuda():
        engine = Engine(models(case.split()[0]), max_batch=2, device="cuda:0", precision="bf16", graphs=False)
        outputs = engine.generate(requests)  # raises FloatingPointError where one is not finite
    assert len(outputs) == len(requests)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_published_sampler(precision):
    settings = {"num_iter": 3, "cfg": 2.0, "num_sampling_steps": 5}
    with standin.cuda():
        runner = Engine(models("MAR"), max_batch=1, device="cuda:0", precision=precision, graphs=False).runner
        tokens = runner.published(torch.tensor([1, 2], device="cuda:0"), settings)
        assert tokens.cpu().isfinite().all()


def between_head_calls(request: Request) -> tuple[int, int]:
    """(kernels, reads) from a head call to the next, as a rule, in a model as deep as MAR-B, without graphs."""
    target = toy_mar(depth=12, head_depth=6)
    counts = []
    with standin.cuda() as gpu:
        engine = Engine(MARModels(target), max_batch=1, device="cuda:0", graphs=False)
        note = lambda *_: counts.append((gpu.kernels.total(), gpu.reads.total()))  # noqa: E731
        target.head.final_layer.register_forward_hook(note)
        engine.generate(request)
    return tuple(np.median(np.diff(counts, axis=0), axis=0).astype(int))


@pytest.mark.slow
def test_a_denoising_step():
    kernels, reads = between_head_calls(Request(1, 1, "ar", **LATE))
    assert kernels <= 46 and reads == 0


@pytest.mark.slow
def test_a_speculative_round():
    request = Request(1, 1, "speculative", **MAR | {"num_sampling_steps": 20}, window=3, draft="frozen")
    kernels, reads = between_head_calls(request)
    assert kernels <= 119 and reads == 1  # of the kernels 12 are of a launch, which with graphs has several rounds
