"""Triton kernels of the diffusion head and of a step of its chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from mar.head import LAYER_NORM_EPS, Head, ResBlock

# What several kernels compute: guidance, Gaussians, rows.


@triton.jit
def guided(conditional, unconditional, scale):
    """As torch.lerp rounds it: from the side that is nearer."""
    difference = conditional - unconditional
    return tl.where(tl.abs(scale) < 0.5, unconditional + scale * difference, conditional - difference * (1 - scale))


@triton.jit
def ancestral_state(x, eps, v, noise, mean_x, mean_eps, slope):
    """The state after a step of the ancestral chain: `noise` is sigma eps_t without what v adds to log sigma."""
    return x * mean_x + eps * mean_eps + tl.exp(v * slope) * noise


# How kernels are launched, and what they ask of their tensors.


def launch(kernel: Any, programs: int, *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Runs so many programs of a kernel on the device of its first argument, a tensor.

    A product and a sum are never contracted to one rounding: whether a draft is accepted depends on rounding, and
    Triton's default for this is about to change.
    """
    if programs == 0:
        return
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, num_warps=num_warps, enable_fp_fusion=False, **constants)


def block_of(width: int) -> tuple[int, int]:
    """(the block that holds a row of `width`, warps for it)."""
    block = triton.next_power_of_2(width)
    return block, min(max(block // 128, 1), 16)


def check_dense(**tensors: Tensor) -> None:
    """Raises ValueError, naming it, where a tensor is not contiguous: a kernel reads it by its shape alone."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} {list(tensor.shape)} has strides {tensor.stride()}: give {name}.contiguous()")


# What follows a head call in a chain, one launch each: the ancestral step, and a window of the calibrated sampler.

BLOCK = 128


@triton.jit(do_not_specialize=["num", "channels"])
def _ancestral_kernel(
    x, out, noise, scale, after, mean_x, mean_eps, slope, num, channels, CLASSES: tl.constexpr, BLOCK: tl.constexpr
):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < num
    row = lane // channels
    place = lane + row * channels  # of eps in out, whose rows have v after it
    eps = tl.load(out + place, inside, 0).to(tl.float32)
    v = tl.load(out + place + channels, inside, 0).to(tl.float32)
    if CLASSES == 2:
        unconditional = tl.load(out + 2 * num + place, inside, 0).to(tl.float32)
        eps = guided(eps, unconditional, tl.load(scale + row, inside, 0))
    state = tl.load(x + lane, inside, 0)
    own_noise = tl.load(noise + lane, inside, 0)
    tl.store(after + lane, ancestral_state(state, eps, v, own_noise, mean_x, mean_eps, slope), inside)


def ancestral_step_kernel(
    x: Tensor, out: Tensor, noise: Tensor, scale: Tensor, mean_x: float, mean_eps: float, slope: float
) -> Tensor:
    """The state [R, d] after a step: mean_x x + mean_eps eps + exp(slope v) noise, eps with guidance.

    Args:
        x: [R, d] float32. out: the head's (eps, v) [G, R, 2d], of any precision; G = 2 with the null class second.
        noise: sigma_t eps_t [R, d] but for the part of v. scale: s of each row [R, 1].
    """
    x, out, noise, scale = (tensor.contiguous() for tensor in (x, out, noise, scale))
    after = x.new_empty(x.shape)
    arguments = (x, out, noise, scale, after, float(mean_x), float(mean_eps), float(slope), x.numel(), x.shape[1])
    launch(_ancestral_kernel, triton.cdiv(x.numel(), BLOCK), *arguments, CLASSES=len(out), BLOCK=BLOCK)
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
    CLASSES: tl.constexpr,
    HAS_DIFFERENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < num
    row = lane // channels
    place = lane + row * channels
    eps = tl.load(out + place, inside, 0).to(tl.float32)
    v = tl.load(out + place + channels, inside, 0).to(tl.float32)

    # guidance: what it adds is kept for the calls that leave out the null class
    if CLASSES == 2:
        unconditional = tl.load(out + 2 * num + place, inside, 0).to(tl.float32)
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
    """The state [R, d] after a window of n steps of the calibrated sampler, and what guidance adds from now on [R, d].

    Args:
        x: [R, d] float32. out: the head's (eps, v) [G, R, 2d]; G = 2 with the null class second. noise: [n, R, d].
        scale, temperature: of each row [R, 1]. difference: what guidance added last, [R, d]; None without guidance.
        base, slope: of the window's steps, [n, 1, 1]. mix: the state's weights [2 + n] on x, eps and the noise.
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
        CLASSES=len(out),
        HAS_DIFFERENCE=difference is not None,
        BLOCK=BLOCK,
    )
    return after, difference


# The diffusion head's blocks between their matrix products, in one launch a block.
#
# A block is x + gate * MLP(LN(x) scale + shift). The end of one and the beginning of the next are one kernel, and the
# first beginning takes along the narrow product before it. The wide products are cuBLAS's. What is kept between blocks
# is float32, whatever the weights are.

CHANNELS = 8  # of a token that a program multiplies at once
EPS = tl.constexpr(LAYER_NORM_EPS)
Modulation = tuple[Tensor, ...]  # shift, scale and in a block gate, [G, M, width] each


@triton.jit
def row_of(values, columns, WIDTH: tl.constexpr):
    """A row of `width` numbers, as float32."""
    return tl.load(values + columns, columns < WIDTH, 0).to(tl.float32)


@triton.jit
def standardised(x, columns, WIDTH: tl.constexpr):
    """A row less its mean, over its standard deviation."""
    mean = tl.sum(x, axis=0) / WIDTH
    centred = tl.where(columns < WIDTH, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / WIDTH
    return centred * tl.rsqrt(variance + EPS)


@triton.jit
def modulated(x, shift, scale, columns, WIDTH: tl.constexpr):
    return row_of(shift, columns, WIDTH) + x * row_of(scale, columns, WIDTH)


@triton.jit
def entry_of(at, row):
    """Where a row has its modulations: a row of their own, or where `at` says."""
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
    stride_class,
    stride_row,
    at,
    num_rows,
    WIDTH: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    CLASSES: tl.constexpr,
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
    for of_class in tl.static_range(CLASSES):
        place = of_class * stride_class + entry * stride_row
        value = modulated(x, shift + place, scale + place, columns, WIDTH)
        to = hidden + (of_class * num_rows + row) * WIDTH + columns
        tl.store(to, value.to(hidden.dtype.element_ty), columns < WIDTH)


def enter(
    product: nn.Linear, block: ResBlock, tokens: Tensor, modulation: Modulation, at: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Up to the first block's first wide product.

    Args:
        product: the head's first. tokens: [N, d] float32. modulation: [G, M, width] each. at: int64 [N], the row of M
            that a token has; by default its own.

    Returns:
        (x [N, width] float32, what the wide product takes [G, N, width], in its weights' precision).
    """
    tokens = tokens.contiguous()
    shift, scale, _ = modulation
    num_rows, width = len(tokens), shift.shape[-1]
    stream = tokens.new_empty(num_rows, width, dtype=torch.float32)
    hidden = tokens.new_empty(len(shift), num_rows, width, dtype=block.mlp[0].weight.dtype)
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
        CLASSES=len(shift),
        CHANNELS=CHANNELS,
        BLOCK=size,
        num_warps=num_warps,
    )
    return stream, hidden


@triton.jit(do_not_specialize=["num_rows"])
def _between_kernel(
    stream,
    stream_class,
    update,
    gate,
    gate_class,
    gate_row,
    following,
    hidden,
    norm_weight,
    norm_bias,
    shift,
    scale,
    stride_class,
    stride_row,
    at,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    of_class, row = program // num_rows, program % num_rows
    columns = tl.arange(0, BLOCK)
    entry = entry_of(at, row)
    x = row_of(stream + of_class * stream_class + row * WIDTH, columns, WIDTH)
    gate_values = row_of(gate + of_class * gate_class + entry * gate_row, columns, WIDTH)
    x += gate_values * row_of(update + program * WIDTH, columns, WIDTH)
    tl.store(following + program * WIDTH + columns, x, columns < WIDTH)

    x = standardised(x, columns, WIDTH) * row_of(norm_weight, columns, WIDTH) + row_of(norm_bias, columns, WIDTH)
    place = of_class * stride_class + entry * stride_row
    value = modulated(x, shift + place, scale + place, columns, WIDTH)
    tl.store(hidden + program * WIDTH + columns, value.to(hidden.dtype.element_ty), columns < WIDTH)


def between(
    stream: Tensor, update: Tensor, gate: Tensor, block: ResBlock, modulation: Modulation, at: Tensor | None
) -> tuple[Tensor, Tensor]:
    """From a block's last product to the first of the next, `block`.

    Args:
        stream: x [N, width], the same for all classes, or [G, N, width]. update: the product [G, N, width]. gate: its
            block's [G, M, width]. modulation, at: of `block`, as in `enter`.

    Returns:
        (x [G, N, width] float32, what the wide product takes [G, N, width], in its weights' precision).
    """
    check_dense(update=update)
    shift, scale, _ = modulation
    following = torch.empty_like(update, dtype=torch.float32)
    hidden = torch.empty_like(update, dtype=block.mlp[0].weight.dtype)
    classes, num_rows, width = update.shape
    size, num_warps = block_of(width)
    launch(
        _between_kernel,
        classes * num_rows,
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
    """Of the classes and rows of modulations [G, M, width], which have them in common.

    Raises ValueError where they have not, or a row's numbers are not beside each other.
    """
    found = {part.stride() for part in parts}
    of_class, of_row, of_column = parts[0].stride()
    if len(found) > 1 or of_column != 1:
        raise ValueError(f"modulations have strides {found}: give views of one table, as Head.split does")
    return of_class, of_row


# The diffusion head in few launches: with a step of the chain after it, or up to its outputs.
#
# A head of depth D is 4 D + 1 launches: per block what `blocks` has, two wide products and a SiLU, and at the end the
# last layer with its narrow product. The step of an ancestral chain can be part of that last launch.


@triton.jit
def _last_input(layer, at, num_rows, of_class, row, columns, WIDTH: tl.constexpr):
    """What the last product takes: the last block's end, standardised and modulated; `layer`: of `_through_blocks`."""
    stream, stream_class, update, gate, gate_class, gate_row, shift, scale, stride_class, stride_row = layer
    entry = entry_of(at, row)
    x = row_of(stream + of_class * stream_class + row * WIDTH, columns, WIDTH)
    gate_values = row_of(gate + of_class * gate_class + entry * gate_row, columns, WIDTH)
    x += gate_values * row_of(update + (of_class * num_rows + row) * WIDTH, columns, WIDTH)
    place = of_class * stride_class + entry * stride_row
    return modulated(standardised(x, columns, WIDTH), shift + place, scale + place, columns, WIDTH)


@triton.jit
def _product(x, weight, bias, output, inside, columns, WIDTH: tl.constexpr):
    """Some outputs of a linear map of a row."""
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
    of_class, row = program // num_rows, program % num_rows
    columns = tl.arange(0, BLOCK)
    x = _last_input(layer, at, num_rows, of_class, row, columns, WIDTH)
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
    CLASSES: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = _last_input(layer, at, num_rows, 0, row, columns, WIDTH)
    if CLASSES == 2:
        x_null = _last_input(layer, at, num_rows, 1, row, columns, WIDTH)
    for first in range(0, NUM_CHANNELS, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        inside = channel < NUM_CHANNELS
        eps = _product(x, weight, bias, channel, inside, columns, WIDTH)
        v = _product(x, weight + NUM_CHANNELS * WIDTH, bias + NUM_CHANNELS, channel, inside, columns, WIDTH)
        if CLASSES == 2:
            eps_null = _product(x_null, weight, bias, channel, inside, columns, WIDTH)
            eps = guided(eps, eps_null, tl.load(guidance + row))
        place = row * NUM_CHANNELS + channel
        token = tl.load(tokens + place, inside, 0)
        own_noise = tl.load(noise + place, inside, 0)
        state = ancestral_state(token, eps, v, own_noise, mean_x, mean_eps, slope)
        tl.store(after + place, state, inside)


def denoise(head: Head, x: Tensor, modulations: Sequence[Modulation], at: Tensor | None = None) -> Tensor:
    """As `Head.denoise`: (eps, v) [G, N, 2d], float32.

    Args:
        x: noisy tokens [N, d], float32. modulations: of each layer, split, [G, M, width] each. at: int64 [N], the row
            of M that a token has its modulations in, so that they need not be gathered; by default its own, M = N.
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
    """`denoise` and then `steps.ancestral_step`, without a launch for it: the state [N, d] after a step."""
    x, noise, scale = (tensor.contiguous() for tensor in (x, noise, scale))
    last = _through_blocks(head, x, modulations, None)
    after = torch.empty_like(x)
    numbers = float(mean_x), float(mean_eps), float(slope)
    classes = len(modulations[0][0])
    launch(_step_kernel, len(x), after, x, noise, scale, *numbers, *last, CLASSES=classes, **_sizes(head))
    return after


def _through_blocks(head: Head, x: Tensor, modulations: Sequence[Modulation], at: Tensor | None) -> tuple:
    """What the last layer's kernels take of the head's blocks and of itself."""
    num_rows = modulations[0][0].shape[1]
    if at is None and num_rows != len(x):
        raise ValueError(f"{len(x)} tokens and modulations of {num_rows} rows: say `at`, or give a row to each token")
    blocks = [*head.res_blocks]
    stream, hidden = enter(head.input_proj, blocks[0], x, modulations[0], at)
    update = blocks[0].mlp(hidden)
    for block, modulation, (_, _, gate) in zip(blocks[1:], modulations[1:], modulations):
        stream, hidden = between(stream, update, gate, block, modulation, at)
        update = block.mlp(hidden)
    check_dense(update=update)
    *_, (_, _, gate), (shift, scale) = modulations
    stream_class = stream[0].numel() if stream.dim() == 3 else 0
    layer = stream, stream_class, update, gate, *strides(gate), shift, scale, *strides(shift, scale)
    product = head.final_layer.linear
    return layer, at, product.weight, product.bias, len(x), head.width, head.channels


def _sizes(head: Head) -> dict[str, int]:
    block, num_warps = block_of(head.width)
    return {"CHANNELS": CHANNELS, "BLOCK": block, "num_warps": num_warps}
