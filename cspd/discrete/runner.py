"""The VQ model runner: owns the models and the slots with the tokens and caches of running sequences."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cspd import noise as philox_noise
from cspd.device import Precision, send, send_integers
from cspd.discrete.batch import Batch, PastFeatures, alike, packed, per_branch, unpacked
from cspd.discrete.distributions import guide, likeliest_point, probabilities
from cspd.discrete.gpt import GPT, sample_published
from cspd.discrete.kv_cache import MOST_NODES, KVCache, most_columns, stepped
from cspd.discrete.registry import defaults_of
from cspd.discrete.row_ends import RowColumns, mask_with_row_ends, reserved, row_columns, sees_with_row_ends
from cspd.discrete.text import PLACE, TextEncoder
from cspd.graphs import Graphs, compiled
from cspd.inpainting import Inpainting, remembered
from cspd.method import Method, complete, with_tokens
from cspd.noise import Purpose
from cspd.option import VQ_OPTIONS
from cspd.pixels import decoded, to_unit
from cspd.request import Request, Sequence, Stopwatch
from cspd.terminal import shortened
from cspd.transformer import CacheView, steps


def _layers(
    module: Any,
    inputs: Tensor,
    table: Tensor,
    mask: Tensor | None,
    view: CacheView,
    past: Tensor | None,
) -> Tensor:
    """Features of a model's layers; `past`, for EAGLE's drafter: the features before the inputs."""
    if past is not None:
        return module(past, inputs, table, mask, view)
    return module.through(inputs, table, mask, view)


def _without_slices(view: CacheView) -> CacheView:
    """The same view with tensors instead of slices: torch.compile would make a program for each slice."""
    if isinstance(view.rows, slice):
        keys = [layer[view.rows] for layer in view.keys]
        values = [layer[view.rows] for layer in view.values]
        view = dataclasses.replace(view, keys=keys, values=values, rows=slice(None))
    if isinstance(view.columns, slice):
        columns = steps(view.columns.stop, view.keys[0].device)[view.columns]
        view = dataclasses.replace(view, columns=columns)
    return view


# A condition (a class or a prompt) is a prefix of inputs: one for a class, one for each token of a prompt. Its last
# input is the root of the first round. The inputs before it pass through the models when a sequence is admitted.
#
# LlamaGen pads prompts on the left and masks the padding. The rotary angles of a prompt's inputs are 0 and no input
# looks at padding, so padding is left out here: a prompt of n tokens takes n columns of the cache.


class Conditions:
    """The conditions of running sequences by cache row: 2s for slot s, 2s + 1 for its unconditional branch.

    Attributes:
        last: for "target" and "draft", [2 * slots, dim], the last inputs.
        before: int64 [2 * slots], the number of inputs before those; None for class-conditional models, where it is 0.
    """

    def __init__(self, models: Mapping[str, Any], num_slots: int, device: torch.device) -> None:
        rows = 2 * num_slots
        self.last: dict[str, Tensor] = {}
        for name in ("target", "draft"):
            model = models[name]
            if model is not None:
                self.last[name] = model.tok_embeddings.weight.new_zeros(rows, model.config.dim)
        has_classes = models["target"].config.num_classes
        self.before = cast(Tensor, None if has_classes else torch.zeros(rows, dtype=torch.int64, device=device))

    def columns(self, batch: Batch, position: Tensor) -> Tensor:
        """KVCache columns of inputs at positions [R], one position per row of a batch."""
        return position if self.before is None else position + self.before[batch.rows]

    def positions(self, batch: Batch, config: Any, position: Tensor) -> Tensor:
        """Converts positions of tokens [R, N] to the positions that a model's layers expect."""
        if not config.text_places:
            return position
        return position + self.before[batch.rows].unsqueeze(1)


class Texts(NamedTuple):
    """Prompts as the models' inputs, on the device.

    Attributes:
        tokens: as `VQRunner.text_of` returns them, [R, N, ...], padded on the right. length: int64 [R].
        is_null: bool [R], whether the model's null caption replaces the prompt; None if it never does.
    """

    tokens: Tensor
    length: Tensor
    is_null: Tensor | None


def _uses(sequences: list[Sequence]) -> set[str]:
    """The models that the methods of some sequences run."""
    return {"target"}.union(*(sequence.uses for sequence in sequences))


def inputs_of_texts(model: GPT, texts: Texts) -> Tensor:
    """A model's inputs [R, N, dim] for prompts. For a null caption, its last `length` tokens."""
    tokens = texts.tokens
    if texts.is_null is not None:
        null: Any = model.cls_embedding.uncond_embedding
        first = len(null) - texts.length.unsqueeze(1)
        index = first + steps(tokens.shape[1], tokens.device)
        of_null = null[index.clamp(max=len(null) - 1)]
        tokens = torch.where(texts.is_null[:, None, None], of_null, tokens)
    return model.cls_embedding(tokens)


class VQRunner:
    """Computes distributions after drafted tokens, and commits tokens, for the methods.

    Args:
        models: see `cspd.discrete.family.VQModels`. num_slots: the maximum number of sequences in flight.
        precision: how they compute, and where.
        noise: the source of randomness: a namespace with the functions of `cspd.noise`.
        compiled: whether the models' layers run through torch.compile.
        graphs: CUDA graphs of rounds; by default rounds are ordinary calls.

    Attributes:
        tuning: a `cspd.discrete.tuning.DraftTuner`, which chooses the draft configuration of the method `speculative`.
        tokens: int64 [slots, L + MOST_NODES], raster order. token_cost: float32, the same shape.
        draws: float64, the same shape: the request's own uniform draw inside (0, 1) for each token.
        num_committed: int64 [slots]. draft_calls: forward passes of draft models in this round.
        past: the target's features, an input of EAGLE's drafter.
        late: whether a round is counted only after the next one was launched.
    """

    family = "VQ"
    in_raster_order = True
    tuning: Any = None  # `VQModels.runner` sets it

    def __init__(
        self,
        models: Any,
        num_slots: int,
        precision: Precision,
        noise: types.ModuleType = philox_noise,
        *,
        compiled: bool = False,
        graphs: Graphs | None = None,
    ) -> None:
        device = precision.device
        target: GPT = models.target
        self.target = target
        self.models: dict[str, Any] = {}
        for name in ("target", "draft", "eagle"):
            model = getattr(models, name)
            self.models[name] = model and precision.prepare(model)
        self.models["tokenizer"] = models.tokenizer
        self.text_encoder: TextEncoder = models.text_encoder  # may be None: `check` then refuses prompts
        self.device = device
        self.precision = precision
        self.noise = noise
        self.compiled = compiled
        self.graphs = graphs or Graphs(device, enabled=False)
        self.config = target.config
        self.num_slots = self.at_once = num_slots
        self.seq_len = target.config.block_size
        self.num_classes = target.config.num_classes
        self.defaults = defaults_of(target.config)
        self.image_size = self.defaults.image_size

        # tokens of running sequences; a round may commit past the end
        length = self.seq_len + MOST_NODES
        of_condition = 1
        self._inputs = torch.zeros(num_slots, of_condition + length, dtype=torch.int64, device=device)
        self.tokens = self._inputs[:, of_condition:]
        self.token_cost = torch.zeros(num_slots, length, device=device)
        self.num_committed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.draws = torch.zeros(num_slots, length, dtype=torch.float64, device=device)

        # what the models have computed for them
        self.conditions = Conditions(self.models, num_slots, device)
        self.past = PastFeatures(num_slots, length, self.config.dim, device)
        self._caches: dict[str, KVCache] = {}
        self._encode_once = remembered(self._encode)

        self.late = device.type == "cuda"

    # What Jacobi methods keep of each slot from round to round, for the largest window. It is allocated once, on first
    # use: graphs read it at fixed addresses.

    @functools.cached_property
    def windows(self) -> tuple[Tensor, Tensor]:
        """The windows' tokens int64 [slots, W], and the distributions Q [slots, W, V] that they follow."""
        size = (self.num_slots, MOST_NODES - 1)
        tokens = torch.zeros(size, dtype=torch.int64, device=self.device)
        return tokens, torch.zeros(*size, self.config.vocab_size, device=self.device)

    @functools.cached_property
    def nodes(self) -> Tensor:
        """The drafted nodes of the windows, int64 [slots, N]."""
        return torch.zeros(self.num_slots, MOST_NODES, dtype=torch.int64, device=self.device)

    def complete(self, request: Request, method: Method) -> Request:
        """The request with the target's and the method's defaults filled in.

        Raises:
            ValueError: a setting has the wrong type or is out of range, a model is missing, or the given tokens are not
                the first ones of an image.
        """
        defaults = {option.name: getattr(self.defaults, option.name) for option in VQ_OPTIONS}
        request = complete(self._with_prefix(request), method, self, VQ_OPTIONS, defaults)
        if request.prompt is not None:
            if self.text_encoder is None:
                raise ValueError(
                    f"prompt={shortened(request.prompt)} needs a text encoder, and this engine has none: {PLACE}"
                )
            self.text_encoder.check(request, self.config.prefix_length)
        return request

    def prepare(self, request: Request, method: Method) -> Request:
        """A complete request with the settings that the method chooses for this device. Encodes the prompts."""
        for text in (request.prompt, request.negative_prompt):
            if text is not None:
                self.text_of(text)  # the encoder remembers it
        return method.prepare(request, self)

    def text_of(self, text: str) -> Tensor:
        """A prompt as the models' inputs, on the CPU: float32 features [n, caption_dim], or tokens int64 [n]."""
        return self.text_encoder.features(text, self.config.prefix_length, self.device)

    def published(self, labels: Tensor, settings: dict) -> Tensor:
        """Tokens [B, L] by LlamaGen's reference sampler, in lockstep. `settings`: values of `VQ_OPTIONS`."""
        with self.precision.fast():
            return sample_published(self.models["target"], labels, **settings)

    def admit(self, sequences: list[Sequence]) -> None:
        """Prepares the slots of new sequences: draws, empty caches, conditions and given tokens."""
        if not sequences:
            return
        slots, seeds = send_integers([[s.slot, s.request.seed] for s in sequences], self.device).T
        position = steps(self.draws.shape[1], self.device)
        zero = steps(1, self.device)
        self.num_committed.index_fill_(0, slots, 0)
        self.draws[slots] = self.noise.fine_uniform(seeds.unsqueeze(1), Purpose.CODE, position, zero, zero)
        for cache in self._caches.values():
            cache.clear(slots)
        self.past.clear(slots)
        if self.conditions.before is None:
            self._take_in_classes(sequences)
        else:
            for group in alike(sequences, lambda sequence: self.config.prefix_length):
                self._take_in_texts(group)
        for group in alike(sequences, lambda sequence: self._num_given(sequence.request)):
            self._prefill(group)

    def batch_of(self, sequences: list[Sequence]) -> Batch:
        """The batch of sequences in this runner's slots, between rounds."""
        kind, numbers = packed(sequences, self.config, set(), 0)
        numbers = send_integers(numbers.numpy(), self.device)
        return unpacked(sequences[0].request, kind, numbers, self.num_committed)

    # Given tokens: the part of an image that the user fixed. VQ models generate in raster order, so it is a prefix.

    def _encode(self, known: Inpainting) -> Tensor:
        """Tokens int64 [L], on the CPU, of a given image."""
        tokenizer = self.models["tokenizer"]
        if tokenizer is None:
            raise ValueError(
                "the request has an image, and this engine has no tokenizer to encode it: load one, or give tokens"
            )
        pixels = known.to_encode(self.config.grid * tokenizer.config.stride).to(self.device)
        with torch.no_grad(), self.precision.full():
            return tokenizer.encode(pixels)[0].cpu()

    def encode(self, known: Inpainting, seed: Tensor) -> Tensor:
        """Encodes a given image to tokens int64 [L], on the CPU; the seed does not matter. Results are remembered.

        Raises ValueError if there is no tokenizer.
        """
        return self._encode_once(known)

    def _with_prefix(self, request: Request) -> Request:
        """The request with the given part of its image as tokens.

        Raises:
            ValueError: these are not tokens of the model; or as `with_tokens`.
        """
        request = with_tokens(request, self, (self.seq_len,))
        if request.known is None:
            return request
        tokens = request.known.image
        vocabulary = self.config.vocab_size
        if tokens.is_floating_point() or not ((tokens >= 0) & (tokens < vocabulary)).all():
            raise ValueError(f"given tokens must be codes 0..{vocabulary - 1} of this model's tokenizer")
        return request

    def _num_given(self, request: Request) -> int:
        return self.seq_len - request.num_generated(self.seq_len)

    def _prefill(self, sequences: list[Sequence]) -> None:
        """One forward pass of each model over the inputs before the given tokens, equally many in each sequence.

        The last given token is the first round's input.
        """
        batch = self.batch_of(sequences)
        count = self._num_given(sequences[0].request)
        known: list[Any] = [sequence.request.known for sequence in sequences]
        tokens = torch.stack([own.image[:count] for own in known])
        tokens = send_integers(tokens.numpy(), self.device)
        inputs = tokens.roll(1, 1)  # the input at a position is the token before it, and at the first the condition
        self.begin(None)
        features = self.features(batch, inputs)
        uses = _uses(sequences)
        if "draft" in uses:
            self.features(batch, inputs, 0, "draft")
        if "eagle" in uses:
            self.past.keep(batch, features)
            position = torch.arange(count, device=self.device).expand(len(batch), -1)
            self.features(batch, inputs, 0, "eagle", past=self.past.before(batch, position))

        self.commit(batch, tokens, torch.full_like(tokens, torch.nan, dtype=torch.float32))
        self.num_committed.index_fill_(0, batch.slot, count)
        for sequence in sequences:
            sequence.num_committed = count

    # Conditions

    def _take_in_classes(self, sequences: list[Sequence]) -> None:
        """Stores the one input of a class; that of the unconditional branch is the null class."""
        null = self.num_classes
        numbers = []
        for sequence in sequences:
            label = sequence.request.label
            row = 2 * sequence.slot
            numbers.append((row, null if label is None else label))
            numbers.append((row + 1, null))
        rows, labels = send_integers(numbers, self.device).unbind(1)
        uses = _uses(sequences)
        for name, last in self.conditions.last.items():
            if name in uses:
                last[rows] = self.models[name].cls_embedding(labels).squeeze(1)

    def _take_in_texts(self, sequences: list[Sequence]) -> None:
        """One forward pass of each model over all prompts but their last tokens. Padding is overwritten later."""
        batch = self.batch_of(sequences)
        texts = self.sent_texts([sequence.request for sequence in sequences], batch.num_branches)
        num_before = texts.length - 1
        each = steps(len(num_before), self.device)
        self.conditions.before[batch.rows] = num_before
        uses = _uses(sequences)
        self.begin(None)
        for name, last in self.conditions.last.items():
            with self.precision.fast():
                inputs = inputs_of_texts(self.models[name], texts).to(last.dtype)
            last[batch.rows] = inputs[each, num_before]
            inputs = inputs[:, :-1]
            if name in uses:
                features = self._condition_features(batch, name, inputs)
            if name == "target" and "eagle" in uses:
                before = functional.pad(features, (0, 0, 1, 0))  # for each input, the feature before it
                self._condition_features(batch, "eagle", inputs, past=before[:, :-1])
                before_last = before[each, num_before].unflatten(0, (len(batch), batch.num_branches))
                self.past.keep(batch, before_last.transpose(0, 1).unsqueeze(2), ahead=-1)

    def sent_texts(self, requests: list[Request], num_branches: int) -> Texts:
        """The prompts of requests and, if `num_branches` is 2, after each the prompt of its unconditional branch.

        LlamaGen's null caption is as long as the prompt, as in the authors' mask.
        """
        texts = []
        is_null = []
        for request in requests:
            prompt: Any = request.prompt
            own = self.text_of(prompt)
            texts.append(own)
            is_null.append(False)
            if num_branches == 2:
                if request.negative_prompt is None:
                    other = self.text_encoder.null(own, self.config.prefix_length)
                else:
                    other = self.text_of(request.negative_prompt)
                texts.append(own if other is None else other)
                is_null.append(other is None)

        count = np.array([len(text) for text in texts])
        size = (len(texts), count.max(), *texts[0].shape[1:])
        padded = np.zeros(size, texts[0].numpy().dtype)
        for row, text in zip(padded, texts):
            row[: len(text)] = text
        arrays = {"tokens": padded, "count": count}
        if any(is_null):
            arrays["is_null"] = np.array(is_null)
        sent = send(arrays, self.device)
        return Texts(sent["tokens"], sent["count"], sent.get("is_null"))

    def _condition_features(self, batch: Batch, model: str, inputs: Tensor, past: Tensor | None = None) -> Tensor:
        """Features [R, N, dim] after a condition's inputs [R, N, dim], which go to the first columns of the cache."""
        count = inputs.shape[1]
        if not count:
            return inputs
        start = torch.zeros_like(batch.committed_rows)
        has_positions = self.models[model].config.text_places
        position = steps(count, self.device) if has_positions else start.unsqueeze(1)
        view, mask = self.cache(model).view_and_mask(batch.rows, start, 0, True, count)
        return self._through_layers(model, inputs, position.expand(inputs.shape[:2]), mask, view, past)

    # Forward passes

    def begin(self, watch: Stopwatch | None) -> None:
        """Begins a round. `watch`, if given, times its forward passes."""
        self._watch = watch
        self.draft_calls = 0

    def _start(self, phase: str) -> None:
        if self._watch is not None:
            self._watch.start(phase)

    def cache(self, model: str) -> KVCache:
        """The key-value cache of "target", "draft" or "eagle", allocated on first use."""
        if model not in self._caches:
            module = self.models[model]
            columns = most_columns(self.config)  # the target's: a drafter's weights do not tell the block size
            dtype = self.precision.type_of(module)
            cache = KVCache(module.config, columns, len(module.layers), self.num_slots, self.device, dtype)
            self._caches[model] = cache
        return self._caches[model]

    def _inputs_of(self, batch: Batch, tokens: Tensor, position: Tensor, model: str) -> Tensor:
        """Inputs [R, N, dim] for tokens [B, N] at positions [R, N]; at position 0, the condition's last input."""
        owner = "target" if model == "eagle" else model
        tokens = tokens.clamp(min=0).repeat_interleave(batch.num_branches, 0)
        embedded = self.models[owner].tok_embeddings(tokens)
        if batch.kind.least >= tokens.shape[1]:  # even the first of the last N inputs is a token
            return embedded
        of_condition = self.conditions.last[owner][batch.rows].unsqueeze(1)
        is_condition = position.unsqueeze(-1) == 0
        return torch.where(is_condition, of_condition, embedded)

    def _through_layers(
        self,
        model: str,
        inputs: Tensor,
        position: Tensor,
        mask: Tensor | None,
        view: CacheView,
        past: Tensor | None = None,
    ) -> Tensor:
        """Features [R, N, dim] after inputs [R, N, dim] at positions [R, N].

        Args:
            mask, view: as `KVCache.look` returns them. past: [R, N, dim], for "eagle": the features before the inputs.
        """
        module = self.models[model]
        layers = _layers
        if self.compiled:
            layers, view = compiled(_layers, "the models' layers"), _without_slices(view)
        with self.precision.fast():
            return layers(module, inputs, module.table(position), mask, view, past)

    def _row_columns(self, batch: Batch, position: Tensor, depth: Tensor, node: Tensor) -> RowColumns:
        before = self.conditions.before[batch.rows]
        return row_columns(before, position, depth, node, self.config.grid, most_columns(self.config) - 1)

    def _features_with_row_ends(
        self,
        batch: Batch,
        tokens: Tensor,
        start: Tensor,
        model: str,
        most: int,
        depth: Tensor,
        seen: Tensor | None,
    ) -> Tensor:
        """Features [R, N, dim] as `features`, for a model with row ends. `start`: int64 [R], at most `most`."""
        side = self.config.grid
        count = tokens.shape[1]
        node = steps(count, start.device)
        position = start.unsqueeze(1) + depth
        columns = self._row_columns(batch, position, depth, node)
        is_end = columns.is_end

        # the indices of row ends come first; a chain has at most one for each row that it begins
        max_ends = count if seen is not None else 1 + (count - 1) // side
        doubled = is_end.int().topk(max_ends, dim=1).indices
        column = torch.cat([columns.inputs, columns.tokens.gather(1, doubled)], 1)
        position_of_appended = columns.position.gather(1, doubled) - 1
        layer_position = torch.cat([columns.position, position_of_appended], 1)

        # inputs: row ends replace tokens, which are appended
        embedded = self._inputs_of(batch, tokens, position, model)
        row_end = self.models[model].cls_embedding.weight[self.config.row_end].to(embedded.dtype)
        inputs = torch.where(is_end.unsqueeze(-1), row_end, embedded)
        channels = doubled.unsqueeze(-1).expand(-1, -1, embedded.shape[-1])
        inputs = torch.cat([inputs, embedded.gather(1, channels)], 1)

        # the mask over all columns, then those that are looked at
        sees = (node <= node.unsqueeze(1)) if seen is None else seen[..., 1:-1]
        sees = sees_with_row_ends(sees.expand(len(start), -1, -1), is_end, doubled)
        first_column = columns.position[:, :1] - is_end[:, :1].long()
        mask = mask_with_row_ends(sees, first_column, column, most_columns(self.config))
        width = self.config.prefix_length + most + most // side + count + count // side + 1
        if seen is not None:  # siblings lie beyond the first path
            width += reserved(side) + 2 * count
        width = min(stepped(width), mask.shape[-1])
        view = self.cache(model).view(batch.rows, column, width)
        features = self._through_layers(model, inputs, layer_position, mask[..., :width].unsqueeze(1), view)
        return features[:, :count]

    # What a method asks during a round

    def features(
        self,
        batch: Batch,
        tokens: Tensor,
        start: Tensor | int = 0,
        model: str = "target",
        *,
        depth: Tensor | None = None,
        seen: Tensor | None = None,
        columns: Tensor | None = None,
        past: Tensor | None = None,
    ) -> Tensor:
        """Features [branches, B, N, dim] after tokens [B, N]: one forward pass, which fills the key-value cache.

        Args:
            start: the position of the first input; every token looks at all inputs before it. Either int64 [B], at
                most the position of the last committed input, or the distance from that position, for all.
            depth: int64 [N] or [B, N], positions of the tokens relative to `start`; by default 0, 1, ..., N - 1.
            seen: bool [N, M + 2] or [B, N, M + 2], the `seen_of` of which of the M inputs from `start` on each token
                looks at; by default itself and the tokens before it.
            columns: int64 [N] or [B, N], cache columns of the tokens relative to `start`; by default 0, 1, ..., N - 1.
            past: [branches, B, N, dim], for "eagle": the features before the tokens.
        """
        num_branches = batch.num_branches
        most = batch.kind.most
        together = isinstance(start, int) and batch.kind.together and self.conditions.before is None
        if isinstance(start, Tensor):
            start = per_branch(start, num_branches)
        else:
            most += start
            start = batch.committed_rows + start if start else batch.committed_rows
        if depth is None:
            depth = steps(tokens.shape[1], self.device)
        elif depth.dim() == 2:
            depth = per_branch(depth, num_branches)
        if seen is not None and seen.dim() == 3:
            seen = per_branch(seen, num_branches)
        if columns is not None and columns.dim() == 2:
            columns = per_branch(columns, num_branches)
        if past is not None:
            past = past.transpose(0, 1).flatten(0, 1)

        self._start("backbone" if model == "target" else "draft")
        self.draft_calls += model != "target"
        config = self.models[model].config
        if config.row_end is None:
            position = (start.unsqueeze(1) + depth).clamp(max=self.config.block_size)
            first_column = self.conditions.columns(batch, start)
            max_column = most + self.config.prefix_length - 1
            cache = self.cache(model)
            view, mask = cache.view_and_mask(
                batch.rows, first_column, max_column, together, tokens.shape[1], seen, columns
            )
            inputs = self._inputs_of(batch, tokens, position, model)
            layer_position = self.conditions.positions(batch, config, position)
            features = self._through_layers(model, inputs, layer_position, mask, view, past)
        else:
            features = self._features_with_row_ends(batch, tokens, start, model, most, depth, seen)
        self._start("other")
        return features.unflatten(0, (len(batch), num_branches)).transpose(0, 1)

    def distributions(self, batch: Batch, features: Tensor, model: str = "target", soft: bool = False) -> Tensor:
        """Guided, filtered token distributions, float32 [B, N, V], after features [branches, B, N, dim].

        At temperature 0 they are point masses at the likeliest token; with `soft` they have temperature 1 instead, for
        rules that choose the likeliest token themselves.
        """
        output = self.models["target" if model == "eagle" else model].output
        self._start("backbone" if model == "target" else "draft")
        with self.precision.fast():
            logits = output(features.transpose(0, 1)).transpose(0, 1)  # in the order of memory: one large product
        self._start("other")
        logits = guide(logits.float(), batch.scale)
        if batch.greedy and not soft:
            return likeliest_point(logits)
        return probabilities(logits, batch.temperature, batch.filter)

    def drawn(self, batch: Batch, ahead: Tensor) -> Tensor:
        """The request's own draws, float64 [B, n], for the tokens `ahead` of the committed ones.

        A draft that samples by these, from the target's own distribution, samples the target's own token.
        """
        position = batch.num_committed.unsqueeze(1) + ahead
        return self.draws[batch.slot.unsqueeze(1), position]

    def uniform(
        self, batch: Batch, purpose: Tensor | int, ahead: Tensor, index: Tensor, fresh: Tensor | int = 1
    ) -> Tensor:
        """Uniform draws inside (0, 1), float64 [B, n].

        Args:
            purpose: a `Purpose` for all, or int64 [n]: one call is faster than several.
            ahead: int64 [n] or [B, n], the tokens that they are for, counted from the committed ones.
            index: int64 [n] or [B, n], the number of the draw among those for the same token.
            fresh: an int for all, or int64 [n]. 1: the draw differs from round to round, as it must if a decision
                depends on it and the token may be verified again. 0: it is the same in every round, so that it may
                influence only the round that commits the token.
        """
        position = batch.num_committed.unsqueeze(1) + ahead
        step = batch.iteration.unsqueeze(1) * fresh
        return self.noise.fine_uniform(batch.seed.unsqueeze(1), purpose, position, step, index)

    def last(self, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        """The tokens [B, count] of the last `count` inputs and the position int64 [B] of the first of them, at least 0.

        The input at position p is the token before p. At position 0 it is the condition's last input, and the returned
        value is meaningless, as are values after the committed tokens.
        """
        start = batch.num_committed
        if count > 1:
            start = (start - (count - 1)).clamp(min=0)
        position = start.unsqueeze(1) + steps(count, self.device)
        return self.inputs_at(batch, position), start

    def inputs_at(self, batch: Batch, position: Tensor) -> Tensor:
        """The tokens of the inputs at positions int64 [B, n], see `last`."""
        return self._inputs[batch.slot.unsqueeze(1), position]

    def commit(self, batch: Batch, tokens: Tensor, token_cost: Tensor) -> None:
        """Writes tokens and their costs [B, n] after the committed ones; surplus ones are overwritten or ignored."""
        position = batch.num_committed.unsqueeze(1) + steps(tokens.shape[1], self.device)
        slot = batch.slot.unsqueeze(1)
        self.tokens[slot, position] = tokens
        self.token_cost[slot, position] = token_cost

    def place(self, batch: Batch, position: Tensor, tokens: Tensor, where: Tensor) -> None:
        """Writes tokens that the target sampled to positions int64 [B, n], if `where`, bool [B, n]."""
        slot = batch.slot.unsqueeze(1)
        self.tokens[slot, position] = torch.where(where, tokens, self.tokens[slot, position])
        self.token_cost[slot, position] = 0

    def compact(self, batch: Batch, path: Tensor) -> None:
        """Moves keys and values of the last forward pass's nodes path[:, i], int64 [B, n], to the i-th column."""
        level = steps(path.shape[1], self.device)
        node = per_branch(path, batch.num_branches)
        if self.config.row_end is None:
            start = self.conditions.columns(batch, batch.committed_rows).unsqueeze(1)
            source = start + node
            target = start + level
        else:
            position = batch.committed_rows.unsqueeze(1) + level
            old = self._row_columns(batch, position, level, node)
            new = self._row_columns(batch, position, level, level)
            source = torch.cat([old.inputs, old.tokens], 1)
            target = torch.cat([new.inputs, new.tokens], 1)
        self.cache("target").move(batch.rows, source, target)

    def results(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens [B, L], their costs [B, L], bool [B, L]: whether a token is valid, not -1) of sequences."""
        slots = send_integers([sequence.slot for sequence in sequences], self.device)
        tokens = self.tokens[slots, : self.seq_len]
        token_cost = self.token_cost[slots, : self.seq_len]
        return tokens, token_cost, tokens >= 0

    def so_far(self, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """(tokens [1, L], costs [1, L]) of a running sequence: -1 and NaN at tokens that are not generated yet."""
        tokens, token_cost, _ = self.results([sequence])
        is_open = steps(self.seq_len, self.device) >= sequence.num_committed
        tokens = tokens.masked_fill(is_open, -1)
        return tokens, token_cost.masked_fill(is_open, torch.nan)

    def decode(self, tokens: Tensor) -> Tensor | None:
        """Decodes tokens [B, L] (-1 counts as 0) to images [B, 3, H, W] in 0..1; None without a tokenizer.

        Larger images are resized to `image_size`, as in LlamaGen's reference sampler.
        """
        tokenizer = self.models["tokenizer"]
        if tokenizer is None:
            return None
        with self.precision.decoding():
            images = decoded(tokenizer.decode, tokens.clamp(min=0))
        if images.shape[-1] > self.image_size:
            images = functional.interpolate(images, (self.image_size, self.image_size), mode="bicubic")
        return to_unit(images)
