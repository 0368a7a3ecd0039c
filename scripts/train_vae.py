"""Trains the embedded KL autoencoder on coloured digits: python scripts/train_vae.py

A Gaussian likelihood with a fixed variance is weighed against the KL term: latent channels that do not pay for
themselves stay at the prior, and the latents come out near unit variance.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from digits import coloured_digits
from torch import Tensor
from training import HELD_OUT_SEED, export, fit

from mar.registry import create_vae


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--variance", type=float, default=0.002, help="of a pixel (in -1..1) given the latent")
    parser.add_argument("--run", type=Path, default=Path("runs/vae"), help="resumes from here if it was cut off")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/digits32/vae.safetensors"))
    args = parser.parse_args()

    settings = {name: getattr(args, name) for name in ("steps", "batch", "lr", "variance")}
    torch.manual_seed(0)
    vae = create_vae("kl_digits32").train()

    def reconstruct(images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, logvar = vae.encode(images)
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar)
        latent = mean + (0.5 * logvar).exp() * noise
        return vae.decode(latent), kl.flatten(1).sum(1).mean()

    def loss_fn(step: int) -> tuple[Tensor, dict[str, float]]:
        images, _ = coloured_digits(args.batch, seed=step)
        generator = torch.Generator().manual_seed(step)
        noise = torch.randn(args.batch, 16, 8, 8, generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            decoded, kl = reconstruct(images, noise)
        mse = (decoded.float() - images).square().mean()
        loss = mse + 2 * args.variance / images[0].numel() * kl
        psnr = -10 * torch.log10(mse / 4).item()
        return loss, {"psnr": round(psnr, 2), "kl": round(kl.item(), 1)}

    vae, seconds = fit(
        vae, loss_fn, run=args.run, settings=settings, steps=args.steps, lr=args.lr, weight_decay=0.0, ema_decay=0.0
    )
    with torch.inference_mode():
        images, _ = coloured_digits(512, seed=HELD_OUT_SEED, split="held-out")
        vae = vae.half().float()  # as stored
        mean, logvar = vae.encode(images)
        std = (mean.var(correction=0) + logvar.exp().mean()).sqrt().item()
        mse = (vae.decode(mean).clamp(-1, 1) - images).square().mean()
        psnr = -10 * torch.log10(mse / 4).item()
        informative = int((mean.var(dim=(0, 2, 3)) > 0.5).sum())
    print(f"held-out PSNR {psnr:.2f} dB, latent s.d. {std:.4f}, {informative} of 16 channels carry information")
    export(vae, args.out, "kl_digits32", seconds, half=lambda name: True)


if __name__ == "__main__":
    main()
