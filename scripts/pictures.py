"""What the training programs train on: coloured digits, class-named folders of pictures, or pictures of texts.

Pictures may be of any size.
"""

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
HELD_OUT_EVERY = 10  # of a class's pictures, where the folder itself holds none out
MARGIN = 1 / 16  # of the side, by which pictures are padded before a square is cut out of them
LEAST_AREA = 0.8  # of that square, as a share of the padded picture
HUE = 0.02  # of a turn of the colour circle


@dataclass(frozen=True)
class Data:
    """A data set that is drawn from by a seed; the same arguments give the same images.

    Attributes:
        classes: their names, in the order of their labels.
        draw: maps (num, seed, split, labels) to images [num, 3, size, size] in -1..1 and labels [num]. The split is
            "train" or "held-out". Where no labels are given, a folder's classes are drawn equally often and digits at
            random; a folder's pictures that are held out are not augmented.
    """

    classes: list[str]
    draw: Callable[..., tuple[Tensor, Tensor]]


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `data_of` reads."""
    parser.add_argument("--data", default=DIGITS, help="'digits', or a folder of class-named folders of images")
    parser.add_argument("--size", type=int, default=32, help="of the images, pixels per side; others are resized")
    parser.add_argument("--upright", default="", help="classes whose images are never mirrored, with commas between")


def data_of(args: argparse.Namespace) -> Data:
    """The data set that flags name.

    A folder has train/ and held_out/, each with one folder for each class; or only the classes' folders, and then each
    tenth image of a class is held out.

    Raises:
        FileNotFoundError: no such folder, or a class without images.
        ValueError: digits of another size or with --upright, classes that do not agree, a class that is not there or
            has one image only, or one of train/ and held_out/.
    """
    if args.data == DIGITS:
        if args.size != 32:
            raise ValueError(f"--size {args.size}: coloured digits have 32 pixels per side")
        if args.upright:
            raise ValueError(f"--upright {args.upright}: digits are never mirrored: leave it out")
        return Data([str(digit) for digit in range(10)], coloured_digits)

    folder = Path(args.data)
    has_splits = (folder / "held_out").is_dir()
    if (folder / "train").is_dir() != has_splits:
        raise ValueError(f"{folder} has one of train/ and held_out/: give it both, or neither")
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
                raise ValueError(f"{folder}: the class {name} has no image in {split}: give it two or more")
    upright = chosen_classes(args.upright, images.classes, folder)
    mirrored = [name not in upright for name in images.classes]
    return Data(images.classes, drawing(images.loader, paths, mirrored, args.size))


def chosen_classes(given: str, classes: Sequence[str], of: Path) -> list[str]:
    """Those that --upright names. Raises ValueError where one is not there."""
    chosen = [name for name in given.split(",") if name]
    for name in chosen:
        if name not in classes:
            raise ValueError(f"--upright {name}: the classes of {of} are {', '.join(classes)}")
    return chosen


def captioned(folder: Path, texts: Sequence[str], size: int) -> Data:
    """The pictures of a folder, in the order of their names those of texts in turn; a text stands for a class.

    They are never mirrored, since texts tell left from right. Which texts are held out the caller says by their labels.

    Raises:
        ValueError: no pictures are there, or their number does not fit.
    """
    files = image_files(folder)
    if len(files) % len(texts):
        raise ValueError(
            f"{folder} has {len(files)} images and there are {len(texts)} texts: give --prompts a file with a text of"
            " each image, in the order of their names"
        )
    of_texts = [list(map(str, files[i :: len(texts)])) for i in range(len(texts))]
    paths = {"train": of_texts, "held-out": of_texts}
    return Data(list(texts), drawing(default_loader, paths, [False] * len(texts), size))


def _by_class(images: ImageFolder) -> list[list[str]]:
    paths: list[list[str]] = [[] for _ in images.classes]
    for path, label in images.samples:
        paths[label].append(path)
    return paths


def drawing(load: Callable, paths: dict[str, list[list[str]]], mirrored: list[bool], size: int) -> Callable:
    """A data set's `draw`, of files by split and label; images of some labels are mirrored in training."""
    square = v2.Compose([v2.ToImage(), v2.Resize(size), v2.CenterCrop(size)])
    mirror = v2.RandomHorizontalFlip()
    padded = v2.Pad(round(size * MARGIN), padding_mode="edge")
    cut = v2.RandomResizedCrop(size, scale=(LEAST_AREA, 1), ratio=(1, 1), interpolation=v2.InterpolationMode.BICUBIC)
    augment = v2.Compose([padded, cut, v2.ColorJitter(hue=HUE)])

    def image(split: str, label: int) -> Tensor:
        own = paths[split][label]
        picked = square(load(own[int(torch.randint(len(own), ()))]))
        if split == "held-out":
            return picked
        return augment(mirror(picked) if mirrored[label] else picked)

    def draw(num: int, seed: int, split: str = "train", labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):  # torchvision draws from torch's own generator
            torch.manual_seed(seed)
            if labels is None:
                labels = torch.randperm(num) % len(mirrored)
            images = torch.stack([image(split, label) for label in labels.tolist()])
        return images.float() / 127.5 - 1, labels

    return draw


def psnr_of(mse: Tensor) -> float:
    """In dB, of the mean squared error of pixels in -1..1."""
    return -10 * torch.log10(mse / 4).item()
