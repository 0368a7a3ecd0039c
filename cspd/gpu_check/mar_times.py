"""How long MAR takes at its official sizes, with random weights and the embedded model's acceptance."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cspd import noise as philox_noise
from cspd.bench import PUBLISHED
from cspd.continuous.calibration import WINDOWS
from cspd.continuous.models import MARModels
from cspd.engine import Engine
from cspd.families import COMMON
from cspd.gpu_check import replay, work
from cspd.gpu_check.models import embedded_calibration, engine_of, modes, random_mar
from cspd.gpu_check.rounds import SHARES, seconds_a_round, timed, times
from cspd.gpu_check.settings import Cases, Setting, Settings
from cspd.lookup import parse_method
from cspd.machine import peak_bytes, reset_peak
from cspd.sequence import Request
from cspd.speed import iteration_at, starts

ALPHA = 0.31  # the share of drafted tokens that `cspd` accepts of the embedded pair at gamma = 8: docs/benchmarks.md
BYTES = {"fp32": 4, "tf32": 4, "bf16": 2}  # of a number in matrix products


def names(settings: Settings) -> list[str]:
    """What is timed at each setting."""
    scale = settings.scale
    speculative = [f"speculative:window={window}" for window in scale.windows]
    return [PUBLISHED, "ar", *speculative, f"calibrated:head_calls={scale.head_calls}", f"cspd:gamma={scale.gamma}"]


def cases(settings: Settings) -> Cases:
    scale = settings.scale
    models = functools.lru_cache(maxsize=1)(lambda size: random_mar(settings, scale.mars[size], settings.device))
    calls = functools.cache(lambda: dict(zip(WINDOWS, embedded_calibration(settings).calls)))
    found: Cases = {}
    for setting in scale.mar_settings:
        for name in names(settings):
            own = setting
            if name == PUBLISHED or setting.mode not in modes(settings):  # the published sampler has one way to run
                own = setting._replace(mode="eager")
            title = f"{own.size}, batch {own.batch}, K = {own.num_iter}, {own.precision}, {own.mode}: {name}"
            found[title] = functools.partial(_time, settings, models, calls, own, name)
    return found


def _time(
    settings: Settings,
    models: Callable[[str], MARModels],
    calls: Callable[[], dict[int, np.ndarray]],
    setting: Setting,
    name: str,
) -> dict[str, Any]:
    """Milliseconds of an image, and what it takes.

    Args:
        models: of a size. calls: head calls of the embedded model's tokens, int [N] by window.
    """
    request = request_of(settings, name, setting.num_iter)
    # acceptance is as of the embedded model
    noise: Any = philox_noise
    if request.method == "speculative":
        noise = replay.head_calls(calls()[request.window], settings.device)
    elif request.method == "cspd":
        noise = replay.token_share(ALPHA)

    target = models(setting.size)
    reset_peak(settings.device)
    engine = engine_of(settings, target, setting.batch, settings.device, setting.precision, setting.mode, noise)
    request = engine.resolve(request)
    if name == PUBLISHED:
        seconds, known = published_seconds(settings, engine, request)
    else:
        seconds, tokens = seconds_a_round(settings, engine, request)
        known = starts(request, engine.host.seq_len, tokens if request.method == "cspd" else None)
    return {
        **setting._asdict(),
        "method": name,
        **times(seconds, known, setting.batch),
        **vars(_least(settings, setting, name, calls)),
        "peak_bytes": peak_bytes(settings.device),
    }


def _least(settings: Settings, setting: Setting, name: str, calls: Callable[[], dict[int, np.ndarray]]) -> work.Work:
    """What an image takes at least by a method."""
    steps, (method, options) = settings.scale.steps, parse_method(name, more=[PUBLISHED])
    if method == "cspd":
        return _drafted_tokens(settings, setting, options["gamma"])
    if method == "speculative":
        window = options["window"]
        chains = work.Chains(steps, float(calls()[window].mean()) - 1, width=window)
    elif method == "calibrated":
        chains = work.Chains(options["head_calls"], options["head_calls"], classes=1.5)
    else:
        chains = work.Chains(steps, steps, anew=method == PUBLISHED)
    config = settings.scale.mars[setting.size]
    return work.mar_image(config, setting.batch, setting.num_iter, chains, BYTES[setting.precision])


def request_of(settings: Settings, name: str, num_iter: int) -> Request:
    """The request of a method's name with its options; its guidance and temperature are the published ones."""
    method, options = parse_method(name, more=[PUBLISHED])
    own: dict[str, object] = {"num_iter": num_iter, "num_sampling_steps": settings.scale.steps}
    if method == "speculative":
        own["draft"] = "frozen"  # its acceptance is replayed: nothing is to be fitted
    return Request(0, method="ar" if method == PUBLISHED else method, family="MAR", **own, **options)


def published_seconds(settings: Settings, engine: Engine, request: Request) -> tuple[dict[int, float], np.ndarray]:
    """As `seconds_a_round`, of the published sampler's iterations; and the tokens known before each of them."""
    known = starts(request, engine.host.seq_len)
    own = {option.name: getattr(request, option.name) for option in COMMON["MAR"]}
    labels = torch.arange(engine.num_slots, device=settings.device) % engine.host.num_classes

    def run(iteration: int) -> None:
        engine.host.published(labels, own | {"iterations": range(iteration, iteration + 1)})

    run(0)
    iterations = [iteration_at(known, share * engine.host.seq_len) for share in SHARES]
    return {int(known[i]): timed(settings, functools.partial(run, i)) for i in iterations}, known


def _drafted_tokens(settings: Settings, setting: Setting, gamma: int) -> work.Work:
    """What an image takes at least by `cspd`."""
    scale, batch, size = settings.scale, setting.batch, BYTES[setting.precision]
    config, chains = scale.mars[setting.size], work.Chains(scale.steps, scale.steps)
    known = np.arange(0, config.seq_len, gamma)
    drafted = work.backbone(scale.mar_draft, 2 * batch, known, size) + chains.work(scale.mar_draft, batch, size)
    judged = work.backbone(config, 2 * batch, known, size) + chains.work(config, batch * gamma, size)
    return (drafted * gamma + judged).sum() * (1 / batch)
