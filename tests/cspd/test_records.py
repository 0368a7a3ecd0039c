"""Records: whatever a file holds, it is read or told in one line; files are written whole or not at all."""

from __future__ import annotations

import os

import pytest
from folders import FILES, RECORD, begun, content, record_of, store_of
from PIL import Image

from cspd.files import NUMBER, append_json, check_file, misfit, parse_json, publishing, write_json
from cspd.runs import differences, write_png

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
        with pytest.raises(ValueError, match=r"record\.json") as error:
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
    assert len(told) < 200


def test_a_huge_record_is_not_read(tmp_path):
    with (tmp_path / RECORD).open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(ValueError):
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
        with pytest.raises(ValueError):
            parse_json(text)


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
