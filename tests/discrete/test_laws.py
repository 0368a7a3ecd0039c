"""The distribution of whole sequences, by every draft and rule: the target's own where the rule is exact, within the
reported bound where it is not; and what a wrong formula does to it."""

import pytest
import torch
from scipy import stats
from toys import CPU, admitted, counts, distribution, draw, p_value, request_of, runner_of, sequences, toy_models

from cspd.discrete import drafts, jacobi, rules, trees
from cspd.discrete.jacobi import cached_windows
from cspd.method import find
from cspd.noise import Purpose
from cspd.request import Stopwatch

NUM = 20_000
SAME, OTHER = 1e-4, 1e-8  # p-values: seeds are fixed, so the right distribution never fails, and a wrong one is far off
SMALL = {"window": 2}  # shorter than the sequence, so that codes are appended and judged
COMB = {"window": 4, "pd_k": 3, "pd_d": 1}  # a path of 2 and two siblings
MAXIMAL = {"coupling": "maximal"}  # `test_same_image.py` has the other
EXACT = {
    "ar": ("ar", {}),
    "chain": ("sd", {"gamma": 2}),
    "static tree": ("eagle", {"gamma": 2}),
    "dynamic tree": ("eagle2", {"gamma": 2} | MAXIMAL),
    "jacobi": ("sjd", SMALL | MAXIMAL),
    "jacobi AC": ("mc-sjd", SMALL),
    "jacobi PD": ("sjd", COMB | MAXIMAL),
    "jacobi PD AC": ("sjd-pac", COMB),
}


@pytest.fixture(scope="module")
def models():
    return toy_models()


def test(models, method, num=NUM, **changes):
    request = request_of(method, **changes)
    codes, statistics = draw(models, request, num)
    observed, expected = counts(codes), distribution(models["target"], request)
    return p_value(observed, expected), 0.5 * (observed / num - expected).abs().sum().item(), statistics


test.__test__ = False


@pytest.mark.parametrize("num", [NUM // 2, pytest.param(200_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", EXACT)
def test_exact(kind, num, models):
    method, changes = EXACT[kind]
    p, _, statistics = test(models, method, num, **changes)
    assert p > SAME
    assert all(s.bound < 1e-5 for s in statistics)


FILTERS = [{"top_k": 2}, {"top_p": 0.7}, {"temperature": 0.6, "cfg": 1.0}]


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("jacobi PD AC", FILTERS[1]),
        *[
            pytest.param(kind, changes, marks=pytest.mark.slow)
            for kind in ("chain", "static tree", "jacobi PD AC")
            for changes in FILTERS
        ],
    ],
    ids=str,
)
def test_exact_where_codes_are_filtered(kind, changes, models):
    method, options = EXACT[kind]
    assert test(models, method, **options, **changes)[0] > SAME


RELAXED = {
    "uniform-rsd": {"rule": "uniform-rsd", "delta": 1.5},
    "cool-sd": {"rule": "cool-sd", "delta": 1.5},
    "lantern": {"rule": "lantern", "delta": 0.4, "k": 2},
    "lantern, own G": {"rule": "lantern", "delta": 0.4, "k": 2, "optimal": False},
    "lantern++": {"rule": "lantern++", "lam": 1.0, "k": 2},
    "gsd": {"rule": "gsd", "group": 3},
    "gsd, own G": {"rule": "gsd", "group": 3, "gap": 1.0, "optimal": False},
}


@pytest.mark.parametrize(
    "kind, rule",
    [
        ("chain", "uniform-rsd"),
        ("dynamic tree", "lantern"),
        ("jacobi PD AC", "cool-sd"),
        ("jacobi", "gsd, own G"),
        *[
            pytest.param(kind, rule, marks=pytest.mark.slow)
            for kind in ("chain", "static tree", "dynamic tree", "jacobi", "jacobi PD AC")
            for rule in RELAXED
        ],
    ],
)
def test_a_relaxed_rule_is_within_its_bound(rule, kind, models):
    num, (method, changes) = 10_000, EXACT[kind]
    _, distance, statistics = test(models, method, num, **changes | RELAXED[rule])
    bounds = torch.tensor([s.bound for s in statistics]).clamp(max=1)
    noise = 0.5 * (2 / torch.pi / num) ** 0.5 * len(sequences()) ** 0.5
    assert distance <= bounds.mean() + 3 * bounds.std() / num**0.5 + noise
    assert bounds.mean() > 0.001


@pytest.mark.slow
def test_a_bound_that_is_too_small_shows(models, monkeypatch):
    monkeypatch.setattr(rules.Rule, "bound", lambda self, P, Q, f: 0.3 * rules.bound(P, Q, f))
    _, distance, statistics = test(models, "sd", gamma=3, rule="uniform-rsd", delta=4.0)
    assert distance > 1.2 * sum(s.bound for s in statistics) / len(statistics)


TAILS = {
    "sjd": {"window": 3, "continuation": True, "rule": "uniform-rsd", "delta": 1.5},
    "sjd-pac": {"window": 7, "pd_k": 3, "pd_d": 2, "rule": "lantern", "delta": 0.4, "k": 2},
}


@pytest.mark.parametrize("method", TAILS)
def test_a_window_follows_its_recorded_distributions_whatever_the_rule(method, models):
    """What the next round takes for Q is what the redrawn codes follow (SJD-PAC, appendix A.2): the tail of a window
    is judged by the exact rule.
    """
    num, path = NUM, 3
    runner, request = runner_of(models, num), request_of(method, **TAILS[method])
    running = admitted(runner, request, range(num))
    for _ in range(2):
        with torch.inference_mode():
            finished = set(find(method, "VQ").run_round(runner, running, Stopwatch(CPU)))
        running = [sequence for sequence in running if sequence not in finished]
        codes, Q = (kept[:, :-1] for kept in cached_windows(runner, path))  # the last place is always a new one
        # how often each code is drawn, and how likely the drawn codes are: standard normal for each place
        every_code = torch.eye(Q.shape[-1]).expand(*Q.shape, -1)
        of_codes = torch.cat([every_code, Q.unsqueeze(-1)], -1).double()  # [num, places, V, V + 1]
        drawn = of_codes[torch.arange(num).unsqueeze(1), torch.arange(path - 1), codes]
        mean, square = ((Q.unsqueeze(-1) * moment).sum(-2) for moment in (of_codes, of_codes.square()))
        scores = (drawn - mean).sum(0) / (square - mean.square()).sum(0).sqrt()
        assert scores.numel() * 2 * stats.norm.sf(scores.abs().max().item()) > SAME


def plant_no_residual(patch):
    patch.setattr(rules.Rule, "resample", lambda self, P, Q, f, x, near=None: P)


def plant_siblings_sorted_by_q(patch):
    for module in (drafts, jacobi):
        draw_siblings = module.draw_siblings

        def wrong(Q, u, draw_siblings=draw_siblings):
            drawn = draw_siblings(Q, u)
            return drawn.gather(-1, Q.gather(-1, drawn.clamp(min=0)).argsort(-1, descending=True))

        patch.setattr(module, "draw_siblings", wrong)


def plant_siblings_that_are_chosen(patch):
    patch.setattr(jacobi, "draw_siblings", lambda Q, u: Q.topk(u.shape[-1]).indices)


def plant_choice_judged_as_a_draw(patch):
    """EAGLE-2's chosen codes judged as if they had been drawn from the draft."""
    judge = trees.verify_siblings

    def wrong(rule, P, Q, *args):
        return judge(rule, P, torch.full_like(P, 1 / P.shape[-1]), *args)

    patch.setattr(trees, "verify_siblings", wrong)


def plant_uniform_draw_of_an_earlier_round(patch):
    uniform = jacobi.VQRunner.uniform

    def wrong(self, batch, purpose, ahead, index=0, fresh=True):
        stale = uniform(self, batch, purpose, ahead, 0, False)
        accepts = torch.as_tensor(purpose == Purpose.TOKEN_ACCEPT)
        return torch.where(accepts, stale, uniform(self, batch, purpose, ahead, index, fresh))

    patch.setattr(jacobi.VQRunner, "uniform", wrong)


def plant_rejected_codes_of_the_window_drawn_from_p(patch):
    """Coupled to the round before, but no longer following P."""
    redraw = jacobi._redraw_path

    def wrong(rule, window, P, on_path, *more):
        return redraw(rule, window, P, on_path._replace(residual=P[:, : window.tokens.shape[1]]), *more)

    patch.setattr(jacobi, "_redraw_path", wrong)


def plant_draft_and_residual_from_one_stream(patch):
    uniform = drafts.VQRunner.uniform

    def wrong(self, batch, purpose, ahead, index=0, fresh=True):
        drafted = uniform(self, batch, Purpose.CODE, ahead, index, False)
        same = torch.as_tensor(purpose == Purpose.CODE_RESIDUAL)
        return torch.where(same, drafted, uniform(self, batch, purpose, ahead, index, fresh))

    patch.setattr(drafts.VQRunner, "uniform", wrong)


@pytest.mark.slow  # that the tests above see bugs is shown once in a while
@pytest.mark.parametrize(
    "kind, plant",
    [
        ("chain", plant_no_residual),
        ("chain", plant_draft_and_residual_from_one_stream),
        ("static tree", plant_siblings_sorted_by_q),
        ("dynamic tree", plant_choice_judged_as_a_draw),
        ("jacobi", plant_no_residual),
        ("jacobi AC", plant_uniform_draw_of_an_earlier_round),
        ("jacobi AC", plant_rejected_codes_of_the_window_drawn_from_p),
        ("jacobi PD AC", plant_siblings_that_are_chosen),
    ],
)
def test_a_planted_bug_shows(kind, plant, models, monkeypatch):
    plant(monkeypatch)
    method, changes = EXACT[kind]
    assert test(models, method, **changes)[0] < OTHER
