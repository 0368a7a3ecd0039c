"""Captured functions: the same results as plain calls, whatever was run between."""

from __future__ import annotations

import pytest
import torch

from cspd import graphs
from cspd.graphs import Graphs
from tests.graphs import CPU, replayed


def test_a_replay_takes_new_inputs_and_keeps_old_results() -> None:
    runs = replayed()
    first = runs.run("double", lambda x: (2 * x, x + 1), torch.tensor([1.0]))
    second = runs.run("double", lambda x: (2 * x, x + 1), torch.tensor([5.0]))
    assert [value.item() for value in (*first, *second)] == [2, 2, 10, 6]


def test_inputs_are_copied_not_kept() -> None:
    runs = replayed()
    x = torch.tensor([1.0])
    runs.run("add", lambda x: x.add_(1), x)
    assert x.item() == 1


def test_other_keys_and_shapes_are_other_graphs() -> None:
    runs = replayed()
    for key, factor in (("double", 2), ("triple", 3)):
        for size in (1, 4, 1):
            made = runs.run(key, lambda x, factor=factor: factor * x, torch.ones(size))
            assert made.tolist() == [factor] * size


def test_trial_runs_leave_no_mark_in_the_state() -> None:
    counter = torch.zeros(1)

    def count(step: torch.Tensor) -> torch.Tensor:
        counter.add_(step)
        return counter * 1

    runs = replayed()
    totals = [runs.run("count", count, torch.ones(1), state=[counter]).item() for _ in range(3)]
    assert totals == [1, 2, 3]


def test_what_cannot_be_captured_is_called() -> None:
    def refuse(work: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    runs = Graphs(CPU, enabled=True, capture=refuse)
    with pytest.warns(UserWarning, match="no CUDA graph of add"):
        made = [runs.run("add", lambda x: x + 1, torch.ones(1)).item() for _ in range(2)]
    assert made == [2, 2]


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    runs, made = replayed(), []

    def double(x: torch.Tensor) -> torch.Tensor:
        made.append(len(x))
        return 2 * x

    for size in (1, 2, 1, 3):  # 2 is the one used the longest time ago
        runs.run("double", double, torch.ones(size))
    made.clear()
    runs.run("double", double, torch.ones(1))
    assert made == [1]  # a replay
    runs.run("double", double, torch.ones(2))
    assert len(made) > 2  # captured again
