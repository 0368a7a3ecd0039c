"""`cspd sample`: its folder, its record, its errors."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file
from stores import other_weights, small_checkpoint, small_vq_checkpoint
from texts import small_text_checkpoint

import cspd
from cspd.checkpoints import checkpoint_files
from cspd.cli import _parse, main, options
from cspd.cli import sample as cli_sample
from cspd.cli.options import class_numbers
from cspd.cli.sample import JOURNAL, sample_to_folder
from cspd.evaluation.images import RECORD
from cspd.evaluation.run import Shards
from cspd.files import without_none
from mar.checkpoint import MARS

QUICK = ["--num-iter", "2", "--num-sampling-steps", "5", "--cfg", "3"]
SAMPLE = ["sample", "--method", "ar", *QUICK]


def sample(out, *more):
    labels = ["--labels", "0-3", "--seed", "5", "--out", str(out)]
    return main([*SAMPLE, "--checkpoint", small_checkpoint(), *labels, *more])


def record_in(out):
    return json.loads((out / RECORD).read_text())


def stamps(out):
    return {path.name: path.stat().st_mtime_ns for path in out.glob("0*.png")}


def test_images_and_a_record(tmp_path, capsys):
    """The record has every default of a request."""
    assert sample(tmp_path, "--num", "6") == 0
    record = record_in(tmp_path)
    assert record["schema"] == "cspd.samples/1"
    for i, image in enumerate(record["images"]):
        assert (image["request"]["label"], image["request"]["seed"]) == (i % 4, 5 + i)
        assert Image.open(tmp_path / image["file"]).size == (32, 32)
        assert (image["stats"]["iterations"], image["stats"]["head_calls"]) == (2, 10)
        assert (image["request"]["num_sampling_steps"], image["request"]["temperature"]) == (5, 1.0)
    assert record["summary"]["images_per_second"] > 0
    assert Image.open(tmp_path / "grid.png").width > 3 * 64
    out = capsys.readouterr().out
    assert "6 images in " in out and "grid.png" in out


@pytest.mark.parametrize(
    "checkpoint, settings",
    [
        (small_checkpoint, ["--method", "speculative", "--window", "2", "--temperature", "0.9", *QUICK]),
        (
            small_vq_checkpoint,
            ["--method", "sjd", "--window", "8", "--no-continuation", "--top-p", "0.9", "--cfg", "2"],
        ),
    ],
    ids=["mar", "vq"],
)
def test_a_picture_is_generated_again_from_itself(checkpoint, settings, tmp_path):
    """Equal to the bit, and with changed flags as if these had been given at first."""
    command = ["sample", "--checkpoint", checkpoint(), "--labels", "3", *settings]
    again = ["sample", "--like", str(tmp_path / "a" / "00000_label3_seed7.png")]
    for out, words in {
        "a": [*command, "--seed", "7"],
        "b": again,
        "c": [*command, "--seed", "8", "--cfg", "1.5"],
        "d": [*again, "--seed", "8", "--cfg", "1.5"],
    }.items():
        assert main([*words, "--out", str(tmp_path / out)]) == 0
    for one, same, seed in (("a", "b", 7), ("c", "d", 8)):
        name = f"00000_label3_seed{seed}.png"
        assert (tmp_path / one / name).read_bytes() == (tmp_path / same / name).read_bytes()

    few = {"num_iter": 4} if checkpoint is small_checkpoint else {}
    output = cspd.load(checkpoint(), device="cpu").sample(3, seed=1, method="ar", **few)
    output.save(tmp_path / "saved.png")
    assert main(["sample", "--like", str(tmp_path / "saved.png"), "--out", str(tmp_path / "e")]) == 0
    (made,) = (tmp_path / "e").glob("0*.png")
    assert Image.open(made).tobytes() == output.pil().tobytes()


def test_a_picture_of_a_prompt_is_generated_again(tmp_path, monkeypatch):
    folder = str(small_text_checkpoint(tmp_path, monkeypatch))
    text = ["--prompt", "a red fox", "--negative-prompt", "blue"]
    assert main(["sample", "--checkpoint", folder, *text, "--method", "ar", "--out", str(tmp_path / "a")]) == 0
    (made,) = (tmp_path / "a").glob("0*.png")
    assert main(["sample", "--like", str(made), "--out", str(tmp_path / "b")]) == 0
    assert made.read_bytes() == (tmp_path / "b" / made.name).read_bytes()


def test_a_picture_that_carries_no_settings(tmp_path, capsys):
    (tmp_path / "damaged.png").write_bytes(b"no image")
    Image.new("RGB", (8, 8)).save(tmp_path / "plain.png")
    text = PngInfo()
    text.add_text("cspd", '{"version": "1", "models": {}, "request": {"seed": "x"}}')
    Image.new("RGB", (8, 8)).save(tmp_path / "foreign.png", pnginfo=text)
    for name in ("missing.png", "damaged.png", "plain.png", "foreign.png"):
        assert main(["sample", "--like", str(tmp_path / name), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert name in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_picture_has_nothing_fetched(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("cspd.checkpoints.fetched", lambda name, *_: asked.append(name))
    text = PngInfo()
    settings = {"version": "1", "models": {"checkpoint": "org/name"}, "request": {"seed": 7, "method": "ar"}}
    text.add_text("cspd", json.dumps(settings))
    Image.new("RGB", (8, 8)).save(tmp_path / "like.png", pnginfo=text)
    command = ["sample", "--like", str(tmp_path / "like.png"), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "--checkpoint" in capsys.readouterr().err and asked == []
    assert _parse([*command, "--checkpoint", "org/name"]).checkpoint == "org/name"


def test_a_picture_sets_no_other_flag(tmp_path):
    """It may come from a stranger, and must not replace a folder."""
    text = PngInfo()
    request = {"seed": 7, "method": "ar", "label": 3, "overwrite": True, "out": str(tmp_path / "theirs")}
    settings = {"version": "1", "models": {"checkpoint": small_checkpoint(), "plugin": ["x.py"]}, "request": request}
    text.add_text("cspd", json.dumps(settings))
    Image.new("RGB", (8, 8)).save(tmp_path / "like.png", pnginfo=text)
    args = _parse(["sample", "--like", str(tmp_path / "like.png")])
    assert (args.seed, args.method, args.labels, args.checkpoint) == (7, "ar", [3], small_checkpoint())
    assert (args.overwrite, args.out, args.plugin) == (False, Path("samples"), None)


@pytest.mark.parametrize("value, status", [("steps", 0), ("block", 2)])
def test_a_setting_of_an_earlier_version(value, status, tmp_path, capsys):
    """What happens without it is generated again; anything else is refused, not left out."""
    text = PngInfo()
    request = {"seed": 7, "method": "ar", "label": 3, "num_iter": 2, "verification": value}
    settings = {"version": "0.3.0", "models": {"checkpoint": small_checkpoint()}, "request": request}
    text.add_text("cspd", json.dumps(settings))
    Image.new("RGB", (8, 8)).save(tmp_path / "like.png", pnginfo=text)
    assert main(["sample", "--like", str(tmp_path / "like.png"), "--out", str(tmp_path / "out")]) == status
    assert ("verification" in capsys.readouterr().err) == bool(status)


def test_the_record_has_no_nulls(engine, tmp_path):
    """A setting that was not given, such as a prompt, is left out. A resumed run finds the same settings."""
    run(engine, tmp_path, 2)
    assert "null" not in (tmp_path / RECORD).read_text()
    assert run(engine, tmp_path, 2)["summary"]["images_made"] == 0


def test_a_lost_image_is_generated_again(tmp_path):
    """At another batch size, and the same up to rounding to 8 bits."""
    assert sample(tmp_path, "--num", "5") == 0
    before = stamps(tmp_path)
    lost = sorted(before)[2]
    content = (tmp_path / lost).read_bytes()
    (tmp_path / lost).unlink()
    assert sample(tmp_path, "--num", "5", "--max-batch", "1") == 0
    assert [name for name, stamp in stamps(tmp_path).items() if before[name] != stamp] == [lost]
    old, new = (np.asarray(Image.open(file), int) for file in (io.BytesIO(content), tmp_path / lost))
    assert np.abs(old - new).max() <= 1
    record = record_in(tmp_path)
    assert record["summary"]["images_made"] == 1
    assert [image["index"] for image in record["images"]] == list(range(5))


def test_without_labels_an_image_of_each_class_is_made(tmp_path, monkeypatch):
    """A model of three classes, and runs of one process, of parts, and of an evaluation."""
    spec = MARS["mar_digits32_draft"]
    monkeypatch.setitem(MARS, "mar_three", replace(spec, config=replace(spec.config, class_num=3)))
    folder = shutil.copytree(small_checkpoint(), tmp_path / "three")
    weights = load_file(folder / "target.safetensors")
    weights["class_emb.weight"] = weights["class_emb.weight"][:3].clone()
    save_file(weights, folder / "target.safetensors")
    for out, more in (("a", []), ("b", ["--labels"]), ("c", ["--labels", "--shard", "0/1"])):
        assert main([*SAMPLE, "--checkpoint", str(folder), *more, "--out", str(tmp_path / out)]) == 0
    assert list(stamps(tmp_path / "a")) == list(stamps(tmp_path / "b"))
    assert [image["request"]["label"] for image in record_in(tmp_path / "a")["images"]] == [0, 1, 2]
    assert Shards(tmp_path / "c", 3).subjects() == [0, 1, 2]
    assert main([*SAMPLE, "--checkpoint", str(folder), "--ray", "local", "--out", str(tmp_path / "d")]) == 2
    assert class_numbers(None, cspd.load(folder, device="cpu")) == [0, 1, 2]  # in other commands


def test_another_run_is_replaced_only_if_asked(tmp_path, capsys):
    out = tmp_path / "out"
    assert sample(out) == 0
    vae = other_weights(checkpoint_files(small_checkpoint())["vae"], tmp_path / "other.safetensors")
    others = {
        "temperature": ["--temperature", "0.9"],
        "requests": ["--num", "5"],
        "label": ["--labels", "0-2,7"],  # only the last one differs
        "vae.sha256": ["--vae", str(vae)],
    }
    for changed, more in others.items():
        capsys.readouterr()
        assert sample(out, *more) == 2
        error = capsys.readouterr().err
        assert changed in error and "--overwrite" in error and error.count("\n") == 1
    assert sample(out, "--num", "2", "--overwrite") == 0
    assert len(stamps(out)) == 2

    (out / RECORD).write_text('{"schema": ')  # damaged: which files belong to the run?
    for more in ([], ["--overwrite"]):
        assert sample(out, *more) == 2
        assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, hint",
    [
        ("--labels 0-12", "label"),
        ("--labels two,sevn", "seven"),
        ("--num-iter 65", "num_iter"),
        ("--cfg nan", "cfg"),
        ("--checkpoint nowhere", "digits32"),
        ("--max-batch 9999999 --num 9999999", "max_batch"),
        (f"--seed {2**63 - 1} --num 2", "seed"),
        ("--vae nowhere.ckpt", "nowhere.ckpt"),
        ("--arch mar_base", "mar_digits32"),
    ],
)
def test_errors_are_one_line_and_name_the_remedy(arguments, hint, tmp_path, capsys):
    assert main([*SAMPLE, "--out", str(tmp_path / "out"), *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert hint in error and error.count("\n") == 1
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize(
    "arguments, hint",
    [
        ("sampel", "did you mean sample?"),
        ("sample --methd ar", "did you mean --method?"),
        ("sample --sed=4", "did you mean --seed?"),
        ("methods --mark", "did you mean --markdown?"),  # flags cannot be abbreviated
        ("sample more", "more"),
        ("sample --num 0", "--num"),
        ("sample --draft none", "--draft"),
        ("bench --batch 0", "--batch"),
        ("bench --verify parallel,serial", "--verify"),
        ("bench --methods speculative,", "--methods"),
        ("compare --out=", "--out"),
    ],
)
def test_wrong_arguments_are_reported_before_any_work(arguments, hint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    usage, *_, error = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and usage.startswith("usage: cspd")
    assert error.startswith("cspd") and hint in error and len(error) < 1000
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, hint",
    [
        ("sample --method nope", "speculative"),
        ("sample --method ar --gamma 4", "gamma"),
        ("sample --checkpoint digits32_vq --method cspd", "speculative"),
        ("sample --checkpoint digits32_vq --num-iter 5", "num_iter"),
        ("evaluate --method cool-sd", "digits32_vq"),
        ("evaluate --prompts nowhere.txt", "nowhere.txt"),
        ("calibrate --method calibrated --force", "calibrated"),
        ("calibrate --method disa", "--method"),
        ("bench --methods speculativ", "speculative"),
        ("bench --methods speculative:windw=1", "window"),
        ("bench --checkpoint digits32_vq --gamma 3", "--methods sd:gamma=4"),
        ("bench --json nowhere/numbers.json", "nowhere/numbers.json"),
        ("bench --plot picture.xyz", "picture.xyz"),
        ("compare --methods speculativ", "speculative"),
        ("compare --methods ar:seeed=3", "seed"),
    ],
)
def test_errors_come_before_models_are_loaded(arguments, hint, tmp_path, monkeypatch, capsys):
    def loaded(*_, **__):
        raise AssertionError("the models were loaded first")

    monkeypatch.setattr(options, "load", loaded)
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("cspd: ") and hint in error and error.count("\n") == 1 and len(error) < 1000
    assert not list(tmp_path.iterdir())


# The folder: damaged images are generated again, finished ones stay, and so do files of others.

NUM = 6
SETTINGS = {"method": "ar", "num_iter": 1, "num_sampling_steps": 2, "cfg": 1.0}


@pytest.fixture(scope="module")
def engine():
    return cspd.load(small_checkpoint(), max_batch=2, device="cpu")


@pytest.fixture(scope="module")
def whole(engine, tmp_path_factory):
    """The folder of an undisturbed run."""
    out = tmp_path_factory.mktemp("whole")
    run(engine, out)
    return out


@pytest.fixture
def out(whole, tmp_path):
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "out")


def run(engine, out, num=NUM, **changes):
    requests = [cspd.Request(i % 3, i, **SETTINGS | changes) for i in range(num)]
    return sample_to_folder(engine, requests, out, {"of": "tests"})


def images_in(out):
    return {path.name: path.read_bytes() for path in sorted(out.glob("0*.png"))}


ODD = [  # changes of an image's entry, or lines in place of it
    *({"index": "1"}, {"index": NUM}, {"index": -1}, {"request": []}, {"token_cost": "x"}, {"sha256": 1}),
    *({"stats": {}}, {"stats": {"guarantee": "exact", "head_calls_per_token": 1, "seconds": {}, "alpha": "x"}}),
    *("7", "[]", "[" * 100_000),
]


def odd_line(out, odd):
    entry = record_in(out)["images"][1]
    return json.dumps(entry | odd) if isinstance(odd, dict) else odd


def test_odd_lines_of_a_journal_are_left_out(engine, whole, out):
    record = record_in(out)
    (out / JOURNAL).write_text("\n".join(odd_line(out, odd) for odd in ODD))
    del record["images"][1]
    (out / RECORD).write_text(json.dumps(record))
    assert run(engine, out)["summary"]["images_made"] == 1
    assert images_in(out) == images_in(whole)


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_an_odd_record_is_refused_or_its_image_is_generated_again(odd, engine, whole, out):
    line = odd_line(out, odd)
    (out / RECORD).write_text(json.dumps(record_in(out) | {"images": ["odd"]}).replace('"odd"', line))
    with contextlib.suppress(ValueError):
        assert run(engine, out)["summary"]["images_made"] == NUM
    assert images_in(out) == images_in(whole)


def test_integers_resume_runs_of_floats(engine, tmp_path):
    """A record has 3.0 for cfg=3. In a record of an older version 3 stands for the same images."""
    run(engine, tmp_path, 2, cfg=3)
    record = record_in(tmp_path)
    for image in record["images"]:
        assert type(image["request"]["cfg"]) is float
        image["request"]["cfg"] = 3
    (tmp_path / RECORD).write_text(json.dumps(record))
    assert run(engine, tmp_path, 2, cfg=3)["summary"]["images_made"] == 0


def flipped(content):
    damaged = bytearray(content)
    damaged[len(damaged) // 2] ^= 1
    return bytes(damaged)


DAMAGE = {
    "empty": lambda own, other: b"",
    "cut": lambda own, other: own[: len(own) // 2],
    "flipped": lambda own, other: flipped(own),
    "swapped": lambda own, other: other,
}


@pytest.mark.parametrize(
    "kind, has_hashes", [("empty", True), ("cut", True), ("flipped", True), ("swapped", True), ("cut", False)]
)
def test_a_damaged_image_is_generated_again(engine, whole, out, capsys, monkeypatch, kind, has_hashes):
    """Also one that the grid does not show, and in a folder of an older version without digests."""
    monkeypatch.setattr(cli_sample, "GRID_LIMIT", 2)
    files, record = sorted(images_in(out)), record_in(out)
    if not has_hashes:
        for image in record["images"]:
            del image["sha256"]
        (out / RECORD).write_text(json.dumps(record))
    damaged, other = out / files[4], out / files[1]
    damaged.write_bytes(DAMAGE[kind](damaged.read_bytes(), other.read_bytes()))
    assert run(engine, out)["summary"]["images_made"] == 1
    [warning] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cspd:")]
    assert files[4] in warning
    assert images_in(out) == images_in(whole)
    assert run(engine, out)["summary"]["images_made"] == 0  # every entry has its digest now


@pytest.mark.parametrize("step", ["append_json", "write_bytes", "to_pil", "summary_of"])
def test_a_run_that_is_killed_anywhere_loses_no_finished_image(engine, whole, tmp_path, monkeypatch, step):
    """Killed before an image is in the journal, before it has its file, between images, before the end."""

    class Killed(BaseException):
        pass

    calls = []
    function = getattr(cli_sample, step)

    def killing(*arguments):
        calls.append(arguments)
        if len(calls) > 3 or step == "summary_of":
            raise Killed
        return function(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(cli_sample, step, killing)
        with pytest.raises(Killed):
            run(engine, tmp_path)
    finished = images_in(tmp_path)
    assert len(finished) == (6 if step == "summary_of" else 3) and finished.items() <= images_in(whole).items()
    before = stamps(tmp_path)
    with (tmp_path / JOURNAL).open("a") as journal:
        journal.write('{"index": 5, "request": {"la')  # torn
    record = run(engine, tmp_path)
    assert record["summary"]["images_made"] == NUM - len(finished)
    assert stamps(tmp_path).items() >= before.items()
    assert images_in(tmp_path) == images_in(whole) and not (tmp_path / JOURNAL).exists()
    written = record_in(tmp_path)
    assert written.pop("temporary") and JOURNAL in written.pop("files")
    assert written == json.loads(json.dumps(record), object_hook=without_none)
    assert [image["index"] for image in record["images"]] == list(range(NUM))


def test_the_record_is_written_twice_for_any_number_of_images(engine, tmp_path, monkeypatch):
    """An image costs one line of the journal."""
    saved, lines = [], []
    save, append = cli_sample.Store.save, cli_sample.append_json
    monkeypatch.setattr(cli_sample.Store, "save", lambda self, record: (saved.append(1), save(self, record)))
    monkeypatch.setattr(cli_sample, "append_json", lambda *line: (lines.append(1), append(*line)))
    run(engine, tmp_path)
    assert len(saved) == 2 and len(lines) == NUM


COMMANDS = {  # with the names of some files that they write
    "sample --num 1 --heatmap": ["00000_label0_seed0.png", "grid.png", "heatmap.png", JOURNAL],
    "evaluate --space digits --num-images 20": ["00001.npz", "evaluation.json", "grid.png"],
    "evaluate --space digits --device cpu --images": ["grid.png"],
    "compare --num 1 --methods ar": ["chunks/00-00000.npz", "report.html", "comparison.csv"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_files_of_others_stay(whole, tmp_path, capsys, command):
    """No command replaces a file that it did not write, or shares a folder with a run in progress."""
    of_images = command.endswith("--images")
    arguments = [*command.split(), *([str(whole)] if of_images else ["--checkpoint", small_checkpoint()])]
    out = tmp_path / "out"
    files = [*COMMANDS[command], "00000.npz.1.tmp"]
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("somebody's")
    for more in ([],) if of_images else ([], ["--overwrite"]):
        assert main([*arguments, "--out", str(out), *more]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert all(name in error for name in COMMANDS[command]) and "--out" in error
    left = {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file()}
    assert left == dict.fromkeys(files, "somebody's")

    with cli_sample.Store(tmp_path / "used", "any.json", "any/1", {}) as first:
        first.claim({}, [])
        assert main([*arguments, "--out", str(tmp_path / "used")]) == 2
    assert str(tmp_path / "used") in capsys.readouterr().err.splitlines()[-1]


def test_measuring_a_folder_again_replaces_its_own_report(whole, tmp_path, capsys):
    arguments = ["evaluate", "--space", "digits", "--images", str(whole), "--out", str(tmp_path)]
    report = tmp_path / "evaluation.json"
    assert main(arguments) == 0
    assert json.loads(report.read_text())["files"] == ["grid.png"]
    (tmp_path / "grid.png").write_text("")
    assert main(arguments) == 0
    assert Image.open(tmp_path / "grid.png").width > 60
    report.write_text('{"schema": "somebody\'s", "fid": 2}')
    assert main(arguments) == 2
    assert "evaluation.json" in capsys.readouterr().err


# Classes by name.

PLAIN = ["--num-iter", "1", "--num-sampling-steps", "2", "--cfg", "1", "--device", "cpu"]


@pytest.mark.parametrize(
    "command, labels, hint",
    [
        ("evaluate --method ar", "two,sevn", "seven"),
        ("compare --methods ar", "two,none", "none"),
        ("tune", "a", "two"),
    ],
)
def test_unknown_classes(command, labels, hint, tmp_path, capsys):
    assert main([*command.split(), *PLAIN, "--labels", labels, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert hint in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_evaluation_of_numbers_resumes_with_names(tmp_path):
    written = []
    for labels in ("7,3", "seven,Three"):
        given = ["--labels", labels, "--num", "2", "--out", str(tmp_path), "--first-timestep", "950"]
        assert main(["evaluate", "--method", "ar", *PLAIN, *given]) == 0
        written.append((tmp_path / "00000.npz").stat().st_mtime_ns)
    assert written[0] == written[1] and Shards(tmp_path, 2).subjects() == [7, 3]


def test_exhausted_memory_is_a_message(tmp_path, capsys):
    """Of the CPU, for which torch has no type of error. Other errors of that type are not hidden."""
    plugin = tmp_path / "large.py"
    plugin.write_text("import torch\ntorch.empty(2**60)\n")
    assert main(["sample", "--plugin", str(plugin)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("cspd: memory is exhausted") and "--max-batch" in said and said.count("\n") == 1
    plugin.write_text("raise RuntimeError('a bug')\n")
    with pytest.raises(RuntimeError):
        main(["sample", "--plugin", str(plugin)])
