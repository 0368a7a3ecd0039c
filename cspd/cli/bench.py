"""The commands about this machine: `cspd bench`, `cspd calibrate` and `cspd gpu-check`."""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.backend_bases import FigureCanvasBase
from torch import Tensor

from cspd.checkpoints import checkpoint_files, family_of, run_settings
from cspd.cli.options import check_classes, check_method, load_engine, request_of
from cspd.continuous.tuning import head_seconds
from cspd.device import peak_bytes, pick_device, reset_peak, seconds_of, spread, trim
from cspd.engine import Engine
from cspd.evaluation.metrics import accuracy, load_classifier, space_of
from cspd.files import check_file, user_cache, write_bytes, write_json
from cspd.gpu_check.right import RIGHT
from cspd.gpu_check.run import failures, format_report, read_report, run_question
from cspd.gpu_check.sizes import FULL, TINY, Setup
from cspd.gpu_check.times import FAST, WHERE
from cspd.heads.calibrated import Shortcut, plans
from cspd.heads.calibration import WINDOWS, Calibration
from cspd.method import METHODS, PUBLISHED, find, method_names, parse_method, with_method
from cspd.option import COMMON, method_now
from cspd.origin import models_of, what_ran
from cspd.plots import Panel, PlotPoint, speed_quality
from cspd.request import Request, RoundStats
from cspd.summary import measured, measured_lines
from cspd.terminal import if_stopped, progress_bar

# `cspd bench`: the speed of sampling, end to end, relative to baseline sampling.

SCHEMA = "cspd.bench/2"
Accuracy = Callable[[Tensor, Tensor], float]  # images [N, 3, H, W] and labels [N] -> fraction recognised


def contenders(
    request: Request, seq_len: int, names: Sequence[str], gammas: Sequence[int], verify: Sequence[str]
) -> dict[str, Request | None]:
    """The requests to time, by the names in the report; None is the authors' own sampler.

    The name `mar-draft` is tried with each of `gammas` and `verify`. Next to it stands baseline sampling with K = L /
    gamma iterations, as many as the parallel form has rounds. Options may follow a name: "cool-sd:delta=1.5:gamma=4".

    Raises ValueError on an unknown method or option, or a gamma below 1.
    """
    baseline = with_method(request, "ar")
    found: dict[str, Request | None] = {"ar": baseline}
    for name in names:
        if name == PUBLISHED:
            found[name] = None
        elif method_now(name) == "mar-draft":
            for gamma in gammas:
                option = find("mar-draft", "MAR").option("gamma", request)
                assert option is not None  # of this method
                option.check(gamma)
                num_rounds = -(-seq_len // gamma)
                found[f"ar K={num_rounds}"] = baseline.but(num_iter=num_rounds)
                for mode in verify:
                    found[f"mar-draft {gamma} {mode}"] = with_method(request, "mar-draft").but(gamma=gamma, verify=mode)
        else:
            method, options = parse_method(name, more=(PUBLISHED,))
            if method == PUBLISHED:
                raise ValueError(f"{name!r}: the authors' own sampler has no options: write {PUBLISHED}")
            # the options are set again, so that the check rejects the ones that the method does not have
            found[name] = with_method(request.but(**options), method).but(**options)
    return found


Case = tuple[Request, dict[str, Request | None]]  # a request with a setting to time, and its contenders by name


def case_of(
    engine: Engine, request: Request, names: Sequence[str], gammas: Sequence[int], verify: Sequence[str]
) -> Case:
    """The contenders of a request, with the defaults of the models filled in.

    Args:
        names, gammas, verify: see `contenders`.

    Raises:
        ValueError: an invalid request.
    """
    request = replace(request, **_common_settings(engine.resolve(with_method(request, "ar"))))
    found = contenders(request, engine.runner.seq_len, names, gammas, verify)
    for contender in found.values():
        if contender is not None:
            engine.check(contender)
    return request, found


def bench(
    engine: Engine,
    cases: Sequence[Case],
    batches: Sequence[int],
    runs: int,
    queued: int | None,
    accuracy: Accuracy | None,
) -> dict:
    """Times methods against baseline sampling, at several settings and batch sizes.

    Every run times each contender once, so that a machine that slows down slows all of them; speed-ups are ratios
    within one run. Labels and seeds differ between the images of a run, and between runs.

    Args:
        engine: gets as many slots as each batch has images; the window of `speculative` depends on them.
        cases: one for each setting to time, whose request has the first label and seed.
        queued: also measure each contender's peak memory on this many requests of the first setting, through each
            number of slots.

    Returns:
        A JSON-able report, see `format_bench`.
    """
    # Memory comes before the timed runs, and small batches first: a peak includes the caches that earlier runs keep.
    first = {name: contender for name, contender in cases[0][1].items() if contender is not None}
    peaks = []
    for batch in sorted(batches):
        peaks.append(("ar", batch, batch))
        if queued:
            peaks += [(name, batch, queued) for name in first]

    rows = []
    captures = []
    num_timed = sum(len(timed_requests) for _, timed_requests in cases)
    with progress_bar(total=len(peaks) + len(batches) * num_timed * (runs + 1), unit=" run") as bar:
        memory = []
        for name, batch, num in peaks:
            memory.append(_memory(engine, name, first[name], batch, num))
            bar.update()
        for batch, (request, timed_requests) in itertools.product(batches, cases):
            own = engine.with_slots(batch)
            timed: dict[str, list[dict]] = {name: [] for name in timed_requests}
            # run 0 warms up: compilation, graph capture, calibration
            for run in range(runs + 1):
                for name, contender in timed_requests.items():
                    result = _timed(own, contender, request, batch, run, accuracy)
                    if run > 0:
                        timed[name].append(result)
                    bar.update()
            rows += [_row(name, batch, request, results, timed["ar"]) for name, results in timed.items()]
            if own.graphs.captures:
                captures.append(f"batch {batch}: {own.graphs.summary()}")
    return {
        "schema": SCHEMA,
        "family": engine.runner.family,
        "machine": engine.describe(),
        "runs": runs,
        "rows": rows,
        "memory": memory,
        "captures": captures,
    }


def _common_settings(request: Request) -> dict:
    """The settings of a resolved request that all methods of its family have."""
    return {option.name: getattr(request, option.name) for option in COMMON[str(request.family)]}


def _requests(engine: Engine, request: Request, num: int, first: int = 0) -> list[Request]:
    """`num` requests with consecutive labels and seeds, from the `first` one on."""
    classes = engine.runner.num_classes
    requests = []
    label: Any = request.label
    for i in range(first, first + num):
        requests.append(replace(request, label=(label + i) % classes, seed=request.seed + i))
    return requests


def _timed(
    engine: Engine, contender: Request | None, request: Request, batch: int, run: int, accuracy: Accuracy | None
) -> dict:
    """Times one batch."""
    requests = _requests(engine, contender or request, batch, first=run * batch)
    # without a contender, the authors' own sampler runs at the same settings; it returns images without statistics
    sample = functools.partial(_published, engine) if contender is None else engine.generate
    results: list = []
    timed: dict = {"seconds": seconds_of(lambda: results.extend(sample(requests)), engine.device)}
    images = results
    if contender is not None:
        resolved = results[0].request
        timed |= {"first_timestep": resolved.first_timestep, "window": resolved.window}
        timed |= _mean_stats([output.stats for output in results])
        images = [output.image for output in results]
    if accuracy is not None and images[0] is not None:
        labels = torch.tensor([each.label for each in requests])
        timed["accuracy"] = accuracy(torch.stack(images).cpu(), labels)
    return timed


def _published(engine: Engine, requests: list[Request]) -> list[Tensor | None]:
    """The images [3, H, W] of the authors' own sampler; None without an autoencoder."""
    labels = torch.tensor([request.label for request in requests], device=engine.device)
    settings = _common_settings(engine.check(with_method(requests[0], "ar")))
    with torch.inference_mode():
        images = engine.runner.decode(engine.runner.published(labels, settings))
    return [None] * len(requests) if images is None else list(images)


def _mean_stats(stats: list[RoundStats]) -> dict:
    """Means over the images of a batch, and `stats` itself, for means over all runs."""
    verified = sum(sum(each.by_lag[0]) for each in stats)
    accepted = sum(sum(each.by_lag[1]) for each in stats)
    guarantee = stats[0].guarantee
    means = {
        "alpha": accepted / verified if verified else None,
        "guarantee": guarantee,
        "stats": [vars(each) for each in stats],
    }
    for name in ("head_calls_per_token", "backbone_calls", "head_calls", "draft_backbone_calls", "draft_head_calls"):
        means[name] = statistics.mean(getattr(each, name) for each in stats)
    # only VQ models have counts of committed tokens
    if stats[0].committed:
        seconds = {phase: sum(each.seconds[phase] for each in stats) for phase in ("backbone", "draft", "other")}
        means["overhead"] = seconds["other"] / sum(seconds.values())
        means["bound"] = None
        if guarantee != "heuristic":
            # the mean of the summed local bounds; a total variation distance is never above 1
            means["bound"] = min(1.0, statistics.mean(each.bound for each in stats))
        means["step_compression"] = statistics.mean(each.step_compression or 0 for each in stats)
    return means


def _row(name: str, batch: int, request: Request, timed: list[dict], baseline: list[dict]) -> dict:
    """The results of a contender's runs; `baseline` has the same runs of `ar`."""
    seconds = spread([run["seconds"] for run in timed])
    row = {
        "name": name,
        "batch": batch,
        "num_iter": request.num_iter,
        "cfg": request.cfg,
        "seconds": seconds,
        "speed_up": spread([base["seconds"] / run["seconds"] for run, base in zip(timed, baseline)]),
        "images_per_second": batch / seconds["median"],
    }
    # a value per run becomes its mean over the runs
    row |= measured([image for run in timed for image in run.get("stats", [])])
    for key in timed[0].keys() - {"seconds", "stats"}:
        values = [run[key] for run in timed]
        row[key] = values[0] if key == "guarantee" or None in values else statistics.mean(values)
    return row


def _memory(engine: Engine, name: str, contender: Request, batch: int, num: int) -> dict:
    """Peak memory of `num` requests through `batch` slots. The images are dropped at once."""
    own = engine.with_slots(batch)
    num_iter = own.resolve(contender).num_iter  # calibrates first, so that the peak is that of sampling
    trim()
    reset_peak(engine.device)
    for _ in own.stream(_requests(engine, contender, num)):
        pass
    return {
        "name": name,
        "slots": batch,
        "requests": num,
        "num_iter": num_iter,
        "peak_bytes": peak_bytes(engine.device),
    }


# Columns of the report, each shown if a row has a value: title, width, key in the row, format.
COLUMNS = [
    ("guarantee", 11, "guarantee", ""),
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
    ("accepted", 8, "alpha", ".1%"),
    ("bound", 6, "bound", ".3f"),
    ("difference", 10, "difference", ".3f"),
    ("+- s.e.", 7, "difference_error", ".3f"),
    ("worst 1 %", 9, "difference_worst_percent", ".3f"),
    ("audit", 6, "audit", ".3f"),
    ("+- s.e.", 7, "audit_error", ".3f"),
    ("overhead", 8, "overhead", ".0%"),
    ("class acc.", 10, "accuracy", ".3f"),
]


def _has(row: dict, key: str) -> bool:
    """Whether a row has a value to show. Counts of calls that its models never make are 0."""
    value = row.get(key)
    return value is not None and not (value == 0 and "calls" in key)


def _cell(row: dict, key: str, form: str) -> str:
    value = row.get(key)
    if value is None:
        return ""
    if key == "speed_up":
        return f"{value['median']:.2f} ({value['min']:.2f}..{value['max']:.2f})"
    if key == "seconds":
        value = value["median"]
    return format(value, form)


def _runs_line(runs: int) -> str:
    """What the numbers are, and the probability that the true median lies between the minimum and the maximum."""
    if runs == 1:
        return "one run of each"
    # independent runs all lie on one side of the true median with probability 2 / 2^runs
    coverage = 1 - 0.5 ** (runs - 1)
    return f"medians of {runs} runs (least..most holds the true median with {coverage:.0%})"


def format_bench(report: dict) -> str:
    """The report as text."""
    machine = report["machine"]
    how = [machine["precision"]]
    how += [name for name in ("compiled", "graphs") if machine.get(name)]
    about = f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}, {', '.join(how)}"

    rows = report["rows"]
    columns = [column for column in COLUMNS if any(_has(row, column[2]) for row in rows)]
    name_width = max(len(row["name"]) for row in rows)
    titles = [title.rjust(width) for title, width, _, _ in columns]
    lines = [f"{about}; {_runs_line(report['runs'])}", "", " ".join(["sampler".ljust(name_width), *titles])]
    for row in rows:
        cells = [_cell(row, key, form).rjust(width) for _, width, key, form in columns]
        lines.append(" ".join([row["name"].ljust(name_width), *cells]))

    lines.append("")
    for peak in report["memory"]:
        settings = f" (K = {peak['num_iter']})" if peak.get("num_iter") else ""
        work = f"{peak['requests']} requests of {peak['name']} through {peak['slots']} slots{settings}"
        lines.append(f"peak memory, {work}: {peak['peak_bytes'] / 2**20:.0f} MiB")
    lines += report.get("captures", [])
    return "\n".join(lines)


def run_bench(args: argparse.Namespace) -> None:
    _check_files(args)
    family = family_of(args.checkpoint)
    names = args.methods
    if names is None:
        guaranteed = [each.name for each in METHODS if each.family == family and each.guarantee != "heuristic"]
        # ar is always timed
        names = [name for name in guaranteed if name != "ar"] + [PUBLISHED]
    if "mar-draft" not in method_names([family]) and (args.gamma or args.verify):
        raise ValueError(
            "--gamma and --verify set options of the method `mar-draft`, which these models do not have. Put options"
            " after a method's name, e.g. --methods sd:gamma=4"
        )
    # report misspelt names before the models are loaded
    for name in names:
        parse_method(name, more=[PUBLISHED])
    engine = load_engine(args, 1)
    check_classes(engine, "cspd bench", "cspd compare --prompts FILE")
    requests = []
    for num_iter, cfg in itertools.product(args.num_iter or [None], args.cfg or [None]):
        requests.append(request_of(args, num_iter=num_iter, cfg=cfg, gamma=None, verify=None))
    settings = _all_settings(args, engine, requests[0], names)
    gammas, verify = args.gamma or [8, 16], args.verify or ["parallel"]
    target: Any = checkpoint_files(args.checkpoint)["target"]
    space = space_of(target)
    report = bench(
        engine,
        [case_of(engine, request, names, gammas, verify) for request in requests],
        args.batch,
        runs=args.runs,
        queued=args.queued,
        accuracy=None if space is None else functools.partial(accuracy, load_classifier(space)),
    )
    print(format_bench(report))
    if args.json:
        ran = what_ran(report["machine"], models_of(settings, engine.runner), args.line)
        write_json(args.json, report | {"ran": ran})
        print(f"wrote {args.json}")
    if args.plot:
        write_bytes(args.plot, *speed_quality([_panel(report)], _image_format(args.plot)))
        print(f"wrote {args.plot}")


def _check_files(args: argparse.Namespace) -> None:
    """Raises ValueError or OSError if an output cannot be written, before minutes of timing."""
    if args.json:
        check_file(args.json, "--json")
    if args.plot:
        check_file(args.plot, "--plot")
        formats = FigureCanvasBase.get_supported_filetypes()
        if _image_format(args.plot) not in formats:
            raise ValueError(f"--plot {args.plot}: the name must end in one of .{', .'.join(formats)}")
        target: Any = checkpoint_files(args.checkpoint)["target"]
        if space_of(target) is None:
            raise ValueError(f"--plot {args.plot}: only images of the bundled models have a classifier: omit --plot")


def _image_format(path: Path) -> str:
    """The format that a file's name ends in; PNG by default."""
    return path.suffix.removeprefix(".").lower() or "png"


def _all_settings(args: argparse.Namespace, engine: Engine, request: Request, names: Sequence[str]) -> dict:
    """`run_settings` of all timed methods together."""
    settings: dict = {}
    for name in ("ar", *names):
        method, options = parse_method(name, more=[PUBLISHED])
        if method != PUBLISHED:
            settings |= run_settings(args, engine.check(with_method(request, method).but(**options)))
    return settings


def _panel(report: dict) -> Panel:
    """The plot of a report: one line per method and per timed setting."""
    rows = [row for row in report["rows"] if "accuracy" in row]
    has_several_settings = len({(row["batch"], row["cfg"]) for row in rows}) > 1
    points = []
    for row in rows:
        method, _, options = row["name"].partition(":")
        setting = f", batch {row['batch']}, cfg {row['cfg']:g}" if has_several_settings else ""
        speed_up = row["speed_up"]
        limits = speed_up["min"], speed_up["max"]
        # the row of the authors' own sampler has no guarantee; it samples from the same distribution as ar
        guarantee = row.get("guarantee", "exact")
        points.append(
            PlotPoint(options, speed_up["median"], row["accuracy"], method + setting, limits, guarantee=guarantee)
        )
    return Panel("speed-up over baseline sampling", "fraction recognised by the classifier", points)


# `cspd calibrate`: what `speculative` and `calibrated` do on first use, ahead of time.

SHOWN = (4, 6, 8, 10, 12, 16, 20, 25, 32, 50)  # head calls per token
CALIBRATED = ("speculative", "calibrated")
NO_FOLDER = "memory only, because no folder is writable"


def run_calibrate(args: argparse.Namespace) -> None:
    method = check_method(args)
    name = method.name
    if method.needs != "calibration" or name not in CALIBRATED:
        methods = " or ".join(CALIBRATED)
        raise ValueError(
            f"{name!r} of {method.family} models needs no calibration: give --method {methods} of models with a"
            " diffusion head"
        )
    if args.force and name != "speculative":
        raise ValueError(f"--force times this device again, but {name!r} does not depend on the device: omit --force")
    engine = load_engine(args, 1)
    request = engine.check(request_of(args))
    if name == "speculative":
        _show_speculative(engine, request, args.force)
    else:
        _show_calibrated(engine, request)


def _chain_length(engine: Engine, request: Request) -> int:
    """Head calls of a token's full chain."""
    runner: Any = engine.runner
    return len(runner.target.head.schedule(request.num_sampling_steps))


def _show_calibrated(engine: Engine, request: Request) -> None:
    """Fits the head calls of a request, and prints the predicted divergence of other numbers of calls."""
    request = engine.resolve(request)
    runner: Any = engine.runner
    calibrations = runner.tuning.calibrations["target"]
    shortcut = calibrations.shortcut(request)
    has_noise = request.temperature > 0
    note = "" if has_noise else "; at temperature 0 it is infinite, and these are the values at temperature 1"
    num_steps = _chain_length(engine, request)
    print(f"head calls per token, and their predicted divergence from the full chain ({num_steps} calls: 0{note}):")
    for plan in plans(calibrations.predictor(request).skip_cost):
        if len(plan.steps) in SHOWN:
            print(f"  {len(plan.steps):>3}: {plan.cost:7.3f} nats per token")
    print(f"chosen: {request.head_calls} head calls, at the steps {', '.join(map(str, shortcut.steps))}")
    for title, value, meaning in measured_lines(shortcut.measured()):
        print(f"  {title}: {value} {meaning}")
    print(f"cached in {calibrations.folder_of(request, Shortcut) or NO_FOLDER}")


def _show_speculative(engine: Engine, request: Request, force: bool) -> None:
    """Fits the drafts, times this device, and prints the windows that follow."""
    num_steps = _chain_length(engine, request)
    if request.temperature == 0 or num_steps < 3:
        raise ValueError(
            f"temperature={request.temperature}, num_sampling_steps={request.num_sampling_steps}: there is nothing to"
            " draft without noise or with fewer than 3 steps: raise them"
        )
    runner: Any = engine.runner
    tuning = runner.tuning
    calibrations = tuning.calibrations["target"]
    times = tuning.head_times(request.guided, force)
    calibration = calibrations.get(request)
    print(f"head calls per token, simulated on the chains of the fit (full chain: {num_steps}):")
    # a window longer than the chain is never full
    for window, calls in zip(WINDOWS, calibration.calls):
        if window <= num_steps:
            print(f"  window {window:>2}: {calls.mean():5.1f}")
    print("seconds of the head per token, predicted for this device, by the number of tokens at once:")
    for rows in (1, 4, 16, 64, 256):
        window = tuning.window(request, rows).config["window"]
        calls = calibration.calls[WINDOWS.index(window)] if window else None
        full = head_seconds(times, num_steps, rows, 0) / rows
        speculative = head_seconds(times, num_steps, rows, window, calls) / rows
        print(f"  {rows:>3}: full chain {full:.5f}, speculative {speculative:.5f} with window {window}")
    print(f"cached in {calibrations.folder_of(request, Calibration) or NO_FOLDER}, and in {user_cache()}")


# `cspd gpu-check`: whether this GPU computes correctly, how fast it is, and where the time goes.

QUESTIONS = {question.name: question for question in (RIGHT, FAST, WHERE)}


def run_gpu_check(args: argparse.Namespace) -> int:
    question = QUESTIONS[args.question]
    path = args.out / f"{args.question}.json"
    if args.show:
        report = read_report(question, path)
    else:
        # check everything that is cheap first: a whole check takes minutes
        device = pick_device(args.device)
        if device.type == "cpu" and not args.tiny:
            raise ValueError("there is no GPU, and official sizes take hours on a CPU: give --tiny to try the command")
        if args.mar is not None and not (args.mar / "models" / "mar.py").is_file():
            raise ValueError(f"--mar {args.mar} has no models/mar.py: give a clone of github.com/LTH14/mar")
        settings = Setup(device, TINY if args.tiny else FULL, mar=args.mar and args.mar.resolve())
        with if_stopped(lambda: f"the results so far are in {path}"):
            report = run_question(question, path, settings, minutes=args.minutes, overwrite=args.overwrite)
    print(format_report(question, report))
    if not args.show:
        print(f"wrote {path}")
    return int(bool(failures(report)))
