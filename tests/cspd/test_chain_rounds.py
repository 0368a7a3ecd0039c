"""Rounds of chains that speculate: records, neighbours, modulations, candidates, and what is counted."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from heads import BATCH, FP32, Case, finish, merge
from mixtures import MIXTURE, NULL_CLASS, TWELVE, UNGUIDED, ChangedUniforms, biased

from cspd import noise
from cspd.device import Precision
from cspd.heads import speculative, verify
from cspd.heads.calibration import Calibration, frozen
from cspd.heads.speculative import acceptance


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
