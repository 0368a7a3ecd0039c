"""A comparison's images: who makes which and when, what is kept, and going on after a stop."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from comparisons import compare, images_of
from stores import small_checkpoint

import cspd
from cspd.cli import main
from cspd.comparison import compare as comparison_compare
from cspd.comparison import study
from cspd.comparison.compare import speed_of
from cspd.comparison.study import Configuration
from cspd.method import Choice


def watch(monkeypatch) -> list[tuple]:
    """What engines make: the guidance, the seeds, and how many slots there are."""
    order = []
    generate = cspd.Engine.generate

    def watched(self, requests, **how):
        order.append((requests[0].cfg, [r.seed for r in requests], self.num_slots))
        return generate(self, requests, **how)

    monkeypatch.setattr(cspd.Engine, "generate", watched)
    return order


QUICK = {"method": "ar", "num_iter": 1, "num_sampling_steps": 2}


def test_configurations_take_turns(digits, tmp_path, monkeypatch):
    """Each after a few rounds that warm up, and not a whole turn."""
    order, added = watch(monkeypatch), []
    step = cspd.Engine.step
    monkeypatch.setattr(cspd.Engine, "step", lambda self: added.append(len(self.scheduler)) or step(self))
    small = digits.with_slots(2)
    rows = [Configuration(str(cfg), cspd.Request(0, cfg=cfg, **QUICK), small) for cfg in (1.0, 2.0, 3.0)]
    compare(rows, [1], 5, tmp_path, progress=False)
    assert order == [
        *[(cfg, [0, 1], 2) for cfg in (1.0, 2.0, 3.0)],
        *[(cfg, [2, 3], 2) for cfg in (2.0, 3.0, 1.0)],
        *[(cfg, [4], 2) for cfg in (3.0, 1.0, 2.0)],
    ]
    assert added == [2, 0, 0] * 3 and not len(small.scheduler)


def test_nothing_of_a_warm_up_stays_in_the_engine(digits, tmp_path):
    """Sequences that are cut off in the middle are gone, and the images are those of their seeds."""
    small = digits.with_slots(1)
    request = cspd.Request(1, method="speculative", window=3, draft="frozen", num_iter=8, num_sampling_steps=6)
    _, (images,) = compare([Configuration("a", request, small)], [1], 1, tmp_path, progress=False)
    expected = (small.generate(request)[0].image.permute(1, 2, 0).numpy() * 255).round()
    assert np.abs(images[0] - expected).max() <= 1
    assert not len(small.scheduler) and not small.runner.round_state


@pytest.mark.parametrize("fits", [True, False])
def test_images_for_quality_are_made_many_at_once(fits, digits, tmp_path, monkeypatch):
    """After the turns that speed is told by; if there is memory for so many."""
    order, with_slots = watch(monkeypatch), cspd.Engine.with_slots

    def more(self, max_batch):
        if not fits:
            raise ValueError("too little memory")
        return with_slots(self, max_batch)

    small = digits.with_slots(1)
    monkeypatch.setattr(cspd.Engine, "with_slots", more)
    monkeypatch.setattr(study, "TIMED", 2)
    monkeypatch.setattr(comparison_compare, "TIMED", 2)
    monkeypatch.setattr(study, "MANY", 3)
    rows = [Configuration(str(cfg), cspd.Request(0, cfg=cfg, **QUICK), small) for cfg in (1.0, 2.0)]
    report, images = compare(rows, [1], 7, tmp_path, progress=False)
    slots = 3 if fits else 1
    assert [(seeds, num) for cfg, seeds, num in order if cfg == 1.0] == [
        ([0], 1),
        ([1], 1),
        ([2, 3, 4], slots),
        ([5, 6], slots),
    ]
    for row in report["rows"]:
        assert len(row["seconds"]) == 2  # of turns of one image
    expected = small.generate([rows[1].request.but(label=1, seed=seed) for seed in range(7)])
    for made, output in zip(images[1], expected):
        assert np.abs(made - (output.image.permute(1, 2, 0).numpy() * 255).round()).max() <= 1


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path):
    """What it ends with is what a run that nothing happened to has."""
    rows, num, seed = 3, 4, 3
    arguments = [
        "compare",
        "--checkpoint",
        small_checkpoint(),
        "--methods",
        "ar,ar:num_iter=64,speculative:window=3:draft=frozen",
    ]
    arguments += ["--num-iter", "4", "--num-sampling-steps", "6", "--cfg", "1", "--seed", str(seed)]
    arguments += ["--num", str(num), "--max-batch", "2"]
    out, whole = tmp_path / "killed", tmp_path / "whole"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "cspd", *arguments, "--out", str(out)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.time() + 120
    while len(list(out.glob("chunks/*.npz"))) < 2 and time.time() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("chunks/*.npz")}
    assert 2 <= len(kept) < 2 * rows and not (out / "comparison.json").exists()

    assert main([*arguments, "--out", str(out)]) == main([*arguments, "--out", str(whole)]) == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    for row in range(rows):
        assert np.abs(images_of(out, row).astype(int) - images_of(whole, row)).max() <= 1


def test_an_interrupted_run_says_that_it_goes_on(tmp_path, monkeypatch, capsys):
    def stop(row, requests, on_progress):
        if any((tmp_path / "chunks").glob("*.npz")):
            signal.raise_signal(signal.SIGINT)
        return timed(row, requests, on_progress)

    timed = study._timed
    monkeypatch.setattr(study, "_timed", stop)
    few = ["--num-iter", "64", "--num-sampling-steps", "2", "--num", "2", "--max-batch", "1", "--out", str(tmp_path)]
    assert main(["compare", "--checkpoint", small_checkpoint(), "--methods", "ar", *few]) == 130
    assert capsys.readouterr().err
    assert [path.name for path in (tmp_path / "chunks").iterdir()] == ["00-00000.npz"]


def test_a_row_has_its_own_seeds(digits, tmp_path):
    quick = {"method": "ar", "num_iter": 2, "num_sampling_steps": 5}
    rows = [Configuration(str(seed), cspd.Request(0, **quick), digits, seed=seed) for seed in (None, 9)]

    def again(own, first=3, num=6):
        changed = [rows[0], dataclasses.replace(rows[1], seed=own)]
        return compare(changed, [1], num, tmp_path, seed=first, progress=False)

    report, images = again(9)
    for made, first in zip(images, (3, 9)):
        outputs = digits.generate([cspd.Request(1, first + i, **quick) for i in range(6)])
        expected = np.stack([(output.image.permute(1, 2, 0).numpy() * 255).round() for output in outputs])
        assert np.abs(made - expected).max() <= 1
    assert [row["settings"].get("seed") for row in report["rows"]] == [None, 9]
    with pytest.raises(ValueError):
        again(10)
    for own in (8, 0):
        with pytest.raises(ValueError, match="seed"):
            again(own)
    with pytest.raises(ValueError, match="seed"):  # of the last image
        again(2**63 - 3)


def test_half_a_chunk_is_none(digits, tmp_path, monkeypatch):
    def full_disk(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    with pytest.raises(OSError, match=r"00-00000\.npz"):
        compare([Configuration("ar", cspd.Request(0, **QUICK), digits)], [0], 2, tmp_path, progress=False)
    assert not list(tmp_path.glob("chunks/*"))


def test_more_images_go_on_and_other_settings_do_not(digits, tmp_path, capsys):
    small = digits.with_slots(4)
    compiled = cspd.load("digits32", max_batch=4, device="cpu", compiled=True)

    def again(num, names=("a", "b"), labels=range(10), seed=0, overwrite=False, engine=small, **changes):
        asked = {"method": "ar", "num_iter": 1, "num_sampling_steps": 2, "cfg": 1.0} | changes
        rows = [Configuration(name, cspd.Request(0, **asked), engine) for name in names]
        return compare(rows, labels, num, tmp_path, seed=seed, overwrite=overwrite, progress=False)

    def stamps():
        return {path: path.stat().st_mtime_ns for path in tmp_path.glob("chunks/*")}

    again(8)
    before = stamps()
    assert len(before) == 4
    again(10)
    assert len(stamps()) == 6 and stamps().items() > before.items()
    _, (images, _) = again(12)  # the last chunk had two images
    assert len(stamps()) == 6 and stamps().items() > before.items() and len(images) == 12
    for changes, named in [
        ({"cfg": 2.0}, "configurations.a.request.cfg was 1.0, now 2.0; configurations.b.request.cfg"),
        ({"engine": compiled}, "machine.compiled was false, now true"),
        ({"seed": 4}, "seed was 0, now 4"),
        ({"labels": [1, 2]}, "labels was [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], now [1, 2]"),
        ({"names": ("b", "a")}, 'order was ["a", "b"], now ["b", "a"]'),
        ({"names": ("a",)}, "configurations.b was something, now nothing"),
    ]:
        with pytest.raises(ValueError, match="--overwrite") as error:
            again(10, **changes)
        assert named in str(error.value)
    assert len(stamps()) == 6
    (tmp_path / "comparison.csv").write_text("of the old run")
    (tmp_path / "comparison.yaml").write_text("the user's own")
    _, (images, _) = again(3, cfg=2.0, overwrite=True)
    assert len(stamps()) == 2 and {path.name for path in tmp_path.iterdir()} == {
        ".cspd.lock",
        "chunks",
        "run.json",
        "comparison.yaml",
    }
    first, second = tmp_path / "chunks" / "00-00000.npz", tmp_path / "chunks" / "01-00000.npz"
    for damaged in (b"half", npy(), second.read_bytes()):  # the last is whole, but of another configuration
        first.write_bytes(damaged)
        capsys.readouterr()
        assert (again(3, cfg=2.0)[1][0] == images).all() and len(images) == 3
        assert capsys.readouterr().err
    record = tmp_path / "run.json"
    whole = record.read_text()
    for text in (
        "{",
        "[1]",
        whole.replace("cspd.rounds/", "cspd.rounds/0"),
        whole.replace('"windows"', '"window"'),
        whole.replace("chunks/00-00000.npz", "../00-00000.npz"),
    ):
        record.write_text(text)
        with pytest.raises(ValueError, match=r"run\.json"):
            again(3, cfg=2.0)
    record.unlink()
    with pytest.raises(ValueError, match=r"chunks/00-00000\.npz"):
        again(3, cfg=2.0)
    assert len(stamps()) == 2 and not record.exists()


def npy():
    """A file that numpy reads, but as no archive."""
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


def test_a_draft_and_its_file_are_told_apart(digits, tmp_path):
    quick = {"gamma": 32, "prefill": 0.9, "num_iter": 1, "num_sampling_steps": 3}

    def again(draft):
        request = cspd.Request(0, method="cspd", chains="speculative", window=2, draft=draft, **quick)
        row = Configuration("a", request, digits, files={"draft": {"file": "draft.safetensors"}})
        with study.comparison_store(tmp_path) as store:
            with study.taking_turns([row], [0], [1], 0, store, progress=False) as turns:
                turns.make(1)

    again("frozen")
    with pytest.raises(ValueError):
        again("calibrated")


def test_an_open_window_is_chosen_once(digits, tmp_path, monkeypatch):
    quick = {"method": "speculative", "num_iter": 2, "num_sampling_steps": 5}
    row = Configuration("speculative", cspd.Request(0, **quick), digits)
    for window in (3, 2):  # this machine changes its mind
        chosen = Choice({"window": window}, "")
        monkeypatch.setattr(digits.runners["MAR"].tuning, "choice", lambda *args, chosen=chosen: chosen)
        report, _ = compare([row], [0], 8 * window, tmp_path, progress=False)
        assert report["rows"][0]["settings"]["window"] == 3


COST = dict.fromkeys(study.COSTS, 1.0) | {"step_compression": None, "judged": 3, "accepted": 2}
REST = {"images": None, "seconds": 0.5, "peak_bytes": 7, "costs": [COST, COST]}
MADE_OF = {"settings": {"seed": 3}, "requests": [{"seed": 3}, {"seed": 4}]}


def write_old(path, images=None, **changes):
    """A chunk as versions without digest wrote it."""
    rest = np.frombuffer(json.dumps(REST | changes).encode(), np.uint8)
    np.savez(path, arr_0=np.zeros((2, 8, 8, 3), np.uint8) if images is None else images, chunk=rest)


def test_a_chunk_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "chunk.npz"
    chunk = study.Chunk(np.arange(384, dtype=np.uint8).reshape(2, 8, 8, 3), 0.5, 7, [COST, COST])
    study.write_chunk(path, chunk, MADE_OF)
    found = study.read_chunk(path, MADE_OF, 8)
    assert (found.images == chunk.images).all() and found[1:] == chunk[1:]
    assert study.read_chunk(path, MADE_OF | {"requests": [{"seed": 4}, {"seed": 5}]}, 8) is None
    assert study.read_chunk(path, MADE_OF | {"settings": {"seed": 4}}, 8) is None
    write_old(path)
    assert study.read_chunk(path, MADE_OF, 8)[1:] == chunk[1:]


@pytest.mark.parametrize(
    "changes",
    [
        {"images": np.zeros((3, 8, 8, 3), np.uint8)},
        {"images": np.zeros((2, 4, 4, 3), np.uint8)},
        {"images": np.zeros((2, 8, 8, 3))},
    ],
)
def test_a_chunk_of_others_is_none(tmp_path, changes):
    write_old(tmp_path / "chunk.npz", **changes)
    assert study.read_chunk(tmp_path / "chunk.npz", MADE_OF, 8) is None


def test_turns_begin_anew_after_a_rung_for_those_that_go_on(digits, tmp_path):
    small = digits.with_slots(2)
    request = cspd.Request(0, method="ar", num_iter=1, num_sampling_steps=2, cfg=1.0)
    rows = [Configuration(name, request.but(cfg_schedule="constant"), small) for name in "abc"]
    with (
        study.comparison_store(tmp_path) as store,
        study.taking_turns(rows, [0], [3, 6], 5, store, progress=False) as turns,
    ):
        assert [[len(chunk.images) for chunk in made] for made in turns.make(3)] == [[2, 1]] * 3
        chosen = turns.make(6, [0, 2])
        assert [[len(chunk.images) for chunk in made] for made in chosen] == [[2, 1, 2, 1]] * 2
    seeds = [[request.seed for request in part] for part in turns.parts[1]]
    assert seeds == [[5, 6], [7], [8, 9], [10]]
    assert len(list(tmp_path.glob("chunks/01-*.npz"))) == 2 and len(list(tmp_path.glob("chunks/*.npz"))) == 10
    plan = [speed_of(row, turns.plans[0], made, chosen[0]) for row, made in zip(rows, chosen)]
    assert [len(row["seconds"]) for row in plan] == [2, 2]  # turns of one image do not count for speed
