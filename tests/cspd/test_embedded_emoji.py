"""The embedded emojis are what their model card says: sizes, autoencoder, samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cspd
from cspd.evaluation.classifier import SPACES, accuracy, load_classifier, space_of
from cspd.loading import checkpoint_files, embedded
from mar.checkpoint import load_mar, load_vae

EXPLODED = 20.0  # the data reach 8; guidance goes beyond it


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_sizes():
    files = checkpoint_files("emoji64")
    target, draft = (parameters(load_mar(files[name])) for name in ("target", "draft"))
    assert 5e6 <= target <= 12e6 and 0.15 <= draft / target <= 0.25
    assert sum(path.stat().st_size for path in embedded()["emoji64"].iterdir() if path.is_file()) < 30e6
    assert space_of("emoji64") == "emoji"


def test_all_channels_of_the_autoencoder_carry_something():
    """As of KL-16, and unlike the digits'; on images of the training data that come with the reference."""
    vae = load_vae(checkpoint_files("emoji64")["vae"])
    with np.load(SPACES["emoji"].reference) as file:
        images = torch.from_numpy(file["arr_0"]).permute(0, 3, 1, 2) / 127.5 - 1
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
        ("target", 20, {"num_sampling_steps": 25, "first_timestep": 950}, 0.6),
        pytest.param("target", 100, {}, 0.75, marks=pytest.mark.slow),
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
