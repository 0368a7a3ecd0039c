"""Which tokens when: the order of a request's tokens, how many of them each iteration predicts, and its guidance."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd.method import nothing_more
from cspd.option import Option, check_integer
from cspd.sequence import Request

GUIDANCE = ("linear", "constant")
RECONSTRUCTION = Option(
    "reconstruction",
    int,
    "iterations for the second colour of the checkerboard, at least; the first colour takes the others",
    default=2,
    low=1,
    metavar="N",
)


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
    name = request.order or "random"
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


def largest(masked: np.ndarray, seq_len: int) -> int:
    """How many tokens the largest iteration predicts, of those masked after each, int64 [K], of L."""
    return -int(np.diff(masked, prepend=seq_len).min())


def two_stages(num_iter: int, seq_len: int, reconstruction: int) -> tuple[np.ndarray, np.ndarray]:
    """The schedule of GtR (arXiv 2510.17171): half of the tokens in most iterations, the other half in very few.

    The paper gives tokens per iteration for one K of 256 tokens only: 2.67, 10.67 and 64 for a quarter, a quarter and
    a half of them, that is 24, 6 and 2 iterations. So that any K will do, the first half goes by MAR's cosine here. The
    second goes evenly. It takes more iterations where the first has fewer tokens than there are iterations. Guidance
    goes by what is masked, as in MAR.

    Args:
        num_iter: K, reconstruction + 1 .. L. seq_len: L, even. reconstruction: 1 .. L/2.

    Returns:
        As of `cosine`.
    """
    half = seq_len // 2
    num_late = max(reconstruction, num_iter - half)
    early, _ = cosine(num_iter - num_late, half)
    late = half - half * np.arange(1, num_late + 1) // num_late
    masked = np.concatenate([half + early, late])
    return masked, np.maximum(masked, 1)


def checkerboard(order: Tensor, side: int) -> Tensor:
    """Random orders [B, L] rearranged in the stages of GtR's Algorithm 1, each as random as it was.

    First come the positions whose row and column add up to a multiple of four, then to other even numbers, then to odd
    ones. So the first quarter is spread over the whole image, and no two tokens of the first half are neighbours. Which
    of the two quarters is first is our choice.
    """
    diagonal = order // side + order % side
    stage = torch.where(diagonal % 2 == 1, 2, diagonal % 4 // 2)
    return order.gather(1, stage.argsort(dim=1, stable=True))


def check_checkerboard(request: Request, host: Any) -> None:
    """Raises ValueError where the grid has no halves, or the iterations do not do for two stages."""
    side, half = host.config.grid_size, host.seq_len // 2
    if side % 2:
        raise ValueError(
            f"order='checkerboard' needs a grid of an even side, and this model's is {side} by {side}: an odd"
            " one has more positions of one colour than of the other, so they are no halves; take order='random'"
        )
    check_integer("reconstruction", request.reconstruction, 1, half, "an iteration predicts a token at least")
    if request.num_iter <= request.reconstruction:
        raise ValueError(
            f"num_iter={request.num_iter} leaves no iteration for the checkerboard's first colour, since"
            f" reconstruction={request.reconstruction}: give more, or a smaller reconstruction"
        )


ORDERS: dict[str, Order] = {  # by name
    "random": Order(cosine),
    "checkerboard": Order(two_stages, checkerboard, (RECONSTRUCTION,), check_checkerboard),
}
