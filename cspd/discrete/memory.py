"""Whether as many sequences as are to be in flight fit into memory; estimated before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from cspd.discrete.cache import MOST_NODES, most_columns
from cspd.precision import Precision
from cspd.vq.eagle import Eagle
from cspd.vq.gpt import GPT

WORKING = 10  # tensors [N, V] that a round may hold at once


def bytes_per_slot(target: GPT, others: Iterable[GPT | Eagle | None], precision: Precision) -> int:
    """Estimated peak bytes a slot adds: key-value caches, and the distributions of a round.

    `others`: the models that draft.
    """
    config = target.config
    gpts = [target, *(model for model in others if model is not None)]
    caches = sum(cache_bytes(config, m.config, len(m.layers), precision.type_of(m)) for m in gpts)
    return caches + working_bytes(config)


def cache_bytes(target: Any, config: Any, layers: int, dtype: torch.dtype) -> int:
    """Bytes of a slot's keys and values in a model's layers, also of the null condition; target: its config."""
    return 4 * dtype.itemsize * layers * most_columns(target) * config.key_heads * config.head_dim


def working_bytes(config: Any) -> int:
    """Bytes of the distributions that a round holds of a slot at most."""
    return 4 * MOST_NODES * config.vocab_size * WORKING
