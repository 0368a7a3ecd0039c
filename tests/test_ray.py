"""Ray: its workers make the images of one process, also if they are killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from launching import environment, wait_until
from stores import small_checkpoint

import cspd
from cspd.cli import main
from cspd.evaluation.run import SIZE, digest_of_pixels

ray = pytest.importorskip("ray")
SETTINGS = {"method": "ar", "num_iter": 4, "num_sampling_steps": 20, "cfg": 1.0}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A Ray of four workers on this machine, whose workers find this cspd."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for name, value in environment().items():
            patch.setenv(name, value)
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def requests_of(num, **changes):
    return [cspd.Request(i % 10, 5000 - i, **SETTINGS | changes) for i in range(num)]


def undisturbed(requests):
    """Digests of the images of one process. Batches of four are the same whoever makes a shard."""
    engine = cspd.load(small_checkpoint(), max_batch=4, device="cpu")
    return [digest_of_pixels(cspd.pixels.to_uint8(output.image)) for output in engine.generate(requests)]


def digests_of(shards):
    return [digest_of_pixels(shards[i]) for i in range(len(shards))]


def descendants(pid):
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            yield child
            yield from descendants(child)


def workers():
    """The processes that hold an engine: descendants of this process, not of another Ray."""
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::MapWorker"):
                found.append(pid)
    return found


def stamps(out):
    return {path.name: path.stat().st_mtime_ns for path in out.glob("*.npz")}


@pytest.fixture
def summaries(monkeypatch):
    """The summaries of the runs that follow."""
    found = []
    make = cspd.ray.make

    def noted(*arguments, **how):
        shards, summary = make(*arguments, **how)
        found.append(summary)
        return shards, summary

    monkeypatch.setattr(cspd.ray, "make", noted)
    return found


def killed_at_random(out, num_workers, kills, shards):
    """Samples while workers are killed, one whenever another shard is there; the shards, and the number of kills."""
    chance = random.Random(0)
    requests = requests_of(shards * SIZE)
    how = {"num_gpus": 0, "workers": num_workers, "max_batch": 4, "progress": False}
    running = ThreadPoolExecutor(1).submit(cspd.ray.sample, requests, small_checkpoint(), out=out, **how)
    done = 0
    while done < kills and not running.done():
        written = len(stamps(out))
        wait_until(lambda written=written: len(stamps(out)) > written or running.done(), 300)
        before = stamps(out)
        time.sleep(chance.random() * 0.3)
        alive = workers()
        if alive and not running.done():
            os.kill(chance.choice(alive), signal.SIGKILL)
            done += 1
        after = stamps(out)
        assert after.items() >= before.items()
    finished = stamps(out)
    images = running.result(300)
    # nothing that was written is made again
    assert stamps(out).items() >= finished.items()
    assert digests_of(images) == undisturbed(requests)
    return done


@pytest.mark.slow
def test_a_run_survives_twenty_kills(tmp_path, summaries):
    assert killed_at_random(tmp_path / "out", 4, 20, 60) == 20
    assert 4 <= summaries[0]["restarted"] <= 20 and summaries[0]["images_made"] <= 60 * SIZE


@pytest.mark.slow  # half a minute
def test_a_run_survives_two_kills(tmp_path, summaries):
    assert killed_at_random(tmp_path / "out", 2, 2, 8) == 2
    assert 1 <= summaries[0]["restarted"] <= 2 and summaries[0]["images_made"] <= 8 * SIZE


@pytest.mark.slow
def test_images_as_a_dataset():
    requests = requests_of(20)
    rows = cspd.ray.sample(requests, small_checkpoint(), num_gpus=0, workers=1, max_batch=4).take_all()
    rows.sort(key=lambda row: row["index"])
    assert [(row["label"], row["seed"]) for row in rows] == [(i % 10, 5000 - i) for i in range(20)]
    found = [digest_of_pixels(torch.from_numpy(row["image"].copy()).permute(2, 0, 1)) for row in rows]
    assert found == undisturbed(requests)


def test_bad_requests_are_refused_by_their_setting(tmp_path):
    different = [*requests_of(2), *requests_of(1, temperature=0.9)]
    with pytest.raises(ValueError, match="temperature"):
        cspd.ray.sample(different, small_checkpoint(), num_gpus=0)
    with pytest.raises(ValueError, match="label"):
        cspd.ray.sample([cspd.Request(99, **SETTINGS)], small_checkpoint(), num_gpus=0, out=tmp_path / "out")
    with pytest.raises(ValueError, match="GPU"):
        cspd.ray.sample(requests_of(1), small_checkpoint())
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_commands_on_a_cluster(tmp_path, capsys):
    """`sample` and `evaluate` make the same files as without Ray, and the same command makes nothing twice."""
    settings = ["--checkpoint", small_checkpoint(), "--method", "ar", "--num-iter", "2", "--num-sampling-steps", "5"]
    settings += ["--cfg", "1", "--max-batch", "4", "--num", "40", "--labels", "0-9", "--device", "cpu"]
    assert main(["sample", *settings, "--out", str(tmp_path / "one"), "--shard", "0/1"]) == 0
    for command, more in (("sample", []), ("evaluate", ["--space", "digits"])):
        out = tmp_path / command
        settings = [*settings, *more]
        assert main([command, *settings, "--out", str(out), "--ray", "local"]) == 0
        before = stamps(out)
        assert (out / "images.jsonl").read_text() == (tmp_path / "one" / "images.jsonl").read_text()
        assert main([command, *settings, "--out", str(out), "--ray", "local"]) == 0
        assert stamps(out) == before
        assert main([command, *settings, "--out", str(out), "--ray", "local", "--seed", "1"]) == 2
        assert "seed" in capsys.readouterr().err.splitlines()[-1]
        assert main([command, *settings, "--out", str(out), "--ray", "local", "--seed", "1", "--overwrite"]) == 0
        assert not stamps(out).items() & before.items()
        assert main(["verify", str(out)]) == 0


def test_without_ray_there_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(cspd, "ray", raising=False)  # which imports it first
    monkeypatch.delitem(sys.modules, "cspd.ray")
    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["sample", "--checkpoint", small_checkpoint(), "--ray", "auto", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "[ray]" in error and error.count("\n") == 1
