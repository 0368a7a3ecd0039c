"""What tests share: golden files, the small golden models, engines over them."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cspd.vq.gpt import GPT, GPTConfig
from cspd.vq.tokenizer import VQConfig, VQModel
from mar.model import MAR, MARConfig
from mar.vae import AutoencoderKL, KLConfig

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(
    prefix="cspd-tests-"
)  # costs, and calibrations of small models, are made anew
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests share models, and golden tensors are on the CPU
GOLDEN = Path(__file__).parent / "golden"


class Golden(dict):
    """Tensors of a golden file by name, and its config."""

    def __init__(self, name: str) -> None:
        with safe_open(GOLDEN / name, "pt") as file:
            super().__init__({key: file.get_tensor(key) for key in file.keys()})
            self.config = json.loads(file.metadata()["config"])
        self.weights = {key.removeprefix("model."): value for key, value in self.items() if key.startswith("model.")}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest deviation over largest magnitude."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture(scope="session")
def mar_golden() -> Golden:
    return Golden("mar_small.safetensors")


@pytest.fixture(scope="session")
def vae_golden() -> Golden:
    return Golden("kl_vae_small.safetensors")


@pytest.fixture(scope="session")
def small_mar(mar_golden: Golden) -> MAR:
    c = mar_golden.config
    config = MARConfig(
        img_size=c["img"],
        vae_stride=c["stride"],
        patch_size=c["patch"],
        vae_embed_dim=c["C"],
        embed_dim=c["D"],
        depth=c["L"],
        num_heads=c["H"],
        buffer_size=c["buf"],
        diffloss_w=c["w"],
        diffloss_d=c["d"],
    )
    model = MAR(config)
    model.load_state_dict(mar_golden.weights)
    return model.eval().requires_grad_(False)


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
