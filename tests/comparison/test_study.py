"""Studies, and the search for a fast method."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from comparisons import compare
from toys import toy_models

import cspd
from cspd import VQModels
from cspd.checkpoints import checkpoint_files
from cspd.cli import main
from cspd.comparison.compare import FEWEST, Trial, dominates, fastest, kept, layers, nearest, planned, rungs, survivors
from cspd.comparison.report import markdown
from cspd.comparison.study import (
    baselines,
    configurations,
    expand,
    named_entries,
    read_study,
    request_keys,
    speed_baseline,
)
from cspd.discrete.rules import rule_of

STUDIES = sorted((Path(__file__).parents[2] / "scripts" / "studies").glob("*.yaml"))


def rows_of(text, digits, **common):
    return configurations(named_entries(text.split(",")), common, lambda models: digits)


@pytest.mark.parametrize(
    "asked, common, names",
    [
        ("speculative", {}, ["ar", "speculative"]),  # K = 64 is the default and the usual number
        ("mar-draft,ar", {"num_iter": 64}, ["ar", "mar-draft"]),
        ("speculative,ar:num_iter=64", {"num_iter": 8}, ["ar", "speculative", "ar:num_iter=64"]),
        (
            "speculative:seed=9,ar:seed=9",
            {},
            ["ar", "speculative:seed=9", "ar:seed=9"],
        ),  # seeds do not change the distribution
        ("ar:cfg=4,speculative:cfg=4", {}, ["ar:cfg=4", "speculative:cfg=4"]),  # no other baseline is sampled
        ("ar:num_iter=16,speculative:num_iter=16", {}, ["ar:num_iter=16", "speculative:num_iter=16"]),
        ("calibrated,ar:num_iter=16,ar", {"num_iter": 8}, ["ar", "calibrated", "ar:num_iter=16"]),
        ("speculative", {"num_iter": 8}, ["ar", "ar:num_iter=64", "speculative"]),
        ("ar,speculative", {"num_iter": 8}, ["ar", "speculative"]),
        ("ar:num_iter=16,speculative", {}, ["ar", "ar:num_iter=16", "speculative"]),  # speculative has K = 64
        (
            "speculative:num_iter=16,mar-draft:temperature=0.9:num_iter=16",
            {},
            [
                *("ar", "ar:num_iter=16", "ar:num_iter=16:temperature=0.9"),
                *("speculative:num_iter=16", "mar-draft:temperature=0.9:num_iter=16"),
            ],
        ),
        (  # another chain, or other seeds, are no substitute for the common ones
            "speculative,ar:num_sampling_steps=25,ar:seed=9",
            {"num_iter": 8},
            ["ar", "ar:num_iter=64", "speculative", "ar:num_sampling_steps=25", "ar:seed=9"],
        ),
    ],
)
def test_baseline_sampling_is_added_for_all_settings(asked, common, names, digits):
    rows = rows_of(asked, digits, **common)
    assert [row.name for row in rows] == names
    for row in rows:
        found = [base for base in baselines(row, rows, 0) if base is not None]
        assert found or row.request.method == "ar"
        for base in found:
            assert base.request.method == "ar" and base is not row
            for field in ("num_iter", "cfg", "temperature"):
                own, others = (getattr(digits.check(each.request), field) for each in (row, base))
                assert own == others


def test_rows_are_compared_with_baseline_sampling_of_the_same_seeds_and_of_others(digits):
    against = {
        "ar": (None, "ar:seed=1000"),
        "ar:seed=1000": (None, "ar"),
        "speculative": ("ar", "ar:seed=1000"),
        "speculative:seed=0": ("ar", "ar:seed=1000"),  # the study's own
        "speculative:seed=1000": ("ar:seed=1000", "ar"),
        "speculative:seed=2000": (None, "ar"),
        "speculative:num_sampling_steps=25": ("ar:num_sampling_steps=25", None),  # exact for that chain
        "ar:num_sampling_steps=25": ("ar", "ar:seed=1000"),  # which stands for the whole one
        "ar:num_sampling_steps=10:first_timestep=950": ("ar", "ar:seed=1000"),
        "calibrated": ("ar", "ar:seed=1000"),
        "ddim": ("ar", "ar:seed=1000"),  # from timestep 950, which is part of what it changes
        "disa:num_iter=16": ("ar:num_iter=16", None),
        "ar:num_iter=16": (None, None),  # no shorter chain, but another order
        "ar:num_iter=16:num_sampling_steps=25": ("ar:num_iter=16", None),
        "ar:num_iter=8:num_sampling_steps=25": (None, None),
        "speculative:cfg=4:seed=1000": (None, "ar:cfg=4"),
    }
    rows = rows_of(",".join(against), digits)
    found = {row.name: [base and base.name for base in baselines(row, rows, 0)] for row in rows}
    assert {name: tuple(found[name]) for name in against} == against
    assert found.keys() - against.keys() == {"ar:cfg=4"}  # which only that row wants

    rows = rows_of("calibrated,ddim", digits, first_timestep=950)  # of all that have it
    names = ["ar", "ar:first_timestep=null", "calibrated", "ddim"]
    assert [row.name for row in rows] == names and rows[0].request.first_timestep == 950
    assert [baselines(row, rows, 0) for row in rows] == [(None, None), (rows[0], None), *[(rows[1], None)] * 2]


def test_models_of_a_row_are_its_own(digits):
    other = cspd.load(checkpoint_files("digits32")["draft"], max_batch=8, device="cpu")
    loaded = []

    def load(models):
        loaded.append(models)
        return other if "small" in models.values() else digits

    entries = [{"name": "small alone", "method": "ar", "checkpoint": "small"}, {"method": "mar-draft", "num_iter": 8}]
    entries += [{"method": "speculative", "checkpoint": "small"}]
    rows = configurations(entries, {"checkpoint": "digits32"}, load)
    names = ["ar", "ar:num_iter=8", "small alone", "mar-draft:num_iter=8", "speculative:checkpoint=small"]
    assert [row.name for row in rows] == names
    assert [row.engine is other for row in rows] == [False, False, True, False, True]
    assert baselines(rows[4], rows, 0) == (rows[2], None)  # not the large model's
    assert loaded == [{"checkpoint": "digits32"}, {"checkpoint": "small"}]


@pytest.mark.parametrize("common", [{}, {"vae": "F"}])
def test_the_first_entrys_models_are_not_another_rows(common, digits):
    entries = [{"name": "small alone", "method": "ar", "checkpoint": "small"}, {"method": "speculative"}]
    rows = configurations(entries, common, lambda models: digits)
    assert [(row.name, row.models) for row in rows] == [
        ("small alone", {"checkpoint": "small"} | common),
        ("ar:checkpoint=digits32", {"checkpoint": "digits32"} | common),
        ("speculative", {"checkpoint": "digits32"} | common),
    ]
    rows = configurations([{"method": "speculative", "checkpoint": "small"}], common, lambda models: digits)
    assert [row.models for row in rows] == [{"checkpoint": "small"} | common] * 2


def test_a_baseline_that_only_lacks_a_setting_has_a_name(digits):
    rows = configurations([{"method": "ar", "vae": "F"}, {"method": "speculative"}], {}, lambda models: digits)
    assert [row.name for row in rows] == ["ar:vae=F", "ar:vae=null", "speculative"]


def study(tmp_path, text):
    path = tmp_path / "study.yaml"
    path.write_text(text, encoding="latin-1")
    return path


def test_lists_are_swept():
    entry = {"method": "mar-draft", "gamma": [4, 8], "align": [True, False], "prefill": 0.1}
    made = expand(entry)
    assert [name for name, _ in made] == [
        f"mar-draft:gamma={gamma}:align={align}:prefill=0.1" for gamma in (4, 8) for align in ("true", "false")
    ]
    assert made[2][1] == {"method": "mar-draft", "gamma": 8, "align": True, "prefill": 0.1}
    for name, settings in made:  # the name asks for it again
        assert named_entries([name]) == [settings]
    names = ["a b:gamma=4:align=true", "a b:gamma=4:align=false", "a b:gamma=8:align=true", "a b:gamma=8:align=false"]
    assert [name for name, _ in expand(entry | {"name": "a b"})] == names


def test_a_study_runs_with_its_own_models_and_flags_override_it(tmp_path):
    files = checkpoint_files("digits32")
    text = "num: 3\nlabels: 4-5\nseed: 7\nmax_batch: 2\nnum_iter: 64\ncfg: 2\nnum_sampling_steps: 50\n"
    text += f"configurations:\n  - {{name: small, method: ar, cfg: 1, checkpoint: {files['draft']}}}\n"
    text += f"  - {{name: its own, method: cspd, gamma: 32, prefill: 0.9, draft_checkpoint: {files['target']}}}\n"
    path, out = study(tmp_path, text), tmp_path / "out"
    assert main(["compare", "--config", str(path), "--out", str(out), "--num", "1", "--num-sampling-steps", "2"]) == 0
    report = json.loads((out / "comparison.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["small", "ar:checkpoint=digits32", "its own"]
    assert (report["images"], report["labels"], report["first_seed"], report["max_batch"]) == (1, [4, 5], 7, 2)
    settings = [row["settings"] for row in report["rows"]]
    assert [(each["cfg"], each["num_sampling_steps"]) for each in settings] == [(1, 2), (2, 2), (2, 2)]
    assert "8 images or more" in report["missing"]["p_value_holm"]

    asked = json.loads((out / "run.json").read_text())["settings"]["configurations"]
    used = {name: each["files"] for name, each in asked.items()}
    assert used["small"]["target"]["file"] == "draft.safetensors"
    assert used["its own"]["draft"] == used["its own"]["target"]  # the target drafts for itself
    assert used["its own"]["target"]["file"] == "target.safetensors"


@pytest.mark.parametrize(
    "text, hint",
    [
        ("nums: 3\nconfigurations: [{method: ar}]", "num"),
        ("configurations: [{method: ar}, {method: cspd, gama: 3}]", "gamma"),
        ("num: 3", "configurations"),
        ("configurations: [ar]", "configurations"),
        ("gamma: [4, 8]\nconfigurations: [{method: cspd}]", "gamma"),
        ("configurations: [{method: ar, cfg: []}]", "cfg"),
        ("cfg: {a: 1}\nconfigurations: [{method: ar}]", "cfg"),
        ("labels: [1, null]\nconfigurations: [{method: ar}]", "None"),
        ("configurations: [{method: ar, cfg: 1:30}]", "cfg"),
        ("num: many\nconfigurations: [{method: ar}]", "num"),
        ("configurations: [{gamma: 3}]", "method"),
        ("configurations: [{method: arr}]", "method"),
        ("configurations: [{method: ar, gamma: 3}]", "gamma"),
        ("configurations: [{method: ar, seed: -1}]", "seed"),
        ("cfg: 1\ncfg: 2\nconfigurations: [{method: ar}]", "cfg"),
        ("cfg: .nan\nconfigurations: [{method: ar}]", "cfg"),
        ("configurations: [{method: ar, checkpoint: 5}]", "checkpoint"),
        ("configurations: [{method: cspd}, {method: mar-draft}]", "mar-draft"),
        ("configurations: [{method: ar, checkpoint: nowhere}]", "nowhere"),
        ("configurations: [{method: ar, paper: 3}]", "paper"),
        ("configurations: [{method: ar, paper: {fidd: 3}}]", "fidd"),
        ("configurations: [{method: ar, cfg: [1, 2], paper: {fid: [1, 2, 3]}}]", "fid needs a number, or 2"),
        ("configurations: [{method: ar, max_batch: 0}]", "max_batch"),
    ],
)
def test_bad_studies_are_rejected_in_one_line(text, hint, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["compare", "--config", str(study(tmp_path, text)), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert hint in error and error.startswith("cspd: ") and error.count("\n") == 1 and not out.exists()


def test_numbers_are_read_as_they_are_meant(tmp_path):
    text = "configurations: [{method: ar, cfg: [3, 1e1, 2E-1, 1.5e+2, 0x1F, 1_000, -0, 1:30, 010]}]"
    values = read_study(study(tmp_path, text))[1][0]["cfg"]
    assert values == [3, 10.0, 0.2, 150.0, 31, 1000, 0, "1:30", "010"]
    assert [type(value) for value in values[:3]] == [int, float, float]


@pytest.mark.parametrize(
    "arguments, hint",
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--config", "x.yaml", "--methods", "ar"], "--methods"),
        (["--methods", "ar:cfg,cspd"], "cfg"),
        (["--methods", "ar,ar:seed=10"], "seed"),
        (["--ref", "nowhere.npz"], "nowhere.npz"),
    ],
)
def test_bad_arguments_are_rejected_in_one_line(arguments, hint, tmp_path, capsys):
    assert main(["compare", "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert hint in error and error.startswith("cspd: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_published_studies_are_comparisons_of_the_bundled_models():
    assert STUDIES
    engines = {}
    for path in STUDIES:
        common, entries = read_study(path)
        name = common.pop("checkpoint", "digits32")
        if name not in engines:
            engines[name] = cspd.load(name, max_batch=2, device="cpu")
        settings = {key: value for key, value in common.items() if key in request_keys()}
        rows = configurations(entries, settings, lambda models, name=name: engines[name])
        assert len(rows) >= len(entries) and rows[0].request.method == "ar"
        assert f"--config scripts/studies/{path.name}" in path.read_text()


def test_rows_of_another_batch_size_have_their_own_baseline(digits, tmp_path):
    """In turns of their own size, and their speed is relative to baseline sampling of the same."""
    quick = {"num_iter": 1, "num_sampling_steps": 2, "cfg": 1.0}
    rows = rows_of("disa:max_batch=1,disa:max_batch=3", digits, **quick)
    names = ["ar", "ar:num_iter=64", "ar:max_batch=3", "disa:max_batch=1", "disa:max_batch=3"]
    assert [row.name for row in rows] == names
    assert [row.engine.num_slots for row in rows] == [1, 1, 3, 1, 3]
    assert [speed_baseline(row, rows).name for row in rows] == ["ar", "ar", "ar:max_batch=3", "ar", "ar:max_batch=3"]
    assert rows[0].engine is rows[3].engine and rows[2].engine is rows[4].engine

    rows = [row for row in rows if row.name != "ar:num_iter=64"]
    report, images = compare(rows, [1, 2], 4, tmp_path, progress=False)
    assert [len(row["seconds"]) for row in report["rows"]] == [4, 1, 4, 1]
    for own, base in ((2, 0), (3, 1)):
        ratios = np.divide(report["rows"][base]["seconds"], report["rows"][own]["seconds"])
        assert report["rows"][own]["speed_up"]["median"] == pytest.approx(np.median(ratios))
        assert np.abs(images[own].astype(int) - images[2]).max() <= 1
    assert [row["settings"].get("max_batch") for row in report["rows"]] == [None, 3, None, 3]
    with pytest.raises(ValueError, match="max_batch=0"):
        rows_of("ar:max_batch=0", digits)


def test_published_numbers_stand_beside_ours(digits, tmp_path):
    file = tmp_path / "study.yaml"
    quick = "num_iter: 1, num_sampling_steps: 2, cfg: 1.0"
    paper = "paper: {fid: [1, 2.5, 3, 4], speed_up: 1.5}"
    file.write_text(f"configurations:\n  - {{method: disa, upper: [3, 4], lower: [2, 3], {quick}, {paper}}}\n")
    common, entries = read_study(file)
    rows = configurations(entries, common, lambda models: digits)
    assert [row.name for row in rows if row.paper] == [row.name for row in rows if row.request.method == "disa"]
    assert [dict(row.paper) for row in rows if row.paper] == [{"fid": fid, "speed_up": 1.5} for fid in (1, 2.5, 3, 4)]
    report, _ = compare([row for row in rows if row.request.num_iter == 1], [1], 1, tmp_path / "out", progress=False)
    titles, _, *lines = [line.split("|") for line in markdown(report).splitlines() if line.startswith("|")]
    titles = [title.strip() for title in titles]
    (cells,) = [dict(zip(titles, line)) for line in lines if "upper=3:lower=3" in line[1]]
    assert cells["published FID"].strip() == "2.50" and cells["published speed-up"].strip() == "1.50"


def test_a_rules_common_parameters_reach_a_row_that_asks_for_the_rule():
    """Even if the row's method has another rule by default."""
    engine = cspd.Engine(VQModels(**toy_models(length=4)), max_batch=1, device="cpu")
    common = {"k": 2, "optimal": False}
    entries = [{"method": "sjd", "window": 3, "rule": "lantern", "delta": 0.2}, {"method": "ar"}]
    (row,) = [r for r in configurations(entries, common, lambda models: engine) if r.request.method == "sjd"]
    rule = rule_of(engine.check(row.request))
    assert (rule.name, rule.k, rule.optimal, rule.delta) == ("lantern", 2, False, 0.2)


# ---- The choice among candidates, on made-up numbers whose fronts are known


def test_rungs_rise_to_the_last_by_a_factor_of_three():
    expected = {20: [20], 39: [39], 40: [20, 40], 100: [20, 100], 180: [20, 60, 180], 540: [20, 60, 180, 540]}
    assert {num: rungs(num) for num in expected} == expected
    assert rungs(1620)[: len(rungs(540))] == rungs(540) and rungs(540)[0] == FEWEST


def test_a_third_is_kept_and_a_few_at_least():
    assert [kept(number) for number in (60, 20, 7, 4, 2, 0)] == [20, 7, 3, 2, 2, 0]
    assert planned(60, [20, 60, 180], always=2) == 62 * 20 + 22 * 40 + 9 * 120
    assert planned(20, [60, 180], always=2, before=20) == 22 * 40 + 9 * 120


def test_layers_are_the_fronts_of_the_remaining_points():
    points = [(1, 5), (2, 3), (4, 1), (2, 4), (4, 3), (5, 5), (2, 3)]
    assert layers(points) == [0, 0, 0, 1, 1, 2, 0]  # equal points do not dominate each other
    assert layers([(1, math.inf), (2, math.inf)]) == [0, 1]


def test_layers_of_three_values_are_by_definition():
    points = np.random.default_rng(0).integers(0, 5, (60, 3)).tolist()
    found = layers(points)
    for i, j in itertools.product(range(60), repeat=2):
        if dominates(points[i], points[j]):
            assert found[i] < found[j]
    for j in range(60):  # and no later than needed
        above = [found[i] for i in range(60) if dominates(points[i], points[j])]
        assert found[j] == max(above, default=-1) + 1


def test_survivors_are_within_reach_then_on_the_front_then_fast():
    trials = [
        Trial(9.0, 0.50, 0.01),  # fastest, out of reach
        Trial(3.0, -0.01, 0.01),  # good
        Trial(5.0, 0.03, 0.02),  # beyond, by less than its error allows
        Trial(2.0, 0.01, 0.01),  # slower and worse than both
        Trial(1.0, -0.05, 0.01),  # best and slow
        Trial(0.5, 0.40, 0.01),  # nothing speaks for it
    ]
    expected = {1: [2], 2: [1, 2], 3: [1, 2, 4], 4: [1, 2, 3, 4], 5: [0, 1, 2, 3, 4]}
    assert {number: survivors(trials, number) for number in expected} == expected


def test_the_worst_goes_first_whatever_the_order():
    trials = [Trial(speed, excess) for speed, excess in [(4, -0.02), (3, -0.03), (2, -0.01), (1, 0.2), (0.5, 0.3)]]
    for order in itertools.permutations(range(5)):
        shuffled = [trials[i] for i in order]
        assert {order[i] for i in survivors(shuffled, 2)} == {0, 1}


def test_chance_ends_no_candidate_early():
    sure, unsure = Trial(2.0, 0.01, 0.001), Trial(2.0, 0.04, 0.05)
    assert survivors([sure, unsure], 1) == [1]
    assert survivors([sure, Trial(2.0, 0.04, 0.001)], 1) == [0]


def test_the_fastest_within_the_limit_is_chosen_and_else_the_nearest():
    plain = Trial(1.0, -0.02)
    trials = [plain, Trial(4.0, 0.01), Trial(3.0, 0.0), Trial(2.0, -0.5), Trial(0.5, -1.0)]
    assert fastest(trials) == 2
    assert fastest([plain, Trial(4.0, 0.01), Trial(0.5, -1.0), Trial(1.04, -1.0)]) is None
    assert fastest([plain]) is None
    unsure = [plain, Trial(4.0, -0.04, 0.07, reach=0.15), Trial(3.0, -0.04, 0.01, reach=0.03)]
    assert fastest(unsure) == 2 and fastest(unsure, is_sure=False) == 1
    assert nearest([plain, Trial(4.0, 0.2), Trial(3.0, 0.1), Trial(0.5, -1.0)]) == 2  # of those that are faster
    assert nearest([plain, Trial(0.5, 0.3), Trial(0.6, 0.2)]) == 2
    assert nearest([plain]) is None
    assert nearest([plain, Trial(4.0, math.inf), Trial(3.0, 7.0)]) == 2
