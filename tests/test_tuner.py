"""Works are timed in turns, and their typical seconds are read at any size."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cspd.tuner import Times, in_turns, unsteadiness


def test_works_are_timed_in_turns():
    """The first turn warms up. Long turns are cut short, but one alone does not tell a machine that is busy."""
    order = []

    def work(name, seconds):
        recorded = iter(seconds)
        return lambda: order.append(name) or next(recorded)

    works = {"a": work("a", [9.0, 1.0, 2.0, 3.0]), "b": work("b", [9.0, 4.0, 5.0, 6.0])}
    assert in_turns(works, 3, clock=lambda: 0.0) == {"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]}
    assert order == ["a", "b"] * 4
    works = {"a": work("a", [9.0, 1.0, 2.0, 3.0])}
    assert in_turns(works, 3, clock=itertools.count(0, 10).__next__) == {"a": [1.0, 2.0]}


def test_a_busy_machine_is_unsteady():
    """One slow turn is no sign of it, and neither is a machine that is slow throughout."""
    assert unsteadiness([[1.0, 1.0, 7.0], [5.0, 5.0, 5.0]]) == 0
    assert unsteadiness([[1.0, 1.0, 7.0], [5.0, 8.0, 9.0]]) == pytest.approx(0.6)


def test_seconds_are_interpolated_between_the_sizes_that_were_timed():
    """Constant below the smallest, and proportional above the largest."""
    times = Times(work=np.array([[1, 4, 16], [3.0, 6.0, 18.0]]))
    assert times.seconds("work", 2.5) == 4.5
    assert times.seconds("work", np.array([[0.5, 1], [16, 64]])).tolist() == [[3, 3], [18, 72]]


@pytest.mark.parametrize(
    "wrong",
    [
        [1.0, 2.0],
        [[1, 2]],
        [[], []],
        [[1, 1], [1.0, 1.0]],
        [[2, 1], [1.0, 1.0]],
        [[1, 2], [1.0, -1.0]],
        [[1], [np.nan]],
    ],
    ids=str,
)
def test_times_that_no_work_takes(wrong):
    Times(right=np.array([[0, 3], [0.0, 1.0]])).check()
    with pytest.raises(ValueError, match="the times of wrong"):
        Times(right=np.array([[0, 3], [0.0, 1.0]]), wrong=np.array(wrong)).check()
