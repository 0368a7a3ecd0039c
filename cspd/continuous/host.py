"""The MAR host: owns the models and, in slots allocated once, the tokens and orders of every running sequence."""

from __future__ import annotations

import types
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cspd import noise as philox_noise
from cspd.precision import Precision
from cspd.sequence import Request, Sequence
from mar.model import MAR


def mask_len(request: Request, iteration: int, seq_len: int, masked: int) -> int:
    """Tokens still masked after `iteration` (0-based) by MAR's cosine schedule, float64; `masked` > 0 before it.

    The last iteration's is what the schedule says (1), although that iteration predicts all that remain.
    """
    wanted = int(np.floor(seq_len * np.cos(np.pi / 2 * (iteration + 1) / request.num_iter)))
    return max(1, min(masked - 1, wanted))


def guidance_scale(request: Request, left: int, seq_len: int) -> float:
    """s of an iteration that leaves `left` = mask_len tokens masked."""
    if request.cfg_schedule == "constant":
        return request.cfg
    return 1 + (request.cfg - 1) * (seq_len - left) / seq_len


@dataclass(frozen=True)
class Rows:
    """The tokens that a batch of sequences predicts in one iteration, flat: R rows, a sequence's own in one stretch.

    Attributes:
        counts: rows of each sequence, on the host.
        sequence, offset: int64 [R], index into the batch, and which of that sequence's rows. slot, position, seed:
            int64 [R].
        scale, temperature: float32 [R, 1].
    """

    counts: list[int]
    sequence: Tensor
    offset: Tensor
    slot: Tensor
    position: Tensor
    seed: Tensor
    scale: Tensor
    temperature: Tensor


class MARHost:
    """Answers what a method asks: which rows an iteration predicts, their z, and to commit tokens.

    Args:
        target: the model. num_slots: sequences in flight at most. device, precision: where and how it computes.
        noise: the source of randomness: a namespace with `order`, `initial` and `steps` as in `cspd.noise`.
    """

    def __init__(
        self,
        target: MAR,
        num_slots: int,
        device: torch.device,
        precision: Precision,
        noise: types.ModuleType = philox_noise,
    ) -> None:
        self.target, self.device, self.precision, self.noise = target, device, precision, noise
        self.config, self.num_slots = target.config, num_slots
        length = self.config.seq_len
        self.tokens = torch.zeros(num_slots, length, self.config.token_dim, device=device)
        self.order = torch.zeros(num_slots, length, dtype=torch.int64, device=device)
        self.label = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def admit(self, sequences: list[Sequence]) -> None:
        """Prepares the slots of sequences that are about to run."""
        slots = self._tensor([s.slot for s in sequences])
        self.label[slots] = self._tensor([s.request.label for s in sequences])
        seeds = self._tensor([s.request.seed for s in sequences])
        self.order[slots] = self.noise.order(seeds, self.config.seq_len)
        self.tokens[slots] = 0

    def next_rows(self, batch: list[Sequence]) -> Rows:
        """The rows that the next iteration of each sequence predicts."""
        length = self.config.seq_len
        counts, scales = [], []
        for sequence in batch:
            masked = length - sequence.num_known
            left = mask_len(sequence.request, sequence.iteration, length, masked)
            scales.append(guidance_scale(sequence.request, left, length))
            last = sequence.iteration + 1 == sequence.request.num_iter
            counts.append(masked if last else masked - left)
        owner = np.repeat(np.arange(len(batch)), counts)
        offset = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        rank = offset + np.asarray([s.num_known for s in batch])[owner]

        def per_row(values: list, dtype: torch.dtype) -> Tensor:
            return self._tensor(np.asarray(values)[owner], dtype)

        slot = per_row([s.slot for s in batch], torch.int64)
        return Rows(
            counts=counts,
            sequence=self._tensor(owner),
            offset=self._tensor(offset),
            slot=slot,
            position=self.order[slot, self._tensor(rank)],
            seed=per_row([s.request.seed for s in batch], torch.int64),
            scale=per_row(scales, torch.float32).unsqueeze(-1),
            temperature=per_row([s.request.temperature for s in batch], torch.float32).unsqueeze(-1),
        )

    def conditions(self, batch: list[Sequence], rows: Rows) -> Tensor:
        """z of the rows [G, R, D], G = 2 (null class second) where the batch is guided: one backbone call."""
        slots = self._tensor([s.slot for s in batch])
        tokens, order = self.tokens[slots], self.order[slots]
        num_known = [s.num_known for s in batch]
        embedding = self.target.class_emb(self.label[slots])
        positions = torch.zeros(len(batch), max(rows.counts), dtype=torch.int64, device=self.device)
        positions[rows.sequence, rows.offset] = rows.position
        copies = 2 if batch[0].request.guided else 1
        if copies == 2:
            embedding = torch.cat([embedding, self.target.fake_latent.expand_as(embedding)])
        tokens, order, positions = (t.repeat(copies, *[1] * (t.dim() - 1)) for t in (tokens, order, positions))
        with self.precision.fast():
            z = self.target(tokens, order, num_known * copies, embedding, positions).float()
        return z.unflatten(0, (copies, len(batch)))[:, rows.sequence, rows.offset]

    def commit(self, rows: Rows, tokens: Tensor) -> None:
        """Writes predicted tokens [R, d] to their slots."""
        self.tokens[rows.slot, rows.position] = tokens

    def finished_tokens(self, sequences: list[Sequence]) -> Tensor:
        """Tokens [B, L, d] of sequences."""
        return self.tokens[self._tensor([s.slot for s in sequences])]

    def _tensor(self, values: list | np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=self.device)
