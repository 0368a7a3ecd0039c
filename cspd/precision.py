"""The precision policy, and a stopwatch that knows about devices that run behind the program."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Iterator
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cspd.sequence import PHASES

POLICIES = {
    "fp32": "float32 throughout: the reference",
    "tf32": "float32 storage, 10-bit mantissas inside CUDA matrix products; on a CPU the same as fp32",
    "bf16": "bfloat16 copies of the weights of matrix products; chain, tables and first denoising step in float32",
}
Module = TypeVar("Module", bound=nn.Module)


class Precision:
    """One setting for a whole engine. The first denoising step and the autoencoder are in float32 under every policy.

    What may be computed as fast as the policy allows is computed inside `fast`, by what `prepare` makes of a module.

    Raises:
        ValueError: unknown policy.
    """

    def __init__(self, policy: str, device: torch.device) -> None:
        if not isinstance(policy, str) or policy not in POLICIES:
            raise ValueError(f"precision={policy!r}: choose one of {', '.join(POLICIES)}")
        self.policy, self.device = policy, device
        self._prepared: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()

    def prepare(self, module: Module) -> Module:
        """The module as `fast` computes with it: under bf16 its matrix products have copies of their weights.

        The copies are made once and live as long as the module. All other parameters are shared with it, and the
        module itself stays as it is. Children that its class names in `FLOAT32` are no copies either, nor is a module
        that computes in the type of its weights, its `own_type`, whatever the policy.
        """
        if self.policy != "bf16" or hasattr(module, "own_type"):
            return module
        if module not in self._prepared:
            self._prepared[module] = BFloat16Linear(module) if isinstance(module, nn.Linear) else self._twin(module)
        return self._prepared[module]

    def _twin(self, module: nn.Module) -> nn.Module:
        """A module that differs in its children, which are prepared."""
        twin, exact = copy.copy(module), getattr(module, "FLOAT32", ())
        twin._modules = {
            name: child if child is None or name in exact else self.prepare(child)
            for name, child in module._modules.items()
        }
        return twin

    def bytes_to_copy(self, module: nn.Module | None) -> int:
        """Bytes of the copies that `prepare` has still to make of a module."""
        if self.policy != "bf16" or module is None or module in self._prepared or hasattr(module, "own_type"):
            return 0
        if isinstance(module, nn.Linear):
            return sum(torch.bfloat16.itemsize * parameter.numel() for parameter in module.parameters())
        exact = getattr(module, "FLOAT32", ())
        return sum(self.bytes_to_copy(child) for name, child in module._modules.items() if name not in exact)

    @property
    def dtype(self) -> torch.dtype:
        """Of what matrix products give inside `fast`."""
        return torch.bfloat16 if self.policy == "bf16" else torch.float32

    def type_of(self, module: nn.Module) -> torch.dtype:
        """Of what a module's matrix products give inside `fast`."""
        return getattr(module, "own_type", self.dtype)

    @property
    def uniform(self) -> bool:
        """Whether `fast` and `full` are the same."""
        return self.policy == "fp32"

    def fast(self) -> contextlib.AbstractContextManager[None]:
        """As fast as the policy allows."""
        return self._products(tf32=self.policy == "tf32")

    def full(self) -> contextlib.AbstractContextManager[None]:
        """True float32, also inside `fast`."""
        return self._products(tf32=False)

    def _products(self, tf32: bool) -> contextlib.AbstractContextManager[None]:
        if self.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):  # there is nothing to change
            return contextlib.nullcontext()
        return self._switch(tf32)

    @contextlib.contextmanager
    def _switch(self, tf32: bool) -> Iterator[None]:
        flags: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]  # matrix products, convolutions
        before = [flag.allow_tf32 for flag in flags]
        for flag in flags:
            flag.allow_tf32 = tf32
        try:
            with torch.autocast(self.device.type, enabled=False):  # a caller's own
                yield
        finally:
            for flag, value in zip(flags, before):
                flag.allow_tf32 = value


def precision_of(precision: str | Precision, device: torch.device) -> Precision:
    """The policy of this name for a device, or another engine's.

    Raises:
        ValueError: unknown policy, or that of an engine on another device, whose copies of weights are there.
    """
    if not isinstance(precision, Precision):
        return Precision(precision, device)
    if precision.device != device:
        raise ValueError(
            f"precision is that of an engine on {precision.device}, and this one is on {device}: give its name,"
            f" {precision.policy!r}"
        )
    return precision


class BFloat16Linear(nn.Module):
    """A linear layer with its weights in bfloat16, as its outputs are; inputs may be of any type."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        with torch.inference_mode(False):
            self.register_buffer("weight", linear.weight.detach().to(torch.bfloat16))
            self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class Stopwatch:
    """Seconds by phase, beginning in phase "other". On CUDA it records events, on the stream that was current when it
    was made: they are read once it is stopped and the stream is past, so that nobody waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if self.cuda else None
        self._marks = [("other", self._now())]

    def _now(self) -> Any:
        """Seconds of a clock, or on CUDA an event."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def start(self, phase: str) -> None:
        """Ends the phase before and begins `phase`."""
        self._marks.append((phase, self._now()))

    def stop(self) -> None:
        """Ends the last phase."""
        self.start("")

    def is_past(self) -> bool:
        """Whether the stream has come to the end of the last phase, and `seconds` need not wait."""
        return not self.cuda or self._marks[-1][1].query()

    def seconds(self) -> dict[str, float]:
        """Seconds by phase until the stop; waits for the stream where it is not past."""
        if self.cuda and not self.is_past():
            self._marks[-1][1].synchronize()
        total = dict.fromkeys(PHASES, 0.0)
        for (phase, begin), (_, end) in itertools.pairwise(self._marks):
            total[phase] += begin.elapsed_time(end) / 1000 if self.cuda else end - begin
        return total
