"""`cspd edit`: a part of a picture is kept, and the rest is made to go with it."""

from __future__ import annotations

import argparse
import hashlib
import warnings
from operator import attrgetter

import torch
from PIL import Image
from torch.nn import functional

from cspd.commands.options import (
    check_method,
    load_engine,
    request_of,
    run_settings,
)
from cspd.commands.sample import tell
from cspd.commands.sample_folder import images_there, sample_to_folder
from cspd.known import Known, Resized, cropping, placed
from cspd.pixels import to_pil
from cspd.sequence import Output
from cspd.stopping import if_stopped

GREY = 0.5  # in grid.png, what is made anew


def run(args: argparse.Namespace) -> None:
    check_method(args)
    pictures = {name: getattr(args, name) for name in ("image", "mask") if getattr(args, name)}
    given = _given(args) if args.place is None else None  # a file that cannot be read is known before loading
    engine = load_engine(args, min(args.max_batch, args.num))
    asked = request_of(args, args.label, args.seed, prompt=args.prompt, negative_prompt=args.negative_prompt)
    family = engine.check(asked).family
    size = engine.hosts[family].image_size
    known = given or placed(args.image, args.place, size)
    resized = cropping(known.image, size)
    if resized:
        print(f"{args.image}: {resized}")

    requests = [asked.but(seed=args.seed + i, known=known) for i in range(args.num)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Resized)  # it was said
        first = engine.check(requests[0])
    if first.known is None:
        raise ValueError(
            "no token is kept: a patch of pixels is, where none of them is made anew; black is kept in a mask, and"
            " `cspd sample` makes whole images"
        )
    settings = run_settings(args, first) | {"paste": args.paste, "place": args.place, "keep": args.keep}
    for name, path in pictures.items():
        settings[name] = {"file": str(path.resolve()), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}

    shown = known.fitted(size)
    before = [("before", to_pil(shown.image)), ("kept", _kept(shown.image, first.known.mask))]

    def pasted(output: Output) -> torch.Tensor:
        return shown.pasted(output.image, output.request.known.mask)

    finish = pasted if args.paste else attrgetter("image")
    with if_stopped(lambda: images_there(args.out, args.num)):
        how = {"overwrite": args.overwrite, "heatmap": args.heatmap, "before": before, "finish": finish, "speed": True}
        record = sample_to_folder(engine, requests, args.out, settings, **how)
    made = first.known.num_made
    print(f"{made} of {engine.hosts[family].seq_len} tokens of the first picture were made anew")
    tell(engine, requests[0], record, args.out, args.heatmap)


def _given(args: argparse.Namespace) -> Known:
    """The picture, and what of it is made anew."""
    return Known.of(args.image, args.mask if args.keep is None else 1 - args.keep)


def _kept(image: torch.Tensor, made: torch.Tensor) -> Image.Image:
    """A picture [3, H, W], grey where tokens, bool [L], are made anew."""
    side = round(len(made) ** 0.5)
    of_pixels = functional.interpolate(made.view(1, 1, side, side).float(), image.shape[1:])[0]
    return to_pil(image.lerp(torch.full_like(image, GREY), of_pixels))
