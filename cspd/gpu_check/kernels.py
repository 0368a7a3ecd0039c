"""What the device does in a round: its kernels by name, and where the host waits for it."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from cspd.gpu_check.settings import Settings

ROOT = Path(__file__).parent.parent.parent
OURS = tuple(str(ROOT / name) for name in ("cspd", "mar"))
WAITS = "called a synchronizing"  # what PyTorch warns of with


class Kernel(NamedTuple):
    """A kernel, how often it ran and how long all runs took; on a CPU an operator."""

    name: str
    count: int
    microseconds: float


def profiled(settings: Settings, work: Callable[[], object]) -> list[Kernel]:
    """The kernels that some work runs, those first that take the most time."""
    cuda = settings.cuda
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes into the bar
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        work()
        settings.synchronize()
    kernels = []
    for event in profiler.key_averages():
        if cuda and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        kernels.append(Kernel(event.key, event.count, spent))
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)


@contextlib.contextmanager
def waits(settings: Settings) -> Iterator[Counter[str]]:
    """Counts, by line of ours, where the host waits for the device within it, which PyTorch warns of on CUDA.

    It warns and does not raise: an error would end the round at the first line, and leave it half done.
    """
    lines: Counter[str] = Counter()

    def note(message: Warning | str, *others: Any) -> None:
        if WAITS in str(message):
            lines[_own_line()] += 1

    cuda = settings.cuda
    before = torch.cuda.get_sync_debug_mode() if cuda else 0
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        try:
            if cuda:
                torch.cuda.set_sync_debug_mode("warn")
            yield lines
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode(before)


def _own_line() -> str:
    """The innermost line of ours that is being run, as "cspd/engine.py:99"."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OURS) and file != __file__:
            return f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
