"""Functions of fixed shape as CUDA graphs: one launch in place of hundreds, for rounds whose time is their launches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

WARM_UPS = 3  # runs before a capture, in which libraries choose their kernels and allocate what they need
MOST_GRAPHS = 256  # kept at once; the one that was used the longest time ago goes first

Replay = Callable[[], Any]
Capture = Callable[[Callable[[], Any]], tuple[Any, Replay]]  # from a function to (its results, how to make them again)


class _Recorded(NamedTuple):
    """A captured function: its static inputs and results, and how to make these from those."""

    inputs: tuple[Tensor, ...]
    results: Any
    replay: Replay


class Graphs:
    """Runs functions of tensors; where enabled, each is captured once by key and shapes and then replayed.

    A function takes tensors and returns tensors: one, or tuples of them. It reads the host nowhere and makes no shape
    from data. Beside its inputs it may read tensors that stay where they are (weights, slots), and may write those that
    are named as its state. What it returns is the caller's own, like any result.

    Args:
        enabled: otherwise a run is a plain call. capture: of a function; by default as a graph of `device`.
    """

    def __init__(self, device: torch.device, enabled: bool, capture: Capture | None = None) -> None:
        self.enabled = enabled
        self._capture = capture or (cuda_capture(device) if enabled else None)
        self._recorded: dict[Hashable, _Recorded | None] = {}

    def run(self, key: Hashable, function: Callable[..., Any], *inputs: Tensor, state: Sequence[Tensor] = ()) -> Any:
        """function(*inputs).

        Args:
            key: what the function does beside its inputs: equal keys mean equal functions over the same tensors.
            state: tensors that it writes in place; a capture's trial runs leave no mark in them.
        """
        if not self.enabled:
            return function(*inputs)
        place = (key, tuple((tensor.shape, tensor.dtype) for tensor in inputs))
        if place in self._recorded:
            recorded = self._recorded.pop(place)
        else:
            recorded = self._record(key, function, inputs, state)
        self._recorded[place] = recorded  # as the one last used
        if len(self._recorded) > MOST_GRAPHS:
            del self._recorded[next(iter(self._recorded))]
        if recorded is None:
            return function(*inputs)
        for static, given in zip(recorded.inputs, inputs):
            static.copy_(given)
        recorded.replay()
        # the graphs share their memory: the next one that is replayed may overwrite these
        return tree_map(torch.clone, recorded.results)

    def _record(
        self, key: Hashable, function: Callable[..., Any], inputs: Sequence[Tensor], state: Sequence[Tensor]
    ) -> _Recorded | None:
        """The function captured; None, with a warning, where it cannot be."""
        static = tuple(tensor.clone() for tensor in inputs)
        before = [tensor.clone() for tensor in state]
        try:
            results, replay = self._capture(lambda: function(*static))
        except RuntimeError as error:
            warnings.warn(f"no CUDA graph of {key}, which runs as single kernels: {error}", stacklevel=3)
            return None
        finally:
            for tensor, value in zip(state, before):
                tensor.copy_(value)
        return _Recorded(static, results, replay)


def cuda_capture(device: torch.device) -> Capture:
    """Captures CUDA graphs that share one pool of memory, since they are replayed one after another."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], Any]) -> tuple[Any, Replay]:
        aside, here = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                work()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # other threads, as that which writes images, may go on meanwhile
        with torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
            results = work()
        return results, graph.replay

    return capture
