"""ZipAR: a lag of a whole row is `ar`; a shorter one has another distribution, which is enumerated here."""

from __future__ import annotations

import pytest
import torch
from toys import (
    admitted,
    counts,
    distribution,
    draw,
    p_value,
    request_of,
    runner_of,
    sequences,
    staggered,
    toy_models,
)

from cspd import Engine, Request, VQModels
from cspd.discrete.kv_cache import seen_of

NUM = 10_000
SAME = 1e-4  # p-values are above it; seeds are fixed, so that the right distribution never fails
SIDE = 4
MIXED = [{"cfg": 3.0}, {"cfg": 1.0, "temperature": 0.7}, {"cfg": 2.0, "top_k": 3, "top_p": 0.8}, {"temperature": 0.0}]


@pytest.fixture(scope="module")
def models() -> VQModels:
    return VQModels(**toy_models(codes=11, length=SIDE**2))


def requests_of(method: str, **settings: object) -> list[Request]:
    requests = []
    for seed, own in enumerate([*MIXED, {}, {}]):
        requests.append(Request(label=seed % 3, seed=seed, method=method, **{"cfg": 1.5, **own, **settings}))
    return requests


def test_a_lag_of_a_whole_row_is_ar(models):
    """Token for token, also if requests are at different tokens."""
    engine = Engine(models, max_batch=3, device="cpu")
    plain = engine.generate(requests_of("ar"))
    whole_rows = staggered(engine, requests_of("zipar", lag=SIDE))
    for output, expected in zip(whole_rows, plain):
        assert torch.equal(output.tokens, expected.tokens)
        assert output.stats.backbone_calls == SIDE**2
    shorter = engine.generate(requests_of("zipar"))
    assert any(not torch.equal(output.tokens, expected.tokens) for output, expected in zip(shorter, plain))


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_other_requests_and_given_rows_change_no_image(lag, models):
    engine = Engine(models, max_batch=3, device="cpu")
    requests = requests_of("zipar", lag=lag)
    alone = [engine.generate([request])[0] for request in requests]
    for output, expected in zip(staggered(engine, requests), alone):
        assert torch.equal(output.tokens, expected.tokens)
        assert output.stats.guarantee == "heuristic"
        assert (
            output.stats.backbone_calls == 2 * SIDE + (SIDE - 2) * lag
        )  # the first row is alone, as the second begins
        assert sum(tokens * rounds for tokens, rounds in output.stats.committed.items()) == SIDE**2

    # the first row is given
    mask = torch.arange(SIDE**2) >= SIDE
    for request, expected in zip(requests, alone):
        (output,) = engine.generate([request.but(image=expected.tokens, mask=mask)])
        assert torch.equal(output.tokens, expected.tokens)


@pytest.mark.parametrize("settings, given", [({"lag": SIDE + 1}, 0), ({"lag": 0}, 0), ({}, SIDE + 1)])
def test_bad_lags_and_rows_given_in_part(settings, given, models):
    engine = Engine(models, max_batch=1, device="cpu")
    mask = torch.arange(SIDE**2) >= given
    request = Request(label=0, seed=0, method="zipar", image=torch.zeros(SIDE**2).long(), mask=mask, **settings)
    with pytest.raises(ValueError, match="lag" if settings else "rows"):
        engine.check(request)


# What each input looks at if three rows of three tokens have a lag of 1. Inputs are numbered by their positions; the
# last one is the first of row 2 with its proxy, the last token of row 0, until row 1 is whole.
PROXY = 9
LOOKS_AT = [
    [0],
    [0, 1],
    [0, 1, 2],
    [0, 1, 2, 3],
    [0, 1, 2, 3, 4],
    [0, 1, 2, 3, 4, 5],
    [0, 1, 2, 3, 4, 5, 6],
    [0, 1, 2, 3, 4, 5, PROXY, 7],
    [0, 1, 2, 3, 4, 5, 6, 7, 8],
    [0, 1, 2, 3, 4, PROXY],  # together with the second token of row 1
]


def law(models: dict, request: Request) -> torch.Tensor:
    """The probability of each of `sequences` with a lag of 1, by one forward pass with the mask above."""
    every = sequences(2, 9)
    runner = runner_of(models, len(every))
    batch = runner.batch_of(admitted(runner, request, range(len(every))))
    sees = torch.zeros(10, 10, dtype=torch.bool)
    for node, others in enumerate(LOOKS_AT):
        sees[node, others] = True
    before = every[:, [0, 0, 1, 2, 3, 4, 5, 6, 7, 2]]  # the first is the condition
    depth = torch.tensor([*range(9), 6])
    runner.begin(None)
    with torch.inference_mode():
        P = runner.distributions(batch, runner.features(batch, before, depth=depth, seen=seen_of(sees)))
    P = P[:, [0, 1, 2, 3, 4, 5, PROXY, 7, 8]].double()
    return P.gather(-1, every.unsqueeze(-1)).squeeze(-1).prod(1)


def test_the_distribution_of_an_image():
    """Not the target's, and the one that the schedule implies."""
    models = toy_models(codes=2, length=9)
    request = request_of("zipar", lag=1)
    tokens, statistics = draw(models, request, NUM, batch=NUM)
    observed = counts(tokens, 2)
    assert p_value(observed, law(models, request)) > SAME
    target = distribution(models["target"], request)
    assert p_value(observed, target) < 1e-12
    assert 0.5 * (observed / NUM - target).abs().sum() > 0.1
    assert statistics[0].backbone_calls == 7
