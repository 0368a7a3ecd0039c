"""Records: whatever a file holds, it is read or told in one line; files are written whole or not at all."""

from __future__ import annotations

import os

import pytest
from PIL import Image

from cspd.files import append_json, check_file, publishing, write_json
from cspd.runs import write_png


def test_files_are_written_whole_or_not_at_all(tmp_path):
    for name in ("a.tmp", "a.json.tmp", f"a.json.{os.getpid()}.tmp", "a.png.tmp", "a.png.1.tmp"):
        (tmp_path / name).write_text("somebody's")  # whose names are not taken
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": {1}})
    assert (tmp_path / "a.json").read_text() == '{\n "a": 1\n}\n'
    picture = Image.new("RGB", (2, 2), "red")
    write_png(tmp_path / "a.png", picture)
    with pytest.raises(AttributeError):
        write_png(tmp_path / "a.png", None)
    assert Image.open(tmp_path / "a.png").getpixel((0, 0)) == (255, 0, 0)
    with pytest.raises(OSError):
        with publishing(tmp_path / "a.png") as temporary:
            temporary.write_bytes(b"half")
            raise OSError(28, "No space left on device")
    assert Image.open(tmp_path / "a.png").size == (2, 2)
    assert [path.read_text() for path in tmp_path.glob("*.tmp")] == ["somebody's"] * 5
    with pytest.raises(OSError, match=r"b\.txt"):
        append_json(tmp_path / "absent" / "b.txt", {})


def test_what_is_no_file_is_not_replaced(tmp_path):
    """Such as a pipe, or /dev/null: a name in its place would be an ordinary file from then on."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=name):
            write_json(tmp_path / name, {})
        with pytest.raises(ValueError, match=name):
            check_file(tmp_path / name, "--json")
    with pytest.raises(ValueError, match="--json"):
        check_file(tmp_path, "--json")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "link"}


def test_names_that_cannot_be_written_are_told_before_any_work(tmp_path):
    """Also where only the name of the temporary file is too long."""
    for length in (252, 300):
        with pytest.raises(OSError, match="--json"):
            check_file(tmp_path / ("a" * length), "--json")
    check_file(tmp_path / ("a" * 251), "--json")
    assert not list(tmp_path.iterdir())
