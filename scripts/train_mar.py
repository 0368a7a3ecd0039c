"""Trains an embedded MAR on the latents of coloured digits: python scripts/train_mar.py --arch mar_digits32

Two stages: the whole model, then the head alone on conditions z of the averaged backbone. In both, a share of the
head's rows is at timestep 999 with extra weight: there sampling multiplies the head's error by 316, and uniform
timesteps visit it once in a thousand.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from digits import coloured_digits
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import trange
from training import export, fit

from mar.diffusion import TRAIN_STEPS, training_loss
from mar.head import Head
from mar.model import MAR
from mar.registry import MARS, create_mar, create_vae

LABEL_DROP = 0.1
FIRST_STEP_SHARE = 0.15  # of the head's rows, at timestep 999
FIRST_STEP_WEIGHT = {"whole": 20.0, "head": 1000.0}  # their error is multiplied by 316 when sampling


def near_identity(head: Head) -> None:
    """Starts the head at eps = x_t, which is right at high noise, instead of 0.

    A LayerNorm divides by |h|, so a head whose stream h is a multiple of x_t cannot tell how large x_t is. Here a much
    larger constant is added to x_t, which makes every LayerNorm almost linear. The blocks see x_t alone, at unit
    variance.
    """
    width, channels, amplitude = head.width, head.channels, 0.25
    # orthogonal directions without a mean, which a LayerNorm would take away: one per channel, and the constant's
    directions = torch.cat([torch.ones(width, 1), torch.randn(width, channels + 1)], dim=1)
    basis = torch.linalg.qr(directions).Q[:, 1:]
    constant = basis[:, channels] * width**0.5
    gain = (width / channels) ** 0.5 / amplitude
    with torch.no_grad():
        head.input_proj.weight.copy_(amplitude * basis[:, :channels])
        head.input_proj.bias.copy_(constant)
        for block in head.res_blocks:
            block.in_ln.weight.fill_(gain)
            block.in_ln.bias.copy_(-gain * constant)
        head.final_layer.linear.weight[:channels].copy_(basis[:, :channels].T / amplitude)


def latents(vae_file: Path, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Posterior means and standard deviations [num, 64, 16] of `num` training images, and labels."""
    vae = create_vae("kl_digits32")
    vae.load_state_dict(load_file(vae_file))
    vae.eval()
    means, stds, labels = [], [], []
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for i in trange(0, num, 500, desc="latents"):
            images, label = coloured_digits(500, seed=10**6 + i)
            mean, logvar = vae.encode(images)
            means.append(mean.float() * vae.config.scale)
            stds.append((0.5 * logvar.float()).exp() * vae.config.scale)
            labels.append(label)

    def tokens(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts).flatten(2).transpose(1, 2).contiguous().clone()

    return tokens(means), tokens(stds), torch.cat(labels)


class Batch(NamedTuple):
    """What the whole model is trained on in one step; all images know equally many tokens, as MAR trains.

    Attributes:
        tokens: [B, L, d]. order: int64 [B, L]. num_known: of the tokens. labels: int64 [B].
        generator: for all other draws of the step.
    """

    tokens: Tensor
    order: Tensor
    num_known: int
    labels: Tensor
    generator: torch.Generator


class Batches:
    """The training data; maps a step's number to its batch."""

    def __init__(self, data: tuple[Tensor, Tensor, Tensor], batch: int, mask_ratio_min: float) -> None:
        self.means, self.stds, self.labels = data
        self.batch, self.mask_ratio_min = batch, mask_ratio_min

    def __call__(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        index = torch.randint(len(self.labels), (self.batch,), generator=generator)
        means = self.means[index]
        tokens = means + self.stds[index] * torch.randn(means.shape, generator=generator)
        length = means.shape[1]
        order = torch.rand(self.batch, length, generator=generator).argsort(dim=1)
        uniform = torch.rand((), generator=generator).item()
        mask_ratio = 1 - (1 - self.mask_ratio_min) * uniform**1.5
        num_masked = max(1, round(length * mask_ratio))
        return Batch(tokens, order, length - num_masked, self.labels[index], generator)


def head_loss(
    head: Head, x0: Tensor, z: Tensor, generator: torch.Generator, weight: float
) -> tuple[Tensor, dict[str, float]]:
    """The diffusion loss over rows x0 [N, d], z [N, D], the first share of them at timestep 999."""
    rows = len(x0)
    first = int(rows * FIRST_STEP_SHARE)
    t = torch.randint(TRAIN_STEPS, (rows,), generator=generator)
    t[:first] = TRAIN_STEPS - 1
    mse, vb = training_loss(head, x0, z, t, torch.randn(x0.shape, generator=generator))
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
    embedding = torch.where(drop, model.fake_latent, model.class_emb(labels))
    z = model(tokens, order, [num_known] * len(tokens), embedding)
    masked = order[:, num_known:].unsqueeze(-1)
    x0 = tokens.gather(1, masked.expand(-1, -1, tokens.shape[-1])).flatten(0, 1)
    z = z.gather(1, masked.expand(-1, -1, z.shape[-1])).flatten(0, 1)
    picked = torch.randint(len(x0), (num_rows,), generator=generator)
    return x0[picked], z[picked]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="mar_digits32", choices=[name for name in MARS if "digits" in name])
    parser.add_argument("--steps", type=int, default=5000, help="of the whole model")
    parser.add_argument("--head-steps", type=int, default=800, help="of the head alone, afterwards")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rows", type=int, default=6144, help="the head's rows in a step")
    parser.add_argument("--images", type=int, default=40000, help="drawn once, encoded, and kept in memory")
    parser.add_argument("--mask-ratio-min", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--vae", type=Path, default=Path("checkpoints/digits32/vae.safetensors"))
    parser.add_argument("--run", type=Path, help="resumes from here if it was cut off (default: runs/ARCH)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    run = args.run or Path("runs") / args.arch

    names = ("arch", "steps", "batch", "rows", "images", "mask_ratio_min", "lr")
    settings = {name: getattr(args, name) for name in names}
    data = latents(args.vae, args.images)
    batches = Batches(data, args.batch, args.mask_ratio_min)
    torch.manual_seed(0)
    model = create_mar(args.arch).train()
    near_identity(model.head)

    def whole(step: int) -> tuple[Tensor, dict[str, float]]:
        batch = batches(step)
        with torch.autocast("cpu", torch.bfloat16):
            x0, z = masked_rows(model, batch, args.rows)
            return head_loss(model.head, x0, z, batch.generator, FIRST_STEP_WEIGHT["whole"])

    model, seconds = fit(model, whole, run=run / "whole", settings=settings, steps=args.steps, lr=args.lr)

    def head_alone(step: int) -> tuple[Tensor, dict[str, float]]:
        batch = batches(10**6 + step)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            x0, z = masked_rows(model, batch, args.rows)
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            return head_loss(head, x0, z.float(), batch.generator, FIRST_STEP_WEIGHT["head"])

    head: nn.Module = model.head
    if args.head_steps:
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
    # the head's first step multiplies rounding by 316: it stays in float32
    export(model, args.out, args.arch, seconds, half=lambda name: not name.startswith("diffloss."))


if __name__ == "__main__":
    main()
