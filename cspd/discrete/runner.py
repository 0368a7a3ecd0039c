"""The VQ model runner: owns the models and, in slots allocated once, the codes and caches of every running sequence."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cspd import noise as philox_noise
from cspd.device import Precision, send, send_integers
from cspd.discrete.batch import (
    MOST_NODES,
    Batch,
    Cache,
    PastFeatures,
    alike,
    batch_of,
    most_columns,
    of_copies,
    stepped,
)
from cspd.discrete.gpt import GPT, CacheView, Eagle, VQModel, sample_published, steps
from cspd.discrete.registry import defaults_of
from cspd.discrete.rules import guide, likeliest_point, probabilities
from cspd.discrete.text import PLACE, TextEncoder
from cspd.graphs import Graphs
from cspd.method import Method, complete, with_tokens
from cspd.noise import Purpose
from cspd.option import VQ_OPTIONS
from cspd.request import Known, Request, Sequence, Stopwatch, decoded, remembered, to_unit
from cspd.terminal import shortened, telling

# A forward of a `VQRunner`: the inputs of codes, and a model's layers over inputs.

PROGRAMS = 64  # at most: a model's layers for one input or several, with a mask or without, for the null class or not


def forward(
    runner: Any,
    batch: Batch,
    model: str,
    codes: Tensor,
    start: Tensor,
    most: int,
    together: bool,
    depth: Tensor,
    seen: Tensor | None,
    columns: Tensor | None,
    past: Tensor | None,
) -> Tensor:
    """Features [R, N, dim] after codes [B, N], R = B * copies, as `VQRunner.features`.

    Args:
        start: int64 [R]; most: what it is at most, on the CPU; together: whether all are just that. depth: int64 [N]
            or [R, N]. seen: bool [N, M + 2] or [R, N, M + 2]. past: [R, N, dim].
    """
    first, most = runner.conditions.columns(batch, start), most + runner.config.prefix_length - 1
    position = (start.unsqueeze(1) + depth).clamp(max=runner.config.block_size)
    view, mask = runner.cache(model).look(batch.rows, first, most, together, codes.shape[1], seen, columns)
    inputs = inputs_of(runner, batch, codes, position, model)
    places = runner.conditions.places(batch, runner.models[model].config, position)
    return through_layers(runner, model, inputs, places, mask, view, past)


def inputs_of(runner: Any, batch: Batch, codes: Tensor, position: Tensor, model: str) -> Tensor:
    """Inputs [R, N, dim], R = B * copies, of codes [B, N] at positions [R, N]: the condition's last where that is 0."""
    owner = "target" if model == "eagle" else model
    of_codes = runner.models[owner].tok_embeddings(codes.clamp(min=0).repeat_interleave(batch.num_branches, 0))
    if batch.kind.least >= codes.shape[1]:  # no input is before the last so many
        return of_codes
    of_condition = runner.conditions.last[owner][batch.rows].unsqueeze(1)
    return torch.where(position.unsqueeze(-1) == 0, of_condition, of_codes)


def through_layers(
    runner: Any,
    model: str,
    inputs: Tensor,
    position: Tensor,
    mask: Tensor | None,
    view: CacheView,
    past: Tensor | None = None,
) -> Tensor:
    """Features [R, N, dim] after inputs [R, N, dim] at positions [R, N].

    Args:
        mask, view: as `Cache.look` gives them. past: [R, N, dim], to "eagle": the features before the inputs.
    """
    module = runner.models[model]
    layers = compiled_layers() if runner.compiled else _layers
    with runner.precision.fast():
        return layers(module, inputs, module.table(position), mask, view, past)


def _layers(
    module: Any, inputs: Tensor, table: Tensor, mask: Tensor | None, view: CacheView, past: Tensor | None
) -> Tensor:
    if past is not None:
        return module(past, inputs, table, mask, view)
    return module.through(inputs, table, mask, view)


@functools.cache
def compiled_layers() -> Callable[..., Tensor]:
    """`_layers` by torch.compile, for any number of rows and inputs: half a minute on first use, then fewer kernels."""
    compiled, calls = torch.compile(_layers, dynamic=True), itertools.count()

    def told(module: Any, inputs: Tensor, table: Tensor, mask: Tensor | None, view: CacheView, *more: Any) -> Tensor:
        message = "compiling the models' layers, about half a minute"
        with torch._dynamo.config.patch(recompile_limit=PROGRAMS):
            with telling(message) if next(calls) == 0 else nullcontext():
                return compiled(module, inputs, table, mask, _plain(view), *more)

    return told


def _plain(view: CacheView) -> CacheView:
    """The same view without slices, for which there would be a program each."""
    keys, values, rows, columns = view.keys, view.values, view.rows, view.columns
    if isinstance(rows, slice):
        keys, values = ([of_layer[rows] for of_layer in kept] for kept in (keys, values))
        rows = slice(None)
    if isinstance(columns, slice):
        columns = steps(columns.stop, keys[0].device)[columns]
    return dataclasses.replace(view, keys=keys, values=values, rows=rows, columns=columns)


# Codes that are known from the start: the first ones, since VQ models make them one after the other, row by row.


def encoder(runner: Any) -> Callable[[Known, Tensor], Tensor]:
    """Makes codes [L], on the CPU, of a picture by a `VQRunner`'s tokenizer, whatever the seed; they are remembered.

    Raises ValueError where there is no tokenizer.
    """
    codes = remembered(functools.partial(_codes, runner))
    return lambda known, seed: codes(known)


def _codes(runner: Any, known: Known) -> Tensor:
    tokenizer = runner.models["tokenizer"]
    if tokenizer is None:
        raise ValueError("an image is given and this engine has no tokenizer to encode it: give it one, or codes")
    pixels = known.to_encode(runner.config.grid * tokenizer.config.stride).to(runner.device)
    with torch.no_grad(), runner.precision.full():
        return tokenizer.encode(pixels)[0].cpu()


def with_prefix(request: Request, runner: Any) -> Request:
    """The request with what is known of its image as codes.

    Args:
        runner: a `VQRunner`.

    Raises:
        ValueError: they are not the model's, or not the first ones; or as `with_tokens`.
    """
    request = with_tokens(request, runner, (runner.seq_len,))
    known, vocabulary = request.known, runner.config.vocab_size
    if known is None:
        return request
    if known.image.is_floating_point() or not ((known.image >= 0) & (known.image < vocabulary)).all():
        raise ValueError(f"the tokens that are given are no codes 0..{vocabulary - 1}: give this model's own")
    num_kept = runner.seq_len - known.num_made
    first = int(known.made.argmax())
    if first < num_kept:
        rows = first // runner.config.grid
        instead = f"the first {rows} of {runner.config.grid} rows of tokens" if rows else "only rows at the top"
        raise ValueError(
            f"the mask keeps {num_kept} of {runner.seq_len} tokens, {num_kept - first} of them after one that is made:"
            f" VQ models go row by row from the top; keep {instead}, or take a MAR model, which keeps any"
        )
    return request


def prefill(runner: Any, sequences: list[Sequence]) -> None:
    """Writes the codes that sequences know from the start to their slots, and has the models take them in.

    Args:
        runner: a `VQRunner`, in whose slots nothing is known yet.
    """
    for own in alike(sequences, lambda sequence: _num_known(runner, sequence)):
        _prefill(runner, own)


def _num_known(runner: Any, sequence: Sequence) -> int:
    """How many codes a sequence begins with."""
    return runner.seq_len - sequence.request.num_made(runner.seq_len)


def _prefill(runner: Any, sequences: list[Sequence]) -> None:
    """One forward of each model over the inputs before the known codes, as many in each of the sequences.

    The last known code is the first round's input.
    """
    batch, count = batch_of(runner, sequences), _num_known(runner, sequences[0])
    codes = torch.stack([sequence.request.known.image[:count] for sequence in sequences])
    codes = send_integers(codes.numpy(), runner.device)
    inputs = codes.roll(1, 1)  # the input at a position is the code before it, and at the first the class
    runner.begin(None)
    features = runner.features(batch, inputs)
    uses = {name for sequence in sequences for name in sequence.uses}
    if "draft" in uses:
        runner.features(batch, inputs, 0, "draft")
    if "eagle" in uses:
        runner.past.keep(batch, features)
        position = torch.arange(count, device=runner.device).expand(len(batch), -1)
        runner.features(batch, inputs, 0, "eagle", past=runner.past.before(batch, position))

    runner.commit(batch, codes, torch.full_like(codes, torch.nan, dtype=torch.float32))
    runner.known.index_fill_(0, batch.slot, count)
    for sequence in sequences:
        sequence.num_committed = count


# Rows of codes that end in a token which is no code: it is always there, so that it needs no forward of its own.
#
# The input at position p is the code before p. Where p begins a row these are two inputs, that code and then the row's
# end, after which code p is predicted. Both are in one forward: the row's end in the place of the input, and the code
# as one input more, behind all others. So methods know of codes alone, as EAGLE's drafter does.
#
# Columns of the cache are in the order of codes and row ends: an input that has as many ancestors in its forward as
# there are inputs before it goes where it is to stay, the others (siblings) beyond, two columns for each. What is no
# second input writes to the last column, which nobody looks at.


def _reserved(side: int) -> int:
    """Columns that a forward's inputs may stay in; those beyond are for the others."""
    return MOST_NODES + MOST_NODES // side + 1


def _columns(runner: Any, batch: Batch, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of inputs at positions [R, N]: the column, int64, which is also their place in the sequence that the layers
    know; whether each is a row's end, bool; and the first column of siblings, int64 [R, 1], if the first is the root.
    """
    side = runner.config.grid
    own = runner.conditions.before[batch.rows].unsqueeze(1) + position + position // side
    is_end = (position % side == 0) & (position > 0)
    return own, is_end, own[:, :1] + _reserved(side)


def features_with_row_ends(
    runner: Any,
    batch: Batch,
    model: str,
    codes: Tensor,
    start: Tensor,
    most: int,
    depth: Tensor,
    seen: Tensor | None,
) -> Tensor:
    """Features [R, N, dim] after codes [B, N], R = B * copies, as `VQRunner.features`.

    Args:
        start: int64 [R]; most: what it is at most, on the CPU. depth: int64 [N] or [R, N]. seen: `seen_of`
            bool [N, N] or [R, N, N]; None where each input looks at those before it.
    """
    side, count, rows = runner.config.grid, codes.shape[1], len(start)
    node = steps(count, start.device)
    position = start.unsqueeze(1) + depth
    own, is_end, beyond = _columns(runner, batch, position)
    last_column = runner.cache(model).tensor.shape[4] - 1

    # of each input its column, and that of the code before it where it is a row's end
    stays = depth == node
    sibling = beyond + 2 * node
    column = torch.where(stays, own, sibling)
    second = torch.where(is_end, torch.where(stays, own - 1, sibling + 1), last_column)

    # which inputs are two: of a chain as many at most as there are beginnings of rows
    most_ends = count if seen is not None else 1 + (count - 1) // side
    of = is_end.int().topk(most_ends, dim=1).indices
    column = torch.cat([column, second.gather(1, of)], 1)
    place = torch.cat([own, own.gather(1, of) - 1], 1)

    # inputs
    of_codes = inputs_of(runner, batch, codes, position, model)
    end = runner.models[model].cls_embedding.weight[runner.config.row_end].to(of_codes.dtype)
    inputs = torch.where(is_end.unsqueeze(-1), end, of_codes)
    doubled = of_codes.gather(1, of.unsqueeze(-1).expand(-1, -1, of_codes.shape[-1]))
    inputs = torch.cat([inputs, doubled], 1)

    # who looks at whom, and all at everything before the root
    sees = (node <= node.unsqueeze(1)) if seen is None else seen[..., 1:-1]
    sees = sees.expand(rows, -1, -1)
    sees = torch.cat([sees, sees.gather(1, of.unsqueeze(-1).expand(-1, -1, count))], 1)  # as the input it belongs to
    is_two = is_end.gather(1, of)
    at_seconds = sees.gather(2, of.unsqueeze(1).expand(-1, count + most_ends, -1)) & is_two.unsqueeze(1)
    not_itself = (node != of.unsqueeze(-1)) | ~is_two.unsqueeze(-1)  # the row's end comes after its code
    at_inputs = torch.cat([sees[:, :count], sees[:, count:] & not_itself], 1)
    before = steps(last_column + 1, start.device) < own[:, :1] - is_end[:, :1].long()
    mask = before.unsqueeze(1).repeat(1, count + most_ends, 1)
    mask.scatter_(2, column.unsqueeze(1).expand(-1, count + most_ends, -1), torch.cat([at_inputs, at_seconds], 2))

    # columns that are looked at
    width = runner.config.prefix_length + most + most // side + count + count // side + 1
    if seen is not None:
        width += _reserved(side) + 2 * count
    width = min(stepped(width), last_column + 1)
    view = runner.cache(model).view(batch.rows, column, width)
    made = through_layers(runner, model, inputs, place, mask[..., :width].unsqueeze(1), view)
    return made[:, :count]


def compact(runner: Any, batch: Batch, path: Tensor) -> None:
    """As `VQRunner.compact`: the inputs of nodes path[:, i] go where the i-th after the root is to stay."""
    level = steps(path.shape[1], path.device)
    node = of_copies(batch, path)
    own, is_end, beyond = _columns(runner, batch, batch.known_rows.unsqueeze(1) + level)
    stays, sibling = node == level, beyond + 2 * node
    cache = runner.cache("target")
    source = [torch.where(stays, own, sibling), torch.where(stays, own - 1, sibling + 1)]
    target = [own, torch.where(is_end, own - 1, cache.tensor.shape[4] - 1)]
    cache.move(batch.rows, torch.cat(source, 1), torch.cat(target, 1))


# What images are made of: a class, or a text. The models take it in before the first code.
#
# A condition is a prefix of inputs: one of a class, one for each token of a text. Its last input is the root of the
# first round. Those before it are taken in when a sequence is admitted.
#
# LlamaGen pads texts at their left and hides the padding. A text's inputs are not turned by their positions (their
# rotary angles are 0) and nothing looks at padding, so it is left out here: a text of n tokens takes n columns of the
# cache.


class Conditions:
    """What is kept of the conditions of running sequences, by cache row: 2s of slot s, 2s + 1 of its null condition.

    Attributes:
        last: of "target" and "draft", [2 * slots, dim], the last inputs.
        before: int64 [2 * slots], how many inputs come before those; None of classes, where none do.
    """

    def __init__(self, models: Mapping[str, Any], num_slots: int, device: torch.device) -> None:
        rows = 2 * num_slots
        self.last: dict[str, Tensor] = {}
        for name in ("target", "draft"):
            if models[name] is not None:
                self.last[name] = models[name].tok_embeddings.weight.new_zeros(rows, models[name].config.dim)
        has_classes = models["target"].config.num_classes
        self.before = None if has_classes else torch.zeros(rows, dtype=torch.int64, device=device)

    def columns(self, batch: Batch, position: Tensor) -> Tensor:
        """Cache columns of inputs at positions [R], of a batch's rows."""
        return position if self.before is None else position + self.before[batch.rows]

    def places(self, batch: Batch, config: Any, position: Tensor) -> Tensor:
        """What the layers of a model with this configuration take for positions [R, N] of a batch's inputs, which are
        those of the codes before them.
        """
        return position + self.before[batch.rows].unsqueeze(1) if config.text_places else position


def check_encoder(request: Request, runner: Any) -> None:
    """Raises ValueError where a request has a text and a `VQRunner` no text encoder."""
    if request.prompt is not None and runner.text_encoder is None:
        missing = "needs a text encoder and this engine has none"
        raise ValueError(f"prompt={shortened(request.prompt)} {missing}: {PLACE}")
    if request.prompt is not None:
        runner.text_encoder.check(request, runner.config.prefix_length)


def encode_texts(request: Request, runner: Any) -> None:
    """Has the texts of a checked request encoded, which are remembered."""
    for text in (request.prompt, request.negative_prompt):
        if text is not None:
            runner.text_of(text)


def take_in(runner: Any, sequences: list[Sequence]) -> None:
    """Has the models take in the conditions of sequences, all inputs but the last.

    Args:
        runner: a `VQRunner`, in whose slots nothing is known yet.
    """
    if runner.conditions.before is None:
        _take_in_classes(runner, sequences)
        return
    for own in alike(sequences, lambda sequence: runner.config.prefix_length):
        _take_in_texts(runner, own)


def _take_in_classes(runner: Any, sequences: list[Sequence]) -> None:
    """A class is one input; its null condition the null class."""
    null, numbers = runner.num_classes, []
    for sequence in sequences:
        label = null if sequence.request.label is None else sequence.request.label
        numbers += [(2 * sequence.slot, label), (2 * sequence.slot + 1, null)]
    rows, labels = send_integers(numbers, runner.device).unbind(1)
    uses = {"target"}.union(*(sequence.uses for sequence in sequences))
    for name, last in runner.conditions.last.items():
        if name in uses:
            last[rows] = runner.models[name].cls_embedding(labels).squeeze(1)


def _take_in_texts(runner: Any, sequences: list[Sequence]) -> None:
    """One forward of each model over all texts but their last tokens. What is beyond a shorter one is overwritten."""
    batch, conditions = batch_of(runner, sequences), runner.conditions
    requests = [sequence.request for sequence in sequences]
    texts = sent_texts(runner, requests, batch.num_branches)
    count = texts.count
    each = steps(len(count), runner.device)
    conditions.before[batch.rows] = count - 1
    uses = {"target"}.union(*(sequence.uses for sequence in sequences))
    runner.begin(None)
    for name, last in conditions.last.items():
        with runner.precision.fast():
            inputs = inputs_of_texts(runner.models[name], texts).to(last.dtype)
        last[batch.rows] = inputs[each, count - 1]
        if name in uses:
            features = _features(runner, batch, name, inputs[:, :-1])
        if name == "target" and "eagle" in uses:
            before = functional.pad(features, (0, 0, 1, 0))  # of each input, the feature before it
            _features(runner, batch, "eagle", inputs[:, :-1], past=before[:, :-1])
            before_last = before[each, count - 1].unflatten(0, (len(batch), batch.num_branches))
            runner.past.keep(batch, before_last.transpose(0, 1).unsqueeze(2), ahead=-1)


class Texts(NamedTuple):
    """Texts as models take them in, on the device.

    Attributes:
        tokens: as `VQRunner.text_of` has them, [R, N, ...], padded at the right. count: int64 [R], how many they are.
        is_null: bool [R], where the model's null caption is to be in their place; None where it never is.
    """

    tokens: Tensor
    count: Tensor
    is_null: Tensor | None


def sent_texts(runner: Any, requests: list[Request], num_branches: int) -> Texts:
    """The prompts of requests and, where `num_branches` is 2, after each of them what guidance leads away from.

    LlamaGen's null caption is as long as the prompt, as the authors mask it.
    """
    texts, is_null = [], []
    for request in requests:
        texts.append(own := runner.text_of(request.prompt))
        is_null.append(False)
        if num_branches == 2:
            negative, most = request.negative_prompt, runner.config.prefix_length
            other = runner.text_encoder.null(own, most) if negative is None else runner.text_of(negative)
            texts.append(own if other is None else other)
            is_null.append(other is None)
    count = np.array([len(text) for text in texts])
    padded = np.zeros((len(texts), count.max(), *texts[0].shape[1:]), texts[0].numpy().dtype)
    for row, text in zip(padded, texts):
        row[: len(text)] = text
    arrays = {"tokens": padded, "count": count} | ({"is_null": np.array(is_null)} if any(is_null) else {})
    sent = send(arrays, runner.device)
    return Texts(sent["tokens"], sent["count"], sent.get("is_null"))


def inputs_of_texts(model: GPT, texts: Texts) -> Tensor:
    """A model's inputs [R, N, dim] of texts; of its null caption the last so many tokens."""
    tokens = texts.tokens
    if texts.is_null is not None:
        null = model.cls_embedding.uncond_embedding
        place = len(null) - texts.count.unsqueeze(1) + steps(tokens.shape[1], tokens.device)
        tokens = torch.where(texts.is_null[:, None, None], null[place.clamp(max=len(null) - 1)], tokens)
    return model.cls_embedding(tokens)


def _features(runner: Any, batch: Batch, model: str, inputs: Tensor, past: Tensor | None = None) -> Tensor:
    """Features [R, N, dim] after a condition's inputs [R, N, dim], which go to the first columns of the cache."""
    if not inputs.shape[1]:
        return inputs
    start = torch.zeros_like(batch.known_rows)
    has_places = runner.models[model].config.text_places
    places = steps(inputs.shape[1], runner.device) if has_places else start.unsqueeze(1)
    position = places.expand(inputs.shape[:2])
    view, mask = runner.cache(model).look(batch.rows, start, 0, True, inputs.shape[1])
    return through_layers(runner, model, inputs, position, mask, view, past)


# The runner owns the models and, in slots allocated once, the codes and key-value caches of running sequences.


class VQRunner:
    """Answers what a method asks: the distributions after drafted codes, and to commit codes.

    Args:
        target: the model. num_slots: sequences in flight at most. device, precision: where and how it computes.
        noise: the source of randomness: a namespace with the functions of `cspd.noise`.
        draft: a smaller model of the same codes; eagle: a drafter on the target's features. tokenizer: of the codes.
        text_encoder: of texts.
        tuning: a `cspd.discrete.family.Tuning`, for methods that leave how far they draft to be decided.
        compiled: run the models' layers through torch.compile. graphs: run what has a fixed shape; by default as plain
            calls.

    Attributes:
        codes: int64 [slots, L + MOST_NODES], raster order. heat: float32, the same, for pictures.
        draws: float64, the same, one inside (0, 1) for each code. known: int64 [slots], codes committed.
        draft_calls: forwards of draft models in this round. graphs: that rounds run as, the engine's.
        past: what EAGLE's drafter takes in beside the codes.
        late: whether a round is counted when the next one is on its way; unread: rounds that are not counted yet, by
            the sequences' key. windows, nodes: of Jacobi methods, see `cspd.discrete.jacobi.kept_windows` and
            `cspd.discrete.jacobi.kept_nodes`.
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
        self.token_cost = torch.zeros(num_slots, length, device=device)
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

    def adopt(self, other: VQRunner) -> None:
        """Takes over what another model runner of the same models has measured."""
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
            return sample_published(self.models["target"], labels, **settings)

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
            features = features_with_row_ends(self, batch, model, codes, start, most, depth, seen)
        self._start("other")
        return features.unflatten(0, (len(batch), batch.num_branches)).transpose(0, 1)

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

    def commit(self, batch: Batch, codes: Tensor, token_cost: Tensor) -> None:
        """Writes codes and heat [B, n] after the committed ones; what is too much is overwritten later or left out."""
        place = batch.known_t.unsqueeze(1) + steps(codes.shape[1], self.device)
        slot = batch.slot.unsqueeze(1)
        self.codes[slot, place] = codes
        self.token_cost[slot, place] = token_cost

    def compact(self, batch: Batch, path: Tensor) -> None:
        """Moves keys and values of the last forward's nodes path[:, i], int64 [B, n], to the i-th place."""
        if self.config.row_end is not None:
            compact(self, batch, path)
            return
        start = self.conditions.columns(batch, batch.known_rows).unsqueeze(1)
        source = start + of_copies(batch, path)
        target = start + steps(path.shape[1], self.device)
        self.cache("target").move(batch.rows, source, target)

    def results(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
        """(codes [B, L], heat [B, L], which are codes and not -1, bool [B, L]) of sequences."""
        slots = send_integers([s.slot for s in sequences], self.device)
        codes = self.codes[slots, : self.seq_len]
        return codes, self.token_cost[slots, : self.seq_len], codes >= 0

    def so_far(self, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """(codes [1, L], heat [1, L]) of a running sequence, -1 and NaN where they are unknown."""
        codes, token_cost, _ = self.results([sequence])
        unknown = steps(self.seq_len, self.device) >= sequence.num_committed
        return codes.masked_fill(unknown, -1), token_cost.masked_fill(unknown, torch.nan)

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
