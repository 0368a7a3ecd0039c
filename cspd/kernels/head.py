"""The diffusion head in few launches: with a step of the chain after it, or up to its outputs.

A head of depth D is 4 D + 1 launches: per block what `blocks` has, two wide products and a SiLU, and at the end the
last layer with its narrow product. The step of an ancestral chain can be part of that last launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from cspd.kernels.arithmetic import ancestral_state, guided
from cspd.kernels.blocks import CHANNELS, Modulation, between, enter, entry_of, modulated, row_of, standardised, strides
from cspd.kernels.launching import block_of, check_dense, launch
from mar.head import Head


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
