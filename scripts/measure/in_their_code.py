"""Samples in a public code with and without cspd.accelerate: python scripts/measure/in_their_code.py FOLDER --code mar

FOLDER is a clone of the code: LTH14/mar, wusize/Harmon (its MAR, without the language model), guolinke/SphereAR,
shallowdream204/BitDance (imagenet_gen) or stepfun-ai/NextStep-1 (its head; the language model is a small random layer).
The MARs and SphereAR have the bundled weights, the others random ones.

Two copies of the model sample in turns. The accelerated one first samples until it has learned. The last line is a
permutation test on the energy distance of images of either: a small p says that the distributions differ. For a MAR,
--save writes the decoded images of either, whose scores are those of
    cspd evaluate --space digits --images FOLDER/accelerated.npy
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # before torch is imported
os.environ["ENABLE_TORCH_COMPILE"] = "false"  # NextStep-1's own switch

import numpy as np
import torch
from llamagen_loop import in_turns
from mar_loop import stand_in
from torch import Tensor, nn

import cspd
from cspd.engine import Engine
from cspd.evaluation.scores import LEAST_PAIRS, energy_test
from cspd.gpu_check.times import their_model
from cspd.pixels import to_uint8

SampleBatch = Callable[[int], Tensor]  # number of images -> their tokens
THEIRS, OURS = "their sampler", "accelerated"
MOST_BATCHES = 200


class Undecoded(nn.Module):
    """In place of an autoencoder. SphereAR's normalises tokens, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def initialize_weights(self) -> None:
        pass

    def decode(self, x: Tensor) -> Tensor:
        return x

    def normalize(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1) * x.shape[-1] ** 0.5


def with_drawn_zeros(model: nn.Module) -> nn.Module:
    """The model with drawn parameters where its code starts at zero."""
    for parameter in model.parameters():
        if not parameter.any():
            parameter.data.normal_(std=0.5 * parameter.shape[-1] ** -0.5)
    return model.eval()


def mar(args: argparse.Namespace) -> tuple[Any, SampleBatch]:
    model, settings = their_model(sys.path[0], bundled(args.checkpoint).runner.target), {"num_iter": args.num_iter}
    return model, lambda num: model.sample_tokens(num, cfg=args.cfg, labels=torch.arange(num) % 10, **settings)


@functools.cache
def bundled(name: str) -> Engine:
    return cspd.load(name, device="cpu")


def harmon(args: argparse.Namespace) -> tuple[Any, SampleBatch]:
    stand_in("pdb", set_trace=lambda: None)  # their code stops at breakpoints
    sys.modules["models"] = importlib.import_module("src.models.mar")
    sys.modules["models.mar"] = importlib.import_module("src.models.mar.mar")
    return mar(args)


def sphere(args: argparse.Namespace) -> tuple[Any, SampleBatch]:
    theirs: Any = importlib.import_module("SphereAR.model")
    theirs.VAE = Undecoded
    engine = bundled("emoji64_sphere")
    sizes = {"dim": 128, "n_layer": 5, "n_head": 4, "diff_layers": 6, "diff_dim": 128, "diff_adanln_layers": 2}
    sizes |= {"latent_dim": 16, "patch_size": 8, "resolution": 64, "cls_token_num": 4, "num_classes": 10}
    model = theirs.SphereAR(**sizes, diff_batch_mul=1).eval()
    model.load_state_dict(engine.runner.target.state_dict(), strict=False)
    return model, lambda num: model.sample(torch.arange(num) % 10, sample_steps=args.steps, cfg_scale=args.cfg)


def bitdance(args: argparse.Namespace) -> tuple[Any, SampleBatch]:
    sys.path.insert(0, os.path.join(sys.path[0], "imagenet_gen"))
    theirs: Any = importlib.import_module("src.model")
    theirs.VQModel = Undecoded
    sizes = {"dim": 128, "n_layer": 2, "n_head": 2, "diff_layers": 4, "diff_dim": 128, "diff_adanln_layers": 2}
    sizes |= {"latent_dim": 32, "down_size": 16, "patch_size": 1, "resolution": 128, "cls_token_num": 8}
    model: Any = with_drawn_zeros(theirs.BitDance(**sizes, diff_batch_mul=1, num_classes=10))
    return model, lambda num: model.sample(torch.arange(num) % 10, sample_steps=args.steps, cfg_scale=args.cfg)


def nextstep(args: argparse.Namespace) -> tuple[Any, SampleBatch]:
    importlib.import_module("nextstep.models")
    stand_in("nextstep.utils.loguru", logger=None)
    theirs: Any = importlib.import_module("nextstep.models.modeling_fm_head")
    head: Any = with_drawn_zeros(theirs.FlowMatchingHead(input_dim=64, cond_dim=64, dim=128, layers=3))
    mix = torch.randn(128, 64) / 128**0.5

    def sample(num: int) -> Tensor:
        c, tokens = torch.zeros(2 * num, 64), []
        c[:num] = torch.arange(num)[:, None] % 10
        for _ in range(16):
            tokens.append(head.sample(c, cfg=args.cfg, num_sampling_steps=args.steps, noise_repeat=num))
            c = torch.tanh(torch.cat([c, tokens[-1].repeat(2, 1)], dim=1) @ mix)
        return torch.stack(tokens, dim=1)

    return head, sample


CODES = {"mar": mar, "harmon": harmon, "sphere": sphere, "bitdance": bitdance, "nextstep": nextstep}


def images(sample: SampleBatch, batch: int, num: int, seed: int) -> Tensor:
    """Tokens [num, ..] of images."""
    torch.manual_seed(seed)
    return torch.cat([sample(batch) for _ in range(-(-num // batch))])[:num]


def save(path: Path, latents: Tensor, engine: Engine) -> None:
    """Decodes a MAR's latents [N, c, h, w], and writes the images as uint8 [N, H, W, 3]."""
    runner: Any = engine.runner
    decoded = runner.decode(runner.target.patchify(latents))
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, to_uint8(decoded).permute(0, 2, 3, 1).numpy())
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="clone of the code")
    parser.add_argument("--code", required=True, choices=CODES)
    parser.add_argument("--method", default="speculative", choices=("speculative", "calibrated"))
    parser.add_argument("--checkpoint", default="digits32", choices=("digits32", "emoji64"), help="a MAR's weights")
    parser.add_argument("--num-iter", type=int, default=64, help="a MAR's iterations")
    parser.add_argument("--steps", type=int, default=30, help="denoising steps, of all but the MARs")
    parser.add_argument("--cfg", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5, help="runs of each, interleaved")
    parser.add_argument("--images", type=int, default=64, help=f"of each, for the test, {LEAST_PAIRS} or more")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write a MAR's decoded images")
    args = parser.parse_args()
    if args.images < LEAST_PAIRS:
        parser.error(f"give --images {LEAST_PAIRS} or more")

    torch.set_num_threads(args.threads)
    sys.path.insert(0, args.folder)
    stand_in("flash_attn", flash_attn_func=None)
    copies = []
    for _ in range(2):
        torch.manual_seed(0)  # random weights are the same
        copies.append(CODES[args.code](args))
    theirs, ours = copies
    handle = cspd.accelerate(ours[0], args.method)
    batches = {THEIRS: torch.inference_mode()(theirs[1]), OURS: torch.inference_mode()(ours[1])}
    for _ in range(MOST_BATCHES):  # until a batch has nothing to learn from
        before = handle.stats.learned
        batches[OURS](args.batch)
        if handle.stats.learned == before:
            break
    print(f"{args.code}, {args.method}, batch {args.batch}, {args.threads} threads, guidance {args.cfg:g}")
    in_turns({name: functools.partial(sample, args.batch) for name, sample in batches.items()}, args.runs, THEIRS)
    drawn = [images(sample, args.batch, args.images, seed) for seed, sample in enumerate(batches.values())]
    print(handle)
    print(f"energy distance of {args.images} images: p = {energy_test(*drawn):.3f}")
    if args.save:
        for name, latents in zip(("theirs", "accelerated"), drawn):
            save(args.save / f"{name}.npy", latents, bundled(args.checkpoint))


if __name__ == "__main__":
    main()
