"""Trains a MAR on latents of coloured digits, or of a directory of images.

    python scripts/train/train_mar.py --data FOLDER

There are two stages: the whole model, then the head alone, on conditions z of the averaged backbone. In both, a
fraction of the head's rows is at timestep 999 with extra weight: there sampling multiplies the head's error by 316, and
uniform timesteps visit it once in a thousand rows.

Most of the diffusion loss is noise that no condition can predict. So in the first stage a linear layer also predicts
the means of masked tokens from z, a direct signal of what z must contain. The layer is discarded afterwards.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import first_step
import torch
from latents import Batch, Batches, Guessing, latents
from pictures import DATA_OPTIONS, add_data_options, data_of
from torch import Tensor
from torch.nn import functional as F
from training import Loss, chosen, device_of_process, export, fit, go_on_with, run_main

import cspd
from cspd.models import described
from cspd.origin import file_fingerprint
from mar.checkpoint import MARS, load_vae, mar_spec
from mar.head import TRAIN_STEPS, Head, training_loss
from mar.model import MAR
from mar.vae import AutoencoderKL

LABEL_DROP = 0.1
LONGEST = 64.0  # cells per radian of the slowest wave of positions
SHOWN = 24  # images that are sampled during training
FIRST_STEP_SHARE = 0.15  # the fraction of the head's rows at timestep 999
FIRST_STEP_WEIGHT = {"whole": 20.0, "head": 1000.0}  # sampling multiplies their error by 316
HEAD_IN_FLOAT32 = ("input_proj", "in_ln", "final_layer.linear")  # the path of x_t; rounding elsewhere costs 1e-5 of it


def head_loss(
    head: Head, x0: Tensor, z: Tensor, generator: torch.Generator, weight: float
) -> tuple[Tensor, dict[str, float]]:
    """The diffusion loss of rows x0 [N, d] with conditions z [N, D]; the first FIRST_STEP_SHARE are at timestep 999."""
    rows = len(x0)
    first = max(1, int(rows * FIRST_STEP_SHARE))
    t = torch.randint(TRAIN_STEPS, (rows,), generator=generator)
    t[:first] = TRAIN_STEPS - 1
    noise = torch.randn(x0.shape, generator=generator)
    mse, vb = training_loss(head, x0, z, t.to(x0.device), noise.to(x0.device))
    mse_first = mse[:first].mean()
    mse_rest = mse[first:].mean()
    vb_rest = vb[first:].mean()
    share = first / rows
    loss = weight * share * mse_first + (1 - share) * (mse_rest + vb_rest)
    return loss, {
        "mse": round(mse_rest.item(), 4),
        "rms999": round(mse_first.item() ** 0.5, 5),
        "vb": round(vb_rest.item(), 3),
    }


def encoder(vae: AutoencoderKL, device: torch.device) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The `encode` of `latents`: the posteriors of tokens, scaled to unit variance."""
    vae = vae.to(device)

    def encode(images: Tensor) -> tuple[Tensor, Tensor]:
        mean, logvar = vae.encode(images)
        scaled = mean * vae.config.scale, (0.5 * logvar.float()).exp() * vae.config.scale
        mean, std = (each.flatten(2).transpose(1, 2) for each in scaled)
        return mean, std

    return encode


def conditions(model: MAR, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Clean tokens [N, d], their means [N, d] and conditions [N, D] at all masked positions of a batch."""
    tokens, order, num_known, labels, generator, means = batch
    drop = torch.rand(len(labels), 1, generator=generator) < LABEL_DROP
    embedding = torch.where(drop.to(labels.device), model.fake_latent, model.class_emb(labels))
    z = model(tokens, order, [num_known] * len(tokens), embedding)
    masked = order[:, num_known:].unsqueeze(-1)
    x0, mean, z = (each.gather(1, masked.expand(-1, -1, each.shape[-1])).flatten(0, 1) for each in (tokens, means, z))
    return x0, mean, z


def some(num_rows: int, batch: Batch, x0: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """`num_rows` random rows, with replacement, for the head's loss."""
    picked = torch.randint(len(x0), (num_rows,), generator=batch.generator).to(x0.device)
    return x0[picked], z[picked].float()


def in_the_transformer(name: str) -> bool:
    """Whether a weight belongs to the blocks of the encoder or decoder."""
    return "encoder_blocks" in name or "decoder_blocks" in name


@torch.no_grad()
def initialise_positions(model: MAR) -> None:
    """Initialises the learned positions with sines and cosines of rows and columns, as in MAE (He et al. 2022)."""
    side, quarter = model.config.grid_size, model.config.embed_dim // 4
    angles = torch.arange(side).unsqueeze(1) * LONGEST ** (-torch.arange(quarter) / quarter)
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    both = torch.cat([waves.repeat_interleave(side, 0), waves.repeat(side, 1)], dim=1)
    start = model.config.buffer_size
    model.encoder_pos_embed_learned[0, start:] = 0.5 * both
    model.decoder_pos_embed_learned[0, start:] = both
    model.diffusion_pos_embed_learned[0] = 0.3 * both


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_options(parser)
    parser.add_argument(
        "--arch", default="mar_digits32", choices=MARS, help="the model's size; --size decides its image size"
    )
    parser.add_argument("--steps", type=int, default=5000, help="of the whole model")
    parser.add_argument("--head-steps", type=int, default=800, help="of the head alone, afterwards")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rows", type=int, default=6144, help="the head's rows per step")
    parser.add_argument("--images", type=int, default=40000, help="augmented images, encoded once")
    parser.add_argument("--mask-ratio-min", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--init", type=Path, help="a file of this program, of the same --arch, to start from")
    parser.add_argument("--vae", type=Path, required=True, help="file of the autoencoder, see train_vae.py")
    parser.add_argument("--latents", type=Path, help="file of the encoded images (default: in --run)")
    parser.add_argument(
        "--run", type=Path, help="directory of the run; an interrupted run resumes (default: runs/ARCH)"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.rows < 2:
        parser.error(f"--rows {args.rows}: expected at least 2, at timestep 999 and at another one")
    args.run = args.run or Path("runs") / args.arch
    args.latents = args.latents or args.run / "latents.safetensors"
    return args


def new_model(args: argparse.Namespace, vae: AutoencoderKL, num_classes: int, settings: dict) -> MAR:
    """A model to train, with random weights or those of --init, which `settings` records."""
    latent = {"vae_stride": vae.config.stride, "vae_embed_dim": vae.config.embed_dim, "patch_size": 1}
    sizes = latent | {"img_size": args.size, "class_num": num_classes}
    model = MAR(dataclasses.replace(mar_spec(args.arch).config, **sizes))
    if args.init is None:
        first_step.prepare(model.head)
        initialise_positions(model)
    else:
        go_on_with(model, args.init, settings)
    first_step.keep(model.head)
    return model


def loss_of_whole(guessing: Guessing, batches: Batches, rows: int) -> Loss:
    """The `loss_fn` of the first stage."""

    def loss_fn(number: int) -> tuple[Tensor, dict[str, float]]:
        batch = batches(number)
        with torch.autocast(batches.device.type, torch.bfloat16):
            x0, mean, z = conditions(guessing.model, batch)
            guess = guessing.guess(z).float()
        head, picked = guessing.model.head, some(rows, batch, x0, z)
        loss, shown = head_loss(head, *picked, batch.generator, FIRST_STEP_WEIGHT["whole"])
        missed = F.mse_loss(guess, mean)
        return loss + missed, shown | {"guess": round(missed.item(), 4)}

    return loss_fn


def loss_of_head(model: MAR, batches: Batches, rows: int) -> Loss:
    """The `loss_fn` of the second stage."""

    def loss_fn(number: int) -> tuple[Tensor, dict[str, float]]:
        batch = batches(10**6 + number)
        with torch.no_grad(), torch.autocast(batches.device.type, torch.bfloat16):
            x0, _, z = conditions(model, batch)
        return head_loss(model.head, *some(rows, batch, x0, z), batch.generator, FIRST_STEP_WEIGHT["head"])

    return loss_fn


def samples(model: MAR, vae: AutoencoderKL, num_classes: int, device: torch.device) -> Tensor:
    """Images [SHOWN, 3, H, W], cycling through classes, with few steps."""
    models = cspd.MARModels(copy.deepcopy(model), vae=vae)  # an engine freezes its weights
    engine = cspd.Engine(models, max_batch=SHOWN, device=device)
    quick = {"num_iter": 16, "num_sampling_steps": 25}
    requests = [cspd.Request(i % num_classes, seed=i, method="ar", settings=quick) for i in range(SHOWN)]
    return torch.stack([output.image for output in engine.generate(requests) if output.image is not None])


def main() -> None:
    args = arguments()
    device = device_of_process()
    source = data_of(args)
    vae = load_vae(args.vae, sizes=described(args.vae.parent).sizes.get("vae"))
    num_classes = len(source.classes)
    drawn = chosen(args, *DATA_OPTIONS, "images") | {"vae": file_fingerprint(args.vae)}
    settings = drawn | chosen(args, "arch", "steps", "batch", "rows", "mask_ratio_min", "lr")
    data = latents(encoder(vae, device), source, args.images, device, args.latents, drawn)
    batches = Batches(data, args.batch, args.mask_ratio_min, device)

    torch.manual_seed(0)
    model = new_model(args, vae, num_classes, settings)
    guessing = Guessing(model, model.config.embed_dim).to(device).train()
    guessing, seconds = fit(
        guessing,
        loss_of_whole(guessing, batches, args.rows),
        run=args.run / "whole",
        settings=settings,
        steps=args.steps,
        lr=args.lr,
        hidden=in_the_transformer,
        show=lambda averaged: samples(averaged.model, vae, num_classes, device),
    )
    model = guessing.model
    if args.head_steps:
        first_step.keep(model.head)  # the averaged model is a copy without hooks
        average, head_seconds = fit(
            model.head,
            loss_of_head(model, batches, args.rows),
            run=args.run / "head",
            settings=settings | {"head_steps": args.head_steps},
            steps=args.head_steps,
            lr=args.lr / 3,
        )
        model.head.load_state_dict(average.state_dict())
        seconds += head_seconds
    first_step.finish(model.head)
    export(model, args.out, args.arch, seconds, half=may_be_half)


def may_be_half(name: str) -> bool:
    """Whether a tensor is stored in float16: not if the first denoising step multiplies its rounding error by 316."""
    if not name.startswith("diffloss."):
        return True
    return not name.endswith("bias") and not any(part in name for part in HEAD_IN_FLOAT32)


if __name__ == "__main__":
    run_main(main)
