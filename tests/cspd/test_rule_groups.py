"""Rules that accept a code for its neighbours or its group: they are their plain loops, and as published."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from enumerated import PUBLISHED, commit, near, outcomes, random, tv
from torch.nn.functional import one_hot

from cspd.discrete import rules
from cspd.discrete.rules import Rule, absorbed, bound, merge, pooled, relaxed, residual


def slow_merge(p, x, order, limit):
    """P_A of one code, in plain Python."""
    merged, mass = list(p), 0.0
    for y in order:
        if mass + p[y] >= limit:
            break
        mass, merged[y] = mass + p[y], 0.0
    merged[x] += mass
    return merged


def coarse():
    """Distributions in multiples of 1/64, whose sums are exact: with zeros and ties, so that limits are reached."""
    counts = torch.tensor([[5, 0, 8, 8, 3, 0, 0, 16, 8, 4, 8, 4], [0, 32, 0, 32] + [0] * 8, [5] * 8 + [6] * 4])
    return (counts / counts.sum(-1, keepdim=True)).double()


@pytest.mark.parametrize("k", [1, 3, 8, 11, 50])
@pytest.mark.parametrize("limit", [("lantern", 1 / 64), ("lantern", 0.25), ("lantern", 1.0), ("lantern++", 1.0)])
def test_pooling_is_the_plain_loop(k, limit, monkeypatch):
    P, (name, value) = coarse(), limit
    Q, table = random(*P.shape).softmax(-1), near(12)
    rule = Rule(name, delta=value if name == "lantern" else None, lam=value, k=k)
    greedy, columns = replace(rule, greedy=True), table[:, :k]
    most = torch.full_like(P, value) if name == "lantern" else value * P
    expected = torch.tensor(
        [
            [slow_merge(p, x, order, m[x]) for x, order in enumerate(columns.tolist())]
            for p, m in zip(P.tolist(), most.tolist())
        ]
    ).double()
    x = torch.arange(12).expand(3, -1)
    wide = lambda t: t.unsqueeze(1).expand(-1, 12, -1)  # noqa: E731
    mass = expected.diagonal(dim1=1, dim2=2)
    assert torch.equal(merge(wide(P), x, columns, wide(most)), expected)
    assert torch.equal(absorbed(P, columns, most), mass - P)
    f = rule.accept(P, Q, near=table)
    assert torch.allclose(f, (mass / Q).clamp(max=1)) and torch.equal(f, pooled(P, Q, columns, most))
    at_x = rule.accept(wide(P), wide(Q), near=table, x=x).diagonal(dim1=1, dim2=2)
    assert torch.equal(at_x, f)
    own = replace(rule, optimal=False).resample(wide(P), wide(Q), f, x, table)
    assert torch.allclose(own, residual(expected, wide(Q), 1.0))
    top = torch.tensor([[merged.index(max(merged)) for merged in rows] for rows in expected.tolist()])
    assert torch.equal(greedy.accept(wide(P), wide(Q), near=table, x=x), one_hot(top, 12).double())
    monkeypatch.setattr(rules, "MOST_JUDGED_AT_ONCE", 7)
    assert torch.equal(rule.accept(P, Q, near=table), f)


def slow_group(p, x, group, gap):
    """The codes of one code's group, in plain Python."""
    order = sorted(range(len(p)), key=lambda y: (p[y], y))
    place = order.index(x)
    around = order[max(0, place - group // 2) : place + (group - 1) // 2 + 1]
    return [y for y in around if abs(p[y] - p[x]) < gap]


@pytest.mark.parametrize("group", [1, 2, 3, 6, 7, 50])
@pytest.mark.parametrize("gap", [1 / 64, 0.125, 1.0])
def test_groups_are_the_plain_loop(group, gap):
    """What is accepted, and with the authors' G the distribution of what is committed."""
    P = coarse()
    Q = random(*P.shape).softmax(-1)
    rule, expected = Rule("gsd", group=group, gap=gap, optimal=False), torch.zeros_like(P)
    for row, (p, q) in enumerate(zip(P.tolist(), Q.tolist())):
        for x in range(12):
            members = slow_group(p, x, group, gap)
            ratio = sum(p[y] for y in members) / sum(q[y] for y in members)
            expected[row, x] = min(1, ratio) if p[x] > 0 else 0
    assert torch.allclose(rule.accept(P, Q), expected, atol=1e-12)
    assert group > 1 or torch.allclose(expected, relaxed(P, Q, 1.0), atol=1e-12)

    accepted = Q * expected
    left = (P - Q).clamp(min=0)
    rejected = 1 - accepted.sum(-1, keepdim=True)
    committed = accepted + rejected * left / left.sum(-1, keepdim=True)
    taken, resampled, mean = commit(rule, P, Q, 1)
    assert torch.allclose(taken + resampled, committed, atol=1e-10)
    assert torch.allclose(tv(committed, P), mean, atol=1e-10)


def released(rule, P, Q, candidates, order):
    """What LANTERN's released code does with candidates, in plain Python: (probability that each is accepted, what is
    sampled if none is). Q: what they were drawn from; None: chosen.
    """
    P, accepted, left, earlier = list(P), [], 1.0, []
    for x in candidates:
        pooled, gives = 0.0, False
        limit = rule.delta if rule.name == "lantern" else rule.lam * P[x]
        for y in order[x][: rule.k]:
            if pooled + P[y] > limit:
                break
            pooled, gives = pooled + P[y], True
        emptied = order[x][: rule.k + 1] if gives else []
        if Q is None:
            f = min(1.0, P[x] + pooled)
            P = [0.0 if y == x or y in emptied else mass for y, mass in enumerate(P)]
        else:
            q = [0.0 if y in earlier else mass for y, mass in enumerate(Q)]
            q = [mass / sum(q) for mass in q]
            f = min(1.0, (P[x] + pooled) / q[x])
            q = [0.0 if y in emptied else mass for y, mass in enumerate(q)]
            P = [max(0.0, a - b) for a, b in zip(P, q)]
        P = [mass / sum(P) for mass in P] if sum(P) > 0 else [1 / len(P)] * len(P)
        accepted.append(left * f)
        left *= 1 - f
        earlier.append(x)
    return accepted, P


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("name", [name for name in PUBLISHED if "greedy" not in name])
def test_published_lantern_does_what_its_code_does(name, drawn):
    rule, table = PUBLISHED[name], near(12)
    P = torch.cat([coarse(), (2 * random(9, 12)).softmax(-1)]).repeat(8, 1)
    Q = random(*P.shape, seed=1).softmax(-1)
    candidates = torch.rand(P.shape, generator=torch.Generator().manual_seed(2)).argsort(-1)[:, :3]
    accepted, left, mean = outcomes(rule, P, Q if drawn else None, candidates)
    rows = zip(P.tolist(), Q.tolist() if drawn else [None] * len(P), candidates.tolist())
    expected = [released(rule, *row, table.tolist()) for row in rows]
    assert torch.allclose(accepted, torch.tensor([row[0] for row in expected]).double(), atol=1e-10)
    assert torch.allclose(left, torch.tensor([row[1] for row in expected]).double(), atol=1e-10)
    assert rule.guarantee == "heuristic" and (mean == 0).all()
    if drawn:  # farther from P than Theorem 2 says of the paper's
        taken, resampled, _ = commit(rule, P, Q, 1)
        theorem = bound(P, Q, rule.accept(P, Q, near=table))
        assert (tv(taken + resampled, P) - theorem).max() > 0.03


def test_pooling_stops_at_the_first_that_would_reach_the_limit():
    P, order = torch.tensor([0.3, 0.1, 0.05, 0.5, 0.05]).double(), torch.tensor([[1, 2, 3, 4]] * 5)
    for limit, mass in ((0.1, 0.0), (0.15, 0.1), (0.16, 0.15), (0.65, 0.15), (0.66, 0.65), (1.0, 0.7)):
        assert absorbed(P, order, torch.full_like(P, limit))[0].item() == pytest.approx(mass)
