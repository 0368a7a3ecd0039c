"""With the golden noise injected, the engine makes the golden tokens: the whole sampler against MAR's own code."""

from __future__ import annotations

import pytest
import torch
from conftest import relative_error

from cspd import Engine, MARModels, Request


class GoldenNoise:
    """The golden file's draws; a request's seed is its row in the file."""

    def __init__(self, golden: dict) -> None:
        self.golden = golden

    def order(self, seed: torch.Tensor, length: int) -> torch.Tensor:
        return self.golden["sample.orders"][seed].flip(1)  # the file's orders are consumed from their end

    def initial(self, seed: torch.Tensor, position: torch.Tensor, channels: int, index: int) -> torch.Tensor:
        return self.golden["sample.init_noise"][seed, position]

    def steps(
        self, seed: torch.Tensor, position: torch.Tensor, step: torch.Tensor, channels: int, index: int
    ) -> torch.Tensor:
        return self.golden["sample.step_noise"][seed, position][:, step].transpose(0, 1)


CASES = {
    "iter4": dict(num_iter=4, cfg=1.0),
    "iterL": dict(num_iter=64, cfg=1.0),
    "iterL_cfg2": dict(num_iter=64, cfg=2.0, cfg_schedule="linear"),
    "iter4_cfg3_linear": dict(num_iter=4, cfg=3.0, cfg_schedule="linear"),
    "iter4_cfg3_constant_t095": dict(num_iter=4, cfg=3.0, cfg_schedule="constant", temperature=0.95),
}


@pytest.mark.parametrize("case", CASES)
def test_samples_match(case, mar_golden, small_mar):
    engine = Engine(MARModels(small_mar), max_batch=2, noise=GoldenNoise(mar_golden))  # 2 slots for 3: one starts late
    settings = {"method": "ar", "temperature": 1.0, **CASES[case]}
    labels = mar_golden["sample.labels"].tolist()
    outputs = engine.generate([Request(label, seed=i, **settings) for i, label in enumerate(labels)])
    tokens = torch.stack([output.tokens for output in outputs])
    assert relative_error(tokens, mar_golden[f"sample.tokens.{case}"]) < 1e-3
