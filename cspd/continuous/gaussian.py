"""Diagonal Gaussians: log-ratios, and a draw of p made from a draw of q that coincides with it as often as possible.

Pure functions on tensors [..., d]. A Gaussian is (mean, log_sigma), standard deviations in logarithms, float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAX_TRIES = 2**16
FIRST_BLOCK = 32  # candidates a row in the first block; each block after it has four times as many, up to
MOST_AT_ONCE = 2**18  # of all rows together

Gaussian = tuple[Tensor, Tensor]
Draws = Callable[[int, int], tuple[Tensor, Tensor]]


def log_ratio(x: Tensor, p: Gaussian, q: Gaussian) -> Tensor:
    """log p(x) - log q(x), summed over the channels: [...]."""
    z_p, z_q = ((x - mean) * torch.exp(-log_sigma) for mean, log_sigma in (p, q))
    return (q[1] - p[1] + 0.5 * (z_q - z_p) * (z_q + z_p)).sum(-1)


def reflect(x: Tensor, p: Gaussian, q: Gaussian) -> Tensor:
    """Maps a draw of q to a draw of p: standardised under q, mirrored along the line between the means, put under p.

    Swapping p and q gives the inverse. The mirror is orthogonal, so densities map too: q(x) dx = p(y) dy.
    """
    return torch.addcmul(p[0], _mirror(x, p, q)[1], p[1].exp())


def _mirror(x: Tensor, p: Gaussian, q: Gaussian) -> tuple[Tensor, Tensor]:
    """(1 / sigma_q, the mirror image of x standardised under q)."""
    inverse_q = torch.exp(-q[1])
    xi = (x - q[0]) * inverse_q
    axis = (p[0] - q[0]) * torch.exp(-0.5 * (p[1] + q[1]))
    square = axis.square().sum(-1, keepdim=True)
    along = (xi * axis).sum(-1, keepdim=True) / square.clamp(min=torch.finfo(square.dtype).tiny)
    return inverse_q, torch.addcmul(xi, along, axis, value=-2)


def resample(x: Tensor, log_coin: Tensor, p: Gaussian, q: Gaussian) -> tuple[Tensor, Tensor]:
    """Replaces draws x of q that were rejected by draws of the residual, norm(max(0, p - q)), where one step can.

    x was rejected because its coin u ~ U(0, 1) was at least p(x)/q(x), so 1 - u is uniform below 1 - p(x)/q(x).
    The mirror image y of rejected draws has density p(y) (1 - p(x)/q(x))+ and is wanted with density p(y) (1 -
    q(y)/p(y))+; so it is kept if 1 - u < 1 - q(y)/p(y), by the very same coin. Where sigma_p = sigma_q both densities
    are equal and it always is: the reflection coupling. What is left over is drawn by `residual`.

    Args:
        x: [..., d]. log_coin: log u [...].

    Returns:
        (y [..., d], kept [...] bool): y has the residual's law only together with what `residual` draws where not kept.
    """
    # reflect(x, p, q) and log_ratio(y, q, p), sharing what they share
    (mean_p, log_p), (mean_q, log_q) = p, q
    inverse_q, xi = _mirror(x, p, q)
    y = torch.addcmul(mean_p, xi, log_p.exp())
    z_q = (y - mean_q) * inverse_q
    log_q_over_p = torch.addcmul(log_p - log_q, z_q - xi, z_q + xi, value=-0.5).sum(-1)
    return y, log_coin > log_q_over_p


def residual(p: Gaussian, q: Gaussian, draws: Draws) -> tuple[Tensor, Tensor]:
    """Draws from what `resample` leaves of max(0, p - q), by `first_kept`.

    Candidates y ~ p are kept with probability (1 - q(y)/p(y))+ - (1 - p(x)/q(x))+, where x is what y mirrors. Near p =
    q, where rounding alone can have rejected, none may ever be kept: after 2^16 the last is taken, which biases a step
    by less than 1 / (e 2^16).

    Args:
        p, q: means and log sigmas [R, d]. draws: as in `first_kept`.

    Returns:
        (y [R, d], tries int64 [R]), as in `first_kept`.
    """
    p, q = tuple(t[:, None] for t in p), tuple(t[:, None] for t in q)

    def keep(y: Tensor) -> Tensor:
        wanted = -torch.expm1(log_ratio(y, q, p).clamp(max=0))
        return wanted + torch.expm1(log_ratio(reflect(y, q, p), p, q).clamp(max=0))

    return first_kept(p, keep, draws, MAX_TRIES)


def first_kept(p: Gaussian, keep: Callable, draws: Draws, max_tries: int) -> tuple[Tensor, Tensor]:
    """Rejection sampling: candidates y ~ p in growing blocks, the first kept by index counts; no integral is needed.

    Args:
        p: mean and log sigma [R, 1, d].
        keep: maps candidates [R, n, d] to their probability of being kept [R, n].
        draws: maps (first index, how many) to standard normals [R, n, d] and log coins [R, n] of those candidates.
        max_tries: candidates a row at most.

    Returns:
        (y [R, d], tries int64 [R]); where none of max_tries is kept, y is the last and tries are max_tries + 1.
    """
    rows = torch.arange(len(p[0]), device=p[0].device)
    y, tries = p[0][:, 0], torch.full_like(rows, max_tries + 1)
    done, block = 0, FIRST_BLOCK
    while done < max_tries and bool((tries > max_tries).any()):
        block = min(block, max_tries - done)
        normal, log_coin = draws(done, block)
        candidates = torch.addcmul(p[0], normal, torch.exp(p[1]))
        kept = log_coin < keep(candidates).clamp(min=0).log()
        searching, found = tries > max_tries, kept.any(-1)
        first = torch.where(found, kept.int().argmax(-1), block - 1)
        y = torch.where(searching.unsqueeze(-1), candidates[rows, first], y)
        tries = torch.where(searching & found, done + first + 1, tries)
        done, block = done + block, max(FIRST_BLOCK, min(4 * block, MOST_AT_ONCE // len(rows)))
    return y, tries
