"""Generation order: the order of a request's tokens, the number that each iteration predicts, and its guidance."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd.inpainting import Inpainting
from cspd.method import Part
from cspd.option import Option, check_integer
from cspd.request import Request
from cspd.terminal import number_list

RECONSTRUCTION = Option(
    "reconstruction",
    int,
    "minimum number of iterations for the second colour of the checkerboard; the first colour takes the rest",
    default=2,
    low=1,
    metavar="N",
)


ROUNDS = Option(
    "rounds",
    str,
    "the iterations, from 0, that evaluate the backbone: such as 0-7,9,12. The tokens of the others are drawn together"
    " with those before them",
    metavar="LIST",
    decided=True,
)


@dataclass(frozen=True)
class Order(Part):
    """A registered generation order.

    Attributes:
        masked: (K, number of generated tokens of each stage, values of its options) -> masked tokens after each
            iteration, int64 [K], and the numbers that guidance uses instead, int64 [K].
        stages: (which tokens are generated, bool [L], side of the grid) -> number of these tokens in each stage.
        arrange: rearranges random orders: (int64 [B, L], side of the grid) -> int64 [B, L].
    """

    masked: Callable[..., tuple[np.ndarray, np.ndarray]]
    stages: Callable[[np.ndarray, int], tuple[int, ...]] = lambda is_generated, side: (int(is_generated.sum()),)
    arrange: Callable[[Tensor, int], Tensor] = lambda order, side: order


class Timetable(NamedTuple):
    """The iterations of a request's tokens.

    Attributes:
        masked: int64 [K], tokens still masked after each iteration; or after each round, see `ROUNDS`.
        iteration: int64 [L], the iteration that predicts each token, from 0, by the token's rank in the order.
        scale: float64 [L], the guidance s of that iteration.

    Given tokens come first in the order; their iteration and scale are 0 and mean nothing.
    """

    masked: np.ndarray
    iteration: np.ndarray
    scale: np.ndarray


def timetable(request: Request, seq_len: int) -> Timetable:
    """The timetable of a resolved request; without a named order, MAR's.

    If tokens are given, the K iterations generate the other R tokens: MAR's schedule leaves R cos(pi/2 (k + 1)/K) of
    them masked, and "linear" guidance depends on the masked share of all L tokens.
    """
    name = request.order or "random"
    parameters = tuple(getattr(request, option.name) for option in ORDERS[name].options)
    stages = _stages(name, request.known, seq_len)
    settings = request.num_iter, seq_len, request.cfg, request.cfg_schedule, request.rounds
    return _timetable(name, stages, parameters, *settings)


def num_rounds(request: Request) -> int:
    """The number of rounds of a resolved request: its iterations, unless some are joined."""
    return request.num_iter if request.rounds is None else len(number_list(request.rounds))


def check_rounds(request: Request) -> None:
    """Raises ValueError unless `rounds` lists rising iterations, the first of them 0."""
    if request.rounds is None:
        return
    try:
        starts = number_list(request.rounds)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"rounds: {error}") from None
    is_rising = all(first < second for first, second in itertools.pairwise(starts))
    if starts[0] != 0 or not is_rising or starts[-1] >= request.num_iter:
        raise ValueError(
            f"rounds={request.rounds!r} must rise from 0 to at most {request.num_iter - 1}, the last iteration"
        )


@functools.lru_cache(maxsize=1024)
def _stages(name: str, known: Inpainting | None, seq_len: int) -> tuple[int, ...]:
    """The number of generated tokens in each stage of an order."""
    is_generated = np.ones(seq_len, dtype=bool) if known is None else known.generated
    return ORDERS[name].stages(is_generated, math.isqrt(seq_len))


@functools.lru_cache(maxsize=1024)
def _timetable(
    name: str,
    stages: tuple[int, ...],
    parameters: tuple,
    num_iter: int,
    seq_len: int,
    cfg: float,
    cfg_schedule: str,
    rounds: str | None = None,
) -> Timetable:
    """See `timetable`."""
    masked, left = ORDERS[name].masked(num_iter, *stages, *parameters)
    scale = np.full(num_iter, cfg, dtype=np.float64)
    if cfg_schedule == "linear":
        # MAR's: s rises from near 1 to cfg with the tokens that an iteration leaves unmasked
        scale = 1 + (cfg - 1) * (seq_len - left) / seq_len

    # from iterations to tokens, in generation order
    num_generated = sum(stages)
    num_given = seq_len - num_generated
    num_predicted = -np.diff(masked, prepend=num_generated)
    iteration_by_rank = np.repeat(np.arange(num_iter), num_predicted)
    scale_by_rank = np.repeat(scale, num_predicted)
    if rounds is not None:  # each round ends where the next one begins
        masked = masked[[*(start - 1 for start in number_list(rounds)[1:]), num_iter - 1]]
    return Timetable(masked, np.pad(iteration_by_rank, (num_given, 0)), np.pad(scale_by_rank, (num_given, 0)))


def cosine(num_iter: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """MAR's schedule (arXiv 2406.11838, section 3.3): after iteration k, L cos(pi/2 (k + 1)/K) tokens are masked.

    Every iteration predicts at least one token. The last one predicts all remaining tokens, although the schedule,
    which guidance follows, says that one is left.

    Args:
        num_iter: K, 1 .. L; or 0 if L is 0. seq_len: L, the number of generated tokens.

    Returns:
        (tokens masked after each iteration, the same by the schedule), int64 [K] each.
    """
    left = np.empty(num_iter, dtype=np.int64)
    before = seq_len
    for iteration in range(num_iter):
        # in float64, as in the released code: float32 would round some counts to another integer
        by_cosine = int(np.floor(seq_len * np.cos(np.pi / 2 * (iteration + 1) / num_iter)))
        left[iteration] = max(1, min(before - 1, by_cosine))
        before = left[iteration]
    masked = left.copy()
    masked[-1:] = 0
    return masked, left


def largest(masked: np.ndarray, seq_len: int) -> int:
    """Tokens of the largest iteration; masked: int64 [K], masked tokens after each iteration, L before the first."""
    return -int(np.diff(masked, prepend=seq_len).min())


def two_stages(num_iter: int, first: int, second: int, reconstruction: int) -> tuple[np.ndarray, np.ndarray]:
    """The schedule of GtR (arXiv 2510.17171): half of the tokens in most iterations, the other half in very few.

    The paper gives tokens per iteration for one K of 256 tokens only: 2.67, 10.67 and 64 for a quarter, a quarter and
    a half of them, that is 24, 6 and 2 iterations. To allow any K, the first half follows MAR's cosine here, and the
    second is even. Guidance depends on the masked tokens, as in MAR.

    Args:
        num_iter: K, up to `first + second`. first, second: generated tokens of each half.
        reconstruction: minimum iterations of the second half, if it has as many tokens; below K unless `first` is 0.

    Returns:
        As `cosine`.
    """
    # the first half cannot use more iterations than it has tokens; the second half then has the others
    num_late = max(min(reconstruction, second), num_iter - first)
    num_late = min(num_late, num_iter)
    # `early` counts tokens of the first half only; the second half stays masked until its own iterations
    early, _ = cosine(num_iter - num_late, first)
    late = second - second * np.arange(1, num_late + 1) // num_late
    masked = np.concatenate([second + early, late])
    return masked, np.maximum(masked, 1)


def colours(is_generated: np.ndarray, side: int) -> tuple[int, int]:
    """The numbers of generated tokens of a checkerboard's first and second colour; is_generated: bool [L]."""
    row, column = np.divmod(np.flatnonzero(is_generated), side)
    second = int(((row + column) % 2).sum())
    return len(row) - second, second


def checkerboard(order: Tensor, side: int) -> Tensor:
    """Rearranges random orders [B, L] in the stages of GtR's Algorithm 1; within a stage they stay random.

    First come the positions whose row and column add up to a multiple of four, then to other even numbers, then to odd
    numbers. So the first quarter is spread over the whole image, and no two tokens of the first half are neighbours.
    The paper does not say which of the two quarters comes first; this is our choice.
    """
    diagonal = order // side + order % side  # row + column
    stage = torch.where(diagonal % 2 == 1, 2, diagonal % 4 // 2)
    return order.gather(1, stage.argsort(dim=1, stable=True))


def prepare_checkerboard(request: Request, runner: Any) -> Request:
    """The unchanged request; raises ValueError if the grid has an odd side, or two stages too few iterations."""
    side, half = runner.config.grid_size, runner.seq_len // 2
    if side % 2:
        raise ValueError(
            f"order='checkerboard' needs a grid with an even side, so that both colours have half of the tokens, and"
            f" this model's grid is {side} by {side}: give order='random'"
        )
    check_integer("reconstruction", request.reconstruction, 1, half, "each iteration predicts at least one token")
    first, second = _stages("checkerboard", request.known, runner.seq_len)
    if first and request.num_iter <= min(request.reconstruction, second):
        raise ValueError(
            f"num_iter={request.num_iter} leaves no iteration for the checkerboard's first colour, since"
            f" reconstruction={request.reconstruction}: give a larger num_iter or a smaller reconstruction"
        )
    return request


def radical_inverse(index: int, base: int) -> float:
    """The number 0.d1 d2 d3 .. in a base, where d1 is the last digit of `index`."""
    value, place = 0.0, 1.0
    while index:
        place /= base
        index, digit = divmod(index, base)
        value += place * digit
    return value


@functools.cache
def halton_cells(side: int) -> list[int]:
    """The cells of a grid in the order in which the Halton sequence of bases 2 (rows) and 3 (columns) visits them."""
    cells: dict[int, None] = {}
    points = itertools.count(1)  # as in the released code, without the point 0
    while len(cells) < side**2:
        index = next(points)
        row, column = (int(radical_inverse(index, base) * side) for base in (2, 3))
        cells.setdefault(row * side + column)
    return list(cells)


def halton(order: Tensor, side: int) -> Tensor:
    """Low-discrepancy orders [B, L] (arXiv 2503.17076): each begins at a random cell of one cycle.

    The beginning is the first position of the random order, so it is uniform, as in the released code.
    """
    cells = torch.tensor(halton_cells(side), device=order.device)
    ranks = torch.arange(side**2, device=order.device) + order[:, :1]
    return cells[ranks % side**2]


ORDERS: dict[str, Order] = {  # by name
    "random": Order(cosine),
    "halton": Order(cosine, arrange=halton),
    "checkerboard": Order(two_stages, colours, checkerboard, options=(RECONSTRUCTION,), prepare=prepare_checkerboard),
}
