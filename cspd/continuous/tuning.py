"""What speculation in the head is tuned by: drafts fitted to the models, and the costs of this device.

Both are made on first use and kept on disk: calibrations beside the checkpoint, or else in the user's cache folder, and
costs in the user's cache folder. What is kept is found again by all that it depends on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
import warnings
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import platformdirs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor
from tqdm import tqdm

from cspd.continuous import ancestral, ar
from cspd.continuous.calibration import Calibration, fit
from cspd.continuous.costs import Costs, measure
from cspd.continuous.host import MARHost
from cspd.precision import Precision, Stopwatch
from cspd.records import publishing
from cspd.sequence import Request, Sequence
from mar.head import Head
from mar.model import MAR

CALIBRATION_SCHEMA, COSTS_SCHEMA = "cspd.calibration/1", "cspd.costs/2"
REMEMBERED = 64  # settings whose windows and calibrations are in memory
TRACE_TOKENS, TRACE_ITERATIONS, TRACE_SEED = 256, 8, 2**40  # what the fit sees: the sampler's own tokens


def user_cache() -> Path:
    """The user's cache folder for cspd: on Linux $XDG_CACHE_HOME/cspd, or ~/.cache/cspd."""
    return platformdirs.user_cache_path("cspd")


class Tuning:
    """Calibrations and costs, each made on first use.

    Args:
        target, draft: the models. device, precision, compiled: how they run.
        cache: where calibrations are kept, before the user's cache folder.
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
        """The head's costs on this device, measured on first use or `again`; kept in the user's cache folder."""
        if guided not in self._costs or again:
            self._costs[guided] = measured_costs(
                self.target.head, guided, self.device, self.precision, self.compiled, user_cache(), again
            )
        return self._costs[guided]

    def window(self, request: Request, num_slots: int) -> int:
        """The fastest window for what is known of the request and the engine, whatever else is in flight."""
        kind = dataclasses.replace(request, label=0, seed=0), num_slots
        if kind not in self._windows:
            _remember(self._windows, kind, self._window(request, num_slots))
        return self._windows[kind]

    def _window(self, request: Request, num_slots: int) -> int:
        if request.temperature == 0 or request.num_sampling_steps < 3:  # no densities, or nothing to draft
            return 0
        tokens = request.gamma or self.target.config.seq_len / request.num_iter  # of an iteration, of one sequence
        calibration = self.calibrations["target"].get(request)
        return self.costs(request.guided).window(request.num_sampling_steps, num_slots * tokens, calibration)


class Calibrations:
    """The calibrations of one model, kept in memory and on disk.

    Args:
        model, device, precision: whose, and how it computes.
        folders: where they are looked for, in this order; a new one is kept in the first that can be written to.
    """

    def __init__(self, model: MAR, device: torch.device, precision: Precision, folders: list[Path]) -> None:
        self.model, self.device, self.precision, self.folders = model, device, precision, folders
        self._known: dict[str, Calibration] = {}
        self._weights: str | None = None

    def get(self, request: Request) -> Calibration:
        """The calibration for a resolved request's guidance, temperature, T and draft."""
        settings = self._settings(request)
        if settings not in self._known:
            _remember(self._known, settings, self._read(settings) or self._make(request, settings))
        return self._known[settings]

    def folder_of(self, request: Request) -> Path | None:
        """The folder that keeps a request's calibration; None if there is none on disk."""
        name = _file_name(self._settings(request))
        return next((folder for folder in self.folders if (folder / name).is_file()), None)

    def _settings(self, request: Request) -> str:
        """All that a calibration depends on, as text."""
        if self._weights is None:
            self._weights = content_hash(self.model)
        settings = {
            "schema": CALIBRATION_SCHEMA,
            "weights": self._weights,
            "cfg": float(request.cfg),
            "cfg_schedule": request.cfg_schedule if request.guided else None,
            "temperature": float(request.temperature),
            "num_sampling_steps": request.num_sampling_steps,
            "precision": self.precision.policy,
            "seed": TRACE_SEED,
            "draft": request.draft,
        }
        return json.dumps(settings, sort_keys=True)

    @torch.inference_mode()
    def _make(self, request: Request, settings: str) -> Calibration:
        x, eps, v = trace(self.model, request, self.device, self.precision)
        made = fit(x, eps, v, request.temperature, request.draft == "frozen")
        if not self._keep(made, settings):
            places = ", ".join(map(str, self.folders)) or "none given"
            warnings.warn(
                f"the calibration cannot be kept for the next run: no folder is writable ({places})", stacklevel=2
            )
        return made

    def _read(self, settings: str) -> Calibration | None:
        fields = dataclasses.fields(Calibration)
        for folder in self.folders:
            # absent or damaged: it is looked for elsewhere, or made again
            with contextlib.suppress(OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError):
                with safe_open(folder / _file_name(settings), "np") as file:
                    if file.metadata()["settings"] == settings:
                        read = Calibration(**{field.name: file.get_tensor(field.name) for field in fields})
                        read.check(json.loads(settings)["num_sampling_steps"])
                        return read
        return None

    def _keep(self, made: Calibration, settings: str) -> bool:
        """Writes a calibration to the first folder that can be written to; returns whether there was one."""
        for folder in self.folders:
            with contextlib.suppress(OSError, SafetensorError):
                folder.mkdir(parents=True, exist_ok=True)
                with publishing(folder / _file_name(settings)) as temporary:
                    save_file(vars(made), temporary, metadata={"settings": settings})
                    temporary.chmod(0o644)
                return True
        return False


def _remember(known: dict[Any, Any], key: Hashable, value: object) -> None:
    """Adds an entry; of too many the first goes, which can be read or computed again."""
    if len(known) >= REMEMBERED:
        del known[next(iter(known))]
    known[key] = value


def _file_name(settings: str) -> str:
    return f"calibration-{hashlib.blake2b(settings.encode(), digest_size=10).hexdigest()}.safetensors"


def content_hash(model: MAR) -> str:
    """A hash of a model's weights, names and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def trace(model: MAR, request: Request, device: torch.device, precision: Precision) -> tuple[Tensor, Tensor, Tensor]:
    """(x, eps, v) [T, N, d] of N tokens of the sampler's own, labels and iterations mixed; on the CPU."""
    length, num_classes = model.config.seq_len, model.config.class_num
    num_images = max(2, -(-TRACE_TOKENS // length))
    spread = max(1, num_classes // num_images)  # between the labels
    request = dataclasses.replace(request, method="ar", num_iter=min(TRACE_ITERATIONS, length))
    batch = []
    for i in range(num_images):
        own = dataclasses.replace(request, label=i * spread % num_classes, seed=TRACE_SEED + i)
        batch.append(Sequence(own, ticket=i, slot=i))
    host, watch = MARHost(model, num_images, device, precision), Stopwatch(device)
    host.admit(batch)
    iterations = []
    for _ in tqdm(range(request.num_iter), desc="calibrating", unit="iteration", leave=False, delay=2):
        steps = []

        def keep(t: int, x: Tensor, eps: Tensor, v: Tensor, steps: list[Tensor] = steps) -> None:
            steps.append(torch.stack([x, eps, v]))

        ar.run_round(host, batch, watch, denoise=functools.partial(ancestral.denoise, trace=keep))
        steps.reverse()  # they ran from T - 1 down to 0
        iterations.append(torch.stack(steps).cpu())
    x, eps, v = torch.cat(iterations, dim=2).unbind(1)
    return x, eps, v


def measured_costs(
    head: Head,
    guided: bool,
    device: torch.device,
    precision: Precision,
    compiled: bool,
    folder: Path,
    again: bool = False,
) -> Costs:
    """The costs of a head's size on this device: from `folder`, or measured (`again`) and kept there."""
    cuda = device.type == "cuda"
    key = {
        "schema": COSTS_SCHEMA,
        "device": torch.cuda.get_device_name(device) if cuda else f"{_processor()}, {os.cpu_count()} cores",
        "threads": 0 if cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "precision": precision.policy,
        "head": [head.channels, head.width, len(head.res_blocks), head.cond_embed.in_features],
        "guided": guided,
        "compiled": compiled,
    }
    path = folder / "costs.json"
    entries = _entries(path)
    for entry in [] if again else entries:
        if entry["key"] == key:
            with contextlib.suppress(TypeError, ValueError):  # damaged: measured again
                costs = Costs(**entry["costs"])
                costs.check()
                return costs
    costs = measure(head, guided, device, precision, compiled)
    others = [entry for entry in entries if entry["key"] != key]
    entries = [*others, {"key": key, "costs": dataclasses.asdict(costs)}]
    with contextlib.suppress(OSError):  # read-only: measured again next time
        folder.mkdir(parents=True, exist_ok=True)
        with publishing(path) as temporary:
            temporary.write_text(json.dumps(entries, indent=1) + "\n")
    return costs


def _entries(path: Path) -> list[dict]:
    """The measurements in a file of costs; none where it is absent or damaged."""
    try:
        entries = json.loads(path.read_text())
        return [entry for entry in entries if isinstance(entry, dict) and {"key", "costs"} <= entry.keys()]
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        return next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    return platform.processor() or platform.machine()
