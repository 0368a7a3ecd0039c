"""The speed of a run relative to baseline sampling: what is timed, how long that takes, and what is reported."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest
import torch
from stores import small_checkpoint, small_vq_checkpoint

import cspd
from cspd import Request, speed
from cspd.cli import main, sample
from cspd.cli.sample import sample_to_folder
from cspd.continuous import tuning
from cspd.models import bundled
from cspd.request import Inpainting
from cspd.runs import WORTH, speed_line
from cspd.speed import against_plain, starts

QUICK = {"num_iter": 8, "num_sampling_steps": 12, "cfg": 2.0}
QUICK_RUN = "--num-iter 2 --num-sampling-steps 6 --cfg 1 --window 2 --draft frozen --device cpu".split()


@pytest.fixture(scope="module")
def engine():
    return cspd.load(small_checkpoint(), max_batch=2, device="cpu")


def record_of(out) -> dict:
    return json.loads((out / "samples.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("num_iter", [64, 16, 3, 1])
def test_a_few_rounds_represent_all(engine, num_iter):
    """If a round costs something, more for each committed token, and more for each token that it commits."""
    request = engine.check(Request(0, method="ar", num_iter=num_iter))
    before = starts(request, 64)
    costs = 5 + 0.05 * before + 3 * np.diff(before, append=64)
    by_committed = dict(zip(before.tolist(), costs))
    for num in range(1, 1 + min(num_iter, 5)):
        chosen = speed._chosen_rounds(before, 64, num)
        assert len(chosen) == num and sum(chosen.values()) == num_iter
        assert by_committed.keys() >= chosen.keys()
    estimated = sum(weight * by_committed[committed] for committed, weight in chosen.items())
    assert estimated == pytest.approx(costs.sum(), rel=0.06)


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


@pytest.mark.parametrize(
    "checkpoint, settings",
    [
        (small_checkpoint, QUICK | {"method": "speculative", "window": 4, "draft": "frozen"}),
        (small_vq_checkpoint, {"draft": "jacobi", "window": 4}),
    ],
)
def test_a_run_is_compared_with_baseline_sampling(checkpoint, settings, tmp_path):
    """In full batches and the rest, after everything is written. It changes no image."""
    num = 3
    engine = cspd.load(checkpoint(), max_batch=2, device="cpu")
    requests = [Request(i, i, **settings) for i in range(num)]
    for name, asked in (("without", False), ("with", True)):
        record = sample_to_folder(engine, requests, tmp_path / name, {}, progress=False, speed=asked)
    pngs = [{path.name: path.read_bytes() for path in (tmp_path / name).glob("0*.png")} for name in ("without", "with")]
    assert pngs[0] == pngs[1] and len(pngs[0]) == num
    assert "speedup" not in record_of(tmp_path / "without")["summary"]
    summary = record["summary"]
    assert record_of(tmp_path / "with")["summary"]["speedup"] == summary["speedup"]
    assert 0.02 < summary["speedup"] < 50
    assert summary["plain_seconds_per_image"] * num == pytest.approx(summary["speedup"] * summary["seconds"])


def test_baseline_sampling_is_1_and_needs_no_timing(engine, monkeypatch):
    """`speculative` with a window of 0 is baseline sampling; nothing is reported of `ar`."""
    monkeypatch.setattr(speed, "_batch_rounds", None)
    assert against_plain(engine, engine.resolve(Request(0, method="ar", **QUICK)), 3, 2.0, 1.0) == {}
    request = engine.resolve(Request(0, method="speculative", window=0, **QUICK | {"num_sampling_steps": 8}))
    found = against_plain(engine, request, 4, 2.0, 1.0)
    assert found == {"speedup": 1.0, "plain_seconds_per_image": 0.5, "alternative": None}
    cached = engine.resolve(Request(0, method="speculative", window=0, backbone="cached", **QUICK))
    with pytest.raises(TypeError):  # not baseline sampling, so it would be timed
        against_plain(engine, cached, 4, 2.0, 1.0)


def test_nothing_is_fitted_to_time_the_alternative(small_mar, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = cspd.Engine(cspd.MARModels(small_mar), max_batch=2, device="cpu")
    request = engine.resolve(Request(0, method="speculative", window=0, **QUICK))
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "trace", None)
        found = against_plain(engine, request, 2, 2.0, 1.9)["alternative"]
    assert found == {"method": "calibrated", "speedup": None, "difference": None}
    fitted = engine.resolve(Request(0, method="calibrated", **QUICK))
    monkeypatch.setattr(tuning, "trace", None)
    found = against_plain(engine, request, 2, 2.0, 1.9)["alternative"]
    assert found["speedup"] > 0 and engine.generate(fitted)[0].stats.difference == found["difference"]


def test_timing_is_bounded(engine, monkeypatch):
    """It is skipped if a round may take too long, and ended if one does."""
    request = engine.resolve(Request(0, method="speculative", window=4, draft="frozen", **QUICK))
    timed = []
    monkeypatch.setattr(speed, "_round", lambda *args: timed.append(args) or 0.1)
    assert against_plain(engine, request, 2, 1.0, 1.0)["speedup"] > 0 and timed
    timed.clear()
    unknown = against_plain(engine, request, 2, 100.0, 100.0)  # of 8 rounds of 12 s each
    assert unknown["speedup"] is None and unknown["speedup_unknown"] and not timed
    monkeypatch.setattr(speed, "_round", lambda *args: timed.append(args) or 9.0)
    assert against_plain(engine, request, 2, 10.0, 1.0)["speedup"] is None and len(timed) == 2


def test_a_run_ends_with_its_speed_and_loses_nothing_if_that_is_stopped(tmp_path, monkeypatch, capsys):
    quick = ["sample", *QUICK_RUN, "--checkpoint", small_checkpoint(), "--labels", "0-2", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(speed, "_round", lambda *args: signal.raise_signal(signal.SIGINT))
        assert main(quick) == 130
    assert "3" in capsys.readouterr().err
    assert len(record_of(tmp_path)["images"]) == 3 and (tmp_path / "grid.png").is_file()
    assert main([*quick, "--overwrite"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == speed_line(record_of(tmp_path)["summary"], 3)


@pytest.mark.parametrize("command, num, most", [("sample", 1, 1), ("sample", 3, 3), ("sample", 9, 8), ("edit", 2, 2)])
def test_an_engine_has_slots_for_the_images_that_run_at_once(command, num, most, tmp_path, monkeypatch):
    slots = []

    def load(args, max_batch):
        slots.append(max_batch)
        raise ValueError("enough")

    monkeypatch.setattr(sample, "load_engine", load)
    image = str(bundled()["digits32"] / "target.png")
    own = {"sample": ["--labels", "0-9"], "edit": ["--label", "3", "--keep", "0.5", "--image", image]}
    assert main([command, *own[command], "--num", str(num), "--out", str(tmp_path)]) == 2
    assert slots == [most]


SLOWER = {"speedup": 1.0, "alternative": {"method": "calibrated", "speedup": None, "difference": None}}


@pytest.mark.parametrize(
    "found, parts",
    [
        ({"speedup": 2.31}, ["2.3x"]),
        ({"speedup": WORTH}, ["1.1x"]),
        ({"speedup": 0.7, "alternative": None}, ["0.7x", "8 images"]),
        (SLOWER, ["8 images", "--method calibrated", "cspd calibrate"]),
        (SLOWER | {"alternative": {"method": "calibrated", "speedup": 2.52, "difference": 0.0496}}, ["2.5x", "0.05"]),
        ({"speedup": None, "speedup_unknown": "of this reason", "alternative": None}, ["of this reason"]),
    ],
)
def test_the_reported_line(found, parts):
    line = speed_line(found, 8)
    assert all(part in line for part in parts)
    if found["speedup"] == 1:
        assert "1.0x" not in line and "1 image at once" in speed_line(found, 1)


def test_nothing_is_reported_of_baseline_sampling():
    assert speed_line({}, 8) is None
