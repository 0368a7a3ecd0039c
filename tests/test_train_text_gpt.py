"""A text-to-image target with its own text encoder, and a draft model: trained, loaded and sampled."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import train_text_gpt
import training
from conftest import relative_error
from PIL import Image
from programs import run_program
from safetensors.torch import load_file, save_file
from text_models import TextGPT, new_tokenizer, read_encoder, tokens_of
from toys import CPU, request_of

import cspd
from cspd.discrete.gpt import GPTConfig, VQConfig
from cspd.discrete.registry import GPTS, TOKENIZERS, GPTSpec, VQDefaults, create_tokenizer, load_gpt
from cspd.files import write_json
from cspd.method import find
from cspd.request import RoundStats, Sequence, Stopwatch

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="training takes torch 2.9, as setup.cfg says")
SIZES = {"dim": 16, "n_head": 2, "vocab_size": 24, "block_size": 16, "num_classes": 0, "multiple_of": 8}
MOST = 16  # tokens of a text
SIZES |= {"prefix_length": MOST, "caption_dim": 8}
TOKENIZER = VQConfig(ch=32, ch_mult=(1, 1), z_channels=32, codebook_size=24, num_res_blocks=1, attention=False)
NAMES = [f"{colour} {shape}" for colour in ("red", "blue") for shape in ("heart", "circle", "square")]
PROMPTS = ["red heart", "7.png Blue square!", "the circle, blue and red and more than there is room for"]


@pytest.fixture(scope="module", autouse=True)
def sizes():
    with pytest.MonkeyPatch.context() as patch:
        defaults = VQDefaults(image_size=8)
        patch.setitem(GPTS, "tiny_text", GPTSpec(GPTConfig(n_layer=2, **SIZES), "tiny", defaults))
        patch.setitem(GPTS, "tiny_text_draft", GPTSpec(GPTConfig(n_layer=1, **SIZES), "tiny", defaults))
        patch.setitem(TOKENIZERS, "tiny", TOKENIZER)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Six images with captions, one of them held out, and a tokenizer."""
    folder, random, found = tmp_path_factory.mktemp("data"), np.random.default_rng(0), {}
    (folder / "train" / "symbols").mkdir(parents=True)
    for i, name in enumerate(NAMES):
        place = f"train/symbols/{i}.png"
        Image.fromarray(random.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(folder / place)
        found[place] = {"name": name, "tags": ["love", "shape"]}
    write_json(folder / "captions.json", found)
    write_json(folder / "prompts.json", [{"prompt": NAMES[-1], "label": 0, "held_out": True}])
    torch.manual_seed(0)
    save_file(create_tokenizer("tiny").state_dict(), folder / "tokenizer.safetensors")
    return folder


@pytest.fixture(scope="module")
def train(data):
    """A function that runs the program for three steps, and returns its file in a directory."""

    def run(folder, part="target", arch="tiny_text", **options):
        folder.mkdir(exist_ok=True)
        out = folder / f"{part}.safetensors"
        given = {"captions": data / "captions.json", "held_out": data / "prompts.json", "arch": arch, "size": 8}
        given |= {"tokenizer": data / "tokenizer.safetensors", "images": 10, "steps": 3, "batch": 3, "vocabulary": 40}
        given |= {"run": folder / f"run_{part}", "codes": folder / "codes", "out": out} | options
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_text_gpt, "HELD_OUT", 4)
            return run_program("train_text_gpt", patch, **given)

    return run


@pytest.fixture(scope="module")
def folder(data, train, tmp_path_factory):
    """A directory with tokenizer, target, text encoder and draft; training the draft leaves the encoder unchanged."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "tokenizer.safetensors").symlink_to(data / "tokenizer.safetensors")
    train(folder)
    before = {path.name: path.read_bytes() for path in (folder / "text_encoder").iterdir()}
    train(folder, "draft", "tiny_text_draft", text_encoder=folder / "text_encoder")
    assert {path.name: path.read_bytes() for path in (folder / "text_encoder").iterdir()} == before
    return folder


def test_the_directory_is_loaded_and_sampled(folder):
    engine = cspd.load(folder, max_batch=2, device="cpu")
    red, other = {"label": None, "prompt": "red heart"}, {"label": None, "prompt": "blue", "negative_prompt": "red"}
    asked = [request_of("ar", **red), request_of("sd", gamma=2, **red), request_of("ar", **other)]
    plain, drafted, other = engine.generate(asked)
    assert plain.image.shape == drafted.image.shape == other.image.shape == (3, 8, 8)
    assert drafted.stats.draft_backbone_calls > 0
    assert engine.runner.text_encoder.width == 8


def test_muon_trains_the_layers_of_the_gpt(folder):
    """AdamW trains the other weights: encoder, embeddings and output."""
    model, _, adamw, muon = torch.load(folder / "run_target" / "last.pt", weights_only=True)["states"]
    _, encoder = read_encoder(folder / "text_encoder")
    layers = [name for name, weight in model.items() if name.startswith("gpt.layers.") and weight.ndim == 2]
    assert len(muon["state"]) == len(layers) == 2 * 5
    whole = TextGPT(load_gpt(folder / "target.safetensors"), encoder)
    assert len(adamw["state"]) + len(muon["state"]) == len([*whole.parameters()])


def test_bad_arguments(folder, train, tmp_path, monkeypatch):
    write_json(tmp_path / "others.json", [{"prompt": "a ship", "label": 0, "held_out": True}])
    with pytest.raises(ValueError, match=r"captions\.json"):
        train(tmp_path / "out", held_out=tmp_path / "others.json")
    with pytest.raises(ValueError, match="--upright"):
        train(tmp_path / "out", upright="symbol")
    wide = GPTS["tiny_text"]
    monkeypatch.setitem(GPTS, "tiny_text", replace(wide, config=replace(wide.config, caption_dim=12)))
    with pytest.raises(ValueError, match="tiny_text"):
        train(tmp_path / "out", text_encoder=folder / "text_encoder")


@pytest.mark.parametrize("lr, is_same", [(0, True), (1e-3, False)])
def test_init_takes_the_encoder_too(lr, is_same, folder, train, tmp_path):
    again = train(tmp_path / "again", init=folder / "target.safetensors", first_seed=5, lr=lr).parent
    for name in ("target.safetensors", "text_encoder/model.safetensors"):
        first, second = load_file(folder / name), load_file(again / name)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first) == is_same, name
    tokenizers = [(place / "text_encoder" / "tokenizer.json").read_text() for place in (folder, again)]
    assert tokenizers[0] == tokenizers[1]
    with pytest.raises(SystemExit, match="--run"):  # without --init
        train(tmp_path / "again", first_seed=5, lr=lr)


def test_a_given_encoder_has_no_dropout(folder, train, tmp_path, monkeypatch):
    def stopped(model, *args, **kwargs):
        assert not any(module.training for module in model.encoder.modules())
        raise KeyboardInterrupt

    monkeypatch.setattr(train_text_gpt, "fit", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "out", "draft", "tiny_text_draft", text_encoder=folder / "text_encoder")


def test_a_run_with_other_captions_is_not_resumed(train, data, tmp_path):
    train(tmp_path / "out")
    for picture in (data / "train").rglob("*.png"):
        place = tmp_path / picture.relative_to(data)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(picture)
    captions = json.loads((data / "captions.json").read_text())
    write_json(tmp_path / "captions.json", {name: about | {"tags": ["other"]} for name, about in captions.items()})
    with pytest.raises(SystemExit, match="--run"):
        train(tmp_path / "out", captions=tmp_path / "captions.json")


def test_an_interrupted_run_ends_with_the_same_weights(folder, train, tmp_path, monkeypatch):
    cross_entropy, calls = train_text_gpt.cross_entropy, iter(range(100))

    def interrupted(*args):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return cross_entropy(*args)

    monkeypatch.setattr(train_text_gpt, "cross_entropy", interrupted)
    monkeypatch.setattr(training, "SAVE_SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut")
    again = train(tmp_path / "cut")
    for name in ("target.safetensors", "text_encoder/model.safetensors"):
        cut, whole = load_file(again.parent / name), load_file(folder / name)
        assert cut.keys() == whole.keys() and all(torch.equal(cut[key], whole[key]) for key in whole)
    with pytest.raises(SystemExit, match="--run"):
        train(tmp_path / "cut", batch=2)


@pytest.fixture(scope="module")
def trained(folder):
    """An engine, the tokenizer of prompts, and the model that training uses, all with large random weights."""
    engine = cspd.load(folder, max_batch=3, device="cpu")
    words, encoder = read_encoder(folder / "text_encoder")
    generator = torch.Generator().manual_seed(0)
    for parameter in engine.runner.target.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return engine, words, TextGPT(engine.runner.target, encoder)


@pytest.mark.filterwarnings("ignore::cspd.discrete.text.Truncated")
def test_training_sees_what_sampling_sees(trained):
    """The logits of every token, in both guidance branches, for prompts of unequal length and a truncated one."""
    engine, words, model = trained
    runner, method = engine.runner, find("ar", "VQ")
    started = []
    for slot, prompt in enumerate(PROMPTS):
        request = request_of("ar", label=None, prompt=prompt, seed=slot, cfg=2.0)
        started.append(Sequence(request, slot=slot, key=slot, uses=method.uses(request), stats=RoundStats()))
    sampled = []
    with torch.inference_mode():
        runner.admit(started)
        for _ in range(16):
            batch = runner.batch_of(started)
            sampled.append(runner.target.output(runner.features(batch, runner.last(batch, 1)[0]))[:, :, 0])
            method.run_round(runner, started, Stopwatch(CPU))
        codes = runner.tokens[:3, :16]
        for rows, branch in product((slice(2), slice(2, 3)), range(2)):  # the last prompt is truncated
            is_null = torch.full((len(PROMPTS[rows]),), branch == 1)
            texts = tokens_of(words, PROMPTS[rows], MOST, is_null)
            assert texts.present.sum(1).tolist() == [len(runner.text_of(prompt)) for prompt in PROMPTS[rows]]
            expected = torch.stack([logits[branch, rows] for logits in sampled], 1)
            assert relative_error(model(texts, codes[rows, :-1]), expected) < 1e-4
    assert texts.ids.shape[1] == MOST


def test_a_replaced_caption_keeps_only_its_length(trained):
    """Rows of a batch that are replaced by the unconditional branch depend on nothing else; other rows stay."""
    _, words, model = trained
    codes = torch.arange(15).expand(3, -1)
    with torch.inference_mode():
        own, other = (
            model(tokens_of(words, texts, MOST, torch.tensor([False, True, False])), codes)
            for texts in (PROMPTS, [PROMPTS[0], "square, blue", PROMPTS[2]])
        )
        plain = model(tokens_of(words, PROMPTS, MOST, torch.zeros(3, dtype=torch.bool)), codes)
    assert torch.equal(own, other)
    assert torch.equal(own[::2], plain[::2]) and relative_error(own[1], plain[1]) > 0.01


def test_the_tokenizer_of_prompts():
    words = new_tokenizer(["red heart", "red circle", "heart"] * 3, 60)
    ids = [words.encode(text).ids for text in ("red heart", "Réd -- Heart!", "red  heart")]
    assert ids[0] == ids[1] == ids[2] and len(ids[0]) == 3
    assert words.encode("").tokens == ["</s>"]
    texts = tokens_of(words, ["red", "red circle heart"], 3, torch.zeros(2, dtype=torch.bool))
    assert texts.present.tolist() == [[False, True, True], [True, True, True]]
    assert words.decode(texts.ids[1].tolist()[-1:], skip_special_tokens=False) == "</s>"
