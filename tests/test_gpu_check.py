"""`cspd gpu-check`: what it keeps, what it does again and tells; and that what it replays is what happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import gpu_costs
import numpy as np
import pytest
import torch

from cspd.cli import main
from cspd.gpu_check import cases, measure
from cspd.gpu_check.cases import PARTS, engine_of, random_gpt, random_mar
from cspd.gpu_check.measure import WAITS, product, waits
from cspd.gpu_check.run import NO_GRAPH, TINY, Part, Settings, failures, format_check, read_report, run_cases
from cspd.graphs import Graphs
from cspd.request import Request
from cspd.speed import batch_at, starts
from mar import model as mar_model

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]


@pytest.fixture
def settings(tmp_path):
    return Settings(CPU, TINY, tmp_path)


def check(out, parts, **options):
    return run_cases(out, CPU, tiny=True, parts=parts, progress=False, **options)


def test_an_error_is_kept_and_the_others_go_on(tmp_path, capsys):
    out, tried = tmp_path / "gpu.json", []

    def broken():
        tried.append("broken")
        return {"value": 1 / len(tried[1:])}

    def fine():
        tried.append("fine")
        assert "ZeroDivisionError" in json.loads(out.read_text())["parts"]["one"]["broken"]["error"]  # it is there now
        return {"passed": True, "value": float("nan")}

    parts = [Part("one", 0.5, lambda settings: {"broken": broken}), Part("two", 0.5, lambda settings: {"fine": fine})]
    report = check(out, parts)
    assert failures(report) == ["one, broken"] and report["parts"]["two"]["fine"]["value"] == "NaN"
    assert main(["gpu-check", "--show", str(out)]) == 1
    shown = capsys.readouterr().out
    assert "ZeroDivisionError" in shown and "1 failed" in shown

    # only what is missing is done again
    report = check(out, parts)
    assert tried == ["broken", "fine", "broken"] and not failures(report)
    assert main(["gpu-check", "--show", str(out)]) == 0 and capsys.readouterr().out
    check(out, parts[1:], overwrite=True)
    assert tried[3:] == ["fine"]


def test_a_round_that_could_not_be_captured_has_failed(tmp_path):
    def case():
        warnings.warn(f"{NO_GRAPH} 'backbone', which runs as single kernels: why", stacklevel=1)
        return {"passed": True}

    report = check(tmp_path / "gpu.json", [Part("one", 1.0, lambda settings: {"captured": case})])
    assert failures(report) == ["one, captured"] and "single kernels: why" in format_check(report)


def test_what_time_leaves_out_is_said_and_done_later(tmp_path):
    parts = [Part("one", 1.0, lambda settings: {"first": lambda: {"passed": True}, "second": lambda: {"value": 2}})]
    late = check(tmp_path / "gpu.json", parts, minutes=0)
    assert all("left_out" in case for case in late["parts"]["one"].values())
    assert "2 cases were left out" in format_check(late) and not failures(late)
    done = check(tmp_path / "gpu.json", parts)
    assert done["parts"]["one"]["second"]["value"] == 2


@pytest.mark.parametrize(
    "content, message",
    [
        ("{}", ""),
        ("nonsense", ""),
        ('{"schema": "cspd.gpu-check/1", "scale": "full", "device": "H100", "parts": {}}', "scale"),
    ],
)
def test_another_file_is_not_overwritten(tmp_path, content, message, capsys):
    out = tmp_path / "gpu.json"
    out.write_text(content)
    assert main(["gpu-check", "--tiny", "--device", "cpu", "--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert message in told and "--overwrite" in told and out.read_text() == content


TIMED = {"size": "B", "batch": 8, "precision": "bf16", "method": "ar", "ms": 1.0, "flops": 1, "bytes": 1}
TIMED["peak_bytes"] = 1


def test_a_cpu_is_not_compared_with_itself(settings):
    found = cases.correctness_cases(settings)
    for name in ("MAR speculative: as on a CPU", "random bits"):
        assert found[name]() == {"skipped": "this is the CPU"}


def test_official_sizes_want_a_gpu(tmp_path, capsys):
    assert main(["gpu-check", "--out", str(tmp_path / "gpu.json")]) == 2
    assert "--tiny" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_times_are_told_as_ratios():
    """To the published sampler at the same setting, and to the larger of operations and bytes at full speed."""
    common = {"size": "B", "batch": 8, "num_iter": 64, "precision": "bf16", "peak_bytes": 2**30}
    times = {
        "base": common | {"method": "published", "ms": 80.0, "flops": 1e12, "bytes": 1e9},
        "ours": common | {"method": "ar", "ms": 20.0, "flops": 1e12, "bytes": 1e9},
        "other": common | {"method": "ar", "ms": 20.0, "flops": 0, "bytes": 4e9, "batch": 1},
    }
    machine = {"copy": {"gb_per_s": 1000.0}, "matmul bf16": {"tflop_per_s": 100.0}}
    report = {"device": "H100", "scale": "full", "parts": {"machine": machine, "MAR times": times}}
    lines = format_check(report).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    assert rows["ours"] == ["20.00", "4.00", "2.0", "1.0"] and rows["base"][2] == "8.0"
    assert rows["other"] == ["20.00", "5.0", "1.0"]  # nothing to be compared with


def test_chains_take_the_head_calls_that_are_replayed(settings):
    pool = np.array([5, 7, 9])
    models = random_mar(settings, TINY.mars["B"], CPU)
    engine = engine_of(settings, models, 3, CPU, noise=measure.head_calls(pool, CPU))
    own = {"window": 4, "draft": "frozen", "num_iter": 8, "num_sampling_steps": 12}
    outputs = engine.generate([Request(i, seed=i, method="speculative", **own) for i in range(3)])
    token_cost = torch.stack([output.token_cost for output in outputs])
    position = torch.arange(token_cost.shape[1])
    assert (token_cost == torch.as_tensor(pool)[(7919 * torch.arange(3)[:, None] + position) % 3]).all()


@pytest.mark.parametrize(
    "method, num", [("sd", 2.5), ("sjd-pac", 3.2), pytest.param("eagle2", 2.0, marks=pytest.mark.slow)]
)
def test_rounds_commit_the_codes_that_are_replayed(method, num, settings):
    models = random_gpt(settings, TINY.gpts["B"], CPU)
    engine = engine_of(settings, models, 2, CPU, noise=measure.codes_a_round(num))
    outputs = engine.generate([Request(i, seed=i, method=method, coupling="maximal") for i in range(2)])
    assert [output.stats.step_compression for output in outputs] == pytest.approx([num, num], rel=0.06)


def test_drafted_tokens_are_accepted_as_often_as_is_replayed(settings):
    models = random_mar(settings, TINY.mars["B"], CPU)
    engine = engine_of(settings, models, 4, CPU, noise=measure.token_share(0.3))
    own = {"method": "cspd", "gamma": 16, "num_iter": 8, "num_sampling_steps": 4, "first_timestep": 950}
    outputs = engine.generate([Request(i, seed=i, **own) for i in range(4)])
    assert np.mean([output.stats.alpha for output in outputs]) == pytest.approx(0.3, abs=0.1)


def test_sequences_begin_anywhere(settings):
    engine = engine_of(settings, random_mar(settings, TINY.mars["B"], CPU), 2, CPU)
    request = engine.resolve(cases.request_of(settings, "ar", num_iter=8))
    known = starts(request, 64)
    batch = batch_at(engine, request, 32)
    assert [s.num_committed for s in batch.sequences] == [known[6]] * 2 and known[5] < 32 <= known[6]
    batch.round()
    assert [s.num_committed for s in batch.sequences] == [known[7]] * 2
    for _ in range(2):
        batch.round()
    assert not batch.sequences


def test_sequences_of_codes_begin_anywhere(settings):
    engine = engine_of(settings, random_gpt(settings, TINY.gpts["B"], CPU), 2, CPU)
    batch = batch_at(engine, engine.resolve(Request(0, method="sjd-pac", family="VQ")), 32)
    engine.runner.tokens.fill_(-1)
    batch.round()
    codes = engine.runner.tokens[:, : engine.runner.seq_len]
    assert (codes[:, :32] == -1).all() and (codes[:, 32] >= 0).all()


def test_the_coupling_is_tested(settings):
    """Draws of p pass, a part of which are of the residual."""
    found = cases.distribution_cases(settings)["coupling, wider q"]()
    assert found["passed"] and found["p_value"] > 0.01 and found["residual"] > 0.1


def test_some_iterations_of_the_published_sampler(settings):
    """Their tokens are those of the whole sampler, which begins by them."""
    model = random_mar(settings, TINY.mars["B"], CPU).target
    own = {"num_iter": 6, "cfg": 3.0, "num_sampling_steps": 3, "order": torch.randperm(64).repeat(2, 1)}
    noise = lambda mask, t: torch.full((int(mask.sum()), 16), 0.1)  # noqa: E731
    some = mar_model.sample_published(model, torch.tensor([1, 2]), **own, noise=noise, iterations=range(2))
    whole = mar_model.sample_published(model, torch.tensor([1, 2]), **own, noise=noise)
    made = some.abs().sum(-1) > 0
    assert made.sum(1).tolist() == [9, 9] and torch.equal(some[made], whole[made])


def test_waits_are_counted_by_our_line(settings):
    """PyTorch's warning on CUDA, as it would come from within a round."""
    graphs = Graphs(CPU, enabled=False)
    with waits(settings) as lines:
        for _ in range(3):
            graphs.run("key", lambda: warnings.warn(f"{WAITS} CUDA operation", stacklevel=1))
        warnings.warn("something else", stacklevel=1)
    (place,) = lines
    assert place.startswith("cspd/graphs.py:") and lines[place] == 3


def test_work_is_operations_and_bytes():
    work = product(10, 4, 8, size=2) * 3
    assert work.flops == 3 * 2 * 10 * 4 * 8 and work.bytes == 3 * 2 * (10 * 4 + 4 * 8 + 10 * 8)


def test_docs_have_the_predicted_times():
    """Made by `python scripts/gpu_costs.py --write`."""
    text = gpu_costs.DOCS.read_text()
    assert gpu_costs.written(text) == text


def test_predictions_follow_their_constants():
    """By hand: MAR-B alone is launch-bound, and a batch of 256 is the device's work."""
    slow = gpu_costs.Device(launch=50e-6)
    eager, slower = (gpu_costs.image_ms("B", 1, 64, "published", False, device) for device in (gpu_costs.H200, slow))
    kernels = 64 * (33 + 10 * 24 + 100 * (63 + 9 * 6))
    assert slower - eager == pytest.approx(kernels * 45e-3, rel=1e-3)
    fast = gpu_costs.Device(peak=1000e12, bandwidth=8.6e12)
    work, half = (
        gpu_costs.image_ms("B", 256, 64, "speculative W=12", True, device) for device in (gpu_costs.H200, fast)
    )
    assert work / half == pytest.approx(2, rel=0.02)


@pytest.mark.slow
def test_from_a_checkout_on_a_cpu(tmp_path):
    """The whole command, with small models; nothing fails, and a second run has nothing to do."""
    out = tmp_path / "gpu.json"
    command = [
        sys.executable,
        "-m",
        "cspd",
        "gpu-check",
        "--tiny",
        "--device",
        "cpu",
        "--out",
        str(out),
        "--minutes",
        "20",
    ]
    told = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    report = read_report(out)
    assert told.returncode == 0 and not failures(report), (told.stdout, told.stderr)
    assert list(report["parts"]) == [part.name for part in PARTS]
    for part in ("MAR times", "VQ times"):
        assert all(case["ms"] > 0 and case["flops"] > 0 for case in report["parts"][part].values())
    before = out.read_text()
    assert subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, check=False).returncode == 0
    assert out.read_text() == before
