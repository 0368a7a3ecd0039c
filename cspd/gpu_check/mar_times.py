"""How long MAR takes at its official sizes, with random weights and the embedded model's acceptance."""

from __future__ import annotations

import functools
import types
from typing import Any

import numpy as np
import torch

from cspd import noise as philox_noise
from cspd.bench import PUBLISHED
from cspd.continuous.calibration import WINDOWS
from cspd.continuous.models import MARModels
from cspd.engine import Engine
from cspd.gpu_check import replay, work
from cspd.gpu_check.models import embedded, engine_of, modes, random_mar
from cspd.gpu_check.rounds import SHARES, image_ms, iteration_at, seconds_a_round, starts, timed
from cspd.gpu_check.settings import Cases, Setting, Settings
from cspd.lookup import parse_method
from cspd.machine import peak_bytes, reset_peak
from cspd.precision import Precision
from cspd.sequence import Request
from mar import reference
from mar.model import MAR

ALPHA = 0.31  # the share of drafted tokens that `cspd` accepts of the embedded pair at gamma = 8: docs/benchmarks.md
BYTES = {"fp32": 4, "tf32": 4, "bf16": 2}  # of a number in matrix products
LABEL = "of four rounds, scaled to an image"


def names(settings: Settings) -> list[str]:
    """What is timed at each setting."""
    scale = settings.scale
    speculative = [f"speculative:window={window}" for window in scale.windows]
    return [PUBLISHED, "ar", *speculative, f"calibrated:head_calls={scale.head_calls}", f"cspd:gamma={scale.gamma}"]


def cases(settings: Settings) -> Cases:
    found: Cases = {}
    timer = _Timer(settings)
    for setting in settings.scale.mar_settings:
        for name in names(settings):
            own = setting
            if name == PUBLISHED or setting.mode not in modes(settings):  # the published sampler has one way to run
                own = setting._replace(mode="eager")
            title = f"{own.size}, batch {own.batch}, K = {own.num_iter}, {own.precision}, {own.mode}: {name}"
            found[title] = functools.partial(timer.time, own, name)
    return found


class _Timer:
    """Times one setting after another, and keeps the models of one size at a time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._models: tuple[str, MARModels] | None = None

    def time(self, setting: Setting, name: str) -> dict[str, Any]:
        """Milliseconds of an image, and what it takes."""
        models = self._of_size(setting.size)
        reset_peak(self.settings.device)
        found = _published(self.settings, models.target, setting) if name == PUBLISHED else self._timed(setting, name)
        least = self._least(setting, name)
        found |= {"method": name, "how": LABEL, "flops": least.flops, "bytes": least.bytes}
        return setting._asdict() | found | {"peak_bytes": peak_bytes(self.settings.device)}

    def _of_size(self, size: str) -> MARModels:
        if self._models is None or self._models[0] != size:
            self._models = None  # before others are made
            self._models = size, random_mar(self.settings, self.settings.scale.mars[size], self.settings.device)
        return self._models[1]

    def _timed(self, setting: Setting, name: str) -> dict[str, Any]:
        settings = self.settings
        request = request_of(settings, name, setting.num_iter)
        engine = engine_of(
            settings,
            self._of_size(setting.size),
            setting.batch,
            settings.device,
            setting.precision,
            setting.mode,
            self._noise(request),
        )
        request = engine.resolve(request)
        seconds, tokens = seconds_a_round(settings, engine, request)
        known = starts(request, engine.host.seq_len, tokens if request.method == "cspd" else None)
        return {"ms": image_ms(seconds, known, setting.batch), "round_ms": _by_known(seconds)}

    def _noise(self, request: Request) -> types.ModuleType | types.SimpleNamespace:
        """Noise that accepts as the embedded model does."""
        if request.method == "speculative":
            return replay.head_calls(self.calls[request.window], self.settings.device)
        return replay.token_share(ALPHA) if request.method == "cspd" else philox_noise

    def _least(self, setting: Setting, name: str) -> work.Work:
        """What an image takes at least by a method."""
        steps, (method, options) = self.settings.scale.steps, parse_method(name, more=[PUBLISHED])
        if method == "cspd":
            return _drafted_tokens(self.settings, setting, options["gamma"])
        if method == "speculative":
            window = options["window"]
            chains = work.Chains(steps, self.calls[window].mean() - 1, width=window)
        elif method == "calibrated":
            chains = work.Chains(options["head_calls"], options["head_calls"], classes=1.5)
        else:
            chains = work.Chains(steps, steps, anew=method == PUBLISHED)
        config = self.settings.scale.mars[setting.size]
        return work.mar_image(config, setting.batch, setting.num_iter, chains, BYTES[setting.precision])

    @functools.cached_property
    def calls(self) -> dict[int, Any]:
        """Head calls of the embedded model's tokens, int [N] by window."""
        settings = self.settings
        engine: Engine = embedded(settings, "MAR", 1, settings.device)
        request = engine.check(Request(0, method="speculative", num_sampling_steps=settings.scale.steps, window=0))
        calibration = engine.host.tuning.calibrations["target"].get(request)
        return dict(zip(WINDOWS, calibration.calls))


def request_of(settings: Settings, name: str, num_iter: int) -> Request:
    """The request of a method's name with its options; its guidance and temperature are the published ones."""
    method, options = parse_method(name)
    own: dict[str, object] = {"num_iter": num_iter, "num_sampling_steps": settings.scale.steps}
    if method == "speculative":
        own["draft"] = "frozen"  # its acceptance is replayed: nothing is to be fitted
    return Request(0, method=method, family="MAR", **own, **options)


def _by_known(seconds: dict[int, float]) -> dict[str, float]:
    return {str(known): 1000 * spent for known, spent in seconds.items()}


def _published(settings: Settings, model: MAR, setting: Setting) -> dict[str, Any]:
    """The published sampler, some iterations of it."""
    length, num_iter = model.config.seq_len, setting.num_iter
    request = Request(0, num_iter=num_iter, cfg=3.0, cfg_schedule="linear")
    known = starts(request, length)
    labels = torch.arange(setting.batch, device=settings.device) % model.config.class_num
    own = {"num_iter": num_iter, "cfg": 3.0, "cfg_schedule": "linear", "num_sampling_steps": settings.scale.steps}

    def run(iteration: int) -> None:
        with Precision(setting.precision, settings.device).fast():
            reference.sample(model, labels, **own, iterations=range(iteration, iteration + 1))

    run(0)
    seconds = {}
    for share in SHARES:
        iteration = iteration_at(known, share * length)
        seconds[int(known[iteration])] = timed(settings, lambda: run(iteration))  # noqa: B023
    return {"ms": image_ms(seconds, known, setting.batch), "round_ms": _by_known(seconds)}


def _drafted_tokens(settings: Settings, setting: Setting, gamma: int) -> work.Work:
    """What an image takes at least by `cspd`."""
    scale, batch, size = settings.scale, setting.batch, BYTES[setting.precision]
    config, chains = scale.mars[setting.size], work.Chains(scale.steps, scale.steps)
    known = np.arange(0, config.seq_len, gamma)
    drafted = work.backbone(scale.mar_draft, 2 * batch, known, size) + chains.work(scale.mar_draft, batch, size)
    judged = work.backbone(config, 2 * batch, known, size) + chains.work(config, batch * gamma, size)
    return (drafted * gamma + judged).sum() * (1 / batch)
