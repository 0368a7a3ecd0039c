"""Graphs of large batches fit the memory of a GPU, so that each is captured once: by a simulated allocator."""

from __future__ import annotations

import contextlib

import allocator
import pytest
import torch
from allocator import GIB

from cspd import Request, noise
from cspd.continuous.rows import run_plain_round
from cspd.device import Precision
from cspd.graphs import MEMORY_SHARE
from cspd.heads.calibration import draft_table, frozen
from cspd.heads.chain import modulated
from cspd.heads.speculative import Chains
from cspd.masked.runner import MARRunner
from cspd.method import find
from cspd.request import Sequence, Stopwatch
from mar.checkpoint import create_mar

META, CPU = torch.device("meta"), torch.device("cpu")
BATCH, STEPS = 64, 100
ROWS = range(64, 512, 64)  # of the iterations of 64 images: one to seven tokens of each
pytestmark = pytest.mark.filterwarnings("error")  # a failed capture warns


@pytest.fixture(scope="module")
def mar_large():
    with META:
        return create_mar("mar_large").eval().requires_grad_(False)


class OnMeta(Precision):
    """bf16, without flags, which are of CUDA."""

    def _products(self, tf32: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def precision() -> Precision:
    return OnMeta("bf16", META)


def sweep_twice(runs, work) -> None:
    """Works on each number of rows, and again, which captures nothing."""
    for _ in range(2):
        before = len(runs.captures)
        for rows in ROWS:
            work(rows)
    assert len(runs.captures) == before == len(ROWS)


def test_modulations_of_all_batches_share_little_memory(mar_large):
    head, names = mar_large.head, mar_large.head.schedule(STEPS).timestep_map[::-1].tolist()

    def every(z):
        for _, _, by_call in modulated(head, z, names, precision()):
            for modulations in by_call:
                del modulations
            del by_call
        return ()

    with allocator.graphs(80 * GIB) as runs:
        sweep_twice(runs, lambda rows: runs.run("chain", every, torch.empty(2, rows, head.cond_dim, device=META)))
        assert runs.bytes < 2 * GIB


def test_chains_that_join_share_little_memory(mar_large):
    head = mar_large.head
    s = head.schedule(STEPS)
    window = 8
    table = torch.from_numpy(draft_table(*frozen(s, window), s, window, 1.0)).to(META)
    with allocator.graphs(80 * GIB) as runs:
        chains = Chains(head, s, table, precision(), noise, graphs=runs)

        def join(rows):
            integers, scale = torch.empty(rows, dtype=torch.int64, device=META), torch.empty(rows, 1, device=META)
            z = torch.empty(2, rows, head.cond_dim, device=META)
            chains.start(range(rows), integers, integers, integers, z, scale, scale)
            chains.clear()

        join(ROWS[-1])  # slots for all of them
        sweep_twice(runs, join)
        assert runs.bytes < 3 * GIB


@pytest.mark.parametrize("cached", [0, 3])  # GiB that earlier work has freed
def test_memory_that_was_cached_does_not_hide_what_a_graph_takes(cached):
    with allocator.graphs(80 * GIB) as runs:
        torch.empty(cached * GIB, dtype=torch.uint8, device=META)
        assert torch.cuda.mem_get_info() == ((80 - cached) * GIB, 80 * GIB)
        runs.run("large", lambda x: x.new_empty(GIB, dtype=torch.uint8).sum(), torch.empty(1, device=META))
        assert GIB <= runs.bytes < 1.1 * GIB


@pytest.mark.slow  # 20 s
def test_two_images_of_mar_large_in_each_slot_capture_once(mar_large):
    """128 rounds of 64 images at the authors' settings; the second 64 capture nothing."""
    method, num_captures = find("ar", "MAR"), []
    with allocator.graphs(80 * GIB) as runs:
        runner = MARRunner(mar_large, BATCH, precision(), graphs=runs)
        for first in (0, BATCH):
            requests = [method.fill(Request(1, first + i, "ar", **SETTINGS)) for i in range(BATCH)]
            batch = [Sequence(request, method=method, slot=i, seq_len=256) for i, request in enumerate(requests)]
            runner.admit(batch)
            for _ in range(SETTINGS["num_iter"]):
                finished = run_plain_round(runner, batch, Stopwatch(CPU))
            assert len(finished) == BATCH
            num_captures.append(len(runs.captures))
    assert num_captures == [26, 26]
    assert runs.bytes < MEMORY_SHARE / 2 * 80 * GIB


SETTINGS = {"num_iter": 64, "num_sampling_steps": STEPS, "cfg": 3.0, "cfg_schedule": "linear", "temperature": 1.0}
