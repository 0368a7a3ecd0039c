"""Runs the cases of a GPU check in child processes, writes what they find to a file, and prints it."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

from cspd.device import describe, synchronize
from cspd.files import read_json, write_json
from cspd.gpu_check.sizes import FULL, TINY, Settings
from cspd.method import PUBLISHED
from cspd.runs import differences
from cspd.terminal import progress_bar

Case = Callable[[], dict[str, Any]]
Cases = dict[str, Case]


class Part(NamedTuple):
    """A group of cases, which one process runs.

    Attributes:
        share: of the time of all parts.
        cases: makes the cases, by name; it does no work yet. A case returns what it found: "passed" is False if
            something is wrong, "skipped" is the reason why nothing was done.
        case_seconds: a case that takes longer is ended, and lost.
    """

    name: str
    share: float
    cases: Callable[[Settings], Cases]
    case_seconds: float = 120.0


# The child process.
#
# An invalid access of memory leaves CUDA unusable for the whole process, and a kernel may never return. So no case runs
# in the process that has the report.

START_SECONDS = 300.0  # for a process to import everything
GRACE_SECONDS = 5.0  # for a process that has no more cases
NO_GRAPH = "no CUDA graph of"  # in the warning of `cspd.graphs`
NO_ROOM = "GiB free"  # in the error of `cspd.device.check_fits`


class Worker:
    """A process that runs cases of a part. It is replaced after an error, a crash or a hang, which costs one case."""

    def __init__(self, part: Part, settings: Settings) -> None:
        self._part = part
        self._settings = settings
        self._process: Any = None

    def run(self, name: str) -> dict[str, Any]:
        """What a case found; {"lost": why} if its process ended or took too long."""
        try:
            if self._process is None:
                self._start()
            self._connection.send(name)
            found = self._receive(self._part.case_seconds)
        except TimeoutError as error:
            found = {"lost": str(error)}
        except (EOFError, ConnectionError):
            self._process.join(START_SECONDS)
            found = {"lost": f"its process ended with exit code {self._process.exitcode}"}
        if "error" in found or "lost" in found:
            self.stop()
        return found

    def stop(self, grace: float = 0.0) -> None:
        """Ends the process, whatever it does; `grace`: seconds for it to end by itself if it waits for a case."""
        if self._process is not None:
            self._connection.close()
            self._process.join(grace)
            self._process.kill()
            self._process.join()
            self._process = None

    def _start(self) -> None:
        spawning = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._connection, its_end = spawning.Pipe()
        self._process = spawning.Process(target=_work, args=(its_end, self._part, self._settings))
        self._process.start()
        its_end.close()  # so that receiving fails once the process has ended
        self._receive(START_SECONDS)

    def _receive(self, seconds: float) -> Any:
        if not self._connection.poll(seconds):
            raise TimeoutError(f"it took longer than {seconds:g} s, and its process was ended")
        return self._connection.recv()


def _work(connection: Connection, part: Part, settings: Settings) -> None:
    """The child process: receives names of cases, and sends what each found."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to both processes: the other one decides
    cases = part.cases(settings)
    connection.send("ready")
    with contextlib.suppress(EOFError):  # the other process has ended, or closed its end
        while True:
            name = connection.recv()
            connection.send(tried(cases[name], settings.device))


def tried(case: Case, device: torch.device) -> dict[str, Any]:
    """What a case found or its error, its warnings, and its seconds; afterwards the device's memory is free again.

    A case has failed if a round should have been captured as a graph and could not be.
    """
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as warned:
        try:
            found = case()
            synchronize(device)  # an error inside a kernel is raised here, and not in the next case
        except Exception as error:
            found = {"error": traceback.format_exc()}
            if isinstance(error, torch.OutOfMemoryError) or NO_ROOM in str(error):
                found = {"skipped": f"too little memory: {error}".partition("\n")[0]}
    found["seconds"] = time.monotonic() - start
    texts = [str(warning.message) for warning in warned]
    found["warnings"] = list(dict.fromkeys(texts))  # each once
    if any(NO_GRAPH in text for text in found["warnings"]):
        found["passed"] = False
    if device.type == "cuda" and "error" not in found:
        gc.collect()
        torch.cuda.empty_cache()
    return json.loads(json.dumps(found), parse_constant=str)  # NaN and infinities become words


# The parts one after another, and the report.

SCHEMA = "cspd.gpu-check/2"
LEFT_OUT, STARTED = "left_out", "started"
NO_TIME = "its part's share of the time was over: the same command runs it"
REMEDY = "give another --out, or --overwrite"


def run_cases(
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

    Cases that are in the file are not run again, unless they were left out or raised an error. A case that was started
    and has no result was lost with its process: it is not run again either, since it may be what ended the process.

    Args:
        tiny: small models, which take seconds anywhere. minutes: for all parts.
        overwrite: start again.

    Raises:
        ValueError: the file is not a report, or one of another device or size.
    """
    report = _report_to_complete(out, device, "tiny" if tiny else "full", overwrite)

    def save() -> None:
        write_json(out, report)

    end = time.monotonic() + 60 * minutes
    form = "{desc}{percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"
    settings = Settings(device, TINY if tiny else FULL)
    with progress_bar(total=len(parts), bar_format=form, disable=not progress) as bar:
        for i, part in enumerate(parts):
            bar.set_description(part.name)
            # what the parts before it have left is divided by the shares of the others
            left = end - time.monotonic()
            share = part.share / sum(each.share for each in parts[i:])
            until = time.monotonic() + share * left
            found = report["parts"].setdefault(part.name, {})
            _run_part(part, settings, found, until, save)
            bar.update()
    return report


def _report_to_complete(out: Path, device: torch.device, scale: str, overwrite: bool) -> dict[str, Any]:
    """The report in a file; a new one if there is no file, or it is to be overwritten."""
    about = {"schema": SCHEMA, "scale": scale, "device": describe(device)["device"]}
    if overwrite or not out.exists():
        return {**about, "parts": {}}
    report = read_report(out, REMEDY)
    change = differences({name: report[name] for name in about}, about)
    if change:
        raise ValueError(f"{out} is the report of another check ({', '.join(change)}): {REMEDY}")
    return report


def _run_part(
    part: Part,
    settings: Settings,
    found: dict[str, dict],
    until: float,
    save: Callable[[], None],
) -> None:
    """Runs the missing cases of a part; saves after each, and before it begins."""
    worker = Worker(part, settings)
    name = ""
    try:
        for name in part.cases(settings):
            if STARTED in found.get(name, {}):
                found[name] = {"lost": "the whole check ended while it ran"}
            elif _is_missing(found.get(name)) and time.monotonic() >= until:
                found[name] = {LEFT_OUT: NO_TIME}
            elif _is_missing(found.get(name)):
                found[name] = {STARTED: True}
                save()
                found[name] = worker.run(name)
            save()
    except KeyboardInterrupt:  # whoever stops the check does not lose a case
        if STARTED in found.get(name, {}):
            del found[name]
            save()
        raise
    finally:
        worker.stop(GRACE_SECONDS)


def _is_missing(found: dict | None) -> bool:
    """Whether a case is still to be run: never tried, left out, or ended by an error."""
    return found is None or LEFT_OUT in found or "error" in found


def read_report(path: Path, remedy: str = "give another file") -> dict[str, Any]:
    """A report of `run_cases`. Raises OSError; ValueError, which ends with the remedy, if the file is not one."""
    try:
        report = read_json(path)
        if report["schema"] != SCHEMA:
            raise ValueError("another schema")
        format_check(report)  # so it has everything that is printed
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}): {remedy}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a gpu-check report of this version ({error!r}): {remedy}") from None
    return report


def _results(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What all cases found, by "part, case"."""
    results = {}
    for part, cases in report["parts"].items():
        for name, found in cases.items():
            results[f"{part}, {name}"] = found
    return results


def failures(report: dict[str, Any]) -> list[str]:
    """The cases that failed or were lost: "part, case"."""
    return [name for name, found in _results(report).items() if _verdict(found) in BAD]


# The report as tables: what was checked, how fast it was, and how near to what the device can do.

VERDICTS = {"error": "ERROR", "lost": "LOST", STARTED: "LOST", LEFT_OUT: "left out", "skipped": "skipped"}
BAD = ("ERROR", "LOST", "FAILED")
SILENT = ("passed", "seconds", "top", "costs", LEFT_OUT, STARTED)  # not printed as a finding
SPEEDS = ("MAR times", "VQ times")  # parts whose times are in the summary
WIDEST = 200  # characters of what a case found


def format_check(report: dict[str, Any]) -> str:
    """The report as text: all cases, all times, and at the end a summary."""
    checked = []
    by_verdict: dict[str, list[str]] = {}
    for name, found in _results(report).items():
        verdict = _verdict(found)
        by_verdict.setdefault(verdict, []).append(name)
        if "ms" not in found:
            checked.append([name, verdict, _told(found)])
    lines = [
        f"{report['device']}, {report['scale']} size\n",
        tabulate(checked, ["case", "", "found"], disable_numparse=True) + "\n",
    ]
    times = _times(report)
    rows = []
    for name, (found, speed_up, over_least) in times.items():
        rows.append([name, found["ms"], speed_up, over_least, found["peak_bytes"] / 2**30])
    if rows:
        titles = ["time, from a few rounds", "ms per image", "x baseline", "x limit", "GiB"]
        lines.append(tabulate(rows, titles, floatfmt=("", ".2f", ".2f", ".1f", ".1f")) + "\n")
    for part in SPEEDS:
        own = [timed for name, timed in times.items() if name.startswith(f"{part}, ")]
        if own:
            lines.append(_speeds(part, own) + "\n")

    passed = len(by_verdict.get("passed", []))
    left_out, lost, skipped = (by_verdict.get(verdict, []) for verdict in ("left out", "LOST", "skipped"))
    failed = [*by_verdict.get("ERROR", []), *by_verdict.get("FAILED", [])]
    if failed:
        lines.append(f"not right: {len(failed)} failed: {'; '.join(failed)}")
    else:
        so_far = " so far" if left_out or lost else ""
        lines.append(f"right{so_far}: {passed} checks passed, and nothing failed")
    if left_out:
        parts = Counter(name.partition(", ")[0] for name in left_out)
        those = ", ".join(f"{num} of {part}" for part, num in parts.items())
        lines.append(f"{len(left_out)} cases were left out, since the time was over ({those}): repeat the command")
    if lost:
        lines.append(f"{len(lost)} lost (the process crashed or hung; --overwrite tries again): {'; '.join(lost)}")
    if skipped:
        lines.append(f"{len(skipped)} skipped, for the reasons above: {'; '.join(skipped)}")
    return "\n".join(lines)


def _speeds(part: str, timed: list[tuple]) -> str:
    """A table of the times of a part: a row for each size and batch, a column for each method."""
    rows: dict[tuple[str, int], dict[str, str]] = {}
    for found, speed_up, _ in timed:
        row = rows.setdefault((found["size"], found["batch"]), {"size": found["size"], "batch": found["batch"]})
        row[found["method"]] = f"{found['ms']:.1f}" + (f" ({speed_up:.1f}x)" if speed_up else "")
    least = min(found["timed_rounds"] for found, _, _ in timed)
    title = f"{part}: ms per image (times as fast as the baseline); at least {least} rounds of an image were timed"
    return f"{title}\n" + tabulate([*rows.values()], headers="keys", disable_numparse=True)


def _verdict(found: dict[str, Any]) -> str:
    for key, verdict in VERDICTS.items():
        if key in found:
            return verdict
    if "passed" not in found:
        return ""
    return "passed" if found["passed"] else "FAILED"


def _told(found: dict[str, Any]) -> str:
    """What a case found, in a line; the last line of an error."""
    for reason in ("error", "lost", "skipped"):
        if reason in found:
            return found[reason].strip().splitlines()[-1][:WIDEST]
    parts = []
    for name, value in found.items():
        if name not in SILENT and value != []:
            parts.append(f"{name} {_number(value)}")
    return ", ".join(parts)[:WIDEST]


def _number(value: object) -> str:
    if isinstance(value, dict):
        parts = [f"{key}: {_number(each)}" for key, each in value.items()]
        return "; ".join(parts)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _times(report: dict[str, Any]) -> dict[str, tuple[dict[str, Any], float | None, float | None]]:
    """The timed cases by name: found, the baseline's milliseconds over its own, its own over the least possible.

    The baseline is the published sampler for MAR and `ar` for VQ models, at the same setting.
    """
    timed = {name: found for name, found in _results(report).items() if "ms" in found}
    baselines = {}
    for found in timed.values():
        if found["method"] == (PUBLISHED if "num_iter" in found else "ar"):
            baselines[_setting(found)] = found["ms"]
    times = {}
    for name, found in timed.items():
        baseline = baselines.get(_setting(found))
        speed_up = baseline and baseline / found["ms"]
        least = _least_ms(report["parts"].get("machine", {}), found)
        times[name] = found, speed_up, least and found["ms"] / least
    return times


def _setting(found: dict[str, Any]) -> tuple:
    """What two times have in common if they are compared."""
    return tuple(found.get(name) for name in ("size", "batch", "num_iter", "precision"))


def _least_ms(machine: dict[str, dict], found: dict[str, Any]) -> float | None:
    """Milliseconds of an image at the bandwidth and peak of this machine; None if it or the work is unknown."""
    bandwidth = machine.get("copy", {}).get("gb_per_s")
    peak = machine.get(f"matmul {found['precision']}", {}).get("tflop_per_s")
    if not bandwidth or not peak or "flops" not in found:
        return None
    compute_ms = found["flops"] / peak * 1e-9
    memory_ms = found["bytes"] / bandwidth * 1e-6
    return max(compute_ms, memory_ms)
