"""`cspd gpu-check fast`: how long do whole images take, decoded, beside those of MAR's own code?"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from cspd.device import peak_bytes, reset_peak, seconds_of
from cspd.gpu_check.models import (
    DEFAULT,
    STEPS,
    Mode,
    Settings,
    Subject,
    asked,
    engine_of,
    random_models,
    switched,
)
from cspd.gpu_check.run import Cases, Found, Question
from cspd.heads.calibrated import HEAD_CALLS
from cspd.seams import accelerate
from mar.model import MAR

AUTHORS, ACCELERATED = "authors' code", "authors' code, accelerated"
METHODS = {
    "MAR": ("ar", AUTHORS, ACCELERATED, "calibrated", "speculative", "lazymar:denoiser=calibrated", "budget"),
    "VQ": ("ar", "sjd-pac", "sd"),
    "causal": ("ar", "calibrated", "speculative"),
}
PRECISION = "bf16"


def cases(settings: Settings) -> Cases:
    cells = [(batch, subject) for batch, subjects in settings.scale.cells for subject in subjects]
    found: Cases = {}
    for batch, subject in cells:
        for name in METHODS[subject.family]:
            work = with_authors_code if name in (AUTHORS, ACCELERATED) else images
            found[f"{subject}, batch {batch}: {name}"] = functools.partial(work, settings, subject, batch, name)
    return found


# A time is that of a batch, from the requests to the decoded images on the CPU: nothing is subtracted. The first batch
# captures graphs, compiles kernels, makes plans of attention and fits what a method needs. The last one is the speed.

MOST_PASSES = 6
DECODED = 64  # images that their latents are decoded to at once
SPARE = 1.3  # a pass may take as much longer than the one before it


def passes(settings: Settings, work: Callable[[], None], batch: int, is_ready: Callable[[], bool]) -> Found:
    """Times a batch twice, or until `is_ready` after a pass; once if the time is over."""
    times: list[float] = []
    while len(times) < 2 or (not is_ready() and len(times) < MOST_PASSES):
        if times and settings.seconds_left < SPARE * times[-1]:
            break
        times.append(seconds_of(work, settings.device))
    found: Found = {"first_s": times[0], "pass_s": times}
    if len(times) > 1:
        found |= {"last_s": times[-1], "ms": 1000 * times[-1] / batch, "images_per_s": batch / times[-1]}
    found["peak_gib"] = peak_bytes(settings.device) / 2**30
    if settings.cuda:
        found["reserved_gib"] = torch.cuda.max_memory_reserved(settings.device) / 2**30
    return {"batch": batch, **found}


def images(
    settings: Settings, subject: Subject, batch: int, name: str, mode: Mode = DEFAULT, precision: str = PRECISION
) -> Found:
    """The time of a batch by an engine, the captures of graphs, and in which phases the last batch spent its time."""
    request, source = asked(settings, subject, name)
    reset_peak(settings.device)
    with switched(mode), engine_of(settings, subject, batch, precision, mode, source) as engine:
        requests = [request.but(label=i % engine.runner.num_classes, seed=i) for i in range(batch)]
        outputs: list[Any] = []
        capturing: list[float] = []  # seconds, in each pass

        def generate() -> None:
            outputs.clear()
            before = engine.graphs.seconds
            with suppress(FloatingPointError):  # of random weights; it is raised at the end, and the work is the same
                outputs.extend(output for _, output in engine.stream(requests))
            capturing.append(engine.graphs.seconds - before)

        found = passes(settings, generate, batch, lambda: True)
        stats = outputs[0].stats
        found |= {"method": name, "model": str(subject), "head_calls": stats.head_calls}
        found["finite"] = all(output.error is None for output in outputs)
        found |= {"phase_s": dict(stats.seconds), "capture_s": capturing, "graphs_gib": engine.graphs.bytes / 2**30}
    return found


# MAR's own code, as its evaluation runs it: autocast to float16, and the decoder inside.


def with_authors_code(settings: Settings, subject: Subject, batch: int, name: str) -> Found:
    """The time of a batch by MAR's own code with the same weights, with or without `cspd.accelerate`."""
    if settings.mar is None:
        return {"left_out": "MAR's own code: give --mar FOLDER, a clone of github.com/LTH14/mar"}
    model = _their_model(settings, subject)
    vae: Any = random_models(settings, subject).vae  # type: ignore[union-attr]
    request, _ = asked(settings, subject, "ar")
    labels = torch.arange(batch, device=settings.device) % model.num_classes
    own = {name: getattr(request, name) for name in ("num_iter", "cfg", "cfg_schedule", "temperature")}
    # accelerated heads learn from the first batches, of which this counts the tokens
    handle = accelerate(model, "calibrated", head_calls=HEAD_CALLS) if name == ACCELERATED else None
    learned = [0]

    @torch.no_grad()
    def sample() -> None:
        learned.append(handle.stats.learned if handle else 0)
        with torch.autocast(settings.device.type, torch.float16 if settings.cuda else torch.bfloat16):
            latents = model.sample_tokens(batch, labels=labels, **own)
            for part in (latents / vae.config.scale).split(DECODED):
                vae.decode(part).float().cpu()

    reset_peak(settings.device)
    try:
        found = passes(settings, sample, batch, lambda: handle is None or handle.stats.learned == learned[-1])
        return found | {"method": name, "model": str(subject), "note": repr(handle) if handle else ""}
    finally:
        if handle:
            handle.restore()


@functools.lru_cache(maxsize=1)
def _their_model(settings: Settings, subject: Subject) -> Any:
    with torch.device(settings.device):
        return their_model(str(settings.mar), random_models(settings, subject).target)  # type: ignore[arg-type]


def their_model(folder: str, ours: MAR) -> Any:
    """MAR's own module, from a clone of its code, with the weights of ours. Raises ValueError if there is no code.

    On a CPU its code, which asks for CUDA, is answered with the CPU.
    """
    if next(ours.parameters()).device.type == "cpu":
        torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        theirs: Any = importlib.import_module("models.mar").MAR
    except ImportError as error:
        raise ValueError(f"{folder} is not a clone of github.com/LTH14/mar ({error})") from None
    config = ours.config
    model = theirs(
        img_size=config.img_size,
        vae_stride=config.vae_stride,
        patch_size=config.patch_size,
        encoder_embed_dim=config.embed_dim,
        encoder_depth=config.depth,
        encoder_num_heads=config.num_heads,
        decoder_embed_dim=config.embed_dim,
        decoder_depth=config.depth,
        decoder_num_heads=config.num_heads,
        norm_layer=functools.partial(nn.LayerNorm, eps=1e-6),
        vae_embed_dim=config.vae_embed_dim,
        class_num=config.class_num,
        buffer_size=config.buffer_size,
        diffloss_w=config.diffloss_w,
        diffloss_d=config.diffloss_d,
        num_sampling_steps=str(STEPS),
    )
    model.load_state_dict(ours.state_dict(), strict=True)
    return model.eval().requires_grad_(False)


# The report.

TITLES = ["model", "batch", "method", "first s", "then s", "ms per image", "x ar", "x authors", "decoding"]
TITLES += ["capturing s", "then s", "GiB"]
FORMATS = ("", "", "", ".2f", ".2f", ".1f", ".2f", ".2f", ".2f", ".1f", ".1f", ".1f")


def tables(cases: dict[str, Found]) -> str:
    """A row for each case: seconds of the first and the last batch, and how the last one compares."""
    times = {(found["model"], found["batch"], found["method"]): found.get("last_s") for found in cases.values()}
    rows = []
    for found in cases.values():
        cell, last = (found["model"], found["batch"]), found.get("last_s")
        capturing, decoding = found.get("capture_s", []), found.get("phase_s", {}).get("decode")
        row: list[Any] = [*cell, found["method"], found["first_s"], last, found.get("ms")]
        row += [_ratio(times.get((*cell, base)), last) for base in ("ar", AUTHORS)]
        row += [_ratio(decoding, last), *capturing[:1], *capturing[1:][-1:]]
        rows.append([*row, *[None] * (len(TITLES) - 1 - len(row)), found["peak_gib"]])
    return tabulate(rows, TITLES, floatfmt=FORMATS, missingval="")


def _ratio(base: float | None, own: float | None) -> float | None:
    return base / own if base and own else None


FAST = Question("fast", cases, tables)
