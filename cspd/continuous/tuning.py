"""What speculation in the head is tuned by: drafts fitted to the models, and the costs of this device.

Both are made on first use and kept on disk: calibrations beside the checkpoint, or else in the user's cache folder, and
costs in the user's cache folder. What is kept is found again by all that it depends on. The embedded checkpoints come
with calibrations for their usual settings (scripts/bundle_calibrations.py).
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import torch

from cspd.choosing import PLAIN, Choice, Chooser
from cspd.continuous.calibration import Calibration, fit
from cspd.continuous.costs import Costs, measure
from cspd.continuous.denoiser import MakeHost
from cspd.continuous.kept import Kept, Kind
from cspd.continuous.plan import Plan, Predictor, Window, fit_predictor, plan_of
from cspd.continuous.shortcut import Shortcut, fit_shortcut
from cspd.continuous.tracing import TRACE_SEED, Trace, trace
from cspd.keeping import content_hash, measured_once, of_device, remember, user_cache
from cspd.precision import Precision
from cspd.sequence import Request
from cspd.telling import counting, no_advance
from mar.head import Head

# what a fit takes beside its traces, of which each takes 1: measured with `digits32`
WORK = {Calibration: 0.15, Predictor: 0.3, Shortcut: 0.9}
COSTS_SCHEMA = "cspd.costs/2"
SCHEMAS = {Calibration: "cspd.calibration/1", Predictor: "cspd.predictor/1", Shortcut: "cspd.shortcut/1"}


class Tuning(Chooser):
    """Calibrations and costs, each made on first use, and the windows that are chosen by them.

    Args:
        target, draft: the models. device, precision, compiled, graphs: how they run.
        make_host: makes a host of one model alone, whose sampling drafts are fitted to.
        cache: where calibrations are kept, before the user's cache folder.
    """

    def __init__(
        self,
        target: Any,
        draft: Any,
        device: torch.device,
        precision: Precision,
        compiled: bool,
        graphs: bool,
        cache: Path | None,
        make_host: MakeHost,
    ) -> None:
        super().__init__()
        self.target, self.device, self.precision = target, device, precision
        self.compiled, self.graphs = compiled, graphs
        folders = [folder for folder in (cache, user_cache()) if folder]
        self.calibrations = {
            name: Calibrations(model, device, precision, folders, make_host)
            for name, model in (("target", target), ("draft", draft))
            if model is not None
        }
        self._costs: dict[bool, Costs] = {}

    def costs(self, guided: bool, again: bool = False) -> Costs:
        """The head's costs on this device, measured on first use or `again`; kept in the user's cache folder."""
        if guided not in self._costs or again:
            self._costs[guided] = measured_costs(
                self.target.head, guided, self.device, self.precision, self.compiled, self.graphs, user_cache(), again
            )
        return self._costs[guided]

    def _kind(self, request: Request, num_slots: int) -> Hashable:
        return *super()._kind(request, num_slots), request.num_made(self.target.config.seq_len)

    def _choose(self, request: Request, num_slots: int) -> Choice:
        """The window that is fastest on this device, and why."""
        num_steps, temperature = request.num_sampling_steps, request.temperature
        if temperature == 0 or num_steps < 3:
            settings = f"temperature={temperature}, num_sampling_steps={num_steps}"
            return Choice(PLAIN, f"{settings}: there is nothing to draft")
        num_made = request.num_made(self.target.config.seq_len)
        rows = num_slots * (request.gamma or num_made / request.num_iter)  # denoised at once: of all slots
        calibrate = functools.partial(self.calibrations["target"].get, request)
        choice = self.costs(request.guided).choose(num_steps, rows, calibrate)
        if choice.way == PLAIN:
            return choice
        return Choice(choice.way, f"{choice.why}; --window {choice.way['window']} gives these images on any machine")


class Calibrations:
    """The calibrations of one model, made on first use and kept.

    Args:
        model, device, precision: whose, and how it computes.
        folders: where they are looked for, in this order; a new one is kept in the first that can be written to.
        make_host: makes a host of the model alone, whose sampling drafts are fitted to.
    """

    def __init__(
        self, model: Any, device: torch.device, precision: Precision, folders: list[Path], make_host: MakeHost
    ) -> None:
        self.model, self.device, self.precision, self.make_host = model, device, precision, make_host
        self._kept = Kept(folders)
        self._weights: str | None = None
        self._plans: dict[tuple, Plan] = {}
        self._windows: dict[str, list[Window]] = {}
        self._traces: tuple[dict, dict[bool, Trace]] = {}, {}  # the settings last asked for, and theirs
        self._advance = no_advance  # of the fit that is told of

    @contextlib.contextmanager
    def fitting(self, request: Request, *kinds: type) -> Iterator[None]:
        """Tells of fits of these kinds, if any is to be made within it: as of one, with the time for all."""
        if self._advance is not no_advance:  # a part of what is told of
            yield
            return
        missing = [kind for kind in kinds if self.find(request, kind) is None]
        traces = {held_out for kind in missing for held_out in (False, kind is not Calibration)}
        work = len(traces - self._remembered(request).keys()) + sum(WORK[kind] for kind in missing)
        settings = f"cfg={request.cfg:g}, temperature={request.temperature:g}, {request.num_sampling_steps} steps"
        how = f"{settings}, {self.precision.policy}"
        place = next(iter(self._kept.writable), "memory")
        told = f"fitting the calibration of `{request.method}` to this model, for the first time with {how}"
        with counting(f"{told} (kept in {place})", work) as self._advance:
            try:
                yield
            finally:
                self._advance = no_advance

    def get(self, request: Request) -> Calibration:
        """The calibration for a resolved request's guidance, temperature, T and draft."""
        return self._kept.get(Calibration, self._settings(request, Calibration), lambda: self._fit(request))

    def predictor(self, request: Request) -> Predictor:
        """The predictor for a request's guidance, temperature and T."""
        return self._kept.get(Predictor, self._settings(request, Predictor), lambda: self._fit_predictor(request))

    def find(self, request: Request, kind: type[Kind]) -> Kind | None:
        """What is kept of a request and a kind; None if it has not been fitted."""
        return self._kept.find(kind, self._settings(request, kind))

    def plan(self, request: Request, head_calls: int | None, most: float | None = None) -> Plan:
        """The plan of so many head calls, or of a divergence, for a request's chains; arguments as in `plan_of`."""
        settings = json.dumps(self._settings(request, Predictor)), head_calls, most
        if settings not in self._plans:
            remember(self._plans, settings, plan_of(self.predictor(request).skip_cost, head_calls, most))
        return self._plans[settings]

    def shortcut(self, request: Request) -> Shortcut:
        """The shortcut for a resolved request's guidance, temperature, T, head calls and null class."""
        return self._kept.get(Shortcut, self._settings(request, Shortcut), lambda: self._fit_shortcut(request))

    def windows(self, request: Request) -> list[Window]:
        """What follows each call of a request's shortcut, on the device."""
        settings = json.dumps(self._settings(request, Shortcut))
        if settings not in self._windows:
            windows = self.shortcut(request).windows(self.predictor(request), request.null_every, self.device)
            remember(self._windows, settings, windows)
        return self._windows[settings]

    def folder_of(self, request: Request, kind: type = Calibration) -> Path | None:
        """The folder that keeps what is of a request and a kind; None if there is none on disk."""
        return self._kept.folder_of(kind, self._settings(request, kind))

    def _settings(self, request: Request, kind: type) -> dict:
        """All that the arrays of a kind depend on."""
        own: dict[type, dict] = {
            Calibration: {"draft": request.draft},
            Shortcut: {"head_calls": request.head_calls, "null_every": request.null_every if request.guided else None},
        }
        return self._of_chains(request) | {"schema": SCHEMAS[kind]} | own.get(kind, {})

    def _of_chains(self, request: Request) -> dict:
        """All that chains depend on."""
        if self._weights is None:
            self._weights = content_hash(self.model)
        return {
            "weights": self._weights,
            "cfg": float(request.cfg),
            "cfg_schedule": request.cfg_schedule if request.guided else None,
            "temperature": float(request.temperature),
            "num_sampling_steps": request.num_sampling_steps,
            "precision": self.precision.policy,
            "seed": TRACE_SEED,
        }

    @torch.inference_mode()
    def _fit(self, request: Request) -> Calibration:
        with self.fitting(request, Calibration):
            chains = self._trace(request, held_out=False).chains
            made = fit(*chains, request.temperature, request.draft == "frozen")
            self._advance(WORK[Calibration])
        return made

    @torch.inference_mode()
    def _fit_predictor(self, request: Request) -> Predictor:
        with self.fitting(request, Predictor):
            seen, held_out = (self._trace(request, held_out).finite().chains for held_out in (False, True))
            made = fit_predictor(seen, held_out, request.temperature)
            self._advance(WORK[Predictor])
        return made

    @torch.inference_mode()
    def _fit_shortcut(self, request: Request) -> Shortcut:
        with self.fitting(request, Predictor, Shortcut):
            predictor, steps = self.predictor(request), self.plan(request, request.head_calls).steps
            seen, held_out = (self._trace(request, held_out).finite().to(self.device) for held_out in (False, True))
            advance = lambda share: self._advance(share * WORK[Shortcut])  # noqa: E731
            given = seen, held_out, predictor, steps, request.null_every, self.precision
            return fit_shortcut(self.model.head, *given, advance)

    def _trace(self, request: Request, held_out: bool) -> Trace:
        """Chains of the sampler's own; the last ones are remembered, since several fits take the same."""
        traces = self._remembered(request)
        if held_out not in traces:
            traces[held_out] = trace(
                self.model, request, self.device, self.precision, self.make_host, held_out, self._advance
            )
        return traces[held_out]

    def _remembered(self, request: Request) -> dict[bool, Trace]:
        """The traces of a request's settings that are remembered, by whether they are held out."""
        settings = self._of_chains(request)
        if self._traces[0] != settings:
            self._traces = settings, {}
        return self._traces[1]


def measured_costs(
    head: Head,
    guided: bool,
    device: torch.device,
    precision: Precision,
    compiled: bool,
    graphs: bool,
    folder: Path,
    again: bool = False,
) -> Costs:
    """The costs of a head's size on this device: from `folder`, or measured (`again`) and kept there."""
    key = {
        "schema": COSTS_SCHEMA,
        **of_device(device),
        "precision": precision.policy,
        "head": [head.channels, head.width, len(head.res_blocks), head.cond_embed.in_features],
        "guided": guided,
        "compiled": compiled,
        "graphs": graphs,
    }

    def timed() -> Costs:
        return measure(head, guided, device, precision, compiled, graphs)

    return measured_once(Costs, key, timed, "timing this device, once", folder, again)
