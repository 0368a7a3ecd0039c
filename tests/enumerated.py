"""Every rule, and the distribution of what it commits, enumerated.

Nothing is drawn: the probability of each outcome is found by bisecting the uniform draws of `verify_siblings`.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch.nn.functional import one_hot

from cspd.discrete.rules import Rule, neighbours
from cspd.discrete.trees import verify_siblings

RULES = {
    "exact": Rule(),
    "exact, own G": Rule(optimal=False),
    "uniform-rsd": Rule("uniform-rsd", delta=1.7),
    "cool-sd": Rule("cool-sd", delta=1.5, length=3),
    "cool-sd, linear": Rule("cool-sd", delta=1.2, length=3, schedule="linear", ell=4),
    "cool-sd, own G": Rule("cool-sd", delta=1.5, length=3, optimal=False),
    "lantern": Rule("lantern", delta=0.3, k=2),
    "lantern, own G": Rule("lantern", delta=0.3, k=3, optimal=False),
    "lantern++": Rule("lantern++", lam=1.5, k=2),
    "lantern++, own G": Rule("lantern++", lam=1.5, k=3, optimal=False),
    "gsd": Rule("gsd", group=3, gap=0.2),
    "gsd, own G": Rule("gsd", group=4, gap=1.0, optimal=False),
    "greedy": Rule(greedy=True),
    "greedy cool-sd": Rule("cool-sd", delta=1.5, length=3, greedy=True),
    "greedy gsd": Rule("gsd", group=3, greedy=True),
    "greedy lantern": Rule("lantern", delta=0.5, k=2, greedy=True),
    "greedy lantern++, own G": Rule("lantern++", lam=9.0, k=2, greedy=True, optimal=False),
}
PUBLISHED = {
    "lantern, published": Rule("lantern", delta=8 / 64, k=3, published=True),
    "lantern, published, all neighbours": Rule("lantern", delta=0.4, k=50, published=True),
    "lantern++, published": Rule("lantern++", lam=1.3, k=3, published=True),
    "greedy lantern, published": Rule("lantern", delta=0.5, k=2, greedy=True, published=True),
}
ALL = RULES | PUBLISHED
EXACT = [name for name in RULES if name.startswith(("exact", "greedy")) and "lantern" not in name]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@functools.cache
def near(vocabulary):
    return neighbours(random(vocabulary, 3, seed=9), vocabulary)


def pairs(vocabulary=5):
    """(P, Q) [n, V]: flat, plain and sharp ones; with zeros; equal; point masses; disjoint supports."""
    p, q = (random(2, 18, vocabulary) * torch.tensor([0.2, 1.0, 4.0]).repeat(6).double().unsqueeze(-1)).softmax(-1)
    p[3:6, 0], p[6:9, 1:3], q[6:9, 2], q[9:12, -1], q[12] = 0, 0, 0, 0, p[12]
    p[13], p[14], q[15] = (one_hot(torch.tensor(i), vocabulary).double() for i in (0, 3, 2))
    p[16, :2], q[16, 2:] = 0, 0
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def pairs_with(K, vocabulary=5):
    """Those pairs of which K siblings can be drawn."""
    P, Q = pairs(vocabulary)
    return tuple(t[(Q > 0).sum(-1) >= K] for t in (P, Q))


def tv(a, b):
    return (a - b).abs().sum(-1) / 2


def bound_of(judged):
    return judged.bound(torch.ones_like(judged.index, dtype=torch.bool))


def outcomes(rule, P, Q, candidates, depth=1):
    """(probability [..., K] that each candidate is accepted, residual if none is [..., V], mean bound [...])."""
    rejected = torch.ones_like(candidates, dtype=P.dtype)
    judge = lambda uniforms: verify_siblings(rule, P, Q, candidates, uniforms, depth, near(P.shape[-1]))  # noqa: E731
    none, accepted = judge(rejected), []
    left, mean = torch.ones_like(P[..., 0]), torch.zeros_like(P[..., 0])
    for k in range(candidates.shape[-1]):
        at = lambda level: torch.cat([rejected[..., :k], level.unsqueeze(-1), 0 * rejected[..., k + 1 :]], -1)  # noqa: B023, E731
        low, high = torch.zeros_like(left), torch.ones_like(left)
        for _ in range(40):
            middle = (low + high) / 2
            below = judge(at(middle)).index == k
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        f = (low + high) / 2
        accepted.append(left * f)
        mean = mean + accepted[-1] * bound_of(judge(at(torch.zeros_like(f))))
        left = left * (1 - f)
    return torch.stack(accepted, -1), none.residual, mean + left * bound_of(none)


def commit(rule, P, Q, K, depth=1, arrange=None):
    """(distribution of the accepted code, of the resampled one, [..., V] each, mean bound) over all K siblings from Q.

    `arrange` reorders the candidates [..., n, K] before they are judged.
    """
    V = P.shape[-1]
    draws = torch.tensor(list(itertools.permutations(range(V), K)))
    mass = Q[..., draws]
    weights = (mass / (1 - mass.cumsum(-1) + mass)).prod(-1)
    candidates = draws.expand(mass.shape)
    P, Q = (t.unsqueeze(-2).expand(*mass.shape[:-1], V) for t in (P, Q))
    candidates = arrange(candidates, Q) if arrange else candidates
    accepted, left, mean = outcomes(rule, P, Q, candidates, depth)
    resampled = (weights * (1 - accepted.sum(-1))).unsqueeze(-1) * left
    taken = ((weights.unsqueeze(-1) * accepted).unsqueeze(-1) * one_hot(candidates, V)).sum(-2)
    return taken.sum(-2), resampled.sum(-2), (weights * mean).sum(-1)


def commit_chosen(rule, P, candidates, depth=1, Q=None):
    """As `commit`, of candidates [..., K] that were chosen."""
    accepted, left, mean = outcomes(rule, P, Q, candidates, depth)
    taken = (accepted.unsqueeze(-1) * one_hot(candidates, P.shape[-1])).sum(-2)
    return taken, (1 - accepted.sum(-1, keepdim=True)) * left, mean
