"""Syncs: rounds in which the host should never wait for the device, and how many kernels they are."""

from __future__ import annotations

import functools
from typing import Any

from cspd.engine import Engine
from cspd.gpu_check.correctness import requests
from cspd.gpu_check.kernels import profiled, waits
from cspd.gpu_check.models import embedded, modes
from cspd.gpu_check.settings import Cases, Settings
from cspd.methods import METHODS
from cspd.speed import batch_at

SHARE = 0.25  # of the tokens that are known: no sequence begins or ends in these rounds


def cases(settings: Settings) -> Cases:
    @functools.cache
    def engine(family: str, mode: str) -> Engine:
        return embedded(settings, family, settings.scale.same_seeds["images"], settings.device, mode)

    def case(family: str, name: str, mode: str) -> dict[str, Any]:
        return _round(settings, engine(family, mode), family, name)

    return {
        f"{method.family} {method.name}, {mode}": functools.partial(case, method.family, method.name, mode)
        for mode in modes(settings)
        if mode != "compiled"
        for method in METHODS
    }


def _round(settings: Settings, engine: Engine, family: str, name: str) -> dict[str, Any]:
    batch = batch_at(engine, engine.resolve(requests(settings, family, name)[0]), int(SHARE * engine.host.seq_len))
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
