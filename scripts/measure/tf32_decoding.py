"""How much pixels change if autoencoders decode with TF32 products: emulated on a CPU.

A GPU's TF32 products have inputs of 10 mantissa bits and float32 sums. Here the inputs of all convolutions, matrix
products and attention are rounded so, which a GPU does in its own order of sums. The images are those of `ar`.

    python scripts/measure/tf32_decoding.py digits32 emoji64
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import cspd
from cspd import Request

DROPPED = 13  # of float32's 23 mantissa bits
PRODUCTS = ("conv", "mm", "matmul", "linear", "attention")  # parts of the names of operations
LEVELS = 255


def rounded(x: Tensor) -> Tensor:
    """Float32 numbers with 10 mantissa bits: the nearest, ties away from zero."""
    half, mask = 1 << (DROPPED - 1), -(1 << DROPPED)
    return ((x.contiguous().view(torch.int32) + half) & mask).view(torch.float32)


class TF32(TorchDispatchMode):
    """Rounds the inputs of all products; counts them in `products`."""

    products = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = operation._schema.name.split("::")[1]
        if any(product in name for product in PRODUCTS):
            self.products += 1
            # a bias, which has one dimension, is added in float32
            args = tree_map_only(Tensor, lambda x: rounded(x) if x.dim() > 1 and x.is_floating_point() else x, args)
        return operation(*args, **(kwargs or {}))


def levels(images: Tensor) -> Tensor:
    """Pixels 0..255 as a PNG file has them."""
    return (images * LEVELS).round().clamp(0, LEVELS)


@torch.inference_mode()
def differences(decode: Callable[[Tensor], Tensor], tokens: Tensor) -> dict[str, float]:
    """How the pixels of tokens [B, ...] differ.

    Returns the mean and the largest difference in levels of 255 before rounding to whole levels, and the fraction of
    pixels (each channel) that have another level in a PNG file.
    """
    exact = decode(tokens)
    with TF32() as mode:
        made = decode(tokens)
    if not mode.products:
        raise RuntimeError("no product was rounded: the decoder's operations have other names in this torch")
    distance = LEVELS * (made - exact).abs()
    changed = (levels(made) != levels(exact)).float().mean().item()
    return {"mean": distance.mean().item(), "largest": distance.max().item(), "changed": changed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", nargs="+", metavar="NAME")
    parser.add_argument("--num", type=int, default=32, help="images of each (default: %(default)s)")
    args = parser.parse_args()
    for name in args.checkpoints:
        engine = cspd.load(name, max_batch=min(args.num, 16), device="cpu")
        outputs = engine.generate([Request(i % 10, i, "ar") for i in range(args.num)])
        tokens = torch.stack([output.tokens for output in outputs])
        found = differences(engine.runner.decode, tokens)
        print(
            f"{name}: {found['mean']:.3f} levels of 255 on average, {found['largest']:.2f} at most;"
            f" {found['changed']:.2%} of the values in a PNG file change"
        )


if __name__ == "__main__":
    main()
