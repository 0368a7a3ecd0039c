"""Files that are written whole or not at all: a run that is cut off leaves the old one or the new one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image


@contextlib.contextmanager
def publishing(path: Path, new: bool = False) -> Iterator[Path]:
    """A temporary file of this process alone. It becomes `path` once it is whole, and is gone if writing it fails.

    Raises:
        FileExistsError: it was to be `new`, and another process was quicker.
        OSError: it cannot be written; the message says what to do.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if new:
            _link(temporary, path)
        else:
            os.replace(temporary, path)
    except FileExistsError:
        raise
    except OSError as error:
        may = error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS)
        remedy = "make room, then the same command goes on from here" if may else "give a place that can be written"
        raise OSError(f"{path} cannot be written ({error.strerror or error}): {remedy}") from error
    finally:
        with contextlib.suppress(OSError):  # of a folder that cannot be written: said above
            temporary.unlink(missing_ok=True)


def _link(old: Path, new: Path) -> None:
    try:
        os.link(old, new)
    except FileExistsError:
        raise
    except OSError:  # a file system without links: the next best
        os.replace(old, new)


def write_json(path: Path, content: dict, new: bool = False) -> None:
    """Writes as `publishing` does: a run that is cut off leaves the old file or the new one."""
    with publishing(path, new) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_png(path: Path, picture: Image.Image) -> None:
    """Writes as `publishing` does."""
    with publishing(path) as temporary:
        picture.save(temporary, format="png")


def check_file(path: Path, option: str) -> None:
    """Raises ValueError or OSError where no file can be written: hours of work are not to end in that."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give {option} a file in it")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}): give another {option}") from error


def make_folder(path: Path) -> None:
    """Makes a folder where there is none. Raises OSError where that fails; the message says what to do."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}): give another --out") from error
