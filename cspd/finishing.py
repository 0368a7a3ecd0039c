"""From finished sequences to outputs: images are decoded beside the next rounds where the device can do both."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from cspd.lookup import method_of
from cspd.method import Host
from cspd.precision import Stopwatch
from cspd.sequence import Output, Sequence

AHEAD = 4  # batches of images that may be under way, before a round waits for the oldest


class _Batch(NamedTuple):
    """Sequences, what `Host.results` has of them, and images [B, 3, H, W], there once `watch` is past."""

    sequences: list[Sequence]
    tokens: Tensor
    heat: Tensor
    finite: Tensor
    images: Tensor | None
    watch: Stopwatch


class Finisher:
    """Outputs of finished sequences, in the order in which they finished.

    On a GPU images are decoded on a stream of their own, so that rounds, which wait for their small kernels more than
    they compute, go on meanwhile. On a CPU, all of whose cores a round uses, they are decoded at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._batches: deque[_Batch] = deque()

    def __len__(self) -> int:
        """Images under way."""
        return sum(len(batch.sequences) for batch in self._batches)

    def add(self, host: Host, sequences: list[Sequence]) -> None:
        """Begins to decode sequences, whose slots are free afterwards."""
        tokens, heat, finite = host.results(sequences)  # kept until the other stream has read them
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            watch = Stopwatch(self.device)
            watch.start("decode")
            images = host.decode(tokens)
            watch.start("other")
        self._batches.append(_Batch(sequences, tokens, heat, finite, images, watch))

    def ready(self, wait: bool) -> dict[int, Output]:
        """The outputs that are there, by ticket; all that there will be, if told to `wait`."""
        outputs: dict[int, Output] = {}
        while self._batches and (wait or len(self._batches) > AHEAD or self._batches[0].watch.is_past()):
            outputs |= _outputs(self._batches.popleft())
        return outputs

    def clear(self) -> None:
        """Forgets what is being decoded."""
        self._batches.clear()


def _outputs(batch: _Batch) -> dict[int, Output]:
    spent = batch.watch.seconds()["decode"]  # waits for the images; only then may this stream read them
    tokens, heat, finite = batch.tokens.cpu(), batch.heat.cpu(), batch.finite.cpu()
    images = [None] * len(tokens) if batch.images is None else batch.images.cpu()
    made = {}
    with torch.inference_mode(False):  # copies that are ordinary tensors and do not hold the batch
        for sequence, own_finite, image, *of_one in zip(batch.sequences, finite, images, tokens, heat):
            sequence.stats.seconds["decode"] += spent
            own_tokens, own_heat = (each.clone() for each in of_one)
            error = _error(sequence, own_finite, image)
            image = None if image is None or error else image.clone()
            made[sequence.ticket] = Output(sequence.request, own_tokens, image, own_heat, sequence.stats, error)
    return made


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
