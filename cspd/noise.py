"""All randomness, as a pure function of (seed, purpose, position, step, index): nothing here has state.

The generator is Philox4x32-10 (Salmon et al. 2011), counter-based: every number can be had alone, in any order and
shape, on any device. So a request's draws never depend on its neighbours, on batch size or on arrival order, and a draw
that is asked for twice is the same draw. The words of the counter are (block, position, step, purpose and index).
"""

from __future__ import annotations

import enum
import math

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MAX_INDEX = 1 << 24


class Purpose(enum.IntEnum):
    """What a draw is for; draws of different purposes are independent."""

    ORDER = 0
    INIT = 1  # x_T
    STEP = 2  # eps_t


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of 32 random bits for each counter and key; all are int64 tensors of values below 2^32, broadcast."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        left, right = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # wraps at 2^64, which keeps both halves right
        a, b, c, d = (right >> 32 & MASK) ^ b ^ k0, right & MASK, (left >> 32 & MASK) ^ d ^ k1, left & MASK
        k0, k1 = k0 + WEYL[0] & MASK, k1 + WEYL[1] & MASK
    return a, b, c, d


def bits(seed: Tensor, purpose: Purpose, position: Tensor, step: Tensor | int, index: Tensor | int, num: int) -> Tensor:
    """int64 [..., num] of values below 2^32; seed, position, step and index broadcast to [...]."""
    device = seed.device
    block = torch.arange(-(-num // 4), device=device)
    words = [torch.as_tensor(w, device=device).unsqueeze(-1) for w in (position, step, index)]
    tag = words[2] | (int(purpose) << 24)
    key = (seed.unsqueeze(-1) & MASK, seed.unsqueeze(-1) >> 32 & MASK)
    drawn = philox((block, words[0], words[1], tag), key)
    return torch.stack(torch.broadcast_tensors(*drawn), dim=-1).flatten(-2)[..., :num]


def normal(
    seed: Tensor, purpose: Purpose, position: Tensor, step: Tensor | int = 0, index: Tensor | int = 0, *, num: int
) -> Tensor:
    """Standard normal draws, float32 [..., num].

    Args:
        seed: int64 [...], the requests' seeds.
        purpose: what the draws are for.
        position, step, index: integers [...], broadcast; below 2^32, index below 2^24.
        num: how many a place, d for a token.
    """
    u = (bits(seed, purpose, position, step, index, num + num % 2).float() + 0.5) * 2.0**-32
    u1, u2 = u.unflatten(-1, (-1, 2)).unbind(-1)
    radius, angle = (-2 * u1.log()).sqrt(), 2 * math.pi * u2  # Box-Muller
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(-2)[..., :num]


def order(seed: Tensor, length: int) -> Tensor:
    """A request's generation order, int64 [B, length]: a uniform permutation, first generated first."""
    keys = bits(seed.unsqueeze(-1), Purpose.ORDER, torch.arange(length, device=seed.device), 0, 0, 2)
    return ((keys[..., 0] << 31) + (keys[..., 1] >> 1)).argsort(dim=-1, stable=True)


def initial(seed: Tensor, position: Tensor, channels: int) -> Tensor:
    """x_T of tokens: seed, position [R] to [R, channels]."""
    return normal(seed, Purpose.INIT, position, num=channels)


def steps(seed: Tensor, position: Tensor, step: Tensor, channels: int) -> Tensor:
    """eps_t of tokens: seed, position [R] and denoising steps t [n] to [n, R, channels]."""
    return normal(seed, Purpose.STEP, position, step.unsqueeze(-1), num=channels)
