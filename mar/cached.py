"""MAR's backbone with what earlier evaluations left: LazyMAR's caches (arXiv 2503.12450).

A refresh evaluates everything and keeps it. A lazy evaluation computes, after that,

* in the encoder, the buffer and the tokens that are newly known, over the kept keys and values of all known ones;
* in the decoder, all positions up to the keys and values of one layer (`judged_layer`). There the positions are chosen
  whose values changed most since the evaluation before. From there on only these are computed, with those newly known
  and those to be predicted, over the kept keys and values of all.

Where every known token is new and every position is chosen, a lazy evaluation is the full one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mar.head import filled
from mar.model import MAR, PAD_TO, attend, following, keys_values

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
    num_known: Sequence[int] | Tensor,
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
    counts: Sequence[Sequence[int]] | Tensor,
    class_embedding: Tensor,
    most: Counts | None = None,
) -> tuple[Tensor, Tensor]:
    """An evaluation of what is new or has changed most, over what is kept; keeps what it computes.

    Args:
        slots: int64 [B], all different. tokens, order, class_embedding: as of `MAR.forward`.
        counts: four of each sequence, on the host, where they decide shapes, or int64 [B, 4], with `most`. How many
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
