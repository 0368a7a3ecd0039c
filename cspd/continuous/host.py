"""The MAR host: owns the models and, in slots allocated once, the tokens and orders of every running sequence."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cspd import noise as philox_noise
from cspd.precision import Precision
from cspd.sequence import Request, Sequence
from mar.model import MAR
from mar.registry import defaults_of
from mar.vae import AutoencoderKL

if TYPE_CHECKING:
    from cspd.continuous.tuning import Tuning

DECODE_BATCH = 8  # images through the autoencoder at once, which bounds its memory


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


@functools.lru_cache(maxsize=64)
def _scales(num_iter: int, cfg: float, cfg_schedule: str, seq_len: int) -> np.ndarray:
    """s of the iteration that each token is predicted in, by its rank in the order [L]."""
    request = Request(0, num_iter=num_iter, cfg=cfg, cfg_schedule=cfg_schedule)
    scales, masked = np.empty(seq_len), seq_len
    for iteration in range(num_iter):
        left = mask_len(request, iteration, seq_len, masked)
        scales[seq_len - masked :] = guidance_scale(request, left, seq_len)
        masked = left
    return scales


@dataclass(frozen=True)
class Rows:
    """The tokens that a batch of sequences predicts in one iteration, flat: R rows, a sequence's own in one stretch.

    Attributes:
        known, counts: tokens known to, and rows of, each sequence of the batch, on the host.
        sequence, offset: int64 [R], index into the batch, and which of that sequence's rows. slot, position, seed:
            int64 [R].
        scale, temperature: float32 [R, 1].
    """

    known: list[int]
    counts: list[int]
    sequence: Tensor
    offset: Tensor
    slot: Tensor
    position: Tensor
    seed: Tensor
    scale: Tensor
    temperature: Tensor


@dataclass(frozen=True)
class MARModels:
    """What samples images by MAR.

    Attributes:
        target: the model whose images are made; its published settings are the requests' defaults.
        draft: a smaller model of the same tokens, for methods that draft.
        vae: the autoencoder of the target's latents; without it outputs have tokens and no image.
    """

    target: MAR
    draft: MAR | None = None
    vae: AutoencoderKL | None = None


class MARHost:
    """Answers what a method asks: which rows an iteration predicts, their z, and to commit tokens.

    Args:
        target: the model. num_slots: sequences in flight at most. device, precision: where and how it computes.
        noise: the source of randomness: a namespace with the functions of `cspd.noise`.
        draft: a smaller model of the same tokens. vae: the autoencoder of them, for images.
        tuning: for methods that speculate in the head.

    Attributes:
        heat: float32 [slots, L], what each token cost, for pictures; a method says what it means.
        running: what a method keeps between rounds, by round key.
    """

    family = "MAR"

    def __init__(
        self,
        target: MAR,
        num_slots: int,
        device: torch.device,
        precision: Precision,
        noise: types.ModuleType = philox_noise,
        *,
        draft: MAR | None = None,
        vae: AutoencoderKL | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        self.models, self.vae, self.tuning = {"target": target, "draft": draft}, vae, tuning
        self.seq_len, self.num_classes = target.config.seq_len, target.config.class_num
        self.defaults = defaults_of(target.config)
        self.target, self.device, self.precision, self.noise = target, device, precision, noise
        self.config, self.num_slots = target.config, num_slots
        length = self.config.seq_len
        self.tokens = torch.zeros(num_slots, length, self.config.token_dim, device=device)
        self.order = torch.zeros(num_slots, length, dtype=torch.int64, device=device)
        self.label = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.heat = torch.zeros(num_slots, length, device=device)
        self.running: dict[Hashable, object] = {}

    def clear(self) -> None:
        """Forgets what methods keep of sequences that were dropped."""
        self.running.clear()

    def admit(self, sequences: list[Sequence]) -> None:
        """Prepares the slots of sequences that are about to run."""
        slots = self._tensor([s.slot for s in sequences])
        self.label[slots] = self._tensor([s.request.label for s in sequences])
        seeds = self._tensor([s.request.seed for s in sequences])
        self.order[slots] = self.noise.order(seeds, self.config.seq_len)
        self.tokens[slots] = 0

    def next_rows(self, batch: list[Sequence], limit: int | None = None) -> Rows:
        """The rows that the next iteration of each sequence predicts; up to `limit` known tokens in all."""
        length = self.config.seq_len
        counts = []
        for sequence in batch:
            masked = length - sequence.num_known
            left = mask_len(sequence.request, sequence.iteration, length, masked)
            last = sequence.iteration + 1 == sequence.request.num_iter
            count = masked if last else masked - left
            counts.append(count if limit is None else min(count, limit - sequence.num_known))
        return self.rows(batch, [s.num_known for s in batch], counts)

    def rows(self, batch: list[Sequence], known: list[int], counts: list[int]) -> Rows:
        """The rows of the next counts[i] tokens of batch[i] after known[i]; a sequence may be there more than once."""
        owner = np.repeat(np.arange(len(batch)), counts)
        offset = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        rank = offset + np.asarray(known)[owner]
        scales = np.stack(
            [_scales(s.request.num_iter, s.request.cfg, s.request.cfg_schedule, self.config.seq_len) for s in batch]
        )

        def per_row(values: list, dtype: torch.dtype) -> Tensor:
            return self._tensor(np.asarray(values)[owner], dtype)

        slot = per_row([s.slot for s in batch], torch.int64)
        return Rows(
            known=known,
            counts=counts,
            sequence=self._tensor(owner),
            offset=self._tensor(offset),
            slot=slot,
            position=self.order[slot, self._tensor(rank)],
            seed=per_row([s.request.seed for s in batch], torch.int64),
            scale=self._tensor(scales[owner, rank], torch.float32).unsqueeze(-1),
            temperature=per_row([s.request.temperature for s in batch], torch.float32).unsqueeze(-1),
        )

    def conditions(self, batch: list[Sequence], rows: Rows, model: str = "target") -> Tensor:
        """z of the rows [G, R, D], G = 2 (null class second) where the batch is guided: one backbone call."""
        model = self.models[model]
        slots = self._tensor([s.slot for s in batch])
        tokens, order = self.tokens[slots], self.order[slots]
        embedding = model.class_emb(self.label[slots])
        positions = torch.zeros(len(batch), max(rows.counts), dtype=torch.int64, device=self.device)
        positions[rows.sequence, rows.offset] = rows.position
        copies = 2 if batch[0].request.guided else 1
        if copies == 2:
            embedding = torch.cat([embedding, model.fake_latent.expand_as(embedding)])
        tokens, order, positions = (t.repeat(copies, *[1] * (t.dim() - 1)) for t in (tokens, order, positions))
        with self.precision.fast():
            z = model(tokens, order, rows.known * copies, embedding, positions).float()
        return z.unflatten(0, (copies, len(batch)))[:, rows.sequence, rows.offset]

    def commit(self, rows: Rows, tokens: Tensor) -> None:
        """Writes predicted tokens [R, d] to their slots."""
        self.tokens[rows.slot, rows.position] = tokens

    def results(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
        """(tokens [B, L, d], heat [B, L]) of sequences."""
        slots = self._tensor([s.slot for s in sequences])
        return self.tokens[slots], self.heat[slots]

    def decode(self, tokens: Tensor) -> Tensor | None:
        """Images [B, 3, H, W] in 0..1 of tokens [B, L, d]; None without autoencoder."""
        if self.vae is None:
            return None
        latents = self.target.unpatchify(tokens) / self.vae.config.scale
        with self.precision.full():
            images = torch.cat([self.vae.decode(part) for part in latents.split(DECODE_BATCH)])
        return images.add(1).div(2).clamp(0, 1)

    def _tensor(self, values: list | np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=self.device)
