"""The audit of a run: a share of its own images is replayed, exactly and by the run's plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd.heads.calibration import Trace, joined, price_of
from cspd.masked.plan import is_exact
from cspd.masked.prices import conditions_of, divergence_of
from cspd.masked.replay import Replay, tokens_by_iteration
from cspd.masked.runner import MARRunner
from cspd.request import Request


class Found(NamedTuple):
    """What an audit found of N tokens.

    Attributes:
        nats: [N], divergences, each times its token's weight. image: int64 [N], the images' seeds.
        squares: [N], the mean over a token's channels of its square difference from an exact one of the same noise,
            times the same weight.
    """

    nats: Tensor
    image: Tensor
    squares: Tensor


def drawn_iterations(counts: np.ndarray, share: float, seed: int) -> tuple[list[int], np.ndarray]:
    """The iterations of a systematic sample of tokens, and the weight of each of their tokens in a mean over them.

    Args:
        counts: tokens of each iteration [K]. share: of the tokens, 0..1; at least one is drawn.
    """
    num_drawn = max(1, round(share * counts.sum()))
    places = (np.arange(num_drawn) + np.random.default_rng(seed).random()) / num_drawn * counts.sum()
    iterations, times = np.unique(np.searchsorted(counts.cumsum(), places, side="right"), return_counts=True)
    return iterations.tolist(), times / counts[iterations] * counts[iterations].sum() / num_drawn


def audit(
    exact: Replay,
    own: Replay,
    of_run: Callable[[Trace, Tensor], Tensor],
    iterations: Several[int],
    weights: np.ndarray,
) -> Found:
    """The divergences of what a run did, at the tokens of some iterations of finished images.

    Args:
        exact, own: replays of the images, without joined rounds and with the run's settings. of_run: maps (exact
            chains, the run's conditions) to nats [N]. weights: of the tokens of each iteration.
    """
    runner = exact.runner
    parts = exact.chains(iterations)
    weight = torch.tensor(np.repeat(weights, [len(part.image) for part in parts]), device=runner.device)
    chains = joined(parts).to(runner.device)
    tokens = torch.cat([runner.tokens[rows.slot, rows.position] for rows in map(exact.rows, iterations)])
    z = conditions_of(own, iterations)
    squares = (tokens - chains.tokens).square().mean(1)
    return Found(weight * of_run(chains, z), chains.image, weight * squares)


@torch.inference_mode()
def audit_images(runner: MARRunner, requests: Several[Request], tokens: Tensor, share: float) -> dict[str, float]:
    """Measures the price, KL(p || q), and the difference of finished images of one plan, on their own tokens.

    Tokens are drawn by systematic sampling, 1 / share apart in the order of generation. A drawn token stands for its
    iteration, whose tokens are all evaluated; so the mean over draws is that over all tokens, whatever the share.

    Args:
        requests: resolved. tokens: [B, L, d]. share: of the tokens of each image, 0..1; at least one is drawn.

    Returns:
        "audit", "audit_error" and "audit_difference", see `measured_lines`; nothing if the requests are exact.
    """
    request = requests[0]
    if is_exact(request):
        return {}
    iterations, weights = drawn_iterations(tokens_by_iteration(request, runner.seq_len), share, request.seed)
    of_run = functools.partial(divergence_of, runner.tuning.calibrations["target"], request)

    def replay(of: Several[Request], first: int) -> Replay:
        model_runner = MARRunner(runner.target, len(of), runner.precision)
        return Replay(model_runner, of, tokens[first : first + len(of)])

    parts = []
    for first in range(0, len(requests), runner.num_slots):  # all images of a long run do not fit into memory
        some = requests[first : first + runner.num_slots]
        exact = replay([each.but(rounds=None) for each in some], first)
        parts.append(audit(exact, replay(some, first), of_run, iterations, weights))
    found = Found(*map(torch.cat, zip(*parts)))
    divergence, error = price_of(found.nats, found.image)
    measured = {"audit": divergence}
    if math.isfinite(error):  # not of a single token
        measured["audit_error"] = error
    if request.denoiser == "calibrated":  # other chains use their noise in another way
        variance = tokens.flatten(0, 1).var(0).mean().item()
        measured["audit_difference"] = (found.squares.mean().item() / variance) ** 0.5
    return measured
