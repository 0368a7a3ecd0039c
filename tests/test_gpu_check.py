"""`cspd gpu-check`: it survives crashes and hangs, resumes, and prints what it found; it replays acceptance truly."""

from __future__ import annotations

import json
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
from faults import begun, check, part
from safetensors import safe_open

from cspd.cli import main
from cspd.device import check_fits
from cspd.gpu_check import cases, measure
from cspd.gpu_check.cases import PARTS, engine_of, random_gpt, random_mar
from cspd.gpu_check.measure import WAITS, product, waits
from cspd.gpu_check.run import NO_GRAPH, SCHEMA, failures, format_check, read_report, tried
from cspd.gpu_check.sizes import FULL, TINY, Settings
from cspd.graphs import Graphs
from cspd.method import METHODS
from cspd.request import Request
from cspd.speed import batch_at, starts
from mar import model as mar_model

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
LIMIT = 3.0  # seconds of a case


@pytest.fixture
def settings():
    return Settings(CPU, TINY)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_crash_an_error_or_a_hang_loses_one_case(tmp_path, capsys):
    """After an error the process is replaced: CUDA may fail in all that it does from then on."""
    out = tmp_path / "gpu.json"
    one = part(out, "one", "killed", "unusable", "fine", "hang", "fine again")._replace(case_seconds=LIMIT)
    report = check(out, one)
    found = report["parts"]["one"]
    assert f"exit code -{signal.SIGKILL.value}" in found["killed"]["lost"] and f"{LIMIT:g} s" in found["hang"]["lost"]
    assert "illegal memory access" in found["unusable"]["error"]
    assert found["fine"]["passed"] and found["fine"]["value"] == "NaN" and found["fine again"]["passed"]
    assert failures(report) == ["one, killed", "one, unusable", "one, hang"] and read_report(out) == report

    assert main(["gpu-check", "--show", str(out)]) == 1
    shown = capsys.readouterr().out
    assert "2 lost" in shown and "one, killed; one, hang" in shown and "1 failed" in shown

    # what raised an error is run again, what was lost is not
    before = begun(out)
    assert before == ["killed", "unusable", "fine", "hang", "fine"]
    check(out, one)
    assert begun(out) == [*before, "unusable"]


def test_what_was_left_out_is_run_later_and_what_was_started_is_not(tmp_path):
    out = tmp_path / "gpu.json"
    one = part(out, "one", "fine", "fine again")
    report = check(out, one, minutes=0)
    assert "2 cases were left out" in format_check(report) and not failures(report) and not begun(out)
    report["parts"]["one"]["fine"] = {"started": True}  # as if the machine had gone down during it
    out.write_text(json.dumps(report))
    assert "1 lost" in format_check(read_report(out))

    report = check(out, one)
    assert "lost" in report["parts"]["one"]["fine"] and report["parts"]["one"]["fine again"]["passed"]
    assert begun(out) == ["fine"] and failures(report) == ["one, fine"]
    assert "left_out" in check(out, one, overwrite=True, minutes=0)["parts"]["one"]["fine"]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_stopped_by_a_person(tmp_path):
    """A case under way is in the file as started, and is run again by whoever stopped it."""
    out = tmp_path / "gpu.json"
    program = (
        "import sys; sys.path[:0] = ['tests', 'scripts']\n"
        "from pathlib import Path; from faults import check, part\n"
        f"out = Path({str(out)!r}); check(out, part(out, 'one', 'fine', 'hang'))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while "hang" not in begun(out) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert read_report(out)["parts"]["one"]["hang"] == {"started": True}
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    assert list(read_report(out)["parts"]["one"]) == ["fine"]


def test_a_round_that_could_not_be_captured_has_failed():
    def case():
        warnings.warn(f"{NO_GRAPH} 'backbone', which runs as single kernels: why", stacklevel=1)
        return {"passed": True}

    found = tried(case, CPU)
    assert found["passed"] is False and "single kernels: why" in found["warnings"][0]


@pytest.mark.parametrize(
    "content",
    ["{}", "nonsense", "[]", '{"schema": "cspd.gpu-check/2", "scale": "full", "device": "H100", "parts": {}}'],
)
def test_another_file_is_not_overwritten(tmp_path, content, capsys):
    out = tmp_path / "gpu.json"
    out.write_text(content)
    assert main(["gpu-check", "--tiny", "--device", "cpu", "--out", str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err and out.read_text() == content


def test_official_sizes_want_a_gpu(tmp_path, capsys):
    assert main(["gpu-check", "--out", str(tmp_path / "gpu.json")]) == 2
    assert "--tiny" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_a_first_run_asks_the_most_important_questions_first():
    """Does it work, is it right, how fast is it by default, all else."""
    names = [part.name for part in PARTS]
    assert names[:4] == ["machine", "smoke", "correctness", "MAR times"] and names[-1] == "compiled"
    assert sum(part.share for part in PARTS) == pytest.approx(1)


def test_the_time_limit_cuts_the_least_important_times(monkeypatch):
    """Every size at batch 8 and 64 comes first, and each cell has all samplers, in the default mode."""
    monkeypatch.setattr(Settings, "cuda", True)
    timed = [*cases.mar_time_cases(Settings(CPU, FULL))]
    cells = [title.partition(", K")[0] for title in timed[::5]]
    first = [f"{size}, batch {batch}" for size in "BHL" for batch in (8, 64)]
    assert cells == [*first, *(f"{size}, batch {batch}" for batch in (1, 256) for size in "BHL")]
    samplers = ["published", "ar", "calibrated", "speculative:window=12", "lazymar:denoiser=calibrated"]
    assert [title.partition(": ")[2] for title in timed] == samplers * len(cells)
    assert [title.partition(": ")[0].endswith("bf16, graphs") for title in timed[1:5]] == [True] * 4


QUICK = [("MAR", "ar"), ("MAR", "lazymar:denoiser=calibrated"), ("VQ", "sd")]


@pytest.mark.parametrize(
    "family, name",
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in cases.CHECKED],
)
def test_the_file_has_the_images_of_a_cpu(family, name, device):
    """If it fails after a change that is meant to change images: `python scripts/record_images.py`."""
    mode = "eager" if device == CPU else "graphs"
    found = cases.compared(cases.generated(family, name, device, mode), cases.recorded(family, name))
    assert found["passed"], found


def test_the_file_is_small_and_has_every_method():
    with safe_open(cases.RECORD, "pt") as file:
        names = {name.rpartition(" ")[0] for name in file.keys()}
    assert names == {f"{family} {name}" for family, name in cases.CHECKED}
    methods = {(family, name.partition(":")[0]) for family, name in cases.CHECKED}
    others = {("MAR", "budget")}  # whose plan depends on the device
    assert methods | others == {(method.family, method.name) for method in METHODS if method.family != "causal"}
    assert cases.RECORD.stat().st_size < 2**20 and set(cases.SMOKE) <= set(cases.CHECKED)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family, name", [("MAR", "calibrated"), ("VQ", "ar")])
def test_images_that_differ_are_found(family, name, precision):
    """Those of other seeds, also by the rules for bf16."""
    expected = cases.recorded(family, name)
    assert cases.compared(expected, expected, precision)["passed"]
    others = {kind: images.roll(1, 0) for kind, images in expected.items()}
    assert not cases.compared(others, expected, precision)["passed"]


@pytest.mark.parametrize("family, name", [("MAR", "calibrated"), ("VQ", "ar")])
def test_images_in_bf16_are_near(family, name):
    found = cases.compared(cases.generated(family, name, CPU, precision="bf16"), cases.recorded(family, name), "bf16")
    assert found["passed"], found


ON_CUDA = ["draws", "graph", "VQ ar, graphs, fp32"]


@pytest.mark.parametrize(
    "name",
    [
        *ON_CUDA,
        *(pytest.param(f"{each} tokens", marks=pytest.mark.slow) for each in ("ar", "calibrated", "speculative")),
    ],
)
def test_the_smoke_stage_passes_on_a_stand_in_for_cuda(name):
    with standin.cuda():
        try:
            found = cases.smoke_cases(Settings(standin.DEVICE, TINY))[name]()
        finally:
            cases.bundled.cache_clear()  # models of the stand-in end with it
            cases.bundled_calibration.cache_clear()
    assert found["passed"], found


def test_too_little_memory_is_not_an_error():
    found = tried(lambda: check_fits(2**60, 1, "", "take less", CPU), CPU)
    assert "skipped" in found and "error" not in found


def test_times_are_printed_as_ratios():
    """To the published sampler at the same setting, and to the larger of operations and bytes at full speed."""
    common = {"size": "B", "batch": 8, "num_iter": 64, "precision": "bf16", "peak_bytes": 2**30, "timed_rounds": 4}
    times = {
        "base": common | {"method": "published", "ms": 80.0, "flops": 1e12, "bytes": 1e9},
        "ours": common | {"method": "ar", "ms": 20.0, "flops": 1e12, "bytes": 1e9},
        "other": common | {"method": "ar", "ms": 20.0, "flops": 0, "bytes": 4e9, "batch": 1},
        "unknown": common | {"method": "cspd", "ms": 40.0},
    }
    machine = {"copy": {"gb_per_s": 1000.0}, "matmul bf16": {"tflop_per_s": 100.0}}
    report = {"device": "H100", "scale": "full", "parts": {"machine": machine, "MAR times": times}}
    shown = format_check(report)
    lines = [line.split() for line in shown.splitlines() if line.startswith("MAR times, ")]
    rows = {line[2]: line[3:] for line in lines}
    assert rows["ours"] == ["20.00", "4.00", "2.0", "1.0"] and rows["base"][2] == "8.0"
    assert rows["other"] == ["20.00", "5.0", "1.0"]  # no baseline at this batch
    assert rows["unknown"] == ["40.00", "2.00", "1.0"]  # no count of its work
    (row,) = (line for line in shown.splitlines() if line.startswith("B ") and " 8 " in line)  # in the summary
    assert row.split()[2:] == ["80.0", "(1.0x)", "20.0", "(4.0x)", "40.0", "(2.0x)"]


def test_the_summary_says_whether_it_is_right_and_what_is_missing(tmp_path, capsys):
    passed, failed, left_out = {"passed": True}, {"passed": False}, {"left_out": "no time"}
    report = {"schema": SCHEMA, "device": "H100", "scale": "full", "parts": {"smoke": {"one": passed, "two": passed}}}

    def summary(**parts):
        out = tmp_path / "gpu.json"
        out.write_text(json.dumps(report | {"parts": report["parts"] | parts}))
        status = main(["gpu-check", "--show", str(out)])
        return status, [line for line in capsys.readouterr().out.splitlines() if line][-2:]

    assert summary() == (0, ["smoke, two  passed", "right: 2 checks passed, and nothing failed"])
    status, (right, missing) = summary(times={"one": left_out, "two": left_out})
    assert status == 0 and right.startswith("right so far: 2 ") and "2 of times" in missing
    status, (wrong, lost) = summary(smoke={"one": failed, "two": {"lost": "it crashed"}})
    assert status == 1 and wrong == "not right: 1 failed: smoke, one" and lost.endswith("smoke, two")


def test_lazymar_is_timed_by_its_full_and_its_lazy_iterations(settings):
    """Of 8 iterations the warm-up's five and the refresh after it are full, and two are lazy."""
    setting = TINY.settings[0]._replace(mode="eager")
    found = cases._mar_time(settings, setting, "lazymar:denoiser=calibrated")
    full, lazy = ({int(known): ms for known, ms in each.items()} for each in found["round_ms"])
    begins = starts(Request(0, num_iter=8), 64)
    expected = np.interp(begins[:6], [*full], [*full.values()]).sum()
    expected += np.interp(begins[6:], [*lazy], [*lazy.values()]).sum()
    assert found["rounds"] == 8 and found["ms"] == pytest.approx(expected / setting.batch)


def test_a_captured_graph_takes_no_time_of_a_round(settings):
    """Some of the timed rounds have a new shape, which is captured."""

    def capture(trials, function):
        time.sleep(0.3)
        return function(), function

    engine = engine_of(settings, random_mar(settings, "B"), 2)
    engine.graphs = engine.runner.graphs = Graphs(CPU, enabled=True, capture=capture)
    request = engine.resolve(Request(0, method="ar", num_iter=8, num_sampling_steps=4, first_timestep=950))
    timing = measure.timed_rounds(engine, request, 1)
    assert engine.graphs.seconds > 0.6 and max(timing.seconds.values()) < 0.3


def test_of_long_rounds_one_is_timed(settings, monkeypatch):
    monkeypatch.setattr(measure, "LONG", 0.0)
    engine = engine_of(settings, random_mar(settings, "B"), 2)
    request = engine.resolve(Request(0, method="ar", num_iter=32, num_sampling_steps=4, first_timestep=950))
    timing = measure.timed_rounds(engine, request, 3)
    assert timing.num == len(timing.seconds) == len(measure.SHARES)


def test_chains_take_the_head_calls_that_are_replayed(settings):
    pool = np.array([5, 7, 9])
    models = random_mar(settings, "B")
    engine = engine_of(settings, models, 3, noise=measure.head_calls(pool, CPU))
    own = {"window": 4, "draft": "frozen", "num_iter": 8, "num_sampling_steps": 12}
    outputs = engine.generate([Request(i, seed=i, method="speculative", **own) for i in range(3)])
    token_cost = torch.stack([output.token_cost for output in outputs])
    position = torch.arange(token_cost.shape[1])
    assert (token_cost == torch.as_tensor(pool)[(7919 * torch.arange(3)[:, None] + position) % 3]).all()


@pytest.mark.parametrize(
    "method, num", [("sd", 2.5), ("sjd-pac", 3.2), pytest.param("eagle2", 2.0, marks=pytest.mark.slow)]
)
def test_rounds_commit_the_tokens_that_are_replayed(method, num, settings):
    models = random_gpt(settings, "B")
    engine = engine_of(settings, models, 2, noise=measure.tokens_a_round(num))
    outputs = engine.generate([Request(i, seed=i, method=method, coupling="maximal") for i in range(2)])
    assert [output.stats.step_compression for output in outputs] == pytest.approx([num, num], rel=0.06)


def test_drafted_tokens_are_accepted_as_often_as_is_replayed(settings):
    models = random_mar(settings, "B")
    engine = engine_of(settings, models, 4, noise=measure.accepted_share(0.3))
    own = {"method": "cspd", "gamma": 16, "num_iter": 8, "num_sampling_steps": 4, "first_timestep": 950}
    outputs = engine.generate([Request(i, seed=i, **own) for i in range(4)])
    assert np.mean([output.stats.alpha for output in outputs]) == pytest.approx(0.3, abs=0.1)


def test_rounds_begin_at_any_iteration(settings):
    engine = engine_of(settings, random_mar(settings, "B"), 2)
    request = engine.resolve(cases.request_of(settings, "ar", num_iter=8))
    known = starts(request, 64)
    batch = batch_at(engine, request, 32)
    assert [s.num_committed for s in batch.sequences] == [known[6]] * 2 and known[5] < 32 <= known[6]
    batch.round()
    assert [s.num_committed for s in batch.sequences] == [known[7]] * 2
    for _ in range(2):
        batch.round()
    assert not batch.sequences


def test_rounds_begin_at_any_vq_token(settings):
    engine = engine_of(settings, random_gpt(settings, "B"), 2)
    batch = batch_at(engine, engine.resolve(Request(0, method="sjd-pac", family="VQ")), 32)
    engine.runner.tokens.fill_(-1)
    batch.round()
    tokens = engine.runner.tokens[:, : engine.runner.seq_len]
    assert (tokens[:, :32] == -1).all() and (tokens[:, 32] >= 0).all()


def test_some_iterations_of_the_published_sampler(settings):
    """Their tokens are those of the whole sampler, which begins with them."""
    model = random_mar(settings, "B").target
    own = {"num_iter": 6, "cfg": 3.0, "num_sampling_steps": 3, "order": torch.randperm(64).repeat(2, 1)}
    noise = lambda mask, t: torch.full((int(mask.sum()), 16), 0.1)  # noqa: E731
    some = mar_model.sample_published(model, torch.tensor([1, 2]), **own, noise=noise, iterations=range(2))
    whole = mar_model.sample_published(model, torch.tensor([1, 2]), **own, noise=noise)
    made = some.abs().sum(-1) > 0
    assert made.sum(1).tolist() == [9, 9] and torch.equal(some[made], whole[made])


def test_waits_are_counted_by_line():
    """PyTorch's warning on CUDA, as it comes from a line of code."""
    with waits(CPU) as lines:
        for _ in range(3):
            warnings.warn(f"{WAITS} CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    (line,) = lines
    assert line.startswith("tests/test_gpu_check.py:") and lines[line] == 3


def test_work_is_operations_and_bytes():
    work = product(10, 4, 8, size=2) * 3
    assert work.flops == 3 * 2 * 10 * 4 * 8 and work.bytes == 3 * 2 * (10 * 4 + 4 * 8 + 10 * 8)


def test_docs_have_the_predicted_times():
    """Made by `python scripts/gpu_costs.py --write`."""
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
def test_from_a_checkout_on_a_cpu(tmp_path):
    """The whole command, with small models; nothing fails, and a second run has nothing to do."""
    out = tmp_path / "gpu.json"
    options = ["--tiny", "--device", "cpu", "--out", str(out), "--minutes", "20"]
    command = [sys.executable, "-m", "cspd", "gpu-check", *options]
    printed = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    report = read_report(out)
    assert printed.returncode == 0 and not failures(report), (printed.stdout, printed.stderr)
    assert list(report["parts"]) == [part.name for part in PARTS if part.name != "compiled"]  # it takes too long
    for name in ("MAR times", "VQ times", "other MAR times"):
        assert all(case["ms"] > 0 for case in report["parts"][name].values())
    before = out.read_text()
    assert subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, check=False).returncode == 0
    assert out.read_text() == before
