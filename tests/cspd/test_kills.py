"""kill -9 at any time, of one process or of several: nothing that was whole is lost, and the pixels are the same."""

from __future__ import annotations

import random
import subprocess
import time

import numpy as np
import pytest
from launching import free_port, kill_all, kill_launcher, start, two_processes, wait_until
from PIL import Image
from stores import small_checkpoint

SETTINGS = ["--num-sampling-steps", "10", "--cfg", "1", "--max-batch", "2", "--seed", "3"]
SAMPLE = ["sample", "--method", "ar", "--num-iter", "16", "--num", "40"]
COMPARE = ["compare", "--methods", "ar", "--num-iter", "64", "--num", "12"]
EVALUATE = ["evaluate", "--method", "ar", "--num-iter", "16", "--num-images", "60"]
ITEMS = {"sample": "0*.png", "compare": "chunks/*.npz", "evaluate": "0*.npz"}
PIXELS = {"compare": "arr_0", "evaluate": "images"}
AGAIN = {"sample": 1, "compare": 0, "evaluate": 0}  # whole items that a killed run may not have recorded yet


def arguments(command, out):
    return [*command, "--checkpoint", small_checkpoint(), *SETTINGS, "--out", out]


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
    assert start(arguments(command, whole), log, launch()).wait() == 0, log.read_text()
    life = time.monotonic() - begin
    chance = random.Random(0)
    times = [chance.uniform(0, life) for _ in range(kills)]
    for folder in range(kills + 1):
        out = tmp_path / str(folder)
        times = finish(
            lambda out=out: start(arguments(command, out), log, launch()),
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
        return [start(arguments(command, out), log, [*meet, f"--node_rank={number}"]) for number in range(2)]

    machines = begin()
    wait_until(lambda: items("evaluate", out) or machines[0].poll() is not None)
    kill_all(machines[1])
    kept = items("evaluate", out)
    assert 0 < len(kept) < 8
    assert machines[0].wait(60) != 0  # it does not wait for ever
    assert [machine.wait(300) for machine in begin()] == [0, 0], log.read_text()[-3000:]
    after = items("evaluate", out)
    assert {path: after[path] for path in kept} == kept and len(after) == 8
    assert start(arguments(command, whole), log).wait() == 0
    assert np.abs(pixels("evaluate", out) - pixels("evaluate", whole)).max() <= 1
