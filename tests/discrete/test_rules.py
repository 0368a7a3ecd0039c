"""Rules for drafted tokens, the probabilities they compare, and which tokens are near each other."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from enumerated import (
    ALL,
    EXACT,
    PUBLISHED,
    RULES,
    bound_of,
    commit,
    commit_chosen,
    near,
    outcomes,
    pairs,
    pairs_with,
    random,
    tv,
)
from torch.nn.functional import one_hot
from toys import request_of, toy_models

from cspd.discrete import rules, trees
from cspd.discrete.rules import (
    METRICS,
    Rule,
    absorbed,
    bound,
    draw_siblings,
    exponential,
    likeliest,
    linear,
    merge,
    near_codes,
    neighbours,
    point,
    pooled,
    relaxed,
    residual,
    rule_of,
    sample,
    without,
)
from cspd.discrete.trees import verify_siblings


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
        monkeypatch.setattr(trees, "without", lambda Q, earlier: Q)
    if bug.startswith("residual"):
        monkeypatch.setattr(Rule, "resample", lambda rule, p, q, f, x, near: residual(p, Q.unsqueeze(1), f))
    taken, resampled, _ = commit(Rule(), P, Q, 3, arrange=by_probability if bug == "sorted by Q" else None)
    distance = tv(taken + resampled, P).max()
    assert distance < 1e-10 if bug == "none" else distance > 0.05


def test_chosen_candidates_judged_as_if_drawn_would_be_seen():
    P, Q = (t[:3] for t in pairs())
    taken, resampled, _ = commit_chosen(Rule(), P, Q.topk(2).indices, Q=Q)
    assert tv(taken + resampled, P).max() > 0.05


def test_greedy_takes_the_argmax_whatever_omega_and_the_lowest_index_at_ties():
    P = torch.tensor([[0.2, 0.4, 0.4, 0.0], [0.0, 0.3, 0.3, 0.4]]).double()
    for rule in (Rule(greedy=True), Rule("cool-sd", delta=0.1, length=2, greedy=True)):
        for tokens, expected in (([1, 3], [0, 0]), ([2, 1], [-1, -1])):
            judged = verify_siblings(rule, P, P.flip(-1), torch.tensor(tokens)[:, None], torch.full((2, 1), 0.999), 2)
            assert judged.index.tolist() == expected and judged.residual.argmax(-1).tolist() == [1, 3]
            assert (judged.residual.amax(-1) == 1).all() and (bound_of(judged) == 0).all()
        assert torch.equal(rule.resample(P, P, P, torch.tensor([2, 1])), rule.target(P))
    lantern = Rule("lantern", delta=1.0, k=1, greedy=True)
    order = torch.tensor([[3], [0], [0], [2]])
    judged = verify_siblings(lantern, P[1:], None, torch.tensor([[1, 0]]), torch.zeros(1, 2), near=order)
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
        ({"name": "sd"}, "rule"),
        ({"name": "uniform-rsd"}, "delta"),
        ({"name": "uniform-rsd", "delta": 0.9}, "delta"),
        ({"name": "uniform-rsd", "delta": math.nan}, "delta"),
        ({"name": "cool-sd", "delta": 0.0, "length": 2}, "delta"),
        ({"name": "cool-sd", "delta": math.inf, "length": 2}, "delta"),
        ({"name": "cool-sd", "delta": 1.1}, "length"),
        ({"name": "cool-sd", "delta": 1.1, "length": 2, "nu": -0.7}, "nu"),
        ({"name": "cool-sd", "delta": 1.1, "length": 2, "schedule": "cosine"}, "schedule"),
        ({"name": "cool-sd", "delta": 1.1, "length": 8, "schedule": "linear"}, "length"),
        ({"name": "lantern", "delta": 1.5}, "delta"),
        ({"name": "lantern", "delta": 0.1, "k": 0}, "k"),
        ({"name": "lantern++", "lam": 0}, "lam"),
        ({"name": "lantern++", "k": 2.5}, "k"),
        ({"name": "gsd"}, "group"),
        ({"name": "gsd", "group": 0}, "group"),
        ({"name": "gsd", "group": 3, "gap": 0}, "gap"),
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
        with pytest.raises(ValueError):
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
        judged = verify_siblings(rule, P, q, candidates, uniforms, depth, near(5))
        for i, j in itertools.product(range(3), range(4)):
            present = candidates[i, j] >= 0
            if not present.any():
                assert judged.index[i, j] == -1 and bound_of(judged)[i, j] == 0
                assert torch.allclose(judged.residual[i, j], rule.target(P[i, j]))
                continue
            row = [P[i, j], q if q is None else q[i, j], candidates[i, j][present], uniforms[i, j][present]]
            row = [each if each is None else each.unsqueeze(0) for each in row]
            alone = verify_siblings(rule, *row, int(depth[i, j]), near(5))
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
    assert verify_siblings(Rule(), P.unsqueeze(0), Q, code, torch.zeros(1, 1)).index == -1


# ---- Rules that accept a code for its neighbours or its group: they are their plain loops, and as published


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
    monkeypatch.setattr(rules, "MAX_GATHERED", 7)
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


# ---- Draws from distributions of codes: one, and siblings without replacement


def test_samples_follow_the_weights_and_never_have_probability_zero():
    weights = torch.tensor([0.0, 3, 0, 5, 7, 1, 0, 0])
    codes = sample((weights / 16).expand(16, -1), (torch.arange(16) + 0.5) / 16)
    assert torch.equal(torch.bincount(codes, minlength=8).float(), weights) and (codes.diff() >= 0).all()
    P = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).mul(8).softmax(-1)
    P = P.masked_fill(P < P.quantile(0.9, dim=-1, keepdim=True), 0)
    for u in (0.0, 2.0**-24, 0.5, 1 - 2.0**-24, 1 - 2.0**-53, 1.0):
        codes = sample(P, torch.full((64,), u, dtype=torch.float64))
        assert (P.gather(-1, codes[:, None]) > 0).all()
    last = (P > 0).int().cumsum(-1).argmax(-1)
    assert torch.equal(sample(P, torch.ones(64)), last)


def test_a_parallel_sum_that_rounds_upwards_gives_no_token_of_probability_zero(monkeypatch):
    exactly = torch.Tensor.cumsum
    monkeypatch.setattr(rules, "_adds_in_parallel", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda t, dim: exactly(t, dim) + 1e-15 * torch.arange(t.shape[dim]))
    assert sample(torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]] * 2), torch.tensor([2.0**-24, 1.0])).tolist() == [1, 3]
    assert sample(torch.tensor([0.5, 0.0, 0.0, 0.5]), torch.tensor(0.5)) == 3


def test_siblings_drawn_without_replacement():
    """Counts over a grid of uniforms are those of drawing one after the other; what is used up gives -1."""
    Q, grid = torch.tensor([0.5, 0.0, 0.25, 0.25]).double(), (torch.arange(12) + 0.5) / 12
    u = torch.cartesian_prod(grid, grid, grid[:1], grid[:1])
    drawn = draw_siblings(Q.expand(len(u), -1), u)
    assert (drawn[:, 3] == -1).all() and (drawn[:, :3] >= 0).all() and not (drawn == 1).any()
    pairs_drawn = drawn[:, 0] * 4 + drawn[:, 1]
    counts = {(a, b): int((pairs_drawn == a * 4 + b).sum()) for a in range(4) for b in range(4)}
    seen = {(0, 2): 36, (0, 3): 36, (2, 0): 24, (2, 3): 12, (3, 0): 24, (3, 2): 12}
    assert {pair: n for pair, n in counts.items() if n} == seen


def test_without_and_point():
    Q = torch.tensor([[0.5, 0.1, 0.4], [0.0, 0.0, 1.0], [0.5, 0.1, 0.4]]).double()
    left = without(Q, torch.tensor([0, 2, 1]))
    assert torch.allclose(left, torch.tensor([[0.0, 0.2, 0.8], [0, 0, 0], [5 / 9, 0.0, 4 / 9]]).double())
    assert point(torch.tensor([2, 0, 1]), Q).tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]


def test_the_likeliest_codes():
    Q = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]])
    assert likeliest(Q, 2).tolist() == [[1, 2], [0, 2]]
    assert likeliest(Q, 5).tolist() == [[1, 2, 0, -1, -1], [0, 2, 1, -1, -1]]


# ---- Near codes: the order of a plain sort, whatever is done at once


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("metric", METRICS)
def test_neighbours(metric, dtype, monkeypatch):
    codebook = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    codebook[7], codebook[30] = codebook[21], codebook[21]
    rows = codebook / codebook.norm(dim=-1, keepdim=True) if metric == "cosine" else codebook
    distance = (rows[:, None] - rows).square().sum(-1).tolist()
    expected = [sorted((d, j) for j, d in enumerate(row) if j != i) for i, row in enumerate(distance)]
    for at_once, k in ((2**22, 5), (100, 5), (41, 39), (1, 100)):
        monkeypatch.setattr(rules, "MAX_COMPARED", at_once)
        assert neighbours(codebook, k, metric).tolist() == [[j for _, j in row[:k]] for row in expected]
    assert neighbours(codebook, 2, metric)[[7, 21, 30]].tolist() == [[21, 30], [7, 30], [7, 21]]


@pytest.mark.parametrize("k", [1, 5, 6, 7, 26])
def test_where_many_are_equally_far_the_lower_index_comes_first(k):
    """On a grid, where more codes tie for the last places than there are places."""
    grid = torch.cartesian_prod(*[torch.arange(3.0)] * 3)
    squares = (grid[:, None] - grid).square().sum(-1).int().tolist()
    expected = [sorted((d, j) for j, d in enumerate(row) if j != i)[:k] for i, row in enumerate(squares)]
    assert neighbours(grid, k).tolist() == [[j for _, j in row] for row in expected]


def test_raw_neighbours_are_those_of_the_codebook_as_it_is_stored():
    """The released code of LANTERN takes them; a request can ask for others."""
    tokenizer = copy.deepcopy(toy_models(codes=11)["tokenizer"])
    stored = tokenizer.quantize.embedding.weight
    stored *= torch.arange(1.0, 12).unsqueeze(1)  # as long as they are not in training
    raw, near = (near_codes(tokenizer, metric, 3) for metric in ("raw", "l2"))
    assert torch.equal(raw, neighbours(stored, 3)) and not torch.equal(raw, near)
    assert torch.equal(near, neighbours(tokenizer.codebook, 3))
    metrics = [rule_of(request_of("lantern", published=True, metric=metric)).metric for metric in (None, "cosine")]
    assert metrics == ["raw", "cosine"] and rule_of(request_of("lantern")).metric == "l2"
