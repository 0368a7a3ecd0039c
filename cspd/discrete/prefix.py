"""Codes that are known from the start: the first ones, since VQ models make them one after the other, row by row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cspd.discrete.batch import alike, batch_of
from cspd.known import Known, remembered
from cspd.method import with_tokens
from cspd.sequence import Request, Sequence
from cspd.transfer import send_integers


def encoder(host: Any) -> Callable[[Known, Tensor], Tensor]:
    """Makes codes [L], on the CPU, of a picture by a `VQHost`'s tokenizer, whatever the seed; they are remembered.

    Raises ValueError where there is no tokenizer.
    """
    codes = remembered(functools.partial(_codes, host))
    return lambda known, seed: codes(known)


def _codes(host: Any, known: Known) -> Tensor:
    tokenizer = host.models["tokenizer"]
    if tokenizer is None:
        raise ValueError("an image is given and this engine has no tokenizer to encode it: give it one, or codes")
    pixels = known.to_encode(host.config.grid * tokenizer.config.stride).to(host.device)
    with torch.no_grad(), host.precision.full():
        return tokenizer.encode(pixels)[0].cpu()


def with_prefix(request: Request, host: Any) -> Request:
    """The request with what is known of its image as codes.

    Args:
        host: a `VQHost`.

    Raises:
        ValueError: they are not the model's, or not the first ones; or as `with_tokens`.
    """
    request = with_tokens(request, host, (host.seq_len,))
    known, vocabulary = request.known, host.config.vocab_size
    if known is None:
        return request
    if known.image.is_floating_point() or not ((known.image >= 0) & (known.image < vocabulary)).all():
        raise ValueError(f"the tokens that are given are no codes 0..{vocabulary - 1}: give this model's own")
    num_kept = host.seq_len - known.num_made
    first = int(known.made.argmax())
    if first < num_kept:
        rows = first // host.config.grid
        instead = f"the first {rows} of {host.config.grid} rows of tokens" if rows else "only rows at the top"
        raise ValueError(
            f"the mask keeps {num_kept} of {host.seq_len} tokens, {num_kept - first} of them after one that is made: VQ"
            f" models go row by row from the top; keep {instead}, or take a MAR model, which keeps any"
        )
    return request


def prefill(host: Any, sequences: list[Sequence]) -> None:
    """Writes the codes that sequences know from the start to their slots, and has the models take them in.

    Args:
        host: a `VQHost`, in whose slots nothing is known yet.
    """
    for own in alike(sequences, lambda sequence: _num_known(host, sequence)):
        _prefill(host, own)


def _num_known(host: Any, sequence: Sequence) -> int:
    """How many codes a sequence begins with."""
    return host.seq_len - sequence.request.num_made(host.seq_len)


def _prefill(host: Any, sequences: list[Sequence]) -> None:
    """One forward of each model over the inputs before the known codes, as many in each of the sequences.

    The last known code is the first round's input.
    """
    batch, count = batch_of(host, sequences), _num_known(host, sequences[0])
    codes = torch.stack([sequence.request.known.image[:count] for sequence in sequences])
    codes = send_integers(codes.numpy(), host.device)
    inputs = codes.roll(1, 1)  # the input at a position is the code before it, and at the first the class
    host.begin(None)
    features = host.features(batch, inputs)
    uses = {name for sequence in sequences for name in sequence.uses}
    if "draft" in uses:
        host.features(batch, inputs, 0, "draft")
    if "eagle" in uses:
        host.past.keep(batch, features)
        position = torch.arange(count, device=host.device).expand(len(batch), -1)
        host.features(batch, inputs, 0, "eagle", past=host.past.before(batch, position))

    host.commit(batch, codes, torch.full_like(codes, torch.nan, dtype=torch.float32))
    host.known.index_fill_(0, batch.slot, count)
    for sequence in sequences:
        sequence.num_committed = count
