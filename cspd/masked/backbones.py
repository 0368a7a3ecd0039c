"""Backbones: compute the conditions z of an iteration's tokens, by the whole transformer or with LazyMAR's cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cspd.device import check_fits, send_integers
from cspd.heads.chain import Conditions, Rows, full_conditions
from cspd.masked.orders import timetable
from cspd.masked.runner import MARRunner
from cspd.method import as_it_is, nothing_more
from cspd.option import Option
from cspd.request import Request, Sequence
from mar.head import filled
from mar.model import MAR, PAD_TO, attend, following, keys_values

# A backbone is a function (runner, batch, rows) -> z float32 [G, R, D], G = 2 (unconditional branch second) if the
# batch is guided. `full_conditions` evaluates the whole transformer. A backbone with a name (`@backbone`) can be chosen
# in any sampler of MAR.


@dataclass(frozen=True)
class Backbone:
    """A registered backbone. All but the full one are heuristic.

    Attributes:
        conditions: see above. options: its own settings. check: raises ValueError on a bad request.
        resolve: fills in the settings that a checked request leaves open; raises ValueError if memory is too small.
    """

    conditions: Conditions
    options: tuple[Option, ...] = ()
    check: Callable[[Request, Any], None] = nothing_more
    resolve: Callable[[Request, Any], Request] = as_it_is


BACKBONES: dict[str, Backbone] = {"full": Backbone(full_conditions)}  # by name


def backbone(name: str, **attributes: Any) -> Callable[[Conditions], Conditions]:
    """Registers a function as a backbone under a name; attributes as in `Backbone`."""

    def named(conditions: Conditions) -> Conditions:
        BACKBONES[name] = Backbone(conditions, **attributes)
        return conditions

    return named


# MAR's backbone with LazyMAR's caches (arXiv 2503.12450).
#
# A refresh evaluates the whole transformer and caches it. A lazy evaluation then computes
#
# * in the encoder: the buffer and the newly committed tokens, over the cached keys and values of all committed ones;
# * in the decoder: all positions up to the keys and values of one layer (`selecting_layer`). It selects the positions
#   whose values changed most since the last evaluation. The later layers compute only these, the newly committed
#   tokens and the tokens to predict, over the cached keys and values of all positions.
#
# If every committed token is new and every position is selected, a lazy evaluation is a full one.

SELECTING = 3  # the layer, from 0, by whose values the released code selects; its models have 12 to 20 layers


def selecting_layer(model: MAR) -> int:
    """The decoder layer by whose values positions are selected: LazyMAR's, or the middle one of a shallow model."""
    return min(SELECTING, model.config.depth // 2)


@dataclass(frozen=True)
class Cache:
    """Keys, values and inputs of earlier evaluations, in slots; N = buffer + L entries, and one to write padding to.

    Attributes:
        encoder: [layers, slots, N + 1, 2D], keys and values: of the buffer, then of the tokens in generation order.
        decoder: [layers from `selecting_layer` on, slots, N + 1, 2D], the same by position.
        inputs: float32 [slots, N + 1, D], the decoder's inputs by position.
    """

    encoder: Tensor
    decoder: Tensor
    inputs: Tensor

    @classmethod
    def empty(cls, model: MAR, num_slots: int, dtype: torch.dtype, device: torch.device) -> Cache:
        """Allocates the cache; dtype: of the keys and values, as the model computes them."""
        dim, depth = model.config.embed_dim, model.config.depth
        size = model.config.buffer_size + model.config.seq_len + 1

        def keys_values_of(layers: int) -> Tensor:
            return torch.zeros(layers, num_slots, size, 2 * dim, dtype=dtype, device=device)

        inputs = torch.zeros(num_slots, size, dim, device=device)
        return cls(keys_values_of(depth), keys_values_of(depth - selecting_layer(model)), inputs)


def cache_bytes(model: MAR, dtype: torch.dtype) -> int:
    """Bytes of a slot of `Cache`."""
    size = model.config.buffer_size + model.config.seq_len + 1
    layers = 2 * model.config.depth - selecting_layer(model)
    return size * model.config.embed_dim * (layers * 2 * dtype.itemsize + 4)


def stretch(order: Tensor, start: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Positions [B, most] of the count[b] tokens after the first start[b] of order [B, L], and a mask of padding."""
    is_padding = torch.arange(most, device=order.device) >= count.unsqueeze(-1)
    return following(order, start, most), is_padding


def refresh(
    model: MAR,
    cache: Cache,
    slots: Tensor,
    tokens: Tensor,
    order: Tensor,
    num_known: Several[int] | Tensor,
    class_embedding: Tensor,
    positions: Tensor,
    padded: int | None = None,
) -> Tensor:
    """Evaluates the whole transformer, and caches keys, values and inputs of the first sequences.

    Args:
        slots: int64 [S], of the first S of the B sequences; the others are not cached.
        tokens, order, num_known, class_embedding, positions, padded: as in `MAR.forward`.

    Returns:
        The last block's output [B, M, D] at the positions, from which `MAR.condition` computes z.
    """
    size, buffer = len(slots), model.config.buffer_size
    known, is_known = model.known(order, num_known, padded)
    x = model.embed(tokens, known, is_known, class_embedding)
    mask = model.attention_mask(F.pad(is_known, (buffer, 0), value=True))
    zero = cache.encoder.new_zeros(())  # a Python number would be copied to the device
    for layer, block in zip(cache.encoder, model.encoder_blocks):
        normed = block.norm1(x)
        own = keys_values(block, normed)
        layer[slots, : x.shape[1]] = own[:size].to(layer.dtype)
        layer[slots, x.shape[1] :] = zero  # an earlier sequence may have left NaN there, which a mask does not stop
        x = attend(block, x, normed, own, mask)

    x = model.arrange(model.encoder_norm(x), known, is_known)
    length, selecting = x.shape[1], selecting_layer(model)
    cache.inputs[slots, :length] = x[:size]
    for block in model.decoder_blocks[:selecting]:
        x = block(x)
    *_, last = model.decoder_blocks
    index = (positions + buffer).unsqueeze(-1).expand(-1, -1, x.shape[-1])
    for layer, block in zip(cache.decoder, model.decoder_blocks[selecting:]):
        normed = block.norm1(x)
        own = keys_values(block, normed)
        layer[slots, :length] = own[:size].to(layer.dtype)
        if block is last:
            x, normed = x.gather(1, index), normed.gather(1, index)
        x = attend(block, x, normed, own)
    return x


class Counts(NamedTuple):
    """Numbers of tokens, see `lazy`: of each sequence [B], or their maximum."""

    committed: Any
    new: Any
    next: Any
    others: Any


def lazy(
    model: MAR,
    cache: Cache,
    slots: Tensor,
    tokens: Tensor,
    order: Tensor,
    counts: Several[Several[int]] | Tensor,
    class_embedding: Tensor,
    most: Counts | None = None,
) -> tuple[Tensor, Tensor]:
    """Evaluates new tokens and the positions that changed most, over the cache, and updates the cache.

    Args:
        slots: int64 [B], all different. tokens, order, class_embedding: as in `MAR.forward`.
        counts: four numbers of each sequence, on the CPU, or int64 [B, 4] together with `most`: committed tokens; the
            last of them that were not committed at the last evaluation; the tokens after them to predict; and the other
            positions that all of the decoder computes, the new tokens among them.
        most: at least the maximum of each count; then shapes do not depend on tensors.

    Returns:
        The last block's output [B, M, D] at the positions to predict, and these positions [B, M]; padded at the end.
    """
    most = most or Counts(*map(max, zip(*counts)))
    num = Counts(*torch.as_tensor(counts, device=order.device).unbind(1))
    at_new = _encode_new(model, cache, slots, tokens, order, num, most, class_embedding)
    return _decode_changed(model, cache, slots, order, num, most, at_new)


def _encode_new(
    model: MAR,
    cache: Cache,
    slots: Tensor,
    tokens: Tensor,
    order: Tensor,
    num: Counts,
    most: Counts,
    class_embedding: Tensor,
) -> Tensor:
    """Encodes buffer and new tokens over all committed ones; returns the new ones' indices [B, M] in the decoder."""
    buffer, padding = model.config.buffer_size, cache.inputs.shape[1] - 1
    first_new = num.committed - num.new
    new, is_padding = stretch(order, first_new, num.new, filled(most.new))
    ranks = first_new.unsqueeze(-1) + torch.arange(new.shape[1], device=order.device)
    at_buffer = torch.arange(buffer, device=order.device).expand(len(order), -1)
    indices = torch.cat([at_buffer, (ranks + buffer).masked_fill(is_padding, padding)], dim=1)
    length = min(math.ceil((buffer + most.committed) / PAD_TO) * PAD_TO, padding)
    x = model.embed(tokens, new, ~is_padding, class_embedding)
    is_known = torch.arange(length, device=order.device) < (num.committed + buffer).unsqueeze(-1)
    mask = model.attention_mask(is_known)
    for layer, block in zip(cache.encoder, model.encoder_blocks):
        normed = block.norm1(x)
        _write(layer, slots, indices, keys_values(block, normed))
        x = attend(block, x, normed, layer[slots, :length], mask)
    encoded = model.decoder_embed(model.encoder_norm(x))

    at_new = (new + buffer).masked_fill(is_padding, padding)
    indices = torch.cat([at_buffer, at_new], dim=1)
    position_embedding = model.decoder_pos_embed_learned[0, indices.clamp(max=padding - 1)]
    _write(cache.inputs, slots, indices, encoded + position_embedding)
    return at_new


def _decode_changed(
    model: MAR, cache: Cache, slots: Tensor, order: Tensor, num: Counts, most: Counts, at_new: Tensor
) -> tuple[Tensor, Tensor]:
    """Decodes all positions up to the selecting layer, and then only the selected ones; returns as `lazy`."""
    buffer = model.config.buffer_size
    size = cache.inputs.shape[1] - 1
    padding = size  # the entry that padding is written to
    x = cache.inputs[slots, :size]
    selecting = selecting_layer(model)
    for block in model.decoder_blocks[:selecting]:
        x = block(x)
    first, *blocks = model.decoder_blocks[selecting:]
    normed = first.norm1(x)
    own, before = keys_values(first, normed), cache.decoder[0][slots, :size]
    cache.decoder[0][slots, :size] = own.to(before.dtype)

    # select the tokens to predict, the new tokens, and the positions whose values changed most
    positions, is_padding = stretch(order, num.committed, num.next, filled(most.next))
    at_next = (positions + buffer).masked_fill(is_padding, padding)
    similarity = F.pad(_similarity(own, before, model.config.num_heads), (0, 1))
    similarity = similarity.scatter(1, at_new, -torch.inf).scatter(1, at_next, torch.inf)
    chosen = similarity[:, :size].topk(min(filled(most.others), size), largest=False).indices
    is_padding = torch.arange(chosen.shape[1], device=order.device) >= num.others.unsqueeze(-1)
    selected = torch.cat([at_next, chosen.masked_fill(is_padding, padding)], dim=1)

    # the other layers compute the selected positions only, over the cached keys and values of all
    index = torch.cat([positions + buffer, chosen], dim=1).unsqueeze(-1).expand(-1, -1, x.shape[-1])
    x = attend(first, x.gather(1, index), normed.gather(1, index), own)
    num_next = positions.shape[1]
    for layer, block in zip(cache.decoder[1:], blocks):
        normed = block.norm1(x)
        _write(layer, slots, selected, keys_values(block, normed))
        if block is blocks[-1]:
            x, normed = x[:, :num_next], normed[:, :num_next]
        x = attend(block, x, normed, layer[slots, :size])
    return x[:, :num_next], positions


def _write(layer: Tensor, slots: Tensor, indices: Tensor, values: Tensor) -> None:
    """Writes values [B, M, D] to the entries [B, M] of slots [B]."""
    layer[slots.unsqueeze(-1), indices] = values.to(layer.dtype)


def _similarity(own: Tensor, before: Tensor, num_heads: int) -> Tensor:
    """Cosine similarity [B, N] of the values in keys and values [B, N, 2D], the mean over the heads."""
    _, values = own.chunk(2, dim=-1)
    _, values_before = before.chunk(2, dim=-1)
    by_head = values.unflatten(-1, (num_heads, -1)).float()
    by_head_before = values_before.unflatten(-1, (num_heads, -1)).float()
    return F.cosine_similarity(by_head, by_head_before, dim=-1).mean(-1)


# The cached backbone of LazyMAR (arXiv 2503.12450): most iterations compute only a part of the transformer. Heuristic.

REFRESH = Option(
    "refresh",
    int,
    "after the warm-up, evaluate the full transformer only at every N-th iteration; 1: every iteration",
    default=9,
    low=1,
    metavar="N",
)
WARMUP = Option(
    "warmup",
    int,
    "number of first iterations that evaluate the full transformer",
    default=5,
    metavar="N",
)
RETAIN = Option(
    "retain",
    float,
    "fraction of the positions that the deeper decoder layers compute in the first iterations; it falls later",
    default=1.0,
    high=1,
    metavar="SHARE",
)
REUSE_NULL = Option(
    "reuse_null",
    bool,
    "evaluate the unconditional branch only with the full transformer, and reuse its difference in between",
    default=True,
)
OPTIONS = (REFRESH, WARMUP, RETAIN, REUSE_NULL)
RUNS = [(1, 20), (0.6, 1), (0.5, 4), (0.4, 5), (0.15, 5), (0.12, 5), (0.05, 24)]  # (share, iterations of 64)
SHARES = np.repeat(*zip(*RUNS))
SPARE = 15 / 320  # of the positions: the least that are selected beside the mandatory ones


class Caches:
    """The caches of sequences, in slots. Requests that need equal caches share them, in different slots.

    Attributes:
        shape: the requests that they serve, see `_shape`.
        num_branches: 2 if the unconditional branch has its own cache. cache: of the transformer, branches x slots.
        distance: float32 [slots, L + 1, D], the unconditional branch's last hidden state minus the conditional one, by
            position, with an entry for padding; None if it is not reused.
        committed: int64 [slots], on the CPU: committed tokens of each sequence at its last evaluation.
    """

    def __init__(self, runner: MARRunner, request: Request) -> None:
        model, slots = runner.target, runner.num_slots
        self.shape = self.num_branches, has_distance = _shape(request)
        self.cache = Cache.empty(model, self.num_branches * slots, runner.precision.dtype, runner.device)
        self.distance = None
        if has_distance:
            self.distance = torch.zeros(slots, runner.seq_len + 1, model.config.embed_dim, device=runner.device)
        self.committed = np.zeros(slots, dtype=np.int64)

    def slots(self, slots: Tensor) -> Tensor:
        """Indices into `cache` of the sequences in these slots, the unconditional branch second."""
        return torch.cat([slots + branch * len(self.committed) for branch in range(self.num_branches)])


def _shape(request: Request) -> tuple[int, bool]:
    """(number of branches with a cache of the transformer, whether the unconditional branch's distance is cached)."""
    reuses_null = request.guided and request.reuse_null
    num_branches = 2 if request.guided and not request.reuse_null else 1
    return num_branches, reuses_null


def _model(runner: MARRunner) -> MAR:
    return runner.precision.prepare(runner.target)


def bytes_per_slot(runner: MARRunner, request: Request) -> int:
    """Bytes of the caches that a slot adds."""
    num_branches, has_distance = _shape(request)
    distance = 4 * (runner.seq_len + 1) * runner.config.embed_dim
    return num_branches * cache_bytes(runner.target, runner.precision.dtype) + has_distance * distance


def resolve(request: Request, runner: MARRunner) -> Request:
    """The unchanged request; raises ValueError if it needs new caches that would not fit into memory."""
    if _shared(runner, request) is None:
        what, fix = " with backbone='cached'", "use backbone='full'"
        check_fits(bytes_per_slot(runner, request), runner.num_slots, what, fix, runner.device)
    return request


def kind(sequence: Sequence) -> str:
    """The evaluation of a sequence's next iteration: "full", "refresh" (full, and cached), or "lazy"."""
    request = sequence.request
    since_warmup = sequence.iteration - request.warmup
    is_last = sequence.iteration + 1 == request.num_iter
    if since_warmup >= 0 and since_warmup % request.refresh:
        return "lazy"
    is_cache_used = since_warmup >= 0 and request.refresh > 1 and not is_last
    return "refresh" if is_cache_used else "full"


@backbone("cached", options=OPTIONS, resolve=resolve)
def conditions(runner: MARRunner, batch: list[Sequence], rows: Rows) -> Tensor:
    """z of the rows [G, R, D], as `MARRunner.conditions` or an approximation of it (arXiv 2503.12450).

    Sequences are grouped by the kind of their evaluation.
    """
    kinds = np.array([kind(sequence) for sequence in batch])
    if (kinds == kinds[0]).all():
        return EVALUATIONS[kinds[0]](runner, batch, rows)
    of_row = np.repeat(kinds, rows.counts)
    parts, which = [], []
    for name in np.unique(kinds):
        members = np.flatnonzero(kinds == name)
        own = [batch[i] for i in members]
        own_rows = runner.rows(own, [rows.committed[i] for i in members], [rows.counts[i] for i in members])
        parts.append(EVALUATIONS[name](runner, own, own_rows))
        which.append(np.flatnonzero(of_row == name))
    back = send_integers(np.argsort(np.concatenate(which)), runner.device)
    return torch.cat(parts, dim=1)[:, back]


def _refreshed(runner: MARRunner, batch: list[Sequence], rows: Rows) -> Tensor:
    """z of the rows by a full evaluation, which fills the caches."""
    caches, num_branches = _caches(runner, batch), 2 if batch[0].request.guided else 1
    slots, committed = np.array([s.slot for s in batch]), np.array(rows.committed)
    # the unconditional branch's distance is needed for every token that is predicted before the next refresh
    committed_later = []
    for sequence in batch:
        num_iterations = 1 if caches.distance is None else sequence.request.refresh
        committed_later.append(_committed_after(sequence, num_iterations, runner.seq_len))
    num_ahead = np.array(committed_later) - committed
    padded = runner.target.padded(int(committed.max()))
    most = runner.graphs.size(filled(int(num_ahead.max())))
    evaluate = functools.partial(_refresh, runner, caches, num_branches, padded, most)
    numbers = send_integers(runner.padded_batch([slots, committed, num_ahead]), runner.device)
    z = runner.graphs.run(("refresh", caches, num_branches, padded, most), evaluate, numbers)
    caches.committed[slots] = committed
    return z[:, rows.sequence, rows.offset]


def _refresh(runner: MARRunner, caches: Caches, num_branches: int, padded: int, most: int, numbers: Tensor) -> Tensor:
    """z [G, B, most, D] of the tokens after the committed ones, by `refresh`.

    Args:
        numbers: int64 [3, B]: slots; committed tokens; the tokens after them that are predicted before the next
            refresh.
    """
    slots, committed, num_ahead = numbers
    tokens, order, embedding = _inputs(runner, slots, num_branches)
    positions, is_padding = stretch(runner.order[slots], committed, num_ahead, most)
    inputs = tokens, order, committed.repeat(num_branches), embedding, positions.repeat(num_branches, 1), padded
    with runner.precision.fast():
        x = refresh(_model(runner), caches.cache, caches.slots(slots), *inputs).unflatten(0, (num_branches, -1))
    if caches.distance is not None:
        entries = positions.masked_fill(is_padding, runner.seq_len)
        caches.distance[slots.unsqueeze(-1), entries] = (x[1] - x[0]).float()
    return _conditions(runner, x, positions)


def _lazy(runner: MARRunner, batch: list[Sequence], rows: Rows) -> Tensor:
    """z of the rows by a lazy evaluation, which updates the caches."""
    caches, slots = _caches(runner, batch), np.array([s.slot for s in batch])
    counts = planned(runner, batch, rows, caches.committed[slots])
    most_committed, *others = counts.max(axis=0).tolist()
    most = Counts(runner.target.padded(most_committed), *(runner.graphs.size(filled(most)) for most in others))
    evaluate = functools.partial(_evaluate_lazily, runner, caches, most)
    # the evaluation reads these values before it overwrites them: a captured graph must restore them
    changed = caches.cache.decoder[0]
    numbers = send_integers(runner.padded_batch([slots, *counts.T]), runner.device)
    z = runner.graphs.run(("lazy", caches, most), evaluate, numbers, state=[changed])
    for sequence in batch:
        sequence.stats.lazy_backbone_calls += 1
    caches.committed[slots] = rows.committed
    return z[:, rows.sequence, rows.offset]


def _evaluate_lazily(runner: MARRunner, caches: Caches, most: Counts, numbers: Tensor) -> Tensor:
    """z [G, B, M, D] of the next tokens, by `lazy`; numbers: int64 [5, B], slots and the four counts."""
    slots, *counts = numbers
    tokens, order, embedding = _inputs(runner, slots, caches.num_branches)
    counts = torch.stack(counts, dim=1).repeat(caches.num_branches, 1)
    with runner.precision.fast():
        x, positions = lazy(_model(runner), caches.cache, caches.slots(slots), tokens, order, counts, embedding, most)
    x, positions = x.unflatten(0, (caches.num_branches, -1)), positions[: len(slots)]
    if caches.distance is not None:
        x = torch.cat([x, x + caches.distance[slots.unsqueeze(-1), positions]])
    return _conditions(runner, x, positions)


EVALUATIONS = {"full": MARRunner.conditions, "refresh": _refreshed, "lazy": _lazy}


def _caches(runner: MARRunner, batch: list[Sequence]) -> Caches:
    """The caches of a batch. They are freed with the last key that uses them, or never if CUDA graphs read them."""
    round_state, request = runner.round_state[batch[0].key], batch[0].request
    if "caches" not in round_state:
        round_state["caches"] = _shared(runner, request) or Caches(runner, request)
        if runner.graphs.enabled:
            runner.graphs.lasting["caches", _shape(request)] = round_state["caches"]
    return round_state["caches"]


def _shared(runner: MARRunner, request: Request) -> Caches | None:
    """Existing caches that a request can use, or None."""
    shape = _shape(request)
    for round_state in runner.round_state.values():
        if "caches" in round_state and round_state["caches"].shape == shape:
            return round_state["caches"]
    return runner.graphs.lasting.get(("caches", shape))


def _committed_after(sequence: Sequence, num_iterations: int, seq_len: int) -> int:
    """Tokens of a sequence that are committed after `num_iterations` more iterations, or at the end."""
    masked = timetable(sequence.request, seq_len).masked
    last = min(sequence.iteration + num_iterations, len(masked)) - 1
    return seq_len - int(masked[last])


def planned(runner: MARRunner, batch: list[Sequence], rows: Rows, committed_before: np.ndarray) -> np.ndarray:
    """The counts [B, 4] of `lazy`; committed_before: int64 [B], committed tokens at the last evaluation."""
    request = batch[0].request
    num_positions = runner.config.buffer_size + runner.seq_len
    committed, predicted = np.array(rows.committed), np.array(rows.counts)
    new = committed - committed_before
    progress = [len(SHARES) * s.iteration // s.request.num_iter for s in batch]
    retained = np.floor(request.retain * SHARES[progress] * num_positions).astype(np.int64)
    others = np.maximum(retained - predicted, new + math.ceil(SPARE * num_positions))
    others = np.minimum(others, num_positions - predicted)
    return np.stack([committed, new, predicted, others], axis=1)


def _inputs(runner: MARRunner, slots: Tensor, num_branches: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, order, class embedding) of slots [B], repeated for each branch, the unconditional branch second."""
    embedding = runner.classes["target"][runner.label[slots]]
    if num_branches == 2:
        embedding = torch.cat([embedding, runner.target.fake_latent.expand_as(embedding)])
    return runner.tokens[slots].repeat(num_branches, 1, 1), runner.order[slots].repeat(num_branches, 1), embedding


def _conditions(runner: MARRunner, x: Tensor, positions: Tensor) -> Tensor:
    """z [G, B, M, D] of hidden states [G, B, M, D] at positions [B, M]."""
    with runner.precision.fast():
        return _model(runner).condition(x, positions).float()
