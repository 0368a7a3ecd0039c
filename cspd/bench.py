"""How fast this machine samples: end to end, in one process, as ratios of things timed in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from cspd.engine import Engine
from cspd.sequence import Request
from mar import reference as published

SCHEMA = "cspd.bench/1"
MEMORY_SETTINGS = {"num_iter": 4, "num_sampling_steps": 10}  # for peak memory: fewer, larger iterations than usual


def bench(
    engine: Engine,
    request: Request,
    batches: list[int],
    *,
    runs: int = 5,
    reference: bool = True,
    queued: int | None = None,
    progress: bool = True,
) -> dict:
    """Times `request` at several batch sizes, labels and seeds taking turns.

    Every run times each contender once, so that a machine that slows down slows all of them; ratios are
    taken run by run.

    Args:
        engine: with at least max(batches) slots.
        reference: also time MAR's sampler as published (`mar.reference`) with the same weights and settings.
        queued: also measure the peak memory of this many requests through each number of slots.

    Returns:
        A JSON-able report, see `format_report`.

    Raises:
        ValueError: a batch larger than the engine's slots, or no runs.
    """
    request = engine.resolve(request)
    if runs < 1 or not 1 <= min(batches) <= max(batches) <= engine.host.num_slots:
        raise ValueError(
            f"runs={runs}, batches={batches}: give at least one run, and batches in 1..{engine.host.num_slots}"
        )
    # memory first, small batches first: what the timed runs leave in the process would be counted too
    counts = [(batch, num) for batch in sorted(batches) for num in ([batch, queued] if queued else [batch])]
    memory = [_memory(engine, request, batch, num) for batch, num in counts]
    rows = []
    bar = tqdm(total=len(batches) * (runs + 1), unit="run", disable=not progress)
    for batch in batches:
        contenders = {request.method: lambda batch=batch: _ours(engine, request, batch)}
        if reference:
            contenders["published"] = lambda batch=batch: _published(engine, request, batch)
        timed: dict[str, list[dict]] = {name: [] for name in contenders}
        for i in range(runs + 1):  # the first warms up
            for name, run in contenders.items():
                measured = _timed(run, engine.device)
                if i:
                    timed[name].append(measured)
            bar.update()
        rows += [_row(name, batch, timed[name], timed[request.method]) for name in contenders]
    bar.close()
    report = {"schema": SCHEMA, "machine": _machine(engine), "request": dataclasses.asdict(request), "rows": rows}
    return report | {"memory": memory}


def _requests(engine: Engine, request: Request, num: int) -> list[Request]:
    classes = engine.target.config.class_num
    return [
        dataclasses.replace(request, label=(request.label + i) % classes, seed=request.seed + i) for i in range(num)
    ]


def _ours(engine: Engine, request: Request, batch: int) -> dict:
    stats = engine.generate(_requests(engine, request, batch))[0].stats
    return {
        "backbone_call": stats.seconds["backbone"] / stats.backbone_calls,
        "head_call": stats.seconds["head"] / stats.head_calls,
    }


def _published(engine: Engine, request: Request, batch: int) -> dict:
    labels = torch.tensor([r.label for r in _requests(engine, request, batch)], device=engine.device)
    settings = {k: v for k, v in dataclasses.asdict(request).items() if k not in ("label", "seed", "method")}
    with torch.inference_mode():
        with engine.precision.fast():
            tokens = published.sample(engine.target, labels, **settings)
        engine.decode(tokens)
    return {}


def _timed(run: Callable[[], dict], device: torch.device) -> dict:
    start = time.perf_counter()
    measured = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return measured | {"seconds": time.perf_counter() - start}


def _row(name: str, batch: int, timed: list[dict], base: list[dict]) -> dict:
    seconds = [t["seconds"] for t in timed]
    ratios = [t["seconds"] / b["seconds"] for t, b in zip(timed, base)]
    row = {"name": name, "batch": batch, "seconds": _spread(seconds), "ratio": _spread(ratios)}
    row["images_per_second"] = batch / row["seconds"]["median"]
    return row | {k: statistics.median(t[k] for t in timed) for k in timed[0] if k != "seconds"}


def _spread(values: list[float]) -> dict:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _memory(engine: Engine, request: Request, batch: int, num: int) -> dict:
    """Peak memory of `num` short requests through `batch` slots; the images are dropped as they come."""
    precision = engine.precision.policy
    small = Engine(engine.target, vae=engine.vae, max_batch=batch, device=engine.device, precision=precision)
    quick = dataclasses.replace(request, **MEMORY_SETTINGS)
    _reset_peak(engine.device)
    for _ in small.stream(_requests(engine, quick, num)):
        pass
    return {"slots": batch, "requests": num, "peak_bytes": _peak_bytes(engine.device)}


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # Linux only, and not in every container
            Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes(device: torch.device) -> int:
    """Peak memory since the reset: of the device, or of this process (its whole life where the system can't reset)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def _machine(engine: Engine) -> dict:
    cuda = engine.device.type == "cuda"
    name = torch.cuda.get_device_name(engine.device) if cuda else platform.processor() or platform.machine()
    precision = engine.precision.policy
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__, "precision": precision}


def format_report(report: dict) -> str:
    """The report as text."""
    machine, request = report["machine"], report["request"]
    lines = [
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}, {machine['precision']};"
        f" K = {request['num_iter']}, cfg {request['cfg']} {request['cfg_schedule']}, tau {request['temperature']},"
        f" T = {request['num_sampling_steps']}",
        "",
        f"{'sampler':<12} {'batch':>5} {'seconds (min..max)':>24} {'images/s':>9} {'backbone':>10} {'head call':>10}"
        f" {'takes (min..max)':>24}",
    ]
    for row in report["rows"]:
        s, r = row["seconds"], row["ratio"]
        calls = [f"{row[k] * 1e3:.3f} ms" if k in row else "" for k in ("backbone_call", "head_call")]
        lines.append(
            f"{row['name']:<12} {row['batch']:>5} {s['median']:>9.3f} ({s['min']:.3f}..{s['max']:.3f}) "
            f"{row['images_per_second']:>9.2f} {calls[0]:>10} {calls[1]:>10}"
            f" {r['median']:>9.2f}x ({r['min']:.2f}..{r['max']:.2f})"
        )
    lines.append("")
    for m in report["memory"]:
        what = f"{m['requests']} requests through {m['slots']} slots (K = {MEMORY_SETTINGS['num_iter']})"
        lines.append(f"peak memory, {what}: {m['peak_bytes'] / 2**20:.0f} MiB")
    return "\n".join(lines)
