"""Sampling into a folder: PNGs, a labelled grid and a JSON record; a run that was cut off goes on where it was."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from cspd.engine import Engine
from cspd.plots import grid, to_pil
from cspd.sequence import PHASES, Request

SCHEMA = "cspd.samples/1"
RECORD = "samples.json"
SAVE_SECONDS = 30  # between records of a long run; one that is interrupted is recorded too
GRID_LIMIT = 400  # images in the grid, at most


def write_json(path: Path, content: dict) -> None:
    """Writes atomically, so that a run cut off leaves the old file or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def sample_to_folder(
    engine: Engine,
    requests: Sequence[Request],
    out: Path,
    settings: dict,
    *,
    progress: bool = True,
    overwrite: bool = False,
) -> dict:
    """Generates `requests` into `out` and returns the record, which is also written to samples.json.

    Images that an earlier run with the same settings and requests left there are kept and not made again.

    Args:
        settings: what the images depend on beside the requests (checkpoint, precision); kept in the record.

    Raises:
        ValueError: a bad request, or `out` holds another run and `overwrite` is off.
    """
    requests = [engine.resolve(request) for request in requests]
    names = [f"{i:05d}_label{r.label}_seed{r.seed}.png" for i, r in enumerate(requests)]
    record = {"schema": SCHEMA, "settings": settings, "requests": len(requests), "images": []}
    out.mkdir(parents=True, exist_ok=True)
    if overwrite:
        for path in (*out.glob("[0-9]*_label*_seed*.png"), out / RECORD):
            path.unlink(missing_ok=True)
    if (out / RECORD).exists():
        record = _resume(out, record, requests, names)
    write_json(out / RECORD, record)  # claims the folder before the first picture
    done = {image["index"] for image in record["images"]}
    todo = [i for i in range(len(requests)) if i not in done]

    start, saved = time.perf_counter(), time.perf_counter()
    try:
        for k, output in engine.stream([requests[i] for i in todo], progress):
            index = todo[k]
            to_pil(output.image).save(out / names[index])
            entry = {"index": index, "file": names[index], "request": dataclasses.asdict(output.request)}
            record["images"].append(entry | {"stats": output.stats.to_dict()})
            if time.perf_counter() - saved > SAVE_SECONDS:
                write_json(out / RECORD, record)
                saved = time.perf_counter()
    finally:
        write_json(out / RECORD, record)
    record["images"].sort(key=lambda image: image["index"])
    record["summary"] = _summary(record["images"], len(todo), time.perf_counter() - start)
    write_json(out / RECORD, record)

    shown = list(range(len(requests)))[:GRID_LIMIT]
    columns = next((n for n in (10, 8) if len(shown) % n == 0), min(10, len(shown)))
    pictures = []
    for i in shown:
        with Image.open(out / names[i]) as picture:
            pictures.append(picture.convert("RGB"))
    grid(pictures, [str(requests[i].label) for i in shown], columns).save(out / "grid.png")
    return record


def _resume(out: Path, fresh: dict, requests: Sequence[Request], names: list[str]) -> dict:
    """The record of an earlier, equal run, without the images that are gone."""
    try:
        old = json.loads((out / RECORD).read_text())
        same = (old["schema"], old["settings"], old["requests"]) == (SCHEMA, fresh["settings"], len(requests))
        same = same and all(image["request"] == dataclasses.asdict(requests[image["index"]]) for image in old["images"])
    except (KeyError, IndexError, TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(f"{out} holds another run: give another --out, or --overwrite to replace it")
    kept = [image for image in old["images"] if (out / names[image["index"]]).is_file()]
    return fresh | {"images": kept}


def _summary(images: list[dict], made: int, seconds: float) -> dict:
    """Means over the images, and the speed of the `made` ones of this run."""
    stats = [image["stats"] for image in images]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    counts = ("iterations", "backbone_calls", "head_calls", "head_evaluations")
    summary = {"images_made": made, "seconds": seconds, "images_per_second": made / seconds}
    summary |= {f"{name}_per_image": mean([s[name] for s in stats]) for name in counts}
    return summary | {"seconds_by_phase": {p: mean([s["seconds"][p] for s in stats]) for p in PHASES}}
