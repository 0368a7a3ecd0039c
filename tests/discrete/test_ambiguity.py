"""The measurements of scripts/measure/ambiguity.py, on models whose distributions can be written down."""

from __future__ import annotations

import argparse
import json

import ambiguity
import pytest
import torch
from enumerated import pairs, tv
from scipy import stats
from toys import CLASSES, CODES, LENGTH, toy_models

import cspd
from cspd import VQModels
from cspd.discrete.distributions import guide
from cspd.discrete.registry import VQDefaults
from cspd.discrete.rules import neighbours

SAMPLING = VQDefaults(cfg=1.5)


@pytest.fixture(scope="module")
def engine():
    return cspd.Engine(VQModels(**toy_models()), max_batch=3, device="cpu")


def target_of(engine, label: int, tokens: torch.Tensor) -> torch.Tensor:
    """P [L, V] at the tokens of an image, by the target's own forward pass."""
    target = engine.runner.target
    before = tokens[None, :-1]
    logits = torch.stack([target(torch.tensor([own]), before) for own in (label, CLASSES)])
    return guide(logits, torch.tensor([SAMPLING.cfg]))[0].softmax(-1)


def test_total_variation_is_one_minus_the_exact_acceptance(engine):
    P, Q = pairs()
    found = ambiguity.measured(P, Q, {})
    assert found["accepted if drawn, exact"] == pytest.approx(1 - found["total variation"], abs=1e-12)
    assert found["total variation"] == pytest.approx(tv(P, Q).mean().item(), abs=1e-12)

    # and in float32, of the models
    tokens = torch.tensor([2, 0, 3, 1])
    inputs = ambiguity.taking_in(engine.runner, range(CLASSES), 1)(tokens)
    P, Q = ambiguity.pair_of(engine.runner, inputs, SAMPLING)
    assert torch.allclose(P, target_of(engine, 1, tokens), atol=1e-5)
    found = ambiguity.measured(P, Q, {})
    assert found["accepted if drawn, exact"] == pytest.approx(1 - found["total variation"], abs=1e-6)
    assert 0.01 < found["total variation"] < 0.99


def test_masses_and_accuracies_by_hand():
    P = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]])
    Q = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]])
    near = torch.tensor([[1], [0], [3], [2]])
    rules = {"exact": ambiguity.Exact(), "lantern": ambiguity.Lantern(0.25, k=1, near=near)}
    found = ambiguity.measured(P, Q, rules)
    expected = {"mass of 1": 0.45, "mass of 10": 1.0, "accuracy at 1": 0.5, "accuracy at 3": 0.5}
    # of token 0, by P's 0.5 and 0.1; its neighbour may add 0.2, not 0.3
    expected |= {"accepted if likeliest, exact": 0.3, "accepted if likeliest, lantern": 0.4}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_the_change_of_one_token_by_offset(engine):
    tokens = torch.tensor([2, 0, 3, 1])
    take_in = ambiguity.taking_in(engine.runner, range(CLASSES), 0)
    P, _ = ambiguity.pair_of(engine.runner, take_in(tokens), SAMPLING)
    changes = torch.tensor([1, 0]), torch.tensor([3, 1])
    sums, counts = ambiguity.moved_by_offset(engine.runner.target, take_in, P, tokens, changes, SAMPLING)
    first = tv(target_of(engine, 0, torch.tensor([2, 3, 3, 1])), P)
    second = tv(target_of(engine, 0, torch.tensor([1, 0, 3, 1])), P)
    expected = torch.stack([first[2] + second[1], first[3] + second[2], second[3]])
    assert torch.allclose(sums[1:].float(), expected, atol=1e-5)
    assert counts.tolist() == [0, 2, 2, 1]
    assert first[:2].max() < 1e-6  # nothing before it changes


def test_tokens_are_changed_to_others_that_the_target_samples():
    P = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).expand(2000, -1)
    codes = torch.zeros(2000, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(4)
    for _ in range(100):
        _, tokens = ambiguity.changed_tokens(P, codes, generator)
        counts += torch.bincount(tokens, minlength=4)
    assert counts[0] == counts[3] == 0
    assert stats.chisquare(counts[1:3].numpy()).pvalue > 1e-3


def test_replaced_tokens_are_near_ones():
    near = neighbours(torch.randn(9, 2, generator=torch.Generator().manual_seed(1)), 2)
    codes = torch.full((9000,), 4)
    found = ambiguity.replaced(codes, near, torch.Generator().manual_seed(0))
    counts = torch.bincount(found, minlength=9)
    allowed = [4, *near[4].tolist()]
    assert counts[allowed].sum() == 9000
    assert stats.chisquare(counts[allowed].numpy()).pvalue > 1e-3


def test_the_report_and_the_picture(engine):
    args = argparse.Namespace(prompts=None, num=4, settings={"cfg": 1.5})
    report, picture = ambiguity.measure(engine, args)
    report = json.loads(json.dumps(report))
    assert report["images"] == 4
    assert report["settings"] == {"cfg": 1.5, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    means = {name: each["mean"] for name, each in report["means"].items()}
    assert means["accepted if drawn, exact"] == pytest.approx(1 - means["total variation"], abs=1e-6)
    assert means["mass of 10"] == pytest.approx(1)  # there are only CODES
    assert means["accepted if likeliest, lantern, k 1, delta 0.4"] > means["accepted if likeliest, exact"]
    assert len(report["total_variation_by_offset"]) == LENGTH - 1 < CODES
    assert picture.width > 1000 and picture.height > 500
