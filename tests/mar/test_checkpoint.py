"""Files of weights: which ones are read, and how others are refused."""

import argparse
import dataclasses
import os
import pickle

import pytest
import torch
from weights import DRAFT, TARGET, VAE, draft_weights, file_writer, random_weights, refusal  # noqa: F401 - fixtures

from mar.checkpoint import VAES, create_mar, create_vae, defaults_of, load_mar, load_vae, mar_spec
from mar.model import MAR

NAME = "decoder_blocks.1.mlp.fc2.weight"


@pytest.fixture(scope="module")
def vae_weights():
    return random_weights(create_vae(VAE), 1)


def assert_loaded(model, expected):
    state = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(t.dtype == torch.float32 and torch.equal(t, expected[name].float()) for name, t in state.items())
    assert not model.training and not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("zipped", [True, False])
def test_official_file_holds_two_sets(zipped, save, weights):
    plain = random_weights(create_mar(DRAFT), 2)
    content = {"model": plain, "model_ema": weights, "epoch": 400, "args": argparse.Namespace(lr=1e-4, model=DRAFT)}
    path = save("checkpoint-last.pth", content, _use_new_zipfile_serialization=zipped)
    assert_loaded(load_mar(path), weights)
    assert_loaded(load_mar(str(path), arch=DRAFT, ema=False), plain)


@pytest.mark.parametrize("other", [{}, {"model_ema": {}}, {"model_ema": None, 3: "three"}])
def test_a_single_set(other, save, weights):
    path = save("weights.pth", other | {"model": weights})
    for ema in (True, False):
        assert_loaded(load_mar(path, ema=ema), weights)


def test_autoencoder_file(save, vae_weights):
    vae = load_vae(save("kl16.ckpt", {"model": vae_weights}))
    assert_loaded(vae, vae_weights)
    assert vae.config == VAES[VAE]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_safetensors_load_as_float32(dtype, save, weights):
    stored = {name: t.to(dtype) for name, t in weights.items()}
    assert_loaded(load_mar(save("target.safetensors", stored, {"arch": DRAFT})), stored)


@pytest.mark.parametrize("prefix", ["module.", "module._orig_mod."])
def test_a_prefix_of_all_names_is_dropped(prefix, save, weights):
    assert_loaded(load_mar(save("weights.pth", {"model": {prefix + name: t for name, t in weights.items()}})), weights)


@pytest.mark.parametrize("img_size, patch", [(96, 1), (64, 2), (16, 1)])
def test_resolution_is_found(img_size, patch, save):
    """As the authors' training script changes it with --img_size and --patch_size."""
    config = dataclasses.replace(mar_spec(DRAFT).config, img_size=img_size, patch_size=patch)
    expected = random_weights(MAR(config), 3)
    model = load_mar(save("weights.pth", {"model": expected}))
    assert_loaded(model, expected)
    assert model.config == config and defaults_of(config) == defaults_of(mar_spec(DRAFT).config)


def test_size_is_found(save):
    expected = random_weights(create_mar(TARGET), 3)
    path = save("weights.pth", {"model": expected})
    assert_loaded(load_mar(path), expected)
    assert TARGET in refusal(load_mar, path, DRAFT)
    for name in ("mar_tiny", "mar_bas"):
        with pytest.raises(ValueError, match=name):
            load_mar(path, name)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"mask_token": torch.zeros(1, 1, 7)}, "mask_token"),
        ({f"extra.{i}": torch.zeros(1) for i in range(9)}, "extra.0"),
        ({"mask_token": None}, "mask_token"),
    ],
)
def test_wrong_tensors(changes, problem, save, weights):
    changed = {name: t for name, t in (weights | changes).items() if t is not None}
    path = save("weights.pth", {"model": changed})
    for arch in (DRAFT, None):
        message = refusal(load_mar, path, arch)
        assert DRAFT in message and problem in message


def test_another_model(save, weights, vae_weights):
    for load, tensors, name, advice in (
        (load_mar, vae_weights, VAE, "--vae"),
        (load_vae, weights, DRAFT, "checkpoint"),
    ):
        message = refusal(load, save("weights.safetensors", tensors))
        assert name in message and advice in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (-1, -1)])
def test_values_that_are_not_finite(place, value, save, weights):
    damaged = weights | {NAME: weights[NAME].clone()}
    damaged[NAME][place] = value
    assert NAME in refusal(load_mar, save("weights.safetensors", damaged))


@pytest.mark.parametrize("name", ["absent.pth", ".", "pipe"])
def test_no_file(name, tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    assert "docs/checkpoints.md" in refusal(load_vae, tmp_path / name)


@pytest.mark.parametrize("name", ["weights.pth", "legacy.pth", "weights.safetensors"])
def test_truncated_file(name, save, weights):
    content = weights if name.endswith("safetensors") else {"model": weights}
    whole = save(name, content, _use_new_zipfile_serialization=name != "legacy.pth").read_bytes()
    for size in (0, 1, 97, 1940, len(whole) // 3, len(whole) - 1):
        message = refusal(load_mar, save(name, whole[:size]))
        assert f"{size:,}" in message


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
@pytest.mark.parametrize(
    "content, told",
    [
        (b"<!DOCTYPE html>\n<html>", "<!DOCTYPE html>"),
        (b"access denied", "access denied"),
        (b"\0" * 99, ""),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n", "git lfs pull"),
    ],
)
def test_file_of_another_kind(name, content, told, save):
    assert told in refusal(load_mar, save(name, content))


class WritesFile:
    """Pickles to a call that creates a file when it is unpickled carelessly."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["weights.pth", "legacy.pth", "weights.safetensors"])
@pytest.mark.parametrize("wrap", [dict, argparse.Namespace])
def test_code_in_a_pickle_does_not_run(wrap, name, save, weights, tmp_path):
    trap = tmp_path / "trap"
    pickle.loads(pickle.dumps(WritesFile(trap))).close()
    trap.unlink()  # so the trap works
    content = {"model": weights, "args": wrap(output=WritesFile(trap))}
    refusal(load_mar, save(name, content if name == "weights.pth" else pickle.dumps(content, 2)))
    assert not trap.exists()
