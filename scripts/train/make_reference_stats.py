"""Computes reference statistics for FID: python scripts/train/make_reference_stats.py --images FOLDER --out FILE.npz

Without --images, the reference is a training distribution with all classes equally often: coloured digits, or --data
as for the training programs.
"""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from pictures import Data, add_data_options, data_of
from torch.utils.data import Dataset
from training import HELD_OUT_SEED

from cspd.evaluation.images import ImageFolder, ImageList
from cspd.evaluation.metrics import INCEPTION, LEAST, SPACES, extract
from cspd.evaluation.scores import statistics_of
from cspd.files import publishing
from cspd.pixels import to_uint8

PART = 1000  # images drawn at a time


def drawn(data: Data, num: int) -> ImageList:
    """`num` images of the training distribution, with seeds that no training uses."""
    labels = torch.arange(num) % len(data.classes)
    pictures = []
    for i, part in enumerate(labels.split(PART)):
        images, _ = data.draw(len(part), HELD_OUT_SEED + i, "train", part)
        pictures += [to_uint8((image + 1) / 2) for image in images]
    return ImageList(pictures)


def write_reference(images: Dataset, path: Path, keep: int, space: str, weights: Path | None = None) -> int:
    """Writes the statistics of images' features, and at most `keep` of the images; returns their number."""
    extracted = extract(images, space=space, weights=weights)
    arrays = statistics_of(extracted.features)
    if extracted.spatial is not None:
        arrays |= {f"{name}_s": value for name, value in statistics_of(extracted.spatial).items()}
    stored = np.random.default_rng(0).permutation(len(images))[:keep]
    if keep:
        arrays["arr_0"] = np.stack([images[i].permute(1, 2, 0).numpy() for i in stored])
    with publishing(path) as temporary:
        write_npz(temporary, arrays)
    return len(stored)


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays for `np.load` with LZMA, which takes 20 % less space for images than `np.savez_compressed`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="a directory of PNGs of one size, in place of --data")
    add_data_options(parser)
    parser.add_argument("--num", type=int, default=20_000, help="images of --data to draw (default: %(default)s)")
    parser.add_argument(
        "--keep", type=int, default=1000, help="images that are stored in the file (default: %(default)s)"
    )
    parser.add_argument("--space", choices=[*SPACES, INCEPTION], default="digits", help="(default: %(default)s)")
    parser.add_argument("--weights", type=Path, help="Inception-v3's file (default: torch-fidelity's own download)")
    parser.add_argument("--out", type=Path, help="(default: the bundled space's own file)")
    args = parser.parse_args()
    if args.out is None and args.space not in SPACES:
        parser.error(f"--space {args.space} has no bundled reference: pass --out")

    images = ImageFolder(args.images) if args.images else drawn(data_of(args), args.num)
    if len(images) < LEAST["fid"] or args.keep < 0:
        parser.error(f"--num {len(images)} --keep {args.keep}: at least {LEAST['fid']} images, and --keep 0 or more")
    out = args.out or SPACES[args.space].reference
    stored = write_reference(images, out, args.keep, args.space, args.weights)
    print(f"{out}: statistics of {len(images)} images, {stored} of them stored")


if __name__ == "__main__":
    main()
