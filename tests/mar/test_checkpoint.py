"""Files of weights: which are read, and how others are refused."""

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


@pytest.mark.parametrize("ema", [True, False])
@pytest.mark.parametrize("key", ["model", "model_ema"])
def test_one_set_is_taken_whatever_is_asked(key, ema, save, weights):
    assert_loaded(load_mar(save("weights.pth", {key: weights}), ema=ema), weights)


def test_autoencoder_file(save, vae_weights):
    vae = load_vae(save("kl16.ckpt", {"model": vae_weights}))
    assert_loaded(vae, vae_weights)
    assert vae.config == VAES[VAE]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("metadata", [None, {"arch": DRAFT}])
def test_safetensors_load_as_float32(dtype, metadata, save, weights):
    stored = {name: t.to(dtype) for name, t in weights.items()}
    assert_loaded(load_mar(save("target.safetensors", stored, metadata)), stored)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_prefix_of_all_names_is_dropped(prefix, save, weights):
    assert_loaded(load_mar(save("weights.pth", {"model": {prefix + name: t for name, t in weights.items()}})), weights)


@pytest.mark.parametrize("content", [{"model_ema": {}}, {"model_ema": {"epoch": 3}}, {"model_ema": None, 3: "three"}])
def test_an_empty_set_is_passed_over(content, save, weights):
    assert_loaded(load_mar(save("weights.pth", content | {"model": weights})), weights)


def test_size_is_found_out(save):
    expected = random_weights(create_mar(TARGET), 3)
    assert_loaded(load_mar(save("weights.pth", {"model": expected})), expected)


@pytest.mark.parametrize("img_size, patch", [(96, 1), (64, 2), (16, 1)])
def test_other_resolutions_are_found_out(img_size, patch, save):
    """As the authors' training script makes them with --img_size and --patch_size."""
    config = dataclasses.replace(mar_spec(DRAFT).config, img_size=img_size, patch_size=patch)
    expected = random_weights(MAR(config), 3)
    model = load_mar(save("weights.pth", {"model": expected}))
    assert_loaded(model, expected)
    assert model.config == config and defaults_of(config) == defaults_of(mar_spec(DRAFT).config)


def test_another_size(save):
    path = save("weights.pth", {"model": random_weights(create_mar(TARGET), 3)})
    message = refusal(load_mar, path, DRAFT)
    assert TARGET in message


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"mask_token": torch.zeros(1, 1, 7)}, "mask_token"),
        ({"extra": torch.zeros(1)}, "extra"),
        ({3: torch.zeros(1), b"4": torch.zeros(1)}, "b'4'"),
        ({f"extra.{i}": torch.zeros(1) for i in range(9)}, "extra.0"),
        ({"mask_token": None}, "mask_token"),
        ({"mask_token": [1.0, 2.0]}, "mask_token"),
        (
            {"mask_token": None, "module.mask_token": torch.zeros(1)},
            "module.mask_token",
        ),
    ],
)
@pytest.mark.parametrize("arch", [DRAFT, None])
def test_some_tensors_off(changes, problem, arch, save, weights):
    changed = {name: t for name, t in (weights | changes).items() if t is not None}
    message = refusal(load_mar, save("weights.pth", {"model": changed}), arch)
    assert DRAFT in message and problem in message


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("load", [load_mar, load_vae])
def test_another_model(load, suffix, save, weights, vae_weights):
    tensors, given, wanted = (vae_weights, VAE, "--vae") if load is load_mar else (weights, DRAFT, "checkpoint")
    message = refusal(load, save("file" + suffix, {"model": tensors} if suffix == ".pth" else tensors))
    assert given in message and wanted in message


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (50, 77), (-1, -1)])
def test_values_that_are_no_numbers(place, value, suffix, save, weights):
    damaged = weights | {NAME: weights[NAME].clone()}
    damaged[NAME][place] = value
    message = refusal(load_mar, save("weights" + suffix, {"model": damaged} if suffix == ".pth" else damaged))
    assert NAME in message


def test_unknown_size(save, weights):
    with pytest.raises(ValueError, match="mar_tiny"):
        load_mar(save("weights.pth", {"model": weights}), "mar_tiny")
    with pytest.raises(ValueError, match="mar_bas"):
        load_mar("nowhere.pth", "mar_bas")


# ---- Files that are not there, cut off or of another kind get one error that names them and the way out; no code runs


def test_missing_file(tmp_path):
    assert "no such file; checkpoints/README.md" in refusal(load_mar, tmp_path / "absent.pth")


@pytest.mark.parametrize("name, problem", [(".", "not a file"), ("pipe", "not a file"), ("loop", "no such file")])
def test_what_is_no_file_is_not_opened(name, problem, tmp_path):
    os.mkfifo(tmp_path / "pipe")  # to open it would be to wait for a writer
    (tmp_path / "loop").symlink_to("loop")
    assert f"{problem}; checkpoints/README.md" in refusal(load_vae, tmp_path / name)


@pytest.mark.parametrize("name", ["weights.pth", "legacy.pth", "weights.safetensors"])
def test_truncated_file(name, save, weights):
    content = weights if name.endswith("safetensors") else {"model": weights}
    whole = save(name, content, _use_new_zipfile_serialization=name != "legacy.pth").read_bytes()
    for size in [*range(0, 2000, 97), *(int(f * len(whole)) for f in (0.01, 0.3, 0.9)), len(whole) - 1]:
        message = refusal(load_mar, save(name, whole[:size]))
        assert f"{size:,}" in message


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"<!DOCTYPE html>\n<html>", b"access denied", b"\0" * 99, b"\x80\x02", b"PK\3\4"])
def test_file_of_another_kind(name, content, save):
    message = refusal(load_mar, save(name, content))
    assert ("<!DOCTYPE html>" in message) == content.startswith(b"<")
    assert ("access denied" in message) == content.startswith(b"access")


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_git_lfs_pointer(name, save):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
    assert "is a Git LFS pointer, not the file itself: fetch that with `git lfs pull`" in refusal(
        load_mar, save(name, pointer)
    )


class WritesFile:
    """Pickles to a call that creates a file when it is read without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["weights.pth", "legacy.pth", "weights.safetensors"])
@pytest.mark.parametrize("wrap", [dict, argparse.Namespace])
def test_code_in_a_pickle_does_not_run(wrap, name, save, weights, tmp_path):
    trap = tmp_path / "trap"
    pickle.loads(pickle.dumps(WritesFile(trap))).close()
    trap.unlink()  # so it would have worked
    content = {"model": weights, "args": wrap(output=WritesFile(trap))}
    refusal(load_mar, save(name, content if name == "weights.pth" else pickle.dumps(content, 2)))
    assert not trap.exists()
