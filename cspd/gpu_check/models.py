"""Engines to be checked: the embedded models', and models with random weights at any size."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from cspd import noise as philox_noise
from cspd.continuous.calibration import Calibration
from cspd.continuous.models import MARModels
from cspd.discrete.models import VQModels
from cspd.engine import Engine
from cspd.families import EMBEDDED
from cspd.gpu_check.settings import MODES, Settings
from cspd.loading import load
from cspd.lookup import find
from cspd.sequence import Request
from cspd.vq.eagle import Eagle
from cspd.vq.gpt import GPT, GPTConfig
from cspd.vq.tokenizer import VQModel
from mar.model import MAR, MARConfig

STD = 0.02  # of random weights
M = TypeVar("M", bound=nn.Module)


def modes(settings: Settings) -> list[str]:
    """Those of `MODES` that can be tried: a CPU has no graphs, and to compile takes half a minute."""
    possible = {"eager": True, "compiled": not settings.scale.is_tiny, "graphs": settings.cuda}
    return [mode for mode in MODES if possible[mode]]


def random_model(make: Callable[[Any], M], config: object, device: torch.device) -> M:
    """A model made on the device, its matrices drawn anew.

    A new head's last layer is zero, and products with zeros take less power, so less time, than any others.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = make(config)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=STD)
    return model.eval().requires_grad_(False)


def random_mar(settings: Settings, config: MARConfig, device: torch.device) -> MARModels:
    """A MAR with random weights, and a smaller one that drafts."""
    return MARModels(*(random_model(MAR, each, device) for each in (config, settings.scale.mar_draft)))


def random_gpt(settings: Settings, config: GPTConfig, device: torch.device) -> VQModels:
    """A GPT with random weights, and what drafts for it: a smaller one, and EAGLE's drafter."""
    smaller = dataclasses.replace(settings.scale.gpt_draft, block_size=config.block_size)
    target, draft = (random_model(GPT, each, device) for each in (config, smaller))
    eagle = random_model(Eagle, config, device)
    tokenizer = random_model(VQModel, settings.scale.tokenizer, device)
    return VQModels(target, draft, eagle, tokenizer)


def engine_of(
    settings: Settings,
    models: MARModels | VQModels,
    max_batch: int,
    device: torch.device,
    precision: str = "fp32",
    mode: str = "eager",
    noise: types.ModuleType = philox_noise,
) -> Engine:
    """An engine that runs in one of `MODES`."""
    return Engine(
        models,
        max_batch=max_batch,
        device=device,
        precision=precision,
        cache=settings.cache,
        noise=noise,
        **MODES[mode],
    )


def embedded(settings: Settings, family: str, max_batch: int, device: torch.device, mode: str = "eager") -> Engine:
    """An engine of the embedded models of a family; of small ones with random weights where little is to be done."""
    scale = settings.scale
    if not scale.is_tiny:
        return load(EMBEDDED[family], max_batch=max_batch, device=device, **MODES[mode])
    cpu = torch.device("cpu")  # so that all devices have the same weights
    small = {"MAR": (random_mar, scale.mars), "VQ": (random_gpt, scale.gpts)}
    make, configs = small[family]
    return engine_of(settings, make(settings, configs["B"], cpu), max_batch, device, mode=mode)


def embedded_calibration(settings: Settings) -> Calibration:
    """How often the embedded model's drafts are right."""
    host = embedded(settings, "MAR", 1, settings.device).host
    request = Request(0, method="speculative", window=0, num_sampling_steps=settings.scale.steps)
    return host.tuning.calibrations["target"].get(host.check(request, find("speculative", "MAR")))
