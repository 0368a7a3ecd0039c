"""The commands that generate images: `cspd sample`, `cspd edit` and `cspd serve`; and the folder of the images."""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import ipaddress
import itertools
import json
import math
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from cspd.checkpoints import check_of_one, checkpoint_files, run_settings
from cspd.cli.options import all_classes, asked_prompts, bundled_here, check_method, load_engine, on_ray, request_of
from cspd.device import Load, crowded
from cspd.engine import Engine
from cspd.evaluation.images import GRID, HEATMAP, LIST, OVERVIEWS, RECORD, file_name, subject_of
from cspd.evaluation.run import (
    AUDITED,
    Part,
    Shards,
    Task,
    audit,
    finish,
    finish_part,
    own_device,
    part_of,
    sample_shards,
    shards_store,
)
from cspd.files import Remote, append_json, misfit, ordinary, parse_json, place_of, without_none, write_bytes
from cspd.inpainting import Inpainting, Resized, cropping, placed
from cspd.method import Prepared
from cspd.origin import file_fingerprint
from cspd.pixels import png_of, to_pil
from cspd.plots import grid, token_cost_grid, usual_columns
from cspd.request import Output, Request
from cspd.runs import Store, differences, earlier_choices, files_told, missing_files, write_png
from cspd.speed import PlainRounds, against_plain, is_plain
from cspd.summary import LAZY, OPTIONAL, SPEED, STATS, measured_lines, speed_line, summary_of
from cspd.terminal import API_KEY, if_stopped, install, say

# Sampling into a folder: PNGs, a grid with captions and a JSON record. An interrupted run resumes.

SCHEMA = "cspd.samples/1"
JOURNAL = "samples.journal"  # one line of JSON for each image since the record was written
COSTS = [OPTIONAL]  # of each token of an image
IMAGE = {  # in the record or the journal; older versions called the costs heat
    "index": int,
    "sha256?": str,
    "request": dict,
    "stats": STATS,
    "token_cost?": COSTS,
    "heat?": COSTS,
}
SHAPE = {"settings": dict, "images": [IMAGE], "summary?": dict}  # of the record
GRID_LIMIT = 400  # maximum number of images in the grid
DRAFT_COUNTS = ("by_lag", "by_step", "by_rank")  # statistics of which the record has only the sums: they are long


def progress_message(out: Path, num: int) -> str:
    """Progress message for an interrupted run: how many of the `num` images are in the folder."""
    return files_told(out, "*_seed*.png", num, "images")


def sample_to_folder(
    engine: Engine,
    requests: Sequence[Request | Prepared],
    out: Path,
    settings: dict,
    *,
    overwrite: bool = False,
    heatmap: bool = False,
    before: Sequence[tuple[str, Image.Image]] = (),
    finish: Callable[[Output], Tensor] = attrgetter("image"),
) -> dict:
    """Generates `requests` into the folder `out` and returns the record, which is also written to samples.json.

    If an earlier run with the same settings and requests is there, only its missing and damaged images are generated.
    The record also says how fast baseline sampling would have been, see `cspd.speed`.

    Args:
        requests: one method with the same settings, each request with its own seed and class or prompt.
        settings: whatever else the images depend on (checkpoint, precision); written to the record.
        heatmap: also write heatmap.png. It is blank for images of an earlier run without it.
        before: captions and images to show first in grid.png.
        finish: turns an output into the image to write, [3, H, W].

    Raises:
        ValueError: an invalid request, or as `Store.claim`.
    """
    checked = [engine.checked(request) for request in requests]
    names = [file_name(i, each.request) for i, each in enumerate(checked)]
    record: dict[str, Any] = {"schema": SCHEMA, "settings": settings, "requests": len(requests)}
    record["machine"] = engine.describe()
    overviews = OVERVIEWS if heatmap else (GRID,)
    journal = out / JOURNAL
    with Store(out, RECORD, SCHEMA, SHAPE, ("settings", "requests")) as store:
        # lock the folder and look for an earlier run; everything up to store.begin leaves its files as they are
        earlier = store.claim(record, [*names, *overviews, JOURNAL], overwrite)
        existing = _existing(journal, earlier, names) if earlier else {}
        prepared = _prepared(engine, checked, names, store, existing)
        missing = set(missing_files(out, names, lambda name: _is_whole(out / name, existing.get(name))))
        record["images"] = [existing[name] for name in names if name not in missing]
        store.begin(_without_nulls(record))
        journal.unlink(missing_ok=True)  # the record now has its images

        todo = {index: name for index, name in enumerate(names) if name in missing}
        resolved = prepared[0].request
        plain = PlainRounds(engine, resolved, len(todo)) if todo and not is_plain(resolved) else None
        new = _generate(engine, prepared, out, todo, heatmap, finish, plain)
        record["images"] = sorted([*record["images"], *new.entries], key=lambda entry: entry["index"])
        summary = _summary(engine, record["images"], new, resolved)
        if todo:
            summary |= _speed_of(new, resolved, plain)
        elif earlier:
            summary |= {name: earlier.get("summary", {}).get(name) for name in SPEED}
        record["summary"] = summary
        store.save(_without_nulls(record))
        journal.unlink(missing_ok=True)
        _write_overviews(engine, out, names, record, prepared, heatmap, before)
    return record


def _summary(engine: Engine, images: Sequence[dict], new: Generated, request: Request) -> dict:
    """The summary of a record's images, of which `new` were generated by this run."""
    num_new = len(new.entries)
    summary = summary_of([entry["stats"] for entry in images], num_new, new.seconds)
    summary["window"] = request.window
    summary |= audit(engine, new.audited, num_new)
    summary["judged_and_accepted"] = new.draft_counts
    return summary


def _speed_of(new: Generated, request: Request, plain: PlainRounds | None) -> dict:
    """The speed of new images beside that of baseline sampling."""
    # without the capture of CUDA graphs, which later runs of these shapes share
    seconds = new.seconds - new.capture_seconds
    rounds = seconds - new.seconds_between_rounds
    return against_plain(request, len(new.entries), seconds, rounds, plain)


def _without_nulls(record: dict) -> dict:
    """A record as it is written: without settings that were not given, and values that were not measured."""
    return json.loads(json.dumps(record), object_hook=without_none)


def _existing(journal: Path, record: dict, names: Sequence[str]) -> dict[str, dict]:
    """The entries of an earlier run's images by file name, from its record and from its journal."""
    entries = record["images"]
    if journal.exists():
        for line in ordinary(journal).read_text(encoding="utf-8", errors="replace").split("\n"):
            # a killed run may leave half a line: its image is generated again
            with contextlib.suppress(ValueError):
                entry = parse_json(line)
                if misfit(entry, IMAGE) is None:
                    entries.append(entry)
    return {names[entry["index"]]: entry for entry in entries if 0 <= entry["index"] < len(names)}


def _prepared(
    engine: Engine, checked: Sequence[Prepared], names: Sequence[str], store: Store, existing: Mapping[str, dict]
) -> list[Prepared]:
    """The requests, ready to run. Raises ValueError if an existing image is of another request."""
    for name, each in zip(names, checked):
        if name in existing:
            store.refuse(differences(existing[name]["request"], each.request.to_dict()))
    if existing:
        # keep the decisions of the earlier run, such as its window: the image of a seed depends on them
        earlier = next(iter(existing.values()))["request"]
        decided = []
        for each in checked:
            choices = earlier_choices(each.request.settings, earlier)
            decided.append(engine.checked(each.request.but(**choices)))
        checked = decided
    return engine.prepare_all(checked)


def _is_whole(path: Path, entry: dict | None) -> bool:
    """Whether a file has the digest of its entry. An entry of an older version without a digest gets the file's."""
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


class Generated(NamedTuple):
    """The new images of a run.

    Attributes:
        entries: of the record.
        draft_counts: [verified, accepted] drafts, summed over the images; each a list as in `RoundStats`.
        seconds: wall time, without that of `cspd.speed`. capture_seconds: the part spent capturing CUDA graphs.
        seconds_between_rounds: the part spent decoding and writing images while no round ran.
        audited: some of the finished images.
    """

    entries: list[dict]
    draft_counts: dict[str, list]
    seconds: float
    capture_seconds: float
    seconds_between_rounds: float
    audited: list[Output]


def _generate(
    engine: Engine,
    requests: Sequence[Prepared],
    out: Path,
    todo: Mapping[int, str],
    heatmap: bool,
    finish: Callable[[Output], Tensor],
    plain: PlainRounds | None,
) -> Generated:
    """Generates and writes the images `todo`, file names by index. `plain`: takes turns with their rounds."""
    entries: list[dict] = []
    draft_counts: dict[str, list] = {}
    audited = []
    writing = 0.0
    captured = engine.graphs.seconds
    start = time.perf_counter()
    order = list(todo)
    for k, output in engine.stream([requests[index] for index in order], True, plain):
        finished = time.perf_counter()
        index = order[k]
        stats = output.stats.to_dict()
        if k % AUDITED == 0:
            audited.append(output)
        # the long counts are summed over the images; everything else is recorded per image
        for name in DRAFT_COUNTS:
            counts = stats.pop(name)
            draft_counts[name] = _sum(draft_counts[name], counts) if name in draft_counts else counts
        content = png_of(to_pil(finish(output)), output.png_text())
        entry = {
            "index": index,
            "file": todo[index],
            "sha256": hashlib.sha256(content).hexdigest(),
            "request": output.request.to_dict(),
        }
        if heatmap:
            # JSON has no NaN
            entry["token_cost"] = [None if math.isnan(value) else value for value in output.token_cost.tolist()]
        entry["stats"] = stats
        entries.append(entry)
        # the journal comes first: a file without an entry would be generated again
        append_json(out / JOURNAL, entry)
        write_bytes(out / todo[index], content)
        writing += time.perf_counter() - finished
    seconds = time.perf_counter() - start
    if plain is not None:
        seconds -= plain.seconds

    # All images of a batch report the same seconds of decoding, so equal values count once. On a GPU, decoding overlaps
    # later rounds, except for the last batch.
    decoding = [entry["stats"]["seconds"]["decode"] for entry in entries]
    waiting = decoding[-1] if engine.device.type == "cuda" and decoding else sum(set(decoding))
    return Generated(entries, draft_counts, seconds, engine.graphs.seconds - captured, writing + waiting, audited)


def _sum(total: list[list], counts: list[list]) -> list[list]:
    """Elementwise sums of [verified, accepted]. Shorter lists, from other settings, are padded with 0."""
    sums = []
    for pair in zip(total, counts):
        sums.append([a + b for a, b in itertools.zip_longest(*pair, fillvalue=0)])
    return sums


def _write_overviews(
    engine: Engine,
    out: Path,
    names: Sequence[str],
    record: dict,
    prepared: Sequence[Prepared],
    heatmap: bool,
    before: Sequence[tuple[str, Image.Image]],
) -> None:
    """Writes the grid, which begins with the images `before`, and the map of token costs if asked for."""
    entries = record["images"][:GRID_LIMIT]
    images = []
    captions = []
    for entry in entries:
        index = entry["index"]
        with Image.open(out / names[index]) as image:
            images.append(image.convert("RGB"))
        captions.append(engine.name_of(prepared[index]))
    columns = usual_columns(len(before) + len(entries))
    all_images = [image for _, image in before] + images
    all_captions = [caption for caption, _ in before] + captions
    write_png(out / GRID, grid(all_images, all_captions, columns))
    if heatmap:
        token_cost = [entry.get("token_cost", entry.get("heat")) for entry in entries]
        accepted = prepared[0].method.token_cost == "accepted"
        write_png(out / HEATMAP, token_cost_grid(images, token_cost, captions, columns, accepted))


# `cspd sample`


def run_sample(args: argparse.Namespace) -> None:
    args.out = place_of(str(args.out))
    asked = _asked(args)
    check_method(args)
    part = part_of(args.shard)
    if args.shard or args.ray or part.count > 1 or isinstance(args.out, Remote):
        _sample_shards(args, asked, part)
        return
    engine = _engine_for(args, asked)
    asked = asked or _all_classes(args, engine)
    num = args.num or len(asked)
    requests = [request_of(args, seed=args.seed + i, **asked[i % len(asked)]) for i in range(num)]
    checked = [engine.checked(request) for request in requests]
    settings = run_settings(args, checked[0].request)
    with if_stopped(lambda: progress_message(args.out, num)):
        record = sample_to_folder(engine, checked, args.out, settings, overwrite=args.overwrite, heatmap=args.heatmap)
    tell(engine, checked[0], record, args.out, args.heatmap)


def _engine_for(args: argparse.Namespace, asked: Sequence[dict]) -> Engine:
    """The engine, with no more slots than images: the window of `speculative` is chosen for their number."""
    others = Load()
    engine = load_engine(args, min(args.max_batch, args.num or len(asked) or args.max_batch))
    hint = crowded(others.cores(), os.cpu_count() or 1, torch.get_num_threads())
    if hint and engine.device.type == "cpu":
        say(hint)
    return engine


def _sample_shards(args: argparse.Namespace, asked: Sequence[dict], part: Part) -> None:
    """Makes a part of the images, as files that any number of machines can write."""
    if args.heatmap:
        raise ValueError("--heatmap is of runs by one process: leave it out, or leave out --shard, --ray and torchrun")
    num = args.num or len(asked)

    def progress() -> str:
        return f"{Shards(args.out, num).num_written()} of {num} images are in {args.out}/"

    with if_stopped(progress), shards_store(args.out) as store:
        task_of = functools.partial(_task, asked=asked)
        summary: Any
        held: Store | None
        if args.ray:
            shards, summary = on_ray(args, task_of, num)
            held = finish(shards)
        else:
            args.device = own_device(args.device)
            task = task_of(args)
            num = num or len(task.subjects)
            shards, summary = sample_shards(task, num, store, part, overwrite=args.overwrite)
            store.release()
            held = finish_part(shards, part) if summary else None
            if held is None:
                print(f"{progress()}; the part that writes the last of them lists them all")
                return
        with held:
            _tell_shards(shards, summary)


def _task(args: argparse.Namespace, asked: Sequence[dict]) -> Task:
    engine = _engine_for(args, asked)
    requests = [request_of(args, seed=args.seed, **each) for each in asked or _all_classes(args, engine)]
    subjects = [subject_of(engine.check(request)) for request in requests]
    return Task(engine, requests[0], subjects, run_settings(args, engine.check(requests[0])))


def _tell_shards(shards: Shards, summary: dict) -> None:
    """Prints the costs of a complete run in shards, and its files."""
    _print_costs(summary, shards.num)
    if summary.get("restarted"):
        print(f"{summary['restarted']} workers of Ray died and were replaced")
    print(f"wrote {shards.folder / LIST} (settings, digests), {shards.folder / GRID}; shards of images: {shards.count}")
    print(f"for PNGs, an .npz or WebDataset tars: cspd merge {shards.folder}")


def _asked(args: argparse.Namespace) -> list[dict]:
    """The classes or prompts, which the images cycle through; empty: all classes. Raises ValueError or OSError."""
    negative = {"negative_prompt": args.negative_prompt}
    prompts = asked_prompts(args.prompts, args.caption_seed)
    if args.prompt is not None:
        prompts = [args.prompt]
    if prompts is None:
        return [{"label": label, **negative} for label in args.labels or ()]
    return [{"label": None, "prompt": prompt, **negative} for prompt in prompts]


def _all_classes(args: argparse.Namespace, engine: Engine) -> list[dict]:
    return [{"label": label, "negative_prompt": args.negative_prompt} for label in all_classes(engine)]


def tell(engine: Engine, checked: Prepared, record: dict, out: Path, heatmap: bool) -> None:
    """Prints the costs of the images in a folder, the guarantee, and the files. `checked`: one of the requests."""
    summary = record["summary"]
    num = record["requests"]
    _print_costs(summary, num)
    if summary.get("plan"):
        print(f"plan: {summary['plan']}")
    # only methods that choose the window themselves can give a reason for it
    elif summary["window"] is not None and (checked.request.window is None or checked.method.name == "speculative"):
        why = checked.runner.tuning.why(checked.request, engine.num_slots)
        print(f"window {summary['window']}: {why}")
    if heatmap:
        print(f"wrote {out / HEATMAP} (the cost of each token)")
    pngs = "1 PNG" if num == 1 else f"{num} PNGs"
    print(f"wrote {out / GRID} (all images), {out / RECORD} (settings, statistics), {pngs}")
    line = speed_line(summary, min(engine.num_slots, summary["images_made"] or num))
    if line:
        print(line)


def _print_costs(summary: dict, num: int) -> None:
    generated = summary["images_made"]
    if generated:
        images = "1 image" if generated == 1 else f"{generated} images"
        print(f"{images} in {summary['seconds']:.1f} s: {summary['images_per_second']:.2f} images/s")
    else:
        print(f"all {num} images were there already")
    if "step_compression" in summary:
        _print_vq_cost(summary)
    else:
        _print_mar_cost(summary)
    print(f"guarantee: {summary['guarantee']}")
    if summary["alpha"] is not None:
        print(f"{summary['alpha']:.1%} of the drafts were accepted")
    for title, value, meaning in measured_lines(summary):
        print(f"{title} {value} {meaning}")


def _print_mar_cost(summary: dict) -> None:
    iterations = f"{summary['iterations_per_image']:.0f} iterations"
    backbone_calls = f"{summary['backbone_calls_per_image']:.0f} backbone calls"
    lazy_calls = summary[f"{LAZY}_per_image"]
    if lazy_calls:
        backbone_calls += f" ({lazy_calls:.0f} lazy)"
    per_token = f"{summary['head_calls_per_token']:.1f} per token"
    head_calls = f"{summary['head_calls_per_image']:.0f} sequential head calls ({per_token})"
    print(f"per image: {iterations}, {backbone_calls}, {head_calls}; {_phases_line(summary)}")


def _print_vq_cost(summary: dict) -> None:
    """Also prints the bound of the images' distance from the target's distribution."""
    passes = f"{summary['backbone_calls_per_image']:.1f} target forward passes"
    print(f"per image: {passes}, {summary['step_compression']:.2f} tokens each; {_phases_line(summary)}")
    if summary["bound_per_image"] > 0:
        bound = f"{min(summary['bound_per_image'], 1):.3f}"
        error = summary["bound_standard_error"]
        if error is not None:
            bound += f" +- {error:.3f}"
        print(
            f"total variation distance from the target, for the tokens of an image: at most {bound} (docs/exactness.md)"
        )


def _phases_line(summary: dict) -> str:
    """The fractions of the time that the phases take."""
    seconds = summary["seconds_by_phase"]
    total = sum(seconds.values()) or 1
    return "time: " + ", ".join(f"{name} {spent / total:.0%}" for name, spent in seconds.items())


# `cspd edit`: a part of an image is given, and the rest is generated to match it.

GREY = 0.5  # shade of the part to generate, in grid.png


def run_edit(args: argparse.Namespace) -> None:
    check_method(args)
    # Read the image before the models are loaded, in case it is unreadable. A box depends on the model's image size.
    given = None
    if args.place is None:
        given = Inpainting.of(args.image, args.mask if args.keep is None else 1 - args.keep)
    engine = load_engine(args, min(args.max_batch, args.num))
    asked = request_of(args, args.label, args.seed, prompt=args.prompt, negative_prompt=args.negative_prompt)
    runner = engine.checked(asked).runner
    size = runner.image_size
    known = given or placed(args.image, args.place, size)
    # a change of size is printed once, not as a warning of every request
    resized = cropping(known.image, size)
    if resized:
        print(f"{args.image}: {resized}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Resized)
        checked = [engine.checked(asked.but(seed=args.seed + i, known=known)) for i in range(args.num)]
    first = checked[0].request
    if first.known is None:
        raise ValueError(
            "no token would be kept: a token is kept only if its whole patch of pixels is. Keep a larger area (black in"
            " the mask), or use `cspd sample` to generate a whole image"
        )
    # the folder of another image, mask or way to paste is another run
    settings = run_settings(args, first) | {"paste": args.paste, "place": args.place, "keep": args.keep}
    for name in ("image", "mask"):
        path = getattr(args, name)
        if path:
            settings[name] = {"file": path.name, "sha256": file_fingerprint(path)}

    shown = known.fitted(size)
    before = [("before", to_pil(shown.image)), ("kept", _kept(shown.image, first.known.mask))]

    def pasted(output: Any) -> torch.Tensor:
        return shown.pasted(output.image, output.request.known.mask)

    with if_stopped(lambda: progress_message(args.out, args.num)):
        record = sample_to_folder(
            engine,
            checked,
            args.out,
            settings,
            overwrite=args.overwrite,
            heatmap=args.heatmap,
            before=before,
            finish=pasted if args.paste else attrgetter("image"),
        )
    print(f"{first.known.num_generated} of {runner.seq_len} tokens of the first image were regenerated")
    tell(engine, checked[0], record, args.out, args.heatmap)


def _kept(image: torch.Tensor, generated: Any) -> Image.Image:
    """An image [3, H, W] in grey at the generated tokens, bool [L]."""
    side = math.isqrt(len(generated))
    tokens = generated.view(1, 1, side, side).float()
    pixels = functional.interpolate(tokens, image.shape[1:])[0]
    return to_pil(image.lerp(torch.full_like(image, GREY), pixels))


# `cspd serve`: a web page whose clients share an engine.


def run_serve(args: argparse.Namespace) -> None:
    try:
        from cspd.serving.access import logging_requests
        from cspd.serving.app import Server, make_app
        from cspd.serving.gallery import Gallery
        from cspd.serving.loop import public_names
    except ModuleNotFoundError as missing:
        raise ValueError(f"cspd serve needs {missing.name}: {install('serve')}") from None
    names = list(dict.fromkeys(args.checkpoint or bundled_here()))
    for name in names:
        # raises on a missing file before any model is loaded
        checkpoint_files(name)
    check_of_one(names, args.arch, args.vae, args.draft_checkpoint, args.eagle, args.text_encoder)

    with listening(args.host, args.port) as listener:
        engine = load_engine(args, args.max_batch, public_names(names))
        # the page itself shows how an image is cropped and resized
        warnings.simplefilter("ignore", Resized)
        host, port = listener.getsockname()[:2]
        is_local = ipaddress.ip_address(host).is_loopback
        # clients see each other's pictures in the gallery: behind a proxy, or on a network, only if that is asked for
        out = args.out or Path("none" if args.allowed_hosts or not is_local else "pictures")
        app = make_app(
            engine,
            args.max_requests,
            args.max_per_visitor,
            args.calibrated_only,
            None if str(out) == "none" else Gallery(out),
            hosts=[args.host, host, *args.allowed_hosts],
            origins=args.allowed_hosts,
            any_address=not is_local,
            key=args.api_key,
        )
        if not is_local and args.api_key is None:
            print(
                f"cspd: warning: anybody who can reach {host}, port {port}, can use this page: give --api-key, or set"
                f" {API_KEY}",
                file=sys.stderr,
            )
        address = f"[{host}]" if ":" in host else host
        asks = "" if args.api_key is None else "; the page asks for the API key"
        print(f"http://{address}:{port} serves {', '.join(engine.runners)}{asks}; stop it with Ctrl-C", flush=True)
        with logging_requests():
            Server(app, args.trust_proxy).run(sockets=[listener])


def listening(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port} ({error.strerror}): give another --port or --host") from None
