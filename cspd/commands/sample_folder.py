"""Sampling into a folder: PNGs, a labelled grid and a JSON record; a run that was cut off goes on where it was."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from cspd.engine import Engine
from cspd.evaluation.images import GRID, HEATMAP, OVERVIEWS
from cspd.lookup import method_of
from cspd.plots import grid, heat_grid, to_pil
from cspd.records import write_png
from cspd.sequence import Request
from cspd.store import Store, differences, kept_window
from cspd.summary import summary_of

SCHEMA = "cspd.samples/1"
RECORD = "samples.json"
PICTURES = "[0-9]*_label*_seed*.png"
SAVE_SECONDS = 30  # between records of a long run; one that is interrupted is recorded too
GRID_LIMIT = 400  # images in the grid, at most


def sample_to_folder(
    engine: Engine,
    requests: Sequence[Request],
    out: Path,
    settings: dict,
    *,
    progress: bool = True,
    overwrite: bool = False,
    heatmap: bool = False,
) -> dict:
    """Generates `requests` into `out` and returns the record, which is also written to samples.json.

    Images that an earlier run with the same settings and requests left there are kept and not made again.

    Args:
        requests: of one method and its settings, each with its label and seed.
        settings: what the images depend on beside the requests (checkpoint, precision); kept in the record.
        heatmap: also write heatmap.png; images kept from a run without it are blank there.

    Raises:
        ValueError: a bad request, or `out` holds another run and `overwrite` is off.
    """
    store = _store(out)
    record = {"schema": SCHEMA, "settings": settings, "requests": len(requests), "images": []}
    names = [f"{i:05d}_label{r.label}_seed{r.seed}.png" for i, r in enumerate(requests)]
    requests = _begin(engine, requests, store, record, names, overwrite)
    done = {image["index"] for image in record["images"]}
    todo = [i for i in range(len(requests)) if i not in done]

    totals: dict[str, list] = {}
    start, saved = time.perf_counter(), time.perf_counter()
    try:
        for k, output in engine.stream([requests[i] for i in todo], progress):
            index = todo[k]
            write_png(out / names[index], to_pil(output.image))
            entry = {"index": index, "file": names[index], "request": output.request.to_dict()}
            stats = output.stats.to_dict()
            for name in ("by_lag", "by_step", "by_rank"):  # long, and kept as sums
                totals[name] = _add(totals.get(name), stats.pop(name))
            if heatmap:
                entry["heat"] = [None if math.isnan(value) else value for value in output.heat.tolist()]
            record["images"].append(entry | {"stats": stats})
            if time.perf_counter() - saved > SAVE_SECONDS:
                store.save(record)
                saved = time.perf_counter()
    finally:
        store.save(record)
    record["images"].sort(key=lambda image: image["index"])
    record["summary"] = summary_of(
        [image["stats"] for image in record["images"]], len(todo), time.perf_counter() - start
    )
    record["summary"]["window"] = requests[0].window
    record["summary"]["judged_and_accepted"] = totals  # of the images of this run
    store.save(record)

    _write_overviews(out, record, requests, heatmap)
    return record


def _store(out: Path) -> Store:
    parts = {"settings": dict, "images": list}
    return Store(out, RECORD, SCHEMA, parts, items=PICTURES, reports=OVERVIEWS, progress=("images", "summary"))


def _begin(
    engine: Engine, requests: Sequence[Request], store: Store, record: dict, names: Sequence[str], overwrite: bool
) -> list[Request]:
    """The requests as they run. The folder is this run's then, and `record` has the images that are there."""
    requests = [engine.check(request) for request in requests]
    earlier = None if overwrite else store.earlier(record)
    images = earlier["images"] if earlier else []
    for image in images:  # the first that differs is named: mostly all differ alike
        store.refuse(differences(image["request"], requests[image["index"]].to_dict()))
    settings = images[0]["request"] if images else None
    requests = [engine.resolve(r.but(window=kept_window(r.window, settings))) for r in requests]
    if overwrite:
        store.clear()
    record["images"] = [image for image in images if (store.folder / names[image["index"]]).is_file()]
    store.claim(record)  # before the first picture
    store.save(record)
    return requests


def _write_overviews(out: Path, record: dict, requests: Sequence[Request], heatmap: bool) -> None:
    """The grid of the first images and, if asked for, what their tokens cost."""
    shown = record["images"][:GRID_LIMIT]
    columns = next((n for n in (10, 8) if len(shown) % n == 0), min(10, len(shown)))
    pictures = []
    for image in shown:
        with Image.open(out / image["file"]) as picture:
            pictures.append(picture.convert("RGB"))
    captions = [str(request.label) for request in requests[:GRID_LIMIT]]
    write_png(out / GRID, grid(pictures, captions, columns))
    if heatmap:
        heat = [image.get("heat") for image in shown]
        accepted = method_of(requests[0]).heat == "accepted"
        write_png(out / HEATMAP, heat_grid(heat, pictures[0].size, captions, columns, accepted))


def _add(total: list | None, counts: list) -> list:
    """Elementwise sums of [judged, accepted]; counts of other lengths, from other settings, are padded."""
    if total is None:
        return counts
    return [[a + b for a, b in itertools.zip_longest(*pair, fillvalue=0)] for pair in zip(total, counts)]
