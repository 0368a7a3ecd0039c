"""Trains EAGLE's drafter on an embedded GPT: python scripts/train_eagle.py

Regression onto the target's next feature and cross-entropy with the target's own distribution (EAGLE, section 4.2),
on the codes of coloured digits, a tenth of the labels replaced by the null class so that guidance can be drafted too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from digits import coloured_digits
from torch import Tensor
from torch.nn import functional as F
from train_gpt import LABEL_DROP
from training import HELD_OUT_SEED, export, fit

from cspd.vq.checkpoint import load_gpt, load_tokenizer
from cspd.vq.eagle import Eagle
from cspd.vq.gpt import GPT
from cspd.vq.registry import create_eagle

CLASSIFICATION = 0.1  # weight of the cross-entropy, as published
NOISE = 0.1  # uniform, on the features that are read: at inference they are predicted ones


def predict(
    target: GPT, drafter: Eagle, labels: Tensor, codes: Tensor, noise: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(predicted, true) features [B, L, dim]; as in drafting, nothing comes before the class."""
    position = torch.arange(codes.shape[1]).unsqueeze(0)
    with torch.no_grad():
        inputs = target.embed(labels, codes[:, :-1])
        features = target.features(inputs, position)
    past = features[:, :-1]
    past = past + noise * (2 * torch.rand(past.shape, generator=generator) - 1)
    past = torch.cat([torch.zeros_like(past[:, :1]), past], dim=1)
    return drafter(past, inputs, target.table(position)), features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("checkpoints/digits32_vq/target.safetensors"))
    parser.add_argument("--arch", default="gpt_digits32", help="the target's")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tokenizer", type=Path, default=Path("checkpoints/digits32_vq/tokenizer.safetensors"))
    parser.add_argument("--run", type=Path, default=Path("runs/eagle"), help="resumes from here if it was cut off")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/digits32_vq/eagle.safetensors"))
    args = parser.parse_args()

    settings = {name: getattr(args, name) for name in ("arch", "steps", "batch", "lr")}
    tokenizer = load_tokenizer(args.tokenizer)
    target = load_gpt(args.target, args.arch)
    torch.manual_seed(0)
    drafter = create_eagle(args.arch).train()

    def loss_fn(step: int) -> tuple[Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(step)
        images, labels = coloured_digits(args.batch, seed=step)
        with torch.no_grad():
            codes = tokenizer.encode(images)
        drop = torch.rand(len(labels), generator=generator) < LABEL_DROP
        labels = torch.where(drop, target.config.num_classes, labels)
        with torch.autocast("cpu", torch.bfloat16):
            predicted, features = predict(target, drafter, labels, codes, NOISE, generator)
            wanted = target.output(features).float().softmax(-1)
            logits = target.output(predicted).float()
        regression = F.smooth_l1_loss(predicted.float(), features.float())
        entropy = -(wanted * logits.log_softmax(-1)).sum(-1).mean()
        overlap = torch.minimum(wanted, logits.softmax(-1)).sum(-1).mean()
        shown = {"l1": round(regression.item(), 4), "accepted": round(overlap.item(), 3)}
        return regression + CLASSIFICATION * entropy, shown

    drafter, seconds = fit(drafter, loss_fn, run=args.run, settings=settings, steps=args.steps, lr=args.lr)
    with torch.inference_mode():
        drafter = drafter.half().float()  # as stored
        images, labels = coloured_digits(256, seed=HELD_OUT_SEED, split="held-out")
        predicted, features = predict(target, drafter, labels, tokenizer.encode(images), 0.0, torch.Generator())
        wanted = target.output(features).softmax(-1)
        drafted = target.output(predicted).softmax(-1)
        accepted = torch.minimum(wanted, drafted).sum(-1).mean()
    print(f"held-out: {accepted:.3f} of drafts accepted at depth 1, without guidance")
    export(drafter, args.out, args.arch, seconds, half=lambda name: True)


if __name__ == "__main__":
    main()
