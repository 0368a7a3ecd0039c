"""The price of a relaxed rule: the divergence of its tokens' distributions from the target's, in nats per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cspd.discrete.distributions import point, sample, without
from cspd.discrete.rules import Rule
from cspd.transformer import steps

# Given everything before its position, the token that a rule commits there has a distribution C, and the target's is
# P. By the chain rule, and since KL is convex, the mean over images of the sum over positions of KL(C || P) bounds the
# KL divergence of an image's tokens from the target's.
#
# The first candidate, drawn from Q, is accepted with probability f, so C = Q f + r G with r = sum Q (1 - f) if there is
# one candidate, and G is what its rejection leaves of P. With siblings, G is replaced by the same mixture of the next
# candidate, and so on. C depends on the rejected candidates of all possible outcomes: these are drawn. The estimate is
# the mean of NUM_DRAWN such mixtures, so that its KL has a slightly larger mean, never a smaller one.

NUM_DRAWN = 4  # within 1 % of the price of 32 on digits32_vq


class Verification(NamedTuple):
    """The positions that a round may verify, and which of them it did.

    Attributes:
        P, Q: [B, M, V], the target's distribution, and the one that the candidates were drawn from; Q is None if they
            were chosen.
        candidates: int64 [B, M, K], in the order of verification, -1 for missing ones. depth: int64 [B, M], from 1.
        tried: bool [B, M], the verified positions.
    """

    P: Tensor
    Q: Tensor | None
    candidates: Tensor
    depth: Tensor
    tried: Tensor


def num_draws(rule: Rule, verification: Verification) -> int:
    """How many uniform draws `audited` takes for each sequence."""
    most_candidates = verification.candidates.shape[-1]
    depends_on_none = most_candidates == 1 and not rule.depends_on_x
    is_one = verification.Q is None or depends_on_none  # C does not depend on what is drawn
    return 1 + (1 if is_one else NUM_DRAWN) * most_candidates


def audited(rule: Rule, verification: Verification, u: Tensor) -> Tensor:
    """An estimate [B] of the sum of KL(C || P), nats, over the verified positions: that of one of them, times how many.

    Args:
        u: uniform draws [B, `num_draws`].
    """
    P, Q, candidates, depth, tried = verification
    num_tried = tried.sum(1)
    wanted = (u[:, 0] * num_tried).long()
    is_chosen = tried & (tried.cumsum(1) - 1 == wanted.unsqueeze(1))
    position = is_chosen.int().argmax(1)
    each = steps(len(P), P.device)
    P = P[each, position]
    C = committed(
        rule,
        P,
        None if Q is None else Q[each, position],
        candidates[each, position],
        u[:, 1:].unflatten(1, (-1, candidates.shape[-1])),
        depth[each, position],
    )
    return torch.where(num_tried > 0, num_tried * divergence(C, P), 0)


def divergence(C: Tensor, P: Tensor) -> Tensor:
    """KL(C || P) [...] in nats, of distributions [..., V]; infinite if C has tokens that P has not."""
    terms = C * (C / P).log()
    # these sum to 0, and make every term positive, whatever the rounding
    return (terms.masked_fill(C <= 0, 0) - C + P).sum(-1)


def committed(rule: Rule, P: Tensor, Q: Tensor | None, candidates: Tensor, u: Tensor, depth: Tensor | int) -> Tensor:
    """C [..., V], the distribution of the token that verifying the candidates of a position commits.

    Args:
        P, Q: [..., V], as in `Verification`. candidates: int64 [..., K]; if they were drawn, only their number matters.
        u: uniform draws [..., N, K]. depth: int or int64 [...].
    """
    num = u.shape[-2]
    candidates = _repeated(candidates, num)
    depth = depth.unsqueeze(-1).expand(u.shape[:-1]) if isinstance(depth, Tensor) else depth
    left = _repeated(P, num)  # of P, after the rejections so far
    q = None if Q is None else _repeated(Q, num)
    total = torch.zeros_like(left)
    weight = torch.ones_like(left[..., :1])  # the probability of these rejections
    for x, own in zip(candidates.unbind(-1), u.unbind(-1)):
        is_present = (x >= 0).unsqueeze(-1)
        of_x = point(x.clamp(min=0), left) if q is None else q
        f = rule.accept(left, of_x, depth)
        accepted = of_x * f
        rejected = of_x - accepted
        share = rejected.sum(-1, keepdim=True)
        x = sample(rejected, own).clamp(min=0)
        after = rule.resample(left, of_x, f, x)
        total = torch.where(is_present, total + weight * accepted, total)
        weight = torch.where(is_present, weight * share, weight)
        left = torch.where(is_present, after, left)
        q = None if q is None else without(q, x)
    return (total + weight * left).mean(-2)


def _repeated(of_position: Tensor, num: int) -> Tensor:
    """[..., N, n] from [..., n]."""
    return of_position.unsqueeze(-2).expand(*of_position.shape[:-1], num, -1)
