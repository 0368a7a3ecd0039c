"""Chains that speculate in slots: they join and leave, share launches, and do not depend on their neighbours."""

from __future__ import annotations

import copy
import functools
import math

import numpy as np
import pytest
import torch
from graphs import replayed
from heads import BATCH, GUIDED, MIXTURE, TWELVE, UNGUIDED, Case, biased, finish, merge
from scipy.stats import poisson

from cspd import Engine, MARModels, Request, noise
from cspd.continuous import joined
from cspd.device import Precision
from cspd.heads import speculative, verify
from cspd.heads.calibration import Calibration, frozen
from cspd.heads.speculative import Finished, acceptance
from cspd.heads.verify import Slots
from cspd.summary import summary_of

CASE = Case(MIXTURE, GUIDED, 30, 2.0)
WINDOW, NUM_CHAINS, SEED = 5, 23, 4


@functools.cache
def frozen_draft() -> Calibration:
    """It is often rejected."""
    return CASE.calibration(frozen=True)


def staggered(graphs=None) -> Finished:
    """Chains that join while others are running: a few at a time, some in slots that others left."""
    chains, ended = CASE.chains(frozen_draft(), WINDOW, graphs=graphs), []
    for first, last in ((0, 3), (3, 4), (4, 21), (21, NUM_CHAINS)):  # more than the slots at first
        CASE.start(chains, NUM_CHAINS, SEED, slice(first, last))
        for _ in range(3):
            ended.append(chains.advance() if chains.owners else None)
    return merge(ended + finish(chains))


def assert_same(chains: Finished, expected: Finished) -> None:
    assert torch.equal(chains.record, expected.record) and torch.equal(chains.row, expected.row)
    assert chains.tries == expected.tries and chains.fallbacks == expected.fallbacks
    assert (chains.tokens - expected.tokens).abs().max() < 1e-3
    assert (chains.log_sigma - expected.log_sigma).abs().max() < 1e-2


def test_a_chain_does_not_depend_on_its_neighbours():
    """Alone, all together, or joining and leaving while others are running."""
    chains, ended = CASE.chains(frozen_draft(), WINDOW), []
    for i in range(NUM_CHAINS):
        CASE.start(chains, NUM_CHAINS, SEED, slice(i, i + 1))
        ended += finish(chains)
    alone, together = merge(ended), CASE.speculative(frozen_draft(), WINDOW, NUM_CHAINS, SEED)
    assert (alone.record < 0).any() and any(alone.tries)
    assert_same(together, alone)
    assert_same(staggered(), alone)


@pytest.mark.parametrize("first_block", [32, 2])  # candidates of the residual before more are searched
def test_launches_of_several_rounds_give_the_tokens_of_single_rounds(first_block, monkeypatch):
    """Their reports are read one launch late."""
    monkeypatch.setattr(verify, "FIRST_BLOCK", first_block)
    assert_same(staggered(replayed()), staggered())


def test_modulations_are_looked_up_or_computed_in_each_round(monkeypatch):
    """Also if the running chains outgrow the table and shrink again, or if no memory is left for a table."""
    expected = staggered()
    for fitting in (0, 6):  # chains
        monkeypatch.setattr("cspd.heads.speculative.table_size", lambda *_, fitting=fitting: fitting * CASE.num_steps)
        assert_same(staggered(), expected)
    monkeypatch.undo()
    monkeypatch.setattr("cspd.heads.chain.TABLE_SHARE", 0)
    assert_same(staggered(), expected)


@pytest.mark.parametrize("failing", ["take", "adopt", "write_modulations"])
def test_chains_that_failed_to_start_take_no_slot(failing, monkeypatch):
    expected, chains = staggered(), CASE.chains(frozen_draft(), WINDOW)
    CASE.start(chains, NUM_CHAINS, SEED, slice(0, 3))
    with monkeypatch.context() as patch:
        patch.setattr(Slots, failing, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            CASE.start(chains, NUM_CHAINS, SEED, slice(3, NUM_CHAINS))
    chains.clear()
    CASE.start(chains, NUM_CHAINS, SEED)
    assert torch.allclose(merge(finish(chains)).tokens, expected.tokens, atol=1e-3)


@pytest.mark.parametrize("graphs", [None, replayed()], ids=["eager", "replayed"])
def test_memory_of_free_slots_may_hold_anything(graphs):
    """The table of modulations is not zeroed, and chains that stay idle or are near step 0 read beyond theirs."""
    expected = staggered(graphs)
    torch.use_deterministic_algorithms(True)  # fills empty tensors with NaN
    try:
        assert torch.empty(1).isnan()
        made = staggered(graphs)
    finally:
        torch.use_deterministic_algorithms(False)
    for name in ("record", "tokens", "log_sigma", "log_sigma_last"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name


@pytest.mark.slow  # tracing takes seconds
def test_a_launch_and_the_residual_are_each_one_program():
    """No graph break: they read nothing on the CPU."""
    torch.compiler.reset()
    chains = CASE.chains(frozen_draft(), WINDOW)
    chains.passes = 2
    CASE.start(chains, 5, SEED)
    rows = chains._padded(chains._chains)
    for function in (chains._run_passes, chains._residual(0, verify.FIRST_BLOCK)):
        torch.compile(function, fullgraph=True, backend="eager")(rows)


def test_a_round_that_decides_no_step_is_an_error():
    """It would loop without end."""
    chains = CASE.chains(frozen_draft(), WINDOW)
    CASE.start(chains, 3, SEED)
    move = verify.move
    chains._move = lambda *args: move(*args)._replace(left=CASE.num_steps - 1 - torch.tensor([1, 0, 2]))
    with pytest.raises(RuntimeError):
        chains.advance()


def test_modulations_are_computed_once_per_chain(small_mar):
    """One product per layer for the chains that join, at all their steps; the rounds look them up."""
    head, products = copy.deepcopy(small_mar.head), []
    layers = [layer.adaLN_modulation[1] for layer in [*head.res_blocks, head.final_layer]]
    for layer in layers:
        layer.register_forward_hook(lambda layer, inputs, output: products.append(output[..., 0].numel()))
    z = torch.randn(2, 1, head.cond_embed.in_features, generator=torch.Generator().manual_seed(0))
    case = Case(head, z, 20, 2.0)
    chains = case.chains(Calibration(*frozen(case.schedule), np.zeros(0)), 4)
    with torch.inference_mode():
        case.start(chains, 9, SEED, slice(0, 5))
        chains.advance()
        case.start(chains, 9, SEED, slice(5, 9))
        finish(chains)
    assert products == [2 * 5 * 20] * len(layers) + [2 * 4 * 20] * len(layers)


@pytest.mark.parametrize("policy", ["bf16", "tf32"])
def test_the_chain_is_in_float32_under_every_policy(policy):
    """This head has no matrix product, so nothing may be rounded: a coarse draft would not follow the q of its test."""
    precision = Precision(policy, torch.device("cpu"))
    exact, coarse = (
        CASE.speculative(frozen_draft(), WINDOW, 20, SEED, **more) for more in ({}, {"precision": precision})
    )
    assert torch.equal(coarse.tokens, exact.tokens)


# ---- What is recorded


def test_records_count_calls():
    case, rows, window = Case(MIXTURE, UNGUIDED, 40), 50, 6
    chains = case.chains(case.calibration(), window)
    case.start(chains, rows, seed=1)
    calls, ended = torch.ones(rows, dtype=torch.int64), []
    while chains.owners:
        calls[list(chains.owners)] += 1
        ended.append(chains.advance())
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
    (verified, accepted), (verified_at, accepted_at) = acceptance(record.numpy(), window)
    assert verified.sum() == verified_at.sum() == rows * 38 and verified_at[0] == verified_at[39] == 0
    assert accepted.sum() == accepted_at.sum() == rows * 38 - (record < 0).sum()


def test_acceptance_of_a_record_made_by_hand():
    record = np.zeros((2, 8), dtype=np.int8)
    record[0, [7, 6, 4, 1]] = 1, -2, 3, 2  # step 6 accepted, 5 rejected; 4 3 2 accepted; 1 accepted, 0 not verified
    record[1, [7, 6, 3]] = 1, 3, -1  # 6 5 4 accepted; 3 rejected;
    record[1, 2] = 3  # 2 1 accepted
    by_lag, by_step = acceptance(record, 4)
    assert by_lag.tolist() == [[6, 4, 2, 0], [5, 3, 2, 0]]
    assert by_step.tolist() == [[0, 2, 2, 2, 2, 2, 2, 0], [0, 2, 2, 1, 2, 1, 2, 0]]


def test_candidates_are_never_drawn_twice():
    """Every residual has its own candidates: no (seed, position, step, first) comes again."""
    seen = []

    class Spy:
        chain = staticmethod(noise.chain)

        @staticmethod
        def candidates(seed, position, step, first, *args):
            asked = zip(seed.tolist(), position.tolist(), step.tolist())
            seen.extend((s, p, t, first) for s, p, t in asked if s)  # rows that only fill up have seed 0
            return noise.candidates(seed, position, step, first, *args)

    TWELVE.speculative(biased(TWELVE, 0.5, -0.25), 3, BATCH, seed=1, noise=Spy)
    assert len(seen) == len(set(seen)) > BATCH


def test_fallbacks_are_counted(monkeypatch):
    for module in (verify, speculative):
        monkeypatch.setattr(module, "FIRST_BLOCK", 2)
        monkeypatch.setattr(module, "MAX_TRIES", 3)
    ended = TWELVE.speculative(biased(TWELVE, 0.5, -0.25), 3, 200, seed=1)
    assert 0 < sum(ended.fallbacks) < sum(ended.tries) / 3
    assert all(tries <= 3 * 11 and 3 * fallbacks <= tries for tries, fallbacks in zip(ended.tries, ended.fallbacks))


@pytest.mark.parametrize("num_steps", [1, 6400, 256_000, 10**7])
def test_only_rounding_gives_more_fallbacks_than_are_allowed(num_steps):
    mean, allowed = num_steps / (math.e * verify.MAX_TRIES), verify.allowed_fallbacks(num_steps)
    assert poisson.sf(allowed, mean) < 1e-7 and allowed < 2 * mean + 14


def test_an_image_with_too_many_fallbacks_is_not_called_exact(small_mar, monkeypatch):
    monkeypatch.setattr(speculative, "FIRST_BLOCK", 1)
    monkeypatch.setattr(speculative, "MAX_TRIES", 1)
    monkeypatch.setattr(verify, "MAX_TRIES", 1)
    engine = Engine(MARModels(small_mar), max_batch=2, device="cpu")
    request = Request(1, method="speculative", window=6, num_iter=2, num_sampling_steps=12)
    for allowed, guarantee in ((10**6, "exact"), (0, "heuristic")):
        monkeypatch.setattr(joined, "allowed_fallbacks", lambda num_steps, allowed=allowed: allowed)
        outputs = engine.generate([request.but(seed=seed) for seed in range(2)])
        assert all(output.stats.fallbacks for output in outputs)
        stats = [output.stats.to_dict() for output in outputs]
        assert [each["guarantee"] for each in stats] == [guarantee] * 2
        summary = summary_of([{**stats[0], "guarantee": "exact"}, stats[1]], 2, 1.0)
        assert summary["guarantee"] == guarantee
