"""How fast this machine samples: end to end, in one process, as ratios of things timed in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from cspd.engine import Engine
from cspd.methods import METHODS, with_method
from cspd.sequence import Output, Request
from cspd.validation import resolve
from mar import reference

SCHEMA = "cspd.bench/2"
PUBLISHED = "published"  # MAR's sampler as published, `mar.reference`
MEMORY_SETTINGS = {"num_iter": 4, "num_sampling_steps": 10}  # for peak memory: fewer, larger iterations than usual


def contenders(
    request: Request, seq_len: int, names: Sequence[str], gammas: Sequence[int], verify: Sequence[str]
) -> dict:
    """What is timed against plain MAR at a request's settings, by the name it is reported under; None is published MAR.

    `cspd` stands for each of `gammas` and `verify`, and for plain MAR with as many iterations, K = L / gamma, as the
    parallel form has rounds.
    """
    made = {"ar": with_method(request, "ar")}
    for name in names:
        if name == PUBLISHED:
            made[name] = None
        elif name == "cspd":
            for gamma in gammas:
                iterations = -(-seq_len // gamma)
                made[f"ar K={iterations}"] = dataclasses.replace(made["ar"], num_iter=iterations)
                for mode in verify:
                    drafted = with_method(request, "cspd")
                    made[f"cspd {gamma} {mode}"] = dataclasses.replace(drafted, gamma=gamma, verify=mode)
        elif name in METHODS:
            made[name] = with_method(request, name)
        else:
            raise ValueError(f"method {name!r} is unknown: choose of {', '.join(METHODS)}, {PUBLISHED}")
    return made


def bench(
    engines: Callable[[int], Engine],
    requests: Sequence[Request],
    batches: Sequence[int],
    names: Sequence[str] = ("speculative", PUBLISHED),
    *,
    gammas: Sequence[int] = (8, 16),
    verify: Sequence[str] = ("parallel",),
    runs: int = 5,
    queued: int | None = None,
    accuracy: Callable[[Tensor, Tensor], float] | None = None,
    progress: bool = True,
) -> dict:
    """Times methods against plain MAR, at several settings and batch sizes, labels and seeds taking turns.

    Every run times each contender once, so that a machine that slows down slows all of them; ratios are
    taken run by run.

    Args:
        engines: makes the engine with a number of slots; the window of `speculative` follows them.
        requests: the settings, label and seed the first one's. names, gammas, verify: see `contenders`.
        queued: also measure the peak memory of this many requests through each number of slots.
        accuracy: judges images [N, 3, H, W] by their labels [N].

    Returns:
        A JSON-able report, see `format_report`.

    Raises:
        ValueError: a bad request, batch size or number of runs.
    """
    if runs < 1 or min(batches) < 1:
        raise ValueError(f"runs={runs}, batches={list(batches)}: give at least one run, and batches of one or more")
    # memory first, small batches first: what the timed runs leave in the process would be counted too
    first = engines(1)
    seq_len = first.target.config.seq_len
    counts = [(batch, num) for batch in sorted(batches) for num in ([batch, queued] if queued else [batch])]
    filled = [_fill(first, request) for request in requests]
    plans = [(request, contenders(request, seq_len, names, gammas, verify)) for request in filled]
    for contender in (c for _, plan in plans for c in plan.values() if c is not None):
        resolve(contender, first.target.config, first.defaults)
        first.check_draft(contender)
    memory = [_memory(first, requests[0], batch, num) for batch, num in counts]
    cases = [(batch, *plan) for batch in batches for plan in plans]
    rows, total = [], sum(len(plan) for _, _, plan in cases) * (runs + 1)
    with tqdm(total=total, unit="run", disable=not progress) as bar:
        for batch, request, plan in cases:
            engine = engines(batch)
            timed: dict[str, list[dict]] = {name: [] for name in plan}
            for i in range(runs + 1):  # the first warms up
                for name, contender in plan.items():
                    measured = _timed(engine, contender, request, batch, i, accuracy)
                    if i:
                        timed[name].append(measured)
                    bar.update()
            rows += [_row(name, batch, request, timed[name], timed["ar"]) for name in timed]
    return {"schema": SCHEMA, "machine": _machine(first), "runs": runs, "rows": rows, "memory": memory}


def _fill(engine: Engine, request: Request) -> Request:
    """The request with K, guidance and the like filled in, and the options of methods as they were given."""
    plain = engine.resolve(with_method(request, "ar"))
    names = ("num_iter", "cfg", "cfg_schedule", "temperature", "num_sampling_steps")
    return dataclasses.replace(request, **{name: getattr(plain, name) for name in names})


def _requests(engine: Engine, request: Request, num: int, first: int = 0) -> list[Request]:
    classes = engine.target.config.class_num
    return [
        dataclasses.replace(request, label=(request.label + i) % classes, seed=request.seed + i)
        for i in range(first, first + num)
    ]


def _timed(
    engine: Engine, contender: Request | None, request: Request, batch: int, run: int, accuracy: Callable | None
) -> dict:
    """One timed batch; run by run the seeds differ."""
    requests = _requests(engine, contender or request, batch, run * batch)
    start = time.perf_counter()
    if contender is None:
        images = _published(engine, requests)
        _synchronize(engine.device)
        return {"seconds": time.perf_counter() - start} | _judge(images, requests, accuracy)
    outputs = engine.generate(requests)
    _synchronize(engine.device)
    measured = {"seconds": time.perf_counter() - start, "window": outputs[0].request.window}
    return measured | _mean_stats(outputs) | _judge([o.image for o in outputs], requests, accuracy)


def _mean_stats(outputs: list[Output]) -> dict:
    stats = [output.stats for output in outputs]
    judged, accepted = (sum(sum(s.by_lag[i]) for s in stats) for i in (0, 1))
    mean = {
        name: statistics.mean(getattr(s, name) for s in stats)
        for name in ("head_calls_per_token", "backbone_calls", "head_calls", "draft_backbone_calls", "draft_head_calls")
    }
    return mean | {"alpha": accepted / judged if judged else None}


def _judge(images: Sequence[Tensor], requests: list[Request], accuracy: Callable | None) -> dict:
    if accuracy is None or images[0] is None:
        return {}
    return {"accuracy": accuracy(torch.stack(list(images)), torch.tensor([r.label for r in requests]))}


def _published(engine: Engine, requests: list[Request]) -> Tensor:
    labels = torch.tensor([r.label for r in requests], device=engine.device)
    names = ("num_iter", "cfg", "cfg_schedule", "temperature", "num_sampling_steps")
    with torch.inference_mode():
        with engine.precision.fast():
            tokens = reference.sample(engine.target, labels, **{name: getattr(requests[0], name) for name in names})
        return engine.decode(tokens)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(name: str, batch: int, request: Request, timed: list[dict], base: list[dict]) -> dict:
    seconds = [t["seconds"] for t in timed]
    speed_up = [b["seconds"] / t["seconds"] for t, b in zip(timed, base)]
    row = {"name": name, "batch": batch, "num_iter": request.num_iter, "cfg": request.cfg}
    row |= {"seconds": _spread(seconds), "speed_up": _spread(speed_up)}
    row["images_per_second"] = batch / row["seconds"]["median"]
    for key in timed[0].keys() - {"seconds"}:
        values = [t[key] for t in timed]
        row[key] = None if None in values else statistics.mean(values)
    return row


def _spread(values: list[float]) -> dict:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _memory(engine: Engine, request: Request, batch: int, num: int) -> dict:
    """Peak memory of `num` short requests through `batch` slots; the images are dropped as they come."""
    precision = engine.precision.policy
    small = Engine(engine.target, vae=engine.vae, max_batch=batch, device=engine.device, precision=precision)
    quick = dataclasses.replace(with_method(request, "ar"), **MEMORY_SETTINGS)
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


def _coverage(runs: int) -> float:
    """How sure the least and the most of independent runs are to enclose their distribution's median."""
    return 1 - 0.5 ** (runs - 1)


def format_report(report: dict) -> str:
    """The report as text."""
    machine = report["machine"]
    lines = [
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}, {machine['precision']};"
        f" medians of {report['runs']} runs (least..most holds the true median with {_coverage(report['runs']):.0%})",
        "",
        f"{'sampler':<22} {'K':>3} {'cfg':>4} {'batch':>5} {'W':>3} {'seconds':>9} {'images/s':>9}"
        f" {'x ar (least..most)':>20} {'calls/token':>11} {'alpha':>6} {'class acc.':>10}",
    ]
    for row in report["rows"]:
        r = row["speed_up"]

        ratio = f"{r['median']:.2f} ({r['min']:.2f}..{r['max']:.2f})"

        def cell(key: str, form: str, row: dict = row) -> str:
            return format(row[key], form) if row.get(key) is not None else ""

        lines.append(
            f"{row['name']:<22} {row['num_iter']:>3} {row['cfg']:>4g} {row['batch']:>5} {cell('window', '.0f'):>3}"
            f" {row['seconds']['median']:>9.3f} {row['images_per_second']:>9.2f}"
            f" {ratio:>20} {cell('head_calls_per_token', '.1f'):>11}"
            f" {cell('alpha', '.3f'):>6} {cell('accuracy', '.3f'):>10}"
        )
    lines.append("")
    for m in report["memory"]:
        what = f"{m['requests']} requests through {m['slots']} slots (K = {MEMORY_SETTINGS['num_iter']})"
        lines.append(f"peak memory, {what}: {m['peak_bytes'] / 2**20:.0f} MiB")
    return "\n".join(lines)
