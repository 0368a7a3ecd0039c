"""A small comparison, and what it left in its folder."""

from __future__ import annotations

import json

import numpy as np
import torch

from cspd.cli import main
from cspd.comparison import compare as comparison_compare
from cspd.comparison.study import comparison_store
from cspd.evaluation.metrics import load_classifier

K4 = {"num_iter": 4, "num_sampling_steps": 6, "cfg": 1.0}
QUICK = ["--num-iter", "4", "--num-sampling-steps", "6", "--cfg", "1"]
METHOD_NAMES = "ar:num_iter=24,ar:num_iter=2,speculative:window=3,mar-draft:gamma=32:prefill=0.7"
NAMES = ["ar", *METHOD_NAMES.split(",")]
NUM, BATCH, SEED = 10, 4, 3


def run(out, *more, methods=METHOD_NAMES, num=NUM):
    settings = ["--methods", methods, "--num", str(num), "--max-batch", str(BATCH), "--seed", str(SEED)]
    return main(["compare", *QUICK, *settings, "--out", str(out), *more])


def compare(rows, labels, num, out, **more):
    """As `cspd.comparison.compare.compare`, with a claim on the folder for as long as it lasts."""
    with comparison_store(out) as store:
        return comparison_compare.compare(rows, labels, num, store, **more)


def chunks(out, row):
    """Of a row, in order: images, and the rest of each chunk."""
    loaded = []
    for path in sorted((out / "chunks").glob(f"{row:02d}-*.npz")):
        with np.load(path) as content:
            loaded.append((content["arr_0"], json.loads(content["chunk"].tobytes())))
    return loaded


def images_of(out, row):
    return np.concatenate([images for images, _ in chunks(out, row)])


def features(images):
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2) / 255 * 2 - 1
    return load_classifier("digits").features(pixels)
