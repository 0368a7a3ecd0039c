"""`cspd sample` on a folder with a causal model."""

from __future__ import annotations

import pytest
from causals import CausalGolden, named
from PIL import Image

from cspd.causal.family import CausalModels
from cspd.cli import main
from cspd.models import save_models


@pytest.mark.parametrize("method", ["ar", "euler", "speculative:window=4:draft=frozen"])
def test_sample_from_a_folder(method, tmp_path, monkeypatch):
    golden = CausalGolden("sphere")
    named(golden, monkeypatch)
    save_models(CausalModels(golden.model, golden.vae), tmp_path / "model")
    name, *options = method.split(":")
    flags = [part for option in options for part in ("--" + option.replace("=", " ")).split()]
    given = ["--checkpoint", str(tmp_path / "model"), "--method", name, "--labels", "3", "--device", "cpu"]
    out = tmp_path / "images"
    assert main(["sample", *given, *flags, "--num-sampling-steps", "8", "--out", str(out)]) == 0
    (image,) = [path for path in out.glob("*.png") if path.name != "grid.png"]
    side = golden.model.config.img_size
    assert Image.open(image).size == (side, side)
