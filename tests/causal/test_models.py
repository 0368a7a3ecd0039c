"""SphereAR and BitDance agree with the authors' code, in float32: backbone, head, autoencoder, whole samples."""

from __future__ import annotations

import pytest
import torch
from causals import LABELS, NAMES, STEPS, CausalGolden
from golden_files import IMAGES, drawn, relative_error

from cspd.causal.models import draw_published, guidance_scale, sample_published

GUIDANCE = {"guided": 3.0, "plain": 1.0}


@pytest.fixture(scope="module", params=NAMES)
def golden(request) -> CausalGolden:
    return CausalGolden(request.param)


@pytest.mark.parametrize("kind", GUIDANCE)
def test_conditions_after_the_authors_tokens(golden, kind):
    """With guidance the last rows are unconditional: their first token is their own, the others are the conditional."""
    tokens = golden.tokens(kind).transpose(0, 1)
    null = torch.full_like(LABELS, golden.model.config.num_classes)
    labels = torch.cat([LABELS, null]) if kind == "guided" else LABELS
    z = golden.model(labels, tokens[:, :-1])
    assert relative_error(z, golden.conditions(kind).transpose(0, 1)) < 1e-4


@pytest.mark.parametrize("kind", GUIDANCE)
def test_tokens_of_the_authors_conditions(golden, kind):
    """At token 0 the linear scale is 1, and the authors draw both branches apart."""
    model, z = golden.model, golden.conditions(kind)
    for token, expected in enumerate(golden.tokens(kind)):
        branches = 2 if kind == "guided" and token else 1
        scale = guidance_scale(GUIDANCE[kind], "linear", token, model.config.seq_len)
        by_branch = z[token].unflatten(0, (branches, -1))
        drawn = draw_published(model.head, by_branch, scale, STEPS, 1.0, golden.normals(token, by_branch.shape[1]))
        assert relative_error(model.finish(drawn).repeat(branches, 1), expected) < 1e-4


@pytest.mark.parametrize("kind", GUIDANCE)
def test_whole_samples_with_the_authors_noise(golden, kind):
    model = golden.model
    given = {"cfg": GUIDANCE[kind], "num_sampling_steps": STEPS}
    tokens = sample_published(model, LABELS, **given, normals=lambda token, shape: golden.normals(token, shape[1]))
    expected = golden.tokens(kind)[:, :2].transpose(0, 1)
    if model.config.binary:
        assert torch.equal(tokens, expected)  # no chain ends near 0
    else:  # with these random weights a rounding error about doubles from token to token
        assert relative_error(tokens[:, :5], expected[:, :5]) < 1e-4
        assert relative_error(tokens, expected) < 0.05


@pytest.mark.parametrize("kind", GUIDANCE)
def test_images_of_the_authors_tokens(golden, kind):
    latents = golden.model.unpatchify(golden.tokens(kind)[:, :2].transpose(0, 1))
    assert relative_error(golden.vae.decode(latents), golden[f"{kind}.images"]) < 1e-4
    patches = golden.model.patchify(latents)
    assert torch.equal(golden.model.unpatchify(patches), latents)


def test_the_autoencoder_encodes(golden):
    side = golden.model.config.side * golden.model.config.stride
    image = drawn(IMAGES, (1, 3, side, side))
    if golden.model.config.binary:
        assert torch.equal(golden.vae.encode(image), golden["encode.codes"])
    else:
        assert relative_error(golden.vae.moments(image), golden["encode.moments"]) < 1e-4
