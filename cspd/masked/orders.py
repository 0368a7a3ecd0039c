"""Which tokens when: the order of a request's tokens, how many of them each iteration predicts, and its guidance."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd.method import nothing_more
from cspd.option import Option, check_integer
from cspd.request import Known, Request

RECONSTRUCTION = Option(
    "reconstruction",
    int,
    "minimum number of iterations for the second colour of the checkerboard; the first colour takes the rest",
    default=2,
    low=1,
    metavar="N",
)


@dataclass(frozen=True)
class Order:
    """A way to go through the tokens.

    Attributes:
        masked: (K, tokens that are made of each stage, values of its options) -> tokens still masked after each
            iteration, int64 [K], and what the guidance takes them to be, int64 [K].
        stages: which tokens are made, bool [L], and the side of the grid -> how many of each stage.
        arrange: makes the order of random ones: (int64 [B, L], side of the grid) -> int64 [B, L].
        options: settings of its own. check: raises ValueError on a bad request.
    """

    masked: Callable[..., tuple[np.ndarray, np.ndarray]]
    stages: Callable[[np.ndarray, int], tuple[int, ...]] = lambda made, side: (int(made.sum()),)
    arrange: Callable[[Tensor, int], Tensor] = lambda order, side: order
    options: tuple[Option, ...] = ()
    check: Callable[[Request, Any], None] = nothing_more


class Timetable(NamedTuple):
    """When a request's tokens are predicted. Those that are known from the start come first, and mean nothing here.

    Attributes:
        masked: int64 [K], tokens still masked after each iteration.
        iteration: int64 [L], the iteration that each token is predicted in, from 0, by its rank in the order.
        scale: float64 [L], the guidance s of that iteration.
    """

    masked: np.ndarray
    iteration: np.ndarray
    scale: np.ndarray


def timetable(request: Request, seq_len: int) -> Timetable:
    """The timetable of a resolved request; a request that names no order has MAR's.

    Where tokens are known from the start, the K iterations go over the others, R of them: MAR's schedule leaves
    R cos(pi/2 (k + 1)/K) of them masked, and the guidance "linear" goes by the share of all L tokens that is.
    """
    name = request.order or "random"
    parameters = tuple(getattr(request, option.name) for option in ORDERS[name].options)
    stages = _stages(name, request.known, seq_len)
    return _timetable(name, stages, parameters, request.num_iter, seq_len, request.cfg, request.cfg_schedule)


@functools.lru_cache(maxsize=1024)
def _stages(name: str, known: Known | None, seq_len: int) -> tuple[int, ...]:
    """How many tokens are made of each stage of an order."""
    made = np.ones(seq_len, dtype=bool) if known is None else known.made
    return ORDERS[name].stages(made, math.isqrt(seq_len))


@functools.lru_cache(maxsize=1024)
def _timetable(
    name: str,
    stages: tuple[int, ...],
    parameters: tuple,
    num_iter: int,
    seq_len: int,
    cfg: float,
    cfg_schedule: str,
) -> Timetable:
    """Guidance "linear": s = 1 + (cfg - 1)(L - left)/L where an iteration leaves so many tokens masked; or cfg."""
    masked, left = ORDERS[name].masked(num_iter, *stages, *parameters)
    num_made = sum(stages)
    counts = -np.diff(masked, prepend=num_made)
    scale = np.full(num_iter, cfg, dtype=np.float64)
    if cfg_schedule == "linear":
        scale = 1 + (cfg - 1) * (seq_len - left) / seq_len
    of_tokens = (np.repeat(each, counts) for each in (np.arange(num_iter), scale))
    return Timetable(masked, *(np.pad(each, (seq_len - num_made, 0)) for each in of_tokens))


def cosine(num_iter: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """MAR's schedule (arXiv 2406.11838, section 3.3): after iteration k, L cos(pi/2 (k + 1)/K) tokens are masked.

    Every iteration predicts a token at least. The last one predicts all that remain, although the schedule, by which
    guidance goes, says that one is left.

    Args:
        num_iter: K, 1 .. L; or 0 where L is. seq_len: L, all tokens that are made.

    Returns:
        (tokens masked after each iteration, the same by the schedule), int64 [K] each.
    """
    left, masked = np.empty(num_iter, dtype=np.int64), seq_len
    for iteration in range(num_iter):
        wanted = int(np.floor(seq_len * np.cos(np.pi / 2 * (iteration + 1) / num_iter)))
        left[iteration] = masked = max(1, min(masked - 1, wanted))
    after = left.copy()
    after[-1:] = 0
    return after, left


def largest(masked: np.ndarray, seq_len: int) -> int:
    """How many tokens the largest iteration predicts, of those masked after each, int64 [K], of L at first."""
    return -int(np.diff(masked, prepend=seq_len).min())


def two_stages(num_iter: int, first: int, second: int, reconstruction: int) -> tuple[np.ndarray, np.ndarray]:
    """The schedule of GtR (arXiv 2510.17171): half of the tokens in most iterations, the other half in very few.

    The paper gives tokens per iteration for one K of 256 tokens only: 2.67, 10.67 and 64 for a quarter, a quarter and
    a half of them, that is 24, 6 and 2 iterations. So that any K will do, the first half goes by MAR's cosine here. The
    second goes evenly. It takes more iterations where the first has fewer tokens than there are iterations. Guidance
    goes by what is masked, as in MAR.

    Args:
        num_iter: K, up to `first + second`. first, second: tokens that are made of each half.
        reconstruction: iterations for the second, at least, as far as it has tokens; below K where the first has any.

    Returns:
        As of `cosine`.
    """
    num_late = min(num_iter, max(min(reconstruction, second), num_iter - first))
    early, _ = cosine(num_iter - num_late, first)
    late = second - second * np.arange(1, num_late + 1) // num_late
    masked = np.concatenate([second + early, late])
    return masked, np.maximum(masked, 1)


def colours(made: np.ndarray, side: int) -> tuple[int, int]:
    """How many of the tokens that are made, bool [L], are of a checkerboard's first colour and of its second."""
    row, column = np.divmod(np.flatnonzero(made), side)
    second = int(((row + column) % 2).sum())
    return len(row) - second, second


def checkerboard(order: Tensor, side: int) -> Tensor:
    """Random orders [B, L] rearranged in the stages of GtR's Algorithm 1, each as random as it was.

    First come the positions whose row and column add up to a multiple of four, then to other even numbers, then to odd
    ones. So the first quarter is spread over the whole image, and no two tokens of the first half are neighbours. Which
    of the two quarters is first is our choice.
    """
    diagonal = order // side + order % side
    stage = torch.where(diagonal % 2 == 1, 2, diagonal % 4 // 2)
    return order.gather(1, stage.argsort(dim=1, stable=True))


def check_checkerboard(request: Request, runner: Any) -> None:
    """Raises ValueError where the grid has no halves, or the iterations do not do for two stages."""
    side, half = runner.config.grid_size, runner.seq_len // 2
    if side % 2:
        raise ValueError(
            f"order='checkerboard' needs a grid of an even side, and this model's is {side} by {side}: an odd"
            " one has more positions of one colour than of the other, so they are no halves; take order='random'"
        )
    check_integer("reconstruction", request.reconstruction, 1, half, "an iteration predicts a token at least")
    first, second = _stages("checkerboard", request.known, runner.seq_len)
    if first and request.num_iter <= min(request.reconstruction, second):
        raise ValueError(
            f"num_iter={request.num_iter} leaves no iteration for the checkerboard's first colour, since"
            f" reconstruction={request.reconstruction}: give more, or a smaller reconstruction"
        )


ORDERS: dict[str, Order] = {  # by name
    "random": Order(cosine),
    "checkerboard": Order(two_stages, colours, checkerboard, (RECONSTRUCTION,), check_checkerboard),
}
