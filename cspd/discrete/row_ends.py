"""Row ends: inputs that are not tokens, with which some models end each row of tokens.

A row end always follows its row, so that no forward pass has to predict it.

The input at position p is the token before p. If p begins a row, there are two inputs: that token, then the row end,
after which token p is predicted. One forward pass takes both. The row end has the input's index, and the token is
appended behind all other inputs. So methods and EAGLE's drafter need not know about row ends.

The cache has its columns in the order of tokens and row ends. An input whose node number equals its depth (the first
path) is written to the column where it would stay if it were accepted. Other inputs (siblings) are written beyond
those columns, two columns each. An index without a second input writes to the last column, which is never read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cspd.discrete.kv_cache import MOST_NODES
from cspd.transformer import steps


def reserved(side: int) -> int:
    """The number of columns from the root on for a forward pass's first path; siblings are written after them."""
    return MOST_NODES + MOST_NODES // side + 1


class RowColumns(NamedTuple):
    """The cache columns of inputs at positions [R, N], for a model with row ends.

    Attributes:
        position: int64 [R, N], the input's position in the sequence of tokens and row ends, for the rotary angles.
        is_end: bool [R, N], whether the input is a row end.
        inputs, tokens: int64 [R, N], the cache columns of the input and, if it is a row end, of the token before it.
    """

    position: Tensor
    is_end: Tensor
    inputs: Tensor
    tokens: Tensor


def row_columns(
    before: Tensor, position: Tensor, depth: Tensor, node: Tensor, side: int, never_read: int
) -> RowColumns:
    """The columns of the inputs of nodes int64 [N] or [R, N].

    Args:
        before: int64 [R], the columns of the condition before its last input. position: int64 [R, N], of these inputs;
            the first is the root's. depth: int64 [N] or [R, N], their distance from the root.
        side: tokens in a row. never_read: the last column.
    """
    own = before.unsqueeze(1) + position + position // side
    is_end = (position % side == 0) & (position > 0)

    # accepted inputs of the first path stay where they are written; siblings are written beyond them
    on_first_path = depth == node
    sibling = own[:, :1] + reserved(side) + 2 * node
    inputs = torch.where(on_first_path, own, sibling)
    tokens = torch.where(on_first_path, own - 1, sibling + 1)
    return RowColumns(own, is_end, inputs, torch.where(is_end, tokens, never_read))


def sees_with_row_ends(sees: Tensor, is_end: Tensor, doubled: Tensor) -> Tensor:
    """Which inputs each input looks at after the tokens before row ends were appended: bool [R, N + E, N + E].

    Args:
        sees: bool [R, N, N], the same before that. is_end: bool [R, N], which inputs are row ends.
        doubled: int64 [R, E], indices of all row ends, and of other inputs if there are fewer than E.
    """
    count = sees.shape[1]
    is_doubled = is_end.gather(1, doubled)

    # an appended token looks at the inputs that its row end looks at ...
    rows = doubled.unsqueeze(-1).expand(-1, -1, count)
    of_appended = sees.gather(1, rows)
    by_all = torch.cat([sees, of_appended], 1)

    # ... and an input that looks at a row end looks at the token before it
    columns = doubled.unsqueeze(1).expand(-1, by_all.shape[1], -1)
    at_appended = by_all.gather(2, columns) & is_doubled.unsqueeze(1)

    # but the row end comes after its token
    is_own_end = steps(count, sees.device) == doubled.unsqueeze(-1)
    hidden = is_own_end & is_doubled.unsqueeze(-1)
    at_inputs = torch.cat([sees, of_appended & ~hidden], 1)
    return torch.cat([at_inputs, at_appended], 2)


def mask_with_row_ends(sees: Tensor, first_column: Tensor, column: Tensor, num_columns: int) -> Tensor:
    """bool [R, n, num_columns]: every input looks at all columns before the root, and at inputs of its forward pass.

    Args:
        sees: bool [R, n, n], which of these. first_column: int64 [R, 1], of the root or the token before it.
        column: int64 [R, n], of each input.
    """
    count = sees.shape[1]
    before_root = steps(num_columns, sees.device) < first_column
    mask = before_root.unsqueeze(1).repeat(1, count, 1)
    return mask.scatter_(2, column.unsqueeze(1).expand(-1, count, -1), sees)
