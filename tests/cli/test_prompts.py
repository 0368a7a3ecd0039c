"""Prompts on the command line: their files, and `evaluate`, `compare` and `edit` with them; what is refused."""

from __future__ import annotations

import json
import locale
import re
from pathlib import Path

import pytest
from hf import saved
from launching import start, two_processes
from PIL import Image
from scipy import stats
from stores import small_checkpoint, small_clip

from cspd.cli import main
from cspd.cli.options import prompt_groups, read_prompts
from cspd.evaluation.images import ImageFolder
from cspd.evaluation.metrics import Clip
from cspd.evaluation.run import Shards
from cspd.files import read_json
from cspd.runs import differences
from cspd.terminal import label_list, path_argument, prompt

COCO = [(7, "A fox."), (7, "a red animal"), (2, " a ship "), (9, "a boat at sea"), (2, "the sea")]
NUM = 20  # images: two files of an evaluation
TEXTS = ["a fox", "blue, and long", "a fox and a ship in a green harbour"]


def coco(path, annotations=COCO):
    captions = [{"id": i, "image_id": image, "caption": text} for i, (image, text) in enumerate(annotations)]
    path.write_text(json.dumps({"info": {}, "images": [], "annotations": captions}))
    return path


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(TEXTS))
    return path


def test_the_first_caption_of_each_image_in_coco(tmp_path):
    """Images named as in COCO have their own captions in any order; others have all captions in the file's order."""
    in_order = ["A fox.", "a ship", "a boat at sea", "ten"]
    file = coco(tmp_path / "captions.json", [*COCO, (10, "ten")])
    assert read_prompts(file) == in_order
    for name in ("{:012}.jpg", "COCO_val2014_{:012}.jpg", "{}.png"):
        images = [Path(name.format(number)) for number in (2, 7, 10)]
        assert read_prompts(file, images) == ["a ship", "A fox.", "ten"]
    without = Path("000000000008.jpg")
    with pytest.raises(ValueError, match=str(without)):
        read_prompts(file, [without])
    assert read_prompts(file, [*images, Path("8.png")]) == in_order  # any images may have such names
    assert read_prompts(file, [Path(f"00003_seed{number}.png") for number in (2, 7, 9, 10)]) == in_order


def test_a_random_caption_of_each_image_in_coco(tmp_path):
    """A function of the seed and the image: neither of the order of the file nor of the images that are asked for."""
    annotations = [(image, f"{image} {i}") for image in range(300) for i in range(5)]
    file = coco(tmp_path / "captions.json", annotations)
    drawn = read_prompts(file, caption_seed=3)
    assert [text.split()[0] for text in drawn] == [str(image) for image in range(300)]
    assert drawn == read_prompts(file, caption_seed=3) != read_prompts(file, caption_seed=4)
    assert read_prompts(file, [Path(f"{image:012}.jpg") for image in (7, 2)], 3) == [drawn[7], drawn[2]]
    number = [int(text.split()[1]) for text in drawn]
    assert stats.chisquare([number.count(i) for i in range(5)]).pvalue > 0.01
    later = coco(tmp_path / "later.json", [(500, "x"), *annotations])
    assert read_prompts(later, caption_seed=3)[1:] == drawn


PARTI = """Prompt\tCategory\tChallenge\tNote
bond\tAbstract\tBasic\tmany meanings
"G I G" as graffiti \tIllustrations\tWriting & Symbols\t
a fox\tAbstract\tBasic
"""


def test_a_table_of_prompts_and_their_groups(tmp_path):
    """PartiPrompts' lines: quotes belong to the text, a line may end early."""
    (tmp_path / "parti.tsv").write_text(PARTI)
    prompts = ["bond", '"G I G" as graffiti', "a fox"]
    assert read_prompts(tmp_path / "parti.tsv") == prompts
    groups = prompt_groups(tmp_path / "parti.tsv")
    assert groups == {
        "category": dict(zip(prompts, ["Abstract", "Illustrations", "Abstract"])),
        "challenge": dict(zip(prompts, ["Basic", "Writing & Symbols", "Basic"])),
    }
    (tmp_path / "geneval.jsonl").write_text('{"prompt": "a fox", "tag": "single_object"}\n"blue"')
    assert prompt_groups(tmp_path / "geneval.jsonl") == {"tag": {"a fox": "single_object"}}
    (tmp_path / "folder").mkdir()
    assert prompt_groups(tmp_path / "folder") == prompt_groups(coco(tmp_path / "captions.json")) == {}


@pytest.mark.parametrize("more", [["--prompts", "a.txt"], ["--prompt", "a fox"], []])
def test_a_caption_seed_needs_captions(more, text_checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a fox")
    for command in ("sample", "evaluate", "compare"):
        if "--prompt" in more and command != "sample":
            continue
        assert run(command, text_checkpoint, *more, "--caption-seed", 3, "--out", "out") == 2
        assert "--caption-seed" in capsys.readouterr().err and not Path("out").exists()


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.txt", "\ufeffa fox\n  blue \r\n\n \n"),
        ("a.json", '["a fox", "blue"]'),
        ("a.JSON", '[{"prompt": "a fox"}, {"caption": "blue", "id": 3}]'),
        ("a.jsonl", '\ufeff{"prompt": "a fox", "tag": "count"}\n \n{"prompt": "blue"}\n\n'),
    ],
)
def test_formats_of_files(name, content, tmp_path):
    (tmp_path / name).write_text(content, newline="")
    assert read_prompts(tmp_path / name) == ["a fox", "blue"]


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("a.txt", b"\n \n", "empty"),
        ("a.txt", "zum Gr\xfcnen".encode("latin-1"), "UTF-8"),
        ("a.txt", b"a fox\n \nblue", "line 2"),
        ("a.txt", b"a fox\0", "line 1"),
        ("a.jsonl", b'"a fox"\n\n{"text": "a fox"}', "line 3"),
        ("a.jsonl", b'"a fox"\n\n\n{', "line 4"),
        ("a.csv", b"a fox", ".csv"),
        ("a.tsv", b"a fox\nblue", "Prompt"),
        ("a.tsv", b"Prompt\tCategory\n", "empty"),
        ("a.tsv", b"Category\tPrompt\nAbstract\n", "line 2"),
        ("a.json", rb'["a fox", "blue \ud83d"]', "prompt 2"),
        ("a.json", b"a fox", "JSON"),
        ("a.json", b"[]", "empty"),
        ("a.json", b'["a fox", 5]', "prompt 2"),
        ("a.json", b'[{"text": "a fox"}]', "prompt 1"),
        ("a.json", b"[" * 100_000, "JSON"),
        ("a.json", b'{"captions": []}', "annotations"),
    ],
)
def test_files_that_are_refused(name, content, reason, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(reason)):
        read_prompts(tmp_path / name)


@pytest.fixture
def ascii_locale():
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    yield
    locale.setlocale(locale.LC_CTYPE, before)


def test_a_prompt_is_read_as_it_is_in_any_locale(ascii_locale, tmp_path):
    """A line separator, which Python's splitlines() takes for a line's end, belongs to the prompt."""
    text = "ein gr\xfcnes\u2028Herz"
    for name, content in (("a.txt", text), ("a.json", json.dumps([text])), ("a.jsonl", f'"{text}"\n"b"')):
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert read_prompts(tmp_path / name)[0] == text
    (tmp_path / "cspd.json").write_text(f'\ufeff{{"classes": ["{text}"]}}', encoding="utf-8")
    assert read_json(tmp_path / "cspd.json") == {"classes": [text]}
    typed = "gr\udcc3\udcbcn"  # as Python decodes an argument in such a locale
    assert prompt(typed) == "gr\xfcn" and label_list(typed) == ["gr\xfcn"]
    assert path_argument(typed) == Path(typed)  # as it encodes it


def test_a_folder_of_texts_has_a_prompt_in_each_file(tmp_path):
    for name, text in (("b.txt", "blue"), ("a.txt", "a red\nfox\n"), ("c.png", "")):
        (tmp_path / name).write_text(text)
    assert read_prompts(tmp_path) == ["a red fox", "blue"]


def run(command, checkpoint, *more):
    return main([command, "--checkpoint", str(checkpoint), "--device", "cpu", *map(str, more)])


def evaluate(checkpoint, file, out, *more):
    return run("evaluate", checkpoint, "--method", "ar", "--seed", 5, "--prompts", file, "--out", out, *more)


def report_of(out):
    return json.loads((out / "evaluation.json").read_text())


def test_an_evaluation_resumes(text_checkpoint, file, tmp_path, capsys):
    """One image per prompt. Nothing is generated again; other prompts are another run."""
    out = tmp_path / "out"
    assert evaluate(text_checkpoint, file, out, "--negative-prompt", "snow") == 0
    shown = capsys.readouterr().out
    assert "--clip" in shown and "--ref" in shown
    shards = Shards(out, 3)
    assert shards.subjects() == TEXTS and shards.read(0, "seeds").tolist() == [5, 6, 7]
    report = report_of(out)
    assert report["num"] == 3 and report["settings"]["request"]["negative_prompt"] == "snow"
    assert report["clip_score"] is None and report["fid"] is None and {"fid", "clip_score"} <= report["missing"].keys()
    made = (out / "00000.npz").stat().st_mtime_ns
    assert evaluate(text_checkpoint, file, out, "--negative-prompt", "snow") == 0
    assert (out / "00000.npz").stat().st_mtime_ns == made
    file.write_text("\n".join([*TEXTS[:2], "a boat"]))
    assert evaluate(text_checkpoint, file, out, "--negative-prompt", "snow") == 2
    assert "prompts" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_generate_the_images_of_one(file, tmp_path, capsys):
    """Two files of images, whose prompts cycle; one process resumes the run of two."""
    command = ["evaluate", "--checkpoint", saved(tmp_path / "janus", "janus"), "--method", "sjd", "--window", 4]
    command += ["--prompts", file, "--num-images", NUM, "--seed", 5, "--max-batch", 3, "--device", "cpu", "--out"]
    log, one, two = (tmp_path / name for name in ("log", "one", "two"))
    run = start([*command, two], log, two_processes())
    assert main([*map(str, command), str(one)]) == 0
    assert run.wait(timeout=600) == 0, log.read_text()[-2000:]
    images = [Shards(folder, NUM) for folder in (one, two)]
    for i in range(NUM):
        assert (images[0][i].int() - images[1][i]).abs().max() <= 1
    for shards in images:
        assert shards.subjects() == [TEXTS[i % 3] for i in range(NUM)]
        assert [seed for shard in (0, 1) for seed in shards.read(shard, "seeds").tolist()] == [*range(5, 5 + NUM)]
    reports = [report_of(folder) for folder in (one, two)]
    assert not differences(*(report["settings"] for report in reports))  # other tests may add settings, here unused
    assert [report["sampling"]["processes"] for report in reports] == [1, 2]
    alone, shared = (report["sampling"]["images_made"] for report in reports)
    # of two, the last one reports: its own file of 4 or 16 images, and what the other wrote since it had started
    assert alone == NUM and shared in (4, 16, NUM)
    capsys.readouterr()
    assert main([*map(str, command), str(two)]) == 0
    assert report_of(two)["sampling"] == reports[1]["sampling"]


@pytest.mark.slow  # transformers takes seconds to import
def test_clip_scores_of_an_evaluation_and_of_a_folder(text_checkpoint, file, tmp_path, capsys):
    """The same for images of `cspd sample`, with the prompts of its record or of a file."""
    clip = ["--clip", small_clip()]
    assert evaluate(text_checkpoint, file, tmp_path / "out", *clip) == 0
    assert "+- " in capsys.readouterr().out
    made = report_of(tmp_path / "out")
    pictures = tmp_path / "samples"
    assert run("sample", text_checkpoint, "--method", "ar", "--seed", 5, "--prompts", file, "--out", pictures) == 0
    expected = Clip(tmp_path / small_clip(), "cpu").scores(ImageFolder(pictures), TEXTS)
    assert made["clip_score"] == pytest.approx(expected.mean().item(), abs=1e-4)
    assert made["clip_score_error"] == pytest.approx(expected.std().item() / 3**0.5, abs=1e-4)
    for more in ([], ["--prompts", str(file)]):
        folder = ["--images", str(pictures), "--out", str(tmp_path / "again"), *clip, *more]
        assert main(["evaluate", *folder, "--device", "cpu"]) == 0
        again = report_of(tmp_path / "again")
        assert again["clip_score"] == pytest.approx(made["clip_score"], abs=1e-4) and again["clip"] == made["clip"]


@pytest.mark.slow  # transformers takes seconds to import
def test_clip_scores_by_group(text_checkpoint, tmp_path, capsys):
    (tmp_path / "parti.tsv").write_text(PARTI)
    assert evaluate(text_checkpoint, tmp_path / "parti.tsv", tmp_path / "out", "--clip", small_clip()) == 0
    shown = capsys.readouterr().out
    report = report_of(tmp_path / "out")
    scores = Clip(Path(small_clip()), "cpu").scores(
        Shards(tmp_path / "out", 3), ["bond", '"G I G" as graffiti', "a fox"]
    )
    found = report["clip_score_by"]["category"]
    assert found.keys() == {"Abstract", "Illustrations"} and report["clip_score_by"]["challenge"].keys() == {
        "Basic",
        "Writing & Symbols",
    }
    assert (found["Abstract"]["images"], found["Illustrations"]["clip_score_error"]) == (2, None)
    assert found["Abstract"]["clip_score"] == pytest.approx(scores[[0, 2]].mean().item(), abs=1e-4)
    assert found["Illustrations"]["clip_score"] == pytest.approx(scores[1].item(), abs=1e-4)
    assert f"{found['Abstract']['clip_score']:.2f}" in shown and "Writing & Symbols" in shown


def test_a_folder_is_not_measured_before_what_would_fail_afterwards(file, tmp_path, capsys):
    """Images are in the order of the numbers in their names; one prompt more or less would shift them."""
    images = tmp_path / "images"
    images.mkdir()
    for i in (0, 10, 2):
        Image.new("RGB", (8, 8)).save(images / f"{i}.png")
    assert [path.name for path in ImageFolder(images).files] == ["0.png", "2.png", "10.png"]
    (images / "2.png").unlink()
    weights = ["--weights", str(tmp_path / "none.pth")]
    wrong = {
        "--prompts": ["--prompts", str(file)],  # 3 prompts for 2 images
        "CLIP": ["--clip", str(tmp_path), *weights],  # a folder without a model
        "a.npz": ["--npz", str(images / "0.png" / "a.npz"), *weights],  # in no folder
    }
    for flag, more in wrong.items():
        assert main(["evaluate", "--images", str(images), "--out", str(tmp_path / "out"), *more]) == 2
        assert flag in capsys.readouterr().err


def compare(checkpoint, out, *more):
    return run("compare", checkpoint, "--methods", "ar,sjd:window=4", "--num", 4, "--out", out, *more)


def test_a_comparison_of_prompts(text_checkpoint, file, tmp_path):
    """Each row has the same prompts and seeds; the page has the whole prompts, the picture as much as fits."""
    long = "a fox in " + "a very green and quiet harbour " * 4
    file.write_text("\n".join([*TEXTS[:2], long.strip(), "x" * 300]))
    with pytest.warns():
        assert compare(text_checkpoint, tmp_path, "--prompts", file) == 0
    report = json.loads((tmp_path / "comparison.json").read_text())
    assert report["labels"] == [*TEXTS[:2], long.strip(), "x" * 300]
    assert report["rows"][1]["pixel_difference"] == 0  # sjd gives ar's images
    assert "give --clip FOLDER" in report["missing"]["clip_score"] and report["rows"][0]["clip_score"] is None
    page = (tmp_path / "report.html").read_text()
    assert all(text in page for text in report["labels"]) and "The texts are above" in page and "classes" not in page


@pytest.mark.slow
def test_clip_scores_of_a_comparison(text_checkpoint, file, tmp_path, capsys):
    """Rows with the same images have the same score, and a difference of 0 from baseline sampling."""
    assert compare(text_checkpoint, tmp_path, "--prompts", file, "--clip", small_clip()) == 0
    assert "CLIP" in capsys.readouterr().out
    report = json.loads((tmp_path / "comparison.json").read_text())
    plain, other = report["rows"]
    assert plain["clip_score"] == pytest.approx(other["clip_score"]) and plain["clip_difference"] is None
    assert other["clip_difference"] == pytest.approx(0, abs=1e-4)
    low, high = plain["clip_score_ci95"]
    assert low < plain["clip_score"] < high and report["clip"]["name"] == "small_clip"
    assert "CLIP score" in (tmp_path / "report.html").read_text()


def test_a_study_file_with_prompts(text_checkpoint, file, tmp_path, capsys):
    """Classes and prompts exclude each other, also between the file and the flags."""
    study = tmp_path / "study.yaml"
    study.write_text(f"prompts: {file}\nnum: 2\nnegative_prompt: snow\nconfigurations: [{{method: ar}}]\n")
    assert run("compare", text_checkpoint, "--config", study, "--out", tmp_path / "out") == 0
    report = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert report["labels"] == TEXTS and report["rows"][0]["settings"]["negative_prompt"] == "snow"
    assert run("compare", text_checkpoint, "--config", study, "--labels", 3, "--out", tmp_path / "other") == 2
    assert "prompt" in capsys.readouterr().err
    study.write_text(f"prompts: {file}\nlabels: 0-3\nconfigurations: [{{method: ar}}]\n")
    assert run("compare", text_checkpoint, "--config", study, "--out", tmp_path / "other") == 2
    assert "prompts" in capsys.readouterr().err


def test_an_edit_with_a_prompt(text_checkpoint, tmp_path, capsys):
    """The upper half of the image's tokens is kept."""
    mask = Image.new("L", (8, 8))
    mask.paste(255, (0, 4, 8, 8))
    mask.save(tmp_path / "mask.png")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "in.png")
    given = ["--image", tmp_path / "in.png", "--mask", tmp_path / "mask.png", "--out", tmp_path / "out"]
    assert run("edit", text_checkpoint, *given, "--method", "ar", "--prompt", "A fox!", "--num", 2) == 0
    assert "8 of 16" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "out").glob("0*.png"))
    assert names == ["00000_text-a-fox_seed0.png", "00001_text-a-fox_seed1.png"]
    assert run("edit", text_checkpoint, *given, "--label", 1) == 2
    assert "prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command, advice",
    [
        ("evaluate", "--prompt"),
        ("compare", "--prompt"),
        ("bench", "cspd compare --prompts"),
        ("tune", "cspd compare --prompts"),
    ],
)
def test_classes_are_for_class_conditional_models(command, advice, text_checkpoint, tmp_path, capsys):
    out = [] if command == "bench" else ["--out", tmp_path / "out"]
    assert run(command, text_checkpoint, *out) == 2
    error = capsys.readouterr().err
    assert advice in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["evaluate", "compare"])
def test_prompts_are_for_text_to_image_models(command, text_checkpoint, file, tmp_path, capsys):
    wrong = {
        "prompt": [small_checkpoint(), "--prompts", file],
        "CLIP" if command == "evaluate" else "--prompts": [small_checkpoint(), "--clip", tmp_path],
        "config.json": [text_checkpoint, "--prompts", file, "--clip", tmp_path],  # no CLIP model is there
    }
    for reason, arguments in wrong.items():
        assert run(command, *arguments, "--out", tmp_path / "out") == 2
        error = capsys.readouterr().err
        assert reason in error and error.count("\n") == 1 and not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        run(command, text_checkpoint, "--prompts", file, "--labels", 3)
    assert "not allowed with" in capsys.readouterr().err
