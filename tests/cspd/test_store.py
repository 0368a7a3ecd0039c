"""The store under `sample`, `compare` and `evaluate`: what is whole, whose a folder is, what is replaced."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import sys
import zipfile

import numpy as np
import pytest
from PIL import Image

from cspd.items import DIGEST, read_item, write_item
from cspd.lock import LOCK
from cspd.records import NUMBER, append_json, misfit, parse_json, publishing, write_json, write_png
from cspd.store import DECIDED, Store, differences, kept_choices

SCHEMA = "tests/1"
NAMES = r"\d+\.npz|parts/\d+\.npz|report\.md"
FILES = ["0.npz", "parts/1.npz", "report.md"]
RECORD = "record.json"


def store_of(folder, **shape):
    return Store(folder, RECORD, SCHEMA, {"settings": dict, **shape}, NAMES, compared=("settings",))


def record_of(**settings):
    return {"schema": SCHEMA, "settings": settings}


def begun(folder, *, overwrite=False, files=FILES, **settings):
    """A run that was cut off after it began."""
    with store_of(folder) as store:
        earlier = store.claim(record_of(**settings), files, overwrite)
        store.begin(record_of(**settings))
    return earlier


def content(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# arrays in files


SEEDS = {"seeds": [3, 4, 5]}
LIKE = {"images": (np.uint8, (3, 2)), "labels": (np.integer, (3,))}
ARRAYS = {"images": np.arange(6, dtype=np.uint8).reshape(3, 2), "labels": np.arange(3), "text": np.array("any")}


def test_an_item_is_read_as_it_was_written(tmp_path):
    write_item(tmp_path / "0.npz", ARRAYS, SEEDS)
    found = read_item(tmp_path / "0.npz", SEEDS, LIKE)
    assert found.keys() == ARRAYS.keys() and all((found[name] == ARRAYS[name]).all() for name in ARRAYS)
    assert read_item(tmp_path / "absent.npz", SEEDS, LIKE) is None
    np.savez(tmp_path / "old.npz", **ARRAYS)  # of a version without digests
    assert read_item(tmp_path / "old.npz", SEEDS, LIKE).keys() == ARRAYS.keys()
    for other in ({"images": ARRAYS["images"][:2]}, {"images": ARRAYS["images"].astype(int)}, {"labels": np.arange(2)}):
        np.savez(tmp_path / "old.npz", **ARRAYS | other)
        assert read_item(tmp_path / "old.npz", SEEDS, LIKE) is None


def test_a_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "0.npz"
    write_item(path, ARRAYS, SEEDS)
    whole = path.read_bytes()
    for place in range(0, len(whole), 13):  # a bit anywhere; where nobody reads, nothing is lost
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        arrays = read_item(path, SEEDS, LIKE)
        assert arrays is None or (arrays["images"] == ARRAYS["images"]).all()


@pytest.mark.parametrize("same", [{"cfg": 3.0, "seed": 2**53 + 1}, {"cfg": 3, "seed": 2**53 + 1, "window": None}])
def test_settings_that_do_not_differ_keep_their_items(tmp_path, same):
    """A study may say 3 and then 3.0, and a later version may have a setting more, which is left open."""
    settings, path = {"request": {"seed": 2**53 + 1, "cfg": 3}}, tmp_path / "0.npz"
    write_item(path, ARRAYS, settings)
    assert differences(settings, {"request": same}) == []
    assert read_item(path, {"request": same}, LIKE)
    for other in ({"cfg": 3.5}, {"seed": 2**53}, {"window": 2}):
        assert read_item(path, {"request": same | other}, LIKE) is None


def huge(path):
    """An archive whose header declares 2^60 bytes."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (2**60,)}
    with zipfile.ZipFile(path, "w") as archive, archive.open("images.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, header)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-30]),
        lambda path: path.write_bytes(b"half"),
        lambda path: np.savez(path, **ARRAYS | {"images": np.array([{}, [1]], object)}),
        lambda path: np.save(path.open("wb"), np.zeros(3)),
        lambda path: np.savez(path, others=np.arange(3)),
        lambda path: np.savez(path, **ARRAYS, **{DIGEST: np.array("another")}),
        lambda path: np.savez(path, **dict(np.load(path)) | {"images": 255 - ARRAYS["images"]}),
        lambda path: write_item(path, ARRAYS, {"seeds": [4, 5, 6]}),
        huge,
    ],
    ids="empty cut text objects array others digest inverted seeds huge".split(),
)
def test_a_damaged_item_or_one_of_others_is_none(tmp_path, damage):
    path = tmp_path / "0.npz"
    write_item(path, ARRAYS, SEEDS)
    assert read_item(path, SEEDS, LIKE)
    damage(path)
    assert read_item(path, SEEDS, LIKE) is None


# whose a folder is


def test_what_one_side_alone_has_differs():
    assert differences({"a": 1}, {"a": 1, "b": 2}) == ["b was nothing, now 2"]
    assert differences({"a": 1, "b": 2}, {"a": 1}) == ["b was 2, now nothing"]
    assert differences({"a": {"c": 1}}, {"a": {"c": 1, "d": {"e": 1}}}) == ["a.d was nothing, now something"]
    assert differences({"a": 1}, {"a": 1, "b": None}) == differences({"a": 1, "b": None}, {"a": 1}) == []


@pytest.mark.parametrize("old, new", [({}, {"cfg": 1}), ({"cfg": 1}, {}), ({"cfg": 1}, {"cfg": 2})])
def test_a_record_of_other_settings_is_refused(tmp_path, old, new):
    begun(tmp_path, seed=0, **old)
    before = content(tmp_path)
    with pytest.raises(ValueError, match=r"holds another run \(cfg was .*\): give its settings, another --out, or"):
        begun(tmp_path, seed=0, **new)
    assert content(tmp_path) == before


def test_a_run_goes_on_with_what_it_has_and_more_files(tmp_path):
    assert begun(tmp_path, seed=0) is None
    with store_of(tmp_path) as store:
        store.claim(record_of(seed=0), FILES)
        store.save(record_of(seed=0) | {"done": [1]})
    assert begun(tmp_path, files=["2.npz"], seed=0)["done"] == [1]
    assert json.loads((tmp_path / RECORD).read_text())["files"] == [*FILES, "2.npz"]


@pytest.mark.parametrize("name", DECIDED)
def test_what_is_left_open_is_as_the_earlier_run_decided_it(name):
    assert differences({name: 5}, {name: None}) == []
    assert differences({name: 5}, {name: 4}) == [f"{name} was 5, now 4"]
    assert differences({name: 5}, {}) == [f"{name} was 5, now nothing"]
    assert kept_choices({}, {name: 5})[name] == kept_choices({name: None}, {name: 5})[name] == 5
    assert name not in kept_choices({name: 4}, {name: 5}) and name not in kept_choices({name: 4}, None)
    assert kept_choices({}, None)[name] is kept_choices({}, {})[name] is None


def test_of_two_runs_at_once_one_has_the_folder_and_is_named(tmp_path):
    with store_of(tmp_path / "out") as first, store_of(tmp_path / "out") as second:
        assert first.claim(record_of(seed=1), FILES) is None
        for settings in ({"seed": 1}, {"seed": 2}):
            with pytest.raises(ValueError, match="in use by") as error:
                second.claim(record_of(**settings), FILES, overwrite=True)
            assert f"process {os.getpid()} on {socket.gethostname()} since 20" in str(error.value)
            assert "pytest" in str(error.value) and "\n" not in str(error.value)
        first.begin(record_of(seed=1))
    assert begun(tmp_path / "out", seed=1)["settings"] == {"seed": 1}  # free once the first has ended


def test_an_argument_that_is_no_utf8_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cspd", "--out", os.fsdecode(b"caf\xe9")])
    with store_of(tmp_path) as first:
        first.claim(record_of(), FILES)
        assert "caf\\udce9" in (tmp_path / LOCK).read_text()
        with pytest.raises(ValueError, match="in use by process"):
            begun(tmp_path)


def test_an_error_ends_the_claim(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with store_of(tmp_path) as store:
            store.claim(record_of(), FILES)
            raise KeyboardInterrupt
    assert begun(tmp_path) is None


def test_a_killed_run_holds_no_folder(tmp_path):
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with store_of(tmp_path) as store:
                store.claim(record_of(), FILES)
                os.write(told, b"!")
                signal.pause()
        finally:
            os._exit(1)
    os.close(told)
    assert os.read(ready, 1) == b"!"
    with pytest.raises(ValueError, match=f"in use by process {child} on"):
        begun(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert begun(tmp_path) is None
    os.close(ready)


def test_a_file_system_without_locks_holds_runs_too(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\)"):
        assert begun(tmp_path) is None


def test_a_lock_file_that_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / LOCK).write_text("somebody's")
    with pytest.raises(ValueError, match="not a file of cspd"):
        begun(tmp_path)
    assert (tmp_path / LOCK).read_text() == "somebody's"
    (tmp_path / LOCK).unlink()
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / LOCK).symlink_to("elsewhere")
    with pytest.raises(OSError, match="give another --out"):
        begun(tmp_path)
    assert (tmp_path / "elsewhere").read_text() == ""
    (tmp_path / LOCK).unlink()
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(ValueError, match="is not a file"):
        begun(tmp_path)


# what is replaced


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_no_record_lists_is_in_the_way(tmp_path, name, overwrite):
    (tmp_path / "parts").mkdir()
    (tmp_path / name).write_text("somebody's")
    with pytest.raises(ValueError, match=rf"holds {name}, and no record\.json.*: give another --out"):
        begun(tmp_path, overwrite=overwrite)
    assert content(tmp_path) == {name: b"somebody's"} and not (tmp_path / LOCK).exists()
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("nowhere")  # a link is a file too
    with pytest.raises(ValueError, match=f"holds {name}"):
        begun(tmp_path, overwrite=overwrite)
    (tmp_path / name).unlink()
    begun(tmp_path, files=["7.npz"])  # a run of ours that does not list it
    (tmp_path / name).write_text("somebody's")
    with pytest.raises(ValueError, match=rf"holds {name}, which record\.json does not list"):
        begun(tmp_path, overwrite=overwrite)
    assert (tmp_path / name).read_text() == "somebody's"


def test_overwriting_removes_what_the_record_lists_and_nothing_else(tmp_path):
    begun(tmp_path, seed=0)
    ours = [*FILES, "parts/1.npz.7.tmp"]
    others = ["1.npz", "notes.npz", "other.md", "notes.txt.7.tmp", "7.tmp", "0.npz.tmp", "parts/0.npz", "1.npz.7.tmp"]
    for name in (*ours, *others):
        (tmp_path / name).write_text(name)
    assert begun(tmp_path, overwrite=True, files=["0.npz"], seed=1) is None
    assert set(content(tmp_path)) == {*others, RECORD}
    assert json.loads((tmp_path / RECORD).read_text()) == record_of(seed=1) | {"files": ["0.npz"]}


def test_halves_of_ours_are_removed_once_the_folder_is_ours(tmp_path):
    begun(tmp_path, seed=0)
    ours, others = {"0.npz.7.tmp", f"{RECORD}.12.tmp", "parts/1.npz.7.tmp"}, {"notes.7.tmp", "1.npz.7.tmp"}
    for name in ours | others:
        (tmp_path / name).write_text("half")
    with pytest.raises(ValueError, match="another run"):
        begun(tmp_path, seed=1)
    assert ours | others <= set(content(tmp_path))
    begun(tmp_path, seed=0)
    assert set(content(tmp_path)) == {RECORD} | others


@pytest.mark.parametrize("name", ["../precious.npz", "/etc/passwd", "notes.txt", "0.npz/../../precious.npz", ""])
def test_a_record_cannot_make_us_remove_what_is_not_ours(tmp_path, name):
    out, precious = tmp_path / "out", tmp_path / "precious.npz"
    begun(out)
    for path in (precious, out / "notes.txt"):
        path.write_text("precious")
    (out / RECORD).write_text(json.dumps(record_of() | {"files": [name]}))
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="which cspd never wrote"):
            begun(out, overwrite=overwrite)
    assert precious.exists() and (out / "notes.txt").exists()


def test_a_link_does_not_lead_us_out_of_the_folder(tmp_path):
    out, parts = tmp_path / "out", tmp_path / "parts"
    begun(out)
    (out / "parts").rmdir()
    parts.mkdir()
    (parts / "1.npz").write_text("precious")
    (out / "parts").symlink_to(parts)
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="parts is a link"):
            begun(out, overwrite=overwrite)
    assert (parts / "1.npz").exists()
    (tmp_path / "linked").symlink_to(tmp_path / "other")  # the folder itself may be one
    (tmp_path / "other").mkdir()
    assert begun(tmp_path / "linked") is None and (tmp_path / "other" / RECORD).exists()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_folder_in_the_place_of_a_file_is_told_before_anything_is_removed(tmp_path, name, overwrite):
    begun(tmp_path)
    for other in FILES:
        (tmp_path / other).write_text("made in an hour")
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    before = content(tmp_path)
    with pytest.raises(ValueError, match=f"holds {name} as folders, .*: give another --out, or move them away"):
        begun(tmp_path, files=FILES[:1], overwrite=overwrite)
    assert content(tmp_path) == before and (tmp_path / name).is_dir()


def test_a_file_in_the_place_of_an_inner_folder_is_told(tmp_path):
    (tmp_path / "parts").write_text("somebody's")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"parts is a link or a file, .*: give another --out"):
            begun(tmp_path, overwrite=overwrite)
    assert content(tmp_path) == {"parts": b"somebody's"} and not (tmp_path / LOCK).exists()


def test_a_record_of_a_version_without_list_goes_on_but_is_not_overwritten(tmp_path):
    write_json(tmp_path / RECORD, record_of(seed=0))
    (tmp_path / "0.npz").write_text("kept")
    with pytest.raises(ValueError, match=r"does not list its files.*or remove the folder yourself"):
        begun(tmp_path, overwrite=True, seed=0)
    assert begun(tmp_path, seed=0)["settings"] == {"seed": 0}
    assert (tmp_path / "0.npz").exists()
    assert json.loads((tmp_path / RECORD).read_text())["files"] == FILES


# records and what they may hold

DEEP = 100_000
ABSURD = {
    "text": "half",
    "cut": '{"schema": ',
    "list": "[1]",
    "deep": "[" * DEEP + "]" * DEEP,
    "deep settings": '{"schema": "tests/1", "settings": ' + '{"a":' * DEEP + "1" + "}" * DEEP + "}",
    "nan": '{"schema": "tests/1", "settings": {"cfg": NaN}}',
    "inf": '{"schema": "tests/1", "settings": {"cfg": 1e400}}',
    "long": '{"schema": "tests/1", "settings": {"seed": -1%s}}' % ("0" * 20),
    "digits": '{"schema": "tests/1", "settings": {"cfg": %s}}' % ("9" * 5000),
    "no schema": '{"settings": {}}',
    "another schema": '{"schema": ["tests/1"], "settings": {}}',
    "no settings": '{"schema": "tests/1"}',
    "settings": '{"schema": "tests/1", "settings": [1]}',
    "files": '{"schema": "tests/1", "settings": {}, "files": {"0.npz": 1}}',
    "names": '{"schema": "tests/1", "settings": {}, "files": ["0.npz", 1]}',
    "images": '{"schema": "tests/1", "settings": {}, "images": [{"index": "1"}]}',
    "bytes": b"\xff\xfe{}",
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("text", ABSURD.values(), ids=ABSURD)
def test_an_absurd_record_is_one_clear_error(tmp_path, text, overwrite):
    (tmp_path / RECORD).write_bytes(text if isinstance(text, bytes) else text.encode())
    before = content(tmp_path)
    with store_of(tmp_path, **{"images?": [{"index": int}]}) as store:
        with pytest.raises(ValueError, match=r"record\.json.*: give another --out, or remove") as error:
            store.claim(record_of(), FILES, overwrite)
    assert len(str(error.value)) < 600 and "\n" not in str(error.value)
    assert content(tmp_path) == before


def test_settings_as_deep_as_can_be_read_are_another_run(tmp_path):
    for depth in range(850, 1000):
        settings = '{"schema": "tests/1", "settings": {"a": %s}}' % ("[" * depth + "]" * depth)
        (tmp_path / RECORD).write_text(settings)
        with pytest.raises(ValueError, match="--out"):
            begun(tmp_path, a=1)


def test_what_differs_is_shown_in_short():
    nested = 1
    for _ in range(10_000):
        nested = [nested]
    assert differences({"a": nested}, {"a": 1}) == ["a was something nested too deeply, now 1"]
    (told,) = differences({"a": "x" * 10**6}, {"a": list(range(1000))})
    assert len(told) < 200 and "(1000 of them)" in told


def test_a_huge_record_is_not_read(tmp_path):
    with (tmp_path / RECORD).open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(ValueError, match="1,099,511,627,776 bytes"):
        begun(tmp_path)


def test_where_a_value_is_not_of_a_shape_is_said():
    shape = {"a": int, "b?": [{"c": NUMBER}], "d?": {str: str}}
    assert misfit({"a": 1, "e": 2}, shape) is misfit({"a": 1, "b": [{"c": 0.5}], "d": {"x": "y"}}, shape) is None
    for value, place in (
        ([], "it"),
        ({}, "a"),
        ({"a": True}, "a"),
        ({"a": 1, "b": {}}, "b"),
        ({"a": 1, "b": [{"c": 1}, 3]}, "b[1]"),
        ({"a": 1, "b": [{"c": "1"}]}, "b[0].c"),
        ({"a": 1, "d": {"x": None}}, "d.x"),
    ):
        assert misfit(value, shape) == place


def test_json_has_no_infinity():
    assert parse_json("[1.5e308, -0.25, 1e-400]") == [1.5e308, -0.25, 0]
    for text in ("NaN", "[-Infinity]", "1e400", "-1e999"):
        with pytest.raises(ValueError, match="it has the number"):
            parse_json(text)


def test_files_are_written_whole_or_not_at_all(tmp_path):
    (tmp_path / "a.tmp").write_text("half")
    (tmp_path / f"a.json.{os.getpid() + 1}.tmp").write_text("half")
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": {1}})
    assert (tmp_path / "a.json").read_text() == '{\n "a": 1\n}\n'
    picture = Image.new("RGB", (2, 2), "red")
    write_png(tmp_path / "a.png", picture)
    with pytest.raises(AttributeError):
        write_png(tmp_path / "a.png", None)
    assert Image.open(tmp_path / "a.png").getpixel((0, 0)) == (255, 0, 0)
    with pytest.raises(OSError, match=r"No space left.*make room"):
        with publishing(tmp_path / "a.png") as temporary:
            temporary.write_bytes(b"half")
            raise OSError(28, "No space left on device")
    assert Image.open(tmp_path / "a.png").size == (2, 2)
    assert [path.read_text() for path in tmp_path.glob("*.tmp")] == ["half", "half"]
    with pytest.raises(OSError, match=r"b\.txt cannot be written .*: give a place that can be written"):
        append_json(tmp_path / "absent" / "b.txt", {})


def test_a_file_where_the_folder_should_be_is_told(tmp_path):
    """Also where another run is to be replaced: the error names the fix, and the file stays."""
    (tmp_path / "out").write_text("not ours")
    for place in (tmp_path / "out", tmp_path / "out" / "below"):
        for overwrite in (False, True):
            with pytest.raises((OSError, ValueError), match="give another --out"):
                begun(place, overwrite=overwrite)
    assert (tmp_path / "out").read_text() == "not ours"
