"""Codes that are known from the start: the others follow the target's distribution given them, by every draft."""

from __future__ import annotations

import pytest
import torch
from toys import LENGTH, counts, distribution, draw, p_value, request_of, sequences, toy_models

from cspd import Engine, Request, VQModels
from cspd.discrete import runner as discrete_runner

NUM = 600
SAME, OTHER = 1e-4, 1e-8  # p-values
COMB = {"window": 4, "pd_k": 3, "pd_d": 1}
METHODS = {
    "ar": {},
    "sd": {"gamma": 2},
    "eagle": {"gamma": 2},
    "eagle2": {"gamma": 2},
    "sjd": {"window": 2},
    "mc-sjd": {"window": 2},
    "sjd-pac": COMB,
}
PREFIX = torch.tensor([3, 1, 2])


@pytest.fixture(scope="module")
def models():
    return toy_models()


def given(codes, count, length=LENGTH):
    """What a request is given of an image: its first codes."""
    return {"image": codes, "mask": torch.arange(length) >= count}


def p_of(models, method, count, num=NUM, **changes):
    """Of a test that sequences that begin with `count` codes follow the target's distribution given these."""
    request = request_of(method, **METHODS[method], **changes)
    known = torch.cat([PREFIX[:count], torch.zeros(LENGTH - count, dtype=torch.int64)])
    codes, statistics = draw(models, request.but(**given(known, count)), num)
    assert (codes[:, :count] == PREFIX[:count]).all()
    assert all(sum(n * times for n, times in s.committed.items()) == LENGTH - count for s in statistics)
    begins = (sequences()[:, :count] == PREFIX[:count]).all(1)
    expected = distribution(models["target"], request) * begins
    return p_value(counts(codes), expected / expected.sum())


@pytest.mark.parametrize(
    "method, count",
    [
        ("ar", 2),
        ("eagle", 1),
        ("sjd-pac", 1),
        *[pytest.param(method, count, marks=pytest.mark.slow) for method in METHODS for count in (1, 3)],
    ],
)
def test_the_rest_follows_the_distribution_given_them(method, count, models):
    assert p_of(models, method, count) > SAME


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("changes", [{"cfg": 1.0}, {"temperature": 0.7}], ids=str)
def test_with_other_settings(method, changes, models):
    assert p_of(models, method, 2, num=20_000, **changes) > SAME


@pytest.mark.slow  # that the tests above see bugs is shown once in a while
def test_a_planted_bug_shows(models, monkeypatch):
    """Known codes that are taken in under another class."""
    prefill = discrete_runner._prefill

    def of_another_class(runner, sequences):
        last = runner.conditions.last["target"]
        own = last.clone()
        last.copy_(runner.target.cls_embedding.embedding_table.weight[:1])
        prefill(runner, sequences)
        last.copy_(own)

    monkeypatch.setattr(discrete_runner, "_prefill", of_another_class)
    assert p_of(models, "ar", 2, num=6 * NUM) < OTHER


@pytest.fixture(scope="module")
def engine():
    return Engine(VQModels(**toy_models(codes=11, length=9)), max_batch=3, device="cpu")


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("method", METHODS)
def test_an_image_is_continued_as_it_was_made(method, count, engine):
    """The first codes of an image that plain sampling made, and its seed, give the same image."""
    plain = [Request(1, seed, "ar", cfg=2.0) for seed in range(4)]
    coupled = {} if method == "ar" else {"coupling": "same-image", **METHODS[method]}
    whole = engine.generate(plain)
    again = [
        Request(1, request.seed, method, cfg=2.0, **coupled, **given(output.tokens, count, 9))
        for request, output in zip(plain, whole)
    ]
    for output, continued in zip(whole, engine.generate(again)):
        assert torch.equal(continued.tokens, output.tokens)
        assert continued.token_cost[:count].isnan().all() and not continued.token_cost[count:].isnan().any()
        assert method != "ar" or continued.stats.backbone_calls == 9 - count


def test_others_beside_it_go_on_as_they_would(engine):
    """Requests with known codes, and plain ones, of several methods in one engine; slots are used again."""
    codes = torch.arange(9)
    requests = []
    for seed in range(8):
        more = {} if seed % 2 else given(codes, 1 + seed, 9)
        requests.append(Request(seed % 3, seed, ("ar", "eagle", "sd")[seed % 3], cfg=2.0, **more))
    alone = engine.with_slots(1)
    for request, output in zip(requests, engine.generate(requests)):
        assert torch.equal(output.tokens, alone.generate([request])[0].tokens)


BAD = {
    "a hole": (torch.arange(9), [0, 1, 0, 0, 1, 1, 1, 1, 1]),
    "a hole below": (torch.arange(9), [0, 0, 0, 1, 0, 1, 1, 1, 1]),
    "everything": (torch.arange(9), [0] * 9),
    "other codes": (torch.arange(9) + 8, [0] * 3 + [1] * 6),
    "too few": (torch.arange(4), [0, 0, 1, 1]),
}


@pytest.mark.parametrize("codes, mask", BAD.values(), ids=BAD)
def test_what_cannot_be_kept(codes, mask, engine):
    with pytest.raises(ValueError, match=r"image|mask|codes|tokens"):
        engine.check(Request(0, image=codes, mask=torch.tensor(mask)))


def test_nothing_known_is_a_plain_request(engine):
    plain = Request(0, 4, "ar", cfg=2.0)
    request = plain.but(image=torch.arange(9), mask=1.0)
    assert engine.check(request) == engine.check(plain)


def test_a_picture_needs_a_tokenizer():
    models = toy_models()
    engine = Engine(VQModels(models["target"]), device="cpu")
    with pytest.raises(ValueError):
        engine.check(Request(0, image=torch.zeros(3, 8, 8), mask=torch.arange(8).repeat(8, 1).T >= 4))
