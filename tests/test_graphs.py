"""CUDA graphs: replays compute what calls compute, and nothing is read or kept that has been freed."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import launching
import platformdirs
import pytest
import standin
import torch
from graphs import CPU, replayed
from toys import SMALL, staggered, toy_mar

import cspd
from cspd import Engine, MARModels, Request, graphs
from cspd.cli.bench import bench, case_of, format_bench
from cspd.graphs import Graphs
from cspd.method import METHODS


def double(x):
    return 2 * x


def test_a_replay_takes_new_inputs_and_leaves_old_results():
    runs = replayed()
    inputs = torch.tensor([1.0]), torch.tensor([5.0])
    results = [runs.run("add", lambda x: (2 * x, x.add_(1)), x) for x in inputs]
    assert [value.item() for pair in results for value in pair] == [2, 2, 10, 6]
    assert [x.item() for x in inputs] == [1, 5]  # the function worked on copies


def test_other_keys_and_shapes_are_other_graphs():
    runs = replayed()
    for key, factor in (("double", 2), ("triple", 3)):
        for size in (1, 4, 1):
            result = runs.run(key, lambda x, factor=factor: factor * x, torch.ones(size))
            assert result.tolist() == [factor] * size


def test_inputs_of_fewer_rows_share_a_graph():
    runs, calls = replayed(), []

    def scale(by, x, steps):
        calls.append(len(by))
        return by.unsqueeze(1) * x + steps

    steps = torch.arange(6.0).view(3, 1, 2)
    for num in (3, 4, 2):
        by, x = torch.arange(1.0, num + 1), torch.ones(3, num, 2)
        padded = runs.run("scale", scale, by, x, steps.expand(3, 4, 2), rows=4)
        assert torch.equal(padded[:, :num], scale(by, x, steps))
    assert len(captured(runs)) == 1
    calls.clear()
    eager = Graphs(CPU).run("scale", scale, by, x, steps, rows=4)
    assert torch.equal(eager, padded[:, :2]) and calls == [2]  # without graphs nothing is padded


def test_a_graph_that_was_captured_in_inference_mode_can_be_replayed_outside():
    runs = replayed()
    with torch.inference_mode():
        runs.run("double", double, torch.ones(1))
    assert runs.run("double", double, torch.tensor([3.0])).item() == 6


def test_trial_runs_leave_the_state_as_it_was():
    counter = torch.zeros(1)
    seen = []

    def count(step):
        seen.append(counter.item())
        counter.add_(step)
        return counter * 1

    runs = replayed()
    totals = [runs.run("count", count, torch.ones(1), state=[counter]).item() for _ in range(3)]
    assert totals == [1, 2, 3]
    assert seen == [0, 0, 0, 0, 0, 1, 2]  # every trial begins with the same state


def test_a_graph_is_captured_again_after_a_constant_of_it_was_freed():
    @functools.lru_cache(maxsize=1)
    def weights(size):
        return torch.arange(size)

    runs, calls = replayed(), []

    def scale(x):
        calls.append(1)
        return weights(len(x)) * x

    def num_calls():
        calls.clear()
        assert runs.run("scale", scale, torch.ones(3)).tolist() == [0, 1, 2]
        return len(calls)

    captured = num_calls()
    assert num_calls() == 1 < captured  # a replay
    weights(4)  # replaces the other one in the cache: a GPU would read whatever is at its address
    assert num_calls() == captured
    assert num_calls() == 1


def test_graphs_hold_no_reference_to_what_they_read():
    slots, runs = [torch.ones(3)], replayed()
    runs.run("sum", lambda x: (x * slots[0]).sum(), torch.ones(3))
    storage = weakref.ref(slots[0].untyped_storage())
    slots.clear()
    assert storage() is None


def test_a_function_that_cannot_be_captured_is_called():
    def refuse(*work):
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    runs = Graphs(CPU, enabled=True, capture=refuse)
    with pytest.warns(UserWarning, match="not permitted"):
        results = [runs.run("add", lambda x: x + 1, torch.ones(1), rows=2).tolist() for _ in range(2)]
    assert results == [[2, 1], [2, 1]]


def captured(runs):
    """The keys and shapes of all graphs that can be replayed."""
    return {key for generation in runs._generations for key in generation.recorded}


def test_a_failed_capture_breaks_no_graph():
    with standin.cuda():
        runs, x, calls = Graphs(standin.DEVICE), torch.ones(3, device=standin.DEVICE), []

        def fail_in_capture(x):
            calls.append(1)
            if len(calls) == 4:  # after three trials
                raise RuntimeError("the fourth call")
            return 2 * x

        assert runs.run("double", double, x).tolist() == [2] * 3
        with pytest.warns(UserWarning, match="the fourth call"):
            assert runs.run("fails", fail_in_capture, x).tolist() == [2] * 3
        gc.collect()  # the error's traceback holds the graph
        assert runs.run("double", double, x).tolist() == [2] * 3
        assert runs.run("another", double, x).tolist() == [2] * 3


@pytest.mark.filterwarnings("error")  # a function without a graph would be called, with a warning
def test_the_older_half_of_the_graphs_is_dropped_when_there_are_too_many(monkeypatch):
    """All others stay usable, though torch frees a workspace that graphs of one stream share."""
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 4)
    with standin.cuda() as gpu:
        runs = Graphs(standin.DEVICE)

        def replayed_at_once(size):
            last = list(runs.captures)[-1:]
            gpu.reset()
            result = runs.run("double", double, torch.ones(size, device=standin.DEVICE))
            assert result.tolist() == [2] * size and gpu.kernels["graph"] == 1
            return list(runs.captures)[-1:] == last

        assert not any(map(replayed_at_once, (1, 2, 3, 4)))
        assert all(map(replayed_at_once, (1, 2, 3, 4)))
        assert not replayed_at_once(5)  # replaces the first two
        assert all(map(replayed_at_once, (3, 4, 5)))
        assert not replayed_at_once(1)
        assert len(captured(runs)) == 4


@pytest.mark.filterwarnings("error")
def test_engines_do_not_share_streams():
    """Otherwise graphs of one would lose a workspace when another one is closed."""
    with standin.cuda():
        many = [Graphs(standin.DEVICE) for _ in range(graphs.STREAMS)]
        x = torch.ones(3, device=standin.DEVICE)
        for _ in range(3):
            for runs in many:
                assert runs.run("double", double, x).tolist() == [2] * 3
        one_more = Graphs(standin.DEVICE)
        with pytest.warns(UserWarning, match="streams"):
            assert one_more.run("double", double, x).tolist() == [2] * 3
        del many[0], runs
        last = Graphs(standin.DEVICE)
        for runs in (last, *many):
            assert runs.run("double", double, x).tolist() == [2] * 3
        assert len(last.captures) == 1


def test_decoding_does_not_use_a_stream_of_graphs():
    with standin.cuda():
        runs = [Graphs(standin.DEVICE) for _ in range(graphs.STREAMS - 1)]
        for each in runs:
            each.run("double", double, torch.ones(3, device=standin.DEVICE))
        taken = set(graphs._taken)
        engines = [Engine(MARModels(toy_mar()), max_batch=1, device=standin.DEVICE, graphs=False) for _ in range(2)]
        assert engines[0]._finisher._stream not in taken
        (output,) = engines[1].generate([Request(1, 1, "ar", num_iter=2, first_timestep=950)])  # decodes between rounds
        assert output.error is None


def test_captures_are_counted(monkeypatch):
    with standin.cuda():
        memory = iter(range(2**30, 0, -(2**20)))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(memory), 2**30))
        runs = Graphs(standin.DEVICE)
        assert not runs.summary()
        for size in (1, 2):
            runs.run("double", double, torch.ones(size, device=standin.DEVICE))
        monkeypatch.undo()
    assert [(each["key"], each["shapes"], each["bytes"]) for each in runs.captures] == [
        ("double", [(1,)], 2**20),
        ("double", [(2,)], 2**20),
    ]
    assert runs.seconds == sum(each["seconds"] for each in runs.captures) > 0
    assert runs.bytes == 2**21 and "2 MiB" in runs.summary()


def test_graphs_take_a_bounded_part_of_the_memory(monkeypatch):
    """Each takes a 32nd of it, and two fill a generation."""
    with standin.cuda():
        total = 2**30
        memory = iter(range(total, 0, -total // 64))  # read before and after each capture
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(memory), total))
        runs = Graphs(standin.DEVICE)
        taken = []
        for size in range(1, 10):
            runs.run("double", double, torch.ones(size, device=standin.DEVICE))
            taken.append(runs.bytes)
            assert len(runs._generations) <= 2
        monkeypatch.undo()
    assert max(taken) == graphs.MEMORY_SHARE * total


def test_bench_reports_captures():
    with standin.cuda():
        engine = Engine(MARModels(toy_mar()), max_batch=1, device=standin.DEVICE)
        request = Request(1, 1, "ar", num_iter=2, num_sampling_steps=4, first_timestep=950)
        report = bench(engine, [case_of(engine, request, [], [], [])], [1], runs=1, queued=None, accuracy=None)
    assert len(report["captures"]) == 1
    assert format_bench(report).endswith("\n".join(report["captures"]))


def test_graphs_of_rocm_have_to_be_asked_for(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with standin.cuda():
        assert not Graphs(standin.DEVICE).enabled and Graphs(standin.DEVICE, enabled=True).enabled


def test_stale_graphs_are_dropped_too(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 4)
    alive = weakref.WeakSet()

    class Replay:
        def __call__(self): ...

    def capture(trials, function):
        trials()
        replay = Replay()
        alive.add(replay)
        return function(), replay

    runs, weights = Graphs(CPU, enabled=True, capture=capture), [torch.ones(3)]
    for _ in range(10):
        runs.run("scale", lambda x: weights[0] * x, torch.ones(3))
        weights[:] = [torch.ones(3)]  # frees the ones that the graph reads
    assert len(alive) <= 4


def test_a_stale_graph_does_not_outlive_its_generation(monkeypatch):
    """Its stream may be handed out again for the next capture."""
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)  # one in each generation
    made, alive = [], []

    def capture(trials, function):
        trials()
        alive.append(sum(each() is not None for each in made))
        replay = functools.partial(double, 1)
        made.append(weakref.ref(replay))
        return function(), replay

    runs, weights = Graphs(CPU, enabled=True, capture=capture), [torch.ones(3)]
    for key, factor in (("scale", weights), ("double", [2]), ("scale", weights)):
        runs.run(key, lambda x, factor=factor: factor[0] * x, torch.ones(3))
        if factor is not weights:
            weights[:] = [torch.ones(3)]  # frees the ones that the older graph reads
    assert alive == [0, 1, 1]


def test_a_cpu_has_no_graphs(small_mar):
    for make in (
        functools.partial(Graphs, CPU, enabled=True),
        functools.partial(Engine, MARModels(small_mar), device="cpu", graphs=True),
    ):
        with pytest.raises(ValueError, match="graphs"):
            make()
    assert Graphs(CPU).run("double", double, torch.ones(1)).item() == 2
    assert Engine(MARModels(small_mar), device="cpu").describe()["graphs"] is None


@pytest.mark.parametrize(("size", "by_eight", "by_two"), [(1, 1, 1), (3, 3, 3), (5, 5, 6), (16, 16, 16), (17, 18, 24)])
def test_buckets(size, by_eight, by_two):
    assert (graphs.bucket(size), graphs.bucket(size, per_octave=2)) == (by_eight, by_two)


# An engine with graphs makes the images of one without: in any batch, with requests that join.

ROUNDING = 1e-3  # of the largest token
MAR_METHODS = {method.name: method for method in METHODS if method.family == "MAR"}
QUICK = ("ar", "speculative", "calibrated", "gtr", "lazymar")


def requests_of(method):
    """Quick requests with different K, so that batches have odd sizes and unequal progress."""
    common = {"method": method, "cfg": 2.0, "num_sampling_steps": 4}
    usual = MAR_METHODS[method].fill(Request(0, **common))
    applied = {name: SMALL[name] for name in SMALL if MAR_METHODS[method].option(name, usual)}
    return [Request(i % 4, i, num_iter=3 + i % 3, **common, **applied) for i in range(5)]


@pytest.fixture(scope="module")
def engines(device):
    """Without graphs and with them; five slots, which batches of two, three and five fill differently."""
    models = MARModels(toy_mar(), draft=toy_mar(depth=2))
    eager, graphed = (Engine(models, max_batch=5, device=device, graphs=False) for _ in range(2))
    graphed.runner.tuning = eager.runner.tuning  # calibrated once
    graphed.runner.graphs = replayed() if device == CPU else Graphs(device)
    return eager, graphed


def check(engines, requests):
    eager, graphed = engines
    for own, other in zip(staggered(graphed, requests), staggered(eager, requests)):
        assert own.error is None
        assert (own.tokens - other.tokens).abs().max() < ROUNDING * other.tokens.abs().max()
        assert torch.allclose(own.token_cost, other.token_cost, equal_nan=True)
        assert own.stats.head_calls_per_token == other.stats.head_calls_per_token
    runs = graphed.runner.graphs
    staggered(graphed, requests)  # the slots of chains grew for the first images
    num_captures = len(runs.captures)
    staggered(graphed, requests)
    assert len(runs.captures) == num_captures < graphs.MOST_GRAPHS, "the same work was captured again"


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MAR_METHODS]
)
def test_equal_images(method, engines):
    check(engines, requests_of(method))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "calibrated", "lazymar"])
def test_equal_images_of_a_trained_model(method):
    eager, graphed = (cspd.load("digits32", max_batch=3, device="cpu") for _ in range(2))
    graphed.runner.graphs = replayed()
    settings = {"method": method, "num_sampling_steps": 30, "cfg": 3.0}
    check((eager, graphed), [Request(i, i, num_iter=num_iter, **settings) for i, num_iter in enumerate((6, 9, 7, 5))])


# torch.compile, on machines that lack a compiler.

WITHOUT_COMPILER = """
import warnings
from toys import toy_models
from cspd import Engine, Request, VQModels

engines = [Engine(VQModels(**toy_models(codes=11, length=4)), max_batch=1, compiled=c) for c in (False, True)]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    eager, fallen_back = ([engine.generate([Request(1, seed)])[0] for seed in range(2)] for engine in engines)
assert all((own.tokens == other.tokens).all() for own, other in zip(eager, fallen_back))
(warning,) = caught
assert "--compile" in str(warning.message)
"""


@pytest.mark.slow  # the process compiles
def test_a_machine_without_a_compiler_computes_without_torch_compile(tmp_path):
    """In a process of its own, since torch remembers which compilers it has found."""
    nowhere = str(tmp_path)
    settings = dict.fromkeys(["PATH", "CC", "CXX", "TORCHINDUCTOR_CACHE_DIR"], nowhere)
    settings["PYTHONPATH"] = os.pathsep.join([launching.environment()["PYTHONPATH"], str(Path(__file__).parent)])
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    done = subprocess.run(command, env=launching.environment(**settings), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_programs_are_kept_in_the_users_cache_folder(monkeypatch, tmp_path):
    """torch's default is a temporary folder. A folder that the user chose stays."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):  # of two processes, the second one finds the programs of the first
        assert graphs.programs_folder() == platformdirs.user_cache_path("cspd") / "compiled"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(graphs.programs_folder())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    assert graphs.programs_folder() == tmp_path / "own"


def test_how_long_compiling_took_is_kept_for_each_model(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    monkeypatch.setattr("cspd.terminal.PATIENCE", 0)
    for model in ("small", "small", "small", "large"):  # each in a process of its own
        own = graphs.compiled(functools.partial(double), "doubles")
        for _ in range(2):  # the second one is not compiled
            own(model)
    found = sorted(len(record.read_text().split()) for record in tmp_path.iterdir())
    assert found == [1, 2]  # seconds at first, and of the last time from the cache


def test_a_function_that_cannot_be_compiled_is_called(monkeypatch):
    attempts = []

    def refuse(function, **settings):
        attempts.append(function)
        raise RuntimeError("torch.compile is not supported here")

    monkeypatch.setattr(torch, "compile", refuse)
    own = graphs.compiled(functools.partial(double), "doubles")
    with pytest.warns(UserWarning, match="not supported here") as caught:
        assert [own(number) for number in (1, 2, 3)] == [2, 4, 6]
    assert len(caught) == len(attempts) == 1


@pytest.mark.filterwarnings("error")
def test_errors_of_a_compiled_function_are_raised(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)

    def invert(number):
        if number > 1:
            raise torch.OutOfMemoryError("too large")
        return 1 / number

    own = graphs.compiled(invert, "inverses")
    for number, error in ((0, ZeroDivisionError), (2, torch.OutOfMemoryError)):
        with pytest.raises(error):
            own(number)
    assert own(1) == 1
