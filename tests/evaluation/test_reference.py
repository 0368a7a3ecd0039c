"""What images are compared with: read as it is meant, or refused with its name before any work."""

from __future__ import annotations

import os

import numpy as np
import pytest
from PIL import Image

from cspd.cli import main
from cspd.evaluation.images import ImageFolder
from cspd.evaluation.metrics import load_reference, to_statistics

rng = np.random.default_rng(0)
PIXELS = rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
PIXELS[0, 0, 0] = 0, 128, 255


def saved(folder, **arrays):
    np.savez(folder / "reference.npz", **arrays)
    return folder / "reference.npz"


@pytest.mark.parametrize(
    "dtype", ["int8", "int16", ">u2", "int64", "uint64", "float16", "float32", ">f8", "longdouble"]
)
def test_whole_numbers_are_taken_as_pixels_in_any_dtype(tmp_path, dtype):
    pixels = PIXELS // 2 if dtype == "int8" else PIXELS
    images = load_reference(saved(tmp_path, arr_0=pixels.astype(dtype))).images
    assert (images[1].permute(1, 2, 0).numpy() == pixels[1]).all() and len(images) == 3


@pytest.mark.parametrize("dtype", ["float16", "float32", ">f4", "float64", "longdouble"])
def test_floats_up_to_1_are_shares_of_255(tmp_path, dtype):
    images = load_reference(saved(tmp_path, arr_0=(PIXELS / 255).astype(dtype))).images
    assert all((images[i].permute(1, 2, 0).numpy() == PIXELS[i]).all() for i in range(3))


@pytest.mark.parametrize(
    "images",
    [
        PIXELS.astype(np.uint16) * 257,
        PIXELS.astype(np.int16) - 128,
        PIXELS / 127.5 - 1,
        PIXELS.astype(np.float32) * 0.999,
        np.where(PIXELS == 7, np.nan, PIXELS),
        PIXELS / 255 + 1j,
        PIXELS > 100,
        PIXELS.astype(str),
        PIXELS.transpose(0, 3, 1, 2),
        PIXELS[..., 0],
        PIXELS[..., :1],
        PIXELS[:, :, :, [0, 1, 2, 0]],
        PIXELS[:0],
        np.array(3),
    ],
)
def test_images_of_unclear_numbers_or_shapes_are_refused(tmp_path, images):
    with pytest.raises(ValueError, match=r"reference\.npz"):
        load_reference(saved(tmp_path, arr_0=images))


@pytest.mark.parametrize(
    "mu, sigma",
    [
        (np.array([0, np.nan, 0]), np.eye(3)),
        (np.zeros(3), np.diag([1, np.inf, 1])),
        (np.array([0, 1e200, 0]), np.eye(3)),
        (np.zeros(3) + 1j, np.eye(3)),
        (np.zeros(3), np.eye(3) > 0),
        (np.zeros(3).astype(str), np.eye(3)),
        (np.zeros(()), np.zeros(())),
        (np.zeros(0), np.zeros((0, 0))),
        (np.zeros(3), np.zeros((4, 4))),
        (np.zeros((1, 3)), np.eye(3)),
        (np.zeros(3), np.eye(3, dtype=object)),
    ],
)
def test_statistics_that_give_no_fid_are_refused(tmp_path, mu, sigma):
    with pytest.raises(ValueError, match=r"reference\.npz"):
        load_reference(saved(tmp_path, mu=mu, sigma=sigma))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_statistics_of_few_images_are_taken_with_their_rounding(dtype):
    """50 images have a covariance of rank 49 at most; products in float32 are not quite symmetric."""
    features = rng.standard_normal((50, 256)) * np.geomspace(1, 1e-3, 256)
    sigma = np.cov(features, rowvar=False).astype(dtype)
    sigma += sigma.std() * np.finfo(dtype).eps * rng.standard_normal(sigma.shape).astype(dtype)
    statistics = to_statistics(features.mean(0).astype(dtype), sigma)
    assert statistics["sigma"].dtype == statistics["mu"].dtype == np.float64
    assert (statistics["sigma"] == sigma).all()


def image_files(folder, *files):
    """A folder of one good image, and of others (name, picture, options of saving)."""
    folder.mkdir()
    for name, picture, options in (("0.png", Image.fromarray(PIXELS[0]), {}), *files):
        picture.save(folder / name, **options)
    return folder


SIDE = (32, 32)
COLOURED = Image.fromarray(PIXELS[1])


@pytest.mark.parametrize("name", ["1.png", "1.jpg"])
def test_damaged_images_are_refused_by_name(tmp_path, name):
    folder = image_files(tmp_path / "images", (name, COLOURED, {}))
    path = folder / name
    content = path.read_bytes()
    for part in (0, 10, len(content) // 2):
        path.write_bytes(content[:part])
        with pytest.raises(ValueError, match=name):
            load_reference(folder)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(ValueError, match=name):
        ImageFolder(folder)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=name):
        ImageFolder(folder)


def test_the_commands_say_what_is_bad_before_anything_is_written(tmp_path, capsys):
    """Of images to be measured and of what to measure against."""
    no_mean = saved(tmp_path, mu=np.full(128, np.nan), sigma=np.eye(128))
    bad = image_files(tmp_path / "bad", ("1.png", COLOURED, {}))
    (bad / "1.png").write_bytes((bad / "1.png").read_bytes()[:50])
    large = tmp_path / "large"
    large.mkdir()
    Image.new("RGB", (64, 64)).save(large / "0.png")
    out = tmp_path / "out"
    for command, message in (
        (["evaluate", "--ref", str(bad), "--num", "1"], "1.png"),
        (["evaluate", "--ref", str(no_mean), "--num", "1"], "reference.npz"),
        (["evaluate", "--images", str(bad), "--ref", str(bad)], "1.png"),
        (["compare", "--ref", str(large), "--num", "1"], "64x64"),
    ):
        assert main([*command, "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1 and not out.exists()
