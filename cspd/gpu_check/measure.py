"""How a GPU check measures: replayed acceptance, the work of an image, timed rounds, profiled kernels, waits."""

from __future__ import annotations

import contextlib
import os
import statistics
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from cspd import noise
from cspd.device import seconds_of
from cspd.engine import Engine
from cspd.masked.orders import cosine
from cspd.noise import Purpose
from cspd.request import Request, Sequence
from cspd.speed import Batch, batch_at
from mar.model import MARConfig

# Acceptance of trained models, replayed for models with random weights.
#
# A model with random weights accepts drafts at random, and time depends on how often. So `cspd.noise` is replaced: a
# uniform draw is 0 where a draft is to be accepted, and above every probability where it is not. All other draws stay.


def _noise_with(**functions: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(**(vars(noise) | functions))


def head_calls(calls: np.ndarray, device: torch.device) -> types.SimpleNamespace:
    """Noise with which chains take the head calls of a calibration: `calls`, int [N], of one window."""
    pool = torch.as_tensor(calls, dtype=torch.int64, device=device)

    def chain(seed: Tensor, position: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, eps_t, uniform = noise.chain(seed, position, *others)
        num_steps = uniform.shape[1]
        # The first call is ancestral. The others divide the steps after it evenly; each but the last one ends in a
        # rejection, which is at the last step of its part.
        num_parts = pool[(7919 * seed + position) % len(pool)].unsqueeze(1) - 1
        timestep = torch.arange(num_steps, device=device)
        steps_before = num_steps - 2 - timestep
        steps_after = steps_before + 1
        parts_before = (steps_before * num_parts) // (num_steps - 1)
        parts_after = (steps_after * num_parts) // (num_steps - 1)
        return x, eps_t, torch.where(parts_after > parts_before, torch.inf, 0.0)

    return _noise_with(chain=chain)


def accepted_share(share: float) -> types.SimpleNamespace:
    """Noise with which CSpD accepts this share of the drafted tokens."""

    def token_accept_uniforms(seed: Tensor, position: Tensor) -> Tensor:
        drawn = noise.token_accept_uniforms(seed, position)
        return torch.where(drawn < share, 0.0, torch.inf)

    return _noise_with(token_accept_uniforms=token_accept_uniforms)


def tokens_a_round(num: float) -> types.SimpleNamespace:
    """Noise with which rounds commit `num` VQ tokens on average, if at least that many are drafted.

    Every num-th token of an image is rejected, and with it all candidates at its position.
    """

    def fine_uniform(
        seed: Tensor, purpose: Tensor | int, position: Tensor, step: Tensor | int = 0, index: Tensor | int = 0
    ) -> Tensor:
        drawn = noise.fine_uniform(seed, purpose, position, step, index)
        shifted = position + 5 * seed  # so that images reject at different positions
        is_rejected = torch.floor((shifted + 1) / num) > torch.floor(shifted / num)
        is_accept = purpose == Purpose.TOKEN_ACCEPT
        if isinstance(is_accept, bool):
            return is_rejected.to(drawn).expand_as(drawn) if is_accept else drawn
        return torch.where(is_accept, is_rejected.to(drawn), drawn)

    return _noise_with(fine_uniform=fine_uniform)


# The least work of an image: floating-point operations, and bytes between memory and processors.
#
# Only matrix products, attention and the head's modulations are counted; each operand is read once and each result
# written once. Everything else could be fused with them. `size` is the bytes of a number.


@dataclass(frozen=True)
class Work:
    """Floating-point operations and bytes: numbers, or arrays [K] with an entry for each iteration."""

    flops: float | np.ndarray = 0.0
    bytes: float | np.ndarray = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Work:
        return Work(self.flops * times, self.bytes * times)

    def sum(self) -> Work:
        """The work of all iterations."""
        return Work(float(np.sum(self.flops)), float(np.sum(self.bytes)))


def product(rows: float | np.ndarray, inner: int, outer: int, size: int) -> Work:
    """[rows, inner] times weights [inner, outer]."""
    numbers = rows * inner + inner * outer + rows * outer
    return Work(flops=2 * rows * inner * outer, bytes=size * numbers)


def _attention(sequences: float, tokens: float | np.ndarray, dim: int, size: int) -> Work:
    numbers = 4 * sequences * tokens * dim  # queries, keys, values and results
    return Work(flops=4 * sequences * tokens**2 * dim, bytes=size * numbers)


def backbone(config: MARConfig, sequences: float, committed: float | np.ndarray, size: int) -> Work:
    """A call of MAR's encoder, over the committed tokens, and of its decoder, over all tokens."""
    dim = config.embed_dim
    total = Work()
    for tokens in (config.buffer_size + committed, config.buffer_size + config.seq_len):
        rows = sequences * tokens
        layer = _attention(sequences, tokens, dim, size)
        for inner, outer in ((dim, 3 * dim), (dim, dim), (dim, 4 * dim), (4 * dim, dim)):
            layer += product(rows, inner, outer, size)
        total += layer * config.depth
    return total


def modulation_floats(config: MARConfig) -> int:
    """Numbers that modulate a row of a head call."""
    return (3 * config.diffloss_d + 2) * config.diffloss_w


def modulations(config: MARConfig, rows: float | np.ndarray, size: int) -> Work:
    """Computing the modulations of some rows from their conditions."""
    return product(rows, config.diffloss_w, modulation_floats(config), size)


def denoise(config: MARConfig, rows: float | np.ndarray, size: int) -> Work:
    """A head call of some rows whose modulations exist."""
    width = config.diffloss_w
    work = product(rows, width, width, size) * (2 * config.diffloss_d)
    work += product(rows, config.token_dim, width, size)
    work += product(rows, width, 2 * config.token_dim, size)  # eps and v
    modulation_bytes = size * rows * modulation_floats(config)
    return work + Work(bytes=modulation_bytes)


def iterations(num_iter: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens committed before each of MAR's iterations, and generated in it, float64 [K]."""
    masked, _ = cosine(num_iter, seq_len)
    before = np.concatenate([[seq_len], masked[:-1]]).astype(np.float64)
    return seq_len - before, before - masked


def mar_image(
    config: MARConfig,
    batch: int,
    num_iter: int,
    size: int,
    *,
    steps: float,
    calls: float,
    width: int = 1,
    branches: float = 2.0,
    is_published: bool = False,
) -> Work:
    """An image of a batch by MAR, with guidance.

    Args:
        steps: that have modulations of their own; the published sampler computes these again in each call.
        calls: of the head, one after another, in an iteration. width: states of a token in a call.
        branches: of guidance, in a call.
    """
    committed, tokens = iterations(num_iter, config.seq_len)
    rows = batch * tokens * branches
    work = backbone(config, 2 * batch, committed, size)
    work += denoise(config, rows * width, size) * calls
    if is_published:
        work += modulations(config, rows, size) * calls
    else:  # those of all steps in one product
        work += modulations(config, rows * steps, size)
    return work.sum() * (1 / batch)


# Time: a few rounds at several moments of an image.

SHARES = (0.0, 0.25, 0.5, 0.75)  # of an image's tokens that are committed before the timed rounds
WARM_UPS = 2  # rounds before each of them: a first one may compile kernels and capture graphs
LONG = 0.1  # seconds of a round of which one is timed, not several: noise matters only in short times


class Timing(NamedTuple):
    """Seconds of a round by tokens committed before it, the number of timed rounds, and tokens that each committed."""

    seconds: dict[int, float]
    num: int
    committed: float = 0.0


def timed_rounds(engine: Engine, request: Request, num: int) -> Timing:
    """The time of a round of all slots: at each moment the median of `num` rounds, or one if a round takes long.

    Sequences of `speculative` are at different iterations; a round then counts as an iteration of one of them. The
    seconds in which a graph is captured do not count.
    """
    seconds = {}
    num_timed = 0
    committed = []
    for share in SHARES:
        batch = batch_at(engine, request, int(share * engine.runner.seq_len))
        sequences = list(batch.sequences)
        known = sequences[0].num_committed
        spent = 0.0
        for _ in range(WARM_UPS):
            spent = _round_seconds(engine, batch)
        own = []
        for _ in range(num if spent < LONG else 1):
            before = _progress(sequences)
            spent = _round_seconds(engine, batch)
            rounds, tokens = _progress(sequences) - before
            if rounds:  # an image that was almost finished has no rounds left
                own.append(spent * len(sequences) / rounds)
                committed.append(tokens / rounds)
        if own:
            seconds[known] = statistics.median(own)
            num_timed += len(own)
    engine.runner.clear()
    return Timing(seconds, num_timed, statistics.mean(committed))


def _round_seconds(engine: Engine, batch: Batch) -> float:
    """Seconds of a round, without those of capturing graphs."""
    captured = engine.graphs.seconds
    spent = seconds_of(batch.round, engine.device)
    return spent - (engine.graphs.seconds - captured)


def _progress(sequences: list[Sequence]) -> np.ndarray:
    """Iterations and tokens that all sequences have begun, int64 [2]."""
    begun = [(sequence.iteration, sequence.num_started) for sequence in sequences]
    return np.array(begun).sum(axis=0)


def image_ms(timing: Timing, begins: np.ndarray, batch: int) -> float:
    """Milliseconds of an image of a batch: rounds that begin at these committed tokens, interpolated between timed."""
    moments = list(timing.seconds)
    each = np.interp(begins, moments, [timing.seconds[moment] for moment in moments])
    return 1000 * float(each.sum()) / batch


# What the device does in a round: its kernels by name, and where the CPU waits for it.

WAITS = "called a synchronizing"  # in PyTorch's warning


class Kernel(NamedTuple):
    """A kernel, or on a CPU an operator: how often it ran, and the time of all runs."""

    name: str
    runs: int
    microseconds: float


def profiled(device: torch.device, work: Callable[[], object]) -> list[Kernel]:
    """The kernels that some work runs, the most expensive one first."""
    cuda = device.type == "cuda"
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes into the progress bar
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        seconds_of(work, device)
    kernels = []
    for event in profiler.key_averages():
        if not cuda:
            kernels.append(Kernel(event.key, event.count, event.self_cpu_time_total))
        elif event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.append(Kernel(event.key, event.count, event.self_device_time_total))
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)


@contextlib.contextmanager
def waits(device: torch.device) -> Iterator[Counter[str]]:
    """Counts, by line of code, how often the CPU waits for a CUDA device inside the block; filled at its end.

    PyTorch warns of each wait. Raising an error instead would end the round at the first one.
    """
    lines: Counter[str] = Counter()
    cuda = device.type == "cuda"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
    for warning in warned:
        if WAITS in str(warning.message):
            folder, name = Path(warning.filename).parts[-2:]
            lines[f"{folder}/{name}:{warning.lineno}"] += 1
