"""Sampling into a folder: PNGs, a labelled grid and a JSON record; a run that was cut off goes on where it was."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from cspd.engine import Engine
from cspd.plots import grid, heat_grid, to_pil
from cspd.records import differences, earlier_record, make_folder, refuse_other, write_json
from cspd.sequence import PHASES, Request

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
        settings: what the images depend on beside the requests (checkpoint, precision); kept in the record.
        heatmap: also write heatmap.png; images kept from a run without it are blank there.

    Raises:
        ValueError: a bad request, or `out` holds another run and `overwrite` is off.
    """
    requests = [
        engine.resolve(request) for request in (requests if overwrite else _same_windows(engine, out, requests))
    ]
    names = [f"{i:05d}_label{r.label}_seed{r.seed}.png" for i, r in enumerate(requests)]
    record = {"schema": SCHEMA, "settings": settings, "requests": len(requests), "images": []}
    make_folder(out)
    if overwrite:
        for path in (*out.glob(PICTURES), *(out / name for name in (RECORD, "grid.png", "heatmap.png"))):
            path.unlink(missing_ok=True)
    earlier = earlier_record(out / RECORD, SCHEMA, PICTURES, {"settings": dict, "images": list})
    if earlier:
        record["images"] = _kept(out, earlier, record, requests, names)
    write_json(out / RECORD, record)  # claims the folder before the first picture
    done = {image["index"] for image in record["images"]}
    todo = [i for i in range(len(requests)) if i not in done]

    totals: dict[str, list] = {}
    start, saved = time.perf_counter(), time.perf_counter()
    try:
        for k, output in engine.stream([requests[i] for i in todo], progress):
            index = todo[k]
            to_pil(output.image).save(out / names[index])
            entry = {"index": index, "file": names[index], "request": output.request.to_dict()}
            stats = output.stats.to_dict()
            for name in ("by_lag", "by_step", "by_rank"):  # long, and kept as sums
                totals[name] = _add(totals.get(name), stats.pop(name))
            if heatmap:
                entry["heat"] = [None if math.isnan(value) else value for value in output.heat.tolist()]
            record["images"].append(entry | {"stats": stats})
            if time.perf_counter() - saved > SAVE_SECONDS:
                write_json(out / RECORD, record)
                saved = time.perf_counter()
    finally:
        write_json(out / RECORD, record)
    record["images"].sort(key=lambda image: image["index"])
    record["summary"] = summary_of(
        [image["stats"] for image in record["images"]], len(todo), time.perf_counter() - start
    )
    record["summary"]["window"] = requests[0].window
    record["summary"]["judged_and_accepted"] = totals  # of the images of this run
    write_json(out / RECORD, record)

    shown = list(range(len(requests)))[:GRID_LIMIT]
    columns = next((n for n in (10, 8) if len(shown) % n == 0), min(10, len(shown)))
    pictures = []
    for i in shown:
        with Image.open(out / names[i]) as picture:
            pictures.append(picture.convert("RGB"))
    captions = [str(requests[i].label) for i in shown]
    grid(pictures, captions, columns).save(out / "grid.png")
    if heatmap:
        heat = [record["images"][i].get("heat") for i in shown]
        accepted = requests[0].method == "cspd" or requests[0].family == "VQ"
        heat_grid(heat, pictures[0].size, captions, columns, accepted).save(out / "heatmap.png")
    return record


def _add(total: list | None, counts: list) -> list:
    """Elementwise sums of [judged, accepted]; counts of other lengths, from other settings, are padded."""
    if total is None:
        return counts
    return [[a + b for a, b in itertools.zip_longest(*pair, fillvalue=0)] for pair in zip(total, counts)]


def _same_windows(engine: Engine, out: Path, requests: Sequence[Request]) -> list[Request]:
    """The requests; where the window is left open, with that of an earlier run: measuring again may choose another."""
    try:
        earlier = json.loads((out / RECORD).read_text())["images"]
        earlier = {image["index"]: image["request"] for image in earlier}
        window = next(iter(earlier.values()))["window"]
        kept = [dataclasses.replace(r, window=window) if r.window is None else r for r in requests]
        same = all(engine.resolve(kept[i]).to_dict() == request for i, request in earlier.items())
    except (OSError, LookupError, TypeError, ValueError, StopIteration):
        return list(requests)
    return kept if same else list(requests)


def _kept(out: Path, earlier: dict, record: dict, requests: Sequence[Request], names: list[str]) -> list[dict]:
    """What an earlier run's record has of the images that are still there. Raises ValueError if it was another run."""
    changes = differences(earlier | {"images": None, "summary": None}, record | {"images": None})
    for image in earlier["images"]:  # those of the first that differs: mostly all differ alike
        if not changes:
            changes = differences(image["request"], requests[image["index"]].to_dict())
    refuse_other(out, changes)
    return [image for image in earlier["images"] if (out / names[image["index"]]).is_file()]


def summary_of(stats: Sequence[dict], made: int, seconds: float) -> dict:
    """Means of images' statistics (`RoundStats.to_dict`), and the speed of the `made` ones of this run."""

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    counts = ("iterations", "backbone_calls", "head_calls", "head_evaluations", "draft_backbone_calls", "bound")
    summary = {
        "guarantee": stats[0]["guarantee"],
        "images_made": made,
        "seconds": seconds,
        "images_per_second": made / seconds,
    }
    summary |= {f"{name}_per_image": mean([s[name] for s in stats]) for name in counts}
    if stats[0]["step_compression"] is not None:
        summary["step_compression"] = mean([s["step_compression"] for s in stats])
        rounds: dict[int, int] = {}
        for n, count in (pair for s in stats for pair in s["committed"].items()):
            rounds[int(n)] = rounds.get(int(n), 0) + count
        summary["rounds_by_codes_committed"] = dict(sorted(rounds.items()))
        bounds = [s["bound"] for s in stats]
        summary["bound_standard_error"] = statistics.stdev(bounds) / len(bounds) ** 0.5 if len(bounds) > 1 else None
    alphas = [s["alpha"] for s in stats if s["alpha"] is not None]
    summary |= {"alpha": mean(alphas) if alphas else None}
    summary["head_calls_per_token"] = mean([s["head_calls_per_token"] for s in stats])
    return summary | {"seconds_by_phase": {p: mean([s["seconds"][p] for s in stats]) for p in PHASES}}
