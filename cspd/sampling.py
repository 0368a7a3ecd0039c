"""Sampling into a folder: PNGs, a labelled grid and a JSON record; a run that was cut off goes on where it was."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from cspd.engine import Engine
from cspd.plots import grid, heat_grid, to_pil
from cspd.sequence import PHASES, Request

SCHEMA = "cspd.samples/1"
RECORD = "samples.json"
SAVE_SECONDS = 30  # between records of a long run; one that is interrupted is recorded too
GRID_LIMIT = 400  # images in the grid, at most


@contextlib.contextmanager
def publishing(path: Path, new: bool = False) -> Iterator[Path]:
    """A file to write, of this process alone, that becomes `path` once it is whole, and is gone if it fails.

    Raises:
        FileExistsError: it was to be `new`, and another process was quicker.
    """
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        yield temporary
        if new:
            _link(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _link(old: Path, new: Path) -> None:
    try:
        os.link(old, new)
    except FileExistsError:
        raise
    except OSError:  # a file system without links: the next best
        os.replace(old, new)


def write_json(path: Path, content: dict, new: bool = False) -> None:
    """Writes as in `publishing`, so that a run cut off leaves the old file or the new one."""
    with publishing(path, new) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def differences(old: dict, new: dict, where: str = "") -> list[str]:
    """What differs between two nested settings, in words: ["request.cfg was 1.0, now 2.0"]."""
    found = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, now, place = old.get(key), new.get(key), f"{where}{key}"
        if isinstance(before, dict) and isinstance(now, dict):
            found += differences(before, now, f"{place}.")
        elif before != now:
            found.append(f"{place} was {_shown(before)}, now {_shown(now)}")
    return found


def _shown(value: object) -> str:
    text = "nothing" if value is None else "something" if isinstance(value, dict) else json.dumps(value)
    is_long = isinstance(value, list) and len(text) > 60  # of a path the end tells
    return f"{text[:40]} ... ({len(value)} of them)" if is_long else text


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
    out.mkdir(parents=True, exist_ok=True)
    if overwrite:
        for path in (
            *out.glob("[0-9]*_label*_seed*.png"),
            *(out / name for name in (RECORD, "grid.png", "heatmap.png")),
        ):
            path.unlink(missing_ok=True)
    if (out / RECORD).exists():
        record = _resume(out, record, requests, names)
    write_json(out / RECORD, record)  # claims the folder before the first picture
    done = {image["index"] for image in record["images"]}
    todo = [i for i in range(len(requests)) if i not in done]

    totals: dict[str, list] = {}
    start, saved = time.perf_counter(), time.perf_counter()
    try:
        for k, output in engine.stream([requests[i] for i in todo], progress):
            index = todo[k]
            to_pil(output.image).save(out / names[index])
            entry = {"index": index, "file": names[index], "request": dataclasses.asdict(output.request)}
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
        same = all(dataclasses.asdict(engine.resolve(kept[i])) == request for i, request in earlier.items())
    except (OSError, LookupError, TypeError, ValueError, StopIteration):
        return list(requests)
    return kept if same else list(requests)


def _resume(out: Path, fresh: dict, requests: Sequence[Request], names: list[str]) -> dict:
    """The record of an earlier, equal run, without the images that are gone."""
    try:
        old = json.loads((out / RECORD).read_text())
        changes = differences(old | {"images": None, "summary": None}, fresh | {"images": None})
        for image in old["images"]:  # those of the first that differs: mostly all differ alike
            changes = changes or differences(image["request"], dataclasses.asdict(requests[image["index"]]))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        changes = [f"its {RECORD} cannot be read"]
    if changes:
        raise ValueError(
            f"{out} holds another run ({'; '.join(changes)}): give its settings, another --out, or --overwrite to"
            " replace it"
        )
    kept = [image for image in old["images"] if (out / names[image["index"]]).is_file()]
    return fresh | {"images": kept}


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
