"""Trains a GPT of texts on pictures with captions: python scripts/train_text_gpt.py --captions data/captions.json

With it a small T5 encoder of its texts is trained, which goes into text_encoder/ beside it. A draft takes the target's
as it is (--text-encoder). Together with a tokenizer of images they are a folder that `cspd sample --prompt` takes.

Next-token cross-entropy over all codes of an image, a tenth of the captions replaced by the null caption, as LlamaGen.
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
from codes import Codes, kept, of_images
from pictures import chosen_classes
from text_models import TextGPT, new_encoder, new_tokenizer, read_encoder, save_encoder, tokens_of
from tokenizers import Tokenizer
from torch import Tensor
from train_gpt import LABEL_DROP, cross_entropy, initialise
from training import FIRST_SEED, HELD_OUT_SEED, Loss, chosen, device_of_process, export, fit, go_on_with, is_first

from cspd.discrete.gpt import GPT, VQModel
from cspd.discrete.registry import GPTS, gpt_spec, load_tokenizer
from cspd.files import weight_files
from cspd.runs import file_fingerprint, together

HELD_OUT = 512  # pictures
ENCODER = "text_encoder"  # the folder beside a target
PART = 64  # pictures that are measured at a time


def arguments() -> argparse.Namespace:
    of_texts = [name for name, spec in GPTS.items() if spec.config.caption_dim]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", type=Path, default=Path("data/emoji64/captions.json"), help="pictures, beside it")
    parser.add_argument("--held-out", type=Path, help="a list of scripts/captions.py, half of it kept from training")
    parser.add_argument("--size", type=int, default=64, help="of the images, pixels per side; others are resized")
    parser.add_argument("--upright", default="", help="classes whose images are never mirrored, with commas between")
    parser.add_argument("--arch", default="gpt_emoji64_text", choices=of_texts)
    parser.add_argument("--tokenizer", type=Path, required=True, help="of the images, see train_tokenizer.py")
    parser.add_argument("--text-encoder", type=Path, help="the folder of one to take as it is (default: train one)")
    parser.add_argument("--init", type=Path, help="a target's file to go on from, with the text_encoder/ beside it")
    parser.add_argument("--vocabulary", type=int, default=1536, help="tokens that a new one knows at most")
    parser.add_argument("--images", type=int, default=40000, help="drawn and augmented (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help="of the images (default: %(default)s)")
    parser.add_argument("--codes", type=Path, help="folder where the images' codes are kept (default: in --run)")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--run", type=Path, help="resumes from here if it was cut off (default: runs/ARCH)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.run = args.run or Path("runs") / args.arch
    args.codes = args.codes or args.run / "codes"
    return args


def new_model(
    args: argparse.Namespace, images: VQModel, captions: Sequence[Caption], settings: dict[str, str]
) -> tuple[Tokenizer, TextGPT]:
    """The tokenizer of texts, and a model to be trained, with random weights or those of --init, told to `settings`.

    Raises:
        CheckpointError: --init or the text encoder is not there, or of others. ValueError: it is of another width than
            the GPT takes.
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
            widths = f"its features have {encoder.config.d_model} channels and {args.arch} takes {config.caption_dim}"
            raise ValueError(f"--text-encoder {args.text_encoder}: {widths}: give the target's own, or another --arch")
    elif args.init:
        words, encoder = read_encoder(args.init.parent / ENCODER)
    else:
        words = new_tokenizer((" ".join([caption.name, *caption.tags]) for caption in captions), args.vocabulary)
        encoder = new_encoder(words, config.caption_dim)
    return words, TextGPT(gpt, encoder)


def codes_of(
    args: argparse.Namespace, captions: Sequence[Caption], images: VQModel, split: str, num: int, device: torch.device
) -> Codes:
    """Codes of so many pictures, labelled by captions' numbers, from --codes or made. Raises ValueError as `kept`."""
    pictures = [(caption.name, caption.category, [file.name for file in caption.files]) for caption in captions]
    first_seed = args.first_seed if split == "train" else HELD_OUT_SEED
    made_with = {"size": args.size, "upright": args.upright, "first_seed": first_seed}
    made_with["tokenizer"] = file_fingerprint(args.tokenizer)
    made_with["pictures"] = hashlib.sha256(json.dumps(pictures).encode()).hexdigest()
    data = pictures_of(captions, args.upright, args.size)
    make = of_images(data, split, labels_of(captions), images, first_seed, device)
    return kept(make, num, args.codes / split, made_with, device)


def settings_of(args: argparse.Namespace) -> dict[str, str]:
    """What a run depends on; of files, what is in them."""
    names = ("size", "upright", "arch", "vocabulary", "images", "first_seed", "steps", "batch", "lr")
    settings = {name: str(value) for name, value in chosen(args, *names).items()}
    files = {"captions": [args.captions], "tokenizer": [args.tokenizer], "held_out": [], "text_encoder": []}
    if args.held_out:
        files["held_out"] = [args.held_out]
    encoder = args.text_encoder or (args.init and args.init.parent / ENCODER)
    if encoder:
        files["text_encoder"] = [encoder / "tokenizer.json", *weight_files(encoder)]
    return settings | {name: together([*map(file_fingerprint, own)]) for name, own in files.items()}


def parts_of(captions: Sequence[Caption], args: argparse.Namespace) -> tuple[list[Caption], list[Caption]]:
    """Captions that are trained on, and those that --held-out keeps away. Raises ValueError where one is not there."""
    away = held_out_names(read_list(args.held_out)) if args.held_out else set()
    if unknown := away - {caption.name for caption in captions}:
        raise ValueError(f"--held-out {args.held_out} is of other captions: {args.captions} has no {min(unknown)!r}")
    trained_on = [caption for caption in captions if caption.name not in away]
    return trained_on, [caption for caption in captions if caption.name in away]


def in_the_layers(name: str) -> bool:
    """Whether a weight is of the GPT's layers."""
    return name.startswith("gpt.layers.")


def loss_of(model: TextGPT, words: Tokenizer, captions: Sequence[Caption], train: Codes, batch: int) -> Loss:
    """What `fit` is given."""
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
    model.to(device)  # in the modes they come in: an encoder that is taken as it is drops nothing out
    train = codes_of(args, trained_on, images, "train", args.images, device)
    loss_fn = loss_of(model, words, trained_on, train, args.batch)
    how = {"run": args.run, "settings": settings, "steps": args.steps, "lr": args.lr}
    model, seconds = fit(model, loss_fn, hidden=in_the_layers, **how)

    model = model.half().float()  # as stored
    if held_out:
        codes = codes_of(args, held_out, images, "held-out", HELD_OUT, device)
        if is_first():
            bits = [bits_of(model, words, held_out, codes, is_null) for is_null in (False, True)]
            print("held-out captions: {:.3f} bits per code, {:.3f} without the text".format(*bits))
    if is_first() and not args.text_encoder:
        save_encoder(words, model.encoder, args.out.parent / ENCODER)
    export(model.gpt, args.out, args.arch, seconds, half=lambda name: True)


@torch.inference_mode()
def bits_of(model: TextGPT, words: Tokenizer, captions: Sequence[Caption], codes: Codes, is_null: bool) -> float:
    """Bits per code of pictures, after their captions' names or after null captions of the same length."""
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
    main()
