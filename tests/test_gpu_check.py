"""`cspd gpu-check`: it survives crashes and hangs, resumes, and finds what is wrong; it replays acceptance truly."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import gpu_costs
import numpy as np
import pytest
import standin
import torch
from faults import STOPPED, begun, check, question, stopped
from launching import wait_until
from safetensors import safe_open

from cspd.cli import main
from cspd.cli.bench import QUESTIONS
from cspd.device import check_fits
from cspd.gpu_check import models, right, times
from cspd.gpu_check.models import Mode, asked, engine_of, switched
from cspd.gpu_check.run import NO_GRAPH, SCHEMA, failures, format_report, read_report, tried
from cspd.gpu_check.sizes import FULL, MAR_L, SPHERE_L, TINY, VQ_L, Setup
from cspd.graphs import Graphs
from cspd.kernels import SWITCH
from cspd.masked.runner import MARRunner
from cspd.method import METHODS
from cspd.request import Request
from cspd.speed import batch_at, starts
from mar.model import MAR

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
LIMIT = 3.0  # seconds of a case


@pytest.fixture
def imported(monkeypatch) -> multiprocessing.context.BaseContext:
    """Child processes are forked from one that has imported everything, and start in no time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests"))))
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    return context


@pytest.fixture
def settings():
    return Setup(CPU, TINY)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_crash_an_error_or_a_hang_loses_one_case(tmp_path, capsys, imported):
    """After an error the process is replaced: CUDA may fail in all that it does from then on."""
    out = tmp_path / "right.json"
    one = question(out, "killed", "unusable", "fine", "hang", "fine again")._replace(case_seconds=LIMIT)
    report = check(out, one)
    found = report["cases"]
    assert f"exit code -{signal.SIGKILL.value}" in found["killed"]["lost"] and f"{LIMIT:g} s" in found["hang"]["lost"]
    assert "illegal memory access" in found["unusable"]["error"]
    assert found["fine"]["passed"] and found["fine"]["value"] == "NaN" and found["fine again"]["passed"]
    assert failures(report) == ["killed", "unusable", "hang"] and read_report(one, out) == report

    capsys.readouterr()
    assert main(["gpu-check", "right", "--show", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "2 lost" in shown and "killed; hang" in shown and "1 failed" in shown

    # what raised an error is run again, what was lost is not
    before = begun(out)
    assert before == ["killed", "unusable", "fine", "hang", "fine"]
    check(out, one)
    assert begun(out) == [*before, "unusable"]


def test_what_was_left_out_is_run_later_and_what_was_started_is_not(tmp_path, imported):
    out = tmp_path / "right.json"
    one = question(out, "fine", "fine again")
    report = check(out, one, minutes=0)
    assert "2 left out" in format_report(one, report) and not failures(report) and not begun(out)
    report["cases"]["fine"] = {"started": True}  # as if the machine had gone down during it
    out.write_text(json.dumps(report))
    assert "1 lost" in format_report(one, read_report(one, out))

    report = check(out, one)
    assert "lost" in report["cases"]["fine"] and report["cases"]["fine again"]["passed"]
    assert begun(out) == ["fine"] and failures(report) == ["fine"]
    assert "left_out" in check(out, one, overwrite=True, minutes=0)["cases"]["fine"]


def test_a_case_that_runs_when_the_time_is_over_is_ended_and_run_later(tmp_path, monkeypatch, imported):
    out = tmp_path / "right.json"
    monkeypatch.setattr("cspd.gpu_check.run.LEAST_SECONDS", 0.0)
    begins = time.monotonic()
    report = check(out, question(out, "hang"), minutes=0.01)
    assert "left_out" in report["cases"]["hang"] and not failures(report) and time.monotonic() - begins < 60


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_stopped_by_a_person(tmp_path, imported):
    """A case under way is in the file as started, and is run again by whoever stopped it."""
    out = tmp_path / "right.json"
    process = imported.Process(target=stopped, args=(out,))
    process.start()
    wait_until(lambda: "hang" in begun(out) or not process.is_alive(), 120)
    one = question(out)
    assert read_report(one, out)["cases"]["hang"] == {"started": True}
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == STOPPED
    assert list(read_report(one, out)["cases"]) == ["fine"]


def test_a_round_that_could_not_be_captured_has_failed():
    def case():
        warnings.warn(f"{NO_GRAPH} 'backbone', which runs as single kernels: why", stacklevel=1)
        return {"passed": True}

    found = tried(case, CPU)
    assert found["passed"] is False and "single kernels: why" in found["warnings"][0]


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "nonsense",
        "[]",
        json.dumps({"schema": SCHEMA, "question": "right", "scale": "full", "device": "H100", "cases": {}}),
    ],
)
def test_another_file_is_not_overwritten(tmp_path, content, capsys):
    out = tmp_path / "right.json"
    out.write_text(content)
    assert main(["gpu-check", "right", "--tiny", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "--overwrite" in capsys.readouterr().err and out.read_text() == content


def test_what_can_be_known_beforehand_is_an_error_at_once(tmp_path, capsys):
    """Official sizes want a GPU, and the authors' code has a certain file."""
    out = tmp_path / "gpu"
    assert main(["gpu-check", "fast", "--out", str(out)]) == 2
    assert "--tiny" in capsys.readouterr().err
    assert main(["gpu-check", "fast", "--tiny", "--device", "cpu", "--mar", str(tmp_path), "--out", str(out)]) == 2
    assert "--mar" in capsys.readouterr().err and not out.exists()


def test_the_time_limit_cuts_the_least_important_times():
    """Batches of 64, 1 and 8 of every size of MAR come first, those of 256 last; all cells have all samplers."""
    names = [*times.fast_cases(Setup(CPU, FULL))]
    of_mar = list(dict.fromkeys(name.partition(": ")[0] for name in names if name.startswith("MAR")))
    assert of_mar == [f"MAR-{size}, batch {batch}" for batch in (64, 1, 8, 256) for size in "LBH"]
    assert len(names) == len(set(names)) and names[-1].startswith("LlamaGen-L, batch 256")
    for cell in of_mar:
        own = [name.partition(": ")[2] for name in names if name.startswith(f"{cell}: ")]
        assert own == list(times.METHODS["MAR"])
    models_timed = {name.partition(",")[0] for name in names}
    assert {"LlamaGen-L", "LlamaGen-XL", "LlamaGen-B", "SphereAR-L", "SphereAR-B"} <= models_timed


QUICK = [("MAR", "ar"), ("MAR", "lazymar:denoiser=calibrated"), ("VQ", "sd")]


@pytest.mark.parametrize(
    "family, name",
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in models.CHECKED],
)
def test_the_file_has_the_images_of_a_cpu(family, name, device):
    """If it fails after a change that is meant to change images: `python scripts/record_images.py`."""
    mode = Mode(graphs=device != CPU)
    found = right.compared(right.generated(family, name, device, mode), right.recorded(family, name))
    assert found["passed"], found


def test_the_file_is_small_and_has_every_method():
    with safe_open(right.RECORD, "pt") as file:
        names = {name.rpartition(" ")[0] for name in file.keys()}
    assert names == {f"{family} {name}" for family, name in models.CHECKED}
    methods = {(family, name.partition(":")[0]) for family, name in models.CHECKED}
    others = {("MAR", "budget")}  # whose plan depends on the device
    assert methods | others == {(method.family, method.name) for method in METHODS if method.family != "causal"}
    assert right.RECORD.stat().st_size < 2**20 and set(models.SMOKE) <= set(models.CHECKED)


@pytest.mark.parametrize("family, name", [("MAR", "calibrated"), ("VQ", "ar")])
def test_images_that_differ_are_found(family, name):
    """Those of other seeds."""
    expected = right.recorded(family, name)
    assert right.compared(expected, expected)["passed"]
    others = {kind: images.roll(1, 0) for kind, images in expected.items()}
    assert not right.compared(others, expected)["passed"]


@pytest.mark.parametrize("way", ["bf16", "bf16, alone", "fp32, alone", "fp32, NaN in what must not be read"])
@pytest.mark.parametrize("subject", [MAR_L, VQ_L, SPHERE_L], ids=str)
def test_conditions_are_right(subject, way, settings):
    found = right._condition_cases(settings, subject)[f"conditions of {subject}, {way}"]()
    assert found["passed"], found
    assert ("bf16" in way) == (found["relative_error"] > 1e-4)


@pytest.mark.parametrize("how", [right._alone, right._free_slots, right._uninitialised, right._neighbour])
@pytest.mark.parametrize("subject", [MAR_L, VQ_L, pytest.param(SPHERE_L, marks=pytest.mark.slow)], ids=str)
def test_images_depend_on_nothing_else(subject, how, settings):
    found = right._in_batch(settings, subject, right.METHODS_IN_BATCH[subject.family][0], how)
    assert found["passed"], found


def test_padding_that_is_read_is_found(settings, monkeypatch):
    embed = MAR.embed

    def unmasked(self, tokens, positions, is_known, class_embedding):
        return embed(self, tokens, positions, torch.ones_like(is_known), class_embedding)

    monkeypatch.setattr(MAR, "embed", unmasked)
    case = right._condition_cases(settings, MAR_L)[f"conditions of {MAR_L}, fp32, NaN in what must not be read"]
    assert not case()["passed"]


def test_slots_that_are_not_cleared_are_found(settings, monkeypatch):
    monkeypatch.setattr("cspd.discrete.kv_cache.KVCache.clear", lambda self, slots: None)
    assert not right._in_batch(settings, VQ_L, "sjd-pac", right._free_slots)["passed"]


@pytest.mark.parametrize("how", [right._neighbour, right._uninitialised])
def test_other_memory_that_is_read_is_found(how, settings, monkeypatch):
    """As if conditions contained the mean of the batch, or new memory."""
    conditions = MARRunner.conditions

    def wrong(self, batch, rows):
        z = conditions(self, batch, rows)
        if how is right._neighbour:
            return z + z.mean()
        is_filled = torch.empty(1, dtype=torch.int64) == torch.iinfo(torch.int64).max
        return torch.where(is_filled, torch.nan, z)

    monkeypatch.setattr(MARRunner, "conditions", wrong)
    assert not right._in_batch(settings, MAR_L, "calibrated", how)["passed"]


def test_a_batch_that_is_read_is_found(settings, monkeypatch):
    """As if conditions depended on the number of images in the batch."""
    conditions = MARRunner.conditions
    monkeypatch.setattr(MARRunner, "conditions", lambda self, batch, rows: conditions(self, batch, rows) * len(batch))
    assert not right._condition_cases(settings, MAR_L)[f"conditions of {MAR_L}, fp32, alone"]()["passed"]
    assert not right._in_batch(settings, MAR_L, "calibrated", right._alone)["passed"]


def test_switches_hold_in_their_block_only(monkeypatch):
    monkeypatch.setenv(SWITCH, "1")
    with switched(Mode(kernels=False, attention="MATH")):
        assert os.environ[SWITCH] == "0" and not torch.backends.cuda.flash_sdp_enabled()
    assert os.environ[SWITCH] == "1" and torch.backends.cuda.flash_sdp_enabled()


def test_images_are_those_of_a_cpu_on_a_stand_in_for_cuda():
    with standin.cuda():
        on_gpu = Setup(standin.DEVICE, TINY)
        try:
            for name in ("draws", "images of VQ ar, default"):
                found = right.cases(on_gpu)[name]()
                assert found["passed"], found
        finally:
            models.bundled.cache_clear()  # models of the stand-in end with it


def test_too_little_memory_is_not_an_error():
    found = tried(lambda: check_fits(2**60, 1, "", "take less", CPU), CPU)
    assert "skipped" in found and "error" not in found


def test_a_backend_that_does_not_take_a_shape_is_skipped(settings):
    """A CPU has no attention by cuDNN."""
    mode = Mode(attention="CUDNN_ATTENTION")
    found = tried(lambda: {"z": right.conditions(settings, MAR_L, "bf16", mode)}, CPU)
    assert "skipped" in found and "error" not in found


def test_times_are_printed_as_ratios():
    """To `ar` and to the authors' code with the same model and batch."""
    common = {"model": "MAR-L", "batch": 8, "peak_gib": 1.0, "first_s": 9.0}
    cases = {
        "base": common | {"method": "ar", "last_s": 2.0, "ms": 250.0, "phase_s": {"decode": 0.5}},
        "theirs": common | {"method": times.AUTHORS, "last_s": 8.0, "ms": 1000.0},
        "ours": common | {"method": "calibrated", "last_s": 1.0, "ms": 125.0, "capture_s": [3.0, 0.25]},
        "once": common | {"method": "budget"},  # there was no time for a second pass
        "other": common | {"method": "calibrated", "batch": 1, "last_s": 1.0, "ms": 1000.0},
    }
    lines = times.fast_tables(cases).splitlines()[2:]
    base, theirs, ours, once, other = (line.replace(times.AUTHORS, "theirs").split() for line in lines)
    assert base[3:] == ["9.00", "2.00", "250.0", "1.00", "4.00", "0.25", "1.0"]
    assert theirs[3:] == ["9.00", "8.00", "1000.0", "0.25", "1.00", "1.0"]
    assert ours[3:] == ["9.00", "1.00", "125.0", "2.00", "8.00", "3.0", "0.2", "1.0"]
    assert once[3:] == ["9.00", "1.0"] and other[3:] == ["9.00", "1.00", "1000.0", "1.0"]


def test_the_summary_says_whether_it_is_right_and_what_is_missing(tmp_path, capsys):
    passed, failed, left_out = {"passed": True}, {"passed": False}, {"left_out": "no time"}
    report = {"schema": SCHEMA, "question": "right", "device": "H100", "scale": "full"}

    def summary(**cases):
        (tmp_path / "right.json").write_text(json.dumps(report | {"cases": cases}))
        status = main(["gpu-check", "right", "--show", "--out", str(tmp_path)])
        return status, [line for line in capsys.readouterr().out.splitlines() if line][-2:]

    status, (_, is_right) = summary(one=passed, two=passed)
    assert status == 0 and is_right.startswith("right: 2 ")
    status, (so_far, missing) = summary(one=passed, two=left_out)
    assert status == 0 and so_far.startswith("right so far: 1 ") and "no time" in missing and "two" in missing
    status, (wrong, lost) = summary(one=failed, two={"lost": "it crashed"})
    assert status == 1 and wrong == "not right: 1 failed: one" and lost.endswith("two")


def test_without_the_authors_code_the_summary_asks_for_it(settings):
    name = f"{MAR_L}, batch 2: {times.AUTHORS}"
    found = times.fast_cases(settings)[name]()
    report = {"device": "CPU", "scale": "tiny", "cases": {name: found}}
    assert "--mar" in format_report(times.FAST, report) and not failures(report)


def test_whole_images_are_timed_twice_or_once_if_the_time_is_over(settings):
    work = lambda: time.sleep(0.01)  # noqa: E731
    found = times.passes(settings, work, 2, lambda: True)
    assert len(found["pass_s"]) == 2 and found["ms"] == 1000 * found["last_s"] / 2 >= 5
    assert len(times.passes(settings, work, 2, lambda: False)["pass_s"]) == times.MOST_PASSES
    found = times.passes(Setup(CPU, TINY, until=time.monotonic()), work, 2, lambda: True)
    assert len(found["pass_s"]) == 1 and "ms" not in found


@pytest.mark.parametrize("name", ["calibrated", "budget"])
def test_an_image_is_timed_with_its_decoding(name, settings):
    found = times.images(settings, MAR_L, 2, name)
    assert found["finite"] and found["phase_s"]["decode"] > 0 and len(found["capture_s"]) == 2
    assert found["head_calls"] == {"calibrated": 8 * 10, "budget": 5 * 32}[name]  # 8 iterations, 5 rounds of the plan


def test_captures_are_told_apart_by_pass(settings, monkeypatch):
    """A graph is captured in the first pass and replayed in the second."""

    def capture(trials, function):
        time.sleep(0.05)
        return function(), function

    monkeypatch.setattr("cspd.engine.Graphs", lambda device, enabled: Graphs(device, enabled=True, capture=capture))
    found = times.images(settings, MAR_L, 2, "calibrated")
    first, last = found["capture_s"]
    assert first > 0.3 and last == 0 and found["first_s"] > first


def test_a_round_is_profiled(settings):
    found = times.where_cases(settings)[f"round of {VQ_L} ar, batch 2"]()
    assert found["round_ms"] >= found["launch_ms"] > 0 and found["kernels"] > 100 and not found["waits"]
    assert "aten::mm" in times.where_tables({f"round of {VQ_L} ar, batch 2": found})


def test_chains_take_the_head_calls_that_are_replayed(settings):
    pool = np.array([5, 7, 9])
    engine = engine_of(settings, MAR_L, 3, source=models.head_calls(pool, CPU))
    own = {"window": 4, "draft": "frozen", "num_iter": 8, "num_sampling_steps": 12}
    outputs = engine.generate([Request(i, seed=i, method="speculative", **own) for i in range(3)])
    token_cost = torch.stack([output.token_cost for output in outputs])
    position = torch.arange(token_cost.shape[1])
    assert (token_cost == torch.as_tensor(pool)[(7919 * torch.arange(3)[:, None] + position) % 3]).all()


@pytest.mark.parametrize("method, num", [("sd", 2.5), ("sjd-pac", 3.2)])
def test_rounds_commit_the_tokens_that_are_replayed(method, num, settings):
    engine = engine_of(settings, VQ_L, 2, source=models.tokens_a_round(num))
    outputs = engine.generate([Request(i, seed=i, method=method, coupling="maximal") for i in range(2)])
    assert [output.stats.step_compression for output in outputs] == pytest.approx([num, num], rel=0.06)


def test_rounds_begin_at_any_iteration(settings):
    engine = engine_of(settings, MAR_L, 2)
    request = engine.resolve(asked(settings, MAR_L, "ar")[0])
    known = starts(request, 64)
    batch = batch_at(engine, request, 32)
    assert [s.num_committed for s in batch.sequences] == [known[6]] * 2 and known[5] < 32 <= known[6]
    batch.round()
    assert [s.num_committed for s in batch.sequences] == [known[7]] * 2
    for _ in range(2):
        batch.round()
    assert not batch.sequences


def test_rounds_begin_at_any_vq_token(settings):
    engine = engine_of(settings, VQ_L, 2)
    batch = batch_at(engine, engine.resolve(Request(0, method="sjd-pac", family="VQ")), 32)
    engine.runner.tokens.fill_(-1)
    batch.round()
    tokens = engine.runner.tokens[:, : engine.runner.seq_len]
    assert (tokens[:, :32] == -1).all() and (tokens[:, 32] >= 0).all()


def test_waits_are_counted_by_line():
    """PyTorch's warning on CUDA, as it comes from a line of code."""
    with times.waits(CPU) as lines:
        for _ in range(3):
            warnings.warn(f"{times.WAITS} CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    (line,) = lines
    assert line.startswith("tests/test_gpu_check.py:") and lines[line] == 3


def test_work_is_operations_and_bytes():
    work = gpu_costs.product(10, 4, 8, size=2) * 3
    assert work.flops == 3 * 2 * 10 * 4 * 8 and work.bytes == 3 * 2 * (10 * 4 + 4 * 8 + 10 * 8)


def test_docs_have_the_predicted_times():
    """Made by `python scripts/measure/gpu_costs.py --write`."""
    text = gpu_costs.DOCS.read_text()
    assert gpu_costs.written(text) == text


def test_predictions_follow_their_constants():
    """By hand: MAR-B alone is launch-bound, and a batch of 256 is the device's work."""

    def image_ms(batch, method, use_graphs, device):
        return gpu_costs.image_ms("B", batch, 64, method, use_graphs, device)

    slow = gpu_costs.Device(launch=50e-6)
    kernels = 64 * (33 + 10 * 24 + 100 * (63 + 9 * 6))
    added = image_ms(1, "published", False, slow) - image_ms(1, "published", False, gpu_costs.H200)
    assert added == pytest.approx(kernels * 45e-3, rel=1e-3)
    fast = gpu_costs.Device(peak=1000e12, bandwidth=8.6e12)
    ratio = image_ms(256, "speculative W=12", True, gpu_costs.H200) / image_ms(256, "speculative W=12", True, fast)
    assert ratio == pytest.approx(2, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_from_a_checkout_on_a_cpu(question, tmp_path):
    """The whole command, with small models; nothing fails, and a second run has nothing to do."""
    path = tmp_path / f"{question}.json"
    options = [question, "--tiny", "--device", "cpu", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "cspd", "gpu-check", *options]
    printed = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    report = read_report(QUESTIONS[question], path)
    assert printed.returncode == 0 and not failures(report), (printed.stdout, printed.stderr)
    done = {name: found for name, found in report["cases"].items() if "left_out" not in found}
    assert all(times.AUTHORS in name for name in report["cases"].keys() - done)
    assert subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, check=False).returncode == 0
    assert read_report(QUESTIONS[question], path)["cases"].items() >= done.items()
