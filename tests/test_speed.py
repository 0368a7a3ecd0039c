"""The speed of a run relative to baseline sampling: what is timed, how long that takes, and what is reported."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch
from PIL import Image
from stores import small_checkpoint, small_vq_checkpoint

import cspd
from cspd import Request, speed
from cspd.cli import main, sample
from cspd.cli.sample import sample_to_folder
from cspd.inpainting import Inpainting
from cspd.models import bundled
from cspd.pixels import to_pil
from cspd.speed import FEWEST, against_plain, compared, is_plain, iteration_at, num_affordable, round_weights, starts
from cspd.summary import WORTH, speed_line

QUICK = {"num_iter": 8, "num_sampling_steps": 12, "cfg": 2.0}
QUICK_RUN = "--num-iter 12 --num-sampling-steps 6 --cfg 1 --window 2 --draft frozen --device cpu".split()


@pytest.fixture(scope="module")
def engine():
    return cspd.load(small_checkpoint(), max_batch=2, device="cpu")


def record_of(out) -> dict:
    return json.loads((out / "samples.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("num_iter", [64, 16])
def test_a_few_rounds_represent_all(num_iter, engine):
    """If a round costs something, more for each committed token, and more for each token that it commits."""
    request = engine.check(Request(0, method="ar", num_iter=num_iter))
    before = starts(request, 64)
    costs = 5 + 0.05 * before + 0.5 * np.diff(before, append=64)
    weights = round_weights(before, 64)
    assert weights.min() > 0 and (weights[:-1] > 0.9 * weights[1:]).all()  # late rounds commit more
    fractions = (np.arange(num_iter) / num_iter + before / 64) / 2
    timed = [iteration_at(fractions, fraction) for fraction in (np.arange(8) + 0.5) / 8]
    times = [(costs[i], weights[i]) for i in timed]
    found = compared(times, num_iter, costs.sum(), costs.sum())
    assert found["speedup"] == pytest.approx(1, rel=0.06) and np.diff(found["speedup_range"]) < 0.4


def test_a_speed_up_has_a_range_or_is_unknown():
    """By recorded times of rounds, of an idle machine and of a busy one."""
    idle = [0.020, 0.021, 0.020, 0.020, 0.021, 0.020]
    found = compared([(own, 1.0) for own in idle], 64, 0.9, 0.8)
    assert found["speedup"] == pytest.approx((0.1 + 64 * 0.02033) / 0.9, rel=1e-3)
    low, high = found["speedup_range"]
    assert 1.5 < low < found["speedup"] < high < 1.65
    rising = [(own, 1.0) for own in np.linspace(0.02, 0.04, 20)]  # by more tokens at once, which is no noise
    assert np.diff(compared(rising, 64, 0.9, 0.8)["speedup_range"]) < 0.2
    busy = [0.020, 0.061, 0.020, 0.098, 0.022, 0.020]
    found = compared([(own, 1.0) for own in busy], 64, 0.9, 0.8)
    assert found["speedup"] is None and "busy" in found["speedup_unknown"]


@pytest.mark.parametrize(
    "seconds, cost, num",
    [
        (1.0, 0.01, 10),
        (0.5, 0.02, 8),
        (1e6, 1e-3, 30),
        (60.0, 1.5, 4),
        (600.0, 2.0, 4),
        (10.0, 5.0, 0),
        (3600.0, 60, 0),
    ],
)
def test_timing_is_bounded(seconds, cost, num):
    assert num_affordable(seconds, cost) == num


def test_rounds_begin_after_the_given_tokens(engine):
    known = Inpainting.of(torch.zeros(64, engine.runner.config.token_dim), np.arange(64) < 16)
    request = engine.check(Request(0, method="ar", num_iter=4, known=known))
    before = starts(request, 64)
    assert before[0] == 48 and len(before) == 4
    batch = speed.batch_at(engine, request, 0, num=1)
    rounds = 0
    while batch.sequences:
        batch.round()
        rounds += 1
    assert rounds == 4
    (sequence,) = speed.batch_at(engine, request, int(before[2]), num=1).sequences
    assert (sequence.iteration, sequence.num_committed) == (2, before[2])
    assert starts(request, 64, 1).tolist() == list(range(48, 64))


@pytest.fixture
def idle(monkeypatch):
    """Rounds of baseline sampling have recorded times, as of an idle machine. Yields a list with one for each."""
    timed = []

    def seconds_of(work, device, clock):
        timed.append(1e-6 * len(work.__self__.sequences))  # quick on any machine
        work()
        return timed[-1]

    monkeypatch.setattr(speed, "seconds_of", seconds_of)
    return timed


@pytest.mark.parametrize(
    "checkpoint, settings",
    [
        (small_checkpoint, QUICK | {"method": "speculative", "window": 4, "draft": "frozen"}),
        pytest.param(
            small_checkpoint, QUICK | {"method": "lazymar", "warmup": 1, "refresh": 3}, marks=pytest.mark.slow
        ),
        (small_vq_checkpoint, {"draft": "jacobi", "window": 12}),
    ],
)
def test_a_run_takes_turns_with_baseline_sampling(checkpoint, settings, idle, tmp_path):
    """In full batches and the rest. It changes no image."""
    num = 3
    engine = cspd.load(checkpoint(), max_batch=2, device="cpu")
    requests = [Request(i, i, **settings) for i in range(num)]
    without = [to_pil(output.image).tobytes() for output in engine.generate(requests)]
    assert not idle
    summary = sample_to_folder(engine, requests, tmp_path, {})["summary"]
    assert [Image.open(path).tobytes() for path in sorted(tmp_path.glob("0*.png"))] == without
    assert len(idle) >= FEWEST and record_of(tmp_path)["summary"]["speedup"] == summary["speedup"] > 0
    assert summary["plain_seconds_per_image"] * num == pytest.approx(summary["speedup"] * summary["seconds"])
    low, high = summary["speedup_range"]
    assert low <= summary["speedup"] <= high


def test_the_seconds_of_timing_are_not_the_runs(engine, monkeypatch, tmp_path):
    slept = []

    def seconds_of(work, device, clock):
        time.sleep(0.1)
        slept.append(0.1)
        return 0.01

    monkeypatch.setattr(speed, "seconds_of", seconds_of)
    request = Request(0, method="speculative", window=4, draft="frozen", **QUICK)
    summary = sample_to_folder(engine, [request], tmp_path, {})["summary"]
    between_rounds = summary["seconds"] - sum(summary["seconds_by_phase"].values())
    assert len(slept) > FEWEST and between_rounds < 0.75 * sum(slept)


def test_a_round_that_cannot_be_timed_loses_no_image(engine, idle, monkeypatch, tmp_path):
    def fail(*rounds):
        raise RuntimeError("no memory")

    monkeypatch.setattr(speed, "batch_at", fail)
    request = Request(0, method="speculative", window=4, draft="frozen", **QUICK)
    summary = sample_to_folder(engine, [request], tmp_path, {})["summary"]
    assert summary["speedup"] is None and "no memory" in summary["speedup_unknown"]
    assert len(record_of(tmp_path)["images"]) == 1


def test_baseline_sampling_is_1_and_needs_no_timing(engine):
    """`speculative` with a window of 0 is baseline sampling; nothing is reported of `ar`."""
    plain = engine.resolve(Request(0, method="ar", **QUICK))
    assert is_plain(plain) and against_plain(plain, 3, 2.0, 1.0, None) == {}
    request = engine.resolve(Request(0, method="speculative", window=0, **QUICK | {"num_sampling_steps": 8}))
    found = against_plain(request, 4, 2.0, 1.0, None)
    assert is_plain(request) and found["speedup"] == 1 and found["plain_seconds_per_image"] == 0.5
    assert found["alternative"] is None  # its chains would be no shorter
    cached = engine.resolve(Request(0, method="speculative", window=0, backbone="cached", **QUICK))
    assert not is_plain(cached)


def test_a_resumed_run_has_the_speed_of_the_images_that_it_makes(idle, tmp_path, capsys):
    """And one that makes none has the earlier one's."""
    quick = ["sample", *QUICK_RUN, "--checkpoint", small_checkpoint(), "--labels", "0-2", "--out", str(tmp_path)]

    def last_line():
        assert main(quick) == 0
        return capsys.readouterr().out.splitlines()[-1]

    first = last_line()
    assert first == speed_line(record_of(tmp_path)["summary"], 3) and "as fast" in first
    assert last_line() == first
    next(iter(tmp_path.glob("00001*.png"))).unlink()
    idle.clear()
    assert last_line() == speed_line(record_of(tmp_path)["summary"], 1) and idle


@pytest.mark.parametrize("command, num, most", [("sample", 1, 1), ("sample", 3, 3), ("sample", 9, 8), ("edit", 2, 2)])
def test_an_engine_has_slots_for_the_images_that_run_at_once(command, num, most, tmp_path, monkeypatch):
    slots = []

    def load(args, max_batch):
        slots.append(max_batch)
        raise ValueError("enough")

    monkeypatch.setattr(sample, "load_engine", load)
    image = str(bundled()["digits32"] / "target.webp")
    own = {"sample": ["--labels", "0-9"], "edit": ["--label", "3", "--keep", "0.5", "--image", image]}
    assert main([command, *own[command], "--num", str(num), "--out", str(tmp_path)]) == 2
    assert slots == [most]


SLOWER = {"speedup": 1.0, "speedup_range": [1.0, 1.0]}


@pytest.mark.parametrize(
    "found, parts",
    [
        ({"speedup": 2.31, "speedup_range": [2.2, 2.4]}, ["2.3x (2.2 to 2.4)"]),
        ({"speedup": 2.31, "speedup_range": [2.30, 2.32]}, ["2.3x as"]),
        ({"speedup": WORTH}, ["1.1x"]),  # of an older version
        ({"speedup": 1.2, "speedup_range": [0.9, 1.5]}, ["1.2x (0.9 to 1.5)", "no speed-up", "8 images"]),
        ({"speedup": 0.7, "alternative": None}, ["0.7x", "8 images"]),
        (SLOWER | {"alternative": "calibrated"}, ["8 images", "--method calibrated"]),
        ({"speedup": None, "speedup_unknown": "of this reason", "alternative": None}, ["of this reason"]),
    ],
)
def test_the_reported_line(found, parts):
    line = speed_line(found, 8)
    assert all(part in line for part in parts)
    assert line.count("x ") == (found["speedup"] not in (None, 1.0))  # one number
    if found["speedup"] == 1:
        assert "1 image at once" in speed_line(found, 1)


def test_nothing_is_reported_of_baseline_sampling():
    assert speed_line({}, 8) is None
