"""Accept and resample: the distribution of what is committed, enumerated; bounds, siblings, pooling, schedules.

Nothing is drawn: the probability of each outcome is found by bisecting the uniform draws of `judge_siblings`.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import one_hot

from cspd.discrete import acceptance, judging, rules
from cspd.discrete.acceptance import absorbed, bound, exponential, linear, merge, pooled, relaxed, residual
from cspd.discrete.judging import judge_siblings
from cspd.discrete.neighbours import neighbours
from cspd.discrete.rules import Rule

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
    judge = lambda uniforms: judge_siblings(rule, P, Q, candidates, uniforms, depth, near(P.shape[-1]))  # noqa: E731
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


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_one_token(name, depth):
    """The bound is the distance itself; 0 of exact rules, and of G* where omega < 1."""
    rule, (P, Q) = RULES[name], pairs()
    taken, resampled, mean = commit(rule, P, Q, 1, depth)
    distance = tv(taken + resampled, rule.target(P))
    assert torch.allclose(distance, mean, atol=1e-10)
    unbiased = name in EXACT or (name.startswith("cool-sd") and rule.optimal and depth == 3)
    assert distance.max() < 1e-10 if unbiased else distance.max() > 0.05
    assert ((taken + resampled)[P == 0] < 1e-10).all() or not unbiased


@pytest.mark.parametrize("omega", [0.3, 0.8, 1.0, 2.0])
def test_no_resampling_beats_the_optimal_one(omega):
    P, Q = pairs()
    f = relaxed(P, Q, omega)
    committed = lambda G: Q * f + (1 - (Q * f).sum(-1, keepdim=True)) * G  # noqa: E731
    optimal, shortcut = (tv(committed(G), P) for G in (residual(P, Q, f), residual(P, Q, 1.0)))
    assert torch.allclose(optimal, bound(P, Q, f), atol=1e-12)
    assert torch.allclose(shortcut, bound(P, Q, f, residual(P, Q, 1.0)), atol=1e-12)
    assert (optimal <= shortcut + 1e-12).all()
    for seed in range(20):
        assert (optimal <= tv(committed(random(*P.shape, seed=seed).softmax(-1)), P) + 1e-12).all()
    overlap = (torch.minimum(P, Q).sum(-1) > 0.01) & (tv(P, Q) > 1e-3) & (P.amax(-1) < 0.999)
    if omega < 1:
        assert optimal.max() < 1e-12 and (shortcut[overlap] > 1e-6).all() and shortcut.max() > 0.1
    else:
        assert torch.allclose(optimal, shortcut, atol=1e-12)


TREES = {"chain": (4, 3, 1, False), "tree": (3, 2, 2, False), "chosen": (3, 2, 2, True)}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", RULES)
def test_whole_sequences(name, tree):
    """Rounds of gamma drafted levels of K siblings and a code more: TV from the target is below the mean bound."""
    rule, V, (length, gamma, K, chosen) = RULES[name], 4, TREES[tree]
    logits = [1.5 * random(V**n, V, seed=n) for n in range(length)]
    target = [logit.softmax(-1) for logit in logits]
    draft = [(logit + random(*logit.shape, seed=20)).softmax(-1) for logit in logits]
    target[-1][::3, 1] = 0
    target[-1] /= target[-1].sum(-1, keepdim=True)

    # what follows a prefix, [V^n, V^(length - n)], and bounds, by the depth of the next code; from the end
    def step(now, rest):
        return (now.unsqueeze(-1) * rest.view(*now.shape, -1)).flatten(1)

    wanted, following = torch.ones(V**length, 1).double(), [torch.ones(V**length, 1).double()] * (gamma + 1)
    means = [torch.zeros(V**length).double()] * (gamma + 1)
    for P, Q in zip(target[::-1], draft[::-1]):
        goal, now, cost = rule.target(P), [], []
        for depth in range(1, gamma + 1):
            top = Q.topk(K).indices
            made = commit_chosen(rule, P, top, depth) if chosen else commit(rule, P, Q, K, depth)
            taken, resampled, mean = made
            now.append(step(taken, following[depth]) + step(resampled, following[0]))
            cost.append(mean + (taken * means[depth].view(-1, V) + resampled * means[0].view(-1, V)).sum(-1))
        following, means = [*now, step(goal, following[0])], [*cost, (goal * means[0].view(-1, V)).sum(-1)]
        wanted = step(goal, wanted)
    distance = tv(following[0], wanted).item()
    assert following[0].sum().item() == pytest.approx(1, abs=1e-9)
    assert distance <= means[0].item() + 1e-9
    assert distance < 1e-9 if name in EXACT else distance > 0.01


@pytest.mark.parametrize("V, K", [(4, 1), (4, 2), (4, 3), (5, 2), (5, 3)])
def test_siblings_are_exact(V, K):
    P, Q = pairs_with(K, V)
    chosen = torch.tensor(list(itertools.permutations(range(V), K))).unsqueeze(1).expand(-1, len(P), -1)
    for name in ("exact", "exact, own G", "cool-sd", "cool-sd, linear"):
        drawn = commit(RULES[name], P, Q, K, 3)
        for taken, resampled, mean in (drawn, commit_chosen(RULES[name], P.expand(len(chosen), -1, -1), chosen, 3)):
            assert tv(taken + resampled, P).max() < 1e-10 and mean.max() < 1e-10


@pytest.mark.parametrize("name", [name for name in RULES if name not in EXACT])
def test_siblings_by_a_relaxed_rule_stay_within_the_bound(name):
    rule, (P, Q) = RULES[name], (t[:3] for t in pairs())
    drawn, chosen = commit(rule, P, Q, 3), commit_chosen(rule, P, Q.topk(3).indices)
    for taken, resampled, mean in (drawn, chosen):
        assert (tv(taken + resampled, rule.target(P)) <= mean + 1e-10).all() and mean.max() > 1e-3


def by_probability(candidates, Q):
    return candidates.gather(-1, Q.gather(-1, candidates).argsort(dim=-1, descending=True))


BUGS = ("none", "sorted by Q", "judged with the first Q", "residual of the first Q")


@pytest.mark.parametrize("bug", BUGS)
def test_wrong_siblings_would_be_seen(bug, monkeypatch):
    P, Q = pairs_with(3)
    if bug.startswith("judged"):
        monkeypatch.setattr(judging, "without", lambda Q, earlier: Q)
    if bug.startswith("residual"):
        monkeypatch.setattr(Rule, "resample", lambda rule, p, q, f, x, near: residual(p, Q.unsqueeze(1), f))
    taken, resampled, _ = commit(Rule(), P, Q, 3, arrange=by_probability if bug == "sorted by Q" else None)
    distance = tv(taken + resampled, P).max()
    assert distance < 1e-10 if bug == "none" else distance > 0.05


def test_chosen_candidates_judged_as_if_drawn_would_be_seen():
    P, Q = (t[:3] for t in pairs())
    taken, resampled, _ = commit_chosen(Rule(), P, Q.topk(2).indices, Q=Q)
    assert tv(taken + resampled, P).max() > 0.05


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
    monkeypatch.setattr(acceptance, "MOST_AT_ONCE", 7)
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


def test_greedy_takes_the_argmax_whatever_omega_and_the_lowest_index_at_ties():
    P = torch.tensor([[0.2, 0.4, 0.4, 0.0], [0.0, 0.3, 0.3, 0.4]]).double()
    for rule in (Rule(greedy=True), Rule("cool-sd", delta=0.1, length=2, greedy=True)):
        for tokens, expected in (([1, 3], [0, 0]), ([2, 1], [-1, -1])):
            judged = judge_siblings(rule, P, P.flip(-1), torch.tensor(tokens)[:, None], torch.full((2, 1), 0.999), 2)
            assert judged.index.tolist() == expected and judged.residual.argmax(-1).tolist() == [1, 3]
            assert (judged.residual.amax(-1) == 1).all() and (bound_of(judged) == 0).all()
        assert torch.equal(rule.resample(P, P, P, torch.tensor([2, 1])), rule.target(P))
    lantern = Rule("lantern", delta=1.0, k=1, greedy=True)
    order = torch.tensor([[3], [0], [0], [2]])
    judged = judge_siblings(lantern, P[1:], None, torch.tensor([[1, 0]]), torch.zeros(1, 2), near=order)
    assert (
        judged.index == 1 and bound_of(judged) == 1
    )  # 1 takes over nothing; 0, of probability 0, takes over the argmax


@pytest.mark.parametrize("length", [1, 2, 5, 7])
def test_schedules(length):
    depths = range(1, length + 1)
    for omegas in ([exponential(i, 1.5, length) for i in depths], [linear(i, 1.5, length) for i in depths]):
        assert sum(omegas) == pytest.approx(1.5 * length) and min(omegas) > 0
        assert all(a > b for a, b in itertools.pairwise(omegas))
    ratios = [exponential(i + 1, 1, length, 0.4) / exponential(i, 1, length, 0.4) for i in depths[:-1]]
    assert ratios == pytest.approx([math.exp(-0.4)] * (length - 1))
    weights = [(8 - i) / (8 * 9) for i in depths]
    assert [linear(i, 2, length) for i in depths] == pytest.approx([2 * length * w / sum(weights) for w in weights])
    for schedule in rules.SCHEDULES:
        rule, depth = Rule("cool-sd", delta=2.0, length=length, schedule=schedule), torch.tensor([1, length, 64])
        omega = rule.omega(depth)
        assert omega.shape == (3, 1) and omega[1] == omega[2]
        assert omega.flatten().tolist() == pytest.approx([rule.omega(i) for i in depth.tolist()])
    assert rules.WINDOW_CAP == 8


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name": "sd"}, "give one of exact, uniform-rsd"),
        ({"name": "uniform-rsd"}, "delta is missing"),
        ({"name": "uniform-rsd", "delta": 0.9}, "1 or more"),
        ({"name": "uniform-rsd", "delta": math.nan}, "delta=nan"),
        ({"name": "cool-sd", "delta": 0.0, "length": 2}, "delta=0.0"),
        ({"name": "cool-sd", "delta": math.inf, "length": 2}, "delta=inf"),
        ({"name": "cool-sd", "delta": 1.1}, "length=None"),
        ({"name": "cool-sd", "delta": 1.1, "length": 2, "nu": -0.7}, "nu=-0.7"),
        ({"name": "cool-sd", "delta": 1.1, "length": 2, "schedule": "cosine"}, "exponential, linear"),
        ({"name": "cool-sd", "delta": 1.1, "length": 8, "schedule": "linear"}, "length=8 must be below ell=8"),
        ({"name": "lantern", "delta": 1.5}, "above 0, at most 1"),
        ({"name": "lantern", "delta": 0.1, "k": 0}, "k=0"),
        ({"name": "lantern++", "lam": 0}, "lam=0"),
        ({"name": "lantern++", "k": 2.5}, "whole number"),
        ({"name": "gsd"}, "group is missing"),
        ({"name": "gsd", "group": 0}, "group=0"),
        ({"name": "gsd", "group": 3, "gap": 0}, "0.001..1"),
    ],
)
def test_bad_parameters(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        Rule(**arguments)
    assert "\n" not in str(error.value)


def test_guarantees_and_missing_neighbours():
    assert {rule.guarantee for name, rule in RULES.items() if rule.name == "exact"} == {"exact"}
    assert {rule.guarantee for name, rule in RULES.items() if rule.name != "exact"} == {"bounded"}
    P, Q = pairs()
    for table in (None, near(5)[:, :1]):
        with pytest.raises(ValueError, match="k of at least 2"):
            RULES["lantern"].accept(P, Q, near=table)
    Rule("lantern", delta=0.2, k=100).accept(P, Q, near=near(5))  # a codebook of 5 has no more than 4 others


@pytest.mark.parametrize("name", ALL)
def test_batched_is_row_by_row(name):
    """Over any leading dimensions, depths that differ, and absent candidates."""
    rule, g = ALL[name], torch.Generator().manual_seed(0)
    P, Q = (t[:12].view(3, 4, 5) for t in pairs())
    candidates = torch.rand(3, 4, 5, generator=g).argsort(-1)[..., :3]
    candidates[0, :, 1:], candidates[1, 2] = -1, -1
    uniforms, depth = torch.rand(3, 4, 3, generator=g), torch.arange(1, 13).view(3, 4)
    for q in (Q, None):
        judged = judge_siblings(rule, P, q, candidates, uniforms, depth, near(5))
        for i, j in itertools.product(range(3), range(4)):
            present = candidates[i, j] >= 0
            if not present.any():
                assert judged.index[i, j] == -1 and bound_of(judged)[i, j] == 0
                assert torch.allclose(judged.residual[i, j], rule.target(P[i, j]))
                continue
            row = [P[i, j], q if q is None else q[i, j], candidates[i, j][present], uniforms[i, j][present]]
            row = [each if each is None else each.unsqueeze(0) for each in row]
            alone = judge_siblings(rule, *row, int(depth[i, j]), near(5))
            assert judged.index[i, j] == alone.index
            assert torch.allclose(bound_of(judged)[i, j], bound_of(alone), atol=1e-7)
            assert torch.allclose(judged.residual[i, j], alone.residual, atol=1e-6) or alone.index >= 0


@pytest.mark.parametrize("name", ALL)
def test_float32_is_near_float64(name):
    rule, (P, Q) = ALL[name], pairs()
    made = []
    for dtype in (torch.float64, torch.float32):
        p, q = P.to(dtype), Q.to(dtype)
        x = torch.arange(5).expand(len(P), -1)
        wide = [t.unsqueeze(1).expand(-1, 5, -1) for t in (p, q)]
        f = rule.accept(*wide, 2, near(5), x)
        assert f.dtype == dtype
        lost = (wide[1] * (1 - f)).diagonal(dim1=1, dim2=2).unsqueeze(-1)
        made.append((f.diagonal(dim1=1, dim2=2), lost * rule.resample(*wide, f, x, near(5)), rule.bound(*wide, f)))
    assert all(torch.allclose(a, b.double(), atol=1e-6) for a, b in zip(*made))


def test_equal_distributions_accept_everything_and_leave_P():
    P = random(50, 1000).float().softmax(-1)
    for omega in (1.0, 1.5):
        f = relaxed(P, P, omega)
        assert (f == 1).all() and torch.equal(residual(P, P, f), P) and (bound(P, P, f) == 0).all()


def test_a_candidate_that_neither_draft_nor_target_can_emit_is_rejected():
    P = torch.tensor([0.0, 1.0, 0.0])
    Q, code = torch.tensor([[0.0, 0.5, 0.5]]), torch.tensor([[0]])
    assert judge_siblings(Rule(), P.unsqueeze(0), Q, code, torch.zeros(1, 1)).index == -1
