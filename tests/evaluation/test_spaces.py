"""Feature spaces: a new one needs an entry in `SPACES`, its files and a bundled model."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from digits import coloured_digits
from make_reference_stats import drawn, write_reference
from pictures import data_of
from safetensors.torch import save_file
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3
from training import HELD_OUT_SEED

import cspd
from cspd import models
from cspd.checkpoints import checkpoint_files
from cspd.cli import main
from cspd.cli.evaluate import _check_limits, _usual_space, how_to_evaluate
from cspd.comparison.study import Configuration
from cspd.evaluation.images import ImageList, images_in
from cspd.evaluation.metrics import (
    SPACES,
    Classifier,
    ClassifierConfig,
    Evaluation,
    Space,
    check,
    features,
    load_classifier,
    load_reference,
    space_of_files,
)
from cspd.evaluation.run import Shards
from cspd.pixels import to_pil, to_uint8
from mar.checkpoint import mar_spec
from mar.model import MAR

SIDE, WIDTH, NUM = 16, 8, 20
QUICK = ["--checkpoint", "toy16", "--device", "cpu", "--num-iter", "1", "--num-sampling-steps", "2", "--cfg", "1"]
PLAIN = [*QUICK, "--first-timestep", "950"]


@pytest.fixture(scope="module", autouse=True)
def toy(tmp_path_factory):
    """A space of 16x16 images in ten classes, and a model that generates such images; all weights are random."""
    folder = tmp_path_factory.mktemp("checkpoints") / "toy16"
    folder.mkdir()
    shutil.copy(checkpoint_files("digits32")["vae"], folder)
    sizes = ClassifierConfig(size=SIDE, widths=(4, WIDTH))
    torch.manual_seed(0)
    save_file(
        MAR(replace(mar_spec("mar_digits32_draft").config, img_size=16)).state_dict(), folder / "target.safetensors"
    )
    save_file(Classifier(sizes).state_dict(), folder / "classifier.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "BUNDLED_ROOTS", (folder.parent,))
        patch.setitem(SPACES, "toy", Space(sizes, ("toy16",)))
        assert write_reference(ImageList(torch.rand(30, 3, SIDE, SIDE)), SPACES["toy"].reference, 25, "toy") == 25
        yield


def test_evaluate_takes_the_models_own_space(tmp_path):
    """Also for existing images, if their settings name the model. Of other images the size says nothing."""
    out = tmp_path / "out"
    assert main(["evaluate", *PLAIN, "--method", "ar", "--num", str(NUM), "--out", str(out)]) == 0
    report = json.loads((out / "evaluation.json").read_text())
    assert report["space"] == "toy" and set(report["missing"]) == {"sfid", "fd_dinov2"}
    assert report["reference"]["fingerprint"] == load_reference(SPACES["toy"].reference).fingerprint

    images = Shards(out, NUM)
    found = features(images, space="toy")
    assert found.shape == (NUM, WIDTH)
    recognised = load_classifier("toy").out(found).argmax(1) == torch.arange(NUM) % 10
    assert report["accuracy"] == pytest.approx(recognised.float().mean().item())

    pngs = tmp_path / "pngs"
    assert main(["merge", str(out), "--png", str(pngs), "--npz", str(tmp_path / "all.npz")]) == 0
    assert main(["evaluate", "--images", str(pngs), "--device", "cpu", "--out", str(tmp_path / "again")]) == 0
    again = json.loads((tmp_path / "again" / "evaluation.json").read_text())
    assert again["space"] == "toy" and again["fid"] == pytest.approx(report["fid"], rel=1e-5)
    assert space_of_files(images_in(tmp_path / "all.npz")) is None
    to_pil(images[0]).save(pngs / "of_somebody.png")
    assert space_of_files(images_in(pngs)) is None


@pytest.mark.parametrize("given", [{}, {"ref": "my.npz"}, {"weights": "inception.pth"}])
def test_the_usual_space(given):
    args = argparse.Namespace(**{"ref": None, "weights": None} | given)
    assert _usual_space(args, False, "toy") == ("inception" if args.weights else "toy")
    assert _usual_space(args, False, None) == "inception"
    assert _usual_space(args, True, None) == ("inception" if given else None)


@pytest.mark.slow
def test_inception_judges_images_of_unknown_origin(tmp_path, inception, monkeypatch, capsys):
    """Also those of the size of a bundled model's. Other spaces are asked for."""
    weights = tmp_path / "hub" / "checkpoints" / Path(URL_INCEPTION_V3).name  # as if torch-fidelity had fetched them
    weights.parent.mkdir(parents=True)
    weights.symlink_to(inception)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    np.savez(tmp_path / "noise.npz", np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, 3), np.uint8))
    measure = ["evaluate", "--images", str(tmp_path / "noise.npz"), "--device", "cpu", "--out", str(tmp_path / "out")]
    for more, space, title in (([], "inception", "FID  "), (["--space", "toy"], "toy", "FID (toy)")):
        assert main([*measure, *more]) == 0
        report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
        assert report["space"] == space and f"\n{title}" in capsys.readouterr().out


def test_compare_and_tune_take_it_too():
    row = Configuration("ar", cspd.Request(0), cspd.load("toy16", max_batch=1, device="cpu"), {"checkpoint": "toy16"})
    how = how_to_evaluate(argparse.Namespace(weights=None, ref=None, device="cpu"), [row])
    assert how.space == "toy" and len(how.reference.images) == 25
    _check_limits({"accuracy": 0.1, "fid": 0.1}, how)


@pytest.mark.slow
def test_compare_and_bench_as_a_whole(tmp_path):
    assert main(["compare", *PLAIN, "--methods", "ar", "--num", "2", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "comparison.json").read_text())
    assert report["space"] == "toy" and all(row["fid"] is not None for row in report["rows"])
    numbers = tmp_path / "bench.json"
    options = ["--methods", "disa:upper=2:lower=2", "--batch", "1", "--runs", "1", "--json", str(numbers)]
    assert main(["bench", *PLAIN, *options]) == 0
    assert all("accuracy" in row for row in json.loads(numbers.read_text())["rows"])


def test_other_sizes_and_unknown_spaces_are_refused():
    with pytest.raises(ValueError, match="32x32"):
        check(Evaluation("toy"), 32)
    with pytest.raises(ValueError, match="toy"):
        check(Evaluation("vgg"), 16)


def test_a_reference_is_of_the_training_distribution(tmp_path):
    """Coloured digits are drawn as in training; a folder gives all its classes equally often."""
    digits = argparse.Namespace(data="digits", size=32, upright="", augment=1.0)
    images, _ = coloured_digits(3, HELD_OUT_SEED, labels=torch.arange(3))
    made = drawn(data_of(digits), 3)
    assert torch.equal(torch.stack([made[i] for i in range(3)]), to_uint8((images + 1) / 2))
    for label, name in enumerate(("dark", "light")):
        (tmp_path / name).mkdir()
        for i in range(2):
            to_pil(torch.full((3, 20, 20), 0.2 + 0.6 * label)).save(tmp_path / name / f"{i}.png")
    made = drawn(data_of(argparse.Namespace(data=str(tmp_path), size=SIDE, upright="", augment=1.0)), 4)
    assert made[0].shape == (3, SIDE, SIDE)
    assert [bool(made[i].float().mean() > 128) for i in range(4)] == [False, True, False, True]
