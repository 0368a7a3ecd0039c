"""A small run of `cspd evaluate`, and what it left in its folder."""

from __future__ import annotations

import json

import numpy as np
import pytest
from stores import small_checkpoint

from cspd.cli import main
from cspd.evaluation.run import Shards

NUM, SEED = 58, 11  # three files of 16 images and one of 10
OPTIONS = ["--method", "ar", "--num-iter", "2", "--num-sampling-steps", "10", "--cfg", "1", "--seed", str(SEED)]
METRICS = ("fid", "inception_score", "kid", "cmmd", "precision", "recall", "density", "coverage", "accuracy")


def arguments(out, *more, num=NUM):
    models = ["--checkpoint", small_checkpoint()]
    models += ["--space", "digits"]  # that of bundled models only, unless it is asked for
    return ["evaluate", *models, *OPTIONS, "--num-images", str(num), "--max-batch", "5", "--out", str(out), *more]


def evaluate(out, *more, num=NUM):
    return main(arguments(out, *more, num=num))


def report_of(out):
    return json.loads((out / "evaluation.json").read_text())


def images_of(out):
    shards = Shards(out, NUM)
    return np.stack([shards[i].numpy() for i in range(NUM)]).astype(int)


def stamps(out):
    return {path.name: path.stat().st_mtime_ns for path in sorted(out.glob("0*.npz"))}


def near(report, other):
    """Metrics of the same images, which may differ in the rounding of a pixel."""
    return all(report[name] == pytest.approx(other[name], rel=1e-2, abs=1e-3) for name in METRICS)


@pytest.fixture(scope="module", name="whole")
def whole_run(tmp_path_factory):
    """An uninterrupted run of one process."""
    out = tmp_path_factory.mktemp("whole")
    assert evaluate(out, "--npz", str(out / "adm.npz")) == 0
    return out
