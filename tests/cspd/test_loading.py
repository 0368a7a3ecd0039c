"""`cspd.load` and its files: names, folders and paths that are not what they should be get one clear error."""

import configparser
import shutil
from pathlib import Path

import pytest
import torch
from stores import small_checkpoint, small_vq_checkpoint

import cspd
from cspd import checkpoints as cspd_checkpoints
from cspd import device as cspd_device
from cspd import models
from cspd.checkpoints import checkpoint_files
from cspd.evaluation.metrics import load_classifier
from cspd.models import bundled
from mar.tensors import CheckpointError, read_tensors


@pytest.mark.parametrize(
    "name, message",
    [
        ("digits32vq", "digits32_vq"),
        ("Digits32", "digits32"),
        ("~nobody/mar", "digits32"),
        ("a\0b", "digits32"),
    ],
)
def test_a_name_that_is_none(name, message):
    with pytest.raises(CheckpointError) as caught:
        checkpoint_files(name)
    assert str(caught.value).startswith(f"{name}: no checkpoint there") and message in str(caught.value)


@pytest.mark.parametrize(
    "names",
    [
        ("target.safetensors", "checkpoint-last.pth"),
        ("c2i_B_256.pt", "c2i_L_256.pt"),
        ("checkpoint-last.pth", "c2i_B.pt"),
    ],
)
def test_a_folder_with_two_targets(names, tmp_path):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError):
        checkpoint_files(tmp_path)
    assert checkpoint_files(tmp_path / names[0])["target"] == tmp_path / names[0]


def test_what_lies_beside_does_not_hide_the_target(tmp_path):
    """A tokenizer in MAR's folder, and a folder that is called like a GPT's file."""
    folder = tmp_path / "c2i_and_others"
    folder.mkdir()
    for name in ("checkpoint-last.pth", "vq_ds16_c2i.pt", "kl16.ckpt"):
        (folder / name).touch()
    files = checkpoint_files(folder)
    assert files["target"].name == "checkpoint-last.pth" and files["vae"].name == "kl16.ckpt"


def test_the_autoencoder_of_the_other_family():
    with pytest.raises(CheckpointError, match="vq_digits32"):
        cspd.load(small_checkpoint(), vae=checkpoint_files("digits32_vq")["tokenizer"], device="cpu")
    with pytest.raises(CheckpointError, match="kl_digits32"):
        cspd.load(small_vq_checkpoint(), vae=checkpoint_files("digits32")["vae"], device="cpu")


def test_an_installation_without_bundled_checkpoints(monkeypatch, tmp_path):
    own = small_checkpoint()
    monkeypatch.setattr(models, "BUNDLED_ROOTS", (tmp_path / "nowhere",))
    assert bundled() == {}
    assert cspd.load(own, device="cpu").runner is not None
    with pytest.raises(CheckpointError, match="digits32"):
        cspd.load()
    with pytest.raises(FileNotFoundError, match="digits32"):
        load_classifier("digits")


def test_a_package_has_all_files_of_the_bundled_models():
    root = Path(__file__).parents[2]
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg")
    packages = config["options"]["packages"].split()
    there = {file for folder in bundled().values() for file in folder.rglob("*") if file.is_file()}
    for package, patterns in config["options.package_data"].items():
        if package in packages and package.startswith("cspd.checkpoints."):
            folder = root / Path(*package.split(".")[1:])
            there -= {file for pattern in patterns.split(", ") for file in folder.glob(pattern)}
    assert not there


def test_a_classifier_that_is_another_file(monkeypatch, tmp_path):
    (tmp_path / "digits32").mkdir()
    monkeypatch.setattr(models, "BUNDLED_ROOTS", (tmp_path,))
    file = tmp_path / "digits32" / "classifier.safetensors"
    shutil.copy(f"{small_checkpoint()}/vae.safetensors", file)
    with pytest.raises(CheckpointError, match=str(file)):
        load_classifier("digits")
    shutil.copy(cspd_checkpoints.__file__, file)
    with pytest.raises(CheckpointError):
        load_classifier("digits")


def test_weights_that_do_not_fit_are_not_read(monkeypatch):
    """Names and shapes say how much they take. The sizes of large ones are told."""
    files = checkpoint_files(small_checkpoint())
    needed = 4 * sum(tensor.numel() for name in ("target", "vae") for tensor in read_tensors(files[name]).values())
    monkeypatch.setattr(cspd_checkpoints, "free_bytes", lambda device: needed - 1)
    with pytest.raises(ValueError, match=r"target\.safetensors"):
        cspd.load(small_checkpoint(), device="cpu")
    monkeypatch.setattr(cspd_checkpoints, "free_bytes", lambda device: needed)
    cpu = torch.device("cpu")
    assert cspd_checkpoints._room_for(files, cpu) == ""
    monkeypatch.setattr(cspd_device, "LARGE", needed)
    monkeypatch.setattr(cspd_device, "free_bytes", lambda device: needed)
    assert cspd_checkpoints._room_for(files, cpu) == ", which takes 0.0 GiB of 0.0 GiB free"
