"""The VQ models' runner: rounds, caches, graphs, given tokens."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from conftest import relative_error
from graphs import replayed, rerun
from toys import CLASSES, LENGTH, counts, distribution, draw, p_value, request_of, sequences, toy_gpt, toy_models

from cspd import Engine, MARModels, Request, VQModels, noise
from cspd.discrete import gpt
from cspd.discrete import runner as discrete_runner
from cspd.discrete.batch import LEAST_BUCKET, MOST_NODES, bucket
from cspd.discrete.gpt import Eagle
from cspd.discrete.rules import Filter, filter_numbers, probabilities, sample
from cspd.discrete.runner import VQRunner
from cspd.graphs import Graphs
from cspd.method import find, method_names
from cspd.noise import Purpose
from cspd.request import Output

OF_VQ = method_names(["VQ"])
WINDOWED = ("sjd", "mc-sjd", "gsd")
SMALL = {name: {"window": 6} for name in WINDOWED} | {
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


@pytest.fixture(scope="module")
def golden_models(small_gpt):
    """The golden GPT with a drafter of random weights."""
    torch.manual_seed(0)
    return VQModels(small_gpt, eagle=Eagle(small_gpt.config))


@pytest.mark.parametrize(
    "method", [name for name in OF_VQ if find(name, "VQ").needs != "draft model" and "lantern" not in name]
)
def test_golden_greedy_sample(method, golden_models, gpt_golden):
    """At temperature 0 every rule commits the likeliest code, whatever was drafted."""
    engine = Engine(golden_models, max_batch=2, device="cpu")
    requests = [
        Request(label, method=method, cfg=2.0, temperature=0, **SMALL.get(method, {}))
        for label in gpt_golden["labels"].tolist()
    ]
    codes = torch.stack([output.tokens for output in engine.generate(requests)])
    assert torch.equal(codes, gpt_golden["greedy_cfg2"])


@pytest.mark.parametrize(
    "settings", [{}, {"cfg": 1.0}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 0.5}, {"top_k": 3, "top_p": 0.7}]
)
def test_plain_sampling_is_the_published_one(settings):
    target, seeds = toy_gpt(0, codes=11, length=9), torch.arange(20)
    request = request_of("ar", cfg=2.0) if "cfg" not in settings else request_of("ar")
    request = dataclasses.replace(request, **settings)
    codes, _ = draw({"target": target}, request, len(seeds))
    names = ("cfg", "temperature", "top_k", "top_p")

    def ours(p, position):
        return sample(p, noise.fine_uniform(seeds, Purpose.CODE, torch.full_like(seeds, position)))

    labels = torch.full_like(seeds, request.label)
    assert torch.equal(
        codes, gpt.sample_published(target, labels, draw=ours, **{n: getattr(request, n) for n in names})
    )


def test_a_draft_that_is_the_target_changes_no_draw():
    models = toy_models(codes=11, length=9)
    plain, _ = draw(models, request_of("ar"), 30)
    drafted, statistics = draw(models | {"draft": models["target"]}, request_of("sd", gamma=3), 30)
    assert torch.equal(plain, drafted)
    assert all(s.alpha == 1 and s.backbone_calls == 3 for s in statistics)  # 4 + 4 + 1 codes


def test_batched_settings_are_those_of_the_reference():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=g)
    top_k, top_p = [0, 7, 0, 7, 50, 1], [1.0, 1.0, 0.6, 0.6, 0.9, 0.5]
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7, 1.0])
    count, mass, most = filter_numbers(top_k, top_p, 50)
    ours = probabilities(logits, temperature, Filter(torch.tensor(count), torch.tensor(mass), most))
    for i in range(6):
        expected = gpt.distribution(logits[i : i + 1], temperature[i].item(), top_k[i], top_p[i])[0]
        assert torch.allclose(ours[i], expected, atol=1e-6)


def recorded(monkeypatch, module, name, keep):
    """Has module.name note what it returns, as `keep` makes it of (arguments, result)."""
    noted, function = [], getattr(module, name)

    def wrapper(*args, **options):
        result = function(*args, **options)
        noted.append(keep(args, options, result))
        return result

    monkeypatch.setattr(module, name, wrapper)
    return noted


def teacher_forced(models, label, codes):
    """Features of target, draft and drafter at every position of a class and its codes [L], and of the null class."""
    inputs = torch.tensor([label, CLASSES]), codes[:-1].expand(2, -1)
    position = torch.arange(len(codes)).unsqueeze(0)
    target, draft = (models[m].features(models[m].embed(*inputs), position) for m in ("target", "draft"))
    past = torch.cat([torch.zeros_like(target[:, :1]), target[:, :-1]], 1)
    eagle = models["eagle"](past, models["target"].embed(*inputs), models["target"].table(position))
    return {"target": target, "draft": draft, "eagle": eagle}


@pytest.mark.parametrize("method", OF_VQ)
def test_caches_hold_what_a_forward_from_scratch_would_say(method, monkeypatch):
    """At the root of every round, after codes were accepted along any path, in slots apart from each other."""
    models = toy_models(codes=9, length=16)

    def root(args, options, result):
        return options.get("model", args[4] if len(args) > 4 else "target"), args[1], result

    noted = recorded(monkeypatch, VQRunner, "features", root)
    codes, _ = draw(models, request_of(method, **SMALL.get(method, {})), 12, batch=12)
    checked = dict.fromkeys(("target", "draft", "eagle"), 0)
    expected = [teacher_forced(models, 1, c) for c in codes]
    seen = set()
    for model, batch, features in noted:
        kind = model, tuple(batch.num_committed.tolist()), tuple(batch.slot.tolist())
        if kind in seen:
            continue  # a tree's lower levels
        seen.add(kind)
        recent = {"target": 1, "draft": 2}.get(model, features.shape[2])  # the root is the last of so many inputs
        for row, (slot, known) in enumerate(zip(batch.slot.tolist(), batch.num_committed.tolist())):
            at = min(known, recent - 1)
            assert relative_error(features[:, row, at], expected[slot][model][:, known]) < 1e-4
            checked[model] += 1
    of_needs = {"-": set(), "draft model": {"draft"}, "EAGLE drafter": {"eagle"}}
    needed = of_needs[find(method, "VQ").needs] | {"target"}
    assert {model for model, count in checked.items() if count > 12} == needed


def mixed_requests():
    vq = [Request(i % CLASSES, method=name, **SMALL.get(name, {})) for i, name in enumerate(OF_VQ)]
    greedy = [
        Request(0, method=name, temperature=0, family="VQ", **SMALL.get(name, {}))
        for name in ("ar", "eagle2", "sjd-pac")
    ]
    settings = [
        Request(2, method="eagle", cfg=1.0),
        Request(1, method="eagle", cfg=3.0, top_k=5),
        Request(1, method="ar", family="VQ", top_p=0.8),
    ]
    mar = [
        Request(i, method=name, num_iter=4 + i, num_sampling_steps=12, window=w)
        for i, (name, w) in enumerate([("ar", None), ("speculative", 4), ("speculative", 0)])
    ]
    mar.append(Request(1, method="cspd", gamma=8, num_sampling_steps=6))
    few = {
        "calibrated": {"head_calls": 4},
        "disa": {"upper": 6, "lower": 3},
        "ddim": {"head_calls": 4},
        "dpm-solver++": {"head_calls": 4},
        "lazymar": {"warmup": 1, "refresh": 3},
        "gtr": {"upper": 6, "lower": 3},
    }
    mar += [Request(1, method=name, num_iter=6, num_sampling_steps=12, **own) for name, own in few.items()]
    requests = [dataclasses.replace(r, family="VQ") for r in [*vq, *greedy, *settings, *COMPOSED]]
    requests[0] = dataclasses.replace(requests[0], family="VQ")
    every = [dataclasses.replace(r, seed=17 * i) for i, r in enumerate([*requests, *mar] * 2)][:50]
    random.Random(0).shuffle(every)
    return every


def test_fifty_mixed_requests_each_as_if_alone(small_mar):
    toys = toy_models(codes=9, length=16)
    models = [MARModels(small_mar, small_mar), VQModels(**toys)]
    requests = mixed_requests()
    assert len(requests) == 50 and {r.method for r in requests} == set(method_names())
    together = Engine(*models, max_batch=8, device="cpu").generate(requests)
    alone = Engine(*models, max_batch=1, device="cpu")
    for output, request in zip(together, requests):
        solo = alone.generate([request])[0]
        assert output.request == solo.request and output.stats.guarantee == solo.stats.guarantee
        if output.request.family == "VQ":
            assert torch.equal(output.tokens, solo.tokens) and torch.equal(output.token_cost, solo.token_cost)
            assert output.stats.committed == solo.stats.committed
        else:
            assert relative_error(output.tokens, solo.tokens) < 1e-3


@pytest.mark.parametrize("method", OF_VQ)
def test_neighbours_that_are_elsewhere_do_not_matter(method):
    """Requests that came one after the other: their inputs look at different columns in one forward."""
    models = VQModels(**toy_models(codes=9, length=16))
    requests = [dataclasses.replace(request_of(method, **SMALL.get(method, {})), seed=seed) for seed in range(4)]
    engine, outputs = Engine(models, max_batch=4, device="cpu"), {}
    for request in requests:
        engine.add_request(request)
        outputs |= engine.step()
    while len(outputs) < len(requests):
        outputs |= engine.step()
    alone = Engine(models, max_batch=1, device="cpu")
    for ticket, request in enumerate(requests):
        solo = alone.generate([request])[0]
        assert torch.equal(outputs[ticket].tokens, solo.tokens)
        assert outputs[ticket].stats.committed == solo.stats.committed


def test_what_is_counted():
    models = toy_models(length=9)
    for method in OF_VQ:
        _, statistics = draw(models, request_of(method, **SMALL.get(method, {})), 20)
        for s in statistics:
            assert sum(n * count for n, count in s.committed.items()) == 9
            assert sum(s.committed.values()) == s.backbone_calls == s.iterations
            judged, accepted = s.by_lag
            assert all(0 <= a <= j for a, j in zip(accepted, judged))
            assert 9 - s.backbone_calls <= sum(accepted) <= 9
            assert (s.draft_backbone_calls > 0) == (find(method, "VQ").needs != "-")
            assert (s.bound > 0) or find(method, "VQ").guarantee == "exact"


def test_guarantees():
    engine = Engine(VQModels(**toy_models(length=4)), max_batch=1, device="cpu")
    assert engine.resolve(Request(0)).method == "speculative"
    assert engine.resolve(Request(0, draft="eagle-static", rule="cool-sd", delta=1.1, gamma=3)).method == "sd"
    linear = Request(0, method="sjd", window=64, rule="cool-sd", delta=1.1, schedule="linear")
    assert engine.resolve(linear).schedule == "linear"
    for request, expected in zip(COMPOSED, ["bounded"] * 8 + ["heuristic"] * 2, strict=True):
        output = engine.generate([dataclasses.replace(request, window=7 if request.window else None)])[0]
        assert output.stats.guarantee == expected
    assert [engine.generate([Request(0, method=m, **SMALL.get(m, {}))])[0].stats.guarantee for m in ("sd", "sjd")] == [
        "exact"
    ] * 2


def test_images_are_decoded_and_resized():
    toys = toy_models(length=16)
    engine = Engine(VQModels(**toys), max_batch=2, device="cpu")
    output = engine.generate([Request(0, method="ar")])[0]
    assert (
        output.image.shape == (3, 8, 8) and 0 <= output.image.min() <= output.image.max() <= 1
    )  # 4 x 4 codes, stride 2
    engine.runner.image_size = 6
    assert engine.generate([Request(0, method="ar")])[0].image.shape == (3, 6, 6)
    assert Engine(VQModels(toys["target"]), max_batch=1, device="cpu").generate([Request(0)])[0].image is None


# ---- Rounds as graphs, and counted late, make the same codes: sequences that join and leave, odd batches


LARGEST = {"window": MOST_NODES - 1}
SMALL_OF_VQ_GRAPHS = {name: {"window": 6} for name in WINDOWED} | {"sjd-pac": {"window": 7, "pd_k": 3, "pd_d": 2}}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ar", "sd", "eagle", "lantern", *WINDOWED)]


def engine_of(graphed: bool, late: bool) -> Engine:
    """An engine of three slots."""
    engine = Engine(VQModels(**toy_models(codes=9, length=16)), max_batch=3, device="cpu")
    if graphed:
        engine.runner.graphs = replayed()
    engine.runner.late = late
    return engine


def outputs(method: str, graphed: bool = False, late: bool = False, **settings: object) -> dict[int, Output]:
    """Of four requests, one after the other."""
    engine = engine_of(graphed, late)
    settings = SMALL_OF_VQ_GRAPHS.get(method, {}) | settings
    made: dict[int, Output] = {}
    for seed in range(4):
        request = request_of(method, cfg=1.5 + seed / 4, top_k=seed, **settings)
        engine.add_request(dataclasses.replace(request, seed=seed))
        made |= engine.step()
    while len(made) < 4:
        made |= engine.step()
    return made


def test_rounds_run_as_the_engines_graphs() -> None:
    engine = engine_of(graphed=False, late=False)
    assert engine.runner.graphs is engine.graphs


def test_graphs_serve_later_images_too() -> None:
    """No memory that they read goes with the images that they were captured for."""
    captured = []

    def capture(*functions: Callable) -> tuple:
        captured.append(functions)
        return rerun(*functions)

    engine = engine_of(graphed=False, late=True)
    engine.runner.graphs = Graphs(engine.device, enabled=True, capture=capture)
    request = request_of("sjd-pac", **SMALL_OF_VQ_GRAPHS["sjd-pac"])
    engine.generate([request] * 3)
    num_captured = len(captured)
    engine.generate([request] * 3)
    assert 0 < num_captured == len(captured)


@pytest.mark.parametrize("method", ["eagle2", "sjd-pac", *SLOW])
def test_graphs_and_late_counts_change_nothing(method: str) -> None:
    check_same(outputs(method), outputs(method, graphed=True, late=True))


@pytest.mark.parametrize("settings", [LARGEST, LARGEST | {"pd_k": 2, "pd_d": 16}])
def test_a_finished_sequence_has_room_for_a_window(settings: dict) -> None:
    """Where rounds are counted late it takes part in one more."""
    check_same(outputs("sjd", **settings), outputs("sjd", late=True, **settings))


def check_same(eager: dict[int, Output], other: dict[int, Output]) -> None:
    """Codes and statistics."""
    for ticket, output in eager.items():
        assert other[ticket].tokens.equal(output.tokens) and other[ticket].token_cost.equal(output.token_cost)
        for name in ("committed", "iterations", "draft_backbone_calls", "by_lag"):
            assert getattr(other[ticket].stats, name) == getattr(output.stats, name)
        assert other[ticket].stats.bound == pytest.approx(output.stats.bound, rel=1e-6)


def test_buckets_are_few_and_never_too_small() -> None:
    for most in range(1100):
        assert most <= bucket(most) <= max(LEAST_BUCKET, most + LEAST_BUCKET - 1, 1.25 * most)
    assert len({bucket(most) for most in range(577)}) <= 9


# ---- Codes that are known from the start: the others follow the target's distribution given them, by every draft


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
    prefill = discrete_runner.VQRunner._prefill

    def of_another_class(runner, sequences):
        last = runner.conditions.last["target"]
        own = last.clone()
        last.copy_(runner.target.cls_embedding.embedding_table.weight[:1])
        prefill(runner, sequences)
        last.copy_(own)

    monkeypatch.setattr(discrete_runner.VQRunner, "_prefill", of_another_class)
    assert p_of(models, "ar", 2, num=6 * NUM) < OTHER


@pytest.fixture(scope="module")
def engine():
    return Engine(VQModels(**toy_models(codes=11, length=9)), max_batch=3, device="cpu")


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("method", METHODS)
def test_an_image_is_continued_as_it_was_made(method, count, engine):
    """The first codes of an image that baseline sampling made, and its seed, give the same image."""
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
