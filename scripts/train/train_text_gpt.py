"""Trains a text-to-image GPT on images with captions.

    python scripts/train/train_text_gpt.py --captions data/captions.json

A small T5 encoder is trained with it and written to text_encoder/ in the same directory. A draft model uses the
target's encoder unchanged (--text-encoder). With the images' tokenizer this is a directory for `cspd sample --prompt`.

The loss is the cross-entropy of all tokens of an image. As in LlamaGen, a tenth of the captions are replaced by the
unconditional branch.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from captions import Caption, held_out_names, labels_of, pictures_of, read_captions, read_list, text_of
from codes import Codes, cached, of_images
from pictures import add_drawing_options, chosen_classes
from text_models import TextGPT, new_encoder, new_tokenizer, read_encoder, save_encoder, tokens_of
from tokenizers import Tokenizer
from torch import Tensor
from train_gpt import LABEL_DROP, cross_entropy, initialise
from training import (
    FIRST_SEED,
    HELD_OUT_SEED,
    Loss,
    chosen,
    device_of_process,
    export,
    fit,
    go_on_with,
    is_first,
    run_main,
)

from cspd.discrete.gpt import GPT, VQModel
from cspd.discrete.registry import GPTS, gpt_spec, load_tokenizer
from cspd.files import weight_files
from cspd.origin import file_fingerprint, together

HELD_OUT = 512  # images
ENCODER = "text_encoder"  # the encoder's directory, next to the target
PART = 64  # images that are measured at a time


def arguments() -> argparse.Namespace:
    of_texts = [name for name, spec in GPTS.items() if spec.config.caption_dim]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--captions", type=Path, default=Path("data/emoji64/captions.json"), help="images are next to it"
    )
    parser.add_argument("--held-out", type=Path, help="a list of scripts/train/captions.py; half of it is held out")
    add_drawing_options(parser, size=64)
    parser.add_argument("--arch", default="gpt_emoji64_text", choices=of_texts)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="file of the images' tokenizer, see train_tokenizer.py"
    )
    parser.add_argument(
        "--text-encoder", type=Path, help="directory of an encoder to use unchanged (default: train one)"
    )
    parser.add_argument("--init", type=Path, help="a target's file to start from, with the text_encoder/ next to it")
    parser.add_argument("--vocabulary", type=int, default=1536, help="the most tokens of a new encoder")
    parser.add_argument("--images", type=int, default=40000, help="drawn and augmented (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help="of the images (default: %(default)s)")
    parser.add_argument("--codes", type=Path, help="directory of the images' tokens (default: in --run)")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument(
        "--run", type=Path, help="directory of the run; an interrupted run resumes (default: runs/ARCH)"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.run = args.run or Path("runs") / args.arch
    args.codes = args.codes or args.run / "codes"
    return args


def new_model(
    args: argparse.Namespace, images: VQModel, captions: Sequence[Caption], settings: dict[str, str]
) -> tuple[Tokenizer, TextGPT]:
    """The tokenizer of prompts, and a model to train, with random weights or those of --init, which `settings` records.

    Raises:
        CheckpointError: --init or the text encoder cannot be read, or belongs to another model.
        ValueError: the width of the text encoder is not the GPT's.
    """
    side = args.size // images.config.stride
    config = gpt_spec(args.arch).config
    gpt = GPT(dataclasses.replace(config, block_size=side**2, vocab_size=images.config.codebook_size))
    initialise(gpt)
    torch.nn.init.normal_(gpt.cls_embedding.uncond_embedding, std=config.caption_dim**-0.5)
    if args.init:
        go_on_with(gpt, args.init, settings)
    if args.text_encoder:
        words, encoder = read_encoder(args.text_encoder)
        encoder.requires_grad_(False)
        if encoder.config.d_model != config.caption_dim:
            widths = f"features have {encoder.config.d_model} channels, but {args.arch} takes {config.caption_dim}"
            raise ValueError(f"--text-encoder {args.text_encoder}: {widths}: pass the target's own, or another --arch")
    elif args.init:
        words, encoder = read_encoder(args.init.parent / ENCODER)
    else:
        words = new_tokenizer((" ".join([caption.name, *caption.tags]) for caption in captions), args.vocabulary)
        encoder = new_encoder(words, config.caption_dim)
    return words, TextGPT(gpt, encoder)


def codes_of(
    args: argparse.Namespace, captions: Sequence[Caption], images: VQModel, split: str, num: int, device: torch.device
) -> Codes:
    """Tokens of `num` images, labelled by the index of their captions, from --codes or computed; raises as `cached`."""
    pictures = [(caption.name, caption.category, [file.name for file in caption.files]) for caption in captions]
    first_seed = args.first_seed if split == "train" else HELD_OUT_SEED
    made_with = {**chosen(args, "size", "upright", "augment"), "first_seed": first_seed}
    made_with["tokenizer"] = file_fingerprint(args.tokenizer)
    made_with["pictures"] = hashlib.sha256(json.dumps(pictures).encode()).hexdigest()
    data = pictures_of(captions, args.upright, args.size, args.augment)
    make = of_images(data, split, labels_of(captions), images, first_seed, device)
    return cached(make, num, args.codes / split, made_with, device)


def settings_of(args: argparse.Namespace) -> dict[str, str]:
    """The settings that a run depends on, with fingerprints of files."""
    names = ("size", "upright", "augment", "arch", "vocabulary", "images", "first_seed", "steps", "batch", "lr")
    settings = {name: str(value) for name, value in chosen(args, *names).items()}
    files = {"captions": [args.captions], "tokenizer": [args.tokenizer], "held_out": [], "text_encoder": []}
    if args.held_out:
        files["held_out"] = [args.held_out]
    encoder = args.text_encoder or (args.init and args.init.parent / ENCODER)
    if encoder:
        files["text_encoder"] = [encoder / "tokenizer.json", *weight_files(encoder)]
    return settings | {name: together([*map(file_fingerprint, own)]) for name, own in files.items()}


def parts_of(captions: Sequence[Caption], args: argparse.Namespace) -> tuple[list[Caption], list[Caption]]:
    """Captions that are trained on, and captions that --held-out excludes. Raises ValueError if one does not exist."""
    away = held_out_names(read_list(args.held_out)) if args.held_out else set()
    if unknown := away - {caption.name for caption in captions}:
        raise ValueError(f"--held-out {args.held_out}: {args.captions} does not have the caption {min(unknown)!r}")
    trained_on = [caption for caption in captions if caption.name not in away]
    return trained_on, [caption for caption in captions if caption.name in away]


def in_the_layers(name: str) -> bool:
    """Whether a weight belongs to the GPT's layers."""
    return name.startswith("gpt.layers.")


def loss_of(model: TextGPT, words: Tokenizer, captions: Sequence[Caption], train: Codes, batch: int) -> Loss:
    """The `loss_fn` of `fit`."""
    most, device = model.gpt.config.prefix_length, model.gpt.output.weight.device

    def loss_fn(number: int) -> tuple[Tensor, dict[str, float]]:
        generator, random = torch.Generator().manual_seed(number), Random(number)
        codes, labels = train.at(torch.randint(len(train.labels), (batch,), generator=generator))
        is_null = torch.rand(batch, generator=generator) < LABEL_DROP
        called = [text_of(captions[label], random) for label in labels.tolist()]
        texts = tokens_of(words, called, most, is_null.to(device))
        with torch.autocast(device.type, torch.bfloat16):
            loss = cross_entropy(model, texts, codes.to(device))
        return loss, {"bits": round(loss.item() / math.log(2), 3)}

    return loss_fn


def main() -> None:
    args = arguments()
    device = device_of_process()
    captions = read_captions(args.captions)
    args.upright = chosen_classes(args.upright, sorted({caption.category for caption in captions}), args.captions)
    trained_on, held_out = parts_of(captions, args)
    images = load_tokenizer(args.tokenizer).to(device)
    torch.manual_seed(0)
    settings = settings_of(args)
    words, model = new_model(args, images, trained_on, settings)
    model.to(device)  # not .train(): a given encoder has to stay without dropout
    train = codes_of(args, trained_on, images, "train", args.images, device)
    loss_fn = loss_of(model, words, trained_on, train, args.batch)
    how = {"run": args.run, "settings": settings, "steps": args.steps, "lr": args.lr}
    model, seconds = fit(model, loss_fn, hidden=in_the_layers, **how)

    model = model.half().float()  # as stored
    if held_out:
        codes = codes_of(args, held_out, images, "held-out", HELD_OUT, device)
        if is_first():
            bits = [bits_of(model, words, held_out, codes, is_null) for is_null in (False, True)]
            print("held-out captions: {:.3f} bits per token, {:.3f} without the caption".format(*bits))
    if is_first() and not args.text_encoder:
        save_encoder(words, model.encoder, args.out.parent / ENCODER)
    export(model.gpt, args.out, args.arch, seconds, half=lambda name: True)


@torch.inference_mode()
def bits_of(model: TextGPT, words: Tokenizer, captions: Sequence[Caption], codes: Codes, is_null: bool) -> float:
    """Bits per token of images, after the names in their captions, or in the unconditional branch."""
    device = model.gpt.output.weight.device
    bits = 0.0
    for part in range(0, len(codes.labels), PART):
        own, labels = codes.at(slice(part, part + PART))
        null = torch.full((len(labels),), is_null, device=device)
        called = [captions[label].name for label in labels.tolist()]
        texts = tokens_of(words, called, model.gpt.config.prefix_length, null)
        bits += cross_entropy(model, texts, own.to(device)).item() / math.log(2) * len(labels)
    return bits / len(codes.labels)


if __name__ == "__main__":
    run_main(main)
