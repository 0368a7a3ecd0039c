"""CSpD: Algorithm 1, its ratio and residual, its noise, rounds and counts."""

from __future__ import annotations

import functools
import inspect
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cspd_by_hand import (  # noqa: F401 - fixtures
    CHANNELS,
    GAMMA,
    LENGTH,
    TOKEN,
    by_hand,
    denoise,
    generate,
    known_draft,
    known_target,
    log_density,
    log_ratio,
    order_of,
    plain,
    request,
)
from scipy import stats as scipy_stats
from torch import Tensor
from toys import staggered

import cspd
from cspd import Engine, MARModels, Request, noise
from cspd.masked import cspd as masked_cspd
from cspd.masked.cspd import MAX_TRIES, Paths
from cspd.request import Sequence


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"prefill": 0.05}, marks=pytest.mark.slow),
        {"prefill": 0.5, "num_iter": 8, "gamma": 12},
        {"prefill": 0.6, "verify": "sequential", "gamma": 6},
        pytest.param({"prefill": 0.85, "verify": "sequential", "gamma": 2}, marks=pytest.mark.slow),
        {"prefill": 0.8, "verify": "sequential", "num_iter": 8, "cfg_schedule": "constant", "gamma": 64},
        {"prefill": 0.85, "verify": "sequential", "align": False, "ratio_temperature": 200.0, "gamma": 1},
        pytest.param({"prefill": 0.7, "align": False, "ratio_temperature": 200.0}, marks=pytest.mark.slow),
        {"prefill": 0.85, "align": False, "ratio_temperature": 200.0, "sigma": "published"},
        {"prefill": 0.7, "ratio_temperature": 25.0, "cfg": 1.0, "temperature": 1.1},
        pytest.param({"prefill": 0.7, "sigma": "published"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_agrees_with_algorithm_1_done_by_hand(changes, target, draft):
    """Tokens, decisions and counts."""
    asked = request(**changes)
    (output,) = generate(target, draft, asked)
    expected = by_hand(target, draft, asked)
    costs = output.token_cost[order_of(asked)].tolist()
    assert [None if math.isnan(cost) else bool(cost) for cost in costs] == expected.accepted
    assert 0 < expected.accepted.count(True) < LENGTH - expected.accepted.count(None), (
        "some are accepted, some rejected"
    )
    assert (output.tokens - expected.tokens).abs().max() < TOKEN

    stats, num_steps = output.stats, asked.num_sampling_steps
    assert stats.iterations == stats.backbone_calls == expected.rounds
    assert (stats.draft_backbone_calls, stats.resample_tries) == (expected.drafted, expected.tries)
    assert stats.head_calls == num_steps * expected.rounds and stats.head_calls_per_token == pytest.approx(num_steps)
    assert stats.draft_head_calls == num_steps * expected.drafted
    num_branches = 2 if asked.guided else 1
    assert stats.head_evaluations == num_branches * num_steps * expected.by_target
    assert stats.by_lag == expected.by_lag.tolist()
    verified = [int(each is not None) for each in expected.accepted]
    assert stats.by_rank == [verified, [int(each is True) for each in expected.accepted]]
    assert stats.alpha == expected.accepted.count(True) / sum(verified)
    assert stats.guarantee == "heuristic"
    assert (expected.num_next > 0) == (asked.verify == "sequential" and asked.gamma < LENGTH)


# ---- the draft model is the target


@pytest.mark.parametrize(
    "changes", [{"verify": "sequential"}, {"verify": "parallel", "gamma": 1}, {"prefill": 1.0}], ids=str
)
def test_a_draft_that_is_the_target_gives_the_images_of_ar(changes, target):
    """At K = L, one token per iteration, the contexts are the same, so that every token is accepted."""
    (output,), (expected,) = generate(target, target, request(**changes)), generate(target, None, plain())
    assert (output.tokens - expected.tokens).abs().max() < TOKEN
    if changes.get("prefill") == 1:  # nothing is drafted
        assert output.stats.alpha is None and output.stats.by_lag == output.stats.by_rank == [[], []]
    else:
        assert output.stats.alpha == 1
    if changes.get("verify") == "sequential":  # a round commits its drafts and the target's own next token
        assert output.stats.iterations == math.ceil(LENGTH / (GAMMA + 1))
        assert np.isnan(output.token_cost.numpy()).sum() == LENGTH // (GAMMA + 1)
    assert output.stats.resample_tries == output.stats.fallbacks == 0


def test_parallel_verification_has_another_context(target):
    """Tokens drafted after others are verified from the prefix before all of them, so that some are rejected."""
    (output,) = generate(target, target, request())
    verified, accepted = np.array(output.stats.by_lag)
    assert accepted[0] == verified[0] == LENGTH // GAMMA
    assert (accepted[1:] < verified[1:]).any()


# ---- noise


@pytest.mark.parametrize("align", [True, False])
def test_the_models_share_only_noise_and_only_if_aligned(align, target, draft):
    """The indices of all noise that chains take, ancestral and speculative ones."""
    seen = set()

    def recording(name: str, *arguments: str):
        function = getattr(noise, name)

        def call(*args, **kwargs):
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            seen.add((name, *(bound.arguments[argument] for argument in arguments)))
            return function(*args, **kwargs)

        return call

    functions = {
        "initial": recording("initial", "index"),
        "steps": recording("steps", "index"),
        "chain": recording("chain", "index", "accept_index"),
        "candidates": recording("candidates", "offset"),
    }
    own = 0 if align else 1  # the target's
    generate(target, draft, request(align=align, num_sampling_steps=3), **functions)
    assert seen == {(name, index) for name in ("initial", "steps") for index in (0, own)}

    seen.clear()
    if not align:
        with pytest.raises(ValueError, match="align"):
            generate(target, draft, request(align=align, chains="speculative", window=6))
        return
    generate(target, draft, request(align=align, chains="speculative", window=6, prefill=0.8), **functions)
    drafted_chain, target_chain = ("chain", 0, 1), ("chain", own, 0)
    assert {drafted_chain, target_chain} <= seen
    candidates = {("candidates", 0), ("candidates", noise.DRAFT_OFFSET)}
    prefilled = {("initial", 0), ("steps", 0)}
    assert seen <= {drafted_chain, target_chain} | candidates | prefilled


# ---- bad settings


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"gamma": 65}, "gamma"),
        ({"ratio_temperature": 0}, "ratio_temperature"),
        ({"prefill": 2}, "prefill"),
        ({"temperature": 0.0}, "temperature"),
        ({"window": 8}, "window"),
        ({"window": 13, "chains": "speculative"}, "window"),
        ({"chains": "annealed", "upper": 3, "lower": 9}, "lower"),
        ({"method": "ar"}, "ar"),
    ],
    ids=str,
)
def test_bad_options(changes, error, target, draft):
    with pytest.raises(ValueError, match=error):
        generate(target, draft, request(**changes))


def test_a_draft_model_is_needed(target):
    with pytest.raises(ValueError, match="draft"):
        generate(target, None, request())


# ---- the bundled pair


@pytest.mark.slow
def test_acceptance_of_the_bundled_pair():
    """About 0.3, and nothing without aligned noise, or with the paper's formula taken literally."""
    engine = cspd.load("digits32", max_batch=10, device="cpu")

    def acceptance(**changes) -> float:
        settings = {"method": "mar-draft", "gamma": GAMMA, "num_iter": 8, "cfg": 1.0, "prefill": 0.75}
        outputs = engine.generate([Request(i, i, **settings, **changes) for i in range(10)])
        verified, accepted = np.sum([output.stats.by_lag for output in outputs], axis=(0, 2))
        assert verified == 160
        return accepted / verified

    assert 0.2 < acceptance() < 0.6
    assert acceptance(align=False, num_sampling_steps=50) < 0.1
    assert acceptance(ratio_temperature=1.0, num_sampling_steps=50) < 0.02


# ---- the ratio and the residual


@pytest.mark.parametrize("ratio_temperature, sigma", [(42.0, "paper"), (1.0, None), (42.0, "published")])
def test_the_ratio_is_that_of_equation_4(ratio_temperature, sigma, digits):
    """On the bundled pair with 100 steps: 99 terms of log sigma and the last step's tempered Gaussians."""
    engine = digits.with_slots(1)
    resolved = engine.resolve(Request(3, 5, method="mar-draft", cfg=3.0, temperature=0.9, num_sampling_steps=100))
    runner, sequence = engine.runner, Sequence(resolved, 0, slot=0)
    made, by_hand_chains = [], []
    with torch.inference_mode():
        runner.admit([sequence])
        runner.tokens.normal_(generator=torch.Generator().manual_seed(0))
        rows = runner.rows([sequence], [20], [6])
        x = noise.initial(rows.seed, rows.position, CHANNELS).double()
        eps_t = noise.steps(rows.seed, rows.position, torch.arange(100), CHANNELS)
        for name, model in runner.models.items():
            z = runner.conditions([sequence], rows, name)
            paths, _ = masked_cspd._denoise(runner, name, resolved, rows, z)
            chain = denoise(model.head, z, rows.scale, resolved, x, eps_t)
            assert (paths.tokens - chain.mean).abs().max() < TOKEN
            assert paths.log_sigma.tolist() == pytest.approx(chain.path.tolist(), abs=1e-2)
            assert paths.log_sigma_last.flatten().tolist() == pytest.approx(chain.last.flatten().tolist())
            made.append(paths)
            # at ratio temperature 1 the rounding of tokens, compared above, is many sigmas
            by_hand_chains.append(chain._replace(mean=paths.tokens.double()))
    (p, q), (p64, q64) = made, by_hand_chains
    assert ((q64.path - p64.path).abs() > 0.1).all(), "Sigma is not 1"
    for x in (q.tokens, p.tokens, 2 * p.tokens - q.tokens):
        actual = masked_cspd.log_ratio(x[:, None], p, q, ratio_temperature, sigma).squeeze(1)
        expected = log_ratio(x.double(), p64, q64, ratio_temperature, sigma)
        assert expected.abs().max() > 1
        assert actual.tolist() == pytest.approx(expected.tolist(), rel=1e-4, abs=2e-2)


@pytest.mark.parametrize("chains", ["ancestral", "annealed"])
@pytest.mark.parametrize("index", [0, 1], ids=["aligned", "not aligned"])
def test_the_ratio_is_that_of_equation_1(index, chains, target, draft):
    """Gaussians of all steps and of x_T by torch.distributions, target minus draft."""
    engine = Engine(MARModels(target, draft), max_batch=1, device="cpu")
    nine_steps = {"upper": 9, "lower": 9, "first_timestep": 999} if chains == "annealed" else {}
    resolved = engine.resolve(request(chains=chains, **nine_steps))
    num_steps = 9 if nine_steps else resolved.num_sampling_steps
    runner, sequence = engine.runner, Sequence(resolved, 0, slot=0)
    both = []
    with torch.inference_mode():
        runner.admit([sequence])
        rows = runner.rows([sequence], [20], [6])
        for name, of_noise in (("target", index), ("draft", 0)):
            z = runner.conditions([sequence], rows, name)
            paths, _ = masked_cspd._denoise(runner, name, resolved, rows, z, of_noise)
            x = noise.initial(rows.seed, rows.position, CHANNELS, of_noise).double()
            eps_t = noise.steps(rows.seed, rows.position, torch.arange(num_steps), CHANNELS, of_noise)
            head = runner.models[name].head
            chain = denoise(head, z, rows.scale, resolved.but(num_sampling_steps=num_steps), x, eps_t)
            assert (paths.tokens - chain.mean).abs().max() < TOKEN
            both.append((paths, chain._replace(mean=paths.tokens.double())))
    (p, p64), (q, q64) = both
    assert ((p64.log_prob - q64.log_prob - q64.path + p64.path).abs() > 1).all() == bool(index), "the exponents count"
    for x in (q.tokens, p.tokens):
        actual = masked_cspd.log_ratio(x[:, None], p, q, ratio_temperature=1.0).squeeze(1)
        expected = log_density(x.double(), p64) - log_density(x.double(), q64)
        assert actual.tolist() == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-4)


def paths_of(mean: list[float], sigma: list[float], log_sigma: float, num: int) -> Paths:
    log_sigma_last = torch.tensor(sigma).log().expand(num, -1)
    log_noise = torch.zeros(num, dtype=torch.float64)
    return Paths(torch.tensor(mean).expand(num, -1), torch.full((num,), log_sigma), log_sigma_last, log_noise)


def resample(p: Paths, q: Paths, ratio_temperature: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    index = torch.arange(len(p.tokens))
    rows = SimpleNamespace(seed=seed + index, position=index % 7)
    asked = request(ratio_temperature=ratio_temperature)
    return masked_cspd._resample(SimpleNamespace(noise=noise), asked, rows, index, p, q)


@pytest.mark.parametrize(
    "log_big_sigma, ratio_temperature", [(0.0, 1.0), (-0.4, 1.0), (0.5, 2.0)], ids=["p - q", "Sigma", "tempered"]
)
def test_rejected_tokens_follow_the_residual(log_big_sigma, ratio_temperature):
    """They follow norm(p max(0, 1 - 1 / ratio)), which is norm(max(0, p - q)) if Sigma and the temperature are 1."""
    mean_p, sigma_p, mean_q, sigma_q = [0.5, 0.2], [0.8, 1.0], [-0.6, 0.0], [1.0, 0.7]
    step = 0.02
    axis = np.arange(-6, 6, step)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1)
    p, q = (scipy_stats.norm.pdf(grid, *each).prod(-1) for each in ((mean_p, sigma_p), (mean_q, sigma_q)))
    z_p = (grid - np.array(mean_p)) / sigma_p / ratio_temperature
    z_q = (grid - np.array(mean_q)) / sigma_q / ratio_temperature
    ratio = np.exp(log_big_sigma + 0.5 * (z_q**2 - z_p**2).sum(-1)) * np.prod(sigma_q) / np.prod(sigma_p)
    wanted = p * np.maximum(0, 1 - 1 / ratio)
    if (log_big_sigma, ratio_temperature) == (0, 1):
        assert np.allclose(wanted, np.maximum(0, p - q), atol=1e-12)
    accepted = wanted.sum() * step**2  # the fraction of candidates
    assert accepted > 0.2

    both = paths_of(mean_p, sigma_p, 0.0, 2000), paths_of(mean_q, sigma_q, log_big_sigma, 2000)
    drawn = [resample(*both, ratio_temperature, seed) for seed in range(0, 60_000, 2000)]
    y, tries = (torch.cat(values).double().numpy() for values in zip(*drawn))
    for i in (0, 1):
        cumulative = wanted.sum(1 - i).cumsum() / wanted.sum()
        cdf = functools.partial(np.interp, xp=axis + step / 2, fp=cumulative)
        assert scipy_stats.kstest(y[:, i], cdf).pvalue > 1e-3
    product = (grid.prod(-1) * wanted).sum() / wanted.sum()  # the channels are not independent
    assert abs(y.prod(1).mean() - product) < 4 * y.prod(1).std() / len(y) ** 0.5
    assert tries.mean() == pytest.approx(1 / accepted, rel=0.03)


def test_without_an_accepted_candidate_the_targets_own_token_is_taken(target):
    """Uniforms above 1 reject even a perfect draft, whose residual is empty."""
    p = paths_of([0.5, 0.2], [0.8, 1.0], 0.0, 50)
    y, tries = resample(p, p, 42.0)
    assert torch.equal(y, p.tokens) and (tries == MAX_TRIES + 1).all()

    def above_one(seed: Tensor, position: Tensor) -> Tensor:
        return torch.full(seed.shape, 2.0)

    asked = request(verify="sequential", gamma=2, prefill=0.75)
    (output,) = generate(target, target, asked, token_accept_uniforms=above_one)
    (expected,) = generate(target, None, plain())
    assert (output.tokens - expected.tokens).abs().max() < TOKEN
    assert output.stats.alpha == 0
    assert (output.stats.fallbacks, output.stats.resample_tries) == (16, 16 * MAX_TRIES)


# ---- batches, and chains that speculate


def mixed_requests() -> list[Request]:
    quick = {"prefill": 0.75}
    parallel = [request(i, i, num_iter=k, **quick) for i, k in enumerate((8, 16, 12))]
    sequential = [request(i, i, num_iter=k, gamma=4, verify="sequential", **quick) for i, k in enumerate((8, 16))]
    chains = [request(i, i, chains="speculative", window=4, **quick) for i in range(2)]
    return [*parallel, *sequential, *chains, plain(num_iter=12)]


@pytest.mark.parametrize("max_batch", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_images_do_not_depend_on_the_batch(max_batch, target, draft):
    """Requests join while others run. Rounding may change a decision, and then an image, once in a long while."""
    requests = mixed_requests()
    engine = Engine(MARModels(target, draft), max_batch=max_batch, device="cpu")
    num_different = 0
    for asked, output in zip(requests, staggered(engine, requests)):
        (alone,) = generate(target, draft, asked)
        if (output.tokens - alone.tokens).abs().max() > TOKEN:
            num_different += 1
            continue
        assert output.stats.by_rank == alone.stats.by_rank
        assert torch.equal(output.token_cost.nan_to_num(9), alone.token_cost.nan_to_num(9))
    assert num_different <= 1


def test_both_chains_may_speculate(target, draft):
    settings = {"num_sampling_steps": 30, "prefill": 0.4}
    fast = {"chains": "speculative", "window": 8}
    requests = [request(seed=i, **settings, **own) for own in ({}, fast) for i in range(2)]
    outputs = generate(target, draft, *requests, max_batch=2)
    for usual, speculative in zip(outputs[:2], outputs[2:]):
        assert usual.stats.draft_backbone_calls == speculative.stats.draft_backbone_calls == 38
        assert speculative.stats.draft_head_calls < 0.7 * usual.stats.draft_head_calls
        assert speculative.stats.head_calls < 0.9 * usual.stats.head_calls  # the prefill is ancestral
        assert 0 < speculative.stats.alpha < 1 and speculative.request.window == 8
        assert (usual.tokens - speculative.tokens).abs().max() > TOKEN  # with other random numbers
