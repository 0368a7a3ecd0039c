"""Same-image coupling: codes are those of `ar` with the same seed, whatever is drafted; and bugs that would be seen."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from toys import CLASSES, counts, distribution, draw, p_value, request_of, staggered, toy_models

import cspd
from cspd import Engine, Request, VQModels
from cspd.discrete import drafts, jacobi
from cspd.discrete.rules import nearby, probabilities, sample
from cspd.discrete.runner import VQRunner
from cspd.method import with_method

SAME, OTHER = 1e-4, 1e-8
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


@pytest.fixture(scope="module")
def small() -> dict:
    return toy_models()


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("chain", MIXED[4]),
        ("jacobi PD", MIXED[3]),
        *(pytest.param(kind, changes, marks=pytest.mark.slow) for kind in KINDS for changes in MIXED),
    ],
    ids=str,
)
def test_every_seed_has_the_codes_of_ar(kind, changes, models):
    plain, _ = draw(models, request_of("ar", **changes), 100)
    codes, statistics = draw(models, coupled(kind, **changes), 100)
    assert torch.equal(codes, plain)
    if changes.get("temperature") != 0:  # greedy drafts of random weights agree or not by chance
        assert sum(s.backbone_calls for s in statistics) < 0.9 * codes.numel()
    assert all(s.guarantee == "exact" and s.bound == 0 for s in statistics)


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_requests_in_one_batch(kind, models):
    """Eight that differ in class, seed, guidance and filters, and join one after the other."""
    requests = [dataclasses.replace(coupled(kind, **MIXED[i]), label=i % CLASSES, seed=i) for i in range(8)]
    outputs = staggered(Engine(VQModels(**models), max_batch=8, device="cpu"), requests)
    alone = Engine(VQModels(**models), max_batch=1, device="cpu")
    for output, request in zip(outputs, requests):
        plain = alone.generate(with_method(request, "ar"))
        assert torch.equal(output.tokens, plain[0].tokens)


def test_any_guess_gives_the_same_image(models, monkeypatch):
    """What is drafted decides how many forwards there are, and nothing else."""
    plain, _ = draw(models, request_of("ar"), 50)
    codes, few = draw(models, coupled("chain"), 50)
    monkeypatch.setattr(drafts, "nearby", lambda Q, u: 1 - Q)
    same_codes, more = draw(models, coupled("chain"), 50)
    assert torch.equal(plain, codes) and torch.equal(plain, same_codes)
    assert sum(s.backbone_calls for s in few) < sum(s.backbone_calls for s in more)


def p_of(models: dict, kind: str, num: int) -> float:
    request = coupled(kind)
    codes, _ = draw(models, request, num)
    return p_value(counts(codes.clamp(min=0)), distribution(models["target"], request))


@pytest.mark.parametrize(
    "kind", ["jacobi PD", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "jacobi PD")]
)
def test_the_distribution_is_the_targets(kind, small):
    assert p_of(small, kind, 10_000) > SAME


def plant_draw_of_another_position(patch):
    """The target draws a place's code by the number of the next."""
    drawn = VQRunner.drawn
    patch.setattr(VQRunner, "drawn", lambda runner, batch, ahead: drawn(runner, batch, ahead + (ahead > 0)))


def plant_one_draw_for_a_whole_round(patch):
    drawn = VQRunner.drawn
    patch.setattr(VQRunner, "drawn", lambda runner, batch, ahead: drawn(runner, batch, 0 * ahead))


def plant_a_child_that_matches_its_neighbour(patch):
    for module in (drafts, jacobi):
        follow = module.follow

        def wrong(shape, codes, drawn, room, follow=follow):
            return follow(shape, codes.roll(1, 1), drawn, room)

        patch.setattr(module, "follow", wrong)


PLANTS = [plant_draw_of_another_position, plant_one_draw_for_a_whole_round, plant_a_child_that_matches_its_neighbour]


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("kind", ["jacobi PD", pytest.param("dynamic tree", marks=pytest.mark.slow)])
def test_a_planted_bug_shows(kind, plant, models, small, monkeypatch):
    plain, _ = draw(models, request_of("ar"), 50)
    plant(monkeypatch)
    assert not torch.equal(draw(models, coupled(kind), 50)[0], plain)
    assert p_of(small, kind, 5_000) < OTHER


def test_what_is_near_a_draft():
    Q = torch.tensor([[0.2, 0.0, 0.5, 0.3], [0.0, 1.0, 0.0, 0.0]])
    u = torch.tensor([0.69, 0.01])
    likely = nearby(Q, u)
    assert torch.allclose(likely.sum(-1), torch.ones(2).double()) and (likely >= 0).all()
    assert likely[0].argsort(descending=True).tolist() == [2, 3, 0, 1] and (likely[0, 1], likely[1, 1]) == (0, 1)


@pytest.mark.parametrize("rule, settings", [("lantern", {"delta": 0.1}), ("cool-sd", {"delta": 1.1})])
@pytest.mark.parametrize("method", ["sd", "eagle2", "sjd", "sjd-pac"])
def test_a_relaxed_rule_has_no_such_coupling(method, rule, settings, models):
    engine = Engine(VQModels(**models), max_batch=1, device="cpu")
    relaxed = Request(0, method=method, rule=rule, **settings)
    assert engine.resolve(relaxed).coupling is None
    with pytest.raises(ValueError, match="coupling"):
        engine.resolve(relaxed.but(coupling="same-image"))


def difference(models: dict, request: Request, codes: torch.Tensor, plain: torch.Tensor) -> float:
    """How far from the request's draw the target's distribution function is between the first codes that differ."""
    at = int((codes != plain).nonzero()[0])
    target, labels = models["target"], torch.tensor([request.label, models["target"].config.num_classes])
    conditional, null = target(labels, plain[:-1].expand(2, -1))[:, at]
    P = probabilities(null + request.cfg * (conditional - null), torch.ones(1))
    low, high = sorted([int(codes[at]), int(plain[at])])
    u = cspd.noise.fine_uniform(torch.tensor(request.seed), 9, torch.tensor(at))
    assert sample(P, u).item() in (low, high)
    return (P.double().flatten().cumsum(0)[low:high] - u).abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("method", BUNDLED)
def test_bundled(method):
    """Every code of trained models, but where rounding decides: see docs/same_image.md for how often."""
    engine = cspd.load("digits32_vq", max_batch=8, device="cpu")
    requests = [Request(i, i, "ar", family="VQ", cfg=2.0) for i in range(8)]
    settings = BUNDLED[method] | {"coupling": "same-image"}
    plain = engine.generate(requests)
    made = engine.generate([request.but(method=method, **settings) for request in requests])
    pairs = list(zip(requests, made, plain))
    differ = [pair for pair in pairs if not torch.equal(pair[1].tokens, pair[2].tokens)]
    assert len(differ) <= 1
    assert all(difference(engine.runner.models, r, m.tokens, p.tokens) < 1e-4 for r, m, p in differ)
