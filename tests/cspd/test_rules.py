"""Accept and resample: the distribution of what is committed, enumerated; bounds, siblings, schedules, parameters."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from enumerated import ALL, EXACT, RULES, bound_of, commit, commit_chosen, near, pairs, pairs_with, random, tv

from cspd.discrete import rules, trees
from cspd.discrete.rules import Rule, bound, exponential, linear, relaxed, residual
from cspd.discrete.trees import judge_siblings


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
        ({"name": "sd"}, "rule"),
        ({"name": "uniform-rsd"}, "delta"),
        ({"name": "uniform-rsd", "delta": 0.9}, "ell"),
        ({"name": "uniform-rsd", "delta": math.nan}, "delta"),
        ({"name": "cool-sd", "delta": 0.0, "length": 2}, "delta"),
        ({"name": "cool-sd", "delta": math.inf, "length": 2}, "delta"),
        ({"name": "cool-sd", "delta": 1.1}, "length"),
        ({"name": "cool-sd", "delta": 1.1, "length": 2, "nu": -0.7}, "nu"),
        ({"name": "cool-sd", "delta": 1.1, "length": 2, "schedule": "cosine"}, "schedule"),
        ({"name": "cool-sd", "delta": 1.1, "length": 8, "schedule": "linear"}, "length"),
        ({"name": "lantern", "delta": 1.5}, "ratio"),
        ({"name": "lantern", "delta": 0.1, "k": 0}, "k"),
        ({"name": "lantern++", "lam": 0}, "lam"),
        ({"name": "lantern++", "k": 2.5}, "length"),
        ({"name": "gsd"}, "group"),
        ({"name": "gsd", "group": 0}, "group"),
        ({"name": "gsd", "group": 3, "gap": 0}, "temperature"),
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
