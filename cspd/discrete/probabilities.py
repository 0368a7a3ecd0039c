"""From logits to the distribution that is sampled, the same for target and draft; always in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor


def guide(logits: Tensor, scale: Tensor) -> Tensor:
    """null + s (conditional - null) of logits [2, B, ..., V], the null class second, s [B]; without null, as it is."""
    if len(logits) == 1:
        return logits[0]
    conditional, null = logits
    return null + scale.view(-1, *[1] * (null.dim() - 1)) * (conditional - null)


def probabilities(logits: Tensor, temperature: Tensor, top_k: list[int], top_p: list[float]) -> Tensor:
    """Token probabilities [B, ..., V] of logits, as LlamaGen: temperature, then top-k, then top-p of what is left.

    Args:
        logits: [B, ..., V]. temperature: [B], above 0.
        top_k: the k likeliest tokens are kept, 0 keeps all; top_p: then the fewest that reach this mass, 1 keeps all.
            Tokens as likely as the last kept one are kept too.
    """
    batch = [-1, *[1] * (logits.dim() - 1)]
    scaled = logits / temperature.view(batch).clamp(min=1e-5)
    if any(top_k) or min(top_p) < 1:
        scaled = scaled.masked_fill(scaled < _least(scaled, top_k, top_p, batch), -torch.inf)
    return scaled.softmax(-1)


def _least(logits: Tensor, top_k: list[int], top_p: list[float], batch: list[int]) -> Tensor:
    """The least logit that is kept [B, ..., 1]."""
    vocabulary = logits.shape[-1]
    kept = [min(k, vocabulary) or vocabulary for k in top_k]
    ordered = logits.topk(max(kept)).values
    count = torch.tensor(kept, device=logits.device).view(batch)
    beyond = torch.arange(max(kept), device=logits.device) >= count
    mass = ordered.masked_fill(beyond, -torch.inf).softmax(-1)
    before = mass.cumsum(-1) - mass
    # rounding must not cut the tail of who keeps everything
    most = torch.tensor([p if p < 1 else 2 for p in top_p], device=logits.device, dtype=logits.dtype)
    reached = before > most.view(batch)
    return ordered.masked_fill(beyond | reached, torch.inf).amin(-1, keepdim=True)
