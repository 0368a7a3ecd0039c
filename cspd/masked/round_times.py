"""Times of MAR's rounds on this device: the whole and the cached backbone, and head calls."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cspd import noise
from cspd.continuous.rows import full_conditions
from cspd.device import seconds_of
from cspd.heads.calibrated import Predictor, follow, make_segments, plan_of
from cspd.heads.chain import Chain, Inputs, Schedule, is_full_call
from cspd.masked.backbones import cached_conditions
from cspd.masked.plan import JOINED, LAZY
from cspd.masked.replay import Replay, tokens_by_iteration
from cspd.masked.runner import MARRunner
from cspd.request import Request
from cspd.tuner import Times, in_turns, unsteadiness

TIMED = 6  # iterations of which the backbone is timed
TURNS = 4
CALLS = 10  # head calls of the chains that are timed


@torch.inference_mode()
def time_rounds(replay: Replay, predictor: Predictor) -> Times:
    """Times the backbone and head calls of a batch that fills a replay's slots, whatever its tokens are."""
    runner, num_iter = replay.runner, replay.num_iter
    request = replay.batch[0].request
    iterations = np.unique(np.linspace(min(1, num_iter - 1), num_iter - 1, TIMED).round().astype(int)).tolist()
    counts = tokens_by_iteration(request, runner.seq_len)
    several = counts.max() * np.array([1, 4, 1 + JOINED])
    sizes = np.unique([counts.min(), *several.clip(max=counts.sum())]) * len(replay.batch)

    works: dict[tuple[str, int], Callable[[], float]] = {}
    for iteration in iterations:
        works["full", iteration] = functools.partial(_time_full, replay, iteration)
        for i, settings in enumerate(LAZY):
            works[f"lazy {i}", iteration] = functools.partial(_time_lazy, replay, iteration, settings)
    num_calls = min(CALLS, len(runner.target.head.schedule(request.num_sampling_steps)))
    for size in map(int, sizes):
        for name, null_every in (("complete", 1), ("mixed", num_calls)):
            chains = _calls(runner, predictor, request, size, null_every)
            works[name, size] = functools.partial(seconds_of, chains, runner.device)
    measured = in_turns(works, TURNS)

    seconds = {work: statistics.median(own) for work, own in measured.items()}
    num_branches = 2 if request.guided else 1
    of_calls = [
        seconds_of_calls(seconds["complete", size], seconds["mixed", size], num_calls, num_branches) for size in sizes
    ]
    times = Times({name: np.array([sizes, own]) for name, own in zip(("both", "one"), zip(*of_calls))})
    for name in ("full", *(f"lazy {i}" for i in range(len(LAZY)))):
        own = [seconds[name, iteration] for iteration in iterations]
        times[name] = np.array([1 + np.array(iterations), own])
    times.unsteadiness = unsteadiness(measured.values())
    return times


def _time_full(replay: Replay, iteration: int) -> float:
    rows = replay.rows(iteration)
    return seconds_of(lambda: full_conditions(replay.runner, replay.batch, rows), replay.runner.device)


def _time_lazy(replay: Replay, iteration: int, settings: dict) -> float:
    """Seconds of the cached backbone one iteration after a refresh; for iteration 0, of the whole one."""
    if iteration == 0:
        return _time_full(replay, iteration)
    next(replay.conditions(cached_conditions, iteration - 1, refreshes=str(iteration - 1), **settings))
    rows = replay.rows(iteration)
    return seconds_of(lambda: cached_conditions(replay.runner, replay.batch, rows), replay.runner.device)


def _calls(runner: MARRunner, predictor: Predictor, request: Request, size: int, null_every: int) -> Callable[[], Any]:
    """Work of chains of a few head calls on `size` tokens."""
    head, device = runner.target.head, runner.device
    s = head.schedule(request.num_sampling_steps)
    num_calls = min(CALLS, len(s))
    steps = plan_of(predictor.skip_cost, num_calls).steps
    num_branches = 2 if request.guided else 1
    z = torch.randn(num_branches, size, head.cond_dim, generator=torch.Generator().manual_seed(0)).to(device)
    ones, index = torch.ones(size, 1, device=device), torch.arange(size, device=device)
    segments = make_segments(steps, s, predictor, np.zeros((num_calls, 2)), null_every, device)
    draw = functools.partial(_draw, runner, s, segments)
    return functools.partial(runner.graphs.run, ("timed", null_every, size), draw, z, ones, ones, index, index)


def seconds_of_calls(complete: float, mixed: float, num_calls: int, num_branches: int) -> tuple[float, float]:
    """Seconds of a head call with both branches, and with the conditional one only.

    Args:
        complete, mixed: seconds of two chains of `num_calls`. In the first one all calls are complete, in the second
            one those of `is_full_call`.
    """
    num_full = sum(is_full_call(i, num_calls, num_calls) for i in range(num_calls))
    both = complete / num_calls
    if num_branches == 1 or num_full == num_calls:
        return both, both
    one = (mixed - num_full * both) / (num_calls - num_full)
    return both, min(max(one, 0.0), both)


def _draw(runner: MARRunner, s: Schedule, segments: list, *inputs: Tensor) -> Tensor:
    """Tokens by calibrated chains."""
    with runner.precision.fast():
        return follow(Chain(runner.target.head, s, Inputs(*inputs), noise, runner.precision), segments)
