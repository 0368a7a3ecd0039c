"""Calibrations: the fit, and where it is stored."""

from __future__ import annotations

import copy
import dataclasses
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from heads import FP32, Case, MixtureHead
from mixtures import CASE, fitted_mixture  # noqa: F401 - fixtures
from safetensors import safe_open
from safetensors.numpy import save_file
from toys import CPU

import cspd
from cspd import Request, files, terminal
from cspd.device import Precision
from cspd.files import CALIBRATION, content_hash, user_cache
from cspd.heads import tuning
from cspd.heads.calibrated import HEAD_CALLS, Predictor, Shortcut
from cspd.heads.calibration import WINDOWS, Calibration, fit, trace
from cspd.heads.tuning import Calibrations
from cspd.heads.verify import move
from cspd.masked.runner import MARRunner
from cspd.models import bundled
from mar.head import schedule


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


def test_what_is_wrong_with_a_calibration_is_said(mixture):
    mixture.check(60)
    with pytest.raises(ValueError, match="float32"):
        mixture.check(50)
    drift = mixture.drift.copy()
    drift[3, 3] = np.nan
    with pytest.raises(ValueError):
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


def test_a_round_that_decides_no_step_is_an_error(mixture):
    """And not a loop without end."""
    chains = CASE.chains(mixture, 4)
    CASE.start(chains, 3, seed=1)
    chains._move = lambda *args: move(*args)._replace(left=CASE.num_steps - 1 - torch.tensor([1, 0, 2]))
    with pytest.raises(RuntimeError):
        chains.advance()


# ---- Calibrations are fitted to the sampler's own traces, and kept on disk as what they were made for


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
        model, CPU, Precision(policy, CPU), folders or [tmp_path / "kept"], MARRunner
    )


def test_traces_are_the_samplers_own(small_mar):
    """256 tokens, 8 iterations of 4 images; a step's states follow from the one before."""
    x, eps, v = trace(small_mar, REQUEST, CPU, FP32, MARRunner).chains
    assert x.shape == eps.shape == v.shape == (6, 256, 16) and len(x[5].unique(dim=0)) == 256
    s = schedule(6)
    for t in range(1, 6):
        sigma = 0.9 * torch.exp(s.log_sigma_base[t] + s.log_sigma_slope[t] * v[t])
        noise = (x[t - 1] - s.mean_x[t] * x[t] - s.mean_eps[t] * eps[t]) / sigma
        assert abs(noise.mean()) < 4 / noise.numel() ** 0.5 and abs(noise.std() - 1) < 4 / noise.numel() ** 0.5
    assert not torch.equal(x, trace(small_mar, dataclasses.replace(REQUEST, cfg=1.0), CPU, FP32, MARRunner).x)


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
        with pytest.warns(UserWarning):
            assert same(calibrations().get(REQUEST), ours)
        assert [*(tmp_path / "kept").iterdir()] == [file]
        return
    assert same(calibrations().get(REQUEST), ours) and len(made) == 2
    assert same(calibrations().get(REQUEST), ours) and len(made) == 2
    assert [*(tmp_path / "kept").iterdir()] == [file] and file.read_bytes() == content


def spoil(file: Path, change) -> None:
    """Changes the arrays of a file and leaves its metadata."""
    with safe_open(file, "np") as kept:
        arrays, metadata = {name: kept.get_tensor(name) for name in kept.keys()}, kept.metadata()
    change(arrays, metadata)
    save_file({name: np.ascontiguousarray(values) for name, values in arrays.items()}, file, metadata)


def flip(arrays, metadata):
    """The sign of one number that is not 0."""
    place = tuple(np.argwhere(arrays["coefficients"])[-1])
    arrays["coefficients"][place] *= -1


def test_memory_does_not_grow_with_the_settings(calibrations, monkeypatch):
    monkeypatch.setattr(files, "REMEMBERED", 2)
    ours = calibrations()
    for cfg in (1.0, 2.0, 3.0, 1.0):
        request = dataclasses.replace(REQUEST, draft="frozen", num_sampling_steps=3, cfg=cfg)
        assert ours.get(request) is ours.get(request)
        assert len(ours._cache._remembered) <= 2


def test_the_next_folder_where_the_first_cannot_be_written(calibrations, made, tmp_path):
    (tmp_path / "file").write_text("")
    folders = tmp_path / "file" / "under", tmp_path / "second"
    ours = calibrations(*folders).get(REQUEST)
    assert same(calibrations(*folders).get(REQUEST), ours) and len(made) == 1
    assert calibrations(*folders).folder_of(REQUEST) == folders[1] and len([*folders[1].iterdir()]) == 1
    with pytest.warns(UserWarning):
        unkept = calibrations(folders[0])
        assert same(unkept.get(REQUEST), ours)
    assert unkept.get(REQUEST) is unkept.get(REQUEST) and len(made) == 2  # still only once


def test_nothing_is_kept_with_bundled_checkpoints(calibrations, made, tmp_path, monkeypatch):
    """What came with them is read; the user's cache has the fit that takes the place of what is damaged there."""
    monkeypatch.setattr(files, "BUNDLED_ROOTS", (tmp_path / "nowhere", tmp_path / "bundled"))
    folders = bundled, cache = tmp_path / "bundled" / "model" / "calibration", tmp_path / "cache"
    ours = calibrations(bundled.parent.parent.parent / "other").get(REQUEST)
    shutil.copytree(tmp_path / "other", bundled)
    assert same(calibrations(*folders).get(REQUEST), ours) and len(made) == 1
    assert calibrations(*folders).folder_of(REQUEST) == bundled
    (file,) = bundled.iterdir()
    spoil(file, flip)
    damaged = file.read_bytes()
    assert same(calibrations(*folders).get(REQUEST), ours) and len(made) == 2
    assert calibrations(*folders).folder_of(REQUEST) == cache
    assert [*bundled.iterdir()] == [file] and file.read_bytes() == damaged
    assert same(calibrations(*folders).get(REQUEST), ours) and len(made) == 2
    with pytest.warns(UserWarning):
        calibrations(bundled).get(REQUEST.but(cfg=1.0))
    assert [*bundled.iterdir()] == [file]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["digits32", "emoji64"])
def test_the_bundled_models_are_calibrated(name, device, monkeypatch):
    """At their usual settings, and for every device: what was fitted on one is as right on another."""
    monkeypatch.setattr(tuning, "trace", None)  # nothing is fitted
    engine = cspd.load(name, device="cpu", max_batch=1)
    precision = Precision("fp32", CPU)
    ours = Calibrations(
        engine.runner.target, torch.device(device), precision, [bundled()[name] / CALIBRATION], MARRunner
    )
    speculative, calibrated = (engine.check(Request(0, method=method)) for method in ("speculative", "calibrated"))
    assert ours.get(speculative).calls.mean() < 50
    assert len(ours.plan(calibrated, HEAD_CALLS).steps) == HEAD_CALLS
    assert ours.shortcut(calibrated.but(head_calls=HEAD_CALLS)).difference < 0.1
    assert engine.resolve(calibrated).head_calls == HEAD_CALLS  # by `load`, too


def test_a_fit_is_told_of_once(calibrations, monkeypatch, capsys):
    """The predictions and the windows of `calibrated` are fits of their own, and one line has the time for both."""
    own = calibrations()
    assert own.folder_of(REQUEST) is None
    monkeypatch.setattr(terminal, "PATIENCE", 0.0)
    request = REQUEST.but(method="calibrated", draft=None, window=None, null_every=1, head_calls=3)
    with own.fitting(request, Predictor, Shortcut):
        own.plan(request, 3)
        own.shortcut(request)
    told = capsys.readouterr().err
    assert re.fullmatch(r"cspd: [^\n]*`calibrated`[^\n]* cfg=2, [^\n]*: about \d+ s\n", told)
    with own.fitting(request, Predictor, Shortcut):
        own.shortcut(request)
    own.get(REQUEST)  # of the same tokens
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "speculative" in told


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
