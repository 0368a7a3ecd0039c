"""All cases of a GPU check: correctness, distributions, times, and waits for the device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import platform
import shutil
import subprocess
import time
import types
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from cspd import kernels
from cspd import noise as philox_noise
from cspd.checkpoints import load
from cspd.continuous.tuning import measure
from cspd.device import POLICIES, Precision, describe, free_bytes, peak_bytes, reset_peak, seconds_of, synchronize
from cspd.discrete.family import VQModels
from cspd.discrete.gpt import GPT, Eagle
from cspd.engine import Engine
from cspd.evaluation.scores import energy_test
from cspd.gpu_check.measure import (
    SHARES,
    Timing,
    accepted_share,
    head_calls,
    image_ms,
    mar_image,
    profiled,
    timed_rounds,
    tokens_a_round,
    waits,
)
from cspd.gpu_check.run import Cases, Part
from cspd.gpu_check.sizes import MODES, STEPS, Setting, Settings
from cspd.graphs import Graphs
from cspd.heads.calibrated import HEAD_CALLS, follow
from cspd.heads.calibration import WINDOWS, Calibration, draft_table
from cspd.heads.chain import Chain, Inputs
from cspd.heads.samplers import ancestral
from cspd.heads.speculative import Chains
from cspd.masked.backbones import kind
from cspd.masked.family import MARModels
from cspd.method import METHODS, PUBLISHED, find, parse_method
from cspd.noise import Purpose
from cspd.option import BUNDLED, COMMON
from cspd.request import Request
from cspd.speed import batch_at, iteration_at, starts
from cspd.terminal import __version__
from mar.head import Head
from mar.model import MAR

CPU = torch.device("cpu")

# The machine: what it is, and the best that it can do.

REPEATS = 5
LAUNCHES = 1000  # of a small kernel, timed together
# scripts/gpu_costs.py predicts the times of MAR from the numbers of these cases


def machine_cases(settings: Settings) -> Cases:
    found: Cases = {
        "versions": lambda: _versions(settings.device),
        "launch": lambda: _launch(settings.device),
        "graph": lambda: _graph(settings.device),
        "copy": lambda: _copy(settings),
    }
    for policy in POLICIES:
        found[f"matmul {policy}"] = functools.partial(_matmul, settings, policy)
    return found


def _versions(device: torch.device) -> dict[str, Any]:
    found = describe(device) | {"python": platform.python_version(), "cspd": __version__}
    found["free_gib"] = free_bytes(device) / 2**30
    with contextlib.suppress(PackageNotFoundError):
        found["triton"] = version("triton")
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
        found["capability"] = list(torch.cuda.get_device_capability(device))
        found["kernels"] = kernels.available(device)
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        found["driver"] = printed.stdout.split()
    return found


def _best(device: torch.device, work: Callable[[], object]) -> float:
    """The least seconds of several runs, after one that warms up."""
    work()
    return min(seconds_of(work, device) for _ in range(REPEATS))


def _launch(device: torch.device) -> dict[str, Any]:
    """Microseconds in which the CPU launches a small kernel, in which one runs after others, and of a wait for one."""
    x = torch.zeros(32, device=device)

    def launch() -> None:
        for _ in range(LAUNCHES):
            x.add_(1.0)

    def launch_and_wait() -> None:
        for _ in range(LAUNCHES):
            x.add_(1.0)
            synchronize(device)

    seconds_of(launch, device)
    start = time.perf_counter()
    launch()
    launched = time.perf_counter() - start
    together = _best(device, launch)
    waiting = _best(device, launch_and_wait)
    seconds = {"launch_us": launched, "kernel_us": together, "wait_us": waiting - together}
    return {name: 1e6 * spent / LAUNCHES for name, spent in seconds.items()}


def _graph(device: torch.device) -> dict[str, Any]:
    """Microseconds of a small kernel in a graph of many, and of launching a graph of one."""
    if device.type != "cuda":
        return {"skipped": "a CPU has no graphs"}
    x = torch.zeros(32, device=device)
    found = {}
    for name, num in (("node_us", LAUNCHES), ("replay_us", 1)):
        graph = torch.cuda.CUDAGraph()
        x.add_(1.0)
        with torch.cuda.graph(graph):
            for _ in range(num):
                x.add_(1.0)
        found[name] = 1e6 * _best(device, graph.replay) / num
    return found


def _copy(settings: Settings) -> dict[str, Any]:
    """Bytes read and written per second."""
    num_bytes = 16 * settings.scale.matmul**2
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    seconds = _best(settings.device, lambda: target.copy_(source))
    return {"gb_per_s": 1e-9 * 2 * num_bytes / seconds}


def _matmul(settings: Settings, policy: str) -> dict[str, Any]:
    side = settings.scale.matmul
    precision = Precision(policy, settings.device)
    matrices = torch.randn(2, side, side, device=settings.device)
    a, b = matrices.to(precision.dtype)
    with torch.inference_mode(), precision.fast():
        seconds = _best(settings.device, lambda: a @ b)
    return {"tflop_per_s": 1e-12 * 2 * side**3 / seconds} | precision.flags()


# The models: the bundled ones, and models of any size with random weights.

STD = 0.02  # of random weights
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
            nn.init.normal_(parameter, std=STD)
    return model.eval().requires_grad_(False)


@functools.lru_cache(maxsize=1)
def random_mar(settings: Settings, size: str) -> MARModels:
    """A MAR with random weights, and a smaller one that drafts."""
    target = random_model(MAR, settings.scale.mars[size], settings.device)
    draft = random_model(MAR, settings.scale.mar_draft, settings.device)
    return MARModels(target, draft)


@functools.lru_cache(maxsize=1)
def random_gpt(settings: Settings, size: str) -> VQModels:
    """A GPT with random weights, and a smaller one and an EAGLE drafter that draft."""
    config = settings.scale.gpts[size]
    smaller = dataclasses.replace(settings.scale.gpt_draft, block_size=config.block_size)
    target = random_model(GPT, config, settings.device)
    draft = random_model(GPT, smaller, settings.device)
    eagle = random_model(Eagle, config, settings.device)
    return VQModels(target, draft, eagle)


def usual_mode(settings: Settings) -> str:
    """The default of an engine: graphs, if there are any."""
    return "graphs" if settings.cuda else "eager"


def engine_of(
    settings: Settings,
    models: MARModels | VQModels,
    max_batch: int,
    precision: str = "fp32",
    mode: str = "eager",
    noise: types.ModuleType = philox_noise,
) -> Engine:
    """An engine that runs in one of `MODES`; a MAR's has the calibrations of the bundled model."""
    how = MODES[mode]
    engine = Engine(models, max_batch=max_batch, device=settings.device, precision=precision, noise=noise, **how)
    return _with_bundled_calibrations(engine)


@functools.cache
def bundled(family: str, max_batch: int, device: torch.device, mode: str = "eager", precision: str = "fp32") -> Engine:
    """An engine of the bundled models of a family."""
    engine = load(BUNDLED[family], max_batch=max_batch, device=device, precision=precision, **MODES[mode])
    return engine if precision == "fp32" else _with_bundled_calibrations(engine)


def _with_bundled_calibrations(engine: Engine) -> Engine:
    """The engine, which fits nothing at the settings of `bundled_settings`: a fit takes time, and differs by device.

    The time of a round does not depend on the numbers in a calibration.
    """
    if engine.runner.family == "MAR":
        engine.runner.tuning.calibrations = bundled("MAR", 1, engine.device).runner.tuning.calibrations
    return engine


def bundled_settings(device: torch.device) -> dict[str, Any]:
    """The settings of the bundled MAR whose calibrations are part of the package."""
    checked = bundled("MAR", 1, device).runner.check(Request(0), find("ar", "MAR"))
    return {option.name: getattr(checked, option.name) for option in COMMON["MAR"]}


@functools.cache
def bundled_calibration(device: torch.device) -> Calibration:
    """The head calls that tokens of the bundled model take in `speculative`."""
    runner = bundled("MAR", 1, device).runner
    checked = runner.check(Request(0, method="speculative", window=0), find("speculative", "MAR"))
    return runner.tuning.calibrations["target"].get(checked)


# The images that every device and every mode generates: those of a CPU are in a file of the package.
#
# `python scripts/record_images.py` renews the file, after a change of the images of a seed.

RECORD = Path(__file__).parent / "images.safetensors"
IMAGES = 4  # by each method
SHORT = {"num_iter": 8}  # of MAR
ALIKE = 0.01  # r.m.s. difference, in standard deviations of the tokens, of two images that differ by rounding alone
MAX_CHANGED = 0.5  # of the images, by decisions that rounding flipped
# bf16 rounds coarsely: the r.m.s. difference was 0.04 to 0.18 on a CPU, and that of other seeds was 1.4; VQ images
# had 1 to 14 equal tokens before the first flipped one, and those of other seeds none
ALIKE_IN_BF16 = 0.5
LEAST_LEADING = 0.25


def _checked() -> dict[str, list[str]]:
    """By family, all methods with the options that would depend on the device, and a combination that is timed.

    The third family has no bundled model.
    """
    found: dict[str, list[str]] = {"MAR": ["lazymar:denoiser=calibrated"], "VQ": []}
    chosen = {"MAR": "speculative:window=8", "VQ": "speculative:window=8:draft=jacobi"}
    for method in METHODS:
        if method.family not in found or method.name == "budget":  # its plan depends on the device
            continue
        found[method.family].append(chosen[method.family] if method.name == "speculative" else method.name)
    return found


CHECKED = [(family, name) for family, names in _checked().items() for name in names]
SMOKE = [
    ("MAR", "ar"),
    ("MAR", "speculative:window=8"),
    ("MAR", "calibrated"),
    ("MAR", "lazymar:denoiser=calibrated"),
    ("VQ", "ar"),
    ("VQ", "speculative:window=8:draft=jacobi"),
    ("VQ", "sd"),
    ("VQ", "sjd-pac"),
]


def requests(family: str, name: str) -> list[Request]:
    """The images that are compared, by a method's name with its options."""
    method, own = parse_method(name)
    if family == "MAR":
        own |= SHORT
    return [Request(label=i, seed=i, method=method, family=family, **own) for i in range(IMAGES)]


def generated(
    family: str, name: str, device: torch.device, mode: str = "eager", precision: str = "fp32"
) -> dict[str, Tensor]:
    """The tokens and their costs of `requests`, as in the file: the first dimension is that of the images."""
    outputs = bundled(family, IMAGES, device, mode, precision).generate(requests(family, name))
    tokens = torch.stack([output.tokens for output in outputs])
    cost = torch.stack([output.token_cost for output in outputs])
    return {"tokens": tokens.to(torch.int16 if family == "VQ" else torch.float16), "token_cost": cost.half()}


def recorded(family: str, name: str) -> dict[str, Tensor]:
    """The images in the file, as `generated` returns them."""
    with safe_open(RECORD, "pt") as file:
        return {kind: file.get_tensor(f"{family} {name} {kind}") for kind in ("tokens", "token_cost")}


def compared(ours: dict[str, Tensor], theirs: dict[str, Tensor], precision: str = "fp32") -> dict[str, Any]:
    """How far apart images of the same requests are; both as `generated` returns them.

    A flipped decision is a token with another number of head calls, or one whose draft was accepted only once.
    """
    tokens, other_tokens = ours["tokens"].double(), theirs["tokens"].double()
    cost, other_cost = (each["token_cost"].nan_to_num(-1) for each in (ours, theirs))  # NaN: nothing was drafted
    found: dict[str, Any] = {"flipped": int((cost != other_cost).sum())}
    if ours["tokens"].dtype == torch.int16:  # VQ
        is_same = tokens == other_tokens
        is_changed = ~is_same.all(1)
        found["differing_tokens"] = 1 - is_same.double().mean().item()
        if precision == "bf16":
            found["leading"] = is_same.long().cumprod(1).sum(1).double().mean().item()
            return found | {"passed": found["leading"] >= LEAST_LEADING}
    else:
        squares = (tokens - other_tokens).square()
        of_images = squares.flatten(1).mean(1) / other_tokens.var()
        found["rms_error"] = of_images.mean().sqrt().item()
        if precision == "bf16":
            return found | {"passed": found["rms_error"] <= ALIKE_IN_BF16}
        is_changed = ~(of_images.sqrt() <= ALIKE)  # also if it is NaN
    changed = is_changed.double().mean().item()
    return found | {"changed_images": changed, "passed": changed <= MAX_CHANGED}


def _image_cases(settings: Settings, names: list[tuple[str, str]], mode: str, precision: str = "fp32") -> Cases:
    """Compares the images of methods, (family, name), with those of a CPU."""

    def case(family: str, name: str) -> dict[str, Any]:
        ours = generated(family, name, settings.device, mode, precision)
        return compared(ours, recorded(family, name), precision)

    return {f"{family} {name}, {mode}, {precision}": functools.partial(case, family, name) for family, name in names}


# A first look, of a minute: does everything that a run needs work at all?

ROUNDING = 1e-4  # relative to the largest number


def smoke_cases(settings: Settings) -> Cases:
    """The kernels first, which are compiled when they are launched; then images, in fp32 before bf16."""
    found: Cases = {}
    if settings.cuda:
        for work in (draws, ar_tokens, calibrated_tokens, speculative_tokens):
            found[work.__name__.replace("_", " ")] = functools.partial(_as_on_a_cpu, settings.device, work)
        found["graph"] = lambda: _captured(settings.device)
    for precision in ("fp32", "bf16"):
        found |= _image_cases(settings, SMOKE, usual_mode(settings), precision)
    return found


def _as_on_a_cpu(device: torch.device, work: Callable[[torch.device], Tensor]) -> dict[str, Any]:
    """Compares the numbers that some work gives with those of a CPU."""
    with torch.inference_mode():
        numbers, expected = work(device).cpu(), work(CPU)
    error = ((numbers - expected).abs().max() / expected.abs().max()).item()
    return {"largest_error": error, "passed": error < ROUNDING}


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


def _inputs(device: torch.device) -> tuple[Head, Tensor, Tensor, Tensor]:
    """The bundled model's head; conditions z [2, 3, D]; scales or temperatures [3, 1]; seeds or positions [3]."""
    runner: Any = bundled("MAR", 1, device).runner
    head = runner.target.head
    z = torch.randn(2, 3, head.cond_embed.in_features, generator=torch.Generator().manual_seed(0))
    return head, z.to(device), torch.ones(3, 1, device=device), torch.arange(3, device=device)


def ar_tokens(device: torch.device) -> Tensor:
    """A full chain of a few steps."""
    head, z, ones, numbers = _inputs(device)
    inputs = Inputs(z, ones, ones, numbers, numbers)
    return ancestral(Chain(head, head.schedule(6, 950), inputs, philox_noise, Precision("fp32", device)))


def calibrated_tokens(device: torch.device) -> Tensor:
    head, z, ones, numbers = _inputs(device)
    engine = bundled("MAR", 1, device)
    request = engine.resolve(Request(0, method="calibrated"))
    segments = engine.runner.tuning.calibrations["target"].segments(request)
    inputs = Inputs(z, ones, ones, numbers, numbers)
    return follow(Chain(head, head.schedule(STEPS), inputs, philox_noise, Precision("fp32", device)), segments)


def speculative_tokens(device: torch.device) -> Tensor:
    head, z, ones, numbers = _inputs(device)
    fitted = bundled_calibration(device)
    table = torch.from_numpy(draft_table(fitted.coefficients, fitted.drift, head.schedule(STEPS), 8, 1.0)).to(device)
    chains = Chains(head, head.schedule(STEPS), table, Precision("fp32", device), philox_noise)
    chains.start(range(3), numbers, numbers, numbers, z, ones, ones)
    tokens = torch.zeros(3, head.channels, device=device)
    while chains.owners:
        finished = chains.advance()
        if finished:
            tokens[finished.row] = finished.tokens
    return tokens


def _captured(device: torch.device) -> dict[str, Any]:
    """Captures a small function as a graph, and replays it with another input; a failed capture is a warning."""
    graphs = Graphs(device)
    passed = True
    for x in torch.randn(2, 64, 64, device=device):
        results = graphs.run("softmax", lambda x: torch.softmax(x @ x, dim=1), x)
        passed &= torch.allclose(results, torch.softmax(x @ x, dim=1), atol=ROUNDING)
    return {"capture_s": graphs.seconds, "passed": passed}


# Correctness: all methods, in the default mode and eager.


def correctness_cases(settings: Settings) -> Cases:
    """All but the cases of the smoke stage."""
    usual = usual_mode(settings)
    others = [each for each in CHECKED if each not in SMOKE]
    found = _image_cases(settings, others, usual)
    return found if usual == "eager" else found | _image_cases(settings, CHECKED, "eager")


def compiled_cases(settings: Settings) -> Cases:
    if settings.scale.is_tiny:  # to compile takes minutes
        return {}
    return _image_cases(settings, CHECKED, "compiled")


# Distributions: exact methods against baseline sampling.

MIN_P = 1e-3
MAX_BATCH = 250


def distribution_cases(settings: Settings) -> Cases:
    return {
        "MAR speculative": lambda: _two_samples(settings, "MAR", "speculative", SHORT, {"window": 8}),
        "VQ sjd-pac": lambda: _two_samples(settings, "VQ", "sjd-pac", {}, {}),
    }


def _two_samples(settings: Settings, family: str, name: str, common: dict, own: dict) -> dict[str, Any]:
    """Tests images of `ar` against images of a method with other seeds."""
    num = settings.scale.test_images
    engine = bundled(family, min(num, MAX_BATCH), settings.device)

    def images(method: str, first_seed: int, options: dict[str, Any]) -> Tensor:
        """[num, pixels]; image i has the same class for both methods."""
        asked = []
        for i in range(num):
            label = i % engine.runner.num_classes
            asked.append(Request(label, seed=first_seed + i, method=method, family=family, **options))
        made: list[Any] = [output.image for output in engine.generate(asked)]
        return torch.stack(made).flatten(1).float()

    baseline = images("ar", 0, common)
    p = energy_test(baseline, images(name, num, common | own))
    return {"images": num, "p_value": p, "passed": p > MIN_P}


# The times of MAR at its official sizes, with random weights and the acceptance of the bundled models.

ACCEPTANCE = 0.31  # of the tokens that the bundled draft model drafts, by `cspd` at gamma = 8: docs/results.md
NUMBER_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2}  # in matrix products


def mar_time_cases(settings: Settings) -> Cases:
    scale = settings.scale
    timed = [(setting, name) for setting in scale.settings for name in scale.methods]
    return _mar_times(settings, timed)


def other_time_cases(settings: Settings) -> Cases:
    scale = settings.scale
    first, *others = scale.more_settings
    timed = [(first, name) for name in scale.more_methods]
    timed += [(setting, name) for setting in others for name in scale.methods]
    return _mar_times(settings, timed)


def _mar_times(settings: Settings, timed: list[tuple[Setting, str]]) -> Cases:
    found: Cases = {}
    for setting, name in timed:
        if name == PUBLISHED and setting.mode != "graphs":
            continue  # it runs in one mode, and is timed with the other settings
        if name == PUBLISHED or not settings.cuda:
            setting = setting._replace(mode="eager")
        title = f"{setting.size}, batch {setting.batch}, K = {setting.num_iter}, {setting.precision}, {setting.mode}"
        found[f"{title}: {name}"] = functools.partial(_mar_time, settings, setting, name)
    return found


def _mar_time(settings: Settings, setting: Setting, name: str) -> dict[str, Any]:
    """Milliseconds of an image, and the least work that it takes, which is not known for `cspd` and `lazymar`."""
    request = request_of(settings, name, setting.num_iter)

    # the acceptance that is replayed, and how the head is called
    noise: Any = philox_noise
    chains: dict[str, Any] = {}
    if request.method == "ar":
        chains = {"steps": STEPS, "calls": STEPS, "is_published": name == PUBLISHED}
    elif request.method == "speculative":
        calls = bundled_calibration(settings.device).calls[WINDOWS.index(request.window)]
        noise = head_calls(calls, settings.device)
        chains = {"steps": STEPS, "calls": float(calls.mean()) - 1, "width": request.window}
    elif request.method == "calibrated":
        chains = {"steps": HEAD_CALLS, "calls": HEAD_CALLS, "branches": 1.5}
    elif request.method == "cspd":
        noise = accepted_share(ACCEPTANCE)

    # a round at several moments of an image
    models = random_mar(settings, setting.size)
    reset_peak(settings.device)
    engine = engine_of(settings, models, setting.batch, setting.precision, setting.mode, noise)
    request = engine.resolve(request)
    begins = starts(request, engine.runner.seq_len)
    num = settings.scale.rounds
    if name == PUBLISHED:
        timed = [(published_timing(engine, request, begins), begins)]
    elif request.method == "lazymar":
        # most of its iterations compute a part of the transformer: as if all did, and as if none did
        is_full = np.array([kind(request, iteration) != "lazy" for iteration in range(request.num_iter)])
        full = timed_rounds(engine, request.but(refresh=1), num)
        lazy = timed_rounds(engine, request.but(warmup=0, refresh=request.num_iter), num)
        timed = [(full, begins[is_full]), (lazy, begins[~is_full])]
    else:
        timing = timed_rounds(engine, request, num)
        if request.method == "cspd":  # its rounds do not follow MAR's schedule
            begins = starts(request, engine.runner.seq_len, timing.committed)
        timed = [(timing, begins)]

    found = setting._asdict() | _time(name, timed, setting.batch, settings.device)
    found["captures"] = list(engine.graphs.captures)
    if chains:
        config = settings.scale.mars[setting.size]
        size = NUMBER_BYTES[setting.precision]
        work = mar_image(config, setting.batch, setting.num_iter, size, **chains)
        found |= vars(work)
    return found


def _time(name: str, timed: list[tuple[Timing, np.ndarray]], batch: int, device: torch.device) -> dict[str, Any]:
    """What all timed cases report. `timed`: rounds that were timed, and the committed tokens before all like them."""
    return {
        "method": name,
        "ms": sum(image_ms(timing, begins, batch) for timing, begins in timed),
        "round_ms": [{str(known): 1000 * spent for known, spent in timing.seconds.items()} for timing, _ in timed],
        "rounds": sum(len(begins) for _, begins in timed),
        "timed_rounds": sum(timing.num for timing, _ in timed),
        "peak_bytes": peak_bytes(device),
    }


def request_of(settings: Settings, name: str, num_iter: int) -> Request:
    """The request of a method's name with its options, with the bundled model's settings."""
    method, options = parse_method(name, more=[PUBLISHED])
    if method == PUBLISHED:
        method = "ar"  # with the same settings
    if method == "speculative":
        options["draft"] = "frozen"  # the acceptance is replayed
    options |= bundled_settings(settings.device) | {"num_iter": num_iter}
    return Request(0, method=method, family="MAR", **options)


def published_timing(engine: Engine, request: Request, begins: np.ndarray) -> Timing:
    """The time of some iterations of MAR's own sampler; `begins`: tokens committed before each."""
    own = {option.name: getattr(request, option.name) for option in COMMON["MAR"]}
    labels = torch.arange(engine.num_slots, device=engine.device) % engine.runner.num_classes

    def run(iteration: int) -> None:
        engine.runner.published(labels, own | {"iterations": range(iteration, iteration + 1)})

    run(0)
    seconds = {}
    for share in SHARES:
        iteration = iteration_at(begins, share * engine.runner.seq_len)
        seconds[int(begins[iteration])] = seconds_of(functools.partial(run, iteration), engine.device)
    return Timing(seconds, len(seconds))


# The times of LlamaGen at its official sizes, with random weights and the acceptance of the bundled models.

# tokens that a round of the bundled models commits: docs/results.md
PER_ROUND = {"ar": None, "sd": 2.75, "sjd-pac": 4.25, "eagle2": 3.3}
VQ_PRECISION = "bf16"


def vq_time_cases(settings: Settings) -> Cases:
    found: Cases = {}
    for size in settings.scale.gpts:
        for batch in settings.scale.gpt_batches:
            for name in PER_ROUND:
                title = f"{size}, batch {batch}, {VQ_PRECISION}, {usual_mode(settings)}: {name}"
                found[title] = functools.partial(_vq_time, settings, size, batch, name)
    return found


def _vq_time(settings: Settings, size: str, batch: int, name: str) -> dict[str, Any]:
    """Milliseconds of an image's tokens."""
    per_round, mode = PER_ROUND[name], usual_mode(settings)
    models = random_gpt(settings, size)
    reset_peak(settings.device)
    noise: Any = philox_noise if per_round is None else tokens_a_round(per_round)
    engine = engine_of(settings, models, batch, VQ_PRECISION, mode, noise)
    # only with this coupling uniform draws decide whether a draft of eagle2 is accepted, and only they are replayed
    own: dict[str, Any] = {"coupling": "maximal"} if name == "eagle2" else {}
    request = engine.resolve(Request(0, method=name, family="VQ", **own))
    timing = timed_rounds(engine, request, settings.scale.rounds)
    begins = starts(request, engine.runner.seq_len, timing.committed)
    about = {"size": size, "batch": batch, "precision": VQ_PRECISION, "mode": mode, "tokens_a_round": timing.committed}
    about["captures"] = list(engine.graphs.captures)
    return about | _time(name, [(timing, begins)], batch, settings.device)


# Syncs: rounds in which the CPU should never wait for the device, and how many kernels they launch.

WARM_UPS = 2  # rounds that compile kernels and capture graphs
TOP = 20  # kernels that the report names


def sync_cases(settings: Settings) -> Cases:
    found: Cases = {}
    for mode in dict.fromkeys((usual_mode(settings), "eager")):
        for family, name in CHECKED:
            found[f"{family} {name}, {mode}"] = functools.partial(_round, settings, family, name, mode)
    return found


def _round(settings: Settings, family: str, name: str, mode: str) -> dict[str, Any]:
    """The waits, the kernels and the most expensive kernels of a round in the middle of an image."""
    asked = requests(family, name)
    engine = bundled(family, IMAGES, settings.device, mode)
    request = engine.resolve(asked[0])
    batch = batch_at(engine, request, engine.runner.seq_len // 4)  # so that no sequence begins or ends
    for _ in range(WARM_UPS):
        batch.round()
    with waits(engine.device) as lines:
        batch.round()
    if not batch.sequences:
        return {"skipped": "all images were finished before a round could be watched"}
    launched = profiled(engine.device, batch.round)
    found: dict[str, Any] = {
        "kernels": sum(kernel.runs for kernel in launched),
        "kernel_us": sum(kernel.microseconds for kernel in launched),
        "top": [kernel._asdict() for kernel in launched[:TOP]],
    }
    if engine.device.type == "cuda":
        found |= {"waits": lines.total(), "lines": dict(lines), "passed": not lines}
    return found


# The windows that the cost model of `speculative` chooses on this device, and the costs that it measures.


def window_cases(settings: Settings) -> Cases:
    return {size: functools.partial(_windows, settings, size) for size in settings.scale.mars}


def _windows(settings: Settings, size: str) -> dict[str, Any]:
    """The window by batch at K = 64, with the acceptance of the bundled model."""
    config = settings.scale.mars[size]
    calibration = bundled_calibration(settings.device)
    head = random_mar(settings, size).target.head
    costs = measure(head, True, settings.device, Precision("bf16", settings.device))
    windows = {}
    for batch in (1, 8, 64, 256):
        tokens_at_once = batch * config.seq_len / 64
        choice = costs.choose(STEPS, tokens_at_once, lambda: calibration)
        windows[str(batch)] = choice.config["window"]
    return {"window by batch": windows, "costs": dataclasses.asdict(costs)}


# In the order of what a first run should answer: does it work, is it right, how fast is it by default, all else.
# A part's time includes ten seconds in which its process starts.
PARTS = [
    Part("machine", 0.04, machine_cases),
    Part("smoke", 0.12, smoke_cases),
    Part("correctness", 0.15, correctness_cases),
    Part("MAR times", 0.50, mar_time_cases),
    Part("distributions", 0.04, distribution_cases),
    Part("VQ times", 0.05, vq_time_cases),
    Part("syncs", 0.03, sync_cases),
    Part("windows", 0.02, window_cases),
    Part("other MAR times", 0.03, other_time_cases),
    Part("compiled", 0.02, compiled_cases, case_seconds=400),  # compiling took 140 s on a CPU
]
