"""The commands about this machine: `cspd bench`, `cspd calibrate` and `cspd gpu-check`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from matplotlib.backend_bases import FigureCanvasBase
from torch import Tensor
from tqdm import tqdm

from cspd.checkpoints import checkpoint_files, family_of
from cspd.cli.options import check_classes, check_method, load_engine, request_of, run_settings
from cspd.device import peak_bytes, pick_device, reset_peak, spread
from cspd.engine import Engine
from cspd.evaluation.metrics import accuracy, load_classifier, space_of
from cspd.files import check_file, user_cache, write_bytes, write_json
from cspd.gpu_check.cases import PARTS
from cspd.gpu_check.run import failures, format_check, read_report
from cspd.gpu_check.run import run_cases as check
from cspd.heads.calibrated import Shortcut, plans
from cspd.heads.calibration import WINDOWS, Calibration
from cspd.method import METHODS, PUBLISHED, find, method_names, parse_method, with_method
from cspd.option import COMMON
from cspd.plots import Panel, Point, speed_quality
from cspd.request import Output, Request
from cspd.runs import measured, models_of, what_ran
from cspd.terminal import if_stopped

# How fast this machine samples: end to end, in one process, as ratios of things timed in turn.

SCHEMA = "cspd.bench/2"
MEMORY_SETTINGS = {"num_iter": 4, "num_sampling_steps": 25}  # for peak memory: fewer, larger iterations than usual


def contenders(
    request: Request, seq_len: int, names: Sequence[str], gammas: Sequence[int], verify: Sequence[str]
) -> dict:
    """What is timed against `ar` at a request's settings, by the name it is reported under; None stands for
    the sampler as it was published.

    Raises ValueError on an unknown method or option, or a gamma below 1.

    `cspd` stands for each of `gammas` and `verify`, and for plain MAR with as many iterations, K = L / gamma, as the
    parallel form has rounds. Options may follow a name: "cool-sd:delta=1.5:gamma=4".
    """
    made = {"ar": with_method(request, "ar")}
    for name in names:
        if name == PUBLISHED:
            made[name] = None
        elif name == "cspd":
            for gamma in gammas:
                find("cspd", "MAR").option("gamma", request).check(gamma)
                iterations = -(-seq_len // gamma)
                made[f"ar K={iterations}"] = dataclasses.replace(made["ar"], num_iter=iterations)
                for mode in verify:
                    drafted = with_method(request, "cspd")
                    made[f"cspd {gamma} {mode}"] = dataclasses.replace(drafted, gamma=gamma, verify=mode)
        else:
            method, options = parse_method(name, more=(PUBLISHED,))
            if method == PUBLISHED:
                raise ValueError(f"{name!r}: the authors' sampler takes no options, only those of all methods")
            made[name] = with_method(request.but(**options), method).but(**options)
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
    """Times methods against baseline sampling, at several settings and batch sizes, labels and seeds taking turns.

    Every run times each contender once, so that a machine that slows down slows all of them; ratios are
    taken run by run.

    Args:
        engines: makes the engine with a number of slots; the window of `speculative` follows them.
        requests: the settings, label and seed the first one's. names, gammas, verify: see `contenders`.
        queued: also measure the peak memory of this many requests through each number of slots.
        accuracy: judges images [N, 3, H, W] by their labels [N].

    Returns:
        A JSON-able report, see `format_bench`.

    Raises:
        ValueError: a bad request, batch size or number of runs.
    """
    if runs < 1 or min(batches) < 1:
        raise ValueError(f"runs={runs}, batches={list(batches)}: give at least one run, and batches of one or more")
    # memory first, small batches first: what the timed runs leave in the process would be counted too
    first = engines(1)
    counts = [(batch, num) for batch in sorted(batches) for num in ([batch, queued] if queued else [batch])]
    filled = [_fill(first, request) for request in requests]
    plans = [(request, contenders(request, first.runner.seq_len, names, gammas, verify)) for request in filled]
    for contender in (c for _, plan in plans for c in plan.values() if c is not None):
        first.check(contender)
    memory = [_memory(first, requests[0], batch, num) for batch, num in counts]
    cases = [(batch, *plan) for batch in batches for plan in plans]
    rows, total = [], sum(len(plan) for _, _, plan in cases) * (runs + 1)
    with tqdm(total=total, unit=" run", disable=not progress) as bar:
        for batch, request, plan in cases:
            engine = engines(batch)
            timed: dict[str, list[dict]] = {name: [] for name in plan}
            for i in range(runs + 1):  # the first warms up
                for name, contender in plan.items():
                    made = _timed(engine, contender, request, batch, i, accuracy)
                    if i:
                        timed[name].append(made)
                    bar.update()
            rows += [_row(name, batch, request, timed[name], timed["ar"]) for name in timed]
    report = {"schema": SCHEMA, "family": first.runner.family, "machine": first.describe(), "runs": runs}
    return report | {"rows": rows, "memory": memory}


def _fill(engine: Engine, request: Request) -> Request:
    """The request with K, guidance and the like filled in, and the options of methods as they were given."""
    return dataclasses.replace(request, **_common_settings(engine.resolve(with_method(request, "ar"))))


def _common_settings(request: Request) -> dict:
    """Those settings of a resolved request that all methods of its family have."""
    return {option.name: getattr(request, option.name) for option in COMMON[request.family]}


def _requests(engine: Engine, request: Request, num: int, first: int = 0) -> list[Request]:
    classes = engine.runner.num_classes
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
    timed = {"seconds": time.perf_counter() - start}
    timed |= {name: getattr(outputs[0].request, name) for name in ("first_timestep", "window")}
    return timed | _mean_stats(outputs) | _judge([o.image for o in outputs], requests, accuracy)


def _mean_stats(outputs: list[Output]) -> dict:
    stats = [output.stats for output in outputs]
    judged, accepted = (sum(sum(s.by_lag[i]) for s in stats) for i in (0, 1))
    names = ("head_calls_per_token", "backbone_calls", "head_calls", "draft_backbone_calls", "draft_head_calls")
    mean = {name: statistics.mean(getattr(s, name) for s in stats) for name in names}
    mean |= {"alpha": accepted / judged if judged else None, "guarantee": stats[0].guarantee}
    mean |= {"stats": [vars(s) for s in stats]}
    if stats[0].committed:  # VQ codes
        spent = {phase: sum(s.seconds[phase] for s in stats) for phase in ("backbone", "draft", "other")}
        bounded = stats[0].guarantee != "heuristic"
        bound = min(1.0, statistics.mean(s.bound for s in stats)) if bounded else None
        mean |= {"bound": bound, "overhead": spent["other"] / sum(spent.values())}
        mean |= {"step_compression": statistics.mean(s.step_compression for s in stats)}
    return mean


def _judge(images: Sequence[Tensor], requests: list[Request], accuracy: Callable | None) -> dict:
    if accuracy is None or images[0] is None:
        return {}
    return {"accuracy": accuracy(torch.stack(list(images)).cpu(), torch.tensor([r.label for r in requests]))}


def _published(engine: Engine, requests: list[Request]) -> Tensor:
    labels = torch.tensor([r.label for r in requests], device=engine.device)
    settings = _common_settings(engine.check(with_method(requests[0], "ar")))
    with torch.inference_mode():
        return engine.runner.decode(engine.runner.published(labels, settings))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(name: str, batch: int, request: Request, timed: list[dict], base: list[dict]) -> dict:
    seconds = [t["seconds"] for t in timed]
    speed_up = [b["seconds"] / t["seconds"] for t, b in zip(timed, base)]
    row = {"name": name, "batch": batch, "num_iter": request.num_iter, "cfg": request.cfg}
    row |= {"seconds": spread(seconds), "speed_up": spread(speed_up)}
    row["images_per_second"] = batch / row["seconds"]["median"]
    row |= measured([image for t in timed for image in t.get("stats", [])])
    for key in timed[0].keys() - {"seconds", "stats"}:
        values = [t[key] for t in timed]
        row[key] = values[0] if key == "guarantee" or None in values else statistics.mean(values)
    return row


def _memory(engine: Engine, request: Request, batch: int, num: int) -> dict:
    """Peak memory of `num` short requests through `batch` slots; the images are dropped as they come."""
    small, quick = engine.with_slots(batch), with_method(request, "ar")
    known = {option.name for option in COMMON[engine.runner.family]}
    quick = dataclasses.replace(quick, **{name: n for name, n in MEMORY_SETTINGS.items() if name in known})
    reset_peak(engine.device)
    for _ in small.stream(_requests(engine, quick, num)):
        pass
    return {"slots": batch, "requests": num, "num_iter": quick.num_iter, "peak_bytes": peak_bytes(engine.device)}


def _runs_told(runs: int) -> str:
    """What the numbers are of so many runs, and how sure their least and most are to enclose the true median."""
    if runs == 1:
        return "one run of each"
    coverage = 1 - 0.5 ** (runs - 1)
    return f"medians of {runs} runs (least..most holds the true median with {coverage:.0%})"


# of the report, where some row has something: title, width, what of a row, format
COLUMNS = [
    ("guarantee", 9, "guarantee", ""),
    ("K", 3, "num_iter", ".0f"),
    ("cfg", 4, "cfg", "g"),
    ("batch", 5, "batch", "d"),
    ("first t", 7, "first_timestep", ".0f"),
    ("W", 3, "window", ".0f"),
    ("seconds", 8, "seconds", ".3f"),
    ("images/s", 8, "images_per_second", ".2f"),
    ("x ar (least..most)", 19, "speed_up", ""),
    ("calls/token", 11, "head_calls_per_token", ".1f"),
    ("codes/forward", 13, "step_compression", ".2f"),
    ("draft calls", 11, "draft_backbone_calls", ".1f"),
    ("alpha", 5, "alpha", ".3f"),
    ("bound", 6, "bound", ".3f"),
    ("difference", 10, "difference", ".3f"),
    ("divergence", 10, "divergence", ".3f"),
    ("audit", 6, "audit", ".3f"),
    ("+- s.e.", 7, "audit_error", ".3f"),
    ("overhead", 8, "overhead", ".0%"),
    ("class acc.", 10, "accuracy", ".3f"),
]


def _has(row: dict, key: str) -> bool:
    """Whether a row has something to show: calls that its models never make are not."""
    return row.get(key) is not None and (row[key] != 0 or "calls" not in key)


def _cell(row: dict, key: str, form: str) -> str:
    value = row.get(key)
    if key == "speed_up":
        return f"{value['median']:.2f} ({value['min']:.2f}..{value['max']:.2f})"
    value = value["median"] if key == "seconds" else value
    return "" if value is None else format(value, form)


def format_bench(report: dict) -> str:
    """The report as text."""
    machine = report["machine"]
    columns = [column for column in COLUMNS if any(_has(row, column[2]) for row in report["rows"])]
    how = [machine["precision"], *(name for name in ("compiled", "graphs") if machine.get(name))]
    name_width = max(len(row["name"]) for row in report["rows"])
    lines = [
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}, {', '.join(how)};"
        f" {_runs_told(report['runs'])}",
        "",
        " ".join(["sampler".ljust(name_width), *(title.rjust(width) for title, width, _, _ in columns)]),
    ]
    for row in report["rows"]:
        cells = (_cell(row, key, form).rjust(width) for _, width, key, form in columns)
        lines.append(" ".join([row["name"].ljust(name_width), *cells]))
    lines.append("")
    for m in report["memory"]:
        what = f"{m['requests']} requests through {m['slots']} slots"
        what += f" (K = {m['num_iter']})" if m.get("num_iter") else ""
        lines.append(f"peak memory, {what}: {m['peak_bytes'] / 2**20:.0f} MiB")
    return "\n".join(lines)


# `cspd bench`: how fast this machine samples.


def _check_files(args: argparse.Namespace) -> None:
    """Raises ValueError or OSError where what is asked for cannot be written, before minutes of timing."""
    if args.json:
        check_file(args.json, "--json")
    if args.plot:
        check_file(args.plot, "--plot")
        formats = FigureCanvasBase.get_supported_filetypes()
        if _image_format(args.plot) not in formats:
            raise ValueError(f"--plot {args.plot}: give a name that ends in one of .{', .'.join(formats)}")
        if space_of(checkpoint_files(args.checkpoint)["target"]) is None:
            raise ValueError(f"--plot {args.plot}: only the bundled models' images have a classifier: leave it out")


def _image_format(path: Path) -> str:
    """What a picture's name says; PNG where it says nothing."""
    return path.suffix.removeprefix(".").lower() or "png"


def run_bench(args: argparse.Namespace) -> None:
    _check_files(args)
    family = family_of(args.checkpoint)
    known = [m.name for m in METHODS if m.family == family and m.guarantee != "heuristic" and m.name != "ar"]
    names = args.methods or [*known, PUBLISHED]
    if "cspd" not in method_names([family]) and (args.gamma or args.verify):
        raise ValueError("--gamma, --verify: here of cspd; options of others follow their name, --methods sd:gamma=4")
    for name in names:
        parse_method(name, more=[PUBLISHED])  # a misspelt one is told before models are loaded
    target = load_engine(args, 1)
    check_classes(target, "cspd bench", "cspd compare --prompts FILE")
    settings = itertools.product(args.num_iter or [None], args.cfg or [None])
    requests = [request_of(args, num_iter=k, cfg=s, gamma=None, verify=None) for k, s in settings]
    settings = _files(args, target, requests[0], names)
    space = space_of(checkpoint_files(args.checkpoint)["target"])
    judge = None if space is None else functools.partial(accuracy, load_classifier(space))
    report = bench(
        target.with_slots,
        requests,
        args.batch,
        names,
        gammas=args.gamma or [8, 16],
        verify=args.verify or ["parallel"],
        runs=args.runs,
        queued=args.queued,
        accuracy=judge,
    )
    print(format_bench(report))
    if args.json:
        ran = what_ran(report["machine"], models_of(settings, target.runner), args.line)
        write_json(args.json, report | {"ran": ran})
        print(f"wrote {args.json}")
    if args.plot:
        write_bytes(args.plot, *speed_quality([_panel(report)], _image_format(args.plot)))
        print(f"wrote {args.plot}")


def _files(args: argparse.Namespace, target: Engine, request: Request, names: Sequence[str]) -> dict:
    """As `run_settings`, of all methods that are timed."""
    settings: dict = {}
    for name in ("ar", *names):
        method, options = parse_method(name, more=[PUBLISHED])
        if method != PUBLISHED:
            settings |= run_settings(args, target.check(with_method(request, method).but(**options)))
    return settings


def _panel(report: dict) -> Panel:
    """What `--plot` shows of a report: a line a method, in each case that was timed."""
    rows = [row for row in report["rows"] if "accuracy" in row]
    several = len({(row["batch"], row["cfg"]) for row in rows}) > 1
    points = []
    for row in rows:
        method, _, options = row["name"].partition(":")
        case = f", batch {row['batch']}, cfg {row['cfg']:g}" if several else ""
        speed = row["speed_up"]
        limits = speed["min"], speed["max"]
        guarantee = row.get("guarantee", "exact")  # the published sampler is
        points.append(Point(options, speed["median"], row["accuracy"], method + case, limits, guarantee=guarantee))
    return Panel("speed-up over baseline sampling", "share recognised by the classifier", points)


# `cspd calibrate`: what `speculative` and `calibrated` do on first use, ahead of time.

SHOWN = (4, 6, 8, 10, 12, 16, 20, 25, 32, 50)  # head calls per token
PREPARED = ("speculative", "calibrated")


def run_calibrate(args: argparse.Namespace) -> None:
    asked = check_method(args)
    method = asked.name
    if asked.family != "MAR" or method not in PREPARED:
        prepared = f"give --method {' or '.join(PREPARED)}, of MAR"
        raise ValueError(f"{method!r} of {asked.family} models is not prepared by itself: {prepared}")
    if args.force and method != "speculative":
        raise ValueError(f"--force measures this device again, and {method!r} depends on none: leave it out")
    engine = load_engine(args, 1)
    request = engine.check(request_of(args))
    if method == "speculative":
        _show_speculative(engine, request, args.force)
    else:
        _show_calibrated(engine, request)


def _show_calibrated(engine: Engine, request: Request) -> None:
    """Fits the windows of a request's head calls, and tells what other numbers of calls would cost."""
    request = engine.resolve(request)
    calibrations = engine.runner.tuning.calibrations["target"]
    shortcut = calibrations.shortcut(request)
    has_noise = request.temperature > 0
    aside = "" if has_noise else "; without noise there is none, and this is what it would be at temperature 1"
    print(f"head calls per token, and the divergence predicted for them (all {request.num_sampling_steps}: 0{aside}):")
    for plan in plans(calibrations.predictor(request).skip_cost):
        if len(plan.steps) in SHOWN:
            print(f"  {len(plan.steps):>3}: {plan.cost:7.3f} nats per token")
    print(f"taken: {request.head_calls}, at the steps {', '.join(map(str, shortcut.steps))}")
    print(f"  r.m.s. difference from the full chain's tokens: {shortcut.difference.item():.4f} standard deviations")
    if has_noise:
        print(f"  divergence of the path, measured on held-out tokens: {shortcut.divergence.item():.3f} nats per token")
    print(f"kept in {calibrations.folder_of(request, Shortcut) or 'no folder: none can be written to'}")


def _show_speculative(engine: Engine, request: Request, force: bool) -> None:
    """Fits the drafts, measures this device, and tells what windows they give."""
    if request.temperature == 0 or request.num_sampling_steps < 3:
        raise ValueError(
            f"temperature={request.temperature}, num_sampling_steps={request.num_sampling_steps}: there is nothing to"
            " speculate on without noise or below 3 steps; give others"
        )
    tuning = engine.runner.tuning
    calibrations = tuning.calibrations["target"]
    costs, calibration = tuning.costs(request.guided, force), calibrations.get(request)
    print(f"head calls per token, simulated on the fit's own chains (ancestral: {request.num_sampling_steps}):")
    for window, calls in zip(WINDOWS, calibration.calls):
        if window > request.num_sampling_steps:
            break
        print(f"  window {window:>2}: {calls.mean():5.1f}")
    print("seconds of the head per token, predicted for this device, and the window taken, by tokens at once:")
    for rows in (1, 4, 16, 64, 256):
        window = costs.choose(request.num_sampling_steps, rows, lambda: calibration).config["window"]
        calls = calibration.calls[WINDOWS.index(window)] if window else None
        seconds = [
            costs.head_seconds(request.num_sampling_steps, rows, w, c) / rows for w, c in ((0, None), (window, calls))
        ]
        print(f"  {rows:>3}: ancestral {seconds[0]:.5f}, speculative {seconds[1]:.5f}, window {window}")
    print(f"kept in {calibrations.folder_of(request, Calibration) or 'no folder'} and {user_cache()}")


# `cspd gpu-check`: whether all is right on this GPU, and how fast it is.

MOST_MINUTES = 24 * 60


def run_gpu_check(args: argparse.Namespace) -> int:
    if args.show:
        report = read_report(args.show)
        print(format_check(report))
        return int(bool(failures(report)))
    device = pick_device(args.device)
    if device.type == "cpu" and not args.tiny:
        raise ValueError("there is no GPU, and official sizes take hours on a CPU: give --tiny to try the command")
    check_file(args.out, "--out")
    with if_stopped(lambda: f"what was found is in {args.out}"):
        report = check(args.out, device, PARTS, tiny=args.tiny, minutes=args.minutes, overwrite=args.overwrite)
    print(format_check(report))
    print(f"wrote {args.out}")
    return int(bool(failures(report)))
