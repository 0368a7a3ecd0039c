"""Precision, memory and transfers."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import standin
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import toy_mar, toy_models

from cspd import Engine, MARModels, Request, VQModels, files
from cspd import device as cspd_device
from cspd.cli.sample import sample_to_folder
from cspd.device import BFloat16Linear, Precision, Report, send
from cspd.gpu_check.sizes import TINY, Setup
from cspd.gpu_check.times import _matmul
from cspd.method import method_names
from cspd.request import Sequence
from mar.checkpoint import create_vae
from mar.head import Head

aten = torch.ops.aten
CPU = torch.device("cpu")
MAR = {"num_iter": 2, "cfg": 2.0, "num_sampling_steps": 5}
SPECULATIVE = {"method": "speculative", "window": 3, "draft": "frozen"}
REQUESTS = [
    {"method": "ar", **MAR},
    {**SPECULATIVE, **MAR},
    {"method": "calibrated", "head_calls": 3, "audit": 0.5, **MAR},
    {"method": "dpm-solver++", "num_iter": 2, "cfg": 2.0, "head_calls": 4},
    {"method": "lazymar", "warmup": 1, "refresh": 3, **MAR, "num_iter": 16},
    {"method": "mar-draft", "gamma": 4, "prefill": 0.5, **MAR},
    *({"method": method, "family": "VQ", "cfg": 2.0} for method in ("ar", "eagle2", "sd")),
]


class Conversions(TorchDispatchMode):
    """The addresses of tensors that are converted to another type, and the types of matrix products."""

    def __init__(self):
        super().__init__()
        self.converted, self.products = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (aten.to, aten._to_copy) and result.dtype != args[0].dtype:
            self.converted.add(args[0].data_ptr())
        if function.overloadpacket in (aten.linear, aten.addmm, aten.mm):
            self.products.add(result.dtype)
        return result


@pytest.fixture(scope="module")
def models():
    return MARModels(toy_mar(), toy_mar(2)), VQModels(**toy_models(length=16))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(each, marks=() if each["method"] in ("ar", "eagle2") else pytest.mark.slow, id=each["method"])
        for each in REQUESTS
    ],
)
def test_no_weight_is_converted_in_a_round(settings, models):
    engine = Engine(*models, max_batch=2, device="cpu", precision="bf16")
    engine.add_request(engine.resolve(Request(1, **settings)))
    modules = [model for each in models for model in vars(each).values() if isinstance(model, nn.Module)]
    modules += [engine.precision.prepare(module) for module in modules]
    addresses = {weight.data_ptr() for module in modules for weight in module.state_dict().values()}
    with Conversions() as seen:
        while engine.scheduler:
            engine.step()
    assert torch.bfloat16 in seen.products and not seen.converted & addresses


def test_only_matrix_products_are_copied():
    precision, head = Precision("bf16", CPU), Head(4, 8, 2, 6)
    twin = precision.prepare(head)
    assert precision.prepare(head) is twin and precision.prepare(head.res_blocks) is twin.res_blocks
    assert twin.time_embed is head.time_embed and twin.cond_embed is head.cond_embed
    copied = {module for module in twin.modules() if isinstance(module, BFloat16Linear)}
    assert len(copied) == 2 + 2 * 3 + 1  # before and after the blocks, in the blocks, and the last modulation
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    shared = {id(parameter) for parameter in head.parameters()}
    assert all(id(parameter) in shared for parameter in twin.parameters())


@pytest.mark.parametrize("policy", ["fp32", "tf32"])
def test_other_policies_copy_nothing(policy):
    precision, head = Precision(policy, CPU), Head(4, 8, 1, 6)
    assert precision.prepare(head) is head and not precision.bytes_to_copy(head)


def test_memory_is_checked_for_the_copies(models, monkeypatch):
    for each in models:
        precision = Precision("bf16", CPU)
        both = each.target, each.draft
        needed = sum(precision.bytes_to_copy(model) for model in both)
        copies = [module for model in both for module in precision.prepare(model).modules()]
        copies = [module for module in copies if isinstance(module, BFloat16Linear)]
        assert needed == sum(buffer.nbytes for module in copies for buffer in module.buffers())
        assert not any(map(precision.bytes_to_copy, both))
        monkeypatch.setattr(cspd_device, "free_bytes", lambda device, free=needed: free)
        with pytest.raises(ValueError, match="max_batch=1"):
            Engine(each, max_batch=1, device="cpu", precision="bf16")


def test_engines_over_the_same_models_share_the_copies(models):
    engine = Engine(*models, max_batch=2, device="cpu", precision="bf16")
    target = models[0].target
    assert engine.with_slots(1).precision.prepare(target) is engine.precision.prepare(target)
    assert not engine.precision.bytes_to_copy(target)


# Memory: after a long run of mixed requests, some of which fail, the engine has what it had near the beginning.

NUM, FIRST, LAST = 1000, 300, 998  # measured when no request is under way; by the first, every shape has occurred
DAMAGED = 2  # the label whose image cannot be made
CSPD = {"method": "mar-draft", "gamma": 16, "prefill": 0.5}
KINDS = [{"method": "ar"}, SPECULATIVE, CSPD, CSPD | {"chains": "speculative", "window": 2, "draft": "frozen"}]
KINDS = [{"family": "MAR", "num_sampling_steps": 4, **kind} for kind in KINDS]
KINDS += [{"method": name, "family": "VQ"} for name in method_names(["VQ"])]


def request_of(index):
    """The requests differ in method, label, seed, guidance, temperature and iterations."""
    settings = {"cfg": 1 + index % 7 / 2, "temperature": 0.8 + index % 5 / 10, **KINDS[index % len(KINDS)]}
    if index % 50 == 49:  # needs a calibration of its own
        settings = {"family": "MAR", "method": "speculative", "window": 3, "cfg": 1 + index / 100}
        settings["num_sampling_steps"] = 4
    elif settings["family"] == "VQ" and settings["method"] == "speculative":
        settings |= {"window": index % 8, "draft": "jacobi"}
    elif settings["method"] in ("sjd", "mc-sjd", "sjd-pac", "gsd"):
        settings["window"] = 13 + index % 8
    if settings["family"] == "MAR":
        settings["num_iter"] = 2 + index % 4
    return Request(label=index % 3, seed=index, **settings)


def in_use():
    """Resident bytes of the process, and the number of tensors and sequences that something holds."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return np.array([resident, sum(isinstance(each, (torch.Tensor, Sequence)) for each in gc.get_objects())])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no such file on this system")
@pytest.mark.filterwarnings("ignore")
def test_a_thousand_mixed_requests_leave_nothing_behind(small_mar, monkeypatch):
    monkeypatch.setattr(files, "REMEMBERED", 2)  # fits, so that the first measurement already has the most
    torch.manual_seed(0)
    damaged, vq = copy.deepcopy(small_mar), toy_models(codes=9, length=16)
    with torch.inference_mode(False), torch.no_grad():
        damaged.class_emb.weight[DAMAGED] = math.nan
        vq["target"].cls_embedding.embedding_table.weight[DAMAGED] = math.nan
    mar = MARModels(damaged, copy.deepcopy(small_mar), create_vae("kl_digits32"))
    engine = Engine(mar, VQModels(**vq), max_batch=8, device="cpu")
    failed = finished = refused = 0
    kept = []
    for index in range(NUM):
        if index % 20 == 19:
            with pytest.raises(ValueError, match="cfg"):
                engine.add_request(request_of(index).but(cfg=-1.0 - index))
            refused += 1
            continue
        engine.add_request(request_of(index))
        while len(engine.scheduler) > (0 if index in (FIRST, LAST) else 8):
            outputs, kept = engine.step().values(), [each.shared for each in engine.scheduler.in_flight()] or kept
            finished += len(outputs)
            failed += sum(output.error is not None for output in outputs)
        if index == FIRST:
            after_first = in_use()
    del outputs
    after_all = in_use()
    assert refused == NUM // 20 and finished == NUM - refused and failed > 100
    assert (after_all < (1.05, 1.01) * after_first).all()
    assert kept and not any(kept)


# Arrays that are sent to a device together: the same values there, by one copy that nobody waits for.

ARRAYS = {
    "bytes": np.array([True, False, True]),  # the next one must begin at an aligned address
    "positions": np.arange(5),
    "scale": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3),
    "empty": np.zeros((0, 4), dtype=np.int64),
    "transposed": np.arange(6.0).reshape(2, 3).T,
    "number": np.array(7),
}


def check(sent, arrays):
    assert sent.keys() == arrays.keys()
    for name, array in arrays.items():
        assert sent[name].shape == array.shape and sent[name].dtype == torch.from_numpy(array).dtype
        assert sent[name].tolist() == array.tolist()


def test_to_the_cpu_nothing_is_copied():
    sent = send(ARRAYS, CPU)
    check(sent, ARRAYS)
    assert np.shares_memory(sent["scale"].numpy(), ARRAYS["scale"])


@pytest.mark.parametrize("arrays", [ARRAYS, {}, {"empty": ARRAYS["empty"]}], ids=["many", "none", "empty"])
def test_to_a_gpu_all_go_in_one_copy(arrays):
    with standin.cuda() as gpu:
        sent = send(arrays, standin.DEVICE)
        assert gpu.kernels == {"copy to the device": 1} and not gpu.blocking
        assert all(tensor.device == standin.DEVICE for tensor in sent.values())
        check(sent, arrays)


def test_only_reading_a_report_waits():
    with standin.cuda() as gpu:
        report = Report(torch.arange(3, device=standin.DEVICE))
        assert not gpu.reads and not gpu.blocking
        assert report.tolist() == [0, 1, 2]
        assert [place.what for place in gpu.reads] == ["event.synchronize"]


# Flags of torch, which hold for the whole process: so each state of them is tried in a process of its own.

MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn
HAS_NEWER = hasattr(CUDNN, "conv")
STATES = {  # by name: what a process did before it sampled, as (object, name, value)
    "nothing": [],
    "older": [(MATMUL, "allow_tf32", True), (CUDNN, "allow_tf32", False)],
    "newer tf32": [(MATMUL, "fp32_precision", "tf32")],
    "newer ieee": [(MATMUL, "fp32_precision", "ieee"), (getattr(CUDNN, "conv", None), "fp32_precision", "ieee")],
    "newer, everything": [(torch.backends, "fp32_precision", "tf32")],
    "no reduction": [(MATMUL, "allow_bf16_reduced_precision_reduction", False)],
}


def flags():
    """The flags that this torch has, or the error of reading them."""
    owners = [MATMUL, CUDNN, getattr(CUDNN, "conv", None)]
    names = "allow_tf32 fp32_precision allow_bf16_reduced_precision_reduction".split()
    names.append(f"{names[-1]}_split_k")
    found = []
    for owner, name in itertools.product(owners, names):
        try:
            found.append(getattr(owner, name, None))
        except RuntimeError:
            found.append(RuntimeError)
    return [*found, torch.backends.cuda.cudnn_sdp_enabled()]


def products():
    """The precision of float32 products in force: of matrices, and of convolutions."""
    if HAS_NEWER:
        return tuple(owner.fp32_precision == "tf32" for owner in (MATMUL, CUDNN.conv))
    return MATMUL.allow_tf32, CUDNN.allow_tf32


def check_flags(state):
    for owner, name, value in STATES[state]:
        setattr(owner, name, value)
    before = flags()
    for policy in ("fp32", "tf32", "bf16"):
        precision = Precision(policy, torch.device("cuda:1"))
        with precision.fast():
            assert products() == (policy == "tf32",) * 2
            assert not MATMUL.allow_bf16_reduced_precision_reduction
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            with precision.full():
                assert products() == (False, False)
            with precision.decoding():
                assert products() == (True, True)
            assert products() == (policy == "tf32",) * 2
        assert flags() == before
        told = {"matmul_precision": "tf32" if policy == "tf32" else "ieee", "bf16_reduction": False}
        told |= {"decoding": "tf32", "cudnn_attention": False}
        assert precision.flags() == told and flags() == before


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs a copy of this process")
@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("state", STATES)
def test_flags_are_set_and_restored_by_either_interface(state):
    if "newer" in state and not HAS_NEWER:
        pytest.skip("this torch has the older interface only")
    process = multiprocessing.get_context("fork").Process(target=check_flags, args=(state,))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_decoding_and_attention_have_switches(monkeypatch):
    gpu = torch.device("cuda:1")
    monkeypatch.setenv(cspd_device.DECODING, "0")
    monkeypatch.setenv(cspd_device.CUDNN_ATTENTION, "1")
    precision = Precision("bf16", gpu)
    with precision.decoding():
        assert products() == (False, False) and torch.backends.cuda.cudnn_sdp_enabled()
    assert precision.flags()["decoding"] == "ieee" and precision.flags()["cudnn_attention"]
    for switch in (cspd_device.DECODING, cspd_device.CUDNN_ATTENTION):
        with monkeypatch.context() as patch:
            patch.setenv(switch, "off")
            with pytest.raises(ValueError, match=switch):
                Precision("bf16", gpu)


def test_images_are_decoded_in_tf32_and_tokens_are_not():
    models, seen = VQModels(**toy_models()), {"tokenizer": set(), "target": set()}
    decoder, layer = models.tokenizer.decoder, models.target.layers[0]
    for name, module in (("tokenizer", decoder), ("target", layer)):
        module.register_forward_hook(lambda *_, name=name: seen[name].add(products()))
    with standin.cuda():
        engine = Engine(models, max_batch=1, device=standin.DEVICE, graphs=False)
        engine.generate([Request(1, method="ar")])
    assert seen == {"tokenizer": {(True, True)}, "target": {(False, False)}}


@pytest.mark.parametrize("policy", ["tf32", "bf16"])
def test_records_have_the_flags(policy, tmp_path):
    models = VQModels(**toy_models())
    assert "matmul_precision" not in Engine(copy.deepcopy(models), max_batch=1, device="cpu").describe()
    with standin.cuda():
        too_old = pytest.warns(UserWarning, match="emulates") if policy == "bf16" else contextlib.nullcontext()
        with too_old:
            engine = Engine(models, max_batch=1, device=standin.DEVICE, precision=policy)
        record = sample_to_folder(engine, [Request(1, method="ar")], tmp_path, {})
        found = _matmul(Setup(standin.DEVICE, TINY), policy)
        for each in (record["machine"], engine.describe(), found):
            assert each["matmul_precision"] == ("tf32" if policy == "tf32" else "ieee")
            assert each["bf16_reduction"] is False


def test_threads_beside_other_programs_get_a_hint(monkeypatch):
    """Other processes are counted, this one's own work is not."""
    monkeypatch.setattr(cspd_device, "SLACK", 0.5)
    for others, cores, threads, remedy in ((1.0, 2, 2, "--threads 1"), (5.2, 16, 16, "--threads 10")):
        assert remedy in cspd_device.crowded(others, cores, threads)
    for others, cores, threads in ((1.0, 2, 1), (0.3, 2, 2), (8.0, 16, 8), (4.0, 2, 1)):
        assert cspd_device.crowded(others, cores, threads) is None
    if not Path("/proc/stat").exists():
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        load = cspd_device.Load()
        time.sleep(0.7)
        assert load.cores() > 0.3
        busy.kill()
    with monkeypatch.context() as patch:  # as if this process alone kept a hundred cores busy
        patch.setattr(time, "process_time", lambda: 100 * time.monotonic())
        load = cspd_device.Load()
        time.sleep(0.05)
        assert load.cores() == 0
