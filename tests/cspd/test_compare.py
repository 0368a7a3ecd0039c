"""Comparisons: what runs, in which turn, what is kept, and every number of a row against an own computation of it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch

import cspd
from cspd import page, rounds
from cspd.cli import main
from cspd.compare import compare, speed_of
from cspd.continuous import ar
from cspd.evaluation import metrics
from cspd.evaluation.classifier import load_classifier
from cspd.evaluation.reference import load_reference
from cspd.evaluation.two_sample import energy_test
from cspd.loading import checkpoint_files, embedded
from cspd.methods import METHODS
from cspd.plots import to_pil
from cspd.sampling import differences
from cspd.study import REQUEST, Configuration, baseline, configurations, expand, named_entries, read_study

K4 = {"num_iter": 4, "num_sampling_steps": 6, "cfg": 1.0}
QUICK = ["--num-iter", "4", "--num-sampling-steps", "6", "--cfg", "1"]
METHOD_NAMES = "ar:num_iter=2,speculative:window=3,cspd:gamma=32:prefill=0.7"
NAMES = ["ar", "ar:num_iter=64", *METHOD_NAMES.split(",")]
NUM, BATCH, SEED = 10, 4, 3
STUDIES = sorted((Path(__file__).parents[2] / "scripts" / "studies").glob("*.yaml"))


def run(out, *more, methods=METHOD_NAMES, num=NUM):
    settings = ["--methods", methods, "--num", str(num), "--max-batch", str(BATCH), "--seed", str(SEED)]
    return main(["compare", *QUICK, *settings, "--out", str(out), *more])


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished comparison: its folder and its report."""
    out = tmp_path_factory.mktemp("comparison")
    assert run(out) == 0
    return out, json.loads((out / "comparison.json").read_text(), parse_constant=pytest.fail)


@pytest.fixture(scope="module")
def engine():
    return cspd.load("digits32", max_batch=8, device="cpu")


def chunks(out, row):
    """Of a row, in order: images, and the rest of each chunk."""
    loaded = []
    for path in sorted((out / "chunks").glob(f"{row:02d}-*.npz")):
        with np.load(path) as content:
            loaded.append((content["arr_0"], json.loads(content["chunk"].tobytes())))
    return loaded


def images_of(out, row):
    return np.concatenate([images for images, _ in chunks(out, row)])


def features(images):
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2) / 255 * 2 - 1
    return load_classifier().features(pixels)


# ---- what runs


def test_baselines_come_first_and_once(done):
    _, report = done
    assert [row["name"] for row in report["rows"]] == NAMES
    assert report["baseline"] == "ar" and (report["images"], report["rounds"]) == (NUM, 3)
    asked = {row["name"]: row["settings"] for row in report["rows"]}
    assert [asked[name]["num_iter"] for name in NAMES] == [4, 64, 2, 4, 4]
    assert {settings["num_sampling_steps"] for settings in asked.values()} == {6}
    assert asked["speculative:window=3"]["window"] == 3 and asked["cspd:gamma=32:prefill=0.7"]["gamma"] == 32


def rows_of(text, engine, **common):
    return configurations(named_entries(text), common, lambda models: engine)


@pytest.mark.parametrize(
    "asked, common, names",
    [
        ("speculative", {}, ["ar", "speculative"]),  # K = 64 is all the tokens there are
        ("cspd,ar", {"num_iter": 64}, ["ar", "cspd"]),
        ("speculative,ar:num_iter=64", {"num_iter": 8}, ["ar", "speculative", "ar:num_iter=64"]),
        ("ar:cfg=4,speculative:cfg=4", {}, ["ar", "ar:cfg=4", "speculative:cfg=4"]),
        (
            "speculative:num_iter=16,cspd:temperature=0.9:num_iter=16",
            {},
            [
                "ar",
                "ar:num_iter=16",
                "ar:num_iter=16:temperature=0.9",
                "speculative:num_iter=16",
                "cspd:temperature=0.9:num_iter=16",
            ],
        ),
    ],
)
def test_plain_sampling_is_added_for_all_settings(asked, common, names, engine):
    rows = rows_of(asked, engine, **common)
    assert [row.name for row in rows] == names
    for row in rows:
        base = baseline(row, rows)
        settings = [dataclasses.replace(engine.check(r.request), method=None) for r in (base, row)]
        for field in ("num_iter", "cfg", "temperature", "num_sampling_steps"):
            assert getattr(settings[0], field) == getattr(settings[1], field)


def test_models_of_a_row_are_its_own(engine):
    other = cspd.load(checkpoint_files("digits32")["draft"], max_batch=8, device="cpu")
    loaded = []

    def load(models):
        loaded.append(models)
        return other if "small" in models.values() else engine

    entries = [{"name": "small alone", "method": "ar", "checkpoint": "small"}, {"method": "cspd", "num_iter": 8}]
    entries += [{"method": "speculative", "checkpoint": "small"}]
    rows = configurations(entries, {"checkpoint": "digits32"}, load)
    assert [row.name for row in rows] == [
        "ar",
        "ar:num_iter=8",
        "small alone",
        "cspd:num_iter=8",
        "speculative:checkpoint=small",
    ]
    assert [row.engine is other for row in rows] == [False, False, True, False, True]
    assert baseline(rows[4], rows) is rows[2]  # not the large model's
    assert loaded == [{"checkpoint": "digits32"}, {"checkpoint": "small"}]


@pytest.mark.parametrize("common", [{}, {"vae": "F"}])
def test_the_first_entrys_models_are_no_other_rows(common, engine):
    entries = [{"name": "small alone", "method": "ar", "checkpoint": "small"}, {"method": "speculative"}]
    rows = configurations(entries, common, lambda models: engine)
    assert [(row.name, row.models) for row in rows] == [
        ("small alone", {"checkpoint": "small"} | common),
        ("ar:checkpoint=digits32", {"checkpoint": "digits32"} | common),
        ("speculative", {"checkpoint": "digits32"} | common),
    ]
    rows = configurations([{"method": "speculative", "checkpoint": "small"}], common, lambda models: engine)
    assert [row.models for row in rows] == [{"checkpoint": "small"} | common] * 2


def test_baselines_that_only_a_lack_tells_apart_have_names(engine):
    entries = [{"method": "ar", "vae": "F"}, {"method": "speculative"}]
    rows = configurations(entries, {}, lambda models: engine)
    assert [row.name for row in rows] == ["ar:vae=F", "ar:vae=null", "speculative"]


def test_two_families_are_compared(engine, tmp_path):
    vq = cspd.load("digits32_vq", max_batch=8, device="cpu")
    entries = [{"name": "quick"} | K4 | {"method": "ar"}]
    entries += [{"method": "cool-sd", "checkpoint": "digits32_vq", "cfg": 1.0}]
    rows = configurations(entries, {}, lambda models: vq if "vq" in models["checkpoint"] else engine)
    names = [row.name for row in rows]
    assert names[0] == "ar" and names[2:] == ["quick", "cool-sd:checkpoint=digits32_vq:cfg=1.0"]
    assert "checkpoint=digits32_vq" in names[1] and "null" not in names[1] and "family" not in names[1]
    assert named_entries(names[1])[0]["checkpoint"] == "digits32_vq"
    made, images = compare([rows[2], rows[1], rows[3]], [1], 1, tmp_path, space="digits", progress=False)
    assert [row["law_baseline"] for row in made["rows"]] == [None] * 3
    assert [row["step_compression"] is None for row in made["rows"]] == [True, False, False]
    assert [row["head_calls_per_token"] is None for row in made["rows"]] == [False, True, True]
    assert "speed_quality.png" in page.write(made, images, tmp_path)


# ---- the numbers


def test_speeds_are_of_full_rounds_against_the_same_round_of_ar(done):
    out, report = done
    seconds = np.array([[rest["seconds"] for _, rest in chunks(out, r)[:2]] for r in range(len(NAMES))])  # 4, 4, (2)
    for row, mine in zip(report["rows"], seconds):
        assert row["seconds"] == mine.tolist()
        for key, values in (("images_per_second", BATCH / mine), ("speed_up", seconds[0] / mine)):
            expected = [np.median(values), values.min(), values.max()]
            assert [row[key][name] for name in ("median", "min", "max")] == pytest.approx(expected)
    assert report["rows"][1]["speed_up"]["max"] < 0.5  # 64 iterations are slower than 4


def test_costs_are_means_over_the_images(done, engine):
    _, report = done
    rows = dict(zip(NAMES, report["rows"]))
    for name, iterations in (("ar", 4), ("ar:num_iter=64", 64), ("ar:num_iter=2", 2)):
        assert (rows[name]["backbone_calls"], rows[name]["head_calls_per_token"]) == (iterations, 6)
        assert rows[name]["alpha"] is rows[name]["draft_backbone_calls"] is rows[name]["step_compression"] is None
    assert 2 < rows["speculative:window=3"]["head_calls_per_token"] < 6
    assert rows["speculative:window=3"]["alpha"] > 0.3
    drafted = rows["cspd:gamma=32:prefill=0.7"]
    (output,) = engine.generate([cspd.Request(0, method="cspd", gamma=32, prefill=0.7, **K4)])
    for name in ("backbone_calls", "draft_backbone_calls"):  # the same of every image
        assert drafted[name] == getattr(output.stats, name) > 1
    assert [rows[name]["guarantee"] for name in NAMES] == ["exact"] * 4 + ["heuristic"]
    assert all(row["peak_bytes"] > 2**24 and row["bound"] is None for row in report["rows"])


def test_alpha_is_of_all_drafts_and_the_bound_has_its_error(engine):
    row = Configuration("made up", cspd.Request(0, method="cspd", window=None), engine)

    def chunk(*costs):
        names = dict.fromkeys(rounds.COSTS, 2.0)
        return rounds.Chunk(np.zeros((len(costs), 1, 1, 3)), 1.0, 7, [names | cost for cost in costs])

    made = [
        chunk({"judged": 100, "accepted": 90, "bound": 0.1}, {"judged": 0, "accepted": 0, "bound": 0.4}),
        chunk({"judged": 100, "accepted": 0, "bound": 0.1}),
    ]
    rule = {"rule": "cool-sd", "delta": 1.1, "draft": "chain", "gamma": 4}
    plan = cspd.Request(0, method="cool-sd", family="VQ", **rule)
    result = speed_of(row, plan, made, made)
    assert result["alpha"] == 0.45 and result["bound"] == pytest.approx(0.2)
    assert result["bound_error"] == pytest.approx(np.std([0.1, 0.4, 0.1], ddof=1) / 3**0.5)
    loose = speed_of(row, plan, [chunk({"judged": 1, "accepted": 1, "bound": 7.0})] * 2, made)
    assert (loose["bound"], loose["bound_error"]) == (1, None)
    assert result["seconds"] == [1.0] and result["step_compression"] == 2 and result["head_calls_per_token"] is None


def frechet(found):
    """From the embedded statistics, of features [N, D]."""
    reference = np.load(embedded()["digits32"] / "reference.npz")
    mu, sigma = found.double().mean(0).numpy(), np.cov(found.double().numpy(), rowvar=False)
    root = scipy.linalg.sqrtm(sigma @ reference["sigma"]).real
    return ((mu - reference["mu"]) ** 2).sum() + np.trace(sigma + reference["sigma"] - 2 * root)


def test_quality_is_of_the_images_that_were_made(done):
    out, report = done
    labels = torch.arange(NUM) % 10
    for i, row in enumerate(report["rows"]):
        found = features(images_of(out, i))
        right = (load_classifier().out(found).argmax(1) == labels).float().mean().item()
        assert row["accuracy"] == pytest.approx(right)
        share = (round(right * NUM) + 1) / (NUM + 2)
        assert row["accuracy_error"] == pytest.approx((share * (1 - share) / NUM) ** 0.5) and row["accuracy_error"] > 0
        assert row["fid"] == pytest.approx(frechet(found), rel=1e-2)
        assert row["inception_score"] is None
    draws = np.random.default_rng(1).integers(NUM, size=(20, NUM))
    spread = np.std([frechet(found[drawn]) for drawn in draws], ddof=1)  # of the last row
    assert 0.4 < row["fid_error"] / spread < 2.5
    assert "20 are needed" in report["missing"]["inception_score"]
    assert report["reference"]["fingerprint"] == load_reference().fingerprint


def test_features_are_taken_once(engine, tmp_path, monkeypatch):
    quick = {"method": "ar", "num_sampling_steps": 2, "cfg": 1.0}
    rows = [Configuration(str(k), cspd.Request(0, num_iter=k, **quick), engine) for k in (1, 2)]
    folder = tmp_path / "reference"
    folder.mkdir()
    for i, output in enumerate(engine.generate([cspd.Request(i, num_iter=8, **quick) for i in range(4)])):
        to_pil(output.image).save(folder / f"{i}.png")
    reference = load_reference(folder)
    judged = []
    forward = metrics.DigitsExtractor.forward

    def counted(self, images):
        judged.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(metrics.DigitsExtractor, "forward", counted)
    ways = {"space": "digits", "reference": reference}
    report, images = compare(rows, range(10), 20, tmp_path / "out", progress=False, **ways)
    assert sum(judged) == 4 + 20 + 20
    for row, made in zip(report["rows"], images):
        wrapped = metrics.ImageList(torch.from_numpy(made).permute(0, 3, 1, 2))
        measured = metrics.measure(wrapped, labels=[i % 10 for i in range(20)], **ways)  # torch-fidelity, of images
        assert measured["kid"] is not None and row["fid_error"] > 0
        for name in ("fid", "inception_score", "inception_score_std", "accuracy"):
            assert row[name] == pytest.approx(measured[name], rel=1e-4)


def test_p_is_of_the_features_against_ar_with_the_same_settings(done):
    out, report = done
    bases = [None, None, None, 0, 0]
    for i, (row, base) in enumerate(zip(report["rows"], bases)):
        if base is None:
            assert row["p_value"] is row["law_baseline"] is None
        else:
            assert row["p_value"] == energy_test(features(images_of(out, base)), features(images_of(out, i)))
            assert row["law_baseline"] == NAMES[base]


def test_images_are_those_of_their_seeds(done, engine):
    out, _ = done
    for row, more in ((0, {"method": "ar"}), (3, {"method": "speculative", "window": 3})):
        made = images_of(out, row).astype(float)
        outputs = engine.generate([cspd.Request(i, SEED + i, **K4, **more) for i in range(4, 8)])
        for i, output in zip(range(4, 8), outputs):
            assert np.abs(made[i] - (output.image.permute(1, 2, 0).numpy() * 255).round()).max() <= 1


def test_a_sampler_that_is_wrong_is_found_out(engine, tmp_path, monkeypatch):
    def colder(host, batch, watch):
        asked = [sequence.request for sequence in batch]
        for sequence in batch:
            sequence.request = dataclasses.replace(sequence.request, temperature=0.3)
        finished = ar.round(host, batch, watch)
        for sequence, request in zip(batch, asked):
            sequence.request = request
        return finished

    methods = ({"method": "ar"}, {"method": "speculative", "window": 3})
    quick = K4 | {"num_sampling_steps": 10}
    rows = [Configuration(each["method"], cspd.Request(0, **quick, **each), engine) for each in methods]
    ways = {"space": "digits", "progress": False}
    right, _ = compare(rows, range(10), 24, tmp_path / "right", **ways)
    monkeypatch.setitem(METHODS["speculative"].rounds, "MAR", colder)
    wrong, _ = compare(rows, range(10), 24, tmp_path / "wrong", **ways)
    assert wrong["rows"][1]["p_value"] <= 0.005 < 0.1 < right["rows"][1]["p_value"]
    assert right["rows"][1]["fid"] is None and right["missing"]["fid"] == "there is no reference"


def test_configurations_take_turns(engine, tmp_path, monkeypatch):
    order = []
    generate = cspd.Engine.generate

    def watched(self, requests, progress=False):
        order.append((requests[0].cfg, [r.seed for r in requests]))
        return generate(self, requests, progress)

    monkeypatch.setattr(cspd.Engine, "generate", watched)
    quick = {"method": "ar", "num_iter": 1, "num_sampling_steps": 2}
    small = engine.with_slots(2)
    rows = [Configuration(str(cfg), cspd.Request(0, cfg=cfg, **quick), small) for cfg in (1.0, 2.0, 3.0)]
    compare(rows, [1], 5, tmp_path, progress=False)
    assert order == [
        *[(cfg, [0, 1]) for cfg in (1.0, 2.0, 3.0) for _ in ("to warm up", "timed")],
        *[(cfg, [2, 3]) for cfg in (2.0, 3.0, 1.0)],
        *[(cfg, [4]) for cfg in (3.0, 1.0, 2.0)],
    ]


# ---- going on


def test_a_killed_run_goes_on(done, tmp_path):
    """What it ends with is what a run that nothing happened to has."""
    out, num = tmp_path / "killed", 2 * BATCH
    arguments = ["--methods", METHOD_NAMES, "--num", str(num), "--max-batch", str(BATCH), "--seed", str(SEED)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "cspd.cli", "compare", *QUICK, *arguments, "--out", str(out)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.time() + 120
    while len(list(out.glob("chunks/*.npz"))) < 3 and time.time() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("chunks/*.npz")}
    assert 3 <= len(kept) < 2 * len(NAMES) and not (out / "comparison.json").exists()

    assert run(out, num=num) == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    for row in range(len(NAMES)):
        again, whole = images_of(out, row).astype(int), images_of(done[0], row)[:num].astype(int)
        assert np.abs(again - whole).max() <= 1


def test_an_interrupted_run_says_that_it_goes_on(tmp_path, monkeypatch, capsys):
    def stop(row, requests):
        if any((tmp_path / "chunks").glob("*.npz")):
            raise KeyboardInterrupt
        return timed(row, requests)

    timed = rounds._timed
    monkeypatch.setattr(rounds, "_timed", stop)
    few = ["--num-iter", "64", "--num-sampling-steps", "2", "--num", "2", "--max-batch", "1", "--out", str(tmp_path)]
    assert main(["compare", "--methods", "ar", *few]) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "chunks").iterdir()] == ["00-00000.npz"]


def test_half_a_chunk_is_none(engine, tmp_path, monkeypatch):
    def full_disk(file, **arrays):
        file.write(b"half")
        assert str(os.getpid()) in file.name  # no other process writes it
        raise OSError(28, "No space left on device")

    quick = {"method": "ar", "num_iter": 1, "num_sampling_steps": 2}
    monkeypatch.setattr(np, "savez", full_disk)
    with pytest.raises(OSError, match=r"00-00000.npz cannot be written \(No space left.*make room"):
        compare([Configuration("ar", cspd.Request(0, **quick), engine)], [0], 2, tmp_path, progress=False)
    assert not list(tmp_path.glob("chunks/*"))


def test_more_images_go_on_and_other_settings_do_not(engine, tmp_path):
    small = engine.with_slots(4)
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
        with pytest.raises(ValueError, match=r"another run.*--overwrite") as error:
            again(10, **changes)
        assert named in str(error.value)
    assert len(stamps()) == 6
    (tmp_path / "comparison.csv").write_text("of the old run")
    _, (images, _) = again(3, cfg=2.0, overwrite=True)
    assert len(stamps()) == 2 and {path.name for path in tmp_path.iterdir()} == {"chunks", "run.json"}
    for damaged in (b"half", b"", npy()):
        (tmp_path / "chunks" / "00-00000.npz").write_bytes(damaged)
        assert (again(3, cfg=2.0)[1][0] == images).all() and len(images) == 3
    record = tmp_path / "run.json"
    whole = record.read_text()
    for text, told in (
        ("{", "cannot be read"),
        ("[1]", "cannot be read"),
        (whole.replace("cspd.rounds/", "cspd.rounds/0"), "schema was"),
    ):
        record.write_text(text)
        with pytest.raises(ValueError, match=told):
            again(3, cfg=2.0)
    record.unlink()
    with pytest.raises(ValueError, match=r"images without a run\.json.*--overwrite"):
        again(3, cfg=2.0)
    assert len(stamps()) == 2 and not record.exists()


def npy():
    """A file that numpy reads, but as no archive."""
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


def test_a_draft_and_its_file_are_told_apart(engine, tmp_path):
    quick = {"gamma": 32, "prefill": 0.9, "num_iter": 1, "num_sampling_steps": 3}

    def again(draft):
        request = cspd.Request(0, method="cspd", chains="speculative", window=2, draft=draft, **quick)
        row = Configuration("a", request, engine, files={"draft": {"file": "draft.safetensors"}})
        rounds.run_rounds([row], [0], 1, 0, tmp_path, progress=False)

    again("frozen")
    with pytest.raises(ValueError, match=r'a\.request\.draft was "frozen", now "calibrated"'):
        again("calibrated")


def test_of_a_long_path_the_end_is_shown():
    old, new = ({"file": f"/home/someone/{'models/' * 12}{name}.safetensors"} for name in ("small", "large"))
    (told,) = differences(old, new)
    assert "small.safetensors" in told and "large.safetensors" in told and "of them" not in told
    (told,) = differences({"labels": list(range(1000))}, {"labels": [1]})
    assert "(1000 of them), now [1]" in told and len(told) < 100


def test_an_open_window_is_chosen_once(engine, tmp_path, monkeypatch):
    quick = {"method": "speculative", "num_iter": 2, "num_sampling_steps": 5}
    row = Configuration("speculative", cspd.Request(0, **quick), engine)
    for window in (3, 2):  # this machine changes its mind
        monkeypatch.setattr(engine.hosts["MAR"].tuning, "window", lambda *args, window=window: window)
        report, _ = compare([row], [0], 8 * window, tmp_path, progress=False)
        assert report["rows"][0]["settings"]["window"] == 3


# ---- studies


def study(tmp_path, text):
    path = tmp_path / "study.yaml"
    path.write_text(text, encoding="latin-1")
    return path


def test_lists_are_swept():
    entry = {"method": "cspd", "gamma": [4, 8], "align": [True, False], "prefill": 0.1}
    made = expand(entry)
    assert [name for name, _ in made] == [
        f"cspd:gamma={gamma}:align={align}:prefill=0.1" for gamma in (4, 8) for align in ("true", "false")
    ]
    assert made[2][1] == {"method": "cspd", "gamma": 8, "align": True, "prefill": 0.1}
    for name, settings in made:  # the name asks for it again
        assert named_entries(name) == [settings]
    assert [name for name, _ in expand(entry | {"name": "a b"})] == [
        "a b:gamma=4:align=true",
        "a b:gamma=4:align=false",
        "a b:gamma=8:align=true",
        "a b:gamma=8:align=false",
    ]


def test_a_study_runs_and_options_come_before_its_settings(tmp_path):
    target = checkpoint_files("digits32")["target"]
    path = study(
        tmp_path,
        "num: 3\nlabels: 4-5\nseed: 7\nmax_batch: 2\nnum_iter: 64\ncfg: 2\nnum_sampling_steps: 50\n"
        "configurations:\n  - {method: ar, cfg: [2, 1]}\n"
        "  - {name: its own, method: cspd, gamma: 32, prefill: 0.9, draft_checkpoint: " + f"{target}}}\n",
    )
    out = tmp_path / "out"
    assert main(["compare", "--config", str(path), "--out", str(out), "--num", "1", "--num-sampling-steps", "2"]) == 0
    report = json.loads((out / "comparison.json").read_text())
    files = json.loads((out / "run.json").read_text())["settings"]["configurations"]["its own"]["files"]
    assert files["draft"] == files["target"]  # the target drafts for itself
    assert [row["name"] for row in report["rows"]] == ["ar:cfg=2", "ar:cfg=1", "its own"]
    assert (report["images"], report["labels"], report["first_seed"], report["max_batch"]) == (1, [4, 5], 7, 2)
    settings = [row["settings"] for row in report["rows"]]
    assert [each["cfg"] for each in settings] == [2, 1, 2]
    assert [(each["num_iter"], each["num_sampling_steps"]) for each in settings] == [(64, 2)] * 3
    assert "8 images or more" in report["missing"]["p_value"]


def test_a_files_first_entry_keeps_its_checkpoint_to_itself(tmp_path):
    files = checkpoint_files("digits32")
    text = "num: 1\nmax_batch: 1\ncfg: 1\nnum_iter: 64\nnum_sampling_steps: 2\nconfigurations:\n"
    text += f"  - {{name: small, method: ar, checkpoint: {files['draft']}}}\n  - {{name: large, method: ar}}\n"
    assert main(["compare", "--config", str(study(tmp_path, text)), "--out", str(tmp_path / "out")]) == 0
    asked = json.loads((tmp_path / "out" / "run.json").read_text())["settings"]["configurations"]
    targets = {name: Path(each["files"]["target"]["file"]).name for name, each in asked.items()}
    assert targets == {"small": files["draft"].name, "large": files["target"].name}


@pytest.mark.parametrize(
    "text, hint",
    [
        ("nums: 3\nconfigurations: [{method: ar}]", "nums at the top is unknown: choose of num, labels"),
        ("configurations: [{method: ar}, {method: cspd, gama: 3}]", "gama in configuration 2 is unknown"),
        ("configurations: [{method: ar, num: 3}]", "num in configuration 1 is unknown"),
        ("num: 3", "a list 'configurations'"),
        ("configurations: []", "a list 'configurations'"),
        ("configurations: [ar]", "a list 'configurations'"),
        ("- 3", "a list 'configurations'"),
        ("configurations: [{method: ar}", "is no YAML"),
        ("configurations: [{method: ar, name: \xe9}]", "study.yaml is no YAML: 'utf-8' codec"),
        ("gamma: [4, 8]\nconfigurations: [{method: cspd}]", "gamma is a list at the top"),
        ("labels: a-b\nconfigurations: [{method: ar}]", "labels: 'a-b' is no list of numbers"),
        ("num: 0\nconfigurations: [{method: ar}]", "num=0 is outside 1.."),
        ("num: many\nconfigurations: [{method: ar}]", "num='many' is not an integer"),
        ("configurations: [{gamma: 3}]", "method=None is unknown: choose one of ar, speculative"),
        ("configurations: [{method: arr}]", "method='arr' is unknown"),
        ("configurations: [{method: ar, gamma: 3}]", "ar:gamma=3: gamma=3 is no option of 'ar'"),
        ("configurations: [{method: ar, cfg: high}]", "ar:cfg=high: cfg='high' is not a finite number"),
        ("configurations: [{method: cspd}, {method: cspd}]", "two configurations are called 'cspd'"),
        ("configurations: [{method: ar, checkpoint: nowhere}]", "nowhere: no checkpoint there"),
    ],
)
def test_bad_studies_are_refused_in_one_line(text, hint, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["compare", "--config", str(study(tmp_path, text)), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert hint in error and error.startswith("cspd: ") and error.count("\n") == 1 and not out.exists()


@pytest.mark.parametrize(
    "arguments, hint",
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["--config", "x.yaml", "--methods", "ar"], "give one of them"),
        (["--methods", "ar:gamma"], "write it like delta=1.5"),
        (["--methods", "ar:seed=3"], "'seed=3' in 'ar:seed=3' is no option"),
        (["--ref", "nowhere.npz"], "nowhere.npz"),
        (["--weights", "nowhere.pth"], "nowhere.pth"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments, hint, tmp_path, capsys):
    assert main(["compare", "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert hint in error and error.startswith("cspd: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_reference_needs_features(tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("target", "vae"):
        os.symlink(checkpoint_files("digits32")[name], folder / f"{name}.safetensors")
    arguments = ["compare", "--checkpoint", str(folder), *QUICK, "--num", "1", "--methods", "ar:num_iter=64"]
    assert main([*arguments, "--out", str(tmp_path / "out"), "--ref", "x.npz"]) == 2
    assert "--weights" in capsys.readouterr().err
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert report["rows"][0]["fid"] is None and "--weights" in report["missing"]["fid"]


def test_published_studies_are_comparisons_of_the_embedded_models():
    assert len(STUDIES) == 8
    engines = {}
    for path in STUDIES:
        common, entries = read_study(path)
        name = common.pop("checkpoint", "digits32")
        if name not in engines:
            engines[name] = cspd.load(name, max_batch=2, device="cpu")
        settings = {key: value for key, value in common.items() if key in REQUEST}
        rows = configurations(entries, settings, lambda models, name=name: engines[name])
        assert len(rows) > len(entries) and f"--config scripts/studies/{path.name}" in path.read_text()


def test_vq_models_are_compared_by_codes_a_forward(tmp_path, capsys):
    name = "cool-sd:delta=1.01"
    arguments = ["--checkpoint", "digits32_vq", "--methods", name, "--num", "1", "--max-batch", "1"]
    assert main(["compare", *arguments, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["ar", name]  # no 64 iterations here
    assert rows[0]["step_compression"] == 1 < rows[1]["step_compression"]
    assert [row["guarantee"] for row in rows] == ["exact", "bounded"]
    assert rows[0]["bound"] is None and 0 < rows[1]["bound"] <= 1
    above, below = capsys.readouterr().out.splitlines()[:2]
    assert "codes a" in above and "TV" in above and "head" not in above and "bound" in below
