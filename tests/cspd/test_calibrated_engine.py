"""The calibrated sampler in an engine: any batch, settings of all kinds, what it reports, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch

from cspd import Engine, MARModels, Request
from cspd.heads.calibrated import Shortcut

SETTINGS = {"num_iter": 4, "cfg": 2.0, "num_sampling_steps": 12}


@pytest.fixture
def engine(small_mar, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return lambda slots, model=small_mar: Engine(MARModels(model), max_batch=slots, device="cpu")


def test_in_an_engine(engine):
    """Rows of unequal progress are as each alone; the same seed gives nearly the token that `ar` gives.

    Of 100 steps the first multiplies rounding by 316; of 12, by thousands, and processors round differently.
    """
    whole_chain = SETTINGS | {"num_sampling_steps": 100}
    requests = [Request(i, i, "calibrated", **whole_chain | {"num_iter": 3 + i}, head_calls=6) for i in range(3)]
    together = engine(2).generate(requests)
    for request, output in zip(requests, together):
        alone = engine(1).generate(request)[0]
        assert (output.tokens - alone.tokens).abs().max() < 1e-4 * alone.tokens.abs().max()
        stats = output.stats
        assert stats.guarantee == "measured" and stats.difference > 0 and stats.divergence > 0 and stats.audit is None
        assert stats.head_calls_per_token == 6 and stats.head_calls == 6 * request.num_iter
        assert stats.head_evaluations == 64 * (6 + 5)  # the null class at all calls but the fourth
    whole = engine(1).generate(requests[0].but(head_calls=100, null_every=1))[0]
    plain = engine(1).generate(requests[0].but(method="ar", head_calls=None))[0]
    assert (whole.tokens - plain.tokens).abs().max() < 1e-4 * plain.tokens.abs().max()
    assert whole.stats.divergence == 0 and whole.stats.head_evaluations == 64 * 200


def test_a_resolved_request_has_all_that_it_needs(engine):
    """No round waits for a fit, whose time would be taken for the head's."""
    own = engine(1)
    request = own.resolve(Request(1, method="calibrated", **SETTINGS, head_calls=5))
    assert own.runner.tuning.calibrations["target"].folder_of(request, Shortcut)
    assert own.resolve(request) == request


def test_what_is_beyond_float32_is_not_reported(engine):
    """With hardly any noise paths diverge beyond all numbers; records have room for finite ones only."""
    with pytest.warns(UserWarning, match="num_sampling_steps"):
        (output,) = engine(1).generate(
            Request(1, 1, "calibrated", **SETTINGS, temperature=1e-30, head_calls=6, audit=0.1)
        )
    stats = output.stats
    assert stats.difference > 0 and stats.divergence is stats.audit is stats.audit_error is None


def test_an_audit_changes_no_image(engine):
    request = Request(1, 1, "calibrated", **SETTINGS, head_calls=4)
    plain, audited, again = engine(1).generate([request, request.but(audit=1.0), request.but(audit=0.5)])
    assert torch.equal(plain.tokens, audited.tokens) and torch.equal(plain.tokens, again.tokens)
    assert plain.stats.audit is None and audited.stats.audit > 0 and audited.stats.audit_error > 0
    assert again.stats.audit != audited.stats.audit
    assert engine(1).generate(request.but(audit=0.5))[0].stats.audit == again.stats.audit


@pytest.mark.slow  # many calibrations
def test_settings_of_all_kinds(engine):
    """Without noise, without guidance, of few steps, and by a divergence in place of a number of calls."""
    own = engine(1)
    cold = own.resolve(Request(1, method="calibrated", **SETTINGS | {"temperature": 0.0}, head_calls=6))
    assert own.generate(cold)[0].stats.divergence is None
    assert own.generate(cold.but(temperature=1.0, cfg=1.0))[0].stats.head_evaluations == 64 * 6
    assert own.resolve(Request(1, method="calibrated", **SETTINGS)).head_calls == 10
    for num_steps in (2, 3):
        few = own.resolve(Request(1, method="calibrated", **SETTINGS | {"num_sampling_steps": num_steps}))
        assert few.head_calls == num_steps and own.generate(few)[0].tokens.isfinite().all()
    near, far = (
        own.resolve(Request(1, method="calibrated", **SETTINGS, divergence=most)).head_calls for most in (1e-3, 1e30)
    )
    assert far == 2 < near <= 12
    both = Request(1, method="calibrated", **SETTINGS, head_calls=near, divergence=1e-3)
    assert own.resolve(both) == own.resolve(both.but(head_calls=None))  # which resolves to itself
    with pytest.raises(ValueError, match="head_calls"):
        own.resolve(both.but(head_calls=2))


@pytest.mark.parametrize("bias", [torch.nan, 1e30])
def test_a_model_whose_chains_are_not_finite_is_told(bias, small_mar, engine):
    broken = copy.deepcopy(small_mar)
    broken.head.final_layer.linear.bias += bias
    with pytest.raises(ValueError, match="float32"):
        engine(1, broken).resolve(Request(1, method="calibrated", **SETTINGS, head_calls=6))


BAD = [
    {"head_calls": 1},
    {"head_calls": 13},
    {"divergence": 0.0},
    {"divergence": -1.0},
    {"audit": 1.5},
    {"audit": -0.1},
    {"audit": 1e-9},
    {"null_every": 0},
    {"audit": 0.1, "temperature": 0.0},
    {"divergence": 0.1, "temperature": 0.0},
]


@pytest.mark.parametrize("change", BAD)
def test_bad_settings_are_told(engine, change):
    with pytest.raises(ValueError, match=next(iter(change))):
        engine(1).check(Request(1, method="calibrated", **SETTINGS | change))
