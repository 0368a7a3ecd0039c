"""Diagonal Gaussians: log-ratios, and a draw of p made from a draw of q so that the two are equal as often as possible.

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
    (mean_p, log_sigma_p), (mean_q, log_sigma_q) = p, q
    z_p = (x - mean_p) * torch.exp(-log_sigma_p)
    z_q = (x - mean_q) * torch.exp(-log_sigma_q)
    return (log_sigma_q - log_sigma_p + 0.5 * (z_q - z_p) * (z_q + z_p)).sum(-1)


def divergence(p: Gaussian, q: Gaussian) -> Tensor:
    """KL(p || q), nats summed over the channels: [...]."""
    (mean_p, log_sigma_p), (mean_q, log_sigma_q) = p, q
    log_ratio = log_sigma_p - log_sigma_q
    distance = (mean_p - mean_q) * torch.exp(-log_sigma_q)
    return (0.5 * (torch.expm1(2 * log_ratio) + distance.square()) - log_ratio).sum(-1)


def reflect(x: Tensor, p: Gaussian, q: Gaussian) -> Tensor:
    """Maps a draw of q to a draw of p: standardised under q, mirrored along the line between the means, put under p.

    Swapping p and q gives the inverse. The mirror is orthogonal, so densities map too: q(x) dx = p(y) dy.
    """
    (mean_p, log_sigma_p), (mean_q, log_sigma_q) = p, q
    xi = (x - mean_q) * torch.exp(-log_sigma_q)
    axis = (mean_p - mean_q) * torch.exp(-0.5 * (log_sigma_p + log_sigma_q))
    square = axis.square().sum(-1, keepdim=True)
    along = (xi * axis).sum(-1, keepdim=True) / square.clamp(min=torch.finfo(square.dtype).tiny)
    mirrored = torch.addcmul(xi, along, axis, value=-2)
    return torch.addcmul(mean_p, mirrored, log_sigma_p.exp())


def resample(x: Tensor, log_uniform: Tensor, p: Gaussian, q: Gaussian) -> tuple[Tensor, Tensor]:
    """Replaces rejected draws x of q by draws of the residual, norm(max(0, p - q)), where one step can.

    x was rejected because its uniform draw u was at least p(x)/q(x). So 1 - u is uniform below 1 - p(x)/q(x). The
    mirror image y of a rejected draw has density p(y) (1 - p(x)/q(x))+. It should have p(y) (1 - q(y)/p(y))+. So y is
    kept if 1 - u < 1 - q(y)/p(y), which takes no further draw. Where sigma_p = sigma_q the two densities are equal and
    y is always kept: the reflection-maximal coupling. `residual` draws what is left over.

    Args:
        x: [..., d]. log_uniform: log u [...].

    Returns:
        (y [..., d], lost [...] bool): y follows the residual only together with what `residual` draws where it is lost.
    """
    # these are reflect(x, p, q) and log_ratio(y, q, p), written in as few operations as there can be
    (mean_p, log_sigma_p), (mean_q, log_sigma_q) = p, q
    exponents = torch.stack([-log_sigma_q, (log_sigma_p + log_sigma_q) * -0.5, log_sigma_p], dim=-2)
    scales = exponents.exp()
    inverse_sigma_q, _, sigma_p = scales.unbind(-2)

    # y: x standardised under q, mirrored along the line between the means, put under p
    from_mean_q = torch.stack([x, mean_p], dim=-2) - mean_q.unsqueeze(-2)
    both = from_mean_q * scales[..., :2, :]
    xi, axis = both.unbind(-2)
    along, square = (both * axis.unsqueeze(-2)).sum(-1, keepdim=True).unbind(-2)
    along = along / square.clamp(min=torch.finfo(square.dtype).tiny)
    mirrored = torch.addcmul(xi, along, axis, value=-2)
    y = torch.addcmul(mean_p, mirrored, sigma_p)

    z_q = (y - mean_q) * inverse_sigma_q
    log_q_over_p = torch.addcmul(log_sigma_p - log_sigma_q, z_q - mirrored, z_q + mirrored, value=-0.5).sum(-1)
    return y, log_uniform <= log_q_over_p  # NaN is not lost: nothing that `residual` could draw would be better


def residual(
    p: Gaussian, q: Gaussian, draws: Draws, first: int = 0, max_tries: int | None = None
) -> tuple[Tensor, Tensor]:
    """Draws what `resample` leaves of max(0, p - q), by `first_kept`.

    Candidates y ~ p are kept with probability (1 - q(y)/p(y))+ - (1 - p(x)/q(x))+, where y is the mirror image of x.
    Near p = q, where rounding alone can reject, it can happen that none is ever kept. So the last of 2^16 is taken,
    which biases a step by less than 1 / (e 2^16).

    Args:
        p, q: means and log sigmas [R, d]. draws, first: as in `first_kept`. max_tries: by default 2^16.

    Returns:
        (y [R, d], tries int64 [R]), as in `first_kept`.
    """
    p, q = tuple(t[:, None] for t in p), tuple(t[:, None] for t in q)

    def keep(y: Tensor) -> Tensor:
        x = reflect(y, q, p)
        wanted = -torch.expm1(log_ratio(y, q, p).clamp(max=0))
        from_mirror = -torch.expm1(log_ratio(x, p, q).clamp(max=0))
        return wanted - from_mirror

    return first_kept(p, keep, draws, max_tries or MAX_TRIES, first)


def first_kept(
    p: Gaussian, keep: Callable[[Tensor], Tensor], draws: Draws, max_tries: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Rejection sampling: candidates y ~ p in growing blocks, of which the first kept by index is taken.

    Whether a block after the first one is needed is read from the device.

    Args:
        p: mean and log sigma [R, 1, d].
        keep: maps candidates [R, n, d] to their probability of being kept [R, n].
        draws: maps (first index, how many) to standard normals [R, n, d] and logs of uniform draws [R, n].
        max_tries: candidates a row at most. first: the candidate to begin with; none of those before it was kept.

    Returns:
        (y [R, d], tries int64 [R]); where none of max_tries is kept, y is the last and tries are max_tries + 1.
    """
    mean, log_sigma = p
    rows = torch.arange(len(mean), device=mean.device)
    y, tries = mean[:, 0], torch.full_like(rows, max_tries + 1)
    done, block = first, FIRST_BLOCK
    while done < max_tries and (done == first or bool((tries > max_tries).any())):
        block = min(block, max_tries - done)
        normal, log_uniform = draws(done, block)
        candidates = torch.addcmul(mean, normal, torch.exp(log_sigma))
        kept = ~(log_uniform >= keep(candidates).clamp(min=0).log())  # NaN is kept: it would be searched for in vain
        found = kept.any(-1)
        place = torch.where(found, kept.int().argmax(-1), block - 1)
        searching = tries > max_tries
        y = torch.where(searching.unsqueeze(-1), candidates[rows, place], y)
        tries = torch.where(searching & found, done + place + 1, tries)
        done += block
        block = max(FIRST_BLOCK, min(4 * block, MOST_AT_ONCE // len(rows)))
    return y, tries
