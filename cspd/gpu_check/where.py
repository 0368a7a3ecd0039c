"""`cspd gpu-check where`: where does the time go? Profiles of rounds, waits for the device, switches."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tabulate import tabulate
from torch.profiler import ProfilerActivity, profile

from cspd.device import POLICIES, Precision, seconds_of, synchronize
from cspd.engine import Engine
from cspd.gpu_check.fast import PRECISION, images
from cspd.gpu_check.models import (
    DEFAULT,
    MAR_L,
    MODES,
    SPHERE_L,
    VQ_L,
    Mode,
    Settings,
    Subject,
    asked,
    bundled,
    engine_of,
)
from cspd.gpu_check.right import CHECKED, IMAGES, TINY_SMOKE, requests
from cspd.gpu_check.run import Cases, Found, Question, findings
from cspd.request import Request
from cspd.speed import batch_at

_OF_MAR = ("ar", "calibrated", "speculative", "lazymar:denoiser=calibrated", "budget")
PROFILED = [(MAR_L, name) for name in _OF_MAR]
PROFILED += [(VQ_L, "ar"), (VQ_L, "sjd-pac"), (SPHERE_L, "ar"), (SPHERE_L, "calibrated")]
SWITCHED = ("calibrated", "ar")  # of MAR-L


def cases(settings: Settings) -> Cases:
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


def _switches(settings: Settings) -> list[tuple[str, str, Mode]]:
    """(name, precision, mode); a CPU has no kernels and graphs to switch off, and compiling takes minutes there."""
    names = [name for name in MODES if settings.cuda or name == "default"]
    found = [(name, PRECISION, MODES[name]) for name in names]
    return found + [("default", precision, DEFAULT) for precision in POLICIES if precision != PRECISION]


# The machine: the best that it can do. scripts/gpu_costs.py predicts the times of MAR from such numbers.

REPEATS = 5
LAUNCHES = 1000  # of a small kernel, timed together
SIDE, TINY_SIDE = 8192, 256  # of matrices; a buffer that is copied has 16 bytes for each entry of one


def _machine_cases(settings: Settings) -> Cases:
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


def _copy(settings: Settings) -> Found:
    """Bytes read and written per second."""
    num_bytes = 16 * (TINY_SIDE if settings.scale.is_tiny else SIDE) ** 2
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    seconds = _best(settings.device, lambda: target.copy_(source))
    return {"gb_per_s": 1e-9 * 2 * num_bytes / seconds}


def _matmul(settings: Settings, policy: str) -> Found:
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


class Kernel(NamedTuple):
    """A kernel, or on a CPU an operator: how often it ran, and the time of all runs."""

    name: str
    runs: int
    microseconds: float


def _profile(settings: Settings, subject: Subject, batch: int, name: str) -> Found:
    request, source = asked(settings, subject, name)
    with engine_of(settings, subject, batch, PRECISION, source=source) as engine:
        return round_of(engine, engine.resolve(request))


def _waits(settings: Settings, family: str, name: str, mode: Mode) -> Found:
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
        "kernel_ms": sum(kernel.microseconds for kernel in kernels) / 1000,
        "kernels": sum(kernel.runs for kernel in kernels),
        "waits": dict(lines),
        "top": [kernel._asdict() for kernel in kernels[:TOP]],
    }


def profiled(device: torch.device, work: Callable[[], object]) -> list[Kernel]:
    """The kernels that some work runs, the most expensive one first."""
    cuda = device.type == "cuda"
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        seconds_of(work, device)
    kernels = []
    for event in profiler.key_averages():
        if not cuda:
            kernels.append(Kernel(event.key, event.count, event.self_cpu_time_total))
        elif event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.append(Kernel(event.key, event.count, event.self_device_time_total))
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)


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


# The report.


def tables(cases: dict[str, Found]) -> str:
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


WHERE = Question("where", cases, tables)
