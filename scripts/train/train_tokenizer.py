"""Trains a VQ tokenizer on coloured digits, or a directory of images.

    python scripts/train/train_tokenizer.py --data FOLDER

Gradients are straight-through, as in LlamaGen, but without its perceptual and adversarial losses: squared error is
enough for images of few details. Codes that a batch does not use are moved onto vectors of that batch, so that no code
stays unused.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from pictures import DATA_OPTIONS, Data, add_data_options, data_of, psnr_of
from torch import Tensor
from training import (
    HELD_OUT_SEED,
    Loss,
    as_first,
    chosen,
    device_of_process,
    export,
    fit,
    is_first,
    rank_and_world,
    run_main,
)

from cspd.discrete.gpt import VQModel
from cspd.discrete.registry import TOKENIZERS, create_tokenizer

COMMITMENT = 0.25
REVIVE_EVERY = 20  # steps
REVIVE_UNTIL = 0.7  # fraction of the steps
PART = 64  # images that are measured at a time


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_options(parser)
    parser.add_argument("--arch", default="vq_digits32", choices=TOKENIZERS)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--run", type=Path, default=Path("runs/tokenizer"), help="directory of the run; an interrupted run resumes"
    )
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def usage(model: VQModel, codes: Tensor) -> Tensor:
    """The number of times that each code occurs, int64 [V]."""
    return torch.bincount(codes.flatten(), minlength=model.config.codebook_size)


@torch.no_grad()
def revive(model: VQModel, vectors: Tensor, used: Tensor, generator: torch.Generator) -> None:
    """Moves codes that are not `used` (bool [V]) onto random `vectors` [B, d, h, w]; all processes move them alike."""
    pool = vectors.flatten(2).transpose(1, 2).flatten(0, 1)
    picked = pool[torch.randint(len(pool), (len(used),), generator=generator).to(pool.device)]
    weight = model.quantize.embedding.weight
    weight.copy_(as_first(torch.where(used.unsqueeze(1), weight, picked)))


def loss_of(model: VQModel, data: Data, args: argparse.Namespace, device: torch.device) -> Loss:
    """The `loss_fn` of `fit`: errors of pixels, of vectors and of their codes (van den Oord et al. 2017, eq. 3)."""

    def loss_fn(number: int) -> tuple[Tensor, dict[str, float]]:
        images = data.draw(args.batch, number, "train")[0].to(device)
        with torch.autocast(device.type, torch.bfloat16):
            vectors = model.project(images)
        vectors = vectors.float()
        codes = model.nearest(vectors)
        used = usage(model, codes) > 0
        step = number // rank_and_world()[1]
        if step % REVIVE_EVERY == 0 and step < REVIVE_UNTIL * args.steps:
            revive(model, vectors, used, torch.Generator().manual_seed(number))
            codes = model.nearest(vectors)
        quantised = model.lookup(codes)
        commit = (quantised.detach() - vectors).square().mean()
        codebook = (quantised - vectors.detach()).square().mean()
        with torch.autocast(device.type, torch.bfloat16):
            straight_through = vectors + (quantised - vectors).detach()
            decoded = model.render(straight_through)
        mse = (decoded.float() - images).square().mean()
        shown = {"psnr": round(psnr_of(mse), 2), "used": int(used.sum())}
        return mse + codebook + COMMITMENT * commit, shown

    return loss_fn


@torch.inference_mode()
def report(model: VQModel, images: Tensor) -> None:
    """Prints the PSNR of held-out images, and how many codes they use."""
    codes = torch.cat([model.encode(part) for part in images.split(PART)])
    decoded = torch.cat([model.decode(part) for part in codes.split(PART)])
    psnr = psnr_of((decoded.clamp(-1, 1) - images).square().mean())
    share = usage(model, codes) / codes.numel()
    entropy = -(share * share.clamp_min(1e-12).log2()).sum().item()
    print(f"held-out PSNR {psnr:.2f} dB, {int((share > 0).sum())} codes used, {entropy:.2f} bits of entropy per code")


def main() -> None:
    args = arguments()
    settings = chosen(args, *DATA_OPTIONS, "arch", "steps", "batch", "lr")
    data = data_of(args)
    device = device_of_process()
    torch.manual_seed(0)
    model = create_tokenizer(args.arch).to(device).train()
    held_out = data.draw(512, HELD_OUT_SEED, "held-out")[0]

    def show(model: VQModel) -> Tensor:
        images = held_out[:32].to(device)
        return torch.cat([images, model.decode(model.encode(images))]) / 2 + 0.5

    how = {"run": args.run, "settings": settings, "steps": args.steps, "lr": args.lr, "show": show}
    loss_fn = loss_of(model, data, args, device)
    model, seconds = fit(model, loss_fn, weight_decay=0.0, ema_decay=0.0, **how)
    model = model.cpu().half().float()  # as stored
    if is_first():
        report(model, held_out)
    export(model, args.out, args.arch, seconds, half=lambda name: True)


if __name__ == "__main__":
    run_main(main)
