"""Engines with kernels generate the tokens of engines without."""

import pytest
import torch
from conftest import relative_error
from toys import toy_mar

from cspd import Engine, MARModels, Output, Request, kernels

SETTINGS = {"cfg": 2.0, "num_iter": 1, "num_sampling_steps": 6}
METHODS = {
    "ar": {"first_timestep": 950},
    "calibrated": {"head_calls": 3},
    "speculative": {"window": 2, "draft": "frozen"},
    "lazymar": {"first_timestep": 950, "warmup": 1, "refresh": 2},
}
MAX_ERROR = {"fp32": 1e-4, "bf16": 1e-2}  # only kernels keep sums between products in float32


def generated(request: Request, precision: str) -> Output:
    engine = Engine(MARModels(toy_mar(2)), max_batch=1, device="cpu", precision=precision)
    (output,) = engine.generate([request])
    return output


@pytest.mark.parametrize("method,precision", [*((method, "fp32") for method in METHODS), ("speculative", "bf16")])
def test_tokens_agree(method, precision, monkeypatch):
    request = Request(1, 1, method, **SETTINGS, **METHODS[method])
    expected = generated(request, precision)
    monkeypatch.setattr(kernels, "available", lambda device: True)
    output = generated(request, precision)
    assert relative_error(output.tokens, expected.tokens) < MAX_ERROR[precision]
    assert torch.equal(output.token_cost, expected.token_cost)
    assert (output.stats.by_lag, output.stats.by_step) == (expected.stats.by_lag, expected.stats.by_step)
