"""Rules for drafted tokens, the probabilities they compare, and which tokens are near each other."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
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
    seeing,
    tv,
)
from scipy import stats
from torch import Tensor
from toys import request_of, toy_models

from cspd.discrete import distributions, rules
from cspd.discrete.distributions import draw_siblings, likeliest, point, sample, without
from cspd.discrete.rules import (
    GSD,
    CoolSD,
    Exact,
    Greedy,
    Lantern,
    LanternPlus,
    absorbed,
    bound,
    near_codes,
    neighbours,
    residual,
    rule_of,
)
from cspd.discrete.trees import verify_siblings

# One position, one candidate


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_one_token(name, depth):
    """The bound is the distance itself. It is 0 for exact rules, and for G* if omega < 1."""
    rule = RULES[name]
    P, Q = pairs()
    committed = commit(rule, P, Q, 1, depth)
    distance = tv(committed.total, rule.target(P))
    assert torch.allclose(distance, committed.bound, atol=1e-10)
    if name in EXACT or (name.startswith("cool-sd") and rule.optimal and depth == 3):
        assert distance.max() < 1e-10
        assert (committed.total[P == 0] < 1e-10).all()
    else:
        assert distance.max() > 0.05


@pytest.mark.parametrize("omega", [0.3, 1.0, 2.0])
def test_no_resampling_beats_the_optimal_one(omega):
    P, Q = pairs()
    f = CoolSD(omega).accept(P, Q)

    def distance(G: Tensor) -> Tensor:
        rejected = 1 - (Q * f).sum(-1, keepdim=True)
        return tv(Q * f + rejected * G, P)

    own = residual(P, Q, 1.0)
    optimal = distance(residual(P, Q, f))
    shortcut = distance(own)
    assert torch.allclose(optimal, bound(P, Q, f), atol=1e-12)
    assert torch.allclose(shortcut, bound(P, Q, f, own), atol=1e-12)
    for seed in range(20):
        assert (optimal <= distance(random(*P.shape, seed=seed).softmax(-1)) + 1e-12).all()
    if omega < 1:
        assert optimal.max() < 1e-12
        assert shortcut.max() > 0.1
    else:
        assert torch.allclose(optimal, shortcut, atol=1e-12)


# Siblings, and whole sequences


@pytest.mark.parametrize("V, K", [(4, 1), (4, 3), (5, 2), (5, 3)])
def test_siblings_are_exact(V, K):
    P, Q = pairs_with(K, V)
    chosen = torch.tensor(list(itertools.permutations(range(V), K))).unsqueeze(1).expand(-1, len(P), -1)
    for name in ("exact", "cool-sd", "cool-sd, linear"):
        of_drawn = commit(RULES[name], P, Q, K, 3)
        of_chosen = commit_chosen(RULES[name], P.expand(len(chosen), -1, -1), chosen, 3)
        for committed in (of_drawn, of_chosen):
            assert tv(committed.total, P).max() < 1e-10
            assert committed.bound.max() < 1e-10


@pytest.mark.parametrize("name", [name for name in RULES if name not in EXACT])
def test_siblings_by_a_relaxed_rule_stay_within_the_bound(name):
    rule = RULES[name]
    P, Q = (t[:3] for t in pairs())
    for committed in (commit(rule, P, Q, 3), commit_chosen(rule, P, Q.topk(3).indices)):
        assert (tv(committed.total, rule.target(P)) <= committed.bound + 1e-10).all()
        assert committed.bound.max() > 1e-3


TREES = {"chain": (4, 3, 1, False), "tree": (3, 2, 2, False), "chosen": (3, 2, 2, True)}


@pytest.mark.parametrize(
    "name, tree",
    [
        pytest.param(name, tree, marks=pytest.mark.slow if tree == "chain" and name not in EXACT else ())
        for name in RULES
        for tree in TREES
    ],
)
def test_whole_sequences(name, tree):
    """Rounds of gamma drafted levels of K siblings and one more token: TV from the target is below the mean bound."""
    rule = RULES[name]
    V = 4
    length, gamma, K, is_chosen = TREES[tree]
    logits = [1.5 * random(V**n, V, seed=n) for n in range(length)]
    target = [logit.softmax(-1) for logit in logits]
    draft = [(logit + random(*logit.shape, seed=20)).softmax(-1) for logit in logits]
    target[-1][::3, 1] = 0
    target[-1] /= target[-1].sum(-1, keepdim=True)

    def then(now: Tensor, rest: Tensor) -> Tensor:
        """The distribution of a token and what follows it."""
        return (now.unsqueeze(-1) * rest.view(*now.shape, -1)).flatten(1)

    # From the last token to the first: for each prefix [V^n], the distribution of what follows [V^(length - n)], and
    # the mean bound, by the depth of the next token in its round; depth 0 begins a round.
    wanted = torch.ones(V**length, 1).double()
    following = [wanted] * (gamma + 1)
    bounds = [torch.zeros(V**length).double()] * (gamma + 1)
    for P, Q in zip(target[::-1], draft[::-1]):
        new_following = []
        new_bounds = []
        for depth in range(1, gamma + 1):
            if is_chosen:
                taken, resampled, mean = commit_chosen(rule, P, Q.topk(K).indices, depth)
            else:
                taken, resampled, mean = commit(rule, P, Q, K, depth)
            later = taken * bounds[depth].view(-1, V) + resampled * bounds[0].view(-1, V)
            new_following.append(then(taken, following[depth]) + then(resampled, following[0]))
            new_bounds.append(mean + later.sum(-1))
        goal = rule.target(P)  # the token after a path that was accepted whole
        following = [*new_following, then(goal, following[0])]
        bounds = [*new_bounds, (goal * bounds[0].view(-1, V)).sum(-1)]
        wanted = then(goal, wanted)

    distance = tv(following[0], wanted).item()
    assert following[0].sum().item() == pytest.approx(1, abs=1e-9)
    assert distance <= bounds[0].item() + 1e-9
    assert distance < 1e-9 if name in EXACT else distance > 0.01


# Parameters, temperature 0, batches and precision


def test_greedy_takes_the_argmax_whatever_omega_and_the_lowest_index_at_ties():
    P = torch.tensor([[0.2, 0.4, 0.4, 0.0], [0.0, 0.3, 0.3, 0.4]]).double()
    for rule in (Greedy(Exact()), Greedy(CoolSD(0.1, length=2))):
        for tokens, expected in (([1, 3], [0, 0]), ([2, 1], [-1, -1])):
            candidates = torch.tensor(tokens).unsqueeze(1)
            verdicts = verify_siblings(rule, P, P.flip(-1), candidates, torch.full((2, 1), 0.999), 2)
            assert verdicts.index.tolist() == expected
            assert verdicts.residual.tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]
            assert (bound_of(verdicts) == 0).all()

    # token 1 takes over nothing; token 0, of probability 0, takes over the argmax
    lantern = Greedy(Lantern(1.0, k=1, near=torch.tensor([[3], [0], [0], [2]])))
    verdicts = verify_siblings(lantern, P[1:], None, torch.tensor([[1, 0]]), torch.zeros(1, 2))
    assert verdicts.index == 1
    assert bound_of(verdicts) == 1


@pytest.mark.parametrize("length", [1, 5, 7])
def test_schedules(length):
    depths = range(1, length + 1)
    weights = {"exponential": [math.exp(-0.4 * i) for i in depths], "linear": [8 - i for i in depths]}
    for schedule, own in weights.items():
        rule = CoolSD(2.0, schedule, nu=0.4, length=length)
        expected = [2.0 * length * weight / sum(own) for weight in own]
        assert [rule.omega(i) for i in depths] == pytest.approx(expected)
        omega = rule.omega(torch.tensor([1, length, 64]))  # constant beyond the schedule's length
        assert omega.flatten().tolist() == pytest.approx([expected[0], expected[-1], expected[-1]])


def test_a_linear_schedule_ends_before_its_omega_is_zero():
    with pytest.raises(ValueError, match="length"):
        CoolSD(1.1, schedule="linear", length=8)


def test_guarantees_and_missing_neighbours():
    for name, rule in RULES.items():
        assert rule.guarantee == ("exact" if name in ("exact", "greedy") else "bounded")
    P, Q = pairs()
    for table in (None, near(5)[:, :1]):
        with pytest.raises(ValueError, match="near"):
            Lantern(0.3, k=2, near=table).accept(P, Q)
    Lantern(k=100, near=near(5)).accept(P, Q)  # a codebook of 5 has only 4 others


@pytest.mark.parametrize("name", ALL)
def test_batched_is_row_by_row(name):
    """Over any leading dimensions, with different depths, and missing candidates."""
    rule = seeing(ALL[name], near(5))
    g = torch.Generator().manual_seed(0)
    P, Q = (t[:12].view(3, 4, 5) for t in pairs())
    candidates = torch.rand(3, 4, 5, generator=g).argsort(-1)[..., :3]
    candidates[0, :, 1:] = -1
    candidates[1, 2] = -1
    uniforms = torch.rand(3, 4, 3, generator=g)
    depth = torch.arange(1, 13).view(3, 4)
    for q in (Q, None):
        verdicts = verify_siblings(rule, P, q, candidates, uniforms, depth)
        bounds = bound_of(verdicts)
        for at in itertools.product(range(3), range(4)):
            present = candidates[at] >= 0
            if not present.any():
                assert verdicts.index[at] == -1
                assert bounds[at] == 0
                assert torch.allclose(verdicts.residual[at], rule.target(P[at]))
                continue
            q_at = None if q is None else q[at].unsqueeze(0)
            x, u = candidates[at][present].unsqueeze(0), uniforms[at][present].unsqueeze(0)
            alone = verify_siblings(rule, P[at].unsqueeze(0), q_at, x, u, int(depth[at]))
            assert verdicts.index[at] == alone.index
            assert torch.allclose(bounds[at], bound_of(alone), atol=1e-7)
            assert alone.index >= 0 or torch.allclose(verdicts.residual[at], alone.residual, atol=1e-6)


def test_a_token_that_neither_draft_nor_target_samples_is_rejected():
    P = torch.tensor([[0.0, 1.0, 0.0]])
    Q = torch.tensor([[0.0, 0.5, 0.5]])
    assert verify_siblings(Exact(), P, Q, torch.tensor([[0]]), torch.zeros(1, 1)).index == -1


# Rules that accept a token for its neighbours or its group, compared with plain loops


def coarse() -> Tensor:
    """Distributions in multiples of 1/64, whose sums are exact: with zeros and ties, so that limits are reached."""
    counts = torch.tensor([[5, 0, 8, 8, 3, 0, 0, 16, 8, 4, 8, 4], [0, 32, 0, 32] + [0] * 8, [5] * 8 + [6] * 4])
    return (counts / counts.sum(-1, keepdim=True)).double()


def for_each_token(P: Tensor) -> Tensor:
    """[N, V, V], each distribution repeated for each token."""
    return P.unsqueeze(1).expand(-1, P.shape[-1], -1)


def slow_merge(p: list[float], x: int, order: list[int], limit: float) -> list[float]:
    """P_A of one token, in plain Python."""
    merged = list(p)
    mass = 0.0
    for y in order:
        if mass + p[y] >= limit:
            break
        mass += p[y]
        merged[y] = 0.0
    merged[x] += mass
    return merged


@pytest.mark.parametrize("k", [1, 3, 11, 50])
@pytest.mark.parametrize("name, value", [("lantern", 1 / 64), ("lantern", 0.25), ("lantern++", 1.0)])
def test_pooling_is_the_plain_loop(name, value, k, monkeypatch):
    P = coarse()
    Q = random(*P.shape).softmax(-1)
    rule = (Lantern if name == "lantern" else LanternPlus)(value, k=k, near=near(12))
    columns = near(12)[:, :k]
    limit = torch.full_like(P, value) if name == "lantern" else value * P
    rows = []
    for p, limits in zip(P.tolist(), limit.tolist()):
        rows.append([slow_merge(p, x, order, limits[x]) for x, order in enumerate(columns.tolist())])
    expected = torch.tensor(rows).double()  # [3, V, V]
    mass = expected.diagonal(dim1=1, dim2=2)
    x = torch.arange(12).expand(3, -1)
    P_wide, Q_wide = for_each_token(P), for_each_token(Q)
    assert torch.equal(rule.merged(P_wide, x), expected)
    assert torch.equal(absorbed(P, columns, limit), mass - P)

    # f everywhere, and at one token
    f = rule.accept(P, Q)
    assert torch.allclose(f, (mass / Q).clamp(max=1))
    at_x = rule.accept_token(P_wide, Q_wide, x.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(at_x, f)

    # the paper's own G, of a sampled token and of a chosen one
    own_rule = replace(rule, optimal=False)
    own = own_rule.resample(P_wide, Q_wide, f, x)
    assert torch.allclose(own, residual(expected, Q_wide, 1.0))
    accepted, left, _ = outcomes(own_rule, P_wide, None, x.unsqueeze(-1))
    assert torch.allclose(accepted.squeeze(-1), mass, atol=1e-9)
    of_others = residual(expected, point(x, P_wide), 1.0)
    assert torch.allclose(left[mass < 1], of_others[mass < 1], atol=1e-9)

    # temperature 0
    greedy = Greedy(rule).accept_token(P_wide, Q_wide, x.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(greedy, (expected.argmax(-1) == x).double())
    monkeypatch.setattr(rules, "MAX_GATHERED", 7)
    assert torch.equal(rule.accept(P, Q), f)


def total_variation(a: list[float], b: list[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b)) / 2


def jensen_shannon(a: list[float], b: list[float]) -> float:
    """In nats."""
    divergence = 0.0
    for mine, other in ((a, b), (b, a)):
        for x, y in zip(mine, other):
            divergence += x * math.log(2 * x / (x + y)) / 2 if x > 0 else 0.0
    return divergence


DISTANCES = {"tvd": total_variation, "jsd": jensen_shannon}


def pooled(P: list[float], x: int, order: list[int], is_below: Callable[[list[float]], bool]) -> list[float]:
    """P_A of LANTERN's section 3.3: x takes over its nearest codes' mass, one more while the distance allows it."""
    found = P
    for y in order:
        wider = [*found]
        wider[x] += wider[y]
        wider[y] = 0.0
        if not is_below(wider):
            break
        found = wider
    return found


@pytest.mark.parametrize("name", DISTANCES)
@pytest.mark.parametrize("delta", [0.02, 0.2])
def test_lantern_commits_what_its_paper_says(name, delta):
    """Accept x with min(1, P_A(x) / Q(x)), otherwise sample from [P_A - Q]+; A as large as the distance allows."""
    P = (2 * random(20, 12)).softmax(-1)
    Q = random(20, 12, seed=1).softmax(-1)
    P[:5, :4] = 0
    P /= P.sum(-1, keepdim=True)
    distance = DISTANCES[name]
    expected = []
    for p, q in zip(P.tolist(), Q.tolist()):
        total = [0.0] * 12
        for x, order in enumerate(near(12).tolist()):
            P_A = pooled(p, x, order[:5], lambda wider, p=p: distance(wider, p) < delta)
            f = min(1.0, P_A[x] / q[x])
            left = [max(0.0, a - b) for a, b in zip(P_A, q)]
            for y, mass in enumerate(left):
                total[y] += q[x] * (1 - f) * mass / sum(left)
            total[x] += q[x] * f
        expected.append(total)
    committed = commit(Lantern(delta, k=5, bound=name, optimal=False), P, Q, 1).total
    assert torch.allclose(committed, torch.tensor(expected).double(), atol=1e-9)


@pytest.mark.parametrize("name", DISTANCES)
@pytest.mark.parametrize("delta", [0.005, 0.1, 0.4])
def test_pooling_stays_below_delta_by_the_distance_that_was_asked_for(name, delta):
    P = (random(1000, 24) * torch.linspace(0, 6, 1000).unsqueeze(1)).softmax(-1)
    x = random(1000, 24, seed=1).argmax(-1)
    rule = Lantern(delta, k=23, bound=name, near=near(24))
    merged = rule.merged(P, x)
    distances = [DISTANCES[name](a, p) for a, p in zip(merged.tolist(), P.tolist())]
    assert max(distances) < delta
    assert max(distances) > 0.9 * delta  # the limit is used
    by_other = [DISTANCES["tvd"](a, p) for a, p in zip(merged.tolist(), P.tolist())]
    assert name == "tvd" or max(by_other) > delta  # a divergence allows more mass than the same total variation


def slow_group(p: list[float], x: int, group: int, gap: float) -> list[int]:
    """The tokens of one token's group, in plain Python."""
    order = sorted(range(len(p)), key=lambda y: (p[y], y))
    index = order.index(x)
    around = order[max(0, index - group // 2) : index + (group - 1) // 2 + 1]
    return [y for y in around if abs(p[y] - p[x]) < gap]


@pytest.mark.parametrize("group", [1, 2, 3, 6, 7, 50])
@pytest.mark.parametrize("gap", [1 / 64, 0.125, 1.0])
def test_groups_are_the_plain_loop(group, gap):
    """f everywhere and at one token, and with the authors' G the distribution of the committed token."""
    P = coarse()
    Q = random(*P.shape).softmax(-1)
    rule = GSD(group, gap, optimal=False)
    expected = torch.zeros_like(P)
    for row, (p, q) in enumerate(zip(P.tolist(), Q.tolist())):
        for x in range(12):
            members = slow_group(p, x, group, gap)
            ratio = sum(p[y] for y in members) / sum(q[y] for y in members)
            expected[row, x] = min(1, ratio) if p[x] > 0 else 0
    assert torch.allclose(rule.accept(P, Q), expected, atol=1e-12)
    assert group > 1 or torch.allclose(expected, Exact().accept(P, Q), atol=1e-12)
    x = torch.arange(12).expand(3, -1).unsqueeze(-1)
    at_x = rule.accept_token(for_each_token(P.float()), for_each_token(Q.float()), x)
    assert torch.allclose(at_x.squeeze(-1), expected.float(), atol=1e-6)

    left = (P - Q).clamp(min=0)
    rejected = 1 - (Q * expected).sum(-1, keepdim=True)
    total = Q * expected + rejected * left / left.sum(-1, keepdim=True)
    committed = commit(rule, P, Q, 1)
    assert torch.allclose(committed.total, total, atol=1e-10)
    assert torch.allclose(tv(total, P), committed.bound, atol=1e-10)


def released(
    rule: Lantern | LanternPlus, P: list[float], Q: list[float] | None, candidates: list[int], order: list[list[int]]
) -> tuple[list[float], list[float]]:
    """LANTERN's released code in plain Python: the probability that each candidate is accepted, and the residual.

    Q: what the candidates were sampled from; None if they were chosen.
    """
    accepted = []
    left = 1.0
    for i, x in enumerate(candidates):
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
            q = [0.0 if y in candidates[:i] else mass for y, mass in enumerate(Q)]
            q = [mass / sum(q) for mass in q]
            f = min(1.0, (P[x] + pooled) / q[x])
            q = [0.0 if y in emptied else mass for y, mass in enumerate(q)]
            P = [max(0.0, a - b) for a, b in zip(P, q)]
        P = [mass / sum(P) for mass in P] if sum(P) > 0 else [1 / len(P)] * len(P)
        accepted.append(left * f)
        left *= 1 - f
    return accepted, P


@pytest.mark.parametrize("is_drawn", [True, False])
@pytest.mark.parametrize("name", [name for name in PUBLISHED if "greedy" not in name])
def test_published_lantern_does_what_its_code_does(name, is_drawn):
    rule = PUBLISHED[name]
    P = torch.cat([coarse(), (2 * random(9, 12)).softmax(-1)]).repeat(8, 1)
    Q = random(*P.shape, seed=1).softmax(-1)
    candidates = torch.rand(P.shape, generator=torch.Generator().manual_seed(2)).argsort(-1)[:, :3]
    accepted, left, mean = outcomes(rule, P, Q if is_drawn else None, candidates)
    assert rule.guarantee == "heuristic"
    assert (mean == 0).all()
    for i, p in enumerate(P.tolist()):
        q = Q[i].tolist() if is_drawn else None
        f, G = released(rule, p, q, candidates[i].tolist(), near(12).tolist())
        assert accepted[i].tolist() == pytest.approx(f, abs=1e-10)
        assert left[i].tolist() == pytest.approx(G, abs=1e-10)
    if is_drawn:  # farther from P than Theorem 2 says of the paper's
        theorem = bound(P, Q, seeing(rule, near(12)).accept(P, Q))
        assert (tv(commit(rule, P, Q, 1).total, P) - theorem).max() > 0.03


# Samples: one token, and siblings without replacement


def test_samples_follow_the_weights_and_never_have_probability_zero():
    weights = torch.tensor([0.0, 3, 0, 5, 7, 1, 0, 0])
    tokens = sample((weights / 16).expand(16, -1), (torch.arange(16) + 0.5) / 16)
    assert torch.equal(torch.bincount(tokens, minlength=8).float(), weights)
    assert (tokens.diff() >= 0).all()

    P = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).mul(8).softmax(-1)
    P = P.masked_fill(P < P.quantile(0.9, dim=-1, keepdim=True), 0)
    for u in (0.0, 2.0**-24, 0.5, 1 - 2.0**-24, 1 - 2.0**-53, 1.0):
        tokens = sample(P, torch.full((64,), u, dtype=torch.float64))
        assert (P.gather(-1, tokens.unsqueeze(-1)) > 0).all()
    last = (P > 0).int().cumsum(-1).argmax(-1)
    assert torch.equal(sample(P, torch.ones(64)), last)


def test_a_parallel_sum_that_rounds_upwards_gives_no_token_of_probability_zero(monkeypatch):
    exactly = torch.Tensor.cumsum
    monkeypatch.setattr(distributions, "_adds_in_parallel", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda t, dim: exactly(t, dim) + 1e-15 * torch.arange(t.shape[dim]))
    assert sample(torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]] * 2), torch.tensor([2.0**-24, 1.0])).tolist() == [1, 3]
    assert sample(torch.tensor([0.5, 0.0, 0.0, 0.5]), torch.tensor(0.5)) == 3


def test_siblings_drawn_without_replacement():
    """Counts over a grid of uniform draws are those of drawing one after the other; -1 if Q is used up."""
    Q = torch.tensor([0.5, 0.0, 0.25, 0.25]).double()
    grid = (torch.arange(12) + 0.5) / 12
    u = torch.cartesian_prod(grid, grid, grid[:1], grid[:1])
    drawn = draw_siblings(Q.expand(len(u), -1), u)
    assert (drawn[:, 3] == -1).all()
    assert (drawn[:, :3] >= 0).all()
    found, counts = drawn[:, :2].unique(dim=0, return_counts=True)
    assert found.tolist() == [[0, 2], [0, 3], [2, 0], [2, 3], [3, 0], [3, 2]]
    assert counts.tolist() == [36, 36, 24, 12, 24, 12]


def test_without_point_and_likeliest():
    Q = torch.tensor([[0.5, 0.1, 0.4], [0.0, 0.0, 1.0]]).double()
    left = without(Q, torch.tensor([0, 2]))
    assert torch.allclose(left, torch.tensor([[0.0, 0.2, 0.8], [0, 0, 0]]).double())
    assert point(torch.tensor([2, 0]), Q).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert likeliest(Q[0], 2).tolist() == [0, 2]
    assert likeliest(Q[0], 5).tolist() == [0, 2, 1, -1, -1]


# Near codes, compared with a plain sort


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("metric", ["l2", "cosine", "raw"])
def test_neighbours(metric, dtype, monkeypatch):
    codebook = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    codebook[7] = codebook[30] = codebook[21]
    rows = codebook / codebook.norm(dim=-1, keepdim=True) if metric == "cosine" else codebook
    distance = (rows[:, None] - rows).square().sum(-1).tolist()
    expected = []
    for i, row in enumerate(distance):
        expected.append([j for _, j in sorted((d, j) for j, d in enumerate(row) if j != i)])
    for at_once, k in ((2**22, 5), (100, 5), (41, 39), (1, 100)):
        monkeypatch.setattr(rules, "MAX_COMPARED", at_once)
        assert neighbours(codebook, k, metric).tolist() == [row[:k] for row in expected]


def test_random_neighbours_are_other_codes_and_the_same_ones_again(monkeypatch):
    codebook = random(300, 4)
    found = neighbours(codebook, 299, "random")
    for row, order in enumerate(found.tolist()):
        assert sorted([*order, row]) == list(range(300))
    monkeypatch.setattr(rules, "MAX_COMPARED", 1000)
    assert torch.equal(neighbours(2 * codebook + 1, 20, "random"), found[:, :20])
    ahead = torch.bincount(found[:, :30].flatten(), minlength=300)
    assert stats.chisquare(ahead.numpy()).pvalue > 1e-3  # no code is a near one of more codes than others are
    near_ones = neighbours(codebook, 30)
    shared = (found[:, :30].unsqueeze(-1) == near_ones.unsqueeze(1)).any(-1).double().mean()
    assert shared == pytest.approx(30 / 299, abs=0.01)


@pytest.mark.parametrize("k", [1, 6, 7, 26])
def test_the_lower_index_comes_first_among_equally_near_codes(k):
    """On a grid, where more codes are equally near than the table has columns left."""
    grid = torch.cartesian_prod(*[torch.arange(3.0)] * 3)
    squares = (grid[:, None] - grid).square().sum(-1).int()
    squares.fill_diagonal_(100)
    expected = squares.argsort(dim=-1, stable=True)[:, :k]
    assert torch.equal(neighbours(grid, k), expected)


def test_raw_neighbours_are_those_of_the_codebook_as_it_is_stored():
    """LANTERN's released code takes them by default; a request can name another metric."""
    tokenizer = copy.deepcopy(toy_models(codes=11)["tokenizer"])
    stored = tokenizer.quantize.embedding.weight
    stored *= torch.arange(1.0, 12).unsqueeze(1)  # unequal lengths, unlike in training
    raw, normalised = near_codes(tokenizer, "raw", 3), near_codes(tokenizer, "l2", 3)
    assert torch.equal(raw, neighbours(stored, 3))
    assert torch.equal(normalised, neighbours(tokenizer.codebook, 3))
    assert not torch.equal(raw, normalised)
    assert rule_of(request_of("lantern")).metric == "l2"
    assert rule_of(request_of("lantern", published=True)).metric == "raw"
    assert rule_of(request_of("lantern", published=True, metric="cosine")).metric == "cosine"
