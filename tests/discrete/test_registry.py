"""Official weights files of VQ models load as they are, however wrapped; others get an error with a way out."""

import pytest
import torch
from safetensors.torch import save_file

from cspd.discrete.registry import (
    create_eagle,
    create_gpt,
    create_tokenizer,
    defaults_of,
    gpt_spec,
    load_eagle,
    load_gpt,
    load_tokenizer,
)
from mar.checkpoint import create_mar, create_vae, load_mar, load_vae
from mar.tensors import CheckpointError

TARGET, DRAFT = "gpt_digits32", "gpt_digits32_draft"


def random_weights(model):
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(t.shape, generator=g) for name, t in model.state_dict().items()}


@pytest.fixture(scope="module")
def weights():
    return random_weights(create_gpt(DRAFT))


@pytest.mark.parametrize("wrap", ["model", "module", "state_dict", None])
def test_wrappers(wrap, weights, tmp_path):
    path = tmp_path / "c2i_B.pt"
    torch.save({wrap: weights, "steps": 3} if wrap else weights, path)
    state = load_gpt(path).state_dict()
    assert state.keys() == weights.keys() and all(torch.equal(state[name], weights[name]) for name in state)


def test_halves_and_safetensors(weights, tmp_path):
    path = tmp_path / "draft.safetensors"
    save_file({name: t.bfloat16() for name, t in weights.items()}, path)
    model = load_gpt(path, DRAFT)
    assert all(t.dtype == torch.float32 for t in model.state_dict().values())
    assert not model.training and not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name, tokens", [("c2i_B_256.pt", 128**2), ("c2i_L_384.pt", 192**2), ("c2i_3B.pt", 256)])
def test_resolution_is_in_the_name(name, tokens, weights, tmp_path):
    torch.save({"model": weights}, tmp_path / name)
    assert load_gpt(tmp_path / name).config.block_size == tokens  # of the bundled tokenizer's stride of 2


def test_published_settings():
    assert [gpt_spec(f"llamagen_{size}").defaults.cfg for size in ("b", "l", "xl", "xxl", "3b")] == [
        2.0,
        2.0,
        1.75,
        1.75,
        1.65,
    ]
    assert gpt_spec("llamagen_l").config.block_size == 256 and gpt_spec("llamagen_3b").config.block_size == 576
    assert defaults_of(gpt_spec("llamagen_3b").config).cfg == 1.65


@pytest.mark.parametrize(
    "load, create",
    [(load_tokenizer, lambda: create_tokenizer("vq_digits32")), (load_eagle, lambda: create_eagle(TARGET))],
)
def test_the_other_models(load, create, tmp_path):
    weights = random_weights(create())
    torch.save({"model": weights}, tmp_path / "weights.pt")
    state = load(tmp_path / "weights.pt").state_dict()
    assert all(torch.equal(state[name], weights[name]) for name in weights)


@pytest.mark.parametrize("load", [load_gpt, load_tokenizer, load_eagle])
def test_wrong_files(load, tmp_path):
    torch.save({"model": {"a": torch.zeros(3)}}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"weights\.pt"):
        load(tmp_path / "weights.pt")
    with pytest.raises(CheckpointError):
        load(tmp_path / "nowhere.pt")


@pytest.mark.parametrize(
    "load, create, message",
    [
        (load_mar, lambda: create_gpt(DRAFT), "GPT"),
        (load_mar, lambda: create_eagle(DRAFT), "EAGLE"),
        (load_vae, lambda: create_tokenizer("vq_digits32"), "vq_digits32"),
        (load_gpt, lambda: create_eagle(TARGET), "EAGLE"),
        (load_gpt, lambda: create_mar("mar_digits32_draft"), "mar_digits32_draft"),
        (load_tokenizer, lambda: create_vae("kl_digits32"), "kl_digits32"),
        (load_eagle, lambda: create_gpt(DRAFT), "EAGLE"),
    ],
)
def test_files_of_other_models_are_recognised(load, create, message, tmp_path):
    torch.save({"model": create().state_dict()}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "weights.pt")


def test_a_size_of_another_family():
    with pytest.raises(ValueError, match="llamagen_b"):
        load_mar("weights.pt", "llamagen_b")
    with pytest.raises(ValueError, match="mar_base"):
        load_gpt("weights.pt", "mar_base")


def test_a_gpt_of_other_classes_is_compared_with_the_nearest(weights, tmp_path):
    name = "cls_embedding.embedding_table.weight"
    torch.save({"model": weights | {name: torch.zeros(101, 160)}}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=name):
        load_gpt(tmp_path / "weights.pt")


def test_wrong_size_truncated_and_nan(weights, tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({"model": weights}, path)
    with pytest.raises(CheckpointError):
        load_gpt(path, TARGET)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError):
        load_gpt(path)
    torch.save({"model": weights | {"norm.weight": torch.full((160,), torch.nan)}}, path)
    with pytest.raises(CheckpointError, match="NaN"):
        load_gpt(path)
