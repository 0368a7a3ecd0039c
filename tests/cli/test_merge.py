"""Runs in parts: `cspd sample --shard`, `cspd merge`, `cspd verify`, and object stores."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import tracemalloc

import fsspec
import numpy as np
import pytest
import webdataset
from launching import kill_all, start, wait_until
from PIL import Image
from stores import other_weights, small_checkpoint

import cspd
from cspd.cli import _parse, main
from cspd.evaluation.images import LIST, RECORD, ImageFolder, in_turn, prompts_of
from cspd.evaluation.run import MANIFEST, SIZE, Part, Shards, finish, finish_part, run_in, shards_store
from cspd.files import Remote, publishing, write_json
from cspd.pixels import to_uint8

NUM = 40  # two shards of 16 images, and one of 8
SETTINGS = ["--method", "ar", "--num-iter", "2", "--num-sampling-steps", "5", "--cfg", "1", "--max-batch", "4"]
LABELS = ["--labels", "3,7,none", "--seed", "5", "--num", str(NUM), "--device", "cpu"]


def sample(out, *more):
    return main(["sample", "--checkpoint", small_checkpoint(), *SETTINGS, *LABELS, "--out", str(out), *more])


def images_listed(folder):
    return [json.loads(line) for line in (folder / LIST).read_text().splitlines()]


def digests(folder):
    return [image["sha256"] for image in images_listed(folder)]


def stamps(out):
    return {path.name: path.stat().st_mtime_ns for path in out.glob("0*")}


@pytest.fixture(scope="module", name="whole")
def whole_run(tmp_path_factory):
    """Made by three parts, in any order."""
    out = tmp_path_factory.mktemp("whole")
    for part in ("2/3", "0/3", "1/3"):
        assert sample(out, "--shard", part) == 0
    return out


def test_any_number_of_parts_make_the_same_images(whole, tmp_path):
    assert sample(tmp_path, "--shard", "0/1") == 0
    assert images_listed(tmp_path) == images_listed(whole)
    engine = cspd.load(small_checkpoint(), max_batch=4, device="cpu")
    some = {0: 3, 20: None, 22: 7, 39: 3}
    settings = {"method": "ar", "num_iter": 2, "num_sampling_steps": 5, "cfg": 1.0}
    outputs = engine.generate([cspd.Request(label, 5 + i, **settings) for i, label in some.items()])
    shards = run_in(whole)
    for index, output in zip(some, outputs):
        assert np.abs(shards[index].numpy().astype(int) - to_uint8(output.image).numpy()).max() <= 1
    assert shards.subjects()[:4] == [3, 7, None, 3]
    listed = images_listed(whole)
    assert [image["request"]["seed"] for image in listed] == list(range(5, 5 + NUM))
    assert "label" not in listed[2]["request"] and listed[1]["request"]["label"] == 7


def test_a_run_of_an_earlier_version_is_read(whole, tmp_path):
    """Its settings may have one that is gone: what happens without it is the same run, anything else is refused."""
    out = shutil.copytree(whole, tmp_path / "out")
    manifest = json.loads((out / MANIFEST).read_text())
    for value in ("steps", None):
        write_json(out / MANIFEST, manifest | {"request": manifest["request"] | {"verification": value}})
        assert [*run_in(out).requests([3])] == [*run_in(whole).requests([3])]
    write_json(out / MANIFEST, manifest | {"request": manifest["request"] | {"verification": "block"}})
    with pytest.raises(ValueError, match="verification"):
        run_in(out)


def test_a_part_makes_its_missing_shards_and_no_others(whole, tmp_path, capsys):
    out = shutil.copytree(whole, tmp_path / "out")
    before = stamps(out)
    (out / "00001.npz").write_bytes(b"damaged")
    (out / "00002.npz").unlink()
    assert sample(out, "--shard", "1/3") == 0
    assert "00001.npz" in capsys.readouterr().err
    assert not (out / "00002.npz").exists()
    assert main(["merge", str(out)]) == 2  # what does not exist cannot be merged
    assert sample(out, "--shard", "2/3") == 0
    after = stamps(out)
    assert after["00000.npz"] == before["00000.npz"] and digests(out) == digests(whole)


def test_parts_with_other_settings_or_of_no_run_are_refused(whole, tmp_path, capsys, monkeypatch):
    before = stamps(whole)
    for more in (["--temperature", "0.9"], ["--overwrite"], ["--heatmap"]):
        assert sample(whole, "--shard", "0/2", *more) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert more[0].removeprefix("--") in error
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    assert sample(tmp_path / "out", "--shard", "0/2") == 2
    assert not (tmp_path / "out").exists() and stamps(whole) == before


def test_of_the_parts_that_find_a_run_complete_one_finishes_it(whole, capsys, monkeypatch):
    """The others are no errors: torchrun would stop the one that measures."""
    monkeypatch.setattr("cspd.runs.TURN", 0)
    with finish(run_in(whole)):
        assert finish_part(run_in(whole), Part(1, 2)) is None
        assert sample(whole, "--shard", "1/2") == 0
        assert "40 of 40" in capsys.readouterr().out
        assert sample(whole, "--shard", "1/2", "--temperature", "0.9") == 2
        assert "temperature" in capsys.readouterr().err.splitlines()[-1]
        assert sample(whole, "--shard", "0/1") == 2
        assert "in use" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("wrong", ["3/3", "a/2", "1", "-1/2", "1/0"])
def test_a_part_is_a_number_below_their_number(wrong):
    with pytest.raises(SystemExit):
        main(["sample", f"--shard={wrong}"])


@pytest.mark.slow
def test_a_part_that_dies_ends_no_other(whole, tmp_path):
    """Two parts start at the same time, and one of them is killed; the same command makes what it lost."""
    out, log = tmp_path / "out", tmp_path / "log"
    command = ["sample", "--checkpoint", small_checkpoint(), *SETTINGS, *LABELS, "--out", str(out), "--shard"]
    parts = [start([*command, f"{i}/2"], log) for i in range(2)]
    wait_until(lambda: (out / MANIFEST).exists())
    kill_all(parts[0])
    assert parts[1].wait(timeout=100) == 0, log.read_text()
    before = stamps(out)
    assert "00001.npz" in before
    assert sample(out, "--shard", "0/2") == 0
    assert stamps(out).items() >= before.items() and digests(out) == digests(whole)


def test_a_run_resumes_with_a_copy_of_its_weights_and_with_no_others(whole, tmp_path, capsys):
    out, copy = shutil.copytree(whole, tmp_path / "out"), tmp_path / "copy"
    shutil.copytree(small_checkpoint(), copy, copy_function=shutil.copyfile)  # in another folder, at another time
    assert sample(out, "--checkpoint", str(copy), "--shard", "0/1") == 0
    assert stamps(out) == stamps(whole)
    other_weights(copy / "vae.safetensors", copy / "vae.safetensors")
    capsys.readouterr()
    assert sample(out, "--checkpoint", str(copy), "--shard", "0/1") == 2
    assert "vae.sha256" in capsys.readouterr().err


# ---- Other files


@pytest.fixture(scope="module", name="merged")
def merged_run(whole, tmp_path_factory):
    out = tmp_path_factory.mktemp("merged")
    arguments = ["--png", str(out / "png"), "--tar", str(out / "tar"), "--npz", str(out / "all.npz")]
    assert main(["merge", str(whole), *arguments]) == 0
    return out


def test_merged_files_have_the_images_of_the_run(whole, merged):
    pixels = np.stack([run_in(whole)[i].permute(1, 2, 0).numpy() for i in range(NUM)])
    with np.load(merged / "all.npz") as file:
        assert (file["arr_0"] == pixels).all()
    folder = ImageFolder(merged / "png")
    assert folder.files[1].name == "00001_label7_seed6.png"
    assert all((folder[i].permute(1, 2, 0).numpy() == pixels[i]).all() for i in range(NUM))
    tars = webdataset.WebDataset(str(merged / "tar" / "00000.tar"), shardshuffle=False).decode("rgb8")
    for i, found in enumerate(tars):
        assert (found["png"] == pixels[i]).all()
        assert found["json"]["request"] == images_listed(whole)[i]["request"]
    assert i == NUM - 1
    assert digests(merged / "png") == digests(merged / "tar") == digests(whole)
    args = _parse(["sample", "--like", str(folder.files[1])])  # the PNGs carry their settings
    assert (args.checkpoint, args.labels, args.seed, args.num_iter) == (small_checkpoint(), [7], 6, 2)
    assert prompts_of(folder) is None and Image.open(merged / "tar" / "grid.png").width > 600


def test_merging_again_writes_what_is_missing(whole, merged, tmp_path):
    out = shutil.copytree(merged, tmp_path / "out")
    before = stamps(out / "png")
    name = sorted(before)[17]
    (out / "png" / name).unlink()
    tar = (out / "tar" / "00000.tar").read_bytes()
    (out / "tar" / "00000.tar").write_bytes(tar[: len(tar) // 2])
    arguments = ["--png", str(out / "png"), "--tar", str(out / "tar")]
    assert main(["merge", str(whole), *arguments]) == 0
    after = stamps(out / "png")
    assert [each for each in before if after[each] != before[each]] == [name]
    assert (out / "tar" / "00000.tar").read_bytes() == tar


def test_merging_replaces_no_file_of_others(whole, tmp_path, capsys):
    theirs = tmp_path / "00000.tar"
    theirs.write_text("somebody's")
    assert main(["merge", str(whole), "--tar", str(tmp_path)]) == 2
    assert "00000.tar" in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["00000.tar"] and theirs.read_text() == "somebody's"


def test_a_damaged_shard_is_named_with_its_remedy(whole, tmp_path, capsys):
    out = shutil.copytree(whole, tmp_path / "out")
    cut(out / "00001.npz")
    assert main(["merge", str(out)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "00001.npz is missing, damaged" in error and "repeat the command that makes it" in error


def test_merging_writes_nothing_outside_its_folder(whole, tmp_path):
    """Neither by a name in a foreign record beside the run's, nor by a foreign list, which is replaced."""
    out = shutil.copytree(whole, tmp_path / "out")
    listed = images_listed(out)
    for field in ("seed", "label"):
        listed[0]["request"][field] = "/../../theirs"
    (out / LIST).write_text("\n".join(map(json.dumps, listed)))
    write_json(out / RECORD, {"images": listed})
    (tmp_path / "png" / "00000_label").mkdir(parents=True)
    assert main(["merge", str(out), "--png", str(tmp_path / "png"), "--npz", str(tmp_path / "all.npz")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"out", "png", "all.npz"}
    assert sorted(stamps(tmp_path / "png"))[1] == "00000_label3_seed5.png"


@pytest.mark.parametrize(
    "change",
    [
        {"images": 10**12},
        {"images": 0},
        {"labels": []},
        {"seeds": [1, 2]},
        {"request": {"no_such_option": 1}},
    ],
    ids=str,
)
def test_a_manifest_of_no_possible_run_is_an_error_of_one_line(change, whole, tmp_path, capsys):
    out = shutil.copytree(whole, tmp_path / "out")
    write_json(out / MANIFEST, json.loads((whole / MANIFEST).read_text()) | change)
    assert main(["merge", str(out)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_tars_need_webdataset(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "webdataset", None)
    assert main(["merge", str(whole), "--tar", str(tmp_path / "tar")]) == 2
    assert "[webdataset]" in capsys.readouterr().err and not (tmp_path / "tar").exists()


# ---- Whether images are whole


def swapped(path):
    """Another image with the same name, whose file is not damaged."""
    other = path.with_name(sorted(each.name for each in path.parent.glob(f"0*{path.suffix}"))[0])
    shutil.copy(other, path)


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("kind", ["shards", "png", "tar", "samples"])
def test_verify_checks_every_image(kind, whole, merged, tmp_path, capsys):
    source = {"shards": whole, "png": merged / "png", "tar": merged / "tar"}.get(kind)
    folder = tmp_path / "folder"
    if source:
        shutil.copytree(source, folder)
    else:
        assert sample(folder, "--num", "3") == 0
    assert main(["verify", str(folder)]) == 0
    name = sorted(path.name for path in folder.glob("0*"))[-1]
    content = (folder / name).read_bytes()
    changes = [cut, lambda path: path.unlink()]
    if kind != "tar":  # there is only one
        changes.append(swapped)
    for change in changes:
        change(folder / name)
        capsys.readouterr()
        assert main(["verify", str(folder)]) == 1
        assert name in capsys.readouterr().out
        (folder / name).write_bytes(content)
    assert main(["verify", str(folder)]) == 0
    assert main(["verify", str(tmp_path)]) == 2


def test_verify_finds_what_an_interrupted_run_lacks(tmp_path, capsys):
    """Also an image whose digest an older version did not write."""
    assert sample(tmp_path, "--num", "3") == 0
    record = json.loads((tmp_path / RECORD).read_text())
    last = record["images"].pop()
    write_json(tmp_path / RECORD, record)
    capsys.readouterr()
    assert main(["verify", str(tmp_path)]) == 1
    assert "2 of 3" in capsys.readouterr().out
    del last["sha256"]
    write_json(tmp_path / RECORD, record | {"images": [*record["images"], last]})
    assert main(["verify", str(tmp_path)]) == 1
    assert last["file"] in capsys.readouterr().out


def test_verify_reads_ordinary_files_inside_the_folder_only(tmp_path, capsys):
    """A pipe or a device would never end."""
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link").symlink_to("/dev")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path.parent / "outside.png").write_bytes(b"")
    names = ["pipe.png", "zero.png", "link/zero", "/dev/zero", "../outside.png", ".", ""]
    write_json(tmp_path / RECORD, {"images": [{"file": name, "request": {}, "sha256": ""} for name in names]})
    assert main(["verify", str(tmp_path)]) == 1
    assert f"{len(names)} files" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["shards", "list", "tar"])
def test_verify_fills_no_memory_from_a_small_file(kind, whole, tmp_path):
    folder, big = tmp_path / "folder", np.zeros(2**26, np.uint8)
    shutil.copytree(whole, folder)
    if kind == "tar":
        with tarfile.open(folder / "00000.tar", "w:gz") as archive:
            member = tarfile.TarInfo("0.png")
            member.size = len(big)
            archive.addfile(member, io.BytesIO(big))
        (folder / MANIFEST).unlink()
        (folder / LIST).write_text('{"file": "00000.tar", "request": {}, "sha256": ""}\n')
    else:
        np.savez_compressed(folder / "00000.npz", images=big)
        if kind == "list":
            (folder / MANIFEST).unlink()
    tracemalloc.start()
    assert main(["verify", str(folder)]) == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(big) / 4


# ---- Object stores


@pytest.fixture
def store():
    url = "memory://bucket/run [a-z]*"  # a path is no pattern
    yield url
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_a_run_in_an_object_store(whole, store, tmp_path, capsys):
    """Its parts, its manifest, its list and its grid; a damaged file is made again, a file of others stays."""
    assert sample(store, "--shard", "1/2") == 0
    assert "16 of 40" in capsys.readouterr().out
    with fsspec.open(f"{store}/00001.npz", "wb") as file:
        file.write(b"damaged")
    assert sample(store, "--shard", "0/2") == 2  # it is the last part, and a file of the other one is damaged
    assert "00001.npz" in capsys.readouterr().err.splitlines()[-1]
    assert sample(store, "--shard", "1/2") == 0
    listed = (Remote(store) / LIST).read_text().splitlines()
    assert [json.loads(line)["sha256"] for line in listed] == digests(whole)
    assert main(["verify", store]) == 0
    assert main(["merge", store, "--png", str(tmp_path / "png"), "--tar", "memory://bucket/tar"]) == 0
    assert digests(tmp_path / "png") == digests(whole)
    assert main(["verify", "memory://bucket/tar"]) == 0
    assert sample(store, "--shard", "0/2", "--temperature", "0.9") == 2
    (Remote("memory://bucket/other") / "grid.png").create(b"somebody's")
    assert sample("memory://bucket/other") == 2
    assert "grid.png" in capsys.readouterr().err.splitlines()[-1]
    assert fsspec.filesystem("memory").cat("/bucket/other/grid.png") == b"somebody's"


def test_a_whole_run_needs_no_flag_for_an_object_store(whole, store):
    assert sample(store) == 0
    assert len(run_in(Remote(store)).subjects()) == NUM


def test_files_of_a_folder_can_be_named_by_a_url(whole, capsys):
    assert main(["verify", f"file://localhost{whole}"]) == 0
    assert main(["verify", f"file://another{whole}"]) == 2 and "another" in capsys.readouterr().err
    with pytest.raises(SystemExit):  # a folder named "s3:" would be made
        main(["merge", str(whole), "--npz", "s3://bucket/all.npz"])


def test_of_two_parts_that_begin_at_once_one_writes_the_manifest(store):
    """The other one learns of it, and takes its choices."""
    manifest = {"schema": "cspd.shards/1", "images": 1, "seed": 0, "labels": [0], "request": {"window": 4}}
    first, second = shards_store(Remote(store)), shards_store(Remote(store))
    for each in (first, second):
        assert each.claim(manifest, ["00000.npz"], shared=True) is None
    first.begin(manifest)
    with pytest.raises(FileExistsError):
        second.begin(manifest)
    open_window = {**manifest, "request": {"window": None}}
    assert second.claim(open_window, ["00000.npz"], shared=True)["request"] == {"window": 4}


def test_a_file_in_an_object_store_is_written_whole_or_not_at_all(store):
    file = Remote(store) / "a.json"
    write_json(file, {"a": 1})
    with pytest.raises(KeyError):
        with publishing(file) as temporary:
            temporary.write_text("half")
            raise KeyError
    assert json.loads(file.read_text()) == {"a": 1}
    assert [path.name for path in Remote(store).glob("*")] == ["a.json"]


def test_an_unknown_store_is_an_error_of_one_line(capsys):
    assert sample("nonsense://bucket/run") == 2
    assert "nonsense" in capsys.readouterr().err.splitlines()[-1]


def test_a_shard_has_sixteen_images():
    """Resuming depends on it."""
    assert SIZE == 16


# ---- The folders of benchmarks


PROMPTS = ["two clocks", "a red\u2028fox", "a photo of a bench"]


@pytest.fixture
def of_prompts(tmp_path):
    """A finished run of four images of each prompt, image i of the colour 10 i; and its prompts in both forms."""
    schema = {"schema": "cspd.shards/1"}
    manifest = {**schema, "images": 12, "seed": 0, "labels": PROMPTS, "request": {"method": "ar"}}
    with shards_store(tmp_path / "run") as store:
        store.claim(manifest, Shards(tmp_path / "run", 12).files())
        store.begin(manifest)
    shards = Shards(tmp_path / "run", 12, manifest)
    pixels = np.stack([np.full((8, 8, 3), 10 * i, np.uint8) for i in range(12)])
    labels, stats = np.array(in_turn(PROMPTS, 12)), np.array(json.dumps([{}] * 12))
    models = np.array(json.dumps({"family": "VQ"}))
    arrays = {"images": pixels, "labels": labels, "seeds": np.arange(12), "stats": stats, "models": models}
    shards.write(0, arrays)
    lines = [{"tag": "counting", "include": [{"class": "clock", "count": 2}], "prompt": each} for each in PROMPTS]
    content = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "metadata.jsonl").write_text(content, encoding="utf-8")
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, text in zip(("10", "2", "COCO_7"), PROMPTS):
        (texts / f"{name}.txt").write_text(text + "\n")
    return tmp_path


def test_genevals_folder(of_prompts):
    """As its scorer walks it: of each folder with a number, the metadata and the numbered samples."""
    out = of_prompts / "geneval"
    prompts = ["--prompts", str(of_prompts / "metadata.jsonl")]
    assert main(["merge", str(of_prompts / "run"), "--geneval", str(out), *prompts]) == 0
    folders = sorted(path for path in out.iterdir() if path.is_dir() and path.name.isdigit())
    assert [path.name for path in folders] == ["00000", "00001", "00002"]
    for k, folder in enumerate(folders):
        with (folder / "metadata.jsonl").open() as file:
            assert json.load(file)["prompt"] == PROMPTS[k]
        samples = sorted((folder / "samples").iterdir())
        assert [path.name for path in samples] == [f"{i:04d}.png" for i in range(4)]
        colours = [np.asarray(Image.open(path))[0, 0, 0] for path in samples]
        assert colours == [10 * (k + 3 * i) for i in range(4)]


def test_dpg_benchs_folder(of_prompts):
    """A grid of two rows for each prompt, of its text's name; its scorer cuts it by the size of an image."""
    out = of_prompts / "dpg"
    prompts = ["--prompts", str(of_prompts / "texts")]
    assert main(["merge", str(of_prompts / "run"), "--dpg", str(out), *prompts]) == 0
    assert sorted(path.name for path in out.glob("*.png")) == ["10.png", "2.png", "COCO_7.png"]
    for k, name in enumerate(("10", "2", "COCO_7")):
        picture = Image.open(out / f"{name}.png")
        boxes = [(0, 0, 8, 8), (8, 0, 16, 8), (0, 8, 8, 16), (8, 8, 16, 16)]
        assert picture.size == (16, 16)
        assert [picture.crop(box).getpixel((3, 3))[0] for box in boxes] == [10 * (k + 3 * i) for i in range(4)]


def test_a_benchmark_of_other_prompts_is_refused(of_prompts, capsys):
    (of_prompts / "other.jsonl").write_text('{"prompt": "two clocks"}\n')
    run = ["merge", str(of_prompts / "run"), "--geneval", str(of_prompts / "out")]
    assert main(run) == 2 and "--prompts" in capsys.readouterr().err
    (of_prompts / "same.txt").write_text("\n".join(PROMPTS))  # without GenEval's metadata
    for name in ("other.jsonl", "same.txt"):
        assert main([*run, "--prompts", str(of_prompts / name)]) == 2
        assert name in capsys.readouterr().err and not (of_prompts / "out").exists()
