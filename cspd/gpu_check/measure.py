"""How a GPU check measures: the operations of a round, replayed draws, timed rounds, profiled kernels."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
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
from cspd.discrete.gpt import GPTConfig
from cspd.engine import Engine
from cspd.gpu_check.run import Settings
from cspd.masked.orders import cosine
from cspd.noise import Purpose
from cspd.request import Request, Sequence
from cspd.speed import batch_at
from mar.model import MARConfig

# Acceptance as of trained models, for models with random weights: noise whose uniform draws decide beforehand.
#
# A draft of random weights is accepted at random, and time depends on how often. Here a draw is 0 where a draft is to
# be accepted, and above every probability where it is not. All other draws are as they were.


def _replacing(**functions: object) -> types.SimpleNamespace:
    """`cspd.noise` but for some functions."""
    return types.SimpleNamespace(**(vars(noise) | functions))


def head_calls(calls: np.ndarray, device: torch.device) -> types.SimpleNamespace:
    """Noise by which chains take as many head calls as those of a calibration: `calls`, int [N], of one window."""
    pool = torch.as_tensor(calls, dtype=torch.int64, device=device)

    def chain(seed: Tensor, position: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
        x, eps_t, uniform = noise.chain(seed, position, *others)
        num_steps = uniform.shape[1]
        # the first call is ancestral; the others part the steps after it evenly, and each but the last ends in a
        # rejection
        rounds = pool[(7919 * seed + position) % len(pool)].unsqueeze(1) - 1
        steps_done = num_steps - 2 - torch.arange(num_steps, device=device)
        parts_done, parts_after = ((steps * rounds) // (num_steps - 1) for steps in (steps_done, steps_done + 1))
        return x, eps_t, torch.where(parts_after > parts_done, torch.inf, 0.0)

    return _replacing(chain=chain)


def token_share(share: float) -> types.SimpleNamespace:
    """Noise by which CSpD accepts this share of the drafted tokens."""

    def token_accept_uniforms(seed: Tensor, position: Tensor) -> Tensor:
        drawn = noise.token_accept_uniforms(seed, position)
        return torch.where(drawn < share, 0.0, torch.inf)

    return _replacing(token_accept_uniforms=token_accept_uniforms)


def codes_a_round(num: float) -> types.SimpleNamespace:
    """Noise by which rounds commit `num` VQ codes on average, where so many are drafted.

    Every num-th code of an image is rejected, and with it what is drafted beside it.
    """

    def fine_uniform(
        seed: Tensor, purpose: Tensor | int, position: Tensor, step: Tensor | int = 0, index: Tensor | int = 0
    ) -> Tensor:
        drawn = noise.fine_uniform(seed, purpose, position, step, index)
        place = position + 5 * seed  # images are not in step
        is_rejected = torch.floor((place + 1) / num) > torch.floor(place / num)
        is_accept = purpose == Purpose.TOKEN_ACCEPT
        if isinstance(is_accept, bool):
            return is_rejected.to(drawn).expand_as(drawn) if is_accept else drawn
        return torch.where(is_accept, is_rejected.to(drawn), drawn)

    return _replacing(fine_uniform=fine_uniform)


# What an image costs at least: floating-point operations, and bytes between memory and processors.
#
# Only matrix products and attention are counted, each operand read once and each result written once, and the head's
# modulations. All else could be fused with these.


@dataclass(frozen=True)
class Work:
    """Floating-point operations and bytes; arrays [K] where they are of K iterations."""

    flops: float | np.ndarray = 0.0
    bytes: float | np.ndarray = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Work:
        return Work(self.flops * times, self.bytes * times)

    def sum(self) -> Work:
        """Of all iterations."""
        return Work(float(np.sum(self.flops)), float(np.sum(self.bytes)))


def product(rows: float | np.ndarray, inner: int, outer: int, size: int) -> Work:
    """[rows, inner] by weights [inner, outer], numbers of `size` bytes."""
    return Work(2 * rows * inner * outer, size * (rows * inner + inner * outer + rows * outer))


def _attention(sequences: float, queries: float | np.ndarray, keys: float | np.ndarray, dim: int, size: int) -> Work:
    return Work(4 * sequences * queries * keys * dim, 2 * size * sequences * (queries + keys) * dim)


def backbone(config: MARConfig, sequences: float, known: float | np.ndarray, size: int) -> Work:
    """A call of MAR's backbone, of sequences that know so many tokens."""
    dim, total = config.embed_dim, Work()
    for tokens in (config.buffer_size + known, config.buffer_size + config.seq_len):  # encoder, decoder
        rows = sequences * tokens
        layer = product(rows, dim, 3 * dim, size) + product(rows, dim, dim, size)
        layer += product(rows, dim, 4 * dim, size) + product(rows, 4 * dim, dim, size)
        total += (layer + _attention(sequences, tokens, tokens, dim, size)) * config.depth
    return total


def modulation_floats(config: MARConfig) -> int:
    """Numbers that modulate a row of a head call."""
    return (3 * config.diffloss_d + 2) * config.diffloss_w


def modulations(config: MARConfig, rows: float | np.ndarray, size: int) -> Work:
    """What modulates so many rows, made from their conditions."""
    return product(rows, config.diffloss_w, modulation_floats(config), size)


def denoise(config: MARConfig, rows: float | np.ndarray, size: int) -> Work:
    """A head call of so many rows, whose modulations are there."""
    width, channels = config.diffloss_w, config.token_dim
    blocks = product(rows, width, width, size) * (2 * config.diffloss_d)
    ends = product(rows, channels, width, size) + product(rows, width, 2 * channels, size)
    return blocks + ends + Work(bytes=size * rows * modulation_floats(config))


@dataclass(frozen=True)
class Chains:
    """How the head draws the tokens of an iteration.

    Attributes:
        steps: whose modulations are made. calls: head calls one after the other. width: states of a token that a call
            evaluates. classes: of guidance, that a call evaluates. anew: whether modulations are made at each call.
    """

    steps: float
    calls: float
    width: int = 1
    classes: float = 2.0
    anew: bool = False

    def work(self, config: MARConfig, tokens: float | np.ndarray, size: int) -> Work:
        """Of so many tokens together."""
        call = denoise(config, tokens * self.classes * self.width, size)
        if self.anew:
            return (call + modulations(config, tokens * self.classes, size)) * self.calls
        return call * self.calls + modulations(config, tokens * self.classes * self.steps, size)


def iterations(num_iter: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens known before each of MAR's iterations, and predicted in it, float64 [K]."""
    masked, _ = cosine(num_iter, seq_len)
    before = np.concatenate([[seq_len], masked[:-1]]).astype(np.float64)
    return seq_len - before, before - masked


def mar_image(config: MARConfig, batch: int, num_iter: int, chains: Chains, size: int) -> Work:
    """An image by MAR with guidance, in a batch."""
    known, tokens = iterations(num_iter, config.seq_len)
    work = backbone(config, 2 * batch, known, size) + chains.work(config, batch * tokens, size)
    return work.sum() * (1 / batch)


def gpt_forward(config: GPTConfig, sequences: float, nodes: float, known: float | np.ndarray, size: int) -> Work:
    """A forward of a GPT over so many codes of each sequence, after those that are known."""
    dim, hidden, rows = config.dim, config.hidden_dim, sequences * nodes
    layer = product(rows, dim, 3 * dim, size) + product(rows, dim, dim, size)
    layer += product(rows, dim, hidden, size) * 2 + product(rows, hidden, dim, size)
    layer += _attention(sequences, nodes, known + nodes, dim, size)
    return layer * config.n_layer + product(rows, dim, config.vocab_size, size)


def gpt_image(config: GPTConfig, batch: int, codes_a_round: float, nodes: float, size: int) -> Work:
    """An image's codes with guidance, in a batch: the target's forwards alone, of a root and drafted nodes."""
    known = np.arange(0, config.block_size, codes_a_round)
    return gpt_forward(config, 2 * batch, nodes, known, size).sum() * (1 / batch)


# What the device does in a round: its kernels by name, and where the CPU waits for it.

ROOT = Path(__file__).parent.parent.parent
OURS = tuple(str(ROOT / name) for name in ("cspd", "mar"))
WAITS = "called a synchronizing"  # what PyTorch warns of with


class Kernel(NamedTuple):
    """A kernel, how often it ran and how long all runs took; on a CPU an operator."""

    name: str
    count: int
    microseconds: float


def profiled(settings: Settings, work: Callable[[], object]) -> list[Kernel]:
    """The kernels that some work runs, those first that take the most time."""
    cuda = settings.cuda
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes into the bar
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        work()
        settings.synchronize()
    kernels = []
    for event in profiler.key_averages():
        if cuda and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        kernels.append(Kernel(event.key, event.count, spent))
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)


@contextlib.contextmanager
def waits(settings: Settings) -> Iterator[Counter[str]]:
    """Counts, by line of ours, where the CPU waits for the device within it, which PyTorch warns of on CUDA.

    It warns and does not raise: an error would end the round at the first line, and leave it half done.
    """
    lines: Counter[str] = Counter()

    def note(message: Warning | str, *others: Any) -> None:
        if WAITS in str(message):
            lines[_own_line()] += 1

    cuda = settings.cuda
    before = torch.cuda.get_sync_debug_mode() if cuda else 0
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        try:
            if cuda:
                torch.cuda.set_sync_debug_mode("warn")
            yield lines
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode(before)


def _own_line() -> str:
    """The innermost line of ours that is being run, as "cspd/engine.py:99"."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OURS) and file != __file__:
            return f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


# Rounds of sequences that are anywhere in their images, and how long they take.

SHARES = (0.0, 0.25, 0.5, 0.75)  # of an image's tokens that are known where rounds are timed


def seconds_a_round(settings: Settings, engine: Engine, request: Request) -> tuple[dict[int, float], float]:
    """Seconds of a round of all slots by tokens known at its start, and how many tokens a sequence's round commits.

    Where sequences are at different iterations, as those of `speculative`, a round is an iteration of one of them. Of
    several the median is taken: in some a graph may be captured.
    """
    seconds, committed = {}, []
    for share in SHARES:
        batch = batch_at(engine, request, int(share * engine.runner.seq_len))
        everyone = list(batch.sequences)
        known = everyone[0].num_committed
        for _ in range(settings.scale.warm_ups):
            batch.round()
        each = []
        for _ in range(settings.scale.rounds):
            before = _progress(everyone)
            spent = timed(settings, batch.round)
            rounds, tokens = _progress(everyone) - before
            if rounds:  # none is left of an image that is almost done
                each.append(spent * len(everyone) / rounds)
                committed.append(tokens / rounds)
        if each:
            seconds[known] = statistics.median(each)
    engine.runner.clear()
    return seconds, statistics.mean(committed)


def _progress(sequences: list[Sequence]) -> np.ndarray:
    """Iterations and tokens that all sequences have begun, int64 [2]."""
    return np.array([[s.iteration, s.num_started] for s in sequences]).sum(0)


def timed(settings: Settings, work: Callable[[], object]) -> float:
    """Seconds until the device has done some work."""
    settings.synchronize()
    start = time.perf_counter()
    work()
    settings.synchronize()
    return time.perf_counter() - start


def times(seconds: dict[int, float], known: np.ndarray, batch: int) -> dict[str, Any]:
    """Milliseconds of an image as `image_ms`, and of the rounds that were timed, by tokens known."""
    by_known = {str(tokens): 1000 * spent for tokens, spent in seconds.items()}
    return {"ms": image_ms(seconds, known, batch), "round_ms": by_known}


def image_ms(seconds: dict[int, float], known: np.ndarray, batch: int) -> float:
    """Milliseconds of an image in a batch: its rounds, which begin at `known` tokens, as those that were timed."""
    each = np.interp(known, list(seconds), list(seconds.values()))
    return 1000 * float(each.sum()) / batch
