"""Runs the parts one after the other, each within its share of the time, and keeps what they found in a file."""

from __future__ import annotations

import gc
import json
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cspd.gpu_check.parts import Part
from cspd.gpu_check.settings import FULL, TINY, Settings
from cspd.records import NUMBER, misfit, read_json, write_json
from cspd.store import differences

SCHEMA = "cspd.gpu-check/1"
TOP = {"name": str, "count": NUMBER, "microseconds": NUMBER}
RESULT = {
    "error?": str,
    "skipped?": str,
    "gb_per_s?": NUMBER,
    "tflop_per_s?": NUMBER,
    "windows?": {str: {}},
    "top?": [TOP],
}
TIMED = {name: NUMBER for name in ("ms", "flops", "bytes", "peak_bytes", "batch")}
TIMED |= {"num_iter?": int, **dict.fromkeys(("size", "precision", "method"), str)}
SHAPE = {"schema": str, "scale": str, "device": str, "parts": {str: {str: RESULT}}}
LEFT_OUT = "left_out"
NO_GRAPH = "no CUDA graph of"  # what `cspd.graphs` warns of
NO_TIME = "its part's share of the time was over: the same command goes on from here"
REMEDY = "give another --out, or --overwrite"


def run(
    out: Path,
    device: torch.device,
    parts: Sequence[Part],
    *,
    tiny: bool = False,
    minutes: float = 9.0,
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Checks a device and returns the report, which is in the file `out` from the first case on.

    What the file has already is not done again, unless it was left out or failed with an error.

    Args:
        parts: what is checked. tiny: small models, to be done in seconds anywhere. minutes: for all parts.
        overwrite: begin anew.

    Raises:
        ValueError: the file is no report, or one of another device or size.
    """
    about = {"schema": SCHEMA, "scale": "tiny" if tiny else "full", "device": _name(device)}
    report = {**about, "parts": {}}
    if out.exists() and not overwrite:
        report = read_report(out, REMEDY)
        change = differences({name: report[name] for name in about}, about)
        if change:
            raise ValueError(f"{out} is of another check ({', '.join(change)}): {REMEDY}")
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="cspd-gpu-check-") as cache, _bar(parts, progress) as bar:
        settings = Settings(device, TINY if tiny else FULL, Path(cache))
        for i, part in enumerate(parts):
            now = time.monotonic()
            share = part.share / sum(each.share for each in parts[i:])  # of what the parts before it have left
            cases = report["parts"].setdefault(part.name, {})
            for done in _cases(part, settings, cases, until=now + share * (end - now)):
                bar.n = i + done
                bar.set_description(part.name)
                write_json(out, report)
    return report


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _bar(parts: Sequence[Part], progress: bool) -> tqdm:
    form = "{desc}{percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"
    return tqdm(total=len(parts), bar_format=form, disable=not progress)


def _cases(part: Part, settings: Settings, found: dict[str, dict], until: float) -> Iterator[float]:
    """Does what is missing of a part; yields after each case the share of them that is done."""
    cases = part.cases(settings)
    for i, (name, case) in enumerate(cases.items(), 1):
        if is_missing(found.get(name)):
            is_late = time.monotonic() >= until
            found[name] = {LEFT_OUT: NO_TIME} if is_late else _tried(case)
        yield i / len(cases)


def is_missing(result: dict | None) -> bool:
    """Whether a case is still to be done: never tried, left out, or ended by an error."""
    return result is None or LEFT_OUT in result or "error" in result


def _tried(case: Callable[[], dict]) -> dict[str, Any]:
    """What a case found, or its error, its warnings, and the seconds it took; the device's memory is free again.

    It failed where rounds should have been graphs and could not be captured.
    """
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as told:
        try:
            found = case()
        except torch.OutOfMemoryError as error:
            found = {"skipped": f"too little memory: {error}".partition("\n")[0]}
        except Exception:  # whatever it was: the others go on
            found = {"error": traceback.format_exc()}
    found["seconds"] = time.monotonic() - start
    found["warnings"] = list(dict.fromkeys(str(warning.message) for warning in told))
    if any(NO_GRAPH in text for text in found["warnings"]):
        found["passed"] = False
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
    return json.loads(json.dumps(found), parse_constant=str)  # numbers that are not finite become words


def read_report(path: Path, remedy: str = "give another file") -> dict[str, Any]:
    """A report that `run` wrote. Raises OSError; ValueError, which ends with the remedy, where it is none."""
    try:
        report = read_json(path)
        place = misfit(report, SHAPE) or _untimely(report["parts"])
    except ValueError as error:
        raise ValueError(f"{path} is no report of gpu-check ({error}): {remedy}") from None
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}): {remedy}") from None
    if not place and report["schema"] != SCHEMA:
        place = "schema"
    if place:
        none = f"{path} is no report of this version of gpu-check: {place} is none of its"
        raise ValueError(f"{none}; {remedy}")
    return report


def _untimely(parts: dict[str, dict]) -> str | None:
    """Where a case that was timed has not what its times are told by; None where all have."""
    timed = {
        f"parts.{part}.{name}": result
        for part, cases in parts.items()
        for name, result in cases.items()
        if "ms" in result
    }
    return next(filter(None, (misfit(result, TIMED, place) for place, result in timed.items())), None)


def failures(report: dict[str, Any]) -> list[str]:
    """What failed: "part, case"."""
    return [
        f"{part}, {name}"
        for part, cases in report["parts"].items()
        for name, result in cases.items()
        if "error" in result or result.get("passed") is False
    ]
