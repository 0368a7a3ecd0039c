"""Training of SphereAR: its posterior, its loss, its programs; and the authors' loop that ours is timed against."""

from __future__ import annotations

import numpy as np
import pytest
import spherical
import torch
from causals import LABELS, STEPS, CausalGolden
from programs import class_images, run_program
from scipy import stats
from sphere_loop import compiled_parts, sample
from torch import nn
from torch.nn import functional as F
from train_sphere import head_loss

import cspd
from cspd.causal.models import sample_published

DRAWS = 20_000


def cosine_density(dim: int, concentration: float) -> tuple[np.ndarray, np.ndarray]:
    """Points -1..1, and the density of mean . x there, normalised numerically."""
    cosine = np.linspace(-1, 1, 200_001)
    density = (1 + cosine) ** concentration * (1 - cosine**2) ** ((dim - 3) / 2)
    return cosine, density / np.trapezoid(density, cosine)


@pytest.mark.parametrize("dim, concentration", [(3, 2.5), (5, 0.4), (16, 90.0)])
def test_the_posterior_of_a_cell(dim, concentration):
    """Its angle to the mean, its direction across it, and its divergence from the uniform distribution."""
    generator = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q
    mean = basis[0].expand(DRAWS, -1)
    drawn = spherical.draw(mean, torch.full((DRAWS,), concentration), seed=0)
    along, first, second = (drawn @ basis[:3].T).double().unbind(1)

    cosine, density = cosine_density(dim, concentration)
    cumulative = np.cumsum(density) * (cosine[1] - cosine[0])
    pvalues = [stats.kstest(along.numpy(), lambda x: np.interp(x, cosine, cumulative)).pvalue]
    if dim == 3:  # across the mean there is a circle
        angle = torch.atan2(second, first) / (2 * torch.pi) + 0.5
        pvalues.append(stats.kstest(angle.numpy(), "uniform").pvalue)
    assert min(pvalues) > 0.001
    torch.testing.assert_close(drawn.norm(dim=1), torch.ones(DRAWS))

    _, uniform = cosine_density(dim, 0.0)
    inside = density > 0
    terms = density[inside] * np.log(density[inside] / uniform[inside])
    expected = np.trapezoid(terms, cosine[inside])
    assert spherical.nats(torch.tensor(concentration), dim).item() == pytest.approx(expected, abs=2e-3)


def test_a_draw_has_derivatives():
    """Of the mean and the concentration, also at the pole, which the reflection keeps."""
    mean = F.normalize(torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0]]), dim=-1).requires_grad_()
    concentration = torch.tensor([50.0, 500.0], requires_grad=True)
    drawn = spherical.draw(mean, concentration, seed=0)
    (drawn[:, 0].sum() + spherical.nats(concentration, 3).sum()).backward()
    assert mean.grad.isfinite().all() and concentration.grad.isfinite().all()
    assert (drawn * mean).sum(-1).min() > 0.8


class Exact(nn.Module):
    """The velocity towards the token z, which is the only one."""

    def forward(self, x, t, z):
        return (z - x) / (1 - t.unsqueeze(1))


def test_the_loss_of_an_exact_head_is_0():
    tokens = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    assert head_loss(Exact(), tokens, tokens, torch.Generator().manual_seed(1)) < 1e-6
    assert head_loss(Exact(), tokens, tokens.flip(0), torch.Generator().manual_seed(1)) > 0.1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="training takes torch 2.9, as setup.cfg says")
def test_the_programs(tmp_path, monkeypatch):
    """Two steps of each; the files are a checkpoint."""
    data = class_images(tmp_path / "images", 10, 2)
    given = {"data": data, "size": 64, "steps": 2, "batch": 4}

    def run(program, file, **options):
        return run_program(program, monkeypatch, **given, run=tmp_path / program, out=tmp_path / file, **options)

    vae = run("train_vae", "vae.safetensors", arch="s_vae_emoji64")
    run("train_sphere", "target.safetensors", vae=vae, images=20, draws=1)
    with cspd.load(tmp_path, device="cpu", max_batch=1) as engine:
        output = engine.sample(3, method="ar", num_sampling_steps=2)
    assert output.image.shape == (3, 64, 64) and output.image.isfinite().all()


@pytest.mark.parametrize("binary", [False, True], ids=["sphere", "bitdance"])
def test_the_authors_loop(binary, monkeypatch):
    """Without noise it gives the first tokens of the authors' sampler; rounding grows tenfold with each."""
    monkeypatch.setattr(torch, "randn", lambda *shape: torch.full(shape, 0.3))
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    model = CausalGolden("bitdance" if binary else "sphere").model
    theirs = sample(compiled_parts(False), model, LABELS, 3.0, "linear", STEPS)

    def normals(token, shape):
        noise = torch.zeros(shape)
        noise[0] = 0.3
        return noise

    ours = sample_published(model, LABELS, cfg=3.0, num_sampling_steps=STEPS, normals=normals)
    torch.testing.assert_close(theirs[:, :3], ours[:, :3], atol=1e-3, rtol=0)
