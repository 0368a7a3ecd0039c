"""Whether as many sequences as are to be in flight fit into memory; estimated before anything is allocated."""

from __future__ import annotations

import torch

from cspd.continuous.schedule import cosine, largest
from cspd.machine import check_fits
from mar.model import MAR
from mar.registry import defaults_of


def usual_tokens(target: MAR) -> int:
    """The tokens of the largest iteration by the published settings."""
    length = target.config.seq_len
    masked, _ = cosine(min(defaults_of(target.config).num_iter, length), length)
    return largest(masked, length)


def bytes_per_slot(target: MAR, tokens: int) -> int:
    """Estimated peak bytes a slot adds: state, and the activations of a guided round that predicts so many tokens.

    Not counted: tables of modulations, which take up to an eighth of the device's memory and are made in parts or not
    at all where they would take more, and what graphs keep of the same activations beside PyTorch's cache.
    """
    config = target.config
    state = config.seq_len * (4 * config.token_dim + 8)
    activations = 14  # of a transformer's layer: norm, qkv, attention, hidden layer twice, residual
    backbone = 2 * 4 * (config.buffer_size + config.seq_len) * config.embed_dim * activations
    head = 4 * 2 * tokens * config.diffloss_w * (3 * config.diffloss_d + 2 + 8)
    return state + max(backbone, head)


def check_memory(target: MAR, max_batch: int, tokens: int, device: torch.device, copies: int = 0) -> None:
    """Raises ValueError, before allocating, where `max_batch` slots would not fit into memory.

    Args:
        tokens: of the largest iteration of a sequence. copies: bytes of weights that are still to be copied.
    """
    fix = "use a larger num_iter, a smaller model or another device"
    check_fits(bytes_per_slot(target, tokens), max_batch, f" at {tokens} tokens in an iteration", fix, device, copies)
