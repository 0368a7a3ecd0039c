"""`calibrated`: its plans, windows, audits, and what it reports."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from heads import FP32, Case, MixtureHead
from stores import small_checkpoint
from torch.distributions import Normal, kl_divergence

import cspd
from cspd import Engine, MARModels, Request, load, noise
from cspd.cli import bench, main
from cspd.comparison import study
from cspd.comparison.compare import speed_of
from cspd.comparison.study import Configuration
from cspd.evaluation.run import SIZE, Shards, arrays_of
from cspd.heads.calibrated import Audit, Shortcut, fit_predictor, fit_shortcut, plan_of, plans, sample
from cspd.heads.calibration import trace
from cspd.heads.chain import evaluate
from cspd.masked.runner import MARRunner
from cspd.request import Output, RoundStats
from cspd.runs import MEASURED, measured, measured_lines, summary_of
from mar.head import schedule

CPU = torch.device("cpu")
STEPS = 40
LINEAR = MixtureHead(torch.zeros(1, 3), (0.5,))
MIXTURE = MixtureHead([[0.9, -0.6, 0.2], [-0.4, 0.7, 1.0], [0.1, -0.2, -1.1]], (0.2, 0.3, 0.4), (0.5, 0.3, 0.2), 0.3)
Z = torch.tensor([[[0.3, -0.5, 0.2]], [[0.1, 0.2, -0.3]]])
CASE = Case(MIXTURE, Z, STEPS, scale=1.5, temperature=0.9)


@pytest.fixture(scope="module")
def predictor():
    return CASE.predictor()


def shortcut(case, predictor, head_calls, null_every=1):
    steps = plan_of(predictor.skip_cost, head_calls).steps
    return fit_shortcut(case.head, case.trace(256, 2**40), case.trace(256, 2**41), predictor, steps, null_every, FP32)


def draw(case, plan, rows, seed, visit=None):
    """Tokens [rows, d] by a plan, with the noise of `case.ancestral(rows, seed)`."""
    trace = case.trace(rows, seed)
    x = noise.initial(trace.seed, trace.position, 3)
    eps = lambda t: noise.steps(trace.seed, trace.position, t, 3)  # noqa: E731
    return sample(case.head, trace.z, trace.scale, trace.temperature, x, eps, plan, case.num_steps, FP32, visit)


def call(case, z, k, x, scale):
    """Guided eps and v of the head at step k."""
    t_embed = case.head.time_embed(torch.tensor(schedule(case.num_steps).timestep_map[[k]]))
    modulations = case.head.split(case.head.modulations(t_embed, case.head.cond_embed(z)))
    return evaluate(case.head, x, modulations, scale)


def step_by_step(case, steps, predictor, corrections, null_every, rows, seed):
    """The sampler as methods papers write one: every step by itself, and KL(q || p) [rows] of its path."""
    s, trace = schedule(case.num_steps), case.trace(rows, seed)
    x, divergence, calls = noise.initial(trace.seed, trace.position, 3), torch.zeros(rows), 0
    for k in reversed(range(case.num_steps)):
        eps_full, v_full = call(case, trace.z, k, x, trace.scale)
        if k in steps:
            eps_c, v = call(case, trace.z[:1], k, x, trace.scale)
            if calls < 2 or calls == len(steps) - 1 or calls % null_every == 0:
                last_difference = eps_full - eps_c
            eps, anchor, anchor_x, anchor_eps, anchor_v = eps_c + last_difference, k, x, eps_c + last_difference, v
            correction = corrections[calls]
            calls += 1
        else:
            c0, c1, c2 = predictor.coefficients[k, anchor - k - 1].tolist()
            eps = c0 * x + c1 * anchor_eps + c2 * anchor_x
            v = anchor_v + predictor.drift[k, anchor - k - 1].item()
        mean, mean_full = (s.mean_x[k] * x + s.mean_eps[k] * e for e in (eps, eps_full))
        if k - 1 in steps or k == 0:
            mean = mean + correction[0] * anchor_x + correction[1] * anchor_eps
        if k == 0:
            return mean, divergence
        sigma, sigma_full = (
            case.temperature * torch.exp(s.log_sigma_base[k] + s.log_sigma_slope[k] * each) for each in (v, v_full)
        )
        divergence = divergence + kl_divergence(Normal(mean, sigma), Normal(mean_full, sigma_full)).sum(-1)
        x = mean + sigma * noise.steps(trace.seed, trace.position, torch.tensor([k]), 3)[0]
    raise AssertionError("a chain ends at step 0")


@pytest.mark.parametrize("null_every", [1, 2, 3])
def test_windows_are_the_steps_they_stand_for(predictor, null_every):
    """And an audit of all steps is the divergence of the path."""
    fitted = shortcut(CASE, predictor, 6, null_every)
    plan = fitted.segments(predictor, null_every, CPU)
    trace = CASE.trace(50, seed=3)
    everything = torch.ones(50, STEPS, dtype=torch.bool)
    audit = Audit(MIXTURE, trace.z, trace.scale, trace.temperature, plan, FP32, everything, 1.0)
    tokens = draw(CASE, plan, 50, seed=3, visit=audit)
    steps = tuple(fitted.steps.tolist())
    expected, divergence = step_by_step(CASE, steps, predictor, fitted.corrections, null_every, 50, seed=3)
    assert (tokens - expected).abs().max() < 1e-4
    assert torch.allclose(audit.total, divergence, rtol=1e-3, atol=1e-3)
    assert (fitted.corrections != 0).any(1).sum() >= 3  # so that they are tested, too


def test_all_calls_are_the_full_chain(predictor):
    """Draw for draw."""
    fitted = shortcut(CASE, predictor, STEPS)
    tokens = draw(CASE, fitted.segments(predictor, 1, CPU), 200, seed=1)
    assert (tokens - CASE.ancestral(200, seed=1)).abs().max() < 1e-4
    assert fitted.difference < 1e-4 and fitted.divergence == 0


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_linear_head_is_predicted_without_error(temperature):
    """Of tokens from one Gaussian: any few calls give the full chain's tokens."""
    case = Case(LINEAR, torch.tensor([[[1.0, -0.5, 2.0]]]), STEPS, temperature=temperature)
    predictor = case.predictor()
    for head_calls in (5, 8):
        fitted = shortcut(case, predictor, head_calls)
        tokens = draw(case, fitted.segments(predictor, 1, CPU), 1000, seed=1)
        exact = case.ancestral(1000, seed=1)
        assert (tokens - exact).abs().max() < 0.02
        assert fitted.difference < 0.03
        assert (fitted.divergence < 0.1) if temperature else fitted.divergence == np.inf


@pytest.mark.slow
def test_more_calls_come_nearer(predictor):
    fitted = {n: shortcut(CASE, predictor, n) for n in (4, 8, 16)}
    differences = [fitted[n].difference.item() for n in fitted]
    divergences = [fitted[n].divergence.item() for n in fitted]
    assert differences == sorted(differences, reverse=True) and divergences == sorted(divergences, reverse=True)
    for n, each in fitted.items():  # what was measured holds for tokens that nobody saw
        exact = CASE.ancestral(4000, seed=9)
        tokens = draw(CASE, each.segments(predictor, 1, CPU), 4000, seed=9)
        difference = ((tokens - exact).square().mean() / exact.var(0).mean()).sqrt()
        assert difference == pytest.approx(each.difference.item(), rel=0.25), n


def test_corrections_are_kept_where_they_come_nearer(predictor):
    """On tokens that the fit did not see."""
    kept = []
    for head_calls in (4, 6):
        fitted = shortcut(CASE, predictor, head_calls)
        without = dataclasses.replace(fitted, corrections=np.zeros_like(fitted.corrections))
        exact = CASE.ancestral(256, 2**41)
        corrected, plain = (
            (draw(CASE, each.segments(predictor, 1, CPU), 256, 2**41) - exact).square().mean()
            for each in (fitted, without)
        )
        kept.append(bool(fitted.corrections.any()))
        assert corrected < plain if kept[-1] else corrected == plain
    assert any(kept)


@pytest.mark.slow  # the trained model
def test_of_the_bundled_model(tmp_path, monkeypatch):
    """Tokens by 10 calls are within 0.06 standard deviations of those by 100, and spread as wide within 1 %."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = load("digits32", max_batch=10, device="cpu")
    model, precision = engine.runner.target, FP32
    request = engine.resolve(Request(0, method="calibrated", num_iter=16, cfg=3.0))
    calibrations = engine.runner.tuning.calibrations["target"]
    fitted, predictor = calibrations.shortcut(request), calibrations.predictor(request)
    assert fitted.difference < 0.06 and fitted.corrections.any()
    other = trace(model, request.but(num_sampling_steps=100), CPU, precision, MARRunner, held_out=True)
    without = dataclasses.replace(fitted, corrections=np.zeros_like(fitted.corrections))
    errors, spreads = [], []
    for each in (fitted, without):
        x = noise.initial(other.seed, other.position, 16)
        eps = lambda t: noise.steps(other.seed, other.position, t, 16)  # noqa: E731
        plan = each.segments(predictor, request.null_every, CPU)
        rows = other.z, other.scale, other.temperature
        with torch.inference_mode():
            tokens = sample(model.head, *rows, x, eps, plan, 100, precision)
        errors.append((tokens - other.tokens).square().mean())
        spreads.append((tokens.std(0) / other.tokens.std(0)).mean())
    assert errors[0] < 0.9 * errors[1] and abs(spreads[0] - 1) < 0.01


def test_an_audit_is_the_mean_log_ratio_of_paths(predictor):
    """KL(q || p) is E[log q(path) - log p(path)] over q's own paths, by its definition; and unbiased at any rate."""
    fitted = shortcut(CASE, predictor, 5, null_every=2)
    plan = fitted.segments(predictor, 2, CPU)
    rows, seed, s = 1500, 11, schedule(STEPS)
    trace = CASE.trace(rows, seed)
    ratio = torch.zeros(rows)

    def add(i, sources, v):
        window = plan[i]
        for place, k in enumerate(window.steps.tolist()):
            if k == 0:
                continue
            before, after = ((window.mix[j][:, None, None] * sources).sum(0) for j in (place, place + 1))
            sigma_q = CASE.temperature * torch.exp(window.base[place] + window.slope[place] * v)
            eps, v_k = call(CASE, trace.z, k, before, trace.scale)
            p = Normal(
                s.mean_x[k] * before + s.mean_eps[k] * eps,
                CASE.temperature * torch.exp(s.log_sigma_base[k] + s.log_sigma_slope[k] * v_k),
            )
            q = Normal(after - sources[2 + place], sigma_q)
            ratio.add_((q.log_prob(after) - p.log_prob(after)).sum(-1))

    draw(CASE, plan, rows, seed, visit=add)
    estimates = [ratio]
    for rate in (1.0, 0.1):
        chosen = noise.step_accept_uniforms(trace.seed, trace.position, STEPS) < rate
        audit = Audit(MIXTURE, trace.z, trace.scale, trace.temperature, plan, FP32, chosen, rate)
        draw(CASE, plan, rows, seed, visit=audit)
        estimates.append(audit.total)
    for estimate in estimates:
        error = (estimate.std() + estimates[1].std()) / rows**0.5
        assert abs(estimate.mean() - estimates[1].mean()) < 3 * error
    assert estimates[1].mean() > 10 * estimates[1].std() / rows**0.5  # there is something to find


def test_the_cost_of_a_step_is_its_divergence(predictor):
    x, eps, v = CASE.trace(256, 2**41).chains
    s = schedule(STEPS)
    for k, lag in ((1, 1), (20, 5), (3, 30)):
        c0, c1, c2 = predictor.coefficients[k, lag - 1].tolist()
        guessed = c0 * x[k] + c1 * eps[k + lag] + c2 * x[k + lag]
        drifted = v[k + lag] + predictor.drift[k, lag - 1]
        p, q = (
            Normal(
                s.mean_x[k] * x[k] + s.mean_eps[k] * e,
                CASE.temperature * torch.exp(s.log_sigma_base[k] + s.log_sigma_slope[k] * each),
            )
            for e, each in ((eps[k], v[k]), (guessed, drifted))
        )
        assert predictor.skip_cost[k, lag - 1] == pytest.approx(kl_divergence(p, q).sum(-1).mean().item(), rel=1e-3)


@pytest.mark.parametrize("lags", [9, 4])
def test_plans_are_the_cheapest_there_are(lags):
    """Against all of them."""
    costs = np.random.default_rng(0).exponential(size=(9, lags)).astype(np.float32)
    for plan in plans(costs):
        found = []
        for between in itertools.combinations(range(1, 8), len(plan.steps) - 2):
            steps = (8, *reversed(between), 0)
            skipped = [(k, a - k - 1) for a, b in itertools.pairwise(steps) for k in range(b + 1, a)]
            found.append(sum(costs[k, lag] if lag < lags else np.inf for k, lag in skipped))
        assert plan.cost == pytest.approx(min(found), rel=1e-5)
    assert plan.steps == tuple(range(8, -1, -1)) and plan.cost == 0
    most = plan_of(costs, 5).cost if lags == 9 else 2.0
    short = plan_of(costs, None, most)
    assert short.cost <= most and all(p.cost > most for p in plans(costs) if len(p.steps) < len(short.steps))


def test_a_plan_of_too_few_calls_is_an_error():
    with pytest.raises(ValueError, match="head_calls"):
        plan_of(np.ones((9, 4), np.float32), 2)


def test_chains_that_are_not_finite_leave_the_fit_to_the_others():
    chains = CASE.trace(64, 5)
    x, eps, tokens = chains.x.clone(), chains.eps.clone(), chains.tokens.clone()
    x[3, 7, 1], eps[0, 60, 0], tokens[61, 2] = torch.nan, torch.inf, -torch.inf
    found = chains._replace(x=x, eps=eps, tokens=tokens).finite()
    others = [i for i in range(64) if i not in (7, 60, 61)]
    for name in ("x", "eps", "v", "z"):
        assert torch.equal(getattr(found, name), getattr(chains, name)[:, others])
    for name in ("tokens", "seed", "position", "scale", "temperature"):
        assert torch.equal(getattr(found, name), getattr(chains, name)[others])


@pytest.mark.parametrize("at", ["noise", "variance"])
def test_a_prediction_that_explodes_is_kept_and_never_taken(at, tmp_path):
    """It is finite on disk, and costs so much that no plan has it."""
    x, eps, v = (values.clone() for values in CASE.trace(64, 5).chains)
    (eps if at == "noise" else v)[20] *= 1e12
    found = fit_predictor((x, eps, v), (x, eps, v), 0.9)
    found.check(STEPS)
    assert all(20 in plan.steps for plan in plans(found.skip_cost) if plan.cost < 1e6)


def test_too_few_calls_to_stay_finite_are_told(predictor):
    chains = CASE.trace(64, 5)
    huge = dataclasses.replace(predictor, coefficients=np.full_like(predictor.coefficients, 1e6))
    with pytest.raises(ValueError, match="head_calls"):
        fit_shortcut(CASE.head, chains, chains, huge, (STEPS - 1, 0), 1, FP32)


WRONG = {
    "steps that rise": {"steps": np.array([5, 1, 3, 0], np.int16)},
    "no last step": {"steps": np.array([5, 3, 2, 1], np.int16)},
    "another T": {"steps": np.array([6, 3, 1, 0], np.int16)},
    "a NaN": {"corrections": np.full((4, 2), np.nan, np.float32)},
    "a negative difference": {"difference": np.float32([-1])},
    "no divergence": {"divergence": np.zeros(0, np.float32)},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_shortcut_is_told(wrong):
    right = Shortcut(
        np.array([5, 3, 1, 0], np.int16), np.zeros((4, 2), np.float32), np.float32([0.1]), np.float32([np.inf])
    )
    right.check(6)
    with pytest.raises(ValueError):
        dataclasses.replace(right, **WRONG[wrong]).check(6)


# ---- The calibrated sampler in an engine: any batch, settings of all kinds, what it reports, and what it refuses


SETTINGS = {"num_iter": 4, "cfg": 2.0, "num_sampling_steps": 12}


@pytest.fixture
def engine(small_mar, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return lambda slots, model=small_mar: Engine(MARModels(model), max_batch=slots, device="cpu")


def test_in_an_engine(engine):
    """Rows of unequal progress are as each alone; the same seed gives nearly the token that `ar` gives.

    Of 100 steps the first multiplies rounding by 316; of 12, by thousands, and processors round differently.
    """
    whole_chain = SETTINGS | {"num_sampling_steps": 100}
    requests = [Request(i, i, "calibrated", **whole_chain | {"num_iter": 3 + i}, head_calls=6) for i in range(3)]
    together = engine(2).generate(requests)
    for request, output in zip(requests, together):
        alone = engine(1).generate(request)[0]
        assert (output.tokens - alone.tokens).abs().max() < 1e-4 * alone.tokens.abs().max()
        stats = output.stats
        assert stats.guarantee == "measured" and stats.difference > 0 and stats.divergence > 0 and stats.audit is None
        assert stats.head_calls_per_token == 6 and stats.head_calls == 6 * request.num_iter
        assert stats.head_evaluations == 64 * (6 + 5)  # the null class at all calls but the fourth
    whole = engine(1).generate(requests[0].but(head_calls=100, null_every=1))[0]
    plain = engine(1).generate(requests[0].but(method="ar", head_calls=None))[0]
    assert (whole.tokens - plain.tokens).abs().max() < 1e-4 * plain.tokens.abs().max()
    assert whole.stats.divergence == 0 and whole.stats.head_evaluations == 64 * 200


def test_a_resolved_request_has_all_that_it_needs(engine):
    """No round waits for a fit, whose time would be taken for the head's."""
    own = engine(1)
    request = own.resolve(Request(1, method="calibrated", **SETTINGS, head_calls=5))
    assert own.runner.tuning.calibrations["target"].folder_of(request, Shortcut)
    assert own.resolve(request) == request


def test_what_is_beyond_float32_is_not_reported(engine):
    """With hardly any noise paths diverge beyond all numbers; records have room for finite ones only."""
    with pytest.warns(UserWarning, match="num_sampling_steps"):
        (output,) = engine(1).generate(
            Request(1, 1, "calibrated", **SETTINGS, temperature=1e-30, head_calls=6, audit=0.1)
        )
    stats = output.stats
    assert stats.difference > 0 and stats.divergence is stats.audit is stats.audit_error is None


def test_an_audit_changes_no_image(engine):
    request = Request(1, 1, "calibrated", **SETTINGS, head_calls=4)
    plain, audited, again = engine(1).generate([request, request.but(audit=1.0), request.but(audit=0.5)])
    assert torch.equal(plain.tokens, audited.tokens) and torch.equal(plain.tokens, again.tokens)
    assert plain.stats.audit is None and audited.stats.audit > 0 and audited.stats.audit_error > 0
    assert again.stats.audit != audited.stats.audit
    assert engine(1).generate(request.but(audit=0.5))[0].stats.audit == again.stats.audit


@pytest.mark.slow  # many calibrations
def test_settings_of_all_kinds(engine):
    """Without noise, without guidance, of few steps, and by a divergence in place of a number of calls."""
    own = engine(1)
    cold = own.resolve(Request(1, method="calibrated", **SETTINGS | {"temperature": 0.0}, head_calls=6))
    assert own.generate(cold)[0].stats.divergence is None
    assert own.generate(cold.but(temperature=1.0, cfg=1.0))[0].stats.head_evaluations == 64 * 6
    assert own.resolve(Request(1, method="calibrated", **SETTINGS)).head_calls == 10
    for num_steps in (2, 3):
        few = own.resolve(Request(1, method="calibrated", **SETTINGS | {"num_sampling_steps": num_steps}))
        assert few.head_calls == num_steps and own.generate(few)[0].tokens.isfinite().all()
    near, far = (
        own.resolve(Request(1, method="calibrated", **SETTINGS, divergence=most)).head_calls for most in (1e-3, 1e30)
    )
    assert far == 2 < near <= 12
    both = Request(1, method="calibrated", **SETTINGS, head_calls=near, divergence=1e-3)
    assert own.resolve(both) == own.resolve(both.but(head_calls=None))  # which resolves to itself
    with pytest.raises(ValueError, match="head_calls"):
        own.resolve(both.but(head_calls=2))


@pytest.mark.parametrize("bias", [torch.nan, 1e30])
def test_a_model_whose_chains_are_not_finite_is_told(bias, small_mar, engine):
    broken = copy.deepcopy(small_mar)
    broken.head.final_layer.linear.bias += bias
    with pytest.raises(ValueError, match="float32"):
        engine(1, broken).resolve(Request(1, method="calibrated", **SETTINGS, head_calls=6))


BAD = [
    {"head_calls": 1},
    {"head_calls": 13},
    {"divergence": 0.0},
    {"divergence": -1.0},
    {"audit": 1.5},
    {"audit": -0.1},
    {"audit": 1e-9},
    {"null_every": 0},
    {"audit": 0.1, "temperature": 0.0},
    {"divergence": 0.1, "temperature": 0.0},
]


@pytest.mark.parametrize("change", BAD)
def test_bad_settings_are_told(engine, change):
    with pytest.raises(ValueError, match=next(iter(change))):
        engine(1).check(Request(1, method="calibrated", **SETTINGS | change))


# ---- What was measured of a sampler: kept with its images, averaged over them, and told


NUM, SEED = 20, 5  # images: a file of 16, and one of 4
AUDITS = np.linspace(0.4, 0.6, NUM)
ERROR = AUDITS.std(ddof=1) / NUM**0.5
KNOWN = {"difference": 0.046, "divergence": 0.54}
TITLES = {"difference": "0.046", "divergence": "0.540", "audit": "0.500", "+- s.e.": f"{ERROR:.3f}"}  # of the benchmark
HELD_OUT = RoundStats(guarantee="measured", **KNOWN)


def stats_of(num):
    """Of images, each with an audit of its own and the error of that."""
    return [dataclasses.replace(HELD_OUT, audit=audit, audit_error=0.3) for audit in AUDITS[:num]]


def outputs(num=NUM):
    made = []
    for i, stats in enumerate(stats_of(num)):
        request = cspd.Request(0, SEED + i, "speculative", family="MAR")
        made.append(Output(request, torch.zeros(4, 2), torch.zeros(3, 4, 4), torch.zeros(4), stats))
    return made


@pytest.mark.parametrize(
    "stats, means",
    [
        (stats_of(NUM), KNOWN | {"audit": 0.5, "audit_error": ERROR}),  # which has what differs between the images
        (stats_of(1), KNOWN | {"audit": 0.4, "audit_error": 0.3}),
        ([HELD_OUT] * 3, KNOWN | {"audit": None, "audit_error": None}),
        ([RoundStats()] * 3, dict.fromkeys(MEASURED)),
        ([RoundStats(), *stats_of(1)], KNOWN | {"audit": 0.4, "audit_error": 0.3}),
    ],
)
def test_what_was_measured_is_averaged_over_the_images(stats, means):
    assert measured([each.to_dict() for each in stats]) == pytest.approx(means)


def test_images_of_older_versions_have_nothing_measured():
    older = {name: value for name, value in RoundStats().to_dict().items() if name not in MEASURED}
    assert measured([older]) == dict.fromkeys(MEASURED)
    assert measured_lines({}) == []


def test_shards_keep_it(tmp_path):
    manifest = {"labels": [0], "seed": SEED}
    shards = Shards(tmp_path, NUM, manifest)
    made = outputs()
    for shard in (1, 0):  # of two processes
        shards.write(shard, arrays_of(made[shard * SIZE : (shard + 1) * SIZE]))
    assert shards.missing(4) == []
    summary = json.loads(json.dumps(summary_of(list(shards.stats()), NUM, 2.0))) | {"processes": 2}
    assert {name: summary[name] for name in MEASURED} == pytest.approx(KNOWN | {"audit": 0.5, "audit_error": ERROR})
    assert summary["guarantee"] == "measured"
    assert [line[:2] for line in measured_lines(summary)] == [
        ("difference", "0.046"),
        ("divergence", "0.540"),
        ("audit", "0.500"),
    ]
    assert f"+- {ERROR:.3f} nats per token" in measured_lines(summary)[2][2]


def test_chunks_of_a_comparison_keep_it(digits, tmp_path):
    made = outputs()
    made[0].stats.lazy_backbone_calls = NUM
    row = Configuration("made up", made[0].request, digits.with_slots(NUM))
    images, made_of = np.zeros((NUM, 4, 4, 3), np.uint8), {"requests": [{}] * NUM}
    chunk = study.Chunk(images, 1.0, 7, [study.cost_of(output) for output in made])
    study.write_chunk(tmp_path / "chunk.npz", chunk, made_of)
    chunk = study.read_chunk(tmp_path / "chunk.npz", made_of, 4)
    told = speed_of(row, made[0].request, [chunk], [chunk])
    wanted = KNOWN | {"audit": 0.5, "lazy_backbone_calls": 1.0}
    assert {name: told[name] for name in wanted} == pytest.approx(wanted) and "audit_error" not in told
    assert told["audit_ci95"] == pytest.approx([0.5 - 1.96 * ERROR, 0.5 + 1.96 * ERROR], rel=1e-3)


def test_bench_tells_it_of_all_runs():
    request = cspd.Request(0, num_iter=4, cfg=1.0)
    audited = [vars(stats) for stats in stats_of(NUM)]
    runs = [{"seconds": 1.0, "guarantee": "measured", "stats": some} for some in (audited[:8], audited[8:])]
    plain = [{"seconds": 2.0, "guarantee": "exact", "first_timestep": 950, "stats": [vars(RoundStats())]}] * 2
    rows = [bench._row("ar", 8, request, plain, plain), bench._row("calibrated", 8, request, runs, plain)]
    assert {name: rows[1][name] for name in MEASURED} == pytest.approx(KNOWN | {"audit": 0.5, "audit_error": ERROR})
    machine = dict.fromkeys(("device", "threads", "torch", "precision"), "")
    report = {"machine": machine, "runs": 2, "rows": json.loads(json.dumps(rows)), "memory": []}
    text = bench.format_bench(report)
    titles, first, second = text.splitlines()[2:5]
    assert "first t" in titles and "950" in first and "950" not in second
    place = {title: slice(titles.index(title), titles.index(title) + len(title)) for title in TITLES}
    assert {title: second[where].strip() for title, where in place.items()} == TITLES
    assert not any(first[where].strip() for where in place.values())
    assert "medians of 2 runs (least..most holds the true median with 50%)" in text
    assert "; one run of each\n" in bench.format_bench(report | {"runs": 1})


def test_memory_is_measured_without_a_warning(digits, recwarn):
    """Of a setting that nobody gave."""
    assert bench._memory(digits, cspd.Request(0, cfg=1.0), 1, 1)["peak_bytes"] > 0
    assert not list(recwarn)


def run(command, out, *more):
    options = ["--num-iter", "2", "--num-sampling-steps", "10", "--cfg", "1", "--num", "2", "--labels", "3,4"]
    assert main([command, "--checkpoint", small_checkpoint(), *options, *more, "--out", str(out)]) == 0


def test_samples_go_on_with_the_head_calls_that_were_chosen(tmp_path, capsys):
    for lost in (None, tmp_path / "00001_label4_seed1.png"):
        if lost:
            before = lost.read_bytes()
            lost.unlink()
        run("sample", tmp_path, "--method", "calibrated", "--divergence", "0.3", "--audit", "0.5")
        assert not lost or lost.read_bytes() == before
    record = json.loads((tmp_path / "samples.json").read_text())
    assert record["summary"]["images_made"] == 1 and record["summary"]["guarantee"] == "measured"
    told = measured_lines(record["summary"])
    assert [title for title, _, _ in told] == ["difference", "divergence", "audit"]
    text = capsys.readouterr().out
    assert "guarantee: measured" in text
    assert all(f"{title} {value} {meaning}" in text for title, value, meaning in told)


def test_lazy_calls_are_told(tmp_path, capsys):
    run("sample", tmp_path, "--method", "lazymar", "--warmup", "0")
    text = capsys.readouterr().out
    assert "2 backbone calls (1 lazy)" in text and "guarantee: heuristic" in text


def test_evaluations_go_on_with_the_head_calls_that_were_chosen(tmp_path, capsys):
    for _ in range(2):
        run("evaluate", tmp_path, "--method", "calibrated")
        report = json.loads((tmp_path / "evaluation.json").read_text())
        assert report["sampling"]["images_made"] == 2 and report["sampling"]["divergence"] is not None
        assert "difference " in capsys.readouterr().out


@pytest.mark.slow
def test_comparisons_tell_what_was_measured(tmp_path):
    methods = "calibrated:divergence=0.3:audit=0.5,calibrated:seed=10"
    run("compare", tmp_path, "--methods", methods)
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "chunks").iterdir()}
    run("compare", tmp_path, "--methods", methods)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "chunks").iterdir()} == written
    rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    plain, audited, other = (row for row in rows if row["settings"]["num_iter"] == 2)
    assert [row["guarantee"] for row in (plain, audited, other)] == ["exact", "measured", "measured"]
    assert plain["difference"] is None and audited["difference"] > 0
    assert audited["audit"] > 0 and other["audit"] is None
    assert audited["pixel_difference"] >= 0 and other["pixel_difference"] is None  # of other seeds
