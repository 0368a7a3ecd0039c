"""Trains a GPT on the tokens of coloured digits, or of a directory of images.

    python scripts/train/train_gpt.py --data FOLDER

The loss is the cross-entropy of all tokens of an image. As in LlamaGen, a tenth of the labels are replaced by the
unconditional branch.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from pictures import DATA_OPTIONS, Data, add_data_options, data_of
from torch import Tensor, nn
from torch.nn import functional as F
from training import HELD_OUT_SEED, Loss, chosen, device_of_process, export, fit, go_on_with, is_first, run_main

from cspd.discrete.gpt import GPT, VQModel
from cspd.discrete.registry import GPTS, gpt_spec, load_tokenizer
from cspd.origin import file_fingerprint

LABEL_DROP = 0.1
HELD_OUT = 512  # images
PART = 64  # images that are measured at a time


def cross_entropy(model: nn.Module, condition: Any, codes: Tensor) -> Tensor:
    """Nats per token of tokens [B, L], after classes or another condition that the model takes."""
    logits = model(condition, codes[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), codes.flatten())


def initialise(model: GPT) -> None:
    """Initialises a new model at random; at first all tokens are equally likely."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.0 if name == "output.weight" else 0.02)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_options(parser)
    of_classes = [name for name, spec in GPTS.items() if not spec.config.caption_dim]
    arch = {"default": "gpt_digits32", "choices": of_classes}
    parser.add_argument("--arch", **arch, help="the model's size; --size decides its number of tokens")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument(
        "--first-seed", type=int, default=0, help="of the data; a run that continues from --init needs another one"
    )
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="file of the images' tokenizer, see train_tokenizer.py"
    )
    parser.add_argument("--init", type=Path, help="a file of the same --arch to start from")
    parser.add_argument(
        "--run", type=Path, help="directory of the run; an interrupted run resumes (default: runs/ARCH)"
    )
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def loss_of(model: GPT, tokenizer: VQModel, data: Data, args: argparse.Namespace, device: torch.device) -> Loss:
    """The `loss_fn` of `fit`."""

    def loss_fn(number: int) -> tuple[Tensor, dict[str, float]]:
        seed = args.first_seed + number
        images, labels = (part.to(device) for part in data.draw(args.batch, seed, "train"))
        with torch.no_grad():
            codes = tokenizer.encode(images)
        generator = torch.Generator().manual_seed(seed)
        drop = torch.rand(len(labels), generator=generator).to(device) < LABEL_DROP
        labels = torch.where(drop, model.config.num_classes, labels)
        with torch.autocast(device.type, torch.bfloat16):
            loss = cross_entropy(model, labels, codes)
        return loss, {"bits": round(loss.item() / math.log(2), 3)}

    return loss_fn


@torch.inference_mode()
def held_out_bits(model: GPT, tokenizer: VQModel, data: Data) -> float:
    """Bits per token of held-out images."""
    images, labels = data.draw(HELD_OUT, HELD_OUT_SEED, "held-out")
    parts = [*zip(labels.split(PART), images.split(PART))]
    nats = sum(cross_entropy(model, label, tokenizer.encode(part)).item() for label, part in parts)
    return nats / len(parts) / math.log(2)


def main() -> None:
    args = arguments()
    data = data_of(args)
    device = device_of_process()
    tokenizer = load_tokenizer(args.tokenizer).to(device)
    settings = chosen(args, *DATA_OPTIONS, "arch", "steps", "batch", "lr", "first_seed") | {
        "tokenizer": file_fingerprint(args.tokenizer)
    }
    torch.manual_seed(0)
    side = args.size // tokenizer.config.stride
    sizes = {"block_size": side**2, "num_classes": len(data.classes), "vocab_size": tokenizer.config.codebook_size}
    model = GPT(dataclasses.replace(gpt_spec(args.arch).config, **sizes))
    initialise(model)
    if args.init is not None:
        go_on_with(model, args.init, settings)
    model.to(device).train()

    run = args.run or Path("runs") / args.arch
    loss_fn = loss_of(model, tokenizer, data, args, device)
    model, seconds = fit(model, loss_fn, run=run, settings=settings, steps=args.steps, lr=args.lr)
    model = model.cpu().half().float()  # as stored
    if is_first():
        print(f"held-out {held_out_bits(model, tokenizer.cpu(), data):.3f} bits per token")
    export(model, args.out, args.arch, seconds, half=lambda name: True)


if __name__ == "__main__":
    run_main(main)
