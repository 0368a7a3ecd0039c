"""Trains the classifier that evaluates bundled models, on real images: python scripts/train/train_classifier.py

Each image is blended with another one of its batch, and so are their labels (mixup, Zhang et al. 2018).
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np
import torch
from pictures import DATA_OPTIONS, Data, add_data_options, data_of
from torch import Tensor
from torch.nn import functional as F
from training import HELD_OUT_SEED, Loss, chosen, device_of_process, export, fit, is_first, run_main

from cspd.evaluation.metrics import CLASSIFIERS, Classifier, accuracy

MIXED = 0.2  # parameter of the beta distribution of the weights in a blend


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_options(parser)
    parser.add_argument("--arch", default="digits32", choices=CLASSIFIERS)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.02)
    parser.add_argument(
        "--run", type=Path, default=Path("runs/classifier"), help="directory of the run; an interrupted run resumes"
    )
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def loss_of(model: Classifier, data: Data, batch: int, device: torch.device) -> Loss:
    """The `loss_fn` of `fit`: cross-entropy of blended images, weighted by the share of each label."""

    def loss_fn(number: int) -> tuple[Tensor, dict[str, float]]:
        images, labels = (part.to(device) for part in data.draw(batch, number, "train"))
        share = np.random.default_rng(number).beta(MIXED, MIXED)  # mostly near 0 or near 1
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(torch.lerp(images, images.roll(1, 0), share)).float()
        own = F.cross_entropy(logits, labels, label_smoothing=0.05)
        other = F.cross_entropy(logits, labels.roll(1), label_smoothing=0.05)
        loss = torch.lerp(own, other, share)
        likelier = labels if share < 0.5 else labels.roll(1)
        recognised = (logits.argmax(1) == likelier).float().mean().item()
        return loss, {"loss": round(loss.item(), 3), "recognised": round(recognised, 3)}

    return loss_fn


def report(model: Classifier, data: Data) -> None:
    """Prints the accuracy on held-out images, over all classes and for each class."""
    images, labels = data.draw(4000, HELD_OUT_SEED, "held-out")
    print(f"held-out accuracy {accuracy(model, (images + 1) / 2, labels):.4f}")
    for label, name in enumerate(data.classes):
        own = labels == label
        print(f"  {name}: {accuracy(model, (images[own] + 1) / 2, labels[own]):.3f}")


def main() -> None:
    args = arguments()
    settings = chosen(args, *DATA_OPTIONS, "arch", "steps", "batch", "lr", "weight_decay")
    data = data_of(args)
    device = device_of_process()
    torch.manual_seed(0)
    sizes = {"size": args.size, "classes": len(data.classes)}
    model = Classifier(dataclasses.replace(CLASSIFIERS[args.arch], **sizes)).to(device).train()
    how = {"run": args.run, "settings": settings, "steps": args.steps, "lr": args.lr, "weight_decay": args.weight_decay}
    # batch statistics are not averaged, so the last weights are used; the decay of the learning rate settled them
    model, seconds = fit(model, loss_of(model, data, args.batch, device), ema_decay=0.0, **how)
    model = model.cpu().eval()
    if is_first():
        report(model, data)
    export(model, args.out, f"{args.arch}_classifier", seconds, half=lambda name: name.endswith(("weight", "bias")))


if __name__ == "__main__":
    run_main(main)
