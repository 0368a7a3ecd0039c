"""Distributions of VQ codes: from logits, the same for target and draft, and draws from them.

Probabilities are [..., V] in float32 or wider, with any leading dimensions. Uniform draws come in as arguments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cspd.vq.steps import steps

TINY = torch.finfo(torch.float32).tiny
LEAST_TEMPERATURE = 1e-5  # LlamaGen's
SPREAD = 0.1  # of `nearby`: how far a draft's distribution function is from the target's


def guide(logits: Tensor, scale: Tensor) -> Tensor:
    """null + s (conditional - null) of logits [2, B, ..., V], the null class second, s [B]; without null, as it is."""
    if len(logits) == 1:
        return logits[0]
    conditional, null = logits
    scale = scale.view(-1, *[1] * (null.dim() - 1))
    return (conditional - null).mul_(scale).add_(null)


class Filter(NamedTuple):
    """Which codes are kept, of each sequence. Codes as likely as the last kept one are kept too.

    Attributes:
        count: int64 [B], the likeliest so many. mass: [B], then the fewest that reach it; 2 keeps all.
        most: the largest count, on the host.
    """

    count: Tensor
    mass: Tensor
    most: int


def filter_numbers(top_k: list[int], top_p: list[float], vocabulary: int) -> tuple[list[int], list[float], int]:
    """The numbers of a `Filter` by top-k, 0 for all, and top-p, 1 for all; `most` is 0 where all keep all."""
    counts = [min(k, vocabulary) or vocabulary for k in top_k]
    masses = [p if p < 1 else 2.0 for p in top_p]  # where p is 1 rounding must not cut the tail
    filters = any(top_k) or min(top_p) < 1
    return counts, masses, max(counts) if filters else 0


def probabilities(logits: Tensor, temperature: Tensor, kept: Filter | None = None) -> Tensor:
    """Probabilities [B, ..., V] of logits, as LlamaGen (arXiv 2406.06525): temperature, top-k, top-p of what is left.

    Args:
        logits: [B, ..., V]. temperature: [B], not below LEAST_TEMPERATURE. kept: by default all codes.
    """
    per_sequence = [-1, *[1] * (logits.dim() - 1)]
    scaled = logits / temperature.view(per_sequence)
    if kept is not None:
        least = _least_kept(scaled, kept, per_sequence)
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    return scaled.softmax(-1)


def _least_kept(logits: Tensor, kept: Filter, per_sequence: list[int]) -> Tensor:
    """The least logit that is kept [B, ..., 1]."""
    ordered = logits.topk(kept.most).values

    # top-k
    beyond = steps(kept.most, logits.device) >= kept.count.view(per_sequence)

    # top-p
    mass = ordered.masked_fill(beyond, -torch.inf).softmax(-1)
    mass_before = mass.cumsum(-1) - mass
    cut = beyond | (mass_before > kept.mass.view(per_sequence))
    return ordered.masked_fill(cut, torch.inf).amin(-1, keepdim=True)


def likeliest_point(weights: Tensor) -> Tensor:
    """The point mass at the likeliest code of weights (or logits) [..., V]; NaN where they are not finite."""
    highest, code = weights.max(-1, keepdim=True)
    return torch.where(highest.isfinite(), torch.zeros_like(weights).scatter(-1, code, 1), torch.nan)


def point(x: Tensor, like: Tensor) -> Tensor:
    """The point masses at codes x [...]: [..., V], of the shape and dtype of `like`."""
    return torch.zeros_like(like).scatter(-1, x.unsqueeze(-1), 1)


def sample(P: Tensor, u: Tensor) -> Tensor:
    """Codes int64 [...] from weights P [..., V] and uniform draws u [...], by the inverse distribution function.

    It takes one uniform draw a code, where Gumbel-max would take V. Sums are in float64, and those at codes of weight 0
    do not count: no such code is ever returned, whatever u and the rounding. Where all weights are 0, or one is NaN,
    there is no code: -1.
    """
    code, total = _drawn(P.double(), _below_one(u))
    return torch.where(total > 0, code, -1)


def _below_one(u: Tensor) -> Tensor:
    return u.double().clamp(max=1 - 2**-53)


def _drawn(P: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [...] from float64 weights [..., V] and draws [...], and the weights' sum: above 0 if there is a code."""
    sums = P.cumsum(-1)
    if _adds_in_parallel(P.device):  # where nothing is added, such sums may still rise or fall
        sums = sums.masked_fill(P <= 0, 0).cummax(-1).values
    total = sums[..., -1]
    level = u * total
    first_above = torch.searchsorted(sums, level.unsqueeze(-1), right=True).squeeze(-1)
    return first_above.clamp(max=P.shape[-1] - 1), total


def _adds_in_parallel(device: torch.device) -> bool:
    """Whether sums along a row are not those of a loop over it."""
    return device.type == "cuda"


def without(Q: Tensor, x: Tensor) -> Tensor:
    """Q for the sibling after codes x [...]: [..., V], x zeroed, renormalised; 0 if nothing is left.

    Where there is no code, -1, nothing of Q is left or it is damaged, and it does not matter which one is zeroed.
    """
    left = Q.scatter(-1, x.clamp(min=0).unsqueeze(-1), 0)
    total = left.sum(-1, keepdim=True)
    return left / total.clamp(min=TINY)


def where_rows(mask: Tensor, rows: Tensor, others: Tensor | float) -> Tensor:
    """torch.where(mask, rows, others) of rows [..., V], mask [..., 1], where it is mostly true. A CPU may look whether
    that is all of the rows; on a GPU that would be waiting for it.
    """
    if mask.device.type == "cpu" and mask.all():
        return rows
    return torch.where(mask, rows, others)


def draw_siblings(Q: Tensor, u: Tensor) -> Tensor:
    """Siblings without replacement, in the order drawn: codes [..., K] by uniform draws u [..., K].

    They are -1 once Q is used up.
    """
    left, siblings, totals = Q.to(torch.float64, copy=True), [], []
    for uniform in _below_one(u).unbind(-1):
        if siblings:
            left.scatter_(-1, siblings[-1].unsqueeze(-1), 0)
        code, total = _drawn(left, uniform)
        siblings.append(code)
        totals.append(total)
    return torch.where(torch.stack(totals, -1) > 0, torch.stack(siblings, -1), -1)


def nearby(Q: Tensor, u: Tensor) -> Tensor:
    """How likely each code [..., V] is to be the target's `sample` at draws u [...], by a draft's distribution Q.

    The target's distribution function is near Q's, not equal to it. So its code at u is Q's at a draw near u, taken to
    be Cauchy around it between 0 and 1, which asks for one number, SPREAD. Float64, for Q [..., V] that sums to 1.
    """
    edges = functional.pad(Q.double().cumsum(-1), (1, 0))
    below = ((edges - u.unsqueeze(-1)) / SPREAD).atan()
    return below.diff(dim=-1) / (below[..., -1:] - below[..., :1])


def likeliest(Q: Tensor, count: int) -> Tensor:
    """The codes of most probability, int64 [..., count], likeliest first, -1 where the codebook has fewer."""
    found = Q.topk(min(count, Q.shape[-1])).indices
    if found.shape[-1] == count:
        return found
    return functional.pad(found, (0, count - found.shape[-1]), value=-1)
