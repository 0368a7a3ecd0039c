"""Between the host and a GPU without either waiting: what is sent goes in one copy from pinned memory, what comes is
read late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 8  # bytes: an array begins where a number of any type may begin


def send(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Arrays as tensors on a device, by name, of the same shapes and types.

    On a GPU they are parts of one buffer, which is copied from pinned memory; on a CPU nothing is copied.
    """
    if device.type != "cuda":
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    begin, total = {}, 0
    for name, array in arrays.items():
        begin[name] = total
        total += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    # freed at once: torch keeps pinned memory until the copy from it has run
    packed = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    bytes_of_all = packed.numpy()
    for name, array in arrays.items():
        bytes_of_all[begin[name] : begin[name] + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = packed.to(device, non_blocking=True)
    sent = {}
    for name, array in arrays.items():
        own = there[begin[name] : begin[name] + array.nbytes]
        sent[name] = own.view(torch.from_numpy(array).dtype).view(array.shape)
    return sent


def send_integers(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """One array as an int64 tensor."""
    return send({"values": np.asarray(values, dtype=np.int64)}, device)["values"]


class Report:
    """A tensor on its way to the host. Reading it waits for what was asked of the device before it, and no longer."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._arrived = values, None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values.device))  # which need not be the current device's

    def array(self) -> np.ndarray:
        """The values."""
        if self._arrived:
            self._arrived.synchronize()
        return self._values.numpy()

    def tolist(self) -> list:
        """The values as Python numbers."""
        return self.array().tolist()
