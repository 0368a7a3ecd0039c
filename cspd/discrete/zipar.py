"""ZipAR: rows of tokens are decoded side by side. Guarantee: heuristic."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from cspd.discrete.batch import Batch
from cspd.discrete.distributions import sample
from cspd.discrete.drafts import count_round, finished, launch
from cspd.discrete.kv_cache import MOST_NODES, seen_of
from cspd.discrete.rules import MIXED
from cspd.discrete.runner import VQRunner
from cspd.method import Method
from cspd.option import Option, check_integer
from cspd.request import Request, Sequence, Stopwatch
from cspd.transformer import steps

# Source: He et al., "ZipAR: Parallel Auto-regressive Image Generation through Spatial Locality", arXiv 2412.04062. Its
# window size is `lag` here.
#
# A row may begin once the row above has `lag` tokens. So token j of row r, token j - lag of row r + 1, and so on are
# decoded by one forward pass. Each is conditioned on the tokens before it that are decoded: some to its upper right are
# not. With a lag of a whole row that is baseline sampling.
#
# The input before a row's first token is the last token of the row above, which may be missing. Then the last token of
# the last whole row stands in for it, a proxy in the same column, as in the authors' code. The input is computed again
# once the token is there. The first row has no row above, and is decoded alone.
#
# `num_committed` counts the tokens before the first missing one. That one is in the head row, the first row that is not
# whole. The next tokens of the rows below are at fixed distances from it.


class Nodes(NamedTuple):
    """The inputs of a round: the first one of the head row, then those before the next token of each row.

    Attributes:
        first: int64 [B], the position of the head row's first token.
        offset: int64 [B, N], the positions of the inputs, counted from there.
        is_there: bool [B, N], whether a token is decoded. has_proxy: bool [B, N], whether the input has a proxy.
        seen: bool [B, N, M + 2], the `seen_of` of which of the M inputs from `first` on each one looks at.
    """

    first: Tensor
    offset: Tensor
    is_there: Tensor
    has_proxy: Tensor
    seen: Tensor


def nodes_of(num_committed: Tensor, side: int, lag: int) -> Nodes:
    """The inputs of a round of sequences with these numbers of committed tokens, int64 [B]."""
    head_row = (num_committed // side).unsqueeze(1)
    reached = (num_committed % side).unsqueeze(1)  # the head row's next column
    below = steps(-(-side // lag), num_committed.device)  # how far each row is below the head row
    column = reached - lag * below
    is_there = (column >= 0) & (head_row + below < side) & ((below == 0) | (head_row > 0))
    has_proxy = is_there & (column == 0) & (below > 0)

    # the first input of the head row, which may have had a proxy; in the first row, which had none, the head itself
    of_first = torch.where(head_row > 0, 0, reached)
    no = torch.zeros_like(is_there[:, :1])
    past_the_end = side * side + MOST_NODES - 1
    offset = torch.cat([of_first, below * side + column], 1)
    offset = torch.minimum(offset, past_the_end - side * head_row)

    # each looks at the decoded inputs of its own row and the rows above
    span = steps(len(below) * side, num_committed.device)
    row, place = span // side, span % side
    is_decoded = (place <= reached - lag * row).unsqueeze(1)
    sees = is_decoded & (row <= below.unsqueeze(1))
    sees = torch.cat([(span <= of_first).unsqueeze(1), sees], 1)
    first = side * head_row.squeeze(1)
    return Nodes(first, offset, torch.cat([no, is_there], 1), torch.cat([no, has_proxy], 1), seen_of(sees))


Count = TypeVar("Count", int, Tensor)


def num_decoded(num_committed: Count, side: int, lag: int) -> Count:
    """By how much a round moves the first missing token: past the tokens of the next row if it ends a row."""
    row, column = num_committed // side, num_committed % side
    ends = (column == side - 1) & (row > 0) & (row < side - 1)
    return 1 + (side - lag) * ends


def run_round(runner: VQRunner, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Decodes the next token of every row that is under way; returns the finished sequences."""
    launch(runner, sequences, watch, _decode)
    lag = sequences[0].request.lag
    for sequence in sequences:
        count_round(sequence, num_decoded(sequence.num_committed, runner.config.grid, lag))
    return finished(runner, sequences)


def _decode(runner: VQRunner, batch: Batch) -> Tensor:
    """The round on the device. Returns by how much it commits more than one token, [B, 1]."""
    side, lag = runner.config.grid, batch.request.lag
    nodes = nodes_of(batch.num_committed, side, lag)
    position = nodes.first.unsqueeze(1) + nodes.offset
    tokens = runner.inputs_at(batch, position)
    proxy = runner.inputs_at(batch, nodes.first.unsqueeze(1))  # the last token of the last whole row
    tokens = torch.where(nodes.has_proxy, proxy, tokens)
    features = runner.features(batch, tokens, nodes.first, depth=nodes.offset, seen=nodes.seen, columns=nodes.offset)

    # every token by the request's own draw
    P = runner.distributions(batch, features[:, :, 1:])
    position = position[:, 1:]
    drawn = sample(P, runner.drawn(batch, position - batch.num_committed.unsqueeze(1)))
    runner.place(batch, position, drawn, nodes.is_there[:, 1:])
    return num_decoded(batch.num_committed, side, lag).unsqueeze(1) - 1.0


LAG = Option(
    "lag",
    int,
    "tokens by which a row is ahead of the next; a whole row: as ar (default: half a row)",
    low=1,
    metavar="W",
)


def prepare(request: Request, runner: VQRunner) -> Request:
    """The request with its lag.

    Raises ValueError if rows have ends of their own, are shorter than the lag, or are given in part.
    """
    side = runner.config.grid
    if runner.config.row_end is not None:
        raise ValueError("method='zipar' does not know models that end each row by a token of its own: use sjd")
    if request.lag is not None:
        least = max(1, -(-side // (MOST_NODES - 1)))
        check_integer("lag", request.lag, least, side, f"a row has {side} tokens")
    if request.num_generated(runner.seq_len) % side:
        raise ValueError(f"method='zipar' decodes whole rows: keep a multiple of {side} tokens, or use another method")
    return request if request.lag is not None else request.but(lag=-(-runner.config.grid // 2))


ZIPAR = Method(
    name="zipar",
    family="VQ",
    guarantee="heuristic",
    summary="decodes rows side by side, each some tokens behind the row above; no draft",
    papers={"2412.04062": "ZipAR: Parallel Auto-regressive Image Generation through Spatial Locality"},
    run_round=run_round,
    options=(LAG,),
    mixed=lambda request: MIXED,
    prepare=prepare,
)
