"""The choice among candidates, on made-up numbers whose fronts are known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from cspd.comparison.compare import FEWEST, Trial, dominates, fastest, kept, layers, nearest, planned, rungs, survivors


@pytest.mark.parametrize(
    "num, expected",
    [(20, [20]), (39, [39]), (40, [20, 40]), (100, [20, 100]), (180, [20, 60, 180]), (540, [20, 60, 180, 540])],
)
def test_rungs_rise_to_the_last(num, expected):
    assert rungs(num) == expected


def test_more_images_go_on_from_the_same_rungs():
    assert rungs(1620)[: len(rungs(540))] == rungs(540) and rungs(540)[0] == FEWEST


def test_a_third_goes_on_and_a_few_at_least():
    assert [kept(number) for number in (60, 20, 7, 4, 3, 0)] == [20, 7, 4, 4, 3, 0]
    assert planned(60, [20, 60, 180], always=2) == 62 * 20 + 22 * 40 + 9 * 120
    assert planned(20, [60, 180], always=2, before=20) == 22 * 40 + 9 * 120


def test_layers_are_the_fronts_that_taking_away_gives():
    points = [(1, 5), (2, 3), (4, 1), (2, 4), (4, 3), (5, 5), (2, 3)]
    assert layers(points) == [0, 0, 0, 1, 1, 2, 0]  # equal ones do not dominate each other
    assert layers([(1, math.inf), (2, math.inf)]) == [0, 1]
    assert layers([]) == []


def test_layers_of_three_values_are_by_definition():
    points = np.random.default_rng(0).integers(0, 5, (60, 3)).tolist()
    found = layers(points)
    for i, j in itertools.product(range(60), repeat=2):
        if dominates(points[i], points[j]):
            assert found[i] < found[j]
    for j in range(60):  # and no later than needed
        above = [found[i] for i in range(60) if dominates(points[i], points[j])]
        assert found[j] == max(above, default=-1) + 1


def test_survivors_are_within_reach_then_on_the_front_then_fast():
    trials = [
        Trial(9.0, 0.50, 0.01),  # fastest, out of reach
        Trial(3.0, -0.01, 0.01),  # good
        Trial(5.0, 0.03, 0.02),  # beyond, by less than its error allows
        Trial(2.0, 0.01, 0.01),  # slower and worse than both
        Trial(1.0, -0.05, 0.01),  # best and slow
        Trial(0.5, 0.40, 0.01),  # nothing speaks for it
    ]
    assert [survivors(trials, number) for number in (1, 2, 3, 4, 5)] == [
        [2],
        [1, 2],
        [1, 2, 4],
        [1, 2, 3, 4],
        [0, 1, 2, 3, 4],
    ]


def test_the_worst_goes_first_whatever_the_order():
    trials = [Trial(speed, excess) for speed, excess in [(4, -0.02), (3, -0.03), (2, -0.01), (1, 0.2), (0.5, 0.3)]]
    for order in itertools.permutations(range(5)):
        shuffled = [trials[i] for i in order]
        assert {order[i] for i in survivors(shuffled, 2)} == {0, 1}


def test_chance_ends_nobody_early():
    sure, unsure = Trial(2.0, 0.01, 0.001), Trial(2.0, 0.04, 0.05)
    assert survivors([sure, unsure], 1) == [1]
    assert survivors([sure, Trial(2.0, 0.04, 0.001)], 1) == [0]


def test_the_fastest_within_the_limit_is_chosen_and_else_the_nearest():
    plain = Trial(1.0, -0.02)
    trials = [plain, Trial(4.0, 0.01), Trial(3.0, 0.0), Trial(2.0, -0.5), Trial(0.5, -1.0)]
    assert fastest(trials) == 2
    assert fastest([plain, Trial(4.0, 0.01), Trial(0.5, -1.0), Trial(1.04, -1.0)]) is None
    assert fastest([plain]) is None
    assert nearest([plain, Trial(4.0, 0.2), Trial(3.0, 0.1), Trial(0.5, -1.0)]) == 2  # of those that are faster
    assert nearest([plain, Trial(0.5, 0.3), Trial(0.6, 0.2)]) == 2
    assert nearest([plain]) is None
    assert nearest([plain, Trial(4.0, math.inf), Trial(3.0, 7.0)]) == 2
