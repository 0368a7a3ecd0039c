"""`cspd gpu-check right`: does this device compute what a CPU computes, in every mode, and read only what it may?"""

from __future__ import annotations

import contextlib
import functools
import itertools
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from cspd import kernels
from cspd import noise as philox_noise
from cspd.device import Precision, describe, free_bytes
from cspd.engine import Engine
from cspd.evaluation.scores import energy_test
from cspd.gpu_check.models import (
    BACKENDS,
    CHECKED,
    DEFAULT,
    EAGER,
    IMAGES,
    MODES,
    SHORT,
    SMOKE,
    STEPS,
    TINY_SMOKE,
    Mode,
    asked,
    bundled,
    engine_of,
    random_model,
    requests,
    switched,
)
from cspd.gpu_check.run import Cases, Found, Question, findings
from cspd.gpu_check.sizes import MAR_L, SPHERE_L, VQ_L, Setup, Subject
from cspd.noise import Purpose
from cspd.request import Inpainting, Request, Sequence
from cspd.speed import batch_at
from cspd.terminal import __version__
from mar.head import Head

CPU = torch.device("cpu")


def cases(settings: Setup) -> Cases:
    """Does it work at all, are images and conditions right, and then everything else."""
    found: Cases = {"versions": lambda: _versions(settings.device), "draws": lambda: _draws(settings.device)}
    quick = TINY_SMOKE if settings.scale.is_tiny else SMOKE
    found |= _image_cases(settings, quick, "default")
    for subject in (MAR_L, VQ_L, SPHERE_L):
        found |= _condition_cases(settings, subject) | _batch_cases(settings, subject)
    others = [name for name in MODES if name not in ("default", "compiled")] if settings.cuda else []
    for mode in others:
        found |= _image_cases(settings, quick, mode)
    found |= _head_cases(settings) if settings.cuda else {}
    exact = ((VQ_L, "sjd-pac"),) if settings.scale.is_tiny else ((MAR_L, "speculative"), (VQ_L, "sjd-pac"))
    for subject, name in exact:
        title = f"distribution of {subject.family} {name}"
        found[title] = functools.partial(_two_samples, settings, subject, name)
    if not settings.scale.is_tiny:
        rest = [each for each in CHECKED if each not in SMOKE]
        found |= _image_cases(settings, rest, "default")
        found |= _image_cases(settings, rest, "no graphs") if settings.cuda else {}
        found |= _image_cases(settings, CHECKED, "compiled")
    return found


def _versions(device: torch.device) -> Found:
    found = describe(device) | {"python": platform.python_version(), "cspd": __version__}
    found["free_gib"] = free_bytes(device) / 2**30
    with contextlib.suppress(PackageNotFoundError):
        found["triton"] = version("triton")
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
        with contextlib.suppress(RuntimeError):  # the GPU is too old for it
            found["cudnn"] = torch.backends.cudnn.version()
        found["capability"] = list(torch.cuda.get_device_capability(device))
        found["kernels"] = kernels.available(device)
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        found["driver"] = printed.stdout.split()
    return found


# Random numbers against those of a CPU.

ROUNDING = 1e-4  # relative to the largest number


def draws(device: torch.device) -> Tensor:
    """Random numbers of every kind."""
    seed = torch.tensor([0, 1, 2**31, 2**40 + 7, 2**63 - 1], device=device)
    position = torch.arange(len(seed), device=device)
    drawn = [
        *philox_noise.chain(seed, position, STEPS, 16),
        philox_noise.latents(seed, position, 16),
        philox_noise.step_accept_uniforms(seed, position, STEPS),
        philox_noise.fine_uniform(seed, Purpose.CODE, position),
    ]
    return torch.cat([numbers.flatten() for numbers in drawn])


def _draws(device: torch.device) -> Found:
    numbers, expected = draws(device).cpu(), draws(CPU)
    error = ((numbers - expected).abs().max() / expected.abs().max()).item()
    return {"largest_error": error, "passed": error < ROUNDING}


# The images that every device and every mode generates: those of a CPU are in a file of the package.
#
# `python scripts/record_images.py` renews the file, after a change of the images of a seed. They are compared in fp32:
# in bf16 a chain that begins alike may end far away, so the conditions are compared instead (below).

RECORD = Path(__file__).parent / "images.safetensors"
KINDS = ("tokens", "token_cost")
ALIKE = 0.01  # r.m.s. difference, in standard deviations of the tokens, of two images that differ by rounding alone
MAX_CHANGED = 0.5  # of the images, by decisions that rounding flipped


def tokens_of(outputs: list[Any]) -> dict[str, Tensor]:
    """The tokens and their costs of images, named as in the file: the first dimension is that of the images."""
    return {kind: torch.stack([getattr(output, kind) for output in outputs]) for kind in KINDS}


def generated(family: str, name: str, device: torch.device, mode: Mode = EAGER) -> dict[str, Tensor]:
    """The images of `requests`, by the bundled models."""
    with switched(mode):
        return tokens_of(bundled(family, IMAGES, device, mode).generate(requests(family, name)))


def recorded(family: str, name: str) -> dict[str, Tensor]:
    """The images in the file, as `generated` returns them, but in 16 bits."""
    with safe_open(RECORD, "pt") as file:
        return {kind: file.get_tensor(f"{family} {name} {kind}") for kind in KINDS}


def compared(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Found:
    """How far apart images of the same requests are; both as `tokens_of` returns them.

    A flipped decision is a token with another number of head calls, or one whose draft was accepted only once.
    """
    tokens, other_tokens = ours["tokens"].double(), theirs["tokens"].double()
    cost, other_cost = (each["token_cost"].nan_to_num(-1) for each in (ours, theirs))  # NaN: nothing was drafted
    found: Found = {"flipped": int((cost != other_cost).sum())}
    if not ours["tokens"].is_floating_point():  # VQ
        is_same = tokens == other_tokens
        is_changed = ~is_same.all(1)
        found["differing_tokens"] = 1 - is_same.double().mean().item()
    else:
        squares = (tokens - other_tokens).square()
        of_images = squares.flatten(1).mean(1) / other_tokens.var()
        found["rms_error"] = of_images.mean().sqrt().item()
        is_changed = ~(of_images.sqrt() <= ALIKE)  # also if it is NaN
    changed = is_changed.double().mean().item()
    return found | {"changed_images": changed, "passed": changed <= MAX_CHANGED}


def _image_cases(settings: Setup, names: list[tuple[str, str]], mode: str) -> Cases:
    """Compares the images of methods, (family, name), with those of a CPU."""

    def case(family: str, name: str) -> Found:
        return compared(generated(family, name, settings.device, MODES[mode]), recorded(family, name))

    return {f"images of {family} {name}, {mode}": functools.partial(case, family, name) for family, name in names}


# The conditions of the next tokens in the middle of an image: MAR's and SphereAR's z, and the features of a VQ model.
# Those in float32 without graphs are the reference.

TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}  # r.m.s. of the difference, relative to that of the conditions
SLOTS, ROWS = 4, 3  # images at once, and as many free slots; tokens of each image of MAR


def _condition_cases(settings: Setup, subject: Subject) -> Cases:
    ways: dict[str, dict[str, Any]] = {
        "bf16": {"precision": "bf16"},
        "bf16, alone": {"precision": "bf16", "alone": True},
        "fp32, alone": {"precision": "fp32", "alone": True},
        "fp32, NaN in what must not be read": {"precision": "fp32", "poison": True},
    }
    if settings.cuda:
        ways |= {"fp32, graphs": {"precision": "fp32"}, "bf16, no graphs": {"precision": "bf16", "mode": EAGER}}
    for backend in BACKENDS if settings.cuda else BACKENDS[-1:]:
        ways[f"bf16, {backend}"] = {"precision": "bf16", "mode": Mode(attention=backend)}

    def case(way: dict[str, Any]) -> Found:
        exact = conditions(settings, subject, "fp32", EAGER)
        ours = conditions(settings, subject, **way)
        error = relative_error(ours, exact[:, -ours.shape[1] :])
        return {"relative_error": error, "passed": error < TOLERANCE[way["precision"]]}

    return {f"conditions of {subject}, {name}": functools.partial(case, way) for name, way in ways.items()}


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """The r.m.s. of the difference, relative to that of the exact numbers; NaN if ours are not finite."""
    difference = (ours.double() - exact.double()).norm()
    return (difference / exact.double().norm()).item()


@torch.inference_mode()
def conditions(
    settings: Setup,
    subject: Subject,
    precision: str,
    mode: Mode = DEFAULT,
    alone: bool = False,
    poison: bool = False,
) -> Tensor:
    """Conditions of the next tokens of images, [branches, rows, D], on the CPU.

    Args:
        alone: of the last image only, without the others in the batch.
        poison: free slots, and tokens that are not committed yet, are NaN.
    """
    with switched(mode):
        engine = engine_of(settings, subject, 2 * SLOTS, precision, mode)
        runner: Any = engine.runner
        request = engine.resolve(_half_made(settings, subject, runner))
        batch = batch_at(engine, request, runner.seq_len // 2, SLOTS).sequences
        if subject.family == "MAR":
            runner.tokens[:SLOTS] = _random(SLOTS, *runner.tokens.shape[1:]).to(settings.device)
            for i, sequence in enumerate(batch):  # of different lengths, so that the shorter ones are padded
                sequence.num_committed -= i
        if poison:
            for state in slots_of(runner):
                state[SLOTS:] = torch.nan
            for sequence in batch:
                if subject.family != "VQ":
                    runner.tokens[sequence.slot, runner.order[sequence.slot, sequence.num_committed :]] = torch.nan
        return _conditions(runner, batch[-1:] if alone else batch).float().cpu()


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _half_made(settings: Setup, subject: Subject, runner: Any) -> Request:
    """A request of `ar`. Models in raster order are given half of the image, so that their caches are filled."""
    request, _ = asked(settings, subject, "ar")
    if subject.family == "MAR":
        return request
    tokens = _random(runner.seq_len, runner.tokens.shape[-1] if subject.family == "causal" else 1)
    if subject.family == "VQ":
        tokens = (100 * tokens[:, 0].abs()).long() % runner.config.vocab_size
    return request.but(known=Inpainting(tokens, torch.arange(runner.seq_len) >= runner.seq_len // 2))


def _conditions(runner: Any, batch: list[Sequence]) -> Tensor:
    if runner.family == "VQ":
        runner.begin(None)
        of_round = runner.batch_of(batch)
        return runner.features(of_round, runner.last(of_round, 1)[0]).flatten(1, 2)
    if runner.family == "MAR":
        rows = runner.rows(batch, [sequence.num_committed for sequence in batch], [ROWS] * len(batch))
    else:
        rows = runner.next_rows(batch)
    return runner.conditions(batch, rows)


def slots_of(runner: Any) -> list[Tensor]:
    """The floating-point numbers that slots hold, as views whose first dimension is that of the slots."""
    names = ("tokens", "token_cost", "audit", "draws", "null_first")
    found = [getattr(runner, name) for name in names if hasattr(runner, name)]
    if runner.family == "causal":
        found += [cached.unflatten(1, (-1, 2)).movedim(1, 0) for cached in (runner._keys, runner._values)]
        found.append(runner._first_inputs.unflatten(0, (-1, 2)))
    if runner.family == "VQ":
        found += [cache.tensor.unflatten(2, (-1, 2)).movedim(2, 0) for cache in runner._caches.values()]
        found += [last.unflatten(0, (-1, 2)) for last in runner.conditions.last.values()]
    return [state for state in found if state.is_floating_point()]


# Whole images of random models: alone against in a batch, and with NaN in what must not be read.

METHODS_IN_BATCH = {"MAR": ("calibrated", "speculative:window=8"), "VQ": ("sjd-pac", "ar"), "causal": ("ar",)}


def _batch_cases(settings: Setup, subject: Subject) -> Cases:
    ways = {
        "alone": _alone,
        "NaN in free slots": _free_slots,
        "NaN in new memory": _uninitialised,
        "NaN in a neighbour": _neighbour,
    }
    names = METHODS_IN_BATCH[subject.family][: 1 if settings.scale.is_tiny else None]
    return {
        f"images of {subject} {name}, {way}": functools.partial(_in_batch, settings, subject, name, ways[way])
        for name, way in itertools.product(names, ways)
    }


def _in_batch(settings: Setup, subject: Subject, name: str, how: Callable[[Engine, list[Request]], Any]) -> Found:
    """Compares images that are generated in some way with those of an ordinary batch."""
    engine = engine_of(settings, subject, 2 * IMAGES)
    request, _ = asked(settings, subject, name)
    own = SHORT if subject.family == "MAR" else {}
    num_classes = engine.runner.num_classes
    batch = [request.but(label=i % num_classes, seed=i, **own) for i in range(IMAGES)]
    expected = engine.generate(batch)
    try:
        ours = how(engine, batch)
    except FloatingPointError as error:
        return {"not_finite": str(error), "passed": False}
    return compared(tokens_of(ours), tokens_of(expected[: len(ours)]))


def _alone(engine: Engine, batch: list[Request]) -> list[Any]:
    return engine.generate(batch[:1])


def _free_slots(engine: Engine, batch: list[Request]) -> list[Any]:
    with torch.inference_mode():
        for state in slots_of(engine.runner):
            state.fill_(torch.nan)  # slots are cleared when an image begins
    return engine.generate(batch)


def _uninitialised(engine: Engine, batch: list[Request]) -> list[Any]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills what `torch.empty` and its like return
    try:
        return engine.with_slots(IMAGES).generate(batch)
    finally:
        torch.use_deterministic_algorithms(False)


def _neighbour(engine: Engine, batch: list[Request]) -> list[Any]:
    def poison(*_: object) -> None:
        with torch.inference_mode():
            slots = [each.slot for each in engine.scheduler.in_flight() if each.request.seed == batch[-1].seed]
            for state in slots_of(engine.runner):
                state[slots] = torch.nan

    made = {}
    try:
        for index, output in engine.stream(batch, on_progress=poison):
            made[index] = output
    except FloatingPointError:
        if len(made) < IMAGES - 1:  # others than the neighbour's
            raise
    return [made[index] for index in range(IMAGES - 1)]


# A head call by our kernels, at official sizes.


def _head_cases(settings: Setup) -> Cases:
    found: Cases = {}
    for size, rows, precision in itertools.product(settings.scale.mars, (1, 5, 384), TOLERANCE):
        title = f"head call of MAR-{size}, {rows} rows, {precision}"
        found[title] = functools.partial(_head_call, settings, size, rows, precision)
    return found


@torch.inference_mode()
def _head_call(settings: Setup, size: str, rows: int, precision: str) -> Found:
    """Our kernels against PyTorch's operations on the same device."""
    device, config = settings.device, settings.scale.mars[size]
    if not kernels.available(device):
        return {"skipped": "no kernels on this device"}
    from cspd.kernels.head import denoise  # imports Triton, which is not everywhere

    head = random_model(lambda c: Head(c.token_dim, c.diffloss_w, c.diffloss_d, c.embed_dim), config, device)
    policy = Precision(precision, device)
    own = policy.prepare(head)
    x = torch.randn(rows, config.token_dim, device=device)
    z = torch.randn(2, rows, config.embed_dim, device=device)
    with policy.fast():
        time_embedding = head.time_embed(torch.tensor([500.0], device=device))[:, None]
        modulations = own.split(own.modulations(time_embedding, head.cond_embed(z)))
        error = relative_error(denoise(own, x, modulations), own.ready().through_layers(x, modulations))
    return {"relative_error": error, "passed": error < TOLERANCE[precision]}


# Distributions: exact methods against baseline sampling.

MIN_P = 1e-3
TEST_IMAGES, TINY_TEST_IMAGES, TEST_BATCH = 500, 20, 250  # of each sample; at once


def _two_samples(settings: Setup, subject: Subject, name: str) -> Found:
    """Tests images of `ar` against images of a method with other seeds; image i has the same class in both."""
    num = TINY_TEST_IMAGES if settings.scale.is_tiny else TEST_IMAGES
    if settings.scale.is_tiny:
        engine = engine_of(settings, subject, num)
    else:  # a trained model's acceptance is high, so that most tokens are drafted ones
        engine = bundled(subject.family, TEST_BATCH, settings.device, DEFAULT)
    num_classes = engine.runner.num_classes

    def images(method: str, first_seed: int) -> Tensor:
        """[num, pixels]."""
        request, _ = asked(settings, subject, method)
        request = request.but(**(SHORT if subject.family == "MAR" else {}))
        wanted = [request.but(label=i % num_classes, seed=first_seed + i) for i in range(num)]
        made: list[Any] = [output.image for output in engine.generate(wanted)]
        return torch.stack(made).flatten(1).float()

    p = energy_test(images("ar", 0), images(name, num))
    return {"images": num, "p_value": p, "passed": p > MIN_P}


RIGHT = Question("right", cases, findings)
