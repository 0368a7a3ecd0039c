"""The examples: a method of one's own is one file of 40 lines and a line in the list, and keeps what it promises."""

from __future__ import annotations

import dataclasses
import json
import runpy
import sys
from pathlib import Path

import pytest
from conftest import relative_error
from stores import small_checkpoint
from toys import counts, distribution, draw, p_value, request_of, toy_models

from cspd import Engine, MARModels, Request, method, register
from cspd.cli import main
from cspd.discrete.drafts import DRAFTS
from cspd.heads.chain import DENOISERS

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def added(monkeypatch):
    """A function that imports an example, which adds its method to the list, for one test."""
    registries = [(registry, dict(registry)) for registry in (DENOISERS, DRAFTS)]
    before_all = list(method.METHODS)

    def add(name):
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.delitem(sys.modules, name, raising=False)
        __import__(name)

    yield add
    method.METHODS[:] = before_all
    for registry, before in registries:
        registry.clear()
        registry.update(before)


@pytest.mark.parametrize("name", ["own_denoiser", "own_draft"])
def test_a_method_of_ones_own_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 40


def test_the_draft_is_exact(added):
    added("own_draft")
    request, models = request_of("ngram", gamma=3), toy_models()
    observed, statistics = draw({"target": models["target"]}, request, 20000)
    assert p_value(counts(observed), distribution(models["target"], request)) > 1e-3
    judged, accepted = (sum(sum(s.by_lag[i]) for s in statistics) for i in (0, 1))
    assert 0 < accepted < judged  # it does draft, and is not always right


@pytest.mark.parametrize("share, plain", [(1.0, {"cfg": 2.0}), (0.0, {"cfg": 1.0})])
def test_the_denoiser_is_ar_where_all_or_none_of_the_steps_are_guided(share, plain, added, small_mar):
    added("own_denoiser")
    engine = Engine(MARModels(small_mar), max_batch=2, device="cpu")
    settings = {"num_iter": 3, "num_sampling_steps": 30, "temperature": 1.0}
    own = [Request(i, seed=i, method="early-guidance", guided_share=share, cfg=2.0, **settings) for i in range(2)]
    ar = [Request(i, seed=i, method="ar", **settings, **plain) for i in range(2)]
    for output, expected in zip(engine.generate(own), engine.generate(ar)):
        assert relative_error(output.tokens, expected.tokens) < 1e-3
        assert output.stats.head_evaluations == expected.stats.head_evaluations


def test_the_denoiser_evaluates_the_null_class_where_it_is_guided(added, small_mar):
    added("own_denoiser")
    request = Request(1, method="early-guidance", guided_share=0.4, cfg=2.0, num_iter=6, num_sampling_steps=30)
    stats = Engine(MARModels(small_mar), max_batch=1, device="cpu").generate(request)[0].stats
    assert (stats.head_calls, stats.head_evaluations) == (6 * 30, 64 * (30 + 12))


@pytest.mark.slow  # calibrates and measures this machine
def test_one_image(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "one_image.py"))
    assert (tmp_path / "seven.png").exists() and "guarantee: exact" in capsys.readouterr().out


def test_the_command_line_has_it(added, tmp_path, capsys):
    plugin = ["--plugin", str(EXAMPLES / "own_denoiser.py")]
    models = ["--checkpoint", small_checkpoint(), "--device", "cpu", "--labels", "3", "--out", str(tmp_path)]
    own = ["--method", "early-guidance", "--guided-share", "0.4", "--num-iter", "2", "--num-sampling-steps", "20"]
    assert main(["sample", *plugin, *models, *own]) == 0
    (image,) = json.loads((tmp_path / "samples.json").read_text())["images"]
    assert (image["request"]["method"], image["request"]["guided_share"]) == ("early-guidance", 0.4)
    assert main(["methods", "--plugin", str(EXAMPLES / "own_draft.py")]) == 0
    assert "guarantee" in capsys.readouterr().out


def test_help_names_its_flag(added, capsys):
    with pytest.raises(SystemExit):
        main(["sample", "--plugin", str(EXAMPLES / "own_denoiser.py"), "--help", "early-guidance"])
    shown = capsys.readouterr().out
    assert "--guided-share" in shown and "early-guidance" in shown


@pytest.mark.parametrize("text, message", [("x = 1", "method"), (None, "")])
def test_a_plugin_that_is_none(text, message, tmp_path, capsys):
    if text:
        (tmp_path / "own.py").write_text(text)
    assert main(["methods", "--plugin", str(tmp_path / "own.py")]) == 2
    assert "--plugin" in (error := capsys.readouterr().err) and message in error


def test_what_cannot_be_registered(added):
    added("own_draft")
    own = method.METHODS[-1]
    with pytest.raises(ValueError, match="ar"):
        register(dataclasses.replace(own, name="ar"))
    with pytest.raises(ValueError, match="ngram"):
        register(dataclasses.replace(own, guarantee="sure"))
    with pytest.raises(TypeError, match="ngram"):
        register("ngram")
    again = dataclasses.replace(own, summary="as where a cell is run twice")
    register(again)
    assert method.METHODS[-1] is again and own not in method.METHODS
