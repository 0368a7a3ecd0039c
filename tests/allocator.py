"""torch's caching allocator of CUDA memory, in a simulation: what graphs reserve of a GPU that is not here.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its defaults. Tensors are on the device "meta": they have
sizes and no values, so that models of any size can run.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from timeline import Pool, Stream
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from cspd.graphs import Graphs

MIB, GIB = 2**20, 2**30
ROUNDED = 512  # bytes to which all sizes are rounded
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
MIDDLE, MIDDLE_SEGMENT = 10 * MIB, 20 * MIB
LARGE_ROUNDED = 2 * MIB
ORDINARY = None  # the pool of all work that is not captured


@dataclass(eq=False)
class Block:
    """A part of a segment of device memory; `before` and `after` are its neighbours there."""

    size: int
    pool: Any
    is_small: bool
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None


class Allocator(TorchDispatchMode):
    """While it is active, every new storage of operations takes memory of the current pool.

    Attributes:
        total: bytes of the device. reserved: bytes in segments, used or not. pool: where memory is taken from.
    """

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total, self.reserved, self.pool = total, 0, ORDINARY
        self.streams = 0  # that were handed out
        self._free: dict[tuple[Any, bool], list[Block]] = defaultdict(list)
        self._seen: set[int] = set()

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """As torch.cuda.mem_get_info: (free bytes, all bytes)."""
        return self.total - self.reserved, self.total

    def empty_cache(self) -> None:
        """As torch.cuda.empty_cache: frees the unused segments, but those of a pool only if all its graphs are gone."""
        for (pool, _), blocks in self._free.items():
            if pool is ORDINARY or not pool.is_used:
                whole = [block for block in blocks if block.before is None and block.after is None]
                self.reserved -= sum(block.size for block in whole)
                blocks[:] = [block for block in blocks if block not in whole]

    def allocate(self, size: int) -> Block:
        """The smallest free block that fits, or a new segment; what remains of it is free."""
        size = max(ROUNDED, math.ceil(size / ROUNDED) * ROUNDED)
        is_small = size <= SMALL
        free = self._free[self.pool, is_small]
        block = min((each for each in free if each.size >= size), key=lambda each: each.size, default=None)
        if block is None:
            block = Block(_segment(size), self.pool, is_small)
            self.reserved += block.size
            if self.reserved > self.total:
                raise torch.OutOfMemoryError(f"{self.reserved} of {self.total} bytes")
        else:
            free.remove(block)
        block.is_free = False
        rest = block.size - size
        if rest >= (ROUNDED if is_small else SMALL + 1):
            after = Block(rest, self.pool, is_small, True, block, block.after)
            if block.after:
                block.after.before = after
            block.size, block.after = size, after
            free.append(after)
        return block

    def release(self, block: Block) -> None:
        """Frees a block, which joins its free neighbours."""
        free = self._free[block.pool, block.is_small]
        before, after = block.before, block.after
        if after is not None and after.is_free:
            free.remove(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after:
                block.after.before = block
        if before is not None and before.is_free:
            free.remove(before)
            before.size, before.after = before.size + block.size, block.after
            if block.after:
                block.after.before = before
            block = before
        block.is_free = True
        free.append(block)

    @contextmanager
    def capture(self, graph: Graph, pool: Pool, stream: Stream, **settings: object) -> Iterator[None]:
        """As torch.cuda.graph."""
        self.empty_cache()
        pool.joined_by(graph)
        self.pool = pool
        try:
            yield
        finally:
            self.pool = ORDINARY

    def __torch_dispatch__(self, operation: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        results = _result(operation, args, kwargs or {})
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and result.device.type == "meta":
                self._watch(result.untyped_storage())
        return results

    def _watch(self, storage: torch.UntypedStorage) -> None:
        """Allocates a storage that is new, until it dies."""
        address = storage._cdata
        if address not in self._seen and storage.nbytes():
            self._seen.add(address)
            weakref.finalize(storage, self._gone, address, self.allocate(storage.nbytes()))

    def _gone(self, address: int, block: Block) -> None:
        self._seen.remove(address)
        self.release(block)


Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


def _result(operation: Any, args: tuple, kwargs: dict) -> Any:
    """What an operation returns for meta tensors: torch's own rules are slow, so that layouts are remembered."""
    leaves, tree = tree_flatten((args, kwargs))
    is_alias = any(each.alias_info for each in operation._schema.returns)
    if is_alias or len(operation._schema.returns) != 1:
        is_in_place = operation._schema.name.endswith("_") and isinstance(args[0], Tensor)
        return args[0] if is_in_place else operation(*args, **kwargs)
    key = operation, tree, *((_layout(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf)) for leaf in leaves)
    if key not in LAYOUTS:
        result = operation(*args, **kwargs)
        is_plain = isinstance(result, Tensor) and result.device.type == "meta" and not result.storage_offset()
        LAYOUTS[key] = _layout(result) if is_plain else None
        return result
    layout = LAYOUTS[key]
    if layout is None:
        return operation(*args, **kwargs)
    size, stride, dtype = layout
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


LAYOUTS: dict[tuple, Layout | None] = {}  # of a result, by an operation and what goes in


def _layout(tensor: Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.dtype


def _segment(size: int) -> int:
    """Bytes of a new segment for a block of this size."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < MIDDLE:
        return MIDDLE_SEGMENT
    return math.ceil(size / LARGE_ROUNDED) * LARGE_ROUNDED


class Graph:
    """Stands for torch.cuda.CUDAGraph; it computes nothing, since tensors have no values."""

    def replay(self) -> None: ...


@contextmanager
def graphs(memory: int) -> Iterator[Graphs]:
    """Graphs of a GPU with this many bytes, on which only memory exists."""
    allocator = Allocator(memory)
    functions = {
        "mem_get_info": allocator.mem_get_info,
        "empty_cache": allocator.empty_cache,
        "synchronize": lambda *_: None,
        "Stream": functools.partial(Stream, allocator),
        "current_stream": lambda *_: Stream(allocator),
        "stream": lambda _: nullcontext(),
        "CUDAGraph": Graph,
        "graph": allocator.capture,
        "graph_pool_handle": Pool,
    }
    with ExitStack() as undo:
        undo.enter_context(mock.patch.multiple(torch.cuda, **functions))
        undo.enter_context(mock.patch("cspd.heads.chain.all_bytes", lambda device: memory))
        undo.enter_context(torch.inference_mode())
        made = Graphs(torch.device("cuda:0"), enabled=True)
        undo.enter_context(allocator)
        yield made
