"""Files that are whole or not there, and the records by which a run that was cut off is known again."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

REMEDY = "another --out, or --overwrite to replace it"
SHOWN = 5  # differences that an error names, at most
ABANDONED = 600  # seconds after which a half-written file is no living process's: writing one takes less than one


def make_folder(path: Path) -> None:
    """Makes a folder where there is none, and clears one of the halves that killed processes left.

    Raises:
        OSError: it cannot be made; the message says what to do.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}): give another --out") from error
    for half in path.glob("*.[0-9]*.tmp"):
        with contextlib.suppress(OSError):  # published since, or removed by another run
            if time.time() - half.stat().st_mtime > ABANDONED:
                half.unlink()


@contextlib.contextmanager
def publishing(path: Path, new: bool = False) -> Iterator[Path]:
    """A file to write, of this process alone, that becomes `path` once it is whole, and is gone if it fails.

    Raises:
        FileExistsError: it was to be `new`, and another process was quicker.
        OSError: it cannot be written; the message says what to do.
    """
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
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
    """Writes as in `publishing`, so that a run cut off leaves the old file or the new one."""
    with publishing(path, new) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def earlier_record(path: Path, schema: str, holds: str, parts: Mapping[str, type]) -> dict | None:
    """The record at `path` of an earlier run in its folder; None where there was no run.

    Args:
        schema: the version that it must be of. holds: a pattern of files that are no one's without a record.
        parts: what it must have, and of which type.

    Raises:
        ValueError: it is damaged, another version's, or gone from beside such files; the message says what to do.
    """
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        if any(path.parent.glob(holds)):
            raise ValueError(f"{path.parent} holds images without a {path.name}: give {REMEDY}") from None
        return None
    except NotADirectoryError:
        raise ValueError(f"{path.parent} is a file, or below one: give another --out") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}): give {REMEDY}") from None
    is_ours = isinstance(record, dict) and record.get("schema") == schema
    if not is_ours or not all(isinstance(record.get(name), kind) for name, kind in parts.items()):
        raise ValueError(f"{path} is another version's, or no record of ours: give {REMEDY}")
    return record


def refuse_other(folder: Path, changes: Sequence[str]) -> None:
    """Raises ValueError, naming them, if an earlier run in `folder` differs from this one by `changes`."""
    if changes:
        more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
        raise ValueError(
            f"{folder} holds another run ({'; '.join(changes[:SHOWN])}{more}): give its settings, {REMEDY}"
        )


def differences(old: dict, new: dict, where: str = "") -> list[str]:
    """What differs between two nested settings, in words: ["request.cfg was 1.0, now 2.0"]."""
    found = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, now, place = old.get(key), new.get(key), f"{where}{key}"
        if isinstance(before, dict) and isinstance(now, dict):
            found += differences(before, now, f"{place}.")
        elif before != now:
            found.append(f"{place} was {_shown(before)}, now {_shown(now)}")
    return found


def _shown(value: object) -> str:
    text = "nothing" if value is None else "something" if isinstance(value, dict) else json.dumps(value)
    is_long = isinstance(value, list) and len(text) > 60  # of a path the end tells
    return f"{text[:40]} ... ({len(value)} of them)" if is_long else text
