"""Official weights files load as they are; any other gets one error that names it and the way out, and runs no code."""

import argparse
import pickle

import pytest
import torch
from safetensors.torch import save_file

from mar.checkpoint import CheckpointError, load_mar, load_vae
from mar.registry import VAES, create_mar, create_vae

DRAFT, TARGET, VAE = "mar_digits32_draft", "mar_digits32", "kl_digits32"


def random_weights(model, seed):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=g) for name, t in model.state_dict().items()}


@pytest.fixture(scope="module")
def weights():
    return random_weights(create_mar(DRAFT), 0)


@pytest.fixture(scope="module")
def vae_weights():
    return random_weights(create_vae(VAE), 1)


@pytest.fixture
def save(tmp_path):
    """Writes a file of this name: bytes, safetensors with metadata, or a torch pickle; returns its path."""

    def write(name, content, metadata=None, **options):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif path.suffix == ".safetensors":
            save_file(content, path, metadata)
        else:
            torch.save(content, path, **options)
        return path

    return write


def assert_loaded(model, expected):
    state = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(t.dtype == torch.float32 and torch.equal(t, expected[name].float()) for name, t in state.items())
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def refusal(load, path, *args, **kwargs):
    """The message of the error that loading raises; it names the file and is free of torch's advice to run its code."""
    with pytest.raises(CheckpointError) as caught:
        load(path, *args, **kwargs)
    message = str(caught.value)
    assert str(path) in message
    assert not any(word in message for word in ("weights_only", "trust", "\x1b"))
    return message


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


def test_size_is_found_out(save):
    expected = random_weights(create_mar(TARGET), 3)
    assert_loaded(load_mar(save("weights.pth", {"model": expected})), expected)


def test_missing_file(tmp_path):
    assert "no such file; checkpoints/README.md" in refusal(load_mar, tmp_path / "absent.pth")
    assert "no such file" in refusal(load_vae, tmp_path)


@pytest.mark.parametrize("name", ["weights.pth", "legacy.pth", "weights.safetensors"])
def test_truncated_file(name, save, weights):
    content = weights if name.endswith("safetensors") else {"model": weights}
    whole = save(name, content, _use_new_zipfile_serialization=name != "legacy.pth").read_bytes()
    for size in [*range(0, 2000, 97), *(int(f * len(whole)) for f in (0.01, 0.3, 0.9)), len(whole) - 1]:
        message = refusal(load_mar, save(name, whole[:size]))
        assert f"{size:,} bytes" in message and "truncated" in message and "fetch it again" in message


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"<!DOCTYPE html>", b"version https://git-lfs", b"access denied", b"\0" * 99])
def test_file_of_another_kind(name, content, save):
    assert "another kind of file: fetch it again" in refusal(load_mar, save(name, content))


class WritesFile:
    """Pickles to a call that creates a file when it is read without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_does_not_run(zipped, save, weights, tmp_path):
    trap = tmp_path / "trap"
    pickle.loads(pickle.dumps(WritesFile(trap))).close()
    trap.unlink()  # so it would have worked
    content = {"model": weights, "args": WritesFile(trap)}
    refusal(load_mar, save("weights.pth", content if zipped else pickle.dumps(content, 2)))
    assert not trap.exists()


@pytest.mark.parametrize("content", [{"weights": {}}, {}, [1, 2], torch.zeros(3), {"model": [1]}, {"model": {"a": 1}}])
def test_pickle_without_weights(content, save):
    assert "expected a dict with model_ema or model" in refusal(load_mar, save("weights.pth", content))


def test_another_size(save):
    path = save("weights.pth", {"model": random_weights(create_mar(TARGET), 3)})
    message = refusal(load_mar, path, DRAFT)
    assert f"not the weights of {DRAFT}" in message and f"these are the weights of {TARGET}: ask for that" in message


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"mask_token": torch.zeros(1, 1, 7)}, "mask_token is [1, 1, 7], expected [1, 1, 96]"),
        ({"extra": torch.zeros(1)}, "1 tensors unexpected (such as extra)"),
        ({"mask_token": None}, "1 tensors missing (such as mask_token)"),
    ],
)
def test_one_tensor_off(changes, problem, save, weights):
    changed = {name: t for name, t in (weights | changes).items() if t is not None}
    message = refusal(load_mar, save("weights.pth", {"model": changed}), DRAFT)
    assert problem in message and f"give the file of {DRAFT}" in message


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("load", [load_mar, load_vae])
def test_another_model(load, suffix, save, weights, vae_weights):
    tensors, arch, kind = (vae_weights, VAE, "MAR model") if load is load_mar else (weights, DRAFT, "autoencoder")
    path = save("file" + suffix, {"model": tensors} if suffix == ".pth" else tensors, {"arch": arch})
    message = refusal(load, path)
    assert f"no {kind}" in message and "give the file of one of these" in message


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers(value, suffix, save, weights):
    name = "decoder_blocks.1.mlp.fc2.bias"
    damaged = weights | {name: weights[name].clone().index_fill_(0, torch.tensor([5]), value)}
    message = refusal(load_mar, save("weights" + suffix, {"model": damaged} if suffix == ".pth" else damaged))
    assert f"{name} has NaN or infinite values" in message and "fetch it again" in message


def test_unknown_size(save, weights):
    with pytest.raises(ValueError, match=rf"unknown MAR model 'mar_tiny': choose one of mar_base, .*{DRAFT}"):
        load_mar(save("weights.pth", {"model": weights}), "mar_tiny")
