"""The tokenizer is LlamaGen's: golden codes, vectors, images and shapes."""

import json

import pytest
import torch
from conftest import GOLDEN, relative_error

from cspd.discrete import registry
from cspd.discrete.registry import load_tokenizer

SHAPES = json.loads((GOLDEN / "shapes_vq.json").read_text())
RECORD = "quantize.codebook_used"


def test_golden_codes(small_vq, vq_golden):
    codes = small_vq.encode(vq_golden["image"])
    assert torch.equal(codes, vq_golden["encoded_indices"].reshape(codes.shape))
    assert relative_error(small_vq.lookup(codes), vq_golden["quantized"]) < 1e-5


def test_golden_image(small_vq, vq_golden):
    assert relative_error(small_vq.decode(vq_golden["codes"]), vq_golden["decoded"]) < 1e-5


def test_official_shapes():
    with torch.device("meta"):
        model = registry.create_tokenizer("vq16")
    own = {key: list(t.shape) for key, t in model.state_dict().items()}
    assert own | {RECORD: [65536]} == SHAPES["vq16"] and RECORD not in own
    assert model.config.stride == 16


def test_official_files_have_a_record_of_training(tmp_path):
    """Nothing is computed with it: a file loads with it and without."""
    weights = registry.create_tokenizer("vq_digits32").state_dict()
    for name, more in (("with", {RECORD: torch.zeros(65536)}), ("without", {})):
        torch.save({"model": weights | more}, tmp_path / f"{name}.pt")
        loaded = load_tokenizer(tmp_path / f"{name}.pt").state_dict()
        assert loaded.keys() == weights.keys() and all(torch.equal(loaded[key], weights[key]) for key in weights)


def test_codebook_is_on_the_sphere(small_vq):
    assert torch.allclose(small_vq.codebook.norm(dim=-1), torch.ones(small_vq.config.codebook_size))


@pytest.mark.parametrize("create", [registry.create_gpt, registry.create_tokenizer, registry.create_eagle])
def test_unknown_names(create):
    with pytest.raises(ValueError):
        create("nope")
