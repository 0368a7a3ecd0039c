"""How sure the qualities of few images are: the jackknife of FID and Inception score."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from cspd.evaluation import metrics
from cspd.evaluation.intervals import around
from cspd.evaluation.reference import Reference

PARTS = 25  # that the jackknife splits a row's images into, at most
LEAST_INTERVAL = 20  # images that the jackknife needs
LEAST_CYCLES = 4  # cycles through the classes that make class-balanced parts possible
QUICK_FEATURES = 256  # a FID of Inception's 2,048 features takes many seconds: it gets no interval


def jackknife(
    features: Tensor, logits: Tensor, names: list[str], reference: Reference | None, num_classes: int
) -> dict[str, np.ndarray]:
    """FID and Inception score, those in `names`, with each part of the images left out; none where that is no use.

    The jackknife splits the images into at most 25 class-balanced parts and leaves out one at a time. We do not use
    the bootstrap: it draws classes unevenly, and an image that is drawn twice stands for fewer images. Both worsen the
    numbers by themselves.
    """
    num = len(features)
    if num < LEAST_INTERVAL:
        return {}
    if "fid" in names and (reference.statistics is None or features.shape[1] > QUICK_FEATURES):
        names = [name for name in names if name != "fid"]

    # image i has class i modulo num_classes: whole cycles keep a part balanced
    block = num_classes if num >= LEAST_CYCLES * num_classes else 1
    part = torch.arange(num) // block % PARTS
    values = []
    for left_out in range(int(part.max()) + 1):
        kept = part != left_out
        values.append(metrics.of_features(features[kept], logits[kept], names, reference))
    return {name: np.array([value[name] for value in values]) for name in names}


def standard_error(left_out: np.ndarray) -> float:
    """The jackknife's, of a value that was measured with each part left out."""
    return float(((len(left_out) - 1) * np.var(left_out)) ** 0.5)


def intervals(measured: Mapping, left_out: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    """95 % intervals of what was measured, by what `jackknife` gave of it."""
    return {f"{name}_ci95": around(name, measured[name], standard_error(values)) for name, values in left_out.items()}
