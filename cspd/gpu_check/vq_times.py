"""How long LlamaGen takes at its official sizes, with random weights and the embedded models' acceptance."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cspd import noise as philox_noise
from cspd.discrete.models import VQModels
from cspd.gpu_check import replay, work
from cspd.gpu_check.models import engine_of, modes, random_gpt
from cspd.gpu_check.rounds import seconds_a_round, times
from cspd.gpu_check.settings import Cases, Settings
from cspd.machine import peak_bytes, reset_peak
from cspd.sequence import Request
from cspd.speed import starts

CODES = {"ar": None, "sd": 2.75, "sjd-pac": 4.25, "eagle2": 3.3}  # a round, of the embedded models: docs/benchmarks.md
COINS = {"eagle2": {"coupling": "maximal"}}  # settings by which uniform draws decide, which are replayed
NODES = {"ar": 1, "sd": 6, "sjd-pac": 65, "eagle2": 61}  # codes and the root, in a forward of the target
PRECISION, BYTES = "bf16", 2


def cases(settings: Settings) -> Cases:
    scale, mode = settings.scale, modes(settings)[-1]
    models = functools.lru_cache(maxsize=1)(lambda size: random_gpt(settings, scale.gpts[size], settings.device))
    return {
        f"{size}, batch {batch}, {PRECISION}, {mode}: {name}": functools.partial(
            _time, settings, models, size, batch, name, mode
        )
        for size in scale.gpts
        for batch in scale.gpt_batches
        for name in CODES
    }


def _time(
    settings: Settings, models: Callable[[str], VQModels], size: str, batch: int, name: str, mode: str
) -> dict[str, Any]:
    """Milliseconds of an image's codes, and what they take; `models`: of a size."""
    codes, config = CODES[name], settings.scale.gpts[size]
    noise = philox_noise if codes is None else replay.codes_a_round(codes)
    target = models(size)
    reset_peak(settings.device)
    engine = engine_of(settings, target, batch, settings.device, PRECISION, mode, noise)
    request = engine.resolve(Request(0, method=name, family="VQ", settings=COINS.get(name)))
    seconds, committed = seconds_a_round(settings, engine, request)
    return {
        "size": size,
        "batch": batch,
        "precision": PRECISION,
        "mode": mode,
        "method": name,
        "codes_a_round": committed,
        **times(seconds, starts(request, config.block_size, committed), batch),
        **vars(work.gpt_image(config, batch, committed, NODES[name], BYTES)),
        "peak_bytes": peak_bytes(settings.device),
    }
