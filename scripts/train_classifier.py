"""Trains the classifier that judges the embedded models on real coloured digits: python scripts/train_classifier.py"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from digits import coloured_digits
from torch import Tensor
from torch.nn import functional as F
from training import HELD_OUT_SEED, export, fit

from cspd.evaluation.classifier import DigitClassifier, accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--run", type=Path, default=Path("runs/classifier"), help="resumes from here if it was cut off")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/digits32/classifier.safetensors"))
    args = parser.parse_args()

    settings = {name: getattr(args, name) for name in ("steps", "batch", "lr")}
    torch.manual_seed(0)
    model = DigitClassifier().train()

    def loss_fn(step: int) -> tuple[Tensor, dict[str, float]]:
        images, labels = coloured_digits(args.batch, seed=step)
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.05)
        return loss, {"loss": round(loss.item(), 3)}

    # batch statistics are not averaged: take the last weights, which the learning rate's decay has settled
    model, seconds = fit(model, loss_fn, run=args.run, settings=settings, steps=args.steps, lr=args.lr, ema_decay=0.0)
    images, labels = coloured_digits(4000, seed=HELD_OUT_SEED, split="held-out")
    print(f"held-out accuracy {accuracy(model, (images + 1) / 2, labels):.4f}")
    export(model, args.out, "digit_classifier", seconds)


if __name__ == "__main__":
    main()
