"""CUDA graphs, by a stand-in on a CPU."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import standin
import torch
from graphs import CPU, replayed
from toys import SMALL, staggered, toy_mar

import cspd
from cspd import Engine, MARModels, Request, graphs
from cspd.cli import main
from cspd.graphs import Graphs
from cspd.method import METHODS
from mar.model import MAR


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


def test_a_capture_inside_inference_serves_outside() -> None:
    runs = replayed()
    with torch.inference_mode():
        runs.run("double", lambda x: 2 * x, torch.ones(1))
    assert runs.run("double", lambda x: 2 * x, torch.tensor([3.0])).item() == 6


def test_trial_runs_leave_no_mark_in_the_state() -> None:
    counter = torch.zeros(1)
    seen = []

    def count(step: torch.Tensor) -> torch.Tensor:
        seen.append(counter.item())
        counter.add_(step)
        return counter * 1

    runs = replayed()
    totals = [runs.run("count", count, torch.ones(1), state=[counter]).item() for _ in range(3)]
    assert totals == [1, 2, 3]
    assert seen == [0, 0, 0, 0, 0, 1, 2]  # each trial begins where the first did: it may lead no further


def test_a_graph_is_captured_anew_when_a_constant_of_it_is_gone() -> None:
    @functools.lru_cache(maxsize=1)
    def weights(size: int) -> torch.Tensor:
        return torch.arange(size)

    runs, calls = replayed(), []

    def scale(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return weights(len(x)) * x

    def num_calls() -> int:
        calls.clear()
        assert runs.run("scale", scale, torch.ones(3)).tolist() == [0, 1, 2]
        return len(calls)

    captured = num_calls()
    assert num_calls() == 1 < captured  # a replay
    weights(4)  # takes the place of the other, of which a GPU would read what is there now
    assert num_calls() == captured
    assert num_calls() == 1


def test_what_a_graph_reads_is_not_kept() -> None:
    slots, runs = [torch.ones(3)], replayed()
    runs.run("sum", lambda x: (x * slots[0]).sum(), torch.ones(3))
    storage = weakref.ref(slots[0].untyped_storage())
    slots.clear()
    assert storage() is None


def test_what_cannot_be_captured_is_called() -> None:
    def refuse(*work: object) -> None:
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    runs = Graphs(CPU, enabled=True, capture=refuse)
    with pytest.warns(UserWarning, match="CUDA"):
        made = [runs.run("add", lambda x: x + 1, torch.ones(1)).item() for _ in range(2)]
    assert made == [2, 2]


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    runs, made = replayed(), []

    def double(x: torch.Tensor) -> torch.Tensor:
        made.append(len(x))
        return 2 * x

    for size in (1, 2, 1, 3):  # the third one takes the place of both
        runs.run("double", double, torch.ones(size))
    made.clear()
    runs.run("double", double, torch.ones(3))
    assert made == [3]  # a replay
    runs.run("double", double, torch.ones(1))
    assert len(made) > 2  # captured again


@pytest.mark.filterwarnings("error")  # none is called for want of a graph
def test_graphs_are_captured_when_all_others_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    with standin.cuda() as gpu:
        runs = Graphs(standin.DEVICE)
        for size in (1, 2, 3, 4, 5, 4):
            gpu.reset()
            made = runs.run("double", lambda x: 2 * x, torch.ones(size, device=standin.DEVICE))
            assert made.tolist() == [2] * size and gpu.kernels["graph"] == 1


def test_stale_graphs_are_not_kept_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 4)
    alive = weakref.WeakSet()

    class Replay:
        def __call__(self) -> None: ...

    def capture(trials: Callable[[], None], function: Callable[[], Any]) -> tuple[Any, Replay]:
        trials()
        alive.add(replay := Replay())
        return function(), replay

    runs, weights = Graphs(CPU, enabled=True, capture=capture), [torch.ones(3)]
    for _ in range(10):
        runs.run("scale", lambda x: weights[0] * x, torch.ones(3))
        weights[:] = [torch.ones(3)]  # in the place of those that the graph reads
    assert len(alive) <= 4


def test_a_cpu_has_none() -> None:
    with pytest.raises(ValueError, match="graphs"):
        Graphs(CPU, enabled=True)
    runs = Graphs(CPU)
    assert not runs.enabled and runs.run("double", lambda x: 2 * x, torch.ones(1)).item() == 2


def test_an_engine_without_a_gpu_has_none(small_mar: MAR) -> None:
    with pytest.raises(ValueError, match="graphs"):
        Engine(MARModels(small_mar), device="cpu", graphs=True)
    engine = Engine(MARModels(small_mar), device="cpu")
    assert not engine.runner.graphs.enabled and engine.describe()["graphs"] is None


@pytest.mark.slow  # loads a model first
def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["sample", "--graphs", "--device", "cpu", "--out", str(tmp_path / "made")]) == 2
    error = capsys.readouterr().err
    assert "graphs" in error and error.count("\n") == 1


@pytest.mark.parametrize(("size", "by_eight", "by_two"), [(1, 1, 1), (3, 3, 3), (5, 5, 6), (16, 16, 16), (17, 18, 24)])
def test_buckets(size: int, by_eight: int, by_two: int) -> None:
    assert (graphs.bucket(size), graphs.bucket(size, per_octave=2)) == (by_eight, by_two)


# ---- An engine that replays its work makes the images of one that does not: in any batch, with requests that join


ROUNDING = 1e-3  # of the largest token
MAR_METHODS = {method.name: method for method in METHODS if method.family == "MAR"}
QUICK = ("ar", "speculative", "calibrated", "gtr", "lazymar")
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MAR_METHODS]


def requests_of(method: str, num: int, **settings: object) -> list[Request]:
    """Quick requests of unequal K, so that the batch has odd sizes and unequal progress."""
    common = {"method": method, "cfg": 2.0, "num_sampling_steps": 4} | settings
    usual = MAR_METHODS[method].fill(Request(0, **common))
    applied = {name: SMALL[name] for name in SMALL if MAR_METHODS[method].option(name, usual)}
    return [Request(i % 4, i, num_iter=3 + i % 3, **common, **applied) for i in range(num)]


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    """Without graphs and with them; five slots, which batches of two, three and five do not fill alike."""
    models = MARModels(toy_mar(), draft=toy_mar(depth=2))
    eager, graphed = (Engine(models, max_batch=5, device="cpu") for _ in range(2))
    graphed.runner.adopt(eager.runner)  # calibrated once
    graphed.runner.graphs = replayed()
    return eager, graphed


def check(engines: tuple[Engine, Engine], requests: list[Request]) -> None:
    eager, graphed = engines
    for own, other in zip(staggered(graphed, requests), staggered(eager, requests)):
        assert own.error is None
        assert (own.tokens - other.tokens).abs().max() < ROUNDING * other.tokens.abs().max()
        assert torch.allclose(own.token_cost, other.token_cost, equal_nan=True)
        assert own.stats.head_calls_per_token == other.stats.head_calls_per_token
    graphs = graphed.runner.graphs
    staggered(graphed, requests)  # slots of chains grew in the first images, and have stayed
    captured = set(graphs._recorded)
    staggered(graphed, requests)
    assert captured == set(graphs._recorded) and not graphs._retired, "the same work is captured again"


@pytest.mark.parametrize("method", CASES)
def test_equal_images(method, engines):
    check(engines, requests_of(method, 5))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "calibrated", "lazymar"])
def test_equal_images_of_a_trained_model(method):
    eager, graphed = (cspd.load("digits32", max_batch=3, device="cpu") for _ in range(2))
    graphed.runner.graphs = replayed()
    settings = {"method": method, "num_sampling_steps": 30, "cfg": 3.0}
    check((eager, graphed), [Request(i, i, num_iter=num_iter, **settings) for i, num_iter in enumerate((6, 9, 7, 5))])
