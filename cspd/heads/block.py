"""Block verification: the drafted states of a window are judged together, if p and q have equal variances.

Sources: Sun et al. 2024 (arXiv 2403.10444), algorithm 2, for tokens; Soen et al. 2026 (arXiv 2606.13426) for chains of
Gaussians. Let r_i = p_i(y_i) / q_i(y_i), given the states before y_i. The weight of a prefix is

    c_0 = 1,  c_i = min(1, c_(i-1) r_i).

With the mass m_i of max(0, c_i p - q) over the next state, the prefix of i states is accepted with the chance
m_i / (m_i + 1 - c_i), and the whole window with the chance c_W. The longest accepted prefix is committed, and the next
state is a draw of norm(max(0, c_i p - q)). Never fewer states are accepted than by judging them one by one, on average.

All numbers here are float64: chances are quotients of small differences.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.special import log_ndtr, ndtr

TINY = 1e-30  # a gap of 0 is replaced by it
NEWTON_STEPS = 10  # they double the number of right digits once near; the start is within a few standard deviations


def prefix_weights(log_ratio: Tensor) -> Tensor:
    """log c_i, float64 [R, W], from log r_i [R, W]."""
    total = log_ratio.double().cumsum(1)
    # a sum that is cut off at 0 is its distance from the highest value so far
    return total - total.cummax(1).values.clamp(min=0)


def excess_mass(log_c: Tensor, gap: Tensor) -> Tensor:
    """The integral of max(0, c p - q), of Gaussians whose means are `gap` standard deviations apart.

    On the line through the means, with q's mean at 0, c p exceeds q beyond gap / 2 - log c / gap.
    """
    shift = log_c / gap.clamp(min=TINY)
    return log_c.exp() * ndtr(shift + gap / 2) - ndtr(shift - gap / 2)


def accept_prefix(log_ratio: Tensor, gap: Tensor, log_uniform: Tensor, num_noisy: Tensor) -> tuple[Tensor, Tensor]:
    """The length of the longest accepted prefix, int64 [R], and log c_(i-1) of each state, float64 [R, W].

    Args:
        log_ratio: log r_i [R, W]. gap: of each state's p and q [R, W], see `excess_mass`. log_uniform: [R, W].
        num_noisy: int64 [R], how many states of the window are drafts; what stands after them is not read.
    """
    lag, end = torch.arange(1, log_ratio.shape[1] + 1, device=gap.device), num_noisy.unsqueeze(1)
    log_c = prefix_weights(log_ratio)
    mass, lacking = excess_mass(log_c, gap.double().roll(-1, 1)), -torch.expm1(log_c)
    chance = torch.where(lag == end, 1 - lacking, mass / (mass + lacking))
    is_accepted = (lag <= end) & ((log_uniform.double().exp() < chance) | (lacking == 0))
    return (is_accepted * lag).amax(1), torch.nn.functional.pad(log_c[:, :-1], (1, 0))


def draw_excess(log_c: Tensor, gap: Tensor, uniform: Tensor) -> Tensor:
    """Draws of norm(max(0, c p - q)) on the line through the means, from q's mean in standard deviations; [...] each.

    It inverts the mass beyond a point. The density is log-concave, and so is that mass. So Newton's method for its
    logarithm is beyond the solution after one step, and comes nearer with every further one.
    """
    log_c, gap = log_c.double(), gap.double().clamp(min=TINY)
    steepness, half = -log_c / gap, gap / 2
    begin = half + steepness
    wanted = excess_mass(log_c, gap).log() + uniform.double().log()
    # the density is proportional to exp(-w^2 / 2 - steepness w) sinh(half w) at begin + w; start near its mode
    slope = half - steepness
    w = (slope + (slope.square() + 4).sqrt()) / 2
    for _ in range(NEWTON_STEPS):
        z = begin + w
        log_p = log_c + log_ndtr(gap - z)  # log of c times p's mass beyond z
        log_q_over_p = log_ndtr(-z) - log_p
        log_mass = log_p + torch.log(-torch.expm1(log_q_over_p))
        log_density = log_c - 0.5 * (z - gap).square() + torch.log(-torch.expm1(-gap * w))
        step = (log_mass - wanted) * torch.exp(log_mass - log_density) * (2 * torch.pi) ** 0.5
        w = torch.where(step.isfinite(), (w + step).clamp(min=0), w)
    return begin + w
