"""The MAR runner: owns the models and, in slots allocated once, the tokens and orders of every running sequence."""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Hashable, MutableMapping
from collections.abc import Sequence as Several
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from cspd import kernels
from cspd import noise as philox_noise
from cspd.continuous.rows import Rows, show_costs, without_lost_noise
from cspd.device import Precision, check_fits, send, send_integers
from cspd.graphs import Graphs
from cspd.graphs import compiled as by_compiler
from cspd.inpainting import Inpainting, remembered
from cspd.masked.orders import ORDERS, cosine, largest, timetable
from cspd.method import Method, complete, with_tokens
from cspd.option import MAR_OPTIONS, NUM_ITER
from cspd.pixels import decoded, to_unit
from cspd.request import Request, Sequence
from mar.checkpoint import defaults_of
from mar.head import filled
from mar.model import MAR, following, sample_published
from mar.vae import AutoencoderKL

# An estimate of the memory that slots need, checked before anything is allocated.


def usual_tokens(target: MAR) -> int:
    """The tokens of the largest iteration at the model's default settings."""
    length = target.config.seq_len
    num_iter = min(defaults_of(target.config).num_iter, length)
    masked, _ = cosine(num_iter, length)
    return largest(masked, length)


def bytes_per_slot(target: MAR, tokens: int) -> int:
    """Estimated peak bytes that a slot adds: its state, and the activations of a guided round of `tokens` tokens.

    Not counted: tables of modulations, which take at most an eighth of the device's memory, and the copies of the
    activations that CUDA graphs hold.
    """
    config = target.config
    state = config.seq_len * (4 * config.token_dim + 8)  # float32 tokens, int64 order
    float_bytes, num_branches = 4, 2
    per_layer = 14  # activations of a transformer layer, in widths: norm, qkv, attention, hidden layer twice, residual
    backbone = num_branches * float_bytes * (config.buffer_size + config.seq_len) * config.embed_dim * per_layer
    per_token = 3 * config.diffloss_d + 2 + 8  # modulations and activations of the head, in widths
    head = num_branches * float_bytes * tokens * config.diffloss_w * per_token
    return state + max(backbone, head)


def check_memory(target: MAR, max_batch: int, tokens: int, device: torch.device, copied_bytes: int = 0) -> None:
    """Raises ValueError if `max_batch` slots would not fit into memory; allocates nothing.

    Args:
        tokens: tokens of a sequence's largest iteration. copied_bytes: bytes of weights that will be copied.
    """
    what = f" at {tokens} tokens in an iteration"
    fix = "use a larger num_iter, a smaller model or another device"
    check_fits(bytes_per_slot(target, tokens), max_batch, what, fix, device, copied_bytes)


class ModelInputs(NamedTuple):
    """Sequences as the transformer's inputs, see `MAR.forward`."""

    tokens: Tensor
    order: Tensor
    class_embedding: Tensor


class MARRunner:
    """Owns MAR's models and the slots of running sequences; computes the conditions z of the tokens to predict.

    Args:
        target: the model. num_slots: sequences in flight at most. precision: how it computes, and where.
        noise: the source of randomness: a namespace with the functions of `cspd.noise`.
        draft: a smaller model of the same tokens. vae: their autoencoder, for images.
        graphs: captures and replays work of fixed shape; by default nothing is captured.
        compiled: whether the full backbone and denoising steps run through torch.compile.

    Attributes:
        tuning: a `cspd.continuous.tuning.HeadTuner`, for methods that speculate in the head.
        tokens: float32 [slots, L, d]. order: int64 [slots, L], positions in generation order.
        label: int64 [slots], classes; the number of classes for unconditional images.
        token_cost: float32 [slots, L], the cost of each token, for heat maps; each method defines its meaning.
        audit: float32 [slots, L], nats, the audited divergence of each token, if an audit is asked for.
        caches: those of the cached backbone that sequences in flight use, by shape.
        classes: by model, float32 [classes + 1, D], embeddings of its classes, and last of the null class (label None).
    """

    family = "MAR"
    in_raster_order = False
    tuning: Any = None  # `MARModels.runner` sets it

    def __init__(
        self,
        target: MAR,
        num_slots: int,
        precision: Precision,
        noise: types.ModuleType = philox_noise,
        *,
        draft: MAR | None = None,
        vae: AutoencoderKL | None = None,
        graphs: Graphs | None = None,
        compiled: bool = False,
    ) -> None:
        device = precision.device
        self.target = target
        self.models: dict[str, Any] = {"target": target, "draft": draft}
        self.vae = vae
        self.device, self.precision, self.noise = device, precision, noise
        self.graphs = graphs or Graphs(device, enabled=False)
        self.compiled = compiled
        self.config = target.config
        self.defaults = defaults_of(target.config)
        self.seq_len = target.config.seq_len
        self.num_classes = target.config.class_num
        self.image_size = target.config.img_size
        self._checked_tokens = usual_tokens(target)  # tokens per iteration that memory was checked for

        self.classes = {}
        for name, model in self.models.items():
            if model is not None:
                kernels.fuse(model, device)
                precision.prepare(model)  # before slots take the memory
                self.classes[name] = torch.cat([model.class_emb.weight, model.fake_latent])

        self.num_slots = self.at_once = num_slots
        shape = num_slots, self.seq_len
        self.tokens = torch.zeros(*shape, self.config.token_dim, device=device)
        self.order = torch.zeros(shape, dtype=torch.int64, device=device)
        self.label = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.token_cost = torch.zeros(shape, device=device)
        self.audit = torch.zeros(shape, device=device)
        self.caches: MutableMapping[Hashable, Any] = WeakValueDictionary()
        self._posterior = remembered(self._encode)  # one image is often given for many seeds

    def complete(self, request: Request, method: Method) -> Request:
        """The request with the target's and the method's defaults filled in.

        Raises:
            ValueError: a setting has the wrong type or is out of range, the method needs a draft model and the engine
                has none, or the given part of the image does not fit the model.
        """
        request = with_tokens(request, self, (self.seq_len, self.config.token_dim))
        num_generated = request.num_generated(self.seq_len)
        usual = self.defaults
        # a model has two default temperatures, with guidance and without it
        cfg = usual.cfg if request.cfg is None else request.cfg
        defaults = {
            "num_iter": min(usual.num_iter, num_generated),
            "cfg": usual.cfg,
            "cfg_schedule": usual.cfg_schedule,
            "temperature": usual.temperature_unguided if cfg == 1 else usual.temperature,
            "num_sampling_steps": usual.num_sampling_steps,
        }
        common = (NUM_ITER.but(high=num_generated), *MAR_OPTIONS[1:])
        return complete(without_lost_noise(request), method, self, common, defaults)

    def prepare(self, request: Request, method: Method) -> Request:
        """A complete request with the method's choices for this device. Raises ValueError if memory is too small."""
        masked = timetable(request, self.seq_len).masked
        num_tokens = largest(masked, request.num_generated(self.seq_len))
        # fewer iterations than usual predict more tokens in one, which takes more memory in the head
        if num_tokens > self._checked_tokens:
            check_memory(self.target, self.num_slots, num_tokens, self.device)
            self._checked_tokens = num_tokens
        return method.prepare(request, self)

    def published(self, labels: Tensor, settings: dict) -> Tensor:
        """Tokens [B, L, d] by the sampler of MAR's released code, in lockstep; settings as in `MAR_OPTIONS`."""
        with self.precision.fast():
            return sample_published(self.precision.prepare(self.target), labels, **settings)

    def admit(self, sequences: list[Sequence]) -> None:
        """Prepares the slots of sequences that are about to run."""
        if not sequences:
            return
        for sequence in sequences:
            # a method that drafts `gamma` tokens in each round has no use for the timetable
            if not sequence.request.gamma:
                sequence.schedule = (self.seq_len - self.num_masked(sequence.request)).tolist()
        # sequences with the same kind of order next to each other, so that each kind is arranged in one call
        by_order = defaultdict(list)
        for sequence in sequences:
            by_order[sequence.request.order or "random"].append(sequence)
        sorted_sequences = [sequence for own in by_order.values() for sequence in own]
        requests = [sequence.request for sequence in sorted_sequences]
        labels = [self.num_classes if request.label is None else request.label for request in requests]
        sent = send(
            {
                "slot": np.array([sequence.slot for sequence in sorted_sequences]),
                "label": np.array(labels),
                "seed": np.array([request.seed for request in requests]),
            },
            self.device,
        )
        slot = sent["slot"]
        random_orders = self.noise.order(sent["seed"], self.seq_len)
        parts = random_orders.split([len(own) for own in by_order.values()])
        arranged = [ORDERS[name].arrange(part, self.config.grid_size) for name, part in zip(by_order, parts)]
        self.label[slot] = sent["label"]
        self.order[slot] = torch.cat(arranged)
        self.tokens.index_fill_(0, slot, 0)
        self._give(sequences)

    def _give(self, sequences: list[Sequence]) -> None:
        """Writes the given tokens of sequences to their slots, and moves them to the front of their orders."""
        own = [sequence for sequence in sequences if sequence.request.known]
        given = self.given(own)
        if given is None:
            return
        slots = np.array([sequence.slot for sequence in own])
        tokens = np.stack([sequence.request.known.image.numpy() for sequence in own])  # type: ignore[union-attr]
        sent = send({"slot": slots, "tokens": tokens}, self.device)
        slot = sent["slot"]
        order = self.order[slot]
        # a stable sort keeps the random order of the given tokens, and that of the others
        is_generated = (~given).long().gather(1, order)
        self.order[slot] = order.gather(1, is_generated.argsort(dim=1, stable=True))
        self.tokens[slot] = sent["tokens"].where(given.unsqueeze(-1), 0)
        for sequence in own:
            sequence.num_committed = self.seq_len - sequence.request.num_generated(self.seq_len)

    def given(self, sequences: list[Sequence]) -> Tensor | None:
        """Which tokens the user gave, bool [B, L]; None if no sequence has given tokens."""
        parts = [sequence.request.known for sequence in sequences]
        if not any(parts):
            return None
        nothing = np.zeros(self.seq_len, dtype=bool)
        given = np.stack([~part.generated if part else nothing for part in parts])
        return send({"given": given}, self.device)["given"]

    def encode(self, known: Inpainting, seed: Tensor) -> Tensor:
        """Tokens [L, d], on the CPU, of a given image, for a seed, int64 [1].

        They are drawn from the autoencoder's posterior, like the tokens that MAR was trained on; its mean can be out
        of distribution. Raises ValueError if the engine has no autoencoder.
        """
        mean, deviation = self._posterior(known)
        length, channels = mean.shape
        return mean + deviation * self.noise.latents(seed, torch.arange(length), channels)

    def _encode(self, known: Inpainting) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of an image's tokens, [L, d] each, on the CPU."""
        if self.vae is None:
            raise ValueError("an image is given and this engine has no autoencoder: load one (vae), or give tokens")
        pixels = known.to_encode(self.image_size).to(self.device)
        with torch.no_grad(), self.precision.full():
            mean, log_variance = self.vae.encode(pixels)
        deviation = (log_variance / 2).exp()
        both = torch.cat([mean, deviation]) * self.vae.config.scale
        mean, deviation = self.target.patchify(both).cpu().unbind()
        return mean, deviation

    def next_rows(self, batch: list[Sequence], limit: int | None = None) -> Rows:
        """The rows that the next iteration of each sequence predicts, until at most `limit` tokens are committed."""
        limit = self.seq_len if limit is None else limit
        committed = [sequence.num_committed for sequence in batch]
        counts = []
        for sequence in batch:
            masked = timetable(sequence.request, self.seq_len).masked
            committed_after = self.seq_len - int(masked[sequence.iteration])
            counts.append(min(committed_after, limit) - sequence.num_committed)
        return self.rows(batch, committed, counts)

    def rows(self, batch: list[Sequence], committed: list[int], counts: list[int]) -> Rows:
        """The rows of counts[i] tokens of batch[i] after the first committed[i]; a sequence may occur repeatedly."""
        requests = [sequence.request for sequence in batch]
        slots = [sequence.slot for sequence in batch]
        timetables = [timetable(request, self.seq_len) for request in requests]
        iterations = np.stack([each.iteration for each in timetables])
        scales = np.stack([each.scale for each in timetables])
        num_iter = np.array([request.num_iter for request in requests])
        temperature = np.array([request.temperature for request in requests], np.float32)

        # each row's sequence, its index among the sequence's rows, and its index in the generation order
        owner = np.repeat(np.arange(len(batch)), counts)
        first_rows = np.cumsum(counts) - counts
        offset = np.arange(len(owner)) - first_rows[owner]
        rank = offset + np.array(committed)[owner]
        sent = send(
            {
                "contexts": self.padded_batch([slots, committed]),
                "sequence": owner,
                "offset": offset,
                "rank": rank,
                "slot": np.array(slots)[owner],
                "seed": np.array([request.seed for request in requests])[owner],
                "scale": scales[owner, rank, None].astype(np.float32),
                "temperature": temperature[owner, None],
            },
            self.device,
        )
        # all numbers from the CPU were sent in one copy; positions are looked up in the orders on the device
        return Rows(
            sequences=batch,
            committed=committed,
            counts=counts,
            position=self.order[sent["slot"], sent.pop("rank")],
            **sent,
            owner=owner,
            iteration=iterations[owner, rank],
            num_iter=num_iter[owner],
        )

    def padded_batch(self, numbers: Several[Several[int] | np.ndarray]) -> np.ndarray:
        """Numbers [n, B] of B sequences as int64 [n, size]: the last sequence is repeated up to a graph's size."""
        size = len(numbers[0])
        padding = self.graphs.size(size, per_octave=2) - size
        return np.pad(np.array(numbers), ((0, 0), (0, padding)), "edge")

    def conditions(self, batch: list[Sequence], rows: Rows, model: str = "target") -> Tensor:
        """z of the rows [G, R, D], G = 2 (unconditional branch second) if the batch is guided: one backbone call."""
        num_branches = 2 if batch[0].request.guided else 1
        most = self.graphs.size(filled(max(rows.counts)))
        padded = self.models[model].padded(max(rows.committed))
        # the shapes depend on the largest counts only, so that a captured graph can be replayed
        evaluate = functools.partial(self._conditions, model, num_branches, padded, most)
        z = self.graphs.run(("conditions", model, num_branches, padded, most), evaluate, rows.contexts)
        return z[:, rows.sequence, rows.offset]

    def _conditions(self, model: str, num_branches: int, padded: int, most: int, contexts: Tensor) -> Tensor:
        """z [G, B, most, D] of the tokens after the committed ones; the encoder sees `padded` committed tokens.

        Args:
            contexts: see `Rows`.
        """
        slots, committed = contexts
        tokens, order, embedding = self.inputs(model, slots, num_branches)
        committed = committed.repeat(num_branches)
        positions = following(order, committed, most)
        backbone: Any = self.precision.prepare(self.models[model])
        if self.compiled:
            backbone = functools.partial(by_compiler(MAR.forward, "the backbone"), backbone)
            padded = max(padded, 2)  # for 0 and 1 torch.compile would make programs of their own
        with self.precision.fast():
            z = backbone(tokens, order, committed, embedding, positions, padded).float()
        return z.unflatten(0, (num_branches, len(slots)))

    def inputs(self, model: str, slots: Tensor, num_branches: int) -> ModelInputs:
        """The inputs of slots [B], repeated for each branch, the unconditional branch second."""
        embedding = self.classes[model][self.label[slots]]
        if num_branches == 2:
            unconditional = self.models[model].fake_latent.expand_as(embedding)
            embedding = torch.cat([embedding, unconditional])
        tokens = self.tokens[slots].repeat(num_branches, 1, 1)
        order = self.order[slots].repeat(num_branches, 1)
        return ModelInputs(tokens, order, embedding)

    def num_masked(self, request: Request) -> np.ndarray:
        """The number of masked tokens after each iteration of a resolved request, int64 [num_iter]."""
        return timetable(request, self.seq_len).masked

    def commit(self, rows: Rows, tokens: Tensor) -> None:
        """Writes predicted tokens [R, d] to their slots."""
        self.tokens[rows.slot, rows.position] = tokens

    def results(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens [B, L, d], token costs [B, L], which tokens are finite, bool [B, L] in generation order)."""
        slots = send_integers([sequence.slot for sequence in sequences], self.device)
        tokens = self.tokens[slots]
        finite = tokens.isfinite().all(-1)
        token_cost = self.token_cost[slots]
        given = self.given(sequences)
        if given is not None:
            token_cost = token_cost.masked_fill(given, torch.nan)
        return tokens, token_cost, finite.gather(1, self.order[slots])

    def so_far(self, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """(tokens [1, L, d], token costs [1, L]) of a running sequence: 0 and NaN for tokens not committed yet."""
        show_costs(self, sequence)
        tokens, token_cost, _ = self.results([sequence])
        # slots may hold drafts that were rejected
        tokens[:, self.order[sequence.slot, sequence.num_started :]] = 0
        return tokens, token_cost.masked_fill((tokens == 0).all(-1), torch.nan)

    def decode(self, tokens: Tensor) -> Tensor | None:
        """Images [B, 3, H, W] in 0..1 of tokens [B, L, d]; None without an autoencoder."""
        if self.vae is None:
            return None
        latents = self.target.unpatchify(tokens) / self.vae.config.scale
        with self.precision.decoding():
            return to_unit(decoded(self._decode, latents))

    def _decode(self, latents: Tensor) -> Tensor:
        """Images of latents [B, c, h, w], rounded alike in every batch."""
        # convolutions of a single image are rounded differently, so it is decoded twice
        several = latents.repeat(2, 1, 1, 1) if len(latents) == 1 else latents.contiguous()
        return self.vae.decode(several)[: len(latents)]  # type: ignore[union-attr]
