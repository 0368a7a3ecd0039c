"""Drafters for `transformers` models: training sees what drafting sees; they are trained, loaded and used."""

from __future__ import annotations

import shutil

import pytest
import torch
from hf import GUIDANCE, PROMPTS, SIDE, drafter_of, hf_of, model_of, saved
from programs import run_program, shades
from safetensors.torch import load_file
from texts import check_training_and_drafting
from toys import request_of

import cspd
from cspd.checkpoints import checkpoint_files
from mar.tensors import CheckpointError

SLOW = pytest.mark.slow
ARCHITECTURES = ["emu3", *(pytest.param(name, marks=SLOW) for name in ("janus", "chameleon", "lumina_mgpt"))]
TEXTS = ["a red fox", "blue", "an old ship in green", "a quiet night", "green", "a blue ship at night"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("rounds", [(0, 4, 2), (7, 1, 3)], ids=str)
def test_training_sees_what_drafting_sees(architecture, rounds):
    """For three prompts of unequal length, beyond ends of rows."""
    target, texts, _ = hf_of(model_of(architecture))
    models = {"target": target, "text_encoder": texts, "eagle": drafter_of(target)}
    common = {"label": None, "cfg": GUIDANCE, "gamma": 3}
    asked = [request_of("eagle", prompt=text, seed=i, **common) for i, text in enumerate(PROMPTS)]
    check_training_and_drafting(models, asked, rounds)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request, tmp_path_factory):
    return saved(tmp_path_factory.mktemp("hf"), request.param)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """A function that trains a drafter for the target in a directory for two steps."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(TEXTS))

    def run(folder, **options):
        given = {"checkpoint": folder, "prompts": prompts, "steps": 2, "batch": 4, "run": tmp_path / "run"}
        given |= {"out": tmp_path / "drafter.safetensors"} | options
        return run_program("train_eagle", monkeypatch, **given)

    return run


def test_from_its_own_samples(folder, train):
    """Drafting changes no image. A drafter in the target's directory is found."""
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
    codes = train(folder, data=shades(tmp_path / "images", 6), images=7).parent / "run" / "codes"
    labels = [load_file(codes / part / "00000000.safetensors")["labels"].tolist() for part in ("train", "held-out")]
    assert labels == [[1, 2, 3, 4, 5, 1, 2], [0]]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["emu3", "janus", "chameleon", "lumina_mgpt"])
def test_in_bfloat16(architecture, train, tmp_path):
    """The drafter is trained in float32 and computes in the target's type."""
    folder = saved(tmp_path, architecture, dtype=torch.bfloat16)
    engine = cspd.load(folder, eagle=train(folder, self_samples=7), max_batch=3, device="cpu")
    own = engine.runner.models["eagle"]
    assert own.own_type == engine.runner.target.own_type == engine.runner.cache("eagle").tensor.dtype == torch.bfloat16
    outputs = engine.sample(prompts=TEXTS[:3], method="eagle", seed=3)
    assert all(((output.tokens >= 0) & (output.tokens < 16)).all() for output in outputs)
    assert sum(output.stats.backbone_calls for output in outputs) < 3 * SIDE**2


def test_bad_arguments(folder, train, tmp_path):
    with pytest.raises(ValueError, match="--size"):
        train(folder, self_samples=7, size=12)
    with pytest.raises(ValueError, match="--prompts"):
        (tmp_path / "prompts.txt").write_text("blue")
        train(folder, self_samples=7)
    with pytest.raises(CheckpointError, match="EAGLE"):
        cspd.load(folder, eagle=checkpoint_files("digits32_vq")["eagle"], device="cpu")


@pytest.mark.slow
def test_a_trained_drafter_is_accepted_more_often(folder, train, tmp_path):
    """With new prompts, and little guidance, since guidance amplifies errors."""
    own = {"codes": tmp_path / "codes", "self_samples": 300, "cfg": 1.5}
    asked = {"prompts": ["a blue fox", "an old night", "green harbour"] * 4, "cfg": own["cfg"]}
    passes = []
    for name, more in (("untrained", {}), ("trained", {"steps": 150, "batch": 32})):
        engine = cspd.load(folder, eagle=train(folder, run=tmp_path / name, **own | more), device="cpu")
        drafted = engine.sample(**asked, method="eagle", seed=7)
        passes.append(sum(output.stats.backbone_calls for output in drafted))
    assert passes[1] < 0.9 * passes[0]
