"""Checks made before any work: each error names the value, the range and the fix."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path

import torch

from cspd.continuous import cspd_method
from cspd.continuous.calibration import DRAFTS, WINDOWS
from cspd.continuous.host import MARModels
from cspd.discrete.host import VQModels
from cspd.methods import METHODS, OPTIONS
from cspd.sequence import Request
from mar.diffusion import TRAIN_STEPS
from mar.model import MAR, MARConfig
from mar.registry import SamplingDefaults

GUIDANCE_SCHEDULES = ("linear", "constant")


def resolve_mar(request: Request, config: MARConfig, defaults: SamplingDefaults) -> Request:
    """The request with every default of MAR filled in.

    Raises:
        ValueError: a setting is of the wrong kind or out of range.
    """
    fill = {"num_iter": min(defaults.num_iter, config.seq_len), "cfg": defaults.cfg}
    fill |= {"cfg_schedule": defaults.cfg_schedule, "num_sampling_steps": defaults.num_sampling_steps}
    unguided = (defaults.cfg if request.cfg is None else request.cfg) == 1
    fill["temperature"] = defaults.temperature_unguided if unguided else defaults.temperature
    request = dataclasses.replace(request, **{k: v for k, v in fill.items() if getattr(request, k) is None})

    request = with_options(request, ("top_k", "top_p"))
    check_common(request, config.class_num)
    check_integer("num_iter", request.num_iter, 1, config.seq_len, "an iteration predicts at least one of the tokens")
    check_integer("num_sampling_steps", request.num_sampling_steps, 2, TRAIN_STEPS, "MAR's default is 100")
    check_choice("cfg_schedule", request.cfg_schedule, GUIDANCE_SCHEDULES)
    if request.method == "cspd":
        _check_cspd(request, config.seq_len)
    if request.draft is not None:
        check_choice("draft", request.draft, DRAFTS)
    if request.window is not None:
        most = min(WINDOWS[-1], request.num_sampling_steps)
        check_integer("window", request.window, 0, most, "it is how many denoising steps are drafted ahead")
        if request.window and request.temperature == 0:
            raise ValueError(f"window={request.window} needs temperature > 0: without noise there are no densities")
    return request


def check_common(request: Request, num_classes: int) -> None:
    """Raises ValueError where label, seed, guidance or temperature are of the wrong kind or out of range."""
    check_integer("label", request.label, 0, num_classes - 1, "the target knows these classes")
    check_integer("seed", request.seed, 0, 2**63 - 1, "it keys a 64-bit generator")
    check_real("cfg", request.cfg, "1 is no guidance, 2 to 5 is usual")
    check_real("temperature", request.temperature, "1 is the model's own noise")


def _check_cspd(request: Request, seq_len: int) -> None:
    check_integer("gamma", request.gamma, 1, seq_len, "it is how many tokens are drafted a round, of the sequence's")
    check_choice("verify", request.verify, cspd_method.VERIFY)
    check_choice("chains", request.chains, cspd_method.CHAINS)
    check_real("ratio_temperature", request.ratio_temperature, "42 is the method's, 1 the paper's formula")
    check_real("prefill", request.prefill, "0.05 is the method's")
    if request.ratio_temperature == 0 or request.prefill > 1:
        raise ValueError(
            f"ratio_temperature={request.ratio_temperature}, prefill={request.prefill}: give the first above 0 and the"
            " second in 0..1"
        )
    if not isinstance(request.align, bool):
        raise ValueError(f"align={request.align!r} is not True or False")
    if request.temperature == 0:
        raise ValueError("temperature=0: method 'cspd' compares densities, which need noise; give one above 0")
    if request.window and request.chains == "ancestral":
        raise ValueError(f"window={request.window} needs chains='speculative': ancestral chains draft no steps")


def with_options(request: Request, foreign: tuple[str, ...]) -> Request:
    """The request with its method's own defaults filled in.

    Raises:
        ValueError: an option that the method does not have, or one of `foreign`, settings of other models.
    """
    method = METHODS[request.method]
    for name in foreign:
        if getattr(request, name) is not None:
            raise ValueError(
                f"{name}={getattr(request, name)!r} is no setting of {request.family} models: leave it out"
            )
    for name in sorted(OPTIONS - set(method.options)):
        if getattr(request, name) is not None:
            having = ", ".join(m.name for m in METHODS.values() if name in m.options)
            raise ValueError(
                f"{name}={getattr(request, name)!r} is no option of {method.name!r}: it belongs to {having}"
            )
    return dataclasses.replace(request, **{k: v for k, v in method.options.items() if getattr(request, k) is None})


def check_integer(name: str, value: object, low: int, high: int, why: str) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not an integer: give one in {low}..{high}")
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is outside {low}..{high}: {why}")


def check_real(name: str, value: object, why: str) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r} is not a finite number >= 0: {why}")


def check_choice(name: str, value: object, choices: object) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(choices)}")


def check_draft(request: Request, draft: object) -> None:
    """Raises ValueError where a method needs a draft model and there is none."""
    if draft is None and METHODS[request.method].needs == "draft model":
        raise ValueError(
            f"method={request.method!r} needs a draft model and this engine has none: give it to the engine's models,"
            " to load(..., draft=file), or with --draft-checkpoint on the command line"
        )


def check_families(models: Sequence[MARModels | VQModels]) -> None:
    """Raises ValueError where there are no models, two sets of a family, or models that do not fit each other."""
    kinds = [type(each) for each in models]
    if not kinds or len(set(kinds)) < len(kinds) or not set(kinds) <= {MARModels, VQModels}:
        raise ValueError("an engine has MARModels(...), VQModels(...) or one of each")
    for each in models:
        (check_models if isinstance(each, MARModels) else check_vq_models)(each)


def check_vq_models(models: VQModels) -> None:
    """Raises ValueError where draft, drafter or tokenizer do not speak the target's codes."""
    config = models.target.config
    if models.draft is not None:
        for name in ("block_size", "vocab_size", "num_classes"):
            ours, theirs = getattr(config, name), getattr(models.draft.config, name)
            if ours != theirs:
                raise ValueError(
                    f"draft and target do not fit: {name} is {theirs} and {ours}; take a draft of the same codes"
                )
    if models.eagle is not None:
        for name in ("dim", "n_head"):
            ours, theirs = getattr(config, name), getattr(models.eagle.config, name)
            if ours != theirs:
                raise ValueError(
                    f"EAGLE drafter and target do not fit: {name} is {theirs} and {ours}; take the drafter that was"
                    " trained on this target"
                )
    if models.tokenizer is not None and models.tokenizer.config.codebook_size != config.vocab_size:
        raise ValueError(
            f"tokenizer and target do not fit: they have {models.tokenizer.config.codebook_size} and"
            f" {config.vocab_size} codes; take the one the target was trained on"
        )


def check_models(models: MARModels) -> None:
    """Raises ValueError where draft or autoencoder do not speak the target's tokens."""
    config, draft, vae = models.target.config, models.draft, models.vae
    if draft is not None:
        for name in ("seq_len", "token_dim", "class_num"):
            ours, theirs = getattr(config, name), getattr(draft.config, name)
            if ours != theirs:
                raise ValueError(
                    f"draft and target do not fit: {name} is {theirs} and {ours}; take a draft of the same tokens"
                )
    if vae is not None:
        pairs = (
            ("channels", vae.config.embed_dim, config.vae_embed_dim),
            ("stride", vae.config.stride, config.vae_stride),
        )
        for name, ours, theirs in pairs:
            if ours != theirs:
                raise ValueError(
                    f"autoencoder and target do not fit: {name} is {ours} and {theirs}; take the one the target was"
                    " trained on"
                )


def pick_device(device: str | torch.device) -> torch.device:
    """The device asked for, "auto" being CUDA where there is one. Raises ValueError where it cannot be had."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        picked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is no device: use 'auto', 'cpu', 'cuda' or 'cuda:N'") from error
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but torch {torch.__version__} sees no CUDA device: use device='cpu'")
    if picked.type == "cuda" and (picked.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={device!r}, but there are {torch.cuda.device_count()} CUDA devices: use a lower index"
        )
    if picked.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is not supported: use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    return picked


def bytes_per_slot(target: MAR, num_iter: int) -> int:
    """Estimated peak bytes a slot adds: state, and the largest activations of one guided round."""
    c = target.config
    state = c.seq_len * (4 * c.token_dim + 8)
    backbone = (
        2 * 4 * (c.buffer_size + c.seq_len) * c.embed_dim * 14
    )  # norm, qkv, attention, hidden layer twice, residual
    rows = 2 * math.ceil(math.pi / 2 * c.seq_len / num_iter + 1)
    head = 4 * rows * c.diffloss_w * (3 * c.diffloss_d + 2 + 8)
    return state + max(backbone, head)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on a device."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(target: MAR, max_batch: int, num_iter: int, device: torch.device) -> None:
    """Raises ValueError, before allocating, where `max_batch` slots at K = `num_iter` would not fit into memory."""
    fix = "use a larger num_iter, a smaller model or another device"
    check_fits(bytes_per_slot(target, num_iter), max_batch, f" at num_iter={num_iter}", fix, device)


def check_fits(per_slot: int, max_batch: int, what: str, fix: str, device: torch.device) -> None:
    """Raises ValueError where `max_batch` slots of so many bytes are more than is free.

    Args:
        what: follows "max_batch=N" in the message. fix: what to do where not even one slot fits.
    """
    check_integer("max_batch", max_batch, 1, 2**20, "it is the number of sequences in flight")
    free = free_bytes(device)
    if per_slot * max_batch > free:
        fix = f"use max_batch <= {free // per_slot}" if free >= per_slot else fix
        raise ValueError(
            f"max_batch={max_batch}{what} needs about {per_slot * max_batch / 2**30:.1f} GiB and {device} has"
            f" {free / 2**30:.1f} GiB free: {fix}"
        )
