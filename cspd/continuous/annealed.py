"""DiSA: fewer denoising steps for tokens of later iterations (arXiv 2505.20297). Guarantee: heuristic.

The more tokens are known, the less is open about the next one. Each number of steps is a respaced chain of its own.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from cspd.continuous import ancestral
from cspd.continuous.ancestral import FIRST_TIMESTEP, MIXED, SHORT_FIRST, check_first
from cspd.continuous.denoiser import ContinuousHost, Denoised, denoiser
from cspd.continuous.rows import Rows
from cspd.option import Option, check_integer
from cspd.sequence import Request
from cspd.transfer import send_integers
from mar.diffusion import TRAIN_STEPS

# how far above `lower` iteration k of 0 .. last is, 1 .. 0 of the way to `upper`
SCHEDULES = {
    "linear": lambda k, last: (last - k) / last,
    "cosine": lambda k, last: (np.cos(np.pi * k / last) + 1) / 2,
    "two-stage": lambda k, last: k < last / 2,
}
OPTIONS = (
    Option("upper", int, "denoising steps in the first iteration", default=50, low=2, high=TRAIN_STEPS, metavar="T"),
    Option("lower", int, "denoising steps in the last iteration", default=5, low=2, high=TRAIN_STEPS, metavar="T"),
    Option("anneal", tuple(SCHEDULES), "how the steps fall over the iterations", default="linear"),
    FIRST_TIMESTEP.but(default=SHORT_FIRST),
)


def chain_lengths(iteration: np.ndarray, num_iter: np.ndarray, upper: int, lower: int, anneal: str) -> np.ndarray:
    """T of tokens by their iterations k of K: lower + floor(f (upper - lower)), int64 [R].

    f is (K - 1 - k)/(K - 1), or (cos(pi k/(K - 1)) + 1)/2, or 1 in the first half of the iterations, k < (K - 1)/2, and
    0 in the second: the paper names these three, the formulas are those of the authors' code. A single iteration, for
    which it has none, takes `upper` steps.

    Args:
        iteration, num_iter: k, from 0, and K; int64 [R]. upper, lower, anneal: see the options.
    """
    last = np.maximum(num_iter - 1, 1)
    share = SCHEDULES[anneal](iteration, last)
    return lower + (share * (upper - lower)).astype(np.int64)


def check(request: Request, host: ContinuousHost) -> None:
    """Raises ValueError where the steps would grow, or are more than there are timesteps to visit."""
    check_integer("lower", request.lower, 2, request.upper, "the steps fall to it from upper")
    check_first(request, request.upper)


def by_length(
    host: ContinuousHost,
    model: str,
    rows: Rows,
    z: Tensor,
    lengths: np.ndarray,
    *,
    index: int = 0,
    densities: bool = False,
) -> Denoised:
    """Every token by an ancestral chain of a length of its own; those of one length together, one after another.

    Args:
        lengths: T of each row, int64 [R] on the host.
    """
    shortest_first = np.argsort(lengths, kind="stable")
    order = send_integers(shortest_first, host.device)
    rows, z = rows.at(shortest_first), z[:, order]
    parts = []
    head_calls = np.zeros(len(rows.sequences), np.int64)
    first = 0
    for num_steps, count in zip(*(each.tolist() for each in np.unique(lengths, return_counts=True))):
        own, own_z = rows.stretch(first, count), z[:, first : first + count].contiguous()
        first += count
        head_calls[np.unique(own.owner)] += num_steps
        parts.append(ancestral.denoise(host, model, own, own_z, index=index, densities=densities, num_steps=num_steps))
    back = order.argsort()

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])[back]

    made = Denoised(joined("tokens"), lengths, head_calls, evaluations=lengths * len(z))
    if densities:
        made = dataclasses.replace(made, log_sigma=joined("log_sigma"), log_sigma_last=joined("log_sigma_last"))
    return made


@denoiser("annealed", options=OPTIONS, mixed=MIXED, check=check)
def denoise(
    host: ContinuousHost, model: str, rows: Rows, z: Tensor, *, index: int = 0, densities: bool = False
) -> Denoised:
    """Every token by an ancestral chain as long as its iteration asks for; arguments as in `cspd.continuous.denoiser`.

    The log sigmas of a token are summed over its own chain's steps. CSpD compares them between two models, whose chains
    of one token are equally long.
    """
    request = rows.sequences[0].request
    lengths = chain_lengths(rows.iteration, rows.num_iter, request.upper, request.lower, request.anneal)
    return by_length(host, model, rows, z, lengths, index=index, densities=densities)
