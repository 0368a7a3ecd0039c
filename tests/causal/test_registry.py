"""Official files of SphereAR and BitDance load by the shapes of their tensors, strictly."""

from __future__ import annotations

import pytest
import torch
from causals import NAMES, CausalGolden, named

from cspd.causal.registry import CAUSALS, create_autoencoder, create_causal, load_autoencoder, load_causal
from mar.tensors import CheckpointError

MILLIONS = {  # of parameters, in the authors' tables
    "sphere_ar_b": 208,
    "sphere_ar_l": 479,
    "sphere_ar_h": 943,
    "bitdance_b_1x": 242,
    "bitdance_b_4x": 260,
    "bitdance_b_16x": 260,
    "bitdance_l_1x": 527,
    "bitdance_h_1x": 1000,
    "s_vae": 75,
    "ae_d16c32": 460,
}


@pytest.mark.parametrize("name", MILLIONS)
def test_official_sizes_have_the_published_numbers_of_parameters(name):
    with torch.device("meta"):
        model = create_causal(name) if name in CAUSALS else create_autoencoder(name)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert millions == pytest.approx(MILLIONS[name], rel=0.03)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["ema", "model"])
def test_a_file_with_its_autoencoder_inside(name, key, tmp_path, monkeypatch):
    golden = CausalGolden(name)
    named(golden, monkeypatch)
    path = tmp_path / "official.pt"
    torch.save({key: golden.weights, "steps": 3}, path)
    model, vae = load_causal(path)
    assert model.config == golden.model.config
    for ours, theirs in ((model, golden.model), (vae, golden.vae)):
        expected = theirs.state_dict()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in ours.state_dict().items())


def test_an_autoencoder_of_its_own_with_parts_of_training(tmp_path, monkeypatch):
    golden = CausalGolden("bitdance")
    named(golden, monkeypatch)
    path = tmp_path / "ae_d16c32.pt"
    weights = {**golden.vae.state_dict(), "loss.discriminator.weight": torch.zeros(3)}
    torch.save({"state_dict": weights}, path)
    loaded = load_autoencoder(path).state_dict()
    assert all(torch.equal(tensor, loaded[key]) for key, tensor in golden.vae.state_dict().items())


def test_other_shapes_are_refused(tmp_path, monkeypatch):
    golden = CausalGolden("sphere")
    named(golden, monkeypatch)
    path = tmp_path / "official.pt"
    torch.save({"ema": golden.weights | {"norm.weight": torch.ones(65)}}, path)
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        load_causal(path)
    torch.save({"ema": golden.weights | {"vae.encoder.norm.weight": torch.ones(65)}}, path)
    with pytest.raises(CheckpointError, match=r"encoder\.norm\.weight"):
        load_causal(path)
