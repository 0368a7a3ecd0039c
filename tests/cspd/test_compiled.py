"""Rounds run through torch.compile make the tokens that eager ones make."""

import functools
import shutil

import pytest
import torch
from conftest import relative_error

from cspd import Engine, MARModels, Request
from cspd.continuous.rounds import compiled_move

NO_COMPILER = not any(map(shutil.which, ("c++", "g++", "clang++")))


@pytest.mark.slow  # tracing takes ten seconds, making the kernels a minute
@pytest.mark.parametrize(
    "backend",
    [
        "eager",  # traces only, which is where a change can break it
        pytest.param("inductor", marks=pytest.mark.skipif(NO_COMPILER, reason="there is no C++ compiler")),
    ],
)
def test_compiled_rounds_agree(backend, small_mar, monkeypatch):
    compiled_move.cache_clear()
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    settings = {"num_iter": 4, "num_sampling_steps": 12, "cfg": 2.0, "window": 4}
    requests = [Request(label=i, seed=i, **settings) for i in range(3)]  # 3 to 70 chains: one program for all shapes
    eager, compiled = (Engine(MARModels(small_mar), max_batch=3, compiled=c).generate(requests) for c in (False, True))
    for a, b in zip(eager, compiled):
        assert relative_error(b.tokens, a.tokens) < 1e-3
        assert a.stats.by_lag == b.stats.by_lag
