"""Between the host and a GPU without either waiting: what is sent goes from pinned memory, what comes is read late."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 [n]."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64)
    pinned = torch.empty(len(values), dtype=torch.int64, pin_memory=True)  # torch keeps it until the copy has run
    pinned.numpy()[:] = values
    return pinned.to(device, non_blocking=True)


class Report:
    """A tensor on its way to the host. Reading it waits for what was asked of the device before it, and no longer."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._arrived = values, None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def tolist(self) -> list:
        """The values as Python numbers."""
        if self._arrived:
            self._arrived.synchronize()
        return self._values.tolist()
