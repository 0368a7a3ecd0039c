"""Same-image coupling: the tokens are those of `ar` with the same seed, whatever is drafted."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from toys import CLASSES, counts, distribution, draw, p_value, request_of, staggered, toy_models

import cspd
from cspd import Engine, Request, VQModels
from cspd.discrete import drafts
from cspd.discrete.distributions import nearby, probabilities, sample
from cspd.method import with_method
from cspd.noise import Purpose

KINDS = {
    "chain": ("sd", {"gamma": 3}),
    "static tree": ("eagle", {"gamma": 3}),
    "dynamic tree": ("eagle2", {"gamma": 3}),
    "jacobi": ("sjd", {"window": 5}),
    "jacobi PD": ("sjd-pac", {"window": 7, "pd_k": 3, "pd_d": 2}),
}
BUNDLED = {"sd": {}, "eagle": {}, "eagle2": {}, "sjd": {"window": 32}, "sjd-pac": {"window": 32}}
MIXED = [
    {"cfg": 1.0},
    {"cfg": 3.0, "temperature": 0.7},
    {"cfg": 2.0, "top_k": 3},
    {"cfg": 1.5, "top_p": 0.7},
    {"cfg": 4.0, "top_k": 5, "top_p": 0.9, "temperature": 1.3},
    {"cfg": 2.0, "temperature": 0.0},
    {"cfg": 1.0, "temperature": 0.0, "top_p": 0.8},
    {},
]


def coupled(kind: str, **changes: object) -> Request:
    method, settings = KINDS[kind]
    return request_of(method, coupling="same-image", **settings | changes)


@pytest.fixture(scope="module")
def models() -> dict:
    return toy_models(codes=11, length=16)


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("chain", MIXED[4]),
        ("jacobi PD", MIXED[3]),
        *(slow(kind, changes) for kind in KINDS for changes in MIXED),
    ],
    ids=str,
)
def test_every_seed_has_the_tokens_of_ar(kind, changes, models):
    plain, _ = draw(models, request_of("ar", **changes), 100, batch=100)
    tokens, statistics = draw(models, coupled(kind, **changes), 100, batch=100)
    assert torch.equal(tokens, plain)
    assert all(s.guarantee == "exact" and s.bound == 0 for s in statistics)
    if changes.get("temperature") != 0:  # greedy drafts of random weights agree or not by chance
        assert sum(s.backbone_calls for s in statistics) < 0.9 * tokens.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_requests_in_one_batch(kind, models):
    """Eight requests that differ in class, seed, guidance and filters, and join one after the other."""
    requests = []
    for i, changes in enumerate(MIXED):
        requests.append(dataclasses.replace(coupled(kind, **changes), label=i % CLASSES, seed=i))
    outputs = staggered(Engine(VQModels(**models), max_batch=8, device="cpu"), requests)
    alone = Engine(VQModels(**models), max_batch=1, device="cpu")
    for output, request in zip(outputs, requests):
        plain = alone.generate([with_method(request, "ar")])[0]
        assert torch.equal(output.tokens, plain.tokens)


def test_any_guess_gives_the_same_image(models, monkeypatch):
    """Drafts decide how many forward passes an image takes, and nothing else."""
    plain, _ = draw(models, request_of("ar"), 50, batch=50)
    tokens, few = draw(models, coupled("chain"), 50, batch=50)
    monkeypatch.setattr(drafts, "nearby", lambda Q, u: 1 - Q)
    same_tokens, more = draw(models, coupled("chain"), 50, batch=50)
    assert torch.equal(plain, tokens)
    assert torch.equal(plain, same_tokens)
    assert sum(s.backbone_calls for s in few) < sum(s.backbone_calls for s in more)


@pytest.mark.parametrize("kind", ["jacobi PD", *(slow(kind) for kind in KINDS if kind != "jacobi PD")])
def test_the_distribution_is_the_targets(kind):
    small = toy_models()
    request = coupled(kind)
    tokens, _ = draw(small, request, 10_000, batch=10_000)
    assert p_value(counts(tokens), distribution(small["target"], request)) > 1e-4


def test_tokens_near_a_draft():
    Q = torch.tensor([[0.2, 0.0, 0.5, 0.3], [0.0, 1.0, 0.0, 0.0]])
    likely = nearby(Q, torch.tensor([0.69, 0.01]))
    assert torch.allclose(likely.sum(-1), torch.ones(2).double())
    assert likely[0].argsort(descending=True).tolist() == [2, 3, 0, 1]
    assert likely[0, 1] == 0
    assert likely[1].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("method, rule, delta", [("sd", "cool-sd", 1.1), ("sjd", "lantern", 0.1)])
def test_relaxed_rules_cannot_be_coupled(method, rule, delta, models):
    engine = Engine(VQModels(**models), max_batch=1, device="cpu")
    relaxed = Request(0, method=method, rule=rule, delta=delta)
    assert engine.resolve(relaxed).coupling is None
    with pytest.raises(ValueError, match="coupling"):
        engine.resolve(relaxed.but(coupling="same-image"))


def difference(models: dict, request: Request, tokens: torch.Tensor, plain: torch.Tensor) -> float:
    """At the first tokens that differ, the distance of the request's draw from the edge between them."""
    at = int((tokens != plain).nonzero()[0])
    target = models["target"]
    labels = torch.tensor([request.label, target.config.num_classes])
    conditional, null = target(labels, plain[:-1].expand(2, -1))[:, at]
    P = probabilities(null + request.cfg * (conditional - null), torch.ones(1))
    u = cspd.noise.fine_uniform(torch.tensor(request.seed), Purpose.CODE, torch.tensor(at))
    low, high = sorted([int(tokens[at]), int(plain[at])])
    assert sample(P, u).item() in (low, high)
    edges = P.double().flatten().cumsum(0)[low:high]
    return (edges - u).abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("method", BUNDLED)
def test_bundled(method):
    """Trained models: every token, unless rounding decides; docs/methods.md says how often it does."""
    engine = cspd.load("digits32_vq", max_batch=8, device="cpu")
    requests = [Request(i, i, "ar", family="VQ", cfg=2.0) for i in range(8)]
    plain = engine.generate(requests)
    coupled = engine.generate([r.but(method=method, coupling="same-image", **BUNDLED[method]) for r in requests])
    num_different = 0
    for request, ours, theirs in zip(requests, coupled, plain):
        if not torch.equal(ours.tokens, theirs.tokens):
            num_different += 1
            assert difference(engine.runner.models, request, ours.tokens, theirs.tokens) < 1e-4
    assert num_different <= 1
