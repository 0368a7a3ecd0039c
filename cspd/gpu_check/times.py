"""`cspd gpu-check fast` and `where`: how long do whole decoded images take, and where does the time go?"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.profiler import ProfilerActivity, profile

from cspd.device import POLICIES, Precision, peak_bytes, reset_peak, seconds_of, synchronize
from cspd.engine import Engine
from cspd.gpu_check.models import (
    CHECKED,
    DEFAULT,
    IMAGES,
    MODES,
    STEPS,
    TINY_SMOKE,
    Mode,
    asked,
    bundled,
    engine_of,
    random_models,
    requests,
    switched,
)
from cspd.gpu_check.run import Cases, Found, Question, findings
from cspd.gpu_check.sizes import MAR_L, SPHERE_L, VQ_L, Setup, Subject
from cspd.heads.calibrated import HEAD_CALLS
from cspd.request import Request
from cspd.seams import accelerate
from cspd.speed import batch_at
from mar.model import MAR

# `fast`: whole images.

AUTHORS, ACCELERATED = "authors' code", "authors' code, accelerated"
METHODS = {
    "MAR": ("ar", AUTHORS, ACCELERATED, "calibrated", "speculative", "lazymar:denoiser=calibrated", "budget"),
    "VQ": ("ar", "sjd-pac", "sd"),
    "causal": ("ar", "calibrated", "speculative"),
}
PRECISION = "bf16"


def fast_cases(settings: Setup) -> Cases:
    cells = [(batch, subject) for batch, subjects in settings.scale.cells for subject in subjects]
    found: Cases = {}
    for batch, subject in cells:
        for name in METHODS[subject.family]:
            work = with_authors_code if name in (AUTHORS, ACCELERATED) else images
            found[f"{subject}, batch {batch}: {name}"] = functools.partial(work, settings, subject, batch, name)
    return found


# A time is that of a batch, from the requests to the decoded images on the CPU: nothing is subtracted. The first batch
# captures graphs, compiles kernels, makes plans of attention and fits what a method needs. The last one is the speed.

MOST_PASSES = 6
DECODED = 64  # images that their latents are decoded to at once
SPARE = 1.3  # a pass may take as much longer than the one before it


def passes(settings: Setup, work: Callable[[], None], batch: int, is_ready: Callable[[], bool]) -> Found:
    """Times a batch twice, or until `is_ready` after a pass; once if the time is over."""
    times: list[float] = []
    while len(times) < 2 or (not is_ready() and len(times) < MOST_PASSES):
        if times and settings.seconds_left < SPARE * times[-1]:
            break
        times.append(seconds_of(work, settings.device))
    found: Found = {"first_s": times[0], "pass_s": times}
    if len(times) > 1:
        found |= {"last_s": times[-1], "ms": 1000 * times[-1] / batch, "images_per_s": batch / times[-1]}
    found["peak_gib"] = peak_bytes(settings.device) / 2**30
    if settings.cuda:
        found["reserved_gib"] = torch.cuda.max_memory_reserved(settings.device) / 2**30
    return {"batch": batch, **found}


def images(
    settings: Setup, subject: Subject, batch: int, name: str, mode: Mode = DEFAULT, precision: str = PRECISION
) -> Found:
    """The time of a batch by an engine, the captures of graphs, and in which phases the last batch spent its time."""
    request, source = asked(settings, subject, name)
    reset_peak(settings.device)
    with switched(mode), engine_of(settings, subject, batch, precision, mode, source) as engine:
        wanted = [request.but(label=i % engine.runner.num_classes, seed=i) for i in range(batch)]
        outputs: list[Any] = []
        capturing: list[float] = []  # seconds, in each pass

        def generate() -> None:
            outputs.clear()
            before = engine.graphs.seconds
            with contextlib.suppress(FloatingPointError):  # of random weights, raised at the end
                outputs.extend(output for _, output in engine.stream(wanted))
            capturing.append(engine.graphs.seconds - before)

        found = passes(settings, generate, batch, lambda: True)
        stats = outputs[0].stats
        found |= {"method": name, "model": str(subject), "head_calls": stats.head_calls}
        found["finite"] = all(output.error is None for output in outputs)
        found |= {"phase_s": dict(stats.seconds), "capture_s": capturing, "graphs_gib": engine.graphs.bytes / 2**30}
    return found


# MAR's own code, as its evaluation runs it: autocast to float16, and the decoder inside.


def with_authors_code(settings: Setup, subject: Subject, batch: int, name: str) -> Found:
    """The time of a batch by MAR's own code with the same weights, with or without `cspd.accelerate`."""
    if settings.mar is None:
        return {"left_out": "MAR's own code: give --mar FOLDER, a clone of github.com/LTH14/mar"}
    model = _their_model(settings, subject)
    vae: Any = random_models(settings, subject).vae  # type: ignore[union-attr]
    request, _ = asked(settings, subject, "ar")
    labels = torch.arange(batch, device=settings.device) % model.num_classes
    own = {name: getattr(request, name) for name in ("num_iter", "cfg", "cfg_schedule", "temperature")}
    # accelerated heads learn from the first batches, of which this counts the tokens
    handle = accelerate(model, "calibrated", head_calls=HEAD_CALLS) if name == ACCELERATED else None
    learned = [0]

    @torch.no_grad()
    def sample() -> None:
        learned.append(handle.stats.learned if handle else 0)
        with torch.autocast(settings.device.type, torch.float16 if settings.cuda else torch.bfloat16):
            latents = model.sample_tokens(batch, labels=labels, **own)
            for part in (latents / vae.config.scale).split(DECODED):
                vae.decode(part).float().cpu()

    reset_peak(settings.device)
    try:
        found = passes(settings, sample, batch, lambda: handle is None or handle.stats.learned == learned[-1])
        return found | {"method": name, "model": str(subject), "note": repr(handle) if handle else ""}
    finally:
        if handle:
            handle.restore()


@functools.lru_cache(maxsize=1)
def _their_model(settings: Setup, subject: Subject) -> Any:
    with torch.device(settings.device):
        return their_model(str(settings.mar), random_models(settings, subject).target)  # type: ignore[arg-type]


def their_model(folder: str, ours: MAR) -> Any:
    """MAR's own module, from a clone of its code, with the weights of ours. Raises ValueError if there is no code.

    On a CPU its code, which asks for CUDA, is answered with the CPU.
    """
    if next(ours.parameters()).device.type == "cpu":
        torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        theirs: Any = importlib.import_module("models.mar").MAR
    except ImportError as error:
        raise ValueError(f"{folder} is not a clone of github.com/LTH14/mar ({error})") from None
    config = ours.config
    model = theirs(
        img_size=config.img_size,
        vae_stride=config.vae_stride,
        patch_size=config.patch_size,
        encoder_embed_dim=config.embed_dim,
        encoder_depth=config.depth,
        encoder_num_heads=config.num_heads,
        decoder_embed_dim=config.embed_dim,
        decoder_depth=config.depth,
        decoder_num_heads=config.num_heads,
        norm_layer=functools.partial(nn.LayerNorm, eps=1e-6),
        vae_embed_dim=config.vae_embed_dim,
        class_num=config.class_num,
        buffer_size=config.buffer_size,
        diffloss_w=config.diffloss_w,
        diffloss_d=config.diffloss_d,
        num_sampling_steps=str(STEPS),
    )
    model.load_state_dict(ours.state_dict(), strict=True)
    return model.eval().requires_grad_(False)


# Its report.

TITLES = ["model", "batch", "method", "first s", "then s", "ms per image", "x ar", "x authors", "decoding"]
TITLES += ["capturing s", "then s", "GiB"]
FORMATS = ("", "", "", ".2f", ".2f", ".1f", ".2f", ".2f", ".2f", ".1f", ".1f", ".1f")


def fast_tables(cases: dict[str, Found]) -> str:
    """A row for each case: seconds of the first and the last batch, and how the last one compares."""
    times = {(found["model"], found["batch"], found["method"]): found.get("last_s") for found in cases.values()}
    rows = []
    for found in cases.values():
        cell, last = (found["model"], found["batch"]), found.get("last_s")
        capturing, decoding = found.get("capture_s", []), found.get("phase_s", {}).get("decode")
        row: list[Any] = [*cell, found["method"], found["first_s"], last, found.get("ms")]
        row += [_ratio(times.get((*cell, base)), last) for base in ("ar", AUTHORS)]
        row += [_ratio(decoding, last), *capturing[:1], *capturing[1:][-1:]]
        rows.append([*row, *[None] * (len(TITLES) - 1 - len(row)), found["peak_gib"]])
    return tabulate(rows, TITLES, floatfmt=FORMATS, missingval="")


def _ratio(base: float | None, own: float | None) -> float | None:
    return base / own if base and own else None


FAST = Question("fast", fast_cases, fast_tables)


# `where`: rounds, and the same images with other switches.

_OF_MAR = ("ar", "calibrated", "speculative", "lazymar:denoiser=calibrated", "budget")
PROFILED = [(MAR_L, name) for name in _OF_MAR]
PROFILED += [(VQ_L, "ar"), (VQ_L, "sjd-pac"), (SPHERE_L, "ar"), (SPHERE_L, "calibrated")]
SWITCHED = ("calibrated", "ar")  # of MAR-L


def where_cases(settings: Setup) -> Cases:
    tiny = settings.scale.is_tiny
    (most, _), (fewest, _) = settings.scale.cells[:2]
    found = _machine_cases(settings)
    for batch, (subject, name) in itertools.product((most, fewest), PROFILED):
        title = f"round of {subject} {name}, batch {batch}"
        found[title] = functools.partial(_profile, settings, subject, batch, name)
    for name in SWITCHED[: 1 if tiny else None]:
        for mode, precision, how in _switches(settings):
            title = f"switch, {MAR_L} {name}, batch {most}: {mode}, {precision}"
            found[title] = functools.partial(images, settings, MAR_L, most, name, how, precision)
    for family, name in TINY_SMOKE if tiny else CHECKED:
        for mode in ("default", "no graphs")[: 2 if settings.cuda else 1]:
            found[f"waits of {family} {name}, {mode}"] = functools.partial(_waits, settings, family, name, MODES[mode])
    return found


def _switches(settings: Setup) -> list[tuple[str, str, Mode]]:
    """(name, precision, mode); a CPU has no kernels and graphs to switch off, and compiling takes minutes there."""
    names = [name for name in MODES if settings.cuda or name == "default"]
    found = [(name, PRECISION, MODES[name]) for name in names]
    return found + [("default", precision, DEFAULT) for precision in POLICIES if precision != PRECISION]


# The machine: the best that it can do. scripts/measure/gpu_costs.py predicts the times of MAR from such numbers.

REPEATS = 5
LAUNCHES = 1000  # of a small kernel, timed together
SIDE, TINY_SIDE = 8192, 256  # of matrices; a buffer that is copied has 16 bytes for each entry of one


def _machine_cases(settings: Setup) -> Cases:
    device = settings.device
    found: Cases = {"launch": lambda: _launch(device), "graph": lambda: _graph(device), "copy": lambda: _copy(settings)}
    return found | {f"matmul {policy}": functools.partial(_matmul, settings, policy) for policy in POLICIES}


def _best(device: torch.device, work: Callable[[], object]) -> float:
    """The least seconds of several runs, after one that warms up."""
    work()
    return min(seconds_of(work, device) for _ in range(REPEATS))


def _launch(device: torch.device) -> Found:
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


def _graph(device: torch.device) -> Found:
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


def _copy(settings: Setup) -> Found:
    """Bytes read and written per second."""
    num_bytes = 16 * (TINY_SIDE if settings.scale.is_tiny else SIDE) ** 2
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    seconds = _best(settings.device, lambda: target.copy_(source))
    return {"gb_per_s": 1e-9 * 2 * num_bytes / seconds}


def _matmul(settings: Setup, policy: str) -> Found:
    side = TINY_SIDE if settings.scale.is_tiny else SIDE
    precision = Precision(policy, settings.device)
    matrices = torch.randn(2, side, side, device=settings.device)
    a, b = matrices.to(precision.dtype)
    with torch.inference_mode(), precision.fast():
        seconds = _best(settings.device, lambda: a @ b)
    return {"tflop_per_s": 1e-12 * 2 * side**3 / seconds} | precision.flags()


# A round in the middle of an image: how long the CPU takes to launch it, its kernels, and where the CPU waits.

WARM_UPS = 2  # rounds that compile kernels and capture graphs
TOP = 30  # kernels that the report names
SHOWN, WIDTH = 6, 70  # kernels of each round that are printed, and characters of their names
WAITS = "called a synchronizing"  # in PyTorch's warning


def _profile(settings: Setup, subject: Subject, batch: int, name: str) -> Found:
    request, source = asked(settings, subject, name)
    with engine_of(settings, subject, batch, PRECISION, source=source) as engine:
        return round_of(engine, engine.resolve(request))


def _waits(settings: Setup, family: str, name: str, mode: Mode) -> Found:
    """A round of a bundled model, in which the CPU should not wait for the device."""
    engine = bundled(family, IMAGES, settings.device, mode)
    found = round_of(engine, engine.resolve(requests(family, name)[0]))
    return found | ({"passed": not found["waits"]} if settings.cuda and "waits" in found else {})


def round_of(engine: Engine, request: Request) -> Found:
    """The seconds, kernels and waits of a round of all slots, in the middle of an image."""
    batch = batch_at(engine, request, engine.runner.seq_len // 4)  # so that no sequence begins or ends
    for _ in range(WARM_UPS):
        batch.round()
    synchronize(engine.device)
    with waits(engine.device) as lines:
        begun = time.perf_counter()
        batch.round()
        launched = time.perf_counter() - begun
    synchronize(engine.device)
    took = time.perf_counter() - begun
    if not batch.sequences:
        return {"skipped": "all images were finished before a round could be watched"}
    kernels = profiled(engine.device, batch.round)
    return {
        "round_ms": 1000 * took,
        "launch_ms": 1000 * launched,
        "kernel_ms": sum(kernel["microseconds"] for kernel in kernels) / 1000,
        "kernels": sum(kernel["runs"] for kernel in kernels),
        "waits": dict(lines),
        "top": kernels[:TOP],
    }


def profiled(device: torch.device, work: Callable[[], object]) -> list[Found]:
    """The kernels, or on a CPU operators, that some work runs: how often, and all microseconds; the longest first."""
    cuda = device.type == "cuda"
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        seconds_of(work, device)
    kernels = []
    for event in profiler.key_averages():
        if not cuda or event.device_type == torch.autograd.DeviceType.CUDA:
            spent = event.self_device_time_total if cuda else event.self_cpu_time_total
            kernels.append({"name": event.key, "runs": event.count, "microseconds": spent})
    return sorted(kernels, key=lambda kernel: -kernel["microseconds"])


@contextlib.contextmanager
def waits(device: torch.device) -> Iterator[Counter[str]]:
    """Counts, by line of code, how often the CPU waits for a CUDA device inside the block; filled at its end.

    PyTorch warns of each wait. Raising an error instead would end the round at the first one.
    """
    lines: Counter[str] = Counter()
    cuda = device.type == "cuda"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
    for warning in warned:
        if WAITS in str(warning.message):
            folder, name = Path(warning.filename).parts[-2:]
            lines[f"{folder}/{name}:{warning.lineno}"] += 1


# Its report.


def where_tables(cases: dict[str, Found]) -> str:
    """Rounds with their most expensive kernels, then switches, then everything else."""
    parts = []
    rounds = {name: found for name, found in cases.items() if name.startswith("round of ")}
    for name, found in rounds.items():
        total = max(1000 * found["kernel_ms"], 1e-9)
        shown = found["top"][:SHOWN]
        rows = [[each["microseconds"] / total, each["runs"], each["name"][:WIDTH]] for each in shown]
        spent = ", ".join(f"{name} {found[name]:.2f}" for name in ("round_ms", "launch_ms", "kernel_ms"))
        parts.append(f"{name}: {spent}; waits {found['waits'] or 'none'}")
        parts.append(tabulate(rows, ["share", "runs", "kernel"], floatfmt=".2f") + "\n")
    switches = {name: found for name, found in cases.items() if name.startswith("switch, ")}
    rows = [[name, found["first_s"], found.get("last_s"), found["peak_gib"]] for name, found in switches.items()]
    if rows:
        parts.append(tabulate(rows, ["", "first s", "then s", "GiB"], floatfmt=".2f", missingval="") + "\n")
    others = {name: found for name, found in cases.items() if name not in rounds and name not in switches}
    return "\n".join([*parts, findings(others)])


WHERE = Question("where", where_cases, where_tables)
