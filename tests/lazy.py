"""LazyMAR's requests on a toy, on an engine and in a model runner's slots."""

from __future__ import annotations

import pytest
from toys import CPU, toy_mar

from cspd import Engine, MARModels
from cspd.device import Precision
from cspd.masked.runner import MARRunner
from cspd.request import Sequence

QUICK = {"method": "lazymar", "num_sampling_steps": 4, "first_timestep": 950, "cfg": 2.0, "warmup": 1, "refresh": 4}
KEY = "lazymar"


@pytest.fixture(scope="module", name="model")
def toy_model():
    return toy_mar()


def engine(model, max_batch=3, **settings):
    return Engine(MARModels(model), max_batch=max_batch, device="cpu", **settings)


def started(model, requests):
    """A model runner, and the requests' sequences in its slots, about to run."""
    runner = MARRunner(model, len(requests), Precision("fp32", CPU))
    resolver = engine(model)
    batch = [Sequence(resolver.resolve(request), i, slot=i, key=KEY) for i, request in enumerate(requests)]
    runner.admit(batch)
    return runner, batch
