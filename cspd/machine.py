"""The machine: its devices and their memory, its name in reports, and how repeated timings spread."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from cspd.option import check_integer

LARGE = 2**30  # bytes of weights that are worth a word


def pick_device(device: str | torch.device) -> torch.device:
    """The device asked for, "auto" being CUDA where there is one, with its number. Raises ValueError where it cannot be
    had.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        picked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is no device: use 'auto', 'cpu', 'cuda' or 'cuda:N'") from error
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but torch {torch.__version__} sees no CUDA device: use device='cpu'")
    if picked.type == "cuda" and (picked.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={device!r}, but there are {torch.cuda.device_count()} CUDA devices: use a lower index"
        )
    if picked.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is not supported: use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if picked.type == "cuda" and picked.index is None:  # the current one, which may be another later
        picked = torch.device("cuda", torch.cuda.current_device())
    return picked


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until a device has done some work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on a device."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gibibytes(number: float) -> str:
    """Bytes for people."""
    return f"{number / 2**30:.1f} GiB"


def room_told(needed: int, device: torch.device) -> str:
    """How much of a device's memory weights take, as it follows their name; nothing where that is little."""
    return f", which takes {gibibytes(needed)} of {gibibytes(free_bytes(device))} free" if needed >= LARGE else ""


def check_fits(per_slot: int, max_batch: int, what: str, fix: str, device: torch.device, once: int = 0) -> None:
    """Raises ValueError where `max_batch` slots of so many bytes, and `once` bytes for all of them, are not free.

    Args:
        what: follows "max_batch=N" in the message. fix: what to do where not even one slot fits.
    """
    check_integer("max_batch", max_batch, 1, 2**20, "it is the number of sequences in flight")
    free, needed = free_bytes(device), once + per_slot * max_batch
    if needed > free:
        most = (free - once) // per_slot
        fix = f"use max_batch <= {most}" if most > 0 else fix
        raise ValueError(
            f"max_batch={max_batch}{what} needs about {gibibytes(needed)} and {device} has {gibibytes(free)} free:"
            f" {fix}"
        )


def describe(device: torch.device) -> dict:
    """The machine that a device belongs to, in a few words."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else _cpu_name()
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def _cpu_name() -> str:
    """The processor as its maker calls it, where Linux tells; else as Python knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


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
