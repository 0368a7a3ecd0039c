"""The cost model picks windows from what it predicts; it is measured once and kept."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from heads import FP32, Case
from mixtures import CASE, MIXTURE, fitted_mixture  # noqa: F401 - fixtures
from toys import CPU

from cspd.device import Precision
from cspd.files import digest_of
from cspd.heads import tuning
from cspd.heads.calibration import WINDOWS
from cspd.heads.tuning import Costs, measure, measured_costs
from cspd.method import GAIN, PLAIN

ROWS = (1, 4, 16, 64)


def costs(call, row, table_size=10**9) -> Costs:
    """Of a device where a head call takes `call` seconds, and `row` more for each input."""
    ancestral, rounds = ([call + row * n for n in sizes] for sizes in (ROWS, [8 * r for r in ROWS]))
    return Costs([*ROWS], ancestral, [row / 10] * len(ROWS), [8 * r for r in ROWS], rounds, table_size)


def window_of(model: Costs, num_steps: int, rows: float, calibration) -> int:
    return model.choose(num_steps, rows, lambda: calibration).config["window"]


def test_windows_follow_the_costs(mixture):
    calls_matter, inputs_matter = costs(1e-3, 1e-9), costs(1e-9, 1e-3)
    assert window_of(calls_matter, 60, 4, mixture) >= 16  # a call costs the same however large it is: few of them
    assert window_of(inputs_matter, 60, 4, mixture) == 0  # rounds evaluate more than ancestral steps
    between = [window_of(costs(1e-3, row), 60, 4, mixture) for row in (1e-9, 3e-5, 1e-4, 2e-4, 1e-3)]
    assert between == sorted(between, reverse=True) and len(set(between)) >= 4
    more_rows = [window_of(costs(1e-3, 3e-5), 60, rows, mixture) for rows in (1, 4, 16, 64)]
    assert more_rows == sorted(more_rows, reverse=True) and more_rows[0] > more_rows[-1]
    assert window_of(dataclasses.replace(calls_matter, round=[1.0] * 4), 60, 4, mixture) == 0
    assert window_of(costs(1e-3, 1e-9, table_size=4 * 60 - 1), 60, 4, mixture) == 0
    assert window_of(costs(1e-3, 1e-9, table_size=4 * 60), 60, 4, mixture) > 0


def test_a_window_is_the_best_prediction_and_gains():
    rng, draft = np.random.default_rng(0), CASE.calibration()
    picked = []
    for _ in range(60):
        call, row, rows = 10 ** rng.uniform(-5, -3), 10 ** rng.uniform(-7, -4), 10 ** rng.uniform(0, 2.5)
        model = costs(call, row)
        seconds = {w: model.head_seconds(60, rows, w, calls) for w, calls in zip(WINDOWS, draft.calls)}
        window, plain = window_of(model, 60, rows, draft), model.head_seconds(60, rows, 0)
        assert (min(seconds.values()) < GAIN * plain) == (window > 0)
        assert window == 0 or seconds[window] == min(seconds.values()) < GAIN * plain
        picked.append(window)
    assert 5 < picked.count(0) < 50 and len(set(picked)) > 3


def test_the_reason_is_that_of_the_choice(mixture):
    """One number decides and is told: the gain of the best window, or what it may gain at most, or the memory."""
    calibrated = []

    def choose(model):
        calibrated.clear()
        return model.choose(60, 4, lambda: calibrated.append(1) or mixture)

    def gain_of(model, calls):
        predicted = [model.head_seconds(60, 4, window, own) for window, own in calls.items()]
        return f"{model.head_seconds(60, 4, 0) / min(predicted):.2f} times"

    of_mixture = dict(zip(WINDOWS, mixture.calls))
    best = {window: np.array([1 + math.ceil(59 / window)]) for window in WINDOWS}
    kinds = set()
    for row in np.geomspace(1e-9, 1e-3, 60):
        model = costs(1e-3, row)
        way, why = choose(model)
        assert (way == PLAIN) == (f"under the {1 / GAIN:.2f}" in why)
        assert gain_of(model, of_mixture if calibrated else best) in why
        kinds.add((way == PLAIN, bool(calibrated)))
    assert kinds == {(False, True), (True, True), (True, False)}
    way, why = choose(costs(1e-3, 1e-9, table_size=4 * 30))
    assert way == PLAIN and "2.00 times the memory" in why and not calibrated


def test_windows_are_no_longer_than_the_lags():
    case = Case(MIXTURE, torch.zeros(1, 1, 3), 7)
    draft = case.calibration()
    assert 0 < window_of(costs(1e-3, 1e-9), 7, 1, draft) <= 7


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
    written = file.read_text()
    changed = json.loads(written)
    changed[0]["costs"]["round"][1] *= 2
    of_older_version = [{name: entry[name] for name in ("key", "costs")} for entry in json.loads(written)]
    for entries in (changed, of_older_version):  # as right as the others to look at
        file.write_text(json.dumps(entries))
        count = len(measured)
        assert get(guided=False) == costs(1e-3 * len(measured), 1e-6) and len(measured) == count + 1
    file.write_text(written)
    whole = json.loads(written)[0]
    other = {"key": whole["key"], "costs": whole["costs"] | {"round": [math.nan, 1.0, 1.0, 1.0]}}
    wrong = json.dumps([other | {"digest": digest_of({}, other)}])
    for content in ("", "[{]", "{}", "[1]", '[{"key": 1}]', wrong):
        file.write_text(content)
        count = len(measured)
        assert get() == get() and len(measured) == count + 1
    assert get(folder=file / "under").rows == [*ROWS]  # not writable: measured each time


def test_measured_costs_are_of_the_real_head(small_mar, monkeypatch):
    monkeypatch.setattr("cspd.heads.tuning.ROWS", (1, 4))
    monkeypatch.setattr("cspd.heads.tuning.REPEATS", 1)
    model = measure(small_mar.head, True, CPU, FP32)
    assert model.rows == [1, 4] and model.inputs == [8, 32]
    for seconds in (model.ancestral, model.start, model.round):
        assert len(seconds) == 2 and 0 < min(seconds) and max(seconds) < 1
