"""Triton kernels of the diffusion head and of a step of its chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from mar.head import LAYER_NORM_EPS, Head, ResBlock

# Arithmetic that several kernels share.


@triton.jit
def guided(conditional, unconditional, scale):
    """Guidance, rounded as torch.lerp rounds it: from the nearer of the two ends."""
    difference = conditional - unconditional
    return tl.where(tl.abs(scale) < 0.5, unconditional + scale * difference, conditional - difference * (1 - scale))


@triton.jit
def ancestral_state(x, eps, v, noise, mean_x, mean_eps, slope):
    """The state after a step of the ancestral chain: `noise` is sigma eps_t without what v adds to log sigma."""
    return x * mean_x + eps * mean_eps + tl.exp(v * slope) * noise


# Launching a kernel, and the layout that it expects of its tensors.


def launch(kernel: Any, programs: int, *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Runs `programs` programs of a kernel on the device of its first argument, a tensor.

    A product and a sum are never contracted to one rounding (`enable_fp_fusion=False`): rounding can decide whether a
    draft is accepted, and Triton's default is about to change.
    """
    if programs == 0:
        return
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, num_warps=num_warps, enable_fp_fusion=False, **constants)


def block_of(width: int) -> tuple[int, int]:
    """(the block size that holds a row of `width` numbers, the number of warps for it)."""
    block = triton.next_power_of_2(width)
    return block, min(max(block // 128, 1), 16)


def check_dense(**tensors: Tensor) -> None:
    """Raises ValueError, naming the tensor, if one is not contiguous: kernels compute addresses from shapes alone."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} {list(tensor.shape)} has strides {tensor.stride()}: give {name}.contiguous()")


# The step after a head call in one launch: of the ancestral chain, or a segment of the calibrated sampler.

BLOCK = 128


@triton.jit(do_not_specialize=["num", "channels"])
def _ancestral_kernel(
    x, out, noise, scale, after, mean_x, mean_eps, slope, num, channels, BRANCHES: tl.constexpr, BLOCK: tl.constexpr
):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < num
    row = lane // channels
    output = lane + row * channels  # index of eps in `out`, whose rows have v after eps
    eps = tl.load(out + output, inside, 0).to(tl.float32)
    v = tl.load(out + output + channels, inside, 0).to(tl.float32)
    if BRANCHES == 2:
        unconditional = tl.load(out + 2 * num + output, inside, 0).to(tl.float32)
        eps = guided(eps, unconditional, tl.load(scale + row, inside, 0))
    state = tl.load(x + lane, inside, 0)
    own_noise = tl.load(noise + lane, inside, 0)
    tl.store(after + lane, ancestral_state(state, eps, v, own_noise, mean_x, mean_eps, slope), inside)


def ancestral_step_kernel(
    x: Tensor, out: Tensor, noise: Tensor, scale: Tensor, mean_x: float, mean_eps: float, slope: float
) -> Tensor:
    """The state [R, d] after a step: mean_x x + mean_eps eps + exp(slope v) noise, eps with guidance.

    Args:
        x: [R, d] float32. out: the head's (eps, v) [G, R, 2d], of any precision, the unconditional branch second.
        noise: [R, d], sigma_t eps_t without the head's factor of sigma_t. scale: s of each row [R, 1].
    """
    x, out, noise, scale = (tensor.contiguous() for tensor in (x, out, noise, scale))
    after = x.new_empty(x.shape)
    arguments = (x, out, noise, scale, after, float(mean_x), float(mean_eps), float(slope), x.numel(), x.shape[1])
    launch(_ancestral_kernel, triton.cdiv(x.numel(), BLOCK), *arguments, BRANCHES=len(out), BLOCK=BLOCK)
    return after


@triton.jit(do_not_specialize=["num", "channels", "num_steps"])
def _segment_kernel(
    x,
    out,
    noise,
    scale,
    temperature,
    difference,
    base,
    slope,
    mix,
    after,
    num,
    channels,
    num_steps,
    BRANCHES: tl.constexpr,
    HAS_DIFFERENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < num
    row = lane // channels
    output = lane + row * channels
    eps = tl.load(out + output, inside, 0).to(tl.float32)
    v = tl.load(out + output + channels, inside, 0).to(tl.float32)

    # guidance: its difference is stored for the calls that do not evaluate the unconditional branch
    if BRANCHES == 2:
        unconditional = tl.load(out + 2 * num + output, inside, 0).to(tl.float32)
        added = (tl.load(scale + row, inside, 0) - 1) * (eps - unconditional)
        tl.store(difference + lane, added, inside)
        eps += added
    elif HAS_DIFFERENCE:
        eps += tl.load(difference + lane, inside, 0)

    # the state: a weighted sum of x_a, eps_a and the noise of each step
    state = tl.load(mix) * tl.load(x + lane, inside, 0) + tl.load(mix + 1) * eps
    tau = tl.load(temperature + row, inside, 0)
    for k in range(0, num_steps):
        sigma = tl.exp(tl.load(base + k) + tl.load(slope + k) * v) * tau
        state += tl.load(mix + 2 + k) * (sigma * tl.load(noise + k * num + lane, inside, 0))
    tl.store(after + lane, state, inside)


def segment_step(
    x: Tensor,
    out: Tensor,
    noise: Tensor,
    scale: Tensor,
    temperature: Tensor,
    difference: Tensor | None,
    base: Tensor,
    slope: Tensor,
    mix: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """A segment of n steps of the calibrated sampler, from the head's outputs at its first step.

    Args:
        x: [R, d] float32. out: the head's (eps, v) [G, R, 2d], the unconditional branch second. noise: [n, R, d].
        scale, temperature: of each row [R, 1].
        difference: [R, d], what guidance added to eps at the last call that evaluated both branches, or None.
        base, slope: of the segment's steps, [n, 1, 1]. mix: the state's weights [2 + n] on x, eps and the noise.

    Returns:
        (the state [R, d] after the segment, the new `difference`).
    """
    x, out, noise, scale, temperature = (tensor.contiguous() for tensor in (x, out, noise, scale, temperature))
    check_dense(base=base, slope=slope, mix=mix)
    if len(out) == 2:
        difference = x.new_empty(x.shape)
    after = x.new_empty(x.shape)
    launch(
        _segment_kernel,
        triton.cdiv(x.numel(), BLOCK),
        x,
        out,
        noise,
        scale,
        temperature,
        difference,
        base,
        slope,
        mix,
        after,
        x.numel(),
        x.shape[1],
        len(noise),
        BRANCHES=len(out),
        HAS_DIFFERENCE=difference is not None,
        BLOCK=BLOCK,
    )
    return after, difference


# The diffusion head's blocks between their matrix products, in one launch a block.
#
# A block is x + gate * MLP(LN(x) scale + shift). The end of one block and the beginning of the next are one kernel. The
# kernel before the first block also computes the narrow input projection. cuBLAS computes the wide products. The
# residual stream between blocks is float32 under every precision.

CHANNELS = 8  # channels of a token that a program multiplies at once
EPS = tl.constexpr(LAYER_NORM_EPS)
Modulation = tuple[Tensor, ...]  # (shift, 1 + scale) and, of a block, gate: [G, M, width] each


@triton.jit
def row_of(values, columns, WIDTH: tl.constexpr):
    """Loads a row of WIDTH numbers as float32."""
    return tl.load(values + columns, columns < WIDTH, 0).to(tl.float32)


@triton.jit
def standardised(x, columns, WIDTH: tl.constexpr):
    """LayerNorm of a row, without weights."""
    mean = tl.sum(x, axis=0) / WIDTH
    centred = tl.where(columns < WIDTH, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / WIDTH
    return centred * tl.rsqrt(variance + EPS)


@triton.jit
def modulated(x, shift, scale, columns, WIDTH: tl.constexpr):
    return row_of(shift, columns, WIDTH) + x * row_of(scale, columns, WIDTH)


@triton.jit
def entry_of(at, row):
    """The index of a row's modulations: its own index, or an entry of `at`."""
    entry = row
    if at is not None:
        entry = tl.load(at + row)
    return entry


@triton.jit(do_not_specialize=["num_rows"])
def _enter_kernel(
    tokens,
    stream,
    hidden,
    weight,
    bias,
    norm_weight,
    norm_bias,
    shift,
    scale,
    stride_branch,
    stride_row,
    at,
    num_rows,
    WIDTH: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    BRANCHES: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = row_of(bias, columns, WIDTH)
    for first in range(0, NUM_CHANNELS, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        token = tl.load(tokens + row * NUM_CHANNELS + channel, channel < NUM_CHANNELS, 0)
        inside = (columns < WIDTH)[:, None] & (channel < NUM_CHANNELS)[None, :]
        tile = tl.load(weight + columns[:, None] * NUM_CHANNELS + channel[None, :], inside, 0).to(tl.float32)
        x += tl.sum(tile * token[None, :], axis=1)
    tl.store(stream + row * WIDTH + columns, x, columns < WIDTH)

    x = standardised(x, columns, WIDTH) * row_of(norm_weight, columns, WIDTH) + row_of(norm_bias, columns, WIDTH)
    entry = entry_of(at, row)
    for branch in tl.static_range(BRANCHES):
        offset = branch * stride_branch + entry * stride_row
        value = modulated(x, shift + offset, scale + offset, columns, WIDTH)
        to = hidden + (branch * num_rows + row) * WIDTH + columns
        tl.store(to, value.to(hidden.dtype.element_ty), columns < WIDTH)


def enter(
    product: nn.Linear, block: ResBlock, tokens: Tensor, modulation: Modulation, at: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes the head up to the first block's first wide product.

    Args:
        product: the head's input projection. tokens: [N, d] float32. modulation: [G, M, width] each.
        at: int64 [N], the index in 0 .. M - 1 of each token's modulations; by default the token's own index.

    Returns:
        (x [N, width] float32; the input of the wide product [G, N, width], in the type of its weights).
    """
    tokens = tokens.contiguous()
    shift, scale, _ = modulation
    num_rows, width = len(tokens), shift.shape[-1]
    stream = tokens.new_empty(num_rows, width, dtype=torch.float32)
    wide: nn.Linear = block.mlp[0]  # type: ignore[assignment]
    hidden = tokens.new_empty(len(shift), num_rows, width, dtype=wide.weight.dtype)
    size, num_warps = block_of(width)
    launch(
        _enter_kernel,
        num_rows,
        tokens,
        stream,
        hidden,
        product.weight,
        product.bias,
        block.in_ln.weight,
        block.in_ln.bias,
        shift,
        scale,
        *strides(shift, scale),
        at,
        num_rows,
        width,
        tokens.shape[1],
        BRANCHES=len(shift),
        CHANNELS=CHANNELS,
        BLOCK=size,
        num_warps=num_warps,
    )
    return stream, hidden


@triton.jit(do_not_specialize=["num_rows"])
def _between_kernel(
    stream,
    stream_branch,
    update,
    gate,
    gate_branch,
    gate_row,
    following,
    hidden,
    norm_weight,
    norm_bias,
    shift,
    scale,
    stride_branch,
    stride_row,
    at,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    branch, row = program // num_rows, program % num_rows
    columns = tl.arange(0, BLOCK)
    entry = entry_of(at, row)
    x = row_of(stream + branch * stream_branch + row * WIDTH, columns, WIDTH)
    gate_values = row_of(gate + branch * gate_branch + entry * gate_row, columns, WIDTH)
    x += gate_values * row_of(update + program * WIDTH, columns, WIDTH)
    tl.store(following + program * WIDTH + columns, x, columns < WIDTH)

    x = standardised(x, columns, WIDTH) * row_of(norm_weight, columns, WIDTH) + row_of(norm_bias, columns, WIDTH)
    offset = branch * stride_branch + entry * stride_row
    value = modulated(x, shift + offset, scale + offset, columns, WIDTH)
    tl.store(hidden + program * WIDTH + columns, value.to(hidden.dtype.element_ty), columns < WIDTH)


def between(
    stream: Tensor, update: Tensor, gate: Tensor, block: ResBlock, modulation: Modulation, at: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes the head from the last product of one block to the first product of the next one, `block`.

    Args:
        stream: x [N, width], equal for both branches, or [G, N, width]. update: the last product [G, N, width].
        gate: of the same block, [G, M, width]. modulation, at: of `block`, as in `enter`.

    Returns:
        (x [G, N, width] float32; the input of the wide product [G, N, width], in the type of its weights).
    """
    check_dense(update=update)
    shift, scale, _ = modulation
    following = torch.empty_like(update, dtype=torch.float32)
    wide: nn.Linear = block.mlp[0]  # type: ignore[assignment]
    hidden = torch.empty_like(update, dtype=wide.weight.dtype)
    branches, num_rows, width = update.shape
    size, num_warps = block_of(width)
    launch(
        _between_kernel,
        branches * num_rows,
        stream,
        num_rows * width if stream.dim() == 3 else 0,
        update,
        gate,
        *strides(gate),
        following,
        hidden,
        block.in_ln.weight,
        block.in_ln.bias,
        shift,
        scale,
        *strides(shift, scale),
        at,
        num_rows,
        width,
        BLOCK=size,
        num_warps=num_warps,
    )
    return following, hidden


def strides(*parts: Tensor) -> tuple[int, int]:
    """The strides (between branches, between rows) that modulations [G, M, width] share.

    Raises ValueError if their strides differ, or if the numbers of a row are not contiguous.
    """
    found = {part.stride() for part in parts}
    between_branches, between_rows, between_columns = parts[0].stride()
    if len(found) > 1 or between_columns != 1:
        raise ValueError(f"modulations have strides {found}: give views of one table, as Head.split returns")
    return between_branches, between_rows


# The whole head: up to its outputs, or with a step of the ancestral chain in its last launch.
#
# A head of depth D takes 4 D + 1 launches: for each block the kernel before it, two wide products and a SiLU, and one
# for the last layer with its narrow product.


@triton.jit
def _last_input(layer, at, num_rows, branch, row, columns, WIDTH: tl.constexpr):
    """The input of the last product: the last block's output, normalised and modulated; see `_through_blocks`."""
    stream, stream_branch, update, gate, gate_branch, gate_row, shift, scale, stride_branch, stride_row = layer
    entry = entry_of(at, row)
    x = row_of(stream + branch * stream_branch + row * WIDTH, columns, WIDTH)
    gate_values = row_of(gate + branch * gate_branch + entry * gate_row, columns, WIDTH)
    x += gate_values * row_of(update + (branch * num_rows + row) * WIDTH, columns, WIDTH)
    offset = branch * stride_branch + entry * stride_row
    return modulated(standardised(x, columns, WIDTH), shift + offset, scale + offset, columns, WIDTH)


@triton.jit
def _product(x, weight, bias, output, inside, columns, WIDTH: tl.constexpr):
    """The outputs `output` [n] of a linear map of a row."""
    mask = inside[:, None] & (columns < WIDTH)[None, :]
    tile = tl.load(weight + output[:, None] * WIDTH + columns[None, :], mask, 0).to(tl.float32)
    return tl.sum(tile * x[None, :], axis=1) + tl.load(bias + output, inside, 0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _leave_kernel(
    out,
    layer,
    at,
    weight,
    bias,
    num_rows,
    WIDTH: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    branch, row = program // num_rows, program % num_rows
    columns = tl.arange(0, BLOCK)
    x = _last_input(layer, at, num_rows, branch, row, columns, WIDTH)
    for first in range(0, 2 * NUM_CHANNELS, CHANNELS):
        output = first + tl.arange(0, CHANNELS)
        inside = output < 2 * NUM_CHANNELS
        value = _product(x, weight, bias, output, inside, columns, WIDTH)
        tl.store(out + program * 2 * NUM_CHANNELS + output, value, inside)


@triton.jit(do_not_specialize=["num_rows"])
def _step_kernel(
    after,
    tokens,
    noise,
    guidance,
    mean_x,
    mean_eps,
    slope,
    layer,
    at,
    weight,
    bias,
    num_rows,
    WIDTH: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    BRANCHES: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = _last_input(layer, at, num_rows, 0, row, columns, WIDTH)
    if BRANCHES == 2:
        x_uncond = _last_input(layer, at, num_rows, 1, row, columns, WIDTH)
    for first in range(0, NUM_CHANNELS, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        inside = channel < NUM_CHANNELS
        eps = _product(x, weight, bias, channel, inside, columns, WIDTH)
        v = _product(x, weight + NUM_CHANNELS * WIDTH, bias + NUM_CHANNELS, channel, inside, columns, WIDTH)
        if BRANCHES == 2:
            eps_uncond = _product(x_uncond, weight, bias, channel, inside, columns, WIDTH)
            eps = guided(eps, eps_uncond, tl.load(guidance + row))
        index = row * NUM_CHANNELS + channel
        token = tl.load(tokens + index, inside, 0)
        own_noise = tl.load(noise + index, inside, 0)
        state = ancestral_state(token, eps, v, own_noise, mean_x, mean_eps, slope)
        tl.store(after + index, state, inside)


def denoise(head: Head, x: Tensor, modulations: Sequence[Modulation], at: Tensor | None = None) -> Tensor:
    """As `Head.denoise`: (eps, v) [G, N, 2d], float32.

    Args:
        x: noisy tokens [N, d], float32. modulations: of each layer, as `Head.split` returns them, [G, M, width] each.
        at: int64 [N], the index in 0 .. M - 1 of each token's modulations, so that they need not be gathered; by
            default the token's own index, with M = N.
    """
    last = _through_blocks(head, x, modulations, at)
    out = x.new_empty(len(modulations[0][0]), len(x), 2 * head.channels)
    launch(_leave_kernel, out.shape[0] * len(x), out, *last, **_sizes(head))
    return out


def ancestral_step(
    head: Head,
    x: Tensor,
    modulations: Sequence[Modulation],
    noise: Tensor,
    scale: Tensor,
    mean_x: float,
    mean_eps: float,
    slope: float,
) -> Tensor:
    """`denoise` and `ancestral_step_kernel` with one launch less: the state [N, d] after a step."""
    x, noise, scale = (tensor.contiguous() for tensor in (x, noise, scale))
    last = _through_blocks(head, x, modulations, None)
    after = torch.empty_like(x)
    numbers = float(mean_x), float(mean_eps), float(slope)
    branches = len(modulations[0][0])
    launch(_step_kernel, len(x), after, x, noise, scale, *numbers, *last, BRANCHES=branches, **_sizes(head))
    return after


def _through_blocks(head: Head, x: Tensor, modulations: Sequence[Modulation], at: Tensor | None) -> tuple:
    """Computes the blocks; returns the arguments that the last layer's kernels share."""
    num_rows = modulations[0][0].shape[1]
    if at is None and num_rows != len(x):
        raise ValueError(f"{len(x)} tokens and modulations of {num_rows} rows: give `at`, or one row for each token")
    blocks = [*head.res_blocks]
    stream, hidden = enter(head.input_proj, blocks[0], x, modulations[0], at)
    update = blocks[0].mlp(hidden)
    for block, modulation, (_, _, gate) in zip(blocks[1:], modulations[1:], modulations):
        stream, hidden = between(stream, update, gate, block, modulation, at)
        update = block.mlp(hidden)
    check_dense(update=update)
    *_, (_, _, gate), (shift, scale) = modulations
    stream_branch = stream[0].numel() if stream.dim() == 3 else 0
    layer = stream, stream_branch, update, gate, *strides(gate), shift, scale, *strides(shift, scale)
    product = head.final_layer.linear
    return layer, at, product.weight, product.bias, len(x), head.width, head.channels


def _sizes(head: Head) -> dict[str, int]:
    block, num_warps = block_of(head.width)
    return {"CHANNELS": CHANNELS, "BLOCK": block, "num_warps": num_warps}
