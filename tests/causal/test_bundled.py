"""The bundled SphereAR is as its model card says: sizes, autoencoder, samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cspd
from cspd.causal.registry import CausalDefaults, defaults_of, load_autoencoder, load_causal
from cspd.checkpoints import checkpoint_files
from cspd.evaluation.metrics import SPACES, accuracy, load_classifier, space_of
from cspd.models import bundled

NAME = "emoji64_sphere"


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_sizes_and_defaults():
    files = checkpoint_files(NAME)
    model, inside = load_causal(files["target"])
    vae = load_autoencoder(files["vae"])
    assert inside is None and space_of(files["target"]) == "emoji"
    assert num_parameters(model) == 1_977_488 and num_parameters(vae) == 1_390_225
    assert defaults_of(model.config) == CausalDefaults(4.0, "constant", 0.9, 100)
    assert sum(path.stat().st_size for path in bundled()[NAME].iterdir() if path.is_file()) < 7e6


def test_the_autoencoder():
    with np.load(SPACES["emoji"].reference) as file:
        images = torch.from_numpy(file["arr_0"][::8]).permute(0, 3, 1, 2) / 127.5 - 1
    vae = load_autoencoder(checkpoint_files(NAME)["vae"])
    with torch.inference_mode():
        latents = vae.encode(images)
        decoded = vae.decode(latents).clamp(-1, 1)
    torch.testing.assert_close(latents.norm(dim=1), torch.full((len(images), 8, 8), 4.0))
    assert -10 * torch.log10((decoded - images).square().mean() / 4) >= 23


@pytest.mark.slow
def test_samples_are_recognised():
    with cspd.load(NAME, max_batch=50, device="cpu") as engine:
        outputs = engine.generate([cspd.Request(i % 10, seed=i, method="calibrated") for i in range(50)])
    images = torch.stack([output.image for output in outputs])
    assert accuracy(load_classifier("emoji"), images, torch.arange(50) % 10) >= 0.8
