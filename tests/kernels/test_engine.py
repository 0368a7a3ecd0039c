"""Engines whose device has kernels make the tokens that PyTorch's operations make."""

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
MOST = {"fp32": 1e-4, "bf16": 1e-2}  # sums between products are in float32 by kernels only


def made(request: Request, precision: str) -> Output:
    engine = Engine(MARModels(toy_mar(2)), max_batch=1, device="cpu", precision=precision)
    (output,) = engine.generate([request])
    return output


@pytest.mark.filterwarnings("ignore:a chain of 6 denoising steps")
@pytest.mark.parametrize("method,precision", [*((method, "fp32") for method in METHODS), ("speculative", "bf16")])
def test_tokens_agree(method, precision, monkeypatch):
    request = Request(1, 1, method, **SETTINGS, **METHODS[method])
    expected = made(request, precision)
    monkeypatch.setattr(kernels, "available", lambda device: True)
    output = made(request, precision)
    assert relative_error(output.tokens, expected.tokens) < MOST[precision]
    assert torch.equal(output.token_cost, expected.token_cost)
    assert (output.stats.by_lag, output.stats.by_step) == (expected.stats.by_lag, expected.stats.by_step)
