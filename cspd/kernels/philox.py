"""The draws of `cspd.noise`, in one launch each: Philox4x32-10 in 32-bit arithmetic, and Box-Muller.

Random words and uniform draws equal those of `noise.bits` bit for bit. Normals agree with PyTorch's to a few roundings
of float32 (1e-6), because the logarithm, cosine and sine of the two libraries differ in the last bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cspd.kernels.head import launch

BLOCK = 128  # counters per program
DIMS = 3  # of the shape of draws; more dimensions are flattened
KINDS = {"normal": torch.float32, "uniform": torch.float32, "fine": torch.float64, "bits": torch.int64}
STRIDES = [f"{name}{dim}" for name in ("seed", "position", "step", "index", "purpose") for dim in range(DIMS)]
# numbers that Triton shall not compile into a kernel: one kernel serves all their values
NUMBERS = ["step_value", "tag_value", "num_lanes", "num", "blocks", "size1", "size2", *STRIDES]
TWO_PI = tl.constexpr(6.283185307179586)


@triton.jit
def _uniform(word):
    """Equals `noise._uniform`: 23 bits of a word as a number in (0, 1)."""
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def _pair(first, second):
    """Two normals from two words by the method of Box and Muller, as `noise._box_muller`."""
    u1 = (first.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u2 = (second.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    radius = tl.sqrt_rn(-2 * tl.log(u1))
    angle = TWO_PI * u2
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _store_four(to, a, b, c, d, first, end, inside):
    """Stores the numbers `first` to `first` + 3 of an element, except those from `end` on."""
    tl.store(to, a, inside & (first < end))
    tl.store(to + 1, b, inside & (first + 1 < end))
    tl.store(to + 2, c, inside & (first + 2 < end))
    tl.store(to + 3, d, inside & (first + 3 < end))


@triton.jit
def _offset(element, size1, size2, stride0, stride1, stride2):
    """The offset of an element, counted in row-major order, of an operand of shape [.., size1, size2]."""
    outer = element // size2
    return (outer // size1) * stride0 + (outer % size1) * stride1 + (element % size2) * stride2


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
    # each lane computes one block of four words, and an element has several blocks
    element = lane // blocks
    block = lane % blocks

    # the words of the counter; an operand that is equal for all elements comes as a number
    own_seed = tl.load(seed + _offset(element, size1, size2, seed0, seed1, seed2), inside, 0)
    own_position = tl.load(position + _offset(element, size1, size2, position0, position1, position2), inside, 0)
    own_step = tl.zeros_like(lane) + step_value
    if step is not None:
        own_step += tl.load(step + _offset(element, size1, size2, step0, step1, step2), inside, 0)
    tag = tl.zeros_like(lane) + tag_value
    if index is not None:
        tag |= tl.load(index + _offset(element, size1, size2, index0, index1, index2), inside, 0).to(tl.int64)
    if purpose is not None:
        own_purpose = tl.load(purpose + _offset(element, size1, size2, purpose0, purpose1, purpose2), inside, 0)
        tag |= own_purpose.to(tl.int64) << INDEX_BITS
    a, b, c, d = tl.philox(
        own_seed, block.to(tl.uint32), own_position.to(tl.uint32), own_step.to(tl.uint32), tag.to(tl.uint32)
    )

    if KIND == "fine":
        wide = (a.to(tl.int64) << 20) | (b.to(tl.int64) >> 12)
        tl.store(out + element, (wide.to(tl.float64) + 0.5) * 2.220446049250313e-16, inside)
    else:
        if KIND == "normal":
            a, b = _pair(a, b)
            c, d = _pair(c, d)
        if KIND == "uniform":
            a, b, c, d = _uniform(a), _uniform(b), _uniform(c), _uniform(d)
        first = block * 4
        _store_four(out + element * num + first, a, b, c, d, first, num, inside)


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
    """Draws [..., num] of a kind: "normal" or "uniform" in float32, "bits" in int64, or one "fine" number in float64.

    Args:
        seed, purpose, position, step, index: integers, broadcast to [...], as in `noise.bits`.
        index_bits: the bit of the counter's last word at which the purpose begins.
    """
    operands = [value if isinstance(value, Tensor) else None for value in (seed, position, step, index, purpose)]
    shape = torch.broadcast_shapes(*(operand.shape for operand in operands if operand is not None))
    missing = (1,) * (DIMS - len(shape))
    expanded: list[Tensor | None] = []
    strides: list[int] = []
    sizes = (1,) * DIMS
    for operand in operands:
        if operand is None:
            expanded.append(None)
            strides += [0] * DIMS
            continue
        operand = operand.expand(missing + shape)
        if len(shape) > DIMS:
            operand = operand.flatten(0, -DIMS)
        expanded.append(operand)
        strides += operand.stride()
        sizes = operand.shape

    tag = 0
    if not isinstance(index, Tensor):
        tag |= index
    if not isinstance(purpose, Tensor):
        tag |= int(purpose) << index_bits
    out = torch.empty(*shape, num, dtype=KINDS[kind], device=seed.device)
    if kind == "fine":
        num = 4  # both of its words are in one block
    blocks = triton.cdiv(num, 4)
    num_lanes = sizes[0] * sizes[1] * sizes[2] * blocks
    launch(
        _draw_kernel,
        triton.cdiv(num_lanes, BLOCK),
        out,
        *expanded,
        0 if isinstance(step, Tensor) else step,
        tag,
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


@triton.jit(do_not_specialize=["num_lanes", "init_tag", "step_tag", "accept_tag", "seed_stride", "position_stride"])
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
    row = lane // per_row
    counter = lane % per_row
    inside = lane < num_lanes

    # the counters of a row: those of x_T, then of eps_t step by step, then of the uniform draws
    is_init = counter < per_step
    is_accept = counter >= per_step * (1 + num_steps)
    of_steps = counter - per_step
    step = tl.where(is_init | is_accept, 0, of_steps // per_step)
    block = tl.where(is_init, counter, of_steps % per_step)
    block = tl.where(is_accept, counter - per_step * (1 + num_steps), block)
    tag = tl.where(is_init, init_tag, tl.where(is_accept, accept_tag, step_tag))
    own_seed = tl.load(seed + row * seed_stride, inside, 0)
    own_position = tl.load(position + row * position_stride, inside, 0)
    a, b, c, d = tl.philox(
        own_seed, block.to(tl.uint32), own_position.to(tl.uint32), step.to(tl.uint32), tag.to(tl.uint32)
    )

    # the words become numbers in both ways; each lane stores one of them
    first = block * 4
    to = accept_uniforms + row * num_steps + first
    _store_four(to, _uniform(a), _uniform(b), _uniform(c), _uniform(d), first, num_steps, inside & is_accept)
    n0, n1 = _pair(a, b)
    n2, n3 = _pair(c, d)
    is_normal = inside & (counter < per_step * (1 + num_steps))
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
