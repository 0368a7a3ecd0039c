"""Rounds as graphs of fixed shape make the codes of single kernels: sequences that join and leave, odd batches."""

from __future__ import annotations

import dataclasses

import pytest
from toys import request_of, toy_models

from cspd import Engine, VQModels
from cspd.discrete.batch import LEAST_BUCKET, bucket
from cspd.sequence import Output
from tests.graphs import replayed

SMALL = {"sjd": {"window": 6}, "sjd-pac": {"window": 7, "pd_k": 3, "pd_d": 2}}
METHODS = ["ar", "sd", "eagle", "eagle2", "lantern", "sjd-pac"]


def outputs(graphed: bool, method: str) -> dict[int, Output]:
    """Of six requests through three slots, one after the other."""
    engine = Engine(VQModels(**toy_models(codes=9, length=16)), max_batch=3, device="cpu")
    if graphed:
        engine.host.graphs = replayed()
    settings = SMALL.get(method, {})
    made: dict[int, Output] = {}
    for seed in range(6):
        request = request_of(method, cfg=1.5 + seed / 4, top_k=seed, **settings)
        engine.add_request(dataclasses.replace(request, seed=seed))
        made |= engine.step()
    while len(made) < 6:
        made |= engine.step()
    return made


@pytest.mark.parametrize("method", METHODS)
def test_graphs_make_the_same_codes(method: str) -> None:
    eager, graphed = outputs(False, method), outputs(True, method)
    for ticket, output in eager.items():
        assert graphed[ticket].tokens.equal(output.tokens)
        assert graphed[ticket].heat.equal(output.heat)
        assert graphed[ticket].stats.committed == output.stats.committed
        assert graphed[ticket].stats.draft_backbone_calls == output.stats.draft_backbone_calls


def test_buckets_are_few_and_never_too_small() -> None:
    for most in range(1100):
        assert most <= bucket(most) <= max(LEAST_BUCKET, most + LEAST_BUCKET - 1, 1.25 * most)
    assert len({bucket(most) for most in range(577)}) <= 8
