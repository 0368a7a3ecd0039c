"""Kernels, launches, and tracing without a GPU."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import warnings
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
from cspd.discrete import drafts, jacobi
from cspd.graphs import compiled
from cspd.heads import chain, driver, samplers
from cspd.heads.calibrated import Segment, follow
from cspd.heads.chain import Chain, Inputs
from cspd.heads.speculative import PASSES, Chains
from mar import model as mar_model
from mar.checkpoint import MARS
from mar.head import Head, filled
from mar.model import MARConfig, Norm

pytest.importorskip("triton", ".".join(map(str, kernels.TRITON)), reason="no Triton, or one that is too old")

from launches import can_target, noted, pretended, resources
from triton.runtime.jit import JITFunction

from cspd.kernels import backbone as kernels_backbone
from cspd.kernels import head as kernels_head
from cspd.kernels import philox, speculative

INTERPRETED = Path(__file__).parent / "kernels"
CUDA = standin.DEVICE
NUM_STEPS = 100


@pytest.mark.slow  # four minutes
def test_interpreted_kernels_agree_with_pytorch():
    """The tests in tests/kernels, in a process of their own, which Triton's interpreter needs."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    done = subprocess.run(command, env=environment(TRITON_INTERPRET="1"), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


def draw_zeros(kernel, out, *arguments, **named):
    """Computes what the kernel of `kernels._run_one` computes."""
    out.copy_(torch.tensor([kernels.OF_ZEROS]))


def fail(error):
    def run(*arguments, **named):
        raise error

    return run


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that there is a GPU of a compute capability, and a driver that runs kernels."""
    with standin.cuda(), monkeypatch.context() as patch:

        def pretend(*capability, run=draw_zeros):
            kernels._supported.cache_clear()
            patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
            patch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
            patch.setattr(JITFunction, "run", run)
            return patch

        yield pretend
    kernels._supported.cache_clear()


@pytest.mark.filterwarnings("error")
def test_kernels_run_on_ampere_and_later(gpu):
    gpu(8, 0)
    assert kernels.available(CUDA) and not kernels.available(torch.device("cpu"))
    gpu(7, 5)
    assert not kernels.available(CUDA)
    gpu(9, 0).setattr(torch.version, "hip", "6.4")
    assert not kernels.available(CUDA)


@pytest.mark.parametrize("version, fits", [("3.5.1", False), ("3.6.0", True), ("3.10.0+git1", True), ("4.0", True)])
def test_kernels_need_a_recent_triton(gpu, version, fits):
    gpu(8, 0).setattr("triton.__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        assert kernels.available(CUDA) == fits
    assert len(caught) == (not fits)


COMPILATION = subprocess.CalledProcessError(1, ["gcc", "main.c"], stderr="Python.h: No such file or directory")
FAULTS = {
    "C compiler": fail(RuntimeError("Failed to find C compiler")),
    "gcc": fail(FileNotFoundError(2, "No such file or directory", "gcc")),
    "main.c": fail(COMPILATION),
    "instead of": lambda kernel, out, *arguments, **named: out.copy_(torch.tensor([[1, 2, 3, 4]])),
}


@pytest.mark.parametrize("expected", FAULTS)
def test_an_engine_computes_without_kernels_that_do_not_run(gpu, expected):
    """With one warning in a process."""
    request, own = Request(1, 1, "ar", **MAR), models("MAR")
    gpu(9, 0, run=FAULTS[expected])
    with pytest.warns(UserWarning, match=f"{expected}.*{kernels.SWITCH}") as caught:
        engine = Engine(own, max_batch=1, device=CUDA, graphs=False)
        (output,) = engine.generate([request])
        Engine(own, max_batch=1, device=CUDA, graphs=False)
    assert sum(kernels.SWITCH in str(warning.message) for warning in caught) == 1
    assert output.error is None and output.tokens.isfinite().all()


WITHOUT_TRITON = """
import sys
import warnings
import standin
import torch
from cspd import kernels

device = standin.DEVICE
with standin.cuda(), warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.cuda.get_device_capability = lambda device: (9, 0)
    for folder in sys.argv[1:]:
        sys.path.insert(0, folder)
        sys.modules.pop("triton", None)
        kernels._supported.cache_clear()
        caught.clear()
        assert not kernels.available(device) and not kernels.available(device)
        (warning,) = caught
        assert kernels.SWITCH in str(warning.message)
"""
DAMAGED = ["raise ImportError('DLL load failed')", "raise OSError('libcuda.so')", ""]


def test_a_triton_that_cannot_be_imported(tmp_path):
    """In a process of its own, since modules are imported once."""
    for number, damaged in enumerate(DAMAGED):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "triton.py").write_text(damaged)
    paths = [environment()["PYTHONPATH"], str(Path(__file__).parent)]
    command = [sys.executable, "-c", WITHOUT_TRITON, *map(str, tmp_path.iterdir())]
    done = subprocess.run(command, env=environment(PYTHONPATH=os.pathsep.join(paths)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


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


def between_products(dtype):
    for width in {MARS[name].config.embed_dim for name in ("mar_base", "mar_large", "mar_huge")}:
        x = torch.empty(8, width)
        kernels_backbone.join(Norm(width), x, x.to(dtype), dtype)
        kernels_backbone.join(Norm(width), x, None, dtype)


LARGEST_REGISTERS = 128  # of a thread: with more, a program of 16 warps does not fit on a multiprocessor
SPILLED = 8  # bytes of stack: two numbers that a loop reads, so that two programs fit on a multiprocessor, not one
H100, NO_TARGET = 90, 77  # a compute capability, and an exit code
ANGLES = 32  # bytes of stack that cosine and sine would use for angles above 100,000, which no draw has
WORK = {
    "draws": every_draw,
    "after calls": after_calls,
    "between the backbone's products": between_products,
    "step of mar_base": lambda dtype: denoising_step(a_head("mar_base", dtype=dtype), dtype=dtype),
    "step of mar_large": lambda dtype: denoising_step(a_head("mar_large", dtype=dtype), dtype=dtype),
    "step of mar_huge": lambda dtype: denoising_step(a_head("mar_huge", dtype=dtype), dtype=dtype),
    "round of mar_base": lambda dtype: speculative_round(a_head("mar_base", dtype=dtype), dtype=dtype),
    "round of mar_large": lambda dtype: speculative_round(a_head("mar_large", dtype=dtype), dtype=dtype),
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
        with pretended(H100):
            compiled = launch.compiled()
        used = resources(compiled.asm["cubin"], cuobjdump)
        print(name, dtype, launch.name, launch.constants.get("KIND", ""), f"{compiled.metadata.num_warps} warps", used)
        assert used["REG"] <= LARGEST_REGISTERS and used["LOCAL"] == 0, used
        has_angles = launch.constants.get("KIND") == "normal" or launch.name == "_chain_kernel"
        assert used["STACK"] <= (ANGLES if has_angles else SPILLED), used
        if not has_angles:  # whether a draft is accepted depends on rounding
            assert "fma.rn.f32" not in compiled.asm["ptx"]


def check_targets(capability):
    """Compiles every kernel for a compute capability; for a process of its own."""
    if not can_target(capability):
        raise SystemExit(NO_TARGET)
    modules = [vars(module) for module in (kernels_backbone, kernels_head, philox, speculative)]
    missing = {name for own in modules for name, value in own.items() if isinstance(value, JITFunction)}
    missing = {name for name in missing if name.endswith("_kernel")}
    for dtype, work in itertools.product((torch.float32, torch.bfloat16), WORK.values()):
        with noted() as (launches, _):
            work(dtype)
        with pretended(capability):
            for launch in launches:
                ptx = launch.compiled().asm["ptx"]
                (target,) = re.findall(r"^\.target sm_(\d+)", ptx, re.MULTILINE)
                assert int(target) == capability, (launch.name, target)
                missing.discard(launch.name)
    assert not missing


@pytest.mark.slow  # a quarter of a minute each
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_kernels_compile_for(capability):
    """Each in a process of its own: Triton returns what it compiled before for the same device index."""
    path = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", f"import test_kernels; test_kernels.check_targets({capability})"]
    done = subprocess.run(command, env=environment(PYTHONPATH=path), capture_output=True, text=True)
    if done.returncode == NO_TARGET:
        pytest.skip("this Triton cannot compile for it")
    assert done.returncode == 0, done.stderr[-2000:]


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


def of_blocks(depth: int) -> int:
    with META:
        config = MARConfig(img_size=64, embed_dim=8, depth=depth, num_heads=2, diffloss_w=8, diffloss_d=1)
        model = mar_model.MAR(config).requires_grad_(False)
    kernels.fuse(model, META)
    own = Precision("bf16", META).prepare(model)
    size = model.config.seq_len
    tokens, order = torch.empty(2, size, model.config.token_dim, device=META), CHAIN.new_empty(2, size)
    return launched(own, tokens, order, CHAIN[:2], torch.empty(2, 8, device=META), order, size)


def test_launches_of_the_backbone(fused, monkeypatch):
    """In a layer of the encoder and one of the decoder; attention is one kernel on a GPU."""
    monkeypatch.setattr(mar_model.F, "scaled_dot_product_attention", lambda q, k, v, attn_mask: q.abs())
    counted = gpu_costs.KERNELS if fused else gpu_costs.PYTORCH
    assert of_blocks(3) - of_blocks(2) == 2 * counted.backbone[1]


def chain_of(head: Head, num_steps: int) -> Chain:
    inputs = Inputs(Z, ROW, ROW, CHAIN, CHAIN)
    return Chain(head, head.schedule(num_steps), inputs, noise, Precision("fp32", META))


def of_steps(head: Head, num_steps: int) -> int:
    return launched(lambda: samplers.ancestral(chain_of(head, num_steps)))


def of_windows(head: Head, num_calls: int) -> int:
    """Windows of a step, which evaluate the null class in turn."""
    with META:
        columns = torch.empty(1), torch.empty(1, 1, 1), torch.empty(1, 1, 1), torch.empty(2, 3)
    plan = [Segment(i, num_calls - 1 - i, *columns, i % 2 == 0) for i in range(num_calls)]
    return launched(lambda: follow(chain_of(head, num_calls), plan))


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
    chains = rounds_of(head)
    found = {
        "step": step,
        "window": window,
        "start": steps[0] - 4 * step,
        "join": launched(chains._join, 0, CHAIN, CHAIN, CHAIN, CHAIN, Z, ROW, ROW),
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
LENGTHS = {"cspd/heads/samplers.py frequency_weighted": 1}  # of chains, which make the shapes of what follows
COMPARE = {"cspd/masked/cspd.py _speculate": 2, "cspd/heads/verify.py first_accepted": 1}


class Case(NamedTuple):
    """A request's settings, and the largest mean cost of its rounds.

    Attributes:
        kernels, graphed: launches of a round without graphs, and with them, when a graph is one launch.
        reads: how often a round waits for the device, by function; the last round is left out.
        audit: launches of the audit of a relaxed rule without graphs, which `kernels` leaves out.
    """

    settings: dict
    kernels: int
    graphed: int
    reads: Mapping[str, float] = {}
    audit: int = 0


CASES = {  # by family and method
    "MAR ar": Case(LATE, 485, 52),
    "MAR speculative": Case(MAR | {"window": 3, "draft": "frozen"}, 1010, 90, CHAINS),
    "MAR calibrated": Case(MAR | {"head_calls": 3}, 455, 52),
    "MAR disa": Case(LATE | {"upper": 6, "lower": 3}, 485, 65),
    "MAR ddim": Case(LATE, 510, 52),
    "MAR dpm-solver++": Case(LATE, 530, 52),
    "MAR lazymar": Case(LATE | {"warmup": 1, "refresh": 2}, 510, 55),
    "MAR gtr": Case(LATE, 1500, 75, LENGTHS),
    "MAR mar-draft": Case(LATE | {"gamma": 3}, 1940, 1590, COMPARE),
    "VQ ar": Case(VQ, 110, 25),
    "VQ sd": Case(VQ | {"gamma": 3}, 535, 32, LATE_READ),
    "VQ sjd-pac": Case(VQ | {"window": 6, "pd_k": 2, "pd_d": 2}, 380, 27, LATE_READ),
    "VQ mc-sjd": Case(VQ | {"window": 6}, 310, 33, LATE_READ),
    "VQ gsd": Case(VQ | {"window": 6, "group": 3}, 355, 38, LATE_READ, 185),
    "VQ eagle": Case(VQ | {"gamma": 2}, 580, 32, LATE_READ),
    "VQ eagle2": Case(VQ | {"gamma": 2}, 380, 55, LATE_READ),
    "VQ cool-sd": Case(VQ | {"gamma": 2}, 625, 32, LATE_READ, 300),
    "VQ lantern": Case(VQ | {"gamma": 2, "k": 3}, 655, 55, LATE_READ, 700),
}
QUICK = [("MAR ar", False), ("MAR ar", True), ("VQ ar", False)]


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
def test_rounds(case, graphs, monkeypatch):
    """The CPU's tokens, with no more launches and reads than the table allows, and no blocking copy."""
    own, requests = models(case.split()[0]), requests_of(case)
    expected = Engine(copy.deepcopy(own), max_batch=2, device="cpu").generate(requests)
    with standin.cuda() as gpu:
        audits = []

        def counted(*args):
            before = gpu.kernels.total()
            audit = price(*args)
            audits.append(gpu.kernels.total() - before)
            return audit

        limits = CASES[case]
        if limits.audit and not graphs:  # a graph launches both at once
            price = drafts.price
            for module in (drafts, jacobi):
                monkeypatch.setattr(module, "price", counted)
        engine = Engine(own, max_batch=2, device=standin.DEVICE, graphs=graphs)
        for _ in range(2 if graphs else 1):  # first the slots of chains grow, then graphs are captured
            engine.generate(requests)
        gpu.reset()
        audits.clear()
        for request in requests:
            engine.add_request(request)
        outputs, rounds, reads = {}, 0, Counter()
        while len(engine.scheduler):
            reads = Counter(gpu.reads)  # at the end the CPU waits for the images
            outputs |= engine.step()
            rounds += 1
    for output, on_cpu in zip(map(outputs.get, sorted(outputs)), expected, strict=True):
        assert torch.equal(output.tokens, on_cpu.tokens)
    num_others = gpu.kernels.total() - sum(audits)
    assert num_others / rounds <= (limits.graphed if graphs else limits.kernels), gpu.by_function
    assert sum(audits) / rounds <= limits.audit, (sum(audits), rounds)
    by_function = Counter[str]()
    for read, times in reads.items():
        by_function[read.function] += times
    assert all(times / rounds <= limits.reads.get(function, 0) for function, times in by_function.items()), reads
    assert not gpu.blocking


@pytest.mark.filterwarnings("ignore:precision='bf16'")  # the stand-in is as old a GPU as that
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_published_sampler(precision):
    settings = {"num_iter": 3, "cfg": 2.0, "num_sampling_steps": 5}
    with standin.cuda():
        runner = Engine(models("MAR"), max_batch=1, device=standin.DEVICE, precision=precision, graphs=False).runner
        tokens = runner.published(torch.tensor([1, 2], device=standin.DEVICE), settings)
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
        engine = Engine(MARModels(target), max_batch=1, device=standin.DEVICE, graphs=False)
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
    compiled.cache_clear()
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=request.param))


def test_what_is_compiled_for_mar(small_mar, monkeypatch):
    """The backbone, and the denoising steps of `ar` but for the first one and the last few: tokens up to rounding."""
    functions = []
    monkeypatch.setattr(torch, "compile", lambda function, **settings: functions.append(function) or function)
    compiled.cache_clear()
    steps = 2 + 2 * driver.COMPILED_STEPS
    requests = [Request(label=i, seed=i, num_iter=4, num_sampling_steps=steps, cfg=2.0, method="ar") for i in range(3)]
    eager, fused = (Engine(MARModels(small_mar), max_batch=2, compiled=c).generate(requests) for c in (False, True))
    compiled.cache_clear()
    assert functions == [mar_model.MAR.forward, driver.several_steps]
    for a, b in zip(eager, fused):
        assert relative_error(b.tokens, a.tokens) < 1e-3


@pytest.mark.slow  # tracing takes ten seconds, making the kernels a minute
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("own", [{"window": 4}, {"method": "ar"}], ids=["speculative", "ar"])
def test_compiled_rounds_agree(own, small_mar):
    settings = {"num_iter": 4, "num_sampling_steps": 25, "cfg": 2.0, **own}  # fewer steps would multiply rounding more
    requests = [Request(label=i, seed=i, **settings) for i in range(3)]  # 3 to 70 chains: one program for all shapes
    eager, fused = (Engine(MARModels(small_mar), max_batch=3, compiled=c).generate(requests) for c in (False, True))
    for a, b in zip(eager, fused):
        assert relative_error(b.tokens, a.tokens) < 1e-3
        assert a.stats.by_lag == b.stats.by_lag


@pytest.mark.slow  # the same
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("method", ["ar", "eagle2", "sd"])
def test_compiled_layers_agree(method):
    """Slices and indexes of rows and columns, with masks and without, and three models; more than slots."""
    models = VQModels(**toy_models(codes=11, length=16))
    requests = [Request(label=i % 2, seed=i, method=method, cfg=1.0 + i % 2) for i in range(5)]
    eager, fused = (Engine(models, max_batch=3, device="cpu", compiled=c) for c in (False, True))
    for a, b in zip(eager.generate(requests), fused.generate(requests)):
        assert torch.equal(a.tokens, b.tokens)
        assert a.stats.backbone_calls == b.stats.backbone_calls
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0  # something was traced
