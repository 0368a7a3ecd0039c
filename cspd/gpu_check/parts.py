"""The parts of a check, in their order: what each may take of the time, and its cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cspd.gpu_check import (
    chosen_windows,
    correctness,
    distributions,
    hardware,
    mar_times,
    syncs,
    top_kernels,
    vq_times,
)
from cspd.gpu_check.settings import Cases, Settings


class Part(NamedTuple):
    """A name, a share of the time, and what makes the cases: functions without arguments, by name.

    A case returns what it found. `passed` is False where something is wrong, `skipped` says why nothing was done, and
    an error is kept with its traceback.
    """

    name: str
    share: float
    cases: Callable[[Settings], Cases]


PARTS = [
    Part("machine", 0.03, hardware.cases),
    Part("correctness", 0.17, correctness.cases),
    Part("distributions", 0.10, distributions.cases),
    Part("syncs", 0.07, syncs.cases),
    Part("MAR times", 0.39, mar_times.cases),
    Part("VQ times", 0.15, vq_times.cases),
    Part("windows", 0.05, chosen_windows.cases),
    Part("top kernels", 0.04, top_kernels.cases),
]
