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
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from cspd import kernels
from cspd import noise as philox_noise
from cspd.checkpoints import load
from cspd.device import POLICIES, Precision, describe, free_bytes, peak_bytes, reset_peak, seconds_of, synchronize
from cspd.discrete.family import VQModels
from cspd.discrete.gpt import GPT, Eagle
from cspd.engine import Engine
from cspd.evaluation.metrics import energy_test
from cspd.gpu_check.measure import (
    SHARES,
    accepted_share,
    head_calls,
    image_ms,
    mar_image,
    profiled,
    seconds_a_round,
    tokens_a_round,
    waits,
)
from cspd.gpu_check.run import Cases, Part
from cspd.gpu_check.sizes import MODES, Setting, Settings
from cspd.heads.calibration import WINDOWS, Calibration
from cspd.heads.tuning import measure
from cspd.masked.family import MARModels
from cspd.method import METHODS, PUBLISHED, find, parse_method
from cspd.option import BUNDLED, COMMON
from cspd.request import Output, Request
from cspd.speed import batch_at, iteration_at, starts
from cspd.terminal import __version__
from mar.model import MAR

CPU = torch.device("cpu")
EVERY = [(method.family, method.name) for method in METHODS]

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
    """An engine that runs in one of `MODES`."""
    return Engine(
        models,
        max_batch=max_batch,
        device=settings.device,
        precision=precision,
        noise=noise,
        cache=settings.cache,
        **MODES[mode],
    )


@functools.cache
def bundled(family: str, max_batch: int, device: torch.device, mode: str = "eager", precision: str = "fp32") -> Engine:
    """An engine of the bundled models of a family."""
    return load(BUNDLED[family], max_batch=max_batch, device=device, precision=precision, **MODES[mode])


@functools.cache
def bundled_calibration(settings: Settings) -> Calibration:
    """The head calls that tokens of the bundled model take in `speculative`."""
    runner = bundled("MAR", 1, settings.device).runner
    request = Request(0, method="speculative", window=0, num_sampling_steps=settings.scale.steps)
    checked = runner.check(request, find("speculative", "MAR"))
    return runner.tuning.calibrations["target"].get(checked)


# A first look: does everything that a run needs work at all?

SMOKE = (("MAR", ("ar", "speculative", "calibrated", "cspd")), ("VQ", ("ar", "speculative", "eagle2")))


def smoke_cases(settings: Settings) -> Cases:
    found: Cases = {
        "random bits": lambda: _random_bits(settings.device),
        "compiler": lambda: _compiler(settings),
    }
    for precision in ("fp32", "bf16"):
        for family, names in SMOKE:
            for name in names:
                found[f"{family} {name}, {precision}"] = functools.partial(_image, settings, family, name, precision)
    return found


def _random_bits(device: torch.device) -> dict[str, Any]:
    """Compares the draws of chains with those of a CPU: uniform ones bit for bit, and normals, which are rounded."""
    if device == CPU:
        return {"skipped": ITSELF}
    drawn = []
    for each in (CPU, device):
        seed = torch.tensor([0, 1, 2**31, 2**40 + 7, 2**63 - 1], device=each)
        position = torch.arange(len(seed), device=each)
        x, eps_t, uniform = philox_noise.chain(seed, position, 100, 16)
        normals = torch.cat([x.flatten(), eps_t.flatten()])
        drawn.append((uniform.cpu(), normals.cpu()))
    (uniform, normals), (own_uniform, own_normals) = drawn
    same = torch.equal(uniform, own_uniform)
    difference = (normals - own_normals).abs()
    error = difference.max().item()
    return {"same_bits": same, "largest_error": error, "passed": same and error < ROUNDING}


def _compiler(settings: Settings) -> dict[str, Any]:
    """A small function by torch.compile, which needs a C compiler and Triton."""
    if settings.scale.is_tiny:
        return {"skipped": "it takes half a minute"}

    def function(x: Tensor) -> Tensor:
        return torch.softmax(x.sin(), 0)

    x = torch.linspace(0, 1, 1000, device=settings.device)
    compiled = torch.compile(function)
    return {"passed": torch.allclose(compiled(x), function(x), atol=ROUNDING)}


def _image(settings: Settings, family: str, name: str, precision: str) -> dict[str, Any]:
    """An image with the default mode of this device; the engine raises an error if it is not finite."""
    engine = bundled(family, 1, settings.device, usual_mode(settings), precision)
    request = requests(settings, family, name)[0]
    (output,) = engine.generate(request)
    return {"mean": output.image.float().mean().item(), "passed": True}


# Correctness: every device and every mode generates the same images.

ITSELF = "the device is the CPU that it would be compared with"
ROUNDING = 1e-4  # of normals, absolute
WINDOW = 8  # of `speculative`, which otherwise depends on the device
SMALL = {"num_iter": 8, "num_sampling_steps": 25}
ALIKE = 0.01  # r.m.s. difference, in standard deviations of the tokens, of two images that differ by rounding alone
MAX_CHANGED = 0.5  # of the images, by decisions that rounding flipped


def correctness_cases(settings: Settings) -> Cases:
    eager = settings.device, "eager"
    found = _pairs(settings, "as on a CPU", (CPU, "eager"), eager)
    if settings.cuda:
        found |= _pairs(settings, "graphs as eager", eager, (settings.device, "graphs"))
    return found


def compiled_cases(settings: Settings) -> Cases:
    if settings.scale.is_tiny:  # to compile takes half a minute
        return {}
    return _pairs(settings, "compiled as eager", (settings.device, "eager"), (settings.device, "compiled"))


def _pairs(settings: Settings, title: str, one: tuple[torch.device, str], other: tuple[torch.device, str]) -> Cases:
    """Compares the images of every method on one (device, mode) and on another."""

    def case(family: str, name: str) -> dict[str, Any]:
        if one == other:
            return {"skipped": ITSELF}
        asked = requests(settings, family, name)
        ours = bundled(family, len(asked), *one).generate(asked)
        theirs = bundled(family, len(asked), *other).generate(asked)
        return compared(ours, theirs)

    return {f"{family} {name}: {title}": functools.partial(case, family, name) for family, name in EVERY}


def requests(settings: Settings, family: str, name: str) -> list[Request]:
    """The images that two devices, or two modes, both generate."""
    own: dict[str, object] = dict(SMALL) if family == "MAR" else {}
    if name == "speculative":
        own["window"] = WINDOW
        if family == "VQ":
            own["draft"] = "jacobi"
    return [Request(label=i, seed=i, method=name, family=family, **own) for i in range(settings.scale.images)]


def compared(ours: list[Output], theirs: list[Output]) -> dict[str, Any]:
    """How far apart the outputs of the same requests are.

    A flipped decision is a token with another number of head calls, or one whose draft was accepted only once.
    """
    tokens, other_tokens = (_stacked(outputs, "tokens") for outputs in (ours, theirs))
    cost, other_cost = (_stacked(outputs, "token_cost") for outputs in (ours, theirs))
    is_flipped = cost.nan_to_num(-1) != other_cost.nan_to_num(-1)  # NaN: nothing was drafted
    found: dict[str, Any] = {"flipped": int(is_flipped.sum())}
    if ours[0].request.family == "VQ":
        differs = tokens != other_tokens
        found["differing_tokens"] = differs.double().mean().item()
        is_changed = differs.any(1)
    else:
        squares = (tokens - other_tokens).square()
        of_images = squares.flatten(1).mean(1) / tokens.var()
        found["rms_error"] = of_images.mean().sqrt().item()
        is_changed = ~(of_images.sqrt() <= ALIKE)  # also if it is NaN
    changed = is_changed.double().mean().item()
    return found | {"changed_images": changed, "passed": changed <= MAX_CHANGED}


def _stacked(outputs: list[Output], name: str) -> Tensor:
    return torch.stack([getattr(output, name) for output in outputs]).double()


# Distributions: exact methods against baseline sampling.

MIN_P = 1e-3
MAX_BATCH = 250


def distribution_cases(settings: Settings) -> Cases:
    return {
        "MAR speculative": lambda: _two_samples(settings, "MAR", "speculative", SMALL, {"window": WINDOW}),
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
        outputs = engine.generate(asked)
        return torch.stack([output.image for output in outputs]).flatten(1).float()

    baseline = images("ar", 0, common)
    p = energy_test(baseline, images(name, num, common | own))
    return {"images": num, "p_value": p, "passed": p > MIN_P}


# The times of MAR at its official sizes, with random weights and the acceptance of the bundled models.

ACCEPTANCE = 0.31  # of the tokens that the bundled draft model drafts, by `cspd` at gamma = 8: docs/benchmarks.md
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
    """Milliseconds of an image, and the least work that it takes, which is not known for `cspd`."""
    steps = settings.scale.steps
    request = request_of(settings, name, setting.num_iter)

    # the acceptance that is replayed, and how the head is called
    noise: Any = philox_noise
    chains: dict[str, Any] = {"steps": steps, "calls": steps, "is_published": name == PUBLISHED}
    if request.method == "speculative":
        calls = bundled_calibration(settings).calls[WINDOWS.index(request.window)]
        noise = head_calls(calls, settings.device)
        chains |= {"calls": float(calls.mean()) - 1, "width": request.window}
    elif request.method == "calibrated":
        chains |= {"steps": request.head_calls, "calls": request.head_calls, "branches": 1.5}
    elif request.method == "cspd":
        noise = accepted_share(ACCEPTANCE)
        chains = {}

    # a round at several moments of an image
    models = random_mar(settings, setting.size)
    reset_peak(settings.device)
    engine = engine_of(settings, models, setting.batch, setting.precision, setting.mode, noise)
    request = engine.resolve(request)
    begins = starts(request, engine.runner.seq_len)
    if name == PUBLISHED:
        seconds = published_seconds(engine, request, begins)
    else:
        seconds, committed = seconds_a_round(engine, request, settings.scale.rounds)
    if request.method == "cspd":  # its rounds do not follow MAR's schedule
        begins = starts(request, engine.runner.seq_len, committed)

    found = setting._asdict() | _time(name, seconds, begins, setting.batch, settings.device)
    if chains:
        config = settings.scale.mars[setting.size]
        size = NUMBER_BYTES[setting.precision]
        work = mar_image(config, setting.batch, setting.num_iter, size, **chains)
        found |= vars(work)
    return found


def _time(name: str, seconds: dict[int, float], begins: np.ndarray, batch: int, device: torch.device) -> dict[str, Any]:
    """What all timed cases report; round_ms is by committed tokens."""
    return {
        "method": name,
        "ms": image_ms(seconds, begins, batch),
        "round_ms": {str(tokens): 1000 * spent for tokens, spent in seconds.items()},
        "peak_bytes": peak_bytes(device),
    }


def request_of(settings: Settings, name: str, num_iter: int) -> Request:
    """The request of a method's name with its options; guidance and temperature are MAR's defaults."""
    method, options = parse_method(name, more=[PUBLISHED])
    if method == PUBLISHED:
        method = "ar"  # with the same settings
    if method == "speculative":
        options["draft"] = "frozen"  # needs no fit: the acceptance is replayed
    options |= {"num_iter": num_iter, "num_sampling_steps": settings.scale.steps}
    return Request(0, method=method, family="MAR", **options)


def published_seconds(engine: Engine, request: Request, begins: np.ndarray) -> dict[int, float]:
    """Seconds of some iterations of MAR's own sampler by tokens committed before them; `begins`: those of all."""
    own = {option.name: getattr(request, option.name) for option in COMMON["MAR"]}
    labels = torch.arange(engine.num_slots, device=engine.device) % engine.runner.num_classes

    def run(iteration: int) -> None:
        engine.runner.published(labels, own | {"iterations": range(iteration, iteration + 1)})

    run(0)
    seconds = {}
    for share in SHARES:
        iteration = iteration_at(begins, share * engine.runner.seq_len)
        seconds[int(begins[iteration])] = seconds_of(functools.partial(run, iteration), engine.device)
    return seconds


# The times of LlamaGen at its official sizes, with random weights and the acceptance of the bundled models.

# tokens that a round of the bundled models commits: docs/benchmarks.md
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
    own = {"coupling": "maximal"} if name == "eagle2" else {}
    request = engine.resolve(Request(0, method=name, family="VQ", **own))
    seconds, committed = seconds_a_round(engine, request, settings.scale.rounds)
    begins = starts(request, engine.runner.seq_len, committed)
    about = {"size": size, "batch": batch, "precision": VQ_PRECISION, "mode": mode, "tokens_a_round": committed}
    return about | _time(name, seconds, begins, batch, settings.device)


# Syncs: rounds in which the CPU should never wait for the device, and how many kernels they launch.

WARM_UPS = 2  # rounds that compile kernels and capture graphs
TOP = 20  # kernels that the report names


def sync_cases(settings: Settings) -> Cases:
    found: Cases = {}
    for mode in dict.fromkeys((usual_mode(settings), "eager")):
        for family, name in EVERY:
            found[f"{family} {name}, {mode}"] = functools.partial(_round, settings, family, name, mode)
    return found


def _round(settings: Settings, family: str, name: str, mode: str) -> dict[str, Any]:
    """The waits, the kernels and the most expensive kernels of a round in the middle of an image."""
    asked = requests(settings, family, name)
    engine = bundled(family, len(asked), settings.device, mode)
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
        "kernels": sum(kernel.count for kernel in launched),
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
    calibration = bundled_calibration(settings)
    head = random_mar(settings, size).target.head
    costs = measure(head, True, settings.device, Precision("bf16", settings.device))
    windows = {}
    for batch in (1, 8, 64, 256):
        tokens_at_once = batch * config.seq_len / 64
        choice = costs.choose(settings.scale.steps, tokens_at_once, lambda: calibration)
        windows[str(batch)] = choice.config["window"]
    return {"window by batch": windows, "costs": dataclasses.asdict(costs)}


# In the order of what a first run should answer: does it work, is it right, how fast is it by default, all else.
PARTS = [
    Part("machine", 0.03, machine_cases),
    Part("smoke", 0.08, smoke_cases),
    Part("correctness", 0.14, correctness_cases),
    Part("distributions", 0.10, distribution_cases),
    Part("MAR times", 0.34, mar_time_cases),
    Part("VQ times", 0.10, vq_time_cases),
    Part("syncs", 0.06, sync_cases),
    Part("windows", 0.03, window_cases),
    Part("other MAR times", 0.08, other_time_cases),
    Part("compiled", 0.04, compiled_cases),
]
