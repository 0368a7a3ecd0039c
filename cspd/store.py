"""The folder of a run that goes on where it was cut off, under `sample`, `compare` and `evaluate`."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cspd.lock import LOCK, locked
from cspd.records import TEMPORARY, make_folder, misfit, read_json, temporary_names, write_json

DECIDED = {"window": int, "head_calls": int, "draft": str, "gamma": int}  # what a method decides where it is left open
REMEDY = "give another --out"
SHOWN = 5  # differences, or files, that an error names, at most
LONGEST = 1000  # characters of a value that it shows whole: of a path the end tells


@dataclass
class Store:
    """The folder of one run: a record of its settings, which lists all files that the run will write.

    A run that was cut off is known by its record, and goes on if its settings are the same. No files but the record
    and those that it lists are ever replaced or removed. The temporary files of `publishing` are listed too, by names
    that nobody has taken before. As a context manager, it ends the claim on the folder.

    Attributes:
        folder: where. name: of the record's file. schema: the version of the record.
        shape: what a record must have, see `misfit`. names: a pattern of all names that it may list.
        compared: the parts that are settings; None: all.
        files, temporary: what the record lists, once the folder is claimed.
    """

    folder: Path
    name: str
    schema: str
    shape: Mapping
    names: str
    compared: Collection[str] | None = None
    files: list[str] = field(default_factory=list, init=False)
    temporary: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._held = contextlib.ExitStack()
        self._replaced: Sequence[str] = ()  # files of the run that this one replaces

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def claim(self, asked: Mapping, files: Sequence[str], overwrite: bool = False) -> dict | None:
        """Holds the folder for this run alone, until the `with` ends, and returns the record of the run to go on from.

        Args:
            asked: the record of this run. What it leaves a method to decide (`DECIDED`) fits any.
            files: names of all that it will write beside the record, relative to the folder.
            overwrite: replace another run, once this one begins.

        Returns:
            What an earlier run of the same settings left; None where there was none, or it is replaced.

        Raises:
            ValueError: another run is at work there, or was with other settings; its record is damaged; or others'
                files are in the way. The message names them and says what to do. OSError: nothing can be written.
        """
        if not (self.folder / LOCK).exists():
            self._examine(asked, files, overwrite)  # a folder that is refused is left as it was
        self._held.enter_context(locked(self.folder))
        record, listed, temporary = self._examine(asked, files, overwrite)
        self._remove(temporary)  # which a killed run left
        self.files = list(files) if overwrite else list(dict.fromkeys([*listed, *files]))
        written = [self.name, *self.files]
        taken = self._entries(written)
        self.temporary = [next(free for free in temporary_names(name) if free not in taken) for name in written]
        self._replaced = listed if overwrite else ()
        return None if overwrite else record

    def begin(self, record: Mapping) -> None:
        """Writes the record, before anything that it lists, and removes a run that is replaced. Raises OSError."""
        self._remove(self._replaced)
        for parent in _parents(self.files):
            make_folder(self.folder / parent)
        self.save(record)

    def save(self, record: Mapping) -> None:
        """Writes the record. Raises OSError as `publishing`."""
        write_json(self.folder / self.name, {**record, **self.lists()})

    def lists(self) -> dict[str, list[str]]:
        """What a record of this run lists, by the keys that it has there."""
        return {"files": self.files, "temporary": self.temporary}

    def refuse(self, changes: Sequence[str]) -> None:
        """Raises ValueError, naming them, if the run in the folder differs from this one by `changes`."""
        if changes:
            named = _several([change.removeprefix("settings.") for change in changes], "; ")
            remedy = "another --out, or --overwrite to replace it"
            raise ValueError(f"{self.folder} holds another run ({named}): give its settings, {remedy}")

    def _examine(
        self, asked: Mapping, files: Sequence[str], overwrite: bool
    ) -> tuple[dict | None, Sequence[str], Sequence[str]]:
        """The record that is there, and the files and temporary files that it lists. Raises ValueError as `claim`."""
        record = self._record()
        if record is not None and not overwrite:
            plain = json.loads(json.dumps(asked))  # as reading the file gives it
            self.refuse(differences(self._settings(record), self._settings(plain)))
        listed, temporary = self._listed(record, files, overwrite)
        entries, own = self._entries([*files, *listed]), set(listed)
        folders = [name for name in dict.fromkeys([*files, *listed, *temporary]) if entries.get(name)]
        if folders:
            raise ValueError(
                f"{self.folder} holds {_several(folders)} as folders, where files are to be written: {REMEDY}, or move"
                " them away"
            )
        foreign = [name for name in files if name in entries and name not in own]
        if foreign:
            why = f"and no {self.name}" if record is None else f"which {self.name} does not list"
            raise ValueError(
                f"{self.folder} holds {_several(foreign)}, {why}, so that this command may not write there:"
                f" {REMEDY}, or move the files away"
            )
        return record, listed, temporary

    def _record(self) -> dict | None:
        path = self.folder / self.name
        remedy = f"{REMEDY}, or remove what is not needed there yourself"
        try:
            record = read_json(path)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise ValueError(f"{self.folder} is a file, or below one: {REMEDY}") from None
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}), so that no file is known as its own: {remedy}"
            ) from None
        if not isinstance(record, dict) or record.get("schema") != self.schema:
            raise ValueError(f"{path} is not a record of this version: {remedy}")
        place = misfit(record, {**self.shape, "files?": [str], "temporary?": [str]})
        if place:
            raise ValueError(f"{path} is damaged ({place} is not as cspd writes it): {remedy}")
        return record

    def _settings(self, record: Mapping) -> dict:
        """The compared part of a record."""
        parts = record if self.compared is None else self.compared
        return {part: record[part] for part in record if part in parts and part not in self.lists()}

    def _listed(
        self, record: Mapping | None, files: Sequence[str], overwrite: bool
    ) -> tuple[Sequence[str], Sequence[str]]:
        """The files and the temporary files of the run that is there."""
        if record is None:
            return (), ()
        if "files" not in record and overwrite:
            raise ValueError(
                f"{self.folder / self.name} is of an older version and does not list its files: {REMEDY}, or remove"
                " the folder yourself"
            )
        listed, temporary = record.get("files", files), record.get("temporary", ())
        foreign = [name for name in listed if not re.fullmatch(self.names, name)]  # such as ../precious.txt
        written = {self.name, *listed}
        for name in temporary:
            match = TEMPORARY.fullmatch(name)
            if match is None or match[1] not in written:
                foreign.append(name)
        if foreign:
            raise ValueError(f"{self.folder / self.name} lists {_shown(foreign[0])}, which cspd never wrote: {REMEDY}")
        return listed, temporary

    def _entries(self, names: Iterable[str]) -> dict[str, bool]:
        """All that is in the folders where `names` are, and whether it is a folder. Raises ValueError as `claim`."""
        found = {}
        for parent in _parents(names):
            place = self.folder / parent
            if parent and (place.is_symlink() or place.is_file()):  # the folder itself may be a link
                raise ValueError(f"{place} is a link or a file, where cspd has a folder: {REMEDY}")
            with contextlib.suppress(FileNotFoundError), os.scandir(place) as entries:
                for entry in entries:
                    found[os.path.join(parent, entry.name)] = entry.is_dir(follow_symlinks=False)
        return found

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)


def _parents(names: Iterable[str]) -> list[str]:
    return sorted({os.path.dirname(name) for name in names})


def _several(names: Sequence[str], between: str = ", ") -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return between.join(names[:SHOWN]) + more


def kept_choices(settings: Mapping, earlier: Mapping | None) -> dict:
    """What was decided in an `earlier` run of the same settings, if any, and is left open in these.

    Deciding again might come to something else, and a seed's image depends on it.
    """
    return {name: (earlier or {}).get(name) for name in DECIDED if settings.get(name) is None}


def differences(old: Mapping, new: Mapping, where: str = "") -> list[str]:
    """What differs between two nested settings, in words: ["request.cfg was 1.0, now 2.0"].

    What only one of them has differs too, unless it is None. What is None in `new` for a method to decide fits any.
    """
    found = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, now = old.get(key), new.get(key)
        place = f"{where}{_called(key, now)}"
        is_open = key in DECIDED and key in new and now is None
        if isinstance(before, dict) and isinstance(now, dict):
            found += differences(before, now, f"{place}.")
        elif before != now and not is_open:
            found.append(f"{place} was {_shown(before)}, now {_shown(now)}")
    return found


def _called(key: str, value: object) -> str:
    """A setting as users know it: records of texts have them as labels."""
    are_texts = isinstance(value, list) and any(isinstance(each, str) for each in value)
    return "prompts" if key == "labels" and are_texts else key


def _shown(value: object) -> str:
    if value is None or isinstance(value, dict):
        return "nothing" if value is None else "something"
    try:
        text = json.dumps(value)
    except RecursionError:
        return "something nested too deeply"
    if isinstance(value, list) and len(text) > 60:
        return f"{text[:40]} ... ({len(value)} of them)"
    return text if len(text) < LONGEST else f"{text[:40]} ... {text[-40:]}"
