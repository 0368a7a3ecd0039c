"""Backbones: compute the conditions z of an iteration's tokens, by the whole transformer or with LazyMAR's cache."""

from __future__ import annotations

import argparse
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

from cspd.continuous.rows import Conditions, Rows, full_conditions
from cspd.device import check_fits, send_integers
from cspd.masked.orders import num_rounds, timetable
from cspd.masked.runner import MARRunner, ModelInputs
from cspd.method import Part
from cspd.option import Option
from cspd.request import Request, Sequence
from cspd.terminal import number_list
from mar.head import filled
from mar.model import MAR, PAD_TO, Block, attend, following, keys_values, through

# A backbone is a function (runner, batch, rows) -> z float32 [G, R, D], G = 2 (unconditional branch second) if the
# batch is guided. `full_conditions` evaluates the whole transformer. A backbone with a name (`@backbone`) can be chosen
# in any sampler of MAR.


@dataclass(frozen=True)
class Backbone(Part):
    """A registered backbone: `conditions`, see above. All but the full one are heuristic."""

    conditions: Conditions


BACKBONES: dict[str, Backbone] = {"full": Backbone(full_conditions)}  # by name


def backbone(name: str, **attributes: Any) -> Callable[[Callable], Callable]:
    """Registers a function as a backbone under a name; attributes as in `Backbone`."""

    def named(conditions: Callable[..., Tensor]) -> Callable[..., Tensor]:
        BACKBONES[name] = Backbone(conditions, **attributes)
        return conditions

    return named


# MAR's transformer with LazyMAR's caches (arXiv 2503.12450).
#
# A refresh evaluates the whole transformer and caches it. A lazy evaluation then computes
#
# * in the encoder: the buffer and the newly committed tokens, over the cached keys and values of all committed ones;
# * in the decoder: all positions up to the keys and values of one layer (`selecting_layer`). It selects the positions
#   whose values changed most since the last evaluation; or, as MARché does (arXiv 2506.12035), those that the newly
#   committed tokens attend to most. The later layers compute only these, the newly committed tokens and the tokens to
#   predict, over the cached keys and values of all positions.
#
# If every committed token is new and every position is selected, a lazy evaluation is a full one.
#
# Encoder and decoder see the buffer first. So the token of rank r in the generation order has the encoder's entry
# buffer + r, and position i of the image the decoder's entry buffer + i. Sequences of a batch differ in the number of
# their tokens; a shorter one is padded, and its padding is written to one more entry, which is never read.

SELECTING = 3  # the layer, from 0, by whose values the released code selects; its models have 12 to 20 layers


def selecting_layer(model: MAR) -> int:
    """The decoder layer by whose values positions are selected: LazyMAR's, or the middle one of a shallow model."""
    return min(SELECTING, model.config.depth // 2)


class Cache(NamedTuple):
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
        num_cached_in_decoder = depth - selecting_layer(model)
        return cls(
            encoder=torch.zeros(depth, num_slots, size, 2 * dim, dtype=dtype, device=device),
            decoder=torch.zeros(num_cached_in_decoder, num_slots, size, 2 * dim, dtype=dtype, device=device),
            inputs=torch.zeros(num_slots, size, dim, device=device),
        )


def cache_bytes(model: MAR, dtype: torch.dtype) -> int:
    """Bytes of one slot of `Cache`; allocates nothing."""
    return sum(tensor.nbytes for tensor in Cache.empty(model, 1, dtype, torch.device("meta")))


def stretch(order: Tensor, start: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Positions [B, most] of the count[b] tokens after the first start[b] of order [B, L], and a mask of padding."""
    is_padding = torch.arange(most, device=order.device) >= count.unsqueeze(-1)
    return following(order, start, most), is_padding


def refresh(
    model: MAR,
    cache: Cache,
    slots: Tensor,
    inputs: ModelInputs,
    num_known: Several[int] | Tensor,
    positions: Tensor,
    padded: int | None = None,
) -> Tensor:
    """Evaluates the whole transformer, and caches keys, values and inputs of the first sequences.

    Args:
        slots: int64 [S], of the first S of the B sequences; the others are not cached.
        num_known, positions, padded: as in `MAR.forward`.

    Returns:
        The last block's output [B, M, D] at the positions, from which `MAR.condition` computes z.
    """
    buffer = model.config.buffer_size
    num_cached = len(slots)

    known, is_known = model.known(inputs.order, num_known, padded)
    x = model.embed(inputs.tokens, known, is_known, inputs.class_embedding)
    mask = model.attention_mask(F.pad(is_known, (buffer, 0), value=True))
    zero = cache.encoder.new_zeros(())  # a Python number would be copied to the device
    update: Any = None  # a tensor from the first block on
    for layer, block in zip(cache.encoder, model.encoder_blocks):
        x, normed = block.normalised(x, update)
        own = keys_values(block, normed)
        layer[slots, : x.shape[1]] = own[:num_cached].to(layer.dtype)
        layer[slots, x.shape[1] :] = zero  # an earlier sequence may have left NaN there, which a mask does not stop
        x, update = attend(block, x, normed, own, mask)

    x = model.arrange(model.encoded(x, update), known, is_known)
    length = x.shape[1]
    cache.inputs[slots, :length] = x[:num_cached]
    selecting = selecting_layer(model)
    x, update = through(model.decoder_blocks[:selecting], x)
    entries = positions + buffer
    for layer, block in zip(cache.decoder, model.decoder_blocks[selecting:]):
        x, normed = block.normalised(x, update)
        own = keys_values(block, normed)
        layer[slots, :length] = own[:num_cached].to(layer.dtype)
        if block is model.decoder_blocks[-1]:  # its output is needed at the positions only
            x, normed = _gathered(x, entries), _gathered(normed, entries)
        x, update = attend(block, x, normed, own)
    return x + update


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
    inputs: ModelInputs,
    counts: Several[Several[int]] | Tensor,
    most: Counts | None = None,
    select: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Evaluates new tokens and the selected positions, over the cache, and updates the cache.

    Args:
        slots: int64 [B], all different.
        counts: four numbers of each sequence, on the CPU, or int64 [B, 4] together with `most`: committed tokens; the
            last of them that were not committed at the last evaluation; the tokens after them to predict; and the other
            positions that all of the decoder computes, the new tokens among them.
        most: at least the maximum of each count; then shapes do not depend on tensors.
        select: the rule, see `SELECT`.

    Returns:
        The last block's output [B, M, D] at the positions to predict, and these positions [B, M]; padded at the end.
    """
    if most is None:
        most = Counts(*map(max, zip(*counts)))
    num = Counts(*torch.as_tensor(counts, device=inputs.order.device).unbind(1))
    new_entries = _encode_new(model, cache, slots, inputs, num, most)
    return _decode_selected(model, cache, slots, inputs.order, num, most, new_entries, select)


def _encode_new(model: MAR, cache: Cache, slots: Tensor, inputs: ModelInputs, num: Counts, most: Counts) -> Tensor:
    """Encodes buffer and new tokens over all committed ones; returns the new tokens' entries [B, M] in the decoder."""
    tokens, order, class_embedding = inputs
    buffer = model.config.buffer_size
    padding = cache.inputs.shape[1] - 1  # the entry that padding is written to
    first_new = num.committed - num.new
    new, is_padding = stretch(order, first_new, num.new, filled(most.new))
    ranks = first_new.unsqueeze(-1) + torch.arange(new.shape[1], device=order.device)
    buffer_entries = torch.arange(buffer, device=order.device).expand(len(order), -1)
    entries = torch.cat([buffer_entries, (ranks + buffer).masked_fill(is_padding, padding)], dim=1)

    # the queries see `length` entries: the buffer, the committed tokens, and others that the mask hides
    length = min(math.ceil((buffer + most.committed) / PAD_TO) * PAD_TO, padding)
    is_committed = torch.arange(length, device=order.device) < (num.committed + buffer).unsqueeze(-1)
    x = model.embed(tokens, new, ~is_padding, class_embedding)
    mask = model.attention_mask(is_committed)
    update: Tensor | None = None
    for layer, block in zip(cache.encoder, model.encoder_blocks):
        x, normed = block.normalised(x, update)
        own = keys_values(block, normed)
        _write(layer, slots, entries, own)
        x, update = attend(block, x, normed, layer[slots, :length].to(own.dtype), mask)
    encoded = model.decoder_embed(model.encoded(x, update))

    # the decoder's input at the buffer and at the new tokens, in place of the mask token
    new_entries = (new + buffer).masked_fill(is_padding, padding)
    entries = torch.cat([buffer_entries, new_entries], dim=1)
    position_embedding = model.decoder_pos_embed_learned[0, entries.clamp(max=padding - 1)]
    _write(cache.inputs, slots, entries, encoded + position_embedding)
    return new_entries


def _decode_selected(
    model: MAR,
    cache: Cache,
    slots: Tensor,
    order: Tensor,
    num: Counts,
    most: Counts,
    new_entries: Tensor,
    select: str | None,
) -> tuple[Tensor, Tensor]:
    """Decodes all positions up to the selecting layer, and then only the selected ones; returns as `lazy`."""
    buffer = model.config.buffer_size
    size = cache.inputs.shape[1] - 1
    padding = size  # the entry that padding is written to

    # all positions, up to the keys and values of the selecting layer
    x = cache.inputs[slots, :size]
    selecting = selecting_layer(model)
    x, update = through(model.decoder_blocks[:selecting], x)
    first, *later_blocks = model.decoder_blocks[selecting:]
    x, normed = first.normalised(x, update)
    own = keys_values(first, normed)
    before = cache.decoder[0][slots, :size]
    cache.decoder[0][slots, :size] = own.to(before.dtype)

    # select the tokens to predict, and the positions that the rule puts first
    positions, is_padding = stretch(order, num.committed, num.next, filled(most.next))
    num_next = positions.shape[1]
    next_indices = positions + buffer
    next_entries = next_indices.masked_fill(is_padding, padding)
    if select == "attention":
        score = -_attention(first, normed, own, new_entries, padding)
    else:
        score = _similarity(own, before, model.config.num_heads)
    others = _lowest(score, new_entries, next_entries, filled(most.others))
    is_padding = torch.arange(others.shape[1], device=order.device) >= num.others.unsqueeze(-1)
    selected = torch.cat([next_indices, others], dim=1)
    selected_entries = torch.cat([next_entries, others.masked_fill(is_padding, padding)], dim=1)

    # the other layers compute the selected positions only, over the cached keys and values of all
    x, update = attend(first, _gathered(x, selected), _gathered(normed, selected), own)
    for layer, block in zip(cache.decoder[1:], later_blocks):
        x, normed = block.normalised(x, update)
        own = keys_values(block, normed)
        _write(layer, slots, selected_entries, own)
        if block is later_blocks[-1]:  # its output is needed at the tokens to predict only
            x, normed = x[:, :num_next], normed[:, :num_next].contiguous()  # else bfloat16 rounds before the bias
        x, update = attend(block, x, normed, layer[slots, :size].to(own.dtype))
    return (x + update)[:, :num_next], positions


def _lowest(score: Tensor, new_entries: Tensor, next_entries: Tensor, most: int) -> Tensor:
    """The `most` entries of smallest score [B, N], the smallest first; all of them if N is smaller.

    New tokens come first. Tokens to predict come last, since they are selected anyway.
    """
    size = score.shape[1]
    score = F.pad(score, (0, 1))  # one more entry, for padding
    score = score.scatter(1, new_entries, -torch.inf)
    score = score.scatter(1, next_entries, torch.inf)
    return score[:, :size].topk(min(most, size), largest=False).indices


def _gathered(x: Tensor, entries: Tensor) -> Tensor:
    """The entries [B, M] of x [B, N, D]: [B, M, D]."""
    return x.gather(1, entries.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def _write(layer: Tensor, slots: Tensor, entries: Tensor, values: Tensor) -> None:
    """Writes values [B, M, D] to the entries [B, M] of slots [B]."""
    layer[slots.unsqueeze(-1), entries] = values.to(layer.dtype)


def _attention(block: Block, normed: Tensor, own: Tensor, new_entries: Tensor, padding: int) -> Tensor:
    """How much the new tokens attend to each position in a block [B, N]: the sum over these tokens and the heads.

    Args:
        normed: the block's normalised input [B, N, D]. own: its keys and values [B, N, 2D].
        new_entries: int64 [B, M]; `padding` for those that do not exist.
    """
    attn, dim = block.attn, normed.shape[-1]
    is_new = new_entries != padding
    queries = _gathered(normed, new_entries.clamp(max=normed.shape[1] - 1))
    q = F.linear(queries.to(attn.qkv.weight.dtype), attn.qkv.weight[:dim], attn.qkv.bias[:dim])
    q, k = (each.unflatten(-1, (attn.num_heads, -1)).float() for each in (q, own[..., :dim]))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) / math.sqrt(q.shape[-1])
    return (scores.softmax(-1) * is_new[:, None, :, None]).sum((1, 2))


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
    metavar="FRACTION",
    decided=True,
)
SELECT = Option(
    "select",
    ("change", "attention"),
    "positions that the deeper decoder layers compute: those whose values changed most, or those that newly committed"
    " tokens attend to most (MARché, arXiv 2506.12035)",
    default="change",
    implied=True,
    decided=True,
)
KEPT = Option(
    "kept",
    ("full", "half"),
    "precision of cached keys and values: as computed, or bfloat16, which takes half of the memory of float32",
    default="full",
    implied=True,
    decided=True,
)
REFRESHES = Option(
    "refreshes",
    str,
    "the rounds, from 0, that evaluate the full transformer, in place of refresh and warmup: such as 0-4,9,18",
    metavar="LIST",
    decided=True,
)
REUSE_NULL = Option(
    "reuse_null",
    bool,
    "evaluate the unconditional branch only with the full transformer, and reuse its difference in between",
    default=True,
)
# the released code's fraction of selected positions, by iteration of 64: (number of iterations, fraction)
SCHEDULE = [(20, 1.0), (1, 0.6), (4, 0.5), (5, 0.4), (5, 0.15), (5, 0.12), (24, 0.05)]
FRACTIONS = np.concatenate([np.full(num_iterations, fraction) for num_iterations, fraction in SCHEDULE])
MIN_SELECTED = 15 / 320  # of the positions, in addition to the tokens to predict and the new ones: the released code's


class Caches:
    """The caches of sequences, in slots. Requests that need caches of the same shape share them, in different slots.

    Attributes:
        num_branches: 2 if the unconditional branch has its own cache. cache: of the transformer, branches x slots.
        distance: float32 [slots, L + 1, D], the unconditional branch's last hidden state minus the conditional one, by
            position, with an entry for padding; None if it is not reused.
        committed: int64 [slots], on the CPU: committed tokens of each sequence at its last evaluation.
    """

    def __init__(self, runner: MARRunner, request: Request) -> None:
        model, num_slots = runner.target, runner.num_slots
        self.num_branches, has_distance, _ = _shape(request)
        self.cache = Cache.empty(model, self.num_branches * num_slots, _kept_as(runner, request), runner.device)
        self.distance = None
        if has_distance:
            self.distance = torch.zeros(num_slots, runner.seq_len + 1, model.config.embed_dim, device=runner.device)
        self.committed = np.zeros(num_slots, dtype=np.int64)

    def slots(self, slots: Tensor) -> Tensor:
        """Indices into `cache` of the sequences in these slots, the unconditional branch second."""
        num_slots = len(self.committed)
        return torch.cat([slots + branch * num_slots for branch in range(self.num_branches)])


def _shape(request: Request) -> tuple[int, bool, bool]:
    """(number of branches with a cache of the transformer, whether the unconditional branch's distance is cached,
    whether keys and values are cached in half precision)."""
    is_half = request.kept == "half"
    if not request.guided:
        return 1, False, is_half
    return (1, True, is_half) if request.reuse_null else (2, False, is_half)


def _kept_as(runner: MARRunner, request: Request) -> torch.dtype:
    """The type of cached keys and values."""
    return torch.bfloat16 if request.kept == "half" else runner.precision.dtype


def bytes_per_slot(runner: MARRunner, request: Request) -> int:
    """Bytes of the caches that a slot adds."""
    num_branches, has_distance, _ = _shape(request)
    total = num_branches * cache_bytes(runner.target, _kept_as(runner, request))
    if has_distance:
        total += 4 * (runner.seq_len + 1) * runner.config.embed_dim
    return total


def prepare(request: Request, runner: MARRunner) -> Request:
    """The unchanged request.

    Raises ValueError unless `refreshes` lists rounds of the request, 0 first, and new caches fit into memory.
    """
    if request.refreshes is not None:
        check_refreshes(request.refreshes, num_rounds(request))
    if _shape(request) not in runner.caches:
        num_bytes = bytes_per_slot(runner, request)
        check_fits(num_bytes, runner.num_slots, " with backbone='cached'", "use backbone='full'", runner.device)
    return request


def check_refreshes(refreshes: str, rounds: int) -> None:
    try:
        iterations = number_list(refreshes)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"refreshes: {error}") from None
    if iterations[0] != 0:
        raise ValueError(f"refreshes={refreshes!r} must begin with 0: there is no cache before it")
    if max(iterations) > rounds - 1:
        raise ValueError(f"refreshes={refreshes!r} must end at {rounds - 1} or before, the last round")


@functools.lru_cache(maxsize=1024)
def full_iterations(refreshes: str | None, warmup: int, refresh: int, num_rounds: int) -> tuple[bool, ...]:
    """Whether each iteration evaluates the full transformer, see the options."""
    if refreshes is not None:
        listed = set(number_list(refreshes))
        return tuple(iteration in listed for iteration in range(num_rounds))
    return tuple(iteration < warmup or (iteration - warmup) % refresh == 0 for iteration in range(num_rounds))


def _full_iterations(request: Request) -> tuple[bool, ...]:
    return full_iterations(request.refreshes, request.warmup, request.refresh, num_rounds(request))


def evaluation_of(request: Request, iteration: int) -> str:
    """The evaluation of an iteration, from 0: "full", "refresh" (full, and cached), or "lazy"."""
    is_full = _full_iterations(request)
    if not is_full[iteration]:
        return "lazy"
    following = is_full[iteration + 1 : iteration + 2]
    return "full" if all(following) else "refresh"  # no cache is needed before a full one, or at the end


def until_refresh(request: Request, iteration: int) -> int:
    """The number of iterations from this one to the next that evaluates the full transformer, or to the end."""
    later = _full_iterations(request)[iteration + 1 :]
    return 1 + (later.index(True) if True in later else len(later))


@backbone("cached", options=(REFRESH, WARMUP, RETAIN, SELECT, KEPT, REUSE_NULL, REFRESHES), prepare=prepare)
def cached_conditions(runner: MARRunner, batch: list[Sequence], rows: Rows) -> Tensor:
    """z of the rows [G, R, D], as `MARRunner.conditions` or an approximation of it (arXiv 2503.12450)."""
    kinds = np.array([evaluation_of(sequence.request, sequence.iteration) for sequence in batch])
    if (kinds == kinds[0]).all():
        return EVALUATIONS[kinds[0]](runner, batch, rows)

    # the sequences of each kind together; then the rows in the batch's order again
    kind_of_row = kinds[rows.owner]
    parts, row_indices = [], []
    for name in np.unique(kinds):
        members = np.flatnonzero(kinds == name)
        own = [batch[i] for i in members]
        committed = [rows.committed[i] for i in members]
        counts = [rows.counts[i] for i in members]
        own_rows = runner.rows(own, committed, counts)
        parts.append(EVALUATIONS[name](runner, own, own_rows))
        row_indices.append(np.flatnonzero(kind_of_row == name))
    back = np.argsort(np.concatenate(row_indices))
    return torch.cat(parts, dim=1)[:, send_integers(back, runner.device)]


def _refresh_batch(runner: MARRunner, batch: list[Sequence], rows: Rows) -> Tensor:
    """z of the rows by a full evaluation, which fills the caches."""
    caches = _caches(runner, batch)
    num_branches = 2 if batch[0].request.guided else 1
    slots = np.array([sequence.slot for sequence in batch])
    committed = np.array(rows.committed)

    # the unconditional branch's distance is needed for every token that is predicted before the next refresh
    committed_later = []
    for sequence in batch:
        num_iterations = 1 if caches.distance is None else until_refresh(sequence.request, sequence.iteration)
        committed_later.append(_committed_after(sequence, num_iterations, runner.seq_len))
    num_ahead = np.array(committed_later) - committed

    padded = runner.target.padded(int(committed.max()))
    most = runner.graphs.size(filled(int(num_ahead.max())))
    evaluate = functools.partial(_refresh_slots, runner, caches, num_branches, padded, most)
    numbers = send_integers(runner.padded_batch([slots, committed, num_ahead]), runner.device)
    z = runner.graphs.run(("refresh", caches, num_branches, padded, most), evaluate, numbers)
    caches.committed[slots] = committed
    return z[:, rows.sequence, rows.offset]


def _refresh_slots(
    runner: MARRunner, caches: Caches, num_branches: int, padded: int, most: int, numbers: Tensor
) -> Tensor:
    """z [G, B, most, D] of the tokens after the committed ones, by `refresh`.

    Args:
        numbers: int64 [3, B]: slots; committed tokens; the tokens after them that are predicted before the next
            refresh.
    """
    slots, committed, num_ahead = numbers
    inputs = runner.inputs("target", slots, num_branches)
    positions, is_padding = stretch(runner.order[slots], committed, num_ahead, most)
    with runner.precision.fast():
        x = refresh(
            runner.precision.prepare(runner.target),
            caches.cache,
            caches.slots(slots),
            inputs,
            committed.repeat(num_branches),
            positions.repeat(num_branches, 1),
            padded,
        )
    x = x.unflatten(0, (num_branches, -1))
    if caches.distance is not None:
        conditional, unconditional = x
        entries = positions.masked_fill(is_padding, runner.seq_len)
        caches.distance[slots.unsqueeze(-1), entries] = (unconditional - conditional).float()
    return _conditions(runner, x, positions)


def _lazy_batch(runner: MARRunner, batch: list[Sequence], rows: Rows) -> Tensor:
    """z of the rows by a lazy evaluation, which updates the caches."""
    caches = _caches(runner, batch)
    slots = np.array([sequence.slot for sequence in batch])
    counts = planned(runner, batch, rows, caches.committed[slots])
    most_committed, *most_others = counts.max(axis=0).tolist()
    sizes = [runner.graphs.size(filled(most)) for most in most_others]
    most = Counts(runner.target.padded(most_committed), *sizes)

    select = batch[0].request.select
    evaluate = functools.partial(_lazy_slots, runner, caches, most, select)
    # the evaluation reads these values before it overwrites them: a captured graph must restore them
    changed = caches.cache.decoder[0]
    numbers = send_integers(runner.padded_batch([slots, *counts.T]), runner.device)
    z = runner.graphs.run(("lazy", caches, most, select), evaluate, numbers, state=[changed])
    for sequence in batch:
        sequence.stats.lazy_backbone_calls += 1
    caches.committed[slots] = rows.committed
    return z[:, rows.sequence, rows.offset]


def _lazy_slots(runner: MARRunner, caches: Caches, most: Counts, select: str | None, numbers: Tensor) -> Tensor:
    """z [G, B, M, D] of the next tokens, by `lazy`; numbers: int64 [5, B], slots and the four counts."""
    num_branches = caches.num_branches
    slots, *each = numbers
    counts = torch.stack(each, dim=1).repeat(num_branches, 1)
    inputs = runner.inputs("target", slots, num_branches)
    model = runner.precision.prepare(runner.target)
    with runner.precision.fast():
        x, positions = lazy(model, caches.cache, caches.slots(slots), inputs, counts, most, select)
    x = x.unflatten(0, (num_branches, -1))
    positions = positions[: len(slots)]  # the same in each branch
    if caches.distance is not None:
        # the unconditional branch is taken to be as far from the conditional one as at the refresh
        distance = caches.distance[slots.unsqueeze(-1), positions]
        x = torch.cat([x, x + distance])
    return _conditions(runner, x, positions)


# by `evaluation_of`
EVALUATIONS: dict[str, Callable[..., Tensor]] = {
    "full": MARRunner.conditions,
    "refresh": _refresh_batch,
    "lazy": _lazy_batch,
}


def _caches(runner: MARRunner, batch: list[Sequence]) -> Caches:
    """The caches of a batch. They are freed with the last key that uses them, or never if CUDA graphs read them."""
    shared, request = batch[0].shared, batch[0].request
    if "caches" not in shared:
        shape = _shape(request)
        caches = runner.caches.get(shape) or Caches(runner, request)
        shared["caches"] = runner.caches[shape] = caches
        if runner.graphs.enabled:
            runner.graphs.lasting["caches", shape] = caches
    return shared["caches"]


def _committed_after(sequence: Sequence, num_iterations: int, seq_len: int) -> int:
    """Tokens of a sequence that are committed after `num_iterations` more iterations, or at the end."""
    masked = timetable(sequence.request, seq_len).masked
    last = min(sequence.iteration + num_iterations, len(masked)) - 1
    return seq_len - int(masked[last])


def planned(runner: MARRunner, batch: list[Sequence], rows: Rows, committed_before: np.ndarray) -> np.ndarray:
    """The counts [B, 4] of `lazy`; committed_before: int64 [B], committed tokens at the last evaluation."""
    request = batch[0].request
    num_positions = runner.config.buffer_size + runner.seq_len
    committed = np.array(rows.committed)
    predicted = np.array(rows.counts)
    new = committed - committed_before

    # the schedule is for 64 iterations; with another number, it depends on the fraction of them that are done
    progress = [len(FRACTIONS) * each.iteration // num_rounds(each.request) for each in batch]
    retained = np.floor(request.retain * FRACTIONS[progress] * num_positions).astype(np.int64)
    least = new + math.ceil(MIN_SELECTED * num_positions)
    others = np.maximum(retained - predicted, least)
    others = np.minimum(others, num_positions - predicted)
    return np.stack([committed, new, predicted, others], axis=1)


def _conditions(runner: MARRunner, x: Tensor, positions: Tensor) -> Tensor:
    """z [G, B, M, D] of hidden states [G, B, M, D] at positions [B, M]."""
    with runner.precision.fast():
        return runner.precision.prepare(runner.target).condition(x, positions).float()
