"""Chains that speculate, in slots: rounds, launches, records, and the bundled models."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from distributions import same_law_pvalue
from graphs import replayed
from heads import BATCH, FP32, Case, finish, merge
from mixtures import MIXTURE, NULL_CLASS, TWELVE, UNGUIDED, ChangedUniforms, biased

import cspd
from cspd import Request, noise
from cspd.checkpoints import checkpoint_files
from cspd.device import Precision
from cspd.heads import calibrated, chain, speculative, verify
from cspd.heads import chain as heads_chain
from cspd.heads.calibrated import Predictor, make_segments
from cspd.heads.calibration import Calibration, frozen
from cspd.heads.speculative import acceptance
from cspd.masked.runner import MARRunner
from cspd.request import Sequence, Stopwatch
from mar.checkpoint import load_mar
from mar.head import Head


def test_records_count_calls():
    case, rows, window = Case(MIXTURE, UNGUIDED, 40), 50, 6
    chains = case.chains(case.calibration(), window)
    case.start(chains, rows, seed=1)
    calls, ended = torch.ones(rows, dtype=torch.int64), []
    while chains.owners:
        calls[list(chains.owners)] += 1
        ended += filter(None, [chains.advance()])
    record = merge(ended).record
    assert torch.equal((record != 0).sum(1), calls) and calls.min() < calls.max()
    assert (record.abs().sum(1) == 40).all() and record.abs().max() == window
    assert (record[:, 39] == 1).all()
    for row in record.tolist():
        step = 39
        while step >= 0:  # a round begins where the one before it ended
            assert 1 <= abs(row[step]) <= step + 1
            step, end, last = step - abs(row[step]), step, row[step]
        assert last > 0 and not any(row[i] for i in range(end))  # step 0 is never rejected
    (judged, accepted), (judged_at, accepted_at) = acceptance(record.numpy(), window)
    assert judged.sum() == judged_at.sum() == rows * 38 and judged_at[0] == judged_at[39] == 0
    assert accepted.sum() == accepted_at.sum() == rows * 38 - (record < 0).sum()


def test_acceptance_of_a_record_made_by_hand():
    record = np.zeros((2, 8), dtype=np.int8)
    record[0, [7, 6, 4, 1]] = 1, -2, 3, 2  # step 6 right, 5 wrong; 4 3 2 right; 1 right and 0 not judged
    record[1, [7, 6, 3]] = 1, 3, -1  # 6 5 4 right; 3 wrong;
    record[1, 2] = 3  # 2 1 right
    by_lag, by_step = acceptance(record, 4)
    assert by_lag.tolist() == [[6, 4, 2, 0], [5, 3, 2, 0]]
    assert by_step.tolist() == [[0, 2, 2, 2, 2, 2, 2, 0], [0, 2, 2, 1, 2, 1, 2, 0]]


def tokens_alone(case: Case, draft: Calibration, window: int, rows: int):
    chains = case.chains(draft, window)
    for i in range(rows):
        case.start(chains, rows, 4, slice(i, i + 1))
        yield from finish(chains)


def test_a_chain_does_not_depend_on_its_neighbours():
    """Alone, all together, or joining and leaving while others are under way; where drafts are often rejected."""
    case, rows, window = Case(MIXTURE, UNGUIDED, 30), 12, 5
    draft = case.calibration(frozen=True)
    alone, together = merge([*tokens_alone(case, draft, window, rows)]), case.speculative(draft, window, rows, 4)
    chains, staggered, waiting = case.chains(draft, window), [], list(range(0, rows, 3))[::-1]
    while waiting or chains.owners:
        for _ in range(2 if waiting else 0):
            if waiting:
                first = waiting.pop()
                case.start(chains, rows, 4, slice(first, first + 3))
        for _ in range(4):
            staggered += filter(None, [chains.advance() if chains.owners else None])
    for other in (together, merge(staggered)):
        assert torch.equal(other.record, alone.record)
        assert (other.tokens - alone.tokens).abs().max() < 1e-3
        assert (other.log_sigma - alone.log_sigma).abs().max() < 1e-2
        assert other.tries == alone.tries and other.fallbacks == alone.fallbacks
    assert (alone.record < 0).any() and any(alone.tries)


def test_tables_or_rounds_compute_the_modulations(monkeypatch):
    """Also where the chains under way outgrow the table and shrink again."""
    case = Case(MIXTURE, NULL_CLASS, 30, 2.0)
    draft, settings = case.calibration(), (5, 9, 4)
    whole = case.speculative(draft, *settings)
    for fitting in (0, 6):
        monkeypatch.setattr("cspd.heads.speculative.table_size", lambda *_, fitting=fitting: fitting * 30)
        chains = case.chains(draft, 5)
        case.start(chains, 9, 4, slice(0, 5))
        ended = [*filter(None, [chains.advance()])]
        case.start(chains, 9, 4, slice(5, 8))
        while len(chains.owners) > 1:
            ended += filter(None, [chains.advance()])
        case.start(chains, 9, 4, slice(8, 9))
        rounds = merge(ended + finish(chains))
        assert torch.equal(rounds.record, whole.record)
        assert (rounds.tokens - whole.tokens).abs().max() < 1e-3
    monkeypatch.undo()
    monkeypatch.setattr("cspd.heads.chain.TABLE_SHARE", 0)
    assert (case.speculative(draft, *settings).tokens - whole.tokens).abs().max() < 1e-3


def test_modulations_are_computed_once_a_chain(small_mar):
    """One product a layer for the chains that join, at all their steps; the rounds look them up."""
    head, products = copy.deepcopy(small_mar.head), []
    layers = [layer.adaLN_modulation[1] for layer in [*head.res_blocks, head.final_layer]]
    for layer in layers:
        layer.register_forward_hook(lambda layer, inputs, output: products.append(output[..., 0].numel()))
    z = torch.randn(2, 1, head.cond_embed.in_features, generator=torch.Generator().manual_seed(0))
    case = Case(head, z, 20, 2.0)
    chains = case.chains(Calibration(*frozen(20), np.zeros(0)), 4)
    with torch.inference_mode():
        case.start(chains, 9, 4, slice(0, 5))
        chains.advance()
        case.start(chains, 9, 4, slice(5, 9))
        finish(chains)
    assert products == [2 * 5 * 20] * len(layers) + [2 * 4 * 20] * len(layers)


@pytest.mark.parametrize("policy", ["bf16", "tf32"])
def test_the_chain_is_in_float32_under_every_policy(policy):
    """This head has no matrix product, so nothing may be rounded: a coarse draft would not be the q it is judged by."""
    case = Case(MIXTURE, NULL_CLASS, 30, 2.0)
    draft = case.calibration()
    plain, coarse = (
        case.speculative(draft, 5, 20, 4, precision=precision)
        for precision in (FP32, Precision(policy, torch.device("cpu")))
    )
    assert torch.equal(coarse.tokens, plain.tokens)


def test_candidates_are_never_drawn_twice():
    """Every residual has candidates of its own: (seed, position, step) does not come again."""
    seen = []

    class Spy(ChangedUniforms):
        def candidates(self, seed, position, step, first, *args):
            asked = zip(seed.tolist(), position.tolist(), step.tolist())
            seen.extend((s, p, t, first) for s, p, t in asked if s)  # nobody's, which fill up, have seed 0
            return noise.candidates(seed, position, step, first, *args)

    TWELVE.speculative(biased(TWELVE, 0.5, -0.25), 3, BATCH, seed=1, noise=Spy(lambda uniform: uniform))
    assert len(seen) == len(set(seen)) > BATCH


def test_fallbacks_are_counted(monkeypatch):
    for module in (verify, speculative):
        monkeypatch.setattr(module, "FIRST_BLOCK", 2)
        monkeypatch.setattr(module, "MAX_TRIES", 3)
    ended = TWELVE.speculative(biased(TWELVE, 0.5, -0.25), 3, 200, seed=1)
    assert 0 < sum(ended.fallbacks) < sum(ended.tries) / 3
    assert all(tries <= 3 * 11 and 3 * fallbacks <= tries for tries, fallbacks in zip(ended.tries, ended.fallbacks))


# ---- Whole chains as functions of tensors: no host read, no shape from data, so that graphs can have them


CPU = torch.device("cpu")
STEPS, CHANNELS, ROWS = 5, 4, 3
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)


def by_windows(head, precision):
    coefficients, drift = frozen(STEPS)
    predictor = Predictor(coefficients, drift, np.zeros_like(drift))
    plan = make_segments((4, 3, 2, 0), predictor, np.zeros((4, 2)), 3, CPU)  # the third leaves out the null class
    return calibrated.drawing(head, noise, plan, STEPS, precision)


CHAINS = {
    "ancestral": lambda head, precision: heads_chain.drawing(head, noise, STEPS, precision),
    "calibrated": by_windows,
}


@pytest.fixture(scope="module")
def head():
    torch.manual_seed(0)
    head = Head(CHANNELS, 8, 1, 6).requires_grad_(False)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def inputs(seed):
    """z, scale, temperature, seed and position."""
    g = torch.Generator().manual_seed(seed)
    z, scale = torch.randn(2, ROWS, 6, generator=g), 1 + torch.rand(ROWS, 1, generator=g)
    return z, scale, torch.ones(ROWS, 1), torch.arange(ROWS) + 2**40 + seed, torch.arange(ROWS)


@pytest.mark.skipif(OLD, reason="torch 2.6 does not trace the weak dictionary of Precision, 2.9 does")
@pytest.mark.parametrize("policy", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_it_is_traced_in_one_piece(chain, policy, head):
    draw = CHAINS[chain](head, Precision(policy, CPU))
    expected = draw(*inputs(1))
    traced = torch.compile(draw, fullgraph=True, backend="eager")
    assert torch.equal(traced(*inputs(1)), expected)


@pytest.mark.parametrize("chain", CHAINS)
def test_it_is_replayed_on_other_inputs(chain, head):
    draw, graphs = CHAINS[chain](head, Precision("bf16", CPU)), replayed()
    for seed in (1, 2, 1):
        assert torch.equal(graphs.run("chain", draw, *inputs(seed)), draw(*inputs(seed)))


# ---- On the trained model speculation changes nothing: the distribution at a fixed z, and the images of requests


ROWS_OF_SPECULATIVE_BUNDLED = 4500
SETTINGS = {"num_iter": 16, "cfg": 3.0, "cfg_schedule": "linear", "temperature": 1.0, "num_sampling_steps": 100}


@pytest.fixture(scope="module")
def target():
    return load_mar(checkpoint_files("digits32")["target"]).eval().requires_grad_(False)


class OneCondition(Head):
    """A head whose rows all have one condition: what it modulates by is computed once and not for each."""

    def __init__(self, head):
        self.__dict__ |= head.__dict__

    def modulations(self, t_embed, c_embed):
        rows = torch.broadcast_shapes(t_embed.shape, c_embed.shape)[:-1]
        return [layer.expand(*rows, -1) for layer in super().modulations(t_embed, c_embed[:, :1])]


@pytest.fixture(scope="module")
def case(target):
    """Chains at the condition of one token, ten iterations into an image."""
    device = torch.device("cpu")
    runner, sequence = (
        MARRunner(target, 1, device, FP32),
        Sequence(Request(label=4, seed=9, method="ar", **SETTINGS), 0, slot=0),
    )
    with torch.inference_mode():
        runner.admit([sequence])
        for _ in range(10):
            chain.run_plain_round(runner, [sequence], Stopwatch(device))
        rows = runner.next_rows([sequence])
        z = runner.conditions([sequence], rows)[:, :1]
    return Case(OneCondition(target.head), z, num_steps=100, scale=rows.scale[0].item())


@pytest.fixture(scope="module")
def ancestral(case):
    with torch.inference_mode():
        return case.path(ROWS_OF_SPECULATIVE_BUNDLED, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("window, frozen", [(12, False), (4, True)])
def test_the_distribution_at_a_fixed_condition(window, frozen, case, ancestral):
    """Tokens, and log sigma along the way, over 40 projections, radii and moments; other seeds than the ancestral's."""
    with torch.inference_mode():
        ended = case.speculative(case.calibration(frozen), window, ROWS_OF_SPECULATIVE_BUNDLED, seed=1)
    calls = (ended.record != 0).float().sum(1).mean()
    assert calls < (40 if frozen else 14)
    speculative = torch.cat([ended.tokens, ended.log_sigma.unsqueeze(1)], dim=1)
    assert same_law_pvalue(ancestral, speculative) > 1e-3
    noise = torch.randn(speculative.shape, generator=torch.Generator().manual_seed(0))
    assert same_law_pvalue(ancestral, speculative + 0.01 * speculative.std(0) * noise + 0.05) < 1e-4  # it has power


@pytest.fixture(scope="module")
def engine():
    return cspd.load("digits32", max_batch=1)


@pytest.fixture(scope="module")
def requests():
    return [Request(label=i, seed=i, window=8, **SETTINGS) for i in range(8)]


@pytest.fixture(scope="module")
def alone(engine, requests):
    return [engine.generate([request])[0] for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("max_batch, order", [(3, 1), (7, -1)])
def test_images_do_not_depend_on_the_batch(max_batch, order, engine, requests, alone):
    outputs = engine.with_slots(max_batch).generate(requests[::order])[::order]
    assert all(torch.equal(a.image, b.image) for a, b in zip(alone, outputs))


@pytest.mark.parametrize("window, cfg, iterations", [(4, 1.0, [8] * 8), (3, 3.0, [2, 8, 5, 13, 3, 16, 7, 4])])
def test_few_steps_are_rounded_alike_in_every_batch(window, cfg, iterations, engine):
    """To the last bit, at T = 8, whose first step multiplies rounding by 4,500; also at different iterations."""
    settings = SETTINGS | {"cfg": cfg, "num_sampling_steps": 8, "window": window, "draft": "frozen"}
    requests = [Request(label=i, seed=i, **settings | {"num_iter": k}) for i, k in enumerate(iterations)]
    alone = [engine.generate([request])[0] for request in requests]
    for max_batch in (3, 8):
        outputs = engine.with_slots(max_batch).generate(requests)
        assert all(torch.equal(a.tokens, b.tokens) and torch.equal(a.image, b.image) for a, b in zip(alone, outputs))


@pytest.mark.slow
def test_statistics_agree_with_each_other(alone):
    for output in alone:
        stats = output.stats
        (judged, accepted), (judged_at, accepted_at) = stats.by_lag, stats.by_step
        assert all(a <= j for a, j in zip(accepted, judged)) and len(judged) == 8
        assert sum(judged) == sum(judged_at) == 64 * 98 and sum(accepted) == sum(accepted_at)
        assert stats.alpha == sum(accepted) / sum(judged) > 0.85
        assert stats.head_calls_per_token == pytest.approx(output.token_cost.mean().item())
        assert 13 < stats.head_calls_per_token < 18 and output.token_cost.shape == (64,)
        assert stats.guarantee == "exact" and stats.iterations == stats.backbone_calls == 16
        assert 16 * 14 <= stats.head_calls <= 16 * 25 and stats.fallbacks == 0


@pytest.mark.slow
def test_no_window_is_plain_mar(engine, requests):
    speculative, plain = (
        engine.generate([dataclasses.replace(requests[0], window=w, method=m)])[0].tokens
        for w, m in ((0, "speculative"), (None, "ar"))
    )
    assert torch.equal(speculative, plain)


@pytest.mark.slow
def test_the_seed_decides(engine, requests, alone):
    again = engine.generate(requests[:1])[0]
    assert torch.equal(again.tokens, alone[0].tokens)
    assert (alone[0].tokens - alone[1].tokens).abs().max() > 0.1


@pytest.mark.slow
def test_bf16_has_the_distribution_of_its_own_ancestral_chain(case):
    """What is coarse is the head, in p; the draft and its density are not."""
    bf16 = Precision("bf16", torch.device("cpu"))
    small = dataclasses.replace(case, num_steps=25)
    with torch.inference_mode():
        plain = small.ancestral(1500, seed=2, precision=bf16)
        ended = small.speculative(small.calibration(), 6, 1500, seed=1, precision=bf16)
    assert same_law_pvalue(plain, ended.tokens) > 1e-3
