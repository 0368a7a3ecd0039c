"""What speculation in the head is tuned by: drafts fitted to the models, and the costs of this device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from cspd.continuous.calibration import Calibrations, user_cache
from cspd.continuous.costs import Costs, measured_costs
from cspd.precision import Precision
from cspd.sequence import Request
from mar.model import MAR


class Tuning:
    """Calibrations and costs, each made on first use and kept on disk.

    Args:
        target, draft: the models. device, precision, compiled: how they run.
        cache: where calibrations are kept, before the user's cache directory.
    """

    def __init__(
        self,
        target: MAR,
        draft: MAR | None,
        device: torch.device,
        precision: Precision,
        compiled: bool,
        cache: Path | None,
    ) -> None:
        self.target, self.device, self.precision, self.compiled = target, device, precision, compiled
        folders = [folder for folder in (cache, user_cache()) if folder]
        self.calibrations = {
            name: Calibrations(model, device, precision, folders)
            for name, model in (("target", target), ("draft", draft))
            if model is not None
        }
        self._costs: dict[bool, Costs] = {}
        self._windows: dict[tuple[Request, int], int] = {}

    def costs(self, guided: bool, again: bool = False) -> Costs:
        """The head's costs on this device, measured on first use or `again`; kept in the user's cache directory."""
        if guided not in self._costs or again:
            self._costs[guided] = measured_costs(
                self.target.head, guided, self.device, self.precision, self.compiled, user_cache(), again
            )
        return self._costs[guided]

    def window(self, request: Request, num_slots: int) -> int:
        """The fastest window for what is known of the request and the engine: not what else is in flight."""
        kind = dataclasses.replace(request, label=0, seed=0), num_slots
        if kind not in self._windows:
            self._windows[kind] = self._window(request, num_slots)
        return self._windows[kind]

    def _window(self, request: Request, num_slots: int) -> int:
        if request.temperature == 0 or request.num_sampling_steps < 3:  # no densities, or nothing to draft
            return 0
        tokens = request.gamma or self.target.config.seq_len / request.num_iter  # of an iteration, of one sequence
        calibration = self.calibrations["target"].get(request)
        return self.costs(request.guided).window(request.num_sampling_steps, num_slots * tokens, calibration)
