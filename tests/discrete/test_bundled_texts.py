"""The bundled text-to-image models agree with their card: files, images that show their prompts, drafts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from captions import held_out_names, read_list

import cspd
from cspd.checkpoints import checkpoint_files
from cspd.cli import main, options
from cspd.discrete.registry import VQDefaults, defaults_of, load_gpt, load_tokenizer
from cspd.evaluation.metrics import SPACES, load_classifier
from cspd.models import bundled

FOLDER = bundled()["emoji64_text"]
ENTRIES = read_list(FOLDER / "prompts.json")


@pytest.fixture(scope="module")
def engine():
    return cspd.load("emoji64_text", max_batch=25, device="cpu")


def test_files_and_defaults():
    files = checkpoint_files("emoji64_text")
    assert {name for name, file in files.items() if file} == {"target", "draft", "tokenizer", "text_encoder"}
    for name, size in (("target", 1_369_728), ("draft", 184_640)):
        model = load_gpt(files[name])
        assert sum(p.numel() for p in model.parameters()) == size
        assert defaults_of(model.config) == VQDefaults(cfg=4.5, temperature=0.85, image_size=64)
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 8e6


def test_the_list_of_captions():
    assert len(ENTRIES) == len({entry["prompt"] for entry in ENTRIES}) == 200
    assert len(held_out_names(ENTRIES)) == 100 and {entry["label"] for entry in ENTRIES} <= {*range(10)}


def test_tokenizer():
    tokenizer = load_tokenizer(checkpoint_files("emoji64_text")["tokenizer"])
    with np.load(SPACES["emoji"].reference) as file:
        images = torch.from_numpy(file["arr_0"][:60]).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.inference_mode():
        error = (tokenizer.decode(tokenizer.encode(images)).clamp(-1, 1) - images).square().mean()
    assert -10 * torch.log10(error / 4) > 24


def test_images_have_the_colour_of_their_prompts(engine):
    """Where they are not white, red things are redder than blue things of the same seed."""
    seeds, things = 3, ("heart", "circle", "square")

    def redness(colour):
        texts = [f"{colour} {thing}" for thing in things for _ in range(seeds)]
        images = torch.stack([o.image for o in engine.sample(prompts=texts, seed=0, method="ar")])
        painted = (images.amin(dim=1) < 0.7).float()
        return ((images[:, 0] - images[:, 2]) * painted).mean(dim=(1, 2))

    assert (redness("red") > redness("blue")).sum() >= 8  # of 9


@pytest.mark.slow
@pytest.mark.parametrize("num, least", [(200, 0.65)])
def test_samples_are_recognised(num, least, engine):
    """As the class of their captions' emojis, half of which were held out, and more often than by chance."""
    asked = ENTRIES[:num]
    outputs = engine.sample(prompts=[entry["prompt"] for entry in asked], seed=0, method="ar")
    logits = load_classifier("emoji")(torch.stack([o.image for o in outputs]) * 2 - 1)
    predicted, labels = logits.argmax(1), torch.tensor([entry["label"] for entry in asked])
    by_chance = (predicted.bincount(minlength=10) * labels.bincount(minlength=10)).sum() / num**2
    recognised = (predicted == labels).float().mean()
    assert recognised >= least and recognised >= by_chance + 0.2


@pytest.mark.slow
def test_drafts_are_worth_it(engine):
    """Tokens per forward pass; baseline sampling has 1."""
    for method, compression in (("sd", 1.5), ("sjd", 2), ("mc-sjd", 2.5), ("sjd-pac", 2.5)):
        outputs = engine.sample(prompts=["red heart", "cat", "pizza", "grinning face"], seed=0, method=method)
        assert sum(o.stats.step_compression for o in outputs) / 4 > compression, method


def test_evaluate_uses_the_classifier_of_emojis(tmp_path):
    out = tmp_path / "out"
    asked = ["--prompts", str(FOLDER / "prompts.json"), "--num", "10", "--max-batch", "10", "--method", "ar"]
    assert main(["evaluate", "--checkpoint", "emoji64_text", *asked, "--device", "cpu", "--out", str(out)]) == 0
    report = json.loads((out / "evaluation.json").read_text())
    assert report["space"] == "emoji" and 0 < report["fid"] < 20


def test_the_page_needs_a_library_for_prompts(monkeypatch):
    assert options.bundled_here() == [*bundled()] and "emoji64_text" in bundled()
    monkeypatch.setattr(options, "missing_library", lambda: "transformers")
    assert options.bundled_here() == ["digits32", "digits32_vq", "emoji64", "emoji64_sphere"]
