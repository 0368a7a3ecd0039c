"""Official weights files load as they are; any other gets one error that names it and the way out, and runs no code."""

import argparse
import dataclasses
import json
import os
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mar.checkpoint import fill, load_mar, load_vae
from mar.model import MAR
from mar.registry import VAES, create_mar, create_vae, defaults_of, mar_spec
from mar.tensors import CheckpointError, read_tensors

DRAFT, TARGET, VAE = "mar_digits32_draft", "mar_digits32", "kl_digits32"
NAME = "decoder_blocks.1.mlp.fc2.weight"


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


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_prefix_of_all_names_is_dropped(prefix, save, weights):
    assert_loaded(load_mar(save("weights.pth", {"model": {prefix + name: t for name, t in weights.items()}})), weights)


@pytest.mark.parametrize("content", [{"model_ema": {}}, {"model_ema": {"epoch": 3}}, {"model_ema": None, 3: "three"}])
def test_an_empty_set_is_passed_over(content, save, weights):
    assert_loaded(load_mar(save("weights.pth", content | {"model": weights})), weights)


@pytest.mark.parametrize(
    "store",
    [
        nn.Parameter,
        torch.Tensor.double,
        lambda weight: weight.T.contiguous().T,
        lambda weight: weight[:1].clone().expand_as(weight),
        lambda weight: weight.flatten().as_strided(weight.shape, (1, 1)),
    ],
    ids=["parameter", "float64", "transposed", "expanded", "overlapping"],
)
def test_any_storage_of_a_tensor_is_made_plain(store, save, weights):
    stored = weights | {NAME: store(weights[NAME])}
    model = load_mar(save("weights.pth", {"model": stored}))
    assert_loaded(model, stored)
    assert all(t.is_contiguous() for t in model.state_dict().values())


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_what_is_plain_already_is_not_copied(name, save, weights):
    path = save(name, {"model": weights} if name == "weights.pth" else weights)
    tensors, model = read_tensors(path), create_mar(DRAFT)
    fill(model, tensors, path)
    assert all(t.data_ptr() == tensors[name].data_ptr() for name, t in model.state_dict().items())


def test_tensors_of_one_storage(save, weights):
    stored = weights | {NAME: weights[NAME.replace("1", "0")]}
    assert_loaded(load_mar(save("weights.pth", {"model": stored})), stored)


def test_an_archive_that_was_packed_again(save, weights, tmp_path):
    """Mapped as it lies, the bytes of a packed archive would be other weights, or none."""
    packed = tmp_path / "packed.pth"
    source = zipfile.ZipFile(save("weights.pth", {"model": weights}))
    with source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert_loaded(load_mar(packed), weights)


@pytest.mark.filterwarnings("ignore")  # torch's, of what it will support no longer
@pytest.mark.parametrize(
    "store, problem",
    [
        (torch.Tensor.to_sparse, "is sparse"),
        (torch.Tensor.to_sparse_csr, "is sparse"),
        (lambda weight: weight.to("meta"), "is without values"),
        (lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8), "is quantised"),
        (lambda weight: torch.nested.nested_tensor([weight, weight]), "is nested"),
        (lambda weight: weight + 1j, "is torch.complex64, expected float64 or float32"),
        (torch.Tensor.char, "is torch.int8, expected"),
        (torch.Tensor.bool, "is torch.bool, expected"),
        (lambda weight: weight.to(torch.float8_e4m3fn), "is torch.float8_e4m3fn, expected"),
        (lambda weight: weight.double() * 1e300, "has NaN or infinite values"),
        (lambda weight: weight[:0], "is [0, 384], expected [96, 384]"),
    ],
    ids="sparse csr meta quantised nested complex int8 bool fp8 huge empty".split(),
)
def test_tensors_that_are_no_weights(store, problem, save, weights):
    assert f"{NAME} {problem}" in refusal(
        load_mar, save("weights.pth", {"model": weights | {NAME: store(weights[NAME])}})
    )


def test_size_is_found_out(save):
    expected = random_weights(create_mar(TARGET), 3)
    assert_loaded(load_mar(save("weights.pth", {"model": expected})), expected)


@pytest.mark.parametrize("img_size, patch", [(64, 1), (64, 2), (16, 1)])
def test_other_resolutions_are_found_out(img_size, patch, save):
    """As the authors' training script makes them with --img_size and --patch_size."""
    config = dataclasses.replace(mar_spec(DRAFT).config, img_size=img_size, patch_size=patch)
    expected = random_weights(MAR(config), 3)
    model = load_mar(save("weights.pth", {"model": expected}))
    assert_loaded(model, expected)
    assert model.config == config and defaults_of(config) == defaults_of(mar_spec(DRAFT).config)


def test_missing_file(tmp_path):
    assert "no such file; checkpoints/README.md" in refusal(load_mar, tmp_path / "absent.pth")


@pytest.mark.parametrize("name, problem", [(".", "not a file"), ("pipe", "not a file"), ("loop", "no such file")])
def test_what_is_no_file_is_not_opened(name, problem, tmp_path):
    os.mkfifo(tmp_path / "pipe")  # to open it would be to wait for a writer
    (tmp_path / "loop").symlink_to("loop")
    assert f"{problem}; checkpoints/README.md" in refusal(load_vae, tmp_path / name)


def test_a_name_that_cannot_be_opened(tmp_path):
    assert "cannot be read (File name too long)" in refusal(load_mar, tmp_path / ("a" * 300))


@pytest.mark.parametrize("name", ["weights.pth", "legacy.pth", "weights.safetensors"])
def test_truncated_file(name, save, weights):
    content = weights if name.endswith("safetensors") else {"model": weights}
    whole = save(name, content, _use_new_zipfile_serialization=name != "legacy.pth").read_bytes()
    for size in [*range(0, 2000, 97), *(int(f * len(whole)) for f in (0.01, 0.3, 0.9)), len(whole) - 1]:
        message = refusal(load_mar, save(name, whole[:size]))
        assert f"{size:,} bytes" in message and "truncated" in message and "fetch it again" in message


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"<!DOCTYPE html>\n<html>", b"access denied", b"\0" * 99, b"\x80\x02", b"PK\3\4"])
def test_file_of_another_kind(name, content, save):
    message = refusal(load_mar, save(name, content))
    assert "another kind of file: fetch it again" in message
    assert ("begins with '<!DOCTYPE html>'" in message) == content.startswith(b"<")
    assert ("begins with 'access denied'" in message) == content.startswith(b"access")


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_git_lfs_pointer(name, save):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
    assert "is a Git LFS pointer, not the file itself: fetch that with `git lfs pull`" in refusal(
        load_mar, save(name, pointer)
    )


@pytest.mark.filterwarnings("ignore")  # torch's, of TorchScript
def test_archives_of_something_else(save, tmp_path):
    with zipfile.ZipFile(tmp_path / "photos.pth", "w") as archive:
        archive.writestr("photos/one.png", b"png")
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "script.pth")
    for name in ("photos.pth", "script.pth"):
        assert "another kind of file" in refusal(load_mar, tmp_path / name)


@pytest.mark.parametrize(
    "shapes, offsets, data",
    [
        ([[10**6]], [[0, 4 * 10**6]], 4),  # more than the file has
        ([[10**15]], [[0, 4]], 4),  # more than its own bytes
        ([[1], [1]], [[0, 4], [0, 4]], 4),  # the same bytes twice
        ([[1], [1]], [[0, 4], [8, 12]], 12),  # a hole
    ],
)
def test_safetensors_that_lie(shapes, offsets, data, save):
    entries = {
        str(i): {"dtype": "F32", "shape": shape, "data_offsets": place}
        for i, (shape, place) in enumerate(zip(shapes, offsets))
    }
    header = json.dumps(entries).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(data)
    assert "cannot be read as weights" in refusal(load_mar, save("weights.safetensors", content))


def test_safetensors_with_a_header_longer_than_the_file(save):
    content = (99_000_000).to_bytes(8, "little") + b"{}"
    assert "cannot be read as weights" in refusal(load_mar, save("weights.safetensors", content))


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


@pytest.mark.parametrize(
    "content", [{"weights": {}}, {}, [1, 2], torch.zeros(3), {"model": [1]}, {"model": {"a": 1}}, {1: 2}]
)
def test_pickle_without_weights(content, save):
    assert "under model_ema or model or" in refusal(load_mar, save("weights.pth", content))


def test_another_size(save):
    path = save("weights.pth", {"model": random_weights(create_mar(TARGET), 3)})
    message = refusal(load_mar, path, DRAFT)
    assert f"these are the weights of {TARGET} (MAR model), not of the expected MAR model ({DRAFT})" in message
    assert "ask for that, or leave arch out" in message


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"mask_token": torch.zeros(1, 1, 7)}, "misshapen: mask_token is [1, 1, 7], expected [1, 1, 96]:"),
        ({"extra": torch.zeros(1)}, "unexpected: extra:"),
        ({3: torch.zeros(1), b"4": torch.zeros(1)}, "unexpected: 3, b'4':"),
        ({f"extra.{i}": torch.zeros(1) for i in range(9)}, "unexpected: extra.0, extra.1, extra.2 and 6 more:"),
        ({"mask_token": None}, "missing: mask_token:"),
        ({"mask_token": [1.0, 2.0]}, "missing: mask_token:"),
        (
            {"mask_token": None, "module.mask_token": torch.zeros(1)},
            "missing: mask_token; unexpected: module.mask_token:",
        ),
    ],
)
@pytest.mark.parametrize("arch", [DRAFT, None])
def test_some_tensors_off(changes, problem, arch, save, weights):
    changed = {name: t for name, t in (weights | changes).items() if t is not None}
    message = refusal(load_mar, save("weights.pth", {"model": changed}), arch)
    assert f"compared with {DRAFT}, {problem}" in message and "give the file of one of these" in message


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("load", [load_mar, load_vae])
def test_another_model(load, suffix, save, weights, vae_weights):
    tensors, given, wanted, place = (
        (vae_weights, f"{VAE} (autoencoder)", "MAR model", "give it as vae of a MAR model (--vae)")
        if load is load_mar
        else (weights, f"{DRAFT} (MAR model)", "autoencoder", "give it as checkpoint")
    )
    message = refusal(load, save("file" + suffix, {"model": tensors} if suffix == ".pth" else tensors))
    assert f"these are the weights of {given}, not of the expected {wanted}" in message and place in message


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (50, 77), (-1, -1)])
def test_values_that_are_no_numbers(place, value, suffix, save, weights):
    damaged = weights | {NAME: weights[NAME].clone()}
    damaged[NAME][place] = value
    message = refusal(load_mar, save("weights" + suffix, {"model": damaged} if suffix == ".pth" else damaged))
    assert f"{NAME} has NaN or infinite values" in message and "fetch it again" in message


def test_unknown_size(save, weights):
    with pytest.raises(ValueError, match=rf"unknown MAR model 'mar_tiny': choose one of mar_base, .*{DRAFT}"):
        load_mar(save("weights.pth", {"model": weights}), "mar_tiny")
    with pytest.raises(ValueError, match=r"unknown MAR model 'mar_bas': did you mean mar_base\?"):
        load_mar("nowhere.pth", "mar_bas")
