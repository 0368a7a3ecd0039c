"""Arrays that are sent to a device together: the same there, by one copy that nobody waits for."""

from __future__ import annotations

import numpy as np
import pytest
import standin
import torch

from cspd.device import Report, send

ARRAYS = {
    "bytes": np.array([True, False, True]),  # the next one begins at an aligned place all the same
    "positions": np.arange(5),
    "scale": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3),
    "none": np.zeros((0, 4), dtype=np.int64),
    "turned": np.arange(6.0).reshape(2, 3).T,
    "number": np.array(7),
}


def check(sent: dict[str, torch.Tensor]) -> None:
    assert sent.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert sent[name].shape == array.shape and sent[name].dtype == torch.from_numpy(array).dtype
        assert sent[name].tolist() == array.tolist()


def test_to_the_cpu_nothing_is_copied() -> None:
    sent = send(ARRAYS, torch.device("cpu"))
    check(sent)
    assert np.shares_memory(sent["scale"].numpy(), ARRAYS["scale"])


@pytest.mark.parametrize("arrays", [ARRAYS, {}, {"none": ARRAYS["none"]}], ids=["many", "none", "empty"])
def test_to_a_gpu_all_go_in_one_copy(arrays: dict[str, np.ndarray]) -> None:
    with standin.cuda() as gpu:
        sent = send(arrays, standin.DEVICE)
        assert gpu.kernels == {"copy to the device": 1} and not gpu.blocking
        assert sent.keys() == arrays.keys() and all(tensor.device == standin.DEVICE for tensor in sent.values())
        if arrays is ARRAYS:
            check(sent)


def test_a_report_is_read_when_it_is_there() -> None:
    with standin.cuda() as gpu:
        report = Report(torch.arange(3, device=standin.DEVICE))
        assert not gpu.reads and not gpu.blocking
        assert report.tolist() == [0, 1, 2]
        assert [place.what for place in gpu.reads] == ["event.synchronize"]
