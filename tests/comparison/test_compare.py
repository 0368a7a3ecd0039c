"""Comparisons: every number of a row against an independent computation of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from comparisons import BATCH, K4, NAMES, NUM, QUICK, SEED, chunks, compare, features, images_of
from PIL import Image
from toys import toy_models

import cspd
from cspd import VQModels, method
from cspd.checkpoints import checkpoint_files
from cspd.cli import main
from cspd.comparison import report as comparison_report
from cspd.comparison.compare import _add_verdicts, expected_speed_up, speed_of
from cspd.comparison.study import COSTS, Chunk, Configuration, configurations, named_entries
from cspd.continuous.rows import run_plain_round
from cspd.device import describe
from cspd.evaluation import metrics
from cspd.evaluation.metrics import SPACES, ClassifierExtractor, Evaluation, load_classifier, load_reference
from cspd.evaluation.scores import NORMAL, Score, around, energy_test, holm, wilson
from cspd.pixels import to_pil
from cspd.terminal import __version__


def test_every_name_in_the_json_is_documented(comparison):
    _, report = comparison
    section = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    section = section.split("## comparison.json")[1].split("\n## ")[0]
    ran = report["ran"]
    names = {name for part in (report, report["rows"][0]) for name in part}
    names |= ran.keys()
    endings = ("_holm", "_ci95", "_resolution", "_change", "_sd")
    assert all(f"`{ending}`" in section for ending in endings)
    for ending in endings:
        names = {name.removesuffix(ending) for name in names}
    assert [name for name in sorted(names) if f"`{name}`" not in section] == []
    assert f"`{report['schema']}`" in section


def test_a_report_has_its_origin(comparison):
    out, report = comparison
    ran = report["ran"]
    files = checkpoint_files("digits32")
    assert [model["role"] for model in ran["models"]] == ["target", "vae", "draft"]
    for model in ran["models"]:
        path = files[model["role"]]
        assert (model["file"], model["bytes"]) == (path.name, path.stat().st_size)
        assert model["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    target, vae, draft = ran["models"]
    names = [row["name"] for row in report["rows"]]
    assert target["configurations"] == vae["configurations"] == names
    assert draft["configurations"] == [name for name in names if name.startswith("mar-draft")]
    assert target["parameters"] > 4 * draft["parameters"] > 2e6
    assert ran["command"].startswith("cspd compare --num-iter 4 ") and ran["command"].endswith(f"--out {out}")
    assert (ran["versions"]["cspd"], ran["versions"]["torch"]) == (__version__, torch.__version__)
    assert ran["machine"]["device"] == describe(torch.device("cpu"))["device"]
    age = datetime.now().astimezone() - datetime.fromisoformat(ran["date"])
    assert abs(age.total_seconds()) < 3600

    page = (out / "report.html").read_text()
    for text in (target["sha256"][:12], draft["file"], ran["date"], f"(of {NAMES[-1]})"):
        assert text in page
    home = str(Path(cspd.__file__).parents[1])  # the folder of the models, which nobody gave
    assert home not in page and home not in json.dumps(report)


def test_baselines_come_first_and_once(comparison):
    _, report = comparison
    assert [row["name"] for row in report["rows"]] == NAMES
    assert report["baseline"] == "ar" and (report["images"], report["turns"]) == (NUM, 3)
    settings = [row["settings"] for row in report["rows"]]
    assert [each["num_iter"] for each in settings] == [4, 24, 2, 4, 4]
    assert {each["num_sampling_steps"] for each in settings} == {6}
    assert settings[3]["window"] == 3 and settings[4]["gamma"] == 32


@pytest.mark.slow
def test_two_families_are_compared(digits, tmp_path):
    vq = cspd.load("digits32_vq", max_batch=8, device="cpu")
    entries = [{"name": "quick"} | K4 | {"method": "ar"}]
    entries += [{"method": "cool-sd", "checkpoint": "digits32_vq", "cfg": 1.0}]
    rows = configurations(entries, {}, lambda models: vq if "vq" in models["checkpoint"] else digits)
    names = [row.name for row in rows]
    assert names[0] == "ar" and names[2:] == ["quick", "cool-sd:checkpoint=digits32_vq:cfg=1.0"]
    assert "checkpoint=digits32_vq" in names[1] and "null" not in names[1] and "family" not in names[1]
    assert named_entries([names[1]])[0]["checkpoint"] == "digits32_vq"
    made, images = compare(
        [rows[2], rows[1], rows[3]], [1], 1, tmp_path, evaluation=Evaluation("digits"), progress=False
    )
    assert [row["paired_baseline"] for row in made["rows"]] == [None, None, names[1]]
    assert [row["step_compression"] is None for row in made["rows"]] == [True, False, False]
    assert [row["guarantee"] for row in made["rows"]] == ["exact", "exact", "bounded"]
    assert [row["bound"] is None for row in made["rows"]] == [True, True, False]
    assert [row["head_calls_per_token"] is None for row in made["rows"]] == [False, True, True]
    assert "speed_quality.png" in comparison_report.write(made, images, tmp_path)


def test_speeds_are_of_full_turns_relative_to_the_same_turn_of_ar(comparison):
    out, report = comparison
    seconds = np.array([[rest["seconds"] for _, rest in chunks(out, r)[:2]] for r in range(len(NAMES))])  # 4, 4, (2)
    for row, own in zip(report["rows"], seconds):
        assert row["seconds"] == own.tolist()
        for key, values in (("images_per_second", BATCH / own), ("speed_up", seconds[0] / own)):
            expected = [np.median(values), values.min(), values.max()]
            assert [row[key][name] for name in ("median", "min", "max")] == pytest.approx(expected)
    assert report["rows"][1]["speed_up"]["max"] < 0.5  # 24 iterations are slower than 4


def test_costs_are_means_over_the_images(comparison, digits):
    _, report = comparison
    rows = dict(zip(NAMES, report["rows"]))
    for name, iterations in (("ar", 4), ("ar:num_iter=24", 24), ("ar:num_iter=2", 2)):
        assert (rows[name]["backbone_calls"], rows[name]["head_calls_per_token"]) == (iterations, 6)
        assert rows[name]["alpha"] is rows[name]["draft_backbone_calls"] is rows[name]["step_compression"] is None
    assert 2 < rows["speculative:window=3"]["head_calls_per_token"] < 6
    assert rows["speculative:window=3"]["alpha"] > 0.3
    drafted = rows["mar-draft:gamma=32:prefill=0.7"]
    (output,) = digits.generate([cspd.Request(0, method="mar-draft", gamma=32, prefill=0.7, **K4)])
    for name in ("backbone_calls", "draft_backbone_calls"):  # the same of every image
        assert drafted[name] == getattr(output.stats, name) > 1
    assert [rows[name]["guarantee"] for name in NAMES] == ["exact"] * 4 + ["heuristic"]
    assert all(row["peak_bytes"] > 2**24 and row["bound"] is None for row in report["rows"])


def test_counts_of_drafts_are_sums_over_the_images(comparison, digits):
    _, report = comparison
    drafted = report["rows"][NAMES.index("mar-draft:gamma=32:prefill=0.7")]
    asked = [cspd.Request(i % 10, SEED + i, method="mar-draft", gamma=32, prefill=0.7, **K4) for i in range(NUM)]
    stats = [output.stats for output in digits.generate(asked)]
    by_rank = np.sum([each.by_rank for each in stats], axis=0)
    assert drafted["by_rank"] == by_rank.tolist() and drafted["committed"] is None
    rejected = by_rank[0].sum() - by_rank[1].sum()
    assert rejected > 0 and drafted["resample_tries"] == sum(each.resample_tries for each in stats) / rejected
    assert report["rows"][0]["by_rank"] is report["rows"][0]["resample_tries"] is None


def test_alpha_is_of_all_drafts_and_the_bound_has_its_error(digits):
    row = Configuration("made up", cspd.Request(0, method="mar-draft", window=None), digits)

    def chunk(*costs):
        names = dict.fromkeys(COSTS, 2.0) | {"head_calls_per_token": 0.0}  # VQ models have no head
        counts = [dict(zip(("judged", "accepted", "bound"), cost)) for cost in costs]
        return Chunk(np.zeros((len(costs), 1, 1, 3)), 1.0, 7, [names | each for each in counts])

    made = [chunk((100, 90, 0.1), (0, 0, 0.4)), chunk((100, 0, 0.1))]
    plan = cspd.Request(0, method="cool-sd", family="VQ", rule="cool-sd", delta=1.1, draft="chain", gamma=4)
    result = speed_of(row, plan, made, made)
    assert result["alpha"] == 0.45 and result["bound"] == pytest.approx(0.2)
    half = NORMAL * np.std([0.1, 0.4, 0.1], ddof=1) / 3**0.5
    assert half > 0.19 and result["bound_ci95"] == pytest.approx([0.2 - half, 0.2 + half])
    loose = speed_of(row, plan, [chunk((1, 1, 7.0))] * 2, made)
    assert (loose["bound"], loose["bound_ci95"]) == (1, None)
    assert result["seconds"] == [1.0] and result["step_compression"] == 2 and result["head_calls_per_token"] is None


def test_lengths_and_latencies_have_a_spread_and_a_paired_test(tmp_path):
    engine = cspd.Engine(VQModels(**toy_models(length=16)), max_batch=4, device="cpu")
    entries = [{"method": "sjd", "window": 3}, {"method": "sjd", "window": 8, "seed": 0}]
    entries += [{"name": "other seeds", "method": "sjd", "window": 8, "seed": 100}]
    rows = configurations(entries, {}, lambda models: engine)
    num = 12
    made, images = compare(rows, [0, 1], num, tmp_path, progress=False)
    lengths = []
    for row in rows:
        requests = [row.request.but(label=i % 2, seed=row.first_seed(0) + i) for i in range(num)]
        lengths.append([output.stats.step_compression for output in engine.generate(requests)])
    for entry, own in zip(made["rows"], lengths):
        assert entry["step_compression"] == pytest.approx(np.mean(own))
        assert entry["step_compression_sd"] == pytest.approx(np.std(own, ddof=1))
        assert entry["latency"] == pytest.approx(np.mean(entry["seconds"])) and len(entry["seconds"]) == 3
        assert entry["latency_sd"] == pytest.approx(np.std(entry["seconds"], ddof=1))

    names = [row.name for row in rows]
    assert names == ["ar", "sjd:window=3", "sjd:window=8:seed=0", "other seeds"]
    assert made["rows"][3]["step_compression_tests"] == {}  # no images are paired
    assert made["rows"][1]["step_compression_tests"].keys() == {names[0], names[2]}
    found = made["rows"][2]["step_compression_tests"][names[1]]
    expected = scipy.stats.ttest_rel(lengths[2], lengths[1])
    assert found["difference"] == pytest.approx(np.mean(lengths[2]) - np.mean(lengths[1])) and expected.pvalue < 0.9
    assert (found["t"], found["p_value"]) == pytest.approx((expected.statistic, expected.pvalue))

    comparison_report.write(made, images, tmp_path)
    page = (tmp_path / "report.html").read_text()
    sd = made["rows"][1]["step_compression_sd"]
    assert f"±{sd:.2f}" in page and f"t {found['t']:+.1f} (p {found['p_value']:.1g})" in page


@pytest.mark.parametrize("alpha, gamma, cost_ratio", [(0.3, 4, 0.38), (0.9, 8, 0.05), (1.0, 3, 0.2), (0.0, 2, 0.5)])
def test_the_expected_speed_up_is_that_of_the_process_it_describes(alpha, gamma, cost_ratio):
    """Rounds one by one: gamma drafts, each accepted by chance, up to the first rejection, and one more token."""
    generator = np.random.default_rng(0)
    accepted = generator.random((40_000, gamma)) < alpha
    tokens = accepted.cumprod(1).sum(1) + 1
    speed_ups = tokens / (gamma * cost_ratio + 1)  # a token of the target alone takes the time 1
    error = speed_ups.std() / len(speed_ups) ** 0.5
    assert abs(speed_ups.mean() - expected_speed_up(alpha, gamma, cost_ratio)) <= 4 * error + 1e-12


def test_the_cost_ratio_is_of_a_draft_and_a_baseline_run(digits):
    row = Configuration("made up", cspd.Request(0, method="mar-draft", gamma=4), digits)
    plan = digits.check(cspd.Request(0, method="mar-draft", gamma=4, num_iter=64))
    names = dict.fromkeys(COSTS, 0.0) | {"step_compression": None, "judged": 10, "accepted": 4}

    def chunk(**costs):
        return Chunk(np.zeros((1, 1, 1, 3)), 1.0, 7, [names | costs])

    drafted = chunk(draft_backbone_calls=60, draft_seconds=3.0, backbone_calls=16, target_seconds=9.0)
    for runs, c in ((64, (3 / 60) / (8 / 64)), (16, None)):  # 16 runs of the baseline are of several tokens each
        result = speed_of(row, plan, [drafted], [chunk(backbone_calls=runs, target_seconds=8.0)])
        assert result["cost_ratio"] == (None if c is None else pytest.approx(c))
    result = speed_of(row, plan, [drafted], [chunk(backbone_calls=64, target_seconds=8.0)])
    assert result["expected_speed_up"] == pytest.approx((1 - 0.4**5) / (0.6 * (4 * 0.4 + 1)))  # eq. 35
    older = speed_of(row, plan, [chunk(draft_backbone_calls=60)], [chunk(backbone_calls=64)])
    assert older["cost_ratio"] is older["expected_speed_up"] is older["by_rank"] is None


def test_repeats_have_other_seeds_and_their_own_scores(digits, tmp_path):
    """Their images are those of separate runs; the report has means and standard deviations over them."""
    quick = {"num_iter": 2, "num_sampling_steps": 3, "cfg": 1.0}
    rows = [Configuration("ar", cspd.Request(0, method="ar", **quick), digits)]
    rows += [Configuration("cspd", cspd.Request(0, method="mar-draft", gamma=4, prefill=0.9, **quick), digits)]
    how = {"evaluation": Evaluation("digits"), "progress": False}
    report, images = compare(rows, range(5), 7, tmp_path / "both", seed=3, repeats=2, **how)
    assert (report["images"], report["repeats"]) == (14, 2) and all(len(own) == 14 for own in images)
    found = {"accuracy": [], "alpha": []}
    for i in range(2):
        subjects = [(k + 7 * i) % 5 for k in range(5)]
        one, own = compare(rows, subjects, 7, tmp_path / str(i), seed=3 + 7 * i, **how)
        assert all(np.abs(a[7 * i : 7 * i + 7].astype(int) - b).max() <= 1 for a, b in zip(images, own))
        for name, values in found.items():
            values.append(one["rows"][1][name])
        assert one["rows"][1]["repeats"] is None
    for name, values in found.items():
        repeated = report["rows"][1]["repeats"][name]
        assert repeated["values"] == pytest.approx(values)
        assert repeated["mean"] == pytest.approx(np.mean(values))
        assert repeated["sd"] == pytest.approx(np.std(values, ddof=1))
    assert report["rows"][0]["repeats"]["alpha"] is None
    text = comparison_report.text_table(report)
    assert f"{np.mean(found['alpha']):.3f} ± {np.std(found['alpha'], ddof=1):.3f}" in text


def wilson_of_scipy(hits, num):
    interval = scipy.stats.binomtest(hits, num).proportion_ci(method="wilson")
    return [interval.low, interval.high]


@pytest.mark.parametrize("hits, num", [(0, 1), (1, 1), (7, 8), (0, 500), (250, 500), (49_999, 50_000)])
def test_the_interval_of_a_fraction(hits, num):
    found = wilson(hits / num, num)
    assert found == pytest.approx(wilson_of_scipy(hits, num), abs=1e-12)
    assert 0 <= found[0] <= hits / num <= found[1] <= 1 and found[0] < found[1]


def test_no_interval_goes_beyond_its_range():
    assert around("fid", 0.5, 1.0) == pytest.approx([0, 0.5 + NORMAL])
    assert around("inception_score", 1.5, 1.0)[0] == 1 and around("bound", 0.9, 1.0) == [0, 1]
    assert around("audit", 5.0, 1.0) == pytest.approx([5 - NORMAL, 5 + NORMAL])
    assert NORMAL == pytest.approx(scipy.stats.norm.ppf(0.975))


def test_quality_is_of_the_generated_images(comparison):
    out, report = comparison
    labels = torch.arange(NUM) % 10
    for i, row in enumerate(report["rows"]):
        found = features(images_of(out, i))
        right = (load_classifier("digits").out(found).argmax(1) == labels).float().mean().item()
        assert row["accuracy"] == pytest.approx(right)
        assert row["accuracy_ci95"] == pytest.approx(wilson_of_scipy(round(right * NUM), NUM))
        assert row["inception_score"] >= 1 and row["fid_ci95"] is row["fid_resolution"] is None  # of so few images
    assert report["reference"]["fingerprint"] == load_reference(SPACES["digits"].reference).fingerprint


def test_the_worst_images_and_tokens_are_those_that_differ_most(digits, tmp_path):
    """By loops over the patches of 4 pixels; the picture has them below those of the same seeds."""
    quick = {"num_iter": 2, "num_sampling_steps": 6, "cfg": 1.0}
    rows = [Configuration(name, cspd.Request(0, method=name, **quick), digits) for name in ("ar", "disa")]
    report, images = compare(rows, range(10), 10, tmp_path, progress=False)
    assert "worst.png" in comparison_report.write(report, images, tmp_path)
    assert report["rows"][0]["worst_images"] is None
    squares = (images[0].astype(float) - images[1]) ** 2
    order = np.argsort(-squares.mean((1, 2, 3)))[:8]
    worst = report["rows"][1]["worst_images"]
    assert [each["image"] for each in worst] == order.tolist()
    for each, i in zip(worst, order):
        assert each["pixel_difference"] == pytest.approx(squares[i].mean() ** 0.5, rel=1e-5)
        patches = {
            (r, c): squares[i, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4].mean() ** 0.5 for r in range(8) for c in range(8)
        }
        assert each["token"] == [*max(patches, key=patches.get)]
        assert each["token_difference"] == pytest.approx(max(patches.values()), rel=1e-5)
    picture = np.asarray(Image.open(tmp_path / "worst.png").convert("RGB"))
    for made in images:
        assert is_in_picture(picture, made[order[0]])


def is_in_picture(picture, image):
    """Whether an image is in a picture, enlarged by any whole factor."""
    for factor in range(1, 9):
        size = factor * len(image)
        windows = np.lib.stride_tricks.sliding_window_view(picture[..., 0], (size, size))[:, :, ::factor, ::factor]
        if (windows == image[..., 0]).all((2, 3)).any():
            return True
    return False


def test_verdicts_name_what_differs_after_a_correction_for_the_rows():
    """Eight rows with a p of 0.02 show nothing; one alone would. A change is of the same seeds, or else of others."""
    scatter = np.random.default_rng(0).normal(size=25)
    scores = [{"fid": Score(value, value + scatter)} for value in (3.0, 3.0, 3.5, 9.0)]
    rows = [dict.fromkeys(("p_value", "p_unpaired", "verdict", "fid_change")) for _ in scores]
    rows[1]["p_value"] = 0.02
    _add_verdicts(rows, scores, [(None, 1), (0, None), (0, None), (None, 0)])
    assert [row["verdict"] for row in rows] == [
        "no difference shown",
        "differs: features",
        "differs: FID",  # all that scatters is shared
        "differs: FID",
    ]
    assert [row["fid_change"] for row in rows] == pytest.approx([0, 0, 0.5, 6])
    many = [dict(rows[1], verdict=None) for _ in range(8)]
    _add_verdicts(many, scores[:1] * 8, [(None, None)] + [(0, None)] * 7)
    assert {row["verdict"] for row in many} == {"no difference shown"} and many[0]["p_value_holm"] == pytest.approx(
        0.16
    )


def test_features_are_taken_once(digits, tmp_path, monkeypatch):
    quick = {"method": "ar", "num_sampling_steps": 2, "cfg": 1.0}
    rows = [Configuration(str(k), cspd.Request(0, num_iter=k, **quick), digits) for k in (1, 2)]
    folder = tmp_path / "reference"
    folder.mkdir()
    for i, output in enumerate(digits.generate([cspd.Request(i, num_iter=2, **quick) for i in range(4)])):
        to_pil(output.image).save(folder / f"{i}.png")
    reference = load_reference(folder)
    evaluated = []
    forward = ClassifierExtractor.forward

    def counted(self, images):
        evaluated.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(ClassifierExtractor, "forward", counted)
    evaluation = Evaluation("digits", reference=reference)
    report, images = compare(rows, range(5), 20, tmp_path / "out", evaluation=evaluation, progress=False)
    assert sum(evaluated) == 4 + 20 + 20
    for row, made in zip(report["rows"], images):
        data = metrics.ImageList(torch.from_numpy(made).permute(0, 3, 1, 2))
        # from images, by torch-fidelity; errors are by the cycles through the classes
        measured = metrics.measure(data, evaluation, labels=[i % 5 for i in range(20)], cycle=5)
        assert measured["kid"] is not None and 0 <= row["fid_ci95"][0] < row["fid"] < row["fid_ci95"][1]
        for name in ("fid", "inception_score", "accuracy"):
            assert row[name] == pytest.approx(measured[name], rel=1e-4)
            assert row[f"{name}_ci95"] == pytest.approx(measured[f"{name}_ci95"], rel=1e-3)


def test_rows_are_tested_against_the_same_seeds_and_against_others(digits, tmp_path):
    names = ["ar", "ar:seed=8", "ar:num_sampling_steps=3"]
    quick = {"num_iter": 2, "num_sampling_steps": 2, "cfg": 1.0}
    rows = configurations(named_entries(names), quick, lambda models: digits)
    rows = [row for row in rows if row.name in names]  # not those of 64 iterations
    report, images = compare(rows, range(10), 8, tmp_path, evaluation=Evaluation("digits"), progress=False)
    tests = {"p_value": ("paired_baseline", [None, None, 0]), "p_unpaired": ("unpaired_baseline", [1, 0, 1])}
    for p_value, (name, bases) in tests.items():
        for made, row, base in zip(images, report["rows"], bases):
            expected = None if base is None else energy_test(features(images[base]), features(made))
            assert (row[p_value], row[name]) == (expected, None if base is None else names[base])
        corrected = holm([row[p_value] for row in report["rows"]])
        assert [row[f"{p_value}_holm"] for row in report["rows"]] == corrected
    assert report["rows"][2]["fid_change"] is None and report["rows"][2]["verdict"] is not None  # without a reference
    squares = (images[0].astype(float) - images[2]) ** 2
    pixels = np.sqrt(squares.mean())
    assert {row["worst_images"] for row in report["rows"]} == {None}  # all are exact
    assert [row["pixel_difference"] for row in report["rows"]] == [None, None, pytest.approx(pixels)]


@pytest.mark.slow
def test_a_wrong_sampler_has_a_small_p(digits, tmp_path, monkeypatch):
    def colder(runner, batch, watch):
        asked = [sequence.request for sequence in batch]
        for sequence in batch:
            sequence.request = dataclasses.replace(sequence.request, temperature=0.3)
        finished = run_plain_round(runner, batch, watch)
        for sequence, request in zip(batch, asked):
            sequence.request = request
        return finished

    asked = ({"method": "ar"}, {"method": "speculative", "window": 3})
    quick = K4 | {"num_sampling_steps": 10}
    rows = [Configuration(each["method"], cspd.Request(0, **quick, **each), digits) for each in asked]
    ways = {"evaluation": Evaluation("digits"), "progress": False}
    right, _ = compare(rows, range(10), 24, tmp_path / "right", **ways)
    bad = dataclasses.replace(method.find("speculative", "MAR"), run_round=colder)
    monkeypatch.setattr(method, "METHODS", [bad, *(m for m in method.METHODS if m.name != "speculative")])
    wrong, _ = compare(rows, range(10), 24, tmp_path / "wrong", **ways)
    assert wrong["rows"][1]["p_value"] <= 0.005 < 0.1 < right["rows"][1]["p_value"]
    assert right["rows"][1]["fid"] is None and right["missing"]["fid"] == "there is no reference"


def test_a_reference_needs_features(tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("target", "vae"):
        os.symlink(checkpoint_files("digits32")[name], folder / f"{name}.safetensors")
    arguments = ["compare", "--checkpoint", str(folder), *QUICK, "--num", "1", "--methods", "ar"]
    assert main([*arguments, "--out", str(tmp_path / "out"), "--ref", "x.npz"]) == 2
    assert "--weights" in capsys.readouterr().err
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert report["rows"][0]["fid"] is None and "--weights" in report["missing"]["fid"]
