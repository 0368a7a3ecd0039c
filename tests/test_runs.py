"""The folder of a run: its record, its lock, its files, and what killed runs and full disks leave behind."""

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
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN
from launching import free_port, kill_all, kill_launcher, start, two_processes, wait_until
from PIL import Image
from stores import small_checkpoint

from cspd import origin
from cspd.cli import main
from cspd.evaluation.run import Shards
from cspd.files import (
    DIGEST,
    append_json,
    check_file,
    checked_json,
    digest_of,
    place_of,
    publishing,
    read_item,
    write_item,
    write_json,
)
from cspd.option import decided_names
from cspd.runs import LOCK, Store, differences, earlier_choices

# ---- Files are written whole or not at all


def test_files_are_written_whole_or_not_at_all(tmp_path):
    foreign = [tmp_path / name for name in ("a.json.tmp", f"a.json.{os.getpid()}.tmp", "a.json.1.tmp")]
    for path in foreign:
        path.write_text("somebody's")
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": {1}})
    with pytest.raises(OSError):
        with publishing(tmp_path / "a.json") as temporary:
            temporary.write_bytes(b"half")
            raise OSError(28, "No space left on device")
    assert (tmp_path / "a.json").read_text() == '{\n "a": 1\n}\n'
    assert {path.name: path.read_text() for path in tmp_path.glob("*.tmp")} == dict.fromkeys(
        [path.name for path in foreign], "somebody's"
    )
    with pytest.raises(OSError, match=r"b\.txt"):
        append_json(tmp_path / "absent" / "b.txt", {})


def test_paths_that_cannot_be_written_are_refused_before_any_work(tmp_path):
    """A pipe would be replaced by a file. Of a name of 252 letters, only the temporary name is too long."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=name):
            write_json(tmp_path / name, {})
    for name in ("pipe", "link", "", "a" * 252, "a" * 300):
        with pytest.raises((OSError, ValueError), match="--json"):
            check_file(tmp_path / name, "--json")
    check_file(tmp_path / ("a" * 251), "--json")
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "link"}


@pytest.mark.parametrize(
    "text, path",
    [
        ("file:/a b", "/a b"),
        ("file:///a/b", "/a/b"),
        ("FILE://localhost/a%20b", "/a b"),
        ("a:b/c", "a:b/c"),
        ("C:/a", "C:/a"),
        ("file://machine/a", None),
        ("file://a", None),
        ("s3:/bucket/run", None),
    ],
)
def test_urls_of_this_machine_are_paths_and_others_are_errors(text, path):
    if path is None:
        with pytest.raises(ValueError, match=text):
            place_of(text)
    else:
        assert place_of(text) == Path(path)


@pytest.mark.parametrize(
    "text, wrong",
    [
        ('{"name": "a", "sizes": [1, 2.5]}', None),
        ('{"name": "a", "sizes": [], "more": {"b": 1}}', None),
        ('{"name": "a", "sizes": [1, true]}', r"sizes\[1\]"),
        ('{"name": "a", "sizes": [], "more": {"b": "c"}}', r"more\.b"),
        ('{"sizes": []}', "name"),
        ("[]", "the content"),
        ('{"name": "a", "sizes": [1e999]}', "1e999"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_json_of_another_shape_is_refused(tmp_path, text, wrong):
    path = tmp_path / "a.json"
    path.write_text(text)
    shape = {"name": (str, type(None)), "sizes": [(int, float)], "more?": {str: int}}
    if wrong is None:
        assert checked_json(path, shape, "") == json.loads(text)
    else:
        with pytest.raises(ValueError, match=rf"a\.json.*{wrong}.*: write it again"):
            checked_json(path, shape, "write it again")


# ---- Whose a folder is


SCHEMA = "tests/1"
FILES = ["0.npz", "parts/1.npz", "report.md"]
RECORD = "record.json"


def store_of(folder, **shape):
    return Store(folder, RECORD, SCHEMA, {"settings": dict, **shape}, compared=("settings",))


def record_of(**settings):
    return {"schema": SCHEMA, "settings": settings}


def begun(folder, *, overwrite=False, files=FILES, **settings):
    """A run that was interrupted after it began: the record of an earlier run, or None."""
    with store_of(folder) as store:
        earlier = store.claim(record_of(**settings), files, overwrite)
        store.begin(record_of(**settings))
    return earlier


def content(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_setting_that_only_one_side_has_is_a_difference():
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


def test_a_run_resumes_with_its_record_and_more_files(tmp_path):
    assert begun(tmp_path, seed=0) is None
    with store_of(tmp_path) as store:
        store.claim(record_of(seed=0), FILES)
        store.save(record_of(seed=0) | {"done": [1]})
    assert begun(tmp_path, files=["2.npz"], seed=0)["done"] == [1]
    assert json.loads((tmp_path / RECORD).read_text())["files"] == [*FILES, "2.npz"]


def test_the_settings_that_methods_choose():
    plans = ["backbone", "denoiser", "kept", "null_every", "refreshes", "retain", "rounds", "select"]
    assert decided_names() == sorted(["corrected", "draft", "gamma", "head_calls", "window", *plans])


def test_a_record_may_have_a_methods_earlier_name():
    assert differences({"method": "cspd"}, {"method": "mar-draft"}) == []
    assert differences({"method": "cspd"}, {"method": "ar"}) == ['method was "mar-draft", now "ar"']


@pytest.mark.parametrize("name", decided_names())
def test_a_setting_that_is_left_open_has_the_earlier_runs_value(name):
    assert differences({name: 5}, {name: None}) == []
    assert differences({name: 5}, {name: 4}) == [f"{name} was 5, now 4"]
    assert differences({name: 5}, {}) == [f"{name} was 5, now nothing"]
    assert earlier_choices({}, {name: 5})[name] == earlier_choices({name: None}, {name: 5})[name] == 5
    assert name not in earlier_choices({name: 4}, {name: 5})
    assert earlier_choices({}, None)[name] is None


def test_a_second_run_is_refused_until_the_first_ends(tmp_path):
    with contextlib.suppress(KeyboardInterrupt), store_of(tmp_path) as first, store_of(tmp_path) as second:
        assert first.claim(record_of(seed=1), FILES) is None
        for settings in ({"seed": 1}, {"seed": 2}):
            with pytest.raises(ValueError, match=str(os.getpid())) as error:
                second.claim(record_of(**settings), FILES, overwrite=True)
            assert "\n" not in str(error.value)
        first.begin(record_of(seed=1))
        raise KeyboardInterrupt
    assert begun(tmp_path, seed=1)["settings"] == {"seed": 1}


def test_a_file_system_without_locks_holds_runs_too(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning):
        assert begun(tmp_path) is None


# ---- What is replaced


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_no_record_lists_is_in_the_way(tmp_path, name, overwrite):
    (tmp_path / "parts").mkdir()
    (tmp_path / name).write_text("somebody's")
    with pytest.raises(ValueError, match=name):
        begun(tmp_path, overwrite=overwrite)
    assert content(tmp_path) == {name: b"somebody's"} and not (tmp_path / LOCK).exists()
    (tmp_path / name).unlink()
    begun(tmp_path, files=["7.npz"])  # a run of ours that does not list it
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(ValueError, match=name):
        begun(tmp_path, overwrite=overwrite)
    assert (tmp_path / name).is_symlink()


def test_overwriting_removes_the_files_of_the_record_and_nothing_else(tmp_path):
    begun(tmp_path, seed=0)
    ours = [*FILES, "parts/1.npz.tmp"]
    others = ["1.npz", "notes.npz", "other.md", "notes.txt.tmp", ".tmp", "0.npz.7.tmp", "parts/0.npz", "1.npz.tmp"]
    for name in (*ours, *others):
        (tmp_path / name).write_text(name)
    assert begun(tmp_path, overwrite=True, files=["0.npz"], seed=1) is None
    assert set(content(tmp_path)) == {*others, RECORD}
    lists = {"files": ["0.npz"], "temporary": [f"{RECORD}.tmp", "0.npz.tmp"]}
    assert json.loads((tmp_path / RECORD).read_text()) == record_of(seed=1) | lists


def test_the_temporary_files_of_killed_runs_do_not_pile_up(tmp_path):
    for name in [*FILES, RECORD] * 2:
        child = os.fork()
        if child == 0:
            begun(tmp_path, seed=0)
            with publishing(tmp_path / name) as temporary:
                temporary.write_text("half")
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        assert [path for path in content(tmp_path) if path.endswith(".tmp")] == [f"{name}.tmp"]
    begun(tmp_path, seed=0)
    assert set(content(tmp_path)) == {RECORD}


@pytest.mark.parametrize("listed", ["files", "temporary"])
@pytest.mark.parametrize(
    "name",
    ["../precious.npz", "/etc/passwd", "0.npz/../../precious.npz", "link/precious.npz", "link/a/b", "", ".", "\0"],
)
def test_a_record_cannot_make_us_remove_other_files(tmp_path, name, listed):
    out, precious = tmp_path / "out", tmp_path / "precious.npz"
    begun(out)
    (out / "link").symlink_to(tmp_path)
    (tmp_path / "a").mkdir()
    others = precious, tmp_path / "a" / "b"
    for path in others:
        path.write_text("precious")
    (out / RECORD).write_text(json.dumps(record_of() | {"files": []} | {listed: [name]}))
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"record\.json"):
            begun(out, overwrite=overwrite)
    assert all(path.exists() for path in others)


def test_a_run_writes_nothing_outside_its_folder(tmp_path):
    """Whatever made up the names of its files."""
    for name in ("../a.png", "/a.png", "link/../../a.png"):
        with pytest.raises(ValueError, match=r"a\.png"):
            begun(tmp_path / "out", files=[name])
    assert not list(tmp_path.iterdir())


def test_a_link_does_not_lead_us_out_of_the_folder(tmp_path):
    out, parts = tmp_path / "out", tmp_path / "parts"
    begun(out)
    (out / "parts").rmdir()
    parts.mkdir()
    (parts / "1.npz").write_text("precious")
    (out / "parts").symlink_to(parts)
    with pytest.raises(ValueError, match=r"parts/1\.npz"):
        begun(out, overwrite=True)
    assert (parts / "1.npz").exists()
    (tmp_path / "linked").symlink_to(out)  # the folder itself may be a link
    (out / "parts").unlink()
    assert begun(tmp_path / "linked") is not None


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/nowhere"])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, folder, overwrite):
    (tmp_path / "file").write_text("not ours")
    with pytest.raises((OSError, ValueError), match=f"{folder.partition('/')[0]}.*--out"):
        begun(tmp_path / folder, overwrite=overwrite)
    assert (tmp_path / "file").read_text() == "not ours"


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


@pytest.mark.parametrize("same", [{"cfg": 3.0, "seed": 2**53 + 1}, {"cfg": 3, "seed": 2**53 + 1, "window": None}])
def test_equal_settings_keep_their_items(tmp_path, same):
    """A study may say 3 and then 3.0, and a later version may have another setting, which is left open."""
    settings, path = {"request": {"seed": 2**53 + 1, "cfg": 3}}, tmp_path / "0.npz"
    write_item(path, ARRAYS, settings)
    assert differences(settings, {"request": same}) == []
    assert read_item(path, {"request": same}, LIKE)
    for other in ({"cfg": 3.5}, {"seed": 2**53}, {"window": 2}):
        assert read_item(path, {"request": same | other}, LIKE) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-30]),
        lambda path: path.write_bytes(b"half"),
        lambda path: np.savez(path, others=np.arange(3)),
        lambda path: np.savez(path, **ARRAYS, **{DIGEST: np.array("another")}),
        lambda path: np.savez(path, **dict(np.load(path)) | {"images": 255 - ARRAYS["images"]}),
        lambda path: write_item(path, ARRAYS, {"seeds": [4, 5, 6]}),
    ],
    ids="cut text others digest inverted seeds".split(),
)
def test_a_damaged_item_or_another_one_is_none(tmp_path, damage):
    path = tmp_path / "0.npz"
    write_item(path, ARRAYS, SEEDS)
    damage(path)
    assert read_item(path, SEEDS, LIKE) is None


# ---- The origin of a report: models, machine, command, commit


def test_the_commit_is_that_of_the_checkout_with_the_file(tmp_path, monkeypatch):
    def git(*arguments):
        setting = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run(["git", "-C", tmp_path, *setting, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    file = tmp_path / "inside" / "ran.py"
    file.parent.mkdir()
    file.write_text("1")
    assert origin.commit_of(file) is None
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "empty")
    assert origin.commit_of(file) is None  # a checkout without the file, of a project that uses the package
    git("add", ".")
    git("commit", "-q", "-m", "all")
    commit = git("rev-parse", "HEAD")
    assert origin.commit_of(file) == commit and len(commit) == 40
    file.write_text("2")
    assert origin.commit_of(file) == f"{commit}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert origin.commit_of(file) is None  # no git


def test_a_file_is_its_content_in_any_folder_and_is_read_once(tmp_path):
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    one.write_bytes(b"weights")
    digest = origin.content_digest(one)
    shutil.copy(one, other)
    os.utime(other, ns=(0, 0))
    assert origin.content_digest(other) == digest == hashlib.sha256(b"weights").hexdigest()
    other.write_bytes(b"WEIGHTS")
    assert origin.content_digest(other) != digest
    about = one.stat()
    one.write_bytes(b"WEIGHTS")
    os.utime(one, ns=(about.st_atime_ns, about.st_mtime_ns))  # nothing shows that it changed
    assert origin.content_digest(one) == digest
    files = [{"vae": {"file": name, "bytes": 7, "sha256": digest}} for name in ("a.ckpt", "b.ckpt")]
    assert differences(*files) == [] and digest_of({}, files[0]) == digest_of({}, files[1])
    files[1]["vae"]["sha256"] = "0"
    assert len(differences(*files)) == 1 and digest_of({}, files[0]) != digest_of({}, files[1])


# ---- Runs that version 0.1.0 left unfinished resume: its records, and black images that must stay


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
    existing, lost = tmp_path / "00000_label3_seed0.png", tmp_path / "00001_label4_seed1.png"
    Image.fromarray(black(1)[0]).save(existing)
    generated = np.asarray(Image.open(lost), int)
    lost.unlink()
    run("sample", tmp_path, *SPECULATIVE, "--num", "2")
    assert not np.asarray(Image.open(existing)).any()
    assert np.abs(np.asarray(Image.open(lost), int) - generated).max() <= 1
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
    existing = tmp_path / "chunks" / "00-00000.npz"
    np.savez(existing, arr_0=black(2), chunk=np.frombuffer(json.dumps(chunk).encode(), np.uint8))
    before = existing.read_bytes()
    methods = "speculative:draft=frozen"  # listing ar would leave out its row of 64 iterations, which exists
    run("compare", tmp_path, "--methods", methods, "--max-batch", "2", "--num", "3")  # one more image
    assert existing.read_bytes() == before and len(list((tmp_path / "chunks").iterdir())) == 6
    rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert [row["window"] for row in rows] == [None, None, 5]
    now = json.loads(record.read_text())
    assert "chunks/02-00001.npz.tmp" in now.pop("temporary")
    assert "chunks/02-00001.npz" in now.pop("files") and now.pop("windows").keys() == earlier.pop("windows").keys()
    assert now == earlier


def test_integers_are_floats_now(tmp_path):
    """Version 0.1.0 recorded `cfg=2` as an integer: the names are the same, and so are the images."""
    methods = ["--methods", "speculative:cfg=2:draft=frozen:window=3", "--max-batch", "2", "--num", "2"]
    run("compare", tmp_path, *methods)
    record = tmp_path / "run.json"
    as_before = re.sub(r"\b2\.0\b", "2", record.read_text())
    assert json.loads(as_before)["settings"]["order"] == ["ar", "ar:num_iter=64", "ar:cfg=2", methods[1]]
    record.write_text(as_before)
    before = stamps("compare", tmp_path)
    run("compare", tmp_path, *methods)
    assert stamps("compare", tmp_path) == before


def test_evaluations(tmp_path):
    run("evaluate", tmp_path, *SPECULATIVE, "--window", "5", "--num", "18", "--space", "digits")
    manifest, generated = tmp_path / "manifest.json", Shards(tmp_path, 18)[17]
    now = json.loads(manifest.read_text())
    settings = {name: now[name] for name in ("version", "precision", "compiled", "target", "vae")}
    manifest.write_text(json.dumps(old("manifest.json") | settings))
    existing = tmp_path / "00000.npz"
    stats = np.array(json.dumps([STATS] * 16))
    np.savez(existing, images=black(16), labels=np.array([3, 4] * 8), seeds=np.arange(16), stats=stats)
    before = existing.read_bytes()
    (tmp_path / "00001.npz").unlink()
    run("evaluate", tmp_path, *SPECULATIVE, "--num", "18", "--space", "digits")
    assert existing.read_bytes() == before
    assert (Shards(tmp_path, 18)[17].int() - generated.int()).abs().max() <= 1
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert report["settings"]["request"]["window"] == 5 and report["sampling"]["images_made"] == 2
    assert report["largest_token"] is None and report["exploded"] is None  # not known for the older images


# ---- A disk that is full half way


ITEMS = {"sample": "0*.png", "compare": "chunks/*.npz", "evaluate": "0*.npz"}
LIMITED = {  # arguments, and the KiB that a file may have
    "sample": (["--method", "ar", "--num-iter", "2", "--num", "24"], 6),
    "compare": (["--methods", "ar", "--num-iter", "4", "--num", "4"], 16),
    "evaluate": (["--method", "ar", "--num-iter", "2", "--num", "44", "--space", "digits"], 20),
}


def stamps(command, out):
    """The finished files of a run, and when they were written."""
    return {path: path.stat().st_mtime_ns for path in sorted(out.glob(ITEMS[command]))}


@pytest.mark.parametrize("command", LIMITED)
def test_a_run_resumes_after_a_file_could_not_grow(command, tmp_path, capsys):
    own, size = LIMITED[command]
    settings = ["--num-sampling-steps", "2", "--cfg", "1", "--max-batch", "1", "--out", str(tmp_path)]
    arguments = [command, "--checkpoint", small_checkpoint(), *own, *settings]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size * 1024, hard))
    try:
        assert main(arguments) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    printed = capsys.readouterr().err
    assert printed.splitlines()[-1].startswith(f"cspd: {tmp_path}") and printed.count("cspd: ") == 1
    assert not list(tmp_path.rglob("*.tmp"))
    existing = stamps(command, tmp_path)
    assert main(arguments) == 0
    assert existing.items() <= stamps(command, tmp_path).items()


# ---- kill -9 at any time, of one process or of several: finished files stay, and the pixels are the same


SETTINGS_OF_KILLS = ["--num-sampling-steps", "10", "--cfg", "1", "--max-batch", "2", "--seed", "3"]
SAMPLE = ["sample", "--method", "ar", "--num-iter", "16", "--num", "40"]
COMPARE = ["compare", "--methods", "ar", "--num-iter", "64", "--num", "12"]
EVALUATE = ["evaluate", "--method", "ar", "--num-iter", "16", "--num-images", "60", "--space", "digits"]
PIXELS = {"compare": "arr_0", "evaluate": "images"}
AGAIN = {"sample": 1, "compare": 0, "evaluate": 0}  # finished files that a killed run may not have recorded yet


def arguments_of_kills(command, out):
    return [*command, "--checkpoint", small_checkpoint(), *SETTINGS_OF_KILLS, "--out", out]


def pixels(command, out):
    """All images of a finished run, in order."""
    found = []
    for path in stamps(command, out):
        if command == "sample":
            found.append(np.asarray(Image.open(path))[None])
        else:
            with np.load(path) as file:
                found.append(file[PIXELS[command]])
    return np.concatenate(found).astype(int)


def finish(begin, finished_files, allowed, times, ways):
    """Runs a command to its end. It is killed after each of `times`, in one of the `ways`, and started again.

    Returns the times that were not needed.
    """
    existing, status, times = {}, None, list(times)
    while status != 0:
        process = begin()
        try:
            status = process.wait(times[0] if times else None)
            assert status == 0
        except subprocess.TimeoutExpired:
            ways[len(times) % len(ways)](process)
            times.pop(0)
        now = finished_files()
        again = [path for path, written in existing.items() if now.get(path) != written]
        assert len(again) <= allowed
        existing = now
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
            lambda out=out: stamps(name, out),
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
    """Two of torchrun's agents. If one is killed, the other makes its own part, and the same commands make the rest."""
    command = [*EVALUATE, "--num-images", "128"]
    whole, out, log = tmp_path / "whole", tmp_path / "out", tmp_path / "log"

    def begin():
        meet = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
        return [start(arguments_of_kills(command, out), log, [*meet, f"--node_rank={number}"]) for number in range(2)]

    machines = begin()
    wait_until(lambda: stamps("evaluate", out) or machines[0].poll() is not None)
    kill_all(machines[1])
    wait_until(lambda: {out / f"0000{number}.npz" for number in (0, 2, 4, 6)} <= stamps("evaluate", out).keys())
    kill_all(machines[0])  # torchrun itself would wait for the other one
    existing = stamps("evaluate", out)
    assert len(existing) < 8
    assert [machine.wait(300) for machine in begin()] == [0, 0], log.read_text()[-3000:]
    after = stamps("evaluate", out)
    assert existing.items() <= after.items() and len(after) == 8
    assert start(arguments_of_kills(command, whole), log).wait() == 0
    assert np.abs(pixels("evaluate", out) - pixels("evaluate", whole)).max() <= 1
