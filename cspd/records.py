"""Files that are written whole or not at all: a run that is cut off leaves the old one or the new one."""

from __future__ import annotations

import base64
import contextlib
import errno
import io
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from PIL import Image

TEMPORARY = re.compile(r"(.+?)(\.\d+)?\.tmp")  # of the name of a file that is being written
LARGEST = 2**31  # bytes of a file that is read: a record of a million images is smaller
LONGEST = 20  # digits of its whole numbers: seeds have 19
NUMBER = (int, float)
MAYBE = (int, float, NoneType)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """An OSError of writing says what to do."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "make room, then the same command goes on from here" if is_full else "give a place that can be written"
        raise OSError(f"{path} cannot be written ({error.strerror or error}): {remedy}") from error


@contextlib.contextmanager
def publishing(path: Path) -> Iterator[Path]:
    """A temporary file, empty, of this call alone. It becomes `path` once it is whole, and is gone if writing it fails.

    A process that is killed leaves it. In the folder of a run the next one removes it (`cspd.store`).

    Raises OSError where it cannot be written; the message says what to do.
    """
    if _is_special(path):
        raise OSError(f"{path} is no ordinary file, and would be replaced by one: give the name of a file")
    with explained(path):
        temporary = _new_file_beside(path)
    try:
        with explained(path):
            yield temporary
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # of a folder that cannot be written: said above
            temporary.unlink(missing_ok=True)
        raise


def _is_special(path: Path) -> bool:
    """Whether something is there that is no file, such as /dev/null or a folder."""
    with contextlib.suppress(OSError):  # of a name that cannot be: writing says so
        return path.exists() and not path.is_file()
    return False


def _new_file_beside(path: Path) -> Path:
    """An empty file by the first of `temporary_names` that is free: what is there already may be anybody's."""
    names = temporary_names(path.name)
    while True:
        temporary = path.with_name(next(names))
        with contextlib.suppress(FileExistsError):
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            return temporary


def temporary_names(name: str) -> Iterator[str]:
    """The names that a file may have while it is written, without end; see `TEMPORARY`."""
    yield f"{name}.tmp"
    for number in itertools.count(1):
        yield f"{name}.{number}.tmp"


def write_bytes(path: Path, content: bytes) -> None:
    """Writes as `publishing` does."""
    with publishing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, content: Mapping | Sequence) -> None:
    """Writes as `publishing` does."""
    write_bytes(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def write_png(path: Path, picture: Image.Image) -> None:
    """Writes as `publishing` does."""
    write_bytes(path, png_of(picture))


def png_of(picture: Image.Image) -> bytes:
    """The content of its PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, format="png")
    return buffer.getvalue()


def link_of(png: bytes) -> str:
    """A PNG's content as a data link."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def append_json(path: Path, entry: Mapping) -> None:
    """Adds a line to a file of JSON lines; a process that is killed then loses at most this one. Raises OSError."""
    with explained(path), path.open("a") as file:
        file.write(json.dumps(entry, allow_nan=False) + "\n")


def check_file(path: Path, option: str) -> None:
    """Raises ValueError or OSError where no file can be written: hours of work are not to end in that."""
    if _is_special(path):
        folder, other = f"is a folder: give {option} a file in it", f"is no ordinary file: give another {option}"
        raise ValueError(f"{path} {folder if path.is_dir() else other}")
    try:
        _new_file_beside(path).unlink()
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}): give another {option}") from error


def make_folder(path: Path) -> None:
    """Makes a folder where there is none. Raises OSError where that fails; the message says what to do."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}): give another --out") from error


def read_text(path: Path) -> str:
    """What a record or a journal holds. Raises OSError; ValueError if it is larger than any."""
    size = path.stat().st_size
    if size > LARGEST:
        raise ValueError(f"{path.name} has {size:,} bytes")
    return path.read_text(errors="replace")


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises OSError; ValueError where it is no JSON, or has what we never write."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """What JSON text holds. Raises ValueError as `read_json`."""
    try:
        return json.loads(text, parse_float=_finite, parse_int=_whole, parse_constant=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"it has the number {text}")
    return number


def _whole(text: str) -> int:
    if len(text) > LONGEST:
        raise ValueError(f"it has a number of {len(text)} digits")
    return int(text)


def misfit(value: object, shape: object, place: str = "") -> str | None:
    """Where a value that was read from JSON is not of a shape; None where it is.

    Args:
        shape: a type or several; [shape], a list of such values; {"key": shape}, a mapping with these keys at least
            (that of "key?" may be absent); {str: shape}, a mapping of such values. No boolean is a number.
    """
    if isinstance(shape, Mapping):
        if not isinstance(value, Mapping):
            return place or "it"
        if str in shape:
            shape = dict.fromkeys(value, shape[str])
        wanted = {key.removesuffix("?"): each for key, each in shape.items() if key[-1:] != "?" or key[:-1] in value}
        inner = (misfit(value.get(key), each, f"{place}.{key}".removeprefix(".")) for key, each in wanted.items())
    elif isinstance(shape, list):
        if not isinstance(value, list):
            return place or "it"
        inner = (misfit(each, shape[0], f"{place}[{i}]") for i, each in enumerate(value))
    else:
        fits = isinstance(value, shape) and not isinstance(value, bool)  # type: ignore[arg-type]
        return None if fits else place or "it"
    return next(filter(None, inner), None)
