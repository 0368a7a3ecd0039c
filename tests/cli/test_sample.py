"""`cspd sample`: its folder, its record, its errors."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import signal
import tracemalloc

import numpy as np
import pytest
from PIL import Image
from stores import small_checkpoint

import cspd
from cspd.checkpoints import checkpoint_files
from cspd.cli import main, options
from cspd.cli import sample as cli_sample
from cspd.cli.sample import JOURNAL, sample_to_folder
from cspd.evaluation.images import RECORD
from cspd.evaluation.run import Shards
from cspd.request import to_pil
from cspd.terminal import MOST_LISTED, label_list, label_of, number_list

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
        (["--labels", "0-12"], "label"),
        (["--labels", "two,sevn"], "seven"),
        (["--num-iter", "65"], "num_iter"),
        (["--cfg", "nan"], "cfg"),
        (["--checkpoint", "nowhere"], "digits32"),
        (["--max-batch", "9999999", "--num", "9999999"], "max_batch"),
        (["--seed", f"{2**63 - 1}", "--num", "2"], "seed"),
        (["--cfg", "1e999"], "cfg"),
        (["--vae", "two\nlines"], ""),
        (["--vae", "nowhere.ckpt"], "nowhere.ckpt"),
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


LISTS = ["", "a", "1-", "3-1", "1,,2", "9" * 22, "0-99999999"]
COMMANDS = ["sample", "compare", "evaluate", "bench", "calibrate"]


@pytest.mark.parametrize(
    "arguments, hint",
    [
        *((["bench", f"--batch={text}"], "--batch") for text in LISTS),
        *((["sample", f"--labels={text}"], "--labels") for text in ("1-", "3-1,none", "seven,1-")),
        (["evaluate", "--labels", "0-99999999999"], "--labels"),
        (["bench", "--batch", "0"], "--batch"),
        *((["bench", f"--{flag}", value], f"--{flag}") for flag in ("runs", "queued") for value in ("0", "-3")),
        (["bench", "--methods", ""], "--methods"),
        (["bench", "--methods", "speculative,"], "--methods"),
        (["compare", "--methods", ","], "--methods"),
        (["bench", "--methods", "speculative,speculative"], "speculative"),
        *(([command, "--num", num], "--num") for command in COMMANDS[:3] for num in ("0", "-1", "9" * 12)),
        *(([command, "--seed", seed], "--seed") for command in COMMANDS[:3] for seed in ("-1", "9" * 23)),
        *(([command, "--max-batch", "0"], "--max-batch") for command in COMMANDS[:3]),
        *((["sample", "--threads", text], "--threads") for text in ("0", "-1", "100000")),
        *(([command, "--out", ""], "--out") for command in COMMANDS[:3]),
        *(([command, "--checkpoint", " "], "--checkpoint") for command in COMMANDS),
        (["sample", "--vae", ""], "--vae"),
        *((["evaluate", flag, ""], flag) for flag in ("--ref", "--weights", "--npz", "--images")),
        (["bench", "--json", ""], "--json"),
        (["compare", "--config", ""], "--config"),
        (["sampel"], "sample"),
        (["sample", "--methd", "ar"], "--method"),
        (["sample", "--sed=4"], "--seed"),
        (["methods", "--mark"], "--markdown"),  # no short forms
        (["sample", "more"], "more"),
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
        ("calibrate --method calibrated --force", "calibrated"),
        ("calibrate --method disa", "--method"),
        ("calibrate --checkpoint digits32_vq", "--method"),
        ("bench --methods speculativ", "speculative"),
        ("bench --methods speculative:windw=1", "window"),
        ("bench --methods speculative:", "speculative"),
        ("bench --checkpoint digits32_vq --gamma 3", "gamma"),
        ("bench --json nowhere/numbers.json", "nowhere/numbers.json"),
        ("bench --plot .", "--plot"),
        ("bench --plot picture.xyz", "picture.xyz"),
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


# ---- The folder of `cspd sample`: what was damaged is made again, what was finished is kept, other's files stay


NUM = 6
QUICK_OF_SAMPLE_FOLDER = {"method": "ar", "num_iter": 1, "num_sampling_steps": 2, "cfg": 1.0}


@pytest.fixture(scope="module")
def engine():
    return cspd.load(small_checkpoint(), max_batch=2, device="cpu")


@pytest.fixture(scope="module")
def whole(engine, tmp_path_factory):
    """The folder of a run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole")
    sample_of_sample_folder(engine, out)
    return out


@pytest.fixture
def out(whole, tmp_path):
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "out")


def sample_of_sample_folder(engine, out, num=NUM, **more):
    requests = [cspd.Request(i % 3, i, **QUICK_OF_SAMPLE_FOLDER) for i in range(num)]
    return sample_to_folder(engine, requests, out, {"of": "tests"}, progress=False, **more)


def test_whole_numbers_of_python_go_on(engine, tmp_path):
    """A record has floats where cfg=3 was given. One of an older version, which has 3, is of the same images."""
    requests = [cspd.Request(1, seed, **QUICK_OF_SAMPLE_FOLDER | {"cfg": 3}) for seed in range(2)]
    sample_to_folder(engine, requests, tmp_path, {}, progress=False)
    record = json.loads((tmp_path / RECORD).read_text())
    for image in record["images"]:
        assert type(image["request"]["cfg"]) is float
        image["request"]["cfg"] = 3
    (tmp_path / RECORD).write_text(json.dumps(record))
    assert sample_to_folder(engine, requests, tmp_path, {}, progress=False)["summary"]["images_made"] == 0


def pictures(out):
    return {path.name: path.read_bytes() for path in sorted(out.glob("0*.png"))}


def flip(content):
    damaged = bytearray(content)
    damaged[len(damaged) // 2] ^= 1
    return bytes(damaged)


@pytest.mark.parametrize(
    "damage",
    [
        lambda own, other: b"",
        lambda own, other: own[: len(own) // 2],
        lambda own, other: flip(own),
        lambda own, other: other,
    ],
    ids=["empty", "cut", "flipped", "swapped"],
)
@pytest.mark.parametrize("hashed", [True, False], ids=["", "without hashes"])
def test_a_damaged_picture_is_made_again(engine, whole, out, capsys, monkeypatch, damage, hashed):
    """Also one that the grid does not show, and in a folder of a version that kept no hashes, unless it is swapped."""
    monkeypatch.setattr(cli_sample, "GRID_LIMIT", 2)
    files, record = sorted(pictures(out)), json.loads((out / RECORD).read_text())
    assert all(len(image["sha256"]) == 64 for image in record["images"])
    if not hashed:
        record["images"] = [{key: image[key] for key in image if key != "sha256"} for image in record["images"]]
        (out / RECORD).write_text(json.dumps(record))
    own, other = ((out / files[i]).read_bytes() for i in (4, 1))
    (out / files[4]).write_bytes(damage(own, other))
    seen = hashed or damage(own, other) != other
    assert sample_of_sample_folder(engine, out)["summary"]["images_made"] == seen
    told = f"cspd: 1 file is damaged, incomplete or of other images, and made again: {files[4]}\n"
    assert capsys.readouterr().err == (told if seen else "")
    assert not seen or pictures(out) == pictures(whole)
    assert sample_of_sample_folder(engine, out)["summary"]["images_made"] == 0  # all have hashes now


def test_a_picture_that_is_gone_is_made_again_without_a_word(engine, whole, out, capsys):
    sorted(out.glob("0*.png"))[3].unlink()
    assert sample_of_sample_folder(engine, out)["summary"]["images_made"] == 1
    assert pictures(out) == pictures(whole) and capsys.readouterr().err == ""


@pytest.mark.parametrize("step", ["append_json", "write_bytes", "engine", "end"])
def test_a_run_that_ends_anywhere_loses_no_finished_picture(engine, whole, tmp_path, monkeypatch, step):
    """The process dies before an image is in the journal, before it has its file, between images, before the end."""

    class Killed(BaseException):
        pass

    def killing(function, calls):
        def call(*arguments):
            calls.append(arguments)
            if len(calls) > 3:
                raise Killed
            return function(*arguments)

        return call

    with monkeypatch.context() as patch:
        if step == "engine":
            patch.setattr(cli_sample, "to_pil", killing(cli_sample.to_pil, []))
        elif step == "end":
            patch.setattr(cli_sample, "summary_of", killing(None, [None] * 3))
        else:
            patch.setattr(cli_sample, step, killing(getattr(cli_sample, step), []))
        with pytest.raises(Killed):
            sample_of_sample_folder(engine, tmp_path)
    kept = pictures(tmp_path)
    assert len(kept) == (6 if step == "end" else 3) and kept.items() <= pictures(whole).items()
    stamps = {name: (tmp_path / name).stat().st_mtime_ns for name in kept}
    with (tmp_path / JOURNAL).open("a") as journal:
        journal.write('{"index": 5, "request": {"la')  # torn
    record = sample_of_sample_folder(engine, tmp_path)
    assert record["summary"]["images_made"] == NUM - len(kept)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in kept} == stamps
    assert pictures(tmp_path) == pictures(whole) and not (tmp_path / JOURNAL).exists()
    written = json.loads((tmp_path / RECORD).read_text())
    assert written.pop("temporary") and JOURNAL in written.pop("files") and written == record
    assert [image["index"] for image in record["images"]] == list(range(NUM))


def test_the_record_is_written_twice_whatever_the_number(engine, tmp_path, monkeypatch):
    """At the start and at the end. An image costs one line of the journal."""
    saved, lines = [], []
    write, append = cli_sample.Store.save, cli_sample.append_json
    monkeypatch.setattr(cli_sample.Store, "save", lambda self, record: (saved.append(1), write(self, record)))
    monkeypatch.setattr(cli_sample, "append_json", lambda *line: (lines.append(1), append(*line)))
    sample_of_sample_folder(engine, tmp_path)
    assert len(saved) == 2 and len(lines) == NUM


COMMANDS_OF_SAMPLE_FOLDER = {
    "sample": ("sample --num 1", ["00000_label0_seed0.png", "grid.png", "samples.journal"]),
    "sample --heatmap": ("sample --num 1 --heatmap", ["heatmap.png"]),
    "evaluate": ("evaluate --num-images 20", ["00001.npz", "evaluation.json", "grid.png"]),
    "evaluate --images": ("evaluate --device cpu --images", ["grid.png"]),
    "compare": ("compare --num 1 --methods ar", ["chunks/00-00000.npz", "report.html", "comparison.csv"]),
}


@pytest.mark.parametrize("command", COMMANDS_OF_SAMPLE_FOLDER)
def test_others_files_stay(whole, tmp_path, capsys, command):
    """No command writes where a file that it did not write has one of its names."""
    text, names = COMMANDS_OF_SAMPLE_FOLDER[command]
    out = tmp_path / "out"
    arguments = [*text.split(), *([str(whole)] if "--images" in text else ["--checkpoint", small_checkpoint()])]
    for name in [*names, "00000.npz.1.tmp"]:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("somebody's")
    for more in ([], ["--overwrite"]) if "--images" not in text else ([],):
        assert main([*arguments, "--out", str(out), *more]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert all(name in error for name in names) and "--out" in error
    left = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert left == {*names, "00000.npz.1.tmp"}
    assert {(out / name).read_text() for name in left} == {"somebody's"}


@pytest.mark.parametrize("command", COMMANDS_OF_SAMPLE_FOLDER)
def test_a_second_run_is_told_who_has_the_folder(whole, tmp_path, capsys, command):
    text, _ = COMMANDS_OF_SAMPLE_FOLDER[command]
    arguments = [*text.split(), *([str(whole)] if "--images" in text else ["--checkpoint", small_checkpoint()])]
    with cli_sample.Store(tmp_path, "any.json", "any/1", {}) as first:
        first.claim({}, [])
        assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err.splitlines()[-1]


def test_measuring_a_folder_again_replaces_its_own_report(whole, tmp_path, capsys):
    arguments = ["evaluate", "--device", "cpu", "--images", str(whole), "--out", str(tmp_path)]
    report = tmp_path / "evaluation.json"
    assert main(arguments) == 0
    assert json.loads(report.read_text())["files"] == ["grid.png"]
    (tmp_path / "grid.png").write_text("")
    assert main(arguments) == 0
    assert Image.open(tmp_path / "grid.png").width > 60
    report.write_text('{"schema": "somebody\'s", "fid": 2}')
    assert main(arguments) == 2
    assert "evaluation.json" in capsys.readouterr().err


# ---- Classes by name, wherever the command line takes classes


QUICK_OF_LABELS = ["--num-iter", "1", "--num-sampling-steps", "2", "--cfg", "1", "--device", "cpu"]
PLAIN = [*QUICK_OF_LABELS, "--first-timestep", "950"]


@pytest.mark.parametrize(
    "command, labels, hint",
    [
        (
            ["evaluate", "--method", "ar", *PLAIN],
            "two,sevn",
            "seven",
        ),
        (
            ["compare", "--methods", "ar", *PLAIN],
            "two,none",
            "",
        ),
        (["tune", *QUICK_OF_LABELS], "two,sevn", "seven"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_is_no_class(command, labels, hint, tmp_path, capsys):
    assert main([*command, "--labels", labels, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert hint in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_evaluation_that_began_with_numbers_goes_on_with_names(tmp_path):
    stamps = []
    for labels in ("7,3", "seven,Three"):
        given = ["--labels", labels, "--num", "2", "--out", str(tmp_path)]
        assert main(["evaluate", "--method", "ar", *PLAIN, *given]) == 0
        stamps.append((tmp_path / "00000.npz").stat().st_mtime_ns)
    assert stamps[0] == stamps[1] and Shards(tmp_path, 2).subjects() == [7, 3]


def test_all_parts_of_a_list_count():
    tracemalloc.start()
    try:
        for text in ("0-99999," * 600 + "1", "0-99998,1,two", "a," * MOST_LISTED):
            with pytest.raises(argparse.ArgumentTypeError):
                label_list(text)
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()
    assert len(label_list("0-99998,two")) == MOST_LISTED


@pytest.mark.parametrize(
    "text, label", [(" 3 ", 3), ("007", 7), ("none", None), (" golden retriever", "golden retriever")]
)
def test_one_class(text, label):
    assert label_of(text) == label


@pytest.mark.parametrize("text", ["0-99999", "3-", "1,2", "three,", "0-99999," * 600 + "1", "", "-", "\u0663"])
def test_lists_are_not_one_class(text):
    tracemalloc.start()
    try:
        with pytest.raises(argparse.ArgumentTypeError):
            label_of(text)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
