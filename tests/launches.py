"""Triton kernels without a GPU: launches are recorded, and can be compiled for one; nothing is computed."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

VIEWS = {"empty", "empty_like", "new_empty", "view", "_unsafe_view", "t", "transpose", "select", "split", "slice"}
VIEWS |= {"unbind", "permute", "expand", "unsqueeze", "squeeze", "alias", "detach", "split_with_sizes", "empty_strided"}


class Launch(NamedTuple):
    """A launched kernel, its constants by name, and a function that compiles it."""

    name: str
    constants: dict[str, Any]
    compiled: Callable[[], Any]


class Driver:
    """The parts of a driver that Triton needs to compile for a GPU of a compute capability, such as 90."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


class Operations(TorchDispatchMode):
    """Records the operations of PyTorch that are kernels on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        if name not in VIEWS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def noted() -> Iterator[tuple[list[Launch], list[str]]]:
    """(launches, names of PyTorch's operations that are kernels) inside the context."""
    launches: list[Launch] = []
    run_kernel = JITFunction.run

    def run(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        def compiled() -> Any:
            return run_kernel(kernel, *arguments, grid=grid, warmup=True, **named)

        launches.append(Launch(kernel.__name__, named, compiled))

    with mock.patch.object(JITFunction, "run", run), Operations() as operations:
        yield launches, operations.names


def pretended(capability: int) -> contextlib.AbstractContextManager[Any]:
    """Inside it Triton compiles for a compute capability: one in a process, since it caches programs by device."""
    return mock.patch.object(type(triton.runtime.driver), "active", Driver(capability))


@triton.jit
def _nothing(x):
    pass


def can_target(capability: int) -> bool:
    """Whether Triton and its assembler know a compute capability."""
    with noted() as (launches, _):
        _nothing[(1,)](torch.empty(1))
    with pretended(capability):
        try:
            launches[0].compiled()
        except (RuntimeError, ValueError, KeyError):
            return False
    return True


def resources(cubin: bytes, cuobjdump: str) -> dict[str, int]:
    """Registers per thread (REG), bytes of its stack (STACK, LOCAL), where registers are spilled, and SHARED memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", shown.stdout)}
