"""GtR's number of denoising steps for each token: more for detail (arXiv 2510.17171). Guarantee: heuristic.

The code is not published. In the paper the steps fall over the first stage, the second stage takes the least, and the
tenth of its tokens with most high-frequency energy takes the most.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cspd.continuous.ancestral import FIRST_TIMESTEP, MIXED, SHORT_FIRST, check_first
from cspd.continuous.annealed import by_length, chain_lengths
from cspd.continuous.denoiser import ContinuousHost, Denoised, denoiser
from cspd.continuous.rows import Rows
from cspd.option import Option, check_integer
from cspd.sequence import Request
from mar.diffusion import TRAIN_STEPS

OPTIONS = (
    Option(
        "upper",
        int,
        "denoising steps in the first iteration, and for detailed tokens",
        default=50,
        low=2,
        high=TRAIN_STEPS,
        metavar="T",
    ),
    Option(
        "lower",
        int,
        "denoising steps once half of the tokens are committed",
        default=20,
        low=2,
        high=TRAIN_STEPS,
        metavar="T",
    ),
    Option(
        "detail",
        float,
        "fraction of the later half's tokens that take `upper` steps: those with the most high-frequency energy",
        default=0.1,
        high=1,
        metavar="P",
    ),
    FIRST_TIMESTEP.but(default=SHORT_FIRST),
)


def importance(z: Tensor) -> Tensor:
    """How much high-frequency energy conditions z [R, D] have: [R].

    The paper's sum over n = 1 .. D/2 of (1 + n / (D/2)) |Z_n|, where Z is the discrete Fourier transform of z along
    its features.
    """
    amplitude = torch.fft.rfft(z).abs()[:, 1:]
    frequency = torch.linspace(0, 1, amplitude.shape[1] + 1, device=z.device)[1:]
    return (amplitude * (1 + frequency)).sum(1)


def highest(score: np.ndarray, owner: np.ndarray, share: float) -> np.ndarray:
    """Which rows are a share of their owner's rows with the highest scores, to the nearest number: bool [R].

    Args:
        score: [R]. owner: int64 [R], whose a row is. share: 0 .. 1.
    """
    best_first = np.lexsort((-score, owner))
    counts = np.bincount(owner)
    starts = np.cumsum(counts) - counts
    rank = np.empty_like(owner)
    rank[best_first] = np.arange(len(owner)) - starts[owner[best_first]]
    return rank < np.round(share * counts)[owner]


def num_early(num_made: int, masked: np.ndarray, seq_len: int) -> int:
    """How many iterations begin with less than half of the tokens known: those of a checkerboard's first colour.

    Args:
        num_made: tokens that are made. masked: int64 [num_iter], how many are unknown after each iteration.
    """
    masked_before = np.r_[num_made, masked[:-1]]
    return int((masked_before > seq_len / 2).sum())


def check(request: Request, host: ContinuousHost) -> None:
    """Raises ValueError where the steps would grow, or are more than there are timesteps to visit."""
    check_integer("lower", request.lower, 2, request.upper, "the steps fall to it from upper")
    check_first(request, request.upper)


@denoiser("frequency-weighted", options=OPTIONS, mixed=(*MIXED, "num_sampling_steps"), check=check)
def denoise(
    host: ContinuousHost, model: str, rows: Rows, z: Tensor, *, index: int = 0, densities: bool = False
) -> Denoised:
    """Ancestral chains of T steps, T chosen for each token; arguments as in `cspd.continuous.denoiser`.

    T falls from upper to lower over the iterations that begin with less than half of the tokens known. Later it is
    lower, or upper for the share `detail` of an image's tokens in an iteration. Where the paper is silent we chose that
    the share is of an iteration, that z is the conditional one, and `first_timestep`.

    CSpD compares chains of one length and drafts tokens one by one. So where densities are asked for, no detailed
    tokens are chosen.
    """
    request = rows.sequences[0].request
    requests = [sequence.request for sequence in rows.sequences]
    made = [each.num_made(host.seq_len) for each in requests]
    by_sequence = [num_early(num, host.num_masked(each), host.seq_len) for num, each in zip(made, requests)]
    early = np.array(by_sequence)[rows.owner]
    is_late = rows.iteration >= early
    steps = chain_lengths(rows.iteration, early, request.upper, request.lower, "linear")
    steps[is_late] = request.lower
    if is_late.any() and not densities:
        score = importance(z[0]).cpu().numpy()
        steps[is_late & highest(score, rows.owner, request.detail)] = request.upper
    return by_length(host, model, rows, z, steps, index=index, densities=densities)
