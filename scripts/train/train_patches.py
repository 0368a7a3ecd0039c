"""Trains a small model with NextStep-1's or BitDance's own head, and counts the head calls that its tokens need.

    DATA="--data data/emoji64 --size 64 --upright symbols,flags,objects"
    MAR="--vae checkpoints/emoji64/vae.safetensors" SPHERE="--vae checkpoints/emoji64_sphere/vae.safetensors"
    python scripts/train/train_patches.py ../NextStep-1 $DATA $MAR --patch 2 --out d64.json
    python scripts/train/train_patches.py ../BitDance --code bitdance $DATA $SPHERE --patch 4 --out p16.json

FOLDER is a clone of the code. Its head is trained, from random weights, behind the transformer of `cspd.causal`. A
token is a patch of PATCH x PATCH cells of an autoencoder's latents: NextStep-1's has all their numbers in one row,
BitDance's has a row for each cell, and the numbers are their signs.

The model then samples images by the code's own sampler. From the conditions of their tokens, others are drawn by every
window of `speculative`, and by `calibrated`. With --large, each call also computes a head of NextStep-1's real size,
whose output is not used. So drafts are accepted as in the trained head, and calls take as long as in a real one.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import spherical
import torch
import train_mar
import train_sphere
from latents import Guessing, Latents, latents
from pictures import DATA_OPTIONS, add_data_options, data_of
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from training import Loss, chosen, device_of_process, fit, run_main

import cspd
from cspd.causal.autoencoders import SphereVAE
from cspd.causal.models import Causal, CausalConfig, sample_published
from cspd.causal.registry import AUTOENCODERS, CAUSALS, load_autoencoder
from cspd.device import Precision, seconds_of
from cspd.files import FileCache, content_hash, write_json
from cspd.heads import SAMPLERS, Chain, Inputs, Net, Observer
from cspd.heads.chain import LEAST_TO_GO
from cspd.heads.learned import Learned
from cspd.heads.net import TorchNoise
from cspd.heads.speculative import Finished, acceptance
from cspd.origin import file_fingerprint
from cspd.seams import seam_of
from cspd.tuner import in_turns
from mar.checkpoint import load_vae
from mar.vae import AutoencoderKL

sys.path.append(str(Path(__file__).parents[1] / "measure"))
from mar_loop import stand_in

CALLS = 28  # of a full chain
SEEN, CHUNK = 576, 24  # tokens that fits are made from, and those of a call
HEAD_CALLS = (4, 6, 8, 10, 14)  # of `calibrated`
ALL = range(2, CALLS)  # windows
TIMED_WINDOWS = (8, 16, CALLS - 1)
TIMED_TOKENS = 8
LARGE = {"cond_dim": 5120, "dim": 1536, "layers": 12}  # NextStep-1's
CPU = torch.device("cpu")

# The data: cells of latents [B, side * side, c], in raster order, and patches of them.


class Source(NamedTuple):
    """An autoencoder's cells.

    Attributes:
        encode: as in `latents`. draw: (latents of a batch, its number) -> (mean cells, cells drawn from the posterior).
        decode: latents [B, c, side, side] -> images in -1..1. channels: c. stride: pixels of a cell, along a side.
    """

    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    draw: Callable[[Latents, int], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor], Tensor]
    channels: int
    stride: int


def source_of(path: Path, device: torch.device) -> Source:
    """The cells of a KL autoencoder, with unit variance, or of an S-VAE, on a sphere of radius sqrt(c)."""
    with safe_open(path, "pt") as file:
        is_sphere = (file.metadata() or {}).get("arch") in AUTOENCODERS
    vae: Any = load_autoencoder(path) if is_sphere else load_vae(path)
    if isinstance(vae, SphereVAE):
        encode = train_sphere.encoder(vae, device)
        return Source(encode, draw_sphere, vae.decode, vae.config.latent_dim, vae.config.stride)
    assert isinstance(vae, AutoencoderKL)
    encode = train_mar.encoder(vae, device)
    decode = lambda latents: vae.decode(latents / vae.config.scale)  # noqa: E731
    return Source(encode, draw_normal, decode, vae.config.embed_dim, vae.config.stride)


def draw_sphere(posterior: Latents, number: int) -> tuple[Tensor, Tensor]:
    mean = F.normalize(posterior.means.float(), dim=-1)
    drawn = spherical.draw(mean, posterior.stds[..., 0].float(), number)
    return mean * mean.shape[-1] ** 0.5, drawn * mean.shape[-1] ** 0.5


def draw_normal(posterior: Latents, number: int) -> tuple[Tensor, Tensor]:
    mean, generator = posterior.means.float(), torch.Generator().manual_seed(number)
    return mean, mean + posterior.stds.float() * torch.randn(mean.shape, generator=generator)


def patches(cells: Tensor, patch: int) -> Tensor:
    """Tokens [B, L, patch * patch * c] of cells [B, side * side, c]."""
    across = math.isqrt(cells.shape[1]) // patch
    grid = cells.unflatten(1, (across, patch, across, patch))
    return grid.transpose(2, 3).flatten(3).flatten(1, 2)


def latents_of(tokens: Tensor, patch: int) -> Tensor:
    """Latents [B, c, side, side] of `patches`."""
    across = math.isqrt(tokens.shape[1])
    grid = tokens.unflatten(2, (patch, patch, -1)).unflatten(1, (across, across))
    return grid.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


# The heads, and the model around them.


class Code(NamedTuple):
    """A code with a head for patches.

    Attributes:
        config: (usual sizes, channels of a cell, cells along a side, PATCH) -> those of the transformer.
        make: (config, width, layers) -> the code's module, from its clone on the path.
        loss: (module, tokens [N, d], conditions [N, D], generator) -> its loss.
        ask: (config, conditions [G, R, D], guidance) -> arguments of the module's `sample`, for chains of CALLS calls.
    """

    config: Callable[[CausalConfig, int, int, int], CausalConfig]
    make: Callable[[CausalConfig, int, int], Any]
    loss: Callable[[Any, Tensor, Tensor, torch.Generator], Tensor]
    ask: Callable[[CausalConfig, Tensor, float], dict[str, Any]]


def nextstep_config(usual: CausalConfig, channels: int, side: int, patch: int) -> CausalConfig:
    return dataclasses.replace(usual, latent_dim=patch * patch * channels, side=side // patch)


def nextstep_head(config: CausalConfig, width: int, layers: int) -> Any:
    os.environ["ENABLE_TORCH_COMPILE"] = "false"  # their own switch
    importlib.import_module("nextstep.models")
    stand_in("nextstep.utils.loguru", logger=None)
    theirs: Any = importlib.import_module("nextstep.models.modeling_fm_head")
    return theirs.FlowMatchingHead(input_dim=config.latent_dim, cond_dim=config.dim, dim=width, layers=layers)


def nextstep_loss(module: Any, x1: Tensor, z: Tensor, generator: torch.Generator) -> Tensor:
    return train_sphere.head_loss(module.net, x1, z, generator)


def ask_nextstep(config: CausalConfig, z: Tensor, cfg: float) -> dict[str, Any]:
    return {"c": z.flatten(0, 1), "cfg": cfg, "num_sampling_steps": CALLS, "noise_repeat": z.shape[1]}


def bitdance_config(usual: CausalConfig, channels: int, side: int, patch: int) -> CausalConfig:
    return dataclasses.replace(usual, latent_dim=channels, side=side, parallel_num=patch * patch, binary=True)


def bitdance_head(config: CausalConfig, width: int, layers: int) -> Any:
    stand_in("flash_attn", flash_attn_func=None)  # for more than 32 cells
    theirs: Any = importlib.import_module("modeling.vision_head.flow_head_parallel_x")
    sizes = {"ch_target": config.latent_dim, "ch_cond": config.dim, "ch_latent": width, "depth_latent": layers}
    return theirs.DiffHead(**sizes, depth_adanln=1, parallel_num=config.parallel_num)


def bitdance_loss(module: Any, x1: Tensor, z: Tensor, generator: torch.Generator) -> Tensor:
    """The squared error of the velocity, from the predicted clean token, as BitDance's own loss has it."""
    num_cells = x1.shape[-1] // module.ch_target
    x1, z = (each.unflatten(-1, (num_cells, -1)) for each in (x1, z))
    t, _, x = train_sphere.noised(x1, generator)
    to_go = (1 - t).clamp(min=LEAST_TO_GO).view(-1, 1, 1)
    return ((x1 - module.net(x, t, z).float()) / to_go).square().mean()


def ask_bitdance(config: CausalConfig, z: Tensor, cfg: float) -> dict[str, Any]:
    cells = z.flatten(0, 1).unflatten(-1, (config.parallel_num, -1))
    return {"z": cells, "cfg": cfg, "num_sampling_steps": CALLS - 1}  # and one last step


CODES = {
    "nextstep": Code(nextstep_config, nextstep_head, nextstep_loss, ask_nextstep),
    "bitdance": Code(bitdance_config, bitdance_head, bitdance_loss, ask_bitdance),
}


class Model(Causal):
    """The transformer with a code's head. BitDance's tokens are signs; NextStep-1's are the chains' ends."""

    def __init__(self, config: CausalConfig, head: Any) -> None:
        super().__init__(config)
        train_sphere.initialise(self)
        self.head = head

    def finish(self, x: Tensor) -> Tensor:
        return x.sign() if self.config.binary else x


def loss_of(guessing: Guessing, code: Code, data: Latents, source: Source, args: argparse.Namespace) -> Loss:
    """The `loss_fn` of `fit`."""
    model: Any = guessing.model
    config = model.config
    device = model.norm.weight.device

    def loss_fn(number: int) -> tuple[Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(number)
        index = torch.randint(len(data.labels), (args.batch,), generator=generator)
        means, tokens = source.draw(Latents(*(each[index] for each in data)), number)
        if config.binary:
            means = tokens = means.sign()
        means, tokens = (patches(each, args.patch).to(device) for each in (means, tokens))
        drop = torch.rand(args.batch, generator=generator) < train_sphere.LABEL_DROP
        labels = data.labels[index].masked_fill(drop, config.num_classes).to(device)
        # rows of a permutation, so that the fraction with uniform times is not of the same images or positions
        rows = torch.randperm(tokens[..., 0].numel(), generator=generator).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            z = model(labels, tokens[:, :-1])
            missed = F.mse_loss(guessing.guess(z).float(), means)
            x1, z = (each.flatten(0, 1)[rows] for each in (tokens, z))
            loss = code.loss(model.head, x1, z, generator)
        return loss + missed, {"loss": round(loss.item(), 4), "guess": round(missed.item(), 4)}

    return loss_fn


def sampled(model: Model, code: Code, cfg: float, num: int) -> tuple[Tensor, Tensor]:
    """Tokens [num, L, d] of images by the code's own sampler, and the conditions [G, num * L, D] of all of them."""
    kept: list[Tensor] = []

    def draw(head: Any, z: Tensor, scale: float, *others: Any) -> Tensor:
        kept.append(z)
        return head.sample(**code.ask(model.config, z, scale))[: z.shape[1]].flatten(1)

    labels = torch.arange(num, device=model.norm.weight.device) % model.config.num_classes
    unused = lambda token, shape: torch.empty(0)  # noqa: E731 - the code draws its noise itself
    tokens = sample_published(model, labels, cfg=cfg, cfg_schedule="constant", normals=unused, draw=draw)
    return tokens, torch.stack(kept, dim=2).flatten(1, 2)


# Head calls: the same conditions are drawn from again by our samplers.


class Heavy:
    """A head whose calls take as long as those of a larger one, which is computed too, and not used."""

    own_type = None

    def __init__(self, head: Any, larger: Any) -> None:
        self.head, self.larger = head, larger
        self.channels, self.cond_dim, self.schedule = head.channels, head.cond_dim, head.schedule
        self.width, self.res_blocks = head.width + larger.width, larger.res_blocks
        self.num_layers = len(head.res_blocks) + 1  # that have modulations

    def ready(self) -> Heavy:
        return Heavy(self.head.ready(), self.larger.ready())

    def time_embed(self, t: Tensor) -> Tensor:
        return torch.cat([self.head.time_embed(t), self.larger.time_embed(t)], dim=-1)

    def cond_embed(self, z: Tensor) -> Tensor:
        other = self.larger.cond_embed(z.new_zeros(*z.shape[:-1], self.larger.cond_dim))
        return torch.cat([self.head.cond_embed(z), other], dim=-1)

    def modulations(self, t_embed: Tensor, c_embed: Tensor) -> list[Tensor]:
        sizes = [self.head.width, self.larger.width]
        own, other = zip(t_embed.split(sizes, dim=-1), c_embed.split(sizes, dim=-1))
        return [*self.head.modulations(*own), *self.larger.modulations(*other)]

    def split(self, modulations: Any) -> Any:
        return [*self.head.split(modulations[: self.num_layers]), *self.larger.split(modulations[self.num_layers :])]

    def denoise(self, x: Tensor, modulations: Any) -> Tensor:
        used = self.head.denoise(x, modulations[: self.num_layers])
        return used + 0 * self.larger.denoise(x, modulations[self.num_layers :])


class Drawing:
    """Tokens of one head under one guidance scale, by our samplers.

    Args:
        head: with the interface that chains use. schedule: of its chain. cache: of the fits. about: their settings.
    """

    def __init__(self, head: Any, schedule: Any, cfg: float, cache: FileCache, about: dict[str, Any]) -> None:
        self.head, self.schedule, self.cfg, self.cache, self.about = head, schedule, cfg, cache, about
        self.precision = Precision("fp32", CPU)

    def fitted(self, sampler: str, z: Tensor, **settings: Any) -> Learned:
        """The fits of a sampler, made from tokens with conditions z [G, R, D] if they are not in the cache."""
        unused = lambda *sizes: 0.0  # noqa: E731 - the window is always given
        made = Learned(self.head, self.schedule, 1.0, len(z), self.precision, self.cache, self.about, unused)
        for part in z.split(CHUNK, dim=1):
            if made.needs_tokens(SAMPLERS[sampler], settings):
                made.record(self.chain(part, None))
        return made

    def chain(self, z: Tensor, fitted: Learned | None) -> Chain:
        rows = z.shape[1]
        names, ones = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, 1)
        inputs = Inputs(z, self.cfg * ones, ones, names, names)
        return Chain(self.head, self.schedule, inputs, TorchNoise(CPU), self.precision, fitted=fitted)

    def draw(self, sampler: str, z: Tensor, fitted: Learned | None, **settings: Any) -> tuple[Chain, Finished | None]:
        """The chains that tokens were drawn by, and their passes if they were speculative."""
        chain, watch = self.chain(z, fitted), Passes()
        chain.observers = [watch]
        SAMPLERS[sampler].function(chain, **settings)
        return chain, watch.ended


class Passes(Observer):
    """Keeps the passes of speculative chains."""

    ended: Finished | None = None

    def verified(self, chain: Chain, ended: Finished) -> None:
        self.ended = ended


def calls_by_window(drawing: Drawing, seen: Tensor, z: Tensor, windows: Sequence[int] = ALL) -> list[dict[str, Any]]:
    """Sequential head calls of tokens with conditions z [G, R, D], by window, fitted to `seen`."""
    fitted, found = drawing.fitted("speculative", seen), []
    for window in windows:
        _, ended = drawing.draw("speculative", z, fitted, window=window)
        assert ended is not None
        record = ended.record.numpy()
        calls = (record != 0).sum(1)
        found.append(
            {
                "window": window,
                "calls": calls.mean().item(),
                "error": calls.std().item() / len(calls) ** 0.5,
                "slowest": calls.max().item(),
                "rejections": (record < 0).sum(1).mean().item(),
            }
        )
    return found


def acceptance_by_step(drawing: Drawing, seen: Tensor, z: Tensor) -> dict[str, list[float]]:
    """The fraction of drafted states that was accepted, of those that were verified, with the largest window.

    By lag, from one step ahead, and by the step of the chain, from the first drafted one, near noise, to the last.
    """
    fitted = drawing.fitted("speculative", seen)
    _, ended = drawing.draw("speculative", z, fitted, window=CALLS - 1)
    assert ended is not None
    by_lag, by_step = acceptance(ended.record.numpy(), CALLS - 1)
    verified, accepted = by_step[:, -2:0:-1]
    return {
        "by lag": (by_lag[1] / by_lag[0].clip(1)).tolist(),
        "by step": (accepted / verified.clip(1)).tolist(),
    }


def differences(drawing: Drawing, seen: Tensor) -> list[dict[str, float]]:
    """How far tokens of `calibrated` are from the full chain's, in standard deviations of a token, by head calls."""
    found = []
    for num in HEAD_CALLS:
        fitted = drawing.fitted("calibrated", seen, head_calls=num)
        drawing.draw("calibrated", seen[:, :1], fitted, head_calls=num)  # makes the fit
        assert fitted.shortcut is not None
        difference, error = fitted.shortcut.difference.item(), fitted.shortcut.difference_error.item()
        found.append({"calls": num, "difference": difference, "error": error})
    return found


def in_the_code(module: Any, code: Code, config: CausalConfig, z: Tensor, cfg: float, turns: int) -> dict[str, Any]:
    """Milliseconds of a token by the code's own sampler and by `cspd.accelerate`, one token at once, in turns."""
    methods: dict[str, tuple[str, dict[str, Any]]] = {
        "speculative": ("speculative", {}),
        "calibrated, 8 calls": ("calibrated", {"head_calls": 8}),
    }
    modules, handles = {"their sampler": module}, {}
    seen, z = z[:, TIMED_TOKENS:], z[:, :TIMED_TOKENS]
    for name, (method, settings) in methods.items():
        modules[name] = copy.deepcopy(module)
        handles[name] = cspd.accelerate(modules[name], method, **settings)
        for part in seen.split(CHUNK, dim=1):
            learned = handles[name].stats.learned
            modules[name].sample(**code.ask(config, part, cfg))
            if handles[name].stats.learned == learned:
                break

    def draw(name: str) -> None:
        for one in z.split(1, dim=1):
            modules[name].sample(**code.ask(config, one, cfg))

    works = {name: functools.partial(seconds_of, functools.partial(draw, name), CPU) for name in modules}
    before = {name: handle.stats for name, handle in handles.items()}
    times = in_turns(works, turns)
    found = {name: {"milliseconds": spread(seconds, TIMED_TOKENS)} for name, seconds in times.items()}
    for name, handle in handles.items():
        old, new = before[name], handle.stats
        total = new.calls_per_token * new.tokens - (old.calls_per_token * old.tokens if old.tokens else 0)
        found[name]["calls"] = total / (new.tokens - old.tokens)
    return found


def in_a_large_head(drawing: Drawing, seen: Tensor, z: Tensor, turns: int) -> list[dict[str, Any]]:
    """Milliseconds and head calls of a token whose calls take as long as NextStep-1's, one token at once, in turns.

    Args:
        drawing: of a head of MAR's layers. seen: conditions that fits are made from.
    """
    theirs: Any = sys.modules["nextstep.models.modeling_fm_head"]
    larger = seam_of(theirs.FlowMatchingHead(input_dim=drawing.head.channels, **LARGE).eval())
    assert larger is not None
    heavy = Drawing(Heavy(drawing.head, larger.head), drawing.schedule, drawing.cfg, drawing.cache, drawing.about)
    methods: dict[str, tuple[str, dict[str, Any]]] = {"full chain": ("ancestral", {})}
    methods |= {f"speculative, window {window}": ("speculative", {"window": window}) for window in TIMED_WINDOWS}
    methods |= {f"calibrated, {num} calls": ("calibrated", {"head_calls": num}) for num in (8, 10)}
    fits = {}
    for name, (method, settings) in methods.items():
        if SAMPLERS[method].fit:
            light = drawing.fitted(method, seen, **settings)
            drawing.draw(method, z[:, :1], light, **settings)  # makes the fit, which is then in the cache
            fits[name] = heavy.fitted(method, seen, **settings)
    calls: dict[str, list[float]] = {name: [] for name in methods}

    def draw(name: str) -> None:
        method, settings = methods[name]
        for one in z.split(1, dim=1):
            chain, _ = heavy.draw(method, one, fits.get(name), **settings)
            calls[name].append(chain.tally.of_rows(1)[0].item())

    works = {name: functools.partial(seconds_of, functools.partial(draw, name), CPU) for name in methods}
    times = in_turns(works, turns)
    return [
        {"method": name, "calls": float(np.mean(calls[name])), "milliseconds": spread(times[name], z.shape[1])}
        for name in methods
    ]


def spread(seconds: list[float], num: int) -> dict[str, float]:
    """Median, least and most of milliseconds for each of `num` tokens."""
    each = 1000 * np.array(seconds) / num
    return {"median": float(np.median(each)), "least": float(each.min()), "most": float(each.max())}


# The program.


@torch.inference_mode()
def measured(model: Model, code: Code, cfg: float, args: argparse.Namespace) -> dict[str, Any]:
    """Head calls, acceptance, differences and times under one guidance scale."""
    config, head = model.config, model.head
    tokens, z = sampled(model, code, cfg, max(20, math.ceil((SEEN + args.tokens) / config.seq_len)))
    z = z[:, torch.randperm(z.shape[1], generator=torch.Generator().manual_seed(0))]
    seen, z = z[:, :SEEN], z[:, SEEN : SEEN + args.tokens]
    seam = seam_of(head)
    assert seam is not None
    call = seam.read(code.ask(config, z, cfg))
    if isinstance(seam.head, Net):
        seam.head.take(call.z.shape[2:])
    about = {"schema": "train_patches/1", "head": content_hash(head), "guidance": cfg}
    drawing = Drawing(seam.head, call.chain, cfg, FileCache([args.run / "fits"]), about)
    found: dict[str, Any] = {"guidance": cfg, "calls of a full chain": len(call.chain)}
    found["largest number in a token"] = tokens.abs().max().item()
    found["windows"] = calls_by_window(drawing, seen, z, args.windows)
    found["acceptance"] = acceptance_by_step(drawing, seen, z)
    found["calibrated"] = differences(drawing, seen)
    if args.turns:
        found["small head"] = in_the_code(head, code, config, torch.cat([z, seen], dim=1), cfg, args.turns)
    if args.large and not isinstance(seam.head, Net):
        found["large head"] = in_a_large_head(drawing, seen, z[:, :TIMED_TOKENS], args.large)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="clone of the code")
    parser.add_argument("--code", default="nextstep", choices=CODES)
    add_data_options(parser)
    parser.add_argument("--vae", type=Path, required=True, help="file of the autoencoder, see train_vae.py")
    parser.add_argument("--patch", type=int, default=2, help="cells along a side of a token")
    parser.add_argument("--width", type=int, default=256, help="of the head")
    parser.add_argument("--layers", type=int, default=3, help="of the head")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--images", type=int, default=12000, help="augmented images, encoded once")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--cfg", type=float, nargs="+", default=[1.0, 4.0], help="guidance scales to measure")
    parser.add_argument("--tokens", type=int, default=512, help="to measure head calls on")
    parser.add_argument("--windows", type=int, nargs="+", default=ALL, help="of the drafts; by default all")
    parser.add_argument("--turns", type=int, default=5, help="timed turns in the code, 0: none")
    parser.add_argument("--large", type=int, default=0, help="timed turns with a head of NextStep-1's size, 0: none")
    parser.add_argument("--latents", type=Path, help="file of the encoded images (default: in --run)")
    parser.add_argument("--run", type=Path, default=Path("runs/patches"), help="an interrupted run resumes")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the numbers")
    args = parser.parse_args()
    args.latents = args.latents or args.run / "latents.safetensors"
    return args


def main() -> None:
    args = arguments()
    sys.path.insert(0, args.folder)
    device, code = device_of_process(), CODES[args.code]
    data, source = data_of(args), source_of(args.vae, device)
    drawn = chosen(args, *DATA_OPTIONS, "images") | {"vae": file_fingerprint(args.vae)}
    settings = drawn | chosen(args, "code", "patch", "width", "layers", "steps", "batch", "lr")
    encoded = latents(source.encode, data, args.images, device, args.latents, drawn)

    torch.manual_seed(0)
    usual = dataclasses.replace(CAUSALS["sphere_ar_emoji64"].config, num_classes=len(data.classes))
    config = code.config(usual, source.channels, args.size // source.stride, args.patch)
    model = Model(config, code.make(config, args.width, args.layers))
    guessing = Guessing(model, config.parallel_num * config.dim).to(device).train()

    def show(averaged: Guessing) -> Tensor:
        tokens, _ = sampled(averaged.model, code, max(args.cfg), 2 * config.num_classes)
        return source.decode(latents_of(tokens, args.patch)) / 2 + 0.5

    guessing, seconds = fit(
        guessing,
        loss_of(guessing, code, encoded, source, args),
        run=args.run,
        settings=settings,
        steps=args.steps,
        lr=args.lr,
        hidden=train_sphere.in_the_transformer,
        show=show,
    )
    model = guessing.model.to(CPU).eval().requires_grad_(False)
    log = [json.loads(line) for line in (args.run / "log.jsonl").read_text().splitlines()]
    last = [entry["loss"] for entry in log if "loss" in entry][-10:]
    found = {
        "settings": {**settings, "data": str(args.data), "token": [config.parallel_num, config.latent_dim]},
        "parameters": {"all": sum(p.numel() for p in model.parameters())}
        | {"head": sum(p.numel() for p in model.head.parameters())},
        "seconds trained": round(seconds),
        "error of the velocity": sum(last) / len(last),
        "measured": [measured(model, code, cfg, args) for cfg in args.cfg],
    }
    write_json(args.out, found)


if __name__ == "__main__":
    run_main(main)
