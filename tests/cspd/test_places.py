"""Places that cannot be written, or are full, or hold garbage."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import subprocess

import pytest
from stores import small_checkpoint

from cspd.cli import main

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


def run(*asked, **more):
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
        assert run(command, out) == 2
        check_told(capsys.readouterr().err, out)
        kept = stamps(command, out)
        assert kept
        mount("remount,size=8m")
        assert run(command, out) == 0
        after = stamps(command, out)
        assert {path: after[path] for path in kept} == kept
        shutil.rmtree(out)


@pytest.mark.parametrize("command", WHAT)
def test_a_file_that_may_not_grow(command, tmp_path, capsys):
    """As of a quota: where no disk can be mounted, this is nearest to one that is full."""
    small_checkpoint()  # is there before
    with largest_file(LARGEST[command] * 1024):
        assert run(command, tmp_path) == 2
    check_told(capsys.readouterr().err, tmp_path)
    kept = stamps(command, tmp_path)
    assert run(command, tmp_path) == 0
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
        assert run(command, tmp_path / "out", "--window", 3, method="speculative", checkpoint=read_only) == 0
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
    assert run(command, tmp_path / "good", method="speculative") == 0
    (costs,) = tmp_path.rglob("costs.json")
    good = costs.read_bytes()
    costs.write_bytes(GARBAGE[command](good))
    assert run(command, tmp_path / "again", method="speculative") == 0
    (entry,) = json.loads(costs.read_text(), parse_constant=pytest.fail)
    assert entry["key"] == json.loads(good)[0]["key"]
