"""Fewer launches in rounds that are bound by them: CUDA graphs of functions with fixed shapes, and torch.compile."""

from __future__ import annotations

import functools
import gc
import hashlib
import math
import os
import tempfile
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from cspd.terminal import first_line, telling

# Graphs live in two generations, the younger of which takes new ones. When it is full it becomes the older one, and the
# older one is dropped: its graphs are captured again when they are used.
#
# A whole generation is dropped, and has a stream of its own, for this reason: cuBLAS has a workspace for each stream,
# which all graphs that were captured there write to, and newer versions of torch free it when one of these graphs is
# destroyed (pytorch/pytorch#175276, #193402). torch hands out its 32 streams in turn, so that two engines could get the
# same one.
MOST_GRAPHS = 256  # of both generations
MEMORY_SHARE = 1 / 8  # of the device, for the graphs of both generations
STREAMS = 32  # that torch hands out in turn

Replay = Callable[[], Any]
# maps (trial runs of a function, the function) to (its results, a function that computes them again)
Capture = Callable[[Callable[[], None], Callable[[], Any]], tuple[Any, Replay]]


@dataclass
class _Recorded:
    """A captured function: its static inputs and results, and the replay that computes the results.

    Must not be part of a reference cycle: the graph has to be freed when `Graphs` drops it, not by the garbage
    collector during a later capture.
    """

    inputs: tuple[Tensor, ...]
    results: Any
    replay: Replay
    watched: list[weakref.ref] = field(default_factory=list)
    freed: list[weakref.ref] = field(default_factory=list)

    def watch(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Makes this graph stale as soon as one of these storages is freed."""
        self.watched = [weakref.ref(storage, self.freed.append) for storage in storages]

    @property
    def is_stale(self) -> bool:
        """Whether memory that the graph reads has been freed."""
        return bool(self.freed)


@dataclass
class _Generation:
    """Graphs that are captured on one stream into one memory pool, and dropped together."""

    recorded: dict[Hashable, _Recorded | None] = field(default_factory=dict)
    stale: list[Replay] = field(default_factory=list)
    bytes: int = 0
    capture: Capture = field(kw_only=True)  # the last one, since it holds the stream: it is freed after the graphs


class Graphs:
    """Runs functions of tensors; if enabled, captures each once for a key and shapes, and then replays it.

    A function takes tensors and returns tensors: one, or tuples of them. It must not read from the device, derive a
    shape from data, draw from torch's generators or call another `run`. Besides its inputs it may read tensors at fixed
    addresses (weights, slots, constants), and may write in place to its `state`. Graphs hold no reference to these
    tensors: if one was freed, the function is captured again. (A tensor that only Triton kernels read is not noticed:
    it must be freed together with one that an operation reads, or be part of the key.) Constants that the function
    caches (`functools.cache`) are made in a trial run. Results are copies.

    Args:
        enabled: if False, a run is an ordinary call; by default True on CUDA, but not with ROCm, whose graphs have
            crashed. capture: captures a function; by default as a CUDA graph of `device`.

    Attributes:
        lasting: objects that graphs read, besides weights, by name: they outlive the sequences that use them.
        captures: the last captures, each with its `key`, `shapes`, `seconds` and `bytes` of device memory.
        seconds: total seconds of captures.

    Raises:
        ValueError: the device has no graphs.
    """

    def __init__(self, device: torch.device, enabled: bool | None = None, capture: Capture | None = None) -> None:
        on_cuda = device.type == "cuda"
        if enabled and not on_cuda and capture is None:
            raise ValueError(f"graphs=True, but {device} has no CUDA graphs: leave graphs out, or use a CUDA device")
        self.device = device
        self.enabled = on_cuda and torch.version.hip is None if enabled is None else enabled
        self._new_capture = (lambda: capture) if capture else functools.partial(cuda_capture, device)
        self._generations = [_Generation(capture=self._new_capture())] if self.enabled else []  # the youngest first
        self.lasting: dict[Hashable, Any] = {}
        self.captures: deque[dict[str, Any]] = deque(maxlen=MOST_GRAPHS)
        self.seconds = 0.0
        total = torch.cuda.mem_get_info(device)[1] if self.enabled and on_cuda else math.inf
        self._most_bytes = MEMORY_SHARE * total

    def run(
        self,
        key: Hashable,
        function: Callable[..., Any],
        *inputs: Tensor,
        state: Sequence[Tensor] = (),
        rows: int = 0,
    ) -> Any:
        """Returns function(*inputs).

        Args:
            key: identifies the function: equal keys mean equal functions over the same tensors.
            state: tensors that the function updates; they are restored after trial runs. To other tensors it may only
                write values that a second run would write again, such as the keys of a cache.
            rows: if enabled, inputs with fewer rows are padded to as many: with zeros, or in a replay with rows of
                earlier inputs. Rows are dimension -2 of an input, or its only dimension.
        """
        if not self.enabled:
            return function(*inputs)
        shapes = [_with_rows(tensor.shape, rows) for tensor in inputs]
        full_key = (key, *shapes, *(tensor.dtype for tensor in inputs))
        with torch.inference_mode():  # so that later runs may write to the static tensors in any mode
            generation = next((each for each in self._generations if full_key in each.recorded), None)
            recorded = generation.recorded[full_key] if generation else None
            if generation and recorded and recorded.is_stale:  # its replay lives as long as its generation
                del generation.recorded[full_key]
                generation.stale.append(recorded.replay)
                generation = recorded = None  # or they would outlive a generation that is dropped now
            if generation is None:
                recorded = self._record(full_key, function, _padded(inputs, shapes), state)
            if recorded is None:
                return function(*_padded(inputs, shapes))
            _overwrite(recorded.inputs, inputs)
            recorded.replay()
            # the graphs share their memory: the next one that is replayed may overwrite these
            return tree_map_only(Tensor, torch.clone, recorded.results)

    def last(self, name: str, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns make(); if enabled, the last result under this name, if its key was equal."""
        if not self.enabled:
            return make()
        last_key, made = self.lasting.pop(name, (None, None))
        if last_key != key:
            made = None  # freed before the next one needs its memory
            made = make()
        self.lasting[name] = key, made
        return made

    def size(self, number: int, per_octave: int = 8) -> int:
        """The size that `number` rows or positions are padded to: the next bucket, or `number` without graphs."""
        return bucket(number, per_octave) if self.enabled else number

    def _record(
        self, full_key: tuple, function: Callable[..., Any], static: tuple[Tensor, ...], state: Sequence[Tensor]
    ) -> _Recorded | None:
        """Captures the function of static inputs; returns None, with a warning, if that fails."""
        generation = self._with_room()
        key = full_key[0]
        start, free = time.perf_counter(), 0
        before = [tensor.clone() for tensor in state]
        reads = _Reads()

        def restore() -> None:
            for tensor, value in zip(state, before):
                tensor.copy_(value)

        def trial() -> None:
            function(*static)
            restore()

        def trials() -> None:
            nonlocal free
            trial()  # makes constants, and lets libraries choose kernels
            with reads:  # so that only what every later run reads is watched
                function(*static)
            restore()
            trial()
            free = self._free()  # what trials made and kept, such as tables in slots, is not the graph's

        try:
            results, replay = generation.capture(trials, lambda: function(*static))
        except RuntimeError as error:
            cause = error.__context__ or error  # the context is the first error; ending the capture raised another
            warnings.warn(f"no CUDA graph of {key}, which runs as single kernels instead: {cause}", stacklevel=3)
            generation.recorded[full_key] = None
            return None
        finally:
            restore()
            seconds = time.perf_counter() - start
            taken = max(0, free - self._free())
            self.seconds += seconds
            generation.bytes += taken
            shapes = [tuple(tensor.shape) for tensor in static]
            self.captures.append({"key": str(key), "shapes": shapes, "seconds": seconds, "bytes": taken})
        recorded = _Recorded(static, results, replay)
        alive = [reference() for reference in reads.seen]
        recorded.watch([storage for storage in alive if storage is not None])
        generation.recorded[full_key] = recorded
        return recorded

    def _with_room(self) -> _Generation:
        """The younger generation, after one that was full has become the older one."""
        young = self._generations[0]
        graphs = len(young.recorded) + len(young.stale)
        if graphs >= MOST_GRAPHS // 2 or young.bytes >= self._most_bytes / 2:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # a replay may be running
            for old in self._generations[1:]:
                old.recorded.clear()
                old.stale.clear()
            self._generations = [_Generation(capture=self._new_capture()), young]
        return self._generations[0]

    def _free(self) -> int:
        """The device's free memory in bytes, or 0 without CUDA."""
        if self.device.type != "cuda":
            return 0
        # a capture empties torch's cache: what it frees there would hide what the graph takes
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    @property
    def bytes(self) -> int:
        """Device memory that the capture of all graphs took that can be replayed now."""
        return sum(generation.bytes for generation in self._generations)

    def summary(self) -> str:
        """The captures in one line, for a person; empty if there were none."""
        if not self.captures:
            return ""
        seconds = [capture["seconds"] for capture in self.captures]
        return (
            f"CUDA graphs: the last {len(seconds)} captures took {sum(seconds):.1f} s, the slowest"
            f" {max(seconds):.1f} s; the graphs take {self.bytes / 2**20:.0f} MiB"
        )


class _Reads(TorchDispatchMode):
    """Collects the storages that operations read and did not allocate; they are in `seen` after the block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[torch.UntypedStorage]] = []
        self._read: dict[int, torch.UntypedStorage] = {}  # holds them, so that none of their addresses is reused
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
        outputs = {storage._cdata for storage in _storages(results)}
        self._made |= outputs - self._read.keys()  # views and in-place results share what was read
        return results


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


_taken: weakref.WeakSet[torch.cuda.Stream] = weakref.WeakSet()  # by `own_stream`; equal objects are one stream


def own_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream of torch's that no one else has got from here and still holds, or None if all are taken."""
    for collect in (False, True):
        if collect:
            gc.collect()  # engines that nobody uses any more
        for _ in range(STREAMS):
            stream = torch.cuda.Stream(device)
            if stream not in _taken:
                _taken.add(stream)
                return stream
    return None


def _with_rows(shape: torch.Size, rows: int) -> tuple[int, ...]:
    """The shape with at least `rows` rows, see `Graphs.run`."""
    padded = list(shape)
    if padded:
        at = max(len(padded) - 2, 0)
        padded[at] = max(padded[at], rows)
    return tuple(padded)


def _padded(inputs: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Copies of tensors, padded with zeros to these shapes."""
    copies = tuple(tensor.new_zeros(shape) for tensor, shape in zip(inputs, shapes))
    _overwrite(copies, inputs)
    return copies


def _overwrite(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Writes values to tensors that are as large, or larger: to their first entries in every dimension."""
    for tensor, value in zip(tensors, values):
        tensor[tuple(map(slice, value.shape))].copy_(value)


def cuda_capture(device: torch.device) -> Capture:
    """A capture of CUDA graphs on one stream into one memory pool, since they are replayed one after another.

    The graphs must not outlive it, and none of them may be freed before the last one has been used.
    """
    streams: list[torch.cuda.Stream] = []  # the last one is used; graphs were captured on the others
    failed: list[torch.cuda.CUDAGraph] = []  # one that is freed may take the workspace of its stream with it
    pool: Any = None

    def capture(trials: Callable[[], None], function: Callable[[], Any]) -> tuple[Any, Replay]:
        nonlocal pool
        if pool is None:
            stream = own_stream(device)
            if stream is None:
                raise RuntimeError(f"other engines hold all of torch's {STREAMS} streams: close some of them")
            streams.append(stream)
            pool = torch.cuda.graph_pool_handle()
        aside = streams[-1]
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream(device)
        aside.wait_stream(here)
        try:
            with torch.cuda.stream(aside):  # trials too: cuBLAS allocates a workspace for each stream
                trials()
                # other threads, such as one that writes images, may use CUDA meanwhile
                with torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
                    results = function()
        except BaseException:
            failed.append(graph)
            pool = None  # it and the stream may be broken
            raise
        finally:
            here.wait_stream(aside)
        return results, graph.replay

    return capture


def bucket(size: int, per_octave: int = 8) -> int:
    """The padded size, so that shapes repeat: unchanged up to 2 `per_octave`, then `per_octave` sizes per octave.

    Args:
        per_octave: a power of two.
    """
    octave = (size - 1).bit_length()
    step = 2 ** max(0, octave - per_octave.bit_length())
    return math.ceil(size / step) * step


# torch.compile makes one program for each combination of a model, the kinds of its inputs, and their types.
#
# Programs are kept on disk, in the user's cache folder: the next process only traces the function, and finds the rest.
PROGRAMS = 64
USUAL = "about a minute the first time, a third of it later"  # measured for `digits32` on one shared core
FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # torch's own setting


@functools.cache
def compiled(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """The function by torch.compile, for any shape: a minute on first use, then fewer and larger kernels.

    If it cannot be compiled, as on a machine without a C++ compiler, it is called as it is, with one warning.

    Args:
        function: a second call after a failed one must give the same results. Its first argument should be the module
            that it computes with: how long it took to compile is known by it. what: its name in messages.
    """
    program: Callable[..., Any] | None = None
    failed = False

    def call(*args: Any, **named: Any) -> Any:
        nonlocal program, failed
        if failed:
            return function(*args, **named)
        progress = nullcontext() if program else _estimated(what, args[0])
        try:
            with torch._dynamo.config.patch(cache_size_limit=PROGRAMS), progress:
                program = program or torch.compile(function, dynamic=True)
                return program(*args, **named)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compilers raise all kinds
            results = function(*args, **named)  # raises if it was not the compiler's error
            failed = True
            cause = getattr(error, "inner_exception", error)
            warnings.warn(
                f"torch.compile cannot compile {what}, which run as ordinary PyTorch operations instead"
                f" ({first_line(cause)}): install a C++ compiler, and for a GPU also Triton and Python's headers"
                " (python3-dev); or omit --compile",
                stacklevel=2,
            )
            return results

    return call


def programs_folder() -> Path:
    """The folder in which torch.compile keeps programs: the user's setting, or one in the user's cache folder."""
    if FOLDER not in os.environ:
        # it cannot be written, or there is no home directory: then torch uses a temporary one
        with suppress(OSError, RuntimeError):
            own = platformdirs.user_cache_path("cspd") / "compiled"
            own.mkdir(parents=True, exist_ok=True)
            os.environ[FOLDER] = str(own)
    return Path(os.environ.get(FOLDER, tempfile.gettempdir()))


@contextmanager
def _estimated(what: str, module: object) -> Iterator[None]:
    """Prints how long the compiler will take, from earlier processes, and keeps how long it took in this one."""
    about = f"{what} {module} {torch.__version__}"
    record = programs_folder() / f"cspd-{hashlib.sha256(about.encode()).hexdigest()[:16]}"
    try:
        first, *later = map(float, record.read_text().split())
    except (OSError, ValueError):  # it was not compiled yet
        first, later, expected = None, [], USUAL
    else:
        expected = f"about {later[0]:.0f} s" if later else f"less than the {first:.0f} s of the first time"
    start = time.perf_counter()
    with telling(f"compiling {what}, {expected}"):
        yield
    seconds = time.perf_counter() - start
    with suppress(OSError):  # the next process will not know
        record.write_text(f"{first or seconds} {seconds if first else ''}")
