"""Trains EAGLE's drafter for a VQ model.

    python scripts/train/train_eagle.py --checkpoint c2i_L_256.pt --self-samples 10000

The target is any VQ model that `cspd sample --checkpoint` takes, class-conditional or text-to-image (--prompts FILE): a
LlamaGen, or the directory of a `transformers` model. The training data are samples of the target, which need no images,
or images (--data): in directories named by class, or for prompts in one directory, in the order of their names. Their
tokens are computed once and stored in --codes. Every tenth prompt is held out.

The loss is a regression onto the target's next feature, plus the cross-entropy with the target's distribution (EAGLE,
section 4.2). A tenth of the classes or prompts are replaced by the unconditional branch, so that guidance can be
drafted too. Use the file with `cspd sample --eagle FILE`, or put it next to the target as eagle.safetensors.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import torch
from codes import Codes, cached, of_images, of_target
from conditions import Inputs, features_of, identity, inputs_of, numbers_of
from drafted import acceptance_by_depth, estimates
from pictures import Data, add_data_options, captioned, data_of
from torch import Tensor
from torch.nn import functional as F
from train_gpt import LABEL_DROP
from training import FIRST_SEED, HELD_OUT_SEED, chosen, device_of_process, export, fit, is_first, run_main

import cspd
from cspd.checkpoints import checkpoint_files
from cspd.cli.options import read_prompts
from cspd.discrete.gpt import GPT, Eagle
from cspd.discrete.hf import HFEagle, is_hf
from cspd.discrete.registry import HFConfig, defaults_of
from cspd.discrete.runner import VQRunner
from cspd.evaluation.images import Subject, are_texts, asking_for, image_files
from cspd.files import weight_files
from cspd.origin import file_fingerprint, together

CLASSIFICATION = 0.1  # weight of the cross-entropy, as in the paper
NOISE = 0.1  # uniform, on the input features, which are predictions in drafting
WIDTH_LR = 0.192  # the default learning rate times the width
HELD_OUT = 256  # the most held-out images; at most a tenth of the training images
DEPTHS = 6  # the depths that are measured, as many as EAGLE-2's tree has
MEASURED, MEASURED_LAST = 8, 64  # images measured during training, and at the end
LLAMAGEN = {"steps": 20000, "batch": 16, "samples": 10000, "max_batch": 32}  # the settings of the estimates
ESTIMATES = """\
On one GPU, computed and not measured (memory: weights, moments, caches, logits; 40 TFLOP/s, 1 TB/s):
{samples} images sampled {max_batch} at a time, and {steps} steps of {batch}.

{table}
"""


def predict(
    target: GPT, drafter: Eagle, inputs: Inputs, noise: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Predicted and true features [B, L, dim] at the inputs that predict the L tokens."""
    features = features_of(target, inputs)
    past = features[:, :-1]
    uniform = torch.rand(past.shape, generator=generator).to(past.device)
    past = inputs.past(past + noise * (2 * uniform - 1))
    predicted = drafter(past, inputs.embedded, drafter.table(inputs.position), inputs.mask())
    return predicted[:, -inputs.length :], features[:, -inputs.length :]


def loss_of(target: GPT, drafter: Eagle, inputs: Inputs, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
    """EAGLE's loss on a batch, and numbers for the log."""
    with torch.autocast(inputs.embedded.device.type, torch.bfloat16):
        predicted, features = predict(target, drafter, inputs, NOISE, generator)
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
    parser.add_argument("--checkpoint", default="digits32_vq", help="the target: a name, directory or file")
    parser.add_argument("--arch", help="its size (default: found from the file)")
    parser.add_argument("--tokenizer", type=Path, help="its tokenizer, if not next to it")
    add_data_options(parser)
    parser.set_defaults(data=None, size=None)
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="prompts, for a text-to-image target (docs/text.md)"
    )
    parser.add_argument("--text-encoder", type=Path, metavar="FOLDER", help="its encoder, if not next to it")
    parser.add_argument(
        "--images", type=int, default=20000, help="augmented images of --data to encode (default: %(default)s)"
    )
    parser.add_argument("--self-samples", type=int, metavar="N", help="train on N samples of the target, without data")
    parser.add_argument("--cfg", type=float, help="guidance scale of the samples (default: the target's own)")
    parser.add_argument(
        "--max-batch", type=int, default=LLAMAGEN["max_batch"], help="images sampled at once (default: %(default)s)"
    )
    parser.add_argument("--codes", type=Path, help="directory of the tokens (default: in --run)")
    parser.add_argument("--steps", type=int, default=1500, help="(default: %(default)s; 20000 for a LlamaGen)")
    parser.add_argument("--batch", type=int, default=32, help="images per step and process (default: %(default)s)")
    parser.add_argument("--lr", type=float, help=f"learning rate (default: {WIDTH_LR:g} / the target's width)")
    parser.add_argument(
        "--run", type=Path, default=Path("runs/eagle"), help="directory of the run; an interrupted run resumes"
    )
    parser.add_argument("--out", type=Path, required=True, help="the drafter's file")
    args = parser.parse_args()
    if bool(args.self_samples) == bool(args.data):
        parser.error("pass either --self-samples N or --data, a directory or 'digits'")
    if args.prompts and args.upright:
        parser.error("--upright is for classes, and images with prompts are never mirrored: omit it")
    if min(args.self_samples or args.images, args.steps, args.batch, args.max_batch) < 1:
        parser.error("--images, --self-samples, --steps, --batch and --max-batch: pass integers above 0")
    return args


def loaded(args: argparse.Namespace, device: torch.device) -> tuple[VQRunner, list[Subject]]:
    """A model runner of the target, at the resolution of --size, and the classes or prompts to train with.

    Raises:
        ValueError: the target is not a VQ model, or does not take --size or --prompts.
    """
    texts = read_prompts(args.prompts, image_files(Path(args.data)) if args.data else ()) if args.prompts else None
    files = {"vae": args.tokenizer, "text_encoder": args.text_encoder}
    engine = cspd.load(args.checkpoint, arch=args.arch, **files, max_batch=1, device=device)
    runner = engine.runner
    if runner.family != "VQ":
        raise ValueError(f"--checkpoint {args.checkpoint} is a MAR model, but EAGLE drafts for VQ models")
    subjects = texts or [*range(runner.num_classes)] or [0]
    engine.check(asking_for(cspd.Request(method="ar"), subjects[0]))  # raises ValueError if it needs prompts
    config, stride = runner.config, runner.models["tokenizer"].config.stride
    own = config.grid * stride
    args.size = args.size or own
    if isinstance(config, HFConfig) and args.size != own:
        raise ValueError(f"--size {args.size}: {args.checkpoint} generates images of {own} pixels only: omit it")
    runner.target.config = dataclasses.replace(config, block_size=(args.size // stride) ** 2)
    return runner, subjects


def learnt_from(args: argparse.Namespace, subjects: list[Subject]) -> dict[str, Any]:
    """The settings that tokens depend on, plain values, with fingerprints of models' files."""
    files = checkpoint_files(args.checkpoint)
    target = files["target"]
    weights = weight_files(target.parent) if is_hf(target) else [target]
    source = {"target": together([*map(file_fingerprint, weights)]), "size": args.size} | identity(subjects)
    if args.self_samples:
        return source | {"cfg": args.cfg}
    tokenizer = args.tokenizer or files["tokenizer"]  # None: it is in the target's files
    encoder = {"tokenizer": file_fingerprint(tokenizer)} if tokenizer else {}
    return source | encoder | {"data": args.data, "upright": args.upright}


def codes_of(
    args: argparse.Namespace, runner: VQRunner, subjects: list[Subject], source: dict[str, Any]
) -> tuple[Codes, Codes]:
    """Tokens to train on, and held-out tokens; `source`: see `learnt_from`.

    Raises:
        ValueError: the data set has other classes than the target, or as in `captioned`, `numbers_of` and `cached`.
    """
    num = args.self_samples or args.images
    data = None if args.self_samples else images_of(args, subjects)

    def of_split(split: str, num: int, first_seed: int) -> Codes:
        numbers = numbers_of(subjects, split == "held-out")
        if data is None:
            make = of_target(runner, subjects, numbers, args.cfg, args.max_batch, first_seed)
        else:
            make = of_images(data, split, numbers, runner.models["tokenizer"], first_seed, runner.device)
        return cached(make, num, (args.codes or args.run / "codes") / split, source, runner.device)

    return of_split("train", num, FIRST_SEED), of_split("held-out", min(HELD_OUT, -(-num // 10)), HELD_OUT_SEED)


def images_of(args: argparse.Namespace, subjects: list[Subject]) -> Data:
    """The images in --data. Raises ValueError if the number of classes or of images is wrong."""
    if are_texts(subjects):
        return captioned(Path(args.data), subjects, args.size)
    data = data_of(args)
    if len(data.classes) != len(subjects):
        raise ValueError(
            f"--data {args.data} has {len(data.classes)} classes, but the target has {len(subjects)}: pass a directory"
            " with as many, or --self-samples"
        )
    return data


def main() -> None:
    args = arguments()
    device = device_of_process()
    runner, subjects = loaded(args, device)
    target, take_in = runner.target, functools.partial(inputs_of, runner, subjects)
    sampling = defaults_of(target.config)
    args.cfg = sampling.cfg if args.cfg is None else args.cfg
    source = learnt_from(args, subjects)
    train, held_out = codes_of(args, runner, subjects, source)
    config = target.config
    hf = isinstance(config, HFConfig)
    lr = args.lr or WIDTH_LR / config.dim
    settings = chosen(args, "checkpoint", "images", "self_samples", "cfg", "steps", "batch") | {"lr": lr} | source
    torch.manual_seed(0)
    drafter = (HFEagle if hf else Eagle)(config).to(device).train()

    def loss_fn(number: int) -> tuple[Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(number)
        codes, labels = train.at(torch.randint(len(train.labels), (args.batch,), generator=generator))
        is_null = torch.rand(len(labels), generator=generator) < LABEL_DROP
        return loss_of(target, drafter, take_in(labels, is_null, codes), generator)

    def accepted(model: Eagle, num: int) -> list[float]:
        depths = min(DEPTHS, config.block_size)
        return acceptance_by_depth(target, model, held_out.at(slice(num)), take_in, sampling, depths)

    def measure(model: Eagle) -> dict[str, float]:
        return {f"depth {depth}": share for depth, share in enumerate(accepted(model, MEASURED), 1)}

    drafter, seconds = fit(drafter, loss_fn, run=args.run, settings=settings, steps=args.steps, lr=lr, measure=measure)
    if is_first():
        shares = accepted(drafter.half().float(), MEASURED_LAST)  # as stored
        print(f"held-out acceptance at depths 1, 2, ..., guidance {sampling.cfg:g}, if all tokens before are accepted:")
        print(", ".join(f"{share:.3f}" for share in shares))
        per_pass = 1 + sum(itertools.accumulate(shares, float.__mul__))
        print(f"a chain of this length: {per_pass:.2f} tokens per forward pass")
    export(drafter, args.out, config.architecture if hf else "", seconds, half=lambda name: True)


if __name__ == "__main__":
    run_main(main)
