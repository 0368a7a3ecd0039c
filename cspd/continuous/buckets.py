"""Work of a batch at few sizes, so that it can be replayed: what is missing up to the next one is added, and left out.

A host without graphs does the same work at the size that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from cspd.continuous.denoiser import Draw
from cspd.transfer import send_integers


def by_sequence(
    host: Any,
    key: Hashable,
    function: Callable[[Tensor], Tensor],
    numbers: np.ndarray,
    state: Sequence[Tensor] = (),
) -> Tensor:
    """What `function` computes of sequences; key and state as in `Graphs.run`.

    Args:
        numbers: int64 [n, B], n of each sequence. The last sequence is repeated.
    """
    size = numbers.shape[1]
    padding = host.graphs.size(size, per_octave=2) - size
    sent = send_integers(np.pad(numbers, ((0, 0), (0, padding)), "edge"), host.device)
    return host.graphs.run(key, function, sent, state=state)


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
