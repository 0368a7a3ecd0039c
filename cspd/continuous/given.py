"""Tokens that are known from the start: written to their slots, first in their orders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cspd.known import Known, remembered
from cspd.sequence import Sequence
from cspd.transfer import send


def encoder(host: Any) -> Callable[[Known, Tensor], Tensor]:
    """Makes tokens [L, d], on the CPU, of a picture by a `MARHost`'s autoencoder, for a seed, int64 [1].

    They are drawn from the autoencoder's posterior, as those that MAR was trained on. Its mean can be far from them.
    What it finds of a picture is remembered for other seeds. Raises ValueError where there is no autoencoder.
    """
    posterior = remembered(functools.partial(_posterior, host))

    def encode(known: Known, seed: Tensor) -> Tensor:
        mean, deviation = posterior(known)
        length, channels = mean.shape
        return mean + deviation * host.noise.latents(seed, torch.arange(length), channels)

    return encode


def _posterior(host: Any, known: Known) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a picture's tokens, [L, d] each, on the CPU."""
    if host.vae is None:
        raise ValueError("an image is given and this engine has no autoencoder to encode it: give it one, or tokens")
    pixels = known.to_encode(host.image_size).to(host.device)
    with torch.no_grad(), host.precision.full():
        mean, log_variance = host.vae.encode(pixels)
    both = torch.cat([mean, (log_variance / 2).exp()]) * host.vae.config.scale
    return host.target.patchify(both).cpu().unbind()


def given(host: Any, sequences: list[Sequence]) -> Tensor | None:
    """See `MARHost.given`."""
    knowns = [sequence.request.known for sequence in sequences]
    if not any(knowns):
        return None
    nothing = np.zeros(host.seq_len, dtype=bool)
    kept = np.stack([~known.made if known else nothing for known in knowns])
    return send({"kept": kept}, host.device)["kept"]


def give(host: Any, sequences: list[Sequence]) -> None:
    """Writes the tokens that sequences know from the start; the others follow them in the order that they had."""
    own = [sequence for sequence in sequences if sequence.request.known]
    kept = given(host, own)
    if kept is None:
        return
    tokens = np.stack([sequence.request.known.image.numpy() for sequence in own])
    sent = send({"slot": np.array([sequence.slot for sequence in own]), "tokens": tokens}, host.device)
    slot = sent["slot"]
    order = host.order[slot]
    is_made = (~kept).long().gather(1, order)
    host.order[slot] = order.gather(1, is_made.argsort(dim=1, stable=True))
    host.tokens[slot] = sent["tokens"].where(kept.unsqueeze(-1), 0)
    for sequence in own:
        sequence.num_committed = host.seq_len - sequence.request.num_made(host.seq_len)
