"""How kernels are launched, and what they ask of their tensors."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor


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
