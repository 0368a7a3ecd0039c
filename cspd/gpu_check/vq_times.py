"""How long LlamaGen takes at its official sizes, with random weights and the embedded models' acceptance."""

from __future__ import annotations

import functools
from typing import Any

from cspd import noise as philox_noise
from cspd.discrete.models import VQModels
from cspd.gpu_check import replay, work
from cspd.gpu_check.models import engine_of, modes, random_gpt
from cspd.gpu_check.rounds import image_ms, seconds_a_round, starts
from cspd.gpu_check.settings import Cases, Settings
from cspd.machine import peak_bytes, reset_peak
from cspd.sequence import Request

CODES = {"ar": None, "sd": 2.75, "sjd-pac": 4.25, "eagle2": 3.3}  # a round, of the embedded models: docs/benchmarks.md
NODES = {"ar": 1, "sd": 6, "sjd-pac": 65, "eagle2": 61}  # codes and the root, in a forward of the target
PRECISION, BYTES = "bf16", 2


def cases(settings: Settings) -> Cases:
    found: Cases = {}
    timer = _Timer(settings)
    mode = modes(settings)[-1]
    for size in settings.scale.gpts:
        for batch in settings.scale.gpt_batches:
            for name in CODES:
                title = f"{size}, batch {batch}, {PRECISION}, {mode}: {name}"
                found[title] = functools.partial(timer.time, size, batch, name, mode)
    return found


class _Timer:
    """Times one size after another, and keeps the models of one at a time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._models: tuple[str, VQModels] | None = None

    def time(self, size: str, batch: int, name: str, mode: str) -> dict[str, Any]:
        """Milliseconds of an image's codes, and what they take."""
        settings, codes = self.settings, CODES[name]
        config = settings.scale.gpts[size]
        if self._models is None or self._models[0] != size:
            self._models = None  # before others are made
            self._models = size, random_gpt(settings, config, settings.device)
        noise = philox_noise if codes is None else replay.codes_a_round(codes)
        reset_peak(settings.device)
        engine = engine_of(settings, self._models[1], batch, settings.device, PRECISION, mode, noise)
        request = engine.resolve(Request(0, method=name, family="VQ"))
        seconds, committed = seconds_a_round(settings, engine, request)
        least = work.gpt_image(config, batch, committed, NODES[name], BYTES)
        return {
            "size": size,
            "batch": batch,
            "precision": PRECISION,
            "mode": mode,
            "method": name,
            "ms": image_ms(seconds, starts(request, config.block_size, committed), batch),
            "codes_a_round": committed,
            "round_ms": {str(known): 1000 * spent for known, spent in seconds.items()},
            "flops": least.flops,
            "bytes": least.bytes,
            "peak_bytes": peak_bytes(settings.device),
        }
