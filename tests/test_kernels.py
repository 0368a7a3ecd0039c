"""Kernels, launches, and tracing without a GPU."""

from __future__ import annotations

import contextlib
import copy
import functools
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gpu_costs
import numpy as np
import pytest
import standin
import torch
from conftest import relative_error
from launching import environment
from torch import Tensor
from toys import toy_mar, toy_models

from cspd import Engine, MARModels, Request, VQModels, kernels, noise
from cspd.device import Precision
from cspd.discrete.runner import compiled_layers
from cspd.heads import calibrated, chain
from cspd.heads.calibrated import Segment
from cspd.heads.speculative import PASSES, Chains
from cspd.heads.verify import compiled_move
from mar.checkpoint import MARS
from mar.head import Head, filled

pytest.importorskip("triton", ".".join(map(str, kernels.TRITON)), reason="no Triton, or one that is too old")

from launches import noted, pretended_h100, resources

from cspd.kernels import head as kernels_head
from cspd.kernels import philox, speculative

INTERPRETED = Path(__file__).parent / "kernels"
CUDA = torch.device("cuda", 0)
NUM_STEPS = 100


@pytest.mark.slow  # two minutes
def test_interpreted_kernels_agree_with_pytorch():
    """The tests in tests/kernels, in a process of their own, which Triton's interpreter needs."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    done = subprocess.run(command, env=environment(TRITON_INTERPRET="1"), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that there is a GPU of a compute capability."""

    def pretend(*capability):
        kernels._supported.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    yield pretend
    kernels._supported.cache_clear()


@pytest.mark.parametrize("version, fits", [("3.5.1", False), ("3.6.0", True), ("3.10.0+git1", True), ("4.0", True)])
def test_kernels_run_on_ampere_and_later_with_a_recent_triton(gpu, monkeypatch, version, fits):
    gpu(8, 0)
    monkeypatch.setattr("triton.__version__", version)
    assert kernels.available(CUDA) == fits and not kernels.available(torch.device("cpu"))
    gpu(7, 5)
    assert not kernels.available(CUDA)


def test_kernels_can_be_switched_off(gpu, monkeypatch):
    gpu(8, 0)
    head = Head(4, 8, 1, 4)
    for switch, fused in (("0", None), ("1", kernels_head.denoise)):
        monkeypatch.setenv(kernels.SWITCH, switch)
        kernels.fuse(head, CUDA)
        assert kernels.available(CUDA) == bool(fused) and head.fused is fused
    kernels.fuse(head, torch.device("cpu"))  # the model has moved there
    assert head.fused is None
    monkeypatch.setenv(kernels.SWITCH, "off")
    with pytest.raises(ValueError, match=kernels.SWITCH):
        kernels.available(CUDA)


def a_head(name, channels=16, dtype=torch.float32):
    """A head of an architecture's size, without weights."""
    config = MARS[name].config
    with torch.device("meta"):
        head = Head(channels, config.diffloss_w, config.diffloss_d, 8)
    return head.to_empty(device="cpu").requires_grad_(False).to(dtype)


def layers_of(head, rows, dtype=torch.float32):
    widths = [3 * head.width] * len(head.res_blocks) + [2 * head.width]
    return head.split([torch.empty(2, rows, width, dtype=dtype) for width in widths])


def denoising_step(head, rows=4, dtype=torch.float32):
    x, scale = torch.empty(rows, head.channels), torch.empty(rows, 1)
    kernels_head.ancestral_step(head, x, layers_of(head, rows, dtype), x, scale, 1, 1, 1)


def speculative_round(head, chains=4, window=12, dtype=torch.float32):
    table, state = torch.empty(NUM_STEPS + 1, window, 8 + window), torch.empty(chains, 8, head.channels)
    draws = torch.empty(chains, NUM_STEPS, head.channels + 1)
    windows, left = torch.empty(chains, window, dtype=torch.int64), torch.empty(chains, dtype=torch.int64)
    given = table, draws, windows, state, left, left
    inputs, last, at = speculative.before_head(*given, filled(chains * window))
    out = kernels_head.denoise(head, inputs, layers_of(head, chains * NUM_STEPS, dtype), at)
    speculative.after_head(*given, inputs, last, out, torch.empty(chains))


def test_the_head_call_of_the_published_sampler_is_not_fused():
    """Its modulations have no dimension of guidance branches."""
    head, rows = Head(4, 8, 1, 4), (torch.randn(3, 4), torch.arange(3), torch.randn(3, 4))
    expected = head(*rows)
    head.fused = kernels_head.denoise
    assert torch.equal(head(*rows), expected)


def test_draws_are_one_launch_each():
    seed = position = torch.arange(3)
    with noted() as (launches, operations):
        philox.draw("normal", seed, noise.Purpose.STEP, position, torch.arange(4).unsqueeze(1), 0, 16, 24)
        philox.chain(seed, position, NUM_STEPS, 16, (1, 2, 3))
    assert len(launches) == 2 and operations == ["arange"]  # which the steps are


def every_draw(dtype):
    seed = position = torch.arange(33)
    for kind in philox.KINDS:
        philox.draw(kind, seed, 2, position, position.unsqueeze(1), 5, 16, 24)
    philox.chain(seed, position, NUM_STEPS, 16, (1, 2, 3))


def after_calls(dtype):
    x, out, scale = torch.empty(8, 16), torch.empty(2, 8, 32, dtype=dtype), torch.empty(8, 1)
    kernels_head.ancestral_step_kernel(x, out, x, scale, 1, 1, 1)
    column = torch.empty(9, 1, 1)
    kernels_head.segment_step(x, out, torch.empty(9, 8, 16), scale, scale, None, column, column, torch.empty(11))


LARGEST_REGISTERS = 128  # of a thread: with more, a program of 16 warps does not fit on a multiprocessor
SPILLED = 8  # bytes of stack: two numbers that a loop reads, so that two programs fit on a multiprocessor, not one
ANGLES = 32  # bytes of stack that cosine and sine would use for angles above 100,000, which no draw has
WORK = {
    "draws": every_draw,
    "after calls": after_calls,
    "step of mar_base": lambda dtype: denoising_step(a_head("mar_base", dtype=dtype), dtype=dtype),
    "step of mar_huge": lambda dtype: denoising_step(a_head("mar_huge", dtype=dtype), dtype=dtype),
    "round of mar_base": lambda dtype: speculative_round(a_head("mar_base", dtype=dtype), dtype=dtype),
    "round of mar_huge": lambda dtype: speculative_round(a_head("mar_huge", dtype=dtype), dtype=dtype),
    "wide window of many channels": lambda dtype: speculative_round(a_head("mar_base", 64, dtype), 4, 32, dtype),
}


@pytest.mark.slow  # compiles for a minute
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", WORK)
def test_kernels_keep_to_their_registers(name, dtype):
    knobs = pytest.importorskip("triton.knobs", reason="this Triton does not say where its tools are")
    try:
        cuobjdump = knobs.nvidia.cuobjdump.path
    except RuntimeError as error:
        pytest.skip(f"Triton has no cuobjdump here: {error}")
    with noted() as (launches, _):
        WORK[name](dtype)
    for launch in {(launch.name, launch.constants.get("KIND")): launch for launch in launches}.values():
        with pretended_h100():
            compiled = launch.compiled()
        used = resources(compiled.asm["cubin"], cuobjdump)
        print(name, dtype, launch.name, launch.constants.get("KIND", ""), f"{compiled.metadata.num_warps} warps", used)
        assert used["REG"] <= LARGEST_REGISTERS and used["LOCAL"] == 0, used
        has_angles = launch.constants.get("KIND") == "normal" or launch.name == "_chain_kernel"
        assert used["STACK"] <= (ANGLES if has_angles else SPILLED), used
        if not has_angles:  # whether a draft is accepted depends on rounding
            assert "fma.rn.f32" not in compiled.asm["ptx"]


# How many kernels the head's work launches, by PyTorch and by our own: counted on tensors without data.

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
    return launched(
        chain.drawing(head, noise, head.schedule(num_steps), Precision("fp32", META)), Z, ROW, ROW, CHAIN, CHAIN
    )


def of_windows(head: Head, num_calls: int) -> int:
    """Windows of a step, which evaluate the null class in turn."""
    with META:
        columns = torch.empty(1), torch.empty(1, 1, 1), torch.empty(1, 1, 1), torch.empty(2, 3)
    plan = [Segment(num_calls - 1 - i, *columns, i % 2 == 0) for i in range(num_calls)]
    draw = calibrated.drawing(head, noise, plan, head.schedule(num_calls), Precision("fp32", META))
    return launched(draw, Z, ROW, ROW, CHAIN, CHAIN)


def rounds_of(head: Head) -> Chains:
    """Chains with slots, to be joined and moved on."""
    with noted():
        table = torch.empty(100, DRAFTED, 8 + DRAFTED, device=META)
        chains = Chains(head, head.schedule(100), table, Precision("fp32", META), noise)
        chains._reserve(len(CHAIN), num_branches=2)
    chains.passes = PASSES
    return chains


@pytest.mark.parametrize("depth", [1, 3])
def test_launches(depth, fused):
    """The counts that the predictions of docs/gpu.md use."""
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
        "round": launched(chains._run_passes, CHAIN) / PASSES,  # with the table of modulations that was joined
    }
    counted = gpu_costs.KERNELS if fused else gpu_costs.PYTORCH
    assert found == pytest.approx({part: gpu_costs.count(getattr(counted, part), depth) for part in found}, abs=1)


# Every method on a stand-in for CUDA: no mix of devices, the CPU's tokens, and the cost of its rounds.

MAR = {"cfg": 2.0, "num_iter": 3, "num_sampling_steps": 5}
LATE = MAR | {"first_timestep": 950}
VQ = {"cfg": 2.0, "temperature": 1.0, "top_k": 3, "top_p": 1.0}
LATE_READ = {"cspd/device.py array": 1}  # of what a round before left
CHAINS = {"cspd/device.py array": 6}  # of an iteration: one of each launch, late
LENGTHS = {"cspd/heads/solvers.py denoise_frequency_weighted": 1}  # of chains, which make the shapes of what follows
COMPARE = {"cspd/masked/cspd.py _speculate": 2, "cspd/heads/verify.py first_accepted": 1}


class Case(NamedTuple):
    """A request's settings, and the largest mean cost of its rounds.

    Attributes:
        kernels, graphed: launches of a round without graphs, and with them, when a graph is one launch.
        reads: how often a round waits for the device, by function; the last round is left out.
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
    """The CPU's tokens, with no more launches and reads than the table allows, and no blocking copy."""
    own, requests = models(case.split()[0]), requests_of(case)
    expected = Engine(copy.deepcopy(own), max_batch=2, device="cpu").generate(requests)
    with standin.cuda() as gpu:
        engine = Engine(own, max_batch=2, device="cuda:0", graphs=graphs)
        for _ in range(2 if graphs else 1):  # first the slots of chains grow, then graphs are captured
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
    limits = CASES[case]
    assert gpu.kernels.total() / rounds <= (limits.graphed if graphs else limits.kernels), gpu.by_function
    by_function = Counter[str]()
    for read, times in reads.items():
        by_function[read.function] += times
    assert all(times / rounds <= limits.reads.get(function, 0) for function, times in by_function.items()), reads
    assert not gpu.blocking


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK_IN_BFLOAT16 else pytest.mark.slow) for case in CASES]
)
def test_rounds_in_bfloat16(case):
    """Without our kernels: CUDA is strict about the types of operands."""
    requests = requests_of(case)
    with standin.cuda():
        engine = Engine(models(case.split()[0]), max_batch=2, device="cuda:0", precision="bf16", graphs=False)
        outputs = engine.generate(requests)  # raises FloatingPointError if one is not finite
    assert len(outputs) == len(requests)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_published_sampler(precision):
    settings = {"num_iter": 3, "cfg": 2.0, "num_sampling_steps": 5}
    with standin.cuda():
        runner = Engine(models("MAR"), max_batch=1, device="cuda:0", precision=precision, graphs=False).runner
        tokens = runner.published(torch.tensor([1, 2], device="cuda:0"), settings)
        assert tokens.cpu().isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, settings, most, reads",
    [
        ("ar", LATE, 46, 0),
        # with 12 kernels of a launch, which with graphs has several passes
        ("speculative", MAR | {"num_sampling_steps": 20, "window": 3, "draft": "frozen"}, 119, 1),
    ],
)
def test_from_a_head_call_to_the_next(method, settings, most, reads):
    """Kernels and reads in the median, in a model as deep as MAR-B, without graphs."""
    target = toy_mar(depth=12, head_depth=6)
    counts = []
    with standin.cuda() as gpu:
        engine = Engine(MARModels(target), max_batch=1, device="cuda:0", graphs=False)
        note = lambda *_: counts.append((gpu.kernels.total(), gpu.reads.total()))  # noqa: E731
        target.head.final_layer.register_forward_hook(note)
        engine.generate(Request(1, 1, method, **settings))
    found = np.median(np.diff(counts, axis=0), axis=0)
    assert found[0] <= most and found[1] == reads


# What runs through torch.compile gives the tokens of eager calls.

NO_COMPILER = not any(map(shutil.which, ("c++", "g++", "clang++")))


@pytest.fixture(
    params=[
        "eager",  # traces only, which is where a change can break it
        pytest.param("inductor", marks=pytest.mark.skipif(NO_COMPILER, reason="there is no C++ compiler")),
    ]
)
def backend(request, monkeypatch):
    """The compiler behind torch.compile; nothing is cached from other tests."""
    compiled_move.cache_clear()
    compiled_layers.cache_clear()
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=request.param))


@pytest.mark.slow  # tracing takes ten seconds, making the kernels a minute
@pytest.mark.usefixtures("backend")
def test_compiled_rounds_agree(small_mar):
    settings = {"num_iter": 4, "num_sampling_steps": 12, "cfg": 2.0, "window": 4}
    requests = [Request(label=i, seed=i, **settings) for i in range(3)]  # 3 to 70 chains: one program for all shapes
    eager, compiled = (Engine(MARModels(small_mar), max_batch=3, compiled=c).generate(requests) for c in (False, True))
    for a, b in zip(eager, compiled):
        assert relative_error(b.tokens, a.tokens) < 1e-3
        assert a.stats.by_lag == b.stats.by_lag


@pytest.mark.slow  # the same
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("method", ["ar", "eagle2", "sd"])
def test_compiled_layers_agree(method):
    """Slices and indexes of rows and columns, with masks and without, and three models; more than slots."""
    models = VQModels(**toy_models(codes=11, length=16))
    requests = [Request(label=i % 2, seed=i, method=method, cfg=1.0 + i % 2) for i in range(5)]
    eager, compiled = (Engine(models, max_batch=3, device="cpu", compiled=c) for c in (False, True))
    for a, b in zip(eager.generate(requests), compiled.generate(requests)):
        assert torch.equal(a.tokens, b.tokens)
        assert a.stats.backbone_calls == b.stats.backbone_calls
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0  # something was traced
