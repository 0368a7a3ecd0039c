"""The autoencoder is the authors': golden posterior and golden image."""

import pytest
from conftest import relative_error


def test_golden_posterior(small_vae, vae_golden):
    mean, logvar = small_vae.encode(vae_golden["image"])
    assert relative_error(mean, vae_golden["posterior.mean"]) < 1e-5
    assert relative_error(logvar, vae_golden["posterior.logvar"]) < 1e-5


def test_golden_image(small_vae, vae_golden):
    assert relative_error(small_vae.decode(vae_golden["latent"]), vae_golden["decoded"]) < 1e-5


@pytest.mark.parametrize("bias, limit", [(100.0, 20.0), (-100.0, -30.0)])
def test_log_variance_is_clamped(bias, limit, small_vae, vae_golden, monkeypatch):
    channels = small_vae.config.embed_dim
    shifted = small_vae.quant_conv.bias.clone()
    shifted[channels:] += bias
    monkeypatch.setattr(small_vae.quant_conv.bias, "data", shifted)
    mean, logvar = small_vae.encode(vae_golden["image"])
    assert (logvar == limit).all()
    assert relative_error(mean, vae_golden["posterior.mean"]) < 1e-5
