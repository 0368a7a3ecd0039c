"""Kernels without a GPU: what is launched is noted, and can be compiled for one; nothing is computed."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

H100 = GPUTarget("cuda", 90, 32)
NO_KERNELS = {"empty", "empty_like", "new_empty", "view", "_unsafe_view", "t", "transpose", "select", "split", "slice"}
NO_KERNELS |= {"unbind", "expand", "unsqueeze", "squeeze", "alias", "detach", "split_with_sizes", "empty_strided"}
POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


class Launch(NamedTuple):
    """A kernel, its arguments by name, and the options it is compiled with."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]

    def compiled(self) -> Any:
        """For an H100, as this launch would have it there."""
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            is_number = isinstance(value, int) and not parameter.is_constexpr
            specialised = is_number and not parameter.do_not_specialize
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = POINTERS[value.dtype]
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            elif is_number and not (specialised and value == 1):
                signature[parameter.name] = "i32"
            else:
                signature[parameter.name] = "constexpr"
                constants[parameter.name] = value
            if isinstance(value, torch.Tensor) or (specialised and value % 16 == 0):
                attributes[i,] = [["tt.divisibility", 16]]
        return triton.compile(ASTSource(self.kernel, signature, constants, attributes), H100, self.options)


class Operations(TorchDispatchMode):
    """Names the operations of PyTorch that are kernels on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        if name not in NO_KERNELS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def noted() -> Iterator[tuple[list[Launch], list[str]]]:
    """(launches, names of PyTorch's operations that are kernels) inside the context."""
    launches: list[Launch] = []

    def run(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        options = {name: value for name, value in named.items() if name not in names}
        given = dict(zip(names, arguments)) | {name: value for name, value in named.items() if name in names}
        launches.append(Launch(kernel, given, options))

    with mock.patch.object(JITFunction, "run", run), Operations() as operations:
        yield launches, operations.names


def resources(cubin: bytes, cuobjdump: str) -> dict[str, int]:
    """Registers a thread (REG), and bytes of its stack (STACK, where registers are spilled to) and shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [cuobjdump, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", shown.stdout)}
