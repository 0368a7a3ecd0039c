"""Triton kernels for NVIDIA GPUs: each does the work of several PyTorch operations in one launch.

They pay where launching kernels takes most of the time. PyTorch's own operations are the reference, and run on every
device for which `available` is False. CSPD_KERNELS=0 in the environment turns all kernels off.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from mar.head import Head

SWITCH = "CSPD_KERNELS"
CAPABILITY = (8, 0)  # Ampere, the first with bfloat16
TRITON = (3, 6)  # the oldest version that compiled them; before 3.3 no kernel takes tuples


def available(device: torch.device) -> bool:
    """Whether the kernels run on a device: CUDA of compute capability 8.0 or above, with Triton, not switched off.

    Raises:
        ValueError: CSPD_KERNELS is neither 0 nor 1.
    """
    return device.type == "cuda" and _wanted() and _supported(device)


def fuse(head: Head, device: torch.device) -> None:
    """Lets a diffusion head on this device use the kernels, if they run there."""
    head.fused = None  # it may have been on another device
    if available(device):
        from cspd.kernels.head import denoise  # imports Triton, which is not everywhere

        head.fused = denoise


def _wanted() -> bool:
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH}={value!r} in the environment: set it to 1, or to 0 to turn Triton kernels off")
    return value == "1"


@functools.cache
def _supported(device: torch.device) -> bool:
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        return False
    import triton

    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return version >= TRITON and torch.cuda.get_device_capability(device) >= CAPABILITY
