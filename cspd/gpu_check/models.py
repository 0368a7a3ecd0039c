"""What a GPU check runs: models of official sizes with random weights, engines of them, and replayed acceptance."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cspd import noise
from cspd.causal.autoencoders import SphereVAE
from cspd.causal.family import CausalModels
from cspd.causal.models import Causal
from cspd.checkpoints import load
from cspd.device import CUDNN_ATTENTION
from cspd.discrete.family import VQModels
from cspd.discrete.gpt import GPT, VQModel
from cspd.engine import Engine
from cspd.gpu_check.sizes import Setup, Subject
from cspd.heads.calibration import WINDOWS, Calibration
from cspd.kernels import SWITCH
from cspd.masked.family import MARModels
from cspd.method import METHODS, find, parse_method
from cspd.noise import Purpose
from cspd.option import BUNDLED, COMMON
from cspd.request import Request
from mar.model import MAR
from mar.vae import AutoencoderKL

# How an engine computes.


class Mode(NamedTuple):
    """Switches: CUDA graphs (if there are any), torch.compile, our Triton kernels, one backend of attention."""

    graphs: bool = True
    compiled: bool = False
    kernels: bool = True
    attention: str | None = None


BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")  # of PyTorch
DEFAULT, EAGER = Mode(), Mode(graphs=False)
MODES = {
    "default": DEFAULT,
    "no graphs": EAGER,
    "no kernels": Mode(kernels=False),
    "no graphs, no kernels": Mode(graphs=False, kernels=False),
    "EFFICIENT_ATTENTION": Mode(attention="EFFICIENT_ATTENTION"),
    "compiled": Mode(compiled=True),
}


@contextlib.contextmanager
def switched(mode: Mode) -> Iterator[None]:
    """Inside the block the switches of the whole process are those of a mode; engines are made and run there."""
    before = {name: os.environ.get(name) for name in (SWITCH, CUDNN_ATTENTION)}
    chosen = sdpa_kernel([getattr(SDPBackend, mode.attention)]) if mode.attention else contextlib.nullcontext()
    try:
        if not mode.kernels:
            os.environ[SWITCH] = "0"
        if mode.attention == "CUDNN_ATTENTION":  # which is off otherwise
            os.environ[CUDNN_ATTENTION] = "1"
        with chosen:
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


# The models.

STEPS = 100  # T: the bundled model's, so that its calibrations fit
M = TypeVar("M", bound=nn.Module)


def random_model(make: Callable[[Any], M], config: object, device: torch.device) -> M:
    """A model made on the device, with random matrices.

    A new head's last layer is zero, and products with zeros take less power, so less time, than any others.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = make(config)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)  # outputs are as large as inputs
    return model.eval().requires_grad_(False)


@functools.lru_cache(maxsize=1)
def random_models(settings: Setup, subject: Subject) -> MARModels | VQModels | CausalModels:
    """Models with random weights, and their decoder; for VQ models also a smaller one that drafts."""
    scale, make = settings.scale, functools.partial(random_model, device=settings.device)
    if subject.family == "MAR":
        return MARModels(make(MAR, scale.mars[subject.size]), vae=make(AutoencoderKL, scale.vae))
    if subject.family == "causal":
        return CausalModels(make(Causal, scale.causals[subject.size]), make(SphereVAE, scale.sphere_vae))
    config = scale.gpts[subject.size]
    draft = make(GPT, replace(config, n_layer=math.ceil(config.n_layer / 8)))
    tokenizer = make(VQModel, replace(scale.tokenizer, codebook_size=config.vocab_size))
    return VQModels(make(GPT, config), draft, tokenizer=tokenizer)


def engine_of(
    settings: Setup,
    subject: Subject,
    max_batch: int,
    precision: str = "fp32",
    mode: Mode = DEFAULT,
    source: Any = noise,
) -> Engine:
    """An engine of random models; a MAR's has the calibrations of the bundled model, at `bundled_settings`."""
    how: dict[str, Any] = {"graphs": mode.graphs and settings.cuda, "compiled": mode.compiled}
    models = random_models(settings, subject)
    engine = Engine(models, max_batch=max_batch, device=settings.device, precision=precision, noise=source, **how)
    if subject.family == "MAR":
        # A fit takes time, and a round's time does not depend on the numbers in a calibration. Nor on the price of a
        # plan of `budget`, whose rounds are given here: it would be that of random weights.
        engine.runner.tuning.calibrations = bundled("MAR", 1, settings.device).runner.tuning.calibrations
        engine.runner.tuning.priced = lambda request, plan: plan
    return engine


@functools.cache
def bundled(family: str, max_batch: int, device: torch.device, mode: Mode = EAGER) -> Engine:
    """An engine of the bundled models of a family."""
    how: dict[str, Any] = {"graphs": mode.graphs and device.type == "cuda", "compiled": mode.compiled}
    return load(BUNDLED[family], max_batch=max_batch, device=device, **how)


# What is asked of them.

PER_ROUND = {"sd": 2.75, "sjd-pac": 4.25}  # VQ tokens that a round of the bundled models commits: docs/results.md
BUDGET_PLAN = {"denoiser": "calibrated", "head_calls": 32, "null_every": 2, "corrected": False, "backbone": "cached"}


@functools.cache
def bundled_settings(device: torch.device) -> dict[str, Any]:
    """The settings of the bundled MAR whose calibrations are part of the package."""
    checked = bundled("MAR", 1, device).runner.complete(Request(0), find("ar", "MAR"))
    return {option.name: getattr(checked, option.name) for option in COMMON["MAR"]}


@functools.cache
def bundled_calibration(device: torch.device) -> Calibration:
    """The head calls that tokens of the bundled model take in `speculative`."""
    runner = bundled("MAR", 1, device).runner
    checked = runner.complete(Request(0, method="speculative", window=0), find("speculative", "MAR"))
    return runner.tuning.calibrations["target"].get(checked)


def asked(settings: Setup, subject: Subject, name: str) -> tuple[Request, Any]:
    """The request of a method's name with its options, and the noise that replays the acceptance of trained models."""
    method, own = parse_method(name)
    scale, source = settings.scale, noise
    if subject.family == "MAR":
        own = bundled_settings(settings.device) | {"num_iter": scale.num_iter} | own
    if method in PER_ROUND:
        source = tokens_a_round(PER_ROUND[method])
    if method == "speculative":
        own = {"draft": "frozen", "window": scale.window} | own
        calls = bundled_calibration(settings.device).calls
        source = head_calls(calls[WINDOWS.index(own["window"])], settings.device)
    if method == "budget":
        rounds, refreshes = scale.plan
        own = {"budget": 0.3, **BUDGET_PLAN, "kept": "half", "rounds": rounds, "refreshes": refreshes} | own
    return Request(0, method=method, family=subject.family, **own), source


# The images that are compared with those of a CPU, and whose rounds are watched: by bundled models.

IMAGES = 4  # by each method
SHORT = {"num_iter": 8}  # of MAR


def _checked() -> list[tuple[str, str]]:
    """(family, name) of all methods with the options that would depend on the device, and of a combination.

    The third family has no bundled model.
    """
    chosen = {"MAR": "speculative:window=8", "VQ": "speculative:window=8:draft=jacobi"}
    found = [("MAR", "lazymar:denoiser=calibrated")]
    for method in METHODS:
        if method.family in chosen and method.name != "budget":  # its plan depends on the device
            name = chosen[method.family] if method.name == "speculative" else method.name
            found.append((method.family, name))
    return found


CHECKED = _checked()
TINY_SMOKE = [("MAR", "calibrated"), ("MAR", "lazymar:denoiser=calibrated"), ("VQ", "ar")]
SMOKE = [*TINY_SMOKE, ("MAR", "ar"), ("MAR", "speculative:window=8"), ("VQ", "sd"), ("VQ", "sjd-pac")]


def requests(family: str, name: str) -> list[Request]:
    """The images that are compared, by a method's name with its options."""
    method, own = parse_method(name)
    if family == "MAR":
        own |= SHORT
    return [Request(label=i, seed=i, method=method, family=family, **own) for i in range(IMAGES)]


# Acceptance of trained models, replayed for models with random weights.
#
# A model with random weights accepts drafts at random, and time depends on how often. So `cspd.noise` is replaced: a
# uniform draw is 0 where a draft is to be accepted, and above every probability where it is not. All other draws stay.


def _noise_with(**functions: object) -> Any:
    return types.SimpleNamespace(**(vars(noise) | functions))


def head_calls(calls: np.ndarray, device: torch.device) -> Any:
    """Noise with which chains take the head calls of a calibration: `calls`, int [N], of one window."""
    pool = torch.as_tensor(calls, dtype=torch.int64, device=device)

    def chain(seed: Tensor, position: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, eps_t, uniform = noise.chain(seed, position, *others)
        num_steps = uniform.shape[1]
        # The first call is ancestral. The others divide the steps after it evenly; each but the last one ends in a
        # rejection, which is at the last step of its part.
        num_parts = pool[(7919 * seed + position) % len(pool)].unsqueeze(1) - 1
        timestep = torch.arange(num_steps, device=device)
        steps_before = num_steps - 2 - timestep
        steps_after = steps_before + 1
        parts_before = (steps_before * num_parts) // (num_steps - 1)
        parts_after = (steps_after * num_parts) // (num_steps - 1)
        return x, eps_t, torch.where(parts_after > parts_before, torch.inf, 0.0)

    return _noise_with(chain=chain)


def tokens_a_round(num: float) -> Any:
    """Noise with which rounds commit `num` VQ tokens on average, if at least that many are drafted.

    Every num-th token of an image is rejected, and with it all candidates at its position.
    """

    def fine_uniform(
        seed: Tensor, purpose: Tensor | int, position: Tensor, step: Tensor | int = 0, index: Tensor | int = 0
    ) -> Tensor:
        drawn = noise.fine_uniform(seed, purpose, position, step, index)
        shifted = position + 5 * seed  # so that images reject at different positions
        is_rejected = torch.floor((shifted + 1) / num) > torch.floor(shifted / num)
        is_accept = purpose == Purpose.TOKEN_ACCEPT
        if isinstance(is_accept, bool):
            return is_rejected.to(drawn).expand_as(drawn) if is_accept else drawn
        return torch.where(is_accept, is_rejected.to(drawn), drawn)

    return _noise_with(fine_uniform=fine_uniform)
