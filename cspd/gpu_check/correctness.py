"""Correctness: golden tensors, random bits, and the same images by every device and way to run."""

from __future__ import annotations

import functools
from typing import Any

import torch

from cspd import noise
from cspd.continuous.models import MARModels
from cspd.engine import Engine
from cspd.gpu_check import golden
from cspd.gpu_check.models import embedded, modes
from cspd.gpu_check.settings import Cases, Settings
from cspd.methods import METHODS
from cspd.sequence import Output, Request
from cspd.vq.gpt import GPT, GPTConfig

CPU = torch.device("cpu")
ITSELF = "this is the CPU"  # which agrees with itself
GOLDEN_SAMPLES, GOLDEN_LOGITS = 1e-3, 1e-5  # relative errors
ROUNDING = 1e-4  # of normals, absolute
WINDOW = 8  # of `speculative`, which otherwise depends on the device
ALIKE = 0.01  # r.m.s. difference, in standard deviations of the tokens, of two images that differ by rounding alone
MOST_CHANGED = 0.5  # of the images, by decisions that rounding flipped


def cases(settings: Settings) -> Cases:
    found: Cases = {
        f"golden {name}": lambda name=name: _golden_sample(settings, name) for name in settings.scale.golden
    }
    found["golden logits"] = lambda: _golden_logits(settings)
    found["random bits"] = lambda: _random_bits(settings)

    @functools.cache
    def engine(family: str, device: torch.device, mode: str) -> Engine:
        return embedded(settings, family, settings.scale.same_seeds["images"], device, mode)

    @functools.cache
    def outputs(family: str, name: str, device: torch.device, mode: str) -> list[Output]:
        return engine(family, device, mode).generate(requests(settings, family, name))

    def same(family: str, name: str, one: tuple[torch.device, str], other: tuple[torch.device, str]) -> dict[str, Any]:
        if one == other:
            return {"skipped": ITSELF}
        return compared(outputs(family, name, *one), outputs(family, name, *other))

    every = [(method.family, method.name) for method in METHODS]
    eager = settings.device, "eager"
    for family, name in every:
        found[f"{family} {name}: as on a CPU"] = functools.partial(same, family, name, (CPU, "eager"), eager)
    for mode in modes(settings):
        for family, name in every if mode != "eager" else []:
            case = functools.partial(same, family, name, eager, (settings.device, mode))
            found[f"{family} {name}: {mode} as eager"] = case
    return found


def requests(settings: Settings, family: str, name: str) -> list[Request]:
    """The images of which two devices, or two ways to run, are compared."""
    own: dict[str, object] = {}
    if family == "MAR":
        own = {key: value for key, value in settings.scale.same_seeds.items() if key != "images"}
    if name == "speculative":
        own |= {"window": WINDOW} | ({"draft": "jacobi"} if family == "VQ" else {})
    num = settings.scale.same_seeds["images"]
    return [Request(label=i, seed=i, method=name, family=family, **own) for i in range(num)]


def compared(ours: list[Output], theirs: list[Output]) -> dict[str, Any]:
    """How far the same requests' outputs are apart.

    A flipped decision is a token that took another number of head calls, or a code that was accepted by one alone.
    """
    a, b = (torch.stack([output.tokens for output in outputs]).double() for outputs in (ours, theirs))
    heat = [torch.stack([output.heat for output in outputs]).nan_to_num(-1) for outputs in (ours, theirs)]
    found: dict[str, Any] = {"flipped": int((heat[0] != heat[1]).sum())}
    if ours[0].request.family == "VQ":
        differs = a != b
        found["differing_codes"] = differs.double().mean().item()
        is_changed = differs.any(1)
    else:
        squares = (a - b).square().flatten(1).mean(1) / a.var()
        found["rms_error"] = squares.mean().sqrt().item()
        is_changed = ~(squares.sqrt() <= ALIKE)
    share = is_changed.double().mean().item()
    return found | {"changed_images": share, "passed": share <= MOST_CHANGED}


def _golden_sample(settings: Settings, name: str) -> dict[str, Any]:
    if not golden.FOLDER.is_dir():
        return {"skipped": f"no {golden.FOLDER.name} tensors in this installation: take a checkout"}
    tensors = golden.Golden("mar_small.safetensors")
    models = MARModels(golden.golden_mar(tensors))
    engine = Engine(models, max_batch=2, device=settings.device, noise=golden.GoldenNoise(tensors, settings.device))
    own = {"method": "ar", "temperature": 1.0, **golden.SAMPLES[name]}
    labels, rows = tensors["sample.labels"].tolist(), [0, 1, 0]  # through 2 slots: one starts late
    made = engine.generate([Request(labels[row], seed=row, **own) for row in rows])
    tokens = torch.stack([output.tokens for output in made])
    error = golden.relative_error(tokens, tensors[f"sample.tokens.{name}"][rows])
    return {"relative_error": error, "passed": error < GOLDEN_SAMPLES}


@torch.inference_mode()
def _golden_logits(settings: Settings) -> dict[str, Any]:
    if not golden.FOLDER.is_dir():
        return {"skipped": f"no {golden.FOLDER.name} tensors in this installation: take a checkout"}
    tensors = golden.Golden("gpt_small.safetensors")
    model = GPT(GPTConfig(**tensors.config))
    model.load_state_dict(tensors.weights)
    model.eval().to(settings.device)
    labels, tokens = (tensors[name].to(settings.device) for name in ("labels", "tokens"))
    error = golden.relative_error(model(labels, tokens[:, :-1]).cpu(), tensors["logits"])
    return {"relative_error": error, "passed": error < GOLDEN_LOGITS}


def _random_bits(settings: Settings) -> dict[str, Any]:
    """The generator's words and uniform draws, which are alike to the bit, and normals, which are rounded."""
    if settings.device == CPU:
        return {"skipped": ITSELF}
    drawn = []
    for device in (CPU, settings.device):
        seed = torch.tensor([0, 1, 2**31, 2**40 + 7, 2**63 - 1], device=device).unsqueeze(1)
        position = torch.arange(500, device=device)
        place = seed, noise.Purpose.CODE, position, 2**32 - 1, 5
        *normals, coins = noise.chain(seed.flatten(), position[: len(seed)], 100, 16)
        whole = noise.bits(*place, num=16), noise.uniform(*place, num=3), noise.fine_uniform(*place), coins
        rounded = noise.normal(*place, num=16), *normals
        drawn.append([torch.cat([each.cpu().double().flatten() for each in kind]) for kind in (whole, rounded)])
    (whole, rounded), (own_whole, own_rounded) = drawn
    error = (rounded - own_rounded).abs().max().item()
    same = torch.equal(whole, own_whole)
    return {"same_bits": same, "largest_error": error, "passed": same and error < ROUNDING}
