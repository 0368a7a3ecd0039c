"""Trains a SphereAR on the cells of an S-VAE, see train_vae.py.

    python scripts/train/train_sphere.py --data FOLDER --vae FILE

The loss is SphereAR's (arXiv 2509.24335): the squared error of the head's velocity, with the tokens before and those to
draw sampled from the S-VAE's posterior, and a tenth of the labels replaced by no class. A fraction of the times is
uniform: a short training with the authors' logit-normal times alone would rarely visit the ends of the chain.

As in train_mar.py, a linear layer also predicts the tokens' means from z, and is discarded afterwards.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import spherical
import torch
from latents import Guessing, Latents, latents
from pictures import DATA_OPTIONS, add_data_options, data_of
from torch import Tensor, nn
from torch.nn import functional as F
from training import Loss, chosen, device_of_process, export, fit, go_on_with, run_main

import cspd
from cspd.causal.autoencoders import SphereVAE
from cspd.causal.models import Causal
from cspd.causal.registry import CAUSALS, load_autoencoder
from cspd.origin import file_fingerprint

LABEL_DROP = 0.1
UNIFORM_SHARE = 0.25  # of the times of the head's loss
WEIGHT_STD = 0.02
SHOWN = 20  # images that are sampled during training
SPHERES = [name for name, spec in CAUSALS.items() if not spec.config.binary]


def encoder(vae: SphereVAE, device: torch.device) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The `encode` of `latents`: mean directions and concentrations."""
    vae = vae.to(device)

    def encode(images: Tensor) -> tuple[Tensor, Tensor]:
        mean, concentration = spherical.posterior(vae, images)
        return mean, concentration.unsqueeze(-1)

    return encode


@torch.no_grad()
def initialise(model: Causal) -> None:
    """Initialises a new model as the authors do; at first the head predicts 0."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=WEIGHT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    net = model.head.net
    for layer in [net.cond_embed, net.input_proj, *net.res_blocks.modules()]:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    for layer in [*net.ada_ln_blocks, net.final_layer.ada_ln_modulation, net.final_layer.linear]:
        nn.init.zeros_(layer.weight)


def noised(x1: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Times t [N], noise [N, ..] and noisy tokens [N, ..] for the loss of tokens x1 [N, ..]."""
    rows = len(x1)
    t = torch.randn(rows, generator=generator).sigmoid()
    uniform = int(rows * UNIFORM_SHARE)
    t[:uniform] = torch.rand(uniform, generator=generator)
    noise = torch.randn(x1.shape, generator=generator).to(x1.device)
    t = t.to(x1.device)
    return t, noise, torch.lerp(noise, x1, t.view(-1, *[1] * (x1.dim() - 1)))


def head_loss(head: nn.Module, x1: Tensor, z: Tensor, generator: torch.Generator) -> Tensor:
    """The squared error of the velocity towards tokens x1 [N, d], given conditions z [N, D]."""
    t, noise, x = noised(x1, generator)
    return F.mse_loss(head(x, t, z).float(), x1 - noise)


def loss_of(guessing: Guessing, data: Latents, args: argparse.Namespace, device: torch.device) -> Loss:
    """The `loss_fn` of `fit`."""
    model = guessing.model
    null = model.config.num_classes

    def loss_fn(number: int) -> tuple[Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(number)
        index = torch.randint(len(data.labels), (args.batch,), generator=generator)
        mean = F.normalize(data.means[index].float(), dim=-1)
        drawn = spherical.draw(mean, data.stds[index, :, 0].float(), number)
        drop = torch.rand(args.batch, generator=generator) < LABEL_DROP
        labels = data.labels[index].masked_fill(drop, null).to(device)
        radius = mean.shape[-1] ** 0.5
        means, tokens = (radius * mean).to(device), (radius * drawn).to(device)
        # rows of a permutation, so that the fraction with uniform times is not of the same images or positions
        rows = torch.cat([torch.randperm(tokens[..., 0].numel(), generator=generator) for _ in range(args.draws)])
        with torch.autocast(device.type, torch.bfloat16):
            z = model(labels, tokens[:, :-1])
            missed = F.mse_loss(guessing.guess(z).float(), means)
            x1, z = (each.flatten(0, 1)[rows.to(device)] for each in (tokens, z))
            loss = head_loss(model.head, x1, z, generator)
        return loss + missed, {"loss": round(loss.item(), 4), "guess": round(missed.item(), 4)}

    return loss_fn


def in_the_transformer(name: str) -> bool:
    """Whether a weight belongs to the transformer's layers."""
    return name.startswith("model.layers.")


def samples(model: Causal, vae: SphereVAE, device: torch.device) -> Tensor:
    """Images [SHOWN, 3, H, W], cycling through classes, with few steps."""
    models = cspd.CausalModels(copy.deepcopy(model), vae)  # an engine freezes its weights
    engine = cspd.Engine(models, max_batch=SHOWN, device=device)
    classes, quick = model.config.num_classes, {"num_sampling_steps": 25}
    requests = [cspd.Request(i % classes, seed=i, method="ar", settings=quick) for i in range(SHOWN)]
    return torch.stack([output.image for output in engine.generate(requests) if output.image is not None])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_options(parser)
    parser.add_argument(
        "--arch", default="sphere_ar_emoji64", choices=SPHERES, help="the model's size; --size decides its image size"
    )
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--draws", type=int, default=2, help="times and noises of the head's loss for each token")
    parser.add_argument("--images", type=int, default=40000, help="augmented images, encoded once")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--init", type=Path, help="a file of this program, of the same --arch, to start from")
    parser.add_argument("--vae", type=Path, required=True, help="file of the S-VAE, see train_vae.py")
    parser.add_argument("--latents", type=Path, help="file of the encoded images (default: in --run)")
    parser.add_argument(
        "--run", type=Path, help="directory of the run; an interrupted run resumes (default: runs/ARCH)"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.run = args.run or Path("runs") / args.arch
    args.latents = args.latents or args.run / "latents.safetensors"
    return args


def main() -> None:
    args = arguments()
    device = device_of_process()
    source, vae = data_of(args), load_autoencoder(args.vae)
    if not isinstance(vae, SphereVAE):
        raise ValueError(f"{args.vae} is not an S-VAE: pass a file of train_vae.py --arch s_vae_...")
    drawn = chosen(args, *DATA_OPTIONS, "images") | {"vae": file_fingerprint(args.vae)}
    settings = drawn | chosen(args, "arch", "steps", "batch", "draws", "lr")
    data = latents(encoder(vae, device), source, args.images, device, args.latents, drawn)

    torch.manual_seed(0)
    sizes = {"side": args.size // vae.config.stride, "stride": vae.config.stride, "num_classes": len(source.classes)}
    model = Causal(dataclasses.replace(CAUSALS[args.arch].config, latent_dim=vae.config.latent_dim, **sizes))
    if args.init is None:
        initialise(model)
    else:
        go_on_with(model, args.init, settings)
    guessing = Guessing(model, model.config.dim).to(device).train()
    guessing, seconds = fit(
        guessing,
        loss_of(guessing, data, args, device),
        run=args.run,
        settings=settings,
        steps=args.steps,
        lr=args.lr,
        hidden=in_the_transformer,
        show=lambda averaged: samples(averaged.model, vae, device),
    )
    export(guessing.model, args.out, args.arch, seconds, half=lambda name: True)


if __name__ == "__main__":
    run_main(main)
