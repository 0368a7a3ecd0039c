"""The examples: a method of one's own is one file of 40 lines, and does what it promises."""

from __future__ import annotations

import dataclasses
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from causals import CausalGolden
from conftest import relative_error
from heads import GUIDED, LINEAR, Case
from stores import small_checkpoint
from toys import counts, distribution, draw, p_value, request_of, toy_models

from cspd import Engine, MARModels, Request, method, register
from cspd.causal.family import CausalModels
from cspd.cli import main
from cspd.continuous.denoisers import DENOISERS
from cspd.discrete.drafts import DRAFTS
from cspd.heads import SAMPLERS, Observer

EXAMPLES = Path(__file__).parent.parent / "examples"
DENOISER = ["--plugin", str(EXAMPLES / "own_denoiser.py")]


@pytest.fixture
def added(monkeypatch):
    """A function that imports an example, whose method is registered for one test."""
    registries = [(registry, dict(registry)) for registry in (DENOISERS, SAMPLERS, DRAFTS)]
    methods = list(method.METHODS)

    def add(name):
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 40
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.delitem(sys.modules, name, raising=False)
        __import__(name)

    yield add
    method.METHODS[:] = methods
    for registry, before in registries:
        registry.clear()
        registry.update(before)


def test_the_draft_is_exact(added):
    added("own_draft")
    request, models = request_of("ngram", gamma=3), toy_models()
    observed, statistics = draw({"target": models["target"]}, request, 10_000)
    assert p_value(counts(observed), distribution(models["target"], request)) > 1e-3
    verified, accepted = (sum(sum(stats.by_lag[i]) for stats in statistics) for i in (0, 1))
    assert 0 < accepted < verified  # it does draft, and is not always right


@pytest.mark.parametrize("share, plain", [(1.0, {"cfg": 2.0}), (0.0, {"cfg": 1.0})])
def test_the_denoiser_is_ar_if_all_or_none_of_the_steps_are_guided(share, plain, added, small_mar):
    added("own_denoiser")
    engine = Engine(MARModels(small_mar), max_batch=2, device="cpu")
    settings = {"num_iter": 3, "num_sampling_steps": 30, "temperature": 1.0}
    own = [Request(i, seed=i, method="early-guidance", guided_share=share, cfg=2.0, **settings) for i in range(2)]
    ar = [Request(i, seed=i, method="ar", **settings, **plain) for i in range(2)]
    for output, expected in zip(engine.generate(own), engine.generate(ar)):
        assert relative_error(output.tokens, expected.tokens) < 1e-3
        assert output.stats.head_evaluations == expected.stats.head_evaluations


def test_the_denoiser_evaluates_the_unconditional_branch_in_guided_steps(added, small_mar):
    added("own_denoiser")
    request = Request(1, method="early-guidance", guided_share=0.4, cfg=2.0, num_iter=6, num_sampling_steps=30)
    stats = Engine(MARModels(small_mar), max_batch=1, device="cpu").generate(request)[0].stats
    assert (stats.head_calls, stats.head_evaluations) == (6 * 30, 64 * (30 + 12))


def test_the_denoiser_needs_no_engine(added):
    """As a function of a chain it evaluates two branches in the noisiest steps, and is the chain if in all."""
    added("own_denoiser")
    own, case, branches = SAMPLERS["early-guidance"].function, Case(LINEAR, GUIDED, 30, 2.0), []

    class Branches(Observer):
        def evaluated(self, chain, step, x, out):
            branches.append(len(out.raw))

    chain = case.chain(5, 1, Branches())
    own(chain, guided_share=0.4)
    assert branches == [2] * 12 + [1] * 18
    assert chain.tally.of_rows(5).tolist() == [[30] * 5, [30 + 12] * 5]
    assert torch.equal(own(case.chain(5, 1), guided_share=1.0), case.ancestral(5, 1))


def test_the_denoiser_computes_each_modulation_once(added, monkeypatch):
    """Those of 12 calls with two branches and of 18 with one."""
    added("own_denoiser")
    chain, computed = Case(LINEAR, GUIDED, 30, 2.0).chain(5, 1), []
    modulations = chain.head.modulations

    def counted(t_embed, c_embed):
        computed.append(len(t_embed))
        return modulations(t_embed, c_embed)

    monkeypatch.setattr(chain.head, "modulations", counted)
    SAMPLERS["early-guidance"].function(chain, guided_share=0.4)
    assert sum(computed) == 30 + 12


def test_the_denoiser_is_a_method_of_both_kinds_of_heads(added):
    added("own_denoiser")
    families = {each.family for each in method.METHODS if each.name == "early-guidance"}
    assert families == {"MAR", CausalModels.family}


def test_the_solver_approaches_heun(added):
    """Of the first token: later ones are given other tokens before them."""
    added("own_solver")
    engine = Engine(CausalModels(CausalGolden("sphere").model), max_batch=1, device="cpu")
    heun = engine.generate(Request(3, method="heun", head_calls=399, cfg=2.0))[0].tokens[0]
    errors = []
    for num_steps in (10, 40):
        output = engine.generate(Request(3, method="midpoint", head_steps=num_steps, cfg=2.0))[0]
        assert output.stats.head_calls_per_token == 2 * num_steps
        errors.append(relative_error(output.tokens[0], heun))
    assert errors[0] > 2 * errors[1] and errors[1] < 0.05


def test_the_solver_gives_signs_to_bitdance(added):
    added("own_solver")
    engine = Engine(CausalModels(CausalGolden("bitdance").model), max_batch=1, device="cpu")
    output = engine.generate(Request(3, method="midpoint", head_steps=5))[0]
    assert set(output.tokens.unique().tolist()) == {-1.0, 1.0}


@pytest.mark.slow  # calibrates and measures this machine
def test_one_image(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "one_image.py"))
    assert (tmp_path / "seven.png").exists() and "guarantee: exact" in capsys.readouterr().out


def test_plugins_on_the_command_line(added, tmp_path, capsys):
    """Their methods generate, are listed, and have help for their flags."""
    models = ["--checkpoint", small_checkpoint(), "--device", "cpu", "--labels", "3", "--out", str(tmp_path)]
    own = ["--method", "early-guidance", "--guided-share", "0.4", "--num-iter", "2", "--num-sampling-steps", "20"]
    assert main(["sample", *DENOISER, *models, *own]) == 0
    (image,) = json.loads((tmp_path / "samples.json").read_text())["images"]
    assert (image["request"]["method"], image["request"]["guided_share"]) == ("early-guidance", 0.4)
    capsys.readouterr()
    assert main(["methods", "--plugin", str(EXAMPLES / "own_draft.py")]) == 0
    listed = capsys.readouterr().out.splitlines()
    (own_line,) = [line for line in listed if line.startswith("ngram ")]
    assert own_line.endswith("a chain of the tokens that followed before")  # it has no paper, and is not ours
    assert not any("(ours)" in line for line in listed)
    with pytest.raises(SystemExit):
        main(["sample", *DENOISER, "--help", "early-guidance"])
    assert "--guided-share" in capsys.readouterr().out


@pytest.mark.parametrize("text, reason", [(None, "no such file"), ("a b", "not a P")])
def test_files_that_are_no_plugins(text, reason, tmp_path, capsys):
    if text:
        (tmp_path / "own.py").write_text(text)
    assert main(["methods", "--plugin", str(tmp_path / "own.py")]) == 2
    assert reason in capsys.readouterr().err


def test_what_cannot_be_registered(added):
    added("own_draft")
    own = method.METHODS[-1]
    with pytest.raises(ValueError, match="ar"):
        register(dataclasses.replace(own, name="ar"))
    with pytest.raises(ValueError, match="ngram"):
        register(dataclasses.replace(own, guarantee="sure"))
    with pytest.raises(TypeError, match="ngram"):
        register("ngram")
    again = dataclasses.replace(own, summary="a notebook cell that is run twice")
    register(again)
    assert method.METHODS[-1] is again and own not in method.METHODS
