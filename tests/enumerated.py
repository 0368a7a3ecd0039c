"""Every rule, and the distribution of the token that it commits, enumerated.

Nothing is sampled: the probability of each outcome is found by bisecting the uniform draws of `verify_siblings`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from cspd.discrete.rules import GSD, CoolSD, Exact, Greedy, Lantern, LanternPlus, Pooling, Rule, UniformRSD, neighbours
from cspd.discrete.trees import SiblingVerdicts, verify_siblings

RULES = {
    "exact": Exact(),
    "uniform-rsd": UniformRSD(1.7),
    "uniform-rsd, own G": UniformRSD(1.7, optimal=False),
    "cool-sd": CoolSD(1.5, length=3),
    "cool-sd, linear": CoolSD(1.1, schedule="linear", length=3),
    "cool-sd, own G": CoolSD(1.5, length=3, optimal=False),
    "lantern": Lantern(0.3, k=2),
    "lantern, own G": Lantern(0.3, k=3, optimal=False),
    "lantern, jsd": Lantern(0.15, k=3, bound="jsd"),
    "lantern, jsd, own G": Lantern(0.1, k=4, bound="jsd", optimal=False),
    "lantern++": LanternPlus(1.5, k=2),
    "lantern++, own G": LanternPlus(1.5, k=3, optimal=False),
    "gsd": GSD(3, gap=0.2),
    "gsd, own G": GSD(4, gap=1.0, optimal=False),
    "greedy": Greedy(Exact()),
    "greedy cool-sd": Greedy(CoolSD(1.5, length=3)),
    "greedy gsd": Greedy(GSD(3)),
    "greedy lantern": Greedy(Lantern(0.5, k=2)),
    "greedy lantern++, own G": Greedy(LanternPlus(9.0, k=2, optimal=False)),
}
PUBLISHED = {
    "lantern, published": Lantern(8 / 64, k=3, published=True),
    "lantern, published, all neighbours": Lantern(0.4, k=50, published=True),
    "lantern++, published": LanternPlus(1.3, k=3, published=True),
    "greedy lantern, published": Greedy(Lantern(0.5, k=2, published=True)),
}
ALL = RULES | PUBLISHED
EXACT = [name for name in RULES if name.startswith(("exact", "greedy")) and "lantern" not in name]
BISECTIONS = 40


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@functools.cache
def near(vocabulary: int) -> Tensor:
    return neighbours(random(vocabulary, 3, seed=9), vocabulary)


def seeing(rule: Rule, table: Tensor) -> Rule:
    """The rule, with a table of neighbours if it pools."""
    if isinstance(rule, Greedy):
        return Greedy(seeing(rule.rule, table))
    return dataclasses.replace(rule, near=table) if isinstance(rule, Pooling) else rule


def pairs(vocabulary: int = 5) -> tuple[Tensor, Tensor]:
    """(P, Q) [18, V]: flat, ordinary and sharp ones; with zeros; equal; point masses; disjoint supports."""
    sharpness = torch.tensor([0.2, 1.0, 4.0]).double().repeat(6).unsqueeze(-1)
    p, q = (random(2, 18, vocabulary) * sharpness).softmax(-1)
    p[3:6, 0] = 0
    p[6:9, 1:3] = 0
    q[6:9, 2] = 0
    q[9:12, -1] = 0
    q[12] = p[12]
    p[13], p[14], q[15] = (one_hot(torch.tensor(i), vocabulary).double() for i in (0, 3, 2))
    p[16, :2] = 0
    q[16, 2:] = 0
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def pairs_with(K: int, vocabulary: int = 5) -> tuple[Tensor, Tensor]:
    """The pairs from whose Q at least K siblings can be sampled."""
    P, Q = pairs(vocabulary)
    is_enough = (Q > 0).sum(-1) >= K
    return P[is_enough], Q[is_enough]


def tv(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().sum(-1) / 2


def bound_of(verdicts: SiblingVerdicts) -> Tensor:
    """The local bounds at all positions."""
    return verdicts.bound(torch.ones_like(verdicts.index, dtype=torch.bool))


class Committed(NamedTuple):
    """The distribution of a committed token: of the accepted and of the resampled one, [..., V], and the mean bound."""

    accepted: Tensor
    resampled: Tensor
    bound: Tensor

    @property
    def total(self) -> Tensor:
        return self.accepted + self.resampled


def outcomes(
    rule: Rule, P: Tensor, Q: Tensor | None, candidates: Tensor, depth: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """(probability [..., K] that each candidate is accepted, residual if none is [..., V], mean bound [...])."""
    rule = seeing(rule, near(P.shape[-1]))

    def verdicts(uniforms: Tensor) -> SiblingVerdicts:
        return verify_siblings(rule, P, Q, candidates, uniforms, depth)

    all_rejected = torch.ones_like(candidates, dtype=P.dtype)
    none = verdicts(all_rejected)
    accepted = []
    left = torch.ones_like(P[..., 0])
    mean = torch.zeros_like(left)
    for k in range(candidates.shape[-1]):
        uniforms = all_rejected.clone()
        uniforms[..., k:] = 0
        low, high = torch.zeros_like(left), torch.ones_like(left)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            uniforms[..., k] = middle
            is_below = verdicts(uniforms).index == k
            low = torch.where(is_below, middle, low)
            high = torch.where(is_below, high, middle)
        f = (low + high) / 2
        uniforms[..., k] = 0
        accepted.append(left * f)
        mean = mean + accepted[-1] * bound_of(verdicts(uniforms))
        left = left * (1 - f)
    return torch.stack(accepted, -1), none.residual, mean + left * bound_of(none)


def commit(rule: Rule, P: Tensor, Q: Tensor, K: int, depth: int = 1) -> Committed:
    """The committed token over all K siblings from Q."""
    V = P.shape[-1]
    draws = torch.tensor(list(itertools.permutations(range(V), K)))
    mass = Q[..., draws]
    mass_left = 1 - mass.cumsum(-1) + mass
    weights = (mass / mass_left).prod(-1)
    candidates = draws.expand(mass.shape)
    P, Q = (t.unsqueeze(-2).expand(*mass.shape[:-1], V) for t in (P, Q))
    accepted, left, mean = outcomes(rule, P, Q, candidates, depth)
    weighted = weights.unsqueeze(-1) * accepted
    taken = (weighted.unsqueeze(-1) * one_hot(candidates, V)).sum(-2)
    resampled = (weights * (1 - accepted.sum(-1))).unsqueeze(-1) * left
    return Committed(taken.sum(-2), resampled.sum(-2), (weights * mean).sum(-1))


def commit_chosen(rule: Rule, P: Tensor, candidates: Tensor, depth: int = 1) -> Committed:
    """As `commit`, for candidates [..., K] that were chosen."""
    accepted, left, mean = outcomes(rule, P, None, candidates, depth)
    taken = (accepted.unsqueeze(-1) * one_hot(candidates, P.shape[-1])).sum(-2)
    rejected = 1 - accepted.sum(-1, keepdim=True)
    return Committed(taken, rejected * left, mean)
