"""Sampling into a folder: PNGs, a labelled grid and a JSON record; a run that was cut off goes on where it was."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import math
import re
import time
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from pathlib import Path

from PIL import Image
from torch import Tensor

from cspd.engine import Engine
from cspd.evaluation.images import GRID, HEATMAP, OVERVIEWS, ImageFolder
from cspd.items import tell_damaged
from cspd.lookup import method_of
from cspd.pixels import to_pil
from cspd.plots import grid, heat_grid
from cspd.records import MAYBE, append_json, misfit, parse_json, png_of, read_json, read_text, write_bytes, write_png
from cspd.sequence import Output, Request
from cspd.speed import against_plain
from cspd.store import Store, differences, kept_choices
from cspd.summary import STATS, summary_of

SCHEMA = "cspd.samples/1"
RECORD = "samples.json"
JOURNAL = "samples.journal"  # a line of JSON for each image since the record was written
NAMES = rf"\d+_(label(\d+|none)|text[a-z0-9-]*)_seed\d+\.png|{'|'.join(map(re.escape, (*OVERVIEWS, JOURNAL)))}"
IMAGE = {"index": int, "request": dict, "stats": STATS, "heat?": [MAYBE]}
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


def prompts_of(folder: ImageFolder) -> list[str] | None:
    """The texts of a folder's images, as the record of the run that made them has them; None where it has not."""
    try:
        record = read_json(folder.files[0].parent / RECORD)
    except (OSError, ValueError):
        return None
    if misfit(record, {"images": [{"file": str, "request": dict}]}):
        return None
    prompts = {image["file"]: image["request"].get("prompt") for image in record["images"]}
    found = [prompts.get(path.name) for path in folder.files]
    return None if None in found else found


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
            entry["heat"] = [None if math.isnan(value) else value for value in output.heat.tolist()]
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
        heat = [image.get("heat") for image in shown]
        accepted = method_of(requests[0]).heat == "accepted"
        write_png(out / HEATMAP, heat_grid(pictures, heat, captions, columns, accepted))


def _add(total: list | None, counts: list) -> list:
    """Elementwise sums of [judged, accepted]; counts of other lengths, from other settings, are padded."""
    if total is None:
        return counts
    return [[a + b for a, b in itertools.zip_longest(*pair, fillvalue=0)] for pair in zip(total, counts)]
