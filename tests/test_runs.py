"""The folder of a run: its record, its lock, its files, and what kills and full disks leave."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
import zipfile
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from comparisons import NAMES
from conftest import GOLDEN
from folders import FILES, RECORD, begun, content, record_of, store_of
from launching import free_port, kill_all, kill_launcher, start, two_processes, wait_until
from PIL import Image
from stores import small_checkpoint

from cspd import runs
from cspd.checkpoints import checkpoint_files
from cspd.cli import main
from cspd.device import describe
from cspd.evaluation.run import Shards
from cspd.files import DIGEST, append_json, check_file, publishing, read_item, write_item, write_json
from cspd.runs import DECIDED, LOCK, differences, earlier_choices, write_png
from cspd.terminal import __version__


def test_files_are_written_whole_or_not_at_all(tmp_path):
    for name in ("a.tmp", "a.json.tmp", f"a.json.{os.getpid()}.tmp", "a.png.tmp", "a.png.1.tmp"):
        (tmp_path / name).write_text("somebody's")  # whose names are not taken
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": {1}})
    assert (tmp_path / "a.json").read_text() == '{\n "a": 1\n}\n'
    picture = Image.new("RGB", (2, 2), "red")
    write_png(tmp_path / "a.png", picture)
    with pytest.raises(AttributeError):
        write_png(tmp_path / "a.png", None)
    assert Image.open(tmp_path / "a.png").getpixel((0, 0)) == (255, 0, 0)
    with pytest.raises(OSError):
        with publishing(tmp_path / "a.png") as temporary:
            temporary.write_bytes(b"half")
            raise OSError(28, "No space left on device")
    assert Image.open(tmp_path / "a.png").size == (2, 2)
    assert [path.read_text() for path in tmp_path.glob("*.tmp")] == ["somebody's"] * 5
    with pytest.raises(OSError, match=r"b\.txt"):
        append_json(tmp_path / "absent" / "b.txt", {})


def test_what_is_no_file_is_not_replaced(tmp_path):
    """Such as a pipe, or /dev/null: a name in its place would be an ordinary file from then on."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=name):
            write_json(tmp_path / name, {})
        with pytest.raises(ValueError, match=name):
            check_file(tmp_path / name, "--json")
    with pytest.raises(ValueError, match="--json"):
        check_file(tmp_path, "--json")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "link"}


def test_names_that_cannot_be_written_are_told_before_any_work(tmp_path):
    """Also where only the name of the temporary file is too long."""
    for length in (252, 300):
        with pytest.raises(OSError, match="--json"):
            check_file(tmp_path / ("a" * length), "--json")
    check_file(tmp_path / ("a" * 251), "--json")
    assert not list(tmp_path.iterdir())


# ---- The store under `sample`, `compare` and `evaluate`: whose a folder is, what is replaced


# whose a folder is


def test_what_one_side_alone_has_differs():
    assert differences({"a": 1}, {"a": 1, "b": 2}) == ["b was nothing, now 2"]
    assert differences({"a": 1, "b": 2}, {"a": 1}) == ["b was 2, now nothing"]
    assert differences({"a": {"c": 1}}, {"a": {"c": 1, "d": {"e": 1}}}) == ["a.d was nothing, now something"]
    assert differences({"a": 1}, {"a": 1, "b": None}) == differences({"a": 1, "b": None}, {"a": 1}) == []


@pytest.mark.parametrize("old, new", [({}, {"cfg": 1}), ({"cfg": 1}, {}), ({"cfg": 1}, {"cfg": 2})])
def test_a_record_of_other_settings_is_refused(tmp_path, old, new):
    begun(tmp_path, seed=0, **old)
    before = content(tmp_path)
    with pytest.raises(ValueError, match="--out"):
        begun(tmp_path, seed=0, **new)
    assert content(tmp_path) == before


def test_a_run_goes_on_with_what_it_has_and_more_files(tmp_path):
    assert begun(tmp_path, seed=0) is None
    with store_of(tmp_path) as store:
        store.claim(record_of(seed=0), FILES)
        store.save(record_of(seed=0) | {"done": [1]})
    assert begun(tmp_path, files=["2.npz"], seed=0)["done"] == [1]
    assert json.loads((tmp_path / RECORD).read_text())["files"] == [*FILES, "2.npz"]


@pytest.mark.parametrize("name", DECIDED)
def test_what_is_left_open_is_as_the_earlier_run_decided_it(name):
    assert differences({name: 5}, {name: None}) == []
    assert differences({name: 5}, {name: 4}) == [f"{name} was 5, now 4"]
    assert differences({name: 5}, {}) == [f"{name} was 5, now nothing"]
    assert earlier_choices({}, {name: 5})[name] == earlier_choices({name: None}, {name: 5})[name] == 5
    assert name not in earlier_choices({name: 4}, {name: 5}) and name not in earlier_choices({name: 4}, None)
    assert earlier_choices({}, None)[name] is earlier_choices({}, {})[name] is None


def test_of_two_runs_at_once_one_has_the_folder_and_is_named(tmp_path):
    with store_of(tmp_path / "out") as first, store_of(tmp_path / "out") as second:
        assert first.claim(record_of(seed=1), FILES) is None
        for settings in ({"seed": 1}, {"seed": 2}):
            with pytest.raises(ValueError) as error:
                second.claim(record_of(**settings), FILES, overwrite=True)
            assert f"{os.getpid()}" in str(error.value)
            assert str(error.value) and "\n" not in str(error.value)
        first.begin(record_of(seed=1))
    assert begun(tmp_path / "out", seed=1)["settings"] == {"seed": 1}  # free once the first has ended


def test_an_error_ends_the_claim(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with store_of(tmp_path) as store:
            store.claim(record_of(), FILES)
            raise KeyboardInterrupt
    assert begun(tmp_path) is None


def test_a_killed_run_holds_no_folder(tmp_path):
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with store_of(tmp_path) as store:
                store.claim(record_of(), FILES)
                os.write(told, b"!")
                signal.pause()
        finally:
            os._exit(1)
    os.close(told)
    assert os.read(ready, 1) == b"!"
    with pytest.raises(ValueError, match=str(child)):
        begun(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert begun(tmp_path) is None
    os.close(ready)


def test_a_file_system_without_locks_holds_runs_too(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning):
        assert begun(tmp_path) is None


# what is replaced


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_no_record_lists_is_in_the_way(tmp_path, name, overwrite):
    (tmp_path / "parts").mkdir()
    (tmp_path / name).write_text("somebody's")
    with pytest.raises(ValueError, match=name):
        begun(tmp_path, overwrite=overwrite)
    assert content(tmp_path) == {name: b"somebody's"} and not (tmp_path / LOCK).exists()
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("nowhere")  # a link is a file too
    with pytest.raises(ValueError, match=name):
        begun(tmp_path, overwrite=overwrite)
    (tmp_path / name).unlink()
    begun(tmp_path, files=["7.npz"])  # a run of ours that does not list it
    (tmp_path / name).write_text("somebody's")
    with pytest.raises(ValueError, match=name):
        begun(tmp_path, overwrite=overwrite)
    assert (tmp_path / name).read_text() == "somebody's"


def test_overwriting_removes_what_the_record_lists_and_nothing_else(tmp_path):
    begun(tmp_path, seed=0)
    ours = [*FILES, "parts/1.npz.tmp"]
    others = ["1.npz", "notes.npz", "other.md", "notes.txt.tmp", ".tmp", "0.npz.7.tmp", "parts/0.npz", "1.npz.tmp"]
    for name in (*ours, *others):
        (tmp_path / name).write_text(name)
    assert begun(tmp_path, overwrite=True, files=["0.npz"], seed=1) is None
    assert set(content(tmp_path)) == {*others, RECORD}
    lists = {"files": ["0.npz"], "temporary": [f"{RECORD}.tmp", "0.npz.tmp"]}
    assert json.loads((tmp_path / RECORD).read_text()) == record_of(seed=1) | lists


def killed_while_writing(folder, name):
    """A run that was killed while it wrote a file."""
    child = os.fork()
    if child == 0:
        begun(folder, seed=0)
        with publishing(folder / name) as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_what_killed_runs_left_does_not_pile_up(tmp_path):
    for name in [*FILES, RECORD] * 2:
        killed_while_writing(tmp_path, name)
        assert [path for path in content(tmp_path) if path.endswith(".tmp")] == [f"{name}.tmp"]
    begun(tmp_path, seed=0)
    assert set(content(tmp_path)) == {RECORD}


@pytest.mark.parametrize("name", ["../precious.npz", "/etc/passwd", "0.npz/../../precious.npz"])
def test_a_record_cannot_make_us_remove_what_is_not_ours(tmp_path, name):
    out, precious = tmp_path / "out", tmp_path / "precious.npz"
    begun(out)
    for path in (precious, out / "notes.txt"):
        path.write_text("precious")
    (out / RECORD).write_text(json.dumps(record_of() | {"files": [name]}))
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"record\.json"):
            begun(out, overwrite=overwrite)
    assert precious.exists() and (out / "notes.txt").exists()


def test_a_link_does_not_lead_us_out_of_the_folder(tmp_path):
    out, parts = tmp_path / "out", tmp_path / "parts"
    begun(out)
    (out / "parts").rmdir()
    parts.mkdir()
    (parts / "1.npz").write_text("precious")
    (out / "parts").symlink_to(parts)
    for overwrite in (False, True):
        with pytest.raises(ValueError):
            begun(out, overwrite=overwrite)
    assert (parts / "1.npz").exists()
    (tmp_path / "linked").symlink_to(tmp_path / "other")  # the folder itself may be one
    (tmp_path / "other").mkdir()
    assert begun(tmp_path / "linked") is None and (tmp_path / "other" / RECORD).exists()


def test_a_file_where_the_folder_should_be_is_told(tmp_path):
    """Also where another run is to be replaced: the error names the fix, and the file stays."""
    (tmp_path / "out").write_text("not ours")
    for place in (tmp_path / "out", tmp_path / "out" / "below"):
        for overwrite in (False, True):
            with pytest.raises((OSError, ValueError), match="--out"):
                begun(place, overwrite=overwrite)
    assert (tmp_path / "out").read_text() == "not ours"


# ---- Arrays in files are read as they were written, or not at all


SEEDS = {"seeds": [3, 4, 5]}
LIKE = {"images": (np.uint8, (3, 2)), "labels": (np.integer, (3,))}
ARRAYS = {"images": np.arange(6, dtype=np.uint8).reshape(3, 2), "labels": np.arange(3), "text": np.array("any")}


def test_an_item_is_read_as_it_was_written(tmp_path):
    write_item(tmp_path / "0.npz", ARRAYS, SEEDS)
    found = read_item(tmp_path / "0.npz", SEEDS, LIKE)
    assert found.keys() == ARRAYS.keys() and all((found[name] == ARRAYS[name]).all() for name in ARRAYS)
    assert read_item(tmp_path / "absent.npz", SEEDS, LIKE) is None
    np.savez(tmp_path / "old.npz", **ARRAYS)  # of a version without digests
    assert read_item(tmp_path / "old.npz", SEEDS, LIKE).keys() == ARRAYS.keys()
    for other in ({"images": ARRAYS["images"][:2]}, {"images": ARRAYS["images"].astype(int)}, {"labels": np.arange(2)}):
        np.savez(tmp_path / "old.npz", **ARRAYS | other)
        assert read_item(tmp_path / "old.npz", SEEDS, LIKE) is None


def test_a_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "0.npz"
    write_item(path, ARRAYS, SEEDS)
    whole = path.read_bytes()
    for place in range(0, len(whole), 13):  # a bit anywhere; where nobody reads, nothing is lost
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        arrays = read_item(path, SEEDS, LIKE)
        assert arrays is None or (arrays["images"] == ARRAYS["images"]).all()


@pytest.mark.parametrize("same", [{"cfg": 3.0, "seed": 2**53 + 1}, {"cfg": 3, "seed": 2**53 + 1, "window": None}])
def test_settings_that_do_not_differ_keep_their_items(tmp_path, same):
    """A study may say 3 and then 3.0, and a later version may have a setting more, which is left open."""
    settings, path = {"request": {"seed": 2**53 + 1, "cfg": 3}}, tmp_path / "0.npz"
    write_item(path, ARRAYS, settings)
    assert differences(settings, {"request": same}) == []
    assert read_item(path, {"request": same}, LIKE)
    for other in ({"cfg": 3.5}, {"seed": 2**53}, {"window": 2}):
        assert read_item(path, {"request": same | other}, LIKE) is None


def huge(path):
    """An archive whose header declares 2^60 bytes."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (2**60,)}
    with zipfile.ZipFile(path, "w") as archive, archive.open("images.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, header)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-30]),
        lambda path: path.write_bytes(b"half"),
        lambda path: np.savez(path, **ARRAYS | {"images": np.array([{}, [1]], object)}),
        lambda path: np.save(path.open("wb"), np.zeros(3)),
        lambda path: np.savez(path, others=np.arange(3)),
        lambda path: np.savez(path, **ARRAYS, **{DIGEST: np.array("another")}),
        lambda path: np.savez(path, **dict(np.load(path)) | {"images": 255 - ARRAYS["images"]}),
        lambda path: write_item(path, ARRAYS, {"seeds": [4, 5, 6]}),
        huge,
    ],
    ids="empty cut text objects array others digest inverted seeds huge".split(),
)
def test_a_damaged_item_or_one_of_others_is_none(tmp_path, damage):
    path = tmp_path / "0.npz"
    write_item(path, ARRAYS, SEEDS)
    assert read_item(path, SEEDS, LIKE)
    damage(path)
    assert read_item(path, SEEDS, LIKE) is None


# ---- What reports say of the run: models, machine, command, commit


def test_what_ran_is_told(comparison):
    out, report = comparison
    told = report["ran"]
    files = checkpoint_files("digits32")
    assert [model["role"] for model in told["models"]] == ["target", "vae", "draft"]
    for model in told["models"]:
        path = files[model["role"]]
        assert (model["file"], model["bytes"]) == (path.name, path.stat().st_size)
        assert model["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    target, vae, draft = told["models"]
    names = [row["name"] for row in report["rows"]]
    assert target["configurations"] == vae["configurations"] == names
    assert draft["configurations"] == [name for name in names if name.startswith("cspd")]
    assert target["parameters"] > 4 * draft["parameters"] > 2e6 and vae["parameters"] > 5e5
    assert told["command"].startswith("cspd compare --num-iter 4 ") and told["command"].endswith(f"--out {out}")
    assert (told["versions"]["cspd"], told["versions"]["torch"]) == (__version__, torch.__version__)
    assert told["machine"]["device"] == describe(torch.device("cpu"))["device"] and told["machine"]["threads"] >= 1
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(told["date"])).total_seconds()) < 3600

    page = (out / "report.html").read_text()
    for text in (target["sha256"][:12], draft["file"], told["date"], f"(of {NAMES[-1]})"):
        assert text in page
    home = str(Path(runs.__file__).parents[1])  # where the models are: nobody has given it
    assert home not in page and home not in json.dumps(report)


def test_the_commit_is_that_of_the_checkout_which_has_the_file(tmp_path, monkeypatch):
    def git(*arguments):
        setting = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        told = subprocess.run(["git", "-C", tmp_path, *setting, *arguments], capture_output=True, text=True, check=True)
        return told.stdout.strip()

    file = tmp_path / "inside" / "ran.py"
    file.parent.mkdir()
    file.write_text("1")
    assert runs.commit_of(file) is None  # no checkout
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "empty")
    assert runs.commit_of(file) is None  # one that does not have it, as of a project that uses the package
    git("add", ".")
    git("commit", "-q", "-m", "all")
    git("tag", "v1")
    commit = git("rev-parse", "HEAD")
    assert runs.commit_of(file) == commit and len(commit) == 40
    file.write_text("2")
    assert runs.commit_of(file) == f"{commit}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runs.commit_of(file) is None  # no git


def test_paths_are_named_without_their_folders():
    settings = {"version": "0", "target": {"file": "/home/someone/target.safetensors", "bytes": 3}}
    named = {"version": "0", "target": {"file": "target.safetensors", "bytes": 3}}
    assert runs.without_folders(settings) == runs.without_folders(named) == named


# ---- Folders that version 0.1.0 left unfinished go on: records as it wrote them, and black images that must stay


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


# ---- Places that cannot be written, or are full, or hold garbage


SETTINGS = ["--num-sampling-steps", "5", "--cfg", "1", "--max-batch", "1"]
WHAT = {
    "sample": ["--num-iter", "2", "--num", "24"],
    "compare": ["--num-iter", "64", "--num", "4"],
    "evaluate": ["--num-iter", "2", "--num", "44"],
}
ITEMS = {"sample": "0*.png", "compare": "chunks/*.npz", "evaluate": "0*.npz"}
ROOM = {"sample": 40, "compare": 40, "evaluate": 120}  # KiB of a disk that is full half way
LARGEST = {"sample": 6, "compare": 16, "evaluate": 20}  # KiB that a file may have


def arguments(command, out, *more, method="ar", checkpoint=None):
    methods = ["--methods" if command == "compare" else "--method", method]
    return [
        command,
        "--checkpoint",
        checkpoint or small_checkpoint(),
        *methods,
        *WHAT[command],
        *SETTINGS,
        "--out",
        out,
        *more,
    ]


def run_of_places(*asked, **more):
    return main([str(argument) for argument in arguments(*asked, **more)])


def stamps(command, out):
    return {path: path.stat().st_mtime_ns for path in out.glob(ITEMS[command])}


@pytest.fixture
def disk(tmp_path):
    """A disk of its own: where it is, and what mounts it with other options."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "cspd-test", place], capture_output=True)
        if done.returncode:
            pytest.skip("disks cannot be mounted here")

    mount("size=8m")
    yield place, mount
    subprocess.run(["umount", "--lazy", place], check=True)  # weights that were loaded may still be mapped


@pytest.mark.slow
def test_a_full_disk(disk, capsys):
    place, mount = disk
    for command in WHAT:
        out = place / command
        mount(f"remount,size={ROOM[command]}k")
        assert run_of_places(command, out) == 2
        check_told(capsys.readouterr().err, out)
        kept = stamps(command, out)
        assert kept
        mount("remount,size=8m")
        assert run_of_places(command, out) == 0
        after = stamps(command, out)
        assert {path: after[path] for path in kept} == kept
        shutil.rmtree(out)


@pytest.mark.parametrize("command", WHAT)
def test_a_file_that_may_not_grow(command, tmp_path, capsys):
    """As of a quota: where no disk can be mounted, this is nearest to one that is full."""
    small_checkpoint()  # is there before
    with largest_file(LARGEST[command] * 1024):
        assert run_of_places(command, tmp_path) == 2
    check_told(capsys.readouterr().err, tmp_path)
    kept = stamps(command, tmp_path)
    assert run_of_places(command, tmp_path) == 0
    after = stamps(command, tmp_path)
    assert {path: after[path] for path in kept} == kept


@contextlib.contextmanager
def largest_file(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def check_told(printed, out):
    error = printed.splitlines()[-1]
    assert error.startswith(f"cspd: {out}")
    assert printed.count("cspd: ") == 1
    assert not list(out.rglob("*.tmp"))


@pytest.fixture
def read_only(tmp_path, request):
    """A checkpoint whose folder cannot be written, and a home that cannot either."""
    folder = tmp_path / "checkpoint" if os.geteuid() else request.getfixturevalue("disk")[0] / "checkpoint"
    shutil.copytree(small_checkpoint(), folder, ignore=shutil.ignore_patterns("calibration*"))
    if os.geteuid():
        folder.chmod(0o555)
    else:  # whom permissions do not bind
        request.getfixturevalue("disk")[1]("remount,ro")
    (tmp_path / "file").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "XDG_CACHE_HOME"):
            patch.setenv(name, str(tmp_path / "file" / "below"))
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("command", WHAT)
def test_a_read_only_home_and_checkpoint(command, read_only, tmp_path, capsys):
    with pytest.warns(UserWarning) as warned:
        assert run_of_places(command, tmp_path / "out", "--window", 3, method="speculative", checkpoint=read_only) == 0
    assert sum("cannot be kept" in str(each.message) for each in warned) == 1
    assert {path.name for path in read_only.iterdir()} == {"target.safetensors", "vae.safetensors"}


GARBAGE = {
    "sample": lambda good: good[: len(good) // 2],
    "compare": lambda good: b"\x00\xff" + good,
    "evaluate": lambda good: re.sub(rb"(?<!\d)0\.\d+|\d\.\d+e-\d+", b"NaN", good),  # seconds, and not the versions
}


@pytest.mark.slow
@pytest.mark.parametrize("command", WHAT)
def test_garbage_in_the_costs_is_measured_again(command, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run_of_places(command, tmp_path / "good", method="speculative") == 0
    (costs,) = tmp_path.rglob("costs.json")
    good = costs.read_bytes()
    costs.write_bytes(GARBAGE[command](good))
    assert run_of_places(command, tmp_path / "again", method="speculative") == 0
    (entry,) = json.loads(costs.read_text(), parse_constant=pytest.fail)
    assert entry["key"] == json.loads(good)[0]["key"]


# ---- kill -9 at any time, of one process or of several: nothing that was whole is lost, and the pixels are the same


SETTINGS_OF_KILLS = ["--num-sampling-steps", "10", "--cfg", "1", "--max-batch", "2", "--seed", "3"]
SAMPLE = ["sample", "--method", "ar", "--num-iter", "16", "--num", "40"]
COMPARE = ["compare", "--methods", "ar", "--num-iter", "64", "--num", "12"]
EVALUATE = ["evaluate", "--method", "ar", "--num-iter", "16", "--num-images", "60"]
PIXELS = {"compare": "arr_0", "evaluate": "images"}
AGAIN = {"sample": 1, "compare": 0, "evaluate": 0}  # whole items that a killed run may not have recorded yet


def arguments_of_kills(command, out):
    return [*command, "--checkpoint", small_checkpoint(), *SETTINGS_OF_KILLS, "--out", out]


def items(command, out):
    """What is whole, and when it was made."""
    return {path: path.stat().st_mtime_ns for path in sorted(out.glob(ITEMS[command]))}


def pixels(command, out):
    """All images of a finished run, in order."""
    found = []
    for path in items(command, out):
        if command == "sample":
            found.append(np.asarray(Image.open(path))[None])
        else:
            with np.load(path) as file:
                found.append(file[PIXELS[command]])
    return np.concatenate(found).astype(int)


def finish(begin, whole_items, allowed, times, ways):
    """Runs a command to its end, killed after each of `times` in one of the `ways`, and begun again.

    Returns:
        the times that it did not need.
    """
    kept, status, times = {}, None, list(times)
    while status != 0:
        run = begin()
        try:
            status = run.wait(times[0] if times else None)
            assert status == 0
        except subprocess.TimeoutExpired:
            ways[len(times) % len(ways)](run)
            times.pop(0)
        now = whole_items()
        again = [path for path, made in kept.items() if now.get(path) != made]
        assert len(again) <= allowed
        kept = now
    return times


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, launch, ways, kills",
    [
        (SAMPLE, list, [kill_all], 8),
        (COMPARE, list, [kill_all], 7),
        (EVALUATE, list, [kill_all], 7),
        (EVALUATE, two_processes, [kill_all, kill_launcher], 8),
    ],
    ids=["sample", "compare", "evaluate", "two processes"],
)
def test_kills_at_random_times_lose_nothing(command, launch, ways, kills, tmp_path):
    name, log, whole = command[0], tmp_path / "log", tmp_path / "whole"
    begin = time.monotonic()
    assert start(arguments_of_kills(command, whole), log, launch()).wait() == 0, log.read_text()
    life = time.monotonic() - begin
    chance = random.Random(0)
    times = [chance.uniform(0, life) for _ in range(kills)]
    for folder in range(kills + 1):
        out = tmp_path / str(folder)
        times = finish(
            lambda out=out: start(arguments_of_kills(command, out), log, launch()),
            lambda out=out: items(name, out),
            AGAIN[name],
            times,
            ways,
        )
        assert np.abs(pixels(name, out) - pixels(name, whole)).max() <= 1  # batches may differ in the last bit
        assert not list(out.rglob("*.tmp"))
        if not times:
            break


@pytest.mark.slow
def test_a_machine_that_is_lost_joins_again(tmp_path):
    """Two of torchrun's agents. When one is gone the other one ends, and both are started again."""
    command = [*EVALUATE, "--num-images", "128"]
    whole, out, log = tmp_path / "whole", tmp_path / "out", tmp_path / "log"

    def begin():
        meet = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
        return [start(arguments_of_kills(command, out), log, [*meet, f"--node_rank={number}"]) for number in range(2)]

    machines = begin()
    wait_until(lambda: items("evaluate", out) or machines[0].poll() is not None)
    kill_all(machines[1])
    kept = items("evaluate", out)
    assert 0 < len(kept) < 8
    assert machines[0].wait(60) != 0  # it does not wait for ever
    assert [machine.wait(300) for machine in begin()] == [0, 0], log.read_text()[-3000:]
    after = items("evaluate", out)
    assert {path: after[path] for path in kept} == kept and len(after) == 8
    assert start(arguments_of_kills(command, whole), log).wait() == 0
    assert np.abs(pixels("evaluate", out) - pixels("evaluate", whole)).max() <= 1
