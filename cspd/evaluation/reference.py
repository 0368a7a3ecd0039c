"""What images are compared with: statistics of features, images, or both."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from cspd.evaluation.images import ImageFolder, ImageList
from cspd.loading import embedded


@dataclass(frozen=True)
class Reference:
    """What images are compared with.

    Attributes:
        name: of the file or folder.
        fingerprint: its sha256; a folder's is of all names and contents.
        statistics: "mu" [D] and "sigma" [D, D] of features, float64; None: to be taken from the images.
        images: for KID, precision and recall; None: there are only statistics.
    """

    name: str
    fingerprint: str
    statistics: dict[str, np.ndarray] | None = None
    images: Dataset | None = None


def load_reference(path: Path | None = None) -> Reference:
    """A reference from an .npz as ADM's (mu and sigma, images in arr_0, or both) or a folder of images.

    By default the embedded models' training data, in the digits space.

    Raises:
        ValueError: it holds neither statistics nor images. FileNotFoundError: there is no such file or folder.
    """
    path = embedded()["digits32"] / "reference.npz" if path is None else Path(path)
    if path.is_dir():
        images = ImageFolder(path)
        digest = hashlib.sha256()
        for file in images.files:
            digest.update(file.name.encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        return Reference(path.name, digest.hexdigest(), images=images)
    statistics = images = None
    try:
        with np.load(path) as file:
            if {"mu", "sigma"} <= set(file.files):
                statistics = {name: file[name].astype(np.float64) for name in ("mu", "sigma")}
            if "arr_0" in file.files:
                images = ImageList(torch.from_numpy(file["arr_0"]).permute(0, 3, 1, 2))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path}: no such file or folder: give an .npz as ADM's, or a folder of images"
        ) from None
    except (OSError, ValueError, RuntimeError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not an .npz, or a damaged one ({error})") from error
    if statistics is None and images is None:
        raise ValueError(f"{path}: has neither mu and sigma nor images (arr_0): give an .npz as ADM's, or a folder")
    if statistics and statistics["sigma"].shape != 2 * statistics["mu"].shape:
        shapes = " and ".join(str(list(statistics[name].shape)) for name in ("mu", "sigma"))
        raise ValueError(f"{path}: mu and sigma are {shapes}, not [D] and [D, D]")
    return Reference(path.name, file_fingerprint(path), statistics, images)


def file_fingerprint(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
