"""Folders and lists of images, and their classes or prompts."""

from __future__ import annotations

import contextlib
import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from cspd.files import check_file, misfit, publishing, read_json
from cspd.request import Request, to_uint8

# Images to be measured, 8 bits a channel, in memory or in a folder.

GRID, HEATMAP = OVERVIEWS = ("grid.png", "heatmap.png")  # written by our commands next to images
SUFFIXES = (".png", ".jpg", ".jpeg")
DIGITS = 20  # of a number in a file's name; seeds have at most 19
FORMATS = ("PNG", "JPEG")  # without them, Pillow would run Ghostscript for some files


class ImageList(Dataset):
    """A data set of uint8 [3, H, W] over images in memory, each float [3, H, W] in 0..1 or uint8 already."""

    def __init__(self, images: Sequence[Tensor]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return to_uint8(self.images[index])


class Watched(Dataset):
    """A data set that moves a progress bar when it is read."""

    def __init__(self, images: Dataset, bar: tqdm) -> None:
        self.images, self.bar = images, bar

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        # the first image is read twice, for its size
        self.bar.update(max(0, index + 1 - self.bar.n))
        return self.images[index]


def image_files(folder: Path) -> list[Path]:
    """A folder's PNGs (and JPEGs), without hidden files and our own overviews.

    They are in the order of their names, and of the numbers in them: 2.png comes before 10.png.

    Raises ValueError if there are no such files.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    files = []
    for path in folder.iterdir():
        is_image = path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
        if is_image and path.name not in OVERVIEWS:
            files.append(path)
    if not files:
        raise ValueError(f"{folder}: there are no images in it (PNG or JPEG, not in subfolders)")
    return sorted(files, key=_by_number)


class ImageFolder(Dataset):
    """A data set of uint8 [3, H, W] over a folder's `image_files`.

    The headers of all files are read at once, which takes a second for 10,000; the pixels on access, by `read_image`.

    Attributes:
        files: their paths. shape: (3, H, W) of each image.

    Raises:
        ValueError: no images, files that are not images, or images of several sizes; the message names the first.
    """

    def __init__(self, folder: Path) -> None:
        self.files = image_files(folder)
        width, height = _size(self.files[0])
        for path in self.files:
            own_width, own_height = _size(path)
            if (own_width, own_height) != (width, height):
                sizes = f"{width}x{height} and {own_width}x{own_height}"
                raise ValueError(f"{path}: images of {sizes} pixels in one folder: give one of equal sizes")
        self.shape = 3, height, width

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return read_image(self.files[index])

    @property
    def labels(self) -> list[int] | None:
        """The classes in names as of `cspd sample`, or None if a file has another name."""
        found = [re.search(r"_label(\d+)_", path.name) for path in self.files]
        return [int(match[1]) for match in found] if all(found) else None


def _by_number(path: Path) -> tuple[str, str]:
    """A key to sort files by name, and by the numbers in their names."""
    return re.sub(r"\d+", lambda number: number[0].zfill(DIGITS), path.name), path.name


def beginning(path: Path) -> str:
    """The first bytes of a file, for messages: they reveal an error page or a Git LFS pointer."""
    with path.open("rb") as file:
        return repr(file.read(40))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """A PNG or JPEG, its pixels not read yet. Raises ValueError, which names the file, for any failure."""
    try:
        if not path.is_file():  # reading a pipe would wait
            raise OSError("not a file, or a link that leads nowhere")
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(path, formats=FORMATS)
        with image:
            yield image
    except UnidentifiedImageError as error:
        raise ValueError(f"{path}: no PNG or JPEG: it begins with {beginning(path)}") from error
    except Exception as error:  # a damaged file can fail anywhere in the decoders
        raise ValueError(f"{path}: cannot be used as an image ({error})") from error


def _size(path: Path) -> tuple[int, int]:
    """Width and height, from the header."""
    with _opened(path) as image:
        return image.size


def read_image(path: Path) -> Tensor:
    """uint8 [3, H, W] of a PNG or JPEG, as torch-fidelity reads it.

    Pillow converts grey images, palettes and CMYK to RGB; a coloured image of 16 bits loses the lower eight. In a grey
    one of 16 bits, 65535 becomes 255, other values in proportion.

    Raises:
        ValueError: a damaged file, or one that viewers show differently: with transparent pixels, or rotated by EXIF.
    """
    with _opened(path) as image:
        if image.has_transparency_data and image.convert("RGBA").getchannel("A").getextrema()[0] < 255:
            raise ValueError("it has transparent pixels: paint it on a background")
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            raise ValueError("its EXIF data turn it: turn its pixels instead")
        if image.mode.startswith("I"):  # 16 bits, which Pillow's own conversion clips to 8
            image = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def to_pixels(images: np.ndarray) -> np.ndarray:
    """uint8 [N, H, W, 3] of an array of images: integers in 0..255, of any dtype, or floats in 0..1.

    Raises:
        ValueError: another shape, no images, or other numbers.
    """
    if images.ndim != 4 or images.shape[3] != 3 or 0 in images.shape:
        raise ValueError(f"images of shape {list(images.shape)}: give [N, H, W, 3], one or more")
    dtype = images.dtype
    if dtype == np.uint8:
        return images
    if dtype.kind not in "iuf":
        raise ValueError(f"images of {dtype}: give uint8")
    low, high = images.min(), images.max()
    if dtype.kind == "f" and low >= 0 and high <= 1:  # one image at a time, since a copy of all as floats is large
        return np.stack([to_uint8(torch.from_numpy(image.astype(np.float32))).numpy() for image in images])
    if low >= 0 and high <= 255 and all((image % 1 == 0).all() for image in images):
        return images.astype(np.uint8)
    raise ValueError(
        f"images of {dtype} from {low:g} to {high:g}: give uint8, other whole numbers in 0..255, or floats in 0..1"
    )


def check_npz(path: Path) -> None:
    """Creates the folder for `export_npz`; raises ValueError or OSError if no file can be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}): give another --npz") from error
    check_file(path, "--npz")


def export_npz(images: Dataset, path: Path) -> None:
    """Writes a data set as ADM's evaluator reads it: an uncompressed .npz with arr_0, uint8 [N, H, W, 3].

    It writes image by image, since 50,000 of 256x256 are 10 GB. Raises OSError as `publishing`.
    """
    check_npz(path)
    height, width = images[0].shape[1:]
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(images), height, width, 3)}
    with publishing(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        with archive.open("arr_0.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for index in range(len(images)):
                pixels = images[index].permute(1, 2, 0).numpy()
                file.write(pixels.tobytes())


# The subject of an image in runs and reports: a class by its number, or a prompt.

Subject = int | str


def asking_for(request: Request, subject: Subject) -> Request:
    """The request with another class or prompt."""
    return request.but(prompt=subject) if isinstance(subject, str) else request.but(label=subject)


def subject_of(request: Request) -> Subject:
    """The class or prompt of a checked request."""
    return request.label if request.prompt is None else request.prompt


def in_turn(subjects: Sequence[Subject], num: int) -> list[Subject]:
    """The subjects of `num` images, which cycle."""
    return list(islice(cycle(subjects), num))


def are_texts(subjects: Sequence[Subject] | None) -> bool:
    """Whether subjects are known and prompts."""
    return bool(subjects) and isinstance(subjects[0], str)


RECORD = "samples.json"


def prompts_of(folder: ImageFolder) -> list[str] | None:
    """The prompts of a folder's images, from the record of their run, or None if it lacks one."""
    try:
        record = read_json(folder.files[0].parent / RECORD)
    except (OSError, ValueError):
        return None
    if misfit(record, {"images": [{"file": str, "request": dict}]}):
        return None
    prompts = {image["file"]: image["request"].get("prompt") for image in record["images"]}
    found = [prompts.get(path.name) for path in folder.files]
    return None if None in found else found
