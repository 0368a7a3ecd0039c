"""The commands that generate images, `cspd sample`, `cspd edit` and `cspd serve`, and the folder of the images."""

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
from cspd.method import Prepared, as_it_is
from cspd.plots import grid, token_cost_grid
from cspd.request import Inpainting, Output, Request, Resized, cropping, placed, png_of, to_pil
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
    requests: Sequence[Request | Prepared],
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
    checked = [engine.checked(request) for request in requests]
    names = [f"{i:05d}_{_subject(each.request)}_seed{each.request.seed}.png" for i, each in enumerate(checked)]
    record = {"schema": SCHEMA, "settings": settings, "requests": len(requests)}
    overviews = OVERVIEWS if heatmap else (GRID,)
    with Store(out, RECORD, SCHEMA, SHAPE, ("settings", "requests")) as store:
        earlier = store.claim(record, [*names, *overviews, JOURNAL], overwrite)
        existing = _existing(store, earlier, names) if earlier else {}
        prepared = _prepared(engine, checked, names, store, existing)
        first = prepared[0].request
        missing = set(missing_files(out, names, lambda name: _is_whole(out / name, existing.get(name))))
        todo = [index for index, name in enumerate(names) if name in missing]
        record["images"] = [existing[name] for name in names if name not in missing]
        store.begin(record)
        (out / JOURNAL).unlink(missing_ok=True)  # the record has its images

        start = time.perf_counter()
        captured = engine.graphs.seconds
        generated, totals, outside = _sample(engine, prepared, out, names, todo, progress, heatmap, finish)
        seconds = time.perf_counter() - start
        images = sorted([*record["images"], *generated], key=lambda image: image["index"])
        record["images"] = images
        record["summary"] = summary_of([image["stats"] for image in images], len(generated), seconds)
        record["summary"]["window"] = first.window
        record["summary"]["judged_and_accepted"] = totals  # of the images of this run
        store.save(record)
        (out / JOURNAL).unlink(missing_ok=True)
        _write_overviews(engine, out, names, record, prepared, heatmap, before)
        if speed and generated:  # nothing is lost if it is interrupted here
            seconds -= engine.graphs.seconds - captured  # once for all runs of these shapes, baseline ones too
            rounds = seconds - outside - _decoding(engine, generated)
            record["summary"] |= against_plain(engine, first, len(generated), seconds, rounds)
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


def _prepared(
    engine: Engine, checked: Sequence[Prepared], names: Sequence[str], store: Store, existing: Mapping[str, dict]
) -> list[Prepared]:
    """The requests, ready to run. Raises ValueError if an existing image has another request."""
    for name, each in zip(names, checked):
        if name in existing:
            store.refuse(differences(existing[name]["request"], each.request.to_dict()))
    if existing:  # the earlier run's decisions hold, such as its window
        earlier = next(iter(existing.values()))["request"]
        decided = [each.request.but(**earlier_choices(each.request.settings, earlier)) for each in checked]
        checked = [engine.checked(request) for request in decided]
    return [engine.prepare(each) for each in checked]


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
    requests: Sequence[Prepared],
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
    prepared: Sequence[Prepared],
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
    captions = [engine.name_of(prepared[entry["index"]].request) for entry in entries]
    all_images = [image for _, image in before] + images
    all_captions = [caption for caption, _ in before] + captions
    write_png(out / GRID, grid(all_images, all_captions, columns))
    if heatmap:
        token_cost = [entry.get("token_cost", entry.get("heat")) for entry in entries]
        accepted = prepared[0].method.token_cost == "accepted"
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
    engine = load_engine(args, min(args.max_batch, num))  # the window is chosen for the images that really run at once
    requests = [request_of(args, seed=args.seed + i, **asked[i % len(asked)]) for i in range(num)]
    checked = [engine.checked(request) for request in requests]
    settings = run_settings(args, checked[0].request)
    with if_stopped(lambda: images_told(args.out, num)):
        record = sample_to_folder(
            engine, checked, args.out, settings, overwrite=args.overwrite, heatmap=args.heatmap, speed=True
        )
    tell(engine, checked[0], record, args.out, args.heatmap)


def _asked(args: argparse.Namespace) -> list[dict]:
    """The classes or prompts of requests, which cycle. Raises ValueError, OSError."""
    negative = {"negative_prompt": args.negative_prompt}
    if args.prompt is None and args.prompts is None:
        return [{"label": label, **negative} for label in args.labels]
    prompts = [args.prompt] if args.prompts is None else read_prompts(args.prompts)
    return [{"label": None, "prompt": prompt, **negative} for prompt in prompts]


def tell(engine: Engine, checked: Prepared, record: dict, out: Path, heatmap: bool) -> None:
    """Prints the costs of the images in a folder, generated by requests like this one, and the folder's files."""
    summary, num = record["summary"], record["requests"]
    generated = summary["images_made"]
    if generated:
        speed = f"{summary['seconds']:.1f} s: {summary['images_per_second']:.2f} images/s"
        print(f"{generated} image{'s' if generated > 1 else ''} in {speed}")
    else:
        print(f"all {num} images were there already")
    _tell_cost(summary)
    if summary["window"] is not None and checked.method.resolve is not as_it_is:
        why = engine.runners[checked.method.family].tuning.why(checked.request, engine.num_slots)
        print(f"window {summary['window']}: {why}")
    print(f"guarantee: {summary['guarantee']}")
    if summary["alpha"] is not None:
        print(f"{summary['alpha']:.1%} of the drafts were accepted")
    for title, value, meaning in measured_lines(summary):
        print(f"{title} {value} {meaning}")
    if heatmap:
        print(f"wrote {out / HEATMAP} (what each token cost)")
    pngs = f"{num} PNG{'s' if num > 1 else ''}"
    print(f"wrote {out / GRID} (all images), {out / RECORD} (settings, statistics), {pngs}")
    line = speed_line(summary, engine.num_slots)
    if line:
        print(line)


def _tell_cost(summary: dict) -> None:
    """Prints the costs of an image, and for VQ models the bound of its distance from the target's distribution."""
    seconds = summary["seconds_by_phase"]
    total = sum(seconds.values()) or 1
    time = "time: " + ", ".join(f"{name} {spent / total:.0%}" for name, spent in seconds.items())
    backbone_calls = summary["backbone_calls_per_image"]
    if "step_compression" not in summary:
        lazy_calls = summary[f"{LAZY}_per_image"]
        lazy = f" ({lazy_calls:.0f} lazy)" if lazy_calls else ""
        iterations = f"{summary['iterations_per_image']:.0f} iterations, {backbone_calls:.0f} backbone calls{lazy}"
        head_calls = f"{summary['head_calls_per_image']:.0f} sequential head calls"
        print(f"per image: {iterations}, {head_calls} ({summary['head_calls_per_token']:.1f} per token); {time}")
        return
    print(
        f"per image: {backbone_calls:.1f} target forward passes, {summary['step_compression']:.2f} tokens each; {time}"
    )
    if summary["bound_per_image"] > 0:
        bound, error = min(summary["bound_per_image"], 1), summary["bound_standard_error"]
        spread = "" if error is None else f" +- {error:.3f}"
        print(f"total variation from the target, of an image's codes: at most {bound:.3f}{spread} (docs/bounds.md)")


# `cspd edit`: a part of an image is given, and the rest is generated to match it.

GREY = 0.5  # the generated part of the given image in grid.png


def run_edit(args: argparse.Namespace) -> None:
    check_method(args)
    given = _given(args) if args.place is None else None  # before loading: an image may be unreadable
    engine = load_engine(args, min(args.max_batch, args.num))
    asked = request_of(args, args.label, args.seed, prompt=args.prompt, negative_prompt=args.negative_prompt)
    runner = engine.runners[engine.checked(asked).method.family]
    size = runner.image_size
    known = given or placed(args.image, args.place, size)
    resized = cropping(known.image, size)
    if resized:
        print(f"{args.image}: {resized}")

    requests = [asked.but(seed=args.seed + i, known=known) for i in range(args.num)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Resized)  # printed above
        checked = [engine.checked(request) for request in requests]
    first = checked[0].request
    if first.known is None:
        raise ValueError(
            "no token is kept: a patch of pixels is, where none of them is made anew; black is kept in a mask, and"
            " `cspd sample` makes whole images"
        )
    settings = run_settings(args, first) | {"paste": args.paste, "place": args.place, "keep": args.keep}
    for name in ("image", "mask"):
        path = getattr(args, name)
        if path:
            settings[name] = {"file": str(path.resolve()), "sha256": file_fingerprint(path)}

    shown = known.fitted(size)
    before = [("before", to_pil(shown.image)), ("kept", _kept(shown.image, first.known.mask))]

    def pasted(output: Output) -> torch.Tensor:
        return shown.pasted(output.image, output.request.known.mask)

    with if_stopped(lambda: images_told(args.out, args.num)):
        record = sample_to_folder(
            engine,
            checked,
            args.out,
            settings,
            overwrite=args.overwrite,
            heatmap=args.heatmap,
            before=before,
            finish=pasted if args.paste else attrgetter("image"),
            speed=True,
        )
    print(f"{first.known.num_generated} of {runner.seq_len} tokens of the first picture were made anew")
    tell(engine, checked[0], record, args.out, args.heatmap)


def _given(args: argparse.Namespace) -> Inpainting:
    """The given image, and the mask of the part to generate."""
    return Inpainting.of(args.image, args.mask if args.keep is None else 1 - args.keep)


def _kept(image: torch.Tensor, generated: torch.Tensor) -> Image.Image:
    """An image [3, H, W], grey at generated tokens, bool [L]."""
    side = round(len(generated) ** 0.5)
    tokens = generated.view(1, 1, side, side).float()
    pixels = functional.interpolate(tokens, image.shape[1:])[0]
    return to_pil(image.lerp(torch.full_like(image, GREY), pixels))


# `cspd serve`: a web page whose users share the engines.


def run_serve(args: argparse.Namespace) -> None:
    try:
        from cspd.serving.app import Server, make_app
    except ModuleNotFoundError as missing:
        raise ValueError(f"cspd serve needs {missing.name}: pip install 'cspd[serve]'") from None
    names = list(dict.fromkeys(args.checkpoint or bundled_here()))
    for name in names:
        checkpoint_files(name)  # raises before others are loaded
    check_of_one(names, args.arch, args.vae, args.draft_checkpoint, args.eagle, args.text_encoder)

    with listening(args.host, args.port) as listener:
        engines = {}
        for name in names:
            own = argparse.Namespace(**vars(args) | {"checkpoint": name})
            engines[name] = load_engine(own, args.max_batch)
        warnings.simplefilter("ignore", Resized)  # the page shows it
        host, port = listener.getsockname()[:2]
        is_local = ipaddress.ip_address(host).is_loopback
        app = make_app(
            engines,
            args.max_requests,
            args.max_per_visitor,
            hosts=[args.host, host, *args.allowed_hosts],
            origins=args.allowed_hosts,
            any_address=not is_local,
            key=args.api_key,
        )
        if not is_local and args.api_key is None:
            warning = f"anybody who can reach {host}, port {port}, can use this page: give --api-key, or set {API_KEY}"
            print(f"cspd: warning: {warning}", file=sys.stderr)
        shown = f"[{host}]" if ":" in host else host
        asks = "" if args.api_key is None else "; the page asks for the API key"
        print(f"http://{shown}:{port} serves {', '.join(names)}{asks}; Ctrl-C ends it", flush=True)
        Server(app).run(sockets=[listener])


def listening(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(
            f"{host}:{port} cannot be listened on ({error.strerror}): give another --port or --host"
        ) from None
