"""The folder of `cspd sample`: what was damaged is made again, what was finished is kept, other's files stay."""

from __future__ import annotations

import json
import shutil

import pytest
from PIL import Image
from stores import small_checkpoint

import cspd
from cspd.cli import main
from cspd.cli import sample as cli_sample
from cspd.cli.sample import JOURNAL, sample_to_folder
from cspd.evaluation.images import RECORD

NUM = 6
QUICK = {"method": "ar", "num_iter": 1, "num_sampling_steps": 2, "cfg": 1.0}


@pytest.fixture(scope="module")
def engine():
    return cspd.load(small_checkpoint(), max_batch=2, device="cpu")


@pytest.fixture(scope="module")
def whole(engine, tmp_path_factory):
    """The folder of a run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole")
    sample(engine, out)
    return out


@pytest.fixture
def out(whole, tmp_path):
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "out")


def sample(engine, out, num=NUM, **more):
    requests = [cspd.Request(i % 3, i, **QUICK) for i in range(num)]
    return sample_to_folder(engine, requests, out, {"of": "tests"}, progress=False, **more)


def test_whole_numbers_of_python_go_on(engine, tmp_path):
    """A record has floats where cfg=3 was given. One of an older version, which has 3, is of the same images."""
    requests = [cspd.Request(1, seed, **QUICK | {"cfg": 3}) for seed in range(2)]
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
    assert sample(engine, out)["summary"]["images_made"] == seen
    told = f"cspd: 1 file is damaged, incomplete or of other images, and made again: {files[4]}\n"
    assert capsys.readouterr().err == (told if seen else "")
    assert not seen or pictures(out) == pictures(whole)
    assert sample(engine, out)["summary"]["images_made"] == 0  # all have hashes now


def test_a_picture_that_is_gone_is_made_again_without_a_word(engine, whole, out, capsys):
    sorted(out.glob("0*.png"))[3].unlink()
    assert sample(engine, out)["summary"]["images_made"] == 1
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
            sample(engine, tmp_path)
    kept = pictures(tmp_path)
    assert len(kept) == (6 if step == "end" else 3) and kept.items() <= pictures(whole).items()
    stamps = {name: (tmp_path / name).stat().st_mtime_ns for name in kept}
    with (tmp_path / JOURNAL).open("a") as journal:
        journal.write('{"index": 5, "request": {"la')  # torn
    record = sample(engine, tmp_path)
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
    sample(engine, tmp_path)
    assert len(saved) == 2 and len(lines) == NUM


COMMANDS = {
    "sample": ("sample --num 1", ["00000_label0_seed0.png", "grid.png", "samples.journal"]),
    "sample --heatmap": ("sample --num 1 --heatmap", ["heatmap.png"]),
    "evaluate": ("evaluate --num-images 20", ["00001.npz", "evaluation.json", "grid.png"]),
    "evaluate --images": ("evaluate --device cpu --images", ["grid.png"]),
    "compare": ("compare --num 1 --methods ar", ["chunks/00-00000.npz", "report.html", "comparison.csv"]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_others_files_stay(whole, tmp_path, capsys, command):
    """No command writes where a file that it did not write has one of its names."""
    text, names = COMMANDS[command]
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


@pytest.mark.parametrize("command", COMMANDS)
def test_a_second_run_is_told_who_has_the_folder(whole, tmp_path, capsys, command):
    text, _ = COMMANDS[command]
    arguments = [*text.split(), *([str(whole)] if "--images" in text else ["--checkpoint", small_checkpoint()])]
    with cli_sample.Store(tmp_path, "any.json", "any/1", {}, "") as first:
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
