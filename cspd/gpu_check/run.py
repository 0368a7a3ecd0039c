"""Runs the cases of a GPU check in a child process, writes what they find to a file, and prints it."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

from cspd.device import describe, synchronize
from cspd.files import make_folder, read_json, write_json
from cspd.gpu_check.sizes import Setup
from cspd.runs import differences

STARTED, LEFT_OUT = "started", "left_out"  # of a case: it has no result yet, and why a later run is to do it
Found = dict[str, Any]
Case = Callable[[], Found]
Cases = dict[str, Case]


class Question(NamedTuple):
    """A command of the check.

    Attributes:
        cases: makes the cases, by name, the most important ones first; it does no work yet. A case returns what it
            found: "passed" is False if something is wrong, "skipped" is the reason why nothing was done, and "left_out"
            why it is to be done by a later run.
        tables: the cases' findings as text, by the cases that found something.
        case_seconds: a case that takes longer is ended, and lost.
    """

    name: str
    cases: Callable[[Setup], Cases]
    tables: Callable[[dict[str, Found]], str]
    case_seconds: float = 240.0


# The child process.
#
# An invalid access of memory leaves CUDA unusable for the whole process, and a kernel may never return. So no case runs
# in the process that has the report.

START_SECONDS = 300.0  # for a process to import everything
GRACE_SECONDS = 5.0  # for a process that has no more cases
LEAST_SECONDS = 5.0  # no case is begun later
NO_GRAPH = "no CUDA graph of"  # in the warning of `cspd.graphs`
NO_ROOM = "GiB free"  # in the error of `cspd.device.check_fits`
# in the errors of a backend of attention that does not take a shape
NO_ATTENTION = ("No available kernel", "No viable backend for scaled_dot_product_attention")


class Worker:
    """A process that runs cases. It is replaced after an error, a crash or a hang, which costs one case."""

    def __init__(self, question: Question, settings: Setup) -> None:
        self._question = question
        self._settings = settings
        self._process: Any = None

    def run(self, name: str) -> Found:
        """What a case found; {"lost": why} if its process ended or took too long."""
        begun, most = time.monotonic(), self._question.case_seconds
        try:
            if self._process is None:
                self._start()
            self._connection.send(name)
            found = self._receive(min(most, self._settings.seconds_left))
        except TimeoutError as error:
            is_over = self._settings.until < begun + most
            found = {LEFT_OUT: "the time was over while it ran"} if is_over else {"lost": str(error)}
            self.stop()
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
        self._process = spawning.Process(target=_work, args=(its_end, self._question, self._settings))
        self._process.start()
        its_end.close()  # so that receiving fails once the process has ended
        self._receive(START_SECONDS)

    def _receive(self, seconds: float) -> Any:
        if not self._connection.poll(max(0.0, seconds)):
            raise TimeoutError(f"it took longer than {seconds:g} s, and its process was ended")
        return self._connection.recv()


def _work(connection: Connection, question: Question, settings: Setup) -> None:
    """The child process: receives names of cases, and sends what each found."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to both processes: the other one decides
    cases = question.cases(settings)
    connection.send("ready")
    with contextlib.suppress(EOFError):  # the other process has ended, or closed its end
        while True:
            name = connection.recv()
            connection.send(tried(cases[name], settings.device))


def tried(case: Case, device: torch.device) -> Found:
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
            elif any(text in str(error) for text in NO_ATTENTION):
                found = {"skipped": "this backend of attention does not take these shapes"}
    found["seconds"] = time.monotonic() - start
    found["warnings"] = list(dict.fromkeys(str(warning.message) for warning in warned))  # each once
    if any(NO_GRAPH in text for text in found["warnings"]):
        found["passed"] = False
    if device.type == "cuda" and "error" not in found:
        gc.collect()
        torch.cuda.empty_cache()
    return json.loads(json.dumps(found), parse_constant=str)  # NaN and infinities become words


# The parent process, which has the report.

SCHEMA = "cspd.gpu-check/3"
REMEDY = "give another --out, or --overwrite"


def run_question(
    question: Question, path: Path, settings: Setup, *, minutes: float = 9.0, overwrite: bool = False
) -> Found:
    """Asks a question and returns the report, which is in the file `path` from the first case on.

    Cases that are in the file are not run again, unless they were left out or raised an error. A case that was started
    and has no result was lost with its process: it is not run again either, since it may be what ended the process.

    Args:
        minutes: for everything; a case that is running then is ended, and is left out. overwrite: start again.

    Raises:
        ValueError: the file is not a report, or one of another question, device or size.
    """
    scale = "tiny" if settings.scale.is_tiny else "full"
    about = {"schema": SCHEMA, "question": question.name, "scale": scale, "device": describe(settings.device)["device"]}
    report: Found = {**about, "cases": {}}
    if path.exists() and not overwrite:
        report = read_report(question, path, REMEDY)
        change = differences({name: report[name] for name in about}, about)
        if change:
            raise ValueError(f"{path} is the report of another check ({', '.join(change)}): {REMEDY}")
    make_folder(path.parent)
    settings = replace(settings, until=time.monotonic() + 60 * minutes)
    _run_cases(question, settings, report["cases"], lambda: write_json(path, report))
    return report


def _run_cases(question: Question, settings: Setup, found: dict[str, Found], save: Callable[[], None]) -> None:
    """Runs the missing cases; saves after each, and before it begins."""
    worker = Worker(question, settings)
    name = ""
    try:
        for name in question.cases(settings):
            if STARTED in found.get(name, {}):
                found[name] = {"lost": "the whole check ended while it ran"}
            elif not _is_missing(found.get(name)):
                continue
            elif settings.seconds_left < LEAST_SECONDS:
                found[name] = {LEFT_OUT: "the time was over"}
            else:
                found[name] = {STARTED: True}
                save()
                found[name] = worker.run(name)
                print(f"{name}: {verdict(found[name])} {told(found[name])}", flush=True)
            save()
    except KeyboardInterrupt:  # whoever stops the check does not lose a case
        if STARTED in found.get(name, {}):
            del found[name]
            save()
        raise
    finally:
        worker.stop(GRACE_SECONDS)


def _is_missing(found: Found | None) -> bool:
    """Whether a case is still to be run: never tried, left out, or ended by an error."""
    return found is None or LEFT_OUT in found or "error" in found


def read_report(question: Question, path: Path, remedy: str = "give another folder") -> Found:
    """A report of `run_question`. Raises OSError; ValueError, which ends with the remedy, if the file is not one."""
    try:
        report = read_json(path)
        if (report["schema"], report["question"]) != (SCHEMA, question.name):
            raise ValueError("another schema or question")
        format_report(question, report)  # so it has everything that is printed
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}): {remedy}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a gpu-check report of this version ({error!r}): {remedy}") from None
    return report


# The report as text.

VERDICTS = {"error": "ERROR", "lost": "LOST", STARTED: "LOST", LEFT_OUT: "left out", "skipped": "skipped"}
BAD = ("ERROR", "LOST", "FAILED")
SILENT = ("passed", "seconds", "top", "pass_s", LEFT_OUT, STARTED)  # not printed as a finding
WIDEST = 160  # characters of what a case found


def failures(report: Found) -> list[str]:
    """The cases that failed or were lost."""
    return [name for name, found in report["cases"].items() if verdict(found) in BAD]


def format_report(question: Question, report: Found) -> str:
    """The report as text: what was found, what was not, and at the end whether all is right."""
    names: dict[str, list[str]] = {}
    for name, found in report["cases"].items():
        names.setdefault(verdict(found), []).append(name)
    good = {name: found for name, found in report["cases"].items() if verdict(found) in ("", "passed", "FAILED")}
    lines = [f"{question.name}: {report['device']}, {report['scale']} size\n", question.tables(good) + "\n"]
    for kind in ("ERROR", "LOST", "skipped"):
        lines += [f"{name}: {kind}, {told(report['cases'][name])}" for name in names.get(kind, [])]

    failed = [*names.get("ERROR", []), *names.get("FAILED", [])]
    left_out, lost = names.get("left out", []), names.get("LOST", [])
    if failed:
        lines.append(f"not right: {len(failed)} failed: {'; '.join(failed)}")
    else:
        so_far = " so far" if left_out or lost else ""
        passed = len(names.get("passed", []))
        lines.append(f"right{so_far}: {passed} checks passed, and nothing failed" if passed else "nothing failed")
    if left_out:
        reasons = dict.fromkeys(report["cases"][name][LEFT_OUT] for name in left_out)
        lines.append(f"{len(left_out)} left out ({', '.join(reasons)}): {'; '.join(left_out)}. Repeat the command")
    if lost:
        lines.append(f"{len(lost)} lost (the process crashed or hung; --overwrite tries again): {'; '.join(lost)}")
    return "\n".join(lines)


def findings(cases: dict[str, Found]) -> str:
    """A table of what all of these cases found."""
    rows = [[name, verdict(found), told(found)] for name, found in cases.items()]
    return tabulate(rows, ["case", "", "found"], disable_numparse=True)


def verdict(found: Found) -> str:
    for key, word in VERDICTS.items():
        if key in found:
            return word
    if "passed" not in found:
        return ""
    return "passed" if found["passed"] else "FAILED"


def told(found: Found) -> str:
    """What a case found, in a line; the last line of an error."""
    for reason in ("error", "lost", "skipped", LEFT_OUT):
        if reason in found:
            return found[reason].strip().splitlines()[-1][:WIDEST]
    parts = [
        f"{name} {_number(value)}" for name, value in found.items() if name not in SILENT and value not in ([], {})
    ]
    return ", ".join(parts)[:WIDEST]


def _number(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_number(each)}" for key, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
