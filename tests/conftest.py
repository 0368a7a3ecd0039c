"""What tests share: golden files, the small golden models, engines over them."""

from __future__ import annotations

import gc
import json
import math
import os
import tempfile
from pathlib import Path

import pytest
import torch
from golden_files import GOLDEN, GOLDEN_MAR, Golden, relative_error  # noqa: F401 - tests take them from here

import cspd
import cspd.checkpoints
from cspd import device as cspd_device
from cspd import terminal
from cspd.device import pick_device
from cspd.discrete.gpt import GPT, GPTConfig, VQConfig, VQModel
from mar.checkpoint import load_mar
from mar.model import MAR
from mar.vae import AutoencoderKL, KLConfig

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(
    prefix="cspd-tests-"
)  # costs, and calibrations of small models, are made anew
terminal.PATIENCE = 3600.0  # a slow machine does not add lines to what commands print
cspd_device.SLACK = math.inf  # nor does a busy one
CPU = Path("/proc/cpuinfo")
if CPU.exists() and "GenuineIntel" in CPU.read_text():  # MKL rounds alike in every batch if asked to: docs/exactness.md
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # it looks when it is first used


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs from all tests, unless those of a GPU are asked for: they share models, which must stay on the CPU."""
    if not config.getoption("-m").startswith("cuda"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """Takes what was imported out of the garbage collector, whose runs took a fifth of the time of some tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a GPU and -m cuda")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request) -> torch.device:
    """Where a test computes; on a GPU, with kernels and CUDA graphs. The models that tests share stay on the CPU."""
    return pick_device(request.param)


@pytest.fixture(scope="session")
def mar_golden() -> Golden:
    return Golden("mar_small.safetensors")


@pytest.fixture(scope="session")
def vae_golden() -> Golden:
    return Golden("kl_vae_small.safetensors")


@pytest.fixture(scope="session")
def small_mar() -> MAR:
    return load_mar(GOLDEN_MAR).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def small_vae(vae_golden: Golden) -> AutoencoderKL:
    c = vae_golden.config
    vae = AutoencoderKL(KLConfig(embed_dim=c["embed_dim"], ch=c["ch"], ch_mult=tuple(c["ch_mult"]), scale=1.0))
    vae.load_state_dict(vae_golden.weights)
    return vae.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def gpt_golden() -> Golden:
    return Golden("gpt_small.safetensors")


@pytest.fixture(scope="session")
def vq_golden() -> Golden:
    return Golden("vq_small.safetensors")


@pytest.fixture(scope="session")
def small_gpt(gpt_golden: Golden) -> GPT:
    model = GPT(GPTConfig(**gpt_golden.config))
    model.load_state_dict(gpt_golden.weights)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def small_vq(vq_golden: Golden) -> VQModel:
    c = vq_golden.config
    names = ("ch", "z_channels", "codebook_size", "codebook_dim")
    model = VQModel(VQConfig(**{name: c[name] for name in names}, ch_mult=tuple(c["ch_mult"])))
    model.load_state_dict(vq_golden.weights)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def comparison(tmp_path_factory):
    """A finished comparison: its folder and its report."""
    from comparisons import run

    out = tmp_path_factory.mktemp("comparison")
    assert run(out) == 0
    return out, json.loads((out / "comparison.json").read_text(), parse_constant=pytest.fail)


@pytest.fixture(scope="session")
def digits():
    """An engine of the bundled MAR pair."""
    return cspd.load("digits32", max_batch=8, device="cpu")


@pytest.fixture(scope="module")
def text_checkpoint(tmp_path_factory):
    """The folder of a small text-to-image model."""
    from texts import small_text_checkpoint

    with pytest.MonkeyPatch.context() as patch:
        yield small_text_checkpoint(tmp_path_factory.mktemp("pretrained_models"), patch)
