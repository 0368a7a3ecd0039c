"""Trains a KL autoencoder on coloured digits, or on a directory of images: python scripts/train_vae.py --data FOLDER

The loss is a Gaussian likelihood with a fixed variance plus the KL term: channels that do not reduce the error enough
stay at the prior, and latents have about unit variance. With --free-nats the KL term of a channel counts only above
that value (free bits, Kingma et al. 2016, eq. 15), so that every channel is used.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from pictures import Data, add_data_options, data_of, psnr_of
from torch import Tensor
from training import HELD_OUT_SEED, Loss, chosen, device_of_process, export, fit, go_on_with, is_first, run_main

from mar.checkpoint import VAES, create_vae
from mar.vae import AutoencoderKL

PART = 64  # images that are measured at a time


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_options(parser)
    parser.add_argument("--arch", default="kl_digits32", choices=VAES)
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--variance", type=float, default=0.002, help="of a pixel (in -1..1) given the latent")
    parser.add_argument("--free-nats", type=float, default=0.0, help="KL per channel and cell that costs nothing")
    parser.add_argument("--init", type=Path, help="a file of the same --arch to start from")
    parser.add_argument(
        "--run", type=Path, default=Path("runs/vae"), help="directory of the run; an interrupted run resumes"
    )
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def loss_of(vae: AutoencoderKL, data: Data, args: argparse.Namespace, device: torch.device) -> Loss:
    """The `loss_fn` of `fit`: the evidence lower bound, scaled to the squared error of a pixel."""

    def loss_fn(number: int) -> tuple[Tensor, dict[str, float]]:
        images = data.draw(args.batch, number, "train")[0].to(device)
        generator = torch.Generator().manual_seed(number)
        side = args.size // vae.config.stride
        noise = torch.randn(args.batch, vae.config.embed_dim, side, side, generator=generator).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            mean, logvar = vae.encode(images)
            per_channel = nats(mean, logvar)
            decoded = vae.decode(mean + (0.5 * logvar).exp() * noise)
        kl = per_channel.clamp_min(args.free_nats).sum() * side**2
        mse = (decoded.float() - images).square().mean()
        loss = mse + 2 * args.variance / images[0].numel() * kl
        total, least = per_channel.sum().item() * side**2, per_channel.min().item()
        return loss, {"psnr": round(psnr_of(mse), 2), "kl": round(total, 1), "least": round(least, 3)}

    return loss_fn


def main() -> None:
    args = arguments()
    settings = chosen(args, "data", "size", "upright", "arch", "steps", "batch", "lr", "variance", "free_nats")
    data = data_of(args)
    device = device_of_process()
    torch.manual_seed(0)
    vae = create_vae(args.arch)
    if args.init is not None:
        go_on_with(vae, args.init, settings)
    vae.to(device).train()

    held_out = data.draw(512, HELD_OUT_SEED, "held-out")[0]

    def show(model: AutoencoderKL) -> Tensor:
        images = held_out[:32].to(device)
        return torch.cat([images, model.decode(model.encode(images)[0])]) / 2 + 0.5

    how = {"run": args.run, "settings": settings, "steps": args.steps, "lr": args.lr, "show": show}
    vae, seconds = fit(vae, loss_of(vae, data, args, device), weight_decay=0.0, ema_decay=0.0, **how)
    vae = vae.cpu().half().float()  # as stored
    if is_first():
        report(vae, held_out)
    export(vae, args.out, args.arch, seconds, half=lambda name: True)


def nats(mean: Tensor, logvar: Tensor) -> Tensor:
    """The KL divergence of posteriors [B, c, h, w] from the prior: the mean per cell of each channel, float32 [c]."""
    mean, logvar = mean.float(), logvar.float()
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar)
    return kl.mean(dim=(0, 2, 3))


@torch.inference_mode()
def report(vae: AutoencoderKL, images: Tensor) -> None:
    """Prints the PSNR of held-out images, and the KL divergence of each channel."""
    parts = images.split(PART)
    posteriors = [vae.encode(part) for part in parts]
    mean, logvar = (torch.cat(each) for each in zip(*posteriors))
    decoded = torch.cat([vae.decode(part) for part in mean.split(PART)])
    mse = (decoded.clamp(-1, 1) - images).square().mean()
    std = (mean.var(correction=0) + logvar.exp().mean()).sqrt().item()
    carried = nats(mean, logvar)
    channels = ", ".join(f"{each:.2f}" for each in carried.tolist())
    print(f"held-out PSNR {psnr_of(mse):.2f} dB, latent s.d. {std:.4f}")
    print(f"KL per channel, nats per cell: {channels}; the least is {carried.min() / carried.mean():.2f} of the mean")


if __name__ == "__main__":
    run_main(main)
