"""Trains EAGLE's drafter for a LlamaGen: python scripts/train_eagle.py --checkpoint c2i_L_256.pt --self-samples 10000

The target may be any of classes that `cspd sample --checkpoint` takes. What it makes is learnt from codes that it
samples itself, which takes no data, or from images in class-named folders (--data). They are made once and kept in
--codes.

Regression onto the target's next feature and cross-entropy with the target's own distribution (EAGLE, section 4.2), a
tenth of the labels replaced by the null class so that guidance can be drafted too. The file that it writes is given to
`cspd sample --eagle FILE`, or put beside the target as eagle.safetensors.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from pathlib import Path

import torch
from codes import Codes, kept, of_images, of_target
from drafted import acceptance_by_depth, estimates
from pictures import add_data_options, data_of
from torch import Tensor
from torch.nn import functional as F
from train_gpt import LABEL_DROP
from training import HELD_OUT_SEED, device_of_process, export, fit, is_first

import cspd
from cspd.loading import checkpoint_files
from cspd.vq.eagle import Eagle
from cspd.vq.gpt import GPT
from cspd.vq.registry import defaults_of
from cspd.vq.tokenizer import VQModel
from mar.checkpoint import named_size

CLASSIFICATION = 0.1  # weight of the cross-entropy, as published
NOISE = 0.1  # uniform, on the features that are read: at inference they are predicted ones
WIDTH_LR = 0.192  # the default learning rate times the width
FIRST_SEED = 10**6  # of what is trained on
HELD_OUT = 256  # images, a tenth of those that are trained on at most
DEPTHS = 6  # that are measured, as far as EAGLE-2's tree goes
MEASURED, MEASURED_LAST = 8, 64  # images as it goes, and at the end
LLAMAGEN = {"steps": 20000, "batch": 16, "samples": 10000, "max_batch": 32}  # what the estimates are for
ESTIMATES = """\
On one GPU, by formula and not from any run (weights, moments, caches and logits in memory; 40 TFLOP/s, 1 TB/s):
{samples} images sampled {max_batch} at a time, and {steps} steps of {batch}.

{table}
"""


def predict(
    target: GPT, drafter: Eagle, data: Codes, noise: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(predicted, true) features [B, L, dim]; as in drafting, nothing comes before the class."""
    position = torch.arange(data.codes.shape[1], device=data.codes.device).unsqueeze(0)
    with torch.no_grad():
        inputs = target.embed(data.labels, data.codes[:, :-1])
        features = target.features(inputs, position)
    past = features[:, :-1]
    uniform = torch.rand(past.shape, generator=generator).to(past.device)
    past = past + noise * (2 * uniform - 1)
    past = torch.cat([torch.zeros_like(past[:, :1]), past], dim=1)
    return drafter(past, inputs, target.table(position)), features


def loss_of(target: GPT, drafter: Eagle, data: Codes, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
    """EAGLE's loss on a batch, and the numbers to show."""
    with torch.autocast(data.codes.device.type, torch.bfloat16):
        predicted, features = predict(target, drafter, data, NOISE, generator)
        wanted = target.output(features).float().softmax(-1)
        logits = target.output(predicted).float()
    regression = F.smooth_l1_loss(predicted.float(), features.float())
    entropy = -(wanted * logits.log_softmax(-1)).sum(-1).mean()
    overlap = torch.minimum(wanted, logits.softmax(-1)).sum(-1).mean()
    shown = {"l1": round(regression.item(), 4), "accepted": round(overlap.item(), 3)}
    return regression + CLASSIFICATION * entropy, shown


def arguments() -> argparse.Namespace:
    table = estimates(**LLAMAGEN)
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=ESTIMATES.format(table=table, **LLAMAGEN),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", default="digits32_vq", help="the target: a name, folder or file")
    parser.add_argument("--arch", help="its size (default: found out from the file)")
    parser.add_argument("--tokenizer", type=Path, help="its tokenizer's file, where not beside it")
    add_data_options(parser)
    parser.set_defaults(data=None, size=None)
    parser.add_argument(
        "--images", type=int, default=20000, help="drawn from --data, augmented, and encoded (default: %(default)s)"
    )
    parser.add_argument("--self-samples", type=int, metavar="N", help="train on N images of the target's own, no data")
    parser.add_argument("--cfg", type=float, help="guidance of its own samples (default: as published with the target)")
    parser.add_argument(
        "--max-batch", type=int, default=LLAMAGEN["max_batch"], help="images sampled at once (default: %(default)s)"
    )
    parser.add_argument("--codes", type=Path, help="folder where codes are kept (default: in --run)")
    parser.add_argument("--steps", type=int, default=1500, help="(default: %(default)s; of a LlamaGen 20000)")
    parser.add_argument("--batch", type=int, default=32, help="images per step and process (default: %(default)s)")
    parser.add_argument("--lr", type=float, help=f"learning rate (default: {WIDTH_LR:g} / the target's width)")
    parser.add_argument("--run", type=Path, default=Path("runs/eagle"), help="resumes from here if it was cut off")
    parser.add_argument("--out", type=Path, required=True, help="the drafter's file")
    args = parser.parse_args()
    if bool(args.self_samples) == bool(args.data):
        parser.error("give either --self-samples N or --data, a folder or 'digits'")
    if min(args.self_samples or args.images, args.steps, args.batch, args.max_batch) < 1:
        parser.error("--images, --self-samples, --steps, --batch and --max-batch: give whole numbers above 0")
    return args


def models_of(args: argparse.Namespace, device: torch.device) -> tuple[GPT, VQModel]:
    """The target, at the resolution of --size where that is given, and its tokenizer.

    Raises:
        ValueError: it is a MAR, or makes images of texts.
    """
    engine = cspd.load(args.checkpoint, arch=args.arch, vae=args.tokenizer, max_batch=1, device=device)
    if engine.host.family != "VQ":
        raise ValueError(f"--checkpoint {args.checkpoint} is a MAR: EAGLE drafts the codes of VQ models")
    target, tokenizer = engine.host.target, engine.host.models["tokenizer"]
    if not target.config.num_classes:
        raise ValueError(
            f"--checkpoint {args.checkpoint} makes images of texts: only targets of classes are trained on"
        )
    stride = tokenizer.config.stride
    args.size = args.size or target.config.grid * stride
    target.config = dataclasses.replace(target.config, block_size=(args.size // stride) ** 2)
    return target, tokenizer


def codes_of(args: argparse.Namespace, target: GPT, tokenizer: VQModel, device: torch.device) -> tuple[Codes, Codes]:
    """What is trained on, and what is held out.

    Raises:
        ValueError: the data set has other classes than the target, or as `kept`.
    """
    num = args.self_samples or args.images
    file = checkpoint_files(args.checkpoint)["target"]
    made_with = {"target": file.name, "bytes": file.stat().st_size, "size": args.size}
    if args.self_samples:
        made_with |= {"cfg": args.cfg}
        train = of_target(target, args.cfg, args.max_batch, FIRST_SEED, device)
        held_out = of_target(target, args.cfg, args.max_batch, HELD_OUT_SEED, device)
    else:
        data = data_of(args)
        if len(data.classes) != target.config.num_classes:
            raise ValueError(
                f"--data {args.data} has {len(data.classes)} classes and the target {target.config.num_classes}:"
                " give a folder of as many, or --self-samples"
            )
        made_with |= {"data": args.data, "upright": args.upright}
        train = of_images(data, "train", tokenizer, FIRST_SEED, device)
        held_out = of_images(data, "held-out", tokenizer, HELD_OUT_SEED, device)
    folder = args.codes or args.run / "codes"
    num_held_out = min(HELD_OUT, -(-num // 10))
    return (
        kept(train, num, folder / "train", made_with, device),
        kept(held_out, num_held_out, folder / "held_out", made_with, device),
    )


def main() -> None:
    args = arguments()
    device = device_of_process()
    target, tokenizer = models_of(args, device)
    scale = defaults_of(target.config).cfg
    args.cfg = scale if args.cfg is None else args.cfg
    train, held_out = codes_of(args, target, tokenizer, device)
    config = target.config
    lr = args.lr or WIDTH_LR / config.dim
    names = ("checkpoint", "data", "size", "upright", "images", "self_samples", "cfg", "steps", "batch")
    settings = {name: getattr(args, name) for name in names} | {"lr": lr}
    torch.manual_seed(0)
    drafter = Eagle(config).to(device).train()

    def loss_fn(number: int) -> tuple[Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(number)
        codes, labels = train.at(torch.randint(len(train.labels), (args.batch,), generator=generator))
        drop = torch.rand(len(labels), generator=generator) < LABEL_DROP
        labels = torch.where(drop, config.num_classes, labels)
        return loss_of(target, drafter, Codes(codes.to(device), labels.to(device)), generator)

    def accepted(model: Eagle, num: int) -> list[float]:
        return acceptance_by_depth(target, model, held_out.at(slice(num)), scale, min(DEPTHS, config.block_size))

    def measure(model: Eagle) -> dict[str, float]:
        return {f"depth {depth}": share for depth, share in enumerate(accepted(model, MEASURED), 1)}

    drafter, seconds = fit(drafter, loss_fn, run=args.run, settings=settings, steps=args.steps, lr=lr, measure=measure)
    if is_first():
        shares = accepted(drafter.half().float(), MEASURED_LAST)  # as stored
        print(f"held-out, guidance {scale:g}: of codes drafted 1, 2, ... ahead are accepted, given those before them,")
        print(", ".join(f"{share:.3f}" for share in shares))
        print(f"a chain of them: {1 + sum(itertools.accumulate(shares, float.__mul__)):.2f} codes per forward")
    export(drafter, args.out, named_size(target) or "", seconds, half=lambda name: True)


if __name__ == "__main__":
    main()
