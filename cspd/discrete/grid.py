"""The sampling settings at which codes of rounds are counted: few, so that a slider that is moved counts none anew."""

from __future__ import annotations

import math

from cspd.sequence import Request

STEPS = {"cfg": 0.5, "temperature": 0.1, "top_p": 0.05}
OFF = {"cfg": 1.0, "temperature": 0.0, "top_p": 1.0}
SETTINGS = (*STEPS, "top_k")


def on_grid(request: Request) -> Request:
    """A resolved request with the nearest settings of the grid: guidance in steps of 0.5, temperature of 0.1, top-p of
    0.05, top-k in powers of two. What is off, or on, stays so.

    A count is the mean of a few images, which is known to 5 %, and decides how long images take, never what they are.
    """
    settings: dict[str, float] = {}
    for name, step in STEPS.items():
        settings[name] = _nearest(getattr(request, name), step, OFF[name])
    if request.top_k:
        settings["top_k"] = 2 ** round(math.log2(request.top_k))
    return request.but(**settings)


def _nearest(value: float, step: float, off: float) -> float:
    """The nearest multiple of a step above 0; `off` for that value alone."""
    if value == off:
        return value
    nearest = max(1, round(value / step)) * step
    if round(nearest, 9) == off:
        nearest += step if value > off else -step
    return round(nearest, 9)
