"""`calibrated`: its plans, segments, audits, and what it reports."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from heads import CENTRES, CHANNELS, FP32, LINEAR, ONE_GAUSSIAN, Case, MixtureHead
from stores import small_checkpoint
from torch.distributions import Normal, kl_divergence

from cspd import Engine, MARModels, Request, load, noise
from cspd.cli import bench, main
from cspd.continuous.calibrations import PARTS, REPORTED, trace
from cspd.heads.calibrated import Audit, Shortcut, fit_shortcut, follow, plan_of, plans
from cspd.heads.calibration import Trace, joined, ratio_over_images
from cspd.heads.chain import Chain
from cspd.heads.net import evaluate
from cspd.masked.runner import MARRunner
from cspd.request import RoundStats
from cspd.summary import MEASURED, measured, measured_lines
from mar.head import schedule

CPU = torch.device("cpu")
STEPS = 40
HEAD = MixtureHead(CENTRES, (0.2, 0.3, 0.4), (0.5, 0.3, 0.2), wobble=0.3)
CASE = Case(HEAD, torch.tensor([[[0.3, -0.5, 0.2]], [[0.1, 0.2, -0.3]]]), STEPS, scale=1.5, temperature=0.9)


@pytest.fixture(scope="module")
def predictor():
    return CASE.predictor()


def shortcut(case, predictor, head_calls, null_every=1):
    steps = plan_of(predictor.skip_cost, head_calls).steps
    traces = case.trace(256, 2**40), case.trace(256, 2**41), images_of(case, 16, 64, 2**42)
    return fit_shortcut(case.head, traces, case.schedule, predictor, steps, null_every, FP32)


def images_of(case, num, tokens, seed):
    """A trace of `num` images, each of `tokens` tokens and with a seed of its own."""
    return joined([case.trace(tokens, seed + i) for i in range(num)])


def draw(case, plan, rows, seed, *observers):
    """Tokens [rows, d] by a plan, with the noise of `case.ancestral(rows, seed)`."""
    return follow(case.chain(rows, seed, *observers), plan)


def audit_of(plan, rows, seed, rate):
    """The audit of a run of `CASE` that evaluates the head at a share `rate` of its steps, and the run's tokens."""
    inputs = CASE.inputs(rows, seed)
    chosen = noise.step_accept_uniforms(inputs.seed, inputs.position, STEPS) < rate
    audit = Audit(HEAD, inputs, CASE.schedule, FP32, chosen, rate)
    return audit, draw(CASE, plan, rows, seed, audit)


def call(z, k, x, scale):
    """Guided eps and v of the head at step k."""
    t_embed = HEAD.time_embed(torch.tensor(schedule(STEPS).timestep_map[[k]]))
    return evaluate(HEAD, x, HEAD.split(HEAD.modulations(t_embed, HEAD.cond_embed(z))), scale)


def sigma(k, v):
    s = schedule(STEPS)
    return CASE.temperature * torch.exp(s.log_sigma_base[k] + s.log_sigma_slope[k] * v)


def gaussian(k, x, eps, v):
    s = schedule(STEPS)
    return Normal(s.mean_x[k] * x + s.mean_eps[k] * eps, sigma(k, v))


def step_by_step(steps, predictor, corrections, null_every, rows, seed):
    """The sampler as papers write one: every step by itself, and KL(q || p) [rows] of its path."""
    z, scale, _, *names = CASE.inputs(rows, seed)
    x, eps_t = noise.initial(*names, CHANNELS), noise.steps(*names, torch.arange(STEPS), CHANNELS)
    divergence, calls = torch.zeros(rows), 0
    for k in reversed(range(STEPS)):
        eps_full, v_full = call(z, k, x, scale)
        if k in steps:
            # A head call; the unconditional branch at the first two, the last, and every `null_every`-th.
            eps_c, v = call(z[:1], k, x, scale)
            if calls < 2 or calls == len(steps) - 1 or calls % null_every == 0:
                last_difference = eps_full - eps_c
            eps = eps_c + last_difference
            anchor, anchor_x, anchor_eps, anchor_v = k, x, eps, v
            correction = corrections[calls]
            calls += 1
        else:
            # A prediction from the last call.
            c0, c1, c2 = predictor.coefficients[k, anchor - k - 1].tolist()
            eps = c0 * x + c1 * anchor_eps + c2 * anchor_x
            v = anchor_v + predictor.drift[k, anchor - k - 1].item()
        q = gaussian(k, x, eps, v)
        mean = q.mean
        if k - 1 in steps or k == 0:  # the end of a segment is corrected
            mean = mean + correction[0] * anchor_x + correction[1] * anchor_eps
        if k == 0:
            return mean, divergence
        p = gaussian(k, x, eps_full, v_full)
        divergence = divergence + kl_divergence(Normal(mean, q.scale), p).sum(-1)
        x = mean + q.scale * eps_t[k]
    raise AssertionError("a chain ends at step 0")


@pytest.mark.parametrize("null_every", [1, 2, 3])
def test_segments_are_the_steps_that_they_replace(predictor, null_every):
    """And an audit of all steps is the divergence of the path."""
    fitted = shortcut(CASE, predictor, 6, null_every)
    audit, tokens = audit_of(fitted.segments(CASE.schedule, predictor, null_every, CPU), 50, 3, rate=1.0)
    steps = tuple(fitted.steps.tolist())
    expected, divergence = step_by_step(steps, predictor, fitted.corrections, null_every, 50, 3)
    assert (tokens - expected).abs().max() < 1e-4
    assert torch.allclose(audit.total, divergence, rtol=1e-3, atol=1e-3)
    assert (fitted.corrections != 0).any(1).sum() >= 3  # so corrections are tested, too


def test_all_calls_are_the_full_chain_draw_for_draw(predictor):
    fitted = shortcut(CASE, predictor, STEPS)
    tokens = draw(CASE, fitted.segments(CASE.schedule, predictor, 1, CPU), 200, seed=1)
    assert (tokens - CASE.ancestral(200, seed=1)).abs().max() < 1e-4
    assert fitted.difference < 1e-4 and fitted.divergence == 0


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_linear_head_is_predicted_without_error(temperature):
    """Any few calls give the full chain's tokens."""
    case = Case(LINEAR, ONE_GAUSSIAN, STEPS, temperature=temperature)
    predictor, exact = case.predictor(), case.ancestral(1000, seed=1)
    for head_calls in (5, 8):
        fitted = shortcut(case, predictor, head_calls)
        tokens = draw(case, fitted.segments(CASE.schedule, predictor, 1, CPU), 1000, seed=1)
        assert (tokens - exact).abs().max() < 0.02
        assert fitted.difference < 0.03
        assert (fitted.divergence < 0.1) if temperature else fitted.divergence == np.inf


def test_more_calls_come_nearer_and_the_measured_values_hold_for_other_tokens(predictor):
    """Within three standard errors, which are a few percent; a wrong variance or a missing root is 25 % or more."""
    fitted = {n: shortcut(CASE, predictor, n) for n in (4, 8, 16)}
    for name in ("difference", "divergence"):
        falling = [getattr(each, name).item() for each in fitted.values()]
        assert falling == sorted(falling, reverse=True)
    exact = CASE.ancestral(1500, seed=9)
    for n, each in fitted.items():
        plan = each.segments(CASE.schedule, predictor, 1, CPU)
        audit, tokens = audit_of(plan, 1500, 9, rate=1.0)
        of_token = (tokens - exact).square().mean(1) / exact.var(0).mean()
        told = each.measured()
        for name, truth in (("difference", of_token.mean().sqrt()), ("divergence", audit.total.mean())):
            error = told[f"{name}_error"]
            assert 0 < error < 0.15 * told[name] and abs(told[name] - truth) < 3.5 * error, (n, name)
        assert told["difference_worst_percent"] == pytest.approx(of_token.quantile(0.99).sqrt().item(), rel=0.2)
        assert told["difference_worst_percent"] < told["difference_worst"] < 1.5 * of_token.max().sqrt()


def test_some_tokens_are_of_all_images():
    """Tokens of 16 images, one of each in turn, as causal models trace them."""
    of_token = torch.zeros(1024, 1)
    image = torch.arange(16).repeat(64)
    of_step = of_token[None]
    chains = Trace(of_step, of_step, of_step, of_token, of_step, of_token, of_token, of_step, image)
    some = chains.some(128)
    assert len(some.image) == 128 and len(some.image.unique()) == 16
    assert some.x.shape == some.noise.shape == (1, 128, 1)
    assert len(chains.some(5000).image) == 1024


def test_the_standard_error_is_that_of_images_and_not_of_tokens():
    """Tokens of one image share most of their error: the spread of the ratio over repetitions is the image's."""
    generator = torch.Generator().manual_seed(0)
    image = torch.arange(16).repeat_interleave(50)
    ratios, errors = [], []
    for _ in range(400):
        own = torch.rand(16, generator=generator).repeat_interleave(50)
        weights = 1 + own / 2
        values = weights * (1 + own) + 0.1 * torch.randn(800, generator=generator)
        ratio, error = ratio_over_images(values, weights, image)
        ratios.append(ratio)
        errors.append(error)
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.1)
    assert ratio_over_images(values, weights, torch.zeros(800))[1] == np.inf  # one image shows no spread
    assert ratio_over_images(values * np.inf, weights, image) == (np.inf, np.inf)


def test_reports_rest_on_images_that_chose_nothing(small_mar):
    """16 of them; no image is of two parts."""
    request = request_of(num_sampling_steps=2, num_iter=2).but(method="ar")
    seeds = {}
    for part in PARTS:
        made = trace(small_mar, request, FP32, MARRunner, part)
        seeds[part] = set(made.image.tolist())
    assert len(seeds[REPORTED]) == 16 and len(set.union(*seeds.values())) == sum(map(len, seeds.values()))


def test_what_is_reported_is_not_the_value_that_chose(predictor):
    """Other images of the same fit give the same steps and corrections, and their own difference."""
    steps = plan_of(predictor.skip_cost, 6).steps
    traces = CASE.trace(256, 2**40), CASE.trace(256, 2**41)
    own = CASE.schedule, predictor, steps, 1, FP32
    one, other = (fit_shortcut(HEAD, (*traces, images_of(CASE, 4, 64, seed)), *own) for seed in (1, 100))
    assert np.array_equal(one.corrections, other.corrections)
    for fitted, seed in ((one, 1), (other, 100)):
        plan = fitted.segments(CASE.schedule, predictor, 1, CPU)
        exact, tokens = (
            images_of(CASE, 4, 64, seed).tokens,
            torch.cat([draw(CASE, plan, 64, seed + i) for i in range(4)]),
        )
        expected = ((tokens - exact).square().mean() / exact.var(0, correction=0).mean()).sqrt()
        assert fitted.difference.item() == pytest.approx(expected.item(), rel=1e-4)


def without_corrections(fitted):
    return dataclasses.replace(fitted, corrections=np.zeros_like(fitted.corrections))


def test_corrections_stay_only_if_they_bring_held_out_tokens_nearer(predictor):
    stayed, exact = [], CASE.ancestral(256, 2**41)
    for head_calls in (4, 6):
        fitted = shortcut(CASE, predictor, head_calls)
        corrected, uncorrected = (
            (draw(CASE, each.segments(CASE.schedule, predictor, 1, CPU), 256, 2**41) - exact).square().mean()
            for each in (fitted, without_corrections(fitted))
        )
        stayed.append(bool(fitted.corrections.any()))
        assert corrected < uncorrected if stayed[-1] else corrected == uncorrected
    assert any(stayed)


@pytest.mark.slow  # the trained model
def test_ten_calls_of_the_bundled_model_are_near_and_spread_as_wide(tmp_path, monkeypatch):
    """Within 0.06 standard deviations of tokens by 100 calls, and spread as wide within 1 %."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = load("digits32", max_batch=10, device="cpu")
    model = engine.runner.target
    request = engine.resolve(Request(0, method="calibrated", num_iter=16, cfg=3.0))
    calibrations = engine.runner.tuning.calibrations["target"]
    fitted, predictor = calibrations.shortcut(request), calibrations.predictor(request)
    assert fitted.difference < 0.06 and fitted.corrections.any()
    other = trace(model, request.but(num_sampling_steps=100), FP32, MARRunner, REPORTED)
    errors, spreads = [], []
    for each in (fitted, without_corrections(fitted)):
        plan = each.segments(schedule(100), predictor, request.null_every, CPU)
        with torch.inference_mode():
            tokens = follow(Chain(model.head, schedule(100), other.inputs, other, FP32), plan)
        errors.append((tokens - other.tokens).square().mean())
        spreads.append((tokens.std(0) / other.tokens.std(0)).mean())
    assert errors[0] < 0.9 * errors[1] and abs(spreads[0] - 1) < 0.01


def test_an_audit_of_some_steps_is_unbiased(predictor):
    plan = shortcut(CASE, predictor, 5, null_every=2).segments(CASE.schedule, predictor, 2, CPU)
    whole, tenth = (audit_of(plan, 1500, 11, rate)[0].total for rate in (1.0, 0.1))
    error = (tenth.std() + whole.std()) / 1500**0.5
    assert abs(tenth.mean() - whole.mean()) < 3 * error
    assert whole.mean() > 10 * whole.std() / 1500**0.5  # there is something to find


def test_the_cost_of_skipping_a_step_is_its_divergence(predictor):
    x, eps, v = CASE.trace(256, 2**41).chains
    for k, lag in ((1, 1), (20, 5), (3, 30)):
        c0, c1, c2 = predictor.coefficients[k, lag - 1].tolist()
        predicted = c0 * x[k] + c1 * eps[k + lag] + c2 * x[k + lag]
        p, q = gaussian(k, x[k], eps[k], v[k]), gaussian(k, x[k], predicted, v[k + lag] + predictor.drift[k, lag - 1])
        assert predictor.skip_cost[k, lag - 1] == pytest.approx(kl_divergence(p, q).sum(-1).mean().item(), rel=1e-3)


@pytest.mark.parametrize("lags", [9, 4])
def test_plans_are_the_cheapest_of_all(lags):
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
    if lags == 4:
        with pytest.raises(ValueError, match="head_calls"):
            plan_of(costs, 2)  # too few for the lags that were fitted


def test_the_fit_leaves_out_chains_that_are_not_finite():
    chains = CASE.trace(64, 5)
    x, eps, tokens = chains.x.clone(), chains.eps.clone(), chains.tokens.clone()
    x[3, 7, 1], eps[0, 60, 0], tokens[61, 2] = torch.nan, torch.inf, -torch.inf
    found = chains._replace(x=x, eps=eps, tokens=tokens).finite()
    others = [i for i in range(64) if i not in (7, 60, 61)]
    for name, values in chains._asdict().items():
        right = values[:, others] if name in ("x", "eps", "v", "z", "noise") else values[others]
        assert torch.equal(getattr(found, name), right), name


def test_too_few_calls_to_stay_finite_are_an_error(predictor):
    chains = CASE.trace(64, 5)
    huge = dataclasses.replace(predictor, coefficients=np.full_like(predictor.coefficients, 1e6))
    with pytest.raises(ValueError, match="head_calls"):
        fit_shortcut(CASE.head, (chains, chains, chains), CASE.schedule, huge, (STEPS - 1, 0), 1, FP32)


def test_a_shortcut_of_another_chain_or_with_nan_is_an_error():
    corrections = np.zeros((4, 2), np.float32)
    difference, error, infinite = np.float32([[0.1], [0.01], [np.inf]])
    steps, worst = np.array([5, 3, 1, 0], np.int16), np.float32([0.2, 0.3])
    right = Shortcut(steps, corrections, difference, error, worst, infinite, infinite)
    right.check(6)
    for shortcut, num_steps in ((right, 7), (dataclasses.replace(right, corrections=corrections * np.nan), 6)):
        with pytest.raises(ValueError):
            shortcut.check(num_steps)


# ---- In an engine


SETTINGS = {"num_iter": 4, "cfg": 2.0, "num_sampling_steps": 12}


def request_of(**changes):
    return Request(1, 1, **{"method": "calibrated", **SETTINGS, **changes})


@pytest.fixture(scope="module")
def engine(small_mar, tmp_path_factory):
    """Makes engines with a number of slots, which share their traces and calibrations."""
    cache = tmp_path_factory.mktemp("calibrations")
    return Engine(MARModels(small_mar), max_batch=1, device="cpu", cache=cache).with_slots


def test_requests_do_not_depend_on_the_batch_and_all_calls_are_ar(engine):
    """Rows of unequal progress; T = 100, whose first step multiplies rounding by 316 and not by thousands."""
    requests = [request_of(num_sampling_steps=100, num_iter=k, head_calls=6) for k in (3, 5)]
    together, one = engine(2).generate(requests), engine(1)
    for request, output in zip(requests, together):
        alone = one.generate(request)[0]
        assert (output.tokens - alone.tokens).abs().max() < 1e-4 * alone.tokens.abs().max()
        stats = output.stats
        assert (
            stats.guarantee == "approximate" and stats.difference > 0 and stats.divergence > 0 and stats.audit is None
        )
        assert stats.head_calls_per_token == 6 and stats.head_calls == 6 * request.num_iter
        assert stats.head_evaluations == 64 * (6 + 5)  # the unconditional branch at all calls but the fourth
    whole = one.generate(requests[0].but(head_calls=100, null_every=1))[0]
    baseline = one.generate(requests[0].but(method="ar", head_calls=None))[0]
    assert (whole.tokens - baseline.tokens).abs().max() < 1e-4 * baseline.tokens.abs().max()
    assert whole.stats.divergence == 0 and whole.stats.head_evaluations == 64 * 200


def test_a_resolved_request_has_its_fit(engine):
    """No round waits for a fit, whose time would be counted as the head's."""
    own = engine(1)
    request = own.resolve(request_of(head_calls=5))
    assert own.runner.tuning.calibrations["target"].folder_of(request, Shortcut)
    assert own.resolve(request) == request


def test_values_beyond_float32_are_not_reported(engine, monkeypatch):
    """With hardly any noise divergences are infinite; records hold finite numbers only."""
    monkeypatch.setattr("cspd.continuous.rows.LEAST_TEMPERATURE", 0.0)
    with pytest.warns(UserWarning, match="num_sampling_steps"):
        (output,) = engine(1).generate(request_of(temperature=1e-30, head_calls=6, audit=0.1))
    stats = output.stats
    assert stats.difference > 0 and stats.divergence is stats.audit is stats.audit_error is None


def test_an_audit_changes_no_image(engine):
    request = request_of(head_calls=5)
    unaudited, audited, again = engine(1).generate([request, request.but(audit=1.0), request.but(audit=0.5)])
    assert torch.equal(unaudited.tokens, audited.tokens) and torch.equal(unaudited.tokens, again.tokens)
    assert unaudited.stats.audit is None and audited.stats.audit > 0 and audited.stats.audit_error > 0
    assert again.stats.audit != audited.stats.audit
    assert engine(1).generate(request.but(audit=0.5))[0].stats.audit == again.stats.audit


@pytest.mark.slow  # many calibrations
def test_settings_of_all_kinds_are_calibrated(engine):
    """Without noise, without guidance, with few steps, and by a divergence in place of a number of calls."""
    own = engine(1)
    cold = own.resolve(request_of(temperature=0.0, head_calls=6))
    assert own.generate(cold)[0].stats.divergence is None
    assert own.generate(cold.but(temperature=1.0, cfg=1.0))[0].stats.head_evaluations == 64 * 6
    assert own.resolve(request_of()).head_calls == 10
    for num_steps in (2, 3):
        few = own.resolve(request_of(num_sampling_steps=num_steps))
        assert few.head_calls == num_steps and own.generate(few)[0].tokens.isfinite().all()
    near, far = (own.resolve(request_of(divergence=most)).head_calls for most in (1e-3, 1e30))
    assert far == 2 < near <= 12
    both = request_of(head_calls=near, divergence=1e-3)
    assert own.resolve(both) == own.resolve(both.but(head_calls=None))  # which resolves to itself
    with pytest.raises(ValueError, match="head_calls"):
        own.resolve(both.but(head_calls=2))


def test_a_model_whose_chains_are_not_finite_is_an_error(small_mar):
    broken = copy.deepcopy(small_mar)
    broken.head.final_layer.linear.bias += 1e30
    with pytest.raises(ValueError, match="float32"):
        Engine(MARModels(broken), max_batch=1, device="cpu").resolve(request_of(head_calls=6))


WITHOUT_NOISE = {"temperature": 0.0}
BAD = [{"head_calls": 1}, {"head_calls": 13}, {"divergence": 0.0}, {"audit": 1.5}, {"null_every": 0}]
BAD += [{"audit": 0.1} | WITHOUT_NOISE, {"divergence": 0.1} | WITHOUT_NOISE]


@pytest.mark.parametrize("change", BAD, ids=str)
def test_bad_settings_are_errors_that_name_the_option(engine, change):
    with pytest.raises(ValueError, match=next(iter(change))):
        engine(1).check(request_of(**change))


# ---- Measured values are stored with the images, averaged over them, and printed


AUDITS = np.linspace(0.4, 0.6, 20)  # by image
KNOWN = {
    "difference": 0.046,
    "difference_error": 0.002,
    "difference_worst_percent": 0.141,
    "difference_worst": 0.37,
    "divergence": 0.54,
    "divergence_error": 0.03,
}
MEANS = KNOWN | {"audit": 0.5, "audit_error": AUDITS.std(ddof=1) / 20**0.5}
HELD_OUT = RoundStats(guarantee="approximate", **KNOWN)
AUDITED = [dataclasses.replace(HELD_OUT, audit=audit, audit_error=0.3) for audit in AUDITS]


@pytest.mark.parametrize(
    "stats, means",
    [
        (AUDITED, MEANS),  # its error covers the differences between the images
        (AUDITED[:1], KNOWN | {"audit": 0.4, "audit_error": 0.3}),
        ([HELD_OUT] * 3, KNOWN | {"audit": None, "audit_error": None}),
        ([RoundStats()] * 3, dict.fromkeys(MEASURED)),
    ],
)
def test_measured_values_are_averaged_over_the_images(stats, means):
    assert measured([each.to_dict() for each in stats]) == pytest.approx(means)
    assert measured([{}]) == dict.fromkeys(MEASURED)  # of older versions


def test_bench_prints_measured_values_of_all_runs():
    request, audited = Request(0, num_iter=4, cfg=1.0), [vars(stats) for stats in AUDITED]
    runs = [{"seconds": 1.0, "guarantee": "approximate", "stats": some} for some in (audited[:8], audited[8:])]
    baseline = [{"seconds": 2.0, "guarantee": "exact", "first_timestep": 950, "stats": [vars(RoundStats())]}] * 2
    rows = [bench._row("ar", 8, request, baseline, baseline), bench._row("calibrated", 8, request, runs, baseline)]
    assert {name: rows[1][name] for name in MEASURED} == pytest.approx(MEANS)
    machine = dict.fromkeys(("device", "threads", "torch", "precision"), "")
    report = {"machine": machine, "runs": 2, "rows": json.loads(json.dumps(rows)), "memory": []}
    titles, first, second = bench.format_bench(report).splitlines()[2:5]
    assert "first t" in titles and "950" in first and "950" not in second
    for title, name in (("difference", "difference"), ("worst 1 %", "difference_worst_percent"), ("audit", "audit")):
        column = slice(titles.index(title), titles.index(title) + len(title))
        assert second[column].strip() == f"{MEANS[name]:.3f}" and not first[column].strip()


CHOSEN = "--method", "calibrated", "--divergence", "0.3", "--audit", "0.5"


def run(command, out, *more):
    options = ["--num-iter", "2", "--num-sampling-steps", "6", "--cfg", "1", "--num", "2", "--labels", "3,4"]
    assert main([command, "--checkpoint", small_checkpoint(), *options, *more, "--out", str(out)]) == 0


def test_sample_resumes_with_the_head_calls_that_were_chosen(tmp_path, capsys):
    lost = tmp_path / "00001_label4_seed1.png"
    run("sample", tmp_path, *CHOSEN)
    before = lost.read_bytes()
    lost.unlink()
    run("sample", tmp_path, *CHOSEN)
    assert lost.read_bytes() == before
    summary = json.loads((tmp_path / "samples.json").read_text())["summary"]
    assert summary["images_made"] == 1 and summary["guarantee"] == "approximate"
    lines, text = measured_lines(summary), capsys.readouterr().out
    assert [title for title, _, _ in lines] == ["difference", "worst tokens", "audit"]
    assert f"+- {summary['audit_error']:.3f} nats per token" in lines[2][2] and "guarantee: approximate" in text
    assert f"+- {summary['difference_error']:.3f} s.d." in lines[0][2] and summary["divergence"] > 0
    assert all(f"{title} {value} {meaning}" in text for title, value, meaning in lines)


def test_sample_prints_lazy_backbone_calls(tmp_path, capsys):
    run("sample", tmp_path, "--method", "lazymar", "--warmup", "0")
    text = capsys.readouterr().out
    assert "2 backbone calls (1 lazy)" in text and "guarantee: heuristic" in text


def test_evaluate_resumes_with_the_head_calls_that_were_chosen(tmp_path, capsys):
    for _ in range(2):
        run("evaluate", tmp_path, *CHOSEN, "--space", "digits")
        sampling = json.loads((tmp_path / "evaluation.json").read_text())["sampling"]
        assert sampling["images_made"] == 2 and sampling["guarantee"] == "approximate"
        assert sampling["divergence"] is not None and sampling["audit"] > 0
        assert "difference " in capsys.readouterr().out


def test_compare_resumes_and_reports_measured_values(tmp_path):
    written = []
    for _ in range(2):
        run("compare", tmp_path, "--methods", "calibrated:divergence=0.3:audit=0.5,lazymar:warmup=0:seed=10")
        written.append({path.name: path.stat().st_mtime_ns for path in (tmp_path / "chunks").iterdir()})
    assert written[0] == written[1]
    rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    baseline, audited, lazy = (row for row in rows if row["settings"]["num_iter"] == 2)
    assert [row["guarantee"] for row in (baseline, audited, lazy)] == ["exact", "approximate", "heuristic"]
    assert baseline["difference"] is None and audited["difference"] > 0
    assert audited["audit"] > 0 and len(audited["audit_ci95"]) == 2 and lazy["audit"] is None
    assert audited["pixel_difference"] >= 0 and lazy["pixel_difference"] is None  # of other seeds
    assert lazy["lazy_backbone_calls"] == 1
