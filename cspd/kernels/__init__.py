"""Triton kernels for NVIDIA GPUs: each does in one launch what PyTorch does in several, where launches are the time.

PyTorch's own operations are the reference, and what runs wherever `available` says no. The modules here import Triton,
so they are imported where they are used. CSPD_KERNELS=0 in the environment turns all of them off.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from mar.head import Head

SWITCH = "CSPD_KERNELS"
CAPABILITY = (8, 0)  # Ampere, the first with bfloat16
TRITON = (3, 6)  # the oldest that they were compiled by; before 3.3 no kernel takes tuples


def available(device: torch.device) -> bool:
    """Whether these kernels run on a device: CUDA of compute capability 8.0 or above, with `TRITON`, not switched off.

    Raises:
        ValueError: the switch is neither 0 nor 1.
    """
    return device.type == "cuda" and _wanted() and _supported(device)


def fuse(head: Head, device: torch.device) -> None:
    """Has a diffusion head that is on a device computed in few launches, where these kernels run."""
    head.fused = None  # it may have been on another device
    if available(device):
        from cspd.kernels.head import denoise

        head.fused = denoise


def _wanted() -> bool:
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH}={value!r} in the environment: give 0, for no Triton kernels, or 1")
    return value == "1"


@functools.cache
def _supported(device: torch.device) -> bool:
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        return False
    import triton

    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return version >= TRITON and torch.cuda.get_device_capability(device) >= CAPABILITY
