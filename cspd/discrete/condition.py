"""What images are made of: a class, or a text. The models take it in before the first code.

A condition is a prefix of inputs: one of a class, one for each token of a text. Its last input is the root of the first
round. Those before it are taken in when a sequence is admitted.

LlamaGen pads texts at their left and hides the padding. A text's inputs are not turned by their positions (their rotary
angles are 0) and nothing looks at padding, so it is left out here: a text of n tokens takes n columns of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cspd.discrete.batch import Batch, alike, batch_of
from cspd.discrete.forward import through_layers
from cspd.parsing import shortened
from cspd.sequence import Request, Sequence
from cspd.transfer import send, send_integers
from cspd.vq.gpt import GPT
from cspd.vq.steps import steps
from cspd.vq.text import PLACE


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


def check_encoder(request: Request, host: Any) -> None:
    """Raises ValueError where a request has a text and a `VQHost` no text encoder."""
    if request.prompt is not None and host.text_encoder is None:
        missing = "needs a text encoder and this engine has none"
        raise ValueError(f"prompt={shortened(request.prompt)} {missing}: {PLACE}")
    if request.prompt is not None:
        host.text_encoder.check(request, host.config.prefix_length)


def encode_texts(request: Request, host: Any) -> None:
    """Has the texts of a checked request encoded, which are remembered."""
    for text in (request.prompt, request.negative_prompt):
        if text is not None:
            host.text_of(text)


def take_in(host: Any, sequences: list[Sequence]) -> None:
    """Has the models take in the conditions of sequences, all inputs but the last.

    Args:
        host: a `VQHost`, in whose slots nothing is known yet.
    """
    if host.conditions.before is None:
        _take_in_classes(host, sequences)
        return
    for own in alike(sequences, lambda sequence: host.config.prefix_length):
        _take_in_texts(host, own)


def _take_in_classes(host: Any, sequences: list[Sequence]) -> None:
    """A class is one input; its null condition the null class."""
    null, numbers = host.num_classes, []
    for sequence in sequences:
        label = null if sequence.request.label is None else sequence.request.label
        numbers += [(2 * sequence.slot, label), (2 * sequence.slot + 1, null)]
    rows, labels = send_integers(numbers, host.device).unbind(1)
    uses = {"target"}.union(*(sequence.uses for sequence in sequences))
    for name, last in host.conditions.last.items():
        if name in uses:
            last[rows] = host.models[name].cls_embedding(labels).squeeze(1)


def _take_in_texts(host: Any, sequences: list[Sequence]) -> None:
    """One forward of each model over all texts but their last tokens. What is beyond a shorter one is overwritten."""
    batch, conditions = batch_of(host, sequences), host.conditions
    requests = [sequence.request for sequence in sequences]
    texts = sent_texts(host, requests, batch.copies)
    count = texts.count
    each = steps(len(count), host.device)
    conditions.before[batch.rows] = count - 1
    uses = {"target"}.union(*(sequence.uses for sequence in sequences))
    host.begin(None)
    for name, last in conditions.last.items():
        with host.precision.fast():
            inputs = inputs_of_texts(host.models[name], texts).to(last.dtype)
        last[batch.rows] = inputs[each, count - 1]
        if name in uses:
            features = _features(host, batch, name, inputs[:, :-1])
        if name == "target" and "eagle" in uses:
            before = functional.pad(features, (0, 0, 1, 0))  # of each input, the feature before it
            _features(host, batch, "eagle", inputs[:, :-1], past=before[:, :-1])
            before_last = before[each, count - 1].unflatten(0, (len(batch), batch.copies))
            host.past.keep(batch, before_last.transpose(0, 1).unsqueeze(2), ahead=-1)


class Texts(NamedTuple):
    """Texts as models take them in, on the device.

    Attributes:
        tokens: as `VQHost.text_of` has them, [R, N, ...], padded at the right. count: int64 [R], how many they are.
        is_null: bool [R], where the model's null caption is to be in their place; None where it never is.
    """

    tokens: Tensor
    count: Tensor
    is_null: Tensor | None


def sent_texts(host: Any, requests: list[Request], copies: int) -> Texts:
    """The prompts of requests and, where `copies` is 2, after each of them what guidance leads away from.

    LlamaGen's null caption is as long as the prompt, as the authors mask it.
    """
    texts, is_null = [], []
    for request in requests:
        texts.append(own := host.text_of(request.prompt))
        is_null.append(False)
        if copies == 2:
            negative, most = request.negative_prompt, host.config.prefix_length
            other = host.text_encoder.null(own, most) if negative is None else host.text_of(negative)
            texts.append(own if other is None else other)
            is_null.append(other is None)
    count = np.array([len(text) for text in texts])
    padded = np.zeros((len(texts), count.max(), *texts[0].shape[1:]), texts[0].numpy().dtype)
    for row, text in zip(padded, texts):
        row[: len(text)] = text
    arrays = {"tokens": padded, "count": count} | ({"is_null": np.array(is_null)} if any(is_null) else {})
    sent = send(arrays, host.device)
    return Texts(sent["tokens"], sent["count"], sent.get("is_null"))


def inputs_of_texts(model: GPT, texts: Texts) -> Tensor:
    """A model's inputs [R, N, dim] of texts; of its null caption the last so many tokens."""
    tokens = texts.tokens
    if texts.is_null is not None:
        null = model.cls_embedding.uncond_embedding
        place = len(null) - texts.count.unsqueeze(1) + steps(tokens.shape[1], tokens.device)
        tokens = torch.where(texts.is_null[:, None, None], null[place.clamp(max=len(null) - 1)], tokens)
    return model.cls_embedding(tokens)


def _features(host: Any, batch: Batch, model: str, inputs: Tensor, past: Tensor | None = None) -> Tensor:
    """Features [R, N, dim] after a condition's inputs [R, N, dim], which go to the first columns of the cache."""
    if not inputs.shape[1]:
        return inputs
    start = torch.zeros_like(batch.known_rows)
    has_places = host.models[model].config.text_places
    places = steps(inputs.shape[1], host.device) if has_places else start.unsqueeze(1)
    position = places.expand(inputs.shape[:2])
    view, mask = host.cache(model).look(batch.rows, start, 0, True, inputs.shape[1])
    return through_layers(host, model, inputs, position, mask, view, past)
