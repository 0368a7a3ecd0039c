"""Calibrations: the fit, and where it is stored."""

from __future__ import annotations

import copy
import dataclasses
import pwd
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heads import FP32, LINEAR, ONE_GAUSSIAN, SIXTY, Case, fitted_mixture  # noqa: F401 - a fixture
from toys import CPU

import cspd
from cspd import Request, files, terminal
from cspd.continuous import calibrations as fits
from cspd.continuous.calibrations import Calibrations, trace
from cspd.device import Precision
from cspd.files import CALIBRATION, content_hash, user_cache
from cspd.graphs import programs_folder
from cspd.heads.calibrated import HEAD_CALLS, Predictor, Shortcut
from cspd.heads.calibration import WINDOWS, fit
from cspd.masked.runner import MARRunner
from cspd.models import bundled
from mar.head import schedule


@pytest.mark.parametrize("num_steps", [10, 100])
def test_a_linear_head_is_drafted_without_error(num_steps):
    """Except from x_T, where eps' and x' are nearly the same and the ridge decides: at most one more call."""
    case = Case(LINEAR, ONE_GAUSSIAN, num_steps, temperature=0.9)
    draft = case.calibration()
    for window, calls in zip(WINDOWS, draft.calls):
        fewest = 1 + -(-(num_steps - 1) // min(window, num_steps))
        assert calls.min() == fewest and calls.max() <= fewest + 1
    for window in (4, 10):
        record = case.speculative(draft, window, 50, seed=1).record
        assert (record[:, : num_steps - 2] >= 0).all()


@pytest.mark.parametrize("window", [2, 12, 32])
@pytest.mark.parametrize("frozen", [False, True])
def test_calls_are_predicted(window, frozen, mixture):
    """A frozen draft's errors last, so that its acceptances come together: it is predicted a little less well."""
    draft = SIXTY.calibration(frozen=True) if frozen else mixture
    measured = (SIXTY.speculative(draft, window, 400, seed=1).record != 0).sum(1).double()
    predicted = draft.calls[WINDOWS.index(window)]
    assert predicted.mean() == pytest.approx(measured.mean().item(), rel=0.1 if frozen else 0.04)
    assert predicted.std() == pytest.approx(measured.std().item(), rel=0.3)


def test_a_fitted_draft_needs_fewer_calls_than_a_frozen_one(mixture):
    frozen, twelve = SIXTY.calibration(frozen=True), WINDOWS.index(12)
    assert mixture.calls[twelve].mean() < 0.6 * frozen.calls[twelve].mean()
    assert (frozen.coefficients == [0, 1, 0]).all() and not frozen.drift.any()
    assert frozen.coefficients.shape == (60, 32, 3) and frozen.calls.shape == (len(WINDOWS), 256)
    assert frozen.calls.dtype == np.int16


def test_the_fit_is_weighted_least_squares(mixture):
    """As small a residual as numpy's, at a few steps and lags; lags beyond T - 1 stay frozen."""
    (x, eps, v), s = (each.double().numpy() for each in SIXTY.trace(256, 2**40).chains), schedule(60)
    for k, lag in [(1, 1), (1, 2), (1, 32), (5, 3), (30, 12), (30, 28), (50, 1)]:
        root_weight = np.exp(-s.log_sigma_slope[k] * v[k]).ravel()
        features = np.stack([x[k].ravel(), eps[k + lag].ravel(), x[k + lag].ravel()], axis=1)
        best = np.linalg.lstsq(features * root_weight[:, None], eps[k].ravel() * root_weight, rcond=None)[0]
        errors = [(features @ c - eps[k].ravel()) * root_weight for c in (mixture.coefficients[k, lag - 1], best)]
        fitted, smallest = (np.square(error).mean() ** 0.5 for error in errors)
        assert fitted == pytest.approx(smallest, rel=1e-4)
        assert mixture.drift[k, lag - 1] == pytest.approx((v[k] - v[k + lag]).mean(), abs=1e-5)
    assert mixture.coefficients[30, 29:].tolist() == [[0, 1, 0]] * 3 and not mixture.drift[30, 29:].any()


def test_a_calibration_of_another_shape_or_with_nan_is_an_error(mixture):
    mixture.check(60)
    drift = mixture.drift.copy()
    drift[3, 3] = np.nan
    for draft, num_steps in ((mixture, 50), (dataclasses.replace(mixture, drift=drift), 60)):
        with pytest.raises(ValueError):
            draft.check(num_steps)


def test_the_fit_leaves_out_chains_that_are_not_finite():
    traces = torch.stack(SIXTY.trace(256, 2**40).chains)
    expected = fit(*traces, SIXTY.schedule, SIXTY.temperature)
    with_nan = torch.cat([traces, torch.full_like(traces[:, :, :2], torch.nan)], dim=2)
    draft = fit(*with_nan, SIXTY.schedule, SIXTY.temperature)
    assert np.array_equal(draft.coefficients, expected.coefficients) and np.array_equal(draft.drift, expected.drift)
    assert (draft.calls[:, -2:] == 60).all()  # their drafts are never accepted
    draft.check(60)


@pytest.mark.parametrize("value", [torch.nan, 1e30])
def test_chains_that_cannot_be_fitted_give_frozen_drafts(value):
    draft = fit(*torch.full((3, 6, 8, 4), value), schedule(6), 1.0)
    assert (draft.coefficients == [0, 1, 0]).all() and not draft.drift.any()
    draft.check(6)


# ---- Calibrations are fitted to the sampler's own traces, and cached under the settings that they depend on


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


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))


@pytest.fixture
def made(monkeypatch):
    """One entry for each fit."""
    made = []

    def spy(x, eps, v, s, temperature, frozen):
        made.append(temperature)
        return fit(x, eps, v, s, temperature, frozen)

    monkeypatch.setattr(fits, "fit", spy)
    return made


@pytest.fixture
def calibrations(small_mar, tmp_path):
    """Makes `Calibrations` of the small model with some cache folders."""
    return lambda *folders, model=small_mar, policy="fp32": Calibrations(
        model, Precision(policy, CPU), folders or [tmp_path / "cache"], MARRunner
    )


def test_traces_are_the_samplers_own(small_mar):
    """256 tokens, 8 iterations of 4 images; a step's states follow from the one before."""
    x, eps, v = trace(small_mar, REQUEST, FP32, MARRunner).chains
    assert x.shape == eps.shape == v.shape == (6, 256, 16) and len(x[5].unique(dim=0)) == 256
    s = schedule(6)
    for t in range(1, 6):
        sigma = 0.9 * torch.exp(s.log_sigma_base[t] + s.log_sigma_slope[t] * v[t])
        noise = (x[t - 1] - s.mean_x[t] * x[t] - s.mean_eps[t] * eps[t]) / sigma
        assert abs(noise.mean()) < 4 / noise.numel() ** 0.5 and abs(noise.std() - 1) < 4 / noise.numel() ** 0.5
    assert not torch.equal(x, trace(small_mar, REQUEST.but(cfg=1.0), FP32, MARRunner).x)


def test_a_calibration_is_fitted_once_and_read_by_others(calibrations, made, tmp_path):
    first = calibrations()
    ours = first.get(REQUEST)
    again = REQUEST.but(label=3, seed=9, num_iter=5, window=4)  # it does not depend on these
    assert first.get(again) is ours and len(made) == 1
    assert same(calibrations().get(REQUEST), ours) and len(made) == 1
    assert len([*(tmp_path / "cache").iterdir()]) == 1  # no temporary file stays
    assert first.folder_of(REQUEST) == tmp_path / "cache"


def test_other_settings_or_weights_have_other_calibrations(calibrations, made, small_mar, tmp_path):
    calibrations().get(REQUEST)
    changes = {
        "cfg": 2.5,
        "cfg_schedule": "constant",
        "temperature": 1.0,
        "num_sampling_steps": 7,
        "draft": "frozen",
    }
    requests = [REQUEST.but(cfg=1.0), *(REQUEST.but(**{name: value}) for name, value in changes.items())]
    for count, request in enumerate(requests, 2):
        assert calibrations().folder_of(request) is None
        calibrations().get(request)
        assert len(made) == count == len([*(tmp_path / "cache").iterdir()])
    calibrations(policy="bf16").get(REQUEST)
    other = copy.deepcopy(small_mar)
    other.head.input_proj.bias[0] += 1e-3
    calibrations(model=other).get(REQUEST)
    assert len(made) == len(requests) + 3
    unguided = REQUEST.but(cfg=1.0, cfg_schedule="constant")  # without guidance its schedule does not matter
    for request in (REQUEST, *requests, unguided):  # all of them are cached
        calibrations().get(request)
    assert len(made) == len(requests) + 3


@pytest.mark.parametrize("damage", ["empty", "truncated", "of other settings"])
def test_a_damaged_file_is_fitted_again(damage, calibrations, made, tmp_path):
    ours = calibrations().get(REQUEST)
    (file,) = (tmp_path / "cache").iterdir()
    content = file.read_bytes()
    damaged = {"empty": b"", "truncated": content[:-100], "of other settings": content.replace(b"linear", b"cosine")}
    file.write_bytes(damaged[damage])
    for _ in range(2):
        assert same(calibrations().get(REQUEST), ours) and len(made) == 2
    assert [*(tmp_path / "cache").iterdir()] == [file] and file.read_bytes() == content


@dataclasses.dataclass
class Columns:
    first: np.ndarray
    second: np.ndarray

    def check(self, num_steps):
        pass


def test_columns_of_an_array_are_read_as_they_were_written(tmp_path):
    settings = {"num_sampling_steps": 5}
    made = Columns(*np.arange(8, dtype=np.int16).reshape(4, 2).T)  # not contiguous
    files.FileCache([tmp_path]).get(Columns, settings, lambda: made)
    read = files.FileCache([tmp_path]).find(Columns, settings)
    assert read is not None and same(read, made)


def test_memory_does_not_grow_with_the_settings(calibrations, monkeypatch):
    monkeypatch.setattr(files, "REMEMBERED", 2)
    ours = calibrations()
    for cfg in (1.0, 2.0, 3.0, 1.0):
        request = REQUEST.but(draft="frozen", num_sampling_steps=3, cfg=cfg)
        assert ours.get(request) is ours.get(request)
        assert len(ours._cache._remembered) <= 2


def test_the_cache_has_a_limit(tmp_path, monkeypatch):
    """What was used last stays; files of others are not touched."""
    monkeypatch.setattr(files, "MOST_CACHED", 2)
    monkeypatch.setattr(files, "user_cache", lambda: tmp_path)  # other folders keep all
    (tmp_path / "model-00001-of-00002.safetensors").write_text("")
    made = Columns(*np.zeros((2, 3), np.int16))

    def find(steps):
        time.sleep(0.01)  # the times of files are exact to some milliseconds
        return files.FileCache([tmp_path]).find(Columns, {"num_sampling_steps": steps}) is not None

    for steps in (0, 1, 2):
        files.FileCache([tmp_path]).get(Columns, {"num_sampling_steps": steps}, lambda: made)
        assert find(0)
    assert [find(steps) for steps in (0, 1, 2)] == [True, False, True]
    assert len([*tmp_path.iterdir()]) == 3


def test_the_next_folder_is_used_if_the_first_cannot_be_written(calibrations, made, tmp_path):
    (tmp_path / "file").write_text("")
    folders = tmp_path / "file" / "under", tmp_path / "second"
    ours = calibrations(*folders).get(REQUEST)
    assert same(calibrations(*folders).get(REQUEST), ours) and len(made) == 1
    assert calibrations(*folders).folder_of(REQUEST) == folders[1] and len([*folders[1].iterdir()]) == 1
    uncached = calibrations(folders[0])
    with pytest.warns(UserWarning):
        assert same(uncached.get(REQUEST), ours)
    assert uncached.get(REQUEST) is uncached.get(REQUEST) and len(made) == 2  # still only once


def test_folders_of_bundled_models_are_read_and_never_written(calibrations, made, tmp_path, monkeypatch):
    """If a bundled fit is damaged, the user's cache has one in its place."""
    monkeypatch.setattr(files, "BUNDLED_ROOTS", (tmp_path / "nowhere", tmp_path / "bundled"))
    folders = bundled, cache = tmp_path / "bundled" / "model" / "calibration", tmp_path / "cache"
    ours = calibrations(tmp_path / "other").get(REQUEST)
    shutil.copytree(tmp_path / "other", bundled)
    assert same(calibrations(*folders).get(REQUEST), ours) and len(made) == 1
    assert calibrations(*folders).folder_of(REQUEST) == bundled
    (file,) = bundled.iterdir()
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 0x80  # the sign of one number
    file.write_bytes(damaged)
    for _ in range(2):
        assert same(calibrations(*folders).get(REQUEST), ours) and len(made) == 2
    assert calibrations(*folders).folder_of(REQUEST) == cache
    with pytest.warns(UserWarning):
        calibrations(bundled).get(REQUEST.but(cfg=1.0))
    assert [*bundled.iterdir()] == [file] and file.read_bytes() == damaged


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["digits32", "emoji64", "emoji64_sphere"])
def test_bundled_models_are_calibrated(name, device, monkeypatch):
    """At their usual settings and for every device: a fit from one device is right on another."""
    monkeypatch.setattr(fits, "trace", None)  # nothing is fitted
    engine = cspd.load(name, device="cpu", max_batch=1)
    folders = [bundled()[name] / CALIBRATION]
    ours = Calibrations(engine.runner.target, Precision("fp32", torch.device(device)), folders, MARRunner)
    speculative, calibrated = (engine.check(Request(0, method=method)) for method in ("speculative", "calibrated"))
    assert ours.get(speculative).calls.mean() < 50
    assert len(ours.plan(calibrated, HEAD_CALLS).steps) == HEAD_CALLS
    assert ours.shortcut(calibrated.but(head_calls=HEAD_CALLS)).difference < 0.1
    assert engine.resolve(calibrated).head_calls == HEAD_CALLS  # by `load`, too


def test_a_fit_is_announced_once(calibrations, monkeypatch, capsys):
    """The predictor and the windows of `calibrated` are two fits; one line has the time of both."""
    own = calibrations()
    assert own.folder_of(REQUEST) is None
    monkeypatch.setattr(terminal, "PATIENCE", 0.0)
    request = REQUEST.but(method="calibrated", draft=None, window=None, null_every=1, head_calls=3)
    with own.fitting(request, Predictor, Shortcut):
        own.plan(request, 3)
        own.shortcut(request)
    printed = capsys.readouterr().err
    assert re.fullmatch(r"cspd: [^\n]*`calibrated`[^\n]* cfg=2, [^\n]*: about \d+ s\n", printed)
    with own.fitting(request, Predictor, Shortcut):
        own.shortcut(request)
    own.get(REQUEST)  # from the same tokens
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "speculative" in printed


def test_the_cache_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "cspd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache().is_relative_to(Path.home())


def no_such_user(uid):
    raise KeyError(uid)


def test_without_a_home_directory_the_cache_ends_with_the_process(monkeypatch, tmp_path):
    """As in a container with a user that it does not know: newer versions of platformdirs raise an error there."""
    for name in ("HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_such_user)
    monkeypatch.chdir(tmp_path)
    folder = user_cache()
    assert folder == user_cache() and folder.is_dir() and folder.stat().st_mode & 0o077 == 0
    assert programs_folder().is_absolute() and not list(tmp_path.iterdir())


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
