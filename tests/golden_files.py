"""Golden tensors, made by the code that the models' authors released; make_golden.py makes most of the files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from cspd import noise
from cspd.noise import Purpose

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_MAR = Path(__file__).parents[1] / "checkpoints/digits32/draft.safetensors"  # weights of the small golden MAR
IMAGES, CODES = 10_000, 20_000  # streams of drawn inputs; weights have the first ones
SAMPLE_SETTINGS = {  # settings of the samples in MAR's file
    "iter4": dict(num_iter=4, cfg=1.0),
    "iterL": dict(num_iter=64, cfg=1.0),
    "iterL_cfg2": dict(num_iter=64, cfg=2.0, cfg_schedule="linear"),
    "iter4_cfg3_linear": dict(num_iter=4, cfg=3.0, cfg_schedule="linear"),
    "iter4_cfg3_constant_t095": dict(num_iter=4, cfg=3.0, cfg_schedule="constant", temperature=0.95),
}


def official_shapes(name: str) -> dict[str, dict[str, list[int]]]:
    """The shapes of the official models' tensors, by model and name: in the file, {n} stands for each of 0 .. n - 1."""
    models = json.loads((GOLDEN / f"shapes_{name}.json").read_text())
    found: dict[str, dict[str, list[int]]] = {model: {} for model in models}
    for model, shapes in models.items():
        for tensor, shape in shapes.items():
            layers = re.search(r"\{(\d+)\}", tensor)
            numbers = range(int(layers[1])) if layers else [0]
            found[model] |= {re.sub(r"\{\d+\}", str(number), tensor): shape for number in numbers}
    return found


def drawn(stream: int, shape: Sequence[int]) -> Tensor:
    """Uniform numbers of mean 0 and variance 1, the same on every machine."""
    draws = noise.uniform(torch.tensor(0), Purpose.LATENT, torch.tensor(stream), num=math.prod(shape))
    return (draws - 0.5).view(*shape) * math.sqrt(12)


def drawn_weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Weights of a model by the names and shapes of its parameters."""
    weights = {}
    for stream, name in enumerate(sorted(shapes)):
        values = drawn(stream, shapes[name])
        if values.dim() > 1:
            weights[name] = values / math.sqrt(math.prod(values.shape[1:]))
        else:
            weights[name] = 0.1 * values + name.endswith("weight")  # of a norm, or a bias
    return weights


class Golden(dict):
    """The tensors of a golden file by name, with `config` and `weights` of its model.

    The weights are drawn, by the names and shapes in the file; buffers (`model.`) are in the file.
    """

    def __init__(self, name: str) -> None:
        with safe_open(GOLDEN / name, "pt") as file:
            super().__init__({key: file.get_tensor(key) for key in file.keys()})
            metadata = file.metadata()
        self.config = json.loads(metadata["config"])
        self.weights = drawn_weights(json.loads(metadata.get("shapes", "{}")))
        self.weights |= {key.removeprefix("model."): self[key] for key in self if key.startswith("model.")}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest deviation over largest magnitude."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()
