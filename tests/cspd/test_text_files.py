"""Models of texts from their files, and `cspd sample` of prompts: folders, names, resuming, errors."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from stores import small_vq_checkpoint

import cspd
from cspd.checkpoints import checkpoint_files
from cspd.cli import main
from cspd.discrete.registry import SamplingDefaults, create_gpt, defaults_of, gpt_spec, load_gpt
from mar.tensors import CheckpointError

NAMES = ["00000_text-a-red-fox_seed5.png", "00001_text-blue_seed6.png", "00002_text-a-red-fox_seed7.png"]


@pytest.fixture(scope="module")
def folder(text_checkpoint):
    return text_checkpoint


def run(*args):
    return main(["sample", "--device", "cpu", "--method", "ar", *map(str, args)])


def test_all_files_are_found(folder):
    files = checkpoint_files(folder)
    assert {name: file and file.name for name, file in files.items()} == {
        "target": "t2i_small.pt",
        "draft": None,
        "eagle": None,
        "tokenizer": "vq_ds16_t2i.pt",
        "text_encoder": "flan-t5-xl",
    }
    (output,) = cspd.load(folder, device="cpu").sample(prompts="a red fox", method="ar")
    assert output.image.shape == (3, 8, 8) and output.class_name == "a red fox"
    assert (output.request.cfg, output.request.top_k) == (3.0, 100)
    assert repr(output.request).startswith("Request(prompt='a red fox', seed=0, method='ar'")


def test_each_target_has_its_own_tokenizer(folder, tmp_path):
    """Where models of classes and of texts lie side by side."""
    for name in ("c2i_B_256.pt", "t2i_XL_stage1_256.pt", "vq_ds16_c2i.pt", "vq_ds16_t2i.pt"):
        (tmp_path / name).touch()
    for kind, name in (("c2i", "c2i_B_256.pt"), ("t2i", "t2i_XL_stage1_256.pt")):
        assert checkpoint_files(tmp_path / name)["tokenizer"].name == f"vq_ds16_{kind}.pt"


@pytest.mark.parametrize("name, pixels", [("t2i_XL_stage1_256.pt", 256), ("t2i_XL_stage2_512.pt", 512)])
def test_published_settings(name, pixels, folder, tmp_path):
    shutil.copy(folder / "t2i_small.pt", tmp_path / name)
    assert load_gpt(tmp_path / name).config.block_size == (pixels // 2) ** 2  # of the bundled tokenizer's stride of 2
    defaults = defaults_of(replace(gpt_spec("llamagen_xl_t2i").config, block_size=(pixels // 16) ** 2))
    assert defaults == SamplingDefaults(cfg=7.5, top_k=1000, image_size=pixels)


def test_models_are_saved_and_loaded(folder, tmp_path):
    engine = cspd.load(folder, device="cpu")
    engine.save_pretrained(tmp_path / "saved")
    again = cspd.load(tmp_path / "saved", text_encoder=folder / "t5-ckpt" / "flan-t5-xl", device="cpu")
    own, saved = (each.runner.models["target"].state_dict() for each in (engine, again))
    assert own.keys() == saved.keys() and all(torch.equal(own[name], saved[name]) for name in own)
    assert again.runner.text_encoder.identity == engine.runner.text_encoder.identity


def test_prompts_into_a_folder(folder, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("A red fox!\n  blue\n\n")
    command = ["--checkpoint", folder, "--prompts", prompts, "--num", 3, "--seed", 5, "--out", out]
    assert run(*command) == 0
    assert sorted(path.name for path in out.glob("0*.png")) == NAMES
    record = json.loads((out / "samples.json").read_text())
    assert [image["request"]["prompt"] for image in record["images"]] == ["A red fox!", "blue", "A red fox!"]
    assert len(record["settings"]["text_encoder"]) == 64
    first = (out / NAMES[0]).read_bytes()
    (out / NAMES[1]).unlink()
    assert run(*command) == 0
    assert "1 " in capsys.readouterr().out and (out / NAMES[0]).read_bytes() == first
    prompts.write_text("a red fox\nblue\n")
    assert run(*command) == 2
    assert "prompt" in capsys.readouterr().err


def test_long_captions_are_wrapped(folder, tmp_path):
    """The grid is higher by as many lines, and no wider."""
    heights = []
    for text in ("a fox", "a fox " * 40):
        out = tmp_path / str(len(text))
        with pytest.warns() if len(text) > 9 else pytest.MonkeyPatch.context():
            assert run("--checkpoint", folder, "--prompt", text, "--negative-prompt", "", "--out", out) == 0
        with Image.open(out / "grid.png") as grid:
            heights.append(grid.size)
    assert heights[0][0] == heights[1][0] and heights[0][1] < heights[1][1]


def test_bad_commands(folder, tmp_path, capsys):
    (tmp_path / "no_encoder").mkdir()
    for name in ("t2i_small.pt", "vq_ds16_t2i.pt"):
        shutil.copy(folder / name, tmp_path / "no_encoder" / name)
    told = {
        ("--checkpoint", small_vq_checkpoint(), "--prompt", "a"): "prompt",
        ("--checkpoint", "digits32", "--prompt", "a"): "prompt",
        ("--checkpoint", folder): "label",
        ("--checkpoint", folder, "--labels", "none"): "prompt",
        ("--checkpoint", folder, "--prompt", "a", "--negative-prompt", "b", "--cfg", 1): "negative_prompt",
        (
            "--checkpoint",
            folder,
            "--prompts",
            tmp_path / "none.txt",
        ): "none.txt",
        ("--checkpoint", tmp_path / "no_encoder", "--prompt", "a"): "text encoder",
        ("--checkpoint", small_vq_checkpoint(), "--text-encoder", tmp_path): "text_encoder",
        ("--checkpoint", "digits32", "--text-encoder", tmp_path): "text_enc",
        ("--checkpoint", folder, "--prompt", "a", "--text-encoder", tmp_path): str(tmp_path),
    }
    for args, message in told.items():
        assert run(*args, "--out", tmp_path / "out") == 2
        error = capsys.readouterr().err
        assert message in error and error.startswith("cspd: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        run("--prompt", "a", "--labels", "1")


def test_a_checkpoint_of_another_architecture(folder, tmp_path):
    weights = create_gpt("gpt_digits32_draft").state_dict()
    torch.save({"model": weights}, tmp_path / "t2i_XL_stage1_256.pt")
    assert load_gpt(tmp_path / "t2i_XL_stage1_256.pt").config.num_classes == 10  # known by its tensors
    with pytest.raises(CheckpointError, match="gpt_digits32_draft"):
        load_gpt(tmp_path / "t2i_XL_stage1_256.pt", "llamagen_xl_t2i")
    assert Path(folder / "t2i_small.pt").exists()
