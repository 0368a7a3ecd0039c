"""The diffusion head's blocks between their matrix products, in one launch a block.

A block is x + gate * MLP(LN(x) scale + shift). The end of one and the beginning of the next are one kernel, and the
first beginning takes along the narrow product before it. The wide products are cuBLAS's. What is kept between blocks is
float32, whatever the weights are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from cspd.kernels.launching import block_of, check_dense, launch
from mar.head import LAYER_NORM_EPS, ResBlock

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
