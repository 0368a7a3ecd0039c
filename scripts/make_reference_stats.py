"""Makes a reference to measure images against: python scripts/make_reference_stats.py --images FOLDER --out FILE.npz

Without a folder, of the embedded models' training data: coloured digits, all classes equally often.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from digits import coloured_digits
from torch_fidelity.metric_fid import fid_features_to_statistics
from training import HELD_OUT_SEED

from cspd.evaluation.images import ImageFolder, ImageList
from cspd.evaluation.metrics import LEAST, SPACES, features
from cspd.pixels import to_uint8
from cspd.records import publishing

PART = 1000  # images drawn at a time


def digits(num: int) -> ImageList:
    """`num` images of the training distribution, of draws that no training saw."""
    labels = torch.arange(num) % 10
    pictures = []
    for i, part in enumerate(labels.split(PART)):
        images, _ = coloured_digits(len(part), HELD_OUT_SEED + i, labels=part)
        pictures += [to_uint8((image + 1) / 2) for image in images]
    return ImageList(pictures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="a folder of PNGs, all of one size (default: coloured digits)")
    parser.add_argument("--num", type=int, default=20_000, help="coloured digits to draw (default: %(default)s)")
    parser.add_argument("--keep", type=int, default=1000, help="images that go into the file (default: %(default)s)")
    parser.add_argument("--space", choices=SPACES, default="digits", help="(default: %(default)s)")
    parser.add_argument("--weights", type=Path, help="Inception-v3's file (default: torch-fidelity's own download)")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/digits32/reference.npz"))
    args = parser.parse_args()

    images = ImageFolder(args.images) if args.images else digits(args.num)
    if len(images) < LEAST["fid"] or args.keep < 0:
        parser.error(f"{len(images)} images, {args.keep} to keep: give {LEAST['fid']} or more, and keep 0 or more")
    arrays = fid_features_to_statistics(features(images, space=args.space, weights=args.weights))
    kept = np.random.default_rng(0).permutation(len(images))[: args.keep]
    if args.keep:
        arrays["arr_0"] = np.stack([images[i].permute(1, 2, 0).numpy() for i in kept])
    with publishing(args.out) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)
    print(f"{args.out}: statistics of {len(images)} images, {len(kept)} of them kept")


if __name__ == "__main__":
    main()
