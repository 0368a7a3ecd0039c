"""Which tokens when: the order of a request's tokens, how many of them each iteration predicts, and its guidance."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from cspd.method import nothing_more
from cspd.option import Option
from cspd.sequence import Request

GUIDANCE = ("linear", "constant")


@dataclass(frozen=True)
class Order:
    """A way to go through the tokens.

    Attributes:
        masked: (K, L, values of its options) -> tokens still masked after each iteration, int64 [K], and what the
            guidance takes them to be, int64 [K].
        arrange: makes the order of random ones: (int64 [B, L], side of the grid) -> int64 [B, L].
        options: settings of its own. check: raises ValueError on a bad request.
    """

    masked: Callable[..., tuple[np.ndarray, np.ndarray]]
    arrange: Callable[[Tensor, int], Tensor] = lambda order, side: order
    options: tuple[Option, ...] = ()
    check: Callable[[Request, Any], None] = nothing_more


class Timetable(NamedTuple):
    """When a request's tokens are predicted.

    Attributes:
        masked: int64 [K], tokens still masked after each iteration.
        iteration: int64 [L], the iteration that each token is predicted in, from 0, by its rank in the order.
        scale: float64 [L], the guidance s of that iteration.
    """

    masked: np.ndarray
    iteration: np.ndarray
    scale: np.ndarray


def timetable(request: Request, seq_len: int) -> Timetable:
    """The timetable of a resolved request; a request that names no order has MAR's."""
    name = request.settings.get("order", "random")
    parameters = tuple(getattr(request, option.name) for option in ORDERS[name].options)
    return _timetable(name, parameters, request.num_iter, seq_len, request.cfg, request.cfg_schedule)


@functools.lru_cache(maxsize=64)
def _timetable(name: str, parameters: tuple, num_iter: int, seq_len: int, cfg: float, cfg_schedule: str) -> Timetable:
    """Guidance "linear": s = 1 + (cfg - 1)(L - left)/L where an iteration leaves so many tokens masked; or cfg."""
    masked, left = ORDERS[name].masked(num_iter, seq_len, *parameters)
    counts = -np.diff(masked, prepend=seq_len)
    scale = np.full(num_iter, cfg, dtype=np.float64)
    if cfg_schedule == "linear":
        scale = 1 + (cfg - 1) * (seq_len - left) / seq_len
    return Timetable(masked, np.repeat(np.arange(num_iter), counts), np.repeat(scale, counts))


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


ORDERS: dict[str, Order] = {"random": Order(cosine)}  # by name
