"""Every order with every backbone and denoiser: images do not depend on the batch, cost and guarantee are right.

The cases are read from the registries, so a new name is tested without a change here.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from toys import SMALL, staggered

from cspd import Engine, MARModels, Request
from cspd.continuous.denoisers import DENOISERS, of_kind
from cspd.heads.samplers import DIFFUSION
from cspd.masked.backbones import BACKBONES
from cspd.masked.orders import ORDERS
from cspd.method import METHODS
from mar.head import ReadyHead
from mar.model import MAR

ROUNDING = 1e-3  # of the largest token
GUARANTEES = {"ancestral": "exact", "speculative": "exact", "calibrated": "approximate"}  # others are heuristic


def methods_with(option: str) -> dict:
    """MAR's methods that have an option, by name."""
    found = [m for m in METHODS if m.family == "MAR" and option in {own.name for own in m.options}]
    return {method.name: method for method in found}


SAMPLERS = methods_with("order")
ANY_DENOISER = [name for name in methods_with("denoiser") if name in SAMPLERS]
FAR = {"order": [*ORDERS][-1], "backbone": [*BACKBONES][-1]}  # far from `ar`
POINTS = [
    {"order": order, "backbone": backbone, "denoiser": denoiser}
    for order, backbone, denoiser in itertools.product(ORDERS, BACKBONES, of_kind(DIFFUSION))
]


def cases() -> list:
    """All points; only those far from `ar`, whose denoiser needs no calibration, are in the fast set."""
    found = []
    for choices in POINTS:
        is_quick = FAR.items() <= choices.items() and DENOISERS[choices["denoiser"]].needs == "-"
        found.append(pytest.param(choices, marks=() if is_quick else pytest.mark.slow))
    return found


def requests_of(method: str, choices: dict[str, str]) -> list[Request]:
    """Three quick requests with different K, with these choices on the axes."""
    settings = {"method": method, "family": "MAR", "cfg": 2.0, "num_sampling_steps": 5, **choices}
    applied = {name: SMALL[name] for name in SMALL if SAMPLERS[method].option(name, Request(0, **settings))}
    return [Request(i, i, num_iter=num_iter, **settings, **applied) for i, num_iter in enumerate((5, 3, 4))]


@pytest.fixture(scope="module")
def engines(small_mar: MAR) -> tuple[Engine, Engine]:
    """An engine with three slots and one with one slot; they share calibrations."""
    several = Engine(MARModels(small_mar), max_batch=3, device="cpu")
    return several, several.with_slots(1)


@pytest.fixture
def rows(monkeypatch):
    """The number of rows of every call of the head that evaluates its blocks, while the test runs."""
    numbers = []
    through_blocks = ReadyHead.through_blocks

    def counted(ready: ReadyHead, *args: object) -> torch.Tensor:
        output = through_blocks(ready, *args)
        numbers.append(output.shape[:-1].numel())
        return output

    monkeypatch.setattr(ReadyHead, "through_blocks", counted)
    return numbers


def check(requests: list[Request], guarantee: str, engines: tuple[Engine, Engine], rows: list[int]) -> None:
    several, single = engines
    resolved = [several.resolve(request) for request in requests]  # calibrates
    for output, request in zip(staggered(several, requests), resolved):
        rows.clear()
        (alone,) = single.generate([request])
        assert output.error is None and output.tokens.isfinite().all()
        assert (output.tokens != 0).all(), "a token was not predicted"
        assert (output.tokens - alone.tokens).abs().max() < ROUNDING * alone.tokens.abs().max()
        assert torch.equal(output.token_cost, alone.token_cost)

        assert output.stats.guarantee == alone.stats.guarantee == guarantee
        assert output.stats.iterations == output.stats.backbone_calls == request.num_iter
        assert output.stats.head_calls == alone.stats.head_calls == len(rows)
        assert output.stats.head_evaluations == alone.stats.head_evaluations
        assert 0.9 * sum(rows) < alone.stats.head_evaluations <= sum(rows)  # speculation rounds its rows up
        assert output.stats.head_calls_per_token == pytest.approx(output.token_cost.mean().item())


@pytest.mark.parametrize("choices", cases(), ids=lambda choices: "-".join(choices.values()))
def test_every_point(choices, engines, rows):
    """Methods that can be combined with any denoiser take turns."""
    order, backbone, denoiser = choices.values()
    is_baseline = (order, backbone) == ("random", "full")
    guarantee = GUARANTEES.get(denoiser, "heuristic") if is_baseline else "heuristic"
    method = ANY_DENOISER[POINTS.index(choices) % len(ANY_DENOISER)]
    check(requests_of(method, choices), guarantee, engines, rows)


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in SAMPLERS if name not in ANY_DENOISER])
def test_methods_named_after_a_denoiser(method, engines, rows):
    check(requests_of(method, FAR), "heuristic", engines, rows)
