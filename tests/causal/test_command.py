"""`cspd sample`, `edit`, `serve`, `calibrate` and `tune` on a folder with a causal model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from causals import STEPS, CausalGolden, named
from PIL import Image
from serving import finished, link_of, message_of, pixels, served

import cspd
from cspd.causal.family import CausalModels
from cspd.cli import main
from cspd.comparison.study import Configuration, candidates
from cspd.evaluation.run import MANIFEST, run_in
from cspd.files import write_bytes, write_json
from cspd.method import method_names
from cspd.models import save_models
from cspd.pixels import PNG_TEXT, png_of, png_text
from cspd.request import Request
from cspd.serving.gallery import Gallery


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


@pytest.mark.parametrize("method", method_names(["causal"]))
def test_a_first_timestep_is_refused(method, folder, tmp_path, capsys):
    """These models' chains have none: all begin at t = 0."""
    given = ["--checkpoint", str(folder), "--method", method, "--labels", "3", "--device", "cpu"]
    assert main(["sample", *given, "--first-timestep", "500", "--out", str(tmp_path / "out")]) == 2
    assert "first_timestep=500" in capsys.readouterr().err and not (tmp_path / "out").exists()
    with cspd.load(folder, device="cpu") as engine, pytest.raises(ValueError, match="first_timestep=500"):
        engine.check(Request(3, method=method, first_timestep=500))


def test_files_of_earlier_versions_with_a_first_timestep(folder, tmp_path, capsys):
    """It is left out without a word: a picture is generated again, a run is read, and the gallery does not show it."""
    given = ["--checkpoint", str(folder), "--method", "disa", "--upper", "6", "--lower", "3", "--device", "cpu"]
    assert main(["sample", *given, "--labels", "3", "--seed", "7", "--out", str(tmp_path / "a")]) == 0
    made = tmp_path / "a" / "00000_label3_seed7.png"
    earlier = tmp_path / "earlier.png"
    with Image.open(made) as image:
        settings = json.loads(image.text[PNG_TEXT])
        write_bytes(earlier, png_of(image, png_text(settings["request"] | {"first_timestep": 950}, settings["models"])))
    capsys.readouterr()
    assert main(["sample", "--like", str(earlier), "--device", "cpu", "--out", str(tmp_path / "b")]) == 0
    assert "first" not in capsys.readouterr().err
    assert (tmp_path / "b" / made.name).read_bytes() == made.read_bytes()
    (shown,) = Gallery(tmp_path).newest(2)
    assert shown["file"] == earlier.name and "first_timestep" not in shown["settings"]

    run = tmp_path / "run"
    assert main(["sample", *given, "--labels", "3", "--num", "2", "--shard", "0/1", "--out", str(run)]) == 0
    expected = run_in(run).requests([0, 1])
    manifest = json.loads((run / MANIFEST).read_text())
    write_json(run / MANIFEST, manifest | {"request": manifest["request"] | {"first_timestep": 950}})
    assert run_in(run).requests([0, 1]) == expected


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
        refused = site.make(**given, methods=["disa:first_timestep=500"])
        assert refused.status == 400 and "first_timestep" in message_of(refused)
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
