"""The folder of a run that goes on where it was cut off, under `sample`, `compare` and `evaluate`."""

from __future__ import annotations

import contextlib
import json
import re
import time
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from cspd.records import make_folder, publishing, write_json

REMEDY = "another --out, or --overwrite to replace it"
# what the readers of a damaged .npz raise
DAMAGED = (OSError, EOFError, KeyError, TypeError, AttributeError, ValueError, zipfile.BadZipFile, zlib.error)
SHOWN = 5  # differences that an error names, at most
ABANDONED = 600  # seconds; a temporary file older than this was left by a dead process: writing one takes less than one


@dataclass(frozen=True)
class Store:
    """The folder of one run: a record of its settings, items that are whole or not there, and reports on them.

    A run that was cut off is known by its record, and goes on if its settings are the same. No other file than the
    record, the reports, and those named like items is ever replaced or removed.

    Attributes:
        folder: where. name: of the record's file. schema: the version of the record.
        parts: what a record must have, and of which type. progress: those parts of it that are no settings.
        items: a pattern of the items' names. reports: the other files' names.
    """

    folder: Path
    name: str
    schema: str
    parts: Mapping[str, type]
    items: str
    reports: Sequence[str] = ()
    progress: Sequence[str] = ()

    def earlier(self, asked: Mapping) -> dict | None:
        """The record of an earlier run in the folder; None where there was no run.

        Args:
            asked: the record of a run that would go on from there. A window that it leaves open fits any.

        Raises:
            ValueError: it is another run's, damaged, another version's, or items are there without it; the message
                names the difference and says what to do.
        """
        path = self.folder / self.name
        try:
            record = json.loads(path.read_text())
        except FileNotFoundError:
            if any(self.folder.glob(self.items)):
                raise ValueError(f"{self.folder} holds images without a {self.name}: give {REMEDY}") from None
            return None
        except NotADirectoryError:
            raise ValueError(f"{self.folder} is a file, or below one: give another --out") from None
        except (ValueError, OSError) as error:
            raise ValueError(f"{path} cannot be read ({error}): give {REMEDY}") from None
        is_ours = isinstance(record, dict) and record.get("schema") == self.schema
        if not is_ours or not all(isinstance(record.get(part), kind) for part, kind in self.parts.items()):
            raise ValueError(f"{path} is not a record of this version: give {REMEDY}")
        self.refuse(differences(self._settings(record), self._settings(asked)))
        return record

    def _settings(self, record: Mapping) -> dict:
        """The compared part of a record, as reading the file gives it."""
        return json.loads(json.dumps({part: value for part, value in record.items() if part not in self.progress}))

    def refuse(self, changes: Sequence[str]) -> None:
        """Raises ValueError, naming them, if the run in the folder differs from this one by `changes`."""
        if changes:
            named = "; ".join(change.removeprefix("settings.") for change in changes[:SHOWN])
            more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
            raise ValueError(f"{self.folder} holds another run ({named}{more}): give its settings, {REMEDY}")

    def claim(self, record: dict) -> dict:
        """Makes the folder this run's, or finds that it is, and returns the record that is there.

        Raises:
            ValueError: as `earlier`. OSError: it cannot be written.
        """
        if self.earlier(record) is None:
            make_folder(self.folder)
            with contextlib.suppress(FileExistsError):  # another run was quicker: the same, or refused below
                self.save(record, new=True)
        claimed = self.earlier(record) or record
        make_folder((self.folder / self.items).parent)
        for half in self._halves():
            with contextlib.suppress(OSError):  # published since, or removed by another run
                if time.time() - half.stat().st_mtime > ABANDONED:
                    half.unlink()
        return claimed

    def save(self, record: dict, new: bool = False) -> None:
        """Writes the record. Raises OSError as `publishing`."""
        write_json(self.folder / self.name, record, new)

    def write(self, item: str, arrays: Mapping[str, Any]) -> None:
        """Writes an .npz of `arrays`. Raises OSError as `publishing`."""
        with publishing(self.folder / item) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)

    def read(self, item: str, num: int, counted: Sequence[str]) -> dict[str, np.ndarray] | None:
        """The arrays of an item, None if it is not there, damaged, or one of those `counted` is not of `num` images."""
        try:
            with np.load(self.folder / item) as file:
                arrays = {name: file[name] for name in file.files}  # reading to the end compares checksums
            return arrays if all(len(arrays[name]) == num for name in counted) else None
        except DAMAGED:
            return None

    def clear(self) -> None:
        """Removes a run; its record last, without which items are no one's. Raises OSError as `make_folder`."""
        make_folder(self.folder)
        items = [*self.folder.glob(self.items), *self._halves()]
        for path in (*items, *(self.folder / name for name in (*self.reports, self.name))):
            path.unlink(missing_ok=True)

    def _halves(self) -> list[Path]:
        """The temporary files, of `publishing`, of our own names."""
        found = []
        for folder in {self.folder, (self.folder / self.items).parent}:
            for path in folder.glob("*.tmp"):
                name = re.sub(r"\.\d+\.tmp$", "", str(path.relative_to(self.folder)))
                if fnmatch(name, self.items) or name in (*self.reports, self.name):
                    found.append(path)
        return found


def kept_window(window: int | None, earlier: Mapping | None) -> int | None:
    """A request's window; one that is left open, None, is that of an `earlier` run of the same settings, if any.

    Measuring again might choose another, and a seed's image depends on it.
    """
    return earlier.get("window") if window is None and earlier is not None else window


def differences(old: Mapping, new: Mapping, where: str = "") -> list[str]:
    """What differs between two nested settings, in words: ["request.cfg was 1.0, now 2.0"].

    What only one of them has differs too, unless it is None. A window that is None in `new`, left open, fits any.
    """
    found = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, now, place = old.get(key), new.get(key), f"{where}{key}"
        is_open = key == "window" and key in new and now is None
        if isinstance(before, dict) and isinstance(now, dict):
            found += differences(before, now, f"{place}.")
        elif before != now and not is_open:
            found.append(f"{place} was {_shown(before)}, now {_shown(now)}")
    return found


def _shown(value: object) -> str:
    text = "nothing" if value is None else "something" if isinstance(value, dict) else json.dumps(value)
    if isinstance(value, list) and len(text) > 60:  # a path is shown whole: its end tells
        return f"{text[:40]} ... ({len(value)} of them)"
    return text
