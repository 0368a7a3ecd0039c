"""The commands that make images, `cspd sample`, `cspd edit` and `cspd serve`, and the folder that images go to."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import ipaddress
import itertools
import math
import re
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
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
from cspd.files import append_json, parse_json, write_bytes
from cspd.method import as_it_is, method_of
from cspd.plots import grid, token_cost_grid
from cspd.request import Known, Output, Request, Resized, cropping, placed, png_of, to_pil
from cspd.runs import (
    LAZY,
    Store,
    differences,
    earlier_choices,
    file_fingerprint,
    files_told,
    measured_lines,
    missing_files,
    speed_line,
    summary_of,
    write_png,
)
from cspd.speed import against_plain
from cspd.terminal import API_KEY, if_stopped

# Sampling into a folder: PNGs, a labelled grid and a JSON record. An interrupted run resumes.

SCHEMA = "cspd.samples/1"
JOURNAL = "samples.journal"  # a line of JSON for each image since the record was written
SHAPE = {"settings": dict, "images": [{"index": int, "request": dict, "stats": dict}]}  # of the record
GRID_LIMIT = 400  # images in the grid, at most
LONGEST_NAME = 60  # characters of a prompt in a file's name


def images_told(out: Path, num: int) -> str:
    """How many of `num` images are in a folder, printed when the run is interrupted."""
    return files_told(out, "*_seed*.png", num, "images")


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

    Existing images of an earlier run with the same settings and requests are not generated again, if they are
    undamaged.

    Args:
        requests: of one method and its settings, each with its label or prompt, and seed.
        settings: what the images depend on besides the requests (checkpoint, precision); written to the record.
        heatmap: also write heatmap.png; existing images of a run without it are blank there.
        before: captions and images that grid.png shows first. finish: an output's image, [3, H, W].
        speed: once all is written, also time how fast baseline sampling would have been, see `cspd.speed`.

    Raises:
        ValueError: a bad request, or as `Store.claim`.
    """
    requests = [engine.check(request) for request in requests]
    names = [f"{i:05d}_{_subject(request)}_seed{request.seed}.png" for i, request in enumerate(requests)]
    record = {"schema": SCHEMA, "settings": settings, "requests": len(requests)}
    overviews = OVERVIEWS if heatmap else (GRID,)
    with Store(out, RECORD, SCHEMA, SHAPE, ("settings", "requests")) as store:
        earlier = store.claim(record, [*names, *overviews, JOURNAL], overwrite)
        existing = _existing(store, earlier, names) if earlier else {}
        requests = _resolved(engine, requests, names, store, existing)
        missing = set(missing_files(out, names, lambda name: _is_whole(out / name, existing.get(name))))
        todo = [index for index, name in enumerate(names) if name in missing]
        record["images"] = [existing[name] for name in names if name not in missing]
        store.begin(record)
        (out / JOURNAL).unlink(missing_ok=True)  # the record has its images

        start = time.perf_counter()
        captured = engine.graphs.seconds
        generated, totals, outside = _sample(engine, requests, out, names, todo, progress, heatmap, finish)
        seconds = time.perf_counter() - start
        images = sorted([*record["images"], *generated], key=lambda image: image["index"])
        record["images"] = images
        record["summary"] = summary_of([image["stats"] for image in images], len(generated), seconds)
        record["summary"]["window"] = requests[0].window
        record["summary"]["judged_and_accepted"] = totals  # of the images of this run
        store.save(record)
        (out / JOURNAL).unlink(missing_ok=True)
        _write_overviews(engine, out, names, record, requests, heatmap, before)
        if speed and generated:  # nothing is lost if it is interrupted here
            seconds -= engine.graphs.seconds - captured  # once for all runs of these shapes, baseline ones too
            rounds = seconds - outside - _decoding(engine, generated)
            record["summary"] |= against_plain(engine, requests[0], len(generated), seconds, rounds)
            store.save(record)
    return record


def _subject(request: Request) -> str:
    """The class or prompt of an image, in its file's name."""
    if request.prompt is None:
        return f"label{'none' if request.label is None else request.label}"
    words = re.findall("[a-z0-9]+", request.prompt.lower())
    return "-".join(["text", *words])[:LONGEST_NAME].rstrip("-")


def _existing(store: Store, record: dict, names: Sequence[str]) -> dict[str, dict]:
    """The entries of an earlier run's images, by their files' names: of its record, and of its journal since then.

    A killed run may leave half a line in the journal. Its image is generated again.
    """
    entries = record["images"]
    journal = store.folder / JOURNAL
    if journal.exists():
        for line in journal.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                entries.append(parse_json(line))
    return {names[entry["index"]]: entry for entry in entries}


def _resolved(
    engine: Engine, requests: Sequence[Request], names: Sequence[str], store: Store, existing: Mapping[str, dict]
) -> list[Request]:
    """The requests as they run. Raises ValueError if an existing image has another request."""
    for name, request in zip(names, requests):
        if name in existing:
            store.refuse(differences(existing[name]["request"], request.to_dict()))
    first = next(iter(existing.values()), {})
    return [engine.resolve(each.but(**earlier_choices(each.settings, first.get("request")))) for each in requests]


def _is_whole(path: Path, entry: dict | None) -> bool:
    """Whether a file has the digest of its entry. An entry of an older version, without one, gets the file's."""
    if entry is None or not path.is_file():
        return False
    if "sha256" not in entry and not _is_readable(path):
        return False
    digest = file_fingerprint(path)
    return entry.setdefault("sha256", digest) == digest


def _is_readable(path: Path) -> bool:
    try:
        with Image.open(path) as image:
            image.load()
    except Exception:  # a damaged image makes its reader raise almost anything
        return False
    return True


def _sample(
    engine: Engine,
    requests: Sequence[Request],
    out: Path,
    names: Sequence[str],
    todo: Sequence[int],
    progress: bool,
    heatmap: bool,
    finish: Callable[[Output], Tensor],
) -> tuple[list[dict], dict, float]:
    """Generates the images with the indices `todo`.

    Returns their entries in the record, counts of all of them, and the seconds spent outside the engine.
    """
    entries = []
    totals: dict[str, list] = {}
    outside = 0.0
    for k, output in engine.stream([requests[i] for i in todo], progress):
        start = time.perf_counter()
        index = todo[k]
        stats = output.stats.to_dict()
        for name in ("by_lag", "by_step", "by_rank"):  # long: only their sums are written
            totals[name] = _add(totals.get(name), stats.pop(name))
        content = png_of(to_pil(finish(output)))
        entry = {
            "index": index,
            "file": names[index],
            "sha256": hashlib.sha256(content).hexdigest(),
            "request": output.request.to_dict(),
        }
        if heatmap:
            entry["token_cost"] = [None if math.isnan(value) else value for value in output.token_cost.tolist()]
        entry["stats"] = stats
        entries.append(entry)
        # the journal comes first: a file without an entry would be generated again
        append_json(out / JOURNAL, entry)
        write_bytes(out / names[index], content)
        outside += time.perf_counter() - start
    return entries, totals, outside


def _decoding(engine: Engine, generated: Sequence[dict]) -> float:
    """The seconds in which images were decoded and no round ran. All images of a batch have the same seconds."""
    seconds = [image["stats"]["seconds"]["decode"] for image in generated]
    return seconds[-1] if engine.device.type == "cuda" else sum(set(seconds))  # a GPU runs rounds meanwhile


def _write_overviews(
    engine: Engine,
    out: Path,
    names: Sequence[str],
    record: dict,
    requests: Sequence[Request],
    heatmap: bool,
    before: Sequence[tuple[str, Image.Image]],
) -> None:
    """Writes the grid of the first images, after the images `before`, and the heat map of token costs if asked for."""
    entries = record["images"][:GRID_LIMIT]
    num = len(before) + len(entries)
    columns = next((n for n in (10, 8) if num % n == 0), min(10, num))
    images = []
    for entry in entries:
        with Image.open(out / names[entry["index"]]) as image:
            images.append(image.convert("RGB"))
    captions = [engine.name_of(requests[entry["index"]]) for entry in entries]
    all_images = [image for _, image in before] + images
    all_captions = [caption for caption, _ in before] + captions
    write_png(out / GRID, grid(all_images, all_captions, columns))
    if heatmap:
        token_cost = [entry.get("token_cost", entry.get("heat")) for entry in entries]
        accepted = method_of(requests[0]).token_cost == "accepted"
        write_png(out / HEATMAP, token_cost_grid(images, token_cost, captions, columns, accepted))


def _add(total: list | None, counts: list) -> list:
    """Elementwise sums of [verified, accepted]; shorter counts, from other settings, are padded."""
    if total is None:
        return counts
    sums = []
    for pair in zip(total, counts):
        sums.append([a + b for a, b in itertools.zip_longest(*pair, fillvalue=0)])
    return sums


# `cspd sample`: images into a folder.


def run_sample(args: argparse.Namespace) -> None:
    asked = _asked(args)
    num = args.num or len(asked)
    check_method(args)
    engine = load_engine(args, min(args.max_batch, num))  # the window is chosen for as many as really run at once
    requests = [request_of(args, seed=args.seed + i, **asked[i % len(asked)]) for i in range(num)]
    settings = run_settings(args, engine.check(requests[0]))
    with if_stopped(lambda: images_told(args.out, num)):
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
        settings[name] = {"file": str(path.resolve()), "sha256": file_fingerprint(path)}

    shown = known.fitted(size)
    before = [("before", to_pil(shown.image)), ("kept", _kept(shown.image, first.known.mask))]

    def pasted(output: Output) -> torch.Tensor:
        return shown.pasted(output.image, output.request.known.mask)

    finish = pasted if args.paste else attrgetter("image")
    with if_stopped(lambda: images_told(args.out, args.num)):
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
