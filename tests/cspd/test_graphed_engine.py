"""An engine that replays its work makes the images of one that does not: in any batch, with requests that join."""

from __future__ import annotations

import pytest
import torch
from graphs import replayed
from toys import SMALL, staggered, toy_mar

import cspd
from cspd import Engine, MARModels, Request
from cspd.method import METHODS

ROUNDING = 1e-3  # of the largest token
MAR_METHODS = {method.name: method for method in METHODS if method.family == "MAR"}
QUICK = ("ar", "speculative", "calibrated", "gtr", "lazymar")
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MAR_METHODS]


def requests_of(method: str, num: int, **settings: object) -> list[Request]:
    """Quick requests of unequal K, so that the batch has odd sizes and unequal progress."""
    common = {"method": method, "cfg": 2.0, "num_sampling_steps": 4} | settings
    usual = MAR_METHODS[method].fill(Request(0, **common))
    applied = {name: SMALL[name] for name in SMALL if MAR_METHODS[method].option(name, usual)}
    return [Request(i % 4, i, num_iter=3 + i % 3, **common, **applied) for i in range(num)]


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    """Without graphs and with them; five slots, which batches of two, three and five do not fill alike."""
    models = MARModels(toy_mar(), draft=toy_mar(depth=2))
    eager, graphed = (Engine(models, max_batch=5, device="cpu") for _ in range(2))
    graphed.runner.adopt(eager.runner)  # calibrated once
    graphed.runner.graphs = replayed()
    return eager, graphed


def check(engines: tuple[Engine, Engine], requests: list[Request]) -> None:
    eager, graphed = engines
    for own, other in zip(staggered(graphed, requests), staggered(eager, requests)):
        assert own.error is None
        assert (own.tokens - other.tokens).abs().max() < ROUNDING * other.tokens.abs().max()
        assert torch.allclose(own.token_cost, other.token_cost, equal_nan=True)
        assert own.stats.head_calls_per_token == other.stats.head_calls_per_token
    graphs = graphed.runner.graphs
    staggered(graphed, requests)  # slots of chains grew in the first images, and have stayed
    captured = set(graphs._recorded)
    staggered(graphed, requests)
    assert captured == set(graphs._recorded) and not graphs._retired, "the same work is captured again"


@pytest.mark.parametrize("method", CASES)
def test_equal_images(method, engines):
    check(engines, requests_of(method, 5))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "calibrated", "lazymar"])
def test_equal_images_of_a_trained_model(method):
    eager, graphed = (cspd.load("digits32", max_batch=3, device="cpu") for _ in range(2))
    graphed.runner.graphs = replayed()
    settings = {"method": method, "num_sampling_steps": 30, "cfg": 3.0}
    check((eager, graphed), [Request(i, i, num_iter=num_iter, **settings) for i, num_iter in enumerate((6, 9, 7, 5))])
