"""Folders and lists of images, and their classes or prompts."""

from __future__ import annotations

import contextlib
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from cspd.evaluation.arrays import beginning, read_arrays
from cspd.files import Place, check_file, checked_json, explained, misfit, ordinary, parse_json, publishing
from cspd.inpainting import of_8_bits
from cspd.pixels import PNG_TEXT, to_uint8
from cspd.request import Request

# Images to be measured, with 8 bits per channel, in memory or in a folder.

GRID = "grid.png"
HEATMAP = "heatmap.png"
LIST = "images.jsonl"  # one line of JSON for each image of a run in shards, or of a folder made from it
OVERVIEWS = (GRID, HEATMAP)  # our commands write these next to images
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")  # Pillow's default includes formats that it opens with Ghostscript
RECORDS = (".json", ".jsonl", ".txt")  # of runs, and captions: nobody takes them for images
NAMED = 3  # files that are not read, in a warning
DIGITS = 20  # of the numbers in files' names; seeds have at most 19


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
    """The images of a folder or, if it has only subfolders, as of classes, of those; without our own overviews.

    They are sorted by their names, and by the numbers in the names: 2.png comes before 10.png. A warning counts and
    names everything else but hidden files and records.

    Raises ValueError if there is no such folder or file.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder: give a folder of images")
    entries = _visible(folder)
    files = list(filter(_is_image, entries))
    if not files:
        inside = [_visible(entry) if entry.is_dir() else [entry] for entry in entries]
        entries = list(chain.from_iterable(inside))
        files = list(filter(_is_image, entries))
    kinds = "PNG, JPEG, WebP or BMP"
    if not files:
        raise ValueError(
            f"{folder} has no images: give a folder of {kinds} files, or of a folder of them for each class"
        )
    unread = sorted({*entries} - {*files})
    if unread:
        names = [str(path.relative_to(folder)) for path in unread[:NAMED]]
        names += ["..."] if len(unread) > NAMED else []
        shown = ", ".join(names)
        warnings.warn(
            f"{folder}: {len(files)} images are read; {len(unread)} files or folders are not, since only {kinds} files"
            f" are: {shown}",
            stacklevel=2,
        )
    return files


def _visible(folder: Path) -> list[Path]:
    """What a user takes for images in a folder, sorted: no hidden files, records or overviews of ours."""
    shown = []
    for path in folder.iterdir():
        is_ours_or_hidden = path.name in OVERVIEWS or path.name.startswith(".")
        if not is_ours_or_hidden and path.suffix.lower() not in RECORDS:
            shown.append(path)
    return sorted(shown, key=_by_number)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()


class ImageFolder(Images):
    """A data set of uint8 [3, H, W] over a folder's `image_files`.

    All headers are read at once, which takes a second for 10,000 files; pixels are read on access, by `read_image`.

    Attributes:
        files: paths of the images. shape: (3, H, W) of each image.
        checkpoint: of the model that made all images, as their files name it; None if a file names none, or another.

    Raises:
        ValueError: no images, files that are not images, or images of several sizes; the message names the first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, image_files(folder)
        width, height = _header(self.files[0])[0]
        checkpoints = set()
        for path in self.files:
            (own_width, own_height), checkpoint = _header(path)
            checkpoints.add(checkpoint)
            if (own_width, own_height) != (width, height):
                sizes = f"{own_width}x{own_height} pixels, and others have {width}x{height}"
                raise ValueError(f"{path} has {sizes}: give a folder of images of one size")
        self.shape = 3, height, width
        self.checkpoint = checkpoints.pop() if len(checkpoints) == 1 else None

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
    """A data set of uint8 [3, H, W] over an .npz in ADM's layout: images in `arr_0`, [N, H, W, 3]; or over an .npy.

    Images of uncompressed files stay on the disk until they are read.

    Attributes:
        shape: (3, H, W) of each image. labels: their classes or prompts, from `arr_1`; None if it has neither.

    Args:
        arrays: those of the file, if it has been read.

    Raises:
        FileNotFoundError: no such file. ValueError: no images, or other numbers than `to_pixels` takes.
    """

    files: Sequence[Path] = ()  # that prompts could be found by
    checkpoint: str | None = None  # the file does not name it

    def __init__(self, path: Path, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        arrays = arrays or read_arrays(path)
        if "arr_0" not in arrays:
            raise ValueError(f"{path} has no images (arr_0): give a file such as ADM's")
        try:
            self.pixels = to_pixels(arrays["arr_0"])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        num, height, width, _ = self.pixels.shape
        self.shape = 3, height, width
        self.labels = _subjects_in(arrays["arr_1"], num) if "arr_1" in arrays else None

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self.pixels):
            raise IndexError(index)
        return torch.from_numpy(np.array(self.pixels[index])).permute(2, 0, 1)


def _subjects_in(array: np.ndarray, num: int) -> list[Any] | None:
    """The classes of `num` images, from [N], [N, 1] or one-hot [N, C], or their prompts [N]; None of another array."""
    if array.shape[:1] != (num,):
        return None
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    elif array.ndim == 2 and array.dtype.kind != "U":
        is_one_hot = ((array == 0) | (array == 1)).all() and (array.sum(1) == 1).all()
        array = array.argmax(1) if is_one_hot else array
    if array.ndim != 1:
        return None
    if array.dtype.kind == "U":
        return array.tolist()
    return array.astype(np.int64).tolist() if (array % 1 == 0).all() else None


def images_in(path: Path) -> ImageFolder | NpzImages:
    """The images in a folder, or in an .npz or .npy. Raises as they do."""
    return ImageFolder(path) if path.is_dir() else NpzImages(path)


def _by_number(path: Path) -> tuple[str, str]:
    """A key to sort files by name, and by the numbers in their names."""
    # zeros in front let 2 come before 10; the name itself decides between 1.png and 01.png
    padded = re.sub(r"\d+", lambda number: number[0].zfill(DIGITS), path.name)
    return padded, path.name


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """An image file whose pixels are not read yet. Raises ValueError, which names the file, for any failure."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            yield image
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is not a PNG, JPEG, WebP or BMP: it begins with {beginning(path)!r}") from error
    except Exception as error:  # a damaged file can fail anywhere in the decoders
        raise ValueError(f"{path} cannot be used as an image ({error}): give another file") from error


def _header(path: Path) -> tuple[tuple[int, int], str | None]:
    """Width and height, and the checkpoint that the settings in a PNG of ours name, or None."""
    with _opened(path) as image:
        settings: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            settings = parse_json(image.info.get(PNG_TEXT, ""))
        is_ours = misfit(settings, {"models": {"checkpoint": str}}) is None
        return image.size, settings["models"]["checkpoint"] if is_ours else None


def read_image(path: Path) -> Tensor:
    """uint8 [3, H, W] of an image file, as torch-fidelity reads it.

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
        # other values than these are invalid, and rotate nothing
        if image.getexif().get(ExifTags.Base.Orientation) in range(2, 9):
            raise ValueError("its EXIF data rotate it: rotate its pixels instead")
        pixels = of_8_bits(image, "RGB")
    return torch.from_numpy(pixels).permute(2, 0, 1)


def to_pixels(images: np.ndarray) -> np.ndarray:
    """uint8 [N, H, W, 3] of an array of images: integers in 0..255, of any dtype, floats in 0..1, or booleans.

    Raises:
        ValueError: another shape, no images, or other numbers.
    """
    if images.ndim != 4 or images.shape[3] != 3 or images.size == 0:
        raise ValueError(f"images of shape {list(images.shape)}: give [N, H, W, 3], one or more")
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind == "b":
        return np.where(images, np.uint8(255), np.uint8(0))
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


def export_npz(images: Images, path: Path, subjects: Sequence[Subject] | None = None) -> None:
    """Writes a data set as ADM's evaluator reads it: an uncompressed .npz with arr_0, uint8 [N, H, W, 3].

    It writes one image at a time, since 50,000 images of 256x256 pixels take 10 GB. Raises OSError as `publishing`.

    Args:
        subjects: the images' classes or prompts, for arr_1. Without them, or if one is None, the file lacks it.
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
        if subjects and None not in subjects:
            with archive.open("arr_1.npy", "w") as file:
                np.lib.format.write_array(file, np.array(subjects), allow_pickle=False)


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
    if isinstance(folder, NpzImages):
        return None
    prompts: dict[str, Any] = {}
    for image in listed_images(folder.folder):
        prompts[image["file"]] = image["request"].get("prompt")
    found: list[Any] = [prompts.get(str(path.relative_to(folder.folder))) for path in folder.files]
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
