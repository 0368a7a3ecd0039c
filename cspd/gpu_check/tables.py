"""A report as tables: what was checked, how fast it was, and how near to what the device can do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tabulate import tabulate

from cspd.bench import PUBLISHED
from cspd.gpu_check.chosen_windows import BATCHES
from cspd.gpu_check.run import LEFT_OUT, failures

TIMES = {"MAR times": PUBLISHED, "VQ times": "ar"}  # what the others are compared with
SAME = ("size", "batch", "num_iter", "precision")  # of two times that are compared
WIDEST = 100  # characters of what a case found


def format_report(report: dict[str, Any]) -> str:
    """The report as text."""
    found = {part: {n: r for n, r in cases.items() if "ms" not in r} for part, cases in report["parts"].items()}
    lines = [f"{report['device']}, {report['scale']} size", ""]
    rows = [
        [part, name, _verdict(result), _told(result)] for part, cases in found.items() for name, result in cases.items()
    ]
    lines += [tabulate(rows, ["part", "case", "", "found"], disable_numparse=True), ""]
    for part in TIMES:
        rows = list(_times(report, part))
        if rows:
            titles = [f"{part}, of a few rounds", "ms an image", f"x {TIMES[part]}", "x limit", "GiB"]
            lines += [tabulate(rows, titles, floatfmt=("", ".2f", ".2f", ".1f", ".1f")), ""]
    rows = list(_windows(report["parts"].get("windows", {})))
    if rows:
        lines += [tabulate(rows, ["W of speculative", *(f"batch {batch}" for batch in BATCHES)]), ""]
    lines += [_top(report["parts"].get("top kernels", {}))]
    left = sum(LEFT_OUT in result for cases in report["parts"].values() for result in cases.values())
    if left:
        lines.append(f"{left} cases were left out, since time was over: run the same command again")
    failed = failures(report)
    lines.append(f"{len(failed)} failed: {'; '.join(failed)}" if failed else "nothing failed")
    return "\n".join(line for line in lines)


def _verdict(result: dict[str, Any]) -> str:
    if "error" in result:
        return "ERROR"
    if LEFT_OUT in result:
        return "left out"
    if "skipped" in result:
        return "skipped"
    if "passed" not in result:
        return ""
    return "FAILED" if result["passed"] is False else "passed"


def _told(result: dict[str, Any]) -> str:
    """What a case found, in a line: of an error the last one."""
    if "error" in result:
        return result["error"].strip().rpartition("\n")[2][:WIDEST]
    if "skipped" in result:
        return result["skipped"]
    silent = ("passed", "seconds", "top", "windows", "costs", LEFT_OUT)
    result = {name: value for name, value in result.items() if value != []}
    parts = [f"{name} {_number(value)}" for name, value in result.items() if name not in silent]
    return ", ".join(parts)[: 2 * WIDEST]


def _number(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_number(each)}" for key, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _times(report: dict[str, Any], part: str) -> Iterator[list]:
    """Rows of a part that times: milliseconds, their ratio to the baseline's, and to the least that is possible."""
    cases = report["parts"].get(part, {})
    base = {_same(r): r["ms"] for r in cases.values() if r.get("method") == TIMES[part] and "ms" in r}
    for name, result in cases.items():
        if "ms" in result:
            least = _least_ms(report["parts"].get("machine", {}), result)
            plain = base.get(_same(result))
            speed = plain and result["ms"] and plain / result["ms"]
            yield [name, result["ms"], speed, least and result["ms"] / least, result["peak_bytes"] / 2**30]


def _same(result: dict[str, Any]) -> tuple:
    return tuple(result.get(name) for name in SAME)


def _least_ms(machine: dict[str, dict], result: dict[str, Any]) -> float | None:
    """Milliseconds of an image if the device did nothing else; None where it was not measured."""
    bandwidth = machine.get("copy", {}).get("gb_per_s")
    peak = machine.get(f"matmul {result['precision']}", {}).get("tflop_per_s")
    if not bandwidth or not peak:
        return None
    return 1000 * max(result["flops"] / (peak * 1e12), result["bytes"] / (bandwidth * 1e9))


def _windows(cases: dict[str, dict]) -> Iterator[list]:
    """Rows of the windows that were chosen, by batch."""
    for size, result in cases.items():
        for num_iter, chosen in result.get("windows", {}).items():
            yield [f"{size}, {num_iter}", *(chosen.get(str(batch)) for batch in BATCHES)]


def _top(cases: dict[str, dict]) -> str:
    """The kernels that take the most time."""
    lines = []
    for name, result in cases.items():
        rows = [[k["name"][:WIDEST], k["count"], k["microseconds"]] for k in result.get("top", [])]
        lines += [tabulate(rows, [name, "runs", "us"], floatfmt=".0f"), ""] if rows else []
    return "\n".join(lines)
