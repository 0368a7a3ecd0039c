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
# the constants of Philox4x32-10: each round multiplies two words, and each round's key is the last one's plus WEYL
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MOST_AT_ONCE = 2**19  # numbers drawn at once on a CPU: drawing one number takes ten times its memory
INDEX_BITS = 24
MAX_INDEX = 1 << INDEX_BITS  # every index is below it: the counter's last word has the purpose above the index
DRAFT_OFFSET = 1 << 20  # first index of a draft model's residual candidates; the target's indices are below it
Integers = Tensor | int  # one number for all draws, or a tensor that is broadcast


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
    LATENT = 12  # a token of a given image
    AUDIT = 13  # what is audited, and the rejected VQ tokens that an audit imagines


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of 32 random bits for each counter of four words and key of two.

    All are int64 tensors of values below 2^32, broadcast.
    """
    a, b, c, d, key0, key1 = torch.broadcast_tensors(*counter, *key)
    multipliers, bumps = _constants(a.dim(), a.device)
    # the key of round r is key + r * WEYL, modulo 2^32 in each of its two words
    round_keys = torch.stack([key0, key1]) + bumps & MASK
    # both halves of a round at once: `even` has words a and c, `odd` has b and d
    even = torch.stack([a, c])
    odd = torch.stack([b, d])
    for round_key in round_keys:
        product = even.flip(0) * multipliers  # wraps at 2^64, which does not change either half
        high, low = product >> 32 & MASK, product & MASK
        even, odd = high ^ odd ^ round_key, low
    return even[0], odd[0], even[1], odd[1]


@functools.cache  # forever: a graph reads them at a fixed address
def _constants(dims: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The multipliers [2, 1, ...] and the rounds' key bumps [ROUNDS, 2, 1, ...], for counters of `dims` dimensions."""
    ones = [1] * dims
    with torch.inference_mode(False):
        multipliers = torch.tensor(MULTIPLIERS[::-1], device=device)
        weyl = torch.tensor(WEYL, device=device)
        bumps = torch.arange(ROUNDS, device=device).view(-1, 1) * weyl
    return multipliers.view(2, *ones), bumps.view(ROUNDS, 2, *ones)


def _key(seed: Tensor) -> tuple[Tensor, Tensor]:
    """A seed's lower and upper 32 bits."""
    return seed & MASK, seed >> 32 & MASK


def bits(
    seed: Tensor,
    purpose: Integers,
    position: Tensor,
    step: Integers,
    index: Integers,
    num: int,
) -> Tensor:
    """int64 [..., num] of values below 2^32; seed, purpose, position, step and index broadcast to [...]."""
    device = seed.device
    block = torch.arange(-(-num // 4), device=device)  # four words each
    position = position.unsqueeze(-1)
    step = _with_blocks(step, device)
    index = _with_blocks(index, device)
    tag = purpose << INDEX_BITS
    if isinstance(tag, Tensor):
        tag = tag.unsqueeze(-1)
    key = _key(seed.unsqueeze(-1))
    drawn = philox((block, position, step, index | tag), key)
    words = torch.stack(drawn, dim=-1).flatten(-2)
    return words[..., :num]


def _with_blocks(value: Integers, device: torch.device) -> Tensor:
    """A word of the counter, with a last dimension for its blocks."""
    if isinstance(value, Tensor):
        return value.unsqueeze(-1)
    return torch.full((1,), value, device=device)  # filled there: a copy from the CPU would wait for the device


def check_indices(last: int, limit: int) -> None:
    """Raises ValueError if an index would repeat the draws of another purpose or model.

    Only Python numbers are checked: reading a tensor would wait for the device.
    """
    if last >= limit:
        raise ValueError(f"a draw of index {last}: indices end below {limit}, where other draws begin")


def normal(
    seed: Tensor,
    purpose: Purpose,
    position: Tensor,
    step: Integers = 0,
    index: Integers = 0,
    *,
    num: int,
) -> Tensor:
    """Standard normal draws, float32 [..., num].

    Args:
        seed: int64 [...], the requests' seeds.
        purpose: the use of the draws.
        position, step, index: integers [...], broadcast; below 2^32, index below MAX_INDEX.
        num: draws per element, d for a token.
    """
    return _draw("normal", seed, purpose, position, step, index, num)


def uniform(
    seed: Tensor,
    purpose: Purpose,
    position: Tensor,
    step: Integers = 0,
    index: Integers = 0,
    *,
    num: int,
) -> Tensor:
    """Uniform draws inside (0, 1), float32 [..., num]; arguments as in `normal`."""
    return _draw("uniform", seed, purpose, position, step, index, num)


def fine_uniform(
    seed: Tensor,
    purpose: Integers,
    position: Tensor,
    step: Integers = 0,
    index: Integers = 0,
) -> Tensor:
    """Uniform draws inside (0, 1) of 52 bits, float64 [...], for distributions with many rare outcomes.

    Arguments as in `normal`; several purposes, int64 [...], take one pass of the generator.
    """
    return _draw("fine", seed, purpose, position, step, index, 1).squeeze(-1)


def _draw(
    kind: str,
    seed: Tensor,
    purpose: Integers,
    position: Tensor,
    step: Integers,
    index: Integers,
    num: int,
) -> Tensor:
    """Draws [..., num] of a kind. A kernel takes the same bits in one launch; its normals agree to a few roundings."""
    if isinstance(index, int):
        check_indices(index, MAX_INDEX)
    where = (seed, purpose, position, step, index)
    if kernels.available(seed.device):
        from cspd.kernels import philox as kernel  # imports Triton

        return kernel.draw(kind, *where, num, INDEX_BITS)
    if kind == "normal":
        return _box_muller(bits(*where, num + num % 2))[..., :num]
    if kind == "uniform":
        return _uniform(bits(*where, num))
    high, low = bits(*where, 2).split(1, dim=-1)
    upper_bits = high << 20 | low >> 12  # 32 and 20 of them
    return (upper_bits.double() + 0.5) * 2.0**-52


def _uniform(words: Tensor) -> Tensor:
    """The upper 23 bits k of each word as (k + 1/2) / 2^23, so that no draw is 0 or 1."""
    return ((words >> 9).float() + 0.5) * 2.0**-23


def _box_muller(words: Tensor) -> Tensor:
    """Two normals from each pair of words: [..., n] to [..., n]."""
    uniforms = (words.float() + 0.5) * 2.0**-32
    u1, u2 = uniforms.unflatten(-1, (-1, 2)).unbind(-1)
    radius = (-2 * u1.log()).sqrt()
    angle = 2 * math.pi * u2
    pair = [radius * angle.cos(), radius * angle.sin()]
    return torch.stack(pair, dim=-1).flatten(-2)


# The draws of requests. An `index` of 1 is for a target that is not aligned with its draft model, which has 0.


def order(seed: Tensor, length: int) -> Tensor:
    """A request's generation order, int64 [B, length]: a uniform permutation, first generated first."""
    position = torch.arange(length, device=seed.device)
    words = bits(seed.unsqueeze(-1), Purpose.ORDER, position, 0, 0, 2)
    high, low = words.unbind(-1)
    sort_keys = (high << 31) + (low >> 1)  # 63 bits: ties are as good as impossible
    return sort_keys.argsort(dim=-1, stable=True)


def latents(seed: Tensor, position: Tensor, channels: int) -> Tensor:
    """Normals that draw a given image's tokens from an autoencoder's posterior: position [R] to [R, channels]."""
    return normal(seed, Purpose.LATENT, position, num=channels)


def initial(seed: Tensor, position: Tensor, channels: int, index: int = 0) -> Tensor:
    """x_T of tokens: seed, position [R] to [R, channels]."""
    return normal(seed, Purpose.INIT, position, 0, index, num=channels)


def steps(seed: Tensor, position: Tensor, step: Tensor, channels: int, index: int = 0) -> Tensor:
    """eps_t of tokens: seed, position [R] and steps t [n] to [n, R, channels]."""
    steps_at_once = len(step)
    if seed.device.type == "cpu":
        steps_at_once = max(1, MOST_AT_ONCE // (len(seed) * channels))
    parts = step.unsqueeze(-1).split(steps_at_once)
    return torch.cat([normal(seed, Purpose.STEP, position, part, index, num=channels) for part in parts])


def chain(
    seed: Tensor,
    position: Tensor,
    num_steps: int,
    channels: int,
    index: int = 0,
    accept_index: int = 0,
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
    # Several small draws would cost a launch each: the counters of all three are concatenated instead.
    check_indices(max(index, accept_index), MAX_INDEX)
    if kernels.available(seed.device):
        from cspd.kernels import philox as kernel  # imports Triton

        return kernel.chain(seed, position, num_steps, channels, _chain_tags(index, accept_index))
    counts, (block, step, tag) = _chain_counters(num_steps, channels, index, accept_index, seed.device)
    key = _key(seed.unsqueeze(-1))
    drawn = philox((block, position.unsqueeze(-1), step, tag), key)
    words = torch.stack(drawn, dim=-1)
    init_words, step_words, accept_words = words.split(counts, dim=1)
    # The last block of x_T, of each step and of the uniform draws has up to three words too many.
    x = _box_muller(init_words.flatten(1))
    eps = _box_muller(step_words.unflatten(1, (num_steps, -1)).flatten(2))
    accept_uniforms = _uniform(accept_words.flatten(1)[:, :num_steps])
    return x[:, :channels], eps[..., :channels].contiguous(), accept_uniforms


@functools.cache  # as `_constants`
def _chain_counters(
    num_steps: int,
    channels: int,
    index: int,
    accept_index: int,
    device: torch.device,
) -> tuple[list[int], Tensor]:
    """The counters of a chain's x_T, eps_t and uniform draws: how many each has, and their words block, step and tag.

    The words are int64 [3, N], for the counters of the three in a row.
    """
    init_tag, step_tag, accept_tag = torch.tensor(_chain_tags(index, accept_index)).split(1)
    no_step, every_step = torch.arange(1), torch.arange(num_steps)
    blocks = torch.arange(-(-channels // 4))
    accept_blocks = torch.arange(-(-num_steps // 4))
    parts = [  # (step, block, tag) of each counter, the block changing faster than the step
        torch.cartesian_prod(no_step, blocks, init_tag),
        torch.cartesian_prod(every_step, blocks, step_tag),
        torch.cartesian_prod(no_step, accept_blocks, accept_tag),
    ]
    step, block, tag = torch.cat(parts).unbind(1)
    words = torch.stack([block, step, tag])
    return [len(part) for part in parts], words.to(device)


def _chain_tags(index: int, accept_index: int) -> tuple[int, int, int]:
    """The counter's last word for x_T, eps_t and the uniform draws."""
    return _tag(Purpose.INIT, index), _tag(Purpose.STEP, index), _tag(Purpose.ACCEPT, accept_index)


def _tag(purpose: Purpose, index: int) -> int:
    return purpose << INDEX_BITS | index


def step_accept_uniforms(seed: Tensor, position: Tensor, num_steps: int) -> Tensor:
    """A uniform draw for each step of tokens, as in `chain`: seed, position [R] to [R, T]."""
    return uniform(seed, Purpose.ACCEPT, position, num=num_steps)


def token_accept_uniforms(seed: Tensor, position: Tensor) -> Tensor:
    """The uniform draw that decides whether a drafted token is accepted: seed, position [R] to [R]."""
    return uniform(seed, Purpose.TOKEN_COIN, position, num=1).squeeze(-1)


def candidates(
    seed: Tensor,
    position: Tensor,
    step: Tensor,
    first: int,
    num: int,
    channels: int,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Residual candidates first .. first + num - 1 of tokens at their denoising steps: seed, position, step [R].

    `offset` keeps a draft model's apart from the target's: 0 or DRAFT_OFFSET.

    Returns:
        (standard normals [R, num, channels], uniform draws [R, num]).

    Raises:
        ValueError: candidates of the target would repeat the draft model's.
    """
    check_indices(first + num - 1, DRAFT_OFFSET)
    purposes = (Purpose.CANDIDATE, Purpose.CANDIDATE_ACCEPT)
    return _candidates(purposes, seed, position, step, first + offset, num, channels)


def token_candidates(seed: Tensor, position: Tensor, first: int, num: int, channels: int) -> tuple[Tensor, Tensor]:
    """As `candidates`, for whole tokens that were rejected."""
    purposes = (Purpose.TOKEN_CANDIDATE, Purpose.TOKEN_CANDIDATE_ACCEPT)
    return _candidates(purposes, seed, position, torch.zeros_like(position), first, num, channels)


def _candidates(
    purposes: tuple[Purpose, Purpose],
    seed: Tensor,
    position: Tensor,
    step: Tensor,
    first: int,
    num: int,
    channels: int,
) -> tuple[Tensor, Tensor]:
    check_indices(first + num - 1, MAX_INDEX)
    seed = seed.unsqueeze(-1)
    position = position.unsqueeze(-1)
    step = step.unsqueeze(-1)
    index = torch.arange(first, first + num, device=seed.device)
    normals = normal(seed, purposes[0], position, step, index, num=channels)
    accept_uniforms = uniform(seed, purposes[1], position, step, index, num=1)
    return normals, accept_uniforms.squeeze(-1)
