"""Whose a folder of `cspd evaluate` is, and what does not fit: said in a line, before anything is sampled."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from evaluations import evaluate, report_of, stamps, whole_run  # noqa: F401 - a fixture

from cspd.checkpoints import checkpoint_files
from cspd.evaluation.run import Shards


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
