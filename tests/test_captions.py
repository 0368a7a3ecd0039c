"""Captions of images: which are held out, the prompts made of them, and the evaluation of images."""

from __future__ import annotations

import json
import sys
from collections import Counter
from random import Random

import captions
import judge_prompts
import pytest
import torch
from captions import Caption, held_out_names, listed, pictures_of, read_captions, read_list, text_of, words_of
from PIL import Image
from safetensors.torch import save_file

from cspd.cli.options import read_prompts
from cspd.evaluation.metrics import CLASSIFIERS, Classifier, ClassifierConfig
from cspd.files import write_json

COLOURS, SHAPES = ("red", "blue", "green", "black", "white"), ("heart", "circle", "square", "star")
PEOPLE = [
    f"{who} {work}: {tone}" for who in ("man", "woman") for work in ("cook", "pilot") for tone in ("dark", "light")
]
ALONE = ("hot dog", "dog", "bread")  # names whose words do not combine


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """captions.json of images whose left half is white."""
    folder, found = tmp_path_factory.mktemp("data"), {}
    classes = {"shapes": [f"{c} {s}" for c in COLOURS for s in SHAPES], "people": PEOPLE, "things": ALONE}
    for category, names in classes.items():
        for i, name in enumerate([*names, "arrow pointing left"] if category == "things" else names):
            for vendor in ("a", "b"):
                place = f"train/{category}/{i}_{vendor}.png"
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                picture = Image.new("RGB", (8, 8), (10 * i, 0, 0))
                picture.paste("white", (0, 0, 4, 8))
                picture.save(folder / place)
                found[place] = {"name": name, "tags": [f"tag {i}", "thing", "x", "y"], "vendor": vendor}
    found["held_out/things/0.png"] = {"name": "unknown", "tags": []}
    write_json(folder / "captions.json", found)
    return folder / "captions.json"


@pytest.fixture(scope="module")
def own(file):
    return read_captions(file)


def test_captions_are_read(own):
    """By class and name, with all their images but those in held_out/."""
    assert len(own) == len(COLOURS) * len(SHAPES) + len(PEOPLE) + len(ALONE) + 1
    assert [caption.category for caption in own] == sorted(caption.category for caption in own)
    assert all(len(caption.files) == 2 and caption.name != "unknown" for caption in own)


def test_held_out_in_composition(own):
    entries = listed(own, 10)
    assert entries == listed(own[::-1], 10)  # in any order
    away = held_out_names(entries)
    assert [entry["prompt"] in away for entry in entries] == [True, False] * 5
    assert {entry["label"] for entry in entries} == {0, 1}  # people and shapes
    for name in away:
        (category,) = {caption.category for caption in own if caption.name == name}
        others = [words_of(c.name) for c in own if c.category == category and c.name not in away]
        assert words_of(name) not in others
        assert all(sum(word in each for each in others) >= 2 for word in words_of(name))


def test_every_word_stays_in_two_names():
    few = [f"{c} {s}" for c in COLOURS[:3] for s in SHAPES[:3]]
    held_out = {name for name, _ in captions.pairs_of_class(few)}
    count = Counter(word for name in few if name not in held_out for word in words_of(name))
    assert held_out and min(count.values()) >= 2


def test_the_list_can_be_sampled(file, tmp_path, monkeypatch, capsys):
    out = tmp_path / "prompts.json"
    monkeypatch.setattr(sys, "argv", ["captions", "--captions", str(file), "--num", "8", "--out", str(out)])
    captions.main()
    assert "8 captions, half of them held out:\n  people: 2\n  shapes: 6\n" in capsys.readouterr().out
    assert read_prompts(out) == [entry["prompt"] for entry in read_list(out)]
    monkeypatch.setattr(sys, "argv", ["captions", "--captions", str(file), "--num", "80", "--out", str(out)])
    with pytest.raises(SystemExit, match="--num"):
        captions.main()


def test_prompts_of_a_caption():
    caption, random = Caption("red heart", ["love", "red"], "symbols", []), Random(0)
    texts = Counter(text_of(caption, random) for _ in range(4000))
    assert 0.45 < sum(count for text, count in texts.items() if text.endswith("red heart")) / 4000 < 0.55
    kinds = {"red heart", "a red heart", "red heart love", "the red heart red love", "an red heart love red"}
    assert kinds <= texts.keys() and len(texts) == 5 * 4
    assert text_of(caption._replace(tags=[]), random).endswith("red heart")


def test_mirrored_images(own):
    """Names with a direction, and upright classes, are not mirrored."""
    few = [caption for caption in own if caption.name in ("man cook: dark", "arrow pointing left", "hot dog")]
    data = pictures_of(few, ["people"], 8)
    labels = torch.arange(3).repeat(8)
    images, drawn = data.draw(len(labels), 3, "train", labels)
    assert torch.equal(drawn, labels) and data.classes == ["man cook: dark", "arrow pointing left", "hot dog"]
    brightness = images.mean(dim=(1, 2))
    mirrored = brightness[:, 0] < brightness[:, -1]
    assert [mirrored[labels == label].any().item() for label in range(3)] == [False, False, True]
    assert captions.labels_of(few) == [0, 0, 1, 1, 2, 2]


def test_images_are_evaluated(tmp_path, monkeypatch, capsys):
    """With a classifier whose class 1 is bright images. Half of the held-out images have the right class."""
    monkeypatch.setitem(CLASSIFIERS, "tiny", ClassifierConfig(size=8, widths=(4,), classes=2))
    model = Classifier(CLASSIFIERS["tiny"]).eval()
    for tensor in model.state_dict().values():
        tensor.zero_()
    weights = model.state_dict()
    weights["stages.0.0.weight"] += 1
    weights["stages.0.1.weight"] += 1
    weights["stages.0.1.running_var"] += 1
    weights["out.weight"][1] += 1
    weights["out.bias"][0] += 1
    save_file(weights, tmp_path / "classifier.safetensors")
    entries = [{"prompt": str(i), "label": i % 2, "held_out": i < 4} for i in range(8)]
    write_json(tmp_path / "prompts.json", entries)
    folder = tmp_path / "images"
    folder.mkdir()
    made = []
    for i in range(16):  # each twice
        bright = i % 2 if i % 8 > 1 else 1 - i % 2
        Image.new("RGB", (8, 8), "white" if bright else "black").save(folder / f"{i}.png")
        made.append({"file": f"{i}.png", "request": {"prompt": str(i % 8)}})
    write_json(folder / "samples.json", {"images": made})
    arguments = ["--images", folder, "--prompts", tmp_path / "prompts.json", "--arch", "tiny"]
    arguments += ["--classifier", tmp_path / "classifier.safetensors"]
    monkeypatch.setattr(sys, "argv", ["judge_prompts", *map(str, arguments)])
    judge_prompts.main()
    assert capsys.readouterr().out == (
        "captions trained on: 8 images, 100.0% recognised (by chance 50.0%), standard error 0.0%\n"
        "captions held out: 8 images, 50.0% recognised (by chance 50.0%), standard error 28.9%\n"
        "class 0: 8 images, 75.0% recognised\n"
        "class 1: 8 images, 75.0% recognised\n"
    )
    write_json(tmp_path / "prompts.json", entries[1:])
    with pytest.raises(SystemExit, match=r"prompts\.json"):
        judge_prompts.main()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "captions.json"),
        ({"a.png": {"name": "a"}}, "tags"),
        ({"held_out/a/a.png": {"name": "a", "tags": []}}, "held_out"),
    ],
)
def test_bad_captions(content, message, tmp_path):
    (tmp_path / "captions.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_captions(tmp_path / "captions.json")
