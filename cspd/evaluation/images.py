"""Images to be measured, 8 bits a channel: from memory and from a folder."""

from __future__ import annotations

import re
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset
from torch_fidelity.datasets import ImagesPathDataset
from tqdm import tqdm

from cspd.plots import to_uint8
from cspd.records import publishing

GRID, HEATMAP = OVERVIEWS = ("grid.png", "heatmap.png")  # what our commands write beside images


class ImageList(Dataset):
    """A data set of uint8 [3, H, W] over images in memory, each float [3, H, W] in 0..1 or uint8 already."""

    def __init__(self, images: Sequence[Tensor]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return to_uint8(self.images[index])


class Watched(Dataset):
    """Another data set, and a bar of how much of it was read."""

    def __init__(self, images: Dataset, bar: tqdm) -> None:
        self.images, self.bar = images, bar

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        new = index + 1 - self.bar.n  # the first image is read twice, for its size
        self.bar.update(max(0, new))
        return self.images[index]


class ImageFolder(ImagesPathDataset):
    """A data set of uint8 [3, H, W] over a folder's PNGs (and JPEGs), by name, without our own overviews.

    Raises:
        ValueError: no images there, or (on access) images of several sizes.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder")
        kinds = (".png", ".jpg", ".jpeg")
        found = sorted(path for path in folder.iterdir() if path.suffix.lower() in kinds)
        super().__init__([path for path in found if path.name not in OVERVIEWS])
        if not self.files:
            raise ValueError(f"{folder}: there are no images in it (PNG or JPEG, not in subfolders)")
        self.shape = super().__getitem__(0).shape

    def __getitem__(self, index: int) -> Tensor:
        image = super().__getitem__(index)
        if image.shape != self.shape:
            sizes = [f"{width}x{height}" for _, height, width in (self.shape, image.shape)]
            raise ValueError(
                f"{self.files[index]}: images of {' and '.join(sizes)} pixels in one folder: give one of equal sizes"
            )
        return image

    @property
    def labels(self) -> list[int] | None:
        """Classes, from names as `cspd sample` gives; None where a file has no such name."""
        found = [re.search(r"_label(\d+)_", path.name) for path in self.files]
        return [int(match[1]) for match in found] if all(found) else None


def check_npz(path: Path) -> None:
    """Makes the folder that `export_npz` writes to; raises ValueError or OSError where no file can be written there."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give --npz a file in it, such as {path / 'images.npz'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}): give another --npz") from error


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
