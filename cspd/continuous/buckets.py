"""Work of a batch at few sizes, so that it can be replayed: what is missing up to the next one is added, and left out.

A host without graphs does the same work at the size that it has.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from cspd.continuous.denoiser import Draw


def by_sequence(host: Any, numbers: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    """Numbers [n, B], n of each sequence, as int64 [n, size]: the last sequence is repeated."""
    size = len(numbers[0])
    padding = host.graphs.size(size, per_octave=2) - size
    return np.pad(np.array(numbers), ((0, 0), (0, padding)), "edge")


def by_row(host: Any, key: Hashable | None, draw: Draw, rows: Any, z: Tensor) -> Tensor:
    """The tokens [R, d] that `draw` makes of rows and their conditions z.

    Args:
        key: as in `Graphs.run`; None of a function that also does something on the host, which is called as it is.
    """
    inputs: tuple[Tensor, ...] = (z, rows.scale, rows.temperature, rows.seed, rows.position)
    if key is None:
        return draw(*inputs)
    number = len(rows.seed)
    padding = host.graphs.size(number) - number
    if padding:  # rows of zeros
        inputs = tuple(F.pad(each, (0, padding) if each.dim() == 1 else (0, 0, 0, padding)) for each in inputs)
    return host.graphs.run(key, draw, *inputs)[:number]
