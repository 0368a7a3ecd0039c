"""Kernels on a CPU. Triton decides at its import whether it interprets kernels, so these tests run in a process of
their own, which `tests/test_kernels.py` starts.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*"]


@pytest.fixture(autouse=True)
def without_gradients():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
