"""Calibrations: fits of the head's samplers to a model's own samples, made once and cached on disk."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cspd.continuous.rows import BASELINE, ContinuousRunner, Drawn, MakeRunner, Rows, run_plain_round
from cspd.device import Precision, send
from cspd.files import Entry, FileCache, content_hash, remember
from cspd.heads.calibrated import (
    Plan,
    Predictor,
    Segment,
    Shortcut,
    fit_predictor,
    fit_shortcut,
    make_segments,
    plan_of,
)
from cspd.heads.calibration import TRACE_TOKENS, Calibration, Recorder, Trace, draft_table, fit, frozen, joined
from cspd.heads.chain import Chain, Schedule
from cspd.heads.speculative import Chains
from cspd.request import Request, Sequence, Stopwatch
from cspd.terminal import Advance, counting, no_advance

# Traces: chains of the model's own samples.

TRACE_ITERATIONS, TRACE_SEED = 8, 2**40
REPORTED_IMAGES, REPORTED_SEED = 16, 2**42  # images differ more than an image's tokens: a few would not show the error

# The part of the images that a trace has. A fit sees the first, chooses by the second, and what is reported of it is
# measured on the third: the smallest of several values that were measured on the same images is too small.
SEEN, CHOOSING, REPORTED = PARTS = ("seen", "choosing", "reported")


def num_traced(length: int, device: torch.device, part: str = SEEN) -> int:
    """Images of L tokens in a part's trace.

    Fits take at least two, or one on a CPU, where a large model would take minutes.
    """
    least = 1 if device.type == "cpu" else 2
    if part == REPORTED:
        least = REPORTED_IMAGES
    return max(least, -(-TRACE_TOKENS // length))


def trace(
    model: Any,
    request: Request,
    precision: Precision,
    make_runner: MakeRunner,
    part: str = SEEN,
    advance: Advance = no_advance,
) -> Trace:
    """Samples the images of a part, with labels and iterations mixed; each part has other labels and seeds.

    `advance` is called with each share of the work, 1 in all.
    """
    length, num_classes = model.config.seq_len, model.config.class_num
    num_images = num_traced(length, precision.device, part)
    spread = max(1, num_classes // num_images)  # distance between labels
    seeds = {SEEN: TRACE_SEED, CHOOSING: TRACE_SEED + num_images, REPORTED: REPORTED_SEED}
    common = {"num_iter": min(TRACE_ITERATIONS, length), "cfg": request.cfg, "cfg_schedule": request.cfg_schedule}
    common |= {"temperature": request.temperature, "num_sampling_steps": request.num_sampling_steps}
    batch = []
    for i in range(num_images):
        label = (i * spread + PARTS.index(part)) % num_classes
        batch.append(Sequence(Request(label, seeds[part] + i, "ar", **common), ticket=i, slot=i))
    runner, watch = make_runner(model, num_images, precision), Stopwatch(precision.device)
    runner.admit(batch)
    parts: list[Trace] = []
    num_rounds = len(runner.num_masked(batch[0].request))
    share = 1 / (num_rounds * request.num_sampling_steps)
    denoise = functools.partial(traced, parts, lambda: advance(share))
    for _ in range(num_rounds):
        run_plain_round(runner, batch, watch, denoise=denoise)
    return joined(parts)


class _ShownRecorder(Recorder):
    """A recorder that shows its progress."""

    def __init__(self, advance: Callable[[], None]) -> None:
        super().__init__()
        self.advance = advance

    def evaluated(self, *call: Any) -> None:
        super().evaluated(*call)
        self.advance()


def traced(
    parts: list[Trace], advance: Callable[[], None], runner: ContinuousRunner, model: str, rows: Rows, z: Tensor
) -> Drawn:
    """Draws an iteration's rows, adds their chains to `parts`, and calls `advance` at each step."""
    recorder = _ShownRecorder(advance)
    made = BASELINE.denoise(runner, model, rows, z, observers=(recorder,))
    parts.append(recorder.trace(made.tokens, rows.seed))
    return made


class Fitted:
    """The fits of a model's head for sequences of equal settings: `Chain.fitted`."""

    def __init__(self, runner: ContinuousRunner, model: str, sequence: Sequence) -> None:
        self.runner, self.model, self.request, self.key = runner, model, sequence.request, sequence.key
        self.calibrations = runner.tuning.calibrations[model]
        self._made: dict[bool, Chains] = {}

    @functools.cached_property
    def measured(self) -> dict[str, float | None]:
        """What was measured of `calibrated`, by the names in `RoundStats`."""
        return {} if self.request.corrected is False else self.calibrations.shortcut(self.request).measured()

    def segments(self, *settings: Any) -> list[Segment]:
        """Those of the request's plan, whose settings these are."""
        return self.calibrations.segments(self.request)

    def plan(self, head_calls: int) -> tuple[int, ...]:
        """Steps of head calls; equal for both models, since CSpD compares their chains."""
        return self.runner.tuning.calibrations["target"].plan(self.request, head_calls).steps

    def chains(self, chain: Chain, window: int | None, draft: str) -> Chains | None:
        """Empty `Chains` for these tokens; None if nothing is drafted."""
        if not window:
            return None
        is_watched = bool(chain.observers)
        if is_watched not in self._made:
            self._made[is_watched] = self.chains_of(is_watched)
        return self._made[is_watched]

    def chains_of(self, trace_sigma: bool = False) -> Chains:
        """Empty `Chains`. With CUDA graphs, those of the last requests with equal settings are reused."""
        make = functools.partial(self._make_chains, trace_sigma)
        chains = self.runner.graphs.last(f"chains of {self.model}, {trace_sigma=}", self.key, make)
        chains.clear()
        return chains

    def _make_chains(self, trace_sigma: bool) -> Chains:
        request, runner = self.request, self.runner
        head = runner.models[self.model].head
        s = head.schedule(request.num_sampling_steps)
        if request.draft == "frozen":
            coefficients, drift = frozen(s)
        else:
            calibration = self.calibrations.get(request)
            coefficients, drift = calibration.coefficients, calibration.drift
        table = draft_table(coefficients, drift, s, request.window, request.temperature)
        return Chains(
            head,
            s,
            send({"table": table}, runner.device)["table"],
            runner.precision,
            runner.noise,
            graphs=runner.graphs,
            trace_sigma=trace_sigma,
            drafting=self.model == "draft",
            compiled=runner.tuning.compiled,
        )


# Fits are made on first use and cached on disk, beside the checkpoint or else in the user's cache folder. The key of an
# entry has everything that it depends on. The bundled checkpoints come with calibrations for their usual settings
# (scripts/train/bundle_calibrations.py).

# the time of a fit in units of one trace, without its traces, and the traces that it needs: measured with `digits32`
WORK = {Calibration: 0.15, Predictor: 0.3, Shortcut: 0.9}
TRACES = {Calibration: (SEEN,), Predictor: (SEEN, CHOOSING), Shortcut: PARTS}
SCHEMAS = {Calibration: "cspd.calibration/1", Predictor: "cspd.predictor/1", Shortcut: "cspd.shortcut/2"}


class Calibrations:
    """The calibrations of one model, made on first use and cached.

    Args:
        model, precision: the model, and how it computes.
        folders: cache folders, in the order of look-up; a new entry goes to the first writable one.
        make_runner: makes a model runner of the model, whose samples the drafts are fitted to.
    """

    def __init__(self, model: Any, precision: Precision, folders: list[Path], make_runner: MakeRunner) -> None:
        self.model, self.device, self.precision, self.make_runner = model, precision.device, precision, make_runner
        self._cache = FileCache(folders)
        self._weights: str | None = None
        self._plans: dict[tuple, Plan] = {}
        self._segments: dict[str, list[Segment]] = {}
        self._traces: tuple[dict, dict[str, Trace]] = {}, {}  # the last settings, and their traces
        self._advance: Callable[[float], None] = no_advance  # the progress bar of the fit that is running

    @contextlib.contextmanager
    def fitting(self, request: Request, *kinds: type) -> Iterator[None]:
        """Shows one progress bar for all fits of these kinds that are made inside the block."""
        if self._advance is not no_advance:  # the fit is part of one that already has a bar
            yield
            return
        missing = [kind for kind in kinds if self.find(request, kind) is None]
        traces = {part for kind in missing for part in TRACES[kind]} - self._remembered(request).keys()
        work = sum(map(self._work, traces)) + sum(WORK[kind] for kind in missing)
        settings = f"cfg={request.cfg:g}, temperature={request.temperature:g}, {request.num_sampling_steps} steps"
        how = f"{settings}, {self.precision.policy}"
        folder = next(iter(self._cache.writable), "memory")
        description = f"fitting the calibration of `{request.method}` to this model, for the first time with {how}"
        with counting(f"{description} (cached in {folder})", work) as self._advance:
            try:
                yield
            finally:
                self._advance = no_advance

    def get(self, request: Request) -> Calibration:
        """The calibration for a resolved request's guidance, temperature, T and draft."""
        return self._cache.get(Calibration, self._settings(request, Calibration), lambda: self._fit(request))

    def predictor(self, request: Request) -> Predictor:
        """The predictor for a request's guidance, temperature and T."""
        return self._cache.get(Predictor, self._settings(request, Predictor), lambda: self._fit_predictor(request))

    def find(self, request: Request, kind: type[Entry]) -> Entry | None:
        """The cached fit of a kind for a request's settings; None if it has not been made."""
        return self._cache.find(kind, self._settings(request, kind))

    def plan(self, request: Request, head_calls: int | None, most: float | None = None) -> Plan:
        """The plan for a request's chains; arguments as in `plan_of`."""
        settings = json.dumps(self._settings(request, Predictor)), head_calls, most
        if settings not in self._plans:
            remember(self._plans, settings, plan_of(self.predictor(request).skip_cost, head_calls, most))
        return self._plans[settings]

    def shortcut(self, request: Request) -> Shortcut:
        """The shortcut for a resolved request's guidance, temperature, T, head_calls and null_every."""
        return self._cache.get(Shortcut, self._settings(request, Shortcut), lambda: self._fit_shortcut(request))

    def cached(self, request: Request, kind: type[Entry], own: Mapping, make: Callable[[], Entry]) -> Entry:
        """Other arrays that depend on a request's chains and on the settings `own`: from the cache, or made."""
        return self._cache.get(kind, {**self._of_chains(request), **own}, make)

    def segments(self, request: Request) -> list[Segment]:
        """The segments of a request's shortcut, or of its plan if they are not corrected, on the device."""
        settings = json.dumps([self._settings(request, Shortcut), request.corrected is not False])
        if settings not in self._segments:
            own = self._schedule(request), self.predictor(request)
            if request.corrected is False:
                steps = self.plan(request, request.head_calls).steps
                nothing = np.zeros((len(steps), 2), np.float32)
                segments = make_segments(steps, *own, nothing, request.null_every, self.device)
            else:
                segments = self.shortcut(request).segments(*own, request.null_every, self.device)
            remember(self._segments, settings, segments)
        return self._segments[settings]

    def folder_of(self, request: Request, kind: type = Calibration) -> Path | None:
        """The folder with the cached fit of a kind for a request's settings; None if it is not on disk."""
        return self._cache.folder_of(kind, self._settings(request, kind))

    def _settings(self, request: Request, kind: type) -> dict:
        """The cache key of a kind of fit: all settings that its arrays depend on."""
        own: dict[type, dict] = {
            Calibration: {"draft": request.draft},
            Shortcut: {"head_calls": request.head_calls, "null_every": request.null_every if request.guided else None},
        }
        return self._of_chains(request) | {"schema": SCHEMAS[kind]} | own.get(kind, {})

    def _of_chains(self, request: Request) -> dict:
        """All settings that the chains of a trace depend on."""
        if self._weights is None:
            self._weights = content_hash(self.model)
        return {
            "weights": self._weights,
            "cfg": float(request.cfg),
            "cfg_schedule": request.cfg_schedule if request.guided else None,
            "temperature": float(request.temperature),
            "num_sampling_steps": len(self._schedule(request)),
            "precision": self.precision.policy,
            "seed": TRACE_SEED,
        }

    @torch.inference_mode()
    def _fit(self, request: Request) -> Calibration:
        with self.fitting(request, Calibration):
            chains = self._trace(request, SEEN).chains
            made = fit(*chains, self._schedule(request), request.temperature, request.draft == "frozen")
            self._advance(WORK[Calibration])
        return made

    @torch.inference_mode()
    def _fit_predictor(self, request: Request) -> Predictor:
        with self.fitting(request, Predictor):
            seen, choosing = (self._trace(request, part).finite().chains for part in (SEEN, CHOOSING))
            made = fit_predictor(seen, choosing, self._schedule(request), request.temperature)
            self._advance(WORK[Predictor])
        return made

    @torch.inference_mode()
    def _fit_shortcut(self, request: Request) -> Shortcut:
        with self.fitting(request, Predictor, Shortcut):
            predictor, steps = self.predictor(request), self.plan(request, request.head_calls).steps
            seen, choosing, reported = (self._trace(request, part).finite().to(self.device) for part in PARTS)
            advance = lambda share: self._advance(share * WORK[Shortcut])  # noqa: E731
            own = (seen, choosing, reported), self._schedule(request), predictor, steps
            return fit_shortcut(self.model.head, *own, request.null_every, self.precision, advance)

    def _schedule(self, request: Request) -> Schedule:
        """The chain of a request's tokens."""
        return self.model.head.schedule(request.num_sampling_steps)

    def _trace(self, request: Request, part: str) -> Trace:
        """Chains of the model's own samples; the last ones are remembered, since several fits use them."""
        traces = self._remembered(request)
        if part not in traces:
            advance = lambda share: self._advance(share * self._work(part))  # noqa: E731
            traces[part] = trace(self.model, request, self.precision, self.make_runner, part, advance)
        return traces[part]

    def _work(self, part: str) -> float:
        """The time of a part's trace, in units of the trace that the fits see."""
        length = self.model.config.seq_len
        return num_traced(length, self.device, part) / num_traced(length, self.device)

    def _remembered(self, request: Request) -> dict[str, Trace]:
        """The remembered traces of a request's settings, by part."""
        settings = self._of_chains(request)
        if self._traces[0] != settings:
            self._traces = settings, {}
        return self._traces[1]
