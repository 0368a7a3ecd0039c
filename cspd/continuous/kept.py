"""What takes long to fit and is kept: in memory and on disk, found again by all that it depends on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cspd.items import DIGEST, digest_of
from cspd.keeping import is_embedded, remember
from cspd.records import publishing

ABOUT = "cspd"  # in a file's metadata; of several entries the order would not be the same in every file


class Arrays(Protocol):
    """A dataclass of arrays that can tell whether they are right."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def check(self, num_steps: int) -> None:
        """Raises ValueError, saying what is wrong, where they are none for T = `num_steps` denoising steps."""


Kind = TypeVar("Kind", bound=Arrays)


class Kept:
    """Arrays by their settings, which have T as "num_sampling_steps".

    Args:
        folders: where they are looked for, in this order; new ones are kept in the first that can be written to and is
            not of an embedded checkpoint.
    """

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self.writable = [folder for folder in folders if not is_embedded(folder)]
        self._known: dict[str, Any] = {}

    def get(self, kind: type[Kind], settings: Mapping, make: Callable[[], Kind]) -> Kind:
        """The arrays of some settings: remembered, read, or made and kept."""
        found = self.find(kind, settings)
        if found is None:
            found = make()
            self._write(found, settings)
            remember(self._known, _file_name(kind, settings), found)
        return found

    def find(self, kind: type[Kind], settings: Mapping) -> Kind | None:
        """The arrays of some settings, remembered or read; None if they have not been made."""
        name = _file_name(kind, settings)
        if name not in self._known:
            read = (_read(folder, kind, settings) for folder in self.folders)
            found = next((arrays for arrays in read if arrays is not None), None)
            if found is None:
                return None
            remember(self._known, name, found)
        return self._known[name]

    def folder_of(self, kind: type[Kind], settings: Mapping) -> Path | None:
        """The folder that some settings' arrays are read from; None if there are none on disk."""
        return next((folder for folder in self.folders if _read(folder, kind, settings) is not None), None)

    def _write(self, made: Arrays, settings: Mapping) -> None:
        """Writes to the first folder that can be written to. Warns if there is none."""
        name = _file_name(type(made), settings)
        about = json.dumps(_about(vars(made), settings))
        for folder in self.writable:
            with contextlib.suppress(OSError, SafetensorError):
                folder.mkdir(parents=True, exist_ok=True)
                with publishing(folder / name) as temporary:
                    save_file(vars(made), temporary, metadata={ABOUT: about})
                    temporary.chmod(0o644)
                return
        places = ", ".join(map(str, self.writable)) or "none given"
        what = type(made).__name__.lower()
        warnings.warn(f"the {what} cannot be kept for the next run: no folder is writable ({places})", stacklevel=3)


def _read(folder: Path, kind: type[Kind], settings: Mapping) -> Kind | None:
    """The arrays that a folder keeps of some settings; None if they are absent, damaged or of something else."""
    with contextlib.suppress(OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError):
        with safe_open(folder / _file_name(kind, settings), "np") as file:
            arrays = {field.name: file.get_tensor(field.name) for field in dataclasses.fields(kind)}
            about = json.loads(file.metadata()[ABOUT])
        if about == _about(arrays, settings):
            read = kind(**arrays)
            read.check(settings["num_sampling_steps"])
            return read
    return None


def _about(arrays: Mapping[str, np.ndarray], settings: Mapping) -> dict:
    """What a file says of itself: what it was made for, and a digest of that and of all in it."""
    return {"settings": settings, DIGEST: digest_of(arrays, settings)}


def _file_name(kind: type, settings: Mapping) -> str:
    return f"{kind.__name__.lower()}-{digest_of({}, settings)[:20]}.safetensors"
