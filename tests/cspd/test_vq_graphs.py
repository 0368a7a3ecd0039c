"""Rounds as graphs, and counted late, make the same codes: sequences that join and leave, odd batches."""

from __future__ import annotations

import dataclasses

import pytest
from toys import request_of, toy_models

from cspd import Engine, VQModels
from cspd.discrete.batch import LEAST_BUCKET, bucket
from cspd.sequence import Output
from tests.graphs import replayed

SMALL = {"sjd": {"window": 6}, "sjd-pac": {"window": 7, "pd_k": 3, "pd_d": 2}}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ar", "sd", "eagle", "lantern", "sjd")]


def outputs(method: str, graphed: bool = False, late: bool = False) -> dict[int, Output]:
    """Of four requests through three slots, one after the other."""
    engine = Engine(VQModels(**toy_models(codes=9, length=16)), max_batch=3, device="cpu")
    if graphed:
        engine.host.graphs = replayed()
    engine.host.late = late
    settings = SMALL.get(method, {})
    made: dict[int, Output] = {}
    for seed in range(4):
        request = request_of(method, cfg=1.5 + seed / 4, top_k=seed, **settings)
        engine.add_request(dataclasses.replace(request, seed=seed))
        made |= engine.step()
    while len(made) < 4:
        made |= engine.step()
    return made


@pytest.mark.parametrize("method", ["eagle2", "sjd-pac", *SLOW])
def test_graphs_and_late_counts_change_nothing(method: str) -> None:
    eager, other = outputs(method), outputs(method, graphed=True, late=True)
    for ticket, output in eager.items():
        assert other[ticket].tokens.equal(output.tokens) and other[ticket].heat.equal(output.heat)
        for name in ("committed", "iterations", "draft_backbone_calls", "by_lag", "bound"):
            assert getattr(other[ticket].stats, name) == getattr(output.stats, name)


def test_buckets_are_few_and_never_too_small() -> None:
    for most in range(1100):
        assert most <= bucket(most) <= max(LEAST_BUCKET, most + LEAST_BUCKET - 1, 1.25 * most)
    assert len({bucket(most) for most in range(577)}) <= 9
