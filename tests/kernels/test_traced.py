"""Every method with Triton kernels on a fake `cuda:1`: each launch gets what CUDA would take, in the types that the
kernel reads, and the tokens are those without kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import standin
import torch
from conftest import relative_error
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves_with_path, tree_map_only
from tracing import NAMES, models_of, requests_of, traced
from triton.runtime.interpreter import InterpretedFunction

from cspd import Engine, kernels

# parameters by the name of their kernel, with indices of tuples; all others are contiguous and float32
INTEGERS = {
    "_draw_kernel": ["seed", "position", "step", "index", "purpose"],
    "_chain_kernel": ["seed", "position"],
    "_enter_kernel": ["at"],
    "_between_kernel": ["at"],
    "_leave_kernel": ["at"],
    "_step_kernel": ["at"],
    "_before_kernel": ["at", "given2", "given4", "given5"],
    "_after_kernel": ["given2", "given4", "given5", "made1", "made2", "made3", "made4"],
}
CONVERTED = {  # to float32 when they are read, or from it when they are written
    "_ancestral_kernel": ["out"],
    "_segment_kernel": ["out"],
    "_enter_kernel": ["hidden", "weight", "bias", "norm_weight", "norm_bias", "shift", "scale"],
    "_between_kernel": ["update", "gate", "hidden", "norm_weight", "norm_bias", "shift", "scale"],
    "_leave_kernel": ["layer2", "layer3", "layer6", "layer7", "weight", "bias"],
    "_step_kernel": ["layer2", "layer3", "layer6", "layer7", "weight", "bias"],
    "_after_kernel": ["out"],
}
STRIDED = {  # the kernel is told their strides
    "_draw_kernel": ["seed", "position", "step", "index", "purpose"],
    "_chain_kernel": ["seed", "position"],
    "_enter_kernel": ["shift", "scale"],
    "_between_kernel": ["gate", "shift", "scale"],
    "_leave_kernel": ["layer3", "layer6", "layer7"],
    "_step_kernel": ["layer3", "layer6", "layer7"],
}
MAX_ERROR = 1e-4  # in bf16 rounding decides: only kernels keep sums between products in float32
RUN = InterpretedFunction.run


def check_launch(gpu: standin.StandIn, kernel: Any, arguments: tuple) -> None:
    assert gpu.current == standin.DEVICE.index  # kernels are launched on the current device
    name = kernel.__name__
    for path, tensor in tree_leaves_with_path(dict(zip(kernel.arg_names, arguments))):
        if not isinstance(tensor, Tensor):
            continue
        parameter = "".join(str(getattr(part, "key", getattr(part, "idx", ""))) for part in path)
        where = name, parameter, tensor.dtype, tensor.shape, tensor.stride()
        assert isinstance(tensor, standin.OnDevice), where
        types = [torch.float32]
        if parameter in INTEGERS.get(name, ()):
            types = [torch.int64]
        elif parameter in CONVERTED.get(name, ()):
            types = [torch.float32, torch.bfloat16]
        elif (name, parameter) == ("_draw_kernel", "out"):
            types = [torch.float32, torch.float64, torch.int64]
        assert tensor.dtype in types, where
        assert tensor.is_contiguous() or parameter in STRIDED.get(name, ()), where


@contextlib.contextmanager
def launches(counts: list[str]) -> Iterator[None]:
    """Kernels on the stand-in, interpreted with the values of its tensors."""
    begin = standin.StandIn.__init__
    gpus: list[standin.StandIn] = []

    def noted(gpu: standin.StandIn) -> None:
        begin(gpu)
        gpus.append(gpu)

    def run(kernel: Any, *arguments: Any, **named: Any) -> None:
        check_launch(gpus[-1], kernel, arguments)
        counts.append(kernel.__name__)
        held = tree_map_only(standin.OnDevice, lambda tensor: tensor.held, arguments)
        with _disable_current_modes():
            RUN(kernel, *held, **named)

    patches = [
        mock.patch.object(standin.StandIn, "__init__", noted),
        mock.patch.object(InterpretedFunction, "run", run),
        mock.patch.object(kernels, "available", lambda device: device.type == "cuda"),
    ]
    with contextlib.ExitStack() as undo:
        for patch in patches:
            undo.enter_context(patch)
        yield


@pytest.mark.skipif(not standin.POSSIBLE, reason="this torch cannot pretend to have CUDA")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_every_method(name, precision):
    requests = requests_of(name, 1, label=1)
    expected = Engine(models_of(name), max_batch=2, device="cpu", precision=precision).generate(requests)
    counts: list[str] = []
    with launches(counts), torch.inference_mode(False), torch.no_grad():
        outputs, _ = traced(models_of(name), requests, precision=precision)
    assert counts
    if precision == "fp32":
        num = 4 if name.startswith("causal") else None  # its random weights double a rounding error with every token
        assert relative_error(outputs[0].tokens[:num].double(), expected[0].tokens[:num].double()) < MAX_ERROR
