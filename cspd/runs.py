"""The folder of a run: its record and its lock."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import socket
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout
from PIL import Image

from cspd.files import (
    Place,
    Remote,
    checked_json,
    inside,
    json_bytes,
    make_folder,
    temporary_names,
    without_name,
    write_bytes,
    write_json,
)
from cspd.option import decided_names, method_now
from cspd.pixels import png_of

# The lock of a folder: one run at a time holds it. The kernel releases the lock of a killed process.

LOCK = ".cspd.lock"
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # errors of a file system that has no locks


class InUse(ValueError):
    """Another run holds the lock of a folder."""


@contextlib.contextmanager
def locked(folder: Place, seconds: float = 0) -> Iterator[None]:
    """Holds the lock of a folder inside the block, and creates the folder if necessary. Object stores have no locks.

    The lock's file says who holds it, and stays when the lock is released: another run may have opened it already.

    Args:
        seconds: to wait for a lock that another run holds.

    Raises:
        InUse: another run holds the lock; the message names it. OSError: no file can be written there.
    """
    if isinstance(folder, Remote):
        yield
        return
    make_folder(folder)
    path = folder / LOCK
    lock = FileLock(path)
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        holder = path.read_text(errors="replace").strip() or "another process"
        raise InUse(f"{folder} is in use by {holder}: wait for its end, or give another --out") from None
    except OSError as error:
        reason = error.strerror or error
        if error.errno not in WITHOUT_LOCKS:
            raise OSError(f"{path} cannot be written ({reason}): give another --out") from error
        warnings.warn(f"{folder} cannot be locked ({reason}): start no second run there", stacklevel=3)
    try:
        with contextlib.suppress(OSError):  # on a full disk the name of the holder is missing, and no more
            path.write_text(f"{_this_process()}\n", errors="backslashreplace")
        yield
    finally:
        lock.release()


def _this_process() -> str:
    program = Path(sys.argv[0]).name
    command = shlex.join([program, *sys.argv[1:]])
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} since {since}, {command}"


# The folder of a run of `sample`, `compare`, `tune` or `evaluate`, which resumes if it was interrupted.

REMEDY = "give another --out"
TURN = 60  # seconds that a process of a shared run waits for its turn to claim the folder
NAMES_SHOWN = 5  # differences, or files, that a message names, at most
LONGEST = 1000  # characters of a value in a message; paths are long
LONGEST_LIST = 100


@dataclass
class Store:
    """The folder of one run: a record of its settings, which lists all files that the run will write.

    An interrupted run resumes if its record has the same settings. Only the record and the files that it lists are ever
    replaced or removed. The record also lists the temporary files of `publishing`, under names that were free.
    The context manager releases the folder.

    Several processes can share a run: each claims the folder as `shared`, and lets the others in by `release`.

    Attributes:
        folder: its path. name: of the record's file. schema: the version of the record.
        shape: of the record, see `misfit`.
        compared: the parts of the record that are settings; None: all.
        files, temporary: the files that the record lists, once the folder is claimed.
    """

    folder: Place
    name: str
    schema: str
    shape: Mapping
    compared: Collection[str] | None = None
    files: list[str] = field(default_factory=list, init=False)
    temporary: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._held = contextlib.ExitStack()
        self._is_new = True  # there is no record yet
        self._replaced: Sequence[str] = ()  # files of the run that this one replaces

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def claim(self, asked: Mapping, files: Sequence[str], overwrite: bool = False, shared: bool = False) -> dict | None:
        """Holds the folder until the `with` block ends, and returns the record of the run to resume.

        Args:
            asked: the record of this run. Settings that it leaves to the method match any value.
            files: names of all files that it will write besides the record, relative to the folder.
            overwrite: replace another run, once this one begins.
            shared: other processes of this run may hold the folder for a moment, or be writing there.

        Returns:
            The record of an earlier run with the same settings, or None if there is no such run or it is replaced.

        Raises:
            InUse: another run uses the folder. ValueError: it used other settings; its record is damaged; or files of
                somebody else are in the way. The message names them and says what to do. OSError: nothing can be
                written.
        """
        # examine twice: a folder that is refused gets no lock, and another run may finish before we hold the lock
        if not (self.folder / LOCK).exists():
            self._examine(asked, files, overwrite)
        try:
            self._held.enter_context(locked(self.folder, TURN if shared else 0))
        except InUse:
            self._examine(asked, files, overwrite)  # other settings matter more: to wait would not help
            raise
        record, listed = self._examine(asked, files, overwrite)
        self._is_new = record is None
        if record is not None and shared and not overwrite:
            # another process may be writing a temporary file
            self.files, self.temporary = record.get("files", files), record.get("temporary", [])
            return record
        if record is not None:
            self._remove(record.get("temporary", ()))  # a killed run leaves one
        if overwrite:
            record = None
            self._replaced = listed
            self.files = list(files)
        else:
            self.files = list(dict.fromkeys([*listed, *files]))
        # listed in the record, so that the next run knows which half-written files are ours
        if not isinstance(self.folder, Remote):
            self.temporary = [_free_temporary(self.folder, name) for name in (self.name, *self.files)]
        return record

    def begin(self, record: Mapping) -> None:
        """Removes the run that is replaced, then writes the record before any file that it lists.

        Raises OSError; FileExistsError if another process began a run in an object store since `claim`.
        """
        self._remove(self._replaced)
        # a file is ours only if the record lists it, so the record comes first
        if isinstance(self.folder, Path):
            for parent in {(self.folder / name).parent for name in self.files}:
                make_folder(parent)
        elif self._is_new:
            (self.folder / self.name).create(json_bytes({**record, **self.lists()}))
            return
        self.save(record)

    def remove_temporary(self, names: Collection[str]) -> None:
        """Removes the half-written files that killed processes of a shared run left of these files."""
        self._remove(name for name in self.temporary if re.sub(r"(\.\d+)?\.tmp$", "", name) in names)

    def release(self) -> None:
        """Lets other processes of this run into the folder, which stays this run's."""
        self._held.close()

    def save(self, record: Mapping) -> None:
        """Writes the record. Raises OSError as `publishing`."""
        write_json(self.folder / self.name, {**record, **self.lists()})

    def lists(self) -> dict[str, list[str]]:
        """The lists of files, by their keys in the record."""
        return {"files": self.files, "temporary": self.temporary}

    def refuse(self, changes: Sequence[str]) -> None:
        """Raises ValueError, naming the changes, if the run in the folder differs from this one."""
        if changes:
            named = _several([change.removeprefix("settings.") for change in changes], "; ")
            remedy = "use its settings, give another --out, or replace it with --overwrite"
            raise ValueError(f"{self.folder} holds a run with other settings ({named}): {remedy}")

    def _examine(self, asked: Mapping, files: Sequence[str], overwrite: bool) -> tuple[dict | None, Sequence[str]]:
        """The record in the folder, and the files that it lists. Raises ValueError as `claim`."""
        record = self._record()
        if record is not None and not overwrite:
            plain = json.loads(json.dumps(asked))  # with the types of the file
            self.refuse(differences(self._settings(record), self._settings(plain)))
        listed = self._listed(record, files, overwrite)
        # nothing outside the folder may be written or removed, whatever a record says
        for name in (*files, *listed, *(record or {}).get("temporary", ())):
            try:
                inside(self.folder, name)
            except ValueError as error:
                raise ValueError(f"{self.folder / self.name}: {error}: {REMEDY}") from None
        self._check_free(files, listed)
        return record, listed

    def _record(self) -> dict | None:
        path = self.folder / self.name
        if isinstance(self.folder, Path) and self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file: {REMEDY}")
        if not path.exists():
            return None
        remedy = f"{REMEDY}, or remove the files that are not needed there"
        shape = {"schema": str, **self.shape, "files?": [str], "temporary?": [str]}
        record = checked_json(path, shape, remedy)
        if record["schema"] != self.schema:
            raise ValueError(f"{path} is not a record of this version of cspd: {remedy}")
        return record

    def _settings(self, record: Mapping) -> dict:
        """The compared part of a record."""
        parts = record if self.compared is None else self.compared
        settings = set(parts) - {"files", "temporary"}
        return {part: record[part] for part in record if part in settings}

    def _listed(self, record: Mapping | None, files: Sequence[str], overwrite: bool) -> Sequence[str]:
        """The files of the run in the folder."""
        if record is None:
            return ()
        path = self.folder / self.name
        if "files" not in record and overwrite:
            raise ValueError(f"{path} is of an older version, without a list of files: {REMEDY}, or remove the folder")
        return record.get("files", files)

    def _check_free(self, files: Sequence[str], listed: Sequence[str]) -> None:
        """Raises ValueError if something in the folder is in the way of `files`."""
        known = set(listed)
        in_the_way = []
        if isinstance(self.folder, Remote):
            existing = {path.name for path in self.folder.glob("*")}
            foreign = existing - known
            in_the_way = [name for name in files if name in foreign]
        else:
            for name in dict.fromkeys([*files, *listed]):
                path = self.folder / name
                is_foreign = name not in known and os.path.lexists(path)
                if is_foreign or path.is_dir():
                    in_the_way.append(name)
        if in_the_way:
            raise ValueError(
                f"{self.folder} holds {_several(in_the_way)}, not written by a run of cspd: {REMEDY}, or move the files"
                " away"
            )

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)


def _free_temporary(folder: Path, name: str) -> str:
    """The first of a file's temporary names that is free."""
    for temporary in temporary_names(name):
        if not os.path.lexists(folder / temporary):
            return temporary
    raise AssertionError  # the names never end


def _several(names: Sequence[str], between: str = ", ") -> str:
    text = between.join(names[:NAMES_SHOWN])
    more = len(names) - NAMES_SHOWN
    return f"{text} and {more} more" if more > 0 else text


def missing_files(folder: Place, names: Iterable[str], is_whole: Callable[[str], bool]) -> list[str]:
    """The files that a resumed run must write: absent ones and, after a warning, those that are not whole."""
    missing = [name for name in names if not is_whole(name)]
    damaged = [name for name in missing if (folder / name).exists()]
    if damaged:
        count = "1 file is" if len(damaged) == 1 else f"{len(damaged)} files are"
        shown = _several(damaged)
        print(f"cspd: {count} damaged, incomplete or of other images, and made again: {shown}", file=sys.stderr)
    return missing


def files_told(folder: Place, pattern: str, total: int, noun: str) -> str:
    """The number of a run's files that are in its folder, printed when the run is interrupted."""
    existing = len(list(folder.glob(pattern)))
    return f"{existing} of {total} {noun} are in {folder}/"


def earlier_choices(settings: Mapping, earlier: Mapping | None) -> dict:
    """The values that an `earlier` run with the same settings chose for settings that these leave open.

    A new choice might differ, and the image of a seed depends on it.
    """
    earlier = earlier or {}
    return {name: earlier.get(name) for name in decided_names() if settings.get(name) is None}


def differences(old: Mapping, new: Mapping, path: str = "") -> list[str]:
    """The differences between two nested settings, for people: ["request.cfg was 1.0, now 2.0"].

    A missing setting equals None. A setting that is None in `new` and left to the method matches any value.
    """
    found = []
    old, new = without_name(old), without_name(new)
    for key in dict.fromkeys([*old, *new]):
        before, now = old.get(key), new.get(key)
        if key == "method":
            before = method_now(before)
        name = f"{path}{_title(key, now)}"
        if isinstance(before, dict) and isinstance(now, dict):
            found += differences(before, now, f"{name}.")
            continue
        # a missing setting is not left open: it is a setting of another method or version
        is_open = key in decided_names() and key in new and now is None
        if before != now and not is_open:
            found.append(f"{name} was {_shown(before)}, now {_shown(now)}")
    return found


def _title(key: str, value: object) -> str:
    """The name that users know a setting by: a record has prompts as "labels"."""
    if key == "labels" and isinstance(value, list) and value and isinstance(value[0], str):
        return "prompts"
    return key


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "something"
    text = json.dumps(value)
    longest = LONGEST_LIST if isinstance(value, list) else LONGEST
    return text if len(text) < longest else f"{text[:40]} ... {text[-40:]}"


def write_png(path: Place, picture: Image.Image) -> None:
    """Writes as `publishing` does."""
    write_bytes(path, png_of(picture))
