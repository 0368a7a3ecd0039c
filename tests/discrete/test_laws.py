"""The distribution of whole sequences by every draft and rule: the target's own if the rule is exact, otherwise within
the reported bound of it."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from toys import CPU, admitted, counts, distribution, draw, p_value, request_of, runner_of, sequences, toy_models

from cspd.discrete.jacobi import cached_windows
from cspd.method import find
from cspd.request import RoundStats, Stopwatch

NUM = 20_000
SAME = 1e-4  # p-values are above it; seeds are fixed, so that the right distribution never fails
WINDOW = {"window": 2}  # shorter than the sequence, so that tokens are appended and verified
COMB = {"window": 4, "pd_k": 3, "pd_d": 1}  # a path of 2 and two siblings
MAXIMAL = {"coupling": "maximal"}  # `test_same_image.py` has the other
EXACT = {
    "ar": ("ar", {}),
    "chain": ("sd", {"gamma": 2}),
    "static tree": ("eagle", {"gamma": 2}),
    "dynamic tree": ("eagle2", {"gamma": 2} | MAXIMAL),
    "dynamic tree of one token": ("eagle2", {"gamma": 1, "window": 1} | MAXIMAL),
    "jacobi": ("sjd", WINDOW | MAXIMAL),
    "jacobi AC": ("mc-sjd", WINDOW),
    "jacobi PD": ("sjd", COMB | MAXIMAL),
    "jacobi PD AC": ("sjd-pac", COMB),
}
FILTERS = [{"top_k": 2}, {"top_p": 0.7}, {"temperature": 0.6, "cfg": 1.0}]
RELAXED = {
    "uniform-rsd": {"rule": "uniform-rsd", "delta": 1.5},
    "cool-sd": {"rule": "cool-sd", "delta": 1.5},
    "lantern": {"rule": "lantern", "delta": 0.4, "k": 2},
    "lantern, own G": {"rule": "lantern", "delta": 0.4, "k": 2, "optimal": False},
    "lantern++": {"rule": "lantern++", "lam": 1.0, "k": 2},
    "gsd": {"rule": "gsd", "group": 3},
    "gsd, own G": {"rule": "gsd", "group": 3, "gap": 1.0, "optimal": False},
}
TAILS = {
    "sjd": {"window": 3, "continuation": True, "rule": "uniform-rsd", "delta": 1.5},
    "sjd-pac": {"window": 7, "pd_k": 3, "pd_d": 2, "rule": "lantern", "delta": 0.4, "k": 2},
}


@pytest.fixture(scope="module")
def models() -> dict:
    return toy_models()


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


def sampled(
    models: dict, kind: str, num: int, device: torch.device = CPU, **changes: object
) -> tuple[float, float, list[RoundStats]]:
    """(the p-value of the target's distribution, the empirical TV from it, statistics) of `num` sequences."""
    method, settings = EXACT[kind]
    request = request_of(method, **settings, **changes)
    tokens, statistics = draw(models, request, num, batch=min(num, NUM), device=device)
    observed = counts(tokens)
    expected = distribution(models["target"], request)
    distance = 0.5 * (observed / num - expected).abs().sum().item()
    return p_value(observed, expected), distance, statistics


@pytest.mark.parametrize("num", [NUM // 4, slow(200_000)])
@pytest.mark.parametrize("kind", EXACT)
def test_exact(kind, num, models, device):
    p, _, statistics = sampled(models, kind, num, device)
    assert p > SAME
    assert all(s.bound < 1e-5 for s in statistics)


def test_a_rejected_draft_is_replaced_by_a_draw_of_its_own():
    """In the first round, too, where the number of the round tells no draws apart."""
    models = toy_models(length=1)
    request = request_of("sd", gamma=1)
    tokens, statistics = draw(models, request, NUM // 4)
    assert p_value(counts(tokens), distribution(models["target"], request)) > SAME
    assert sum(s.alpha for s in statistics) < NUM // 8  # most drafts are rejected


def test_the_p_value_counts_every_draw():
    """Also of sequences that are rare, even all together, and of impossible ones."""
    rare = torch.full((10,), 1e-5).double()
    probability = torch.cat([torch.full((9,), 1 / 9).double() * (1 - rare.sum()), rare, torch.zeros(1)])
    generator = torch.Generator().manual_seed(0)

    def drawn(weights: torch.Tensor) -> torch.Tensor:
        tokens = torch.multinomial(weights, NUM, replacement=True, generator=generator)
        return torch.bincount(tokens, minlength=20).double()

    p = [p_value(drawn(probability), probability) for _ in range(200)]
    assert stats.kstest(p, "uniform", alternative="greater").pvalue > SAME  # not too many small ones
    assert p_value(drawn(torch.where(probability < 1e-4, 12 * probability, probability)), probability) < SAME
    observed = drawn(probability)
    observed[-1] += 1
    assert p_value(observed, probability) == 0


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("jacobi PD AC", FILTERS[1]),
        *(slow(kind, changes) for kind in ("chain", "static tree", "jacobi PD AC") for changes in FILTERS),
    ],
    ids=str,
)
def test_exact_if_tokens_are_filtered(kind, changes, models):
    p, _, _ = sampled(models, kind, NUM // 2, **changes)
    assert p > SAME


@pytest.mark.parametrize(
    "kind, rule",
    [
        ("dynamic tree", "lantern"),
        ("jacobi PD AC", "cool-sd"),
        *(
            slow(kind, rule)
            for kind in ("chain", "static tree", "dynamic tree", "jacobi", "jacobi PD AC")
            for rule in RELAXED
        ),
    ],
)
def test_a_relaxed_rule_is_within_its_bound(kind, rule, models):
    num = 10_000
    _, distance, statistics = sampled(models, kind, num, **RELAXED[rule])
    bounds = torch.tensor([s.bound for s in statistics]).clamp(max=1)
    noise = 0.5 * (2 / torch.pi / num) ** 0.5 * len(sequences()) ** 0.5
    assert distance <= bounds.mean() + 3 * bounds.std() / num**0.5 + noise
    assert bounds.mean() > 0.001


@pytest.mark.parametrize("method", TAILS)
def test_a_window_follows_its_recorded_distributions_whatever_the_rule(method, models):
    """The redrawn tokens follow the distributions that the next round takes as Q (SJD-PAC, appendix A.2), since the
    tail of a window is verified by the exact rule."""
    path, num = 3, NUM // 2
    runner = runner_of(models, num)
    running = admitted(runner, request_of(method, **TAILS[method]), range(num))
    for _ in range(2):
        with torch.inference_mode():
            finished = set(find(method, "VQ").run_round(runner, running, Stopwatch(CPU)))
        running = [sequence for sequence in running if sequence not in finished]
        tokens, Q = (cached[:, :-1] for cached in cached_windows(runner, path))  # the last position is always new

        # how often each token is drawn, and how likely the drawn tokens are: standard normal at each position
        every_token = torch.eye(Q.shape[-1]).expand(*Q.shape, -1)
        values = torch.cat([every_token, Q.unsqueeze(-1)], -1).double()  # [num, positions, V, V + 1]
        drawn = values[torch.arange(num).unsqueeze(1), torch.arange(path - 1), tokens]
        mean = (Q.unsqueeze(-1) * values).sum(-2)
        square = (Q.unsqueeze(-1) * values.square()).sum(-2)
        variance = (square - mean.square()).sum(0)
        scores = (drawn - mean).sum(0) / variance.sqrt()
        assert scores.numel() * 2 * stats.norm.sf(scores.abs().max().item()) > SAME
