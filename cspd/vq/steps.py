"""Constants that are made once: a round makes no tensor that the round before had too."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def steps(count: int, device: torch.device) -> Tensor:
    """int64 [count]: 0, 1, ..., count - 1. It is everyone's: do not write to it."""
    return torch.arange(count, device=device) if torch.compiler.is_compiling() else _made_once(count, device)


@functools.lru_cache(maxsize=1024)
def _made_once(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(count, device=device)
