"""The runner of causal models: owns the models and the slots with the tokens and caches of running sequences."""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cspd import noise as philox_noise
from cspd.causal.models import Causal, guidance_scale, sample_published
from cspd.causal.registry import Autoencoder, defaults_of
from cspd.continuous.rows import BASELINE, Rows, show_costs, without_lost_noise
from cspd.device import Precision, send, send_integers
from cspd.graphs import Graphs
from cspd.inpainting import Inpainting
from cspd.method import Method, complete, with_tokens
from cspd.option import CAUSAL_OPTIONS
from cspd.pixels import decoded, to_unit
from cspd.request import Request, Sequence
from cspd.transformer import CacheView
from mar.head import filled

WIDTH_STEP = 32  # columns that are read are a multiple of this, so that shapes repeat


def cached_columns(target: Causal) -> int:
    """Columns of a slot's key-value cache: those of the model, rounded up."""
    return -(-target.config.num_columns // WIDTH_STEP) * WIDTH_STEP


def bytes_per_slot(target: Causal, precision: Precision) -> int:
    """Estimated bytes that a slot adds: the keys and values of both guidance branches, and activations."""
    config = target.config
    both, branches, per_layer = 2, 2, 14
    cache = both * branches * config.n_layer * cached_columns(target) * config.dim * precision.type_of(target).itemsize
    of_class = branches * config.cls_token_num * config.dim * per_layer * torch.float32.itemsize
    return cache + of_class


class CausalRunner:
    """Owns a causal model and the slots of running sequences; computes the condition z of each sequence's next token.

    Args:
        target: the model. num_slots: sequences in flight at most. precision: how it computes, and where.
        noise: the source of randomness: a namespace with the functions of `cspd.noise`.
        vae: the autoencoder, for images.
        graphs: captures and replays work of fixed shape; by default nothing is captured.

    Attributes:
        tuning: a `cspd.continuous.tuning.HeadTuner`.
        tokens: float32 [slots, L, d], the ends of the tokens' chains; `Causal.finish` makes tokens of them.
        null_first: float32 [slots, d], the end of the unconditional branch's own first token; own_null: bool [slots],
            whether there is one. Its noise is that of position L.
        order: int64 [slots, L], raster order. token_cost, audit: float32 [slots, L], as in `MARRunner`.
    """

    family = "causal"
    in_raster_order = True
    tuning: Any = None  # `CausalModels.runner` sets it
    compiled = False  # torch.compile takes speculative passes only

    def __init__(
        self,
        target: Causal,
        num_slots: int,
        precision: Precision,
        noise: types.ModuleType = philox_noise,
        *,
        vae: Autoencoder | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        device = precision.device
        self.target, self.vae = target, vae
        self.models: dict[str, Any] = {"target": target, "draft": None}
        self.device, self.precision, self.noise = device, precision, noise
        self.graphs = graphs or Graphs(device, enabled=False)
        self.config = config = target.config
        self.defaults = defaults_of(config)
        self.num_slots = self.at_once = num_slots
        self.seq_len, self.num_classes = config.seq_len, config.num_classes
        self.image_size = config.img_size
        self._prepared = precision.prepare(target)  # before slots take the memory

        shape = num_slots, self.seq_len
        self.tokens = torch.zeros(*shape, config.token_dim, device=device)
        self.null_first = torch.zeros(num_slots, config.token_dim, device=device)
        self.own_null = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.order = torch.arange(self.seq_len, device=device).repeat(num_slots, 1)
        self.token_cost, self.audit = torch.zeros(2, *shape, device=device)

        # rows 2s and 2s + 1 are the conditional and the unconditional branch of slot s
        self._first_inputs = torch.zeros(2 * num_slots, config.parallel_num, config.dim, device=device)
        cached = config.n_layer, 2 * num_slots, config.n_head, cached_columns(target), config.dim // config.n_head
        self._keys, self._values = torch.zeros(2, *cached, device=device, dtype=precision.type_of(target))

    def complete(self, request: Request, method: Method) -> Request:
        """The request with the target's and the method's defaults filled in.

        Raises:
            ValueError: a setting has the wrong type or is out of range; or as `with_tokens`.
        """
        request = with_tokens(request, self, (self.seq_len, self.config.token_dim))
        defaults = {option.name: getattr(self.defaults, option.name) for option in CAUSAL_OPTIONS}
        return complete(without_lost_noise(request), method, self, CAUSAL_OPTIONS, defaults)

    def prepare(self, request: Request, method: Method) -> Request:
        """A complete request with the method's choices for this device."""
        return method.prepare(request, self)

    def published(self, labels: Tensor, settings: dict) -> Tensor:
        """Tokens [B, L, d] by the authors' sampler, in lockstep; settings as in `CAUSAL_OPTIONS`."""
        with self.precision.fast():
            return sample_published(self._prepared, labels, **settings)

    def admit(self, sequences: list[Sequence]) -> None:
        """Prepares the slots of new sequences: one forward pass over all inputs of their classes but the last."""
        if not sequences:
            return
        requests, null = [sequence.request for sequence in sequences], self.num_classes
        labels = [null if request.label is None else request.label for request in requests]
        own_null = [request.guided and request.cfg_schedule == "linear" for request in requests]
        slots = [sequence.slot for sequence in sequences]
        numbers = self._padded(np.array([slots, labels, own_null]), 2)
        slot, label, has_own = send_integers(numbers, self.device)
        self.tokens.index_fill_(0, slot, 0)
        self.own_null[slot] = has_own.bool()
        rows = torch.cat([2 * slot, 2 * slot + 1])
        for cached in (self._keys, self._values):  # masked values have weight 0, but NaN times 0 would be NaN
            cached.index_fill_(1, rows, 0)
        with self.precision.fast():
            inputs = self._prepared.class_inputs(torch.cat([label, torch.full_like(label, null)]))
            before, last = inputs.split([self.config.cls_token_num - 1, self.config.parallel_num], dim=1)
            self._first_inputs[rows] = last.float()
            column = torch.arange(before.shape[1], device=self.device)
            view = CacheView(self._keys, self._values, rows, column.expand(len(rows), -1), len(column))
            self._prepared.features(before, column.unsqueeze(0), self.target.mask(column, len(column)), view)
        by_kind = defaultdict(list)
        for sequence in sequences:
            by_kind[sequence.request.guided, self._num_given(sequence.request)].append(sequence)
        for (_, count), group in by_kind.items():
            if count:
                self._give(group, count)

    def _num_given(self, request: Request) -> int:
        return self.seq_len - request.num_generated(self.seq_len)

    def _give(self, batch: list[Sequence], count: int) -> None:
        """Takes in the first `count` tokens of sequences, which the user gave.

        One pass has the inputs before token 0, as in the first round of `ar`, and one those of the tokens but the last.
        """
        rows = self.next_rows(batch)
        self.conditions(batch, rows)
        given = np.stack([sequence.request.known.image[:count].numpy() for sequence in batch])  # type: ignore[union-attr]
        tokens = send({"tokens": given}, self.device)["tokens"]
        self.tokens[rows.slot, :count] = tokens
        by_branch, cached = [tokens[:, :-1]], [2 * rows.slot]
        if batch[0].request.guided:
            first = torch.where(self.own_null[rows.slot].unsqueeze(1), self.null_first[rows.slot], tokens[:, 0])
            by_branch.append(torch.cat([first.unsqueeze(1), tokens[:, 1:]], dim=1)[:, :-1])
            cached.append(2 * rows.slot + 1)
        first_column, num_cells = self.config.cls_token_num - 1, self.config.parallel_num
        column = first_column + torch.arange(num_cells, num_cells * count, device=self.device)
        end = first_column + num_cells * count
        with self.precision.fast():
            inputs = self._prepared.token_inputs(self.target.finish(torch.cat(by_branch))).flatten(1, 2)
            row = torch.cat(cached)
            view = CacheView(self._keys, self._values, row, column.expand(len(row), -1), end)
            self._prepared.features(inputs, column.unsqueeze(0), self.target.mask(column, end), view)
        for sequence in batch:
            sequence.num_committed = count

    def encode(self, known: Inpainting, seed: Tensor) -> Tensor:
        """Tokens [L, d], on the CPU, of a given image. Raises ValueError without an autoencoder."""
        if self.vae is None:
            raise ValueError("an image is given and this engine has no autoencoder: load one (vae)")
        pixels = known.to_encode(self.image_size).to(self.device)
        with torch.no_grad(), self.precision.full():
            return self.target.patchify(self.vae.encode(pixels))[0].cpu()

    def next_rows(self, batch: list[Sequence], limit: int | None = None) -> Rows:
        """One row for the next token of each sequence."""
        requests = [sequence.request for sequence in batch]
        slots = np.array([sequence.slot for sequence in batch])
        token = np.array([sequence.num_committed for sequence in batch])
        owner = np.arange(len(batch))
        scales = [guidance_scale(r.cfg, r.cfg_schedule, int(i), self.seq_len) for r, i in zip(requests, token)]
        sent = send(
            {
                "contexts": self._padded(np.stack([slots, token]), 2 if requests[0].guided else 1),
                "sequence": owner,
                "offset": np.zeros_like(owner),
                "slot": slots,
                "position": token,
                "seed": np.array([request.seed for request in requests]),
                "scale": np.array(scales, np.float32)[:, None],
                "temperature": np.array([request.temperature for request in requests], np.float32)[:, None],
            },
            self.device,
        )
        return Rows(
            sequences=batch,
            committed=token.tolist(),
            counts=[1] * len(batch),
            **sent,
            owner=owner,
            iteration=token,
            num_iter=np.full_like(owner, self.seq_len),
        )

    def _padded(self, numbers: np.ndarray, num_branches: int) -> np.ndarray:
        """Numbers int64 [n, B] of B sequences, the last one repeated up to a graph's size, and to whole tiles of rows.

        So a batch is rounded alike in every size, see `mar.head.fill`.
        """
        size = numbers.shape[1]
        in_tiles = filled(num_branches * size) // num_branches
        return np.pad(numbers, ((0, 0), (0, self.graphs.size(in_tiles, per_octave=2) - size)), "edge")

    def conditions(self, batch: list[Sequence], rows: Rows, model: str = "target") -> Tensor:
        """z of the rows [G, R, P dim], G = 2 (unconditional branch second) if the batch is guided: one backbone call.

        At token 0 it also draws the unconditional branch's own first token, by the full chain: it is the branch's next
        input.
        """
        num_branches = 2 if batch[0].request.guided else 1
        num_cells = self.config.parallel_num
        end = self.config.cls_token_num - 1 + num_cells * (max(rows.committed) + 1)
        width = min(-(-end // WIDTH_STEP) * WIDTH_STEP, self._keys.shape[3])
        evaluate = functools.partial(self._conditions, num_branches, width)
        z = self.graphs.run(("conditions", num_branches, width), evaluate, rows.contexts)[:, rows.sequence]
        self._draw_null_first(rows, z)
        return z

    def _conditions(self, num_branches: int, width: int, contexts: Tensor) -> Tensor:
        """z [G, B, P dim] of the next tokens of sequences, which read `width` columns; contexts: see `Rows`."""
        slots, token = contexts
        model, num_cells = self._prepared, self.config.parallel_num
        previous = self.tokens[slots, (token - 1).clamp(min=0)]
        by_branch, rows = [previous], [2 * slots]
        if num_branches == 2:
            is_own = (token == 1) & self.own_null[slots]
            by_branch.append(torch.where(is_own.unsqueeze(1), self.null_first[slots], previous))
            rows.append(2 * slots + 1)
        row, token = torch.cat(rows), token.repeat(num_branches)
        column = self.config.cls_token_num - 1 + num_cells * token.unsqueeze(1)
        column = column + torch.arange(num_cells, device=token.device)
        with self.precision.fast():
            of_tokens = model.token_inputs(self.target.finish(torch.cat(by_branch))).float()
            inputs = torch.where((token == 0).view(-1, 1, 1), self._first_inputs[row], of_tokens)
            view = CacheView(self._keys, self._values, row, column, width)
            mask = self.target.mask(column, width).unsqueeze(1)
            z = model.condition(model.features(inputs, column, mask, view).float(), token)
        return z.unflatten(0, (num_branches, len(slots)))

    def _draw_null_first(self, rows: Rows, z: Tensor) -> None:
        """Draws the unconditional branch's own first token of the sequences that begin, if it has one."""
        fresh = []
        for i, sequence in enumerate(rows.sequences):
            request = sequence.request
            if rows.committed[i] == 0 and request.guided and request.cfg_schedule == "linear":
                fresh.append(i)
        if not fresh:
            return
        own = rows.at(np.pad(fresh, (0, filled(len(fresh)) - len(fresh)), "edge"))
        own = replace(own, position=torch.full_like(own.position, self.seq_len))
        made = BASELINE.denoise(self, "target", own, z[1:, own.sequence])  # type: ignore[arg-type]
        self.null_first[own.slot] = made.tokens
        for i in fresh:
            rows.sequences[i].stats.head_calls += int(made.calls[0])
            rows.sequences[i].stats.head_evaluations += int(made.evaluations[0])

    def num_masked(self, request: Request) -> np.ndarray:
        """The number of tokens left after each iteration, int64 [L]."""
        return np.arange(self.seq_len)[::-1]

    def commit(self, rows: Rows, tokens: Tensor) -> None:
        """Writes the ends of chains [R, d] to their slots."""
        self.tokens[rows.slot, rows.position] = tokens

    def given(self, sequences: list[Sequence]) -> Tensor | None:
        """Which tokens the user gave, bool [B, L]; None if no sequence has given tokens."""
        counts = [self._num_given(sequence.request) for sequence in sequences]
        if not any(counts):
            return None
        return torch.arange(self.seq_len, device=self.device) < send_integers(counts, self.device).unsqueeze(1)

    def results(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens [B, L, d], token costs [B, L], which tokens are finite, bool [B, L])."""
        slots = send_integers([sequence.slot for sequence in sequences], self.device)
        tokens = self.target.finish(self.tokens[slots])
        token_cost, given = self.token_cost[slots], self.given(sequences)
        if given is not None:
            token_cost = token_cost.masked_fill(given, torch.nan)
        return tokens, token_cost, tokens.isfinite().all(-1)

    def so_far(self, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """(tokens [1, L, d], token costs [1, L]) of a running sequence: 0 and NaN for tokens not committed yet."""
        show_costs(self, sequence)
        tokens, token_cost, _ = self.results([sequence])
        is_open = torch.arange(self.seq_len, device=self.device) >= sequence.num_committed
        return tokens.masked_fill(is_open.unsqueeze(-1), 0), token_cost.masked_fill(is_open, torch.nan)

    def decode(self, tokens: Tensor) -> Tensor | None:
        """Images [B, 3, H, W] in 0..1 of tokens [B, L, d]; None without an autoencoder."""
        if self.vae is None:
            return None
        with self.precision.decoding():
            return to_unit(decoded(self._decode, self.target.unpatchify(tokens)))

    def _decode(self, latents: Tensor) -> Tensor:
        """Images of latents [B, c, h, w], rounded alike in every batch."""
        # convolutions of a single image are rounded differently, so it is decoded twice
        several = latents.repeat(2, 1, 1, 1) if len(latents) == 1 else latents.contiguous()
        return self.vae.decode(several)[: len(latents)]  # type: ignore[union-attr]
