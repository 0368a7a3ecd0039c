"""`cspd evaluate`: images that depend on their index alone, and a report of all that was measured of them."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
import torch_fidelity
from evaluations import METRICS, NUM, OPTIONS, SEED, evaluate, images_of, near, report_of, stamps, whole_run  # noqa: F401 - a fixture
from PIL import Image
from stores import small_checkpoint, small_vq_checkpoint

import cspd
from cspd.cli import main
from cspd.cli.evaluate import format_evaluation
from cspd.evaluation.images import ImageFolder
from cspd.evaluation.run import EXPLODED, Shards, arrays_of
from cspd.request import to_uint8


def test_image_i_is_of_label_i_in_turn_and_seed_plus_i(whole):
    assert len(stamps(whole)) == 4
    shards = Shards(whole, NUM)
    for shard in range(shards.count):
        assert shards.read(shard, "seeds").tolist() == [SEED + i for i in shards.indices(shard)]
    assert shards.subjects() == [i % 10 for i in range(NUM)]
    some = [0, 15, 16, 48, 57]
    settings = {"method": "ar", "num_iter": 2, "num_sampling_steps": 10, "cfg": 1.0}
    engine = cspd.load(small_checkpoint(), max_batch=2)
    outputs = engine.generate([cspd.Request(label=i % 10, seed=SEED + i, **settings) for i in some])
    images = images_of(whole)
    for i, output in zip(some, outputs):
        assert np.abs(images[i] - to_uint8(output.image).numpy()).max() <= 1
    with pytest.raises(IndexError):
        shards[NUM]


def test_the_report_is_torch_fidelitys_of_the_same_images_as_pngs(whole, tmp_path, capsys):
    with np.load(whole / "adm.npz") as file:
        images = file["arr_0"]
    assert (images == images_of(whole).transpose(0, 2, 3, 1)).all()
    for i, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{i:03d}.png")
    reference = tmp_path / "reference"
    reference.mkdir()
    for i in range(50):
        Image.fromarray(images[i, :, ::-1]).save(reference / f"{i}.png")
    assert evaluate(whole, "--ref", str(reference)) == 0
    ours = report_of(whole)
    options = {"feature_extractor": "cspd-digits", "cuda": False, "verbose": False, "cache": False}
    theirs = torch_fidelity.calculate_metrics(
        input1=str(tmp_path), input2=str(reference), isc=True, fid=True, save_cpu_ram=True, **options
    )
    assert ours["fid"] == pytest.approx(theirs["frechet_inception_distance"], rel=1e-5)
    assert ours["inception_score"] == pytest.approx(theirs["inception_score_mean"], rel=1e-5)
    out = capsys.readouterr().out
    assert f"{ours['fid']:.3f}" in out and ours["reference"]["fingerprint"][:12] in out


def test_the_report_says_all_that_was_measured(whole, capsys):
    assert evaluate(whole) == 0
    out = capsys.readouterr().out
    report = report_of(whole)
    assert report["num"] == NUM and report["space"] == "digits" and not report["missing"]
    assert all(isinstance(report[name], float) for name in METRICS)
    assert report["reference"]["name"] == "reference.npz"
    request = report["settings"]["request"]
    assert (request["method"], request["num_iter"], request["temperature"]) == ("ar", 2, 1.0)
    assert report["settings"]["target"]["file"] == "target.safetensors"
    models = {model["role"]: model for model in report["ran"]["models"]}
    assert models.keys() == {"target", "vae"} and models["target"]["parameters"] > 8e5
    assert report["ran"]["command"].startswith("cspd evaluate ")
    low, high = report["accuracy_ci95"]
    assert 0 <= low < report["accuracy"] <= high <= 1 and f"{low:.1%} to {high:.1%}" in out
    sampling = report["sampling"]
    assert sampling["head_calls_per_token"] == 10 and sampling["guarantee"] == "exact"
    assert sampling["machine"]["torch"] == torch.__version__
    for line in ("FID", "inception score", "KID", "precision", "recall", "accuracy", "largest token", "exact"):
        assert line in out
    assert Image.open(whole / "grid.png").width > 600

    assert "exact\n" in out and "divergence" not in out
    sampling |= {"guarantee": "measured", "difference": 0.0461, "divergence": 0.5, "audit": 0.25, "audit_error": 0.125}
    request["first_timestep"] = 950
    text = format_evaluation(report)
    for told in ("measured, chains from timestep 950\n", "0.046  s.d. of a token", "0.250  +- 0.125 nats"):
        assert told in text


def test_measuring_again_keeps_the_speed_of_the_run_that_made_the_images(whole, tmp_path, capsys):
    sampling = report_of(whole)["sampling"]
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    assert evaluate(again) == 0
    assert report_of(again)["sampling"] == sampling and sampling["images_made"] > 0
    assert f"{sampling['images_per_second']:.2f}" in capsys.readouterr().out
    report = report_of(again)
    report["settings"]["request"]["option_of_a_plugin"] = None  # which is not given now
    (again / "evaluation.json").write_text(json.dumps(report))
    assert evaluate(again) == 0
    assert report_of(again)["sampling"] == sampling
    for lost in ("", "{", '{"sampling": {"images_made": 7}, "settings": {}}'):  # none of this run's
        (again / "evaluation.json").write_text(lost)
        assert evaluate(again) == 0
        assert report_of(again)["sampling"]["images_made"] == 0
        assert capsys.readouterr().out


def test_exploded_tokens_are_counted(tmp_path, capsys):
    """Ten denoising steps are too few: most tokens get far beyond what the data's reach."""
    for steps, num in ((10, 20), (100, 4)):
        out = tmp_path / str(steps)
        settings = {"method": "ar", "num_iter": 2, "num_sampling_steps": steps, "cfg": 1.0}
        assert evaluate(out, "--num-sampling-steps", str(steps), num=num) == 0
        outputs = cspd.load(small_checkpoint()).generate(
            [cspd.Request(label=i % 10, seed=SEED + i, **settings) for i in range(num)]
        )
        sizes = [output.tokens.abs().max().item() for output in outputs]
        report = report_of(out)
        assert report["largest_token"] == pytest.approx(max(sizes), rel=1e-3)
        assert report["exploded"] == sum(size >= EXPLODED for size in sizes)
        printed = capsys.readouterr().out
        line = f"{'largest token':<18} {report['largest_token']:>10.2f}  {report['exploded']} of {num} images exploded"
        assert line in printed
        assert report["exploded"] > 0 if steps == 10 else report["exploded"] == 0
        assert evaluate(out, "--num-sampling-steps", str(steps), num=num) == 0  # measured again
        assert {name: report_of(out)[name] for name in ("largest_token", "exploded")} == {
            name: report[name] for name in ("largest_token", "exploded")
        }


def test_tokens_that_are_no_numbers_have_exploded(tmp_path):
    """In the file of their images, and in the report, which is JSON: that has neither NaN nor infinity."""
    engine = cspd.load(small_checkpoint())
    settings = {"method": "ar", "num_iter": 2, "num_sampling_steps": 10}
    (output,) = engine.generate([cspd.Request(0, **settings)])
    for bad in (torch.nan, torch.inf, -torch.inf):
        tokens = output.tokens.clone()
        tokens[3, 1] = bad
        shards = Shards(tmp_path, 1, {"labels": [0], "seed": 0})
        shards.write(0, arrays_of([dataclasses.replace(output, tokens=tokens)]))
        assert shards.largest_tokens() == {"largest_token": torch.finfo(torch.float32).max, "exploded": 1}


def test_a_folder_of_samples_is_measured_like_the_run_of_the_same_seeds(whole, tmp_path, capsys):
    folder, out = tmp_path / "samples", tmp_path / "out"
    settings = ["--checkpoint", small_checkpoint(), *OPTIONS, "--num", str(NUM), "--out", str(folder)]
    assert main(["sample", *settings]) == 0
    assert (folder / "grid.png").exists()
    capsys.readouterr()
    assert main(["evaluate", "--images", str(folder), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert evaluate(whole) == 0
    assert near(report_of(out), report_of(whole))
    assert "images/s" not in printed
    for path in folder.glob("0*.png"):
        path.rename(path.with_name(path.name[:5] + ".png"))
    assert len(ImageFolder(folder)) == NUM
    assert main(["evaluate", "--images", str(folder), "--out", str(out)]) == 0
    assert report_of(out)["accuracy"] is None
    report = (whole / "evaluation.json").read_bytes()
    for to, more, hint in (
        (whole, [], "holds the report of a run"),
        (out, ["--labels", "0-4", "--method", "ar", "--num-iter", "8"], "leave out --labels, --method, --num-iter,"),
        (out, ["--overwrite"], "leave out --overwrite"),
    ):
        assert main(["evaluate", "--images", str(folder), "--out", str(to), *more]) == 2
        assert hint in capsys.readouterr().err
    assert (whole / "evaluation.json").read_bytes() == report
    assert main(["evaluate", "--images", str(folder), "--out", str(out), "--space", "digits", "--device", "cpu"]) == 0


def test_vq_models_are_evaluated_too(tmp_path, capsys):
    arguments = ["--checkpoint", small_vq_checkpoint(), "--method", "sjd-pac", "--num", "2", "--out", str(tmp_path)]
    assert main(["evaluate", *arguments]) == 0
    out = capsys.readouterr().out
    assert "sjd-pac" in out
    assert report_of(tmp_path)["sampling"]["step_compression"] > 1
    assert torch.isfinite(torch.tensor(report_of(tmp_path)["fid"]))
    assert report_of(tmp_path)["largest_token"] is None and "largest token" not in out
