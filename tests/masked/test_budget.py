"""Prices of MAR's approximations on a toy, the plan that they lead to, and the method `budget`."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from conftest import relative_error
from toys import CPU, toy_mar

from cspd import Engine, MARModels, Request
from cspd.device import Precision
from cspd.heads.calibration import joined
from cspd.heads.prices import of_conditions, price_of
from cspd.masked.backbones import BACKBONES
from cspd.masked.budget import (
    EXACT,
    LAZY,
    Planner,
    Prices,
    Replay,
    RoundCosts,
    anchors_of,
    audit_images,
    best_plan,
    exact_requests,
    listed,
    measure,
    planned,
    refresh_plans,
)
from cspd.masked.runner import MARRunner

K, T = 6, 8
SETTINGS = {"num_iter": K, "cfg": 2.0, "num_sampling_steps": T}
FP32 = Precision("fp32", CPU)


@pytest.fixture(scope="module", name="model")
def toy_model():
    return toy_mar()


@pytest.fixture(scope="module", name="engine")
def toy_engine(model, tmp_path_factory):
    return Engine(MARModels(model), max_batch=2, device="cpu", cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module", name="checked")
def checked_request(engine):
    return engine.check(Request(1, budget=0.3, **SETTINGS))


@pytest.fixture(scope="module", name="measured")
def measured_prices(engine, model, checked):
    """A replay of exact images, and the prices on them."""
    requests = exact_requests(checked, model.config.seq_len, model.config.class_num)
    replay = Replay(MARRunner(model, len(requests), CPU, FP32), requests)
    predictor = engine.runner.tuning.calibrations["target"].predictor(checked)
    with torch.inference_mode():
        return replay, measure(replay, predictor, model.head.schedule(T))


def test_exact_images_are_those_of_ar(measured, engine):
    replay, _ = measured
    outputs = engine.generate(
        [sequence.request.but(reuse_null=None, retain=None, refreshes=None, select=None) for sequence in replay.batch]
    )
    for slot, output in enumerate(outputs):
        assert relative_error(replay.runner.tokens[slot], output.tokens) < 1e-4


def test_prices_are_those_of_single_replays(measured, model):
    replay, prices = measured
    s = model.head.schedule(T)
    anchor = int(prices.anchors[1])
    with torch.inference_mode():
        chains = replay.chains(range(K))
        _, *stale = replay.conditions(anchor, refreshes=str(anchor), **LAZY[1])
        for k, z in enumerate(stale, anchor + 1):
            nats = of_conditions(model.head, chains[k], z, s, FP32)
            # a part of the steps was measured: the same up to chance
            assert prices.lazy[1, 1, k] == pytest.approx(nats.mean().item(), rel=1.0)
    assert (prices.lazy[:, :, 0] == 0).all() and prices.lazy[0].max() > 0
    assert prices.of_calls.shape == (len(prices.head_calls), 2)
    prices.check(T)


def test_full_evaluations_cost_nothing(measured, model):
    replay, _ = measured
    with torch.inference_mode():
        every = list(replay.conditions(0, refreshes=listed(range(K))))
        for chains, z in zip(replay.chains(range(K)), every):
            assert of_conditions(model.head, chains, z, model.head.schedule(T), FP32).max() < 1e-4


def test_prices_between_anchors_are_interpolated():
    lazy = np.zeros((len(LAZY), 2, 5), np.float32)
    lazy[0, 0] = [0, 1, 2, 3, 4]
    lazy[0, 1] = [0, 0, 0, 3, 6]
    prices = Prices(*[np.zeros(1, np.int16)] * 2, np.zeros((1, 2)), np.array([0, 2], np.int16), lazy, lazy[..., 0])
    assert prices.after(0).tolist() == [
        [0, 1, 2, 3, 4],
        [0, 0, 2, 4, 3],  # a distance that was measured after the first anchor only: its price
        [0, 0, 0, 3, 6],
        [0, 0, 0, 0, 3],
        [0, 0, 0, 0, 0],
    ]


def test_the_best_refreshes_of_all():
    """The shortest path at every exchange rate, against all sets of refreshes: none is faster and better."""
    rng = np.random.default_rng(0)
    cost = np.triu(rng.uniform(0, 1, (K, K)), 1)
    counts, full, lazy = rng.integers(1, 4, K), rng.uniform(1, 2, K), rng.uniform(0, 1, K)
    every = {}
    for others in itertools.product([False, True], repeat=K - 1):
        refreshes = (0, *(i + 1 for i, chosen in enumerate(others) if chosen))
        nats = seconds = 0.0
        for k in range(K):
            last = max(j for j in refreshes if j <= k)
            nats += cost[last, k] * counts[k] / counts.sum()
            seconds += full[k] if last == k else lazy[k]
        every[refreshes] = nats, seconds
    found = list(refresh_plans(cost, counts, full, lazy))
    assert len(found) > 3
    for nats, seconds, refreshes in found:
        assert (nats, seconds) == pytest.approx(every[refreshes])
        better = [each for each in every.values() if each[0] < nats - 1e-9 and each[1] < seconds - 1e-9]
        assert not better
    slowest = max(found, key=lambda each: each[1])
    assert slowest[0] == 0 and slowest[2] == tuple(range(K))


def costs_of(full=1.0, lazy=0.2, call=0.1):
    return RoundCosts([0, K - 1], [full, full], [[lazy, lazy]] * len(LAZY), [1, 8], [call, call], [call / 2, call / 2])


def test_a_plan_stays_within_its_budget(checked, measured):
    _, prices = measured
    counts = np.array([1, 2, 3, 3, 3, 4])
    speeds = []
    for nats in (0.001, 0.1, 1.0, 10.0, 1000.0):
        plan = best_plan(checked.but(budget=nats), prices, costs_of(), counts, 2, exact_head=T * K * 0.1)
        assert plan.price.divergence <= nats
        speeds.append(plan.speedup)
    assert speeds == sorted(speeds) and speeds[-1] > 1.5
    assert plan.settings["backbone"] == "cached" and plan.settings["denoiser"] == "calibrated"


def test_a_plan_is_exact_if_nothing_is_faster(checked, measured):
    _, prices = measured
    counts = np.array([1, 2, 3, 3, 3, 4])
    plan = best_plan(checked, prices, costs_of(lazy=1.0), counts, 2, exact_head=0.01)
    assert plan.settings == EXACT and plan.price.divergence == 0


def test_without_a_budget_it_is_exact(engine):
    """It takes what `speculative` takes."""
    request = engine.resolve(Request(1, seed=3, budget=0, **SETTINGS))
    assert (request.method, request.backbone, request.denoiser) == ("budget", "full", "speculative")
    (output,) = engine.generate([request])
    (same,) = engine.generate([Request(1, seed=3, method="speculative", window=request.window, **SETTINGS)])
    assert output.stats.guarantee == "exact" and torch.equal(output.tokens, same.tokens)


@pytest.fixture(name="generous")
def generous_plan(engine, monkeypatch):
    """Costs with which approximations pay."""
    monkeypatch.setattr(Planner, "round_costs", lambda *_: costs_of())
    monkeypatch.setattr(Planner, "_exact_head", lambda *_: T * K * 0.1)
    engine.runner.tuning.planner._planned.clear()
    return engine


def test_a_run_within_a_budget(generous):
    requests = [generous.resolve(Request(i, seed=i, budget=5.0, **SETTINGS)) for i in range(2)]
    plan = planned(requests[0], generous.runner)
    outputs = generous.generate(requests)
    for output in outputs:
        assert output.stats.guarantee == "measured"
        assert output.stats.divergence == plan.price.divergence <= 5.0
        assert output.request.refreshes == plan.settings["refreshes"]
    # a run again, from all its settings
    (again,) = generous.generate([outputs[0].request.but(seed=0)])
    assert relative_error(again.tokens, outputs[0].tokens) < 1e-3


STALE = {"backbone": "cached", "retain": 0.0, "denoiser": "speculative", "window": 0}


def audited(engine, refreshes, share=1.0):
    """The audit of two images by cached backbones with exact chains."""
    requests = [Request(i, seed=i, budget=5.0, refreshes=refreshes, **STALE, **SETTINGS) for i in range(2)]
    outputs = engine.generate(requests)
    tokens = torch.stack([output.tokens for output in outputs])
    return tokens, audit_images(engine.runner, [output.request for output in outputs], tokens, share)


def test_the_audit_finds_the_divergence_of_a_run(engine, model, monkeypatch):
    """Against the conditions that the rounds of the run really had."""
    cached, z_of_run = BACKBONES["cached"], []

    def recorded(*args):
        z_of_run.append(cached.conditions(*args))
        return z_of_run[-1]

    monkeypatch.setitem(BACKBONES, "cached", dataclasses.replace(cached, conditions=recorded))
    tokens, found = audited(engine, "0")
    requests = [Request(i, seed=i, method="ar", **SETTINGS) for i in range(2)]
    replay = Replay(MARRunner(model, 2, CPU, FP32), [engine.check(request) for request in requests], tokens)
    with torch.inference_mode():
        chains = joined(replay.chains(range(K)))
        nats = of_conditions(model.head, chains, torch.cat(z_of_run, dim=1), model.head.schedule(T), FP32)
    expected = price_of(nats, chains.seed).divergence
    assert found["audit"] == pytest.approx(expected, rel=1e-3) and expected > 0.01


def test_the_audit_of_an_exact_run_finds_nothing(engine):
    assert audited(engine, listed(range(K)))[1]["audit"] < 1e-4
    assert audited(engine, listed(range(K)), share=0.1)[1]["audit"] < 1e-4
    exact = engine.resolve(Request(1, budget=0, **SETTINGS))
    assert audit_images(engine.runner, [exact], torch.zeros(1, 16, 3), 1.0) == {}


def test_settings_that_a_budget_refuses(engine):
    for wrong in ({"temperature": 0.0}, {"backbone": "cached"}, {"denoiser": "calibrated"}, {"budget": -1.0}):
        with pytest.raises(ValueError, match=r"budget|backbone"):
            engine.check(Request(1, **({"budget": 0.3, **SETTINGS} | wrong)))


def test_costs_are_checked():
    costs_of().check()
    with pytest.raises(ValueError, match="costs"):
        dataclasses.replace(costs_of(), full=[1.0, -1.0]).check()


def test_lists_of_iterations():
    assert listed([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8" and listed([0]) == "0"
    assert anchors_of(64)[0] == 0 and anchors_of(1) == [0] and max(anchors_of(64)) == 62
