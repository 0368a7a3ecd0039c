"""The precision policy, and a stopwatch that knows about devices that run behind the program."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from cspd.sequence import PHASES

POLICIES = {
    "fp32": "float32 throughout: the reference",
    "tf32": "float32 storage, 10-bit mantissas inside CUDA matrix products; on a CPU the same as fp32",
    "bf16": "bfloat16 matrix products by autocast; chain, tables and first denoising step in float32",
}


class Precision:
    """One setting for a whole engine. The first denoising step and the autoencoder are in float32 under every policy.

    Raises:
        ValueError: unknown policy.
    """

    def __init__(self, policy: str, device: torch.device) -> None:
        if not isinstance(policy, str) or policy not in POLICIES:
            raise ValueError(f"precision={policy!r}: choose one of {', '.join(POLICIES)}")
        self.policy, self.device = policy, device

    def _apply(self, tf32: bool, bf16: bool) -> contextlib.AbstractContextManager[None]:
        if self.device.type == "cpu" and torch.is_autocast_enabled("cpu") == bf16:  # there is nothing to change
            return contextlib.nullcontext()
        return self._switch(tf32, bf16)

    @contextlib.contextmanager
    def _switch(self, tf32: bool, bf16: bool) -> Iterator[None]:
        flags: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]  # matrix products, convolutions
        before = [flag.allow_tf32 for flag in flags]
        for flag in flags:
            flag.allow_tf32 = tf32
        try:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
                yield
        finally:
            for flag, value in zip(flags, before):
                flag.allow_tf32 = value

    @property
    def uniform(self) -> bool:
        """Whether `fast` and `full` are the same."""
        return self.policy == "fp32"

    def fast(self) -> contextlib.AbstractContextManager[None]:
        """As fast as the policy allows."""
        return self._apply(tf32=self.policy == "tf32", bf16=self.policy == "bf16")

    def full(self) -> contextlib.AbstractContextManager[None]:
        """True float32, also inside `fast`."""
        return self._apply(tf32=False, bf16=False)


class Stopwatch:
    """Seconds by phase. On CUDA it records events, on the stream that was current when it was made, and waits for that
    stream once, when the seconds are read.
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

    def is_past(self) -> bool:
        """Whether the stream has come to the start of the last phase."""
        return not self.cuda or self._marks[-1][1].query()

    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the stopwatch was made; it goes on from here in phase "other"."""
        end = self._now()
        if self.cuda:
            end.synchronize()
        total = dict.fromkeys(PHASES, 0.0)
        for (phase, begin), (_, after) in zip(self._marks, [*self._marks[1:], ("", end)]):
            total[phase] += begin.elapsed_time(after) / 1000 if self.cuda else after - begin
        self._marks = [("other", end)]
        return total
