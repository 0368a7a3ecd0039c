"""Distributions: exact methods against plain sampling, and the coupling that they rest on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cspd import noise
from cspd.continuous.gaussian import log_ratio, resample, residual
from cspd.evaluation.two_sample import energy_test
from cspd.gpu_check.models import embedded
from cspd.gpu_check.settings import Cases, Settings
from cspd.sequence import Output, Request

LEAST_P = 1e-3
PAIRS = {  # log sigmas and means of p and q, which differ by about as much as drafts do, and by more
    "near": ((0.0, 0.0), (0.3, 0.1)),
    "wider q": ((0.0, 0.0), (0.5, 0.3)),
    "narrower q": ((0.0, 0.0), (0.5, -0.3)),
}
CHANNELS = 4
MOST_BATCH = 250


def cases(settings: Settings) -> Cases:
    found: Cases = {
        "MAR speculative": lambda: _two_samples(settings, "MAR", "speculative", **_mar(settings), window=8),
        "VQ sjd-pac": lambda: _two_samples(settings, "VQ", "sjd-pac"),
    }
    return found | {f"coupling, {name}": lambda name=name: _coupling(settings, name) for name in PAIRS}


def _mar(settings: Settings) -> dict[str, int]:
    return {name: settings.scale.same_seeds[name] for name in ("num_iter", "num_sampling_steps")}


def _two_samples(settings: Settings, family: str, name: str, **own: object) -> dict[str, Any]:
    """Of images by a method and, with other seeds, by plain sampling."""
    num = settings.scale.images
    engine = embedded(settings, family, min(num, MOST_BATCH), settings.device)
    plain = {key: value for key, value in own.items() if key != "window"}

    def made(method: str, first: int, options: dict[str, object]) -> Tensor:
        requests = [
            Request(label=i % engine.host.num_classes, seed=first + i, method=method, family=family, **options)
            for i in range(num)
        ]
        return torch.stack([_picture(output) for output in engine.generate(requests)])

    p = energy_test(made("ar", 0, plain), made(name, num, own))
    return {"images": num, "p_value": p, "passed": p > LEAST_P}


def _picture(output: Output) -> Tensor:
    """The image, or the tokens of a model without a decoder, flat."""
    picture = output.tokens if output.image is None else output.image
    return picture.flatten().float()


@torch.inference_mode()
def _coupling(settings: Settings, name: str) -> dict[str, Any]:
    """Draws of p made of draws of q, by acceptance, mirror and residual: standardised, are they standard normal?"""
    num, device = settings.scale.samples, settings.device
    generator = torch.Generator(device).manual_seed(0)
    p, q = (tuple(torch.full((num, CHANNELS), value, device=device) for value in gaussian) for gaussian in PAIRS[name])
    x = torch.normal(q[0], q[1].exp(), generator=generator)
    log_uniform = torch.rand(num, generator=generator, device=device).log()
    accepted = log_uniform < log_ratio(x, p, q)
    mirrored, lost = resample(x, log_uniform, p, q)
    made = torch.where(accepted.unsqueeze(1), x, mirrored)
    rows = (~accepted & lost).nonzero().squeeze(1)

    def draws(first: int, count: int) -> tuple[Tensor, Tensor]:
        normals, uniform = noise.candidates(rows, rows, torch.ones_like(rows), first, count, CHANNELS)
        return normals, uniform.log()

    if len(rows):
        made[rows], _ = residual(*(tuple(each[rows] for each in gaussian) for gaussian in (p, q)), draws)
    standard = (made - p[0]) * torch.exp(-p[1])
    least = min(normal_p(column) for column in standard.T) * CHANNELS
    found = {"samples": num, "accepted": accepted.double().mean().item(), "residual": len(rows) / num}
    return found | {"p_value": min(1.0, least), "passed": least > LEAST_P}


def normal_p(x: Tensor) -> float:
    """p-value of the hypothesis that x [N] is standard normal, by Kolmogorov and Smirnov's test for large N."""
    ordered = torch.special.ndtr(x.double().sort().values)
    num = len(x)
    below = torch.arange(num, device=x.device) / num
    distance = torch.maximum(ordered - below, below + 1 / num - ordered).max().item()
    scaled = distance * math.sqrt(num)
    if scaled < 0.2:  # the series below converges slowly there, to 1
        return 1.0
    return 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
