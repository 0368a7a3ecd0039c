"""Trains an autoencoder on coloured digits, or on a directory of images.

    python scripts/train/train_vae.py --data FOLDER

The loss is a Gaussian likelihood with a fixed variance plus the KL term. In a KL autoencoder, channels that do not
reduce the error enough stay at the prior, and latents have about unit variance. With --free-nats the KL term of a
channel counts only above that value (free bits, Kingma et al. 2016, eq. 15), so that every channel is used. The cells
of an S-VAE (SphereAR, arXiv 2509.24335) lie on a sphere, with a uniform prior.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import spherical
import torch
from pictures import DATA_OPTIONS, Data, add_data_options, data_of, psnr_of
from torch import Tensor
from training import HELD_OUT_SEED, Loss, chosen, device_of_process, export, fit, go_on_with, is_first, run_main

from cspd.causal.autoencoders import SphereVAE
from cspd.causal.registry import AUTOENCODERS, create_autoencoder
from mar.checkpoint import VAES, create_vae
from mar.vae import AutoencoderKL

PART = 64  # images that are measured at a time
SPHERES = [name for name in AUTOENCODERS if name.startswith("s_vae")]
FIRST_CONCENTRATION = 150.0  # of a new S-VAE: far lower ones hide the cells under noise, and are left slowly
Autoencoder = AutoencoderKL | SphereVAE


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_options(parser)
    parser.add_argument("--arch", default="kl_digits32", choices=[*VAES, *SPHERES])
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--variance", type=float, default=0.002, help="of a pixel (in -1..1) given the latent")
    parser.add_argument(
        "--free-nats", type=float, default=0.0, help="KL per channel (S-VAE: all) and cell that costs nothing"
    )
    parser.add_argument("--init", type=Path, help="a file of the same --arch to start from")
    parser.add_argument(
        "--run", type=Path, default=Path("runs/vae"), help="directory of the run; an interrupted run resumes"
    )
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def new_autoencoder(arch: str) -> Autoencoder:
    """An autoencoder of a named size with random weights."""
    if arch not in SPHERES:
        return create_vae(arch)
    vae = create_autoencoder(arch)
    assert isinstance(vae, SphereVAE)
    with torch.no_grad():
        vae.quant_proj.bias[-1] = FIRST_CONCENTRATION
    return vae


def posterior(vae: Autoencoder, images: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean latents [B, c, h, w] of images, latents drawn from the posterior, and its KL divergence from the prior.

    The divergence is the mean per cell, float32: [c] of each channel, or [1] of an S-VAE, whose channels share it.
    """
    if isinstance(vae, SphereVAE):
        mean, concentration = spherical.posterior(vae, images)
        drawn = spherical.draw(mean, concentration, seed)
        per_cell = spherical.nats(concentration, vae.config.latent_dim)
        return spherical.latents(mean), spherical.latents(drawn), per_cell.mean().unsqueeze(0)
    mean, logvar = vae.encode(images)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(seed)).to(mean.device)
    return mean, mean + (0.5 * logvar).exp() * noise, nats(mean, logvar)


def loss_of(vae: Autoencoder, data: Data, args: argparse.Namespace, device: torch.device) -> Loss:
    """The `loss_fn` of `fit`: the evidence lower bound, scaled to the squared error of a pixel."""

    def loss_fn(number: int) -> tuple[Tensor, dict[str, float]]:
        images = data.draw(args.batch, number, "train")[0].to(device)
        with torch.autocast(device.type, torch.bfloat16):
            _, latents, per_channel = posterior(vae, images, number)
            decoded = vae.decode(latents)
        num_cells = latents[0, 0].numel()
        kl = per_channel.clamp_min(args.free_nats).sum() * num_cells
        mse = (decoded.float() - images).square().mean()
        loss = mse + 2 * args.variance / images[0].numel() * kl
        total, least = per_channel.sum().item() * num_cells, per_channel.min().item()
        return loss, {"psnr": round(psnr_of(mse), 2), "kl": round(total, 1), "least": round(least, 3)}

    return loss_fn


def main() -> None:
    args = arguments()
    settings = chosen(args, *DATA_OPTIONS, "arch", "steps", "batch", "lr", "variance", "free_nats")
    data = data_of(args)
    device = device_of_process()
    torch.manual_seed(0)
    vae = new_autoencoder(args.arch)
    if args.init is not None:
        go_on_with(vae, args.init, settings)
    vae.to(device).train()

    held_out = data.draw(512, HELD_OUT_SEED, "held-out")[0]

    def show(model: Autoencoder) -> Tensor:
        images = held_out[:32].to(device)
        return torch.cat([images, model.decode(posterior(model, images, 0)[0])]) / 2 + 0.5

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
def report(vae: Autoencoder, images: Tensor) -> None:
    """Prints the PSNR of held-out images, and the KL divergence of each channel."""
    parts = images.split(PART)
    posteriors = [posterior(vae, part, seed) for seed, part in enumerate(parts)]
    decoded = torch.cat([vae.decode(mean) for mean, _, _ in posteriors])
    mse = (decoded.clamp(-1, 1) - images).square().mean()
    std = torch.cat([drawn for _, drawn, _ in posteriors]).std().item()
    carried = torch.stack([per_channel for _, _, per_channel in posteriors]).mean(0)
    channels = ", ".join(f"{each:.2f}" for each in carried.tolist())
    print(f"held-out PSNR {psnr_of(mse):.2f} dB, latent s.d. {std:.4f}")
    print(f"KL per channel, nats per cell: {channels}; the least is {carried.min() / carried.mean():.2f} of the mean")


if __name__ == "__main__":
    run_main(main)
