"""The store under `sample`, `compare` and `evaluate`: what is whole, whose a folder is, what is replaced."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from PIL import Image

from cspd.records import publishing, write_json, write_png
from cspd.store import ABANDONED, Store, differences, kept_window

SCHEMA = "tests/1"


def store_of(folder, kind=Store):
    return kind(folder, "record.json", SCHEMA, {"settings": dict}, "[0-9]*.npz", ("report.md",), ("done",))


def record_of(**settings):
    return {"schema": SCHEMA, "settings": settings}


def test_an_item_of_another_number_of_images_is_not_whole(tmp_path):
    store = store_of(tmp_path)
    store.write("0.npz", {"images": np.zeros((3, 2)), "labels": np.arange(3), "text": np.array("any")})
    counted = ("images", "labels")
    assert store.read("0.npz", 3, counted)["labels"].tolist() == [0, 1, 2]
    assert store.read("0.npz", 4, counted) is None and store.read("0.npz", 2, counted) is None
    store.write("1.npz", {"images": np.zeros((3, 2)), "labels": np.arange(2)})
    assert store.read("1.npz", 3, counted) is None and store.read("1.npz", 2, counted) is None


def test_a_damaged_item_is_not_whole(tmp_path):
    store = store_of(tmp_path)
    store.write("0.npz", {"images": np.arange(30)})
    content = (tmp_path / "0.npz").read_bytes()
    for place in range(0, len(content), 7):  # a bit anywhere; where nobody reads, nothing is lost
        damaged = bytearray(content)
        damaged[place] ^= 1
        (tmp_path / "0.npz").write_bytes(damaged)
        arrays = store.read("0.npz", 30, ("images",))
        assert arrays is None or arrays["images"].tolist() == list(range(30))
    for damaged in (b"", content[:-30], b"half", content[: len(content) // 2]):
        (tmp_path / "0.npz").write_bytes(damaged)
        assert store.read("0.npz", 30, ("images",)) is None
    assert store.read("absent.npz", 30, ("images",)) is None
    store.write("0.npz", {"others": np.arange(30)})
    assert store.read("0.npz", 30, ("images",)) is None


def test_what_one_side_alone_has_differs():
    assert differences({"a": 1}, {"a": 1, "b": 2}) == ["b was nothing, now 2"]
    assert differences({"a": 1, "b": 2}, {"a": 1}) == ["b was 2, now nothing"]
    assert differences({"a": {"c": 1}}, {"a": {"c": 1, "d": {"e": 1}}}) == ["a.d was nothing, now something"]
    assert differences({"a": 1}, {"a": 1, "b": None}) == differences({"a": 1, "b": None}, {"a": 1}) == []


@pytest.mark.parametrize("old, new", [({}, {"cfg": 1}), ({"cfg": 1}, {}), ({"cfg": 1}, {"cfg": 2})])
def test_a_record_of_other_settings_is_refused(tmp_path, old, new):
    store = store_of(tmp_path)
    store.claim(record_of(seed=0, **old))
    before = (tmp_path / "record.json").read_bytes()
    for begin in (store.earlier, store.claim):
        with pytest.raises(ValueError, match=r"holds another run \(cfg was .*\): give its settings"):
            begin(record_of(seed=0, **new))
    assert (tmp_path / "record.json").read_bytes() == before


def test_progress_is_no_setting(tmp_path):
    store = store_of(tmp_path)
    store.claim(record_of(seed=0) | {"done": [1]})
    assert store.claim(record_of(seed=0) | {"done": [2, 3]})["done"] == [1]


def test_a_window_left_open_is_that_of_the_earlier_run():
    assert differences({"window": 5}, {"window": None}) == []
    assert differences({"window": 5}, {"window": 4}) == ["window was 5, now 4"]
    assert differences({"window": 5}, {}) == ["window was 5, now nothing"]
    assert kept_window(None, {"window": 5}) == 5
    assert kept_window(4, {"window": 5}) == kept_window(4, None) == 4
    assert kept_window(None, None) is None


class Overtaken(Store):
    """Another run claims the folder between this one's look at it and its claim."""

    def earlier(self, asked):
        found = super().earlier(asked)
        if found is None:
            store_of(self.folder).claim(record_of(seed=1))
        return found


def test_of_two_runs_that_begin_at_once_one_has_the_folder(tmp_path):
    with pytest.raises(ValueError, match=r"holds another run \(seed was 1, now 2\)"):
        store_of(tmp_path, Overtaken).claim(record_of(seed=2))
    assert store_of(tmp_path).earlier(record_of(seed=1)) == record_of(seed=1)
    (tmp_path / "record.json").unlink()
    store_of(tmp_path, Overtaken).claim(record_of(seed=1))  # two copies of a command are one run
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_file_system_without_links_holds_runs_too(tmp_path, monkeypatch):
    def link(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    assert store_of(tmp_path).claim(record_of(seed=1)) == record_of(seed=1)


def test_clearing_removes_what_is_named_like_ours_and_nothing_else(tmp_path):
    store = store_of(tmp_path)
    store.claim(record_of())
    ours = ["0.npz", "12.npz", "report.md", "0.npz.7.tmp", "record.json.7.tmp"]
    others = ["notes.npz", "other.md", "notes.txt.7.tmp", "a.7.tmp", "0.npz.tmp"]
    for name in (*ours, *others):
        (tmp_path / name).write_text("")
    store.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_old_halves_of_ours_are_removed_once_the_folder_is_ours(tmp_path):
    store = store_of(tmp_path)
    names = ["0.npz.7.tmp", "notes.7.tmp", "1.npz.7.tmp"]
    for name in names:
        (tmp_path / name).write_text("half")
    for name in names[:2]:
        os.utime(tmp_path / name, (time.time() - 2 * ABANDONED,) * 2)
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(ValueError, match="not a record of this version"):
        store.claim(record_of())
    assert len(list(tmp_path.glob("*.tmp"))) == 3
    (tmp_path / "record.json").unlink()
    store.claim(record_of())
    assert {path.name for path in tmp_path.glob("*.tmp")} == set(names[1:])  # not ours, and not old


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


def test_a_file_where_the_folder_should_be_is_told(tmp_path):
    """Also where another run is to be replaced: the error names the fix, and the file stays."""
    (tmp_path / "out").write_text("not ours")
    for begin in (lambda store: store.clear(), lambda store: store.claim(record_of())):
        with pytest.raises((OSError, ValueError), match="give another --out"):
            begin(store_of(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "not ours"
