"""Functions of fixed shape as CUDA graphs: one launch in place of hundreds, for rounds whose time is their launches."""

from __future__ import annotations

import contextlib
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

MOST_GRAPHS = 256  # kept at once; one more, and all of them are made anew

Replay = Callable[[], Any]
# from (trial runs of a function, the function) to (its results, how to make them again)
Capture = Callable[[Callable[[], None], Callable[[], Any]], tuple[Any, Replay]]


@dataclass
class _Recorded:
    """A captured function: its static inputs and results, and how to make these from those.

    It is in no circle of references: a graph must go when `Graphs` lets it go, not in the middle of a later capture.
    """

    inputs: tuple[Tensor, ...]
    results: Any
    replay: Replay
    watched: list[weakref.ref] = field(default_factory=list)
    freed: list[weakref.ref] = field(default_factory=list)

    def watch(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Becomes stale when one of them is freed."""
        self.watched = [weakref.ref(storage, self.freed.append) for storage in storages]

    @property
    def is_stale(self) -> bool:
        """Whether memory that it reads has been freed."""
        return bool(self.freed)


class Graphs:
    """Runs functions of tensors; where enabled, each is captured once by key and shapes and then replayed.

    A function takes tensors and returns tensors: one, or tuples of them. It reads the CPU nowhere, makes no shape from
    data, draws nothing from torch's generators and calls no other `run`. Beside its inputs it may read tensors that
    stay where they are (weights, slots, constants), and may write in place those that are named as its state. Graphs do
    not keep these: one whose tensors are gone is captured anew. (A tensor that Triton kernels alone read is not seen:
    it must go together with one that an operation reads, or be part of the key.) A constant that the function makes
    once and keeps (`functools.cache`) is made in a trial run. What it returns is the caller's own, like any result.

    Args:
        enabled: otherwise a run is a plain call; by default it is on CUDA. capture: of a function; by default as a
            graph of `device`.

    Attributes:
        lasting: what graphs read and is no weight, by what it is: it stays whatever sequences come and go.
        seconds: that captures have taken.

    Raises:
        ValueError: there are no graphs of this device.
    """

    def __init__(self, device: torch.device, enabled: bool | None = None, capture: Capture | None = None) -> None:
        on_cuda = device.type == "cuda"
        if enabled and not on_cuda and capture is None:
            raise ValueError(f"graphs=True, but {device} has no CUDA graphs: leave graphs out, or use a CUDA device")
        self.device = device
        self.enabled = on_cuda if enabled is None else enabled
        self._capture = capture or (cuda_capture(device) if self.enabled else None)
        self._recorded: dict[Hashable, _Recorded | None] = {}
        self._retired: list[Replay] = []
        self.lasting: dict[Hashable, Any] = {}
        self.seconds = 0.0

    def run(self, key: Hashable, function: Callable[..., Any], *inputs: Tensor, state: Sequence[Tensor] = ()) -> Any:
        """function(*inputs).

        Args:
            key: what the function does beside its inputs: equal keys mean equal functions over the same tensors.
            state: tensors whose values it changes; trial runs leave no mark in them. Others that it writes to must get
                values that a second run would write again, such as the keys of a cache.
        """
        if not self.enabled:
            return function(*inputs)
        place = (key, *((tensor.shape, tensor.dtype) for tensor in inputs))
        with torch.inference_mode():  # static tensors may be written to by later runs, whatever mode these are in
            recorded = self._recorded.get(place)
            if recorded and recorded.is_stale:
                self._retired.append(self._recorded.pop(place).replay)
            if place not in self._recorded:
                recorded = self._recorded[place] = self._record(key, function, inputs, state)
            if recorded is None:
                return function(*inputs)
            for static, given in zip(recorded.inputs, inputs):
                static.copy_(given)
            recorded.replay()
            # the graphs share their memory: the next one that is replayed may overwrite these
            return tree_map_only(Tensor, torch.clone, recorded.results)

    def last(self, name: str, key: Hashable, make: Callable[[], Any]) -> Any:
        """make(); where enabled, what it made last under this name, if that was for an equal key."""
        if not self.enabled:
            return make()
        last_key, made = self.lasting.pop(name, (None, None))
        if last_key != key:
            made = None  # it goes before the next one needs its memory
            made = make()
        self.lasting[name] = key, made
        return made

    def size(self, number: int, per_octave: int = 8) -> int:
        """So many rows or positions as they are computed: up to the next bucket where graphs are enabled."""
        return bucket(number, per_octave) if self.enabled else number

    def _record(
        self, key: Hashable, function: Callable[..., Any], inputs: Sequence[Tensor], state: Sequence[Tensor]
    ) -> _Recorded | None:
        """The function captured; None, with a warning, where it cannot be."""
        if len(self._recorded) + len(self._retired) >= MOST_GRAPHS:
            self._drop()
        start = time.perf_counter()
        static = tuple(tensor.clone() for tensor in inputs)
        before = [tensor.clone() for tensor in state]
        reads = _Reads()

        def restore() -> None:
            for tensor, value in zip(state, before):
                tensor.copy_(value)

        def trials() -> None:
            # in the first one constants are made and libraries choose their kernels; the second one is watched
            for watch in (contextlib.nullcontext(), reads, contextlib.nullcontext()):
                with watch:
                    function(*static)
                restore()

        try:
            results, replay = self._capture(trials, lambda: function(*static))
        except RuntimeError as error:
            cause = error.__context__ or error  # what ended a capture is followed by the error of ending it
            warnings.warn(f"no CUDA graph of {key}, which runs as single kernels: {cause}", stacklevel=3)
            return None
        finally:
            restore()
            self.seconds += time.perf_counter() - start
        recorded = _Recorded(static, results, replay)
        recorded.watch([storage for storage in (seen() for seen in reads.seen) if storage is not None])
        return recorded

    def _drop(self) -> None:
        """Forgets all graphs, which other shapes have replaced.

        All at once: when a graph goes, torch may free the workspaces of cuBLAS that others on its stream write to.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._recorded.clear()
        self._retired.clear()


class _Reads(TorchDispatchMode):
    """Notes the memory that operations read and that none of them made, in `seen` from when it is left."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[torch.UntypedStorage]] = []
        self._read: dict[int, torch.UntypedStorage] = {}  # which cannot be freed, and their addresses reused, meanwhile
        self._made: set[int] = set()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.seen = [weakref.ref(storage) for storage in self._read.values()]
        self._read.clear()

    def __torch_dispatch__(self, operation: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._made:
                self._read[storage._cdata] = storage
        results = operation(*args, **kwargs)
        self._made |= {storage._cdata for storage in _storages(results)} - self._read.keys()
        return results


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def cuda_capture(device: torch.device) -> Capture:
    """Captures CUDA graphs on one stream, into one pool of memory, since they are replayed one after another."""
    aside, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    captured: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def capture(trials: Callable[[], None], function: Callable[[], Any]) -> tuple[Any, Replay]:
        nonlocal aside, pool
        if not captured:  # a pool is gone for good with the last graph in it
            pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream(device)
        aside.wait_stream(here)
        try:
            with torch.cuda.stream(aside):  # also the first to use it: cuBLAS has a workspace for each stream
                trials()
                # other threads, such as one that writes images, may go on meanwhile
                with torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
                    results = function()
        except BaseException:
            here.wait_stream(aside)
            aside, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()  # those stay as the error left them
            raise
        here.wait_stream(aside)
        captured.add(graph)
        return results, graph.replay

    return capture


def bucket(size: int, per_octave: int = 8) -> int:
    """A size after padding, so that shapes repeat: up to 2 `per_octave` as they are, then so many sizes an octave."""
    step = 1 << max(0, (size - 1).bit_length() - per_octave.bit_length())
    return -(-size // step) * step
