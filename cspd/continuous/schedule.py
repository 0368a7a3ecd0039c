"""Which tokens when: how many of a request's tokens each iteration predicts, and the guidance of each."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

GUIDANCE = ("linear", "constant")
# (num_iter, seq_len) -> tokens still masked after each iteration [K], and what the guidance takes them to be [K]
Schedule = Callable[[int, int], tuple[np.ndarray, np.ndarray]]


@functools.lru_cache(maxsize=64)
def cosine(num_iter: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """MAR's schedule (arXiv 2406.11838, section 3.3): after iteration k, L cos(pi/2 (k + 1)/K) tokens are masked.

    Every iteration predicts a token at least. The last one predicts all that remain, although the schedule, by which
    guidance goes, says that one is left.

    Args:
        num_iter: K, 1 .. L. seq_len: L.

    Returns:
        (tokens masked after each iteration, the same by the schedule), int64 [K] each.
    """
    left, masked = np.empty(num_iter, dtype=np.int64), seq_len
    for iteration in range(num_iter):
        wanted = int(np.floor(seq_len * np.cos(np.pi / 2 * (iteration + 1) / num_iter)))
        left[iteration] = masked = max(1, min(masked - 1, wanted))
    after = left.copy()
    after[-1] = 0
    return after, left


@functools.lru_cache(maxsize=64)
def guidance_scales(schedule: Schedule, num_iter: int, seq_len: int, cfg: float, cfg_schedule: str) -> np.ndarray:
    """s of the iteration that each token is predicted in, by its rank in the generation order: float64 [L].

    "linear": s = 1 + (cfg - 1)(L - left)/L where an iteration leaves so many tokens masked; "constant": cfg.
    """
    after, left = schedule(num_iter, seq_len)
    counts = -np.diff(after, prepend=seq_len)
    if cfg_schedule == "constant":
        return np.full(seq_len, cfg, dtype=np.float64)
    return np.repeat(1 + (cfg - 1) * (seq_len - left) / seq_len, counts)
