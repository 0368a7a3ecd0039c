"""Fits of a head's samplers to the tokens that it draws for its own user, in place of samples of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cspd.device import Precision
from cspd.heads.calibrated import (
    HEAD_CALLS,
    Predictor,
    Segment,
    Shortcut,
    fit_predictor,
    fit_shortcut,
    make_segments,
    plan_of,
)
from cspd.heads.calibration import WINDOWS, Calibration, Recorder, Trace, draft_table, fit, frozen, joined
from cspd.heads.chain import Chain, Schedule
from cspd.heads.samplers import Sampler, ancestral
from cspd.heads.speculative import Chains

TOKENS, FEWEST = 512, 48  # that fits are made from; the fewest, if tokens or chains are large
CALLS = 24  # at least, that they come from: tokens of one call have much in common
MOST_NUMBERS = 2**24  # of all recorded x, eps, v and noise, 64 MiB; their conditions come on top
GAIN = 1.1  # predicted gain below which nothing is drafted


class FitCache(Protocol):
    """Fitted arrays by their settings, see `cspd.files.FileCache`."""

    def get(self, kind: Any, settings: dict, make: Callable[[], Any]) -> Any: ...
    def find(self, kind: Any, settings: dict) -> Any: ...


class Learned:
    """The fits of one chain of a head: `Chain.fitted`. It records chains until it has seen enough tokens.

    Args:
        head: whose chains are recorded. s, temperature: of the chains, tau > 0. branches: G.
        precision: how the head computes. cache: of the fits. settings: what they depend on, besides their kind.
        seconds: predicted seconds of the chains of some rows at once: (T, rows, window, calls) -> float; window 0 is
            the full chain. See `cspd.continuous.tuning.head_seconds`.
    """

    def __init__(
        self,
        head: Any,
        s: Schedule,
        temperature: float,
        branches: int,
        precision: Precision,
        cache: FitCache,
        settings: dict,
        seconds: Callable[[int, int, int, Any], float],
    ) -> None:
        self.head, self.s, self.temperature, self.branches = head, s, temperature, branches
        self.precision, self.cache, self.settings, self.seconds = precision, cache, settings, seconds
        self.wanted = int(np.clip(MOST_NUMBERS // (4 * len(s) * head.channels), FEWEST, TOKENS))
        self.num_seen, self._calls = 0, 0
        self._parts: tuple[list[Trace], list[Trace], list[Trace]] = [], [], []  # seen, choosing, reported
        self._is_fitted = False
        self._windows: dict[int, int] = {}  # by rows at once
        self._chains: dict[tuple, Chains] = {}
        self._segments: dict[tuple, list[Segment]] = {}
        self.shortcut: Shortcut | None = None  # of the last plan

    # Recording.

    def needs_tokens(self, sampler: Sampler, settings: dict) -> bool:
        """Whether a sampler with these settings has to wait for more tokens."""
        if self._is_fitted or (self.num_seen >= self.wanted and all(self._parts)):
            return False
        if sampler.name != "calibrated":
            return self.cache.find(Calibration, self._key(Calibration)) is None
        predictor = self.cache.find(Predictor, self._key(Predictor))
        if predictor is None:
            return True
        calls, divergence = settings.get("head_calls"), settings.get("divergence")
        steps = plan_of(predictor.skip_cost, *self._length(calls, divergence)).steps
        own = {"head_calls": len(steps), "null_every": settings.get("null_every", 2)}
        is_fitted = self.cache.find(Shortcut, self._key(Shortcut, **own)) is not None
        return settings.get("corrected", True) and not is_fitted

    def _length(self, head_calls: int | None, divergence: float | None) -> tuple[int | None, float | None]:
        """How long a plan is to be, for `plan_of`; of a short chain it has all calls."""
        if divergence is None:
            head_calls = min(head_calls or HEAD_CALLS, len(self.s))
        return head_calls, divergence

    def record(self, chain: Chain) -> Tensor:
        """Tokens [R, d] by the full chain, from which a fit will learn."""
        num_rows = chain.z.shape[1]
        some = min(num_rows, -(-self.wanted // CALLS))
        recorder = Recorder(torch.linspace(0, num_rows - 1, some, device=chain.z.device).round().long())
        chain.observers = (*chain.observers, recorder)
        tokens = ancestral(chain)
        # each call counts as an image, whose tokens are not independent
        image = torch.full((num_rows,), self._calls, device=tokens.device)
        trace = recorder.trace(tokens, image)
        if all(values.isfinite().all() for values in trace):
            self._parts[self._calls % 3].append(trace)
            self.num_seen += some
            self._calls += 1
        return tokens

    def _key(self, kind: type, **own: Any) -> dict:
        return {**self.settings, "num_sampling_steps": len(self.s), "fit": kind.__name__, **own}

    # What samplers ask for.

    def chains(self, chain: Chain, window: int | None, draft: str) -> Chains | None:
        """Empty `Chains` for these tokens; None if nothing is drafted."""
        calibration: Any = None
        if window is None or draft == "calibrated":
            calibration = self.cache.get(Calibration, self._key(Calibration), self._fit)
            self._forget()
        if window is None:
            window = self.window(chain.z.shape[1], calibration)
        window = min(window, len(self.s) - 1)
        if not window:
            return None
        key = window, draft
        if key not in self._chains:
            coefficients, drift = frozen(self.s)
            if draft == "calibrated":
                coefficients, drift = calibration.coefficients, calibration.drift
            made = draft_table(coefficients, drift, self.s, window, self.temperature)
            table = torch.from_numpy(made).to(chain.z.device)
            self._chains[key] = Chains(self.head, self.s, table, self.precision, chain.noise)
        self._chains[key].noise = chain.noise
        self._chains[key].clear()
        return self._chains[key]

    def window(self, num_rows: int, calibration: Calibration) -> int:
        """The fastest window for as many rows at once, by the measured times; 0 if nothing is gained."""
        size = 1 << (num_rows - 1).bit_length()
        if size not in self._windows:
            fitting = [window for window in WINDOWS if window < len(self.s)]
            predicted = {
                window: self.seconds(len(self.s), size, window, calibration.calls[WINDOWS.index(window)])
                for window in fitting
            }
            best = min(predicted, key=predicted.__getitem__)
            gain = self.seconds(len(self.s), size, 0, None) / predicted[best]
            self._windows[size] = best if gain > GAIN else 0
        return self._windows[size]

    def segments(
        self, head_calls: int | None, divergence: float | None, null_every: int, corrected: bool
    ) -> list[Segment]:
        """Those of the plan with these settings, see `cspd.heads.calibrated`."""
        key = head_calls, divergence, null_every, corrected
        if key not in self._segments:
            predictor = self._predictor()
            steps = plan_of(predictor.skip_cost, *self._length(head_calls, divergence)).steps
            corrections = np.zeros((len(steps), 2), np.float32)
            if corrected:
                own = {"head_calls": len(steps), "null_every": null_every}
                fit_it = lambda: self._fit_shortcut(predictor, steps, null_every)  # noqa: E731
                self.shortcut = self.cache.get(Shortcut, self._key(Shortcut, **own), fit_it)
                steps, corrections = tuple(self.shortcut.steps.tolist()), self.shortcut.corrections
            self._forget()
            device = self.precision.device
            self._segments[key] = make_segments(steps, self.s, predictor, corrections, null_every, device)
        return self._segments[key]

    def _forget(self) -> None:
        """Frees the recorded chains after the fit: a handle's method and settings stay the same."""
        self._is_fitted = True
        for part in self._parts:
            part.clear()

    # Fits.

    def _fit(self) -> Calibration:
        every = [trace for part in self._parts for trace in part]
        return fit(*joined(every).chains, self.s, self.temperature)

    def _predictor(self) -> Predictor:
        return self.cache.get(Predictor, self._key(Predictor), self._fit_predictor)

    def _fit_predictor(self) -> Predictor:
        seen, choosing, _ = map(joined, self._parts)
        return fit_predictor(seen.chains, choosing.chains, self.s, self.temperature)

    def _fit_shortcut(self, predictor: Predictor, steps: tuple[int, ...], null_every: int) -> Shortcut:
        seen, choosing, reported = (joined(part).to(self.precision.device) for part in self._parts)
        traces = seen, choosing, reported
        return fit_shortcut(self.head, traces, self.s, predictor, steps, null_every, self.precision)
