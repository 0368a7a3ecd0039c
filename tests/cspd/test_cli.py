"""The commands as a user meets them: files, records, resuming, and one-line errors."""

from __future__ import annotations

import io
import json
import shutil
import signal

import numpy as np
import pytest
from PIL import Image
from stores import small_checkpoint

from cspd.checkpoints import checkpoint_files
from cspd.cli import main, options
from cspd.cli import sample as cli_sample
from cspd.request import to_pil
from cspd.terminal import number_list

QUICK = ["--num-iter", "2", "--num-sampling-steps", "5", "--cfg", "3"]
SAMPLE = ["sample", "--method", "ar", *QUICK]


def sample(out, *more):
    return main(
        [*SAMPLE, "--checkpoint", small_checkpoint(), "--labels", "0-3", "--seed", "5", "--out", str(out), *more]
    )


def test_sample_writes_pictures_and_a_record(tmp_path, capsys):
    assert sample(tmp_path, "--num", "6") == 0
    record = json.loads((tmp_path / "samples.json").read_text())
    assert record["schema"] == "cspd.samples/1"
    assert [(image["request"]["label"], image["request"]["seed"]) for image in record["images"]] == [
        (i % 4, 5 + i) for i in range(6)
    ]
    for image in record["images"]:
        assert Image.open(tmp_path / image["file"]).size == (32, 32)
        assert image["stats"]["iterations"] == 2
        assert image["stats"]["head_calls"] == 10
        assert image["request"]["num_sampling_steps"] == 5
        assert image["request"]["temperature"] == 1.0  # defaults are written out
    assert record["summary"]["images_per_second"] > 0
    grid = Image.open(tmp_path / "grid.png")
    assert grid.width > 3 * 64 and grid.height > 64
    out = capsys.readouterr().out
    assert "images/s" in out and "grid.png" in out


def test_a_run_that_was_cut_off_goes_on(tmp_path):
    assert sample(tmp_path, "--num", "5") == 0
    files = {path.name: path.read_bytes() for path in tmp_path.glob("0*.png")}
    stamps = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("0*.png")}
    lost = sorted(files)[2]
    (tmp_path / lost).unlink()
    assert sample(tmp_path, "--num", "5", "--max-batch", "1") == 0  # batch size is no part of an image
    again = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("0*.png")}
    assert [name for name in files if again[name] != stamps[name]] == [lost]
    before, after = (np.asarray(Image.open(file), int) for file in (io.BytesIO(files[lost]), tmp_path / lost))
    assert np.abs(before - after).max() <= 1  # rounding to 8 bits
    record = json.loads((tmp_path / "samples.json").read_text())
    assert record["summary"]["images_made"] == 1
    assert [image["index"] for image in record["images"]] == list(range(5))


def test_an_interrupted_run_keeps_what_was_finished(tmp_path, monkeypatch, capsys):
    class Stopped:
        left = 3

    def stop(image):
        Stopped.left -= 1
        if Stopped.left < 0:
            signal.raise_signal(signal.SIGINT)
        return to_pil(image)

    monkeypatch.setattr(cli_sample, "to_pil", stop)
    assert sample(tmp_path, "--num", "6", "--max-batch", "2") == 130
    assert capsys.readouterr().err
    assert len((tmp_path / "samples.journal").read_text().splitlines()) == 3
    assert "summary" not in json.loads((tmp_path / "samples.json").read_text())
    Stopped.left = 3
    assert sample(tmp_path, "--num", "6", "--max-batch", "2") == 0  # three more, not one again
    assert Stopped.left == 0
    assert sample(tmp_path, "--num", "6") == 0
    assert "6 " in capsys.readouterr().out


def test_overwriting_leaves_nothing_of_the_old_run(tmp_path):
    assert sample(tmp_path, "--num", "6") == 0
    assert sample(tmp_path, "--num", "2", "--overwrite") == 0
    assert len(list(tmp_path.glob("0*.png"))) == 2


def test_other_weights_are_another_run(tmp_path, capsys):
    assert sample(tmp_path, "--num", "2") == 0
    vae = tmp_path / "other.safetensors"
    shutil.copy(checkpoint_files(small_checkpoint())["vae"], vae)
    assert sample(tmp_path, "--num", "2", "--vae", str(vae)) == 2
    assert "vae.file" in capsys.readouterr().err


def test_a_damaged_record_is_not_taken_over(tmp_path, capsys):
    assert sample(tmp_path) == 0
    (tmp_path / "samples.json").write_text('{"schema": ')
    assert sample(tmp_path) == 2
    assert capsys.readouterr().err
    assert sample(tmp_path, "--overwrite") == 2  # whose files are there?
    assert "--out" in capsys.readouterr().err


def test_another_run_is_not_overwritten_unasked(tmp_path, capsys):
    assert sample(tmp_path) == 0
    capsys.readouterr()
    assert sample(tmp_path, "--temperature", "0.9") == 2
    error = capsys.readouterr().err
    assert "temperature" in error and "--overwrite" in error and error.count("\n") == 1
    assert sample(tmp_path, "--num", "5") == 2
    assert "requests" in capsys.readouterr().err
    assert sample(tmp_path, "--labels", "0-2,7") == 2  # only the last is another
    assert "label" in capsys.readouterr().err
    assert sample(tmp_path, "--temperature", "0.9", "--overwrite") == 0


@pytest.mark.parametrize(
    "arguments, hint",
    [
        (["--labels", "0-12"], ""),
        (["--labels", "two,sevn"], "seven"),
        (["--num-iter", "65"], ""),
        (["--cfg", "nan"], "cfg"),
        (["--checkpoint", "nowhere"], "digits32"),
        (["--max-batch", "9999999", "--num", "9999999"], "max_batch"),
        (["--seed", f"{2**63 - 1}", "--num", "2"], "seed"),
        (["--cfg", "1e999"], "cfg"),
        (["--vae", "two\nlines"], ""),
        (["--vae", "nowhere.ckpt"], ""),
        (["--arch", "mar_base"], "mar_digits32"),
    ],
)
def test_errors_are_one_line_and_name_the_fix(arguments, hint, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([*SAMPLE, "--out", str(out), *arguments]) == 2
    captured = capsys.readouterr()
    assert hint in captured.err and captured.err.count("\n") == 1
    assert not list(tmp_path.rglob("*.png"))


def test_methods_lists_guarantees(capsys):
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[:5] for line in lines]
    assert ["ar", "MAR", "exact", "-", "baseline"] in rows and ["ar", "VQ", "exact", "-", "baseline"] in rows
    assert ["speculative", "MAR", "exact", "calibration", "speculates"] in rows
    assert ["cool-sd", "VQ", "bounded", "EAGLE", "drafter"] in rows


def test_bench_times_all_samplers_and_memory(tmp_path, capsys):
    path = tmp_path / "bench.json"
    arguments = ["--window", "0", "--batch", "1,2", "--runs", "2", "--queued", "6", "--json", str(path)]
    assert main(["bench", "--checkpoint", small_checkpoint(), *QUICK, *arguments]) == 0
    report = json.loads(path.read_text())
    assert [(row["name"], row["batch"]) for row in report["rows"]] == [
        (name, batch) for batch in (1, 2) for name in ("ar", "speculative", "calibrated", "published")
    ]
    for row in report["rows"]:
        assert row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]
        assert 0 < row["speed_up"]["min"] <= row["speed_up"]["median"] <= row["speed_up"]["max"]
        assert row["speed_up"]["median"] == 1 or row["name"] != "ar"
        assert row["images_per_second"] == pytest.approx(row["batch"] / row["seconds"]["median"])
    assert [(m["slots"], m["requests"]) for m in report["memory"]] == [(1, 1), (1, 6), (2, 2), (2, 6)]
    assert "x ar" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, numbers", [("3", [3]), ("0-2", [0, 1, 2]), ("1,5,7-9", [1, 5, 7, 8, 9]), ("207,360", [207, 360])]
)
def test_number_lists(text, numbers):
    assert number_list(text) == numbers


LISTS = [
    "",
    "a",
    "1-",
    "3-1",
    "1;2",
    "1,,2",
    "-1",
    "1_0",
    "\u0663",
    "9" * 22,
    "9" * 5000,
    "0-99999999",
    "0-99999999999",
]
COMMANDS = ["sample", "compare", "evaluate", "bench", "calibrate"]


@pytest.mark.parametrize(
    "arguments, hint",
    [
        *((["bench", f"--batch={text}"], "") for text in LISTS),
        *((["sample", f"--labels={text}"], "") for text in ("1-", "3-1,none", "seven,1-")),
        (["evaluate", "--labels", "0-99999999999"], ""),
        (["bench", "--batch", "0"], ""),
        *((["bench", f"--{flag}", value], "") for flag in ("runs", "queued") for value in ("0", "-3")),
        (["bench", "--methods", ""], ""),
        (["bench", "--methods", "speculative,"], ""),
        (["compare", "--methods", ","], ""),
        (["bench", "--methods", "speculative,speculative"], "speculative"),
        *(([command, "--num", num], "") for command in COMMANDS[:3] for num in ("0", "-1", "9" * 12)),
        *(([command, "--seed", seed], f"{2**63 - 1}") for command in COMMANDS[:3] for seed in ("-1", "9" * 23)),
        *(([command, "--max-batch", "0"], "") for command in COMMANDS[:3]),
        *((["sample", "--threads", text], "") for text in ("0", "-1", "100000")),
        *(([command, "--out", ""], "--out") for command in COMMANDS[:3]),
        *(([command, "--checkpoint", " "], "--checkpoint") for command in COMMANDS),
        (["sample", "--vae", ""], "--vae"),
        *((["evaluate", flag, ""], f"{flag}") for flag in ("--ref", "--weights", "--npz", "--images")),
        (["bench", "--json", ""], "--json"),
        (["compare", "--config", ""], "--config"),
        (["sampel"], "sample"),
        (["sample", "--methd", "ar"], "--method"),
        (["sample", "--sed=4"], "--seed"),
        (["methods", "--mark"], "--markdown"),  # no short forms
        (["sample", "more"], ""),
        *(([command, "--out", "a" * 300], "--out") for command in ("sample", "edit", "compare", "tune", "evaluate")),
        (["bench", "--json", "a" * 300], ""),
        (["gpu-check", "--out", "a" * 300], ""),
    ],
)
def test_arguments_that_cannot_be_are_told_before_any_work(arguments, hint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    usage, *_, error = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and usage.startswith("usage: cspd")
    assert error.startswith("cspd") and hint in error and len(error) < 1000
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, hint",
    [
        (
            "sample --method eagle",
            "speculative",
        ),
        ("evaluate --method cool-sd", "digits32_vq"),
        ("sample --checkpoint digits32_vq --method cspd", "speculative"),
        (
            "sample --delta 1.5",
            "delta",
        ),
        (
            "sample --checkpoint digits32_vq --num-iter 5",
            "num_iter",
        ),
        (
            "sample --checkpoint digits32_vq --pd-k 3",
            "pd_k",
        ),
        ("calibrate --verify parallel", "verify"),
        ("calibrate --method calibrated --force", ""),
        ("calibrate --method disa", "--method"),
        ("calibrate --checkpoint digits32_vq", "--method"),
        ("bench --methods speculativ", "speculative"),
        ("bench --methods speculative:windw=1", "window"),
        ("bench --methods speculative:", "speculative"),
        ("bench --checkpoint digits32_vq --gamma 3", ""),
        ("bench --json nowhere/numbers.json", "nowhere/numbers.json"),
        ("bench --plot .", "--plot"),
        ("bench --plot picture.xyz", ""),
        ("compare --methods speculativ", "speculative"),
        ("compare --methods ar:seeed=3", "seed"),
        ("compare --methods ar:checkpoint=5", "checkpoint"),
        ("compare --methods ar:vae=true", "vae"),
        (f"compare --methods ar:cfg={'9' * 400}", "cfg"),
        ("compare --methods ar:cfg=NaN", "cfg"),
    ],
)
def test_what_can_be_known_is_told_before_models_are_loaded(arguments, hint, tmp_path, monkeypatch, capsys):
    def loaded(*_, **__):
        raise AssertionError("the models were loaded first")

    monkeypatch.setattr(options, "load", loaded)
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("cspd: ") and hint in error and error.count("\n") == 1 and len(error) < 1000
    assert not list(tmp_path.iterdir())


def test_a_plot_of_what_no_classifier_knows_is_told_before_minutes_of_timing(tmp_path, capsys):
    assert main(["bench", "--checkpoint", small_checkpoint(), "--plot", str(tmp_path / "plot.png")]) == 2
    assert capsys.readouterr().err
