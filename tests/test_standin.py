"""The stand-in for CUDA: it sees what waits, and gives the numbers of a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import standin
import torch

from cspd.graphs import Graphs


@pytest.fixture
def gpu() -> Iterator[standin.StandIn]:
    with standin.cuda() as gpu:
        yield gpu


READS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "synchronize": lambda x: torch.cuda.synchronize(),
}
BLOCKING = {
    "tensor": lambda x: torch.tensor([1, 2], device=x.device),
    "as_tensor": lambda x: torch.as_tensor(np.ones(3), device=x.device),
    "not pinned": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "waits": lambda x: torch.ones(3).pin_memory().to(x.device),
    "index": lambda x: x[torch.tensor([0])],
    "value": lambda x: x.index_put_([x.long()], torch.tensor(1.0)),
}
NEITHER = {
    "kernels": lambda x: (x * 2 + 1).softmax(0)[1:].sum(),
    "pinned": lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True),
    "late": lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True),
    "late of any kind": lambda x: x.to("cpu", non_blocking=True),
    "factories": lambda x: torch.arange(3, device=x.device) + torch.zeros(3, device=x.device) + 3,
}


@pytest.mark.parametrize(
    "work, reads, blocking",
    [
        *(pytest.param(work, 1, 0, id=name) for name, work in READS.items()),
        *(pytest.param(work, 0, 1, id=name) for name, work in BLOCKING.items()),
        *(pytest.param(work, 0, 0, id=name) for name, work in NEITHER.items()),
    ],
)
def test_what_waits_is_noted(gpu, work, reads, blocking):
    x = torch.arange(3.0, device="cuda:0")
    work(x)
    assert (gpu.reads.total(), gpu.blocking.total()) == (reads, blocking)


def test_kernels_are_counted_and_views_are_not(gpu):
    x = torch.ones(2, 3, device="cuda:0")
    gpu.reset()
    layer = torch.nn.functional.layer_norm(x.view(3, 2).T, (3,))
    torch.nn.functional.scaled_dot_product_attention(layer, layer, layer)
    x.add_(1)
    assert gpu.kernels == {"native_layer_norm": 1, "attention": 1, "add_": 1}


def test_devices_do_not_mix(gpu):
    x = torch.ones(3, device="cuda:0")
    with pytest.raises(RuntimeError):
        x + torch.ones(3)
    assert (x + torch.tensor(1.0)).device == x.device  # a number, as torch sees it


def test_types_that_cuda_does_not_take_are_refused(gpu):
    x, weight = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3)
    torch.nn.functional.layer_norm(x, (3,), weight)  # a CPU takes them
    with pytest.raises(RuntimeError):
        torch.nn.functional.layer_norm(x.to("cuda:0"), (3,), weight.to("cuda:0"))


def test_what_is_copied_to_the_host_is_late(gpu):
    there = torch.ones(3, device="cuda:0").to("cpu", non_blocking=True)
    copied, later = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    copied.record(torch.cuda.current_stream())
    later.record(torch.cuda.current_stream())
    assert not copied.query() and (there > 1e38).all()
    with pytest.raises(RuntimeError):
        copied.elapsed_time(later)
    later.synchronize()
    assert copied.query() and there.tolist() == [1, 1, 1]
    assert copied.elapsed_time(later) == 1
    assert [place.what for place in gpu.reads] == ["event.synchronize"]


def test_graphs_are_replayed_and_read_nothing(gpu):
    total = torch.zeros(2, device="cuda:0")
    graphs = Graphs(total.device, enabled=True)

    def add(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return total.add_(x).clone(), 2 * x.view(2, 1)

    for number in (1.0, 2.0, 3.0):
        gpu.reset()
        sums, doubled = graphs.run("add", add, torch.full((2,), number, device="cuda:0"), state=[total])
        assert doubled.tolist() == [[2 * number]] * 2
        assert gpu.kernels["graph"] == 1
    assert sums.tolist() == [6, 6] and gpu.kernels["add_"] == 0
    with pytest.warns(UserWarning):
        graphs.run("read", lambda x: x.sum().item(), total)


def test_all_is_undone():
    before = {name: getattr(torch.cuda, name) for name in ("Event", "is_available", "synchronize")}
    with standin.cuda():
        x = torch.ones(3, device="cuda:0")
    assert all(getattr(torch.cuda, name) is function for name, function in before.items())
    with pytest.raises(RuntimeError):
        x + 1
    with torch.inference_mode():
        assert (torch.ones(2) + 1).is_inference()
