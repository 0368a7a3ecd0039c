"""Trains the embedded VQ tokenizer on coloured digits: python scripts/train_tokenizer.py

Straight-through gradients, as LlamaGen's, without its perceptual and adversarial losses: squared error is enough for
digits. Codes that no vector of a batch is near to are moved onto vectors of that batch, so that none stays unused.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from digits import coloured_digits
from torch import Tensor
from training import HELD_OUT_SEED, export, fit

from cspd.vq.registry import create_tokenizer

COMMITMENT = 0.25
REVIVE_EVERY = 20  # steps
REVIVE_UNTIL = 0.7  # share of the steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--run", type=Path, default=Path("runs/tokenizer"), help="resumes from here if it was cut off")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/digits32_vq/tokenizer.safetensors"))
    args = parser.parse_args()

    settings = {name: getattr(args, name) for name in ("steps", "batch", "lr")}
    torch.manual_seed(0)
    model = create_tokenizer("vq_digits32").train()

    @torch.no_grad()
    def revive(vectors: Tensor, used: Tensor, generator: torch.Generator) -> None:
        pool = vectors.flatten(2).transpose(1, 2).flatten(0, 1)
        picked = pool[torch.randint(len(pool), (len(used),), generator=generator)]
        weight = model.quantize.embedding.weight
        weight.copy_(torch.where(used.unsqueeze(1), weight, picked))

    def loss_fn(step: int) -> tuple[Tensor, dict[str, float]]:
        images, _ = coloured_digits(args.batch, seed=step)
        with torch.autocast("cpu", torch.bfloat16):
            vectors = model.project(images)
        vectors = vectors.float()
        codes = model.nearest(vectors)
        used = torch.bincount(codes.flatten(), minlength=model.config.codebook_size) > 0
        if step % REVIVE_EVERY == 0 and step < REVIVE_UNTIL * args.steps:
            revive(vectors, used, torch.Generator().manual_seed(step))
            codes = model.nearest(vectors)
        quantised = model.lookup(codes)
        commit = (quantised.detach() - vectors).square().mean()
        codebook = (quantised - vectors.detach()).square().mean()
        with torch.autocast("cpu", torch.bfloat16):
            straight_through = vectors + (quantised - vectors).detach()
            decoded = model.render(straight_through)
        mse = (decoded.float() - images).square().mean()
        psnr = round(-10 * torch.log10(mse / 4).item(), 2)
        return mse + codebook + COMMITMENT * commit, {"psnr": psnr, "used": int(used.sum())}

    model, seconds = fit(
        model, loss_fn, run=args.run, settings=settings, steps=args.steps, lr=args.lr, weight_decay=0.0, ema_decay=0.0
    )
    with torch.inference_mode():
        images, _ = coloured_digits(512, seed=HELD_OUT_SEED, split="held-out")
        model = model.half().float()  # as stored
        codes = model.encode(images)
        mse = (model.decode(codes).clamp(-1, 1) - images).square().mean()
        psnr = -10 * torch.log10(mse / 4).item()
        share = torch.bincount(codes.flatten(), minlength=model.config.codebook_size) / codes.numel()
        entropy = -(share * share.clamp_min(1e-12).log2()).sum().item()
    print(f"held-out PSNR {psnr:.2f} dB, {int((share > 0).sum())} codes used, {entropy:.2f} bits of entropy per code")
    export(model, args.out, "vq_digits32", seconds, half=lambda name: True)


if __name__ == "__main__":
    main()
