"""VQ requests: what is filled in, what does not fit, which models are needed."""

import copy
import dataclasses
import pickle

import pytest
from toys import toy_gpt, toy_models

from cspd import Engine, Request, VQModels
from cspd.discrete.gpt import Eagle


def test_resolved_requests_are_as_version_0_1_0_recorded_them():
    """A folder of that version goes on: a rule's own defaults are known and not written, a method's are written."""
    engine = Engine(VQModels(**toy_models(length=4)), max_batch=1, device="cpu")
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
        assert engine.check(request).settings == published | settings


def test_sjd_pac_without_siblings_is_mc_sjd():
    engine = Engine(VQModels(**toy_models(length=4)), max_batch=1, device="cpu")
    coupled = engine.check(Request(0, method="mc-sjd"))
    without = engine.check(Request(0, method="sjd-pac", pd_k=1, pd_d=0))
    independent = engine.check(Request(0, method="sjd", coupling="maximal", continuation=True))
    assert coupled.settings == without.settings == independent.but(coupling=None).settings


def test_a_request_is_a_plain_value():
    request = Request(3, 7, "sjd", window=5, cfg=None)
    assert request == Request(3, 7, "sjd", window=5) and hash(request) == hash(Request(3, 7, "sjd", window=5))
    assert request == pickle.loads(pickle.dumps(request)) == copy.deepcopy(request) == request.but()
    assert dataclasses.asdict(request)["settings"] == {"window": 5}
    assert request.but(window=None).settings == {} and request.window == 5 and request.gamma is None
    assert repr(request) == "Request(label=3, seed=7, method='sjd', window=5)"
    with pytest.raises(TypeError, match="no setting 'gama': did you mean gamma"):
        Request(3, gama=1)
    with pytest.raises(AttributeError):
        request.gama  # noqa: B018


BAD = [
    ({"method": "calibrated"}, "choose one of ar, speculative, sd, eagle"),
    ({"family": "MAR"}, "this engine has models of VQ"),
    ({"num_iter": 4}, "no setting of VQ models"),
    ({"method": "ar", "rule": "exact"}, "it belongs to"),
    ({"method": "sd", "gamma": 0}, "1..79"),
    ({"method": "eagle", "gamma": 6}, "1..5"),
    ({"method": "sd", "rule": "magic"}, "give one of exact, uniform-rsd"),
    ({"method": "sd", "rule": "uniform-rsd"}, "delta"),
    ({"method": "cool-sd", "delta": -1}, "delta"),
    ({"method": "sd", "rule": "cool-sd", "delta": 1.1, "gamma": 8, "schedule": "linear"}, "ell=8"),
    ({"method": "sjd", "window": 80}, "1..79"),
    ({"method": "sjd-pac", "window": 12}, "give a whole number, 13..79"),
    ({"method": "sjd-pac", "pd_k": 16, "pd_d": 16}, "need a window of 257, and 79 is the largest"),
    ({"method": "sjd", "continuation": 1}, "True or False"),
    ({"top_k": -1}, "top_k="),
    ({"top_p": 0.0}, "top_p="),
    ({"label": 3}, "0..2"),
    ({"method": "sd", "metric": "l1", "rule": "lantern", "delta": 0.1}, "l2, cosine"),
    ({"method": "eagle", "draft": "jacobi"}, "give one of chain"),
    ({"method": "sd", "delta": 1.5}, "needs rule='uniform-rsd' or 'cool-sd' or 'lantern', and it is 'exact'"),
    ({"method": "cool-sd", "lam": 1.0}, "needs rule='lantern++', and it is 'cool-sd'"),
    ({"method": "cool-sd", "delta": [1]}, "delta=[1] does not fit: give a number, above 0"),
    ({"method": "cool-sd", "optimal": "no"}, "True or False"),
    ({"method": "sjd", "optimal": False}, "needs rule="),
    ({"method": "lantern", "published": True, "optimal": True}, "two ways to resample"),
    ({"method": "cool-sd", "published": True}, "needs rule='lantern' or 'lantern++'"),
    ({"method": "sjd", "delta": 0}, "needs rule="),
    ({"gamma": 5}, "needs draft='eagle-dynamic', and it is None"),
    ({"draft": "jacobi", "gamma": 3}, "needs draft='eagle-dynamic', and it is 'jacobi'"),
    ({"method": "speculative", "draft": "chain"}, "give one of jacobi, eagle-dynamic"),
    ({"method": "speculative", "draft": "eagle-dynamic", "gamma": 9}, "1..8"),
    ({"window": 80}, "0..79"),
    ({"coupling": "maximal"}, "give one of same-image"),
    ({"draft": ["chain"]}, "give one of jacobi, eagle-dynamic"),
]


@pytest.mark.parametrize("changes, advice", BAD, ids=str)
def test_bad_requests(changes, advice):
    engine = Engine(VQModels(**toy_models(length=4)), max_batch=1, device="cpu")
    with pytest.raises(ValueError) as caught:
        engine.resolve(Request(**{"label": 0, **changes}))
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    "missing, method, advice",
    [
        ("draft", "sd", "a draft model"),
        ("eagle", "eagle2", "an EAGLE drafter"),
        ("tokenizer", "lantern", "tokenizer's codes"),
    ],
)
def test_a_model_that_is_needed(missing, method, advice):
    engine = Engine(VQModels(**toy_models(length=4) | {missing: None}), max_batch=1, device="cpu")
    with pytest.raises(ValueError, match=advice):
        engine.resolve(Request(0, method=method))


def test_models_that_do_not_fit():
    models = toy_models()
    for changes, advice in [
        ({"draft": toy_gpt(0, codes=5)}, "vocab_size is 5 and 4"),
        ({"eagle": Eagle(dataclasses.replace(models["target"].config, dim=16))}, "dim is 16 and 8"),
        ({"tokenizer": toy_models(codes=6)["tokenizer"]}, "6 and 4 codes"),
    ]:
        with pytest.raises(ValueError, match=advice):
            Engine(VQModels(**models | changes), device="cpu")
    with pytest.raises(ValueError, match="one of each"):
        Engine(VQModels(**models), VQModels(**models), device="cpu")
    with pytest.raises(ValueError, match=r"max_batch=1048576 with its key-value caches needs about"):
        Engine(VQModels(toy_gpt(0, length=16384)), max_batch=2**20, device="cpu")
