"""The fitted draft is the best linear one and its calls are foretold; it is kept on disk as what it was made for.

The cost model picks windows from what it predicts.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from heads import FP32, Case, MixtureHead
from safetensors import safe_open
from safetensors.numpy import save_file

from cspd import Request, keeping
from cspd.continuous import tuning
from cspd.continuous.calibration import WINDOWS, Calibration, fit
from cspd.continuous.costs import GAIN, Costs, measure
from cspd.continuous.draft_verify import move
from cspd.continuous.tracing import trace
from cspd.continuous.tuning import Calibrations, measured_costs
from cspd.keeping import content_hash, user_cache
from cspd.precision import Precision
from mar.diffusion import schedule

CPU = torch.device("cpu")
MIXTURE = MixtureHead([[0.9, -0.6, 0.2], [-0.4, 0.7, 1.0], [0.1, -0.2, -1.1]], (0.05, 0.1, 0.2), (0.5, 0.3, 0.2), 0.3)
CASE = Case(MIXTURE, torch.zeros(1, 1, 3), 60)


@pytest.fixture(scope="module")
def mixture() -> Calibration:
    return CASE.calibration()


@pytest.mark.parametrize("num_steps", [10, 100])
def test_a_linear_head_is_drafted_without_error(num_steps):
    """But from x_T, where eps' and x' are nearly the same and the ridge rules: a call more at most."""
    case = Case(MixtureHead(torch.zeros(1, 3), (0.5,)), torch.tensor([[[1.0, -0.5, 2.0]]]), num_steps, temperature=0.9)
    draft = case.calibration()
    for window, calls in zip(WINDOWS, draft.calls):
        least = 1 + -(-(num_steps - 1) // min(window, num_steps))
        assert calls.min() == least and calls.max() <= least + 1
    for window in (4, 10):
        record = case.speculative(draft, window, 50, seed=1).record
        assert (record[:, : num_steps - 2] >= 0).all()


@pytest.mark.parametrize("window", [2, 4, 12, 32])
@pytest.mark.parametrize("frozen", [False, True])
def test_calls_are_foretold(window, frozen, mixture):
    """A frozen draft's errors last, so that its hits come together: a little less exactly."""
    draft = CASE.calibration(frozen=True) if frozen else mixture
    measured = (CASE.speculative(draft, window, 400, seed=1).record != 0).sum(1).double()
    foretold = draft.calls[WINDOWS.index(window)]
    assert foretold.mean() == pytest.approx(measured.mean().item(), rel=0.1 if frozen else 0.04)
    assert foretold.std() == pytest.approx(measured.std().item(), rel=0.3)


def test_the_fit_pays(mixture):
    twelve = WINDOWS.index(12)
    assert mixture.calls[twelve].mean() < 0.6 * CASE.calibration(frozen=True).calls[twelve].mean()


def test_the_fit_is_weighted_least_squares(mixture):
    """Against numpy's, at a few steps and lags: as small a residual; lags beyond T - 1 stay frozen."""
    (x, eps, v), s = CASE.traces(256, 2**40).double().numpy(), schedule(60)
    for k, lag in [(1, 1), (1, 2), (1, 32), (5, 3), (30, 12), (30, 28), (50, 1)]:
        root_weight = np.exp(-s.log_sigma_slope[k] * v[k]).ravel()
        features = np.stack([x[k].ravel(), eps[k + lag].ravel(), x[k + lag].ravel()], axis=1)
        best = np.linalg.lstsq(features * root_weight[:, None], eps[k].ravel() * root_weight, rcond=None)[0]
        errors = [(features @ c - eps[k].ravel()) * root_weight for c in (mixture.coefficients[k, lag - 1], best)]
        fitted, least = (np.square(error).mean() ** 0.5 for error in errors)
        assert fitted == pytest.approx(least, rel=1e-4)
        assert mixture.drift[k, lag - 1] == pytest.approx((v[k] - v[k + lag]).mean(), abs=1e-5)
    assert mixture.coefficients[30, 29:].tolist() == [[0, 1, 0]] * 3 and not mixture.drift[30, 29:].any()


def test_frozen_is_frozen():
    draft = CASE.calibration(frozen=True)
    assert (draft.coefficients == [0, 1, 0]).all() and not draft.drift.any()
    assert draft.coefficients.shape == (60, 32, 3) and draft.calls.shape == (len(WINDOWS), 256)
    assert draft.calls.dtype == np.int16


def test_few_steps_have_few_lags():
    x = torch.randn(3, 5, 8, 4, generator=torch.Generator().manual_seed(0))
    draft = fit(*x, temperature=1.0)
    assert draft.coefficients.shape == (5, 5, 3) and np.isfinite(draft.coefficients).all()
    assert (draft.calls >= 2).all() and (draft.calls <= 5).all()


REQUEST = Request(
    0,
    method="speculative",
    num_iter=3,
    cfg=2.0,
    cfg_schedule="linear",
    temperature=0.9,
    num_sampling_steps=6,
    draft="calibrated",
)


def same(a: Calibration, b: Calibration) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Calibration))


@pytest.fixture
def made(monkeypatch):
    """Temperatures of the fits that were made."""
    made = []

    def spy(x, eps, v, temperature, frozen):
        made.append(temperature)
        return fit(x, eps, v, temperature, frozen)

    monkeypatch.setattr(tuning, "fit", spy)
    return made


@pytest.fixture
def calibrations(small_mar, tmp_path):
    """Makes `Calibrations` of the small model over some folders."""
    return lambda *folders, model=small_mar, policy="fp32": Calibrations(
        model, CPU, Precision(policy, CPU), folders or [tmp_path / "kept"]
    )


def test_traces_are_the_samplers_own(small_mar):
    """256 tokens, 8 iterations of 4 images; a step's states follow from the one before."""
    x, eps, v = trace(small_mar, REQUEST, CPU, FP32).chains
    assert x.shape == eps.shape == v.shape == (6, 256, 16) and len(x[5].unique(dim=0)) == 256
    s = schedule(6)
    for t in range(1, 6):
        sigma = 0.9 * torch.exp(s.log_sigma_base[t] + s.log_sigma_slope[t] * v[t])
        noise = (x[t - 1] - s.mean_x[t] * x[t] - s.mean_eps[t] * eps[t]) / sigma
        assert abs(noise.mean()) < 4 / noise.numel() ** 0.5 and abs(noise.std() - 1) < 4 / noise.numel() ** 0.5
    assert not torch.equal(x, trace(small_mar, dataclasses.replace(REQUEST, cfg=1.0), CPU, FP32).x)


def test_made_once_and_read_by_others(calibrations, made, tmp_path):
    first = calibrations()
    ours = first.get(REQUEST)
    again = dataclasses.replace(REQUEST, label=3, seed=9, num_iter=5, window=4)  # what it does not depend on
    assert first.get(again) is ours and len(made) == 1
    assert same(calibrations().get(REQUEST), ours) and len(made) == 1
    assert len([*(tmp_path / "kept").iterdir()]) == 1  # no temporary file stays
    assert first.folder_of(REQUEST) == tmp_path / "kept"


CHANGES = {
    "cfg": {"cfg": 2.5},
    "guided": {"cfg": 1.0},
    "schedule": {"cfg_schedule": "constant"},
    "temperature": {"temperature": 1.0},
    "T": {"num_sampling_steps": 7},
    "draft": {"draft": "frozen"},
}


def test_other_settings_or_weights_are_other_calibrations(calibrations, made, small_mar, tmp_path):
    calibrations().get(REQUEST)
    for count, change in enumerate(CHANGES.values(), 2):
        changed = dataclasses.replace(REQUEST, **change)
        assert calibrations().folder_of(changed) is None
        calibrations().get(changed)
        assert len(made) == count == len([*(tmp_path / "kept").iterdir()])
    calibrations(policy="bf16").get(REQUEST)
    other = copy.deepcopy(small_mar)
    other.head.input_proj.bias[0] += 1e-3
    calibrations(model=other).get(REQUEST)
    assert len(made) == len(CHANGES) + 3
    for change in ({}, *CHANGES.values()):  # and all of them are there
        calibrations().get(dataclasses.replace(REQUEST, **change))
    unguided = dataclasses.replace(REQUEST, cfg=1.0, cfg_schedule="constant")
    calibrations().get(unguided)  # without guidance its schedule does not matter
    assert len(made) == len(CHANGES) + 3


@pytest.mark.parametrize(
    "damage", ["empty", "cut off", "cut in the header", "garbage", "of other settings", "a folder"]
)
def test_a_damaged_file_is_made_again(damage, calibrations, made, tmp_path):
    ours = calibrations().get(REQUEST)
    (file,) = (tmp_path / "kept").iterdir()
    content = file.read_bytes()
    if damage == "a folder":
        file.unlink()
        file.mkdir()
    else:
        other = {
            "empty": b"",
            "cut off": content[:-100],
            "cut in the header": content[:50],
            "garbage": bytes(range(256)) * 10,
            "of other settings": content.replace(b"linear", b"cosine"),
        }
        file.write_bytes(other[damage])
    if damage == "a folder":
        with pytest.warns(UserWarning, match="no folder is writable"):
            assert same(calibrations().get(REQUEST), ours)
        assert [*(tmp_path / "kept").iterdir()] == [file]
        return
    assert same(calibrations().get(REQUEST), ours) and len(made) == 2
    assert same(calibrations().get(REQUEST), ours) and len(made) == 2
    assert [*(tmp_path / "kept").iterdir()] == [file] and file.read_bytes() == content


WRONG = {  # of the right settings
    "a NaN": lambda c: c["coefficients"].__setitem__((2, 0, 1), np.nan),
    "an infinite drift": lambda c: c["drift"].__setitem__((2, 0), np.inf),
    "a huge coefficient": lambda c: c["coefficients"].__setitem__((2, 0, 1), 1e30),
    "drafts that grow": lambda c: c["coefficients"].fill(1e5),
    "a lag less": lambda c: c.update(coefficients=c["coefficients"][:, :-1]),
    "a step less": lambda c: c.update(drift=c["drift"][:-1]),
    "no numbers": lambda c: c.update(coefficients=np.float32(0)),
    "another dtype": lambda c: c.update(coefficients=c["coefficients"].astype(np.float64)),
    "calls of 0": lambda c: c["calls"].fill(0),
    "more calls than steps": lambda c: c["calls"].fill(7),
    "no calls": lambda c: c.update(calls=c["calls"][:, :0]),
    "calls without tokens": lambda c: c.update(calls=np.int16(3)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_calibration_that_is_no_draft_is_made_again(wrong, calibrations, made, tmp_path):
    ours = calibrations().get(REQUEST)
    (file,) = (tmp_path / "kept").iterdir()
    with safe_open(file, "np") as kept:
        arrays, metadata = {name: kept.get_tensor(name) for name in kept.keys()}, kept.metadata()
    WRONG[wrong](arrays)
    save_file({name: np.ascontiguousarray(values) for name, values in arrays.items()}, file, metadata)
    assert same(calibrations().get(REQUEST), ours) and len(made) == 2
    assert same(calibrations().get(REQUEST), ours) and len(made) == 2


def test_what_is_wrong_with_a_calibration_is_said(mixture):
    mixture.check(60)
    with pytest.raises(ValueError, match=r"coefficients are float32 \[60, 32, 3\], not float32 \[50, 32, 3\]"):
        mixture.check(50)
    drift = mixture.drift.copy()
    drift[3, 3] = np.nan
    with pytest.raises(ValueError, match=r"drift are not all in -1e\+06\.\.1e\+06"):
        dataclasses.replace(mixture, drift=drift).check(60)


def test_chains_that_are_not_finite_leave_the_fit_to_the_others():
    traces = CASE.traces(256, 2**40)
    expected = fit(*traces, CASE.temperature)
    beside = torch.cat([traces, torch.full_like(traces[:, :, :2], torch.nan)], dim=2)
    draft = fit(*beside, CASE.temperature)
    assert np.array_equal(draft.coefficients, expected.coefficients) and np.array_equal(draft.drift, expected.drift)
    assert (draft.calls[:, -2:] == 60).all()  # those are never accepted
    draft.check(60)


@pytest.mark.parametrize("value", [torch.nan, 1e30])
def test_no_fit_is_frozen(value):
    draft = fit(*torch.full((3, 6, 8, 4), value), 1.0)
    assert (draft.coefficients == [0, 1, 0]).all() and not draft.drift.any()
    draft.check(6)


def test_memory_does_not_grow_with_the_settings(calibrations, monkeypatch):
    monkeypatch.setattr(keeping, "REMEMBERED", 2)
    ours = calibrations()
    for cfg in (1.0, 2.0, 3.0, 1.0):
        request = dataclasses.replace(REQUEST, draft="frozen", num_sampling_steps=3, cfg=cfg)
        assert ours.get(request) is ours.get(request)
        assert len(ours._kept._known) <= 2


def test_a_round_that_decides_no_step_is_an_error(mixture):
    """And not a loop without end."""
    chains = CASE.chains(mixture, 4)
    CASE.start(chains, 3, seed=1)
    chains._move = lambda *args: move(*args)._replace(left=CASE.num_steps - 1 - torch.tensor([1, 0, 2]))
    with pytest.raises(RuntimeError, match="decided no step"):
        chains.advance()


def test_the_next_folder_where_the_first_cannot_be_written(calibrations, made, tmp_path):
    (tmp_path / "file").write_text("")
    folders = tmp_path / "file" / "under", tmp_path / "second"
    ours = calibrations(*folders).get(REQUEST)
    assert same(calibrations(*folders).get(REQUEST), ours) and len(made) == 1
    assert calibrations(*folders).folder_of(REQUEST) == folders[1] and len([*folders[1].iterdir()]) == 1
    with pytest.warns(UserWarning, match="no folder is writable.*under"):
        unkept = calibrations(folders[0])
        assert same(unkept.get(REQUEST), ours)
    assert unkept.get(REQUEST) is unkept.get(REQUEST) and len(made) == 2  # still only once


def test_the_cache_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "cspd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache().is_relative_to(Path.home())


def test_the_hash_depends_on_every_weight(small_mar):
    model = copy.deepcopy(small_mar)
    hashes = {content_hash(model)}
    assert hashes == {content_hash(small_mar)}
    weights = model.state_dict()
    for tensor in weights.values():
        last = tensor.view(-1)[-1:]
        before = last.clone()
        last.copy_(torch.nextafter(last, torch.full_like(last, torch.inf)))
        hashes.add(content_hash(model))
        last.copy_(before)
    assert len(hashes) == 1 + len(weights)
    assert content_hash(model) == content_hash(small_mar)
    block = model.head.res_blocks[0].mlp
    block[0].weight.data, block[2].weight.data = block[2].weight.data, block[0].weight.data
    assert content_hash(model) not in hashes


ROWS = (1, 4, 16, 64)


def costs(call, row, table_size=10**9) -> Costs:
    """Of a device where a head call takes `call` seconds, and `row` more for each input."""
    ancestral, rounds = ([call + row * n for n in sizes] for sizes in (ROWS, [8 * r for r in ROWS]))
    return Costs([*ROWS], ancestral, [row / 10] * len(ROWS), [8 * r for r in ROWS], rounds, table_size)


def test_windows_follow_the_costs(mixture):
    calls_matter, inputs_matter = costs(1e-3, 1e-9), costs(1e-9, 1e-3)
    assert calls_matter.window(60, 4, mixture) >= 16  # a call costs the same however large it is: few of them
    assert inputs_matter.window(60, 4, mixture) == 0  # rounds evaluate more than ancestral steps
    between = [costs(1e-3, row).window(60, 4, mixture) for row in (1e-9, 3e-5, 1e-4, 2e-4, 1e-3)]
    assert between == sorted(between, reverse=True) and len(set(between)) >= 4
    more_rows = [costs(1e-3, 3e-5).window(60, rows, mixture) for rows in (1, 4, 16, 64)]
    assert more_rows == sorted(more_rows, reverse=True) and more_rows[0] > more_rows[-1]
    assert dataclasses.replace(calls_matter, round=[1.0] * 4).window(60, 4, mixture) == 0
    assert costs(1e-3, 1e-9, table_size=4 * 60 - 1).window(60, 4, mixture) == 0
    assert costs(1e-3, 1e-9, table_size=4 * 60).window(60, 4, mixture) > 0


def test_a_window_is_the_best_prediction_and_gains():
    rng, draft = np.random.default_rng(0), CASE.calibration()
    picked = []
    for _ in range(60):
        call, row, rows = 10 ** rng.uniform(-5, -3), 10 ** rng.uniform(-7, -4), 10 ** rng.uniform(0, 2.5)
        model = costs(call, row)
        seconds = {w: model.head_seconds(60, rows, w, calls) for w, calls in zip(WINDOWS, draft.calls)}
        window, plain = model.window(60, rows, draft), model.head_seconds(60, rows, 0)
        assert (min(seconds.values()) < GAIN * plain) == (window > 0)
        assert window == 0 or seconds[window] == min(seconds.values()) < GAIN * plain
        picked.append(window)
    assert 5 < picked.count(0) < 50 and len(set(picked)) > 3


def test_windows_are_no_longer_than_the_lags():
    case = Case(MIXTURE, torch.zeros(1, 1, 3), 7)
    draft = case.calibration()
    assert 0 < costs(1e-3, 1e-9).window(7, 1, draft) <= 7


def test_head_seconds():
    model = costs(2.0, 1.0)
    for rows, seconds in ((0.5, 3), (1, 3), (2.5, 4.5), (16, 18), (64, 66), (128, 132)):  # beyond: proportional
        assert model.head_seconds(100, rows, 0) == pytest.approx(100 * seconds)
    calls = np.full(50, 11)  # all chains end together: the first call, then ten rounds of 3 x 4 inputs
    assert model.head_seconds(100, 3, 4, calls) == pytest.approx(100 * 0.1 + 10 * (2 + 12))


@pytest.mark.parametrize("rows", [1, 3, 10])
def test_head_seconds_of_chains_that_end_one_by_one(rows, mixture):
    """Against a simulation: a round costs what the chains still under way cost, until none is."""
    model, calls, rng = costs(1e-3, 1e-5), mixture.calls[WINDOWS.index(8)], np.random.default_rng(0)
    total = []
    for _ in range(1000):
        drawn = rng.choice(calls, rows)
        under_way = [(drawn > r).sum() for r in range(1, drawn.max())]
        total.append(60 * 1e-6 + sum(1e-3 + 1e-5 * max(8, 8 * n) for n in under_way))
    assert model.head_seconds(60, rows, 8, calls) == pytest.approx(np.mean(total), rel=0.01)


def test_costs_are_measured_once_and_kept(small_mar, tmp_path, monkeypatch):
    measured = []

    def spy(head, guided, *args):
        measured.append(guided)
        return costs(1e-3 * len(measured), 1e-6)

    monkeypatch.setattr(tuning, "measure", spy)

    def get(guided=True, policy="fp32", compiled=False, graphs=False, folder=tmp_path / "kept", **again) -> Costs:
        precision = Precision(policy, CPU)
        return measured_costs(small_mar.head, guided, CPU, precision, compiled, graphs, folder, **again)

    first = get()
    assert get() == first == costs(1e-3, 1e-6) and measured == [True]
    others = [get(guided=False), get(policy="bf16"), get(compiled=True), get(graphs=True)]
    assert measured == [True, False, True, True, True] and get() == first and get(guided=False) == others[0]
    assert get(again=True) == get() == costs(6e-3, 1e-6) and get(policy="bf16") == others[1]
    (file,) = (tmp_path / "kept").iterdir()
    assert file.name == "costs.json"
    of_other_make = [{"key": entry["key"], "costs": {"rows": [1]}} for entry in json.loads(file.read_text())]
    whole = json.loads(file.read_text())

    def spoilt(name, value):
        return json.dumps([{"key": entry["key"], "costs": entry["costs"] | {name: value}} for entry in whole])

    values = (math.nan, math.inf, -1.0, 1e300, "1", None, True, [])
    wrong = [spoilt("round", [value, 1.0, 1.0, 1.0]) for value in values]
    wrong += [spoilt("rows", [0, 1, 2, 3]), spoilt("rows", [4, 3, 2, 1]), spoilt("rows", 5), spoilt("table_size", -1)]
    wrong += [spoilt(name, [1.0] * 10**5) for name in ("ancestral", "start")] + [spoilt("start", []), "[" * 10**5]
    wrong += [json.dumps([{"key": entry["key"], "costs": value} for entry in whole]) for value in (None, [], "x", 1)]
    for content in ("", "[{]", "{}", "[1]", '[{"key": 1}]', json.dumps(of_other_make), *wrong):
        file.write_text(content)
        count = len(measured)
        assert get() == get() and len(measured) == count + 1
    assert get(folder=file / "under").rows == [*ROWS]  # not writable: measured each time


def test_measured_costs_are_of_the_real_head(small_mar, monkeypatch):
    monkeypatch.setattr("cspd.continuous.costs.ROWS", (1, 4))
    monkeypatch.setattr("cspd.continuous.costs.REPEATS", 1)
    model = measure(small_mar.head, True, CPU, FP32)
    assert model.rows == [1, 4] and model.inputs == [8, 32]
    for seconds in (model.ancestral, model.start, model.round):
        assert len(seconds) == 2 and 0 < min(seconds) and max(seconds) < 1
