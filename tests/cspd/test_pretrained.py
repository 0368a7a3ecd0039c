"""Folders of models of transformers: which files of them are meant, and what makes them others."""

from __future__ import annotations

import pytest

from cspd.files import WEIGHTS, check_files, identity_of, weight_files
from mar.tensors import CheckpointError

PARTS = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]


@pytest.mark.parametrize(
    ("names", "weights"),
    [
        (["model.safetensors", "model-00001-of-00001.safetensors", "eagle.safetensors"], ["model.safetensors"]),
        (["model-2-of-2.safetensors", "model-1-of-2.safetensors", "pytorch_model.bin"], PARTS),
        (["pytorch_model.bin", "eagle.safetensors"], ["pytorch_model.bin"]),
        (["eagle.safetensors"], []),
    ],
)
def test_the_weights_of_a_folder(names, weights, tmp_path):
    """Whole or in parts, not both, as transformers reads them; a drafter beside them is none of them."""
    for name in names:
        (tmp_path / name).touch()
    assert [file.name for file in weight_files(tmp_path)] == weights


def test_what_a_folder_lacks_is_told(tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        check_files(tmp_path, {"configuration": ("config.json",), "weights": WEIGHTS}, "a toy", "fetch it")


def test_hidden_files_make_no_other_folder(tmp_path):
    (tmp_path / "config.json").touch()
    before = identity_of(tmp_path)
    (tmp_path / ".DS_Store").touch()
    assert identity_of(tmp_path) == before
    (tmp_path / "tokenizer.json").touch()
    assert identity_of(tmp_path) != before
