"""The MAR runner: owns the models and, in slots allocated once, the tokens and orders of every running sequence."""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cspd import kernels
from cspd import noise as philox_noise
from cspd.device import Precision, check_fits, send, send_integers
from cspd.graphs import Graphs
from cspd.heads.chain import Rows
from cspd.masked.orders import ORDERS, cosine, largest, timetable
from cspd.method import Method, complete, with_tokens
from cspd.option import MAR_OPTIONS, NUM_ITER
from cspd.request import Known, Request, Sequence, decoded, remembered, to_unit
from mar.checkpoint import defaults_of
from mar.head import filled
from mar.model import MAR, following, sample_published
from mar.vae import AutoencoderKL

# Tokens that are known from the start: written to their slots, first in their orders.


def encoder(runner: Any) -> Callable[[Known, Tensor], Tensor]:
    """Makes tokens [L, d], on the CPU, of a picture by a `MARRunner`'s autoencoder, for a seed, int64 [1].

    They are drawn from the autoencoder's posterior, as those that MAR was trained on. Its mean can be far from them.
    What it finds of a picture is remembered for other seeds. Raises ValueError where there is no autoencoder.
    """
    posterior = remembered(functools.partial(_posterior, runner))

    def encode(known: Known, seed: Tensor) -> Tensor:
        mean, deviation = posterior(known)
        length, channels = mean.shape
        return mean + deviation * runner.noise.latents(seed, torch.arange(length), channels)

    return encode


def _posterior(runner: Any, known: Known) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a picture's tokens, [L, d] each, on the CPU."""
    if runner.vae is None:
        raise ValueError("an image is given and this engine has no autoencoder to encode it: give it one, or tokens")
    pixels = known.to_encode(runner.image_size).to(runner.device)
    with torch.no_grad(), runner.precision.full():
        mean, log_variance = runner.vae.encode(pixels)
    both = torch.cat([mean, (log_variance / 2).exp()]) * runner.vae.config.scale
    return runner.target.patchify(both).cpu().unbind()


def given(runner: Any, sequences: list[Sequence]) -> Tensor | None:
    """See `MARRunner.given`."""
    knowns = [sequence.request.known for sequence in sequences]
    if not any(knowns):
        return None
    nothing = np.zeros(runner.seq_len, dtype=bool)
    kept = np.stack([~known.made if known else nothing for known in knowns])
    return send({"kept": kept}, runner.device)["kept"]


def give(runner: Any, sequences: list[Sequence]) -> None:
    """Writes the tokens that sequences know from the start; the others follow them in the order that they had."""
    own = [sequence for sequence in sequences if sequence.request.known]
    kept = given(runner, own)
    if kept is None:
        return
    tokens = np.stack([sequence.request.known.image.numpy() for sequence in own])  # type: ignore[union-attr]
    sent = send({"slot": np.array([sequence.slot for sequence in own]), "tokens": tokens}, runner.device)
    slot = sent["slot"]
    order = runner.order[slot]
    is_made = (~kept).long().gather(1, order)
    runner.order[slot] = order.gather(1, is_made.argsort(dim=1, stable=True))
    runner.tokens[slot] = sent["tokens"].where(kept.unsqueeze(-1), 0)
    for sequence in own:
        sequence.num_committed = runner.seq_len - sequence.request.num_made(runner.seq_len)


# Whether as many sequences as are to be in flight fit into memory; estimated before anything is allocated.


def usual_tokens(target: MAR) -> int:
    """The tokens of the largest iteration by the published settings."""
    length = target.config.seq_len
    masked, _ = cosine(min(defaults_of(target.config).num_iter, length), length)
    return largest(masked, length)


def bytes_per_slot(target: MAR, tokens: int) -> int:
    """Estimated peak bytes a slot adds: state, and the activations of a guided round that predicts so many tokens.

    Not counted: tables of modulations, which take up to an eighth of the device's memory and are made in parts or not
    at all where they would take more, and what graphs keep of the same activations beside PyTorch's cache.
    """
    config = target.config
    state = config.seq_len * (4 * config.token_dim + 8)
    activations = 14  # of a transformer's layer: norm, qkv, attention, hidden layer twice, residual
    backbone = 2 * 4 * (config.buffer_size + config.seq_len) * config.embed_dim * activations
    head = 4 * 2 * tokens * config.diffloss_w * (3 * config.diffloss_d + 2 + 8)
    return state + max(backbone, head)


def check_memory(target: MAR, max_batch: int, tokens: int, device: torch.device, num_branches: int = 0) -> None:
    """Raises ValueError, before allocating, where `max_batch` slots would not fit into memory.

    Args:
        tokens: of the largest iteration of a sequence. copies: bytes of weights that are still to be copied.
    """
    fix = "use a larger num_iter, a smaller model or another device"
    check_fits(
        bytes_per_slot(target, tokens), max_batch, f" at {tokens} tokens in an iteration", fix, device, num_branches
    )


def by_sequence(runner: Any, numbers: Several[Several[int] | np.ndarray]) -> np.ndarray:
    """Numbers [n, B], n of each sequence, as int64 [n, size]: the last sequence is repeated."""
    size = len(numbers[0])
    padding = runner.graphs.size(size, per_octave=2) - size
    return np.pad(np.array(numbers), ((0, 0), (0, padding)), "edge")


# The MAR runner: owns the models and, in slots allocated once, the tokens and orders of every running sequence.


class MARRunner:
    """Answers what a method asks: which rows an iteration predicts, their z, and to commit tokens.

    Args:
        target: the model. num_slots: sequences in flight at most. device, precision: where and how it computes.
        noise: the source of randomness: a namespace with the functions of `cspd.noise`.
        draft: a smaller model of the same tokens. vae: the autoencoder of them, for images.
        tuning: a `cspd.heads.tuning.Tuning`, for methods that speculate in the head.
        graphs: run what has a fixed shape; by default as plain calls.

    Attributes:
        token_cost: float32 [slots, L], what each token cost, for pictures; a method says what it means.
        audit: float32 [slots, L], nats, what an audit found of each token, where one is asked for.
        round_state: state that methods keep between rounds, by the key of their sequences.
        classes: float32 [classes + 1, D], embeddings of each model's classes, and last of the null class (label None).
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
        tuning: Any = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.models, self.vae, self.tuning = {"target": target, "draft": draft}, vae, tuning
        for model in filter(None, self.models.values()):
            kernels.fuse(model.head, device)
        self.seq_len, self.num_classes = target.config.seq_len, target.config.class_num
        self.image_size = target.config.img_size
        self.defaults = defaults_of(target.config)
        self._largest = usual_tokens(target)
        self.target, self.device, self.precision, self.noise = target, device, precision, noise
        self.graphs = graphs or Graphs(device, enabled=False)
        for model in filter(None, self.models.values()):
            precision.prepare(model)  # before slots take the memory
        self.config, self.num_slots = target.config, num_slots
        length = self.config.seq_len
        self.tokens = torch.zeros(num_slots, length, self.config.token_dim, device=device)
        self.order = torch.zeros(num_slots, length, dtype=torch.int64, device=device)
        self.label = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.token_cost = torch.zeros(num_slots, length, device=device)
        self.audit = torch.zeros(num_slots, length, device=device)
        self.round_state: dict[Hashable, dict] = defaultdict(dict)
        self.classes = {name: _classes(model) for name, model in self.models.items() if model is not None}
        self.encode = encoder(self)

    def adopt(self, other: MARRunner) -> None:
        """Takes over what another model runner of the same models was tuned by."""
        self.tuning = other.tuning

    def forget(self, key: Hashable) -> None:
        """Drops what methods keep of sequences of one key, none of which is left."""
        self.round_state.pop(key, None)

    def clear(self) -> None:
        """Drops what methods keep of all sequences."""
        self.round_state.clear()

    def check(self, request: Request, method: Method) -> Request:
        """The request with the target's and the method's defaults filled in.

        Raises:
            ValueError: a setting is of the wrong kind or out of range, the method needs a model that is not there, or
                what is known of the image does not fit.
        """
        request = with_tokens(request, self, (self.seq_len, self.config.token_dim))
        num_made, published = request.num_made(self.seq_len), self.defaults
        unguided = (published.cfg if request.cfg is None else request.cfg) == 1
        defaults = {
            "num_iter": min(published.num_iter, num_made),
            "cfg": published.cfg,
            "cfg_schedule": published.cfg_schedule,
            "temperature": published.temperature_unguided if unguided else published.temperature,
            "num_sampling_steps": published.num_sampling_steps,
        }
        common = (NUM_ITER.but(high=num_made), *MAR_OPTIONS[1:])
        request = complete(request, method, common, defaults, self.num_classes)
        method.check(request, self)
        if "draft" in method.uses(request) and self.models["draft"] is None:
            raise ValueError(
                f"method={method.name!r} needs a draft model and this engine has none: give it to the engine's models,"
                " to load(..., draft=file), or with --draft-checkpoint on the command line"
            )
        return request

    def resolve(self, request: Request, method: Method) -> Request:
        """A checked request with what the method decides for this device. Raises ValueError on too little memory."""
        tokens = largest(timetable(request, self.seq_len).masked, request.num_made(self.seq_len))
        if tokens > self._largest:  # in an iteration, than memory was checked for
            check_memory(self.target, self.num_slots, tokens, self.device)
            self._largest = tokens
        return method.resolve(request, self)

    def published(self, labels: Tensor, settings: dict) -> Tensor:
        """Tokens [B, L, d] by MAR's sampler as its authors published it, in lockstep; settings of `MAR_OPTIONS`."""
        with self.precision.fast():
            return sample_published(self.precision.prepare(self.target), labels, **settings)

    def admit(self, sequences: list[Sequence]) -> None:
        """Prepares the slots of sequences that are about to run."""
        if not sequences:
            return
        by_order = defaultdict(list)
        for sequence in sequences:
            by_order[sequence.request.order or "random"].append(sequence)
        together = [sequence for own in by_order.values() for sequence in own]
        sent = send(
            {
                "slot": np.array([s.slot for s in together]),
                "label": np.array([self.num_classes if s.request.label is None else s.request.label for s in together]),
                "seed": np.array([s.request.seed for s in together]),
            },
            self.device,
        )
        slot, random = sent["slot"], self.noise.order(sent["seed"], self.seq_len)
        of_kinds = random.split([len(own) for own in by_order.values()])
        arranged = [ORDERS[name].arrange(own, self.config.grid_size) for name, own in zip(by_order, of_kinds)]
        self.label[slot] = sent["label"]
        self.order[slot] = torch.cat(arranged)
        self.tokens.index_fill_(0, slot, 0)
        give(self, sequences)

    def next_rows(self, batch: list[Sequence], limit: int | None = None) -> Rows:
        """The rows that the next iteration of each sequence predicts; up to `limit` known tokens in all."""
        length = self.seq_len
        counts = []
        for sequence in batch:
            masked = timetable(sequence.request, length).masked
            known = length - int(masked[sequence.iteration])
            counts.append(min(known, length if limit is None else limit) - sequence.num_committed)
        return self.rows(batch, [s.num_committed for s in batch], counts)

    def rows(self, batch: list[Sequence], known: list[int], counts: list[int]) -> Rows:
        """The rows of the next counts[i] tokens of batch[i] after known[i]; a sequence may be there more than once."""
        owner = np.repeat(np.arange(len(batch)), counts)
        offset = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        rank = offset + np.asarray(known)[owner]
        requests = [sequence.request for sequence in batch]
        timetables = [timetable(request, self.seq_len) for request in requests]
        scales = np.stack([each.scale for each in timetables])
        iterations = np.stack([each.iteration for each in timetables])
        slots = [sequence.slot for sequence in batch]
        sent = send(
            {
                "contexts": by_sequence(self, [slots, known]),
                "sequence": owner,
                "offset": offset,
                "rank": rank,
                "slot": np.array(slots)[owner],
                "seed": np.array([request.seed for request in requests])[owner],
                "scale": scales[owner, rank, None].astype(np.float32),
                "temperature": np.array([request.temperature for request in requests], np.float32)[owner, None],
            },
            self.device,
        )
        return Rows(
            sequences=batch,
            known=known,
            counts=counts,
            position=self.order[sent["slot"], sent.pop("rank")],
            **sent,
            owner=owner,
            iteration=iterations[owner, rank],
            num_iter=np.array([request.num_iter for request in requests])[owner],
        )

    def conditions(self, batch: list[Sequence], rows: Rows, model: str = "target") -> Tensor:
        """z of the rows [G, R, D], G = 2 (null class second) where the batch is guided: one backbone call."""
        num_branches, most = 2 if batch[0].request.guided else 1, self.graphs.size(filled(max(rows.counts)))
        padded = self.models[model].padded(max(rows.known))  # type: ignore[union-attr]
        evaluate = functools.partial(self._conditions, model, num_branches, padded, most)
        z = self.graphs.run(("conditions", model, num_branches, padded, most), evaluate, rows.contexts)
        return z[:, rows.sequence, rows.offset]

    def _conditions(self, model: str, num_branches: int, padded: int, most: int, contexts: Tensor) -> Tensor:
        """z [G, B, most, D] of the tokens after those known, of which the encoder sees `padded`.

        Args:
            contexts: see `Rows`.
        """
        backbone = self.precision.prepare(self.models[model])  # type: ignore[type-var]
        slots, known = contexts
        tokens, order = self.tokens[slots], self.order[slots]
        embedding = self.classes[model][self.label[slots]]
        if num_branches == 2:
            embedding = torch.cat([embedding, backbone.fake_latent.expand_as(embedding)])  # type: ignore[union-attr]
        inputs = tokens, order, known, following(order, known, most)
        tokens, order, known, positions = (each.repeat(num_branches, *[1] * (each.dim() - 1)) for each in inputs)
        with self.precision.fast():
            z = backbone(tokens, order, known, embedding, positions, padded).float()  # type: ignore[misc]
        return z.unflatten(0, (num_branches, len(slots)))

    def given(self, sequences: list[Sequence]) -> Tensor | None:
        """Which tokens are known from the start, bool [B, L]; None if no sequence has such tokens."""
        return given(self, sequences)

    def num_masked(self, request: Request) -> np.ndarray:
        """How many tokens are unknown after each iteration of a resolved request, int64 [num_iter]."""
        return timetable(request, self.seq_len).masked

    def commit(self, rows: Rows, tokens: Tensor) -> None:
        """Writes predicted tokens [R, d] to their slots."""
        self.tokens[rows.slot, rows.position] = tokens

    def results(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens [B, L, d], heat [B, L], which tokens are finite, bool [B, L] in generation order) of sequences."""
        slots = send_integers([s.slot for s in sequences], self.device)
        tokens = self.tokens[slots]
        finite = tokens.isfinite().all(-1)
        token_cost = self.token_cost[slots]
        known = given(self, sequences)
        if known is not None:
            token_cost = token_cost.masked_fill(known, torch.nan)
        return tokens, token_cost, finite.gather(1, self.order[slots])

    def so_far(self, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """(tokens [1, L, d], heat [1, L]) of a running sequence, 0 and NaN where they are not committed."""
        sequence.refresh()
        tokens, token_cost, _ = self.results([sequence])
        tokens[:, self.order[sequence.slot, sequence.num_started :]] = 0  # drafts that were rejected
        return tokens, token_cost.masked_fill((tokens == 0).all(-1), torch.nan)

    def decode(self, tokens: Tensor) -> Tensor | None:
        """Images [B, 3, H, W] in 0..1 of tokens [B, L, d]; None without autoencoder."""
        if self.vae is None:
            return None
        latents = self.target.unpatchify(tokens) / self.vae.config.scale
        with self.precision.full():
            return to_unit(decoded(self._decode, latents))

    def _decode(self, latents: Tensor) -> Tensor:
        """Images of latents [B, c, h, w], rounded alike in every batch: convolutions of a single image are not."""
        several = latents.repeat(2, 1, 1, 1) if len(latents) == 1 else latents.contiguous()
        return self.vae.decode(several)[: len(latents)]  # type: ignore[union-attr]


def _classes(model: MAR) -> Tensor:
    """Embeddings of a model's classes and of the null class [classes + 1, D]."""
    return torch.cat([model.class_emb.weight, model.fake_latent])
