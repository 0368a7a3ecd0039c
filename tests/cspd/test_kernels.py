"""Triton kernels without a GPU: interpreted, compiled, and counted."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import environment

from cspd import kernels, noise
from mar.checkpoint import MARS
from mar.head import Head, filled

pytest.importorskip("triton", ".".join(map(str, kernels.TRITON)), reason="there is no Triton that kernels can have")

from launches import noted, pretended_h100, resources

from cspd.kernels import head as kernels_head
from cspd.kernels import philox, speculative

INTERPRETED = Path(__file__).parent.parent / "kernels"
CUDA = torch.device("cuda", 0)
NUM_STEPS = 100


@pytest.mark.slow  # two minutes
def test_interpreted_kernels_agree_with_pytorch():
    """The tests in tests/kernels, in the process that Triton's interpreter needs."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    done = subprocess.run(command, env=environment(TRITON_INTERPRET="1"), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


@pytest.fixture
def ampere(monkeypatch):
    kernels._supported.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    yield
    kernels._supported.cache_clear()


def test_kernels_run_on_ampere_and_later(ampere, monkeypatch):
    assert kernels.available(CUDA)
    assert not kernels.available(torch.device("cpu"))
    kernels._supported.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not kernels.available(CUDA)


@pytest.mark.parametrize("version, there", [("3.5.1", False), ("3.6.0", True), ("3.10.0+git1", True), ("4.0", True)])
def test_kernels_want_a_triton_that_takes_them(ampere, monkeypatch, version, there):
    monkeypatch.setattr("triton.__version__", version)
    assert kernels.available(CUDA) == there


def test_kernels_can_be_switched_off(ampere, monkeypatch):
    head = Head(4, 8, 1, 4)
    monkeypatch.setenv(kernels.SWITCH, "0")
    kernels.fuse(head, CUDA)
    assert not kernels.available(CUDA) and head.fused is None
    monkeypatch.setenv(kernels.SWITCH, "1")
    kernels.fuse(head, CUDA)
    assert kernels.available(CUDA) and head.fused is kernels_head.denoise
    kernels.fuse(head, torch.device("cpu"))  # where the model is now
    assert head.fused is None
    monkeypatch.setenv(kernels.SWITCH, "off")
    with pytest.raises(ValueError):
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


def test_a_head_that_is_called_as_published_is_not_fused():
    """Its modulations are rows, without classes."""
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
    kernels_head.window_step(x, out, torch.empty(9, 8, 16), scale, scale, None, column, column, torch.empty(11))


LARGEST_REGISTERS = 128  # a thread: with more, a program of 16 warps does not fit on a multiprocessor
SPILLED = 8  # bytes of stack: two numbers that a loop reads, with which two programs fit on a multiprocessor, not one
ANGLES = 32  # bytes of stack that cosine and sine would use for angles above 100,000, which no draw has
WORK = {
    "draws": every_draw,
    "after calls": after_calls,
    **{
        f"{work.__name__} of {name}": lambda dtype, work=work, name=name: work(a_head(name, dtype=dtype), dtype=dtype)
        for work in (denoising_step, speculative_round)
        for name in ("mar_base", "mar_huge")
    },
    "wide window of many channels": lambda dtype: speculative_round(
        a_head("mar_base", 64, dtype), window=32, dtype=dtype
    ),
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
