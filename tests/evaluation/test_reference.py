"""References: read correctly, or refused by name before any work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from cspd.evaluation.images import ImageFolder
from cspd.evaluation.metrics import load_reference

rng = np.random.default_rng(0)
PIXELS = rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
PIXELS[0, 0, 0] = 0, 128, 255


def saved(folder, **arrays):
    np.savez(folder / "reference.npz", **arrays)
    return folder / "reference.npz"


@pytest.mark.parametrize("dtype", ["int8", ">u2", "int64", "float16", "float32", ">f8"])
def test_integers_are_taken_as_pixels_in_any_dtype(tmp_path, dtype):
    pixels = PIXELS // 2 if dtype == "int8" else PIXELS
    images = load_reference(saved(tmp_path, arr_0=pixels.astype(dtype))).images
    assert (images[1].permute(1, 2, 0).numpy() == pixels[1]).all() and len(images) == 3


@pytest.mark.parametrize("dtype", ["float16", "float32", ">f4", "float64"])
def test_floats_up_to_1_are_fractions_of_255(tmp_path, dtype):
    images = load_reference(saved(tmp_path, arr_0=(PIXELS / 255).astype(dtype))).images
    assert all((images[i].permute(1, 2, 0).numpy() == PIXELS[i]).all() for i in range(3))


@pytest.mark.parametrize(
    "arrays",
    [
        {"arr_0": PIXELS.astype(np.uint16) * 257},
        {"arr_0": PIXELS / 127.5 - 1},
        {"arr_0": PIXELS.astype(np.float32) * 0.999},
        {"arr_0": np.where(PIXELS == 7, np.nan, PIXELS)},
        {"arr_0": PIXELS.transpose(0, 3, 1, 2)},
        {"arr_0": PIXELS[..., 0]},
        {"arr_0": PIXELS[:0]},
        {"mu": np.array([0, np.nan, 0]), "sigma": np.eye(3)},
        {"mu": np.zeros(3), "sigma": np.diag([1, np.inf, 1])},
        {"mu": np.zeros(3), "sigma": np.zeros((4, 4))},
        {"mu": np.zeros(3)},
    ],
)
def test_unclear_references_are_refused(tmp_path, arrays):
    with pytest.raises(ValueError, match=r"reference\.npz"):
        load_reference(saved(tmp_path, **arrays))


def folder_with(folder, name, picture, **options):
    """A folder of a good image and another one."""
    folder.mkdir()
    Image.fromarray(PIXELS[0]).save(folder / "0.png")
    picture.save(folder / name, **options)
    return folder


COLOURED = Image.fromarray(PIXELS[1])
TRANSPARENT = Image.fromarray(np.dstack([PIXELS[1], PIXELS[2, :, :, 0]]))
TURNED = Image.Exif()
TURNED[0x112] = 6  # the orientation


def test_grey_images_and_palettes_are_read(tmp_path):
    grey = np.arange(32 * 32, dtype=np.uint16).reshape(32, 32) * 64
    images = ImageFolder(folder_with(tmp_path / "grey", "1.png", Image.fromarray(grey)))
    assert (images[1] == torch.from_numpy(np.rint(grey / 257).astype(np.uint8))).all()  # 65535 becomes 255
    palette = COLOURED.convert("P")
    images = ImageFolder(folder_with(tmp_path / "palette", "1.png", palette))
    assert (images[1].permute(1, 2, 0).numpy() == np.asarray(palette.convert("RGB"))).all()


@pytest.mark.parametrize("picture, options", [(TRANSPARENT, {}), (COLOURED, {"exif": TURNED})])
def test_images_that_viewers_show_differently_are_refused(tmp_path, picture, options):
    with pytest.raises(ValueError, match=r"1\.png"):
        load_reference(folder_with(tmp_path / "images", "1.png", picture, **options))


@pytest.mark.parametrize("name", ["1.png", "1.jpg"])
def test_damaged_images_are_refused_by_name(tmp_path, name):
    folder = folder_with(tmp_path / "images", name, COLOURED)
    content = (folder / name).read_bytes()
    for part in (0, 10, len(content) // 2):
        (folder / name).write_bytes(content[:part])
        with pytest.raises(ValueError, match=name):
            load_reference(folder)
