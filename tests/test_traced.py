"""Layers and chains traced on a fake `cuda:1`, which finds types and devices that a GPU would refuse.

Triton kernels are off, as on an old GPU. Whole rounds read their results, which cannot be traced: they run on the
stand-in of tests/standin.py.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import pytest
import standin
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from toys import toy_mar, toy_models

from cspd import kernels, noise
from cspd.device import Precision
from cspd.heads import solvers
from cspd.heads.chain import ancestral, every_output
from cspd.heads.verify import NUM_SCALARS, STATE_ROWS, Embeddings, lookup, move
from cspd.masked.backbones import Cache, Counts, lazy, refresh
from cspd.transformer import CacheView
from mar import model as mar_model
from mar.model import MAR
from mar.vae import AutoencoderKL, KLConfig

pytestmark = pytest.mark.skipif(not standin.POSSIBLE, reason="this torch cannot pretend to have CUDA")
DEVICE = torch.device("cuda:1")  # the current device is 0, so a tensor made there is on the wrong device
ROWS, NUM_STEPS, WINDOW = 3, 4, 2


@pytest.fixture(scope="module")
def tracing():
    """One mode for all tests, since code caches constants by device."""
    return FakeTensorMode()


@pytest.fixture(autouse=True)
def traced(tracing, monkeypatch):
    """Tensors have no values, and may be on devices that do not exist."""
    monkeypatch.setenv(kernels.SWITCH, "0")
    memory = types.SimpleNamespace(total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    with torch.no_grad(), tracing:
        yield


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def integers(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.int64)


def head_forward(model: MAR, precision: Precision) -> None:
    precision.prepare(model).head(zeros(ROWS, model.head.channels), integers(ROWS), zeros(ROWS, 12))


def chain(outputs: Callable, model: MAR, precision: Precision) -> None:
    x, column = zeros(ROWS, model.head.channels), zeros(ROWS, 1)
    draws = lambda t: noise.steps(integers(ROWS), integers(ROWS), t, model.head.channels)  # noqa: E731
    ancestral(
        model.head,
        zeros(2, ROWS, 12),
        column,
        column,
        x,
        draws,
        model.head.schedule(NUM_STEPS),
        precision,
        outputs=outputs,
    )


def published_chain(model: MAR, precision: Precision) -> None:
    """Only the chain, because the whole sampler reads its masks."""
    draws = lambda t: zeros(ROWS, model.head.channels)  # noqa: E731
    mar_model._denoise(precision.prepare(model), zeros(2 * ROWS, 12), 2.0, True, 1.0, NUM_STEPS, draws)


def speculative_round(model: MAR, precision: Precision) -> None:
    """The function that `compiled` compiles."""
    channels, width = model.head.channels, model.head.width
    table = lookup(zeros(NUM_STEPS, WINDOW, 3 + WINDOW + NUM_SCALARS))
    modulations = Embeddings(zeros(NUM_STEPS, width), zeros(ROWS, 2, width))
    at = integers(ROWS, WINDOW), integers(ROWS)
    chains = zeros(ROWS, 1, 1), zeros(ROWS, STATE_ROWS, channels), integers(ROWS), integers(ROWS)
    draws = zeros(ROWS, NUM_STEPS, channels + 1)
    move(precision.prepare(model.head), table, draws, modulations, *at, *chains, trace_sigma=True)


def backbone(model: MAR, precision: Precision) -> None:
    fast, order = precision.prepare(model), integers(ROWS, 16)
    inputs = zeros(ROWS, 16, model.head.channels), order, integers(ROWS), zeros(ROWS, 12)
    fast(*inputs, order[:, :2], padded=5)
    kept = Cache.empty(model, ROWS, precision.dtype, DEVICE)
    x = refresh(fast, kept, integers(ROWS), *inputs, order[:, :2], padded=5)
    fast.condition(x, order[:, :2])
    tokens, order, _, embedding = inputs
    lazy(fast, kept, integers(ROWS), tokens, order, integers(ROWS, 4), embedding, Counts(5, 2, 2, 4))


MAR_PARTS = {
    "head": head_forward,
    "chain": functools.partial(chain, every_output),
    "cached head": functools.partial(chain, functools.partial(solvers.outputs, reuse=2)),
    "published chain": published_chain,
    "speculative round": speculative_round,
    "backbone": backbone,
}


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("part", MAR_PARTS)
def test_mar(part, policy):
    with DEVICE:
        model = toy_mar()
    precision = Precision(policy, DEVICE)
    with precision.fast():
        MAR_PARTS[part](model, precision)


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_vq(policy):
    with DEVICE:
        models = toy_models(length=16)
    precision = Precision(policy, DEVICE)
    gpt, eagle = precision.prepare(models["target"]), precision.prepare(models["eagle"])
    shape = 1, ROWS, gpt.config.n_head, 5, gpt.config.head_dim
    keys, values = (zeros(*shape, dtype=precision.dtype) for _ in range(2))
    view = CacheView(keys, values, integers(ROWS), slice(0, 5), 5)
    position = torch.arange(5, device=DEVICE).unsqueeze(0)
    mask = zeros(ROWS, 1, 5, 5, dtype=torch.bool)
    with precision.fast():
        x = gpt.embed(integers(ROWS), integers(ROWS, 4))
        features = gpt.features(x, position, mask, view)
        gpt.output(features)
        eagle(features, x, eagle.table(position), mask, view)


def test_autoencoders():
    """In float32 under every policy."""
    with DEVICE:
        vae, tokenizer = AutoencoderKL(KLConfig(embed_dim=3, ch=32, ch_mult=(1, 2))), toy_models()["tokenizer"]
    mean, _ = vae.encode(zeros(1, 3, 8, 8))
    vae.decode(mean)
    tokenizer.decode(tokenizer.encode(zeros(1, 3, 8, 8)))
