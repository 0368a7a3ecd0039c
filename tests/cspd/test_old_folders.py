"""Folders that version 0.1.0 left unfinished go on: records as it wrote them, and black images that must stay."""

from __future__ import annotations

import json
import re

import numpy as np
from conftest import GOLDEN
from PIL import Image
from stores import small_checkpoint

from cspd.cli import main
from cspd.evaluation.run import Shards

OPTIONS = ["--num-iter", "2", "--num-sampling-steps", "10", "--cfg", "1", "--labels", "3,4"]
SPECULATIVE = ["--method", "speculative", "--draft", "frozen"]  # the window, 5, was chosen by the earlier run
STATS = json.loads((GOLDEN / "old_folders" / "samples.json").read_text())["images"][0]["stats"]
COSTS = {"head_calls_per_token": 10.0, "head_calls": 20, "backbone_calls": 2, "draft_backbone_calls": 0}
COSTS |= {"step_compression": None, "bound": 0.0, "judged": 0, "accepted": 0}


def run(command, out, *more):
    assert main([command, "--checkpoint", small_checkpoint(), *OPTIONS, *more, "--out", str(out)]) == 0


def old(name):
    return json.loads((GOLDEN / "old_folders" / name).read_text())


def black(num):
    return np.zeros((num, 32, 32, 3), np.uint8)


def test_samples(tmp_path):
    run("sample", tmp_path, *SPECULATIVE, "--window", "5", "--num", "2")
    record = tmp_path / "samples.json"
    record.write_text(json.dumps(old("samples.json") | {"settings": json.loads(record.read_text())["settings"]}))
    kept, lost = tmp_path / "00000_label3_seed0.png", tmp_path / "00001_label4_seed1.png"
    Image.fromarray(black(1)[0]).save(kept)
    made = np.asarray(Image.open(lost), int)
    lost.unlink()
    run("sample", tmp_path, *SPECULATIVE, "--num", "2")
    assert not np.asarray(Image.open(kept)).any()
    assert np.abs(np.asarray(Image.open(lost), int) - made).max() <= 1
    assert json.loads(record.read_text())["summary"]["window"] == 5


def test_comparisons(tmp_path):
    run("compare", tmp_path, "--methods", "ar", "--max-batch", "2", "--num", "2")
    record, now = tmp_path / "run.json", json.loads((tmp_path / "run.json").read_text())["settings"]
    earlier = old("run.json")
    earlier["settings"]["machine"] = now["machine"]
    for configuration in earlier["settings"]["configurations"].values():
        configuration["files"] = now["configurations"]["ar"]["files"]
    record.write_text(json.dumps(earlier))
    chunk = {"images": None, "seconds": 0.1, "peak_bytes": 10, "costs": [COSTS, COSTS]}
    for path in (tmp_path / "chunks").iterdir():
        path.unlink()
    kept = tmp_path / "chunks" / "00-00000.npz"
    np.savez(kept, arr_0=black(2), chunk=np.frombuffer(json.dumps(chunk).encode(), np.uint8))
    before = kept.read_bytes()
    methods = "speculative:draft=frozen"  # with ar listed, its 64 iterations would be left out, which are there
    run("compare", tmp_path, "--methods", methods, "--max-batch", "2", "--num", "3")  # one more image
    assert kept.read_bytes() == before and len(list((tmp_path / "chunks").iterdir())) == 6
    rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert [row["window"] for row in rows] == [None, None, 5]
    now = json.loads(record.read_text())
    assert "chunks/02-00001.npz.tmp" in now.pop("temporary")
    assert "chunks/02-00001.npz" in now.pop("files") and now.pop("windows").keys() == earlier.pop("windows").keys()
    assert now == earlier


def test_whole_numbers_are_floats_now(tmp_path):
    """In a record as 0.1.0 wrote it of `cfg=2`: the names are the same, and so are the images."""
    methods = ["--methods", "speculative:cfg=2:draft=frozen:window=3", "--max-batch", "2", "--num", "2"]
    run("compare", tmp_path, *methods)
    record, stamps = tmp_path / "run.json", {}
    as_before = re.sub(r"\b2\.0\b", "2", record.read_text())
    assert json.loads(as_before)["settings"]["order"] == ["ar", "ar:num_iter=64", "ar:cfg=2", methods[1]]
    record.write_text(as_before)
    for path in (tmp_path / "chunks").iterdir():
        stamps[path] = path.stat().st_mtime_ns
    run("compare", tmp_path, *methods)
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "chunks").iterdir()}


def test_evaluations(tmp_path):
    run("evaluate", tmp_path, *SPECULATIVE, "--window", "5", "--num", "18")
    manifest, made = tmp_path / "manifest.json", Shards(tmp_path, 18)[17]
    now = json.loads(manifest.read_text())
    settings = {name: now[name] for name in ("version", "precision", "compiled", "target", "vae")}
    manifest.write_text(json.dumps(old("manifest.json") | settings))
    kept = tmp_path / "00000.npz"
    stats = np.array(json.dumps([STATS] * 16))
    np.savez(kept, images=black(16), labels=np.array([3, 4] * 8), seeds=np.arange(16), stats=stats)
    before = kept.read_bytes()
    (tmp_path / "00001.npz").unlink()
    run("evaluate", tmp_path, *SPECULATIVE, "--num", "18")
    assert kept.read_bytes() == before
    assert (Shards(tmp_path, 18)[17].int() - made.int()).abs().max() <= 1
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert report["settings"]["request"]["window"] == 5 and report["sampling"]["images_made"] == 2
    assert report["largest_token"] is None and report["exploded"] is None  # not known of the older images
