"""CLIP score: 100 max(cos, 0) of the features of an image and its prompt; folders without a CLIP model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from stores import small_clip

from cspd.evaluation import metrics
from cspd.evaluation.images import ImageList
from cspd.evaluation.metrics import (
    FILES,
    Clip,
    Evaluation,
    Reference,
    check_clip,
    dinov2_features,
    mean_and_error,
    measure,
)
from cspd.evaluation.scores import discrepancy, frechet, gaussian, statistics_of
from cspd.origin import file_fingerprint
from cspd.pixels import to_pil
from mar.tensors import CheckpointError

CPU = torch.device("cpu")
TEXTS = ["a red fox", "blue", "an old ship in a quiet harbour"]  # the last has more tokens than the model takes


@pytest.fixture
def real(tmp_path):
    """A copy of a small model's folder."""
    return Path(shutil.copytree(small_clip(), tmp_path / "clip"))


def pictures():
    return ImageList(torch.rand(len(TEXTS), 3, 20, 20, generator=torch.Generator().manual_seed(0)))


@pytest.mark.slow  # transformers takes seconds to import
def test_scores_are_the_formula(real, monkeypatch):
    """Computed image by image and prompt by prompt, without padding. Batches do not change them."""
    monkeypatch.setattr(metrics, "BATCH", 2)
    (real / "model.fp16.safetensors").touch()  # transformers does not read it
    model, images = Clip(real, CPU), pictures()
    scores = model.scores(images, TEXTS)
    for i, text in enumerate(TEXTS):
        pixels = model.processor(images=to_pil(images[i]), return_tensors="pt")["pixel_values"]
        ids = model.processor.tokenizer(text).input_ids
        tokens = torch.tensor([[*ids[:11], ids[-1]] if len(ids) > 12 else ids])
        with torch.no_grad():
            image = model.model.visual_projection(model.model.vision_model(pixels).pooler_output)[0]
            prompt = model.model.text_projection(model.model.text_model(tokens).pooler_output)[0]
        cosine = torch.nn.functional.cosine_similarity(image, prompt, dim=0).item()
        assert scores[i].item() == pytest.approx(100 * max(cosine, 0), abs=1e-3)
    assert len(set(scores.tolist())) > 1
    assert model.about == {"name": "clip", "fingerprint": file_fingerprint(real / "model.safetensors")}


@pytest.mark.slow
@pytest.mark.parametrize("direction, score", [(1.0, 100.0), (-1.0, 0.0)], ids=["the same", "the opposite"])
def test_known_directions(direction, score, real):
    """All features are one vector, or its opposite."""
    model = Clip(real, CPU)
    with torch.no_grad():
        for norm in (model.model.vision_model.post_layernorm, model.model.text_model.final_layer_norm):
            norm.weight.zero_()
            norm.bias.fill_(1)
        model.model.visual_projection.weight.fill_(1)
        model.model.text_projection.weight.fill_(direction)
    assert model.scores(pictures(), TEXTS).tolist() == pytest.approx([score] * 3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["no weights", "a layer more", "a layer fewer"])
def test_weights_of_another_model_are_refused(damage, real):
    if damage == "no weights":
        (real / "model.safetensors").write_bytes(b"nothing")
    else:
        config = json.loads((real / "config.json").read_text())
        config["text_config"]["num_hidden_layers"] = 3 if damage == "a layer more" else 1
        (real / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"CLIP|layer"):
        Clip(real, CPU)


@pytest.mark.slow
def test_code_in_the_folder_is_neither_run_nor_asked_about(real, tmp_path, monkeypatch):
    file = real / "processor_config.json"
    content = json.loads(file.read_text())
    content["image_processor"] |= {"image_processor_type": "Own", "auto_map": {"AutoImageProcessor": "own.Own"}}
    file.write_text(json.dumps(content))
    (real / "own.py").write_text(f"open({str(tmp_path / 'trap')!r}, 'w')\nclass Own: pass\n")
    monkeypatch.setattr("builtins.input", lambda *text: pytest.fail("asked"))
    with pytest.raises(CheckpointError, match="not run"):
        Clip(real, CPU)
    assert not (tmp_path / "trap").exists()


@pytest.mark.slow
def test_cmmd_and_fd_dinov2_are_of_their_networks_features(real, tmp_path):
    """Of images in memory and a reference's, by small models with random weights."""
    from transformers import Dinov2Config, Dinov2Model

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    Dinov2Model(Dinov2Config(**small)).save_pretrained(tmp_path / "dinov2")
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (ImageList(torch.rand(25, 3, 32, 32, generator=generator)) for _ in range(2))
    reference = Reference("", "", images=theirs)
    found = measure(ours, Evaluation("digits", None, reference, real, tmp_path / "dinov2", CPU))
    features = [Clip(real, CPU).features(each) for each in (ours, theirs)]
    assert found["cmmd"] == pytest.approx(discrepancy(*features, gaussian).value)
    features = [dinov2_features(each, tmp_path / "dinov2", CPU) for each in (ours, theirs)]
    assert features[0].shape == (25, 16)
    assert found["fd_dinov2"] == pytest.approx(frechet(features[0], statistics_of(features[1])).value)
    assert found["cmmd_ci95"] and found["fd_dinov2_resolution"] > 0 and set(found["missing"]) == {"sfid", "accuracy"}


def test_a_folder_without_dinov2(tmp_path):
    with pytest.raises(CheckpointError, match="DINOv2"):
        dinov2_features(pictures(), tmp_path, CPU)


def empty_folder(folder):
    """A folder with files of the right names, all empty but the configuration."""
    folder.mkdir()
    for patterns in FILES.values():
        (folder / patterns[0].replace("*", "")).touch()
    (folder / "config.json").write_text('{"model_type": "clip"}')
    return folder


@pytest.mark.parametrize("what", FILES)
def test_a_folder_that_lacks_a_file(what, tmp_path):
    folder = empty_folder(tmp_path / "clip")
    (folder / FILES[what][0].replace("*", "")).unlink()
    with pytest.raises(CheckpointError, match=what):
        check_clip(folder, CPU, of_texts=True)


def test_a_folder_of_another_model(tmp_path):
    folder = empty_folder(tmp_path / "clip")
    (folder / "config.json").write_text('{"model_type": "siglip"}')
    with pytest.raises(CheckpointError, match=r"config\.json"):
        check_clip(folder, CPU, of_texts=True)


def test_classes_have_no_score(tmp_path):
    with pytest.raises(ValueError, match="--prompts"):
        check_clip(tmp_path, CPU, of_texts=False)


def test_the_standard_error_of_a_mean():
    mean, error = mean_and_error(torch.tensor([20.0, 30.0, 40.0]))
    assert mean == 30 and error == pytest.approx(10 / 3**0.5)
    assert mean_and_error(torch.tensor([20.0])) == (20.0, None)
