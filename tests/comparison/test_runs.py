"""A comparison's images: which configuration generates which and when, what exists already, and resuming."""

from __future__ import annotations

import dataclasses
import json
import signal

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
from cspd.tuner import Choice

QUICK = {"method": "ar", "num_iter": 1, "num_sampling_steps": 2}


def pixels(outputs):
    return np.stack([(output.image.permute(1, 2, 0).numpy() * 255).round() for output in outputs])


def stamps(out):
    return {path: path.stat().st_mtime_ns for path in out.glob("chunks/*")}


@pytest.fixture
def order(monkeypatch):
    """What engines generate: the guidance, the seeds, and the number of slots."""
    generated = []
    generate = cspd.Engine.generate

    def watched(self, requests, **how):
        generated.append((requests[0].cfg, [request.seed for request in requests], self.num_slots))
        return generate(self, requests, **how)

    monkeypatch.setattr(cspd.Engine, "generate", watched)
    return generated


def test_configurations_take_turns_after_a_few_rounds_of_warm_up(order, digits, tmp_path, monkeypatch):
    in_flight = []
    step = cspd.Engine.step
    monkeypatch.setattr(cspd.Engine, "step", lambda self: in_flight.append(len(self.scheduler)) or step(self))
    small = digits.with_slots(2)
    rows = [Configuration(str(cfg), cspd.Request(0, cfg=cfg, **QUICK), small) for cfg in (1.0, 2.0, 3.0)]
    compare(rows, [1], 5, tmp_path, progress=False)
    assert order == [
        *[(cfg, [0, 1], 2) for cfg in (1.0, 2.0, 3.0)],
        *[(cfg, [2, 3], 2) for cfg in (2.0, 3.0, 1.0)],
        *[(cfg, [4], 2) for cfg in (3.0, 1.0, 2.0)],
    ]
    assert in_flight == [2, 0, 0] * 3 and not len(small.scheduler)


def test_a_warm_up_leaves_nothing_in_the_engine(digits, tmp_path):
    small = digits.with_slots(1)
    request = cspd.Request(1, method="speculative", window=3, draft="frozen", num_iter=8, num_sampling_steps=6)
    _, (images,) = compare([Configuration("a", request, small)], [1], 1, tmp_path, progress=False)
    assert np.abs(images - pixels(small.generate(request))).max() <= 1
    assert not len(small.scheduler)


@pytest.mark.parametrize("fits", [True, False])
def test_images_for_quality_are_generated_many_at_once(fits, order, digits, tmp_path, monkeypatch):
    """After the turns that measure speed, and if there is memory."""
    with_slots = cspd.Engine.with_slots

    def more(self, max_batch):
        if not fits:
            raise ValueError("too little memory")
        return with_slots(self, max_batch)

    small = digits.with_slots(1)
    monkeypatch.setattr(cspd.Engine, "with_slots", more)
    monkeypatch.setattr(comparison_compare, "TIMED", 2)
    monkeypatch.setattr(study, "MANY", 3)
    rows = [Configuration(str(cfg), cspd.Request(0, cfg=cfg, **QUICK), small) for cfg in (1.0, 2.0)]
    report, images = compare(rows, [1], 7, tmp_path, progress=False)
    slots = 3 if fits else 1
    turns = [(seeds, num) for cfg, seeds, num in order if cfg == 1.0]
    assert turns == [([0], 1), ([1], 1), ([2, 3, 4], slots), ([5, 6], slots)]
    assert all(len(row["seconds"]) == 2 for row in report["rows"])
    expected = pixels(small.generate([rows[1].request.but(label=1, seed=seed) for seed in range(7)]))
    assert np.abs(images[1] - expected).max() <= 1


def test_an_interrupted_run_resumes(tmp_path, monkeypatch, capsys):
    def stop(row, requests, on_progress):
        if any(tmp_path.glob("chunks/*.npz")):
            signal.raise_signal(signal.SIGINT)
        return timed(row, requests, on_progress)

    timed = study._timed
    arguments = ["compare", "--checkpoint", small_checkpoint(), "--methods", "ar", "--out", str(tmp_path)]
    arguments += ["--num-iter", "8", "--num-sampling-steps", "2", "--num", "2", "--max-batch", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(study, "_timed", stop)
        assert main(arguments) == 130
    assert capsys.readouterr().err
    before = stamps(tmp_path)
    assert [path.name for path in before] == ["00-00000.npz"]
    assert main(arguments) == 0
    assert stamps(tmp_path).items() > before.items() and len(images_of(tmp_path, 0)) == 2


def test_a_row_has_its_own_seeds(digits, tmp_path):
    request = cspd.Request(0, method="ar", num_iter=2, num_sampling_steps=5)
    rows = [Configuration(str(seed), request, digits, seed=seed) for seed in (None, 9)]

    def again(own, first=3, num=6):
        changed = [rows[0], dataclasses.replace(rows[1], seed=own)]
        return compare(changed, [1], num, tmp_path, seed=first, progress=False)

    report, images = again(9)
    for made, first in zip(images, (3, 9)):
        expected = pixels(digits.generate([request.but(label=1, seed=first + i) for i in range(6)]))
        assert np.abs(made - expected).max() <= 1
    assert [row["settings"].get("seed") for row in report["rows"]] == [None, 9]
    with pytest.raises(ValueError, match="overwrite"):  # the images of 9 are there
        again(10)
    with pytest.raises(ValueError, match="overlap"):
        again(8)
    with pytest.raises(ValueError, match="seed"):  # of the last image
        again(9, first=2**63 - 3)


def test_a_run_is_extended_but_not_mixed_with_other_settings(digits, tmp_path, capsys):
    small = digits.with_slots(4)

    def again(num, labels=range(10), overwrite=False, **changes):
        asked = {"method": "ar", "num_iter": 1, "num_sampling_steps": 2, "cfg": 1.0} | changes
        rows = [Configuration(name, cspd.Request(0, **asked), small) for name in ("a", "b")]
        return compare(rows, labels, num, tmp_path, overwrite=overwrite, progress=False)

    again(8)
    before = stamps(tmp_path)
    again(10)
    _, (images, _) = again(12)  # the last chunk had two images
    assert len(before) == 4 and len(stamps(tmp_path)) == 6 and len(images) == 12
    assert stamps(tmp_path).items() > before.items()
    for changes, named in [
        ({"cfg": 2.0}, "configurations.a.request.cfg was 1.0, now 2.0; configurations.b.request.cfg"),
        ({"labels": [1, 2]}, "labels was [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], now [1, 2]"),
    ]:
        with pytest.raises(ValueError, match="--overwrite") as error:
            again(10, **changes)
        assert named in str(error.value)

    (tmp_path / "comparison.csv").write_text("of the old run")
    (tmp_path / "comparison.yaml").write_text("the user's own")
    _, (images, _) = again(3, cfg=2.0, overwrite=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".cspd.lock", "chunks", "run.json", "comparison.yaml"} and len(stamps(tmp_path)) == 2
    first, second = sorted(stamps(tmp_path))
    for damaged in (b"half", second.read_bytes()):  # the second is whole, but of another configuration
        first.write_bytes(damaged)
        capsys.readouterr()
        assert (again(3, cfg=2.0)[1][0] == images).all()
        assert "00-00000.npz" in capsys.readouterr().err


def test_a_kind_of_draft_and_a_draft_models_file_are_different_settings(digits, tmp_path):
    quick = {"gamma": 32, "prefill": 0.9, "num_iter": 1, "num_sampling_steps": 3}

    def again(draft):
        request = cspd.Request(0, method="mar-draft", chains="speculative", window=2, draft=draft, **quick)
        row = Configuration("a", request, digits, files={"draft": {"file": "draft.safetensors"}})
        with study.comparison_store(tmp_path) as store:
            with study.taking_turns(study.Comparison([row], [0], 0), [1], store, progress=False) as turns:
                turns.make(1)

    again("frozen")
    with pytest.raises(ValueError, match="overwrite"):
        again("calibrated")


def test_an_open_window_is_chosen_once(digits, tmp_path, monkeypatch):
    request = cspd.Request(0, method="speculative", num_iter=2, num_sampling_steps=5)
    for window in (3, 2):  # this machine changes its mind
        chosen = Choice({"window": window}, "")
        monkeypatch.setattr(digits.runners["MAR"].tuning, "choice", lambda *args, chosen=chosen: chosen)
        report, _ = compare([Configuration("a", request, digits)], [0], 8 * window, tmp_path, progress=False)
        assert report["rows"][0]["settings"]["window"] == 3


def test_a_chunk_is_read_as_it_was_written_for_its_requests_only(tmp_path):
    path = tmp_path / "chunk.npz"
    cost = dict.fromkeys(study.COSTS, 1.0) | {"step_compression": None, "judged": 3, "accepted": 2}
    images = np.arange(384, dtype=np.uint8).reshape(2, 8, 8, 3)
    counts = {"by_rank": [[1, 2], [0, 1]], "committed": {"3": 2}, "resample_tries": 5}
    chunk = study.Chunk(images, 0.5, 7, [cost, cost], counts)
    made_of = {"settings": {"seed": 3}, "requests": [{"seed": 3}, {"seed": 4}]}
    study.write_chunk(path, chunk, made_of)
    found = study.read_chunk(path, made_of, 8)
    assert (found.images == images).all() and found[1:] == chunk[1:]
    assert study.read_chunk(path, made_of | {"requests": [{"seed": 4}, {"seed": 5}]}, 8) is None
    assert study.read_chunk(path, made_of | {"settings": {"seed": 4}}, 8) is None

    # older versions wrote no digest, and no counts: the number and the size of the images are checked
    chunk = chunk._replace(counts=None)
    written = chunk._asdict() | {"images": None}
    rest = np.frombuffer(json.dumps({key: written[key] for key in written if key != "counts"}).encode(), np.uint8)
    for shape in ((2, 8, 8, 3), (3, 8, 8, 3), (2, 4, 4, 3)):
        np.savez(path, arr_0=np.zeros(shape, np.uint8), chunk=rest)
        found = study.read_chunk(path, made_of, 8)
        assert (found is not None) == (shape == images.shape) and (found is None or found[1:] == chunk[1:])
    for odd in (b"", b"7", b"[" * 100_000, json.dumps(chunk._asdict() | {"images": None, "costs": [{}]}).encode()):
        np.savez(path, arr_0=images, chunk=np.frombuffer(odd, np.uint8))
        assert study.read_chunk(path, made_of, 8) is None
    np.savez(path, arr_0=images)
    assert study.read_chunk(path, made_of, 8) is None


def test_a_turn_ends_with_each_rung(digits, tmp_path):
    small = digits.with_slots(2)
    rows = [Configuration(name, cspd.Request(0, **QUICK), small) for name in "abc"]
    with (
        study.comparison_store(tmp_path) as store,
        study.taking_turns(study.Comparison(rows, [0], 5), [3, 6], store, progress=False) as turns,
    ):
        assert [[len(chunk.images) for chunk in made] for made in turns.make(3)] == [[2, 1]] * 3
        chosen = turns.make(6, [0, 2])
        assert [[len(chunk.images) for chunk in made] for made in chosen] == [[2, 1, 2, 1]] * 2
    seeds = [[request.seed for request in part] for part in turns.parts[1]]
    assert seeds == [[5, 6], [7], [8, 9], [10]]
    assert len(list(tmp_path.glob("chunks/01-*.npz"))) == 2 and len(list(tmp_path.glob("chunks/*.npz"))) == 10
    for row, made in zip(rows, chosen):
        assert len(speed_of(row, turns.plans[0], made, chosen[0])["seconds"]) == 2  # not the turns of one image
