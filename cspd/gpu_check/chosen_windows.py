"""The windows that the cost model chooses on this device, and what it knows of the device."""

from __future__ import annotations

import dataclasses
from typing import Any

from cspd.continuous.costs import measure
from cspd.gpu_check.models import embedded_calibration, random_model
from cspd.gpu_check.settings import Cases, Settings
from cspd.precision import Precision
from mar.model import MAR

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ITERATIONS = (256, 64, 16)


def cases(settings: Settings) -> Cases:
    return {size: lambda size=size: _windows(settings, size) for size in settings.scale.mars}


def _windows(settings: Settings, size: str) -> dict[str, Any]:
    """The window by K and batch, with the embedded model's acceptance, and the costs that they are chosen by."""
    steps, config = settings.scale.steps, settings.scale.mars[size]
    calibration = embedded_calibration(settings)
    head = random_model(MAR, config, settings.device).head
    costs = measure(head, True, settings.device, Precision("bf16", settings.device))
    chosen = {}
    for num_iter in ITERATIONS:
        tokens = config.seq_len / num_iter
        choices = {str(batch): costs.choose(steps, batch * tokens, lambda: calibration) for batch in BATCHES}
        windows = {batch: choice.way["window"] for batch, choice in choices.items()}
        chosen[f"K = {num_iter}"] = windows
    return {"windows": chosen, "costs": dataclasses.asdict(costs)}
