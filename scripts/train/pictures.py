"""Images to train on: coloured digits, directories of images named by class, or images with prompts, of any size."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from digits import coloured_digits
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

from cspd.evaluation.images import image_files

DIGITS = "digits"
DATA_OPTIONS = ("data", "size", "upright", "augment")  # the flags that decide what is drawn
HELD_OUT_EVERY = 10  # one in ten images of a class is held out, unless the directory has held_out/
MARGIN = 1 / 16  # padding before the random crop, as a fraction of the side
LEAST_AREA = 0.8  # of the crop, as a fraction of the padded image
HUE = 0.02  # the largest change, as a fraction of the colour circle


@dataclass(frozen=True)
class Data:
    """A data set with images drawn from a seed; the same arguments give the same images.

    Attributes:
        classes: their names, in the order of their labels.
        draw: (num, seed, split, labels) -> images [num, 3, size, size] in -1..1 and labels [num]. The split is "train"
            or "held-out". Without labels, the classes of a directory are equally frequent, and digits are random.
            Held-out images of a directory are not augmented.
    """

    classes: list[str]
    draw: Callable[..., tuple[Tensor, Tensor]]


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `data_of` reads."""
    parser.add_argument(
        "--data", default=DIGITS, help="'digits', or a directory with one directory of images per class"
    )
    add_drawing_options(parser, size=32)


def add_drawing_options(parser: argparse.ArgumentParser, size: int) -> None:
    """Adds the flags that say how an image is drawn, with the default size."""
    parser.add_argument("--size", type=int, default=size, help="pixels per side; images of another size are resized")
    parser.add_argument("--upright", default="", help="classes whose images are never mirrored, separated by commas")
    parser.add_argument(
        "--augment",
        type=float,
        default=1.0,
        help="how far training images of a directory are shifted, enlarged and turned in hue, 0 to 1; 0: only mirrored"
        " (default: 1)",
    )


def data_of(args: argparse.Namespace) -> Data:
    """The data set that flags select.

    A directory has train/ and held_out/, each with one directory per class; or it has the classes' directories, and
    then one in ten images of a class is held out.

    Raises:
        FileNotFoundError: the directory does not exist, or a class has no images.
        ValueError: the directory does not have this form, a class has a single image, or --size, --upright or
            --augment is invalid for the data.
    """
    if not 0 <= args.augment <= 1:
        raise ValueError(f"--augment {args.augment}: expected 0 to 1")
    if args.data == DIGITS:
        if args.size != 32:
            raise ValueError(f"--size {args.size}: coloured digits have 32 pixels per side")
        if args.upright:
            raise ValueError(f"--upright {args.upright}: digits are never mirrored, so omit the flag")
        if args.augment != 1:
            raise ValueError(f"--augment {args.augment}: digits are drawn anew each time, so omit the flag")
        return Data([str(digit) for digit in range(10)], coloured_digits)

    folder = Path(args.data)
    has_splits = (folder / "held_out").is_dir()
    if (folder / "train").is_dir() != has_splits:
        raise ValueError(f"{folder} has only one of train/ and held_out/: it needs both, or neither")
    images = ImageFolder(folder / "train" if has_splits else folder)
    paths = {"train": _by_class(images)}
    if has_splits:
        held_out = ImageFolder(folder / "held_out")
        if held_out.classes != images.classes:
            raise ValueError(f"{folder}: train has the classes {images.classes}, held_out has {held_out.classes}")
        paths["held-out"] = _by_class(held_out)
    else:
        paths = {
            "train": [[path for i, path in enumerate(own) if i % HELD_OUT_EVERY] for own in paths["train"]],
            "held-out": [own[::HELD_OUT_EVERY] for own in paths["train"]],
        }
    for split, own in paths.items():
        for name, files in zip(images.classes, own):
            if not files:
                raise ValueError(f"{folder}: the class {name} has no image in {split}: add at least two images")
    upright = chosen_classes(args.upright, images.classes, folder)
    mirrored = [name not in upright for name in images.classes]
    return Data(images.classes, drawing(images.loader, paths, mirrored, args.size, args.augment))


def chosen_classes(given: str, classes: Sequence[str], of: Path) -> list[str]:
    """The classes in --upright. Raises ValueError if one does not exist."""
    chosen = [name for name in given.split(",") if name]
    for name in chosen:
        if name not in classes:
            raise ValueError(f"--upright {name}: the classes of {of} are {', '.join(classes)}")
    return chosen


def captioned(folder: Path, texts: Sequence[str], size: int) -> Data:
    """The images of a directory, in the order of their names, for texts that are cycled; labels are indices of texts.

    Images are never mirrored, since texts may mention left and right. The caller chooses which texts are held out.

    Raises:
        ValueError: there are no images, or their number is not a multiple of the number of texts.
    """
    files = image_files(folder)
    if len(files) % len(texts):
        raise ValueError(
            f"{folder} has {len(files)} images, but there are {len(texts)} texts: --prompts needs one text per image,"
            " in the order of the images' names"
        )
    of_texts = [list(map(str, files[i :: len(texts)])) for i in range(len(texts))]
    paths = {"train": of_texts, "held-out": of_texts}
    return Data(list(texts), drawing(default_loader, paths, [False] * len(texts), size))


def _by_class(images: ImageFolder) -> list[list[str]]:
    paths: list[list[str]] = [[] for _ in images.classes]
    for path, label in images.samples:
        paths[label].append(path)
    return paths


def drawing(
    load: Callable, paths: dict[str, list[list[str]]], mirrored: list[bool], size: int, augment: float = 1.0
) -> Callable:
    """The `draw` of a data set, from files by split and label; training mirrors images of `mirrored` labels."""
    square = v2.Compose([v2.ToImage(), v2.Resize(size), v2.CenterCrop(size)])
    mirror = v2.RandomHorizontalFlip()
    changed = v2.Identity() if augment == 0 else changing(size, augment)

    def image(split: str, label: int) -> Tensor:
        own = paths[split][label]
        picked = square(load(own[int(torch.randint(len(own), ()))]))
        if split == "held-out":
            return picked
        return changed(mirror(picked) if mirrored[label] else picked)

    def draw(num: int, seed: int, split: str = "train", labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):  # torchvision uses torch's global generator
            torch.manual_seed(seed)
            if labels is None:
                labels = torch.randperm(num) % len(mirrored)
            images = torch.stack([image(split, label) for label in labels.tolist()])
        return images.float() / 127.5 - 1, labels

    return draw


def changing(size: int, augment: float) -> v2.Transform:
    """Shifts, enlarges and turns the hue of an image at random, by `augment` of the most that is ever done."""
    padded = v2.Pad(round(size * MARGIN * augment), padding_mode="edge")
    least = 1 - (1 - LEAST_AREA) * augment
    cut = v2.RandomResizedCrop(size, scale=(least, 1), ratio=(1, 1), interpolation=v2.InterpolationMode.BICUBIC)
    return v2.Compose([padded, cut, v2.ColorJitter(hue=HUE * augment)])


def psnr_of(mse: Tensor) -> float:
    """The PSNR in dB, from the mean squared error of pixels in -1..1."""
    return -10 * torch.log10(mse / 4).item()
