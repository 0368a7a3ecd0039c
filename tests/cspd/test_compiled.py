"""Rounds run through torch.compile make the tokens that eager ones make."""

import shutil

import pytest
from conftest import relative_error

from cspd import Engine, MARModels, Request


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_compiled_rounds_agree(small_mar):
    settings = {"num_iter": 4, "num_sampling_steps": 12, "cfg": 2.0, "window": 4}
    requests = [Request(label=i, seed=i, **settings) for i in range(3)]  # 3 to 70 chains: one program for all shapes
    eager, compiled = (Engine(MARModels(small_mar), max_batch=3, compiled=c).generate(requests) for c in (False, True))
    for a, b in zip(eager, compiled):
        assert relative_error(b.tokens, a.tokens) < 1e-3
        assert a.stats.by_lag == b.stats.by_lag
