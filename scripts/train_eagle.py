"""Trains EAGLE's drafter on an embedded GPT: python scripts/train_eagle.py

Regression onto the target's next feature and cross-entropy with the target's own distribution (EAGLE, section 4.2),
on the codes of coloured digits or of a folder of images, a tenth of the labels replaced by the null class so that
guidance can be drafted too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from pictures import add_data_options, data_of
from torch import Tensor
from torch.nn import functional as F
from train_gpt import LABEL_DROP
from training import HELD_OUT_SEED, device_of_process, export, fit

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
    position = torch.arange(codes.shape[1], device=codes.device).unsqueeze(0)
    with torch.no_grad():
        inputs = target.embed(labels, codes[:, :-1])
        features = target.features(inputs, position)
    past = features[:, :-1]
    uniform = torch.rand(past.shape, generator=generator).to(past.device)
    past = past + noise * (2 * uniform - 1)
    past = torch.cat([torch.zeros_like(past[:, :1]), past], dim=1)
    return drafter(past, inputs, target.table(position)), features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_options(parser)
    parser.add_argument("--target", type=Path, default=Path("checkpoints/digits32_vq/target.safetensors"))
    parser.add_argument("--arch", default="gpt_digits32", help="the target's")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tokenizer", type=Path, default=Path("checkpoints/digits32_vq/tokenizer.safetensors"))
    parser.add_argument("--run", type=Path, default=Path("runs/eagle"), help="resumes from here if it was cut off")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/digits32_vq/eagle.safetensors"))
    args = parser.parse_args()

    names = ("data", "size", "upright", "arch", "steps", "batch", "lr")
    settings = {name: getattr(args, name) for name in names}
    data = data_of(args)
    device = device_of_process()
    tokenizer = load_tokenizer(args.tokenizer).to(device)
    target = load_gpt(args.target, args.arch).to(device)
    torch.manual_seed(0)
    drafter = create_eagle(args.arch).to(device).train()

    def loss_fn(number: int) -> tuple[Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(number)
        images, labels = (part.to(device) for part in data.draw(args.batch, number, "train"))
        with torch.no_grad():
            codes = tokenizer.encode(images)
        drop = torch.rand(len(labels), generator=generator).to(device) < LABEL_DROP
        labels = torch.where(drop, target.config.num_classes, labels)
        with torch.autocast(device.type, torch.bfloat16):
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
        drafter = drafter.cpu().half().float()  # as stored
        target, tokenizer = target.cpu(), tokenizer.cpu()
        images, labels = data.draw(256, HELD_OUT_SEED, "held-out")
        predicted, features = predict(target, drafter, labels, tokenizer.encode(images), 0.0, torch.Generator())
        wanted = target.output(features).softmax(-1)
        drafted = target.output(predicted).softmax(-1)
        accepted = torch.minimum(wanted, drafted).sum(-1).mean()
    print(f"held-out: {accepted:.3f} of drafts accepted at depth 1, without guidance")
    export(drafter, args.out, args.arch, seconds, half=lambda name: True)


if __name__ == "__main__":
    main()
