"""Whether as many sequences as are to be in flight fit into memory; estimated before anything is allocated."""

from __future__ import annotations

import math

import torch

from cspd.machine import check_fits
from mar.model import MAR


def bytes_per_slot(target: MAR, num_iter: int) -> int:
    """Estimated peak bytes a slot adds: state, and the largest activations of one guided round."""
    config = target.config
    state = config.seq_len * (4 * config.token_dim + 8)
    activations = 14  # of a transformer's layer: norm, qkv, attention, hidden layer twice, residual
    backbone = 2 * 4 * (config.buffer_size + config.seq_len) * config.embed_dim * activations
    rows = 2 * math.ceil(math.pi / 2 * config.seq_len / num_iter + 1)
    head = 4 * rows * config.diffloss_w * (3 * config.diffloss_d + 2 + 8)
    return state + max(backbone, head)


def check_memory(target: MAR, max_batch: int, num_iter: int, device: torch.device) -> None:
    """Raises ValueError, before allocating, where `max_batch` slots at K = `num_iter` would not fit into memory."""
    fix = "use a larger num_iter, a smaller model or another device"
    check_fits(bytes_per_slot(target, num_iter), max_batch, f" at num_iter={num_iter}", fix, device)
