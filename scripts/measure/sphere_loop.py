"""Times our samplers against the loops of SphereAR and BitDance: python scripts/measure/sphere_loop.py [--binary]

The loops are transcribed from the authors' code, and sample with the same weights and settings: those of
`emoji64_sphere`, or with --binary random ones of a BitDance of its size. The runs are interleaved; images are not
decoded. With --compile, torch.compile takes the functions of the loop that the authors compile.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
from llamagen_loop import in_turns, turned
from torch import Tensor
from torch.nn import functional as F

import cspd
from cspd import CausalModels, Engine, Request
from cspd.causal.head import LAST_STEP, TIME_FACTOR
from cspd.causal.models import Causal, guidance_scale
from cspd.heads.chain import LEAST_TO_GO
from cspd.transformer import RMSNorm, SwiGLU

THEIRS = "the authors' loop"
METHODS = ("ar", "speculative", "calibrated")


def normed(norm: RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)


def forward_model(model: Causal, x: Tensor, table: Tensor, caches: list, start: int, end: int) -> Tensor:
    """Features [R, N, dim] of inputs x [R, N, dim] in columns start .. end - 1; caches: keys, values of each layer."""
    x = normed(model.emb_norm, x)
    for block, (all_keys, all_values) in zip(model.layers, caches):
        attention = block.attention
        qkv = attention.wqkv(normed(block.attention_norm, x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (attention.n_head, -1)) for part in qkv)
        q, k, v = (part.transpose(1, 2) for part in (turned(q, table), turned(k, table), v))
        all_keys[:, :, start:end] = k
        all_values[:, :, start:end] = v
        keys, values = all_keys[:, :, :end], all_values[:, :, :end]
        weights = (q * q.shape[-1] ** -0.5) @ keys.transpose(-1, -2)
        if x.shape[1] > 1:
            later = torch.ones(x.shape[1], end, dtype=torch.bool).triu(end - x.shape[1] + 1)
            weights = weights.masked_fill(later, -math.inf)
        seen = weights.softmax(-1) @ values
        x = x + attention.wo(seen.transpose(1, 2).flatten(2))
        x = x + block.feed_forward(normed(block.ffn_norm, x))
    return normed(model.norm, x)


def head(model: Causal, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
    """The head's output [R, d] at x [R, d], times t [R] and conditions z [R, D]."""
    net = model.head.net
    x = net.input_proj(x)
    y = F.silu(net.time_embed(TIME_FACTOR * t) + net.cond_embed(z))
    blocks_of_each = len(net.res_blocks) // len(net.ada_ln_blocks)
    for i, block in enumerate(net.res_blocks):
        if i % blocks_of_each == 0:
            scale, shift, gate = net.ada_ln_blocks[i // blocks_of_each](y).chunk(3, dim=-1)
        x = x + gate * SwiGLU.forward(block, block.norm(x) * (1 + scale) + shift)
    scale, shift = net.final_layer.ada_ln_modulation(y).chunk(2, dim=-1)
    return net.final_layer.linear(F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift)


def guided(v: Tensor, cfg: float, branches: int) -> Tensor:
    if branches == 1:
        return v
    conditional, null = v.chunk(2)
    return null + cfg * (conditional - null)


def euler_step(x: Tensor, v: Tensor, dt: float, cfg: float, branches: int) -> Tensor:
    return x + guided(v, cfg, branches) * dt


def euler_maruyama_step(x: Tensor, v: Tensor, t: Tensor, dt: float | Tensor, cfg: float, branches: int) -> Tensor:
    v = guided(v, cfg, branches)
    score = (t * v - x) / ((1 - t) ** 2 + t * (1 - t))
    drift = v + (1 - t) * score
    return x + drift * dt + (2.0 * (1.0 - t) * dt) ** 0.5 * torch.randn_like(x)


def draw(parts: SimpleNamespace, model: Causal, z: Tensor, cfg: float, num_steps: int) -> Tensor:
    """The ends of chains with conditions z [R, D], once for each branch."""
    binary, last = model.config.binary, LAST_STEP[model.config.binary]
    branches = 2 if cfg > 1 else 1
    x = torch.randn(len(z) // branches, model.config.token_dim)
    t, t_batch = torch.tensor(0.0), torch.zeros(len(z))
    dt = torch.linspace(0, 1 - last, num_steps + 1).diff() if binary else [(1 - last) / num_steps] * num_steps

    def velocity() -> Tensor:
        both = torch.cat([x] * branches)
        out = parts.head(model, both, t_batch, z)
        return (out - both) / (1 - t_batch.view(-1, 1)).clamp_min(LEAST_TO_GO) if binary else out

    for step in range(num_steps):
        t_batch[:] = t
        x = parts.euler_maruyama_step(x, velocity(), t, dt[step], cfg, branches)
        t += dt[step]
    t_batch[:] = 1 - last
    x = parts.euler_step(x, velocity(), last, cfg, branches)
    return torch.cat([x] * branches)


@torch.inference_mode()
def sample(parts: SimpleNamespace, model: Causal, labels: Tensor, cfg: float, schedule: str, num_steps: int) -> Tensor:
    """Tokens [B, L, d]. parts: the functions above that the authors compile, by name."""
    config = model.config
    null = torch.full_like(labels, config.num_classes)
    classes = torch.cat([labels, null]) if cfg > 1 else labels
    shape = len(classes), config.n_head, config.num_columns, config.dim // config.n_head
    caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in model.layers]
    table = model.table(torch.arange(config.num_columns))
    x, start = model.class_inputs(classes), 0
    tokens = []
    for i in range(config.seq_len):
        end = config.cls_token_num + i
        features = parts.forward_model(model, x, table[start:end], caches, start, end)
        z = features[:, -1] + model.pos_for_diff.weight[i]
        scale = guidance_scale(cfg, schedule, i, config.seq_len)
        drawn = model.finish(draw(parts, model, z, scale, num_steps))
        tokens.append(drawn[: len(labels)])
        x, start = model.proj_in(drawn.unsqueeze(1)), end
    return torch.stack(tokens, dim=1)


def compiled_parts(is_compiled: bool) -> SimpleNamespace:
    functions = {each.__name__: each for each in (forward_model, head, euler_step, euler_maruyama_step)}
    if is_compiled:
        functions = {name: torch.compile(function) for name, function in functions.items()}
    return SimpleNamespace(**functions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", action="store_true", help="BitDance's loop, and a model with random weights")
    parser.add_argument("--compile", action="store_true", help="compile the authors' loop as they do")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100, help="denoising steps")
    parser.add_argument("--runs", type=int, default=5, help="runs of each, interleaved")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    engine = cspd.load("emoji64_sphere", max_batch=args.batch, device="cpu")
    model, defaults = engine.runner.target, engine.runner.defaults
    if args.binary:
        torch.manual_seed(0)
        model = Causal(dataclasses.replace(model.config, binary=True)).eval().requires_grad_(False)
        engine = Engine(CausalModels(model), max_batch=args.batch, device="cpu")
    engine.runner.vae = None  # decoding is not compared
    labels = torch.arange(args.batch) % model.config.num_classes

    parts = compiled_parts(args.compile)
    theirs = functools.partial(sample, parts, model, labels, defaults.cfg, defaults.cfg_schedule, args.steps)
    runs: dict[str, Callable] = {THEIRS: theirs}
    for name in METHODS[:1] if args.binary else METHODS:  # a calibration of random weights would say nothing
        own = {"cfg": defaults.cfg, "num_sampling_steps": args.steps}
        requests = [Request(int(label), seed=i, method=name, **own) for i, label in enumerate(labels)]
        engine.generate(requests)  # calibrates and measures costs
        runs[name] = functools.partial(engine.generate, requests)
    print(f"batch {args.batch}, {args.threads} threads, T = {args.steps}, guidance {defaults.cfg:g}")
    in_turns(runs, args.runs, THEIRS)


if __name__ == "__main__":
    main()
