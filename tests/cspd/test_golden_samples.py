"""With the golden noise injected, the engine makes the golden tokens: the whole sampler against MAR's own code."""

from __future__ import annotations

import pytest
import torch
from conftest import relative_error

from cspd import Engine, MARModels, Request
from cspd.gpu_check.run import SAMPLE_SETTINGS, GoldenNoise


@pytest.mark.parametrize("case", SAMPLE_SETTINGS)
def test_samples_match(case, mar_golden, small_mar):
    engine = Engine(MARModels(small_mar), max_batch=2, noise=GoldenNoise(mar_golden))  # 2 slots for 3: one starts late
    settings = {"method": "ar", "temperature": 1.0, **SAMPLE_SETTINGS[case]}
    labels = mar_golden["sample.labels"].tolist()
    rows = [0, 1, 0]
    outputs = engine.generate([Request(labels[row], seed=row, **settings) for row in rows])
    tokens = torch.stack([output.tokens for output in outputs])
    assert relative_error(tokens, mar_golden[f"sample.tokens.{case}"][rows]) < 1e-3
