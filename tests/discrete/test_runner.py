"""The VQ models' runner: rounds, caches, graphs, given tokens."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from conftest import relative_error
from graphs import replayed, rerun
from torch import Tensor
from toys import (
    CLASSES,
    LENGTH,
    counts,
    distribution,
    draw,
    p_value,
    request_of,
    sequences,
    staggered,
    toy_gpt,
    toy_mar,
)
from toys import toy_models as toys

from cspd import Engine, MARModels, Request, VQModels, noise
from cspd.discrete import gpt
from cspd.discrete.batch import LEAST_BUCKET, bucket
from cspd.discrete.distributions import sample
from cspd.discrete.gpt import Eagle
from cspd.discrete.kv_cache import MOST_NODES
from cspd.discrete.runner import VQRunner
from cspd.graphs import Graphs
from cspd.method import find, method_names
from cspd.noise import Purpose
from cspd.request import Output

OF_VQ = method_names(["VQ"])
IN_ORDER = [name for name in OF_VQ if name != "zipar"]  # of tokens
SMALL = {
    "sjd": {"window": 6},
    "mc-sjd": {"window": 6},
    "gsd": {"window": 6},
    "sjd-pac": {"window": 7, "pd_k": 3, "pd_d": 2},
    "speculative": {"window": 6, "draft": "jacobi"},
}
COMPOSED = [
    Request(1, method="sd", rule="cool-sd", delta=1.3, gamma=3),
    Request(1, method="sd", rule="cool-sd", delta=1.3, gamma=3, schedule="linear"),
    Request(1, method="eagle", rule="uniform-rsd", delta=1.5, optimal=False),
    Request(1, method="eagle2", rule="lantern++", lam=0.5, k=3, metric="cosine"),
    Request(1, method="sjd-pac", rule="cool-sd", delta=1.1, **SMALL["sjd-pac"]),
    Request(1, method="sjd", rule="lantern", delta=0.2, window=5, continuation=True),
    Request(1, method="eagle2", rule="gsd", group=3),
    Request(1, method="gsd", group=4, window=5, continuation=True, optimal=True),
    Request(1, method="lantern", k=2, published=True),
    Request(1, method="lantern++", k=2, published=True),
]
MAR = {
    "ar": {},
    "speculative": {"window": 4},
    "mar-draft": {"gamma": 8},
    "calibrated": {"head_calls": 4},
    "disa": {"upper": 6, "lower": 3},
    "ddim": {"head_calls": 4},
    "dpm-solver++": {"head_calls": 4},
    "lazymar": {"warmup": 1, "refresh": 3},
    "gtr": {"upper": 6, "lower": 3},
    "budget": {"budget": 0.3, "backbone": "full", "denoiser": "calibrated", "head_calls": 4},
}


def small(method: str, **changes: object) -> Request:
    return request_of(method, **SMALL.get(method, {}), **changes)


def given(tokens: Tensor, count: int) -> dict:
    """The settings of a request that is given the first tokens of an image."""
    return {"image": tokens, "mask": torch.arange(len(tokens)) >= count}


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


# Baseline sampling, and drafts that must change nothing


@pytest.fixture(scope="module")
def golden_models(small_gpt):
    """The golden GPT with a drafter of random weights."""
    torch.manual_seed(0)
    return VQModels(small_gpt, eagle=Eagle(small_gpt.config))


@pytest.mark.parametrize(
    "method", [name for name in IN_ORDER if find(name, "VQ").needs != "draft model" and "lantern" not in name]
)
def test_golden_greedy_sample(method, golden_models, gpt_golden):
    """At temperature 0 every rule commits the likeliest token, whatever was drafted."""
    engine = Engine(golden_models, max_batch=2, device="cpu")
    settings = {"method": method, "cfg": 2.0, "temperature": 0, **SMALL.get(method, {})}
    outputs = engine.generate([Request(label, **settings) for label in gpt_golden["labels"].tolist()])
    assert torch.equal(torch.stack([output.tokens for output in outputs]), gpt_golden["greedy_cfg2"])


@pytest.mark.parametrize(
    "settings",
    [{}, {"cfg": 1.0}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 0.5}, {"top_k": 3, "top_p": 0.7}],
    ids=str,
)
def test_baseline_sampling_is_the_published_one(settings):
    target = toy_gpt(0, codes=11, length=9)
    seeds = torch.arange(20)
    request = request_of("ar", **{"cfg": 2.0} | settings)
    tokens, _ = draw({"target": target}, request, len(seeds), batch=len(seeds))

    def by_our_draws(p: Tensor, position: int) -> Tensor:
        return sample(p, noise.fine_uniform(seeds, Purpose.CODE, torch.full_like(seeds, position)))

    labels = torch.full_like(seeds, request.label)
    named = {name: getattr(request, name) for name in ("cfg", "temperature", "top_k", "top_p")}
    assert torch.equal(tokens, gpt.sample_published(target, labels, draw=by_our_draws, **named))


def test_a_draft_that_is_the_target_changes_no_token():
    models = toys(codes=11, length=9)
    plain, _ = draw(models, request_of("ar"), 30, batch=30)
    drafted, statistics = draw(models | {"draft": models["target"]}, request_of("sd", gamma=3), 30, batch=30)
    assert torch.equal(plain, drafted)
    assert all(s.alpha == 1 and s.backbone_calls == 3 for s in statistics)  # 4 + 4 + 1 tokens


# Caches, and sequences in one batch


def teacher_forced(models: dict, label: int, tokens: Tensor) -> dict[str, Tensor]:
    """Features of target, draft and drafter at every position of a class and its tokens [L], and of the null class."""
    inputs = torch.tensor([label, CLASSES]), tokens[:-1].expand(2, -1)
    position = torch.arange(len(tokens)).unsqueeze(0)
    target, draft = (models[name].features(models[name].embed(*inputs), position) for name in ("target", "draft"))
    past = torch.cat([torch.zeros_like(target[:, :1]), target[:, :-1]], 1)
    eagle = models["eagle"](past, models["target"].embed(*inputs), models["target"].table(position))
    return {"target": target, "draft": draft, "eagle": eagle}


@pytest.mark.parametrize("method", IN_ORDER)
def test_cached_features_are_those_of_a_forward_pass_from_scratch(method, monkeypatch):
    """At the root of every round, after tokens were accepted along any path, with different progress in each slot."""
    models = toys(codes=9, length=16)
    calls = []
    features = VQRunner.features

    def recorded(runner, batch, tokens, start=0, model="target", **options):
        result = features(runner, batch, tokens, start, model, **options)
        calls.append((model, batch, result))
        return result

    monkeypatch.setattr(VQRunner, "features", recorded)
    tokens, _ = draw(models, small(method), 12, batch=12)
    expected = [teacher_forced(models, 1, own) for own in tokens]
    num_checked = dict.fromkeys(("target", "draft", "eagle"), 0)
    seen = set()
    for model, batch, found in calls:
        kind = (model, tuple(batch.num_committed.tolist()), tuple(batch.slot.tolist()))
        if kind in seen:
            continue  # a tree's lower levels
        seen.add(kind)
        num_recent = {"target": 1, "draft": 2}.get(model, found.shape[2])  # inputs up to the root
        for row, (slot, committed) in enumerate(zip(batch.slot.tolist(), batch.num_committed.tolist())):
            at = min(committed, num_recent - 1)
            assert relative_error(found[:, row, at], expected[slot][model][:, committed]) < 1e-4
            num_checked[model] += 1
    drafter = {"-": set(), "draft model": {"draft"}, "EAGLE drafter": {"eagle"}}[find(method, "VQ").needs]
    assert {model for model, count in num_checked.items() if count > 12} == drafter | {"target"}


def mixed_requests() -> list[Request]:
    """Fifty requests of all methods of both families, some with given tokens, in random order."""
    vq = [Request(i % CLASSES, method=name, **SMALL.get(name, {})) for i, name in enumerate(OF_VQ)]
    vq += [Request(0, method=name, temperature=0, **SMALL.get(name, {})) for name in ("ar", "eagle2", "sjd-pac")]
    vq += [Request(2, method="eagle", cfg=1.0), Request(1, method="eagle", cfg=3.0, top_k=5)]
    vq += [Request(1, method="ar", top_p=0.8), *COMPOSED]
    vq += [Request(1, method=name, **given(torch.arange(16) % 9, 5)) for name in ("ar", "sd", "eagle")]
    mar = [Request(1, method=name, num_iter=6, num_sampling_steps=12, **own) for name, own in MAR.items()]
    mar.append(Request(1, method="speculative", num_iter=4, num_sampling_steps=12, window=0))
    both = [*(request.but(family="VQ") for request in vq), *(request.but(family="MAR") for request in mar)]
    requests = [request.but(seed=17 * i) for i, request in enumerate(both * 2)][:50]
    random.Random(0).shuffle(requests)
    return requests


def test_fifty_mixed_requests_each_as_if_alone():
    models = [MARModels(toy_mar(), toy_mar()), VQModels(**toys(codes=9, length=16))]
    requests = mixed_requests()
    assert {request.method for request in requests} == set(method_names(["MAR", "VQ"]))
    together = Engine(*models, max_batch=8, device="cpu").generate(requests)
    alone = Engine(*models, max_batch=1, device="cpu")
    for output, request in zip(together, requests):
        solo = alone.generate([request])[0]
        assert output.request == solo.request
        assert output.stats.guarantee == solo.stats.guarantee
        if output.request.family == "VQ":
            assert torch.equal(output.tokens, solo.tokens)
            assert torch.equal(output.token_cost.nan_to_num(-1), solo.token_cost.nan_to_num(-1))
            assert output.stats.committed == solo.stats.committed
        else:
            assert relative_error(output.tokens, solo.tokens) < 1e-3


@pytest.mark.parametrize("method", OF_VQ)
def test_neighbours_with_other_progress_do_not_matter(method):
    """Requests that join one after the other: their inputs look at different columns in one forward pass."""
    models = VQModels(**toys(codes=9, length=16))
    requests = [dataclasses.replace(small(method), seed=seed) for seed in range(4)]
    alone = Engine(models, max_batch=1, device="cpu")
    for output in staggered(Engine(models, max_batch=4, device="cpu"), requests):
        solo = alone.generate([output.request])[0]
        assert torch.equal(output.tokens, solo.tokens)
        assert output.stats.committed == solo.stats.committed


# Statistics, guarantees, images


@pytest.mark.parametrize("method", IN_ORDER)
def test_statistics(method):
    _, statistics = draw(toys(length=9), small(method), 20, batch=20)
    for s in statistics:
        assert sum(n * count for n, count in s.committed.items()) == 9
        assert sum(s.committed.values()) == s.backbone_calls == s.iterations
        verified, accepted = s.by_lag
        assert all(0 <= a <= v for a, v in zip(accepted, verified))
        assert 9 - s.backbone_calls <= sum(accepted) <= 9
        assert (s.draft_backbone_calls > 0) == (find(method, "VQ").needs != "-")
        is_exact = find(method, "VQ").guarantee == "exact"
        assert (s.bound > 0) != is_exact
        assert (s.audit is None) == is_exact


def test_guarantees():
    engine = Engine(VQModels(**toys(length=4)), max_batch=1, device="cpu")
    assert engine.resolve(Request(0)).method == "speculative"
    assert engine.resolve(Request(0, draft="eagle-static", rule="cool-sd", delta=1.1, gamma=3)).method == "sd"
    expected = ["exact"] + ["bounded"] * 8 + ["heuristic"] * 2
    requests = [Request(0, method="sd"), *COMPOSED]
    outputs = engine.generate([request.but(window=7 if request.window else None) for request in requests])
    assert [output.stats.guarantee for output in outputs] == expected


def test_images_are_decoded_and_resized():
    models = toys(length=16)
    engine = Engine(VQModels(**models), max_batch=2, device="cpu")
    image = engine.generate([Request(0, method="ar")])[0].image
    assert image.shape == (3, 8, 8)  # 4 x 4 tokens, stride 2
    assert 0 <= image.min() <= image.max() <= 1
    engine.runner.image_size = 6
    assert engine.generate([Request(0, method="ar")])[0].image.shape == (3, 6, 6)
    assert Engine(VQModels(models["target"]), max_batch=1, device="cpu").generate([Request(0)])[0].image is None


# Rounds as graphs, and counted late


def outputs(method: str, graphed: bool = False, late: bool = False, **settings: object) -> list[Output]:
    """Outputs of four requests with different settings that join one after the other, in three slots."""
    engine = Engine(VQModels(**toys(codes=9, length=16)), max_batch=3, device="cpu")
    assert engine.runner.graphs is engine.graphs
    if graphed:
        engine.runner.graphs = replayed()
    engine.runner.late = late
    requests = [small(method, cfg=1.5 + seed / 4, top_k=seed, **settings) for seed in range(4)]
    return staggered(engine, [request.but(seed=seed) for seed, request in enumerate(requests)])


def check_same(expected: list[Output], found: list[Output]) -> None:
    for ours, theirs in zip(found, expected):
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.token_cost, theirs.token_cost)
        for name in ("committed", "iterations", "draft_backbone_calls", "by_lag"):
            assert getattr(ours.stats, name) == getattr(theirs.stats, name)
        assert ours.stats.bound == pytest.approx(theirs.stats.bound, rel=1e-6)


@pytest.mark.parametrize(
    "method", ["eagle2", "sjd-pac", *map(slow, ("ar", "sd", "eagle", "lantern", "sjd", "mc-sjd", "gsd"))]
)
def test_graphs_and_late_counts_change_nothing(method):
    check_same(outputs(method), outputs(method, graphed=True, late=True))


@pytest.mark.parametrize("siblings", [{}, {"pd_k": 2, "pd_d": 16}])
def test_a_finished_sequence_has_room_for_a_window(siblings, monkeypatch):
    """If rounds are counted late, it takes part in one more."""
    monkeypatch.setitem(SMALL, "sjd", {"window": MOST_NODES - 1, **siblings})
    check_same(outputs("sjd"), outputs("sjd", late=True))


def test_graphs_serve_later_images_too():
    """The memory that they read outlives the images that they were captured for."""
    captured = []

    def capture(*functions: Callable) -> tuple:
        captured.append(functions)
        return rerun(*functions)

    engine = Engine(VQModels(**toys(codes=9, length=16)), max_batch=3, device="cpu")
    engine.runner.late = True
    engine.runner.graphs = Graphs(engine.device, enabled=True, capture=capture)
    engine.generate([small("sjd-pac")] * 3)
    num_captured = len(captured)
    engine.generate([small("sjd-pac")] * 3)
    assert 0 < num_captured == len(captured)


def test_buckets_are_few_and_never_too_small():
    for most in range(1100):
        assert most <= bucket(most) <= max(LEAST_BUCKET, most + LEAST_BUCKET - 1, 1.25 * most)
    assert len({bucket(most) for most in range(577)}) <= 9


# Given tokens: the others follow the target's distribution given these, by every draft


NUM = 600
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
    return toys()


@pytest.mark.parametrize(
    "method, count, num, changes",
    [
        ("ar", 2, NUM, {}),
        ("eagle", 1, NUM, {}),
        ("sjd-pac", 1, NUM, {}),
        *(slow(method, count, NUM, {}) for method in METHODS for count in (1, 3)),
        *(slow(method, 2, 20_000, changes) for method in METHODS for changes in ({"cfg": 1.0}, {"temperature": 0.7})),
    ],
    ids=str,
)
def test_the_rest_follows_the_distribution_given_the_prefix(method, count, num, changes, models):
    request = request_of(method, **METHODS[method], **changes)
    image = torch.cat([PREFIX[:count], torch.zeros(LENGTH - count, dtype=torch.int64)])
    tokens, statistics = draw(models, request.but(**given(image, count)), num, batch=num)
    assert (tokens[:, :count] == PREFIX[:count]).all()
    for s in statistics:
        assert sum(n * times for n, times in s.committed.items()) == LENGTH - count
    has_prefix = (sequences()[:, :count] == PREFIX[:count]).all(1)
    expected = distribution(models["target"], request) * has_prefix
    assert p_value(counts(tokens), expected / expected.sum()) > 1e-4


@pytest.fixture(scope="module")
def engine():
    return Engine(VQModels(**toys(codes=11, length=9)), max_batch=3, device="cpu")


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("method", METHODS)
def test_an_image_is_continued_as_it_was_generated(method, count, engine):
    """The first tokens of an image by baseline sampling, and its seed, give the same image."""
    coupled = {} if method == "ar" else {"coupling": "same-image", **METHODS[method]}
    whole = engine.generate([Request(1, seed, "ar", cfg=2.0) for seed in range(4)])
    again = []
    for seed, output in enumerate(whole):
        again.append(Request(1, seed, method, cfg=2.0, **coupled, **given(output.tokens, count)))
    for output, continued in zip(whole, engine.generate(again)):
        assert torch.equal(continued.tokens, output.tokens)
        assert continued.token_cost[:count].isnan().all()
        assert not continued.token_cost[count:].isnan().any()
        assert method != "ar" or continued.stats.backbone_calls == 9 - count


BAD = {
    "a hole": (torch.arange(9), [0, 0, 0, 1, 0, 1, 1, 1, 1]),
    "everything": (torch.arange(9), [0] * 9),
    "other codes": (torch.arange(9) + 8, [0] * 3 + [1] * 6),
    "too few": (torch.arange(4), [0, 0, 1, 1]),
}


@pytest.mark.parametrize("image, mask", BAD.values(), ids=BAD)
def test_tokens_that_cannot_be_given(image, mask, engine):
    with pytest.raises(ValueError, match=r"mask|codes|tokens"):
        engine.check(Request(0, image=image, mask=torch.tensor(mask)))


def test_nothing_given_is_an_ordinary_request(engine):
    plain = Request(0, 4, "ar", cfg=2.0)
    assert engine.check(plain.but(image=torch.arange(9), mask=1.0)) == engine.check(plain)


def test_a_given_image_needs_a_tokenizer(models):
    engine = Engine(VQModels(models["target"]), device="cpu")
    with pytest.raises(ValueError, match="tokenizer"):
        engine.check(Request(0, image=torch.zeros(3, 8, 8), mask=torch.arange(8).repeat(8, 1).T >= 4))
