"""`cspd edit`: images in, images out, in a folder that resumes; and what it refuses."""

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

QUICK = ["--num-iter", "2", "--num-sampling-steps", "5"]
AR = ["--label", "3", "--method", "ar", "--cfg", "1"]
MODELS = {
    "MAR": ["edit", "--checkpoint", small_checkpoint(), *AR, *QUICK],
    "VQ": ["edit", "--checkpoint", small_vq_checkpoint(), *AR],
}
MASKS = {  # their white part
    "token": np.s_[4:8, 8:12],
    "lower": np.s_[16:],
    "upper": np.s_[:16],
    "bottom": np.s_[28:],
    "black": np.s_[:0],
    "white": np.s_[:],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An image of 32 by 32 pixels, a larger one, and masks."""
    folder = tmp_path_factory.mktemp("images")
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    images = {"in": pixels, "large": pixels.repeat(2, 0).repeat(2, 1)[:, 5:]}
    for name, white in MASKS.items():
        images[name] = np.zeros((32, 32), dtype=np.uint8)
        images[name][white] = 255
    for name, image in images.items():
        Image.fromarray(image).save(folder / f"{name}.png")
    return folder


def edit(out, files, *more, model="MAR", image="in"):
    """`more`: flags; after --mask, the name of a mask."""
    words = [str(files / f"{word}.png") if word in MASKS else str(word) for word in more]
    return main([*MODELS[model], "--image", str(files / f"{image}.png"), "--out", str(out), *words])


def pixels_of(path):
    return np.asarray(Image.open(path)).astype(int)


def test_inpainting(files, tmp_path, capsys):
    """Tokens without a white pixel stay as the image has them. A second run generates nothing."""
    out = tmp_path / "out"
    settings = ["--num", 2, "--seed", 5]
    assert edit(out, files, "--mask", "lower", *settings) == 0
    assert "32 of 64" in capsys.readouterr().out
    names = sorted(path.name for path in out.glob("[!.]*"))
    assert names == ["00000_label3_seed5.png", "00001_label3_seed6.png", "grid.png", "samples.json"]
    record = json.loads((out / "samples.json").read_text())
    assert record["settings"]["image"]["file"].endswith("in.png") and len(record["images"][0]["request"]["known"]) == 64

    engine = cspd.load(small_checkpoint(), device="cpu")
    request = cspd.Request(
        3, 5, "ar", num_iter=2, num_sampling_steps=5, cfg=1.0, image=files / "in.png", mask=files / "lower.png"
    )
    (output,) = engine.generate([request])
    whole = engine.runners["MAR"].encode(request.known, torch.tensor([5]))
    assert torch.equal(output.tokens[:32], whole[:32]) and not torch.equal(output.tokens[32:], whole[32:])
    assert np.array_equal(pixels_of(out / names[0]), (output.image * 255).round().byte().permute(1, 2, 0).numpy())

    assert edit(out, files, "--mask", "lower", *settings) == 0
    assert "all 2 images were there already" in capsys.readouterr().out
    assert edit(out, files, "--mask", "upper", *settings) == 2
    assert "mask.sha256 was" in capsys.readouterr().err


def test_pasted_pixels_are_those_of_the_image(files, tmp_path):
    assert edit(tmp_path, files, "--mask", "lower", "--paste") == 0
    pasted, before = pixels_of(tmp_path / "00000_label3_seed0.png"), pixels_of(files / "in.png")
    assert np.array_equal(pasted[:14], before[:14]) and np.abs(pasted[16:] - before[16:]).mean() > 10


def test_kept_tokens_are_grey_in_the_heat_map(files, tmp_path):
    assert edit(tmp_path, files, "--mask", "lower", "--heatmap") == 0
    record = json.loads((tmp_path / "samples.json").read_text())
    assert record["images"][0]["token_cost"] == [None] * 32 + [5] * 32
    side = 4 * 32  # as it is shown
    costs = pixels_of(tmp_path / "heatmap.png")[MARGIN : MARGIN + side, MARGIN + side : MARGIN + 2 * side]
    assert (costs[: side // 2] == UNKNOWN).all()
    assert (costs[side // 2 :] != UNKNOWN).any(-1).all()


@pytest.mark.parametrize(
    "model, image, part, generated",
    [
        ("MAR", "large", ["--keep", 0.5], "cropped to the 59 by 59 in its middle and resized to 32 by 32\n32 of 64"),
        ("MAR", "large", ["--place", "8,8,16,16"], "48 of 64"),
        ("VQ", "in", ["--mask", "bottom"], "8 of 64"),
    ],
    ids=["variations", "outpainting", "top rows of VQ tokens"],
)
def test_other_parts(model, image, part, generated, files, tmp_path, capsys, recwarn):
    assert edit(tmp_path, files, *part, model=model, image=image) == 0
    assert f"{generated} tokens of the first image were regenerated" in capsys.readouterr().out
    assert not [warning for warning in recwarn if "pixels" in str(warning.message)], (
        "the change of size is printed once"
    )


@pytest.mark.parametrize(
    "model, image, part, reason",
    [
        ("MAR", "in", ["--mask", "black"], "the mask keeps every token"),
        ("MAR", "in", ["--mask", "white"], "no token would be kept"),
        ("MAR", "in", ["--place", "0,0,2,2"], "no token would be kept"),
        ("MAR", "large", ["--mask", "lower"], "32 by 32"),
        ("MAR", "none", ["--mask", "lower"], "none.png"),
        ("MAR", "in", ["--place", "30,0,8,8"], "30,0"),
        ("MAR", "in", ["--mask", "token"], "num_iter"),
        ("VQ", "in", ["--mask", "token"], "1 of 8 rows"),
        ("VQ", "in", ["--keep", 0.5], "32 of 64"),
    ],
)
def test_edits_that_are_refused(model, image, part, reason, files, tmp_path, capsys):
    assert edit(tmp_path / "out", files, *part, model=model, image=image) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags, reason",
    [
        ([], "one of the arguments --mask --keep --place is required"),
        (["--keep", "0"], "--keep"),
        (["--keep", "0.5", "--mask", "m"], "not allowed with"),
        (["--label", "1-3", "--keep", "0.5"], "--label"),
    ],
)
def test_missing_or_contradictory_flags(flags, reason, files, capsys):
    with pytest.raises(SystemExit):
        main([*MODELS["MAR"], "--image", str(files / "in.png"), *flags])
    assert reason in capsys.readouterr().err
