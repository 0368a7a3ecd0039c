"""Rounds as graphs, and counted late, make the same codes: sequences that join and leave, odd batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from graphs import replayed, rerun
from toys import request_of, toy_models

from cspd import Engine, VQModels
from cspd.discrete.batch import LEAST_BUCKET, MOST_NODES, bucket
from cspd.graphs import Graphs
from cspd.request import Output

LARGEST = {"window": MOST_NODES - 1}
WINDOWED = ("sjd", "mc-sjd", "gsd")
SMALL = {name: {"window": 6} for name in WINDOWED} | {"sjd-pac": {"window": 7, "pd_k": 3, "pd_d": 2}}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ar", "sd", "eagle", "lantern", *WINDOWED)]


def engine_of(graphed: bool, late: bool) -> Engine:
    """An engine of three slots."""
    engine = Engine(VQModels(**toy_models(codes=9, length=16)), max_batch=3, device="cpu")
    if graphed:
        engine.runner.graphs = replayed()
    engine.runner.late = late
    return engine


def outputs(method: str, graphed: bool = False, late: bool = False, **settings: object) -> dict[int, Output]:
    """Of four requests, one after the other."""
    engine = engine_of(graphed, late)
    settings = SMALL.get(method, {}) | settings
    made: dict[int, Output] = {}
    for seed in range(4):
        request = request_of(method, cfg=1.5 + seed / 4, top_k=seed, **settings)
        engine.add_request(dataclasses.replace(request, seed=seed))
        made |= engine.step()
    while len(made) < 4:
        made |= engine.step()
    return made


def test_rounds_run_as_the_engines_graphs() -> None:
    engine = engine_of(graphed=False, late=False)
    assert engine.runner.graphs is engine.graphs


def test_graphs_serve_later_images_too() -> None:
    """No memory that they read goes with the images that they were captured for."""
    captured = []

    def capture(*functions: Callable) -> tuple:
        captured.append(functions)
        return rerun(*functions)

    engine = engine_of(graphed=False, late=True)
    engine.runner.graphs = Graphs(engine.device, enabled=True, capture=capture)
    request = request_of("sjd-pac", **SMALL["sjd-pac"])
    engine.generate([request] * 3)
    num_captured = len(captured)
    engine.generate([request] * 3)
    assert 0 < num_captured == len(captured)


@pytest.mark.parametrize("method", ["eagle2", "sjd-pac", *SLOW])
def test_graphs_and_late_counts_change_nothing(method: str) -> None:
    check_same(outputs(method), outputs(method, graphed=True, late=True))


@pytest.mark.parametrize("settings", [LARGEST, LARGEST | {"pd_k": 2, "pd_d": 16}])
def test_a_finished_sequence_has_room_for_a_window(settings: dict) -> None:
    """Where rounds are counted late it takes part in one more."""
    check_same(outputs("sjd", **settings), outputs("sjd", late=True, **settings))


def check_same(eager: dict[int, Output], other: dict[int, Output]) -> None:
    """Codes and statistics."""
    for ticket, output in eager.items():
        assert other[ticket].tokens.equal(output.tokens) and other[ticket].token_cost.equal(output.token_cost)
        for name in ("committed", "iterations", "draft_backbone_calls", "by_lag"):
            assert getattr(other[ticket].stats, name) == getattr(output.stats, name)
        assert other[ticket].stats.bound == pytest.approx(output.stats.bound, rel=1e-6)


def test_buckets_are_few_and_never_too_small() -> None:
    for most in range(1100):
        assert most <= bucket(most) <= max(LEAST_BUCKET, most + LEAST_BUCKET - 1, 1.25 * most)
    assert len({bucket(most) for most in range(577)}) <= 9
