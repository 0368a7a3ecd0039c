"""What an image costs at least: floating-point operations, and bytes between memory and processors.

Only matrix products and attention are counted, each operand read once and each result written once, and the head's
modulations. All else could be fused with these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cspd.continuous.schedule import cosine
from cspd.vq.gpt import GPTConfig
from mar.model import MARConfig


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
