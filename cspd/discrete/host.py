"""The VQ host: owns the models and, in slots allocated once, the codes and key-value caches of running sequences."""

from __future__ import annotations

import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cspd import noise as philox_noise
from cspd.discrete import row_ends
from cspd.discrete.batch import Batch, of_copies
from cspd.discrete.cache import MOST_NODES, Cache, most_columns
from cspd.discrete.condition import Conditions, check_encoder, encode_texts, take_in
from cspd.discrete.forward import forward
from cspd.discrete.past import PastFeatures
from cspd.discrete.prefix import encoder, prefill, with_prefix
from cspd.discrete.probabilities import guide, likeliest_point, probabilities
from cspd.families import VQ_OPTIONS
from cspd.graphs import Graphs
from cspd.method import Method, complete
from cspd.noise import Purpose
from cspd.pixels import decoded, to_unit
from cspd.precision import Precision, Stopwatch
from cspd.sequence import Request, Sequence
from cspd.transfer import send_integers
from cspd.vq import reference
from cspd.vq.eagle import Eagle
from cspd.vq.gpt import GPT
from cspd.vq.registry import defaults_of
from cspd.vq.steps import steps
from cspd.vq.text import TextEncoder
from cspd.vq.tokenizer import VQModel


class VQHost:
    """Answers what a method asks: the distributions after drafted codes, and to commit codes.

    Args:
        target: the model. num_slots: sequences in flight at most. device, precision: where and how it computes.
        noise: the source of randomness: a namespace with the functions of `cspd.noise`.
        draft: a smaller model of the same codes; eagle: a drafter on the target's features. tokenizer: of the codes.
        text_encoder: of texts.
        tuning: a `cspd.discrete.tuning.Tuning`, for methods that leave how far they draft to be decided.
        compiled: run the models' layers through torch.compile. graphs: run what has a fixed shape; by default as plain
            calls.

    Attributes:
        codes: int64 [slots, L + MOST_NODES], raster order. heat: float32, the same, for pictures.
        draws: float64, the same, one inside (0, 1) for each code. known: int64 [slots], codes committed.
        draft_calls: forwards of draft models in this round. graphs: that rounds run as, the engine's.
        past: what EAGLE's drafter takes in beside the codes.
        late: whether a round is counted when the next one is on its way; unread: rounds that are not counted yet, by
            the sequences' key. windows, nodes: of Jacobi methods, see `cspd.discrete.window.kept_windows` and
            `cspd.discrete.jacobi_same_image.kept_nodes`.
    """

    family = "VQ"

    def __init__(
        self,
        target: GPT,
        num_slots: int,
        device: torch.device,
        precision: Precision,
        noise: types.ModuleType = philox_noise,
        *,
        draft: GPT | None = None,
        eagle: Eagle | None = None,
        tokenizer: VQModel | None = None,
        text_encoder: TextEncoder | None = None,
        tuning: Any = None,
        compiled: bool = False,
        graphs: Graphs | None = None,
    ) -> None:
        models = {"target": target, "draft": draft, "eagle": eagle}
        self.models = {name: model and precision.prepare(model) for name, model in models.items()}
        self.models["tokenizer"], self.text_encoder, self.tuning = tokenizer, text_encoder, tuning
        self.target, self.device, self.precision, self.noise = target, device, precision, noise
        self.compiled, self.graphs = compiled, graphs or Graphs(device, enabled=False)
        self.config, self.num_slots = target.config, num_slots
        self.seq_len, self.num_classes = target.config.block_size, target.config.num_classes
        self.defaults = defaults_of(target.config)
        self.image_size = self.defaults.image_size
        length = self.config.block_size + MOST_NODES  # a round may commit past the end
        self._inputs = torch.zeros(num_slots, 1 + length, dtype=torch.int64, device=device)  # the first: no code
        self.codes = self._inputs[:, 1:]
        self.heat = torch.zeros(num_slots, length, device=device)
        self.known = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.draws = torch.zeros(num_slots, length, dtype=torch.float64, device=device)
        self.conditions = Conditions(self.models, num_slots, device)
        self.unread: dict[Hashable, Any] = {}
        self._caches: dict[str, Cache] = {}
        self.past = PastFeatures(num_slots, length, self.config.dim, device)
        self.windows: tuple[Tensor, Tensor] | None = None
        self.nodes: Tensor | None = None
        self.encode = encoder(self)
        self.late = device.type == "cuda"

    def adopt(self, other: VQHost) -> None:
        """Takes over what another host of the same models has measured."""
        self.tuning = other.tuning

    def forget(self, key: Hashable) -> None:
        """Drops what is not counted of sequences of one key, none of which is left."""
        self.unread.pop(key, None)

    def clear(self) -> None:
        """Drops what is not counted of all sequences."""
        self.unread.clear()

    def check(self, request: Request, method: Method) -> Request:
        """The request with the target's and the method's defaults filled in.

        Raises:
            ValueError: a setting is of the wrong kind or out of range, a model is missing, or as `with_prefix`.
        """
        published = {option.name: getattr(self.defaults, option.name) for option in VQ_OPTIONS}
        request = complete(with_prefix(request, self), method, VQ_OPTIONS, published, self.num_classes)
        check_encoder(request, self)
        method.check(request, self)
        return request

    def resolve(self, request: Request, method: Method) -> Request:
        """A checked request with what the method decides for this device; its texts are encoded."""
        encode_texts(request, self)
        return method.resolve(request, self)

    def text_of(self, text: str) -> Tensor:
        """A text as the models take it in, on the CPU: its tokens' features float32 [n, caption_dim], or int64 [n]."""
        return self.text_encoder.features(text, self.config.prefix_length, self.device)

    def published(self, labels: Tensor, settings: dict) -> Tensor:
        """Codes [B, L] by LlamaGen's sampler as its authors published it, in lockstep; settings of `VQ_OPTIONS`."""
        with self.precision.fast():
            return reference.sample(self.models["target"], labels, **settings)

    def admit(self, sequences: list[Sequence]) -> None:
        """Prepares the slots of sequences that are about to run: their draws, and empty caches."""
        if sequences:
            slots, seeds = send_integers([[s.slot, s.request.seed] for s in sequences], self.device).T
            position, none = steps(self.draws.shape[1], self.device), steps(1, self.device)
            self.known.index_fill_(0, slots, 0)
            self.draws[slots] = self.noise.fine_uniform(seeds.unsqueeze(1), Purpose.CODE, position, none, none)
            for cache in self._caches.values():
                cache.clear(slots)
            self.past.clear(slots)
            take_in(self, sequences)
            prefill(self, sequences)

    def begin(self, watch: Stopwatch | None) -> None:
        """Begins a round, whose forwards `watch` times if there is one."""
        self._watch, self.draft_calls = watch, 0

    def _start(self, phase: str) -> None:
        if self._watch is not None:
            self._watch.start(phase)

    def cache(self, model: str) -> Cache:
        """The key-value cache of "target", "draft" or "eagle", allocated on first use."""
        if model not in self._caches:
            module = self.models[model]
            size = most_columns(self.config), len(module.layers), self.num_slots  # the target's: weights show none
            self._caches[model] = Cache(module.config, *size, self.device, self.precision.type_of(module))
        return self._caches[model]

    def features(
        self,
        batch: Batch,
        codes: Tensor,
        start: Tensor | int = 0,
        model: str = "target",
        *,
        depth: Tensor | None = None,
        seen: Tensor | None = None,
        columns: Tensor | None = None,
        past: Tensor | None = None,
    ) -> Tensor:
        """Features [copies, B, N, dim] after codes [B, N]: one forward, which leaves keys and values in the cache.

        Args:
            start: all inputs before this position are seen by all: int64 [B], none beyond the last committed input, or
                for all so many beyond it.
            depth: int64 [N] or [B, N], positions of the codes beyond `start`; by default one after the other.
            seen: `seen_of` bool [N, M] or [B, N, M], which of the M inputs from `start` on each code looks at; by
                default its own and those before it.
            columns: int64 [N], where the codes' keys and values go, beyond `start`; by default one after the other.
            past: [copies, B, N, dim], to "eagle": the features before the codes.
        """
        most = batch.kind.most
        together = isinstance(start, int) and batch.kind.together and self.conditions.before is None
        if isinstance(start, Tensor):
            start = of_copies(batch, start)
        else:
            most, start = most + start, batch.known_rows + start if start else batch.known_rows
        if depth is None:
            depth = steps(codes.shape[1], self.device)
        elif depth.dim() == 2:
            depth = of_copies(batch, depth)
        if seen is not None and seen.dim() == 3:
            seen = of_copies(batch, seen)
        past = None if past is None else past.transpose(0, 1).flatten(0, 1)
        self._start("backbone" if model == "target" else "draft")
        self.draft_calls += model != "target"
        if self.models[model].config.row_end is None:
            features = forward(self, batch, model, codes, start, most, together, depth, seen, columns, past)
        else:
            features = row_ends.features(self, batch, model, codes, start, most, depth, seen)
        self._start("other")
        return features.unflatten(0, (len(batch), batch.copies)).transpose(0, 1)

    def distributions(self, batch: Batch, features: Tensor, model: str = "target", soft: bool = False) -> Tensor:
        """Guided, filtered code distributions, float32 [B, N, V], after features [copies, B, N, dim].

        At temperature 0 everything is on the likeliest code; `soft` takes temperature 1 there, for rules that choose
        the likeliest code themselves.
        """
        output = self.models["target" if model == "eagle" else model].output
        self._start("backbone" if model == "target" else "draft")
        with self.precision.fast():
            logits = output(features.transpose(0, 1)).transpose(0, 1)  # as they lie in memory: one large product
        self._start("other")
        logits = guide(logits.float(), batch.scale)
        if batch.greedy and not soft:
            return likeliest_point(logits)
        return probabilities(logits, batch.temperature, batch.filter)

    def drawn(self, batch: Batch, ahead: Tensor) -> Tensor:
        """As `uniform`, the request's own draws: a draft that equals the target draws what the target would have."""
        return self.draws[batch.slot.unsqueeze(1), batch.known_t.unsqueeze(1) + ahead]

    def uniform(
        self, batch: Batch, purpose: Tensor | int, ahead: Tensor, index: Tensor, fresh: Tensor | int = 1
    ) -> Tensor:
        """Draws inside (0, 1), float64 [B, n], for the codes `ahead`, int64 [n] or [B, n], of the committed ones.

        Args:
            purpose: of all, or of each, int64 [n]: few calls are faster than many.
            index: int64 [n] or [B, n], which of several draws for a code.
            fresh: 1 where the draw is this round's alone, as where a decision looks at it and the code may be judged
                again, of all or of each, int64 [n]. Others, 0, may only be looked at in the round that commits the
                code.
        """
        position = batch.known_t.unsqueeze(1) + ahead
        step = batch.iteration.unsqueeze(1) * fresh
        return self.noise.fine_uniform(batch.seed.unsqueeze(1), purpose, position, step, index)

    def last(self, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        """The codes [B, count] of the last `count` inputs and the position int64 [B] of the first of them, at least 0.

        The input at position p is the code before p; at 0 it is no code but the condition's last input, and
        beyond the committed codes anything.
        """
        start = (batch.known_t - (count - 1)).clamp(min=0) if count > 1 else batch.known_t
        position = start.unsqueeze(1) + steps(count, self.device)
        return self._inputs[batch.slot.unsqueeze(1), position], start

    def commit(self, batch: Batch, codes: Tensor, heat: Tensor) -> None:
        """Writes codes and heat [B, n] after the committed ones; what is too much is overwritten later or left out."""
        place = batch.known_t.unsqueeze(1) + steps(codes.shape[1], self.device)
        slot = batch.slot.unsqueeze(1)
        self.codes[slot, place] = codes
        self.heat[slot, place] = heat

    def compact(self, batch: Batch, path: Tensor) -> None:
        """Moves keys and values of the last forward's nodes path[:, i], int64 [B, n], to the i-th place."""
        if self.config.row_end is not None:
            row_ends.compact(self, batch, path)
            return
        start = self.conditions.columns(batch, batch.known_rows).unsqueeze(1)
        source = start + of_copies(batch, path)
        target = start + steps(path.shape[1], self.device)
        self.cache("target").move(batch.rows, source, target)

    def results(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
        """(codes [B, L], heat [B, L], which are codes and not -1, bool [B, L]) of sequences."""
        slots = send_integers([s.slot for s in sequences], self.device)
        codes = self.codes[slots, : self.seq_len]
        return codes, self.heat[slots, : self.seq_len], codes >= 0

    def so_far(self, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """(codes [1, L], heat [1, L]) of a running sequence, -1 and NaN where they are unknown."""
        codes, heat, _ = self.results([sequence])
        unknown = steps(self.seq_len, self.device) >= sequence.num_committed
        return codes.masked_fill(unknown, -1), heat.masked_fill(unknown, torch.nan)

    def decode(self, codes: Tensor) -> Tensor | None:
        """Images [B, 3, H, W] in 0..1 of codes [B, L] (-1 as 0), resized as published; None without tokenizer."""
        tokenizer = self.models["tokenizer"]
        if tokenizer is None:
            return None
        with self.precision.full():
            images = decoded(tokenizer.decode, codes.clamp(min=0))
        if images.shape[-1] > self.image_size:
            images = functional.interpolate(images, (self.image_size, self.image_size), mode="bicubic")
        return to_unit(images)
