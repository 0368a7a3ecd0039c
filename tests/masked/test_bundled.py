"""The bundled MAR checkpoints are as their model cards say: sizes, autoencoders, classifiers, samples."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
import torch
from digits import coloured_digits

import cspd
from cspd.checkpoints import checkpoint_files
from cspd.evaluation.metrics import SPACES, accuracy, load_classifier
from cspd.evaluation.run import EXPLODED
from cspd.models import bundled
from cspd.serving.app import about
from mar.checkpoint import SamplingDefaults, create_mar, defaults_of, load_mar, load_vae
from mar.tensors import CheckpointError

HELD_OUT = {"seed": 10**9, "split": "held-out"}
EMOJI_CLASSES = "animals,faces,flags,food and plants,hands,objects,people,places,symbols,vehicles".split(",")


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def emojis():
    """Training images that come with the reference, in -1..1."""
    with np.load(SPACES["emoji"].reference) as file:
        return torch.from_numpy(file["arr_0"]).permute(0, 3, 1, 2) / 127.5 - 1


@pytest.mark.parametrize(
    "name, target, draft, max_bytes", [("digits32", 4e6, 0.95e6, 24e6), ("emoji64", 5.07e6, 0.935e6, 30e6)]
)
def test_sizes_and_defaults(name, target, draft, max_bytes):
    files = checkpoint_files(name)
    for model, size in ((load_mar(files["target"]), target), (load_mar(files["draft"]), draft)):
        assert num_parameters(model) == pytest.approx(size, rel=0.25)
        if name == "emoji64":
            assert defaults_of(model.config) == SamplingDefaults(64, 4.0, "constant", 0.9, 1.0, 100)
    assert sum(path.stat().st_size for path in bundled()[name].iterdir() if path.is_file()) < max_bytes
    # the emojis' draft has this size too, and other defaults
    assert defaults_of(create_mar("mar_digits32_draft").config).cfg_schedule == "linear"


def test_official_names_load_from_a_folder(tmp_path):
    """The bundled weights with the official files' names and layout give the same images."""
    files = checkpoint_files("digits32")
    weights = load_mar(files["target"]).state_dict()
    other = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    official = {"model": other, "model_ema": weights, "args": argparse.Namespace(epochs=1)}
    torch.save(official, tmp_path / "checkpoint-last.pth")
    with pytest.raises(CheckpointError):
        cspd.load(tmp_path)
    torch.save({"model": load_vae(files["vae"]).state_dict()}, tmp_path / "kl16.ckpt")
    request = cspd.Request(label=3, seed=1, method="ar", num_iter=2, num_sampling_steps=5)
    (ours,), (official,) = (cspd.load(folder).generate([request]) for folder in ("digits32", tmp_path))
    assert torch.equal(ours.image, official.image)


@pytest.mark.parametrize("name, min_psnr, tolerance", [("digits32", 27, 0.02), ("emoji64", 26, 0.05)])
def test_autoencoders(name, min_psnr, tolerance):
    images = coloured_digits(128, **HELD_OUT)[0] if name == "digits32" else emojis()[::4]
    vae = load_vae(checkpoint_files(name)["vae"])
    with torch.inference_mode():
        mean, log_variance = vae.encode(images)
        decoded = vae.decode(mean).clamp(-1, 1)
    assert -10 * torch.log10((decoded - images).square().mean() / 4) >= min_psnr
    spread = (mean.var() + log_variance.exp().mean()).sqrt() * vae.config.scale
    assert spread == pytest.approx(1, abs=tolerance)
    if name == "emoji64":  # as in KL-16, all channels carry information
        nats = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean(dim=(0, 2, 3))
        assert len(nats) == 16 and nats.min() >= 0.1 * nats.mean()


def test_classifiers_and_reference():
    digits, labels = coloured_digits(2000, **HELD_OUT)
    assert accuracy(load_classifier("digits"), (digits + 1) / 2, labels) >= 0.98

    logits = load_classifier("emoji")(emojis())
    assert logits.softmax(1).max(1).values.mean() > 0.7 and logits.argmax(1).bincount(minlength=10).min() >= 10
    with np.load(SPACES["emoji"].reference) as file:
        assert file["mu"].shape == (128,) and file["sigma"].shape == (128, 128)


def test_classes_of_the_emojis():
    engine = cspd.load("emoji64", device="cpu")
    assert [engine.check(cspd.Request(name)).label for name in EMOJI_CLASSES] == list(range(10))
    (shown,) = about(engine)["models"]  # on the page of `cspd serve`
    assert shown["classes"] == EMOJI_CLASSES and (shown["image_size"], shown["side"]) == (64, 16)


DIGITS = {"cfg": 3.0, "num_sampling_steps": 100}
QUICK_EMOJIS = {"num_sampling_steps": 12, "first_timestep": 950}


@pytest.mark.parametrize(
    "name, model, num, settings, min_accuracy",
    [
        ("digits32", "target", 10, DIGITS | {"num_sampling_steps": 25}, 0.8),
        pytest.param("emoji64", "target", 10, QUICK_EMOJIS, 0.7, marks=pytest.mark.slow),
        pytest.param("digits32", "target", 100, DIGITS, 0.85, marks=pytest.mark.slow),
        pytest.param("digits32", "draft", 100, DIGITS, 0.5, marks=pytest.mark.slow),
        pytest.param("emoji64", "target", 100, {}, 0.8, marks=pytest.mark.slow),
        pytest.param("emoji64", "draft", 100, {}, 0.6, marks=pytest.mark.slow),
    ],
)
def test_samples_are_recognised(name, model, num, settings, min_accuracy):
    """At K = 16; the model cards have numbers of more images at K = 64."""
    files = checkpoint_files(name)
    engine = cspd.Engine(cspd.MARModels(load_mar(files[model]), vae=load_vae(files["vae"])), max_batch=50)
    outputs = engine.generate([cspd.Request(i % 10, seed=i, method="ar", num_iter=16, **settings) for i in range(num)])
    images = torch.stack([output.image for output in outputs])
    classifier = load_classifier("digits" if name == "digits32" else "emoji")
    assert accuracy(classifier, images, torch.arange(num) % 10) >= min_accuracy
    max_size = 8.0 if name == "digits32" else EXPLODED  # 8: as large as tokens of the data
    assert max(output.tokens.abs().max() for output in outputs) < max_size


@pytest.mark.slow
def test_images_do_not_depend_on_the_batch():
    """As for the small models: alone, in odd batches, and backwards."""
    settings = {"method": "ar", "num_iter": 16, "cfg": 3.0, "num_sampling_steps": 50}
    requests = [cspd.Request(label=i, seed=i, **settings) for i in range(8)]
    alone = cspd.load("digits32", max_batch=1).generate(requests)
    batched = cspd.load("digits32", max_batch=7).generate(requests)
    backwards = cspd.load("digits32", max_batch=8).generate(requests[::-1])[::-1]
    for outputs in (batched, backwards):
        assert max((a.image - b.image).abs().max() for a, b in zip(alone, outputs)) < 1e-3
