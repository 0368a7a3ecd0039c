"""What CSpD decides by (arXiv 2411.11925, section 3.2): the ratio of two denoising chains' densities at a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cspd.option import Option

SIGMA = Option(
    "sigma",
    ("paper", "published"),
    "Sigma of the ratio: as in eq. 4, or inverted, as in the authors' released code",
    default="paper",
    implied=True,
)


class Paths(NamedTuple):
    """Tokens, and the Gaussians of the chains that made them; indexed, those of some.

    Attributes:
        tokens: [..., d], which are the means of the last step. log_sigma: [...], summed over channels and the steps
            T - 1 .. 1. log_sigma_last: [..., d], at step 0, where sampling adds no noise but a sigma exists.
    """

    tokens: Tensor
    log_sigma: Tensor
    log_sigma_last: Tensor

    def at(self, *index: Tensor) -> Paths:
        return Paths(*(values[index] for values in self))


def log_ratio(x: Tensor, p: Paths, q: Paths, ratio_temperature: float, sigma: str | None = None) -> Tensor:
    """log of eq. 4's p(x) / q(x), Sigma included, for tokens x [R, n, d]: [R, n].

    Sigma = prod sigma_q / sigma_p over the steps T - 1 .. 1 (as in eq. 4; the supplement's 14-17 drop a minus sign), or
    its inverse, see `SIGMA`.
    """
    log_big_sigma = p.log_sigma - q.log_sigma if sigma == "published" else q.log_sigma - p.log_sigma
    # the last step's Gaussians, with their means and sigmas; only the z-scores are tempered
    mean_p, mean_q = p.tokens[:, None], q.tokens[:, None]
    log_sigma_p, log_sigma_q = p.log_sigma_last[:, None], q.log_sigma_last[:, None]
    z_p = (x - mean_p) * torch.exp(-log_sigma_p) / ratio_temperature
    z_q = (x - mean_q) * torch.exp(-log_sigma_q) / ratio_temperature
    last = log_sigma_q - log_sigma_p + 0.5 * (z_q - z_p) * (z_q + z_p)
    return log_big_sigma[:, None] + last.sum(-1)
