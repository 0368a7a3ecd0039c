"""Distributions of VQ tokens: from logits to probabilities, and from these to tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cspd.transformer import steps

# Distributions over the V codes of the codebook, computed from logits in the same way for target and draft.
#
# Probabilities are [..., V] in float32 or wider, with any leading dimensions. Uniform draws are arguments.

TINY = torch.finfo(torch.float32).tiny
MIN_TEMPERATURE = 1e-5  # LlamaGen's
SPREAD = 0.1  # of `nearby`: how far a draft's distribution function is from the target's


def guide(logits: Tensor, scale: Tensor) -> Tensor:
    """Applies guidance: u + s (c - u), float [B, ..., V].

    Args:
        logits: [2, B, ..., V], of the conditional branch c and the unconditional branch u; or [1, B, ..., V], which is
            returned as it is.
        scale: s, [B].
    """
    if len(logits) == 1:
        return logits[0]
    conditional, null = logits
    scale = scale.view(-1, *[1] * (null.dim() - 1))
    return (conditional - null).mul_(scale).add_(null)


class Filter(NamedTuple):
    """Top-k and top-p of each sequence. Tokens as likely as the least likely one that passes also pass.

    Attributes:
        top_k: int64 [B]. mass: [B], p of top-p among these; 2 lets all pass.
        most: the largest count, a Python integer.
    """

    top_k: Tensor
    mass: Tensor
    most: int


def filter_numbers(top_k: list[int], top_p: list[float], vocabulary: int) -> tuple[list[int], list[float], int]:
    """The numbers of a `Filter` from top-k (0: all) and top-p (1: all). `most` is 0 if no sequence filters."""
    counts = [min(k, vocabulary) or vocabulary for k in top_k]
    masses = [p if p < 1 else 2.0 for p in top_p]  # at p = 1 rounding must not cut the tail
    most = 0
    if any(top_k) or min(top_p) < 1:
        most = max(counts)
    return counts, masses, most


def probabilities(logits: Tensor, temperature: Tensor, kept: Filter | None = None) -> Tensor:
    """Probabilities [B, ..., V] as in LlamaGen (arXiv 2406.06525): temperature, then top-k, then top-p of the rest.

    Args:
        logits: [B, ..., V]. temperature: [B], at least MIN_TEMPERATURE. kept: by default all tokens pass.
    """
    per_sequence = [-1, *[1] * (logits.dim() - 1)]
    scaled = logits / temperature.view(per_sequence)
    if kept is not None:
        least = _least_kept(scaled, kept, per_sequence)
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    return scaled.softmax(-1)


def _least_kept(logits: Tensor, kept: Filter, per_sequence: list[int]) -> Tensor:
    """The smallest logit that passes the filter, [B, ..., 1]."""
    ordered = logits.topk(kept.most).values

    # top-k
    beyond = steps(kept.most, logits.device) >= kept.top_k.view(per_sequence)

    # top-p
    mass = ordered.masked_fill(beyond, -torch.inf).softmax(-1)
    mass_before = mass.cumsum(-1) - mass
    cut = beyond | (mass_before > kept.mass.view(per_sequence))
    return ordered.masked_fill(cut, torch.inf).amin(-1, keepdim=True)


def likeliest_point(weights: Tensor) -> Tensor:
    """The point mass at the largest of weights or logits [..., V]; NaN if the largest is not finite."""
    highest, token = weights.max(-1, keepdim=True)
    at_highest = torch.zeros_like(weights).scatter(-1, token, 1)
    return torch.where(highest.isfinite(), at_highest, torch.nan)


def point(x: Tensor, like: Tensor) -> Tensor:
    """The point masses at tokens x [...]: [..., V], with the shape and dtype of `like`."""
    return torch.zeros_like(like).scatter(-1, x.unsqueeze(-1), 1)


def sample(P: Tensor, u: Tensor) -> Tensor:
    """Tokens int64 [...] from weights P [..., V] and uniform draws u [...], by the inverse distribution function.

    One uniform draw per token suffices; Gumbel-max would need V. The sums are in float64 and never rise at a token of
    weight 0, so that such a token is never returned. Returns -1 if all weights are 0 or one is NaN.
    """
    token, total = _invert(P.double(), _below_one(u))
    return torch.where(total > 0, token, -1)


def _below_one(u: Tensor) -> Tensor:
    return u.double().clamp(max=1 - 2**-53)


def _invert(P: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [...] from float64 weights [..., V] and draws [...], and the weights' sum: above 0 if there is a token."""
    sums = P.cumsum(-1)
    if _adds_in_parallel(P.device):  # parallel sums may change even where 0 is added
        sums = sums.masked_fill(P <= 0, 0).cummax(-1).values
    total = sums[..., -1]
    level = u * total
    first_above = torch.searchsorted(sums, level.unsqueeze(-1), right=True).squeeze(-1)
    return first_above.clamp(max=P.shape[-1] - 1), total


def _adds_in_parallel(device: torch.device) -> bool:
    """Whether cumulative sums are computed in parallel, and so round differently from a loop."""
    return device.type == "cuda"


def without(Q: Tensor, x: Tensor) -> Tensor:
    """Q for the sibling after tokens x [...]: x zeroed, renormalised, [..., V] (SJD-PAC, eq. 7); 0 if nothing is left.

    x is -1 only if nothing of Q is left or Q is damaged. Then it does not matter which token is zeroed.
    """
    left = Q.scatter(-1, x.clamp(min=0).unsqueeze(-1), 0)
    total = left.sum(-1, keepdim=True)
    return left / total.clamp(min=TINY)


def draw_siblings(Q: Tensor, u: Tensor) -> Tensor:
    """Tokens int64 [..., K] sampled from Q [..., V] without replacement by uniform draws u [..., K], in this order.

    They are -1 once Q is used up.
    """
    left = Q.to(torch.float64, copy=True)
    siblings: list[Tensor] = []
    totals = []
    for uniform in _below_one(u).unbind(-1):
        if siblings:
            left.scatter_(-1, siblings[-1].unsqueeze(-1), 0)
        token, total = _invert(left, uniform)
        siblings.append(token)
        totals.append(total)
    is_left = torch.stack(totals, -1) > 0
    return torch.where(is_left, torch.stack(siblings, -1), -1)


def nearby(Q: Tensor, u: Tensor) -> Tensor:
    """The predicted probability of each token to be the target's `sample` at draws u [...], float64 [..., V].

    The target's distribution function is near that of the draft's distribution Q [..., V]. So the target's token at u
    is taken to be Q's token at a draw near u: Cauchy around u with scale SPREAD, restricted to 0..1.
    """
    edges = functional.pad(Q.double().cumsum(-1), (1, 0))
    distance = edges - u.unsqueeze(-1)
    below = (distance / SPREAD).atan()  # Cauchy's distribution function, up to scale
    lowest, highest = below[..., :1], below[..., -1:]
    return below.diff(dim=-1) / (highest - lowest)


def likeliest(Q: Tensor, count: int) -> Tensor:
    """The most probable tokens, int64 [..., count], likeliest first; -1 if the codebook has fewer."""
    found = Q.topk(min(count, Q.shape[-1])).indices
    num_missing = count - found.shape[-1]
    return functional.pad(found, (0, num_missing), value=-1) if num_missing else found


def order_keys(values: Tensor) -> Tensor:
    """Integers that sort as (value, index) does, int64 [..., V], for float32 values >= 0 [..., V].

    The bits of a float64 >= 0, read as an integer, sort as the float does. The lowest 29 bits of a float32 turned into
    float64 are 0: the index is added there.
    """
    return values.double().view(torch.int64) + steps(values.shape[-1], values.device)
