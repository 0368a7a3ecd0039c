"""Files of weights: which ones are read, and how others are refused."""

import argparse
import contextlib
import dataclasses
import json
import os
import pickle
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from weights import DRAFT, TARGET, VAE, draft_weights, file_writer, random_weights, refusal  # noqa: F401 - fixtures

from mar.checkpoint import (
    MARS,
    VAES,
    _heads_of,
    create_mar,
    create_vae,
    defaults_of,
    load_mar,
    load_vae,
    mar_spec,
    metadata_of,
)
from mar.model import MAR, MARConfig
from mar.tensors import Assumed, CheckpointError

NAME = "decoder_blocks.1.mlp.fc2.weight"


@pytest.fixture(scope="module")
def vae_weights():
    return random_weights(create_vae(VAE), 1)


def assert_loaded(model, expected):
    state = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(t.dtype == torch.float32 and torch.equal(t, expected[name].float()) for name, t in state.items())
    assert not model.training and not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("zipped", [True, False])
def test_official_file_holds_two_sets(zipped, save, weights):
    plain = random_weights(create_mar(DRAFT), 2)
    content = {"model": plain, "model_ema": weights, "epoch": 400, "args": argparse.Namespace(lr=1e-4, model=DRAFT)}
    path = save("checkpoint-last.pth", content, _use_new_zipfile_serialization=zipped)
    assert_loaded(load_mar(path), weights)
    assert_loaded(load_mar(str(path), arch=DRAFT, ema=False), plain)


@pytest.mark.parametrize("other", [{}, {"model_ema": {}}, {"model_ema": None, 3: "three"}])
def test_a_single_set(other, save, weights):
    path = save("weights.pth", other | {"model": weights})
    for ema in (True, False):
        assert_loaded(load_mar(path, ema=ema), weights)


def test_autoencoder_file(save, vae_weights):
    vae = load_vae(save("kl16.ckpt", {"model": vae_weights}))
    assert_loaded(vae, vae_weights)
    assert vae.config == VAES[VAE]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_safetensors_load_as_float32(dtype, save, weights):
    stored = {name: t.to(dtype) for name, t in weights.items()}
    assert_loaded(load_mar(save("target.safetensors", stored, {"arch": DRAFT})), stored)


WRAPPED = [
    "module.{}",
    "module._orig_mod.{}",
    "_orig_mod.module.{}",
    "_fsdp_wrapped_module.{}",
    "module.module._orig_mod.{}",
]


@pytest.mark.parametrize("form", WRAPPED)
def test_wrappers_of_a_model_are_dropped(form, save, weights):
    assert_loaded(
        load_mar(save("weights.pth", {"model": {form.format(name): t for name, t in weights.items()}})), weights
    )


def test_wrappers_of_blocks_and_counters_are_dropped(save, weights):
    """Blocks that were compiled or sharded one by one, and the counter of torch's average."""
    inside = {
        name.replace("blocks.1.", "blocks.1._orig_mod.").replace("mlp.", "mlp.module."): weights[name]
        for name in weights
    }
    assert inside.keys() != weights.keys()
    path = save(
        "weights.safetensors", {f"module.{name}": t for name, t in inside.items()} | {"n_averaged": torch.ones(())}
    )
    assert_loaded(load_mar(path), weights)


AVERAGES = {
    "state_dict_ema": lambda own: own,
    "ema_state_dict": lambda own: own,
    "ema_model": lambda own: {f"module.{name}": t for name, t in own.items()} | {"n_averaged": torch.ones(())},
    "ema": lambda own: {"decay": 0.999, "shadow": own},
    "model_EMA": lambda own: {"module": own, "step": 3},
    "ema_weights": lambda own: {"num_updates": 3, "shadow_params": list(own.values()), "collected_params": None},
    "ema_params": lambda own: {"state_dict": own},
    "ema_of_copies": lambda own: (
        {f"ema_model.{name}": t for name, t in own.items()} | {f"online_model.{name}": t * 2 for name, t in own.items()}
    ),
}


@pytest.mark.parametrize("key", AVERAGES)
def test_averaged_weights_under_other_keys(key, save, weights):
    """Those are sampled with, and reported unless the key is an official one."""
    raw = {name: t + 1 for name, t in weights.items()}
    path = save(
        "weights.pth",
        {"model": raw, "optimizer": {"state": {0: {"step": torch.ones(())}}}, key: AVERAGES[key](weights)},
    )
    with contextlib.nullcontext() if key == "ema" else pytest.warns(Assumed, match=key):
        assert_loaded(load_mar(path), weights)
    assert_loaded(load_mar(path, ema=False), raw)


def test_an_average_of_the_trained_weights_only(save, weights):
    raw = {name: t + 1 for name, t in weights.items()}
    path = save("weights.pth", {"model": raw, "model_ema": {NAME: weights[NAME]}})
    assert_loaded(load_mar(path), raw | {NAME: weights[NAME]})


@pytest.mark.parametrize(
    "sets, told",
    [
        ({"ema_0.99": True, "ema_0.9999": True}, "ema_0.9999"),
        ({"ema": {"shadow_params": [torch.ones(3)]}}, "ema"),
        ({"ema": {"another.weight": torch.ones(3)}}, "another.weight"),
    ],
)
def test_averages_that_cannot_be_used(sets, told, save, weights):
    content = {key: weights if value is True else value for key, value in sets.items()}
    assert told in refusal(load_mar, save("weights.pth", {"model": weights} | content))


@pytest.mark.parametrize("key", ["semantic_encoder", "optimizer_ema"])
def test_other_parts_whose_keys_have_the_letters_are_no_averages(key, save, weights):
    path = save("weights.pth", {"model": weights, key: {"lr": torch.ones(3)}})
    assert_loaded(load_mar(path), weights)


def test_a_file_that_holds_itself(save, weights):
    content = {"model": weights, "ema": {}}
    content["ema"]["module"] = content["ema"]
    assert_loaded(load_mar(save("weights.pth", content)), weights)


def test_an_adapter_is_not_a_model(save, weights):
    adapter = {"base_model.model.z_proj.lora_A.weight": torch.ones(2, 2)}
    assert "merge" in refusal(load_mar, save("weights.safetensors", weights | adapter))


def packed(path):
    """A copy of an archive with compressed members."""
    copy = path.with_name(f"packed-{path.name}")
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copy, "w", zipfile.ZIP_DEFLATED) as smaller:
        for member in archive.infolist():
            smaller.writestr(member.filename, archive.read(member))
    return copy


def test_a_compressed_archive(save, weights, monkeypatch):
    """One that would unpack to far more than its size is refused before it is read."""
    assert_loaded(load_mar(packed(save("weights.pth", {"model": weights}))), weights)
    bomb = packed(save("bomb.pth", {"model": {NAME: torch.zeros(10**6)}}))
    monkeypatch.setattr(torch, "load", lambda *args, **how: pytest.fail("read"))
    assert "4,000" in refusal(load_mar, bomb)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1, 1, 96, device="meta"),
        torch.ones(()).expand(1, 1, 96),
        torch.ones(1, 1, 96, dtype=torch.complex64),
        torch.ones(1, 1, 96).to(torch.float8_e5m2),
    ],
    ids=["meta", "expanded", "complex", "float8"],
)
def test_odd_tensors(tensor, save, weights):
    assert "mask_token" in refusal(load_mar, save("weights.pth", {"model": weights | {"mask_token": tensor}}))


def test_names_in_a_file_cannot_command_the_terminal(save, weights):
    message = refusal(load_mar, save("weights.pth", {"model": weights | {"a\x1b[2Jb\u202e": torch.ones(1)}}))
    assert "a\\x1b[2Jb\\u202e" in message


def test_losses_of_training_are_left_out(save, vae_weights):
    losses = {"loss.logvar": torch.zeros(()), "loss.discriminator.main.0.weight": torch.zeros(4, 3, 4, 4)}
    assert_loaded(load_vae(save("model.ckpt", {"state_dict": vae_weights | losses})), vae_weights)


# ---- Sizes that no tensor shows


@pytest.fixture
def own(monkeypatch):
    """A function that adds names of sizes as a plugin does: those of DRAFT, with other numbers of heads."""

    def add(**heads):
        spec = mar_spec(DRAFT)
        for name, count in heads.items():
            monkeypatch.setitem(
                MARS, name, dataclasses.replace(spec, config=dataclasses.replace(spec.config, num_heads=count))
            )

    return add


def heads_of(path, **how):
    return load_mar(path, **how).config.num_heads


def test_a_plugins_size_of_equal_shapes(save, weights, own):
    path = save("weights.pth", {"model": weights})
    usual = heads_of(path)
    own(mine=8)
    assert (usual, heads_of(path), heads_of(path, arch=DRAFT), heads_of(path, sizes={"num_heads": 2})) == (4, 8, 4, 2)
    own(other=12)
    assert "--arch" in refusal(load_mar, path)
    assert heads_of(path, arch="other") == 12
    named = save("named.pth", {"model": weights, "args": argparse.Namespace(model=DRAFT)})
    with pytest.warns(Assumed, match="mine"):
        assert heads_of(named) == 4


def test_heads_in_the_arguments_of_the_training_script(save, weights):
    for args, heads in (({"num_heads": 8}, 8), ({"num_heads": None}, 4), ({"num_heads": None, "vae_stride": 2}, 4)):
        path = save("weights.pth", {"model": weights, "args": argparse.Namespace(model=DRAFT, **args)})
        assert heads_of(path) == heads


def test_an_autoencoders_scale(save, vae_weights, monkeypatch):
    path = save("vae.safetensors", vae_weights)
    assert load_vae(path, sizes={"scale": 0.5}).config == dataclasses.replace(VAES[VAE], scale=0.5)
    monkeypatch.setitem(VAES, "mine", dataclasses.replace(VAES[VAE], scale=2.0))
    assert load_vae(path).config.scale == 2.0


@pytest.mark.parametrize(
    "sizes", [{"heads": 4}, {"num_heads": 5}, {"num_heads": "4"}, {"num_heads": 0}, {"depth": 10**6}]
)
def test_sizes_that_are_none(sizes, save, weights):
    refusal(load_mar, save("weights.pth", {"model": weights}), sizes=sizes)


SMALL = MARConfig(
    img_size=32, vae_stride=8, embed_dim=128, depth=2, num_heads=2, class_num=3, diffloss_w=64, diffloss_d=1
)
UNNAMED = {
    "three classes": dataclasses.replace(mar_spec(DRAFT).config, class_num=3),
    "another width": SMALL,
    "another head": dataclasses.replace(mar_spec(DRAFT).config, diffloss_w=96, diffloss_d=3),
    "other latents": dataclasses.replace(SMALL, vae_embed_dim=4, patch_size=2, vae_stride=4, buffer_size=16),
}


@pytest.mark.parametrize("config", UNNAMED.values(), ids=UNNAMED)
def test_a_size_without_a_name_as_main_mar_writes_it(config, save):
    """Its `args` have the number of heads by the name of a size, or in a flag of the user."""
    expected = random_weights(MAR(config), 3)
    args = dataclasses.asdict(config) | {"model": "mar_mine", "lr": 1e-4}
    model = load_mar(save("checkpoint-last.pth", {"model_ema": expected, "args": argparse.Namespace(**args)}))
    assert_loaded(model, expected)
    assert model.config == config
    assert load_mar(save("own.safetensors", expected, metadata_of(MAR(config)))).config == config


@pytest.mark.parametrize("width, heads", [(128, 2), (160, 2), (96, None)])
def test_the_usual_number_of_heads_is_assumed(width, heads, save):
    config = dataclasses.replace(SMALL, embed_dim=width, depth=1)
    expected = {name: torch.zeros(t.shape).half() for name, t in MAR(config).state_dict().items()}
    path = save("weights.safetensors", expected)
    if heads is None:
        assert "num_heads" in refusal(load_mar, path)
    else:
        with pytest.warns(Assumed, match=f"{heads} are assumed"):
            assert heads_of(path) == heads
    assert heads_of(path, sizes={"num_heads": 1}) == 1


def test_the_widest_models_have_heads_of_80_channels():
    with pytest.warns(Assumed, match="16 are assumed"):
        assert _heads_of(dataclasses.replace(SMALL, embed_dim=1280), {}, Path("checkpoint-last.pth")) == 16


@pytest.mark.parametrize(
    "sizes", [{"depth": 10**7}, {"depth": 2.5}, {"num_heads": 7}, {"img_size": -1}, {"embed_dim": [1]}, {"of": 1}, 3]
)
def test_an_absurd_configuration_in_a_file(sizes, save):
    """It is left out, or refused in words."""
    stated = dataclasses.asdict(SMALL) | sizes if isinstance(sizes, dict) else sizes
    path = save("target.safetensors", random_weights(MAR(SMALL), 3), {"config": json.dumps(stated)})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert dataclasses.replace(load_mar(path).config, vae_stride=8, img_size=32) == SMALL
    except CheckpointError as error:
        assert "num_heads" in str(error)


@pytest.mark.parametrize("img_size, patch", [(96, 1), (64, 2), (16, 1)])
def test_resolution_is_found(img_size, patch, save):
    """As the authors' training script changes it with --img_size and --patch_size."""
    config = dataclasses.replace(mar_spec(DRAFT).config, img_size=img_size, patch_size=patch)
    expected = random_weights(MAR(config), 3)
    model = load_mar(save("weights.pth", {"model": expected}))
    assert_loaded(model, expected)
    assert model.config == config and defaults_of(config) == defaults_of(mar_spec(DRAFT).config)


@pytest.mark.parametrize("shift", range(0, 64, 8))
def test_weights_are_aligned_wherever_they_are_in_a_file(shift, save, weights):
    """Otherwise the same weights in another file could round to another image."""
    model = load_mar(save("weights.safetensors", weights, {"padding": " " * shift}))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in model.state_dict().values())


def test_size_is_found(save):
    expected = random_weights(create_mar(TARGET), 3)
    path = save("weights.pth", {"model": expected})
    assert_loaded(load_mar(path), expected)
    assert TARGET in refusal(load_mar, path, DRAFT)
    for name in ("mar_tiny", "mar_bas"):
        with pytest.raises(ValueError, match=name):
            load_mar(path, name)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"mask_token": torch.zeros(1, 1, 7)}, "mask_token"),
        ({f"extra.{i}": torch.zeros(1) for i in range(9)}, "extra.0"),
        ({"mask_token": None}, "mask_token"),
    ],
)
def test_wrong_tensors(changes, problem, save, weights):
    changed = {name: t for name, t in (weights | changes).items() if t is not None}
    path = save("weights.pth", {"model": changed})
    for arch in (DRAFT, None):
        message = refusal(load_mar, path, arch)
        assert DRAFT in message and problem in message


def test_another_model(save, weights, vae_weights):
    for load, tensors, name, advice in (
        (load_mar, vae_weights, VAE, "--vae"),
        (load_vae, weights, DRAFT, "checkpoint"),
    ):
        message = refusal(load, save("weights.safetensors", tensors))
        assert name in message and advice in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (-1, -1)])
def test_values_that_are_not_finite(place, value, save, weights):
    damaged = weights | {NAME: weights[NAME].clone()}
    damaged[NAME][place] = value
    assert NAME in refusal(load_mar, save("weights.safetensors", damaged))


@pytest.mark.parametrize("name", ["absent.pth", ".", "pipe"])
def test_no_file(name, tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    assert "docs/checkpoints.md" in refusal(load_vae, tmp_path / name)


@pytest.mark.parametrize("name", ["weights.pth", "legacy.pth", "weights.safetensors"])
def test_truncated_file(name, save, weights):
    content = weights if name.endswith("safetensors") else {"model": weights}
    whole = save(name, content, _use_new_zipfile_serialization=name != "legacy.pth").read_bytes()
    for size in (0, 1, 97, 1940, len(whole) // 3, len(whole) - 1):
        message = refusal(load_mar, save(name, whole[:size]))
        assert f"{size:,}" in message


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
@pytest.mark.parametrize(
    "content, told",
    [
        (b"<!DOCTYPE html>\n<html>", "<!DOCTYPE html>"),
        (b"access denied", "access denied"),
        (b"\0" * 99, ""),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n", "git lfs pull"),
    ],
)
def test_file_of_another_kind(name, content, told, save):
    assert told in refusal(load_mar, save(name, content))


class WritesFile:
    """Pickles to a call that creates a file when it is unpickled carelessly."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["weights.pth", "legacy.pth", "weights.safetensors"])
@pytest.mark.parametrize("wrap", [dict, argparse.Namespace])
def test_code_in_a_pickle_does_not_run(wrap, name, save, weights, tmp_path):
    trap = tmp_path / "trap"
    pickle.loads(pickle.dumps(WritesFile(trap))).close()
    trap.unlink()  # so the trap works
    content = {"model": weights, "args": wrap(output=WritesFile(trap))}
    refusal(load_mar, save(name, content if name == "weights.pth" else pickle.dumps(content, 2)))
    assert not trap.exists()
