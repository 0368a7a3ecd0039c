"""`cspd edit`: a part of a picture is kept, and the rest is made to go with it."""

from __future__ import annotations

import argparse
import hashlib
import re
import warnings
from operator import attrgetter
from pathlib import Path

import torch
from PIL import Image
from torch.nn import functional

from cspd.commands.options import (
    add_method_option,
    add_model_options,
    add_request_options,
    check_method,
    load_engine,
    request_of,
    run_settings,
)
from cspd.commands.sample import tell
from cspd.commands.sample_folder import images_there, sample_to_folder
from cspd.commands.subjects import add_negative_prompt
from cspd.known import Known, Resized, cropping, placed
from cspd.parsing import count, label_of, place, seed, shortened, word
from cspd.pixels import to_pil
from cspd.sequence import Output
from cspd.stopping import if_stopped

GREY = 0.5  # in grid.png, what is made anew


def add(commands: argparse._SubParsersAction) -> None:
    """Declares the command."""
    text = (
        "Makes a part of a picture anew: inpainting (--mask), variations (--keep), outpainting (--place). A token, a"
        " patch of pixels, is kept where no pixel of it is made anew; the others are drawn given those, by any method."
        " VQ models go row by row, and keep rows at the top only. A picture of another size is cropped to a square and"
        " resized. grid.png has it before and after."
    )
    edit = commands.add_parser("edit", help="make a part of a picture anew", description=text)
    edit.set_defaults(run=run)
    add_model_options(edit)
    add_method_option(edit)
    add_request_options(edit)
    group = edit.add_argument_group("what to make")
    group.add_argument("--image", type=place, required=True, help="the picture: PNG, JPEG, WebP, BMP, TIFF or GIF")
    where = group.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--mask", type=place, help="a picture of the same size: white is made anew, black is kept, as in diffusers"
    )
    where.add_argument(
        "--keep", type=_share, metavar="SHARE", help="keep this share of the tokens; each seed draws which (variations)"
    )
    where.add_argument(
        "--place",
        type=_box,
        metavar="X,Y,W,H",
        help="resize the picture into a box of the model's canvas, in pixels, and make all around it (outpainting)",
    )
    what = group.add_mutually_exclusive_group(required=True)
    what.add_argument("--label", type=label_of, help="class of what is made, by number or name")
    what.add_argument("--prompt", type=word, metavar="TEXT", help="text in place of a class, by models of texts")
    add_negative_prompt(group)
    group.add_argument("--num", type=count, default=1, help="pictures, each of its own seed (default: %(default)s)")
    group.add_argument("--seed", type=seed, default=0, help="of the first one; the next has the next (default: 0)")
    group.add_argument(
        "--paste",
        action="store_true",
        help="show the picture's own pixels where they are kept, blended over a token's width at the border"
        " (default: the kept tokens as the autoencoder decodes them with the others)",
    )
    group.add_argument("--max-batch", type=count, default=8, help="pictures in flight at once (default: %(default)s)")
    group.add_argument("--out", type=place, default=Path("edited"), help="folder (default: %(default)s/)")
    group.add_argument("--overwrite", action="store_true", help="replace another run that is in --out")
    group.add_argument("--heatmap", action="store_true", help="also write heatmap.png: what each new token cost")


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


def _share(text: str) -> float:
    """A number inside 0..1."""
    try:
        share = float(text)
    except ValueError:
        share = -1
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is no share of the tokens: give a number between 0 and 1")
    return share


def _box(text: str) -> tuple[int, ...]:
    """ "8,8,16,16" to (8, 8, 16, 16)."""
    if not re.fullmatch(r"\d{1,6}(,\d{1,6}){3}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{shortened(text)} is no box: give left,top,width,height in pixels")
    return tuple(map(int, text.split(",")))
