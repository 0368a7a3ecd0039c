"""Whether as many sequences as are to be in flight fit into memory; estimated before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable

from cspd.discrete.cache import MOST_NODES
from cspd.precision import Precision
from cspd.vq.eagle import Eagle
from cspd.vq.gpt import GPT

WORKING = 10  # tensors [N, V] that a round may hold at once


def bytes_per_slot(target: GPT, others: Iterable[GPT | Eagle | None], precision: Precision) -> int:
    """Estimated peak bytes a slot adds: key-value caches, and the distributions of a round.

    `others`: the models that draft.
    """
    config, size = target.config, precision.dtype.itemsize
    columns = config.prefix_length - 1 + config.block_size + MOST_NODES
    gpts = [target, *(model for model in others if model is not None)]
    caches = sum(4 * size * len(m.layers) * columns * m.config.dim for m in gpts)  # keys, values, the null class's
    return caches + 4 * MOST_NODES * config.vocab_size * WORKING
