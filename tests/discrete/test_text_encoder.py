"""The text encoder: T5's features, their cache, cleaning of captions, and bad directories."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch
from conftest import relative_error
from safetensors.torch import load_file, save_file
from stores import small_text_encoder
from texts import folder_of_words

from cspd.discrete import text
from cspd.discrete.text import TextEncoder, Truncated, cleaned
from mar.tensors import CheckpointError

CPU = torch.device("cpu")
MOST = 12
LONG = "a b c d e f g h i j k l m n o p"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An encoder whose features are a function of words, in place of T5."""
    return folder_of_words(tmp_path / "encoder", monkeypatch)


@pytest.fixture
def real(tmp_path):
    """A small T5 encoder, whose tokens are letters."""
    return shutil.copytree(small_text_encoder(), tmp_path / "t5")


@pytest.mark.slow  # transformers takes seconds to import
def test_features_are_those_of_the_padded_text(real):
    """The authors pad texts to the maximal length and mask the padding; without padding the features are the same."""
    from transformers import AutoTokenizer, T5EncoderModel

    tokenizer, model = AutoTokenizer.from_pretrained(real), T5EncoderModel.from_pretrained(real).eval()
    for caption in ("fox", "a fox", "z"):
        padded = tokenizer([caption], max_length=MOST, padding="max_length", truncation=True, return_tensors="pt")
        with torch.no_grad():
            expected = model(input_ids=padded.input_ids, attention_mask=padded.attention_mask).last_hidden_state[0]
        count = int(padded.attention_mask.sum())
        features = TextEncoder(real).features(caption, MOST, CPU)
        assert features.shape == (count, 6) and features.dtype == torch.float32
        assert relative_error(features, expected[:count]) < 1e-5


@pytest.mark.slow
def test_t5_truncates_a_long_text_before_the_end_token(real):
    encoder = TextEncoder(real)
    expected_bytes = encoder.bytes_to_load
    with pytest.warns(Truncated):
        cut = encoder.features(LONG, MOST, CPU)
    assert torch.equal(cut, encoder.features(LONG[: 2 * MOST - 3], MOST, CPU))
    assert expected_bytes == 4 * sum(parameter.numel() for parameter in encoder.models[1].parameters())
    assert encoder.bytes_to_load == 0  # it is loaded


@pytest.mark.slow
def test_bad_weights(real):
    config = json.loads((real / "config.json").read_text())
    for layers in (3, 1):  # more and fewer than the weights have
        (real / "config.json").write_text(json.dumps(config | {"num_layers": layers}))
        with pytest.raises(CheckpointError, match="block"):
            TextEncoder(real).features("fox", MOST, CPU)
    (real / "config.json").write_text(json.dumps(config))
    weights = load_file(real / "model.safetensors")
    weights["encoder.final_layer_norm.weight"][0] = float("nan")
    save_file(weights, real / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="NaN"):
        TextEncoder(real).features("nan", MOST, CPU)
    (real / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError):
        TextEncoder(real).features("fox", MOST, CPU)


def test_features_are_computed_once(folder, monkeypatch):
    """Another process reads them from disk. Another text, limit or encoder has other features."""
    made = []
    compute = TextEncoder._made
    monkeypatch.setattr(TextEncoder, "_made", lambda self, *of: (made.append(of), compute(self, *of))[1])
    first, second = TextEncoder(folder), TextEncoder(folder)
    features = first.features("once", MOST, CPU)
    assert torch.equal(second.features("once", MOST, CPU), features)
    assert torch.equal(first.features("  Once ", MOST, CPU), features)  # the same when cleaned
    assert len(made) == 1
    first.features("twice", MOST, CPU)
    first.features("once", MOST - 1, CPU)
    assert len(made) == 3
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    TextEncoder(folder).features("once", MOST, CPU)
    assert len(made) == 4


def test_a_damaged_cache_is_replaced(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(text, "user_cache", lambda: tmp_path)
    features = TextEncoder(folder).features("fox", MOST, CPU)
    (file,) = (tmp_path / "text").iterdir()
    file.write_bytes(file.read_bytes()[:-40])
    assert torch.equal(TextEncoder(folder).features("fox", MOST, CPU), features)
    monkeypatch.setattr(text, "user_cache", lambda: file)  # not a directory: nothing can be stored
    assert torch.equal(TextEncoder(folder).features("fox", MOST, CPU), features)


def test_truncation_is_warned_about(folder):
    encoder = TextEncoder(folder)
    for _ in range(2):  # also for features in memory
        with pytest.warns(Truncated):
            encoder.features(LONG, MOST, CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(encoder.features(LONG[: 2 * MOST - 3], MOST, CPU)) == MOST


def test_bytes_of_t5_xl(folder):
    """The authors count 1.2 billion parameters in FLAN-T5-XL's encoder."""
    sizes = {"d_model": 2048, "d_ff": 5120, "num_layers": 24, "num_heads": 32, "feed_forward_proj": "gated-gelu"}
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", **sizes}))
    assert TextEncoder(folder).bytes_to_load == pytest.approx(4.9e9, rel=0.01)


def test_bad_directories(folder):
    t5 = '{"model_type": "t5", "d_model": 6, '
    for config in ('{"model_type": "bert", "d_model": 6}', "{", t5 + '"num_heads": 0}', t5 + '"d_ff": "8"}'):
        (folder / "config.json").write_text(config)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            TextEncoder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=str(folder)):
        TextEncoder(folder)


CAPTIONS = {  # by hand, from the rules
    "A Red   FOX ": "a red fox",
    "see https://a.com/b?x=1 a fox": "see ?x=1 a fox",
    "<b>bold</b> &amp; <person>": "bold person",
    "by @someone in ‘quotes’ — and “more”": "by in 'quotes' - and \"more\"",
    "狐 a fox": "a fox",
    "fox.jpg of a fox, 800x600": "of a fox",
    "free shipping: a fox #12 (12345678)": "a fox",
    "one-two-three-four-five": "one two three four five",
    "one-two": "one-two",
    "a%20fox+runs": "a fox runs",
    "wait... what | now": "wait what now",
    "": "",
    "see-https://fox.com/a?b a fox": "see-?b a fox",
    "_a.fox.com, x@fox.com, fox.community": "a, x",
    "fox.com.-www:a.b a fox": ".-. b a fox",
    "fox.coma fox.com/a/ fox.com@a fox.co-b": "fox. com",
    "a.fox.jpg.png.b c .png": ".b c .",
    "a 3.5x4.25 12x7.a 1111x": "a 3 25 a 1111x",
    "fox1a1b22 a1b1c_ d": "a1b1c_ d",
    "a  . fox . . red  ": "a fox red",
}


@pytest.mark.parametrize("caption, expected", CAPTIONS.items())
def test_captions_are_cleaned(caption, expected):
    assert cleaned(caption) == expected
