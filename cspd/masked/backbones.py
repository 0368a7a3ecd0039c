"""How the conditions z of an iteration's tokens are computed: by the whole transformer, or by LazyMAR's cache."""

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

# How the conditions z of an iteration's tokens are computed.
#
# A backbone is a function (runner, batch, rows) -> z float32 [G, R, D], G = 2, the null class second, where the batch
# is guided. `full_conditions` evaluates the whole transformer. Under a name (`@backbone`) any sampler of MAR can take
# it.


@dataclass(frozen=True)
class Backbone:
    """A way to compute conditions. All but the full one are heuristic.

    Attributes:
        conditions: see above. options: settings of its own. check: raises ValueError on a bad request.
        resolve: decides what a checked request leaves open; raises ValueError on too little memory.
    """

    conditions: Conditions
    options: tuple[Option, ...] = ()
    check: Callable[[Request, Any], None] = nothing_more
    resolve: Callable[[Request, Any], Request] = as_it_is


BACKBONES: dict[str, Backbone] = {"full": Backbone(full_conditions)}  # by name


def backbone(name: str, **attributes: Any) -> Callable[[Conditions], Conditions]:
    """Names a function as a backbone that a request can ask for; attributes as in `Backbone`."""

    def named(conditions: Conditions) -> Conditions:
        BACKBONES[name] = Backbone(conditions, **attributes)
        return conditions

    return named


# MAR's backbone with what earlier evaluations left: LazyMAR's caches (arXiv 2503.12450).
#
# A refresh evaluates everything and keeps it. A lazy evaluation computes, after that,
#
# * in the encoder, the buffer and the tokens that are newly known, over the kept keys and values of all known ones;
# * in the decoder, all positions up to the keys and values of one layer (`judged_layer`). There the positions are
#   chosen
#   whose values changed most since the evaluation before. From there on only these are computed, with those newly
#   known
#   and those to be predicted, over the kept keys and values of all.
#
# Where every known token is new and every position is chosen, a lazy evaluation is the full one.

JUDGED = 3  # the layer, from 0, by whose values the authors' code chooses; its models have 12 to 20


def judged_layer(model: MAR) -> int:
    """The decoder's layer by whose values positions are chosen: LazyMAR's, or the middle one of a shallow model."""
    return min(JUDGED, model.config.depth // 2)


@dataclass(frozen=True)
class Kept:
    """What is kept of earlier evaluations, in slots; N = buffer + L places, and one where padding is written.

    Attributes:
        encoder: [layers, slots, N + 1, 2D], keys and values: of the buffer, then of the tokens in generation order.
        decoder: [layers from `judged_layer` on, slots, N + 1, 2D], the same by position.
        inputs: float32 [slots, N + 1, D], of the decoder by position, the encoder's outputs among them.
    """

    encoder: Tensor
    decoder: Tensor
    inputs: Tensor

    @classmethod
    def empty(cls, model: MAR, num_slots: int, dtype: torch.dtype, device: torch.device) -> Kept:
        """Keys and values are of a dtype: what the model computes them in."""
        dim, depth = model.config.embed_dim, model.config.depth
        places = model.config.buffer_size + model.config.seq_len + 1

        def keys_values_of(layers: int) -> Tensor:
            return torch.zeros(layers, num_slots, places, 2 * dim, dtype=dtype, device=device)

        inputs = torch.zeros(num_slots, places, dim, device=device)
        return cls(keys_values_of(depth), keys_values_of(depth - judged_layer(model)), inputs)


def bytes_kept(model: MAR, dtype: torch.dtype) -> int:
    """Bytes of a slot of `Kept`."""
    places = model.config.buffer_size + model.config.seq_len + 1
    layers = 2 * model.config.depth - judged_layer(model)
    return places * model.config.embed_dim * (layers * 2 * dtype.itemsize + 4)


def stretch(order: Tensor, start: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Positions [B, most] of count[b] tokens of each order [B, L] from rank start[b] on, and which are padding."""
    is_padding = torch.arange(most, device=order.device) >= count.unsqueeze(-1)
    return following(order, start, most), is_padding


def refresh(
    model: MAR,
    kept: Kept,
    slots: Tensor,
    tokens: Tensor,
    order: Tensor,
    num_known: Several[int] | Tensor,
    class_embedding: Tensor,
    positions: Tensor,
    padded: int | None = None,
) -> Tensor:
    """A full evaluation that keeps what later ones need of its first sequences.

    Args:
        slots: int64 [S], of the first S of the B sequences; of the others nothing is kept.
        tokens, order, num_known, class_embedding, positions, padded: as of `MAR.forward`.

    Returns:
        The last block's output [B, M, D] at the positions, of which `MAR.condition` makes z.
    """
    size, buffer = len(slots), model.config.buffer_size
    known, is_known = model.known(order, num_known, padded)
    x = model.embed(tokens, known, is_known, class_embedding)
    mask = model.attention_mask(F.pad(is_known, (buffer, 0), value=True))
    nothing = kept.encoder.new_zeros(())  # a Python number would be copied to the device
    for layer, block in zip(kept.encoder, model.encoder_blocks):
        normed = block.norm1(x)
        own = keys_values(block, normed)
        layer[slots, : x.shape[1]] = own[:size].to(layer.dtype)
        layer[slots, x.shape[1] :] = nothing  # what a sequence before left there may be NaN, which a mask does not stop
        x = attend(block, x, normed, own, mask)

    x = model.arrange(model.encoder_norm(x), known, is_known)
    places, judged = x.shape[1], judged_layer(model)
    kept.inputs[slots, :places] = x[:size]
    for block in model.decoder_blocks[:judged]:
        x = block(x)
    *_, last = model.decoder_blocks
    index = (positions + buffer).unsqueeze(-1).expand(-1, -1, x.shape[-1])
    for layer, block in zip(kept.decoder, model.decoder_blocks[judged:]):
        normed = block.norm1(x)
        own = keys_values(block, normed)
        layer[slots, :places] = own[:size].to(layer.dtype)
        if block is last:
            x, normed = x.gather(1, index), normed.gather(1, index)
        x = attend(block, x, normed, own)
    return x


class Counts(NamedTuple):
    """How many tokens, as `lazy` has them: of each sequence [B], or the most of any."""

    known: Any
    new: Any
    next: Any
    others: Any


def lazy(
    model: MAR,
    kept: Kept,
    slots: Tensor,
    tokens: Tensor,
    order: Tensor,
    counts: Several[Several[int]] | Tensor,
    class_embedding: Tensor,
    most: Counts | None = None,
) -> tuple[Tensor, Tensor]:
    """An evaluation of what is new or has changed most, over what is kept; keeps what it computes.

    Args:
        slots: int64 [B], all different. tokens, order, class_embedding: as of `MAR.forward`.
        counts: four of each sequence, on the CPU, where they decide shapes, or int64 [B, 4], with `most`. How many
            tokens are known; how many of them, the last, the evaluation before did not know; how many come next in its
            order and are to be predicted; and how many other positions are computed in all of the decoder. The new ones
            are the first of these.
        most: at least the largest of each; with it all shapes are given, and nothing is read from tensors.

    Returns:
        The last block's output [B, M, D] at the positions to be predicted, and these [B, M]; padding after them.
    """
    most = most or Counts(*map(max, zip(*counts)))
    num = Counts(*torch.as_tensor(counts, device=order.device).unbind(1))
    at_new = _encode_new(model, kept, slots, tokens, order, num, most, class_embedding)
    return _decode_changed(model, kept, slots, order, num, most, at_new)


def _encode_new(
    model: MAR,
    kept: Kept,
    slots: Tensor,
    tokens: Tensor,
    order: Tensor,
    num: Counts,
    most: Counts,
    class_embedding: Tensor,
) -> Tensor:
    """The encoder of buffer and new tokens, over all known ones; the places [B, M] of the new ones in the decoder."""
    buffer, places = model.config.buffer_size, kept.inputs.shape[1] - 1
    first_new = num.known - num.new
    new, is_padding = stretch(order, first_new, num.new, filled(most.new))
    ranks = first_new.unsqueeze(-1) + torch.arange(new.shape[1], device=order.device)
    start = torch.arange(buffer, device=order.device).expand(len(order), -1)
    where = torch.cat([start, (ranks + buffer).masked_fill(is_padding, places)], dim=1)
    length = min(math.ceil((buffer + most.known) / PAD_TO) * PAD_TO, places)
    x = model.embed(tokens, new, ~is_padding, class_embedding)
    is_known = torch.arange(length, device=order.device) < (num.known + buffer).unsqueeze(-1)
    mask = model.attention_mask(is_known)
    for layer, block in zip(kept.encoder, model.encoder_blocks):
        normed = block.norm1(x)
        _write(layer, slots, where, keys_values(block, normed))
        x = attend(block, x, normed, layer[slots, :length], mask)
    encoded = model.decoder_embed(model.encoder_norm(x))

    at_new = (new + buffer).masked_fill(is_padding, places)
    where = torch.cat([start, at_new], dim=1)
    _write(kept.inputs, slots, where, encoded + model.decoder_pos_embed_learned[0, where.clamp(max=places - 1)])
    return at_new


def _decode_changed(
    model: MAR, kept: Kept, slots: Tensor, order: Tensor, num: Counts, most: Counts, at_new: Tensor
) -> tuple[Tensor, Tensor]:
    """The decoder, everywhere up to the layer that judges and from there on where it must be; returns as `lazy`."""
    buffer, places = model.config.buffer_size, kept.inputs.shape[1] - 1
    x = kept.inputs[slots, :places]
    judged = judged_layer(model)
    for block in model.decoder_blocks[:judged]:
        x = block(x)
    first, *blocks = model.decoder_blocks[judged:]
    normed = first.norm1(x)
    own, before = keys_values(first, normed), kept.decoder[0][slots, :places]
    kept.decoder[0][slots, :places] = own.to(before.dtype)

    # from there on, only where a token is to be predicted, is new, or values changed most
    positions, is_padding = stretch(order, num.known, num.next, filled(most.next))
    at_next = (positions + buffer).masked_fill(is_padding, places)
    similarity = F.pad(_similarity(own, before, model.config.num_heads), (0, 1))
    similarity = similarity.scatter(1, at_new, -torch.inf).scatter(1, at_next, torch.inf)
    chosen = similarity[:, :places].topk(min(filled(most.others), places), largest=False).indices
    is_padding = torch.arange(chosen.shape[1], device=order.device) >= num.others.unsqueeze(-1)
    where = torch.cat([at_next, chosen.masked_fill(is_padding, places)], dim=1)
    index = torch.cat([positions + buffer, chosen], dim=1).unsqueeze(-1).expand(-1, -1, x.shape[-1])
    x = attend(first, x.gather(1, index), normed.gather(1, index), own)
    wanted = positions.shape[1]
    for layer, block in zip(kept.decoder[1:], blocks):
        normed = block.norm1(x)
        _write(layer, slots, where, keys_values(block, normed))
        if block is blocks[-1]:
            x, normed = x[:, :wanted], normed[:, :wanted]
        x = attend(block, x, normed, layer[slots, :places])
    return x[:, :wanted], positions


def _write(kept: Tensor, slots: Tensor, where: Tensor, values: Tensor) -> None:
    """Values [B, M, D] at places [B, M] of slots [B]."""
    kept[slots.unsqueeze(-1), where] = values.to(kept.dtype)


def _similarity(own: Tensor, before: Tensor, num_heads: int) -> Tensor:
    """Cosine similarity [B, N] of values with those before, the mean over the heads, of keys and values [B, N, 2D]."""
    values, values_before = (each.chunk(2, dim=-1)[1].unflatten(-1, (num_heads, -1)).float() for each in (own, before))
    return F.cosine_similarity(values, values_before, dim=-1).mean(-1)


# The cached backbone of LazyMAR (arXiv 2503.12450): most iterations compute a part of the transformer. Heuristic.

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
    "first iterations, which evaluate the full transformer",
    default=5,
    metavar="N",
)
RETAIN = Option(
    "retain",
    float,
    "fraction of the positions that the deeper decoder layers compute at first; it falls over the iterations",
    default=1.0,
    high=1,
    metavar="SHARE",
)
REUSE_NULL = Option(
    "reuse_null",
    bool,
    "evaluate the unconditional branch only with the full transformer, and reuse its difference between",
    default=True,
)
OPTIONS = (REFRESH, WARMUP, RETAIN, REUSE_NULL)
RUNS = [(1, 20), (0.6, 1), (0.5, 4), (0.4, 5), (0.15, 5), (0.12, 5), (0.05, 24)]  # shares, in how many of 64 iterations
SHARES = np.repeat(*zip(*RUNS))
SPARE = 15 / 320  # of the positions: at least so many are chosen beside those that always are


class Caches:
    """What sequences keep, in slots. Kinds of requests that keep the same share them: no two have the same slots.

    Attributes:
        shape: which requests they serve, see `_shape`.
        num_branches: 2 where the null class has caches of its own. kept: of the transformer, copies x slots.
        distance: float32 [slots, L + 1, D], the null class's last hidden state minus the class's, by position, with a
            place for padding; None where it is not reused.
        known: int64 [slots], on the CPU: how many tokens of each sequence the last evaluation knew.
    """

    def __init__(self, runner: MARRunner, request: Request) -> None:
        model, slots = runner.target, runner.num_slots
        self.shape = self.num_branches, has_distance = _shape(request)
        self.kept = Kept.empty(model, self.num_branches * slots, runner.precision.dtype, runner.device)
        self.distance = None
        if has_distance:
            self.distance = torch.zeros(slots, runner.seq_len + 1, model.config.embed_dim, device=runner.device)
        self.known = np.zeros(slots, dtype=np.int64)

    def slots(self, slots: Tensor) -> Tensor:
        """Where `kept` has sequences of these slots, the null class second."""
        return torch.cat([slots + copy * len(self.known) for copy in range(self.num_branches)])


def _shape(request: Request) -> tuple[int, bool]:
    """(how many classes have caches of the transformer, whether the null class's distance is kept)."""
    return (2 if request.guided and not request.reuse_null else 1), request.guided and request.reuse_null


def _model(runner: MARRunner) -> MAR:
    """The target as it computes."""
    return runner.precision.prepare(runner.target)


def bytes_per_slot(runner: MARRunner, request: Request) -> int:
    """Bytes of the caches that a slot adds."""
    num_branches, has_distance = _shape(request)
    distance = 4 * (runner.seq_len + 1) * runner.config.embed_dim
    return num_branches * bytes_kept(runner.target, runner.precision.dtype) + has_distance * distance


def resolve(request: Request, runner: MARRunner) -> Request:
    """The request as it is; raises ValueError where there are no caches for it yet, and they would not fit."""
    if _shared(runner, request) is None:
        what, fix = " with backbone='cached'", "use backbone='full'"
        check_fits(bytes_per_slot(runner, request), runner.num_slots, what, fix, runner.device)
    return request


def kind(sequence: Sequence) -> str:
    """How the next iteration of a sequence is evaluated: "full", "refresh" (full, and kept), or "lazy"."""
    request = sequence.request
    since = sequence.iteration - request.warmup
    if since >= 0 and since % request.refresh:
        return "lazy"
    is_last = sequence.iteration + 1 == request.num_iter
    return "full" if since < 0 or request.refresh == 1 or is_last else "refresh"


@backbone("cached", options=OPTIONS, resolve=resolve)
def conditions(runner: MARRunner, batch: list[Sequence], rows: Rows) -> Tensor:
    """z of the rows [G, R, D] as `MARRunner.conditions` gives it, or near it (arXiv 2503.12450).

    Sequences that are to be evaluated in different ways are evaluated one kind after the other.
    """
    kinds = np.array([kind(sequence) for sequence in batch])
    if (kinds == kinds[0]).all():
        return EVALUATIONS[kinds[0]](runner, batch, rows)
    of_row = np.repeat(kinds, rows.counts)
    parts, which = [], []
    for name in np.unique(kinds):
        members = np.flatnonzero(kinds == name)
        own, known, counts = ([each[i] for i in members] for each in (batch, rows.committed, rows.counts))
        parts.append(EVALUATIONS[name](runner, own, runner.rows(own, known, counts)))
        which.append(np.flatnonzero(of_row == name))
    back = send_integers(np.argsort(np.concatenate(which)), runner.device)
    return torch.cat(parts, dim=1)[:, back]


def _refreshed(runner: MARRunner, batch: list[Sequence], rows: Rows) -> Tensor:
    """By a full evaluation that keeps what later iterations need."""
    caches, num_branches = _caches(runner, batch), 2 if batch[0].request.guided else 1
    slots, known = np.array([s.slot for s in batch]), np.array(rows.committed)
    # the null class's distance is wanted wherever a token is predicted before the next refresh
    until = [_known_after(s, s.request.refresh if caches.distance is not None else 1, runner.seq_len) for s in batch]
    num_ahead = np.array(until) - known
    padded, most = runner.target.padded(int(known.max())), runner.graphs.size(filled(int(num_ahead.max())))
    evaluate = functools.partial(_refresh, runner, caches, num_branches, padded, most)
    numbers = send_integers(runner.padded_batch([slots, known, num_ahead]), runner.device)
    z = runner.graphs.run(("refresh", caches, num_branches, padded, most), evaluate, numbers)
    caches.known[slots] = known
    return z[:, rows.sequence, rows.offset]


def _refresh(runner: MARRunner, caches: Caches, num_branches: int, padded: int, most: int, numbers: Tensor) -> Tensor:
    """z [G, B, most, D] of the tokens after those known, by `refresh`.

    Args:
        numbers: int64 [3, B]: slots; how many tokens are known; how many after them are predicted before the next
            refresh.
    """
    slots, known, num_ahead = numbers
    tokens, order, embedding = _inputs(runner, slots, num_branches)
    positions, is_padding = stretch(runner.order[slots], known, num_ahead, most)
    inputs = tokens, order, known.repeat(num_branches), embedding, positions.repeat(num_branches, 1), padded
    with runner.precision.fast():
        x = refresh(_model(runner), caches.kept, caches.slots(slots), *inputs).unflatten(0, (num_branches, -1))
    if caches.distance is not None:
        where = positions.masked_fill(is_padding, runner.seq_len)
        caches.distance[slots.unsqueeze(-1), where] = (x[1] - x[0]).float()
    return _conditions(runner, x, positions)


def _lazy(runner: MARRunner, batch: list[Sequence], rows: Rows) -> Tensor:
    """By an evaluation of what is new or has changed most."""
    caches, slots = _caches(runner, batch), np.array([s.slot for s in batch])
    counts = planned(runner, batch, rows, caches.known[slots])
    known, *others = counts.max(axis=0).tolist()
    most = Counts(runner.target.padded(known), *(runner.graphs.size(filled(most)) for most in others))
    evaluate = functools.partial(_evaluate_lazily, runner, caches, most)
    changed = caches.kept.decoder[0]  # what it was decides what is computed
    numbers = send_integers(runner.padded_batch([slots, *counts.T]), runner.device)
    z = runner.graphs.run(("lazy", caches, most), evaluate, numbers, state=[changed])
    for sequence in batch:
        sequence.stats.lazy_backbone_calls += 1
    caches.known[slots] = rows.committed
    return z[:, rows.sequence, rows.offset]


def _evaluate_lazily(runner: MARRunner, caches: Caches, most: Counts, numbers: Tensor) -> Tensor:
    """z [G, B, M, D] of the next tokens, by `lazy`; numbers: int64 [5, B], slots and its four counts."""
    slots, *counts = numbers
    tokens, order, embedding = _inputs(runner, slots, caches.num_branches)
    counts = torch.stack(counts, dim=1).repeat(caches.num_branches, 1)
    with runner.precision.fast():
        x, positions = lazy(_model(runner), caches.kept, caches.slots(slots), tokens, order, counts, embedding, most)
    x, positions = x.unflatten(0, (caches.num_branches, -1)), positions[: len(slots)]
    if caches.distance is not None:
        x = torch.cat([x, x + caches.distance[slots.unsqueeze(-1), positions]])
    return _conditions(runner, x, positions)


EVALUATIONS = {"full": MARRunner.conditions, "refresh": _refreshed, "lazy": _lazy}


def _caches(runner: MARRunner, batch: list[Sequence]) -> Caches:
    """The caches of a batch's kind; they go with the last kind that has them, and stay where graphs read them."""
    kept, request = runner.round_state[batch[0].key], batch[0].request
    if "caches" not in kept:
        kept["caches"] = _shared(runner, request) or Caches(runner, request)
        if runner.graphs.enabled:
            runner.graphs.lasting["caches", _shape(request)] = kept["caches"]
    return kept["caches"]


def _shared(runner: MARRunner, request: Request) -> Caches | None:
    """Caches that are there already and would do for a request."""
    there = (kept["caches"] for kept in runner.round_state.values() if "caches" in kept)
    in_flight = (caches for caches in there if caches.shape == _shape(request))
    return next(in_flight, runner.graphs.lasting.get(("caches", _shape(request))))


def _known_after(sequence: Sequence, iterations: int, seq_len: int) -> int:
    """Tokens known after so many more iterations, or at the end."""
    masked = timetable(sequence.request, seq_len).masked
    return seq_len - int(masked[min(sequence.iteration + iterations, len(masked)) - 1])


def planned(runner: MARRunner, batch: list[Sequence], rows: Rows, known_before: np.ndarray) -> np.ndarray:
    """What `lazy` is told to compute of each sequence, of which so many tokens were known before: [B, 4]."""
    request = batch[0].request
    places = runner.config.buffer_size + runner.seq_len
    known, predicted = np.array(rows.committed), np.array(rows.counts)
    new = known - known_before
    progress = [len(SHARES) * s.iteration // s.request.num_iter for s in batch]
    retained = np.floor(request.retain * SHARES[progress] * places).astype(np.int64)
    others = np.maximum(retained - predicted, new + math.ceil(SPARE * places))
    others = np.minimum(others, places - predicted)
    return np.stack([known, new, predicted, others], axis=1)


def _inputs(runner: MARRunner, slots: Tensor, num_branches: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, order, class embedding) of slots [B], `num_branches` of each, the null class second."""
    embedding = runner.classes["target"][runner.label[slots]]
    if num_branches == 2:
        embedding = torch.cat([embedding, runner.target.fake_latent.expand_as(embedding)])
    return runner.tokens[slots].repeat(num_branches, 1, 1), runner.order[slots].repeat(num_branches, 1), embedding


def _conditions(runner: MARRunner, x: Tensor, positions: Tensor) -> Tensor:
    """z [G, B, M, D] of hidden states [G, B, M, D] at positions [B, M]."""
    with runner.precision.fast():
        return _model(runner).condition(x, positions).float()
