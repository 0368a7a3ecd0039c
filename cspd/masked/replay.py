"""Replays of images: exact ones, and what other backbones compute at any iteration of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several

import numpy as np
from torch import Tensor

from cspd.continuous.calibrations import TRACE_SEED, traced
from cspd.continuous.rows import Rows, full_conditions
from cspd.device import send_integers
from cspd.heads.calibration import Trace
from cspd.masked.orders import timetable
from cspd.masked.runner import MARRunner
from cspd.request import Request, Sequence
from cspd.terminal import Advance, no_advance

# Whatever the later tokens of an image are, its state at iteration k is its first tokens in generation order. So each
# backbone can be evaluated at every iteration of the same images, and its conditions z compared with the exact ones.

TOKENS, MOST_IMAGES = 1024, 8  # of the exact images


Evaluate = Callable[[MARRunner, list[Sequence], Rows], Tensor]  # z [G, R, D] of rows, by a backbone


class Replay:
    """Images in slots of a model runner, at any of their iterations.

    Attributes:
        runner: as many slots as images. batch: one sequence for each image.
    """

    def __init__(self, runner: MARRunner, requests: Several[Request], tokens: Tensor | None = None) -> None:
        """`requests`: resolved, of one method. `tokens`: [B, L, d], of finished images."""
        self.runner = runner
        self.batch = [Sequence(request, i, slot=i, key="replay") for i, request in enumerate(requests)]
        runner.admit(self.batch)
        if tokens is not None:
            runner.tokens[: len(tokens)] = tokens.to(runner.tokens)

    @property
    def num_iter(self) -> int:
        return len(self.runner.num_masked(self.batch[0].request))

    def rows(self, iteration: int) -> Rows:
        """The rows of an iteration, from 0."""
        for sequence in self.batch:
            masked = timetable(sequence.request, self.runner.seq_len).masked
            num_masked = masked[iteration - 1] if iteration else sequence.request.num_generated(self.runner.seq_len)
            sequence.iteration = iteration
            sequence.num_committed = self.runner.seq_len - int(num_masked)
        return self.runner.next_rows(self.batch)

    def chains(self, iterations: Several[int], commit: bool = False, advance: Advance = no_advance) -> list[Trace]:
        """Exact chains of the tokens of some iterations, one trace for each. `commit`: the images take these tokens."""
        parts: list[Trace] = []
        for iteration in iterations:
            rows = self.rows(iteration)
            z = full_conditions(self.runner, self.batch, rows)
            made = traced(parts, lambda: None, self.runner, "target", rows, z)
            if commit:
                self.runner.commit(rows, made.tokens)
            advance(1 / len(iterations))
        return parts

    def ahead(self, iteration: int, stop: int) -> Tensor:
        """z [G, R, D] of the iterations after an iteration, up to `stop`, by its state: iteration by iteration."""
        begin = self.rows(iteration)
        masked = timetable(self.batch[0].request, self.runner.seq_len).masked
        num_ahead = self.runner.seq_len - int(masked[stop - 1]) - begin.committed[0]
        rows = self.runner.rows(self.batch, begin.committed, [num_ahead] * len(self.batch))
        z = self.runner.conditions(self.batch, rows)
        later = np.flatnonzero(rows.iteration > iteration)
        by_iteration = later[np.argsort(rows.iteration[later], kind="stable")]
        return z[:, send_integers(by_iteration, self.runner.device)]

    def conditions(self, evaluate: Evaluate, first: int = 0, **settings: object) -> Iterator[tuple[Rows, Tensor]]:
        """The rows of the rounds from `first` on, and their z [G, R, D], by a backbone with these settings."""
        for sequence in self.batch:
            sequence.request = sequence.request.but(**settings)
        for number in range(first, self.num_iter):
            rows = self.rows(number)
            yield rows, evaluate(self.runner, self.batch, rows)


def tokens_by_iteration(request: Request, seq_len: int) -> np.ndarray:
    """How many tokens of an image each iteration of a resolved request generates, [K]; joined rounds are apart."""
    return -np.diff(timetable(request.but(rounds=None), seq_len).masked, prepend=request.num_generated(seq_len))


def exact_requests(request: Request, seq_len: int, num_classes: int) -> list[Request]:
    """Requests of `ar` for the exact images, of other seeds and classes than those that fits are made from."""
    num_images = min(MOST_IMAGES, max(2, TOKENS // seq_len))
    common = {name: getattr(request, name) for name in ("num_iter", "cfg", "cfg_schedule", "temperature")}
    common |= {"num_sampling_steps": request.num_sampling_steps, "reuse_null": True}
    spread = max(1, num_classes // num_images)
    labels = [(1 + i * spread) % num_classes for i in range(num_images)]
    return [Request(label, TRACE_SEED * 2 + i, "ar", **common) for i, label in enumerate(labels)]
