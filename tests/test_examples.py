"""The examples: a method of one's own is one file of 40 lines and a line in the list, and keeps what it promises."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from toys import counts, distribution, draw, p_value, request_of, toy_models

from cspd import Engine, MARModels, Request, methods
from cspd.continuous.denoiser import DENOISERS
from cspd.discrete.draft import DRAFTS

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def added(monkeypatch):
    """A function that adds an example's method to the list, for one test."""
    registries = [(registry, dict(registry)) for registry in (DENOISERS, DRAFTS)]

    def add(name):
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.delitem(sys.modules, name, raising=False)
        method = __import__(name).METHOD
        monkeypatch.setattr(methods, "METHODS", [*methods.METHODS, method])
        return method

    yield add
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


def test_the_denoiser_is_ar_where_nothing_is_annealed(added, small_mar):
    added("own_denoiser")
    engine = Engine(MARModels(small_mar), max_batch=2, device="cpu")
    settings = {"num_iter": 6, "cfg": 2.0}
    same = [Request(i, seed=i, method="annealed", upper=9, lower=9, **settings) for i in range(3)]
    plain = [Request(i, seed=i, method="ar", num_sampling_steps=9, **settings) for i in range(3)]
    for own, other in zip(engine.generate(same), engine.generate(plain)):
        assert torch.equal(own.tokens, other.tokens)
        assert own.stats.head_calls == other.stats.head_calls == 54


def test_the_denoiser_takes_fewer_steps_in_later_iterations(added, small_mar):
    """Also where sequences of one batch are at different iterations: as each alone."""
    added("own_denoiser")
    requests = [Request(i, seed=i, method="annealed", upper=10, lower=4, num_iter=k) for i, k in enumerate((4, 7, 3))]
    together = Engine(MARModels(small_mar), max_batch=2, device="cpu").generate(requests)
    for request, output in zip(requests, together):
        alone = Engine(MARModels(small_mar), max_batch=1, device="cpu").generate([request])[0]
        assert (output.tokens - alone.tokens).abs().max() < 1e-4 * alone.tokens.abs().max()
        last = request.num_iter - 1
        assert alone.stats.head_calls == sum(4 + int((last - k) / last * 6) for k in range(last + 1))


@pytest.mark.slow  # calibrates and measures this machine
def test_one_image(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "one_image.py"))
    assert (tmp_path / "seven.png").exists() and "guarantee: exact" in capsys.readouterr().out
