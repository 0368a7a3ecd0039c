"""Requests to VQ models, and the choice of their drafts."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re

import pytest
import torch
from safetensors import safe_open
from stores import small_vq_checkpoint
from texts import PROMPTS, text_models
from toys import draw, request_of, runner_of, toy_gpt, toy_models

import cspd
from cspd import Engine, Request, VQModels, terminal
from cspd.cli import main
from cspd.cli.sample import sample_to_folder
from cspd.discrete import fastest_draft, tuning
from cspd.discrete.fastest_draft import BLOCK, EVERY, Race
from cspd.discrete.gpt import Eagle
from cspd.discrete.tuning import JACOBI, TREES, draft_configs, fastest, name_of, on_grid, typical_seconds
from cspd.files import FileCache, user_cache
from cspd.inpainting import Inpainting
from cspd.tuner import GAIN, PLAIN, Choice


@pytest.fixture(scope="module")
def short_engine():
    """An engine over images of 4 tokens."""
    return Engine(VQModels(**toy_models(length=4)), max_batch=1, device="cpu")


def test_resolved_requests_are_as_version_0_1_0_recorded_them(short_engine):
    """So its runs can be resumed: a method's defaults are written, a rule's own are not."""
    published = {"cfg": 2.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    own = {
        "sd": {"draft": "chain", "gamma": 5, "rule": "exact"},
        "uniform-rsd": {"draft": "eagle-static", "gamma": 5, "rule": "uniform-rsd", "delta": 1.1},
        "cool-sd": {"draft": "eagle-static", "gamma": 5, "rule": "cool-sd", "delta": 1.1},
        "lantern": {"draft": "eagle-dynamic", "gamma": 6, "rule": "lantern", "delta": 0.2, "k": 100, "optimal": False},
        "lantern++": {"draft": "eagle-static", "gamma": 5, "rule": "lantern++", "lam": 1.0, "k": 10, "optimal": False},
        "sjd": {"window": 64, "pd_k": 1, "pd_d": 0, "continuation": False, "rule": "exact", "coupling": "maximal"},
        "sjd-pac": {"window": 64, "pd_k": 4, "pd_d": 3, "continuation": True, "rule": "exact"},
    }
    for method, settings in own.items():
        request = Request(0, method=method, coupling=settings.get("coupling"))
        assert short_engine.check(request).settings == published | settings


@pytest.mark.parametrize(
    "rule, own",
    [("uniform-rsd", {"delta": 1.1}), ("cool-sd", {"delta": 1.1}), ("lantern", {"delta": 0.2}), ("gsd", {"group": 10})],
)
@pytest.mark.parametrize("method", ["sd", "sjd", "lantern"])
def test_a_rule_has_its_defaults_with_every_method(method, rule, own, short_engine):
    settings = short_engine.check(Request(0, method=method, rule=rule)).settings
    assert settings.items() >= own.items()


def test_sjd_pac_without_siblings_is_mc_sjd(short_engine):
    coupled = short_engine.check(Request(0, method="mc-sjd"))
    without = short_engine.check(Request(0, method="sjd-pac", pd_k=1, pd_d=0))
    independent = short_engine.check(Request(0, method="sjd", coupling="maximal", continuation=True))
    assert coupled.settings == without.settings == independent.but(coupling=None).settings


def test_a_request_is_a_plain_value():
    request = Request(3, 7, "sjd", window=5, cfg=None)
    assert request == Request(3, 7, "sjd", window=5) and hash(request) == hash(Request(3, 7, "sjd", window=5))
    assert request == pickle.loads(pickle.dumps(request)) == copy.deepcopy(request) == request.but()
    assert dataclasses.asdict(request)["settings"] == {"window": 5}
    assert request.but(window=None).settings == {} and request.window == 5 and request.gamma is None
    assert repr(request) == "Request(label=3, seed=7, method='sjd', window=5)"
    with pytest.raises(TypeError, match="gama"):
        Request(3, gama=1)
    with pytest.raises(AttributeError):
        request.gama  # noqa: B018


BAD = [
    ({"method": "calibrated"}, "method"),
    ({"family": "MAR"}, "family"),
    ({"num_iter": 4}, "num_iter"),
    ({"method": "ar", "rule": "exact"}, "rule"),
    ({"method": "sd", "gamma": 0}, "gamma"),
    ({"method": "eagle", "gamma": 6}, "gamma"),
    ({"method": "eagle", "window": 6}, "window"),
    ({"method": "eagle2", "window": 80}, "window"),
    ({"method": "lantern++", "bound": "jsd"}, "bound"),
    ({"method": "cool-sd", "delta": -1}, "delta"),
    ({"method": "sd", "rule": "cool-sd", "delta": 1.1, "gamma": 8, "schedule": "linear"}, "length"),
    ({"method": "sjd", "window": 80}, "window"),
    ({"method": "sjd-pac", "window": 12}, "window"),
    ({"method": "sjd-pac", "pd_k": 16, "pd_d": 16}, "window"),
    ({"top_p": 0.0}, "top_p"),
    ({"label": 3}, "label"),
    ({"method": "sd", "metric": "l1", "rule": "lantern", "delta": 0.1}, "metric"),
    ({"method": "eagle", "draft": "jacobi"}, "draft"),
    ({"method": "sd", "delta": 1.5}, "delta"),
    ({"method": "sjd", "optimal": False}, "optimal"),
    ({"method": "lantern", "published": True, "optimal": True}, "optimal"),
    ({"method": "cool-sd", "published": True}, "published"),
    ({"gamma": 5}, "gamma"),
    ({"draft": "jacobi", "gamma": 3}, "gamma"),
    ({"method": "speculative", "draft": "chain"}, "draft"),
    ({"method": "speculative", "draft": "eagle-dynamic", "gamma": 9}, "gamma"),
    ({"coupling": "maximal"}, "coupling"),
]


@pytest.mark.parametrize("changes, advice", BAD, ids=str)
def test_bad_requests(changes, advice, short_engine):
    with pytest.raises(ValueError, match=advice):
        short_engine.resolve(Request(**{"label": 0, **changes}))


@pytest.mark.parametrize(
    "missing, method, advice",
    [("draft", "sd", "draft"), ("eagle", "eagle2", "EAGLE"), ("tokenizer", "lantern", "codes")],
)
def test_a_model_that_is_needed(missing, method, advice):
    engine = Engine(VQModels(**toy_models(length=4) | {missing: None}), max_batch=1, device="cpu")
    with pytest.raises(ValueError, match=advice):
        engine.resolve(Request(0, method=method))


def test_incompatible_models():
    models = toy_models()
    for changes, advice in [
        ({"draft": toy_gpt(0, codes=5)}, "vocab_size"),
        ({"eagle": Eagle(dataclasses.replace(models["target"].config, dim=16))}, "dim"),
        ({"tokenizer": toy_models(codes=6)["tokenizer"]}, "6"),
    ]:
        with pytest.raises(ValueError, match=advice):
            Engine(VQModels(**models | changes), device="cpu")
    with pytest.raises(ValueError):
        Engine(VQModels(**models), VQModels(**models), device="cpu")
    with pytest.raises(ValueError, match="max_batch"):
        Engine(VQModels(toy_gpt(0, length=16384)), max_batch=2**20, device="cpu")


# ---- The choice of a draft: what is measured, what is chosen by it, and that images are those of ar


ALONE = name_of(PLAIN)


@pytest.fixture(scope="module")
def models() -> dict:
    return toy_models(codes=11, length=16)


@pytest.fixture
def engine(models, monkeypatch, tmp_path) -> Engine:
    """With a cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Engine(VQModels(**models), max_batch=2, device="cpu")


@pytest.mark.parametrize(
    "seconds, codes, best, told",
    [
        ({ALONE: 1.0, "a": 1.5, "b": 3.0}, {"a": 3.0, "b": 4.0}, "a", "2.00"),
        ({ALONE: 1.0, "a": 1.5, "b": 3.0}, {"a": 2.0, "b": 5.0}, "b", "1.67"),
        ({ALONE: 1.0, "a": 1.5}, {"a": 1.5 / GAIN}, ALONE, "1.43"),  # not above the limit
        ({ALONE: 1.0, "a": 1.5}, {"a": 1.51 / GAIN}, "a", "1.44"),
        ({ALONE: 1.0, "a": 5.0}, {}, ALONE, "1.00"),  # too slow to be counted
        ({"a": 9.0, "b": 8.0}, {"a": 1.0, "b": 1.0}, "b", ""),  # the request asks for drafting
    ],
)
def test_the_fastest_configuration(seconds, codes, best, told):
    by_name = {name: PLAIN if name == ALONE else {"window": 4} for name in seconds}
    counted = []

    def count(some):
        counted.extend(some)
        return codes

    config, why = fastest(seconds, by_name, count, 8)
    assert config is by_name[best] and told in why and "8 images" in why
    assert len(counted) == len(codes)


@pytest.mark.parametrize(
    "plain, drafting, expected",
    [
        ([1.0, 1.1, 1.0], [2.0, 2.2, 2.1], (1.0, 2.1)),
        ([8.0, 1.0, 9.0], [2.0, 2.2, 9.9], (1.0, 2.2)),  # some turns were disturbed
        ([8.0, 8.0, 9.0], [0.5, 0.6, 0.7], (8.0, 8.0)),  # all of the plain ones, but no others: not faster
    ],
)
def test_seconds_on_a_busy_machine(plain, drafting, expected):
    assert typical_seconds({"a": drafting, ALONE: plain}) == {ALONE: expected[0], "a": expected[1]}
    assert typical_seconds({"a": drafting}) == {"a": sorted(drafting)[1]}  # where the request asks for drafting


def test_what_is_given_is_not_chosen():
    request = request_of("speculative")
    assert draft_configs(request, False) == [PLAIN, *JACOBI]
    assert draft_configs(request, True) == [PLAIN, *JACOBI, *TREES]
    assert draft_configs(request.but(window=0), True) == [{}]
    assert draft_configs(request.but(window=7), False) == [{"draft": "jacobi", "window": 7}]
    assert draft_configs(request.but(draft="jacobi"), True) == JACOBI
    trees = draft_configs(request.but(draft="eagle-dynamic", window=9), True)
    assert trees == [{**tree, "window": 9} for tree in TREES]


@pytest.mark.parametrize(
    "config",
    [
        *(PLAIN, JACOBI[1], TREES[0]),
        *(pytest.param(config, marks=pytest.mark.slow) for config in (*JACOBI, *TREES[1:])),
    ],
    ids=name_of,
)
def test_every_configuration_samples_the_tokens_of_ar(config, models):
    plain, _ = draw(models, request_of("ar", cfg=2.0), 12)
    codes, statistics = draw(models, request_of("speculative", cfg=2.0, **config), 12)
    assert torch.equal(codes, plain)
    passes = sum(each.backbone_calls for each in statistics)
    assert passes == codes.numel() if config is PLAIN else passes < 0.95 * codes.numel()


def test_rounds_are_timed_and_counted(models):
    runner = runner_of({name: models[name] for name in ("target", "eagle")}, 3)
    configs = (PLAIN, JACOBI[0], JACOBI[-1], TREES[-1])
    requests = {name_of(config): request_of("speculative", **config) for config in configs}
    seconds = tuning.round_seconds(runner, requests, turns=2)
    assert seconds.keys() == requests.keys()
    assert all(len(own) == 2 and 0 < min(own) < 1 for own in seconds.values())
    assert tuning.tokens_per_round(runner, requests[ALONE]) == 1
    _, statistics = draw(models, requests[name_of(JACOBI[0])], 3)
    mean = sum(s.step_compression for s in statistics) / 3
    counted = tuning.tokens_per_round(runner_of(models, 3), requests[name_of(JACOBI[0])])
    assert 1 < counted < 1 + JACOBI[0]["window"] and counted == pytest.approx(mean, rel=0.5)


def recorded(windowed: list[float]):
    """Recorded times: 1 s for each round of baseline sampling, `windowed` for one of a window of 4, more for others."""

    def round_seconds(runner, requests):
        times = {name: [9.0] * 3 for name in requests}
        return times | {ALONE: [1.0] * 3, name_of(JACOBI[0]): windowed}

    return round_seconds


def cached(kind: str) -> list[tuple[dict, dict]]:
    """The settings and values of all files of a kind in the user's cache, the oldest first."""
    found = []
    for path in sorted(user_cache().glob(f"{kind}-*"), key=lambda path: path.stat().st_mtime_ns):
        with safe_open(path, "np") as file:
            values = {name: file.get_tensor(name) for name in file.keys()}
            found.append((json.loads(file.metadata()["cspd"])["settings"], values))
    return found


def test_measured_once_and_cached(engine, models, monkeypatch):
    monkeypatch.setattr(tuning, "round_seconds", recorded([1.0] * 3))
    asked = Request(0, cfg=2.0)
    resolved = engine.resolve(asked)
    assert resolved.window is not None and (resolved.draft is None) == (resolved.window == 0)
    ((settings, times),) = cached("times")
    assert settings["works"] == [name_of(config) for config in [PLAIN, *JACOBI, *TREES]]
    assert times.keys() == set(settings["works"]) and settings["slots"] == 2
    counted = cached("tokensperround")
    assert counted and all(settings["weights"] for settings, _ in counted)

    monkeypatch.setattr(tuning, "round_seconds", None)  # everything is read from the cache
    monkeypatch.setattr(tuning, "tokens_per_round", None)
    again = Engine(VQModels(**models), max_batch=2, device="cpu")
    assert again.resolve(asked) == resolved and again.resolve(resolved) == resolved
    assert again.with_slots(2).resolve(asked.but(label=1, seed=5)).window == resolved.window


def test_times_of_a_busy_machine_are_not_cached(models, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def choose(windowed):
        monkeypatch.setattr(tuning, "round_seconds", recorded(windowed))
        engine = Engine(VQModels(**models), max_batch=2, device="cpu")
        return [engine.resolve(Request(0, cfg=2.0)).window for _ in range(2)]

    assert choose([1.1, 3.0, 1.1]) == [4, 4]
    ((_, times),) = cached("times")
    assert times[name_of(JACOBI[0])].tolist() == [[2], [1.1]]
    for file in user_cache().glob("times-*"):
        file.unlink()
    assert choose([0.8, 1.1, 1.1]) == [4, 4]  # it decides, but only in this process
    assert not cached("times")


# ---- The default falls back to baseline sampling if its own rounds turn out slower


def rounds_of(race: Race, by_draft: float, plain: float, num: int) -> list[bool]:
    """Which of `num` rounds draft, if rounds of both kinds take these seconds; every third one is slow by chance."""
    kinds = []
    for i in range(num):
        kinds.append(race.begin())
        race.end((by_draft if kinds[-1] else plain) * (9 if i % 3 == 0 else 1))
    return kinds


def test_the_faster_kind_of_round_goes_on():
    """By recorded times of an idle machine, of one that is busy from the beginning, and of one that becomes busy."""
    idle, busy, plain = 20.0, 90.0, 12.0  # of 3 tokens, and of 1
    kinds = rounds_of(Race(3), idle, plain, 512)
    assert kinds[: 2 * BLOCK] == [True] * 2 * BLOCK and kinds.count(False) == 512 // EVERY
    assert rounds_of(Race(1), 13.0, plain, 512) == kinds  # hardly slower: as predicted
    kinds = rounds_of(Race(3), busy, plain, 512)
    assert kinds[: 4 * BLOCK] == [True] * 2 * BLOCK + [False] * 2 * BLOCK
    assert kinds.count(True) == 2 * BLOCK + 512 // EVERY - BLOCK
    race = Race(3)
    rounds_of(race, idle, plain, 512)
    assert rounds_of(race, busy, plain, 512)[256:].count(True) <= 256 // EVERY
    assert rounds_of(race, idle, plain, 1024)[512:].count(False) <= 512 // EVERY  # and idle again


@pytest.mark.parametrize("config", [JACOBI[1], TREES[1]], ids=name_of)
@pytest.mark.parametrize("known", [0, 5])
def test_rounds_of_both_kinds_sample_the_tokens_of_ar(config, known, engine, monkeypatch):
    monkeypatch.setattr(engine.runner.tuning, "_choose", lambda request, at_once: Choice(config, ""))
    monkeypatch.setattr(fastest_draft, "BLOCK", 1)
    monkeypatch.setattr(fastest_draft, "EVERY", 3)
    monkeypatch.setattr(Race, "is_draft_faster", lambda race: False)
    requests = [Request(i % 3, i, cfg=2.0) for i in range(8)]
    if known:
        given = engine.sample(0, method="ar").tokens
        requests = [request.but(known=Inpainting.of(given, torch.arange(16) >= known)) for request in requests]
    plain = engine.generate([request.but(method="ar") for request in requests])
    mixed = engine.generate(requests)
    assert all(torch.equal(ours.tokens, theirs.tokens) for ours, theirs in zip(mixed, plain))
    passes = sum(each.stats.backbone_calls for each in mixed)
    drafted = sum(sum(each.stats.by_lag[0]) for each in mixed)
    assert drafted and passes < 8 * (16 - known)  # some rounds drafted
    assert all(each.stats.committed.get(1, 0) >= 4 for each in mixed)  # and most did not
    # what was asked for is what runs
    monkeypatch.setattr(Race, "begin", None)
    asked = engine.generate([request.but(method="speculative", **config) for request in requests])
    assert all(torch.equal(ours.tokens, theirs.tokens) for ours, theirs in zip(asked, plain))


def test_a_resumed_run_has_the_same_choice(engine, monkeypatch, tmp_path):
    """Also if measurements would now choose another one."""
    requests = [Request(label, label, cfg=2.0) for label in range(2)]

    def chosen(config):
        own = engine.runners["VQ"].tuning
        own._choices.clear()
        # as in `_choose`, a given window stays
        monkeypatch.setattr(own, "_choose", lambda asked, slots: Choice(config if asked.window is None else {}, ""))
        record = sample_to_folder(engine, requests, tmp_path, {})
        return {(image["request"]["draft"], image["request"]["window"]) for image in record["images"]}

    assert chosen({"draft": "jacobi", "window": 4}) == {("jacobi", 4)}
    (tmp_path / "00001_label1_seed1.png").unlink()
    assert chosen({"window": 0}) == {("jacobi", 4)}


@pytest.mark.parametrize(
    "given, on_the_grid",
    [
        ({"cfg": 2.1, "temperature": 0.96, "top_k": 1500, "top_p": 0.88}, (2.0, 1.0, 2048, 0.9)),
        ({"cfg": 1.0, "temperature": 0.0, "top_k": 0, "top_p": 1.0}, (1.0, 0.0, 0, 1.0)),  # off
        ({"cfg": 1.1, "temperature": 0.01, "top_k": 1, "top_p": 0.999}, (1.5, 0.1, 1, 0.95)),  # on
        ({"cfg": 0.9, "temperature": 1.33, "top_k": 3, "top_p": 0.01}, (0.5, 1.3, 4, 0.05)),
    ],
)
def test_the_grid_that_codes_are_counted_at(given, on_the_grid):
    near = on_grid(request_of("speculative", **given))
    assert (near.cfg, near.temperature, near.top_k, near.top_p) == on_the_grid
    assert on_grid(near) == near


def test_near_settings_share_a_count(engine, monkeypatch):
    asked = Request(0, cfg=2.0, draft="jacobi")
    engine.resolve(asked)
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "tokens_per_round", None)
        engine.resolve(asked.but(cfg=2.1, temperature=0.97, label=1))
        with pytest.raises(TypeError):  # it tries to count
            engine.resolve(asked.but(cfg=3.0))


@pytest.mark.parametrize("name, asked", [("digits32_vq", Request(0)), ("emoji64_text", Request(prompt="a red heart"))])
def test_codes_of_the_bundled_models_are_counted(name, asked, monkeypatch):
    """At their usual settings, for every device."""
    engine = cspd.load(name, device="cpu", max_batch=1)
    own = engine.runner.tuning
    some = [*JACOBI, *(TREES if own.models.eagle else [])]
    monkeypatch.setattr(tuning, "tokens_per_round", None)
    request = engine.check(asked)
    monkeypatch.setattr(own, "graphs", True)  # as on a GPU
    codes = own.tokens_per_round(request, some)
    assert codes.keys() == {name_of(config) for config in some} and all(1 < count < 6 for count in codes.values())
    monkeypatch.setattr(own, "graphs", False)
    monkeypatch.setattr(own, "_bundled", FileCache([]))
    with pytest.raises(TypeError):  # it tries to count
        own.tokens_per_round(request, some[:1])


def test_long_counts_are_reported(engine, monkeypatch, capsys):
    own, request = engine.runners["VQ"].tuning, engine.check(Request(0, cfg=2.0))
    own.tokens_per_round(request, JACOBI[3:4])
    monkeypatch.setattr(terminal, "PATIENCE", 0.0)
    own.tokens_per_round(request, JACOBI[:3])
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "cfg" in told and re.search(r": about \d+ s\n", told)


def test_too_little_memory_to_measure(engine, monkeypatch):
    monkeypatch.setattr(tuning, "free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match="window"):
        engine.resolve(Request(0, cfg=2.0))
    assert engine.resolve(Request(0, cfg=2.0, window=0)).window == 0


def test_prompts_of_other_lengths_are_timed_separately(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "TEXT_STEP", 3)
    monkeypatch.setattr(tuning, "round_seconds", lambda runner, requests: {name: [1.0] for name in requests})
    engine = Engine(VQModels(**text_models()), max_batch=1, device="cpu")
    for prompt in PROMPTS[:2]:  # of 4 and 2 tokens
        engine.resolve(Request(prompt=prompt, cfg=2.0, draft="jacobi"))
    assert [settings["text"] for settings, _ in cached("times")] == [6, 3]


def test_calibrate_takes_mar_models_only(capsys):
    assert main(["calibrate", "--checkpoint", small_vq_checkpoint()]) == 2
    assert "--method" in capsys.readouterr().err


@pytest.mark.slow
def test_bundled():
    """Whatever is chosen on this machine, the images are those of ar."""
    engine = cspd.load("digits32_vq", max_batch=2, device="cpu")
    requests = [Request(i, i, cfg=2.0) for i in range(2)]
    made, plain = engine.generate(requests), engine.generate([request.but(method="ar") for request in requests])
    assert all(torch.equal(ours.tokens, theirs.tokens) for ours, theirs in zip(made, plain))
    assert made[0].request.method == "speculative" and made[0].stats.guarantee == "exact"
