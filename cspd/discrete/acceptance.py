"""What rules for drafted VQ codes compute: f, the probability of acceptance, G, what is sampled else, and the bound.

Pure functions on probabilities [..., V], P of the target and Q of the draft, float32 or float64; any leading dimensions
(sequences, positions, tree nodes).

Sources:
    exact: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192.
    uniform-rsd, cool-sd: Li et al., "Annealed Relaxation of Speculative Decoding for Faster Autoregressive Image
        Generation" (COOL-SD), arXiv 2601.09212. Equations are numbered as in the version without appendices.
    lantern: Jang et al., "LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding",
        arXiv 2410.03355.
    lantern++: Park et al., "LANTERN++: Enhancing Relaxed Speculative Decoding with Static Tree Drafting for Visual
        Auto-regressive Models", arXiv 2502.06352.
    gsd: So et al., "Grouped Speculative Decoding for Autoregressive Image Generation", arXiv 2508.07747, and its
        authors' code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from cspd.discrete.probabilities import where_rows
from cspd.vq.steps import steps

MOST_AT_ONCE = 2**22  # numbers gathered at a time
LAST = torch.iinfo(torch.int64).max


def relaxed(P: Tensor, Q: Tensor, omega: Tensor | float) -> Tensor:
    """f = min(1, omega P / Q) [..., V], omega a number or [..., 1] (COOL-SD, eq. 7).

    omega = 1 is exact, delta is uniform-rsd, omega_i is cool-sd.
    """
    mass = P if isinstance(omega, float) and omega == 1 else omega * P
    return _ratio(mass, Q)


def pooled(P: Tensor, Q: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """f = min(1, (P + absorbed) / Q) [..., V]: lantern (its section 3.3) with limit = delta, lantern++ with lam P.

    The authors' lantern++ has (lambda - 1) P: its lambda = 2 is lam = 1 here.

    Args:
        near, limit: as in `absorbed`.
    """
    return _ratio(P + absorbed(P, near, limit), Q)


def pooled_code(P: Tensor, Q: Tensor, x: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """`pooled` of codes x [..., 1] only: f [..., 1], as limit is."""
    return _ratio(P.gather(-1, x) + absorbed_by(P, x, near, limit), Q.gather(-1, x))


def grouped(P: Tensor, Q: Tensor, group: int, gap: float) -> Tensor:
    """f = min(1, P(C) / Q(C)) [..., V], C a group of codes around each: gsd (its Algorithm 3).

    By rising P, lower index first at ties, C has the code, the group // 2 before it and the (group - 1) // 2 after it,
    but for those whose P differs from its own by `gap` or more. The paper also leaves out codes whose embeddings are
    far apart, by a distance chosen for one model; by its Table 2 that changes nothing, and its authors' later code does
    not do it.

    Args:
        group: >= 1, codes of a group; 1 is exact. gap: in (0, 1].
    """
    ordered, codes = P.sort(dim=-1, stable=True)
    ordered = ordered.contiguous()
    place = steps(P.shape[-1], P.device)

    # where each group begins, and the place after its last
    first = torch.searchsorted(ordered, ordered - gap, right=True)
    first = torch.maximum(first, place - group // 2)
    end = torch.searchsorted(ordered, ordered + gap)
    end = torch.minimum(end, place + (group + 1) // 2)

    # sums of P and Q over it, as differences: float64, or small ones would be lost
    mass = torch.stack([ordered, Q.gather(-1, codes)]).double()
    sums = functional.pad(mass.cumsum(-1), (1, 0))
    inside = sums.gather(-1, end.expand_as(mass)) - sums.gather(-1, first.expand_as(mass))
    f = _ratio(*inside).to(P.dtype)
    f = f.masked_fill(ordered <= 0, 0)  # what the target never emits is never accepted
    return torch.empty_like(P).scatter_(-1, codes, f)


def grouped_code(P: Tensor, Q: Tensor, x: Tensor, group: int, gap: float) -> Tensor:
    """`grouped` of codes x [..., 1] only: f [..., 1]. In float32 no row is put in order."""
    if P.dtype == torch.float64:
        return grouped(P, Q, group, gap).gather(-1, x)
    # a number for each code, in that order: P in float64, the last bits of which are free for the index
    place = P.double().view(torch.int64) + steps(P.shape[-1], P.device)
    own, most = place.gather(-1, x), P.shape[-1]
    before = place.masked_fill(place >= own, -1).topk(min(group // 2, most))
    after = place.masked_fill(place <= own, LAST).topk(min((group - 1) // 2, most), largest=False)
    codes = torch.cat([x, before.indices, after.indices], -1)
    is_there = torch.cat([own >= 0, before.values >= 0, after.values < LAST], -1)

    # sums over those whose probability is near its own
    mass, drafted = P.gather(-1, codes), Q.gather(-1, codes)
    own = mass[..., :1]
    inside = is_there & (mass > own - gap) & (mass < own + gap)
    sums = [(each.double() * inside).sum(-1, keepdim=True) for each in (mass, drafted)]
    return _ratio(*sums).to(P.dtype).masked_fill(own <= 0, 0)


def _ratio(mass: Tensor, Q: Tensor) -> Tensor:
    # 0 / 0 is 0: what the target never emits is never accepted
    return (mass / Q).clamp_(max=1).nan_to_num_(nan=0.0)


def absorbed(P: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """The mass that each x takes over [..., V]: its neighbours', nearest first, until the sum would reach limit(x).

    Args:
        near: int64 [V, k] by `cspd.discrete.neighbours`, taken in chunks of codes. limit: [..., V].
    """
    gathered = P.numel() * near.shape[1]
    chunk = max(1, MOST_AT_ONCE * len(near) // max(1, gathered))
    # a row for each code, so that what is gathered are whole rows
    rows = P.reshape(-1, len(near)).T.contiguous()
    limits = limit.reshape(-1, len(near)).T
    parts = []
    for block, most in zip(near.split(chunk), limits.split(chunk)):
        mass = rows.index_select(0, block.flatten()).unflatten(0, block.shape)
        sums = mass.cumsum(1)
        reached = sums >= most.unsqueeze(1)
        parts.append(sums.masked_fill_(reached, 0).amax(1))
    return torch.cat(parts).T.view(P.shape)


def absorbed_by(P: Tensor, x: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """`absorbed` of codes x [..., 1] only: [..., 1], as limit is."""
    sums = P.gather(-1, near[x.squeeze(-1)]).cumsum(-1)
    return sums.masked_fill_(sums >= limit, 0).amax(-1, keepdim=True)


def merge(P: Tensor, x: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """P_A [..., V]: P where codes x [...] have taken over what they absorb; near, limit: as in `absorbed`.

    LANTERN, section 3.3, the distribution q_{k,delta}(. | D = x).
    """
    block, x = near[x], x.unsqueeze(-1)
    mass = P.gather(-1, block)
    below = mass.cumsum(-1) < limit.gather(-1, x)
    moved = mass * below
    emptied = P.scatter(-1, block, mass - moved)
    return emptied.scatter_add(-1, x, moved.sum(-1, keepdim=True))


def residual(P: Tensor, Q: Tensor, f: Tensor | float) -> Tensor:
    """G* = norm([P - Q f]+) [..., V] (COOL-SD, eq. 5), P where that is 0.

    No other G brings the distribution of the committed code nearer to P. With f = 1 it is the papers' own
    norm([P - Q]+) (eq. 6): the same if f >= min(1, P / Q) everywhere, else farther from P.
    """
    return _norm(P - Q * f, P)


def _norm(difference: Tensor, otherwise: Tensor | float) -> Tensor:
    """norm([difference]+) [..., V], which is written to; `otherwise` where that is 0."""
    weights = difference.clamp_(min=0)
    total = weights.sum(-1, keepdim=True)
    return where_rows(total > 0, weights / total, otherwise)


def released_residual(P: Tensor, Q: Tensor, x: Tensor, near: Tensor, limit: Tensor) -> Tensor:
    """G [..., V] of LANTERN's released code after codes x [...], drawn from Q, were rejected: norm([P - Q']+).

    Q' is Q without the neighbours of x, all of them, if the first gives x its mass. (The paper's [P_A - Q]+ moves what
    neighbours give within P, see `merge`.) Where nothing is left, every code is equally likely.

    Args:
        near, limit: as in `absorbed`; near has one neighbour more than may give mass.
    """
    block, x = near[x], x.unsqueeze(-1)
    gives = P.gather(-1, block[..., :1]) < limit.gather(-1, x)
    emptied = Q.scatter(-1, block, Q.gather(-1, block).masked_fill(gives, 0))
    return _norm(P - emptied, 1 / P.shape[-1])


def bound(P: Tensor, Q: Tensor, f: Tensor, G: Tensor | None = None) -> Tensor:
    """The total variation between P and what one judgement commits, the local term of COOL-SD's Theorem 2: [...].

    Without G it is sum [Q f - P]+: for G*, and for lantern's own G, which depends on the code that was rejected.
    """
    committed = Q * f
    if G is not None:
        rejected = (Q * (1 - f)).sum(-1, keepdim=True)
        committed = committed + rejected * G
    return (committed - P).clamp(min=0).sum(-1)


def exponential(depth: Tensor | int, delta: float, length: int, nu: float = 0.7) -> Tensor | float:
    """omega_i = delta exp(-nu i - mu) at depths i in 1 .. length (COOL-SD, eq. 10).

    mu is such that the mean of omega over them is delta.
    """
    total = sum(math.exp(-nu * i) for i in range(length))
    first = delta * length / total
    return first * math.exp(-nu) ** (depth - 1)


def linear(depth: Tensor | int, delta: float, length: int, ell: int = 8) -> Tensor | float:
    """As `exponential`, with omega_i in proportion to ell - i; ValueError where the last would not be above 0."""
    if length >= ell:
        raise ValueError(f"linear schedule: length={length} must be below ell={ell}; or take the exponential one")
    total = sum(ell - i for i in range(1, length + 1))
    return delta * length * (ell - depth) / total
