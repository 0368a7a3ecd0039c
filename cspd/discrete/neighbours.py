"""Which VQ codes are near each other, for rules that pool the probability of near codes."""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor
from torch.nn import functional

from cspd.discrete.rules import METRICS
from cspd.vq.tokenizer import VQModel

MOST_AT_ONCE = 2**22  # distances at a time
_TABLES: weakref.WeakKeyDictionary[VQModel, dict[str, Tensor]] = weakref.WeakKeyDictionary()  # by metric


def near_codes(tokenizer: VQModel, metric: str, k: int) -> Tensor:
    """`neighbours` of the tokenizer's codes, at least k of each if there are so many; found once."""
    tables = _TABLES.setdefault(tokenizer, {})
    wanted = min(k, tokenizer.config.codebook_size - 1)
    if metric not in tables or tables[metric].shape[1] < wanted:
        vectors = tokenizer.quantize.embedding.weight if metric == "raw" else tokenizer.codebook
        tables[metric] = neighbours(vectors.float(), k, metric)
    return tables[metric]


def neighbours(codebook: Tensor, k: int, metric: str = "l2") -> Tensor:
    """The k nearest others of each code, all of them if fewer: int64 [V, k], nearest first, lower index at ties.

    Args:
        codebook: [V, c], the vectors that the decoder receives, for LlamaGen the l2-normalised codes; for "raw" the
            codes as they are stored.
        k: >= 1. metric: "l2", "cosine", or "raw", which is l2; else ValueError.
    """
    if metric not in METRICS or k < 1:
        raise ValueError(f"metric={metric!r}, k={k}: give one of {', '.join(METRICS)}, and k of at least 1")
    vectors = functional.normalize(codebook, dim=-1) if metric == "cosine" else codebook
    k = min(k, len(vectors) - 1)
    near, start = [], 0
    for part in vectors.split(max(1, MOST_AT_ONCE // len(vectors))):
        # no matrix product: its rounding would reorder close neighbours
        distance = torch.cdist(part, vectors, compute_mode="donot_use_mm_for_euclid_dist")
        distance.diagonal(start).fill_(math.inf)  # a code is no neighbour of its own
        near.append(_nearest(distance.float(), k))
        start += len(part)
    return torch.cat(near)


def _nearest(distance: Tensor, k: int) -> Tensor:
    """Where the k least of distance [n, V] are: int64 [n, k], least first, lower index at ties."""
    farthest = distance.topk(k, largest=False).values[:, -1:]
    nearer = distance < farthest
    # topk keeps any of those that tie for the last places: keep the lowest
    tied = distance == farthest
    places = k - nearer.sum(1, keepdim=True)
    kept = nearer | (tied & (tied.cumsum(1) <= places))
    index = kept.nonzero()[:, 1].view(-1, k)  # ascending in each row, which the stable sort keeps at ties
    order = distance.gather(1, index).argsort(dim=1, stable=True)
    return index.gather(1, order)
