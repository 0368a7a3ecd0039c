"""What a draft of VQ codes is: a function that proposes a tree of codes for the target to judge.

A draft is a function `(host, batch) -> Drafted`. Its siblings are either drawn without replacement from a distribution
Q that it gives, or chosen (Q is None), and then judged as point masses. Any rule can judge any draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from cspd.discrete.batch import Batch
from cspd.discrete.cache import MOST_NODES
from cspd.discrete.host import VQHost
from cspd.discrete.tree import Draws, Shape


class Drafted(NamedTuple):
    """Codes to judge: the tree's shape, codes int64 [B, N] with the root first (-1: none), Q as in `tree.walk`, and the
    tree's draws where the draft has taken them already.
    """

    shape: Shape
    codes: Tensor
    Q: Tensor | None
    draws: Draws | None = None


@dataclass(frozen=True)
class Draft:
    """A way to draft.

    Attributes:
        propose: drafts for a batch. needs: the model it needs beside the target, a key of `VQHost.models`, or None.
        highest: codes one after the other that it can draft, the largest `gamma`.
    """

    propose: Callable[[VQHost, Batch], Drafted]
    needs: str | None = None
    highest: int = MOST_NODES - 1


DRAFTS: dict[str, Draft] = {}  # by name


def draft(name: str, *, needs: str | None = None, highest: int = MOST_NODES - 1) -> Callable[[Callable], Callable]:
    """Names a function as a draft that a request can ask for; attributes as in `Draft`."""

    def named(propose: Callable[[VQHost, Batch], Drafted]) -> Callable[[VQHost, Batch], Drafted]:
        DRAFTS[name] = Draft(propose, needs, highest)
        return propose

    return named
