"""`cspd tune`: its candidates, rungs, choice and output. The choice on made-up numbers is in test_study.py."""

from __future__ import annotations

import dataclasses
import json
import shlex
import signal

import numpy as np
import pytest
from stores import small_checkpoint

import cspd
from cspd import method as cspd_method
from cspd.cli import _parse, evaluate, flags, main
from cspd.cli.options import request_of
from cspd.comparison import compare, study
from cspd.comparison.compare import OTHER_SEEDS, Trial, _add_losses, _trial, tune
from cspd.comparison.report import against_plain, choice_told, half_interval, shortfall
from cspd.comparison.study import Configuration, comparison_store
from cspd.evaluation.metrics import SPACES, Evaluation, load_reference
from cspd.evaluation.scores import Score, standard_error, student_limit
from cspd.terminal import tolerance

STEPS = (2, 3, 4)  # denoising steps of the candidates
LIMITS = {"fid": 9.0}
TINY = " ".join(f"ar:num_sampling_steps={n}" for n in STEPS)  # of one iteration, see `few_candidates`
FEW = ["--num-iter", "1", "--num-sampling-steps", "8", "--num", "8", "--max-batch", "4", "--cfg", "1"]


@pytest.fixture(scope="module", autouse=True)
def small_rungs():
    """Rungs of 4 and 8 images; of three candidates one is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "FEWEST", 4)
        patch.setattr(flags, "FIRST_RUNG", 4)
        patch.setattr(compare, "LEAST_KEPT", 1)
        yield


@pytest.fixture(scope="module")
def rows():
    """Baseline sampling in one iteration, and candidates of fewer steps."""
    request = cspd.Request(0, method="ar", num_iter=1, num_sampling_steps=25, cfg=1.0)
    plain = Configuration("ar", request, cspd.load(small_checkpoint(), max_batch=4, device="cpu"))
    fewer = [dataclasses.replace(plain, name=f"{n}", request=plain.request.but(num_sampling_steps=n)) for n in STEPS]
    return plain, fewer


def search(rows, out, limits, num=8, **more):
    evaluation = Evaluation("digits", reference=load_reference(SPACES["digits"].reference))
    with comparison_store(out) as store:
        return tune(*rows, range(10), num, limits, store, evaluation, progress=False, **more)


def stamps(out):
    return {path.name: path.stat().st_mtime_ns for path in out.glob("chunks/*.npz")}


@pytest.fixture(scope="module")
def done(rows, tmp_path_factory):
    """A finished search, its folder and its report."""
    out = tmp_path_factory.mktemp("tune")
    report, images = search(rows, out, LIMITS)
    return out, report, images


def test_the_better_part_generates_more_images(done):
    out, report, images = done
    first, last = report["tune"]["rungs"]
    assert (first["images"], last["images"]) == (4, 8)
    assert [row["name"] for row in first["rows"]] == ["ar", f"ar:seed={OTHER_SEEDS}", *map(str, STEPS)]
    assert [row["name"] for row in last["rows"]][2:] == first["kept"] == last["kept"] and len(first["kept"]) == 1
    trials = [Trial(row["images_per_second"]["median"], row["losses"]["fid"]["loss"]) for row in first["rows"][2:]]
    index = STEPS.index(int(first["kept"][0]))
    best = trials[index]
    assert not any(each.speed > best.speed and each.excess < best.excess for each in trials)
    made = [(r, 0) for r in range(5)] + [(r, 1) for r in (0, 1, 2 + index)]
    assert set(stamps(out)) == {f"{r:02d}-{i:05d}.npz" for r, i in made}
    assert [len(of_row) for of_row in images] == [8] * 3


def test_losses_are_against_baseline_sampling(done):
    _, report, _ = done
    plain, other, best = report["rows"]
    assert plain["losses"]["fid"] == {"loss": 0, "error": 0, "degrees": 1}
    for row in (other, best):
        assert row["losses"]["fid"]["loss"] == pytest.approx(row["fid"] / plain["fid"] - 1)
        assert row["losses"]["fid"]["error"] == pytest.approx(abs(other["losses"]["fid"]["loss"]))  # too few for more
        assert row["losses"]["inception_score"]["error"] == pytest.approx(
            abs(other["losses"]["inception_score"]["loss"])
        )
    assert all(row["losses"]["divergence"] == {"loss": 0, "error": 0, "degrees": 1} for row in report["rows"])
    assert other["settings"]["seed"] == OTHER_SEEDS and not other["front"]
    assert best["images_per_second"]["median"] > plain["images_per_second"]["median"]
    assert best["front"] and report["tune"]["chosen"] == best["name"]


def test_a_finished_search_generates_nothing_twice(done, rows):
    out, report, _ = done
    before = stamps(out)
    again, _ = search(rows, out, LIMITS)
    assert stamps(out) == before and again["tune"]["rungs"] == report["tune"]["rungs"]
    assert again["tune"]["chosen"] == report["tune"]["chosen"]


def test_errors_are_of_the_ratio_to_the_same_images():
    """Scatter that a row shares with baseline sampling is not an error of their ratio."""
    scatter = np.array([1.0, 1.2, 0.9, 1.1])
    plain = {"fid": Score(1.0, scatter), "accuracy": Score(1.0, np.ones(4))}
    others = [{"fid": Score(1.1, scatter[::-1])}, {"fid": Score(1.1, 1.1 * scatter), "accuracy": Score(0.9, scatter)}]
    rows = [{"guarantee": "heuristic"} for _ in range(3)]
    _add_losses(rows, [plain, *others])
    losses = [each["losses"] for each in rows]
    assert losses[2]["fid"]["loss"] == pytest.approx(0.1) and losses[2]["fid"]["error"] < 1e-12
    assert losses[1]["fid"]["error"] == pytest.approx(standard_error(scatter[::-1] - 1.1 * scatter))
    assert losses[2]["accuracy"] == pytest.approx(
        {"loss": 0.1, "error": standard_error(scatter), "degrees": len(scatter) - 1}
    )
    assert losses[2]["inception_score"] is losses[2]["divergence"] is None


def test_without_intervals_other_seeds_show_the_error():
    rows = [{"guarantee": "exact"} for _ in range(3)]
    _add_losses(rows, [{"fid": Score(fid)} for fid in (10.0, 9.7, 11.0)])
    assert rows[2]["losses"]["fid"] == pytest.approx({"loss": 0.1, "error": 0.03, "degrees": 1})


def test_intervals_of_losses_are_students():
    """Of 4 degrees of freedom 2.776 standard errors, from tables of Student's t."""
    row = {"losses": {"fid": {"loss": 0.1, "error": 0.01, "degrees": 4}}}
    assert half_interval(row["losses"]["fid"]) == pytest.approx(0.02776, abs=1e-5)
    assert against_plain(row, "fid") == "+10.0 % ±2.8"


def told(loss, half, limit=0.02, chosen=None):
    """What is told of a candidate whose FID is worse by `loss`, by half of its 95 % interval more or less."""
    losses = {"fid": {"loss": loss, "error": half / student_limit(19), "degrees": 19}}
    speeds = {"images_per_second": {"median": 14.0}, "speed_up": {"median": 14.0}}
    fast = {"name": "ddim", "losses": losses} | speeds
    slow = {"name": "speculative", "losses": {"fid": {"loss": 0.0, "error": 0.0, "degrees": 1}}}
    slow |= {"images_per_second": {"median": 1.7}, "speed_up": {"median": 1.7}}
    plain = slow | {"name": "ar", "images_per_second": {"median": 1.0}}
    rows = [plain, slow, fast] if chosen else [plain, fast]
    trials = [_trial(row, {"fid": limit}) for row in rows]
    best, likely = compare.fastest(trials), compare.fastest(trials, is_sure=False)
    names = [None if i is None else rows[i]["name"] for i in (best, likely)]
    tuned = {"limits": {"fid": limit}, "chosen": names[0], "unresolved": None if likely == best else names[1]}
    tuned["nearest"] = "ddim"
    report = {"rows": rows, "images": 100, "tune": tuned}
    return names[0], choice_told(report) if names[0] else shortfall(report)


def test_what_chance_may_have_given_is_not_chosen():
    """It says how many images the limit needs: half of the interval shrinks with their root."""
    chosen, sentence = told(-0.023, 0.146)
    assert chosen is None and "not resolved" in sentence and "-2.3 % ±14.6" in sentence
    assert "5400 images" in sentence and "--num 5400" in sentence  # 100 x (14.6 / 2)^2 = 5329
    chosen, sentence = told(-0.023, 0.146, chosen="speculative")
    assert chosen == "speculative" and "1.70 times" in sentence and "5400 images" in sentence
    assert told(-0.023, 0.01)[0] == "ddim" and "not resolved" not in told(-0.023, 0.01)[1]
    assert "not resolved" not in told(0.1, 0.146)[1] and "nearest" in told(0.1, 0.146)[1]
    assert "no number" in told(-0.01, 0.146, limit=0.0)[1]


def test_a_candidate_that_fails_is_left_out(rows, tmp_path, monkeypatch):
    timed = study._timed
    failing = {"3"}

    def explode(row, requests, on_progress):
        if row.name in failing:
            raise FloatingPointError("request 0 gave no image")
        return timed(row, requests, on_progress)

    monkeypatch.setattr(study, "_timed", explode)
    report, _ = search(rows, tmp_path, {"accuracy": 1.0}, num=4)
    assert report["tune"]["failed"] == {"3": "request 0 gave no image"}
    assert [row["name"] for row in report["rows"]][2:] == ["2", "4"]
    failing.add("ar")
    with pytest.raises(ValueError, match="no image"):
        search(rows, tmp_path, {"accuracy": 1.0}, num=4, overwrite=True)


def test_every_candidate_fits_the_bundled_models(digits):
    vq = cspd.load("digits32_vq", max_batch=1, device="cpu")
    for engine, family in ((digits, "MAR"), (vq, "VQ")):
        names = {method.name for method in cspd_method.METHODS if method.family == family}
        plain = Configuration("ar", cspd.Request(0, method="ar"), engine)
        for divergence in (None, 0.0, 0.7):
            found, left_out = study.candidates(plain, divergence)
            assert not {name for name in left_out if name.split(":")[0] in names}
            assert len({row.name for row in found}) == len(found) > 3
            assert (divergence == 0.7 and family == "MAR") == ("budget:budget=0.7" in {row.name for row in found})


def test_candidates_have_the_users_settings(digits):
    plain = Configuration("ar", cspd.Request(0, method="ar", num_iter=12, cfg=2.0), digits)
    found, _ = study.candidates(plain, None)
    assert {row.request.cfg for row in found} == {2.0}
    assert {row.request.num_iter for row in found if row.request.method != "ddim"} == {12}
    # with a limit of divergence nothing is left that has no price
    assert {row.request.num_iter for row in study.candidates(plain, 0.5)[0]} == {12}


def few_candidates(monkeypatch):
    monkeypatch.setitem(study.CANDIDATES, "MAR", TINY)
    monkeypatch.setitem(study.EXACT_CANDIDATES, "MAR", "speculative:window=2 speculative:window=3")


def test_a_stopped_search_resumes_and_prints_the_command(tmp_path, monkeypatch, capsys):
    few_candidates(monkeypatch)
    timed = study._timed

    def stop(row, requests, on_progress):
        if len(stamps(tmp_path)) == 6:  # in the middle of the second rung
            signal.raise_signal(signal.SIGINT)
        return timed(row, requests, on_progress)

    arguments = ["tune", *FEW, "--out", str(tmp_path), "--tolerance", "fid=999%,accuracy=999%", "--seed", "5"]
    arguments += ["--num-sampling-steps", "25"]  # surely slower than a few
    with monkeypatch.context() as patch:
        patch.setattr(study, "_timed", stop)
        assert main(arguments) == 130
    assert f"{tmp_path}" in capsys.readouterr().err
    before = stamps(tmp_path)
    assert main(arguments) == 0
    assert stamps(tmp_path).items() > before.items() and len(stamps(tmp_path)) == 8

    printed = capsys.readouterr().out
    tuned = json.loads((tmp_path / "tune.json").read_text(), parse_constant=pytest.fail)
    assert tuned["told"] in printed and tuned["command"] in printed
    page = (tmp_path / "report.html").read_text()
    assert tuned["command"] in page and "cspd tune" in page and tuned["chosen"] in page
    args = _parse(shlex.split(tuned["command"])[1:])
    steps = int(tuned["chosen"].rpartition("=")[2])
    assert request_of(args) == cspd.Request(0, 0, "ar", num_iter=1, num_sampling_steps=steps, cfg=1.0)
    assert args.max_batch == 4 and args.checkpoint == "digits32"


def test_the_command_has_settings_that_are_zero(rows):
    plain, _ = rows
    row = dataclasses.replace(plain, request=plain.request.but(temperature=0.0))
    args = _parse(["tune", "--no-graphs"])
    again = _parse(shlex.split(evaluate.command(args, row))[1:])
    assert request_of(again).temperature == 0 and again.graphs is False
    again = _parse(shlex.split(evaluate.command(_parse(["tune"]), row))[1:])
    assert again.graphs is None and again.compile is False


def test_limits_that_no_candidate_meets_are_an_error_after_the_report(tmp_path, monkeypatch, capsys):
    few_candidates(monkeypatch)
    few = "ar:num_sampling_steps=2 ar:num_sampling_steps=60"  # worse; surely slower
    monkeypatch.setitem(study.CANDIDATES, "MAR", few)
    assert main(["tune", *FEW, "--num", "4", "--out", str(tmp_path), "--tolerance", "fid=0%"]) == 2
    captured = capsys.readouterr()
    error = captured.err.splitlines()[-1]
    assert error.startswith("cspd: ") and "FID" in error and "num_sampling_steps" in error
    assert "images/s" in captured.out and "cspd sample" not in captured.out
    assert json.loads((tmp_path / "tune.json").read_text())["chosen"] is None
    assert (tmp_path / "report.html").exists()


def test_models_without_a_classifier_are_searched_for_exact_methods(tmp_path, monkeypatch, capsys):
    few_candidates(monkeypatch)
    base = ["tune", "--checkpoint", small_checkpoint(), *FEW, "--num", "4", "--out", str(tmp_path)]
    assert main(base) == 2
    assert "--tolerance" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    main([*base, "--exact"])
    tuned = json.loads((tmp_path / "tune.json").read_text())
    assert tuned["limits"] == {"divergence": 0} and {row["guarantee"] for row in tuned["rungs"][0]["rows"]} == {"exact"}


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--tolerance", "fid"], "fid"),
        (["--tolerance", "fid=0.02"], "--tolerance"),
        (["--tolerance", "fid=nan%"], "--tolerance"),
        (["--tolerance", "fdi=2%"], "fid"),
        (["--tolerance", "fid=1%,fid=2%"], "--tolerance"),
        (["--divergence", "nan"], "--divergence"),
        (["--exact", "--tolerance", "fid=2%"], "--exact"),
        (["--num", "3"], "--num"),
    ],
)
def test_bad_limits_are_errors_of_one_line(arguments, named, capsys):
    with pytest.raises(SystemExit) as end:
        main(["tune", *arguments])
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and error.startswith("cspd tune: error:") and named in error


def test_a_tolerance_is_fractions_by_name():
    assert tolerance("fid=2%, accuracy=0.5%,is=10%") == {"fid": 0.02, "accuracy": 0.005, "inception_score": 0.1}
