"""Every method of the registry on a fake `cuda:1`, which finds types and devices that a GPU would refuse.

Whole rounds run on the stand-in of tests/standin.py. Torch's own rules for CUDA decide there whether an operation is
possible and what comes out, and its values come from the CPU, so that rounds can read their results. Rounds with Triton
kernels need a process of their own: tests/kernels/test_traced.py.
"""

from __future__ import annotations

import pytest
import standin
import torch
from hf import drafter_of, hf_of, model_of
from toys import toy_models
from tracing import NAMES, models_of, requests_of, traced

from cspd import VQModels, kernels
from cspd.graphs import compiled
from cspd.heads.driver import COMPILED_STEPS
from mar.vae import AutoencoderKL, KLConfig

pytestmark = [
    pytest.mark.skipif(not standin.POSSIBLE, reason="this torch cannot pretend to have CUDA"),
    pytest.mark.filterwarnings("ignore:precision='bf16'"),  # the stand-in is as old a GPU as that
]
NOT_TRACED = {
    "what Inductor makes of a traced program": "it asks the GPU's driver for its sizes; gpu-check runs it",
    "captures of CUDA graphs by CUDA": "the stand-in records operations; gpu-check captures them",
    "results whose shape or value depends on data": "torch has no rule for them; they have the CPU's type and shape",
    "the code of attention that CUDA picks": "it depends on the GPU; attention is traced as one operation",
    "lantern and lantern++ with models of transformers": "they need a tokenizer's codes; LlamaGen's models trace them",
    "zipar with models of transformers": "some end each row by a token; LlamaGen's models trace it",
    "compiled rounds with Triton kernels": "the compiler takes the place of the kernels",
}
# many seconds; `budget` of 0 samples by `speculative`, which is traced
LONG = ["MAR calibrated", "MAR gtr", "MAR mar-draft", "MAR budget", "causal calibrated", "causal speculative"]
# others that differ from them in a rule or a solver are traced
LONG += ["VQ lantern", "VQ cool-sd", "VQ uniform-rsd", "MAR ddim", "causal euler", "causal disa"]
ARCHITECTURES = ["janus", "chameleon", "lumina_mgpt", "emu3"]
QUICK_OF_HF = ["VQ eagle2", "VQ sjd"]
COMPILED = [name for name in NAMES if name.startswith("VQ")] + ["MAR ar", "MAR speculative", "causal speculative"]


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    monkeypatch.setenv(kernels.SWITCH, "0")


def slow(condition: bool) -> list:
    return [pytest.mark.slow] if condition else []


@pytest.mark.parametrize(
    "name, precision",
    [
        pytest.param(name, precision, marks=slow(precision == "fp32" or name in LONG))
        for name in NAMES
        for precision in ("fp32", "bf16")
    ],
)
def test_every_method(name, precision):
    outputs, _ = traced(models_of(name), requests_of(name, 2, label=1), precision=precision)
    assert len(outputs) == 2


@pytest.mark.parametrize(
    "architecture, name, precision",
    [
        pytest.param(
            architecture,
            name,
            precision,
            marks=slow(architecture != "emu3" or precision == "fp32" or name not in QUICK_OF_HF),
        )
        for architecture in ARCHITECTURES
        for name in NAMES
        if name.startswith("VQ") and "lantern" not in name and name != "VQ zipar"
        for precision in ("fp32", "bf16")
    ],
)
def test_models_of_transformers(architecture, name, precision):
    target, prompts, _ = hf_of(model_of(architecture))
    draft, *_ = hf_of(model_of(architecture, seed=1, num_hidden_layers=1, hidden_size=16))
    models = VQModels(target=target, draft=draft, eagle=drafter_of(target), text_encoder=prompts)
    outputs, _ = traced(models, requests_of(name, 2, prompt="a red fox"), precision=precision)
    assert len(outputs) == 2


@pytest.mark.slow  # the compiler traces each kind of call, for half a minute
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name, precision):
    """The other methods of MAR have the same compiled backbone; those of causal models give nothing to the compiler."""
    compiled.cache_clear()
    torch.compiler.reset()
    try:
        requests = requests_of(name, 1, label=1)
        if name == "MAR ar":  # the first step is eager, and fewer than so many others are too
            requests = [request.but(num_sampling_steps=1 + COMPILED_STEPS) for request in requests]
        outputs, calls = traced(models_of(name), requests, precision=precision, compiled=True)
    finally:  # they belong to the stand-in
        compiled.cache_clear()
    assert len(outputs) == 1 and calls > 0


def test_autoencoders():
    """In float32 under every policy."""
    vae, tokenizer = AutoencoderKL(KLConfig(embed_dim=3, ch=32, ch_mult=(1, 2))), toy_models()["tokenizer"]
    with standin.cuda():
        pixels = torch.zeros(1, 3, 8, 8, device=standin.DEVICE)
        vae, tokenizer = vae.to(standin.DEVICE), tokenizer.to(standin.DEVICE)
        mean, _ = vae.encode(pixels)
        assert vae.decode(mean).shape == pixels.shape
        assert tokenizer.decode(tokenizer.encode(pixels)).shape[:2] == (1, 3)


# The stand-in sees what it is there for.


def mixed_types(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, torch.zeros(3, 3, dtype=torch.bfloat16, device=standin.DEVICE))


def wrong_device(x: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros(3, 3, device="cuda")


def on_the_cpu(x: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros(3, 3)


@pytest.mark.parametrize("fault", [mixed_types, wrong_device, on_the_cpu])
def test_faults_are_found(fault):
    with standin.cuda():
        x = torch.zeros(3, 3, device=standin.DEVICE)
        with pytest.raises(RuntimeError):
            fault(x)
        with torch.cuda.device(standin.DEVICE):
            assert (torch.zeros(3, 3, device="cuda") + x).device == standin.DEVICE
