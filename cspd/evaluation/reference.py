"""What images are compared with: statistics of features, images, or both."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from cspd.evaluation.classifier import SPACES
from cspd.evaluation.images import ImageFolder, ImageList, beginning, to_pixels
from cspd.ran import file_fingerprint

PARTS = ("mu", "sigma", "arr_0")
LARGEST = np.finfo(np.float32).max  # squares of it are finite
ROUNDING = 1e-3  # how far from symmetric and positive a covariance may be, relative to its size, by rounding


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


def reference_for(space: str, given: Path | None) -> Reference | None:
    """What is given, or what came with a space, if anything did. Raises as `load_reference`."""
    if given is None and space in SPACES:
        given = SPACES[space].reference
    return None if given is None else load_reference(given)


def load_reference(path: Path) -> Reference:
    """A reference from an .npz as ADM's (mu and sigma, images in arr_0, or both) or a folder of images.

    All of it is checked: the images of a folder are read once, those of an .npz see `to_pixels`, for the statistics see
    `to_statistics`.

    Raises:
        ValueError: it holds neither statistics nor images, or such as cannot be compared with.
        FileNotFoundError: there is no such file or folder.
    """
    path = Path(path)
    if path.is_dir():
        folder = ImageFolder(path)
        digest = hashlib.sha256()
        for index, file in enumerate(tqdm(folder.files, desc="reading the reference", unit=" image", delay=2)):
            folder[index]  # raises what it would raise after hours of sampling
            digest.update(file.name.encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        return Reference(path.name, digest.hexdigest(), images=folder)
    arrays = _read_npz(path)
    statistics = images = None
    try:
        if "mu" in arrays and "sigma" in arrays:
            statistics = to_statistics(arrays["mu"], arrays["sigma"])
        if "arr_0" in arrays:
            images = ImageList(torch.from_numpy(to_pixels(arrays["arr_0"])).permute(0, 3, 1, 2))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if statistics is None and images is None:
        raise ValueError(f"{path}: has neither mu and sigma nor images (arr_0): give an .npz as ADM's, or a folder")
    return Reference(path.name, file_fingerprint(path), statistics, images)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file that make up a reference, by name."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder: give an .npz as ADM's, or a folder of images")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: no .npz, or a truncated one: it begins with {beginning(path)}")
    try:
        with np.load(path) as file:
            return {name: file[name] for name in PARTS if name in file.files}
    except Exception as error:  # a damaged file can fail anywhere in the readers
        raise ValueError(f"{path}: a damaged .npz, or one too large for this machine ({error})") from error


def to_statistics(mu: np.ndarray, sigma: np.ndarray) -> dict[str, np.ndarray]:
    """The mean [D] and covariance [D, D] of features as float64, by "mu" and "sigma".

    Raises:
        ValueError: other shapes or dtypes, NaN, infinite or huge values, or no covariance: FID would be nonsense.
    """
    if mu.ndim != 1 or mu.size == 0 or sigma.shape != 2 * mu.shape:
        raise ValueError(f"mu and sigma are {list(mu.shape)} and {list(sigma.shape)}, not [D] and [D, D]")
    statistics = {}
    for name, values in (("mu", mu), ("sigma", sigma)):
        if values.dtype.kind not in "iuf":
            raise ValueError(f"{name} is {values.dtype}: give real numbers")
        statistics[name] = values.astype(np.float64)
        if not (np.abs(statistics[name]) <= LARGEST).all():
            raise ValueError(f"{name} has values that are NaN, infinite or beyond {LARGEST:.1g}")
    sigma = statistics["sigma"]
    asymmetry = np.abs(sigma - sigma.T).max()
    if asymmetry > ROUNDING * np.abs(sigma).max():
        raise ValueError(f"sigma is not symmetric (by {asymmetry:.3g}), so it is no covariance")
    variances = np.linalg.eigvalsh(sigma)  # statistics of fewer images than features have zeros
    negative = -variances.clip(max=0).sum()
    if negative > ROUNDING * variances.sum():
        raise ValueError(f"sigma has negative variances (down to {variances[0]:.3g}), so it is no covariance")
    return statistics
