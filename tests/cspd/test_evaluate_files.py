"""Files of `cspd evaluate` that are damaged, of other images or of a killed run are made again, and nothing else is."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from evaluations import NUM, SEED, arguments, evaluate, images_of, near, report_of, stamps, whole_run  # noqa: F401 - a fixture
from launching import environment, free_port, kill_all, start, two_processes, wait_until

from cspd.evaluation import run as evaluation_run
from cspd.evaluation.run import SIZE, Shards
from cspd.runs import LOCK


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


LESS_STATS = np.array(json.dumps([{"iterations": "two"}] * SIZE))
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
    "old statistics": lambda path: old(path, stats=LESS_STATS),
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
