"""The cost model picks windows from what it predicts; it is measured once and cached."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from heads import FP32, MIXTURE, Case, fitted_mixture  # noqa: F401 - a fixture
from toys import CPU

from cspd import files
from cspd.continuous import tuning
from cspd.continuous.tuning import Costs, measure, measured_costs
from cspd.device import Precision
from cspd.heads.calibration import WINDOWS
from cspd.method import GAIN, PLAIN

ROWS = (1, 4, 16, 64)
CALLS_MATTER, INPUTS_MATTER = (1e-3, 1e-9), (1e-9, 1e-3)  # seconds per call, and per input


def costs(call, row, table_size=10**9) -> Costs:
    """Costs of a device on which a head call takes `call` seconds, and `row` more for each input."""
    inputs = [8 * rows for rows in ROWS]
    ancestral, rounds = ([call + row * size for size in sizes] for sizes in (ROWS, inputs))
    return Costs([*ROWS], ancestral, [row / 10] * len(ROWS), inputs, rounds, table_size)


def window_of(model: Costs, num_steps: int, rows: float, calibration) -> int:
    return model.choose(num_steps, rows, lambda: calibration).config["window"]


def test_windows_follow_the_costs(mixture):
    def window(model, rows=4):
        return window_of(model, 60, rows, mixture)

    assert window(costs(*CALLS_MATTER)) >= 16  # a call costs the same however large it is: few calls
    assert window(costs(*INPUTS_MATTER)) == 0  # rounds evaluate more than ancestral steps
    by_input_cost = [window(costs(1e-3, row)) for row in (1e-9, 3e-5, 1e-4, 2e-4, 1e-3)]
    assert by_input_cost == sorted(by_input_cost, reverse=True) and len(set(by_input_cost)) >= 4
    by_rows = [window(costs(1e-3, 3e-5), rows) for rows in (1, 4, 16, 64)]
    assert by_rows == sorted(by_rows, reverse=True) and by_rows[0] > by_rows[-1]
    assert window(dataclasses.replace(costs(*CALLS_MATTER), round=[1.0] * 4)) == 0
    assert window(costs(*CALLS_MATTER, table_size=4 * 60 - 1)) == 0
    assert window(costs(*CALLS_MATTER, table_size=4 * 60)) > 0
    of_seven = Case(MIXTURE, torch.zeros(1, 1, 3), 7).calibration()
    assert 0 < window_of(costs(*CALLS_MATTER), 7, 1, of_seven) <= 7  # no longer than the lags


def test_the_window_is_the_best_prediction_if_that_gains_enough(mixture):
    rng, picked = np.random.default_rng(0), []
    for _ in range(60):
        call, row, rows = 10 ** rng.uniform(-5, -3), 10 ** rng.uniform(-7, -4), 10 ** rng.uniform(0, 2.5)
        model = costs(call, row)
        seconds = {w: model.head_seconds(60, rows, w, calls) for w, calls in zip(WINDOWS, mixture.calls)}
        window, baseline = window_of(model, 60, rows, mixture), model.head_seconds(60, rows, 0)
        assert (min(seconds.values()) < GAIN * baseline) == (window > 0)
        assert window == 0 or seconds[window] == min(seconds.values())
        picked.append(window)
    assert 5 < picked.count(0) < 50 and len(set(picked)) > 3


def test_the_printed_reason_is_that_of_the_choice(mixture):
    """One number decides and is printed: the gain of the best window, its upper bound, or the memory."""
    calibrated = []

    def choose(model):
        calibrated.clear()
        return model.choose(60, 4, lambda: calibrated.append(1) or mixture)

    of_mixture = dict(zip(WINDOWS, mixture.calls))
    fewest = {window: np.array([1 + math.ceil(59 / window)]) for window in WINDOWS}
    kinds = set()
    for row in np.geomspace(1e-9, 1e-3, 60):
        model = costs(1e-3, row)
        config, why = choose(model)
        calls = of_mixture if calibrated else fewest
        best = min(model.head_seconds(60, 4, window, own) for window, own in calls.items())
        assert f"{model.head_seconds(60, 4, 0) / best:.2f} times" in why
        assert (config == PLAIN) == (f"under the {1 / GAIN:.2f}" in why)
        kinds.add((config == PLAIN, bool(calibrated)))
    assert kinds == {(False, True), (True, True), (True, False)}
    config, why = choose(costs(*CALLS_MATTER, table_size=4 * 30))
    assert config == PLAIN and "2.00 times the memory" in why and not calibrated


def test_head_seconds_are_interpolated_between_the_measured_sizes():
    model = costs(2.0, 1.0)
    for rows, seconds in ((0.5, 3), (1, 3), (2.5, 4.5), (16, 18), (64, 66), (128, 132)):  # beyond: proportional
        assert model.head_seconds(100, rows, 0) == pytest.approx(100 * seconds)
    calls = np.full(50, 11)  # all chains end together: the first call, then ten rounds of 3 x 4 inputs
    assert model.head_seconds(100, 3, 4, calls) == pytest.approx(100 * 0.1 + 10 * (2 + 12))


@pytest.mark.parametrize("rows", [1, 3, 10])
def test_head_seconds_of_chains_that_end_one_by_one_are_those_of_a_simulation(rows, mixture):
    """Each round costs what the chains still running cost."""
    model, calls, rng = costs(1e-3, 1e-5), mixture.calls[WINDOWS.index(8)], np.random.default_rng(0)
    total = []
    for _ in range(1000):
        drawn = rng.choice(calls, rows)
        running = [(drawn > r).sum() for r in range(1, drawn.max())]
        total.append(60 * 1e-6 + sum(1e-3 + 1e-5 * max(8, 8 * n) for n in running))
    assert model.head_seconds(60, rows, 8, calls) == pytest.approx(np.mean(total), rel=0.01)


def test_costs_are_measured_once_and_cached(small_mar, tmp_path, monkeypatch):
    measured = []

    def spy(head, guided, *args):
        measured.append(guided)
        return costs(1e-3 * len(measured), 1e-6)

    monkeypatch.setattr(tuning, "measure", spy)

    def get(guided=True, policy="fp32", compiled=False, graphs=False, folder=tmp_path / "cache", **again) -> Costs:
        return measured_costs(small_mar.head, guided, CPU, Precision(policy, CPU), compiled, graphs, folder, **again)

    first = get()
    assert get() == first == costs(1e-3, 1e-6) and measured == [True]
    others = [get(guided=False), get(policy="bf16"), get(compiled=True), get(graphs=True)]
    assert measured == [True, False, True, True, True] and get() == first and get(guided=False) == others[0]
    assert get(again=True) == get() == costs(6e-3, 1e-6) and get(policy="bf16") == others[1]
    (file,) = (tmp_path / "cache").iterdir()
    assert file.name == "costs.json"
    changed = json.loads(file.read_text())
    for entry in changed:
        entry["costs"]["round"][1] *= 2  # looks as right as before, but its digest differs
    for content in ("", "{}", '[{"key": 1}]', json.dumps(changed)):
        file.write_text(content)
        count = len(measured)
        assert get() == get() and len(measured) == count + 1
    assert get(folder=file / "under").rows == [*ROWS]  # cannot be written: measured each time


def test_the_cache_of_costs_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_CACHED", 2)
    for number in range(3):
        files.keep({"number": number}, costs(1e-3, 1e-6), tmp_path)
    found = [files.measured_before(Costs, {"number": number}, [tmp_path]) for number in range(3)]
    assert found == [None, costs(1e-3, 1e-6), costs(1e-3, 1e-6)]


def test_costs_of_a_busy_machine_are_not_cached(small_mar, tmp_path, monkeypatch):
    """By recorded times: a process beside this one got a core in most turns of one head call."""
    steady = {"ancestral": [1e-3, 1.1e-3, 1.1e-3], "start": [1e-4] * 3, "round": [2e-3, 2e-3, 9e-3]}
    busy = steady | {"round": [2e-3, 3e-3, 9e-3]}
    monkeypatch.setattr(tuning, "ROWS", (1, 2))

    def get(*recorded) -> Costs:
        of_sizes = iter(recorded)
        monkeypatch.setattr(tuning, "_time_one_size", lambda *chains: next(of_sizes))
        return measured_costs(small_mar.head, True, CPU, Precision("fp32", CPU), False, False, tmp_path)

    assert get(steady, busy).round == [2e-3, 3e-3] and not [*tmp_path.iterdir()]
    assert get(steady, steady).round == get().round == [2e-3, 2e-3]
    assert get().ancestral == [1e-3, 1e-3]  # as without the others


def test_measured_costs_are_those_of_the_real_head(small_mar, monkeypatch):
    monkeypatch.setattr("cspd.continuous.tuning.ROWS", (1, 4))
    monkeypatch.setattr("cspd.continuous.tuning.TURNS", 1)
    model = measure(small_mar.head, True, CPU, FP32)
    assert model.rows == [1, 4] and model.inputs == [8, 32]
    for seconds in (model.ancestral, model.start, model.round):
        assert len(seconds) == 2 and 0 < min(seconds) and max(seconds) < 1
