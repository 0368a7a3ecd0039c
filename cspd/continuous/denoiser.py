"""How a token is drawn from its condition z: what a denoiser is given, and what it gives back.

A denoiser is a function

    denoise(host, model, rows, z, *, index=0, densities=False) -> Denoised

of the rows to draw (`Rows`), their conditions z [G, R, D] (G = 2 where guided, the null class second), the model whose
head draws them ("target" or "draft"), and the index of their noise (`cspd.noise.initial`). Where `densities` is asked
for, it also gives the Gaussians of its chains, which CSpD compares. CSpD's `chains` can be any denoiser that does so,
once it has a name (`@denoiser`); plain autoregression takes any at all, and asks for no densities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Denoised:
    """Tokens of R rows, what they cost, and the Gaussians of the chains that made them.

    Attributes:
        tokens: float32 [R, d].
        calls: int64 [R], on the host: head calls of each token's chain. head_calls: sequential ones, of all together.
        window: states of a token that a call evaluates, after the first; 1 where a chain goes step by step.
        log_sigma: [R], summed over channels and all steps but the last; None where no densities were asked for.
        log_sigma_last: [R, d], of the last step, where sampling adds no noise but a sigma exists; None as above.
    """

    tokens: Tensor
    calls: np.ndarray
    head_calls: int
    window: int = 1
    log_sigma: Tensor | None = None
    log_sigma_last: Tensor | None = None

    @property
    def evaluations(self) -> np.ndarray:
        """States of each row that the head was evaluated on, int64 [R]; twice as many rows where guided."""
        return 1 + (self.calls - 1) * self.window


Denoiser = Callable[..., Denoised]
DENOISERS: dict[str, Denoiser] = {}  # by name: those that CSpD's chains can take


def denoiser(name: str) -> Callable[[Denoiser], Denoiser]:
    """Names a denoiser that gives densities, so that CSpD's `chains` can take it."""

    def named(function: Denoiser) -> Denoiser:
        DENOISERS[name] = function
        return function

    return named
