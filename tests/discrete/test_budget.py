"""A budget in nats per token chooses the parameter of a relaxed rule, by prices that are measured once."""

from __future__ import annotations

import pytest
import torch
from toys import toy_models

from cspd import Engine, Request, VQModels
from cspd.discrete.rules import DIALS, rule_of
from cspd.method import method_of

SETTINGS = {
    "uniform-rsd": {"gamma": 2},
    "cool-sd": {"gamma": 3},
    "lantern": {"gamma": 2, "k": 3},
    "lantern++": {"gamma": 2, "k": 3},
    "gsd": {"window": 4},
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(VQModels(**toy_models(codes=11, length=16)), max_batch=4, device="cpu")


@pytest.mark.parametrize("method", SETTINGS)
def test_a_larger_budget_relaxes_more(method, engine):
    name, values = DIALS[method]
    chosen = []
    for budget in (0.0, 0.01, 0.1, 1e3):
        request = engine.resolve(Request(1, method=method, budget=budget, cfg=2.0, **SETTINGS[method]))
        assert request.budget == budget
        rule = rule_of(request)
        chosen.append(0 if rule.name == "exact" else getattr(rule, name))
    assert chosen[0] == 0
    assert chosen == sorted(chosen)
    assert chosen[-1] == values[-1]
    assert len(set(chosen)) > 2


def test_an_audit_finds_what_was_predicted(engine):
    requests = [Request(i % 3, seed=100 + i, method="uniform-rsd", budget=0.05, gamma=2, cfg=2.0) for i in range(40)]
    outputs = engine.generate(requests)
    assert {output.stats.guarantee for output in outputs} == {"bounded"}
    request = outputs[0].request
    predicted = engine.runner.tuning.price(request)
    told = method_of(request).explain(request, engine.runner)
    assert f"delta={request.delta:g}" in told and f"{predicted.divergence:.3g}" in told
    audits = torch.tensor([output.stats.audit for output in outputs])
    error = audits.std().item() / len(audits) ** 0.5
    assert 0 < predicted.divergence <= 0.05
    assert abs(audits.mean().item() - predicted.divergence) < 4 * (error**2 + predicted.error**2) ** 0.5


def test_no_budget_is_the_exact_rule(engine):
    exact = engine.generate([Request(1, seed=3, method="gsd", rule="exact", window=4)])[0]
    output = engine.generate([Request(1, seed=3, method="gsd", budget=0.0, window=4)])[0]
    assert torch.equal(output.tokens, exact.tokens)
    assert output.stats.guarantee == "exact"
    assert "exact" in method_of(output.request).explain(output.request, engine.runner)
    assert method_of(exact.request).explain(exact.request, engine.runner) is None
    assert engine.resolve(Request(1, budget=0.0)).method == "uniform-rsd"


@pytest.mark.parametrize("method", [*SETTINGS, "sd"])
@pytest.mark.parametrize("budget", [0.0, 1e3])
def test_what_a_budget_chose_can_be_asked_for_again(budget, method, engine):
    settings = SETTINGS.get(method, {"rule": "lantern", "draft": "chain", "gamma": 2})
    request = Request(1, seed=3, method=method, budget=budget, cfg=2.0, **settings)
    first = engine.generate([request])[0]
    again = engine.generate([first.request])[0]
    assert torch.equal(first.tokens, again.tokens) and first.request == again.request


def test_a_budget_and_the_parameter_that_it_chooses(engine):
    with pytest.raises(ValueError, match=r"budget=0\.1 chooses delta: leave delta=3\.5 out"):
        engine.resolve(Request(1, method="uniform-rsd", budget=0.1, delta=3.5))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("cool-sd", {"budget": -1.0}),
        ("cool-sd", {"budget": 0.1, "temperature": 0.0}),
        ("eagle", {"budget": 0.1}),
    ],
)
def test_bad_budgets(method, settings, engine):
    with pytest.raises(ValueError, match="budget"):
        engine.check(Request(1, method=method, **settings))
