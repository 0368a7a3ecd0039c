"""Triton kernels for NVIDIA GPUs: each does the work of several PyTorch operations in one launch.

They pay where launching kernels takes most of the time. PyTorch's own operations are the reference, and run on every
device for which `available` is False. CSPD_KERNELS=0 in the environment turns all kernels off.

Triton compiles a part of its own with the machine's C compiler and Python's headers, at the first launch. So an import
proves nothing: a kernel is run on each device before it is used there.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import nn

from cspd.terminal import first_line, switched_on
from mar.head import Head

SWITCH = "CSPD_KERNELS"
CAPABILITY = (8, 0)  # Ampere, the first with bfloat16
TRITON = (3, 6)  # the oldest version that compiled them; before 3.3 no kernel takes tuples
# what Philox4x32-10 makes of a counter and a key of zeros (Salmon et al. 2011, known answers of Random123)
OF_ZEROS = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def available(device: torch.device) -> bool:
    """Whether the kernels run on a device: NVIDIA's of compute capability 8.0 or above, with Triton, not switched off.

    The first question about a device runs a kernel there. If that fails, it warns and the answer stays False.

    Raises:
        ValueError: CSPD_KERNELS is neither 0 nor 1.
    """
    return device.type == "cuda" and switched_on(SWITCH, usually=True) and _supported(device)


def fuse(model: nn.Module, device: torch.device) -> None:
    """Lets the parts of a model on this device use the kernels that there are for them, if kernels run there."""
    kernel_of = {}
    if available(device):
        from cspd.kernels.backbone import join  # these import Triton, which is not everywhere
        from cspd.kernels.head import denoise
        from mar.model import Norm

        kernel_of = {Head: denoise, Norm: join}
    module: Any
    for module in model.modules():
        if hasattr(module, "fused"):
            module.fused = kernel_of.get(type(module))  # or None: it may have been on another device


@functools.cache
def _supported(device: torch.device) -> bool:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return False
    try:
        _run_one(device)
    except Exception as error:  # of an import, a compiler or a driver
        oldest = ".".join(map(str, TRITON))
        warnings.warn(
            f"Triton kernels do not run on {device}, so PyTorch's operations run instead, which is slower"
            f" ({first_line(error)}): install Triton {oldest} or later (on Windows triton-windows), a C compiler (gcc)"
            f" and Python's headers (python3-dev); or set {SWITCH}=0",
            stacklevel=3,
        )
        return False
    return True


def _run_one(device: torch.device) -> None:
    """Runs a small kernel. Raises whatever Triton raises, or RuntimeError if Triton is too old or computes rubbish."""
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < TRITON:
        raise RuntimeError(f"this is Triton {triton.__version__}")
    from cspd.kernels.philox import draw

    zero = torch.zeros(1, dtype=torch.int64, device=device)
    drawn = draw("bits", zero, 0, zero, 0, 0, len(OF_ZEROS), 0).tolist()
    if drawn != [OF_ZEROS]:
        raise RuntimeError(f"a kernel drew {drawn} instead of {[OF_ZEROS]}")
