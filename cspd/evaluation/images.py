"""Folders and lists of images, and their classes or prompts."""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from cspd.files import Place, check_file, checked_json, explained, misfit, ordinary, parse_json, publishing
from cspd.request import Request, to_uint8

# Images to be measured, with 8 bits per channel, in memory or in a folder.

GRID = "grid.png"
HEATMAP = "heatmap.png"
LIST = "images.jsonl"  # one line of JSON for each image of a run in shards, or of a folder made from it
OVERVIEWS = (GRID, HEATMAP)  # our commands write these next to images
SUFFIXES = (".png", ".jpg", ".jpeg")
DIGITS = 20  # of the numbers in files' names; seeds have at most 19
FORMATS = ("PNG", "JPEG")  # Pillow's default includes formats that it opens with Ghostscript


class Images(Dataset[Tensor]):
    """A data set of uint8 [3, H, W], with a length."""

    def __len__(self) -> int:
        raise NotImplementedError


class ImageList(Images):
    """A data set of uint8 [3, H, W] over images in memory, each float [3, H, W] in 0..1 or uint8 already."""

    def __init__(self, images: Sequence[Tensor] | Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return to_uint8(self.images[index])


class Watched(Images):
    """A data set that advances a progress bar when it is read."""

    def __init__(self, images: Images, bar: tqdm) -> None:
        self.images, self.bar = images, bar

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        # an image that is read again, as the first is for its size, does not count twice
        if index >= self.bar.n:
            self.bar.update(index + 1 - self.bar.n)
        return self.images[index]


def image_files(folder: Path) -> list[Path]:
    """A folder's PNGs and JPEGs, without hidden files and our own overviews.

    They are sorted by their names, and by the numbers in the names: 2.png comes before 10.png.

    Raises ValueError if there is no such folder or file.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder: give a folder of images")
    files = []
    for path in folder.iterdir():
        is_ours_or_hidden = path.name in OVERVIEWS or path.name.startswith(".")
        if path.suffix.lower() in SUFFIXES and not is_ours_or_hidden:
            files.append(path)
    if not files:
        raise ValueError(f"{folder} has no images: give a folder with PNGs or JPEGs, not in subfolders")
    return sorted(files, key=_by_number)


class ImageFolder(Images):
    """A data set of uint8 [3, H, W] over a folder's `image_files`.

    All headers are read at once, which takes a second for 10,000 files; pixels are read on access, by `read_image`.

    Attributes:
        files: paths of the images. shape: (3, H, W) of each image.

    Raises:
        ValueError: no images, files that are not images, or images of several sizes; the message names the first.
    """

    def __init__(self, folder: Path) -> None:
        self.files = image_files(folder)
        width, height = _size(self.files[0])
        for path in self.files:
            own_width, own_height = _size(path)
            if (own_width, own_height) != (width, height):
                sizes = f"{own_width}x{own_height} pixels, and others have {width}x{height}"
                raise ValueError(f"{path} has {sizes}: give a folder of images of one size")
        self.shape = 3, height, width

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return read_image(self.files[index])

    @property
    def labels(self) -> list[int] | None:
        """The classes in the names that `cspd sample` gives, or None if a file has another name."""
        labels = []
        for path in self.files:
            match = re.search(r"_label(\d+)_", path.name)
            if match is None:
                return None
            labels.append(int(match[1]))
        return labels


class NpzImages(Images):
    """A data set of uint8 [3, H, W] over an .npz in ADM's layout: images in `arr_0`, [N, H, W, 3].

    Images of uncompressed files stay on the disk until they are read: 50,000 of 256x256 pixels take 10 GB.

    Attributes:
        shape: (3, H, W) of each image. labels: their classes, from `arr_1`; None if the file lacks it.

    Raises:
        ValueError: no such file, no images, or other numbers than `to_pixels` takes.
    """

    files: Sequence[Path] = ()  # that prompts could be found by

    def __init__(self, path: Path) -> None:
        try:
            with np.load(path) as file:
                self.labels = file["arr_1"].tolist() if "arr_1" in file.files else None
            pixels = _mapped(path)
        except (OSError, KeyError, zipfile.BadZipFile, ValueError) as error:
            raise ValueError(
                f"{path} cannot be read as images in an .npz ({error}): give a file such as ADM's"
            ) from error
        self.pixels = to_pixels(pixels)
        _, height, width, _ = self.pixels.shape
        self.shape = 3, height, width

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self.pixels):
            raise IndexError(index)
        return torch.from_numpy(np.array(self.pixels[index])).permute(2, 0, 1)


def has_images(path: Path) -> bool:
    """Whether an .npz has images in ADM's layout."""
    with zipfile.ZipFile(path) as archive:
        return "arr_0.npy" in archive.namelist()


def _mapped(path: Path) -> np.ndarray:
    """`arr_0` of an .npz, mapped from the disk if it is uncompressed."""
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo("arr_0.npy")
        if entry.compress_type != zipfile.ZIP_STORED:
            with np.load(path) as file:
                return file["arr_0"]
        with archive.open(entry) as file:
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, fortran, dtype = read[np.lib.format.read_magic(file)](file)
            header = file.tell()
    # a file's local header in the archive: 30 bytes, the last four the lengths of its name and of what follows it
    with path.open("rb") as file:
        file.seek(entry.header_offset + 26)
        begin = entry.header_offset + 30 + sum(np.frombuffer(file.read(4), "<u2").tolist()) + header
    return np.memmap(path, dtype, "r", begin, shape, "F" if fortran else "C")


def images_in(path: Path) -> ImageFolder | NpzImages:
    """The images in a folder or in an .npz. Raises ValueError as they do."""
    return NpzImages(path) if path.suffix == ".npz" else ImageFolder(path)


def _by_number(path: Path) -> tuple[str, str]:
    """A key to sort files by name, and by the numbers in their names."""
    # zeros in front let 2 come before 10; the name itself decides between 1.png and 01.png
    padded = re.sub(r"\d+", lambda number: number[0].zfill(DIGITS), path.name)
    return padded, path.name


def beginning(path: Path) -> str:
    """The first bytes of a file, for messages: they show whether it is an error page or a Git LFS pointer."""
    with path.open("rb") as file:
        return repr(file.read(40))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """A PNG or JPEG whose pixels are not read yet. Raises ValueError, which names the file, for any failure."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            yield image
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is not a PNG or JPEG: it begins with {beginning(path)}") from error
    except Exception as error:  # a damaged file can fail anywhere in the decoders
        raise ValueError(f"{path} cannot be used as an image ({error}): give another file") from error


def _size(path: Path) -> tuple[int, int]:
    """Width and height, from the header."""
    with _opened(path) as image:
        return image.size


def read_image(path: Path) -> Tensor:
    """uint8 [3, H, W] of a PNG or JPEG, as torch-fidelity reads it.

    Pillow converts grey images, palettes and CMYK to RGB. A coloured image of 16 bits loses the lower eight. A grey
    image of 16 bits is scaled: 65535 becomes 255.

    Raises:
        ValueError: a damaged file, or an image that viewers show differently: with transparent pixels, or rotated by
            its EXIF data.
    """
    with _opened(path) as image:
        # an alpha channel that is opaque everywhere does no harm
        if image.has_transparency_data:
            lowest: Any
            lowest, _ = image.convert("RGBA").getchannel("A").getextrema()
            if lowest < 255:
                raise ValueError("it has transparent pixels: put it on a background")
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            raise ValueError("its EXIF data rotate it: rotate its pixels instead")
        if image.mode.startswith("I"):  # 16 bits: Pillow's own conversion would clip instead of scaling
            scaled = np.rint(np.asarray(image) / 257)
            image = Image.fromarray(scaled.astype(np.uint8))
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def to_pixels(images: np.ndarray) -> np.ndarray:
    """uint8 [N, H, W, 3] of an array of images: integers in 0..255, of any dtype, or floats in 0..1.

    Raises:
        ValueError: another shape, no images, or other numbers.
    """
    if images.ndim != 4 or images.shape[3] != 3 or images.size == 0:
        raise ValueError(f"images of shape {list(images.shape)}: give [N, H, W, 3], one or more")
    if images.dtype == np.uint8:
        return images
    low, high = images.min(), images.max()
    is_float = images.dtype.kind == "f"
    if is_float and low >= 0 and high <= 1:
        pixels = np.empty(images.shape, np.uint8)
        for i, image in enumerate(images):  # a float32 copy of all images would take four times their memory
            pixels[i] = to_uint8(torch.from_numpy(image.astype(np.float32))).numpy()
        return pixels
    are_integers = not is_float or all((image % 1 == 0).all() for image in images)
    if low >= 0 and high <= 255 and are_integers:
        return images.astype(np.uint8)
    raise ValueError(
        f"images of {images.dtype} from {low:g} to {high:g}: give uint8, other integers in 0..255, or floats in 0..1"
    )


def check_npz(path: Path) -> None:
    """Creates the folder for `export_npz`; raises ValueError or OSError if no file can be written there."""
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    check_file(path, "--npz")


def export_npz(images: Images, path: Path) -> None:
    """Writes a data set as ADM's evaluator reads it: an uncompressed .npz with arr_0, uint8 [N, H, W, 3].

    It writes one image at a time, since 50,000 images of 256x256 pixels take 10 GB. Raises OSError as `publishing`.
    """
    check_npz(path)
    height, width = images[0].shape[1:]
    # np.savez would need all images in memory
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(images), height, width, 3)}
    with publishing(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        with archive.open("arr_0.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for index in range(len(images)):
                pixels = images[index].permute(1, 2, 0).numpy()
                file.write(pixels.tobytes())


# The subject of an image in runs and reports.

LONGEST_NAME = 60  # characters of a prompt in a file name
Subject = int | str | None  # the number of a class, or a prompt; None: unconditional


def asking_for(request: Request, subject: Subject) -> Request:
    """The request with another class or prompt."""
    if isinstance(subject, str):
        return request.but(prompt=subject)
    return request.but(label=subject)


def subject_of(request: Request) -> Subject:
    """The class or prompt of a checked request."""
    return request.label if request.prompt is None else request.prompt


def in_turn(subjects: Sequence[Subject], num: int) -> list[Subject]:
    """The subjects of `num` images, which cycle through the given ones."""
    return list(islice(cycle(subjects), num))


def cycle_of(subjects: Sequence[Subject] | None) -> int:
    """The number of subjects after which the list of the images' subjects repeats; 1 if it does not, or is unknown."""
    if not subjects:
        return 1
    for period in range(1, len(subjects)):
        is_repeated = subjects[period] == subjects[0]
        if is_repeated and all(a == b for a, b in zip(subjects, subjects[period:])):
            return period
    return 1


def are_texts(subjects: Sequence[Subject] | None) -> bool:
    """Whether the subjects are prompts; False if they are not known (None)."""
    return isinstance(subjects[0], str) if subjects else False


def file_name(index: int, request: Request) -> str:
    """The name of an image's PNG, by its index in the run."""
    return f"{index:05d}_{_subject(request)}_seed{request.seed}.png"


def _subject(request: Request) -> str:
    """The class or prompt of an image, for its file name."""
    if request.prompt is None:
        return f"label{'none' if request.label is None else request.label}"
    words = re.findall("[a-z0-9]+", request.prompt.lower())
    return "-".join(["text", *words])[:LONGEST_NAME].rstrip("-")


RECORD = "samples.json"
ENTRY = {"file": str, "request": dict, "index?": int, "sha256?": str}  # of an image in a record or a list


def prompts_of(folder: ImageFolder | NpzImages) -> list[str] | None:
    """The prompts of a folder's images, from the record of their run or their list, or None if it lacks one of them."""
    if not folder.files:
        return None
    prompts: dict[str, Any] = {}
    for image in listed_images(folder.files[0].parent):
        prompts[image["file"]] = image["request"].get("prompt")
    found: list[Any] = [prompts.get(path.name) for path in folder.files]
    return None if None in found else found


def listed_images(folder: Place) -> list[dict]:
    """The images in the record of `cspd sample`, or in the list of a run in shards, with "file", "request" and more.

    Empty if the folder has neither, or it is damaged.
    """
    with contextlib.suppress(ValueError):
        return checked_json(folder / RECORD, {"images": [ENTRY]}, "")["images"]
    return read_list(folder)


def read_list(folder: Place) -> list[dict]:
    """The images in the list of a run in shards; empty if there is none, or it is damaged."""
    with contextlib.suppress(ValueError, OSError):
        *lines, _ = ordinary(folder / LIST).read_text(encoding="utf-8").split("\n")
        images = [parse_json(line) for line in lines]
        if misfit(images, [ENTRY]) is None:
            return images
    return []
