"""The draws of `cspd.noise`, one launch each: Philox4x32-10 in 32-bit arithmetic, and Box-Muller.

The random words are those of `noise.bits`, bit for bit, and so are uniform draws. Normals agree with those of PyTorch
to a few roundings of float32 (1e-6): logarithm, cosine and sine of two libraries differ in their last bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cspd.kernels.head import launch

BLOCK = 128  # counters a program
DIMS = 3  # of the places of draws
KINDS = {"normal": torch.float32, "uniform": torch.float32, "fine": torch.float64, "bits": torch.int64}
PLACES = [f"{name}{dim}" for name in ("seed", "position", "step", "index", "purpose") for dim in range(DIMS)]
NUMBERS = ["step_value", "tag_value", "num_lanes", "num", "blocks", "size1", "size2", *PLACES]  # one kernel for all
TWO_PI = tl.constexpr(6.283185307179586)


@triton.jit
def _uniform(word):
    """As `noise._uniform`: in (0, 1), of 23 bits."""
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def _pair(first, second):
    """Two normals of two words, as `noise._box_muller` makes them."""
    u1 = (first.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u2 = (second.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    radius = tl.sqrt_rn(-2 * tl.log(u1))
    angle = TWO_PI * u2
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _store_four(to, a, b, c, d, first, end, inside):
    """Stores numbers `first` to `first` + 3 of a place side by side, but those from `end` on."""
    tl.store(to, a, inside & (first < end))
    tl.store(to + 1, b, inside & (first + 1 < end))
    tl.store(to + 2, c, inside & (first + 2 < end))
    tl.store(to + 3, d, inside & (first + 3 < end))


@triton.jit
def _place(lane, size1, size2, stride0, stride1, stride2):
    """Where an operand with these strides has the place `lane` of a shape [.., size1, size2]."""
    outer = lane // size2
    return (outer // size1) * stride0 + (outer % size1) * stride1 + (lane % size2) * stride2


@triton.jit(do_not_specialize=NUMBERS)
def _draw_kernel(
    out,
    seed,
    position,
    step,
    index,
    purpose,
    step_value,
    tag_value,
    num_lanes,
    num,
    blocks,
    size1,
    size2,
    seed0,
    seed1,
    seed2,
    position0,
    position1,
    position2,
    step0,
    step1,
    step2,
    index0,
    index1,
    index2,
    purpose0,
    purpose1,
    purpose2,
    KIND: tl.constexpr,
    INDEX_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < num_lanes
    place, block = lane // blocks, lane % blocks

    # the words of the counter; what is the same everywhere is a number
    own_seed = tl.load(seed + _place(place, size1, size2, seed0, seed1, seed2), inside, 0)
    own_position = tl.load(position + _place(place, size1, size2, position0, position1, position2), inside, 0)
    own_step = tl.zeros_like(lane) + step_value
    if step is not None:
        own_step += tl.load(step + _place(place, size1, size2, step0, step1, step2), inside, 0)
    tag = tl.zeros_like(lane) + tag_value
    if index is not None:
        tag |= tl.load(index + _place(place, size1, size2, index0, index1, index2), inside, 0).to(tl.int64)
    if purpose is not None:
        own_purpose = tl.load(purpose + _place(place, size1, size2, purpose0, purpose1, purpose2), inside, 0)
        tag |= own_purpose.to(tl.int64) << INDEX_BITS
    a, b, c, d = tl.philox(
        own_seed, block.to(tl.uint32), own_position.to(tl.uint32), own_step.to(tl.uint32), tag.to(tl.uint32)
    )

    if KIND == "fine":
        wide = (a.to(tl.int64) << 20) | (b.to(tl.int64) >> 12)
        tl.store(out + place, (wide.to(tl.float64) + 0.5) * 2.220446049250313e-16, inside)
    else:
        if KIND == "normal":
            a, b = _pair(a, b)
            c, d = _pair(c, d)
        if KIND == "uniform":
            a, b, c, d = _uniform(a), _uniform(b), _uniform(c), _uniform(d)
        first = block * 4
        _store_four(out + place * num + first, a, b, c, d, first, num, inside)


def draw(
    kind: str,
    seed: Tensor,
    purpose: Tensor | int,
    position: Tensor,
    step: Tensor | int,
    index: Tensor | int,
    num: int,
    index_bits: int,
) -> Tensor:
    """Draws of a kind, [..., num]: "normal" or "uniform", float32; "bits", int64; of "fine", float64, only one is had.

    Args:
        seed, purpose, position, step, index: integers, broadcast to [...], as in `noise.bits`.
        index_bits: where the purpose begins in the counter's last word.
    """
    operands = [value if isinstance(value, Tensor) else None for value in (seed, position, step, index, purpose)]
    shape = torch.broadcast_shapes(*(operand.shape for operand in operands if operand is not None))
    places = [None if operand is None else operand.expand(shape) for operand in operands]
    if len(shape) > DIMS:
        places = [None if place is None else place.flatten(0, -DIMS) for place in places]
    sizes = [1] * (DIMS - len(shape)) + [*places[0].shape]
    strides = []
    for place in places:
        own = (0,) * len(shape) if place is None else place.stride()
        strides += [0] * (DIMS - len(own)) + [*own][-DIMS:]

    tag = (0 if isinstance(index, Tensor) else index) | (0 if isinstance(purpose, Tensor) else purpose << index_bits)
    out = torch.empty(*shape, num, dtype=KINDS[kind], device=seed.device)
    num = 4 if kind == "fine" else num  # both of its words are in one block
    blocks = triton.cdiv(num, 4)
    num_lanes = sizes[0] * sizes[1] * sizes[2] * blocks
    launch(
        _draw_kernel,
        triton.cdiv(num_lanes, BLOCK),
        out,
        *places,
        0 if isinstance(step, Tensor) else step,
        int(tag),
        num_lanes,
        num,
        blocks,
        *sizes[1:],
        *strides,
        KIND=kind,
        INDEX_BITS=index_bits,
        BLOCK=BLOCK,
    )
    return out


@triton.jit(do_not_specialize=["num_lanes", "init_tag", "step_tag", "coin_tag", "seed_stride", "position_stride"])
def _chain_kernel(
    initial,
    eps,
    accept_uniforms,
    seed,
    position,
    num_lanes,
    num_steps,
    channels,
    init_tag,
    step_tag,
    accept_tag,
    seed_stride,
    position_stride,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    per_step = (channels + 3) // 4
    for_accept = (num_steps + 3) // 4
    per_row = per_step * (1 + num_steps) + for_accept
    row, place = lane // per_row, lane % per_row
    inside = lane < num_lanes

    # a row's counters: those of x_T, of eps_t one step after the other, and of the uniform draws
    is_init = place < per_step
    is_accept = place >= per_step * (1 + num_steps)
    of_steps = place - per_step
    step = tl.where(is_init | is_accept, 0, of_steps // per_step)
    block = tl.where(is_init, place, of_steps % per_step)
    block = tl.where(is_accept, place - per_step * (1 + num_steps), block)
    tag = tl.where(is_init, init_tag, tl.where(is_accept, accept_tag, step_tag))
    own_seed = tl.load(seed + row * seed_stride, inside, 0)
    own_position = tl.load(position + row * position_stride, inside, 0)
    a, b, c, d = tl.philox(
        own_seed, block.to(tl.uint32), own_position.to(tl.uint32), step.to(tl.uint32), tag.to(tl.uint32)
    )

    first = block * 4
    to = accept_uniforms + row * num_steps + first
    _store_four(to, _uniform(a), _uniform(b), _uniform(c), _uniform(d), first, num_steps, inside & is_accept)
    n0, n1 = _pair(a, b)
    n2, n3 = _pair(c, d)
    is_normal = inside & (place < per_step * (1 + num_steps))
    to = tl.where(is_init, initial + row * channels, eps + (row * num_steps + step) * channels) + first
    _store_four(to, n0, n1, n2, n3, first, channels, is_normal)


def chain(
    seed: Tensor, position: Tensor, num_steps: int, channels: int, tags: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """`noise.chain`: (x_T [R, channels], eps_t [R, num_steps, channels], uniform draws [R, num_steps]).

    Args:
        seed, position: int64 [R]. tags: the counter's last word for each of the three.
    """
    rows, device = len(seed), seed.device
    initial = torch.empty(rows, channels, device=device)
    eps = torch.empty(rows, num_steps, channels, device=device)
    accept_uniforms = torch.empty(rows, num_steps, device=device)
    num_lanes = rows * (triton.cdiv(channels, 4) * (1 + num_steps) + triton.cdiv(num_steps, 4))
    launch(
        _chain_kernel,
        triton.cdiv(num_lanes, BLOCK),
        initial,
        eps,
        accept_uniforms,
        seed,
        position,
        num_lanes,
        num_steps,
        channels,
        *tags,
        seed.stride(0),
        position.stride(0),
        BLOCK=BLOCK,
    )
    return initial, eps, accept_uniforms
