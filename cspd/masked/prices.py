"""Prices of MAR's approximations, in nats per token: fewer head calls, cached backbones and joined iterations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Several

import numpy as np
import torch
from torch import Tensor

from cspd.continuous.calibrations import Calibrations
from cspd.continuous.rows import full_conditions
from cspd.device import send_integers
from cspd.heads.calibrated import Predictor, plan_of
from cspd.heads.calibration import Trace, joined, price_of
from cspd.heads.chain import Schedule, is_full_call
from cspd.heads.prices import of_calls, of_conditions
from cspd.masked.backbones import cached_conditions
from cspd.masked.plan import JOINED, LAZY, Prices, factors
from cspd.masked.replay import Replay
from cspd.masked.runner import MARRunner
from cspd.request import Request
from cspd.terminal import Advance, no_advance

# Exact images are sampled once, with their chains, and replayed by each approximation (`cspd.heads.prices`).
#
# A cached backbone errs more, the longer ago the whole transformer was evaluated. Its price is measured for each
# iteration k after a refresh at iteration j, for some j ("anchors"). The tokens of several iterations can also be drawn
# together, by the conditions z of the first: these do not know the tokens between, and their price is measured alike.

EVERY = 5  # of the denoising steps, one is evaluated for each token
HEAD_CALLS = (5, 6, 7, 8, 10, 12, 16, 20, 25, 32, 50)
NULL_EVERY = (1, 2, 4)
ANCHORS = 9


def measure_prices(replay: Replay, predictor: Predictor, s: Schedule, advance: Advance = no_advance) -> Prices:
    """Samples the exact images of a replay, and prices on them.

    Args:
        replay: of requests of `ar` with the settings of the cached backbone. predictor: of the same chains.
        s: their schedule. advance: called with each share of the work, 1 in all.
    """
    num_iter = replay.num_iter
    by_iteration = replay.chains(range(num_iter), commit=True, advance=lambda share: advance(0.3 * share))
    anchors = anchors_of(num_iter)
    calls, prices_of_calls = _price_calls(replay.runner, joined(by_iteration), predictor, s, advance)
    lazy_anchor, lazy_lag = _price_lazy(replay, by_iteration, anchors, s, advance)
    joined_anchor, joined_lag = _price_joined(replay, by_iteration, anchors, s, advance)
    head_calls, null_every = np.array(calls, np.int16).T
    return Prices(
        head_calls=head_calls,
        null_every=null_every,
        of_calls=prices_of_calls,
        anchors=np.array(anchors, np.int16),
        lazy_anchor=lazy_anchor,
        lazy_lag=lazy_lag,
        joined_anchor=joined_anchor,
        joined_lag=joined_lag,
    )


def anchors_of(num_iter: int) -> list[int]:
    """The iterations after which staleness is measured: more of them at the beginning, where z changes faster."""
    spread = np.linspace(0, 1, ANCHORS) ** 1.5
    return np.unique(np.round(spread * max(0, num_iter - 2)).astype(int)).tolist()


def _price_calls(
    runner: MARRunner, chains: Trace, predictor: Predictor, s: Schedule, advance: Advance
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Pairs (head calls, null_every) [H], and their prices and standard errors [H, 2], on half of the exact chains."""
    some = chains.to(runner.device).some(len(chains.image) // 2)
    numbers = [number for number in HEAD_CALLS if number < len(s)] or [len(s)]
    pairs = list(itertools.product(numbers, NULL_EVERY if len(chains.z) == 2 else (1,)))
    prices = []
    for number, null_every in pairs:
        calls = calls_of(plan_of(predictor.skip_cost, number).steps, null_every)
        nats = of_calls(runner.target.head, some, some.z, s, predictor, calls, runner.precision)
        prices.append(price_of(nats, some.image))
        advance(0.25 / len(pairs))
    return pairs, np.array(prices, np.float32)


def _price_lazy(
    replay: Replay, by_iteration: Several[Trace], anchors: Several[int], s: Schedule, advance: Advance = no_advance
) -> tuple[np.ndarray, np.ndarray]:
    """`lazy_anchor` and `lazy_lag` of `Prices`."""
    prices = np.zeros((len(LAZY), len(anchors), len(by_iteration)))
    for (row, settings), (column, anchor) in itertools.product(enumerate(LAZY), enumerate(anchors)):
        later = by_iteration[anchor + 1 :]
        if later:
            _, *stale = (z for _, z in replay.conditions(cached_conditions, anchor, refreshes=str(anchor), **settings))
            prices[row, column, 1 : 1 + len(later)] = _price_conditions(
                replay.runner, later, torch.cat(stale, dim=1), s
            )
        advance(0.4 / (len(LAZY) * len(anchors)))
    of_anchor, of_lag = zip(*(_factors(each, anchors, len(by_iteration)) for each in prices))
    return np.stack(of_anchor), np.stack(of_lag)


def _price_joined(
    replay: Replay, by_iteration: Several[Trace], anchors: Several[int], s: Schedule, advance: Advance = no_advance
) -> tuple[np.ndarray, np.ndarray]:
    """`joined_anchor` and `joined_lag` of `Prices`."""
    prices = np.zeros((len(anchors), 1 + JOINED))
    for column, anchor in enumerate(anchors):
        later = by_iteration[anchor + 1 : anchor + 1 + JOINED]
        if later:
            z = replay.ahead(anchor, anchor + 1 + len(later))
            prices[column, 1 : 1 + len(later)] = _price_conditions(replay.runner, later, z, s)
        advance(0.05 / len(anchors))
    return _factors(prices, anchors, len(by_iteration))


def _price_conditions(runner: MARRunner, later: Several[Trace], z: Tensor, s: Schedule) -> list[float]:
    """The price of other conditions z [G, R, D] at each of several iterations."""
    chains = joined(later).to(runner.device)
    nats = of_conditions(runner.target.head, chains, z, s, runner.precision, EVERY)
    return [part.mean().item() for part in nats.split([len(part.image) for part in later])]


def _factors(by_lag: np.ndarray, anchors: Several[int], num_iter: int) -> tuple[np.ndarray, np.ndarray]:
    """The factors of prices [A, lags] after anchors, as `Prices` has them."""
    is_measured = (np.array(anchors)[:, None] + np.arange(by_lag.shape[1]) < num_iter) & np.isfinite(by_lag)
    of_anchor, of_lag = factors(by_lag, is_measured)
    return of_anchor.astype(np.float32), of_lag.astype(np.float32)


def calls_of(steps: Several[int], null_every: int) -> dict[int, bool]:
    """The head calls of a plan, see `of_calls`."""
    return {step: is_full_call(i, len(steps), null_every) for i, step in enumerate(steps)}


def conditions_of(own: Replay, iterations: Several[int]) -> Tensor:
    """z [G, R, D] that a replay's rounds have for the tokens of some iterations, iteration by iteration."""
    parts = []
    evaluate = full_conditions if own.batch[0].request.backbone == "full" else cached_conditions
    for rows, z in own.conditions(evaluate):
        for iteration in np.intersect1d(rows.iteration, iterations):
            which = np.flatnonzero(rows.iteration == iteration)
            parts.append(z[:, send_integers(which, own.runner.device)])
    return torch.cat(parts, dim=1)


def divergence_of(calibrations: Calibrations, request: Request, chains: Trace, z: Tensor) -> Tensor:
    """The divergence [N], nats, of a resolved request's way to draw tokens, from exact chains.

    Args:
        calibrations: of the model. chains: exact, on the device. z: the run's conditions.
    """
    head, precision = calibrations.model.head, calibrations.precision
    s = head.schedule(request.num_sampling_steps)
    if request.denoiser != "calibrated":
        return of_conditions(head, chains, z, s, precision)
    steps, corrections = calibrations.plan(request, request.head_calls).steps, None
    if request.corrected is not False:
        corrections = calibrations.shortcut(request).corrections
    predictor, calls = calibrations.predictor(request), calls_of(steps, request.null_every)
    return of_calls(head, chains, z, s, predictor, calls, precision, corrections)
