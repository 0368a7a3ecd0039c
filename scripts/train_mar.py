"""Trains a MAR on the latents of coloured digits, or of a folder of images: python scripts/train_mar.py --data FOLDER

Two stages: the whole model, then the head alone on conditions z of the averaged backbone. In both, a share of the
head's rows is at timestep 999 with extra weight: there sampling multiplies the head's error by 316, and uniform
timesteps visit it once in a thousand.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from pathlib import Path

import first_step
import torch
from latents import Batch, Batches, latents
from pictures import add_data_options, data_of
from torch import Tensor
from training import device_of_process, export, fit, go_on_with

import cspd
from cspd.ran import file_fingerprint
from mar.checkpoint import load_vae
from mar.diffusion import TRAIN_STEPS, training_loss
from mar.head import Head
from mar.model import MAR
from mar.registry import MARS, mar_spec

LABEL_DROP = 0.1
SHOWN = 24  # images, drawn as it goes
FIRST_STEP_SHARE = 0.15  # of the head's rows, at timestep 999
FIRST_STEP_WEIGHT = {"whole": 20.0, "head": 1000.0}  # their error is multiplied by 316 when sampling
HEAD_IN_FLOAT32 = ("input_proj", "in_ln", "final_layer.linear")  # what x_t passes; elsewhere rounding costs 1e-5 of it


def head_loss(
    head: Head, x0: Tensor, z: Tensor, generator: torch.Generator, weight: float
) -> tuple[Tensor, dict[str, float]]:
    """The diffusion loss over rows x0 [N, d], z [N, D], the first share of them at timestep 999."""
    rows = len(x0)
    first = int(rows * FIRST_STEP_SHARE)
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


def masked_rows(model: MAR, batch: Batch, num_rows: int) -> tuple[Tensor, Tensor]:
    """Clean tokens [num_rows, d] and conditions [num_rows, D] of masked positions of a batch."""
    tokens, order, num_known, labels, generator = batch
    drop = torch.rand(len(labels), 1, generator=generator) < LABEL_DROP
    embedding = torch.where(drop.to(labels.device), model.fake_latent, model.class_emb(labels))
    z = model(tokens, order, [num_known] * len(tokens), embedding)
    masked = order[:, num_known:].unsqueeze(-1)
    x0 = tokens.gather(1, masked.expand(-1, -1, tokens.shape[-1])).flatten(0, 1)
    z = z.gather(1, masked.expand(-1, -1, z.shape[-1])).flatten(0, 1)
    picked = torch.randint(len(x0), (num_rows,), generator=generator).to(labels.device)
    return x0[picked], z[picked]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_options(parser)
    parser.add_argument("--arch", default="mar_digits32", choices=MARS, help="its size of images gives way to --size")
    parser.add_argument("--steps", type=int, default=5000, help="of the whole model")
    parser.add_argument("--head-steps", type=int, default=800, help="of the head alone, afterwards")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rows", type=int, default=6144, help="the head's rows in a step")
    parser.add_argument("--images", type=int, default=40000, help="drawn once, encoded, and kept in memory")
    parser.add_argument("--mask-ratio-min", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--init", type=Path, help="a file of the same arch, of this program, whose weights are gone on with"
    )
    parser.add_argument("--vae", type=Path, default=Path("checkpoints/digits32/vae.safetensors"))
    parser.add_argument("--latents", type=Path, help="where encoded images are kept (default: in --run)")
    parser.add_argument("--run", type=Path, help="resumes from here if it was cut off (default: runs/ARCH)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    run = args.run or Path("runs") / args.arch

    drawn = {name: getattr(args, name) for name in ("data", "size", "upright", "images")} | {
        "vae": file_fingerprint(args.vae)
    }
    names = ("arch", "steps", "batch", "rows", "mask_ratio_min", "lr")
    settings = drawn | {name: getattr(args, name) for name in names}
    device = device_of_process()
    source = data_of(args)
    vae = load_vae(args.vae)
    data = latents(vae, source, args.images, device, args.latents or run / "latents.safetensors", drawn)
    batches = Batches(data, args.batch, args.mask_ratio_min, device)
    torch.manual_seed(0)
    sizes = {"img_size": args.size, "vae_stride": vae.config.stride, "class_num": len(source.classes)}
    model = MAR(dataclasses.replace(mar_spec(args.arch).config, **sizes))
    if args.init is None:
        first_step.prepare(model.head)
    else:
        go_on_with(model, args.init, settings)
    first_step.keep(model.head)
    model.to(device).train()

    def whole(number: int) -> tuple[Tensor, dict[str, float]]:
        batch = batches(number)
        with torch.autocast(device.type, torch.bfloat16):
            x0, z = masked_rows(model, batch, args.rows)
        return head_loss(model.head, x0, z.float(), batch.generator, FIRST_STEP_WEIGHT["whole"])

    def show(averaged: MAR) -> Tensor:
        models = cspd.MARModels(copy.deepcopy(averaged), vae=vae)  # an engine makes its weights constants
        engine = cspd.Engine(models, max_batch=SHOWN, device=device)
        labels = [i % len(source.classes) for i in range(SHOWN)]
        quick = {"num_iter": 16, "num_sampling_steps": 25}
        requests = [cspd.Request(label, seed=i, method="ar", settings=quick) for i, label in enumerate(labels)]
        return torch.stack([output.image for output in engine.generate(requests) if output.image is not None])

    model, seconds = fit(model, whole, run=run / "whole", settings=settings, steps=args.steps, lr=args.lr, show=show)

    def head_alone(number: int) -> tuple[Tensor, dict[str, float]]:
        batch = batches(10**6 + number)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            x0, z = masked_rows(model, batch, args.rows)
        return head_loss(head, x0, z.float(), batch.generator, FIRST_STEP_WEIGHT["head"])

    head = model.head
    if args.head_steps:
        first_step.keep(head)  # an average is a copy without hooks
        average, head_seconds = fit(
            head,
            head_alone,
            run=run / "head",
            settings=settings | {"head_steps": args.head_steps},
            steps=args.head_steps,
            lr=args.lr / 3,
        )
        head.load_state_dict(average.state_dict())
        seconds += head_seconds
    first_step.finish(model.head)
    export(model, args.out, args.arch, seconds, half=may_be_half)


def may_be_half(name: str) -> bool:
    """Whether a tensor is stored in float16: not where the head's first step multiplies its rounding by 316."""
    if not name.startswith("diffloss."):
        return True
    return not name.endswith("bias") and not any(part in name for part in HEAD_IN_FLOAT32)


if __name__ == "__main__":
    main()
