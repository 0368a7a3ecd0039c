"""The Triton kernel between the matrix products of MAR's transformer: an update joins the stream, which is normalised.

It is the backbone's only kernel; those of the head are in `cspd.kernels.head`, with the arithmetic that they share.
By PyTorch's operations that is a sum, a norm and a cast. They move 24 bytes for each number of the stream, and this
kernel 12, if products take 16-bit numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cspd.kernels.head import block_of, launch, row_of, standardised
from mar.model import Norm


@triton.jit
def _join_kernel(stream, update, weight, bias, joined, normed, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK)
    x = row_of(stream + row, columns, WIDTH)
    if update is not None:
        x += row_of(update + row, columns, WIDTH)
        tl.store(joined + row + columns, x, columns < WIDTH)
    x = standardised(x, columns, WIDTH) * row_of(weight, columns, WIDTH) + row_of(bias, columns, WIDTH)
    tl.store(normed + row + columns, x.to(normed.dtype.element_ty), columns < WIDTH)


def join(norm: Norm, x: Tensor, update: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `Norm.joined`, in one launch, for any x and update [.., D] whose sum is float32."""
    x = x.contiguous()
    joined = x if update is None else torch.empty_like(x, dtype=torch.float32)
    normed = torch.empty_like(x, dtype=dtype)
    width = x.shape[-1]
    size, num_warps = block_of(width)
    update = None if update is None else update.contiguous()
    arguments = x, update, norm.weight, norm.bias, joined, normed
    launch(_join_kernel, x.numel() // width, *arguments, WIDTH=width, BLOCK=size, num_warps=num_warps)
    return joined, normed
