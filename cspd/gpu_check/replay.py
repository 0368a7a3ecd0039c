"""Acceptance as of trained models, for models with random weights: noise whose uniform draws decide beforehand.

A draft of random weights is accepted at random, and time depends on how often. Here a draw is 0 where a draft is to be
accepted, and above every probability where it is not. All other draws are as they were.
"""

from __future__ import annotations

import types

import numpy as np
import torch
from torch import Tensor

from cspd import noise
from cspd.noise import Purpose


def _replacing(**functions: object) -> types.SimpleNamespace:
    """`cspd.noise` but for some functions."""
    return types.SimpleNamespace(**(vars(noise) | functions))


def head_calls(calls: np.ndarray, device: torch.device) -> types.SimpleNamespace:
    """Noise by which chains take as many head calls as those of a calibration: `calls`, int [N], of one window."""
    pool = torch.as_tensor(calls, dtype=torch.int64, device=device)

    def chain(seed: Tensor, position: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
        x, eps_t, uniform = noise.chain(seed, position, *others)
        num_steps = uniform.shape[1]
        # the first call is ancestral; the others part the steps after it evenly, and each but the last ends in a
        # rejection
        rounds = pool[(7919 * seed + position) % len(pool)].unsqueeze(1) - 1
        steps_done = num_steps - 2 - torch.arange(num_steps, device=device)
        parts_done, parts_after = ((steps * rounds) // (num_steps - 1) for steps in (steps_done, steps_done + 1))
        return x, eps_t, torch.where(parts_after > parts_done, torch.inf, 0.0)

    return _replacing(chain=chain)


def token_share(share: float) -> types.SimpleNamespace:
    """Noise by which CSpD accepts this share of the drafted tokens."""

    def token_coins(seed: Tensor, position: Tensor) -> Tensor:
        drawn = noise.token_coins(seed, position)
        return torch.where(drawn < share, 0.0, torch.inf)

    return _replacing(token_coins=token_coins)


def codes_a_round(num: float) -> types.SimpleNamespace:
    """Noise by which rounds commit `num` VQ codes on average, where so many are drafted.

    Every num-th code of an image is rejected, and with it what is drafted beside it.
    """

    def fine_uniform(
        seed: Tensor, purpose: Tensor | int, position: Tensor, step: Tensor | int = 0, index: Tensor | int = 0
    ) -> Tensor:
        drawn = noise.fine_uniform(seed, purpose, position, step, index)
        place = position + 5 * seed  # images are not in step
        is_rejected = torch.floor((place + 1) / num) > torch.floor(place / num)
        is_coin = purpose == Purpose.CODE_COIN
        if isinstance(is_coin, bool):
            return is_rejected.to(drawn).expand_as(drawn) if is_coin else drawn
        return torch.where(is_coin, is_rejected.to(drawn), drawn)

    return _replacing(fine_uniform=fine_uniform)
