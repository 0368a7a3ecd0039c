"""References: read correctly, or refused by name before any work."""

from __future__ import annotations

import os
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from cspd.evaluation import arrays
from cspd.evaluation.images import ImageFolder, NpzImages, images_in
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
        {"mu": np.zeros(2), "sigma": np.array([[2.0, 0.5], [0.0, 2.0]])},
        {"mu": np.zeros(2), "sigma": np.array([[1.0, 2.0], [2.0, 1.0]])},
        {"mu": np.zeros(2), "sigma": np.eye(2) * 1j},
        {"mu": np.zeros(3)},
    ],
)
def test_unclear_references_are_refused(tmp_path, arrays):
    with pytest.raises(ValueError, match=r"reference\.npz"):
        load_reference(saved(tmp_path, **arrays))


def test_covariances_may_have_the_rounding_of_float32(tmp_path):
    """Of 30 images: most directions have no variance, or a little negative one."""
    features = rng.normal(size=(30, 200)).astype(np.float32) * np.geomspace(1, 100, 200, dtype=np.float32)
    centred = features - features.mean(0)
    sigma = centred.T @ centred / np.float32(29)
    assert np.linalg.eigvalsh(sigma)[0] < 0
    load_reference(saved(tmp_path, mu=features.mean(0), sigma=sigma))
    load_reference(saved(tmp_path, mu=np.zeros(3), sigma=np.zeros((3, 3))))


def test_booleans_are_black_and_white(tmp_path):
    images = load_reference(saved(tmp_path, arr_0=PIXELS > 99)).images
    assert (images[1].permute(1, 2, 0).numpy() == np.where(PIXELS[1] > 99, 255, 0)).all()


# ---- Files that may come from anybody


def with_header(folder, descr, shape, content=bytes(96), compression=zipfile.ZIP_STORED):
    """An .npz whose `arr_0` says that it has a dtype and a shape."""
    with zipfile.ZipFile(folder / "made.npz", "w", compression) as archive, archive.open("arr_0.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        file.write(content)
    return folder / "made.npz"


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    "descr, shape",
    [
        ("|O", (1, 2, 2, 3)),  # mapped, its bytes would be taken for pointers
        ([("a", "|O")], (1, 2, 2, 3)),
        ("|V8", (1, 2, 2, 3)),
        ("<c8", (1, 2, 2, 3)),
        ("<U2", (1, 2, 2, 3)),
        ("|u1", (1, 4, 7, 3)),  # fewer bytes than the file has
        ("|u1", (1, 400, 800, 3)),
        ("|u1", (-1, -4, 8, 3)),
        ("<f8", (2**40, 2**20, 2, 3)),
    ],
)
def test_headers_that_do_not_fit_are_refused(descr, shape, compression, tmp_path):
    with pytest.raises(ValueError, match=r"made\.npz"):
        NpzImages(with_header(tmp_path, descr, shape, compression=compression))


def test_text_that_has_no_characters_is_refused(tmp_path):
    """Python fails at it with an error of its own."""
    content = saved(tmp_path, arr_0=PIXELS, arr_1=np.array(["\U0010ffff", "a", "b"])).read_bytes()
    (tmp_path / "made.npz").write_bytes(content.replace(b"\xff\xff\x10\x00", b"\xff\xff\xff\x7f"))
    with pytest.raises(ValueError, match=r"made\.npz"):
        NpzImages(tmp_path / "made.npz")


def test_an_archive_out_of_proportion_is_refused_before_it_is_read(tmp_path, monkeypatch):
    """No array alone is too large."""
    monkeypatch.setattr(arrays, "SMALL", 2**22)
    large = {"arr_0": np.zeros((1000, 32, 32, 3), np.uint8), "sigma": np.zeros((600, 600)), "mu": np.zeros(600)}
    np.savez_compressed(tmp_path / "large.npz", **large)
    tracemalloc.start()
    with pytest.raises(ValueError, match="times its size"):
        load_reference(tmp_path / "large.npz")
    largest = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest < 2**20


def test_damaged_archives_and_pipes_are_refused_by_name(tmp_path):
    content = saved(tmp_path, arr_0=PIXELS).read_bytes()
    for part in (0, 10, len(content) // 2, len(content) - 4):
        (tmp_path / "damaged.npz").write_bytes(content[:part])
        with pytest.raises(ValueError, match=r"damaged\.npz"):
            load_reference(tmp_path / "damaged.npz")
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(ValueError, match="ordinary"):
        load_reference(tmp_path / "pipe.npz")
    with pytest.raises(FileNotFoundError):
        load_reference(tmp_path / "none.npz")


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("name", ["images.NPZ", "images.npy"])
def test_arrays_are_known_by_their_content(tmp_path, name, compress):
    with (tmp_path / name).open("wb") as file:
        if name == "images.npy":
            np.save(file, np.asfortranarray(PIXELS) if compress else PIXELS)
        else:
            (np.savez_compressed if compress else np.savez)(file, arr_0=PIXELS)
    for images in (images_in(tmp_path / name), load_reference(tmp_path / name).images):
        assert all((images[i].permute(1, 2, 0).numpy() == PIXELS[i]).all() for i in range(3))


ONE_HOT = np.eye(5)[[4, 0, 2]]


@pytest.mark.parametrize(
    "given, expected",
    [
        (np.array([4, 0, 2]), [4, 0, 2]),
        (np.array([4.0, 0.0, 2.0]), [4, 0, 2]),
        (np.array([[4], [0], [2]], np.uint8), [4, 0, 2]),
        (ONE_HOT, [4, 0, 2]),
        (ONE_HOT.astype(bool), [4, 0, 2]),
        (np.array(["a fox", "", "owl"]), ["a fox", "", "owl"]),
        (ONE_HOT[:, ::-1] + ONE_HOT, None),
        (np.array([0.5, 1, 2]), None),
        (np.array([1, np.nan, 2]), None),
        (np.arange(4), None),
        (np.array(3), None),
        (np.zeros((3, 2, 2)), None),
    ],
)
def test_classes_in_a_file(tmp_path, given, expected):
    """[N], [N, 1] or one-hot, or prompts; of another array they are not known."""
    assert NpzImages(saved(tmp_path, arr_0=PIXELS, arr_1=given)).labels == expected


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


@pytest.mark.parametrize("orientation", [0, 1, 9])
def test_orientations_that_rotate_nothing(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x112] = orientation
    assert len(load_reference(folder_with(tmp_path / "images", "1.jpg", COLOURED, exif=exif)).images) == 2


def test_every_kind_of_file_is_read_or_named(tmp_path):
    """Lossless WebP and BMP are the same images; other files, pipes and folders beside images are counted and named."""
    folder = folder_with(tmp_path / "images", "1.webp", COLOURED, lossless=True)
    COLOURED.save(folder / "2.BMP")
    for record in ("samples.json", "grid.png", ".hidden.tiff"):
        (folder / record).touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images = load_reference(folder).images
    assert len(images) == 3 and all((images[i].permute(1, 2, 0).numpy() == PIXELS[1]).all() for i in (1, 2))
    COLOURED.save(folder / "3.tiff")
    os.mkfifo(folder / "4.png")
    (folder / "more").mkdir()
    with pytest.warns(UserWarning, match=r"3 images .* 3 files .* 3\.tiff, 4\.png, more"):
        assert len(ImageFolder(folder)) == 3


def test_a_folder_of_each_class(tmp_path):
    """The layout for training: its images are read class by class; what lies deeper is named."""
    train = tmp_path / "train"
    train.mkdir()
    for i, name in enumerate(("rose", "tulip")):
        folder_with(train / name, "1.jpg", Image.fromarray(PIXELS[i + 1]))
    reference = load_reference(train)
    files = [str(path.relative_to(train)) for path in reference.images.files]
    assert files == ["rose/0.png", "rose/1.jpg", "tulip/0.png", "tulip/1.jpg"]
    (train / "rose").rename(train / "rosa")
    assert load_reference(train).fingerprint != reference.fingerprint
    (train / "tulip" / "deeper").mkdir()
    with pytest.warns(UserWarning, match="tulip/deeper"):
        ImageFolder(train)
    with pytest.raises(ValueError, match="no images"):
        ImageFolder(tmp_path)


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
