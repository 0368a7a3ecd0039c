"""`cspd evaluate`: its report, its folder, its files."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_fidelity
from evaluations import METRICS, NUM, OPTIONS, SEED, arguments, evaluate, images_of, near, report_of, stamps, whole_run  # noqa: F401 - fixtures
from launching import environment, free_port, kill_all, start, two_processes, wait_until
from PIL import Image
from stores import small_checkpoint, small_vq_checkpoint

import cspd
from cspd.checkpoints import checkpoint_files
from cspd.cli import main
from cspd.cli.evaluate import format_evaluation
from cspd.evaluation import run as evaluation_run
from cspd.evaluation.images import ImageFolder
from cspd.evaluation.run import EXPLODED, SIZE, Shards, arrays_of
from cspd.request import to_uint8
from cspd.runs import LOCK


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


# ---- Whose a folder of `cspd evaluate` is, and what does not fit: said in a line, before anything is sampled


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


def test_other_weights_are_another_run(whole, tmp_path, capsys):
    vae = tmp_path / "vae.safetensors"
    vae.write_bytes(checkpoint_files("digits32")["vae"].read_bytes())
    assert evaluate(whole, "--vae", str(vae)) == 2
    assert "vae.file" in capsys.readouterr().err
    assert evaluate(tmp_path / "out", "--vae", str(vae), num=2) == 0
    os.utime(vae, ns=(0, 0))  # the same name and size, another time
    assert evaluate(tmp_path / "out", "--vae", str(vae), num=2) == 2
    assert "vae.modified" in capsys.readouterr().err


def test_a_setting_that_only_one_side_has_is_refused(tmp_path, capsys):
    assert evaluate(tmp_path, num=2) == 0
    manifest = tmp_path / "manifest.json"
    content = json.loads(manifest.read_text())
    for changed, difference in (
        ({name: content[name] for name in content if name != "precision"}, "precision"),
        (content | {"rotated": 90}, "rotated"),
    ):
        manifest.write_text(json.dumps(changed))
        assert evaluate(tmp_path, num=2) == 2
        assert difference in capsys.readouterr().err


def test_images_without_a_manifest_are_not_taken_over(tmp_path, capsys):
    assert evaluate(tmp_path, num=4) == 0
    (tmp_path / "00001.npz").write_text("somebody's")
    assert evaluate(tmp_path, "--overwrite", num=3) == 0
    assert report_of(tmp_path)["num"] == 3 and report_of(tmp_path)["sampling"]["images_made"] == 3
    assert len(Shards(tmp_path, 3).subjects()) == 3 and (tmp_path / "00001.npz").read_text() == "somebody's"
    (tmp_path / "manifest.json").unlink()
    assert evaluate(tmp_path, num=4) == 2
    assert "00000.npz" in capsys.readouterr().err
    assert evaluate(tmp_path, "--overwrite", num=4) == 2
    (tmp_path / "manifest.json").write_text("{")
    assert evaluate(tmp_path, num=3) == 2
    assert capsys.readouterr().err
    for foreign in ("[]", '{"name": "an app", "request": []}'):
        (tmp_path / "manifest.json").write_text(foreign)
        assert evaluate(tmp_path, num=3) == 2
        assert capsys.readouterr().err


def test_overwriting_with_a_bad_setting_keeps_the_old_run(whole, capsys):
    def content():
        return {path.name: path.stat().st_mtime_ns for path in whole.iterdir()}

    before = content()
    for bad, hint in ((["--labels", "3,12"], "0..9"), (["--seed", str(2**63 - 2)], "seed")):
        assert evaluate(whole, *bad, "--overwrite") == 2
        assert hint in capsys.readouterr().err
        assert content() == before


def test_the_window_that_was_chosen_first_is_kept(tmp_path, capsys):
    more = ["--method", "speculative", "--draft", "frozen"]
    assert evaluate(tmp_path, *more, "--window", "5", num=20) == 0  # one that no machine chooses by itself
    before = Shards(tmp_path, 20)[17]
    (tmp_path / "00001.npz").unlink()
    assert evaluate(tmp_path, *more, num=20) == 0
    assert report_of(tmp_path)["settings"]["request"]["window"] == 5
    assert (before.int() - Shards(tmp_path, 20)[17].int()).abs().max() <= 1
    assert evaluate(tmp_path, *more, "--window", "4", num=20) == 2
    assert "request.window" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said_in_a_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert evaluate(tmp_path / "file") == 2
    assert "--out" in capsys.readouterr().err
    assert evaluate(tmp_path / "file" / "below") == 2
    assert "--out" in capsys.readouterr().err
    assert evaluate(Path("/proc/nowhere")) == 2
    error = capsys.readouterr().err
    assert "/proc/nowhere" in error and "--out" in error and error.count("\n") == 1


def test_what_cannot_be_measured_is_said_before_anything_is_sampled(tmp_path, capsys):
    for more, hint in (
        (["--ref", "nowhere.npz"], "nowhere.npz"),
        (["--space", "inception", "--weights", "nowhere.pth"], "nowhere.pth"),
        (["--labels", "3,12"], "0..9"),
        (["--checkpoint", "nowhere"], "no checkpoint there"),
        (["--num-iter", "65"], "1..64"),
    ):
        assert evaluate(tmp_path / "out", *more) == 2
        error = capsys.readouterr().err
        assert hint in error and error.count("\n") == 1
        assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        evaluate(tmp_path, "--num", "0")


# ---- Files of `cspd evaluate` that are damaged, of other images or of a killed run are made again, and nothing else is


@pytest.mark.slow
def test_killed_processes_lose_what_was_unfinished_and_nothing_else(whole, tmp_path):
    out, copy, log = tmp_path / "killed", tmp_path / "copy", tmp_path / "log"
    run = start(arguments(out), log, two_processes())
    try:
        wait_until(lambda: len(stamps(out)) >= 2 or run.poll() is not None)
    finally:
        kill_all(run)
    finished = stamps(out)
    assert 2 <= len(finished) < 4, log.read_text()[-2000:]
    assert not (out / "evaluation.json").exists()
    time.sleep(0.5)
    assert stamps(out) == finished  # they are gone
    shutil.copytree(out, copy)
    run = start(arguments(out), log, two_processes())
    assert evaluate(copy) == 0
    assert run.wait(timeout=60) == 0, log.read_text()[-2000:]
    shown = log.read_text()
    assert f"{NUM}/{NUM} [" in shown and "image/s]" in shown  # one bar, of both processes
    assert evaluate(whole) == 0
    for folder, size in ((out, 2), (copy, 1)):
        assert {name: stamps(folder)[name] for name in finished} == finished
        sampling = report_of(folder)["sampling"]
        assert sampling["processes"] == size
        assert sampling["images_made"] == NUM - sum(count_of(name) for name in finished)
        files = [path for path in folder.iterdir() if path.name != LOCK]
        assert sorted(path.suffix for path in files) == [".json", ".json", *[".npz"] * 4, ".png"]
        assert np.abs(images_of(folder) - images_of(whole)).max() <= 1
        assert Shards(folder, NUM).subjects() == Shards(whole, NUM).subjects()
        assert near(report_of(folder), report_of(whole))


def count_of(name):
    return len(Shards(Path(), NUM).indices(int(name.removesuffix(".npz"))))


TOGETHER = """
import os, runpy, sys
Processes = runpy.run_path(sys.argv[1])["Processes"]  # alone: all of cspd takes seconds to import

def fail():
    if processes.rank == 1:
        raise ValueError("one is bad")

def die():
    if processes.rank == 1:
        os.kill(os.getpid(), 9)

with Processes() as processes:
    print(processes.from_first(lambda: processes.rank + 5), processes.together(lambda: processes.rank + 5), flush=True)
    for work in (fail, die):
        try:
            processes.together(work)
        except (SystemExit, ValueError, OSError) as error:
            print(type(error).__name__, error, flush=True)
"""


@pytest.mark.slow
def test_no_process_waits_for_one_that_failed():
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, evaluation_run.__file__],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **shared),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [run.communicate(timeout=60)[0].splitlines() for run in runs]
    assert outputs[0][:2] == ["5 5", "SystemExit 2"] and outputs[1] == ["5 6", "ValueError one is bad"]
    assert outputs[0][2].startswith("OSError another process of this run is gone")
    assert runs[1].returncode == -signal.SIGKILL


def test_damaged_files_are_noticed_and_made_again(whole, capsys):
    before, images = stamps(whole), images_of(whole)
    content = (whole / "00001.npz").read_bytes()
    (whole / "00001.npz").write_bytes(content[: len(content) // 2])  # cut
    content = bytearray((whole / "00002.npz").read_bytes())
    content[5000] ^= 1  # one bit of a picture
    (whole / "00002.npz").write_bytes(content)
    (whole / "00003.npz").unlink()
    left, foreign = whole / "00003.npz.tmp", {whole / "00003.npz.4711.tmp", whole / "00004.npz.tmp"}
    for half in (left, *foreign):
        half.write_bytes(b"half")
    capsys.readouterr()
    assert evaluate(whole, "--max-batch", "3") == 0
    after = stamps(whole)
    assert [name for name in before if before[name] != after[name]] == ["00001.npz", "00002.npz", "00003.npz"]
    assert np.abs(images_of(whole) - images).max() <= 1
    captured = capsys.readouterr()
    assert "42 images in" in captured.out  # 16 + 16 + 10
    assert "2 files are damaged, incomplete or of other images, and made again: 00001.npz, 00002.npz\n" in captured.err
    assert set(whole.glob("*.tmp")) == foreign  # no names of this run's
    for half in foreign:
        half.unlink()


def arrays_in(path):
    with np.load(path) as file:
        return dict(file)


def resaved(path, **changes):
    """The archive with other arrays in it, and all of its checksums right; a change that is None leaves one out."""
    arrays = arrays_in(path) | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


def old(path, **changes):
    """The same, of a version that wrote no digest."""
    resaved(path, digest=None, **changes)


CHANGES = {
    "of too few images": lambda path: shutil.copy(path.with_name("00003.npz"), path),
    "of other images": lambda path: shutil.copy(path.with_name("00000.npz"), path),
    "inverted": lambda path: resaved(path, images=255 - arrays_in(path)["images"]),
    "seeds": lambda path: resaved(path, seeds=arrays_in(path)["seeds"] + 1),
    "labels": lambda path: resaved(path, labels=arrays_in(path)["labels"][::-1]),
    "smaller": lambda path: resaved(path, images=arrays_in(path)["images"][:, ::2, ::2]),
    "old seeds": lambda path: old(path, seeds=arrays_in(path)["seeds"] + 1),
    "old labels": lambda path: old(path, labels=arrays_in(path)["labels"][::-1]),
    "old smaller": lambda path: old(path, images=arrays_in(path)["images"][:, ::2, ::2]),
    "old floats": lambda path: old(path, images=arrays_in(path)["images"] / 255),
    "old objects": lambda path: old(path, images=arrays_in(path)["images"].astype(object)),
    "old without statistics": lambda path: old(path, stats=None),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_of_other_images_is_to_be_made_again(whole, tmp_path, capsys, change):
    out = shutil.copytree(whole, tmp_path / "out")
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["files"], manifest["temporary"]
    assert Shards(out, NUM, manifest).missing(32) == []
    change(out / "00001.npz")
    assert Shards(out, NUM, manifest).missing(32) == [1]
    assert "00001.npz" in capsys.readouterr().err
    assert Shards(out, NUM, manifest | {"compiled": True}).missing(32) == [0, 1, 2, 3]  # another run's


def test_a_file_that_another_run_writes_meanwhile_is_not_measured(whole, tmp_path):
    """The lock ends with a run's first process. Others of its processes may outlive that for a while."""
    out = shutil.copytree(whole, tmp_path / "out")
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["files"], manifest["temporary"]
    shards = Shards(out, NUM, manifest)
    assert shards.missing(32) == [] and (shards[SIZE] == Shards(whole, NUM)[SIZE]).all()
    arrays = arrays_in(out / "00002.npz")
    del arrays["digest"]
    Shards(out, NUM, manifest | {"seed": SEED + 1}).write(2, arrays)
    with pytest.raises(OSError, match=r"00002\.npz"):
        shards[2 * SIZE]


def test_a_file_of_other_images_is_made_again(whole, capsys):
    images = images_of(whole)
    resaved(whole / "00001.npz", images=255 - arrays_in(whole / "00001.npz")["images"])
    shutil.copy(whole / "00003.npz", whole / "00002.npz")
    capsys.readouterr()
    assert evaluate(whole) == 0
    assert np.abs(images_of(whole) - images).max() <= 1
    assert "32 " in capsys.readouterr().out
