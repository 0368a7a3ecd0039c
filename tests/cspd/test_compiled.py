"""What runs through torch.compile makes the tokens that eager calls make."""

import functools
import shutil

import pytest
import torch
from conftest import relative_error
from toys import toy_models

from cspd import Engine, MARModels, Request, VQModels
from cspd.discrete.runner import compiled_layers
from cspd.heads.verify import compiled_move

NO_COMPILER = not any(map(shutil.which, ("c++", "g++", "clang++")))


@pytest.fixture(
    params=[
        "eager",  # traces only, which is where a change can break it
        pytest.param("inductor", marks=pytest.mark.skipif(NO_COMPILER, reason="there is no C++ compiler")),
    ]
)
def backend(request, monkeypatch):
    """What torch.compile makes of what it traced; nothing is kept from other tests."""
    compiled_move.cache_clear()
    compiled_layers.cache_clear()
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=request.param))


@pytest.mark.slow  # tracing takes ten seconds, making the kernels a minute
@pytest.mark.usefixtures("backend")
def test_compiled_rounds_agree(small_mar):
    settings = {"num_iter": 4, "num_sampling_steps": 12, "cfg": 2.0, "window": 4}
    requests = [Request(label=i, seed=i, **settings) for i in range(3)]  # 3 to 70 chains: one program for all shapes
    eager, compiled = (Engine(MARModels(small_mar), max_batch=3, compiled=c).generate(requests) for c in (False, True))
    for a, b in zip(eager, compiled):
        assert relative_error(b.tokens, a.tokens) < 1e-3
        assert a.stats.by_lag == b.stats.by_lag


@pytest.mark.slow  # the same
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("method", ["ar", "eagle2", "sd"])
def test_compiled_layers_agree(method):
    """Slices and indexes of rows and columns, with masks and without, and three models; more than slots."""
    models = VQModels(**toy_models(codes=11, length=16))
    requests = [Request(label=i % 2, seed=i, method=method, cfg=1.0 + i % 2) for i in range(5)]
    eager, compiled = (Engine(models, max_batch=3, device="cpu", compiled=c) for c in (False, True))
    for a, b in zip(eager.generate(requests), compiled.generate(requests)):
        assert torch.equal(a.tokens, b.tokens)
        assert a.stats.backbone_calls == b.stats.backbone_calls
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0  # something was traced
