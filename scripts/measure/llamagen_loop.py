"""Times baseline sampling of the bundled VQ target against LlamaGen's own loop: python scripts/measure/llamagen_loop.py

The loop follows LlamaGen's code (Sun et al. 2024, arXiv 2406.06525): all images in lockstep, masked attention over the
whole length of a cache, `torch.multinomial`. It runs eagerly and compiled, with the bundled weights. The runs are
interleaved and generate whole images without decoding them; compiling takes about a minute first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import cspd
from cspd import Request
from cspd.discrete.gpt import GPT
from cspd.transformer import RMSNorm

OURS = "ar"
WARM_UP = 1  # turns that warm up and compile


def normed(norm: RMSNorm, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def turned(x: Tensor, table: Tensor) -> Tensor:
    """Pairs of channels of x [R, 1, heads, head_dim], turned by the angles of table [1, head_dim / 2, 2]."""
    (a, b), (cos, sin) = x.unflatten(-1, (-1, 2)).unbind(-1), table.unsqueeze(1).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(3)


def forward(model: GPT, x: Tensor, position: Tensor, causal: Tensor, table: Tensor, caches: list) -> Tensor:
    """Logits [R, V] after inputs x [R, 1, dim] at a position, int64 [1].

    Args:
        causal: bool [L, L]. table: as `GPT.table`, of all positions. caches: keys and values of each layer,
            [R, heads, L, head_dim], written in place.
    """
    mask, table = causal[position], table[position]
    for block, (keys, values) in zip(model.layers, caches):
        attention = block.attention
        qkv = attention.wqkv(normed(block.attention_norm, x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (attention.n_head, -1)) for part in qkv)
        q, k, v = (part.transpose(1, 2) for part in (turned(q, table), turned(k, table), v))
        keys[:, :, position] = k
        values[:, :, position] = v
        seen = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + attention.wo(seen.transpose(1, 2).flatten(2))
        x = x + block.feed_forward(normed(block.ffn_norm, x))
    return model.output(normed(model.norm, x))[:, -1]


@torch.inference_mode()
def sample(model: GPT, forward: Callable[..., Tensor], batch: int, cfg: float) -> None:
    """Samples one batch of images, cycling through classes."""
    config = model.config
    length, rows = config.block_size, 2 * batch
    shape = (rows, config.n_head, length, config.head_dim)
    caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in model.layers]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    table = model.table(torch.arange(length))
    labels = torch.arange(batch) % config.num_classes
    x = model.cls_embedding(torch.cat([labels, torch.full_like(labels, config.num_classes)]))
    for i in range(length):
        conditional, null = forward(model, x, torch.tensor([i]), causal, table, caches).chunk(2)
        probabilities = (null + cfg * (conditional - null)).softmax(-1)
        codes = torch.multinomial(probabilities, 1)
        x = model.tok_embeddings(torch.cat([codes, codes]))


def in_turns(runs: dict[str, Callable], num_turns: int, baseline: str) -> None:
    """Times runs in turns and prints their medians, ranges, and speed-ups over the baseline of the same turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(WARM_UP + num_turns):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    print(f"medians (and ranges) of {num_turns} turns, in seconds")
    for name, own in times.items():
        ratio = statistics.median(base / other for base, other in zip(times[baseline], own))
        print(f"{name:30s} {statistics.median(own):7.3f} ({min(own):.3f} to {max(own):.3f})  {ratio:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cfg", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=8, help="runs of each, interleaved")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    engines = {
        name: cspd.load("digits32_vq", max_batch=args.batch, device="cpu", compiled=compiled)
        for name, compiled in ((OURS, False), (f"{OURS} --compile", True))
    }
    for engine in engines.values():
        engine.runner.models["tokenizer"] = None  # decoding is not compared
    model = engines[OURS].runner.target
    requests = [Request(i % 10, seed=i, method="ar", cfg=args.cfg) for i in range(args.batch)]
    runs: dict[str, Callable] = {name: lambda e=engine: e.generate(requests) for name, engine in engines.items()}
    loops = {"LlamaGen's loop": forward, "LlamaGen's loop, compiled": torch.compile(forward, fullgraph=True)}
    for name, loop in loops.items():
        runs[name] = lambda loop=loop: sample(model, loop, args.batch, args.cfg)

    print(f"batch {args.batch}, {args.threads} threads, guidance {args.cfg:g}")
    in_turns(runs, args.runs, OURS)


if __name__ == "__main__":
    main()
