"""Checkpoints by name, in folders and on the hub, and an engine in a notebook."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import huggingface_hub
import pytest
import torch
from PIL import Image
from stores import small_checkpoint, small_vq_checkpoint
from toys import request_of, runner_of, toy_mar, toy_models

import cspd
from cspd import Engine, MARModels, Request, VQModels
from cspd import checkpoints as cspd_checkpoints
from cspd import device as cspd_device
from cspd.checkpoints import checkpoint_files, family_of, fetched
from cspd.discrete.gpt import GPT, Eagle, GPTConfig, VQConfig, VQModel
from cspd.files import WEIGHTS, check_files, weight_files
from cspd.models import ClassNames, described, imagenet, modules_of
from cspd.origin import OTHER_WEIGHTS, identity_of
from cspd.request import Sequence
from mar.model import MAR, MARConfig
from mar.tensors import CheckpointError, printable, read_tensors
from mar.vae import AutoencoderKL, KLConfig


@pytest.mark.parametrize("name, hint", [("digits32vq", "digits32_vq"), ("Digits32", "digits32"), ("a\0b", "digits32")])
def test_an_unknown_name(name, hint):
    with pytest.raises(CheckpointError, match=hint) as caught:
        checkpoint_files(name)
    assert str(caught.value).startswith(f"{printable(name)}: no checkpoint there")


@pytest.mark.parametrize("names", [("target.safetensors", "checkpoint-last.pth"), ("c2i_B_256.pt", "c2i_L_256.pt")])
def test_a_folder_with_two_targets(names, tmp_path):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError):
        checkpoint_files(tmp_path)
    assert checkpoint_files(tmp_path / names[0])["target"] == tmp_path / names[0]


def test_other_files_do_not_hide_the_target(tmp_path):
    """A tokenizer in MAR's folder, and a folder with a name like a GPT's file."""
    folder = tmp_path / "c2i_and_others"
    folder.mkdir()
    for name in ("checkpoint-last.pth", "vq_ds16_c2i.pt", "kl16.ckpt"):
        (folder / name).touch()
    files = checkpoint_files(folder)
    assert files["target"].name == "checkpoint-last.pth" and files["vae"].name == "kl16.ckpt"


def test_the_autoencoder_of_the_other_family():
    with pytest.raises(CheckpointError, match="vq_digits32"):
        cspd.load(small_checkpoint(), vae=checkpoint_files("digits32_vq")["tokenizer"], device="cpu")
    with pytest.raises(CheckpointError, match="kl_digits32"):
        cspd.load(small_vq_checkpoint(), vae=checkpoint_files("digits32")["vae"], device="cpu")


def test_weights_that_do_not_fit_into_memory_are_not_read(monkeypatch):
    """Names and shapes give their size, which is printed if it is large."""
    files = checkpoint_files(small_checkpoint())
    needed = 4 * sum(tensor.numel() for name in ("target", "vae") for tensor in read_tensors(files[name]).values())
    monkeypatch.setattr(cspd_checkpoints, "free_bytes", lambda device: needed - 1)
    with pytest.raises(ValueError, match=r"target\.safetensors"):
        cspd.load(small_checkpoint(), device="cpu")
    monkeypatch.setattr(cspd_checkpoints, "free_bytes", lambda device: needed)
    cpu = torch.device("cpu")
    assert cspd_checkpoints._room_for(files, cpu) == ""
    monkeypatch.setattr(cspd_device, "LARGE", needed)
    monkeypatch.setattr(cspd_device, "free_bytes", lambda device: needed)
    assert cspd_checkpoints._room_for(files, cpu) == ", which takes 0.0 GiB of 0.0 GiB free"


# ---- Folders of transformers models: their files, and what makes them other models


PARTS = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]


@pytest.mark.parametrize(
    "names, weights",
    [
        (["model.safetensors", "model-00001-of-00001.safetensors", "eagle.safetensors"], ["model.safetensors"]),
        ([*PARTS, "pytorch_model.bin"], PARTS),
        (["pytorch_model.bin", "eagle.safetensors"], ["pytorch_model.bin"]),
        (["eagle.safetensors"], []),
    ],
)
def test_the_weights_of_a_folder(names, weights, tmp_path):
    """One file or parts, not both, as transformers reads them. A drafter is not among them."""
    for name in names:
        (tmp_path / name).touch()
    assert [file.name for file in weight_files(tmp_path)] == weights


def test_a_missing_file_is_named(tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        check_files(tmp_path, {"configuration": ("config.json",), "weights": WEIGHTS}, "a toy", "fetch it")


def test_hidden_files_copies_and_other_formats_do_not_change_a_folders_identity(tmp_path):
    folder, copy = tmp_path / "folder", tmp_path / "copy"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(name)
    before = identity_of(folder)
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)  # at another time
    (copy / ".DS_Store").touch()
    with (copy / "flax_model.msgpack").open("wb") as file:
        file.truncate(OTHER_WEIGHTS)
    assert identity_of(copy) == before
    for name in ("tokenizer.json", "model.safetensors"):
        (copy / name).write_text("another one...")
        assert identity_of(copy) != before
        before = identity_of(copy)


# ---- In a notebook: names of classes, images, short reprs, closed engines, saved models


QUICK = {"method": "ar", "num_iter": 1, "num_sampling_steps": 2, "first_timestep": 950}
OF_VQ = {"method": "ar"}
NAMES = ClassNames(["red, crimson", "green: as grass", "light blue, blue", "blue"])


@pytest.fixture(scope="module")
def engine():
    return cspd.load(small_checkpoint(), max_batch=2, device="cpu")


@pytest.fixture
def toy():
    return Engine(MARModels(toy_mar(), classes=NAMES), max_batch=2, device="cpu")


def test_imagenets_names():
    names = imagenet()
    assert len(names.texts) == 1000 and names.name_of(207) == "golden retriever"
    assert [names.number_of(name) for name in ("Golden_Retriever", "golden-retriever", "tank suit")] == [207, 207, 639]
    shown = [names.name_of(label).lower() for label in range(1000)]
    assert {name for name in shown if shown.count(name) > 1} == {"crane", "maillot", "cardigan"}
    assert all(names.number_of(name) == label for label, name in enumerate(shown) if shown.count(name) == 1)


@pytest.mark.parametrize("name", ["crane", "golden retreiver", "qqqq"])
def test_a_name_of_several_classes_or_of_no_class(name):
    with pytest.raises(ValueError, match="label"):
        imagenet().number_of(name)


def test_the_shown_name_of_a_class_is_its_own():
    assert NAMES.number_of("blue") == 3 and NAMES.number_of("light blue") == 2 and NAMES.number_of("Crimson") == 0


def test_a_request_names_its_class(toy):
    assert toy.check(Request("green", **QUICK)).label == 1
    by_name, by_number = toy.sample(["light blue", 2], seed=5, **QUICK)
    assert by_name.request.but(seed=6) == by_number.request and by_name.class_name == "light blue"
    for engine, labels in ((toy, ["red", "gren"]), (Engine(MARModels(toy_mar()), device="cpu"), "red")):
        with pytest.raises(ValueError, match="label"):
            engine.sample(labels, **QUICK)


def test_two_families_name_their_own_classes(tmp_path):
    others = VQModels(toy_models()["target"], classes=ClassNames(["green", "grey", "red"]))
    engine = Engine(MARModels(toy_mar(), classes=NAMES), others, device="cpu")
    assert [engine.check(Request("red", family=family)).label for family in ("MAR", "VQ")] == [0, 2]
    with pytest.raises(ValueError):
        engine.save_pretrained(tmp_path / "own")


@pytest.mark.parametrize(
    "labels",
    [[1, 3], torch.tensor([1, 3]), (label for label in (1, 3)), ["green", 3]],
    ids=["list", "tensor", "generator", "names"],
)
def test_sample_takes_one_label_or_many(labels, toy):
    outputs = toy.sample(labels, seed=7, **QUICK)
    assert [(output.request.label, output.request.seed) for output in outputs] == [(1, 7), (3, 8)]
    fractions = []
    again = toy.sample(1, seed=7, on_progress=lambda request, fraction, _: fractions.append(fraction), **QUICK)
    assert torch.equal(again.tokens, outputs[0].tokens) and fractions == [1]


def test_seeds_and_numbers_of_images(toy):
    def asked(*labels, **more):
        return [(output.request.label, output.request.seed) for output in toy.sample(*labels, **QUICK, **more)]

    assert asked(3, seed=[1, 2]) == [(3, 1), (3, 2)] == asked(3, seed=torch.tensor([1, 2]))
    assert asked([3, 1], seed=[9, 2]) == [(3, 9), (1, 2)]
    assert asked(3, num=4, seed=5) == [(3, 5), (3, 6), (3, 7), (3, 8)]
    assert asked(["green", 0], num=3) == [(1, 0), (0, 1), (1, 2)]
    assert asked([3, 1], num=3, seed=[4, 4, 5]) == [(3, 4), (1, 4), (3, 5)]
    assert asked([3], num=1) == asked([3]) == asked(3, num=1) == [(3, 0)]
    assert asked([]) == []
    for name, wrong in (("num", {"num": 0}), ("seed", {"num": 3, "seed": [1, 2]}), ("seed", {"seed": [1, -2]})):
        with pytest.raises(ValueError, match=name):
            asked(3, **wrong)
    with pytest.raises(ValueError, match="seed"):
        asked([3, 1], seed=[1, 2, 3])
    with pytest.raises(ValueError, match="num"):
        asked([], num=2)


def test_a_single_image_that_is_cancelled(toy):
    assert (
        toy.sample(1, on_progress=lambda request, fraction, _: toy.cancel(request), **QUICK | {"num_iter": 4}) is None
    )


@pytest.mark.parametrize(
    "name, ours", [("guidance_scale", "cfg"), ("num_inference_steps", "num_iter"), ("steps", "num_sampling_steps")]
)
def test_a_name_of_another_library_is_answered_with_ours(name, ours, toy):
    with pytest.raises(TypeError, match=rf"{name}.*\b{ours}\b"):
        toy.sample(1, **{name: 4})


def test_classes_of_an_engine(toy, engine):
    assert (
        toy.classes == [toy.name_of(toy.checked(Request(label, family="MAR"))) for label in range(4)]
        and toy.classes[1] == "green"
    )
    assert engine.classes == [str(label) for label in range(10)]


def test_tokens_are_decoded(engine, toy):
    outputs = engine.sample([3, 1], **QUICK)
    tokens = [output.tokens for output in outputs]
    images = torch.stack([output.image for output in outputs])
    for batch in (tokens, torch.stack(tokens), torch.stack(tokens).numpy()):
        assert torch.equal(engine.decode(batch), images)
    assert torch.equal(engine.decode(tokens[1]), images[1])
    vq = cspd.load(small_vq_checkpoint(), device="cpu")
    output = vq.sample(3, method="ar")
    assert torch.equal(vq.decode(output.tokens), output.image)
    for each, wrong in (
        (vq, tokens[0]),
        (engine, output.tokens),
        (engine, tokens[0][:3]),
        (toy, toy.sample(1, **QUICK).tokens),
    ):
        with pytest.raises(ValueError):
            each.decode(wrong)


def test_a_grid_of_outputs(engine):
    outputs = engine.sample(3, num=3, **QUICK)
    assert cspd.grid(outputs).width > cspd.grid(outputs, columns=1).width
    assert cspd.grid(outputs[0]).width < cspd.grid(outputs).width
    with pytest.raises(ValueError):
        cspd.grid([])


@pytest.mark.parametrize("backbone", ["full", "cached"])
def test_no_class_is_mars_fake_latent(backbone):
    """The image is that of a class with this latent, without guidance."""
    target = toy_mar()
    sizes = target.config
    other = MAR(sizes)
    other.load_state_dict(target.state_dict())
    with torch.no_grad():
        other.class_emb.weight[2] = target.fake_latent[0]
    settings = {"method": "ddim", "num_iter": 3, "head_calls": 3, "first_timestep": 950, "backbone": backbone}
    own = Engine(MARModels(target), device="cpu").sample(None, seed=1, **settings)
    same = Engine(MARModels(other), device="cpu").sample(2, seed=1, cfg=1.0, **settings)
    assert own.request.label is None and own.request.cfg == 1
    assert torch.equal(own.tokens, same.tokens)


def test_no_class_is_llamagens_last_class():
    models = toy_models()
    runner = runner_of({"target": models["target"]}, 1)
    with torch.inference_mode():
        runner.admit([Sequence(request_of("ar", label=None, cfg=1.0), slot=0)])
    assert torch.equal(runner.conditions.last["target"][0], models["target"].cls_embedding.embedding_table.weight[-1])
    outputs = Engine(VQModels(models["target"]), device="cpu").sample([None, 1], cfg=1.0, **OF_VQ)
    assert outputs[0].class_name == "no class" and (outputs[0].tokens >= 0).all()


def test_no_class_is_not_guided(toy):
    with pytest.raises(ValueError, match="cfg"):
        toy.check(Request(None, cfg=3.0, **QUICK))


def test_an_output_is_an_image(engine, toy, tmp_path):
    output = engine.sample(3, **QUICK)
    picture = output.pil()
    output.save(tmp_path / "three.png")
    assert Image.open(tmp_path / "three.png").tobytes() == picture.tobytes()
    assert Image.open(io.BytesIO(output._repr_png_())).tobytes() == picture.tobytes()
    without = toy.sample(3, **QUICK)
    assert without._repr_png_() is None
    with pytest.raises(ValueError):
        without.pil()


def test_reprs_are_short(engine, toy):
    assert repr(engine) == "<Engine, MAR 32x32 pixels; 2 slots, cpu, fp32>"
    assert repr(toy.sample("green", **QUICK)).startswith("<Output: green, seed 0, ar, exact, ")
    assert repr(engine.sample(3, **QUICK)).endswith(" s; 32x32 pixels>")
    broken = dataclasses.replace(toy.sample("green", **QUICK), error="no number is finite")
    assert repr(broken) == "<Output: 'no number is finite'>"
    assert repr(Request("green", cfg=2.0)) == "Request(label='green', seed=0, cfg=2.0)"


def test_a_closed_engine_is_refused():
    request = Request(1, **QUICK)
    with Engine(MARModels(toy_mar()), max_batch=1, device="cpu") as engine:
        streams = []
        for _ in range(2):  # with a request in flight, and with unread ones
            streams.append(engine.stream([Request(1, seed=seed, **QUICK) for seed in range(5)]))
            next(streams[-1])
    assert repr(engine) == "<Engine, closed>"
    for use in (
        lambda: engine.sample(1),
        lambda: engine.check(request),
        lambda: engine.add_request(request),
        engine.step,
        engine.__enter__,
        lambda: engine.runner,
        lambda: list(streams[0]),
        lambda: next(streams[1]),
        lambda: engine.with_slots(2),
    ):
        with pytest.raises(RuntimeError):
            use()
    engine.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family's models. The VQ model is for small images, of 16 tokens."""
    vq = shutil.copytree(small_vq_checkpoint(), tmp_path_factory.mktemp("vq") / "own")
    (vq / "cspd.json").write_text(json.dumps({"num_tokens": 16, "classes": list("abcdefghij")}))
    return {"MAR": small_checkpoint(), "VQ": vq}


@pytest.mark.parametrize("family, settings", [("MAR", QUICK), ("VQ", OF_VQ)])
def test_saved_models_are_loaded_back(family, settings, folders, tmp_path):
    engine = cspd.load(folders[family], max_batch=1, device="cpu")
    engine.save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError):
        engine.save_pretrained(tmp_path / "own")
    again = cspd.load(tmp_path / "own", max_batch=1, device="cpu")
    assert again.runner.seq_len == engine.runner.seq_len  # the weights of a VQ model do not give it
    first, second = (each.sample(2, seed=4, **settings) for each in (engine, again))
    assert torch.equal(first.image, second.image)
    assert first.class_name == second.class_name == {"MAR": "2", "VQ": "c"}[family]


def test_models_without_a_named_size_are_loaded_back(tmp_path):
    """Also what no tensor shows: heads, the autoencoder's scale, and the number of tokens."""
    torch.manual_seed(0)
    mar = MAR(MARConfig(img_size=16, vae_stride=2, vae_embed_dim=4, embed_dim=32, depth=1, num_heads=8, class_num=3))
    vae = AutoencoderKL(KLConfig(embed_dim=4, ch=32, ch_mult=(1, 1), num_res_blocks=1, attention=False, scale=0.3))
    gpt = GPT(GPTConfig(dim=16, n_layer=1, n_head=4, vocab_size=24, block_size=16, num_classes=5, multiple_of=8))
    vq = VQModel(VQConfig(ch=32, ch_mult=(1, 1), z_channels=32, codebook_size=24, num_res_blocks=1, attention=False))
    models = {"mar": MARModels(mar, vae=vae), "gpt": VQModels(gpt, eagle=Eagle(gpt.config), tokenizer=vq)}
    for name, own in models.items():
        Engine(own, device="cpu").save_pretrained(tmp_path / name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is assumed
            again = cspd.load(tmp_path / name, max_batch=1, device="cpu")._models[0]
        for part, module in modules_of(own).items():
            assert modules_of(again)[part].config == module.config


def test_a_description_is_utf8_in_every_locale(tmp_path):
    """With and without the mark at its beginning."""
    for name, mark in (("with", "\ufeff"), ("without", "")):
        (tmp_path / name).mkdir()
        content = mark + json.dumps({"classes": ["gelée", "狐"]}, ensure_ascii=False)
        (tmp_path / name / "cspd.json").write_bytes(content.encode())
    code = """
import sys
from pathlib import Path
from cspd.models import described
for folder in map(Path, sys.argv[1:]):
    print(ascii(described(folder).classes.texts))
"""
    locale = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, tmp_path / "with", tmp_path / "without"]
    made = subprocess.run(command, env=locale, capture_output=True, text=True)
    assert made.stdout.splitlines() == [ascii(("gelée", "狐"))] * 2


@pytest.mark.parametrize(
    "content, told",
    [
        ({"class": ["a"]}, "class"),
        ({"sizes": {"autoencoder": {"scale": 1.0}}}, "autoencoder"),
        ({"sizes": {"vae": {"factor": 1.0}}}, "factor"),
        ({"sizes": {"target": {"num_heads": 5}}}, "num_heads"),
        ({"sizes": [1]}, "sizes"),
        ({"num_tokens": 16}, "block_size"),  # of a MAR
        ({"classes": ["a\x1b[2J", *"bcdefghij"]}, "control"),
        ({"classes": ["a"]}, "1 names for 10 classes"),
    ],
)
def test_a_bad_description(content, told, tmp_path):
    folder = shutil.copytree(small_checkpoint(), tmp_path / "own")
    (folder / "cspd.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=told) as caught:
        cspd.load(folder, device="cpu")
    assert "\x1b" not in str(caught.value)


def test_a_description_sets_sizes(tmp_path):
    folder = shutil.copytree(small_checkpoint(), tmp_path / "own")
    (folder / "cspd.json").write_text(json.dumps({"sizes": {"vae": {"scale": 0.5}, "target": {"num_heads": 2}}}))
    models = cspd.load(folder, device="cpu")._models[0]
    assert (models.vae.config.scale, models.target.config.num_heads) == (0.5, 2)
    # each part's sizes stand beside its own file
    other = shutil.copytree(small_checkpoint(), tmp_path / "other")
    (other / "cspd.json").unlink(missing_ok=True)
    for target, vae, scale in ((other, folder, 0.5), (folder, other, 1.0)):
        (vae_file,) = vae.glob("vae*.safetensors")
        loaded = cspd.load(target, vae=vae_file, device="cpu")._models[0].vae
        assert loaded.config.scale == pytest.approx(scale, rel=0.5) and (loaded.config.scale == 0.5) == (scale == 0.5)


@pytest.mark.parametrize(
    "source, part, family",
    [("digits32_vq", "draft", "VQ"), ("emoji64_sphere", "target", "causal"), ("digits32", "draft", "MAR")],
)
@pytest.mark.parametrize("name", ["last.pt", "0250000.pt", "c2i_B_256.pt", "SphereAR_B.pt", "checkpoint-last.pth"])
def test_families_are_told_apart_by_tensors_not_by_names(source, part, family, name, tmp_path):
    torch.save({"model": read_tensors(checkpoint_files(source)[part]), "steps": 3}, tmp_path / name)
    assert family_of(tmp_path / name) == family
    files = checkpoint_files(tmp_path / name)
    assert ("tokenizer" in files) == (family == "VQ")


def test_without_a_description_1000_classes_are_imagenets(tmp_path):
    assert described(tmp_path).names(1000) is imagenet() and not described(tmp_path).names(10).texts
    (tmp_path / "cspd.json").write_text('{"sizes": {"vae": {"scale": 0.5}}}')
    assert described(tmp_path).names(1000) is imagenet()
    (tmp_path / "cspd.json").write_text('{"classes": []}')
    assert not described(tmp_path).names(1000).texts


# ---- Checkpoints on the Hugging Face Hub


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A function that lays files out like the cache of the hub's client, offline."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    fetched.cache_clear()

    def add(repo, files):
        folder, commit = tmp_path / f"models--{repo.replace('/', '--')}", "0123456789" * 4
        for name in ("blobs", "refs", f"snapshots/{commit}"):
            (folder / name).mkdir(parents=True)
        (folder / "refs" / "main").write_text(commit)
        for number, (name, source) in enumerate(files.items()):
            link = folder / "snapshots" / commit / name
            link.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / "blobs" / f"b{number}")
            link.symlink_to(os.path.relpath(folder / "blobs" / f"b{number}", link.parent))
        return folder / "snapshots" / commit

    return add


@pytest.mark.parametrize("family, inside", [("MAR", "sub/"), ("VQ", "")])
def test_a_name_on_the_hub(family, inside, cached, folders):
    folder = folders[family]
    snapshot = cached("org/name", {f"{inside}{path.name}": path for path in Path(folder).iterdir() if path.is_file()})
    name = f"org/name/{inside}".rstrip("/")
    assert checkpoint_files(name)["target"] == snapshot / inside / "target.safetensors"
    own, other = (cspd.load(each, max_batch=1, device="cpu") for each in (name, folder))
    settings = QUICK if family == "MAR" else OF_VQ
    assert torch.equal(own.sample(1, **settings).image, other.sample(1, **settings).image)
    if family == "MAR":  # calibrations are cached elsewhere
        own.sample(1, method="speculative", window=2, num_iter=1, num_sampling_steps=25, cfg=1.0)
    assert not list(snapshot.rglob("calibration"))


def test_a_target_is_fetched_with_its_companions(monkeypatch, tmp_path):
    listed = ["README.md", "vae.safetensors", "sub/target.safetensors", "sub/vae.safetensors", "sub/other.bin"]
    asked = []

    def download(repo, allow_patterns, local_files_only):
        asked.append((repo, allow_patterns, local_files_only))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repo: listed)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    patterns = ("target.safetensors", "c2i_*.pt"), ("vae.safetensors", "draft.safetensors")
    assert fetched("org/fetched/sub", *patterns) == tmp_path / "sub" / "target.safetensors"
    assert asked == [("org/fetched", ["sub/target.safetensors", "sub/vae.safetensors"], False)]
    with pytest.raises(CheckpointError, match="org/fetched"):
        fetched("org/fetched", *patterns)


def test_a_hub_repository_with_several_targets(cached, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    files = ("c2i_B_256.pt", "c2i_L_256.pt", "vq_ds16_c2i.pt", "README.md")
    snapshot = cached("org/llamagen", dict.fromkeys(files, tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"org/llamagen/c2i_B_256\.pt"):
        checkpoint_files("org/llamagen")
    found = checkpoint_files("org/llamagen/c2i_L_256.pt")
    assert found["target"] == snapshot / "c2i_L_256.pt" and found["tokenizer"].name == "vq_ds16_c2i.pt"


def test_a_name_that_the_hub_does_not_have(cached, tmp_path, monkeypatch):
    cached("org/other", {"README.md": small_checkpoint() + "/vae.safetensors"})
    for name in ("org/none", "org/other"):
        with pytest.raises(CheckpointError, match=name):
            cspd.load(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()  # so this is a mistyped path, and no name on the hub
    with pytest.raises(CheckpointError, match="org/none"):
        cspd.load("org/none")
