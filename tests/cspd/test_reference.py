"""What images are compared with: read as it is meant, or refused with its name before any work."""

from __future__ import annotations

import io
import os
import zipfile

import numpy as np
import pytest
from PIL import ExifTags, Image

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
        (np.zeros(3), -np.eye(3)),
        (np.zeros(3), np.diag([1, 1, -0.1])),
        (np.zeros(3), np.array([[1, 2, 0], [2, 1, 0], [0, 0, 1]])),
        (np.zeros(3), np.eye(3) + np.eye(3, k=1)),
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


def header(shape):
    """An .npy's first bytes, which declare an array of that shape, and a few values."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue() + bytes(100)


def test_files_that_are_no_whole_npz_are_refused(tmp_path):
    whole = saved(tmp_path, arr_0=PIXELS).read_bytes()
    flipped = bytearray(whole)
    flipped[1000] ^= 255
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5\n"
    for content, _message in {
        b"": "begins with b''",
        b"mu and sigma": "begins with b'mu and sigma'",
        pointer: "no .npz, .*git-lfs",
        whole[:2000]: "truncated",
        bytes(flipped): "damaged",
    }.items():
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad\.npz"):
            load_reference(tmp_path / "bad.npz")
    for shape in ((10**12, 32, 32, 3), (10**30, 32, 32, 3), (-1, 32, 32, 3)):
        with zipfile.ZipFile(tmp_path / "huge.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("arr_0.npy", header(shape))
        with pytest.raises(ValueError, match=r"huge\.npz"):
            load_reference(tmp_path / "huge.npz")
    np.save(tmp_path / "plain.npy", PIXELS)
    with pytest.raises(ValueError, match=r".npz"):
        load_reference(tmp_path / "plain.npy")
    with pytest.raises(ValueError):
        load_reference(saved(tmp_path, weights=np.zeros(3)))
    with pytest.raises(FileNotFoundError):
        load_reference(tmp_path / "nowhere.npz")


def image_files(folder, *files):
    """A folder of one good image, and of others (name, picture, options of saving)."""
    folder.mkdir()
    for name, picture, options in (("0.png", Image.fromarray(PIXELS[0]), {}), *files):
        picture.save(folder / name, **options)
    return folder


SIDE = (32, 32)
GREY = Image.fromarray(PIXELS[1, :, :, 0])
COLOURED = Image.fromarray(PIXELS[1])
RAMP = np.linspace(0, 65535, 32 * 32).reshape(SIDE)


@pytest.mark.parametrize(
    "picture, expected",
    [
        (Image.fromarray(RAMP.astype(np.uint16)), np.rint(RAMP.astype(np.uint16) / 257)),
        (Image.fromarray(PIXELS[1, :, :, 0].astype(np.uint16) * 257), PIXELS[1, :, :, 0]),
        (GREY, PIXELS[1, :, :, 0]),
        (GREY.convert("1"), np.asarray(GREY.convert("1")) * 255),
        (Image.merge("LA", (GREY, Image.new("L", SIDE, 255))), PIXELS[1, :, :, 0]),
        (Image.merge("RGBA", (*COLOURED.split(), Image.new("L", SIDE, 255))), PIXELS[1].transpose(2, 0, 1)),
    ],
    ids=["16 bits", "8 bits in 16", "grey", "1 bit", "grey and opaque", "opaque"],
)
def test_pngs_of_all_kinds_are_read_as_they_look(tmp_path, picture, expected):
    folder = image_files(tmp_path / "images", ("1.png", picture, {}))
    assert (ImageFolder(folder)[1].numpy() == expected).all()
    assert (load_reference(folder).images[1].numpy() == expected).all()


def test_palettes_and_jpegs_are_read_as_pillow_reads_them(tmp_path):
    cases = ("a.PNG", COLOURED.quantize(16)), ("b.jpg", COLOURED), ("c.JPEG", COLOURED.convert("CMYK")), ("d.jpg", GREY)
    folder = image_files(tmp_path / "images", *((name, picture, {}) for name, picture in cases))
    (folder / ".hidden.png").write_text("as macOS leaves them")
    images = ImageFolder(folder)
    assert [path.name for path in images.files] == ["0.png", *(name for name, _ in cases)]
    for i, path in enumerate(images.files):
        assert (images[i].permute(1, 2, 0).numpy() == np.asarray(Image.open(path).convert("RGB"))).all()


def turned():
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return exif


@pytest.mark.parametrize(
    "picture, name, options",
    [
        (Image.new("RGBA", SIDE, (9, 9, 9, 254)), "1.png", {}),
        (Image.new("LA", SIDE, (9, 0)), "1.png", {}),
        (COLOURED.quantize(16), "1.png", {"transparency": 3}),
        (Image.new("RGB", SIDE), "1.png", {"transparency": (0, 0, 0)}),
        (COLOURED, "1.jpg", {"exif": turned()}),
        (COLOURED, "1.png", {"exif": turned()}),
        (COLOURED, "1.png", {"format": "webp"}),
        (Image.new("L", (64, 32)), "1.png", {}),
    ],
)
def test_images_that_look_different_elsewhere_are_refused_by_name(tmp_path, picture, name, options):
    folder = image_files(tmp_path / "images", (name, picture, options))
    with pytest.raises(ValueError, match=name):
        load_reference(folder)


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


@pytest.mark.parametrize("side", [10_000, 60_000])
def test_a_png_that_declares_a_huge_size_is_not_unpacked(tmp_path, side):
    folder = image_files(tmp_path / "images", ("1.png", Image.new("1", (side, 1)), {}))
    content = bytearray((folder / "1.png").read_bytes())
    content[20:24] = side.to_bytes(4, "big")  # the height, in the header
    content[29:33] = zipfile.crc32(content[12:29]).to_bytes(4, "big")
    (folder / "1.png").write_bytes(content)
    with pytest.raises(ValueError, match=r"1\.png"):
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
