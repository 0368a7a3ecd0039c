"""The drafts of speculative denoising: linear predictors of the head's output, fitted once per model and settings.

A calibration moves speed, and which image a seed gives, never the law. It is kept on disk, beside the checkpoint or in
the user's cache directory, under a hash of the weights and settings it was made for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor
from tqdm import tqdm

from cspd.continuous import ancestral, ar
from cspd.continuous.host import MARHost
from cspd.precision import Precision, Stopwatch
from cspd.sequence import Request
from cspd.sequence import Sequence as Running
from mar.diffusion import schedule
from mar.model import MAR

SCHEMA = "cspd.calibration/1"
DRAFTS = {
    "calibrated": "eps~ = c0 y + c1 eps' + c2 x', least squares by step and lag",
    "frozen": "eps~ = eps', the last evaluated one: needs no fit, is right less often",
}
WINDOWS = (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32)
TRACE_TOKENS, TRACE_ITERATIONS, TRACE_SEED = 256, 8, 2**40  # what the fit sees: the sampler's own tokens
RIDGE = 1e-7  # of the mean diagonal: at the noisiest steps eps' and x' are nearly the same


@dataclass(frozen=True)
class Calibration:
    """A draft, and how often it is right.

    Attributes:
        coefficients: float32 [T, lags, 3], (c0, c1, c2) by step and lag, lags from 1.
        drift: float32 [T, lags], mean change of the variance channel.
        calls: int16 [len(WINDOWS), N], sequential head calls of N tokens at each window, simulated on the traces.
    """

    coefficients: np.ndarray
    drift: np.ndarray
    calls: np.ndarray


def fit(x: Tensor, eps: Tensor, v: Tensor, temperature: float, frozen: bool = False) -> Calibration:
    """Fits the draft to ancestral chains and simulates its acceptance on them.

    For each step k and lag w it solves the least squares of eps_k on (x_k, eps_{k+w}, x_{k+w}), weights 1/sigma_k^2.

    Args:
        x, eps, v: [T, N, d], inputs, guided noise predictions and variance channels of N chains; on the CPU.
        temperature: tau > 0 the chains ran with. frozen: take c = (0, 1, 0) and no drift instead of fitting.
    """
    num_steps, num_chains = x.shape[:2]
    lags = min(WINDOWS[-1], num_steps)
    s, generator = schedule(num_steps), torch.Generator().manual_seed(0)
    coefficients, drift = torch.zeros(num_steps, lags, 3), torch.zeros(num_steps, lags)
    coefficients[..., 1] = 1
    accepted = torch.zeros(num_steps, lags, num_chains, dtype=torch.bool)
    accepted[0] = True  # the last step is never judged
    for k in range(1, num_steps - 1):
        near = slice(k + 1, k + 1 + lags)  # the anchors, by lag
        n = len(x[near])
        if not frozen:
            coefficients[k, :n] = _least_squares(x[k], eps[k], x[near], eps[near], v[k], s.log_sigma_slope[k])
            drift[k, :n] = (v[k] - v[near]).mean((1, 2))
        c = coefficients[k, :n, :, None, None]
        drafted = c[:, 0] * x[k] + c[:, 1] * eps[near] + c[:, 2] * x[near]
        log_p = np.log(temperature) + s.log_sigma_base[k] + s.log_sigma_slope[k] * v[k]
        log_q = log_p + s.log_sigma_slope[k] * (v[near] + drift[k, :n, None, None] - v[k])
        z_q = torch.randn(x.shape[1:], generator=generator)
        z_p = (s.mean_eps[k] * (drafted - eps[k]) + log_q.exp() * z_q) * torch.exp(-log_p)
        log_ratio = (log_q - log_p + 0.5 * (z_q - z_p) * (z_q + z_p)).sum(-1)
        accepted[k, :n] = torch.rand(num_chains, generator=generator).log() < log_ratio
    calls = torch.stack([_simulate(accepted[:, : min(w, lags)]) for w in WINDOWS])
    return Calibration(coefficients.numpy(), drift.numpy(), calls.to(torch.int16).numpy())


def _least_squares(x: Tensor, eps: Tensor, anchor_x: Tensor, anchor_eps: Tensor, v: Tensor, slope: float) -> Tensor:
    """c [lags, 3] for eps [N, d] on x [N, d] and the anchors [lags, N, d], weighted by the variances' inverse."""
    features = torch.stack([x.expand_as(anchor_x), anchor_eps, anchor_x], dim=1).flatten(2).double()  # [lags, 3, N d]
    weighted = features * torch.exp(-2 * slope * (v - v.mean())).flatten().double()
    gram = weighted @ features.transpose(1, 2)
    ridge = RIDGE * gram.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * torch.eye(3, dtype=torch.float64)
    return torch.linalg.solve(gram + ridge, weighted @ eps.flatten().double()).float()


def _simulate(accepted: Tensor) -> Tensor:
    """Head calls a token [N], the first included, where `accepted` [T, W, N] says which lags are right at each step."""
    num_steps, window, chains = accepted.shape
    t, calls, index = torch.full((chains,), num_steps - 2), torch.ones(chains), torch.arange(chains)
    while (t >= 0).any():
        calls += t >= 0
        k = t - torch.arange(window).unsqueeze(1)
        right = accepted[k.clamp(min=0), torch.arange(window).unsqueeze(1), index].cumprod(0).sum(0)
        t = t - torch.minimum(right + 1, (t + 1).clamp(0, window))
    return calls


def trace(model: MAR, request: Request, device: torch.device, precision: Precision) -> tuple[Tensor, Tensor, Tensor]:
    """(x, eps, v) [T, N, d] of N tokens of the sampler's own, labels and iterations mixed; on the CPU."""
    images = max(2, -(-TRACE_TOKENS // model.config.seq_len))
    host = MARHost(model, images, device, precision)
    changes = {"method": "ar", "num_iter": min(TRACE_ITERATIONS, model.config.seq_len)}
    request = dataclasses.replace(request, **changes)
    spread = max(1, model.config.class_num // images)
    batch = [
        Running(dataclasses.replace(request, label=i * spread % model.config.class_num, seed=TRACE_SEED + i), i, slot=i)
        for i in range(images)
    ]
    host.admit(batch)
    watch = Stopwatch(device)
    iterations = []
    for _ in tqdm(range(request.num_iter), desc="calibrating", unit="iteration", leave=False, delay=2):
        steps = []
        keep = lambda t, x, eps, v, steps=steps: steps.append(torch.stack([x, eps, v]))  # noqa: E731
        ar.run_round(host, batch, watch, denoise=functools.partial(ancestral.denoise, trace=keep))
        iterations.append(torch.stack(steps[::-1]).cpu())
    return tuple(torch.cat(iterations, dim=2).unbind(1))


def frozen(num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients [T, lags, 3] and drift [T, lags] of the frozen draft, which needs no chains to be fitted to."""
    lags = min(WINDOWS[-1], num_steps)
    return np.tile(np.float32([0, 1, 0]), (num_steps, lags, 1)), np.zeros((num_steps, lags), np.float32)


class Calibrations:
    """The calibrations of one model: made on first use, kept in memory and on disk.

    Args:
        model, device, precision: whose, and how it computes.
        folders: where they are looked for and kept: the first that can be written to.
    """

    def __init__(self, model: MAR, device: torch.device, precision: Precision, folders: Sequence[Path]) -> None:
        self.model, self.device, self.precision, self.folders = model, device, precision, folders
        self._known: dict[str, Calibration] = {}
        self._weights: str | None = None

    def get(self, request: Request) -> Calibration:
        """The calibration for a resolved request's guidance, temperature, T and draft."""
        name, text = self._name(request)
        if text not in self._known:
            self._known[text] = self._load(name, text) or self._make(request, name, text)
        return self._known[text]

    def folder_of(self, request: Request) -> Path | None:
        """Where a calibration lies on disk; None where nowhere."""
        name, _ = self._name(request)
        return next((folder for folder in self.folders if (folder / name).is_file()), None)

    def _name(self, request: Request) -> tuple[str, str]:
        text = json.dumps(self._settings(request), sort_keys=True)
        return f"calibration-{hashlib.blake2b(text.encode(), digest_size=10).hexdigest()}.safetensors", text

    def _settings(self, request: Request) -> dict:
        if self._weights is None:
            self._weights = content_hash(self.model)
        return {
            "schema": SCHEMA,
            "weights": self._weights,
            "cfg": float(request.cfg),
            "cfg_schedule": request.cfg_schedule if request.guided else None,
            "temperature": float(request.temperature),
            "num_sampling_steps": request.num_sampling_steps,
            "precision": self.precision.policy,
            "seed": TRACE_SEED,
            "draft": request.draft,
        }

    def _load(self, name: str, text: str) -> Calibration | None:
        for folder in self.folders:
            try:
                with safe_open(folder / name, "np") as file:
                    if file.metadata()["settings"] == text:
                        return Calibration(**{f.name: file.get_tensor(f.name) for f in dataclasses.fields(Calibration)})
            except (OSError, SafetensorError, KeyError, TypeError):  # absent, or cut off: it is made again
                continue
        return None

    @torch.inference_mode()
    def _make(self, request: Request, name: str, text: str) -> Calibration:
        made = fit(
            *trace(self.model, request, self.device, self.precision), request.temperature, request.draft == "frozen"
        )
        for folder in self.folders:
            temporary = folder / f".{name}.{os.getpid()}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                save_file(vars(made), temporary, metadata={"settings": text})
                temporary.chmod(0o644)
                os.replace(temporary, folder / name)
                return made
            except (OSError, SafetensorError):
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
        places = ", ".join(map(str, self.folders)) or "none given"
        warnings.warn(
            f"the calibration cannot be kept for the next run: no folder is writable ({places})", stacklevel=2
        )
        return made


def content_hash(model: MAR) -> str:
    """A hash of a model's weights, names and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def user_cache() -> Path:
    """The user's cache directory for cspd: $XDG_CACHE_HOME/cspd, or ~/.cache/cspd."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "cspd"
