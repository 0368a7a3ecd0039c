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
from cspd.evaluation.run import audit
from cspd.heads.calibration import Price, joined, price_of
from cspd.heads.chain import is_full_call
from cspd.heads.prices import of_conditions
from cspd.masked import budget
from cspd.masked import prices as masked_prices
from cspd.masked.audit import audit_images, drawn_iterations
from cspd.masked.backbones import BACKBONES, cached_conditions
from cspd.masked.budget import Planner, planned
from cspd.masked.orders import timetable
from cspd.masked.plan import (
    EXACT,
    LAZY,
    BudgetPlan,
    Prices,
    best_plan,
    factors,
    listed,
    plan_refreshes,
    plan_rounds,
)
from cspd.masked.prices import _price_joined, _price_lazy, anchors_of, measure_prices
from cspd.masked.replay import Replay, exact_requests
from cspd.masked.round_times import seconds_of_calls
from cspd.masked.runner import MARRunner
from cspd.tuner import Times

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
    replay = Replay(MARRunner(model, len(requests), FP32), requests)
    predictor = engine.runner.tuning.calibrations["target"].predictor(checked)
    with torch.inference_mode():
        return replay, measure_prices(replay, predictor, model.head.schedule(T))


def test_exact_images_are_those_of_ar(measured, engine):
    replay, _ = measured
    outputs = engine.generate(
        [
            sequence.request.but(reuse_null=None, retain=None, refreshes=None, select=None, kept=None)
            for sequence in replay.batch
        ]
    )
    for slot, output in enumerate(outputs):
        assert relative_error(replay.runner.tokens[slot], output.tokens) < 1e-4


@pytest.fixture(name="single")
def single_prices(measured, model, monkeypatch):
    """A replay, its exact chains and anchors, the schedule, and all steps' prices in place of their factors."""
    replay, prices = measured
    monkeypatch.setattr(masked_prices, "_factors", lambda by_lag, *_: (by_lag, by_lag))
    monkeypatch.setattr(masked_prices, "EVERY", 1)
    with torch.inference_mode():
        yield replay, replay.chains(range(K)), prices.anchors.tolist(), model.head.schedule(T)


def test_prices_are_those_of_single_replays(single, model):
    replay, chains, anchors, s = single
    prices, _ = _price_lazy(replay, chains, anchors, s)
    anchor = anchors[1]
    _, *stale = replay.conditions(cached_conditions, anchor, refreshes=str(anchor), **LAZY[1])
    for k, (_, z) in enumerate(stale, anchor + 1):
        nats = of_conditions(model.head, chains[k], z, s, FP32)
        assert prices[1, 1, k - anchor] == pytest.approx(nats.mean().item(), rel=1e-3)
    assert (prices[:, :, 0] == 0).all() and prices[0].max() > 0


def test_what_is_measured_can_be_kept(measured):
    _, prices = measured
    prices.check(T)
    assert prices.of_calls.shape == (len(prices.head_calls), 2)
    assert np.outer(prices.joined_anchor, prices.joined_lag)[:, 1].max() > 0


def test_full_evaluations_cost_nothing(measured, model):
    replay, _ = measured
    with torch.inference_mode():
        every = list(replay.conditions(cached_conditions, 0, refreshes=listed(range(K))))
        for chains, (_, z) in zip(replay.chains(range(K)), every):
            assert of_conditions(model.head, chains, z, model.head.schedule(T), FP32).max() < 1e-4


def test_prices_of_joined_iterations(single, model):
    """By the conditions of an earlier iteration, which do not know the tokens between."""
    replay, chains, anchors, s = single
    prices, _ = _price_joined(replay, chains, anchors, s)
    runner, anchor = replay.runner, anchors[1]
    rows = replay.rows(anchor)
    committed = rows.committed[0]
    together = replay.ahead(anchor, K)
    for k in range(anchor + 1, K):
        first = runner.seq_len - int(runner.num_masked(replay.batch[0].request)[k - 1])
        count = len(chains[k].image) // len(replay.batch)
        ahead = runner.rows(replay.batch, rows.committed, [first + count - committed] * len(replay.batch))
        z = runner.conditions(replay.batch, ahead)[:, ahead.offset >= first - committed]
        before = sum(len(chains[i].image) for i in range(anchor + 1, k))
        assert torch.allclose(together[:, before : before + len(chains[k].image)], z, atol=1e-4)
        nats = of_conditions(model.head, chains[k], z, s, FP32)
        assert prices[1, k - anchor] == pytest.approx(nats.mean().item(), rel=1e-3)


def test_prices_between_anchors_are_interpolated():
    nothing, anchors = np.zeros(1, np.int16), np.array([0, 2], np.int16)
    by_lag = np.array([[0, 1, 2, 3, 4]])
    prices = Prices(nothing, nothing, np.zeros((1, 2)), anchors, nothing, by_lag, nothing, nothing)
    of_anchor = np.array([1, 3])
    assert prices.between(of_anchor, by_lag[0]).tolist() == [
        [0, 1, 2, 3, 4],
        [0, 0, 2, 4, 6],
        [0, 0, 0, 3, 6],
        [0, 0, 0, 0, 3],
        [0, 0, 0, 0, 0],
    ]
    assert prices.between(of_anchor, by_lag[0, :3])[0].tolist() == [0, 1, 2, np.inf, np.inf]


def test_factors_are_those_of_products():
    """Each anchor with lags up to the end; longer lags do not cost less, whatever was measured."""
    of_anchor, of_lag = np.array([2.0, 1.0, 0.5]), np.array([0.0, 1.0, 1.5, 4.0, 4.0])
    is_measured = np.arange(3)[:, None] + np.arange(5) < 5
    found = factors(np.outer(of_anchor, of_lag) * is_measured, is_measured)
    assert np.outer(*found) == pytest.approx(np.outer(of_anchor, of_lag), rel=1e-3)
    falling = np.array([[0.0, 1.0, 3.0, 2.0, 5.0]])
    found = factors(falling, np.ones((1, 5), bool))
    assert np.outer(*found) == pytest.approx(np.array([[0, 1, 2.5, 2.5, 5]]))
    assert not np.outer(*factors(0 * falling, np.ones((1, 5), bool))).any()
    unknown = np.array([[0.0, 1.0, np.inf]])
    assert np.outer(*factors(unknown, np.isfinite(unknown)))[0, :2] == pytest.approx([0, 1])


@pytest.mark.parametrize("seed", range(3))
def test_factors_err_less_than_single_prices(seed):
    """Of means over few tokens that are small mostly: the expected prices come back several times closer."""
    rng = np.random.default_rng(seed)
    expected = np.outer(rng.uniform(0.5, 2, 9), np.arange(17) ** 1.2)
    measured = expected * rng.gamma(0.25, 4, expected.shape)
    of_anchor, of_lag = factors(measured, np.ones(expected.shape, bool))
    error = np.abs(np.outer(of_anchor, of_lag) - expected).mean()
    assert error < np.abs(measured - expected).mean() / 2


def subsets() -> list[tuple[int, ...]]:
    """All sets of iterations with the first."""
    chosen = itertools.product([False, True], repeat=K - 1)
    return [(0, *(i + 1 for i, is_in in enumerate(others) if is_in)) for others in chosen]


@pytest.mark.parametrize("weight", [0.0, 0.3, 3.0, 30.0, 1e4])
def test_the_best_of_all_rounds_and_refreshes(weight):
    """The shortest paths against all sets of rounds and of refreshes."""
    rng = np.random.default_rng(0)
    cost = np.triu(rng.uniform(0, 1, (K, K)), 1)
    counts, full, lazy = rng.integers(1, 4, K), rng.uniform(1, 2, K), rng.uniform(0, 1, K)
    head = np.triu(rng.uniform(0, 1, (K, K + 1)), 1)
    rounds, refreshes = {}, {}
    for stops in subsets():
        last = [max(j for j in stops if j <= k) for k in range(K)]
        nats = sum(cost[j, k] * counts[k] for k, j in enumerate(last)) / counts.sum()
        of_head = sum(head[i, j] for i, j in zip(stops, (*stops[1:], K)))
        seconds = sum(full[k] if j == k else lazy[k] for k, j in enumerate(last))
        rounds[stops] = nats, of_head, weight * nats + of_head + sum(full[k] for k in stops)
        refreshes[stops] = nats, seconds, weight * nats + seconds
    for found, every in (
        (plan_rounds(cost, counts, full, head, weight), rounds),
        (plan_refreshes(cost, counts, full, lazy, weight), refreshes),
    ):
        stops, nats, seconds = found
        assert (nats, seconds) == pytest.approx(every[stops][:2])
        assert every[stops][2] == pytest.approx(min(each[2] for each in every.values()))


def times_of(full=1.0, lazy=0.2, call=0.1) -> Times:
    seconds = {"full": full, "lazy 0": lazy, "lazy 1": lazy, "both": call, "one": call / 2}
    return Times({work: np.array([[1, 32], [own, own]]) for work, own in seconds.items()})


def test_a_plan_stays_within_its_budget(checked, measured):
    _, prices = measured
    counts = np.array([1, 2, 3, 3, 3, 4])
    speeds = []
    for nats in (0.001, 0.1, 1.0, 10.0, 1e9):
        plan = best_plan(checked.but(budget=nats), prices, times_of(), counts, 2, exact_head=T * K * 0.1)
        assert plan.price.divergence <= nats
        speeds.append(plan.speedup)
    assert speeds == sorted(speeds) and speeds[-1] > 1.5
    assert plan.settings["denoiser"] == "calibrated" and "rounds" in plan.settings


def test_a_plan_is_exact_if_nothing_is_faster(checked, measured):
    _, prices = measured
    counts = np.array([1, 2, 3, 3, 3, 4])
    plan = best_plan(checked, prices, times_of(lazy=1.0), counts, 2, exact_head=0.01)
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
    """Times with which approximations pay."""
    monkeypatch.setattr(Planner, "round_times", lambda *_: times_of())
    monkeypatch.setattr(Planner, "_exact_head", lambda *_: T * K * 0.1)
    engine.runner.tuning._planned.clear()
    return engine


def test_a_run_within_a_budget(generous):
    requests = [generous.resolve(Request(i, seed=i, budget=5.0, **SETTINGS)) for i in range(2)]
    plan = planned(requests[0], generous.runner)
    outputs = generous.generate(requests)
    for output in outputs:
        assert output.stats.guarantee == "approximate"
        assert output.stats.divergence == plan.price.divergence <= 5.0
        assert output.request.refreshes == plan.settings["refreshes"]
    # a run again, from all its settings
    (again,) = generous.generate([outputs[0].request.but(seed=0)])
    assert relative_error(again.tokens, outputs[0].tokens) < 1e-3


def test_a_plan_is_priced_as_a_whole(generous, monkeypatch):
    """If it may cost more than its parts, less is spent on them; if that never fits, nothing."""
    planner, request = generous.runner.tuning, generous.check(Request(1, budget=5.0, **SETTINGS))
    limits = []
    of_parts, of_whole = best_plan, {"factor": 1.0}

    def recorded(asked, *args, **more):
        limits.append(asked.budget)
        return of_parts(asked, *args, **more)

    def priced(asked, plan):
        nats = plan.price.divergence * of_whole["factor"]
        return plan._replace(price=Price(nats, nats / 2))

    monkeypatch.setattr(budget, "best_plan", recorded)
    monkeypatch.setattr(planner, "priced", priced)
    assert sum(planner.plan(request, 2).price) <= 5.0
    assert limits[0] == 5.0 and limits == sorted(limits, reverse=True)
    of_whole["factor"] = 1e9
    planner._planned.clear()
    assert planner.plan(request, 2).settings == EXACT


def test_without_corrections_segments_end_as_predicted(generous):
    request = generous.check(Request(1, method="calibrated", head_calls=4, **SETTINGS)).but(null_every=1)
    calibrations = generous.runner.tuning.calibrations["target"]
    plain, corrected = (calibrations.segments(request.but(corrected=own)) for own in (False, True))
    corrections = calibrations.shortcut(request).corrections
    for own, other, (of_x, of_eps) in zip(plain, corrected, corrections.tolist()):
        moved = other.mix[-1, :2] - own.mix[-1, :2]
        assert moved.tolist() == pytest.approx([of_x, of_eps], abs=1e-3 + 1e-4 * own.mix[-1, :2].abs().max().item())
    stats = generous.generate([request.but(corrected=False)])[0].stats
    assert stats.difference is None and stats.head_calls_per_token == 4


STALE = {"backbone": "cached", "retain": 0.0, "denoiser": "speculative", "window": 0}


def audited(engine, refreshes, share=1.0, num=2, **more):
    """The audit of `num` images by cached backbones with exact chains."""
    requests = [Request(i, seed=i, budget=5.0, refreshes=refreshes, **STALE, **SETTINGS, **more) for i in range(num)]
    outputs = engine.generate(requests)
    tokens = torch.stack([output.tokens for output in outputs])
    return tokens, audit_images(engine.runner, [output.request for output in outputs], tokens, share)


@pytest.mark.parametrize("rounds", [None, "0-1,4"])
def test_the_audit_finds_the_divergence_of_a_run(rounds, engine, model, monkeypatch):
    """Against the conditions that the rounds of the run really had."""
    cached, z_of_run = BACKBONES["cached"], []

    def recorded(*args):
        rows, z = args[2], cached.conditions(*args)
        z_of_run.extend(z[:, torch.as_tensor(rows.iteration == k)] for k in np.unique(rows.iteration))
        return z

    monkeypatch.setitem(BACKBONES, "cached", dataclasses.replace(cached, conditions=recorded))
    tokens, found = audited(engine, "0", rounds=rounds)
    requests = [Request(i, seed=i, method="ar", **SETTINGS) for i in range(2)]
    replay = Replay(MARRunner(model, 2, FP32), [engine.check(request) for request in requests], tokens)
    with torch.inference_mode():
        chains = joined(replay.chains(range(K)))
        nats = of_conditions(model.head, chains, torch.cat(z_of_run, dim=1), model.head.schedule(T), FP32)
    expected = price_of(nats, chains.image).divergence
    assert found["audit"] == pytest.approx(expected, rel=1e-3) and expected > 0.01


def test_the_audit_of_an_exact_run_finds_nothing(engine):
    assert audited(engine, listed(range(K)))[1]["audit"] < 1e-4
    assert audited(engine, listed(range(K)), share=0.1)[1]["audit"] < 1e-4
    exact = engine.resolve(Request(1, budget=0, **SETTINGS))
    assert audit_images(engine.runner, [exact], torch.zeros(1, 16, 3), 1.0) == {}


def test_an_audit_of_more_images_than_slots(engine, monkeypatch):
    """Two at once, as the engine has slots: the images of a long run do not fit into memory together."""
    sizes, admit = [], MARRunner.admit
    monkeypatch.setattr(MARRunner, "admit", lambda runner, batch: sizes.append(len(batch)) or admit(runner, batch))
    requests = [Request(i, seed=i, budget=5.0, refreshes="0", **STALE, **SETTINGS) for i in range(3)]
    outputs = engine.generate(requests)
    sizes.clear()
    parts = []
    for chosen in (outputs, outputs[:2], outputs[2:]):
        tokens = torch.stack([output.tokens for output in chosen])
        parts.append(audit_images(engine.runner, [output.request for output in chosen], tokens, 1.0)["audit"])
    # iterations are those of the first seed: all
    assert max(sizes) == 2 and parts[0] == pytest.approx((2 * parts[1] + parts[2]) / 3, rel=1e-4)


def test_runs_report_the_plan_and_the_audit(engine):
    request = Request(0, budget=5.0, refreshes="0", **STALE, **SETTINGS)
    finished = engine.generate([request])
    found = audit(engine, finished, num=100)  # of one image in a hundred, all iterations
    assert found["plan"] and found["audit"] == audited(engine, "0", num=1)[1]["audit"]
    assert audit(engine, finished, num=1)["audit"] != found["audit"]
    assert audit(engine, [], num=0) == {}


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 1.0])
def test_an_audit_has_the_mean_over_all_tokens(share):
    """On average over seeds, from iterations of unlike numbers of tokens; and always if all are drawn."""
    counts, nats = np.array([1, 2, 0, 3, 9, 4]), np.array([5.0, 1.0, 9.0, 2.0, 0.1, 0.0])
    expected = (counts * nats).sum() / counts.sum()
    found = []
    for seed in range(1000):
        iterations, weights = drawn_iterations(counts, share, seed)
        own = counts[iterations]
        found.append((own * weights * nats[iterations]).sum() / own.sum())
    error = np.std(found) / len(found) ** 0.5
    assert abs(np.mean(found) - expected) < 4 * error + 1e-9
    if share == 1.0:
        assert iterations == [0, 1, 3, 4, 5] and weights == pytest.approx(1.0) and error < 1e-9


def test_given_axes_have_a_price(engine):
    """Which is that of a plan with the same settings."""
    request = engine.resolve(Request(1, seed=3, budget=5.0, refreshes="0,3", **STALE, **SETTINGS))
    plan = planned(request, engine.runner)
    same = engine.runner.tuning.priced(request, BudgetPlan({**STALE, "refreshes": "0,3"}, Price(0.0, 0.0), None))
    (output,) = engine.generate([request])
    assert output.stats.guarantee == "approximate"
    assert output.stats.divergence == plan.price.divergence == pytest.approx(same.price.divergence, rel=1e-4)
    assert plan.price.divergence > 0.01


def test_settings_that_a_budget_refuses(engine):
    cached = {"backbone": "cached", "denoiser": "speculative"}
    for wrong in (
        {"temperature": 0.0},
        {"backbone": "cached"},
        {"denoiser": "calibrated"},
        {"budget": -1.0},
        {"rounds": "0-3"},
        {"budget": 0.0, "rounds": "0-3"},
        {"budget": 0.0, **cached},
        {"backbone": "cached", "denoiser": "calibrated", "audit": 0.1},
    ):
        with pytest.raises(ValueError, match=r"budget|backbone|audit"):
            engine.check(Request(1, **({"budget": 0.3, **SETTINGS} | wrong)))


def test_rounds_are_timed_once(model, monkeypatch, tmp_path):
    """With another number of images at once they take other seconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("cspd.masked.round_times.TURNS", 1)
    monkeypatch.setattr("cspd.tuner.STEADY", np.inf)  # whatever else runs here

    def times(num_slots):
        engine = Engine(MARModels(model), max_batch=num_slots, device="cpu", cache=tmp_path)
        return engine.runner.tuning.round_times(engine.check(Request(1, budget=0.3, **SETTINGS)), num_slots)

    first = times(2)
    assert first.keys() == {"full", "lazy 0", "lazy 1", "both", "one"}
    assert first["full"][0].tolist() == [2, 3, 4, 5, 6] and (first["full"][1] > 0).all()
    monkeypatch.setattr(budget, "time_rounds", lambda *_: 1 / 0)
    again = times(2)
    assert all((again[work] == first[work]).all() for work in first)
    with pytest.raises(ZeroDivisionError):
        times(1)


def test_seconds_of_head_calls_follow_from_two_chains():
    """By recorded times: 3 s for a call with both branches, 2 s without the unconditional one."""
    num_full = sum(is_full_call(i, 10, 10) for i in range(10))
    assert 0 < num_full < 10
    mixed = 3 * num_full + 2 * (10 - num_full)
    assert seconds_of_calls(30.0, mixed, 10, 2) == pytest.approx((3, 2))
    assert seconds_of_calls(30.0, 31.0, 10, 2) == (3, 3)  # noise: never dearer
    assert seconds_of_calls(30.0, 30.0, 10, 1) == (3, 3)


def test_lists_of_iterations():
    assert listed([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8" and listed([0]) == "0"
    assert anchors_of(64)[0] == 0 and anchors_of(1) == [0] and max(anchors_of(64)) == 62


def test_joined_rounds_keep_order_and_guidance(engine):
    """Rounds of all iterations change nothing; joined ones have fewer calls, and the same order and scales."""
    request = Request(1, seed=2, budget=1.0, backbone="full", denoiser="speculative", window=0, **SETTINGS)
    plain, every, some = engine.generate([request.but(rounds=rounds) for rounds in (None, "0-5", "0,2-4")])
    assert torch.equal(plain.tokens, every.tokens)
    assert (some.stats.iterations, some.stats.backbone_calls) == (4, 4)
    assert (plain.stats.guarantee, every.stats.guarantee) == ("exact", "approximate")
    resolved = engine.resolve(request.but(rounds="0,2-4"))
    whole, joint = (timetable(each, 16) for each in (engine.resolve(request), resolved))
    assert joint.masked.tolist() == whole.masked[[1, 2, 3, 5]].tolist()
    assert (joint.iteration == whole.iteration).all() and (joint.scale == whole.scale).all()
    for bad in ("1-5", "0,2,1", "0-6", "x"):
        with pytest.raises(ValueError, match="rounds"):
            engine.check(request.but(rounds=bad))
