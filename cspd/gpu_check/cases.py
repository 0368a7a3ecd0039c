"""All cases of a GPU check: correctness, distributions, waits for the device, and times."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
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

from cspd import noise as philox_noise
from cspd.checkpoints import load
from cspd.device import POLICIES, Precision, describe, free_bytes, peak_bytes, reset_peak
from cspd.discrete.family import VQModels
from cspd.discrete.gpt import GPT, Eagle, GPTConfig, VQModel
from cspd.engine import Engine
from cspd.evaluation.metrics import energy_test
from cspd.gpu_check.measure import (
    SHARES,
    Chains,
    Work,
    backbone,
    codes_a_round,
    gpt_image,
    head_calls,
    mar_image,
    profiled,
    seconds_a_round,
    timed,
    times,
    token_share,
    waits,
)
from cspd.gpu_check.run import (
    BATCHES,
    GOLDEN_FOLDER,
    MODES,
    SAMPLE_SETTINGS,
    Cases,
    Golden,
    GoldenNoise,
    Part,
    Setting,
    Settings,
    golden_mar,
    relative_error,
)
from cspd.heads.calibration import WINDOWS, Calibration
from cspd.heads.tuning import measure
from cspd.heads.verify import log_ratio, resample, residual
from cspd.masked.family import MARModels
from cspd.method import METHODS, PUBLISHED, find, parse_method
from cspd.option import BUNDLED, COMMON
from cspd.request import Output, Request
from cspd.speed import batch_at, iteration_at, starts
from cspd.terminal import __version__
from mar.model import MAR, MARConfig

# The machine: what it is, and what it can do at best.

REPEATS = 5


def machine_cases(settings: Settings) -> Cases:
    return {
        "versions": lambda: _versions(settings),
        "copy": lambda: _copy(settings),
        **{f"matmul {policy}": lambda policy=policy: _matmul(settings, policy) for policy in POLICIES},
        "launch": lambda: _launch(settings),
        "graph": lambda: _graph(settings),
    }


def _versions(settings: Settings) -> dict[str, Any]:
    found = describe(settings.device) | {"python": platform.python_version(), "cspd": __version__}
    found["free_gib"] = free_bytes(settings.device) / 2**30
    for name in ("triton", "timm", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    if settings.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": _driver()}
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(settings.device)))
    return found


def _driver() -> str | None:
    """The driver's version; None where nvidia-smi is not there to tell it."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False).stdout
    return told.split("\n")[0] or None


def _best(settings: Settings, work: Any) -> float:
    """The least seconds of several runs, after one that warms up."""
    work()
    return min(timed(settings, work) for _ in range(REPEATS))


def _copy(settings: Settings) -> dict[str, Any]:
    """Bytes read and written a second."""
    source = torch.zeros(settings.scale.copy_bytes, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    seconds = _best(settings, lambda: target.copy_(source))
    return {"gb_per_s": 2 * source.numel() / seconds / 1e9}


def _matmul(settings: Settings, policy: str) -> dict[str, Any]:
    side, precision = settings.scale.matmul, Precision(policy, settings.device)
    a, b = torch.randn(2, side, side, device=settings.device).to(precision.dtype)
    with torch.inference_mode(), precision.fast():
        seconds = _best(settings, lambda: a @ b)
    return {"tflop_per_s": 2 * side**3 / seconds / 1e12}


def _launch(settings: Settings) -> dict[str, Any]:
    """Microseconds in which the CPU launches a small kernel, in which it runs after others, and of a wait for one."""
    x, num = torch.zeros(32, device=settings.device), settings.scale.launches

    def launch() -> None:
        for _ in range(num):
            x.add_(1.0)

    def wait() -> None:
        for _ in range(num):
            x.add_(1.0)
            settings.synchronize()

    launch()
    settings.synchronize()
    start = time.perf_counter()
    launch()
    launched = time.perf_counter() - start
    settings.synchronize()
    together, waiting = _best(settings, launch), _best(settings, wait)
    return {
        "launch_us": 1e6 * launched / num,
        "kernel_us": 1e6 * together / num,
        "wait_us": 1e6 * (waiting - together) / num,
    }


def _graph(settings: Settings) -> dict[str, Any]:
    """Microseconds of a small kernel in a graph of many, and of a graph's launch with one in it."""
    if not settings.cuda:
        return {"skipped": "a CPU has no graphs"}
    x, found = torch.zeros(32, device=settings.device), {}
    for name, num in (("node_us", settings.scale.launches), ("replay_us", 1)):
        graph = torch.cuda.CUDAGraph()
        x.add_(1.0)
        with torch.cuda.graph(graph):
            for _ in range(num):
                x.add_(1.0)
        found[name] = 1e6 * _best(settings, graph.replay) / num
    return found


# Engines to be checked: the bundled models', and models with random weights at any size.

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


def bundled(settings: Settings, family: str, max_batch: int, device: torch.device, mode: str = "eager") -> Engine:
    """An engine of the bundled models of a family; of small ones with random weights where little is to be done."""
    scale = settings.scale
    if not scale.is_tiny:
        return load(BUNDLED[family], max_batch=max_batch, device=device, **MODES[mode])
    cpu = torch.device("cpu")  # so that all devices have the same weights
    small = {"MAR": (random_mar, scale.mars), "VQ": (random_gpt, scale.gpts)}
    make, configs = small[family]
    return engine_of(settings, make(settings, configs["B"], cpu), max_batch, device, mode=mode)


def bundled_calibration(settings: Settings) -> Calibration:
    """How often the bundled model's drafts are right."""
    runner = bundled(settings, "MAR", 1, settings.device).runner
    request = Request(0, method="speculative", window=0, num_sampling_steps=settings.scale.steps)
    return runner.tuning.calibrations["target"].get(runner.check(request, find("speculative", "MAR")))


# The windows that the cost model chooses on this device, and what it knows of the device.

ITERATIONS = (256, 64, 16)


def window_cases(settings: Settings) -> Cases:
    return {size: lambda size=size: _windows(settings, size) for size in settings.scale.mars}


def _windows(settings: Settings, size: str) -> dict[str, Any]:
    """The window by K and batch, with the bundled model's acceptance, and the costs that they are chosen by."""
    steps, config = settings.scale.steps, settings.scale.mars[size]
    calibration = bundled_calibration(settings)
    head = random_model(MAR, config, settings.device).head
    costs = measure(head, True, settings.device, Precision("bf16", settings.device))
    chosen = {}
    for num_iter in ITERATIONS:
        tokens = config.seq_len / num_iter
        choices = {str(batch): costs.choose(steps, batch * tokens, lambda: calibration) for batch in BATCHES}
        windows = {batch: choice.config["window"] for batch, choice in choices.items()}
        chosen[f"K = {num_iter}"] = windows
    return {"windows": chosen, "costs": dataclasses.asdict(costs)}


# Correctness: golden tensors, random bits, and the same images by every device and way to run.

CPU = torch.device("cpu")
ITSELF = "this is the CPU"  # which agrees with itself
GOLDEN_SAMPLES, GOLDEN_LOGITS = 1e-3, 1e-5  # relative errors
ROUNDING = 1e-4  # of normals, absolute
WINDOW = 8  # of `speculative`, which otherwise depends on the device
ALIKE = 0.01  # r.m.s. difference, in standard deviations of the tokens, of two images that differ by rounding alone
MOST_CHANGED = 0.5  # of the images, by decisions that rounding flipped


def correctness_cases(settings: Settings) -> Cases:
    found: Cases = {
        f"golden {name}": lambda name=name: _golden_sample(settings, name) for name in settings.scale.golden
    }
    found["golden logits"] = lambda: _golden_logits(settings)
    found["random bits"] = lambda: _random_bits(settings)

    @functools.cache
    def engine(family: str, device: torch.device, mode: str) -> Engine:
        return bundled(settings, family, settings.scale.same_seeds["images"], device, mode)

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
    token_cost = [torch.stack([output.token_cost for output in outputs]).nan_to_num(-1) for outputs in (ours, theirs)]
    found: dict[str, Any] = {"flipped": int((token_cost[0] != token_cost[1]).sum())}
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
    if not GOLDEN_FOLDER.is_dir():
        return {"skipped": f"no {GOLDEN_FOLDER.name} tensors in this installation: take a checkout"}
    tensors = Golden("mar_small.safetensors")
    models = MARModels(golden_mar(tensors))
    engine = Engine(models, max_batch=2, device=settings.device, noise=GoldenNoise(tensors, settings.device))
    own = {"method": "ar", "temperature": 1.0, **SAMPLE_SETTINGS[name]}
    labels, rows = tensors["sample.labels"].tolist(), [0, 1, 0]  # through 2 slots: one starts late
    made = engine.generate([Request(labels[row], seed=row, **own) for row in rows])
    tokens = torch.stack([output.tokens for output in made])
    error = relative_error(tokens, tensors[f"sample.tokens.{name}"][rows])
    return {"relative_error": error, "passed": error < GOLDEN_SAMPLES}


@torch.inference_mode()
def _golden_logits(settings: Settings) -> dict[str, Any]:
    if not GOLDEN_FOLDER.is_dir():
        return {"skipped": f"no {GOLDEN_FOLDER.name} tensors in this installation: take a checkout"}
    tensors = Golden("gpt_small.safetensors")
    model = GPT(GPTConfig(**tensors.config))
    model.load_state_dict(tensors.weights)
    model.eval().to(settings.device)
    labels, tokens = (tensors[name].to(settings.device) for name in ("labels", "tokens"))
    error = relative_error(model(labels, tokens[:, :-1]).cpu(), tensors["logits"])
    return {"relative_error": error, "passed": error < GOLDEN_LOGITS}


def _random_bits(settings: Settings) -> dict[str, Any]:
    """The generator's words and uniform draws, which are alike to the bit, and normals, which are rounded."""
    if settings.device == CPU:
        return {"skipped": ITSELF}
    drawn = []
    for device in (CPU, settings.device):
        seed = torch.tensor([0, 1, 2**31, 2**40 + 7, 2**63 - 1], device=device).unsqueeze(1)
        position = torch.arange(500, device=device)
        place = seed, philox_noise.Purpose.CODE, position, 2**32 - 1, 5
        *normals, accept_uniforms = philox_noise.chain(seed.flatten(), position[: len(seed)], 100, 16)
        whole = (
            philox_noise.bits(*place, num=16),
            philox_noise.uniform(*place, num=3),
            philox_noise.fine_uniform(*place),
            accept_uniforms,
        )
        rounded = philox_noise.normal(*place, num=16), *normals
        drawn.append([torch.cat([each.cpu().double().flatten() for each in kind]) for kind in (whole, rounded)])
    (whole, rounded), (own_whole, own_rounded) = drawn
    error = (rounded - own_rounded).abs().max().item()
    same = torch.equal(whole, own_whole)
    return {"same_bits": same, "largest_error": error, "passed": same and error < ROUNDING}


# Distributions: exact methods against baseline sampling, and the coupling that they rest on.

LEAST_P = 1e-3
PAIRS = {  # log sigmas and means of p and q, which differ by about as much as drafts do, and by more
    "near": ((0.0, 0.0), (0.3, 0.1)),
    "wider q": ((0.0, 0.0), (0.5, 0.3)),
    "narrower q": ((0.0, 0.0), (0.5, -0.3)),
}
CHANNELS = 4
MOST_BATCH = 250


def distribution_cases(settings: Settings) -> Cases:
    found: Cases = {
        "MAR speculative": lambda: _two_samples(settings, "MAR", "speculative", **_mar(settings), window=8),
        "VQ sjd-pac": lambda: _two_samples(settings, "VQ", "sjd-pac"),
    }
    return found | {f"coupling, {name}": lambda name=name: _coupling(settings, name) for name in PAIRS}


def _mar(settings: Settings) -> dict[str, int]:
    return {name: settings.scale.same_seeds[name] for name in ("num_iter", "num_sampling_steps")}


def _two_samples(settings: Settings, family: str, name: str, **own: object) -> dict[str, Any]:
    """Of images by a method and, with other seeds, by baseline sampling."""
    num = settings.scale.images
    engine = bundled(settings, family, min(num, MOST_BATCH), settings.device)
    plain = {key: value for key, value in own.items() if key != "window"}

    def made(method: str, first: int, options: dict[str, object]) -> Tensor:
        requests = [
            Request(label=i % engine.runner.num_classes, seed=first + i, method=method, family=family, **options)
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
        normals, uniform = philox_noise.candidates(rows, rows, torch.ones_like(rows), first, count, CHANNELS)
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


# How long MAR takes at its official sizes, with random weights and the bundled model's acceptance.

ALPHA = 0.31  # the share of drafted tokens that `cspd` accepts of the bundled pair at gamma = 8: docs/benchmarks.md
MAR_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2}  # of a number in matrix products


def names(settings: Settings) -> list[str]:
    """What is timed at each setting."""
    scale = settings.scale
    speculative = [f"speculative:window={window}" for window in scale.windows]
    return [PUBLISHED, "ar", *speculative, f"calibrated:head_calls={scale.head_calls}", f"cspd:gamma={scale.gamma}"]


def mar_time_cases(settings: Settings) -> Cases:
    scale = settings.scale
    models = functools.lru_cache(maxsize=1)(lambda size: random_mar(settings, scale.mars[size], settings.device))
    calls = functools.cache(lambda: dict(zip(WINDOWS, bundled_calibration(settings).calls)))
    found: Cases = {}
    for setting in scale.mar_settings:
        for name in names(settings):
            own = setting
            if name == PUBLISHED or setting.mode not in modes(settings):  # the published sampler has one way to run
                own = setting._replace(mode="eager")
            title = f"{own.size}, batch {own.batch}, K = {own.num_iter}, {own.precision}, {own.mode}: {name}"
            found[title] = functools.partial(_mar_time, settings, models, calls, own, name)
    return found


def _mar_time(
    settings: Settings,
    models: Callable[[str], MARModels],
    calls: Callable[[], dict[int, np.ndarray]],
    setting: Setting,
    name: str,
) -> dict[str, Any]:
    """Milliseconds of an image, and what it takes.

    Args:
        models: of a size. calls: head calls of the bundled model's tokens, int [N] by window.
    """
    request = request_of(settings, name, setting.num_iter)
    # acceptance is as of the bundled model
    noise: Any = philox_noise
    if request.method == "speculative":
        noise = head_calls(calls()[request.window], settings.device)
    elif request.method == "cspd":
        noise = token_share(ALPHA)

    target = models(setting.size)
    reset_peak(settings.device)
    engine = engine_of(settings, target, setting.batch, settings.device, setting.precision, setting.mode, noise)
    request = engine.resolve(request)
    if name == PUBLISHED:
        seconds, known = published_seconds(settings, engine, request)
    else:
        seconds, tokens = seconds_a_round(settings, engine, request)
        known = starts(request, engine.runner.seq_len, tokens if request.method == "cspd" else None)
    return {
        **setting._asdict(),
        "method": name,
        **times(seconds, known, setting.batch),
        **vars(_least(settings, setting, name, calls)),
        "peak_bytes": peak_bytes(settings.device),
    }


def _least(settings: Settings, setting: Setting, name: str, calls: Callable[[], dict[int, np.ndarray]]) -> Work:
    """What an image takes at least by a method."""
    steps, (method, options) = settings.scale.steps, parse_method(name, more=[PUBLISHED])
    if method == "cspd":
        return _drafted_tokens(settings, setting, options["gamma"])
    if method == "speculative":
        window = options["window"]
        chains = Chains(steps, float(calls()[window].mean()) - 1, width=window)
    elif method == "calibrated":
        chains = Chains(options["head_calls"], options["head_calls"], classes=1.5)
    else:
        chains = Chains(steps, steps, anew=method == PUBLISHED)
    config = settings.scale.mars[setting.size]
    return mar_image(config, setting.batch, setting.num_iter, chains, MAR_BYTES[setting.precision])


def request_of(settings: Settings, name: str, num_iter: int) -> Request:
    """The request of a method's name with its options; its guidance and temperature are the published ones."""
    method, options = parse_method(name, more=[PUBLISHED])
    own: dict[str, object] = {"num_iter": num_iter, "num_sampling_steps": settings.scale.steps}
    if method == "speculative":
        own["draft"] = "frozen"  # its acceptance is replayed: nothing is to be fitted
    return Request(0, method="ar" if method == PUBLISHED else method, family="MAR", **own, **options)


def published_seconds(settings: Settings, engine: Engine, request: Request) -> tuple[dict[int, float], np.ndarray]:
    """As `seconds_a_round`, of the published sampler's iterations; and the tokens known before each of them."""
    known = starts(request, engine.runner.seq_len)
    own = {option.name: getattr(request, option.name) for option in COMMON["MAR"]}
    labels = torch.arange(engine.num_slots, device=settings.device) % engine.runner.num_classes

    def run(iteration: int) -> None:
        engine.runner.published(labels, own | {"iterations": range(iteration, iteration + 1)})

    run(0)
    iterations = [iteration_at(known, share * engine.runner.seq_len) for share in SHARES]
    return {int(known[i]): timed(settings, functools.partial(run, i)) for i in iterations}, known


def _drafted_tokens(settings: Settings, setting: Setting, gamma: int) -> Work:
    """What an image takes at least by `cspd`."""
    scale, batch, size = settings.scale, setting.batch, MAR_BYTES[setting.precision]
    config, chains = scale.mars[setting.size], Chains(scale.steps, scale.steps)
    known = np.arange(0, config.seq_len, gamma)
    drafted = backbone(scale.mar_draft, 2 * batch, known, size) + chains.work(scale.mar_draft, batch, size)
    judged = backbone(config, 2 * batch, known, size) + chains.work(config, batch * gamma, size)
    return (drafted * gamma + judged).sum() * (1 / batch)


# Syncs: rounds in which the CPU should never wait for the device, and how many kernels they are.

SYNCS_SHARE = 0.25  # of the tokens that are known: no sequence begins or ends in these rounds


def sync_cases(settings: Settings) -> Cases:
    @functools.cache
    def engine(family: str, mode: str) -> Engine:
        return bundled(settings, family, settings.scale.same_seeds["images"], settings.device, mode)

    def case(family: str, name: str, mode: str) -> dict[str, Any]:
        return _round(settings, engine(family, mode), family, name)

    return {
        f"{method.family} {method.name}, {mode}": functools.partial(case, method.family, method.name, mode)
        for mode in modes(settings)
        if mode != "compiled"
        for method in METHODS
    }


def _round(settings: Settings, engine: Engine, family: str, name: str) -> dict[str, Any]:
    batch = batch_at(
        engine, engine.resolve(requests(settings, family, name)[0]), int(SYNCS_SHARE * engine.runner.seq_len)
    )
    for _ in range(settings.scale.warm_ups):
        batch.round()
    with waits(settings) as lines:
        batch.round()
    if not batch.sequences:
        return {"skipped": "all images were done before a round could be looked at"}
    kernels = profiled(settings, batch.round)
    found = {"kernels": sum(kernel.count for kernel in kernels), "kernel_us": sum(k.microseconds for k in kernels)}
    if not settings.cuda:
        return found | {"waits": "not counted on a CPU"}
    return found | {"waits": sum(lines.values()), "lines": dict(lines), "passed": not lines}


# The kernels that take the most time, by method and batch.

MOST = 20
KERNEL_BATCHES = (1, 64)
KERNELS_SHARE = 0.5


def top_kernel_cases(settings: Settings) -> Cases:
    window = settings.scale.windows[0]
    names = ("ar", f"speculative:window={window}")
    return {
        f"B, batch {batch}, bf16, eager: {name}": functools.partial(_top, settings, name, batch)
        for batch in KERNEL_BATCHES
        for name in names
    }


def _top(settings: Settings, name: str, batch: int) -> dict[str, Any]:
    device, steps = settings.device, settings.scale.steps
    models = random_mar(settings, settings.scale.mars["B"], device)
    reset_peak(device)
    calls = max(2, steps // 10)  # of a token
    noise = head_calls([calls], device)
    engine = engine_of(settings, models, batch, device, "bf16", "eager", noise)
    num_iter = settings.scale.mar_settings[0].num_iter
    request = engine.resolve(request_of(settings, name, num_iter))
    rounds = batch_at(engine, request, int(KERNELS_SHARE * engine.runner.seq_len))
    rounds.round()
    kernels = profiled(settings, rounds.round)
    total = sum(kernel.microseconds for kernel in kernels)
    return {
        "kernels": sum(kernel.count for kernel in kernels),
        "kernel_us": total,
        "top": [kernel._asdict() for kernel in kernels[:MOST]],
        "peak_bytes": peak_bytes(device),
    }


# How long LlamaGen takes at its official sizes, with random weights and the bundled models' acceptance.

CODES = {"ar": None, "sd": 2.75, "sjd-pac": 4.25, "eagle2": 3.3}  # a round, of the bundled models: docs/benchmarks.md
ACCEPT_UNIFORMS = {"eagle2": {"coupling": "maximal"}}  # settings by which uniform draws decide, which are replayed
NODES = {"ar": 1, "sd": 6, "sjd-pac": 65, "eagle2": 61}  # codes and the root, in a forward of the target
PRECISION, VQ_BYTES = "bf16", 2


def vq_time_cases(settings: Settings) -> Cases:
    scale, mode = settings.scale, modes(settings)[-1]
    models = functools.lru_cache(maxsize=1)(lambda size: random_gpt(settings, scale.gpts[size], settings.device))
    return {
        f"{size}, batch {batch}, {PRECISION}, {mode}: {name}": functools.partial(
            _vq_time, settings, models, size, batch, name, mode
        )
        for size in scale.gpts
        for batch in scale.gpt_batches
        for name in CODES
    }


def _vq_time(
    settings: Settings, models: Callable[[str], VQModels], size: str, batch: int, name: str, mode: str
) -> dict[str, Any]:
    """Milliseconds of an image's codes, and what they take; `models`: of a size."""
    codes, config = CODES[name], settings.scale.gpts[size]
    noise = philox_noise if codes is None else codes_a_round(codes)
    target = models(size)
    reset_peak(settings.device)
    engine = engine_of(settings, target, batch, settings.device, PRECISION, mode, noise)
    request = engine.resolve(Request(0, method=name, family="VQ", settings=ACCEPT_UNIFORMS.get(name)))
    seconds, committed = seconds_a_round(settings, engine, request)
    return {
        "size": size,
        "batch": batch,
        "precision": PRECISION,
        "mode": mode,
        "method": name,
        "codes_a_round": committed,
        **times(seconds, starts(request, config.block_size, committed), batch),
        **vars(gpt_image(config, batch, committed, NODES[name], VQ_BYTES)),
        "peak_bytes": peak_bytes(settings.device),
    }


PARTS = [
    Part("machine", 0.03, machine_cases),
    Part("correctness", 0.17, correctness_cases),
    Part("distributions", 0.10, distribution_cases),
    Part("syncs", 0.07, sync_cases),
    Part("MAR times", 0.39, mar_time_cases),
    Part("VQ times", 0.15, vq_time_cases),
    Part("windows", 0.05, window_cases),
    Part("top kernels", 0.04, top_kernel_cases),
]
