"""The kernels that take the most time, by method and batch."""

from __future__ import annotations

import functools
from typing import Any

from cspd.gpu_check import replay
from cspd.gpu_check.kernels import profiled
from cspd.gpu_check.mar_times import request_of
from cspd.gpu_check.models import engine_of, random_mar
from cspd.gpu_check.settings import Cases, Settings
from cspd.machine import peak_bytes, reset_peak
from cspd.speed import batch_at

MOST = 20
BATCHES = (1, 64)
SHARE = 0.5


def cases(settings: Settings) -> Cases:
    window = settings.scale.windows[0]
    names = ("ar", f"speculative:window={window}")
    return {
        f"B, batch {batch}, bf16, eager: {name}": functools.partial(_top, settings, name, batch)
        for batch in BATCHES
        for name in names
    }


def _top(settings: Settings, name: str, batch: int) -> dict[str, Any]:
    device, steps = settings.device, settings.scale.steps
    models = random_mar(settings, settings.scale.mars["B"], device)
    reset_peak(device)
    calls = max(2, steps // 10)  # of a token
    noise = replay.head_calls([calls], device)
    engine = engine_of(settings, models, batch, device, "bf16", "eager", noise)
    num_iter = settings.scale.mar_settings[0].num_iter
    request = engine.resolve(request_of(settings, name, num_iter))
    rounds = batch_at(engine, request, int(SHARE * engine.host.seq_len))
    rounds.round()
    kernels = profiled(settings, rounds.round)
    total = sum(kernel.microseconds for kernel in kernels)
    return {
        "kernels": sum(kernel.count for kernel in kernels),
        "kernel_us": total,
        "top": [kernel._asdict() for kernel in kernels[:MOST]],
        "peak_bytes": peak_bytes(device),
    }
