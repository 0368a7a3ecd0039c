"""Time on the stand-in of a CUDA device, which lags behind the CPU: events, streams, graphs and late arrivals.

`gpu` is the `standin.StandIn` that they belong to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

LAG = 16  # events by which the device is behind: a few rounds
STREAMS = 32


class Timeline:
    """The progress of the device: it has passed `done` of the `recorded` events, which are in one order."""

    def __init__(self) -> None:
        self.recorded = self.done = 0
        self._arrivals: list[tuple[int, Tensor, Tensor]] = []  # the event before it, the target and the value

    def arrive_later(self, target: Tensor, value: Tensor) -> None:
        """Copies to the CPU; the value arrives once the device has passed the next event."""
        self._arrivals.append((self.recorded, target, value))

    def reach(self, event: int) -> None:
        """The device passes an event, or all of its work, and the copies before it arrive."""
        self.done = max(self.done, min(event, self.recorded))
        arrived = [each for each in self._arrivals if each[0] < event]
        self._arrivals = [each for each in self._arrivals if each[0] >= event]
        for _, target, value in arrived:
            target.copy_(value)


class Event:
    """Stands for torch.cuda.Event."""

    def __init__(self, gpu: Any, enable_timing: bool = False) -> None:
        self._gpu, self._timeline, self._number = gpu, gpu.timeline, 0

    def record(self, stream: object) -> None:
        """The stream must be given: torch's default is of the current device, which may be another one."""
        self._timeline.recorded += 1
        self._number = self._timeline.recorded

    def query(self) -> bool:
        self._timeline.reach(self._timeline.recorded - LAG)
        return self._number <= self._timeline.done

    def synchronize(self) -> None:
        self._gpu.wait(self._gpu.reads, "event.synchronize", self._number)

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds: one from an event to the next."""
        if max(self._number, later._number) > self._timeline.done:
            raise RuntimeError("device not ready: an event has not passed")
        return float(later._number - self._number)


class Stream:
    """Stands for torch.cuda.Stream: 32 of them, handed out in turn. All work is in one order all the same."""

    def __init__(self, gpu: Any, device: object = None, priority: int = 0) -> None:
        self._gpu = gpu
        self.number = gpu.streams % STREAMS
        gpu.streams += 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.number == other.number

    def __hash__(self) -> int:
        return hash(self.number)

    def wait_stream(self, stream: Stream) -> None:
        """Everything is in one order already."""

    def wait_event(self, event: Event) -> None:
        """Everything is in one order already."""

    def synchronize(self) -> None:
        self._gpu.wait(self._gpu.reads, "stream.synchronize")


class Pool:
    """Stands for torch.cuda.graph_pool_handle(): invalid once all graphs of the pool have been freed."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._is_new = True

    @property
    def is_used(self) -> bool:
        """Whether graphs hold its memory."""
        return bool(self._graphs)

    def joined_by(self, graph: Graph) -> Graph:
        if not self._is_new and not self._graphs:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED, please report a bug to PyTorch")
        self._graphs.add(graph)
        self._is_new = False
        return graph


class Graph:
    """Stands for torch.cuda.CUDAGraph: operations on fixed tensors, run again into the same results.

    It writes to the cuBLAS workspace of the stream that it was captured on, which is freed when one graph of this
    stream is.
    """

    def __init__(self, gpu: Any, keep_graph: bool = False) -> None:
        self._gpu = gpu
        self.operations: list[tuple[Callable, tuple, dict, Any]] = []

    def captured_on(self, stream: Stream) -> Graph:
        self._workspaces, self._stream = self._gpu.workspaces, stream.number
        self._workspace = self._workspaces.setdefault(self._stream, object())
        return self

    def __del__(self) -> None:
        if hasattr(self, "_workspace"):
            self._workspaces.pop(self._stream, None)

    def replay(self) -> None:
        if self._workspaces.get(self._stream) is not self._workspace:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._gpu.count("graph")
        with _disable_current_modes():
            for operation, args, kwargs, results in self.operations:
                for old, new in zip(tree_leaves(results), tree_leaves(operation(*args, **kwargs))):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # not a view and not in place
                        old.copy_(new)
