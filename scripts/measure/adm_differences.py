"""What remains between our scores and ADM's evaluator's, by its size: python scripts/measure/adm_differences.py

The formulas agree (tests/evaluation/test_adm.py). What differs is what reaches them: how pixels are rounded, stored and
resized, which reference is taken, and in which precision neighbours are compared. Each is tried on held-out coloured
digits, in the classifier's space. Prints the change of each score.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cspd.evaluation.images import ImageList
from cspd.evaluation.metrics import SPACES, Evaluation, features, load_reference, scores_of
from cspd.evaluation.scores import manifold, statistics_of
from cspd.pixels import to_pil

sys.path.append(str(Path(__file__).parents[1] / "train"))
from digits import coloured_digits

NAMES = ("fid", "inception_score", "kid", "precision", "recall")


def as_jpeg(image: Tensor, quality: int) -> Tensor:
    """An image [3, H, W] in 0..1 after JPEG compression."""
    buffer = io.BytesIO()
    to_pil(image).save(buffer, "JPEG", quality=quality)
    return torch.from_numpy(np.array(Image.open(buffer))).permute(2, 0, 1) / 255


def resized(image: Tensor, method: Image.Resampling) -> Tensor:
    """An image at twice its size and back."""
    picture = to_pil(image)
    width, height = picture.size
    back = picture.resize((2 * width, 2 * height), method).resize((width, height), method)
    return torch.from_numpy(np.array(back)).permute(2, 0, 1) / 255


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "pixels cut to integers, not rounded": lambda image: (image * 255).floor() / 255,
    "JPEG, quality 95": lambda image: as_jpeg(image, 95),
    "JPEG, quality 75": lambda image: as_jpeg(image, 75),
    "twice the size and back, bicubic": lambda image: resized(image, Image.Resampling.BICUBIC),
    "twice the size and back, bilinear": lambda image: resized(image, Image.Resampling.BILINEAR),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=1000, help="images (default: %(default)s)")
    num = parser.parse_args().num
    images, _ = coloured_digits(num, 1, "held-out")
    images = [(image + 1) / 2 for image in images]
    reference = load_reference(SPACES["digits"].reference)

    def values(of: list[Tensor], against=reference) -> dict[str, float]:
        scores, _ = scores_of(ImageList(of), Evaluation("digits", reference=against))
        return {name: scores[name].value for name in NAMES}

    usual = values(images)
    tried = {name: values([change(image) for image in images]) for name, change in CHANGES.items()}
    of_images = features(reference.images, space="digits")
    fewer = replace(reference, statistics=statistics_of(of_images))
    tried[f"statistics of the reference's {len(of_images)} stored images"] = values(images, fewer)
    in_half = manifold(features(ImageList(images), space="digits").half().float(), of_images.half().float())
    tried["neighbours of features in float16"] = usual | {
        "precision": in_half.precision.value,
        "recall": in_half.recall.value,
    }
    print("scores:", "  ".join(f"{name} {value:.4f}" for name, value in usual.items()))
    for what, found in tried.items():
        print(f"{what}:", "  ".join(f"{name} {found[name] - usual[name]:+.4f}" for name in NAMES))


if __name__ == "__main__":
    main()
