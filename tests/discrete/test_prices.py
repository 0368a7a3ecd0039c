"""The price of a relaxed rule: that of a token, enumerated, and its estimate from the rounds of a run."""

from __future__ import annotations

import math

import pytest
import torch
from enumerated import RULES, commit, commit_chosen, near, pairs, pairs_with, seeing
from torch import Tensor
from toys import CODES, LENGTH, distribution, draw, request_of, toy_models

from cspd import Request
from cspd.discrete.gpt import GPT
from cspd.discrete.prices import NUM_DRAWN, Verification, audited, committed, divergence, num_draws
from cspd.discrete.rules import rule_of

RELAXED = [name for name in RULES if not name.startswith(("exact", "greedy"))]


def uniforms(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("name", RELAXED)
def test_the_distribution_of_a_committed_token(name):
    """Exact if nothing is drawn at random: one sampled candidate, or any that were chosen."""
    rule = seeing(RULES[name], near(5))
    P, Q = pairs()
    num = 4000 if rule.depends_on_x else 1
    C = committed(rule, P, Q, torch.zeros(len(P), 1).long(), uniforms(len(P), num, 1), 2)
    assert torch.allclose(C, commit(rule, P, Q, 1, 2).total, atol=1e-9 if num == 1 else 0.03)

    P, Q = pairs_with(3)
    candidates = Q.topk(3).indices
    C = committed(rule, P, None, candidates, uniforms(len(P), 1, 3), 2)
    assert torch.allclose(C, commit_chosen(rule, P, candidates, 2).total, atol=1e-9)


@pytest.mark.parametrize("name", RELAXED)
def test_the_divergence_with_siblings_is_hardly_too_large(name):
    """It is that of the mean of several distributions, of which each depends on the siblings that were rejected."""
    rule = seeing(RULES[name], near(5))
    P, Q = (t[:3] for t in pairs())
    repeats = 500
    candidates = torch.tensor([0, 1, 2]).expand(len(P), -1)
    u = uniforms(repeats, len(P), NUM_DRAWN, 3)
    C = committed(rule, P.expand(repeats, -1, -1), Q.expand(repeats, -1, -1), candidates, u, 2)
    exact = divergence(commit(rule, P, Q, 3, 2).total, P)
    found = divergence(C, P)
    noise = 4 * found.std(0) / repeats**0.5 + 1e-9
    assert (found.mean(0) > exact - noise).all()
    assert (found.mean(0) < 1.01 * exact + noise).all()


def test_what_the_target_never_samples_costs_infinitely_much():
    P = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    C = torch.tensor([[0.5, 0.4, 0.1], [0.25, 0.75, 0.0]])
    expected = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert divergence(C, P).tolist() == pytest.approx([math.inf, expected])


def enumerated(models: dict, request: Request) -> tuple[float, float]:
    """(the mean audit, KL of the tokens of an image from the target's), nats per token, of chains of one token."""
    rule = rule_of(request)
    target, drafted = (by_prefix(models[name], request) for name in ("target", "draft"))
    price = 0.0
    # the probability of each prefix: before a token that is drafted, and before one that is not
    begins, goes_on = torch.ones(1).double(), torch.zeros(1).double()
    wanted = torch.ones(1).double()
    for P, Q in zip(target, drafted):
        f = rule.accept(P, Q)
        accepted = Q * f
        C = accepted + (1 - accepted.sum(-1, keepdim=True)) * rule.resample(P, Q, f, torch.zeros(len(P)).long())
        price += (begins * divergence(C, P)).sum().item()
        after_rejection = begins.unsqueeze(1) * (C - accepted) + goes_on.unsqueeze(1) * P
        begins, goes_on = after_rejection.flatten(), (begins.unsqueeze(1) * accepted).flatten()
        wanted = (wanted.unsqueeze(1) * P).flatten()
    return price / LENGTH, divergence(begins + goes_on, wanted).item() / LENGTH


def by_prefix(model: GPT, request: Request) -> list[Tensor]:
    """The distributions of the next token after all prefixes of each length, float64 [V^n, V]."""
    whole = distribution(model, request)
    result = []
    for length in range(LENGTH):
        of_next = whole.view(CODES ** (length + 1), -1).sum(1).view(-1, CODES)
        result.append(of_next / of_next.sum(1, keepdim=True))
    return result


@pytest.mark.parametrize(
    "rule",
    [{"rule": "cool-sd", "delta": 1.8}, {"rule": "gsd", "group": 3, "optimal": False}],
    ids=lambda rule: rule["rule"],
)
def test_the_audit_of_a_run(rule):
    models = toy_models()
    request = request_of("sd", gamma=1, **rule)
    _, statistics = draw(models, request, 5_000, batch=5_000)
    expected, of_images = enumerated(models, request)
    audits = torch.tensor([s.audit for s in statistics])
    error = (audits.std() / len(audits) ** 0.5).item()
    assert error < 0.05 * expected
    assert audits.mean().item() == pytest.approx(expected, abs=4 * error)
    assert 0 < of_images < expected
    of_each = torch.tensor([s.audit_error for s in statistics]).square().mean().sqrt()
    assert of_each > 0.5 * audits.std()  # an image's own error: not too small, but its positions differ, too


@pytest.mark.parametrize("name", ["gsd", "cool-sd"])
def test_every_verified_code_counts(name):
    """A round's audit is, on average, the sum over the verified positions, whatever comes before and after them."""
    rule = RULES[name]
    P, Q = (t[3:9].unsqueeze(0) for t in pairs())
    tried = torch.tensor([[False, True, True, False, True, True]])
    depth = 1 + torch.arange(6).unsqueeze(0)
    verification = Verification(P, Q, torch.zeros(1, 6, 1).long(), depth, tried)
    u = torch.zeros(4, num_draws(rule, verification)).double()
    u[:, 0] = (torch.arange(4) + 0.5) / 4
    found = torch.cat([audited(rule, verification, own.unsqueeze(0)) for own in u])
    f = rule.accept(P, Q, depth)
    C = Q * f + (1 - (Q * f).sum(-1, keepdim=True)) * rule.resample(P, Q, f, torch.zeros_like(depth))
    assert found.mean().item() == pytest.approx(divergence(C, P)[tried].sum().item())
    assert (audited(rule, verification._replace(tried=~(tried | ~tried)), u[:1]) == 0).all()


DRAFTS = {
    "chain": ("sd", {"gamma": 2}),
    "static tree": ("eagle", {"gamma": 2}),
    "dynamic tree": ("eagle2", {"gamma": 2, "coupling": "maximal"}),
    "jacobi PD AC": ("sjd-pac", {"window": 4, "pd_k": 3, "pd_d": 1}),
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_every_draft_is_audited(kind):
    """More relaxed rules cost more; exact ones have no price, nor has temperature 0."""
    models = toy_models()
    method, settings = DRAFTS[kind]

    def audits(**rule: object) -> list[float | None]:
        _, statistics = draw(models, request_of(method, **settings, **rule), 300, batch=300)
        return [s.audit for s in statistics]

    means = []
    for delta in (1.0001, 1.3, 2.5):
        found = audits(rule="uniform-rsd", delta=delta)
        means.append(sum(found) / len(found))
    assert 0 <= means[0] < 1e-4 < means[1] < means[2]
    assert set(audits()) == {None}
    assert set(audits(rule="uniform-rsd", delta=1.5, temperature=0.0)) == {None}
