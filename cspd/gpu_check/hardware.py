"""The machine: what it is, and what it can do at best."""

from __future__ import annotations

import contextlib
import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from cspd.gpu_check.rounds import timed
from cspd.gpu_check.settings import Cases, Settings
from cspd.machine import describe, free_bytes
from cspd.precision import POLICIES, Precision
from cspd.version import __version__

REPEATS = 5


def cases(settings: Settings) -> Cases:
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
    """Microseconds in which the host launches a small kernel, in which it runs after others, and of a wait for one."""
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
