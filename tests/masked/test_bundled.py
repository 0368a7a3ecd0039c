"""The bundled checkpoints are what their model card says: sizes, autoencoder, classifier, samples."""

from __future__ import annotations

import argparse
import configparser
from pathlib import Path

import pytest
import torch
from digits import coloured_digits

import cspd
from cspd.checkpoints import checkpoint_files
from cspd.evaluation.metrics import accuracy, load_classifier
from cspd.models import bundled
from mar.checkpoint import load_mar, load_vae
from mar.tensors import CheckpointError

HELD_OUT = {"seed": 10**9, "split": "held-out"}
EXPLODED = 8.0  # as far as the data go


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_sizes():
    files = checkpoint_files("digits32")
    assert 3e6 <= parameters(load_mar(files["target"])) <= 6e6
    assert 0.7e6 <= parameters(load_mar(files["draft"])) <= 1.2e6
    assert sum(path.stat().st_size for path in bundled()["digits32"].iterdir()) < 24e6


def test_official_names_load_from_a_folder(tmp_path):
    """The bundled weights under the official files' names and layout give the bundled weights' images."""
    files = checkpoint_files("digits32")
    weights = load_mar(files["target"]).state_dict()
    other = {name: torch.zeros_like(t) for name, t in weights.items()}
    official = {"model": other, "model_ema": weights, "args": argparse.Namespace(epochs=1)}
    torch.save(official, tmp_path / "checkpoint-last.pth")
    with pytest.raises(CheckpointError):
        cspd.load(tmp_path)
    torch.save({"model": load_vae(files["vae"]).state_dict()}, tmp_path / "kl16.ckpt")
    request = cspd.Request(label=3, seed=1, method="ar", num_iter=2, num_sampling_steps=5)
    (ours,), (official,) = (cspd.load(place).generate([request]) for place in ("digits32", tmp_path))
    assert torch.equal(ours.image, official.image)


def test_every_package_is_installed():
    root = Path(cspd.__file__).parent.parent
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    inits = [init for name in ("cspd", "mar") for init in (root / name).rglob("__init__.py")]
    code = {".".join(init.parent.relative_to(root).parts) for init in inits}
    assert code <= listed
    assert {name.split(".")[2] for name in listed - code} == set(bundled())  # cspd.checkpoints.NAME


def test_autoencoder():
    vae = load_vae(checkpoint_files("digits32")["vae"])
    images, _ = coloured_digits(128, **HELD_OUT)
    with torch.inference_mode():
        mean, logvar = vae.encode(images)
        decoded = vae.decode(mean).clamp(-1, 1)
    assert -10 * torch.log10((decoded - images).square().mean() / 4) >= 27
    spread = (mean.var() + logvar.exp().mean()).sqrt() * vae.config.scale
    assert spread == pytest.approx(1, abs=0.02)


def test_classifier():
    images, labels = coloured_digits(2000, **HELD_OUT)
    assert accuracy(load_classifier("digits"), (images + 1) / 2, labels) >= 0.98


def test_data_is_a_function_of_the_seed():
    a, labels_a = coloured_digits(20, seed=1)
    b, labels_b = coloured_digits(20, seed=1)
    c, _ = coloured_digits(20, seed=2)
    assert torch.equal(a, b) and torch.equal(labels_a, labels_b)
    assert not torch.equal(a, c)
    wanted = torch.arange(20) % 10
    assert torch.equal(coloured_digits(20, seed=1, labels=wanted)[1], wanted)
    assert a.min() >= -1 and a.max() <= 1
    with pytest.raises(ValueError):
        coloured_digits(1, seed=0, split="test")


@pytest.mark.parametrize(
    "model, num, num_sampling_steps, least",
    [
        ("target", 20, 25, 0.85),
        pytest.param("target", 100, 100, 0.85, marks=pytest.mark.slow),
        pytest.param("draft", 100, 100, 0.5, marks=pytest.mark.slow),
    ],
)
def test_samples_are_recognised(model, num, num_sampling_steps, least):
    """At K = 16; the card's numbers are over 2,000 images at K = 64."""
    files = checkpoint_files("digits32")
    engine = cspd.Engine(cspd.MARModels(load_mar(files[model]), vae=load_vae(files["vae"])), max_batch=50)
    settings = {"method": "ar", "num_iter": 16, "cfg": 3.0, "num_sampling_steps": num_sampling_steps}
    requests = [cspd.Request(label=i % 10, seed=i, **settings) for i in range(num)]
    outputs = engine.generate(requests)
    labels = torch.tensor([request.label for request in requests])
    assert accuracy(load_classifier("digits"), torch.stack([o.image for o in outputs]), labels) >= least
    assert max(o.tokens.abs().max() for o in outputs) < EXPLODED


@pytest.mark.slow
def test_images_do_not_depend_on_the_batch():
    """As for the small models, on trained ones: alone, in odd batches, and backwards."""
    settings = {"method": "ar", "num_iter": 16, "cfg": 3.0, "num_sampling_steps": 50}
    requests = [cspd.Request(label=i, seed=i, **settings) for i in range(8)]
    alone = [o.image for o in cspd.load("digits32", max_batch=1).generate(requests)]
    batched = [o.image for o in cspd.load("digits32", max_batch=7).generate(requests)]
    backwards = [o.image for o in cspd.load("digits32", max_batch=8).generate(requests[::-1])][::-1]
    for images in (batched, backwards):
        assert max((a - b).abs().max() for a, b in zip(alone, images)) < 1e-3
