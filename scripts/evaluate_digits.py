"""Measures an embedded model by the classifier: python scripts/evaluate_digits.py WEIGHTS

Tries guidance scales on a few images each, then takes the best for the count asked for. Writes a grid and the numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

from cspd import Engine, Request, load
from cspd.evaluation.classifier import accuracy, load_classifier
from cspd.plots import grid, to_pil

EXPLODED = 8.0  # MAR's tokens have unit variance: none of the data's is this far out


def sample(engine: Engine, num: int, seed: int, **settings) -> tuple[Tensor, Tensor, Tensor]:
    """Images [num, 3, 32, 32], labels [num] and the largest magnitude of each image's tokens [num]."""
    requests = [Request(label=i % 10, seed=seed + i, **settings) for i in range(num)]
    outputs = engine.generate(requests, progress=True)
    images = torch.stack([o.image for o in outputs])
    size = torch.stack([o.tokens.float().abs().max() for o in outputs])
    return images, torch.tensor([r.label for r in requests]), size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--num", type=int, default=2000, help="images at the best guidance")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them: for doing the work in parts")
    parser.add_argument("--cfg", type=float, nargs="+", default=[2.0, 3.0, 4.0], help="guidance scales to choose from")
    parser.add_argument("--try-num", type=int, default=100, help="images at each, where there are several")
    parser.add_argument("--num-iter", type=int, help="of MAR (default: 64)")
    parser.add_argument("--method", help="(default: the family's)")
    parser.add_argument("--max-batch", type=int, default=50)
    parser.add_argument("--grid", type=Path, help="write a grid of the first 100 images here")
    args = parser.parse_args()

    engine = load(args.weights, max_batch=args.max_batch)
    is_mar = engine.host.family == "MAR"
    settings = {"num_iter": args.num_iter or (64 if is_mar else None), "method": args.method}
    classifier = load_classifier()
    tried = {}
    for cfg in args.cfg if len(args.cfg) > 1 else []:
        images, labels, size = sample(engine, args.try_num, 10**6, cfg=cfg, **settings)
        tried[cfg] = accuracy(classifier, images, labels)
        print(f"cfg {cfg}: accuracy {tried[cfg]:.3f}", flush=True)
    best = max(tried, key=tried.get) if tried else args.cfg[0]
    start = time.perf_counter()
    images, labels, size = sample(engine, args.num, args.seed, cfg=best, **settings)
    result = {
        "weights": args.weights.name,
        "cfg": best,
        **settings,
        "images": args.num,
        "first_seed": args.seed,
        "recognised": round(args.num * accuracy(classifier, images, labels)),
        "accuracy": round(accuracy(classifier, images, labels), 4),
        "accuracy_by_cfg": {str(cfg): round(value, 3) for cfg, value in tried.items()},
        "seconds": round(time.perf_counter() - start),
    }
    if is_mar:
        result |= {"exploded": int((~(size < EXPLODED)).sum()), "largest_token": round(size.max().item(), 2)}
    print(json.dumps(result))
    if args.grid:
        shown = [to_pil(image) for image in images[:100]]
        grid(shown, [str(label) for label in labels[:100].tolist()], columns=20).save(args.grid)


if __name__ == "__main__":
    main()
