"""CSpD: Algorithm 1, its ratio, rounds and chains."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cspd_by_hand import (  # noqa: F401 - fixtures
    CHANNELS,
    GAMMA,
    LEFT,
    LENGTH,
    TOKEN,
    by_hand,
    denoise,
    generate,
    known_draft,
    known_target,
    log_ratio,
    order_of,
    plain,
    request,
    scales,
)
from scipy import stats as scipy_stats
from torch import Tensor

import cspd
from cspd import Engine, MARModels, Request, noise
from cspd.heads import chain
from cspd.masked import cspd as masked_cspd
from cspd.masked.cspd import Paths
from cspd.request import Sequence


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill": 0.05},
        {"prefill": 0.5, "num_iter": 8, "gamma": 12},
        {"prefill": 0.6, "verify": "sequential", "gamma": 6},
        {"prefill": 0.7, "verify": "sequential", "num_iter": 8, "cfg_schedule": "constant", "gamma": 3},
        {"prefill": 0.7, "align": False, "ratio_temperature": 200.0},
        {"prefill": 0.7, "ratio_temperature": 25.0, "cfg": 1.0, "temperature": 1.1},
        {"prefill": 0.7, "sigma": "published"},
    ],
    ids=str,
)
def test_agrees_with_algorithm_1_done_by_hand(changes, target, draft):
    r = request(**changes)
    (output,) = generate(target, draft, r)
    expected = by_hand(target, draft, r)
    token_cost = [None if math.isnan(h) else bool(h) for h in output.token_cost[order_of(r)].tolist()]
    assert token_cost == expected.accepted
    assert 0 < token_cost.count(True) < LENGTH - token_cost.count(None), "the case decides nothing"
    assert (output.tokens - expected.tokens).abs().max() < TOKEN
    stats = output.stats
    assert (stats.iterations, stats.backbone_calls, stats.draft_backbone_calls, stats.resample_tries) == (
        expected.rounds,
        expected.rounds,
        expected.drafted,
        expected.tries,
    )


# ---- the draft is the target


@pytest.mark.parametrize(
    "changes",
    [
        {"verify": "sequential"},
        {"verify": "sequential", "gamma": LENGTH, "prefill": 0.05},
        {"verify": "parallel", "gamma": 1},
        {"prefill": 1.0},
    ],
    ids=str,
)
def test_a_draft_that_is_the_target_makes_plain_mar(changes, target):
    """At K = L, one token an iteration, the contexts are the same: every token is right, and `ar`'s own."""
    (output,), (expected,) = generate(target, target, request(**changes)), generate(target, None, plain())
    assert (output.tokens - expected.tokens).abs().max() < TOKEN
    assert output.stats.alpha == (None if changes.get("prefill") == 1 else 1)
    assert output.stats.resample_tries == output.stats.fallbacks == 0


def test_a_draft_that_is_the_target_is_judged_in_another_context_in_parallel(target):
    """What sets the modes apart: from the verified prefix alone, tokens drafted after others look wrong."""
    outputs = generate(target, target, request(), max_batch=1)
    judged, accepted = np.array(outputs[0].stats.by_lag)
    assert accepted[0] == judged[0] == LENGTH // GAMMA
    assert (accepted[1:] < judged[1:]).any()


# ---- noise and guidance


def recording(monkeypatch) -> tuple[set, dict]:
    """(model, function, index and the like) of every draw of noise inside a chain, and functions that record them."""
    seen, drawing, real = set(), [], masked_cspd._denoise

    def follow(runner, model: str, *args, **kwargs) -> tuple:
        drawing.append(model)
        made = real(runner, model, *args, **kwargs)
        drawing.pop()
        return made

    def record(name: str, *arguments: str):
        function = getattr(noise, name)

        def call(*args, **kwargs):
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            if drawing:
                seen.add((drawing[-1], name, *(bound.arguments[argument] for argument in arguments)))
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(masked_cspd, "_denoise", follow)
    functions = {
        "initial": record("initial", "index"),
        "steps": record("steps", "index"),
        "chain": record("chain", "index", "accept_index"),
        "candidates": record("candidates", "offset"),
    }
    return seen, functions


@pytest.mark.parametrize("align", [True, False])
def test_only_x_and_eps_are_shared_and_only_if_aligned(align, target, draft, monkeypatch):
    seen, functions = recording(monkeypatch)
    generate(target, draft, request(align=align, prefill=0.5, num_sampling_steps=3), **functions)
    own = 0 if align else 1
    assert seen == {(model, name, i) for model, i in (("draft", 0), ("target", own)) for name in ("initial", "steps")}

    seen.clear()
    speculative = {"chains": "speculative", "window": 6, "prefill": 0.8}
    generate(target, draft, request(align=align, **speculative), **functions)
    offsets = {"draft": noise.DRAFT_OFFSET, "target": 0}
    assert {("draft", "chain", 0, 1), ("target", "chain", own, 0)} <= seen
    rest = {entry for entry in seen if entry[1] != "chain"}
    assert rest <= {(model, "candidates", offset) for model, offset in offsets.items()}
    assert len(seen) == 2 + len(rest)


def test_other_draws_are_of_other_streams():
    """Uniform draws of tokens and of chains, candidates of tokens and of states, the draft's and the target's."""
    seed, position, step = torch.arange(4000), torch.full((4000,), 9), torch.zeros(4000, dtype=torch.int64)
    target, draft = (noise.chain(seed, position, 1, 1, 0, i) for i in (0, 1))
    states = [noise.candidates(seed, position, step, 0, 1, 1, offset) for offset in (0, noise.DRAFT_OFFSET)]
    tokens = noise.token_candidates(seed, position, 0, 1, 1)
    assert torch.equal(target[0], draft[0]) and torch.equal(target[1], draft[1])  # aligned
    streams = [
        noise.token_accept_uniforms(seed, position),
        target[2],
        draft[2],
        tokens[1],
        *(uniform for _, uniform in states),
    ]
    streams += [tokens[0], *(normals for normals, _ in states)]
    for index in (0, 1):
        streams += [noise.initial(seed, position, 1, index), noise.steps(seed, position, step[:1], 1, index)]
    correlation = np.corrcoef(torch.stack([stream.flatten() for stream in streams]).numpy()) - np.eye(len(streams))
    assert np.abs(correlation).max() < 0.08  # 5 standard errors


@pytest.mark.parametrize("num_iter", [8, 64])
def test_guidance_is_that_of_the_iteration_a_rank_belongs_to(num_iter, target, draft, monkeypatch):
    """MAR's own: s rises with the tokens known after the iteration, 1 .. 64 of 64."""
    engine = Engine(MARModels(target, draft), max_batch=2, device="cpu")
    resolved = [engine.resolve(request(seed=i, num_iter=num_iter)) for i in (1, 2)]
    batch = [Sequence(r, i, slot=i) for i, r in enumerate(resolved)]
    with torch.inference_mode():
        engine.runner.admit(batch)
    expected = torch.tensor(scales(resolved[0]))
    assert len(expected) == LENGTH and len(expected.unique()) == num_iter - (num_iter == 64)
    assert expected[0] == 1 + 2 * (LENGTH - LEFT[num_iter][0]) / 64 and expected[-1] == 1 + 2 * 63 / 64
    rows = engine.runner.rows(batch, [0, 10], [64, 7])
    assert torch.allclose(rows.scale.squeeze(1), torch.cat([expected, expected[10:17]]))

    used, real = {"draft": [], "target": []}, chain.follow
    heads = {draft.head: "draft", target.head: "target"}

    def follow(head, z, scale, *args):
        used[heads[head]].append(scale.squeeze(1))
        return real(head, z, scale, *args)

    monkeypatch.setattr(chain, "follow", follow)
    engine.generate([request(num_iter=num_iter, num_sampling_steps=2)])
    for parts in used.values():
        assert torch.allclose(torch.cat(parts), expected)


# ---- what is not accepted


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"gamma": 0}, "gamma"),
        ({"gamma": 65}, "gamma"),
        ({"gamma": 1.5}, "gamma"),
        ({"verify": "serial"}, "verify"),
        ({"chains": "fast"}, "chains"),
        ({"ratio_temperature": 0}, "ratio_temperature"),
        ({"ratio_temperature": -1.0}, "ratio_temperature"),
        ({"ratio_temperature": math.nan}, "ratio_temperature"),
        ({"prefill": -1}, "prefill"),
        ({"prefill": 2}, "prefill"),
        ({"align": "yes"}, "align"),
        ({"temperature": 0.0}, "temperature"),
        ({"window": 8}, "window"),
        ({"window": 13, "chains": "speculative"}, "window"),
        ({"method": "ar"}, "ar"),
        ({"method": "speculative", "gamma": None}, "speculative"),
    ],
    ids=str,
)
def test_bad_options_raise_one_line_that_names_the_fix(changes, error, target, draft):
    engine = Engine(MARModels(target, draft), max_batch=1, device="cpu")
    with pytest.raises(ValueError, match=error) as raised:
        engine.generate([request(**changes)])
    assert "\n" not in str(raised.value)


def test_a_draft_model_is_asked_for(target):
    with pytest.raises(ValueError, match="draft"):
        generate(target, None, request())


# ---- the bundled pair


@pytest.mark.slow
def test_alpha_of_the_bundled_pair():
    """About 0.3, and nothing without aligned noise, or with the paper's formula taken literally."""
    engine = cspd.load("digits32", max_batch=10, device="cpu")

    def alpha(**changes) -> float:
        settings = {"method": "cspd", "gamma": GAMMA, "num_iter": 8, "cfg": 1.0, "prefill": 0.75}
        outputs = engine.generate([Request(i, i, **settings, **changes) for i in range(10)])
        judged, accepted = np.sum([o.stats.by_lag for o in outputs], axis=(0, 2))
        assert judged == 160
        return accepted / judged

    assert 0.2 < alpha() < 0.6
    assert alpha(align=False, num_sampling_steps=50) < 0.1
    assert alpha(ratio_temperature=1.0, num_sampling_steps=50) < 0.02


# ---- CSpD's ratio and residual are those of its paper (arXiv 2411.11925), on the bundled pair and on Gaussians


# ---- the ratio


@pytest.mark.parametrize("ratio_temperature, sigma", [(42.0, "paper"), (1.0, None), (42.0, "published")])
def test_the_ratio_is_that_of_equation_4(ratio_temperature, sigma):
    """On the bundled pair with 100 steps: 99 terms of log sigma and the last step's tempered Gaussians."""
    engine, known, count = cspd.load("digits32", max_batch=1, device="cpu"), 20, 6
    resolved = engine.resolve(Request(3, 5, method="cspd", cfg=3.0, temperature=0.9, num_sampling_steps=100))
    runner, sequence = engine.runner, Sequence(resolved, 0, slot=0)
    with torch.inference_mode():
        runner.admit([sequence])
        runner.tokens.normal_(generator=torch.Generator().manual_seed(0))
        rows, made, chains = runner.rows([sequence], [known], [count]), [], []
        x = noise.initial(rows.seed, rows.position, CHANNELS).double()
        eps_t = noise.steps(rows.seed, rows.position, torch.arange(100), CHANNELS)
        for name, model in runner.models.items():
            z = runner.conditions([sequence], rows, name)
            made.append(masked_cspd._denoise(runner, name, resolved, rows, z)[0])
            chains.append(denoise(model.head, z, rows.scale, resolved, x, eps_t))
            assert (made[-1].tokens - chains[-1].mean).abs().max() < TOKEN
            assert made[-1].log_sigma.tolist() == pytest.approx(chains[-1].path.tolist(), abs=1e-2)
            assert made[-1].log_sigma_last.flatten().tolist() == pytest.approx(chains[-1].last.flatten().tolist())
    assert ((chains[1].path - chains[0].path).abs() > 0.1).all(), "Sigma does not show"
    (p, q), (p64, q64) = made, chains
    for x in (q.tokens, p.tokens, 2 * p.tokens - q.tokens):
        actual = masked_cspd.log_ratio(x[:, None], p, q, ratio_temperature, sigma).squeeze(1)
        # the tokens themselves are compared above: at ratio temperature 1 their rounding is many sigmas
        p64, q64 = p64._replace(mean=p.tokens.double()), q64._replace(mean=q.tokens.double())
        expected = log_ratio(x.double(), p64, q64, ratio_temperature, sigma)
        assert expected.abs().max() > 1
        assert actual.tolist() == pytest.approx(expected.tolist(), rel=1e-4, abs=2e-2)


# ---- the residual


def denoised(mean: list[float], sigma: list[float], log_sigma: float, rows: int) -> Paths:
    mean, last = (torch.tensor(values).expand(rows, -1) for values in (mean, np.log(sigma).tolist()))
    return Paths(mean, torch.full((rows,), log_sigma), last)


def resample(p: Paths, q: Paths, ratio_temperature: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    index = torch.arange(len(p.tokens))
    rows = SimpleNamespace(seed=seed + index, position=index % 7)
    asked = request(ratio_temperature=ratio_temperature)
    return masked_cspd._resample(SimpleNamespace(noise=noise), asked, rows, index, p, q)


@pytest.mark.parametrize(
    "log_big_sigma, ratio_temperature", [(0.0, 1.0), (-0.4, 1.0), (0.5, 2.0)], ids=["p - q", "Sigma", "tempered"]
)
def test_rejected_tokens_are_drawn_from_the_residual(log_big_sigma, ratio_temperature):
    """They are draws of norm(p max(0, 1 - 1 / ratio)), which is norm(max(0, p - q)) at Sigma = 1 and no tempering."""
    mean_p, sigma_p, mean_q, sigma_q = [0.5, 0.2], [0.8, 1.0], [-0.6, 0.0], [1.0, 0.7]
    axis = np.linspace(-6, 6, 1201)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1)
    p, q = (scipy_stats.norm.pdf(grid, mean, sigma).prod(-1) for mean, sigma in ((mean_p, sigma_p), (mean_q, sigma_q)))
    z_p, z_q = ((grid - np.array(m)) / s / ratio_temperature for m, s in ((mean_p, sigma_p), (mean_q, sigma_q)))
    ratio = np.exp(log_big_sigma + 0.5 * (z_q**2 - z_p**2).sum(-1)) * np.prod(sigma_q) / np.prod(sigma_p)
    wanted = p * np.maximum(0, 1 - 1 / ratio)
    if (log_big_sigma, ratio_temperature) == (0, 1):
        assert np.allclose(wanted, np.maximum(0, p - q), atol=1e-12)
    kept = wanted.sum() * (axis[1] - axis[0]) ** 2
    assert kept > 0.2
    cumulative = [wanted.sum(1 - i).cumsum() / wanted.sum() for i in (0, 1)]

    both = denoised(mean_p, sigma_p, 0.0, 2000), denoised(mean_q, sigma_q, log_big_sigma, 2000)
    drawn = [resample(*both, ratio_temperature, seed) for seed in range(0, 100_000, 2000)]
    y, tries = (torch.cat(values).double().numpy() for values in zip(*drawn))
    for i in (0, 1):
        cdf = functools.partial(np.interp, xp=axis + 0.005, fp=cumulative[i])
        assert scipy_stats.kstest(y[:, i], cdf).pvalue > 1e-3
    product = (grid.prod(-1) * wanted).sum() / wanted.sum()  # the channels are not independent
    assert abs(y.prod(1).mean() - product) < 4 * y.prod(1).std() / len(y) ** 0.5
    assert tries.mean() == pytest.approx(1 / kept, rel=0.03)


def test_where_no_candidate_is_kept_the_targets_own_token_is_taken():
    p = denoised([0.5, 0.2], [0.8, 1.0], 0.0, 50)
    y, tries = resample(p, p, 42.0)
    assert torch.equal(y, p.tokens)
    assert (tries == masked_cspd.MAX_TRIES + 1).all() and masked_cspd.MAX_TRIES == 100


def test_fallbacks_are_counted(target):
    """Uniform draws above 1 reject even a perfect draft. Its residual is empty: the target's own tokens are taken."""

    def above_one(seed: Tensor, position: Tensor) -> Tensor:
        return torch.full(seed.shape, 2.0)

    asked = request(verify="sequential", gamma=2, prefill=0.75)
    (output,), (expected,) = (
        generate(target, target, asked, token_accept_uniforms=above_one),
        generate(target, None, plain()),
    )
    assert (output.tokens - expected.tokens).abs().max() < TOKEN
    assert output.stats.alpha == 0
    assert (output.stats.fallbacks, output.stats.resample_tries) == (16, 1600)


# ---- CSpD's rounds: what is counted of each, requests beside each other, and chains that speculate


# ---- rounds and their counts


@pytest.mark.parametrize(
    "prefill, gamma, verify, num_iter, alone",
    [
        (0, 8, "parallel", 64, []),
        (0, 64, "parallel", 64, []),
        (0.05, 64, "parallel", 8, [2, 2]),
        (0.15, 40, "parallel", 8, [2, 3, 5]),
        (0.15, 7, "sequential", 64, [1] * 10),
        (0.75, 64, "sequential", 8, [2, 3, 6, 8, 10, 11, 8]),
        (1, 5, "sequential", 8, [2, 3, 6, 8, 10, 11, 12, 12]),
    ],
)
def test_rounds_and_counts(prefill, gamma, verify, num_iter, alone, target, draft):
    """`alone` are the tokens of each iteration before drafting; what follows can be told from the decisions."""
    asked = request(prefill=prefill, gamma=gamma, verify=verify, num_iter=num_iter, num_sampling_steps=6)
    (output,) = generate(target, draft, asked)
    stats, token_cost = output.stats, output.token_cost[order_of(asked)]
    first = math.ceil(prefill * LENGTH)
    assert sum(alone) == first
    assert token_cost.isnan().tolist() == [rank < first for rank in range(LENGTH)]
    assert set(token_cost[first:].tolist()) <= {0.0, 1.0}

    known, rounds, drafted, evaluated, by_lag = first, 0, 0, first, np.zeros((2, gamma), dtype=int)
    while known < LENGTH:
        size = min(gamma, LENGTH - known)
        rounds, drafted, evaluated = rounds + 1, drafted + size, evaluated + size
        for lag in range(size):
            right = token_cost[known] == 1
            by_lag[:, lag] += [1, right]
            known += 1
            if verify == "sequential" and not right:
                break
    if verify == "parallel":
        assert rounds == math.ceil((LENGTH - first) / gamma)
    assert stats.backbone_calls == stats.iterations == len(alone) + rounds
    assert stats.head_calls == 6 * stats.backbone_calls and stats.head_calls_per_token == 6
    assert stats.head_evaluations == evaluated * 6 * 2
    assert (stats.draft_backbone_calls, stats.draft_head_calls) == (drafted, drafted * 6)
    assert stats.guarantee == "heuristic"
    if first == LENGTH:
        assert stats.alpha is None and stats.by_lag == stats.by_rank == [[], []]
        return
    assert stats.by_lag == by_lag.tolist()
    assert stats.by_rank == [[int(rank >= first) for rank in range(LENGTH)], (token_cost == 1).int().tolist()]
    assert stats.alpha == by_lag[1].sum() / by_lag[0].sum()


# ---- neighbours


def mixed_requests() -> list[Request]:
    quick = {"num_sampling_steps": 8, "prefill": 0.6}
    parallel = [request(i, i, num_iter=k, **quick) for i, k in enumerate((8, 32, 16, 8))]
    sequential = [request(i, i, num_iter=k, gamma=4, verify="sequential", **quick) for i, k in enumerate((8, 32, 16))]
    chains = [request(i, i, chains="speculative", window=4, **quick) for i in range(2)]
    return [*parallel, *sequential, *chains, plain(num_iter=20, num_sampling_steps=8)]


@pytest.fixture(scope="module")
def alone(target, draft):
    """Each of the mixed requests made alone."""
    return [generate(target, draft, r)[0] for r in mixed_requests()]


def flipped(outputs: list, expected: list) -> int:
    """How many images differ: rounding may turn a decision over, once in a long while."""
    differ = [(a.tokens - b.tokens).abs().max() > TOKEN for a, b in zip(outputs, expected)]
    assert all(
        a.stats.by_rank == b.stats.by_rank and torch.equal(a.token_cost.nan_to_num(9), b.token_cost.nan_to_num(9))
        for a, b, other in zip(outputs, expected, differ)
        if not other and a.request.method == "cspd"
    )
    return sum(differ)


@pytest.mark.parametrize("max_batch", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_images_do_not_depend_on_the_batch(max_batch, target, draft, alone):
    assert flipped(generate(target, draft, *mixed_requests(), max_batch=max_batch), alone) <= 1


def test_images_do_not_depend_on_neighbours_and_arrival(target, draft, alone):
    """New requests join while others are on their way, in another order."""
    engine, requests, tickets, outputs = (
        Engine(MARModels(target, draft), max_batch=7, device="cpu"),
        mixed_requests(),
        {},
        {},
    )
    order = random.Random(2).sample(range(len(requests)), len(requests))
    arrivals = iter(order)
    while len(outputs) < len(requests):
        for index in itertools.islice(arrivals, 1):
            tickets[engine.add_request(requests[index])] = index
        outputs |= {tickets[ticket]: output for ticket, output in engine.step().items()}
    assert flipped([outputs[i] for i in range(len(requests))], alone) <= 1
    assert not engine.runner.round_state  # nothing is kept of what is gone


# ---- chains that speculate


def test_both_chains_may_speculate(target, draft):
    settings = {"num_sampling_steps": 30, "prefill": 0.4}
    usual, fast = (
        generate(target, draft, *(request(seed=i, **settings, **more) for i in range(2)), max_batch=2)
        for more in ({}, {"chains": "speculative", "window": 8})
    )
    for a, b in zip(usual, fast):
        assert a.stats.draft_backbone_calls == b.stats.draft_backbone_calls == 38
        assert b.stats.draft_head_calls < 0.7 * a.stats.draft_head_calls
        assert b.stats.head_calls < 0.9 * a.stats.head_calls  # those of the prefill are ancestral
        assert 0 < b.stats.alpha < 1 and b.request.window == 8
        assert (a.tokens - b.tokens).abs().max() > TOKEN  # the draws are others
