"""The store under `sample`, `compare` and `evaluate`: whose a folder is, what is replaced."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal

import pytest
from folders import FILES, RECORD, begun, content, record_of, store_of

from cspd.files import publishing
from cspd.runs import DECIDED, LOCK, differences, kept_choices

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
    with pytest.raises(ValueError, match="--out"):
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
            with pytest.raises(ValueError) as error:
                second.claim(record_of(**settings), FILES, overwrite=True)
            assert f"{os.getpid()}" in str(error.value)
            assert str(error.value) and "\n" not in str(error.value)
        first.begin(record_of(seed=1))
    assert begun(tmp_path / "out", seed=1)["settings"] == {"seed": 1}  # free once the first has ended


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
    with pytest.raises(ValueError, match=str(child)):
        begun(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert begun(tmp_path) is None
    os.close(ready)


def test_a_file_system_without_locks_holds_runs_too(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning):
        assert begun(tmp_path) is None


# what is replaced


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_no_record_lists_is_in_the_way(tmp_path, name, overwrite):
    (tmp_path / "parts").mkdir()
    (tmp_path / name).write_text("somebody's")
    with pytest.raises(ValueError, match=name):
        begun(tmp_path, overwrite=overwrite)
    assert content(tmp_path) == {name: b"somebody's"} and not (tmp_path / LOCK).exists()
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("nowhere")  # a link is a file too
    with pytest.raises(ValueError, match=name):
        begun(tmp_path, overwrite=overwrite)
    (tmp_path / name).unlink()
    begun(tmp_path, files=["7.npz"])  # a run of ours that does not list it
    (tmp_path / name).write_text("somebody's")
    with pytest.raises(ValueError, match=name):
        begun(tmp_path, overwrite=overwrite)
    assert (tmp_path / name).read_text() == "somebody's"


def test_overwriting_removes_what_the_record_lists_and_nothing_else(tmp_path):
    begun(tmp_path, seed=0)
    ours = [*FILES, "parts/1.npz.tmp"]
    others = ["1.npz", "notes.npz", "other.md", "notes.txt.tmp", ".tmp", "0.npz.7.tmp", "parts/0.npz", "1.npz.tmp"]
    for name in (*ours, *others):
        (tmp_path / name).write_text(name)
    assert begun(tmp_path, overwrite=True, files=["0.npz"], seed=1) is None
    assert set(content(tmp_path)) == {*others, RECORD}
    lists = {"files": ["0.npz"], "temporary": [f"{RECORD}.tmp", "0.npz.tmp"]}
    assert json.loads((tmp_path / RECORD).read_text()) == record_of(seed=1) | lists


def killed_while_writing(folder, name):
    """A run that was killed while it wrote a file."""
    child = os.fork()
    if child == 0:
        begun(folder, seed=0)
        with publishing(folder / name) as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_what_killed_runs_left_does_not_pile_up(tmp_path):
    for name in [*FILES, RECORD] * 2:
        killed_while_writing(tmp_path, name)
        assert [path for path in content(tmp_path) if path.endswith(".tmp")] == [f"{name}.tmp"]
    begun(tmp_path, seed=0)
    assert set(content(tmp_path)) == {RECORD}


@pytest.mark.parametrize("name", ["../precious.npz", "/etc/passwd", "notes.txt", "0.npz/../../precious.npz", ""])
def test_a_record_cannot_make_us_remove_what_is_not_ours(tmp_path, name):
    out, precious = tmp_path / "out", tmp_path / "precious.npz"
    begun(out)
    for path in (precious, out / "notes.txt"):
        path.write_text("precious")
    (out / RECORD).write_text(json.dumps(record_of() | {"files": [name]}))
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"record\.json"):
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
        with pytest.raises(ValueError):
            begun(out, overwrite=overwrite)
    assert (parts / "1.npz").exists()
    (tmp_path / "linked").symlink_to(tmp_path / "other")  # the folder itself may be one
    (tmp_path / "other").mkdir()
    assert begun(tmp_path / "linked") is None and (tmp_path / "other" / RECORD).exists()


def test_a_file_where_the_folder_should_be_is_told(tmp_path):
    """Also where another run is to be replaced: the error names the fix, and the file stays."""
    (tmp_path / "out").write_text("not ours")
    for place in (tmp_path / "out", tmp_path / "out" / "below"):
        for overwrite in (False, True):
            with pytest.raises((OSError, ValueError), match="--out"):
                begun(place, overwrite=overwrite)
    assert (tmp_path / "out").read_text() == "not ours"
