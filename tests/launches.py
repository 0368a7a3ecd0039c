"""Triton kernels without a GPU: launches are recorded, and can be compiled for one; nothing is computed."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

VIEWS = {"empty", "empty_like", "new_empty", "view", "_unsafe_view", "t", "transpose", "select", "split", "slice"}
VIEWS |= {"unbind", "expand", "unsqueeze", "squeeze", "alias", "detach", "split_with_sizes", "empty_strided"}


class Launch(NamedTuple):
    """A launched kernel, its constants by name, and a function that compiles it."""

    name: str
    constants: dict[str, Any]
    compiled: Callable[[], Any]


class H100:
    """The parts of a driver that Triton needs to compile."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


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


def pretended_h100() -> contextlib.AbstractContextManager[Any]:
    """Inside it Triton compiles for an H100."""
    return mock.patch.object(type(triton.runtime.driver), "active", H100())


def resources(cubin: bytes, cuobjdump: str) -> dict[str, int]:
    """Registers per thread (REG), bytes of its stack (STACK, LOCAL), where registers are spilled, and SHARED memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", shown.stdout)}
