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
    ({"method": "sd", "rule": "magic"}, "rule"),
    ({"method": "sd", "rule": "uniform-rsd"}, "delta"),
    ({"method": "cool-sd", "delta": -1}, "delta"),
    ({"method": "sd", "rule": "cool-sd", "delta": 1.1, "gamma": 8, "schedule": "linear"}, "length"),
    ({"method": "sjd", "window": 80}, "window"),
    ({"method": "sjd-pac", "window": 12}, "window"),
    ({"method": "sjd-pac", "pd_k": 16, "pd_d": 16}, "window"),
    ({"method": "sjd", "continuation": 1}, "continuation"),
    ({"top_k": -1}, "top_k"),
    ({"top_p": 0.0}, "top_p"),
    ({"label": 3}, "label"),
    ({"method": "sd", "metric": "l1", "rule": "lantern", "delta": 0.1}, "metric"),
    ({"method": "eagle", "draft": "jacobi"}, "draft"),
    ({"method": "sd", "delta": 1.5}, "delta"),
    ({"method": "cool-sd", "lam": 1.0}, "lam"),
    ({"method": "cool-sd", "delta": [1]}, "delta"),
    ({"method": "cool-sd", "optimal": "no"}, "optimal"),
    ({"method": "sjd", "optimal": False}, "optimal"),
    ({"method": "lantern", "published": True, "optimal": True}, "optimal"),
    ({"method": "cool-sd", "published": True}, "published"),
    ({"method": "sjd", "delta": 0}, "delta"),
    ({"gamma": 5}, "gamma"),
    ({"draft": "jacobi", "gamma": 3}, "gamma"),
    ({"method": "speculative", "draft": "chain"}, "draft"),
    ({"method": "speculative", "draft": "eagle-dynamic", "gamma": 9}, "gamma"),
    ({"window": 80}, "window"),
    ({"coupling": "maximal"}, "coupling"),
    ({"draft": ["chain"]}, "draft"),
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
        ("draft", "sd", "draft"),
        ("eagle", "eagle2", "EAGLE"),
        ("tokenizer", "lantern", "codes"),
    ],
)
def test_a_model_that_is_needed(missing, method, advice):
    engine = Engine(VQModels(**toy_models(length=4) | {missing: None}), max_batch=1, device="cpu")
    with pytest.raises(ValueError, match=advice):
        engine.resolve(Request(0, method=method))


def test_models_that_do_not_fit():
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
