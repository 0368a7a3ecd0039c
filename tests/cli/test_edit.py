"""`cspd edit`: pictures in, pictures out, in a folder that goes on where it was; and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from stores import small_checkpoint, small_vq_checkpoint

import cspd
from cspd.cli import main
from cspd.plots import MARGIN, UNKNOWN

QUICK = ["--method", "ar", "--num-iter", "2", "--num-sampling-steps", "5", "--cfg", "1"]
MAR = ["edit", "--checkpoint", small_checkpoint(), "--label", "3", *QUICK]
VQ = ["edit", "--checkpoint", small_vq_checkpoint(), "--label", "3", "--method", "ar", "--cfg", "1"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A picture of 32 by 32 pixels, one twice as large, and masks: of a token, of rows, black and white."""
    folder = tmp_path_factory.mktemp("pictures")
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    pictures = {"in": pixels, "large": pixels.repeat(2, 0).repeat(2, 1)[:, 5:]}
    rows = {"lower": np.s_[16:], "upper": np.s_[:16], "bottom": np.s_[28:]}
    for name, part in {"token": np.s_[4:8, 8:12], **rows, "black": np.s_[:0], "white": np.s_[:]}.items():
        pictures[name] = np.zeros((32, 32), dtype=np.uint8)
        pictures[name][part] = 255
    for name, picture in pictures.items():
        Image.fromarray(picture).save(folder / f"{name}.png")
    return folder


def edit(out, command, files, image="in", **options):
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return main([*command, "--image", str(files / f"{image}.png"), "--out", str(out), *given])


def test_inpainting(files, tmp_path, capsys):
    """The tokens that no white pixel touches are the picture's own; a second run makes nothing again."""
    out = tmp_path / "out"
    options = {"mask": files / "lower.png", "num": 2, "seed": 5}
    assert edit(out, MAR, files, **options) == 0
    assert "32 of 64" in capsys.readouterr().out
    names = sorted(path.name for path in out.glob("[!.]*"))
    assert names == ["00000_label3_seed5.png", "00001_label3_seed6.png", "grid.png", "samples.json"]
    record = json.loads((out / "samples.json").read_text())
    assert record["settings"]["image"]["file"].endswith("in.png") and len(record["images"][0]["request"]["known"]) == 64

    engine = cspd.load(small_checkpoint(), device="cpu")
    settings = {"num_iter": 2, "num_sampling_steps": 5, "cfg": 1.0}
    request = cspd.Request(3, 5, "ar", image=files / "in.png", mask=files / "lower.png", **settings)
    (output,) = engine.generate([request])
    whole = engine.runners["MAR"].encode(request.known, torch.tensor([5]))
    assert torch.equal(output.tokens[:32], whole[:32]) and not torch.equal(output.tokens[32:], whole[32:])
    pixels = np.asarray(Image.open(out / names[0]))
    assert np.array_equal(pixels, (output.image * 255).round().byte().permute(1, 2, 0).numpy())

    assert edit(out, MAR, files, **options) == 0
    assert "there already" in capsys.readouterr().out
    assert edit(out, MAR, files, **options | {"mask": files / "upper.png"}) == 2
    assert capsys.readouterr().err


def test_pasted_pixels_are_the_pictures_own(files, tmp_path):
    out = tmp_path / "out"
    assert edit(out, [*MAR, "--paste"], files, mask=files / "lower.png") == 0
    pasted = np.asarray(Image.open(out / "00000_label3_seed0.png")).astype(int)
    before = np.asarray(Image.open(files / "in.png")).astype(int)
    assert np.array_equal(pasted[:14], before[:14]) and np.abs(pasted[16:] - before[16:]).mean() > 10


def test_a_heat_map_of_what_was_made(files, tmp_path, capsys):
    """What was kept is grey."""
    assert edit(tmp_path, [*MAR, "--heatmap"], files, mask=files / "lower.png") == 0
    assert "heatmap.png" in capsys.readouterr().out
    record = json.loads((tmp_path / "samples.json").read_text())
    assert record["images"][0]["token_cost"] == [None] * 32 + [5] * 32
    picture = np.asarray(Image.open(tmp_path / "heatmap.png"))[MARGIN:]
    side = 4 * 32  # as it is shown
    left = MARGIN + side
    assert (picture[: side // 2, left : left + side] == UNKNOWN).all()
    assert (picture[side // 2 : side, left : left + side] != UNKNOWN).any(-1).all()


@pytest.mark.parametrize(
    "command, image, options, said",
    [
        (MAR, "large", {"keep": 0.5}, ""),
        (MAR, "large", {"place": "8,8,16,16"}, "48"),
        (VQ, "in", {"mask": "bottom"}, "32"),
    ],
    ids=["variations", "outpainting", "top rows of codes"],
)
def test_other_ways(command, image, options, said, files, tmp_path, capsys, recwarn):
    options = {name: files / f"{value}.png" if name == "mask" else value for name, value in options.items()}
    assert edit(tmp_path / "out", command, files, image, **options) == 0
    assert said in capsys.readouterr().out
    assert not [warning for warning in recwarn if "pixels" in str(warning.message)], "it is said once"


@pytest.mark.parametrize(
    "command, image, options, advice",
    [
        (MAR, "in", {"mask": "black"}, ""),
        (MAR, "in", {"mask": "white"}, ""),
        (MAR, "large", {"mask": "lower"}, ""),
        (MAR, "none", {"mask": "lower"}, ""),
        (MAR, "in", {"place": "30,0,8,8"}, ""),
        (MAR, "in", {"place": "0,0,2,2"}, ""),
        (MAR, "in", {"mask": "token"}, "num_iter"),
        (VQ, "in", {"mask": "token"}, "2"),
        (VQ, "in", {"keep": 0.5}, ""),
    ],
)
def test_what_is_refused(command, image, options, advice, files, tmp_path, capsys):
    options = {name: files / f"{value}.png" if name == "mask" else value for name, value in options.items()}
    assert edit(tmp_path / "out", command, files, image, **options) == 2
    assert advice in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "where",
    [
        [],
        ["--keep", "0"],
        ["--keep", "x"],
        ["--place", "1,2,3"],
        ["--keep", "1", "--mask", "m"],
        ["--label", "1-3", "--keep", "0.5"],
    ],
)
def test_flags_that_say_nothing(where, files, capsys):
    with pytest.raises(SystemExit):
        main([*MAR, "--image", str(files / "in.png"), *where])
    assert capsys.readouterr().err
