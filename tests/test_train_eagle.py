"""Drafters for a target that is not bundled, trained on its own samples or on images; their acceptance and costs."""

from __future__ import annotations

import functools
import itertools
import json

import codes
import pytest
import torch
import train_eagle
import training
from codes import Codes, cached
from conditions import inputs_of
from drafted import acceptance_by_depth, estimates, parameters
from programs import class_images, run_program
from safetensors.torch import load_file, save_file
from stores import small_vq_checkpoint
from texts import PROMPTS, text_models
from toys import CLASSES, CPU, runner_of, toy_models

import cspd
from cspd.checkpoints import checkpoint_files
from cspd.cli import main
from cspd.discrete.gpt import Eagle, GPTConfig, VQConfig
from cspd.discrete.registry import (
    GPTS,
    TOKENIZERS,
    GPTSpec,
    VQDefaults,
    create_gpt,
    create_tokenizer,
)
from mar.checkpoint import metadata_of

SIZES = {"dim": 16, "n_layer": 2, "n_head": 2, "vocab_size": 24, "num_classes": 10, "multiple_of": 8}
TOKENIZER = VQConfig(ch=32, ch_mult=(1, 1), z_channels=32, codebook_size=24, num_res_blocks=1, attention=False)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The directory of a target for images of 8x8 pixels, 4x4 tokens."""
    folder = tmp_path_factory.mktemp("target")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(GPTS, "tiny", GPTSpec(GPTConfig(block_size=16, **SIZES), "tiny", VQDefaults(image_size=8)))
        patch.setitem(TOKENIZERS, "tiny", TOKENIZER)
        torch.manual_seed(0)
        save_new(folder)
        yield folder


def save_new(folder):
    """Saves a target and a tokenizer with new random weights."""
    for name, create in (("target", create_gpt), ("tokenizer", create_tokenizer)):
        model = create("tiny")
        save_file(model.state_dict(), folder / f"{name}.safetensors", metadata_of(model))


@pytest.fixture
def train(target, tmp_path, monkeypatch):
    """A function that trains a drafter for a few steps, and returns its file."""

    def run(name, **options):
        out = tmp_path / f"{name}.safetensors"
        given = {"checkpoint": target, "steps": 4, "batch": 4, "run": tmp_path / name, "out": out} | options
        return run_program("train_eagle", monkeypatch, **given)

    return run


def test_from_its_own_samples(target, train, tmp_path, capsys):
    """Drafting changes no image."""
    whole = train("whole", self_samples=20)
    assert capsys.readouterr().out
    last = json.loads((tmp_path / "whole" / "log.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 4 and all(0 < last[f"depth {depth}"] < 1 for depth in range(1, 7))
    engine = cspd.load(target, eagle=whole, max_batch=4, device="cpu")
    plain, drafted = (
        engine.generate([cspd.Request(label, label, method) for label in range(4)]) for method in ("ar", "eagle2")
    )
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(plain, drafted))
    assert sum(output.stats.backbone_calls for output in drafted) < 4 * 16
    command = ["sample", "--checkpoint", target, "--eagle", whole, "--method", "eagle2", "--labels", 0]
    assert main([*map(str, command), "--out", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "samples.json").read_text())["settings"]["eagle"]["file"] == whole.name


def test_codes_of_another_target_are_refused(train, tmp_path):
    """Even of a target with the same name and size."""
    save_new(tmp_path)
    train("drafter", self_samples=4, codes=tmp_path / "codes")
    with pytest.raises(ValueError, match="--codes"):
        train("another", checkpoint=tmp_path, self_samples=4, codes=tmp_path / "codes")


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_drafter(train, monkeypatch):
    whole, loss_of, calls = train("whole", self_samples=20), train_eagle.loss_of, itertools.count()

    def cut_off(*args):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return loss_of(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training, "SAVE_SECONDS", 0)
        patch.setattr(train_eagle, "loss_of", cut_off)
        train("cut", self_samples=20)
    cut = load_file(train("cut", self_samples=20))
    assert all(torch.equal(cut[name], tensor) for name, tensor in load_file(whole).items())


@pytest.mark.slow
def test_from_images(train, tmp_path):
    images = {"data": class_images(tmp_path / "images", 10, 2), "images": 20, "codes": tmp_path / "codes"}
    train("drafter", **images)
    parts = [load_file(tmp_path / "codes" / part / "00000000.safetensors") for part in ("train", "held-out")]
    assert [part["codes"].shape for part in parts] == [(20, 16), (2, 16)]
    assert torch.bincount(parts[0]["labels"]).tolist() == [2] * 10

    save_new(tmp_path)
    with pytest.raises(ValueError, match="--codes"):
        train("another", tokenizer=tmp_path / "tokenizer.safetensors", **images)
    with pytest.raises(ValueError):  # the target has ten classes
        train("more", data=class_images(tmp_path / "more images", 11, 2), images=20)


def test_not_a_target(train, capsys):
    with pytest.raises(ValueError, match="digits32"):
        train("mar", checkpoint="digits32", self_samples=20)
    with pytest.raises(SystemExit):
        train("neither")
    assert "--self-samples" in capsys.readouterr().err


def test_incompatible_drafters(target):
    with pytest.raises(ValueError, match="EAGLE"):
        cspd.load(small_vq_checkpoint(), eagle=checkpoint_files("digits32_vq")["eagle"], device="cpu")
    with pytest.raises(ValueError, match="digits32"):
        cspd.load("digits32", eagle=target, device="cpu")


def test_codes_are_computed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(codes, "PART", 4)
    made = []

    def make(numbers):
        made.append(numbers)
        number = torch.tensor([*numbers])
        return Codes(number.repeat(2, 1).T.contiguous(), number)

    def labels(num, **made_with):
        made.clear()
        return cached(make, num, tmp_path, made_with, CPU).labels.tolist()

    assert labels(10, cfg=1.0) == [*range(10)] and len(made) == 3
    (tmp_path / "00000004.safetensors").unlink()
    assert labels(12, cfg=1.0) == [*range(12)] and made == [range(4, 8), range(8, 12)]
    assert labels(4, cfg=1.0) == [*range(4)] and not made
    with pytest.raises(ValueError, match="--codes"):
        labels(4, cfg=2.0)


def one_by_one(target, drafter, both, own, sampling, depths):
    """(accepted, verified) [2, depths] for an image's tokens [L], one draft chain after the other, guided.

    `both`: the condition and the unconditional branch.
    """
    sums = torch.zeros(2, depths)
    inputs = target.embed(both, own[:-1].expand(2, -1))
    first = inputs.shape[1] - len(own)
    position = (torch.arange(inputs.shape[1]) - first).clamp(min=0).unsqueeze(0)
    features = target.features(inputs, position)

    def distribution(feature):
        conditional, null = target.output(feature)
        logits = null + sampling.cfg * (conditional - null)
        least = logits.sort().values[-sampling.top_k]
        return logits.masked_fill(logits < least, -torch.inf).softmax(-1)

    for start in range(len(own)):
        past, weight = torch.cat([torch.zeros_like(features[:, :1]), features[:, : first + start]], 1), 1.0
        for ahead in range(min(depths, len(own) - start)):
            count = first + start + ahead + 1
            made = drafter(past, inputs[:, :count], target.table(position[:, :count]))[:, -1:]
            p, q = distribution(features[:, count - 1]), distribution(made[:, 0])
            sums[:, ahead] += weight * torch.stack([torch.minimum(p, q).sum(), torch.tensor(1.0)])
            code = own[start + ahead]
            weight = weight * min(1.0, (q[code] / p[code]).item()) if p[code] else 0.0
            past = torch.cat([past, made], 1)
    return sums


@pytest.mark.parametrize("subjects", [range(CLASSES), PROMPTS], ids=["classes", "prompts"])
def test_acceptance_by_depth_is_that_of_chains_one_by_one(subjects):
    of_texts = subjects is PROMPTS
    runner = runner_of(text_models() if of_texts else toy_models(codes=11, length=9), 1)
    drafter = runner.models["eagle"]
    depths = 4
    sampling = VQDefaults(cfg=1.7, top_k=6 if of_texts else 0)
    data = Codes(torch.randint(11, (6, 9), generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3)

    def both(number):
        if not of_texts:
            return torch.tensor([number, CLASSES])
        own = runner.text_of(PROMPTS[number])
        return torch.stack([own, runner.target.cls_embedding.uncond_embedding[-len(own) :]])

    with torch.inference_mode():
        sums = sum(one_by_one(runner.target, drafter, both(label), own, sampling, depths) for own, label in zip(*data))
    expected = (sums[0] / sums[1]).tolist()
    take_in = functools.partial(inputs_of, runner, subjects)
    found = acceptance_by_depth(runner.target, drafter, data, take_in, sampling, depths)
    assert found == pytest.approx(expected, rel=1e-4)
    assert max(expected) - min(expected) > 0.01


def test_estimates():
    """The estimates for LlamaGen-L, and the parameters that they count: all but norms and biases."""
    row = estimates(steps=20000, batch=16, samples=10000, max_batch=32).splitlines()[2].split()
    assert row[:2] == ["llamagen_l", "256"] and 2 < float(row[3]) < 10 and 0.1 < float(row[7]) < 10
    for name in ("gpt_digits32", "llamagen_xl_t2i"):
        with torch.device("meta"):
            models = create_gpt(name), Eagle(GPTS[name].config)
        actual = [sum(p.numel() for p in model.parameters()) for model in models]
        assert parameters(GPTS[name].config) == pytest.approx(actual, rel=2e-3)
