"""The bundled emojis are what their model card says: sizes, autoencoder, samples."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import cspd
from cspd.checkpoints import checkpoint_files
from cspd.cli import main
from cspd.evaluation.metrics import SPACES, accuracy, load_classifier
from cspd.evaluation.run import EXPLODED
from cspd.models import bundled
from cspd.serving.app import about
from mar.checkpoint import SamplingDefaults, create_mar, defaults_of, load_mar, load_vae

CLASSES = [
    "animals",
    "faces",
    "flags",
    "food and plants",
    "hands",
    "objects",
    "people",
    "places",
    "symbols",
    "vehicles",
]


def test_sizes_and_defaults():
    files = checkpoint_files("emoji64")
    for name, size in (("target", 5_066_784), ("draft", 935_328)):
        model = load_mar(files[name])
        assert sum(p.numel() for p in model.parameters()) == size
        assert defaults_of(model.config) == SamplingDefaults(64, 4.0, "constant", 0.9, 1.0, 100)
    assert defaults_of(create_mar("mar_digits32_draft").config).cfg_schedule == "linear"  # but for the images' its size
    assert sum(path.stat().st_size for path in bundled()["emoji64"].iterdir() if path.is_file()) < 30e6


def test_classifier_and_reference():
    """The reference's images are of all classes, equally often but for chance, and the classifier knows them."""
    with np.load(SPACES["emoji"].reference) as file:
        images = torch.from_numpy(file["arr_0"]).permute(0, 3, 1, 2) / 127.5 - 1
        assert file["mu"].shape == (128,) and file["sigma"].shape == (128, 128)
    assert images.shape == (250, 3, 64, 64)
    logits = load_classifier("emoji")(images)
    assert logits.softmax(1).max(1).values.mean() > 0.7 and logits.argmax(1).bincount(minlength=10).min() >= 10
    with pytest.raises(ValueError):
        accuracy(load_classifier("emoji"), torch.zeros(1, 3, 32, 32), torch.zeros(1))


def test_evaluate_and_names(tmp_path):
    quick = ["--num-iter", "1", "--num-sampling-steps", "2", "--first-timestep", "950", "--device", "cpu"]
    out = tmp_path / "out"
    assert (
        main(["evaluate", "--checkpoint", "emoji64", "--method", "ar", *quick, "--num", "20", "--out", str(out)]) == 0
    )
    report = json.loads((out / "evaluation.json").read_text())
    assert report["space"] == "emoji" and report["fid"] > 0 and report["accuracy"] is not None
    requests = [cspd.Request(name) for name in CLASSES]
    engine = cspd.load("emoji64", device="cpu")
    assert [engine.check(request).label for request in requests] == list(range(10))
    (shown,) = about({"emoji64": engine})["models"]  # on the page of `cspd serve`
    assert shown["classes"] == CLASSES and (shown["image_size"], shown["side"]) == (64, 16)


def test_all_channels_of_the_autoencoder_carry_something():
    """As of KL-16, and unlike the digits'; on images of the training data that come with the reference."""
    vae = load_vae(checkpoint_files("emoji64")["vae"])
    with np.load(SPACES["emoji"].reference) as file:
        images = torch.from_numpy(file["arr_0"][::4]).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.inference_mode():
        mean, logvar = vae.encode(images)
        decoded = vae.decode(mean).clamp(-1, 1)
    assert -10 * torch.log10((decoded - images).square().mean() / 4) >= 26
    nats = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean(dim=(0, 2, 3))
    assert len(nats) == 16 and nats.min() >= 0.1 * nats.mean()
    spread = (mean.var() + logvar.exp().mean()).sqrt() * vae.config.scale
    assert spread == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    "model, num, chain, least",
    [
        ("target", 10, {"num_sampling_steps": 12, "first_timestep": 950}, 0.7),
        pytest.param("target", 100, {}, 0.8, marks=pytest.mark.slow),
        pytest.param("draft", 100, {}, 0.6, marks=pytest.mark.slow),
    ],
)
def test_samples_are_recognised(model, num, chain, least):
    """At its own guidance and K = 16; the card has numbers over more images."""
    files = checkpoint_files("emoji64")
    engine = cspd.Engine(cspd.MARModels(load_mar(files[model]), vae=load_vae(files["vae"])), max_batch=50)
    outputs = engine.generate([cspd.Request(i % 10, seed=i, method="ar", num_iter=16, **chain) for i in range(num)])
    labels = torch.arange(num) % 10
    assert accuracy(load_classifier("emoji"), torch.stack([o.image for o in outputs]), labels) >= least
    assert max(o.tokens.abs().max() for o in outputs) < EXPLODED
