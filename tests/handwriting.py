"""Coloured digits as images, directories of PNGs and statistics; torch-fidelity's names of the metrics."""

from __future__ import annotations

import numpy as np
from digits import coloured_digits
from torch_fidelity.metric_fid import fid_features_to_statistics

from cspd.evaluation.metrics import features, load_reference
from cspd.pixels import to_pil

KEYS = {
    "fid": "frechet_inception_distance",
    "inception_score": "inception_score_mean",
    "precision": "precision",
    "recall": "recall",
}


def drawn(num, seed, split="train"):
    images, labels = coloured_digits(num, seed, split)
    return (images + 1) / 2, labels.tolist()


def as_folder(images, labels, folder):
    folder.mkdir()
    for i, (image, label) in enumerate(zip(images, labels)):
        to_pil(image).save(folder / f"{i:05d}_label{label}_seed{i}.png")
    return folder


def saved_statistics(folder, space="digits", weights=None, **more):
    statistics = fid_features_to_statistics(features(folder, space=space, weights=weights))
    np.savez(folder.with_suffix(".npz"), **(statistics | more))
    return load_reference(folder.with_suffix(".npz"))
