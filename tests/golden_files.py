"""Golden tensors, made by the code that the models' authors released; make_golden.py makes most of the files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from cspd import noise
from cspd.noise import Purpose
from mar.model import MAR, MARConfig

GOLDEN = Path(__file__).parent / "golden"
SAMPLE_SETTINGS = {  # settings of the samples in MAR's file
    "iter4": dict(num_iter=4, cfg=1.0),
    "iterL": dict(num_iter=64, cfg=1.0),
    "iterL_cfg2": dict(num_iter=64, cfg=2.0, cfg_schedule="linear"),
    "iter4_cfg3_linear": dict(num_iter=4, cfg=3.0, cfg_schedule="linear"),
    "iter4_cfg3_constant_t095": dict(num_iter=4, cfg=3.0, cfg_schedule="constant", temperature=0.95),
}


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

    The weights are in the file (`model.`), or else drawn: then the file has their names and shapes.
    """

    def __init__(self, name: str) -> None:
        with safe_open(GOLDEN / name, "pt") as file:
            super().__init__({key: file.get_tensor(key) for key in file.keys()})
            metadata = file.metadata()
        self.config = json.loads(metadata["config"])
        self.weights = drawn_weights(json.loads(metadata.get("shapes", "{}")))
        self.weights |= {key.removeprefix("model."): self[key] for key in self if key.startswith("model.")}


class GoldenNoise:
    """The random numbers of a golden file, in place of `cspd.noise`; a request's seed is its row in the file."""

    def __init__(self, golden: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        names = ("sample.orders", "sample.init_noise", "sample.step_noise")
        self.orders, self.init_noise, self.step_noise = (golden[name].to(device) for name in names)

    def order(self, seed: Tensor, length: int) -> Tensor:
        return self.orders[seed].flip(1)  # the file's orders are consumed from their end

    def initial(self, seed: Tensor, position: Tensor, channels: int, index: int) -> Tensor:
        return self.init_noise[seed, position]

    def steps(self, seed: Tensor, position: Tensor, step: Tensor, channels: int, index: int) -> Tensor:
        return self.step_noise[seed, position][:, step].transpose(0, 1)


def golden_mar(golden: Golden) -> MAR:
    """The small MAR of its golden file."""
    c = golden.config
    config = MARConfig(
        img_size=c["img"],
        vae_stride=c["stride"],
        patch_size=c["patch"],
        vae_embed_dim=c["C"],
        class_num=c["cls"],
        embed_dim=c["D"],
        depth=c["L"],
        num_heads=c["H"],
        buffer_size=c["buf"],
        diffloss_w=c["w"],
        diffloss_d=c["d"],
    )
    model = MAR(config)
    model.load_state_dict(golden.weights)
    return model.eval().requires_grad_(False)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest deviation over largest magnitude."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()
