"""From finished sequences to outputs: images are decoded beside the next rounds where the device can do both."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cspd.lookup import method_of
from cspd.method import Host
from cspd.precision import Stopwatch
from cspd.sequence import Output, Sequence

AT_ONCE = 3  # images that a CPU decodes between two looks at the bar: a large one takes seconds
AHEAD = 4  # batches of images that may be under way, before a round waits for the oldest


class _Made(NamedTuple):
    """What `Host.results` has of sequences, and images [B, 3, H, W], on the host."""

    tokens: Tensor
    heat: Tensor
    finite: Tensor
    images: Tensor | None


class _Work(NamedTuple):
    """A round that sequences took part in, or what was made of finished ones: there once `watch` is past."""

    sequences: list[Sequence]
    watch: Stopwatch
    made: _Made | None = None


class Finisher:
    """Outputs of finished sequences, in the order in which they finished.

    On a GPU images are decoded on a stream of their own, so that rounds, which wait for their small kernels more than
    they compute, go on meanwhile. On a CPU, all of whose cores a round uses, they are decoded at once. What the device
    has yet to do is kept here in its order, so that the seconds of rounds, and images, are read without waiting.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._work: deque[_Work] = deque()

    def __len__(self) -> int:
        """Images under way."""
        return len(self.sequences())

    def add_round(self, sequences: list[Sequence], watch: Stopwatch) -> None:
        """Sequences are charged the seconds of a round, when it is past."""
        self._work.append(_Work(sequences, watch))

    def add(self, host: Host, sequences: list[Sequence], on_decoded: Callable[[int], object]) -> None:
        """Begins to decode sequences, whose slots are free afterwards.

        On a CPU `on_decoded` is called with a number of images that are there.
        """
        results = host.results(sequences)
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            for tensor in results:
                tensor.record_stream(self._stream)  # whose memory is no one else's until that stream has read it
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            watch = Stopwatch(self.device)
            watch.start("decode")
            images = host.decode(results[0]) if self._stream else _decoded(host, results[0], on_decoded)
            made = _Made(*(None if each is None else each.to("cpu", non_blocking=True) for each in (*results, images)))
            watch.stop()
        self._work.append(_Work(sequences, watch, made))

    def sequences(self) -> list[Sequence]:
        """Those that images are under way of."""
        return [sequence for work in self._work if work.made for sequence in work.sequences]

    def ready(self, wait: bool) -> list[tuple[Sequence, Output]]:
        """The outputs that are there; all that there will be, if told to `wait`."""
        outputs: list[tuple[Sequence, Output]] = []
        while self._work and (wait or self._work[0].watch.is_past() or self._num_batches() > AHEAD):
            work = self._work.popleft()
            for phase, spent in work.watch.seconds().items():
                for sequence in work.sequences:
                    sequence.stats.seconds[phase] += spent
            if work.made:
                outputs += _outputs(work.sequences, work.made)
        return outputs

    def clear(self) -> None:
        """Forgets what is being decoded."""
        self._work.clear()

    def _num_batches(self) -> int:
        return sum(1 for work in self._work if work.made)


def _decoded(host: Host, tokens: Tensor, on_decoded: Callable[[int], object]) -> Tensor | None:
    """Images of tokens [B, ...], some at a time; never one of several alone, which takes as long as two."""
    parts = []
    for part in tokens.tensor_split(math.ceil(len(tokens) / AT_ONCE)):
        images = host.decode(part)
        if images is None:
            return None
        parts.append(images)
        on_decoded(len(part))
    return torch.cat(parts)


def _outputs(sequences: list[Sequence], made: _Made) -> list[tuple[Sequence, Output]]:
    images = [None] * len(sequences) if made.images is None else made.images
    outputs = []
    with torch.inference_mode(False):  # copies that are ordinary tensors and do not hold the batch
        for sequence, own_finite, image, *of_one in zip(sequences, made.finite, images, made.tokens, made.heat):
            sequence.complete_stats()
            own_tokens, own_heat = (each.clone() for each in of_one)
            error = _error(sequence, own_finite, image)
            image = None if image is None or error else image.clone()
            what = sequence.request, own_tokens, image, own_heat, sequence.stats, error, sequence.class_name
            outputs.append((sequence, Output(*what)))
    return outputs


def _error(sequence: Sequence, finite: Tensor, image: Tensor | None) -> str | None:
    """What is wrong where an image or a token is not finite; `finite`: of each token, in generation order."""
    if not finite.all():
        rank = int(finite.int().argmin())
        where = f"token {rank + 1} of {len(finite)} in generation order, in iteration {sequence.iteration_of(rank)}"
        error = f"{sequence.request!r} left the numbers of float32 at {where}: look at cfg, temperature and the weights"
        advice = method_of(sequence.request).advice(sequence.request)
        return f"{error}; {advice}" if advice else error
    if image is not None and not image.isfinite().all():
        return f"{sequence.request!r}: the tokens are finite but not the image: look at the autoencoder's weights"
    return None
