"""`cspd evaluate`: its report, its folder, its files."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluations import METRICS, NUM, OPTIONS, SEED, arguments, evaluate, images_of, near, report_of, stamps, whole_run  # noqa: F401 - fixtures
from launching import kill_all, start, two_processes, wait_until
from PIL import Image
from stores import small_checkpoint

import cspd
from cspd.checkpoints import checkpoint_files
from cspd.cli import main
from cspd.cli.evaluate import format_evaluation
from cspd.evaluation.run import EXPLODED, SIZE, Shards, arrays_of
from cspd.pixels import to_uint8
from cspd.runs import LOCK


def test_image_i_has_label_i_modulo_their_number_and_seed_plus_i(whole):
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


def test_adms_file_has_the_images_of_the_run(whole):
    with np.load(whole / "adm.npz") as file:
        assert (file["arr_0"] == images_of(whole).transpose(0, 2, 3, 1)).all()


def test_images_have_the_same_intervals_as_a_run_and_as_a_file(whole, tmp_path, capsys):
    """The file has their classes. Without them the intervals are others, and the report says why."""
    arguments = ["evaluate", "--out", str(tmp_path / "out"), "--space", "digits", "--device", "cpu"]
    assert main([*arguments, "--images", str(whole / "adm.npz")]) == 0
    report, of_run = report_of(tmp_path / "out"), report_of(whole)
    for name in METRICS:
        assert report[f"{name}_ci95"] == pytest.approx(of_run[f"{name}_ci95"], rel=1e-6)
    assert "unknown" not in capsys.readouterr().out
    with np.load(whole / "adm.npz") as file:
        assert file["arr_1"].tolist() == [i % 10 for i in range(NUM)]
        np.save(tmp_path / "images.npy", file["arr_0"])
    assert main([*arguments, "--images", str(tmp_path / "images.npy")]) == 0
    assert report_of(tmp_path / "out")["fid_ci95"] != of_run["fid_ci95"]
    assert "unknown classes" in capsys.readouterr().out


def test_the_report_has_all_measurements(whole, capsys):
    assert evaluate(whole) == 0
    out = capsys.readouterr().out
    report = report_of(whole)
    assert report["num"] == NUM and report["space"] == "digits" and set(report["missing"]) == {"sfid", "fd_dinov2"}
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
    for line in ("FID", "inception score", "KID", "precision", "recall", "accuracy", "largest token", "exact\n"):
        assert line in out
    assert Image.open(whole / "grid.png").width > 600 and "divergence" not in out

    sampling |= {
        "guarantee": "approximate",
        "difference": 0.0461,
        "divergence": 0.5,
        "audit": 0.25,
        "audit_error": 0.125,
    }
    request["first_timestep"] = 950
    text = format_evaluation(report)
    for printed in ("approximate, chains from timestep 950\n", "0.046  s.d. of a token", "0.250  +- 0.125 nats"):
        assert printed in text


def test_measuring_again_keeps_the_speed_of_sampling(whole, tmp_path, capsys):
    sampling = report_of(whole)["sampling"]
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    assert evaluate(again) == 0
    assert report_of(again)["sampling"] == sampling and sampling["images_made"] > 0
    assert f"{sampling['images_per_second']:.2f}" in capsys.readouterr().out
    report = report_of(again)
    report["settings"]["request"]["option_of_a_plugin"] = None  # the plug-in is not loaded now
    (again / "evaluation.json").write_text(json.dumps(report))
    assert evaluate(again) == 0
    assert report_of(again)["sampling"] == sampling
    for other in ({"settings": {}}, {"sampling": {"images_made": 7}}):  # of another run, and damaged
        (again / "evaluation.json").write_text(json.dumps(report | other))
        assert evaluate(again) == 0
        assert report_of(again)["sampling"]["images_made"] == 0


@pytest.mark.parametrize("steps, num", [(10, 6), (100, 2)])
def test_exploded_tokens_are_counted(steps, num, tmp_path, capsys):
    """Ten denoising steps are too few: most tokens get far beyond those of the data."""
    settings = {"method": "ar", "num_iter": 2, "num_sampling_steps": steps, "cfg": 1.0}
    requests = [cspd.Request(label=i % 10, seed=SEED + i, **settings) for i in range(num)]
    outputs = cspd.load(small_checkpoint()).generate(requests)
    sizes = [output.tokens.abs().max().item() for output in outputs]
    for _ in range(2):  # measured again, too
        assert evaluate(tmp_path, "--num-sampling-steps", str(steps), num=num) == 0
        report = report_of(tmp_path)
        assert report["largest_token"] == pytest.approx(max(sizes), rel=1e-3)
        assert report["exploded"] == sum(size >= EXPLODED for size in sizes)
        assert (report["exploded"] > 0) == (steps == 10)
        told = f"{report['largest_token']:.2f}  {report['exploded']} of {num} images exploded"
        assert told in capsys.readouterr().out


def test_tokens_that_are_not_finite_have_exploded(tmp_path):
    """JSON has neither NaN nor infinity: the largest float stands in the file."""
    engine = cspd.load(small_checkpoint())
    (output,) = engine.generate([cspd.Request(0, method="ar", num_iter=2, num_sampling_steps=10)])
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
    measure = ["evaluate", "--images", str(folder), "--out", str(out), "--space", "digits"]
    assert main(measure) == 0
    printed = capsys.readouterr().out
    assert evaluate(whole) == 0
    assert near(report_of(out), report_of(whole))
    assert "images/s" not in printed
    report = (whole / "evaluation.json").read_bytes()
    for to, more, hint in (
        (whole, [], "run that sampled"),
        (out, ["--labels", "0-4", "--method", "ar", "--num-iter", "8"], "--labels, --method, --num-iter,"),
    ):
        assert main(["evaluate", "--images", str(folder), "--out", str(to), *more]) == 2
        assert hint in capsys.readouterr().err
    assert (whole / "evaluation.json").read_bytes() == report
    for path in folder.glob("0*.png"):
        path.rename(path.with_name(path.name[:5] + ".png"))
    assert main(measure) == 0
    assert report_of(out)["num"] == NUM and report_of(out)["accuracy"] is None


def test_vq_models_are_evaluated_too(tmp_path, capsys):
    checkpoint = str(checkpoint_files("digits32_vq")["draft"])
    arguments = ["--checkpoint", checkpoint, "--method", "sjd-pac", "--num", "2", "--out", str(tmp_path)]
    assert main(["evaluate", "--space", "digits", *arguments]) == 0
    out = capsys.readouterr().out
    assert "sjd-pac" in out
    assert report_of(tmp_path)["sampling"]["step_compression"] > 1
    assert torch.isfinite(torch.tensor(report_of(tmp_path)["fid"]))
    assert report_of(tmp_path)["largest_token"] is None and "largest token" not in out


# ---- Another run's folder and bad settings are refused before anything is sampled


@pytest.mark.parametrize(
    "change, differences",
    [
        (["--seed", "12"], ["seed"]),
        (["--cfg", "2.5", "--temperature", "0.9"], ["request.cfg", "request.temperature"]),
        (["--labels", "3,4"], ["labels"]),
        (["--num-images", "59"], ["images"]),
        (["--precision", "bf16"], ["precision"]),
        (["--compile"], ["compiled"]),
        (["--method", "speculative", "--window", "4"], ["request.method"]),
    ],
)
def test_a_changed_setting_is_refused_with_the_difference(whole, capsys, change, differences):
    before = stamps(whole)
    capsys.readouterr()
    assert evaluate(whole, *change) == 2
    error = capsys.readouterr().err
    assert "--overwrite" in error and error.count("\n") == 1
    assert all(difference in error for difference in differences), error
    assert stamps(whole) == before


def test_overwriting_with_a_bad_setting_keeps_the_old_run(whole, capsys):
    before = {path: path.stat().st_mtime_ns for path in whole.iterdir()}
    for bad, hint in ((["--labels", "3,12"], "0..9"), (["--seed", str(2**63 - 2)], "seed")):
        assert evaluate(whole, *bad, "--overwrite") == 2
        assert hint in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in whole.iterdir()} == before


@pytest.mark.parametrize(
    "options, hint",
    [
        (["--ref", "nowhere.npz"], "nowhere.npz"),
        (["--ref", str(Path(__file__).parent)], "no images"),
        (["--space", "inception", "--weights", "nowhere.pth"], "nowhere.pth"),
        (["--labels", "3,12"], "0..9"),
        (["--checkpoint", "nowhere"], "no checkpoint there"),
        (["--num-iter", "65"], "1..64"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_sampled(options, hint, tmp_path, capsys):
    assert evaluate(tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert hint in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


# ---- Damaged files, files of other images and unfinished ones are generated again, and nothing else is


@pytest.mark.slow
def test_killed_processes_lose_only_unfinished_images(whole, tmp_path):
    """The run is resumed by two processes, one of which measures, and its copy by one."""
    out, copy, log = tmp_path / "killed", tmp_path / "copy", tmp_path / "log"
    run = start(arguments(out), log, two_processes())
    try:
        wait_until(lambda: len(stamps(out)) >= 2 or run.poll() is not None)
    finally:
        kill_all(run)
    finished = stamps(out)
    assert 2 <= len(finished) < 4, log.read_text()[-2000:]
    assert not (out / "evaluation.json").exists()
    shutil.copytree(out, copy)
    run = start(arguments(out), log, two_processes())
    assert evaluate(copy) == 0
    assert run.wait(timeout=60) == 0, log.read_text()[-2000:]
    shown = log.read_text()
    assert f"{NUM}/{NUM} [" in shown and "image/s]" in shown  # one bar for both processes
    assert evaluate(whole) == 0
    shards = Shards(whole, NUM)
    existing = sum(len(shards.indices(int(name.removesuffix(".npz")))) for name in finished)
    for folder, size in ((out, 2), (copy, 1)):
        assert finished.items() <= stamps(folder).items()
        sampling = report_of(folder)["sampling"]
        assert sampling["processes"] == size
        # the other process may have written a shard before this one began
        assert 0 < sampling["images_made"] <= NUM - existing
        files = [path for path in folder.iterdir() if path.name != LOCK]
        assert sorted(path.suffix for path in files) == [".json", ".json", ".jsonl", *[".npz"] * 4, ".png"]
        assert np.abs(images_of(folder) - images_of(whole)).max() <= 1
        assert Shards(folder, NUM).subjects() == shards.subjects()
        assert near(report_of(folder), report_of(whole))


def test_damaged_files_are_noticed_and_generated_again(whole, capsys):
    before, images = stamps(whole), images_of(whole)
    content = (whole / "00001.npz").read_bytes()
    (whole / "00001.npz").write_bytes(content[: len(content) // 2])
    resaved(whole / "00002.npz", images=255 - arrays_in(whole / "00002.npz")["images"])
    (whole / "00003.npz").unlink()
    capsys.readouterr()
    assert evaluate(whole, "--max-batch", "3") == 0
    after = stamps(whole)
    assert [name for name in before if before[name] != after[name]] == ["00001.npz", "00002.npz", "00003.npz"]
    assert np.abs(images_of(whole) - images).max() <= 1
    captured = capsys.readouterr()
    assert "42 images in" in captured.out  # 16 + 16 + 10
    assert "2 files" in captured.err and "00001.npz, 00002.npz\n" in captured.err


def arrays_in(path):
    with np.load(path) as file:
        return dict(file)


def resaved(path, **changes):
    """Replaces arrays of an archive, with checksums that are right, or removes one whose change is None."""
    arrays = arrays_in(path) | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


def manifest_of(out):
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["files"], manifest["temporary"]
    return manifest


OLD = {"digest": None}  # older versions wrote no digest
CHANGES = {
    "too few": lambda path, arrays: shutil.copy(path.with_name("00003.npz"), path),
    "of other images": lambda path, arrays: shutil.copy(path.with_name("00000.npz"), path),
    "inverted": lambda path, arrays: resaved(path, images=255 - arrays["images"]),
    "smaller": lambda path, arrays: resaved(path, images=arrays["images"][:, ::2, ::2], **OLD),
    "seeds": lambda path, arrays: resaved(path, seeds=arrays["seeds"] + 1, **OLD),
    "labels": lambda path, arrays: resaved(path, labels=arrays["labels"][::-1], **OLD),
    "floats": lambda path, arrays: resaved(path, images=arrays["images"] / 255, **OLD),
    "without statistics": lambda path, arrays: resaved(path, stats=None, **OLD),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_of_other_images_is_missing(whole, tmp_path, capsys, change):
    out = shutil.copytree(whole, tmp_path / "out")
    manifest = manifest_of(out)
    assert Shards(out, NUM, manifest).missing(32) == []
    change(out / "00001.npz", arrays_in(out / "00001.npz"))
    assert Shards(out, NUM, manifest).missing(32) == [1]
    assert "00001.npz" in capsys.readouterr().err
    assert Shards(out, NUM, manifest | {"compiled": True}).missing(32) == [0, 1, 2, 3]  # another run's


def test_a_file_that_another_run_writes_meanwhile_is_not_measured(whole, tmp_path):
    """The lock ends with the first process of a run. Its other processes may outlive that for a while."""
    out = shutil.copytree(whole, tmp_path / "out")
    manifest = manifest_of(out)
    shards = Shards(out, NUM, manifest)
    assert (shards[SIZE] == Shards(whole, NUM)[SIZE]).all()
    arrays = arrays_in(out / "00002.npz")
    del arrays["digest"]
    Shards(out, NUM, manifest | {"seed": SEED + 1}).write(2, arrays)
    with pytest.raises(OSError, match=r"00002\.npz"):
        shards[2 * SIZE]
