"""Official weights files of VQ models load as they are; other files are refused, with advice."""

import argparse
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from cspd.discrete.gpt import GPT, Eagle
from cspd.discrete.registry import (
    create_gpt,
    create_tokenizer,
    defaults_of,
    gpt_spec,
    load_eagle,
    load_gpt,
    load_tokenizer,
)
from mar.checkpoint import create_mar, create_vae, load_mar, load_vae
from mar.tensors import Assumed, CheckpointError

TARGET, DRAFT = "gpt_digits32", "gpt_digits32_draft"


def random_weights(model):
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(t.shape, generator=g) for name, t in model.state_dict().items()}


@pytest.fixture(scope="module")
def weights():
    return random_weights(create_gpt(DRAFT))


@pytest.mark.parametrize("wrap", ["model", "module", "state_dict", None])
def test_wrappers(wrap, weights, tmp_path):
    path = tmp_path / "c2i_B.pt"
    torch.save({wrap: weights, "steps": 3} if wrap else weights, path)
    with pytest.warns(Assumed):
        state = load_gpt(path).state_dict()
    assert state.keys() == weights.keys() and all(torch.equal(state[name], weights[name]) for name in state)


def test_halves_and_safetensors(weights, tmp_path):
    path = tmp_path / "draft.safetensors"
    save_file({name: t.bfloat16() for name, t in weights.items()}, path)
    with pytest.warns(Assumed):
        model = load_gpt(path, DRAFT)
    assert all(t.dtype == torch.float32 for t in model.state_dict().values())
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def tokens_of(path, weights, **args):
    torch.save({"model": weights, "args": argparse.Namespace(**args)} if args else {"model": weights}, path)
    return load_gpt(path).config.block_size


@pytest.mark.parametrize(
    "name, tokens",
    [("c2i_B_256.pt", 128**2), ("c2i_L_384.pt", 192**2), ("c2i_B_448_v2.pt", 224**2)],
)
def test_resolution_is_in_the_name(name, tokens, weights, tmp_path):
    assert tokens_of(tmp_path / name, weights) == tokens  # the bundled tokenizer has a stride of 2


def test_resolution_is_in_the_arguments_of_the_training_script(weights, tmp_path):
    """With the stride of its tokenizer. They win over the name."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens_of(tmp_path / "0250000.pt", weights, image_size=448, downsample_size=16) == 784
        assert tokens_of(tmp_path / "c2i_B_256.pt", weights, image_size=384) == 192**2


@pytest.mark.parametrize(
    "name, pixels",
    [("0250000.pt", 32), ("c2i_3B.pt", 32), ("own_1200.pt", 32), ("own_448.pt", 448), ("t2i-512px.pt", 512)],
)
def test_an_assumed_resolution_is_reported(name, pixels, weights, tmp_path):
    with pytest.warns(Assumed, match=f"{pixels} pixels"):
        assert tokens_of(tmp_path / name, weights) == (pixels // 2) ** 2


@pytest.mark.parametrize("tokens", [0, -16, 15])
def test_an_absurd_number_of_tokens(tokens, weights, tmp_path):
    save_file(weights, tmp_path / "draft.safetensors")
    with pytest.raises(CheckpointError, match="block_size"):
        load_gpt(tmp_path / "draft.safetensors", sizes={"block_size": tokens})


def test_a_gpt_of_three_classes(tmp_path):
    """A fine-tuned official size, and its sampling settings."""
    config = replace(gpt_spec(DRAFT).config, num_classes=3)
    torch.save({"model": random_weights(GPT(config))}, tmp_path / "c2i_B_256.pt")
    loaded = load_gpt(tmp_path / "c2i_B_256.pt").config
    assert loaded == replace(config, block_size=128**2) and defaults_of(loaded).image_size == 32


@pytest.mark.parametrize("size, cfg, tokens", [("b", 2.0, 256), ("l", 2.0, 256), ("xl", 1.75, 576), ("3b", 1.65, 576)])
def test_official_settings(size, cfg, tokens):
    spec = gpt_spec(f"llamagen_{size}")
    assert spec.defaults.cfg == defaults_of(spec.config).cfg == cfg and spec.config.block_size == tokens


@pytest.mark.parametrize(
    "load, create",
    [(load_tokenizer, lambda: create_tokenizer("vq_digits32")), (load_eagle, lambda: Eagle(gpt_spec(TARGET).config))],
)
def test_the_other_models(load, create, tmp_path):
    weights = random_weights(create())
    torch.save({"model": weights}, tmp_path / "weights.pt")
    state = load(tmp_path / "weights.pt").state_dict()
    assert all(torch.equal(state[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    "load, create, message",
    [
        (load_mar, lambda: create_gpt(DRAFT), "GPT"),
        (load_mar, lambda: Eagle(gpt_spec(DRAFT).config), "EAGLE"),
        (load_vae, lambda: create_tokenizer("vq_digits32"), "vq_digits32"),
        (load_gpt, lambda: Eagle(gpt_spec(TARGET).config), "EAGLE"),
        (load_gpt, lambda: create_mar("mar_digits32_draft"), "mar_digits32_draft"),
        (load_tokenizer, lambda: create_vae("kl_digits32"), "kl_digits32"),
        (load_eagle, lambda: create_gpt(DRAFT), "EAGLE"),
    ],
)
def test_files_of_other_models_are_recognised(load, create, message, tmp_path):
    torch.save({"model": create().state_dict()}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "weights.pt")


def test_a_size_of_another_family():
    with pytest.raises(ValueError, match="llamagen_b"):
        load_mar("weights.pt", "llamagen_b")
    with pytest.raises(ValueError, match="mar_base"):
        load_gpt("weights.pt", "mar_base")
    with pytest.raises(ValueError, match="nope"):
        create_gpt("nope")


def test_other_weights_are_compared_with_the_nearest_size(weights, tmp_path):
    name = "output.weight"
    path = tmp_path / "weights.pt"
    torch.save({"model": weights | {name: torch.zeros(101, 160)}}, path)
    with pytest.raises(CheckpointError, match=name):
        load_gpt(path)
    torch.save({"model": weights}, path)
    with pytest.raises(CheckpointError, match=DRAFT):
        load_gpt(path, TARGET)
