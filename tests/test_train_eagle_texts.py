"""Drafters for text-to-image targets, trained on the target's own samples and on images with captions."""

from __future__ import annotations

import pytest
import torch
from pictures import captioned
from programs import run_program, shades
from safetensors.torch import load_file, save_file
from stores import small_text_encoder, small_vq_checkpoint
from texts import PROMPTS, check_training_and_drafting, folder_of_words, text_models
from toys import request_of

import cspd
from cspd.discrete.registry import GPTS, TOKENIZERS, GPTSpec, VQDefaults
from cspd.discrete.text import TextEncoder
from mar.checkpoint import metadata_of

BY_T5 = TextEncoder._made  # replaced in most tests
SIDE = 4  # codes along a side
TEXTS = ["a red fox", "blue", "an old ship in green", "a quiet night", "green", "a blue ship at night"]


def test_training_sees_what_drafting_sees():
    asked = [request_of("eagle", label=None, prompt=text, seed=i, cfg=2.5, gamma=3) for i, text in enumerate(PROMPTS)]
    check_training_and_drafting(text_models(), asked, (0, 2, 1))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The directory of a text-to-image target with uneven distributions, its tokenizer, and an encoder of words."""
    models = text_models(length=SIDE**2)
    config, tokenizer = models["target"].config, models["tokenizer"].config
    defaults = VQDefaults(cfg=2.0, top_k=8, image_size=SIDE * tokenizer.stride)
    monkeypatch.setitem(GPTS, "toy_t2i", GPTSpec(config, "toy", defaults))
    monkeypatch.setitem(TOKENIZERS, "toy", tokenizer)
    place = tmp_path / "target"
    place.mkdir()
    for name in ("target", "tokenizer"):
        save_file(models[name].state_dict(), place / f"{name}.safetensors", metadata_of(models[name]))
    folder_of_words(place / "flan-t5-xl", monkeypatch)
    return place


@pytest.fixture
def train(folder, tmp_path, monkeypatch):
    """A function that runs the program for two steps, by default with TEXTS."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(TEXTS))

    def run(name="drafter", **options):
        given = {"checkpoint": folder, "prompts": prompts, "steps": 2, "batch": 4, "run": tmp_path / name}
        given |= {"out": tmp_path / f"{name}.safetensors"} | options
        return run_program("train_eagle", monkeypatch, **given)

    return run


def labels(tmp_path, split):
    return load_file(tmp_path / "drafter" / "codes" / split / "00000000.safetensors")["labels"].tolist()


def test_from_its_own_samples(folder, train, tmp_path):
    """Drafting changes no image. The first of six prompts is held out."""
    drafter = train(self_samples=7)
    assert labels(tmp_path, "train") == [1, 2, 3, 4, 5, 1, 2] and labels(tmp_path, "held-out") == [0]
    engine = cspd.load(folder, eagle=drafter, max_batch=3, device="cpu")
    plain, drafted = (engine.sample(prompts=TEXTS[:3], method=method, seed=3) for method in ("ar", "eagle2"))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(plain, drafted))

    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS[::-1]))
    with pytest.raises(ValueError, match="--codes"):
        train(self_samples=7)


def test_images_and_their_texts(tmp_path):
    """Captions belong to images in the order of the numbers in their names, and may have several images."""
    texts = [str(i) for i in range(6)]
    data = captioned(shades(tmp_path / "images", 12), texts, 8)
    for split in ("train", "held-out"):
        images, own = data.draw(30, 0, split, torch.arange(30) % 6)
        shade = ((images.mean((1, 2, 3)) + 1) * 127.5 / 20).round()
        assert own.tolist() == (shade % 6).int().tolist() and shade.max() > 5
    with pytest.raises(ValueError, match="--prompts"):
        captioned(tmp_path / "images", texts[:5], 8)


def test_from_images(train, tmp_path):
    train(data=shades(tmp_path / "images", 6), images=7)
    assert labels(tmp_path, "train") == [1, 2, 3, 4, 5, 1, 2] and labels(tmp_path, "held-out") == [0]


def test_bad_texts(folder, train, tmp_path, capsys):
    with pytest.raises(ValueError, match="prompt"):
        train(checkpoint=small_vq_checkpoint(), self_samples=2)
    (tmp_path / "prompts.txt").write_text("a red fox")
    with pytest.raises(ValueError, match="--prompts"):
        train(self_samples=2)
    with pytest.raises(SystemExit):
        train(self_samples=2, upright="fox")
    assert capsys.readouterr().err
    (folder / "flan-t5-xl").rename(folder / "elsewhere")
    with pytest.raises(ValueError, match="prompt"):
        train(self_samples=2)


@pytest.mark.slow
def test_a_trained_drafter_is_accepted_more_often(folder, train, tmp_path, monkeypatch):
    """With T5's features and new prompts. Its images are those of the target."""
    monkeypatch.setattr(TextEncoder, "_made", BY_T5)
    letters = "abcdefghijklmnopqrst"
    (tmp_path / "prompts.txt").write_text("\n".join(letters[i : i + 1 + i % 5] for i in range(len(letters))))
    own = {"text_encoder": small_text_encoder(), "codes": tmp_path / "codes", "self_samples": 300}
    files = {"untrained": train("untrained", **own), "trained": train("trained", **own | {"steps": 150, "batch": 32})}
    passes = {}
    for name, file in files.items():
        engine = cspd.load(folder, eagle=file, text_encoder=own["text_encoder"], device="cpu")
        drafted = engine.sample(prompts=[*letters[::-1]], method="eagle", seed=7)
        passes[name] = sum(output.stats.backbone_calls for output in drafted)
    assert passes["trained"] < 0.75 * passes["untrained"]
    for temperature in (0.0, 1.0):
        asked = {"prompts": [*letters], "temperature": temperature}
        plain = engine.sample(**asked, method="ar")
        drafted = engine.sample(**asked, method="eagle", coupling="same-image")
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(plain, drafted))
