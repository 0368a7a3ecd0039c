"""`cspd calibrate`: what `speculative` does on first use, ahead of time."""

from __future__ import annotations

import argparse

from cspd.commands.options import add_model_options, add_request_options, check_method, load_engine, request_of
from cspd.continuous.calibration import WINDOWS
from cspd.continuous.tuning import user_cache
from cspd.lookup import method_of


def add(commands: argparse._SubParsersAction) -> None:
    """Declares the command."""
    text = "Fits the drafts of `speculative` for these settings, measures this device, and shows what both give."
    calibrate = commands.add_parser("calibrate", help="prepare `speculative` ahead of time", description=text)
    calibrate.set_defaults(run=run)
    add_model_options(calibrate)
    add_request_options(calibrate)
    calibrate.add_argument("--force", action="store_true", help="measure this device again")


def run(args: argparse.Namespace) -> None:
    check_method(args)
    engine = load_engine(args, 1)
    request = engine.check(request_of(args))
    if method_of(request).needs != "calibration":
        raise ValueError(f"{args.checkpoint}: {request.method!r} needs no calibration; it is of MAR's `speculative`")
    if request.temperature == 0 or request.num_sampling_steps < 3:
        raise ValueError(
            f"temperature={request.temperature}, num_sampling_steps={request.num_sampling_steps}: there is nothing to"
            " speculate on without noise or below 3 steps; give others"
        )
    tuning = engine.host.tuning
    calibrations = tuning.calibrations["target"]
    costs, calibration = tuning.costs(request.guided, args.force), calibrations.get(request)
    print(f"head calls a token, simulated on the fit's own chains (ancestral: {request.num_sampling_steps}):")
    for window, calls in zip(WINDOWS, calibration.calls):
        if window > request.num_sampling_steps:
            break
        print(f"  window {window:>2}: {calls.mean():5.1f}")
    print("seconds of the head for a token, predicted for this device, and the window taken, by tokens at once:")
    for rows in (1, 4, 16, 64, 256):
        window = costs.window(request.num_sampling_steps, rows, calibration)
        calls = calibration.calls[WINDOWS.index(window)] if window else None
        seconds = [
            costs.head_seconds(request.num_sampling_steps, rows, w, c) / rows for w, c in ((0, None), (window, calls))
        ]
        print(f"  {rows:>3}: ancestral {seconds[0]:.5f}, speculative {seconds[1]:.5f}, window {window}")
    print(f"kept in {calibrations.folder_of(request)} and {user_cache()}")
