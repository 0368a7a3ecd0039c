"""A stand-in for CUDA on machines without it: tensors that claim to be on `cuda:1`, hold their data on the CPU, and are
watched. The current device is `cuda:0`, so that what forgets the device ends up on the wrong one.

    with standin.cuda() as gpu:
        engine = Engine(models, device=standin.DEVICE)
        ...
        print(gpu.kernels.total(), gpu.reads, gpu.blocking)

All numbers are computed on the CPU. It counts:
* a kernel for every operation that is not a view; on a GPU, matrix products, sorting and attention may launch more;
* a read if the CPU waits for the device: `item`, `tolist`, `nonzero`, an index by a mask, a synchronisation;
* a blocking copy, to the device from memory that is not pinned or without `non_blocking`.

As on a GPU, an operation on tensors of both devices raises RuntimeError. So do a tensor on the wrong GPU, a norm whose
weights and input differ in type, and a read while a graph is captured. A non-blocking copy to the CPU holds rubbish
until an event recorded after it has passed. A graph is the list of its operations, run again. At the end everything is
undone, except that models stay on the device: pass copies of shared models.

Each operation also runs once on fake tensors of `cuda:1`, by torch's own rules for CUDA, and fails as it does there. A
result of another type or shape than the CPU's is an error, and a result has the strides that CUDA gives it. The
compiler traces what torch.compile is given on fake tensors, and the function itself computes it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from timeline import Event, Graph, Pool, Stream, Timeline
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

DEVICE = torch.device("cuda:1")
# otherwise torch asks for a driver
POSSIBLE = torch.backends.cuda.is_built() and hasattr(torch._C, "_ensureCUDADeviceGuardSet")
ROOT = Path(__file__).parent.parent
OURS = tuple(f"{ROOT / package}/" for package in ("cspd", "mar"))
RUBBISH = 0x7F  # every byte of a copy that has not arrived
COMPILE = torch.compile
ATTENTION = functional.scaled_dot_product_attention
READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim"}
NORMS = {"native_layer_norm", "native_group_norm"}  # a CPU also takes float32 weights with bfloat16 inputs
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
NOTHING = "_lazy_init max_memory_allocated memory_allocated memory_reserved reset_peak_memory_stats".split()
NO_KERNEL = set(
    "_conj _reshape_alias _unsafe_view alias as_strided chunk detach diagonal empty empty_like empty_strided expand"
    " lift_fresh movedim narrow new_empty new_empty_strided permute real imag select slice split split_with_sizes"
    " squeeze t transpose unbind unfold unsqueeze view view_as_complex view_as_real".split()
)


class Place(NamedTuple):
    """Something that happened, and the line of this repository that caused it."""

    what: str
    function: str  # after its file
    line: int


def place(what: str) -> Place:
    """The innermost running line of this repository."""
    frame = sys._getframe(1)
    while frame is not None:
        function = _ours(frame.f_code)
        if function:
            return Place(what, function, frame.f_lineno)
        frame = frame.f_back
    return Place(what, "elsewhere", 0)


@functools.cache
def _ours(code: types.CodeType) -> str | None:
    """The file and the function, if the code is of this repository."""
    if not code.co_filename.startswith(OURS) or code.co_name.startswith("<"):  # as comprehensions do
        return None
    return f"{Path(code.co_filename).relative_to(ROOT).as_posix()} {code.co_name}"


class OnDevice(Tensor):
    """A tensor that claims to be on `cuda:1`, and the CPU tensor that holds its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return Tensor._make_wrapper_subclass(cls, held.shape, device=DEVICE, requires_grad=False, **layout)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:
        return f"OnDevice({self.held})"

    def record_stream(self, stream: Stream) -> None:
        """Its memory is not shared anyway."""

    def __deepcopy__(self, memo: dict) -> Tensor:
        """A fake tensor, for the compiler."""
        return memo.setdefault(id(self), _fake(self))

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise RuntimeError(f"{op} on a tensor of a stand-in that has ended")


class StandIn(TorchDispatchMode):
    """Counts what happens while it is active.

    Attributes:
        kernels: by operation; the replay of a graph is one. by_function: by the function that launched them.
        reads, blocking: the lines at which the CPU waits for the device, and for a copy to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.timeline = Timeline()
        self.streams = 0  # that were handed out
        self.workspaces: dict[int, object] = {}  # of cuBLAS, by stream
        self.current = 0  # the index of the current device
        self.compiled = 0  # calls of what torch.compile returned
        self._pinned: dict[int, Tensor] = {}  # by address; held, so that their memory is not reused
        self._graph: Graph | None = None
        self.reset()

    def reset(self) -> None:
        """Starts counting from zero."""
        self.kernels, self.by_function = Counter[str](), Counter[str]()
        self.reads, self.blocking = Counter[Place](), Counter[Place]()

    def count(self, name: str) -> None:
        if name not in NO_KERNEL:
            self.kernels[name] += 1
            self.by_function[place(name).function] += 1

    def wait(self, places: Counter[Place], what: str, event: int | None = None) -> None:
        """The CPU waits until the device has passed an event, by default for all of its work."""
        if self._graph is not None:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")
        places[place(what)] += 1
        self.timeline.reach(event or self.timeline.recorded + 1)

    def exchange(self, index: int) -> int:
        """Makes another device the current one, unless the index is negative, and returns the index of the last one."""
        before = self.current
        if index >= 0:
            self.current = index
        return before

    @contextlib.contextmanager
    def capture(self, graph: Graph, pool: Pool, stream: Stream, **settings: object) -> Iterator[None]:
        """As torch.cuda.graph."""
        self._graph = pool.joined_by(graph).captured_on(stream)
        try:
            yield
        finally:
            self._graph = None

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = op._schema.name.split("::")[1]
        tensors = _tensors((args, kwargs))
        are_there = [isinstance(tensor, OnDevice) for tensor in tensors]
        if _is_made_of_others(op) and (any(are_there) or name == "to"):
            with self:
                return op.decompose(*args, **kwargs)
        if name == "is_pinned":
            return self._is_pinned(tensors[0])

        # where the result is
        pinned = kwargs.pop("pin_memory", False) or name == "_pin_memory"
        there = any(are_there)
        if kwargs.get("device") is not None:
            asked = torch.device(kwargs["device"])
            there = asked.type == "cuda"
            if there and (self.current if asked.index is None else asked.index) != DEVICE.index:
                raise RuntimeError(f"{name} on {asked} while the current device is {self.current}, not on {DEVICE}")
            kwargs["device"] = torch.device("cpu")  # where the values really are
        if name == "copy_":
            there = isinstance(args[0], OnDevice)

        # copies between the devices
        if name in ("copy_", "_to_copy") and any(each != there for each in are_there):
            non_blocking = kwargs.get("non_blocking", args[2:] == (True,))
            copy = self._to_device if there else self._to_host
            return copy(name, op, args, kwargs, non_blocking)

        # everything else
        if any(are_there):
            self._look_out(name, args, kwargs, tensors)
        if there:
            return self._launch(name, op, args, kwargs)
        results = args[0].clone() if name == "_pin_memory" else op(*args, **kwargs)
        return self._pin(results) if pinned else results

    def _launch(self, name: str, operation: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs an operation on the device."""
        self.count(name)
        own_args, own_kwargs = _held(args), _held(kwargs)
        results = operation(*own_args, **own_kwargs)
        if name not in NO_KERNEL:
            results = self._trace(name, operation, args, kwargs, results)
        if self._graph is not None:
            self._graph.operations.append((operation, own_args, own_kwargs, results))
        # an operation in place returns the tensor that it was given
        given = {id(_held(tensor)): tensor for tensor in _tensors((args, kwargs))}
        return _each(results, lambda result: given[id(result)] if id(result) in given else OnDevice(result))

    def _trace(self, name: str, operation: Callable, args: tuple, kwargs: dict, results: Any) -> Any:
        """The CPU's results, with the strides that they have on CUDA. Raises RuntimeError as torch does there."""
        if "device" in kwargs:
            kwargs = kwargs | {"device": DEVICE}
        key = operation, _described(args), _described(kwargs)
        if key not in TRACED:
            with _fakes():
                fake_args, fake_kwargs = _each((args, kwargs), _fake)
                try:
                    TRACED[key] = [_described(tensor) for tensor in _tensors(operation(*fake_args, **fake_kwargs))]
                except (DynamicOutputShapeException, DataDependentOutputException):
                    TRACED[key] = None
        if TRACED[key] is None:  # the shape or the value depends on data
            return results
        given = {id(_held(tensor)) for tensor in _tensors((args, kwargs))}
        expected = iter(TRACED[key])

        def laid_out(own: Tensor) -> Tensor:
            fake = next(expected)
            if id(own) in given:
                return own
            if (own.dtype, own.shape) != fake[:2] and name not in NORMS:  # whose statistics have another type
                raise RuntimeError(f"{name}: {own.dtype} {own.shape} on the CPU and {fake} on {DEVICE}")
            if own.stride() == fake.stride or name == "attention":  # whose kernels have the CPU's layout, unlike a fake
                return own
            return torch.empty_strided(own.shape, fake.stride, dtype=own.dtype).copy_(own)

        return _each(results, laid_out)

    def compile(self, function: Callable, **settings: Any) -> Callable:
        """As torch.compile: traces each call on fake tensors, and computes it by the function itself."""
        traced = COMPILE(function, backend="aot_eager", **settings)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.compiled += 1
            with _disable_current_modes():
                fake_args, fake_kwargs = copy.deepcopy((args, kwargs))
                # the compiler saves the state of a generator, if there is a GPU
                with _fakes(), mock.patch.object(torch.cuda, "is_available", lambda: False):
                    traced(*fake_args, **fake_kwargs)
            return function(*args, **kwargs)

        return call

    def attention(self, query: Tensor, *others: Tensor, **settings: Any) -> Tensor:
        """scaled_dot_product_attention as one kernel; torch would decompose it for a device without such a kernel."""
        if not isinstance(query, OnDevice):
            return ATTENTION(query, *others, **settings)
        if getattr(settings.get("attn_mask"), "dtype", None) == torch.bool:
            self.count("mask of attention")
        with _disable_current_modes():
            return self._launch("attention", ATTENTION, (query, *others), settings)

    def _look_out(self, name: str, args: tuple, kwargs: dict, tensors: list[Tensor]) -> None:
        """Counts a read; raises RuntimeError if tensors of both devices, or of two types, meet and may not."""
        types = {tensor.dtype for tensor in tensors}
        if name in NORMS and len(types) > 1:
            raise RuntimeError(f"{name}: tensors are of types {types}")
        if name in READS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.wait(self.reads, "item" if name == "_local_scalar_dense" else name)
        on_host = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim()]
        if name in INDEXING and isinstance(args[0], OnDevice):
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.wait(self.reads, "index by a mask")
            if not all(isinstance(each, OnDevice) for each in (*indices, *args[2:3])):  # torch copies it
                self.wait(self.blocking, "index or value on the CPU")
            on_host = [tensor for tensor in on_host if all(tensor is not index for index in indices)]
        if on_host:
            shapes = [tuple(tensor.shape) for tensor in on_host]
            raise RuntimeError(f"{name}: tensors of shapes {shapes} are on the CPU and others on {DEVICE}")

    def _to_device(self, name: str, op: Any, args: tuple, kwargs: dict, non_blocking: bool) -> Tensor:
        if not (non_blocking and self._is_pinned(args[1] if name == "copy_" else args[0])):
            self.wait(self.blocking, "copy to the device")
        return self._launch("copy to the device", op, args, kwargs)

    def _to_host(self, name: str, op: Any, args: tuple, kwargs: dict, non_blocking: bool) -> Tensor:
        self.count("copy to the CPU")
        if name == "_to_copy":
            value = op(*_held(args), **kwargs)
            target = self._pin(value.clone())  # torch too makes it pinned, so that the copy can be asynchronous
        else:
            target = args[0]
            value = _held(args[1]).to(target.dtype).expand_as(target).clone()
        self.timeline.arrive_later(target, value)
        if non_blocking and self._is_pinned(target):
            target.copy_(torch.full([target.element_size()], RUBBISH, dtype=torch.uint8).view(target.dtype))
        else:
            self.wait(self.reads, "copy to the CPU")
        return target

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, OnDevice) and tensor.untyped_storage().data_ptr() in self._pinned


class Described(NamedTuple):
    """All that the rules of an operation know of a tensor."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device


@functools.cache
def _fakes() -> FakeTensorMode:
    """Made at its first use, since it imports Triton."""
    return FakeTensorMode()


TRACED: dict[tuple, list | None] = {}  # what comes out, by an operation and what goes in


def _fake(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(_fakes(), meta, tensor.device)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Described(value.dtype, value.shape, value.stride(), value.device)
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((name, _described(each)) for name, each in value.items())
    return type(value), (None if isinstance(value, float) else value)


# Arguments and results of operations are tensors, numbers, and lists, tuples and dicts of them. These functions take a
# third of the time of torch.utils._pytree's.


def _each(values: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same values with a function applied to each tensor."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, (tuple, list)):
        return type(values)(_each(value, function) for value in values)
    if isinstance(values, dict):
        return {name: _each(value, function) for name, value in values.items()}
    return values


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _each(values, lambda tensor: found.append(tensor) or tensor)
    return found


def _held(values: Any) -> Any:
    return _each(values, lambda tensor: getattr(tensor, "held", tensor))


@functools.cache
def _is_made_of_others(op: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


@contextlib.contextmanager
def cuda(memory: int = 80 * 2**30) -> Iterator[StandIn]:
    """Inside the context, torch has a device `cuda:1` with this many bytes of memory.

    The test is skipped if this torch cannot pretend that, as a build without CUDA.
    """
    if not POSSIBLE:
        pytest.skip("this torch cannot pretend to have CUDA")
    gpu = StandIn()
    properties = types.SimpleNamespace(name="stand-in", total_memory=memory, multi_processor_count=132)
    functions = {
        **dict.fromkeys(NOTHING, lambda *_: 0),
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "get_arch_list": lambda: ["sm_70"],
        "device_count": lambda: 2,
        "current_device": lambda: gpu.current,
        "_exchange_device": gpu.exchange,
        "_maybe_exchange_device": lambda index: gpu.exchange(index),  # another function, as the compiler expects
        "get_device_capability": lambda *_: (7, 0),  # too old for kernels that are compiled
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (memory, memory),
        "synchronize": lambda *_: gpu.wait(gpu.reads, "torch.cuda.synchronize"),
        "Event": functools.partial(Event, gpu),
        "Stream": functools.partial(Stream, gpu),
        "current_stream": functools.cache(lambda *_: Stream(gpu)),
        "stream": lambda _: contextlib.nullcontext(),
        "CUDAGraph": functools.partial(Graph, gpu),
        "graph": gpu.capture,
        "graph_pool_handle": Pool,
    }
    # tensors made in inference mode cannot be wrapped; gradients are off instead
    no_inference = {"__enter__": lambda self: None, "__exit__": lambda self, *error: None}
    torch._C._ensureCUDADeviceGuardSet()  # without CUDA, a guard that does nothing
    with contextlib.ExitStack() as undo:
        undo.enter_context(mock.patch.multiple(torch.cuda, **functions))
        undo.enter_context(mock.patch.multiple(torch.inference_mode, **no_inference))
        undo.enter_context(mock.patch.object(torch, "compile", gpu.compile))
        undo.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", gpu.attention))
        undo.enter_context(mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False))
        undo.enter_context(torch.no_grad())
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        undo.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        undo.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") makes it on the CPU and copies it
        undo.enter_context(gpu)
        yield gpu
