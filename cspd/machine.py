"""What is measured on: the machine's name, peak memory, and how repeated timings spread."""

from __future__ import annotations

import contextlib
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from cspd.engine import Engine


def describe(engine: Engine) -> dict:
    """The machine that an engine runs on, and how, in a few words."""
    cuda = engine.device.type == "cuda"
    name = torch.cuda.get_device_name(engine.device) if cuda else platform.processor() or platform.machine()
    machine = {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}
    return machine | {"precision": engine.precision.policy, "compiled": engine.compiled}


def reset_peak(device: torch.device) -> None:
    """Peak memory counts from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # Linux only, and not in every container
            Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Peak memory since the reset: of the device, or of this process (its whole life where the system can't reset)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
