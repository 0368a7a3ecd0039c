"""Memory: a long run of mixed requests, bad ones among them, ends with what it had near its beginning."""

from __future__ import annotations

import copy
import gc
import math
import os
from pathlib import Path

import pytest
import torch
from toys import toy_models

from cspd import Engine, MARModels, Request, VQModels
from cspd.method import method_names
from cspd.request import Sequence
from mar.checkpoint import create_vae

NUM, FIRST = 1000, 300  # by then each shape that is made once was made
DAMAGED = 2  # the label that makes no image
QUICK = {"family": "MAR", "num_sampling_steps": 4}
KINDS = [
    {"method": "ar", **QUICK},
    {"method": "speculative", "window": 3, "draft": "frozen", **QUICK},
    {"method": "cspd", "gamma": 16, "prefill": 0.5, **QUICK},
    {"method": "cspd", "gamma": 16, "prefill": 0.5, "chains": "speculative", "window": 2, "draft": "frozen", **QUICK},
    *({"method": name, "family": "VQ"} for name in method_names(["VQ"])),
]


def request_of(index):
    """The requests differ in method, label, seed, guidance, temperature and iterations."""
    kind = KINDS[index % len(KINDS)]
    if index % 50 == 49:
        kind = {"method": "speculative", "window": 3, **QUICK, "cfg": 1 + index / 100}  # a calibration for each
    if kind == {"method": "speculative", "family": "VQ"}:
        kind = kind | {"window": index % 8, "draft": "jacobi"}
    if kind["method"] in ("sjd", "mc-sjd", "sjd-pac", "gsd"):
        kind = kind | {"window": 13 + index % 8}
    settings = {"cfg": 1 + index % 7 / 2, "temperature": 0.8 + index % 5 / 10} | kind
    if kind["family"] == "MAR":
        settings["num_iter"] = 2 + index % 4
    return Request(label=index % 3, seed=index, **settings)


def resident_bytes():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def alive():
    """Tensors and sequences that something still holds."""
    return sum(isinstance(each, (torch.Tensor, Sequence)) for each in gc.get_objects())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no such file on this system")
@pytest.mark.filterwarnings("ignore")
def test_a_thousand_mixed_requests_leave_nothing_behind(small_mar):
    torch.manual_seed(0)
    damaged, vq = copy.deepcopy(small_mar), toy_models(codes=9, length=16)
    with torch.inference_mode(False), torch.no_grad():
        damaged.class_emb.weight[DAMAGED] = math.nan
        vq["target"].cls_embedding.embedding_table.weight[DAMAGED] = math.nan
    mar = MARModels(damaged, copy.deepcopy(small_mar), create_vae("kl_digits32"))
    engine = Engine(mar, VQModels(**vq), max_batch=8, device="cpu")
    failed = finished = refused = 0
    after_first = None
    for index in range(NUM):
        if index % 20 == 19:
            with pytest.raises(ValueError, match="mask"):
                engine.add_request(request_of(index).but(cfg=-1.0 - index))
            refused += 1
            continue
        engine.add_request(request_of(index))
        while len(engine.scheduler) > 8:
            outputs = engine.step().values()
            finished += len(outputs)
            failed += sum(output.error is not None for output in outputs)
        if index == FIRST:
            after_first = resident_bytes(), alive()
    del outputs
    after_all = resident_bytes(), alive()
    while len(engine.scheduler):
        finished += len(engine.step())
    assert refused == NUM // 20 and finished == NUM - refused and failed > 100
    assert after_all[0] < 1.05 * after_first[0]
    assert after_all[1] < 1.03 * after_first[1]
    assert not engine.runners["MAR"].kept and not engine.runners["VQ"].unread
