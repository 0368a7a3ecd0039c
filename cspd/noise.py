"""All random numbers, as pure functions of (seed, purpose, position, step, index), without state.

The generator is Philox4x32-10 (Salmon et al. 2011). It is counter-based: every number can be computed alone, in any
order and shape, on any device. So a request's draws never depend on its neighbours, on batch size or on arrival order,
and repeating a draw gives the same number. The words of the counter are (block, position, step, purpose and index).
"""

from __future__ import annotations

import enum
import functools
import math

import torch
from torch import Tensor

from cspd import kernels

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MOST_AT_ONCE = 2**19  # numbers drawn at once on a CPU: drawing one needs ten times its memory
INDEX_BITS = 24
MAX_INDEX = 1 << INDEX_BITS  # every index is below it: the purpose begins at this bit of the counter's last word
DRAFT_OFFSET = 1 << 20  # first index of a draft model's residual candidates; the target's indices are below it


class Purpose(enum.IntEnum):
    """The use of a draw; draws of different purposes are independent."""

    ORDER = 0
    INIT = 1  # x_T
    STEP = 2  # eps_t
    ACCEPT = 3  # the uniform draw that decides whether a drafted state is accepted
    CANDIDATE = 4  # for the residual after a rejection
    CANDIDATE_ACCEPT = 5
    TOKEN_COIN = 6  # decides whether a drafted token is accepted
    TOKEN_CANDIDATE = 7
    TOKEN_CANDIDATE_ACCEPT = 8
    CODE = 9  # a VQ token, drafted or not
    TOKEN_ACCEPT = 10  # decides whether a drafted VQ token is accepted
    CODE_RESIDUAL = 11  # after all drafted VQ tokens of a position were rejected
    LATENT = 12  # a given picture's token


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of 32 random bits for each counter and key; all are int64 tensors of values below 2^32, broadcast."""
    a, b, c, d, k0, k1 = torch.broadcast_tensors(*counter, *key)
    multipliers, bumps = _constants(a.dim(), a.device)
    keys = torch.stack([k0, k1]) + bumps & MASK
    # both halves of a round at once: `even` has words a and c, `odd` has b and d
    even, odd = torch.stack([a, c]), torch.stack([b, d])
    for round_key in keys:
        product = even.flip(0) * multipliers  # wraps at 2^64, which does not change either half
        even, odd = (product >> 32 & MASK) ^ odd ^ round_key, product & MASK
    return even[0], odd[0], even[1], odd[1]


@functools.cache  # forever: a graph reads them at a fixed address
def _constants(dims: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The multipliers [2, 1, ...] and the rounds' key bumps [ROUNDS, 2, 1, ...], for counters of `dims` dimensions."""
    with torch.inference_mode(False):
        multipliers = torch.tensor(MULTIPLIERS[::-1], device=device).view(2, *[1] * dims)
        bumps = torch.arange(ROUNDS, device=device).view(-1, 1) * torch.tensor(WEYL, device=device)
    return multipliers, bumps.view(ROUNDS, 2, *[1] * dims)


def _key(seed: Tensor) -> tuple[Tensor, Tensor]:
    return seed & MASK, seed >> 32 & MASK


def bits(
    seed: Tensor, purpose: Tensor | int, position: Tensor, step: Tensor | int, index: Tensor | int, num: int
) -> Tensor:
    """int64 [..., num] of values below 2^32; seed, purpose, position, step and index broadcast to [...]."""
    if isinstance(index, int):
        check_indices(index, MAX_INDEX)
    device = seed.device
    block = torch.arange(-(-num // 4), device=device)
    # filled on the device: a copy from the CPU would wait for the device
    numbers = (w if isinstance(w, Tensor) else torch.full((), w, device=device) for w in (position, step, index))
    words = [w.unsqueeze(-1) for w in numbers]
    tag = words[2] | (purpose.unsqueeze(-1) if isinstance(purpose, Tensor) else int(purpose)) << INDEX_BITS
    drawn = philox((block, words[0], words[1], tag), _key(seed.unsqueeze(-1)))
    return torch.stack(torch.broadcast_tensors(*drawn), dim=-1).flatten(-2)[..., :num]


def check_indices(last: int, limit: int) -> None:
    """Raises ValueError if an index would repeat the draws of another purpose or model.

    Only Python numbers are checked: reading a tensor would wait for the device.
    """
    if last >= limit:
        raise ValueError(f"a draw of index {last}: indices end below {limit}, where other draws begin")


def uniform(
    seed: Tensor, purpose: Purpose, position: Tensor, step: Tensor | int = 0, index: Tensor | int = 0, *, num: int
) -> Tensor:
    """Uniform draws inside (0, 1), float32 [..., num]; arguments as in `normal`."""
    if kernels.available(seed.device):
        return _drawn_by_kernel("uniform", seed, purpose, position, step, index, num)
    return _uniform(bits(seed, purpose, position, step, index, num))


def fine_uniform(
    seed: Tensor, purpose: Tensor | int, position: Tensor, step: Tensor | int = 0, index: Tensor | int = 0
) -> Tensor:
    """Uniform draws inside (0, 1) of 52 bits, float64 [...], for distributions with many rare outcomes.

    Arguments as in `normal`; several purposes, int64 [...], take one pass of the generator.
    """
    if kernels.available(seed.device):
        return _drawn_by_kernel("fine", seed, purpose, position, step, index, 1).squeeze(-1)
    high, low = bits(seed, purpose, position, step, index, 2).unbind(-1)
    return ((high << 20 | low >> 12).double() + 0.5) * 2.0**-52


def _uniform(words: Tensor) -> Tensor:
    return ((words >> 9).float() + 0.5) * 2.0**-23


def normal(
    seed: Tensor, purpose: Purpose, position: Tensor, step: Tensor | int = 0, index: Tensor | int = 0, *, num: int
) -> Tensor:
    """Standard normal draws, float32 [..., num].

    Args:
        seed: int64 [...], the requests' seeds.
        purpose: the use of the draws.
        position, step, index: integers [...], broadcast; below 2^32, index below MAX_INDEX.
        num: draws per element, d for a token.
    """
    if kernels.available(seed.device):
        return _drawn_by_kernel("normal", seed, purpose, position, step, index, num)
    return _box_muller(bits(seed, purpose, position, step, index, num + num % 2))[..., :num]


def _drawn_by_kernel(
    kind: str, seed: Tensor, purpose: Tensor | int, position: Tensor, step: Tensor | int, index: Tensor | int, num: int
) -> Tensor:
    """Draws in one launch: the same bits, and normals that agree to a few roundings."""
    from cspd.kernels import philox as kernel

    if isinstance(index, int):
        check_indices(index, MAX_INDEX)
    return kernel.draw(kind, seed, purpose, position, step, index, num, INDEX_BITS)


def _box_muller(words: Tensor) -> Tensor:
    u1, u2 = ((words.float() + 0.5) * 2.0**-32).unflatten(-1, (-1, 2)).unbind(-1)
    radius, angle = (-2 * u1.log()).sqrt(), 2 * math.pi * u2
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(-2)


def order(seed: Tensor, length: int) -> Tensor:
    """A request's generation order, int64 [B, length]: a uniform permutation, first generated first."""
    keys = bits(seed.unsqueeze(-1), Purpose.ORDER, torch.arange(length, device=seed.device), 0, 0, 2)
    return ((keys[..., 0] << 31) + (keys[..., 1] >> 1)).argsort(dim=-1, stable=True)


def latents(seed: Tensor, position: Tensor, channels: int) -> Tensor:
    """Normals that draw a given picture's tokens from an autoencoder's posterior: position [R] to [R, channels]."""
    return normal(seed, Purpose.LATENT, position, num=channels)


def initial(seed: Tensor, position: Tensor, channels: int, index: int = 0) -> Tensor:
    """x_T of tokens: seed, position [R] to [R, channels]; index 1 for a target that is not aligned with its draft."""
    return normal(seed, Purpose.INIT, position, 0, index, num=channels)


def steps(seed: Tensor, position: Tensor, step: Tensor, channels: int, index: int = 0) -> Tensor:
    """eps_t of tokens: seed, position [R] and steps t [n] to [n, R, channels]; index as in `initial`."""
    steps_at_once = max(1, MOST_AT_ONCE // (len(seed) * channels)) if seed.device.type == "cpu" else len(step)
    parts = step.unsqueeze(-1).split(steps_at_once)
    return torch.cat([normal(seed, Purpose.STEP, position, part, index, num=channels) for part in parts])


def chain(
    seed: Tensor, position: Tensor, num_steps: int, channels: int, index: int = 0, accept_index: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """All draws of a speculative chain, by one pass of the generator.

    They are x_T, eps_t, and for each step the uniform draw that decides whether its draft is accepted.

    Args:
        index: of x_T and eps_t, as in `initial`.
        accept_index: of the uniform draws: 1 for the chains of a draft model, 0 for the target's.

    Returns:
        (`initial` [R, channels], `steps` [R, num_steps, channels], uniform draws [R, num_steps]), indexed by t; the
        uniform draw of step t is word t of the purpose's stream at step 0.
    """
    if kernels.available(seed.device):
        from cspd.kernels import philox as kernel

        check_indices(max(index, accept_index), MAX_INDEX)
        return kernel.chain(seed, position, num_steps, channels, _chain_tags(index, accept_index))
    counts, block, step, tag = _chain_counters(num_steps, channels, index, accept_index, seed.device)
    seed, position = seed.unsqueeze(-1), position.unsqueeze(-1)
    words = torch.stack(philox((block, position, step, tag), _key(seed)), dim=-1)
    first, middle, last = words.split(counts, dim=1)
    eps = _box_muller(middle.unflatten(1, (num_steps, -1)).flatten(2))
    accept_uniforms = _uniform(last.flatten(1)[:, :num_steps])
    return _box_muller(first.flatten(1))[:, :channels], eps[..., :channels].contiguous(), accept_uniforms


@functools.cache  # as `_constants`
def _chain_counters(
    num_steps: int, channels: int, index: int, accept_index: int, device: torch.device
) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """The counters of a chain's x_T, eps_t and uniform draws, concatenated: (their counts, words block, step, tag)."""
    check_indices(max(index, accept_index), MAX_INDEX)
    per_step, for_accept = -(-channels // 4), -(-num_steps // 4)
    init_tag, step_tag, accept_tag = _chain_tags(index, accept_index)
    parts = [
        (init_tag, torch.arange(per_step), torch.zeros(1, dtype=torch.int64)),
        (step_tag, torch.arange(per_step), torch.arange(num_steps)),
        (accept_tag, torch.arange(for_accept), torch.zeros(1, dtype=torch.int64)),
    ]
    counts = [len(block) * len(step) for _, block, step in parts]
    block = torch.cat([block.repeat(len(step)) for _, block, step in parts])
    step = torch.cat([step.repeat_interleave(len(block)) for _, block, step in parts])
    tag = torch.cat([torch.full((n,), tag) for n, (tag, _, _) in zip(counts, parts)])
    return counts, block.to(device), step.to(device), tag.to(device)


def _chain_tags(index: int, accept_index: int) -> tuple[int, int, int]:
    """The counter's last word for x_T, eps_t and the uniform draws."""
    words = (Purpose.INIT, index), (Purpose.STEP, index), (Purpose.ACCEPT, accept_index)
    init_tag, step_tag, accept_tag = (purpose << INDEX_BITS | own for purpose, own in words)
    return init_tag, step_tag, accept_tag


def candidates(
    seed: Tensor, position: Tensor, step: Tensor, first: int, num: int, channels: int, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Residual candidates first .. first + num - 1 of tokens at their denoising steps: seed, position, step [R].

    `offset` keeps a draft model's apart from the target's: 0 or DRAFT_OFFSET.

    Returns:
        (standard normals [R, num, channels], uniform draws [R, num]).

    Raises:
        ValueError: candidates of the target would repeat the draft model's.
    """
    check_indices(first + num - 1, DRAFT_OFFSET)
    return _candidates(
        (Purpose.CANDIDATE, Purpose.CANDIDATE_ACCEPT), seed, position, step, first + offset, num, channels
    )


def step_accept_uniforms(seed: Tensor, position: Tensor, num_steps: int) -> Tensor:
    """A uniform draw for each step of tokens, as in `chain`: seed, position [R] to [R, T]."""
    return uniform(seed, Purpose.ACCEPT, position, num=num_steps)


def token_candidates(seed: Tensor, position: Tensor, first: int, num: int, channels: int) -> tuple[Tensor, Tensor]:
    """As `candidates`, for whole tokens that were rejected."""
    purposes = (Purpose.TOKEN_CANDIDATE, Purpose.TOKEN_CANDIDATE_ACCEPT)
    return _candidates(purposes, seed, position, torch.zeros_like(position), first, num, channels)


def token_accept_uniforms(seed: Tensor, position: Tensor) -> Tensor:
    """The uniform draw that decides whether a drafted token is accepted: seed, position [R] to [R]."""
    return uniform(seed, Purpose.TOKEN_COIN, position, num=1).squeeze(-1)


def _candidates(
    purposes: tuple[Purpose, Purpose], seed: Tensor, position: Tensor, step: Tensor, first: int, num: int, channels: int
) -> tuple[Tensor, Tensor]:
    seed, position, step = (t.unsqueeze(-1) for t in (seed, position, step))
    check_indices(first + num - 1, MAX_INDEX)
    index = torch.arange(first, first + num, device=seed.device)
    normals = normal(seed, purposes[0], position, step, index, num=channels)
    return normals, uniform(seed, purposes[1], position, step, index, num=1).squeeze(-1)
