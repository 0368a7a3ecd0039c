"""bf16 is copies of the weights, made once: no autocast, and in a round no weight is converted."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import toy_mar, toy_models

from cspd import Engine, MARModels, Request, VQModels
from cspd import device as cspd_device
from cspd.device import BFloat16Linear, Precision
from mar.head import Head

aten = torch.ops.aten
CPU = torch.device("cpu")
QUICK = {"num_iter": 2, "cfg": 2.0, "num_sampling_steps": 5}
FAST = ("ar", "eagle2")
REQUESTS = [
    {"method": "ar", **QUICK},
    {"method": "speculative", "window": 3, "draft": "frozen", **QUICK},
    {"method": "calibrated", "head_calls": 3, "audit": 0.5, **QUICK},
    {"method": "dpm-solver++", "num_iter": 2, "cfg": 2.0, "head_calls": 4},
    {"method": "lazymar", "warmup": 1, "refresh": 3, **QUICK, "num_iter": 16},
    {"method": "cspd", "gamma": 4, "prefill": 0.5, **QUICK},
    *({"method": method, "family": "VQ", "cfg": 2.0} for method in ("ar", "eagle2", "sd")),
]


class Conversions(TorchDispatchMode):
    """What is converted to another type, by address, and the types of matrix products."""

    def __init__(self):
        super().__init__()
        self.converted, self.products = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function.overloadpacket in (aten.to, aten._to_copy) and made.dtype != args[0].dtype:
            self.converted.add(args[0].data_ptr())
        if function.overloadpacket in (aten.linear, aten.addmm, aten.mm):
            self.products.add(made.dtype)
        return made


@pytest.fixture(scope="module")
def models():
    return MARModels(toy_mar(), toy_mar(2)), VQModels(**toy_models(length=16))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(each, marks=() if each["method"] in FAST else pytest.mark.slow, id=each["method"])
        for each in REQUESTS
    ],
)
@pytest.mark.filterwarnings("ignore:a chain of")
def test_no_weight_is_converted_in_a_round(settings, models):
    engine = Engine(*models, max_batch=2, device="cpu", precision="bf16")
    engine.add_request(engine.resolve(Request(1, **settings)))
    modules = [model for each in models for model in vars(each).values() if isinstance(model, nn.Module)]
    weights = [weight for module in modules for weight in module.state_dict().values()]
    weights += [weight for module in modules for weight in engine.precision.prepare(module).state_dict().values()]
    with Conversions() as seen:
        while engine.scheduler:
            engine.step()
    assert torch.bfloat16 in seen.products
    assert not seen.converted & {weight.data_ptr() for weight in weights}


def test_only_matrix_products_are_copied():
    precision, head = Precision("bf16", CPU), Head(4, 8, 2, 6)
    twin = precision.prepare(head)
    assert precision.prepare(head) is twin and precision.prepare(head.res_blocks) is twin.res_blocks
    assert twin.time_embed is head.time_embed and twin.cond_embed is head.cond_embed
    copied = {module for module in twin.modules() if isinstance(module, BFloat16Linear)}
    assert len(copied) == 2 + 2 * 3 + 1  # before and after the blocks, theirs, and the last modulation
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    shared = {id(parameter) for parameter in head.parameters()}
    assert all(id(parameter) in shared for parameter in twin.parameters())


def test_other_policies_copy_nothing():
    head = Head(4, 8, 1, 6)
    for policy in ("fp32", "tf32"):
        assert Precision(policy, CPU).prepare(head) is head and not Precision(policy, CPU).bytes_to_copy(head)


def test_memory_is_checked_for_the_copies(models, monkeypatch):
    precision = Precision("bf16", CPU)
    for each in models:
        num_branches = sum(precision.bytes_to_copy(getattr(each, name)) for name in ("target", "draft"))
        assert num_branches == sum(
            buffer.nbytes
            for name in ("target", "draft")
            for module in Precision("bf16", CPU).prepare(getattr(each, name)).modules()
            if isinstance(module, BFloat16Linear)
            for buffer in module.buffers()
        )
        monkeypatch.setattr(cspd_device, "free_bytes", lambda device, free=num_branches: free)
        with pytest.raises(ValueError, match=re.escape("max_batch=1")):
            Engine(each, max_batch=1, device="cpu", precision="bf16")


def test_engines_over_the_same_models_share_the_copies(models):
    engine = Engine(*models, max_batch=2, device="cpu", precision="bf16")
    target = models[0].target
    smaller = engine.with_slots(1)
    assert smaller.precision.prepare(target) is engine.precision.prepare(target)
    assert not engine.precision.bytes_to_copy(target)
