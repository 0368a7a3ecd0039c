"""The cost model picks windows from what it predicts; it is measured once and cached."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from heads import FP32, MIXTURE, Case, fitted_mixture  # noqa: F401 - a fixture
from toys import CPU

from cspd.continuous import tuning
from cspd.continuous.tuning import choose_window, head_seconds, head_times, time_head
from cspd.device import Precision
from cspd.heads.calibration import WINDOWS
from cspd.tuner import GAIN, PLAIN, Times, Tuner

ROWS = (1, 4, 16, 64)
CALLS_MATTER, INPUTS_MATTER = (1e-3, 1e-9), (1e-9, 1e-3)  # seconds per call, and per input


MEMORY = 10**9  # rows times steps that fit into it


def times_of(call, row) -> Times:
    """Times of a device on which a head call takes `call` seconds, and `row` more for each input."""
    inputs = [8 * rows for rows in ROWS]
    ancestral, rounds = ([call + row * size for size in sizes] for sizes in (ROWS, inputs))
    curves = {"ancestral": [ROWS, ancestral], "start": [ROWS, [row / 10] * len(ROWS)], "round": [inputs, rounds]}
    return Times({work: np.array(curve) for work, curve in curves.items()})


def window_of(times: Times, num_steps: int, rows: float, calibration, most=MEMORY) -> int:
    return choose_window(times, most, num_steps, rows, lambda: calibration).config["window"]


def test_windows_follow_the_costs(mixture):
    def window(times, rows=4, most=MEMORY):
        return window_of(times, 60, rows, mixture, most)

    assert window(times_of(*CALLS_MATTER)) >= 16  # a call costs the same however large it is: few calls
    assert window(times_of(*INPUTS_MATTER)) == 0  # rounds evaluate more than ancestral steps
    by_input_cost = [window(times_of(1e-3, row)) for row in (1e-9, 3e-5, 1e-4, 2e-4, 1e-3)]
    assert by_input_cost == sorted(by_input_cost, reverse=True) and len(set(by_input_cost)) >= 4
    by_rows = [window(times_of(1e-3, 3e-5), rows) for rows in (1, 4, 16, 64)]
    assert by_rows == sorted(by_rows, reverse=True) and by_rows[0] > by_rows[-1]
    assert window(Times(times_of(*CALLS_MATTER) | {"round": np.array([[8, 32], [1.0, 1.0]])})) == 0
    assert window(times_of(*CALLS_MATTER), most=4 * 60 - 1) == 0
    assert window(times_of(*CALLS_MATTER), most=4 * 60) > 0
    of_seven = Case(MIXTURE, torch.zeros(1, 1, 3), 7).calibration()
    assert 0 < window_of(times_of(*CALLS_MATTER), 7, 1, of_seven) <= 7  # no longer than the lags


def test_the_window_is_the_best_prediction_if_that_gains_enough(mixture):
    rng, picked = np.random.default_rng(0), []
    for _ in range(60):
        call, row, rows = 10 ** rng.uniform(-5, -3), 10 ** rng.uniform(-7, -4), 10 ** rng.uniform(0, 2.5)
        times = times_of(call, row)
        seconds = {w: head_seconds(times, 60, rows, w, calls) for w, calls in zip(WINDOWS, mixture.calls)}
        window, baseline = window_of(times, 60, rows, mixture), head_seconds(times, 60, rows, 0)
        assert (min(seconds.values()) < GAIN * baseline) == (window > 0)
        assert window == 0 or seconds[window] == min(seconds.values())
        picked.append(window)
    assert 5 < picked.count(0) < 50 and len(set(picked)) > 3


def test_the_printed_reason_is_that_of_the_choice(mixture):
    """One number decides and is printed: the gain of the best window, its upper bound, or the memory."""
    calibrated = []

    def choose(times, most=MEMORY):
        calibrated.clear()
        return choose_window(times, most, 60, 4, lambda: calibrated.append(1) or mixture)

    of_mixture = dict(zip(WINDOWS, mixture.calls))
    fewest = {window: np.array([1 + math.ceil(59 / window)]) for window in WINDOWS}
    kinds = set()
    for row in np.geomspace(1e-9, 1e-3, 60):
        times = times_of(1e-3, row)
        config, why = choose(times)
        calls = of_mixture if calibrated else fewest
        best = min(head_seconds(times, 60, 4, window, own) for window, own in calls.items())
        assert f"{head_seconds(times, 60, 4, 0) / best:.2f} times" in why
        assert (config == PLAIN) == (f"under the {1 / GAIN:.2f}" in why)
        kinds.add((config == PLAIN, bool(calibrated)))
    assert kinds == {(False, True), (True, True), (True, False)}
    config, why = choose(times_of(*CALLS_MATTER), most=4 * 30)
    assert config == PLAIN and "2.00 times the memory" in why and not calibrated


def test_head_seconds_are_interpolated_between_the_measured_sizes():
    times = times_of(2.0, 1.0)
    for rows, seconds in ((0.5, 3), (1, 3), (2.5, 4.5), (16, 18), (64, 66), (128, 132)):  # beyond: proportional
        assert head_seconds(times, 100, rows, 0) == pytest.approx(100 * seconds)
    calls = np.full(50, 11)  # all chains end together: the first call, then ten rounds of 3 x 4 inputs
    assert head_seconds(times, 100, 3, 4, calls) == pytest.approx(100 * 0.1 + 10 * (2 + 12))


@pytest.mark.parametrize("rows", [1, 3, 10])
def test_head_seconds_of_chains_that_end_one_by_one_are_those_of_a_simulation(rows, mixture):
    """Each round costs what the chains still running cost."""
    times, calls, rng = times_of(1e-3, 1e-5), mixture.calls[WINDOWS.index(8)], np.random.default_rng(0)
    total = []
    for _ in range(1000):
        drawn = rng.choice(calls, rows)
        running = [(drawn > r).sum() for r in range(1, drawn.max())]
        total.append(60 * 1e-6 + sum(1e-3 + 1e-5 * max(8, 8 * n) for n in running))
    assert head_seconds(times, 60, rows, 8, calls) == pytest.approx(np.mean(total), rel=0.01)


def same(times: Times, others: Times) -> bool:
    return times.keys() == others.keys() and all((times[work] == others[work]).all() for work in times)


def test_times_are_measured_once_and_cached(small_mar, tmp_path, monkeypatch):
    """For each device, guidance, precision, and way to run."""
    measured = []

    def spy(tuner, head, guided):
        measured.append(guided)
        return times_of(1e-3 * len(measured), 1e-6)

    monkeypatch.setattr(tuning, "time_head", spy)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def get(guided=True, policy="fp32", compiled=False, graphs=False, about="a head", **again) -> Times:
        tuner = Tuner(Precision(policy, CPU), compiled, graphs)  # a new one each time: times come from files
        return head_times(tuner, small_mar.head, guided, about, **again)

    first = get()
    assert same(get(), first) and same(first, times_of(1e-3, 1e-6)) and measured == [True]
    others = [get(guided=False), get(policy="bf16"), get(compiled=True), get(graphs=True), get(about="another")]
    assert measured == [True, False, True, True, True, True]
    assert same(get(), first) and same(get(guided=False), others[0]) and len(measured) == 6
    again = get(again=True)
    assert same(get(), again) and same(again, times_of(7e-3, 1e-6)) and same(get(policy="bf16"), others[1])
    with monkeypatch.context() as patch:
        patch.setattr("cspd.files._processor", lambda: "another processor")
        assert same(get(), times_of(8e-3, 1e-6))
    assert same(get(), again) and len(measured) == 8
    for file in (tmp_path / "cspd").iterdir():
        file.write_bytes(file.read_bytes()[:-8] + bytes(8))  # the last number is 0
    assert same(get(), get()) and len(measured) == 9


def test_times_that_cannot_be_written_are_remembered(small_mar, tmp_path, monkeypatch):
    (tmp_path / "cspd").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "time_head", lambda *_: times_of(1e-3, 1e-6))
    tuner = Tuner(FP32)
    times = head_times(tuner, small_mar.head, True, "a head")
    monkeypatch.setattr(tuning, "time_head", lambda *_: 1 / 0)
    assert head_times(tuner, small_mar.head, True, "a head") is times


def test_times_of_a_busy_machine_are_in_no_file(small_mar, tmp_path, monkeypatch):
    """By recorded times: a process beside this one got a core in most turns of one head call."""
    steady = {"ancestral": [1e-3, 1.1e-3, 1.1e-3], "start": [1e-4] * 3, "round": [2e-3, 2e-3, 9e-3]}
    busy = steady | {"round": [2e-3, 3e-3, 9e-3]}
    monkeypatch.setattr(tuning, "ROWS", (1, 2))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def get(*recorded) -> Times:
        of_sizes = iter(recorded)
        monkeypatch.setattr(tuning, "_time_one_size", lambda *chains: next(of_sizes))
        return head_times(Tuner(FP32), small_mar.head, True, "a head")

    assert get(steady, busy)["round"][1].tolist() == [2e-3, 3e-3] and not [*tmp_path.rglob("*.safetensors")]
    assert get(steady, steady)["round"][1].tolist() == get()["round"][1].tolist() == [2e-3, 2e-3]
    assert get()["ancestral"].tolist() == [[1, 2], [1e-3, 1e-3]]  # as without the others


def test_times_are_those_of_the_real_head(small_mar, monkeypatch):
    monkeypatch.setattr("cspd.continuous.tuning.ROWS", (1, 4))
    monkeypatch.setattr("cspd.continuous.tuning.TURNS", 1)
    times = time_head(Tuner(FP32), small_mar.head, True)
    times.check()
    assert times.keys() == {"ancestral", "start", "round"}
    for work, (sizes, seconds) in times.items():
        assert sizes.tolist() == ([8, 32] if work == "round" else [1, 4])
        assert 0 < min(seconds) and max(seconds) < 1
