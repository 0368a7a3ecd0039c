"""Drafters for models of transformers: training sees what drafting sees, where rows end too; trained, loaded, used."""

from __future__ import annotations

import shutil

import pytest
import torch
from conditions import inputs_of
from hf import GUIDANCE, PROMPTS, SIDE, drafter_of, hf_of, model_of, saved
from programs import run_program, shades
from safetensors.torch import load_file
from texts import check_fed_alike, running
from toys import request_of
from train_eagle import predict

import cspd
from cspd.checkpoints import checkpoint_files
from cspd.discrete.batch import by_slot
from cspd.discrete.drafts import _eagle_root
from mar.tensors import CheckpointError

SLOW = pytest.mark.slow
ARCHITECTURES = ["emu3", *(pytest.param(name, marks=SLOW) for name in ("janus", "chameleon", "lumina_mgpt"))]
TEXTS = ["a red fox", "blue", "an old ship in green", "a quiet night", "green", "a blue ship at night"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("rounds", [(0, 4, 2), (7, 1, 3)], ids=str)
def test_training_sees_what_drafting_sees(architecture, rounds):
    """Of three texts of unequal length and what guides them, each sequence as far as it is, beyond ends of rows."""
    target, texts, _ = hf_of(model_of(architecture))
    models = {"target": target, "text_encoder": texts, "eagle": drafter_of(target)}
    common = {"label": None, "cfg": GUIDANCE, "gamma": 3}
    asked = [request_of("eagle", prompt=text, seed=i, **common) for i, text in enumerate(PROMPTS)]
    runner, started = running(models, asked, rounds)
    length = SIDE**2 - 1
    with torch.inference_mode():
        batch = runner.batch_of(by_slot(started))
        root = _eagle_root(runner, batch, 3)[:, :, 0]
        last = runner.features(batch, runner.last(batch, 1)[0])[:, :, 0]
        kept = runner.past.before(batch, torch.arange(1, length + 1).expand(3, -1))

        slots = torch.tensor([sequence.slot for sequence in started])
        codes = runner.tokens[slots, :length].repeat(2, 1)
        is_null = torch.arange(6) >= 3
        inputs = inputs_of(runner, PROMPTS, torch.arange(3).repeat(2), is_null, codes)
        made = predict(target, models["eagle"], inputs, 0.0, torch.Generator())
    predicted, features = (each.unflatten(0, (2, 3)) for each in made)
    assert max(sequence.num_committed for sequence in started) > SIDE
    check_fed_alike(started, (predicted, features), last, root, kept)


def folder_of(architecture, root, dtype=torch.float32):
    name = f"Lumina-mGPT-7B-{2 * SIDE}" if architecture == "lumina_mgpt" else architecture
    return saved(root / name, architecture, dtype=dtype)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request, tmp_path_factory):
    return folder_of(request.param, tmp_path_factory.mktemp("hosted"))


@pytest.fixture
def train(tmp_path, monkeypatch):
    """A function that runs the program for two steps on a target's folder."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(TEXTS))

    def run(folder, **options):
        given = {"checkpoint": folder, "prompts": prompts, "steps": 2, "batch": 4, "run": tmp_path / "run"}
        given |= {"out": tmp_path / "drafter.safetensors"} | options
        return run_program("train_eagle", monkeypatch, **given)

    return run


def test_from_its_own_samples(folder, train):
    """What the drafter drafts changes no image, whether it is given or lies in the folder."""
    drafter = train(folder, self_samples=7)
    images = {}
    for method, files in (("ar", {}), ("eagle2", {"eagle": drafter})):
        engine = cspd.load(folder, **files, max_batch=3, device="cpu")
        images[method] = engine.sample(prompts=TEXTS[:3], method=method, seed=5)
    assert all(torch.equal(plain.tokens, drafted.tokens) for plain, drafted in zip(*images.values()))
    own = checkpoint_files(shutil.copytree(folder, drafter.parent / folder.name))
    assert own["eagle"] is None
    beside = shutil.copy(drafter, own["target"].parent / "eagle.safetensors")
    assert checkpoint_files(own["target"].parent)["eagle"] == beside
    loaded = cspd.load(beside.parent, max_batch=1, device="cpu").runner.models["eagle"]
    assert torch.equal(loaded.fc.weight, engine.runner.models["eagle"].fc.weight)


@pytest.mark.slow
def test_from_images(folder, train, tmp_path):
    """Where pixels can be encoded, which Chameleon's cannot without its decoder's file."""
    own = {"data": shades(tmp_path / "images", 6), "images": 7}
    if folder.name in ("janus", "emu3"):
        codes = train(folder, **own).parent / "run" / "codes"
        labels = [load_file(codes / part / "00000000.safetensors")["labels"].tolist() for part in ("train", "held-out")]
        assert labels == [[1, 2, 3, 4, 5, 1, 2], [0]]
    else:
        with pytest.raises(ValueError, match="--tokenizer"):
            train(folder, **own)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["emu3", "janus", "chameleon", "lumina_mgpt"])
def test_in_bfloat16(architecture, train, tmp_path):
    """Of weights as the hub has them, the drafter is trained in float32 and computes in the target's type."""
    folder = folder_of(architecture, tmp_path, torch.bfloat16)
    engine = cspd.load(folder, eagle=train(folder, self_samples=7), max_batch=3, device="cpu")
    own = engine.runner.models["eagle"]
    assert own.own_type == engine.runner.target.own_type == engine.runner.cache("eagle").tensor.dtype == torch.bfloat16
    outputs = engine.sample(prompts=TEXTS[:3], method="eagle", seed=3)
    assert all(((output.tokens >= 0) & (output.tokens < 16)).all() for output in outputs)
    assert sum(output.stats.backbone_calls for output in outputs) < 3 * SIDE**2


def test_what_does_not_fit(folder, train, tmp_path):
    with pytest.raises(ValueError, match="--size"):
        train(folder, self_samples=7, size=12)
    with pytest.raises(ValueError, match="--prompts"):
        (tmp_path / "prompts.txt").write_text("blue")
        train(folder, self_samples=7)
    with pytest.raises(CheckpointError, match="EAGLE"):
        cspd.load(folder, eagle=checkpoint_files("digits32_vq")["eagle"], device="cpu")


@pytest.mark.slow
def test_a_trained_drafter_is_accepted_more_often(folder, train, tmp_path):
    """Of texts that it was not trained on, by little guidance, which multiplies errors."""
    own = {"codes": tmp_path / "codes", "self_samples": 300, "cfg": 1.5}
    asked = {"prompts": ["a blue fox", "an old night", "green harbour"] * 4, "cfg": own["cfg"]}
    forwards = []
    for name, more in (("untrained", {}), ("trained", {"steps": 150, "batch": 32})):
        engine = cspd.load(folder, eagle=train(folder, run=tmp_path / name, **own | more), device="cpu")
        drafted = engine.sample(**asked, method="eagle", seed=7)
        forwards.append(sum(output.stats.backbone_calls for output in drafted))
    assert forwards[1] < 0.9 * forwards[0]
