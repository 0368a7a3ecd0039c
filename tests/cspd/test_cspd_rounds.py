"""CSpD's rounds: what is counted of each, requests beside each other, and chains that speculate."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from cspd_by_hand import LENGTH, TOKEN, generate, known_draft, known_target, order_of, plain, request  # noqa: F401 - fixtures

from cspd import Engine, MARModels, Request

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
    assert not engine.runner.kept  # nothing is kept of what is gone


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
