"""`cspd calibrate`: what `speculative` and `calibrated` do on first use, ahead of time."""

from __future__ import annotations

import argparse

from cspd.commands.options import (
    check_method,
    load_engine,
    request_of,
)
from cspd.continuous.calibration import WINDOWS, Calibration
from cspd.continuous.plan import plans
from cspd.continuous.shortcut import Shortcut
from cspd.engine import Engine
from cspd.keeping import user_cache
from cspd.sequence import Request

SHOWN = (4, 6, 8, 10, 12, 16, 20, 25, 32, 50)  # head calls per token
PREPARED = ("speculative", "calibrated")


def run(args: argparse.Namespace) -> None:
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
    calibrations = engine.host.tuning.calibrations["target"]
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
    tuning = engine.host.tuning
    calibrations = tuning.calibrations["target"]
    costs, calibration = tuning.costs(request.guided, force), calibrations.get(request)
    print(f"head calls per token, simulated on the fit's own chains (ancestral: {request.num_sampling_steps}):")
    for window, calls in zip(WINDOWS, calibration.calls):
        if window > request.num_sampling_steps:
            break
        print(f"  window {window:>2}: {calls.mean():5.1f}")
    print("seconds of the head per token, predicted for this device, and the window taken, by tokens at once:")
    for rows in (1, 4, 16, 64, 256):
        window = costs.choose(request.num_sampling_steps, rows, lambda: calibration).way["window"]
        calls = calibration.calls[WINDOWS.index(window)] if window else None
        seconds = [
            costs.head_seconds(request.num_sampling_steps, rows, w, c) / rows for w, c in ((0, None), (window, calls))
        ]
        print(f"  {rows:>3}: ancestral {seconds[0]:.5f}, speculative {seconds[1]:.5f}, window {window}")
    print(f"kept in {calibrations.folder_of(request, Calibration) or 'no folder'} and {user_cache()}")
