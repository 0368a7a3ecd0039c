"""The commands that make images, `cspd sample`, `cspd edit` and `cspd serve`, and the folder that images go to."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import ipaddress
import itertools
import math
import re
import socket
import sys
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from cspd.checkpoints import check_of_one, checkpoint_files
from cspd.cli.options import bundled_here, check_method, load_engine, read_prompts, request_of, run_settings
from cspd.engine import Engine
from cspd.evaluation.images import GRID, HEATMAP, OVERVIEWS, RECORD
from cspd.files import MAYBE, append_json, misfit, parse_json, read_text, tell_damaged, write_bytes
from cspd.method import as_it_is, method_of
from cspd.plots import grid, token_cost_grid
from cspd.request import Known, Output, Request, Resized, cropping, placed, png_of, to_pil
from cspd.runs import LAZY, STATS, Store, differences, kept_choices, measured_lines, speed_line, summary_of, write_png
from cspd.speed import against_plain
from cspd.terminal import API_KEY, if_stopped

# Sampling into a folder: PNGs, a labelled grid and a JSON record; a run that was cut off goes on where it was.

SCHEMA = "cspd.samples/1"
JOURNAL = "samples.journal"  # a line of JSON for each image since the record was written
NAMES = rf"\d+_(label(\d+|none)|text[a-z0-9-]*)_seed\d+\.png|{'|'.join(map(re.escape, (*OVERVIEWS, JOURNAL)))}"
IMAGE = {"index": int, "request": dict, "stats": STATS, "token_cost?": [MAYBE], "heat?": [MAYBE]}
GRID_LIMIT = 400  # images in the grid, at most
LONGEST_NAME = 60  # characters of a text in a file's name


def images_there(out: Path, num: int) -> str:
    """How many of `num` images are in a folder, for who stops a run."""
    return f"{len(list(out.glob('*_seed*.png')))} of {num} images are in {out}/"


def sample_to_folder(
    engine: Engine,
    requests: Sequence[Request],
    out: Path,
    settings: dict,
    *,
    progress: bool = True,
    overwrite: bool = False,
    heatmap: bool = False,
    before: Sequence[tuple[str, Image.Image]] = (),
    finish: Callable[[Output], Tensor] = attrgetter("image"),
    speed: bool = False,
) -> dict:
    """Generates `requests` into `out` and returns the record, which samples.json has with the names of all files.

    Images that an earlier run with the same settings and requests left there are kept and not made again, if they are
    as they were written.

    Args:
        requests: of one method and its settings, each with its label or text, and seed.
        settings: what the images depend on beside the requests (checkpoint, precision); kept in the record.
        heatmap: also write heatmap.png; images kept from a run without it are blank there.
        before: captions and pictures that grid.png shows before the images. finish: an output's picture, [3, H, W].
        speed: once all is written, also time how fast plain sampling would have been, see `cspd.speed`.

    Raises:
        ValueError: a bad request, or what `Store.claim` raises.
    """
    requests = [engine.check(request) for request in requests]
    names = [f"{i:05d}_{_told(request)}_seed{request.seed}.png" for i, request in enumerate(requests)]
    record = {"schema": SCHEMA, "settings": settings, "requests": len(requests)}
    overviews = OVERVIEWS if heatmap else (GRID,)
    with Store(out, RECORD, SCHEMA, {"settings": dict, "images": [IMAGE]}, NAMES, ("settings", "requests")) as store:
        earlier = store.claim(record, [*names, *overviews, JOURNAL], overwrite)
        images = _images_of(store, earlier, len(requests)) if earlier else []
        requests = _resolved(engine, requests, store, images)
        kept = [image for image in images if _is_there(out / names[image["index"]], image)]
        done = {image["index"] for image in kept}
        lost = [names[image["index"]] for image in images if image["index"] not in done]
        tell_damaged([name for name in lost if (out / name).exists()])
        record["images"] = kept
        store.begin(record)
        (out / JOURNAL).unlink(missing_ok=True)  # the record has its images

        start = time.perf_counter()
        captured = engine.graphs.seconds
        made, totals, outside = _sample(engine, requests, out, names, done, progress, heatmap, finish)
        seconds = time.perf_counter() - start
        record["images"] = images = sorted([*kept, *made], key=lambda image: image["index"])
        record["summary"] = summary_of([image["stats"] for image in images], len(made), seconds)
        record["summary"]["window"] = requests[0].window
        record["summary"]["judged_and_accepted"] = totals  # of the images of this run
        store.save(record)
        (out / JOURNAL).unlink(missing_ok=True)
        _write_overviews(engine, out, names, record, requests, heatmap, before)
        if speed and made:  # nothing is lost if it is stopped here
            seconds -= engine.graphs.seconds - captured  # once for all runs of these shapes, by plain sampling too
            rounds = seconds - outside - _decoding(engine, made)
            record["summary"] |= against_plain(engine, requests[0], len(made), seconds, rounds)
            store.save(record)
    return record


def _told(request: Request) -> str:
    """What an image is of, in its file's name."""
    if request.prompt is None:
        return f"label{'none' if request.label is None else request.label}"
    words = re.findall("[a-z0-9]+", request.prompt.lower())
    return "-".join(["text", *words])[:LONGEST_NAME].rstrip("-")


def _images_of(store: Store, record: dict, num: int) -> list[dict]:
    """What an earlier run says of its images, by their index: in its record, and in its journal since then.

    A line of the journal that was being written when the run was killed is no JSON. Its image is made again.
    """
    lines = []
    with contextlib.suppress(FileNotFoundError):
        lines = read_text(store.folder / JOURNAL).splitlines()
    images = {image["index"]: image for image in record["images"]}
    for line in lines:
        with contextlib.suppress(ValueError):
            image = parse_json(line)
            if misfit(image, IMAGE) is None:
                images[image["index"]] = image
    absurd = [index for index in images if not 0 <= index < num]
    if absurd:
        raise ValueError(f"{store.folder / RECORD} is damaged (an image has the index {absurd[0]}): give another --out")
    return [images[index] for index in sorted(images)]


def _resolved(engine: Engine, requests: Sequence[Request], store: Store, images: Sequence[dict]) -> list[Request]:
    """The requests as they run. Raises ValueError where the images that are there are of others."""
    for image in images:  # the first that differs is named: mostly all differ alike
        store.refuse(differences(image["request"], requests[image["index"]].to_dict()))
    settings = images[0]["request"] if images else None
    return [engine.resolve(r.but(**kept_choices(r.settings, settings))) for r in requests]


def _is_there(path: Path, image: dict) -> bool:
    """Whether a file is what was written, by its hash; `image` gets one if an older version left it without."""
    try:
        content = path.read_bytes()
        if "sha256" not in image:
            with Image.open(io.BytesIO(content)) as picture:
                picture.load()
    except Exception:  # a damaged picture makes its reader raise almost anything
        return False
    found = _hash(content)
    return image.setdefault("sha256", found) == found


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sample(
    engine: Engine,
    requests: Sequence[Request],
    out: Path,
    names: Sequence[str],
    done: Collection[int],
    progress: bool,
    heatmap: bool,
    finish: Callable[[Output], Tensor],
) -> tuple[list[dict], dict, float]:
    """Makes the images that are not `done`.

    Returns what the record says of them, counts of all of them, and the seconds that were not the engine's.

    The journal has an image before its file is there: a file that no record knows would be made again.
    """
    todo = [i for i in range(len(requests)) if i not in done]
    made = []
    totals: dict[str, list] = {}
    outside = 0.0
    for k, output in engine.stream([requests[i] for i in todo], progress):
        start = time.perf_counter()
        index = todo[k]
        stats = output.stats.to_dict()
        for name in ("by_lag", "by_step", "by_rank"):  # long, and kept as sums
            totals[name] = _add(totals.get(name), stats.pop(name))
        content = png_of(to_pil(finish(output)))
        entry = {"index": index, "file": names[index], "sha256": _hash(content), "request": output.request.to_dict()}
        if heatmap:
            entry["token_cost"] = [None if math.isnan(value) else value for value in output.token_cost.tolist()]
        made.append(entry | {"stats": stats})
        append_json(out / JOURNAL, made[-1])
        write_bytes(out / names[index], content)
        outside += time.perf_counter() - start
    return made, totals, outside


def _decoding(engine: Engine, made: Sequence[dict]) -> float:
    """Seconds that no round ran since images were decoded; those of a batch are charged the same seconds, each all."""
    seconds = [image["stats"]["seconds"]["decode"] for image in made]
    return seconds[-1] if engine.device.type == "cuda" else sum(set(seconds))  # there, beside the rounds of others


def _write_overviews(
    engine: Engine,
    out: Path,
    names: Sequence[str],
    record: dict,
    requests: Sequence[Request],
    heatmap: bool,
    before: Sequence[tuple[str, Image.Image]],
) -> None:
    """The grid of the first images, after those `before`, and, if asked for, what their tokens cost."""
    shown = record["images"][:GRID_LIMIT]
    num = len(before) + len(shown)
    columns = next((n for n in (10, 8) if num % n == 0), min(10, num))
    pictures = []
    for image in shown:
        with Image.open(out / names[image["index"]]) as picture:
            pictures.append(picture.convert("RGB"))
    captions = [engine.name_of(requests[image["index"]]) for image in shown]
    heads, earlier = zip(*before) if before else ((), ())
    write_png(out / GRID, grid([*earlier, *pictures], [*heads, *captions], columns))
    if heatmap:
        token_cost = [image.get("token_cost", image.get("heat")) for image in shown]
        accepted = method_of(requests[0]).token_cost == "accepted"
        write_png(out / HEATMAP, token_cost_grid(pictures, token_cost, captions, columns, accepted))


def _add(total: list | None, counts: list) -> list:
    """Elementwise sums of [judged, accepted]; counts of other lengths, from other settings, are padded."""
    if total is None:
        return counts
    return [[a + b for a, b in itertools.zip_longest(*pair, fillvalue=0)] for pair in zip(total, counts)]


# `cspd sample`: images into a folder.


def run_sample(args: argparse.Namespace) -> None:
    asked = _asked(args)
    num = args.num or len(asked)
    check_method(args)
    engine = load_engine(args, min(args.max_batch, num))  # the window is chosen for as many as really run at once
    requests = [request_of(args, seed=args.seed + i, **asked[i % len(asked)]) for i in range(num)]
    settings = run_settings(args, engine.check(requests[0]))
    with if_stopped(lambda: images_there(args.out, num)):
        how = {"overwrite": args.overwrite, "heatmap": args.heatmap, "speed": True}
        record = sample_to_folder(engine, requests, args.out, settings, **how)
    tell(engine, requests[0], record, args.out, args.heatmap)


def _asked(args: argparse.Namespace) -> list[dict]:
    """What requests are to be of: labels or texts, which take turns. Raises ValueError, OSError."""
    negative = {"negative_prompt": args.negative_prompt}
    if args.prompt is None and args.prompts is None:
        return [{"label": label, **negative} for label in args.labels]
    texts = [args.prompt] if args.prompts is None else read_prompts(args.prompts)
    return [{"label": None, "prompt": text, **negative} for text in texts]


def tell(engine: Engine, request: Request, record: dict, out: Path, heatmap: bool) -> None:
    """Says what the images in a folder cost, made by requests like this one, and what is there."""
    summary, num = record["summary"], record["requests"]
    if summary["images_made"]:
        speed = f"{summary['seconds']:.1f} s: {summary['images_per_second']:.2f} images/s"
        print(f"{summary['images_made']} image{'s' if summary['images_made'] > 1 else ''} in {speed}")
    else:
        print(f"all {num} images were there already")
    _tell_cost(summary)
    asked = engine.check(request)
    if summary["window"] is not None and method_of(asked).resolve is not as_it_is:
        why = engine.runners[str(asked.family)].tuning.why(asked, engine.num_slots)
        print(f"window {summary['window']}: {why}")
    print(f"guarantee: {summary['guarantee']}")
    if summary["alpha"] is not None:
        print(f"{summary['alpha']:.1%} of the drafts were accepted")
    for title, value, meaning in measured_lines(summary):
        print(f"{title} {value} {meaning}")
    if heatmap:
        print(f"wrote {out / 'heatmap.png'} (what each token cost)")
    pngs = f"{num} PNG{'s' if num > 1 else ''}"
    print(f"wrote {out / 'grid.png'} (all images), {out / RECORD} (settings, statistics), {pngs}")
    if told := speed_line(summary, engine.num_slots):
        print(told)


def _tell_cost(summary: dict) -> None:
    """Says what an image took, and of VQ models by how much its codes may differ from the target's."""
    seconds = summary["seconds_by_phase"]
    total = sum(seconds.values()) or 1
    time = "time: " + ", ".join(f"{name} {spent / total:.0%}" for name, spent in seconds.items())
    backbone_calls = summary["backbone_calls_per_image"]
    if "step_compression" not in summary:
        lazy = f" ({summary[f'{LAZY}_per_image']:.0f} lazy)" if summary[f"{LAZY}_per_image"] else ""
        iterations = f"{summary['iterations_per_image']:.0f} iterations, {backbone_calls:.0f} backbone calls{lazy}"
        head_calls = f"{summary['head_calls_per_image']:.0f} sequential head calls"
        print(f"per image: {iterations}, {head_calls} ({summary['head_calls_per_token']:.1f} per token); {time}")
        return
    print(f"per image: {backbone_calls:.1f} target forwards, {summary['step_compression']:.2f} codes each; {time}")
    if summary["bound_per_image"] > 0:
        bound, error = min(summary["bound_per_image"], 1), summary["bound_standard_error"]
        spread = "" if error is None else f" +- {error:.3f}"
        print(f"total variation from the target, of an image's codes: at most {bound:.3f}{spread} (docs/bounds.md)")


# `cspd edit`: a part of a picture is kept, and the rest is made to go with it.

GREY = 0.5  # in grid.png, what is made anew


def run_edit(args: argparse.Namespace) -> None:
    check_method(args)
    pictures = {name: getattr(args, name) for name in ("image", "mask") if getattr(args, name)}
    given = _given(args) if args.place is None else None  # a file that cannot be read is known before loading
    engine = load_engine(args, min(args.max_batch, args.num))
    asked = request_of(args, args.label, args.seed, prompt=args.prompt, negative_prompt=args.negative_prompt)
    family = engine.check(asked).family
    size = engine.runners[family].image_size
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
    print(f"{made} of {engine.runners[family].seq_len} tokens of the first picture were made anew")
    tell(engine, requests[0], record, args.out, args.heatmap)


def _given(args: argparse.Namespace) -> Known:
    """The picture, and what of it is made anew."""
    return Known.of(args.image, args.mask if args.keep is None else 1 - args.keep)


def _kept(image: torch.Tensor, made: torch.Tensor) -> Image.Image:
    """A picture [3, H, W], grey where tokens, bool [L], are made anew."""
    side = round(len(made) ** 0.5)
    of_pixels = functional.interpolate(made.view(1, 1, side, side).float(), image.shape[1:])[0]
    return to_pil(image.lerp(torch.full_like(image, GREY), of_pixels))


# `cspd serve`: a page in the browser, whose visitors share the engines.


def run_serve(args: argparse.Namespace) -> None:
    try:
        from cspd.serving.app import Server, make_app
    except ModuleNotFoundError as missing:
        raise ValueError(f"cspd serve needs {missing.name}: pip install 'cspd[serve]'") from None
    names = list(dict.fromkeys(args.checkpoint or bundled_here()))
    for name in names:
        checkpoint_files(name)  # raises now, and not when others are loaded
    check_of_one(names, args.arch, args.vae, args.draft_checkpoint, args.eagle, args.text_encoder)

    with listening(args.host, args.port) as listener:
        engines = {name: load_engine(_of(args, name), args.max_batch) for name in names}
        warnings.simplefilter("ignore", Resized)  # the page shows it
        host, port = listener.getsockname()[:2]
        address = ipaddress.ip_address(host)
        access = {
            "hosts": [args.host, host, *args.allowed_hosts],
            "origins": args.allowed_hosts,
            "any_address": not address.is_loopback,
            "key": args.api_key,
        }
        app = make_app(engines, args.max_requests, args.max_per_visitor, **access)
        if not address.is_loopback and args.api_key is None:
            warning = f"anybody who can reach {host}, port {port}, can use this page: give --api-key, or set {API_KEY}"
            print(f"cspd: warning: {warning}", file=sys.stderr)
        shown = f"[{host}]" if ":" in host else host
        asks = "" if args.api_key is None else "; the page asks for the API key"
        print(f"http://{shown}:{port} serves {', '.join(names)}{asks}; Ctrl-C ends it", flush=True)
        Server(app).run(sockets=[listener])


def _of(args: argparse.Namespace, checkpoint: str) -> argparse.Namespace:
    """The options, of one checkpoint."""
    return argparse.Namespace(**vars(args) | {"checkpoint": checkpoint})


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(
            f"{host}:{port} cannot be listened on ({error.strerror}): give another --port or --host"
        ) from None
