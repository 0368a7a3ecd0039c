"""`cspd sample`, `edit`, `serve`, `calibrate` and `tune` on a folder with a causal model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from causals import STEPS, CausalGolden, named
from PIL import Image
from serving import finished, link_of, pixels, served

import cspd
from cspd.causal.family import CausalModels
from cspd.cli import main
from cspd.comparison.study import Configuration, candidates
from cspd.models import save_models
from cspd.request import Request


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    golden = CausalGolden("sphere")
    named(golden, monkeypatch)
    save_models(CausalModels(golden.model, golden.vae), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("method", ["ar", "euler", "speculative:window=4:draft=frozen"])
def test_sample_from_a_folder(method, folder, tmp_path):
    name, *options = method.split(":")
    flags = [part for option in options for part in ("--" + option.replace("=", " ")).split()]
    given = ["--checkpoint", str(folder), "--method", name, "--labels", "3", "--device", "cpu"]
    out = tmp_path / "images"
    assert main(["sample", *given, *flags, "--num-sampling-steps", "8", "--out", str(out)]) == 0
    (image,) = [path for path in out.glob("*.png") if path.name != "grid.png"]
    side = CausalGolden("sphere").model.config.img_size
    assert Image.open(image).size == (side, side)


@pytest.mark.parametrize("part, code", [(["--mask", "lower.png"], 0), (["--keep", "0.5"], 2)])
def test_edit_keeps_the_first_rows(part, code, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    side = CausalGolden("sphere").model.config.img_size
    Image.new("RGB", (side, side), "red").save("in.png")
    lower = Image.new("L", (side, side), 0)
    lower.paste(255, (0, side // 2, side, side))
    lower.save("lower.png")
    given = ["--checkpoint", str(folder), "--method", "ar", "--label", "3", "--device", "cpu", "--image", "in.png"]
    assert main(["edit", *given, *part, "--num-sampling-steps", "4", "--out", "out"]) == code
    printed = capsys.readouterr()
    assert "8 of 16 tokens" in (printed.err if code else printed.out)


def test_served_images_and_edits(folder):
    engine = cspd.load(folder, max_batch=2, device="cpu")
    side = engine.runner.image_size
    image, mask = Image.new("RGB", (side, side), "navy"), Image.new("L", (side, side), 0)
    mask.paste(255, (0, side // 2, side, side))
    given = {"model": "causal", "label": "3", "settings": {"num_sampling_steps": 4}}
    with served({"causal": engine}, most=4, most_each=4) as site:
        (whole,) = finished(site.make(**given))
        (edited,) = finished(site.make(**given, picture=link_of(image), mask=link_of(mask)))
    settings = {"num_sampling_steps": 4, "method": "ar"}
    expected = engine.generate([Request(3, 5, **settings), Request(3, 5, **settings, image=image, mask=mask)])
    for event, output in zip((whole, edited), expected):
        theirs = (output.image * 255).round().permute(1, 2, 0).numpy()
        assert np.abs(pixels(event["image"]).astype(int) - theirs).max() <= 1


def test_calibrate(folder, capsys):
    given = ["calibrate", "--checkpoint", str(folder), "--device", "cpu"]
    assert main([*given, "--method", "calibrated", "--head-calls", "4"]) == 0
    assert f"({STEPS + 1} calls: 0)" in capsys.readouterr().out  # the last step without noise is a call too
    assert main([*given, "--method", "euler"]) == 2


def test_candidates_of_tune(folder):
    with cspd.load(folder, device="cpu") as engine:
        plain = Configuration("ar", Request(3, method="ar"), engine)
        for divergence in (None, 0.0):
            found, left_out = candidates(plain, divergence)
            methods = {row.request.method for row in found}
            assert methods == (
                {"speculative"} if divergence == 0 else {"speculative", "calibrated", "disa", "euler", "heun"}
            )
            assert all(name.split(":")[0] in ("calibrated", "speculative") for name in left_out)  # the chain is short
